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

/// Workers of this process that run device work or spin for more.
static WORKERS: AtomicUsize = AtomicUsize::new(0);

/// Threads of the program that spin for work to end.
static WAITERS: AtomicUsize = AtomicUsize::new(0);

static CORES: LazyLock<usize> =
    LazyLock::new(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));

/// Counts a thread as busy while it lives.
#[derive(Debug)]
pub(crate) struct Busy(&'static AtomicUsize);

impl Busy {
    /// For a thread that runs device work, whatever the others do.
    pub(crate) fn working() -> Self {
        // Relaxed here and below: a hint that orders nothing.
        WORKERS.fetch_add(1, Ordering::Relaxed);
        Self(&WORKERS)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Who wants to spin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spinner {
    /// A worker, for work. One core is left for the thread of the program that will bring it.
    Worker,
    /// A thread of the program, for work to end.
    Waiter,
}

impl Spinner {
    /// A permit while cores are left over.
    fn permit(self) -> Option<Busy> {
        let (own, programs_least) = match self {
            Self::Worker => (&WORKERS, 1),
            Self::Waiter => (&WAITERS, 0),
        };
        own.fetch_add(1, Ordering::Relaxed);
        let permit = Busy(own);
        let waiters = WAITERS.load(Ordering::Relaxed).max(programs_least);
        (WORKERS.load(Ordering::Relaxed) + waiters <= *CORES).then_some(permit)
    }
}

/// Spins until `done` or the limit, and says whether it is done.
pub(crate) fn spin_until(spinner: Spinner, mut done: impl FnMut() -> bool) -> bool {
    let Some(_permit) = spinner.permit() else {
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
