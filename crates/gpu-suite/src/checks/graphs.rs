//! Graphs and single operations of a runtime, among the work of other libraries.

use std::{
    ops::Deref,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use warpweft_core_types::{
    Access, Arg, Buffer as DeviceBuffer, BufferDesc, BufferView, CapturedWork, Kernel, Launch, NativeHandle,
};
use warpweft_graph_runtime::{
    Completion, Graph, HandOff, HostTask, MemoryPlacement, NodeDesc, NodeId, Runtime, RuntimeConfig, Usage,
};

use super::interop::stepped;
use crate::{
    bench::{
        graph::raw::step as raw_step,
        raw::{Raw, RawKernel},
    },
    kernels::GRAPH_PTX,
    rig::{Bench, LIMIT, NotRun, Rig},
};

/// Long enough that whoever does not wait for it is ahead.
const LINGER_NS: u64 = 300_000;

/// A runtime on one device, with what it steps with.
struct Ours<'a> {
    bench: &'a Bench,
    runtime: Runtime,
    step: Arc<dyn Kernel>,
    linger: Arc<dyn Kernel>,
}

/// The same, and the raw driver on this thread.
struct Stage<'a> {
    ours: Ours<'a>,
    raw: Raw,
    raw_step: RawKernel,
}

impl<'a> Deref for Stage<'a> {
    type Target = Ours<'a>;

    fn deref(&self) -> &Self::Target {
        &self.ours
    }
}

impl<'a> Stage<'a> {
    fn new(rig: &'a Rig) -> Result<Self> {
        let (bench, raw) = (rig.first(), Raw::with(0, GRAPH_PTX)?);
        if bench.device.interop().is_none() {
            return Err(NotRun("it needs a device that works with other libraries".to_owned()).into());
        }
        // Rounds are handed over faster than their kernels, which take their time, run.
        let config = RuntimeConfig { max_submissions: 1 << 12, ..RuntimeConfig::default() };
        let runtime = Runtime::new([Arc::clone(&bench.device)], config)?;
        let (step, linger) = (bench.kernel("step")?, bench.kernel("linger")?);
        let raw_step = raw.kernel("step")?;
        // Code is loaded by its first launch, which is not to be in a capture.
        raw.launch_step(raw_step)?;
        raw.synchronise()?;
        Ok(Self { ours: Ours { bench, runtime, step, linger }, raw, raw_step })
    }

    /// A step by the raw driver, in a stream that somebody lends.
    fn raw_step(&self, stream: NativeHandle, word: NativeHandle, digit: u32) -> Result<()> {
        self.raw.make_current()?;
        raw_step(stream, self.raw_step, word, digit)
    }
}

impl Ours<'_> {
    fn memory(&self, size: u64) -> Result<BufferView> {
        let placement = MemoryPlacement::Device(self.bench.device.info().id);
        Ok(self.runtime.allocate(&placement, size)?.view().clone())
    }

    fn step(&self, word: &BufferView, digit: u32, lane: u32) -> Result<Completion> {
        let digit = digit.to_le_bytes();
        let args = [Arg::Buffer(word), Arg::Scalar(&digit)];
        Ok(self.runtime.run(NodeDesc::launch(Launch::new(&self.step, [1, 1, 1], &args)?).in_lane(lane))?)
    }

    fn linger(&self, word: &BufferView, digit: u32, lane: u32) -> Result<Completion> {
        let (digit, ns) = (digit.to_le_bytes(), LINGER_NS.to_le_bytes());
        let args = [Arg::Buffer(word), Arg::Scalar(&digit), Arg::Scalar(&ns)];
        Ok(self.runtime.run(NodeDesc::launch(Launch::new(&self.linger, [1, 1, 1], &args)?).in_lane(lane))?)
    }

    fn word(&self, view: &BufferView) -> Result<u32> {
        Ok(self.words(&view.slice(0..4)?)?[0])
    }

    fn words(&self, view: &BufferView) -> Result<Vec<u32>> {
        let placement = MemoryPlacement::HostVisible(self.bench.device.info().id);
        let landing = self.runtime.allocate(&placement, view.size())?;
        self.runtime.copy(view, landing.view())?.wait(LIMIT)?;
        let bytes = self.runtime.read(landing.view(), LIMIT)?.to_vec()?;
        Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}

