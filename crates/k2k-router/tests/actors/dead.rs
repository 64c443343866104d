//! Messages that are not served: each is named once, with the reason.

use std::{
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};

use warpweft_core_types::{Deadline, ErrorClass};
use warpweft_k2k_router::{
    ActorCode, ActorError, ActorId, ActorSpec, AskError, FullPolicy, Layout, PendingPlace, Placement, Reason,
    SendError, SendOptions, System, SystemConfig,
};

use crate::rig::{COUNT, NO_STATE, Rig, count_of, counter, echo, forward_to, until, within};

fn dead(rig: &Rig, reason: Reason) -> u64 {
    rig.system.snapshot().dead_letters.get(&reason).copied().unwrap_or(0)
}

#[test]
fn bad_messages_are_refused_at_the_call() {
    let rig = Rig::new(1);
    let code = ActorCode::host(NO_STATE, |_, _, _| {}).takes(4, Layout { id: 9, size: 8 });
    let strict = rig.spawn(0, &ActorSpec::new("strict", code));
    let actor = strict.id();
    assert_eq!(strict.send(4, &[0; 8], within()), Ok(()));
    let wrong = strict.send(4, &[0; 7], within());
    assert_eq!(wrong, Err(SendError::Layout { actor, kind: 4, expected: 8, length: 7 }));
    assert_eq!(strict.send(5, &[0; 8], within()), Err(SendError::UnknownKind { actor, kind: 5 }));
    let length = (16 << 10) + 1;
    let long = strict.send(4, &vec![0; length], within());
    assert_eq!(long, Err(SendError::TooLong { length, limit: 16 << 10 }));
    // From an actor, the same ends as a dead letter.
    let relay = rig.spawn(0, &forward_to(actor));
    relay.send(5, &[], within()).unwrap();
    until("refused", || dead(&rig, Reason::Refused) == 1);
}

#[test]
fn layouts_that_differ_are_refused_when_the_actor_is_begun() {
    let rig = Rig::new(1);
    let mut spec = counter();
    spec.state = Layout { id: 2, size: 8 };
    let refused = rig.system.spawn(&spec, Placement::Any).unwrap_err();
    assert!(
        matches!(&refused, ActorError::Layout { one, other, .. } if *one == spec.state && *other == COUNT)
    );
    let of_kind = |size| {
        let code = ActorCode::host(NO_STATE, |_, _, _| {}).takes(3, Layout { id: 5, size });
        ActorSpec::new("typed", code)
    };
    rig.system.spawn(&of_kind(4), Placement::Any).unwrap();
    rig.system.spawn(&of_kind(4), Placement::Any).unwrap();
    let refused = rig.system.spawn(&of_kind(8), Placement::Any).unwrap_err();
    assert!(matches!(refused, ActorError::Layout { .. }), "{refused}");
    assert_eq!(refused.class(), ErrorClass::Usage);
}

#[test]
fn actors_that_are_not_there_are_named_with_the_reason() {
    let rig = Rig::new(2);
    let (stopped, killed) = (rig.spawn(1, &echo()), rig.spawn(1, &echo()));
    let to_stopped = rig.spawn(0, &forward_to(stopped.id()));
    let to_killed = rig.spawn(0, &forward_to(killed.id()));
    let to_nobody = rig.spawn(0, &forward_to(ActorId(12345)));
    rig.system.stop(&stopped, within()).unwrap();
    rig.system.kill(&killed).unwrap();
    for (actor, reason) in [(&stopped, Reason::ActorStopped), (&killed, Reason::ActorKilled)] {
        let gone = SendError::Gone { actor: actor.id(), reason };
        assert_eq!(actor.send(0, &[], within()), Err(gone.clone()));
        assert_eq!(actor.call(0, &[], within()), Err(AskError::Send(gone)));
    }
    assert!(matches!(rig.system.kill(&killed), Err(ActorError::Gone { reason: Reason::ActorKilled, .. })));
    let again = rig.system.stop(&stopped, within());
    assert!(matches!(again, Err(ActorError::Gone { reason: Reason::ActorStopped, .. })), "{again:?}");
    for relay in [to_stopped, to_killed, to_nobody] {
        relay.send(0, &[], within()).unwrap();
    }
    for reason in [Reason::ActorStopped, Reason::ActorKilled, Reason::UnknownActor] {
        until("dead", || dead(&rig, reason) == 1);
    }
    assert_eq!(rig.system.dead_letters().len(), 3);
    assert_eq!(rig.system.dead_letters(), [], "they are handed out once");
}

