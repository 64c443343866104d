//! Graphs as they are recorded, and what was inferred from them.

use std::{fmt, ops::Range, sync::Arc};

use rustc_hash::FxHashMap;
use serde::Serialize;
use warpweft_core_types::{Buffer, BufferView, CopyRegion, DeviceId, FillRegion, Launch, Op, RangeError};

use crate::{
    completion::Completion,
    domain::Domain,
    error::{PrepareError, RecordError, RunError},
    exec::ExecutableGraph,
    infer::{Inference, MAX_NODES, Use},
    memory::Bytes,
    node::{NodeDesc, NodeId, Work, WorkDesc, check_said, own, usage_of},
    order::Dag,
    staging,
    task::HostTask,
    usage::Usage,
};

/// Operations in the order in which they would be right one by one.
///
/// Whatever runs later, on however many devices side by side, leaves the bytes that running them one by one in this
/// order leaves. Nobody says who waits for whom: it follows from what each reads and writes.
pub struct Graph {
    pub(crate) domain: Arc<Domain>,
    pub(crate) recorded: Arc<Recorded>,
    pub(crate) inference: Inference,
    pub(crate) memories: GraphMemories,
}

/// What was recorded, which submissions under way share.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recorded {
    pub(crate) nodes: Vec<Node>,
    pub(crate) uses: Vec<Use>,
    /// The runtime's number of each memory.
    pub(crate) global: Vec<u32>,
}

impl Recorded {
    pub(crate) fn uses_of(&self, node: NodeId) -> &[Use] {
        let uses = &self.nodes[node.index()].uses;
        &self.uses[uses.start as usize..uses.end as usize]
    }

    /// What a node uses, by the runtime's numbers. Between submissions those that may trade places do not: they are in
    /// the order in which they were submitted.
    pub(crate) fn bytes_of(&self, node: u32) -> impl Iterator<Item = (Bytes, Usage)> {
        let global = |one: &Use| {
            let memory = self.global[one.memory as usize];
            let usage = if one.usage == Usage::Commutative { Usage::ReadWrite } else { one.usage };
            (Bytes { memory, range: one.range.clone() }, usage)
        };
        self.uses_of(NodeId(node)).iter().map(global)
    }
}

/// A recorded node.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) work: Work,
    pub(crate) name: Option<Box<str>>,
    pub(crate) place: NodePlace,
    /// Its part of the graph's uses: those of its operands, then those beside them.
    pub(crate) uses: Range<u32>,
    /// What it uses though its work does not say so.
    pub(crate) beside: Box<[(BufferView, Usage)]>,
    /// How it uses operands otherwise than its work says, by their positions.
    pub(crate) said: Box<[(usize, Usage)]>,
}

/// Where a node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodePlace {
    /// On a device, by its position among the runtime's, in one of its lanes.
    Device {
        device: u32,
        lane: u32,
    },
    Host,
}

/// The memories of a graph, each with its number among the runtime's.
#[derive(Debug, Default)]
pub(crate) struct GraphMemories {
    by_buffer: FxHashMap<usize, (u32, u64)>,
    by_global: FxHashMap<u32, u32>,
    /// Those that are known by their addresses, so that no other comes to lie there.
    held: Vec<Arc<dyn Buffer>>,
    /// A view of each.
    pub(crate) samples: Vec<BufferView>,
    /// By the runtime's number.
    names: FxHashMap<u32, Box<str>>,
}

impl GraphMemories {
    fn find(
        &mut self,
        domain: &Domain,
        global: &mut Vec<u32>,
        view: &BufferView,
        name: &str,
    ) -> Result<(u32, u64), RecordError> {
        let key = Arc::as_ptr(view.buffer()).addr();
        if let Some(&known) = self.by_buffer.get(&key) {
            return Ok(known);
        }
        let (number, base) = domain.memory_of(view, name)?;
        let next = u32::try_from(global.len()).unwrap_or(u32::MAX);
        let local = *self.by_global.entry(number).or_insert(next);
        if local == next {
            global.push(number);
            self.samples.push(BufferView::whole(Arc::clone(view.buffer())));
        }
        self.held.push(Arc::clone(view.buffer()));
        self.by_buffer.insert(key, (local, base));
        Ok((local, base))
    }
}

impl Graph {
    pub(crate) fn new(domain: &Arc<Domain>) -> Self {
        Self {
            domain: Arc::clone(domain),
            recorded: Arc::default(),
            inference: Inference::default(),
            memories: GraphMemories::default(),
        }
    }

