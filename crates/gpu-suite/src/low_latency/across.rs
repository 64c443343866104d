//! Between GPUs, through communicators.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous};
use warpweft_comm::{CommConfig, Communicator, EngineKind};
use warpweft_core_types::{
    Arg, BufferDesc, BufferView, DType, Deadline, FillRegion, GraphNode, Launch, Op, PreparedGraph, Queue,
    ReduceOp, ResidentDesc, Submission,
};

use crate::{
    kernels::{self, BEAT_WORKGROUPS, GAPS_BYTES},
    rig::{Bench, LIMIT, Rig},
};

/// One GPU's rank.
pub(super) struct Place<'a> {
    pub(super) bench: &'a Bench,
    pub(super) comm: Communicator,
    pub(super) queue: Arc<dyn Queue>,
}

/// Makes every GPU a rank of an engine, in a thread of its own.
pub(super) fn each<T: Send>(
    rig: &Rig,
    engine: EngineKind,
    body: impl Fn(&Place<'_>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    rig.pair()?;
    let size = u32::try_from(rig.devices.len())?;
    let (meeting, body) = (Meeting::new(), &body);
    thread::scope(|scope| {
        let spawn = |rank: u32| {
            let meeting = Rendezvous::Meeting(Arc::clone(&meeting));
            let bench = &rig.devices[rank as usize];
            scope.spawn(move || {
                let group = Group::join(meeting, JoinConfig::new(Rank(rank), size), LIMIT)?;
                let config = CommConfig { engine: Some(engine), timeout: LIMIT, ..CommConfig::default() };
                let comm = Communicator::create(group, &bench.device, &config, LIMIT * 3)?;
                let place = Place { bench, queue: bench.new_queue()?, comm };
                let outcome = body(&place);
                // Whoever leaves ends the calls that others have still to make.
                place.comm.barrier(LIMIT)?;
                outcome
            })
        };
        let threads: Vec<_> = (0..size).map(spawn).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Result<T>>| {
            thread.join().map_err(|_| anyhow!("a rank panicked"))?
        };
        threads.into_iter().map(join).collect()
    })
}

/// Calls of which each gives other numbers, in one place after another, with nothing waited for in between: a line that is
/// taken too early, or half, gives a wrong sum.
pub(super) fn litmus(rig: &Rig) -> Result<()> {
    const CALLS: usize = 40;
    const ROUNDS: usize = 50;
    const BYTES: u64 = 1 << 20;
    each(rig, EngineKind::LowLatency, |place| {
        let (rank, size) = (place.comm.rank(), place.comm.world_size());
        let memory = || place.bench.allocate(BufferDesc::device(BYTES * CALLS as u64));
        let (src, dst) = (memory()?, memory()?);
        let part =
            |view: &BufferView, call: usize| view.slice(call as u64 * BYTES..(call as u64 + 1) * BYTES);
        for round in 0..ROUNDS {
            // Of few lines, of many, and bare.
            let bytes = [256, 64 << 10, BYTES][round % 3];
            let given = |rank: u32, call: usize| rank + 1 + u32::try_from(round * CALLS + call).unwrap_or(0);
            for call in 0..CALLS {
                let (src, dst) = (part(&src, call)?.slice(0..bytes)?, part(&dst, call)?.slice(0..bytes)?);
                let ops = [Op::Fill(FillRegion::words(&src, given(rank, call))?)];
                place.queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
                place.comm.all_reduce(ReduceOp::Sum, DType::U32, &src, &dst)?.on(&place.queue)?;
            }
            place.comm.queue_barrier(&place.queue)?.wait(LIMIT)?;
            for call in 0..CALLS {
                let found = place.bench.read(&part(&dst, call)?.slice(0..bytes)?)?;
                let sum: u32 = (0..size).map(|rank| given(rank, call)).sum();
                let is_sum = found.as_chunks::<4>().0.iter().all(|word| *word == sum.to_le_bytes());
                ensure!(is_sum, "call {call} of round {round} is not {sum} everywhere");
            }
        }
        unequal_exchange(place, &src.slice(0..BYTES)?, &dst.slice(0..BYTES)?)
    })?;
    Ok(())
}

/// Every second rank sends much and takes little, so that one launch gives bare and takes lines, or the other way.
fn unequal_exchange(place: &Place<'_>, src: &BufferView, dst: &BufferView) -> Result<()> {
    let (rank, size) = (place.comm.rank(), place.comm.world_size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let bytes = |rank: u32| if rank.is_multiple_of(2) { src.size() } else { 256 };
    let (given, taken) = (src.slice(0..bytes(rank))?, dst.slice(0..bytes(before))?);
    for round in 0..100 {
        let number = |rank: u32| 1 + rank + round * size;
        let ops = [Op::Fill(FillRegion::words(&given, number(rank))?)];
        place.queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
        let both = place.comm.send_recv(DType::U32, (next, &given), (before, &taken))?;
        both.on(&place.queue)?.wait(LIMIT)?;
        let found = place.bench.read(&taken)?;
        let is_right = found.as_chunks::<4>().0.iter().all(|word| *word == number(before).to_le_bytes());
        ensure!(is_right, "what rank {before} sent in round {round} did not arrive");
    }
    Ok(())
}

/// Sums in a queue while another thread loads code, prepares graphs and launches on the same GPU.
pub(super) fn beside_others(rig: &Rig) -> Result<()> {
    const SUMS: u32 = 31;
    each(rig, EngineKind::LowLatency, |place| {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let others = scope.spawn(|| {
                // Relaxed: nothing but the end is told.
                while !is_over.load(Ordering::Relaxed) {
                    load_and_launch(place.bench)?;
                }
                anyhow::Ok(())
            });
            let sums = (0..8).try_for_each(|_| {
                let view = place.bench.uploaded(&1_u32.to_le_bytes().repeat(5000))?;
                for _ in 0..SUMS {
                    place.comm.all_reduce_in_place(ReduceOp::Max, DType::U32, &view)?.on(&place.queue)?;
                }
                let sum = place.comm.all_reduce_in_place(ReduceOp::Sum, DType::U32, &view)?;
                sum.on(&place.queue)?.wait(LIMIT)?;
                let found = place.bench.read(&view)?;
                ensure!(found == place.comm.world_size().to_le_bytes().repeat(5000), "a sum is wrong");
                Ok(())
            });
            is_over.store(true, Ordering::Relaxed);
            let others = others.join().map_err(|_| anyhow!("what goes on beside panicked"))?;
            sums.and(others)
        })
    })?;
    Ok(())
}

