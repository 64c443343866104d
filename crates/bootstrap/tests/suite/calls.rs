//! Barrier, broadcast, gather, agreement.

use std::time::{Duration, Instant};

use warpweft_bootstrap::{Group, GroupError, Health, JoinError, Loss, Rank};

use crate::{SOON, each, groups};

#[test]
fn values_arrive_by_rank() {
    let groups = groups(5);
    for round in 0..20_u8 {
        let gathered = each(&groups, |group| {
            let value = vec![round; group.rank().index()];
            group.all_gather("sizes", &value, SOON).unwrap()
        });
        let expected: Vec<Vec<u8>> = (0..5).map(|rank| vec![round; rank]).collect();
        assert!(gathered.iter().all(|values| *values == expected));
        let root = Rank(u32::from(round) % 5);
        let sent = each(&groups, |group| {
            group.broadcast("id", root, group.rank().to_string().as_bytes(), SOON).unwrap()
        });
        assert!(sent.iter().all(|value| *value == root.to_string().as_bytes()));
        each(&groups, |group| group.barrier("end", SOON).unwrap());
    }
}

#[test]
fn a_group_of_one_answers_itself() {
    let group = Group::alone().unwrap();
    assert_eq!((group.rank(), group.size(), group.members().len()), (Rank(0), 1, 1));
    assert_eq!(group.all_gather("a", b"x", SOON).unwrap(), [b"x"]);
    assert_eq!(group.broadcast("b", Rank(0), b"y", SOON).unwrap(), b"y");
    group.barrier("c", SOON).unwrap();
}

#[test]
fn different_calls_are_named_everywhere() {
    let groups = groups(3);
    let errors = each(&groups, |group| match group.rank() {
        Rank(2) => group.broadcast("weights", Rank(1), b"", SOON).unwrap_err(),
        _ => group.barrier("step", SOON).unwrap_err(),
    });
    for error in &errors {
        let GroupError::Mismatch { ranks, calls } = error else { panic!("{error}") };
        assert!(ranks.contains(&Rank(2)), "{ranks:?}");
        assert!(calls.contains(&"barrier(\"step\")".to_owned()), "{calls:?}");
        assert!(calls.contains(&"broadcast(\"weights\", from 1)".to_owned()), "{calls:?}");
    }
    let after = each(&groups, |group| group.barrier("after", SOON));
    assert!(after.iter().all(Result::is_ok), "a mismatch leaves the group usable: {after:?}");
}

#[test]
fn who_does_not_come_in_time_is_named_everywhere() {
    let groups = groups(4);
    let started = Instant::now();
    let errors = each(&groups[..3], |group| group.barrier("step", Duration::from_millis(300)).unwrap_err());
    assert!(started.elapsed() < Duration::from_secs(5));
    for error in &errors {
        assert!(
            matches!(error, GroupError::TimedOut { call, missing } if call == "barrier(\"step\")" && *missing == [Rank(3)]),
            "{error:?}"
        );
    }
    let late = groups[3].barrier("step", SOON).unwrap_err();
    assert!(matches!(late, GroupError::TimedOut { .. }), "the late one is told the same: {late:?}");
    each(&groups, |group| group.barrier("again", SOON).unwrap());
}

#[test]
fn disagreement_names_two_and_their_values() {
    let groups = groups(3);
    each(&groups, |group| group.agree("table", b"same", SOON).unwrap());
    let errors = each(&groups, |group| {
        let value: &[u8] = if group.rank() == Rank(1) { b"other" } else { b"same" };
        group.agree("table", value, SOON).unwrap_err()
    });
    for error in errors {
        let GroupError::Disagreement { ranks, values, .. } = error else { panic!("{error}") };
        assert_eq!((ranks, values), ([Rank(0), Rank(1)], [b"same".to_vec(), b"other".to_vec()]));
    }
}

