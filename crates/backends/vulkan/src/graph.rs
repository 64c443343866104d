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
    /// The nodes as they are recorded: all but joins.
    order: Vec<Recorder>,
    node_count: usize,
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

/// A node's place among the commands.
#[derive(Debug, PartialEq, Eq)]
struct Recorder {
    node: usize,
    /// It needs a barrier in front of it.
    barrier: bool,
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
            order: order(nodes.iter().map(|entry| (!matches!(*entry.op, GraphOp::Join), &entry.after[..]))),
            node_count: nodes.len(),
            state: Mutex::default(),
            _hold: Hold::new(Arc::clone(device)),
        };
        let ops: Arc<[Arc<GraphOp>]> = nodes.iter().map(|node| Arc::clone(&node.op)).collect();
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
        for Recorder { node, barrier } in &self.order {
            if *barrier {
                recording.barrier();
            }
            // Joins are not in the order, and captured work does not get here.
            if let GraphOp::Op(op) = ops[*node].as_ref() {
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
        write!(f, "VulkanGraph({} nodes on {})", self.node_count, self.tools.gpu.id)
    }
}

/// Whether a node's operation can be carried out by this device, in a graph.
fn check(tools: &Tools, node: usize, op: &GraphOp) -> Result<(), GraphError> {
    let op = match op {
        GraphOp::Op(op) => op,
        GraphOp::Join => return Ok(()),
        GraphOp::Captured(_) => {
            let reason = "work of other libraries is not captured here".to_owned();
            return Err(GraphError::Node { node, reason });
        }
    };
    op.with(|op| match op {
        Op::Replay(_) => Err(GraphError::Node { node, reason: "a replay cannot be a node".to_owned() }),
        op => tools.check(op).map_err(|source| GraphError::Submit { node, source }),
    })
}

/// The fewest barriers there can be, for nodes that have work or not and come after others: nodes go by the longest chain
/// that leads to them, and a barrier stands wherever the chains are one longer. What has no work is left out: with nothing
/// behind it, it would get a barrier that orders nothing.
fn order<'a>(nodes: impl Iterator<Item = (bool, &'a [usize])> + Clone) -> Vec<Recorder> {
    let levels = levels(nodes.clone());
    let with_work = nodes.enumerate().filter(|(_, (has_work, _))| *has_work);
    let mut order: Vec<usize> = with_work.map(|(node, _)| node).collect();
    // Stable: nodes of one level stay in the order they were given in.
    order.sort_by_key(|&node| levels[node]);
    let mut level = 0;
    let recorder = |node| {
        let barrier = levels[node] > level;
        level = levels[node];
        Recorder { node, barrier }
    };
    order.into_iter().map(recorder).collect()
}

/// How many nodes with work are on the longest chain that leads to each, of nodes that have work or not, and come after
/// others.
fn levels<'a>(nodes: impl Iterator<Item = (bool, &'a [usize])>) -> Vec<usize> {
    let mut behind: Vec<usize> = Vec::new();
    let mut levels = Vec::new();
    for (has_work, after) in nodes {
        let level = after.iter().map(|&after| behind[after]).max().unwrap_or(0);
        levels.push(level);
        behind.push(level + usize::from(has_work));
    }
    levels
}

#[cfg(test)]
mod tests {
    use super::{levels, order};

    /// Nodes in the order they are recorded in, each with whether there is a barrier in front of it.
    fn ordered(nodes: &[(bool, &[usize])]) -> Vec<(usize, bool)> {
        order(nodes.iter().copied()).iter().map(|entry| (entry.node, entry.barrier)).collect()
    }

    #[test]
    fn a_join_with_nothing_behind_it_has_no_barrier() {
        assert_eq!(ordered(&[(true, &[]), (true, &[]), (false, &[0, 1])]), [(0, false), (1, false)]);
        assert_eq!(ordered(&[(false, &[])]), []);
    }

    #[test]
    fn a_join_orders_what_is_behind_it_by_one_barrier() {
        let nodes: [(bool, &[usize]); 5] =
            [(true, &[]), (false, &[0]), (false, &[1]), (true, &[2]), (true, &[])];
        assert_eq!(ordered(&nodes), [(0, false), (4, false), (3, true)]);
    }

    #[test]
    fn a_reader_of_two_writers_has_the_only_barrier_in_front_of_it() {
        let nodes: [(bool, &[usize]); 3] = [(true, &[]), (true, &[]), (true, &[0, 1])];
        assert_eq!(levels(nodes.into_iter()), [0, 0, 1]);
    }

    #[test]
    fn a_join_needs_no_barrier_and_keeps_the_order() {
        let nodes: [(bool, &[usize]); 4] = [(true, &[]), (true, &[0]), (false, &[0, 1]), (true, &[2])];
        assert_eq!(levels(nodes.into_iter()), [0, 1, 2, 2]);
    }
}
