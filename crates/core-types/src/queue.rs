//! Queues, and the work they are given.

use std::{any::Any, fmt, sync::Arc};

use smallvec::SmallVec;

use crate::{
    Access, Arg, BufferView, CollectiveGroup, Failure, Kernel, Launch, OwnedCollectives, Param,
    PreparedGraph, QueueId, RangeError, SemaphorePoint, SubmissionId, SubmitError, TimestampRegion,
};

/// What to create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueDesc {
    /// Submissions it holds before it answers [`SubmitError::QueueFull`]; at least 1.
    pub capacity: usize,
}

impl Default for QueueDesc {
    fn default() -> Self {
        Self { capacity: 1024 }
    }
}

/// An ordered line of work on one device: a CUDA stream.
///
/// Submissions start and end in the order they were made; a submission whose waits are not met holds
/// up those behind it. Different queues run side by side. Dropping a queue cancels nothing.
///
/// A failed submission fails its signals, and the queue with it: what was behind fails the same way and
/// the queue takes no more. The device goes on, unless its kind of failure loses the device.
pub trait Queue: Any + fmt::Debug + Send + Sync {
    /// Its name in errors and traces, with the device it belongs to.
    fn id(&self) -> QueueId;

    /// Takes work. Does not wait for any of it.
    ///
    /// # Errors
    ///
    /// A [`SubmitError`]; nothing of the submission was taken then.
    fn submit(&self, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError>;

    /// The same for work whose end nobody is in a hurry to hear of: its signals may come with those of what is
    /// submitted behind it, but as soon as somebody waits for one or asks for it, and after a moment by themselves.
    ///
    /// # Errors
    ///
    /// As [`Queue::submit`].
    ///
    /// # Portability
    ///
    /// Cheaper where each signal is a call of the driver's, as an event of CUDA is; elsewhere, and for queues that stand
    /// around another, it is `submit`.
    fn submit_late(&self, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
        self.submit(submission)
    }

    /// Why it takes no more work, if it failed.
    fn failure(&self) -> Option<Arc<Failure>>;
}

/// Work for a queue: wait for `waits`, do `ops` in order, raise `signals` in order.
///
/// It borrows everything; [`OwnedSubmission::from`] makes a copy that can be kept.
#[derive(Debug, Clone, Copy, Default)]
pub struct Submission<'a> {
    /// Points that must be reached first; of any device and any backend.
    pub waits: &'a [SemaphorePoint],
    /// What to do, one after the other.
    pub ops: &'a [Op<'a>],
    /// Points that are reached afterwards; of this queue's backend.
    pub signals: &'a [SemaphorePoint],
}

/// One operation of a submission.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Op<'a> {
    /// Copies bytes.
    Copy(CopyRegion<'a>),
    /// Repeats a pattern.
    Fill(FillRegion<'a>),
    /// Runs a kernel.
    Launch(Launch<'a>),
    /// Writes the device's time.
    Timestamp(TimestampRegion<'a>),
    /// Runs a prepared graph.
    Replay(&'a PreparedGraph),
    /// Does this rank's part of what the ranks of a communicator do together.
    Collective(CollectiveGroup<'a>),
}

impl<'a> Op<'a> {
    /// Everything it touches, with what it does to it.
    pub fn for_each_access(&self, mut visit: impl FnMut(&'a BufferView, Access)) {
        match self {
            Self::Copy(copy) => {
                visit(copy.src, Access::Read);
                visit(copy.dst, Access::Write);
            }
            Self::Fill(fill) => visit(fill.dst, Access::Write),
            Self::Launch(launch) => launch.buffers().for_each(|(view, access)| visit(view, access)),
            Self::Timestamp(stamp) => visit(stamp.dst(), Access::Write),
            Self::Replay(graph) => graph.ops().iter().for_each(|op| op.for_each_access(&mut visit)),
            Self::Collective(group) => {
                group.calls().iter().for_each(|call| call.for_each_access(&mut visit));
            }
        }
    }

    /// What it is, in one word.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Copy(_) => "copy",
            Self::Fill(_) => "fill",
            Self::Launch(_) => "launch",
            Self::Timestamp(_) => "timestamp",
            Self::Replay(_) => "replay",
            Self::Collective(_) => "collective",
        }
    }
}

/// A copy between two ranges of one length that share no bytes.
#[derive(Debug, Clone, Copy)]
pub struct CopyRegion<'a> {
    src: &'a BufferView,
    dst: &'a BufferView,
}

impl<'a> CopyRegion<'a> {
    /// Copies all of `src` to all of `dst`.
    ///
    /// # Errors
    ///
    /// [`RangeError::LengthMismatch`] or [`RangeError::Overlap`].
    pub fn new(src: &'a BufferView, dst: &'a BufferView) -> Result<Self, RangeError> {
        if src.size() != dst.size() {
            return Err(RangeError::LengthMismatch {
                source_bytes: src.size(),
                destination_bytes: dst.size(),
            });
        }
        match src.overlap(dst) {
            0 => Ok(Self { src, dst }),
            bytes => Err(RangeError::Overlap { bytes }),
        }
    }

    /// Where bytes come from.
    pub const fn src(&self) -> &'a BufferView {
        self.src
    }

    /// Where they go.
    pub const fn dst(&self) -> &'a BufferView {
        self.dst
    }
}

/// A range to be filled with a repeated pattern.
#[derive(Debug, Clone, Copy)]
pub struct FillRegion<'a> {
    dst: &'a BufferView,
    pattern: u32,
}