#[test]
fn a_stopped_actors_messages_die_once() {
    let rig = Rig::new(1);
    let actor = rig.spawn(0, &counter());
    let parked = rig.system.park(&actor, within()).unwrap();
    let asked = actor.ask(1, &[], within()).unwrap();
    for _ in 0..9 {
        actor.send(0, &[], within()).unwrap();
    }
    let busy = rig.system.stop(&actor, within());
    assert!(matches!(busy, Err(ActorError::Busy { .. })), "{busy:?}");
    rig.system.kill(&actor).unwrap();
    assert!(matches!(asked.wait(within()), Err(AskError::Lost { reason: Reason::ActorKilled, .. })));
    until("ten", || dead(&rig, Reason::ActorKilled) == 10);
    drop(parked);
}

#[test]
fn a_message_out_of_time_is_not_served() {
    let rig = Rig::new(1);
    let actor = rig.spawn(0, &counter());
    let parked = rig.system.park(&actor, within()).unwrap();
    let brief = SendOptions { deadline: Some(Duration::from_millis(1)), ..SendOptions::default() };
    let ample = SendOptions { deadline: Some(Duration::from_secs(60)), ..SendOptions::default() };
    for options in [brief, ample, brief] {
        actor.send_with(0, &[], options, within()).unwrap();
    }
    let passed = Deadline::within(Duration::from_millis(20));
    until("time passes", || passed.is_past());
    parked.resume();
    until("one is served", || count_of(&actor) == 1);
    assert_eq!(dead(&rig, Reason::Expired), 2);
}

/// A parked actor with room for four, and how many of ten messages are taken.
fn fill(full: FullPolicy) -> (Rig, warpweft_k2k_router::ActorRef, Vec<Result<(), SendError>>, u64) {
    let rig = Rig::new(1);
    let actor = rig.spawn(0, &counter().with_inbox(4, full));
    let parked = rig.system.park(&actor, within()).unwrap();
    let sent = (0..10).map(|_| actor.send(0, &[], Deadline::within(Duration::from_millis(20)))).collect();
    parked.resume();
    // Behind all others, unless there is no room for it.
    until("room", || actor.call(1, &[], within()).is_ok());
    let count = count_of(&actor);
    (rig, actor, sent, count)
}

#[test]
fn a_full_inbox_does_as_its_policy_says() {
    let taken = |sent: &[Result<(), SendError>]| sent.iter().filter(|sent| sent.is_ok()).count();

    let (_rig, actor, sent, count) = fill(FullPolicy::Reject);
    assert_eq!((taken(&sent), count), (4, 4));
    assert_eq!(sent[4], Err(SendError::Full { actor: actor.id() }));

    let (_rig, actor, sent, count) = fill(FullPolicy::Wait { within: Duration::from_millis(5) });
    assert_eq!((taken(&sent), count), (4, 4));
    assert_eq!(sent[9], Err(SendError::Timeout { actor: actor.id() }));

    let (rig, _, sent, count) = fill(FullPolicy::Spill);
    assert_eq!((taken(&sent), count), (10, 10));
    assert_eq!(rig.system.snapshot().dead_letters.len(), 0);
}

/// A gate that a handler waits at, so that its inbox fills.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn pass(&self) {
        let open = self.0.lock().unwrap();
        drop(self.1.wait_timeout_while(open, crate::rig::PATIENCE, |open| !*open).unwrap());
    }
}

/// The actor's outbox is held by `gate` so that what comes waits in its inbox.
#[test]
fn the_oldest_is_dropped_by_the_receiver() {
    let rig = Rig::with(1, &SystemConfig { executors_per_device: 2, ..SystemConfig::default() });
    let narrow = rig.spawn(0, &counter().with_inbox(1, FullPolicy::Wait { within: Duration::from_secs(20) }));
    let seen: Arc<Mutex<Vec<u32>>> = Arc::default();
    let code = {
        let (seen, narrow) = (Arc::clone(&seen), narrow.id());
        ActorCode::host(NO_STATE, move |cx, _, message| {
            seen.lock().unwrap().push(message.header.kind);
            if message.header.kind == 0 {
                cx.send(narrow, 0, &[]);
                cx.send(narrow, 0, &[]);
            }
        })
    };
    let actor = rig.spawn(0, &ActorSpec::new("dropping", code).with_inbox(3, FullPolicy::DropOldest));
    let parked = rig.system.park(&narrow, within()).unwrap();
    actor.send(0, &[], within()).unwrap();
    let held = || rig.system.pending(within()).0.iter().any(|one| one.place == PendingPlace::Outbox);
    until("it waits for room", held);
    for kind in 1..=10 {
        actor.send(kind, &[], within()).unwrap();
    }
    until("seven are dropped", || dead(&rig, Reason::Dropped) == 7);
    parked.resume();
    until("the newest are served", || seen.lock().unwrap().len() == 4);
    assert_eq!(seen.lock().unwrap()[..], [0, 8, 9, 10]);
}

