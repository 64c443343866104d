//! What happens to them.

use std::{fs, net::TcpListener, time::Duration};

use libtest_mimic::Trial;
use rustix::process::Signal;

use crate::{
    cast::{Actor, Cast},
    member::clock_ns,
};

pub(crate) fn all() -> Vec<Trial> {
    let cases: [(&str, fn()); 16] = [
        ("a_killed_member_is_known_to_all_at_once", a_killed_member_is_known_to_all_at_once),
        ("a_killed_rank_0_is_known_to_all_at_once", a_killed_rank_0_is_known_to_all_at_once),
        ("a_call_under_way_ends_when_a_member_is_killed", a_call_under_way_ends_when_a_member_is_killed),
        ("survivors_of_rank_0_form_anew", survivors_of_rank_0_form_anew),
        ("survivors_of_several_deaths_form_anew", survivors_of_several_deaths_form_anew),
        ("a_process_that_was_started_again_joins_anew", a_process_that_was_started_again_joins_anew),
        ("a_stopped_member_is_told_from_a_dead_one", a_stopped_member_is_told_from_a_dead_one),
        ("a_stopped_rank_0_is_told_from_a_dead_one", a_stopped_rank_0_is_told_from_a_dead_one),
        ("an_abort_reaches_all", an_abort_reaches_all),
        ("fifty_jobs_start_at_once", fifty_jobs_start_at_once),
        ("a_second_job_on_a_port_fails_fast", a_second_job_on_a_port_fails_fast),
        ("a_file_of_a_crashed_run_is_not_used", a_file_of_a_crashed_run_is_not_used),
        (
            "a_member_killed_while_the_group_forms_is_replaced",
            a_member_killed_while_the_group_forms_is_replaced,
        ),
        ("descriptors_cross_processes", descriptors_cross_processes),
        ("a_fork_is_told_so_and_holds_nobody_up", a_fork_is_told_so_and_holds_nobody_up),
        ("two_processes_with_one_device_are_refused", two_processes_with_one_device_are_refused),
    ];
    cases
        .into_iter()
        .map(|(name, case)| {
            Trial::test(name, move || {
                case();
                Ok(())
            })
        })
        .collect()
}

/// How long after `since` an answer like `.. at NANOSECONDS` was given.
fn after(answer: &str, since: u128) -> Duration {
    let (_, at) = answer.rsplit_once(" at ").unwrap_or_else(|| panic!("{answer}"));
    Duration::from_nanos(at.parse::<u128>().unwrap().saturating_sub(since).try_into().unwrap())
}

/// Kills one and checks that all others know; a loaded machine gets ten times what an idle one needs.
fn kill_and_check(size: u32, victim: usize) {
    let mut cast = Cast::met(size);
    let killed = clock_ns();
    let mut dead = cast.actors.remove(victim);
    dead.kill();
    for answer in cast.ask_all(&format!("lost {victim} 20000")) {
        assert!(answer.starts_with("Lost("), "{answer}");
        assert!(after(&answer, killed) < Duration::from_millis(500), "{answer} killed {killed}");
    }
}

fn a_killed_member_is_known_to_all_at_once() {
    kill_and_check(5, 3);
}

fn a_killed_rank_0_is_known_to_all_at_once() {
    kill_and_check(5, 0);
}

fn a_call_under_way_ends_when_a_member_is_killed() {
    for victim in [0, 2] {
        let mut cast = Cast::met(4);
        let mut dead = cast.actors.remove(victim);
        cast.actors.iter_mut().for_each(|actor| actor.tell("barrier step 20000"));
        dead.kill();
        for actor in &mut cast.actors {
            let answer = actor.hear();
            assert!(answer.starts_with(&format!("PeerLost {{ rank: Rank({victim})")), "{answer}");
        }
        for answer in cast.ask_all("barrier later 20000") {
            assert!(answer.starts_with("PeerLost"), "{answer}");
        }
    }
}

fn survivors_of_rank_0_form_anew() {
    let mut cast = Cast::met(4);
    cast.actors.remove(0).kill();
    cast.ask_all("lost 0 20000");
    let answers = cast.ask_all("reform 0 20000");
    assert_eq!(answers, ["joined 0 3 1 [- 0 1 2]", "joined 1 3 1 [- 0 1 2]", "joined 2 3 1 [- 0 1 2]"]);
    assert!(cast.ask_all("barrier anew 20000").iter().all(|answer| answer == "ok"));
    // And again, by the new rank 0's death.
    cast.actors.remove(0).kill();
    cast.ask_all("lost 0 20000");
    assert_eq!(cast.ask_all("reform 0 20000"), ["joined 0 2 2 [- 0 1]", "joined 1 2 2 [- 0 1]"]);
    assert!(cast.ask_all("barrier anew 20000").iter().all(|answer| answer == "ok"));
}

