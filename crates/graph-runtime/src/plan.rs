//! A graph as it is handed to devices: segments, and the work of each.

use std::sync::Arc;

use smallvec::SmallVec;
use warpweft_core_types::{Device, GraphNode, OwnedOp, PreparedGraph};

use crate::{
    error::PrepareError,
    graph::{Graph, NodePlace},
    memory::Bytes,
    node::{NodeId, OwnedTask, Work},
    order::Dag,
    segment::{self, Place},
    task::HostTask,
    usage::Usage,
};

/// What is submitted again and again: who comes after whom, and who uses what.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) segments: Vec<PlannedSegment>,
    /// A rank of a collective is in it, which is never skipped.
    pub(crate) has_collective: bool,
}

/// Work that is handed over together.
#[derive(Debug)]
pub(crate) struct PlannedSegment {
    pub(crate) place: NodePlace,
    /// Earlier segments that must have ended.
    pub(crate) after: Vec<u32>,
    /// All that it uses, each range once.
    pub(crate) uses: SmallVec<[(Bytes, Usage); 4]>,
    /// Its nodes with work, in the order in which its device knows them.
    pub(crate) nodes: SmallVec<[PlannedNode; 1]>,
}

/// A node, as far as it matters when it fails.
#[derive(Debug)]
pub(crate) struct PlannedNode {
    pub(crate) id: NodeId,
    pub(crate) name: Box<str>,
    pub(crate) uses: SmallVec<[(Bytes, Usage); 4]>,
}

/// What a segment does.
#[derive(Debug, Clone)]
pub(crate) enum SegmentWork {
    Graph(PreparedGraph),
    /// Where the device prepares no graphs.
    Ops(Vec<OwnedOp>),
    Op(OwnedOp),
    Task(OwnedTask),
}

impl Plan {
    pub(crate) fn new(graph: &Graph) -> (Self, Dag, Vec<Vec<u32>>) {
        let dag = graph.dag();
        let places = places(graph, &dag);
        let cut = segment::cut(&dag, &places);
        let mut segments = Vec::with_capacity(cut.len());
        let mut steps = Vec::with_capacity(cut.len());
        for segment in cut {
            let place = match segment.place {
                Place::Lane { device, lane } => NodePlace::Device { device, lane },
                Place::Host => NodePlace::Host,
            };
            let numbers = segment.steps.iter().filter_map(|&position| dag.steps[position as usize]);
            let nodes: SmallVec<[PlannedNode; 1]> =
                numbers.map(|node| planned(graph, NodeId(node))).collect();
            let uses = merged(nodes.iter().flat_map(|node| node.uses.iter().cloned()));
            segments.push(PlannedSegment { place, after: segment.after, uses, nodes });
            steps.push(segment.steps);
        }
        let has_collective = graph.nodes.iter().any(|node| node.work.kind() == "collective");
        (Self { segments, has_collective }, dag, steps)
    }
}

fn planned(graph: &Graph, id: NodeId) -> PlannedNode {
    let global = |one: &crate::infer::Use| {
        let memory = graph.memories.global[one.memory as usize];
        (Bytes { memory, range: one.range.clone() }, one.usage)
    };
    let uses = graph.uses_of(id).iter().map(global).collect();
    PlannedNode { id, name: graph.nodes[id.index()].label().into(), uses }
}

/// Where each step goes. A join goes where the node behind it is, or, if that is a task, where one before it was.
fn places(graph: &Graph, dag: &Dag) -> Vec<Place> {
    let place = |node: u32| match graph.nodes[node as usize].place {
        NodePlace::Device { device, lane } => Place::Lane { device, lane },
        NodePlace::Host => Place::Host,
    };
    let mut places: Vec<Place> = Vec::with_capacity(dag.steps.len());
    for position in 0..dag.len() {
        let step = dag.steps[position as usize];
        let behind = dag.steps[position as usize..].iter().find_map(|step| *step).map(place);
        let own = match (step, behind) {
            (Some(node), _) => place(node),
            (None, Some(lane @ Place::Lane { .. })) => lane,
            _ => {
                let before = dag.before(position).iter().map(|&before| places[before as usize]);
                before.max_by_key(|place| *place != Place::Host).unwrap_or(Place::Host)
            }
        };
        places.push(own);
    }
    places
}