    /// Records a kernel.
    ///
    /// # Errors
    ///
    /// See [`RecordError`].
    pub fn launch(&mut self, launch: Launch<'_>) -> Result<NodeId, RecordError> {
        self.add(NodeDesc::launch(launch))
    }

    /// Records a copy of all of `src` to all of `dst`, wherever they are.
    ///
    /// Where no device reaches both, it goes over memory of the host, in as many nodes as that takes; the last one's
    /// position comes back.
    ///
    /// # Errors
    ///
    /// See [`RecordError`].
    pub fn copy(&mut self, src: &BufferView, dst: &BufferView) -> Result<NodeId, RecordError> {
        let desc = NodeDesc::copy(src, dst).map_err(|source| range_error("copy", source))?;
        self.add(desc)
    }

    /// Records a fill.
    ///
    /// # Errors
    ///
    /// See [`RecordError`].
    pub fn fill(&mut self, region: FillRegion<'_>) -> Result<NodeId, RecordError> {
        self.add(NodeDesc::fill(region))
    }

    /// Records a task of the host.
    ///
    /// # Errors
    ///
    /// See [`RecordError`].
    pub fn task(&mut self, task: &HostTask, operands: &[(BufferView, Usage)]) -> Result<NodeId, RecordError> {
        self.add(NodeDesc::task(task, operands))
    }

    /// Records any node.
    ///
    /// # Errors
    ///
    /// See [`RecordError`]; the graph is as it was then.
    pub fn add(&mut self, desc: NodeDesc<'_>) -> Result<NodeId, RecordError> {
        if self.len() >= MAX_NODES {
            return Err(RecordError::TooManyNodes { limit: MAX_NODES });
        }
        match &desc.work {
            WorkDesc::Op(Op::Copy(region)) => self.add_copy(&desc, *region),
            _ => {
                let place = self.domain.place(&desc)?;
                self.push(&desc, place)
            }
        }
    }

    fn add_copy(&mut self, desc: &NodeDesc<'_>, region: CopyRegion<'_>) -> Result<NodeId, RecordError> {
        if let Some(place) = self.domain.copy_place(desc, region)? {
            return self.push(desc, place);
        }
        // Checked before anything of it is recorded.
        for view in [region.src(), region.dst()] {
            let global = &mut Arc::make_mut(&mut self.recorded).global;
            self.memories.find(&self.domain, global, view, desc.label())?;
        }
        let hops = staging::hops(&self.domain, desc.label(), region)?;
        let mut last = None;
        for hop in &hops {
            last = Some(hop.record(self, desc)?);
        }
        last.ok_or_else(|| range_error(desc.label(), RangeError::ZeroSize))
    }

    /// Records a node at a place that was found for it.
    pub(crate) fn push(&mut self, desc: &NodeDesc<'_>, place: NodePlace) -> Result<NodeId, RecordError> {
        self.record(own(desc, place))
    }

    /// Records a node.
    pub(crate) fn record(&mut self, mut node: Node) -> Result<NodeId, RecordError> {
        let recorded = Arc::make_mut(&mut self.recorded);
        let first = recorded.uses.len();
        if let Err(error) = note_uses(&self.domain, &mut self.memories, recorded, &node) {
            recorded.uses.truncate(first);
            return Err(error);
        }
        self.inference.add(&recorded.uses[first..]);
        let at = |position: usize| u32::try_from(position).unwrap_or(u32::MAX);
        // 2^32 uses are 128 GiB of them.
        node.uses = at(first)..at(recorded.uses.len());
        recorded.nodes.push(node);
        Ok(NodeId(at(recorded.nodes.len() - 1)))
    }

    /// The same graph with some nodes exchanged: `change` gives what is in a node's place, if it is not what it was.
    pub(crate) fn rerecorded(
        &self,
        mut change: impl FnMut(NodeId, &Node) -> Result<Option<Node>, RecordError>,
    ) -> Result<Self, RecordError> {
        let mut graph = Self::new(&self.domain);
        graph.memories.names.clone_from(&self.memories.names);
        for (id, node) in self.ids().zip(self.nodes()) {
            let changed = change(id, node)?;
            if let Some(new) = changed.as_ref().filter(|new| new.work.kind() != node.work.kind()) {
                let (expected, actual) = (node.work.kind(), new.work.kind());
                return Err(RecordError::OtherKind { node: node.label().to_owned(), expected, actual });
            }
            graph.record(changed.unwrap_or_else(|| node.clone()))?;
        }
        Ok(graph)
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.nodes().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.nodes().is_empty()
    }

