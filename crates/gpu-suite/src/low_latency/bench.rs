//! Calls of few bytes by turns with those of NCCL, alone and beside large copies; and with NCCL's symmetric memory.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use serde_json::json;
use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous};
use warpweft_comm::{CommConfig, Communicator, EngineKind, Measured, TuningConfig};
use warpweft_core_types::{
    BufferDesc, BufferView, CollectiveOp, CopyRegion, DType, GraphNode, Op, PreparedGraph, Queue, ReduceOp,
    Registration, RegistrationKind, Submission,
};

use crate::{
    bench::samples::Samples,
    kernels,
    rig::{Bench, LIMIT, Rig, report, say},
};

/// Calls of a graph, and replays that count: of sums in graphs, which are promised most, and of everything else.
const CALLS: usize = 50;
const SUM_ROUNDS: usize = 1001;
const ROUNDS: usize = 101;
const WARM_UP: usize = 5;

/// From here on calls take long, and few of them are enough.
const LARGE: u64 = 1 << 20;

/// Calls one behind the other outside of graphs.
const LOOSE: usize = 200;

const SIZES: [u64; 12] = [
    16,
    1 << 10,
    8 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
];

/// What the copies beside move at a time.
const BESIDE: u64 = 64 << 20;

const OPS: [CollectiveOp; 5] = [
    CollectiveOp::AllReduce(ReduceOp::Sum),
    CollectiveOp::AllGather,
    CollectiveOp::ReduceScatter(ReduceOp::Sum),
    CollectiveOp::Broadcast { root: 0 },
    CollectiveOp::AllToAll,
];

/// One way to make calls.
struct Way {
    name: &'static str,
    comm: Communicator,
    queue: Arc<dyn Queue>,
    /// Memory that it is registered with, if it is.
    memory: Option<[Arc<dyn Registration>; 2]>,
}

/// A rank in all ways.
struct Place<'a> {
    bench: &'a Bench,
    /// The next GPU's memory and this one's, for copies beside.
    far: BufferView,
    near: BufferView,
    copies: Arc<dyn Queue>,
    ways: Vec<Way>,
    /// What was measured, for the shapes that are printed.
    measured: Vec<Measured>,
    ranks: u32,
    own: [BufferView; 2],
}

/// Where calls are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Where {
    Graph,
    Loose,
    /// In a graph beside copies both ways.
    Beside,
}

pub(crate) fn run() -> Result<()> {
    let rig = Rig::with(&kernels::graph())?;
    rig.describe()?;
    super::within::run(&rig)?;
    if rig.devices.len() < 2 {
        say("nothing was measured between GPUs: it takes two");
        return Ok(());
    }
    let size = u32::try_from(rig.devices.len())?;
    let far: Vec<BufferView> =
        rig.devices.iter().map(|bench| bench.allocate(BufferDesc::device(BESIDE))).collect::<Result<_>>()?;
    let meetings: Vec<_> = (0..4).map(|_| Meeting::new()).collect();
    std::thread::scope(|scope| {
        let (meetings, far) = (&meetings, &far);
        let spawn = |(rank, bench): (u32, _)| {
            scope.spawn(move || {
                let next = &far[(rank as usize + 1) % far.len()];
                Place::new(bench, (rank, size), meetings, next)?.measure()
            })
        };
        let threads: Vec<_> = (0..).zip(&rig.devices).map(spawn).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?)
    })
}

