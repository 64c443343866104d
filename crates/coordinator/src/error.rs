//! Why a device or a kernel could not be placed, moved or removed.

use warpweft_core_types::{Bytes, DeviceId, ErrorClass};

use crate::{DeviceStatus, KernelId, MoveId};

/// Why a coordinator could not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CoordinatorError {
    /// The configuration contradicts itself.
    #[error("configuration is invalid: {reason}")]
    InvalidConfig {
        /// The contradiction.
        reason: String,
    },
    /// The device is registered already.
    #[error("{device} is registered already")]
    AlreadyRegistered {
        /// The device.
        device: DeviceId,
    },
    /// The device is not registered.
    #[error("{device} is not registered")]
    UnknownDevice {
        /// The device.
        device: DeviceId,
    },
    /// The device's status does not allow this.
    #[error("{device} is {status}, it cannot {action}")]
    WrongStatus {
        /// The device.
        device: DeviceId,
        /// What it is.
        status: DeviceStatus,
        /// What was asked of it, as in "return to service".
        action: &'static str,
    },
    /// The device still holds kernels; evacuate it first.
    #[error("{device} still holds {kernels} kernels; move them away first")]
    InUse {
        /// The device.
        device: DeviceId,
        /// How many, moves to it included.
        kernels: u32,
    },
    /// No device in service meets the request's conditions.
    #[error("no device in service fits: {reason}")]
    NoDeviceFits {
        /// Which conditions left how many devices.
        reason: String,
    },
    /// Devices would fit but hold as many kernels as they may.
    #[error("all {devices} devices that fit hold as many kernels as they may")]
    Full {
        /// How many devices would fit.
        devices: usize,
    },
    /// Devices would fit but lack the memory.
    #[error("none of {devices} devices has {requested} to spare; the most is {most}")]
    OutOfMemory {
        /// How many devices would fit otherwise.
        devices: usize,
        /// What was asked for.
        requested: Bytes,
        /// What the best of them has.
        most: Bytes,
    },
    /// A custom strategy chose a candidate that was not offered.
    #[error("the custom strategy chose candidate {chosen} of {offered}")]
    BadChoice {
        /// Its choice.
        chosen: usize,
        /// How many candidates it was offered.
        offered: usize,
    },
    /// A custom strategy's choice was taken away by others each time; try again.
    #[error("the device that the custom strategy chose was taken by others {tries} times")]
    Contended {
        /// How often it was asked.
        tries: u32,
    },
    /// The kernel is not placed.
    #[error("{kernel} is not placed")]
    UnknownKernel {
        /// The kernel.
        kernel: KernelId,
    },
    /// The kernel is being moved already.
    #[error("{kernel} is being moved already")]
    AlreadyMoving {
        /// The kernel.
        kernel: KernelId,
    },
    /// The kernel is on that device already.
    #[error("{kernel} is on {device} already")]
    AlreadyThere {
        /// The kernel.
        kernel: KernelId,
        /// The device.
        device: DeviceId,
    },
    /// No such move is under way: it was completed or cancelled, or never begun.
    #[error("{id} is not under way")]
    UnknownMove {
        /// The move.
        id: MoveId,
    },
}

impl CoordinatorError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Full { .. } | Self::OutOfMemory { .. } => ErrorClass::Exhausted,
            Self::NoDeviceFits { .. } => ErrorClass::Unsupported,
            Self::Contended { .. } => ErrorClass::Transient,
            _ => ErrorClass::Usage,
        }
    }
}
