//! Queues of CUDA devices: a stream each, and the submissions that cannot enter it yet.
//!
//! A submission enters the stream as soon as everything it waits for is reached or is itself in some stream
//! of the backend; then the wait is an event wait. Until then it is held here, and with it what is behind
//! it. A stream therefore never waits for something that is not under way.

use std::{
    cell::RefCell,
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Wake, Waker},
};

use smallvec::SmallVec;
use warpweft_core_types::{
    Access, Buffer, BufferView, DriverError, Failure, Launch, Op, OwnedSubmission, Queue, QueueDesc, QueueId,
    SemaphorePoint, Submission, SubmissionId, SubmitError, promise_all,
};
use warpweft_polled::{KeepAlive, Polled, Reactor};

use crate::{
    clock::Clock,
    context::Context,
    device::CudaDevice,
    graph::CudaGraph,
    memory::buffer_of,
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

/// Spares kept for the next submissions: as many as there can be submissions in the stream.
const SPARES: usize = WINDOW;

/// Finished submissions that are looked after at once.
const BATCH: usize = 16;

/// A queue's state and work, kept alive by whoever may still have to look after it.
pub(crate) struct QueueCore {
    context: Arc<Context>,
    peers: Arc<PeerTable>,
    reactor: Arc<Reactor<QueueCore>>,
    clock: Arc<Clock>,
    stream: Stream,
    id: QueueId,
    capacity: usize,
    /// The user's handle is gone, so that the device may go with what is in flight.
    is_orphan: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    held: VecDeque<Held>,
    in_flight: VecDeque<InFlight>,
    /// Operations of all that is in flight.
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

/// A submission that waits on the host.
#[derive(Debug)]
struct Held {
    id: SubmissionId,
    work: OwnedSubmission,
}

/// A submission in the stream.
#[derive(Debug)]
struct InFlight {
    event: Arc<Event>,
    signals: Signals,
    keep: KeepAlive,
    ops: usize,
}

/// Submissions that are over.
type Done = SmallVec<[InFlight; BATCH]>;

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
            stream,
            id: QueueId { device: context.device, number },
            capacity: desc.capacity,
            is_orphan: AtomicBool::new(false),
            state: Mutex::default(),
        });
        context.cold.add_queue(&queue);
        queue
    }

    pub(crate) fn belongs_to(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    pub(crate) const fn stream(&self) -> &Stream {
        &self.stream
    }

    fn submit(self: &Arc<Self>, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
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
        let mut wakers = Wakers::new();
        let mut state = self.lock();
        let would_be_held = state.held.is_empty() && state.ops_in_flight >= self.window();
        if self.is_full(&state) || would_be_held || state.lacks_spares() {
            // Room may have been made, or spares, that nobody has noticed yet.
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
            let fill = |keep: &mut KeepAlive| {
                submission.ops.iter().try_for_each(|op| self.push(id, op, keep))?;
                Ok(submission.ops.len())
            };
            let signals = submission.signals.into();
            match self.enqueue(&mut state, waits, fill, signals, &mut wakers) {
                Ok(()) => self.track(state),
                Err((failure, signals)) => self.fail(state, &failure, &signals),
            }
        } else {
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
        state.held.len() + state.in_flight.len() >= self.capacity
    }

    /// Puts a submission in the stream: `fill` pushes its operations and says how many. After an error the
    /// stream may hold a part of it, and the signals come back to be failed.
    fn enqueue(
        self: &Arc<Self>,
        state: &mut State,
        waits: &[SemaphorePoint],
        fill: impl FnOnce(&mut KeepAlive) -> Result<usize, Arc<Failure>>,
        signals: Signals,
        wakers: &mut Wakers,
    ) -> Result<(), (Arc<Failure>, Signals)> {
        let Spare { event, mut keep } = match self.spare(state) {
            Ok(spare) => spare,
            Err(error) => return Err((self.context.judge(error), signals)),
        };
        let _entering = self.context.cold.enqueuing();
        let filled = self.fill_stream(waits, fill, &mut keep);
        if let Err(error) = self.mark(&event) {
            // Nothing will tell when the device is done with these, so they are never let go.
            std::mem::forget(keep);
            return Err((self.context.judge(error), signals));
        }
        match filled {
            Ok(ops) => {
                for point in &signals {
                    semaphore::enqueued(point, &event, self, wakers);
                }
                state.ops_in_flight += ops;
                state.in_flight.push_back(InFlight { event, signals, keep, ops });
                Ok(())
            }
            Err(failure) => {
                state.in_flight.push_back(InFlight { event, signals: SmallVec::new(), keep, ops: 0 });
                Err((failure, signals))
            }
        }
    }

    /// Puts waits and operations in the stream, all with the context current once.
    fn fill_stream(
        &self,
        waits: &[SemaphorePoint],
        fill: impl FnOnce(&mut KeepAlive) -> Result<usize, Arc<Failure>>,
        keep: &mut KeepAlive,
    ) -> Result<usize, Arc<Failure>> {
        let judge = |error| self.context.judge(error);
        let _current = self.context.enter().map_err(judge)?;
        for point in waits {
            match semaphore::readiness(point)? {
                Readiness::Reached | Readiness::Unknown => {}
                // What is in this stream is behind it anyway.
                Readiness::Enqueued(signal) if signal.queue.as_ptr() == std::ptr::from_ref(self) => {}
                Readiness::Enqueued(signal) => self.stream.wait_for(&signal.event).map_err(judge)?,
            }
        }
        fill(keep)
    }

    /// Puts one operation in the stream, and what it uses in the list.
    #[expect(unsafe_code, reason = "enqueues work on memory that the list keeps")]
    fn push(&self, id: SubmissionId, op: &Op<'_>, keep: &mut KeepAlive) -> Result<(), Arc<Failure>> {
        keep.op(op);
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

    /// Puts an event behind what is in the stream now.
    fn mark(&self, event: &Event) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        event.record(&self.stream)
    }

    fn cannot(&self, submission: SubmissionId, what: &'static str) -> Arc<Failure> {
        let reason = "an operand does not belong to a CUDA device".to_owned();
        Arc::new(Failure::OperationFailed { submission, what, reason })
    }

    /// Lets the reactor know about a queue with work under way.
    fn track(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let new = !state.tracked && !state.in_flight.is_empty();
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
            let fill = |keep: &mut KeepAlive| {
                work.ops.iter().try_for_each(|op| op.with(|op| self.push(id, op, keep)))?;
                Ok(work.ops.len())
            };
            match self.enqueue(&mut state, &work.waits, fill, work.signals, &mut wakers) {
                Ok(()) => self.track(state),
                Err((failure, signals)) => self.fail(state, &failure, &signals),
            }
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// Raises what finished submissions signal and lets go of what they used; whether some are held.
    fn settle(&self, mut done: Done) -> bool {
        // Outside the lock: raising a semaphore wakes others, and letting go of buffers frees them.
        for record in &mut done {
            record.signals.iter().for_each(semaphore::reached);
            record.signals.clear();
        }
        self.let_go(&mut done);
        self.recycle(done)
    }

    /// Lets go of what submissions used. A device that goes with it goes on its service thread: this may be the
    /// thread that other devices wait for.
    fn let_go(&self, done: &mut [InFlight]) {
        // Acquire: pairs with the drop of the handle.
        if self.is_orphan.load(Ordering::Acquire) {
            let kept: Vec<_> = done.iter_mut().map(|record| std::mem::take(&mut record.keep)).collect();
            self.context.serve(move || drop(kept));
        } else {
            done.iter_mut().for_each(|record| record.keep.clear());
        }
    }

    /// Asks the driver with the lock open: a program that submits meanwhile must not wait for the answer, which
    /// takes a microsecond, nor be put to sleep by a lock that is taken again and again.
    fn take_finished(&self, done: &mut Done) -> Result<(), DriverError> {
        let Some(_asking) = self.context.cold.ask() else { return Ok(()) };
        let Some(mut state) = self.try_lock() else { return Ok(()) };
        let mut current = None;
        while done.len() < BATCH
            && let Some(event) = state.in_flight.front().map(|first| Arc::clone(&first.event))
        {
            drop(state);
            if current.is_none() {
                current = Some(self.context.enter()?);
            }
            if !event.is_done()? {
                return Ok(());
            }
            state = self.lock();
            // Another thread may have asked the same.
            if state.in_flight.front().is_some_and(|first| Arc::ptr_eq(&first.event, &event)) {
                drop(event);
                let finished = state.in_flight.pop_front();
                state.finished += 1;
                state.ops_in_flight -= finished.as_ref().map_or(0, |first| first.ops);
                done.extend(finished);
            }
        }
        Ok(())
    }

    /// How many submissions are over, if some are not.
    pub(crate) fn progress(&self) -> Option<u64> {
        let state = self.lock();
        (!state.in_flight.is_empty()).then_some(state.finished)
    }

    /// Whether the queue is empty, or has finished something since it was `before`. Not while another thread is busy
    /// with it.
    pub(crate) fn has_moved(&self, before: Option<u64>) -> bool {
        self.try_lock().is_some_and(|state| {
            state.in_flight.is_empty() || before.is_some_and(|before| state.finished > before)
        })
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Keeps what the next submissions can use; whether some are held.
    fn recycle(&self, done: Done) -> bool {
        let mut state = self.lock();
        let room = SPARES.saturating_sub(state.spares.len());
        let spent = done.into_iter().take(room);
        state.spares.extend(spent.map(|InFlight { event, keep, .. }| Spare { event, keep }));
        !state.held.is_empty()
    }

    /// Fails everything the queue holds and will be given, and `signals`, which it had in hand. What is in the
    /// stream goes on.
    fn fail(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State>,
        failure: &Arc<Failure>,
        signals: &[SemaphorePoint],
    ) {
        state.failure.get_or_insert_with(|| Arc::clone(failure));
        let held = std::mem::take(&mut state.held);
        state.doomed.push(signals.into());
        state.doomed.extend(held.iter().map(|held| held.work.signals.clone()));
        self.track(state);
        // What is still to come of the first one's waits must not keep the queue. Outside the lock, as below.
        if let Some(first) = held.front() {
            let waker = Waker::from(Arc::clone(self));
            first.work.waits.iter().for_each(|point| semaphore::unwatch(point, &waker));
        }
        // Outside the lock: dropping submissions frees buffers.
        drop(held);
        self.fail_doomed();
    }

    /// Fails what will not run, unless something before it still does.
    fn fail_doomed(&self) {
        let mut state = self.lock();
        let Some(failure) = state.failure.clone().filter(|_| state.in_flight.is_empty()) else { return };
        let doomed = std::mem::take(&mut state.doomed);
        drop(state);
        // Outside the lock: failing a semaphore wakes others.
        doomed.iter().flatten().for_each(|point| point.semaphore.fail(Arc::clone(&failure)));
    }

    /// Fails what is in the stream too, since the driver will not say when it is over.
    fn fail_in_flight(self: &Arc<Self>, mut state: MutexGuard<'_, State>, failure: &Arc<Failure>) {
        let in_flight = std::mem::take(&mut state.in_flight);
        state.ops_in_flight = 0;
        // Before what is behind them.
        let mut signals: Vec<_> = in_flight.iter().map(|record| record.signals.clone()).collect();
        signals.append(&mut state.doomed);
        state.doomed = signals;
        self.fail(state, failure, &[]);
        if self.context.failure().is_none() {
            // The device lives and may still touch what these use: it is never let go.
            in_flight.into_iter().for_each(|record| std::mem::forget(record.keep));
        }
    }

    /// The device goes away: what is in the stream or can enter it runs, what waits is abandoned.
    pub(crate) fn close(self: &Arc<Self>) {
        self.lock().closing = true;
        self.schedule();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing of others runs under the lock but the driver.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Polled for QueueCore {
    /// Takes note of what the stream has finished; whether it was something.
    ///
    /// It does nothing while another thread is busy with the queue: that thread, or the next look, will.
    fn reap(self: &Arc<Self>) -> bool {
        let mut progress = false;
        loop {
            let mut done = Done::new();
            let looked = self.take_finished(&mut done);
            let is_last = done.len() < BATCH;
            progress |= !done.is_empty();
            // What is over is so before what fails behind it.
            let is_held = !done.is_empty() && self.settle(done);
            if let Err(error) = looked {
                let failure = self.context.judge(error);
                self.fail_in_flight(self.lock(), &failure);
            } else if is_held {
                self.schedule();
            }
            if is_last {
                break;
            }
        }
        if progress {
            self.fail_doomed();
        }
        progress
    }

    /// Whether submissions wait here for the stream to get shorter or for others.
    fn is_holding(&self) -> bool {
        self.try_lock().is_some_and(|state| !state.held.is_empty())
    }

    /// Whether the reactor may forget the queue.
    fn retire(&self) -> bool {
        let Some(mut state) = self.try_lock() else { return false };
        state.tracked = !state.in_flight.is_empty();
        !state.tracked
    }

    /// Lets go of a queue that has nothing under way: one that nobody uses any more goes on the device's service
    /// thread, for the same reason.
    fn end(self: Arc<Self>) {
        // Acquire: as in `let_go`.
        if self.is_orphan.load(Ordering::Acquire) {
            let context = Arc::clone(&self.context);
            context.serve(move || drop(self));
        }
    }
}

impl fmt::Debug for QueueCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueueCore({})", self.id)
    }
}

impl Wake for QueueCore {
    /// Looks at the queue again, once the queue that this thread is looking at is done with: a chain of queues
    /// that wake each other is walked and not descended.
    fn wake(self: Arc<Self>) {
        let fallback = Arc::clone(&self);
        // A thread that is ending has no list any more.
        let started = WOKEN.try_with(|woken| {
            let mut woken = woken.borrow_mut();
            let first = woken.is_none();
            woken.get_or_insert_default().push_back(self);
            first
        });
        match started {
            Ok(true) => Walk.run(),
            Ok(false) => {}
            Err(_) => fallback.schedule(),
        }
    }
}

thread_local! {
    /// Queues to be looked at by this thread, which is doing so if there is a list.
    static WOKEN: RefCell<Option<VecDeque<Arc<QueueCore>>>> = const { RefCell::new(None) };
}

/// The looking; its list goes with it, however it ends.
struct Walk;

impl Walk {
    fn run(self) {
        let next = || WOKEN.with_borrow_mut(|woken| woken.as_mut().and_then(VecDeque::pop_front));
        while let Some(queue) = next() {
            queue.schedule();
        }
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        let _gone = WOKEN.try_with(|woken| woken.borrow_mut().take());
    }
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

/// Checks that a queue can carry out an operation.
pub(crate) fn check_op(context: &Context, peers: &PeerTable, op: &Op<'_>) -> Result<(), SubmitError> {
    let device = context.device;
    match op {
        Op::Launch(launch) if launch.kernel().contract().resident => {
            return Err(SubmitError::Sliced { kernel: launch.kernel().contract().name.clone() });
        }
        Op::Launch(launch) => return check_launch(context, peers, launch),
        Op::Replay(graph) => {
            let ours = CudaGraph::of(graph).is_some_and(|graph| graph.belongs_to(context));
            let owner = graph.graph().device();
            // Its nodes were checked when they were set.
            return ours.then_some(()).ok_or(SubmitError::Foreign { what: "graph", owner, device });
        }
        Op::Copy(_) | Op::Fill(_) | Op::Timestamp(_) => {}
        _ => return Err(SubmitError::Unsupported { device, what: op.name() }),
    }
    let mut result = Ok(());
    op.for_each_access(|view, access| {
        if result.is_ok() {
            result = check_view(context, peers, view, access);
        }
    });
    result
}

/// Checks that a launch's kernel and operands are of CUDA devices, within reach of this one.
pub(crate) fn check_launch(
    context: &Context,
    peers: &PeerTable,
    launch: &Launch<'_>,
) -> Result<(), SubmitError> {
    let kernel = launch.kernel();
    let ours = CudaKernel::of(kernel).is_some_and(|kernel| kernel.belongs_to(context));
    if !ours {
        let (owner, device) = (kernel.device(), context.device);
        return Err(SubmitError::Foreign { what: "kernel", owner, device });
    }
    launch.buffers().try_for_each(|(view, access)| check_view(context, peers, view, access))
}

fn check_view(
    context: &Context,
    peers: &PeerTable,
    view: &BufferView,
    access: Access,
) -> Result<(), SubmitError> {
    let (owner, device) = (view.device(), context.device);
    // Memory of another driver is nothing to this one.
    let known = buffer_of(view).filter(|buffer| Arc::ptr_eq(&buffer.context().driver, &context.driver));
    let Some(buffer) = known else {
        return Err(SubmitError::Foreign { what: "buffer", owner, device });
    };
    if std::ptr::eq(Arc::as_ptr(buffer.context()), context) || buffer.kind().is_host_visible() {
        return Ok(());
    }
    // Another context of the same device is another owner, whose memory nobody has opened to this one. What another
    // library allocated in a pool of its own was not opened by us either.
    if owner == device || !buffer.is_open_to_peers() {
        return Err(SubmitError::Foreign { what: "buffer", owner, device });
    }
    // Both devices are open, so they were introduced to each other.
    if peers.reaches(device.ordinal, owner.ordinal) {
        return Ok(());
    }
    match access {
        Access::Read => Err(SubmitError::NoLink { from: owner, to: device }),
        Access::Write | Access::ReadWrite => Err(SubmitError::NoLink { from: device, to: owner }),
    }
}

/// The user's handle of a queue. It keeps the device open.
#[derive(Debug)]
pub(crate) struct CudaQueue {
    pub(crate) core: Arc<QueueCore>,
    pub(crate) _device: Arc<CudaDevice>,
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        // Release: see `let_go`.
        self.core.is_orphan.store(true, Ordering::Release);
    }
}

impl Queue for CudaQueue {
    fn id(&self) -> QueueId {
        self.core.id
    }

    fn submit(&self, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
        self.core.submit(submission)
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.core.context.left().or_else(|| self.core.lock().failure.clone())
    }
}
