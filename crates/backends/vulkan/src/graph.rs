//! Graphs: secondary command buffers, recorded once and executed by every replay.
//!
//! A command buffer has one set of operands, and a [`PreparedGraph`] is a value with operands of its own. So the buffer
//! is recorded anew when a replay comes with other operands; replays under way hold the one they execute.

use std::{
    any::Any,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use smallvec::SmallVec;
use warpweft_core_types::{
    DeviceId, DriverError, Graph, GraphError, GraphNode, GraphOp, Op, OwnedOp, PreparedGraph,
};

use crate::{chores::Hold, device::VulkanDevice, gpu::Gpu, record::Recording, timeline::Ticket, work::Tools};

/// What a device prepared.
pub(crate) struct VulkanGraph {
    tools: Arc<Tools>,
    /// Whether a node waits for one that was recorded since the last barrier, and needs one in front of it.
    barriers: Vec<bool>,
    state: Mutex<State>,
    /// A device stays the same while a graph of it is there.
    _hold: Hold,
}

#[derive(Debug, Default)]
struct State {
    recorded: Option<Arc<Recorded>>,
    /// The latest replay, behind which the next one comes.
    last: Option<Ticket>,
}

/// A graph as commands, with the operations they were made of, which hold what the commands name.
#[derive(Debug)]
pub(crate) struct Recorded {
    recording: Recording,
    ops: Arc<[Arc<GraphOp>]>,
}

/// The commands to execute, and others to let go where no lock is held.
pub(crate) type Recordings = SmallVec<[Arc<Recorded>; 2]>;

impl VulkanGraph {
    pub(crate) fn prepare(device: &Arc<VulkanDevice>, nodes: &[GraphNode]) -> Result<Self, GraphError> {
        let tools = device.tools();
        if let Some(failure) = tools.gpu.failure() {
            return Err(GraphError::Failed(failure));
        }
        for (node, entry) in nodes.iter().enumerate() {
            check(tools, node, &entry.op)?;
        }
        let graph = Self {
            tools: Arc::clone(tools),
            barriers: barriers(nodes),
            state: Mutex::default(),
            _hold: Hold::new(Arc::clone(device)),
        };
        let ops: Arc<[Arc<GraphOp>]> = nodes.iter().map(|node| Arc::new(node.op.clone())).collect();
        if graph.is_recorded_once(&ops) {
            let recorded = graph.recorded(&ops);
            recorded.map_err(|error| tools.gpu.sort(error, GraphError::Failed, GraphError::Driver))?;
        }
        Ok(graph)
    }

    /// The Vulkan graph behind a value, if it is one.
    pub(crate) fn of(graph: &PreparedGraph) -> Option<&Self> {
        let graph: &dyn Any = graph.graph().as_ref();
        graph.downcast_ref()
    }

    pub(crate) fn is_of(&self, gpu: &Arc<Gpu>) -> bool {
        Arc::ptr_eq(&self.tools.gpu, gpu)
    }

    /// The latest replay.
    pub(crate) fn last(&self) -> Option<Ticket> {
        self.state().last.clone()
    }

    /// Notes a replay that was submitted.
    pub(crate) fn follow(&self, ticket: &Ticket) {
        self.state().last = Some(ticket.clone());
    }

    /// Has `recording` do the operations of a value of this graph, and hands out what it executes, and what was taken
    /// the place of.
    #[expect(unsafe_code, reason = "executes what was recorded")]
    pub(crate) fn replay(
        &self,
        ops: &Arc<[Arc<GraphOp>]>,
        recording: &mut Recording,
    ) -> Result<Recordings, DriverError> {
        if !self.is_recorded_once(ops) {
            self.record(ops, recording)?;
            return Ok(Recordings::new());
        }
        let recorded = self.recorded(ops)?;
        // SAFETY: a secondary of this graph's device, which is the recording's (`is_of`), recorded to its end.
        unsafe { recording.execute(&recorded[0].recording) };
        Ok(recorded)
    }

    /// Two executions of one timestamp at once would share its query, so those are recorded each time.
    fn is_recorded_once(&self, ops: &[Arc<GraphOp>]) -> bool {
        !ops.iter().any(|op| op.name() == "timestamp")
    }

    /// The commands for these operations: the ones at hand, or new ones; behind them those whose place they took, which
    /// may be the last to hold somebody's buffers.
    #[expect(unsafe_code, reason = "begins a recording")]
    fn recorded(&self, ops: &Arc<[Arc<GraphOp>]>) -> Result<Recordings, DriverError> {
        let mut state = self.state();
        if let Some(recorded) = state.recorded.as_ref().filter(|recorded| recorded.is_of(ops)) {
            return Ok([Arc::clone(recorded)].into_iter().collect());
        }
        let mut recording = Recording::secondary(&self.tools.gpu)?;
        // SAFETY: it is new.
        unsafe { recording.begin() }?;
        self.record(ops, &mut recording)?;
        recording.end()?;
        let recorded = Arc::new(Recorded { recording, ops: Arc::clone(ops) });
        let before = state.recorded.replace(Arc::clone(&recorded));
        Ok([recorded].into_iter().chain(before).collect())
    }

    #[expect(unsafe_code, reason = "records operations that were checked")]
    fn record(&self, ops: &[Arc<GraphOp>], recording: &mut Recording) -> Result<(), DriverError> {
        for (op, barrier) in ops.iter().zip(&self.barriers) {
            if *barrier {
                recording.barrier();
            }
            if let GraphOp::Op(op) = op.as_ref() {
                // SAFETY: a node's operation is checked when the graph is prepared and when it is set (`check`).
                op.with(|op| unsafe { self.tools.record(op, recording) })?;
            }
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing but the driver runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recorded {
    /// Whether the commands do just these operations: values share those that they did not change.
    fn is_of(&self, ops: &Arc<[Arc<GraphOp>]>) -> bool {
        Arc::ptr_eq(&self.ops, ops)
            || self.ops.len() == ops.len()
                && self.ops.iter().zip(&**ops).all(|(own, op)| Arc::ptr_eq(own, op))
    }
}

impl Graph for VulkanGraph {
    fn device(&self) -> DeviceId {
        self.tools.gpu.id
    }

    fn check(&self, node: usize, op: &OwnedOp) -> Result<(), GraphError> {
        check(&self.tools, node, &GraphOp::Op(op.clone()))
    }
}

impl fmt::Debug for VulkanGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VulkanGraph({} nodes on {})", self.barriers.len(), self.tools.gpu.id)
    }
}

/// Whether a node's operation can be carried out by this device, in a graph.
fn check(tools: &Tools, node: usize, op: &GraphOp) -> Result<(), GraphError> {
    let GraphOp::Op(op) = op else {
        return Err(GraphError::Node {
            node,
            reason: "work of other libraries is not captured here".to_owned(),
        });
    };
    op.with(|op| match op {
        Op::Replay(_) => Err(GraphError::Node { node, reason: "a replay cannot be a node".to_owned() }),
        op => tools.check(op).map_err(|source| GraphError::Submit { node, source }),
    })
}

/// Which nodes need a barrier in front of them: those that come after one that no barrier stands behind yet.
fn barriers(nodes: &[GraphNode]) -> Vec<bool> {
    let mut since = 0;
    nodes
        .iter()
        .enumerate()
        .map(|(node, entry)| {
            let needed = entry.after.iter().any(|&after| after >= since);
            if needed {
                since = node;
            }
            needed
        })
        .collect()
}
