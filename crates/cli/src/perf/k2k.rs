//! Messages between actors, and between threads beside the channels that programs use today.

mod channels;
mod traffic;

use std::process::ExitCode;

use serde::Serialize;
use warpweft::{
    Runtime,
    k2k_router::{System, SystemConfig},
};

use crate::{args::PerfK2k, measure::Summary, output, select};

/// What became of the messages of a row: all but `served` have to be 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct Checked {
    served: u64,
    lost: u64,
    duplicated: u64,
    reordered: u64,
}

impl Checked {
    const fn is_whole(&self) -> bool {
        self.lost == 0 && self.duplicated == 0 && self.reordered == 0
    }

    fn add(&mut self, other: Self) {
        self.served += other.served;
        self.lost += other.lost;
        self.duplicated += other.duplicated;
        self.reordered += other.reordered;
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Row {
    what: String,
    /// Bytes of each message.
    bytes: usize,
    #[serde(flatten)]
    checked: Checked,
    /// Half of an answered round trip, or all of it for `ask`.
    latency: Option<Summary>,
    /// Messages per second: the median of the rounds.
    rate_per_s: Option<f64>,
    gb_per_s: Option<f64>,
}

impl Row {
    fn new(what: &str, bytes: usize, checked: Checked) -> Self {
        Self { what: what.to_owned(), bytes, checked, latency: None, rate_per_s: None, gb_per_s: None }
    }

    fn with_latency(mut self, latency: Summary) -> Self {
        self.latency = Some(latency);
        self
    }

    fn with_rates(mut self, mut rates: Vec<f64>) -> Self {
        rates.sort_by(f64::total_cmp);
        let median = rates.get(rates.len() / 2).copied().unwrap_or(0.0);
        (self.rate_per_s, self.gb_per_s) = (Some(median), Some(median * self.bytes as f64 / 1e9));
        self
    }
}

pub(crate) fn run(args: &PerfK2k) -> anyhow::Result<ExitCode> {
    let mut builder = Runtime::builder();
    for backend in select::backends(&args.selection)? {
        builder = builder.shared_backend(backend);
    }
    let devices = builder.build()?.devices().to_vec();
    if !args.json {
        output::title("Messages");
        output::line(
            "                              bytes     p50 us     p99 us        M/s      GB/s       served  wrong",
        );
    }
    let mut whole = true;
    let mut print = |row: &Row| {
        whole &= row.checked.is_whole();
        if args.json { output::json(row) } else { print_row(row) }
    };
    for row in channels::measure(args) {
        print(&row)?;
    }
    let system = System::start(devices.clone(), &SystemConfig::default())?;
    for row in traffic::measure(&system, &devices, args)? {
        print(&row)?;
    }
    Ok(if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print_row(row: &Row) -> anyhow::Result<()> {
    let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
    let us =
        |nanos: fn(&Summary) -> u64| number(row.latency.as_ref().map(|latency| nanos(latency) as f64 / 1e3));
    let Checked { served, lost, duplicated, reordered } = row.checked;
    output::line(format!(
        "{:<28} {:>6} {:>10} {:>10} {:>10} {:>9} {served:>12} {:>6}",
        row.what,
        row.bytes,
        us(|latency| latency.p50_ns),
        us(|latency| latency.p99_ns),
        number(row.rate_per_s.map(|rate| rate / 1e6)),
        number(row.gb_per_s),
        lost + duplicated + reordered,
    ));
    Ok(())
}
