//! What messages between actors take: by the devices' own clocks, and by the host's beside raw words.

use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use warpweft_core_types::DeviceId;
use warpweft_k2k_router::{ActorSpec, Placement, Snapshot, System, SystemConfig};

use super::{NO_STATE, PING, Pair, bytes, config, is_small, run_pairs, spec, system, until, within};
use crate::{
    bench::{round_trip, samples::Samples},
    kernels,
    rig::{Rig, report, say},
};

/// Round trips of a measurement, of which the last are looked at.
const TRIPS: u32 = 20_000;

/// Questions of the host.
const QUESTIONS: usize = 20_000;

pub(crate) fn run() -> Result<()> {
    let rig = Rig::with(&kernels::graph())?;
    rig.describe()?;
    if !is_small(&rig) {
        // Words that the host exchanges with a kernel of ours and with one by hand.
        round_trip::run(&Rig::open()?)?;
    }
    for executors in [1, 2] {
        round_trips(&rig, 1, executors)?;
    }
    if rig.devices.len() > 1 {
        round_trips(&rig, 2, 1)?;
    }
    ask(&rig)?;
    for pairs in [1, 32] {
        rate(&rig, 1, pairs)?;
        if rig.devices.len() > 1 {
            rate(&rig, 2, pairs)?;
        }
    }
    Ok(())
}

fn between(devices: &[DeviceId]) -> (Placement, Placement) {
    let last = devices[devices.len() - 1];
    (Placement::Device(devices[0]), Placement::Device(last))
}

/// 64 bytes from one handler to another and back.
fn round_trips(rig: &Rig, count: usize, executors: u32) -> Result<()> {
    let (system, devices) = system(rig, count, &config(executors))?;
    let (near, far) = between(&devices);
    let ping = system.spawn(&spec("ping", PING), near)?;
    let pong = system.spawn(&spec("pong", NO_STATE), far)?;
    let trips = if is_small(rig) { 200 } else { TRIPS };
    ping.send(2, &bytes(&[pong.id().0, trips]), within())?;
    until("all round trips", || Ok(ping.call(1, &[], within())?.payload == trips.to_le_bytes()))?;
    let mut halves = Vec::new();
    for from in (0..trips.min(8192)).step_by(1024) {
        let took = ping.call(3, &from.to_le_bytes(), within())?.payload;
        let took = took.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
        halves.extend(took.filter(|took| *took > 0).map(|took| f64::from(took) / 2e3));
    }
    halves.sort_by(f64::total_cmp);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
    let at = |part: f64| halves[((halves.len() - 1) as f64 * part) as usize];
    let what = match (count, executors) {
        (1, 1) => "one executor",
        (1, _) => "two executors of a GPU",
        _ => "two GPUs",
    };
    say(&format!(
        "64 B, half a round trip, {what}: {:.2} us median, {:.2} p99, {:.2} least, of {}",
        at(0.5),
        at(0.99),
        halves[0],
        halves.len()
    ));
    let took = json!({"median_us": at(0.5), "p99_us": at(0.99), "p999_us": at(0.999), "least_us": halves[0]});
    tell(
        json!({"bench": "k2k", "what": "half round trip", "between": what, "bytes": 64, "trips": trips,
        "took": took}),
        &system,
    );
    Ok(system.shut_down(within())?)
}

/// The host asks an actor.
fn ask(rig: &Rig) -> Result<()> {
    let (system, devices) = system(rig, 1, &config(1))?;
    let echo = system.spawn(&spec("echo", NO_STATE), Placement::Device(devices[0]))?;
    let warp = ActorSpec { threads: 32, ..spec("echo", NO_STATE) };
    let by_warp = system.spawn(&warp, Placement::Device(devices[0]))?;
    let questions = if is_small(rig) { 100 } else { QUESTIONS };
    for (what, actor) in [("one thread", &echo), ("a warp", &by_warp)] {
        let (question, mut samples) = ([7; 48], Samples::default());
        for number in 0..questions + questions / 10 {
            let began = Instant::now();
            let answer = actor.call(0, &question, within())?;
            let took = began.elapsed();
            ensure!(answer.payload == question, "what was asked comes back");
            if number >= questions / 10 {
                samples.add(took);
            }
        }
        say(&format!("48 B, host to actor ({what}) and back: {}", samples.words()));
        tell(
            json!({"bench": "k2k", "what": "host asks", "handler": what, "bytes": 48, "took": samples.json()}),
            &system,
        );
    }
    Ok(system.shut_down(within())?)
}

/// One sender to one receiver, and many of them, each at an executor of its own.
fn rate(rig: &Rig, count: usize, pairs: u32) -> Result<()> {
    let (pairs, each) = if is_small(rig) { (pairs.min(2), 200) } else { (pairs, 200_000) };
    let executors = if count == 1 { 2 * pairs } else { pairs };
    let config = SystemConfig { lane_lines: 512, ..config(executors) };
    let (system, devices) = system(rig, count, &config)?;
    let all = Pair::all(&system, devices[0], devices[count - 1], pairs, each)?;
    let began = Instant::now();
    let came = run_pairs(&all)?;
    let whole = began.elapsed().as_secs_f64();
    // Each by its own receiver's clock; all of them together.
    let rates: f64 = came.iter().map(|came| came.served as f64 / came.took_ns.max(1) as f64 * 1e9).sum();
    let what = if count == 1 { "one GPU" } else { "two GPUs" };
    say(&format!("{pairs} pairs, {what}: {:.2} M messages of 64 B a second", rates / 1e6));
    let reordered: u64 = came.iter().map(|came| came.reordered).sum();
    let served: u64 = came.iter().map(|came| came.served).sum();
    let sent = u64::from(pairs) * u64::from(each);
    tell(
        json!({"bench": "k2k", "what": "rate", "pairs": pairs, "between": what, "bytes": 64, "sent": sent,
        "served": served, "lost": sent.saturating_sub(served), "doubled": served.saturating_sub(sent),
        "reordered": reordered, "messages_per_s": rates, "seconds": whole}),
        &system,
    );
    Ok(system.shut_down(within())?)
}

/// A figure, with what the system counted beside it.
fn tell(mut figure: Value, system: &System) {
    let Snapshot { served, duplicates, dead_letters, routes, .. } = system.snapshot();
    figure["system"] =
        json!({"served": served, "duplicates": duplicates, "dead_letters": dead_letters, "routes": routes});
    report(&figure);
}
