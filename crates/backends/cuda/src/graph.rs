//! CUDA graphs of explicit nodes: operations of the seam, and work of other libraries as child graphs. Collectives are
//! such work: they are captured when the graph is prepared, and keep the operands that they have then.
//!
//! An executable graph of the driver has one set of operands, and a [`PreparedGraph`] is a value with operands
//! of its own. So the operands that the driver has are remembered, and before a launch those that differ are
//! changed. The driver keeps launches that are under way as they were.

use std::{
    any::Any,
    fmt, ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::sys::{
    CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUgraph_st, CUgraphExec_st, CUgraphNode, CUgraphNode_st,
    CUmemorytype,
};
use smallvec::SmallVec;
use warpweft_core_types::{
    Access, BufferView, CapturedWork, CollectiveGroup, CopyRegion, DeviceId, DriverError, FillRegion, Graph,
    GraphError, GraphNode, GraphOp, Launch, NativeCommunicator, Op, OwnedOp, PreparedGraph, SubmitError,
    TimestampRegion,
};
use warpweft_polled::KeepAlive;

use crate::{
    check::check_op,
    clock::Clock,
    communicator::CudaCommunicator,
    context::Context,
    device::CudaDevice,
    driver::{Handle, created},
    interop,
    memory::address_of,
    module::CudaKernel,
    peer::PeerTable,
    stream::Stream,
    work::{self, Parameters, Pattern},
};

/// What a device prepared: the driver's graph, ready to launch.
pub(crate) struct CudaGraph {
    /// Keeps the device the same while a graph of it is there.
    _owner: Arc<CudaDevice>,
    context: Arc<Context>,
    peers: Arc<PeerTable>,
    clock: Arc<Clock>,
    nodes: Vec<Handle<CUgraphNode_st>>,
    /// Where the operands of each node's copy or fill are, which the driver ties it to.
    places: Vec<Places>,
    prepared: Mutex<Prepared>,
    /// Communicators of its collectives, each once. Behind the driver's graph, which has work of theirs.
    communicators: Vec<Arc<dyn NativeCommunicator>>,
    /// What its collectives use.
    _kept: KeepAlive,
}

/// The driver's graph as it is now.
struct Prepared {
    /// Nothing once a communicator of it was aborted.
    executable: Option<Executable>,
    /// The operations that the executable graph has now.
    applied: Vec<Arc<GraphOp>>,
    /// The value that was launched last, if they are its: one that is replayed again and again has nothing to change.
    last: Option<Arc<[Arc<GraphOp>]>>,
}

impl Prepared {
    /// Whether the executable graph has these operations, as far as is known at once.
    fn has(&self, ops: &Arc<[Arc<GraphOp>]>) -> bool {
        self.last.as_ref().is_some_and(|last| Arc::ptr_eq(last, ops))
    }
}

/// A graph that can be launched.
struct Executable {
    context: Arc<Context>,
    raw: Handle<CUgraphExec_st>,
    /// The graph that it was made of: its nodes are named by this graph's handles.
    _template: Template,
    /// What its collectives were captured in, which NCCL has tied memory of theirs to.
    _captured: Vec<Template>,
}

impl Drop for Executable {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        // SAFETY: instantiated by `prepare`, destroyed once; the driver keeps it for launches that are under way.
        let _destroyed = unsafe { self.context.driver.graph_exec_destroy(self.raw.raw()) };
    }
}

/// A graph of the driver that is not executable.
pub(crate) struct Template {
    context: Arc<Context>,
    raw: Handle<CUgraph_st>,
}

/// Where memory is, as far as the driver asks when the operands of a node change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Host,
    Device(DeviceId),
}

/// The places of what a copy or a fill reads and writes; kernels are free in theirs.
type Places = SmallVec<[Place; 2]>;

