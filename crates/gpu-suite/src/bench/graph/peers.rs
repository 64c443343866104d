//! An edge from one GPU to another in a graph: a kernel here, a copy there, a kernel on what was copied.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use serde_json::json;
use warpweft_core_types::{Arg, BufferDesc, Launch};
use warpweft_graph_runtime::{ExecutableGraph, Runtime, RuntimeConfig};

use super::{Beside, Effort, raw::visit};
use crate::{
    bench::{
        raw::{Raw, RawKernel, RawMemory},
        samples::timed,
    },
    kernels,
    rig::{Bench, LIMIT, Rig, report, say},
};

const BYTES: u64 = 1 << 20;
const BURST: usize = 8;

/// Of the time by hand.
const EDGE: f64 = 1.1;

pub(super) fn run(rig: &Rig, effort: Effort) -> Result<()> {
    let (first, second) = match rig.pair() {
        Ok(pair) => pair,
        Err(reason) => {
            report(&json!({"not measured": "an edge between GPUs", "why": reason.to_string()}));
            say(&format!("an edge between GPUs: not measured, {reason}"));
            return Ok(());
        }
    };
    let devices = [Arc::clone(&first.device), Arc::clone(&second.device)];
    let config = RuntimeConfig { graph_slots: BURST, ..RuntimeConfig::default() };
    let ours = edge(&Runtime::new(devices, config)?, first, second)?;
    let by_hand = ByHand::new()?;
    for replays in [BURST, 1] {
        let mut own = || {
            timed(|| {
                let mut last = None;
                for _ in 0..replays {
                    last = Some(ours.submit_by(LIMIT)?);
                }
                Ok(last.context("there is one")?.wait(LIMIT)?)
            })
        };
        let mut theirs = || timed(|| by_hand.run(replays));
        let beside = Beside::measure(effort.rounds, &mut own, &mut theirs)?.each_of(replays);
        beside.judge_ratio(&format!("an edge between GPUs, 1 MiB, {replays} back to back, one wait"), EDGE);
    }
    Ok(())
}

fn edge(runtime: &Runtime, first: &Bench, second: &Bench) -> Result<ExecutableGraph> {
    let memory = |bench: &Bench| bench.allocate(BufferDesc::device(BYTES));
    let (made, sent, got, used) = (memory(first)?, memory(first)?, memory(second)?, memory(second)?);
    let (makes, uses) = (first.kernel("visit")?, second.kernel("visit")?);
    let mut graph = runtime.graph();
    graph.launch(Launch::new(&makes, [1, 1, 1], &[Arg::Buffer(&sent), Arg::Buffer(&made)])?)?;
    graph.copy(&sent, &got)?;
    graph.launch(Launch::new(&uses, [1, 1, 1], &[Arg::Buffer(&used), Arg::Buffer(&got)])?)?;
    Ok(graph.prepare()?)
}

/// The same with streams and events.
struct ByHand {
    raws: [Raw; 2],
    kernels: [RawKernel; 2],
    memories: [[RawMemory; 2]; 2],
    bytes: usize,
}

impl ByHand {
    fn new() -> Result<Self> {
        let bytes = usize::try_from(BYTES)?;
        let open = |ordinal| {
            let raw = Raw::with(ordinal, kernels::GRAPH_PTX)?;
            let (kernel, memories) = (raw.kernel("visit")?, [raw.allocate(bytes)?, raw.allocate(bytes)?]);
            anyhow::Ok((raw, kernel, memories))
        };
        let ((first, makes, here), (second, uses, there)) = (open(0)?, open(1)?);
        Ok(Self { raws: [first, second], kernels: [makes, uses], memories: [here, there], bytes })
    }

    /// Each copy but the first waits until nobody reads what it overwrites, as ours does.
    fn run(&self, replays: usize) -> Result<()> {
        let [first, second] = &self.raws;
        let [[made, sent], [got, used]] = self.memories;
        for replay in 0..replays {
            first.make_current()?;
            visit(first, self.kernels[0], sent, made)?;
            if replay > 0 {
                second.chain_to(first)?;
            }
            first.copy(got, sent, self.bytes)?;
            first.record()?;
            first.chain_to(second)?;
            second.make_current()?;
            visit(second, self.kernels[1], used, got)?;
            second.record()?;
        }
        second.synchronise()
    }
}