impl<'a> FillRegion<'a> {
    /// Fills `dst` with `byte`.
    pub const fn bytes(dst: &'a BufferView, byte: u8) -> Self {
        Self { dst, pattern: u32::from_ne_bytes([byte; 4]) }
    }

    /// Fills `dst` with a 32-bit `word`.
    ///
    /// # Errors
    ///
    /// [`RangeError::PatternMismatch`] unless the view's size is a multiple of 4.
    pub const fn words(dst: &'a BufferView, word: u32) -> Result<Self, RangeError> {
        if dst.size().is_multiple_of(4) {
            return Ok(Self { dst, pattern: word });
        }
        Err(RangeError::PatternMismatch { pattern_bytes: 4, size: dst.size() })
    }

    /// The range.
    pub const fn dst(&self) -> &'a BufferView {
        self.dst
    }

    /// The pattern as a word; a byte pattern repeats its byte four times.
    pub const fn pattern(&self) -> u32 {
        self.pattern
    }
}

/// A submission that owns what it names: recorded, traced, or held until its waits are met.
#[derive(Debug, Clone, Default)]
pub struct OwnedSubmission {
    /// See [`Submission::waits`].
    pub waits: SmallVec<[SemaphorePoint; 2]>,
    /// See [`Submission::ops`].
    pub ops: SmallVec<[OwnedOp; 1]>,
    /// See [`Submission::signals`].
    pub signals: SmallVec<[SemaphorePoint; 1]>,
}

/// An [`Op`] that owns what it names. It is made of an `Op`, and so of operands that were checked.
#[derive(Debug, Clone)]
pub struct OwnedOp(Owned);

#[derive(Debug, Clone)]
enum Owned {
    Copy { src: BufferView, dst: BufferView },
    Fill { dst: BufferView, pattern: u32 },
    Launch(OwnedLaunch),
    Timestamp { dst: BufferView },
    Replay(PreparedGraph),
    Collective(OwnedCollectives),
}

/// Arguments that an owned launch has room for by itself.
const INLINE_ARGS: usize = 4;

/// Room for what an [`OwnedOp`] names, left over from another: many that are made one after the other share it.
#[derive(Debug, Default)]
pub struct OpRoom(SmallVec<[OwnedArg; INLINE_ARGS]>);

impl OpRoom {
    /// Whether an operation needs more room than it has by itself: a launch of many arguments.
    pub const fn is_needed(op: &Op<'_>) -> bool {
        matches!(op, Op::Launch(launch) if launch.args().len() > INLINE_ARGS)
    }

    /// Whether it is more than an operation has by itself.
    pub fn is_large(&self) -> bool {
        self.0.spilled()
    }
}

