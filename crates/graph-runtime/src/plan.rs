//! A graph as it is handed to devices: segments, and the work of each.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use warpweft_core_types::{
    BufferDesc, BufferView, Device, DeviceClock, GraphError, GraphNode, GraphOp, Op, PreparedGraph,
    RangeError, TimestampRegion,
};

use crate::{
    error::PrepareError,
    graph::{Graph, NodePlace, Recorded},
    memory::Bytes,
    node::{NodeId, OwnedTask, Work},
    order::Dag,
    segment::{self, Place},
    trace::Stamps,
    usage::Usage,
};

/// What is submitted again and again: who comes after whom, and who uses what.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) recorded: Arc<Recorded>,
    pub(crate) segments: Vec<PlannedSegment>,
    /// A rank of a collective is in it, which is never skipped.
    pub(crate) has_collective: bool,
    /// For each node those that come directly before it, where a trace wants to know.
    pub(crate) after: Vec<SmallVec<[NodeId; 2]>>,
}

impl Plan {
    /// What a segment goes by: its first node's name.
    pub(crate) fn name_of(&self, number: usize) -> Box<str> {
        let first = self.segments[number].nodes.first();
        first.map_or("join", |&node| self.recorded.nodes[node as usize].label()).into()
    }
}

/// Work that is handed over together.
#[derive(Debug)]
pub(crate) struct PlannedSegment {
    pub(crate) place: NodePlace,
    /// Earlier segments that must have ended.
    pub(crate) after: Vec<u32>,
    /// All that it uses, each range once.
    pub(crate) uses: Uses,
    /// Its nodes with work, in the order in which its device knows them.
    pub(crate) nodes: SmallVec<[u32; 2]>,
}

/// Ranges, and what is done to them.
pub(crate) type Uses = SmallVec<[(Bytes, Usage); 4]>;

/// What a segment does.
#[derive(Debug, Clone)]
pub(crate) enum SegmentWork {
    Graph {
        graph: PreparedGraph,
        /// Where the device notes times, for a trace.
        stamps: Option<Stamps>,
    },
    /// The work of the plan's only node.
    Single,
    /// Where the device prepares no graphs.
    Ops(SmallVec<[Arc<GraphOp>; 1]>),
    Task(OwnedTask),
    /// Nothing: another library has enqueued the work.
    Mark,
}

/// The work of all segments, in one slot of a prepared graph or for a single submission.
pub(crate) type SlotWork = Arc<[SegmentWork]>;

/// A plan with what is needed to prepare its work, as often as there are slots.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) plan: Arc<Plan>,
    /// The nodes of each segment's own graph, for devices.
    graphs: Vec<Vec<GraphNode>>,
    /// The position of each of those nodes' numbers in the recording; a join has none.
    numbers: Vec<Vec<Option<u32>>>,
}

impl Layout {
    pub(crate) fn new(graph: &Graph) -> Self {
        let dag = graph.dag();
        let recorded = &graph.recorded;
        let cut = segment::cut(&dag, &places(recorded, &dag));
        let mut local = vec![0_usize; dag.steps.len()];
        let mut segment_of = vec![0_u32; dag.steps.len()];
        for (number, segment) in (0..).zip(&cut) {
            for (position, &step) in segment.steps.iter().enumerate() {
                local[step as usize] = position;
                segment_of[step as usize] = number;
            }
        }
        let (mut graphs, mut numbers) = (Vec::with_capacity(cut.len()), Vec::with_capacity(cut.len()));
        let mut segments = Vec::with_capacity(cut.len());
        for (number, segment) in (0..).zip(cut) {
            let inside = |step: u32| {
                let before = dag.before(step).iter().filter(|before| segment_of[**before as usize] == number);
                before.map(|before| local[*before as usize]).collect()
            };
            let node = |&step: &u32| {
                let op = match dag.steps[step as usize].map(|node| &recorded.nodes[node as usize].work) {
                    Some(Work::Device(op)) => Arc::clone(op),
                    _ => Arc::new(GraphOp::Join),
                };
                GraphNode { op, after: inside(step) }
            };
            let is_device = segment.place != Place::Host;
            graphs.push(if is_device { segment.steps.iter().map(node).collect() } else { Vec::new() });
            numbers.push(segment.steps.iter().map(|&step| dag.steps[step as usize]).collect());
            segments.push(planned(recorded, &dag, segment));
        }
        let plan = Plan {
            recorded: Arc::clone(recorded),
            segments,
            has_collective: recorded.nodes.iter().any(|node| node.work.kind() == "collective"),
            after: if graph.domain.tracer.is_active() { predecessors(graph) } else { Vec::new() },
        };
        Self { plan: Arc::new(plan), graphs, numbers }
    }

