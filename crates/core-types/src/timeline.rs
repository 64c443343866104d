//! The host's side of a timeline semaphore, which every backend builds its own upon.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    task::Waker,
};

use crate::{
    Deadline, Failure, SignalError, WaitError,
    sync::{AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, fence},
};

/// A rising number that threads block on and wakers register with.
///
/// Raising it costs one atomic and a fence while nobody waits. Whoever starts to wait first counts itself
/// and then looks at the number; whoever raises it first stores the number and then looks at the count. A
/// sequentially consistent fence stands between the two steps on either side, so at least one of the two
/// sees the other (checked by loom).
pub struct Timeline {
    reached: AtomicU64,
    promised: AtomicU64,
    /// Threads and wakers that wait, counted before they look at `reached`.
    waiting: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    failure: Option<Arc<Failure>>,
    wakers: Vec<(u64, Waker)>,
}

impl Timeline {
    /// A timeline that stands at `initial`.
    pub fn new(initial: u64) -> Self {
        Self {
            reached: AtomicU64::new(initial),
            promised: AtomicU64::new(initial),
            waiting: AtomicUsize::new(0),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
        }
    }

    /// The value reached.
    pub fn value(&self) -> u64 {
        // Acquire: what the raiser wrote before it raised is visible to whoever sees the value.
        self.reached.load(Ordering::Acquire)
    }

    /// Why it will not rise any more, if it failed.
    pub fn failure(&self) -> Option<Arc<Failure>> {
        self.lock().failure.clone()
    }

    /// Announces a value that a submission will signal. See [`crate::Semaphore::promise`].
    ///
    /// # Errors
    ///
    /// [`SignalError::NotIncreasing`] if it was announced or reached before.
    pub fn promise(&self, value: u64) -> Result<u64, SignalError> {
        // Relaxed: the number orders nothing but itself.
        let before = self.promised.fetch_max(value, Ordering::Relaxed);
        if before < value { Ok(before) } else { Err(SignalError::NotIncreasing { value, current: before }) }
    }

