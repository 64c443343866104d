//! Where to listen and where to go.

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs as _},
    sync::mpsc,
    thread,
};

use warpweft_core_types::Deadline;

use crate::{Bind, JoinError};

/// Connections that the system may queue before they are taken.
#[cfg(unix)]
const BACKLOG: i32 = 4096;

/// Listens on `port` of the address that `bind` means; 0 lets the system choose.
pub(crate) fn listen(bind: &Bind, port: u16) -> Result<TcpListener, JoinError> {
    listen_at(SocketAddr::new(listening_ip(bind)?, port))
}

pub(crate) fn listen_at(address: SocketAddr) -> Result<TcpListener, JoinError> {
    let listener = TcpListener::bind(address).map_err(|cause| match cause.kind() {
        ErrorKind::AddrInUse => JoinError::AddrInUse { address },
        _ => JoinError::System { action: "listen for other members", cause },
    })?;
    // A whole job connects at once, and the standard library's queue is short: a connection that does not
    // fit is tried again by the system a second later.
    #[cfg(unix)]
    rustix::net::listen(&listener, BACKLOG)
        .map_err(|error| JoinError::System { action: "listen for other members", cause: error.into() })?;
    Ok(listener)
}

fn listening_ip(bind: &Bind) -> Result<IpAddr, JoinError> {
    match bind {
        Bind::Loopback => Ok(loopback()),
        Bind::Any => Ok(Ipv4Addr::UNSPECIFIED.into()),
        Bind::Interface(name) => interface(name),
    }
}

/// IPv4's, or IPv6's where there is no other.
fn loopback() -> IpAddr {
    match TcpListener::bind((Ipv4Addr::LOCALHOST, 0)) {
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => Ipv6Addr::LOCALHOST.into(),
        _ => Ipv4Addr::LOCALHOST.into(),
    }
}

/// The first address of an interface, IPv4 before IPv6.
fn interface(name: &str) -> Result<IpAddr, JoinError> {
    let interfaces = if_addrs::get_if_addrs().map_err(JoinError::system("list the network interfaces"))?;
    let of_name = interfaces.iter().filter(|interface| interface.name == name);
    let mut addresses: Vec<IpAddr> = of_name.map(if_addrs::Interface::ip).collect();
    // Addresses of one link alone do not name their interface when they are sent to others.
    addresses.retain(|ip| !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local()));
    addresses.sort_by_key(IpAddr::is_ipv6);
    addresses.first().copied().ok_or_else(|| JoinError::UnknownInterface {
        wanted: name.to_owned(),
        available: interfaces.iter().map(|each| format!("{} ({})", each.name, each.ip())).collect(),
    })
}

/// The address of this host that others are most likely to reach it at; loopback if there is none.
pub(crate) fn outward() -> IpAddr {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    let mut addresses: Vec<IpAddr> = interfaces.iter().map(if_addrs::Interface::ip).collect();
    addresses.retain(|ip| !ip.is_loopback() && !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local()));
    addresses.sort_by_key(IpAddr::is_ipv6);
    addresses.first().copied().unwrap_or_else(loopback)
}

/// The addresses of `host:port`; names are looked up in a thread, since that cannot be given a deadline.
pub(crate) fn resolve(text: &str, deadline: Deadline) -> Result<Vec<SocketAddr>, JoinError> {
    let bad = |reason: String| JoinError::BadAddress { address: text.to_owned(), reason };
    if let Ok(address) = text.parse() {
        return Ok(vec![address]);
    }
    let (name, port) = text.rsplit_once(':').ok_or_else(|| bad("it has no port".into()))?;
    let port: u16 = port.parse().map_err(|_| bad(format!("{port:?} is no port")))?;
    let name = name.trim_start_matches('[').trim_end_matches(']').to_owned();
    if name == "localhost" {
        return Ok(vec![SocketAddr::new(loopback(), port)]);
    }
    let (sender, found) = mpsc::channel();
    thread::Builder::new()
        .name("warpweft-resolve".into())
        .spawn(move || {
            let addresses = (name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            // Nobody may be waiting any more.
            let _late = sender.send(addresses);
        })
        .map_err(JoinError::system("start a thread"))?;
    match found.recv_timeout(deadline.remaining()) {
        Ok(Ok(addresses)) if !addresses.is_empty() => Ok(addresses),
        Ok(Ok(_)) => Err(bad("it has no address".into())),
        Ok(Err(error)) => Err(bad(error.to_string())),
        Err(_) => Err(bad("its address was not found in time".into())),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn addresses_read() {
        let resolve = |text| resolve(text, Deadline::within(Duration::from_secs(5)));
        assert_eq!(resolve("127.0.0.1:80").unwrap(), ["127.0.0.1:80".parse().unwrap()]);
        assert_eq!(resolve("[::1]:80").unwrap(), ["[::1]:80".parse().unwrap()]);
        assert!(resolve("localhost:80").unwrap()[0].ip().is_loopback());
        for text in ["", "host", "127.0.0.1", "127.0.0.1:70000", "127.0.0.1:x"] {
            assert!(matches!(resolve(text), Err(JoinError::BadAddress { .. })), "{text}");
        }
    }

    #[test]
    fn an_unknown_interface_is_told_the_known_ones() {
        let error = listen(&Bind::Interface("nowhere0".into()), 0).unwrap_err();
        let JoinError::UnknownInterface { wanted, available } = error else { panic!("{error}") };
        assert_eq!(wanted, "nowhere0");
        assert!(available.iter().any(|each| each.contains("127.0.0.1")), "{available:?}");
    }

    #[test]
    fn a_port_in_use_is_said_at_once() {
        let first = listen(&Bind::Loopback, 0).unwrap();
        let address = first.local_addr().unwrap();
        let error = listen(&Bind::Loopback, address.port()).unwrap_err();
        assert!(matches!(error, JoinError::AddrInUse { address: it } if it == address), "{error}");
    }
}
