//! What can be refused, and how work ends badly.

use std::{ops::Range, sync::Arc};

use warpweft_core_types::{
    AllocError, DeviceId, ErrorClass, Failure, GraphError, InteropError, OpenError, RangeError, SubmitError,
};

use crate::{node::NodeId, usage::Usage};

/// Why a node could not be recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The runtime was not made with this device.
    #[error("node {node:?}: {device} is not one of the runtime's devices")]
    UnknownDevice {
        /// The node's name.
        node: String,
        /// The device.
        device: DeviceId,
    },
    /// A range is no valid operand.
    #[error("node {node:?}: {source}")]
    Range {
        /// The node's name.
        node: String,
        /// What is wrong.
        source: RangeError,
    },
    /// A buffer shares memory with one that was used before, and is not within it.
    #[error(
        "node {node:?}: its buffer shares a part of another buffer's memory; use views of one buffer that holds both"
    )]
    Straddles {
        /// The node's name.
        node: String,
    },
    /// A usage was given for an operand that there is not, or that contradicts what the operation does.
    #[error("node {node:?}: operand {operand} {}, which cannot be used as {asked}", is_used(*.actual))]
    Usage {
        /// The node's name.
        node: String,
        /// Position among the operation's buffers, from 0.
        operand: usize,
        /// What the operation does to it; none where it has no such operand.
        actual: Option<Usage>,
        /// What was asked for.
        asked: Usage,
    },
    /// The host's tasks reach memory that the host can address.
    #[error(
        "node {node:?}: a task of the host cannot reach memory of {device}; use host-visible memory, or copy"
    )]
    NotHostVisible {
        /// The node's name.
        node: String,
        /// The memory's device.
        device: DeviceId,
    },
    /// Work that is not a node, such as a replay of another graph.
    #[error("node {node:?}: a {what} cannot be a node")]
    NotANode {
        /// The node's name.
        node: String,
        /// What it is.
        what: &'static str,
    },
    /// Memory in between, for a copy that no device can do alone, could not be had.
    #[error("node {node:?}: memory for the way over the host could not be had")]
    Staging {
        /// The node's name.
        node: String,
        /// Why.
        source: Box<AllocError>,
    },
    /// A node was to be given operands that its operation cannot have.
    #[error("node {node:?}: {source}")]
    Operand {
        /// The node's name.
        node: String,
        /// What is wrong with them.
        source: Box<SubmitError>,
    },
    /// A node was to become another kind of node.
    #[error("node {node:?} is a {expected} and cannot become a {actual}")]
    OtherKind {
        /// The node's name.
        node: String,
        /// What it is.
        expected: &'static str,
        /// What it was to become.
        actual: &'static str,
    },
    /// The graph has as many nodes as it can.
    #[error("a graph holds at most {limit} nodes")]
    TooManyNodes {
        /// As many as it can.
        limit: usize,
    },
}

/// Why a graph could not be prepared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// There is nothing in it.
    #[error("the graph has no nodes")]
    Empty,
    /// A device does not take a node.
    #[error("node {node} ({name:?}): {source}")]
    Node {
        /// Which.
        node: NodeId,
        /// Its name.
        name: String,
        /// What the device says.
        source: Box<GraphError>,
    },
    /// A device does not take a part of the graph.
    #[error(transparent)]
    Graph(Box<GraphError>),
    /// There is no such node.
    #[error("there is no node {node}; the graph has {node_count}")]
    NoSuchNode {
        /// The node asked for.
        node: NodeId,
        /// How many there are.
        node_count: usize,
    },
    /// A node was to be given operands that it cannot have.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// Why work was not taken. Nothing of it runs then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// There is no room, or something is in use, at this moment.
    #[error("busy: {reason}")]
    Busy {
        /// What is in the way.
        reason: BusyReason,
    },
    /// The node reads bytes that failed work was to write. Write all of them, or reset them.
    #[error("{poison}")]
    Poisoned {
        /// Which bytes, and why.
        poison: Poison,
    },
    /// A device did not take the work.
    #[error(transparent)]
    Submit(Box<SubmitError>),
    /// A device did not make what the work needs.
    #[error(transparent)]
    Open(Box<OpenError>),
    /// The node cannot be recorded.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A device did not prepare the work.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// Another library's call, or its queue, was refused.
    #[error(transparent)]
    Interop(Box<InteropError>),
}

/// What is in the way.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BusyReason {
    /// All slots of the prepared graph are under way.
    #[error("all {slots} slots of the graph are under way")]
    Slots {
        /// How many there are.
        slots: usize,
    },
    /// The runtime has as much under way as it was made for.
    #[error("{limit} submissions are under way, as many as the runtime takes")]
    Capacity {
        /// How many it takes.
        limit: usize,
    },
    /// A device's queue is full.
    #[error("a queue of {device} is full")]
    Queue {
        /// Whose.
        device: DeviceId,
    },
    /// A guard holds bytes that the work uses.
    #[error("a {holder} guard holds bytes {range:?} of a buffer")]
    Leased {
        /// `read` or `write`.
        holder: &'static str,
        /// Which bytes of its memory.
        range: Range<u64>,
    },
    /// Work of the host, or of other backends, that a hand-off comes after had not ended by its deadline.
    #[error("work that a hand-off on {device} comes after had not ended in time")]
    Before {
        /// The device it was for.
        device: DeviceId,
    },
    /// Bytes are in another library's hands.
    #[error("bytes {range:?} of a buffer are handed to another library")]
    HandedOff {
        /// Which bytes of its memory.
        range: Range<u64>,
    },
}

