//! Devices in contexts that other libraries made.

use std::sync::Arc;

use warpweft_core_types::{
    Arg, BufferDesc, CopyRegion, Features, FillRegion, GraphNode, Launch, Op, OpenError, PreparedGraph,
    SubmitError,
};
use warpweft_stand_in_cuda::StandIn;

use crate::{
    other::{Other, context, lane, stream},
    support::{Lane, Outcome, PATIENCE, backend, kernel, number},
};

const CONTEXT: &str = "CUcontext";

#[test]
fn a_device_works_in_a_context_of_another_library() -> Outcome {
    let stand_in = StandIn::load()?;
    let (backend, other) = (backend(&stand_in), Other::of(&stand_in));
    let raw = other.create_context(1);
    let owner = Arc::new(());
    let watch = Arc::downgrade(&owner);
    let device = backend.open_context(context(CONTEXT, raw, owner), Features::empty())?;
    let handle = device.interop().ok_or("the family is absent")?.device_handle();
    assert_eq!((handle.kind, handle.value, device.info().id.ordinal), (CONTEXT, raw, 1));
    lane(&device)?.count_to_four()?;
    // Streams of that context are its own.
    let theirs = stream("CUstream", other.create_stream(raw), Arc::new(()));
    device.interop().ok_or("the family is absent")?.import_queue(theirs, &Default::default())?;
    drop((device, backend));
    let started = std::time::Instant::now();
    while watch.upgrade().is_some() {
        assert!(started.elapsed() < PATIENCE, "the owner is let go with the device");
        std::thread::yield_now();
    }
    // It was not destroyed.
    other.create_stream(raw);
    other.destroy_context(raw).map_err(|code| code.to_string())?;
    Ok(())
}

/// What is of one context is refused in the queues of the other, though the GPU is the same.
#[test]
fn two_contexts_of_a_gpu_keep_apart() -> Outcome {
    let stand_in = StandIn::load()?;
    let (backend, other) = (backend(&stand_in), Other::of(&stand_in));
    let mut own = Lane::open(&backend, 0)?;
    let theirs = context(CONTEXT, other.create_context(0), Arc::new(()));
    let mut theirs = lane(&backend.open_context(theirs, Features::empty())?)?;
    own.count_to_four()?;
    theirs.count_to_four()?;
    for turn in 0..2 {
        let (here, there) = if turn == 0 { (&mut own, &theirs) } else { (&mut theirs, &own) };
        let memory = there.memory(BufferDesc::device(64))?;
        let refused = |outcome: Outcome<_>, what: &str| {
            let error = outcome.map(|_| ()).unwrap_err();
            let error = error.downcast_ref::<SubmitError>().unwrap();
            assert!(matches!(error, SubmitError::Foreign { what: named, .. } if *named == what), "{error}");
        };
        refused(here.submit(&[Op::Fill(FillRegion::bytes(&memory, 1))]), "buffer");
        let mine = here.memory(BufferDesc::device(64))?;
        refused(here.submit(&[Op::Copy(CopyRegion::new(&memory, &mine)?)]), "buffer");
        let (foreign, base) = (kernel(&there.device, &number())?, 1_u32.to_le_bytes());
        let args = [Arg::Buffer(&mine), Arg::Scalar(&base)];
        refused(here.submit(&[Op::Launch(Launch::new(&foreign, [1; 3], &args)?)]), "kernel");
        let fill = Op::Fill(FillRegion::bytes(&memory, 1));
        let graph = PreparedGraph::new(there.device.as_ref(), &[GraphNode::new(&fill, &[])])?;
        refused(here.submit(&[Op::Replay(&graph)]), "graph");
        assert!(PreparedGraph::new(here.device.as_ref(), &[GraphNode::new(&fill, &[])]).is_err());
        // Host memory is everybody's.
        let window = there.memory(BufferDesc::host_visible(64))?;
        here.submit(&[Op::Copy(CopyRegion::new(&window, &mine)?)])?.wait(PATIENCE)?;
    }
    Ok(())
}

#[test]
fn what_is_no_context_is_refused() -> Outcome {
    let stand_in = StandIn::load()?;
    let (backend, other) = (backend(&stand_in), Other::of(&stand_in));
    let raw = other.create_context(0);
    for (kind, value) in [("CUstream", raw), (CONTEXT, 0), (CONTEXT, 0x7777_0000)] {
        let error = backend.open_context(context(kind, value, Arc::new(())), Features::empty()).unwrap_err();
        assert!(matches!(error, OpenError::InvalidConfig { .. }), "{error}");
    }
    let sound = context(CONTEXT, raw, Arc::new(()));
    let error = backend.open_context(sound, Features::all()).err();
    assert!(matches!(error, Some(OpenError::Unsupported { .. }) | None), "{error:?}");
    other.destroy_context(raw).map_err(|code| code.to_string())?;
    let gone = backend.open_context(context(CONTEXT, raw, Arc::new(())), Features::empty());
    assert!(matches!(gone, Err(OpenError::InvalidConfig { .. })));
    Ok(())
}
