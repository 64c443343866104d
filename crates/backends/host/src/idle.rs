//! Spinning, allowed only while a core would otherwise be idle.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// The longest anyone spins before it sleeps: about what waking a sleeping thread costs.
const LONGEST_SPIN: Duration = Duration::from_micros(20);

/// Threads of this process that run device work or spin.
static BUSY: AtomicUsize = AtomicUsize::new(0);

static CORES: LazyLock<usize> =
    LazyLock::new(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));

/// Counts the thread as busy while it lives.
#[derive(Debug)]
pub(crate) struct Busy(());

impl Busy {
    /// For a thread that has work, whatever the others do.
    pub(crate) fn working() -> Self {
        // Relaxed here and below: a hint that orders nothing.
        BUSY.fetch_add(1, Ordering::Relaxed);
        Self(())
    }

    /// For a thread that wants to spin: only while `others` more cores are left for whoever it waits for.
    fn spinning(others: usize) -> Option<Self> {
        let taken = BUSY.fetch_add(1, Ordering::Relaxed) + 1;
        let permit = Self(());
        (taken + others <= *CORES).then_some(permit)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        BUSY.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Spins until `done` or the limit, and says whether it is done. `others` is how many threads that are not
/// counted as busy need a core meanwhile.
pub(crate) fn spin_until(others: usize, mut done: impl FnMut() -> bool) -> bool {
    let Some(_permit) = Busy::spinning(others) else {
        return done();
    };
    let end = Instant::now() + LONGEST_SPIN;
    loop {
        // Reading the clock costs as much as some twenty looks.
        for _ in 0..20 {
            if done() {
                return true;
            }
            std::hint::spin_loop();
        }
        if Instant::now() >= end {
            return false;
        }
    }
}
