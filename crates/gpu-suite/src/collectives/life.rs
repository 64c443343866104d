//! Graphs, streams, registration, and ends before their time.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::CudaContext;
use warpweft_core_types::{
    Arg, BufferDesc, BufferView, CollectiveError, CollectiveFailure, CollectiveGroup, CollectiveOp,
    CopyRegion, DType, Deadline, Failure, FillRegion, GraphNode, Launch, NativeCommunicatorDesc, Op,
    PreparedGraph, QueueDesc, ReduceOp, RegistrationKind, ResidentDesc, SemaphorePoint, Submission,
    WaitError,
};
use warpweft_cuda::adapter;

use super::{Rank, Ranks, values::compare};
use crate::{
    kernels::{BEAT_WORKGROUPS, GAPS_BYTES},
    rig::LIMIT,
};

const SUM: CollectiveOp = CollectiveOp::AllReduce(ReduceOp::Sum);

fn words(value: u32, count: usize) -> Vec<u8> {
    value.to_le_bytes().repeat(count)
}

/// A sum of as many words, in place.
fn sum(rank: &Rank<'_>, view: &BufferView) -> Result<()> {
    rank.run(&[rank.call(SUM, DType::U32, Some(view), Some(view))?])
}

pub(super) fn graphs(ranks: &Ranks) -> Result<()> {
    const REPLAYS: u32 = 50;
    let size = ranks.size();
    ranks.each(|rank| {
        let start = rank.bench.uploaded(&words(1, 1003))?;
        let (view, out) = (rank.bench.uploaded(&words(0, 1003))?, rank.bench.uploaded(&words(0, 1003))?);
        let calls = [rank.call(SUM, DType::U32, Some(&view), Some(&view))?];
        let twice = Op::Collective(CollectiveGroup::new(&rank.comm, &calls));
        let nodes = [
            GraphNode::new(&Op::Copy(CopyRegion::new(&start, &view)?), &[]),
            GraphNode::new(&twice, &[0]),
            GraphNode::new(&twice, &[1]),
            GraphNode::new(&Op::Copy(CopyRegion::new(&view, &out)?), &[2]),
        ];
        let mut graph = PreparedGraph::new(rank.bench.device.as_ref(), &nodes)?;
        for _ in 0..REPLAYS {
            rank.bench.run(&[Op::Fill(FillRegion::bytes(&out, 0)), Op::Replay(&graph)])?;
            compare("a replay", &rank.bench.read(&out)?, &words(size * size, 1003))?;
            // Others in between.
            sum(rank, &view)?;
        }
        ensure!(graph.set(1, &twice).is_err(), "a collective keeps its operands");
        Ok(())
    })?;
    Ok(())
}

pub(super) fn imported(ranks: &Ranks) -> Result<()> {
    let size = ranks.size();
    ranks.each(|rank| {
        let context = CudaContext::new(rank.rank() as usize)?;
        let stream = context.new_stream()?;
        let queue = adapter::import_stream(rank.bench.device.as_ref(), &stream, &QueueDesc::default())?;
        let slice = Arc::new(stream.clone_htod(&vec![1_u32; 1003])?);
        let view = BufferView::whole(adapter::import_slice(rank.bench.device.as_ref(), &slice)?);
        let calls = [rank.call(SUM, DType::U32, Some(&view), Some(&view))?];
        let ops = [Op::Collective(CollectiveGroup::new(&rank.comm, &calls))];
        queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
        queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
        // Its own copy is behind both, without a word from the host.
        let found = stream.clone_dtoh(slice.as_ref())?;
        ensure!(found == vec![size * size; 1003], "it holds {:?}", found.first());
        Ok(())
    })?;
    Ok(())
}

