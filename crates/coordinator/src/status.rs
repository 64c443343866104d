//! What a coordinator reports: statuses and snapshots.

use std::fmt;

use serde::Serialize;
use warpweft_core_types::{Bytes, DeviceId};

/// Whether a device takes kernels, and if not, why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceStatus {
    /// It takes kernels.
    InService,
    /// It keeps what it has and takes no more.
    Draining,
    /// The driver lost it. It does not come back; what was on it is gone.
    Lost {
        /// The driver's words.
        reason: String,
    },
    /// Somebody does not trust it. It keeps what it has and takes no more until it is returned to service.
    Quarantined {
        /// Their words.
        reason: String,
    },
}

impl fmt::Display for DeviceStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InService => f.write_str("in service"),
            Self::Draining => f.write_str("draining"),
            Self::Lost { reason } => write!(f, "lost ({reason})"),
            Self::Quarantined { reason } => write!(f, "quarantined ({reason})"),
        }
    }
}

/// A kernel that was placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct KernelId(pub(crate) u64);

impl fmt::Display for KernelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}", self.0)
    }
}

/// A move that was begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct MoveId(pub(crate) u64);

impl fmt::Display for MoveId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "move {}", self.0)
    }
}

/// One device at one moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeviceReport {
    /// The device.
    pub device: DeviceId,
    /// Whether it takes kernels.
    pub status: DeviceStatus,
    /// Kernels placed through this device.
    pub kernels: u32,
    /// Kernels on the silicon, through all backends that reach it, moves to it included.
    pub silicon_kernels: u32,
    /// How many kernels the silicon takes.
    pub limit: u32,
    /// Memory promised to kernels on the silicon.
    pub promised: Bytes,
    /// The device's memory in all.
    pub capacity: Bytes,
    /// Free memory when it was last asked of the driver.
    pub free: Bytes,
}

/// What a coordinator has done since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CoordinatorStats {
    /// Kernels placed.
    pub placed: u64,
    /// Kernels released.
    pub released: u64,
    /// Requests that no device could take.
    pub refused: u64,
    /// Moves begun.
    pub moves_begun: u64,
    /// Moves completed.
    pub moves_completed: u64,
    /// Moves cancelled.
    pub moves_cancelled: u64,
    /// Kernels placed and not released.
    pub kernels: u64,
    /// Pieces of silicon with a device in service, each counted once.
    pub silicon_in_service: u32,
    /// Memory of those.
    pub capacity_in_service: Bytes,
}
