//! Actors in CUDA C: what they do on GPUs, and what their messages take.

pub(crate) mod bench;
mod life;
mod traffic;

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use warpweft_conformance::executor_image;
use warpweft_core_types::{Deadline, Device, DeviceId};
use warpweft_k2k_router::{ActorCode, ActorRef, ActorSpec, Layout, Placement, System, SystemConfig};

use crate::{
    checks::{self, Check},
    kernels,
    rig::Rig,
};

/// Nothing here takes longer.
const PATIENCE: Duration = Duration::from_secs(30);

const CHECKS: &[Check<Rig>] = &[
    ("messages go every way that there is on one GPU", traffic::every_way),
    ("many actors get all that they are sent", traffic::many_actors),
    ("a million checked payloads over 64 lanes", traffic::million),
    ("actors are parked and go on under traffic, and nothing is lost", life::parked),
    ("an actor is stopped under traffic, and every message is accounted for", life::stopped),
    ("code is loaded and memory is freed beside actors, within two seconds", life::beside),
    ("one workgroup too many is refused before it is launched", life::too_many),
    ("a handler that loops is named, and others are served", life::looping),
    ("handlers come from sources, and new ones while others serve", life::sources),
    ("a million checked payloads between two GPUs", traffic::between),
];

/// Runs the checks with these words in their names.
pub(crate) fn run(words: &str) -> Result<()> {
    let wanted: Vec<_> = CHECKS.iter().filter(|(name, _)| name.contains(words)).copied().collect();
    ensure!(!wanted.is_empty(), "no check has {words:?} in its name");
    // Kernels that a stand-in for a driver has too.
    checks::all(&Rig::with(&kernels::graph())?, &wanted)
}

const NO_STATE: Layout = Layout { id: 0, size: 0 };
const TALLY: Layout = Layout { id: 1, size: 16 };
const STREAM: Layout = Layout { id: 4, size: 24 };
const SINK: Layout = Layout { id: 5, size: 48 };
const PING: Layout = Layout { id: 6, size: 24 + 4 * 8192 };

fn within() -> Deadline {
    Deadline::within(PATIENCE)
}

/// A driver of host threads does little of everything.
fn is_small(rig: &Rig) -> bool {
    rig.first().device.info().name.contains("Stand-in")
}

fn spec(handler: &str, state: Layout) -> ActorSpec {
    ActorSpec::new(handler, ActorCode::of_image(state, &executor_image(), handler))
}

fn config(executors: u32) -> SystemConfig {
    SystemConfig { executors_per_device: executors, lane_lines: 2048, ..SystemConfig::default() }
}

/// A system on the first devices.
fn system(rig: &Rig, devices: usize, config: &SystemConfig) -> Result<(System, Vec<DeviceId>)> {
    let devices: Vec<Arc<dyn Device>> =
        rig.devices.iter().take(devices).map(|bench| Arc::clone(&bench.device)).collect();
    let ids = devices.iter().map(|device| device.info().id).collect();
    Ok((System::start(devices, config)?, ids))
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// What an actor answers to kind 1.
fn asked(actor: &ActorRef) -> Result<Vec<u64>> {
    let answer = actor.call(1, &[], within())?;
    Ok(answer.payload.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

fn until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = within();
    while !done()? {
        ensure!(!deadline.is_past(), "{what} did not come to be");
        std::thread::yield_now();
    }
    Ok(())
}

/// One actor that sends checked messages, and one that takes them.
struct Pair {
    stream: ActorRef,
    sink: ActorRef,
    count: u64,
}

/// What came to a sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Came {
    served: u64,
    wrong: u64,
    reordered: u64,
    /// By the device's clock.
    took_ns: u64,
}

impl Pair {
    /// The executors with the fewest actors get them, so that pairs made of lists are at different ones.
    fn all(system: &System, from: DeviceId, to: DeviceId, pairs: u32, count: u32) -> Result<Vec<Self>> {
        let place = |handler, state, device| {
            (0..pairs).map(move |_| Ok(system.spawn(&spec(handler, state), Placement::Device(device))?))
        };
        let sinks = place("sink", SINK, to).collect::<Result<Vec<_>>>()?;
        let mut streams = place("stream", STREAM, from).collect::<Result<Vec<_>>>()?;
        // Those of one number are at one executor: each sends to the next.
        streams.rotate_right(1);
        let pairs = streams.into_iter().zip(sinks).zip(1_u32..);
        pairs
            .map(|((stream, sink), seed)| {
                sink.send(2, &bytes(&[seed]), within())?;
                // What a stream sends comes by another lane, and may come before what was sent before.
                ensure!(asked(&sink)?[0] == 0, "nothing has come");
                stream.send(2, &bytes(&[sink.id().0, count, seed, 16]), within())?;
                Ok(Self { stream, sink, count: count.into() })
            })
            .collect()
    }

    fn begin(&self) -> Result<()> {
        Ok(self.stream.send(0, &[], within())?)
    }

    fn came(&self) -> Result<Came> {
        let [served, wrong, reordered, began, ended, ..] = asked(&self.sink)?[..] else {
            anyhow::bail!("a sink answers with less than it has");
        };
        Ok(Came { served, wrong, reordered, took_ns: ended.saturating_sub(began) })
    }

    /// Waits until all has come, and looks at it.
    fn finish(&self) -> Result<Came> {
        until("all that was sent", || Ok(self.came()?.served >= self.count))
            .with_context(|| format!("{:?} of {}", self.came(), self.count))?;
        let came = self.came()?;
        ensure!(
            (came.served, came.wrong, came.reordered) == (self.count, 0, 0),
            "{came:?} of {}",
            self.count
        );
        Ok(came)
    }
}

fn run_pairs(pairs: &[Pair]) -> Result<Vec<Came>> {
    pairs.iter().try_for_each(Pair::begin)?;
    pairs.iter().map(Pair::finish).collect()
}

/// Nothing became a dead letter.
fn all_served(system: &System) -> Result<()> {
    let dead = system.snapshot().dead_letters;
    ensure!(dead.is_empty(), "{dead:?}");
    Ok(())
}
