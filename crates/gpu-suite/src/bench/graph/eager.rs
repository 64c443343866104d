//! Operations one by one, each ordered behind the one before, beside a loop of launches.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use warpweft_core_types::{Arg, Launch};
use warpweft_graph_runtime::{Completion, RunError, Runtime, RuntimeConfig};

use super::{
    Beside, Effort, WARM_UP,
    program::{Bound, Program},
    raw::visit,
    runtime,
};
use crate::{
    bench::{raw::Raw, samples::in_turn},
    rig::{Bench, LIMIT},
};

/// More than a plain launch, in microseconds.
const EAGER: f64 = 1.5;

/// How long submitting took, and how long until all was done.
struct Times {
    submit: Duration,
    total: Duration,
}

pub(super) fn run(bench: &Bench, raw: &Raw, effort: Effort) -> Result<()> {
    let default = RuntimeConfig::default();
    let roomy = RuntimeConfig { max_submissions: 2 * effort.eager, ..default };
    one(bench, raw, effort, ("room for all", roomy))?;
    one(bench, raw, effort, ("room for 256, a wait for the oldest where there is none", default))
}

fn one(bench: &Bench, raw: &Raw, effort: Effort, (how, config): (&str, RuntimeConfig)) -> Result<()> {
    let (runtime, program) = (runtime(bench, config)?, Program::chain(effort.eager));
    let bound = program.bind(bench)?;
    let args = bound.args();
    raw.make_current()?;
    let (kernel, words) = (raw.kernel("visit")?, [raw.allocate(256)?, raw.allocate(256)?]);
    let mut own = || ours(&runtime, &bound, &args);
    let mut by_hand = || {
        let began = Instant::now();
        for step in 0..program.len() {
            visit(raw, kernel, words[(step + 1) % 2], words[step % 2])?;
        }
        let submit = began.elapsed();
        raw.synchronise()?;
        Ok(Times { submit, total: began.elapsed() })
    };
    let (mut submit, mut total) = (Beside::default(), Beside::default());
    for round in 0..effort.rounds + WARM_UP {
        let (ours, raw) = in_turn(round, &mut own, &mut by_hand)?;
        submit.add(round, (ours.submit, raw.submit));
        total.add(round, (ours.total, raw.total));
    }
    let name = &program.name;
    submit.each_of(program.len()).judge_more(&format!("one by one, submit, {how}: {name}"), EAGER);
    total.each_of(program.len()).judge_more(&format!("one by one, until done, {how}: {name}"), EAGER);
    Ok(())
}

fn ours(runtime: &Runtime, bound: &Bound, args: &[Vec<Arg<'_>>]) -> Result<Times> {
    let mut under_way = VecDeque::with_capacity(args.len());
    let began = Instant::now();
    for (step, args) in args.iter().enumerate() {
        let completion = launch(runtime, bound.launch(step, args)?, &mut under_way)?;
        under_way.push_back(completion);
    }
    let submit = began.elapsed();
    under_way.back().context("there is one")?.wait(LIMIT)?;
    Ok(Times { submit, total: began.elapsed() })
}

/// Launches it, once there is room.
fn launch(runtime: &Runtime, launch: Launch<'_>, under_way: &mut VecDeque<Completion>) -> Result<Completion> {
    loop {
        match runtime.launch(launch) {
            Err(RunError::Busy { reason }) => {
                let oldest = under_way.pop_front().with_context(|| format!("busy with nothing: {reason}"))?;
                oldest.wait(LIMIT)?;
            }
            other => return Ok(other?),
        }
    }
}
