//! Collectives: operations that the ranks of a group do together.

use std::{any::Any, fmt, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::{
    Access, Buffer, BufferView, CallError, CollectiveError, DType, Deadline, DeviceId, Failure, RangeError,
    ReduceOp,
};

/// The optional family of devices whose driver stack has collectives of its own.
///
/// Devices without it are served by engines that are planned from copies and launches.
pub trait Collectives: fmt::Debug + Send + Sync {
    /// The library and its version, such as `NCCL 2.28.3`.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Unavailable`] when it is missing or too old.
    fn library(&self) -> Result<String, CollectiveError>;

    /// Whether it does this to elements of this type.
    fn does(&self, op: CollectiveOp, dtype: DType) -> bool;

    /// Makes an id by which ranks find each other; one rank makes it and gives it to the others.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    fn create_id(&self) -> Result<NativeId, CollectiveError>;

    /// Makes this device a rank. All ranks do so at about the same time, each in a thread of its own, and every pair
    /// of ranks is connected when it returns.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::TimedOut`] by the deadline, when the others do not come.
    fn join(
        &self,
        desc: &NativeCommunicatorDesc,
        deadline: Deadline,
    ) -> Result<Arc<dyn NativeCommunicator>, CollectiveError>;
}

/// What ranks need to find each other: bytes of the vendor's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NativeId(pub Vec<u8>);

/// One rank to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NativeCommunicatorDesc {
    /// By which the ranks find each other.
    pub id: NativeId,
    /// Which this is.
    pub rank: u32,
    /// How many there are.
    pub size: u32,
    /// Multiprocessors that its kernels may take at most; as many as the library likes if none is said.
    pub multiprocessors: Option<u32>,
}

/// One rank of a group of devices, in the vendor's own form.
///
/// It is used through submissions ([`crate::Op::Collective`]), on any queue of its device, by one thread at a time or
/// many: what is enqueued in which order on a rank has to be the same on all ranks.
pub trait NativeCommunicator: Any + fmt::Debug + Send + Sync {
    /// Its device.
    fn device(&self) -> DeviceId;

    /// Which rank it is.
    fn rank(&self) -> u32;

    /// How many there are.
    fn size(&self) -> u32;

    /// Asks the library for an error that came later.
    ///
    /// # Errors
    ///
    /// The error.
    fn check(&self) -> Result<(), CollectiveError>;

    /// Ends what is under way, from any thread. Submissions with calls of this communicator that are not over fail with
    /// `failure`, and their queues with them; later ones are refused. What they used is let go of once the device is
    /// past them.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::TimedOut`] if the library does not let go of them by the deadline.
    fn abort(&self, failure: Arc<Failure>, deadline: Deadline) -> Result<(), CollectiveError>;

    /// Takes no more calls: later submissions with some, replays of graphs too, are refused with `failure`. What is under
    /// way goes on.
    fn close(&self, failure: Arc<Failure>);

    /// Registers memory of this device for faster access by the library, for as long as what is returned lives. With
    /// `symmetric`, all ranks call this together for memory from [`Self::allocate`] of one size.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Unsupported`] or what the library says.
    fn register(
        &self,
        buffer: &Arc<dyn Buffer>,
        kind: RegistrationKind,
    ) -> Result<Arc<dyn Registration>, CollectiveError>;

    /// Allocates zeroed memory of the library's, which can be registered in any way.
    ///
    /// # Errors
    ///
    /// [`CollectiveError::Unsupported`] or what the library says.
    fn allocate(&self, size: u64) -> Result<Arc<dyn Buffer>, CollectiveError>;
}

/// How memory is registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RegistrationKind {
    /// By this rank for itself.
    Local,
    /// By all ranks, at the same offset of each rank's window.
    Symmetric,
}

/// Registered memory: it is deregistered when this is dropped, and kept until then.
pub trait Registration: Any + fmt::Debug + Send + Sync {
    /// The memory.
    fn buffer(&self) -> &Arc<dyn Buffer>;

    /// What it really is, which may be less than was asked for.
    fn kind(&self) -> RegistrationKind;
}

