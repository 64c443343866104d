//! The thread that notices finished work for those who sleep: one for all devices of a backend.

use std::{
    fmt, io, process,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long it looks without a pause after somebody began to wait, or after progress while somebody does.
const ALERT: Duration = Duration::from_micros(100);

/// The shortest and the longest pause between two looks while somebody sleeps or a queue holds work back.
const NAP: (Duration, Duration) = (Duration::from_micros(20), Duration::from_micros(200));

/// The pause while nobody depends on it: a program that looks by itself is disturbed by every look of ours.
const LAZY: Duration = Duration::from_millis(1);

/// The pause between two looks for new work, and how many of them it makes before it sleeps for good.
///
/// Waking a sleeping thread costs its waker some microseconds, which a program that submits and waits by
/// turns would pay each time.
const DOZE: (Duration, u32) = (Duration::from_millis(1), 100);

/// A queue that can be asked what it has finished.
pub trait Polled: fmt::Debug + Send + Sync + 'static {
    /// Takes note of what is finished; whether it was something. It waits for no other thread.
    fn reap(self: &Arc<Self>) -> bool;

    /// Whether submissions wait on the host, so that looking matters though nobody sleeps.
    fn is_holding(&self) -> bool;

    /// Whether nothing is under way, so that the reactor may forget it. Whoever submits next adds it again.
    fn retire(&self) -> bool;

    /// Lets go of a queue that was forgotten. A device may go with it, which is not for the reactor to wait for.
    fn end(self: Arc<Self>);
}

/// Queues with work under way, and the thread that looks after them.
#[derive(Debug)]
pub struct Reactor<Q> {
    /// Threads that sleep until some value is reached.
    waiting: AtomicUsize,
    state: Mutex<State<Q>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<Q> {
    busy: Vec<Arc<Q>>,
    /// When work was last added or found finished.
    moved: Option<Instant>,
    /// When somebody last began to wait.
    stirred: Option<Instant>,
    /// The thread sleeps until it is notified.
    asleep: bool,
    closed: bool,
}

/// Ends the thread when dropped, once no work is under way.
#[derive(Debug)]
pub struct ReactorOwner<Q: Polled> {
    reactor: Arc<Reactor<Q>>,
    /// Where the thread is.
    process: u32,
}

impl<Q: Polled> ReactorOwner<Q> {
    /// Starts a thread of this name.
    ///
    /// # Errors
    ///
    /// The system's, if there is no thread.
    pub fn start(name: &str) -> io::Result<Self> {
        let state = State { busy: Vec::new(), moved: None, stirred: None, asleep: false, closed: false };
        let reactor =
            Reactor { waiting: AtomicUsize::new(0), state: Mutex::new(state), changed: Condvar::new() };
        let reactor = Arc::new(reactor);
        let shared = Arc::clone(&reactor);
        thread::Builder::new().name(name.to_owned()).spawn(move || shared.run())?;
        Ok(Self { reactor, process: process::id() })
    }

    /// The reactor, for queues and semaphores.
    pub const fn shared(&self) -> &Arc<Reactor<Q>> {
        &self.reactor
    }
}

impl<Q: Polled> Drop for ReactorOwner<Q> {
    fn drop(&mut self) {
        // In a forked process there is no thread, and the lock may be held for good.
        if self.process != process::id() {
            return;
        }
        self.reactor.lock().closed = true;
        self.reactor.changed.notify_all();
    }
}

/// While it lives, the reactor looks often.
#[derive(Debug)]
pub struct Attention<'a> {
    waiting: &'a AtomicUsize,
}

impl Drop for Attention<'_> {
    fn drop(&mut self) {
        // Relaxed, as in `attend`: a hint that orders nothing.
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<Q: Polled> Reactor<Q> {
    /// Looks after a queue from now on, until nothing of it is under way.
    pub fn add(&self, queue: Arc<Q>) {
        let mut state = self.lock();
        state.busy.push(queue);
        state.moved = Some(Instant::now());
        if state.asleep {
            self.changed.notify_all();
        }
    }

    /// Says that a thread is about to sleep.
    pub fn attend(&self) -> Attention<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.stir();
        Attention { waiting: &self.waiting }
    }

    /// Says that somebody cares about what comes next.
    pub fn stir(&self) {
        self.lock().stirred = Some(Instant::now());
        self.changed.notify_all();
    }

    fn run(&self) {
        let mut queues = Vec::new();
        let mut idle = 0;
        loop {
            queues.clone_from(&self.lock().busy);
            let progress = queues.iter().filter(|queue| queue.reap()).count() > 0;
            let holding = queues.iter().any(|queue| queue.is_holding());
            queues.clear();
            let mut state = self.lock();
            // A device may go with its last queue, which is not for this thread to wait for.
            state.busy.extract_if(.., |queue| queue.retire()).for_each(Q::end);
            if progress {
                state.moved = Some(Instant::now());
            }
            if !state.busy.is_empty() {
                idle = 0;
                self.pause(state, holding);
            } else if state.closed {
                return;
            } else {
                idle += 1;
                self.doze(state, idle);
            }
        }
    }

    /// Between two looks at work that is under way: the longer it takes, the less a pause matters.
    fn pause(&self, state: MutexGuard<'_, State<Q>>, holding: bool) {
        let since = |event: Option<Instant>| event.map_or(NAP.1 * 64, |event| event.elapsed());
        let (moved, stirred) = (since(state.moved), since(state.stirred));
        // Relaxed: a hint.
        let awaited = self.waiting.load(Ordering::Relaxed) > 0;
        if stirred < ALERT || (awaited && moved < ALERT) {
            drop(state);
            return thread::yield_now();
        }
        let needed = awaited || holding || stirred < LAZY * 100;
        let nap = if needed { (moved.min(stirred) / 64).clamp(NAP.0, NAP.1) } else { LAZY };
        drop(self.changed.wait_timeout(state, nap));
    }

    fn doze(&self, mut state: MutexGuard<'_, State<Q>>, idle: u32) {
        if idle < DOZE.1 {
            drop(self.changed.wait_timeout(state, DOZE.0));
            return;
        }
        state.asleep = true;
        let mut state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.asleep = false;
    }

    fn lock(&self) -> MutexGuard<'_, State<Q>> {
        // Only this module's own code runs under the lock, none of which panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
