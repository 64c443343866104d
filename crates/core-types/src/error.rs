//! What can be refused at the seam, one enum per family of operations.

mod collective;

use std::sync::Arc;

use crate::{Access, Bytes, CodeFormat, DeviceId, Failure, Features, MemoryKind, QueueId};

pub use self::collective::{CallError, CollectiveError};

/// How to react to an error; policy matches on this and never on the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorClass {
    /// The call is wrong; repeating it cannot help. Fix the program.
    Usage,
    /// This device or backend cannot do it. Choose another.
    Unsupported,
    /// Memory, slots or units are used up. Free some, then repeat.
    Exhausted,
    /// It did not work this time; the same call may work later.
    Transient,
    /// The device is lost to this process. Move its work elsewhere.
    DeviceLost,
    /// Another process or rank is lost. Shrink, then go on.
    PeerLost,
    /// A defect of ours or of a driver. Report it.
    Internal,
}

/// A vendor call that failed, with everything the vendor said.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{api} returned {code} ({name})")]
pub struct DriverError {
    /// The vendor's function.
    pub api: &'static str,
    /// The vendor's code.
    pub code: i64,
    /// The vendor's name or text for the code.
    pub name: String,
}

/// Why a backend or device could not be opened, or an object of it not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The backend cannot run here.
    #[error("backend {backend} is unavailable: {missing}")]
    Unavailable {
        /// The backend asked for.
        backend: &'static str,
        /// What it lacks, and how to get it.
        missing: String,
        /// What the driver says of its version, where there is one that got as far as that.
        driver: Option<String>,
    },
    /// No device of the backend has this position.
    #[error("backend {backend} has no device {ordinal}; it has {device_count}")]
    UnknownDevice {
        /// The backend asked.
        backend: &'static str,
        /// The position asked for.
        ordinal: u32,
        /// How many devices there are.
        device_count: u32,
    },
    /// The device lacks features that were required.
    #[error("{device} does not support {missing}")]
    Unsupported {
        /// The device asked.
        device: DeviceId,
        /// The required features it lacks.
        missing: Features,
    },
    /// The configuration contradicts itself.
    #[error("configuration is invalid: {reason}")]
    InvalidConfig {
        /// The contradiction.
        reason: String,
    },
    /// The process may not have another thread.
    #[error("{what} cannot have the threads it needs: {reason}; look at the limits of this process")]
    NoThread {
        /// Who needs them.
        what: String,
        /// The operating system's words.
        reason: String,
    },
    /// There is no memory for what an open device needs.
    #[error("memory that an open device needs could not be had")]
    Memory(#[source] AllocError),
    /// The device is lost.
    #[error("{0}")]
    Failed(Arc<Failure>),
    /// A vendor call failed.
    #[error("driver call failed")]
    Driver(#[source] DriverError),
}

/// Why memory could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// A buffer of no bytes was asked for.
    #[error("a buffer on {device} must hold at least one byte")]
    ZeroSize {
        /// The device asked.
        device: DeviceId,
    },
    /// The device has less free memory than that.
    #[error("{device} has {available} free of {capacity}; {requested} were asked for")]
    OutOfMemory {
        /// The device asked.
        device: DeviceId,
        /// The size asked for.
        requested: Bytes,
        /// What is free.
        available: Bytes,
        /// What the device has in all.
        capacity: Bytes,
    },
    /// The host has less memory than that, whatever the device could hold.
    #[error("the host cannot give {device} {requested}")]
    HostOutOfMemory {
        /// The device asked.
        device: DeviceId,
        /// The size asked for.
        requested: Bytes,
    },
    /// The device has no memory of this kind.
    #[error("{device} has no {kind} memory")]
    UnsupportedKind {
        /// The device asked.
        device: DeviceId,
        /// The kind asked for.
        kind: MemoryKind,
    },
    /// Foreign memory cannot be used as it is.
    #[error("{device} cannot import this memory: {reason}")]
    CannotImport {
        /// The device asked.
        device: DeviceId,
        /// The rule the memory breaks.
        reason: String,
    },
    /// The buffer cannot be given to other processes.
    #[error("{device} cannot export this memory: {reason}")]
    CannotExport {
        /// The device asked.
        device: DeviceId,
        /// What stands in the way.
        reason: String,
    },
    /// The device is lost.
    #[error("{0}")]
    Failed(Arc<Failure>),
    /// A vendor call failed.
    #[error("driver call failed")]
    Driver(#[source] DriverError),
}

/// Why a range of memory, or a pair of them, is not a valid operand.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// The range holds no bytes.
    #[error("a range must hold at least one byte")]
    ZeroSize,
    /// The range leaves its buffer.
    #[error("{size} bytes from offset {offset} leave a buffer of {buffer_size} bytes")]
    OutOfBounds {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        size: u64,
        /// The buffer's (or view's) size in bytes.
        buffer_size: u64,
    },
    /// Source and destination differ in length.
    #[error("source holds {source_bytes} bytes and destination {destination_bytes}")]
    LengthMismatch {
        /// Bytes in the source.
        source_bytes: u64,
        /// Bytes in the destination.
        destination_bytes: u64,
    },
    /// Source and destination share bytes.
    #[error("source and destination overlap in {bytes} bytes of one buffer")]
    Overlap {
        /// How many bytes they share.
        bytes: u64,
    },
    /// A fill pattern does not divide the range.
    #[error("a pattern of {pattern_bytes} bytes does not divide {size} bytes")]
    PatternMismatch {
        /// The pattern's size in bytes.
        pattern_bytes: u64,
        /// The range's size in bytes.
        size: u64,
    },
    /// A word does not lie where it can be reached in one access.
    #[error("a word at {offset} does not lie at a multiple of {needed}")]
    Misaligned {
        /// Its first byte.
        offset: u64,
        /// What it has to be a multiple of.
        needed: u64,
    },
    /// A timestamp takes eight bytes at a multiple of eight.
    #[error("a timestamp takes 8 bytes at a multiple of 8, not {size} at {offset}")]
    NoTimestamp {
        /// Where the view starts.
        offset: u64,
        /// How long it is.
        size: u64,
    },
    /// The host cannot address the memory.
    #[error("memory of {device} is not visible to the host")]
    NotHostVisible {
        /// The memory's device.
        device: DeviceId,
    },
}

