//! Reductions over bytes of elements, in safe code that compilers turn into vector instructions.
//!
//! Lengths that differ are cut to the shorter, and to whole elements. Memory need not be aligned.
//!
//! # Rules
//!
//! - Integers wrap. Their average is the wrapped sum, divided and rounded towards zero.
//! - Types of 8 and 16 bits of floating point are computed in `f32`. [`combine`] rounds once for all ranks, the
//!   functions that reduce one operand into another round each time.
//! - The least and the greatest of a number and NaN is the number, as with NCCL; of equal ones (0 and -0) the earlier
//!   rank's is taken.
//! - What is too large for `f8e4m3` and `f8e5m2`, infinities among it, becomes the largest finite number, as vendors'
//!   conversions do by default. NaN stays NaN.
//! - Bytes of `bool` that are not 0 are true; results are 0 or 1.
//! - The factor of a [`ReduceOp::PremulSum`] is rounded to the type first: to the nearest, and for integers to the
//!   nearest one that the type has.

mod narrow;
mod wide;

use warpweft_core_types::{DType, ReduceOp};

/// Elements that are computed at a time: what is between passes stays in the nearest cache.
pub(crate) const BLOCK: usize = 1024;

/// `acc = op(acc, x)`, element by element. For averages it adds, and [`finish`] divides; for sums of multiples it adds,
/// and [`premultiply`] has to come before.
///
/// What is not defined (see [`ReduceOp::is_defined_for`]) leaves `acc` as it is.
pub fn reduce(op: ReduceOp, dtype: DType, acc: &mut [u8], x: &[u8]) {
    match Class::of(dtype) {
        Class::Wide(wide) => wide::apply(wide, op, acc, x),
        Class::Narrow(narrow) => narrow::reduce(narrow, op, acc, x),
    }
}

/// What is left to do once all `size` ranks are reduced: averages are divided.
pub fn finish(op: ReduceOp, dtype: DType, size: u32, acc: &mut [u8]) {
    if op != ReduceOp::Avg {
        return;
    }
    match Class::of(dtype) {
        Class::Wide(wide) => wide::divide(wide, size, acc),
        Class::Narrow(narrow) => narrow::divide(narrow, size, acc),
    }
}

/// Multiplies every element by a rank's factor.
pub fn premultiply(dtype: DType, factor: f64, acc: &mut [u8]) {
    match Class::of(dtype) {
        Class::Wide(wide) => wide::scale(wide, factor, acc),
        Class::Narrow(narrow) => narrow::scale(narrow, factor, acc),
    }
}

/// Reduces what all ranks have, in their order, into `out`, and rounds once. `factors` are those of the ranks for
/// [`ReduceOp::PremulSum`], by rank; ranks without one have 1.
///
/// It is `out` alone that says how much: operands that are shorter leave the rest of it undefined.
pub fn combine(op: ReduceOp, dtype: DType, factors: &[f64], inputs: &[&[u8]], out: &mut [u8]) {
    match Class::of(dtype) {
        Class::Wide(wide) => wide::combine(wide, op, factors, inputs, out),
        Class::Narrow(narrow) => narrow::combine(narrow, op, factors, inputs, out),
    }
}

/// The factor as its type has it.
fn factor_of(factors: &[f64], rank: usize) -> f64 {
    factors.get(rank).copied().unwrap_or(1.0)
}

#[derive(Debug, Clone, Copy)]
enum Class {
    Wide(Wide),
    Narrow(Narrow),
}

/// Types that are computed as they are.
#[derive(Debug, Clone, Copy)]
enum Wide {
    F64,
    F32,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
}

/// Types that are computed in `f32`.
#[derive(Debug, Clone, Copy)]
enum Narrow {
    F16,
    Bf16,
    E4m3,
    E5m2,
}

impl Class {
    fn of(dtype: DType) -> Self {
        match dtype {
            DType::F64 => Self::Wide(Wide::F64),
            DType::F32 => Self::Wide(Wide::F32),
            DType::F16 => Self::Narrow(Narrow::F16),
            DType::Bf16 => Self::Narrow(Narrow::Bf16),
            DType::F8E4m3 => Self::Narrow(Narrow::E4m3),
            DType::F8E5m2 => Self::Narrow(Narrow::E5m2),
            DType::I64 => Self::Wide(Wide::I64),
            DType::I32 => Self::Wide(Wide::I32),
            DType::I16 => Self::Wide(Wide::I16),
            DType::I8 => Self::Wide(Wide::I8),
            DType::U64 => Self::Wide(Wide::U64),
            DType::U32 => Self::Wide(Wide::U32),
            DType::U16 => Self::Wide(Wide::U16),
            DType::U8 => Self::Wide(Wide::U8),
            // A type that is added later is refused before it comes here (`call::check`).
            _ => Self::Wide(Wide::Bool),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    #[test]
    fn a_number_wins_over_nan_on_either_side() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            let mut acc = f32s(&[f32::NAN, 1.0, f32::NAN, 2.0]);
            reduce(op, DType::F32, &mut acc, &f32s(&[1.0, f32::NAN, f32::NAN, 2.0]));
            assert_eq!(acc[..8], f32s(&[1.0, 1.0]), "{op}");
            assert_eq!(acc[12..], f32s(&[2.0]), "{op}");
            let both = f32::from_ne_bytes([acc[8], acc[9], acc[10], acc[11]]);
            assert!(both.is_nan(), "{op}");
        }
    }

    #[test]
    fn averages_of_integers_are_rounded_towards_zero() {
        let mut acc = [(-7i8).cast_unsigned(), 7, 100];
        reduce(ReduceOp::Avg, DType::I8, &mut acc, &[0, 0, 100]);
        finish(ReduceOp::Avg, DType::I8, 2, &mut acc);
        // 200 wraps to -56.
        assert_eq!(acc.map(u8::cast_signed), [-3, 3, -28]);
    }

    #[test]
    fn truth_is_one() {
        let mut acc = [0, 2, 255, 0];
        reduce(ReduceOp::Xor, DType::Bool, &mut acc, &[7, 1, 0, 0]);
        assert_eq!(acc, [1, 0, 1, 0]);
    }

    #[test]
    fn factors_of_integers_are_rounded_to_the_nearest() {
        let mut acc = [3, 200];
        premultiply(DType::U8, 1.6, &mut acc);
        assert_eq!(acc, [6, 144]);
    }

    #[test]
    fn what_is_undefined_changes_nothing() {
        let mut acc = f32s(&[1.5]);
        reduce(ReduceOp::Xor, DType::F32, &mut acc, &f32s(&[2.5]));
        assert_eq!(acc, f32s(&[1.5]));
    }
}
