//! Several communicators and several threads.

use std::{sync::Arc, thread, time::Duration};

use warpweft_comm::{CommConfig, EngineKind};
use warpweft_core_types::{DType, ErrorClass, ReduceOp};

use warpweft_host::{HostBackend, HostDeviceConfig, LinkSpec};

use crate::rig::{ENGINES, PATIENCE, only, ranks, ranks_on, read, told};

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
fn two_threads_use_two_communicators_on_opposite_queues() {
    const CALLS: usize = 50;
    // A call of the host engine has a worker of its device until it is over.
    let two = HostDeviceConfig { workers: 2, ..HostDeviceConfig::default() };
    let backend =
        HostBackend::builder().devices(2, &two).link_all_to_host(LinkSpec::default()).build().unwrap();
    for engine in ENGINES {
        ranks_on(&backend, 2, &only(engine), |place| {
            let other = place.comm.split(Some(0), 0, PATIENCE).unwrap().unwrap();
            let mut queues = [place.queue(), place.queue()];
            if place.rank() == 1 {
                queues.reverse();
            }
            thread::scope(|scope| {
                for (comm, queue) in [&place.comm, &other].into_iter().zip(&queues) {
                    let words: Vec<_> = (0..CALLS).map(|_| place.numbers(&[1])).collect();
                    scope.spawn(move || {
                        let sum = |word| comm.all_reduce_in_place(ReduceOp::Sum, DType::U32, word).unwrap();
                        // Nothing is waited for in between, so that both are under way at once.
                        let made: Vec<_> = words.iter().map(|word| sum(word).on(queue).unwrap()).collect();
                        made.iter().for_each(|call| call.wait(PATIENCE).unwrap());
                        assert!(words.iter().all(|word| read(word) == [2]), "{engine}");
                    });
                }
            });
            place.comm.barrier(PATIENCE).unwrap();
        });
    }
}

#[test]
fn calls_that_have_one_worker_for_two_communicators_end_in_time() {
    let config = CommConfig { timeout: Duration::from_millis(300), ..only(EngineKind::Host) };
    ranks(2, &config, |place| {
        let other = place.comm.split(Some(0), 0, PATIENCE).unwrap().unwrap();
        let comms = if place.rank() == 0 { [&place.comm, &other] } else { [&other, &place.comm] };
        let word = [place.numbers(&[1]), place.numbers(&[1])];
        let call = |at: usize| {
            comms[at].all_reduce_in_place(ReduceOp::Sum, DType::U32, &word[at]).unwrap().on(&place.queue())
        };
        let first = call(0).unwrap();
        // Each rank's worker is in a call of another communicator before the second ones are there.
        place.comm.barrier(PATIENCE).unwrap();
        let ended = [call(1).and_then(|call| call.wait(PATIENCE)), first.wait(PATIENCE)];
        // With the end of one the workers are free for the other.
        let classes: Vec<_> = ended.into_iter().filter_map(Result::err).map(|error| error.class()).collect();
        let is_expected = |class: &ErrorClass| matches!(class, ErrorClass::Transient | ErrorClass::PeerLost);
        assert!(!classes.is_empty() && classes.iter().all(is_expected), "{classes:?}");
    });
}

#[test]
fn many_threads_call_one_communicator_that_compares() {
    for engine in ENGINES {
        ranks(2, &CommConfig { validate: true, ..only(engine) }, |place| {
            let call = |in_queue: bool| {
                let word = place.numbers(&[1]);
                let sum = place.comm.all_reduce_in_place(ReduceOp::Sum, DType::U32, &word).unwrap();
                if in_queue {
                    sum.on(&place.queue()).unwrap().wait(PATIENCE).unwrap();
                } else {
                    sum.wait(PATIENCE).unwrap();
                }
                assert_eq!(read(&word), [2], "{engine}");
            };
            thread::scope(|scope| {
                for thread in 0..4 {
                    let call = &call;
                    scope.spawn(move || (0..15).for_each(|turn| call((thread + turn) % 2 == 0)));
                }
            });
            let numbers = place.comm.flight().calls.into_iter().map(|call| call.number);
            assert!(numbers.eq((1..=60).map(Some)), "{engine}");
            place.comm.barrier(PATIENCE).unwrap();
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
