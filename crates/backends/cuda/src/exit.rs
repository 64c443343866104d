//! The end of the process, for what other threads are still giving back to libraries.

use std::{
    ffi::c_int,
    sync::{Condvar, Mutex, Once, PoisonError},
    time::Duration,
};

/// How many things are being given back.
static PARTING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Something of a library's that is given back, by whichever thread. A process that ends waits for it: the library's own
/// end would pull it from under that thread.
#[derive(Debug)]
pub(crate) struct Parting;

impl Parting {
    pub(crate) fn begin() -> Self {
        static AT_EXIT: Once = Once::new();
        AT_EXIT.call_once(at_exit);
        *PARTING.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self
    }
}

impl Drop for Parting {
    fn drop(&mut self) {
        *PARTING.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        PARTING.1.notify_all();
    }
}

/// Has the end of the process wait. The libraries were loaded before, and so end later.
#[expect(unsafe_code, reason = "asks the C library to be told of the end")]
fn at_exit() {
    // SAFETY: the declaration is C's; every C library has the function.
    unsafe extern "C" {
        fn atexit(handler: extern "C" fn()) -> c_int;
    }

    /// Longer than a communicator takes to part, and a context to go.
    const LONGEST: Duration = Duration::from_secs(3);
    extern "C" fn wait() {
        let parting = PARTING.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _waited = PARTING.1.wait_timeout_while(parting, LONGEST, |parting| *parting > 0);
    }

    // SAFETY: the handler is there as long as the process, does not panic and returns. If it cannot be registered,
    // nothing waits.
    let _registered = unsafe { atexit(wait) };
}
