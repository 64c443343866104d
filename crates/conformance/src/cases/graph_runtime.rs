//! Graphs whose order is inferred: whatever runs side by side, the bytes are those of one operation after the other.

use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
    time::Duration,
};

use libtest_mimic::Failed;
use warpweft_core_types::{
    Arg, BufferView, CopyRegion, Device, DeviceId, Features, FillRegion, Interop, Kernel, Launch, Op,
    QueueDesc, Submission,
};
use warpweft_graph_runtime::{
    Completion, Graph, HandOff, HostTask, MemoryPlacement, NodeDesc, Runtime, RuntimeConfig, TaskContext,
    Usage,
};

use super::interop::again;
use crate::{
    context::{Context, PATIENCE},
    harness::{Case, Verdict},
    kernels,
};

pub(super) const CASES: &[Case] = &[
    Case::new("graph_runtime::random_graphs_leave_the_serial_bytes", random_graphs)
        .needs(Features::HOST_VISIBLE_MEMORY),
    Case::new("graph_runtime::random_graphs_of_two_devices_leave_the_serial_bytes", random_graphs)
        .needs(Features::HOST_VISIBLE_MEMORY)
        .devices(2),
    Case::new("graph_runtime::a_hand_off_is_in_order", a_hand_off_is_in_order)
        .needs(Features::INTEROP.union(Features::HOST_VISIBLE_MEMORY)),
];

/// How many random graphs a case runs; more with this variable.
const GRAPHS: u64 = 20;
const GRAPHS_VARIABLE: &str = "WARPWEFT_RANDOM_GRAPHS";
/// Nodes of a random graph, at most.
const NODES: usize = 60;
/// Views of kernels start at multiples of this on all devices.
const GRAIN: u64 = 256;
const MEMORY_BYTES: u64 = 2048;

fn random_graphs(cx: &Context) -> Verdict {
    let count = match env::var(GRAPHS_VARIABLE) {
        Ok(text) => {
            text.parse().map_err(|_| format!("{GRAPHS_VARIABLE} is {text:?} and must be a number"))?
        }
        Err(_) => GRAPHS,
    };
    let config = RuntimeConfig { lanes: 3, graph_slots: 2, workers: 2, ..RuntimeConfig::default() };
    let runtime = Runtime::new(cx.devices().iter().cloned(), config)?;
    let kernels = cx.devices().iter().map(Kernels::load).collect::<Result<Vec<_>, _>>()?;
    let first = fastrand::u64(..);
    for seed in (0..count).map(|number| first.wrapping_add(number)) {
        one_random_graph(cx, &runtime, &kernels, seed)
            .map_err(|error| format!("seed {seed}: {}", error.message().unwrap_or("without a word")))?;
    }
    Ok(())
}

/// The other library is played by a second handle of the queue, of which the runtime knows nothing.
fn a_hand_off_is_in_order(cx: &Context) -> Verdict {
    let runtime = Runtime::new(cx.devices().iter().cloned(), RuntimeConfig::default())?;
    let hand = Hand { runtime: &runtime, family: cx.device(0).interop().ok_or("the family is absent")? };
    let device = cx.infos[0].id;
    let memory = || Ok::<_, Failed>(runtime.allocate(&MemoryPlacement::Device(device), 4096)?.view().clone());
    let (given, taken, after) = (memory()?, memory()?, memory()?);
    let operands = [(given.clone(), Usage::ReadWrite), (taken.clone(), Usage::Write)];
    for round in 0..50_u8 {
        runtime.fill(FillRegion::bytes(&given, round))?;
        hand.over(device, &operands, round + 100, round % 5 == 4)?;
        runtime.copy(&given, &after)?;
        assert_eq!(first_and_last(&runtime, &taken)?, [round; 2], "before, round {round}");
        assert_eq!(first_and_last(&runtime, &after)?, [round + 100; 2], "behind, round {round}");
    }
    Ok(())
}

struct Hand<'a> {
    runtime: &'a Runtime,
    family: &'a dyn Interop,
}

