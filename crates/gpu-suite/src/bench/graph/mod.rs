//! What graphs cost beside the driver's own, made by hand with the same nodes and edges; in rounds that alternate, where
//! each side goes first as often as second.

mod eager;
mod overlap;
mod peers;
mod program;
pub(crate) mod raw;
mod record;
mod replay;

use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use warpweft_cli::measure::Bar;
use warpweft_graph_runtime::{Runtime, RuntimeConfig};

use super::{
    raw::Raw,
    samples::{Samples, in_turn, judge},
};
use crate::{
    kernels,
    rig::{Bench, Rig, report, say},
};

/// How much is measured.
#[derive(Debug, Clone, Copy)]
struct Effort {
    /// Rounds of a figure, and of one that is a small difference of large times.
    rounds: usize,
    many_rounds: usize,
    /// Nodes of what is recorded and prepared, and of what is replayed.
    recorded: usize,
    replayed: [usize; 2],
    /// Operations one by one.
    eager: usize,
    /// Chunks that are copied there, worked on and copied back.
    chunks: usize,
    /// Whether the chunks' work is made as long as their copies.
    calibrates: bool,
}

const FULL: Effort = Effort {
    rounds: 41,
    many_rounds: 301,
    recorded: 2000,
    replayed: [100, 1000],
    eager: 2000,
    chunks: 64,
    calibrates: true,
};

/// Enough to see that all of it works.
const QUICK: Effort = Effort {
    rounds: 2,
    many_rounds: 2,
    recorded: 100,
    replayed: [10, 40],
    eager: 50,
    chunks: 3,
    calibrates: false,
};

/// The first rounds warm up.
const WARM_UP: usize = 5;

pub(super) fn run(quick: bool) -> Result<()> {
    let effort = if quick { QUICK } else { FULL };
    let rig = Rig::with(&kernels::graph())?;
    rig.describe()?;
    let (first, raw) = (rig.first(), Raw::with(0, kernels::GRAPH_PTX)?);
    record::run(first, &raw, effort)?;
    replay::run(first, &raw, effort)?;
    eager::run(first, &raw, effort)?;
    overlap::run(first, &raw, effort)?;
    peers::run(&rig, effort)
}

fn runtime(bench: &Bench, config: RuntimeConfig) -> Result<Runtime> {
    Ok(Runtime::new([std::sync::Arc::clone(&bench.device)], config)?)
}

/// Times of ours, and of the raw calls taken at nearly the same time.
#[derive(Default)]
struct Beside {
    ours: Samples,
    raw: Samples,
}

/// A way to do something, and how long it took.
type Way<'a> = &'a mut dyn FnMut() -> Result<Duration>;

impl Beside {
    fn measure(rounds: usize, ours: Way<'_>, raw: Way<'_>) -> Result<Self> {
        let mut beside = Self::default();
        for round in 0..rounds + WARM_UP {
            let times = in_turn(round, ours, raw)?;
            beside.add(round, times);
        }
        Ok(beside)
    }

    fn add(&mut self, round: usize, (ours, raw): (Duration, Duration)) {
        if round >= WARM_UP {
            self.ours.add(ours);
            self.raw.add(raw);
        }
    }

    /// The same of equal parts of each.
    fn each_of(self, parts: usize) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "counts of nodes")]
        let parts = parts as f64;
        Self { ours: self.ours.each_of(parts), raw: self.raw.each_of(parts) }
    }

    /// Tells the times, and their ratio with the interval of its median, without judging.
    fn tell(&self, what: &str) -> [f64; 3] {
        let [low, median, high] = self.ours.ratio(&self.raw);
        let beyond = self.ours.beyond(&self.raw);
        let [least, more, most] = beyond.interval();
        report(&json!({"figure": what, "ours": self.ours.json(), "raw": self.raw.json(),
            "ratio": {"p50": median, "low": low, "high": high},
            "more than raw": {"p50": more, "low": least, "high": most, "p99": beyond.p99(), "unit": "us"}}));
        say(&format!(
            "{what:<64} ours {}  raw {}  {median:.3} ({low:.3} to {high:.3}), more {more:.3} us ({least:.3} to \
             {most:.3})",
            self.ours.words(),
            self.raw.words()
        ));
        [low, median, high]
    }

    /// How many times as long as raw ours may take.
    fn judge_ratio(&self, what: &str, most: f64) {
        let [_, median, _] = self.tell(what);
        judge(&Bar::at_most(format!("{what}: of raw"), median, most, ""));
    }

    /// How much longer than raw ours may take, in microseconds.
    fn judge_more(&self, what: &str, most: f64) {
        self.tell(what);
        let beyond = self.ours.beyond(&self.raw);
        judge(&beyond.at_most(format!("{what}: more than raw"), most));
    }
}
