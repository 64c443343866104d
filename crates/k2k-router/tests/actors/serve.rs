//! What actors do when all is well.

use std::sync::{Arc, Mutex};

use warpweft_core_types::Deadline;
use warpweft_k2k_router::{
    ActorCode, ActorError, ActorId, ActorSpec, FullPolicy, Placement, Priority, SendOptions, SystemConfig,
    Way,
};

use crate::rig::{NO_STATE, Rig, count_of, counter, echo, forward_to, until, within};

#[test]
fn a_question_is_answered_by_what_was_asked() {
    let rig = Rig::new(2);
    let actors = [rig.spawn(0, &echo()), rig.spawn(1, &echo())];
    for length in [0, 1, 11, 12, 13, 64, 1000, 16 << 10] {
        let payload: Vec<u8> = (0..length).map(|index: usize| index.to_le_bytes()[0]).collect();
        for actor in &actors {
            let answer = actor.call(7, &payload, within()).unwrap();
            assert_eq!(answer.payload, payload.iter().rev().copied().collect::<Vec<_>>());
            assert_eq!((answer.header.kind, answer.header.source), (7, actor.id().0));
        }
    }
    rig.system.shut_down(within()).unwrap();
}

#[test]
fn questions_of_many_threads_get_their_own_answers() {
    let rig = Rig::new(2);
    let actor = rig.spawn(1, &echo());
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let actor = actor.clone();
            scope.spawn(move || {
                for number in 0..500_u32 {
                    let question = [thread.to_le_bytes(), number.to_le_bytes()].concat();
                    let answer = actor.call(0, &question, within()).unwrap();
                    assert!(answer.payload.iter().rev().eq(&question));
                }
            });
        }
    });
}

/// A token goes round all devices; each actor takes one from its count and sends it on, the last tells the host.
#[test]
fn a_token_goes_round_all_devices() {
    let rig = Rig::new(4);
    let count = rig.spawn(0, &counter());
    let ids: Arc<Mutex<Vec<ActorId>>> = Arc::default();
    let code = {
        let (ids, count) = (Arc::clone(&ids), count.id());
        ActorCode::host(NO_STATE, move |cx, _, message| {
            let left = u32::from_le_bytes(message.payload[..].try_into().unwrap());
            let ids = ids.lock().unwrap();
            let at = ids.iter().position(|&id| id == cx.id()).unwrap();
            cx.send(count, 0, &[]);
            if left > 0 {
                cx.send(ids[(at + 1) % ids.len()], 0, &(left - 1).to_le_bytes());
            }
        })
    };
    let actors: Vec<_> =
        (0..4).map(|device| rig.spawn(device, &ActorSpec::new("ring", code.clone()))).collect();
    *ids.lock().unwrap() = actors.iter().map(|actor| actor.id()).collect();
    actors[0].send(0, &999_u32.to_le_bytes(), within()).unwrap();
    until("1000 steps", || count_of(&count) == 1000);
    let snapshot = rig.system.snapshot();
    assert_eq!((snapshot.duplicates, snapshot.early, snapshot.dead_letters.len()), (0, 0, 0));
    let peer = snapshot.routes.iter().filter(|route| route.way == Way::Peer && route.messages >= 249).count();
    assert!(peer >= 4, "{:?}", snapshot.routes);
    assert!(actors.iter().all(|actor| actor.served() == 250));
}

#[test]
fn what_is_deferred_comes_again_in_front() {
    let seen: Arc<Mutex<Vec<u32>>> = Arc::default();
    let code = {
        let seen = Arc::clone(&seen);
        ActorCode::host(NO_STATE, move |cx, _, message| {
            let mut seen = seen.lock().unwrap();
            // Nothing before 3.
            if message.header.kind < 3 && !seen.contains(&3) {
                cx.defer()
            } else {
                seen.push(message.header.kind)
            }
        })
    };
    let rig = Rig::new(1);
    let actor = rig.spawn(0, &ActorSpec::new("picky", code));
    for kind in [1, 2, 3, 4] {
        actor.send(kind, &[], within()).unwrap();
    }
    until("all", || seen.lock().unwrap().len() == 4);
    assert_eq!(seen.lock().unwrap()[..], [3, 1, 2, 4]);
}

#[test]
fn the_urgent_overtake_and_others_keep_their_order() {
    let seen: Arc<Mutex<Vec<u32>>> = Arc::default();
    let code = {
        let seen = Arc::clone(&seen);
        ActorCode::host(NO_STATE, move |_, _, message| seen.lock().unwrap().push(message.header.kind))
    };
    let rig = Rig::new(1);
    let actor = rig.spawn(0, &ActorSpec::new("list", code));
    let parked = rig.system.park(&actor, within()).unwrap();
    let priorities = [Priority::Low, Priority::Normal, Priority::High];
    for (kind, priority) in (0..9).zip(priorities.into_iter().cycle()) {
        let options = SendOptions { priority: Some(priority), ..SendOptions::default() };
        actor.send_with(kind, &[], options, within()).unwrap();
    }
    until("they wait", || rig.system.pending(within()).0.len() == 9);
    parked.resume();
    until("all", || seen.lock().unwrap().len() == 9);
    assert_eq!(seen.lock().unwrap()[..], [2, 5, 8, 1, 4, 7, 0, 3, 6]);
}

