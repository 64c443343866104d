//! What is recorded, by us and by hand: kernels that do nothing, over buffers that tie them together.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use warpweft_core_types::{Arg, BufferDesc, BufferView, Kernel, Launch};
use warpweft_graph_runtime::{Graph, Runtime};

use super::raw::RawNode;
use crate::{
    bench::raw::{Raw, RawMemory},
    rig::Bench,
};

/// Columns of a stencil.
const COLUMNS: usize = 8;

/// Kernels in the order in which they would be right one by one, by their names and buffers; the first is written.
pub(super) struct Program {
    pub(super) name: String,
    steps: Vec<(&'static str, Vec<usize>)>,
    buffers: usize,
}

/// A program with buffers of ours.
pub(super) struct Bound {
    kernels: Vec<Arc<dyn Kernel>>,
    views: Vec<Vec<BufferView>>,
}

impl Program {
    /// From X to Y and back, as many times as it takes.
    pub(super) fn chain(len: usize) -> Self {
        let steps = (0..len).map(|step| ("visit", vec![(step + 1) % 2, step % 2])).collect();
        Self { name: format!("chain of {len}"), steps, buffers: 2 }
    }

    /// Rows of eight, each of whose columns reads itself and its neighbours in the row before; two rows of buffers.
    pub(super) fn stencil(len: usize) -> Self {
        let step = |step: usize| {
            let (row, column) = (step / COLUMNS, step % COLUMNS);
            let at = |row: usize, column: usize| row % 2 * COLUMNS + column;
            let (left, right) = (column.saturating_sub(1), (column + 1).min(COLUMNS - 1));
            let before = [left, column, right].map(|column| at(row + 1, column));
            ("visit_three", std::iter::once(at(row, column)).chain(before).collect())
        };
        let name = format!("stencil of 8 x {}, {len}", len.div_ceil(COLUMNS));
        Self { name, steps: (0..len).map(step).collect(), buffers: 2 * COLUMNS }
    }

    pub(super) const fn len(&self) -> usize {
        self.steps.len()
    }

    /// With buffers on a device.
    pub(super) fn bind(&self, bench: &Bench) -> Result<Bound> {
        let buffers = (0..self.buffers).map(|_| bench.allocate(BufferDesc::device(256)));
        let buffers = buffers.collect::<Result<Vec<_>>>()?;
        let views = self
            .steps
            .iter()
            .map(|(_, operands)| operands.iter().map(|&operand| buffers[operand].clone()).collect());
        let kernels = self.steps.iter().map(|(kernel, _)| bench.kernel(kernel));
        Ok(Bound { views: views.collect(), kernels: kernels.collect::<Result<_>>()? })
    }

    /// By hand, with the edges that were inferred.
    pub(super) fn by_hand(&self, raw: &Raw, graph: &Graph) -> Result<Vec<RawNode>> {
        let buffers = (0..self.buffers).map(|_| raw.allocate(256)).collect::<Result<Vec<RawMemory>>>()?;
        let nodes = graph.ids().zip(&self.steps).map(|(id, (kernel, operands))| {
            Ok(RawNode {
                kernel: raw.kernel(kernel)?,
                operands: operands.iter().map(|&operand| buffers[operand]).collect(),
                after: graph.predecessors(id).into_iter().map(|before| before.index()).collect(),
            })
        });
        nodes.collect()
    }
}

impl Bound {
    /// The arguments of each step, made before anything is timed.
    pub(super) fn args(&self) -> Vec<Vec<Arg<'_>>> {
        self.views.iter().map(|views| views.iter().map(Arg::Buffer).collect()).collect()
    }

    /// One step.
    pub(super) fn launch<'a>(&'a self, step: usize, args: &'a [Arg<'a>]) -> Result<Launch<'a>> {
        Ok(Launch::new(self.kernels.get(step).context("a step")?, [1, 1, 1], args)?)
    }

    /// All of it in a graph.
    pub(super) fn record(&self, runtime: &Runtime, args: &[Vec<Arg<'_>>]) -> Result<Graph> {
        let mut graph = runtime.graph();
        for (step, args) in args.iter().enumerate() {
            graph.launch(self.launch(step, args)?)?;
        }
        Ok(graph)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stencil_reads_its_neighbours_in_the_row_before() {
        let program = Program::stencil(16);
        assert_eq!(program.steps[0].1, [0, 8, 8, 9]);
        assert_eq!(program.steps[3].1, [3, 10, 11, 12]);
        assert_eq!(program.steps[15].1, [15, 6, 7, 7]);
    }

    #[test]
    fn a_chain_goes_to_and_fro() {
        let program = Program::chain(3);
        let operands: Vec<_> = program.steps.iter().map(|(_, operands)| operands.clone()).collect();
        assert_eq!(operands, [[1, 0], [0, 1], [1, 0]]);
    }
}
