//! Chunks that go through devices, recorded as one graph one after the other, and run side by side:
//! `cargo run --release -p warpweft --features graph-runtime,cuda --example pipeline -- --help`
//!
//! Each chunk is copied to the first device and mixed there, goes on to the next device and is mixed again, and is copied
//! back from the last. With one GPU alone its copy engines and its multiprocessors have different chunks at once; with
//! several, each has its own. The trace shows how much of that went on at once; https://ui.perfetto.dev opens it.

use std::{env, fs, sync::Arc, time::Duration};

use warpweft::{
    Arg, BufferView, CodeFormat, Device, ForeignCode, HostFunction, Kernel, KernelCode, KernelContract,
    Launch, Param, Runtime,
    graph_runtime::{
        self, ExecutableGraph, ExecutionTrace, Graph, HostTask, MemoryPlacement, NodeDesc, RuntimeConfig,
        TraceEvent, Usage,
    },
    host::HostBackend,
};

type Failure = Box<dyn std::error::Error>;

const HELP: &str = "\
Chunks through devices: there, mixed, on to the next, mixed, and back, as one graph.

Usage: pipeline [OPTIONS]

  --gpus N       GPUs on the way [as many as there are, 4 at most]
  --hosts N      host devices behind them [2 where there is no GPU, else 0]
  --chunks N     chunks [16 with a GPU, else 8]
  --chunk SIZE   bytes of a chunk, with K, M or G for powers of 1024 [32M with a GPU, else 1M]
  --rounds N     times that a device mixes each word [512 with a GPU, else 32]
  --make         a task of the host makes each chunk, in the graph [only without a GPU]
  --trace FILE   saves what ran when, for https://ui.perfetto.dev
  --svg FILE     saves a picture of the graph

Examples:
  pipeline --gpus 1                        one GPU: both copy engines and the kernels at once
  pipeline --gpus 2 --chunks 32            two GPUs, a copy between them besides
  pipeline --gpus 1 --hosts 1 --rounds 8   a GPU and a host device, which mixes slowly
  pipeline --gpus 0 --trace trace.json     host devices alone
";

const WITHIN: Duration = Duration::from_secs(60);
/// Words of each chunk that are looked at in the end, evenly spaced: mixing all of them again takes a processor minutes.
const CHECKED: u32 = 2048;
/// Workgroups of a kernel on a GPU; one of the host has all words.
const GPU_WORKGROUPS: u32 = 2048;

const CUDA_C: &str = r#"
extern "C" __global__ void mix(unsigned *words, unsigned count, unsigned rounds) {
    for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x) {
        unsigned word = words[at];
        for (unsigned round = 0; round < rounds; round++) word = (word ^ (word >> 15)) * 0x2c1b3c6du;
        words[at] = word;
    }
}
"#;

/// What the kernel makes of a word.
fn mixed(word: u32, rounds: u32) -> u32 {
    (0..rounds).fold(word, |word, _| (word ^ (word >> 15)).wrapping_mul(0x2c1b_3c6d))
}

/// What is in a chunk at first.
const fn made(chunk: u32, word: u32) -> u32 {
    word ^ (chunk << 24)
}

/// What was asked for; the rest depends on the devices.
#[derive(Debug, Default, PartialEq, Eq)]
struct Options {
    gpus: Option<usize>,
    hosts: Option<usize>,
    chunks: Option<u32>,
    chunk_bytes: Option<u64>,
    rounds: Option<u32>,
    makes: bool,
    trace: Option<String>,
    svg: Option<String>,
    helps: bool,
}

impl Options {
    fn parse(args: impl IntoIterator<Item = String>) -> Result<Self, Failure> {
        let (mut options, mut args) = (Self::default(), args.into_iter());
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--gpus" => options.gpus = Some(value()?.parse()?),
                "--hosts" => options.hosts = Some(value()?.parse()?),
                "--chunks" => options.chunks = Some(value()?.parse()?),
                "--chunk" => options.chunk_bytes = Some(bytes(&value()?)?),
                "--rounds" => options.rounds = Some(value()?.parse()?),
                "--make" => options.makes = true,
                "--trace" => options.trace = Some(value()?),
                "--svg" => options.svg = Some(value()?),
                "--help" | "-h" => options.helps = true,
                _ => return Err(format!("{arg} is no option; --help has them").into()),
            }
        }
        Ok(options)
    }
}

fn bytes(text: &str) -> Result<u64, Failure> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K') => (&text[..text.len() - 1], 10),
        Some(b'M') => (&text[..text.len() - 1], 20),
        Some(b'G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let size = digits.parse::<u64>()?.checked_mul(1 << shift).ok_or("more bytes than can be counted")?;
    if size == 0 || !size.is_multiple_of(4) || u32::try_from(size / 4).is_err() {
        return Err(format!("{text} is not a number of words from 1 to 2^32 - 1").into());
    }
    Ok(size)
}

