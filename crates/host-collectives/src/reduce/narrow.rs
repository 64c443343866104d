//! Types that are computed in `f32` and rounded.

use float8::{F8E4M3, F8E5M2};
use half::{bf16, f16, slice::HalfFloatSliceExt as _};
use warpweft_core_types::ReduceOp;

use super::{BLOCK, Narrow, factor_of};

/// Does something with the Rust type of elements.
macro_rules! with_type {
    ($narrow:expr, $type:ident => $body:expr) => {
        match $narrow {
            Narrow::F16 => {
                type $type = f16;
                $body
            }
            Narrow::Bf16 => {
                type $type = bf16;
                $body
            }
            Narrow::E4m3 => {
                type $type = F8E4M3;
                $body
            }
            Narrow::E5m2 => {
                type $type = F8E5M2;
                $body
            }
        }
    };
}

pub(super) fn reduce(narrow: Narrow, op: ReduceOp, acc: &mut [u8], x: &[u8]) {
    with_type!(narrow, T => {
        let mut sum = [0.0; BLOCK];
        let mut other = [0.0; BLOCK];
        let step = BLOCK * T::BYTES;
        for (acc, x) in acc.chunks_mut(step).zip(x.chunks(step)) {
            let count = T::load(acc, &mut sum).min(T::load(x, &mut other));
            apply(op, &mut sum[..count], &other[..count]);
            T::store(&sum[..count], acc);
        }
    });
}

pub(super) fn divide(narrow: Narrow, size: u32, acc: &mut [u8]) {
    let size = size_of_ranks(size);
    each(narrow, acc, |element| element / size);
}

pub(super) fn scale(narrow: Narrow, factor: f64, acc: &mut [u8]) {
    let factor = round_factor(narrow, factor);
    each(narrow, acc, |element| element * factor);
}

pub(super) fn combine(narrow: Narrow, op: ReduceOp, factors: &[f64], inputs: &[&[u8]], out: &mut [u8]) {
    with_type!(narrow, T => {
        let mut sum = [0.0; BLOCK];
        let mut other = [0.0; BLOCK];
        let step = BLOCK * T::BYTES;
        for (index, out) in out.chunks_mut(step).enumerate() {
            let part = |rank: usize| {
                let input: &[u8] = inputs.get(rank).copied().unwrap_or_default();
                let start = (index * step).min(input.len());
                &input[start..(start + step).min(input.len())]
            };
            let count = T::load(part(0), &mut sum);
            multiply(narrow, op, factors, 0, &mut sum[..count]);
            for rank in 1..inputs.len() {
                let count = T::load(part(rank), &mut other).min(count);
                multiply(narrow, op, factors, rank, &mut other[..count]);
                apply(op, &mut sum[..count], &other[..count]);
            }
            if op == ReduceOp::Avg {
                let size = size_of_ranks(u32::try_from(inputs.len()).unwrap_or(u32::MAX));
                sum.iter_mut().for_each(|element| *element /= size);
            }
            T::store(&sum[..count], out);
        }
    });
}

fn multiply(narrow: Narrow, op: ReduceOp, factors: &[f64], rank: usize, elements: &mut [f32]) {
    if let ReduceOp::PremulSum(_) = op {
        let factor = round_factor(narrow, factor_of(factors, rank));
        elements.iter_mut().for_each(|element| *element *= factor);
    }
}

fn apply(op: ReduceOp, acc: &mut [f32], x: &[f32]) {
    let pairs = acc.iter_mut().zip(x);
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => pairs.for_each(|(acc, x)| *acc += x),
        ReduceOp::Prod => pairs.for_each(|(acc, x)| *acc *= x),
        ReduceOp::Min => {
            pairs.for_each(|(acc, x)| *acc = if *x < *acc || acc.is_nan() { *x } else { *acc });
        }
        ReduceOp::Max => {
            pairs.for_each(|(acc, x)| *acc = if *x > *acc || acc.is_nan() { *x } else { *acc });
        }
        _ => {}
    }
}

fn each(narrow: Narrow, acc: &mut [u8], function: impl Fn(f32) -> f32) {
    with_type!(narrow, T => {
        let mut elements = [0.0; BLOCK];
        for acc in acc.chunks_mut(BLOCK * T::BYTES) {
            let count = T::load(acc, &mut elements);
            elements[..count].iter_mut().for_each(|element| *element = function(*element));
            T::store(&elements[..count], acc);
        }
    });
}

#[expect(clippy::cast_precision_loss, reason = "ranks are few")]
fn size_of_ranks(size: u32) -> f32 {
    size as f32
}

fn round_factor(narrow: Narrow, factor: f64) -> f32 {
    with_type!(narrow, T => T::round(factor))
}

/// A type that is read into and written from `f32`.
trait Element {
    const BYTES: usize;

    /// Reads as many elements as there are, a block at most.
    fn load(bytes: &[u8], elements: &mut [f32; BLOCK]) -> usize;

    /// Writes them, rounded.
    fn store(elements: &[f32], bytes: &mut [u8]);

    fn round(factor: f64) -> f32;
}

/// The conversions of whole slices are those that use the machine's own instructions.
macro_rules! halves {
    ($($type:ty),*) => {$(
        impl Element for $type {
            const BYTES: usize = 2;

            fn load(bytes: &[u8], elements: &mut [f32; BLOCK]) -> usize {
                let mut narrow = [<$type>::ZERO; BLOCK];
                let pairs = bytes.as_chunks::<2>().0;
                let count = pairs.len().min(BLOCK);
                for (narrow, bytes) in narrow.iter_mut().zip(pairs) {
                    *narrow = <$type>::from_ne_bytes(*bytes);
                }
                narrow[..count].convert_to_f32_slice(&mut elements[..count]);
                count
            }

            fn store(elements: &[f32], bytes: &mut [u8]) {
                let mut narrow = [<$type>::ZERO; BLOCK];
                let count = elements.len().min(BLOCK);
                narrow[..count].convert_from_f32_slice(&elements[..count]);
                for (bytes, narrow) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(&narrow[..count]) {
                    *bytes = narrow.to_ne_bytes();
                }
            }

            fn round(factor: f64) -> f32 {
                <$type>::from_f64(factor).to_f32()
            }
        }
    )*};
}

halves!(f16, bf16);

macro_rules! bytes {
    ($($type:ty),*) => {$(
        impl Element for $type {
            const BYTES: usize = 1;

            fn load(bytes: &[u8], elements: &mut [f32; BLOCK]) -> usize {
                for (element, byte) in elements.iter_mut().zip(bytes) {
                    *element = <$type>::from_bits(*byte).to_f32();
                }
                bytes.len().min(BLOCK)
            }

            fn store(elements: &[f32], bytes: &mut [u8]) {
                for (byte, element) in bytes.iter_mut().zip(elements) {
                    *byte = <$type>::from_f32(*element).to_bits();
                }
            }

            fn round(factor: f64) -> f32 {
                <$type>::from_f64(factor).to_f32()
            }
        }
    )*};
}

bytes!(F8E4M3, F8E5M2);
