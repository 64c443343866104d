//! Readings of the clock that fail, are late, or have no time.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use warpweft_core_types::{Arg, BufferDesc, Deadline, DeviceClock, Failure, Launch, Op};
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Lane, Outcome, PATIENCE, backend, blocking, kernel};

fn clock(lane: &Lane) -> &dyn DeviceClock {
    lane.device.clock().unwrap()
}

fn reads(lane: &Lane) -> Outcome {
    Ok(clock(lane).sample(Deadline::within(PATIENCE)).map(drop).map_err(|failure| failure.to_string())?)
}

fn is_late<T>(outcome: &Result<T, Arc<Failure>>) -> bool {
    matches!(outcome, Err(failure) if matches!(**failure, Failure::DeadlineExceeded { .. }))
}

/// One call of a reading fails in passing; the next reading works.
#[test]
fn a_clock_survives_a_call_that_fails() -> Outcome {
    for function in ["cuLaunchKernel", "cuEventRecord", "cuEventQuery"] {
        for number in 0..2 {
            let stand_in = StandIn::load()?;
            let lane = Lane::open(&backend(&stand_in), 0)?;
            reads(&lane)?;
            stand_in.fail(function, number, 2);
            for _ in 0..4 {
                let _failed = clock(&lane).sample(Deadline::within(PATIENCE));
            }
            assert!(stand_in.failed().is_some(), "{function} was not called");
            for _ in 0..3 {
                reads(&lane).map_err(|failure| format!("after {function} {number} failed: {failure}"))?;
            }
        }
    }
    Ok(())
}

/// Other work has the device, so that no question is answered: each reading keeps its deadline, and the clock goes on
/// once the device is free.
#[test]
fn a_reading_that_is_not_answered_keeps_its_deadline() -> Outcome {
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    reads(&lane)?;
    // Launches of the clock wait behind it.
    stand_in.set("hold", "ww_exchange ww_stamp");
    for patience in [5, 20] {
        let started = Instant::now();
        let outcome = clock(&lane).sample(Deadline::within(Duration::from_millis(patience)));
        assert!(is_late(&outcome), "{outcome:?}");
        assert!(started.elapsed() < PATIENCE / 2, "{:?}", started.elapsed());
    }
    stand_in.set("hold", "");
    for _ in 0..3 {
        reads(&lane)?;
    }
    Ok(())
}

#[test]
fn a_reading_without_time_returns_at_once() -> Outcome {
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    reads(&lane)?;
    let launches = stand_in.calls("cuLaunchKernel");
    for _ in 0..20 {
        assert!(is_late(&clock(&lane).sample(Deadline::now())));
    }
    assert_eq!(stand_in.calls("cuLaunchKernel"), launches, "nothing was begun");
    reads(&lane)
}

/// One thread has the lane and waits; another one waits for it no longer than it wants to.
#[test]
fn a_reading_waits_for_its_turn_until_its_deadline() -> Outcome {
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    reads(&lane)?;
    stand_in.set("hold", "ww_exchange ww_stamp");
    let device = Arc::clone(&lane.device);
    let launches = stand_in.calls("cuLaunchKernel");
    let patient = thread::spawn(move || device.clock().unwrap().sample(Deadline::within(PATIENCE)).map(drop));
    while stand_in.calls("cuLaunchKernel") == launches {
        thread::yield_now();
    }
    let started = Instant::now();
    assert!(is_late(&clock(&lane).sample(Deadline::within(Duration::from_millis(20)))));
    assert!(started.elapsed() < PATIENCE / 2);
    stand_in.set("hold", "");
    patient.join().map_err(|_| "it panicked")?.map_err(|failure| failure.to_string())?;
    reads(&lane)
}

/// Beside a kernel that stays the clock goes on, since it has a stream of its own.
#[test]
fn a_clock_goes_on_beside_a_kernel_that_stays() -> Outcome {
    let mut lane = Lane::open(&backend(&StandIn::load()?), 0)?;
    let (stays, word) = (kernel(&lane.device, &blocking())?, lane.memory(BufferDesc::host_visible(4))?);
    let args = [Arg::Buffer(&word)];
    let done = lane.submit(&[Op::Launch(Launch::new(&stays, [1; 3], &args)?)])?;
    reads(&lane)?;
    word.write(&1_u32.to_le_bytes())?;
    Ok(done.wait(PATIENCE)?)
}
