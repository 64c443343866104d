//! Streams, memory and work of another library.

use std::sync::Arc;

use warpweft_core_types::{
    Access, BufferDesc, BufferView, CopyRegion, FillRegion, GraphNode, Interop, InteropError, Op,
    PreparedGraph, QueueDesc, SemaphorePoint, Submission, SubmitError,
};
use warpweft_stand_in_cuda::StandIn;

use crate::{
    other::{Other, memory, stream},
    support::{Lane, Outcome, PATIENCE, backend, number},
};

const STREAM: &str = "CUstream";

/// A device and another library in its context.
struct Rig {
    lane: Lane,
    other: Other,
    context: u64,
}

impl Rig {
    fn new(stand_in: &StandIn) -> Outcome<Self> {
        let lane = Lane::open(&backend(stand_in), 0)?;
        let context = lane.device.interop().ok_or("the family is absent")?.device_handle().value;
        Ok(Self { lane, other: Other::of(stand_in), context })
    }

    fn family(&self) -> &dyn Interop {
        self.lane.device.interop().unwrap()
    }

    /// Why a stream is refused.
    fn refuses_stream(&self, value: u64) -> String {
        let import = self.family().import_queue(stream(STREAM, value, Arc::new(())), &QueueDesc::default());
        refusal(import.map(|_| ()))
    }

    fn refuses_memory(&self, address: u64, size: u64) -> String {
        refusal(self.family().import_buffer(memory(address, size, Arc::new(()))).map(|_| ()))
    }

    fn read(&mut self, view: &BufferView) -> Outcome<Vec<u8>> {
        let window = self.lane.memory(BufferDesc::host_visible(view.size()))?;
        self.lane.submit(&[Op::Copy(CopyRegion::new(view, &window)?)])?.wait(PATIENCE)?;
        let mut bytes = vec![0; usize::try_from(view.size())?];
        window.read(&mut bytes)?;
        Ok(bytes)
    }
}

fn refusal(result: Result<(), InteropError>) -> String {
    match result.unwrap_err() {
        InteropError::Refused { reason, .. } => reason,
        error => panic!("{error}"),
    }
}

#[test]
fn a_stream_of_another_library_keeps_the_order_of_both() -> Outcome {
    let mut rig = Rig::new(&StandIn::load()?)?;
    // The legacy default stream goes by 0, which is none of its names, and 1.
    for value in [rig.other.create_stream(rig.context), 0, 1] {
        let owner = Arc::new(());
        let watch = Arc::downgrade(&owner);
        let queue = rig.family().import_queue(stream(STREAM, value, owner), &QueueDesc::default())?;
        let (ours, copy) =
            (rig.lane.memory(BufferDesc::device(4096))?, rig.lane.memory(BufferDesc::device(4096))?);
        let address = rig.family().buffer_handle(ours.buffer().as_ref())?.value;
        let done = SemaphorePoint::new(&rig.lane.device.create_semaphore(0)?, 20);
        for round in 1..=20_u8 {
            rig.other.fill(rig.context, value, address, round, 4096).map_err(|code| code.to_string())?;
            let point = SemaphorePoint::new(&done.semaphore, round.into());
            let ops = [Op::Copy(CopyRegion::new(&ours, &copy)?)];
            queue.submit(&Submission {
                ops: &ops,
                signals: std::slice::from_ref(&point),
                ..Submission::default()
            })?;
            point.wait(PATIENCE)?;
            assert_eq!(rig.read(&copy)?, vec![round; 4096]);
        }
        drop(queue);
        // It is the other library's, and still works.
        rig.other.synchronise(rig.context, value).map_err(|code| code.to_string())?;
        let started = std::time::Instant::now();
        while watch.upgrade().is_some() {
            assert!(started.elapsed() < PATIENCE, "the owner is let go with the queue");
            std::thread::yield_now();
        }
    }
    Ok(())
}

#[test]
fn streams_that_cannot_be_queues_are_refused_with_the_reason() -> Outcome {
    let rig = Rig::new(&StandIn::load()?)?;
    assert!(rig.refuses_stream(2).contains("each thread"));
    let elsewhere = rig.other.create_stream(rig.other.create_context(0));
    assert!(rig.refuses_stream(elsewhere).contains("another context"));
    let captured = rig.other.create_stream(rig.context);
    rig.other.begin_capture(rig.context, captured).map_err(|code| code.to_string())?;
    assert!(rig.refuses_stream(captured).contains("captured"));
    assert!(rig.refuses_stream(0x7777_0000).contains("INVALID_HANDLE"));
    let other = stream("CUcontext", captured, Arc::new(()));
    assert!(refusal(rig.family().import_queue(other, &QueueDesc::default()).map(|_| ())).contains("no CUDA"));
    Ok(())
}

