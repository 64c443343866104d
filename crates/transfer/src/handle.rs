//! A copy that was started.

use std::sync::Arc;

use warpweft_core_types::{Bytes, Deadline, Failure, Reached, SemaphorePoint};

use crate::{Route, TransferError, driver::Canceller, lanes::Lane};

/// A started copy: wait for it, poll it, `.await` it, or watch it. Dropping it cancels nothing.
#[derive(Debug)]
pub struct CopyHandle {
    pub(crate) route: Arc<Route>,
    /// The last hop's lane.
    pub(crate) lane: Lane,
    pub(crate) chunks: u64,
    pub(crate) chunk_bytes: u64,
    pub(crate) total: u64,
    pub(crate) canceller: Option<Canceller>,
}

/// How far a copy has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyProgress {
    /// Bytes that have arrived.
    pub done: Bytes,
    /// Bytes in all.
    pub total: Bytes,
}

impl CopyHandle {
    /// Blocks until all bytes have arrived.
    ///
    /// # Errors
    ///
    /// [`TransferError::Wait`]: by the deadline (the copy goes on), or because the copy failed.
    pub fn wait(&self, deadline: impl Into<Deadline>) -> Result<(), TransferError> {
        Ok(self.done().wait(deadline)?)
    }

    /// Whether all bytes have arrived; does not block.
    ///
    /// # Errors
    ///
    /// The failure that ended the copy.
    pub fn poll(&self) -> Result<bool, Arc<Failure>> {
        self.done().poll()
    }

    /// The point that is reached when all bytes have arrived, for other submissions to wait for.
    pub fn done(&self) -> SemaphorePoint {
        self.lane.done(self.chunks)
    }

    /// How far it has come, in whole chunks.
    pub fn progress(&self) -> CopyProgress {
        let chunks = self.lane.count().min(self.chunks);
        CopyProgress { done: Bytes((chunks * self.chunk_bytes).min(self.total)), total: Bytes(self.total) }
    }

    /// The way the bytes take.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Drops the chunks that were not handed to a device yet. Once those that were have ended, so that nothing
    /// of the copy can arrive any more, it fails with [`Failure::Cancelled`]. A copy that was handed over
    /// whole runs to its end.
    ///
    /// Says whether there was anything to cancel.
    pub fn cancel(&self) -> bool {
        if let Some(canceller) = &self.canceller {
            canceller.cancel();
        }
        self.canceller.is_some()
    }
}

impl IntoFuture for CopyHandle {
    type Output = Result<(), Arc<Failure>>;
    type IntoFuture = Reached;

    fn into_future(self) -> Reached {
        self.done().into_future()
    }
}
