//! What a node does to a range of memory.

use std::fmt;

use serde::{Deserialize, Serialize};
use warpweft_core_types::Access;

/// What a node does to a range of memory, and so what it is ordered with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Usage {
    /// Only reads. Side by side with other readers.
    Read,
    /// Only writes, every byte, and does not depend on what was there.
    Write,
    /// Reads and writes.
    ReadWrite,
    /// Adds to what is there by atomic operations of the kind that the number stands for. Side by side with nodes
    /// of the same number, in order with all others. Kernels whose contract says [`Access::Accumulate`] have number 0;
    /// validating devices go by the contract alone.
    Reduce(u32),
    /// Reads and writes, and may trade places with other commutative nodes of the range: one at a time, in the order
    /// that suits the graph best.
    Commutative,
}

/// Who may use a range side by side, or in any order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    Read,
    Reduce(u32),
    Commutative,
}

impl Usage {
    /// Whether bytes may differ afterwards.
    pub const fn writes(self) -> bool {
        !matches!(self, Self::Read)
    }

    /// Whether what was there before matters.
    pub const fn reads(self) -> bool {
        !matches!(self, Self::Write)
    }

    /// Whether two nodes that use shared bytes so are ordered as they were recorded.
    pub fn conflicts_with(self, other: Self) -> bool {
        match (self.sharing(), other.sharing()) {
            (Some(one), Some(other)) => one != other,
            _ => true,
        }
    }

    pub(crate) const fn sharing(self) -> Option<Sharing> {
        match self {
            Self::Read => Some(Sharing::Read),
            Self::Reduce(kind) => Some(Sharing::Reduce(kind)),
            Self::Commutative => Some(Sharing::Commutative),
            Self::Write | Self::ReadWrite => None,
        }
    }
}

impl From<Access> for Usage {
    fn from(access: Access) -> Self {
        match access {
            Access::Read => Self::Read,
            Access::Write => Self::Write,
            Access::ReadWrite => Self::ReadWrite,
            Access::Accumulate => Self::Reduce(0),
        }
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read => f.write_str("read"),
            Self::Write => f.write_str("write"),
            Self::ReadWrite => f.write_str("read-write"),
            Self::Reduce(kind) => write!(f, "reduce {kind}"),
            Self::Commutative => f.write_str("commutative"),
        }
    }
}