#[test]
fn memory_of_another_library_is_a_buffer() -> Outcome {
    let mut rig = Rig::new(&StandIn::load()?)?;
    let address = rig.other.allocate(rig.context, 0, 8192);
    let import = BufferView::whole(rig.family().import_buffer(memory(address + 4096, 4096, Arc::new(())))?);
    rig.other.fill(rig.context, 0, address, 3, 8192).map_err(|code| code.to_string())?;
    rig.other.synchronise(rig.context, 0).map_err(|code| code.to_string())?;
    assert_eq!(rig.read(&import)?, vec![3; 4096]);
    let half = import.slice(0..2048)?;
    rig.lane.submit(&[Op::Fill(FillRegion::bytes(&half, 4))])?.wait(PATIENCE)?;
    assert_eq!(rig.read(&import)?, [[4; 2048], [3; 2048]].concat());
    // Dropping the import leaves the memory where it is.
    drop((half, import));
    rig.other.fill(rig.context, 0, address, 5, 8192).map_err(|code| code.to_string())?;
    Ok(())
}

#[test]
fn memory_that_cannot_be_a_buffer_is_refused_with_the_reason() -> Outcome {
    let stand_in = StandIn::load()?;
    let rig = Rig::new(&stand_in)?;
    let host = rig.other.allocate_host(rig.context, 4096);
    assert!(rig.refuses_memory(host, 4096).contains("not device memory"));
    let word = 0_u64;
    assert!(rig.refuses_memory(std::ptr::from_ref(&word).addr() as u64, 8).contains("does not know"));
    let address = rig.other.allocate(rig.context, 0, 4096);
    assert!(rig.refuses_memory(address, 4097).contains("4097 bytes are more than the 4096"));
    assert!(rig.refuses_memory(address + 3840, 257).contains("257 bytes are more than the 256"));
    for at in [1, 4, 128, 255] {
        let reason = rig.refuses_memory(address + at, 64);
        assert!(reason.contains("256 bytes") && reason.contains("as a whole"), "{reason}");
    }
    let elsewhere = rig.other.allocate(rig.context, 1, 4096);
    assert!(rig.refuses_memory(elsewhere, 4096).contains("device 1"));
    Ok(())
}

/// Work that a library enqueues is kept and not done, and then is done with every replay.
#[test]
fn captured_work_runs_when_it_is_replayed() -> Outcome {
    let mut rig = Rig::new(&StandIn::load()?)?;
    let (source, target) =
        (rig.lane.memory(BufferDesc::device(64))?, rig.lane.memory(BufferDesc::device(64))?);
    let address = rig.family().buffer_handle(source.buffer().as_ref())?.value;
    let accesses = vec![(source.clone(), Access::Write)];
    let captured = rig.family().capture(accesses, Arc::new(()), &mut |stream| {
        for (part, byte) in [(0, 1), (16, 2), (0, 3)] {
            rig.other
                .fill(rig.context, stream.value, address + part, byte, 16)
                .map_err(|code| code.to_string())?;
        }
        Ok(())
    })?;
    assert_eq!(rig.read(&source)?, [0; 64], "nothing ran");
    let copy = Op::Copy(CopyRegion::new(&source, &target)?);
    let nodes = [GraphNode::new(captured, &[]), GraphNode::new(&copy, &[0])];
    let graph = PreparedGraph::new(rig.lane.device.as_ref(), &nodes)?;
    for _ in 0..3 {
        rig.lane.submit(&[Op::Fill(FillRegion::bytes(&source, 9)), Op::Replay(&graph)])?.wait(PATIENCE)?;
        assert_eq!(rig.read(&target)?, [[3; 16], [2; 16], [9; 16], [9; 16]].concat());
    }
    Ok(())
}

