//! Ranks that call something else, do not come, leave, abort or panic.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use warpweft_core_types::{CollectiveFailure, CollectiveOp, DType, ReduceOp};
use warpweft_host_collectives::{
    CustomReduction, HostCommunicator, HostConfig, HostError, HostFailure, SliceCall, Slices,
};

use crate::rig::{WITHIN, at_once, by_slots, communicators, directly, each, groups, met};

fn call(
    communicator: &HostCommunicator,
    op: CollectiveOp,
    dtype: DType,
    values: &mut [u8],
    within: Duration,
) -> Result<(), HostFailure> {
    let operands = Slices::InPlace(values);
    communicator.run_slices(&mut [SliceCall { op, dtype, operands, custom: None }], within)
}

fn sum(communicator: &HostCommunicator, values: &mut [u8], within: Duration) -> Result<(), HostFailure> {
    call(communicator, CollectiveOp::AllReduce(ReduceOp::Sum), DType::U8, values, within)
}

fn failure(failure: HostFailure) -> CollectiveFailure {
    match failure {
        HostFailure::Collective(failure) => failure,
        other => panic!("{other}"),
    }
}

fn configs() -> [HostConfig; 4] {
    [by_slots(), directly(), at_once(), HostConfig::default()]
}

#[test]
fn a_different_call_is_named_on_all_ranks_and_the_communicator_goes_on() {
    let sum_of = |dtype: DType| (CollectiveOp::AllReduce(ReduceOp::Sum), dtype);
    let calls = [
        (sum_of(DType::U8), 800, "rank 1 called all_reduce sum of 800 bytes of u8"),
        (sum_of(DType::F32), 404, "rank 1 called all_reduce sum of 404 bytes of f32"),
        (
            (CollectiveOp::AllReduce(ReduceOp::Max), DType::F32),
            800,
            "rank 1 called all_reduce max of 800 bytes of f32",
        ),
        (
            (CollectiveOp::Broadcast { root: 1 }, DType::F32),
            800,
            "rank 1 called broadcast at rank 1 of 800 bytes of f32",
        ),
    ];
    for config in configs() {
        for ((op, dtype), bytes, text) in calls {
            let failures = each(met(3, &config), |communicator| {
                sum(&communicator, &mut [1; 90], WITHIN).unwrap();
                let mut values = vec![1; if communicator.rank() == 1 { bytes } else { 800 }];
                let (op, dtype) = if communicator.rank() == 1 { (op, dtype) } else { sum_of(DType::F32) };
                let mismatch = failure(call(&communicator, op, dtype, &mut values, WITHIN).unwrap_err());
                let mut values = [1; 90];
                sum(&communicator, &mut values, WITHIN).unwrap();
                assert_eq!(values, [3; 90]);
                assert_eq!(communicator.failure(), None);
                mismatch
            });
            let what = format!("ranks 0, 2 called all_reduce sum of 800 bytes of f32; {text}");
            assert_eq!(failures, vec![CollectiveFailure::Mismatch { number: 2, what }; 3]);
        }
    }
}

#[test]
fn a_barrier_differs_from_an_operation() {
    let failures = each(met(2, &HostConfig::default()), |communicator| {
        let outcome = match communicator.rank() {
            0 => communicator.barrier(WITHIN),
            _ => sum(&communicator, &mut [1], WITHIN),
        };
        communicator.barrier(WITHIN).unwrap();
        failure(outcome.unwrap_err())
    });
    let what = "rank 0 called barrier; rank 1 called all_reduce sum of 1 bytes of u8".into();
    assert_eq!(failures, vec![CollectiveFailure::Mismatch { number: 1, what }; 2]);
}

#[test]
fn the_other_calls_of_a_group_are_carried_out_after_one_that_differs() {
    each(met(2, &by_slots()), |communicator| {
        let (mut first, mut second) = (vec![1; 8 << communicator.rank()], [1; 8]);
        let op = CollectiveOp::AllReduce(ReduceOp::Sum);
        let of = |values| SliceCall { op, dtype: DType::U8, operands: Slices::InPlace(values), custom: None };
        let outcome = communicator.run_slices(&mut [of(&mut first), of(&mut second)], WITHIN);
        assert!(matches!(failure(outcome.unwrap_err()), CollectiveFailure::Mismatch { number: 1, .. }));
        assert_eq!(second, [2; 8]);
    });
}

#[test]
fn reductions_of_callers_differ_by_name() {
    let failures = each(met(2, &at_once()), |communicator| {
        let custom =
            CustomReduction::new(format!("mine {}", communicator.rank()), |_: &mut [u8], _: &[u8]| {});
        let mut values = [0; 8];
        let (op, operands) = (CollectiveOp::AllReduce(ReduceOp::Sum), Slices::InPlace(&mut values));
        let call = SliceCall { op, dtype: DType::U8, operands, custom: Some(&custom) };
        failure(communicator.run_slices(&mut [call], WITHIN).unwrap_err())
    });
    assert!(matches!(failures[0], CollectiveFailure::Mismatch { .. }), "{failures:?}");
    assert_eq!(failures[0], failures[1]);
}

