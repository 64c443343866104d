//! The clock of all host devices: the host's, counted from the first look.

use std::{sync::OnceLock, time::Instant};

/// Nanoseconds since the first call in this process.
pub(crate) fn now_ns() -> u64 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    let began = *BEGAN.get_or_init(Instant::now);
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
