//! What goes wrong with messages and actors.

use warpweft_core_types::{
    AllocError, DeviceId, ErrorClass, LaunchError, LoadError, OpenError, ResidentError, SubmitError,
    WaitError,
};

use crate::{
    actor::{ActorId, Layout},
    dead_letter::Reason,
    epoch::Cause,
};

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

/// Why a message was not sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The payload is longer than lanes take.
    #[error("a message of {length} bytes does not fit, at most {limit} do")]
    TooLong {
        /// Bytes of the payload.
        length: usize,
        /// The most there may be.
        limit: usize,
    },
    /// The receiver takes messages of this kind with another size.
    #[error("{actor} takes messages of kind {kind} with {expected} bytes, this one has {length}")]
    Layout {
        /// The receiver.
        actor: ActorId,
        /// The kind.
        kind: u32,
        /// Bytes that such a message has.
        expected: u32,
        /// Bytes that this one has.
        length: usize,
    },
    /// The receiver takes no messages of this kind.
    #[error("{actor} takes no messages of kind {kind}")]
    UnknownKind {
        /// The receiver.
        actor: ActorId,
        /// The kind.
        kind: u32,
    },
    /// There is no such actor, or not any more.
    #[error("{actor} is not there: {reason:?}")]
    Gone {
        /// The receiver.
        actor: ActorId,
        /// Why.
        reason: Reason,
    },
    /// The receiver has as many messages as it takes.
    #[error("{actor} takes no more messages now")]
    Full {
        /// The receiver.
        actor: ActorId,
    },
    /// There was no room by the deadline.
    #[error("{actor} had no room for a message in time")]
    Timeout {
        /// The receiver.
        actor: ActorId,
    },
}

