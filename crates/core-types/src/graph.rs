//! Graphs: operations with explicit edges, prepared once and replayed many times.

use std::{any::Any, fmt, sync::Arc};

use smallvec::SmallVec;

use crate::{Access, BufferView, CapturedWork, Device, DeviceId, GraphError, Op, OwnedOp};

/// The optional family of devices that prepare graphs.
///
/// A replay costs one submission however many operations it has, and operations that no edge orders may run
/// side by side.
pub trait Graphs: fmt::Debug + Send + Sync {
    /// Prepares operations whose edges lead from earlier to later ones, each edge named once.
    /// [`PreparedGraph::new`] calls this; programs do not.
    ///
    /// # Errors
    ///
    /// See [`GraphError`]; it names the node.
    fn prepare(&self, nodes: &[GraphNode]) -> Result<Arc<dyn Graph>, GraphError>;
}

/// A device's own form of a graph. Programs hold it as a [`PreparedGraph`].
pub trait Graph: Any + fmt::Debug + Send + Sync {
    /// The device that prepared it.
    fn device(&self) -> DeviceId;

    /// Whether the node may become `op`, see [`PreparedGraph::set`].
    ///
    /// # Errors
    ///
    /// [`GraphError::Node`] or [`GraphError::Submit`].
    fn check(&self, node: usize, op: &OwnedOp) -> Result<(), GraphError>;
}

/// An operation of a graph, and those that come before it.
#[derive(Debug, Clone)]
pub struct GraphNode {
    /// What to do. What a device prepares shares it, so that nothing is copied.
    pub op: Arc<GraphOp>,
    /// Positions of earlier nodes that must have ended.
    pub after: SmallVec<[usize; 2]>,
}

impl GraphNode {
    /// `op`, once the nodes at the positions `after` have ended.
    pub fn new(op: impl Into<GraphOp>, after: &[usize]) -> Self {
        Self { op: Arc::new(op.into()), after: after.into() }
    }

    /// Whether its edges are in order, each named once.
    fn is_tidy(&self) -> bool {
        self.after.is_sorted_by(|one, next| one < next)
    }

    /// The same with its edges in order, each named once.
    fn tidied(&self) -> Self {
        let mut after = self.after.clone();
        after.sort_unstable();
        after.dedup();
        Self { op: Arc::clone(&self.op), after }
    }
}

/// What a node does.
#[derive(Debug, Clone)]
pub enum GraphOp {
    /// An operation of the seam. A replay cannot be a node.
    Op(OwnedOp),
    /// Work of another library, see [`crate::Interop::capture`].
    Captured(Arc<dyn CapturedWork>),
    /// Nothing: it stands for the nodes it comes after, so that many nodes can come after many without an edge for
    /// every pair.
    Join,
}

impl GraphOp {
    /// What it is, in one word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Op(op) => op.name(),
            Self::Captured(_) => "captured work",
            Self::Join => "join",
        }
    }

    /// Everything it touches, with what it does to it.
    pub fn for_each_access<'a>(&'a self, visit: &mut dyn FnMut(&'a BufferView, Access)) {
        match self {
            Self::Op(op) => op.for_each_access(visit),
            Self::Captured(work) => {
                work.accesses().iter().for_each(|(view, access)| visit(view, *access));
            }
            Self::Join => {}
        }
    }
}

impl From<&Op<'_>> for GraphOp {
    fn from(op: &Op<'_>) -> Self {
        Self::Op(op.into())
    }
}

impl From<OwnedOp> for GraphOp {
    fn from(op: OwnedOp) -> Self {
        Self::Op(op)
    }
}

impl From<Arc<dyn CapturedWork>> for GraphOp {
    fn from(work: Arc<dyn CapturedWork>) -> Self {
        Self::Captured(work)
    }
}

/// A graph that a device has prepared, with the operands it has now.
///
/// It is a value: a clone shares what the device prepared and keeps its own operands, and a submission
/// replays the operands that the value had when it was submitted. Replays of one prepared graph run one
/// after the other.
#[derive(Debug, Clone)]
pub struct PreparedGraph {
    graph: Arc<dyn Graph>,
    ops: Arc<[Arc<GraphOp>]>,
}

impl PreparedGraph {
    /// Has `device` prepare the nodes.
    ///
    /// # Errors
    ///
    /// [`GraphError::Unsupported`] where the device has no graphs, [`GraphError::Edge`] for an edge that does
    /// not come from an earlier node, and what the device finds wrong with a node.
    pub fn new(device: &dyn Device, nodes: &[GraphNode]) -> Result<Self, GraphError> {
        let family = device.graphs().ok_or(GraphError::Unsupported { device: device.info().id })?;
        for (node, entry) in nodes.iter().enumerate() {
            if let Some(&after) = entry.after.iter().find(|&&after| after >= node) {
                return Err(GraphError::Edge { node, after });
            }
            if matches!(entry.op.as_ref(), GraphOp::Op(op) if op.is_replay()) {
                return Err(GraphError::Node { node, reason: "a replay cannot be a node".to_owned() });
            }
        }
        // An edge that is named twice is one edge, which some drivers refuse to be told twice.
        let graph = if nodes.iter().all(GraphNode::is_tidy) {
            family.prepare(nodes)?
        } else {
            family.prepare(&nodes.iter().map(GraphNode::tidied).collect::<Vec<_>>())?
        };
        Ok(Self { graph, ops: nodes.iter().map(|node| Arc::clone(&node.op)).collect() })
    }

    /// Gives a node other operands or another kernel. Submissions made before keep what they had.
    ///
    /// # Errors
    ///
    /// [`GraphError::NoSuchNode`], [`GraphError::OtherKind`], or what the device finds wrong with it.
    ///
    /// # Portability
    ///
    /// CUDA devices keep copies and fills to the kind and the device of the memory they were prepared with.
    pub fn set(&mut self, node: usize, op: &Op<'_>) -> Result<(), GraphError> {
        self.set_all([(node, Arc::new(GraphOp::from(op)))])
    }

    /// The same for many nodes at once: all of them, or none.
    ///
    /// # Errors
    ///
    /// As [`PreparedGraph::set`]; what is no operation of the seam stays what it is.
    pub fn set_all(
        &mut self,
        changes: impl IntoIterator<Item = (usize, Arc<GraphOp>)>,
    ) -> Result<(), GraphError> {
        // All are checked before one is written, and the nodes are copied once, or not at all where no other value has them.
        let changes: SmallVec<[_; 4]> = changes.into_iter().collect();
        changes.iter().try_for_each(|(node, op)| self.check(*node, op))?;
        if !changes.is_empty() {
            let ops = Arc::make_mut(&mut self.ops);
            changes.into_iter().for_each(|(node, op)| ops[node] = op);
        }
        Ok(())
    }

    /// Whether a node may become this. A node keeps its kind, so that earlier changes have no say in it.
    fn check(&self, node: usize, op: &GraphOp) -> Result<(), GraphError> {
        let node_count = self.ops.len();
        let present = self.ops.get(node).ok_or(GraphError::NoSuchNode { node, node_count })?;
        match op {
            GraphOp::Op(new) if present.name() == new.name() => self.graph.check(node, new),
            other => Err(GraphError::OtherKind { node, expected: present.name(), actual: other.name() }),
        }
    }

    /// What the device prepared.
    pub const fn graph(&self) -> &Arc<dyn Graph> {
        &self.graph
    }

    /// The nodes' operations in order.
    pub const fn ops(&self) -> &Arc<[Arc<GraphOp>]> {
        &self.ops
    }
}
