//! Threads that run tasks of the host.

#[cfg(not(loom))]
use std::time::Duration;
use std::{
    collections::VecDeque,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    task::{Wake, Waker},
    thread,
    time::Instant,
};

use smallvec::SmallVec;
use warpweft_core_types::{Failure, SemaphorePoint};

use crate::{
    node::OwnedTask,
    run::Run,
    sync::{AtomicU8, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering},
    trace::Moments,
};

/// How long a worker looks for the next task before it sleeps. Waking a thread costs about as much.
#[cfg(not(loom))]
const SPIN: Duration = Duration::from_micros(20);

/// Tasks whose turn has come, and those who run them.
#[derive(Debug)]
pub(crate) struct Workers {
    limit: usize,
    queue: Mutex<Queue>,
    /// Tasks in the queue, for those who spin.
    ready: AtomicUsize,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    ready: VecDeque<Ready>,
    threads: usize,
    /// Of those, how many run a job, and how many sleep. The rest look for one.
    busy: usize,
    sleeping: usize,
    /// Jobs that were made and have not ended: threads stay for them.
    open: usize,
    closing: bool,
}

/// What a thread may run now.
enum Ready {
    Job(Arc<Job>),
    /// Something to look at, away from the stack of whoever came to know of it.
    Call(Box<dyn FnOnce() + Send>),
}

impl Ready {
    fn run(self, workers: &Workers) {
        match self {
            Self::Job(job) => job.run(),
            Self::Call(call) => {
                call();
                workers.job_ended();
            }
        }
    }
}

impl fmt::Debug for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Job(job) => job.fmt(f),
            Self::Call(_) => f.write_str("Call"),
        }
    }
}

/// One run of a task.
#[derive(Debug)]
pub(crate) struct Job {
    task: OwnedTask,
    name: Box<str>,
    moments: Option<Arc<Moments>>,
    waits: SmallVec<[SemaphorePoint; 4]>,
    signal: SemaphorePoint,
    /// What may be cancelled; a mark is part of nobody's work.
    run: Option<Arc<Run>>,
    stage: AtomicU8,
    workers: Arc<Workers>,
}

/// Something it waits for has not come to pass.
const WAITING: u8 = 0;
/// It is in the queue.
const READY: u8 = 1;
/// Somebody runs it, or has.
const TAKEN: u8 = 2;