/// Our kernels take long and are in other lanes, so that nothing is in order by chance.
pub(super) fn hand_off(rig: &Rig) -> Result<()> {
    const ROUNDS: u32 = 100;
    let stage = Stage::new(rig)?;
    let (word, device) = (stage.memory(4)?, stage.bench.device.info().id);
    let operands = [(word.clone(), Usage::ReadWrite)];
    let mut digits = Vec::new();
    for round in 0..ROUNDS {
        let lanes = [round % 3, (round + 1) % 3];
        stage.linger(&word, round, lanes[0])?;
        let work = |given: &HandOff<'_>| stage.raw_step(given.queue()?, given.address(0)?, round + 7);
        let (worked, _) = stage.runtime.hand_off(device, &operands, LIMIT, work)?;
        worked?;
        stage.linger(&word, round + 3, lanes[1])?;
        digits.extend([round, round + 7, round + 3]);
        if round % 10 == 9 {
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                let call = |given: &HandOff<'_>| -> Result<()> {
                    stage.raw_step(given.queue()?, given.address(0)?, 5)?;
                    // Without the message of a panic that nobody expects.
                    std::panic::resume_unwind(Box::new("as agreed"))
                };
                stage.runtime.hand_off(device, &operands, LIMIT, call).map(drop)
            }));
            ensure!(panicked.is_err(), "the panic went on to the caller");
            stage.step(&word, 6, lanes[1])?;
            digits.extend([5, 6]);
        }
    }
    let (found, expected) = (stage.word(&word)?, stepped(digits));
    ensure!(found == expected, "{found} and not {expected}: something was out of order");
    Ok(())
}

/// The work goes behind a task of the host too, which no device can wait for by itself.
pub(super) fn behind_a_task(rig: &Rig) -> Result<()> {
    const ROUNDS: u32 = 20;
    let stage = Stage::new(rig)?;
    let device = stage.bench.device.info().id;
    let word = stage.runtime.allocate(&MemoryPlacement::HostVisible(device), 4)?.view().clone();
    let operands = [(word.clone(), Usage::ReadWrite)];
    let task = HostTask::fallible(|context| {
        // Longer than the hand-off takes to be made.
        thread::sleep(Duration::from_millis(5));
        let before = context.bytes(0)?;
        let words = before.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
        let after: Vec<u8> = words.flat_map(|word| (3 * (word % 1000) + 1).to_le_bytes()).collect();
        Ok(context.write(0, 0, &after)?)
    });
    let mut expected = 0_u32;
    for round in 0..ROUNDS {
        stage.runtime.task(&task, &operands)?;
        let work = |given: &HandOff<'_>| stage.raw_step(given.queue()?, given.address(0)?, round);
        let (worked, _) = stage.runtime.hand_off(device, &operands, LIMIT, work)?;
        worked?;
        stage.step(&word, 5, 1)?;
        expected = 3 * (3 * (3 * (expected % 1000) + 1) + round) + 5;
    }
    let found = stage.word(&word)?;
    ensure!(found == expected, "{found} and not {expected}: something was out of order");
    Ok(())
}

/// Captures, and replays of what was captured, beside a thread that allocates and synchronises.
pub(super) fn captured(rig: &Rig) -> Result<()> {
    const CAPTURES: u32 = 10;
    const REPLAYS: u32 = 100;
    let stage = Stage::new(rig)?;
    let (ours, is_over) = (&stage.ours, AtomicBool::new(false));
    thread::scope(|scope| {
        let other = scope.spawn(|| disturb(ours, &is_over));
        let all = (0..CAPTURES).try_for_each(|capture| captured_once(&stage, capture, REPLAYS));
        is_over.store(true, Ordering::Relaxed);
        let turns = other.join().map_err(|_| anyhow::anyhow!("the other thread panicked"))?;
        all?;
        ensure!(turns? > 0, "the other thread did nothing");
        Ok(())
    })
}