/// What ranks do together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CollectiveOp {
    /// Every rank gets what all ranks' elements reduce to.
    AllReduce(ReduceOp),
    /// Rank `r` gets part `r` of what they reduce to.
    ReduceScatter(ReduceOp),
    /// One rank gets what they reduce to.
    Reduce {
        /// How.
        op: ReduceOp,
        /// Which.
        root: u32,
    },
    /// Every rank gets what all have, by rank.
    AllGather,
    /// Every rank gets what one has.
    Broadcast {
        /// Which.
        root: u32,
    },
    /// One rank gets what all have, by rank.
    Gather {
        /// Which.
        root: u32,
    },
    /// Rank `r` gets part `r` of what one has.
    Scatter {
        /// Which.
        root: u32,
    },
    /// Rank `r` gets part `r` of what each has, by rank.
    AllToAll,
    /// Gives to a rank.
    Send {
        /// Which.
        to: u32,
    },
    /// Takes from a rank.
    Recv {
        /// Which.
        from: u32,
    },
}

impl CollectiveOp {
    /// Its name, as programs write it: `all_reduce`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::Reduce { .. } => "reduce",
            Self::AllGather => "all_gather",
            Self::Broadcast { .. } => "broadcast",
            Self::Gather { .. } => "gather",
            Self::Scatter { .. } => "scatter",
            Self::AllToAll => "all_to_all",
            Self::Send { .. } => "send",
            Self::Recv { .. } => "recv",
        }
    }

    /// How it reduces, if it does.
    pub const fn reduction(self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce(op) | Self::ReduceScatter(op) | Self::Reduce { op, .. } => Some(op),
            _ => None,
        }
    }

    /// The other rank or the root, if it has one.
    pub const fn peer(self) -> Option<u32> {
        match self {
            Self::Reduce { root, .. }
            | Self::Broadcast { root }
            | Self::Gather { root }
            | Self::Scatter { root } => Some(root),
            Self::Send { to } => Some(to),
            Self::Recv { from } => Some(from),
            Self::AllReduce(_) | Self::ReduceScatter(_) | Self::AllGather | Self::AllToAll => None,
        }
    }

    /// Whether only two ranks take part.
    pub const fn is_pairwise(self) -> bool {
        matches!(self, Self::Send { .. } | Self::Recv { .. })
    }

    /// The operands that a rank has, in bytes for each byte of the smaller one: what it gives and what it gets.
    const fn shape(self, rank: u32, size: u32) -> (Option<u64>, Option<u64>) {
        let all = size as u64;
        match self {
            Self::AllReduce(_) => (Some(1), Some(1)),
            Self::ReduceScatter(_) => (Some(all), Some(1)),
            Self::Reduce { root, .. } => (Some(1), at(root, rank, 1)),
            Self::AllGather => (Some(1), Some(all)),
            Self::Broadcast { root } => (at(root, rank, 1), Some(1)),
            Self::Gather { root } => (Some(1), at(root, rank, all)),
            Self::Scatter { root } => (at(root, rank, all), Some(1)),
            Self::AllToAll => (Some(all), Some(all)),
            Self::Send { .. } => (Some(1), None),
            Self::Recv { .. } => (None, Some(1)),
        }
    }
}

/// `parts` for the root, nothing for others.
const fn at(root: u32, rank: u32, parts: u64) -> Option<u64> {
    if root == rank { Some(parts) } else { None }
}

impl fmt::Display for CollectiveOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        if let Some(op) = self.reduction() {
            write!(f, " {op}")?;
        }
        match self {
            Self::Send { to } => write!(f, " to rank {to}"),
            Self::Recv { from } => write!(f, " from rank {from}"),
            _ => self.peer().map_or(Ok(()), |root| write!(f, " at rank {root}")),
        }
    }
}

/// One rank's part of a collective, with operands that were checked.
#[derive(Debug, Clone, Copy)]
pub struct CollectiveCall<'a> {
    op: CollectiveOp,
    dtype: DType,
    src: Option<&'a BufferView>,
    dst: Option<&'a BufferView>,
}

