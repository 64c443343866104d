//! Calls that may take as long as other ranks do, and waits that end.

use std::{
    hint,
    sync::{Mutex, MutexGuard, PoisonError, TryLockError, mpsc},
    thread,
    time::{Duration, Instant},
};

use crate::error::Error;

/// How long it looks without a pause.
const SPIN: Duration = Duration::from_micros(100);

/// The longest pause between two looks.
const NAP: Duration = Duration::from_millis(1);

/// Runs a call in a thread of its own and waits for it. After the time is up the call goes on, and its result is
/// dropped there.
///
/// # Errors
///
/// [`Error::TimedOut`], or [`Error::Thread`] if there is none.
pub(crate) fn run<T: Send + 'static>(
    what: &'static str,
    within: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let (send, receive) = mpsc::sync_channel(1);
    let work = move || {
        // Nobody listens if it took too long.
        let _late = send.send(call());
    };
    thread::Builder::new().name(what.to_owned()).spawn(work).map_err(|_| Error::Thread { what })?;
    receive.recv_timeout(within).map_err(|_| Error::TimedOut { what, after: within })
}

/// Looks until there is an answer, often at first.
///
/// # Errors
///
/// [`Error::TimedOut`].
pub(crate) fn poll<T>(
    what: &'static str,
    within: Duration,
    mut look: impl FnMut() -> Option<T>,
) -> Result<T, Error> {
    let start = Instant::now();
    loop {
        if let Some(answer) = look() {
            return Ok(answer);
        }
        let passed = start.elapsed();
        if passed >= within {
            return Err(Error::TimedOut { what, after: within });
        }
        if passed < SPIN {
            // The library starts work in about this time.
            hint::spin_loop();
        } else if passed < NAP {
            thread::yield_now();
        } else {
            // The longer it took, the less a pause matters.
            thread::sleep((passed / 16).min(NAP).min(within - passed));
        }
    }
}

/// Takes a lock that another thread may hold for the length of a call.
///
/// # Errors
///
/// [`Error::TimedOut`].
pub(crate) fn lock<'a, T>(
    what: &'static str,
    within: Duration,
    mutex: &'a Mutex<T>,
) -> Result<MutexGuard<'a, T>, Error> {
    // Nearly always there, and asking for the time costs more.
    attempt(mutex).map_or_else(|| poll(what, within, || attempt(mutex)), Ok)
}

/// Takes a lock if nobody has it.
pub(crate) fn attempt<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(PoisonError::into_inner(poisoned)),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// What is left of a time for several waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    start: Instant,
    within: Duration,
}

impl Deadline {
    pub(crate) fn after(within: Duration) -> Self {
        Self { start: Instant::now(), within }
    }

    pub(crate) fn left(&self) -> Duration {
        self.within.saturating_sub(self.start.elapsed())
    }

    /// Tells the whole time of a wait that had only the rest.
    pub(crate) fn whole(&self, error: Error) -> Error {
        match error {
            Error::TimedOut { what, .. } => Error::TimedOut { what, after: self.within },
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_end_is_left_behind() {
        let (hold, held) = mpsc::channel::<()>();
        let error = run("a call", Duration::from_millis(5), move || held.recv().is_ok()).unwrap_err();
        assert_eq!(error, Error::TimedOut { what: "a call", after: Duration::from_millis(5) });
        drop(hold);
        assert_eq!(run("a call", Duration::from_secs(10), || 7), Ok(7));
    }

    #[test]
    fn a_lock_that_stays_taken_is_given_up() {
        let mutex = Mutex::new(());
        let held = mutex.lock().unwrap();
        assert!(lock("a lock", Duration::from_millis(5), &mutex).is_err());
        drop(held);
        assert!(lock("a lock", Duration::ZERO, &mutex).is_ok());
    }
}
