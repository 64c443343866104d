//! Locks that somebody may have for long.

use std::{
    sync::{Mutex, MutexGuard, TryLockError},
    thread,
    time::Duration,
};

use warpweft_core_types::Deadline;

/// How long a call of another thread's is waited for where the caller says nothing.
pub(crate) const TURN: Duration = Duration::from_secs(1);

/// A lock, if nobody has it. What panics under one would be a defect of ours, and leaves a whole state.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A lock that somebody may have for long, by a deadline.
pub(crate) fn lock_by<T>(mutex: &Mutex<T>, deadline: Deadline) -> Option<MutexGuard<'_, T>> {
    /// Calls take microseconds; the few that take longer take far longer.
    const PAUSE: Duration = Duration::from_micros(50);
    loop {
        match try_lock(mutex) {
            None if !deadline.is_past() => thread::sleep(PAUSE),
            turn => return turn,
        }
    }
}
