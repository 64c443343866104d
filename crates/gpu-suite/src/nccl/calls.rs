//! What calls compute, compared with sums on the host.

use std::sync::Arc;

use anyhow::{Result, ensure};
use cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use nccl_rs::{
    CommunicatorConfig, Element, Memory, ReduceOp, SignalWait, Version, WindowKind,
    cudarc::{reading, writing},
};

use super::{Rank, Ranks};
use crate::rig::{LIMIT, NotRun};

/// Lengths that are odd, small and larger than a channel's buffer.
const COUNTS: [usize; 5] = [1, 7, 64, 1000, (1 << 20) + 3];

trait Number: Element + DeviceRepr + ValidAsZeroBits + PartialEq + std::fmt::Debug {
    fn of(small: u8) -> Self;
    fn reduce(op: ReduceOp, one: Self, other: Self) -> Self;
}

macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            fn of(small: u8) -> Self {
                Self::try_from(small).unwrap_or_default()
            }

            fn reduce(op: ReduceOp, one: Self, other: Self) -> Self {
                match op {
                    ReduceOp::Prod => one * other,
                    ReduceOp::Max => if one > other { one } else { other },
                    ReduceOp::Min => if one < other { one } else { other },
                    _ => one + other,
                }
            }
        }
    )*};
}

numbers!(i8, u8, i32, u32, i64, u64, f32, f64);

/// Small whole numbers: exact in every type, whatever the order.
fn input<T: Number>(rank: u32, count: usize) -> Vec<T> {
    (0..count).map(|at| T::of(u8::try_from((at * 7 + rank as usize * 3) % 5 + 1).unwrap_or(1))).collect()
}

fn reduced<T: Number>(op: ReduceOp, size: u32, count: usize) -> Vec<T> {
    let ranks: Vec<Vec<T>> = (0..size).map(|rank| input(rank, count)).collect();
    (0..count)
        .map(|at| ranks.iter().skip(1).fold(ranks[0][at], |sum, rank| T::reduce(op, sum, rank[at])))
        .collect()
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: &[T], expected: &[T]) -> Result<()> {
    let wrong = found.iter().zip(expected).position(|(one, other)| one != other);
    ensure!(found.len() == expected.len(), "{what}: {} elements, not {}", found.len(), expected.len());
    match wrong {
        None => Ok(()),
        Some(at) => anyhow::bail!("{what}: element {at} is {:?}, not {:?}", found[at], expected[at]),
    }
}

pub(crate) fn reductions(ranks: &Ranks) -> Result<()> {
    for config in Ranks::ways() {
        ranks.each(&config, |rank| {
            reductions_of::<i8>(&rank)?;
            reductions_of::<u8>(&rank)?;
            reductions_of::<i32>(&rank)?;
            reductions_of::<u32>(&rank)?;
            reductions_of::<i64>(&rank)?;
            reductions_of::<u64>(&rank)?;
            reductions_of::<f32>(&rank)?;
            reductions_of::<f64>(&rank)?;
            Ok(rank.comm.finalize(LIMIT)?)
        })?;
    }
    Ok(())
}

fn reductions_of<T: Number>(rank: &Rank) -> Result<()> {
    let (comm, stream, size) = (&rank.comm, rank.stream(), rank.comm.size());
    for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min] {
        for count in COUNTS {
            let (own, expected) = (input::<T>(comm.rank(), count), reduced::<T>(op, size, count));
            let what = |call: &str| format!("{call} {op:?} of {count} {}", T::TYPE);
            let found = rank.run(&own, count, |src, dst| comm.all_reduce(src, dst, op, &stream))?;
            same(&what("all_reduce"), &found, &expected)?;
            let found = rank.run_in_place(&own, |buffer| comm.all_reduce_in_place(buffer, op, &stream))?;
            same(&what("all_reduce_in_place"), &found, &expected)?;
            let root = size - 1;
            let found = rank.run(&own, count, |src, dst| comm.reduce(src, Some(dst), op, root, &stream))?;
            if comm.rank() == root {
                same(&what("reduce"), &found, &expected)?;
            }
            let all = input::<T>(comm.rank(), count * size as usize);
            let sums = reduced::<T>(op, size, count * size as usize);
            let first = comm.rank() as usize * count;
            let found = rank.run(&all, count, |src, dst| comm.reduce_scatter(src, dst, op, &stream))?;
            same(&what("reduce_scatter"), &found, &sums[first..first + count])?;
            let found =
                rank.run_in_place(&all, |buffer| comm.reduce_scatter_in_place(buffer, op, &stream))?;
            same(
                &what("reduce_scatter_in_place"),
                &found[first..first + count],
                &sums[first..first + count],
            )?;
        }
    }
    Ok(())
}

