//! What a runtime has done so far.

use serde::Serialize;

/// Counters of a runtime, as they were at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Statistics {
    /// Graphs that were prepared.
    pub graphs_prepared: u64,
    /// Submissions that were taken, of graphs and of single operations.
    pub submissions: u64,
    /// Submissions that are known to have ended well.
    pub completions: u64,
    /// Submissions that failed or were cancelled.
    pub failures: u64,
    /// Times a submission was refused for want of room or because bytes were held; busy slots and hand-offs are not
    /// counted.
    pub refusals: u64,
    /// Segments that were handed over again, since their queue failed for another's sake.
    pub resubmissions: u64,
    /// Submissions under way, as far as is known.
    pub in_flight: u64,
    /// Segments handed to queues of devices.
    pub segments: u64,
    /// Tasks of the host handed over.
    pub tasks: u64,
    /// Nodes handed over, those that were handed over again or skipped included.
    pub nodes: u64,
    /// Bytes of recorded copies that go over memory of the host, because no device reaches both ends; replays do not
    /// count again.
    pub staged_bytes: u64,
    /// Buffers that were allocated here.
    pub allocations: u64,
    /// Bytes in buffers that are alive, of all that the runtime has seen.
    pub live_bytes: u64,
    /// The most of them that were counted.
    pub peak_bytes: u64,
    /// Bytes of all memory that was known on devices when they were lost: nobody can tell what is in it.
    pub quarantined_bytes: u64,
}
