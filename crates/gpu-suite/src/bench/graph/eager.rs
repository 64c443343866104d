//! Operations one by one, each ordered behind the one before, beside a loop of launches.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use warpweft_core_types::{Arg, Launch, Op, QueueDesc, SemaphorePoint, Submission};
use warpweft_graph_runtime::{Completion, RunError, Runtime, RuntimeConfig};

use super::{
    Beside, Effort, WARM_UP,
    program::{Bound, Program},
    raw::visit,
    runtime,
};
use crate::{
    bench::{
        raw::{Raw, RawKernel, RawMemory},
        samples::in_turn,
    },
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
    for signals in [Signals::None, Signals::Late, Signals::Each] {
        in_a_queue(bench, raw, effort, signals)?;
    }
    let default = RuntimeConfig::default();
    let roomy = RuntimeConfig { max_submissions: 2 * effort.eager, ..default };
    one(bench, raw, effort, ("room for all", roomy))?;
    one(bench, raw, effort, ("room for 256, a wait for the oldest where there is none", default))
}

/// Who signals what, where there is no runtime.
#[derive(Debug, Clone, Copy)]
enum Signals {
    None,
    Late,
    Each,
}

/// The queue's part of it: the same launches, each a submission.
fn in_a_queue(bench: &Bench, raw: &Raw, effort: Effort, signals: Signals) -> Result<()> {
    let program = Program::chain(effort.eager);
    let bound = program.bind(bench)?;
    let args = bound.args();
    let desc = QueueDesc { capacity: usize::MAX };
    let (queue, semaphore) = (bench.device.create_queue(&desc)?, bench.device.create_semaphore(0)?);
    let mut value = 0;
    let mut own = || {
        let began = Instant::now();
        for (step, args) in args.iter().enumerate() {
            value += 1;
            let (ops, point) =
                ([Op::Launch(bound.launch(step, args)?)], [SemaphorePoint::new(&semaphore, value)]);
            let submission = Submission { waits: &[], ops: &ops, signals: &point };
            match signals {
                Signals::None => queue.submit(&Submission { signals: &[], ..submission })?,
                Signals::Late => queue.submit_late(&submission)?,
                Signals::Each => queue.submit(&submission)?,
            };
        }
        let submit = began.elapsed();
        value += 1;
        let last = SemaphorePoint::new(&semaphore, value);
        queue.submit(&Submission { signals: std::slice::from_ref(&last), ..Submission::default() })?;
        last.wait(LIMIT)?;
        Ok(submit)
    };
    let by_hand = ByHand::new(raw)?;
    let mut by_hand = || Ok(by_hand.run(raw, program.len())?.submit);
    let times = Beside::measure(effort.rounds, &mut own, &mut by_hand)?.each_of(program.len());
    let signals = match signals {
        Signals::None => "no signals",
        Signals::Late => "late signals",
        Signals::Each => "a signal each",
    };
    times.tell(&format!("in a queue, submit, {signals}: {}", program.name));
    Ok(())
}

/// The same by raw calls.
struct ByHand {
    kernel: RawKernel,
    words: [RawMemory; 2],
}

impl ByHand {
    fn new(raw: &Raw) -> Result<Self> {
        raw.make_current()?;
        Ok(Self { kernel: raw.kernel("visit")?, words: [raw.allocate(256)?, raw.allocate(256)?] })
    }

    fn run(&self, raw: &Raw, steps: usize) -> Result<Times> {
        let began = Instant::now();
        for step in 0..steps {
            visit(raw, self.kernel, self.words[(step + 1) % 2], self.words[step % 2])?;
        }
        let submit = began.elapsed();
        raw.synchronise()?;
        Ok(Times { submit, total: began.elapsed() })
    }
}

fn one(bench: &Bench, raw: &Raw, effort: Effort, (how, config): (&str, RuntimeConfig)) -> Result<()> {
    let (runtime, program) = (runtime(bench, config)?, Program::chain(effort.eager));
    let bound = program.bind(bench)?;
    let args = bound.args();
    let mut own = || ours(&runtime, &bound, &args);
    let by_hand = ByHand::new(raw)?;
    let mut by_hand = || by_hand.run(raw, program.len());
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
