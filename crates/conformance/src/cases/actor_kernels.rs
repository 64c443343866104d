//! Actors in CUDA C: what only they do, and what they do not do.

use std::{ops::Range, time::Duration};

use libtest_mimic::Failed;
use warpweft_core_types::{CodeFormat, Deadline, ErrorClass, Features, ResidentError};
use warpweft_k2k_router::{
    ActorCode, ActorError, ActorRef, ActorSpec, AskError, FullPolicy, Layout, Placement, Priority, Reason,
    SendError, SendOptions, System, SystemConfig,
};

use super::actors::{NO_STATE, SUMS, on, run_actors, until, within, words};
use crate::{
    actors,
    context::Context,
    harness::{Case, Verdict},
};

const NEEDS: Features = Features::RESIDENT_KERNELS;

pub(super) const CASES: &[Case] = &[
    Case::new("actor_kernels::defer_and_overtake", defer_and_overtake).needs(NEEDS).when(run_kernels),
    Case::new("actor_kernels::say_why_messages_are_dead", say_why).needs(NEEDS).when(run_kernels),
    Case::new("actor_kernels::a_handler_that_loops_is_named", loops).needs(NEEDS).when(run_kernels),
    Case::new("actor_kernels::a_fault_ends_what_was_asked", fault)
        .needs(NEEDS)
        .when(run_kernels)
        .may_lose_device(),
    Case::new("actor_kernels::streams_come_whole_and_in_order", streams).needs(NEEDS).when(run_kernels),
    Case::new("actor_kernels::streams_between_devices", streams_between_devices)
        .needs(NEEDS)
        .devices(2)
        .when(run_kernels),
    Case::new("actor_kernels::all_threads_of_a_warp_may_run_a_handler", warps).needs(NEEDS).when(run_kernels),
    Case::new("actor_kernels::refuse_what_they_do_not_do", refuse).needs(NEEDS).when(run_kernels),
    Case::new("actor_kernels::refuse_one_workgroup_too_many", too_many).needs(NEEDS).when(run_kernels),
];

const GATE: Layout = Layout { id: 2, size: 24 };
const FORWARD: Layout = Layout { id: 3, size: 16 };
const STREAM: Layout = Layout { id: 4, size: 24 };
const SINK: Layout = Layout { id: 5, size: 48 };

fn positions(cx: &Context) -> Range<usize> {
    0..cx.devices().len().max(1)
}

fn is_cuda(cx: &Context, at: usize) -> bool {
    cx.infos[at].code_formats.contains(&CodeFormat::CudaC)
}

/// All of them are kernels.
fn run_kernels(cx: &Context) -> Result<(), &'static str> {
    run_actors(cx)?;
    positions(cx).all(|at| is_cuda(cx, at)).then_some(()).ok_or("is about actors in CUDA C")
}

fn spec(handler: &str, state: Layout) -> ActorSpec {
    ActorSpec::new(handler, ActorCode::of_image(state, &actors::executor_image(), handler))
}

fn start(cx: &Context, executors: u32) -> Result<System, Failed> {
    let config = SystemConfig { executors_per_device: executors, sample_every: 1, ..SystemConfig::default() };
    Ok(System::start(cx.devices().to_vec(), &config)?)
}

