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

/// A whole number in the bytes of a type.
pub(super) fn encode(dtype: DType, value: u64, into: &mut Vec<u8>) {
    let bits = match dtype {
        DType::F64 => float(value, 11, 52),
        DType::F32 => float(value, 8, 23),
        DType::F16 => float(value, 5, 10),
        DType::Bf16 => float(value, 8, 7),
        DType::F8E4m3 => float(value, 4, 3),
        DType::F8E5m2 => float(value, 5, 2),
        DType::Bool => u64::from(value != 0),
        _ => value,
    };
    let width = usize::try_from(dtype.size_bytes()).unwrap_or(8);
    into.extend_from_slice(&bits.to_le_bytes()[..width]);
}

/// The bits of a whole number that the format holds exactly.
const fn float(value: u64, exponent_bits: u32, fraction_bits: u32) -> u64 {
    if value == 0 {
        return 0;
    }
    let power = value.ilog2();
    let bias = (1 << (exponent_bits - 1)) - 1;
    let rest = value - (1 << power);
    let fraction = if power <= fraction_bits {
        rest << (fraction_bits - power)
    } else {
        rest >> (power - fraction_bits)
    };
    ((power + bias) as u64) << fraction_bits | fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_have_the_bits_that_rust_gives_them() {
        for value in 0..300_u64 {
            assert_eq!(float(value, 11, 52), (value as f64).to_bits());
            assert_eq!(float(value, 8, 23), u64::from((value as f32).to_bits()));
        }
        // 1.5 * 2^2 with one bit of sign, four of exponent with a bias of 7, three of fraction.
        assert_eq!(float(6, 4, 3), 0b0_1001_100);
    }

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