impl<'a> Place<'a> {
    fn new(
        bench: &'a Bench,
        (rank, size): (u32, u32),
        meetings: &[Arc<Meeting>],
        far: &BufferView,
    ) -> Result<Self> {
        let create = |meeting: usize, config: &CommConfig| {
            let rendezvous = Rendezvous::Meeting(Arc::clone(&meetings[meeting]));
            let group = Group::join(rendezvous, JoinConfig::new(Rank(rank), size), LIMIT)?;
            anyhow::Ok(Communicator::create(group, &bench.device, config, LIMIT * 6)?)
        };
        let only = |engine| CommConfig { engine: Some(engine), ..CommConfig::default() };
        let way = |name, comm, memory| anyhow::Ok(Way { name, comm, queue: bench.new_queue()?, memory });
        let most = SIZES[SIZES.len() - 1] * u64::from(size);
        let tuning = Some(TuningConfig::default());
        let began = Instant::now();
        // First, and gone before others are made: each takes of the devices what is left.
        let tuned = create(3, &CommConfig { tuning, ..CommConfig::default() })?;
        let measured = tuned.measured().to_vec();
        tuned.barrier(LIMIT)?;
        drop(tuned);
        if rank == 0 {
            report(&json!({"communicator that measures": "made", "seconds": began.elapsed().as_secs_f64()}));
        }
        let mut ways = vec![way("ours", create(0, &only(EngineKind::LowLatency))?, None)?];
        // A machine without NCCL measures ours alone.
        match create(1, &only(EngineKind::Native)) {
            Ok(comm) => {
                ways.push(way("NCCL", comm, None)?);
                let comm = create(2, &only(EngineKind::Native))?;
                match symmetric(&comm, most) {
                    Ok(memory) => ways.push(way("NCCL, symmetric", comm, Some(memory))?),
                    Err(error) => say(&format!("NCCL has no symmetric memory here: {error:#}")),
                }
            }
            Err(error) => say(&format!("NCCL is not measured: {error:#}")),
        }
        let memory = || bench.allocate(BufferDesc::device(most));
        let near = bench.allocate(BufferDesc::device(BESIDE))?;
        let own = [memory()?, memory()?];
        Ok(Self {
            bench,
            far: far.clone(),
            near,
            copies: bench.new_queue()?,
            ways,
            measured,
            ranks: size,
            own,
        })
    }

