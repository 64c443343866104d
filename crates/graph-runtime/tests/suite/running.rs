//! Submissions: order, slots, capacity, and how one is waited for.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    time::Duration,
};

use warpweft_core_types::{BufferView, Bytes, Deadline, FillRegion, Op, QueueDesc, Submission};
use warpweft_graph_runtime::{
    BusyReason, CompletionError, HostTask, MemoryPlacement, NodeDesc, RunError, RuntimeConfig, Usage,
};

use crate::rig::{Gate, Outcome, PATIENCE, Rig};

#[test]
fn replays_come_one_after_the_other() -> Outcome {
    let rig = Rig::new(1);
    let buffer = rig.memory(0, 16);
    let mut graph = rig.runtime.graph();
    rig.add(&buffer, 1, |desc| graph.add(desc))?;
    rig.add(&buffer, 2, |desc| graph.add(desc))?;
    let prepared = graph.prepare()?;
    for _ in 0..100 {
        prepared.submit_by(PATIENCE)?;
    }
    assert_eq!(rig.words(&buffer), [300; 4]);
    Ok(())
}

#[test]
fn work_of_several_devices_is_ordered_by_its_bytes() -> Outcome {
    let rig = Rig::new(3);
    let memories: Vec<_> = (0..3).map(|device| rig.memory(device, 64)).collect();
    let mut graph = rig.runtime.graph();
    for turn in 0..30 {
        let (from, to) = (&memories[turn % 3], &memories[(turn + 1) % 3]);
        rig.add(from, 1, |desc| graph.add(desc))?;
        graph.copy(from, to)?;
    }
    graph.run()?.wait(PATIENCE)?;
    assert_eq!(rig.words(&memories[0]), [30; 16]);
    Ok(())
}

#[test]
fn busy_says_why_and_passes() -> Outcome {
    let config = RuntimeConfig { graph_slots: 1, max_submissions: 2, workers: 2, ..RuntimeConfig::default() };
    let rig = Rig::with(1, config);
    let gate = Gate::default();
    let mut graph = rig.runtime.graph();
    graph.task(&gate.task(), &[])?;
    let prepared = graph.prepare()?;
    let first = prepared.submit()?;
    let busy = prepared.submit().expect_err("its only slot is under way");
    assert!(matches!(busy, RunError::Busy { reason: BusyReason::Slots { slots: 1 } }), "{busy}");
    let second = rig.runtime.task(&gate.task(), &[])?;
    let busy = rig.runtime.task(&gate.task(), &[]).expect_err("two are under way");
    assert!(matches!(busy, RunError::Busy { reason: BusyReason::Capacity { limit: 2 } }), "{busy}");
    let busy = prepared.submit_by(Duration::from_millis(5)).expect_err("nobody opened the gate");
    assert!(matches!(busy, RunError::Busy { .. }), "{busy}");
    assert_eq!(rig.runtime.statistics().refusals, 1);
    gate.open();
    prepared.submit_by(PATIENCE)?.wait(PATIENCE)?;
    first.wait(PATIENCE)?;
    second.wait(PATIENCE)?;
    Ok(())
}

#[test]
fn a_finished_completion_holds_no_slot() -> Outcome {
    let rig = Rig::with(1, RuntimeConfig { graph_slots: 1, ..RuntimeConfig::default() });
    let buffer = rig.memory(0, 4);
    let mut graph = rig.runtime.graph();
    rig.add(&buffer, 1, |desc| graph.add(desc))?;
    let prepared = graph.prepare()?;
    let mut kept = Vec::new();
    for _ in 0..10 {
        let completion = prepared.submit_by(PATIENCE)?;
        completion.wait(PATIENCE)?;
        kept.push(completion);
    }
    assert!(kept.iter().all(|completion| matches!(completion.outcome(), Some(Ok(())))));
    Ok(())
}

#[test]
fn a_wait_has_a_deadline_and_the_work_goes_on() -> Outcome {
    let rig = Rig::new(1);
    let gate = Gate::default();
    let completion = rig.runtime.task(&gate.task(), &[])?;
    assert!(matches!(completion.wait(Deadline::now()), Err(CompletionError::Timeout)));
    assert!(completion.outcome().is_none() && !completion.is_complete());
    gate.open();
    completion.wait(PATIENCE)?;
    assert!(completion.is_complete());
    Ok(())
}

