//! The demo's graph: kernels and copies on every device and a task of the host, ordered by the bytes that they use.

use std::{fs, path::Path, sync::Arc, time::Duration};

use anyhow::Context as _;
use serde::Serialize;
use warpweft::{
    Arg, BufferView, Device, Launch,
    graph_runtime::{
        Buffer, Graph, HostTask, MemoryPlacement, NodeDesc, Runtime, RuntimeConfig, TaskContext, TaskError,
        Usage,
    },
};

use crate::kernels::{self, pattern_word};

/// What there was to it.
#[derive(Debug, Serialize)]
pub(super) struct GraphSummary {
    nodes: usize,
    edges: usize,
    /// Pieces that queues and the host were handed.
    segments: usize,
}

impl GraphSummary {
    pub(super) fn text(&self) -> String {
        let Self { nodes, edges, segments } = self;
        format!("{nodes} nodes, {edges} edges found, handed over in {segments} pieces, compared")
    }
}

/// Memory with what has to be in it.
pub(super) struct Expected {
    pub(super) what: String,
    pub(super) memory: BufferView,
    /// The seeds of the patterns that its words are the sums of.
    pub(super) seeds: Vec<u32>,
}

impl Expected {
    pub(super) fn word(&self, index: usize) -> u32 {
        self.seeds.iter().fold(0, |sum, seed| sum.wrapping_add(pattern_word(*seed, index)))
    }
}

/// Every device makes a pattern, hands it to the next, and adds what it is handed; the host adds up what all have.
pub(super) struct DemoGraph {
    runtime: Runtime,
    graph: Graph,
    results: Vec<Expected>,
}

impl DemoGraph {
    /// Records it, with so many bytes a device, a multiple of 4.
    pub(super) fn record(devices: &[Arc<dyn Device>], size: u64) -> anyhow::Result<Self> {
        let runtime = Runtime::new(devices.iter().cloned(), RuntimeConfig::default())?;
        let graph = runtime.graph();
        let mut demo = Self { runtime, graph, results: Vec::new() };
        let first = MemoryPlacement::HostVisible(devices[0].info().id);
        let all = demo.allocate("all", &first, size * devices.len() as u64)?;
        let sum = demo.allocate("sum", &first, size)?;
        let buffers = |demo: &mut Self, name: &str| -> anyhow::Result<Vec<Buffer>> {
            let place = |device: &Arc<dyn Device>| MemoryPlacement::Device(device.info().id);
            let named = |(number, device)| demo.allocate(&format!("{name} {number}"), &place(device), size);
            devices.iter().enumerate().map(named).collect()
        };
        let (own, handed) = (buffers(&mut demo, "own")?, buffers(&mut demo, "handed")?);
        let seeds: Vec<u32> = (101..).take(devices.len()).collect();
        for ((device, own), seed) in devices.iter().zip(&own).zip(&seeds) {
            demo.make_pattern(device, own.view(), *seed)?;
        }
        let next = |number: usize| (number + 1) % devices.len();
        for (number, own) in own.iter().enumerate() {
            let desc = NodeDesc::copy(own.view(), handed[next(number)].view())?;
            demo.graph.add(desc.named(&format!("hand to {}", next(number))))?;
        }
        for (number, device) in devices.iter().enumerate() {
            demo.add(device, own[number].view(), handed[number].view())?;
            let part = all.slice(size * number as u64..size * (number as u64 + 1))?;
            demo.graph.add(NodeDesc::copy(own[number].view(), &part)?.named(&format!("gather {number}")))?;
            let before = (number + devices.len() - 1) % devices.len();
            demo.results.push(Expected {
                what: format!("what {} added", device.info().id),
                memory: own[number].view().clone(),
                seeds: vec![seeds[number], seeds[before]],
            });
        }
        demo.add_up(&all, &sum)?;
        let seeds = seeds.iter().chain(&seeds).copied().collect();
        demo.results.push(Expected { what: "the host's sum".to_owned(), memory: sum.view().clone(), seeds });
        Ok(demo)
    }

    fn allocate(&mut self, name: &str, place: &MemoryPlacement, size: u64) -> anyhow::Result<Buffer> {
        let buffer = self.runtime.allocate(place, size)?;
        self.graph.name_buffer(buffer.view(), name)?;
        Ok(buffer)
    }

    fn make_pattern(
        &mut self,
        device: &Arc<dyn Device>,
        memory: &BufferView,
        seed: u32,
    ) -> anyhow::Result<()> {
        let kernel = device.load(&kernels::pattern())?.kernel("pattern")?;
        let (words, seed) = ((memory.size() / 4).to_le_bytes(), seed.to_le_bytes());
        let args = [Arg::Buffer(memory), Arg::Scalar(&words), Arg::Scalar(&seed)];
        self.graph.launch(Launch::new(&kernel, [kernels::workgroups(memory.size())?, 1, 1], &args)?)?;
        Ok(())
    }

    fn add(&mut self, device: &Arc<dyn Device>, to: &BufferView, from: &BufferView) -> anyhow::Result<()> {
        let kernel = device.load(&kernels::add())?.kernel("add")?;
        let words = (to.size() / 4).to_le_bytes();
        let args = [Arg::Buffer(to), Arg::Buffer(from), Arg::Scalar(&words)];
        self.graph.launch(Launch::new(&kernel, [kernels::workgroups(to.size())?, 1, 1], &args)?)?;
        Ok(())
    }

    fn add_up(&mut self, all: &Buffer, sum: &Buffer) -> anyhow::Result<()> {
        let operands = [(all.view().clone(), Usage::Read), (sum.view().clone(), Usage::Write)];
        let task = HostTask::fallible(add_parts);
        self.graph.add(NodeDesc::task(&task, &operands).named("add up"))?;
        Ok(())
    }

    /// Runs it, and says what has to be where. In `folder` it saves what was inferred, as `graph.dot` and `graph.svg`,
    /// and when it ran, as `graph.json`.
    pub(super) fn run(
        self,
        within: Duration,
        folder: Option<&Path>,
    ) -> anyhow::Result<(GraphSummary, Vec<Expected>)> {
        if let Some(folder) = folder {
            save(folder, "graph.dot", &self.graph.to_dot())?;
            save(folder, "graph.svg", &self.graph.to_svg())?;
            self.runtime.start_trace();
        }
        let prepared = self.graph.prepare()?;
        let graph = prepared.graph();
        let summary = GraphSummary {
            nodes: graph.len(),
            edges: graph.edge_count(),
            segments: prepared.segment_count(),
        };
        prepared.submit()?.wait(within).context("the graph did not end well")?;
        if let Some((folder, trace)) = folder.zip(self.runtime.finish_trace()) {
            save(folder, "graph.json", &trace.to_json())?;
        }
        Ok((summary, self.results))
    }
}

fn save(folder: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let path = folder.join(name);
    fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))
}

/// The task: what the parts of the first view add up to, word by word, into the second.
fn add_parts(context: &TaskContext<'_>) -> Result<(), TaskError> {
    let size = usize::try_from(context.size(1)?)?;
    let mut sum = vec![0_u32; size / 4];
    for part in context.bytes(0)?.chunks_exact(size) {
        for (sum, word) in sum.iter_mut().zip(part.as_chunks().0) {
            *sum = sum.wrapping_add(u32::from_le_bytes(*word));
        }
    }
    let bytes: Vec<u8> = sum.into_iter().flat_map(u32::to_le_bytes).collect();
    Ok(context.write(1, 0, &bytes)?)
}
