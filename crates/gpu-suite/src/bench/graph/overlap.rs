//! Chunks that are copied to a device, worked on and copied back, in one graph: how much of that goes on at once.

use std::{
    env, fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use warpweft_cli::measure::Bar;
use warpweft_core_types::{Arg, BufferView, ClockModel, ClockSample, Deadline, Kernel, Launch};
use warpweft_graph_runtime::{
    Buffer, ExecutableGraph, ExecutionTrace, MemoryPlacement, Runtime, RuntimeConfig, TraceClock,
};

use super::{Beside, Effort, WARM_UP, raw::work, runtime};
use crate::{
    bench::{
        raw::{Raw, RawKernel, RawMemory},
        samples::{Samples, in_turn, interval, judge, timed},
    },
    kernels::{CHUNK_BYTES, CHUNK_WORKGROUPS, GRAPH_PTX, worked},
    rig::{Bench, LIMIT, report, say},
};

/// Of what could go on at once, how much does.
const OVERLAP: f64 = 0.9;

/// Turns of a kernel that is timed to find out how many are as long as a copy, and the most of them.
const TRIED: [u32; 2] = [256, 1024];
const MOST_TURNS: u32 = 1 << 16;

pub(super) fn run(bench: &Bench, raw: &Raw, effort: Effort) -> Result<()> {
    let by_hand = ByHand::new(raw, effort.chunks)?;
    let turns = if effort.calibrates { by_hand.calibrated()? } else { 1 };
    let runtime = runtime(bench, RuntimeConfig { graph_slots: 1, ..RuntimeConfig::default() })?;
    let chunks = Chunks::new(&runtime, bench, effort.chunks, turns)?;
    measure(&chunks.prepared(&runtime)?, &by_hand, turns, effort)?;
    chunks.check(&runtime)?;
    traced(&runtime, bench, &chunks)?;
    chunks.check(&runtime)
}

/// Rounds of all parts alone, of ours, and of streams and events by hand.
fn measure(ours: &ExecutableGraph, by_hand: &ByHand<'_>, turns: u32, effort: Effort) -> Result<()> {
    let mut parts = <[Samples; 3]>::default();
    let (mut beside, mut efficiencies, mut raw_efficiencies) = (Beside::default(), Vec::new(), Vec::new());
    let mut own = || timed(|| Ok(ours.submit_by(LIMIT)?.wait(LIMIT)?));
    let mut theirs = || timed(|| by_hand.pipeline(turns));
    for round in 0..effort.rounds + WARM_UP {
        let alone = [by_hand.to_device()?, by_hand.kernels(turns)?, by_hand.to_host()?];
        let times = in_turn(round, &mut own, &mut theirs)?;
        beside.add(round, times);
        if round >= WARM_UP {
            parts.iter_mut().zip(alone).for_each(|(part, time)| part.add(time));
            efficiencies.push(efficiency(&alone, times.0));
            raw_efficiencies.push(efficiency(&alone, times.1));
        }
    }
    for (what, part) in ["to device", "kernels", "to host"].iter().zip(&parts) {
        report(&json!({"timing": "chunks, each part alone", "what": what, "time": part.json()}));
        say(&format!("chunks, alone: {what:<10} {}", part.words()));
    }
    let what =
        format!("{} chunks of {} MiB there, {turns} turns, and back", effort.chunks, CHUNK_BYTES >> 20);
    beside.tell(&what);
    for (who, values) in [("by hand", &mut raw_efficiencies), ("ours", &mut efficiencies)] {
        let [low, median, high] = interval(values);
        report(&json!({"overlap": what, "who": who, "p50": median, "low": low, "high": high}));
        say(&format!("overlap, {who}: {median:.3} ({low:.3} to {high:.3})"));
        if who == "ours" {
            judge(&Bar::at_least(format!("overlap: {what}"), median, OVERLAP, ""));
        }
    }
    Ok(())
}

/// What was saved, of all that could have been: one after the other is 0, and as long as the longest part is 1.
fn efficiency(alone: &[Duration; 3], together: Duration) -> f64 {
    let [a, b, c] = alone.map(|time| time.as_secs_f64());
    let (serial, ideal) = (a + b + c, a.max(b).max(c));
    (serial - together.as_secs_f64()) / (serial - ideal)
}

/// Memory of the runtime, with a chunk in each part.
struct Chunks {
    source: Buffer,
    memory: Buffer,
    target: Buffer,
    kernel: std::sync::Arc<dyn Kernel>,
    count: usize,
    turns: u32,
}

impl Chunks {
    fn new(runtime: &Runtime, bench: &Bench, count: usize, turns: u32) -> Result<Self> {
        let (device, size) = (bench.device.info().id, CHUNK_BYTES * count as u64);
        let pinned = || runtime.allocate(&MemoryPlacement::HostVisible(device), size);
        let (source, target) = (pinned()?, pinned()?);
        let memory = runtime.allocate(&MemoryPlacement::Device(device), size)?;
        let chunks = Self { source, memory, target, kernel: bench.kernel("work")?, count, turns };
        let mut guard = runtime.write(chunks.source.view(), LIMIT)?;
        for chunk in 0..count {
            let bytes = given(chunk).to_le_bytes().repeat(usize::try_from(CHUNK_BYTES / 4)?);
            guard.write(CHUNK_BYTES * chunk as u64, &bytes)?;
        }
        drop(guard);
        Ok(chunks)
    }

    fn of(buffer: &Buffer, chunk: usize) -> Result<BufferView> {
        let start = CHUNK_BYTES * chunk as u64;
        Ok(buffer.slice(start..start + CHUNK_BYTES)?)
    }

    fn prepared(&self, runtime: &Runtime) -> Result<ExecutableGraph> {
        let mut graph = runtime.graph();
        let turns = self.turns.to_le_bytes();
        for chunk in 0..self.count {
            let memory = Self::of(&self.memory, chunk)?;
            graph.copy(&Self::of(&self.source, chunk)?, &memory)?;
            let args = [Arg::Buffer(&memory), Arg::Scalar(&turns)];
            graph.launch(Launch::new(&self.kernel, [CHUNK_WORKGROUPS, 1, 1], &args)?)?;
            graph.copy(&memory, &Self::of(&self.target, chunk)?)?;
        }
        Ok(graph.prepare()?)
    }

    /// Some words of each chunk are what they have to be; then they are so no longer.
    fn check(&self, runtime: &Runtime) -> Result<()> {
        let guard = runtime.read(self.target.view(), LIMIT)?;
        for chunk in 0..self.count {
            let (first, expected) = (CHUNK_BYTES * chunk as u64, worked(given(chunk), self.turns));
            for at in [first, first + CHUNK_BYTES / 2, first + CHUNK_BYTES - 4] {
                let mut word = [0; 4];
                guard.read(at, &mut word)?;
                let found = u32::from_le_bytes(word);
                ensure!(found == expected, "chunk {chunk} has {found} and not {expected} at byte {at}");
            }
        }
        drop(guard);
        runtime.reset(self.target.view())?.wait(LIMIT)?;
        Ok(())
    }
}

/// Every word of a chunk.
fn given(chunk: usize) -> u32 {
    u32::try_from(chunk).map_or(u32::MAX, |chunk| chunk + 1)
}

/// The same with three streams of the driver's and events between them.
struct ByHand<'a> {
    there: &'a Raw,
    works: Raw,
    back: Raw,
    kernel: RawKernel,
    source: RawMemory,
    memory: RawMemory,
    target: RawMemory,
    count: usize,
}