fn survivors_of_several_deaths_form_anew() {
    let mut cast = Cast::met(5);
    // Nobody is left to tell the others that rank 1 died with rank 0.
    let dead = [cast.actors.remove(0), cast.actors.remove(0)];
    dead.iter().for_each(|actor| actor.signal(Signal::KILL));
    drop(dead);
    cast.ask_all("lost 0 20000");
    let answers = cast.ask_all("reform 0 20000");
    assert_eq!(answers[0], "joined 0 3 1 [- - 0 1 2]");
    assert!(cast.ask_all("barrier anew 20000").iter().all(|answer| answer == "ok"));
}

fn a_process_that_was_started_again_joins_anew() {
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let member = |rank: &str| Actor::start(&[rank, "3", &port, "token", "run", "30000"]);
    let mut cast = [member("0"), member("1"), member("2")];
    for actor in &mut cast {
        let said = actor.hear();
        assert!(said.starts_with("joined"), "{said}");
    }
    cast[0].kill();
    // Straight away it is told how it could come in.
    cast[1].ask("lost 0 20000");
    cast[2].ask("lost 0 20000");
    let successor = cast[2].ask("successor");
    let (address, epoch) = successor.split_once(' ').unwrap();
    let mut again = Actor::start(&["rejoin", address, epoch, "token", "run", "30000"]);
    cast[1].tell("reform 1 20000");
    cast[2].tell("reform 1 20000");
    assert_eq!(cast[1].hear(), "joined 0 3 1 [- 0 1]");
    assert_eq!(cast[2].hear(), "joined 1 3 1 [- 0 1]");
    assert_eq!(again.hear(), "joined 2 3 1");
    for actor in [&mut cast[1], &mut again] {
        actor.tell("barrier anew 20000");
    }
    assert_eq!(cast[2].ask("barrier anew 20000"), "ok");
    drop(folder);
}

fn stop_and_check(stopped: usize, witness: usize) {
    let mut cast = Cast::met(3);
    cast.actors[stopped].signal(Signal::STOP);
    assert_eq!(cast.actors[witness].ask(&format!("health {stopped} stopped 20000")), "ok");
    // Much longer than a member of another host would be waited for.
    let error = cast.actors[witness].ask("barrier step 1500");
    assert!(error.starts_with("TimedOut"), "suspected, not lost: {error}");
    cast.actors[stopped].signal(Signal::CONT);
    assert_eq!(cast.actors[witness].ask(&format!("health {stopped} alive 20000")), "ok");
    cast.actors[stopped].kill();
    let lost = cast.actors[witness].ask(&format!("lost {stopped} 20000"));
    assert!(lost.starts_with("Lost("), "{lost}");
}

fn a_stopped_member_is_told_from_a_dead_one() {
    stop_and_check(2, 1);
    stop_and_check(1, 0);
}

fn a_stopped_rank_0_is_told_from_a_dead_one() {
    stop_and_check(0, 2);
}

fn an_abort_reaches_all() {
    let mut cast = Cast::met(4);
    for actor in &mut cast.actors[..3] {
        actor.tell("barrier never 20000");
    }
    let aborted = clock_ns();
    assert_eq!(cast.actors[3].ask("abort enough"), "ok");
    for actor in &mut cast.actors[..3] {
        let answer = actor.hear();
        assert!(answer.starts_with("Aborted { by: Rank(3), reason: \"enough\" }"), "{answer}");
        assert!(after(&answer, aborted) < Duration::from_millis(500), "{answer}");
    }
}

fn fifty_jobs_start_at_once() {
    let mut jobs: Vec<Cast> = (0..50).map(|_| Cast::start(2)).collect();
    for job in &mut jobs {
        assert_eq!(job.actors[0].hear(), "joined 0 2 0");
        assert_eq!(job.actors[1].hear(), "joined 1 2 0");
        assert!(!job.path().exists());
    }
    for job in &mut jobs {
        job.actors.iter_mut().for_each(|actor| actor.tell("barrier step 20000"));
    }
    for actor in jobs.iter_mut().flat_map(|job| &mut job.actors) {
        assert_eq!(actor.hear(), "ok");
    }
}

