//! What there is to draw, whatever it is drawn with.

use std::collections::BTreeSet;

use warpweft_core_types::{Bytes, DeviceId};

use super::MOST_NODES;
use crate::{
    graph::{Graph, Hazard, Reason},
    node::NodeId,
    order::Dag,
};

/// The steps of a graph that are drawn, and what leads from one to another.
pub(super) struct Picture {
    pub(super) steps: Vec<Step>,
    pub(super) edges: Vec<Edge>,
    /// Devices with a node, in the order of the runtime's.
    pub(super) devices: Vec<DeviceId>,
    pub(super) has_tasks: bool,
    pub(super) node_count: usize,
    pub(super) edge_count: usize,
    /// Nodes of the critical path.
    pub(super) critical_count: usize,
    /// Nodes that are not drawn.
    pub(super) left_out: usize,
}

/// A node, or a join.
pub(super) struct Step {
    /// None for a join.
    pub(super) node: Option<Node>,
    /// Steps on the longest way to it.
    pub(super) level: usize,
}

pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) name: String,
    pub(super) kind: &'static str,
    /// Position among the picture's devices; none for tasks of the host.
    pub(super) device: Option<usize>,
    pub(super) place: String,
    pub(super) is_critical: bool,
}

/// Both ends are positions among the steps.
pub(super) struct Edge {
    pub(super) from: usize,
    pub(super) to: usize,
    /// In a few letters; none where a join is at an end.
    pub(super) label: Option<String>,
    /// In full.
    pub(super) title: String,
    pub(super) is_critical: bool,
}

impl Picture {
    pub(super) fn of(graph: &Graph) -> Self {
        let dag = graph.dag();
        let shown = shown_steps(&dag);
        let path = graph.critical_path(|_| 1);
        let critical = critical_edges(&dag, &path);
        let drawn: BTreeSet<u32> = dag.steps[..shown].iter().copied().flatten().collect();
        let mut devices: Vec<DeviceId> = Vec::new();
        for entry in &graph.domain.devices {
            if graph.ids().any(|node| graph.device(node) == Some(entry.id)) {
                devices.push(entry.id);
            }
        }
        let on_path: BTreeSet<NodeId> = path.iter().copied().filter(|id| drawn.contains(&id.0)).collect();
        let levels = levels(&dag, shown);
        let step = |(step, level): (&Option<u32>, usize)| Step {
            node: step.map(|node| describe(graph, NodeId(node), &devices, &on_path)),
            level,
        };
        let steps = dag.steps[..shown].iter().zip(levels).map(step).collect();
        let mut edges = Vec::new();
        for to in 0..shown {
            for &from in dag.before(position(to)) {
                let is_critical = critical.contains(&(from, position(to)));
                edges.push(edge(graph, &dag, from as usize, to, is_critical));
            }
        }
        Self {
            steps,
            edges,
            has_tasks: graph.ids().any(|node| graph.device(node).is_none()),
            devices,
            node_count: graph.len(),
            edge_count: dag.edge_count(),
            critical_count: path.len(),
            left_out: graph.len() - drawn.len(),
        }
    }

    /// What it is a picture of, in one line.
    pub(super) fn summary(&self) -> String {
        let count = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let mut text = format!(
            "{}, {}, {} on the critical path",
            count(self.node_count, "node"),
            count(self.edge_count, "edge"),
            self.critical_count
        );
        if self.left_out > 0 {
            text.push_str(&format!("; the last {} are left out", count(self.left_out, "node")));
        }
        text
    }
}

