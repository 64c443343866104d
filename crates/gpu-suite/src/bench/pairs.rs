//! The bandwidth that `measure` reports for each pair, beside raw copies of the same run.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;
use warpweft_cli::measure::Bar;
use warpweft_core_types::LinkEnd;
use warpweft_transfer::{MeasureConfig, measure};

use super::{
    raw::{Raw, RawMemory},
    samples::{Samples, judge, timed},
};
use crate::rig::{Rig, report, say};

/// Measurements, with raw copies before each.
const REPEATS: usize = 7;

/// Rounds of one measurement, ours and raw.
const ROUNDS: u32 = 21;

/// Copies under way at once, as in `measure`.
const IN_FLIGHT: usize = 4;

pub(crate) fn run(rig: &Rig) -> Result<()> {
    let (first, second) = rig.pair()?;
    let config = MeasureConfig { rounds: ROUNDS, ..MeasureConfig::default() };
    let size = usize::try_from(config.large.0)?;
    let raws = [Raw::open(0)?, Raw::open(1)?];
    let mut memory = Vec::new();
    for raw in &raws {
        raw.make_current()?;
        memory.push(raw.allocate(size)?);
    }
    let ends = [first, second].map(|bench| LinkEnd::Device(bench.device.info().id.uuid));
    let ways = [(0, 1), (1, 0)];
    // The time that as many bytes take, so that a tail is a tail.
    let [mut ours, mut by_hand] = [(); 2].map(|()| ways.map(|_| Samples::default()));
    for _ in 0..REPEATS {
        for (way, (from, to)) in ways.into_iter().enumerate() {
            by_hand[way].add(raw_time(&raws[from], [memory[to], memory[from]], size)?);
        }
        let links = measure([first.device.clone(), second.device.clone()], &config)?;
        for (way, (from, to)) in ways.into_iter().enumerate() {
            let link = links.iter().find(|link| (link.from, link.to) == (ends[from], ends[to]));
            let rate = link.context("the pair was not measured")?.bandwidth.gb_per_s;
            ours[way].add(Duration::from_secs_f64(size as f64 / rate / 1e9));
        }
    }
    for (way, (from, to)) in ways.into_iter().enumerate() {
        tell((from, to), size, &ours[way], &by_hand[way]);
    }
    Ok(())
}

fn tell((from, to): (usize, usize), size: usize, ours: &Samples, raw: &Samples) {
    let rate = |us: f64| size as f64 / us / 1e3;
    report(&json!({"pair": [from, to], "measured GB/s": rate(ours.median()), "raw GB/s": rate(raw.median()),
        "measured": ours.json(), "raw": raw.json()}));
    let (measured, by_hand) = (rate(ours.median()), rate(raw.median()));
    say(&format!("{from} to {to}: {measured:.1} GB/s measured, {by_hand:.1} raw"));
    let off = |ours: f64, raw: f64| (raw / ours - 1.0).abs() * 100.0;
    let what = format!("bandwidth of {from} to {to} as measured: off raw");
    judge(
        &Bar::at_most(what, off(ours.median(), raw.median()), 3.0, "%").with_p99(off(ours.p99(), raw.p99())),
    );
}

/// The median time of one copy of those that follow each other.
fn raw_time(raw: &Raw, [to, from]: [RawMemory; 2], size: usize) -> Result<Duration> {
    raw.make_current()?;
    let mut samples = Samples::default();
    for round in 0..ROUNDS + 2 {
        let time = timed(|| {
            (0..IN_FLIGHT).try_for_each(|_| raw.copy(to, from, size))?;
            raw.synchronise()
        })?;
        if round >= 2 {
            samples.add(time);
        }
    }
    Ok(Duration::from_secs_f64(samples.median() / 1e6 / IN_FLIGHT as f64))
}
