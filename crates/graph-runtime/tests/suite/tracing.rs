//! Traces.

use warpweft_graph_runtime::{HostTask, RuntimeConfig, TraceClock, Usage};

use crate::rig::{Outcome, PATIENCE, Rig};

#[test]
fn every_node_is_there_in_order_with_its_arrows() -> Outcome {
    let rig = Rig::new(2);
    let (one, other) = (rig.memory(0, 64), rig.memory(1, 64));
    assert!(rig.runtime.start_trace() && !rig.runtime.start_trace());
    let mut graph = rig.runtime.graph();
    rig.add(&one, 1, |desc| graph.add(desc.named("make")))?;
    graph.copy(&one, &other)?;
    graph.task(&HostTask::new(|_| {}), &[(other.clone(), Usage::ReadWrite)])?;
    let completion = graph.run()?;
    completion.wait(PATIENCE)?;
    rig.add(&other, 1, |desc| rig.runtime.run(desc.named("alone")))?.wait(PATIENCE)?;
    let trace = rig.runtime.finish_trace().ok_or("one was begun")?;
    assert!(rig.runtime.finish_trace().is_none());
    assert_eq!(trace.dropped, 0);
    let names: Vec<_> = trace.events.iter().map(|event| event.name.as_str()).collect();
    assert_eq!(names.len(), 4, "{names:?}");
    let find = |name: &str| trace.events.iter().find(|event| event.name == name).expect("it ran");
    let (make, copy, task, alone) = (find("make"), find("copy"), find("task"), find("alone"));
    assert_eq!((make.clock, copy.clock), (TraceClock::Device, TraceClock::Device));
    assert_eq!((task.clock, alone.clock), (TraceClock::Host, TraceClock::Observed));
    assert_eq!(copy.after, [make.node]);
    assert_eq!(task.after, [copy.node]);
    assert_eq!((make.device, task.device), (Some(rig.devices[0].info().id), None));
    assert_eq!(copy.written_bytes, 64);
    // The clocks of host devices are the host's.
    assert!(make.start + make.duration <= copy.start + std::time::Duration::from_micros(50));
    let json: serde_json::Value = serde_json::from_str(&trace.to_json())?;
    let events = json["traceEvents"].as_array().ok_or("a list")?;
    let count = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
    assert_eq!((count("M"), count("X"), count("s"), count("f")), (3, 4, 2, 2));
    Ok(())
}

#[test]
fn a_trace_is_bounded_and_counts_what_it_drops() -> Outcome {
    let rig = Rig::with(1, RuntimeConfig { trace_events: 8, ..RuntimeConfig::default() });
    let buffer = rig.memory(0, 16);
    rig.runtime.start_trace();
    for number in 0..20 {
        rig.add(&buffer, number, |desc| rig.runtime.run(desc))?.wait(PATIENCE)?;
    }
    let trace = rig.runtime.finish_trace().ok_or("one was begun")?;
    assert_eq!((trace.events.len(), trace.dropped), (8, 12));
    assert_eq!(trace.events.last().map(|event| event.submission), Some(19));
    Ok(())
}

#[test]
fn failures_are_marked() -> Outcome {
    let rig = Rig::new(1);
    rig.runtime.start_trace();
    let failed = rig.fail(&rig.memory(0, 16), |desc| rig.runtime.run(desc))?;
    failed.wait(PATIENCE).expect_err("it panicked");
    let trace = rig.runtime.finish_trace().ok_or("one was begun")?;
    assert!(trace.events[0].failed);
    Ok(())
}
