//! What goes wrong in the library, in peers, and in time.

use std::{
    sync::mpsc,
    time::{Duration, Instant},
};

use nccl_rs::{Communicator, CommunicatorConfig, CommunicatorDesc, Error, ErrorClass, ReduceOp};
use warpweft_stand_in_nccl::StandIn;

use crate::rig::{LIMIT, Rig, dst, src};

#[test]
fn an_error_of_the_library_has_its_code_name_and_texts() {
    let rig = Rig::new();
    rig.library.fail("ncclAllReduce", 0, 1);
    rig.ranks(1, &CommunicatorConfig::new(), |rank| {
        let error = rank.comm.all_reduce(&src(&[1]), &mut dst(&mut [0]), ReduceOp::Sum, &rank.stream()).unwrap_err();
        let text = "ncclAllReduce returned 1 (ncclUnhandledCudaError): unhandled cuda error; ncclAllReduce was to fail";
        assert_eq!(error.to_string(), text);
        assert_eq!(error.class(), ErrorClass::Broken);
    });
}

#[test]
fn an_error_of_a_group_comes_at_its_end_and_the_group_is_closed() {
    let rig = Rig::new();
    rig.library.fail("ncclGroupEnd", 0, 3);
    rig.ranks(1, &CommunicatorConfig::new(), |rank| {
        let (comm, stream) = (&rank.comm, rank.stream());
        let mut out = [0];
        let grouped =
            comm.nccl().group(|| comm.all_reduce(&src(&[1]), &mut dst(&mut out), ReduceOp::Sum, &stream));
        assert!(
            matches!(grouped, Err(Error::Nccl(error)) if error.call == "ncclGroupEnd" && error.code == 3)
        );
    });
    rig.ranks(1, &CommunicatorConfig::new(), |rank| {
        let failed = rank.comm.nccl().group(|| Err::<(), _>(Error::PerThreadStream));
        assert_eq!(failed, Err(Error::PerThreadStream));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            rank.comm.nccl().group(|| -> Result<(), Error> { panic!("on purpose") })
        }));
        assert!(panicked.is_err());
        assert_eq!(rank.comm.nccl().group(|| Ok(7)), Ok(7));
    });
    assert_eq!(rig.library.calls("ncclGroupStart"), rig.library.calls("ncclGroupEnd"));
}

#[test]
fn asking_finds_an_error_that_came_later() {
    let rig = Rig::new();
    rig.ranks(2, &CommunicatorConfig::new(), |rank| {
        if rank.comm.rank() == 0 {
            assert_eq!(rank.comm.check(), Ok(()));
            return;
        }
        rig.library.set("async", "1:6");
        let Err(Error::Nccl(error)) = rank.comm.check() else { panic!("no error") };
        assert_eq!((error.code, error.name), (6, "ncclRemoteError"));
    });
}

/// C1: the watchdog aborts, the waiter gets an error with the library's code and text, and the drop is silent.
#[test]
fn a_watchdog_aborts_what_another_thread_waits_for() {
    let rig = Rig::over(StandIn::load().unwrap().with("stuck", "ncclAllReduce"));
    rig.ranks(1, &CommunicatorConfig::new(), |rank| {
        let watchdog = rank.comm.abort_handle();
        std::thread::scope(|scope| {
            let (begun, has_begun) = mpsc::channel();
            scope.spawn(move || {
                has_begun.recv().unwrap();
                watchdog.abort(LIMIT).unwrap();
                // A second time it does nothing.
                watchdog.abort(LIMIT).unwrap();
            });
            let (comm, stream) = (&rank.comm, rank.stream());
            begun.send(()).unwrap();
            let waited = comm.all_reduce(&src(&[1]), &mut dst(&mut [0]), ReduceOp::Sum, &stream);
            assert!(matches!(waited, Err(Error::Gone { state: "aborted", .. })), "{waited:?}");
        });
        let checked = rank.comm.check().unwrap_err();
        assert_eq!(checked.class(), ErrorClass::Broken);
    });
}

