//! Ranks that are all on the first GPU, each with a queue of its own.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use warpweft_comm::{Shape, loopback::Loopback};
use warpweft_core_types::{
    BufferDesc, BufferView, CollectiveOp, DType, Queue, ReduceOp, SemaphorePoint, Submission, WaitError,
};
use warpweft_host_collectives::reduce;

use crate::rig::{Bench, LIMIT, Rig};

/// Elements of a rank's part: one, some, and more than one block has threads for.
const COUNTS: [usize; 3] = [1, 7, 1031];

/// More than all slots of the blocks hold, in any manner, and not a multiple of anything.
const MANY: usize = 1_000_003;

/// As many blocks as find room beside those of the other ranks on one GPU.
const CHANNELS: u32 = 3;

/// Whether a call is in two shots, and whether its messages are bare.
type Manner = (bool, bool);
const LINES: Manner = (false, false);

/// Ranks on one device.
struct Ranks<'a> {
    bench: &'a Bench,
    ranks: Vec<(Loopback, Arc<dyn Queue>)>,
}

/// The bytes that one rank gives and gets.
type Operands = (Option<BufferView>, Option<BufferView>);

impl<'a> Ranks<'a> {
    fn new(rig: &'a Rig, count: u32, limit: Duration) -> Result<Self> {
        let bench = rig.first();
        let ranks = Loopback::ranks(&bench.device, count, limit, LIMIT)?;
        let ranks = ranks.into_iter().map(|rank| Ok((rank, bench.new_queue()?))).collect::<Result<_>>()?;
        Ok(Self { bench, ranks })
    }

    fn submit(
        &self,
        rank: usize,
        (op, dtype): (CollectiveOp, DType),
        (src, dst): &Operands,
        (two_shots, bare): Manner,
    ) -> Result<SemaphorePoint> {
        let (rank, queue) = &self.ranks[rank];
        let (done, shape) = (self.bench.point()?, Shape { channels: CHANNELS, two_shots, bare });
        rank.with_ops((op, dtype), (src.as_ref(), dst.as_ref()), Some(shape), &mut |ops| {
            queue.submit(&Submission { waits: &[], ops, signals: std::slice::from_ref(&done) })?;
            Ok(())
        })?;
        Ok(done)
    }

    /// A call of all ranks.
    fn call(&self, op: CollectiveOp, dtype: DType, operands: &[Operands], manner: Manner) -> Result<()> {
        let submit = |(rank, operands)| self.submit(rank, (op, dtype), operands, manner);
        let done = operands.iter().enumerate().map(submit).collect::<Result<Vec<_>>>()?;
        done.iter().try_for_each(|done| done.wait(LIMIT))?;
        let told = self.ranks.iter().find_map(|(rank, _)| rank.given_up());
        ensure!(told.is_none(), "{op} of {dtype}: {told:?}");
        Ok(())
    }

    fn zeros(&self, bytes: usize) -> Result<BufferView> {
        self.bench.allocate(BufferDesc::device(bytes as u64))
    }
}

/// Small whole numbers, which every type holds and rounds alike.
fn given(dtype: DType, rank: usize, count: usize) -> Vec<u8> {
    let size = usize::try_from(dtype.size_bytes()).unwrap_or(8);
    let whole = |at: usize| u32::try_from((rank * 7 + at * 3) % 4 + 1).unwrap_or(1);
    (0..count).flat_map(|at| dtype.bits_of(whole(at)).to_le_bytes()[..size].to_vec()).collect()
}

/// Messages of more than a slot holds, so that they take rounds.
pub(super) fn many_bytes(rig: &Rig) -> Result<()> {
    for size in [2, 3, 5] {
        let ranks = Ranks::new(rig, size, LIMIT)?;
        for (op, dtype) in
            [(ReduceOp::Sum, DType::F32), (ReduceOp::Sum, DType::Bf16), (ReduceOp::Max, DType::U8)]
        {
            reduce_all(&ranks, op, dtype, MANY)?;
        }
        move_all(&ranks, DType::U8, MANY, 0)?;
    }
    Ok(())
}