fn places(op: &GraphOp) -> Places {
    let place = |view: &BufferView| match view.buffer().kind().is_host_visible() {
        true => Place::Host,
        false => Place::Device(view.device()),
    };
    let GraphOp::Op(op) = op else { return Places::new() };
    op.with(|op| match op {
        Op::Copy(region) => [place(region.src()), place(region.dst())].into(),
        Op::Fill(region) => std::iter::once(place(region.dst())).collect(),
        _ => Places::new(),
    })
}

/// Why a node was not added or changed.
enum Refusal {
    /// An operand is not ours, or the driver has no such node.
    Cannot(String),
    Driver(DriverError),
}

impl From<DriverError> for Refusal {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

fn not_ours() -> Refusal {
    Refusal::Cannot("an operand does not belong to a CUDA device".to_owned())
}

impl CudaGraph {
    pub(crate) fn prepare(owner: &Arc<CudaDevice>, nodes: &[GraphNode]) -> Result<Self, GraphError> {
        let (context, peers, clock) = owner.surroundings();
        if let Some(failure) = context.failure() {
            return Err(GraphError::Failed(failure));
        }
        for (node, entry) in nodes.iter().enumerate() {
            check(context, peers, node, &entry.op)?;
        }
        let failed = |error| driver_failed(context, error);
        let mut kept = KeepAlive::default();
        let captured = captured(context, nodes, &mut kept)?;
        let template = Template::create(context).map_err(failed)?;
        let _current = context.enter().map_err(failed)?;
        let mut handles: Vec<Handle<CUgraphNode_st>> = Vec::with_capacity(nodes.len());
        for (node, entry) in nodes.iter().enumerate() {
            // `PreparedGraph::new` checked that edges come from earlier nodes.
            let after: SmallVec<[CUgraphNode; 4]> =
                entry.after.iter().filter_map(|&before| handles.get(before)).map(|node| node.raw()).collect();
            let added = match &captured[node] {
                Some(captured) => template.add_child(captured, &after),
                None => template.add(&entry.op, &after, clock),
            };
            handles.push(added.map_err(|refusal| refused(context, node, refusal))?);
        }
        let raw = template.instantiate().map_err(failed)?;
        let captured = captured.into_iter().flatten().collect();
        let executable =
            Executable { context: Arc::clone(context), raw, _template: template, _captured: captured };
        let applied = nodes.iter().map(|node| Arc::clone(&node.op)).collect();
        let mut communicators: Vec<Arc<dyn NativeCommunicator>> = Vec::new();
        for_each_group(nodes, |group| {
            if !communicators.iter().any(|known| Arc::ptr_eq(known, group.communicator())) {
                communicators.push(Arc::clone(group.communicator()));
            }
        });
        Ok(Self {
            _owner: Arc::clone(owner),
            context: Arc::clone(context),
            peers: Arc::clone(peers),
            clock: Arc::clone(clock),
            nodes: handles,
            places: nodes.iter().map(|node| places(&node.op)).collect(),
            prepared: Mutex::new(Prepared { executable: Some(executable), applied, last: None }),
            communicators,
            _kept: kept,
        })
    }

    /// Tells the communicators of its collectives that there are calls of theirs in it.
    pub(crate) fn introduce(self: &Arc<Self>) {
        let own = self.communicators.iter().filter_map(CudaCommunicator::of);
        own.for_each(|communicator| communicator.expect_replays(self));
    }

    /// The communicators of its collectives.
    pub(crate) fn communicators(&self) -> &[Arc<dyn NativeCommunicator>] {
        &self.communicators
    }

    /// Gives the driver's graph back, whose communicator was aborted. Launches under way go on, and no others come.
    pub(crate) fn retire(&self) {
        let executable = self.prepared().executable.take();
        drop(executable);
    }

    /// The CUDA graph behind a value, if it is one.
    pub(crate) fn of(graph: &PreparedGraph) -> Option<&Self> {
        let graph: &dyn Any = graph.graph().as_ref();
        graph.downcast_ref()
    }

