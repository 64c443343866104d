//! Faults, memory that runs out, and what is left afterwards.

use std::time::Instant;

use warpweft_core_types::{
    AllocError, Arg, Backend, BufferDesc, ErrorClass, Failure, Features, Launch, LoadError, Op, OpenError,
    QueueDesc, SubmitError, WaitError,
};
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Lane, Outcome, PATIENCE, backend, blocking, failing, kernel, number};

#[test]
fn a_fault_loses_the_device_for_everything_that_comes_later() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let mut lane = Lane::open(&backend, 0)?;
    let (memory, failing) = (lane.memory(BufferDesc::device(64))?, kernel(&lane.device, &failing())?);
    let args = [Arg::Buffer(&memory)];
    let launch = [Op::Launch(Launch::new(&failing, [1; 3], &args)?)];
    let (failed, behind) = (lane.submit(&launch)?, lane.submit(&[]));
    let lost = |error: &WaitError| {
        matches!(error, WaitError::Failed(failure)
            if matches!(&**failure, Failure::DeviceLost { reason, .. } if reason.contains("719")))
    };
    let error = failed.wait(PATIENCE).unwrap_err();
    assert!(lost(&error), "{error}");
    // It may have been refused already.
    if let Ok(behind) = behind {
        assert!(lost(&behind.wait(PATIENCE).unwrap_err()));
    }
    let device = &lane.device;
    assert!(matches!(device.failure().as_deref(), Some(Failure::DeviceLost { .. })));
    assert!(matches!(lane.queue.failure().as_deref(), Some(Failure::DeviceLost { .. })));
    assert!(matches!(device.memory(), Err(AllocError::Failed(_))));
    assert!(matches!(device.allocate(&BufferDesc::device(1)), Err(AllocError::Failed(_))));
    assert!(matches!(device.load(&number()), Err(LoadError::Failed(_))));
    assert!(matches!(device.create_queue(&QueueDesc::default()), Err(OpenError::Failed(_))));
    assert!(matches!(device.create_semaphore(0), Err(OpenError::Failed(_))));
    let error = lane.submit(&[]).unwrap_err();
    let refused = error.downcast_ref::<SubmitError>().ok_or("another error")?;
    assert!(matches!(refused, SubmitError::Failed(_)) && refused.class() == ErrorClass::DeviceLost);
    Ok(())
}

#[test]
fn a_fault_of_one_device_is_noticed_on_the_other() -> Outcome {
    let backend = backend(&StandIn::load()?);
    let (mut lane, mut other) = (Lane::open(&backend, 0)?, Lane::open(&backend, 1)?);
    let (memory, failing) = (lane.memory(BufferDesc::device(64))?, kernel(&lane.device, &failing())?);
    let args = [Arg::Buffer(&memory)];
    lane.submit(&[Op::Launch(Launch::new(&failing, [1; 3], &args)?)])?.wait(PATIENCE).unwrap_err();
    assert!(other.count_to_four().is_err());
    assert!(other.device.failure().is_some());
    Ok(())
}

#[test]
fn what_waits_behind_a_kernel_is_failed_by_the_fault_of_another() -> Outcome {
    let backend = backend(&StandIn::load()?);
    let mut lanes = [Lane::open(&backend, 0)?, Lane::open(&backend, 0)?];
    let window = lanes[0].memory(BufferDesc::host_visible(4))?;
    let (stuck, failing) = (kernel(&lanes[0].device, &blocking())?, kernel(&lanes[0].device, &failing())?);
    let args = [Arg::Buffer(&window)];
    let waits = lanes[0].submit(&[Op::Launch(Launch::new(&stuck, [1; 3], &args)?)])?;
    let (memory, started) = (lanes[1].memory(BufferDesc::device(4))?, Instant::now());
    let args = [Arg::Buffer(&memory)];
    lanes[1].submit(&[Op::Launch(Launch::new(&failing, [1; 3], &args)?)])?;
    assert!(matches!(waits.wait(PATIENCE), Err(WaitError::Failed(_))));
    assert!(started.elapsed() < PATIENCE / 2);
    Ok(())
}

#[test]
fn memory_that_runs_out_comes_back() -> Outcome {
    let stand_in = StandIn::load()?.with("memory", "16777216");
    let backend = backend(&stand_in);
    let device = backend.open(0, Features::empty())?;
    let held: Vec<_> =
        (0..3).map(|_| device.allocate(&BufferDesc::device(4 << 20))).collect::<Result<_, _>>()?;
    let error = device.allocate(&BufferDesc::device(8 << 20)).unwrap_err();
    let named = matches!(&error, AllocError::OutOfMemory { available, requested, .. }
        if available.0 == 4 << 20 && requested.0 == 8 << 20);
    assert!(named && error.class() == ErrorClass::Exhausted, "{error}");
    drop(held);
    // It is given back in a stream.
    let started = Instant::now();
    while device.allocate(&BufferDesc::device(16 << 20)).is_err() {
        assert!(started.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    Ok(())
}

#[test]
fn nothing_is_left_when_everything_is_dropped() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    for ordinal in [0, 1, 0] {
        Lane::open(&backend, ordinal)?.count_to_four()?;
    }
    drop(backend);
    // Code is unloaded by a thread of the device's own, which holds the context until then.
    let started = Instant::now();
    let left = |kind: &str| stand_in.live(kind);
    while ["contexts", "streams", "events", "modules", "pools", "ranges"].iter().any(|kind| left(kind) > 0) {
        let kinds = ["contexts", "streams", "events", "modules", "pools", "ranges"];
        assert!(started.elapsed() < PATIENCE, "{:?}", kinds.map(|kind| (kind, left(kind))));
        std::thread::yield_now();
    }
    Ok(())
}
