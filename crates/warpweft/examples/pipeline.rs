//! Chunks that go through two devices, recorded as one graph one after the other, and run side by side:
//! `cargo run --release -p warpweft --features graph-runtime,cuda --example pipeline [TRACE.json]`
//!
//! The devices are GPUs as far as there are some, and without the feature `cuda` those of the host.
//!
//! Each chunk is made by the host, copied to the first device, scaled there, copied to the second, summed up there, and
//! copied back. The trace shows how much of that went on at once; https://ui.perfetto.dev opens it.

use std::{env, fs, sync::Arc, time::Duration};

use warpweft::{
    Arg, BufferView, CodeFormat, Device, ForeignCode, HostFunction, Kernel, KernelCode, KernelContract,
    Launch, Param, Runtime,
    graph_runtime::{self, ExecutionTrace, Graph, HostTask, MemoryPlacement, NodeDesc, RuntimeConfig, Usage},
    host::HostBackend,
};

type Failure = Box<dyn std::error::Error>;

const WITHIN: Duration = Duration::from_secs(30);
const CHUNKS: u32 = 8;
const WORDS: u32 = 1 << 15;
const CHUNK_BYTES: u64 = 4 * WORDS as u64;

/// The kernels for GPUs, of one workgroup each.
const CUDA_C: &str = r#"
extern "C" __global__ void scale(unsigned *words, unsigned count) {
    for (unsigned at = threadIdx.x; at < count; at += blockDim.x) words[at] *= 3;
}

extern "C" __global__ void sum(const unsigned *words, unsigned *total, unsigned count) {
    __shared__ unsigned sums[256];
    unsigned own = 0;
    for (unsigned at = threadIdx.x; at < count; at += blockDim.x) own += words[at];
    sums[threadIdx.x] = own;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) *total = sums[0];
}
"#;

#[expect(clippy::print_stdout, reason = "an example shows its result")]
fn main() -> Result<(), Failure> {
    let opened = open()?;
    let [first, second, ..] = opened.devices() else { return Err("two were asked for".into()) };
    let both = [Arc::clone(first), Arc::clone(second)];
    let runtime = graph_runtime::Runtime::new(both, RuntimeConfig::default())?;
    let code = kernels();
    let (scale, sum) = (first.load(&code)?.kernel("scale")?, second.load(&code)?.kernel("sum")?);

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
    let (first, second) = (first.info().id, second.info().id);
    let pieces = prepared.segment_count();
    println!("{CHUNKS} chunks through {first} and {second} in {pieces} pieces, all right");
    let (busy, took) = times(&trace);
    println!("{busy:.1?} of work in {took:.1?}: {:.1} at once", busy.as_secs_f64() / took.as_secs_f64());
    // As a test its argument is a test's name.
    if let Some(file) = env::args().nth(1).filter(|file| file.ends_with(".json")) {
        fs::write(&file, trace.to_json())?;
        println!("the trace is in {file}");
    }
    Ok(())
}

/// GPUs in front, if there are some.
fn open() -> Result<Runtime, Failure> {
    let builder = Runtime::builder();
    #[cfg(feature = "cuda")]
    let builder = match warpweft::cuda::CudaBackend::new() {
        Ok(backend) => builder.backend(backend),
        Err(_) => builder,
    };
    Ok(builder.backend(HostBackend::with_devices(2)?).build()?)
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
    let count = Arg::Scalar(&WORDS.to_le_bytes());
    graph.launch(Launch::new(scale, [1, 1, 1], &[Arg::Buffer(&scaled), count])?)?;
    graph.copy(&scaled, &moved)?;
    graph.launch(Launch::new(sum, [1, 1, 1], &[Arg::Buffer(&moved), Arg::Buffer(&total), count])?)?;
    graph.copy(&total, &result)?;
    Ok(result)
}

/// Both kernels in both forms; a device takes the one it runs.
fn kernels() -> KernelCode {
    let contract = |name: &str, buffers: &[Param]| {
        let params: Vec<Param> = buffers.iter().copied().chain([Param::scalar::<u32>()]).collect();
        KernelContract::new(name, params).with_workgroup_size([256, 1, 1])
    };
    let scale = contract("scale", &[Param::read_write(CHUNK_BYTES)]);
    let sum = contract("sum", &[Param::read(CHUNK_BYTES), Param::write(4)]);
    let code = KernelCode::new()
        .with_function(scale.clone(), HostFunction::new(scale_words))
        .with_function(sum.clone(), HostFunction::new(sum_words));
    let source = ForeignCode::Source { format: CodeFormat::CudaC, text: CUDA_C.to_owned() };
    // SAFETY: the kernels have these parameters, and touch as many words as they are told, which is what `record` passes
    // and the contracts' least sizes hold.
    #[expect(unsafe_code, reason = "vouches for the kernels above")]
    unsafe {
        code.with_foreign([scale, sum], source)
    }
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
