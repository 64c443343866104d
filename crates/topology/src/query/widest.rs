//! How much one device can send another in one step of a collective.

use std::collections::BinaryHeap;

use crate::{NodeId, Topology};

/// Gigabytes per second of one direction between devices, without passing a third device; 0 where there is no way.
///
/// The best way is the one with the widest bottleneck.
pub(super) fn steps(topology: &Topology, devices: &[NodeId]) -> Vec<Vec<f64>> {
    devices
        .iter()
        .map(|&from| {
            let widths = widest_from(topology, from);
            devices.iter().map(|&to| if to == from { 0.0 } else { widths[to.index()] }).collect()
        })
        .collect()
}

/// A node in the queue, widest first.
#[derive(PartialEq)]
struct Reached {
    gb_per_s: f64,
    node: NodeId,
}

impl Eq for Reached {}

impl Ord for Reached {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.gb_per_s.total_cmp(&other.gb_per_s).then(other.node.cmp(&self.node))
    }
}

impl PartialOrd for Reached {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

fn widest_from(topology: &Topology, from: NodeId) -> Vec<f64> {
    let mut widest = vec![0.0_f64; topology.nodes().len()];
    let mut queue = BinaryHeap::from([Reached { gb_per_s: f64::INFINITY, node: from }]);
    while let Some(Reached { gb_per_s, node }) = queue.pop() {
        let is_stale = node != from && gb_per_s < widest[node.index()];
        let is_other_device = node != from && topology.nodes()[node.index()].is_device();
        if is_stale || is_other_device {
            continue;
        }
        for edge in topology.edges_from(node).iter().filter(|edge| edge.is_usable()) {
            let width = gb_per_s.min(edge.bandwidth().value.gb_per_s);
            if edge.to != from && width > widest[edge.to.index()] {
                widest[edge.to.index()] = width;
                queue.push(Reached { gb_per_s: width, node: edge.to });
            }
        }
    }
    widest
}
