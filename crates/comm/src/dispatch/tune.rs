//! How engines are measured: all ranks together, in steps that all of them take or none.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use warpweft_bootstrap::{Group, Rank};
use warpweft_core_types::{
    BufferDesc, BufferView, CollectiveCall, CollectiveOp, DType, Deadline, Device, GraphNode, GraphOp, Op,
    OwnedOp, PreparedGraph, Queue, QueueDesc, ReduceOp, SemaphorePoint, Submission,
};

use super::{Dispatch, ElementClass, Measured, TuningConfig, Way, cache};
use crate::{CommError, engine::Engine, error::unfinished};

/// Bytes from rank to rank that are measured, the fewest first: they are called most often, and cost least.
const SIZES: [u64; 8] = [1 << 10, 8 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];

/// What operands have at most, of all ranks together.
const MOST_BYTES: u64 = 32 << 20;

/// Bytes of a table that is passed on.
const MOST_KEPT: usize = 48 << 10;

/// Every way is tried so often, in turns.
const ROUNDS: usize = 3;

/// The operations, and what each does with elements of which type.
const SORTS: [(CollectiveOp, DType); 7] = [
    (CollectiveOp::AllReduce(ReduceOp::Sum), DType::F32),
    (CollectiveOp::AllReduce(ReduceOp::Max), DType::I32),
    (CollectiveOp::AllGather, DType::U32),
    (CollectiveOp::ReduceScatter(ReduceOp::Sum), DType::F32),
    (CollectiveOp::ReduceScatter(ReduceOp::Max), DType::I32),
    (CollectiveOp::Broadcast { root: 0 }, DType::U32),
    (CollectiveOp::AllToAll, DType::U32),
];

/// Whom a table is for.
#[derive(Debug)]
pub(crate) struct Scene<'a> {
    pub(crate) group: &'a Group,
    pub(crate) device: &'a Arc<dyn Device>,
    pub(crate) engines: &'a [Arc<dyn Engine>],
    /// The devices, drivers and libraries of all ranks.
    pub(crate) key: String,
    pub(crate) deadline: Deadline,
}

/// The table of these ranks: what is kept of it, or what is measured now.
pub(crate) fn table(scene: &Scene<'_>, config: &TuningConfig) -> Result<Dispatch, CommError> {
    let is_first = scene.group.rank() == Rank(0);
    let folder = config.cache.as_deref().filter(|_| is_first);
    let kept = folder.and_then(|folder| cache::read(folder, &scene.key)).unwrap_or_default();
    let kept = postcard::to_allocvec(&kept).unwrap_or_default();
    // More than groups exchange was not measured here.
    let kept = if kept.len() <= MOST_KEPT { kept } else { Vec::new() };
    let kept = scene.group.broadcast("table of engines", Rank(0), &kept, scene.deadline)?;
    let kept: Vec<Measured> = postcard::from_bytes(&kept).unwrap_or_default();
    if !kept.is_empty() {
        return Ok(Dispatch::new(kept, scene.engines));
    }
    let measured = measure(scene, config.budget)?;
    if let Some(folder) = folder
        && let Err(error) = cache::write(folder, &scene.key, &measured)
    {
        tracing::warn!(%error, "what was measured of engines is not kept");
    }
    Ok(Dispatch::new(measured, scene.engines))
}

/// Operands that are large enough for every call, and a queue of their own.
struct Bench<'a> {
    scene: &'a Scene<'a>,
    queue: Arc<dyn Queue>,
    src: BufferView,
    dst: BufferView,
}

/// One rank's times of all ways, none of those that it cannot go, and how long it has been at it.
#[derive(Debug, Serialize, Deserialize)]
struct Times {
    ways: Vec<Option<u64>>,
    spent_ns: u64,
}

