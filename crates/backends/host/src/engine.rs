//! The worker threads of one device, and the list of what is ready to run.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    idle::{Busy, Spinner, spin_until},
    queue::QueueCore,
    resident::ResidentCore,
    split::Split,
};

/// How often a dozing worker looks for tasks.
const NAP: Duration = Duration::from_micros(50);

/// Naps without a new task after which a worker sleeps for good.
const NAPS: u32 = 20;

/// Something a thread can run now.
#[derive(Debug)]
pub(crate) enum Task {
    /// A queue whose first submission has its waits met.
    Queue(Arc<QueueCore>),
    /// A share of an operation that several threads carry out.
    Split(Arc<Split>),
    /// The next slice of one workgroup of a resident.
    Slice(Arc<ResidentCore>, usize),
}

impl Task {
    /// Runs it. The thread survives whatever foreign code does: kernels and wakers are caught where they are
    /// called, and what they own may still panic when it is dropped here.
    fn run(self) {
        let _busy = Busy::working();
        guard(|| match self {
            Self::Queue(queue) => queue.run(),
            Self::Split(split) => split.work(),
            Self::Slice(resident, workgroup) => resident.run_slice(workgroup),
        });
    }
}

/// Calls code that may panic although nobody can do anything about it here.
pub(crate) fn guard(body: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(body)) {
        // Dropping a payload may panic as well.
        std::mem::forget(payload);
    }
}

/// Ready tasks of one device, in the order they became ready, and the threads that run them.
#[derive(Debug)]
pub(crate) struct Engine {
    workers: usize,
    /// Length of `tasks`, readable without the lock by threads that spin and slices that may yield.
    ready: AtomicUsize,
    /// Workers that look at `ready` right now and need no waking.
    spinning: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    tasks: VecDeque<Task>,
    later: BinaryHeap<Reverse<Later>>,
    /// Tasks added since the start, so that those who doze see whether more keep coming.
    pushed: u64,
    dozing: usize,
    asleep: usize,
    /// Tasks that some thread, a waiter's included, runs now and that may add others.
    in_hand: usize,
    /// Threads that serve.
    alive: usize,
    closed: bool,
}

/// A task that becomes ready at a time.
#[derive(Debug)]
struct Later {
    due: Instant,
    task: Task,
}

impl PartialEq for Later {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}

impl Eq for Later {}

impl PartialOrd for Later {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Later {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.due.cmp(&other.due)
    }
}

impl Engine {
    /// Starts `workers` threads. They end by themselves after [`Engine::close`].
    pub(crate) fn start(name: &str, workers: usize) -> io::Result<Arc<Self>> {
        let engine = Arc::new(Self {
            workers,
            ready: AtomicUsize::new(0),
            spinning: AtomicUsize::new(0),
            state: Mutex::new(State { alive: workers, ..State::default() }),
            changed: Condvar::new(),
        });
        for worker in 0..workers {
            let shared = Arc::clone(&engine);
            std::thread::Builder::new()
                .name(format!("{name}/{worker}"))
                .spawn(move || shared.serve())
                .inspect_err(|_| engine.give_up(workers - worker))?;
        }
        Ok(engine)
    }

    pub(crate) const fn workers(&self) -> usize {
        self.workers
    }

    /// Whether other tasks wait for a thread.
    pub(crate) fn has_ready(&self) -> bool {
        // Relaxed: a hint; the lock orders the tasks themselves.
        self.ready.load(Ordering::Relaxed) != 0
    }

    /// Adds a task behind those that are ready. Once the device is closed and its last thread has ended,
    /// nothing can be ready any more, and the task is dropped.
    pub(crate) fn push(&self, task: Task) {
        let mut state = self.lock();
        if state.alive == 0 {
            drop(state);
            return guard(|| drop(task));
        }
        state.tasks.push_back(task);
        state.pushed += 1;
        self.announce(&state);
    }

    /// Adds a task that becomes ready at `due`.
    pub(crate) fn push_at(&self, due: Instant, task: Task) {
        let mut state = self.lock();
        state.later.push(Reverse(Later { due, task }));
        // A sleeper must learn of an earlier end of its sleep.
        if state.asleep > 0 {
            self.wake_sleeper(&state);
        }
    }

