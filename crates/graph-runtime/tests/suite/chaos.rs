//! Random work with random failures, on several threads, against what one thread would have done.

use warpweft_core_types::{BufferView, Deadline, FillRegion};
use warpweft_graph_runtime::{
    Completion, Graph, HostTask, MapError, NodeDesc, RunError, RuntimeConfig, Usage,
};

use crate::rig::{Outcome, PATIENCE, Rig};

/// Bytes of a cell, whose words are all alike.
const CELL: u64 = 16;

/// What a cell must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Holds(u32),
    Poisoned,
    /// It holds this or is poisoned: a device hands back pieces of graphs, not nodes.
    Either(u32),
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Add(Range, u32),
    Fill(Range, u8),
    Copy(Range, Range),
    FailKernel(Range),
    TaskAdd(Range, u32),
    FailTask(Range),
}

/// One cell of a buffer, or both.
#[derive(Debug, Clone, Copy)]
struct Range {
    buffer: usize,
    first: usize,
    count: usize,
}

impl Range {
    fn cells(self) -> impl Iterator<Item = usize> {
        let start = 2 * self.buffer + self.first;
        start..start + self.count
    }

    fn view(self, buffers: &[BufferView]) -> BufferView {
        let start = CELL * self.first as u64;
        buffers[self.buffer].slice(start..start + CELL * self.count as u64).expect("it is inside")
    }
}

fn some_range(rng: &mut fastrand::Rng, buffers: usize) -> Range {
    let (first, count) = [(0, 1), (1, 1), (0, 2)][rng.usize(0..3)];
    Range { buffer: rng.usize(0..buffers), first, count }
}

fn some_step(rng: &mut fastrand::Rng, buffers: usize) -> Step {
    let range = some_range(rng, buffers);
    match rng.u32(0..20) {
        0..6 => Step::Add(range, rng.u32(1..100)),
        6..10 => Step::Fill(range, rng.u8(..)),
        10..14 => {
            let buffer = (range.buffer + rng.usize(1..buffers)) % buffers;
            Step::Copy(Range { buffer, ..range }, range)
        }
        14..17 => Step::TaskAdd(range, rng.u32(1..100)),
        17..19 => Step::FailKernel(range),
        _ => Step::FailTask(range),
    }
}

/// The model of some buffers.
struct Model(Vec<Cell>);

impl Model {
    /// Whether some bytes that steps read, before they have written them, may be poisoned.
    fn may_be_refused(&self, steps: &[Step]) -> bool {
        let mut written = Vec::new();
        for step in steps {
            let (reads, writes) = step.uses();
            let bad = |cell: &usize| !matches!(self.0[*cell], Cell::Holds(_)) && !written.contains(cell);
            if reads.iter().any(bad) {
                return true;
            }
            written.extend(writes.into_iter().filter(|_| step.writes_anew()));
        }
        false
    }

    /// Whether it is known to fail.
    fn apply(&mut self, steps: &[Step], may_stop: bool) -> Option<bool> {
        let (mut fails, mut may_fail) = (false, may_stop);
        for step in steps {
            let (reads, writes) = step.uses();
            let skipped = reads.iter().any(|&cell| self.0[cell] == Cell::Poisoned);
            let unsure = reads.iter().any(|&cell| matches!(self.0[cell], Cell::Either(_)));
            fails |= skipped || step.fails();
            may_fail |= unsure;
            let results: Vec<Cell> =
                (0..writes.len()).map(|at| self.result(*step, at, skipped, unsure)).collect();
            writes.iter().zip(results).for_each(|(&cell, result)| self.0[cell] = result);
        }
        if steps.len() > 1 && (fails || may_fail) || may_stop {
            for cell in steps.iter().flat_map(|step| step.uses().1) {
                if let Cell::Holds(value) = self.0[cell] {
                    self.0[cell] = Cell::Either(value);
                }
            }
        }
        match (fails, may_fail) {
            (true, _) => Some(true),
            (false, true) => None,
            (false, false) => Some(false),
        }
    }

