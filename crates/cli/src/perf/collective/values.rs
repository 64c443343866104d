//! What ranks put in, and what must come out: small whole numbers, which every type holds exactly.

use warpweft::{CollectiveOp, DType, ReduceOp};

/// What a rank has at a place. Averages get multiples of the number of ranks, and products ones and twos.
pub(super) const fn input(op: Option<ReduceOp>, dtype: DType, size: u32, rank: u32, place: u64) -> u64 {
    let mixed =
        place.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (rank as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
    let noise = (mixed >> 32) ^ (mixed >> 11);
    // Small floats hold whole numbers up to 8 or 16.
    let few = matches!(dtype, DType::F8E4m3 | DType::F8E5m2 | DType::Bool);
    let values = if few { 2 } else { 8 };
    match op {
        Some(ReduceOp::Avg) => (noise % values) * size as u64,
        Some(ReduceOp::Prod) => 1 + noise % 2,
        _ => noise % values,
    }
}

/// What they reduce to, as a whole number before it is cut to the type.
pub(super) fn reduced(op: ReduceOp, dtype: DType, size: u32, place: u64) -> u64 {
    let inputs = (0..size).map(|rank| input(Some(op), dtype, size, rank, place));
    match op {
        ReduceOp::Prod => inputs.product(),
        ReduceOp::Min => inputs.min().unwrap_or(0),
        ReduceOp::Max => inputs.max().unwrap_or(0),
        ReduceOp::Avg => inputs.sum::<u64>() / u64::from(size),
        ReduceOp::And => inputs.fold(u64::MAX, |all, one| all & one),
        ReduceOp::Or => inputs.fold(0, |all, one| all | one),
        ReduceOp::Xor => inputs.fold(0, |all, one| all ^ one),
        _ => inputs.sum(),
    }
}

/// What a rank must have after the operation, at a place of its destination of `len` elements.
pub(super) fn expected(
    op: CollectiveOp,
    dtype: DType,
    (rank, size): (u32, u32),
    len: u64,
    place: u64,
) -> u64 {
    let part = len / u64::from(size);
    let from = |rank: u32, place: u64| input(None, dtype, size, rank, place);
    let rank_of = |place: u64| u32::try_from(place / part.max(1)).unwrap_or(0);
    match op {
        CollectiveOp::AllReduce(op) | CollectiveOp::Reduce { op, .. } => reduced(op, dtype, size, place),
        CollectiveOp::ReduceScatter(op) => reduced(op, dtype, size, u64::from(rank) * len + place),
        CollectiveOp::AllGather | CollectiveOp::Gather { .. } => from(rank_of(place), place % part),
        CollectiveOp::Scatter { root } => from(root, u64::from(rank) * len + place),
        CollectiveOp::AllToAll => from(rank_of(place), u64::from(rank) * part + place % part),
        // Rings: from the rank before.
        CollectiveOp::Recv { .. } | CollectiveOp::Send { .. } => from((rank + size - 1) % size, place),
        _ => from(op.peer().unwrap_or(0), place),
    }
}

/// A whole number in the bytes of a type; integers are cut to it.
pub(super) fn encode(dtype: DType, value: u64, into: &mut Vec<u8>) {
    let bits = match u32::try_from(value) {
        Ok(value) => dtype.bits_of(value),
        // Only integers get as large, by products.
        Err(_) => value,
    };
    let width = usize::try_from(dtype.size_bytes()).unwrap_or(8);
    into.extend_from_slice(&bits.to_le_bytes()[..width]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_in_reduces_to_what_the_types_hold() {
        for (dtype, op) in DType::ALL.into_iter().flat_map(|dtype| ReduceOp::ALL.map(|op| (dtype, op))) {
            if !op.is_defined_for(dtype) || matches!(op, ReduceOp::PremulSum(_)) {
                continue;
            }
            let most = (0..500).map(|place| reduced(op, dtype, 8, place)).max().unwrap_or(0);
            let holds = if dtype == DType::F8E5m2 { 8 } else { 256 };
            assert!(most <= holds || op == ReduceOp::Prod, "{op} of {dtype} gives {most}");
        }
    }
}
