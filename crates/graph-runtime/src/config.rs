//! What a runtime is made with.

use std::thread;

use warpweft_core_types::{Bytes, OpenError};

/// Limits of a [`Runtime`](crate::Runtime), fixed when it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuntimeConfig {
    /// Queues on each device, at least 1: work that nothing orders goes to different ones.
    pub lanes: usize,
    /// Submissions under way at once, at least 1; what comes beyond is [`Busy`](crate::BusyReason::Capacity).
    pub max_submissions: usize,
    /// Submissions of one prepared graph under way at once, at least 1.
    pub graph_slots: usize,
    /// Threads for tasks of the host, at least 1. They start with the first task.
    pub workers: usize,
    /// The most bytes that buffers known to the runtime may have while it allocates more, memory for copies over the host
    /// included; buffers from elsewhere count once they are used. `None` for as much as devices have.
    pub memory_budget: Option<Bytes>,
    /// Events that a trace holds; the oldest go first.
    pub trace_events: usize,
}

impl Default for RuntimeConfig {
    /// Four lanes on each device, 256 submissions, two slots for each graph, a worker for each core but at most 4, no
    /// budget, and traces of 65,536 events.
    fn default() -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            lanes: 4,
            max_submissions: 256,
            graph_slots: 2,
            workers: cores.min(4),
            memory_budget: None,
            trace_events: 1 << 16,
        }
    }
}

impl RuntimeConfig {
    pub(crate) fn check(&self) -> Result<(), OpenError> {
        let counts = [
            ("lanes", self.lanes),
            ("max_submissions", self.max_submissions),
            ("graph_slots", self.graph_slots),
            ("workers", self.workers),
            ("trace_events", self.trace_events),
        ];
        match counts.into_iter().find(|(_, count)| *count == 0) {
            Some((name, _)) => {
                Err(OpenError::InvalidConfig { reason: format!("{name} is 0 and must be at least 1") })
            }
            None => Ok(()),
        }
    }
}
