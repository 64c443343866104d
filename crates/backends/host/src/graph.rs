//! Graphs of host devices: a queue runs the nodes in order, which every set of edges allows.

use std::sync::Arc;

use warpweft_core_types::{DeviceId, Graph, GraphError, GraphNode, GraphOp, OwnedOp};

use crate::{link::LinkTable, queue};

/// A graph whose nodes were checked.
#[derive(Debug)]
pub(crate) struct HostGraph {
    device: DeviceId,
    links: Arc<LinkTable>,
}

impl HostGraph {
    pub(crate) fn prepare(
        device: DeviceId,
        links: &Arc<LinkTable>,
        nodes: &[GraphNode],
    ) -> Result<Self, GraphError> {
        let graph = Self { device, links: Arc::clone(links) };
        for (node, entry) in nodes.iter().enumerate() {
            match &entry.op {
                GraphOp::Op(op) => graph.check(node, op)?,
                GraphOp::Join => {}
                GraphOp::Captured(work) => {
                    let reason = format!("its work was captured for {}", work.device());
                    return Err(GraphError::Node { node, reason });
                }
            }
        }
        Ok(graph)
    }
}

impl Graph for HostGraph {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn check(&self, node: usize, op: &OwnedOp) -> Result<(), GraphError> {
        queue::check_owned(self.device, &self.links, op).map_err(|source| GraphError::Submit { node, source })
    }
}
