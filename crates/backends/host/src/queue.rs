//! Queues of host devices: submissions in order, each run by whichever thread gets to it.

use std::{
    any::Any,
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard},
    task::{Wake, Waker},
    time::{Duration, Instant},
};

use smallvec::SmallVec;
use warpweft_core_types::{
    Access, BufferView, DeviceId, Failure, Launch, Op, OwnedOp, PreparedGraph, Queue, QueueDesc, QueueId,
    SemaphorePoint, Submission, SubmissionId, SubmitError, WorkId, promise_all,
};

use crate::{
    clock,
    device::HostDevice,
    engine::{Engine, Task, guard},
    graph::HostGraph,
    link::LinkTable,
    memory::{self, Span},
    module::{HostLaunch, NeverYield},
    split::Split,
};

/// What one thread copies before it lets the others in on it.
const COPY_PART: usize = 1 << 20;

/// A copy is shared between workers from this size on.
const SHARED_COPY: usize = 4 << 20;

/// What each operation and each submission takes at least.
const PER_OP: Duration = Duration::from_micros(1);

/// A waiter does not look at longer submissions.
const QUICK_OPS: usize = 64;

/// The longest that a workgroup of a brief kernel takes.
const BRIEF: Duration = Duration::from_micros(20);

/// A queue's state and work, kept alive by whoever may still have to run it.
pub(crate) struct QueueCore {
    id: QueueId,
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
    waits: SmallVec<[SemaphorePoint; 2]>,
    ops: SmallVec<[Part; 1]>,
    signals: SmallVec<[SemaphorePoint; 1]>,
    next: Next,
}

/// The first operation of a job that is not done yet.
#[derive(Debug, Clone, Copy, Default)]
struct Next {
    part: usize,
    /// Within the part.
    node: usize,
    /// How many were done before.
    done: u32,
}

/// A part of a job: an operation, or all those of a graph.
#[derive(Debug)]
enum Part {
    Op(HostOp),
    Nodes(Arc<[HostOp]>),
}

impl Part {
    fn ops(&self) -> &[HostOp] {
        match self {
            Self::Op(op) => std::slice::from_ref(op),
            Self::Nodes(ops) => ops,
        }
    }
}

/// An operation whose operands were found.
#[derive(Debug)]
pub(crate) enum HostOp {
    Copy { src: Operand, dst: Operand },
    Fill { dst: Operand, pattern: u32 },
    Launch(Arc<HostLaunch>),
    Timestamp { dst: Operand },
}

/// A view, which keeps its memory alive, and where that memory is.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    view: BufferView,
    span: Span,
}

impl State {
    /// Submissions taken and not ended, the running one included.
    fn pending(&self) -> usize {
        self.jobs.len() + usize::from(self.phase == Phase::Running)
    }
}

impl Job {
    /// What is not done yet.
    fn remaining(&self) -> impl Iterator<Item = &HostOp> {
        let parts = self.ops.get(self.next.part..).unwrap_or_default();
        parts.iter().flat_map(Part::ops).skip(self.next.node)
    }

    /// The next operation, with its position, which counts as done from here on.
    fn advance(next: &mut Next, ops: &[Part]) -> Option<(u32, (usize, usize))> {
        while let Some(part) = ops.get(next.part) {
            if next.node < part.ops().len() {
                let at = (next.part, next.node);
                next.node += 1;
                next.done += 1;
                return Some((next.done - 1, at));
            }
            next.part += 1;
            next.node = 0;
        }
        None
    }

    /// The points that are not reached yet, or the failure that makes the job pointless.
    fn obstacles(&self) -> Result<SmallVec<[SemaphorePoint; 2]>, Arc<Failure>> {
        let mut unmet = SmallVec::new();
        for point in &self.waits {
            if !point.poll()? {
                unmet.push(point.clone());
            }
        }
        Ok(unmet)
    }

