//! A runtime of graphs on a GPU and on host processors, whose GPU is lost to a trap.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use warpweft_core_types::{Arg, Backend as _, BufferDesc, BufferView, Failure, Features, FillRegion, Launch};
use warpweft_graph_runtime::{
    Completion, CompletionError, HostTask, MapError, MemoryPlacement, NodeDesc, NodeFailure, RunError,
    Runtime, RuntimeConfig, Usage,
};
use warpweft_host::HostBackend;

use crate::{
    kernels,
    rig::{Bench, LIMIT, Rig, report},
};

/// What a node wrote before there was anything wrong.
const GOOD: u8 = 7;

/// One graph with a node that traps, one that needs it, and one that does not, on another device; and what can be had of
/// the runtime afterwards.
pub(crate) fn runtime_loses_its_device() -> Result<()> {
    let rig = Rig::with(&kernels::graph())?;
    let bench = rig.first();
    let host = HostBackend::with_devices(1)?.open(0, Features::empty())?;
    let runtime = Runtime::new([Arc::clone(&bench.device), Arc::clone(&host)], RuntimeConfig::default())?;
    let placed = |placement, size| anyhow::Ok(runtime.allocate(&placement, size)?.view().clone());
    let own = MemoryPlacement::Device(bench.device.info().id);
    let (good, bad) = (placed(own.clone(), 64)?, placed(own, 4)?);
    let landing = BufferView::whole(bench.device.allocate(&BufferDesc::host_visible(4))?);
    let apart = placed(MemoryPlacement::HostVisible(host.info().id), 64)?;
    runtime.fill(FillRegion::bytes(&good, GOOD))?.wait(LIMIT)?;

    let failed = trap_in_a_graph(&runtime, bench, &bad, &landing)?;
    let beside = runtime.fill(FillRegion::bytes(&apart, 1))?;
    let failure = failure_of(&failed)?;
    ensure!(failure.nodes.iter().any(|node| node.name == "trap"), "named: {:?}", failure.nodes);
    ensure!(failure.written.contains(&(bad.device(), 0..4)), "poisoned: {:?}", failure.written);
    ensure!(matches!(*failure.reason, Failure::DeviceLost { .. }), "the reason: {:?}", failure.reason);
    report(&json!({"a graph's trap": failure.to_string()}));

    beside.wait(LIMIT).context("the host's own work")?;
    what_is_left(&runtime, [&good, &bad, &landing], &apart)
}

/// A kernel that traps, and a copy of what it was to write.
fn trap_in_a_graph(
    runtime: &Runtime,
    bench: &Bench,
    bad: &BufferView,
    to: &BufferView,
) -> Result<Completion> {
    let (kernel, args) = (bench.kernel("trap")?, [Arg::Buffer(bad)]);
    let mut graph = runtime.graph();
    graph.add(NodeDesc::launch(Launch::new(&kernel, [1, 1, 1], &args)?).named("trap"))?;
    graph.add(NodeDesc::copy(bad, to)?.named("fetch"))?;
    Ok(graph.run()?)
}

fn failure_of(completion: &Completion) -> Result<Arc<NodeFailure>> {
    match completion.wait(LIMIT) {
        Err(CompletionError::Failed(failure)) => Ok(failure),
        other => bail!("the graph with the trap: {other:?}"),
    }
}

/// Nothing of the lost device can be read, and all else goes on.
fn what_is_left(runtime: &Runtime, lost: [&BufferView; 3], apart: &BufferView) -> Result<()> {
    let [good, bad, landing] = lost;
    let refused = runtime.copy(&good.slice(0..4)?, bad).map(|_| ());
    ensure!(matches!(refused, Err(RunError::Poisoned { .. })), "bytes of the lost device: {refused:?}");
    let refused = runtime.read(landing, LIMIT).map(|_| ());
    ensure!(matches!(refused, Err(MapError::Poisoned { .. })), "what was to be fetched: {refused:?}");
    let quarantined = runtime.statistics().quarantined_bytes;
    ensure!(quarantined >= good.size(), "{quarantined} bytes are in quarantine");
    let task = HostTask::fallible(|context| Ok(context.write(0, 0, &[GOOD; 64])?));
    runtime.task(&task, &[(apart.clone(), Usage::Write)])?.wait(LIMIT).context("a task afterwards")?;
    let bytes = runtime.read(apart, LIMIT)?.to_vec()?;
    ensure!(bytes == [GOOD; 64], "the host's memory has {bytes:?}");
    report(&json!({"bytes in quarantine": quarantined}));
    Ok(())
}
