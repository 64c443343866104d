//! Calls: what is to be done, checked, and the ways to have it done.

use std::{
    fmt,
    sync::Arc,
    task::{Poll, Waker},
    thread,
    time::Duration,
};

use smallvec::SmallVec;
use warpweft_core_types::{CollectiveCall, Deadline, GraphOp, Queue, QueueId, SemaphorePoint, SubmitError};

use crate::{
    CommError, Communicator, PersistentCall,
    error::unfinished,
    inner::{Inner, Shared, check_overlaps},
    lock::{TURN, lock_by, try_lock},
};

/// One call of a collective, with operands that were checked. Nothing is done before it is enqueued or waited for.
#[derive(Debug, Clone, Copy)]
#[must_use = "a call is made by enqueuing it or waiting for it"]
pub struct Call<'a> {
    pub(crate) comm: &'a Communicator,
    pub(crate) call: CollectiveCall<'a>,
}

impl<'a> Call<'a> {
    /// Puts it in a queue of this rank's device: behind what is there, before what comes. Nothing is waited for.
    ///
    /// # Errors
    ///
    /// See [`CommError`]. An error that comes later fails the queue, and is told by [`Enqueued::wait`].
    pub fn on(self, queue: &Arc<dyn Queue>) -> Result<Enqueued, CommError> {
        self.comm.inner.enqueue(&[self.call], queue)
    }

    /// Has it done now, and waits for it. What was enqueued before comes first.
    ///
    /// # Errors
    ///
    /// [`CommError::Timeout`] by the deadline, and the call goes on, where a device carries it out.
    ///
    /// # Portability
    ///
    /// The host engine has this thread do it where the host addresses all operands. A deadline that passes within the call
    /// ends the communicator then, since the other ranks would wait for this one: the error is [`CommError::Failed`].
    pub fn wait(self, deadline: impl Into<Deadline>) -> Result<(), CommError> {
        self.comm.inner.run(&[self.call], deadline.into())
    }

    /// It as nodes of a graph, to run one after the other; none where there is nothing to do. All ranks replay such
    /// graphs in the same order, among themselves and among other calls, see [`Communicator::replay`].
    ///
    /// # Errors
    ///
    /// [`CommError::Unsupported`] where the engine has no calls in graphs.
    pub fn nodes(self) -> Result<SmallVec<[GraphOp; 1]>, CommError> {
        self.comm.inner.nodes(&[self.call])
    }

    /// It with operands of its own, to be enqueued many times.
    ///
    /// # Errors
    ///
    /// [`CommError::Unsupported`] where no engine does it; [`CommError::Failed`] of a communicator that has failed.
    pub fn persistent(self) -> Result<PersistentCall, CommError> {
        PersistentCall::new(&self.comm.inner, &[self.call])
    }

    /// It and another, which begin together.
    pub fn and(self, other: Self) -> Calls<'a> {
        Calls { comm: self.comm, calls: SmallVec::from_slice(&[self.call, other.call]) }
    }
}

/// Calls that begin together, so that a rank can send and receive at once.
#[derive(Debug, Clone)]
#[must_use = "calls are made by enqueuing them or waiting for them"]
pub struct Calls<'a> {
    pub(crate) comm: &'a Communicator,
    pub(crate) calls: SmallVec<[CollectiveCall<'a>; 4]>,
}

impl<'a> Calls<'a> {
    /// These and one more.
    pub fn and(mut self, other: Call<'a>) -> Self {
        self.calls.push(other.call);
        self
    }

    /// As [`Call::on`].
    ///
    /// # Errors
    ///
    /// As [`Call::on`].
    pub fn on(self, queue: &Arc<dyn Queue>) -> Result<Enqueued, CommError> {
        self.comm.inner.enqueue(&self.calls, queue)
    }

    /// As [`Call::wait`].
    ///
    /// # Errors
    ///
    /// As [`Call::wait`].
    pub fn wait(self, deadline: impl Into<Deadline>) -> Result<(), CommError> {
        self.comm.inner.run(&self.calls, deadline.into())
    }

    /// As [`Call::persistent`].
    ///
    /// # Errors
    ///
    /// As [`Call::persistent`].
    pub fn persistent(self) -> Result<PersistentCall, CommError> {
        check_overlaps(&self.calls)?;
        PersistentCall::new(&self.comm.inner, &self.calls)
    }

    /// As [`Call::nodes`].
    ///
    /// # Errors
    ///
    /// As [`Call::nodes`].
    pub fn nodes(self) -> Result<SmallVec<[GraphOp; 1]>, CommError> {
        self.comm.inner.nodes(&self.calls)
    }
}

