//! What operations come to, computed one element at a time from the bits.

use warpweft_core_types::{CollectiveOp, DType, ReduceOp};

/// The value of an element; exact for every type but the longest integers.
pub(crate) fn value(dtype: DType, bytes: &[u8]) -> f64 {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(wide);
    match dtype {
        DType::F64 => f64::from_bits(bits),
        DType::F32 => f64::from(f32::from_bits(bits as u32)),
        DType::F16 => small(bits, 5, 10),
        DType::Bf16 => f64::from(f32::from_bits((bits as u32) << 16)),
        // Without infinities: the largest exponent is one like the others, but for the last of its numbers.
        DType::F8E4m3 if bits & 0x7f == 0x7f => f64::NAN,
        DType::F8E4m3 if bits & 0x78 == 0x78 => {
            let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
            sign * 256.0 * (1.0 + (bits & 7) as f64 / 8.0)
        }
        DType::F8E4m3 => small(bits, 4, 3),
        DType::F8E5m2 => small(bits, 5, 2),
        _ => integer(dtype, bytes) as f64,
    }
}

/// A floating-point number of IEEE 754's shape.
fn small(bits: u64, exponent_bits: u32, mantissa_bits: u32) -> f64 {
    let mantissa = bits & ((1 << mantissa_bits) - 1);
    let exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
    let sign = if bits >> (exponent_bits + mantissa_bits) & 1 == 0 { 1.0 } else { -1.0 };
    let bias = (1 << (exponent_bits - 1)) - 1;
    let fraction = mantissa as f64 / f64::from(1 << mantissa_bits);
    let magnitude = if exponent == 0 {
        fraction * 2_f64.powi(1 - bias)
    } else if exponent == (1 << exponent_bits) - 1 {
        if mantissa == 0 { f64::INFINITY } else { f64::NAN }
    } else {
        (1.0 + fraction) * 2_f64.powi(exponent as i32 - bias)
    };
    sign * magnitude
}

fn integer(dtype: DType, bytes: &[u8]) -> i128 {
    let is_signed = matches!(dtype, DType::I64 | DType::I32 | DType::I16 | DType::I8);
    let fill = if is_signed && bytes[bytes.len() - 1] & 0x80 != 0 { 0xff } else { 0 };
    let mut wide = [fill; 16];
    wide[..bytes.len()].copy_from_slice(bytes);
    i128::from_le_bytes(wide)
}

fn wrapped(value: i128, bytes: usize) -> Vec<u8> {
    value.to_le_bytes()[..bytes].to_vec()
}

/// What an element may be.
#[derive(Debug)]
pub(crate) enum Expected {
    Exactly(Vec<u8>),
    /// So much, give or take.
    About(f64, f64),
}

impl Expected {
    pub(crate) fn check(&self, dtype: DType, got: &[u8], context: &dyn Fn() -> String) {
        match self {
            Self::Exactly(bytes) => assert_eq!(got, bytes, "{}", context()),
            Self::About(want, tolerance) => {
                let got = value(dtype, got);
                let is_right =
                    (got - want).abs() <= *tolerance || got == *want || got.is_nan() && want.is_nan();
                assert!(is_right, "{got} where {want} is right, give or take {tolerance}: {}", context());
            }
        }
    }
}

/// Relative distance of neighbours, and the distance of the least.
fn precision(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F64 => (2_f64.powi(-52), 0.0),
        DType::F32 => (2_f64.powi(-23), 2_f64.powi(-149)),
        DType::F16 => (2_f64.powi(-10), 2_f64.powi(-24)),
        DType::Bf16 => (2_f64.powi(-7), 2_f64.powi(-133)),
        DType::F8E4m3 => (2_f64.powi(-3), 2_f64.powi(-9)),
        _ => (2_f64.powi(-2), 2_f64.powi(-16)),
    }
}

/// The largest number of types that have it in place of infinity.
fn saturated(dtype: DType, value: f64) -> f64 {
    let largest = match dtype {
        DType::F8E4m3 => 448.0,
        DType::F8E5m2 => 57344.0,
        _ => return value,
    };
    value.clamp(-largest, largest)
}