    fn fail(&self, failure: &Arc<Failure>) {
        for point in &self.signals {
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
        id: QueueId,
        desc: &QueueDesc,
        engine: Arc<Engine>,
        links: Arc<LinkTable>,
    ) -> Arc<Self> {
        Arc::new(Self { id, capacity: desc.capacity, engine, links, state: Mutex::default() })
    }

    fn submit(self: &Arc<Self>, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
        let mut ops = SmallVec::new();
        for op in submission.ops {
            ops.push(match op {
                Op::Replay(graph) => Part::Nodes(find_nodes(self.id.device, graph)?),
                op => Part::Op(find_op(self.id.device, &self.links, op)?),
            });
        }
        for point in submission.signals {
            let owner = point.semaphore.device();
            if !self.links.knows(owner) {
                return Err(SubmitError::Foreign { what: "semaphore", owner, device: self.id.device });
            }
        }
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(SubmitError::Failed(Arc::clone(failure)));
        }
        if state.pending() >= self.capacity {
            return Err(SubmitError::QueueFull { queue: self.id, capacity: self.capacity });
        }
        promise_all(submission.signals)?;
        let id = SubmissionId { queue: self.id, index: state.submitted };
        state.submitted += 1;
        let (waits, signals) = (submission.waits.into(), submission.signals.into());
        state.jobs.push_back(Job { id, waits, ops, signals, next: Next::default() });
        if state.jobs.len() == 1 {
            self.schedule(state);
        }
        Ok(id)
    }

    /// Puts the queue in the engine's list if its first job is ready or pointless, else leaves a waker with
    /// all that it waits for. Under the lock nothing is woken, since asking a semaphore wakes nobody.
    fn schedule(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if state.phase != Phase::Idle {
            return;
        }
        let Some(job) = state.jobs.front() else { return };
        let obstacles = job.obstacles().unwrap_or_default();
        if obstacles.is_empty() || state.closing {
            state.phase = Phase::Scheduled;
            drop(state);
            return self.engine.push(Task::Queue(Arc::clone(self)));
        }
        drop(state);
        // Outside the lock: a semaphore may call back at once.
        for point in obstacles {
            point.semaphore.wake_when(point.value, Waker::from(Arc::clone(self)));
        }
    }

    /// Fails everything the queue holds and will be given.
    fn fail(&self, mut state: MutexGuard<'_, State>, failure: &Arc<Failure>) {
        state.failure.get_or_insert_with(|| Arc::clone(failure));
        let jobs = std::mem::take(&mut state.jobs);
        state.phase = Phase::Idle;
        drop(state);
        // Outside the lock: failing a semaphore wakes others, and dropping jobs frees what programs own.
        for job in jobs {
            job.fail(failure);
            guard(|| drop(job));
        }
    }

