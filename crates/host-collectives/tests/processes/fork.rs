//! Forks, which Rust's library cannot.
#![expect(unsafe_code, reason = "there is no safe form")]

// SAFETY: it is declared as POSIX has it; `pid_t` and `int` are 32 bits wide on Linux.
unsafe extern "C" {
    fn fork() -> i32;
}

/// 0 in the new process, and its number in this one.
pub(crate) fn fork_process() -> i32 {
    // SAFETY: it takes nothing. The new process has this thread alone: it makes calls that take no lock of another
    // thread, writes a line and ends.
    unsafe { fork() }
}