    /// The nodes' positions, in order.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.inference.len()).map(NodeId)
    }

    /// How many edges were inferred.
    pub fn edge_count(&self) -> usize {
        self.dag().edge_count()
    }

    /// The nodes that come directly before `node`, in rising order.
    pub fn predecessors(&self, node: NodeId) -> Vec<NodeId> {
        if node.index() >= self.nodes().len() {
            return Vec::new();
        }
        let mut open = self.inference.edges(node.0).to_vec();
        let mut found = Vec::new();
        while let Some(step) = open.pop() {
            match (step.as_node(), step.as_join()) {
                (Some(node), _) => found.push(NodeId(node)),
                (_, Some(join)) => open.extend(&self.inference.joins()[join as usize].after),
                _ => {}
            }
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Why `later` waits for `earlier`: the chain of nodes between them with the bytes that each link is about. Empty if
    /// it does not wait.
    pub fn why(&self, earlier: NodeId, later: NodeId) -> Vec<Reason> {
        if earlier >= later || later.index() >= self.nodes().len() {
            return Vec::new();
        }
        if let Some(reason) = self.conflicts(earlier, later).next() {
            return vec![reason];
        }
        self.chain(earlier, later)
    }

    /// The shortest chain of edges between two nodes.
    fn chain(&self, earlier: NodeId, later: NodeId) -> Vec<Reason> {
        let mut behind: FxHashMap<NodeId, NodeId> = FxHashMap::default();
        let mut open = std::collections::VecDeque::from([later]);
        while let Some(node) = open.pop_front() {
            if node == earlier {
                let chain = std::iter::successors(Some(node), |node| behind.get(node).copied());
                let chain: Vec<NodeId> = chain.collect();
                return chain.windows(2).filter_map(|pair| self.conflicts(pair[0], pair[1]).next()).collect();
            }
            for before in self.predecessors(node).into_iter().filter(|&before| before >= earlier) {
                behind.entry(before).or_insert_with(|| {
                    open.push_back(before);
                    node
                });
            }
        }
        Vec::new()
    }

    /// The bytes for whose sake `later` comes after `earlier` directly, in the order of their uses.
    pub(crate) fn conflicts(&self, earlier: NodeId, later: NodeId) -> impl Iterator<Item = Reason> {
        let pairs = self.uses_of(earlier).iter().flat_map(move |one| {
            let others = self.uses_of(later).iter();
            others.map(move |other| (one, other))
        });
        pairs.filter_map(move |(one, other)| {
            let range = one.range.start.max(other.range.start)..one.range.end.min(other.range.end);
            let conflicts =
                one.memory == other.memory && !range.is_empty() && one.usage.conflicts_with(other.usage);
            let hazard = Hazard::of(one.usage, other.usage);
            conflicts.then_some(Reason { earlier, later, buffer: one.memory as usize, range, hazard })
        })
    }

    /// Gives a buffer a name, for explanations and pictures. It is that of all buffers of the same memory.
    ///
    /// # Errors
    ///
    /// [`RecordError::UnknownDevice`] or [`RecordError::Straddles`].
    pub fn name_buffer(&mut self, view: &BufferView, name: &str) -> Result<(), RecordError> {
        let global = &mut Arc::make_mut(&mut self.recorded).global;
        let (memory, _) = self.memories.find(&self.domain, global, view, name)?;
        let number = global[memory as usize];
        self.memories.names.insert(number, name.into());
        Ok(())
    }

    /// The name that a buffer was given, by its position among the graph's.
    pub fn buffer_name(&self, buffer: usize) -> Option<&str> {
        self.memories.names.get(self.recorded.global.get(buffer)?).map(AsRef::as_ref)
    }

    /// A buffer, by its position among the graph's.
    pub fn buffer(&self, buffer: usize) -> Option<&BufferView> {
        self.memories.samples.get(buffer)
    }

    /// The longest way through the graph, where a node takes as long as `cost` says.
    pub fn critical_path(&self, cost: impl Fn(NodeId) -> u64) -> Vec<NodeId> {
        let dag = self.dag();
        let node = |position: u32| dag.steps[position as usize].map(NodeId);
        let path = dag.critical_path(|position| node(position).map_or(0, &cost));
        path.into_iter().filter_map(node).collect()
    }

    /// What a node is called.
    pub fn name(&self, node: NodeId) -> Option<&str> {
        self.nodes().get(node.index()).map(Node::label)
    }

    /// What a node does: `copy`, `fill`, `launch`, `task`, and so on.
    pub fn kind(&self, node: NodeId) -> Option<&'static str> {
        self.nodes().get(node.index()).map(|node| node.work.kind())
    }

    /// The device a node runs on; none for tasks of the host.
    pub fn device(&self, node: NodeId) -> Option<DeviceId> {
        match self.nodes().get(node.index())?.place {
            NodePlace::Device { device, .. } => Some(self.domain.devices[device as usize].id),
            NodePlace::Host => None,
        }
    }

    /// Has devices prepare it, so that it can be submitted again and again.
    ///
    /// # Errors
    ///
    /// See [`PrepareError`].
    pub fn prepare(self) -> Result<ExecutableGraph, PrepareError> {
        let slots = self.domain.config.graph_slots;
        ExecutableGraph::new(self, slots)
    }

    /// Prepares it and submits it once.
    ///
    /// # Errors
    ///
    /// [`RunError::Prepare`], or as [`ExecutableGraph::submit`].
    pub fn run(self) -> Result<Completion, RunError> {
        ExecutableGraph::new(self, 1)?.submit()
    }

    pub(crate) fn uses_of(&self, node: NodeId) -> &[Use] {
        self.recorded.uses_of(node)
    }

    pub(crate) fn nodes(&self) -> &[Node] {
        &self.recorded.nodes
    }

    pub(crate) fn dag(&self) -> Dag {
        Dag::new(&self.inference, |node| self.uses_of(NodeId(node)))
    }
}