/// Why code could not be loaded, or a kernel not be found in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The device cannot run code in this form.
    #[error("{device} cannot run {format}")]
    UnsupportedFormat {
        /// The device asked.
        device: DeviceId,
        /// The form offered.
        format: CodeFormat,
    },
    /// A kernel takes more bytes of scalars than fit; give it the rest in a buffer.
    #[error(
        "kernel {kernel:?} takes {size_bytes} bytes of scalars and {limit_bytes} fit; give it the rest in a buffer"
    )]
    ScalarsTooLarge {
        /// The kernel.
        kernel: String,
        /// As they lie in the kernel's arguments, gaps among them.
        size_bytes: u64,
        /// What fits ([`Limits::scalar_bytes`](crate::Limits::scalar_bytes)).
        limit_bytes: u64,
    },
    /// The code, or its compiler, has something to say.
    #[error("code was refused: {log}")]
    Rejected {
        /// The compiler's or loader's words, with line and column where it gives them.
        log: String,
    },
    /// A dynamic library could not be opened.
    #[error("library {path} could not be loaded: {reason}")]
    Library {
        /// The file.
        path: String,
        /// The loader's words.
        reason: String,
    },
    /// A dynamic library has no such function.
    #[error("library {path} has no function {symbol:?}")]
    MissingSymbol {
        /// The file.
        path: String,
        /// The kernel's name.
        symbol: String,
    },
    /// The code has no such kernel.
    #[error("there is no kernel {name:?}; the module has {available:?}")]
    NoSuchKernel {
        /// The name asked for.
        name: String,
        /// The names that exist.
        available: Vec<String>,
    },
    /// Two kernels of one module carry one name.
    #[error("the module has two kernels named {name:?}")]
    DuplicateKernel {
        /// The name.
        name: String,
    },
    /// The driver would wait for a resident kernel that does not return. Nothing was loaded; stop the resident.
    #[error(
        "code cannot be loaded on {device} beside resident {kernel:?}, whose workgroup {workgroup} does not return"
    )]
    Unparkable {
        /// The device asked.
        device: DeviceId,
        /// The resident's kernel.
        kernel: String,
        /// A workgroup that is inside it.
        workgroup: u32,
    },
    /// The device is lost.
    #[error("{0}")]
    Failed(Arc<Failure>),
    /// A vendor call failed.
    #[error("driver call failed")]
    Driver(#[source] DriverError),
}