impl Workers {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, queue: Mutex::default(), ready: AtomicUsize::new(0), changed: Condvar::new() })
    }

    /// Has a thread call something. It must not block.
    pub(crate) fn call(self: &Arc<Self>, call: impl FnOnce() + Send + 'static) {
        self.lock().open += 1;
        self.push(Ready::Call(Box::new(call)));
    }

    fn push(self: &Arc<Self>, work: Ready) {
        let mut queue = self.lock();
        queue.ready.push_back(work);
        // Relaxed: who sees it takes the lock before it does anything.
        self.ready.fetch_add(1, Ordering::Relaxed);
        self.rouse(queue);
    }

    /// Sees to it that ready jobs have somebody, up to the limit: whoever spins is about to take one.
    fn rouse(self: &Arc<Self>, mut queue: MutexGuard<'_, Queue>) {
        let spinning = queue.threads - queue.busy - queue.sleeping;
        if queue.ready.len() <= spinning {
            return;
        }
        if queue.sleeping > 0 {
            drop(queue);
            return self.changed.notify_one();
        }
        if queue.threads < self.limit {
            queue.threads += 1;
            drop(queue);
            self.start();
        }
    }

    /// Starts another thread, unless the process may have none. Then those that there are, or whoever waits, do it all.
    fn start(self: &Arc<Self>) {
        let own = Arc::clone(self);
        let started = thread::Builder::new().name("warpweft-task".to_owned()).spawn(move || own.serve());
        let Err(error) = started else { return };
        tracing::warn!(%error, "no thread for tasks of the host");
        let mut queue = self.lock();
        queue.threads -= 1;
        let nobody = queue.threads == 0;
        drop(queue);
        // Nobody else would ever run them.
        while let Some(work) = nobody.then(|| self.lock().ready.pop_front()).flatten() {
            self.ready.fetch_sub(1, Ordering::Relaxed);
            work.run(self);
        }
    }

    fn serve(self: &Arc<Self>) {
        while let Some(work) = self.next() {
            work.run(self);
            self.lock().busy -= 1;
        }
    }

    /// The next job, or nothing when there will be none.
    fn next(self: &Arc<Self>) -> Option<Ready> {
        let mut spun = false;
        let mut queue = self.lock();
        loop {
            if let Some(work) = queue.ready.pop_front() {
                self.ready.fetch_sub(1, Ordering::Relaxed);
                queue.busy += 1;
                // What is left may be for somebody else.
                self.rouse(queue);
                return Some(work);
            }
            if queue.closing && queue.open == 0 {
                queue.threads -= 1;
                drop(queue);
                // The others are to see it too.
                self.changed.notify_all();
                return None;
            }
            if !spun {
                drop(queue);
                self.spin();
                spun = true;
                queue = self.lock();
                continue;
            }
            queue.sleeping += 1;
            queue = self.changed.wait(queue).unwrap_or_else(|poisoned| poisoned.into_inner());
            queue.sleeping -= 1;
        }
    }

    /// Looks for a job without the lock for a moment. A model check has no time to pass.
    #[cfg(loom)]
    fn spin(&self) {}

    /// Looks for a job without the lock for a moment.
    #[cfg(not(loom))]
    fn spin(&self) {
        let until = Instant::now() + SPIN;
        while self.ready.load(Ordering::Relaxed) == 0 && Instant::now() < until {
            std::hint::spin_loop();
        }
    }

    fn pop(&self, queue: &mut Queue, suits: impl Fn(&Job) -> bool) -> Option<Arc<Job>> {
        let is_it = |work: &Ready| matches!(work, Ready::Job(job) if suits(job));
        let position = queue.ready.iter().position(is_it)?;
        let Some(Ready::Job(job)) = queue.ready.remove(position) else { return None };
        self.ready.fetch_sub(1, Ordering::Relaxed);
        Some(job)
    }

    /// Runs a ready job on the caller's thread, if there is one that suits.
    pub(crate) fn help(&self, suits: impl Fn(&Job) -> bool) -> bool {
        if self.ready.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let job = self.pop(&mut self.lock(), suits);
        let found = job.is_some();
        if let Some(job) = job {
            job.run();
        }
        found
    }

    /// No more jobs will be made; those that were still run.
    pub(crate) fn close(&self) {
        self.lock().closing = true;
        self.changed.notify_all();
    }

    fn job_ended(&self) {
        let mut queue = self.lock();
        queue.open -= 1;
        if queue.closing && queue.open == 0 {
            drop(queue);
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Tasks run outside the lock; only this module's own code runs under it.
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Job {
    /// Makes a job that runs when all of `waits` are reached, and raises `signal` then.
    pub(crate) fn start(
        workers: &Arc<Workers>,
        (task, name, moments): (OwnedTask, Box<str>, Option<Arc<Moments>>),
        waits: SmallVec<[SemaphorePoint; 4]>,
        signal: SemaphorePoint,
        run: Option<&Arc<Run>>,
    ) {
        workers.lock().open += 1;
        let job = Arc::new(Self {
            task,
            name,
            moments,
            waits,
            signal,
            run: run.cloned(),
            stage: AtomicU8::new(WAITING),
            workers: Arc::clone(workers),
        });
        for point in &job.waits {
            point.semaphore.wake_when(point.value, Waker::from(Arc::clone(&job)));
        }
        job.look();
    }

    pub(crate) fn is_brief(&self) -> bool {
        self.task.task.is_brief()
    }

    /// Whether it belongs to a run.
    pub(crate) fn is_of(&self, run: &Arc<Run>) -> bool {
        self.run.as_ref().is_some_and(|own| Arc::ptr_eq(own, run))
    }

    /// Puts it in the queue if its turn has come, or never will: whoever runs it finds out which. Nothing is done on
    /// the stack of whoever wakes it, who may be deep in a chain of such.
    fn look(self: &Arc<Self>) {
        let unmet = |point: &SemaphorePoint| point.semaphore.value() < point.value;
        let failed = |point: &SemaphorePoint| point.poll().is_err();
        if self.waits.iter().any(unmet) && !self.waits.iter().any(failed) {
            return;
        }
        // Acquire and release: whoever takes it sees what made it ready.
        let ours = self.stage.compare_exchange(WAITING, READY, Ordering::AcqRel, Ordering::Relaxed);
        if ours.is_ok() {
            self.workers.push(Ready::Job(Arc::clone(self)));
        }
    }

    fn run(&self) {
        if self.stage.compare_exchange(READY, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        let SemaphorePoint { semaphore, value } = &self.signal;
        match self.outcome() {
            Ok(()) => {
                // The line is the job's own, so nobody else raises it; after a failure it stays as it is.
                let _settled = semaphore.signal(*value);
            }
            Err(failure) => semaphore.fail(failure),
        }
        self.workers.job_ended();
    }

    fn outcome(&self) -> Result<(), Arc<Failure>> {
        if let Some(failure) = self.waits.iter().find_map(|point| point.poll().err()) {
            return Err(failure);
        }
        // Acquire: pairs with the release in `Run::cancel`.
        if self.run.as_ref().is_some_and(|run| run.cancelled.load(Ordering::Acquire)) {
            return Err(Arc::new(Failure::Cancelled));
        }
        let failed = |reason: String| Arc::new(Failure::TaskFailed { task: self.name.to_string(), reason });
        let began = self.moments.as_ref().map(|_| Instant::now());
        let called = catch_unwind(AssertUnwindSafe(|| self.task.call()));
        if let Some((moments, began)) = self.moments.as_ref().zip(began) {
            moments.note(began, Instant::now());
        }
        match called {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(panic) => Err(failed(format!("it panicked: {}", message_of(panic.as_ref())))),
        }
    }
}

impl Wake for Job {
    fn wake(self: Arc<Self>) {
        self.look();
    }
}

/// The words of a panic.
fn message_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

#[cfg(all(test, loom))]
mod loom_tests {
    use warpweft_core_types::{Deadline, DeviceId, DeviceUuid, Semaphore, SignalError, Timeline, WaitError};

    use super::*;
    use crate::task::HostTask;

    /// A semaphore of the host alone.
    #[derive(Debug)]
    struct Line(Timeline);

    impl Line {
        fn new() -> Arc<dyn Semaphore> {
            Arc::new(Self(Timeline::new(0)))
        }
    }

    impl Semaphore for Line {
        fn device(&self) -> DeviceId {
            DeviceId { backend: "host", ordinal: 0, uuid: DeviceUuid::from_bytes([0; 16]) }
        }

        fn value(&self) -> u64 {
            self.0.value()
        }

        fn failure(&self) -> Option<Arc<Failure>> {
            self.0.failure()
        }

        fn promise(&self, value: u64) -> Result<u64, SignalError> {
            self.0.promise(value)
        }

        fn retract(&self, value: u64, before: u64) {
            self.0.retract(value, before);
        }

        fn signal(&self, value: u64) -> Result<(), SignalError> {
            self.0.signal(value)
        }

        fn fail(&self, failure: Arc<Failure>) {
            self.0.fail(failure);
        }

        fn wait(&self, value: u64, deadline: Deadline) -> Result<(), WaitError> {
            self.0.wait(value, deadline)
        }

        fn wake_when(&self, value: u64, waker: Waker) {
            self.0.wake_when(value, waker);
        }

        fn forget(&self, value: u64, waker: &Waker) {
            self.0.forget(value, waker);
        }
    }

    fn start(workers: &Arc<Workers>, waits: &[&Arc<dyn Semaphore>]) -> SemaphorePoint {
        let signal = SemaphorePoint::new(&Line::new(), 1);
        let task = OwnedTask { task: HostTask::new(|_| {}), operands: Arc::default() };
        let waits = waits.iter().map(|semaphore| SemaphorePoint::new(semaphore, 1)).collect();
        Job::start(workers, (task, "task".into(), None), waits, signal.clone(), None);
        signal
    }

    /// Whichever of two points is reached last, and whenever the job comes to look, it is ready once.
    #[test]
    fn loom_a_job_behind_two_points_runs_once() {
        loom::model(|| {
            let workers = Workers::new(0);
            let (one, other) = (Line::new(), Line::new());
            let raiser = {
                let (one, other) = (Arc::clone(&one), Arc::clone(&other));
                loom::thread::spawn(move || {
                    one.signal(1).unwrap();
                    other.signal(1).unwrap();
                })
            };
            let done = start(&workers, &[&one, &other]);
            raiser.join().unwrap();
            assert!(workers.help(|_| true), "it is ready");
            assert!(!workers.help(|_| true), "it is ready once");
            assert!(matches!(done.poll(), Ok(true)));
        });
    }

    /// A failure on one side and a point reached on the other end in a failure, once.
    #[test]
    fn loom_a_job_behind_a_failure_fails_once() {
        loom::model(|| {
            let workers = Workers::new(0);
            let (one, other) = (Line::new(), Line::new());
            let breaker = {
                let one = Arc::clone(&one);
                loom::thread::spawn(move || one.fail(Arc::new(Failure::Cancelled)))
            };
            let done = start(&workers, &[&one, &other]);
            other.signal(1).unwrap();
            breaker.join().unwrap();
            assert!(workers.help(|_| true) && !workers.help(|_| true));
            assert!(done.poll().is_err());
        });
    }

    /// A worker does not sleep through a job, nor through the end.
    #[test]
    fn loom_a_worker_runs_what_comes_and_ends() {
        loom::model(|| {
            let workers = Workers::new(0);
            workers.lock().threads = 1;
            let worker = {
                let workers = Arc::clone(&workers);
                loom::thread::spawn(move || workers.serve())
            };
            let done = start(&workers, &[]);
            workers.close();
            worker.join().unwrap();
            assert!(matches!(done.poll(), Ok(true)));
        });
    }
}
