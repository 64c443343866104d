//! The graphs that are measured: what their nodes read and write.

use std::sync::Arc;

use clap::ValueEnum;
use serde::Serialize;
use warpweft::{
    Arg, BufferDesc, BufferView, Device, GraphNode, Kernel, Launch, Op,
    graph_runtime::{Graph, HostTask, NodeDesc, Runtime, TaskContext, TaskError, Usage},
};

use crate::kernels;

/// Who waits for whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Shape {
    /// Each node for the one before it.
    Chain,
    /// Rows of 16 nodes, each of which reads three words of the row before it.
    Stencil,
}

/// What nodes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// Kernels of one thread.
    Kernel,
    /// Tasks of the host of a few instructions.
    Task,
}

/// The nodes of a graph, not recorded yet.
pub(super) struct Plan {
    work: Work,
    /// For each node what it writes, and then what it reads besides.
    nodes: Vec<Vec<BufferView>>,
}

enum Work {
    Kernel(Arc<dyn Kernel>),
    Task(HostTask),
}

/// Nodes of a row of the stencil.
const ROW: usize = 16;

/// Bytes from one word to the next: any device's kernels can begin there.
const STRIDE: u64 = 256;

impl Plan {
    pub(super) fn new(
        device: &Arc<dyn Device>,
        shape: Shape,
        kind: Kind,
        count: usize,
    ) -> anyhow::Result<Self> {
        let (name, code): (_, fn() -> _) = match shape {
            Shape::Chain => ("tick", kernels::tick),
            Shape::Stencil => ("blend", kernels::blend),
        };
        let work = match kind {
            Kind::Kernel => Work::Kernel(device.load(&code())?.kernel(name)?),
            Kind::Task => Work::Task(HostTask::fallible(add_up).brief()),
        };
        let size = 2 * ROW as u64 * STRIDE;
        let desc = match kind {
            Kind::Kernel => BufferDesc::device(size),
            Kind::Task => BufferDesc::host_visible(size),
        };
        let memory = BufferView::whole(device.allocate(&desc)?);
        let word = |row: usize, column: usize| {
            let start = ((row % 2) * ROW + column) as u64 * STRIDE;
            memory.slice(start..start + 4)
        };
        let views = |node: usize| -> anyhow::Result<Vec<BufferView>> {
            let (row, column) = (node / ROW, node % ROW);
            Ok(match shape {
                Shape::Chain => vec![word(0, 0)?],
                Shape::Stencil => vec![
                    word(row + 1, column)?,
                    word(row, column.saturating_sub(1))?,
                    word(row, column)?,
                    word(row, (column + 1).min(ROW - 1))?,
                ],
            })
        };
        Ok(Self { work, nodes: (0..count).map(views).collect::<anyhow::Result<_>>()? })
    }

    /// Records all nodes, with everything that a program does for that.
    pub(super) fn record(&self, runtime: &Runtime) -> anyhow::Result<Graph> {
        let mut graph = runtime.graph();
        for views in &self.nodes {
            match &self.work {
                Work::Kernel(kernel) => graph.launch(Launch::new(kernel, [1; 3], &args(views))?)?,
                Work::Task(task) => graph.add(NodeDesc::task(task, &operands(views)))?,
            };
        }
        Ok(graph)
    }

    /// The same nodes with the edges that were inferred, for a device's own graph; none for tasks.
    pub(super) fn handmade(&self, graph: &Graph) -> anyhow::Result<Option<Vec<GraphNode>>> {
        let Work::Kernel(kernel) = &self.work else { return Ok(None) };
        let node = |(views, id): (&Vec<BufferView>, _)| -> anyhow::Result<GraphNode> {
            let args = args(views);
            let after: Vec<usize> = graph.predecessors(id).iter().map(|before| before.index()).collect();
            Ok(GraphNode::new(&Op::Launch(Launch::new(kernel, [1; 3], &args)?), &after))
        };
        self.nodes.iter().zip(graph.ids()).map(node).collect::<anyhow::Result<_>>().map(Some)
    }

    /// Calls `each` with every launch, in order; nothing for tasks.
    pub(super) fn for_each_launch(
        &self,
        mut each: impl FnMut(&Op<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let Work::Kernel(kernel) = &self.work else { return Ok(()) };
        self.nodes.iter().try_for_each(|views| each(&Op::Launch(Launch::new(kernel, [1; 3], &args(views))?)))
    }

    /// Does what the tasks do, one after the other, in this thread.
    pub(super) fn call(&self) -> anyhow::Result<()> {
        for views in &self.nodes {
            let from = if views.len() == 1 { &views[..] } else { &views[1..] };
            let mut sum = u32::from(views.len() == 1);
            for view in from {
                let mut word = [0; 4];
                view.read(&mut word)?;
                sum = sum.wrapping_add(u32::from_le_bytes(word));
            }
            views[0].write(&sum.to_le_bytes())?;
        }
        Ok(())
    }
}

fn args(views: &[BufferView]) -> Vec<Arg<'_>> {
    views.iter().map(Arg::Buffer).collect()
}

fn operands(views: &[BufferView]) -> Vec<(BufferView, Usage)> {
    let usage = |position| match (position, views.len()) {
        (0, 1) => Usage::ReadWrite,
        (0, _) => Usage::Write,
        _ => Usage::Read,
    };
    views.iter().enumerate().map(|(position, view)| (view.clone(), usage(position))).collect()
}

/// The task: what it reads, added up; a single word becomes 1 more.
fn add_up(context: &TaskContext<'_>) -> Result<(), TaskError> {
    let is_alone = context.len() == 1;
    let mut sum = u32::from(is_alone);
    for index in usize::from(!is_alone)..context.len() {
        let mut word = [0; 4];
        context.read(index, 0, &mut word)?;
        sum = sum.wrapping_add(u32::from_le_bytes(word));
    }
    Ok(context.write(0, 0, &sum.to_le_bytes())?)
}
