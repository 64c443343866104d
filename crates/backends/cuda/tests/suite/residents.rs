//! Residents beside calls that the driver makes wait for kernels.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use warpweft_core_types::{
    Arg, BufferDesc, BufferView, Deadline, Features, Kernel, Launch, LoadError, Op, Resident, ResidentDesc,
    ResidentError, ResidentState, SliceConfig,
};
use warpweft_stand_in_cuda::StandIn;

use crate::{
    other::{self, Other, context, with_shared},
    support::{
        Lane, Outcome, PATIENCE, backend, blocking, counter, failing, kernel, number, stubborn, until,
    },
};

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

fn within() -> Deadline {
    Deadline::within(PATIENCE)
}

/// A resident with a word for each workgroup.
fn start(
    lane: &Lane,
    kernel: &Arc<dyn Kernel>,
    workgroups: u32,
    change: impl FnOnce(&mut ResidentDesc<'_>),
) -> Result<(Arc<dyn Resident>, BufferView), ResidentError> {
    let words = BufferView::whole(
        lane.device.allocate(&BufferDesc::host_visible(u64::from(workgroups) * 4)).unwrap(),
    );
    let args = [Arg::Buffer(&words)];
    let mut desc = ResidentDesc::new(Launch::new(kernel, [workgroups, 1, 1], &args)?);
    change(&mut desc);
    let resident = lane.device.residents().unwrap().launch(&desc)?;
    Ok((resident, words))
}

fn used(lane: &Lane) -> u32 {
    lane.device.residents().unwrap().budget().used
}

fn lose(lane: &mut Lane, failing: &Arc<dyn Kernel>) -> Outcome {
    let memory = lane.memory(BufferDesc::device(64))?;
    let args = [Arg::Buffer(&memory)];
    let lost = lane.submit(&[Op::Launch(Launch::new(failing, [1; 3], &args)?)])?.wait(PATIENCE);
    assert!(lost.is_err() && lane.device.failure().is_some());
    Ok(())
}

/// Nothing was enqueued, so the budget comes back, whichever slice it was.
#[test]
fn a_launch_that_the_driver_refuses_gives_the_budget_back() -> Outcome {
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    let kernel = kernel(&lane.device, &counter())?;
    let (first, _words) = start(&lane, &kernel, 1, |_| {})?;
    first.stop(within())?;
    for number in 0..4 {
        // Too many resources requested.
        stand_in.fail("cuLaunchKernel", number, 701);
        match start(&lane, &kernel, 4, |_| {}) {
            Err(error) => assert!(matches!(error, ResidentError::Failed(_)), "{error}"),
            Ok((resident, _words)) => {
                until(|| resident.state() == ResidentState::Failed);
                assert!(matches!(resident.resume(), Err(ResidentError::Failed(_))));
                until(|| used(&lane) == 0);
            }
        }
        until(|| used(&lane) == 0);
    }
    let (after, _words) = start(&lane, &kernel, 4, |_| {})?;
    Ok(after.stop(within())?)
}

#[test]
fn a_parked_resident_hears_that_its_device_is_lost() -> Outcome {
    let mut lane = Lane::open(&backend(&StandIn::load()?), 0)?;
    let (kernel, failing) = (kernel(&lane.device, &counter())?, kernel(&lane.device, &failing())?);
    let (resident, _words) = start(&lane, &kernel, 2, |_| {})?;
    resident.park(within())?;
    lose(&mut lane, &failing)?;
    assert_eq!(resident.state(), ResidentState::Failed);
    assert!(resident.failure().is_some());
    assert!(matches!(resident.resume(), Err(ResidentError::Failed(_))));
    assert!(matches!(resident.park(within()), Err(ResidentError::Failed(_))));
    assert_eq!(resident.state(), ResidentState::Failed);
    until(|| used(&lane) == 0);
    Ok(())
}

/// Nobody has noticed the fault when it is resumed: the launch does.
#[test]
fn a_resume_finds_out_that_the_device_is_lost() -> Outcome {
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    let kernel = kernel(&lane.device, &counter())?;
    let (resident, _words) = start(&lane, &kernel, 2, |_| {})?;
    resident.park(within())?;
    stand_in.fail("cuLaunchKernel", 0, 719);
    assert!(matches!(resident.resume(), Err(ResidentError::Failed(_))));
    assert_eq!(resident.state(), ResidentState::Failed);
    until(|| used(&lane) == 0);
    Ok(())
}

/// Threads with more and less patience: no one that gives up takes from another what it waits for.
#[test]
fn parks_that_give_up_leave_others_be() -> Outcome {
    let lane = Lane::open(&backend(&StandIn::load()?), 0)?;
    let kernel = kernel(&lane.device, &stubborn())?;
    let (resident, word) = start(&lane, &kernel, 1, |_| {})?;
    let park = |patience: Duration| {
        let resident = Arc::clone(&resident);
        thread::spawn(move || resident.park(Deadline::within(patience)))
    };
    let patient = [park(PATIENCE), park(PATIENCE)];
    let hasty = [MOMENT, 2 * MOMENT, 3 * MOMENT].map(park);
    for gave_up in hasty {
        let gave_up = gave_up.join().map_err(|_| "it panicked")?;
        assert!(matches!(gave_up, Err(ResidentError::Unparkable { .. })), "{gave_up:?}");
    }
    word.write(&1_u32.to_le_bytes())?;
    for patient in patient {
        patient.join().map_err(|_| "it panicked")??;
    }
    assert_eq!(resident.state(), ResidentState::Parked);
    resident.resume()?;
    assert_eq!(resident.state(), ResidentState::Running);
    let slices = resident.slices();
    until(|| resident.slices() > slices + 4);
    Ok(resident.stop(within())?)
}

/// Whoever is told that it is parked finds it parked, as long as nobody resumes it.
#[test]
fn parks_and_resumes_of_many_threads_keep_their_word() -> Outcome {
    let lane = Lane::open(&backend(&StandIn::load()?), 0)?;
    let kernel = kernel(&lane.device, &counter())?;
    let (resident, _words) = start(&lane, &kernel, 2, |_| {})?;
    let threads = [0, 1, 2, 3].map(|thread| {
        let resident = Arc::clone(&resident);
        thread::spawn(move || {
            for round in 0..200_u64 {
                let patience = if (round + thread) % 3 == 0 { Duration::ZERO } else { PATIENCE };
                match resident.park(Deadline::within(patience)) {
                    Ok(()) if thread == 0 => match resident.resume() {
                        Ok(()) | Err(ResidentError::WrongState { .. }) => {}
                        Err(error) => return Err(error),
                    },
                    Ok(()) | Err(ResidentError::Unparkable { .. }) => {}
                    // Parked already, or resumed before it was seen parked.
                    Err(ResidentError::WrongState { state: "parked", .. }) if thread == 0 => {
                        let _resumed = resident.resume();
                    }
                    Err(ResidentError::WrongState { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
    });
    for thread in threads {
        thread.join().map_err(|_| "it panicked")??;
    }
    let _resumed = resident.resume();
    resident.park(within())?;
    assert!((0..200).all(|_| resident.state() == ResidentState::Parked));
    resident.resume()?;
    Ok(resident.stop(within())?)
}

/// Slices of every length that is one, and calls without patience.
#[test]
fn slices_and_deadlines_at_their_limits() -> Outcome {
    let lane = Lane::open(&backend(&StandIn::load()?), 0)?;
    let kernel = kernel(&lane.device, &counter())?;
    let (short, long) = (Duration::from_nanos(1), Duration::MAX);
    for (shortest, longest) in [(short, short), (short, long), (long, long)] {
        let slice = SliceConfig { shortest, longest };
        let (resident, _words) = start(&lane, &kernel, 2, |desc| desc.slice = slice)?;
        for _ in 0..20 {
            let parked = resident.park(Deadline::now());
            assert_eq!(parked.is_ok(), resident.state() == ResidentState::Parked, "{parked:?}");
            assert_eq!(parked.is_ok(), resident.resume().is_ok());
        }
        resident.park(within())?;
        resident.resume()?;
        let _unparkable = resident.stop(Deadline::now());
        resident.stop(within())?;
        assert_eq!(resident.state(), ResidentState::Stopped);
        assert!(resident.park(within()).is_err() && resident.resume().is_err());
        assert_eq!(used(&lane), 0);
    }
    Ok(())
}

/// The multiprocessors are the GPU's, whichever context runs on them.
#[test]
fn contexts_of_one_gpu_share_its_budget() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let near = Lane::open(&backend, 0)?;
    let raw = Other::of(&stand_in).create_context(0);
    let theirs =
        other::lane(&backend.open_context(context("CUcontext", raw, Arc::new(())), Features::empty())?)?;
    let much = with_shared(counter(), 200 << 10);
    let (one, two) = (kernel(&near.device, &much)?, kernel(&theirs.device, &much)?);
    let total = near.device.residents().unwrap().budget().total;
    let (first, _words) = start(&near, &one, total, |_| {})?;
    let error = start(&theirs, &two, 1, |_| {}).map(drop).unwrap_err();
    assert!(matches!(error, ResidentError::OverBudget { free: 0, .. }), "{error}");
    first.stop(within())?;
    let (second, _words) = start(&theirs, &two, 1, |_| {})?;
    assert_eq!(used(&near), 1);
    Ok(second.stop(within())?)
}

/// It begins only when it has been told to end: the launch fails, and returns once nothing is left of it.
#[test]
fn nothing_of_one_that_is_late_is_left_when_the_launch_returns() -> Outcome {
    const TIME: Duration = Duration::from_secs(1);
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    let kernel = kernel(&lane.device, &counter())?;
    stand_in.set("hold", "counter");
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            // In the middle of the time that the launch waits for it to leave.
            thread::sleep(TIME * 3 / 2);
            stand_in.set("hold", "");
        });
        start(&lane, &kernel, 2, |desc| desc.check_in = TIME).map(drop).unwrap_err()
    });
    assert!(matches!(error, ResidentError::NotResident { started: 0, wanted: 2, .. }), "{error}");
    assert_eq!(used(&lane), 0);
    Ok(())
}

/// It does not return when it is told to end: it is named, and its place stays taken.
#[test]
fn one_that_is_late_and_stubborn_keeps_its_budget_until_it_leaves() -> Outcome {
    let lane = Lane::open(&backend(&StandIn::load()?), 0)?;
    let kernel = kernel(&lane.device, &stubborn())?;
    let words = lane.memory(BufferDesc::host_visible(4))?;
    let args = [Arg::Buffer(&words)];
    let mut desc = ResidentDesc::new(Launch::new(&kernel, [1, 1, 1], &args)?);
    desc.check_in = Duration::ZERO;
    match lane.device.residents().unwrap().launch(&desc) {
        Err(ResidentError::NotResident { .. } | ResidentError::Unparkable { .. }) => {
            assert_eq!(used(&lane), 1);
        }
        Err(error) => return Err(error.into()),
        // It began at once.
        Ok(resident) => drop(resident),
    }
    words.write(&1_u32.to_le_bytes())?;
    until(|| used(&lane) == 0);
    Ok(())
}

/// That a resident was parked, or not there yet, is no proof that it returns when it runs.
#[test]
fn a_load_right_after_a_start_or_a_resume_waits_for_nobody() -> Outcome {
    /// A resident that ends no slice for a second is found out.
    const FOUND_OUT: Duration = Duration::from_secs(10);
    let lane = Lane::open(&backend(&StandIn::load()?), 0)?;
    let kernel = kernel(&lane.device, &stubborn())?;
    let refused = |asked: Instant| {
        let load = lane.device.load(&number());
        assert!(matches!(load, Err(LoadError::Unparkable { .. })), "{load:?}");
        assert!(asked.elapsed() < FOUND_OUT, "it took {:?}", asked.elapsed());
    };
    let (resident, word) = start(&lane, &kernel, 1, |_| {})?;
    refused(Instant::now());
    word.write(&1_u32.to_le_bytes())?;
    resident.park(within())?;
    word.write(&0_u32.to_le_bytes())?;
    // A load that passes, since nothing runs.
    lane.device.load(&number())?;
    resident.resume()?;
    refused(Instant::now());
    word.write(&1_u32.to_le_bytes())?;
    resident.stop(within())?;
    Ok(())
}

/// Loads of other threads hold the context again and again; that is not a tool that makes launches wait.
#[test]
fn the_first_resident_starts_beside_loads() -> Outcome {
    use std::sync::atomic::{AtomicBool, Ordering};

    let stand_in = StandIn::load()?;
    for _ in 0..3 {
        let lane = Lane::open(&backend(&stand_in), 0)?;
        let kernel = kernel(&lane.device, &counter())?;
        let over = Arc::new(AtomicBool::new(false));
        let loads = [(); 3].map(|()| {
            let (device, over) = (Arc::clone(&lane.device), Arc::clone(&over));
            thread::spawn(move || {
                // Relaxed: a flag that orders nothing.
                while !over.load(Ordering::Relaxed) {
                    let _loaded = device.load(&number());
                }
            })
        });
        let outcome = start(&lane, &kernel, 2, |_| {});
        over.store(true, Ordering::Relaxed);
        loads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "it panicked"))?;
        outcome?.0.stop(within())?;
    }
    Ok(())
}

/// A driver that makes launches wait is found out each time, and not remembered when it stops to.
#[test]
fn launches_that_wait_are_found_out_and_not_held_against_the_device() -> Outcome {
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    let kernel = kernel(&lane.device, &counter())?;
    stand_in.set("blocking", "1");
    let error = start(&lane, &kernel, 1, |_| {}).map(drop).unwrap_err();
    assert!(
        matches!(&error, ResidentError::Refused { reason, .. } if reason.contains("debugger")),
        "{error}"
    );
    stand_in.set("blocking", "0");
    let (resident, _words) = start(&lane, &kernel, 1, |_| {})?;
    Ok(resident.stop(within())?)
}
