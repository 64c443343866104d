//! Forks, which Rust's library cannot.
#![expect(unsafe_code, reason = "there is no safe form")]

use std::time::Duration;

use warpweft_comm::{CommError, EngineKind};
use warpweft_core_types::{DType, ErrorClass, ReduceOp};

use crate::rig::{PATIENCE, only, ranks, read};

// SAFETY: they are declared as POSIX has them; `pid_t` and `int` are 32 bits wide on Linux.
unsafe extern "C" {
    safe fn fork() -> i32;
    safe fn waitpid(process: i32, status: Option<&mut i32>, options: i32) -> i32;
    safe fn _exit(code: i32) -> !;
}

#[test]
fn a_fork_is_told_so_and_ends_and_leaves_the_others_alone() {
    ranks(2, &only(EngineKind::Host), |place| {
        let word = place.numbers(&[1]);
        let sum = || place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
        if place.rank() == 0 {
            let child = fork();
            if child == 0 {
                let is_told = |error: &CommError| {
                    error.class() == ErrorClass::Usage && format!("{error:?}").contains("Forked")
                };
                let waited = sum().wait(Duration::from_secs(1));
                let met = place.comm.barrier(Duration::from_secs(1));
                let are_told = [waited, met].iter().all(|end| end.as_ref().is_err_and(is_told));
                drop(place);
                _exit(i32::from(!are_told));
            }
            let mut status = -1;
            assert_eq!(waitpid(child, Some(&mut status), 0), child);
            assert_eq!(status, 0, "the fork was not told, or panicked");
        }
        sum().wait(PATIENCE).unwrap();
        assert_eq!(read(&word), [2]);
    });
}
