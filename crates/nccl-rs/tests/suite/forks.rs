//! A process made by `fork` is told so (C15).

use nccl_rs::{Communicator, CommunicatorConfig, CommunicatorDesc, Error, ReduceOp};

use crate::rig::{Rig, dst, src};

/// Runs a check in a forked process; whether it held.
#[cfg(unix)]
#[expect(unsafe_code, reason = "forks")]
fn holds_after_fork(check: impl FnOnce() -> bool) -> bool {
    use std::ffi::c_int;

    // SAFETY: the declarations are POSIX's.
    unsafe extern "C" {
        fn fork() -> c_int;
        fn _exit(code: c_int) -> !;
        fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    }

    // SAFETY: the child calls nothing but the check, which takes no lock that another thread may hold, and leaves.
    match unsafe { fork() } {
        0 => {
            let code = c_int::from(!check());
            // SAFETY: ends the child at once.
            unsafe { _exit(code) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: the child of this process; the result is written to this stack frame.
            let waited = unsafe { waitpid(pid, &raw mut status, 0) };
            waited == pid && status == 0
        }
    }
}

#[cfg(unix)]
#[test]
fn a_forked_process_is_told_so_and_its_drops_do_nothing() {
    let rig = Rig::new();
    let id = rig.nccl.unique_id().unwrap();
    rig.ranks(1, &CommunicatorConfig::new(), |rank| {
        let held = holds_after_fork(|| {
            let reduced = rank.comm.all_reduce(&src(&[1]), &mut dst(&mut [0]), ReduceOp::Sum, &rank.stream());
            let made = Communicator::init(&rig.nccl, &CommunicatorDesc::new(id, 0, 1)).map(drop);
            let answers =
                [reduced, made, rank.comm.check(), rig.nccl.unique_id().map(drop), rig.nccl.group(|| Ok(()))];
            let aborted = rank.comm.abort_handle().abort(std::time::Duration::ZERO);
            answers.iter().all(|answer| *answer == Err(Error::Forked)) && aborted == Err(Error::Forked)
        });
        assert!(held);
        assert!(rank.comm.check().is_ok());
    });
}
