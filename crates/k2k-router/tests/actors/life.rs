//! Actors that are parked, moved and stopped.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use warpweft_core_types::Deadline;
use warpweft_k2k_router::{ActorCode, ActorError, ActorSpec, PendingPlace, Placement, Reason};

use crate::rig::{COUNT, Rig, count_of, counter, echo, until, within};

#[test]
fn a_parked_actor_stands_still_and_then_goes_on() {
    let rig = Rig::new(2);
    let (actor, other) = (rig.spawn(0, &counter()), rig.spawn(0, &echo()));
    for round in 0..20 {
        let parked = rig.system.park(&actor, within()).unwrap();
        for _ in 0..10 {
            actor.send(0, &[], within()).unwrap();
        }
        other.call(0, b"beside it", within()).unwrap();
        let waits = || {
            let (pending, silent) = rig.system.pending(within());
            assert_eq!(silent, []);
            pending.iter().filter(|one| one.place == PendingPlace::Kept).count()
        };
        until("ten wait", || waits() == 10);
        assert!(matches!(rig.system.park(&actor, within()), Err(ActorError::Busy { .. })));
        parked.resume();
        until("they are served", || count_of(&actor) == (round + 1) * 10);
    }
}

#[test]
fn an_actor_goes_on_elsewhere_with_its_state() {
    let rig = Rig::new(3);
    let actor = rig.spawn(0, &counter());
    for round in 1..=30_u16 {
        actor.send(0, &[], within()).unwrap();
        let device = rig.devices[usize::from(round) % 3];
        rig.system.relocate(&actor, Placement::Device(device), within()).unwrap();
        assert_eq!(count_of(&actor), u64::from(round));
        let stats = rig.system.snapshot().actors.into_iter().find(|stats| stats.id == actor.id()).unwrap();
        assert_eq!((stats.device, stats.generation), (device, round));
    }
    // To where it is: nothing changes.
    rig.system.relocate(&actor, Placement::Device(rig.devices[0]), within()).unwrap();
    assert_eq!(rig.system.snapshot().actors[0].generation, 30);
    rig.system.stop(&actor, within()).unwrap();
    let gone = rig.system.relocate(&actor, Placement::Device(rig.devices[1]), within());
    assert!(matches!(gone, Err(ActorError::Gone { reason: Reason::ActorStopped, .. })), "{gone:?}");
}

#[test]
fn questions_are_answered_while_an_actor_moves() {
    let rig = Rig::new(2);
    let actor = rig.spawn(0, &echo());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| {
            let mut number = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                let answer = actor.call(0, &number.to_le_bytes(), within()).unwrap();
                assert!(answer.payload.iter().rev().eq(&number.to_le_bytes()));
                number += 1;
            }
            number
        });
        for round in 1..=50 {
            rig.system.relocate(&actor, Placement::Device(rig.devices[round % 2]), within()).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        assert!(asker.join().unwrap() > 50);
    });
    assert_eq!(rig.system.snapshot().dead_letters.len(), 0);
}

/// A message may follow its actor any number of times before it is served.
#[test]
fn messages_follow_an_actor_that_moves_before_it_serves_them() {
    let rig = Rig::new(2);
    let code = ActorCode::host(COUNT, |_, state, _| {
        // So slow that others wait at every move.
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(1) {
            std::hint::spin_loop();
        }
        state[0] = state[0].wrapping_add(1);
    });
    let actor = rig.spawn(0, &ActorSpec::new("slow", code));
    for _ in 0..500 {
        actor.send(0, &[], within()).unwrap();
    }
    for round in 1..=30 {
        rig.system.relocate(&actor, Placement::Device(rig.devices[round % 2]), within()).unwrap();
    }
    until("all are served", || actor.served() == 500);
    assert_eq!(rig.system.snapshot().dead_letters.len(), 0);
}

/// Case K6: everything ends while senders still send.
#[test]
fn ending_a_system_under_traffic_leaves_nobody_waiting() {
    for _ in 0..5 {
        let rig = Rig::new(2);
        let actor = rig.spawn(1, &counter());
        let sender = {
            let actor = actor.clone();
            std::thread::spawn(move || {
                let brief = || Deadline::within(Duration::from_millis(100));
                std::iter::repeat_with(|| actor.send(0, &[], brief())).find_map(Result::err)
            })
        };
        until("some are served", || actor.served() > 100);
        rig.system.shut_down(within()).unwrap();
        assert!(sender.join().unwrap().is_some(), "the sender hears of it");
    }
}
