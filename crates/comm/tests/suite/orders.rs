//! Several communicators and several threads.

use std::{sync::Arc, thread, time::Duration};

use warpweft_comm::{CommConfig, EngineKind};
use warpweft_core_types::{DType, ErrorClass, ReduceOp};

use crate::rig::{ENGINES, PATIENCE, only, ranks, read, told};

#[test]
fn two_threads_use_two_communicators() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let other = place.comm.split(Some(0), 0, PATIENCE).unwrap().unwrap();
            thread::scope(|scope| {
                for comm in [&place.comm, &other] {
                    let place = &place;
                    scope.spawn(move || {
                        let word = place.numbers(&[1]);
                        for turn in 1..=30 {
                            let sum = comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
                            sum.wait(PATIENCE).unwrap();
                            assert_eq!(read(&word), [1 << turn], "{engine}");
                        }
                    });
                }
            });
        });
    }
}

#[test]
fn opposite_orders_in_one_queue_end_in_time() {
    // What ranks enqueue in different orders waits for itself: an error names the call, and nobody hangs.
    let config = CommConfig { timeout: Duration::from_millis(300), ..only(EngineKind::Host) };
    ranks(2, &config, |place| {
        let other = place.comm.split(Some(0), 0, PATIENCE).unwrap().unwrap();
        let queue = place.queue();
        let (a, b) = (place.numbers(&[1]), place.numbers(&[1]));
        let first = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &a, &a).unwrap();
        let second = other.all_reduce(ReduceOp::Sum, DType::U32, &b, &b).unwrap();
        let calls = if place.rank() == 0 { [first, second] } else { [second, first] };
        let enqueued: Vec<_> = calls.into_iter().map(|call| call.on(&queue)).collect();
        let ended = enqueued.into_iter().map(|call| call.and_then(|call| call.wait(PATIENCE)));
        let errors: Vec<_> = ended.filter_map(Result::err).collect();
        assert!(!errors.is_empty());
        for error in errors {
            assert!(matches!(error.class(), ErrorClass::Transient | ErrorClass::PeerLost), "{error}");
        }
        place.comm.failure().or_else(|| other.failure()).unwrap();
    });
}

#[test]
fn many_threads_call_one_communicator() {
    ranks(2, &CommConfig::default(), |place| {
        let comm = Arc::new(&place.comm);
        thread::scope(|scope| {
            for _ in 0..4 {
                let (comm, place) = (Arc::clone(&comm), &place);
                scope.spawn(move || {
                    for _ in 0..50 {
                        let word = place.numbers(&[1]);
                        comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word)
                            .unwrap()
                            .wait(PATIENCE)
                            .unwrap();
                        assert_eq!(read(&word), [2]);
                    }
                });
            }
        });
    });
}

#[test]
fn sends_that_meet_nobody_end_by_name() {
    let config = CommConfig { timeout: Duration::from_millis(300), ..only(EngineKind::Host) };
    ranks(2, &config, |place| {
        let large = place.numbers(&vec![0; 1 << 20]);
        let peer = 1 - place.rank();
        let send = place.comm.send(peer, DType::U32, &large).unwrap();
        let (class, text) = told(send.on(&place.queue()).unwrap().wait(PATIENCE));
        assert!(matches!(class, ErrorClass::Transient | ErrorClass::PeerLost), "{text}");
        assert!(text.contains("send"), "{text}");
    });
}
