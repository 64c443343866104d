//! Elements as numbers, and how they are reduced.

use float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

use crate::Code;

/// `ncclDataType_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DataType(pub(crate) i32);

impl DataType {
    pub(crate) const fn size(self) -> Option<usize> {
        Some(match self.0 {
            0 | 1 | 10 | 11 => 1,
            6 | 9 => 2,
            2 | 3 | 7 => 4,
            4 | 5 | 8 => 8,
            _ => return None,
        })
    }
}

/// How elements are reduced: `ncclRedOp_t`, with the factor of one that has one.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Op {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
    /// The factor's bytes.
    Premul(Vec<u8>),
}

impl Op {
    pub(crate) const fn built_in(code: i32) -> Option<Self> {
        Some(match code {
            0 => Self::Sum,
            1 => Self::Prod,
            2 => Self::Max,
            3 => Self::Min,
            4 => Self::Avg,
            _ => return None,
        })
    }
}

/// Types that are computed with as they are.
trait Number: Copy {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn divide(self, by: usize) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
            fn divide(self, by: usize) -> Self {
                <$type>::try_from(by).map_or(0, |by| self.wrapping_div(by))
            }
        }
    )*};
}

integers!(i8, u8, i32, u32, i64, u64);

macro_rules! floats {
    ($($type:ty, $from:expr;)*) => {$(
        impl Number for $type {
            fn add(self, other: Self) -> Self {
                self + other
            }
            fn multiply(self, other: Self) -> Self {
                self * other
            }
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
            fn divide(self, by: usize) -> Self {
                self / $from(u16::try_from(by).unwrap_or(u16::MAX))
            }
        }
    )*};
}

floats! {
    f32, f32::from;
    f64, f64::from;
    f16, |by: u16| f16::from_f32(by.into());
    bf16, |by: u16| bf16::from_f32(by.into());
}

macro_rules! small_floats {
    ($($type:ty),*) => {$(
        impl Number for $type {
            fn add(self, other: Self) -> Self {
                Self::from_f32(self.to_f32() + other.to_f32())
            }
            fn multiply(self, other: Self) -> Self {
                Self::from_f32(self.to_f32() * other.to_f32())
            }
            fn larger(self, other: Self) -> Self {
                Self::from_f32(self.to_f32().max(other.to_f32()))
            }
            fn smaller(self, other: Self) -> Self {
                Self::from_f32(self.to_f32().min(other.to_f32()))
            }
            fn divide(self, by: usize) -> Self {
                Self::from_f32(self.to_f32() / f32::from(u16::try_from(by).unwrap_or(u16::MAX)))
            }
        }
    )*};
}

small_floats!(F8E4M3, F8E5M2);

/// Reduces the elements of all ranks, in the order of ranks; each with its rank's operation.
pub(crate) fn reduce(dtype: DataType, ranks: &[(Vec<u8>, Op)]) -> Result<Vec<u8>, Code> {
    macro_rules! with {
        ($type:ty) => {
            reduce_as(
                ranks,
                |bytes: &[u8]| {
                    let bytes = bytes.try_into().unwrap_or_default();
                    <$type>::from_ne_bytes(bytes)
                },
                |number, place: &mut [u8]| place.copy_from_slice(&number.to_ne_bytes()),
                size_of::<$type>(),
            )
        };
    }
    macro_rules! with_small {
        ($type:ty) => {
            reduce_as(
                ranks,
                |bytes: &[u8]| <$type>::from_bits(bytes[0]),
                |number, place: &mut [u8]| place[0] = number.to_bits(),
                1,
            )
        };
    }
    Ok(match dtype.0 {
        0 => with!(i8),
        1 => with!(u8),
        2 => with!(i32),
        3 => with!(u32),
        4 => with!(i64),
        5 => with!(u64),
        6 => with!(f16),
        7 => with!(f32),
        8 => with!(f64),
        9 => with!(bf16),
        10 => with_small!(F8E4M3),
        11 => with_small!(F8E5M2),
        _ => return Err(Code::INVALID_ARGUMENT),
    })
}

fn reduce_as<T: Number>(
    ranks: &[(Vec<u8>, Op)],
    read: impl Fn(&[u8]) -> T,
    write: impl Fn(T, &mut [u8]),
    size: usize,
) -> Vec<u8> {
    let Some((first, op)) = ranks.first() else { return Vec::new() };
    let element = |at: usize, bytes: &[u8], op: &Op| {
        let number = read(&bytes[at..at + size]);
        if let Op::Premul(factor) = op { number.multiply(read(factor)) } else { number }
    };
    let one = |at: usize| {
        let others = ranks.iter().skip(1).map(|(bytes, op)| element(at, bytes, op));
        let all = others.fold(element(at, first, op), |sum, next| match op {
            Op::Prod => sum.multiply(next),
            Op::Max => sum.larger(next),
            Op::Min => sum.smaller(next),
            Op::Sum | Op::Avg | Op::Premul(_) => sum.add(next),
        });
        if *op == Op::Avg { all.divide(ranks.len()) } else { all }
    };
    let mut all = vec![0; first.len()];
    for at in (0..all.len()).step_by(size) {
        write(one(at), &mut all[at..at + size]);
    }
    all
}