/// Notes what a node's operands are, and how they are used.
fn note_uses(
    domain: &Domain,
    memories: &mut GraphMemories,
    recorded: &mut Recorded,
    node: &Node,
) -> Result<(), RecordError> {
    let Recorded { uses, global, .. } = recorded;
    let mut outcome = Ok(());
    let mut operand = 0;
    let mut note = |view: &BufferView, usage: Usage| {
        let (memory, base) = memories.find(domain, global, view, node.label())?;
        let range = base + view.offset()..base + view.offset() + view.size();
        uses.push(Use { memory, range, usage });
        Ok(())
    };
    node.work.for_each_operand(&mut |view, usage| {
        if outcome.is_err() {
            return;
        }
        let usage = usage_of(&node.said, operand, usage, node.label());
        outcome = usage.and_then(|usage| note(view, usage));
        operand += 1;
    });
    outcome?;
    check_said(node, operand)?;
    node.beside.iter().try_for_each(|(view, usage)| note(view, *usage))
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({} nodes)", self.nodes().len())
    }
}

impl Node {
    pub(crate) fn label(&self) -> &str {
        match (&self.name, &self.work) {
            (Some(name), _) => name,
            (None, work) => work.label(),
        }
    }
}

/// Why one node comes after another: bytes that both use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// The node that comes first.
    pub earlier: NodeId,
    /// The node that waits for it.
    pub later: NodeId,
    /// The buffer, by its position among the graph's, in the order in which they were first used or named.
    pub buffer: usize,
    /// Which of its bytes, the first ones that both use.
    pub range: Range<u64>,
    /// How they depend on each other.
    pub hazard: Hazard,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { earlier, later, buffer, range, hazard } = self;
        write!(f, "node {later} comes after node {earlier}: {hazard} of bytes {range:?} of buffer {buffer}")
    }
}

/// How two uses of the same bytes depend on each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hazard {
    /// The later one reads what the earlier one writes.
    ReadAfterWrite,
    /// The later one writes what the earlier one reads.
    WriteAfterRead,
    /// Both write.
    WriteAfterWrite,
}

impl Hazard {
    pub(crate) const fn of(earlier: Usage, later: Usage) -> Self {
        match (earlier.writes(), later.reads()) {
            (true, true) => Self::ReadAfterWrite,
            (true, false) => Self::WriteAfterWrite,
            (false, _) => Self::WriteAfterRead,
        }
    }
}

impl fmt::Display for Hazard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReadAfterWrite => "read after write",
            Self::WriteAfterRead => "write after read",
            Self::WriteAfterWrite => "write after write",
        })
    }
}

pub(crate) fn range_error(node: &str, source: RangeError) -> RecordError {
    RecordError::Range { node: node.to_owned(), source }
}
