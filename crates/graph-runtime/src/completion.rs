//! What becomes of a submission.

use std::{
    fmt,
    ops::Deref,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
};

use warpweft_core_types::{Deadline, SemaphorePoint, WaitError};

use crate::{domain::Domain, error::CompletionError, later::drop_later, run::Run, sync::Mutex, workers::Job};

/// A submission: wait for it with a deadline, ask, or `.await` it.
///
/// Dropping it cancels nothing. Clones stand for the same submission.
#[derive(Clone)]
pub struct Completion {
    domain: Arc<Domain>,
    run: Handle,
}

/// A run, which is used again once nobody has it.
#[derive(Clone)]
struct Handle(Option<Arc<Run>>);

impl Deref for Handle {
    type Target = Arc<Run>;

    fn deref(&self) -> &Arc<Run> {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(run) = self.0.take() {
            drop_later(run);
        }
    }
}

impl Completion {
    pub(crate) fn new(domain: &Arc<Domain>, run: Arc<Run>) -> Self {
        Self { domain: Arc::clone(domain), run: Handle(Some(run)) }
    }

    /// The submission's number in its runtime, from 0.
    pub fn id(&self) -> u64 {
        self.run.id
    }

    /// Blocks until everything of it has ended. A thread that waits runs brief tasks of it itself.
    ///
    /// # Errors
    ///
    /// See [`CompletionError`].
    pub fn wait(&self, deadline: impl Into<Deadline>) -> Result<(), CompletionError> {
        let deadline = deadline.into();
        loop {
            if let Some(outcome) = self.outcome() {
                return outcome;
            }
            let own = |job: &Job| job.is_brief() && job.is_of(&self.run);
            if self.domain.workers.help(own) {
                continue;
            }
            let Some(point) = self.run.next_point() else { continue };
            // Whether it was this submission that failed is looked at above.
            if let Err(WaitError::Timeout { .. }) = point.wait(deadline) {
                return Err(CompletionError::Timeout);
            }
        }
    }

    /// How it ended; none while it is under way. Does not block, and runs nothing.
    pub fn outcome(&self) -> Option<Result<(), CompletionError>> {
        if self.domain.has_ended(&self.run) { self.run.outcome() } else { None }
    }

    /// Whether everything of it has ended, well or not.
    pub fn is_complete(&self) -> bool {
        self.outcome().is_some()
    }

    /// Has everything skipped that has not begun, as far as that can still be had: tasks of the host, and what waits
    /// for them. What devices were handed goes on, and so does all of a submission with a collective in it, whose other
    /// ranks would wait. The completion ends when everything that had begun has.
    pub fn cancel(&self) {
        self.run.cancel();
    }

    /// Calls `callback` once it has ended, on a thread for tasks of the host, or at once. It must not block; a
    /// panic in it is caught and dropped.
    pub fn on_complete(&self, callback: impl FnOnce(Result<(), CompletionError>) + Send + 'static) {
        let callback: Box<Callback> = Box::new(callback);
        Arc::new(Watch { completion: self.clone(), callback: Mutex::new(Some(callback)) }).look();
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Completion({})", self.run.id)
    }
}

impl IntoFuture for Completion {
    type Output = Result<(), CompletionError>;
    type IntoFuture = Completed;

    fn into_future(self) -> Completed {
        Completed { completion: self, registered: None }
    }
}

/// A future that ends with a [`Completion`]. Dropping it cancels nothing.
#[derive(Debug)]
pub struct Completed {
    completion: Completion,
    registered: Option<(SemaphorePoint, Waker)>,
}

impl Future for Completed {
    type Output = Result<(), CompletionError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(outcome) = self.completion.outcome() {
            return Poll::Ready(outcome);
        }
        let Some(point) = self.completion.run.next_point() else {
            // It has ended just now.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        };
        self.forget();
        self.registered = Some((point.clone(), cx.waker().clone()));
        // Registering wakes at once if the value was reached since the look above.
        point.semaphore.wake_when(point.value, cx.waker().clone());
        Poll::Pending
    }
}

impl Completed {
    fn forget(&mut self) {
        if let Some((point, waker)) = self.registered.take() {
            point.semaphore.forget(point.value, &waker);
        }
    }
}

impl Drop for Completed {
    /// A future that is given up leaves nothing behind.
    fn drop(&mut self) {
        self.forget();
    }
}

type Callback = dyn FnOnce(Result<(), CompletionError>) + Send;

/// Waits for a completion from one point to the next.
struct Watch {
    completion: Completion,
    callback: Mutex<Option<Box<Callback>>>,
}

impl Watch {
    pub(crate) fn look(self: &Arc<Self>) {
        let Some(outcome) = self.completion.outcome() else {
            match self.completion.run.next_point() {
                Some(point) => point.semaphore.wake_when(point.value, Waker::from(Arc::clone(self))),
                None => self.look(),
            }
            return;
        };
        let callback = self.callback.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(callback) = callback {
            // A panic is the callback's own affair, and is not to end the thread of a device.
            let _panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| callback(outcome)));
        }
    }
}

impl Wake for Watch {
    /// Whoever wakes may hold the lock of the domain, or be a device's own thread, so looking is left to a worker.
    fn wake(self: Arc<Self>) {
        let workers = Arc::clone(&self.completion.domain.workers);
        workers.call(move || self.look());
    }
}
