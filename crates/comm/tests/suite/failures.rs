//! What goes wrong is told, in time, on every rank.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use warpweft_comm::{CommConfig, EngineKind, FlightConfig, FlightRecord, Verdict};
use warpweft_core_types::{
    Arg, CollectiveFailure, DType, ErrorClass, Failure, HostFunction, KernelCode, KernelContract, Launch, Op,
    Param, ReduceOp, Submission, Workgroup,
};

use crate::rig::{ENGINES, PATIENCE, only, ranks, read, told, until_failed};

/// What is bounded is over in it, on a machine that is busy with other things.
const SOON: Duration = Duration::from_secs(10);

#[test]
fn different_calls_are_told_to_all_and_the_communicator_goes_on() {
    for (engine, validate) in
        [(EngineKind::Host, false), (EngineKind::Host, true), (EngineKind::Planned, true)]
    {
        ranks(3, &CommConfig { validate, ..only(engine) }, |place| {
            let words = place.numbers(&[1, 1]);
            let op = if place.rank() == 2 { ReduceOp::Max } else { ReduceOp::Sum };
            let (class, text) =
                told(place.comm.all_reduce(op, DType::U32, &words, &words).unwrap().wait(PATIENCE));
            assert_eq!(class, ErrorClass::Usage, "{text}");
            assert!(text.contains("max") && text.contains("sum") && text.contains("rank 2"), "{text}");
            let half = if place.rank() == 1 { words.slice(0..4).unwrap() } else { words.clone() };
            let (class, text) =
                told(place.comm.all_reduce(ReduceOp::Sum, DType::U32, &half, &half).unwrap().wait(PATIENCE));
            assert_eq!(class, ErrorClass::Usage, "{text}");
            let gather = place.numbers(&[0; 6]);
            let other = if place.rank() == 0 {
                place.comm.all_gather(DType::U32, &words, &gather).unwrap().wait(PATIENCE)
            } else {
                place.comm.all_reduce(ReduceOp::Sum, DType::U32, &words, &words).unwrap().wait(PATIENCE)
            };
            assert_eq!(told(other).0, ErrorClass::Usage);
            let words = place.numbers(&[1, 1]);
            place.comm.all_reduce(ReduceOp::Sum, DType::U32, &words, &words).unwrap().wait(PATIENCE).unwrap();
            assert_eq!(read(&words), [3, 3], "{engine}");
            assert!(place.comm.failure().is_none());
        });
    }
}

#[test]
fn a_rank_that_leaves_ends_the_calls_of_the_others() {
    for engine in ENGINES {
        let started = Instant::now();
        ranks(3, &only(engine), |place| {
            if place.rank() == 1 {
                return;
            }
            let word = place.numbers(&[1]);
            let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
            let outcome = call.on(&place.queue()).and_then(|call| call.wait(PATIENCE));
            let (class, text) = told(outcome);
            assert_eq!(class, ErrorClass::PeerLost, "{engine}: {text}");
            assert!(!place.comm.is_healthy());
            let again = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
            assert_eq!(told(again.wait(PATIENCE)).0, ErrorClass::PeerLost);
        });
        assert!(started.elapsed() < SOON, "{engine}: {:?}", started.elapsed());
    }
}

#[test]
fn an_abort_ends_the_calls_of_all_a_hundred_times() {
    for _ in 0..100 {
        ranks(2, &CommConfig::default(), |place| {
            if place.rank() == 1 {
                place.comm.abort("enough").unwrap();
                assert!(matches!(
                    place.comm.failure().as_deref(),
                    Some(Failure::Collective(CollectiveFailure::Aborted { rank: 1, .. }))
                ));
                // Leaving is not what ends the other's call.
                place.comm.group().wait_health(PATIENCE, |_| true).unwrap();
            }
            let word = place.numbers(&[1]);
            let (class, text) =
                told(place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().wait(PATIENCE));
            assert_eq!(class, ErrorClass::PeerLost, "{text}");
        });
    }
}

