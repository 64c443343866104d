//! What once went wrong: order that was lost with what was skipped, rooms and failures that nobody heard of.

use std::{
    sync::mpsc,
    time::{Duration, Instant},
};

use warpweft_core_types::{Arg, FillRegion, HostFunction, KernelCode, KernelContract, Launch, Param};
use warpweft_graph_runtime::{CompletionError, HostTask, NodeDesc, RunError, RuntimeConfig, Usage};

use crate::rig::{Gate, Outcome, PATIENCE, Rig};

const MANY: RuntimeConfig = RuntimeConfig {
    lanes: 2,
    max_submissions: 64,
    graph_slots: 2,
    workers: 4,
    memory_budget: None,
    trace_events: 64,
};

fn writer(byte: u8) -> HostTask {
    HostTask::fallible(move |context| Ok(context.write(0, 0, &[byte; 16])?))
}

fn settled(rig: &Rig, poisoned: &warpweft_core_types::BufferView) {
    let end = Instant::now() + PATIENCE;
    let sink = rig.memory(0, 16);
    while !matches!(rig.runtime.copy(poisoned, &sink), Err(RunError::Poisoned { .. })) {
        assert!(Instant::now() < end, "never poisoned");
        std::thread::yield_now();
    }
}

#[test]
fn whoever_comes_behind_a_skipped_writer_waits_for_the_one_before_it() -> Outcome {
    let rig = Rig::with(1, MANY);
    let (b, c) = (rig.memory(0, 16), rig.memory(0, 16));
    let (gate, first) = (Gate::default(), Gate::default());
    let mut graph = rig.runtime.graph();
    graph.task(&gate.task(), &[(b.clone(), Usage::ReadWrite)])?;
    graph.task(&writer(1), &[(b.clone(), Usage::ReadWrite)])?;
    let slow = graph.run()?;
    // Nothing fails before the copy is there, which would be refused.
    rig.runtime.task(&first.task(), &[(c.clone(), Usage::ReadWrite)])?;
    let failed = rig.fail(&c, |desc| rig.runtime.run(desc))?;
    let _skipped = rig.copy(&c, &b, |desc| rig.runtime.run(desc))?;
    first.open();
    assert!(failed.wait(PATIENCE).is_err());
    settled(&rig, &b);
    rig.runtime.fill(FillRegion::bytes(&b, 2))?;
    gate.open();
    slow.wait(PATIENCE)?;
    assert_eq!(rig.words(&b), [0x0202_0202; 4]);
    Ok(())
}

#[test]
fn whoever_comes_behind_a_skipped_reader_waits_for_those_in_its_queue() -> Outcome {
    let rig = Rig::with(1, RuntimeConfig { lanes: 1, ..MANY });
    let (b, c, x, y) = (rig.memory(0, 16), rig.memory(0, 16), rig.memory(0, 16), rig.memory(0, 16));
    let (first, second) = (Gate::default(), Gate::default());
    rig.runtime.task(&first.task(), &[(c.clone(), Usage::ReadWrite)])?;
    rig.runtime.task(&second.task(), &[(x.clone(), Usage::ReadWrite)])?;
    let failed = rig.fail(&c, |desc| rig.runtime.run(desc))?;
    let good = rig.copy(&b, &x, |desc| rig.runtime.run(desc))?;
    let uses = [(c.clone(), Usage::Read)];
    let _skipped = rig.copy(&b, &y, |desc| rig.runtime.run(desc.beside(&uses)))?;
    first.open();
    assert!(failed.wait(PATIENCE).is_err());
    settled(&rig, &y);
    rig.runtime.task(&writer(7), &[(b.clone(), Usage::Write)])?;
    // Give the writer the time that it must not use.
    for _ in 0..1000 {
        std::thread::yield_now();
    }
    let probe = rig.runtime.task(&HostTask::new(|_| {}), &[])?;
    probe.wait(PATIENCE)?;
    second.open();
    good.wait(PATIENCE)?;
    assert_eq!(rig.words(&x), [0; 4]);
    assert_eq!(rig.words(&b), [0x0707_0707; 4]);
    Ok(())
}

