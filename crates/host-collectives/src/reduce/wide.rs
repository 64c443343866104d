//! Types that are computed as they are.

use warpweft_core_types::ReduceOp;

use super::{BLOCK, Wide, factor_of};

/// Does something with the Rust type of elements.
macro_rules! with_type {
    ($wide:expr, $type:ident => $body:expr) => {
        match $wide {
            Wide::F64 => {
                type $type = f64;
                $body
            }
            Wide::F32 => {
                type $type = f32;
                $body
            }
            Wide::I64 => {
                type $type = i64;
                $body
            }
            Wide::I32 => {
                type $type = i32;
                $body
            }
            Wide::I16 => {
                type $type = i16;
                $body
            }
            Wide::I8 => {
                type $type = i8;
                $body
            }
            Wide::U64 => {
                type $type = u64;
                $body
            }
            Wide::U32 => {
                type $type = u32;
                $body
            }
            Wide::U16 => {
                type $type = u16;
                $body
            }
            Wide::U8 => {
                type $type = u8;
                $body
            }
            Wide::Bool => {
                type $type = Truth;
                $body
            }
        }
    };
}

/// Chooses the function of a reduction once, outside of the loop over elements.
macro_rules! with_op {
    ($op:expr, $type:ty, $function:ident => $body:expr, else $otherwise:expr) => {
        match $op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => {
                let $function = <$type as Element>::add;
                $body
            }
            ReduceOp::Prod => {
                let $function = <$type as Element>::multiply;
                $body
            }
            ReduceOp::Min => {
                let $function = <$type as Element>::least;
                $body
            }
            ReduceOp::Max => {
                let $function = <$type as Element>::greatest;
                $body
            }
            ReduceOp::And => {
                let $function = <$type as Element>::and;
                $body
            }
            ReduceOp::Or => {
                let $function = <$type as Element>::or;
                $body
            }
            ReduceOp::Xor => {
                let $function = <$type as Element>::xor;
                $body
            }
            _ => $otherwise,
        }
    };
}

pub(super) fn apply(wide: Wide, op: ReduceOp, acc: &mut [u8], x: &[u8]) {
    with_type!(wide, T => with_op!(op, T, function => fold::<T>(acc, x, function), else ()));
}

pub(super) fn divide(wide: Wide, size: u32, acc: &mut [u8]) {
    with_type!(wide, T => each::<T>(acc, |element| element.divided(size)));
}

pub(super) fn scale(wide: Wide, factor: f64, acc: &mut [u8]) {
    with_type!(wide, T => {
        let factor = T::of_factor(factor);
        each::<T>(acc, |element| element.multiply(factor));
    });
}

pub(super) fn combine(wide: Wide, op: ReduceOp, factors: &[f64], inputs: &[&[u8]], out: &mut [u8]) {
    with_type!(wide, T => {
        let step = BLOCK * size_of::<T>();
        for (index, out) in out.chunks_mut(step).enumerate() {
            let start = index * step;
            let part = |rank: usize| {
                let input: &[u8] = inputs.get(rank).copied().unwrap_or_default();
                let start = start.min(input.len());
                &input[start..(start + step).min(input.len())]
            };
            combine_block::<T>(op, factors, inputs.len(), part, out);
        }
    });
}

#[inline]
fn combine_block<'a, T: Element>(
    op: ReduceOp,
    factors: &[f64],
    ranks: usize,
    part: impl Fn(usize) -> &'a [u8],
    out: &mut [u8],
) {
    if let ReduceOp::PremulSum(_) = op {
        let first = T::of_factor(factor_of(factors, 0));
        write::<T>(out, part(0), |x| x.multiply(first));
        for rank in 1..ranks {
            let factor = T::of_factor(factor_of(factors, rank));
            fold::<T>(out, part(rank), |acc, x| acc.add(x.multiply(factor)));
        }
        return;
    }
    // One rank has nothing to be reduced with, but truth is 0 or 1 all the same.
    if ranks < 2 {
        write::<T>(out, part(0), |x| x);
    } else {
        with_op!(op, T, function => {
            join::<T>(out, part(0), part(1), function);
            for rank in 2..ranks {
                fold::<T>(out, part(rank), function);
            }
        }, else ());
    }
    if op == ReduceOp::Avg {
        let size = u32::try_from(ranks).unwrap_or(u32::MAX);
        each::<T>(out, |element| element.divided(size));
    }
}

#[inline]
fn each<T: Element>(acc: &mut [u8], function: impl Fn(T) -> T) {
    for bytes in T::chunks_mut(acc) {
        *bytes = function(T::read(bytes)).write();
    }
}

#[inline]
fn write<T: Element>(out: &mut [u8], x: &[u8], function: impl Fn(T) -> T) {
    for (out, x) in T::chunks_mut(out).iter_mut().zip(T::chunks(x)) {
        *out = function(T::read(x)).write();
    }
}

