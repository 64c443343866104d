//! Graphs of explicit nodes, and what is launched of them.
//!
//! Of the nodes that may run next, the one that became so last runs first: an edge that is missing shows.

use std::{
    collections::HashMap,
    ffi::{c_uint, c_ulonglong, c_void},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    context::{Context, Here, current},
    exports::{Code, In, Out, Outcome, Raw, exports},
    launch::Shape,
    machine::{Machine, running},
    registry::new_handle,
    stream::{Event, Op},
    task::{CopyRows, Fill, Kind, Rows, Task},
};

/// A graph that is being made.
#[derive(Debug, Default)]
pub(crate) struct Graph(Mutex<Nodes>);

/// A graph that can be launched.
#[derive(Debug)]
pub(crate) struct Executable {
    pub(crate) context: Arc<Context>,
    nodes: Mutex<Nodes>,
    /// The end of each launch: the next one waits for it.
    ends: Arc<Event>,
}

/// Nodes and the edges between them. Copies of a graph know a node by the same handle.
#[derive(Debug, Clone, Default)]
pub(crate) struct Nodes {
    list: Vec<Node>,
    positions: HashMap<usize, usize>,
}

#[derive(Debug, Clone)]
struct Node {
    task: Arc<Task>,
    /// Positions of those that come before it.
    after: Vec<usize>,
}

impl Graph {
    pub(crate) fn nodes(&self) -> MutexGuard<'_, Nodes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Executable {
    fn nodes(&self) -> MutexGuard<'_, Nodes> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Nodes {
    /// Adds a node behind others, by their positions: its handle and its position.
    pub(crate) fn add(&mut self, task: Task, after: Vec<usize>) -> (usize, usize) {
        let (handle, position) = (new_handle(), self.list.len());
        self.positions.insert(handle, position);
        self.list.push(Node { task: Arc::new(task), after });
        (handle, position)
    }

    pub(crate) fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.list.iter().map(|node| &*node.task)
    }

    fn position(&self, node: Raw) -> Result<usize, Code> {
        self.positions.get(&node.addr()).copied().ok_or(Code::INVALID_VALUE)
    }

    /// Does everything, in an order that the edges allow.
    pub(crate) fn run(&self, machine: &Machine) -> Outcome {
        let mut missing: Vec<usize> = self.list.iter().map(|node| node.after.len()).collect();
        let mut behind = vec![Vec::new(); self.list.len()];
        for (position, node) in self.list.iter().enumerate() {
            node.after.iter().for_each(|&before| behind[before].push(position));
        }
        let mut ready: Vec<usize> = (0..self.list.len()).filter(|&position| missing[position] == 0).collect();
        while let Some(position) = ready.pop() {
            if machine.fault().is_some() {
                return Ok(());
            }
            self.list[position].task.run(machine)?;
            for &next in &behind[position] {
                missing[next] -= 1;
                if missing[next] == 0 {
                    ready.push(next);
                }
            }
        }
        Ok(())
    }

    /// Gives a node another task; launches under way keep the old one.
    fn set(&mut self, node: Raw, task: Task, fits: impl FnOnce(&Task, &Task) -> bool) -> Outcome {
        let position = self.position(node)?;
        let node = &mut self.list[position];
        if !fits(&node.task, &task) {
            return Err(Code::INVALID_VALUE);
        }
        node.task = Arc::new(task);
        Ok(())
    }
}

/// `CUDA_KERNEL_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct KernelParams {
    function: Raw,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    parameters: *const *mut c_void,
    extra: *const *mut c_void,
    kernel: Raw,
    context: Raw,
}

impl KernelParams {
    #[expect(unsafe_code, reason = "reads the caller's memory")]
    fn task(&self, here: &Here) -> Result<Task, Code> {
        // A kernel that is of no module, and arguments in one piece, are other ways to say the same.
        if !self.extra.is_null() || !self.kernel.is_null() || !self.context.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let shape = Shape { grid: self.grid, block: self.block, shared_bytes: self.shared_bytes };
        // SAFETY: the caller vouches for what its parameters point to.
        let arguments = unsafe { In::from(self.parameters) };
        let call = here.call(self.function, &shape, &arguments)?;
        Ok(Task::Kernel(call))
    }
}

