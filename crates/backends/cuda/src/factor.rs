//! Factors in the types that they are multiplied with.

use nccl_rs::DataType;
use smallvec::SmallVec;

/// A factor as an element of this type, rounded to nearest with ties to even. Beyond the largest number floats become
/// infinite, or stay at the largest where there is no infinity, as integers do.
pub(crate) fn bytes(dtype: DataType, factor: f64) -> SmallVec<[u8; 8]> {
    let whole = factor.round_ties_even();
    macro_rules! integer {
        ($type:ty $(, $lint:path)?) => {{
            #[expect(clippy::cast_possible_truncation, $($lint,)? reason = "saturates")]
            let number = whole as $type;
            SmallVec::from_slice(&number.to_ne_bytes())
        }};
    }
    match dtype {
        DataType::I8 => integer!(i8),
        DataType::U8 => integer!(u8, clippy::cast_sign_loss),
        DataType::I32 => integer!(i32),
        DataType::U32 => integer!(u32, clippy::cast_sign_loss),
        DataType::I64 => integer!(i64),
        DataType::U64 => integer!(u64, clippy::cast_sign_loss),
        #[expect(clippy::cast_possible_truncation, reason = "rounds")]
        DataType::F32 => SmallVec::from_slice(&(factor as f32).to_ne_bytes()),
        DataType::F16 => SmallVec::from_slice(&small(factor, 5, 10, true).to_ne_bytes()),
        DataType::Bf16 => SmallVec::from_slice(&small(factor, 8, 7, true).to_ne_bytes()),
        DataType::F8E4M3 => SmallVec::from_slice(&small(factor, 4, 3, false).to_le_bytes()[..1]),
        DataType::F8E5M2 => SmallVec::from_slice(&small(factor, 5, 2, true).to_le_bytes()[..1]),
        _ => SmallVec::from_slice(&factor.to_ne_bytes()),
    }
}

/// The code of a float with so many bits of exponent and mantissa. Without infinities the code of all ones is the only
/// one that is no number.
fn small(value: f64, exponent_bits: u32, mantissa_bits: u32, has_infinity: bool) -> u16 {
    let infinity = ((1_u16 << exponent_bits) - 1) << mantissa_bits;
    let all_ones = infinity | ((1 << mantissa_bits) - 1);
    let sign = u16::from(value.is_sign_negative()) << (exponent_bits + mantissa_bits);
    if value.is_nan() {
        return sign | all_ones;
    }
    let most = if has_infinity { infinity } else { all_ones - 1 };
    let bias = (1_i32 << (exponent_bits - 1)) - 1;
    let (bits, magnitude) = (value.to_bits(), value.abs());
    let own = i32::try_from(bits >> 52 & 0x7ff).unwrap_or(0) - 1023;
    if own > bias + 1 {
        return sign | most;
    }
    // Below the least exponent numbers are as far apart as at it.
    let exponent = own.max(1 - bias);
    let steps = (magnitude / 2_f64.powi(exponent - mantissa_bits.cast_signed())).round_ties_even();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "fewer than 2^12")]
    let steps = steps as u32;
    let code = (u32::try_from(exponent + bias - 1).unwrap_or(0) << mantissa_bits) + steps;
    sign | u16::try_from(code).unwrap_or(u16::MAX).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_rounded_to_the_nearest() {
        let half = |value| small(value, 5, 10, true);
        assert_eq!([half(1.0), half(-2.0), half(0.0), half(65504.0)], [0x3c00, 0xc000, 0, 0x7bff]);
        assert_eq!([half(65520.0), half(f64::INFINITY), half(1e300)], [0x7c00; 3]);
        assert_eq!([half(2_f64.powi(-24)), half(2_f64.powi(-25)), half(2_f64.powi(-14))], [1, 0, 0x400]);
        assert_eq!([half(1.0 + 2_f64.powi(-11)), half(1.0 + 3.0 * 2_f64.powi(-11))], [0x3c00, 0x3c02]);
        let brain = |value| small(value, 8, 7, true);
        assert_eq!([brain(1.0), brain(3.0), brain(-0.5)], [0x3f80, 0x4040, 0xbf00]);
        assert_eq!(brain(f64::NAN) & 0x7f80, 0x7f80);
    }

    #[test]
    fn small_floats_stay_finite_where_there_is_no_infinity() {
        let e4m3 = |value| small(value, 4, 3, false);
        assert_eq!([e4m3(1.0), e4m3(448.0), e4m3(1e9), e4m3(f64::NAN)], [0x38, 0x7e, 0x7e, 0x7f]);
        assert_eq!([e4m3(2_f64.powi(-9)), e4m3(-1.5)], [1, 0xbc]);
        let e5m2 = |value| small(value, 5, 2, true);
        assert_eq!([e5m2(1.0), e5m2(57344.0), e5m2(1e9)], [0x3c, 0x7b, 0x7c]);
    }

    #[test]
    fn integers_are_rounded_and_saturate() {
        assert_eq!(bytes(DataType::I32, 2.5)[..], 2_i32.to_ne_bytes());
        assert_eq!(bytes(DataType::U8, 300.0)[..], [255]);
        assert_eq!(bytes(DataType::I8, -1.0)[..], [0xff]);
        assert_eq!(bytes(DataType::F32, 0.5)[..], 0.5_f32.to_ne_bytes());
        for dtype in DataType::ALL {
            assert_eq!(bytes(dtype, 1.0).len(), dtype.size_bytes(), "{dtype}");
        }
    }
}
