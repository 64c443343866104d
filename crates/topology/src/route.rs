//! The cheapest way from one node to another.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

use serde::Serialize;
use warpweft_core_types::{Bandwidth, Bytes, ErrorClass, LinkClass, PathClass};

use crate::{Edge, Known, NodeId, Topology, cost::Cost};

/// One edge of a [`Path`], with the figures its cost rests on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Hop {
    /// Where bytes start.
    pub from: NodeId,
    /// Where they arrive.
    pub to: NodeId,
    /// The medium.
    pub class: LinkClass,
    /// The way through the PCI tree, where known.
    pub path: Option<PathClass>,
    /// Bytes per second, and whether that is known or assumed.
    pub bandwidth: Known<Bandwidth>,
    /// Time of the smallest transfer, and whether that is known or assumed.
    pub latency: Known<Duration>,
    /// Nanoseconds this hop takes for the bytes that were asked about.
    pub cost_ns: u64,
}

/// A way from one node to another.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Path {
    /// All nodes passed, both ends included; one node if both ends are the same.
    pub nodes: Vec<NodeId>,
    /// The edges between them, one fewer than nodes.
    pub hops: Vec<Hop>,
    /// Nanoseconds, the hops one after the other: sum of latency + bytes / bandwidth.
    pub cost_ns: u64,
    /// The slowest hop's bytes per second; `None` without hops.
    pub bottleneck: Option<Bandwidth>,
}

/// Why there is no path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PathError {
    /// No sequence of usable edges joins the two.
    #[error("no path leads from {from} to {to}")]
    Unreachable {
        /// Name of the node to start from.
        from: String,
        /// Name of the node to reach.
        to: String,
    },
    /// The node is not in this topology.
    #[error("node {node} is not in this topology")]
    UnknownNode {
        /// The id that was used.
        node: NodeId,
    },
}

impl PathError {
    /// How to react.
    pub const fn class(&self) -> ErrorClass {
        match self {
            Self::Unreachable { .. } => ErrorClass::Unsupported,
            Self::UnknownNode { .. } => ErrorClass::Usage,
        }
    }
}

impl Topology {
    /// The cheapest path for a transfer of `bytes`, by Dijkstra's algorithm.
    ///
    /// The cost of a hop is its latency plus `bytes` over its bandwidth; see [`Edge::bandwidth`] and [`Edge::latency`] for what stands in where a figure is unknown.
    /// Among paths of equal cost the one with the fewest hops wins, and among those the one whose node ids come first in lexicographic order.
    ///
    /// # Errors
    ///
    /// [`PathError::Unreachable`] if no usable edges join the two, [`PathError::UnknownNode`] if either is not of this topology.
    pub fn best_path(&self, from: NodeId, to: NodeId, bytes: Bytes) -> Result<Path, PathError> {
        self.check(from)?;
        self.check(to)?;
        self.cheapest(from, to, bytes, |_, _| true).ok_or_else(|| PathError::Unreachable {
            from: self.name(from).to_owned(),
            to: self.name(to).to_owned(),
        })
    }

    pub(crate) fn check(&self, node: NodeId) -> Result<(), PathError> {
        match self.node(node) {
            Some(_) => Ok(()),
            None => Err(PathError::UnknownNode { node }),
        }
    }

    /// Nanoseconds from one node to every other; `None` where no path leads.
    pub(crate) fn costs_from(&self, from: NodeId, bytes: Bytes) -> Vec<Option<u64>> {
        let mut best: Vec<Option<u64>> = vec![None; self.nodes().len()];
        let mut queue = BinaryHeap::from([Reverse((0, from))]);
        best[from.index()] = Some(0);
        while let Some(Reverse((cost_ns, node))) = queue.pop() {
            if best[node.index()] != Some(cost_ns) {
                continue; // A cheaper way to this node was found after this entry was queued.
            }
            for hop in self.costs_out_of(node) {
                let Some(hop_ns) = hop.hop_ns(bytes) else {
                    continue;
                };
                let longer = cost_ns.saturating_add(hop_ns);
                let slot = &mut best[hop.to.index()];
                if slot.is_none_or(|known| longer < known) {
                    *slot = Some(longer);
                    queue.push(Reverse((longer, hop.to)));
                }
            }
        }
        best
    }

    /// The cheapest path over the edges that `allowed` accepts. Both nodes must be of this topology.
    pub(crate) fn cheapest(
        &self,
        from: NodeId,
        to: NodeId,
        bytes: Bytes,
        allowed: impl Fn(NodeId, NodeId) -> bool,
    ) -> Option<Path> {
        let distance = self.distances_to(to, from, bytes, &allowed);
        let mut left = distance[from.index()]?;
        let mut nodes = vec![from];
        let mut here = from;
        while here != to {
            // Edges are sorted by their end, so the first that keeps the distance exact gives the least node order.
            let (next, rest) = self.costs_out_of(here).iter().find_map(|hop| {
                let rest = distance[hop.to.index()]?;
                let is_next = allowed(hop.from, hop.to) && rest.before(hop, bytes)? == left;
                is_next.then_some((hop.to, rest))
            })?;
            nodes.push(next);
            (here, left) = (next, rest);
        }
        Some(self.path_along(nodes, bytes))
    }

