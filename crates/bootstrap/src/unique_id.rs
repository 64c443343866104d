//! All that a member has to know of rank 0, in 128 bytes.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6},
    str::FromStr,
};

use crate::{
    Bind, JoinError, RunId, Token, address,
    service::Contact,
    token::{self, hexadecimal},
};

const MAGIC: [u8; 4] = *b"wpid";
const VERSION: u8 = 1;

/// Where rank 0 is, which run it belongs to, and the token: whoever has it may join.
///
/// Rank 0 makes one with a [`Host`] and hands it to the others by any means that keeps it
/// secret. It has as many bytes as NCCL's unique id, so what carries one can carry the other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; 128]);

/// Fields at fixed places: 0 magic, 4 version, 6 port, 8 address, 24 run, 56 token, 120 checksum.
impl UniqueId {
    /// How many bytes it has.
    pub const SIZE: usize = 128;

    fn new(address: SocketAddr) -> std::io::Result<Self> {
        let mut bytes = [0; Self::SIZE];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[6..8].copy_from_slice(&address.port().to_le_bytes());
        let ip = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        bytes[8..24].copy_from_slice(&ip.octets());
        bytes[24..40].copy_from_slice(&token::nonce()?[..16]);
        bytes[56..88].copy_from_slice(&token::nonce()?);
        let checksum = checksum(&bytes);
        bytes[120..].copy_from_slice(&checksum);
        Ok(Self(bytes))
    }

    /// Reads what [`as_bytes`](Self::as_bytes) gave.
    ///
    /// # Errors
    ///
    /// The bytes are no id, or a damaged one.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ParseUniqueIdError> {
        let bytes: [u8; Self::SIZE] =
            bytes.try_into().map_err(|_| ParseUniqueIdError { reason: "it has another length" })?;
        if bytes[..4] != MAGIC || bytes[4] != VERSION {
            return Err(ParseUniqueIdError { reason: "it was made by something else" });
        }
        if bytes[120..] != checksum(&bytes) {
            return Err(ParseUniqueIdError { reason: "its checksum is wrong" });
        }
        Ok(Self(bytes))
    }

    /// The bytes; they hold the token.
    pub const fn as_bytes(&self) -> &[u8; 128] {
        &self.0
    }

    /// Where rank 0 listens.
    pub fn address(&self) -> SocketAddr {
        let port = u16::from_le_bytes([self.0[6], self.0[7]]);
        let mut ip = [0; 16];
        ip.copy_from_slice(&self.0[8..24]);
        let address = SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, 0);
        SocketAddr::new(address.ip().to_canonical(), port)
    }

    /// The run it belongs to, a random name.
    pub fn run(&self) -> RunId {
        RunId::from(hexadecimal(&self.0[24..40]).as_str())
    }

    fn token(&self) -> Token {
        Token::from(hexadecimal(&self.0[56..88]).as_str())
    }

    pub(crate) fn contact(&self) -> Contact {
        Contact { address: self.address(), token: self.token(), run: self.run() }
    }
}

fn checksum(bytes: &[u8; 128]) -> [u8; 8] {
    let mut checksum = [0; 8];
    checksum.copy_from_slice(&blake3::hash(&bytes[..120]).as_bytes()[..8]);
    checksum
}

impl fmt::Display for UniqueId {
    /// 256 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hexadecimal(&self.0))
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UniqueId({} of run {})", self.address(), self.run())
    }
}

impl FromStr for UniqueId {
    type Err = ParseUniqueIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let wrong = ParseUniqueIdError { reason: "it is not 256 hexadecimal digits" };
        if text.len() != 2 * Self::SIZE || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(wrong);
        }
        let bytes = (0..Self::SIZE).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16));
        let bytes: Vec<u8> = bytes.collect::<Result<_, _>>().map_err(|_| wrong)?;
        Self::from_bytes(&bytes)
    }
}

/// Something is no unique id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no unique id: {reason}")]
pub struct ParseUniqueIdError {
    reason: &'static str,
}

/// Rank 0's end of a rendezvous that is made before it is joined: it listens already, on a free port.
#[derive(Debug)]
pub struct Host {
    pub(crate) listener: std::net::TcpListener,
    id: UniqueId,
}

impl Host {
    /// Listens on a free port, with a new token.
    ///
    /// Where `bind` means every interface, the address of the id is the one that leads out of this host;
    /// members on other networks need one made for their interface.
    ///
    /// # Errors
    ///
    /// There is no such interface, or the system has no port or no random bytes to give.
    pub fn new(bind: &Bind) -> Result<Self, JoinError> {
        let listener = address::listen(bind, 0)?;
        let mut at = listener.local_addr().map_err(JoinError::system("ask for the port"))?;
        if at.ip().is_unspecified() {
            at.set_ip(address::outward());
        }
        let id = UniqueId::new(at).map_err(JoinError::system("make a token"))?;
        Ok(Self { listener, id })
    }

    /// What the other members need.
    pub const fn id(&self) -> UniqueId {
        self.id
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id() -> UniqueId {
        UniqueId::new("[fe80::1]:4711".parse().unwrap()).unwrap()
    }

    #[test]
    fn an_id_survives_its_text_and_its_bytes() {
        for address in ["127.0.0.1:80", "[2001:db8::1]:65535"] {
            let address: SocketAddr = address.parse().unwrap();
            let id = UniqueId::new(address).unwrap();
            assert_eq!(id.address(), address);
            assert_eq!(id.to_string().parse(), Ok(id));
            assert_eq!(UniqueId::from_bytes(id.as_bytes()), Ok(id));
        }
    }

    #[test]
    fn ids_differ_and_keep_their_secret() {
        assert_ne!(id(), id());
        let id = id();
        assert!(!format!("{id:?}").contains(id.token().reveal()));
    }

    proptest! {
        #[test]
        fn a_changed_id_is_refused(at in 0_usize..128, change in 1_u8..) {
            let mut bytes = *id().as_bytes();
            bytes[at] ^= change;
            prop_assert!(UniqueId::from_bytes(&bytes).is_err());
        }

        #[test]
        fn no_text_panics(text in ".{0,300}") {
            prop_assert!(text.parse::<UniqueId>().is_err());
        }
    }
}
