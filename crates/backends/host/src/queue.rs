//! Queues of host devices: submissions in order, each run by whichever thread gets to it.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
    task::{Wake, Waker},
    time::{Duration, Instant},
};

use warpweft_core_types::{
    Access, BufferView, DeviceId, Failure, Launch, Op, OwnedLaunch, OwnedOp, OwnedSubmission, Queue,
    QueueDesc, SemaphorePoint, SignalError, Submission, SubmissionId, SubmitError,
};

use crate::{
    device::HostDevice,
    engine::{Engine, Task},
    link::LinkTable,
    memory::{self, Span},
    module::{HostKernel, NeverYield, Prepared, Site},
    split::Split,
};

/// A waiter runs kernels on its own thread only if none of their runs so far took longer than this, so that
/// it can overrun its deadline by about as much.
const HELP_LIMIT: Duration = Duration::from_micros(50);

/// What one thread copies before it lets the others in on it.
const COPY_PART: usize = 1 << 20;

/// A copy is shared between workers from this size on.
const SHARED_COPY: usize = 4 << 20;

/// A queue's state and work, kept alive by whoever may still have to run it.
#[derive(Debug)]
pub(crate) struct QueueCore {
    device: DeviceId,
    number: u32,
    capacity: usize,
    engine: Arc<Engine>,
    links: Arc<LinkTable>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    submitted: u64,
    phase: Phase,
    failure: Option<Arc<Failure>>,
    /// The device went away: what is not ready now will not run.
    closing: bool,
}

/// Who will look at the first job next.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Nobody, or a waker that a semaphore holds.
    #[default]
    Idle,
    /// A task in the engine's list.
    Scheduled,
    /// A thread that runs it.
    Running,
}

#[derive(Debug)]
struct Job {
    id: SubmissionId,
    work: OwnedSubmission,
    /// The first operation not done yet.
    next: usize,
}

impl Job {
    /// A point that is not reached yet, or the failure that makes the job pointless.
    fn obstacle(&self) -> Result<Option<&SemaphorePoint>, Arc<Failure>> {
        for point in &self.work.waits {
            if !point.poll()? {
                return Ok(Some(point));
            }
        }
        Ok(None)
    }

    fn fail(&self, failure: &Arc<Failure>) {
        for point in &self.work.signals {
            point.semaphore.fail(Arc::clone(failure));
        }
    }
}

/// What became of a job.
enum Outcome {
    Done,
    /// Go on at this time: its link is slow.
    Pause(Instant),
    Failed(Arc<Failure>),
}

impl QueueCore {
    pub(crate) fn new(
        device: DeviceId,
        number: u32,
        desc: &QueueDesc,
        engine: Arc<Engine>,
        links: Arc<LinkTable>,
    ) -> Arc<Self> {
        Arc::new(Self { device, number, capacity: desc.capacity, engine, links, state: Mutex::default() })
    }

