//! A device that records what it was given, and when it was done.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::Wake,
    time::{Duration, Instant},
};

use serde::Serialize;
use warpweft_core_types::{
    Backend, BufferView, DeviceId, GraphOp, Op, Semaphore, SemaphorePoint, Submission, SubmissionId,
    SubmitError,
};

use crate::layer::{Layer, LayeredBackend, LayeredQueue, layered_backend};

/// A backend whose devices record every submission in one bounded trace.
#[derive(Debug)]
pub struct TracingBackend {
    backend: LayeredBackend<Tracing>,
    trace: Arc<Trace>,
}

impl TracingBackend {
    /// Wraps every device of `inner`; the trace keeps the last `capacity` submissions.
    pub fn new(inner: Arc<dyn Backend>, capacity: usize) -> Self {
        Self { backend: LayeredBackend::new(inner), trace: Arc::new(Trace::new(capacity)) }
    }

    /// The trace, which may be read while devices work.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    fn layer(&self, _: DeviceId) -> Tracing {
        Tracing { trace: Arc::clone(&self.trace) }
    }
}

layered_backend!(TracingBackend);

/// Submissions, the last ones up to a capacity.
#[derive(Debug)]
pub struct Trace {
    began: Instant,
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<TraceEvent>,
    /// Number of the first event that is kept; those before were dropped.
    first: u64,
}

/// One submission as the host saw it: not device time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TraceEvent {
    /// Which it is, with its queue and device.
    pub submission: SubmissionId,
    /// Its operations, such as `copy` or a kernel's name.
    pub ops: Vec<String>,
    /// Bytes that its copies and fills move.
    pub bytes: u64,
    /// When the queue had taken it, since the trace began.
    pub submitted: Duration,
    /// When its end was seen, since the trace began; `None` while it is under way or after it failed.
    pub ended: Option<Duration>,
}

impl Trace {
    fn new(capacity: usize) -> Self {
        Self { began: Instant::now(), capacity: capacity.max(1), state: Mutex::default() }
    }

    /// The submissions that are kept, oldest first.
    pub fn events(&self) -> Vec<TraceEvent> {
        self.lock().events.iter().cloned().collect()
    }

    /// How many older submissions were dropped to make room.
    pub fn dropped(&self) -> u64 {
        self.lock().first
    }

    /// The trace in the JSON form that Chrome's tracing page and Perfetto read: a process for each device, a
    /// thread for each queue, a span for each submission that has ended. Times are microseconds.
    pub fn to_chrome_json(&self) -> serde_json::Value {
        let span = |event: &TraceEvent| {
            let ended = event.ended?;
            Some(serde_json::json!({
                "name": event.ops.join(", "),
                "cat": "submission",
                "ph": "X",
                "ts": micros(event.submitted),
                "dur": micros(ended.saturating_sub(event.submitted)),
                "pid": event.submission.queue.device.to_string(),
                "tid": event.submission.queue.number,
                "args": { "submission": event.submission.index, "bytes": event.bytes },
            }))
        };
        let state = self.lock();
        let spans: Vec<_> = state.events.iter().filter_map(span).collect();
        serde_json::json!({
            "displayTimeUnit": "ns",
            "traceEvents": spans,
            "otherData": { "clock": "host", "dropped": state.first },
        })
    }

    fn add(&self, event: TraceEvent) -> u64 {
        let mut state = self.lock();
        if state.events.len() == self.capacity {
            state.events.pop_front();
            state.first += 1;
        }
        state.events.push_back(event);
        state.first + state.events.len() as u64 - 1
    }

    fn end(&self, number: u64) {
        let now = self.began.elapsed();
        let mut state = self.lock();
        let position = number.checked_sub(state.first).and_then(|position| usize::try_from(position).ok());
        if let Some(event) = position.and_then(|position| state.events.get_mut(position)) {
            event.ended = Some(now);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The layer of one device.
#[derive(Debug)]
pub(crate) struct Tracing {
    trace: Arc<Trace>,
}

impl Layer for Tracing {
    type QueueState = ();

    fn submit(
        &self,
        queue: &LayeredQueue<Self>,
        submission: &Submission<'_>,
    ) -> Result<SubmissionId, SubmitError> {
        let end = queue.device.create_semaphore(0).map_err(|error| SubmitError::Invalid {
            reason: format!("the tracer could not make a semaphore: {error}"),
        })?;
        let end = SemaphorePoint::new(&end, 1);
        // The end is signalled first, so that it is seen no later than the program sees it.
        let mut signals = vec![end.clone()];
        signals.extend_from_slice(submission.signals);
        let id = queue.inner.submit(&Submission { signals: &signals, ..*submission })?;
        let number = self.trace.add(TraceEvent {
            submission: id,
            ops: submission.ops.iter().map(name_of).collect(),
            bytes: submission.ops.iter().map(bytes_of).sum(),
            submitted: self.trace.began.elapsed(),
            ended: None,
        });
        let semaphore = Arc::downgrade(&end.semaphore);
        let seen = Seen { trace: Arc::clone(&self.trace), number, semaphore, value: end.value };
        end.semaphore.wake_when(end.value, Arc::new(seen).into());
        Ok(id)
    }
}

/// Notes the end of a submission.
struct Seen {
    trace: Arc<Trace>,
    number: u64,
    /// Weak: the semaphore holds this, not the other way round.
    semaphore: Weak<dyn Semaphore>,
    value: u64,
}

impl Wake for Seen {
    fn wake(self: Arc<Self>) {
        if self.semaphore.upgrade().is_some_and(|semaphore| semaphore.value() >= self.value) {
            self.trace.end(self.number);
        }
    }
}

fn name_of(op: &Op<'_>) -> String {
    match op {
        Op::Launch(launch) => launch.kernel().contract().name.clone(),
        _ => op.name().to_owned(),
    }
}

fn bytes_of_node(op: &GraphOp) -> u64 {
    match op {
        GraphOp::Op(op) => op.with(bytes_of),
        GraphOp::Captured(_) | GraphOp::Join => 0,
    }
}

fn bytes_of(op: &Op<'_>) -> u64 {
    match op {
        Op::Copy(copy) => copy.dst().size(),
        Op::Fill(fill) => fill.dst().size(),
        Op::Replay(graph) => graph.ops().iter().map(|op| bytes_of_node(op)).sum(),
        Op::Collective(group) => {
            group.calls().iter().filter_map(|call| call.dst()).map(BufferView::size).sum()
        }
        _ => 0,
    }
}