    pub(crate) fn belongs_to(&self, context: &Context) -> bool {
        ptr::eq(Arc::as_ptr(&self.context), context)
    }

    /// Launches it with these operations. Its context is current.
    ///
    /// # Safety
    ///
    /// - The operations are those of a [`PreparedGraph`] of this graph, which checked them.
    /// - Whatever they name, and the graph, lives until the stream is past it.
    /// - The stream is of the graph's context.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) unsafe fn launch(
        &self,
        ops: &Arc<[Arc<GraphOp>]>,
        stream: &Stream,
    ) -> Result<(), Option<DriverError>> {
        let mut prepared = self.prepared();
        let executable = prepared.executable.as_ref().ok_or(None)?.raw;
        if !prepared.has(ops) {
            prepared.last = None;
            for ((present, wanted), node) in prepared.applied.iter_mut().zip(ops.iter()).zip(&self.nodes) {
                if !Arc::ptr_eq(present, wanted) {
                    self.apply(executable, *node, wanted).map_err(|refusal| match refusal {
                        Refusal::Cannot(_) => None,
                        Refusal::Driver(error) => Some(error),
                    })?;
                    *present = Arc::clone(wanted);
                }
            }
            prepared.last = Some(Arc::clone(ops));
        }
        // SAFETY: graph and stream are live. What the nodes touch was found within this device's reach when it was
        // set, and the lock is held, so that nobody changes the operands in between. The rest are the caller's
        // duties.
        unsafe { self.context.driver.graph_launch(executable.raw(), stream.raw()) }.map_err(Some)
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn apply(
        &self,
        executable: Handle<CUgraphExec_st>,
        node: Handle<CUgraphNode_st>,
        op: &GraphOp,
    ) -> Result<(), Refusal> {
        let GraphOp::Op(op) = op else {
            // `PreparedGraph::set` takes operations of the seam for such, so what is none stays what it was.
            return Ok(());
        };
        let (driver, executable) = (&self.context.driver, executable.raw());
        op.with(|op| match op {
            Op::Copy(region) => {
                let parameters = copy_node(region)?;
                let context = self.context.raw.raw();
                // SAFETY: the node is of the graph that this one was made of; the parameters are read from
                // this stack frame, and the addresses are those of live buffers.
                unsafe { driver.graph_set_copy(executable, node.raw(), &parameters, context) }?;
                Ok(())
            }
            Op::Fill(region) => {
                let parameters = fill_node(region)?;
                let context = self.context.raw.raw();
                // SAFETY: as above.
                unsafe { driver.graph_set_fill(executable, node.raw(), &parameters, context) }?;
                Ok(())
            }
            Op::Launch(launch) => with_kernel(launch, |parameters| {
                // SAFETY: as above; the driver copies the arguments, which live until the call returns.
                unsafe { driver.graph_set_kernel(executable, node.raw(), parameters) }
            }),
            Op::Timestamp(region) => with_stamp(&self.clock, region, |parameters| {
                // SAFETY: as above.
                unsafe { driver.graph_set_kernel(executable, node.raw(), parameters) }
            }),
            // It keeps what it was captured with, see `check`.
            Op::Collective(_) => Ok(()),
            other => Err(Refusal::Cannot(format!("CUDA graphs have no {}", other.name()))),
        })
    }

    fn prepared(&self) -> MutexGuard<'_, Prepared> {
        // Nothing but the driver runs under the lock.
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Graph for CudaGraph {
    fn device(&self) -> DeviceId {
        self.context.device
    }

    fn check(&self, node: usize, op: &OwnedOp) -> Result<(), GraphError> {
        if op.with(|op| matches!(op, Op::Collective(_))) {
            let reason = "a collective keeps the operands that its node was prepared with: the library's work is \
                          captured, and cannot be changed in a graph";
            return Err(GraphError::Node { node, reason: reason.to_owned() });
        }
        let op = GraphOp::Op(op.clone());
        check(&self.context, &self.peers, node, &op)?;
        // The driver would refuse it at the next launch, and the queue would fail.
        if self.places.get(node).is_none_or(|known| *known == places(&op)) {
            return Ok(());
        }
        let reason = "a node keeps to the kind and the device of the memory it was prepared with".to_owned();
        Err(GraphError::Node { node, reason })
    }
}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGraph({} nodes on {})", self.nodes.len(), self.context.device)
    }
}

