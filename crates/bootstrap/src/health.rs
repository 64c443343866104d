//! How members are.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What is known of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Health {
    /// It answers.
    Alive,
    /// It does not answer, but its connection and its process are still there.
    Suspect {
        /// Its process was stopped (SIGSTOP, a debugger), so it may go on later.
        stopped: bool,
    },
    /// It will not come back into this group.
    Lost(Loss),
}

impl Health {
    /// Whether it still belongs to the group.
    pub const fn is_present(self) -> bool {
        !matches!(self, Self::Lost(_))
    }
}

/// How a member was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Loss {
    /// It left by dropping its group.
    Left,
    /// Its connection ended: its process died, or the network cut it off.
    Disconnected,
    /// Its process is gone.
    Exited,
    /// It is on another host and said nothing for longer than is allowed.
    Silent,
    /// It said something that no member says.
    Incomprehensible,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Left => "it left",
            Self::Disconnected => "its connection ended",
            Self::Exited => "its process is gone",
            Self::Silent => "it has not answered for too long",
            Self::Incomprehensible => "it broke the protocol",
        })
    }
}

/// A member's health has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HealthChange {
    /// The member.
    pub rank: crate::Rank,
    /// What is known of it since.
    pub health: Health,
}

/// What the system says of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessState {
    Running,
    Stopped,
    Gone,
}

impl ProcessState {
    /// Asks the system; nothing is known of processes elsewhere than on Linux.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        if !cfg!(target_os = "linux") {
            return None;
        }
        match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => Self::read(&stat),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Some(Self::Gone),
            // A process can end while its file is read.
            Err(_) => None,
        }
    }

    /// The letter behind the program's name, which may itself hold spaces and brackets.
    fn read(stat: &str) -> Option<Self> {
        match stat.rsplit_once(") ")?.1.chars().next()? {
            'T' | 't' => Some(Self::Stopped),
            'Z' | 'X' | 'x' => Some(Self::Gone),
            _ => Some(Self::Running),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_read_from_behind_the_name() {
        for (stat, state) in [
            ("7 (sh) S 1 7", Some(ProcessState::Running)),
            ("7 (a) T (b) T 1 7", Some(ProcessState::Stopped)),
            ("7 (x) ) Z 1", Some(ProcessState::Gone)),
            ("7", None),
        ] {
            assert_eq!(ProcessState::read(stat), state, "{stat}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_runs() {
        assert_eq!(ProcessState::of(std::process::id()), Some(ProcessState::Running));
        assert_eq!(ProcessState::of(u32::MAX - 1), Some(ProcessState::Gone));
    }
}