impl<'a> CollectiveCall<'a> {
    /// The part of `rank` of `size` in `op`. What a rank has no part in is not given: a source of a rank that only
    /// receives, a destination of one that only sends.
    ///
    /// It is done in place where both operands begin with the same bytes of the result: the same view for reductions to
    /// all or to a root and for broadcasts, a rank's own part for gathers and scatters. They share no other bytes.
    ///
    /// # Errors
    ///
    /// See [`CallError`].
    pub fn new(
        op: CollectiveOp,
        dtype: DType,
        (rank, size): (u32, u32),
        src: Option<&'a BufferView>,
        dst: Option<&'a BufferView>,
    ) -> Result<Self, CallError> {
        if let Some(peer) = op.peer().filter(|peer| *peer >= size) {
            return Err(CallError::NoSuchRank { rank: peer, size });
        }
        if let Some(reduction) = op.reduction().filter(|reduction| !reduction.is_defined_for(dtype)) {
            return Err(CallError::NotDefined { op: reduction.name(), dtype });
        }
        let (gives, gets) = op.shape(rank, size);
        check_operand(op, "source", src, gives, dtype)?;
        check_operand(op, "destination", dst, gets, dtype)?;
        if let (Some(src), Some(dst), Some(gives), Some(gets)) = (src, dst, gives, gets) {
            if src.size() / gives != dst.size() / gets {
                return Err(RangeError::LengthMismatch {
                    source_bytes: src.size() / gives,
                    destination_bytes: dst.size() / gets,
                }
                .into());
            }
            check_overlap(src, dst, (gives, gets), rank)?;
        }
        Ok(Self { op, dtype, src, dst })
    }

    /// What is done.
    pub const fn op(&self) -> CollectiveOp {
        self.op
    }

    /// The type of its elements.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// What this rank gives, if it does.
    pub const fn src(&self) -> Option<&'a BufferView> {
        self.src
    }

    /// What this rank gets, if it does.
    pub const fn dst(&self) -> Option<&'a BufferView> {
        self.dst
    }

    /// Whether source and destination share bytes.
    pub fn is_in_place(&self) -> bool {
        self.src.zip(self.dst).is_some_and(|(src, dst)| src.overlap(dst) > 0)
    }

    /// Everything it touches, with what it does to it.
    pub fn for_each_access(&self, mut visit: impl FnMut(&'a BufferView, Access)) {
        if let Some(src) = self.src {
            visit(src, Access::Read);
        }
        if let Some(dst) = self.dst {
            visit(dst, Access::Write);
        }
    }
}

fn check_operand(
    op: CollectiveOp,
    what: &'static str,
    view: Option<&BufferView>,
    parts: Option<u64>,
    dtype: DType,
) -> Result<(), CallError> {
    match (view, parts) {
        (None, None) => Ok(()),
        (None, Some(_)) => Err(CallError::Missing { op: op.name(), what }),
        (Some(_), None) => Err(CallError::Superfluous { op: op.name(), what }),
        (Some(view), Some(parts)) => {
            let (size, element) = (view.size(), dtype.size_bytes());
            if !size.is_multiple_of(element * parts) || !view.offset().is_multiple_of(element) {
                let offset = view.offset();
                return Err(CallError::NotElements { what, size, offset, dtype, parts });
            }
            Ok(())
        }
    }
}

fn check_overlap(
    src: &BufferView,
    dst: &BufferView,
    (gives, gets): (u64, u64),
    rank: u32,
) -> Result<(), CallError> {
    let bytes = src.overlap(dst);
    if bytes == 0 {
        return Ok(());
    }
    let part = src.size() / gives;
    let own = u64::from(rank) * part;
    let is_own = |large: &BufferView, small: &BufferView| {
        large.slice(own..own + part).is_ok_and(|view| view.place() == small.place())
    };
    let fits = match (gives, gets) {
        (1, 1) => src.place() == dst.place(),
        (1, _) => is_own(dst, src),
        (_, 1) => is_own(src, dst),
        // Every part goes elsewhere, so that there is no place for it.
        _ => false,
    };
    if fits { Ok(()) } else { Err(RangeError::Overlap { bytes }.into()) }
}

