//! What a runtime shares: devices, their lines, memories, and what is under way.

use std::{
    collections::VecDeque,
    ops::{Deref, DerefMut},
    sync::Arc,
    thread,
    time::Duration,
};

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use warpweft_core_types::{
    AllocError, BufferView, CopyRegion, Device, DeviceId, GraphOp, Op, OpenError, Queue, QueueDesc, Semaphore,
};

use crate::{
    config::RuntimeConfig,
    error::RecordError,
    graph::NodePlace,
    later::Held,
    memory::{Bytes, Memories, Point},
    node::{NodeDesc, WorkDesc},
    run::{Answer, Look, Run},
    statistics::Statistics,
    sync::{Condvar, Mutex, MutexGuard},
    trace::Tracer,
    workers::Workers,
};

/// Submissions a queue holds: as many as there are. What is under way at once is bounded in other ways, and a graph of
/// which a queue takes a part alone would be broken off.
const QUEUE_CAPACITY: usize = usize::MAX;

/// How long a thread that sees work end waits at once.
const DRAIN_STEP: Duration = Duration::from_secs(1);

/// One allocation and dependency domain.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) devices: Vec<DeviceEntry>,
    pub(crate) config: RuntimeConfig,
    pub(crate) workers: Arc<Workers>,
    state: Mutex<State>,
    pub(crate) tracer: Tracer,
    /// A lease has ended, or a failure was settled.
    pub(crate) changed: Condvar,
}

/// The domain's state, locked. What comes of it that concerns programs is done when the lock has been given back.
pub(crate) struct StateGuard<'a> {
    state: MutexGuard<'a, State>,
    /// Behind the lock, since fields go in order.
    held: Held,
}

impl Deref for StateGuard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

/// A device of the domain.
#[derive(Debug)]
pub(crate) struct DeviceEntry {
    pub(crate) id: DeviceId,
    pub(crate) device: Arc<dyn Device>,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) memories: Memories,
    pub(crate) lines: Vec<Line>,
    /// Lines of tasks that have ended.
    pub(crate) free_tasks: Vec<u32>,
    /// Lines of marks that have been passed, by the position of their device.
    pub(crate) free_guests: FxHashMap<u32, Vec<u32>>,
    /// In the order of submission.
    pub(crate) in_flight: VecDeque<Arc<Run>>,
    /// Points that were not reached before their lines failed, for those who still wait for them.
    pub(crate) lost: FxHashSet<Point>,
    /// Lines of which something has failed and that have not been replaced.
    pub(crate) failed_lines: FxHashSet<u32>,
    /// How many runs have to be noted as under way before the oldest is looked at.
    pub(crate) look_from: usize,
    pub(crate) next_run: u64,
    /// Where work that nothing orders goes next.
    pub(crate) turn: usize,
    pub(crate) counts: Statistics,
}

/// A line of work, in which everything ends in order: a queue, or one task of the host after another.
///
/// Its values never start again, also when its semaphore is replaced after a failure.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) semaphore: Arc<dyn Semaphore>,
    /// The last value that was given out.
    pub(crate) assigned: u64,
    /// A value that is known to be past.
    pub(crate) reached: u64,
    pub(crate) kind: LineKind,
}

#[derive(Debug)]
pub(crate) enum LineKind {
    Lane {
        device: u32,
        queue: Arc<dyn Queue>,
    },
    Task,
    /// A mark in a queue of the program's own, on a device by its position.
    Guest {
        device: u32,
    },
}

impl Line {
    /// A queue whose values go on from `value`.
    pub(crate) fn lane(number: u32, device: &dyn Device, value: u64) -> Result<Self, OpenError> {
        let queue = device.create_queue(&QueueDesc { capacity: QUEUE_CAPACITY })?;
        let semaphore = device.create_semaphore(value)?;
        let kind = LineKind::Lane { device: number, queue };
        Ok(Self { semaphore, assigned: value, reached: value, kind })
    }