fn captured_once(stage: &Stage<'_>, capture: u32, replays: u32) -> Result<()> {
    let word = stage.memory(4)?;
    let work = capture_step(stage, &word, capture + 2)?;
    let mut graph = stage.runtime.graph();
    add_step(stage, &mut graph, &word, 1)?;
    let node = graph.add(NodeDesc::captured(&work))?;
    let last = add_step(stage, &mut graph, &word, 3)?;
    ensure!(graph.predecessors(node).len() == 1 && graph.predecessors(last) == [node], "an edge is missing");
    let graph = graph.prepare()?;
    for _ in 0..replays {
        graph.submit_by(LIMIT)?;
    }
    let expected = stepped((0..replays).flat_map(|_| [1, capture + 2, 3]));
    let found = stage.word(&word)?;
    ensure!(found == expected, "{found} and not {expected}: capture {capture}");
    Ok(())
}

fn capture_step(stage: &Stage<'_>, word: &BufferView, digit: u32) -> Result<Arc<dyn CapturedWork>> {
    let interop = stage.bench.device.interop().context("interop")?;
    let address = interop.buffer_handle(word.buffer().as_ref())?;
    let accesses = vec![(word.clone(), Access::ReadWrite)];
    // What is launched is of a module that is never unloaded.
    let mut record = |stream| Ok(stage.raw_step(stream, address, digit)?);
    Ok(interop.capture(accesses, Arc::new(()), &mut record)?)
}

/// What would invalidate a capture that is not its own thread's affair alone; how many times.
fn disturb(ours: &Ours<'_>, is_over: &AtomicBool) -> Result<u32> {
    let (raw, mut turns) = (Raw::with(0, GRAPH_PTX)?, 0);
    // Ten thousand turns are more than there is time for.
    while !is_over.load(Ordering::Relaxed) && turns < 10_000 {
        let own = ours.memory(64 << 10)?;
        ours.step(&own.slice(0..4)?, 1, 1)?.wait(LIMIT)?;
        let landing = ours.bench.allocate(BufferDesc::host_visible(64 << 10))?;
        ours.runtime.copy(&own, &landing)?.wait(LIMIT)?;
        // By hand too, as a program that knows nothing of captures does.
        raw.clear_word()?;
        raw.synchronise()?;
        turns += 1;
    }
    Ok(turns)
}

fn add_step(stage: &Stage<'_>, graph: &mut Graph, word: &BufferView, digit: u32) -> Result<NodeId> {
    let digit = digit.to_le_bytes();
    let args = [Arg::Buffer(word), Arg::Scalar(&digit)];
    Ok(graph.launch(Launch::new(&stage.step, [1, 1, 1], &args)?)?)
}

/// Each submission steps a word of its own that the caller gives away at once, and copies it to its place.
pub(super) fn exchanged(rig: &Rig) -> Result<()> {
    const ROUNDS: u32 = 1000;
    const LAUNCH_NS: u64 = 500_000;
    let stage = Stage::new(rig)?;
    let places = stage.memory(4 * u64::from(ROUNDS))?;
    let place = |round: u32| places.slice(4 * u64::from(round)..4 * u64::from(round) + 4);
    let first = stage.memory(4)?;
    let mut graph = stage.runtime.graph();
    let stepped_in = add_linger(&stage, &mut graph, &first)?;
    let copied_in = graph.copy(&first, &place(0)?)?;
    let mut graph = graph.prepare()?;
    drop(first);
    let mut under_way: Vec<(Weak<dyn DeviceBuffer>, Completion)> = Vec::new();
    for round in 0..ROUNDS {
        let (word, place) = (stage.memory(4)?, place(round)?);
        let (digit, ns) = ((round + 1).to_le_bytes(), LAUNCH_NS.to_le_bytes());
        let args = [Arg::Buffer(&word), Arg::Scalar(&digit), Arg::Scalar(&ns)];
        let launch = Launch::new(&stage.linger, [1, 1, 1], &args)?;
        graph
            .rebind([(stepped_in, NodeDesc::launch(launch)), (copied_in, NodeDesc::copy(&word, &place)?)])?;
        under_way.push((Arc::downgrade(word.buffer()), graph.submit_by(LIMIT)?));
        drop(word);
        for (memory, completion) in &under_way {
            // In this order: what has not ended afterwards had not ended before. A device that lets go of memory may
            // tell of the end a little later.
            let is_alive = memory.strong_count() > 0;
            ensure!(
                is_alive || completion.wait(Duration::from_nanos(LAUNCH_NS / 5)).is_ok(),
                "memory went before its launch had ended, round {round}"
            );
        }
        under_way.retain(|(_, completion)| !completion.is_complete());
    }
    let found = stage.words(&places)?;
    let wrong = (0..ROUNDS).zip(&found).find(|(round, word)| **word != round + 1);
    ensure!(wrong.is_none(), "round and word: {wrong:?}");
    Ok(())
}

