//! What becomes of the kernels of a device that goes out of service.

use std::time::Duration;

use serde::Serialize;
use warpweft_core_types::{Bytes, DeviceId};

use crate::{CoordinatorError, KernelId, MovePriority};

/// Where the kernels of a device can go.
///
/// A plan reserves nothing: carry it out with [`Coordinator::begin_move`](crate::Coordinator::begin_move) and
/// [`Coordinator::complete_move`](crate::Coordinator::complete_move), which check again.
#[derive(Debug, Clone, PartialEq)]
pub struct EvacuationPlan {
    /// The device to be emptied.
    pub from: DeviceId,
    /// Kernels that can move, in the order in which they should.
    pub moves: Vec<PlannedMove>,
    /// Kernels that cannot; they keep running where they are.
    pub stranded: Vec<StrandedKernel>,
}

/// One kernel's way out.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PlannedMove {
    /// The kernel.
    pub kernel: KernelId,
    /// Where it goes.
    pub to: DeviceId,
    /// How urgent it is.
    pub priority: MovePriority,
    /// Memory that goes with it.
    pub memory: Bytes,
    /// What the links' figures say its memory takes; `None` where no links are known.
    pub expected: Option<Duration>,
}

/// A kernel without a way out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StrandedKernel {
    /// The kernel.
    pub kernel: KernelId,
    /// Why nothing takes it.
    pub reason: CoordinatorError,
}
