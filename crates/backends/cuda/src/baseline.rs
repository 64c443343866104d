//! The driver's own calls, without queues, semaphores and threads: the floor that benchmarks print beside our
//! figures of the same run.

use std::{fmt, sync::Arc, time::Duration};

use warpweft_core_types::{Device, DeviceId, DriverError, Op, OpenError, OwnedOp, SubmitError};

use crate::{
    check::check_op,
    clock::Clock,
    context::Context,
    device::CudaDevice,
    peer::PeerTable,
    stream::{Event, Stream},
    work,
};

/// Far longer than anything that is measured.
const LONGEST: Duration = Duration::from_secs(60);

/// A stream and an event of one device: what a program without this crate would use.
///
/// Each operation is the driver's call (`cuMemcpyAsync`, `cuLaunchKernel`) and an event record, and a wait
/// asks about the event until it is over, which is the quickest way to learn it.
///
/// ```no_run
/// # use warpweft_core_types::*;
/// # use warpweft_cuda::{Baseline, CudaBackend};
/// let device = CudaBackend::new()?.open(0, Features::empty())?;
/// let host = BufferView::whole(device.allocate(&BufferDesc::host_visible(1 << 20))?);
/// let memory = BufferView::whole(device.allocate(&BufferDesc::device(1 << 20))?);
/// let floor = Baseline::new(&device)?.ok_or("not a CUDA device")?;
/// let copy = Op::Copy(CopyRegion::new(&host, &memory)?);
/// let began = std::time::Instant::now();
/// floor.run(&copy)?;
/// println!("{:?}", began.elapsed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Baseline {
    stream: Stream,
    event: Event,
    context: Arc<Context>,
    peers: Arc<PeerTable>,
    clock: Arc<Clock>,
    _device: Arc<dyn Device>,
}

impl Baseline {
    /// For a device of this backend; `None` for others, wrapped ones included.
    ///
    /// # Errors
    ///
    /// The driver's, if it makes no stream or event.
    pub fn new(device: &Arc<dyn Device>) -> Result<Option<Self>, OpenError> {
        let Some(cuda) = CudaDevice::of(device) else { return Ok(None) };
        let (context, peers, clock) = cuda.surroundings();
        Ok(Some(Self {
            stream: Stream::create(context).map_err(OpenError::Driver)?,
            event: Event::create(context).map_err(OpenError::Driver)?,
            context: Arc::clone(context),
            peers: Arc::clone(peers),
            clock: Arc::clone(clock),
            _device: Arc::clone(device),
        }))
    }

    /// The device whose stream is used.
    pub fn device(&self) -> DeviceId {
        self.context.device
    }

    /// Does one operation and waits for its end. Whatever it touches must not be in use by other work.
    ///
    /// # Errors
    ///
    /// As for [`Queue::submit`](warpweft_core_types::Queue::submit), and the driver's.
    pub fn run(&self, op: &Op<'_>) -> Result<(), SubmitError> {
        Self::run_together(&[(self, op)])
    }

    /// Starts one operation on each of several, then waits for all of them.
    ///
    /// # Errors
    ///
    /// As for [`Baseline::run`]; what was started is waited for all the same.
    pub fn run_together(work: &[(&Self, &Op<'_>)]) -> Result<(), SubmitError> {
        let mut result = Ok(());
        let mut started = 0;
        for (this, op) in work {
            result = this.start(op);
            if result.is_err() {
                break;
            }
            started += 1;
        }
        work[..started].iter().fold(result, |result, (this, op)| result.and(this.finish(op)))
    }

    #[expect(unsafe_code, reason = "enqueues work on memory that stays until it is over")]
    fn start(&self, op: &Op<'_>) -> Result<(), SubmitError> {
        check_op(&self.context, &self.peers, op)?;
        let _current = self.context.enter().map_err(|error| self.failed(error))?;
        // SAFETY: checked just above. The operation's owner is borrowed until `finish` has seen its end, or what it
        // names is never given back (`finish`, `abandon`).
        let enqueued = unsafe { work::enqueue(op, &self.context, &self.stream, &self.clock) };
        enqueued.map_err(|error| match error {
            Some(error) => self.failed(error),
            None => SubmitError::Invalid { reason: format!("an operand is not one of {}", self.device()) },
        })?;
        // From here on the operation is under way, so that an error has to wait for it too.
        self.event.record(&self.stream).or_else(|error| self.abandon(op, error))
    }

    fn finish(&self, op: &Op<'_>) -> Result<(), SubmitError> {
        let over = self.context.enter().and_then(|_current| self.event.wait(LONGEST));
        match over {
            Ok(true) => Ok(()),
            Ok(false) => {
                // The device may still touch the memory, so it stays.
                std::mem::forget(OwnedOp::from(op));
                Err(SubmitError::Invalid { reason: format!("it took longer than {LONGEST:?}") })
            }
            Err(error) => self.abandon(op, error),
        }
    }

    /// An end that cannot be learnt: what the operation touches is never given back.
    fn abandon(&self, op: &Op<'_>, error: DriverError) -> Result<(), SubmitError> {
        std::mem::forget(OwnedOp::from(op));
        Err(self.failed(error))
    }

    fn failed(&self, error: DriverError) -> SubmitError {
        SubmitError::Failed(self.context.judge(error))
    }
}

impl fmt::Debug for Baseline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Baseline({})", self.device())
    }
}
