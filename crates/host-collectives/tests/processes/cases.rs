//! What is told to whom, and what is to come of it.

use libtest_mimic::Trial;

use crate::cast::Cast;

pub(crate) fn all() -> Vec<Trial> {
    let cases: [(&str, fn()); 7] = [
        ("operations_between_processes", operations_between_processes),
        ("a_mixture_of_threads_and_processes", a_mixture_of_threads_and_processes),
        ("a_difference_is_named_on_all", a_difference_is_named_on_all),
        ("a_killed_process_is_lost_to_all", a_killed_process_is_lost_to_all),
        ("a_process_that_left_is_lost_to_all", a_process_that_left_is_lost_to_all),
        ("a_fork_is_refused_and_changes_nothing", a_fork_is_refused_and_changes_nothing),
        ("a_process_that_does_not_come_is_named", a_process_that_does_not_come_is_named),
    ];
    let trial = |(name, case): (&str, fn())| {
        Trial::test(name, move || {
            case();
            Ok(())
        })
    };
    cases.into_iter().map(trial).collect()
}

fn operations(ranks: &[u32], config: &str) {
    let mut cast = Cast::met(ranks, config);
    let lines =
        ["sum 1 20", "sum 997 5", "sum 90001 2", "gather 3", "gather 40001", "exchange 5", "exchange 30001"];
    for line in lines {
        for said in cast.ask_all(line) {
            assert!(said.split("; ").all(|said| said == "ok"), "{line}: {said}");
        }
    }
}

fn operations_between_processes() {
    for config in ["default", "small", "once"] {
        operations(&[1, 1], config);
        operations(&[1, 1, 1], config);
    }
}

fn a_mixture_of_threads_and_processes() {
    operations(&[2, 1], "default");
    operations(&[1, 2, 2], "small");
}

fn a_difference_is_named_on_all() {
    let mut cast = Cast::met(&[1, 1, 1], "default");
    let text = "call 1 differs between ranks: ranks 0, 2 called all_reduce sum of 4 bytes of u32; \
                rank 1 called all_reduce sum of 8 bytes of u32";
    assert_eq!(cast.ask_all("differ"), vec![text; 3]);
    assert_eq!(cast.ask_all("sum 10 1"), vec!["ok"; 3]);
}

fn a_killed_process_is_lost_to_all() {
    for victim in [1, 2] {
        for count in [10, 100_000] {
            let mut cast = Cast::met(&[1, 1, 1], "default");
            cast.actors.iter_mut().for_each(|actor| actor.tell(&format!("sums {count}")));
            assert_eq!(cast.actors[0].hear(), "sums");
            let mut victim_actor = cast.actors.remove(victim);
            victim_actor.kill();
            let said = cast.hear_all();
            assert!(said[0].starts_with(&format!("rank {victim} is lost: ")), "{said:?}");
            assert_eq!(said[0], said[1]);
            assert_eq!(cast.ask_all("barrier 1000"), said);
        }
    }
}

fn a_process_that_left_is_lost_to_all() {
    let mut cast = Cast::met(&[1, 1, 1], "small");
    assert_eq!(cast.ask_all("sum 100 3"), vec!["ok"; 3]);
    let mut leaving = cast.actors.remove(1);
    cast.actors.iter_mut().for_each(|actor| actor.tell("sum 100 1"));
    leaving.tell("leave");
    for said in cast.hear_all() {
        assert_eq!(said, "rank 1 is lost: it left the communicator");
    }
}

fn a_process_that_does_not_come_is_named() {
    let mut cast = Cast::met(&[1, 1, 1], "default");
    let mut absent = cast.actors.remove(2);
    let said = cast.ask_all("barrier 50");
    assert!(said[0].starts_with("barrier, call 1, was not over after "), "{said:?}");
    assert!(said[0].ends_with("; rank 2 has not come"), "{said:?}");
    assert_eq!(said[0], said[1]);
    absent.tell("barrier 1000");
    assert_eq!(absent.hear(), said[0]);
}

fn a_fork_is_refused_and_changes_nothing() {
    let mut cast = Cast::met(&[1, 1], "default");
    assert_eq!(cast.ask_all("sum 10 2"), ["ok"; 2]);
    cast.actors[0].tell("fork");
    assert_eq!(cast.actors[0].hear(), "refused");
    assert_eq!(cast.ask_all("sum 10 2"), ["ok"; 2]);
}
