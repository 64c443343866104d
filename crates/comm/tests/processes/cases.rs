//! What happens to them.

use libtest_mimic::Trial;
use rustix::process::Signal;
use warpweft_comm::{FlightRecord, Verdict};

use crate::cast::{Actor, Cast};

pub(crate) fn all() -> Vec<Trial> {
    let cases: [(&str, fn()); 8] = [
        ("a_killed_rank_ends_calls_in_queues", || kill_and_check("queue")),
        ("a_killed_rank_ends_calls_that_are_waited_for", || kill_and_check("blocking")),
        ("the_records_of_the_others_name_who_was_killed", the_records_of_the_others_name_who_was_killed),
        ("two_that_are_killed_at_once_leave_the_others", two_that_are_killed_at_once_leave_the_others),
        ("a_rank_that_was_started_again_comes_in", a_rank_that_was_started_again_comes_in),
        ("the_last_one_goes_on_alone_and_gets_company", the_last_one_goes_on_alone_and_gets_company),
        ("a_stopped_rank_breaks_nothing", a_stopped_rank_breaks_nothing),
        ("an_abort_ends_the_calls_of_all", an_abort_ends_the_calls_of_all),
    ];
    let trial = |(name, case): (&str, fn())| {
        Trial::test(name, move || {
            case();
            Ok(())
        })
    };
    cases.into_iter().map(trial).collect()
}

impl Cast {
    /// All of them sum, and are well under way.
    fn sum(&mut self, how: &str, count: usize) {
        self.expect_all(&format!("sums {how} {count}"), "sums");
    }

    /// Sums of all of them are right, and end when the first has had enough.
    fn sum_for_a_while(&mut self, how: &str) {
        self.sum(how, 1000);
        self.actors[0].tell("enough");
        self.expect_all("ended", "right");
    }

    /// Those who are left have a communicator of their own.
    fn shrink(&mut self) {
        self.tell_all("shrink");
        self.expect_places();
        self.sum_for_a_while("queue");
        self.sum_for_a_while("blocking");
    }

    /// One more comes, behind the others.
    fn start_again(&mut self) {
        let successor = self.actors.last_mut().unwrap().ask("successor");
        self.tell_all("reform 1");
        self.actors.push(Actor::start_again(&successor));
        self.expect_places();
        self.sum_for_a_while("queue");
        self.sum_for_a_while("blocking");
    }
}

fn kill_and_check(how: &str) {
    // Words that one memory of the engine's holds, and words that take many steps.
    for (victim, count) in [(0, 1 << 18), (2, 1000), (3, 1 << 18)] {
        let mut cast = Cast::met(4);
        cast.sum(how, count);
        cast.kill(victim);
        cast.expect_all("ended", &format!("PeerLost: lost {victim}; not healthy"));
        cast.expect_all("barrier", &format!("PeerLost: lost {victim}; not healthy"));
        cast.shrink();
    }
}

fn the_records_of_the_others_name_who_was_killed() {
    let mut cast = Cast::met(4);
    cast.sum("queue", 1000);
    cast.kill(1);
    cast.expect_all("ended", "PeerLost: lost 1; not healthy");
    let records = FlightRecord::read_all(cast.folder()).unwrap();
    assert_eq!(records.iter().map(|record| record.rank).collect::<Vec<_>>(), [0, 2, 3]);
    let verdict = Verdict::of(&records);
    let Verdict::Lost { ranks, number, call } = verdict else { panic!("{verdict:?}") };
    assert_eq!((ranks, call.as_str()), (vec![1], "all_reduce sum of u32, 4000 bytes"));
    assert!(number >= 10, "{number}");
}

fn two_that_are_killed_at_once_leave_the_others() {
    let mut cast = Cast::met(5);
    cast.sum("queue", 1000);
    let mut dead = [cast.actors.remove(0), cast.actors.remove(2)];
    dead.iter().for_each(|actor| actor.signal(Signal::KILL));
    dead.iter_mut().for_each(Actor::kill);
    for answer in cast.ask_all("ended") {
        let either = ["PeerLost: lost 0; not healthy", "PeerLost: lost 3; not healthy"];
        assert!(either.contains(&answer.as_str()), "{answer}");
    }
    cast.shrink();
}

fn a_rank_that_was_started_again_comes_in() {
    let mut cast = Cast::met(4);
    for victim in [1, 0] {
        cast.sum("queue", 1000);
        cast.kill(victim);
        cast.expect_all("ended", &format!("PeerLost: lost {victim}; not healthy"));
        // Those who are left first go on by themselves, and the next time they wait for it.
        if victim == 1 {
            cast.shrink();
        }
        cast.start_again();
    }
}

fn the_last_one_goes_on_alone_and_gets_company() {
    let mut cast = Cast::met(2);
    for goes_on_alone in [true, false] {
        cast.sum("queue", 1000);
        cast.kill(0);
        cast.expect_all("ended", "PeerLost: lost 0; not healthy");
        if goes_on_alone {
            cast.shrink();
        }
        cast.start_again();
    }
}

fn a_stopped_rank_breaks_nothing() {
    for how in ["queue", "blocking"] {
        let mut cast = Cast::met(4);
        cast.sum(how, 1000);
        for stopped in [2, 0] {
            let witness = &mut cast.actors[usize::from(stopped == 0)];
            witness.tell(&format!("health {stopped} stopped"));
            cast.actors[stopped].signal(Signal::STOP);
            let witness = &mut cast.actors[usize::from(stopped == 0)];
            assert_eq!(witness.hear(), "ok");
            cast.actors[stopped].signal(Signal::CONT);
            let witness = &mut cast.actors[usize::from(stopped == 0)];
            assert_eq!(witness.ask(&format!("health {stopped} alive")), "ok");
        }
        cast.actors[3].tell("enough");
        cast.expect_all("ended", "right");
        cast.sum_for_a_while(how);
    }
}

fn an_abort_ends_the_calls_of_all() {
    for how in ["queue", "blocking"] {
        let mut cast = Cast::met(4);
        cast.sum(how, 1000);
        assert_eq!(cast.actors[2].ask("abort enough"), "aborted");
        cast.expect_all("ended", "PeerLost: aborted by 2, enough; not healthy");
        // Nobody is lost, so all of them go on together.
        cast.shrink();
    }
    // One that is in no call ends those of the others, who wait for it.
    let mut cast = Cast::met(4);
    cast.sum("queue", 1000);
    cast.actors[0].tell("enough");
    cast.expect_all("ended", "right");
    let mut aborts = cast.actors.remove(1);
    cast.tell_all("sums queue 1000");
    assert_eq!(aborts.ask("abort late"), "aborted");
    cast.expect_all("ended", "PeerLost: aborted by 1, late; not healthy");
}