    /// The path that visits `nodes` in turn; consecutive nodes must be joined by usable edges.
    pub(crate) fn path_along(&self, nodes: Vec<NodeId>, bytes: Bytes) -> Path {
        let hops: Vec<Hop> = nodes
            .windows(2)
            .filter_map(|pair| self.edge(pair[0], pair[1]))
            .filter_map(|edge| Hop::over(edge, bytes))
            .collect();
        let cost_ns = hops.iter().fold(0_u64, |sum, hop| sum.saturating_add(hop.cost_ns));
        let bottleneck =
            hops.iter().map(|hop| hop.bandwidth.value).min_by(|a, b| a.gb_per_s.total_cmp(&b.gb_per_s));
        Path { nodes, hops, cost_ns, bottleneck }
    }

    /// Distances to `target`, exact for every node nearer than `until` and for `until` itself.
    fn distances_to(
        &self,
        target: NodeId,
        until: NodeId,
        bytes: Bytes,
        allowed: impl Fn(NodeId, NodeId) -> bool,
    ) -> Vec<Option<Distance>> {
        let mut best: Vec<Option<Distance>> = vec![None; self.nodes().len()];
        let mut queue = BinaryHeap::new();
        best[target.index()] = Some(Distance::default());
        queue.push(Reverse((Distance::default(), target)));
        while let Some(Reverse((distance, node))) = queue.pop() {
            if node == until {
                break;
            }
            if best[node.index()] != Some(distance) {
                continue; // A shorter way to this node was found after this entry was queued.
            }
            let hops = self.costs_into(node).iter();
            for hop in hops.filter(|hop| allowed(hop.from, hop.to)) {
                let Some(longer) = distance.before(hop, bytes) else {
                    continue;
                };
                let slot = &mut best[hop.from.index()];
                if slot.is_none_or(|known| longer < known) {
                    *slot = Some(longer);
                    queue.push(Reverse((longer, hop.from)));
                }
            }
        }
        best
    }
}

impl Hop {
    fn over(edge: &Edge, bytes: Bytes) -> Option<Self> {
        Some(Self {
            from: edge.from,
            to: edge.to,
            class: edge.class.value,
            path: edge.path.map(|path| path.value),
            bandwidth: edge.bandwidth(),
            latency: edge.latency(),
            cost_ns: Cost::of(edge).hop_ns(bytes)?,
        })
    }
}

/// How far a node is from the target, compared by cost and then by hops.
///
/// Hops make every step strictly longer, so that the walk back always ends even where a hop is free.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Distance {
    cost_ns: u64,
    hops: u32,
}