    fn submit(self: &Arc<Self>, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
        for op in submission.ops {
            check_op(self.device, &self.links, op)?;
        }
        let work = OwnedSubmission::from(submission);
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(SubmitError::Failed(Arc::clone(failure)));
        }
        if state.jobs.len() >= self.capacity {
            return Err(SubmitError::QueueFull {
                device: self.device,
                queue: self.number,
                capacity: self.capacity,
            });
        }
        promise_all(&work.signals)?;
        let id = SubmissionId { queue: self.number, index: state.submitted };
        state.submitted += 1;
        state.jobs.push_back(Job { id, work, next: 0 });
        let first = state.jobs.len() == 1 && state.phase == Phase::Idle;
        if first {
            self.schedule(state);
        }
        Ok(id)
    }

    /// Puts the queue in the engine's list if its first job is ready, else leaves a waker with what it
    /// waits for. Also fails jobs whose waits have failed.
    fn schedule(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if state.phase != Phase::Idle {
            return;
        }
        let obstacle = match state.jobs.front().map(Job::obstacle) {
            None => return,
            Some(Err(failure)) => return self.fail(state, &failure),
            Some(Ok(None)) => None,
            Some(Ok(Some(point))) => Some(point.clone()),
        };
        let Some(point) = obstacle else {
            state.phase = Phase::Scheduled;
            drop(state);
            self.engine.push(Task::Queue(Arc::clone(self)));
            return;
        };
        if state.closing {
            let failure = Arc::new(Failure::Abandoned { device: self.device });
            return self.fail(state, &failure);
        }
        drop(state);
        // Outside the lock: the semaphore may call back at once.
        point.semaphore.wake_when(point.value, Waker::from(Arc::clone(self)));
    }

    /// Fails everything the queue holds and will be given.
    fn fail(&self, mut state: MutexGuard<'_, State>, failure: &Arc<Failure>) {
        state.failure.get_or_insert_with(|| Arc::clone(failure));
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        // Outside the lock: failing a semaphore wakes others, and dropping jobs frees buffers.
        jobs.iter().for_each(|job| job.fail(failure));
    }

    /// Runs the first job, then gives the thread back to the engine's list.
    pub(crate) fn run(self: &Arc<Self>) {
        let mut state = self.lock();
        state.phase = Phase::Running;
        let Some(mut job) = state.jobs.pop_front() else {
            state.phase = Phase::Idle;
            return;
        };
        drop(state);
        match self.execute(&mut job) {
            Outcome::Done => {
                // Every wait behind these signals may rely on all operations of the job.
                for point in &job.work.signals {
                    raise(point);
                }
                drop(job);
                self.go_on();
            }
            Outcome::Pause(due) => {
                let mut state = self.lock();
                state.jobs.push_front(job);
                state.phase = Phase::Scheduled;
                drop(state);
                self.engine.push_at(due, Task::Queue(Arc::clone(self)));
            }
            Outcome::Failed(failure) => {
                job.fail(&failure);
                drop(job);
                let mut state = self.lock();
                state.phase = Phase::Idle;
                self.fail(state, &failure);
            }
        }
    }

    fn go_on(self: &Arc<Self>) {
        let mut state = self.lock();
        state.phase = Phase::Idle;
        self.schedule(state);
    }

    fn execute(&self, job: &mut Job) -> Outcome {
        while let Some(op) = job.work.ops.get(job.next) {
            job.next += 1;
            let started = Instant::now();
            match self.execute_op(job.id, op) {
                Ok(Duration::ZERO) => {}
                Ok(least) => return Outcome::Pause(started + least),
                Err(failure) => return Outcome::Failed(failure),
            }
        }
        Outcome::Done
    }

    /// Does one operation and says how long it must take at least.
    fn execute_op(&self, submission: SubmissionId, op: &OwnedOp) -> Result<Duration, Arc<Failure>> {
        match op {
            OwnedOp::Copy { src, dst } => {
                self.copy(submission, src, dst)?;
                Ok(self.links.cross(self.device, src, dst))
            }
            OwnedOp::Fill { dst, pattern } => {
                self.fill(submission, dst, *pattern)?;
                Ok(self.links.cross_fill(self.device, dst))
            }
            OwnedOp::Launch(launch) => self.launch(submission, launch).map(|()| Duration::ZERO),
            other => Err(self.cannot(submission, other.name())),
        }
    }

    #[expect(unsafe_code, reason = "device memory is only reachable through raw pointers")]
    fn copy(&self, submission: SubmissionId, src: &BufferView, dst: &BufferView) -> Result<(), Arc<Failure>> {
        let (Some(from), Some(to)) = (Span::of(src), Span::of(dst)) else {
            return Err(self.cannot(submission, "copy"));
        };
        if self.engine.workers() == 1 || from.len() < SHARED_COPY {
            // SAFETY: the spans come from views that the job keeps alive, and `CopyRegion` checked that
            // they have one length and share no bytes.
            unsafe { memory::copy(from, to) };
            return Ok(());
        }
        let keep_alive = (src.clone(), dst.clone());
        Split::run(&self.engine, from.len().div_ceil(COPY_PART) as u64, move |part| {
            let _ = &keep_alive;
            let offset = usize::try_from(part).unwrap_or(usize::MAX).saturating_mul(COPY_PART);
            // SAFETY: as above, for equal parts of both spans; `keep_alive` holds the buffers.
            unsafe { memory::copy(from.part(offset, COPY_PART), to.part(offset, COPY_PART)) };
            Ok(())
        })
    }

    #[expect(unsafe_code, reason = "device memory is only reachable through raw pointers")]
    fn fill(&self, submission: SubmissionId, dst: &BufferView, pattern: u32) -> Result<(), Arc<Failure>> {
        let span = Span::of(dst).ok_or_else(|| self.cannot(submission, "fill"))?;
        // SAFETY: the span comes from a view that the job keeps alive.
        unsafe { memory::fill(span, pattern) };
        Ok(())
    }

    fn launch(&self, submission: SubmissionId, launch: &OwnedLaunch) -> Result<(), Arc<Failure>> {
        let site = Site { device: self.device, submission };
        let prepared = Prepared::new(launch).ok_or_else(|| self.cannot(submission, "launch"))?;
        let count = prepared.workgroup_count();
        if self.engine.workers() == 1 || count == 1 {
            return prepared.run_all(site);
        }
        let owned = launch.clone();
        Split::run(&self.engine, count, move |position| {
            // Found before, so it is found again.
            Prepared::new(&owned).map_or(Ok(()), |part| {
                let started = Instant::now();
                part.run(site, position, &NeverYield)?;
                part.learn(1, started.elapsed());
                Ok(())
            })
        })
    }

    fn cannot(&self, submission: SubmissionId, what: &'static str) -> Arc<Failure> {
        let reason = "an operand does not belong to a host device".to_owned();
        Arc::new(Failure::OperationFailed { device: self.device, submission, what, reason })
    }

    /// Whether the first job should end well before `remaining` is over: kernels within [`HELP_LIMIT`],
    /// copies and fills, whose cost is known, within a quarter of it.
    pub(crate) fn is_quick(&self, remaining: Duration) -> bool {
        let state = self.lock();
        let Some(job) = state.jobs.front() else { return false };
        let (mut kernels, mut copies) = (Duration::ZERO, Duration::ZERO);
        for op in &job.work.ops[job.next..] {
            match op {
                OwnedOp::Copy { dst, .. } | OwnedOp::Fill { dst, .. } => copies += copy_time(dst.size()),
                OwnedOp::Launch(launch) => match Prepared::new(launch).and_then(|launch| launch.expected()) {
                    Some(expected) => kernels += expected,
                    None => return false,
                },
                _ => return false,
            }
        }
        kernels <= HELP_LIMIT && kernels + copies <= remaining / 4
    }

    /// The device goes away: what is ready still runs, what waits is abandoned.
    pub(crate) fn close(self: &Arc<Self>) {
        let mut state = self.lock();
        state.closing = true;
        self.schedule(state);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Kernels run outside the lock; only this module's own code runs under it.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Wake for QueueCore {
    fn wake(self: Arc<Self>) {
        let state = self.lock();
        self.schedule(state);
    }
}