pub(crate) fn movements(ranks: &Ranks) -> Result<()> {
    for config in Ranks::ways() {
        ranks.each(&config, |rank| COUNTS.iter().try_for_each(|count| movements_of(&rank, *count)))?;
    }
    Ok(())
}

fn movements_of(rank: &Rank, count: usize) -> Result<()> {
    let (comm, stream, size) = (&rank.comm, rank.stream(), rank.comm.size());
    let (own, root) = (input::<u32>(comm.rank(), count), size - 1);
    let of_all: Vec<u32> = (0..size).flat_map(|rank| input::<u32>(rank, count)).collect();
    let what = |call: &str| format!("{call} of {count}");
    let found = rank.run(&own, of_all.len(), |src, dst| comm.all_gather(src, dst, &stream))?;
    same(&what("all_gather"), &found, &of_all)?;
    let mut parts = vec![0; of_all.len()];
    let first = comm.rank() as usize * count;
    parts[first..first + count].copy_from_slice(&own);
    let found = rank.run_in_place(&parts, |buffer| comm.all_gather_in_place(buffer, &stream))?;
    same(&what("all_gather_in_place"), &found, &of_all)?;
    let found = rank.run(&own, count, |src, dst| comm.broadcast(Some(src), dst, root, &stream))?;
    same(&what("broadcast"), &found, &input::<u32>(root, count))?;
    let found = rank.run_in_place(&own, |buffer| comm.broadcast_in_place(buffer, 0, &stream))?;
    same(&what("broadcast_in_place"), &found, &input::<u32>(0, count))?;
    let found = rank.run(&own, of_all.len(), |src, dst| comm.gather(src, Some(dst), root, &stream))?;
    if comm.rank() == root {
        same(&what("gather"), &found, &of_all)?;
    }
    let found = rank.run(&of_all, count, |src, dst| comm.scatter(Some(src), dst, root, &stream))?;
    same(&what("scatter"), &found, &own)?;
    let all = input::<u32>(comm.rank(), count * size as usize);
    let found = rank.run(&all, all.len(), |src, dst| comm.all_to_all(src, dst, &stream))?;
    let expected: Vec<u32> = (0..size)
        .flat_map(|peer| input::<u32>(peer, count * size as usize)[first..first + count].to_vec())
        .collect();
    same(&what("all_to_all"), &found, &expected)
}

