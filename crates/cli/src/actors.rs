//! A ring of actors over all devices, and what there is when its token has gone round.

use std::{
    fs,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use warpweft::{
    Deadline, Runtime,
    k2k_router::{
        ActorCode, ActorId, ActorRef, ActorSpec, Layout, Placement, Snapshot, System, SystemConfig,
    },
};

use crate::{args::Actors, output, select};

/// Far longer than it takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs of handlers that are kept of each device for a trace.
const SPANS: usize = 10_000;

const NO_STATE: Layout = Layout { id: 0, size: 0 };

pub(crate) fn run(args: &Actors) -> anyhow::Result<ExitCode> {
    let mut builder = Runtime::builder();
    for backend in select::backends(&args.selection)? {
        builder = builder.shared_backend(backend);
    }
    let devices = builder.build()?.devices().to_vec();
    let trace_spans = if args.trace.is_some() { SPANS } else { 0 };
    let system = System::start(devices.clone(), &SystemConfig { trace_spans, ..SystemConfig::default() })?;
    let places = devices.iter().map(|device| Placement::Device(device.info().id));
    let ring = begin_ring(&system, places)?;
    let rounds = u64::from(args.rounds);
    let steps = rounds * ring.len() as u64;
    ring[0].send(0, &(steps - 1).to_le_bytes(), Deadline::within(PATIENCE))?;
    let deadline = Deadline::within(PATIENCE);
    while ring.iter().map(ActorRef::served).sum::<u64>() < steps {
        ensure!(!deadline.is_past(), "the token did not come round in {PATIENCE:?}");
        thread::park_timeout(Duration::from_micros(200));
    }
    if let Some(path) = &args.trace {
        fs::write(path, system.trace().to_string())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let snapshot = system.snapshot();
    // Each is served once in each round, and nothing else is.
    let whole = ring.iter().all(|actor| actor.served() == rounds) && snapshot.dead_letters.is_empty();
    if args.json {
        output::json(&snapshot)?;
    } else {
        print(&snapshot);
    }
    system.shut_down(Deadline::within(PATIENCE))?;
    Ok(if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Actors that hand a token on and take one from its count.
fn begin_ring(system: &System, places: impl Iterator<Item = Placement>) -> anyhow::Result<Vec<ActorRef>> {
    let ids: Arc<Mutex<Vec<ActorId>>> = Arc::default();
    let code = {
        let ids = Arc::clone(&ids);
        ActorCode::host(NO_STATE, move |cx, _, message| {
            let left = message.payload.as_slice().try_into().map_or(0, u64::from_le_bytes);
            let ids = ids.lock().unwrap_or_else(PoisonError::into_inner);
            let at = ids.iter().position(|&id| id == cx.id());
            if let (Some(at), 1..) = (at, left) {
                cx.send(ids[(at + 1) % ids.len()], 0, &(left - 1).to_le_bytes());
            }
        })
    };
    let spawn = |place| system.spawn(&ActorSpec::new("ring", code.clone()), place);
    let ring = places.map(spawn).collect::<Result<Vec<_>, _>>()?;
    *ids.lock().unwrap_or_else(PoisonError::into_inner) = ring.iter().map(ActorRef::id).collect();
    Ok(ring)
}

fn print(snapshot: &Snapshot) {
    output::title("Actors");
    output::line("id      name         device       generation       served  inbox");
    for actor in &snapshot.actors {
        let looping = if actor.is_looping { "  does not return" } else { "" };
        output::line(format!(
            "{:<7} {:<12} {:<12} {:>10} {:>12} {:>6}{looping}",
            actor.id.0,
            actor.name,
            actor.device.to_string(),
            actor.generation,
            actor.served,
            actor.inbox_capacity
        ));
    }
    output::title("Routes");
    output::line(
        "from         to           way                 messages     p50 us     p99 us  clocks apart",
    );
    for route in &snapshot.routes {
        let from = route.from.map_or_else(|| "the host".to_owned(), |from| from.to_string());
        let us = |nanos: u64| nanos as f64 / 1e3;
        output::line(format!(
            "{from:<12} {:<12} {:<16} {:>11} {:>10.2} {:>10.2}  {} ns at most",
            route.to.to_string(),
            format!("{:?}", route.way),
            route.messages,
            us(route.latency.p50_ns),
            us(route.latency.p99_ns),
            route.latency.clock_error_ns
        ));
    }
    output::note(&format!(
        "{} served, {} handed on, {} came twice, {} waited for others, dead letters: {:?}",
        snapshot.served, snapshot.handed_on, snapshot.duplicates, snapshot.early, snapshot.dead_letters
    ));
}
