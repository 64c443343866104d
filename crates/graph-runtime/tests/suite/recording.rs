//! What is recorded, and what is inferred from it.

use warpweft_core_types::{Backend as _, Features, FillRegion, MemoryKind, RangeError};
use warpweft_graph_runtime::{
    Hazard, HostTask, MemoryPlacement, NodeDesc, PrepareError, RecordError, RunError, RuntimeConfig, Usage,
};
use warpweft_host::HostBackend;

use crate::rig::{Outcome, PATIENCE, Rig};

#[test]
fn an_edge_is_explained_by_its_bytes_and_hazard() -> Outcome {
    let rig = Rig::new(1);
    let buffer = rig.memory(0, 64);
    let mut graph = rig.runtime.graph();
    let writer = graph.fill(FillRegion::bytes(&buffer.slice(0..32)?, 1))?;
    let reader = rig.copy(&buffer.slice(16..48)?, &rig.memory(0, 32), |desc| graph.add(desc))?;
    let other = graph.fill(FillRegion::bytes(&buffer.slice(40..64)?, 2))?;
    let why = graph.why(writer, reader);
    assert_eq!(why.len(), 1);
    assert_eq!((why[0].range.clone(), why[0].hazard), (16..32, Hazard::ReadAfterWrite));
    assert_eq!(graph.why(reader, other)[0].hazard, Hazard::WriteAfterRead);
    // By way of the reader alone.
    let chain = graph.why(writer, other);
    assert_eq!(
        chain.iter().map(|reason| (reason.earlier, reason.later)).collect::<Vec<_>>(),
        [(writer, reader), (reader, other)]
    );
    assert!(graph.why(other, writer).is_empty());
    assert_eq!(graph.predecessors(other), [reader]);
    Ok(())
}

#[test]
fn a_thousand_readers_of_a_thousand_buffers_have_no_edges() -> Outcome {
    let rig = Rig::new(1);
    let buffers: Vec<_> = (0..1000).map(|_| (rig.memory(0, 4), Usage::Read)).collect();
    let mut graph = rig.runtime.graph();
    for _ in 0..1000 {
        graph.task(&HostTask::new(|_| {}), &buffers)?;
    }
    assert_eq!((graph.len(), graph.edge_count()), (1000, 0));
    Ok(())
}

#[test]
fn fifty_thousand_readers_before_writers_are_few_edges() -> Outcome {
    let rig = Rig::new(1);
    let (buffer, sink) = (rig.memory(0, 64), rig.memory(0, 4 * 50_000));
    let mut graph = rig.runtime.graph();
    for reader in 0..50_000 {
        let own = sink.slice(4 * reader..4 * reader + 4)?;
        rig.copy(&buffer.slice(0..4)?, &own, |desc| graph.add(desc))?;
    }
    for part in 0..16 {
        rig.add(&buffer.slice(4 * part..4 * part + 4)?, 1, |desc| graph.add(desc))?;
    }
    // All readers and the join behind them; only the first writer's bytes were read.
    assert_eq!(graph.edge_count(), 50_001);
    graph.run()?.wait(PATIENCE)?;
    assert_eq!(rig.words(&buffer), [1; 16]);
    Ok(())
}

#[test]
fn the_critical_path_follows_the_costs() -> Outcome {
    let rig = Rig::new(1);
    let (a, b, c) = (rig.memory(0, 4), rig.memory(0, 4), rig.memory(0, 8));
    let mut graph = rig.runtime.graph();
    let long = graph.fill(FillRegion::bytes(&a, 1))?;
    let short = graph.fill(FillRegion::bytes(&b, 1))?;
    let last =
        graph.task(&HostTask::new(|_| {}), &[(a, Usage::Read), (b, Usage::Read), (c, Usage::Write)])?;
    assert_eq!(graph.critical_path(|node| if node == long { 10 } else { 1 }), [long, last]);
    assert_eq!(graph.critical_path(|node| if node == short { 10 } else { 1 }), [short, last]);
    Ok(())
}