/// A [`Launch`] that owns what it names. It is made of a `Launch`, and so of arguments that were checked.
#[derive(Debug, Clone)]
pub struct OwnedLaunch {
    kernel: Arc<dyn Kernel>,
    workgroups: [u32; 3],
    args: SmallVec<[OwnedArg; INLINE_ARGS]>,
}

#[derive(Debug, Clone)]
enum OwnedArg {
    Buffer(BufferView),
    Scalar(SmallVec<[u8; 16]>),
}

impl From<&Submission<'_>> for OwnedSubmission {
    fn from(submission: &Submission<'_>) -> Self {
        Self {
            waits: submission.waits.into(),
            ops: submission.ops.iter().map(OwnedOp::from).collect(),
            signals: submission.signals.into(),
        }
    }
}

impl From<&Op<'_>> for OwnedOp {
    fn from(op: &Op<'_>) -> Self {
        Self(match op {
            Op::Copy(copy) => Owned::Copy { src: copy.src.clone(), dst: copy.dst.clone() },
            Op::Fill(fill) => Owned::Fill { dst: fill.dst.clone(), pattern: fill.pattern },
            Op::Launch(launch) => Owned::Launch(launch.into()),
            Op::Timestamp(stamp) => Owned::Timestamp { dst: stamp.dst().clone() },
            Op::Replay(graph) => Owned::Replay((*graph).clone()),
            Op::Collective(group) => Owned::Collective(group.into()),
        })
    }
}

impl From<&Launch<'_>> for OwnedLaunch {
    fn from(launch: &Launch<'_>) -> Self {
        Self::within(launch, OpRoom::default())
    }
}

impl From<&Arg<'_>> for OwnedArg {
    fn from(arg: &Arg<'_>) -> Self {
        match *arg {
            Arg::Buffer(view) => Self::Buffer(view.clone()),
            Arg::Scalar(bytes) => Self::Scalar(bytes.into()),
        }
    }
}

impl OwnedOp {
    /// The same as [`OwnedOp::from`], in the room that another has left.
    pub fn within(op: &Op<'_>, room: OpRoom) -> Self {
        match op {
            Op::Launch(launch) => Self(Owned::Launch(OwnedLaunch::within(launch, room))),
            op => op.into(),
        }
    }

    /// Lets go of what it names, and leaves the room.
    pub fn into_room(self) -> OpRoom {
        let Owned::Launch(OwnedLaunch { mut args, .. }) = self.0 else { return OpRoom::default() };
        args.clear();
        OpRoom(args)
    }

