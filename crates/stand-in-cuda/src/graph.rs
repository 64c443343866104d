//! Graphs: nodes with edges from earlier ones, made executable, changed and launched.
//!
//! A launch does the nodes one after the other in the order in which they were added. Edges come from nodes
//! that were there before, so that keeps every order that they ask for.

use std::{
    ffi::{c_uint, c_ulonglong, c_void},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    context::current,
    exports::{Code, In, Out, Outcome, Raw, exports},
    launch::{Shape, kernel},
    machine::running,
    registry::new_handle,
    task::{Fill, Task},
};

/// Nodes to come.
#[derive(Debug, Default)]
pub(crate) struct Graph(Mutex<Vec<Node>>);

/// A graph that can be launched: a copy of the nodes, with the handles they had.
#[derive(Debug)]
pub(crate) struct Executable(Mutex<Vec<Node>>);

#[derive(Debug, Clone)]
struct Node {
    handle: usize,
    task: Task,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct KernelParams {
    function: Raw,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
    kernel: Raw,
    context: Raw,
}

/// One side of a `CUDA_MEMCPY3D_v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Side {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: c_uint,
    host: *mut c_void,
    device: u64,
    array: Raw,
    reserved: Raw,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D_v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyParams {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
    depth: usize,
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

/// `CU_MEMORYTYPE_UNIFIED`.
const UNIFIED: c_uint = 4;

#[expect(unsafe_code, reason = "reads the caller's memory")]
fn kernel_task(parameters: &In<KernelParams>) -> Result<Task, Code> {
    let given = parameters.get()?;
    let shape = Shape { grid: given.grid, block: given.block, shared_bytes: given.shared_bytes };
    // SAFETY: the caller vouches for what its parameters point to.
    let arguments = unsafe { In::from(given.parameters.cast_const()) };
    kernel(given.function, shape, &arguments, !given.extra.is_null())
}

/// A copy of one row between unified addresses; others are not asked for so far.
fn copy_task(parameters: &In<CopyParams>) -> Result<Task, Code> {
    let given = parameters.get()?;
    let starts_at = |side: &Side| {
        let plain = (side.y, side.z, side.level) == (0, 0, 0) && side.kind == UNIFIED && side.array.is_null();
        plain.then(|| side.device + side.x as u64).ok_or(Code::INVALID_VALUE)
    };
    if (given.height, given.depth) != (1, 1) {
        return Err(Code::INVALID_VALUE);
    }
    checked(Task::Copy { to: starts_at(&given.to)?, from: starts_at(&given.from)?, len: given.width })
}

fn fill_task(parameters: &In<FillParams>) -> Result<Task, Code> {
    let FillParams { to, pitch, value, element, width, height } = parameters.get()?;
    checked(Task::Fill(Fill { to, pitch, value, element: element as usize, width, height }))
}

fn checked(task: Task) -> Result<Task, Code> {
    task.check(running()?)?;
    Ok(task)
}

impl Graph {
    /// What was captured from one stream.
    pub(crate) fn chain(tasks: Vec<Task>) -> Self {
        let nodes = tasks.into_iter().map(|task| Node { handle: new_handle(), task }).collect();
        Self(Mutex::new(nodes))
    }

    fn nodes(&self) -> MutexGuard<'_, Vec<Node>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tasks(&self) -> Task {
        Task::All(self.nodes().iter().map(|node| node.task.clone()).collect())
    }
}

/// Adds a node behind others of the same graph.
fn add(node: &Out<Raw>, graph: Raw, after: &In<Raw>, count: usize, task: Task) -> Outcome {
    let graph = running()?.graphs.get(graph)?;
    let mut nodes = graph.nodes();
    for index in 0..count {
        let before = after.at(index)?.addr();
        if !nodes.iter().any(|node| node.handle == before) {
            return Err(Code::INVALID_VALUE);
        }
    }
    let handle = new_handle();
    node.set(std::ptr::without_provenance_mut(handle))?;
    nodes.push(Node { handle, task });
    Ok(())
}

/// Gives a node of an executable graph other operands.
fn change(executable: Raw, node: Raw, task: Task) -> Outcome {
    let executable = running()?.executables.get(executable)?;
    let mut nodes = executable.0.lock().unwrap_or_else(PoisonError::into_inner);
    let node = nodes.iter_mut().find(|known| known.handle == node.addr()).ok_or(Code::INVALID_HANDLE)?;
    if std::mem::discriminant(&node.task) != std::mem::discriminant(&task) {
        return Err(Code::INVALID_VALUE);
    }
    node.task = task;
    Ok(())
}

exports! {
    fn cuGraphCreate(out graph: Raw, val flags: c_uint) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        graph.set(running()?.graphs.add(Arc::new(Graph::default())))
    }

    fn cuGraphDestroy(val graph: Raw) {
        running()?.graphs.remove(graph).map(|_| ())
    }

    fn cuGraphAddKernelNode_v2(
        out node: Raw, val graph: Raw, input after: Raw, val count: usize, input parameters: KernelParams
    ) {
        add(&node, graph, &after, count, kernel_task(&parameters)?)
    }

    fn cuGraphAddMemcpyNode(
        out node: Raw, val graph: Raw, input after: Raw, val count: usize, input parameters: CopyParams,
        val context: Raw
    ) {
        running()?.contexts.get(context)?;
        add(&node, graph, &after, count, copy_task(&parameters)?)
    }

    fn cuGraphAddMemsetNode(
        out node: Raw, val graph: Raw, input after: Raw, val count: usize, input parameters: FillParams,
        val context: Raw
    ) {
        running()?.contexts.get(context)?;
        add(&node, graph, &after, count, fill_task(&parameters)?)
    }

    fn cuGraphAddChildGraphNode(
        out node: Raw, val graph: Raw, input after: Raw, val count: usize, val child: Raw
    ) {
        // The driver copies the child.
        let child = running()?.graphs.get(child)?.tasks();
        add(&node, graph, &after, count, child)
    }

    fn cuGraphInstantiateWithFlags(out executable: Raw, val graph: Raw, val flags: c_ulonglong) {
        let here = current()?;
        let nodes = here.machine.graphs.get(graph)?.nodes().clone();
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        executable.set(here.machine.executables.add(Arc::new(Executable(Mutex::new(nodes)))))
    }

    fn cuGraphExecKernelNodeSetParams_v2(val executable: Raw, val node: Raw, input parameters: KernelParams) {
        change(executable, node, kernel_task(&parameters)?)
    }

    fn cuGraphExecMemcpyNodeSetParams(
        val executable: Raw, val node: Raw, input parameters: CopyParams, val context: Raw
    ) {
        running()?.contexts.get(context)?;
        change(executable, node, copy_task(&parameters)?)
    }

    fn cuGraphExecMemsetNodeSetParams(
        val executable: Raw, val node: Raw, input parameters: FillParams, val context: Raw
    ) {
        running()?.contexts.get(context)?;
        change(executable, node, fill_task(&parameters)?)
    }

    fn cuGraphExecDestroy(val executable: Raw) {
        running()?.executables.remove(executable).map(|_| ())
    }

    fn cuGraphLaunch(val executable: Raw, val stream: Raw) {
        let here = current()?;
        let _turn = here.enter();
        let (executable, stream) = (here.machine.executables.get(executable)?, here.stream(stream)?);
        let nodes = executable.0.lock().unwrap_or_else(PoisonError::into_inner);
        stream.push_task(Task::All(nodes.iter().map(|node| node.task.clone()).collect()))
    }
}
