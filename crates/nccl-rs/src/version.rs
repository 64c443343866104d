//! Versions of the library.

use std::fmt;

/// A version of NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// 2 in all that this crate works with.
    pub major: u32,
    /// Rises with each release.
    pub minor: u32,
    /// Rises with each repair.
    pub patch: u32,
}

impl Version {
    /// The oldest version that works.
    pub const MINIMUM: Self = Self::new(2, 18, 0);

    /// A version.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// What `ncclGetVersion` means: `NCCL_VERSION` in `nccl.h`, which counted in other digits up to 2.8.
    pub(crate) const fn from_code(code: u32) -> Self {
        let digit = if code < 10_000 { 1000 } else { 10_000 };
        Self::new(code / digit, code % digit / 100, code % 100)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_read_as_the_header_writes_them() {
        let check = |code, text: &str| assert_eq!(Version::from_code(code).to_string(), text);
        check(2708, "2.7.8");
        check(21903, "2.19.3");
        check(23203, "2.32.3");
        assert!(Version::from_code(21805) > Version::MINIMUM);
    }
}
