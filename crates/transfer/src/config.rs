//! How copies are cut up, and what one copy may be asked for.

use std::time::Duration;

use warpweft_core_types::{Bytes, SemaphorePoint};

use crate::TransferError;

/// How a [`Transfer`](crate::Transfer) cuts copies into chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferConfig {
    /// Size of a chunk on routes that pass through memory between source and destination, at most 1 TiB.
    pub chunk: Bytes,
    /// Chunks that fit between two hops: the pipeline's depth, at least 1. Two let both hops move at once.
    pub slots: u32,
    /// Size of a chunk on direct routes, which need no memory in between; only progress depends on it.
    pub direct_chunk: Bytes,
    /// Chunks handed to the devices ahead of their completion, at least `slots`. A copy that is cancelled
    /// or runs out of time still finishes these.
    pub ahead: u32,
}

impl Default for TransferConfig {
    /// 4 MiB chunks in 4 slots; 256 MiB on direct routes; 16 chunks ahead.
    fn default() -> Self {
        Self { chunk: Bytes::mib(4), slots: 4, direct_chunk: Bytes::mib(256), ahead: 16 }
    }
}

impl TransferConfig {
    /// Beyond any memory, and far from overflow.
    const LARGEST: Bytes = Bytes::gib(1024);

    pub(crate) fn check(&self) -> Result<(), TransferError> {
        let invalid = |reason: &str| Err(TransferError::InvalidConfig { reason: reason.to_owned() });
        if self.chunk.0 == 0 || self.direct_chunk.0 == 0 {
            return invalid("chunks must hold at least one byte");
        }
        if self.chunk > Self::LARGEST {
            return invalid("chunks must not exceed 1 TiB");
        }
        if self.slots == 0 {
            return invalid("there must be at least one slot");
        }
        if self.ahead < self.slots {
            return invalid("`ahead` must be at least `slots`");
        }
        Ok(())
    }
}

/// What one copy may be asked for beyond its two ranges.
#[derive(Debug, Clone, Default)]
pub struct CopyOptions {
    /// Points that must be reached before the first byte is read or written.
    pub after: Vec<SemaphorePoint>,
    /// Time for the whole copy. When it is over, chunks that have not started are dropped, and once those that
    /// have are through, so that nothing of the copy can arrive any more, it fails with
    /// [`Failure::DeadlineExceeded`](warpweft_core_types::Failure::DeadlineExceeded).
    pub time_limit: Option<Duration>,
}
