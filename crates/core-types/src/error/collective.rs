//! What can be refused of collectives.

use std::{sync::Arc, time::Duration};

use crate::{CollectiveFailure, DType, DeviceId, DriverError, ErrorClass, Failure, RangeError};

/// Why a rank's part of a collective makes no sense; nothing was done, here or on other ranks.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The type has no such reduction.
    #[error("{op} is not defined for {dtype}")]
    NotDefined {
        /// The reduction.
        op: &'static str,
        /// The type.
        dtype: DType,
    },
    /// The root or peer is no rank.
    #[error("there is no rank {rank} among {size}")]
    NoSuchRank {
        /// The rank that was named.
        rank: u32,
        /// How many there are.
        size: u32,
    },
    /// The rank takes part with an operand that it does not have.
    #[error("{op} needs a {what} on this rank")]
    Missing {
        /// The operation.
        op: &'static str,
        /// `source` or `destination`.
        what: &'static str,
    },
    /// The rank has an operand that it has no use for.
    #[error("{op} uses no {what} on this rank")]
    Superfluous {
        /// The operation.
        op: &'static str,
        /// `source` or `destination`.
        what: &'static str,
    },
    /// The view does not hold whole elements for every rank.
    #[error("a {what} of {size} bytes from offset {offset} is not {parts} equal parts of {dtype} elements")]
    NotElements {
        /// `source` or `destination`.
        what: &'static str,
        /// The view's size in bytes.
        size: u64,
        /// Where it starts.
        offset: u64,
        /// The type.
        dtype: DType,
        /// Parts it must have.
        parts: u64,
    },
    /// The lengths do not fit together, or bytes are shared where they may not be.
    #[error(transparent)]
    Range(#[from] RangeError),
}

/// Why a device's own collectives could not do something.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The library is not there, or too old.
    #[error("{library} is unavailable: {missing}")]
    Unavailable {
        /// The library.
        library: &'static str,
        /// What is missing, and how to get it.
        missing: String,
    },
    /// It does not do this.
    #[error("{device} does not support {what}")]
    Unsupported {
        /// The device.
        device: DeviceId,
        /// What was asked for.
        what: String,
    },
    /// What was said contradicts itself.
    #[error("{0}")]
    Invalid(String),
    /// It took longer than it may.
    #[error("{what} was not over after {after:?}")]
    TimedOut {
        /// What.
        what: &'static str,
        /// The time it had.
        after: Duration,
    },
    /// The library failed.
    #[error("{library} failed")]
    Library {
        /// Which.
        library: &'static str,
        /// What it said.
        #[source]
        source: DriverError,
    },
    /// The communicator or its device failed before.
    #[error("{0}")]
    Failed(Arc<Failure>),
}

impl CallError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        ErrorClass::Usage
    }
}

impl CollectiveError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Unavailable { .. } | Self::Unsupported { .. } => ErrorClass::Unsupported,
            Self::Invalid(_) => ErrorClass::Usage,
            Self::TimedOut { .. } => ErrorClass::Transient,
            Self::Library { .. } => ErrorClass::Internal,
            Self::Failed(failure) => failure.class(),
        }
    }
}

impl CollectiveFailure {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::PeerLost { .. } | Self::Aborted { .. } => ErrorClass::PeerLost,
            Self::Mismatch { .. } => ErrorClass::Usage,
            Self::TimedOut { .. } => ErrorClass::Transient,
        }
    }
}
