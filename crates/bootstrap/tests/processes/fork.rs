//! `fork`, which Rust's library does not have.

use std::ffi::c_int;

// SAFETY: the declaration is POSIX's.
#[expect(unsafe_code, reason = "the system's function")]
unsafe extern "C" {
    safe fn fork() -> c_int;
}

/// Zero in the new process, its number in the old one.
pub(crate) fn fork_process() -> i32 {
    fork()
}