/// Calls of one communicator that begin together, so that a rank can send and receive at once.
#[derive(Debug, Clone, Copy)]
pub struct CollectiveGroup<'a> {
    communicator: &'a Arc<dyn NativeCommunicator>,
    calls: &'a [CollectiveCall<'a>],
}

impl<'a> CollectiveGroup<'a> {
    /// These calls, which were checked for this communicator's rank and size.
    pub const fn new(communicator: &'a Arc<dyn NativeCommunicator>, calls: &'a [CollectiveCall<'a>]) -> Self {
        Self { communicator, calls }
    }

    /// Whose they are.
    pub const fn communicator(&self) -> &'a Arc<dyn NativeCommunicator> {
        self.communicator
    }

    /// The calls.
    pub const fn calls(&self) -> &'a [CollectiveCall<'a>] {
        self.calls
    }
}

/// A [`CollectiveGroup`] that owns what it names.
#[derive(Debug, Clone)]
pub struct OwnedCollectives {
    communicator: Arc<dyn NativeCommunicator>,
    calls: SmallVec<[OwnedCall; 1]>,
}

/// A [`CollectiveCall`] that owns its operands. It is made of one, and so of operands that were checked.
#[derive(Debug, Clone)]
pub struct OwnedCall {
    op: CollectiveOp,
    dtype: DType,
    src: Option<BufferView>,
    dst: Option<BufferView>,
}

impl From<&CollectiveCall<'_>> for OwnedCall {
    fn from(call: &CollectiveCall<'_>) -> Self {
        Self { op: call.op, dtype: call.dtype, src: call.src.cloned(), dst: call.dst.cloned() }
    }
}

impl From<&CollectiveGroup<'_>> for OwnedCollectives {
    fn from(group: &CollectiveGroup<'_>) -> Self {
        let calls = group.calls.iter().map(OwnedCall::from).collect();
        Self { communicator: Arc::clone(group.communicator), calls }
    }
}

impl OwnedCollectives {
    /// Lends it as a [`CollectiveGroup`].
    pub fn with<R>(&self, visit: impl FnOnce(&CollectiveGroup<'_>) -> R) -> R {
        let calls: SmallVec<[CollectiveCall<'_>; 4]> = self.calls.iter().map(OwnedCall::lend).collect();
        visit(&CollectiveGroup { communicator: &self.communicator, calls: &calls })
    }

    /// Whose they are.
    pub const fn communicator(&self) -> &Arc<dyn NativeCommunicator> {
        &self.communicator
    }

    /// What is done, call by call.
    pub fn ops(&self) -> impl Iterator<Item = CollectiveOp> {
        self.calls.iter().map(|call| call.op)
    }

    /// Everything the calls touch, with what they do to it.
    pub fn for_each_access<'a>(&'a self, mut visit: impl FnMut(&'a BufferView, Access)) {
        self.calls.iter().for_each(|call| call.lend().for_each_access(&mut visit));
    }
}

impl OwnedCall {
    /// Lends it as a [`CollectiveCall`].
    pub const fn lend(&self) -> CollectiveCall<'_> {
        CollectiveCall { op: self.op, dtype: self.dtype, src: self.src.as_ref(), dst: self.dst.as_ref() }
    }
}

/// Why a collective could not be completed, as all who wait for it are told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CollectiveFailure {
    /// A rank is gone.
    #[error("rank {rank} is lost: {how}")]
    PeerLost {
        /// Which.
        rank: u32,
        /// What is known of it.
        how: String,
    },
    /// A rank ended the communicator.
    #[error("aborted by rank {rank}: {reason}")]
    Aborted {
        /// Which.
        rank: u32,
        /// Why.
        reason: String,
    },
    /// The ranks did not call the same.
    #[error("call {number} differs between ranks: {what}")]
    Mismatch {
        /// The call's number.
        number: u64,
        /// Who called what.
        what: String,
    },
    /// It took longer than it may.
    #[error("{op}, call {number}, was not over after {after:?}; {waiting}")]
    TimedOut {
        /// The call's number.
        number: u64,
        /// What was called.
        op: String,
        /// Its time.
        after: Duration,
        /// Which ranks had not come to it.
        waiting: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Memory(u64);

    impl Buffer for Memory {
        fn device(&self) -> DeviceId {
            DeviceId { backend: "host", ordinal: 0, uuid: crate::DeviceUuid::from_bytes([0; 16]) }
        }

        fn size(&self) -> u64 {
            self.0
        }

        fn kind(&self) -> crate::MemoryKind {
            crate::MemoryKind::Device
        }

        fn mapping(&self) -> Option<crate::HostMapping<'_>> {
            None
        }
    }

