//! Other operands for prepared graphs.

use warpweft_core_types::FillRegion;
use warpweft_graph_runtime::{HostTask, NodeDesc, PrepareError, RecordError, Usage};

use crate::rig::{Gate, Outcome, PATIENCE, Rig};

#[test]
fn submissions_under_way_keep_what_they_had() -> Outcome {
    let rig = Rig::new(1);
    let (gate, gated) = (Gate::default(), rig.memory(0, 16));
    let targets: Vec<_> = (0..8).map(|_| rig.memory(0, 16)).collect();
    rig.runtime.task(&gate.task(), &[(gated.clone(), Usage::ReadWrite)])?;
    let mut graph = rig.runtime.graph();
    let node = rig.copy(&gated, &targets[0], |desc| graph.add(desc))?;
    let last = rig.add(&targets[0], 1, |desc| graph.add(desc))?;
    let mut prepared = graph.prepare()?;
    prepared.submit()?;
    rig.copy(&gated, &targets[1], |copy| {
        rig.add(&targets[1], 2, |add| prepared.rebind([(node, copy), (last, add)]))
    })?;
    prepared.submit()?;
    gate.open();
    for (number, target) in (0..).zip(&targets).skip(2) {
        rig.copy(&gated, target, |copy| {
            rig.add(target, number, |add| prepared.rebind([(node, copy), (last, add)]))
        })?;
        prepared.submit_by(PATIENCE)?;
    }
    let expected = [1, 2, 2, 3, 4, 5, 6, 7];
    for (target, expected) in targets.iter().zip(expected) {
        assert_eq!(rig.words(target), [expected; 4]);
    }
    Ok(())
}

#[test]
fn a_thousand_exchanges_are_all_seen() -> Outcome {
    let rig = Rig::new(1);
    let buffer = rig.memory(0, 16);
    let mut graph = rig.runtime.graph();
    let node = rig.add(&buffer, 0, |desc| graph.add(desc))?;
    let mut prepared = graph.prepare()?;
    for number in 1..=1000 {
        rig.add(&buffer, number, |desc| prepared.rebind([(node, desc)]))?;
        prepared.submit_by(PATIENCE)?;
    }
    assert_eq!(rig.words(&buffer), [500_500; 4]);
    Ok(())
}

#[test]
fn other_buffers_can_mean_another_order() -> Outcome {
    let rig = Rig::new(1);
    let (one, other, seen) = (rig.memory(0, 16), rig.memory(0, 16), rig.memory(0, 16));
    let mut graph = rig.runtime.graph();
    rig.add(&one, 1, |desc| graph.add(desc))?;
    let copy = rig.copy(&other, &seen, |desc| graph.add(desc))?;
    let mut prepared = graph.prepare()?;
    assert!(prepared.graph().predecessors(copy).is_empty());
    prepared.submit()?;
    assert_eq!(rig.words(&seen), [0; 4]);
    prepared.replace(&other, &one)?;
    assert_eq!(prepared.graph().predecessors(copy).len(), 1);
    prepared.submit_by(PATIENCE)?;
    assert_eq!(rig.words(&seen), [2; 4]);
    Ok(())
}

#[test]
fn views_of_a_replaced_buffer_move_with_it() -> Outcome {
    let rig = Rig::new(1);
    let (old, new) = (rig.memory(0, 64), rig.memory(0, 64));
    let mut graph = rig.runtime.graph();
    rig.add(&old.slice(16..32)?, 5, |desc| graph.add(desc))?;
    let write = HostTask::fallible(|context| Ok(context.write(0, 0, &[1; 4])?));
    graph.task(&write, &[(old.slice(32..36)?, Usage::Write)])?;
    let mut prepared = graph.prepare()?;
    prepared.replace(&old, &new)?;
    prepared.submit()?;
    assert_eq!(rig.words(&old), [0; 16]);
    assert_eq!(rig.words(&new)[3..9], [0, 5, 5, 5, 5, 0x0101_0101]);
    let error = prepared.replace(&new, &old.slice(0..32)?).expect_err("they differ in length");
    assert!(matches!(error, PrepareError::Record(RecordError::Range { .. })), "{error}");
    Ok(())
}

#[test]
fn a_node_keeps_its_kind_and_a_refusal_changes_nothing() -> Outcome {
    let rig = Rig::new(1);
    let buffer = rig.memory(0, 16);
    let mut graph = rig.runtime.graph();
    let node = rig.add(&buffer, 1, |desc| graph.add(desc))?;
    let mut prepared = graph.prepare()?;
    let fill = NodeDesc::fill(FillRegion::bytes(&buffer, 9));
    let error = prepared.rebind([(node, fill.clone())]).expect_err("a launch is no fill");
    assert!(matches!(error, PrepareError::Record(RecordError::OtherKind { .. })), "{error}");
    let mut other = rig.runtime.graph();
    for _ in 0..3 {
        other.add(fill.clone())?;
    }
    let stranger = other.ids().last().ok_or("three were added")?;
    let error = prepared.rebind([(stranger, fill)]).expect_err("there is one node");
    assert!(matches!(error, PrepareError::NoSuchNode { node_count: 1, .. }), "{error}");
    prepared.submit()?;
    assert_eq!(rig.words(&buffer), [1; 4]);
    Ok(())
}
