//! What an operation does to memory.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What an operation does to a range of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Only reads.
    Read,
    /// Only writes, and does not depend on what was there.
    Write,
    /// Reads and writes.
    ReadWrite,
    /// Adds to what is there by atomic operations. Operations that do so may share bytes with nothing between them.
    Accumulate,
}

impl Access {
    /// Whether bytes may differ afterwards.
    pub const fn writes(self) -> bool {
        !matches!(self, Self::Read)
    }

    /// Whether two operations on shared bytes must be ordered.
    pub const fn conflicts_with(self, other: Self) -> bool {
        match (self, other) {
            (Self::Accumulate, Self::Accumulate) => false,
            _ => self.writes() || other.writes(),
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::ReadWrite => "read-write",
            Self::Accumulate => "accumulate",
        })
    }
}