/// Why a launch does not fit its kernel's contract or its device's limits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Another number of arguments was expected.
    #[error("kernel {kernel:?} takes {expected} arguments, {actual} were given")]
    ArgumentCount {
        /// The kernel.
        kernel: String,
        /// By its contract.
        expected: usize,
        /// As given.
        actual: usize,
    },
    /// An argument is of another sort than the contract says.
    #[error("argument {index} of kernel {kernel:?} must be {expected}")]
    ArgumentKind {
        /// The kernel.
        kernel: String,
        /// Position from 0.
        index: usize,
        /// What the contract says, in words.
        expected: String,
    },
    /// A buffer argument is too small.
    #[error("argument {index} of kernel {kernel:?} needs {needed} bytes, the view has {actual}")]
    BufferTooSmall {
        /// The kernel.
        kernel: String,
        /// Position from 0.
        index: usize,
        /// By the contract.
        needed: u64,
        /// As given.
        actual: u64,
    },
    /// A buffer argument starts at a place the kernel cannot use.
    #[error(
        "argument {index} of kernel {kernel:?} must start at a multiple of {needed} bytes, it starts at {offset}"
    )]
    Misaligned {
        /// The kernel.
        kernel: String,
        /// Position from 0.
        index: usize,
        /// By the contract.
        needed: u64,
        /// The view's offset in its buffer.
        offset: u64,
    },
    /// Two arguments share bytes that one of them writes.
    #[error("arguments {first} ({first_access}) and {second} ({second_access}) of kernel {kernel:?} overlap")]
    Aliased {
        /// The kernel.
        kernel: String,
        /// Position of the one.
        first: usize,
        /// What the kernel does to it.
        first_access: Access,
        /// Position of the other.
        second: usize,
        /// What the kernel does to it.
        second_access: Access,
    },
    /// The grid or the workgroup is empty or too large.
    #[error("kernel {kernel:?} cannot run {what} of {actual:?}; the limit is {limit:?}")]
    Dimensions {
        /// The kernel.
        kernel: String,
        /// `workgroups` or `workgroup size`.
        what: &'static str,
        /// As given.
        actual: [u32; 3],
        /// The largest allowed in each dimension.
        limit: [u32; 3],
    },
}

/// Why a queue did not take a submission.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// An operand lies on a device that this queue's device cannot reach.
    #[error("{from} has no link to {to}")]
    NoLink {
        /// Where the bytes are.
        from: DeviceId,
        /// Where they would have to go.
        to: DeviceId,
    },
    /// An operand belongs to another backend; import it, or copy through `transfer`.
    #[error("{what} of {owner} cannot be used on {device}")]
    Foreign {
        /// `buffer`, `kernel` or `semaphore`.
        what: &'static str,
        /// Whose it is.
        owner: DeviceId,
        /// The queue's device.
        device: DeviceId,
    },
    /// The device does not carry out such an operation; its features say what it does.
    #[error("{device} does no {what}")]
    Unsupported {
        /// The queue's device.
        device: DeviceId,
        /// The operation.
        what: &'static str,
    },
    /// A kernel was given a larger view than the device binds; give it parts, one launch each.
    #[error(
        "buffer {buffer} of kernel {kernel:?} has {size_bytes} bytes and {device} binds {limit_bytes}; give it \
         views of parts"
    )]
    BindingTooLarge {
        /// The queue's device.
        device: DeviceId,
        /// The kernel.
        kernel: String,
        /// Position among the kernel's buffers, from 0.
        buffer: usize,
        /// The view's size.
        size_bytes: u64,
        /// The most that is bound.
        limit_bytes: u64,
    },
    /// A kernel was given a view that starts where the device binds none; move it to such a place, or copy it.
    #[error(
        "buffer {buffer} of kernel {kernel:?} starts at {offset} and {device} binds multiples of {multiple_bytes} \
         bytes; let the view start at one, or copy it to a buffer of its own"
    )]
    BindingMisaligned {
        /// The queue's device.
        device: DeviceId,
        /// The kernel.
        kernel: String,
        /// Position among the kernel's buffers, from 0.
        buffer: usize,
        /// The view's offset in its buffer.
        offset: u64,
        /// Where views may start.
        multiple_bytes: u64,
    },
    /// A kernel that runs in slices was put in a queue; start it as a resident.
    #[error("kernel {kernel:?} runs in slices and cannot be queued")]
    Sliced {
        /// The kernel.
        kernel: String,
    },
    /// A signal would not raise its semaphore.
    #[error("a signal of {value} does not raise a semaphore at {current}")]
    NotIncreasing {
        /// The value to be signalled.
        value: u64,
        /// The value already reached or promised.
        current: u64,
    },
    /// The queue holds as much as it was made for.
    #[error("{queue} holds {capacity} submissions and takes no more now")]
    QueueFull {
        /// The queue.
        queue: QueueId,
        /// What it holds at most.
        capacity: usize,
    },
    /// An earlier submission to this queue failed; make a new queue.
    #[error("the queue stopped: {0}")]
    Failed(Arc<Failure>),
    /// A check of the validating device found the submission unsafe.
    #[error("validation: {reason}")]
    Invalid {
        /// What is wrong, with the operands named.
        reason: String,
    },
    /// A vendor call failed.
    #[error("driver call failed")]
    Driver(#[source] DriverError),
}