fn measure(scene: &Scene<'_>, budget: Duration) -> Result<Vec<Measured>, CommError> {
    let began = Instant::now();
    let memory = || scene.device.allocate(&BufferDesc::device(MOST_BYTES)).map(BufferView::whole);
    let queue = scene.device.create_queue(&QueueDesc::default())?;
    let bench = Bench { scene, queue, src: memory()?, dst: memory()? };
    let captures: &[bool] = if scene.device.graphs().is_some() { &[true, false] } else { &[false] };
    let mut measured = Vec::new();
    for bytes in SIZES {
        for (op, dtype) in SORTS {
            for captured in captures.iter().copied() {
                let Some(sort) = bench.sort(op, dtype, bytes) else { continue };
                let (entry, spent) = bench.entry(&sort, captured, began)?;
                measured.extend(entry);
                // All ranks know the same times.
                if spent >= budget {
                    return Ok(measured);
                }
            }
        }
    }
    Ok(measured)
}

/// A call to measure.
struct Sort {
    op: CollectiveOp,
    dtype: DType,
    bytes: u64,
    src: Option<BufferView>,
    dst: BufferView,
}

impl Sort {
    fn call(&self, group: &Group) -> Result<CollectiveCall<'_>, CommError> {
        let place = (group.rank().0, group.size());
        Ok(CollectiveCall::new(self.op, self.dtype, place, self.src.as_ref(), Some(&self.dst))?)
    }

    /// Calls of a round.
    const fn count(&self) -> u32 {
        match self.bytes {
            0..=65_536 => 20,
            65_537..=1_048_576 => 10,
            _ => 4,
        }
    }
}

