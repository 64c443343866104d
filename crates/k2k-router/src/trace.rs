//! What handlers did when, for people to look at.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use serde_json::{Value, json};
use warpweft_core_types::DeviceId;

use crate::actor::ActorId;

/// One run of a handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    /// Whose handler.
    pub(crate) actor: ActorId,
    /// Who had sent the message.
    pub(crate) source: ActorId,
    /// The message's kind.
    pub(crate) kind: u32,
    /// When it began, counted from the system's start.
    pub(crate) began: Duration,
    /// How long it took.
    pub(crate) took: Duration,
}

/// The latest spans of an executor.
#[derive(Debug)]
pub(crate) struct Spans {
    capacity: usize,
    spans: Mutex<VecDeque<Span>>,
}

impl Spans {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, spans: Mutex::default() }
    }

    pub(crate) const fn is_on(&self) -> bool {
        self.capacity > 0
    }

    pub(crate) fn add(&self, span: Span) {
        // Nothing panics under the lock, here and below.
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        if spans.len() >= self.capacity {
            spans.pop_front();
        }
        spans.push_back(span);
    }

    pub(crate) fn all(&self) -> Vec<Span> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// Spans as Chrome's tracing page and Perfetto read them: a process for each device, a thread for each executor.
pub(crate) fn to_chrome(executors: &[(DeviceId, Vec<Span>)]) -> Value {
    let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
    let mut events = Vec::new();
    for (thread, (device, spans)) in executors.iter().enumerate() {
        let process = device.ordinal;
        events.push(json!({
            "ph": "M", "name": "process_name", "pid": process, "args": { "name": device.to_string() },
        }));
        events.extend(spans.iter().map(|span| {
            json!({
                "ph": "X", "cat": "handler", "pid": process, "tid": thread,
                "name": format!("{} kind {}", span.actor, span.kind),
                "ts": micros(span.began), "dur": micros(span.took),
                "args": { "source": span.source.to_string() },
            })
        }));
    }
    json!({ "traceEvents": events })
}