    /// A line for tasks of the host.
    pub(crate) fn task(device: &dyn Device, value: u64) -> Result<Self, OpenError> {
        let semaphore = device.create_semaphore(value)?;
        Ok(Self { semaphore, assigned: value, reached: value, kind: LineKind::Task })
    }

    /// A line for marks in queues of others.
    pub(crate) fn guest(number: u32, device: &dyn Device, value: u64) -> Result<Self, OpenError> {
        let semaphore = device.create_semaphore(value)?;
        Ok(Self { semaphore, assigned: value, reached: value, kind: LineKind::Guest { device: number } })
    }
    /// Whether a value is past, as far as is known without asking the device.
    pub(crate) fn is_known_past(&self, value: u64) -> bool {
        self.reached >= value
    }

    /// Whether a value is past; asks the device.
    pub(crate) fn is_past(&mut self, value: u64) -> bool {
        if self.reached < value {
            self.reached = self.reached.max(self.semaphore.value());
        }
        self.reached >= value
    }
}

impl Domain {
    pub(crate) fn new(devices: Vec<Arc<dyn Device>>, config: RuntimeConfig) -> Result<Arc<Self>, OpenError> {
        config.check()?;
        if devices.is_empty() {
            return Err(OpenError::InvalidConfig {
                reason: "a runtime needs at least one device".to_owned(),
            });
        }
        let devices: Vec<DeviceEntry> =
            devices.into_iter().map(|device| DeviceEntry { id: device.info().id, device }).collect();
        for (position, entry) in devices.iter().enumerate() {
            if devices[..position].iter().any(|other| other.id == entry.id) {
                return Err(OpenError::InvalidConfig { reason: format!("{} is there twice", entry.id) });
            }
        }
        let mut lines = Vec::new();
        for (number, entry) in (0..).zip(&devices) {
            for _ in 0..config.lanes {
                lines.push(Line::lane(number, entry.device.as_ref(), 0)?);
            }
        }
        let state = State { lines, ..State::default() };
        Ok(Arc::new(Self {
            devices,
            config,
            workers: Workers::new(config.workers),
            tracer: Tracer::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }))
    }

    /// One whose memories are all there is to it.
    #[cfg(all(test, loom))]
    pub(crate) fn without_devices() -> Arc<Self> {
        let config = RuntimeConfig::default();
        Arc::new(Self {
            devices: Vec::new(),
            config,
            workers: Workers::new(0),
            tracer: Tracer::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// A line for tasks of the host, whose semaphore is of a device that is not lost.
    pub(crate) fn new_task_line(&self, value: u64) -> Result<Line, OpenError> {
        let alive = self.devices.iter().find(|entry| entry.device.failure().is_none());
        Line::task(alive.unwrap_or(&self.devices[0]).device.as_ref(), value)
    }

    pub(crate) fn state(&self) -> StateGuard<'_> {
        let held = Held::new();
        // Code of devices that runs under it does not panic, and ours leaves nothing half done.
        let state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        StateGuard { state, held }
    }

    /// Gives the lock away until a lease has ended, or time is up.
    pub(crate) fn wait_for_change<'a>(
        &self,
        StateGuard { state, held }: StateGuard<'a>,
        remaining: Duration,
    ) -> StateGuard<'a> {
        let waited = self.changed.wait_timeout(state, remaining);
        StateGuard { state: waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0, held }
    }

    /// Looks at a run; one that has ended goes into the trace.
    pub(crate) fn look(&self, run: &Run) -> Look {
        self.traced(run, run.look())
    }

    /// The same for who holds the lock: what is known of its lines is not asked for again, and what is heard is noted.
    pub(crate) fn look_in(&self, state: &mut State, run: &Run) -> Look {
        let look = run.look_by(|segment| {
            let line = &mut state.lines[segment.point.line as usize];
            if line.is_known_past(segment.point.value) {
                return Answer::Past;
            }
            segment.ask(|segment| {
                let value = segment.value();
                line.reached = line.reached.max(value);
                value
            })
        });
        self.traced(run, look)
    }