    /// Takes a promise back. See [`crate::Semaphore::retract`].
    pub fn retract(&self, value: u64, before: u64) {
        // Fails where somebody promised more meanwhile, and then there is nothing to take back.
        let _overtaken = self.promised.compare_exchange(value, before, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Forgets a waker. See [`crate::Semaphore::forget`].
    pub fn forget(&self, value: u64, waker: &Waker) {
        let mut state = self.lock();
        let known = state.wakers.len();
        state.wakers.retain(|(other, registered)| *other != value || !registered.will_wake(waker));
        self.end_waiting(known - state.wakers.len());
    }

    /// Raises the value from the host. See [`crate::Semaphore::signal`].
    ///
    /// # Errors
    ///
    /// [`SignalError::NotIncreasing`] if it is already there, [`SignalError::Failed`] after a failure.
    pub fn signal(&self, value: u64) -> Result<(), SignalError> {
        if let Some(failure) = self.failure() {
            return Err(SignalError::Failed(failure));
        }
        self.promised.fetch_max(value, Ordering::Relaxed);
        let before = self.raise(value);
        if before < value { Ok(()) } else { Err(SignalError::NotIncreasing { value, current: before }) }
    }

    /// Raises the value to at least `value`, wakes who waited for it, and returns what it was before.
    pub fn raise(&self, value: u64) -> u64 {
        // Release: see `value`. The fence keeps the look at `waiting` behind the store (see the type).
        let before = self.reached.fetch_max(value, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::Relaxed) != 0 {
            self.wake_reached();
        }
        before
    }

    /// Fails it for good and wakes everyone. The first failure wins.
    pub fn fail(&self, failure: Arc<Failure>) {
        let mut state = self.lock();
        state.failure.get_or_insert(failure);
        let wakers = std::mem::take(&mut state.wakers);
        self.end_waiting(wakers.len());
        drop(state);
        self.changed.notify_all();
        wakers.into_iter().for_each(|(_, waker)| wake(waker));
    }

    /// Counts the caller among those who wait, for as long as the result lives.
    pub fn expect(&self) -> Expecting<'_> {
        self.begin_waiting();
        Expecting(self)
    }

    /// Whether threads or wakers wait for some value.
    pub fn is_awaited(&self) -> bool {
        // Relaxed: who has to see another's waiting has a lock in common with it.
        self.waiting.load(Ordering::Relaxed) != 0
    }

    /// Blocks until `value` is reached. See [`crate::Semaphore::wait`].
    ///
    /// # Errors
    ///
    /// [`WaitError::Timeout`] or [`WaitError::Failed`].
    pub fn wait(&self, value: u64, deadline: Deadline) -> Result<(), WaitError> {
        if self.value() >= value {
            return Ok(());
        }
        let state = self.lock();
        self.begin_waiting();
        let result = self.wait_locked(state, value, deadline);
        self.end_waiting(1);
        result
    }

    fn wait_locked(
        &self,
        mut state: MutexGuard<'_, State>,
        value: u64,
        deadline: Deadline,
    ) -> Result<(), WaitError> {
        loop {
            let reached = self.value();
            if reached >= value {
                return Ok(());
            }
            if let Some(failure) = &state.failure {
                return Err(WaitError::Failed(Arc::clone(failure)));
            }
            let remaining = deadline.remaining();
            if remaining.is_zero() {
                return Err(WaitError::Timeout { awaited: value, reached });
            }
            state = match self.changed.wait_timeout(state, remaining) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// Wakes `waker` when `value` is reached or the timeline fails. See [`crate::Semaphore::wake_when`].
    pub fn wake_when(&self, value: u64, waker: Waker) {
        let mut state = self.lock();
        // A future polled many times before it is ready registers once.
        if state.wakers.iter().any(|(other, known)| *other == value && known.will_wake(&waker)) {
            return;
        }
        self.begin_waiting();
        if state.failure.is_none() && self.value() < value {
            state.wakers.push((value, waker));
            return;
        }
        self.end_waiting(1);
        drop(state);
        wake(waker);
    }

    fn wake_reached(&self) {
        let mut state = self.lock();
        let reached = self.value();
        let due: Vec<Waker> =
            state.wakers.extract_if(.., |(value, _)| *value <= reached).map(|(_, waker)| waker).collect();
        self.end_waiting(due.len());
        drop(state);
        self.changed.notify_all();
        // Outside the lock: a waker may run code that comes back here.
        due.into_iter().for_each(wake);
    }

    fn begin_waiting(&self) {
        // Relaxed: the fence orders it before the look at `reached` that follows (see the type).
        self.waiting.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    fn end_waiting(&self, count: usize) {
        // Relaxed: too high a count costs a look and nothing else.
        self.waiting.fetch_sub(count, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code of others runs under the lock, so a poisoned one still guards a whole state.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Somebody who waits, or is about to.
#[derive(Debug)]
pub struct Expecting<'a>(&'a Timeline);

impl Drop for Expecting<'_> {
    fn drop(&mut self) {
        self.0.end_waiting(1);
    }
}

/// Wakes, and keeps a panic of the program's own waker from the work that happened to raise the value.
fn wake(waker: Waker) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| waker.wake())) {
        // Dropping a payload may panic as well.
        std::mem::forget(payload);
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline")
            .field("value", &self.value())
            .field("failure", &self.failure())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{sync::atomic, task::Wake, time::Duration};

    use super::*;

    #[derive(Default)]
    struct Count(atomic::AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, atomic::Ordering::Relaxed);
        }
    }

    impl Count {
        fn get(&self) -> usize {
            self.0.load(atomic::Ordering::Relaxed)
        }
    }

    #[test]
    fn tells_whether_somebody_waits() {
        let timeline = Timeline::new(0);
        assert!(!timeline.is_awaited());
        let (one, other) = (timeline.expect(), timeline.expect());
        drop(one);
        assert!(timeline.is_awaited(), "the other still does");
        drop(other);
        assert!(!timeline.is_awaited());
        let _late = timeline.wait(1, Deadline::within(Duration::ZERO));
        assert!(!timeline.is_awaited());
    }

    #[test]
    fn only_rises() {
        let timeline = Timeline::new(3);
        assert!(matches!(timeline.signal(3), Err(SignalError::NotIncreasing { value: 3, current: 3 })));
        timeline.signal(7).unwrap();
        assert_eq!(timeline.raise(5), 7);
        assert_eq!(timeline.value(), 7);
    }

    #[test]
    fn promises_rise_and_are_not_given_twice() {
        let timeline = Timeline::new(0);
        timeline.promise(2).unwrap();
        assert!(timeline.promise(2).is_err());
        assert!(timeline.promise(1).is_err());
        assert_eq!(timeline.value(), 0);
    }

    #[test]
    fn a_retracted_promise_can_be_made_again_unless_overtaken() {
        let timeline = Timeline::new(0);
        let before = timeline.promise(2).unwrap();
        timeline.retract(2, before);
        let before = timeline.promise(1).unwrap();
        timeline.promise(5).unwrap();
        timeline.retract(1, before);
        assert!(timeline.promise(5).is_err());
    }

    #[test]
    fn a_forgotten_waker_is_gone() {
        let timeline = Timeline::new(0);
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        timeline.wake_when(1, waker.clone());
        timeline.wake_when(2, waker.clone());
        timeline.forget(1, &waker);
        assert_eq!(timeline.lock().wakers.len(), 1);
        timeline.raise(2);
        assert_eq!(count.get(), 1);
    }

    #[test]
    fn a_wait_times_out_and_says_how_far_it_got() {
        let timeline = Timeline::new(4);
        let error = timeline.wait(5, Deadline::within(Duration::from_millis(1))).unwrap_err();
        assert!(matches!(error, WaitError::Timeout { awaited: 5, reached: 4 }));
    }

    #[test]
    fn failure_reaches_waiters_but_not_values_already_reached() {
        let timeline = Timeline::new(4);
        let waker = Arc::new(Count::default());
        timeline.wake_when(5, Arc::clone(&waker).into());
        timeline.fail(Arc::new(Failure::Cancelled));
        assert_eq!(waker.get(), 1);
        timeline.wait(4, Deadline::now()).unwrap();
        assert!(matches!(timeline.wait(5, Deadline::now()), Err(WaitError::Failed(_))));
        assert!(matches!(timeline.signal(9), Err(SignalError::Failed(_))));
    }

    #[test]
    fn each_waker_is_woken_once_at_its_value() {
        let timeline = Timeline::new(0);
        let (early, late) = (Arc::new(Count::default()), Arc::new(Count::default()));
        for _ in 0..3 {
            timeline.wake_when(1, Arc::clone(&early).into());
        }
        timeline.wake_when(2, Arc::clone(&late).into());
        timeline.raise(1);
        assert_eq!((early.get(), late.get()), (1, 0));
        timeline.raise(2);
        assert_eq!((early.get(), late.get()), (1, 1));
        timeline.wake_when(2, Arc::clone(&late).into());
        assert_eq!(late.get(), 2);
    }

    #[test]
    fn a_waker_that_panics_harms_nobody() {
        struct Panics;

        impl Wake for Panics {
            fn wake(self: Arc<Self>) {
                panic!("a waker that panics");
            }
        }

        let (timeline, count) = (Timeline::new(0), Arc::new(Count::default()));
        timeline.wake_when(1, Arc::new(Panics).into());
        timeline.wake_when(1, Arc::clone(&count).into());
        assert_eq!(timeline.raise(1), 0);
        assert_eq!(count.get(), 1);
    }

    #[test]
    fn a_blocked_thread_is_released() {
        let timeline = Arc::new(Timeline::new(0));
        let waiter = {
            let timeline = Arc::clone(&timeline);
            std::thread::spawn(move || timeline.wait(1, Deadline::within(Duration::from_secs(30))))
        };
        timeline.raise(1);
        waiter.join().unwrap().unwrap();
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use std::task::Wake;

    use loom::sync::Arc as LoomArc;

    use super::*;

    struct Flag(loom::sync::atomic::AtomicUsize);

    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, loom::sync::atomic::Ordering::SeqCst);
        }
    }

    #[test]
    fn a_waker_registered_while_the_value_rises_is_woken_once() {
        loom::model(|| {
            let timeline = LoomArc::new(Timeline::new(0));
            let flag = Arc::new(Flag(loom::sync::atomic::AtomicUsize::new(0)));
            let raiser = {
                let timeline = LoomArc::clone(&timeline);
                loom::thread::spawn(move || timeline.raise(1))
            };
            timeline.wake_when(1, Arc::clone(&flag).into());
            raiser.join().unwrap();
            assert_eq!(flag.0.load(loom::sync::atomic::Ordering::SeqCst), 1);
        });
    }

    #[test]
    fn a_waker_registered_while_it_fails_is_woken_once() {
        loom::model(|| {
            let timeline = LoomArc::new(Timeline::new(0));
            let flag = Arc::new(Flag(loom::sync::atomic::AtomicUsize::new(0)));
            let breaker = {
                let timeline = LoomArc::clone(&timeline);
                loom::thread::spawn(move || timeline.fail(Arc::new(Failure::Cancelled)))
            };
            timeline.wake_when(1, Arc::clone(&flag).into());
            breaker.join().unwrap();
            assert_eq!(flag.0.load(loom::sync::atomic::Ordering::SeqCst), 1);
        });
    }

    #[test]
    fn a_blocked_thread_does_not_sleep_through_a_rise() {
        loom::model(|| {
            let timeline = LoomArc::new(Timeline::new(0));
            let raiser = {
                let timeline = LoomArc::clone(&timeline);
                loom::thread::spawn(move || timeline.raise(1))
            };
            let far = Deadline::within(std::time::Duration::from_secs(3600));
            timeline.wait(1, far).unwrap();
            raiser.join().unwrap();
        });
    }
}
