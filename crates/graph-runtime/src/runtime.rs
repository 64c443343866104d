//! The domain as programs hold it.

use std::{fmt, sync::Arc};

use smallvec::SmallVec;
use warpweft_core_types::{
    AllocError, BufferDesc, BufferView, CopyRegion, Deadline, Device, DeviceId, FillRegion, HostMemory,
    Launch, MemoryKind, Op, OpenError, Queue, RangeError,
};

use crate::{
    any::wait_for_any,
    completion::Completion,
    config::RuntimeConfig,
    domain::Domain,
    error::{BusyReason, MapError, RunError},
    graph::{Graph, range_error},
    guard::{ReadGuard, WriteGuard},
    hand_off::HandOff,
    node::{NodeDesc, WorkDesc},
    plan::Plan,
    run::Run,
    statistics::Statistics,
    task::HostTask,
    trace::ExecutionTrace,
    usage::Usage,
};

/// One allocation and dependency domain over devices of any backends.
///
/// Everything that is recorded in its graphs or run at once is ordered by the bytes that it uses, across devices, lanes,
/// graphs, and the host's own reads and writes. Clones stand for the same domain.
///
/// Buffers of the domain's devices may be used wherever they were allocated; what other libraries do to them, or work
/// that was put in queues directly, is not seen.
#[derive(Clone)]
pub struct Runtime {
    pub(crate) domain: Arc<Domain>,
}

/// Where memory is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryPlacement {
    /// A device's own memory.
    Device(DeviceId),
    /// Memory of the host that the device reaches too.
    HostVisible(DeviceId),
    /// The same, for bytes that the host writes once and never reads.
    Upload(DeviceId),
    /// One memory of the host that all of these devices reach, without copies.
    Shared(Vec<DeviceId>),
}

/// Memory that was allocated in a domain, as each of its devices sees it.
#[derive(Debug, Clone)]
pub struct Buffer {
    views: SmallVec<[BufferView; 1]>,
}

impl Buffer {
    /// All of it, as the first device of its placement sees it.
    pub fn view(&self) -> &BufferView {
        &self.views[0]
    }

    /// All of it, as a device of its placement sees it.
    pub fn on(&self, device: DeviceId) -> Option<&BufferView> {
        self.views.iter().find(|view| view.device() == device)
    }

    /// Its length in bytes.
    pub fn size(&self) -> u64 {
        self.view().size()
    }

    /// Bytes of it, as the first device of its placement sees them.
    ///
    /// # Errors
    ///
    /// See [`BufferView::slice`].
    pub fn slice(&self, range: std::ops::Range<u64>) -> Result<BufferView, RangeError> {
        self.view().slice(range)
    }
}

impl Runtime {
    /// Makes a domain of open devices.
    ///
    /// # Errors
    ///
    /// [`OpenError::InvalidConfig`], or what a device says when it is asked for queues.
    pub fn new(
        devices: impl IntoIterator<Item = Arc<dyn Device>>,
        config: RuntimeConfig,
    ) -> Result<Self, OpenError> {
        Ok(Self { domain: Domain::new(devices.into_iter().collect(), config)? })
    }

    /// Its devices.
    pub fn devices(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        self.domain.devices.iter().map(|entry| &entry.device)
    }

    /// Allocates zeroed memory.
    ///
    /// # Errors
    ///
    /// [`AllocError`] of the device, [`AllocError::OutOfMemory`] beyond the domain's budget, and
    /// [`AllocError::CannotImport`] where a device cannot share.
    pub fn allocate(&self, placement: &MemoryPlacement, size: u64) -> Result<Buffer, AllocError> {
        let buffer = match placement {
            MemoryPlacement::Device(device) => self.allocate_on(*device, size, MemoryKind::Device)?,
            MemoryPlacement::HostVisible(device) => {
                self.allocate_on(*device, size, MemoryKind::HostVisible)?
            }
            MemoryPlacement::Upload(device) => self.allocate_on(*device, size, MemoryKind::Upload)?,
            MemoryPlacement::Shared(devices) => self.allocate_shared(devices, size)?,
        };
        let mut state = self.domain.state();
        for view in &buffer.views {
            // New memory is nobody's, so it cannot straddle; if it did, its first use says so.
            let _known = state.memories.find(view.buffer());
        }
        state.counts.allocations += 1;
        state.counts.peak_bytes = state.counts.peak_bytes.max(state.memories.live_bytes());
        Ok(buffer)
    }

    fn allocate_on(&self, device: DeviceId, size: u64, kind: MemoryKind) -> Result<Buffer, AllocError> {
        let entry = self.entry(device)?;
        self.domain.check_budget(device, size)?;
        let buffer = entry.allocate(&BufferDesc { size, kind })?;
        Ok(Buffer { views: [BufferView::whole(buffer)].into_iter().collect() })
    }