/// What the elements of all ranks come to. Sums and products of floating-point numbers may be off by one rounding of
/// the type and as many of `f32` (or the type's own, if that is longer) as there are operations.
pub(crate) fn reduced(op: ReduceOp, dtype: DType, factors: &[f64], elements: &[&[u8]]) -> Expected {
    let bytes = elements[0].len();
    if dtype == DType::Bool {
        let truths = || elements.iter().map(|element| element[0] != 0);
        let all = || truths().all(|truth| truth);
        let any = || truths().any(|truth| truth);
        let truth = match op {
            ReduceOp::Min | ReduceOp::And => all(),
            ReduceOp::Max | ReduceOp::Or => any(),
            _ => truths().filter(|truth| *truth).count() % 2 == 1,
        };
        return Expected::Exactly(vec![u8::from(truth)]);
    }
    if !dtype.is_float() {
        return Expected::Exactly(reduced_integer(op, dtype, factors, elements, bytes));
    }
    let values: Vec<f64> = elements.iter().map(|element| value(dtype, element)).collect();
    let (relative, least) = precision(dtype);
    let roundings = values.len() as f64 * relative.min(2_f64.powi(-23));
    let numbers = || values.iter().copied().filter(|value| !value.is_nan());
    let about = |want: f64, scale: f64| {
        Expected::About(saturated(dtype, want), scale * roundings + want.abs() * relative / 2.0 + least)
    };
    let scale: f64 = values.iter().map(|value| value.abs()).sum();
    let exactly = |want: Option<f64>| Expected::About(want.unwrap_or(f64::NAN), 0.0);
    match op {
        ReduceOp::Sum => about(values.iter().sum(), scale),
        ReduceOp::Avg => about(values.iter().sum::<f64>() / values.len() as f64, scale),
        ReduceOp::Prod => {
            let product: f64 = values.iter().product();
            about(product, product.abs())
        }
        ReduceOp::PremulSum(_) => {
            // The factors of these tests are numbers of every type.
            let terms = || values.iter().zip(factors).map(|(value, factor)| value * factor);
            about(terms().sum(), terms().map(f64::abs).sum())
        }
        ReduceOp::Min => exactly(numbers().min_by(f64::total_cmp)),
        _ => exactly(numbers().max_by(f64::total_cmp)),
    }
}

fn reduced_integer(op: ReduceOp, dtype: DType, factors: &[f64], elements: &[&[u8]], bytes: usize) -> Vec<u8> {
    let values = || elements.iter().map(|element| integer(dtype, element));
    let sum = || wrapped(values().sum(), bytes);
    let value = match op {
        ReduceOp::Sum => return sum(),
        ReduceOp::Avg => integer(dtype, &sum()) / elements.len() as i128,
        ReduceOp::Prod => {
            let product = |a: i128, b: i128| integer(dtype, &wrapped(a.wrapping_mul(b), bytes));
            values().fold(1, product)
        }
        ReduceOp::PremulSum(_) => {
            values().zip(factors).map(|(value, factor)| value * factor.round_ties_even() as i128).sum()
        }
        ReduceOp::Min => values().min().unwrap(),
        ReduceOp::Max => values().max().unwrap(),
        ReduceOp::And => values().fold(-1, |a, b| a & b),
        ReduceOp::Or => values().fold(0, |a, b| a | b),
        ReduceOp::Xor => values().fold(0, |a, b| a ^ b),
        other => panic!("{other}"),
    };
    wrapped(value, bytes)
}

/// What a rank has afterwards, element by element; nothing if it gets nothing. `given` is what every rank gives, and
/// `count` the elements of a part.
pub(crate) fn result(
    op: CollectiveOp,
    dtype: DType,
    factors: &[f64],
    given: &[Vec<u8>],
    rank: usize,
    count: usize,
) -> Vec<Expected> {
    let element = dtype.size_bytes() as usize;
    let at = |rank: usize, index: usize| given[rank].get(index * element..(index + 1) * element).unwrap();
    let exactly = |rank: usize, index: usize| Expected::Exactly(at(rank, index).to_vec());
    let sum = |reduction: ReduceOp, index: usize| {
        let elements: Vec<&[u8]> = (0..given.len()).map(|rank| at(rank, index)).collect();
        reduced(reduction, dtype, factors, &elements)
    };
    let all = || (0..given.len()).flat_map(|rank| (0..count).map(move |index| (rank, index)));
    match op {
        CollectiveOp::AllReduce(reduction) => (0..count).map(|index| sum(reduction, index)).collect(),
        CollectiveOp::Reduce { op: reduction, root } if root as usize == rank => {
            (0..count).map(|index| sum(reduction, index)).collect()
        }
        CollectiveOp::ReduceScatter(reduction) => {
            (0..count).map(|index| sum(reduction, rank * count + index)).collect()
        }
        CollectiveOp::AllGather => all().map(|(from, index)| exactly(from, index)).collect(),
        CollectiveOp::Gather { root } if root as usize == rank => {
            all().map(|(from, index)| exactly(from, index)).collect()
        }
        CollectiveOp::Broadcast { root } => (0..count).map(|index| exactly(root as usize, index)).collect(),
        CollectiveOp::Scatter { root } => {
            (0..count).map(|index| exactly(root as usize, rank * count + index)).collect()
        }
        CollectiveOp::AllToAll => all().map(|(from, index)| exactly(from, rank * count + index)).collect(),
        _ => Vec::new(),
    }
}
