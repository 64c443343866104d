//! Replays from their submission until somebody has waited for them, and what a submission costs its caller.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use warpweft_graph_runtime::{Completion, ExecutableGraph, RuntimeConfig};

use super::{
    Beside, Effort,
    program::Program,
    raw::{RawGraph, RawTemplate},
    runtime,
};
use crate::{
    bench::{
        alloc,
        raw::Raw,
        samples::{tell_allocations, timed},
    },
    rig::{Bench, LIMIT},
};

/// Replays that follow each other without a wait; a slot for each.
const BURST: usize = 8;

/// Of the time by hand.
const REPLAY: f64 = 1.05;
/// More than the time by hand, in microseconds.
const SUBMIT: f64 = 1.0;

/// How an end is waited for. Each has its counterpart by hand.
#[derive(Debug, Clone, Copy)]
enum Wait {
    /// `Completion::wait`, beside `cuStreamSynchronize`.
    Blocking,
    /// Asking again and again, beside `cuEventQuery`.
    Polling,
}

pub(super) fn run(bench: &Bench, raw: &Raw, effort: Effort) -> Result<()> {
    for len in effort.replayed {
        for program in [Program::chain(len), Program::stencil(len)] {
            one(bench, raw, &program, effort)?;
        }
    }
    Ok(())
}

fn one(bench: &Bench, raw: &Raw, program: &Program, effort: Effort) -> Result<()> {
    let runtime = runtime(bench, RuntimeConfig { graph_slots: BURST, ..RuntimeConfig::default() })?;
    let bound = program.bind(bench)?;
    let args = bound.args();
    let graph = bound.record(&runtime, &args)?;
    raw.make_current()?;
    let by_hand = RawTemplate::new(&program.by_hand(raw, &graph)?)?.instantiate()?;
    let ours = graph.prepare()?;
    for (how, wait) in [("wait", Wait::Blocking), ("poll", Wait::Polling)] {
        for replays in [BURST, 1] {
            let mut own = || timed(|| replay(&ours, replays, wait));
            let mut theirs = || timed(|| replay_by_hand(raw, &by_hand, replays, wait));
            let beside = Beside::measure(effort.rounds, &mut own, &mut theirs)?.each_of(replays);
            let name = &program.name;
            beside.judge_ratio(&format!("replay, {replays} back to back, one {how}: {name}"), REPLAY);
        }
    }
    if program.len() == effort.replayed[0] {
        submission(raw, program, (&ours, &by_hand), effort)?;
    }
    Ok(())
}

fn replay(graph: &ExecutableGraph, replays: usize, wait: Wait) -> Result<()> {
    let mut last = None;
    for _ in 0..replays {
        last = Some(graph.submit_by(LIMIT)?);
    }
    let last = last.context("there is a replay")?;
    match wait {
        Wait::Blocking => Ok(last.wait(LIMIT)?),
        Wait::Polling => poll(&last),
    }
}

/// Asks until it has ended.
fn poll(completion: &Completion) -> Result<()> {
    let began = Instant::now();
    loop {
        if let Some(outcome) = completion.outcome() {
            return Ok(outcome?);
        }
        ensure!(began.elapsed() < LIMIT, "it did not end");
    }
}

fn replay_by_hand(raw: &Raw, graph: &RawGraph, replays: usize, wait: Wait) -> Result<()> {
    for _ in 0..replays {
        graph.launch(raw)?;
    }
    match wait {
        Wait::Blocking => raw.synchronise(),
        Wait::Polling => {
            raw.record()?;
            raw.query()
        }
    }
}

/// What submitting costs the thread that does it, and allocates: alone on an idle device, and several in a row.
fn submission(
    raw: &Raw,
    program: &Program,
    (ours, by_hand): (&ExecutableGraph, &RawGraph),
    effort: Effort,
) -> Result<()> {
    for (submissions, how) in [(1, "one on an idle device"), (BURST, "several in a row")] {
        let mut allocations = Vec::with_capacity(effort.many_rounds + super::WARM_UP);
        let mut own = || {
            let before = alloc::count_here();
            let began = Instant::now();
            let mut last = None;
            for _ in 0..submissions {
                last = Some(ours.submit()?);
            }
            let took = began.elapsed();
            allocations.push(alloc::count_here() - before);
            last.context("there is one")?.wait(LIMIT)?;
            Ok(took)
        };
        let mut theirs = || -> Result<Duration> {
            let took = timed(|| {
                for _ in 0..submissions {
                    by_hand.launch(raw)?;
                    raw.record()?;
                }
                Ok(())
            })?;
            raw.synchronise()?;
            Ok(took)
        };
        let beside = Beside::measure(effort.many_rounds, &mut own, &mut theirs)?.each_of(submissions);
        let what = format!("submit, {how} (raw: launch and record): {}", program.name);
        beside.judge_more(&what, SUBMIT);
        // The calling thread's. The median is judged, as it is of the times.
        let what = format!("allocations: {what}");
        tell_allocations(&what, allocations.split_off(super::WARM_UP), submissions, Some(50));
    }
    Ok(())
}
