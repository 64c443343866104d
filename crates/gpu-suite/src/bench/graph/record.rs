//! Recording a graph, which no device takes part in, and having it prepared.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::json;
use warpweft_cli::measure::Bar;
use warpweft_graph_runtime::RuntimeConfig;

use super::{
    Beside, Effort, WARM_UP,
    program::Program,
    raw::{RawNode, RawTemplate},
    runtime,
};
use crate::{
    bench::{
        raw::Raw,
        samples::{in_turn, judge},
    },
    rig::{Bench, report, say},
};

/// For each node, in microseconds.
const RECORD: f64 = 1.0;

pub(super) fn run(bench: &Bench, raw: &Raw, effort: Effort) -> Result<()> {
    for program in [Program::chain(effort.recorded), Program::stencil(8 * 32)] {
        one(bench, raw, &program, effort)?;
    }
    Ok(())
}

fn one(bench: &Bench, raw: &Raw, program: &Program, effort: Effort) -> Result<()> {
    // One slot, as the graph by hand is one.
    let runtime = runtime(bench, RuntimeConfig { graph_slots: 1, ..RuntimeConfig::default() })?;
    let bound = program.bind(bench)?;
    let args = bound.args();
    let graph = bound.record(&runtime, &args)?;
    let edges = graph.edge_count();
    raw.make_current()?;
    let nodes = program.by_hand(raw, &graph)?;
    drop(graph);
    let mut ours = || {
        let began = Instant::now();
        let graph = bound.record(&runtime, &args)?;
        let recorded = began.elapsed();
        let began = Instant::now();
        let executable = graph.prepare()?;
        let prepared = began.elapsed();
        drop(executable);
        Ok([recorded, prepared])
    };
    let mut by_hand = || by_hand(&nodes);
    let (mut recording, mut preparing) = (Beside::default(), Beside::default());
    for round in 0..effort.rounds + WARM_UP {
        let (ours, raw) = in_turn(round, &mut ours, &mut by_hand)?;
        recording.add(round, (ours[0], raw[0]));
        preparing.add(round, (ours[1], raw[0] + raw[1]));
    }
    let name = &program.name;
    report(&json!({"graph": name, "nodes": program.len(), "edges": edges}));
    say(&format!("{name}: {} nodes, {edges} edges", program.len()));
    let recording = recording.each_of(program.len());
    let what = format!("record, for each node (raw: add it to a graph): {name}");
    recording.tell(&what);
    let [_, median, _] = recording.ours.interval();
    let bar = Bar::at_most(format!("record, for each node: {name}"), median, RECORD, "us");
    judge(&bar.with_p99(recording.ours.p99()));
    preparing
        .each_of(program.len())
        .tell(&format!("prepare, for each node (raw: add and instantiate): {name}"));
    Ok(())
}

/// How long adding took, and how long instantiating did.
fn by_hand(nodes: &[RawNode]) -> Result<[Duration; 2]> {
    let began = Instant::now();
    let template = RawTemplate::new(nodes)?;
    let added = began.elapsed();
    let began = Instant::now();
    let graph = template.instantiate()?;
    let instantiated = began.elapsed();
    drop(graph);
    Ok([added, instantiated])
}
