//! Errors.

use warpweft_bootstrap::GroupError;
use warpweft_core_types::{CallError, CollectiveFailure, ErrorClass};

/// Why ranks could not join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The ranks share no memory.
    #[error("rank {rank} is on another host, {host}")]
    OtherHost {
        /// The first that is elsewhere than rank 0.
        rank: u32,
        /// Its host.
        host: String,
    },
    /// The ranks have different settings.
    #[error("rank {rank} joins with other settings than rank 0")]
    OtherConfig {
        /// The first that differs.
        rank: u32,
    },
    /// A setting makes no sense.
    #[error("{0}")]
    InvalidConfig(String),
    /// The system gives no memory that processes share.
    #[error("{what} failed")]
    Memory {
        /// What was tried.
        what: &'static str,
        /// What the system says.
        #[source]
        source: std::io::Error,
    },
    /// What came in place of shared memory is something else.
    #[error("rank 0 sent something that is not the shared memory: {0}")]
    Unexpected(String),
    /// The group failed.
    #[error(transparent)]
    Group(#[from] GroupError),
}

/// Why a call did not do what it is for.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum HostFailure {
    /// The call makes no sense; nothing was done, and the other ranks know nothing of it.
    #[error(transparent)]
    Call(#[from] CallError),
    /// It could not be completed.
    #[error(transparent)]
    Collective(#[from] CollectiveFailure),
    /// This process is a fork of the one that joined.
    #[error("process {joined} joined, and process {here} is a fork of it: join in each process")]
    Forked {
        /// The process that joined.
        joined: u32,
        /// This process.
        here: u32,
    },
}

impl HostError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::OtherHost { .. } => ErrorClass::Unsupported,
            Self::OtherConfig { .. } | Self::InvalidConfig(_) => ErrorClass::Usage,
            Self::Memory { .. } => ErrorClass::Exhausted,
            Self::Unexpected(_) => ErrorClass::Internal,
            Self::Group(error) => error.class(),
        }
    }
}

impl HostFailure {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Call(error) => error.class(),
            Self::Collective(failure) => failure.class(),
            Self::Forked { .. } => ErrorClass::Usage,
        }
    }
}