/// Eight workgroups that stay, with code that a GPU alone runs.
pub(super) fn beside_residents(rig: &Rig) -> Result<()> {
    each(rig, EngineKind::LowLatency, |place| {
        let bench = place.bench;
        let kernel = bench.device.load(&kernels::code(kernels::contracts()))?.kernel("beat")?;
        let turns = bench.allocate(BufferDesc::device(8 * u64::from(BEAT_WORKGROUPS)))?;
        let shown = bench.allocate(BufferDesc::host_visible(8))?;
        let gaps = bench.allocate(BufferDesc::device(GAPS_BYTES))?;
        let args = [Arg::Buffer(&turns), Arg::Buffer(&shown), Arg::Buffer(&gaps)];
        let family = bench.device.residents().context("residents")?;
        let resident = family.launch(&ResidentDesc::new(Launch::new(&kernel, [8, 1, 1], &args)?))?;
        for count in [1, 5000, 500_000] {
            let view = bench.uploaded(&1_u32.to_le_bytes().repeat(count))?;
            for _ in 0..100 {
                place.comm.all_reduce_in_place(ReduceOp::Max, DType::U32, &view)?.on(&place.queue)?;
            }
            place
                .comm
                .all_reduce_in_place(ReduceOp::Sum, DType::U32, &view)?
                .on(&place.queue)?
                .wait(LIMIT)?;
            let found = bench.read(&view)?;
            ensure!(
                found == place.comm.world_size().to_le_bytes().repeat(count),
                "a sum of {count} is wrong"
            );
        }
        Ok(resident.stop(Deadline::within(LIMIT))?)
    })?;
    Ok(())
}

fn load_and_launch(bench: &Bench) -> Result<()> {
    let module = bench.device.load(&kernels::graph())?;
    let (kernel, word) = (module.kernel("step")?, bench.uploaded(&[0; 4])?);
    let args = [Arg::Buffer(&word), Arg::Scalar(&7_u32.to_le_bytes())];
    let launch = Op::Launch(Launch::new(&kernel, [1, 1, 1], &args)?);
    let graph = PreparedGraph::new(bench.device.as_ref(), &[GraphNode::new(&launch, &[])])?;
    bench.run(&[Op::Replay(&graph)])?;
    ensure!(bench.read_word(&word)? == 7, "the step came to something else");
    Ok(())
}
