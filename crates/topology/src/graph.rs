//! The graph itself, stored for fast walks in both directions.

use std::ops::Range;

use warpweft_core_types::{DeviceUuid, LinkEnd, LinkFact};

use crate::{
    BuildError, Edge, EdgeError, Measurement, Node, NodeDesc, NodeId, NodeKind, TopologyBuilder, cost::Cost,
};

/// What is linked to what.
///
/// Nodes and edges are fixed once built; later an edge can only be measured or vetoed.
#[derive(Debug, Clone, PartialEq)]
pub struct Topology {
    nodes: Vec<Node>,
    /// Sorted by `from`, then `to`.
    edges: Vec<Edge>,
    /// Beside `edges`.
    costs: Vec<Cost>,
    /// Where each node's outgoing edges start in `edges`; one more entry than nodes.
    starts: Vec<usize>,
    /// Positions in `edges`, sorted by `to`, then `from`.
    incoming: Vec<usize>,
    /// Beside `incoming`, so that walks against the edges read memory in order too.
    incoming_costs: Vec<Cost>,
    /// Where each node's incoming edges start in `incoming`; one more entry than nodes.
    incoming_starts: Vec<usize>,
}

impl Topology {
    /// Starts an empty topology.
    pub fn builder() -> TopologyBuilder {
        TopologyBuilder::default()
    }

    /// The topology of `devices` and what backends report about links among them and with host memory.
    ///
    /// Facts about one pair are merged: stronger evidence wins field by field.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if two devices are the same, a fact names another device, or a figure is impossible.
    pub fn from_facts(devices: Vec<NodeDesc>, facts: &[LinkFact]) -> Result<Self, BuildError> {
        let mut builder = Self::builder();
        for device in devices {
            builder.node(device)?;
        }
        for fact in facts {
            builder.fact(fact)?;
        }
        Ok(builder.build())
    }

