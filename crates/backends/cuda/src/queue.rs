//! Queues of CUDA devices: a stream each, and the submissions that cannot enter it yet.
//!
//! A submission enters the stream as soon as everything it waits for is reached or is itself in some stream
//! of the backend; then the wait is an event wait. Until then it is held here, and with it what is behind
//! it. A stream therefore never waits for something that is not under way.
//!
//! Submissions that signal nothing, or late, gather in one record, which gets an event when somebody wants to know: a
//! submission with signals behind them, whoever asks for a late signal, a full queue, a cold call, or the reactor after a
//! moment. An event costs the host more than all else that a submission does.

mod ending;
mod finished;
mod walk;

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    task::Waker,
    thread,
    time::{Duration, Instant},
};

use smallvec::SmallVec;
use warpweft_core_types::{
    Deadline, DriverError, Failure, Op, OwnedSubmission, Queue, QueueDesc, QueueId, SemaphorePoint,
    Submission, SubmissionId, SubmitError, promise_all,
};
use warpweft_polled::{KeepAlive, Polled, Reactor};

pub(crate) use self::ending::Cause;
use crate::{
    check::check_op,
    clock::Clock,
    communicator::{self, CudaCommunicator},
    context::Context,
    device::CudaDevice,
    module::CudaKernel,
    peer::PeerTable,
    semaphore::{self, Readiness, Wakers},
    stream::{Event, Stream},
    work,
};

/// The driver blocks whoever enqueues more than about a thousand operations in a stream. Beyond this many,
/// submissions are held here, so that `submit` does not wait.
const WINDOW: usize = 768;

/// Spares that are made at once, and of which half are left when it is time to look for finished submissions.
///
/// The reactor may have some in hand, so that a queue that is waited for by turns needs a few more than it has
/// submissions in the stream.
const STOCK: usize = 32;

/// Submissions that gather before they get an event, so that memory is let go of now and then and a full queue gets
/// shorter by parts.
const GATHERED: usize = 64;

/// How long what gathered stays without an event while nobody asks.
const GATHERING: Duration = Duration::from_millis(2);

/// Between two tries to take a lock.
const GLANCE: Duration = Duration::from_micros(50);

/// A queue's state and work, kept alive by whoever may still have to look after it.
pub(crate) struct QueueCore {
    context: Arc<Context>,
    peers: Arc<PeerTable>,
    reactor: Arc<Reactor<QueueCore>>,
    clock: Arc<Clock>,
    stream: Stream,
    id: QueueId,
    capacity: usize,
    /// Another library has the stream too, and may capture from it at any time: an event that is recorded later would
    /// end up in the capture.
    is_shared: AtomicBool,
    /// The user's handle is gone, so that the device may go with what is in flight.
    is_orphan: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    held: VecDeque<Held>,
    in_flight: VecDeque<InFlight>,
    /// Submissions whose signals come late, if they have any, in the stream behind those; nothing marks their end yet.
    gathered: Option<InFlight>,
    /// When somebody who looks after queues first saw them.
    gathered_since: Option<Instant>,
    /// Submissions and operations of all that is in the stream.
    submissions_in_flight: usize,
    ops_in_flight: usize,
    submitted: u64,
    /// Submissions that were found to be over.
    finished: u64,
    failure: Option<Arc<Failure>>,
    /// Signals of what will not run. They fail in their turn, once what is in the stream before them is over.
    doomed: Vec<Signals>,
    /// The reactor has this queue in its list.
    tracked: bool,
    /// The device went away: what is held will not run.
    closing: bool,
    /// Those in front have been here longest.
    spares: VecDeque<Spare>,
}

impl State {
    /// Whether it is time to look for submissions that are over, before more spares are made.
    ///
    /// A look costs about what an event does, so there is one for several submissions, until spares are nearly out:
    /// a look finds nothing while the reactor has the queue.
    fn lacks_spares(&self) -> bool {
        const HALF: usize = STOCK / 2;
        const NEARLY_OUT: usize = STOCK / 8;
        self.spares.len() < HALF
            && self.in_flight.len() >= HALF
            && (self.in_flight.len().is_multiple_of(HALF / 2) || self.spares.len() < NEARLY_OUT)
    }

