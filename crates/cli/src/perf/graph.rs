//! Graphs of many small nodes: what it costs to record, prepare, submit and replay them.

mod shape;

use std::{
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Args as ClapArgs;
use serde::Serialize;
use warpweft::{
    Device, DeviceId, Launch, Op, PreparedGraph, Queue, QueueDesc, Semaphore, SemaphorePoint, Submission,
    graph_runtime::{ExecutableGraph, HostTask, Runtime, RuntimeConfig},
};

use self::shape::{Kind, Plan, Shape};
use crate::{
    args::Selection,
    kernels,
    measure::{Summary, interleave},
    output, select,
};

const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Measured on the first device of each backend. Columns: record = recording and inferring, and prepare = having the
device prepare it, both in nanoseconds a node; submit = the call alone, replay = from that call to the end of a wait;
plain = the same kernels launched in one queue, one submission each, with one wait (for tasks: the functions called
one after the other); by hand = the device's own graph of the same nodes and edges, submitted and waited for without
the graph's runtime; ratio = by hand / replay; one = submitting and awaiting a graph of one node that does nothing.
All but record and prepare are timed by turns, in the same rounds.

Examples:
  warpweft perf graph
  warpweft perf graph --nodes 1000 --shape chain --kind kernel
  warpweft perf graph --backend cuda --json")]
pub(crate) struct PerfGraph {
    #[command(flatten)]
    pub(crate) selection: Selection,
    /// Nodes of each graph, separated by commas.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "100,1000", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) nodes: Vec<u32>,
    /// Who waits for whom, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "chain,stencil")]
    pub(crate) shape: Vec<Shape>,
    /// What nodes are, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,task")]
    pub(crate) kind: Vec<Kind>,
    /// Timed rounds.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 51, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) iterations: u32,
    /// Rounds before the clock counts.
    #[arg(short = 'w', long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(..=100_000))]
    pub(crate) warmup: u32,
    /// Print one JSON object for each row.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Serialize)]
struct Row {
    device: DeviceId,
    shape: Shape,
    kind: Kind,
    nodes: usize,
    edges: usize,
    segments: usize,
    /// All nodes, with the order inferred.
    record: Summary,
    /// For one slot.
    prepare: Summary,
    /// What the calling thread pays.
    submit: Summary,
    /// From the call of submit to the return of wait.
    replay: Summary,
    /// The same for a graph of one node that does nothing.
    one_empty_node: Summary,
    floor: Floor,
    /// Medians divided by the number of nodes.
    per_node: PerNode,
    /// Median of the graph made by hand over the median of the replay: 1 is as fast.
    ratio: Option<f64>,
}

/// The same work without the graph's runtime.
#[derive(Debug, Serialize)]
struct Floor {
    /// Launches in one queue, one submission each, with one wait; for tasks, calls one after the other.
    plain: Summary,
    /// The device's own graph; nothing for tasks and where a device has none.
    handmade: Option<Summary>,
}

#[derive(Debug, Serialize)]
struct PerNode {
    record_ns: f64,
    prepare_ns: f64,
    submit_ns: f64,
    replay_ns: f64,
    plain_ns: f64,
    handmade_ns: Option<f64>,
}

pub(crate) fn run(args: &PerfGraph) -> anyhow::Result<ExitCode> {
    let mut builder = warpweft::Runtime::builder();
    for backend in select::backends(&args.selection)? {
        builder = builder.shared_backend(backend);
    }
    let opened = builder.build()?;
    let mut measured: Vec<&str> = Vec::new();
    if !args.json {
        print_head();
    }
    for device in opened.devices() {
        let id = device.info().id;
        if measured.contains(&id.backend) {
            continue;
        }
        measured.push(id.backend);
        for &kind in &args.kind {
            for &shape in &args.shape {
                for &nodes in &args.nodes {
                    let row = Bench::new(device, shape, kind, nodes)?.measure(args)?;
                    if args.json { output::json(&row)? } else { row.print() }
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// One graph on one device.
struct Bench {
    device: Arc<dyn Device>,
    runtime: Runtime,
    shape: Shape,
    kind: Kind,
    plan: Plan,
}

impl Bench {
    fn new(device: &Arc<dyn Device>, shape: Shape, kind: Kind, nodes: u32) -> anyhow::Result<Self> {
        // One slot: a replay is waited for before the next, so others would only be prepared.
        let config = RuntimeConfig { graph_slots: 1, ..RuntimeConfig::default() };
        let runtime = Runtime::new([Arc::clone(device)], config)?;
        let plan = Plan::new(device, shape, kind, nodes as usize)?;
        Ok(Self { device: Arc::clone(device), runtime, shape, kind, plan })
    }

    fn measure(&self, args: &PerfGraph) -> anyhow::Result<Row> {
        let (record, prepare) = self.recording(args)?;
        let graph = self.plan.record(&self.runtime)?;
        let (nodes, edges) = (graph.len(), graph.edge_count());
        let by_hand = self.plan.handmade(&graph)?.filter(|_| self.device.graphs().is_some());
        let by_hand = by_hand.map(|nodes| PreparedGraph::new(self.device.as_ref(), &nodes)).transpose()?;
        let (graph, empty) = (graph.prepare()?, self.empty()?);
        let (mut plain, mut floor) = (Line::new(&self.device, nodes)?, Line::new(&self.device, 16)?);
        let mut submits = Vec::new();
        let mut replay = || {
            let started = Instant::now();
            let completion = graph.submit()?;
            submits.push(started.elapsed());
            Ok(completion.wait(TIMEOUT)?)
        };
        let mut plain = || match self.kind {
            Kind::Kernel => plain.launch_all(&self.plan),
            Kind::Task => self.plan.call(),
        };
        let mut handmade = || by_hand.as_ref().map_or(Ok(()), |graph| floor.run(&Op::Replay(graph)));
        let mut one = || Ok(empty.submit()?.wait(TIMEOUT)?);
        let mut one_more = || Ok(empty.submit()?.wait(TIMEOUT)?);
        // What ran just before decides how awake the device is, so the replay and its counterpart follow the same.
        let summaries = interleave(
            args.warmup,
            args.iterations,
            &mut [&mut plain, &mut one, &mut replay, &mut one_more, &mut handmade],
        )?;
        let [plain, one_empty_node, replay, _, handmade]: [Summary; 5] =
            summaries.try_into().map_err(|_| anyhow::anyhow!("five were measured"))?;
        let submit = Summary::of(&submits[args.warmup as usize..]);
        let floor = Floor { plain, handmade: by_hand.is_some().then_some(handmade) };
        let per = |summary: &Summary| summary.p50_ns as f64 / nodes as f64;
        Ok(Row {
            device: self.device.info().id,
            shape: self.shape,
            kind: self.kind,
            nodes,
            edges,
            segments: graph.segment_count(),
            per_node: PerNode {
                record_ns: per(&record),
                prepare_ns: per(&prepare),
                submit_ns: per(&submit),
                replay_ns: per(&replay),
                plain_ns: per(&floor.plain),
                handmade_ns: floor.handmade.as_ref().map(per),
            },
            ratio: floor.handmade.as_ref().map(|raw| raw.p50_ns as f64 / replay.p50_ns.max(1) as f64),
            record,
            prepare,
            submit,
            replay,
            one_empty_node,
            floor,
        })
    }

    /// Records and prepares the graph again and again.
    fn recording(&self, args: &PerfGraph) -> anyhow::Result<(Summary, Summary)> {
        let (mut records, mut prepares) = (Vec::new(), Vec::new());
        for round in 0..args.warmup.saturating_add(args.iterations) {
            let started = Instant::now();
            let graph = self.plan.record(&self.runtime)?;
            let recorded = started.elapsed();
            let started = Instant::now();
            let prepared = graph.prepare()?;
            let took = started.elapsed();
            drop(prepared);
            if round >= args.warmup {
                records.push(recorded);
                prepares.push(took);
            }
        }
        Ok((Summary::of(&records), Summary::of(&prepares)))
    }

    /// A graph cannot have no node, so it has one that does nothing.
    fn empty(&self) -> anyhow::Result<ExecutableGraph> {
        let mut graph = self.runtime.graph();
        match self.kind {
            Kind::Kernel => {
                let kernel = self.device.load(&kernels::empty())?.kernel("empty")?;
                graph.launch(Launch::new(&kernel, [1; 3], &[])?)?;
            }
            Kind::Task => {
                graph.task(&HostTask::new(|_| {}).brief(), &[])?;
            }
        }
        Ok(graph.prepare()?)
    }
}

/// A queue with what tells how far it has come.
struct Line {
    queue: Arc<dyn Queue>,
    semaphore: Arc<dyn Semaphore>,
    value: u64,
}

impl Line {
    fn new(device: &Arc<dyn Device>, submissions: usize) -> anyhow::Result<Self> {
        // Those of the round before may still be counted when their end is known.
        let queue = device.create_queue(&QueueDesc { capacity: 2 * (submissions + 1) })?;
        Ok(Self { queue, semaphore: device.create_semaphore(0)?, value: 0 })
    }

    fn next(&mut self) -> SemaphorePoint {
        self.value += 1;
        SemaphorePoint::new(&self.semaphore, self.value)
    }

    /// Submits an operation and waits for it.
    fn run(&mut self, op: &Op<'_>) -> anyhow::Result<()> {
        let done = self.next();
        let (ops, signals) = (std::slice::from_ref(op), std::slice::from_ref(&done));
        self.queue.submit(&Submission { waits: &[], ops, signals })?;
        Ok(done.wait(TIMEOUT)?)
    }

    /// Submits every launch by itself, and then waits for all.
    fn launch_all(&mut self, plan: &Plan) -> anyhow::Result<()> {
        plan.for_each_launch(|op| {
            let ops = std::slice::from_ref(op);
            self.queue.submit(&Submission { waits: &[], ops, signals: &[] })?;
            Ok(())
        })?;
        let done = self.next();
        self.queue.submit(&Submission { waits: &[], ops: &[], signals: std::slice::from_ref(&done) })?;
        Ok(done.wait(TIMEOUT)?)
    }
}

fn print_head() {
    output::title(
        "Graphs of small nodes: record and prepare in nanoseconds a node, the rest in microseconds",
    );
    output::line(
        "device       kind   shape     nodes   edges   record  prepare   submit   replay      p99  ns/node    plain  by hand  ratio    one",
    );
}

impl Row {
    fn print(&self) {
        let us = |summary: &Summary| summary.p50_ns as f64 / 1e3;
        let hand =
            self.floor.handmade.as_ref().map_or_else(|| "-".to_owned(), |raw| format!("{:.1}", us(raw)));
        let ratio = self.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
        let kind = if self.kind == Kind::Kernel { "kernel" } else { "task" };
        let shape = if self.shape == Shape::Chain { "chain" } else { "stencil" };
        output::line(format!(
            "{:<12} {kind:<6} {shape:<7} {:>7} {:>7} {:>8.0} {:>8.0} {:>8.1} {:>8.1} {:>8.1} {:>8.0} {:>8.1} {hand:>8} {ratio:>6} {:>6.1}",
            self.device.to_string(),
            self.nodes,
            self.edges,
            self.per_node.record_ns,
            self.per_node.prepare_ns,
            us(&self.submit),
            us(&self.replay),
            self.replay.p99_ns as f64 / 1e3,
            self.per_node.replay_ns,
            us(&self.floor.plain),
            us(&self.one_empty_node)
        ));
    }
}
