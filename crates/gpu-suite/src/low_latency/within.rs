//! What the kernel takes by itself: sums of two ranks on one GPU, in graphs, where no link is between them.
//!
//! It tells where lines end and bare messages begin as far as that is the kernel's doing, and what blocks are worth.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;
use warpweft_comm::{Shape, Way, loopback::Loopback};
use warpweft_core_types::{
    Arg, BufferDesc, BufferView, CollectiveOp, CopyRegion, DType, GraphNode, GraphOp, Launch, Op, OwnedOp,
    PreparedGraph, ReduceOp, Submission,
};

use crate::{
    bench::samples::Samples,
    rig::{Bench, LIMIT, Rig, report, say},
};

const CALLS: usize = 50;
const ROUNDS: usize = 101;
const WARM_UP: usize = 5;
const RANKS: u32 = 2;
const SIZES: [u64; 9] = [16, 8 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20];
const SUM: (CollectiveOp, DType) = (CollectiveOp::AllReduce(ReduceOp::Sum), DType::F32);

/// Few blocks, those of a call that is not small, and the same with bare messages.
const SHAPES: [Shape; 4] = [
    Shape { channels: 4, two_shots: false, bare: false },
    Shape { channels: 16, two_shots: false, bare: false },
    Shape { channels: 64, two_shots: false, bare: false },
    Shape { channels: 64, two_shots: false, bare: true },
];

pub(super) fn run(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let ranks = Loopback::ranks(&bench.device, RANKS, LIMIT, LIMIT)?;
    let queues = ranks.iter().map(|_| bench.new_queue()).collect::<Result<Vec<_>>>()?;
    for bytes in SIZES {
        let memory = || bench.allocate(BufferDesc::device(bytes));
        let operands = ranks.iter().map(|_| Ok([memory()?, memory()?])).collect::<Result<Vec<_>>>()?;
        let sums = |shape| {
            let graph = |(rank, operands): (&Loopback, &[BufferView; 2])| sums(bench, rank, operands, shape);
            ranks.iter().zip(&operands).map(graph).collect::<Result<Vec<_>>>()
        };
        let visits = operands.iter().map(|operands| visits(bench, operands)).collect::<Result<Vec<_>>>()?;
        let mut contenders = vec![
            ("a copy on the GPU".to_owned(), vec![copies(bench, &operands[0])?]),
            ("a kernel each that reads a word and writes one".to_owned(), visits),
        ];
        for shape in SHAPES {
            let way = Way { engine: warpweft_comm::EngineKind::LowLatency, shape: Some(shape) };
            contenders.push((way.to_string(), sums(shape)?));
        }
        let mut samples: Vec<Samples> = contenders.iter().map(|_| Samples::default()).collect();
        for round in 0..ROUNDS + WARM_UP {
            for ((_, graphs), samples) in contenders.iter().zip(&mut samples) {
                let time = replayed(bench, graphs, &queues)?;
                if round >= WARM_UP {
                    samples.add(time);
                }
            }
        }
        for ((name, _), samples) in contenders.iter().zip(&samples) {
            report(
                &json!({"all_reduce within one GPU": name, "bytes": bytes, "ranks": RANKS, "time": samples.json()}),
            );
            say(&format!("all_reduce of {bytes:>9} B within one GPU, {name}: {}", samples.words()));
        }
    }
    Ok(())
}

fn sums(bench: &Bench, rank: &Loopback, operands: &[BufferView; 2], shape: Shape) -> Result<PreparedGraph> {
    let mut nodes = Vec::new();
    rank.with_ops(SUM, (Some(&operands[0]), Some(&operands[1])), Some(shape), &mut |ops| {
        nodes.extend(ops.iter().map(OwnedOp::from));
        Ok(())
    })?;
    chain(bench, &nodes)
}

fn copies(bench: &Bench, operands: &[BufferView; 2]) -> Result<PreparedGraph> {
    chain(bench, &[OwnedOp::from(&Op::Copy(CopyRegion::new(&operands[0], &operands[1])?))])
}

fn visits(bench: &Bench, [src, dst]: &[BufferView; 2]) -> Result<PreparedGraph> {
    let (read, written) = (src.slice(0..4)?, dst.slice(0..4)?);
    let (kernel, args) = (bench.kernel("visit")?, [Arg::Buffer(&written), Arg::Buffer(&read)]);
    chain(bench, &[OwnedOp::from(&Op::Launch(Launch::new(&kernel, [1, 1, 1], &args)?))])
}

/// The same operations again and again, each behind the one before.
fn chain(bench: &Bench, ops: &[OwnedOp]) -> Result<PreparedGraph> {
    let mut nodes: Vec<GraphNode> = Vec::new();
    for op in (0..CALLS).flat_map(|_| ops) {
        let before: Vec<usize> = nodes.len().checked_sub(1).into_iter().collect();
        nodes.push(GraphNode::new(GraphOp::from(op.clone()), &before));
    }
    Ok(PreparedGraph::new(bench.device.as_ref(), &nodes)?)
}

/// A call's time, of all ranks together.
fn replayed(
    bench: &Bench,
    graphs: &[PreparedGraph],
    queues: &[std::sync::Arc<dyn warpweft_core_types::Queue>],
) -> Result<Duration> {
    let done = graphs.iter().map(|_| bench.point()).collect::<Result<Vec<_>>>()?;
    let began = Instant::now();
    for ((graph, queue), done) in graphs.iter().zip(queues).zip(&done) {
        let signals = std::slice::from_ref(done);
        queue.submit(&Submission { waits: &[], ops: &[Op::Replay(graph)], signals })?;
    }
    done.iter().try_for_each(|done| done.wait(LIMIT))?;
    Ok(began.elapsed() / u32::try_from(CALLS)?)
}
