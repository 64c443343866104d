//! What carries calls out: one trait, and who implements it.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use warpweft_core_types::{
    Buffer, CollectiveCall, CollectiveError, CollectiveOp, DType, Deadline, Failure, Op, OwnedOp, Queue,
    Registration, RegistrationKind, SemaphorePoint, Submission,
};

use crate::{CommError, Shape, persistent::Work};

mod elements;
pub(crate) mod host;
#[cfg(unix)]
pub(crate) mod low_latency;
pub(crate) mod native;
pub(crate) mod planned;
pub(crate) mod solo;

/// Which engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EngineKind {
    /// One rank: copies.
    Solo,
    /// The collectives of the devices' own driver stack, such as NCCL.
    Native,
    /// Memory that all ranks of a host map, for host devices in threads and processes. A call in a queue has a worker of
    /// its device until it is over: communicators that are used side by side need one each.
    Host,
    /// Copies by the best route and kernels that reduce, for any mixture of devices of one process.
    Planned,
    /// Kernels that store straight into the other ranks' memory, for few bytes on devices of one host that reach each
    /// other. Which calls it takes is measured, where [`CommConfig::tuning`](crate::CommConfig::tuning) says so, and no
    /// others; all of them where it is the one that was named.
    LowLatency,
}

impl EngineKind {
    /// All of them, in the order in which they are asked.
    pub const ALL: [Self; 5] = [Self::Solo, Self::Native, Self::Host, Self::Planned, Self::LowLatency];

    /// Its name, as programs write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Solo => "solo",
            Self::Native => "native",
            Self::Host => "host",
            Self::Planned => "planned",
            Self::LowLatency => "low_latency",
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One way to carry out collectives, for one rank.
///
/// An engine turns calls into operations of a submission, so that queues order them like everything else.
pub(crate) trait Engine: fmt::Debug + Send + Sync {
    fn kind(&self) -> EngineKind;

    fn does(&self, op: CollectiveOp, dtype: DType) -> bool;

    /// Whether calls that are in different queues have to be ordered by us.
    fn needs_order(&self) -> bool;

    /// Lends the operations that carry out calls which begin together.
    fn with_ops(
        &self,
        calls: &[CollectiveCall<'_>],
        visit: &mut dyn FnMut(&[Op<'_>]) -> Result<(), CommError>,
    ) -> Result<(), CommError>;

    /// Puts calls in a queue, behind `waits` and before `then`: all of it or nothing.
    fn enqueue(
        &self,
        calls: &[CollectiveCall<'_>],
        queue: &Arc<dyn Queue>,
        waits: &[SemaphorePoint],
        then: &[Op<'_>],
    ) -> Result<(), CommError> {
        self.with_ops(calls, &mut |ops| {
            if then.is_empty() {
                queue.submit(&Submission { waits, ops, signals: &[] })?;
            } else {
                let ops: SmallVec<[Op<'_>; 2]> = ops.iter().chain(then).copied().collect();
                queue.submit(&Submission { waits, ops: &ops, signals: &[] })?;
            }
            Ok(())
        })
    }

    /// What it needs to carry out calls that begin together, again and again.
    fn persist(&self, calls: &[CollectiveCall<'_>]) -> Result<Work, CommError> {
        let mut owned = SmallVec::new();
        self.with_ops(calls, &mut |ops| {
            owned.extend(ops.iter().map(OwnedOp::from));
            Ok(())
        })?;
        Ok(Work::Ops(owned))
    }

    /// The ways in which it can do calls of so many bytes from rank to rank, if there are several worth trying.
    fn shapes(&self, _op: CollectiveOp, _bytes: u64) -> Vec<Shape> {
        Vec::new()
    }

    /// The same engine, which does every call in this way; none if it has no such way.
    fn in_shape(self: Arc<Self>, _shape: Shape) -> Option<Arc<dyn Engine>> {
        None
    }

    /// What tells it from others of its kind that do calls in other ways, for those who keep what was measured of it.
    fn variant(&self) -> u32 {
        0
    }

    /// How many calls that all ranks make a node of a graph has.
    fn calls_in(&self, _node: &OwnedOp) -> usize {
        0
    }

    /// Whether it carries out these calls, with such memory, in a thread that waits for them.
    fn runs(&self, _calls: &[CollectiveCall<'_>]) -> bool {
        false
    }

    /// Carries the calls out in this thread, if it [runs](Self::runs) them.
    fn run(&self, calls: &[CollectiveCall<'_>], _deadline: Deadline) -> Result<(), CommError> {
        let what = calls.first().map(|call| call.op().to_string()).unwrap_or_default();
        Err(self.cannot(format!("{what} without a queue")))
    }

    /// An error that came by itself.
    fn check(&self) -> Result<(), CollectiveError>;

    /// Why a device ended calls without having done them, if it has: queues tell nothing of that.
    fn given_up(&self) -> Option<Arc<Failure>> {
        None
    }

    /// Ends what is under way: it fails with this.
    fn abort(&self, failure: &Arc<Failure>, deadline: Deadline);

    /// Takes no more calls, which fail with this, and tells the other ranks, whoever still has something of it. What was
    /// under way has ended.
    fn leave(&self, _failure: &Arc<Failure>) {}

    /// Registers memory.
    fn register(
        &self,
        _buffer: &Arc<dyn Buffer>,
        kind: RegistrationKind,
    ) -> Result<Arc<dyn Registration>, CommError> {
        Err(self.cannot(format!("register memory ({kind:?})")))
    }

    /// Allocates memory that can be registered in any way.
    fn allocate(&self, _size: u64) -> Result<Arc<dyn Buffer>, CommError> {
        Err(self.cannot("allocate memory".to_owned()))
    }

    fn cannot(&self, what: String) -> CommError {
        CommError::Unsupported { what, engines: self.kind().to_string() }
    }
}

/// Whether the host addresses all operands.
fn are_mapped(calls: &[CollectiveCall<'_>]) -> bool {
    let mut views = calls.iter().flat_map(|call| [call.src(), call.dst()]).flatten();
    views.all(|view| view.buffer().mapping().is_some())
}