/// How much is done.
#[derive(Debug, Clone, Copy)]
struct Plan {
    chunks: u32,
    words: u32,
    rounds: u32,
    makes: bool,
}

impl Plan {
    /// On GPUs copies and kernels are to take far longer than it takes to hand them over.
    fn new(options: &Options, has_gpu: bool) -> Result<Self, Failure> {
        let size = options.chunk_bytes.unwrap_or(if has_gpu { 32 << 20 } else { 1 << 20 });
        let chunks = options.chunks.unwrap_or(if has_gpu { 16 } else { 8 });
        if !(1..=256).contains(&chunks) {
            return Err("chunks are from 1 to 256".into());
        }
        let rounds = options.rounds.unwrap_or(if has_gpu { 512 } else { 32 });
        Ok(Self { chunks, words: u32::try_from(size / 4)?, rounds, makes: options.makes || !has_gpu })
    }

    const fn chunk_bytes(self) -> u64 {
        4 * self.words as u64
    }
}

#[expect(clippy::print_stdout, reason = "an example shows its result")]
fn main() -> Result<(), Failure> {
    let options = Options::parse(env::args().skip(1))?;
    if options.helps {
        print!("{HELP}");
        return Ok(());
    }
    run(&options)
}

#[expect(clippy::print_stdout, reason = "an example shows its result")]
fn run(options: &Options) -> Result<(), Failure> {
    let devices = open(options)?;
    let plan = Plan::new(options, devices.iter().any(is_gpu))?;
    let pipeline = Pipeline::new(&devices, plan)?;

    // What is prepared while a trace is recorded notes the time of every node.
    pipeline.runtime.start_trace();
    let mut graph = pipeline.runtime.graph();
    let ways = (0..plan.chunks).map(|chunk| pipeline.record(&mut graph, chunk));
    let results = ways.collect::<Result<Vec<_>, Failure>>()?;
    let prepared = graph.prepare()?;
    // The first time, devices bring code to where it runs.
    prepared.submit()?.wait(WITHIN)?;
    let second = prepared.submit()?;
    second.wait(WITHIN)?;
    let mut trace = pipeline.runtime.finish_trace().ok_or("one was begun")?;
    trace.events.retain(|event| event.submission == second.id());

    (0..).zip(&results).try_for_each(|(chunk, result)| pipeline.check(chunk, result))?;
    let names: Vec<String> = devices.iter().map(|device| device.info().id.to_string()).collect();
    let (count, kib) = (plan.chunks, plan.chunk_bytes() >> 10);
    println!(
        "{count} chunks of {kib} KiB through {} in {} pieces, all right",
        names.join(", "),
        prepared.segment_count()
    );
    tell(&trace);
    save(options, &trace, &prepared)
}

fn is_gpu(device: &Arc<dyn Device>) -> bool {
    device.info().id.backend != "host"
}

/// The devices of the way: GPUs, then those of the host.
fn open(options: &Options) -> Result<Vec<Arc<dyn Device>>, Failure> {
    let builder = Runtime::builder();
    #[cfg(feature = "cuda")]
    let builder = match warpweft::cuda::CudaBackend::new() {
        Ok(backend) if options.gpus != Some(0) => builder.backend(backend),
        _ => builder,
    };
    let hosts = u32::try_from(options.hosts.unwrap_or(2).max(1))?;
    let opened = builder.backend(HostBackend::with_devices(hosts)?).build()?;
    let of = |wants_gpu: bool| opened.devices().iter().filter(move |device| is_gpu(device) == wants_gpu);
    let gpus: Vec<_> = of(true).take(options.gpus.unwrap_or(4)).cloned().collect();
    if let Some(wanted) = options.gpus.filter(|wanted| gpus.len() < *wanted) {
        return Err(format!("{wanted} GPUs were asked for, and there are {}", gpus.len()).into());
    }
    let hosts = options.hosts.unwrap_or(if gpus.is_empty() { 2 } else { 0 });
    let devices: Vec<_> = gpus.into_iter().chain(of(false).take(hosts).cloned()).collect();
    if devices.is_empty() { Err("there are no devices on the way".into()) } else { Ok(devices) }
}

/// A runtime over the devices of the way, with the kernel of each.
struct Pipeline {
    runtime: graph_runtime::Runtime,
    stations: Vec<(Arc<dyn Device>, Arc<dyn Kernel>)>,
    plan: Plan,
}