#[test]
fn whoever_aborts_a_broken_communicator_leaves_word_of_what_was_wrong() {
    let rig = Rig::new();
    rig.ranks(1, &CommunicatorConfig::new(), |rank| {
        rig.library.set("async", "0:2");
        rank.comm.abort_handle().abort(LIMIT).unwrap();
        let Err(Error::Gone { state: "aborted", cause: Some(cause) }) = rank.comm.check() else {
            panic!("{:?}", rank.comm.check())
        };
        assert_eq!((cause.code, cause.last.as_str()), (2, "a test wants this rank to fail"));
        assert!(rank.comm.check().unwrap_err().to_string().contains("ncclSystemError"));
    });
}

/// C4, as far as it is this crate's: every rank aborts and returns in time, again and again.
#[test]
fn all_ranks_abort_a_hundred_times() {
    let rig = Rig::new();
    for round in 0..100 {
        let start = Instant::now();
        rig.ranks(3, &CommunicatorConfig::new(), |rank| {
            if rank.comm.rank() != round % 3 {
                let mut out = [0];
                rank.comm.all_reduce(&src(&[1]), &mut dst(&mut out), ReduceOp::Sum, &rank.stream()).unwrap();
                rank.comm.abort_handle().abort(LIMIT).unwrap();
                rank.synchronize();
            } else {
                rank.comm.abort_handle().abort(LIMIT).unwrap();
            }
        });
        assert!(start.elapsed() < LIMIT);
    }
}

#[test]
fn an_abort_that_the_library_does_not_finish_is_left_behind() {
    let rig = Rig::over(StandIn::load().unwrap().with("abort_ms", "400"));
    rig.ranks(1, &CommunicatorConfig::new(), |rank| {
        let aborted = rank.comm.abort(Duration::from_millis(5));
        assert!(matches!(aborted, Err(Error::TimedOut { what: "ncclCommAbort", .. })));
    });
}

/// C12: one rank fails in init, the others get their time back.
#[test]
fn ranks_do_not_wait_for_good_for_one_that_fails_in_init() {
    for blocking in [false, true] {
        let rig = Rig::new();
        rig.library.fail("ncclCommInitRankConfig", 0, 1);
        let config = CommunicatorConfig::new().blocking(blocking).patience(Duration::from_millis(50));
        let id = rig.nccl.unique_id().unwrap();
        let ended = rig.threads(3, |number| {
            let desc = CommunicatorDesc::new(id, number, 3).config(config.clone());
            Communicator::init(&rig.nccl, &desc).unwrap_err()
        });
        let failed = ended.iter().filter(|error| matches!(error, Error::Nccl(_))).count();
        let timed_out = ended.iter().filter(|error| matches!(error, Error::TimedOut { .. })).count();
        assert_eq!((failed, timed_out), (1, 2), "{ended:?}");
    }
}

#[test]
fn two_ranks_of_one_number_are_refused() {
    let rig = Rig::new();
    let id = rig.nccl.unique_id().unwrap();
    let config = CommunicatorConfig::new().patience(Duration::from_millis(50));
    let ended = rig.threads(2, |_| {
        Communicator::init(&rig.nccl, &CommunicatorDesc::new(id, 0, 2).config(config.clone())).unwrap_err()
    });
    assert!(ended.iter().any(|error| matches!(error, Error::Nccl(error) if error.code == 5)), "{ended:?}");
}

#[test]
fn a_call_that_stays_in_progress_ends_for_its_caller() {
    let config = CommunicatorConfig::new().patience(Duration::from_millis(20));
    for call in ["ncclAllReduce", "ncclGroupEnd"] {
        let rig = Rig::over(StandIn::load().unwrap().with("stuck", call));
        rig.ranks(1, &config, |rank| {
            let (comm, stream) = (&rank.comm, rank.stream());
            let mut out = [0];
            let mut reduce = || comm.all_reduce(&src(&[1]), &mut dst(&mut out), ReduceOp::Sum, &stream);
            let ended = if call == "ncclGroupEnd" { comm.nccl().group(reduce) } else { reduce() };
            let Err(Error::TimedOut { what, .. }) = ended else { panic!("{ended:?}") };
            assert_eq!(what, call);
            rank.synchronize();
        });
    }
}

