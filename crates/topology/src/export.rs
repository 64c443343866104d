//! Shows a topology to people and to other programs.

mod dot;
mod matrix;
mod nccl;
mod svg;
mod tree;

use warpweft_core_types::LinkClass;

use crate::{Edge, Node, NodeId, NodeKind, Topology};

impl Topology {
    /// Devices and network cards: what a matrix has a row for.
    pub(crate) fn endpoints(&self) -> Vec<&Node> {
        let is_nic = |node: &&Node| matches!(node.kind, NodeKind::Nic);
        self.devices().chain(self.nodes().iter().filter(is_nic)).collect()
    }

    /// The edge between two nodes in whichever direction there is one.
    pub(crate) fn either_edge(&self, a: NodeId, b: NodeId) -> Option<&Edge> {
        self.edge(a, b).or_else(|| self.edge(b, a))
    }

    /// Each pair of nodes that edges join, once, with one of its edges.
    pub(crate) fn joined_pairs(&self) -> impl Iterator<Item = &Edge> {
        self.edges().iter().filter(|edge| edge.from < edge.to || self.edge(edge.to, edge.from).is_none())
    }
}

/// The colour of a medium in pictures; all can be told apart without seeing red and green.
fn colour(class: LinkClass) -> &'static str {
    match class {
        LinkClass::NvLink | LinkClass::NvSwitch => "#3f8f1f",
        LinkClass::NvLinkC2c => "#0f766e",
        LinkClass::Xgmi => "#d9480f",
        LinkClass::XeLink => "#0369a1",
        LinkClass::Pcie => "#64748b",
        LinkClass::HostMemory => "#b7791f",
        LinkClass::Network => "#7c3aed",
        LinkClass::SameDevice => "#334155",
        _ => "#9ca3af",
    }
}
