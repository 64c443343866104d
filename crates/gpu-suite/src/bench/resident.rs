//! Residents: slices, parking, and what gets through beside them.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use warpweft_cli::measure::Bar;
use warpweft_core_types::{
    Arg, BufferDesc, BufferView, Deadline, Launch, Resident, ResidentDesc, SliceConfig,
};

use super::{
    beside,
    raw::{Raw, RawResident},
    samples::{Samples, judge, timed},
};
use crate::{
    kernels::{BEAT_WORKGROUPS, GAPS_BYTES},
    rig::{Bench, Rig, report, say},
};

/// Workgroups and the longest slice, in microseconds.
const SHAPES: &[(u32, u64)] = &[(1, 300), (1, 2000), (BEAT_WORKGROUPS, 300), (BEAT_WORKGROUPS, 2000)];

const ROUNDS: usize = 41;

/// What must get through beside a resident has this long.
pub(super) const THROUGH: Duration = Duration::from_secs(2);

pub(crate) fn run(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let raw = Raw::open(0)?;
    for &(workgroups, longest_us) in SHAPES {
        let shape = format!("{workgroups} workgroups, slices of {longest_us} us");
        let beat = Beat::start(bench, workgroups, longest_us)?;
        quiet(bench, &beat, workgroups, &shape)?;
        beat.stop()?;
        let gaps = beat.report_gaps(bench, &format!("quiet, {shape}"))?;
        judge(&gaps.at_most(format!("gap between slices, {shape}"), 6.0));

        let beat = Beat::start(bench, workgroups, longest_us)?;
        park_and_resume(&beat, &raw, workgroups, &shape)?;
        beat.stop()?;

        let unseen = beside::Unseen::prepare(&raw)?;
        let beat = Beat::start(bench, workgroups, longest_us)?;
        beside::our_calls(bench, &beat, unseen, &shape)?;
        beat.stop()?;
        beat.report_gaps(bench, &format!("beside our cold calls, {shape}"))?;

        let unseen = beside::Unseen::prepare(&raw)?;
        let beat = Beat::start(bench, workgroups, longest_us)?;
        beside::raw_calls(bench, &raw, &beat, unseen, &shape)?;
        beat.stop()?;
        beat.report_gaps(bench, &format!("beside foreign cold calls, {shape}"))?;
    }
    Ok(())
}

/// A running `beat`.
pub(super) struct Beat {
    resident: Arc<dyn Resident>,
    turns: BufferView,
    shown: BufferView,
    gaps: BufferView,
}

impl Beat {
    fn start(bench: &Bench, workgroups: u32, longest_us: u64) -> Result<Self> {
        let kernel = bench.kernel("beat")?;
        let turns = bench.allocate(BufferDesc::device(8 * u64::from(BEAT_WORKGROUPS)))?;
        let shown = bench.allocate(BufferDesc::host_visible(8))?;
        let gaps = bench.allocate(BufferDesc::device(GAPS_BYTES))?;
        let args = [Arg::Buffer(&turns), Arg::Buffer(&shown), Arg::Buffer(&gaps)];
        let mut desc = ResidentDesc::new(Launch::new(&kernel, [workgroups, 1, 1], &args)?);
        desc.slice =
            SliceConfig { shortest: Duration::from_micros(100), longest: Duration::from_micros(longest_us) };
        let start = Instant::now();
        let resident = bench.device.residents().context("residents")?.launch(&desc)?;
        report(&json!({"resident": "started", "workgroups": workgroups,
            "us": start.elapsed().as_secs_f64() * 1e6}));
        Ok(Self { resident, turns, shown, gaps })
    }

