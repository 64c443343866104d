//! Why bytes could not be moved.

use std::sync::Arc;

use warpweft_core_types::{
    AllocError, DeviceId, ErrorClass, Failure, OpenError, RangeError, SubmitError, WaitError,
};

/// Why a copy, or the planning of one, did not succeed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The configuration contradicts itself.
    #[error("configuration is invalid: {reason}")]
    InvalidConfig {
        /// The contradiction.
        reason: String,
    },
    /// The device was not given to this `Transfer`.
    #[error("{device} is not among the devices copies were set up for")]
    UnknownDevice {
        /// The device.
        device: DeviceId,
    },
    /// A device was given twice.
    #[error("{device} was given twice")]
    DuplicateDevice {
        /// The device.
        device: DeviceId,
    },
    /// No sequence of links joins the two.
    #[error("no links lead from {from} to {to}")]
    Unreachable {
        /// Where the bytes are.
        from: DeviceId,
        /// Where they would have to go.
        to: DeviceId,
    },
    /// A defect of this crate.
    #[error("a defect: {reason}")]
    Internal {
        /// What cannot be.
        reason: &'static str,
    },
    /// A backend reported a link that cannot be.
    #[error("a link fact is impossible")]
    Links(#[from] warpweft_topology::BuildError),
    /// The ranges are not valid operands.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Memory in between could not be had.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A queue or semaphore could not be made, or the service thread not be started.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A queue did not take a chunk.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The copy did not end by the deadline, or failed.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

impl TransferError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::InvalidConfig { .. } | Self::UnknownDevice { .. } | Self::DuplicateDevice { .. } => {
                ErrorClass::Usage
            }
            Self::Unreachable { .. } => ErrorClass::Unsupported,
            Self::Links(_) | Self::Internal { .. } => ErrorClass::Internal,
            Self::Range(error) => error.class(),
            Self::Alloc(error) => error.class(),
            Self::Open(error) => error.class(),
            Self::Submit(error) => error.class(),
            Self::Wait(error) => error.class(),
        }
    }
}

impl From<Arc<Failure>> for TransferError {
    fn from(failure: Arc<Failure>) -> Self {
        Self::Wait(WaitError::Failed(failure))
    }
}
