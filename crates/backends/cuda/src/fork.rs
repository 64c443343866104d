//! Whether this process is still the one that opened the driver.
//!
//! A process made by `fork` has the driver's memory and none of its threads, nor of ours: a call may fail,
//! hang on a lock that nobody holds, or touch memory that was not inherited. So objects remember where they
//! were made, and in another process they answer without a lock and without the driver.

use std::sync::atomic::{AtomicU32, Ordering};

/// How often this process or an ancestor was the child of a fork, since the first driver was opened.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// What somebody is told who uses a driver of an ancestor.
pub(crate) const CAUSE: &str = "this process was made by fork after the CUDA driver was opened, and the driver does \
                                not work across a fork; open it in each process, or start processes without fork";

/// The process in which something was made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin {
    generation: u32,
}

impl Origin {
    /// This process, forks of which are noticed from now on.
    pub(crate) fn here() -> Self {
        watch();
        Self { generation: generation() }
    }

    /// Whether this is another process. Costs a load and a comparison.
    pub(crate) fn is_left(self) -> bool {
        self.generation != generation()
    }
}

/// Whether an ancestor opened the driver, so that it will not work here.
pub(crate) fn has_ancestors() -> bool {
    generation() != 0
}

fn generation() -> u32 {
    // Relaxed: it changes in the only thread of a new process, before anything else runs there.
    GENERATION.load(Ordering::Relaxed)
}

#[cfg(unix)]
#[expect(unsafe_code, reason = "asks the C library to be told of forks")]
fn watch() {
    use std::{ffi::c_int, sync::Once};

    type Handler = Option<unsafe extern "C" fn()>;

    // SAFETY: the declaration is POSIX's; every Unix C library has the function.
    unsafe extern "C" {
        fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
    }

    extern "C" fn count() {
        // Relaxed: see `generation`. An atomic is all that a handler may touch.
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }

    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the handler touches one atomic of this library. The C library forgets it when this library
        // is unloaded. Without memory for it forks are not noticed, which the driver then does in its way.
        let _registered = unsafe { pthread_atfork(None, None, Some(count)) };
    });
}

/// Elsewhere nothing forks.
#[cfg(not(unix))]
fn watch() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_not_left_itself() {
        assert!(!Origin::here().is_left() && !has_ancestors());
    }
}