    /// Has devices prepare the work, once more.
    pub(crate) fn prepare(&self, graph: &Graph) -> Result<SlotWork, PrepareError> {
        let one = |(number, segment): (usize, &PlannedSegment)| match segment.place {
            NodePlace::Device { device, .. } => {
                let entry = &graph.domain.devices[device as usize];
                let traced = graph.domain.tracer.is_active();
                let stamped = if traced { self.prepare_stamped(number, entry.device.as_ref()) } else { None };
                match stamped {
                    Some(work) => Ok(work),
                    None => self.prepare_segment(number, entry.device.as_ref()),
                }
            }
            NodePlace::Host => Ok(SegmentWork::Task(self.task(segment))),
        };
        self.plan.segments.iter().enumerate().map(one).collect()
    }

    fn prepare_segment(&self, number: usize, device: &dyn Device) -> Result<SegmentWork, PrepareError> {
        let nodes = &self.graphs[number];
        if device.graphs().is_none() {
            // In the order of the graph, one after the other.
            let with_work = nodes.iter().filter(|node| !matches!(*node.op, GraphOp::Join));
            return Ok(SegmentWork::Ops(with_work.map(|node| Arc::clone(&node.op)).collect()));
        }
        PreparedGraph::new(device, nodes)
            .map(|graph| SegmentWork::Graph { graph, stamps: None })
            .map_err(|source| self.named(number, source))
    }

    /// The same with a note of the time before and after each node; none where the device tells no time, or has no
    /// memory for it that the host reads.
    fn prepare_stamped(&self, number: usize, device: &dyn Device) -> Option<SegmentWork> {
        let (clock, nodes) = (device.clock()?, &self.graphs[number]);
        let with_work = nodes.iter().filter(|node| !matches!(*node.op, GraphOp::Join)).count();
        let size = 2 * TimestampRegion::SIZE * with_work as u64;
        let view = BufferView::whole(device.allocate(&BufferDesc::host_visible(size)).ok()?);
        let mut stamped = Stamped {
            clock,
            view: &view,
            nodes: Vec::new(),
            ends: Vec::new(),
            positions: Vec::new(),
            words: 0,
        };
        nodes.iter().try_for_each(|node| stamped.add(node)).ok()?;
        let (nodes, positions) = (stamped.nodes, stamped.positions.into());
        let graph = PreparedGraph::new(device, &nodes).ok()?;
        Some(SegmentWork::Graph { graph, stamps: Some(Stamps { view, positions }) })
    }

    /// A task, or, for a join among tasks, one that does nothing.
    fn task(&self, segment: &PlannedSegment) -> OwnedTask {
        let node = segment.nodes.first().map(|&node| &self.plan.recorded.nodes[node as usize].work);
        match node {
            Some(Work::Task(task)) => task.clone(),
            _ => OwnedTask::nothing(),
        }
    }

    /// A device's complaint, with the node's name where it tells which one it is about.
    fn named(&self, segment: usize, source: GraphError) -> PrepareError {
        let position = match &source {
            GraphError::Node { node, .. } | GraphError::Submit { node, .. } => Some(*node),
            _ => None,
        };
        let number = position.and_then(|position| self.numbers[segment].get(position).copied().flatten());
        match number {
            Some(node) => {
                let name = self.plan.recorded.nodes[node as usize].label().to_owned();
                PrepareError::Node { node: NodeId(node), name, source: Box::new(source) }
            }
            None => PrepareError::Graph(Box::new(source)),
        }
    }

    /// Where each node is: its segment, and its position in the segment's own graph.
    pub(crate) fn positions(&self) -> Vec<(usize, usize)> {
        let mut positions = vec![(0, 0); self.plan.recorded.nodes.len()];
        for (segment, numbers) in self.numbers.iter().enumerate() {
            for (position, number) in numbers.iter().enumerate() {
                if let Some(node) = number {
                    positions[*node as usize] = (segment, position);
                }
            }
        }
        positions
    }

    /// Whether two plans differ in nothing but operands: the same nodes at the same places, with the same edges.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        let alike = |(one, other): (&Vec<GraphNode>, &Vec<GraphNode>)| {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.after == other.after)
        };
        let placed = |(one, other): (&PlannedSegment, &PlannedSegment)| {
            one.place == other.place && one.after == other.after
        };
        self.numbers == other.numbers
            && self.graphs.iter().zip(&other.graphs).all(alike)
            && self.plan.segments.iter().zip(&other.plan.segments).all(placed)
    }

    /// The task of a segment.
    pub(crate) fn task_of(&self, segment: usize) -> OwnedTask {
        self.task(&self.plan.segments[segment])
    }

    /// The work of a node as its device's graph has it.
    pub(crate) fn op(&self, (segment, position): (usize, usize)) -> Option<&Arc<GraphOp>> {
        self.graphs[segment].get(position).map(|node| &node.op)
    }
}