impl<'a> ByHand<'a> {
    fn new(there: &'a Raw, count: usize) -> Result<Self> {
        let (works, back) = (Raw::with(0, GRAPH_PTX)?, Raw::with(0, GRAPH_PTX)?);
        let size = usize::try_from(CHUNK_BYTES)? * count;
        let (kernel, memory) = (works.kernel("work")?, there.allocate(size)?);
        let (source, target) = (there.pin(size)?, there.pin(size)?);
        Ok(Self { there, works, back, kernel, source, memory, target, count })
    }

    fn each(&self, mut part: impl FnMut(u64) -> Result<()>) -> Result<()> {
        (0..self.count as u64).try_for_each(|chunk| part(chunk * CHUNK_BYTES))
    }

    fn copy(raw: &Raw, to: RawMemory, from: RawMemory, at: u64) -> Result<()> {
        raw.copy(RawMemory(to.0 + at), RawMemory(from.0 + at), usize::try_from(CHUNK_BYTES)?)
    }

    fn to_device(&self) -> Result<Duration> {
        timed(|| {
            self.each(|at| Self::copy(self.there, self.memory, self.source, at))?;
            self.there.synchronise()
        })
    }

    fn kernels(&self, turns: u32) -> Result<Duration> {
        timed(|| {
            self.each(|at| work(&self.works, self.kernel, RawMemory(self.memory.0 + at), turns))?;
            self.works.synchronise()
        })
    }

