//! Every error of the crates below in one type.

use std::sync::Arc;

use warpweft_core_types::{
    AllocError, ErrorClass, Failure, LaunchError, LoadError, OpenError, RangeError, ResidentError,
    SignalError, SubmitError, WaitError,
};
use warpweft_topology::{BuildError, PathError};
use warpweft_transfer::TransferError;

/// Any error of this crate and of those it re-exports.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A backend, device, queue or semaphore could not be opened or made.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Memory could not be had.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A range is not a valid operand.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Code could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A launch does not fit its kernel.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A queue did not take a submission.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// A wait ended early.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// A semaphore could not be raised.
    #[error(transparent)]
    Signal(#[from] SignalError),
    /// A resident could not be started, parked, resumed or stopped.
    #[error(transparent)]
    Resident(#[from] ResidentError),
    /// Bytes could not be moved.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// A topology contradicts itself.
    #[error(transparent)]
    Topology(#[from] BuildError),
    /// There is no path between two nodes of a topology.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A process could not join a group.
    #[cfg(feature = "bootstrap")]
    #[error(transparent)]
    Join(#[from] warpweft_bootstrap::JoinError),
    /// A group could not do what it was asked.
    #[cfg(feature = "bootstrap")]
    #[error(transparent)]
    Group(#[from] warpweft_bootstrap::GroupError),
    /// A node could not be recorded.
    #[cfg(feature = "graph-runtime")]
    #[error(transparent)]
    Record(Box<warpweft_graph_runtime::RecordError>),
    /// A graph could not be prepared.
    #[cfg(feature = "graph-runtime")]
    #[error(transparent)]
    Prepare(Box<warpweft_graph_runtime::PrepareError>),
    /// A graph, or a single operation of its runtime, was not taken.
    #[cfg(feature = "graph-runtime")]
    #[error(transparent)]
    Run(Box<warpweft_graph_runtime::RunError>),
    /// What a graph's runtime was given ended otherwise than well, or was not awaited to its end.
    #[cfg(feature = "graph-runtime")]
    #[error(transparent)]
    Completion(#[from] warpweft_graph_runtime::CompletionError),
    /// The host could not have bytes of a graph's runtime.
    #[cfg(feature = "graph-runtime")]
    #[error(transparent)]
    Map(Box<warpweft_graph_runtime::MapError>),
    /// A system of actors could not be started, or an actor not be begun, parked, moved or ended.
    #[cfg(feature = "k2k-router")]
    #[error(transparent)]
    Actor(Box<warpweft_k2k_router::ActorError>),
    /// A message was not sent.
    #[cfg(feature = "k2k-router")]
    #[error(transparent)]
    Send(#[from] warpweft_k2k_router::SendError),
    /// An actor did not answer.
    #[cfg(feature = "k2k-router")]
    #[error(transparent)]
    Ask(#[from] warpweft_k2k_router::AskError),
    /// Submitted work failed.
    #[error("{0}")]
    Failed(Arc<Failure>),
}

impl Error {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Open(error) => error.class(),
            Self::Alloc(error) => error.class(),
            Self::Range(error) => error.class(),
            Self::Load(error) => error.class(),
            Self::Launch(error) => error.class(),
            Self::Submit(error) => error.class(),
            Self::Wait(error) => error.class(),
            Self::Signal(error) => error.class(),
            Self::Resident(error) => error.class(),
            Self::Transfer(error) => error.class(),
            Self::Topology(_) => ErrorClass::Usage,
            Self::Path(_) => ErrorClass::Unsupported,
            #[cfg(feature = "bootstrap")]
            Self::Join(error) => error.class(),
            #[cfg(feature = "bootstrap")]
            Self::Group(error) => error.class(),
            #[cfg(feature = "graph-runtime")]
            Self::Record(error) => error.class(),
            #[cfg(feature = "graph-runtime")]
            Self::Prepare(error) => error.class(),
            #[cfg(feature = "graph-runtime")]
            Self::Run(error) => error.class(),
            #[cfg(feature = "graph-runtime")]
            Self::Completion(error) => error.class(),
            #[cfg(feature = "graph-runtime")]
            Self::Map(error) => error.class(),
            #[cfg(feature = "k2k-router")]
            Self::Actor(error) => error.class(),
            #[cfg(feature = "k2k-router")]
            Self::Send(error) => error.class(),
            #[cfg(feature = "k2k-router")]
            Self::Ask(error) => error.class(),
            Self::Failed(failure) => failure.class(),
        }
    }
}

impl From<Arc<Failure>> for Error {
    fn from(failure: Arc<Failure>) -> Self {
        Self::Failed(failure)
    }
}

#[cfg(feature = "k2k-router")]
impl From<warpweft_k2k_router::ActorError> for Error {
    fn from(error: warpweft_k2k_router::ActorError) -> Self {
        Self::Actor(Box::new(error))
    }
}

/// Errors of graphs say so much that this type would be large if it held them itself.
#[cfg(feature = "graph-runtime")]
mod boxed {
    use warpweft_graph_runtime::{MapError, PrepareError, RecordError, RunError};

    use super::Error;

    impl From<RecordError> for Error {
        fn from(error: RecordError) -> Self {
            Self::Record(Box::new(error))
        }
    }

    impl From<PrepareError> for Error {
        fn from(error: PrepareError) -> Self {
            Self::Prepare(Box::new(error))
        }
    }

    impl From<RunError> for Error {
        fn from(error: RunError) -> Self {
            Self::Run(Box::new(error))
        }
    }

    impl From<MapError> for Error {
        fn from(error: MapError) -> Self {
            Self::Map(Box::new(error))
        }
    }
}
