//! Records tell what was called, the same on all ranks.

use std::{thread, time::Duration};

use warpweft_comm::{CommConfig, EngineKind, FlightConfig};
use warpweft_core_types::{DType, ErrorClass, ReduceOp};

use crate::rig::{ENGINES, PATIENCE, only, ranks, read, told, until_failed};

#[test]
fn a_call_has_one_number_whether_it_is_waited_for_or_enqueued() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let (word, queue) = (place.numbers(&[1]), place.queue());
            for turn in 0..4 {
                let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
                if turn % 2 == place.rank() {
                    call.wait(PATIENCE).unwrap();
                } else {
                    call.on(&queue).unwrap().wait(PATIENCE).unwrap();
                }
            }
            assert_eq!(read(&word), [16]);
            let numbers: Vec<_> = place.comm.flight().calls.iter().map(|call| call.number).collect();
            assert_eq!(numbers, [Some(1), Some(2), Some(3), Some(4)], "{engine}");
        });
    }
}

#[test]
fn roots_and_others_call_the_same() {
    for engine in ENGINES {
        let texts = ranks(3, &CommConfig { validate: true, ..only(engine) }, |place| {
            let (comm, is_root) = (&place.comm, place.rank() == 1);
            let (own, all) = (place.numbers(&[place.rank()]), place.numbers(&[0, 1, 2]));
            comm.gather(1, DType::U32, &own, is_root.then_some(&all)).unwrap().wait(PATIENCE).unwrap();
            comm.scatter(1, DType::U32, is_root.then_some(&all), &own).unwrap().wait(PATIENCE).unwrap();
            assert_eq!(read(&own), [place.rank()]);
            comm.flight().calls.into_iter().map(|call| call.call).collect::<Vec<_>>()
        });
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    }
}

#[test]
fn groups_are_compared_by_what_all_ranks_call_in_them() {
    for engine in ENGINES {
        ranks(3, &CommConfig { validate: true, ..only(engine) }, |place| {
            let (comm, rank) = (&place.comm, place.rank());
            let (own, sum, passed) = (place.numbers(&[rank]), place.numbers(&[1]), place.numbers(&[9]));
            let all = || comm.all_reduce(ReduceOp::Sum, DType::U32, &sum, &sum).unwrap();
            // What is passed on is no other's affair, wherever it stands in the group.
            match rank {
                0 => comm.send(1, DType::U32, &own).unwrap().and(all()).wait(PATIENCE).unwrap(),
                1 => all().and(comm.recv(0, DType::U32, &passed).unwrap()).wait(PATIENCE).unwrap(),
                _ => all().wait(PATIENCE).unwrap(),
            }
            assert_eq!((read(&sum), read(&passed)), (vec![3], vec![if rank == 1 { 0 } else { 9 }]));
            // The second of a group counts as well.
            let odd = if rank == 2 { ReduceOp::Max } else { ReduceOp::Min };
            let other = comm.all_reduce(odd, DType::U32, &own, &own).unwrap();
            let (class, text) = told(all().and(other).wait(PATIENCE));
            assert_eq!(class, ErrorClass::Usage, "{text}");
            assert!(text.contains("max") && text.contains("min"), "{text}");
        });
    }
}

#[test]
fn calls_end_in_time_however_few_are_remembered() {
    for capacity in [0, 1, usize::MAX] {
        let flight = FlightConfig { capacity, folder: None };
        let timeout = Duration::from_millis(300);
        ranks(2, &CommConfig { flight, timeout, ..only(EngineKind::Planned) }, |place| {
            let (word, queue) = (place.numbers(&[1]), place.queue());
            if place.rank() == 1 {
                return until_failed(&place.comm);
            }
            // New calls do not make the first one younger.
            let calls = (0..1000).map(|_| {
                thread::yield_now();
                place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().on(&queue)
            });
            let _refused = calls.take_while(Result::is_ok).count();
            until_failed(&place.comm);
        });
    }
    let flight = FlightConfig { capacity: 2, folder: None };
    ranks(2, &CommConfig { flight, ..only(EngineKind::Host) }, |place| {
        let word = place.numbers(&[1]);
        for _ in 0..5 {
            place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().wait(PATIENCE).unwrap();
        }
        let numbers: Vec<_> = place.comm.flight().calls.iter().map(|call| call.number).collect();
        assert_eq!(numbers, [Some(4), Some(5)]);
    });
}