pub(super) fn queues(ranks: &Ranks) -> Result<()> {
    let size = ranks.size();
    ranks.each(|rank| {
        let view = rank.bench.uploaded(&words(1, 64))?;
        let queues = [rank.bench.new_queue()?, rank.bench.new_queue()?, rank.bench.new_queue()?];
        let semaphore = rank.bench.device.create_semaphore(0)?;
        let calls =
            [rank.call(CollectiveOp::AllReduce(ReduceOp::Max), DType::U32, Some(&view), Some(&view))?];
        let ops = [Op::Collective(CollectiveGroup::new(&rank.comm, &calls))];
        for (value, queue) in (0..300).zip(queues.iter().cycle()) {
            let (wait, signal) =
                (SemaphorePoint::new(&semaphore, value), SemaphorePoint::new(&semaphore, value + 1));
            queue.submit(&Submission { waits: &[wait], ops: &ops, signals: &[signal] })?;
        }
        semaphore.wait(300, Deadline::within(LIMIT))?;
        sum(rank, &view)?;
        compare("after the rest", &rank.bench.read(&view)?, &words(size, 64))
    })?;
    Ok(())
}

pub(super) fn registered(ranks: &Ranks) -> Result<()> {
    let size = ranks.size();
    ranks.each(|rank| {
        for kind in [RegistrationKind::Local, RegistrationKind::Symmetric] {
            let buffer = rank.comm.allocate(4 << 20)?;
            let view = BufferView::whole(Arc::clone(&buffer));
            ensure!(rank.bench.read(&view)?.iter().all(|byte| *byte == 0), "it is not zeroed");
            let registered = rank.comm.register(&buffer, kind)?;
            crate::rig::say(&format!(
                "rank {}: asked for {kind:?}, got {:?}",
                rank.rank(),
                registered.kind()
            ));
            for count in [1_u64, 1003, 1 << 20] {
                let part = view.slice(0..count * 4)?;
                rank.bench.run(&[Op::Fill(FillRegion::words(&part, 1)?)])?;
                sum(rank, &part)?;
                let found = rank.bench.read(&part)?;
                compare("a sum", &found, &words(size, usize::try_from(count)?))?;
            }
            // Dropped while it is in use.
            let calls = [rank.call(SUM, DType::U32, Some(&view), Some(&view))?];
            rank.enqueue(&calls)?;
            drop(registered);
            rank.bench.run(&[])?;
        }
        Ok(())
    })?;
    Ok(())
}

/// A resident runs on each device while ranks are made and do what they have not done before.
pub(super) fn beside_resident(ranks: &Ranks) -> Result<()> {
    let (id, size) = (ranks.family()?.create_id()?, ranks.size());
    ranks.threads(|rank, bench| {
        let kernel = bench.kernel("beat")?;
        let turns = bench.allocate(BufferDesc::device(8 * u64::from(BEAT_WORKGROUPS)))?;
        let shown = bench.allocate(BufferDesc::host_visible(8))?;
        let gaps = bench.allocate(BufferDesc::device(GAPS_BYTES))?;
        let args = [Arg::Buffer(&turns), Arg::Buffer(&shown), Arg::Buffer(&gaps)];
        let family = bench.device.residents().context("residents")?;
        let resident = family.launch(&ResidentDesc::new(Launch::new(&kernel, [8, 1, 1], &args)?))?;
        let desc = NativeCommunicatorDesc { id: id.clone(), rank, size, multiprocessors: Some(8) };
        let family = bench.device.collectives().context("the family")?;
        let rank = Rank { bench, comm: family.join(&desc, Deadline::within(LIMIT))? };
        let view = bench.uploaded(&words(1, 1003))?;
        for (op, dtype) in [(ReduceOp::Sum, DType::U32), (ReduceOp::Prod, DType::F64)] {
            let part = view.slice(0..4008)?;
            let call = rank.call(CollectiveOp::AllReduce(op), dtype, Some(&part), Some(&part))?;
            rank.run(&[call])?;
        }
        resident.stop(Deadline::within(LIMIT))?;
        Ok(())
    })?;
    Ok(())
}