#[test]
fn a_completion_is_a_future_and_calls_back() -> Outcome {
    let rig = Rig::new(2);
    let (buffer, gate) = (rig.memory(1, 16), Gate::default());
    let mut graph = rig.runtime.graph();
    graph.task(&gate.task(), &[(buffer.clone(), Usage::ReadWrite)])?;
    rig.add(&buffer, 5, |desc| graph.add(desc))?;
    let completion = graph.run()?;
    let (told, hears) = mpsc::channel();
    completion.on_complete(move |outcome| told.send(outcome.is_ok()).expect("the test waits for it"));
    gate.open();
    pollster::block_on(completion.clone().into_future())?;
    assert!(hears.recv_timeout(PATIENCE)?);
    // At once, when it has ended.
    let (told, hears) = mpsc::channel();
    completion.on_complete(move |outcome| told.send(outcome.is_ok()).expect("the test waits for it"));
    assert!(hears.try_recv()?);
    assert_eq!(rig.words(&buffer), [5; 4]);
    Ok(())
}

#[test]
fn everything_may_be_dropped_after_a_submission() -> Outcome {
    let rig = Rig::new(1);
    let gate = Gate::default();
    let (told, hears) = mpsc::channel();
    {
        let buffer = rig.memory(0, 64);
        let mut graph = rig.runtime.graph();
        graph.task(&gate.task(), &[(buffer.clone(), Usage::ReadWrite)])?;
        rig.add(&buffer, 3, |desc| graph.add(desc))?;
        let reader = HostTask::fallible(move |context| Ok(told.send(context.bytes(0)?)?));
        graph.task(&reader, &[(buffer, Usage::Read)])?;
        drop(graph.run()?);
    }
    drop(rig);
    gate.open();
    assert_eq!(hears.recv_timeout(PATIENCE)?, [3, 0, 0, 0].repeat(16));
    Ok(())
}

#[test]
fn independent_tasks_run_side_by_side() -> Outcome {
    let rig = Rig::with(1, RuntimeConfig { workers: 2, ..RuntimeConfig::default() });
    // Each waits for the other to begin.
    let begun = Arc::new(AtomicU32::new(0));
    let task = {
        let begun = Arc::clone(&begun);
        HostTask::new(move |_| {
            begun.fetch_add(1, Ordering::AcqRel);
            while begun.load(Ordering::Acquire) < 2 {
                std::thread::yield_now();
            }
        })
    };
    let mut graph = rig.runtime.graph();
    graph.task(&task, &[(rig.memory(0, 4), Usage::Write)])?;
    graph.task(&task, &[(rig.memory(0, 4), Usage::Write)])?;
    graph.run()?.wait(PATIENCE)?;
    Ok(())
}

#[test]
fn several_threads_submit_at_once() -> Outcome {
    let rig = Rig::with(2, RuntimeConfig { max_submissions: 8, ..RuntimeConfig::default() });
    let shared = rig.memory(0, 16);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (rig, shared) = (&rig, &shared);
            scope.spawn(move || {
                let own = rig.memory(thread % 2, 16);
                let mut graph = rig.runtime.graph();
                rig.add(shared, 1, |desc| graph.add(desc)).expect("it fits");
                rig.add(&own, 1, |desc| graph.add(desc)).expect("it fits");
                graph.copy(&own, &rig.memory(1 - thread % 2, 16)).expect("it fits");
                let prepared = graph.prepare().expect("devices take it");
                for _ in 0..50 {
                    prepared.submit_by(PATIENCE).expect("there will be room");
                }
                assert_eq!(rig.words(&own), [50; 4]);
            });
        }
    });
    assert_eq!(rig.words(&shared), [200; 4]);
    let counts = rig.runtime.statistics();
    assert_eq!((counts.submissions, counts.completions, counts.in_flight), (200, 200, 0));
    Ok(())
}

#[test]
fn statistics_count_what_was_prepared_and_handed_over() -> Outcome {
    let rig = Rig::new(1);
    let (first, second) = (rig.memory(0, 16), rig.memory(0, 16));
    let mut graph = rig.runtime.graph();
    rig.add(&first, 1, |desc| graph.add(desc))?;
    rig.copy(&first, &second, |desc| graph.add(desc))?;
    graph.task(&HostTask::new(|_| {}), &[(second.clone(), Usage::ReadWrite)])?;
    rig.add(&second, 1, |desc| graph.add(desc))?;
    let counts = || {
        let counts = rig.runtime.statistics();
        (counts.graphs_prepared, counts.segments, counts.tasks, counts.nodes)
    };
    assert_eq!(counts(), (0, 0, 0, 0));
    let prepared = graph.prepare()?;
    assert_eq!(counts(), (1, 0, 0, 0));
    for replay in 1..=3 {
        prepared.submit()?.wait(PATIENCE)?;
        // The kernels before the task and the one behind it are segments of the device.
        assert_eq!(counts(), (1, 2 * replay, replay, 4 * replay));
    }
    Ok(())
}