    fn measure(&self) -> Result<()> {
        for op in OPS {
            for bytes in SIZES {
                let is_sum = matches!(op, CollectiveOp::AllReduce(_));
                for place in [Where::Graph, Where::Loose, Where::Beside] {
                    if is_sum || (place == Where::Graph && bytes <= LARGE) {
                        self.compare(op, bytes, place)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn rank(&self) -> u32 {
        self.ways[0].comm.rank()
    }

    /// The ways by turns; each round is the slowest rank's, since all wait for all.
    fn compare(&self, op: CollectiveOp, bytes: u64, place: Where) -> Result<()> {
        let graphs = self.ways.iter().map(|way| self.graph(way, op, bytes)).collect::<Result<Vec<_>>>()?;
        let mut samples: Vec<Samples> = self.ways.iter().map(|_| Samples::default()).collect();
        let rounds = match (op, place) {
            _ if bytes > LARGE => ROUNDS / 5,
            (CollectiveOp::AllReduce(_), Where::Graph) => SUM_ROUNDS,
            _ => ROUNDS,
        };
        for round in 0..rounds + WARM_UP {
            for ((way, graph), samples) in self.ways.iter().zip(&graphs).zip(&mut samples) {
                let time = match place {
                    Where::Loose => self.loose(way, op, bytes)?,
                    Where::Graph | Where::Beside => self.replayed(way, graph, place == Where::Beside)?,
                };
                if round >= WARM_UP {
                    samples.add(time);
                }
            }
        }
        if self.rank() == 0 {
            self.tell(op, bytes, place, &samples);
        }
        Ok(())
    }

    fn tell(&self, op: CollectiveOp, bytes: u64, place: Where, samples: &[Samples]) {
        let captured = place != Where::Loose;
        let chosen = Measured::find(&self.measured, op, DType::F32, bytes, captured);
        let chosen = chosen.and_then(|measured| measured.ways.first()).map(|(way, _)| way.to_string());
        let chosen = chosen.unwrap_or_else(|| "nothing".to_owned());
        for (way, samples) in self.ways.iter().zip(samples) {
            report(&json!({"low latency": op.name(), "bytes": bytes, "where": format!("{place:?}"),
                "ranks": self.ranks, "way": way.name, "time": samples.json(), "chosen": chosen}));
        }
        let words: Vec<String> = self
            .ways
            .iter()
            .zip(samples)
            .map(|(way, samples)| format!("{} {}", way.name, samples.words()))
            .collect();
        say(&format!(
            "{:<14} {bytes:>9} B {place:?}: {}; measured best: {chosen}",
            op.name(),
            words.join("; ")
        ));
    }

    /// The operands of a call of so many bytes from rank to rank.
    fn operands(&self, way: &Way, op: CollectiveOp, bytes: u64) -> Result<[Option<BufferView>; 2]> {
        let ranks = u64::from(way.comm.world_size());
        let (gives, gets) = match op {
            CollectiveOp::AllGather => (1, ranks),
            CollectiveOp::ReduceScatter(_) => (ranks, 1),
            CollectiveOp::AllToAll => (ranks, ranks),
            _ => (1, 1),
        };
        let whole = |at: usize| match &way.memory {
            Some(memory) => BufferView::whole(Arc::clone(memory[at].buffer())),
            None => self.own[at].clone(),
        };
        let has_src = !matches!(op, CollectiveOp::Broadcast { root } if root != self.rank());
        let src = has_src.then(|| whole(0).slice(0..bytes * gives)).transpose()?;
        Ok([src, Some(whole(1).slice(0..bytes * gets)?)])
    }

    fn graph(&self, way: &Way, op: CollectiveOp, bytes: u64) -> Result<PreparedGraph> {
        let [src, dst] = self.operands(way, op, bytes)?;
        let mut nodes: Vec<GraphNode> = Vec::new();
        for _ in 0..CALLS {
            for node in way.comm.call(op, DType::F32, src.as_ref(), dst.as_ref())?.nodes()? {
                let before: Vec<usize> = nodes.len().checked_sub(1).into_iter().collect();
                nodes.push(GraphNode::new(node, &before));
            }
        }
        Ok(PreparedGraph::new(self.bench.device.as_ref(), &nodes)?)
    }

    /// A call's time in a graph.
    fn replayed(&self, way: &Way, graph: &PreparedGraph, beside: bool) -> Result<Duration> {
        way.comm.barrier(LIMIT)?;
        if beside {
            let ops = [
                Op::Copy(CopyRegion::new(&self.near, &self.far)?),
                Op::Copy(CopyRegion::new(&self.far, &self.near)?),
            ];
            self.copies.submit(&Submission { ops: &ops, ..Submission::default() })?;
        }
        let began = Instant::now();
        way.comm.replay(graph, &way.queue)?.wait(LIMIT)?;
        let time = began.elapsed() / u32::try_from(CALLS)?;
        if beside {
            let done = self.bench.point()?;
            let signals = std::slice::from_ref(&done);
            self.copies.submit(&Submission { signals, ..Submission::default() })?;
            done.wait(LIMIT)?;
        }
        Ok(time)
    }

    /// A call's time when they are enqueued one behind the other.
    fn loose(&self, way: &Way, op: CollectiveOp, bytes: u64) -> Result<Duration> {
        let [src, dst] = self.operands(way, op, bytes)?;
        let call = way.comm.call(op, DType::F32, src.as_ref(), dst.as_ref())?.persistent()?;
        let calls = if bytes <= LARGE { LOOSE } else { LOOSE / 20 };
        way.comm.barrier(LIMIT)?;
        let began = Instant::now();
        let mut last = None;
        for _ in 0..calls {
            last = Some(call.enqueue(&way.queue)?);
        }
        last.context("there are calls")?.wait(LIMIT)?;
        Ok(began.elapsed() / u32::try_from(calls)?)
    }
}

/// Source and destination that all ranks registered together.
fn symmetric(comm: &Communicator, bytes: u64) -> Result<[Arc<dyn Registration>; 2]> {
    let registered = || anyhow::Ok(comm.register(&comm.allocate(bytes)?, RegistrationKind::Symmetric)?);
    Ok([registered()?, registered()?])
}
