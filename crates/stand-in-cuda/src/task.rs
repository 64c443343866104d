//! What streams and graphs do: copies, fills, kernels and graphs, once or again and again.

use std::{
    collections::VecDeque,
    ffi::c_uint,
    ops::Range,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::{
    context::{Context, Here, Ticket},
    control::setting,
    exports::{Code, Outcome},
    graph::Nodes,
    kernels::{Block, Step, Turn},
    machine::Machine,
    module::Function,
    space::View,
    stream::{Op, Stream},
};

/// Blocks that take turns; the others come when one of them has ended.
const AT_ONCE: usize = 512;

/// Blocks of a library's kernel that have a thread each; those of a larger grid share one.
const APART: u64 = 8;

/// A kernel that goes on for longer leaves the core to others now and then.
const BRISK: Duration = Duration::from_millis(1);
const BREATH: Duration = Duration::from_micros(20);

/// One thing to do.
#[derive(Debug, Clone)]
pub(crate) enum Task {
    Copy(CopyRows),
    Fill(Fill),
    Kernel(Call),
    Graph(Nodes),
    Foreign(Foreign),
}

/// Work of another library's stand-in, which counts as a kernel.
#[derive(Debug, Clone)]
pub(crate) struct Foreign {
    pub(crate) context: Arc<Context>,
    pub(crate) function: extern "C" fn(usize),
    pub(crate) argument: usize,
}

/// A copy of rows, as the device at `device` sees memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyRows {
    pub(crate) device: usize,
    pub(crate) to: Rows,
    pub(crate) from: Rows,
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
    /// The kinds of memory on both sides, where a node has to keep to them.
    pub(crate) kinds: [Option<Kind>; 2],
}

/// Where rows are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) first: u64,
    /// From a row to the next, and from a layer to the next.
    pub(crate) pitch: u64,
    pub(crate) layer: u64,
}

/// A fill of rows with elements of 1, 2 or 4 bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fill {
    pub(crate) device: usize,
    pub(crate) to: u64,
    pub(crate) pitch: usize,
    pub(crate) value: c_uint,
    pub(crate) element: usize,
    pub(crate) width: usize,
    pub(crate) height: usize,
    /// The kind of memory, where a node has to keep to it.
    pub(crate) kind: Option<Kind>,
}

/// What a node of a graph is tied to when it gets another address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Host,
    Device(usize),
}

impl Kind {
    pub(crate) fn of(machine: &Machine, address: u64) -> Option<Self> {
        let owner = machine.space.around(address)?.owner;
        Some(if owner.is_host() { Self::Host } else { Self::Device(owner.device()) })
    }
}

/// A grid of blocks of a kernel.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) context: Arc<Context>,
    pub(crate) function: Arc<Function>,
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    /// The bytes of each parameter.
    pub(crate) arguments: Vec<Vec<u8>>,
}

impl Here {
    /// Puts a task in a stream, or into the graph that is being captured there.
    pub(crate) fn give(&self, stream: &Arc<Stream>, task: Task) -> Outcome {
        if let Some(capture) = stream.capture() {
            return capture.take(task);
        }
        let tickets = task.tickets();
        stream.push(Op::Task(task, tickets));
        Ok(())
    }
}

impl Task {
    pub(crate) fn run(&self, machine: &Machine) -> Outcome {
        match self {
            Self::Copy(copy) => copy.run(machine.space.seen_from(copy.device)),
            Self::Fill(fill) => fill.run(machine.space.seen_from(fill.device)),
            Self::Kernel(call) => call.run(machine),
            Self::Graph(nodes) => nodes.run(machine),
            Self::Foreign(work) => {
                (work.function)(work.argument);
                Ok(())
            }
        }
    }

    /// Counts the kernels in it until they are dropped.
    pub(crate) fn tickets(&self) -> Vec<Ticket> {
        match self {
            Self::Copy(_) | Self::Fill(_) => Vec::new(),
            Self::Kernel(call) => vec![call.context.admit_kernel()],
            Self::Graph(nodes) => nodes.tasks().flat_map(Self::tickets).collect(),
            Self::Foreign(work) => vec![work.context.admit_kernel()],
        }
    }

    /// Whether the memory is there now; it is looked at again when the task runs.
    pub(crate) fn check(&self, machine: &Machine) -> Outcome {
        let holds = |address, len| machine.space.holds(address, len);
        let is_sound = match self {
            Self::Copy(copy) => {
                holds(copy.to.first, copy.extent(copy.to)) && holds(copy.from.first, copy.extent(copy.from))
            }
            Self::Fill(fill) => holds(fill.to, fill.extent()),
            Self::Kernel(_) | Self::Graph(_) | Self::Foreign(_) => true,
        };
        if is_sound { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }
}

impl CopyRows {
    /// One row.
    pub(crate) const fn flat(device: usize, to: u64, from: u64, width: usize) -> Self {
        Self {
            device,
            to: Rows { first: to, pitch: 0, layer: 0 },
            from: Rows { first: from, pitch: 0, layer: 0 },
            width,
            height: 1,
            depth: 1,
            kinds: [None; 2],
        }
    }