#[test]
fn a_budget_holds() -> Outcome {
    let rig = Rig::with(1, RuntimeConfig { memory_budget: Some(Bytes(1000)), ..RuntimeConfig::default() });
    let placement = MemoryPlacement::HostVisible(rig.devices[0].info().id);
    let first = rig.runtime.allocate(&placement, 600)?;
    assert!(rig.runtime.allocate(&placement, 600).is_err());
    assert_eq!(rig.runtime.statistics().live_bytes, 600);
    drop(first);
    let _second = rig.runtime.allocate(&placement, 1000)?;
    let counts = rig.runtime.statistics();
    assert_eq!((counts.live_bytes, counts.peak_bytes, counts.allocations), (1000, 1000, 2));
    Ok(())
}

#[test]
fn a_kernel_that_adds_atomically_and_commutative_nodes_have_no_order() -> Outcome {
    let rig = Rig::new(1);
    let buffer = rig.memory(0, 16);
    let mut graph = rig.runtime.graph();
    for number in 1..=10 {
        rig.add(&buffer, number, |desc| graph.add(desc.using(0, Usage::Commutative)))?;
    }
    let last = rig.copy(&buffer, &rig.memory(0, 16), |desc| graph.add(desc))?;
    assert_eq!(graph.predecessors(last).len(), 10);
    graph.run()?.wait(PATIENCE)?;
    assert_eq!(rig.words(&buffer), [55; 4]);
    Ok(())
}

#[test]
fn lanes_are_submissions_of_their_own() -> Outcome {
    let rig = Rig::new(1);
    let (one, other) = (rig.memory(0, 16), rig.memory(0, 16));
    let mut graph = rig.runtime.graph();
    for _ in 0..3 {
        graph.add(NodeDesc::fill(FillRegion::bytes(&one, 1)).in_lane(1))?;
        graph.add(NodeDesc::fill(FillRegion::bytes(&other, 1)).in_lane(2))?;
    }
    let prepared = graph.prepare()?;
    assert_eq!(prepared.segment_count(), 2);
    prepared.submit()?.wait(PATIENCE)?;
    Ok(())
}

#[test]
fn a_queue_of_the_programs_own_is_in_order_with_the_rest() -> Outcome {
    let rig = Rig::new(1);
    let (buffer, gate) = (rig.memory(0, 16), Gate::default());
    let operands = [(buffer.clone(), Usage::ReadWrite)];
    let queue = rig.devices[0].create_queue(&QueueDesc::default())?;
    let half = buffer.slice(0..8)?;
    rig.runtime.task(&gate.task(), &operands)?;
    rig.runtime.fill(FillRegion::bytes(&buffer, 1))?;
    for _ in 0..3 {
        rig.runtime.order_queue(&queue, &operands)?;
        let fill = Op::Fill(FillRegion::bytes(&half, 2));
        queue.submit(&Submission { waits: &[], ops: &[fill], signals: &[] })?;
        let passed = rig.runtime.note_queue(&queue, &operands)?;
        rig.add(&buffer, 1, |desc| rig.runtime.run(desc))?;
        gate.open();
        passed.wait(PATIENCE)?;
    }
    assert_eq!(rig.words(&buffer), [0x0202_0203, 0x0202_0203, 0x0101_0104, 0x0101_0104]);
    Ok(())
}

#[test]
fn commutative_operations_of_different_submissions_run_one_at_a_time() -> Outcome {
    let rig = Rig::with(1, RuntimeConfig { workers: 2, ..RuntimeConfig::default() });
    let operands = [(rig.memory(0, 16), Usage::Commutative)];
    let gate = Gate::default();
    let first = rig.runtime.task(&gate.task(), &operands)?;
    let second = rig.runtime.task(&HostTask::new(|_| {}), &operands)?;
    assert!(matches!(second.wait(Duration::from_millis(20)), Err(CompletionError::Timeout)));
    gate.open();
    second.wait(PATIENCE)?;
    assert!(first.is_complete());
    Ok(())
}

#[test]
fn a_single_operation_that_has_ended_holds_nothing() -> Outcome {
    let rig = Rig::new(1);
    let (buffer, task_buffer) = (rig.memory(0, 16), rig.memory(0, 16));
    let holders = |view: &BufferView| Arc::strong_count(view.buffer());
    let before = [holders(&buffer), holders(&task_buffer)];
    for _ in 0..3 {
        rig.add(&buffer, 1, |desc| rig.runtime.run(desc.named("an addition")))?.wait(PATIENCE)?;
        rig.runtime.task(&HostTask::new(|_| {}), &[(task_buffer.clone(), Usage::Read)])?.wait(PATIENCE)?;
    }
    // The runtime looks for what has ended, and devices let go of it a moment later.
    let deadline = Deadline::within(PATIENCE);
    while {
        rig.runtime.statistics();
        [holders(&buffer), holders(&task_buffer)]
    } != before
    {
        assert!(!deadline.is_past(), "{} and {} of {before:?}", holders(&buffer), holders(&task_buffer));
        std::thread::yield_now();
    }
    Ok(())
}
