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
    if !measured.is_empty()
        && let Some(folder) = folder
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

/// One rank's times of all ways, and how long it has been at it.
#[derive(Debug, Serialize, Deserialize)]
struct Times {
    ways: Vec<u64>,
    spent_ns: u64,
}

/// An engine in one of its ways, and its graph of the calls of a round where they are captured.
struct Contender {
    way: Way,
    engine: Arc<dyn Engine>,
    graph: Option<PreparedGraph>,
}

fn measure(scene: &Scene<'_>, budget: Duration) -> Result<Vec<Measured>, CommError> {
    if !scene.has_choice() {
        return Ok(Vec::new());
    }
    let began = Instant::now();
    let memory = || scene.device.allocate(&BufferDesc::device(MOST_BYTES)).map(BufferView::whole);
    let queue = scene.device.create_queue(&QueueDesc::default())?;
    let bench = Bench { scene, queue, src: memory()?, dst: memory()? };
    let mut measured = Vec::new();
    for bytes in SIZES {
        for (op, dtype) in SORTS {
            for captured in [true, false] {
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

impl Scene<'_> {
    /// Whether something can be done in more than one way; the same on all ranks.
    fn has_choice(&self) -> bool {
        let mut calls = SIZES.into_iter().flat_map(|bytes| SORTS.map(|(op, dtype)| (op, dtype, bytes)));
        calls.any(|(op, dtype, bytes)| self.ways(op, dtype, bytes).len() > 1)
    }

    /// Every engine that does it, in every way that it has.
    fn ways(&self, op: CollectiveOp, dtype: DType, bytes: u64) -> Vec<(Way, Arc<dyn Engine>)> {
        let mut ways = Vec::new();
        for engine in self.engines.iter().filter(|engine| engine.does(op, dtype)) {
            let shapes = engine.shapes(op, bytes);
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
        let contenders = self.contenders(sort, captured)?;
        let mut times = vec![Vec::with_capacity(ROUNDS); contenders.len()];
        for _ in 0..ROUNDS {
            for (contender, times) in contenders.iter().zip(&mut times) {
                times.push(self.time(contender, sort)?);
            }
        }
        let median = |mut times: Vec<u64>| {
            times.sort_unstable();
            times.get(ROUNDS / 2).copied().unwrap_or(u64::MAX)
        };
        let own =
            Times { ways: times.into_iter().map(median).collect(), spent_ns: nanoseconds(began.elapsed()) };
        let bytes = postcard::to_allocvec(&own).unwrap_or_default();
        let all = self.scene.group.all_gather("times of engines", &bytes, self.scene.deadline)?;
        let all: Vec<Times> = all.iter().filter_map(|bytes| postcard::from_bytes(bytes).ok()).collect();
        let spent = all.iter().map(|times| times.spent_ns).max().unwrap_or_default();
        let slowest = |way: usize| {
            let times: Option<Vec<u64>> = all.iter().map(|times| times.ways.get(way).copied()).collect();
            times.and_then(|times| times.into_iter().max())
        };
        let ways = contenders.iter().enumerate();
        let mut ways: Vec<(Way, u64)> =
            ways.filter_map(|(at, contender)| Some((contender.way, slowest(at)?))).collect();
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

    /// The ways that all ranks can go, if they are more than one.
    fn contenders(&self, sort: &Sort, captured: bool) -> Result<Vec<Contender>, CommError> {
        let ways = self.scene.ways(sort.op, sort.dtype, sort.bytes);
        if ways.len() < 2 {
            return Ok(Vec::new());
        }
        let own: Vec<Result<Contender, CommError>> = ways
            .into_iter()
            .map(|(way, engine)| {
                let graph = if captured { Some(self.prepare(engine.as_ref(), sort)?) } else { None };
                Ok(Contender { way, engine, graph })
            })
            .collect();
        if !captured {
            return own.into_iter().collect();
        }
        let can: Vec<u8> = own.iter().map(|contender| u8::from(contender.is_ok())).collect();
        let all = self.scene.group.all_gather("ways of engines", &can, self.scene.deadline)?;
        let can_all = |at: usize| all.iter().all(|can| can.get(at) == Some(&1));
        own.into_iter().enumerate().filter(|(at, _)| can_all(*at)).map(|(_, contender)| contender).collect()
    }

    /// Nanoseconds of a call.
    fn time(&self, contender: &Contender, sort: &Sort) -> Result<u64, CommError> {
        let Contender { engine, graph, .. } = contender;
        // Once to warm up, by which ranks come together too.
        self.run(engine.as_ref(), sort, graph.as_ref(), 1)?;
        let began = Instant::now();
        self.run(engine.as_ref(), sort, graph.as_ref(), sort.count())?;
        Ok(nanoseconds(began.elapsed()) / u64::from(sort.count()))
    }

    /// A graph of the calls of a round.
    fn prepare(&self, engine: &dyn Engine, sort: &Sort) -> Result<PreparedGraph, CommError> {
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
        PreparedGraph::new(self.scene.device.as_ref(), &nodes).map_err(cannot)
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
