//! Actors that are parked, stopped, loop, or begin while others work; and what goes on beside them.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use warpweft_core_types::{BufferDesc, Deadline, LoadError, ResidentError};
use warpweft_k2k_router::{ActorCode, ActorError, ActorSpec, Layout, Placement, Reason, SystemConfig};

use super::{NO_STATE, Pair, all_served, config, is_small, spec, system, until, within};
use crate::{
    kernels,
    rig::{NotRun, Rig},
};

pub(super) fn parked(rig: &Rig) -> Result<()> {
    let count = if is_small(rig) { 500 } else { 200_000 };
    let (system, devices) = system(rig, 1, &config(2))?;
    let pairs = Pair::all(&system, devices[0], devices[0], 2, count)?;
    pairs.iter().try_for_each(Pair::begin)?;
    for _ in 0..20 {
        for pair in &pairs {
            drop(system.park(&pair.sink, within())?);
            drop(system.park(&pair.stream, within())?);
        }
    }
    for pair in &pairs {
        pair.finish()?;
    }
    all_served(&system)?;
    Ok(system.shut_down(within())?)
}

pub(super) fn stopped(rig: &Rig) -> Result<()> {
    let count = if is_small(rig) { 400 } else { 20_000 };
    let (system, devices) = system(rig, 1, &config(2))?;
    let pairs = Pair::all(&system, devices[0], devices[0], 2, count)?;
    pairs.iter().try_for_each(Pair::begin)?;
    // Beside what was streamed it has served its seed and one question.
    let served = || pairs[0].sink.served().saturating_sub(2);
    until("some messages", || Ok(served() > 10))?;
    system.stop(&pairs[0].sink, within())?;
    // Its sender goes on to the end, and nobody serves what it sends.
    until("the end of its sender", || {
        let dead = system.snapshot().dead_letters.get(&Reason::ActorStopped).copied().unwrap_or(0);
        Ok(served() + dead == u64::from(count))
    })?;
    pairs[1].finish()?;
    Ok(system.shut_down(within())?)
}

/// Case K1: nothing hangs.
pub(super) fn beside(rig: &Rig) -> Result<()> {
    let count = if is_small(rig) { 500 } else { 400_000 };
    let (system, devices) = system(rig, 1, &config(2))?;
    let pairs = Pair::all(&system, devices[0], devices[0], 2, count)?;
    pairs.iter().try_for_each(Pair::begin)?;
    let bench = rig.first();
    for _ in 0..5 {
        let began = Instant::now();
        let module = bench.device.load(&kernels::graph())?;
        let memory = bench.allocate(BufferDesc::device(1 << 20))?;
        let pinned = bench.allocate(BufferDesc::host_visible(1 << 20))?;
        bench.copy(&pinned, &memory)?;
        drop((module, memory, pinned));
        ensure!(began.elapsed() < Duration::from_secs(2), "it took {:?}", began.elapsed());
    }
    for pair in &pairs {
        pair.finish()?;
    }
    all_served(&system)?;
    Ok(system.shut_down(within())?)
}

/// Case K2.
pub(super) fn too_many(rig: &Rig) -> Result<()> {
    let processors = rig.first().device.info().multiprocessors;
    let config = SystemConfig {
        executors_per_device: processors * 32,
        lane_lines: 8,
        waiting_bytes: 0,
        ..SystemConfig::default()
    };
    let (system, devices) = system(rig, 1, &config)?;
    let refused = system.spawn(&spec("echo", NO_STATE), Placement::Device(devices[0])).err();
    let refused = refused.context("too many were accepted")?;
    ensure!(matches!(refused, ActorError::Resident(ResidentError::OverBudget { .. })), "{refused}");
    Ok(())
}

pub(super) fn looping(rig: &Rig) -> Result<()> {
    let (system, devices) = system(rig, 1, &config(2))?;
    let here = Placement::Device(devices[0]);
    let (looping, echo) =
        (system.spawn(&spec("looping", NO_STATE), here)?, system.spawn(&spec("echo", NO_STATE), here)?);
    let began = Instant::now();
    let looped = looping.ask(0, &3_000_000_000_u64.to_le_bytes(), within())?;
    until("its name", || Ok(system.snapshot().devices[0].unparkable == Some(looping.id())))?;
    ensure!(began.elapsed() < Duration::from_secs(1), "named after {:?}", began.elapsed());
    echo.call(0, b"beside", Duration::from_secs(1))?;
    ensure!(looped.try_take().is_none(), "it still loops");
    let parked = system.park(&looping, Deadline::within(Duration::from_millis(100)));
    ensure!(
        matches!(&parked, Err(ActorError::Unparkable { inside, .. }) if *inside == looping.id()),
        "{parked:?}"
    );
    looped.wait(within())?;
    until("that it is served again", || Ok(system.snapshot().devices[0].unparkable.is_none()))?;
    looping.call(0, &[], within())?;
    Ok(system.shut_down(within())?)
}

const COUNT: Layout = Layout { id: 7, size: 8 };

/// A counter whose steps are as long as its source says.
#[expect(unsafe_code, reason = "vouches for a handler in CUDA C")]
fn counter(name: &str, step: &str) -> ActorSpec {
    let source = format!(
        "struct Count {{ uint64_t messages; }};
         __device__ void count(warpweft_context &cx, Count *state, const warpweft_message &m) {{
             state->messages += {step};
             cx.reply(&state->messages, sizeof state->messages);
         }}"
    );
    // SAFETY: it returns, and touches its state alone, which is as long as the layout says.
    ActorSpec::new(name, unsafe { ActorCode::cuda(COUNT, source, "count") })
}

pub(super) fn sources(rig: &Rig) -> Result<()> {
    let (system, devices) = system(rig, 1, &config(1))?;
    let here = Placement::Device(devices[0]);
    let one = match system.spawn(&counter("by one", "1"), here) {
        Err(ActorError::Load(LoadError::Library { reason, .. })) => return Err(NotRun(reason).into()),
        spawned => spawned?,
    };
    let count = |actor: &warpweft_k2k_router::ActorRef| -> Result<u64> {
        let answer = actor.call(0, &[], within())?.payload;
        Ok(u64::from_le_bytes(answer.as_slice().try_into()?))
    };
    ensure!((count(&one)?, count(&one)?) == (1, 2), "it counts");
    // Another kernel goes on with the same states.
    let two = system.spawn(&counter("by two", "2"), here)?;
    ensure!((count(&one)?, count(&two)?, count(&two)?) == (3, 2, 4), "both count, and go on where they were");
    let wrong = system.spawn(&counter("wrong", "no_such_name"), here).err();
    let wrong = wrong.context("a source with a mistake was taken")?;
    let names_it =
        matches!(&wrong, ActorError::Code { actor, log } if actor == "wrong" && log.contains("no_such_name"));
    ensure!(names_it, "{wrong}");
    ensure!((count(&one)?, count(&two)?) == (4, 6), "and nothing has changed");
    Ok(system.shut_down(within())?)
}