    /// Whether nothing is in the stream.
    fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.gathered.is_none()
    }

    /// A spare whose event nobody looks at, so that it can be recorded again.
    fn spare(&mut self) -> Option<Spare> {
        /// Those that are looked at are so for a moment.
        const TRIES: usize = 4;
        for _ in 0..TRIES {
            let spare = self.spares.pop_front()?;
            if Arc::strong_count(&spare.event) == 1 {
                return Some(spare);
            }
            self.spares.push_back(spare);
        }
        None
    }
}

/// What a submission in the stream needs.
#[derive(Debug)]
struct Spare {
    /// A semaphore or a waiter may still look at it.
    event: Arc<Event>,
    keep: KeepAlive,
}

impl Spare {
    fn create(context: &Arc<Context>) -> Result<Self, DriverError> {
        Ok(Self { event: Arc::new(Event::create(context)?), keep: KeepAlive::default() })
    }
}

/// The points a submission raises.
type Signals = SmallVec<[SemaphorePoint; 1]>;

/// What the stream is given, but for the operations.
struct Entry<'a> {
    waits: &'a [SemaphorePoint],
    signals: Signals,
    /// It waits, or has calls of communicators: it may be ended while what is before it goes on.
    is_apart: bool,
    /// It is nothing that captures of other threads forbid.
    is_light: bool,
    /// Nobody is in a hurry to hear of its end.
    is_late: bool,
}

/// A submission that waits on the host.
#[derive(Debug)]
struct Held {
    id: SubmissionId,
    work: OwnedSubmission,
}

/// A submission in the stream, with those that gathered before it.
#[derive(Debug)]
struct InFlight {
    event: Arc<Event>,
    signals: Signals,
    keep: KeepAlive,
    submissions: usize,
    ops: usize,
    /// Points of other queues that the stream waits for before it.
    awaited: SmallVec<[SemaphorePoint; 1]>,
    /// Communicators with calls in it, by their addresses.
    communicators: SmallVec<[usize; 2]>,
}

impl InFlight {
    /// Adds points that are reached when all of it is over; of one semaphore the last says it all.
    fn signal(&mut self, points: Signals) {
        for point in points {
            match self.signals.iter_mut().find(|known| Arc::ptr_eq(&known.semaphore, &point.semaphore)) {
                Some(known) => known.value = known.value.max(point.value),
                None => self.signals.push(point),
            }
        }
    }
}

impl From<Spare> for InFlight {
    fn from(Spare { event, keep }: Spare) -> Self {
        let (signals, awaited, communicators) = (Signals::new(), SmallVec::new(), SmallVec::new());
        Self { event, signals, keep, submissions: 0, ops: 0, awaited, communicators }
    }
}

impl QueueCore {
    pub(crate) fn new(
        context: &Arc<Context>,
        peers: &Arc<PeerTable>,
        reactor: &Arc<Reactor<QueueCore>>,
        clock: &Arc<Clock>,
        stream: Stream,
        number: u32,
        desc: &QueueDesc,
    ) -> Arc<Self> {
        let queue = Arc::new(Self {
            context: Arc::clone(context),
            peers: Arc::clone(peers),
            reactor: Arc::clone(reactor),
            clock: Arc::clone(clock),
            is_shared: AtomicBool::new(stream.is_foreign()),
            stream,
            id: QueueId { device: context.device, number },
            capacity: desc.capacity,
            is_orphan: AtomicBool::new(false),
            // Room for what is usual, so that a warm queue does not grow.
            state: Mutex::new(State {
                in_flight: VecDeque::with_capacity(2 * STOCK),
                spares: VecDeque::with_capacity(2 * STOCK),
                ..State::default()
            }),
        });
        context.cold.add_queue(&queue);
        queue
    }