    fn allocate_shared(&self, devices: &[DeviceId], size: u64) -> Result<Buffer, AllocError> {
        let Some((&first, others)) = devices.split_first() else {
            return Err(cannot_share(self.domain.devices[0].id, "no devices were named"));
        };
        // The strictest rule of all importers, for size and, since allocations begin at pages, for address.
        let mut multiple = 1;
        for &device in others {
            let family = self.entry(device)?.host_import();
            let family = family.ok_or_else(|| cannot_share(device, "it uses no memory of others"))?;
            multiple = multiple.max(family.alignment());
        }
        let whole = self.allocate_on(
            first,
            size.checked_next_multiple_of(multiple).unwrap_or(u64::MAX),
            MemoryKind::HostVisible,
        )?;
        let mut views: SmallVec<[BufferView; 1]> = SmallVec::new();
        let cut =
            |view: &BufferView| view.slice(0..size).map_err(|error| cannot_share(first, &error.to_string()));
        views.push(cut(whole.view())?);
        for &device in others {
            let memory = HostMemory::of_buffer(Arc::clone(whole.view().buffer()));
            let memory = memory.ok_or_else(|| cannot_share(first, "the host cannot address it"))?;
            let family = self.entry(device)?.host_import();
            let family = family.ok_or_else(|| cannot_share(device, "it uses no memory of others"))?;
            views.push(cut(&BufferView::whole(family.import(memory)?))?);
        }
        Ok(Buffer { views })
    }

    fn entry(&self, device: DeviceId) -> Result<&Arc<dyn Device>, AllocError> {
        let position = self.domain.position(device);
        let entry = position.map(|position| &self.domain.devices[position as usize].device);
        entry.ok_or_else(|| cannot_share(device, "it is not one of the runtime's devices"))
    }

    /// An empty graph.
    pub fn graph(&self) -> Graph {
        Graph::new(&self.domain)
    }

    /// Runs a single operation, behind everything before it that uses the same bytes. Does not block.
    ///
    /// # Errors
    ///
    /// See [`RunError`]; nothing runs then.
    pub fn run(&self, desc: NodeDesc<'_>) -> Result<Completion, RunError> {
        let place = match &desc.work {
            WorkDesc::Op(Op::Copy(region)) => match self.domain.copy_place(&desc, *region)? {
                Some(place) => place,
                None => return self.run_as_graph(desc),
            },
            // Work of other libraries is a node of a graph or nothing.
            WorkDesc::Captured(_) | WorkDesc::Node(_) => return self.run_as_graph(desc),
            _ => self.domain.place(&desc)?,
        };
        self.domain.run_single(&desc, place)
    }

    /// What takes several nodes, or a device's graph.
    fn run_as_graph(&self, desc: NodeDesc<'_>) -> Result<Completion, RunError> {
        let mut graph = self.graph();
        graph.add(desc)?;
        graph.run()
    }

    /// Runs a kernel.
    ///
    /// # Errors
    ///
    /// See [`RunError`]; nothing runs then.
    pub fn launch(&self, launch: Launch<'_>) -> Result<Completion, RunError> {
        self.run(NodeDesc::launch(launch))
    }

    /// Copies all of `src` to all of `dst`, wherever they are.
    ///
    /// # Errors
    ///
    /// See [`RunError`]; nothing runs then.
    pub fn copy(&self, src: &BufferView, dst: &BufferView) -> Result<Completion, RunError> {
        let region = CopyRegion::new(src, dst).map_err(|source| range_error("copy", source))?;
        self.run(NodeDesc::op(Op::Copy(region)))
    }

    /// Repeats a pattern.
    ///
    /// # Errors
    ///
    /// See [`RunError`]; nothing runs then.
    pub fn fill(&self, region: FillRegion<'_>) -> Result<Completion, RunError> {
        self.run(NodeDesc::fill(region))
    }

    /// Runs a function on a processor of the host.
    ///
    /// # Errors
    ///
    /// See [`RunError`]; nothing runs then.
    pub fn task(&self, task: &HostTask, operands: &[(BufferView, Usage)]) -> Result<Completion, RunError> {
        self.run(NodeDesc::task(task, operands))
    }

    /// Lends bytes to the host for reading: waits for work that writes them, and for other holders, until the deadline.
    /// With [`Deadline::now`] it only tries.
    ///
    /// # Errors
    ///
    /// See [`MapError`].
    pub fn read(&self, view: &BufferView, deadline: impl Into<Deadline>) -> Result<ReadGuard, MapError> {
        ReadGuard::new(&self.domain, view, deadline.into())
    }

    /// Lends bytes to the host for writing: waits for work that uses them, and for other holders, until the deadline.
    ///
    /// # Errors
    ///
    /// See [`MapError`].
    pub fn write(&self, view: &BufferView, deadline: impl Into<Deadline>) -> Result<WriteGuard, MapError> {
        WriteGuard::new(&self.domain, view, deadline.into())
    }

    /// Fills bytes with zeroes, whatever failed work has left there, so that they may be read again.
    ///
    /// # Errors
    ///
    /// See [`RunError`].
    pub fn reset(&self, view: &BufferView) -> Result<Completion, RunError> {
        self.run(NodeDesc::fill(FillRegion::bytes(view, 0)).named("reset"))
    }