/// Captures the collectives among the nodes, each in a graph of its own.
fn captured(
    context: &Arc<Context>,
    nodes: &[GraphNode],
    keep: &mut KeepAlive,
) -> Result<Vec<Option<Template>>, GraphError> {
    let capture = |(node, entry): (usize, &GraphNode)| {
        let GraphOp::Op(op) = entry.op.as_ref() else { return Ok(None) };
        op.with(|op| {
            let Op::Collective(group) = op else { return Ok(None) };
            let refused = |reason: String| GraphError::Node { node, reason };
            capture_group(context, group, keep).map(Some).map_err(refused)
        })
    };
    nodes.iter().enumerate().map(capture).collect()
}

#[expect(unsafe_code, reason = "captures work on memory that the graph keeps")]
fn capture_group(
    context: &Arc<Context>,
    group: &CollectiveGroup<'_>,
    keep: &mut KeepAlive,
) -> Result<Template, String> {
    let own = CudaCommunicator::of(group.communicator()).ok_or("its communicator is not of this backend")?;
    let recorded = interop::record_graph(context, |stream| {
        // SAFETY: `check` has let the calls through. The graph's operations hold what they name, and the graph holds
        // `keep`; both stay until replays are over.
        unsafe { own.enqueue(group.calls(), stream, keep) }.map_err(|error| error.to_string().into())
    });
    recorded.map_err(|error| error.to_string())
}