/// One rank lacks memory while it initializes: all are told, by the deadline, and can try again.
#[test]
fn a_failed_step_fails_for_all() {
    let groups = groups(4);
    for _ in 0..64 {
        each(&groups, |group| group.confirm("init", Ok(()), SOON).unwrap());
    }
    let errors = each(&groups, |group| {
        let result = if group.rank() == Rank(2) { Err("out of memory") } else { Ok(()) };
        group.confirm("init", result, SOON).unwrap_err()
    });
    for error in errors {
        let GroupError::Failed { failures, .. } = &error else { panic!("{error}") };
        assert_eq!(*failures, [(Rank(2), "out of memory".to_owned())]);
        assert_eq!(error.to_string(), "init failed on rank 2: out of memory");
    }
    each(&groups, |group| group.barrier("after", SOON).unwrap());
}

#[test]
fn an_abort_ends_the_calls_of_all_a_hundred_times() {
    for round in 0..100 {
        let groups = groups(3);
        let by = Rank(round % 3);
        let errors = each(&groups, |group| {
            if group.rank() == by {
                group.abort("lost patience").unwrap();
            }
            group.barrier("never", SOON).unwrap_err()
        });
        for error in errors {
            assert!(
                matches!(&error, GroupError::Aborted { by: it, reason } if *it == by && reason == "lost patience"),
                "{error:?}"
            );
        }
    }
}

#[test]
fn a_member_that_leaves_ends_the_calls_of_the_others() {
    for leaver in [0, 1, 2] {
        let mut groups = groups(3);
        drop(groups.remove(leaver));
        let leaver = Rank(u32::try_from(leaver).unwrap());
        for error in each(&groups, |group| group.barrier("step", SOON).unwrap_err()) {
            let is_leaver = |rank| rank == leaver;
            assert!(
                matches!(error, GroupError::PeerLost { rank, how: Loss::Left } if is_leaver(rank)),
                "{leaver}: {error:?}"
            );
        }
    }
}

#[test]
fn a_member_leaves_whoever_still_has_a_share_of_its_group() {
    for leaver in [0, 1] {
        let groups = groups(2);
        groups[leaver].leave().unwrap();
        let kept = &groups[leaver];
        assert!(matches!(kept.barrier("late", SOON), Err(GroupError::Left)));
        assert!(matches!(kept.check(), Err(GroupError::Left)));
        assert!(
            matches!(kept.reform(SOON), Err(JoinError::Group(error)) if matches!(*error, GroupError::Left))
        );
        let health = groups[1 - leaver].wait_health(SOON, |health| !health[leaver].is_present()).unwrap();
        assert_eq!(health[leaver], Health::Lost(Loss::Left));
    }
}

#[test]
fn the_last_call_succeeds_for_all_though_members_leave_at_once() {
    for _ in 0..30 {
        let groups = groups(4);
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = groups
                .into_iter()
                .map(|group| {
                    scope.spawn(move || group.all_gather("last", &[1; 1000], SOON).map(|all| all.len()))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(results.iter().all(|result| matches!(result, Ok(4))), "{results:?}");
    }
}

#[test]
fn wrong_arguments_are_refused_without_a_message() {
    let groups = groups(2);
    let group = &groups[0];
    let long = vec![0; (64 << 10) + 1];
    let too_long = group.all_gather("a", &long, SOON).unwrap_err();
    assert!(
        matches!(too_long, GroupError::TooLarge { size_bytes: 65537, limit_bytes: 65536 }),
        "{too_long:?}"
    );
    let name = group.barrier(&"n".repeat(300), SOON).unwrap_err();
    assert!(matches!(name, GroupError::TooLarge { .. }), "{name:?}");
    let root = group.broadcast("a", Rank(2), b"", SOON).unwrap_err();
    assert!(matches!(root, GroupError::UnknownRank { rank: Rank(2), size: 2 }), "{root:?}");
    each(&groups, |group| group.all_gather("a", &long[1..], SOON).unwrap());
}

#[test]
fn a_past_deadline_returns_at_once() {
    let groups = groups(2);
    let error = groups[0].barrier("a", Duration::ZERO).unwrap_err();
    assert!(matches!(error, GroupError::TimedOut { .. }), "{error:?}");
}