    /// Takes the first job if it is ready, runs it, then gives the thread back to the engine's list.
    pub(crate) fn run(self: &Arc<Self>) {
        let mut state = self.lock();
        state.phase = Phase::Idle;
        let ready = state.jobs.front().map(Job::obstacles);
        let mut job = match ready {
            None => return,
            Some(Err(failure)) => return self.fail(state, &failure),
            Some(Ok(obstacles)) if !obstacles.is_empty() => {
                if state.closing {
                    let failure = Arc::new(Failure::Abandoned { device: self.id.device });
                    return self.fail(state, &failure);
                }
                return self.schedule(state);
            }
            Some(Ok(_)) => match state.jobs.pop_front() {
                None => return,
                Some(job) => job,
            },
        };
        state.phase = Phase::Running;
        drop(state);
        match self.execute(&mut job) {
            Outcome::Done => {
                // Every wait behind these signals may rely on all operations of the job.
                for point in &job.signals {
                    raise(point);
                }
                guard(|| drop(job));
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
                // The queue fails first: whoever hears of the failure must find that it takes no more.
                let mut state = self.lock();
                state.jobs.push_front(job);
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
        while let Some((position, (part, node))) = Job::advance(&mut job.next, &job.ops) {
            let work = WorkId::Operation { submission: job.id, position };
            match self.execute_op(work, &job.ops[part].ops()[node]) {
                Ok(None) => {}
                Ok(Some(due)) => return Outcome::Pause(due),
                Err(failure) => return Outcome::Failed(failure),
            }
        }
        Outcome::Done
    }

    /// Does one operation and says when its links have carried it, if they take longer.
    fn execute_op(&self, work: WorkId, op: &HostOp) -> Result<Option<Instant>, Arc<Failure>> {
        match op {
            HostOp::Copy { src, dst } => {
                self.copy(src, dst)?;
                Ok(self.links.cross(self.id.device, &src.view, &dst.view))
            }
            HostOp::Fill { dst, pattern } => {
                fill(dst, *pattern);
                Ok(self.links.cross_fill(self.id.device, &dst.view))
            }
            HostOp::Launch(launch) => self.launch(work, launch).map(|()| None),
            HostOp::Timestamp { dst } => {
                stamp(dst);
                Ok(self.links.cross_fill(self.id.device, &dst.view))
            }
        }
    }

    #[expect(unsafe_code, reason = "device memory is only reachable through raw pointers")]
    fn copy(&self, src: &Operand, dst: &Operand) -> Result<(), Arc<Failure>> {
        if self.engine.workers() == 1 || src.span.len() < SHARED_COPY {
            // SAFETY: the spans are those of views that the job keeps alive, and `CopyRegion` checked that
            // they have one length and share no bytes.
            unsafe { memory::copy(src.span, dst.span) };
            return Ok(());
        }
        let (src, dst) = (src.clone(), dst.clone());
        Split::run(&self.engine, src.span.len().div_ceil(COPY_PART) as u64, move |part| {
            let offset = usize::try_from(part).unwrap_or(usize::MAX).saturating_mul(COPY_PART);
            // SAFETY: as above, for equal parts of both spans; the operands came along.
            unsafe { memory::copy(src.span.part(offset, COPY_PART), dst.span.part(offset, COPY_PART)) };
            Ok(())
        })
    }

    fn launch(&self, work: WorkId, launch: &Arc<HostLaunch>) -> Result<(), Arc<Failure>> {
        let count = launch.workgroup_count();
        if self.engine.workers() == 1 || count == 1 {
            return launch.run_all(work);
        }
        let launch = Arc::clone(launch);
        Split::run(&self.engine, count, move |position| launch.run(work, position, &NeverYield).map(|_| ()))
    }

    /// Whether the first job should end well before `remaining` is over: copies and fills, whose cost is
    /// known, and kernels that say they are brief.
    pub(crate) fn is_quick(&self, remaining: Duration) -> bool {
        let state = self.lock();
        let Some(job) = state.jobs.front() else { return false };
        if job.remaining().nth(QUICK_OPS).is_some() {
            return false;
        }
        let cost = job.remaining().map(quick_time).sum::<Option<Duration>>();
        cost.is_some_and(|cost| cost + PER_OP <= remaining / 4)
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

impl fmt::Debug for QueueCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueueCore({})", self.id)
    }
}

impl Wake for QueueCore {
    /// Only puts the queue in the engine's list: whoever wakes may be deep in a chain of queues that wake
    /// each other, and must not run the rest of it on its own stack.
    fn wake(self: Arc<Self>) {
        let mut state = self.lock();
        if state.phase == Phase::Idle && !state.jobs.is_empty() {
            state.phase = Phase::Scheduled;
            drop(state);
            self.engine.push(Task::Queue(Arc::clone(&self)));
        }
    }
}

/// How long an operation takes at most on a slow core that does nothing else; `None` if nobody knows.
fn quick_time(op: &HostOp) -> Option<Duration> {
    // A few bytes a nanosecond.
    let copy_time = |operand: &Operand| Some(PER_OP + Duration::from_nanos(operand.view.size() / 4));
    match op {
        HostOp::Copy { dst, .. } | HostOp::Fill { dst, .. } | HostOp::Timestamp { dst } => copy_time(dst),
        HostOp::Launch(launch) if launch.contract().brief => {
            let workgroups = u32::try_from(launch.workgroup_count()).ok()?;
            BRIEF.checked_mul(workgroups)
        }
        HostOp::Launch(_) => None,
    }
}

#[expect(unsafe_code, reason = "device memory is only reachable through raw pointers")]
fn fill(dst: &Operand, pattern: u32) {
    // SAFETY: the span is that of a view that the job keeps alive.
    unsafe { memory::fill(dst.span, pattern) };
}

#[expect(unsafe_code, reason = "device memory is only reachable through raw pointers")]
fn stamp(dst: &Operand) {
    let time = clock::now_ns().to_le_bytes();
    // SAFETY: the span is that of a view that the job keeps alive, of eight bytes (`TimestampRegion`).
    unsafe { memory::write(dst.span, &time) };
}

/// Raises a promised point. The host may have gone past it or failed it meanwhile; either way it is settled.
fn raise(point: &SemaphorePoint) {
    let _settled = point.semaphore.signal(point.value);
}

/// Finds an operation's operands, and checks that the device can carry it out.
fn find_op(device: DeviceId, links: &LinkTable, op: &Op<'_>) -> Result<HostOp, SubmitError> {
    let operand = |view, access| find_view(device, links, view, access);
    Ok(match op {
        Op::Copy(copy) => {
            HostOp::Copy { src: operand(copy.src(), Access::Read)?, dst: operand(copy.dst(), Access::Write)? }
        }
        Op::Fill(fill) => HostOp::Fill { dst: operand(fill.dst(), Access::Write)?, pattern: fill.pattern() },
        Op::Launch(launch) => {
            let contract = launch.kernel().contract();
            if contract.resident {
                return Err(SubmitError::Sliced { kernel: contract.name.clone() });
            }
            HostOp::Launch(Arc::new(find_launch(device, links, launch)?))
        }
        Op::Timestamp(stamp) => HostOp::Timestamp { dst: operand(stamp.dst(), Access::Write)? },
        _ => return Err(SubmitError::Unsupported { device, what: op.name() }),
    })
}

/// The operations of a graph's nodes.
fn find_nodes(device: DeviceId, graph: &PreparedGraph) -> Result<Arc<[HostOp]>, SubmitError> {
    let owner = graph.graph().device();
    let prepared: &dyn Any = graph.graph().as_ref();
    match prepared.downcast_ref::<HostGraph>() {
        Some(prepared) if owner == device => prepared.found(graph.ops()),
        _ => Err(SubmitError::Foreign { what: "graph", owner, device }),
    }
}

/// The same for an operation that is kept, in a graph.
pub(crate) fn find_owned(device: DeviceId, links: &LinkTable, op: &OwnedOp) -> Result<HostOp, SubmitError> {
    op.with(|op| find_op(device, links, op))
}

/// Finds a launch's operands and checks that the device can carry it out.
pub(crate) fn find_launch(
    device: DeviceId,
    links: &LinkTable,
    launch: &Launch<'_>,
) -> Result<HostLaunch, SubmitError> {
    let owner = launch.kernel().device();
    for (view, access) in launch.buffers() {
        find_view(device, links, view, access)?;
    }
    HostLaunch::new(launch).filter(|_| owner == device).ok_or(SubmitError::Foreign {
        what: "kernel",
        owner,
        device,
    })
}

fn find_view(
    device: DeviceId,
    links: &LinkTable,
    view: &BufferView,
    access: Access,
) -> Result<Operand, SubmitError> {
    let owner = view.device();
    let foreign = SubmitError::Foreign { what: "buffer", owner, device };
    let span = Span::of(view).filter(|_| links.knows(owner)).ok_or(foreign)?;
    links.check(device, view, access)?;
    Ok(Operand { view: view.clone(), span })
}

/// The user's handle of a queue. It keeps the device open.
pub(crate) struct HostQueue {
    pub(crate) core: Arc<QueueCore>,
    pub(crate) _device: Arc<HostDevice>,
}

impl fmt::Debug for HostQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostQueue({})", self.core.id)
    }
}

impl Queue for HostQueue {
    fn id(&self) -> QueueId {
        self.core.id
    }

    fn submit(&self, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
        self.core.submit(submission)
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.core.lock().failure.clone()
    }
}