fn bytes(all: &[u32]) -> Vec<u8> {
    all.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn asked(actor: &ActorRef) -> Result<Vec<u64>, Failed> {
    Ok(words(&actor.call(1, &[], within())?.payload))
}

fn defer_and_overtake(cx: &Context) -> Verdict {
    let system = start(cx, 1)?;
    let gate = system.spawn(&spec("gate", GATE), on(cx, 0))?;
    for number in 1..=3_u64 {
        gate.send(0, &number.to_le_bytes(), within())?;
    }
    assert_eq!(asked(&gate)?, [0, 0, 0], "they are deferred");
    gate.send(2, &[], within())?;
    until(|| Ok(asked(&gate)?[1..] == [3, 123]))?;
    // What waits while it is parked comes by its priority.
    let parked = system.park(&gate, within())?;
    for (number, priority) in [(4_u64, Priority::Low), (5, Priority::Normal), (6, Priority::High)] {
        let options = SendOptions { priority: Some(priority), ..SendOptions::default() };
        gate.send_with(0, &number.to_le_bytes(), options, within())?;
    }
    until(|| Ok(system.pending(within()).0.len() == 3))?;
    parked.resume();
    until(|| Ok(asked(&gate)?[1..] == [6, 123_654]))?;
    until(|| Ok(gate.served() >= 8))?;
    Ok(system.shut_down(within())?)
}

/// What was counted of dead letters.
fn dead(system: &System, reason: Reason) -> u64 {
    system.snapshot().dead_letters.get(&reason).copied().unwrap_or(0)
}

fn forward(system: &System, cx: &Context, to: u32, rest: [u32; 3]) -> Result<ActorRef, Failed> {
    let forward = system.spawn(&spec("forward", FORWARD), on(cx, 0))?;
    forward.send(2, &bytes(&[to, rest[0], rest[1], rest[2]]), within())?;
    Ok(forward)
}

fn say_why(cx: &Context) -> Verdict {
    let system = start(cx, 1)?;
    let usual = |to| forward(&system, cx, to, [1, 3, 0]);
    usual(9999)?.send(0, &[], within())?;
    until(|| Ok(dead(&system, Reason::UnknownActor) == 1))?;
    let [stopped, killed] = [(); 2].map(|()| system.spawn(&spec("tally", SUMS), on(cx, 0)));
    let (stopped, killed) = (stopped?, killed?);
    let parked = system.park(&killed, within())?;
    killed.send(0, &[0; 8], within())?;
    let question = killed.ask(1, &[], within())?;
    system.kill(&killed)?;
    drop(parked);
    let answer = question.wait(within());
    assert!(
        matches!(
            answer,
            Err(AskError::Lost { reason: Reason::ActorKilled, .. } | AskError::NotServed { .. })
        ),
        "{answer:?}"
    );
    system.stop(&stopped, within())?;
    usual(stopped.id().0)?.send(0, &[], within())?;
    until(|| Ok(dead(&system, Reason::ActorStopped) == 1))?;
    // The two that waited, and one more.
    usual(killed.id().0)?.send(0, &[], within())?;
    until(|| Ok(dead(&system, Reason::ActorKilled) >= 3))?;

    let picky = spec("tally", SUMS);
    let picky = ActorSpec { code: picky.code.takes(5, Layout { id: 9, size: 8 }), ..picky };
    let picky = system.spawn(&picky, on(cx, 0))?;
    usual(picky.id().0)?.send(0, &[0; 8], within())?;
    until(|| Ok(dead(&system, Reason::Refused) == 1))?;

    let small = system.spawn(&spec("tally", SUMS).with_inbox(2, FullPolicy::Reject), on(cx, 0))?;
    let parked = system.park(&small, within())?;
    forward(&system, cx, small.id().0, [5, 3, 0])?.send(0, &[0; 8], within())?;
    until(|| Ok(dead(&system, Reason::InboxFull) == 3))?;
    parked.resume();

    let late = system.spawn(&spec("tally", SUMS), on(cx, 0))?;
    let parked = system.park(&late, within())?;
    let options = SendOptions { deadline: Some(Duration::from_micros(1)), ..SendOptions::default() };
    late.send_with(0, &[0; 8], options, within())?;
    forward(&system, cx, late.id().0, [1, 3, 1])?.send(0, &[0; 8], within())?;
    until(|| Ok(system.pending(within()).0.len() == 2))?;
    parked.resume();
    until(|| Ok(dead(&system, Reason::Expired) == 2))?;
    assert_eq!(asked(&late)?, [0, 0]);
    Ok(system.shut_down(within())?)
}

fn loops(cx: &Context) -> Verdict {
    let system = start(cx, 2)?;
    let looping = system.spawn(&spec("looping", NO_STATE), on(cx, 0))?;
    let echo = system.spawn(&spec("echo", NO_STATE), on(cx, 0))?;
    let began = std::time::Instant::now();
    let looped = looping.ask(0, &3_000_000_000_u64.to_le_bytes(), within())?;
    until(|| Ok(system.snapshot().devices[0].unparkable == Some(looping.id())))?;
    assert!(began.elapsed() < Duration::from_secs(3), "named while it looped");
    // Whoever has another executor is served beside it.
    assert_eq!(echo.call(0, b"beside", within())?.payload, b"beside");
    assert!(looped.try_take().is_none(), "it still loops");
    let parked = system.park(&looping, Deadline::within(Duration::from_millis(50)));
    let inside = looping.id();
    assert!(
        matches!(&parked, Err(ActorError::Unparkable { inside: named, .. }) if *named == inside),
        "{parked:?}"
    );
    looped.wait(within())?;
    until(|| Ok(system.snapshot().devices[0].unparkable.is_none()))?;
    looping.call(0, &0_u64.to_le_bytes(), within())?;
    Ok(system.shut_down(within())?)
}

fn fault(cx: &Context) -> Verdict {
    let system = start(cx, 1)?;
    let trap = system.spawn(&spec("trap", NO_STATE), on(cx, 0))?;
    let answer = trap.ask(0, &[], within())?.wait(within());
    assert!(matches!(&answer, Err(AskError::Lost { reason: Reason::DeviceLost, .. })), "{answer:?}");
    let gone = SendError::Gone { actor: trap.id(), reason: Reason::DeviceLost };
    assert_eq!(trap.send(0, &[], within()), Err(gone));
    assert!(system.snapshot().devices[0].is_lost);
    let again = system.spawn(&spec("trap", NO_STATE), on(cx, 0));
    assert!(matches!(&again, Err(ActorError::NoDevice { .. })), "{again:?}");
    Ok(())
}

/// Has `count` checked messages sent from one actor to another, and looks at what came.
fn stream(
    system: &System,
    from: Placement,
    to: Placement,
    seed: u32,
    count: u32,
) -> Result<ActorRef, Failed> {
    let sink = system.spawn(&spec("sink", SINK), to)?;
    sink.send(2, &bytes(&[seed]), within())?;
    // What the stream sends comes by another lane, and may come before what was sent before.
    assert_eq!(asked(&sink)?[0], 0);
    let stream = system.spawn(&spec("stream", STREAM), from)?;
    stream.send(2, &bytes(&[sink.id().0, count, seed, 8]), within())?;
    stream.send(0, &[], within())?;
    Ok(sink)
}

fn expect_all(sinks: &[ActorRef], count: u64) -> Verdict {
    for sink in sinks {
        until(|| Ok(asked(sink)?[0] == count))?;
        assert_eq!(asked(sink)?[..3], [count, 0, 0], "each once, whole and in order");
    }
    Ok(())
}

fn streams(cx: &Context) -> Verdict {
    let system = start(cx, 2)?;
    // The second pair is at the other executor, or across, as places are given by turns.
    let sinks = (1..=3).map(|seed| stream(&system, on(cx, 0), on(cx, 0), seed, 600));
    let sinks = sinks.collect::<Result<Vec<_>, _>>()?;
    expect_all(&sinks, 600)?;
    let snapshot = system.snapshot();
    assert_eq!(snapshot.dead_letters.len(), 0, "{:?}", snapshot.dead_letters);
    until(|| Ok(system.snapshot().served >= 1800))?;
    Ok(system.shut_down(within())?)
}

fn streams_between_devices(cx: &Context) -> Verdict {
    let system = start(cx, 1)?;
    let there = stream(&system, on(cx, 0), on(cx, 1), 1, 600)?;
    let back = stream(&system, on(cx, 1), on(cx, 0), 2, 600)?;
    expect_all(&[there, back], 600)?;
    assert_eq!(system.snapshot().dead_letters.len(), 0);
    Ok(system.shut_down(within())?)
}

fn warps(cx: &Context) -> Verdict {
    let system = start(cx, 1)?;
    let echo = system.spawn(&ActorSpec { threads: 32, ..spec("echo", NO_STATE) }, on(cx, 0))?;
    for length in [0_usize, 3, 64, 335, 336, 337, 1020, 1021, 5000, 16 << 10] {
        let question: Vec<u8> = (0..length).map(|index| index.to_le_bytes()[0]).collect();
        assert_eq!(echo.call(0, &question, within())?.payload, question);
    }
    Ok(system.shut_down(within())?)
}

fn refuse(cx: &Context) -> Verdict {
    let system = start(cx, 1)?;
    let unsupported = |result: Result<ActorRef, ActorError>| {
        let error = result.err().ok_or("it was accepted")?;
        assert_eq!(error.class(), ErrorClass::Unsupported, "{error}");
        Ok::<_, Failed>(())
    };
    for full in [FullPolicy::DropOldest, FullPolicy::Spill] {
        unsupported(system.spawn(&spec("tally", SUMS).with_inbox(4, full), on(cx, 0)))?;
    }
    let rust = ActorSpec::new("rust", ActorCode::host(NO_STATE, |_, _, _| {}));
    unsupported(system.spawn(&rust, on(cx, 0)))?;
    unsupported(system.spawn(&rust, Placement::Any))?;
    unsupported(system.spawn(&spec("no such handler", NO_STATE), on(cx, 0)))?;
    let odd = system.spawn(&ActorSpec { threads: 7, ..spec("tally", SUMS) }, on(cx, 0));
    assert!(matches!(&odd, Err(ActorError::Invalid { .. })), "{odd:?}");
    let large = system.spawn(&spec("tally", Layout { id: 1, size: 1 << 30 }), on(cx, 0));
    assert_eq!(large.err().map(|error| error.class()), Some(ErrorClass::Exhausted));
    Ok(system.shut_down(within())?)
}

/// Case K2, before anything is launched: as many executors as fit, and the bridge.
fn too_many(cx: &Context) -> Verdict {
    let config = SystemConfig {
        // No more than 32 workgroups fit on a multiprocessor of any device.
        executors_per_device: cx.infos[0].multiprocessors * 32,
        lane_lines: 8,
        waiting_bytes: 0,
        ..SystemConfig::default()
    };
    let system = System::start(cx.devices().to_vec(), &config)?;
    let refused = system.spawn(&spec("echo", NO_STATE), on(cx, 0)).err().ok_or("too many were accepted")?;
    assert!(matches!(&refused, ActorError::Resident(ResidentError::OverBudget { .. })), "{refused}");
    Ok(())
}