pub(super) fn reductions(rig: &Rig) -> Result<()> {
    for size in [2, 3, 5] {
        let ranks = Ranks::new(rig, size, LIMIT)?;
        for dtype in DType::ALL {
            for op in ReduceOp::ALL.into_iter().filter(|op| op.is_defined_for(dtype)) {
                for count in COUNTS {
                    reduce_all(&ranks, op, dtype, count)?;
                }
            }
        }
    }
    Ok(())
}

fn reduce_all(ranks: &Ranks<'_>, op: ReduceOp, dtype: DType, count: usize) -> Result<()> {
    let size = ranks.ranks.len();
    let inputs: Vec<Vec<u8>> = (0..size).map(|rank| given(dtype, rank, count)).collect();
    let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let mut expected = vec![0; inputs[0].len()];
    reduce::combine(op, dtype, &[], &slices, &mut expected);
    for manner in [LINES, (true, false), (false, true), (true, true)] {
        let operands = inputs.iter().map(|input| {
            // In place, behind an element that is nobody's.
            let element = usize::try_from(dtype.size_bytes())?;
            let whole = ranks.bench.uploaded(&[&vec![0; element], input.as_slice()].concat())?;
            let view = whole.slice(element as u64..whole.size())?;
            Ok((Some(view.clone()), Some(view)))
        });
        let operands = operands.collect::<Result<Vec<Operands>>>()?;
        ranks.call(CollectiveOp::AllReduce(op), dtype, &operands, manner)?;
        for (rank, (_, dst)) in operands.iter().enumerate() {
            let found = ranks.bench.read(dst.as_ref().context("a destination")?)?;
            ensure!(
                found == expected,
                "{op} of {count} {dtype}, rank {rank} of {size}, two shots and bare: {manner:?}"
            );
        }
    }
    Ok(())
}

pub(super) fn movements(rig: &Rig) -> Result<()> {
    let ranks = Ranks::new(rig, 3, LIMIT)?;
    for (dtype, offset) in [(DType::U8, 0), (DType::U8, 3), (DType::I16, 2), (DType::F32, 4), (DType::F64, 8)]
    {
        for count in COUNTS {
            move_all(&ranks, dtype, count, offset)?;
        }
    }
    Ok(())
}

fn move_all(ranks: &Ranks<'_>, dtype: DType, count: usize, offset: u64) -> Result<()> {
    let size = ranks.ranks.len();
    let parts = |rank: usize| given(dtype, rank, count * size);
    let part = parts(0).len() / size;
    let own = |rank: usize| parts(rank)[..part].to_vec();
    let of = |rank: usize, index: usize| parts(rank)[index * part..(index + 1) * part].to_vec();
    let all: Vec<u8> = (0..size).flat_map(own).collect();
    let root = u32::try_from(size - 1)?;
    let last = size - 1;
    let only = |rank: usize, bytes: Vec<u8>| (rank == last).then_some(bytes);
    // What each rank gives, and what it gets.
    type Case<'a> = (CollectiveOp, Box<dyn Fn(usize) -> (Option<Vec<u8>>, Option<Vec<u8>>) + 'a>);
    let cases: [Case<'_>; 5] = [
        (CollectiveOp::AllGather, Box::new(|rank| (Some(own(rank)), Some(all.clone())))),
        (CollectiveOp::Broadcast { root }, Box::new(|rank| (only(rank, own(last)), Some(own(last))))),
        (CollectiveOp::Gather { root }, Box::new(|rank| (Some(own(rank)), only(rank, all.clone())))),
        (CollectiveOp::Scatter { root }, Box::new(|rank| (only(rank, parts(last)), Some(of(last, rank))))),
        (
            CollectiveOp::AllToAll,
            Box::new(|rank| (Some(parts(rank)), Some((0..size).flat_map(|from| of(from, rank)).collect()))),
        ),
    ];
    for (op, case) in &cases {
        for manner in [LINES, (false, true)] {
            let views = (0..size).map(|rank| {
                let (src, dst) = case(rank);
                let behind = |view: BufferView| view.slice(offset..view.size());
                let padded = |bytes: Vec<u8>| {
                    let bytes = [vec![0; usize::try_from(offset)?], bytes].concat();
                    Ok::<_, anyhow::Error>(behind(ranks.bench.uploaded(&bytes)?)?)
                };
                let zeros = |bytes: &Vec<u8>| {
                    Ok::<_, anyhow::Error>(behind(ranks.zeros(bytes.len() + usize::try_from(offset)?)?)?)
                };
                Ok((src.map(padded).transpose()?, dst.as_ref().map(zeros).transpose()?))
            });
            let views = views.collect::<Result<Vec<Operands>>>()?;
            ranks.call(*op, dtype, &views, manner)?;
            for (rank, (_, dst)) in views.iter().enumerate() {
                let found = dst.as_ref().map(|dst| ranks.bench.read(dst)).transpose()?;
                ensure!(
                    found == case(rank).1,
                    "{op} of {count} {dtype} at {offset}, rank {rank}, {manner:?}"
                );
            }
        }
    }
    Ok(())
}

