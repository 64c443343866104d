//! The words every warpweft crate shares, and the seam that every backend implements.
//!
//! A [`Backend`] opens [`Device`]s. A device allocates [`Buffer`]s, loads [`Module`]s of [`Kernel`]s, and
//! makes [`Queue`]s and [`Semaphore`]s. A [`Submission`] is plain data: wait for these semaphore values,
//! do these operations in order, raise those. Everything above the seam is written against these traits
//! and names no vendor; everything below them implements one vendor.
//!
//! # Choices
//!
//! - The seam is object-safe, since devices of different backends meet in one program. Per-message and
//!   per-element work never crosses it.
//! - A small required core and whole optional families ([`Peers`], [`Links`], [`HostImport`],
//!   [`Residents`], [`Graphs`], [`DeviceClock`], [`Interop`], [`Sharing`], [`Collectives`]); [`Features`] are
//!   negotiated when a device is opened, so that nothing is found missing in the middle of a run.
//! - Operands are checked once, by the constructors of [`BufferView`], [`CopyRegion`], [`FillRegion`] and
//!   [`Launch`]; backends do not look again.
//! - Everything that can wait takes a [`Deadline`].
//! - Errors say how to react by [`ErrorClass`].
//!
//! # What is not here
//!
//! No foreign code, no threads, and no clock but the one [`Deadline`] reads.

mod access;
mod buffer;
mod clock;
mod collective;
mod deadline;
mod device;
mod element;
mod error;
mod failure;
mod graph;
mod host_function;
mod id;
mod interop;
mod kernel;
mod link;
mod queue;
mod resident;
mod semaphore;
mod shared;
#[cfg(unix)]
mod sharing;
mod sync;
mod timeline;
mod unit;

pub use access::Access;
pub use buffer::{Buffer, BufferDesc, BufferView, HostMapping, MemoryKind, MemoryPlace};
pub use clock::{ClockModel, ClockReport, ClockSample, DeviceClock, HostTime, TimestampRegion};
pub use collective::{
    CollectiveCall, CollectiveFailure, CollectiveGroup, CollectiveOp, Collectives, NativeCommunicator,
    NativeCommunicatorDesc, NativeId, OwnedCall, OwnedCollectives, Registration, RegistrationKind,
};
pub use deadline::Deadline;
pub use device::{
    Backend, Device, DeviceExt, DeviceInfo, DeviceKind, Features, HostImport, HostMemory, Limits, Links,
    MemoryUsage, PeerAccess, Peers,
};
pub use element::{DType, ReduceOp};
pub use error::{
    AllocError, CallError, CollectiveError, DriverError, ErrorClass, GraphError, InteropError, LaunchError,
    LoadError, OpenError, RangeError, ResidentError, SubmitError,
};
pub use failure::{Failure, SignalError, WaitError};
pub use graph::{Graph, GraphNode, GraphOp, Graphs, PreparedGraph};
pub use host_function::{
    AtomicAdd, Element, HostFunction, InBounds, Progress, RawArgument, RawWorkgroup, SharedSlice,
    WORKGROUP_ABI, Workgroup,
};
pub use id::{DeviceId, DeviceUuid, ParseIdError, PciAddress, QueueId, SubmissionId, WorkId};
pub use interop::{CapturedWork, Interop, NativeHandle, NativeMemory, NativeQueue};
pub use kernel::{
    Arg, CodeFormat, ForeignCode, Kernel, KernelCode, KernelContract, KernelResources, Launch, Module, Param,
};
pub use link::{LinkClass, LinkEnd, LinkFact, LinkTraffic, PathClass, Provenance};
pub use queue::{
    CopyRegion, FillRegion, Op, OpRoom, OwnedLaunch, OwnedOp, OwnedSubmission, Queue, QueueDesc, Submission,
};
pub use resident::{
    GiveWay, MultiprocessorPool, ReservedMultiprocessors, Resident, ResidentBudget, ResidentDesc,
    ResidentState, Residents, SliceConfig,
};
pub use semaphore::{Reached, Semaphore, SemaphorePoint, promise_all};
#[cfg(unix)]
pub use sharing::{SharedMemory, Sharing};
pub use timeline::{Expecting, Timeline};
pub use unit::{Bandwidth, Bytes};