#[test]
fn a_broadcast_reaches_each() {
    let rig = Rig::new(3);
    let counters: Vec<_> = (0..3).map(|device| rig.spawn(device, &counter())).collect();
    let ids: Vec<ActorId> = counters.iter().map(|actor| actor.id()).collect();
    let code = ActorCode::host(NO_STATE, move |cx, _, _| cx.broadcast(&ids, 0, &[]));
    let all = rig.spawn(0, &ActorSpec::new("all", code));
    all.send(0, &[], within()).unwrap();
    let sent = rig.system.broadcast(&counters, 0, b"from the host", within());
    assert!(sent.iter().all(Result::is_ok));
    counters.iter().for_each(|counter| until("two each", || count_of(counter) == 2));
}

#[test]
fn devices_without_a_link_are_reached_over_others_or_through_the_host_or_not_at_all() {
    use warpweft_host::{HostBackend, HostDeviceConfig, LinkSpec, Place};

    // 0 - 1 - 2, and 3 by host memory alone, which 0 reaches too.
    let link = LinkSpec::default();
    let builder = HostBackend::builder().devices(3, &HostDeviceConfig::default()).link_chain(link);
    let builder = builder.device(HostDeviceConfig::default());
    let builder =
        builder.link_both(Place::Device(0), Place::Host, link).link_both(Place::Device(3), Place::Host, link);
    let rig = Rig::linked(builder, &SystemConfig::default());
    let way = |from: usize, to: usize| rig.system.way(rig.devices[from], rig.devices[to]).unwrap();
    assert_eq!((way(0, 0), way(0, 1)), (Way::SameDevice, Way::Peer));
    assert_eq!(
        (way(0, 2), way(0, 3), way(1, 3)),
        (Way::Relayed { via: 1 }, Way::HostMediated, Way::Unreachable)
    );

    let far = rig.spawn(2, &counter());
    let apart = rig.spawn(3, &counter());
    let relayed = rig.spawn(0, &forward_to(far.id()));
    let mediated = rig.spawn(0, &forward_to(apart.id()));
    let nowhere = rig.spawn(1, &forward_to(apart.id()));
    for _ in 0..100 {
        for from in [&relayed, &mediated, &nowhere] {
            from.send(0, &[], within()).unwrap();
        }
    }
    until("100 by each way", || count_of(&far) == 100 && count_of(&apart) == 100);
    until("100 refusals", || {
        rig.system.snapshot().dead_letters.get(&warpweft_k2k_router::Reason::Unreachable) == Some(&100)
    });
    assert_eq!(rig.system.snapshot().handed_on, 100, "the device between handed on");
    let refused = rig.system.relocate(&nowhere, Placement::Device(rig.devices[3]), within()).unwrap_err();
    assert!(matches!(refused, ActorError::Unreachable { actor, .. } if actor == nowhere.id()), "{refused}");
    rig.system.relocate(&relayed, Placement::Device(rig.devices[2]), within()).unwrap();
    relayed.send(0, &[], within()).unwrap();
    until("it goes on there", || count_of(&far) == 101);
}

#[test]
fn several_executors_share_a_device() {
    let rig = Rig::with(1, &SystemConfig { executors_per_device: 3, ..SystemConfig::default() });
    let sink = rig.spawn(0, &counter());
    let sources: Vec<_> = (0..5).map(|_| rig.spawn(0, &forward_to(sink.id()))).collect();
    for _ in 0..200 {
        sources.iter().for_each(|source| source.send(0, &[], within()).unwrap());
    }
    until("all of them", || count_of(&sink) == 1000);
}

#[test]
fn latencies_and_spans_are_taken() {
    let config = SystemConfig { trace_spans: 100, sample_every: 1, ..SystemConfig::default() };
    let rig = Rig::with(2, &config);
    let actor = rig.spawn(1, &echo());
    let relay = rig.spawn(0, &forward_to(actor.id()));
    for _ in 0..50 {
        actor.call(0, &[], within()).unwrap();
        relay.send(0, &[], within()).unwrap();
    }
    until("served", || actor.served() == 100);
    let snapshot = rig.system.snapshot();
    let route = |from| snapshot.routes.iter().find(|route| route.from == from && route.to == rig.devices[1]);
    for from in [None, Some(rig.devices[0])] {
        let latency = &route(from).unwrap().latency;
        assert_eq!(latency.samples, 50);
        assert!(latency.p50_ns > 0 && latency.p50_ns <= latency.p99_ns && latency.p99_ns <= latency.max_ns);
    }
    assert_eq!(route(Some(rig.devices[0])).unwrap().messages, 50);
    let trace = rig.system.trace();
    let events = trace["traceEvents"].as_array().unwrap();
    let handlers =
        events.iter().filter(|event| event["ph"] == "X" && event["dur"].as_f64() >= Some(0.0)).count();
    assert_eq!(handlers, 150);
}

#[test]
fn placement_takes_the_emptiest() {
    let rig = Rig::new(3);
    let actors: Vec<_> = (0..6).map(|_| rig.system.spawn(&echo(), Placement::Any).unwrap()).collect();
    let snapshot = rig.system.snapshot();
    for device in &rig.devices {
        assert_eq!(snapshot.actors.iter().filter(|actor| actor.device == *device).count(), 2);
    }
    assert_eq!(snapshot.actors.len(), actors.len());
    let full = counter().with_inbox(1, FullPolicy::Reject);
    assert!(rig.spawn(0, &full).call(1, &[], Deadline::within(crate::rig::PATIENCE)).is_ok());
}