#[test]
fn whoever_does_not_come_is_named_to_all() {
    for config in configs() {
        let communicators = met(4, &config);
        let failures = each(communicators[..2].to_vec(), |communicator| {
            failure(sum(&communicator, &mut [1; 1000], Duration::from_millis(30)).unwrap_err())
        });
        let CollectiveFailure::TimedOut { number: 1, op, waiting, after } = &failures[0] else {
            panic!("{failures:?}")
        };
        assert_eq!((op.as_str(), waiting.as_str()), ("all_reduce sum", "ranks 2, 3 have not come"));
        assert!(*after >= Duration::from_millis(1), "{after:?}");
        assert_eq!(failures[0], failures[1]);
        // Those who come later are told the same.
        for communicator in &communicators {
            assert_eq!(failure(communicator.barrier(WITHIN).unwrap_err()), failures[0]);
            assert_eq!(communicator.failure().as_ref(), Some(&failures[0]));
        }
    }
}

#[test]
fn whoever_drops_its_communicator_is_lost_to_those_who_wait_for_it() {
    for config in configs() {
        let mut communicators = met(3, &config);
        let leaving = communicators.remove(1);
        // What it has done before it leaves counts.
        let (leaving, others) = thread::scope(|scope| {
            let leaving = scope.spawn(|| {
                sum(&leaving, &mut [1; 500], WITHIN).unwrap();
                leaving
            });
            each(communicators.clone(), |communicator| sum(&communicator, &mut [1; 500], WITHIN).unwrap());
            (leaving.join().unwrap(), communicators.clone())
        });
        let begun = Barrier::new(3);
        let failures = thread::scope(|scope| {
            scope.spawn(|| {
                begun.wait();
                drop(leaving);
            });
            each(others, |communicator| {
                begun.wait();
                failure(sum(&communicator, &mut [1; 500], WITHIN).unwrap_err())
            })
        });
        let lost = CollectiveFailure::PeerLost { rank: 1, how: "it left the communicator".into() };
        assert_eq!(failures, vec![lost; 2]);
    }
}

#[test]
fn whoever_needs_nothing_of_a_rank_that_left_goes_on() {
    let mut communicators = met(3, &by_slots());
    drop(communicators.remove(2));
    each(communicators, |communicator| {
        let other = 1 - communicator.rank();
        let (src, mut dst) = ([communicator.rank() as u8; 1000], [9; 1000]);
        let mut calls = [
            SliceCall {
                op: CollectiveOp::Send { to: other },
                dtype: DType::U8,
                operands: Slices::Src(&src),
                custom: None,
            },
            SliceCall {
                op: CollectiveOp::Recv { from: other },
                dtype: DType::U8,
                operands: Slices::Dst(&mut dst),
                custom: None,
            },
        ];
        communicator.run_slices(&mut calls, WITHIN).unwrap();
        assert_eq!(dst, [other as u8; 1000]);
    });
}

#[test]
fn what_was_sent_before_leaving_is_received() {
    let mut communicators = met(2, &by_slots());
    let receiver = communicators.remove(1);
    let sender = communicators.remove(0);
    let send = SliceCall {
        op: CollectiveOp::Send { to: 1 },
        dtype: DType::U8,
        operands: Slices::Src(&[5; 200]),
        custom: None,
    };
    sender.run_slices(&mut [send], WITHIN).unwrap();
    drop(sender);
    fn recv(dst: &mut [u8]) -> SliceCall<'_> {
        let op = CollectiveOp::Recv { from: 0 };
        SliceCall { op, dtype: DType::U8, operands: Slices::Dst(dst), custom: None }
    }
    let mut got = [0; 200];
    receiver.run_slices(&mut [recv(&mut got)], WITHIN).unwrap();
    assert_eq!(got, [5; 200]);
    let lost = receiver.run_slices(&mut [recv(&mut got)], WITHIN).unwrap_err();
    assert!(matches!(failure(lost), CollectiveFailure::PeerLost { rank: 0, .. }));
}

#[test]
fn an_abort_from_another_thread_ends_all() {
    for config in configs() {
        let communicators = met(3, &config);
        let reason = CollectiveFailure::Aborted { rank: 2, reason: "enough".into() };
        let begun = Barrier::new(3);
        let failures = thread::scope(|scope| {
            scope.spawn(|| {
                begun.wait();
                communicators[2].abort(reason.clone());
            });
            each(communicators[..2].to_vec(), |communicator| {
                begun.wait();
                failure(sum(&communicator, &mut [1; 5000], WITHIN).unwrap_err())
            })
        });
        assert_eq!(failures, vec![reason.clone(); 2]);
        // The first one counts.
        communicators[0].abort(CollectiveFailure::Aborted { rank: 0, reason: "later".into() });
        assert_eq!(failure(communicators[2].barrier(WITHIN).unwrap_err()), reason);
    }
}