#[test]
fn unrelated_work_is_taken_though_a_failure_is_not_settled() -> Outcome {
    let rig = Rig::with(1, RuntimeConfig { lanes: 1, ..MANY });
    let gate = Gate::default();
    rig.runtime.task(&gate.task(), &[])?;
    let bad = rig.memory(0, 16);
    let failed = rig.fail(&bad, |desc| rig.runtime.run(desc))?;
    let behind = rig.runtime.task(&HostTask::new(|_| {}), &[(bad.clone(), Usage::Read)])?;
    // Until the lane has failed, most likely; asking would settle it.
    (0..10_000).for_each(|_| std::thread::yield_now());
    let good = rig.memory(0, 16);
    let next = rig.add(&good, 1, |desc| rig.runtime.run(desc))?;
    next.wait(PATIENCE)?;
    assert!(failed.wait(PATIENCE).is_err() && behind.wait(PATIENCE).is_err());
    gate.open();
    Ok(())
}

#[test]
fn submit_by_hears_of_a_guard_that_goes() -> Outcome {
    let rig = Rig::with(1, MANY);
    let gate = Gate::default();
    rig.runtime.task(&gate.task(), &[])?;
    let buffer = rig.memory(0, 16);
    let mut graph = rig.runtime.graph();
    rig.add(&buffer, 1, |desc| graph.add(desc))?;
    let prepared = graph.prepare()?;
    let guard = rig.runtime.write(&buffer, PATIENCE)?;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| prepared.submit_by(Duration::from_secs(10)).map(|_| ()));
        // It has been refused once, and waits or is about to.
        while rig.runtime.statistics().refusals == 0 {
            std::thread::yield_now();
        }
        drop(guard);
        waits.join().expect("it does not panic")
    })?;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    gate.open();
    Ok(())
}

#[test]
fn submit_by_hears_of_any_room() -> Outcome {
    let rig = Rig::with(1, RuntimeConfig { max_submissions: 2, ..MANY });
    let (slow, fast) = (Gate::default(), Gate::default());
    rig.runtime.task(&slow.task(), &[])?;
    rig.runtime.task(&fast.task(), &[])?;
    let buffer = rig.memory(0, 16);
    let mut graph = rig.runtime.graph();
    rig.add(&buffer, 1, |desc| graph.add(desc))?;
    let prepared = graph.prepare()?;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| prepared.submit_by(Duration::from_secs(10)).map(|_| ()));
        // It has been refused once, and waits or is about to.
        while rig.runtime.statistics().refusals == 0 {
            std::thread::yield_now();
        }
        fast.open();
        waits.join().expect("it does not panic")
    })?;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    slow.open();
    Ok(())
}

#[test]
fn submit_by_hears_of_any_slot() -> Outcome {
    let rig = Rig::with(1, MANY);
    let gates = [Gate::default(), Gate::default()];
    let tasks = [gates[0].task(), gates[1].task()];
    let mut graph = rig.runtime.graph();
    let node = graph.task(&tasks[0], &[])?;
    let mut prepared = graph.prepare()?;
    prepared.submit()?;
    prepared.rebind([(node, NodeDesc::task(&tasks[1], &[]))])?;
    prepared.submit()?;
    let began = Instant::now();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| prepared.submit_by(Duration::from_secs(10)).map(|_| ()));
        // Time to be refused in.
        (0..10_000).for_each(|_| std::thread::yield_now());
        gates[1].open();
        waits.join().expect("it does not panic")
    })?;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    gates[0].open();
    Ok(())
}

