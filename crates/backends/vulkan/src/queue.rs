//! Queues of Vulkan devices: a line each, several of them in one queue of the driver's.
//!
//! A submission goes to the driver as soon as everything it waits for is reached or was itself submitted to the same
//! device; then the driver waits. Until then it is held here, and with it what is behind it. The driver therefore never
//! waits for something that is not under way.

use std::{
    cell::RefCell,
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak},
    task::{Wake, Waker},
};

use smallvec::SmallVec;
use warpweft_core_types::{
    BufferView, DriverError, Failure, Op, OwnedOp, OwnedSubmission, PreparedGraph, Queue, QueueDesc, QueueId,
    SemaphorePoint, Submission, SubmissionId, SubmitError, promise_all,
};
use warpweft_polled::{KeepAlive, Polled, Reactor};

use crate::{
    chores::Hold,
    graph::VulkanGraph,
    memory::VulkanBuffer,
    record::Recording,
    semaphore::{self, Readiness, Wakers},
    timeline::{Line, Ticket},
    work::Tools,
};

/// Spent objects kept for the next submissions.
const SPARES: usize = 64;

/// A queue's state and work, kept alive by whoever may still have to look after it.
pub(crate) struct QueueCore {
    tools: Arc<Tools>,
    reactor: Arc<Reactor<QueueCore>>,
    line: Arc<Line>,
    /// Which queue of the driver's it uses.
    driver_queue: usize,
    id: QueueId,
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Submissions that wait on the host.
    held: VecDeque<OwnedSubmission>,
    in_flight: VecDeque<InFlight>,
    submitted: u64,
    /// The line's value once everything in flight is over.
    last: u64,
    failure: Option<Arc<Failure>>,
    /// Signals of what will not run. They fail in their turn, once what the driver has before them is over.
    doomed: Vec<Signals>,
    /// The reactor has this queue in its list.
    tracked: bool,
    /// The device went away: what is held will not run.
    closing: bool,
    spare_recordings: Vec<Recording>,
    spare_lists: Vec<KeepAlive>,
}

/// The points a submission raises.
type Signals = SmallVec<[SemaphorePoint; 1]>;

/// A submission that the driver has.
#[derive(Debug)]
struct InFlight {
    ticket: Ticket,
    signals: Signals,
    batch: Batch,
}

/// The operations of a submission, lent or owned.
#[derive(Clone, Copy)]
enum Ops<'a> {
    Lent(&'a [Op<'a>]),
    Owned(&'a [OwnedOp]),
}

impl Ops<'_> {
    fn is_empty(&self) -> bool {
        match self {
            Self::Lent(ops) => ops.is_empty(),
            Self::Owned(ops) => ops.is_empty(),
        }
    }

    fn has_replay(&self) -> bool {
        match self {
            Self::Lent(ops) => ops.iter().any(|op| matches!(op, Op::Replay(_))),
            Self::Owned(ops) => ops.iter().any(OwnedOp::is_replay),
        }
    }

    fn try_for_each<E>(&self, mut visit: impl FnMut(&Op<'_>) -> Result<(), E>) -> Result<(), E> {
        match self {
            Self::Lent(ops) => ops.iter().try_for_each(visit),
            Self::Owned(ops) => ops.iter().try_for_each(|op| op.with(&mut visit)),
        }
    }
}

/// A submission on its way to the driver, and what it uses there.
#[derive(Debug, Default)]
struct Batch {
    keep: KeepAlive,
    waits: SmallVec<[Ticket; 4]>,
    recording: Option<Recording>,
}

impl Batch {
    fn wait_for(&mut self, ticket: &Ticket, own: &Arc<Line>) {
        // What is on the queue's own line is in front of it anyway.
        if !ticket.is_on(own) {
            self.waits.push(ticket.clone());
        }
    }
}