/// Why a graph could not be prepared or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// The device prepares no graphs.
    #[error("{device} prepares no graphs")]
    Unsupported {
        /// The device asked.
        device: DeviceId,
    },
    /// An edge does not come from an earlier node.
    #[error("node {node} cannot come after node {after}: edges lead from earlier to later nodes")]
    Edge {
        /// The node with the edge.
        node: usize,
        /// Where the edge comes from.
        after: usize,
    },
    /// There is no such node.
    #[error("there is no node {node}; the graph has {node_count}")]
    NoSuchNode {
        /// The node asked for.
        node: usize,
        /// How many there are.
        node_count: usize,
    },
    /// A node keeps its kind of operation.
    #[error("node {node} is a {expected} and cannot become a {actual}")]
    OtherKind {
        /// The node.
        node: usize,
        /// What it is.
        expected: &'static str,
        /// What it was to become.
        actual: &'static str,
    },
    /// The device cannot have this node in a graph.
    #[error("node {node}: {reason}")]
    Node {
        /// The node.
        node: usize,
        /// What is in the way.
        reason: String,
    },
    /// The device cannot carry out a node's operation.
    #[error("node {node}: {source}")]
    Submit {
        /// The node.
        node: usize,
        /// What is wrong with it.
        source: SubmitError,
    },
    /// The device is lost.
    #[error("{0}")]
    Failed(Arc<Failure>),
    /// A vendor call failed.
    #[error("driver call failed")]
    Driver(#[source] DriverError),
}

/// Why another library's queue, memory or work could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InteropError {
    /// It belongs to another device or backend.
    #[error("a {what} of {owner} has no handle on {device}")]
    Foreign {
        /// `buffer` or `queue`.
        what: &'static str,
        /// Whose it is.
        owner: DeviceId,
        /// The device asked.
        device: DeviceId,
    },
    /// It cannot be used as it is.
    #[error("{device} cannot use {what}: {reason}")]
    Refused {
        /// The device asked.
        device: DeviceId,
        /// What was offered.
        what: String,
        /// What stands in the way.
        reason: String,
    },
    /// Work could not be captured.
    #[error("the work could not be captured on {device}: {reason}")]
    Capture {
        /// The device asked.
        device: DeviceId,
        /// The recording program's words, or the driver's.
        reason: String,
    },
    /// The device is lost.
    #[error("{0}")]
    Failed(Arc<Failure>),
    /// A vendor call failed.
    #[error("driver call failed")]
    Driver(#[source] DriverError),
}

/// Why a resident kernel could not be started, parked, resumed or stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResidentError {
    /// The launch does not fit its kernel.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// An operand cannot be used on this device.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The kernel does not run in slices; say so in its contract if it does.
    #[error("kernel {kernel:?} does not run in slices and cannot be resident")]
    NotSliced {
        /// The kernel.
        kernel: String,
    },
    /// The description contradicts itself.
    #[error("the resident cannot be as described: {reason}")]
    Invalid {
        /// The contradiction.
        reason: String,
    },
    /// Something about this process or the device would make residents hang.
    #[error("{device} runs no residents here: {reason}")]
    Refused {
        /// The device.
        device: DeviceId,
        /// What it is.
        reason: String,
    },
    /// There is no memory for what a resident needs beside its own.
    #[error("memory that a resident needs could not be had")]
    Memory(#[source] AllocError),
    /// More multiprocessors than the device has left for residents.
    #[error(
        "{workgroups} workgroups of {kernel:?} need {wanted} multiprocessors; {device} has {free} left for \
         residents"
    )]
    OverBudget {
        /// The device.
        device: DeviceId,
        /// The kernel.
        kernel: String,
        /// Workgroups asked for.
        workgroups: u64,
        /// Multiprocessors they need.
        wanted: u32,
        /// Multiprocessors still free.
        free: u32,
    },
    /// Fewer multiprocessors are free than were to be kept free of residents.
    #[error("{device} has {free} multiprocessors left beside residents, not {wanted}")]
    NotFree {
        /// The device.
        device: DeviceId,
        /// Multiprocessors asked for.
        wanted: u32,
        /// Multiprocessors still free.
        free: u32,
    },
    /// Some workgroups did not start in time; the resident was told to end.
    #[error("{started} of {wanted} workgroups of {kernel:?} started in time")]
    NotResident {
        /// The kernel.
        kernel: String,
        /// Workgroups that checked in.
        started: u32,
        /// Workgroups launched.
        wanted: u32,
    },
    /// A workgroup did not return by the deadline. A resident that was to park keeps running; one that was to
    /// end does so as soon as the workgroup returns.
    #[error("workgroup {workgroup} of {kernel:?} on {device} did not return in time")]
    Unparkable {
        /// The device.
        device: DeviceId,
        /// The kernel.
        kernel: String,
        /// The first workgroup still inside its kernel.
        workgroup: u32,
    },
    /// The resident is not in a state that allows the call.
    #[error("the resident is {state}, it cannot {action}")]
    WrongState {
        /// The call: `park`, `resume` or `stop`.
        action: &'static str,
        /// The state it is in.
        state: &'static str,
    },
    /// The resident failed.
    #[error("{0}")]
    Failed(Arc<Failure>),
    /// A vendor call failed.
    #[error("driver call failed")]
    Driver(#[source] DriverError),
}