#[test]
fn a_dropped_communicator_with_work_that_never_ends_is_aborted() {
    let rig = Rig::new();
    let start = Instant::now();
    rig.ranks(2, &CommunicatorConfig::new(), |rank| {
        if rank.comm.rank() == 0 {
            let mut out = [0];
            rank.comm.all_reduce(&src(&[1]), &mut dst(&mut out), ReduceOp::Sum, &rank.stream()).unwrap();
            rank.drop_communicator();
        }
    });
    assert!(start.elapsed() < LIMIT);
    assert!(rig.library.calls("ncclCommAbort") >= 1);
}

/// Looks until something is so, for as long as anything may take.
fn comes(is_so: impl Fn() -> bool) -> bool {
    let end = Instant::now() + LIMIT;
    while !is_so() && Instant::now() < end {
        std::thread::yield_now();
    }
    is_so()
}

#[test]
fn what_blocks_for_good_does_not_keep_calls_and_drops() {
    let rig = Rig::new();
    let config = CommunicatorConfig::new().blocking(true).patience(Duration::from_millis(20));
    let (leave, left) = mpsc::channel();
    let left = std::sync::Mutex::new(left);
    rig.ranks(2, &config, |rank| {
        if rank.comm.rank() == 1 {
            left.lock().unwrap().recv().unwrap();
            return;
        }
        let split = rank.comm.split(Some(0), 0, &config);
        assert!(matches!(split, Err(Error::TimedOut { what: "ncclCommSplit", .. })), "{split:?}");
        let start = Instant::now();
        assert!(matches!(rank.comm.check(), Err(Error::TimedOut { .. })));
        let reduced = rank.comm.all_reduce(&src(&[1]), &mut dst(&mut [0]), ReduceOp::Sum, &rank.stream());
        assert!(matches!(reduced, Err(Error::TimedOut { .. })));
        assert!(rank.comm.as_raw().is_null());
        rank.drop_communicator();
        assert!(start.elapsed() < LIMIT / 4, "{:?}", start.elapsed());
        leave.send(()).unwrap();
    });
}

#[test]
fn a_communicator_that_comes_too_late_is_aborted() {
    let rig = Rig::new();
    let id = rig.nccl.unique_id().unwrap();
    let config = CommunicatorConfig::new().blocking(true);
    let short = config.clone().patience(Duration::from_millis(20));
    let late = Communicator::init(&rig.nccl, &CommunicatorDesc::new(id, 0, 2).config(short)).unwrap_err();
    assert_eq!(late.class(), ErrorClass::TimedOut);
    let peer = Communicator::init(&rig.nccl, &CommunicatorDesc::new(id, 1, 2).config(config)).unwrap();
    assert!(comes(|| rig.library.calls("ncclCommAbort") == 1));
    peer.abort(LIMIT).unwrap();
}

#[test]
fn a_window_that_comes_too_late_is_given_back_with_its_memory() {
    let rig = Rig::new();
    let config = CommunicatorConfig::new().blocking(true).patience(Duration::from_millis(50));
    let (made, is_made) = mpsc::channel();
    let is_made = std::sync::Mutex::new(is_made);
    rig.ranks(2, &config, |rank| {
        let memory = std::sync::Arc::new(nccl_rs::Memory::alloc(&rig.nccl, None, 4096).unwrap());
        if rank.comm.rank() == 0 {
            let late = rank.comm.window(&memory, nccl_rs::WindowKind::Plain).unwrap_err();
            assert_eq!(late.class(), ErrorClass::TimedOut);
            // Still in use by the library.
            assert_eq!(std::sync::Arc::strong_count(&memory), 2);
            made.send(()).unwrap();
            assert!(comes(|| std::sync::Arc::strong_count(&memory) == 1));
        } else {
            is_made.lock().unwrap().recv().unwrap();
            drop(rank.comm.window(&memory, nccl_rs::WindowKind::Plain).unwrap().unwrap());
        }
    });
    assert_eq!(rig.library.calls("ncclCommWindowDeregister"), 2);
}
