//! Signals that come late: how many events there are, and who makes them come.

use std::{sync::Arc, task::Waker};

use warpweft_core_types::{BufferDesc, FillRegion, Op, QueueDesc, SemaphorePoint, Submission};
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Lane, Outcome, PATIENCE, backend, until};

/// Fills that gather, and the calls for events that they took.
fn gather(stand_in: &StandIn, lane: &mut Lane, count: usize) -> Outcome<(Vec<SemaphorePoint>, u64)> {
    let memory = lane.memory(BufferDesc::device(64))?;
    let before = stand_in.calls("cuEventRecord");
    let fill = [Op::Fill(FillRegion::bytes(&memory, 1))];
    let points = (0..count).map(|_| lane.submit_late(&fill)).collect::<Outcome<_>>()?;
    Ok((points, stand_in.calls("cuEventRecord") - before))
}

#[test]
fn one_event_is_behind_all_that_gathered() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let before = stand_in.calls("cuEventRecord");
    let (points, _) = gather(&stand_in, &mut lane, 20)?;
    points[4].wait(PATIENCE)?;
    for point in &points {
        point.wait(PATIENCE)?;
    }
    let events = stand_in.calls("cuEventRecord") - before;
    // One, and one more where the thread was away for so long that the reactor took it that nobody would ask.
    assert!((1..=2).contains(&events), "{events} events");
    Ok(())
}

#[test]
fn signals_that_nobody_asks_for_come_by_themselves() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let before = stand_in.calls("cuEventRecord");
    let (points, _) = gather(&stand_in, &mut lane, 3)?;
    until(|| stand_in.calls("cuEventRecord") > before);
    points[2].wait(PATIENCE)?;
    Ok(())
}

#[test]
fn whoever_waits_already_is_told_at_once() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let coming = SemaphorePoint::new(&lane.next.semaphore, 2);
    coming.semaphore.wake_when(coming.value, Waker::noop().clone());
    let (points, events) = gather(&stand_in, &mut lane, 2)?;
    assert_eq!(events, 2, "somebody waits");
    points[1].wait(PATIENCE)?;
    let (_, events) = gather(&stand_in, &mut lane, 2)?;
    assert!(events <= 1, "nobody waits any more");
    Ok(())
}

#[test]
fn a_queue_that_waits_makes_the_signal_come() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let (mut near, mut far) = (Lane::open(&backend, 0)?, Lane::open(&backend, 1)?);
    let (points, _) = gather(&stand_in, &mut near, 2)?;
    let waits = stand_in.calls("cuStreamWaitEvent");
    let behind = far.next.clone();
    far.next.value += 1;
    let submission = Submission { waits: &points[1..], ops: &[], signals: std::slice::from_ref(&behind) };
    far.queue.submit(&submission)?;
    behind.wait(PATIENCE)?;
    // The stream waited, unless the signal was reached before it was asked for.
    assert!(stand_in.calls("cuStreamWaitEvent") <= waits + 1);
    assert!(points[1].poll()?);
    Ok(())
}

/// A refused launch is behind what gathered, which has been done.
#[test]
fn what_gathered_is_reached_though_what_is_behind_it_is_refused() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let (points, _) = gather(&stand_in, &mut lane, 3)?;
    let memory = lane.memory(BufferDesc::device(64))?;
    stand_in.fail("cuMemsetD8Async", 0, 1);
    let refused = lane.submit_late(&[Op::Fill(FillRegion::bytes(&memory, 2))])?;
    assert!(refused.wait(PATIENCE).is_err(), "the driver refused it");
    for point in points {
        point.wait(PATIENCE)?;
    }
    Ok(())
}

/// Whoever asks hears nothing bad of it: the reactor tries again.
#[test]
fn an_event_that_cannot_be_had_is_tried_again() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let (points, _) = gather(&stand_in, &mut lane, 3)?;
    stand_in.fail("cuEventRecord", 0, 1);
    points[0].poll()?;
    assert_eq!(stand_in.failed().as_deref(), Some("cuEventRecord"));
    points.iter().try_for_each(|point| Ok(point.wait(PATIENCE)?))
}

#[test]
fn a_queue_that_is_dropped_leaves_no_signal_behind() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let (points, _) = gather(&stand_in, &mut lane, 3)?;
    let other = lane.device.create_queue(&QueueDesc::default())?;
    drop(std::mem::replace(&mut lane.queue, Arc::clone(&other)));
    points[2].wait(PATIENCE)?;
    Ok(())
}
