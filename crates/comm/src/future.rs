//! Calls in queues as futures.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use warpweft_core_types::{Reached, SubmitError};

use crate::{CommError, Enqueued};

/// A future that ends with a call in a queue. Dropping it cancels nothing.
///
/// It blocks nobody: where a queue is full or another thread has the communicator, and where the cause of a failure is
/// not known yet, it looks again with the communicator's own thread, up to 50 ms later, and rarely a second.
pub struct CallFuture {
    call: Enqueued,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// There is no point behind the call yet.
    Unmarked,
    Marked(Reached),
    /// The queue is past the call.
    Over,
    /// It has failed, and why is being found out.
    Failed(CommError),
}

impl IntoFuture for Enqueued {
    type Output = Result<(), CommError>;
    type IntoFuture = CallFuture;

    fn into_future(self) -> CallFuture {
        CallFuture { call: self, stage: Stage::Unmarked }
    }
}

impl Future for CallFuture {
    type Output = Result<(), CommError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            match &mut this.stage {
                Stage::Unmarked => match this.call.point_now() {
                    Some(Ok(None)) => this.stage = Stage::Over,
                    Some(Ok(Some(point))) => this.stage = Stage::Marked(point.into_future()),
                    Some(Err(error)) if !is_full(&error) => this.stage = Stage::Failed(error),
                    _ => return this.call.look_later(cx.waker()),
                },
                Stage::Marked(reached) => match Pin::new(reached).poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(())) => this.stage = Stage::Over,
                    Poll::Ready(Err(failure)) => this.stage = Stage::Failed(CommError::Failed(failure)),
                },
                // The keeper settles what a device has given up.
                Stage::Over => match this.call.given_up() {
                    None => return Poll::Ready(Ok(())),
                    Some(failure) => this.stage = Stage::Failed(CommError::Failed(failure)),
                },
                Stage::Failed(error) => {
                    // Before it is asked: what changes afterwards wakes this.
                    let later = this.call.look_later(cx.waker());
                    return this.call.judged(error).map_or(later, |error| Poll::Ready(Err(error)));
                }
            }
        }
    }
}

fn is_full(error: &CommError) -> bool {
    matches!(error, CommError::Submit(error) if matches!(**error, SubmitError::QueueFull { .. }))
}

impl fmt::Debug for CallFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallFuture").field("call", &self.call).field("stage", &self.stage).finish()
    }
}
