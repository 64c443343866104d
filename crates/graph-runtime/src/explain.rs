//! What was inferred, in words.

use warpweft_core_types::DeviceId;

use crate::{
    graph::{Graph, NodePlace, Reason},
    node::NodeId,
    plan::Layout,
};

/// A piece of a graph that a queue is handed as a whole, or one task of the host.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Segment {
    /// The device whose queue is handed it; none for tasks of the host.
    pub device: Option<DeviceId>,
    /// Its lane there, 0 for tasks of the host.
    pub lane: u32,
    /// Its nodes, in the order in which its device knows them; none where it only joins others.
    pub nodes: Vec<NodeId>,
    /// The positions of earlier segments that must have ended.
    pub after: Vec<usize>,
}

impl Graph {
    /// The pieces in which [`Graph::prepare`] will hand it to devices, in an order that their edges follow.
    pub fn segments(&self) -> Vec<Segment> {
        let plan = Layout::new(self).plan;
        let segments = plan.segments.iter().map(|segment| {
            let (device, lane) = match segment.place {
                NodePlace::Device { device, lane } => (Some(self.domain.devices[device as usize].id), lane),
                NodePlace::Host => (None, 0),
            };
            Segment {
                device,
                lane,
                nodes: segment.nodes.iter().map(|&node| NodeId(node)).collect(),
                after: segment.after.iter().map(|&before| before as usize).collect(),
            }
        });
        segments.collect()
    }

    /// All bytes for whose sake `later` comes after `earlier` directly, in the order of their uses; empty if none.
    ///
    /// [`Graph::why`] tells of the first of them, and of ways over other nodes.
    pub fn reasons(&self, earlier: NodeId, later: NodeId) -> Vec<Reason> {
        if earlier >= later || later.index() >= self.len() {
            return Vec::new();
        }
        let mut reasons: Vec<Reason> = Vec::new();
        for reason in self.conflicts(earlier, later) {
            if !reasons.contains(&reason) {
                reasons.push(reason);
            }
        }
        reasons
    }

    /// A reason with the names of nodes and buffers.
    pub fn explain(&self, reason: &Reason) -> String {
        let Reason { earlier, later, range, hazard, .. } = reason;
        let buffer = self.buffer_label(reason.buffer);
        let (first, then) = (self.label(*earlier), self.label(*later));
        format!("{then} comes after {first}: {hazard} of bytes {range:?} of {buffer}")
    }

    /// A node's number and name.
    pub(crate) fn label(&self, node: NodeId) -> String {
        format!("node {node} ({:?})", self.name(node).unwrap_or_default())
    }

    fn buffer_label(&self, buffer: usize) -> String {
        let device = self.buffer(buffer).map(|view| format!(" on {}", view.device())).unwrap_or_default();
        match self.buffer_name(buffer) {
            Some(name) => format!("{name:?}{device}"),
            None => format!("buffer {buffer}{device}"),
        }
    }
}
