//! Graphs on host devices: recording and inference, tasks, and the shortest submission.
//!
//! Run: `cargo bench -p warpweft-benches --bench graph`
//!
//! StarPU's figure beside it comes from the Debian package `starpu-examples`, on the same machine:
//! `STARPU_NCPU=1 /usr/lib/x86_64-linux-gnu/starpu/examples/tasks_overhead -b 2 -i 65536`

#![expect(clippy::print_stdout, reason = "printing is what a benchmark does")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use warpweft_benches::beside_floor;
use warpweft_cli::measure::Summary;
use warpweft_core_types::{
    Arg, Backend as _, BufferDesc, BufferView, Device, Features, HostFunction, Kernel, KernelCode,
    KernelContract, Launch, Op, Param, QueueDesc, SemaphorePoint, Submission,
};
use warpweft_graph_runtime::{Graph, HostTask, Runtime, RuntimeConfig, Usage};
use warpweft_host::HostBackend;

/// Rounds of each figure; the median and the longest are shown.
const ROUNDS: u32 = 21;
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> anyhow::Result<()> {
    let backend = HostBackend::with_devices(1)?;
    let device = backend.open(0, Features::empty())?;
    // Graphs here run once, or wait for themselves.
    let runtime =
        Runtime::new([Arc::clone(&device)], RuntimeConfig { graph_slots: 1, ..RuntimeConfig::default() })?;
    let kernels = Kernels::load(&device)?;
    record_whole_buffers(&runtime, &device, &kernels)?;
    record_tiles(&runtime, &device, &kernels)?;
    kernels_of_two_buffers(&runtime, &device, &kernels)?;
    tasks_of_two_buffers(&runtime, &device)?;
    single_kernels(&runtime, &device, &kernels)?;
    shortest_submission(&runtime)
}

struct Kernels {
    /// Reads none, one or two buffers and writes another.
    by_reads: [Arc<dyn Kernel>; 3],
}

impl Kernels {
    fn load(device: &Arc<dyn Device>) -> anyhow::Result<Self> {
        let contract = |reads: usize| {
            let params: Vec<Param> =
                (0..reads).map(|_| Param::read(1)).chain([Param::read_write(1)]).collect();
            KernelContract::new(format!("touch_{reads}"), params).brief()
        };
        let code = (0..3).fold(KernelCode::new(), |code, reads| {
            code.with_function(contract(reads), HostFunction::new(|_| {}))
        });
        let module = device.load(&code)?;
        let kernel = |reads: usize| module.kernel(&format!("touch_{reads}"));
        Ok(Self { by_reads: [kernel(0)?, kernel(1)?, kernel(2)?] })
    }
}

fn buffers(device: &Arc<dyn Device>, count: usize, size: u64) -> anyhow::Result<Vec<BufferView>> {
    let one = |_| Ok(BufferView::whole(device.allocate(&BufferDesc::host_visible(size))?));
    (0..count).map(one).collect()
}

/// Records a kernel over views.
fn record(graph: &mut Graph, kernels: &Kernels, views: &[&BufferView]) -> anyhow::Result<()> {
    let mut args = [Arg::Scalar(&[]); 3];
    for (arg, view) in args.iter_mut().zip(views) {
        *arg = Arg::Buffer(view);
    }
    let kernel = &kernels.by_reads[views.len() - 1];
    graph.launch(Launch::new(kernel, [1, 1, 1], &args[..views.len()])?)?;
    Ok(())
}

fn record_whole_buffers(
    runtime: &Runtime,
    device: &Arc<dyn Device>,
    kernels: &Kernels,
) -> anyhow::Result<()> {
    const NODES: usize = 100_000;
    let buffers = buffers(device, 64, 4096)?;
    let mut random = fastrand::Rng::with_seed(1);
    // Two and a half uses each, on average.
    let choices: Vec<[usize; 3]> = (0..NODES)
        .map(|_| {
            let first = random.usize(..62);
            [first, first + 1, first + 2]
        })
        .collect();
    show("record and infer a node, whole buffers", NODES, || {
        let mut graph = runtime.graph();
        let began = Instant::now();
        for (node, [a, b, c]) in choices.iter().enumerate() {
            if node.is_multiple_of(2) {
                record(&mut graph, kernels, &[&buffers[*a], &buffers[*b], &buffers[*c]])?;
            } else {
                record(&mut graph, kernels, &[&buffers[*a], &buffers[*b]])?;
            }
        }
        Ok(began.elapsed())
    })
}

fn record_tiles(runtime: &Runtime, device: &Arc<dyn Device>, kernels: &Kernels) -> anyhow::Result<()> {
    const NODES: usize = 100_000;
    const TILE: u64 = 4096;
    let whole = &buffers(device, 1, 1 << 30)?[0];
    let tiles: Vec<BufferView> = (0..whole.size() / TILE)
        .map(|tile| whole.slice(tile * TILE..(tile + 1) * TILE))
        .collect::<Result<_, _>>()?;
    let mut random = fastrand::Rng::with_seed(2);
    let choices: Vec<usize> = (0..NODES).map(|_| random.usize(..tiles.len() - 2)).collect();
    show("record and infer a node, 4 KiB tiles of 1 GiB", NODES, || {
        let mut graph = runtime.graph();
        let began = Instant::now();
        for (node, &tile) in choices.iter().enumerate() {
            if node.is_multiple_of(2) {
                record(&mut graph, kernels, &[&tiles[tile], &tiles[tile + 1], &tiles[tile + 2]])?;
            } else {
                record(&mut graph, kernels, &[&tiles[tile], &tiles[tile + 1]])?;
            }
        }
        Ok(began.elapsed())
    })
}

