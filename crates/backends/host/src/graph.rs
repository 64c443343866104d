//! Graphs of host devices: a queue runs the nodes in order, which every set of edges allows.

use std::sync::{Arc, Mutex, PoisonError};

use warpweft_core_types::{DeviceId, Graph, GraphError, GraphNode, GraphOp, OwnedOp, SubmitError};

use crate::{
    link::LinkTable,
    queue::{self, HostOp},
};

/// A graph whose nodes were checked.
#[derive(Debug)]
pub(crate) struct HostGraph {
    device: DeviceId,
    links: Arc<LinkTable>,
    /// The operands of the latest replay, found: most replays have those of the one before.
    latest: Mutex<Found>,
}

#[derive(Debug)]
struct Found {
    ops: Vec<Arc<GraphOp>>,
    found: Arc<[HostOp]>,
}

impl Found {
    /// Whether it is of just these operations: values share those that they did not change.
    fn is_of(&self, ops: &[Arc<GraphOp>]) -> bool {
        self.ops.len() == ops.len() && self.ops.iter().zip(ops).all(|(own, op)| Arc::ptr_eq(own, op))
    }
}

impl HostGraph {
    pub(crate) fn prepare(
        device: DeviceId,
        links: &Arc<LinkTable>,
        nodes: &[GraphNode],
    ) -> Result<Self, GraphError> {
        let mut found = Vec::with_capacity(nodes.len());
        for (node, entry) in nodes.iter().enumerate() {
            match entry.op.as_ref() {
                GraphOp::Op(op) => {
                    let op = queue::find_owned(device, links, op);
                    found.push(op.map_err(|source| GraphError::Submit { node, source })?);
                }
                GraphOp::Join => {}
                GraphOp::Captured(work) => {
                    let reason = format!("its work was captured for {}", work.device());
                    return Err(GraphError::Node { node, reason });
                }
            }
        }
        let ops = nodes.iter().map(|node| Arc::clone(&node.op)).collect();
        let latest = Mutex::new(Found { ops, found: found.into() });
        Ok(Self { device, links: Arc::clone(links), latest })
    }

    /// The operations of nodes with these operands.
    pub(crate) fn found(&self, ops: &[Arc<GraphOp>]) -> Result<Arc<[HostOp]>, SubmitError> {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        if latest.is_of(ops) {
            return Ok(Arc::clone(&latest.found));
        }
        // A join does nothing, and captured work does not get into graphs of host devices.
        let with_work = ops.iter().filter_map(|op| match op.as_ref() {
            GraphOp::Op(op) => Some(op),
            _ => None,
        });
        let found = with_work.map(|op| queue::find_owned(self.device, &self.links, op));
        let found: Arc<[HostOp]> = found.collect::<Result<_, _>>()?;
        *latest = Found { ops: ops.to_vec(), found: Arc::clone(&found) };
        Ok(found)
    }
}

impl Graph for HostGraph {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn check(&self, node: usize, op: &OwnedOp) -> Result<(), GraphError> {
        let found = queue::find_owned(self.device, &self.links, op);
        found.map(|_| ()).map_err(|source| GraphError::Submit { node, source })
    }
}