const SUM: (CollectiveOp, DType) = (CollectiveOp::AllReduce(ReduceOp::Sum), DType::U32);

/// Ranks but the last call.
fn without_the_last(ranks: &Ranks<'_>) -> Result<Vec<SemaphorePoint>> {
    let call = |rank| {
        let view = ranks.bench.uploaded(&[1; 64])?;
        ranks.submit(rank, SUM, &(Some(view.clone()), Some(view)), LINES)
    };
    (0..ranks.ranks.len() - 1).map(call).collect()
}

pub(super) fn missing_rank(rig: &Rig) -> Result<()> {
    const TIME: Duration = Duration::from_millis(200);
    let ranks = Ranks::new(rig, 3, TIME)?;
    let began = Instant::now();
    let done = without_the_last(&ranks)?;
    done.iter().try_for_each(|done| done.wait(LIMIT))?;
    let waited = began.elapsed();
    ensure!((TIME..TIME * 5).contains(&waited), "it waited for {waited:?}");
    let told = |rank: usize| ranks.ranks[rank].0.given_up().map(|told| told.to_string()).unwrap_or_default();
    let first: Vec<usize> = (0..2).filter(|rank| told(*rank).contains("waited for rank 2")).collect();
    ensure!(!first.is_empty(), "{:?}", [told(0), told(1)]);
    // Who comes later is told at once.
    let view = ranks.bench.uploaded(&[1; 64])?;
    ranks.submit(2, SUM, &(Some(view.clone()), Some(view)), LINES)?.wait(TIME)?;
    let names_one = first.iter().any(|rank| told(2).contains(&format!("rank {rank}:")));
    ensure!(names_one, "the last rank was told {:?}, and who gave up first was {first:?}", told(2));
    Ok(())
}

pub(super) fn ended(rig: &Rig) -> Result<()> {
    const TIME: Duration = Duration::from_millis(50);
    let ranks = Ranks::new(rig, 3, LIMIT * 2)?;
    let done = without_the_last(&ranks)?;
    let early = done[0].wait(TIME);
    ensure!(matches!(early, Err(WaitError::Timeout { .. })), "{early:?}");
    // Its own launch, and the other's by way of it.
    ranks.ranks[0].0.end();
    let began = Instant::now();
    done.iter().try_for_each(|done| done.wait(LIMIT))?;
    ensure!(began.elapsed() < TIME * 10, "it took {:?}", began.elapsed());
    ensure!(ranks.ranks[1].0.given_up().is_some(), "the other rank was told nothing");
    Ok(())
}

/// Whoever goes leaves nothing behind that waits.
pub(super) fn dropped(rig: &Rig) -> Result<()> {
    const TIME: Duration = Duration::from_millis(50);
    let mut ranks = Ranks::new(rig, 3, LIMIT * 2)?;
    let done = without_the_last(&ranks)?;
    let early = done[0].wait(TIME);
    ensure!(matches!(early, Err(WaitError::Timeout { .. })), "{early:?}");
    ranks.ranks.clear();
    done.iter().try_for_each(|done| Ok(done.wait(LIMIT)?))
}
