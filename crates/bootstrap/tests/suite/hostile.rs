//! Callers that are no members.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Mutex,
    time::{Duration, Instant},
};

use warpweft_bootstrap::{Bind, Group, Host, JoinConfig, JoinError, LimitConfig, Rendezvous};

use crate::{SOON, config, each, in_threads};

/// Forms a group of three while `disturb` does what it wants with the port.
fn form_despite(disturb: impl Fn(SocketAddr) + Sync) {
    let host = Host::new(&Bind::Loopback).unwrap();
    let id = host.id();
    let host = Mutex::new(Some(host));
    let groups = in_threads(4, |number| {
        let rendezvous = match number {
            0 => Rendezvous::Hosting(host.lock().unwrap().take().unwrap()),
            3 => {
                disturb(id.address());
                return None;
            }
            _ => Rendezvous::Id(id),
        };
        let limits = LimitConfig { stranger_time: Duration::from_millis(300), ..LimitConfig::default() };
        Some(Group::join(rendezvous, JoinConfig { limits, ..config(number, 3) }, SOON).unwrap())
    });
    let groups: Vec<Group> = groups.into_iter().flatten().collect();
    disturb(id.address());
    each(&groups, |group| group.barrier("met", SOON).unwrap());
}

/// Waits until the other side ends the connection, and returns what it sent before.
fn until_closed(mut stream: &TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(SOON)).unwrap();
    let mut said = Vec::new();
    // A reset is an end as well.
    let _end = stream.read_to_end(&mut said);
    said
}

#[test]
fn garbage_is_dropped_at_once() {
    form_despite(|address| {
        let mut random = fastrand::Rng::with_seed(7);
        for size in [1, 9, 10, 100, 100_000] {
            let mut stream = TcpStream::connect(address).unwrap();
            let garbage: Vec<u8> = (0..size).map(|_| random.u8(..)).collect();
            // It may be cut off in the middle.
            let _cut = stream.write_all(&garbage);
            let started = Instant::now();
            until_closed(&stream);
            assert!(started.elapsed() < Duration::from_secs(5), "{size}");
        }
    });
}

#[test]
fn a_long_message_is_refused_by_its_header() {
    form_despite(|address| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"wpwf\x01\x00\xff\xff\xff\xff").unwrap();
        until_closed(&stream);
    });
}

#[test]
fn a_half_open_connection_is_given_up() {
    form_despite(|address| {
        let started = Instant::now();
        let stream = TcpStream::connect(address).unwrap();
        let said = until_closed(&stream);
        assert!(said.starts_with(b"wpwf"), "a challenge, and nothing else");
        assert!(started.elapsed() < Duration::from_secs(10));
    });
}

#[test]
fn one_that_never_stops_talking_is_cut_off() {
    form_despite(|address| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_write_timeout(Some(SOON)).unwrap();
        // A beat reads, and no stranger sends one; what follows is thrown away.
        stream.write_all(b"wpwf\x01\x00\x01\x00\x00\x00\x04").unwrap();
        let (started, more) = (Instant::now(), vec![0; 1 << 20]);
        // Several writers keep more in the socket than one reader takes out.
        in_threads(4, |_| {
            let mut stream = &stream;
            while stream.write_all(&more).is_ok() {
                assert!(started.elapsed() < SOON, "it is still listened to");
            }
        });
    });
}

#[test]
fn ten_thousand_connections_do_not_keep_members_away() {
    // Fewer than the descriptors that a process commonly may have.
    const AT_ONCE: usize = 400;
    form_despite(|address| {
        let mut open = std::collections::VecDeque::new();
        for _ in 0..10_000 {
            open.extend(TcpStream::connect(address));
            if open.len() > AT_ONCE {
                open.pop_front();
            }
        }
    });
}

#[test]
fn another_service_is_told_apart_from_rank_0() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let started = Instant::now();
    let results = in_threads(2, |number| {
        if number == 1 {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
            until_closed(&stream);
            return None;
        }
        let rendezvous = Rendezvous::tcp(address.to_string(), "t".into(), "r".into());
        Some(Group::join(rendezvous, config(1, 2), SOON).unwrap_err())
    });
    let error = results[0].as_ref().unwrap();
    assert!(matches!(error, JoinError::Foreign { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_silent_service_ends_by_the_deadline() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let rendezvous = Rendezvous::tcp(address.to_string(), "t".into(), "r".into());
    let started = Instant::now();
    let error = Group::join(rendezvous, config(1, 2), Duration::from_millis(300)).unwrap_err();
    assert!(matches!(error, JoinError::TimedOut { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(5));
}