#[test]
fn a_graph_that_writes_and_then_reads_heals() -> Outcome {
    let rig = Rig::new(1);
    let (bad, copy) = (rig.memory(0, 16), rig.memory(0, 16));
    rig.fail(&bad, |desc| rig.runtime.run(desc))?.wait(PATIENCE).expect_err("it panicked");
    let mut graph = rig.runtime.graph();
    graph.fill(FillRegion::bytes(&bad, 3))?;
    rig.copy(&bad, &copy, |desc| graph.add(desc))?;
    graph.run()?.wait(PATIENCE)?;
    assert_eq!(rig.words(&copy), [0x0303_0303; 4]);
    assert_eq!(rig.words(&bad), [0x0303_0303; 4]);
    Ok(())
}

#[test]
fn a_kernel_in_the_place_of_one_that_adds_atomically_is_ordered() -> Outcome {
    let rig = Rig::new(1);
    let code = KernelCode::new()
        .with_function(
            KernelContract::new("adds", [Param::accumulate(4)]),
            HostFunction::new(|workgroup| {
                workgroup.slice::<u32>(0).fetch_add(0, 1);
            }),
        )
        .with_function(
            KernelContract::new("changes", [Param::read_write(4)]),
            HostFunction::new(|workgroup| {
                let words = workgroup.slice::<u32>(0);
                words.set(0, words.get(0) + 1);
            }),
        );
    let module = rig.devices[0].load(&code)?;
    let (adds, changes) = (module.kernel("adds")?, module.kernel("changes")?);
    let buffer = rig.memory(0, 16);
    let args = [Arg::Buffer(&buffer)];
    let mut graph = rig.runtime.graph();
    let first = graph.launch(Launch::new(&adds, [1, 1, 1], &args)?)?;
    let second = graph.launch(Launch::new(&adds, [1, 1, 1], &args)?)?;
    assert_eq!(graph.predecessors(second), []);
    let mut prepared = graph.prepare()?;
    prepared.rebind([(second, NodeDesc::launch(Launch::new(&changes, [1, 1, 1], &args)?))])?;
    assert_eq!(prepared.graph().predecessors(second), [first]);
    Ok(())
}

#[test]
fn a_task_is_rebound_with_its_usages() -> Outcome {
    let rig = Rig::new(1);
    let buffer = rig.memory(0, 16);
    let task = HostTask::new(|_| {});
    let mut graph = rig.runtime.graph();
    let first = graph.task(&task, &[(buffer.clone(), Usage::Commutative)])?;
    let second = graph.task(&task, &[(buffer.clone(), Usage::Commutative)])?;
    assert_eq!(graph.predecessors(second), []);
    let mut prepared = graph.prepare()?;
    let operands = [(buffer.clone(), Usage::ReadWrite)];
    prepared.rebind([(second, NodeDesc::task(&task, &operands))])?;
    assert_eq!(prepared.graph().predecessors(second), [first]);
    let other = rig.memory(0, 16);
    let operands = [(buffer.clone(), Usage::Read), (other, Usage::Write)];
    prepared.rebind([(second, NodeDesc::task(&task, &operands))])?;
    Ok(())
}

#[test]
fn who_was_not_cancelled_is_not_told_so() -> Outcome {
    let rig = Rig::with(1, MANY);
    let (buffer, gate) = (rig.memory(0, 16), Gate::default());
    let operands = [(buffer.clone(), Usage::ReadWrite)];
    let mut graph = rig.runtime.graph();
    graph.task(&gate.task(), &operands)?;
    graph.task(&HostTask::new(|_| {}), &operands)?;
    let cancelled = graph.run()?;
    let other = rig.add(&buffer, 1, |desc| rig.runtime.run(desc))?;
    cancelled.cancel();
    gate.open();
    assert!(matches!(cancelled.wait(PATIENCE), Err(CompletionError::Cancelled)));
    let error = other.wait(PATIENCE).expect_err("it needs what was skipped");
    assert!(matches!(error, CompletionError::Failed(_)), "{error}");
    Ok(())
}