pub(crate) fn exchanges(ranks: &Ranks) -> Result<()> {
    for config in Ranks::ways() {
        ranks.each(&config, |rank| {
            let (comm, stream, size) = (&rank.comm, rank.stream(), rank.comm.size());
            let (next, previous) = ((comm.rank() + 1) % size, (comm.rank() + size - 1) % size);
            for count in COUNTS {
                let own = input::<i64>(comm.rank(), count);
                let found =
                    rank.run(&own, count, |src, dst| comm.send_recv(src, next, dst, previous, &stream))?;
                same("send_recv", &found, &input::<i64>(previous, count))?;
                // The same twice over in one group, and a reduction with it.
                let sum = rank.run_in_place(&own, |buffer| {
                    comm.nccl().group(|| comm.all_reduce_in_place(buffer, ReduceOp::Sum, &stream))
                })?;
                same("a sum in a group", &sum, &reduced(ReduceOp::Sum, size, count))?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

pub(crate) fn factors(ranks: &Ranks) -> Result<()> {
    ranks.each(&CommunicatorConfig::new(), |rank| {
        let (comm, stream, size) = (&rank.comm, rank.stream(), rank.comm.size());
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let factor = comm.premul_sum((comm.rank() + 2) as f32)?;
        let found = rank.run(&[1.0_f32, 2.0], 2, |src, dst| comm.all_reduce(src, dst, &factor, &stream))?;
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let sum = (0..size).map(|rank| rank + 2).sum::<u32>() as f32;
        same("a sum with factors", &found, &[sum, 2.0 * sum])
    })?;
    Ok(())
}

pub(crate) fn registered(ranks: &Ranks) -> Result<()> {
    need(ranks, Version::new(2, 19, 0))?;
    with_memory(ranks, &Ranks::ways(), |rank, memory| {
        let registered = rank.comm.register(memory)?;
        sum_within(rank, memory)?;
        drop(registered);
        Ok(())
    })
}

pub(crate) fn plain_window(ranks: &Ranks) -> Result<()> {
    window(ranks, WindowKind::Plain)
}

pub(crate) fn symmetric_window(ranks: &Ranks) -> Result<()> {
    window(ranks, WindowKind::Symmetric)
}

fn window(ranks: &Ranks, kind: WindowKind) -> Result<()> {
    need(ranks, Version::new(2, 27, 0))?;
    with_memory(ranks, &[CommunicatorConfig::new().blocking(true)], |rank, memory| {
        let window = rank.comm.window(memory, kind)?;
        sum_within(rank, memory)?;
        drop(window);
        Ok(())
    })
}

/// Elements of a rank's memory.
const COUNT: usize = 1 << 16;

fn with_memory(
    ranks: &Ranks,
    ways: &[CommunicatorConfig],
    body: impl Fn(&Rank, &Arc<Memory>) -> Result<()> + Sync,
) -> Result<()> {
    for config in ways {
        ranks.each(config, |rank| {
            let memory = Arc::new(Memory::alloc(rank.comm.nccl(), Some(rank.comm.device()), COUNT * 4)?);
            body(&rank, &memory)?;
            Ok(rank.comm.finalize(LIMIT)?)
        })?;
    }
    Ok(())
}

#[expect(unsafe_code, reason = "makes a view of memory")]
fn sum_within(rank: &Rank, memory: &Memory) -> Result<()> {
    let comm = &rank.comm;
    let own = input::<u32>(comm.rank(), COUNT);
    // SAFETY: the stream is waited for below, while the memory lives; work is in the stream's order.
    let mut there = unsafe { memory.dst::<u32>(0..COUNT) }?;
    let src = rank.stream.clone_htod(&own)?;
    reading(&src, &rank.stream, |src, stream| comm.all_reduce(src, &mut there, ReduceOp::Sum, stream))?;
    // SAFETY: the same.
    let from = unsafe { memory.src::<u32>(0..COUNT) }?;
    let mut landing = rank.stream.alloc_zeros::<u32>(COUNT)?;
    writing(&mut landing, &rank.stream, |to, stream| {
        comm.send_recv(&from, comm.rank(), to, comm.rank(), stream)
    })?;
    let found = rank.stream.clone_dtoh(&landing)?;
    ensure!(rank.is_idle_within(LIMIT)?, "the stream did not end");
    same("a sum in memory of the library's", &found, &reduced(ReduceOp::Sum, comm.size(), COUNT))
}

#[expect(unsafe_code, reason = "makes a view of memory")]
pub(crate) fn signals(ranks: &Ranks) -> Result<()> {
    need(ranks, Version::new(2, 29, 0))?;
    ranks.need_two()?;
    ranks.each(&CommunicatorConfig::new().blocking(true), |rank| {
        let (comm, stream, size) = (&rank.comm, rank.stream(), rank.comm.size());
        let (next, previous) = ((comm.rank() + 1) % size, (comm.rank() + size - 1) % size);
        let memory = Arc::new(Memory::alloc(comm.nccl(), Some(comm.device()), COUNT * 8)?);
        let Some(window) = comm.window(&memory, WindowKind::Symmetric)? else {
            return Err(NotRun("the library makes no window here".to_owned()).into());
        };
        let own = rank.stream.clone_htod(&input::<u32>(comm.rank(), COUNT))?;
        reading(&own, &rank.stream, |own, stream| {
            // SAFETY: the windows are alike, and stay until all ranks have finalized; nobody else uses that half.
            unsafe { comm.put_signal(own, next, &window, COUNT * 4, stream) }
        })?;
        comm.wait_signals(&[SignalWait { peer: previous, count: 1 }], &stream)?;
        // SAFETY: the stream is waited for below, while the memory lives; the peer wrote before it signalled.
        let from = unsafe { memory.src::<u32>(COUNT..2 * COUNT) }?;
        let mut landing = rank.stream.alloc_zeros::<u32>(COUNT)?;
        writing(&mut landing, &rank.stream, |to, stream| {
            comm.send_recv(&from, comm.rank(), to, comm.rank(), stream)
        })?;
        ensure!(rank.is_idle_within(LIMIT)?, "the stream did not end");
        same("what a peer put", &rank.stream.clone_dtoh(&landing)?, &input::<u32>(previous, COUNT))?;
        // What this rank put is there as well once all ranks are here.
        rank.run_in_place(&[1_u32], |there| comm.all_reduce_in_place(there, ReduceOp::Sum, &stream))?;
        Ok(())
    })?;
    Ok(())
}

fn need(ranks: &Ranks, version: Version) -> Result<()> {
    if ranks.nccl.version() < version {
        return Err(NotRun(format!("it needs NCCL {version}")).into());
    }
    Ok(())
}