#[test]
fn what_cannot_be_a_node_is_refused_and_leaves_the_graph_as_it_was() -> Outcome {
    let rig = Rig::new(1);
    let stranger = Rig::new(1);
    let (ours, theirs) = (rig.memory(0, 64), stranger.memory(0, 64));
    let hidden = MemoryPlacement::Device(rig.devices[0].info().id);
    let hidden = rig.runtime.allocate(&hidden, 64)?.view().clone();
    let mut graph = rig.runtime.graph();
    let error = graph.fill(FillRegion::bytes(&theirs, 1)).expect_err("it is of another runtime");
    assert!(
        matches!(error, RecordError::UnknownDevice { device, .. } if device == theirs.device()),
        "{error}"
    );
    let error = graph.copy(&ours, &theirs).expect_err("it is of another runtime");
    assert!(matches!(error, RecordError::UnknownDevice { .. }), "{error}");
    let error = graph.copy(&ours, &ours.slice(0..32)?).expect_err("they differ in length");
    assert!(matches!(error, RecordError::Range { source: RangeError::LengthMismatch { .. }, .. }), "{error}");
    let error = graph.copy(&ours.slice(0..32)?, &ours.slice(16..48)?).expect_err("they overlap");
    assert!(matches!(error, RecordError::Range { source: RangeError::Overlap { bytes: 16 }, .. }), "{error}");
    let task = HostTask::new(|_| {});
    let error = graph.task(&task, &[(hidden, Usage::Read)]).expect_err("the host cannot address it");
    assert!(matches!(error, RecordError::NotHostVisible { .. }), "{error}");
    let fill = NodeDesc::fill(FillRegion::bytes(&ours, 1)).named("the fill");
    let error = graph.add(fill.clone().using(0, Usage::Read)).expect_err("a fill writes");
    assert!(matches!(&error, RecordError::Usage { operand: 0, asked: Usage::Read, .. }), "{error}");
    assert!(error.to_string().contains("the fill"), "{error}");
    let error = graph.add(fill.using(1, Usage::Write)).expect_err("a fill has one operand");
    assert!(matches!(&error, RecordError::Usage { operand: 1, .. }), "{error}");
    assert!(graph.is_empty());
    assert!(matches!(graph.prepare(), Err(PrepareError::Empty)));
    Ok(())
}

#[test]
fn buffers_that_stand_for_one_memory_are_ordered() -> Outcome {
    let rig = Rig::new(2);
    let ids: Vec<_> = rig.devices.iter().map(|device| device.info().id).collect();
    let shared = rig.runtime.allocate(&MemoryPlacement::Shared(ids.clone()), 4096)?;
    let (one, other) = (shared.on(ids[0]).ok_or("shared")?, shared.on(ids[1]).ok_or("shared")?);
    let mut graph = rig.runtime.graph();
    let first = rig.add(one, 1, |desc| graph.add(desc))?;
    let second = rig.add(&other.slice(0..16)?, 2, |desc| graph.add(desc))?;
    assert_eq!(graph.predecessors(second), [first]);
    graph.run()?.wait(PATIENCE)?;
    assert_eq!(rig.words(one)[..6], [3, 3, 3, 3, 1, 1]);
    Ok(())
}

#[test]
fn bytes_that_the_host_writes_once_are_copied_from() -> Outcome {
    let rig = Rig::new(1);
    let id = rig.devices[0].info().id;
    let upload = rig.runtime.allocate(&MemoryPlacement::Upload(id), 16)?;
    assert_eq!(upload.view().buffer().kind(), MemoryKind::Upload);
    rig.runtime.write(upload.view(), PATIENCE)?.write(0, &[7; 16])?;
    let target = rig.memory(0, 16);
    rig.runtime.copy(upload.view(), &target)?;
    assert_eq!(rig.words(&target), [0x0707_0707; 4]);
    Ok(())
}

#[test]
fn copies_over_the_host_keep_what_they_use_beside() -> Outcome {
    // Two backends, of which none reaches the other's memory.
    let open = || HostBackend::with_devices(1)?.open(0, Features::empty());
    let rig = Rig::of(vec![open()?, open()?], RuntimeConfig::default());
    let ids: Vec<_> = rig.devices.iter().map(|device| device.info().id).collect();
    let device = |at: usize| {
        rig.runtime.allocate(&MemoryPlacement::Device(ids[at]), 64).map(|buffer| buffer.view().clone())
    };
    let order = [(rig.memory(0, 4), Usage::ReadWrite)];
    let mut graph = rig.runtime.graph();
    let first = graph.add(NodeDesc::copy(&device(0)?, &device(1)?)?.beside(&order))?;
    let second = graph.add(NodeDesc::copy(&device(0)?, &device(1)?)?.beside(&order))?;
    assert!(graph.len() > 2, "no device does them alone");
    assert!(!graph.why(first, second).is_empty());
    graph.run()?.wait(PATIENCE)?;
    assert_eq!(rig.runtime.statistics().staged_bytes, 128);
    Ok(())
}

#[test]
fn single_operations_are_checked_like_nodes() -> Outcome {
    let rig = Rig::new(2);
    let buffer = rig.memory(0, 16);
    let fill = NodeDesc::fill(FillRegion::bytes(&buffer, 1)).using(1, Usage::Write);
    let error = rig.runtime.run(fill).expect_err("a fill has one operand");
    assert!(matches!(error, RunError::Record(RecordError::Usage { operand: 1, .. })), "{error}");
    let all = rig.devices.iter().map(|device| device.info().id).collect();
    let error = rig.runtime.allocate(&MemoryPlacement::Shared(all), u64::MAX).expect_err("nobody has that");
    assert!(error.to_string().contains("host:0"), "{error}");
    assert!(rig.runtime.allocate(&MemoryPlacement::Shared(Vec::new()), 16).is_err());
    Ok(())
}