impl OpenError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Unavailable { .. } | Self::Unsupported { .. } => ErrorClass::Unsupported,
            Self::UnknownDevice { .. } | Self::InvalidConfig { .. } => ErrorClass::Usage,
            Self::NoThread { .. } => ErrorClass::Exhausted,
            Self::Memory(error) => error.class(),
            Self::Failed(failure) => failure.class(),
            Self::Driver(_) => ErrorClass::Internal,
        }
    }
}

impl AllocError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::ZeroSize { .. } | Self::CannotImport { .. } | Self::CannotExport { .. } => {
                ErrorClass::Usage
            }
            Self::OutOfMemory { .. } | Self::HostOutOfMemory { .. } => ErrorClass::Exhausted,
            Self::UnsupportedKind { .. } => ErrorClass::Unsupported,
            Self::Failed(failure) => failure.class(),
            Self::Driver(_) => ErrorClass::Internal,
        }
    }
}

impl RangeError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        ErrorClass::Usage
    }
}

impl LoadError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::UnsupportedFormat { .. } | Self::ScalarsTooLarge { .. } => ErrorClass::Unsupported,
            Self::Rejected { .. }
            | Self::Library { .. }
            | Self::MissingSymbol { .. }
            | Self::NoSuchKernel { .. }
            | Self::DuplicateKernel { .. } => ErrorClass::Usage,
            Self::Unparkable { .. } => ErrorClass::Transient,
            Self::Failed(failure) => failure.class(),
            Self::Driver(_) => ErrorClass::Internal,
        }
    }
}

impl LaunchError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        ErrorClass::Usage
    }
}

impl SubmitError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::NoLink { .. } | Self::Unsupported { .. } => ErrorClass::Unsupported,
            Self::Foreign { .. }
            | Self::BindingTooLarge { .. }
            | Self::BindingMisaligned { .. }
            | Self::Sliced { .. }
            | Self::NotIncreasing { .. }
            | Self::Invalid { .. } => ErrorClass::Usage,
            Self::QueueFull { .. } => ErrorClass::Exhausted,
            Self::Failed(failure) => failure.class(),
            Self::Driver(_) => ErrorClass::Internal,
        }
    }
}

impl GraphError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Unsupported { .. } => ErrorClass::Unsupported,
            Self::Edge { .. } | Self::NoSuchNode { .. } | Self::OtherKind { .. } | Self::Node { .. } => {
                ErrorClass::Usage
            }
            Self::Submit { source, .. } => source.class(),
            Self::Failed(failure) => failure.class(),
            Self::Driver(_) => ErrorClass::Internal,
        }
    }
}

impl InteropError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Foreign { .. } | Self::Refused { .. } | Self::Capture { .. } => ErrorClass::Usage,
            Self::Failed(failure) => failure.class(),
            Self::Driver(_) => ErrorClass::Internal,
        }
    }
}

impl ResidentError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Launch(error) => error.class(),
            Self::Submit(error) => error.class(),
            Self::OverBudget { .. } | Self::NotFree { .. } | Self::NotResident { .. } => {
                ErrorClass::Exhausted
            }
            Self::Unparkable { .. } => ErrorClass::Transient,
            Self::WrongState { .. } | Self::NotSliced { .. } | Self::Invalid { .. } => ErrorClass::Usage,
            Self::Refused { .. } => ErrorClass::Unsupported,
            Self::Memory(error) => error.class(),
            Self::Failed(failure) => failure.class(),
            Self::Driver(_) => ErrorClass::Internal,
        }
    }
}
