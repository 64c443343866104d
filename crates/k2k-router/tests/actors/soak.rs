//! Messages of known order through parks and moves: none is lost, doubled or out of order.
//!
//! Two seconds as a rule; `WARPWEFT_SOAK_SECONDS` says how long otherwise.

use std::{
    env,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use warpweft_k2k_router::{ActorCode, ActorRef, ActorSpec, Layout, Placement};

use crate::rig::{Rig, until, within};

/// Sources of one sink: actors and threads of the host.
const SOURCES: usize = 4;

/// For each source the number of messages and a hash that depends on their order; then how many came out of order.
const SUMS: Layout = Layout { id: 0x50a4, size: 72 };

const _: () = assert!(SUMS.size as usize == (SOURCES * 2 + 1) * 8);

/// A hash of numbers in their order (FNV-1a).
fn mix(hash: u64, number: u64) -> u64 {
    number
        .to_le_bytes()
        .iter()
        .fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

fn words(state: &[u8]) -> Vec<u64> {
    state.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

/// Sums up what it gets; kind 1 asks for the sums.
fn sink() -> ActorSpec {
    let code = ActorCode::host(SUMS, |cx, state, message| {
        if message.header.kind == 1 {
            return cx.reply(state);
        }
        let [source, number] = words(&message.payload)[..] else { unreachable!("it is sent two words") };
        let source = usize::try_from(source).unwrap();
        let mut sums = words(state);
        let (count, hash) = (source * 2, source * 2 + 1);
        if sums[count] != number {
            sums[SOURCES * 2] += 1;
        }
        sums[count] += 1;
        sums[hash] = mix(sums[hash], number);
        state.copy_from_slice(&sums.iter().flat_map(|sum| sum.to_le_bytes()).collect::<Vec<_>>());
    });
    ActorSpec::new("sink", code)
}

fn message(source: u64, number: u64) -> Vec<u8> {
    [source, number].iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn send_until(stop: &AtomicBool, to: &ActorRef, source: usize) -> u64 {
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        to.send(0, &message(source as u64, number), within()).unwrap();
        number += 1;
    }
    number
}

#[test]
fn nothing_is_lost_doubled_or_out_of_order() {
    let seconds = env::var("WARPWEFT_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
    let rig = Rig::new(3);
    let sink = rig.spawn(0, &sink());
    let to = sink.id();
    let code = ActorCode::host(Layout { id: 0, size: 0 }, move |cx, _, message| {
        cx.send(to, 0, &message.payload);
    });
    // Two come straight from the host, two by way of actors that move as well.
    let relays = [1, 2].map(|device| rig.spawn(device, &ActorSpec::new("relay", code.clone())));
    let stop = AtomicBool::new(false);
    let (mut parks, mut moves) = (0, 0);
    let sent: Vec<u64> = std::thread::scope(|scope| {
        let senders: Vec<_> = (0..SOURCES)
            .map(|source| {
                let to = if source < 2 { &sink } else { &relays[source - 2] };
                let stop = &stop;
                scope.spawn(move || send_until(stop, to, source))
            })
            .collect();
        let end = Instant::now() + Duration::from_secs(seconds);
        let mut next_move = Instant::now();
        while Instant::now() < end {
            let turn = Instant::now() + Duration::from_millis(10);
            let parked = rig.system.park(&sink, within()).unwrap();
            parks += 1;
            parked.resume();
            if Instant::now() >= next_move {
                next_move += Duration::from_millis(100);
                for (at, actor) in [&sink, &relays[0], &relays[1]].into_iter().enumerate() {
                    let device = rig.devices[(moves + at) % 3];
                    // A park that was let go is over in a moment.
                    until("it moves", || {
                        rig.system.relocate(actor, Placement::Device(device), within()).is_ok()
                    });
                }
                moves += 1;
            }
            while Instant::now() < turn {
                std::thread::park_timeout(turn.saturating_duration_since(Instant::now()));
            }
        }
        stop.store(true, Ordering::Relaxed);
        senders.into_iter().map(|sender| sender.join().unwrap()).collect()
    });
    let sums = || words(&sink.call(1, &[], within()).unwrap().payload);
    let total: u64 = sent.iter().sum();
    until("all are served", || (0..SOURCES).map(|source| sums()[source * 2]).sum::<u64>() >= total);
    let sums = sums();
    for (source, &count) in sent.iter().enumerate() {
        let expected = (0..count).fold(0, mix);
        assert_eq!((sums[source * 2], sums[source * 2 + 1]), (count, expected), "source {source}");
    }
    assert_eq!(sums[SOURCES * 2], 0, "out of order");
    let snapshot = rig.system.snapshot();
    assert_eq!((snapshot.duplicates, snapshot.dead_letters.len()), (0, 0), "{:?}", snapshot.dead_letters);
    assert!(total > 1000 && parks > 10 && moves > 3, "{total} messages, {parks} parks, {moves} moves");
}
