//! Handlers that loop or panic, and devices that are lost.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use warpweft_core_types::{BufferDesc, Deadline, ErrorClass};
use warpweft_host::HostBackend;
use warpweft_k2k_router::{
    ActorCode, ActorError, ActorSpec, AskError, FullPolicy, Placement, Reason, SendError, SendOptions,
    SystemConfig,
};
use warpweft_wrappers::{FaultConfig, FaultyBackend};

use crate::rig::{NO_STATE, PATIENCE, Rig, count_of, counter, echo, forward_to, open, until, within};

/// Loops until it is let go.
fn looping(go: &Arc<AtomicBool>) -> ActorSpec {
    let go = Arc::clone(go);
    let code = ActorCode::host(NO_STATE, move |_, _, _| {
        let limit = Instant::now() + PATIENCE;
        while !go.load(Ordering::Relaxed) && Instant::now() < limit {
            std::thread::yield_now();
        }
    });
    ActorSpec::new("looping", code)
}

#[test]
fn a_handler_that_loops_is_named_and_others_serve_on() {
    let rig = Rig::with(2, &SystemConfig { executors_per_device: 2, ..SystemConfig::default() });
    let go = Arc::new(AtomicBool::new(false));
    let actor = rig.spawn(0, &looping(&go));
    let (beside, elsewhere) = (rig.spawn(0, &echo()), rig.spawn(1, &echo()));
    let began = Instant::now();
    actor.send(0, &[], within()).unwrap();
    until("it is named", || rig.system.snapshot().devices[0].unparkable == Some(actor.id()));
    assert!(began.elapsed() < Duration::from_secs(1) + Duration::from_millis(500), "{:?}", began.elapsed());
    let snapshot = rig.system.snapshot();
    assert!(snapshot.actors.iter().all(|one| one.is_looping == (one.id == actor.id())));
    assert_eq!(snapshot.devices[1].unparkable, None);

    // Other executors serve on, and new actors go there.
    let later = rig.spawn(0, &echo());
    for other in [&beside, &elsewhere, &later] {
        other.call(0, b"still here", within()).unwrap();
    }
    let brief = Deadline::within(Duration::from_millis(20));
    let refused = rig.system.park(&actor, brief).unwrap_err();
    assert!(matches!(refused, ActorError::Unparkable { inside, .. } if inside == actor.id()), "{refused}");

    go.store(true, Ordering::Relaxed);
    until("it is well again", || rig.system.snapshot().devices[0].unparkable.is_none());
    actor.call(0, &[], Deadline::within(Duration::from_millis(1))).unwrap_err();
    until("it parks", || rig.system.park(&actor, within()).is_ok());
    rig.system.shut_down(within()).unwrap();
}

#[test]
fn a_looping_actor_can_be_killed_and_its_system_dropped() {
    let rig = Rig::with(1, &SystemConfig { executors_per_device: 2, ..SystemConfig::default() });
    let go = Arc::new(AtomicBool::new(false));
    let actor = rig.spawn(0, &looping(&go));
    actor.send(0, &[], within()).unwrap();
    let asked = actor.ask(0, &[], within()).unwrap();
    until("it is named", || rig.system.snapshot().devices[0].unparkable.is_some());
    rig.system.kill(&actor).unwrap();
    assert!(matches!(asked.wait(within()), Err(AskError::Lost { reason: Reason::ActorKilled, .. })));
    let gone = actor.send(0, &[], within()).unwrap_err();
    assert_eq!(gone, SendError::Gone { actor: actor.id(), reason: Reason::ActorKilled });
    let began = Instant::now();
    drop(rig);
    assert!(began.elapsed() < Duration::from_secs(5), "a drop waits for no handler");
    go.store(true, Ordering::Relaxed);
}

