//! What we cost on a Vulkan device beside command buffers that were recorded beforehand, a fence and nothing else.

use std::{
    cell::{Cell, RefCell},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use warpweft_cli::measure::Bar;
use warpweft_core_types::{
    AllocError, Arg, BufferDesc, BufferView, Bytes, CopyRegion, FillRegion, GraphNode, Kernel, Launch, Op,
    OwnedOp, PreparedGraph, SemaphorePoint, Submission,
};
use warpweft_vulkan::Baseline;

use super::samples::{Column, Samples, judge, table_of, timed};
use crate::{
    kernels,
    rig::{Bench, LIMIT, report, say, submit_word},
    vulkan,
};

/// Sizes of copies and fills.
const SIZES: [u64; 4] = [1 << 20, 16 << 20, 256 << 20, 1 << 30];

/// About as long as one table takes; software devices copy a gigabyte in half a second.
const TABLE: Duration = Duration::from_secs(3);

/// Rounds of a table of copies.
const ROUNDS: (usize, usize) = (7, 41);

/// Rounds of the empty dispatch: what is judged is a small difference of larger times.
const EMPTY_ROUNDS: usize = 2001;

/// Swaps of kernels that are timed.
const SWAPS: u32 = 15;

/// How long the work takes that is in flight while kernels are swapped.
const IN_FLIGHT: Duration = Duration::from_millis(20);

pub(super) fn run() -> Result<()> {
    let (_backend, bench) = vulkan::open()?;
    vulkan::describe(bench.device.as_ref());
    let raw = Baseline::new(&bench.device).context("a Vulkan device")?;
    empty_dispatch(&bench, &raw)?;
    swaps(&bench)?;
    SIZES.iter().try_for_each(|&size| transfers(&bench, &raw, size))
}

fn empty_dispatch(bench: &Bench, raw: &Baseline) -> Result<()> {
    let kernel = bench.kernel("nothing")?;
    let launch = [Op::Launch(Launch::new(&kernel, [1, 1, 1], &[])?)];
    let by_hand = raw.record(&launch)?;
    let graph = PreparedGraph::new(bench.device.as_ref(), &[GraphNode::new(OwnedOp::from(&launch[0]), &[])])?;
    let replay = [Op::Replay(&graph)];
    let (queue, semaphore) = (bench.new_queue()?, bench.device.create_semaphore(0)?);
    let value = Cell::new(0);
    let submitted = RefCell::new(Samples::default());
    let run = |ops: &[Op<'_>]| {
        timed(|| {
            value.set(value.get() + 1);
            let done = SemaphorePoint::new(&semaphore, value.get());
            let start = Instant::now();
            queue.submit(&Submission { waits: &[], ops, signals: std::slice::from_ref(&done) })?;
            submitted.borrow_mut().add(start.elapsed());
            Ok(done.wait(LIMIT)?)
        })
    };
    let (mut ours, mut replayed) = (settled(|| run(&launch)), settled(|| run(&replay)));
    let mut floor = settled(|| timed(|| Ok(by_hand.run()?)));
    let title = "empty dispatch, submit and wait";
    let mut columns: [Column<'_>; 3] =
        [("ours", &mut ours), ("raw", &mut floor), ("ours, a graph's replay", &mut replayed)];
    let times = table_of(EMPTY_ROUNDS, title, &mut columns)?;
    judge(&times[0].beyond(&times[1]).at_most(format!("{title}: more than raw"), 3.0));
    judge(&times[2].beyond(&times[1]).at_most(format!("{title}, a graph's replay: more than raw"), 3.0));
    say(&format!("our submit alone, of either kind: {}", submitted.borrow().words()));
    Ok(())
}

/// The second of two runs: where another of the driver's queues was used before, an NVIDIA GPU needs 0.2 ms to change.
fn settled(run: impl Fn() -> Result<Duration>) -> impl FnMut() -> Result<Duration> {
    move || {
        run()?;
        run()
    }
}

/// Copies and fills of one size, unless the device has no room for them.
fn transfers(bench: &Bench, raw: &Baseline, size: u64) -> Result<()> {
    let Some([host, here, there]) = buffers(bench, size)? else {
        say(&format!("{}: not measured, since the device has no room for two such buffers", Bytes(size)));
        return Ok(());
    };
    let ways = [
        ("copy within the device", Op::Copy(CopyRegion::new(&here, &there)?)),
        ("copy to the device", Op::Copy(CopyRegion::new(&host, &here)?)),
        ("copy to the host", Op::Copy(CopyRegion::new(&here, &host)?)),
        ("fill", Op::Fill(FillRegion::bytes(&here, 0x5a))),
    ];
    ways.iter()
        .try_for_each(|(what, op)| beside_raw(bench, raw, &format!("{what}, {}", Bytes(size)), op, size))
}

/// Memory of the host's and twice of the device's.
fn buffers(bench: &Bench, size: u64) -> Result<Option<[BufferView; 3]>> {
    if bench.device.memory()?.free.0 < 2 * size {
        return Ok(None);
    }
    let mut views = Vec::new();
    for desc in [BufferDesc::host_visible(size), BufferDesc::device(size), BufferDesc::device(size)] {
        match bench.device.allocate(&desc) {
            Ok(buffer) => views.push(BufferView::whole(buffer)),
            Err(AllocError::OutOfMemory { .. } | AllocError::HostOutOfMemory { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(views.try_into().ok())
}

fn beside_raw(bench: &Bench, raw: &Baseline, title: &str, op: &Op<'_>, size: u64) -> Result<()> {
    let by_hand = raw.record(std::slice::from_ref(op))?;
    let mut ours = settled(|| timed(|| bench.run(std::slice::from_ref(op))));
    let mut floor = settled(|| timed(|| Ok(by_hand.run()?)));
    let both = ours()? + floor()?;
    let times = table_of(rounds(both), title, &mut [("ours", &mut ours), ("raw", &mut floor)])?;
    let (us, raw_us) = (times[0].median(), times[1].median());
    let rate = |us: f64| size as f64 / us / 1e3;
    report(&json!({"rate": title, "ours GB/s": rate(us), "raw GB/s": rate(raw_us), "of raw": raw_us / us}));
    judge(&Bar::at_least(format!("{title}: part of raw"), raw_us / us, 0.9, ""));
    Ok(())
}

/// As many as fit the time of a table, when one takes `each`.
fn rounds(each: Duration) -> usize {
    let fit = TABLE.as_micros() / each.as_micros().max(1);
    usize::try_from(fit).unwrap_or(ROUNDS.1).clamp(ROUNDS.0, ROUNDS.1)
}

/// From the decision for another kernel to its launch being under way, with work of the old one in flight, and the old
/// one let go.
fn swaps(bench: &Bench) -> Result<()> {
    let (word, marked) =
        (bench.allocate(BufferDesc::device(4))?, bench.allocate(BufferDesc::host_visible(4))?);
    let turns = turns_of(bench, &word)?;
    let mut samples = Samples::default();
    for round in 1..=SWAPS {
        // Each has kernels of its own, so that the last handle of the old one is dropped while it runs.
        let (mut kernel, next) = (loaded(bench, "spin")?, loaded(bench, "mark")?);
        let (old, new) = (bench.point()?, bench.point()?);
        submit_word(bench.queue.as_ref(), &kernel, &word, &turns, &[], std::slice::from_ref(&old))?;
        let began = Instant::now();
        kernel = next;
        let number = round.to_le_bytes();
        submit_word(bench.queue.as_ref(), &kernel, &marked, &number, &[], std::slice::from_ref(&new))?;
        let took = began.elapsed();
        let in_flight = !old.poll()?;
        new.wait(LIMIT)?;
        ensure!(old.poll()?, "the new kernel was not behind the old one");
        let mut got = [0; 4];
        marked.read(&mut got)?;
        ensure!(got == number, "the new kernel wrote {got:?}");
        if in_flight {
            samples.add(took);
        }
    }
    report(&json!({"timing": "swap to a warmed kernel", "time": samples.json()}));
    judge(&samples.at_most("swap to a warmed kernel with work in flight", 1000.0));
    Ok(())
}

fn loaded(bench: &Bench, name: &str) -> Result<Arc<dyn Kernel>> {
    Ok(bench.device.load(&kernels::vulkan())?.kernel(name)?)
}

/// So many rounds that `spin` takes long enough.
fn turns_of(bench: &Bench, word: &BufferView) -> Result<[u8; 4]> {
    let (kernel, mut turns) = (bench.kernel("spin")?, 1_u32 << 16);
    loop {
        let (scalar, began) = (turns.to_le_bytes(), Instant::now());
        let args = [Arg::Buffer(word), Arg::Scalar(&scalar)];
        bench.run(&[Op::Launch(Launch::new(&kernel, [1, 1, 1], &args)?)])?;
        if began.elapsed() >= IN_FLIGHT || turns >= 1 << 30 {
            return Ok(scalar);
        }
        turns *= 2;
    }
}
