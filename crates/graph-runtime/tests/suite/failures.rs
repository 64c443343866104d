//! Work that fails: whom it concerns, what is poisoned, and what goes on.

use std::sync::{Arc, mpsc};

use warpweft_core_types::{Backend, ErrorClass, Failure, Features, FillRegion};
use warpweft_graph_runtime::{CompletionError, HostTask, MapError, NodeDesc, RunError, RuntimeConfig, Usage};
use warpweft_host::HostBackend;
use warpweft_wrappers::{FaultConfig, FaultyBackend};

use crate::rig::{Gate, Outcome, PATIENCE, Rig};

/// One queue, so that everything is behind everything.
const NARROW: RuntimeConfig = RuntimeConfig {
    lanes: 1,
    max_submissions: 64,
    graph_slots: 2,
    workers: 1,
    memory_budget: None,
    trace_events: 64,
};

#[test]
fn only_what_needs_failed_work_is_skipped() -> Outcome {
    let rig = Rig::with(1, NARROW);
    let (failed, dependent, apart) = (rig.memory(0, 16), rig.memory(0, 16), rig.memory(0, 16));
    let gate = Gate::default();
    rig.runtime.task(&gate.task(), &[(failed.clone(), Usage::ReadWrite)])?;
    let culprit = rig.fail(&failed, |desc| rig.runtime.run(desc.named("the culprit")))?;
    let second = rig.copy(&failed, &dependent, |desc| rig.runtime.run(desc))?;
    let third = rig.add(&apart, 4, |desc| rig.runtime.run(desc))?;
    gate.open();
    let error = culprit.wait(PATIENCE).expect_err("it panicked");
    let CompletionError::Failed(failure) = &error else { return Err(error.into()) };
    assert_eq!(failure.nodes[0].name, "the culprit");
    assert_eq!(failure.written, [(failed.device(), 0..16)]);
    assert!(
        matches!(&*failure.reason, Failure::KernelPanicked { message, .. } if message == "as it was told")
    );
    assert_eq!(error.class(), ErrorClass::Usage);
    let error = second.wait(PATIENCE).expect_err("it reads what the culprit was to write");
    assert!(error.to_string().contains("the culprit"), "{error}");
    // In the same queue behind the culprit, and none of its business.
    third.wait(PATIENCE)?;
    assert_eq!(rig.words(&apart), [4; 4]);
    assert!(rig.runtime.statistics().resubmissions >= 1);
    Ok(())
}

#[test]
fn poisoned_bytes_are_refused_until_they_are_written() -> Outcome {
    let rig = Rig::new(1);
    let (buffer, other) = (rig.memory(0, 64), rig.memory(0, 64));
    let part = buffer.slice(16..32)?;
    let failed = rig.fail(&part, |desc| rig.runtime.run(desc))?;
    failed.wait(PATIENCE).expect_err("it panicked");
    // Beside the poisoned bytes.
    rig.runtime.copy(&buffer.slice(0..16)?, &other.slice(0..16)?)?.wait(PATIENCE)?;
    let refused = rig.runtime.copy(&buffer, &other).expect_err("a part is poisoned");
    let RunError::Poisoned { poison } = &refused else { return Err(refused.into()) };
    assert_eq!(poison.range, 16..32);
    assert!(matches!(rig.runtime.read(&buffer, PATIENCE), Err(MapError::Poisoned { .. })));
    // A write of half of them heals that half.
    rig.runtime.fill(FillRegion::bytes(&buffer.slice(0..24)?, 1))?.wait(PATIENCE)?;
    let refused = rig.runtime.copy(&buffer, &other).expect_err("the rest is poisoned");
    assert!(matches!(&refused, RunError::Poisoned { poison } if poison.range == (24..32)), "{refused}");
    rig.runtime.reset(&part)?.wait(PATIENCE)?;
    rig.runtime.copy(&buffer, &other)?.wait(PATIENCE)?;
    Ok(())
}

#[test]
fn a_graph_that_writes_poisoned_bytes_before_it_reads_them_runs() -> Outcome {
    let rig = Rig::new(1);
    let (buffer, other) = (rig.memory(0, 64), rig.memory(0, 64));
    rig.fail(&buffer, |desc| rig.runtime.run(desc))?.wait(PATIENCE).expect_err("it panicked");
    let mut graph = rig.runtime.graph();
    graph.fill(FillRegion::bytes(&buffer.slice(0..32)?, 1))?;
    graph.fill(FillRegion::bytes(&buffer.slice(32..64)?, 1))?;
    graph.copy(&buffer, &other)?;
    graph.run()?.wait(PATIENCE)?;
    assert_eq!(rig.words(&other), [0x0101_0101; 16]);
    Ok(())
}

#[test]
fn a_node_of_a_graph_is_named_and_nodes_before_it_keep_what_they_wrote() -> Outcome {
    let rig = Rig::new(1);
    let (first, second, third) = (rig.memory(0, 16), rig.memory(0, 16), rig.memory(0, 16));
    let mut graph = rig.runtime.graph();
    rig.add(&first, 1, |desc| graph.add(desc))?;
    let failing = rig.fail(&second, |desc| graph.add(desc.named("second")))?;
    rig.copy(&second, &third, |desc| graph.add(desc))?;
    let error = graph.run()?.wait(PATIENCE).expect_err("it panicked");
    let CompletionError::Failed(failure) = &error else { return Err(error.into()) };
    assert_eq!(failure.nodes.len(), 1);
    assert_eq!((failure.nodes[0].id, failure.nodes[0].name.as_str()), (failing, "second"));
    assert_eq!(rig.words(&first), [1; 4]);
    assert!(rig.runtime.read(&third, PATIENCE).is_err());
    Ok(())
}