#[test]
fn a_handler_that_panics_ends_its_actor_alone() {
    let rig = Rig::new(1);
    let code = ActorCode::host(NO_STATE, |_, _, message| assert_ne!(message.header.kind, 13, "unlucky"));
    let actor = rig.spawn(0, &ActorSpec::new("superstitious", code));
    let (other, relay) = (rig.spawn(0, &echo()), rig.spawn(0, &forward_to(actor.id())));
    actor.send(0, &[], within()).unwrap();
    until("it serves", || actor.served() == 1);
    let parked = rig.system.park(&actor, within()).unwrap();
    actor.send(13, &[], within()).unwrap();
    let asked = actor.ask(0, &[], within()).unwrap();
    until("both wait", || rig.system.pending(within()).0.len() == 2);
    parked.resume();
    let lost = asked.wait(within()).unwrap_err();
    assert!(matches!(lost, AskError::NotServed { reason: Reason::ActorFailed, .. }), "{lost}");
    let gone = actor.send(0, &[], within()).unwrap_err();
    assert_eq!(gone, SendError::Gone { actor: actor.id(), reason: Reason::ActorFailed });
    relay.send(0, &[], within()).unwrap();
    // The one that it panicked at, the one behind it, and the one of the relay.
    until("three dead letters", || rig.system.snapshot().dead_letters.get(&Reason::ActorFailed) == Some(&3));
    let refused = rig.system.park(&actor, within()).map(drop).unwrap_err();
    assert!(matches!(refused, ActorError::Gone { reason: Reason::ActorFailed, .. }), "{refused}");
    other.call(0, &[], within()).unwrap();
}

#[test]
fn a_device_that_is_lost_takes_its_actors_with_it_and_nothing_else() {
    // It dies at its third step: loading, launching, and then an allocation.
    let inner = Arc::new(HostBackend::with_devices(1).unwrap());
    let faulty = FaultyBackend::new(inner, FaultConfig { dies_at_step: Some(2), ..FaultConfig::default() });
    let whole = HostBackend::with_devices(1).unwrap();
    let devices: Vec<_> = open(&faulty).into_iter().chain(open(&whole)).collect();
    let doomed = Arc::clone(&devices[0]);
    let rig = Rig::of_devices(devices, &SystemConfig::default());
    let (lost, kept) = (rig.spawn(0, &counter()), rig.spawn(1, &counter()));
    let parked = rig.system.park(&lost, within()).unwrap();
    let asked = lost.ask(1, &[], within()).unwrap();
    let relay = rig.spawn(1, &forward_to(lost.id()));
    doomed.allocate(&BufferDesc::device(1)).unwrap_err();
    let began = Instant::now();
    let unknown = asked.wait(within()).unwrap_err();
    assert!(matches!(unknown, AskError::Lost { reason: Reason::DeviceLost, .. }), "{unknown}");
    assert_eq!(unknown.class(), ErrorClass::DeviceLost);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    let gone = lost.send(0, &[], within()).unwrap_err();
    assert_eq!(gone, SendError::Gone { actor: lost.id(), reason: Reason::DeviceLost });
    relay.send(0, &[], within()).unwrap();
    until("a dead letter", || {
        rig.system.snapshot().dead_letters.contains_key(&Reason::DeviceLost)
            || rig.system.snapshot().dead_letters.contains_key(&Reason::Unreachable)
    });
    assert!(rig.system.snapshot().devices[0].is_lost);
    let refused = rig.system.spawn(&echo(), Placement::Device(rig.devices[0])).unwrap_err();
    assert!(matches!(refused, ActorError::NoDevice { .. }), "{refused}");
    kept.send(0, &[], within()).unwrap();
    assert_eq!(count_of(&kept), 1);
    drop(parked);
}

#[test]
fn who_asks_a_handler_that_panics_is_told_at_once() {
    let rig = Rig::new(1);
    let code = ActorCode::host(NO_STATE, |_, _, _| panic!("at everything"));
    let actor = rig.spawn(0, &ActorSpec::new("unhappy", code));
    let lost = actor.call(0, &[], within()).unwrap_err();
    assert!(matches!(lost, AskError::NotServed { reason: Reason::ActorFailed, .. }), "{lost}");
}

#[test]
fn durations_without_end_harm_nobody() {
    let rig = Rig::with(1, &SystemConfig { lane_lines: 64, ..SystemConfig::default() });
    let go = Arc::new(AtomicBool::new(false));
    let full = FullPolicy::Wait { within: Duration::MAX };
    let slow = rig.spawn(0, &ActorSpec { inbox_capacity: 1, full, ..counter() });
    let to = slow.id();
    let options = SendOptions { deadline: Some(Duration::MAX), ..SendOptions::default() };
    let code = ActorCode::host(NO_STATE, move |cx, _, _| {
        (0..4).for_each(|_| cx.send_with(to, 0, &[], options));
    });
    let sender = rig.spawn(0, &ActorSpec::new("patient", code));
    let parked = rig.system.park(&slow, within()).unwrap();
    sender.send(0, &[], within()).unwrap();
    until("some wait for room", || rig.system.pending(within()).0.len() == 4);
    parked.resume();
    until("all are served", || slow.served() == 4);
    go.store(true, Ordering::Relaxed);
}

