//! Residents beside calls that the driver makes wait for kernels.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use warpweft_core_types::{
    Arg, BufferDesc, Deadline, Launch, Op, ResidentDesc, ResidentError, ResidentState, SliceConfig,
};
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Lane, Outcome, PATIENCE, backend, blocking, counter, kernel, number};

/// Long enough for something that must not happen to happen.
const MOMENT: Duration = Duration::from_millis(20);

#[test]
fn a_cold_call_makes_long_slices_short() -> Outcome {
    let backend = backend(&StandIn::load()?);
    let lane = Lane::open(&backend, 0)?;
    let (counter, counts) = (kernel(&lane.device, &counter())?, lane.memory(BufferDesc::host_visible(8))?);
    let args = [Arg::Buffer(&counts)];
    let slice = SliceConfig { shortest: Duration::from_millis(1), longest: 3 * PATIENCE };
    let desc = ResidentDesc { slice, ..ResidentDesc::new(Launch::new(&counter, [2, 1, 1], &args)?) };
    let resident = lane.device.residents().ok_or("the family is absent")?.launch(&desc)?;
    let started = Instant::now();
    for _ in 0..5 {
        kernel(&lane.device, &number())?;
    }
    // Slices by themselves would have taken longer than the limit, each.
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
    assert_eq!(resident.state(), ResidentState::Running);
    Ok(resident.stop(Deadline::within(PATIENCE))?)
}

/// What the driver does to those who do not slice their kernels; if it did not, nothing above would be shown.
#[test]
fn a_load_waits_for_a_kernel_that_stays() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let mut lane = Lane::open(&backend, 0)?;
    let (stays, word) = (kernel(&lane.device, &blocking())?, lane.memory(BufferDesc::host_visible(4))?);
    let args = [Arg::Buffer(&word)];
    let done = lane.submit(&[Op::Launch(Launch::new(&stays, [1; 3], &args)?)])?;
    let (device, loads) = (Arc::clone(&lane.device), stand_in.calls("cuModuleLoadDataEx"));
    let loading = thread::spawn(move || kernel(&device, &number()).map(|_| ()));
    while stand_in.calls("cuModuleLoadDataEx") == loads {
        thread::yield_now();
    }
    let started = Instant::now();
    while started.elapsed() < MOMENT {
        assert!(!loading.is_finished(), "it did not wait");
        thread::yield_now();
    }
    word.write(&1_u32.to_le_bytes())?;
    loading.join().map_err(|_| "it panicked")??;
    Ok(done.wait(PATIENCE)?)
}

#[test]
fn surroundings_that_would_starve_a_resident_are_named() -> Outcome {
    let backend = backend(&StandIn::load()?.with("display", "1"));
    let lane = Lane::open(&backend, 0)?;
    let (counter, counts) = (kernel(&lane.device, &counter())?, lane.memory(BufferDesc::host_visible(4))?);
    let args = [Arg::Buffer(&counts)];
    let desc = ResidentDesc::new(Launch::new(&counter, [1; 3], &args)?);
    let error = lane.device.residents().ok_or("the family is absent")?.launch(&desc).unwrap_err();
    assert!(matches!(&error, ResidentError::Refused { reason, .. } if reason.contains("display")), "{error}");
    Ok(())
}
