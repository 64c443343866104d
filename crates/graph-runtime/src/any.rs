//! Waiting for whichever of several points comes first.

use std::{
    sync::Arc,
    task::{Wake, Waker},
    time::Duration,
};

use warpweft_core_types::{Deadline, SemaphorePoint, WaitError};

use crate::sync::{Condvar, Mutex};

/// How long the first of several points is waited for alone. Most often it is the first to be reached, and a wait for
/// one point can help with what it waits for.
const ALONE: Duration = Duration::from_micros(50);

/// Waits until one of `points`, the likeliest first, is reached or has failed; whether that was before the deadline.
pub(crate) fn wait_for_any(points: &[SemaphorePoint], deadline: Deadline) -> bool {
    let Some((first, others)) = points.split_first() else { return true };
    let is_reached = |deadline: Deadline| !matches!(first.wait(deadline), Err(WaitError::Timeout { .. }));
    if others.is_empty() {
        return is_reached(deadline);
    }
    if is_reached(Deadline::within(deadline.remaining().min(ALONE))) {
        return true;
    }
    let bell = Arc::new(Bell::default());
    let waker = Waker::from(Arc::clone(&bell));
    for point in points {
        point.semaphore.wake_when(point.value, waker.clone());
    }
    let has_rung = bell.wait(deadline);
    for point in points {
        point.semaphore.forget(point.value, &waker);
    }
    has_rung
}

/// Rung once, by whoever comes first.
#[derive(Debug, Default)]
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn wait(&self, deadline: Deadline) -> bool {
        let mut rung = self.rung.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while !*rung && !deadline.is_past() {
            let waited = self.changed.wait_timeout(rung, deadline.remaining());
            rung = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        *rung
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *self.rung.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = true;
        self.changed.notify_all();
    }
}