impl Hand<'_> {
    /// Copies the first operand to the second and fills it, and panics then if it is to.
    fn over(&self, device: DeviceId, operands: &[(BufferView, Usage)], byte: u8, panics: bool) -> Verdict {
        let work = |lent: &HandOff<'_>| -> Verdict {
            let owner = Arc::new(self.runtime.clone());
            let queue = self.family.import_queue(again(lent.queue()?, owner), &QueueDesc::default())?;
            let (from, to) = (&operands[0].0, &operands[1].0);
            let ops = [Op::Copy(CopyRegion::new(from, to)?), Op::Fill(FillRegion::bytes(from, byte))];
            queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
            if panics {
                // Without the message of a panic that nobody expects.
                resume_unwind(Box::new("as agreed"));
            }
            Ok(())
        };
        match catch_unwind(AssertUnwindSafe(|| self.runtime.hand_off(device, operands, PATIENCE, work))) {
            Ok(handed) => {
                let (worked, _) = handed?;
                assert!(!panics, "the panic is the caller's");
                worked
            }
            Err(_) if panics => Ok(()),
            Err(panic) => resume_unwind(panic),
        }
    }
}

fn first_and_last(runtime: &Runtime, view: &BufferView) -> Result<[u8; 2], Failed> {
    let window = runtime.allocate(&MemoryPlacement::HostVisible(view.device()), view.size())?;
    runtime.copy(view, window.view())?.wait(PATIENCE)?;
    let bytes = runtime.read(window.view(), PATIENCE)?.to_vec()?;
    Ok([bytes[0], bytes[bytes.len() - 1]])
}

struct Kernels {
    mix_write: Arc<dyn Kernel>,
    mix_update: Arc<dyn Kernel>,
    add_words: Arc<dyn Kernel>,
}

impl Kernels {
    fn load(device: &Arc<dyn Device>) -> Result<Self, Failed> {
        let load = |code: warpweft_core_types::KernelCode| {
            let name = code.contracts()[0].name.clone();
            Ok::<_, Failed>(device.load(&code)?.kernel(&name)?)
        };
        Ok(Self {
            mix_write: load(kernels::mix_write())?,
            mix_update: load(kernels::mix_update())?,
            add_words: load(kernels::add_words())?,
        })
    }
}

/// One memory, really and in the model.
struct Memory {
    device: usize,
    is_visible: bool,
    view: BufferView,
    model: Vec<u8>,
}

/// An operation by its memories and ranges, to be done really and in the model.
#[derive(Debug, Clone)]
enum Step {
    Copy {
        from: Place,
        to: Place,
    },
    Fill {
        to: Place,
        word: u32,
    },
    /// A kernel, or a task of the host, that mixes one range into another.
    Mix {
        from: Place,
        to: Place,
        seed: u32,
        updates: bool,
        on_host: bool,
    },
    Add {
        to: Place,
        seed: u32,
        usage: Usage,
    },
}

#[derive(Debug, Clone, Copy)]
struct Place {
    memory: usize,
    start: u64,
    size: u64,
}

impl Place {
    fn range(self) -> std::ops::Range<usize> {
        let at = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        at(self.start)..at(self.start + self.size)
    }
}

fn one_random_graph(cx: &Context, runtime: &Runtime, kernels: &[Kernels], seed: u64) -> Verdict {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut memories = (0..random.usize(1..4))
        .map(|_| memory(cx, runtime, &mut random))
        .collect::<Result<Vec<_>, Failed>>()?;
    let steps: Vec<Step> = (0..random.usize(1..=NODES)).map(|_| step(cx, &memories, &mut random)).collect();
    let mut graph = runtime.graph();
    for step in &steps {
        with_desc(&memories, kernels, step, |desc| Ok(graph.add(desc).map(|_| ())?))?;
    }
    check_edges(&graph);
    let prepared = graph.prepare()?;
    let mut completions: Vec<Completion> = Vec::new();
    for _ in 0..random.usize(1..4) {
        completions.push(prepared.submit_by(PATIENCE)?);
        steps.iter().for_each(|step| model(&mut memories, step));
        // Between replays: single operations, and the host's own reads and writes.
        for _ in 0..random.usize(0..4) {
            let step = step(cx, &memories, &mut random);
            completions.push(with_desc(&memories, kernels, &step, |desc| Ok(runtime.run(desc)?))?);
            model(&mut memories, &step);
        }
        if random.bool() {
            touch_by_host(runtime, &mut memories, &mut random)?;
        }
    }
    for completion in &completions {
        completion.wait(PATIENCE)?;
    }
    for memory in &memories {
        let got = contents(runtime, memory)?;
        assert!(got == memory.model, "memory on device {}: {steps:?}", memory.device);
    }
    Ok(())
}