    /// The same without asking anybody.
    pub(crate) fn is_known_to_have_ended(&self, state: &State, run: &Run) -> bool {
        let look = run.look_by(|segment| {
            let line = &state.lines[segment.point.line as usize];
            if line.is_known_past(segment.point.value) { Answer::Past } else { Answer::UnderWay }
        });
        self.traced(run, look) == Look::Ended
    }

    fn traced(&self, run: &Run, look: Look) -> Look {
        if look == Look::Ended {
            self.trace_run(run);
        }
        look
    }

    /// Whether a run has ended, well or not. Settles what has failed.
    pub(crate) fn has_ended(&self, run: &Run) -> bool {
        loop {
            match self.look(run) {
                Look::UnderWay => return false,
                Look::Failing => self.settle(&mut self.state()),
                Look::Ended => return true,
            }
        }
    }

    /// The same for who holds the lock.
    pub(crate) fn has_ended_in(&self, state: &mut State, run: &Run) -> bool {
        loop {
            match self.look_in(state, run) {
                Look::UnderWay => return false,
                Look::Failing => self.settle(state),
                Look::Ended => return true,
            }
        }
    }

    /// A device's position.
    pub(crate) fn position(&self, device: DeviceId) -> Option<u32> {
        let position = self.devices.iter().position(|entry| entry.id == device)?;
        u32::try_from(position).ok()
    }

    /// The runtime's number of a view's memory, and where in it the view's buffer begins.
    pub(crate) fn memory_of(&self, view: &BufferView, name: &str) -> Result<(u32, u64), RecordError> {
        self.memory_in(&mut self.state(), view, name)
    }

    fn memory_in(&self, state: &mut State, view: &BufferView, name: &str) -> Result<(u32, u64), RecordError> {
        // Of what is known the device was looked up before.
        if let Some(known) = state.memories.known(view.buffer()) {
            return Ok(known);
        }
        self.known(view.device(), name)?;
        let found = state.memories.find(view.buffer());
        found.map_err(|_| RecordError::Straddles { node: name.to_owned() })
    }

    /// A view as bytes of one of the runtime's memories.
    pub(crate) fn bytes_of(&self, view: &BufferView, name: &str) -> Result<Bytes, RecordError> {
        self.bytes_in(&mut self.state(), view, name)
    }

    /// The same for who holds the lock.
    pub(crate) fn bytes_in(
        &self,
        state: &mut State,
        view: &BufferView,
        name: &str,
    ) -> Result<Bytes, RecordError> {
        let (memory, base) = self.memory_in(state, view, name)?;
        let start = base + view.offset();
        Ok(Bytes { memory, range: start..start + view.size() })
    }

    fn known(&self, device: DeviceId, name: &str) -> Result<u32, RecordError> {
        self.position(device).ok_or_else(|| RecordError::UnknownDevice { node: name.to_owned(), device })
    }

    /// Where a node runs that is no copy.
    pub(crate) fn place(&self, desc: &NodeDesc<'_>) -> Result<NodePlace, RecordError> {
        let name = desc.label();
        let mut first = None;
        let mut note = |view: &BufferView| {
            first.get_or_insert(view.device());
        };
        let own = match &desc.work {
            WorkDesc::Task(_, operands) => {
                let hidden = operands.iter().find(|(view, _)| !view.buffer().kind().is_host_visible());
                return match hidden {
                    None => Ok(NodePlace::Host),
                    Some((view, _)) => {
                        Err(RecordError::NotHostVisible { node: name.to_owned(), device: view.device() })
                    }
                };
            }
            WorkDesc::Op(Op::Replay(_)) => {
                return Err(RecordError::NotANode { node: name.to_owned(), what: "replay" });
            }
            WorkDesc::Op(Op::Launch(launch)) => Some(launch.kernel().device()),
            WorkDesc::Captured(work) => Some(work.device()),
            WorkDesc::Node(GraphOp::Captured(work)) => Some(work.device()),
            WorkDesc::Node(op) => {
                op.for_each_access(&mut |view, _| note(view));
                first
            }
            WorkDesc::Op(op) => {
                op.for_each_access(|view, _| note(view));
                first
            }
        };
        // A kernel, and work that was captured, is where it is; fills and collectives can be said to be elsewhere.
        let fixed = matches!(
            desc.work,
            WorkDesc::Op(Op::Launch(_)) | WorkDesc::Captured(_) | WorkDesc::Node(GraphOp::Captured(_))
        );
        let device = if fixed { own } else { desc.device.or(own) };
        let device = device.unwrap_or(self.devices[0].id);
        Ok(NodePlace::Device { device: self.known(device, name)?, lane: desc.lane })
    }