fn add_linger(stage: &Stage<'_>, graph: &mut Graph, word: &BufferView) -> Result<NodeId> {
    let (digit, ns) = (1_u32.to_le_bytes(), 0_u64.to_le_bytes());
    let args = [Arg::Buffer(word), Arg::Scalar(&digit), Arg::Scalar(&ns)];
    Ok(graph.launch(Launch::new(&stage.linger, [1, 1, 1], &args)?)?)
}

pub(super) fn reordered(rig: &Rig) -> Result<()> {
    let stage = Stage::new(rig)?;
    other_edges(&stage)?;
    other_memory(&stage)?;
    // Nothing that the driver refused on the way is left for whoever calls next.
    stage.raw.make_current()?;
    stage.raw.synchronise()?;
    let unrelated = stage.bench.uploaded(&[7; 4096])?;
    ensure!(stage.bench.read(&unrelated)? == [7; 4096]);
    Ok(())
}

/// Two steps of two words come to be of one, so that one waits for the other; and back.
fn other_edges(stage: &Stage<'_>) -> Result<()> {
    let (one, other) = (stage.memory(4)?, stage.memory(4)?);
    let mut graph = stage.runtime.graph();
    add_step(stage, &mut graph, &one, 1)?;
    let second = add_step(stage, &mut graph, &other, 2)?;
    let mut graph = graph.prepare()?;
    let digit = 2_u32.to_le_bytes();
    let mut digits = [Vec::new(), Vec::new()];
    for round in 0..20 {
        let is_apart = round % 2 == 0;
        let target = if is_apart { &other } else { &one };
        let args = [Arg::Buffer(target), Arg::Scalar(&digit)];
        graph.rebind([(second, NodeDesc::launch(Launch::new(&stage.step, [1, 1, 1], &args)?))])?;
        ensure!(graph.graph().edge_count() == usize::from(!is_apart), "{} edges", graph.graph().edge_count());
        graph.submit_by(LIMIT)?;
        digits[0].push(1);
        digits[usize::from(is_apart)].push(2);
        // Work that has nothing to do with it goes on meanwhile.
        let unrelated = stage.memory(4)?;
        stage.step(&unrelated, 9, 0)?.wait(LIMIT)?;
        ensure!(stage.word(&unrelated)? == 9);
    }
    let found = [stage.word(&one)?, stage.word(&other)?];
    let expected = digits.map(stepped);
    ensure!(found == expected, "{found:?} and not {expected:?}");
    Ok(())
}

/// A copy comes to be from pinned memory, which a node that was made for memory of the device cannot.
fn other_memory(stage: &Stage<'_>) -> Result<()> {
    let bench = stage.bench;
    let (from, to) = (bench.uploaded(&[1; 256])?, stage.memory(256)?);
    let pinned = bench.staged(&[2; 256])?;
    let mut graph = stage.runtime.graph();
    let copied_in = graph.copy(&from, &to)?;
    let mut graph = graph.prepare()?;
    for round in 0..10 {
        let (source, byte) = if round % 2 == 0 { (&pinned, 2) } else { (&from, 1) };
        graph.rebind([(copied_in, NodeDesc::copy(source, &to)?)])?;
        graph.submit_by(LIMIT)?.wait(LIMIT)?;
        let found = stage.words(&to)?;
        ensure!(found.iter().all(|word| *word == u32::from_le_bytes([byte; 4])), "{found:?}");
    }
    Ok(())
}
