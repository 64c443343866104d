//! What calls compute and move, byte by byte.

use anyhow::{Result, ensure};
use warpweft_core_types::{BufferDesc, BufferView, CollectiveOp, DType, ReduceOp};

use super::{
    Rank, Ranks,
    number::{element, input, reduced},
};

/// Elements of each rank: few, odd, and more than a block does.
const COUNTS: [usize; 3] = [1, 7, 4099];

const REDUCTIONS: [ReduceOp; 6] =
    [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg, ReduceOp::PremulSum(2.0)];

pub(super) fn reductions(ranks: &Ranks) -> Result<()> {
    let family = ranks.family()?;
    ensure!(!family.does(CollectiveOp::AllReduce(ReduceOp::Xor), DType::I32), "it has no xor");
    let wanted: Vec<_> = DType::ALL
        .into_iter()
        .flat_map(|dtype| REDUCTIONS.map(|op| (op, dtype)))
        .filter(|(op, dtype)| family.does(CollectiveOp::AllReduce(*op), *dtype))
        .collect();
    ensure!(wanted.len() >= 60, "it does {} pairs of operation and type", wanted.len());
    ranks.each(|rank| {
        for (op, dtype) in &wanted {
            for count in COUNTS {
                reduce(rank, *op, *dtype, count)?;
            }
        }
        Ok(())
    })?;
    Ok(())
}

/// One reduction in all its forms.
fn reduce(rank: &Rank<'_>, op: ReduceOp, dtype: DType, count: usize) -> Result<()> {
    let (size, own) = (rank.size(), rank.rank());
    // Thirds of sums are rounded, and which way is the library's choice.
    if op == ReduceOp::Avg && dtype.is_float() && !size.is_power_of_two() {
        return Ok(());
    }
    let all = count * size as usize;
    let what = |form: &str| format!("{form} {op} of {count} {dtype}");
    let given: Vec<u8> = (0..all).flat_map(|at| element(dtype, input(op, own, at))).collect();
    let whole: Vec<u8> = (0..all).flat_map(|at| element(dtype, reduced(op, size, at))).collect();
    let bytes = given.len() / size as usize;
    let part = own as usize * bytes..(own as usize + 1) * bytes;

    let call = CollectiveOp::AllReduce(op);
    compare(&what("all-reduce"), &moved(rank, call, dtype, &given, whole.len())?, &whole)?;
    let view = rank.bench.uploaded(&given)?;
    rank.run(&[rank.call(call, dtype, Some(&view), Some(&view))?])?;
    compare(&what("all-reduce in place"), &rank.bench.read(&view)?, &whole)?;

    let call = CollectiveOp::ReduceScatter(op);
    compare(&what("reduce-scatter"), &moved(rank, call, dtype, &given, bytes)?, &whole[part.clone()])?;
    let view = rank.bench.uploaded(&given)?;
    let place = view.slice(part.start as u64..part.end as u64)?;
    rank.run(&[rank.call(call, dtype, Some(&view), Some(&place))?])?;
    compare(&what("reduce-scatter in place"), &rank.bench.read(&place)?, &whole[part])?;

    let root = size - 1;
    let call = CollectiveOp::Reduce { op, root };
    if own == root {
        compare(&what("reduce"), &moved(rank, call, dtype, &given, whole.len())?, &whole)?;
    } else {
        let view = rank.bench.uploaded(&given)?;
        rank.run(&[rank.call(call, dtype, Some(&view), None)?])?;
    }
    Ok(())
}

pub(super) fn movements(ranks: &Ranks) -> Result<()> {
    ranks.each(|rank| {
        for dtype in DType::ALL {
            for count in COUNTS {
                movement(rank, dtype, count)?;
            }
        }
        Ok(())
    })?;
    Ok(())
}

/// Bytes that tell who sent them and where they were.
fn bytes_of(rank: u32, count: usize) -> Vec<u8> {
    (0..count).map(|at| u8::try_from((at * 7 + rank as usize * 31) % 251).unwrap_or(0)).collect()
}