    pub(crate) const fn is_flat(&self) -> bool {
        self.height == 1 && self.depth == 1
    }

    fn extent(&self, rows: Rows) -> u64 {
        let last = |count: usize, step: u64| (count as u64).saturating_sub(1).saturating_mul(step);
        last(self.depth, rows.layer)
            .saturating_add(last(self.height, rows.pitch))
            .saturating_add(self.width as u64)
    }

    fn run(&self, memory: View<'_>) -> Outcome {
        let at = |rows: Rows, layer: usize, row: usize| {
            rows.first + layer as u64 * rows.layer + row as u64 * rows.pitch
        };
        (0..self.depth).try_for_each(|layer| {
            (0..self.height).try_for_each(|row| {
                memory.copy(at(self.to, layer, row), at(self.from, layer, row), self.width)
            })
        })
    }
}

impl Fill {
    fn extent(&self) -> u64 {
        let rows = (self.height as u64).saturating_sub(1).saturating_mul(self.pitch as u64);
        rows.saturating_add(self.width as u64 * self.element as u64)
    }

    fn run(&self, memory: View<'_>) -> Outcome {
        (0..self.height).try_for_each(|row| self.run_row(memory, self.to + (row * self.pitch) as u64))
    }

    fn run_row(&self, memory: View<'_>, to: u64) -> Outcome {
        const CHUNK: usize = 4096;
        let bytes = self.value.to_le_bytes();
        let element = &bytes[..self.element];
        if element.iter().all(|&byte| byte == element[0]) {
            return memory.set(to, self.width * self.element, element[0]);
        }
        let chunk = element.repeat(CHUNK.min(self.width));
        let mut done = 0;
        while done < self.width {
            let count = CHUNK.min(self.width - done);
            memory.store(to + (done * self.element) as u64, &chunk[..count * self.element])?;
            done += count;
        }
        Ok(())
    }
}

impl Call {
    /// Gives the blocks turns until all have ended.
    fn run(&self, machine: &Machine) -> Outcome {
        let product = |sizes: [c_uint; 3]| sizes.iter().map(|&n| u64::from(n)).product();
        let (blocks, threads) = (product(self.grid), product(self.block));
        // As if others had the device.
        let is_held = || {
            setting("hold").is_some_and(|names| names.split(' ').any(|name| name == self.function.entry.name))
        };
        while is_held() && !self.context.is_dead() && machine.fault().is_none() {
            thread::sleep(BREATH);
        }
        if !self.function.kernel.is_foreign() || !(2..=APART).contains(&blocks) {
            return self.take_turns(machine, 0..blocks, blocks, threads);
        }
        // A library's code may stay in a turn for long, and others go on meanwhile.
        thread::scope(|scope| {
            let block = |index| {
                let run = move || self.take_turns(machine, index..index + 1, blocks, threads);
                thread::Builder::new().name("stand-in/block".to_owned()).spawn_scoped(scope, run)
            };
            let running: Vec<_> = (0..blocks).map(block).collect();
            let ended = running.into_iter().map(|thread| {
                let ended = thread.map(thread::ScopedJoinHandle::join);
                ended.unwrap_or_else(|_| Ok(Err(Code::OUT_OF_MEMORY))).unwrap_or(Err(Code::LAUNCH_FAILED))
            });
            // All of them end before the first error is told.
            ended.collect::<Vec<_>>().into_iter().collect()
        })
    }

    /// Gives some of the blocks turns until those have ended.
    fn take_turns(&self, machine: &Machine, mut coming: Range<u64>, blocks: u64, threads: u64) -> Outcome {
        let mut active: VecDeque<(u64, Turn)> = VecDeque::new();
        let began = Instant::now();
        let memory = machine.space.seen_from(self.context.device);
        loop {
            let room = AT_ONCE - active.len();
            active.extend(coming.by_ref().take(room).map(|index| (index, Turn::default())));
            if active.is_empty() || self.context.is_dead() || machine.fault().is_some() {
                return Ok(());
            }
            for _ in 0..active.len() {
                let Some((index, mut turn)) = active.pop_front() else { break };
                let mut block =
                    Block { memory, arguments: &self.arguments, index, blocks, threads, turn: &mut turn };
                if let Step::Again = self.function.kernel.step(&mut block)? {
                    active.push_back((index, turn));
                }
            }
            if !active.is_empty() {
                if began.elapsed() > BRISK { thread::sleep(BREATH) } else { thread::yield_now() }
            }
        }
    }
}