fn memory(cx: &Context, runtime: &Runtime, random: &mut fastrand::Rng) -> Result<Memory, Failed> {
    let device = random.usize(..cx.devices().len());
    let is_visible = random.bool();
    let id = cx.infos[device].id;
    let placement = if is_visible { MemoryPlacement::HostVisible(id) } else { MemoryPlacement::Device(id) };
    let view = runtime.allocate(&placement, MEMORY_BYTES)?.view().clone();
    let model = vec![0; usize::try_from(MEMORY_BYTES)?];
    Ok(Memory { device, is_visible, view, model })
}

fn place(memories: &[Memory], random: &mut fastrand::Rng, grain: u64) -> Place {
    let memory = random.usize(..memories.len());
    let start = random.u64(..MEMORY_BYTES / grain) * grain;
    let words = (MEMORY_BYTES - start) / 4;
    Place { memory, start, size: 4 * random.u64(1..=words.min(80)) }
}

fn step(cx: &Context, memories: &[Memory], random: &mut fastrand::Rng) -> Step {
    loop {
        let found = match random.u32(..8) {
            0 | 1 => {
                let (from, mut to) = (place(memories, random, 4), place(memories, random, 4));
                to.start = to.start.min(MEMORY_BYTES - from.size);
                to.size = from.size;
                (!overlap(from, to)).then_some(Step::Copy { from, to })
            }
            2 => Some(Step::Fill { to: place(memories, random, 4), word: random.u32(..) }),
            3 => {
                let usage = match random.u32(..4) {
                    0 => Usage::ReadWrite,
                    1 => Usage::Commutative,
                    kind => Usage::Reduce(kind),
                };
                Some(Step::Add { to: place(memories, random, GRAIN), seed: random.u32(..), usage })
            }
            kind => {
                let on_host = kind == 4;
                let grain = if on_host { 4 } else { GRAIN };
                let (from, to) = (place(memories, random, grain), place(memories, random, grain));
                let (source, target) = (&memories[from.memory], &memories[to.memory]);
                let allowed = match on_host {
                    true => source.is_visible && target.is_visible,
                    false => reads(cx, target.device, source.device),
                };
                let (seed, updates) = (random.u32(..), random.bool());
                (allowed && !overlap(from, to)).then_some(Step::Mix { from, to, seed, updates, on_host })
            }
        };
        if let Some(step) = found {
            return step;
        }
    }
}

fn overlap(one: Place, other: Place) -> bool {
    one.memory == other.memory && one.start < other.start + other.size && other.start < one.start + one.size
}

fn reads(cx: &Context, device: usize, memory: usize) -> bool {
    device == memory
        || cx.share_backend(device, memory)
            && cx.device(device).peers().is_some_and(|peers| peers.access(cx.infos[memory].id).read)
}