    /// All nodes, in the order of their ids.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// All edges, ordered by `from`, then `to`.
    pub fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// The devices among the nodes, in the order of their ids.
    pub fn devices(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.is_device())
    }

    /// The node with this id, if it is of this topology.
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.index())
    }

    /// The node with this name.
    pub fn find(&self, name: &str) -> Option<NodeId> {
        self.find_by(|node| node.name == name)
    }

    /// The node of this silicon.
    pub fn device(&self, uuid: DeviceUuid) -> Option<NodeId> {
        self.find_by(|node| node.uuid() == Some(uuid))
    }

    /// The first node that is the memory of NUMA node `numa_node`.
    pub fn host(&self, numa_node: u32) -> Option<NodeId> {
        self.find_by(|node| node.kind == NodeKind::Host { numa_node })
    }

    /// The node at one end of a link as backends name it.
    pub fn end(&self, end: LinkEnd) -> Option<NodeId> {
        match end {
            LinkEnd::Device(uuid) => self.device(uuid),
            LinkEnd::Host { numa_node } => self.host(numa_node),
        }
    }

    /// The edge between two nodes, vetoed or not.
    pub fn edge(&self, from: NodeId, to: NodeId) -> Option<&Edge> {
        self.position(from, to).map(|index| &self.edges[index])
    }

    /// The edges that start at `node`, by `to`; none for an unknown node.
    pub fn edges_from(&self, node: NodeId) -> &[Edge] {
        &self.edges[range(&self.starts, node)]
    }

    /// The edges that end at `node`, by `from`; none for an unknown node.
    pub fn edges_to(&self, node: NodeId) -> impl Iterator<Item = &Edge> {
        self.incoming[range(&self.incoming_starts, node)].iter().map(|&index| &self.edges[index])
    }

    /// Forbids an edge for good, saying why; the first reason given is kept.
    ///
    /// # Errors
    ///
    /// [`EdgeError::NoEdge`] or [`EdgeError::UnknownNode`] if there is nothing to forbid.
    pub fn veto(&mut self, from: NodeId, to: NodeId, reason: impl Into<String>) -> Result<(), EdgeError> {
        self.change(from, to, |edge| {
            edge.veto.get_or_insert_with(|| reason.into());
            Ok(())
        })
    }

    /// Records what a timed transfer over an edge showed. A veto stays.
    ///
    /// # Errors
    ///
    /// [`EdgeError::NoEdge`] or [`EdgeError::UnknownNode`]: a probe makes no edge; [`EdgeError::BadBandwidth`].
    pub fn measure(&mut self, from: NodeId, to: NodeId, measurement: &Measurement) -> Result<(), EdgeError> {
        self.change(from, to, |edge| edge.measure(measurement))
    }

    /// `edges` must be sorted by `(from, to)`, without repetition, and name nodes of `nodes` only.
    pub(crate) fn assemble(nodes: Vec<Node>, edges: Vec<Edge>) -> Self {
        let mut incoming: Vec<usize> = (0..edges.len()).collect();
        incoming.sort_by_key(|&index| (edges[index].to, edges[index].from));
        let outgoing_starts = starts(nodes.len(), edges.iter().map(|edge| edge.from));
        let incoming_starts = starts(nodes.len(), incoming.iter().map(|&index| edges[index].to));
        let costs: Vec<Cost> = edges.iter().map(Cost::of).collect();
        Self {
            incoming_costs: incoming.iter().map(|&index| costs[index]).collect(),
            nodes,
            edges,
            costs,
            starts: outgoing_starts,
            incoming,
            incoming_starts,
        }
    }

    /// The name of a node that is known to be there.
    pub(crate) fn name(&self, id: NodeId) -> &str {
        &self.nodes[id.index()].name
    }

    fn find_by(&self, wanted: impl Fn(&Node) -> bool) -> Option<NodeId> {
        self.nodes.iter().find(|node| wanted(node)).map(|node| node.id)
    }

    fn position(&self, from: NodeId, to: NodeId) -> Option<usize> {
        let range = range(&self.starts, from);
        let start = range.start;
        self.edges[range].binary_search_by_key(&to, |edge| edge.to).ok().map(|offset| start + offset)
    }

    /// Costs of the edges that start at `node`, by `to`.
    pub(crate) fn costs_out_of(&self, node: NodeId) -> &[Cost] {
        &self.costs[range(&self.starts, node)]
    }

    /// Costs of the edges that end at `node`, by `from`.
    pub(crate) fn costs_into(&self, node: NodeId) -> &[Cost] {
        &self.incoming_costs[range(&self.incoming_starts, node)]
    }

    fn change(
        &mut self,
        from: NodeId,
        to: NodeId,
        change: impl FnOnce(&mut Edge) -> Result<(), EdgeError>,
    ) -> Result<(), EdgeError> {
        for node in [from, to] {
            self.node(node).ok_or(EdgeError::UnknownNode { node })?;
        }
        let Some(index) = self.position(from, to) else {
            return Err(EdgeError::NoEdge { from: self.name(from).to_owned(), to: self.name(to).to_owned() });
        };
        change(&mut self.edges[index])?;
        let cost = Cost::of(&self.edges[index]);
        self.costs[index] = cost;
        let into = range(&self.incoming_starts, to);
        let copies = self.incoming_costs[into].iter_mut();
        for copy in copies.filter(|copy| copy.from == from) {
            *copy = cost;
        }
        Ok(())
    }
}

/// Where each node's run begins in a list of edges sorted by one of their ends.
fn starts(node_count: usize, sorted_ends: impl Iterator<Item = NodeId>) -> Vec<usize> {
    let mut starts = vec![0; node_count + 1];
    for end in sorted_ends {
        starts[end.index() + 1] += 1;
    }
    for index in 1..starts.len() {
        starts[index] += starts[index - 1];
    }
    starts
}

fn range(starts: &[usize], node: NodeId) -> Range<usize> {
    match starts.get(node.index()..node.index() + 2) {
        Some(bounds) => bounds[0]..bounds[1],
        None => 0..0,
    }
}