#[test]
fn a_task_that_fails_or_panics_is_named() -> Outcome {
    let rig = Rig::new(1);
    let buffer = rig.memory(0, 16);
    let operands = [(buffer.clone(), Usage::ReadWrite)];
    for (task, words) in [
        (HostTask::fallible(|_| Err("out of paper".into())), "out of paper"),
        (HostTask::new(|_| panic!("paper jam")), "paper jam"),
        (HostTask::fallible(|context| Ok(context.write(0, 12, &[0; 8])?)), "leave a buffer"),
        (HostTask::fallible(|context| Ok(context.write(1, 0, &[])?)), "no number 1"),
    ] {
        let desc = NodeDesc::task(&task, &operands).named("printer");
        let error = rig.runtime.run(desc)?.wait(PATIENCE).expect_err("it fails");
        assert!(error.to_string().contains("printer") && error.to_string().contains(words), "{error}");
        rig.runtime.reset(&buffer)?.wait(PATIENCE)?;
    }
    Ok(())
}

#[test]
fn a_chain_of_ten_thousand_behind_a_failure_ends() -> Outcome {
    let rig = Rig::with(1, RuntimeConfig { graph_slots: 1, ..NARROW });
    let (buffer, gate) = (rig.memory(0, 16), Gate::default());
    let operands = [(buffer, Usage::ReadWrite)];
    let mut graph = rig.runtime.graph();
    graph.task(&gate.task(), &operands)?;
    graph.task(&HostTask::fallible(|_| Err("the first".into())), &operands)?;
    for _ in 0..10_000 {
        graph.task(&HostTask::new(|_| {}), &operands)?;
    }
    let completion = graph.run()?;
    gate.open();
    let error = completion.wait(PATIENCE).expect_err("the first fails");
    assert!(error.to_string().contains("the first"), "{error}");
    Ok(())
}

#[test]
fn work_after_a_failure_runs_on_every_lane() -> Outcome {
    let rig = Rig::new(2);
    for round in 0..20 {
        let device = round % 2;
        let bad = rig.memory(device, 16);
        let failed = rig.fail(&bad, |desc| rig.runtime.run(desc))?;
        let good = rig.memory(device, 16);
        let next = rig.add(&good, 1, |desc| rig.runtime.run(desc))?;
        failed.wait(PATIENCE).expect_err("it panicked");
        next.wait(PATIENCE)?;
        assert_eq!(rig.words(&good), [1; 4]);
    }
    Ok(())
}

#[test]
fn memory_of_a_lost_device_is_quarantined_and_no_other() -> Outcome {
    // Loading is the first step, each memory is one more, and the second fill is the one to die of.
    let config = FaultConfig { dies_at_step: Some(4), ..FaultConfig::default() };
    let dying = FaultyBackend::new(Arc::new(HostBackend::with_devices(1)?), config);
    let sound = HostBackend::with_devices(1)?;
    let open = |backend: &dyn Backend| backend.open(0, Features::empty());
    let rig = Rig::of(vec![open(&dying)?, open(&sound)?], RuntimeConfig::default());
    let (used, unused, elsewhere) = (rig.memory(0, 64), rig.memory(0, 32), rig.memory(1, 16));
    assert_eq!(rig.runtime.statistics().quarantined_bytes, 0);
    let gate = Gate::default();
    rig.runtime.task(&gate.task(), &[(used.clone(), Usage::ReadWrite)])?;
    let under_way = rig.runtime.fill(FillRegion::bytes(&used, 1))?;
    let refused = rig.runtime.fill(FillRegion::bytes(&used, 2)).expect_err("the device dies of it");
    assert_eq!(refused.class(), ErrorClass::DeviceLost);
    gate.open();
    let error = under_way.wait(PATIENCE).expect_err("its device died");
    assert_eq!(error.class(), ErrorClass::DeviceLost);
    assert_eq!(rig.runtime.statistics().quarantined_bytes, 64 + 32);
    assert!(rig.runtime.read(&unused, PATIENCE).is_err());
    rig.add(&elsewhere, 1, |desc| rig.runtime.run(desc))?.wait(PATIENCE)?;
    // The first device is the lost one.
    let both =
        [rig.runtime.task(&HostTask::new(|_| {}), &[])?, rig.runtime.task(&HostTask::new(|_| {}), &[])?];
    both.iter().try_for_each(|task| Ok(task.wait(PATIENCE)?))
}

#[test]
fn whoever_waits_otherwise_hears_of_it_too() -> Outcome {
    let rig = Rig::new(1);
    let failed = rig.fail(&rig.memory(0, 16), |desc| rig.runtime.run(desc))?;
    let (told, hears) = mpsc::channel();
    failed.on_complete(move |outcome| told.send(outcome.is_err()).expect("the test waits for it"));
    assert!(pollster::block_on(failed.into_future()).is_err());
    assert!(hears.recv_timeout(PATIENCE)?);
    Ok(())
}
