//! Handles in and out. What other libraries do with them is in the suites of the backends.

use std::sync::Arc;

use libtest_mimic::Failed;
use warpweft_core_types::{
    Access, BufferView, CopyRegion, Features, FillRegion, GraphNode, Interop, InteropError, NativeHandle,
    NativeMemory, NativeQueue, Op, PreparedGraph, QueueDesc, SemaphorePoint, Submission,
};

use crate::{
    context::{Context, PATIENCE, gate, refusal},
    harness::{Case, Verdict},
};

const NEEDS: Features = Features::INTEROP.union(Features::HOST_VISIBLE_MEMORY);

pub(super) const CASES: &[Case] =
    &[
        Case::new("interop::a_queue_comes_back_as_itself", a_queue_comes_back_as_itself).needs(NEEDS).covers(
            &["Device::interop", "Interop::device_handle", "Interop::queue_handle", "Interop::import_queue"],
        ),
        Case::new("interop::memory_comes_back_as_itself", memory_comes_back_as_itself)
            .needs(NEEDS)
            .covers(&["Interop::buffer_handle", "Interop::import_buffer", "Buffer::unified_address"]),
        Case::new("interop::wrong_handles_are_refused", wrong_handles_are_refused).needs(NEEDS),
        Case::new("interop::owners_live_as_long_as_work", owners_live_as_long_as_work).needs(NEEDS),
        Case::new("interop::captured_work_is_a_node", captured_work_is_a_node)
            .needs(NEEDS.union(Features::GRAPHS))
            .covers(&["Interop::capture", "CapturedWork::device", "CapturedWork::accesses"]),
    ];

fn family(cx: &Context) -> Result<&dyn Interop, Failed> {
    Ok(cx.device(0).interop().ok_or("the family is absent")?)
}

#[expect(unsafe_code, reason = "hands the device's own queue back to it")]
pub(super) fn again(handle: NativeHandle, owner: Arc<dyn std::any::Any + Send + Sync>) -> NativeQueue {
    // SAFETY: the handle is one that the device gave out for a queue, which `owner` holds.
    unsafe { NativeQueue::new(handle, owner) }
}

#[expect(unsafe_code, reason = "hands the device's own memory back to it")]
fn memory(handle: NativeHandle, size: u64, owner: Arc<dyn std::any::Any + Send + Sync>) -> NativeMemory {
    // SAFETY: the address is one that the device gave out for a buffer of this size, which `owner` holds.
    unsafe { NativeMemory::new(handle.value, size, owner) }
}

fn a_queue_comes_back_as_itself(cx: &Context) -> Verdict {
    let (family, lane) = (family(cx)?, cx.lane(0)?);
    assert_ne!(family.device_handle().value, 0);
    let handle = family.queue_handle(lane.queue.as_ref())?;
    let import =
        family.import_queue(again(handle, Arc::new(Arc::clone(&lane.queue))), &QueueDesc::default())?;
    assert_eq!(family.queue_handle(import.as_ref())?, handle);
    // Both are one line of work: a copy sees what was enqueued just before it by the other handle.
    let (a, b) = (cx.memory(0, 1 << 16)?, cx.memory(0, 1 << 16)?);
    for round in 1..=50_u8 {
        lane.queue.submit(&Submission {
            ops: &[Op::Fill(FillRegion::bytes(&a, round))],
            ..Submission::default()
        })?;
        import.submit(&Submission { ops: &[Op::Copy(CopyRegion::new(&a, &b)?)], ..Submission::default() })?;
        lane.run(&[])?;
        assert!(cx.download(0, &b)?.iter().all(|&byte| byte == round), "round {round}");
    }
    Ok(())
}

fn memory_comes_back_as_itself(cx: &Context) -> Verdict {
    let (family, own) = (family(cx)?, cx.upload(0, &[3; 4096])?);
    let handle = family.buffer_handle(own.buffer().as_ref())?;
    let import = family.import_buffer(memory(handle, own.size(), Arc::new(own.clone())))?;
    assert_eq!((import.size(), import.device()), (4096, cx.infos[0].id));
    let import = BufferView::whole(import);
    assert_eq!((import.overlap(&own), cx.download(0, &import)?), (4096, vec![3; 4096]));
    cx.lane(0)?.run(&[Op::Fill(FillRegion::bytes(&import.slice(1..4095)?, 4))])?;
    let bytes = cx.download(0, &own)?;
    assert_eq!((bytes[0], bytes[1], bytes[4094], bytes[4095]), (3, 4, 4, 3));
    Ok(())
}

