//! What ran where and when, as devices and the host tell it.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    task::Wake,
    time::{Duration, Instant},
};

use rustc_hash::FxHashMap;
use serde::Serialize;
use serde_json::{Value, json};
use warpweft_core_types::{BufferView, ClockModel, ClockSample, Deadline, DeviceId};

use crate::{
    domain::{DeviceEntry, Domain},
    graph::NodePlace,
    node::NodeId,
    plan::SegmentWork,
    run::{Run, Status},
    sync::{Mutex, MutexGuard},
};

/// How long a device has to tell its time.
const CLOCK_PATIENCE: Duration = Duration::from_secs(1);
/// Readings of a device's clock at the beginning of a trace, and again at its end.
const CLOCK_SAMPLES: usize = 3;

/// What a runtime has run, from [`Runtime::start_trace`](crate::Runtime::start_trace) on.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ExecutionTrace {
    /// In the order in which submissions were found to have ended.
    pub events: Vec<TraceEvent>,
    /// Events that had no room; they were older than all that are here.
    pub dropped: u64,
}

/// A node that ran.
#[derive(Debug, Clone, Serialize)]
pub struct TraceEvent {
    /// Its name.
    pub name: String,
    /// What it is, such as `launch` or `copy`.
    pub kind: &'static str,
    /// Its position in its graph; 0 for a single operation.
    pub node: NodeId,
    /// The number of its submission, see [`Completion::id`](crate::Completion::id).
    pub submission: u64,
    /// Where it ran; none for tasks of the host.
    pub device: Option<DeviceId>,
    /// The line of work it was in, by its number in the runtime.
    pub line: u32,
    /// When it began, from the beginning of the trace.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
    /// Who told the time.
    pub clock: TraceClock,
    /// Bytes that it wrote, or may have written.
    pub written_bytes: u64,
    /// The nodes of its submission that it came after; empty if its graph was prepared before the trace began.
    pub after: Vec<NodeId>,
    /// Whether it failed, or was skipped for another's sake.
    pub failed: bool,
}

/// Who told when a node ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TraceClock {
    /// The device, whose clock was compared with the host's.
    Device,
    /// The host, which ran it.
    Host,
    /// The host, from when it handed over the node's segment until it was told of its end: a node that ran within
    /// that time.
    Observed,
}

/// The trace of a runtime, if one is being recorded.
#[derive(Debug, Default)]
pub(crate) struct Tracer {
    active: AtomicBool,
    recording: Mutex<Option<Recording>>,
}

#[derive(Debug)]
struct Recording {
    began: Instant,
    limit: usize,
    entries: VecDeque<Entry>,
    dropped: u64,
    /// Readings of devices' clocks at the beginning, by their positions.
    clocks: BTreeMap<u32, Vec<ClockSample>>,
}

/// An event with times as they were told.
#[derive(Debug)]
struct Entry {
    event: TraceEvent,
    times: Times,
}

#[derive(Debug, Clone, Copy)]
enum Times {
    /// By a device's clock, in nanoseconds; and as the host saw it, should nothing be known of that clock.
    Device {
        device: u32,
        begin_ns: u64,
        end_ns: u64,
        observed: (Instant, Instant),
    },
    Host((Instant, Instant)),
    Observed((Instant, Instant)),
}

/// A moment that is noted once: the end of a segment, or a task's beginning and end.
#[derive(Debug, Default)]
pub(crate) struct Moments(OnceLock<(Instant, Instant)>);

impl Moments {
    pub(crate) fn note(&self, begin: Instant, end: Instant) {
        // What was noted first stays.
        let _known = self.0.set((begin, end));
    }
}

impl Wake for Moments {
    fn wake(self: Arc<Self>) {
        let now = Instant::now();
        self.note(now, now);
    }
}

impl Tracer {
    /// Whether a trace is being recorded.
    pub(crate) fn is_active(&self) -> bool {
        // Relaxed: whoever sees it late has its work in the trace a little later.
        self.active.load(Ordering::Relaxed)
    }

    /// The time, if somebody wants to know.
    pub(crate) fn now(&self) -> Option<Instant> {
        self.is_active().then(Instant::now)
    }

