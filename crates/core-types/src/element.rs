//! Types of elements, and how they are reduced.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The type of a buffer's elements, where an operation has to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
#[expect(missing_docs, reason = "their names say it")]
pub enum DType {
    F64,
    F32,
    F16,
    Bf16,
    /// 4 bits of exponent, 3 of mantissa, no infinities.
    F8E4m3,
    /// 5 bits of exponent, 2 of mantissa.
    F8E5m2,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    /// A byte: 0 is false, everything else true; results are 0 or 1.
    Bool,
}

impl DType {
    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::F8E4m3,
        Self::F8E5m2,
        Self::I64,
        Self::I32,
        Self::I16,
        Self::I8,
        Self::U64,
        Self::U32,
        Self::U16,
        Self::U8,
        Self::Bool,
    ];

    /// The size of an element; elements start at multiples of it.
    pub const fn size_bytes(self) -> u64 {
        match self {
            Self::F8E4m3 | Self::F8E5m2 | Self::I8 | Self::U8 | Self::Bool => 1,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// Whether it is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::Bf16 | Self::F8E4m3 | Self::F8E5m2)
    }

    /// The bits of a small whole number, which the type has to hold exactly: its bytes are the lowest ones, little
    /// end first.
    pub const fn bits_of(self, whole: u32) -> u64 {
        match self {
            Self::F64 => float_bits(whole, 11, 52),
            Self::F32 => float_bits(whole, 8, 23),
            Self::F16 => float_bits(whole, 5, 10),
            Self::Bf16 => float_bits(whole, 8, 7),
            Self::F8E4m3 => float_bits(whole, 4, 3),
            Self::F8E5m2 => float_bits(whole, 5, 2),
            Self::Bool => (whole != 0) as u64,
            Self::I64 | Self::I32 | Self::I16 | Self::I8 | Self::U64 | Self::U32 | Self::U16 | Self::U8 => {
                whole as u64
            }
        }
    }

    /// Its name as programs write it: `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F8E4m3 => "f8e4m3",
            Self::F8E5m2 => "f8e5m2",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::I16 => "i16",
            Self::I8 => "i8",
            Self::U64 => "u64",
            Self::U32 => "u32",
            Self::U16 => "u16",
            Self::U8 => "u8",
            Self::Bool => "bool",
        }
    }
}

/// The bits of a whole number in a format of IEEE 754's shape that holds it exactly.
const fn float_bits(whole: u32, exponent_bits: u32, fraction_bits: u32) -> u64 {
    if whole == 0 {
        return 0;
    }
    let power = whole.ilog2();
    let bias = (1 << (exponent_bits - 1)) - 1;
    let rest = (whole - (1 << power)) as u64;
    let fraction = if power <= fraction_bits {
        rest << (fraction_bits - power)
    } else {
        rest >> (power - fraction_bits)
    };
    ((power + bias) as u64) << fraction_bits | fraction
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How the elements of several ranks become one.
///
/// Integers wrap. Types of 8 and 16 bits of floating point may be rounded once or after every rank, as the engine does.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The product.
    Prod,
    /// The least.
    Min,
    /// The greatest.
    Max,
    /// The sum divided by the number of ranks; integers are rounded towards zero.
    Avg,
    /// Bit by bit, all; of `bool`, whether all are true.
    And,
    /// Bit by bit, any; of `bool`, whether one is true.
    Or,
    /// Bit by bit, an odd number of them; of `bool` too.
    Xor,
    /// The sum of what each rank has, times that rank's own factor, which is rounded to the type.
    PremulSum(f64),
}

impl ReduceOp {
    /// All of them, with 1 as the factor.
    pub const ALL: [Self; 9] = [
        Self::Sum,
        Self::Prod,
        Self::Min,
        Self::Max,
        Self::Avg,
        Self::And,
        Self::Or,
        Self::Xor,
        Self::PremulSum(1.0),
    ];

    /// Whether it makes sense for elements of this type: bits of floating-point numbers are not combined, and truth
    /// values are not added.
    pub const fn is_defined_for(self, dtype: DType) -> bool {
        match self {
            Self::Sum | Self::Prod | Self::Avg | Self::PremulSum(_) => !matches!(dtype, DType::Bool),
            Self::Min | Self::Max => true,
            Self::And | Self::Or | Self::Xor => !dtype.is_float(),
        }
    }

    /// Its name as programs write it: `premul_sum`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
            Self::And => "and",
            Self::Or => "or",
            Self::Xor => "xor",
            Self::PremulSum(_) => "premul_sum",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_have_the_bits_that_rust_gives_them() {
        for whole in 0..300_u32 {
            assert_eq!(DType::F64.bits_of(whole), f64::from(whole).to_bits());
            assert_eq!(DType::F32.bits_of(whole), u64::from((whole as f32).to_bits()));
            assert_eq!(DType::I16.bits_of(whole), u64::from(whole));
        }
        // 1.5 * 2^2 with one bit of sign, four of exponent with a bias of 7, three of fraction.
        assert_eq!(DType::F8E4m3.bits_of(6), 0b0100_1100);
        assert_eq!(DType::Bool.bits_of(6), 1);
    }

    #[test]
    fn bits_are_for_integers_and_sums_for_numbers() {
        assert!(!ReduceOp::Xor.is_defined_for(DType::F32));
        assert!(ReduceOp::Xor.is_defined_for(DType::Bool));
        assert!(!ReduceOp::Avg.is_defined_for(DType::Bool));
        let defined = |op: ReduceOp| DType::ALL.iter().filter(|dtype| op.is_defined_for(**dtype)).count();
        assert_eq!(ReduceOp::ALL.map(defined), [14, 14, 15, 15, 14, 9, 9, 9, 14]);
    }
}
