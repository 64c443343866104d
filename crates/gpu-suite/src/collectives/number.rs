//! Small numbers as elements of any type.

use warpweft_core_types::{DType, ReduceOp};

/// The bytes of a small whole number, or of a fraction that the type has, as an element.
pub(super) fn element(dtype: DType, value: f64) -> Vec<u8> {
    #[expect(clippy::cast_possible_truncation, reason = "small numbers")]
    let whole = value as i64;
    let cut = |size: usize| whole.to_le_bytes()[..size].to_vec();
    match dtype {
        DType::F64 => value.to_le_bytes().to_vec(),
        #[expect(clippy::cast_possible_truncation, reason = "small numbers")]
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        DType::F16 => small(value, 5, 10).to_le_bytes().to_vec(),
        DType::Bf16 => small(value, 8, 7).to_le_bytes().to_vec(),
        DType::F8E4m3 => small(value, 4, 3).to_le_bytes()[..1].to_vec(),
        DType::F8E5m2 => small(value, 5, 2).to_le_bytes()[..1].to_vec(),
        other => cut(usize::try_from(other.size_bytes()).unwrap_or(1)),
    }
}

/// The code of a positive number that a float of so many bits has exactly.
fn small(value: f64, exponent_bits: u32, mantissa_bits: u32) -> u16 {
    if value == 0.0 {
        return 0;
    }
    let bias = (1_i32 << (exponent_bits - 1)) - 1;
    let exponent = value.log2().floor();
    let mantissa = (value / exponent.exp2() - 1.0) * f64::from(1_u16 << mantissa_bits);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small numbers")]
    let code = ((exponent as i32 + bias) as u16) << mantissa_bits | mantissa as u16;
    code
}

/// What a rank has at a place: small, so that results are exact in every type whatever the order.
pub(super) fn input(op: ReduceOp, rank: u32, at: usize) -> f64 {
    match op {
        // Only the same on all ranks has an average in every type.
        ReduceOp::Avg => f64::from(u8::try_from(at % 3).unwrap_or(0) + 1),
        _ => f64::from(u8::try_from((at + rank as usize) % 2).unwrap_or(0) + 1),
    }
}

/// What as many ranks have there together.
pub(super) fn reduced(op: ReduceOp, size: u32, at: usize) -> f64 {
    let all = (0..size).map(|rank| input(op, rank, at));
    match op {
        ReduceOp::Prod => all.product(),
        ReduceOp::Min => all.fold(f64::INFINITY, f64::min),
        ReduceOp::Max => all.fold(0.0, f64::max),
        ReduceOp::Avg => input(op, 0, at),
        ReduceOp::PremulSum(factor) => all.sum::<f64>() * factor,
        _ => all.sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_numbers_have_their_codes() {
        assert_eq!(element(DType::F16, 1.5), 0x3e00_u16.to_le_bytes());
        assert_eq!(element(DType::Bf16, 3.0), 0x4040_u16.to_le_bytes());
        assert_eq!(element(DType::F8E4m3, 8.0), [0x50]);
        assert_eq!(element(DType::F8E5m2, 6.0), [0x46]);
        assert_eq!(element(DType::I16, 7.0), [7, 0]);
        assert_eq!((reduced(ReduceOp::Sum, 2, 0), reduced(ReduceOp::Prod, 4, 1)), (3.0, 4.0));
    }
}