    /// The slice that runs now, plus one.
    fn slice(&self) -> Result<u64> {
        let mut bytes = [0; 8];
        self.shown.read(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn stop(&self) -> Result<()> {
        let time = timed(|| Ok(self.resident.stop(Deadline::within(THROUGH))?))?;
        report(&json!({"resident": "stopped", "us": time.as_secs_f64() * 1e6}));
        Ok(())
    }

    fn report_gaps(&self, bench: &Bench, title: &str) -> Result<Samples> {
        let gaps = Gaps::read(bench, &self.gaps)?;
        let mut samples = Samples::default();
        gaps.since(0).for_each(|gap| samples.add(gap));
        ensure!(gaps.count > 0, "no gap was seen");
        report(&json!({"gaps": title, "count": gaps.count, "time": samples.json()}));
        say(&format!("gaps, {title}: {} ({} of them)", samples.json(), gaps.count));
        Ok(samples)
    }

    /// Gaps that were seen so far.
    pub(super) fn gap_count(&self, bench: &Bench) -> Result<u64> {
        Ok(Gaps::read(bench, &self.gaps)?.count)
    }

    /// The longest gap since there were so many, the one that may just end included.
    pub(super) fn longest_gap_since(&self, bench: &Bench, count: u64) -> Result<Duration> {
        let (seen, began) = (self.slice()?, Instant::now());
        while self.slice()? < seen + 2 {
            ensure!(began.elapsed() < THROUGH, "it does not go on");
        }
        Ok(Gaps::read(bench, &self.gaps)?.since(count).max().unwrap_or_default())
    }
}

/// Gaps between slices as the kernel keeps them.
struct Gaps {
    count: u64,
    /// The last ones, each in the place of its number.
    ring: Vec<u64>,
}

impl Gaps {
    fn read(bench: &Bench, view: &BufferView) -> Result<Self> {
        let bytes = bench.read(view)?;
        let mut words = bytes.chunks_exact(8).map(|eight| eight.try_into().map_or(0, u64::from_le_bytes));
        let count = words.next().unwrap_or(0);
        // Behind the time of the last slice's end.
        Ok(Self { count, ring: words.skip(1).collect() })
    }

    /// Those that came after `count` others, as far as they are kept.
    fn since(&self, count: u64) -> impl Iterator<Item = Duration> {
        let (len, first) =
            (self.ring.len() as u64, count.max(self.count.saturating_sub(self.ring.len() as u64)));
        let place = move |number: u64| usize::try_from(number % len.max(1)).unwrap_or(usize::MAX);
        (first..self.count)
            .filter_map(move |number| self.ring.get(place(number)).copied().map(Duration::from_nanos))
    }
}

fn quiet(bench: &Bench, beat: &Beat, workgroups: u32, shape: &str) -> Result<()> {
    const LASTS: Duration = Duration::from_millis(300);
    let (slices, start) = (beat.resident.slices(), Instant::now());
    thread::sleep(LASTS);
    let (ran, lasted) = (beat.resident.slices() - slices, start.elapsed());
    ensure!(ran > 0 && beat.resident.state().name() == "running", "nothing ran");
    // A resident reads and writes its buffers; a copy beside it sees some state of them.
    let turns = bench.read(&beat.turns)?;
    let turned = turns.chunks_exact(8).take(workgroups as usize).filter(|turns| **turns != [0; 8]).count();
    ensure!(turned == workgroups as usize, "{turned} workgroups turned");
    report(&json!({"resident": "quiet", "shape": shape, "slices of all workgroups": ran,
        "ms": lasted.as_secs_f64() * 1e3}));
    Ok(())
}

fn park_and_resume(beat: &Beat, raw: &Raw, workgroups: u32, shape: &str) -> Result<()> {
    let by_hand = RawResident::new(raw, workgroups)?;
    let [mut park, mut resume, mut stop, mut start] = [(); 4].map(|()| Samples::default());
    for round in 0..ROUNDS + 3 {
        let parked = timed(|| Ok(beat.resident.park(Deadline::within(THROUGH))?))?;
        ensure!(beat.resident.state().name() == "parked");
        let seen = beat.slice()?;
        let started = by_hand.start()?;
        let stopped = by_hand.stop()?;
        ensure!(beat.slice()? == seen, "a parked resident went on");
        let resumed = timed(|| {
            beat.resident.resume()?;
            let began = Instant::now();
            while beat.slice()? == seen {
                ensure!(began.elapsed() < THROUGH, "it does not go on");
            }
            Ok(())
        })?;
        // Somewhere in a slice.
        thread::sleep(Duration::from_micros(700 + 37 * round as u64));
        if round >= 3 {
            park.add(parked);
            resume.add(resumed);
            stop.add(stopped);
            start.add(started);
        }
    }
    report(&json!({"park and resume": shape, "park": park.json(), "resume": resume.json(),
        "raw stop": stop.json(), "raw start": start.json()}));
    for (what, samples) in [("park", &park), ("resume", &resume), ("raw stop", &stop), ("raw start", &start)]
    {
        say(&format!("{shape}: {what} {}", samples.words()));
    }
    let ratio = |part: fn(&Samples) -> f64| (part(&park) + part(&resume)) / (part(&stop) + part(&start));
    let bar = Bar::at_most(format!("park and resume, {shape}: of raw"), ratio(Samples::median), 1.3, "");
    judge(&bar.with_p99(ratio(Samples::p99)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_found_by_their_numbers() {
        let check = |count, since, expected: &[u64]| {
            // Four are kept: of six, the last two are in the places of the first two.
            let ring = (0..4).map(|place| if place + 4 < count { place + 4 } else { place }).collect();
            let gaps = Gaps { count, ring };
            let found: Vec<_> = gaps.since(since).map(|gap| gap.as_nanos()).collect();
            assert_eq!(found, expected.iter().map(|&ns| u128::from(ns)).collect::<Vec<_>>());
        };
        check(3, 0, &[0, 1, 2]);
        check(3, 2, &[2]);
        check(6, 5, &[5]);
        check(6, 0, &[2, 3, 4, 5]);
        check(0, 0, &[]);
    }
}