pub(super) fn missing_rank(ranks: &Ranks) -> Result<()> {
    const TIME: Duration = Duration::from_millis(500);
    ranks.need_two()?;
    let family = ranks.family()?;
    let desc = NativeCommunicatorDesc { id: family.create_id()?, rank: 0, size: 2, multiprocessors: None };
    let began = Instant::now();
    let joined = family.join(&desc, Deadline::within(TIME));
    ensure!(matches!(joined, Err(CollectiveError::TimedOut { .. })), "{joined:?}");
    ensure!(began.elapsed() < TIME * 2, "it took {:?}", began.elapsed());
    Ok(())
}

fn reason() -> Arc<Failure> {
    Arc::new(CollectiveFailure::Aborted { rank: 1, reason: "a check".to_owned() }.into())
}

pub(super) fn aborted(ranks: &Ranks) -> Result<()> {
    ranks.need_two()?;
    ranks.each(|rank| {
        let view = rank.bench.uploaded(&words(1, 1003))?;
        // The rig's queue is for other checks too.
        let queue = rank.bench.new_queue()?;
        let calls = [rank.call(SUM, DType::U32, Some(&view), Some(&view))?];
        let ops = [Op::Collective(CollectiveGroup::new(&rank.comm, &calls))];
        ended(rank, queue.as_ref(), &ops)
    })?;
    // The devices go on.
    ranks.each(|rank| sum(rank, &rank.bench.uploaded(&words(1, 7))?))?;
    Ok(())
}

pub(super) fn aborted_graph(ranks: &Ranks) -> Result<()> {
    ranks.need_two()?;
    ranks.each(|rank| {
        let view = rank.bench.uploaded(&words(1, 1003))?;
        let queue = rank.bench.new_queue()?;
        let calls = [rank.call(SUM, DType::U32, Some(&view), Some(&view))?];
        let op = Op::Collective(CollectiveGroup::new(&rank.comm, &calls));
        let graph = PreparedGraph::new(rank.bench.device.as_ref(), &[GraphNode::new(&op, &[])])?;
        ended(rank, queue.as_ref(), &[Op::Replay(&graph)])
    })?;
    Ok(())
}

/// Submits on the first rank alone, and aborts on all.
fn ended(rank: &Rank<'_>, queue: &dyn warpweft_core_types::Queue, ops: &[Op<'_>]) -> Result<()> {
    let done = rank.bench.point()?;
    if rank.rank() == 0 {
        queue.submit(&Submission { waits: &[], ops, signals: std::slice::from_ref(&done) })?;
        let early = done.wait(Duration::from_millis(50));
        ensure!(matches!(early, Err(WaitError::Timeout { .. })), "it ended without the others: {early:?}");
    }
    let began = Instant::now();
    rank.comm.abort(reason(), Deadline::within(Duration::from_secs(5)))?;
    let took = began.elapsed();
    crate::rig::say(&format!("rank {}: the abort took {took:?}", rank.rank()));
    if rank.rank() == 0 {
        let ended = done.wait(Duration::from_secs(2));
        ensure!(matches!(&ended, Err(WaitError::Failed(_))), "{ended:?}");
        ensure!(queue.failure().is_some(), "the queue takes more");
    }
    ensure!(rank.comm.check().is_err(), "an aborted communicator is in order");
    Ok(())
}

pub(super) fn dropped_crosswise(ranks: &Ranks) -> Result<()> {
    let kept: Vec<_> =
        (0..2).map(|_| ranks.each(|rank| Ok(Arc::clone(&rank.comm)))).collect::<Result<_>>()?;
    let began = Instant::now();
    for rank in 0..ranks.size() as usize {
        let pair = kept.iter().map(|all| Arc::clone(&all[rank]));
        let pair: Vec<_> = if rank % 2 == 0 { pair.collect() } else { pair.rev().collect() };
        drop(pair);
    }
    drop(kept);
    ensure!(began.elapsed() < Duration::from_millis(100), "drops waited for {:?}", began.elapsed());
    // Parting is over when others can be made.
    ranks.each(|rank| sum(rank, &rank.bench.uploaded(&words(1, 7))?))?;
    Ok(())
}