    fn recording(&self) -> MutexGuard<'_, Option<Recording>> {
        // Only this module's own code runs under the lock.
        self.recording.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Domain {
    /// Begins to record; whether nobody was at it.
    pub(crate) fn start_trace(&self) -> bool {
        let clocks = self.read_clocks();
        let mut recording = self.tracer.recording();
        if recording.is_some() {
            return false;
        }
        let limit = self.config.trace_events;
        *recording =
            Some(Recording { began: Instant::now(), limit, entries: VecDeque::new(), dropped: 0, clocks });
        self.tracer.active.store(true, Ordering::Relaxed);
        true
    }

    /// Ends the recording, with everything that has ended by now.
    pub(crate) fn finish_trace(&self) -> Option<ExecutionTrace> {
        self.forget_ended(&mut self.state());
        let clocks = self.read_clocks();
        self.tracer.active.store(false, Ordering::Relaxed);
        let recording = self.tracer.recording().take()?;
        let models: FxHashMap<u32, ClockModel> = recording
            .clocks
            .into_iter()
            .filter_map(|(device, mut samples)| {
                samples.extend(clocks.get(&device).into_iter().flatten());
                Some((device, ClockModel::fit(&samples)?))
            })
            .collect();
        let began = recording.began;
        let events = recording.entries.into_iter().map(|entry| entry.settled(began, &models)).collect();
        Some(ExecutionTrace { events, dropped: recording.dropped })
    }

    fn read_clocks(&self) -> BTreeMap<u32, Vec<ClockSample>> {
        let sample = |(number, entry): (u32, &DeviceEntry)| {
            let clock = entry.device.clock()?;
            let deadline = Deadline::within(CLOCK_PATIENCE);
            let samples = (0..CLOCK_SAMPLES).filter_map(|_| clock.sample(deadline).ok());
            Some((number, samples.collect()))
        };
        (0..).zip(&self.devices).filter_map(sample).collect()
    }

    /// Notes what a run that has ended did, once.
    pub(crate) fn trace_run(&self, run: &Run) {
        // Relaxed: only who is first matters.
        if !self.tracer.is_active() || run.traced.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut recording = self.tracer.recording();
        // What was handed over before belongs to nobody's recording.
        let Some((recording, submitted)) = recording.as_mut().zip(run.submitted) else { return };
        if submitted < recording.began {
            return;
        }
        let state = run.state();
        for (number, segment) in state.segments.iter().enumerate() {
            let planned = &run.plan.segments[number];
            let failed = !matches!(segment.status, Status::Done);
            let stamps = if failed { None } else { read_stamps(&run.work[number], planned.nodes.len()) };
            let noted = segment.moments.as_ref().and_then(|moments| moments.0.get().copied());
            let observed = (submitted, noted.map_or_else(Instant::now, |(_, end)| end));
            for (index, &node) in planned.nodes.iter().enumerate() {
                let times = match (&planned.place, &stamps, noted) {
                    (NodePlace::Device { device, .. }, Some(stamps), _) => {
                        let (begin_ns, end_ns) = stamps[index];
                        Times::Device { device: *device, begin_ns, end_ns, observed }
                    }
                    (NodePlace::Host, _, Some(noted)) => Times::Host(noted),
                    _ => Times::Observed(observed),
                };
                recording.push(Entry { event: self.event(run, (node, segment.point.line), failed), times });
            }
        }
    }

    /// A node's event, without its times.
    fn event(&self, run: &Run, (node, line): (u32, u32), failed: bool) -> TraceEvent {
        let recorded = &run.plan.recorded;
        let own = &recorded.nodes[node as usize];
        let written = recorded.bytes_of(node).filter(|(_, usage)| usage.writes());
        TraceEvent {
            name: own.label().to_owned(),
            kind: own.work.kind(),
            node: NodeId(node),
            submission: run.id,
            device: match own.place {
                NodePlace::Device { device, .. } => Some(self.devices[device as usize].id),
                NodePlace::Host => None,
            },
            line,
            start: Duration::ZERO,
            duration: Duration::ZERO,
            clock: TraceClock::Observed,
            written_bytes: written.map(|(bytes, _)| bytes.range.end - bytes.range.start).sum(),
            after: run.plan.after.get(node as usize).map(|after| after.to_vec()).unwrap_or_default(),
            failed,
        }
    }
}

impl Recording {
    fn push(&mut self, entry: Entry) {
        if self.entries.len() == self.limit {
            self.entries.pop_front();
            self.dropped += 1;
        }
        self.entries.push_back(entry);
    }
}

impl Entry {
    fn settled(self, trace_began: Instant, models: &FxHashMap<u32, ClockModel>) -> TraceEvent {
        let ((begin, end), clock) = match self.times {
            Times::Host(times) => (times, TraceClock::Host),
            Times::Observed(times) => (times, TraceClock::Observed),
            Times::Device { device, begin_ns, end_ns, observed } => match models.get(&device) {
                Some(model) => ((model.to_host(begin_ns).at, model.to_host(end_ns).at), TraceClock::Device),
                // Without two readings of its clock nothing is known of it.
                None => (observed, TraceClock::Observed),
            },
        };
        let start = begin.saturating_duration_since(trace_began);
        TraceEvent { start, duration: end.saturating_duration_since(begin), clock, ..self.event }
    }
}

/// What devices noted before and after each node.
fn read_stamps(work: &SegmentWork, nodes: usize) -> Option<Vec<(u64, u64)>> {
    let SegmentWork::Graph { stamps: Some(stamps), .. } = work else { return None };
    let mut bytes = vec![0; 16 * nodes];
    stamps.view.read(&mut bytes).ok()?;
    let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    Some(words.as_chunks().0.iter().map(|&[begin, end]| (begin, end)).collect())
}

/// Where a device notes the times of a segment's nodes: two words for each.
#[derive(Debug, Clone)]
pub(crate) struct Stamps {
    pub(crate) view: BufferView,
    /// The position of each node's own operation among those of its device's graph.
    pub(crate) positions: Arc<[usize]>,
}

impl ExecutionTrace {
    /// The trace in the format of Chrome's trace viewer, which [Perfetto](https://ui.perfetto.dev) opens: a process for
    /// each device and one for the host, a thread for each line of work, a slice for each node, and an arrow for each
    /// node that came after another.
    ///
    /// The format is that of the "Trace Event Format" document of the Chromium project; times are in microseconds.
    pub fn to_json(&self) -> String {
        let mut places: Vec<Option<DeviceId>> = self.events.iter().map(|event| event.device).collect();
        places.sort_unstable();
        places.dedup();
        // Process 0 is taken for nobody's by some viewers.
        let process = |device: Option<DeviceId>| places.binary_search(&device).map_or(0, |place| place + 1);
        let mut events: Vec<Value> =
            places.iter().map(|&place| name_process(place, process(place))).collect();
        let by_node: FxHashMap<(u64, NodeId), &TraceEvent> =
            self.events.iter().map(|event| ((event.submission, event.node), event)).collect();
        let mut arrows = 0_u64;
        for event in &self.events {
            events.push(slice(event, process(event.device)));
            for before in event.after.iter().filter_map(|&node| by_node.get(&(event.submission, node))) {
                arrows += 1;
                events.extend(arrow(before, event, arrows, process));
            }
        }
        let other = json!({ "dropped_events": self.dropped });
        json!({ "traceEvents": events, "displayTimeUnit": "ns", "otherData": other }).to_string()
    }
}

fn name_process(device: Option<DeviceId>, process: usize) -> Value {
    let name = device.map_or_else(|| "host".to_owned(), |device| device.to_string());
    json!({ "ph": "M", "name": "process_name", "pid": process, "args": { "name": name } })
}

fn slice(event: &TraceEvent, process: usize) -> Value {
    json!({
        "ph": "X",
        "name": event.name,
        "cat": event.kind,
        "ts": micros(event.start),
        "dur": micros(event.duration),
        "pid": process,
        "tid": event.line,
        "args": {
            "node": event.node.index(),
            "submission": event.submission,
            "written_bytes": event.written_bytes,
            "clock": event.clock,
            "failed": event.failed,
        },
    })
}

/// An arrow from the end of one slice to the beginning of another.
fn arrow(
    from: &TraceEvent,
    to: &TraceEvent,
    id: u64,
    process: impl Fn(Option<DeviceId>) -> usize,
) -> [Value; 2] {
    let end = |event: &TraceEvent, phase: &str, at: Duration| {
        json!({
            "ph": phase, "name": "after", "cat": "order", "id": id, "ts": micros(at),
            "pid": process(event.device), "tid": event.line,
        })
    };
    // A viewer ties an end to the slice that is open at its time.
    let leave = from.start + from.duration.saturating_sub(Duration::from_nanos(1));
    let mut arrival = end(to, "f", to.start);
    arrival["bp"] = json!("e");
    [end(from, "s", leave), arrival]
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
