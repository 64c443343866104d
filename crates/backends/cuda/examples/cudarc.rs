//! A tensor of cudarc's, worked on by cudarc and by warpweft on cudarc's own stream: a thousand rounds, no wait in
//! between, and the result shows that every step came in its turn.
//!
//! `cargo run -p warpweft-cuda --features cudarc --example cudarc` needs a GPU and NVRTC.

#![expect(clippy::print_stdout, reason = "the program's result")]

use std::{sync::Arc, time::Duration};

use cudarc::{
    driver::{CudaContext, LaunchConfig, PushKernelArg as _},
    nvrtc::Ptx,
};
use warpweft_core_types::{
    Arg, Backend as _, BufferView, CodeFormat, Features, ForeignCode, KernelCode, KernelContract, Launch, Op,
    Param, QueueDesc, SemaphorePoint, Submission,
};
use warpweft_cuda::{Compiler, CudaBackend, adapter};

const ROUNDS: u32 = 1000;
const WORDS: u32 = 1 << 16;

const SOURCE: &str = r#"
// word = 3 * word + digit: whoever comes in another order gets another result.
extern "C" __global__ void step(unsigned int* words, unsigned int digit) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < 65536) words[i] = 3 * words[i] + digit;
}
"#;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // cudarc's side: a context, a stream of its own, a tensor, a kernel.
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let words = Arc::new(stream.alloc_zeros::<u32>(WORDS as usize)?);
    let ptx = Compiler::find().compile_to_ptx(SOURCE, (8, 0))?;
    let theirs = context.load_module(Ptx::from_src(ptx.as_str()))?.load_function("step")?;

    // Ours: the same device, the same stream, the same memory.
    let device = CudaBackend::new()?.open(0, Features::INTEROP)?;
    let queue = adapter::import_stream(device.as_ref(), &stream, &QueueDesc { capacity: 2048 })?;
    let tensor = BufferView::whole(adapter::import_slice(device.as_ref(), &words)?);
    let bytes = u64::from(WORDS) * 4;
    let contract = KernelContract::new("step", [Param::read_write(bytes), Param::scalar::<u32>()])
        .with_workgroup_size([256, 1, 1]);
    let code = ForeignCode::Source { format: CodeFormat::Ptx, text: ptx };
    // SAFETY: the kernel has these parameters and touches no more words than the contract's least size holds.
    #[expect(unsafe_code, reason = "vouches for the kernel above")]
    let code = unsafe { KernelCode::new().with_foreign([contract], code) };
    let ours = device.load(&code)?.kernel("step")?;

    let mut expected = 0_u32;
    for round in 0..ROUNDS {
        let config = LaunchConfig::for_num_elems(WORDS);
        let mut launch = stream.launch_builder(&theirs);
        launch.arg(words.as_ref()).arg(&1_u32);
        // SAFETY: the kernel touches as many words as the tensor has.
        #[expect(unsafe_code, reason = "launches by cudarc are unsafe")]
        unsafe { launch.launch(config) }?;

        let digit = (round + 2).to_le_bytes();
        let args = [Arg::Buffer(&tensor), Arg::Scalar(&digit)];
        let ops = [Op::Launch(Launch::new(&ours, [WORDS / 256, 1, 1], &args)?)];
        queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
        expected = expected.wrapping_mul(3).wrapping_add(1).wrapping_mul(3).wrapping_add(round + 2);
    }
    let done = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
    queue.submit(&Submission { signals: std::slice::from_ref(&done), ..Submission::default() })?;
    done.wait(Duration::from_secs(10))?;

    let found = stream.clone_dtoh(words.as_ref())?;
    assert!(found.iter().all(|&word| word == expected), "{} and not {expected}", found[0]);
    println!("{ROUNDS} rounds by turns on one stream: all {WORDS} words are {expected}, as they have to be");
    Ok(())
}