    fn result(&self, step: Step, at: usize, skipped: bool, unsure: bool) -> Cell {
        let (reads, _) = step.uses();
        let of = |cell: usize| match self.0[cell] {
            Cell::Holds(value) | Cell::Either(value) => value,
            Cell::Poisoned => 0,
        };
        let value = match step {
            Step::Add(_, number) | Step::TaskAdd(_, number) => of(reads[at]).wrapping_add(number),
            Step::Fill(_, byte) => u32::from_le_bytes([byte; 4]),
            Step::Copy(..) => of(reads[at]),
            Step::FailKernel(_) | Step::FailTask(_) => 0,
        };
        match (skipped || step.fails(), unsure) {
            (true, _) => Cell::Poisoned,
            (false, true) => Cell::Either(value),
            (false, false) => Cell::Holds(value),
        }
    }
}

impl Step {
    fn fails(self) -> bool {
        matches!(self, Self::FailKernel(_) | Self::FailTask(_))
    }

    fn writes_anew(self) -> bool {
        matches!(self, Self::Fill(..) | Self::Copy(..) | Self::FailKernel(_))
    }

    fn uses(self) -> (Vec<usize>, Vec<usize>) {
        match self {
            Self::Add(range, _) | Self::TaskAdd(range, _) | Self::FailTask(range) => {
                (range.cells().collect(), range.cells().collect())
            }
            Self::Fill(range, _) | Self::FailKernel(range) => (Vec::new(), range.cells().collect()),
            Self::Copy(from, to) => (from.cells().collect(), to.cells().collect()),
        }
    }

