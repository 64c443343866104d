//! Timeline semaphores: a number that only rises, and what waits for it.

use std::{
    any::Any,
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use smallvec::SmallVec;

use crate::{Deadline, DeviceId, Failure, SignalError, WaitError};

/// A 64-bit number that only rises. Submissions wait for values and signal values; so can the host.
///
/// A semaphore ends either by being dropped or by *failing*: when the work that would have raised it
/// cannot happen, it takes the error and hands it to everyone who waits for a value it has not reached.
/// Values reached before stay reached.
///
/// Asking (`value`, `failure`, `poll`) wakes nobody on the caller's stack, even where the answer is new: queues
/// ask under their own locks, and what they would wake may be themselves.
pub trait Semaphore: Any + fmt::Debug + Send + Sync {
    /// The device it was made by.
    fn device(&self) -> DeviceId;

    /// The value reached so far.
    fn value(&self) -> u64;

    /// Why it will not rise any more, if it failed.
    fn failure(&self) -> Option<Arc<Failure>>;

    /// Announces that a submission will signal `value`, and returns the value announced before. Queues call
    /// this; programs do not.
    ///
    /// # Errors
    ///
    /// [`SignalError::NotIncreasing`] if that value was announced or reached before: signals are
    /// submitted in rising order.
    fn promise(&self, value: u64) -> Result<u64, SignalError>;

    /// Takes back the promise of `value` after a submission was refused, unless a higher one was made since;
    /// `before` is what [`Semaphore::promise`] returned.
    fn retract(&self, value: u64, before: u64);

    /// Raises the value to `value` from the host.
    ///
    /// # Errors
    ///
    /// [`SignalError::NotIncreasing`] if it is already there, [`SignalError::Failed`] after a failure.
    fn signal(&self, value: u64) -> Result<(), SignalError>;

    /// Makes it fail for good. The first failure wins.
    fn fail(&self, failure: Arc<Failure>);

    /// Blocks until `value` is reached.
    ///
    /// # Errors
    ///
    /// [`WaitError::Timeout`] by the deadline (the work goes on), [`WaitError::Failed`] when it will
    /// never be reached.
    fn wait(&self, value: u64, deadline: Deadline) -> Result<(), WaitError>;

    /// Wakes `waker` once, when `value` is reached or the semaphore fails; at once if so already.
    fn wake_when(&self, value: u64, waker: Waker);

    /// Forgets a waker that was registered for `value` and has not been woken.
    fn forget(&self, value: u64, waker: &Waker);

    /// Whether `value` is reached; does not block.
    ///
    /// # Errors
    ///
    /// The failure, if it will never be reached.
    fn poll(&self, value: u64) -> Result<bool, Arc<Failure>> {
        // Failure first: a value reached before a failure must be found after it.
        let failure = self.failure();
        if self.value() >= value {
            return Ok(true);
        }
        failure.map_or(Ok(false), Err)
    }
}

/// One value of one semaphore: something to wait for, or to signal.
///
/// It is also how a long operation is handed back: wait for it with a deadline, poll it, or `.await` it.
#[derive(Clone)]
pub struct SemaphorePoint {
    /// The semaphore.
    pub semaphore: Arc<dyn Semaphore>,
    /// The value.
    pub value: u64,
}

impl SemaphorePoint {
    /// `value` of `semaphore`.
    pub fn new(semaphore: &Arc<dyn Semaphore>, value: u64) -> Self {
        Self { semaphore: Arc::clone(semaphore), value }
    }

    /// Blocks until the point is reached.
    ///
    /// # Errors
    ///
    /// See [`Semaphore::wait`].
    pub fn wait(&self, deadline: impl Into<Deadline>) -> Result<(), WaitError> {
        self.semaphore.wait(self.value, deadline.into())
    }

    /// Whether the point is reached; does not block.
    ///
    /// # Errors
    ///
    /// The failure, if it will never be reached.
    pub fn poll(&self) -> Result<bool, Arc<Failure>> {
        self.semaphore.poll(self.value)
    }
}

impl fmt::Debug for SemaphorePoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SemaphorePoint({} of {:?})", self.value, self.semaphore)
    }
}

impl IntoFuture for SemaphorePoint {
    type Output = Result<(), Arc<Failure>>;
    type IntoFuture = Reached;

    fn into_future(self) -> Reached {
        Reached { point: self, registered: None }
    }
}

/// A future that ends when a [`SemaphorePoint`] is reached or has failed. Dropping it cancels nothing.
#[derive(Debug)]
pub struct Reached {
    point: SemaphorePoint,
    registered: Option<Waker>,
}

impl Future for Reached {
    type Output = Result<(), Arc<Failure>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.point.poll() {
            Ok(true) => Poll::Ready(Ok(())),
            Err(failure) => Poll::Ready(Err(failure)),
            Ok(false) => {
                if !self.registered.as_ref().is_some_and(|known| known.will_wake(cx.waker())) {
                    self.forget();
                    self.registered = Some(cx.waker().clone());
                    // Registering wakes at once if the value was reached since the look above.
                    self.point.semaphore.wake_when(self.point.value, cx.waker().clone());
                }
                Poll::Pending
            }
        }
    }
}

impl Reached {
    fn forget(&mut self) {
        if let Some(waker) = self.registered.take() {
            self.point.semaphore.forget(self.point.value, &waker);
        }
    }
}

impl Drop for Reached {
    /// A future that is given up leaves nothing behind in the semaphore.
    fn drop(&mut self) {
        self.forget();
    }
}

/// Promises several points, all of them or none. Queues call this when they take a submission.
///
/// # Errors
///
/// The first refusal; nothing is promised then.
pub fn promise_all(points: &[SemaphorePoint]) -> Result<(), SignalError> {
    let mut made: SmallVec<[(&SemaphorePoint, u64); 2]> = SmallVec::new();
    for point in points {
        match point.semaphore.promise(point.value) {
            Ok(before) => made.push((point, before)),
            Err(error) => {
                // Backwards, so that two promises to one semaphore end at the first one's `before`.
                made.iter().rev().for_each(|(point, before)| point.semaphore.retract(point.value, *before));
                return Err(error);
            }
        }
    }
    Ok(())
}