    pub(crate) fn belongs_to(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    /// The stream, for another library that is going to use it.
    pub(crate) fn share_stream(self: &Arc<Self>) -> &Stream {
        // Under the lock: whoever submits afterwards sees it.
        let state = self.lock();
        self.is_shared.store(true, Ordering::Relaxed);
        drop(self.marked(state));
        &self.stream
    }

    /// How many submissions may gather.
    fn gathered_at_most(&self) -> usize {
        // Relaxed: written and read under the lock.
        if self.is_shared.load(Ordering::Relaxed) { 1 } else { GATHERED }
    }

    fn submit(
        self: &Arc<Self>,
        submission: &Submission<'_>,
        is_late: bool,
    ) -> Result<SubmissionId, SubmitError> {
        if let Some(failure) = self.context.left() {
            return Err(SubmitError::Failed(failure));
        }
        for op in submission.ops {
            check_op(&self.context, &self.peers, op)?;
        }
        for point in submission.signals {
            if !semaphore::is_ours(point) {
                let (owner, device) = (point.semaphore.device(), self.context.device);
                return Err(SubmitError::Foreign { what: "semaphore", owner, device });
            }
        }
        semaphore::hurry(submission.waits);
        let mut wakers = Wakers::new();
        let mut state = self.lock();
        let would_be_held = state.held.is_empty() && state.ops_in_flight >= self.window();
        if self.is_full(&state) || would_be_held || state.lacks_spares() {
            // Room may have been made, or spares, that nobody has noticed yet.
            state = self.marked(state);
            drop(state);
            self.reap();
            state = self.lock();
        }
        self.admit(&state)?;
        promise_all(submission.signals)?;
        let id = SubmissionId { queue: self.id, index: state.submitted };
        state.submitted += 1;
        let waits = submission.waits;
        let ready = state.held.is_empty()
            && state.ops_in_flight < self.window()
            && obstacles(waits).is_ok_and(|obstacles| obstacles.is_empty());
        if ready {
            let fill = |record: &mut InFlight| {
                submission.ops.iter().try_for_each(|op| self.push(id, op, record))?;
                Ok(submission.ops.len())
            };
            let is_light = submission.ops.iter().all(is_light);
            let is_apart = !waits.is_empty() || submission.ops.iter().any(has_calls);
            let entry = Entry { waits, signals: submission.signals.into(), is_apart, is_light, is_late };
            match self.enqueue(&mut state, entry, fill, &mut wakers) {
                Ok(()) => self.track(state),
                Err((failure, signals)) => self.fail(state, &failure, &signals),
            }
        } else {
            for op in submission.ops {
                // One that has ended since is found when the submission is to enter the stream.
                let _live = communicator::expect_calls(op, self, |_| ());
            }
            state.held.push_back(Held { id, work: OwnedSubmission::from(submission) });
            self.track(state);
            self.schedule();
        }
        wakers.into_iter().for_each(Waker::wake);
        Ok(id)
    }

    /// Operations beyond which submissions are held here. Not for a stream that another library uses too: its
    /// work must not get in front of ours.
    fn window(&self) -> usize {
        if self.stream.is_foreign() { usize::MAX } else { WINDOW }
    }

    /// Whether the queue takes one more.
    fn admit(&self, state: &State) -> Result<(), SubmitError> {
        if let Some(failure) = state.failure.clone().or_else(|| self.context.failure()) {
            return Err(SubmitError::Failed(failure));
        }
        if !self.is_full(state) {
            return Ok(());
        }
        Err(SubmitError::QueueFull { queue: self.id, capacity: self.capacity })
    }

    fn is_full(&self, state: &State) -> bool {
        state.held.len() + state.submissions_in_flight >= self.capacity
    }

    /// Puts a submission in the stream: `fill` pushes its operations and says how many. After an error the
    /// stream may hold a part of it, and the signals come back to be failed.
    fn enqueue(
        self: &Arc<Self>,
        state: &mut State,
        entry: Entry<'_>,
        fill: impl FnOnce(&mut InFlight) -> Result<usize, Arc<Failure>>,
        wakers: &mut Wakers,
    ) -> Result<(), (Arc<Failure>, Signals)> {
        let Entry { waits, mut signals, is_apart, is_light, is_late } = entry;
        let judge = |error| self.context.judge(error);
        if is_apart
            && state.gathered.as_ref().is_some_and(|record| !record.signals.is_empty())
            && let Err(error) = self.mark(state)
        {
            return Err((judge(error), signals));
        }
        if state.gathered.is_none() {
            state.gathered = match self.spare(state) {
                Ok(spare) => Some(spare.into()),
                Err(error) => return Err((judge(error), signals)),
            };
        }
        let Some(record) = &mut state.gathered else { return Ok(()) };
        let _entering = self.context.cold.enqueuing();
        let entered = if is_light && waits.is_empty() && (signals.is_empty() || is_late) {
            self.context.enter_lightly()
        } else {
            self.context.enter()
        };
        let current = match entered {
            Ok(current) => current,
            Err(error) => {
                // Nothing of it is in the stream. What gathered before may be.
                state.gathered.take_if(|record| record.submissions == 0);
                return Err((judge(error), signals));
            }
        };
        record.submissions += 1;
        state.submissions_in_flight += 1;
        let filled = self.wait_in_stream(waits, record).and_then(|()| fill(record));
        if let Ok(ops) = filled {
            record.ops += ops;
            state.ops_in_flight += ops;
            let gathers = record.submissions < self.gathered_at_most();
            if gathers && (signals.is_empty() || is_late && semaphore::put_off(&signals, self)) {
                record.signal(signals);
                return Ok(());
            }
        }
        let marked = record.event.record(&self.stream);
        drop(current);
        let Some(mut record) = state.gathered.take() else { return Ok(()) };
        state.gathered_since = None;
        if let Err(error) = marked {
            state.submissions_in_flight -= record.submissions;
            state.ops_in_flight -= record.ops;
            // Nothing will tell when the device is done with these, so they are never let go.
            record.signal(signals);
            std::mem::forget(record.keep);
            return Err((judge(error), record.signals));
        }
        let failed = filled.err().map(|failure| (failure, std::mem::take(&mut signals)));
        record.signal(signals);
        for point in &record.signals {
            semaphore::enqueued(point, &record.event, self);
            semaphore::take_watchers(point, wakers);
        }
        state.in_flight.push_back(record);
        failed.map_or(Ok(()), Err)
    }

    /// Lets the stream wait for points that other streams reach. The context is current.
    fn wait_in_stream(
        self: &Arc<Self>,
        waits: &[SemaphorePoint],
        record: &mut InFlight,
    ) -> Result<(), Arc<Failure>> {
        for point in waits {
            match semaphore::await_in_stream(point, self)? {
                Readiness::Reached | Readiness::Unknown => {}
                // What is in this stream is behind it anyway.
                Readiness::Enqueued(signal) if signal.queue.as_ptr() == Arc::as_ptr(self) => {}
                Readiness::Enqueued(signal) => {
                    record.awaited.push(point.clone());
                    let waited = self.stream.wait_for(&signal.event);
                    waited.map_err(|error| self.context.judge(error))?;
                }
            }
        }
        Ok(())
    }

    /// Puts an event behind what has gathered.
    fn marked<'a>(self: &'a Arc<Self>, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        match self.mark(&mut state) {
            Ok(()) => state,
            Err(error) => {
                let failure = self.context.judge(error);
                self.fail_in_flight(state, &failure);
                self.lock()
            }
        }
    }