    /// Lets `call` enqueue work of another library in a queue of a device, behind everything before it that uses the
    /// same bytes, and before everything behind it.
    ///
    /// Where tasks of the host or devices of other backends are under way, the host waits until what comes before has
    /// ended, at most until the deadline: the other library's stream cannot be held up by them. Else it does not wait.
    ///
    /// While `call` runs, other work that uses the bytes is [`Busy`](crate::BusyReason::HandedOff), and residents of the
    /// device give way. The bytes are taken back when it returns, also by a panic. It must leave the queue usable, and
    /// touch nothing but `operands`, as it says it does.
    ///
    /// # Errors
    ///
    /// See [`RunError`]; [`SubmitError::Unsupported`](warpweft_core_types::SubmitError::Unsupported) where the device
    /// works with no other libraries. `call` did not run then, unless its queue failed while it did.
    pub fn hand_off<R>(
        &self,
        device: DeviceId,
        operands: &[(BufferView, Usage)],
        deadline: impl Into<Deadline>,
        call: impl FnOnce(&HandOff<'_>) -> R,
    ) -> Result<(R, Completion), RunError> {
        self.domain.hand_off(device, operands, deadline.into(), call)
    }

    /// Puts a queue of the program's own, imported ones too, behind everything before it that uses these bytes: what is
    /// submitted to it from here on may use them so. No host waits. Once that is done, [`Runtime::note_queue`] tells
    /// the runtime.
    ///
    /// # Errors
    ///
    /// See [`RunError`]; the queue must be of one of the runtime's devices.
    pub fn order_queue(
        &self,
        queue: &Arc<dyn Queue>,
        operands: &[(BufferView, Usage)],
    ) -> Result<(), RunError> {
        self.domain.order_queue(queue, operands)
    }

    /// Takes what a queue of the program's own holds by now for work that uses these bytes so: everything that uses
    /// them from here on comes behind it.
    ///
    /// # Errors
    ///
    /// As [`Runtime::order_queue`].
    pub fn note_queue(
        &self,
        queue: &Arc<dyn Queue>,
        operands: &[(BufferView, Usage)],
    ) -> Result<Completion, RunError> {
        self.domain.note_queue(queue, operands)
    }

    /// Begins to record what runs; whether nobody was recording.
    ///
    /// Graphs that are prepared while a trace is being recorded have their devices note the time before and after each
    /// node, for as long as they live, which costs some of it. Of others, and of single operations, the host notes when
    /// they were handed over and when it heard of their end.
    pub fn start_trace(&self) -> bool {
        self.domain.start_trace()
    }

    /// Ends the recording, with everything that has ended by now; none if nobody was recording. Like the beginning, it
    /// blocks while devices tell their time, three seconds for each at most.
    ///
    /// # Portability
    ///
    /// Devices without a clock, or without graphs, are observed by the host.
    pub fn finish_trace(&self) -> Option<ExecutionTrace> {
        self.domain.finish_trace()
    }

    /// What it has done so far.
    pub fn statistics(&self) -> Statistics {
        let mut state = self.domain.state();
        self.domain.forget_ended(&mut state);
        let mut counts = state.counts;
        counts.in_flight = state.in_flight.len() as u64;
        counts.live_bytes = state.memories.live_bytes();
        counts.peak_bytes = counts.peak_bytes.max(counts.live_bytes);
        counts
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices: Vec<String> = self.domain.devices.iter().map(|entry| entry.id.to_string()).collect();
        write!(f, "Runtime({})", devices.join(", "))
    }
}

fn cannot_share(device: DeviceId, reason: &str) -> AllocError {
    AllocError::CannotImport { device, reason: reason.to_owned() }
}

impl Domain {
    /// Waits until what was in the way of a plan may be gone; whether there was time left.
    pub(crate) fn wait_for_room(&self, reason: &BusyReason, plan: &Plan, deadline: Deadline) -> bool {
        match reason {
            BusyReason::Leased { .. } | BusyReason::HandedOff { .. } => self.wait_for_holders(plan, deadline),
            _ => self.wait_for_an_end(deadline),
        }
    }

    /// Waits until nobody holds bytes that a plan uses. Asked again under the lock, so that no end is missed.
    fn wait_for_holders(&self, plan: &Plan, deadline: Deadline) -> bool {
        let mut state = self.state();
        while state.holder(plan).is_some() {
            if deadline.is_past() {
                return false;
            }
            state = self.wait_for_change(state, deadline.remaining());
        }
        true
    }

    /// Waits until something that is under way may have ended.
    fn wait_for_an_end(&self, deadline: Deadline) -> bool {
        if deadline.is_past() {
            return false;
        }
        let runs: Vec<Arc<Run>> = self.state().in_flight.iter().cloned().collect();
        let points: Option<Vec<_>> = runs.iter().map(|run| run.next_point()).collect();
        // One without a point that is not past has ended.
        points.is_none_or(|points| wait_for_any(&points, deadline))
    }
}
