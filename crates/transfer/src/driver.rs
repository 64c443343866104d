//! The thread that follows copies too long, or too awkward, to be handed to the devices at once.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    task::{Wake, Waker},
    time::{Duration, Instant},
};

use warpweft_core_types::{Failure, SemaphorePoint, SubmitError};

use crate::{
    TransferError,
    lanes::{Lane, submit_chunk},
    machine::{Action, CopyMachine, Event, Outcome},
    plan::{Plan, Runner},
};

/// A copy for the driver to follow.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) plan: Plan,
    pub(crate) lanes: Vec<Lane>,
    /// What the first chunk waits for.
    pub(crate) after: Vec<SemaphorePoint>,
    pub(crate) permit: Option<Permit>,
    pub(crate) ahead: u64,
    pub(crate) time_limit: Option<Duration>,
    /// When the limit is over.
    pub(crate) due: Option<Instant>,
}

/// Stands between a copy and what it waits for, so that the copy can be kept from starting.
///
/// Without it the devices order the two by themselves, and a copy that was handed over starts when the other
/// work ends, however long after the copy's time is over.
#[derive(Debug)]
pub(crate) struct Permit {
    /// What the copy's first chunk waits for.
    pub(crate) point: SemaphorePoint,
    /// What the permit is given for.
    pub(crate) after: Vec<SemaphorePoint>,
}

impl Permit {
    /// Gives it if it is due, or passes on the failure of what it is for. What is settled stays so.
    fn update(&self) {
        let mut due = true;
        for point in &self.after {
            match point.poll() {
                Ok(reached) => due &= reached,
                Err(failure) => return self.point.semaphore.fail(failure),
            }
        }
        if due {
            let _given_before = self.point.semaphore.signal(self.point.value);
        }
    }
}

/// Names a job to its driver.
pub(crate) type JobId = u64;

enum Message {
    Start(JobId, Box<Job>),
    /// Something a job waits for has happened.
    Look(JobId),
    Cancel(JobId),
    /// The `Transfer` was dropped: end once the jobs have.
    Close,
}

/// A handle of the driver thread.
#[derive(Debug)]
pub(crate) struct Driver(Sender<Message>);

impl Driver {
    pub(crate) fn start() -> io::Result<Self> {
        let (sender, receiver) = channel();
        let wakers = sender.clone();
        std::thread::Builder::new()
            .name("warpweft-transfer".to_owned())
            .spawn(move || Loop { active: HashMap::new(), wakers, closed: false }.run(&receiver))?;
        Ok(Self(sender))
    }

    pub(crate) fn follow(&self, id: JobId, job: Job) {
        self.send(Message::Start(id, Box::new(job)));
    }

    pub(crate) fn canceller(&self, id: JobId) -> Canceller {
        Canceller { driver: self.0.clone(), id }
    }

    fn send(&self, message: Message) {
        // The thread ends only after `Close`, which `drop` sends last.
        let _ended = self.0.send(message);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.send(Message::Close);
    }
}

/// Cancels one job.
#[derive(Debug, Clone)]
pub(crate) struct Canceller {
    driver: Sender<Message>,
    id: JobId,
}

impl Canceller {
    pub(crate) fn cancel(&self) {
        // An ended driver has no copies left to cancel.
        let _ended = self.driver.send(Message::Cancel(self.id));
    }
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Start(..) => "Start",
            Self::Look(_) => "Look",
            Self::Cancel(_) => "Cancel",
            Self::Close => "Close",
        })
    }
}

struct Loop {
    active: HashMap<JobId, Active>,
    wakers: Sender<Message>,
    closed: bool,
}