#[inline]
fn fold<T: Element>(acc: &mut [u8], x: &[u8], function: impl Fn(T, T) -> T) {
    for (acc, x) in T::chunks_mut(acc).iter_mut().zip(T::chunks(x)) {
        *acc = function(T::read(acc), T::read(x)).write();
    }
}

#[inline]
fn join<T: Element>(out: &mut [u8], a: &[u8], b: &[u8], function: impl Fn(T, T) -> T) {
    let operands = T::chunks(a).iter().zip(T::chunks(b));
    for (out, (a, b)) in T::chunks_mut(out).iter_mut().zip(operands) {
        *out = function(T::read(a), T::read(b)).write();
    }
}

/// A type of elements as it lies in memory.
trait Element: Copy {
    type Bytes: Copy;

    fn chunks(bytes: &[u8]) -> &[Self::Bytes];
    fn chunks_mut(bytes: &mut [u8]) -> &mut [Self::Bytes];
    fn read(bytes: &Self::Bytes) -> Self;
    fn write(self) -> Self::Bytes;

    fn of_factor(factor: f64) -> Self;
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
    fn divided(self, size: u32) -> Self;
}

macro_rules! bytes_of {
    ($type:ty) => {
        type Bytes = [u8; size_of::<$type>()];

        #[inline]
        fn chunks(bytes: &[u8]) -> &[Self::Bytes] {
            bytes.as_chunks().0
        }

        #[inline]
        fn chunks_mut(bytes: &mut [u8]) -> &mut [Self::Bytes] {
            bytes.as_chunks_mut().0
        }

        #[inline]
        fn read(bytes: &Self::Bytes) -> Self {
            Self::from_ne_bytes(*bytes)
        }

        #[inline]
        fn write(self) -> Self::Bytes {
            self.to_ne_bytes()
        }
    };
}

macro_rules! floats {
    ($($type:ty, $rounded:path);*) => {$(
        impl Element for $type {
            bytes_of!($type);

            #[inline]
            fn of_factor(factor: f64) -> Self {
                $rounded(factor)
            }

            #[inline]
            fn add(self, other: Self) -> Self {
                self + other
            }

            #[inline]
            fn multiply(self, other: Self) -> Self {
                self * other
            }

            #[inline]
            fn least(self, other: Self) -> Self {
                if other < self || self.is_nan() { other } else { self }
            }

            #[inline]
            fn greatest(self, other: Self) -> Self {
                if other > self || self.is_nan() { other } else { self }
            }

            // Bits of floating-point numbers are not combined.
            fn and(self, _: Self) -> Self {
                self
            }

            fn or(self, _: Self) -> Self {
                self
            }

            fn xor(self, _: Self) -> Self {
                self
            }

            #[inline]
            fn divided(self, size: u32) -> Self {
                self / $rounded(f64::from(size))
            }
        }
    )*};
}

floats!(f64, std::convert::identity; f32, to_single);

#[expect(clippy::cast_possible_truncation, reason = "it is rounded to the type")]
fn to_single(value: f64) -> f32 {
    value as f32
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Element for $type {
            bytes_of!($type);

            #[inline]
            #[expect(clippy::cast_possible_truncation, reason = "casts of floats end at the ends of the type")]
            fn of_factor(factor: f64) -> Self {
                factor.round_ties_even() as $type
            }

            #[inline]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline]
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline]
            fn least(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline]
            fn greatest(self, other: Self) -> Self {
                self.max(other)
            }

            #[inline]
            fn and(self, other: Self) -> Self {
                self & other
            }

            #[inline]
            fn or(self, other: Self) -> Self {
                self | other
            }

            #[inline]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }

            #[inline]
            fn divided(self, size: u32) -> Self {
                // More ranks than the type can count leave nothing.
                <$type>::try_from(size).map_or(0, |size| self.checked_div(size).unwrap_or_default())
            }
        }
    )*};
}

integers!(i64, i32, i16, i8, u64, u32, u16, u8);

/// A byte that is 0 or 1.
#[derive(Clone, Copy)]
struct Truth(bool);

impl Element for Truth {
    type Bytes = u8;

    #[inline]
    fn chunks(bytes: &[u8]) -> &[u8] {
        bytes
    }

    #[inline]
    fn chunks_mut(bytes: &mut [u8]) -> &mut [u8] {
        bytes
    }

    #[inline]
    fn read(bytes: &u8) -> Self {
        Self(*bytes != 0)
    }

    #[inline]
    fn write(self) -> u8 {
        u8::from(self.0)
    }

    // Truth values are not added.
    fn of_factor(_: f64) -> Self {
        Self(true)
    }

    fn add(self, _: Self) -> Self {
        self
    }

    fn multiply(self, _: Self) -> Self {
        self
    }

    #[inline]
    fn least(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    #[inline]
    fn greatest(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    #[inline]
    fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    #[inline]
    fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    #[inline]
    fn xor(self, other: Self) -> Self {
        Self(self.0 ^ other.0)
    }

    fn divided(self, _: u32) -> Self {
        self
    }
}
