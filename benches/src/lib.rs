//! What the benchmark programs share: printing a reading beside its floor, and ranks that are killed.
//!
//! Each program prints lines for people, and for every figure a line of JSON that `cargo xtask bench` keeps
//! and compares. Machines differ and are noisy, so compare ratios of one run.
#![forbid(unsafe_code)]

#[cfg(unix)]
pub mod deaths;

use anyhow::Context as _;
use warpweft_cli::measure::{Candidate, Summary, interleave};

/// Measures `ours` and the raw call by turns and prints both.
///
/// # Errors
///
/// The first error of either.
#[expect(clippy::print_stdout, reason = "printing is what a benchmark does")]
pub fn beside_floor(
    name: &str,
    rounds: u32,
    ours: Candidate<'_>,
    floor: Candidate<'_>,
) -> anyhow::Result<()> {
    let summaries = interleave(rounds / 10 + 1, rounds, &mut [ours, floor])?;
    let [ours, floor]: [Summary; 2] = summaries.try_into().ok().context("two were measured")?;
    let us = |nanos: u64| nanos as f64 / 1e3;
    println!(
        "{name:<28} p50 {:>10.2} us  p99 {:>10.2} us  floor {:>10.2} us  floor/p50 {:>5.2}",
        us(ours.p50_ns),
        us(ours.p99_ns),
        us(floor.p50_ns),
        floor.p50_ns as f64 / ours.p50_ns.max(1) as f64
    );
    for (name, nanos) in [(name.to_owned(), ours.p50_ns), (format!("{name}/floor"), floor.p50_ns)] {
        println!("{}", serde_json::json!({ "name": name, "median": nanos, "unit": "ns" }));
    }
    Ok(())
}
