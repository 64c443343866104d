//! Every way to meet, and every way not to.

use std::{
    fs,
    net::TcpListener,
    time::{Duration, Instant},
};

use tempfile::tempdir;
use warpweft_bootstrap::{
    Bind, Group, Host, JoinConfig, JoinError, Meeting, PulseConfig, Rank, Refusal, Rendezvous, RunId, Token,
};

use crate::{SOON, config, each, groups, in_threads, join_each};

const BRIEFLY: Duration = Duration::from_millis(400);

fn refusal(result: &Result<Group, JoinError>) -> &Refusal {
    match result {
        Err(JoinError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

/// A port that nobody listens on, below those that the system gives to connections.
fn free_port() -> String {
    loop {
        let address = format!("127.0.0.1:{}", fastrand::u16(10_000..32_000));
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}

fn tcp(address: &str, token: &str, run: &str) -> Rendezvous {
    Rendezvous::tcp(address, Token::from(token), RunId::from(run))
}

#[test]
fn members_meet_at_a_port() {
    let address = free_port();
    let groups = in_threads(3, |rank| Group::join(tcp(&address, "t", "r"), config(rank, 3), SOON).unwrap());
    for (group, rank) in groups.iter().zip(0..) {
        assert_eq!((group.rank(), group.size(), group.epoch()), (Rank(rank), 3, 0));
        assert_eq!(group.run(), &RunId::from("r"));
        let ranks: Vec<Rank> = group.members().iter().map(|member| member.rank).collect();
        assert_eq!(ranks, [Rank(0), Rank(1), Rank(2)]);
        assert!(group.members().iter().all(|member| member.pid == std::process::id()));
    }
    each(&groups, |group| group.barrier("met", SOON).unwrap());
}

#[test]
fn members_meet_by_an_id() {
    let host = Host::new(&Bind::Loopback).unwrap();
    let id = host.id().to_string();
    let host = std::sync::Mutex::new(Some(host));
    let groups = in_threads(3, |rank| {
        let rendezvous = match rank {
            0 => Rendezvous::Hosting(host.lock().unwrap().take().unwrap()),
            _ => Rendezvous::Id(id.parse().unwrap()),
        };
        Group::join(rendezvous, config(rank, 3), SOON).unwrap()
    });
    each(&groups, |group| group.barrier("met", SOON).unwrap());
}

#[test]
fn members_meet_by_a_file_that_is_gone_afterwards() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("rendezvous");
    let run = RunId::from("run 7");
    let groups = in_threads(3, |rank| {
        Group::join(Rendezvous::file(&path, run.clone()), config(rank, 3), SOON).unwrap()
    });
    each(&groups, |group| group.barrier("met", SOON).unwrap());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_stale_file_is_not_used() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("rendezvous");
    // A run that crashed: its rank 0 is gone, its file is not.
    let kept = in_threads(2, |rank| {
        let rendezvous = Rendezvous::file(&path, RunId::from("crashed"));
        if rank == 1 {
            // Nobody else comes, so the file stays for as long as rank 0 waits.
            let text = loop {
                if let Ok(text) = fs::read_to_string(&path) {
                    break text;
                }
                std::thread::yield_now();
            };
            return text;
        }
        let error = Group::join(rendezvous, config(0, 2), BRIEFLY).unwrap_err();
        assert!(
            matches!(&error, JoinError::Refused(Refusal::Missing { ranks }) if *ranks == [Rank(1)]),
            "{error}"
        );
        String::new()
    });
    fs::write(&path, &kept[1]).unwrap();

    let reader = |run: &str| Group::join(Rendezvous::file(&path, RunId::from(run)), config(1, 2), BRIEFLY);
    let started = Instant::now();
    let error = reader("fresh").unwrap_err();
    assert!(
        matches!(&error, JoinError::StaleFile { found, .. } if *found == RunId::from("crashed")),
        "{error}"
    );
    let error = reader("crashed").unwrap_err();
    assert!(matches!(error, JoinError::Unreachable { .. }), "the same run, and nobody there: {error}");
    assert!(started.elapsed() < Duration::from_secs(10));

    // The new run replaces the file, and a reader that had only seen the stale one goes on to join.
    let groups = in_threads(2, |rank| {
        Group::join(Rendezvous::file(&path, RunId::from("fresh")), config(rank, 2), SOON).unwrap()
    });
    each(&groups, |group| group.barrier("met", SOON).unwrap());
}

#[test]
fn what_is_no_rendezvous_file_is_waited_out() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("rendezvous");
    for text in [None, Some(""), Some("garbage"), Some("warpweft rendezvous 1\nrun r\nid 00\n")] {
        if let Some(text) = text {
            fs::write(&path, text).unwrap();
        }
        let error =
            Group::join(Rendezvous::file(&path, RunId::from("r")), config(1, 2), BRIEFLY).unwrap_err();
        assert!(matches!(error, JoinError::NotPublished { .. }), "{text:?}: {error}");
    }
}

#[test]
fn one_meeting_serves_group_after_group() {
    let meeting = Meeting::new();
    for _ in 0..3 {
        let groups = in_threads(2, |rank| {
            Group::join(Rendezvous::Meeting(meeting.clone()), config(rank, 2), SOON).unwrap()
        });
        each(&groups, |group| group.barrier("met", SOON).unwrap());
    }
}

#[test]
fn a_rank_that_never_comes_is_named_to_all() {
    let started = Instant::now();
    let meeting = Meeting::new();
    // Rank 0 waits long enough for those that do come, however busy the machine is, and its end is everybody's.
    let results = in_threads(3, |rank| {
        let limit = if rank == 0 { Duration::from_secs(2) } else { SOON };
        Group::join(Rendezvous::Meeting(meeting.clone()), config(rank, 5), limit)
    });
    assert!(started.elapsed() < SOON);
    for result in &results {
        let Refusal::Missing { ranks } = refusal(result) else { panic!("{result:?}") };
        assert!(ranks.contains(&Rank(3)) && ranks.contains(&Rank(4)), "{ranks:?}");
    }
    assert!(results[0].as_ref().unwrap_err().to_string().contains("ranks 3, 4 did not come"), "{results:?}");
}

#[test]
fn without_rank_0_the_address_is_named() {
    let address = free_port();
    let error = Group::join(tcp(&address, "t", "r"), config(1, 2), BRIEFLY).unwrap_err();
    assert!(
        matches!(&error, JoinError::Unreachable { address: it, .. } if it.to_string() == address),
        "{error}"
    );
}

#[test]
fn a_device_of_two_ranks_is_refused_to_all() {
    let uuid = warpweft_core_types::DeviceUuid::from_bytes(*b"0123456789abcdef");
    let results = join_each(4, |rank| JoinConfig {
        devices: if rank % 2 == 1 { vec![uuid] } else { Vec::new() },
        ..config(rank, 4)
    });
    for result in &results {
        let Refusal::DuplicateDevice { ranks, uuid: it } = refusal(result) else { panic!("{result:?}") };
        assert_eq!((*ranks, *it), ([Rank(1), Rank(3)], uuid));
    }
}

#[test]
fn versions_have_to_be_the_same() {
    let results = join_each(3, |rank| {
        let mut config = config(rank, 3);
        config.versions.insert("nccl".into(), if rank == 2 { "2.18".into() } else { "2.28".into() });
        config
    });
    for result in &results {
        let Refusal::VersionMismatch { component, ranks, versions } = refusal(result) else {
            panic!("{result:?}")
        };
        assert_eq!(component, "nccl");
        assert_eq!(ranks[1], Rank(2));
        assert_eq!(*versions, ["2.28".to_owned(), "2.18".to_owned()]);
    }
}

#[test]
fn a_rank_that_comes_twice_is_refused_to_all() {
    let meeting = Meeting::new();
    let results = in_threads(3, |number| {
        let rank = [0, 1, 1][number as usize];
        Group::join(Rendezvous::Meeting(meeting.clone()), config(rank, 3), SOON)
    });
    for result in &results {
        assert!(matches!(refusal(result), Refusal::DuplicateRank { rank: Rank(1), .. }), "{result:?}");
    }
}

#[test]
fn another_size_is_refused_to_all() {
    let results = join_each(3, |rank| config(rank, if rank == 1 { 4 } else { 3 }));
    for result in &results {
        assert_eq!(*refusal(result), Refusal::SizeMismatch { rank: Rank(1), found: 4, expected: 3 });
    }
}

#[test]
fn strangers_do_not_disturb_a_job() {
    let address = free_port();
    let results = in_threads(4, |number| match number {
        0 | 1 => Group::join(tcp(&address, "token", "run"), config(number, 2), SOON),
        2 => Group::join(tcp(&address, "another", "run"), config(1, 2), SOON),
        _ => Group::join(tcp(&address, "token", "another"), config(1, 2), SOON),
    });
    let groups: Vec<&Group> = results[..2].iter().map(|result| result.as_ref().unwrap()).collect();
    assert_eq!(groups.len(), 2);
    assert!(matches!(refusal(&results[2]), Refusal::TokenMismatch), "{:?}", results[2]);
    let Refusal::RunMismatch { expected, found } = refusal(&results[3]) else { panic!("{:?}", results[3]) };
    assert_eq!((expected.as_str(), found.as_str()), ("run", "another"));
    let late = Group::join(tcp(&address, "token", "run"), config(1, 2), SOON);
    assert_eq!(*refusal(&late), Refusal::Complete);
}

#[test]
fn a_second_job_on_the_port_is_told_at_once() {
    let address = free_port();
    let _groups = in_threads(2, |rank| Group::join(tcp(&address, "t", "r"), config(rank, 2), SOON).unwrap());
    let started = Instant::now();
    let error = Group::join(tcp(&address, "u", "s"), config(0, 2), SOON).unwrap_err();
    assert!(matches!(&error, JoinError::AddrInUse { address: it } if it.to_string() == address), "{error}");
    assert!(started.elapsed() < Duration::from_secs(1));
}

#[test]
fn a_port_is_free_again_as_soon_as_its_group_is() {
    let address = free_port();
    for _ in 0..5 {
        let groups =
            in_threads(3, |rank| Group::join(tcp(&address, "t", "r"), config(rank, 3), SOON).unwrap());
        each(&groups, |group| group.barrier("met", SOON).unwrap());
    }
}

#[test]
fn loopback_is_left_only_when_told() {
    let join = |address: &str, bind: Bind| {
        let config = JoinConfig { bind, ..config(0, 2) };
        Group::join(tcp(address, "t", "r"), config, BRIEFLY).unwrap_err()
    };
    let error = join("192.0.2.1:4711", Bind::Loopback);
    assert!(matches!(error, JoinError::NotLoopback { .. }), "{error}");
    let error = join("127.0.0.1:4711", Bind::Interface("nowhere0".into()));
    assert!(
        matches!(&error, JoinError::UnknownInterface { available, .. } if !available.is_empty()),
        "{error}"
    );
    let error = join("127.0.0.1:0", Bind::Loopback);
    assert!(matches!(error, JoinError::InvalidConfig { .. }), "{error}");
    let error = join("no port here", Bind::Loopback);
    assert!(matches!(error, JoinError::BadAddress { .. }), "{error}");
}

#[test]
fn every_interface_and_the_loopback_interface_serve() {
    for bind in [Bind::Any, Bind::Interface("lo".into())] {
        let host = Host::new(&bind).unwrap();
        let id = host.id();
        let host = std::sync::Mutex::new(Some(host));
        let groups = in_threads(2, |rank| {
            let rendezvous = match rank {
                0 => Rendezvous::Hosting(host.lock().unwrap().take().unwrap()),
                _ => Rendezvous::Id(id),
            };
            let config = JoinConfig { bind: bind.clone(), ..config(rank, 2) };
            Group::join(rendezvous, config, SOON).unwrap()
        });
        each(&groups, |group| group.barrier("met", SOON).unwrap());
        assert!(groups[1].members().iter().all(|member| !member.address.ip().is_unspecified()), "{bind:?}");
    }
}

#[test]
fn contradictions_are_refused_before_anything_is_opened() {
    let check = |config: JoinConfig| {
        let error = Group::join(Rendezvous::Meeting(Meeting::new()), config, SOON).unwrap_err();
        assert!(matches!(error, JoinError::InvalidConfig { .. }), "{error}");
    };
    check(config(0, 0));
    check(config(2, 2));
    let pulse = PulseConfig { interval: Duration::from_secs(2), ..PulseConfig::default() };
    check(JoinConfig { pulse, ..config(0, 2) });
}

#[test]
fn sixty_four_members_meet_within_a_second_each() {
    let groups = groups(64);
    assert_eq!(groups.len(), 64);
    let gathered = each(&groups, |group| group.all_gather("ranks", &[7], SOON).unwrap().len());
    assert!(gathered.iter().all(|count| *count == 64));
}

#[test]
fn a_member_that_comes_again_before_the_group_is_complete_takes_its_place() {
    let address = free_port();
    let gave_up = std::sync::Barrier::new(2);
    let results = in_threads(3, |number| {
        if number == 1 {
            let first = Group::join(tcp(&address, "t", "r"), config(1, 3), BRIEFLY);
            assert!(first.is_err(), "rank 2 waits for this");
        }
        if number > 0 {
            gave_up.wait();
        }
        Group::join(tcp(&address, "t", "r"), config(number, 3), SOON)
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}