/// How long a slow core copies: a few bytes a nanosecond.
const fn copy_time(size: u64) -> Duration {
    Duration::from_nanos(size / 4)
}

fn promise_all(signals: &[SemaphorePoint]) -> Result<(), SubmitError> {
    for point in signals {
        point.semaphore.promise(point.value).map_err(|error| match error {
            SignalError::Failed(failure) => SubmitError::Failed(failure),
            SignalError::NotIncreasing { value, current } => SubmitError::NotIncreasing { value, current },
            _ => SubmitError::NotIncreasing { value: point.value, current: point.semaphore.value() },
        })?;
    }
    Ok(())
}

/// Raises a promised point. The host may have gone past it or failed it meanwhile; either way it is settled.
fn raise(point: &SemaphorePoint) {
    let _settled = point.semaphore.signal(point.value);
}

/// Checks that a device can carry out an operation: its operands are the backend's, and links lead there.
fn check_op(device: DeviceId, links: &LinkTable, op: &Op<'_>) -> Result<(), SubmitError> {
    match op {
        Op::Copy(copy) => {
            check_view(device, links, copy.src(), Access::Read)?;
            check_view(device, links, copy.dst(), Access::Write)
        }
        Op::Fill(fill) => check_view(device, links, fill.dst(), Access::Write),
        Op::Launch(launch) if launch.kernel().contract().resident => {
            Err(SubmitError::Sliced { kernel: launch.kernel().contract().name.clone() })
        }
        Op::Launch(launch) => check_launch(device, links, launch),
        _ => Ok(()),
    }
}

/// Checks that a device can carry out a launch.
pub(crate) fn check_launch(
    device: DeviceId,
    links: &LinkTable,
    launch: &Launch<'_>,
) -> Result<(), SubmitError> {
    let kernel = launch.kernel();
    if kernel.device() != device || HostKernel::of(kernel).is_none() {
        return Err(SubmitError::Foreign { what: "kernel", owner: kernel.device(), device });
    }
    launch.buffers().try_for_each(|(view, access)| check_view(device, links, view, access))
}

fn check_view(
    device: DeviceId,
    links: &LinkTable,
    view: &BufferView,
    access: Access,
) -> Result<(), SubmitError> {
    let owner = view.device();
    if !links.knows(owner) || Span::of(view).is_none() {
        return Err(SubmitError::Foreign { what: "buffer", owner, device });
    }
    links.check(device, view, access)
}

/// The user's handle of a queue. It keeps the device open.
#[derive(Debug)]
pub(crate) struct HostQueue {
    pub(crate) core: Arc<QueueCore>,
    pub(crate) _device: Arc<HostDevice>,
}

impl Queue for HostQueue {
    fn device(&self) -> DeviceId {
        self.core.device
    }

    fn submit(&self, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
        self.core.submit(submission)
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.core.lock().failure.clone()
    }
}