impl Pipeline {
    fn new(devices: &[Arc<dyn Device>], plan: Plan) -> Result<Self, Failure> {
        let code = kernels(plan);
        let stations =
            devices.iter().map(|device| Ok((Arc::clone(device), device.load(&code)?.kernel("mix")?)));
        Ok(Self {
            runtime: graph_runtime::Runtime::new(devices.iter().cloned(), RuntimeConfig::default())?,
            stations: stations.collect::<Result<_, Failure>>()?,
            plan,
        })
    }

    /// Records one chunk's way, and says where it will be in the end.
    fn record(&self, graph: &mut Graph, chunk: u32) -> Result<BufferView, Failure> {
        let plan = self.plan;
        let allocate = |placement| {
            self.runtime.allocate(&placement, plan.chunk_bytes()).map(|buffer| buffer.view().clone())
        };
        let name = |station: usize| self.stations[station].0.info().id.to_string();
        let last = self.stations.len() - 1;
        let source = allocate(MemoryPlacement::HostVisible(self.stations[0].0.info().id))?;
        let words =
            move || -> Vec<u8> { (0..plan.words).flat_map(|word| made(chunk, word).to_le_bytes()).collect() };
        if plan.makes {
            let make = HostTask::fallible(move |context| Ok(context.write(0, 0, &words())?));
            graph.add(NodeDesc::task(&make, &[(source.clone(), Usage::Write)]).named("make"))?;
        } else {
            self.runtime.write(&source, WITHIN)?.write(0, &words())?;
        }
        let mut before = source;
        for (station, (device, kernel)) in self.stations.iter().enumerate() {
            let own = allocate(MemoryPlacement::Device(device.info().id))?;
            let from = if station == 0 { "host".to_owned() } else { name(station - 1) };
            let copied = format!("{from} to {}", name(station));
            graph.add(NodeDesc::copy(&before, &own)?.named(&copied))?;
            let (count, rounds) = (plan.words.to_le_bytes(), plan.rounds.to_le_bytes());
            let args = [Arg::Buffer(&own), Arg::Scalar(&count), Arg::Scalar(&rounds)];
            let workgroups = if is_gpu(device) { GPU_WORKGROUPS } else { 1 };
            let launch = Launch::new(kernel, [workgroups, 1, 1], &args)?;
            graph.add(NodeDesc::launch(launch).named(&format!("compute on {}", name(station))))?;
            before = own;
        }
        let result = allocate(MemoryPlacement::HostVisible(self.stations[last].0.info().id))?;
        graph.add(NodeDesc::copy(&before, &result)?.named(&format!("{} to host", name(last))))?;
        Ok(result)
    }

    fn check(&self, chunk: u32, result: &BufferView) -> Result<(), Failure> {
        let guard = self.runtime.read(result, WITHIN)?;
        let rounds = self.plan.rounds * u32::try_from(self.stations.len())?;
        let step = (self.plan.words / CHECKED).max(1) as usize;
        let last = self.plan.words - 1;
        for word in (0..self.plan.words).step_by(step).chain([last]) {
            let mut got = [0; 4];
            guard.read(4 * u64::from(word), &mut got)?;
            let (got, expected) = (u32::from_le_bytes(got), mixed(made(chunk, word), rounds));
            if got != expected {
                return Err(format!("word {word} of chunk {chunk} is {got} and should be {expected}").into());
            }
        }
        Ok(())
    }
}

/// The kernel in both forms; a device takes the one it runs.
fn kernels(plan: Plan) -> KernelCode {
    let params =
        [Param::read_write(plan.chunk_bytes()).aligned(4), Param::scalar::<u32>(), Param::scalar::<u32>()];
    let mix = KernelContract::new("mix", params).with_workgroup_size([256, 1, 1]);
    let code = KernelCode::new().with_function(mix.clone(), HostFunction::new(mix_words));
    let source = ForeignCode::Source { format: CodeFormat::CudaC, text: CUDA_C.to_owned() };
    // SAFETY: the kernel has these parameters, and touches as many words as it is told, which is what `record` passes and
    // the contract's least size holds.
    #[expect(unsafe_code, reason = "vouches for the kernel above")]
    unsafe {
        code.with_foreign([mix], source)
    }
}

fn mix_words(workgroup: &warpweft::Workgroup<'_>) {
    let (words, rounds) = (workgroup.slice::<u32>(0), workgroup.scalar::<u32>(2));
    (0..words.len()).for_each(|at| words.set(at, mixed(words.get(at), rounds)));
}

/// Times from and to, without overlaps, rising.
type Spans = Vec<(Duration, Duration)>;

/// When something of these went on.
fn spans<'a>(events: impl Iterator<Item = &'a TraceEvent>) -> Spans {
    let mut all: Spans = events.map(|event| (event.start, event.start + event.duration)).collect();
    all.sort_unstable();
    let mut merged = Spans::new();
    for (begin, end) in all {
        match merged.last_mut() {
            Some((_, last)) if begin <= *last => *last = end.max(*last),
            _ => merged.push((begin, end)),
        }
    }
    merged
}