/// Each range once: what is only written stays so, and every other mixture reads and writes.
pub(crate) fn merged(uses: impl Iterator<Item = (Bytes, Usage)>) -> SmallVec<[(Bytes, Usage); 4]> {
    let mut merged: SmallVec<[(Bytes, Usage); 4]> = SmallVec::new();
    let mut sorted: Vec<(Bytes, Usage)> = uses.collect();
    sorted.sort_by_key(|(bytes, _)| (bytes.memory, bytes.range.start, bytes.range.end));
    for (bytes, usage) in sorted {
        match merged.last_mut() {
            // The same bytes, or bytes that go on where others end and are used alike, as in a row of tiles.
            Some((last, known)) if last.memory == bytes.memory && last.range == bytes.range => {
                *known = both(*known, usage);
            }
            Some((last, known))
                if last.memory == bytes.memory && last.range.end == bytes.range.start && *known == usage =>
            {
                last.range.end = bytes.range.end;
            }
            _ => merged.push((bytes, usage)),
        }
    }
    merged
}

fn both(one: Usage, other: Usage) -> Usage {
    match (one == other, one.writes() || other.writes()) {
        (true, _) => one,
        (false, true) => Usage::ReadWrite,
        (false, false) => Usage::Read,
    }
}

/// Has a device prepare a segment. `steps` are its positions in the graph's order.
pub(crate) fn prepare(
    graph: &Graph,
    dag: &Dag,
    steps: &[u32],
    device: &dyn Device,
) -> Result<SegmentWork, PrepareError> {
    let work = |position: u32| dag.steps[position as usize].map(|node| &graph.nodes[node as usize].work);
    if device.graphs().is_none() {
        // In the order of the graph, one after the other.
        let ops = steps.iter().filter_map(|&position| match work(position) {
            Some(Work::Op(op)) => Some(op.clone()),
            _ => None,
        });
        return Ok(SegmentWork::Ops(ops.collect()));
    }
    let nodes: Vec<GraphNode> = steps
        .iter()
        .map(|&position| {
            let inside = dag.before(position).iter().filter_map(|before| steps.binary_search(before).ok());
            let op = work(position).and_then(Work::as_graph_op).unwrap_or(warpweft_core_types::GraphOp::Join);
            GraphNode { op, after: inside.collect() }
        })
        .collect();
    let named = |source: warpweft_core_types::GraphError| named(graph, dag, steps, source);
    PreparedGraph::new(device, &nodes).map(SegmentWork::Graph).map_err(named)
}

/// A device's complaint, with the node's name where it tells which one it is about.
fn named(graph: &Graph, dag: &Dag, steps: &[u32], source: warpweft_core_types::GraphError) -> PrepareError {
    use warpweft_core_types::GraphError::{Node, Submit};
    let position = match &source {
        Node { node, .. } | Submit { node, .. } => steps.get(*node),
        _ => None,
    };
    match position.and_then(|&position| dag.steps[position as usize]) {
        Some(node) => {
            let name = graph.nodes[node as usize].label().to_owned();
            PrepareError::Node { node: NodeId(node), name, source }
        }
        None => PrepareError::Graph(source),
    }
}

/// A join among tasks is a task that does nothing.
pub(crate) fn nothing() -> OwnedTask {
    OwnedTask { task: HostTask::new(|_| {}).brief(), operands: Arc::default() }
}

/// The work of all segments, in one slot of a prepared graph or for a single submission.
pub(crate) type SlotWork = Arc<[SegmentWork]>;