/// One side of `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Side {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: c_uint,
    host: Raw,
    device: u64,
    array: Raw,
    reserved: Raw,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyParams {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
    depth: usize,
}

/// `CUmemorytype`.
const HOST: c_uint = 1;
const DEVICE: c_uint = 2;
const UNIFIED: c_uint = 4;

impl Side {
    fn rows(&self, copy: &CopyParams) -> Result<Rows, Code> {
        let base = match self.kind {
            HOST => self.host.addr() as u64,
            DEVICE | UNIFIED => self.device,
            _ => return Err(Code::INVALID_VALUE),
        };
        let (pitch, layer) = (self.pitch as u64, self.pitch as u64 * self.height as u64);
        let fits = self.level == 0
            && (copy.height <= 1 || self.pitch >= copy.width)
            && (copy.depth <= 1 || self.height >= copy.height);
        let first = base + self.z as u64 * layer + self.y as u64 * pitch + self.x as u64;
        if fits { Ok(Rows { first, pitch, layer }) } else { Err(Code::INVALID_VALUE) }
    }
}

impl CopyParams {
    fn task(&self, machine: &Machine, context: &Context) -> Result<Task, Code> {
        let (to, from) = (self.to.rows(self)?, self.from.rows(self)?);
        let Self { width, height, depth, .. } = *self;
        if width == 0 || height == 0 || depth == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let kinds = [to, from].map(|rows| Kind::of(machine, rows.first));
        Ok(Task::Copy(CopyRows { device: context.device, to, from, width, height, depth, kinds }))
    }
}

/// `CUDA_MEMSET_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct FillParams {
    to: u64,
    pitch: usize,
    value: c_uint,
    element: c_uint,
    width: usize,
    height: usize,
}

impl FillParams {
    fn task(&self, machine: &Machine, context: &Context) -> Result<Task, Code> {
        let Self { to, pitch, value, width, height, .. } = *self;
        let element = self.element as usize;
        let sound = matches!(element, 1 | 2 | 4)
            && to.is_multiple_of(u64::from(self.element))
            && (element == 4 || value >> (8 * element) == 0)
            && width > 0
            && height > 0
            && (height == 1 || pitch >= width * element);
        if !sound {
            return Err(Code::INVALID_VALUE);
        }
        let kind = Kind::of(machine, to);
        Ok(Task::Fill(Fill { device: context.device, to, pitch, value, element, width, height, kind }))
    }
}

/// Adds a node to a graph behind those of a list.
fn add(node: &Out<usize>, graph: Raw, after: &In<Raw>, count: usize, task: Task) -> Outcome {
    let machine = running()?;
    task.check(machine)?;
    let graph = machine.graphs.get(graph)?;
    let mut nodes = graph.nodes();
    let after = (0..count).map(|index| nodes.position(after.at(index)?)).collect::<Result<Vec<_>, _>>()?;
    let mut each = after.clone();
    each.sort_unstable();
    each.dedup();
    if each.len() != after.len() || node.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    node.set(nodes.add(task, after).0)
}

fn context_of(context: Raw) -> Result<Arc<Context>, Code> {
    running()?.contexts.get(context).map_err(|_| Code::INVALID_CONTEXT)
}