#[test]
fn an_abort_of_the_own_rank_ends_its_call() {
    let communicators = met(2, &HostConfig::default());
    let begun = Barrier::new(2);
    let reason = CollectiveFailure::Aborted { rank: 0, reason: "x".repeat(5000) };
    let outcome = thread::scope(|scope| {
        scope.spawn(|| {
            begun.wait();
            communicators[0].abort(reason);
        });
        begun.wait();
        communicators[0].barrier(WITHIN)
    });
    // As much of the reason as fits.
    let CollectiveFailure::Aborted { rank: 0, reason } = failure(outcome.unwrap_err()) else { panic!() };
    assert!(reason.len() > 100 && reason.bytes().all(|byte| byte == b'x'));
}

#[test]
fn an_abort_of_the_group_ends_calls() {
    let groups = groups(2);
    let communicators = communicators(&groups, &HostConfig::default());
    let begun = Barrier::new(2);
    let outcome = thread::scope(|scope| {
        scope.spawn(|| {
            begun.wait();
            groups[1].abort("over").unwrap();
        });
        begun.wait();
        communicators[0].barrier(WITHIN)
    });
    assert_eq!(failure(outcome.unwrap_err()), CollectiveFailure::Aborted { rank: 1, reason: "over".into() });
}

/// Aborts come at any moment of operations between operands; afterwards every rank overwrites its own and checks that
/// nobody else does.
#[test]
fn nobody_touches_operands_of_a_rank_whose_call_has_failed() {
    for round in 0..15 {
        let communicators = met(3, &directly());
        let returned = Barrier::new(3);
        thread::scope(|scope| {
            for communicator in &communicators {
                scope.spawn(|| {
                    let mut values = vec![1_u8; 300_000 + 7 * round];
                    let failed = loop {
                        if let Err(failed) = sum(communicator, &mut values, WITHIN) {
                            break failed;
                        }
                    };
                    values.fill(77);
                    assert!(matches!(failure(failed), CollectiveFailure::Aborted { .. }));
                    returned.wait();
                    assert!(values.iter().all(|value| *value == 77));
                });
            }
            while communicators[0].progress()[0].ended < 1 + round as u64 % 7 {
                thread::yield_now();
            }
            communicators[round % 3].abort(CollectiveFailure::Aborted { rank: 0, reason: "now".into() });
        });
    }
}

/// Rank 1 is held where it is about to write rank 0's operand, while rank 0 is told to end.
#[test]
fn a_failing_rank_waits_until_nobody_is_where_its_operands_are() {
    let communicators = met(2, &directly());
    let [is_inside, has_ended] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let held = {
        let (is_inside, has_ended) = (Arc::clone(&is_inside), Arc::clone(&has_ended));
        move |acc: &mut [u8], x: &[u8]| {
            is_inside.store(true, Ordering::Release);
            while !has_ended.load(Ordering::Acquire) {
                thread::yield_now();
            }
            // Time enough to return, for a rank that does not wait.
            (0..50_000).for_each(|_| thread::yield_now());
            acc.copy_from_slice(x);
        }
    };
    let customs = [
        CustomReduction::new("last", |acc: &mut [u8], x: &[u8]| acc.copy_from_slice(x)),
        CustomReduction::new("last", held),
    ];
    let returned = Barrier::new(2);
    thread::scope(|scope| {
        for (communicator, custom) in communicators.iter().zip(&customs) {
            let returned = &returned;
            scope.spawn(move || {
                let mut values = vec![1_u8; 4096];
                let (op, operands) = (CollectiveOp::AllReduce(ReduceOp::Sum), Slices::InPlace(&mut values));
                let call = SliceCall { op, dtype: DType::U8, operands, custom: Some(custom) };
                communicator.run_slices(&mut [call], WITHIN).unwrap_err();
                values.fill(77);
                returned.wait();
                assert!(values.iter().all(|value| *value == 77));
            });
        }
        while !is_inside.load(Ordering::Acquire) {
            thread::yield_now();
        }
        communicators[0].abort(CollectiveFailure::Aborted { rank: 0, reason: "now".into() });
        has_ended.store(true, Ordering::Release);
    });
}