/// Positions in a graph's order; those of a [`Dag`] fit by its construction.
fn position(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// How many steps from the beginning on are drawn.
fn shown_steps(dag: &Dag) -> usize {
    let mut nodes = 0;
    let beyond = |step: &Option<u32>| {
        nodes += usize::from(step.is_some());
        nodes > MOST_NODES
    };
    let end = dag.steps.iter().position(beyond).unwrap_or(dag.steps.len());
    // A join with nobody behind it says nothing.
    dag.steps[..end].iter().rposition(Option::is_some).map_or(0, |last| last + 1)
}

/// Joins have levels of their own, so that nothing stands beside what it comes after.
fn levels(dag: &Dag, shown: usize) -> Vec<usize> {
    let mut levels: Vec<usize> = Vec::with_capacity(shown);
    for step in 0..shown {
        let before = dag.before(position(step)).iter().map(|&before| levels[before as usize] + 1);
        levels.push(before.max().unwrap_or(0));
    }
    levels
}

fn describe(graph: &Graph, id: NodeId, devices: &[DeviceId], critical: &BTreeSet<NodeId>) -> Node {
    let device = graph.device(id);
    Node {
        id,
        name: graph.name(id).unwrap_or_default().to_owned(),
        kind: graph.kind(id).unwrap_or_default(),
        device: device.and_then(|device| devices.iter().position(|other| *other == device)),
        place: device.map_or_else(|| "the host".to_owned(), |device| device.to_string()),
        is_critical: critical.contains(&id),
    }
}

fn edge(graph: &Graph, dag: &Dag, from: usize, to: usize, is_critical: bool) -> Edge {
    let (label, title) = match (dag.steps[from], dag.steps[to]) {
        (Some(earlier), Some(later)) => reason(graph, NodeId(earlier), NodeId(later)),
        (None, Some(later)) => {
            let many = dag.before(position(from)).len();
            (None, format!("{} comes after all {many} that are joined here", graph.label(NodeId(later))))
        }
        (Some(earlier), None) => (None, format!("{} is joined with others", graph.label(NodeId(earlier)))),
        (None, None) => (None, "joined with others".to_owned()),
    };
    Edge { from, to, label, title, is_critical }
}

fn reason(graph: &Graph, earlier: NodeId, later: NodeId) -> (Option<String>, String) {
    const SHOWN: usize = 6;
    let reasons = graph.reasons(earlier, later);
    // What is read is what most people look for.
    let read = reasons.iter().find(|reason| reason.hazard == Hazard::ReadAfterWrite);
    let Some(first) = read.or(reasons.first()) else {
        // Commutative nodes are ordered by the graph and not by their uses.
        let text = format!("{} and {} take turns", graph.label(earlier), graph.label(later));
        return (Some("turns".to_owned()), text);
    };
    let mut lines: Vec<String> = reasons.iter().take(SHOWN).map(|reason| graph.explain(reason)).collect();
    if reasons.len() > SHOWN {
        lines.push(format!("and {} more", reasons.len() - SHOWN));
    }
    (Some(short(first, reasons.len() - 1)), lines.join("\n"))
}

fn short(reason: &Reason, others: usize) -> String {
    let bytes = Bytes(reason.range.end - reason.range.start);
    let more = if others == 0 { String::new() } else { format!(" +{others}") };
    format!("{} {bytes}{more}", abbreviation(reason.hazard))
}

pub(super) const fn abbreviation(hazard: Hazard) -> &'static str {
    match hazard {
        Hazard::ReadAfterWrite => "RAW",
        Hazard::WriteAfterRead => "WAR",
        Hazard::WriteAfterWrite => "WAW",
    }
}

/// The edges between the nodes of a path, the ways over joins included.
fn critical_edges(dag: &Dag, path: &[NodeId]) -> BTreeSet<(u32, u32)> {
    let mut place_of = vec![0; dag.steps.len()];
    for place in 0..dag.len() {
        if let Some(node) = dag.steps[place as usize] {
            place_of[node as usize] = place;
        }
    }
    let mut edges = BTreeSet::new();
    for pair in path.windows(2) {
        let (from, to) = (place_of[pair[0].index()], place_of[pair[1].index()]);
        let way = over_joins(dag, from, to);
        edges.extend(way.windows(2).map(|pair| (pair[0], pair[1])));
    }
    edges
}

/// The steps from one node to the next of a path.
fn over_joins(dag: &Dag, from: u32, to: u32) -> Vec<u32> {
    let mut open = vec![vec![to]];
    while let Some(way) = open.pop() {
        let Some(&last) = way.last() else { continue };
        for &before in dag.before(last) {
            let longer = || way.iter().copied().chain([before]);
            if before == from {
                let mut way: Vec<u32> = longer().collect();
                way.reverse();
                return way;
            }
            if dag.steps[before as usize].is_none() {
                open.push(longer().collect());
            }
        }
    }
    Vec::new()
}
