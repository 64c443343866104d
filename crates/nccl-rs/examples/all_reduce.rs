//! Sums a vector over all GPUs of this machine, with one thread for each.

#![expect(clippy::print_stdout, reason = "an example")]

use std::{thread, time::Duration};

use cudarc::driver::CudaContext;
use nccl_rs::{Communicator, CommunicatorDesc, Nccl, ReduceOp, UniqueId, cudarc::moving};

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let nccl = Nccl::load()?;
    let size = u32::try_from(CudaContext::device_count()?)?;
    println!("{nccl:?}, {size} GPUs");
    let id = nccl.unique_id()?;
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                scope.spawn({
                    let nccl = &nccl;
                    move || sum(nccl, id, rank, size)
                })
            })
            .collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank panicked"))
    })
}

fn sum(nccl: &Nccl, id: UniqueId, rank: u32, size: u32) -> Result<(), Failure> {
    let stream = CudaContext::new(rank as usize)?.new_stream()?;
    let input = stream.clone_htod(&vec![(rank + 1) as f32; 1 << 20])?;
    let mut output = stream.alloc_zeros::<f32>(1 << 20)?;
    let comm = Communicator::init(nccl, &CommunicatorDesc::new(id, rank, size).device(rank))?;
    // Afterwards, whoever uses the slices waits for the call.
    moving(&input, &mut output, &stream, |src, dst, stream| {
        comm.all_reduce(src, dst, ReduceOp::Sum, stream)
    })?;
    println!("rank {rank}: the first of the sums is {}", stream.clone_dtoh(&output)?[0]);
    comm.finalize(Duration::from_secs(10))?;
    Ok(())
}