fn for_each_group(nodes: &[GraphNode], mut visit: impl FnMut(&CollectiveGroup<'_>)) {
    for node in nodes {
        if let GraphOp::Op(op) = node.op.as_ref() {
            op.with(|op| {
                if let Op::Collective(group) = op {
                    visit(group);
                }
            });
        }
    }
}

/// Whether a node's operation can be carried out by this device, in a graph.
fn check(context: &Context, peers: &PeerTable, node: usize, op: &GraphOp) -> Result<(), GraphError> {
    let submit = |source| GraphError::Submit { node, source };
    match op {
        GraphOp::Captured(work) => {
            let work: &dyn Any = work.as_ref();
            let own = work.downcast_ref::<Captured>();
            let ours = own.is_some_and(|own| ptr::eq(Arc::as_ptr(&own.template.context), context));
            if ours {
                return Ok(());
            }
            Err(GraphError::Node { node, reason: "its work was captured for another device".to_owned() })
        }
        GraphOp::Join => Ok(()),
        GraphOp::Op(op) => op.with(|op| {
            check_op(context, peers, op).map_err(submit)?;
            match op {
                Op::Fill(region) => {
                    let address = address_of(region.dst()).unwrap_or(0);
                    if let Pattern::Bytes(_) = Pattern::of(region, address) {
                        let reason = "words are filled at multiples of 4 bytes in a graph".to_owned();
                        return Err(GraphError::Node { node, reason });
                    }
                    Ok(())
                }
                Op::Replay(_) => {
                    Err(GraphError::Node { node, reason: "a replay cannot be a node".to_owned() })
                }
                _ => Ok(()),
            }
        }),
    }
}

fn refused(context: &Context, node: usize, refusal: Refusal) -> GraphError {
    match refusal {
        Refusal::Cannot(reason) => GraphError::Node { node, reason },
        Refusal::Driver(error) => match driver_failed(context, error) {
            GraphError::Driver(error) => GraphError::Submit { node, source: SubmitError::Driver(error) },
            lost => lost,
        },
    }
}

/// What a call that failed says of the device.
fn driver_failed(context: &Context, error: DriverError) -> GraphError {
    match context.judge(error.clone()) {
        failure if context.failure().is_some() => GraphError::Failed(failure),
        _ => GraphError::Driver(error),
    }
}

impl Template {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn create(context: &Arc<Context>) -> Result<Self, DriverError> {
        // SAFETY: needs nothing; the result is written to `raw`.
        let raw = created("cuGraphCreate", |raw| unsafe { context.driver.graph_create(raw, 0) })?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// Wraps what a capture made.
    pub(crate) fn captured(context: &Arc<Context>, raw: Handle<CUgraph_st>) -> Self {
        Self { context: Arc::clone(context), raw }
    }

    /// Adds a node. The context is current.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn add(
        &self,
        op: &GraphOp,
        after: &[CUgraphNode],
        clock: &Clock,
    ) -> Result<Handle<CUgraphNode_st>, Refusal> {
        let (driver, graph) = (&self.context.driver, self.raw.raw());
        let context = self.context.raw.raw();
        let (edges, count) = (after.as_ptr(), after.len());
        let mut raw: CUgraphNode = ptr::null_mut();
        match op {
            GraphOp::Captured(work) => {
                let work: &dyn Any = work.as_ref();
                let child = &work.downcast_ref::<Captured>().ok_or_else(not_ours)?.template;
                return self.add_child(child, after);
            }
            // SAFETY: graph and the nodes before are live; the result is written to this stack frame.
            GraphOp::Join => unsafe { driver.graph_add_join(&mut raw, graph, edges, count) }?,
            GraphOp::Op(op) => op.with(|op| match op {
                Op::Copy(region) => {
                    let parameters = copy_node(region)?;
                    // SAFETY: as above; the parameters are read from this stack frame, their addresses are
                    // those of live buffers, which the prepared graph keeps.
                    unsafe { driver.graph_add_copy(&mut raw, graph, edges, count, &parameters, context) }?;
                    Ok(())
                }
                Op::Fill(region) => {
                    let parameters = fill_node(region)?;
                    // SAFETY: as above.
                    unsafe { driver.graph_add_fill(&mut raw, graph, edges, count, &parameters, context) }?;
                    Ok(())
                }
                Op::Launch(launch) => with_kernel(launch, |parameters| {
                    // SAFETY: as above; the driver copies the arguments.
                    unsafe { driver.graph_add_kernel(&mut raw, graph, edges, count, parameters) }
                }),
                Op::Timestamp(region) => with_stamp(clock, region, |parameters| {
                    // SAFETY: as above.
                    unsafe { driver.graph_add_kernel(&mut raw, graph, edges, count, parameters) }
                }),
                other => Err(Refusal::Cannot(format!("CUDA graphs have no {}", other.name()))),
            })?,
        }
        Handle::written(raw).ok_or_else(|| Refusal::Cannot("the driver made no node".to_owned()))
    }

    /// Adds what was captured as a node. The context is current.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn add_child(&self, child: &Self, after: &[CUgraphNode]) -> Result<Handle<CUgraphNode_st>, Refusal> {
        let (graph, child) = (self.raw.raw(), child.raw.raw());
        let mut raw: CUgraphNode = ptr::null_mut();
        // SAFETY: graph, child and the nodes before are live; the driver copies the child; the result is written to this
        // stack frame.
        unsafe { self.context.driver.graph_add_child(&mut raw, graph, after.as_ptr(), after.len(), child) }?;
        Handle::written(raw).ok_or_else(|| Refusal::Cannot("the driver made no node".to_owned()))
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn instantiate(&self) -> Result<Handle<CUgraphExec_st>, DriverError> {
        let driver = &self.context.driver;
        created("cuGraphInstantiate", |raw| {
            // SAFETY: the graph is live; the result is written to `created`'s stack frame.
            unsafe { driver.graph_instantiate(raw, self.raw.raw(), 0) }
        })
    }
}

impl Drop for Template {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        // SAFETY: owned by this value alone and destroyed once; executable graphs and parents have copies.
        let _destroyed = unsafe { self.context.driver.graph_destroy(self.raw.raw()) };
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Template({})", self.context.device)
    }
}