impl Bench<'_> {
    /// A call of this size, if there is so much memory.
    fn sort(&self, op: CollectiveOp, dtype: DType, bytes: u64) -> Option<Sort> {
        let (rank, ranks) = (self.scene.group.rank().0, u64::from(self.scene.group.size()));
        let (gives, gets) = match op {
            CollectiveOp::AllGather => (1, ranks),
            CollectiveOp::ReduceScatter(_) => (ranks, 1),
            CollectiveOp::AllToAll => (ranks, ranks),
            _ => (1, 1),
        };
        let has_src = !matches!(op, CollectiveOp::Broadcast { root } if root != rank);
        let part = |view: &BufferView, parts: u64| view.slice(0..bytes * parts).ok();
        let src = if has_src { Some(part(&self.src, gives)?) } else { None };
        Some(Sort { op, dtype, bytes, src, dst: part(&self.dst, gets)? })
    }

    /// What all ranks measured, and the longest time that one of them has been at it.
    fn entry(
        &self,
        sort: &Sort,
        captured: bool,
        began: Instant,
    ) -> Result<(Option<Measured>, Duration), CommError> {
        let ways = self.ways(sort);
        let mut times = vec![Vec::with_capacity(ROUNDS); ways.len()];
        for _ in 0..ROUNDS {
            for ((_, engine), times) in ways.iter().zip(&mut times) {
                times.push(self.time(engine.as_ref(), sort, captured)?);
            }
        }
        let ways_ns = times.into_iter().map(|mut times| {
            times.sort_unstable();
            times.get(ROUNDS / 2).copied().flatten()
        });
        let own = Times { ways: ways_ns.collect(), spent_ns: nanoseconds(began.elapsed()) };
        let bytes = postcard::to_allocvec(&own).unwrap_or_default();
        let all = self.scene.group.all_gather("times of engines", &bytes, self.scene.deadline)?;
        let all: Vec<Times> = all.iter().filter_map(|bytes| postcard::from_bytes(bytes).ok()).collect();
        let spent = all.iter().map(|times| times.spent_ns).max().unwrap_or_default();
        let slowest = |way: usize| {
            let times: Option<Vec<u64>> = all.iter().map(|times| *times.ways.get(way)?).collect();
            times.and_then(|times| times.into_iter().max())
        };
        let mut ways: Vec<(Way, u64)> =
            ways.iter().enumerate().filter_map(|(at, (way, _))| Some((*way, slowest(at)?))).collect();
        // Of equal ones the first, on all ranks.
        ways.sort_by_key(|(_, time)| *time);
        let entry = Measured {
            op: sort.op.name().to_owned(),
            class: ElementClass::of(sort.op, sort.dtype),
            captured,
            bytes: sort.bytes,
            ways,
        };
        Ok((Some(entry).filter(|entry| !entry.ways.is_empty()), Duration::from_nanos(spent)))
    }

    /// Every engine that does it, in every way that it has.
    fn ways(&self, sort: &Sort) -> Vec<(Way, Arc<dyn Engine>)> {
        let mut ways = Vec::new();
        for engine in self.scene.engines.iter().filter(|engine| engine.does(sort.op, sort.dtype)) {
            let shapes = engine.shapes(sort.op, sort.bytes);
            if shapes.is_empty() {
                ways.push((Way { engine: engine.kind(), shape: None }, Arc::clone(engine)));
            }
            for shape in shapes {
                let way = Way { engine: engine.kind(), shape: Some(shape) };
                ways.extend(Arc::clone(engine).in_shape(shape).map(|engine| (way, engine)));
            }
        }
        ways
    }

    /// Nanoseconds of a call, if the engine makes calls of this sort.
    fn time(&self, engine: &dyn Engine, sort: &Sort, captured: bool) -> Result<Option<u64>, CommError> {
        let prepared = if captured { self.prepare(engine, sort) } else { Ok(None) };
        let graph = match prepared {
            Err(CommError::Unsupported { .. }) => return Ok(None),
            graph => graph?,
        };
        // Once to warm up, by which ranks come together too.
        self.run(engine, sort, graph.as_ref(), 1)?;
        let began = Instant::now();
        self.run(engine, sort, graph.as_ref(), sort.count())?;
        Ok(Some(nanoseconds(began.elapsed()) / u64::from(sort.count())))
    }

    /// A graph of the calls of a round.
    fn prepare(&self, engine: &dyn Engine, sort: &Sort) -> Result<Option<PreparedGraph>, CommError> {
        let call = sort.call(self.scene.group)?;
        let mut nodes: Vec<GraphNode> = Vec::new();
        for _ in 0..sort.count() {
            engine.with_ops(&[call], &mut |ops| {
                for op in ops {
                    let before: Vec<usize> = nodes.len().checked_sub(1).into_iter().collect();
                    nodes.push(GraphNode::new(GraphOp::Op(OwnedOp::from(op)), &before));
                }
                Ok(())
            })?;
        }
        let cannot = |error: warpweft_core_types::GraphError| {
            engine.cannot(format!("{} in a graph: {error}", sort.op))
        };
        Ok(Some(PreparedGraph::new(self.scene.device.as_ref(), &nodes).map_err(cannot)?))
    }

    /// Makes calls one behind the other, or replays a graph of them, and waits.
    fn run(
        &self,
        engine: &dyn Engine,
        sort: &Sort,
        graph: Option<&PreparedGraph>,
        count: u32,
    ) -> Result<(), CommError> {
        let done = SemaphorePoint::new(&self.scene.device.create_semaphore(0)?, 1);
        let mut ops: &[Op<'_>] = &[];
        let replay = graph.map(|graph| [Op::Replay(graph)]);
        if let Some(replay) = &replay {
            ops = replay;
        } else {
            let call = sort.call(self.scene.group)?;
            (0..count).try_for_each(|_| engine.enqueue(&[call], &self.queue, &[], &[]))?;
        }
        self.queue.submit(&Submission { waits: &[], ops, signals: std::slice::from_ref(&done) })?;
        let late = |error| unfinished(error, 0, "a call that is measured".to_owned());
        done.wait(self.scene.deadline).map_err(late)?;
        engine.given_up().map_or(Ok(()), |failure| Err(CommError::Failed(failure)))
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
