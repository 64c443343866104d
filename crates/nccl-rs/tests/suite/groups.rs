//! What must not happen to a communicator while a group holds it.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc,
    time::{Duration, Instant},
};

use nccl_rs::{Communicator, CommunicatorConfig, CommunicatorDesc, Error, ErrorClass, ReduceOp};

use crate::rig::{LIMIT, Rank, Rig, dst, src};

const SHORT: Duration = Duration::from_millis(20);

fn sum(rank: &Rank<'_>, comm: &Communicator, out: &mut [i32]) -> Result<(), Error> {
    comm.all_reduce(&src(&[1]), &mut dst(out), ReduceOp::Sum, &rank.stream())
}

/// One rank, and a group that ends with its communicator gone or refused; the library finds no fault with that.
fn one_rank(body: impl Fn(&Rig, Rank<'_>) + Sync) {
    for blocking in [false, true] {
        let rig = Rig::new();
        rig.ranks(1, &CommunicatorConfig::new().blocking(blocking), |rank| body(&rig, rank));
        assert_eq!(rig.library.calls("ncclGroupStart"), rig.library.calls("ncclGroupEnd"));
    }
}

#[test]
fn a_communicator_that_is_dropped_in_a_group_parts_at_its_end() {
    one_rank(|rig, mut rank| {
        let own = rank.replace_communicator(Communicator::init(
            &rig.nccl,
            &CommunicatorDesc::new(rig.nccl.unique_id().unwrap(), 0, 1),
        ));
        let mut out = [0];
        let ended = rig.nccl.group(|| {
            sum(&rank, &own, &mut out)?;
            drop(own);
            assert_eq!(rig.library.calls("ncclCommDestroy") + rig.library.calls("ncclCommAbort"), 0);
            Ok(())
        });
        assert_eq!(ended, Ok(()));
        assert_eq!(rig.library.calls("ncclCommDestroy") + rig.library.calls("ncclCommAbort"), 1);
        rank.synchronize();
        assert_eq!(out, [1]);
    });
}

#[test]
fn a_panic_in_a_group_ends_it_before_its_communicators_part() {
    one_rank(|rig, mut rank| {
        let own = rank.replace_communicator(Communicator::init(
            &rig.nccl,
            &CommunicatorDesc::new(rig.nccl.unique_id().unwrap(), 0, 1),
        ));
        let mut out = [0];
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            rig.nccl.group(|| -> Result<(), Error> {
                let own = own;
                sum(&rank, &own, &mut out).unwrap();
                panic!("on purpose")
            })
        }));
        assert!(panicked.is_err());
        rank.synchronize();
        assert_eq!(out, [1]);
    });
}

#[test]
fn nobody_gives_a_communicator_back_that_a_group_holds() {
    one_rank(|rig, rank| {
        let (handle, mut out) = (rank.comm.abort_handle(), [0]);
        let ended = rig.nccl.group(|| {
            sum(&rank, &rank.comm, &mut out)?;
            let refused = handle.abort(LIMIT).unwrap_err();
            assert_eq!(refused.to_string(), "ncclCommAbort cannot be called in a group");
            let handle = handle.clone();
            // From another thread, it is waited for.
            let aborted = std::thread::scope(|scope| scope.spawn(|| handle.abort(SHORT)).join().unwrap());
            assert_eq!(aborted, Err(Error::TimedOut { what: "a call that is under way", after: SHORT }));
            Ok(())
        });
        assert_eq!(ended, Ok(()));
        rank.synchronize();
        assert_eq!((out, handle.abort(LIMIT)), ([1], Ok(())));
    });
}

#[test]
fn finalizing_in_a_group_is_refused() {
    one_rank(|rig, mut rank| {
        let own = rank.replace_communicator(Communicator::init(
            &rig.nccl,
            &CommunicatorDesc::new(rig.nccl.unique_id().unwrap(), 0, 1),
        ));
        let mut out = [0];
        let ended = rig.nccl.group(|| {
            sum(&rank, &own, &mut out)?;
            own.finalize(LIMIT)
        });
        assert_eq!(ended.unwrap_err().class(), ErrorClass::Usage);
        rank.synchronize();
        assert_eq!(out, [1]);
    });
}

#[test]
fn communicators_are_not_made_in_a_group() {
    one_rank(|rig, rank| {
        let start = Instant::now();
        let config = CommunicatorConfig::new();
        let id = rig.nccl.unique_id().unwrap();
        let refused = |made: Result<(), Error>| assert_eq!(made.unwrap_err().class(), ErrorClass::Usage);
        rig.nccl
            .group(|| {
                refused(Communicator::init(&rig.nccl, &CommunicatorDesc::new(id, 0, 1)).map(drop));
                refused(rank.comm.split(Some(0), 0, &config).map(drop));
                refused(rank.comm.shrink(&[], nccl_rs::Shrink::Idle, &config).map(drop));
                Ok(())
            })
            .unwrap();
        assert!(start.elapsed() < LIMIT);
    });
}

#[test]
fn a_group_is_of_one_library() {
    one_rank(|rig, rank| {
        let other = Rig::new();
        let refused = other.nccl.group(|| sum(&rank, &rank.comm, &mut [0]));
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
        let refused = other.nccl.group(|| rig.nccl.group(|| Ok(())));
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
        let again = nccl_rs::Nccl::load_from(rig.library.path()).unwrap();
        assert_eq!(again.group(|| rig.nccl.group(|| Ok(7))), Ok(7));
    });
}

#[test]
fn a_communicator_that_a_thread_keeps_goes_with_the_thread() {
    use std::cell::RefCell;

    thread_local! {
        static KEPT: RefCell<Option<Communicator>> = const { RefCell::new(None) };
    }
    let rig = Rig::new();
    let (ended, has_ended) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            KEPT.set(None);
            rig.nccl.group(|| Ok(())).unwrap();
            let desc = CommunicatorDesc::new(rig.nccl.unique_id().unwrap(), 0, 1);
            KEPT.set(Some(Communicator::init(&rig.nccl, &desc).unwrap()));
            ended.send(()).unwrap();
        });
    });
    has_ended.recv().unwrap();
    let end = Instant::now() + LIMIT;
    while rig.library.calls("ncclCommDestroy") == 0 && Instant::now() < end {
        std::thread::yield_now();
    }
    assert_eq!(rig.library.calls("ncclCommDestroy"), 1);
}