#[test]
fn a_task_may_own_a_guard() -> Outcome {
    let (told, hears) = mpsc::channel();
    std::thread::spawn(move || {
        let rig = Rig::with(1, MANY);
        let buffer = rig.memory(0, 16);
        let guard = rig.runtime.read(&buffer, PATIENCE).expect("nobody else");
        let task = HostTask::new(move |_| drop(guard.to_vec()));
        let done = rig.runtime.task(&task, &[]).expect("there is room");
        drop(task);
        done.wait(PATIENCE).expect("it ends");
        drop(done);
        let _counts = rig.runtime.statistics();
        rig.runtime.write(&buffer, PATIENCE).expect("the guard went with the task");
        told.send(()).expect("the test waits");
    });
    hears.recv_timeout(Duration::from_secs(5))?;
    Ok(())
}

#[test]
fn bytes_beside_move_with_a_replaced_buffer() -> Outcome {
    let rig = Rig::new(1);
    let (old, new, one) = (rig.memory(0, 16), rig.memory(0, 16), rig.memory(0, 16));
    let mut graph = rig.runtime.graph();
    let first = graph.fill(FillRegion::bytes(&old, 1))?;
    let beside = [(old.clone(), Usage::Read)];
    let second = graph.add(NodeDesc::fill(FillRegion::bytes(&one, 1)).beside(&beside))?;
    let mut prepared = graph.prepare()?;
    prepared.replace(&old, &new)?;
    assert_eq!(prepared.graph().predecessors(second), [first]);
    Ok(())
}

#[test]
fn the_last_handle_may_go_in_a_callback_or_a_task() -> Outcome {
    for way in 0..3 {
        let rig = Rig::with(2, MANY);
        let gate = Gate::default();
        let (told, hears) = mpsc::channel();
        let buffer = rig.memory(1, 16);
        let runtime = rig.runtime.clone();
        let first = rig.runtime.task(&gate.task(), &[(buffer.clone(), Usage::ReadWrite)])?;
        let second = rig.add(&buffer, 1, |desc| rig.runtime.run(desc))?;
        match way {
            0 => second.on_complete(move |outcome| {
                drop(runtime);
                told.send(outcome.is_ok()).expect("waited for");
            }),
            1 => first.on_complete(move |outcome| {
                drop(runtime);
                told.send(outcome.is_ok()).expect("waited for");
            }),
            _ => {
                let slot = std::sync::Mutex::new(Some((runtime, told)));
                let task = HostTask::new(move |_| {
                    if let Some((runtime, told)) = slot.lock().expect("whole").take() {
                        drop(runtime);
                        told.send(true).expect("waited for");
                    }
                });
                rig.runtime.task(&task, &[(buffer.clone(), Usage::ReadWrite)])?;
            }
        }
        drop((first, second, buffer));
        drop(rig);
        gate.open();
        assert!(hears.recv_timeout(PATIENCE)?);
    }
    Ok(())
}

#[test]
fn callbacks_of_failures_submit() -> Outcome {
    let rig = Rig::with(1, MANY);
    let buffer = rig.memory(0, 16);
    let (told, hears) = mpsc::channel();
    for _ in 0..20 {
        let (runtime, told, view) = (rig.runtime.clone(), told.clone(), buffer.clone());
        let bad = rig.memory(0, 16);
        rig.fail(&bad, |desc| rig.runtime.run(desc))?.on_complete(move |outcome| {
            assert!(outcome.is_err());
            let next = runtime.fill(FillRegion::bytes(&view, 9)).expect("there is room");
            next.on_complete(move |outcome| told.send(outcome.is_ok()).expect("waited for"));
        });
    }
    for _ in 0..20 {
        assert!(hears.recv_timeout(PATIENCE)?);
    }
    Ok(())
}

#[test]
fn a_graph_may_alternate_devices_many_thousand_times() -> Outcome {
    let rig = Rig::with(2, RuntimeConfig { lanes: 1, ..MANY });
    let (one, other, gate) = (rig.memory(0, 4), rig.memory(1, 4), Gate::default());
    let mut graph = rig.runtime.graph();
    graph.task(&gate.task(), &[(one.clone(), Usage::ReadWrite)])?;
    for _ in 0..17_000 {
        graph.fill(FillRegion::bytes(&one, 1))?;
        let uses = [(one.clone(), Usage::Read)];
        graph.add(NodeDesc::fill(FillRegion::bytes(&other, 1)).beside(&uses))?;
    }
    let done = graph.run()?;
    gate.open();
    done.wait(PATIENCE)?;
    Ok(())
}