impl<'a> From<Call<'a>> for Calls<'a> {
    fn from(call: Call<'a>) -> Self {
        Self { comm: call.comm, calls: SmallVec::from_slice(&[call.call]) }
    }
}

/// A call in a queue: to be waited for by a deadline, or with `.await`. It keeps no communicator: what becomes of it can
/// be asked when that is gone.
#[derive(Clone)]
pub struct Enqueued {
    pub(crate) shared: Arc<Shared>,
    /// The queue's number.
    pub(crate) queue: u32,
    pub(crate) ticket: u64,
}

impl Enqueued {
    /// A point that is reached once the call is over, for other queues to wait for, or a future; none if it is over.
    ///
    /// # Errors
    ///
    /// The failure of the queue or the communicator; [`CommError::Submit`] while the queue is full;
    /// [`CommError::Timeout`] while the driver blocks another thread's call for longer than a second.
    pub fn point(&self) -> Result<Option<SemaphorePoint>, CommError> {
        self.point_by(Deadline::within(TURN))
    }

    /// Waits until the call is over.
    ///
    /// # Errors
    ///
    /// [`CommError::Timeout`] by the deadline, and the call goes on; [`CommError::Failed`].
    pub fn wait(&self, deadline: impl Into<Deadline>) -> Result<(), CommError> {
        let deadline = deadline.into();
        let late = |error| unfinished(error, self.ticket, self.text());
        let outcome = match self.point_with_room(deadline)? {
            None => Ok(()),
            Some(point) => point.wait(deadline).map_err(|error| self.told(late(error))),
        };
        if let Some(inner) = self.inner() {
            inner.look();
        }
        outcome.and_then(|()| self.outcome())
    }

    /// The communicator, if there still is one.
    fn inner(&self) -> Option<Arc<Inner>> {
        self.shared.inner.upgrade()
    }

    /// Why a device gave up, if one did.
    pub(crate) fn given_up(&self) -> Option<Arc<warpweft_core_types::Failure>> {
        self.inner()?.given_up()
    }

    /// What has become of the call, which is over.
    pub(crate) fn outcome(&self) -> Result<(), CommError> {
        self.inner().map_or(Ok(()), |inner| inner.outcome())
    }

    fn queue(&self) -> QueueId {
        QueueId { device: self.shared.device, number: self.queue }
    }

    fn text(&self) -> String {
        format!("a call on {}", self.queue())
    }

    fn point_by(&self, deadline: Deadline) -> Result<Option<SemaphorePoint>, CommError> {
        let late = || CommError::Timeout { number: self.ticket, op: self.text() };
        // The lock is free again before anything is told.
        let point =
            lock_by(&self.shared.state, deadline).ok_or_else(late)?.lines.point(self.queue, self.ticket);
        point.map_err(|error| self.told(error))
    }

    /// A point, if nobody else has the queues; it waits for nothing.
    pub(crate) fn point_now(&self) -> Option<Result<Option<SemaphorePoint>, CommError>> {
        Some(try_lock(&self.shared.state)?.lines.point(self.queue, self.ticket))
    }

    /// Has the communicator's own thread wake somebody when it has looked once more; whoever outlives the communicator is
    /// woken at once.
    pub(crate) fn look_later<T>(&self, waker: &Waker) -> Poll<T> {
        match self.inner() {
            Some(inner) => inner.bell.look_for(waker),
            None => waker.wake_by_ref(),
        }
        Poll::Pending
    }

    /// What is told of an error, once it is known.
    pub(crate) fn judged(&self, error: &CommError) -> Option<CommError> {
        self.inner().map_or_else(|| Some(error.clone()), |inner| inner.judged(error))
    }

    /// A point, once there is room for it in the queue.
    fn point_with_room(&self, deadline: Deadline) -> Result<Option<SemaphorePoint>, CommError> {
        loop {
            match self.point_by(deadline) {
                Err(CommError::Submit(error))
                    if matches!(*error, SubmitError::QueueFull { .. }) && !deadline.is_past() =>
                {
                    thread::sleep(FULL.min(deadline.remaining()));
                }
                point => return point,
            }
        }
    }

    fn told(&self, error: CommError) -> CommError {
        match self.inner() {
            Some(inner) => inner.told(error),
            None => error,
        }
    }
}

impl fmt::Debug for Enqueued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Enqueued")
            .field("queue", &self.queue())
            .field("ticket", &self.ticket)
            .finish_non_exhaustive()
    }
}

/// How often a queue is asked whether it is full still. Nothing tells when it has room.
const FULL: Duration = Duration::from_micros(200);