fn wrong_handles_are_refused(cx: &Context) -> Verdict {
    let family = family(cx)?;
    let none: Arc<()> = Arc::new(());
    let other = NativeHandle { kind: "VkQueue", value: 1 };
    let error = refusal(family.import_queue(again(other, none.clone()), &QueueDesc::default()))?;
    assert!(matches!(error, InteropError::Refused { .. }), "{error}");
    for (value, size) in [(0, 4096), (4096, 0)] {
        let handle = NativeHandle { kind: "address", value };
        let error = refusal(family.import_buffer(memory(handle, size, none.clone())))?;
        assert!(matches!(error, InteropError::Refused { .. }), "{error}");
    }
    Ok(())
}

fn owners_live_as_long_as_work(cx: &Context) -> Verdict {
    let (family, lane, gate) = (family(cx)?, cx.lane(0)?, gate(cx.device(0))?);
    let backing = cx.memory(0, 4096)?;
    let handle = family.buffer_handle(backing.buffer().as_ref())?;
    let owner = Arc::new(backing);
    let watch = Arc::downgrade(&owner);
    let import = BufferView::whole(family.import_buffer(memory(handle, 4096, owner))?);
    let (_, point) = lane.submit(std::slice::from_ref(&gate), &[Op::Fill(FillRegion::bytes(&import, 1))])?;
    drop(import);
    assert!(watch.upgrade().is_some(), "work that was submitted keeps the owner");
    gate.semaphore.signal(gate.value)?;
    point.wait(PATIENCE)?;
    lane.run(&[])?;
    let deadline = std::time::Instant::now() + PATIENCE;
    while watch.upgrade().is_some() {
        assert!(std::time::Instant::now() < deadline, "an owner is let go once its work is over");
        std::thread::yield_now();
    }
    Ok(())
}

/// Nothing of another library is at hand here, so the captured work is empty; that it is a node is what counts.
fn captured_work_is_a_node(cx: &Context) -> Verdict {
    let (family, target) = (family(cx)?, cx.memory(0, 64)?);
    let accesses = vec![(target.clone(), Access::Write)];
    let mut seen = None;
    let owner = Arc::new(());
    let watch = Arc::downgrade(&owner);
    let captured = family.capture(accesses, owner, &mut |stream| {
        seen = Some(stream);
        Ok(())
    })?;
    assert!(seen.is_some_and(|stream| stream.value != 0));
    assert_eq!((captured.device(), captured.accesses().len()), (cx.infos[0].id, 1));
    let fill = Op::Fill(FillRegion::bytes(&target, 9));
    let nodes = [GraphNode::new(captured, &[]), GraphNode::new(&fill, &[0])];
    let graph = PreparedGraph::new(cx.device(0).as_ref(), &nodes)?;
    drop(nodes);
    let (lane, done) = (cx.lane(0)?, SemaphorePoint::new(&cx.device(0).create_semaphore(0)?, 1));
    let signals = std::slice::from_ref(&done);
    lane.queue.submit(&Submission { ops: &[Op::Replay(&graph)], signals, ..Submission::default() })?;
    done.wait(PATIENCE)?;
    assert_eq!(cx.download(0, &target)?, [9; 64]);
    assert!(watch.upgrade().is_some(), "a graph keeps what its captured work needs");
    drop(graph);
    lane.run(&[])?;
    let deadline = std::time::Instant::now() + PATIENCE;
    while watch.upgrade().is_some() {
        assert!(std::time::Instant::now() < deadline, "and lets it go");
        std::thread::yield_now();
    }
    let none = Arc::new(());
    let error = refusal(family.capture(Vec::new(), none, &mut |_| Err("changed my mind".into())))?;
    assert!(matches!(&error, InteropError::Capture { reason, .. } if reason.contains("changed")), "{error}");
    Ok(())
}
