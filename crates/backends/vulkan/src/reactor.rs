//! The thread that notices finished work for those who sleep: one for all devices of a backend.
//!
//! It asks the driver for the values of timelines. A wait of the driver's for any of many (`vkWaitSemaphores`) is for one
//! device, and cannot be told of new work.

use std::{
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crate::queue::QueueCore;

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

/// Queues with work under way, and the thread that looks after them.
#[derive(Debug, Default)]
pub(crate) struct Reactor {
    /// Threads that sleep until some value is reached.
    waiting: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    busy: Vec<Arc<QueueCore>>,
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
pub(crate) struct ReactorOwner(Arc<Reactor>);

impl ReactorOwner {
    pub(crate) fn start() -> io::Result<Self> {
        let reactor = Arc::new(Reactor::default());
        let shared = Arc::clone(&reactor);
        thread::Builder::new().name("vulkan/reactor".to_owned()).spawn(move || shared.run())?;
        Ok(Self(reactor))
    }

    pub(crate) const fn shared(&self) -> &Arc<Reactor> {
        &self.0
    }
}

impl Drop for ReactorOwner {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

/// While it lives, the reactor looks often.
#[derive(Debug)]
pub(crate) struct Attention<'a>(&'a Reactor);

impl Drop for Attention<'_> {
    fn drop(&mut self) {
        // Relaxed, as in `attend`: a hint that orders nothing.
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Reactor {
    /// Looks after a queue from now on, until nothing of it is under way.
    pub(crate) fn add(&self, queue: Arc<QueueCore>) {
        let mut state = self.lock();
        state.busy.push(queue);
        state.moved = Some(Instant::now());
        if state.asleep {
            self.changed.notify_all();
        }
    }

    /// Says that a thread is about to sleep.
    pub(crate) fn attend(&self) -> Attention<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.stir();
        Attention(self)
    }

    /// Says that somebody cares about what comes next.
    pub(crate) fn stir(&self) {
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
            queues.drain(..).for_each(QueueCore::end);
            let mut state = self.lock();
            // A device may go with its last queue, which is not for this thread to wait for.
            state.busy.extract_if(.., |queue| queue.retire()).for_each(QueueCore::end);
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
    fn pause(&self, state: MutexGuard<'_, State>, holding: bool) {
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

    fn doze(&self, mut state: MutexGuard<'_, State>, idle: u32) {
        if idle < DOZE.1 {
            drop(self.changed.wait_timeout(state, DOZE.0));
            return;
        }
        state.asleep = true;
        let mut state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.asleep = false;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Only this module's own code runs under the lock, none of which panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