fn total(spans: &Spans) -> Duration {
    spans.iter().map(|(begin, end)| *end - *begin).sum()
}

/// When both went on.
fn shared(one: &Spans, other: &Spans) -> Duration {
    let pairs = one.iter().flat_map(|a| other.iter().map(move |b| (a.0.max(b.0), a.1.min(b.1))));
    pairs.map(|(begin, end)| end.saturating_sub(begin)).sum()
}

/// What each part of the way took, and how much of one went on beside another's.
#[expect(clippy::print_stdout, reason = "an example shows its result")]
fn tell(trace: &ExecutionTrace) {
    // In the order of the way, which the first chunk's nodes have.
    let mut events: Vec<&TraceEvent> = trace.events.iter().collect();
    events.sort_unstable_by_key(|event| event.node);
    let mut names: Vec<&str> = Vec::new();
    for event in &events {
        if !names.contains(&event.name.as_str()) {
            names.push(&event.name);
        }
    }
    let of = |name: &str| spans(events.iter().copied().filter(|event| event.name == name));
    let parts: Vec<(&str, Spans)> = names.into_iter().map(|name| (name, of(name))).collect();
    let took = {
        let begin = trace.events.iter().map(|event| event.start).min().unwrap_or_default();
        let end = trace.events.iter().map(|event| event.start + event.duration).max().unwrap_or_default();
        end.saturating_sub(begin)
    };
    let part_of =
        |time: Duration, whole: Duration| 100.0 * time.as_secs_f64() / whole.as_secs_f64().max(1e-9);
    for (name, own) in &parts {
        println!("{name:<24} {:>10.1?}, {:>3.0} % of the time", total(own), part_of(total(own), took));
    }
    for (position, (one, first)) in parts.iter().enumerate() {
        for (other, second) in &parts[position + 1..] {
            let (both, shorter) = (shared(first, second), total(first).min(total(second)));
            println!("{one} beside {other}: {both:.1?}, {:.0} % of the shorter", part_of(both, shorter));
        }
    }
    let busy: Duration = parts.iter().map(|(_, own)| total(own)).sum();
    let longest = parts.iter().map(|(_, own)| total(own)).max().unwrap_or_default();
    println!(
        "{busy:.1?} of work in {took:.1?}: {:.2} at once",
        busy.as_secs_f64() / took.as_secs_f64().max(1e-9)
    );
    if busy > longest {
        let saved = busy.saturating_sub(took).as_secs_f64();
        let most = (busy - longest).as_secs_f64();
        println!("of what could be saved by that, {:.2} was", saved / most);
    }
}

#[expect(clippy::print_stdout, reason = "an example shows its result")]
fn save(options: &Options, trace: &ExecutionTrace, prepared: &ExecutableGraph) -> Result<(), Failure> {
    if let Some(file) = &options.trace {
        fs::write(file, trace.to_json())?;
        println!("the trace is in {file}");
    }
    if let Some(file) = &options.svg {
        fs::write(file, prepared.graph().to_svg())?;
        println!("the picture is in {file}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_hosts(args: &[&str]) -> Result<(), Failure> {
        let own = ["--gpus", "0"].iter().chain(args).map(|&arg| arg.to_owned());
        run(&Options::parse(own)?)
    }

    #[test]
    fn it_ends_well_on_one_device_and_on_several() -> Result<(), Failure> {
        on_hosts(&["--chunk", "64K"])?;
        on_hosts(&["--hosts", "1", "--chunk", "4K", "--rounds", "3"])?;
        on_hosts(&["--hosts", "3", "--chunks", "3", "--chunk", "64K", "--make"])
    }

    #[test]
    fn sizes_have_suffixes() -> Result<(), Failure> {
        assert_eq!(bytes("4")?, 4);
        assert_eq!(bytes("32M")?, 32 << 20);
        for wrong in ["", "0", "3", "M", "16G", "99999999999G"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        Ok(())
    }

    #[test]
    fn what_is_no_option_is_refused() {
        for wrong in [&["--gpus"][..], &["--gpus", "x"], &["twelve"]] {
            assert!(Options::parse(wrong.iter().map(|&arg| arg.to_owned())).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn times_are_shared_where_both_go_on() {
        let span = |begin, end| (Duration::from_secs(begin), Duration::from_secs(end));
        let (one, other) = (vec![span(0, 4), span(6, 8)], vec![span(3, 7)]);
        assert_eq!(shared(&one, &other), Duration::from_secs(2));
        assert_eq!(total(&one), Duration::from_secs(6));
    }
}