/// A copy of one row, with unified addresses.
fn copy_node(region: &CopyRegion<'_>) -> Result<CUDA_MEMCPY3D, Refusal> {
    let (from, to) = address_of(region.src()).zip(address_of(region.dst())).ok_or_else(not_ours)?;
    let width = usize::try_from(region.src().size()).map_err(|_| not_ours())?;
    Ok(CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        srcHost: ptr::null(),
        srcDevice: from,
        srcArray: ptr::null_mut(),
        reserved0: ptr::null_mut(),
        srcPitch: width,
        srcHeight: 1,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        dstHost: ptr::null_mut(),
        dstDevice: to,
        dstArray: ptr::null_mut(),
        reserved1: ptr::null_mut(),
        dstPitch: width,
        dstHeight: 1,
        WidthInBytes: width,
        Height: 1,
        Depth: 1,
    })
}

/// A fill of one row.
fn fill_node(region: &FillRegion<'_>) -> Result<CUDA_MEMSET_NODE_PARAMS, Refusal> {
    let address = address_of(region.dst()).ok_or_else(not_ours)?;
    let size = usize::try_from(region.dst().size()).map_err(|_| not_ours())?;
    let row = |value, element_size, width| CUDA_MEMSET_NODE_PARAMS {
        dst: address,
        pitch: 0,
        value,
        elementSize: element_size,
        width,
        height: 1,
    };
    match Pattern::of(region, address) {
        Pattern::Byte(byte) => Ok(row(u32::from(byte), 1, size)),
        Pattern::Word(word) => Ok(row(word, 4, size / 4)),
        Pattern::Bytes(_) => {
            Err(Refusal::Cannot("words are filled at multiples of 4 bytes in a graph".to_owned()))
        }
    }
}

fn with_kernel(
    launch: &Launch<'_>,
    call: impl FnOnce(&cudarc::driver::sys::CUDA_KERNEL_NODE_PARAMS) -> Result<(), DriverError>,
) -> Result<(), Refusal> {
    let kernel = CudaKernel::of(launch.kernel()).ok_or_else(not_ours)?;
    let parameters = Parameters::of(launch, None).ok_or_else(not_ours)?;
    let mut pointers = parameters.pointers();
    Ok(call(&work::kernel_node(launch, kernel, &mut pointers))?)
}

fn with_stamp(
    clock: &Clock,
    region: &TimestampRegion<'_>,
    call: impl FnOnce(&cudarc::driver::sys::CUDA_KERNEL_NODE_PARAMS) -> Result<(), DriverError>,
) -> Result<(), Refusal> {
    let mut address = address_of(region.dst()).ok_or_else(not_ours)?;
    let mut pointers = [ptr::from_mut(&mut address).cast()];
    Ok(call(&clock.stamp_node(&mut pointers))?)
}

/// Work of another library, captured in a graph of its own.
#[derive(Debug)]
pub(crate) struct Captured {
    pub(crate) template: Template,
    pub(crate) accesses: Vec<(BufferView, Access)>,
    /// What the work needs beside that.
    pub(crate) _owner: Owner,
}

/// What somebody else's work needs, held for its drop.
pub(crate) struct Owner(
    #[expect(dead_code, reason = "held for its drop")] pub(crate) Arc<dyn Any + Send + Sync>,
);

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Owner")
    }
}

impl CapturedWork for Captured {
    fn device(&self) -> DeviceId {
        self.template.context.device
    }

    fn accesses(&self) -> &[(BufferView, Access)] {
        &self.accesses
    }
}