    fn describe<R>(self, rig: &Rig, buffers: &[BufferView], take: impl FnOnce(NodeDesc<'_>) -> R) -> R {
        match self {
            Self::Add(range, number) => rig.add(&range.view(buffers), number, take),
            Self::Fill(range, byte) => take(NodeDesc::fill(FillRegion::bytes(&range.view(buffers), byte))),
            Self::Copy(from, to) => {
                let (from, to) = (from.view(buffers), to.view(buffers));
                take(NodeDesc::copy(&from, &to).expect("they are alike"))
            }
            Self::FailKernel(range) => rig.fail(&range.view(buffers), take),
            Self::TaskAdd(range, number) => {
                let task = HostTask::fallible(move |context| {
                    let mut bytes = context.bytes(0)?;
                    for word in bytes.as_chunks_mut().0 {
                        *word = u32::from_le_bytes(*word).wrapping_add(number).to_le_bytes();
                    }
                    std::thread::yield_now();
                    Ok(context.write(0, 0, &bytes)?)
                });
                take(NodeDesc::task(&task, &[(range.view(buffers), Usage::ReadWrite)]))
            }
            Self::FailTask(range) => {
                let task = HostTask::fallible(|_| Err("as it was told".into()));
                take(NodeDesc::task(&task, &[(range.view(buffers), Usage::ReadWrite)]))
            }
        }
    }
}

fn submit(rig: &Rig, buffers: &[BufferView], steps: &[Step]) -> Result<Completion, RunError> {
    if let [step] = steps {
        return step.describe(rig, buffers, |desc| rig.runtime.run(desc));
    }
    let mut graph: Graph = rig.runtime.graph();
    for step in steps {
        step.describe(rig, buffers, |desc| graph.add(desc)).expect("it can be recorded");
    }
    graph.prepare().expect("devices take it").submit_by(PATIENCE)
}

#[expect(clippy::panic, reason = "what was not to be readable")]
/// Checks a cell by a guard; what it says is known from then on.
fn check(rig: &Rig, buffers: &[BufferView], model: &mut Model, range: Range) {
    for cell in range.cells() {
        let one = Range { first: cell % 2, count: 1, ..range };
        let known = model.0[cell];
        match rig.runtime.read(&one.view(buffers), PATIENCE) {
            Ok(guard) => {
                let bytes = guard.to_vec().expect("it is there");
                let words: Vec<u32> =
                    bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
                let (Cell::Holds(value) | Cell::Either(value)) = known else {
                    panic!("cell {cell} can be read: {words:?}")
                };
                assert_eq!(words, [value; 4], "cell {cell}, which is {known:?}");
                model.0[cell] = Cell::Holds(value);
            }
            Err(MapError::Poisoned { .. }) => {
                assert!(!matches!(known, Cell::Holds(_)), "cell {cell} is poisoned, and is {known:?}");
                model.0[cell] = Cell::Poisoned;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[expect(clippy::panic, reason = "what was not to be refused")]
fn one_thread(rig: &Rig, seed: u64, rounds: usize) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let count = 4;
    let buffers: Vec<BufferView> =
        (0..count).map(|at| rig.memory(at % rig.devices.len(), 2 * CELL)).collect();
    let mut model = Model(vec![Cell::Holds(0); 2 * count]);
    let mut open: Vec<(Completion, Option<bool>)> = Vec::new();
    for _ in 0..rounds {
        let length = if rng.bool() { 1 } else { rng.usize(2..8) };
        let steps: Vec<Step> = (0..length).map(|_| some_step(&mut rng, count)).collect();
        let submitted = loop {
            match submit(rig, &buffers, &steps) {
                Err(RunError::Busy { .. }) => match open.pop() {
                    Some((completion, _)) => drop(completion.wait(PATIENCE)),
                    None => std::thread::yield_now(),
                },
                other => break other,
            }
        };
        match submitted {
            Ok(completion) => {
                let cancelled = rng.u32(0..20) == 0;
                if cancelled {
                    completion.cancel();
                }
                let fails = model.apply(&steps, cancelled);
                open.push((completion, fails));
            }
            Err(RunError::Poisoned { .. }) => {
                assert!(model.may_be_refused(&steps), "{steps:?} are refused with {:?}", model.0);
            }
            Err(error) => panic!("{error}"),
        }
        match rng.u32(0..12) {
            0 => check(rig, &buffers, &mut model, some_range(&mut rng, count)),
            1 => {
                let range = some_range(&mut rng, count);
                let view = range.view(&buffers);
                let reset = loop {
                    match rig.runtime.reset(&view) {
                        Err(RunError::Busy { .. }) => std::thread::yield_now(),
                        other => break other.expect("it writes all"),
                    }
                };
                model.apply(&[Step::Fill(range, 0)], false);
                open.push((reset, Some(false)));
            }
            2 => {
                let range = some_range(&mut rng, count);
                if let Ok(mut guard) = rig.runtime.write(&range.view(&buffers), PATIENCE) {
                    let number = rng.u32(..);
                    guard.write(0, &number.to_le_bytes().repeat(4 * range.count)).expect("it fits");
                    range.cells().for_each(|cell| model.0[cell] = Cell::Holds(number));
                }
            }
            3 => {
                for (completion, fails) in open.drain(..) {
                    let outcome = completion.wait(PATIENCE);
                    assert!(
                        fails.is_none_or(|fails| fails == outcome.is_err()),
                        "{outcome:?} is not {fails:?}"
                    );
                }
            }
            4 => {
                if let Some((completion, fails)) = open.pop() {
                    let outcome = pollster::block_on(completion.into_future());
                    assert!(
                        fails.is_none_or(|fails| fails == outcome.is_err()),
                        "{outcome:?} is not {fails:?}"
                    );
                }
            }
            5 => drop(rig.runtime.read(&buffers[0], Deadline::now())),
            _ => {}
        }
    }
    for buffer in 0..count {
        check(rig, &buffers, &mut model, Range { buffer, first: 0, count: 2 });
    }
    for (completion, fails) in open {
        let outcome = completion.wait(PATIENCE);
        assert!(fails.is_none_or(|fails| fails == outcome.is_err()), "{outcome:?} is not {fails:?}");
    }
}

fn chaos(seed: u64, threads: u64, rounds: usize) -> Outcome {
    let mut rng = fastrand::Rng::with_seed(seed);
    let config = RuntimeConfig {
        lanes: rng.usize(1..4),
        max_submissions: [1, 2, 8, 64][rng.usize(0..4)],
        graph_slots: rng.usize(1..3),
        workers: rng.usize(1..4),
        memory_budget: None,
        trace_events: 64,
    };
    let rig = Rig::with(rng.u32(1..4), config);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let rig = &rig;
            scope.spawn(move || one_thread(rig, seed * 100 + thread, rounds));
        }
    });
    let counts = rig.runtime.statistics();
    assert_eq!((counts.submissions, counts.in_flight), (counts.completions + counts.failures, 0));
    Ok(())
}

#[test]
fn failures_leave_everything_else_as_it_would_be() -> Outcome {
    for seed in 0..12 {
        chaos(seed, 1 + seed % 3, 60)?;
    }
    Ok(())
}