exports! {
    fn cuGraphCreate(out graph: Raw, val flags: c_uint) {
        let machine = running()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        graph.set(machine.graphs.add(Arc::default()))
    }

    fn cuGraphDestroy(val graph: Raw) {
        running()?.graphs.remove(graph).map(|_| ())
    }

    fn cuGraphAddKernelNode_v2(
        out node: usize, val graph: Raw, input after: Raw, val count: usize, input parameters: KernelParams
    ) {
        let here = current()?;
        let _turn = here.enter();
        add(&node, graph, &after, count, parameters.get()?.task(&here)?)
    }

    fn cuGraphAddMemcpyNode(
        out node: usize, val graph: Raw, input after: Raw, val count: usize, input parameters: CopyParams,
        val context: Raw
    ) {
        let (machine, context) = (running()?, context_of(context)?);
        add(&node, graph, &after, count, parameters.get()?.task(machine, &context)?)
    }

    fn cuGraphAddMemsetNode(
        out node: usize, val graph: Raw, input after: Raw, val count: usize, input parameters: FillParams,
        val context: Raw
    ) {
        let (machine, context) = (running()?, context_of(context)?);
        add(&node, graph, &after, count, parameters.get()?.task(machine, &context)?)
    }

    fn cuGraphAddEmptyNode(out node: usize, val graph: Raw, input after: Raw, val count: usize) {
        add(&node, graph, &after, count, Task::Graph(Nodes::default()))
    }

    /// The child is copied as it is now.
    fn cuGraphAddChildGraphNode(
        out node: usize, val graph: Raw, input after: Raw, val count: usize, val child: Raw
    ) {
        let machine = running()?;
        if graph == child {
            return Err(Code::INVALID_VALUE);
        }
        let nodes = machine.graphs.get(child)?.nodes().clone();
        add(&node, graph, &after, count, Task::Graph(nodes))
    }

    fn cuGraphInstantiateWithFlags(out executable: Raw, val graph: Raw, val flags: c_ulonglong) {
        let here = current()?;
        let _turn = here.enter();
        let graph = here.machine.graphs.get(graph)?;
        if flags != 0 || executable.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let nodes = Mutex::new(graph.nodes().clone());
        let (context, ends) = (Arc::clone(&here.context), Arc::new(Event::new(&here.context)));
        executable.set(here.machine.executables.add(Arc::new(Executable { context, nodes, ends })))
    }

    fn cuGraphExecKernelNodeSetParams_v2(
        val executable: Raw, val node: Raw, input parameters: KernelParams
    ) {
        let here = current()?;
        let _turn = here.enter();
        let executable = here.machine.executables.get(executable)?;
        let task = parameters.get()?.task(&here)?;
        executable.nodes().set(node, task, |present, next| match (present, next) {
            (Task::Kernel(present), Task::Kernel(next)) => Arc::ptr_eq(&present.context, &next.context),
            _ => false,
        })
    }

    fn cuGraphExecMemcpyNodeSetParams(
        val executable: Raw, val node: Raw, input parameters: CopyParams, val context: Raw
    ) {
        let (machine, context) = (running()?, context_of(context)?);
        let executable = machine.executables.get(executable)?;
        let task = parameters.get()?.task(machine, &context)?;
        task.check(machine)?;
        executable.nodes().set(node, task, |present, next| match (present, next) {
            (Task::Copy(present), Task::Copy(next)) => {
                present.device == next.device
                    && present.is_flat()
                    && next.is_flat()
                    && present.kinds == next.kinds
            }
            _ => false,
        })
    }

    fn cuGraphExecMemsetNodeSetParams(
        val executable: Raw, val node: Raw, input parameters: FillParams, val context: Raw
    ) {
        let (machine, context) = (running()?, context_of(context)?);
        let executable = machine.executables.get(executable)?;
        let task = parameters.get()?.task(machine, &context)?;
        task.check(machine)?;
        executable.nodes().set(node, task, |present, next| match (present, next) {
            (Task::Fill(present), Task::Fill(next)) => {
                present.device == next.device
                    && present.height == 1
                    && next.height == 1
                    && present.kind == next.kind
            }
            _ => false,
        })
    }

    /// Launches of it go on.
    fn cuGraphExecDestroy(val executable: Raw) {
        running()?.executables.remove(executable).map(|_| ())
    }

    fn cuGraphLaunch(val executable: Raw, val stream: Raw) {
        let here = current()?;
        let _turn = here.enter();
        let (executable, stream) = (here.machine.executables.get(executable)?, here.stream(stream)?);
        // Held, so that launches are in their streams in the order of their numbers.
        let nodes = executable.nodes();
        let task = Task::Graph(nodes.clone());
        if stream.capture().is_some() {
            return here.give(&stream, task);
        }
        let number = executable.ends.record();
        stream.push(Op::Wait(Arc::clone(&executable.ends), number - 1));
        here.give(&stream, task)?;
        stream.push(Op::Mark(Arc::clone(&executable.ends), number));
        Ok(())
    }
}