impl Distance {
    /// The distance of the node before `hop`, when this is the distance of the node behind it.
    fn before(self, hop: &Cost, bytes: Bytes) -> Option<Self> {
        Some(Self { cost_ns: self.cost_ns.saturating_add(hop.hop_ns(bytes)?), hops: self.hops + 1 })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use warpweft_core_types::Provenance;

    use super::*;
    use crate::{DeviceKind, LinkDesc, NodeDesc};

    /// `links` are `(from, to, GB/s)`; nodes are named by their number.
    fn graph(node_count: u32, links: &[(u32, u32, f64)]) -> Topology {
        let mut builder = Topology::builder();
        for index in 0..node_count {
            builder.node(NodeDesc::device(index.to_string(), DeviceKind::Gpu)).unwrap();
        }
        for &(from, to, gb_per_s) in links.iter().filter(|(from, to, _)| from != to) {
            let desc = LinkDesc::new(LinkClass::Unknown, Provenance::File)
                .bandwidth(Bandwidth::from_gb_per_s(gb_per_s))
                .latency(Duration::ZERO);
            builder.link(NodeId(from), NodeId(to), desc).unwrap();
        }
        builder.build()
    }

    fn check(topology: &Topology, from: u32, to: u32, expected: &[u32]) {
        let path = topology.best_path(NodeId(from), NodeId(to), Bytes(1_000)).unwrap();
        let got: Vec<u32> = path.nodes.iter().map(|node| node.0).collect();
        assert_eq!(got, expected, "from {from} to {to}");
        assert_eq!(path.hops.len() + 1, path.nodes.len());
    }

    #[test]
    fn a_chain_is_walked_from_end_to_end() {
        let chain = graph(4, &[(0, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0)]);
        check(&chain, 0, 3, &[0, 1, 2, 3]);
    }

    #[test]
    fn nodes_that_nothing_joins_are_named() {
        let one_way = graph(2, &[(0, 1, 1.0)]);
        let error = one_way.best_path(NodeId(1), NodeId(0), Bytes(1)).unwrap_err();
        assert_eq!(error.to_string(), "no path leads from 1 to 0");
    }

    #[test]
    fn a_node_of_another_topology_is_an_error() {
        let error = graph(1, &[]).best_path(NodeId(0), NodeId(9), Bytes(1)).unwrap_err();
        assert_eq!(error, PathError::UnknownNode { node: NodeId(9) });
    }

    #[test]
    fn a_path_to_itself_is_free() {
        let path = graph(1, &[]).best_path(NodeId(0), NodeId(0), Bytes::gib(1)).unwrap();
        assert_eq!((path.cost_ns, path.bottleneck), (0, None));
    }

    #[test]
    fn two_fast_hops_beat_a_slow_one() {
        check(&graph(3, &[(0, 2, 1.0), (0, 1, 10.0), (1, 2, 10.0)]), 0, 2, &[0, 1, 2]);
    }

    #[test]
    fn equal_cost_goes_to_fewer_hops_then_lower_nodes() {
        check(&graph(3, &[(0, 2, 1.0), (0, 1, 2.0), (1, 2, 2.0)]), 0, 2, &[0, 2]);
        let diamond = [(0, 2, 1.0), (2, 3, 1.0), (0, 1, 1.0), (1, 3, 1.0)];
        check(&graph(4, &diamond), 0, 3, &[0, 1, 3]);
    }

    #[test]
    fn a_link_without_bandwidth_or_under_veto_is_not_used() {
        check(&graph(3, &[(0, 2, 0.0), (0, 1, 1.0), (1, 2, 1.0)]), 0, 2, &[0, 1, 2]);
        let mut vetoed = graph(3, &[(0, 2, 9.0), (0, 1, 1.0), (1, 2, 1.0)]);
        vetoed.veto(NodeId(0), NodeId(2), "data was dropped").unwrap();
        check(&vetoed, 0, 2, &[0, 1, 2]);
    }

    #[test]
    fn the_slowest_hop_is_the_bottleneck() {
        let path = graph(3, &[(0, 1, 5.0), (1, 2, 3.0)]).best_path(NodeId(0), NodeId(2), Bytes(15)).unwrap();
        assert_eq!(path.bottleneck, Some(Bandwidth::from_gb_per_s(3.0)));
        assert_eq!(path.cost_ns, 3 + 5);
    }

    #[test]
    fn unknown_figures_are_marked_as_assumed() {
        let mut builder = Topology::builder();
        let a = builder.node(NodeDesc::device("a", DeviceKind::Gpu)).unwrap();
        let b = builder.node(NodeDesc::device("b", DeviceKind::Gpu)).unwrap();
        let desc = LinkDesc::new(LinkClass::Pcie, Provenance::Driver);
        builder.link(a, b, desc).unwrap();
        let path = builder.build().best_path(a, b, Bytes::mib(1)).unwrap();
        assert_eq!(path.hops[0].bandwidth.provenance, Provenance::Assumed);
        assert_eq!(path.hops[0].latency.provenance, Provenance::Assumed);
    }

    #[test]
    fn the_longest_transfers_saturate_instead_of_wrapping() {
        let path =
            graph(3, &[(0, 1, 1e-9), (1, 2, 1e-9)]).best_path(NodeId(0), NodeId(2), Bytes(u64::MAX)).unwrap();
        assert_eq!(path.cost_ns, u64::MAX);
    }

    /// Distances between all pairs by Floyd and Warshall, cost first and hops second.
    fn all_distances(topology: &Topology, bytes: Bytes) -> Vec<Vec<Option<(u64, u64)>>> {
        let count = topology.nodes().len();
        let mut distance = vec![vec![None; count]; count];
        for (index, row) in distance.iter_mut().enumerate() {
            row[index] = Some((0, 0));
        }
        for edge in topology.edges() {
            distance[edge.from.index()][edge.to.index()] =
                Cost::of(edge).hop_ns(bytes).map(|cost_ns| (cost_ns, 1));
        }
        for via in 0..count {
            for from in 0..count {
                for to in 0..count {
                    if let (Some(a), Some(b)) = (distance[from][via], distance[via][to]) {
                        let longer = (a.0 + b.0, a.1 + b.1);
                        let slot = &mut distance[from][to];
                        *slot = Some(slot.map_or(longer, |known: (u64, u64)| known.min(longer)));
                    }
                }
            }
        }
        distance
    }

    proptest! {
        #[test]
        fn best_paths_agree_with_floyd_warshall(
            links in prop::collection::vec((0_u32..9, 0_u32..9, 0_u8..4), 0..40),
            bytes in 0_u64..4_000,
        ) {
            let links: Vec<_> = links.into_iter().map(|(a, b, rate)| (a, b, f64::from(rate))).collect();
            let topology = graph(9, &links);
            let expected = all_distances(&topology, Bytes(bytes));
            for from in topology.nodes() {
                for to in topology.nodes() {
                    let got = topology.best_path(from.id, to.id, Bytes(bytes)).ok();
                    prop_assert_eq!(
                        got.map(|path| (path.cost_ns, path.hops.len() as u64)),
                        expected[from.id.index()][to.id.index()]
                    );
                }
            }
        }
    }
}