impl SendError {
    /// How to react.
    pub const fn class(&self) -> ErrorClass {
        match self {
            Self::Gone { reason: Reason::DeviceLost, .. } => ErrorClass::DeviceLost,
            Self::TooLong { .. } | Self::Layout { .. } | Self::UnknownKind { .. } | Self::Gone { .. } => {
                ErrorClass::Usage
            }
            Self::Full { .. } => ErrorClass::Exhausted,
            Self::Timeout { .. } => ErrorClass::Transient,
        }
    }
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// The question was not sent.
    #[error(transparent)]
    Send(#[from] SendError),
    /// There was none by the deadline. The question may be served later.
    #[error("{actor} did not answer in time")]
    Timeout {
        /// Who was asked.
        actor: ActorId,
    },
    /// The question was not served.
    #[error("{actor} was not served the question: {reason:?}")]
    NotServed {
        /// Who was asked.
        actor: ActorId,
        /// Why.
        reason: Reason,
    },
    /// The actor is lost, and nobody knows whether it had served the question.
    #[error("{actor} is lost, and whether it served the question is not known: {reason:?}")]
    Lost {
        /// Who was asked.
        actor: ActorId,
        /// Why.
        reason: Reason,
    },
}

impl AskError {
    /// How to react.
    pub const fn class(&self) -> ErrorClass {
        match self {
            Self::Send(error) => error.class(),
            Self::Lost { .. } => ErrorClass::DeviceLost,
            Self::Timeout { .. } | Self::NotServed { .. } => ErrorClass::Transient,
        }
    }
}

/// Why an actor could not be begun, parked, moved or ended, or a system not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ActorError {
    /// The configuration or the description contradicts itself.
    #[error("it cannot be as described: {reason}")]
    Invalid {
        /// The contradiction.
        reason: String,
    },
    /// The device runs no actors.
    #[error("{device} runs no actors: {reason}")]
    Unsupported {
        /// The device.
        device: DeviceId,
        /// What it lacks.
        reason: &'static str,
    },
    /// The device is none of the system's, or is lost.
    #[error("{device} is not in service")]
    NoDevice {
        /// The device.
        device: DeviceId,
    },
    /// Messages that come to the actor's old place could not be handed on to the new one.
    #[error("no way leads from {from} to {to}, so that {actor} cannot move there")]
    Unreachable {
        /// The actor.
        actor: ActorId,
        /// Where it is.
        from: DeviceId,
        /// Where it was to go.
        to: DeviceId,
    },
    /// The code and the description, or two actors, mean different things by the same.
    #[error("{what} has the layout {one:?} here and {other:?} there")]
    Layout {
        /// The state, or a kind of message.
        what: String,
        /// One layout.
        one: Layout,
        /// The other.
        other: Layout,
    },
    /// There is no such actor, or not any more.
    #[error("{actor} is not there: {reason:?}")]
    Gone {
        /// The actor.
        actor: ActorId,
        /// Why.
        reason: Reason,
    },
    /// Something else is being done with the actor.
    #[error("{actor} is already being parked, moved or stopped")]
    Busy {
        /// The actor.
        actor: ActorId,
    },
    /// The actor's handler, or the one of another actor at its place, did not return in time.
    #[error("{actor} did not come to a message boundary in time; the handler of {inside} was running")]
    Unparkable {
        /// The actor.
        actor: ActorId,
        /// Whose handler ran.
        inside: ActorId,
    },
    /// It was not done by the deadline, and may still be.
    #[error("{actor} was not there by the deadline; it is still on its way")]
    Timeout {
        /// The actor.
        actor: ActorId,
    },
    /// It was undone, and the actor serves where it was.
    #[error("{actor} serves where it was: {cause:?}")]
    Returned {
        /// The actor.
        actor: ActorId,
        /// Why.
        cause: Cause,
    },
    /// Senders that wait for each other in a circle would do so for ever.
    #[error("{} would wait for each other", path(.circle))]
    Cycle {
        /// The circle, which ends where it begins.
        circle: Vec<ActorId>,
    },
    /// A compiler did not take an actor's code.
    #[error("the code of {actor:?} was not taken: {log}")]
    Code {
        /// The name of the actor that brought it.
        actor: String,
        /// The compiler's words.
        log: String,
    },
    /// There is no room for more.
    #[error("there is no room: {reason}")]
    Exhausted {
        /// For what.
        reason: String,
    },
    /// A device did not answer by the deadline.
    #[error("{device} did not answer in time")]
    Silent {
        /// The device.
        device: DeviceId,
    },
    /// The service thread could not be started, or is gone.
    #[error("the service thread is not there: {reason}")]
    Service {
        /// Why.
        reason: String,
    },
    /// A lane could not be made.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The executor's code could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The executor's launch is not right.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// An executor could not be started or stopped.
    #[error(transparent)]
    Resident(#[from] ResidentError),
    /// An executor's memory could not be had.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// An executor's memory could not be set up.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The same.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The same.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

fn path(actors: &[ActorId]) -> String {
    actors.iter().map(ToString::to_string).collect::<Vec<_>>().join(" -> ")
}

impl ActorError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Gone { reason: Reason::DeviceLost, .. } => ErrorClass::DeviceLost,
            Self::Invalid { .. }
            | Self::Layout { .. }
            | Self::Gone { .. }
            | Self::Cycle { .. }
            | Self::Code { .. } => ErrorClass::Usage,
            Self::Exhausted { .. } => ErrorClass::Exhausted,
            Self::Unsupported { .. } | Self::Unreachable { .. } => ErrorClass::Unsupported,
            Self::NoDevice { .. } => ErrorClass::DeviceLost,
            Self::Busy { .. }
            | Self::Unparkable { .. }
            | Self::Timeout { .. }
            | Self::Silent { .. }
            | Self::Returned { .. } => ErrorClass::Transient,
            Self::Service { .. } => ErrorClass::Internal,
            Self::Ring(error) => error.class(),
            Self::Load(error) => error.class(),
            Self::Launch(error) => error.class(),
            Self::Resident(error) => error.class(),
            Self::Alloc(error) => error.class(),
            Self::Open(error) => error.class(),
            Self::Submit(error) => error.class(),
            Self::Wait(error) => error.class(),
        }
    }
}