#[test]
fn a_panic_in_a_reduction_ends_the_communicator_for_all() {
    for config in [by_slots(), directly(), at_once()] {
        let outcomes = each(met(3, &config), |communicator| {
            let rank = communicator.rank();
            let custom = CustomReduction::new("panics", move |_: &mut [u8], _: &[u8]| {
                assert!(rank != 1, "as it should");
            });
            let work = || {
                let mut values = [1; 999];
                let (op, operands) = (CollectiveOp::AllReduce(ReduceOp::Sum), Slices::InPlace(&mut values));
                let call = SliceCall { op, dtype: DType::U8, operands, custom: Some(&custom) };
                communicator.run_slices(&mut [call], WITHIN)?;
                communicator.barrier(WITHIN)
            };
            let outcome = catch_unwind(AssertUnwindSafe(work));
            assert_eq!(outcome.is_err(), rank == 1);
            failure(outcome.unwrap_or_else(|_| communicator.barrier(WITHIN)).unwrap_err())
        });
        let reason = "a reduction of the caller's panicked".into();
        assert_eq!(outcomes, vec![CollectiveFailure::Aborted { rank: 1, reason }; 3]);
    }
}

#[test]
fn two_communicators_of_one_group_go_on_beside_each_other() {
    let groups = groups(2);
    let (first, second) = (communicators(&groups, &by_slots()), communicators(&groups, &directly()));
    each(first.into_iter().zip(second).collect(), |(first, second)| {
        thread::scope(|scope| {
            for communicator in [&first, &second] {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let mut values = [1; 700];
                        sum(communicator, &mut values, WITHIN).unwrap();
                        assert_eq!(values, [2; 700]);
                    }
                });
            }
        });
    });
}

#[test]
fn threads_of_one_rank_take_turns() {
    each(met(2, &at_once()), |communicator| {
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let mut values = [1; 70];
                        sum(&communicator, &mut values, WITHIN).unwrap();
                        assert_eq!(values, [2; 70]);
                    }
                });
            }
        });
    });
}

#[test]
fn a_call_that_does_not_get_its_turn_has_not_begun() {
    let communicators = met(2, &HostConfig::default());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| communicators[0].barrier(WITHIN));
        while communicators[0].progress()[0].begun == 0 {
            thread::yield_now();
        }
        let late = failure(communicators[0].barrier(Duration::ZERO).unwrap_err());
        assert!(matches!(late, CollectiveFailure::TimedOut { number: 0, .. }), "{late}");
        communicators[1].barrier(WITHIN).unwrap();
        waiting.join().unwrap().unwrap();
    });
}

fn refusal(communicator: &HostCommunicator, op: CollectiveOp, dtype: DType, operands: Slices<'_>) -> String {
    let outcome = communicator.run_slices(&mut [SliceCall { op, dtype, operands, custom: None }], WITHIN);
    let failure = outcome.unwrap_err();
    assert!(matches!(failure, HostFailure::Call(_)), "{failure}");
    failure.to_string()
}

#[test]
fn calls_that_make_no_sense_are_refused_before_they_begin() {
    let communicators = met(2, &HostConfig::default());
    let communicator = &communicators[0];
    let refused = |op, dtype, operands: Slices<'_>| refusal(communicator, op, dtype, operands);
    let sum = CollectiveOp::AllReduce(ReduceOp::Sum);
    assert_eq!(
        refused(sum, DType::F32, Slices::InPlace(&mut [0; 6])),
        "a source of 6 bytes from offset 0 is not 1 equal parts of f32 elements"
    );
    assert_eq!(refused(sum, DType::F32, Slices::Src(&[0; 4])), "all_reduce needs a destination on this rank");
    assert_eq!(
        refused(CollectiveOp::AllReduce(ReduceOp::Xor), DType::F32, Slices::InPlace(&mut [0; 4])),
        "xor is not defined for f32"
    );
    assert_eq!(
        refused(CollectiveOp::Send { to: 2 }, DType::U8, Slices::Src(&[0])),
        "there is no rank 2 among 2"
    );
    refused(CollectiveOp::Reduce { op: ReduceOp::Sum, root: 1 }, DType::U8, Slices::Both(&[0], &mut [0]));
    refused(CollectiveOp::AllGather, DType::U8, Slices::Both(&[0], &mut [0; 4]));
    assert_eq!(communicator.progress()[0].begun, 0);
}

#[test]
fn ranks_join_with_one_config() {
    let outcomes = each(groups(2), |group| {
        let slot_bytes = 640 << group.rank().0;
        let config = HostConfig { slot_bytes, ..HostConfig::default() };
        HostCommunicator::join(Arc::clone(&group), &config, WITHIN).map(drop)
    });
    for outcome in outcomes {
        assert!(matches!(outcome, Err(HostError::OtherConfig { rank: 1 })), "{outcome:?}");
    }
    for slot_bytes in [0, 64, 129] {
        let config = HostConfig { slot_bytes, ..HostConfig::default() };
        let refused = HostCommunicator::join(groups(1).remove(0), &config, WITHIN);
        assert!(matches!(refused, Err(HostError::InvalidConfig(_))));
    }
}
