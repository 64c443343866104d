//! The bandwidth that `measure` reports for each pair, beside raw copies of the same run.

use anyhow::{Context as _, Result};
use serde_json::json;
use warpweft_core_types::LinkEnd;
use warpweft_transfer::{MeasureConfig, measure};

use super::{
    raw::Raw,
    samples::{Samples, timed},
};
use crate::rig::{Rig, report, say};

/// Rounds of raw copies.
const ROUNDS: usize = 21;

/// Copies under way at once, as in `measure`.
const IN_FLIGHT: usize = 4;

pub(crate) fn run(rig: &Rig) -> Result<()> {
    let (first, second) = rig.pair()?;
    let config = MeasureConfig { rounds: 21, ..MeasureConfig::default() };
    let size = usize::try_from(config.large.0)?;
    let capability = first.device.info().compute_capability.context("capability")?;
    let raws = [Raw::open(0, capability)?, Raw::open(1, capability)?];
    let mut memory = Vec::new();
    for raw in &raws {
        raw.make_current()?;
        memory.push(raw.allocate(size)?);
    }
    for (from, to) in [(0, 1), (1, 0)] {
        let ends = [first, second].map(|bench| LinkEnd::Device(bench.device.info().id.uuid));
        let before = raw_rate(&raws[from], [memory[to], memory[from]], size)?;
        let links = measure([first.device.clone(), second.device.clone()], &config)?;
        let after = raw_rate(&raws[from], [memory[to], memory[from]], size)?;
        let link = links.iter().find(|link| link.from == ends[from] && link.to == ends[to]);
        let ours = link.context("the pair was not measured")?.bandwidth.gb_per_s;
        let raw = before.max(after);
        report(&json!({"pair": [from, to], "measured GB/s": ours, "raw GB/s": [before, after],
            "of raw": ours / raw}));
        say(&format!(
            "{from} to {to}: {ours:.1} GB/s measured, {before:.1} and {after:.1} raw; {:.3}",
            ours / raw
        ));
    }
    Ok(())
}

/// Gigabytes a second of copies that follow each other, in the median.
fn raw_rate(raw: &Raw, [to, from]: [super::raw::RawMemory; 2], size: usize) -> Result<f64> {
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
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    Ok((size * IN_FLIGHT) as f64 / samples.median() / 1e3)
}