    /// Runs one ready task on the calling thread, if `suits` says so of the first one.
    pub(crate) fn help(&self, suits: impl FnOnce(&Task) -> bool) -> bool {
        if !self.has_ready() {
            return false;
        }
        let mut state = self.lock();
        if !state.tasks.front().is_some_and(suits) {
            return false;
        }
        let task = self.take(&mut state);
        drop(state);
        task.map(|task| self.run(task)).is_some()
    }

    fn run(&self, task: Task) {
        task.run();
        let mut state = self.lock();
        state.in_hand -= 1;
        if state.closed && state.in_hand == 0 {
            self.changed.notify_all();
        }
    }

    /// Some threads could not be started.
    fn give_up(&self, missing: usize) {
        self.lock().alive -= missing;
        self.close();
    }

    /// Lets the workers end once nothing is ready.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Runs tasks until the engine is closed and empty.
    fn serve(&self) {
        loop {
            while let Some(task) = self.next() {
                self.run(task);
            }
            if !self.spin() && !self.doze() && !self.sleep() {
                return;
            }
        }
    }

    fn next(&self) -> Option<Task> {
        let mut state = self.lock();
        self.wake_due(&mut state);
        self.take(&mut state)
    }

    fn spin(&self) -> bool {
        self.spinning.fetch_add(1, Ordering::SeqCst);
        let found = spin_until(Spinner::Worker, || self.has_ready());
        self.spinning.fetch_sub(1, Ordering::SeqCst);
        found
    }

    /// Looks in now and then for as long as tasks keep coming; whether one was found.
    ///
    /// Waking a thread that sleeps for good was measured to cost the waker 25 us, which a program that
    /// submits and waits, and runs its work while it waits, would pay each time for nothing.
    fn doze(&self) -> bool {
        let (mut seen, mut naps) = (0, 0);
        let mut state = self.lock();
        while naps < NAPS && !state.closed {
            self.wake_due(&mut state);
            if !state.tasks.is_empty() {
                return true;
            }
            naps = if state.pushed == seen { naps + 1 } else { 0 };
            seen = state.pushed;
            state.dozing += 1;
            state = self.changed.wait_timeout(state, NAP).unwrap_or_else(PoisonError::into_inner).0;
            state.dozing -= 1;
        }
        false
    }

    /// Sleeps until something may be ready; `false` once closed and empty.
    fn sleep(&self) -> bool {
        let mut state = self.lock();
        self.wake_due(&mut state);
        if !state.tasks.is_empty() {
            return true;
        }
        if state.closed && state.later.is_empty() && state.in_hand == 0 {
            state.alive -= 1;
            return false;
        }
        state.asleep += 1;
        let due = state.later.peek().map(|Reverse(later)| later.due);
        let mut state = match due {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(due) => {
                let pause = due.saturating_duration_since(Instant::now());
                self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0
            }
        };
        state.asleep -= 1;
        true
    }

    fn wake_due(&self, state: &mut State) {
        if state.later.is_empty() {
            return;
        }
        let now = Instant::now();
        while state.later.peek().is_some_and(|Reverse(later)| later.due <= now) {
            if let Some(Reverse(later)) = state.later.pop() {
                state.tasks.push_back(later.task);
                self.announce(state);
            }
        }
    }

    fn take(&self, state: &mut State) -> Option<Task> {
        let task = state.tasks.pop_front()?;
        state.in_hand += 1;
        self.ready.store(state.tasks.len(), Ordering::Relaxed);
        Some(task)
    }

    /// Makes the tasks known to those who spin, and wakes a sleeper unless they suffice.
    fn announce(&self, state: &State) {
        // SeqCst, here and in `spin`: a worker that stopped spinning before it saw the new length finds
        // the task under the lock, and one that counts as spinning here sees the length.
        self.ready.store(state.tasks.len(), Ordering::SeqCst);
        let attentive = state.dozing + self.spinning.load(Ordering::SeqCst);
        if state.asleep > 0 && state.tasks.len() > attentive {
            self.wake_sleeper(state);
        }
    }

    /// One notification could go to a thread that only dozes.
    fn wake_sleeper(&self, state: &State) {
        if state.dozing > 0 {
            self.changed.notify_all();
        } else {
            self.changed.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Only this module's own code runs under the lock, none of which panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