    /// The same, and what gathered stays where it is after an error. Whoever watches for late signals to get their event
    /// hears of it from the reactor, or when they are reached: here the lock is held.
    fn mark(self: &Arc<Self>, state: &mut State) -> Result<(), DriverError> {
        let Some(record) = &state.gathered else { return Ok(()) };
        let _current = self.context.enter()?;
        record.event.record(&self.stream)?;
        for point in &record.signals {
            semaphore::enqueued(point, &record.event, self);
        }
        state.in_flight.extend(state.gathered.take());
        state.gathered_since = None;
        Ok(())
    }

    /// Puts an event behind what has gathered, for somebody who asks for a signal of it. An error is for the reactor to
    /// find: whoever asks may hold locks of their own.
    pub(crate) fn mark_now(self: &Arc<Self>, deadline: Deadline) {
        let Some(_asking) = self.context.cold.ask() else { return };
        if let Some(mut state) = self.lock_by(deadline) {
            let _found_later = self.mark(&mut state);
        }
    }

    /// Puts an event behind what has gathered for a while.
    fn mark_what_waits(self: &Arc<Self>) {
        let Some(_asking) = self.context.cold.ask() else { return };
        let Some(mut state) = self.try_lock() else { return };
        if state.gathered.is_none() {
            return;
        }
        let since = *state.gathered_since.get_or_insert_with(Instant::now);
        // What is held waits for the stream to get shorter.
        if since.elapsed() >= GATHERING || !state.held.is_empty() {
            let late = state.gathered.as_ref().map(|record| record.signals.clone()).unwrap_or_default();
            drop(self.marked(state));
            let mut wakers = Wakers::new();
            late.iter().for_each(|point| semaphore::take_watchers(point, &mut wakers));
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// Puts one operation in the stream, and what it uses in the list.
    #[expect(unsafe_code, reason = "enqueues work on memory that the list keeps")]
    fn push(
        self: &Arc<Self>,
        id: SubmissionId,
        op: &Op<'_>,
        record: &mut InFlight,
    ) -> Result<(), Arc<Failure>> {
        record.keep.op(op);
        if has_calls(op) {
            self.note_calls(op, record)?;
        }
        if let Op::Collective(group) = op {
            let own = CudaCommunicator::of(group.communicator()).ok_or_else(|| self.cannot(id, op.name()))?;
            // SAFETY: as below.
            let enqueued = unsafe { own.enqueue(group.calls(), &self.stream, &mut record.keep) };
            return enqueued.map_err(|error| own.failed(id, error));
        }
        let _hurried = is_first_launch(op).then(|| self.context.cold.open());
        // SAFETY: `submit` checked the operation. The list holds what it names, and is let go behind the event at the
        // end of the submission or not at all (`enqueue`, `fail_in_flight`).
        let enqueued = unsafe { work::enqueue(op, &self.context, &self.stream, &self.clock) };
        enqueued.map_err(|error| match error {
            None => self.cannot(id, op.name()),
            Some(error) => self.context.judge(error),
        })
    }

    /// What the next submission needs. One that is missing is made with others, since the next will be missing too.
    fn spare(&self, state: &mut State) -> Result<Spare, DriverError> {
        if let Some(spare) = state.spare() {
            return Ok(spare);
        }
        for _ in 1..STOCK {
            state.spares.push_back(Spare::create(&self.context)?);
        }
        Spare::create(&self.context)
    }

    /// Takes note of the communicators whose calls an operation has, which are told where they are.
    fn note_calls(self: &Arc<Self>, op: &Op<'_>, record: &mut InFlight) -> Result<(), Arc<Failure>> {
        communicator::expect_calls(op, self, |address| {
            if !record.communicators.contains(&address) {
                record.communicators.push(address);
            }
        })
    }

    fn cannot(&self, submission: SubmissionId, what: &'static str) -> Arc<Failure> {
        let reason = "an operand does not belong to a CUDA device".to_owned();
        Arc::new(Failure::OperationFailed { submission, what, reason })
    }

    /// Lets the reactor know about a queue with work under way.
    fn track(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let new = !state.tracked && !state.is_idle();
        state.tracked |= new;
        // The reactor takes its own lock before a queue's.
        drop(state);
        if new {
            self.reactor.add(Arc::clone(self));
        }
    }

    /// Puts held submissions in the stream for as long as they can go, and fails them when they cannot ever.
    fn schedule(self: &Arc<Self>) {
        loop {
            let mut state = self.lock();
            let obstacles = match state.held.front() {
                None => return,
                Some(held) => obstacles(&held.work.waits),
            };
            match obstacles {
                Err(failure) => return self.fail(state, &failure, &[]),
                Ok(points) if !points.is_empty() && state.closing => {
                    let failure = Arc::new(Failure::Abandoned { device: self.context.device });
                    return self.fail(state, &failure, &[]);
                }
                Ok(points) if !points.is_empty() => {
                    drop(state);
                    // All of them, since any may fail. Outside the lock: a semaphore may call back at once.
                    let waker = Waker::from(Arc::clone(self));
                    return points.iter().for_each(|point| semaphore::watch(point, &waker));
                }
                // `reap` comes back here when the stream has got shorter.
                Ok(_) if state.ops_in_flight >= self.window() => return,
                Ok(_) => {}
            }
            let Some(Held { id, work }) = state.held.pop_front() else { return };
            let mut wakers = Wakers::new();
            let fill = |record: &mut InFlight| {
                work.ops.iter().try_for_each(|op| op.with(|op| self.push(id, op, record)))?;
                Ok(work.ops.len())
            };
            let (waits, signals) = (&*work.waits, work.signals);
            let entry = Entry { waits, signals, is_apart: true, is_light: false, is_late: false };
            match self.enqueue(&mut state, entry, fill, &mut wakers) {
                Ok(()) => self.track(state),
                Err((failure, signals)) => self.fail(state, &failure, &signals),
            }
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// How many submissions are over, if some are not.
    pub(crate) fn progress(self: &Arc<Self>) -> Option<u64> {
        let state = self.marked(self.lock());
        (!state.is_idle()).then_some(state.finished)
    }

    /// Whether the queue is empty, or has finished something since it was `before`. Not while another thread is busy
    /// with it.
    pub(crate) fn has_moved(&self, before: Option<u64>) -> bool {
        self.try_lock()
            .is_some_and(|state| state.is_idle() || before.is_some_and(|before| state.finished > before))
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The device goes away: what is in the stream or can enter it runs, what waits is abandoned.
    pub(crate) fn close(self: &Arc<Self>) {
        self.lock().closing = true;
        self.schedule();
    }

    /// The lock, unless another thread has it for too long: one that is in a call of a library's.
    fn lock_by(&self, deadline: Deadline) -> Option<MutexGuard<'_, State>> {
        loop {
            match self.try_lock() {
                None if !deadline.is_past() => thread::sleep(GLANCE),
                state => return state,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing of others runs under the lock but the driver.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for QueueCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueueCore({})", self.id)
    }
}

/// Whether an operation may have calls of communicators in it.
const fn has_calls(op: &Op<'_>) -> bool {
    matches!(op, Op::Collective(_) | Op::Replay(_))
}

/// Whether captures of other threads forbid nothing of an operation: launches of code that is on the device, and calls of
/// NCCL, which sees to that by itself.
fn is_light(op: &Op<'_>) -> bool {
    matches!(op, Op::Collective(_)) || (matches!(op, Op::Launch(_)) && !is_first_launch(op))
}

/// Whether the driver has to bring the operation's code to the device, which waits for residents.
fn is_first_launch(op: &Op<'_>) -> bool {
    matches!(op, Op::Launch(launch) if CudaKernel::of(launch.kernel()).is_some_and(CudaKernel::is_new))
}

/// The points for which no stream can wait yet; the failure, if one of all will never be reached.
fn obstacles(waits: &[SemaphorePoint]) -> Result<SmallVec<[SemaphorePoint; 2]>, Arc<Failure>> {
    let mut obstacles = SmallVec::new();
    for point in waits {
        if let Readiness::Unknown = semaphore::readiness(point)? {
            obstacles.push(point.clone());
        }
    }
    Ok(obstacles)
}

/// The user's handle of a queue. It keeps the device open.
#[derive(Debug)]
pub(crate) struct CudaQueue {
    pub(crate) core: Arc<QueueCore>,
    pub(crate) _device: Arc<CudaDevice>,
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        // Release: see `QueueCore::let_go`.
        self.core.is_orphan.store(true, Ordering::Release);
    }
}

impl Queue for CudaQueue {
    fn id(&self) -> QueueId {
        self.core.id
    }

    fn submit(&self, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
        self.core.submit(submission, false)
    }

    fn submit_late(&self, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
        self.core.submit(submission, true)
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.core.context.left().or_else(|| self.core.lock().failure.clone())
    }
}
