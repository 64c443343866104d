//! The demo: everything the devices do, with every byte checked.

mod graph;

use std::{
    collections::{BTreeMap, HashSet},
    fs::{self, File},
    io::{BufWriter, Write as _},
    path::Path,
    process::ExitCode,
    sync::Arc,
    thread,
    time::Instant,
};

use anyhow::{Context as _, bail};
use serde::Serialize;
use warpweft::{
    Arg, Backend, BufferDesc, BufferView, Bytes, CollectiveOp, DType, Device, DeviceId, DeviceKind, Launch,
    Op, QueueDesc, ReduceOp, Runtime, SemaphorePoint, Submission,
    bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous},
    comm::{CommConfig, Communicator, EngineKind},
    transfer::CopyHandle,
    wrappers::{FaultConfig, FaultyBackend, TracingBackend},
};

use self::graph::{DemoGraph, GraphSummary};
use crate::{
    args::{Demo, Fault},
    kernels::{self, pattern_word},
    output, select,
};

/// Bytes of one word of the pattern.
const WORD: u64 = 4;

/// Bytes of each device in the graph, which is about order and not about speed.
const LARGEST_IN_GRAPH: u64 = 1 << 20;

/// What was checked.
#[derive(Debug, Default, Serialize)]
struct Summary {
    devices: usize,
    kernels: usize,
    pairs: usize,
    /// Pairs by kind of route.
    routes: BTreeMap<String, usize>,
    /// Ranks of a sum over all devices, each piece of silicon once; 0 if there was no such sum.
    ranks: usize,
    /// What carried the sum out.
    #[serde(skip_serializing_if = "Option::is_none")]
    engine: Option<EngineKind>,
    /// The graph over all devices; nothing if it was not come to.
    #[serde(skip_serializing_if = "Option::is_none")]
    graph: Option<GraphSummary>,
    /// Bytes read back and compared, results of kernels, copies, the sum and the graph together.
    verified_bytes: u64,
    wrong_bytes: u64,
    seconds: f64,
    ok: bool,
    /// Why the demo ended early.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

pub(crate) fn run(args: &Demo) -> anyhow::Result<ExitCode> {
    // Before the work: a trace that cannot be saved is no surprise at the end.
    let trace = args.trace.as_deref().map(create_trace).transpose()?;
    if let Some(folder) = &args.save_graph {
        fs::create_dir_all(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    }
    let mut summary = Summary::default();
    let outcome = traced_backends(args).and_then(|traced| {
        let outcome = check_everything(args, &traced, &mut summary);
        if let Some(file) = trace {
            save_trace(file, &traced)?;
        }
        outcome
    });
    summary.ok = outcome.is_ok() && summary.wrong_bytes == 0;
    if let Err(error) = outcome {
        // A call that cannot work has no result to print.
        if !args.json || error.is::<output::WrongCall>() {
            return Err(error);
        }
        summary.error = Some(format!("{error:#}"));
    }
    report(args, &summary)?;
    Ok(if summary.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn check_everything(
    args: &Demo,
    backends: &[Arc<TracingBackend>],
    summary: &mut Summary,
) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut builder = Runtime::builder();
    for backend in backends {
        builder = builder.shared_backend(Arc::clone(backend) as Arc<dyn Backend>);
    }
    let runtime = builder.build()?;
    let demo = Run { runtime: &runtime, args };
    summary.devices = runtime.devices().len();
    demo.show_devices();
    let results = demo.run_kernels(summary)?;
    demo.move_results(&results, summary)?;
    demo.sum_up(&results, summary)?;
    demo.run_graph(summary)?;
    summary.seconds = started.elapsed().as_secs_f64();
    Ok(())
}

/// The chosen backends, broken as asked for, with what they do recorded.
fn traced_backends(args: &Demo) -> anyhow::Result<Vec<Arc<TracingBackend>>> {
    const KEPT: usize = 100_000;
    let broken = |backend: Arc<dyn Backend>| match args.fault {
        None => backend,
        Some(fault) => Arc::new(FaultyBackend::new(backend, faults(fault))),
    };
    let backends = select::backends(&args.selection)?;
    Ok(backends.into_iter().map(|backend| Arc::new(TracingBackend::new(broken(backend), KEPT))).collect())
}

fn faults(fault: Fault) -> FaultConfig {
    let none = FaultConfig::default();
    match fault {
        Fault::Corrupt => FaultConfig { copy_corrupts: 1.0, ..none },
        Fault::Copy => FaultConfig { copy_fails: 1.0, ..none },
        Fault::Launch => FaultConfig { launch_fails: 1.0, ..none },
        Fault::Silence => FaultConfig { signal_is_lost: 1.0, ..none },
        Fault::Death => FaultConfig { dies_at_step: Some(6), ..none },
    }
}

fn create_trace(path: &Path) -> anyhow::Result<File> {
    File::create(path).with_context(|| format!("{} cannot be written", path.display()))
}

fn save_trace(file: File, backends: &[Arc<TracingBackend>]) -> anyhow::Result<()> {
    let mut events = Vec::new();
    for backend in backends {
        if let serde_json::Value::Array(spans) = backend.trace().to_chrome_json()["traceEvents"].take() {
            events.extend(spans);
        }
    }
    let trace = serde_json::json!({ "displayTimeUnit": "ns", "traceEvents": events });
    let mut writer = BufWriter::new(file);
    serde_json::to_writer(&mut writer, &trace).context("the trace cannot be written")?;
    // A drop would pass over a full disk in silence.
    writer.flush().context("the trace cannot be written")
}

/// One run of the demo.
struct Run<'a> {
    runtime: &'a Runtime,
    args: &'a Demo,
}

/// What a kernel produced on a device.
struct Produced {
    device: DeviceId,
    seed: u32,
    memory: BufferView,
}

impl Run<'_> {
    fn show_devices(&self) {
        if self.args.json {
            return;
        }
        output::title("Devices");
        let infos = || self.runtime.devices().iter().map(|device| device.info());
        let width = infos().map(|info| info.name.chars().count()).max().unwrap_or(0).max(20);
        for info in infos() {
            let unit = if info.kind == DeviceKind::Cpu { "worker" } else { "multiprocessor" };
            output::line(format!(
                "  {:<8} {:<4} {:<width$} {:>9}   {} {unit}{}",
                info.id.to_string(),
                info.kind.to_string(),
                info.name,
                info.memory.to_string(),
                info.multiprocessors,
                if info.multiprocessors == 1 { "" } else { "s" }
            ));
        }
    }

    /// Runs the kernel on every device at once and checks each result against the processor's own.
    fn run_kernels(&self, summary: &mut Summary) -> anyhow::Result<Vec<Produced>> {
        let launched = self
            .runtime
            .devices()
            .iter()
            .zip(1..)
            .map(|(device, seed)| self.launch(device, seed))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let mut results = Vec::new();
        for (result, done) in launched {
            done.wait(self.args.timeout)
                .with_context(|| format!("the kernel on {} did not end well", result.device))?;
            summary.kernels += 1;
            self.verify(&result.memory, result.seed, summary)
                .with_context(|| format!("the result on {} cannot be read", result.device))?;
            results.push(result);
        }
        self.say(&format!("Kernels   {} ran, {} checked", summary.kernels, Bytes(summary.verified_bytes)));
        Ok(results)
    }

    fn launch(&self, device: &Arc<dyn Device>, seed: u32) -> anyhow::Result<(Produced, SemaphorePoint)> {
        let id = device.info().id;
        let size = self.args.size.checked_next_multiple_of(WORD).context("--size is too large")?;
        let memory = BufferView::whole(device.allocate(&BufferDesc::device(size))?);
        let kernel = device.load(&kernels::pattern())?.kernel("pattern")?;
        let queue = device.create_queue(&QueueDesc::default())?;
        let done = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
        let groups = kernels::workgroups(size).context("--size is too large")?;
        let (words, seed_bytes) = ((size / WORD).to_le_bytes(), seed.to_le_bytes());
        let args = [Arg::Buffer(&memory), Arg::Scalar(&words), Arg::Scalar(&seed_bytes)];
        let ops = [Op::Launch(Launch::new(&kernel, [groups, 1, 1], &args)?)];
        queue
            .submit(&Submission { waits: &[], ops: &ops, signals: std::slice::from_ref(&done) })
            .with_context(|| format!("{id} did not take the kernel"))?;
        Ok((Produced { device: id, seed, memory }, done))
    }

    /// Copies every result to every other device and checks what arrived: in each round every device sends
    /// one copy and receives another, all of them at once.
    fn move_results(&self, results: &[Produced], summary: &mut Summary) -> anyhow::Result<()> {
        let bar = output::progress((results.len() * (results.len() - 1)) as u64, "moving results");
        for round in 1..results.len() {
            let targets = results.iter().cycle().skip(round);
            let copies = results
                .iter()
                .zip(targets)
                .map(|(from, to)| Ok((from, to.device, self.start_copy(from, to.device)?)))
                .collect::<anyhow::Result<Vec<_>>>()?;
            for (from, to, (copy, target)) in copies {
                let pair = || format!("{} to {to} ({})", from.device, copy.route());
                copy.wait(self.args.timeout)
                    .with_context(|| format!("the copy from {} did not end well", pair()))?;
                let wrong = self.verify(&target, from.seed, summary).with_context(pair)?;
                if wrong > 0 {
                    bar.suspend(|| self.say(&format!("  {wrong} wrong bytes from {}", pair())));
                }
                summary.pairs += 1;
                *summary.routes.entry(copy.route().kind.to_string()).or_default() += 1;
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        if summary.pairs == 0 {
            self.say("Copies    none: there is one device");
            return Ok(());
        }
        let routes: Vec<String> =
            summary.routes.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        self.say(&format!(
            "Copies    {} pairs ({}), {} at once",
            summary.pairs,
            routes.join(", "),
            results.len()
        ));
        Ok(())
    }

    fn start_copy(&self, from: &Produced, to: DeviceId) -> anyhow::Result<(CopyHandle, BufferView)> {
        let Some(device) = self.runtime.device(to) else { bail!("{to} is not open") };
        let target = BufferView::whole(device.allocate(&BufferDesc::device(from.memory.size()))?);
        let copy = self.runtime.transfer().copy(&from.memory, &target);
        Ok((copy.with_context(|| format!("the copy from {} to {to} did not start", from.device))?, target))
    }

    /// Sums the results of all devices on all of them, each device a rank in a thread of its own.
    fn sum_up(&self, results: &[Produced], summary: &mut Summary) -> anyhow::Result<()> {
        let mut silicon = HashSet::new();
        // The same silicon under two backends is one rank.
        let ranks: Vec<&Produced> =
            results.iter().filter(|result| silicon.insert(result.device.uuid)).collect();
        let size = u32::try_from(ranks.len())?;
        if size < 2 {
            self.say("Sum       none: there is one device");
            return Ok(());
        }
        let meeting = Meeting::new();
        let sums = thread::scope(|scope| {
            let meeting = &meeting;
            let start = |(number, result)| {
                let rendezvous = Rendezvous::Meeting(Arc::clone(meeting));
                scope.spawn(move || self.sum_on(result, rendezvous, JoinConfig::new(Rank(number), size)))
            };
            let threads: Vec<_> = (0..size).zip(ranks.iter().copied()).map(start).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a rank of the sum panicked")))
            };
            threads.into_iter().map(join).collect::<anyhow::Result<Vec<_>>>()
        })?;
        let seeds: Vec<u32> = ranks.iter().map(|rank| rank.seed).collect();
        let expected =
            |index| seeds.iter().fold(0_u32, |sum, seed| sum.wrapping_add(pattern_word(*seed, index)));
        for (sum, engine) in &sums {
            let wrong = self.compare(sum, expected, summary)?;
            if wrong > 0 {
                self.say(&format!("  {wrong} wrong bytes in the sum on {}", sum.device()));
            }
            summary.engine = Some(*engine);
        }
        summary.ranks = ranks.len();
        let engine = summary.engine.map_or("", EngineKind::name);
        self.say(&format!("Sum       {size} ranks, engine {engine}, compared on all"));
        Ok(())
    }

    /// One rank's part of the sum.
    fn sum_on(
        &self,
        result: &Produced,
        rendezvous: Rendezvous,
        config: JoinConfig,
    ) -> anyhow::Result<(BufferView, EngineKind)> {
        let (within, id) = (self.args.timeout, result.device);
        let Some(device) = self.runtime.device(id) else { bail!("{id} is not open") };
        let group = Group::join(rendezvous, config, within)?;
        let comm = Communicator::create(group, device, &CommConfig::default(), within);
        let comm = comm.with_context(|| format!("{id} is no rank of a sum"))?;
        let sum = BufferView::whole(device.allocate(&BufferDesc::device(result.memory.size()))?);
        let call = comm.all_reduce(ReduceOp::Sum, DType::U32, &result.memory, &sum)?;
        call.wait(within).with_context(|| format!("the sum did not end well on {id}"))?;
        comm.barrier(within)?;
        Ok((sum, comm.engine_for(CollectiveOp::AllReduce(ReduceOp::Sum), DType::U32)?))
    }

    /// Runs a graph over all devices and the host, and checks what it leaves everywhere.
    fn run_graph(&self, summary: &mut Summary) -> anyhow::Result<()> {
        let size = self.args.size.min(LARGEST_IN_GRAPH).next_multiple_of(WORD);
        let graph = DemoGraph::record(self.runtime.devices(), size)?;
        let (ran, results) = graph.run(self.args.timeout, self.args.save_graph.as_deref())?;
        for result in &results {
            let wrong = self.compare(&result.memory, |index| result.word(index), summary)?;
            if wrong > 0 {
                self.say(&format!("  {wrong} wrong bytes in {}", result.what));
            }
        }
        self.say(&format!("Graph     {}", ran.text()));
        summary.graph = Some(ran);
        Ok(())
    }

    /// Reads a buffer back and counts the bytes that are not the pattern's.
    fn verify(&self, memory: &BufferView, seed: u32, summary: &mut Summary) -> anyhow::Result<u64> {
        self.compare(memory, |index| pattern_word(seed, index), summary)
    }

    /// Reads a buffer back and counts the bytes that are not those of these words.
    fn compare(
        &self,
        memory: &BufferView,
        expected: impl Fn(usize) -> u32,
        summary: &mut Summary,
    ) -> anyhow::Result<u64> {
        let mut bytes = vec![0; usize::try_from(memory.size())?];
        self.runtime.transfer().read(memory, &mut bytes, self.args.timeout)?;
        let wrong_in = |(index, word): (usize, &[u8; 4])| {
            let expected = expected(index).to_le_bytes();
            word.iter().zip(expected).filter(|(got, expected)| **got != *expected).count() as u64
        };
        let wrong = bytes.as_chunks().0.iter().enumerate().map(wrong_in).sum();
        summary.verified_bytes += memory.size();
        summary.wrong_bytes += wrong;
        Ok(wrong)
    }

    fn say(&self, text: &str) {
        if !self.args.json {
            output::line(text);
        }
    }
}

fn report(args: &Demo, summary: &Summary) -> anyhow::Result<()> {
    if args.json {
        return output::json(summary);
    }
    let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let checked = format!(
        "{}, {}, {}{}: {} read back and compared in {:.2} s",
        count(summary.devices, "device"),
        count(summary.kernels, "kernel"),
        count(summary.pairs, "pair"),
        match (summary.ranks > 0, summary.graph.is_some()) {
            (true, true) => ", one sum, one graph",
            (true, false) => ", one sum",
            (false, true) => ", one graph",
            (false, false) => "",
        },
        Bytes(summary.verified_bytes),
        summary.seconds
    );
    if summary.ok {
        output::good(&checked);
    } else {
        output::wrong(&format!("{checked}; {} bytes were wrong", summary.wrong_bytes));
    }
    if let Some(path) = &args.trace {
        output::line(format!(
            "Trace     {} (open it in ui.perfetto.dev or chrome://tracing)",
            path.display()
        ));
    }
    if let Some(folder) = &args.save_graph {
        let folder = folder.display();
        output::line(format!("Graph in  {folder}/graph.svg, its trace in {folder}/graph.json"));
    }
    Ok(())
}