#[test]
fn a_park_that_nobody_waits_for_any_more_is_undone() {
    let rig = Rig::with(1, &SystemConfig { executors_per_device: 2, ..SystemConfig::default() });
    let go = Arc::new(AtomicBool::new(false));
    let actor = rig.spawn(0, &looping(&go));
    actor.send(0, &[], within()).unwrap();
    until("it is named", || rig.system.snapshot().devices[0].unparkable.is_some());
    let brief = || Deadline::within(Duration::from_millis(20));
    for _ in 0..2 {
        let refused = rig.system.park(&actor, brief()).map(drop).unwrap_err();
        let is_late = matches!(refused, ActorError::Unparkable { .. } | ActorError::Timeout { .. });
        assert!(is_late, "{refused}");
    }
    go.store(true, Ordering::Relaxed);
    actor.send(0, &[], within()).unwrap();
    until("it goes on", || actor.served() == 2);
    until("it parks again", || rig.system.park(&actor, within()).is_ok());
}

#[test]
fn an_actor_stops_at_its_next_message() {
    const EACH: Duration = Duration::from_millis(20);
    let rig = Rig::new(1);
    let code = ActorCode::host(NO_STATE, |_, _, _| {
        let began = Instant::now();
        while began.elapsed() < EACH {
            std::thread::yield_now();
        }
    });
    let actor = rig.spawn(0, &ActorSpec { inbox_capacity: 64, ..ActorSpec::new("thorough", code) });
    (0..40).for_each(|_| actor.send(0, &[], within()).unwrap());
    until("it has begun", || actor.served() > 0);
    let parked = rig.system.park(&actor, within()).unwrap();
    assert!(actor.served() < 30, "it went on to the {}th", actor.served());
    parked.resume();
    until("it serves the rest", || actor.served() == 40);
}

#[test]
fn behind_the_end_of_a_system_nothing_is_accepted() {
    let rig = Rig::new(1);
    let actor = rig.spawn(0, &echo());
    rig.system.shut_down(within()).unwrap();
    let gone = actor.send(0, &[], within()).unwrap_err();
    assert_eq!(gone, SendError::Gone { actor: actor.id(), reason: Reason::ActorStopped });
}

#[test]
fn what_fits_no_lane_is_refused() {
    let rig = Rig::with(1, &SystemConfig { lane_lines: 16, ..SystemConfig::default() });
    let actor = rig.spawn(0, &ActorSpec { full: FullPolicy::Spill, ..echo() });
    let refused = actor.send(0, &[0; 1000], within()).unwrap_err();
    assert_eq!(refused, SendError::TooLong { length: 1000, limit: 13 * 12 });
    actor.send(0, &[0; 13 * 12], within()).unwrap();
}

/// Whenever it is killed on its way, it serves nothing afterwards.
#[test]
fn an_actor_that_is_killed_while_it_moves_is_nowhere() {
    let rig = Rig::new(2);
    for turn in 0..60_u64 {
        let actor = rig.spawn(0, &counter());
        let id = actor.id();
        std::thread::scope(|scope| {
            let moving =
                scope.spawn(|| rig.system.relocate(&actor, Placement::Device(rig.devices[1]), within()));
            // At different moments of the move.
            (0..turn * 50).for_each(|_| std::hint::spin_loop());
            rig.system.kill(&actor).unwrap();
            let _moved_or_lost = moving.join().unwrap();
        });
        assert!(rig.system.snapshot().actors.iter().all(|one| one.id != id));
        let gone = actor.send(0, &[], within()).unwrap_err();
        assert_eq!(gone, SendError::Gone { actor: id, reason: Reason::ActorKilled });
        assert!(matches!(rig.system.kill(&actor), Err(ActorError::Gone { reason: Reason::ActorKilled, .. })));
    }
    assert_eq!(rig.system.pending(within()).0.len(), 0);
}
