//! Quantities with their unit in the type.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A number of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `count` kibibytes (1,024 bytes each).
    pub const fn kib(count: u64) -> Self {
        Self(count << 10)
    }

    /// `count` mebibytes (1,024 KiB each).
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// `count` gibibytes (1,024 MiB each).
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }

    /// The length of a Rust object or slice.
    pub const fn of_len(len: usize) -> Self {
        Self(len as u64)
    }
}

impl fmt::Display for Bytes {
    /// Writes the largest binary unit with at most one decimal: `1.5 MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let exponent = (63 - self.0.leading_zeros()) / 10;
        let whole = 1_u64 << (10 * exponent);
        let unit = UNITS[exponent as usize - 1];
        if self.0.is_multiple_of(whole) {
            write!(f, "{} {unit}", self.0 / whole)
        } else {
            write!(f, "{:.1} {unit}", self.0 as f64 / whole as f64)
        }
    }
}

/// Bytes per second, in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bandwidth {
    /// Gigabytes (10^9 bytes) per second, the unit vendors and nccl-tests use.
    pub gb_per_s: f64,
}

impl Bandwidth {
    /// `value` times 10^9 bytes per second.
    pub const fn from_gb_per_s(value: f64) -> Self {
        Self { gb_per_s: value }
    }

    /// Nanoseconds that `bytes` need at this rate; infinite for a rate of zero.
    pub fn transfer_ns(self, bytes: Bytes) -> f64 {
        bytes.0 as f64 / self.gb_per_s
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} GB/s", self.gb_per_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_as_people_write_them() {
        let check = |bytes: Bytes, text: &str| assert_eq!(bytes.to_string(), text);
        check(Bytes(0), "0 B");
        check(Bytes(1023), "1023 B");
        check(Bytes::kib(1), "1 KiB");
        check(Bytes(1536 << 10), "1.5 MiB");
        check(Bytes::gib(141), "141 GiB");
        check(Bytes(u64::MAX), "16.0 EiB");
    }

    #[test]
    fn a_gigabyte_at_one_gigabyte_a_second_takes_a_second() {
        assert_eq!(Bandwidth::from_gb_per_s(1.0).transfer_ns(Bytes(1_000_000_000)), 1e9);
        assert!(Bandwidth::default().transfer_ns(Bytes(1)).is_infinite());
    }
}
