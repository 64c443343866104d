//! What can go wrong.

use std::sync::Arc;

use warpweft_bootstrap::{GroupError, JoinError};
use warpweft_core_types::{
    AllocError, CallError, CollectiveError, DeviceId, DeviceUuid, ErrorClass, Failure, LaunchError,
    LoadError, OpenError, QueueId, SubmitError, WaitError,
};

/// Why a communicator was not made, or a call not carried out.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// The call makes no sense; nothing was done.
    #[error(transparent)]
    Call(#[from] CallError),
    /// No engine of the communicator does this; nothing was done.
    #[error("no engine of this communicator does {what}; it has {engines}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// The engines there are.
        engines: String,
    },
    /// No engine serves these devices together.
    #[error("no engine serves these ranks: {reason}")]
    NoEngine {
        /// Why none does.
        reason: String,
    },
    /// Two ranks have one device.
    #[error("ranks {} and {} both have the device {uuid}; give each rank a device of its own", .ranks[0], .ranks[1])]
    DuplicateDevice {
        /// The ranks.
        ranks: [u32; 2],
        /// The device.
        uuid: DeviceUuid,
    },
    /// Ranks were configured differently.
    #[error("ranks {} and {} have different configurations: {what}", .ranks[0], .ranks[1])]
    Disagreement {
        /// Two that differ.
        ranks: [u32; 2],
        /// In what.
        what: &'static str,
    },
    /// The queue is another device's.
    #[error("{queue} is not of {device}, which is this rank's device")]
    ForeignQueue {
        /// The queue.
        queue: QueueId,
        /// The rank's device.
        device: DeviceId,
    },
    /// The deadline passed. The call goes on.
    #[error("{op}, call {number}, was not over by the deadline")]
    Timeout {
        /// The call's number.
        number: u64,
        /// What was called.
        op: String,
    },
    /// The communicator failed, and this call with it.
    #[error("{0}")]
    Failed(Arc<Failure>),
    /// A user's own reduction differs from the one it stands for.
    #[error("the reduction {name:?} gives {found} where {expected} is right, element {element}")]
    WrongReduction {
        /// Its name.
        name: String,
        /// The first element that is wrong.
        element: usize,
        /// What it gave.
        found: String,
        /// What it should have given.
        expected: String,
    },
    /// The queue refused the work.
    #[error("the queue refused the call")]
    Submit(#[source] Arc<SubmitError>),
    /// The group of processes cannot go on.
    #[error("the group of processes cannot go on")]
    Group(#[source] Arc<GroupError>),
    /// A group could not be formed.
    #[error("the group could not be formed")]
    Join(#[source] Arc<JoinError>),
    /// The device's own collectives failed.
    #[error("the device's own collectives failed")]
    Native(#[from] CollectiveError),
    /// Memory could not be allocated.
    #[error("memory could not be allocated")]
    Memory(#[source] Arc<AllocError>),
    /// A queue or semaphore could not be made.
    #[error("a queue or semaphore could not be made")]
    Open(#[source] Arc<OpenError>),
    /// A kernel could not be loaded.
    #[error("a kernel could not be loaded")]
    Load(#[source] Arc<LoadError>),
    /// A kernel could not be launched.
    #[error("a kernel could not be launched")]
    Launch(#[source] Arc<LaunchError>),
    /// A thread, file or random number of the system's could not be had.
    #[error("cannot {what}")]
    System {
        /// What was to be done.
        what: &'static str,
        /// The system's words.
        #[source]
        source: Arc<std::io::Error>,
    },
}

impl CommError {
    /// How to react: after [`ErrorClass::PeerLost`] shrink and go on, see
    /// [`Communicator::shrink`](crate::Communicator::shrink).
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Call(error) => error.class(),
            Self::Unsupported { .. } | Self::NoEngine { .. } => ErrorClass::Unsupported,
            Self::DuplicateDevice { .. }
            | Self::Disagreement { .. }
            | Self::ForeignQueue { .. }
            | Self::WrongReduction { .. } => ErrorClass::Usage,
            Self::Timeout { .. } => ErrorClass::Transient,
            Self::Failed(failure) => failure.class(),
            Self::Submit(error) => error.class(),
            Self::Group(error) => error.class(),
            Self::Join(error) => error.class(),
            Self::Native(error) => error.class(),
            Self::Memory(error) => error.class(),
            Self::Open(error) => error.class(),
            Self::Load(error) => error.class(),
            Self::Launch(error) => error.class(),
            Self::System { .. } => ErrorClass::Exhausted,
        }
    }

    /// What failed for good, if that is why.
    pub(crate) fn failure(&self) -> Option<&Arc<Failure>> {
        match self {
            Self::Failed(failure) => Some(failure),
            Self::Memory(error) => match &**error {
                AllocError::Failed(failure) => Some(failure),
                _ => None,
            },
            Self::Open(error) => match &**error {
                OpenError::Failed(failure) => Some(failure),
                _ => None,
            },
            Self::Load(error) => match &**error {
                LoadError::Failed(failure) => Some(failure),
                _ => None,
            },
            _ => None,
        }
    }

    pub(crate) fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::System { what, source: Arc::new(source) }
    }
}

macro_rules! shared {
    ($($error:ty => $variant:ident),* $(,)?) => {$(
        impl From<$error> for CommError {
            fn from(error: $error) -> Self {
                Self::$variant(Arc::new(error))
            }
        }
    )*};
}

shared! {
    GroupError => Group,
    JoinError => Join,
    AllocError => Memory,
    OpenError => Open,
    LoadError => Load,
    LaunchError => Launch,
}

impl From<SubmitError> for CommError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::Failed(failure) => Self::Failed(failure),
            error => Self::Submit(Arc::new(error)),
        }
    }
}

impl From<Arc<Failure>> for CommError {
    fn from(failure: Arc<Failure>) -> Self {
        Self::Failed(failure)
    }
}

/// A wait for call `number` ended without it.
pub(crate) fn unfinished(error: WaitError, number: u64, op: String) -> CommError {
    match error {
        WaitError::Failed(failure) => CommError::Failed(failure),
        _ => CommError::Timeout { number, op },
    }
}