    fn to_host(&self) -> Result<Duration> {
        timed(|| {
            self.each(|at| Self::copy(&self.back, self.target, self.memory, at))?;
            self.back.synchronise()
        })
    }

    fn pipeline(&self, turns: u32) -> Result<()> {
        self.each(|at| {
            Self::copy(self.there, self.memory, self.source, at)?;
            self.there.record()?;
            self.there.chain_to(&self.works)?;
            work(&self.works, self.kernel, RawMemory(self.memory.0 + at), turns)?;
            self.works.record()?;
            self.works.chain_to(&self.back)?;
            Self::copy(&self.back, self.target, self.memory, at)
        })?;
        self.back.synchronise()
    }

    /// As many turns as make the kernels as long as the longer copies.
    fn calibrated(&self) -> Result<u32> {
        let median = |time: &dyn Fn() -> Result<Duration>| {
            let mut times = (0..7).map(|_| time()).collect::<Result<Vec<_>>>()?;
            times.sort_unstable();
            anyhow::Ok(times[3].as_secs_f64())
        };
        let copies = median(&|| self.to_device())?.max(median(&|| self.to_host())?);
        let tried = [median(&|| self.kernels(TRIED[0]))?, median(&|| self.kernels(TRIED[1]))?];
        let each = (tried[1] - tried[0]) / f64::from(TRIED[1] - TRIED[0]);
        ensure!(each > 0.0, "more turns take no longer: {tried:?}");
        let turns = f64::from(TRIED[0]) + (copies - tried[0]) / each;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded before")]
        let turns = turns.clamp(1.0, f64::from(MOST_TURNS)).round() as u32;
        report(&json!({"calibrated turns": turns, "copies s": copies, "tried": TRIED, "took s": tried}));
        Ok(turns)
    }
}

/// One more run, whose nodes' times are kept: they cost some of it.
fn traced(runtime: &Runtime, bench: &Bench, chunks: &Chunks) -> Result<()> {
    let clock = bench.device.clock();
    let sample = || clock.and_then(|clock| clock.sample(Deadline::within(LIMIT)).ok());
    let before = [sample(), sample()];
    ensure!(runtime.start_trace(), "nobody else traces");
    let graph = chunks.prepared(runtime)?;
    let began = Instant::now();
    let run = graph.submit_by(LIMIT)?;
    run.wait(LIMIT)?;
    let took = began.elapsed();
    let mut trace = runtime.finish_trace().context("a trace was begun")?;
    // Earlier runs whose end the runtime hears of only now are in it too.
    trace.events.retain(|event| event.submission == run.id());
    let samples: Vec<ClockSample> = before.into_iter().chain([sample(), sample()]).flatten().collect();
    let error_ns = ClockModel::fit(&samples).map(|model| model.report().error_ns);
    ensure!(trace.events.len() == 3 * chunks.count, "{} events", trace.events.len());
    tell_trace(&trace, took, error_ns)
}

fn tell_trace(trace: &ExecutionTrace, took: Duration, error_ns: Option<f64>) -> Result<()> {
    let of = |clock| trace.events.iter().filter(|event| event.clock == clock).count();
    let clocks = [TraceClock::Device, TraceClock::Host, TraceClock::Observed].map(of);
    let path = match env::var_os("OUT") {
        Some(folder) => {
            let path = PathBuf::from(folder).join("graph-overlap.json");
            fs::write(&path, trace.to_json()).with_context(|| path.display().to_string())?;
            path.display().to_string()
        }
        None => "not saved: OUT names no folder".to_owned(),
    };
    report(&json!({"trace": path, "events": trace.events.len(), "dropped": trace.dropped,
        "by clock": {"device": clocks[0], "host": clocks[1], "observed": clocks[2]},
        "clock error ns": error_ns, "us": took.as_secs_f64() * 1e6}));
    say(&format!(
        "trace: {path}; {} events ({} by the device's clock, {} by the host's, {} observed), clock off by {} ns at \
         most",
        trace.events.len(),
        clocks[0],
        clocks[1],
        clocks[2],
        error_ns.map_or_else(|| "unknown".to_owned(), |error| format!("{error:.0}"))
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_on_at_once_is_what_was_saved() {
        let alone = [3, 4, 5].map(Duration::from_millis);
        assert!((efficiency(&alone, Duration::from_millis(5)) - 1.0).abs() < 1e-9);
        assert!(efficiency(&alone, Duration::from_millis(12)).abs() < 1e-9);
    }
}
