//! Actors on these devices, and the messages they send each other.

use std::{ops::Range, sync::Arc, time::Duration};

use libtest_mimic::Failed;
use warpweft_core_types::{Arg, BufferDesc, CodeFormat, Deadline, ErrorClass, Features, Launch, Op};
use warpweft_k2k_router::{
    ActorCode, ActorError, ActorId, ActorRef, ActorSpec, FullPolicy, Layout, Placement, Reason, SendError,
    System, SystemConfig, Way,
};

use crate::{
    actors,
    context::{Context, PATIENCE, allocate},
    harness::{Case, Verdict},
    kernels,
};

const NEEDS: Features = Features::RESIDENT_KERNELS;

pub(super) const CASES: &[Case] = &[
    Case::new("actors::answer_what_they_are_asked", answer_what_they_are_asked).needs(NEEDS).when(run_actors),
    Case::new("actors::send_to_each_other_and_to_themselves", send_to_each_other)
        .needs(NEEDS)
        .devices(2)
        .when(run_actors),
    Case::new("actors::keep_state_and_order_while_they_move", keep_state_and_order)
        .needs(NEEDS)
        .devices(2)
        .when(move_actors),
    Case::new("actors::stand_still_while_they_are_parked", stand_still).needs(NEEDS).when(run_actors),
    Case::new("actors::let_code_and_memory_through", let_code_and_memory_through)
        .needs(NEEDS.union(Features::HOST_VISIBLE_MEMORY))
        .when(run_actors),
    Case::new("actors::refuse_what_is_too_much", refuse_what_is_too_much).needs(NEEDS).when(run_actors),
    Case::new("actors::end_with_a_reason", end_with_a_reason).needs(NEEDS).when(run_actors),
    Case::new("actors::are_refused_where_nothing_runs_them", are_refused).when(run_no_actors),
];

fn is_host(cx: &Context, at: usize) -> bool {
    cx.infos[at].code_formats.contains(&CodeFormat::HostFunction)
}

fn is_cuda(cx: &Context, at: usize) -> bool {
    cx.infos[at].code_formats.contains(&CodeFormat::CudaC)
}

fn positions(cx: &Context) -> Range<usize> {
    0..cx.devices().len().max(1)
}

fn has_executor(cx: &Context) -> bool {
    positions(cx).all(|at| is_host(cx, at) || is_cuda(cx, at))
}

pub(super) fn run_actors(cx: &Context) -> Result<(), &'static str> {
    has_executor(cx).then_some(()).ok_or("needs devices whose executor of actors is written")?;
    // A stand-in is known by what it calls its driver; its actors are a library of the CPU's.
    let is_stand_in = |at: usize| is_cuda(cx, at) && cx.infos[at].name.to_lowercase().contains("stand-in");
    match positions(cx).any(is_stand_in) {
        true => actors::actors_library().map(|_| ()),
        false => Ok(()),
    }
}

fn move_actors(cx: &Context) -> Result<(), &'static str> {
    run_actors(cx)?;
    positions(cx).all(|at| is_host(cx, at)).then_some(()).ok_or("actors in CUDA C do not move yet")
}

fn run_no_actors(cx: &Context) -> Result<(), &'static str> {
    (!has_executor(cx)).then_some(()).ok_or("is about devices that run no actors")
}

pub(super) const NO_STATE: Layout = Layout { id: 0, size: 0 };
pub(super) const SUMS: Layout = Layout { id: 1, size: 16 };

fn start(cx: &Context) -> Result<System, Failed> {
    Ok(System::start(cx.devices().to_vec(), &SystemConfig::default())?)
}

pub(super) fn within() -> Deadline {
    Deadline::within(PATIENCE)
}

pub(super) fn on(cx: &Context, position: usize) -> Placement {
    Placement::Device(cx.device(position).info().id)
}

pub(super) fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

/// The code of an actor at this position: a Rust function, or a handler of the suite's in CUDA C.
fn code_at(cx: &Context, at: usize, host: ActorCode, state: Layout, handler: &str) -> ActorCode {
    if is_host(cx, at) { host } else { ActorCode::of_image(state, &actors::executor_image(), handler) }
}

