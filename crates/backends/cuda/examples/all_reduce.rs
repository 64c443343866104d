//! Two GPUs that sum tensors of cudarc's, each in a stream of cudarc's: by turns with copies of cudarc's, with no wait in
//! between.
//!
//! `cargo run -p warpweft-cuda --features cudarc --example all_reduce` needs two GPUs and NCCL; one GPU by itself is one
//! rank, whose sums are its own numbers.

#![expect(clippy::print_stdout, reason = "the program's result")]

use std::{sync::Arc, thread, time::Duration};

use cudarc::driver::CudaContext;
use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous};
use warpweft_comm::{CommConfig, Communicator};
use warpweft_core_types::{Backend as _, BufferView, DType, Features, QueueDesc, ReduceOp};
use warpweft_cuda::{CudaBackend, adapter};

type Failure = Box<dyn std::error::Error + Send + Sync>;

const COUNT: usize = 1 << 16;
const ROUNDS: usize = 100;
const WITHIN: Duration = Duration::from_secs(60);

fn main() -> Result<(), Failure> {
    let backend = CudaBackend::new()?;
    let size = u32::try_from(backend.devices()?.len().min(2))?;
    let meeting = Meeting::new();
    thread::scope(|scope| {
        let start = |rank: u32| {
            let (backend, meeting) = (&backend, Rendezvous::Meeting(Arc::clone(&meeting)));
            scope
                .spawn(move || sum(Group::join(meeting, JoinConfig::new(Rank(rank), size), WITHIN)?, backend))
        };
        let ranks: Vec<_> = (0..size).map(start).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    })
}

fn sum(group: Group, backend: &CudaBackend) -> Result<(), Failure> {
    let (rank, size) = (group.rank().0, group.size());
    // cudarc's side: a context, a stream of its own, a tensor, and room for what it is after each round.
    let stream = CudaContext::new(rank as usize)?.new_stream()?;
    let tensor = Arc::new(stream.clone_htod(&vec![rank + 1; COUNT])?);
    let mut kept = stream.alloc_zeros::<u32>(COUNT * ROUNDS)?;

    // Ours: the same device, stream and memory, as a rank.
    let device = backend.open(rank, Features::INTEROP)?;
    let queue = adapter::import_stream(device.as_ref(), &stream, &QueueDesc::default())?;
    let words = BufferView::whole(adapter::import_slice(device.as_ref(), &tensor)?);
    let comm = Communicator::create(group, &device, &CommConfig::default(), WITHIN)?;

    for round in 0..ROUNDS {
        comm.all_reduce(ReduceOp::Sum, DType::U32, &words, &words)?.on(&queue)?;
        // The stream has it behind this sum and before the next.
        let mut room = kept.slice_mut(round * COUNT..(round + 1) * COUNT);
        stream.memcpy_dtod(tensor.as_ref(), &mut room)?;
    }

    let found = stream.clone_dtoh(&kept)?;
    // The first sum is of different numbers, and the others are of equal ones.
    let mut expected: u32 = (1..=size).sum();
    for (round, words) in found.chunks(COUNT).enumerate() {
        assert!(words.iter().all(|word| *word == expected), "round {round}: {} and not {expected}", words[0]);
        expected = expected.wrapping_mul(size);
    }
    println!(
        "rank {rank} of {size}: {ROUNDS} sums of {COUNT} numbers by turns with copies of cudarc's, all right"
    );
    comm.barrier(WITHIN)?;
    Ok(())
}