#[test]
fn a_capture_that_was_broken_says_so_and_the_next_one_works() -> Outcome {
    let rig = Rig::new(&StandIn::load()?)?;
    // Loading code may wait for the device, which is not allowed to others meanwhile.
    let broken = rig.family().capture(Vec::new(), Arc::new(()), &mut |_| {
        assert!(rig.other.load_and_unload(rig.context, c".version 8.0").is_err());
        Ok(())
    });
    assert!(
        matches!(&broken, Err(InteropError::Capture { reason, .. }) if reason.contains("901")),
        "{broken:?}"
    );
    rig.family().capture(Vec::new(), Arc::new(()), &mut |_| Ok(()))?;
    rig.lane.device.load(&number())?;
    Ok(())
}

/// Whoever records may panic, or say no: the thread is out of the capture, and nothing is left of it.
#[test]
fn a_capture_ends_however_its_recording_does() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut rig = Rig::new(&stand_in)?;
    let (streams, graphs) = (stand_in.live("streams"), stand_in.live("graphs"));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        rig.family().capture(Vec::new(), Arc::new(()), &mut |_| panic!("a recorder that panics")).map(drop)
    }));
    assert!(panicked.is_err());
    // Loading code is not allowed during a capture.
    rig.lane.count_to_four()?;
    let refused = rig.family().capture(Vec::new(), Arc::new(()), &mut |_| Err("no".into()));
    assert!(matches!(&refused, Err(InteropError::Capture { reason, .. }) if reason.contains("no")));
    rig.lane.count_to_four()?;
    // It ends the capture itself.
    let ended = rig.family().capture(Vec::new(), Arc::new(()), &mut |stream| {
        rig.other.end_capture(rig.context, stream.value).map_err(|code| code.to_string())?;
        Ok(())
    });
    assert!(ended.is_err());
    rig.lane.count_to_four()?;
    assert_eq!(stand_in.live("streams"), streams);
    // The graph that the recorder took out is its own.
    assert_eq!(stand_in.live("graphs"), graphs + 1);
    Ok(())
}

#[test]
fn a_graph_keeps_what_its_captured_work_needs() -> Outcome {
    let mut rig = Rig::new(&StandIn::load()?)?;
    let (owner, target) = (Arc::new(()), rig.lane.memory(BufferDesc::device(64))?);
    let watch = Arc::downgrade(&owner);
    let captured = rig.family().capture(Vec::new(), owner, &mut |_| Ok(()))?;
    let fill = Op::Fill(FillRegion::bytes(&target, 1));
    let graph = PreparedGraph::new(
        rig.lane.device.as_ref(),
        &[GraphNode::new(captured, &[]), GraphNode::new(&fill, &[0])],
    )?;
    let copy = graph.clone();
    drop(graph);
    assert!(watch.upgrade().is_some());
    rig.lane.submit(&[Op::Replay(&copy)])?.wait(PATIENCE)?;
    drop(copy);
    let started = std::time::Instant::now();
    while watch.upgrade().is_some() {
        assert!(started.elapsed() < PATIENCE, "the owner is let go with the last graph");
        std::thread::yield_now();
    }
    Ok(())
}

/// Plain memory follows the peer access of contexts; a pool is its owner's to open, and nothing tells whether that was
/// done.
#[test]
fn memory_of_another_library_is_used_by_peers_if_they_reach_it() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let (mut near, mut far) = (Lane::open(&backend, 0)?, Lane::open(&backend, 1)?);
    let other = Other::of(&stand_in);
    let device = Arc::clone(&far.device);
    let family = device.interop().ok_or("the family is absent")?;
    let context = family.device_handle().value;
    let import = |address| family.import_buffer(memory(address, 4096, Arc::new(()))).map(BufferView::whole);
    let plain = import(other.allocate_plain(context, 4096))?;
    let pooled = import(other.allocate(context, 1, 4096))?;
    let window = near.memory(BufferDesc::host_visible(4096))?;
    for view in [&plain, &pooled] {
        far.submit(&[Op::Fill(FillRegion::bytes(view, 7))])?.wait(PATIENCE)?;
    }
    near.submit(&[Op::Copy(CopyRegion::new(&plain, &window)?)])?.wait(PATIENCE)?;
    let mut bytes = vec![0; 4096];
    window.read(&mut bytes)?;
    assert_eq!(bytes, [7; 4096]);
    let error = near.submit(&[Op::Copy(CopyRegion::new(&pooled, &window)?)]).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(SubmitError::Foreign { what: "buffer", .. })), "{error}");
    assert!(near.device.failure().is_none());
    Ok(())
}
