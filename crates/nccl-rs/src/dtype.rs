//! Types of elements, and how they are reduced.

use std::{ffi::c_int, fmt};

use crate::{error::Error, version::Version};

/// The type of a buffer's elements (`ncclDataType_t`).
///
/// There are no others: what is not here would have to be sent as something that it is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(missing_docs, reason = "their names say it")]
pub enum DataType {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
    /// 4 bits of exponent, 3 of mantissa; NCCL 2.24 or newer.
    F8E4M3,
    /// 5 bits of exponent, 2 of mantissa; NCCL 2.24 or newer.
    F8E5M2,
}

impl DataType {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::I8,
        Self::U8,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F16,
        Self::F32,
        Self::F64,
        Self::Bf16,
        Self::F8E4M3,
        Self::F8E5M2,
    ];

    /// The size of an element.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// `ncclDataType_t`: the place in [`Self::ALL`].
    pub(crate) const fn code(self) -> c_int {
        self as c_int
    }

    /// The first version that has it.
    pub(crate) const fn since(self) -> Version {
        match self {
            Self::F8E4M3 | Self::F8E5M2 => Version::new(2, 24, 0),
            _ => Version::MINIMUM,
        }
    }

    pub(crate) fn check(self, has: Version) -> Result<(), Error> {
        let needs = self.since();
        if has < needs { Err(Error::TooOld { what: self.name(), needs, has }) } else { Ok(()) }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::Bf16 => "bf16",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type with a [`DataType`].
///
/// # Safety
///
/// - A value is laid out as the element type says.
/// - Every bit pattern is a value: the library writes what it computes.
#[expect(unsafe_code, reason = "implementations vouch for a layout")]
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// What it is.
    const TYPE: DataType;
}

macro_rules! elements {
    ($($type:ty: $name:ident),*) => {$(
        // SAFETY: the two are the same number in the same format, and any bits are one.
        #[expect(unsafe_code, reason = "vouches for a layout")]
        unsafe impl Element for $type {
            const TYPE: DataType = DataType::$name;
        }
    )*};
}

elements!(i8: I8, u8: U8, i32: I32, u32: U32, i64: I64, u64: U64, f32: F32, f64: F64);

#[cfg(feature = "half")]
elements!(half::f16: F16, half::bf16: Bf16);

/// How elements of all ranks become one (`ncclRedOp_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[expect(missing_docs, reason = "their names say it")]
pub enum ReduceOp {
    /// Of integers, with wrap-around.
    Sum,
    /// Of integers, with wrap-around.
    Prod,
    Max,
    Min,
    /// The sum, divided by the number of ranks; of integers, towards zero.
    Avg,
}

impl ReduceOp {
    /// All of them, in the order of `ncclRedOp_t`.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Prod, Self::Max, Self::Min, Self::Avg];

    pub(crate) const fn code(self) -> c_int {
        self as c_int
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_header() {
        for (code, dtype) in (0..).zip(DataType::ALL) {
            assert_eq!(dtype.code(), code, "{dtype}");
        }
        for (code, op) in (0..).zip(ReduceOp::ALL) {
            assert_eq!(op.code(), code, "{op:?}");
        }
    }

    #[test]
    fn small_floats_need_a_newer_library() {
        let old = Version::new(2, 18, 5);
        assert!(DataType::F8E4M3.check(old).is_err() && DataType::F32.check(old).is_ok());
        assert!(DataType::F8E5M2.check(Version::new(2, 24, 3)).is_ok());
    }
}