    /// Lends it as an [`Op`].
    pub fn with<R>(&self, visit: impl FnOnce(&Op<'_>) -> R) -> R {
        match &self.0 {
            Owned::Copy { src, dst } => visit(&Op::Copy(CopyRegion { src, dst })),
            Owned::Fill { dst, pattern } => visit(&Op::Fill(FillRegion { dst, pattern: *pattern })),
            Owned::Launch(launch) => launch.with(|launch| visit(&Op::Launch(*launch))),
            Owned::Timestamp { dst } => visit(&Op::Timestamp(TimestampRegion::checked(dst))),
            Owned::Replay(graph) => visit(&Op::Replay(graph)),
            Owned::Collective(group) => group.with(|group| visit(&Op::Collective(*group))),
        }
    }

    /// The same operation with other views in the place of those that `replace` knows; `None` if it knows none of them.
    ///
    /// # Errors
    ///
    /// [`SubmitError::Invalid`] where the views do not fit the operation, and for collectives, timestamps and replays,
    /// which keep their operands.
    pub fn with_views(
        &self,
        replace: impl Fn(&BufferView) -> Option<BufferView>,
    ) -> Result<Option<Self>, SubmitError> {
        let mut known = false;
        self.for_each_access(&mut |view, _| known |= replace(view).is_some());
        if !known {
            return Ok(None);
        }
        let other = |view: &BufferView| replace(view).unwrap_or_else(|| view.clone());
        let invalid = |reason: String| SubmitError::Invalid { reason };
        let range = |error: RangeError| invalid(error.to_string());
        Ok(Some(Self(match &self.0 {
            Owned::Copy { src, dst } => {
                let (src, dst) = (other(src), other(dst));
                CopyRegion::new(&src, &dst).map_err(range)?;
                Owned::Copy { src, dst }
            }
            Owned::Fill { dst, pattern } => {
                let (dst, pattern) = (other(dst), *pattern);
                if pattern.to_ne_bytes() != [pattern.to_ne_bytes()[0]; 4] {
                    FillRegion::words(&dst, pattern).map_err(range)?;
                }
                Owned::Fill { dst, pattern }
            }
            Owned::Launch(launch) => {
                let mut launch = launch.clone();
                for arg in &mut launch.args {
                    if let OwnedArg::Buffer(view) = arg {
                        *view = other(view);
                    }
                }
                let checked = launch.with(|launch| {
                    Launch::new(launch.kernel(), launch.workgroups(), launch.args()).map(|_| ())
                });
                checked.map_err(|error| invalid(error.to_string()))?;
                Owned::Launch(launch)
            }
            Owned::Timestamp { .. } | Owned::Replay(_) | Owned::Collective(_) => {
                return Err(invalid(format!("a {} keeps its operands", self.name())));
            }
        })))
    }

    /// Whether it runs a prepared graph.
    pub const fn is_replay(&self) -> bool {
        matches!(self.0, Owned::Replay(_))
    }

    /// The launch, if it is one.
    pub const fn launch(&self) -> Option<&OwnedLaunch> {
        if let Owned::Launch(launch) = &self.0 { Some(launch) } else { None }
    }

    /// The collectives, if it is some.
    pub const fn collectives(&self) -> Option<&OwnedCollectives> {
        if let Owned::Collective(group) = &self.0 { Some(group) } else { None }
    }

    /// What it is, in one word.
    pub fn name(&self) -> &'static str {
        self.with(|op| op.name())
    }

    /// Its kernel's name, or what it is.
    pub fn label(&self) -> &str {
        match &self.0 {
            Owned::Launch(launch) => &launch.kernel.contract().name,
            _ => self.name(),
        }
    }

    /// Everything it touches, with what it does to it.
    pub fn for_each_access<'a>(&'a self, visit: &mut dyn FnMut(&'a BufferView, Access)) {
        match &self.0 {
            Owned::Copy { src, dst } => {
                visit(src, Access::Read);
                visit(dst, Access::Write);
            }
            Owned::Fill { dst, .. } | Owned::Timestamp { dst } => visit(dst, Access::Write),
            Owned::Launch(launch) => launch.buffers().for_each(|(view, access)| visit(view, access)),
            Owned::Replay(graph) => graph.ops().iter().for_each(|op| op.for_each_access(visit)),
            Owned::Collective(group) => group.for_each_access(visit),
        }
    }
}

impl OwnedLaunch {
    fn within(launch: &Launch<'_>, OpRoom(mut args): OpRoom) -> Self {
        args.extend(launch.args().iter().map(OwnedArg::from));
        Self { kernel: Arc::clone(launch.kernel()), workgroups: launch.workgroups(), args }
    }

    /// The kernel.
    pub const fn kernel(&self) -> &Arc<dyn Kernel> {
        &self.kernel
    }

    /// Lends it as a [`Launch`].
    pub fn with<R>(&self, visit: impl FnOnce(&Launch<'_>) -> R) -> R {
        let args: SmallVec<[Arg<'_>; 8]> = self
            .args
            .iter()
            .map(|arg| match arg {
                OwnedArg::Buffer(view) => Arg::Buffer(view),
                OwnedArg::Scalar(bytes) => Arg::Scalar(bytes),
            })
            .collect();
        visit(&Launch::checked(&self.kernel, self.workgroups, &args))
    }

    fn buffers(&self) -> impl Iterator<Item = (&BufferView, Access)> {
        self.args.iter().zip(&self.kernel.contract().params).filter_map(|pair| match pair {
            (OwnedArg::Buffer(view), Param::Buffer { access, .. }) => Some((view, *access)),
            _ => None,
        })
    }
}
