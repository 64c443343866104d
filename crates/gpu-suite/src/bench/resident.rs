//! Residents: slices, parking, and what gets through beside them.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use warpweft_core_types::{
    Arg, BufferDesc, BufferView, CodeFormat, Deadline, Device, FillRegion, ForeignCode, Launch, Op,
    QueueDesc, Resident, ResidentDesc, SemaphorePoint, SliceConfig, Submission,
};
use warpweft_cuda::Compiler;

use super::{
    raw::{Raw, RawResident},
    samples::{Samples, timed},
};
use crate::{
    kernels::{self, BEAT_WORKGROUPS, GAPS_BYTES},
    rig::{Bench, LIMIT, Rig, report, say},
};

/// Workgroups and the longest slice, in microseconds.
const SHAPES: &[(u32, u64)] = &[(1, 300), (1, 2000), (BEAT_WORKGROUPS, 300), (BEAT_WORKGROUPS, 2000)];

const ROUNDS: usize = 41;

/// What must get through beside a resident has this long.
const THROUGH: Duration = Duration::from_secs(2);

pub(crate) fn run(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let capability = bench.device.info().compute_capability.context("capability")?;
    let raw = Raw::open(0, capability)?;
    for &(workgroups, longest_us) in SHAPES {
        let shape = format!("{workgroups} workgroups, slices of {longest_us} us");
        let beat = Beat::start(bench, workgroups, longest_us)?;
        quiet(bench, &beat, workgroups, &shape)?;
        beat.stop()?;
        beat.report_gaps(bench, &format!("quiet, {shape}"))?;

        let beat = Beat::start(bench, workgroups, longest_us)?;
        park_and_resume(&beat, &raw, workgroups, &shape)?;
        beat.stop()?;

        for by_hand in [false, true] {
            let beat = Beat::start(bench, workgroups, longest_us)?;
            cold_calls(bench, &raw, capability, by_hand, &shape)?;
            beat.stop()?;
            let who = if by_hand { "foreign" } else { "our" };
            beat.report_gaps(bench, &format!("beside {who} cold calls, {shape}"))?;
        }
    }
    Ok(())
}

/// A running `beat`.
struct Beat {
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

    fn report_gaps(&self, bench: &Bench, title: &str) -> Result<()> {
        let bytes = bench.read(&self.gaps)?;
        let mut words = bytes.chunks_exact(8).map(|eight| eight.try_into().map_or(0, u64::from_le_bytes));
        let count = words.next().unwrap_or(0);
        let kept = usize::try_from(count.min(4096))?;
        let mut samples = Samples::default();
        words.skip(1).take(kept).for_each(|ns| samples.add(Duration::from_nanos(ns)));
        ensure!(kept > 0, "no gap was seen");
        report(&json!({"gaps": title, "count": count, "time": samples.json()}));
        say(&format!("gaps, {title}: {} ({count} of them)", samples.json()));
        Ok(())
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
    let ratio = (park.median() + resume.median()) / (stop.median() + start.median());
    report(&json!({"park and resume": shape, "park": park.json(), "resume": resume.json(),
        "raw stop": stop.json(), "raw start": start.json(), "of raw": ratio}));
    say(&format!(
        "{shape}: park {:.1}, resume {:.1}; raw stop {:.1}, start {:.1} us; {ratio:.2} of raw",
        park.median(),
        resume.median(),
        stop.median(),
        start.median()
    ));
    Ok(())
}

/// Loads code never seen before, launches it, allocates, zeroes and frees, while the resident runs.
fn cold_calls(bench: &Bench, raw: &Raw, capability: (u32, u32), by_hand: bool, shape: &str) -> Result<()> {
    let who = if by_hand { "raw calls" } else { "ours" };
    let compiler = Compiler::find();
    let raw_out = raw.pin(256)?;
    let (mut load, mut memory) = (Samples::default(), Samples::default());
    for round in 0..21 {
        let number = 1000 * bench.device.info().multiprocessors + round;
        let cubin = compiler.compile(&kernels::second(number), capability)?;
        thread::sleep(Duration::from_millis(2));
        if by_hand {
            load.add(timed(|| raw.load_and_launch(&cubin, raw_out))?);
            continue;
        }
        let (sender, receiver) = mpsc::channel();
        let device = Arc::clone(&bench.device);
        thread::spawn(move || sender.send(beside(device.as_ref(), cubin, number)));
        let (loading, allocating) = receiver.recv_timeout(THROUGH).context("it did not get through")??;
        load.add(loading);
        memory.add(allocating);
    }
    report(&json!({"cold calls": shape, "who": who, "load + launch + wait": load.json(),
        "allocate + fill + free": (!by_hand).then(|| memory.json())}));
    say(&format!("{shape}, {who}: load + launch + wait {}", load.json()));
    Ok(())
}

fn beside(device: &dyn Device, cubin: Vec<u8>, number: u32) -> Result<(Duration, Duration)> {
    let queue = device.create_queue(&QueueDesc::default())?;
    let out = BufferView::whole(device.allocate(&BufferDesc::host_visible(4))?);
    let submit = |op: Op<'_>| -> Result<()> {
        let done = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
        queue.submit(&Submission { waits: &[], ops: &[op], signals: std::slice::from_ref(&done) })?;
        Ok(done.wait(LIMIT)?)
    };
    let loading = timed(|| {
        let code = ForeignCode::Binary { format: CodeFormat::Cubin, bytes: cubin };
        let code = kernels::foreign(vec![kernels::second_contract()], code);
        let kernel = device.load(&code)?.kernel("second")?;
        submit(Op::Launch(Launch::new(&kernel, [1, 1, 1], &[Arg::Buffer(&out)])?))
    })?;
    let mut word = [0; 4];
    out.read(&mut word)?;
    ensure!(u32::from_le_bytes(word) == number, "the second module stored {word:?}");
    let allocating = timed(|| {
        let view = BufferView::whole(device.allocate(&BufferDesc::device(64 << 20))?);
        submit(Op::Fill(FillRegion::bytes(&view, 1)))
    })?;
    Ok((loading, allocating))
}