impl QueueCore {
    pub(crate) fn new(
        tools: &Arc<Tools>,
        reactor: &Arc<Reactor<QueueCore>>,
        number: u32,
        desc: &QueueDesc,
    ) -> Result<Arc<Self>, DriverError> {
        Ok(Arc::new(Self {
            tools: Arc::clone(tools),
            reactor: Arc::clone(reactor),
            line: Line::create(&tools.gpu)?,
            driver_queue: tools.gpu.pick_queue(),
            id: QueueId { device: tools.gpu.id, number },
            capacity: desc.capacity,
            state: Mutex::default(),
        }))
    }

    fn submit(self: &Arc<Self>, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
        for op in submission.ops {
            self.tools.check(op)?;
        }
        for point in submission.signals {
            if !semaphore::is_ours(point) {
                let (owner, device) = (point.semaphore.device(), self.id.device);
                return Err(SubmitError::Foreign { what: "semaphore", owner, device });
            }
        }
        let mut wakers = Wakers::new();
        let mut state = self.lock();
        if self.is_full(&state) {
            // Room may have been made that nobody has noticed yet.
            drop(state);
            self.reap();
            state = self.lock();
        }
        self.admit(&state)?;
        promise_all(submission.signals)?;
        let id = SubmissionId { queue: self.id, index: state.submitted };
        state.submitted += 1;
        let waits = submission.waits;
        let ready = state.held.is_empty() && self.obstacles(waits).is_ok_and(|points| points.is_empty());
        if ready {
            let (ops, signals) = (Ops::Lent(submission.ops), submission.signals.into());
            match self.enqueue(&mut state, waits, ops, signals, &mut wakers) {
                Ok(()) => self.track(state),
                Err(refused) => self.refuse(state, refused),
            }
        } else {
            state.held.push_back(OwnedSubmission::from(submission));
            self.track(state);
            self.schedule();
        }
        wakers.into_iter().for_each(Waker::wake);
        Ok(id)
    }