/// A port that nobody listens on, below those that the system gives to connections.
fn free_port() -> String {
    loop {
        let address = format!("127.0.0.1:{}", fastrand::u16(10_000..32_000));
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}

fn a_second_job_on_a_port_fails_fast() {
    let port = free_port();
    let mut first = Actor::start(&["0", "2", &port, "t", "first", "30000"]);
    let mut member = Actor::start(&["1", "2", &port, "t", "first", "30000"]);
    assert_eq!((first.hear().as_str(), member.hear().as_str()), ("joined 0 2 0", "joined 1 2 0"));
    let started = clock_ns();
    let mut second = Actor::start(&["0", "2", &port, "t", "second", "30000"]);
    let mut lost = Actor::start(&["1", "2", &port, "t", "second", "30000"]);
    let (said, found) = (second.hear(), lost.hear());
    assert!(said.starts_with("failed AddrInUse"), "{said}");
    assert!(found.starts_with("failed Refused(RunMismatch"), "{found}");
    assert!(clock_ns() - started < 10_000_000_000);
    // The port serves a job again as soon as the first has died, in whatever way.
    first.kill();
    let mut third = Actor::start(&["0", "1", &port, "t", "third", "30000"]);
    assert_eq!(third.hear(), "joined 0 1 0");
}

fn a_file_of_a_crashed_run_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rendezvous");
    let address = format!("file:{}", path.display());
    let mut crashed = Actor::start(&["0", "2", &address, "-", "old", "30000"]);
    while !path.exists() {
        std::thread::yield_now();
    }
    crashed.kill();
    assert!(path.exists());
    let mut reader = Actor::start(&["1", "2", &address, "-", "new", "300"]);
    let said = reader.hear();
    assert!(said.starts_with("failed StaleFile"), "{said}");
    let mut same = Actor::start(&["1", "2", &address, "-", "old", "300"]);
    let said = same.hear();
    assert!(said.starts_with("failed Unreachable"), "{said}");

    let mut early = Actor::start(&["1", "2", &address, "-", "new", "30000"]);
    let mut fresh = Actor::start(&["0", "2", &address, "-", "new", "30000"]);
    assert_eq!((fresh.hear().as_str(), early.hear().as_str()), ("joined 0 2 0", "joined 1 2 0"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "rank 0 removed it");
}

fn a_member_killed_while_the_group_forms_is_replaced() {
    let port = free_port();
    let member = |rank: &str| Actor::start(&[rank, "3", &port, "t", "run", "30000"]);
    let mut zero = member("0");
    let mut one = member("1");
    // Its seat is taken from it when it dies, whether it had one yet or not.
    one.kill();
    let (mut again, mut two) = (member("1"), member("2"));
    for (actor, rank) in [&mut zero, &mut again, &mut two].into_iter().zip(0..) {
        assert_eq!(actor.hear(), format!("joined {rank} 3 0"));
    }
}

fn descriptors_cross_processes() {
    let mut cast = Cast::met(3);
    // All send before anybody receives: the mailboxes take what comes.
    for (from, to) in [(0, 1), (1, 2), (2, 0), (1, 0)] {
        assert_eq!(cast.actors[from].ask(&format!("send {to} 20000")), "ok");
    }
    for (from, to) in [(0, 1), (1, 2), (1, 0), (2, 0)] {
        let pid = cast.actors[from].pid();
        assert_eq!(cast.actors[to].ask(&format!("receive {from} 20000")), format!("a file from {pid}"));
    }
    let error = cast.actors[0].ask("receive 1 100");
    assert!(error.starts_with("TimedOut"), "{error}");
    cast.actors[0].tell("receive 2 20000");
    cast.actors[2].kill();
    let error = cast.actors[0].hear();
    assert!(error.starts_with("PeerLost { rank: Rank(2)"), "{error}");
    let error = cast.actors[0].ask("send 2 20000");
    assert!(error.starts_with("PeerLost { rank: Rank(2)"), "{error}");
}

fn two_processes_with_one_device_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let address = format!("file:{}", folder.path().join("rendezvous").display());
    let (one, two) = ("GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002");
    let member = |rank, device| Actor::start(&[rank, "3", &address, "-", "run", "30000", device]);
    let mut cast = [member("0", one), member("1", two), member("2", one)];
    for actor in &mut cast {
        let said = actor.hear();
        assert!(said.starts_with("failed Refused(DuplicateDevice { ranks: [Rank(0), Rank(2)]"), "{said}");
    }
}

/// The fork has the sockets of its parent, which therefore stay open when that dies.
fn a_fork_is_told_so_and_holds_nobody_up() {
    for forker in [1, 0] {
        let mut cast = Cast::met(3);
        let said = cast.actors[forker].ask("fork");
        let (word, child) = said.split_once(' ').unwrap();
        assert_eq!(word, "forked");
        assert!(cast.ask_all("barrier still 20000").iter().all(|answer| answer == "ok"));
        let killed = clock_ns();
        cast.actors.remove(forker).kill();
        for answer in cast.ask_all(&format!("lost {forker} 20000")) {
            assert!(answer.starts_with("Lost(Exited)"), "{answer}");
            assert!(after(&answer, killed) < Duration::from_millis(500), "{answer} killed {killed}");
        }
        let child = rustix::process::Pid::from_raw(child.parse().unwrap()).unwrap();
        rustix::process::kill_process(child, Signal::KILL).unwrap();
    }
}
