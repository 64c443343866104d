//! Calls that are made many times.

use std::{fmt, sync::Arc};

use smallvec::SmallVec;
use warpweft_core_types::{CollectiveCall, Op, OwnedCall, OwnedOp, Queue, SemaphorePoint, Submission};

use crate::{
    CommError, Enqueued,
    engine::Engine,
    flight::{Exchanges, Signature, exchanges_of},
    inner::Inner,
};

/// A call that owns its operands and was checked once, to be enqueued many times: a persistent collective, as MPI says.
/// It is made by [`Call::persistent`](crate::Call::persistent), and any thread may use it.
///
/// Nothing about it is compared again, but in validating mode. It keeps what the communicator's engines have, and no rank
/// in the group: once the communicator was dropped, it is refused.
///
/// # Portability
///
/// On CUDA devices, enqueuing a call that all ranks make allocates nothing in a queue that is warm. Sends and receives
/// allocate their places in the record.
///
/// ```
/// # use std::{sync::Arc, time::Duration};
/// # use warpweft_bootstrap::Group;
/// # use warpweft_comm::{CommConfig, Communicator};
/// # use warpweft_core_types::{Backend, BufferDesc, BufferView, DType, Features, QueueDesc, ReduceOp};
/// # use warpweft_host::HostBackend;
/// # let within = Duration::from_secs(10);
/// # let device = HostBackend::with_devices(1)?.open(0, Features::empty())?;
/// # let comm = Communicator::create(Group::alone()?, &device, &CommConfig::default(), within)?;
/// # let queue = device.create_queue(&QueueDesc::default())?;
/// let activations = BufferView::whole(device.allocate(&BufferDesc::device(4096))?);
/// let sum = comm.all_reduce_in_place(ReduceOp::Sum, DType::Bf16, &activations)?.persistent()?;
/// for _layer in 0..80 {
///     // ... what makes the activations ...
///     sum.enqueue(&queue)?;
/// }
/// # sum.enqueue(&queue)?.wait(within)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PersistentCall {
    inner: Arc<Inner>,
    /// None of no calls, which are over at once.
    pub(crate) what: Option<What>,
}

/// What is known of a call before it is made.
pub(crate) struct What {
    pub(crate) signature: Signature,
    pub(crate) exchanges: Exchanges,
    /// Its words, where calls are compared.
    pub(crate) text: String,
    /// Which does it.
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) work: Work,
}

/// What an engine needs to carry calls out again.
pub(crate) enum Work {
    Ops(SmallVec<[OwnedOp; 1]>),
    /// It looks at the calls each time.
    Calls(SmallVec<[OwnedCall; 1]>),
}

impl PersistentCall {
    /// Of calls that were checked.
    pub(crate) fn new(inner: &Arc<Inner>, calls: &[CollectiveCall<'_>]) -> Result<Self, CommError> {
        let what = match Signature::of(calls) {
            Some(signature) => {
                let (engine, work) = inner.persist(calls)?;
                let (exchanges, text) = (exchanges_of(calls), Signature::text_of_all(calls));
                Some(What { signature, exchanges, text, engine, work })
            }
            None => None,
        };
        Ok(Self { inner: Arc::clone(inner), what })
    }

    /// Puts it in a queue of its rank's device, as [`Call::on`](crate::Call::on) does.
    ///
    /// # Errors
    ///
    /// As there, but for what was checked when this was made.
    pub fn enqueue(&self, queue: &Arc<dyn Queue>) -> Result<Enqueued, CommError> {
        self.inner.enqueue_again(self, queue)
    }
}

impl fmt::Debug for PersistentCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let call = self.what.as_ref().map(|what| what.signature.text());
        f.debug_struct("PersistentCall").field("call", &call).finish_non_exhaustive()
    }
}

impl Work {
    pub(crate) fn of_calls(calls: &[CollectiveCall<'_>]) -> Self {
        Self::Calls(calls.iter().map(OwnedCall::from).collect())
    }

    /// Puts it in a queue: all of it or nothing.
    pub(crate) fn submit(
        &self,
        engine: &dyn Engine,
        queue: &Arc<dyn Queue>,
        waits: &[SemaphorePoint],
    ) -> Result<(), CommError> {
        match self {
            Self::Ops(ops) => with_all(ops, &[], &mut |ops| {
                queue.submit(&Submission { waits, ops, signals: &[] })?;
                Ok(())
            }),
            Self::Calls(calls) => {
                let calls: SmallVec<[CollectiveCall<'_>; 2]> = calls.iter().map(OwnedCall::lend).collect();
                engine.enqueue(&calls, queue, waits, &[])
            }
        }
    }
}

/// Lends operations one behind the other; most of the time there is one.
fn with_all(
    ops: &[OwnedOp],
    lent: &[Op<'_>],
    visit: &mut dyn FnMut(&[Op<'_>]) -> Result<(), CommError>,
) -> Result<(), CommError> {
    match ops {
        [] => visit(lent),
        [only] if lent.is_empty() => only.with(|op| visit(std::slice::from_ref(op))),
        [first, rest @ ..] => first.with(|op| {
            let all: SmallVec<[Op<'_>; 2]> = lent.iter().chain([op]).copied().collect();
            with_all(rest, &all, visit)
        }),
    }
}