/// Counts messages, and those whose number is not the count; kind 1 asks for both.
fn tally(cx: &Context, at: usize) -> ActorSpec {
    let host = ActorCode::host(SUMS, |cx, state, message| {
        if message.header.kind == 1 {
            return cx.reply(state);
        }
        let (sums, number) = (words(state), words(&message.payload));
        let wrong = u64::from(number.first() != sums.first());
        let sums = [sums[0] + 1, sums[1] + wrong];
        state.copy_from_slice(&sums.map(u64::to_le_bytes).concat());
    });
    ActorSpec::new("tally", code_at(cx, at, host, SUMS, "tally"))
}

fn echo(cx: &Context, at: usize) -> ActorSpec {
    let host = ActorCode::host(NO_STATE, |cx, _, message| cx.reply(&message.payload));
    ActorSpec::new("echo", code_at(cx, at, host, NO_STATE, "echo"))
}

fn tallied(actor: &ActorRef) -> Result<(u64, u64), Failed> {
    let sums = words(&actor.call(1, &[], within())?.payload);
    Ok((sums[0], sums[1]))
}

pub(super) fn until(mut done: impl FnMut() -> Result<bool, Failed>) -> Verdict {
    let deadline = within();
    while !done()? {
        if deadline.is_past() {
            return Err("it did not happen in time".into());
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn answer_what_they_are_asked(cx: &Context) -> Verdict {
    let system = start(cx)?;
    let echo = system.spawn(&echo(cx, 0), on(cx, 0))?;
    for length in [0_usize, 1, 12, 64, 1000, 16 << 10] {
        let question: Vec<u8> = (0..length).map(|index| index.to_le_bytes()[0]).collect();
        assert_eq!(echo.call(0, &question, within())?.payload, question);
    }
    Ok(system.shut_down(within())?)
}

/// Sends each number below `count` to both, and the next to itself.
fn source(
    system: &System,
    cx: &Context,
    at: usize,
    to: [ActorId; 2],
    count: u32,
) -> Result<ActorRef, Failed> {
    let host = ActorCode::host(SUMS, |cx, state, message| {
        let word =
            |bytes: &[u8], at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at * 4 + byte]));
        if message.header.kind == 2 {
            return state[..12].copy_from_slice(&message.payload);
        }
        cx.broadcast(&[0, 1].map(|at| ActorId(word(state, at))), 0, &message.payload);
        let number = words(&message.payload)[0] + 1;
        if number < u64::from(word(state, 2)) {
            cx.send(cx.id(), 0, &number.to_le_bytes());
        }
    });
    let spec = ActorSpec::new("source", code_at(cx, at, host, SUMS, "source"));
    let source = system.spawn(&spec, on(cx, at))?;
    source.send(2, &[to[0].0, to[1].0, count].map(u32::to_le_bytes).concat(), within())?;
    Ok(source)
}

fn send_to_each_other(cx: &Context) -> Verdict {
    let system = start(cx)?;
    let (near, far) = (system.spawn(&tally(cx, 0), on(cx, 0))?, system.spawn(&tally(cx, 1), on(cx, 1))?);
    let source = source(&system, cx, 0, [near.id(), far.id()], 1000)?;
    source.send(0, &0_u64.to_le_bytes(), within())?;
    // Where no way leads to the other device, its messages are named, and the near ones come all the same.
    let way = system.way(cx.device(0).info().id, cx.device(1).info().id)?;
    if way == Way::Unreachable {
        until(|| Ok(system.snapshot().dead_letters.get(&Reason::Unreachable) == Some(&1000)))?;
    } else {
        until(|| Ok(tallied(&far)?.0 == 1000))?;
        assert_eq!(tallied(&far)?.1, 0, "in order");
    }
    until(|| Ok(tallied(&near)?.0 == 1000))?;
    assert_eq!(tallied(&near)?.1, 0, "in order");
    Ok(system.shut_down(within())?)
}

fn keep_state_and_order(cx: &Context) -> Verdict {
    let system = start(cx)?;
    let actor = system.spawn(&tally(cx, 0), on(cx, 0))?;
    let sent = std::thread::scope(|scope| {
        let sender = scope
            .spawn(|| (0_u64..20_000).try_for_each(|number| actor.send(0, &number.to_le_bytes(), within())));
        let mut moves = 0;
        while !sender.is_finished() && moves < 50 {
            moves += 1;
            match system.relocate(&actor, on(cx, moves % 2), within()) {
                // Devices that do not reach each other could hand nothing on.
                Err(ActorError::Unreachable { .. }) => break,
                moved => moved?,
            }
        }
        Ok::<_, Failed>(sender.join().map_err(|_| "the sender panicked")?)
    })?;
    sent?;
    until(|| Ok(tallied(&actor)?.0 == 20_000))?;
    assert_eq!(tallied(&actor)?, (20_000, 0), "each once and in order");
    assert_eq!(system.snapshot().dead_letters.len(), 0);
    Ok(system.shut_down(within())?)
}

