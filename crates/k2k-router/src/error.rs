//! What goes wrong with messages and actors.

use warpweft_core_types::ErrorClass;

/// A lane holds what no sender of ours writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a message with the {field} {value} is none that anybody sends")]
pub struct WireError {
    /// The field of the header.
    pub field: &'static str,
    /// What it says.
    pub value: u32,
}

/// Why a lane was not made, or does not take or give a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// It cannot have so many lines.
    #[error("a lane cannot have {lines} lines")]
    Capacity {
        /// How many were asked for.
        lines: usize,
    },
    /// There is no room now.
    #[error("the lane is full")]
    Full,
    /// There never is.
    #[error("a message of {length} bytes does not fit, at most {limit} do")]
    TooLong {
        /// Bytes of the payload.
        length: usize,
        /// The most there may be.
        limit: usize,
    },
    /// Somebody else wrote into the lane.
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl RingError {
    /// How to react.
    pub const fn class(&self) -> ErrorClass {
        match self {
            Self::Capacity { .. } | Self::TooLong { .. } => ErrorClass::Usage,
            Self::Full => ErrorClass::Exhausted,
            Self::Wire(_) => ErrorClass::Internal,
        }
    }
}
