//! Cancelling.

use warpweft_graph_runtime::{CompletionError, HostTask, Usage};

use crate::rig::{Gate, Outcome, PATIENCE, Rig};

#[test]
fn what_has_begun_ends_and_the_rest_is_skipped() -> Outcome {
    let rig = Rig::new(1);
    let (buffer, gate) = (rig.memory(0, 16), Gate::default());
    let operands = [(buffer.clone(), Usage::ReadWrite)];
    let mut graph = rig.runtime.graph();
    graph.task(&gate.task(), &operands)?;
    graph.task(&HostTask::fallible(|context| Ok(context.write(0, 0, &[1; 16])?)), &operands)?;
    rig.add(&buffer, 1, |desc| graph.add(desc))?;
    let completion = graph.run()?;
    gate.wait_until_entered();
    completion.cancel();
    assert!(!completion.is_complete(), "the first task has begun and goes on");
    gate.open();
    let error = completion.wait(PATIENCE).expect_err("it was cancelled");
    assert!(matches!(error, CompletionError::Cancelled), "{error}");
    rig.runtime.reset(&buffer)?.wait(PATIENCE)?;
    assert_eq!(rig.words(&buffer), [0; 4]);
    Ok(())
}

#[test]
fn a_completion_that_has_ended_is_not_cancelled() -> Outcome {
    let rig = Rig::new(1);
    let buffer = rig.memory(0, 16);
    let completion = rig.add(&buffer, 1, |desc| rig.runtime.run(desc))?;
    completion.wait(PATIENCE)?;
    completion.cancel();
    assert!(matches!(completion.outcome(), Some(Ok(()))));
    Ok(())
}

#[test]
fn dropping_cancels_nothing() -> Outcome {
    let rig = Rig::new(1);
    let (buffer, gate) = (rig.memory(0, 16), Gate::default());
    rig.runtime.task(&gate.task(), &[(buffer.clone(), Usage::ReadWrite)])?;
    drop(rig.add(&buffer, 6, |desc| rig.runtime.run(desc))?);
    gate.open();
    assert_eq!(rig.words(&buffer), [6; 4]);
    Ok(())
}