fn stand_still(cx: &Context) -> Verdict {
    let system = start(cx)?;
    let actor = system.spawn(&tally(cx, 0), on(cx, 0))?;
    for round in 0..20_u64 {
        let parked = system.park(&actor, within())?;
        for number in round * 10..round * 10 + 10 {
            actor.send(0, &number.to_le_bytes(), within())?;
        }
        until(|| Ok(system.pending(within()).0.len() == 10))?;
        parked.resume();
        until(|| Ok(tallied(&actor)?.0 == round * 10 + 10))?;
    }
    assert_eq!(tallied(&actor)?, (200, 0));
    Ok(system.shut_down(within())?)
}

/// Case K1 of a kind: nothing hangs beside an actor.
fn let_code_and_memory_through(cx: &Context) -> Verdict {
    let system = start(cx)?;
    let actor = system.spawn(&tally(cx, 0), on(cx, 0))?;
    actor.send(0, &0_u64.to_le_bytes(), within())?;
    let memory = cx.memory(0, 40)?;
    for base in 0..5_u32 {
        let deadline = Deadline::within(Duration::from_secs(2));
        let (kernel, scratch) =
            (cx.kernel(0, &kernels::number())?, allocate(cx.device(0), BufferDesc::device(1 << 16))?);
        let base = base.to_le_bytes();
        let args = [Arg::Buffer(&memory), Arg::Scalar(&base)];
        cx.lane(0)?.run(&[Op::Launch(Launch::new(&kernel, [10, 1, 1], &args)?)])?;
        drop(scratch);
        assert!(!deadline.is_past(), "loading, launching and freeing beside an actor");
    }
    assert_eq!(cx.download_words(0, &memory)?, (4..14).collect::<Vec<u32>>());
    until(|| Ok(tallied(&actor)? == (1, 0)))?;
    Ok(system.shut_down(within())?)
}

fn refuse_what_is_too_much(cx: &Context) -> Verdict {
    let system = start(cx)?;
    let actor = system.spawn(&tally(cx, 0).with_inbox(4, FullPolicy::Reject), on(cx, 0))?;
    let parked = system.park(&actor, within())?;
    for number in 0..4_u64 {
        actor.send(0, &number.to_le_bytes(), within())?;
    }
    let full = SendError::Full { actor: actor.id() };
    assert_eq!(actor.send(0, &[0; 8], within()), Err(full.clone()));
    assert_eq!(actor.try_send(0, &[0; 8]), Err(full));
    let long = actor.send(0, &[0; (16 << 10) + 1], within());
    assert!(matches!(long, Err(SendError::TooLong { .. })), "{long:?}");
    parked.resume();
    until(|| Ok(tallied(&actor).is_ok()))?;
    assert_eq!(tallied(&actor)?, (4, 0));
    Ok(system.shut_down(within())?)
}

fn end_with_a_reason(cx: &Context) -> Verdict {
    let system = start(cx)?;
    let (stopped, killed) =
        (system.spawn(&tally(cx, 0), on(cx, 0))?, system.spawn(&tally(cx, 0), on(cx, 0))?);
    system.stop(&stopped, within())?;
    system.kill(&killed)?;
    for (actor, reason) in [(stopped, Reason::ActorStopped), (killed, Reason::ActorKilled)] {
        let gone = SendError::Gone { actor: actor.id(), reason };
        assert_eq!(actor.send(0, &[], within()), Err(gone));
    }
    Ok(system.shut_down(within())?)
}

fn are_refused(cx: &Context) -> Verdict {
    let refused = System::start(vec![Arc::clone(cx.device(0))], &SystemConfig::default());
    let error = refused.err().ok_or("actors were accepted")?;
    assert!(matches!(&error, ActorError::Unsupported { device, .. } if *device == cx.device(0).info().id));
    assert_eq!(error.class(), ErrorClass::Unsupported);
    Ok(())
}