/// A device's graph with a note of the time around each node.
struct Stamped<'a> {
    clock: &'a dyn DeviceClock,
    view: &'a BufferView,
    nodes: Vec<GraphNode>,
    /// For each node of the plain graph the one that ends it here.
    ends: Vec<usize>,
    /// For each node of the plain graph itself here.
    positions: Vec<usize>,
    words: u64,
}

impl Stamped<'_> {
    fn add(&mut self, node: &GraphNode) -> Result<(), RangeError> {
        let after: SmallVec<[usize; 2]> = node.after.iter().map(|&before| self.ends[before]).collect();
        if matches!(*node.op, GraphOp::Join) {
            self.push(Arc::clone(&node.op), after);
            self.positions.push(self.nodes.len() - 1);
        } else {
            self.stamp(after)?;
            let begin = self.nodes.len() - 1;
            self.push(Arc::clone(&node.op), [begin].into_iter().collect());
            self.positions.push(begin + 1);
            self.stamp([begin + 1].into_iter().collect())?;
        }
        self.ends.push(self.nodes.len() - 1);
        Ok(())
    }

    fn stamp(&mut self, after: SmallVec<[usize; 2]>) -> Result<(), RangeError> {
        let start = self.words * TimestampRegion::SIZE;
        let word = self.view.slice(start..start + TimestampRegion::SIZE)?;
        let region = TimestampRegion::new(self.clock, &word)?;
        self.push(Arc::new(GraphOp::from(&Op::Timestamp(region))), after);
        self.words += 1;
        Ok(())
    }

    fn push(&mut self, op: Arc<GraphOp>, mut after: SmallVec<[usize; 2]>) {
        after.sort_unstable();
        self.nodes.push(GraphNode { op, after });
    }
}

fn predecessors(graph: &Graph) -> Vec<SmallVec<[NodeId; 2]>> {
    graph.ids().map(|node| graph.predecessors(node).into()).collect()
}

fn planned(recorded: &Recorded, dag: &Dag, segment: segment::Segment) -> PlannedSegment {
    let place = match segment.place {
        Place::Lane { device, lane } => NodePlace::Device { device, lane },
        Place::Host => NodePlace::Host,
    };
    let nodes: SmallVec<[u32; 2]> =
        segment.steps.iter().filter_map(|&step| dag.steps[step as usize]).collect();
    let uses = merged(nodes.iter().flat_map(|&node| recorded.bytes_of(node)));
    PlannedSegment { place, after: segment.after, uses, nodes }
}

/// Where each step goes. A join goes where the node behind it is, or, if that is a task, where one before it was.
fn places(recorded: &Recorded, dag: &Dag) -> Vec<Place> {
    let place = |node: u32| match recorded.nodes[node as usize].place {
        NodePlace::Device { device, lane } => Place::Lane { device, lane },
        NodePlace::Host => Place::Host,
    };
    let mut places: Vec<Place> = Vec::with_capacity(dag.steps.len());
    for position in 0..dag.len() {
        let behind = || dag.steps[position as usize..].iter().find_map(|step| *step).map(place);
        let own = match dag.steps[position as usize] {
            Some(node) => place(node),
            None => match behind() {
                Some(lane @ Place::Lane { .. }) => lane,
                _ => {
                    let before = dag.before(position).iter().map(|&before| places[before as usize]);
                    before.max_by_key(|place| *place != Place::Host).unwrap_or(Place::Host)
                }
            },
        };
        places.push(own);
    }
    places
}

/// Each range once: what is only written stays so, and every other mixture reads and writes.
fn merged(uses: impl Iterator<Item = (Bytes, Usage)>) -> Uses {
    // Most often there are few ranges and many uses of each.
    let mut known: FxHashMap<(u32, u64, u64), Usage> = FxHashMap::default();
    for (bytes, usage) in uses {
        let entry = known.entry((bytes.memory, bytes.range.start, bytes.range.end));
        entry.and_modify(|known| *known = both(*known, usage)).or_insert(usage);
    }
    let mut sorted: Vec<_> = known.into_iter().collect();
    sorted.sort_unstable_by_key(|(range, _)| *range);
    let mut merged = Uses::new();
    for ((memory, start, end), usage) in sorted {
        let bytes = Bytes { memory, range: start..end };
        match merged.last_mut() {
            // Bytes that go on where others end and are used alike, as in a row of tiles.
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
