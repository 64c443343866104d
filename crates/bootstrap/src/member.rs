//! Who is in a group.

use std::{collections::BTreeMap, fmt, fs, net::SocketAddr, path::PathBuf, process};

use serde::{Deserialize, Serialize};
use warpweft_core_types::DeviceUuid;

/// A member's position in its group, from 0.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

impl Rank {
    /// As an index into a list by rank.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The ranks of a group of `size`.
    pub fn all(size: u32) -> impl DoubleEndedIterator<Item = Self> {
        (0..size).map(Self)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rank({})", self.0)
    }
}

/// Names a running kernel: processes with the same one can share memory and descriptors.
///
/// Containers of one machine have the same id, whatever their host names are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HostId([u8; 16]);

impl HostId {
    /// An id made of anything that is unique to a host.
    pub fn of(text: &str) -> Self {
        let mut id = [0; 16];
        id.copy_from_slice(&blake3::hash(text.as_bytes()).as_bytes()[..16]);
        Self(id)
    }

    /// This host: by the boot id where the system has one, by its name elsewhere.
    pub fn here() -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        boot.map_or_else(|_| Self::of(&host_name()), |id| Self::of(id.trim()))
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostId({self})")
    }
}

/// Where a member takes descriptors from others of its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MailboxAddress {
    /// A name that no file stands for, known within a network namespace.
    Abstract(String),
    /// A socket in a folder that only this user can enter.
    Path(PathBuf),
}

/// What a member says of itself, and its place in the group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemberInfo {
    /// Its position.
    pub rank: Rank,
    /// Its position in the group before, if this one was formed from another.
    pub previous: Option<Rank>,
    /// Its host.
    pub host: HostId,
    /// Its host's name, for people.
    pub host_name: String,
    /// Its process.
    pub pid: u32,
    /// What its process number is relative to: members with another value cannot look its process up.
    pub pid_space: u64,
    /// Devices that it wants for itself.
    pub devices: Vec<DeviceUuid>,
    /// Versions that have to be the same in the whole group, by component.
    pub versions: BTreeMap<String, String>,
    /// Where it listens if the group has to form anew.
    pub address: SocketAddr,
    /// Where it takes descriptors, if it can.
    pub mailbox: Option<MailboxAddress>,
}

impl MemberInfo {
    /// This process; the caller fills in the rest.
    pub(crate) fn here(rank: Rank, address: SocketAddr) -> Self {
        Self {
            rank,
            previous: None,
            host: HostId::here(),
            host_name: host_name(),
            pid: process::id(),
            pid_space: pid_space(),
            devices: Vec::new(),
            versions: BTreeMap::new(),
            address,
            mailbox: None,
        }
    }

    /// Whether both run on one kernel.
    pub fn shares_host(&self, other: &Self) -> bool {
        self.host == other.host
    }

    /// Whether each can look the other's process up by its number.
    pub(crate) fn shares_pids(&self, other: &Self) -> bool {
        self.shares_host(other) && self.pid_space == other.pid_space
    }
}

fn host_name() -> String {
    #[cfg(unix)]
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    let name = std::env::var("COMPUTERNAME").unwrap_or_default();
    name
}

/// The inode of the namespace that process numbers belong to; 0 where there is one for all.
fn pid_space() -> u64 {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::MetadataExt as _;
        fs::metadata("/proc/self/ns/pid").map_or(0, |meta| meta.ino())
    }
    #[cfg(not(target_os = "linux"))]
    0
}