    /// Whether the queue takes one more.
    fn admit(&self, state: &State) -> Result<(), SubmitError> {
        if let Some(failure) = state.failure.clone().or_else(|| self.tools.gpu.failure()) {
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

    /// The points for which this device cannot wait yet; the failure, if one of all will never be reached.
    fn obstacles(&self, waits: &[SemaphorePoint]) -> Result<SmallVec<[SemaphorePoint; 2]>, Arc<Failure>> {
        let mut obstacles = SmallVec::new();
        for point in waits {
            if let Readiness::Unknown = semaphore::readiness(point, &self.tools.gpu)? {
                obstacles.push(point.clone());
            }
        }
        Ok(obstacles)
    }

    /// Records a submission and hands it to the driver: as a whole or not at all. Its operations were checked.
    #[expect(unsafe_code, reason = "submits work on memory that the batch holds")]
    fn enqueue(
        self: &Arc<Self>,
        state: &mut State,
        waits: &[SemaphorePoint],
        ops: Ops<'_>,
        signals: Signals,
        wakers: &mut Wakers,
    ) -> Result<(), Box<Refused>> {
        let mut batch = Batch { keep: state.spare_lists.pop().unwrap_or_default(), ..Batch::default() };
        let replays =
            ops.has_replay().then(|| self.tools.replays.lock().unwrap_or_else(PoisonError::into_inner));
        let ticket = Ticket::new(&self.line, state.last + 1);
        let recorded = self.fill(&mut batch, state, waits, ops).and_then(|()| {
            // SAFETY: `submit` and `schedule` were given operations that `check` took. The batch holds what they name
            // and the recording until its ticket is reached (`reap`), or for good (`fail_in_flight`); the ticket is
            // the next of this queue's line, under its lock. The waits are of this device (`Readiness::Submitted`,
            // `zeroed`, `replay`).
            unsafe { self.hand_over(&batch, &ticket) }
        });
        if let Err(failure) = recorded {
            return Err(Box::new(Refused { failure, signals, batch }));
        }
        state.last = ticket.value();
        batch.keep.graphs().filter_map(VulkanGraph::of).for_each(|graph| graph.follow(&ticket));
        drop(replays);
        for point in &signals {
            semaphore::submitted(point, &ticket, self, wakers);
        }
        state.in_flight.push_back(InFlight { ticket, signals, batch });
        Ok(())
    }

    /// Hands a recorded batch to the driver.
    ///
    /// # Safety
    ///
    /// - The ticket is of this queue's line, above all before it.
    /// - The batch lives until it is reached, and holds what its commands touch; what it waits for is of this device.
    #[expect(unsafe_code, reason = "submits work on memory that the batch holds")]
    unsafe fn hand_over(&self, batch: &Batch, ticket: &Ticket) -> Result<(), Arc<Failure>> {
        let gpu = &self.tools.gpu;
        let commands = batch.recording.as_ref().map(Recording::commands);
        // SAFETY: the caller's word; `record` came to the end of the recording.
        let submitted = unsafe { gpu.submit(self.driver_queue, commands, &batch.waits, ticket) };
        submitted.map_err(|error| gpu.judge(error))
    }

    /// Records waits and operations.
    fn fill(
        &self,
        batch: &mut Batch,
        state: &mut State,
        waits: &[SemaphorePoint],
        ops: Ops<'_>,
    ) -> Result<(), Arc<Failure>> {
        let gpu = &self.tools.gpu;
        for point in waits {
            if let Readiness::Submitted(ticket) = semaphore::readiness(point, gpu)? {
                batch.wait_for(&ticket, &self.line);
            }
        }
        if ops.is_empty() {
            return Ok(());
        }
        self.record(batch, state, ops).map_err(|error| gpu.judge(error))
    }

    #[expect(unsafe_code, reason = "records operations that were checked")]
    fn record(&self, batch: &mut Batch, state: &mut State, ops: Ops<'_>) -> Result<(), DriverError> {
        let mut recording = match state.spare_recordings.pop() {
            Some(recording) => recording,
            None => Recording::primary(&self.tools.gpu)?,
        };
        // SAFETY: it is new, or `recycle` kept it from a batch that is over.
        unsafe { recording.begin() }?;
        ops.try_for_each(|op| {
            // In front of each: behind what this queue and others did before.
            recording.barrier();
            batch.keep.op(op);
            op.for_each_access(|view, _| self.wait_until_zeroed(batch, view));
            match op {
                Op::Replay(graph) => self.replay(batch, graph, &mut recording),
                // SAFETY: `submit` checked the operation.
                op => unsafe { self.tools.record(op, &mut recording) },
            }
        })?;
        recording.show_host();
        recording.end()?;
        batch.recording = Some(recording);
        Ok(())
    }

    fn replay(
        &self,
        batch: &mut Batch,
        graph: &PreparedGraph,
        recording: &mut Recording,
    ) -> Result<(), DriverError> {
        let Some(own) = VulkanGraph::of(graph) else { return Ok(()) };
        if let Some(before) = own.last() {
            batch.wait_for(&before, &self.line);
        }
        let recordings = own.replay(graph.ops(), recording)?;
        recordings.into_iter().for_each(|recorded| batch.keep.other(recorded));
        Ok(())
    }

    fn wait_until_zeroed(&self, batch: &mut Batch, view: &BufferView) {
        let Some(buffer) = VulkanBuffer::of(view).filter(|buffer| buffer.is_of(&self.tools.gpu)) else {
            return;
        };
        if let Some(zeroed) = buffer.zeroed()
            && !zeroed.is_done().unwrap_or(true)
        {
            batch.wait_for(zeroed, &self.line);
        }
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

    /// Hands held submissions over for as long as they can go, and fails them when they cannot ever.
    fn schedule(self: &Arc<Self>) {
        loop {
            let mut state = self.lock();
            let obstacles = match state.held.front() {
                None => return,
                Some(held) => self.obstacles(&held.waits),
            };
            match obstacles {
                Err(failure) => return self.fail(state, &failure, &[]),
                Ok(points) if !points.is_empty() && state.closing => {
                    let failure = Arc::new(Failure::Abandoned { device: self.id.device });
                    return self.fail(state, &failure, &[]);
                }
                Ok(points) if !points.is_empty() => {
                    drop(state);
                    // All of them, since any may fail. Outside the lock: a semaphore may call back at once.
                    let waker = Waker::from(Arc::clone(self));
                    return points.iter().for_each(|point| semaphore::watch(point, &self.tools.gpu, &waker));
                }
                Ok(_) => {}
            }
            let Some(work) = state.held.pop_front() else { return };
            let mut wakers = Wakers::new();
            match self.enqueue(&mut state, &work.waits, Ops::Owned(&work.ops), work.signals, &mut wakers) {
                Ok(()) => self.track(state),
                Err(refused) => self.refuse(state, refused),
            }
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// What a waker does.
    fn look(self: Arc<Self>) {
        self.schedule();
        self.end();
    }

    fn take_finished(&self, done: &mut SmallVec<[InFlight; 4]>) -> Result<(), Arc<Failure>> {
        let gpu = &self.tools.gpu;
        let Some(mut state) = self.try_lock() else { return Ok(()) };
        while let Some(first) = state.in_flight.front() {
            if !self.is_over(&first.ticket)? {
                // A driver that said once that the device is lost need not say it of every semaphore.
                return gpu.failure().map_or(Ok(()), Err);
            }
            // Before what is behind it can fail (`fail_doomed`).
            first.signals.iter().for_each(semaphore::saw);
            done.extend(state.in_flight.pop_front());
        }
        Ok(())
    }

    /// Whether work is over. What the driver cannot tell for want of memory it is asked again.
    fn is_over(&self, ticket: &Ticket) -> Result<bool, Arc<Failure>> {
        ticket.is_done().or_else(|error| match self.tools.gpu.judge(error) {
            failure if matches!(*failure, Failure::OutOfMemory { .. }) => Ok(false),
            failure => Err(failure),
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
    fn recycle(&self, done: SmallVec<[InFlight; 4]>) -> bool {
        let mut spent = SmallVec::<[Batch; 4]>::new();
        let mut state = self.lock();
        for InFlight { mut batch, .. } in done {
            if state.spare_lists.len() < SPARES {
                state.spare_lists.push(std::mem::take(&mut batch.keep));
            }
            if state.spare_recordings.len() < SPARES {
                state.spare_recordings.extend(batch.recording.take());
            }
            spent.push(batch);
        }
        let holding = !state.held.is_empty();
        // What is not kept is let go outside the lock.
        drop(state);
        drop(spent);
        holding
    }

    /// Fails what the driver did not get, and with it the queue.
    fn refuse(self: &Arc<Self>, state: MutexGuard<'_, State>, refused: Box<Refused>) {
        let Refused { failure, signals, batch } = *refused;
        self.fail(state, &failure, &signals);
        // Outside the lock, since it may free buffers.
        drop(batch);
    }

    /// Fails everything the queue holds and will be given, and `signals`, which it had in hand. What the driver has goes
    /// on.
    fn fail(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State>,
        failure: &Arc<Failure>,
        signals: &[SemaphorePoint],
    ) {
        state.failure.get_or_insert_with(|| Arc::clone(failure));
        let held = std::mem::take(&mut state.held);
        state.doomed.push(signals.into());
        state.doomed.extend(held.iter().map(|held| held.signals.clone()));
        self.track(state);
        // What is still to come of the first one's waits must not keep the queue. Outside the lock, as below.
        if let Some(first) = held.front() {
            let waker = Waker::from(Arc::clone(self));
            first.waits.iter().for_each(|point| semaphore::unwatch(point, &waker));
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

    /// Fails what the driver has too, since it will not say when that is over.
    fn fail_in_flight(self: &Arc<Self>, mut state: MutexGuard<'_, State>, failure: &Arc<Failure>) {
        let in_flight = std::mem::take(&mut state.in_flight);
        // Before what is behind them.
        let mut signals: Vec<_> = in_flight.iter().map(|record| record.signals.clone()).collect();
        signals.append(&mut state.doomed);
        state.doomed = signals;
        self.fail(state, failure, &[]);
        if self.tools.gpu.failure().is_none() {
            // The device lives and may still touch what these use: it is never let go.
            std::mem::forget(in_flight);
        }
    }

    /// The device is lost: nothing of it runs any more, and nothing held will.
    fn lose(self: &Arc<Self>, failure: &Arc<Failure>) {
        // What was over before was not lost.
        self.reap();
        self.fail_in_flight(self.lock(), failure);
    }

    /// The device goes away: what the driver has or can be given runs, what waits is abandoned.
    pub(crate) fn close(self: &Arc<Self>) {
        self.lock().closing = true;
        self.schedule();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing of others runs under the lock but the driver.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The queues of a device, for as long as they are there.
#[derive(Debug, Default)]
pub(crate) struct Queues(Mutex<Vec<Weak<QueueCore>>>);

impl Queues {
    pub(crate) fn add(&self, queue: &Arc<QueueCore>) {
        let mut queues = self.list();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(queue));
    }

    pub(crate) fn close(&self) {
        self.all().iter().for_each(QueueCore::close);
    }

    pub(crate) fn lose(&self, failure: &Arc<Failure>) {
        self.all().iter().for_each(|queue| queue.lose(failure));
    }

    fn all(&self) -> Vec<Arc<QueueCore>> {
        self.list().iter().filter_map(Weak::upgrade).collect()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Weak<QueueCore>>> {
        // Nothing of others runs under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A submission that the driver did not get.
struct Refused {
    failure: Arc<Failure>,
    signals: Signals,
    batch: Batch,
}

impl Polled for QueueCore {
    /// Takes note of what the device has finished; whether it was something.
    ///
    /// It does nothing while another thread is busy with the queue: that thread, or the next look, will.
    fn reap(self: &Arc<Self>) -> bool {
        let mut done = SmallVec::<[InFlight; 4]>::new();
        if let Err(failure) = self.take_finished(&mut done) {
            self.fail_in_flight(self.lock(), &failure);
        }
        if done.is_empty() {
            return false;
        }
        // Outside the lock: raising a semaphore wakes others, and letting go of buffers frees them.
        for record in &mut done {
            record.signals.iter().for_each(semaphore::reached);
            record.signals.clear();
            record.batch.keep.clear();
        }
        if self.recycle(done) {
            self.schedule();
        }
        self.fail_doomed();
        true
    }

    /// Whether submissions wait here for others.
    fn is_holding(&self) -> bool {
        self.try_lock().is_some_and(|state| !state.held.is_empty())
    }

    /// Whether the reactor may forget the queue.
    fn retire(&self) -> bool {
        let Some(mut state) = self.try_lock() else { return false };
        state.tracked = !state.in_flight.is_empty();
        !state.tracked
    }

    /// Lets go of a queue. One that nobody uses any more goes on its device's own thread, since the device may go with
    /// it, and this may be the thread that others wait for.
    fn end(self: Arc<Self>) {
        if let Some(last) = Arc::into_inner(self) {
            let chores = last.tools.gpu.chores.clone();
            chores.give(move || drop(last));
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
        let mut queue = Some(self);
        // A thread that is ending has no list any more.
        let started = WOKEN.try_with(|woken| {
            let mut woken = woken.borrow_mut();
            let first = woken.is_none();
            woken.get_or_insert_default().extend(queue.take());
            first
        });
        match (started, queue) {
            (Ok(true), _) => Walk.run(),
            (Err(_), Some(queue)) => queue.look(),
            _ => {}
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
            queue.look();
        }
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        let _gone = WOKEN.try_with(|woken| woken.borrow_mut().take());
    }
}

/// The user's handle of a queue. It keeps the device open.
#[derive(Debug)]
pub(crate) struct VulkanQueue {
    pub(crate) core: Arc<QueueCore>,
    pub(crate) _device: Hold,
}

impl Queue for VulkanQueue {
    fn id(&self) -> QueueId {
        self.core.id
    }

    fn submit(&self, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
        self.core.submit(submission)
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.core.lock().failure.clone().or_else(|| self.core.tools.gpu.failure())
    }
}