#[test]
fn a_spilling_sender_keeps_its_order_until_all_is_through() {
    // A lane of 16 lines holds five messages at most.
    let rig =
        Rig::with(2, &SystemConfig { lane_lines: 16, executors_per_device: 1, ..SystemConfig::default() });
    let gate = Arc::new(Gate::default());
    let seen: Arc<Mutex<Vec<u32>>> = Arc::default();
    let code = {
        let (seen, gate) = (Arc::clone(&seen), Arc::clone(&gate));
        ActorCode::host(NO_STATE, move |_, _, message| {
            gate.pass();
            seen.lock().unwrap().push(message.header.kind);
        })
    };
    let sink = rig.spawn(1, &ActorSpec::new("sink", code).with_inbox(2, FullPolicy::Spill));
    let source = rig.spawn(0, &forward_to(sink.id()));
    for kind in 0..200 {
        source.send(kind, &[], within()).unwrap();
    }
    until("the source goes on", || source.served() == 200);
    for kind in 1000..1200 {
        sink.send(kind, &[], within()).unwrap();
    }
    gate.open();
    until("all", || seen.lock().unwrap().len() == 400);
    let seen = seen.lock().unwrap();
    let of = |range: std::ops::Range<u32>| {
        seen.iter().copied().filter(|kind| range.contains(kind)).collect::<Vec<_>>()
    };
    assert_eq!(of(0..200), (0..200).collect::<Vec<_>>());
    assert_eq!(of(1000..1200), (1000..1200).collect::<Vec<_>>());
    assert_eq!(rig.system.snapshot().dead_letters.len(), 0);
}

/// Case K11: actors that wait for each other in a circle.
#[test]
fn circles_of_waiting_senders_are_refused_or_end_in_time() {
    let rig = Rig::new(1);
    let wait = FullPolicy::Wait { within: Duration::from_millis(50) };
    let [a, b, c] = [(); 3].map(|()| rig.spawn(0, &counter().with_inbox(2, wait)));
    rig.system.connect(&a, &b).unwrap();
    rig.system.connect(&b, &c).unwrap();
    let refused = rig.system.connect(&c, &a).unwrap_err();
    let circle = [c.id(), a.id(), b.id(), c.id()];
    assert!(matches!(&refused, ActorError::Cycle { circle: found } if found[..] == circle), "{refused}");
    assert_eq!(refused.to_string(), "actor 3 -> actor 1 -> actor 2 -> actor 3 would wait for each other");
    let open = rig.spawn(0, &counter().with_inbox(2, FullPolicy::Reject));
    rig.system.connect(&c, &open).unwrap();
    rig.system.connect(&open, &a).unwrap();

    // Undeclared: two actors that send each other two messages for each they get.
    let ids: Arc<Mutex<Vec<ActorId>>> = Arc::default();
    let code = {
        let ids = Arc::clone(&ids);
        ActorCode::host(NO_STATE, move |cx, _, _| {
            let other = ids.lock().unwrap().iter().copied().find(|&id| id != cx.id()).unwrap();
            cx.broadcast(&[other, other, other], 0, &[]);
        })
    };
    let spec = ActorSpec::new("flood", code).with_inbox(2, wait);
    let pair = [rig.spawn(0, &spec), rig.spawn(0, &spec)];
    *ids.lock().unwrap() = pair.iter().map(|actor| actor.id()).collect();
    pair[0].send(0, &[], within()).unwrap();
    until("some are out of time", || dead(&rig, Reason::Expired) > 0);
    assert_eq!(count_of(&a), 0, "others are served all the while");
}

/// Case K2: one workgroup too many is refused before anything starts.
#[test]
fn executors_beyond_the_budget_are_refused() {
    use warpweft_core_types::ResidentError;
    use warpweft_host::{HostBackend, HostDeviceConfig};

    let config = HostDeviceConfig { resident_workgroups: 2, ..HostDeviceConfig::default() };
    let backend = HostBackend::builder().device(config).build().unwrap();
    let devices = crate::rig::open(&backend);
    let start = |count| {
        System::start(
            devices.clone(),
            &SystemConfig { executors_per_device: count, ..SystemConfig::default() },
        )
    };
    let refused = start(3).unwrap_err();
    assert!(matches!(refused, ActorError::Resident(ResidentError::OverBudget { .. })), "{refused}");
    let system = start(2).unwrap();
    assert!(matches!(start(1), Err(ActorError::Resident(ResidentError::OverBudget { .. }))));
    system.shut_down(within()).unwrap();
    start(2).unwrap().shut_down(within()).unwrap();
    assert!(matches!(start(0), Err(ActorError::Invalid { .. })));
}