/// Bytes that failed work was to write.
#[derive(Debug, Clone, thiserror::Error)]
#[error("bytes {range:?} of a buffer of {device} are not what they should be: {cause}")]
pub struct Poison {
    /// The memory's device.
    pub device: DeviceId,
    /// Which bytes of its memory.
    pub range: Range<u64>,
    /// What was to write them.
    pub cause: Arc<NodeFailure>,
}

/// How a node failed, which may have been one of several.
#[derive(Debug, thiserror::Error)]
#[error("{nodes} failed on {place}: {reason}", nodes = name_all(.nodes))]
pub struct NodeFailure {
    /// The node, or all of a segment where the device does not tell which.
    pub nodes: Vec<FailedNode>,
    /// The device's name, or `the host`.
    pub place: String,
    /// What it may have written, by memory of which device.
    pub written: Vec<(DeviceId, Range<u64>)>,
    /// What the device says.
    pub reason: Arc<Failure>,
}

/// A node that failed, or was not run because of one that did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedNode {
    /// Its position in its graph.
    pub id: NodeId,
    /// Its name.
    pub name: String,
}

fn is_used(usage: Option<Usage>) -> String {
    usage.map_or_else(|| "is missing".to_owned(), |usage| format!("is {usage}"))
}

fn name_all(nodes: &[FailedNode]) -> String {
    const SHOWN: usize = 3;
    let names: Vec<String> =
        nodes.iter().take(SHOWN).map(|node| format!("node {} ({:?})", node.id, node.name)).collect();
    let more = nodes.len().saturating_sub(SHOWN);
    let more = if more == 0 { String::new() } else { format!(" or one of {more} more") };
    format!("{}{more}", names.join(" or "))
}

/// How a submission ended otherwise than well, or that it had not ended by the deadline.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CompletionError {
    /// The deadline passed. The work goes on.
    #[error("not complete by the deadline; the work goes on")]
    Timeout,
    /// It was cancelled, and what had begun has ended.
    #[error("cancelled")]
    Cancelled,
    /// A node failed, and those that needed it did not run.
    #[error("{0}")]
    Failed(Arc<NodeFailure>),
}

/// Why the host cannot have bytes now.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The host cannot address them, or the range is wrong.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Something holds them.
    #[error("busy: {reason}")]
    Busy {
        /// What.
        reason: BusyReason,
    },
    /// Work that uses them was not complete by the deadline, and goes on.
    #[error("work that uses the bytes was not complete by the deadline")]
    Timeout,
    /// Failed work was to write them.
    #[error("{poison}")]
    Poisoned {
        /// Which, and why.
        poison: Poison,
    },
    /// The runtime was not made with the memory's device, or the buffer shares memory with one that was used before.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl From<SubmitError> for RunError {
    fn from(error: SubmitError) -> Self {
        Self::Submit(Box::new(error))
    }
}

impl From<OpenError> for RunError {
    fn from(error: OpenError) -> Self {
        Self::Open(Box::new(error))
    }
}

impl From<InteropError> for RunError {
    fn from(error: InteropError) -> Self {
        Self::Interop(Box::new(error))
    }
}

impl RecordError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Staging { source, .. } => source.class(),
            Self::Operand { source, .. } => source.class(),
            Self::TooManyNodes { .. } => ErrorClass::Exhausted,
            _ => ErrorClass::Usage,
        }
    }
}

impl PrepareError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Empty | Self::NoSuchNode { .. } => ErrorClass::Usage,
            Self::Node { source, .. } | Self::Graph(source) => source.class(),
            Self::Record(error) => error.class(),
        }
    }
}

impl RunError {
    /// What becomes of work that was to be handed over for somebody who is not there to be told.
    pub(crate) fn into_failure(self, name: &str) -> Failure {
        match self {
            Self::Submit(error) => Failure::Submit(*error),
            error => Failure::TaskFailed { task: name.to_owned(), reason: error.to_string() },
        }
    }

    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Busy { .. } => ErrorClass::Exhausted,
            Self::Poisoned { poison } => poison.cause.reason.class(),
            Self::Submit(error) => error.class(),
            Self::Open(error) => error.class(),
            Self::Record(error) => error.class(),
            Self::Prepare(error) => error.class(),
            Self::Interop(error) => error.class(),
        }
    }
}

impl CompletionError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Timeout | Self::Cancelled => ErrorClass::Transient,
            Self::Failed(failure) => failure.reason.class(),
        }
    }
}

impl MapError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Range(error) => error.class(),
            Self::Busy { .. } => ErrorClass::Exhausted,
            Self::Timeout => ErrorClass::Transient,
            Self::Poisoned { poison } => poison.cause.reason.class(),
            Self::Record(error) => error.class(),
        }
    }
}