impl Loop {
    fn run(mut self, receiver: &Receiver<Message>) {
        while !(self.closed && self.active.is_empty()) {
            self.end_overdue();
            match self.next(receiver) {
                Ok(Message::Start(id, job)) => self.start(id, *job),
                Ok(Message::Look(id)) => self.step(id, None),
                Ok(Message::Cancel(id)) => self.step(id, Some(Event::Cancel)),
                Ok(Message::Close) => self.close(),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Copies that are under way go on; those that still wait for other work, which may never come, end.
    fn close(&mut self) {
        self.closed = true;
        self.active.retain(|_, active| {
            let abandoned = active.waits_for_others();
            if abandoned {
                active.finish(&Outcome::Failed(Arc::new(Failure::Cancelled)));
            }
            !abandoned
        });
    }

    fn next(&self, receiver: &Receiver<Message>) -> Result<Message, RecvTimeoutError> {
        match self.active.values().filter_map(|active| active.due).min() {
            Some(due) => receiver.recv_timeout(due.saturating_duration_since(Instant::now())),
            None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
        }
    }

    fn start(&mut self, id: JobId, job: Job) {
        let waker = Arc::new(Look { id, driver: self.wakers.clone() });
        self.active.insert(id, Active::new(job, waker.into()));
        self.step(id, None);
    }

    fn step(&mut self, id: JobId, event: Option<Event>) {
        let Some(active) = self.active.get_mut(&id) else { return };
        match active.step(event) {
            Progress::Waits => {}
            Progress::HasMore => {
                // The others have their turn first.
                let _ended = self.wakers.send(Message::Look(id));
            }
            Progress::Ended => {
                self.active.remove(&id);
            }
        }
    }

    fn end_overdue(&mut self) {
        let now = Instant::now();
        let overdue = |active: &Active| active.due.is_some_and(|due| due <= now);
        let ids: Vec<JobId> =
            self.active.iter().filter(|(_, active)| overdue(active)).map(|(&id, _)| id).collect();
        for id in ids {
            let Some(active) = self.active.get_mut(&id) else { continue };
            // Once: from now on it waits for what is under way.
            active.due = None;
            let limit = active.job.time_limit.unwrap_or_default();
            self.step(id, Some(Event::TimeUp { limit }));
        }
    }
}

/// How far a step brought a copy.
enum Progress {
    /// It was registered with what it waits for.
    Waits,
    HasMore,
    Ended,
}

/// Tells the driver to look at a job again.
struct Look {
    id: JobId,
    driver: Sender<Message>,
}

impl Wake for Look {
    fn wake(self: Arc<Self>) {
        // An ended driver has nothing to look at.
        let _ended = self.driver.send(Message::Look(self.id));
    }
}

/// A copy under way.
struct Active {
    job: Job,
    machine: CopyMachine,
    /// Hops whose progress lets something else go on.
    watched: Vec<usize>,
    waker: Waker,
    due: Option<Instant>,
}

impl Active {
    fn new(job: Job, waker: Waker) -> Self {
        let hops = job.plan.hops.len();
        let processors: Vec<usize> =
            (0..hops).filter(|&hop| job.plan.hops[hop].runner == Runner::Processor).collect();
        let mut watched: Vec<usize> = processors.iter().flat_map(|&hop| [hop - 1, hop + 1]).collect();
        watched.push(hops - 1);
        watched.sort_unstable();
        watched.dedup();
        Self {
            machine: CopyMachine::new(job.plan.chunk_count(), job.ahead, job.plan.slots, hops, processors),
            due: job.due,
            watched,
            waker,
            job,
        }
    }

    /// Whether the copy has not begun because of work that is not its own.
    fn waits_for_others(&self) -> bool {
        let after = self.job.permit.as_ref().map_or(&self.job.after, |permit| &permit.after);
        after.iter().any(|point| matches!(point.poll(), Ok(false)))
    }

    /// Goes on without waiting, by at most one chunk that this thread copies itself.
    fn step(&mut self, event: Option<Event>) -> Progress {
        if let Some(event) = event {
            self.machine.handle(event);
        }
        self.observe();
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::Submit { chunk } => self.submit(chunk),
                Action::Bridge { hop, chunk } => {
                    self.bridge(hop, chunk);
                    return Progress::HasMore;
                }
                Action::Abort(failure) => self.abort(&failure),
                Action::Finish(outcome) => {
                    self.finish(&outcome);
                    return Progress::Ended;
                }
            }
        }
        self.watch();
        Progress::Waits
    }

    fn observe(&mut self) {
        if let Some(permit) = &self.job.permit {
            permit.update();
        }
        let last = self.job.lanes.len() - 1;
        for &hop in &self.watched {
            let lane = &self.job.lanes[hop];
            let failure = lane.semaphore.failure();
            self.machine.handle(Event::Reached { hop, chunks: lane.count() });
            if let Some(failure) = failure {
                self.machine.handle(Event::Failed(failure));
                if hop == last {
                    self.machine.handle(Event::Settled);
                }
            }
        }
    }

    /// Has the driver woken when a watched hop has done more than the machine knows of; at once if it has.
    fn watch(&self) {
        for &hop in &self.watched {
            let next = self.job.lanes[hop].done(self.machine.done(hop) + 1);
            next.semaphore.wake_when(next.value, self.waker.clone());
        }
        for point in self.job.permit.iter().flat_map(|permit| &permit.after) {
            if matches!(point.poll(), Ok(false)) {
                point.semaphore.wake_when(point.value, self.waker.clone());
            }
        }
    }

    fn submit(&mut self, chunk: u64) {
        if let Err(error) = submit_chunk(&self.job.plan, &self.job.lanes, chunk, &self.job.after) {
            self.machine.handle(Event::Failed(failure_of(error)));
        }
    }

    fn bridge(&mut self, hop: usize, chunk: u64) {
        let copied = self.job.plan.views(hop, chunk).and_then(|(src, dst)| dst.copy_by_host(&src));
        match copied {
            Ok(()) => {
                let done = self.job.lanes[hop].done(chunk + 1);
                // Only this thread raises it, and only upwards.
                let _risen = done.semaphore.signal(done.value);
            }
            Err(error) => self.machine.handle(Event::Failed(Arc::new(Failure::Range(error)))),
        }
    }

    /// What waits for the permit or for a processor fails instead of starting, and with it what is behind.
    fn abort(&self, failure: &Arc<Failure>) {
        if let Some(permit) = &self.job.permit {
            permit.point.semaphore.fail(Arc::clone(failure));
        }
        for (lane, hop) in self.job.lanes.iter().zip(&self.job.plan.hops) {
            if hop.runner == Runner::Processor {
                lane.semaphore.fail(Arc::clone(failure));
            }
        }
    }

    /// Chunks that were not handed to a device never will be, so everyone who waits for them must be told.
    fn finish(&self, outcome: &Outcome) {
        if let (Outcome::Failed(failure), Some(last)) = (outcome, self.job.lanes.last()) {
            last.semaphore.fail(Arc::clone(failure));
        }
    }
}

fn failure_of(error: TransferError) -> Arc<Failure> {
    match error {
        TransferError::Submit(SubmitError::Failed(failure)) => failure,
        TransferError::Submit(error) => Arc::new(Failure::Submit(error)),
        TransferError::Range(error) => Arc::new(Failure::Range(error)),
        other => Arc::new(Failure::Submit(SubmitError::Invalid { reason: other.to_string() })),
    }
}
