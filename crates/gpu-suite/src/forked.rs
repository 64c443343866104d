//! A process made by `fork`, which has this one's memory and none of its threads.

use std::{
    ffi::c_int,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

// SAFETY: the declarations are those of the C library.
#[expect(unsafe_code, reason = "the system's functions")]
unsafe extern "C" {
    safe fn fork() -> c_int;
    safe fn _exit(code: c_int) -> !;
}

/// Runs `body` in a forked process; what it returned there. It must not panic or print: the locks of either may
/// have been held by a thread that was not inherited.
pub(crate) fn run(limit: Duration, body: impl FnOnce() -> u8) -> Result<u8> {
    let child = fork();
    if child == 0 {
        _exit(body().into());
    }
    ensure!(child > 0, "there is no second process: {}", std::io::Error::last_os_error());
    let (child, began) = (Pid::from_raw(child).context("a process has a number")?, Instant::now());
    loop {
        if let Some((_, status)) = waitpid(Some(child), WaitOptions::NOHANG)? {
            let code = status.exit_status().with_context(|| format!("a signal ended it: {status:?}"))?;
            return Ok(u8::try_from(code)?);
        }
        if began.elapsed() > limit {
            kill_process(child, Signal::KILL)?;
            waitpid(Some(child), WaitOptions::empty())?;
            bail!("the forked process hangs");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_forked_process_returns_is_told() {
        assert_eq!(run(Duration::from_secs(60), || 7).unwrap(), 7);
        let hang = || -> u8 {
            loop {
                thread::sleep(Duration::from_secs(1));
            }
        };
        assert!(run(Duration::from_millis(20), hang).unwrap_err().to_string().contains("hangs"));
    }
}
