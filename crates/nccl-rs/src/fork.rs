//! Whether this process is still the one that loaded the library.

use std::sync::atomic::{AtomicU32, Ordering};

/// How often this process or an ancestor was the child of a fork, since forks are watched.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process in which something was made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin(u32);

impl Origin {
    /// This process, forks of which are noticed from now on.
    pub(crate) fn here() -> Self {
        watch();
        Self(generation())
    }

    /// Whether this is another process. Costs a load and a comparison.
    pub(crate) fn is_left(self) -> bool {
        self.0 != generation()
    }
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
        // SAFETY: the handler touches one atomic. Without memory for it forks are not noticed.
        let _registered = unsafe { pthread_atfork(None, None, Some(count)) };
    });
}

/// Elsewhere nothing forks.
#[cfg(not(unix))]
fn watch() {}