fn movement(rank: &Rank<'_>, dtype: DType, count: usize) -> Result<()> {
    let (size, own, root) = (rank.size(), rank.rank(), rank.size() - 1);
    let bytes = count * usize::try_from(dtype.size_bytes())?;
    let what = |form: &str| format!("{form} of {count} {dtype}");
    let of_rank = |rank: u32| rank as usize * bytes..(rank as usize + 1) * bytes;
    let gathered: Vec<u8> = (0..size).flat_map(|rank| bytes_of(rank, bytes)).collect();
    let given = bytes_of(own, bytes);

    let call = CollectiveOp::AllGather;
    compare(&what("all-gather"), &moved(rank, call, dtype, &given, gathered.len())?, &gathered)?;
    let (view, part) = part_of_zeros(rank, &given, own, gathered.len())?;
    rank.run(&[rank.call(call, dtype, Some(&part), Some(&view))?])?;
    compare(&what("all-gather in place"), &rank.bench.read(&view)?, &gathered)?;

    let call = CollectiveOp::Broadcast { root };
    let (src, dst) = (rank.bench.uploaded(&given)?, zeros(rank, bytes)?);
    rank.run(&[rank.call(call, dtype, (own == root).then_some(&src), Some(&dst))?])?;
    compare(&what("broadcast"), &rank.bench.read(&dst)?, &bytes_of(root, bytes))?;

    let call = CollectiveOp::Gather { root };
    let dst = zeros(rank, gathered.len())?;
    rank.run(&[rank.call(call, dtype, Some(&src), (own == root).then_some(&dst))?])?;
    if own == root {
        compare(&what("gather"), &rank.bench.read(&dst)?, &gathered)?;
    }

    let all = bytes_of(own + 5, bytes * size as usize);
    let src = rank.bench.uploaded(&all)?;
    let (call, dst) = (CollectiveOp::Scatter { root }, zeros(rank, bytes)?);
    rank.run(&[rank.call(call, dtype, (own == root).then_some(&src), Some(&dst))?])?;
    let expected = bytes_of(root + 5, bytes * size as usize)[of_rank(own)].to_vec();
    compare(&what("scatter"), &rank.bench.read(&dst)?, &expected)?;

    let expected: Vec<u8> =
        (0..size).flat_map(|rank| bytes_of(rank + 5, bytes * size as usize)[of_rank(own)].to_vec()).collect();
    compare(&what("all-to-all"), &moved(rank, CollectiveOp::AllToAll, dtype, &all, all.len())?, &expected)
}

pub(super) fn exchanges(ranks: &Ranks) -> Result<()> {
    ranks.need_two()?;
    ranks.each(|rank| {
        let (size, own) = (rank.size(), rank.rank());
        let (next, previous) = ((own + 1) % size, (own + size - 1) % size);
        for count in [1, 5, 1003, (1 << 20) + 3] {
            let src = rank.bench.uploaded(&bytes_of(own, count))?;
            let dst = zeros(rank, count)?;
            let send = rank.call(CollectiveOp::Send { to: next }, DType::U8, Some(&src), None)?;
            let take = rank.call(CollectiveOp::Recv { from: previous }, DType::U8, None, Some(&dst))?;
            rank.run(&[send, take])?;
            compare(&format!("{count} bytes"), &rank.bench.read(&dst)?, &bytes_of(previous, count))?;
        }
        Ok(())
    })?;
    Ok(())
}

/// What a call out of place leaves in a destination of this size.
fn moved(rank: &Rank<'_>, op: CollectiveOp, dtype: DType, given: &[u8], size: usize) -> Result<Vec<u8>> {
    let (src, dst) = (rank.bench.uploaded(given)?, zeros(rank, size)?);
    rank.run(&[rank.call(op, dtype, Some(&src), Some(&dst))?])?;
    ensure!(rank.bench.read(&src)? == given, "{op} of {dtype}: the source has changed");
    rank.bench.read(&dst)
}

fn zeros(rank: &Rank<'_>, size: usize) -> Result<BufferView> {
    rank.bench.allocate(BufferDesc::device(size as u64))
}

/// A rank's part of memory for all, and all of it.
fn part_of_zeros(rank: &Rank<'_>, given: &[u8], own: u32, size: usize) -> Result<(BufferView, BufferView)> {
    let view = zeros(rank, size)?;
    let start = u64::from(own) * given.len() as u64;
    let part = view.slice(start..start + given.len() as u64)?;
    rank.bench.copy(&rank.bench.staged(given)?, &part)?;
    Ok((view, part))
}

pub(super) fn compare(what: &str, found: &[u8], expected: &[u8]) -> Result<()> {
    ensure!(found.len() == expected.len(), "{what}: {} bytes, not {}", found.len(), expected.len());
    match found.iter().zip(expected).position(|(one, other)| one != other) {
        None => Ok(()),
        Some(at) => anyhow::bail!("{what}: byte {at} is {} and not {}", found[at], expected[at]),
    }
}