/// Describes a step to the runtime.
fn with_desc<R>(
    memories: &[Memory],
    kernels: &[Kernels],
    step: &Step,
    take: impl FnOnce(NodeDesc<'_>) -> Result<R, Failed>,
) -> Result<R, Failed> {
    let view = |place: Place| memories[place.memory].view.slice(place.start..place.start + place.size);
    let words = |place: Place| (u32::try_from(place.size).unwrap_or(u32::MAX) / 4).to_le_bytes();
    match step {
        Step::Copy { from, to } => {
            let (from, to) = (view(*from)?, view(*to)?);
            take(NodeDesc::copy(&from, &to)?)
        }
        Step::Fill { to, word } => {
            let to = view(*to)?;
            take(NodeDesc::fill(FillRegion::words(&to, *word)?))
        }
        Step::Mix { from, to, seed, updates, on_host: true } => {
            let (seed, updates) = (*seed, *updates);
            let task = HostTask::fallible(move |context| mix_on_host(context, seed, updates));
            let usage = if updates { Usage::ReadWrite } else { Usage::Write };
            let operands = [(view(*to)?, usage), (view(*from)?, Usage::Read)];
            take(NodeDesc::task(&task, &operands))
        }
        Step::Mix { from, to, seed, updates, on_host: false } => {
            let own = &kernels[memories[to.memory].device];
            let kernel = if *updates { &own.mix_update } else { &own.mix_write };
            let (target, source) = (view(*to)?, view(*from)?);
            let (to_count, from_count, seed) = (words(*to), words(*from), seed.to_le_bytes());
            let scalars = [Arg::Scalar(&to_count), Arg::Scalar(&from_count), Arg::Scalar(&seed)];
            let args: Vec<Arg<'_>> =
                [Arg::Buffer(&target), Arg::Buffer(&source)].into_iter().chain(scalars).collect();
            take(NodeDesc::launch(Launch::new(kernel, [1, 1, 1], &args)?))
        }
        Step::Add { to, seed, usage } => {
            let kernel = &kernels[memories[to.memory].device].add_words;
            let (target, count, seed) = (view(*to)?, words(*to), seed.to_le_bytes());
            let args = [Arg::Buffer(&target), Arg::Scalar(&count), Arg::Scalar(&seed)];
            take(NodeDesc::launch(Launch::new(kernel, [1, 1, 1], &args)?).using(0, *usage))
        }
    }
}

fn mix_on_host(
    context: &TaskContext<'_>,
    seed: u32,
    updates: bool,
) -> Result<(), warpweft_graph_runtime::TaskError> {
    // Others overtake it, if they can.
    std::thread::sleep(Duration::from_micros(u64::from(seed % 64)));
    let hash = kernels::hash(words_of(&context.bytes(1)?).into_iter(), seed);
    let before = if updates {
        words_of(&context.bytes(0)?)
    } else {
        vec![0; usize::try_from(context.size(0)? / 4).unwrap_or(usize::MAX)]
    };
    context.write(0, 0, &mixed(&before, hash))?;
    Ok(())
}

fn words_of(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// What a mix leaves.
fn mixed(before: &[u32], hash: u32) -> Vec<u8> {
    let next = |(index, word): (u32, &u32)| word.wrapping_mul(31).wrapping_add(hash).wrapping_add(index);
    (0..).zip(before).map(next).flat_map(u32::to_le_bytes).collect()
}

/// Does a step in the model.
fn model(memories: &mut [Memory], step: &Step) {
    match step {
        Step::Copy { from, to } => {
            let bytes = memories[from.memory].model[from.range()].to_vec();
            memories[to.memory].model[to.range()].copy_from_slice(&bytes);
        }
        Step::Fill { to, word } => {
            memories[to.memory].model[to.range()].as_chunks_mut().0.fill(word.to_ne_bytes());
        }
        Step::Mix { from, to, seed, updates, .. } => {
            let read = words_of(&memories[from.memory].model[from.range()]);
            let hash = kernels::hash(read.into_iter(), *seed);
            let target = &mut memories[to.memory].model[to.range()];
            let before = if *updates { words_of(target) } else { vec![0; target.len() / 4] };
            target.copy_from_slice(&mixed(&before, hash));
        }
        Step::Add { to, seed, .. } => {
            let target = &mut memories[to.memory].model[to.range()];
            let sums = (0..)
                .zip(words_of(target))
                .map(|(index, word): (u32, u32)| word.wrapping_add(seed.wrapping_add(index)));
            let sums: Vec<u8> = sums.flat_map(u32::to_le_bytes).collect();
            target.copy_from_slice(&sums);
        }
    }
}

/// The host reads a range and writes another.
fn touch_by_host(runtime: &Runtime, memories: &mut [Memory], random: &mut fastrand::Rng) -> Verdict {
    let place = place(memories, random, 4);
    let memory = &mut memories[place.memory];
    if !memory.is_visible {
        return Ok(());
    }
    let view = memory.view.slice(place.start..place.start + place.size)?;
    let read = runtime.read(&view, PATIENCE)?;
    assert!(read.to_vec()? == memory.model[place.range()], "the host reads something else");
    drop(read);
    let bytes: Vec<u8> = (0..place.size).map(|_| random.u8(..)).collect();
    let mut write = runtime.write(&view, PATIENCE)?;
    write.write(0, &bytes)?;
    memory.model[place.range()].copy_from_slice(&bytes);
    Ok(())
}

fn contents(runtime: &Runtime, memory: &Memory) -> Result<Vec<u8>, Failed> {
    let id = memory.view.device();
    let window = runtime.allocate(&MemoryPlacement::HostVisible(id), MEMORY_BYTES)?;
    let copy = CopyRegion::new(&memory.view, window.view())?;
    runtime.run(NodeDesc::op(Op::Copy(copy)))?.wait(PATIENCE)?;
    Ok(runtime.read(window.view(), PATIENCE)?.to_vec()?)
}

/// Every edge has bytes that both ends use, and is explained by them.
fn check_edges(graph: &Graph) {
    for node in graph.ids() {
        for before in graph.predecessors(node) {
            let why = graph.why(before, node);
            assert_eq!(why.len(), 1, "{before} before {node}");
            assert!(!why[0].range.is_empty() && why[0].earlier == before && why[0].later == node);
        }
    }
}