/// Recorded, prepared, submitted and waited for: everything that a task costs.
fn kernels_of_two_buffers(
    runtime: &Runtime,
    device: &Arc<dyn Device>,
    kernels: &Kernels,
) -> anyhow::Result<()> {
    const NODES: usize = 65_536;
    let buffers = buffers(device, 64, 64)?;
    let mut shares = [Vec::new(), Vec::new(), Vec::new()];
    show("a kernel of two buffers, in all", NODES, || {
        let began = Instant::now();
        let mut graph = runtime.graph();
        for node in 0..NODES {
            record(&mut graph, kernels, &[&buffers[node % 64], &buffers[(node * 7 + 1) % 64]]).or_else(
                |_| record(&mut graph, kernels, &[&buffers[node % 64], &buffers[(node + 1) % 64]]),
            )?;
        }
        let recorded = began.elapsed();
        let prepared = graph.prepare()?;
        let ready = began.elapsed();
        prepared.submit()?.wait(PATIENCE)?;
        let all = began.elapsed();
        for (share, time) in shares.iter_mut().zip([recorded, ready - recorded, all - ready]) {
            share.push(each_of(time, NODES));
        }
        Ok(all)
    })?;
    for (name, share) in ["  recording it", "  preparing it", "  running it"].iter().zip(shares) {
        print(name, &share);
    }
    Ok(())
}

fn tasks_of_two_buffers(runtime: &Runtime, device: &Arc<dyn Device>) -> anyhow::Result<()> {
    const NODES: usize = 65_536;
    let buffers = buffers(device, 64, 64)?;
    let task = HostTask::new(|_| {}).brief();
    show("a task of two buffers, in all", NODES, || {
        let began = Instant::now();
        let mut graph = runtime.graph();
        for node in 0..NODES {
            let operands = [
                (buffers[node % 64].clone(), Usage::ReadWrite),
                (buffers[(node + 1) % 64].clone(), Usage::Read),
            ];
            graph.task(&task, &operands)?;
        }
        graph.run()?.wait(PATIENCE)?;
        Ok(began.elapsed())
    })
}

/// One after the other, without a graph, beside the same put in a queue by hand.
fn single_kernels(runtime: &Runtime, device: &Arc<dyn Device>, kernels: &Kernels) -> anyhow::Result<()> {
    const NODES: usize = 200;
    let buffers = buffers(device, 2, 64)?;
    let args = [Arg::Buffer(&buffers[0]), Arg::Buffer(&buffers[1])];
    let launch = Launch::new(&kernels.by_reads[1], [1, 1, 1], &args)?;
    let mut ours = || {
        let mut last = runtime.launch(launch)?;
        for _ in 1..NODES {
            last = runtime.launch(launch)?;
        }
        Ok(last.wait(PATIENCE)?)
    };
    let (queue, semaphore) = (device.create_queue(&QueueDesc::default())?, device.create_semaphore(0)?);
    let mut value = 0;
    let mut by_hand = || {
        for _ in 0..NODES {
            value += 1;
            let signals = [SemaphorePoint::new(&semaphore, value)];
            queue.submit(&Submission { waits: &[], ops: &[Op::Launch(launch)], signals: &signals })?;
        }
        Ok(SemaphorePoint::new(&semaphore, value).wait(PATIENCE)?)
    };
    beside_floor("200 single kernels in a row", ROUNDS, &mut ours, &mut by_hand)
}

fn shortest_submission(runtime: &Runtime) -> anyhow::Result<()> {
    const TIMES: usize = 2000;
    let mut graph = runtime.graph();
    graph.task(&HostTask::new(|_| {}).brief(), &[])?;
    let prepared = graph.prepare()?;
    show("a graph of one empty task, submitted and waited for", TIMES, || {
        let began = Instant::now();
        for _ in 0..TIMES {
            prepared.submit()?.wait(PATIENCE)?;
        }
        Ok(began.elapsed())
    })
}

fn each_of(time: Duration, count: usize) -> Duration {
    Duration::from_secs_f64(time.as_secs_f64() / count as f64)
}

fn show(name: &str, count: usize, mut round: impl FnMut() -> anyhow::Result<Duration>) -> anyhow::Result<()> {
    round()?;
    let times = (0..ROUNDS).map(|_| Ok(each_of(round()?, count))).collect::<anyhow::Result<Vec<_>>>()?;
    print(name, &times);
    Ok(())
}

fn print(name: &str, times: &[Duration]) {
    // Of so few rounds, what 99 % stay below or at is the longest.
    let Summary { p50_ns: median, p99_ns: max, .. } = Summary::of(times);
    println!("{name:<52} p50 {median:>9} ns  max {max:>9} ns");
    println!("{}", serde_json::json!({ "name": name.trim(), "median": median, "max": max, "unit": "ns" }));
}