#[test]
fn many_threads_share_room_for_one_submission() -> Outcome {
    let rig = Rig::with(2, RuntimeConfig { max_submissions: 1, lanes: 1, ..MANY });
    let buffer = rig.memory(0, 16);
    let mut graph = rig.runtime.graph();
    rig.add(&buffer, 1, |desc| graph.add(desc))?;
    let prepared = graph.prepare()?;
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    prepared.submit_by(PATIENCE).expect("there will be room");
                }
            });
        }
    });
    assert_eq!(rig.words(&buffer), [400; 4]);
    Ok(())
}

#[test]
fn a_device_may_die_of_a_submission_while_a_callback_waits() -> Outcome {
    let (told, hears) = mpsc::channel();
    std::thread::spawn(move || {
        use warpweft_core_types::Backend as _;
        let inner = std::sync::Arc::new(warpweft_host::HostBackend::with_devices(1).expect("it can be made"));
        let config = warpweft_wrappers::FaultConfig { dies_at_step: Some(4), ..Default::default() };
        let backend = warpweft_wrappers::FaultyBackend::new(inner, config);
        let device = backend.open(0, warpweft_core_types::Features::empty()).expect("it opens");
        // Loading is its first step, the memory the second.
        let rig = Rig::of(vec![device], MANY);
        let (buffer, gate) = (rig.memory(0, 16), Gate::default());
        rig.runtime.task(&gate.task(), &[(buffer.clone(), Usage::ReadWrite)]).expect("there is room");
        let (called, calls) = mpsc::channel();
        for _ in 0..8 {
            let Ok(waits) = rig.runtime.fill(FillRegion::bytes(&buffer, 1)) else { break };
            let called = called.clone();
            waits.on_complete(move |outcome| called.send(outcome.is_err()).expect("waited for"));
        }
        gate.open();
        assert!(calls.recv_timeout(PATIENCE).expect("the device died"));
        told.send(()).expect("the test waits");
    });
    hears.recv_timeout(Duration::from_secs(8))?;
    Ok(())
}

#[test]
fn a_slot_whose_submission_failed_is_free() -> Outcome {
    let rig = Rig::with(1, RuntimeConfig { graph_slots: 1, ..MANY });
    let bad = rig.memory(0, 16);
    let mut graph = rig.runtime.graph();
    rig.fail(&bad, |desc| graph.add(desc))?;
    let prepared = std::sync::Arc::new(graph.prepare()?);
    drop(prepared.submit()?);
    let (told, hears) = mpsc::channel();
    std::thread::spawn(move || {
        told.send(prepared.submit_by(Duration::from_secs(5)).is_ok()).expect("waited for")
    });
    assert!(hears.recv_timeout(Duration::from_secs(8))?);
    Ok(())
}

#[test]
fn a_graph_that_writes_one_of_two_poisoned_parts_is_refused() -> Outcome {
    let rig = Rig::new(1);
    let (bad, copy) = (rig.memory(0, 32), rig.memory(0, 32));
    for part in [bad.slice(0..16)?, bad.slice(16..32)?] {
        rig.fail(&part, |desc| rig.runtime.run(desc))?.wait(PATIENCE).expect_err("it panicked");
    }
    let mut graph = rig.runtime.graph();
    graph.fill(FillRegion::bytes(&bad.slice(0..16)?, 3))?;
    graph.copy(&bad, &copy)?;
    let refused = graph.run().expect_err("the second part is as it was");
    assert!(matches!(&refused, RunError::Poisoned { poison } if poison.range == (16..32)), "{refused}");
    Ok(())
}
