//! Chunks that go through two devices, recorded as one graph one after the other, and run side by side:
//! `cargo run --release -p warpweft --features graph-runtime --example pipeline [TRACE.json]`
//!
//! Each chunk is made by the host, copied to the first device, scaled there, copied to the second, summed up there, and
//! copied back. The trace shows how much of that went on at once; https://ui.perfetto.dev opens it.

use std::{env, fs, sync::Arc, time::Duration};

use warpweft::{
    Arg, BufferView, Device, HostFunction, Kernel, KernelCode, KernelContract, Launch, Param, Runtime,
    graph_runtime::{self, ExecutionTrace, Graph, HostTask, MemoryPlacement, NodeDesc, RuntimeConfig, Usage},
    host::HostBackend,
};

type Failure = Box<dyn std::error::Error>;

const WITHIN: Duration = Duration::from_secs(30);
const CHUNKS: u32 = 8;
const WORDS: u32 = 1 << 15;
const CHUNK_BYTES: u64 = 4 * WORDS as u64;

#[expect(clippy::print_stdout, reason = "an example shows its result")]
fn main() -> Result<(), Failure> {
    let opened = Runtime::builder().backend(HostBackend::with_devices(2)?).build()?;
    let [first, second] = opened.devices() else { return Err("two were asked for".into()) };
    let runtime = graph_runtime::Runtime::new(opened.devices().iter().cloned(), RuntimeConfig::default())?;
    let (scale, sum) = (load(first, "scale", scale_words)?, load(second, "sum", sum_words)?);

    // What is prepared while a trace is recorded notes the time of every node.
    runtime.start_trace();
    let mut graph = runtime.graph();
    let results = (0..CHUNKS)
        .map(|chunk| record(&runtime, &mut graph, [first, second], [&scale, &sum], chunk))
        .collect::<Result<Vec<_>, Failure>>()?;
    let prepared = graph.prepare()?;
    prepared.submit()?.wait(WITHIN)?;
    let trace = runtime.finish_trace().ok_or("one was begun")?;

    for (chunk, result) in (0..).zip(&results) {
        let expected: u32 = (0..WORDS).fold(0, |sum, word| sum.wrapping_add(3 * (word ^ chunk)));
        assert_eq!(runtime.read(result, WITHIN)?.to_vec()?, expected.to_le_bytes(), "chunk {chunk}");
    }
    println!("{CHUNKS} chunks through 2 devices in {} pieces, all right", prepared.segment_count());
    let (busy, took) = times(&trace);
    println!("{busy:.1?} of work in {took:.1?}: {:.1} at once", busy.as_secs_f64() / took.as_secs_f64());
    // As a test its argument is a test's name.
    if let Some(file) = env::args().nth(1).filter(|file| file.ends_with(".json")) {
        fs::write(&file, trace.to_json())?;
        println!("the trace is in {file}");
    }
    Ok(())
}

/// Records one chunk's way, and says where its sum will be.
fn record(
    runtime: &graph_runtime::Runtime,
    graph: &mut Graph,
    [first, second]: [&Arc<dyn Device>; 2],
    [scale, sum]: [&Arc<dyn Kernel>; 2],
    chunk: u32,
) -> Result<BufferView, Failure> {
    let allocate = |placement, size| runtime.allocate(&placement, size).map(|buffer| buffer.view().clone());
    let (one, other) = (first.info().id, second.info().id);
    let made = allocate(MemoryPlacement::HostVisible(one), CHUNK_BYTES)?;
    let scaled = allocate(MemoryPlacement::Device(one), CHUNK_BYTES)?;
    let moved = allocate(MemoryPlacement::Device(other), CHUNK_BYTES)?;
    let total = allocate(MemoryPlacement::Device(other), 4)?;
    let result = allocate(MemoryPlacement::HostVisible(other), 4)?;
    let make = HostTask::fallible(move |context| {
        let words: Vec<u8> = (0..WORDS).flat_map(|word| (word ^ chunk).to_le_bytes()).collect();
        Ok(context.write(0, 0, &words)?)
    });
    graph.add(NodeDesc::task(&make, &[(made.clone(), Usage::Write)]).named("make"))?;
    graph.copy(&made, &scaled)?;
    graph.launch(Launch::new(scale, [1, 1, 1], &[Arg::Buffer(&scaled)])?)?;
    graph.copy(&scaled, &moved)?;
    graph.launch(Launch::new(sum, [1, 1, 1], &[Arg::Buffer(&moved), Arg::Buffer(&total)])?)?;
    graph.copy(&total, &result)?;
    Ok(result)
}

fn load(
    device: &Arc<dyn Device>,
    name: &str,
    body: fn(&warpweft::Workgroup<'_>),
) -> Result<Arc<dyn Kernel>, Failure> {
    let params = match name {
        "scale" => vec![Param::read_write(4)],
        _ => vec![Param::read(4), Param::write(4)],
    };
    let code = KernelCode::new().with_function(KernelContract::new(name, params), HostFunction::new(body));
    Ok(device.load(&code)?.kernel(name)?)
}

fn scale_words(workgroup: &warpweft::Workgroup<'_>) {
    let words = workgroup.slice::<u32>(0);
    (0..words.len()).for_each(|at| words.set(at, words.get(at).wrapping_mul(3)));
}

fn sum_words(workgroup: &warpweft::Workgroup<'_>) {
    let (words, total) = (workgroup.slice::<u32>(0), workgroup.slice::<u32>(1));
    total.set(0, words.iter().fold(0, u32::wrapping_add));
}

/// What all nodes took together, and the time from the first one's beginning to the last one's end.
fn times(trace: &ExecutionTrace) -> (Duration, Duration) {
    let busy = trace.events.iter().map(|event| event.duration).sum();
    let begin = trace.events.iter().map(|event| event.start).min().unwrap_or_default();
    let end = trace.events.iter().map(|event| event.start + event.duration).max().unwrap_or_default();
    (busy, end - begin)
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_ends_well() -> Result<(), super::Failure> {
        super::main()
    }
}