#[test]
fn a_call_that_is_stuck_ends_on_all_ranks_and_the_records_name_who() {
    for engine in ENGINES {
        let folder = tempfile::tempdir().unwrap();
        let flight = FlightConfig { folder: Some(folder.path().to_owned()), ..FlightConfig::default() };
        let config = CommConfig { timeout: Duration::from_millis(200), flight, ..only(engine) };
        let ended = AtomicBool::new(false);
        ranks(3, &config, |place| {
            let word = place.numbers(&[1]);
            let sum = || place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
            sum().on(&place.queue()).unwrap().wait(PATIENCE).unwrap();
            if place.rank() == 2 {
                // It never calls, and waits until the others have told it.
                let deadline = Instant::now() + PATIENCE;
                while place.comm.is_healthy() && Instant::now() < deadline {
                    std::thread::yield_now();
                }
            } else {
                let (class, text) = told(sum().on(&place.queue()).unwrap().wait(PATIENCE));
                assert!(matches!(class, ErrorClass::Transient | ErrorClass::PeerLost), "{text}");
                ended.store(true, Ordering::Relaxed);
            }
            assert!(
                place.comm.failure().is_some(),
                "{:?} {:?}",
                place.comm.group().check(),
                place.comm.group().health()
            );
        });
        assert!(ended.into_inner());
        let records = FlightRecord::read_all(folder.path()).unwrap();
        assert_eq!(records.len(), 3);
        let verdict = Verdict::of(&records);
        assert!(
            matches!(&verdict, Verdict::Missing { ranks, number: 2, .. } if *ranks == [2]),
            "{verdict:?}"
        );
    }
}

#[test]
fn calls_that_differ_in_queues_are_told_and_none_meets_a_wrong_one() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let (words, queue) = ([1, 1, 1].map(|word| place.numbers(&[word])), place.queue());
            let sum = |op, view, queue| place.comm.all_reduce(op, DType::U32, view, view).unwrap().on(queue);
            let op = if place.rank() == 0 { ReduceOp::Sum } else { ReduceOp::Max };
            let first = sum(op, &words[0], &queue);
            // One rank calls again before it knows, the other may not.
            let second = sum(ReduceOp::Sum, &words[1], &queue);
            for call in [first, second] {
                assert!(call.and_then(|call| call.wait(PATIENCE)).is_err());
            }
            let other = sum(ReduceOp::Sum, &words[2], &place.queue()).and_then(|call| call.wait(PATIENCE));
            assert_eq!(other.is_ok(), engine == EngineKind::Host, "{other:?}");
            assert_eq!(read(&words[2]), [if engine == EngineKind::Host { 2 } else { 1 }]);
            if other.is_ok() {
                place.comm.barrier(PATIENCE).unwrap();
            }
        });
    }
}

#[test]
fn a_deadline_of_the_caller_s_leaves_the_call_under_way() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let word = place.numbers(&[1]);
            let queue = place.queue();
            if place.rank() == 1 {
                place.comm.group().barrier("the other has waited", PATIENCE).unwrap();
            }
            let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
            let call = call.on(&queue).unwrap();
            if place.rank() == 0 {
                let (class, text) = told(call.wait(Duration::from_millis(20)));
                assert_eq!(class, ErrorClass::Transient, "{text}");
                place.comm.group().barrier("the other has waited", PATIENCE).unwrap();
            }
            call.wait(PATIENCE).unwrap();
            assert_eq!(read(&word), [2], "{engine}");
        });
    }
}

#[test]
fn a_kernel_that_panics_on_one_rank_is_the_end_of_that_rank_for_the_others() {
    for engine in ENGINES {
        ranks(3, &only(engine), |place| {
            let (word, queue) = (place.numbers(&[1]), place.queue());
            if place.rank() == 1 {
                let contract = KernelContract::new("panics", [Param::write(4)]);
                let body = HostFunction::new(|_: &Workgroup<'_>| panic!("as it has to"));
                let code = KernelCode::new().with_function(contract, body);
                let kernel = place.device.load(&code).unwrap().kernel("panics").unwrap();
                let args = [Arg::Buffer(&word)];
                let ops = [Op::Launch(Launch::new(&kernel, [1, 1, 1], &args).unwrap())];
                queue.submit(&Submission { ops: &ops, ..Submission::default() }).unwrap();
            }
            let sum = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
            let (class, text) = told(sum.on(&queue).and_then(|call| call.wait(PATIENCE)));
            let own = if place.rank() == 1 { ErrorClass::Usage } else { ErrorClass::PeerLost };
            // The rank itself may be refused at once, and the others be told by it.
            assert!(class == own || place.rank() == 1, "{engine}, {}: {text}", place.rank());
            assert!(text.contains("panics"), "{text}");
            until_failed(&place.comm);
            let shrunk = place.comm.shrink(PATIENCE).unwrap();
            assert_eq!(shrunk.world_size(), 3);
        });
    }
}