    fn views(sizes: [u64; 2]) -> [BufferView; 2] {
        sizes.map(|size| BufferView::whole(Arc::new(Memory(size))))
    }

    const SUM: CollectiveOp = CollectiveOp::AllReduce(ReduceOp::Sum);

    #[test]
    fn lengths_fit_the_operation_and_the_type() {
        let new = |op, dtype, sizes: [u64; 2]| {
            let [src, dst] = views(sizes);
            CollectiveCall::new(op, dtype, (1, 4), Some(&src), Some(&dst)).map(|_| ())
        };
        assert!(new(SUM, DType::F32, [12, 12]).is_ok());
        assert!(matches!(new(SUM, DType::F32, [10, 10]), Err(CallError::NotElements { .. })));
        assert!(matches!(new(SUM, DType::F32, [12, 16]), Err(CallError::Range(_))));
        assert!(new(CollectiveOp::AllGather, DType::U8, [3, 12]).is_ok());
        assert!(new(CollectiveOp::ReduceScatter(ReduceOp::Max), DType::U8, [12, 3]).is_ok());
        assert!(new(CollectiveOp::AllToAll, DType::U16, [16, 16]).is_ok());
        assert!(matches!(
            new(CollectiveOp::AllToAll, DType::U16, [12, 12]),
            Err(CallError::NotElements { .. })
        ));
    }

    #[test]
    fn only_the_root_has_the_whole() {
        let [src, dst] = views([4, 16]);
        let gather = |rank, dst| {
            CollectiveCall::new(CollectiveOp::Gather { root: 2 }, DType::U8, (rank, 4), Some(&src), dst)
        };
        assert!(gather(2, Some(&dst)).is_ok());
        assert!(gather(1, None).is_ok());
        assert!(matches!(gather(1, Some(&dst)), Err(CallError::Superfluous { .. })));
        assert!(matches!(gather(2, None), Err(CallError::Missing { .. })));
        let missing = CollectiveCall::new(CollectiveOp::Send { to: 4 }, DType::U8, (0, 4), Some(&src), None);
        assert!(matches!(missing, Err(CallError::NoSuchRank { rank: 4, size: 4 })));
    }

    #[test]
    fn in_place_is_the_same_bytes_and_no_other_overlap() {
        let [all, _] = views([16, 1]);
        let part = |from: u64| all.slice(from..from + 4).unwrap();
        let gather = |src: &BufferView| {
            CollectiveCall::new(CollectiveOp::AllGather, DType::U8, (1, 4), Some(src), Some(&all)).is_ok()
        };
        assert!(gather(&part(4)));
        assert!(!gather(&part(0)));
        assert!(!gather(&part(6)));
        let same = CollectiveCall::new(SUM, DType::U8, (0, 4), Some(&all), Some(&all)).unwrap();
        assert!(same.is_in_place());
        let (low, high) = (part(0), part(2));
        let shifted = CollectiveCall::new(SUM, DType::U8, (0, 4), Some(&low), Some(&high));
        assert!(matches!(shifted, Err(CallError::Range(RangeError::Overlap { bytes: 2 }))));
    }

    #[test]
    fn a_reduction_that_makes_no_sense_is_refused() {
        let [src, dst] = views([4, 4]);
        let call = |op, dtype| {
            CollectiveCall::new(CollectiveOp::AllReduce(op), dtype, (0, 2), Some(&src), Some(&dst)).is_ok()
        };
        assert!(call(ReduceOp::Xor, DType::I32));
        assert!(!call(ReduceOp::Xor, DType::F32));
        assert!(!call(ReduceOp::Sum, DType::Bool));
    }
}