    /// The device that can do a copy alone, if there is one.
    pub(crate) fn copy_place(
        &self,
        desc: &NodeDesc<'_>,
        region: CopyRegion<'_>,
    ) -> Result<Option<NodePlace>, RecordError> {
        let name = desc.label();
        let (src, dst) = (region.src(), region.dst());
        let candidates: SmallVec<[DeviceId; 2]> = match desc.device {
            Some(device) => [device].into_iter().collect(),
            // Whoever has the bytes pushes them: writes to a peer need no answer.
            None => [src.device(), dst.device()].into_iter().collect(),
        };
        for view in [src, dst] {
            self.known(view.device(), name)?;
        }
        for candidate in candidates {
            let position = self.known(candidate, name)?;
            let device = self.devices[position as usize].device.as_ref();
            if reaches(device, src.device(), false) && reaches(device, dst.device(), true) {
                return Ok(Some(NodePlace::Device { device: position, lane: desc.lane }));
            }
        }
        Ok(None)
    }

    /// Memory that the runtime has not given out yet.
    pub(crate) fn check_budget(&self, device: DeviceId, size: u64) -> Result<(), AllocError> {
        let Some(budget) = self.config.memory_budget else { return Ok(()) };
        let live = self.state().memories.live_bytes();
        if live.saturating_add(size) <= budget.0 {
            return Ok(());
        }
        let available = warpweft_core_types::Bytes(budget.0.saturating_sub(live));
        let requested = warpweft_core_types::Bytes(size);
        Err(AllocError::OutOfMemory { device, requested, available, capacity: budget })
    }

    /// Sees everything end.
    fn drain(&self) {
        loop {
            let mut state = self.state();
            self.forget_ended(&mut state);
            let Some(oldest) = state.in_flight.front().cloned() else { return };
            drop(state);
            if let Some(point) = oldest.next_point() {
                // However it ends, or if time is up, it is looked at again.
                let _looked_at = point.wait(DRAIN_STEP);
            }
        }
    }
}

impl Drop for Domain {
    /// Dropping cancels nothing: what is under way has a thread that sees it end, and holds devices and queues until
    /// then.
    fn drop(&mut self) {
        self.forget_ended(&mut self.state());
        if self.state().in_flight.is_empty() {
            return self.workers.close();
        }
        let rest = Self {
            devices: std::mem::take(&mut self.devices),
            config: self.config,
            workers: Arc::clone(&self.workers),
            tracer: Tracer::default(),
            state: Mutex::new(std::mem::take(&mut *self.state())),
            changed: Condvar::new(),
        };
        let rest = Arc::new(rest);
        let own = Arc::clone(&rest);
        let drain = move || own.drain();
        if let Err(error) = thread::Builder::new().name("warpweft-drain".to_owned()).spawn(drain) {
            tracing::warn!(%error, "work under way loses its devices to nobody: they are kept for good");
            std::mem::forget(rest);
        }
    }
}

/// Whether a device's queues read or write memory of another.
pub(crate) fn reaches(device: &dyn Device, memory: DeviceId, writes: bool) -> bool {
    if device.info().id == memory {
        return true;
    }
    if device.info().id.backend != memory.backend {
        return false;
    }
    device.peers().is_some_and(|peers| {
        let access = peers.access(memory);
        if writes { access.write } else { access.read }
    })
}

impl State {
    pub(crate) fn line(&mut self, point: Point) -> &mut Line {
        &mut self.lines[point.line as usize]
    }
}
