//! Kernels that stay.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use libtest_mimic::Failed;
use warpweft_core_types::{
    Arg, BufferDesc, BufferView, Deadline, DeviceExt as _, Features, KernelCode, Launch, LoadError, Op,
    Resident, ResidentDesc, ResidentError, ResidentState, SliceConfig,
};

use crate::{
    context::{Context, MOMENT, PATIENCE, allocate},
    harness::{Case, Verdict},
    kernels,
};

const NEEDS: Features = Features::RESIDENT_KERNELS.union(Features::HOST_VISIBLE_MEMORY);

pub(super) const CASES: &[Case] = &[
    Case::new("resident::runs_until_it_is_stopped", runs_until_it_is_stopped).needs(NEEDS).covers(&[
        "Residents::launch",
        "Resident::state",
        "Resident::slices",
        "Resident::stop",
    ]),
    Case::new("resident::parks_and_goes_on_with_its_state", parks_and_goes_on_with_its_state)
        .needs(NEEDS)
        .covers(&["Resident::park", "Resident::resume"]),
    Case::new("resident::a_park_stands", a_park_stands).needs(NEEDS),
    Case::new("resident::serves_the_host", serves_the_host).needs(NEEDS),
    Case::new("resident::lets_other_work_through", lets_other_work_through).needs(NEEDS),
    Case::new("resident::lets_code_and_memory_through", lets_code_and_memory_through).needs(NEEDS),
    Case::new("resident::too_many_are_refused_before_they_start", too_many_are_refused_before_they_start)
        .needs(NEEDS)
        .covers(&["Residents::budget"]),
    Case::new("resident::leave_what_is_reserved", leave_what_is_reserved)
        .needs(NEEDS)
        .covers(&["Residents::reserve"]),
    Case::new("resident::one_that_does_not_yield_is_named", one_that_does_not_yield_is_named).needs(NEEDS),
    Case::new("resident::one_that_does_not_yield_holds_no_load_up", no_load_is_held_up).needs(NEEDS),
    Case::new("resident::a_failure_ends_it", a_failure_ends_it)
        .needs(NEEDS)
        .may_lose_device()
        .covers(&["Resident::failure"]),
    Case::new("resident::an_early_failure_is_the_answer", an_early_failure_is_the_answer)
        .needs(NEEDS)
        .may_lose_device(),
    Case::new("resident::a_stop_outlasts_a_park_that_gives_up", a_stop_outlasts_a_park_that_gives_up)
        .needs(NEEDS),
    Case::new("resident::a_park_that_gives_up_leaves_others_be", a_park_that_gives_up_leaves_others_be)
        .needs(NEEDS),
    Case::new("resident::slices_that_contradict_themselves", slices_that_contradict_themselves).needs(NEEDS),
    Case::new("resident::nothing_is_left_of_one_that_is_late", nothing_is_left_of_one_that_is_late)
        .needs(NEEDS),
    Case::new("resident::other_kernels_do_not_stay", other_kernels_do_not_stay).needs(NEEDS),
    Case::new("resident::wrong_calls_are_refused", wrong_calls_are_refused).needs(NEEDS),
    Case::new("resident::dropping_it_stops_it", dropping_it_stops_it).needs(NEEDS),
    Case::new("resident::slices_are_as_long_as_asked", slices_are_as_long_as_asked).needs(NEEDS),
    Case::new("resident::gives_way_while_asked_to", gives_way_while_asked_to)
        .needs(NEEDS)
        .covers(&["Residents::give_way", "DeviceExt::foreign"]),
    Case::new("resident::unbounded_slices_end_for_others", unbounded_slices_end_for_others).needs(NEEDS),
];

fn start(
    cx: &Context,
    code: &KernelCode,
    workgroups: u32,
    args: &[Arg<'_>],
) -> Result<Arc<dyn Resident>, Failed> {
    let kernel = cx.kernel(0, code)?;
    let launch = Launch::new(&kernel, [workgroups, 1, 1], args)?;
    Ok(cx.device(0).residents().ok_or("the family is absent")?.launch(&ResidentDesc::new(launch))?)
}

fn within() -> Deadline {
    Deadline::within(PATIENCE)
}

fn words(window: &BufferView) -> Result<Vec<u32>, Failed> {
    let mut bytes = vec![0; usize::try_from(window.size())?];
    window.read(&mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// Waits until `done`; a resident that stands still reaches the limit.
fn until(mut done: impl FnMut() -> Result<bool, Failed>) -> Verdict {
    let deadline = within();
    while !done()? {
        if deadline.is_past() {
            return Err("it did not happen in time".into());
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn used(cx: &Context) -> Result<u32, Failed> {
    Ok(cx.device(0).residents().ok_or("the family is absent")?.budget().used)
}

fn runs_until_it_is_stopped(cx: &Context) -> Verdict {
    let counts = cx.window(0, 16)?;
    let resident = start(cx, &kernels::counter(), 4, &[Arg::Buffer(&counts)])?;
    assert_eq!((resident.state(), used(cx)?), (ResidentState::Running, 4));
    until(|| Ok(words(&counts)?.iter().all(|&count| count > 100) && resident.slices() > 8))?;
    resident.stop(within())?;
    assert_eq!((resident.state(), used(cx)?), (ResidentState::Stopped, 0));
    let after = words(&counts)?;
    cx.lane(0)?.run(&[])?;
    assert_eq!(words(&counts)?, after, "a stopped resident stands still");
    Ok(resident.stop(within())?)
}

fn parks_and_goes_on_with_its_state(cx: &Context) -> Verdict {
    let counts = cx.window(0, 8)?;
    let resident = start(cx, &kernels::counter(), 2, &[Arg::Buffer(&counts)])?;
    for _ in 0..20 {
        let before = words(&counts)?;
        until(|| Ok(words(&counts)?.iter().zip(&before).all(|(now, before)| now != before)))?;
        resident.park(within())?;
        assert_eq!((resident.state(), used(cx)?), (ResidentState::Parked, 2));
        let parked = words(&counts)?;
        cx.lane(0)?.run(&[])?;
        assert_eq!(words(&counts)?, parked, "a parked resident stands still");
        assert!(parked.iter().zip(&before).all(|(now, before)| now >= before), "and keeps its state");
        resident.resume()?;
        assert_eq!(resident.state(), ResidentState::Running);
    }
    Ok(resident.stop(within())?)
}

/// Slices behind the one that was told to leave may still begin and leave; nobody may see that.
fn a_park_stands(cx: &Context) -> Verdict {
    let counts = cx.window(0, 8)?;
    let resident = start(cx, &kernels::counter(), 2, &[Arg::Buffer(&counts)])?;
    for _ in 0..50 {
        resident.park(within())?;
        assert!((0..200).all(|_| resident.state() == ResidentState::Parked));
        resident.resume()?;
    }
    Ok(resident.stop(within())?)
}

fn serves_the_host(cx: &Context) -> Verdict {
    let (request, answer) = (cx.window(0, 4)?, cx.window(0, 4)?);
    let resident = start(cx, &kernels::server(), 1, &[Arg::Buffer(&request), Arg::Buffer(&answer)])?;
    for value in 1..=50_u32 {
        request.write(&value.to_le_bytes())?;
        until(|| Ok(words(&answer)?[0] == value + 1))?;
    }
    request.write(&u32::MAX.to_le_bytes())?;
    until(|| Ok(resident.state() == ResidentState::Stopped))?;
    assert_eq!(used(cx)?, 0, "a resident that is done gives its place back");
    Ok(())
}

fn lets_other_work_through(cx: &Context) -> Verdict {
    let counts = cx.window(0, 4)?;
    let resident = start(cx, &kernels::counter(), 1, &[Arg::Buffer(&counts)])?;
    let (kernel, memory, lane) = (cx.kernel(0, &kernels::number())?, cx.memory(0, 40)?, cx.lane(0)?);
    for base in 0..20_u32 {
        let base = base.to_le_bytes();
        let args = [Arg::Buffer(&memory), Arg::Scalar(&base)];
        lane.run(&[Op::Launch(Launch::new(&kernel, [10, 1, 1], &args)?)])?;
    }
    assert_eq!(cx.download_words(0, &memory)?, (19..29).collect::<Vec<u32>>());
    Ok(resident.stop(within())?)
}

/// Case K1 of a kind: nothing hangs beside a resident.
fn lets_code_and_memory_through(cx: &Context) -> Verdict {
    let counts = cx.window(0, 4)?;
    let resident = start(cx, &kernels::counter(), 1, &[Arg::Buffer(&counts)])?;
    let started = Instant::now();
    for _ in 0..5 {
        let module = cx.device(0).load(&kernels::empty())?;
        let kernel = module.kernel("empty")?;
        let buffer = allocate(cx.device(0), BufferDesc::device(1 << 16))?;
        cx.lane(0)?.run(&[Op::Launch(Launch::new(&kernel, [1; 3], &[])?)])?;
        drop((module, kernel, buffer));
    }
    assert!(started.elapsed().as_secs() < 2, "five rounds took {:?}", started.elapsed());
    Ok(resident.stop(within())?)
}

/// Multiprocessors for kernels that have to find room beside residents.
fn leave_what_is_reserved(cx: &Context) -> Verdict {
    let family = cx.device(0).residents().ok_or("the family is absent")?;
    let total = family.budget().total;
    let kernel = cx.kernel(0, &kernels::counter())?;
    let counts = cx.window(0, 4)?;
    let args = [Arg::Buffer(&counts)];
    let desc = ResidentDesc::new(Launch::new(&kernel, [1; 3], &args)?);
    let most = family.reserve(total - 1)?;
    assert_eq!((most.count(), used(cx)?), (total - 1, total - 1));
    let error = family.reserve(2).err().ok_or("more were reserved than there are")?;
    let named =
        matches!(error, ResidentError::NotFree { device, wanted: 2, free: 1 } if device == cx.infos[0].id);
    assert!(named, "{error}");
    let last = family.reserve(1)?;
    let error = family.launch(&desc).err().ok_or("it was started")?;
    assert!(matches!(error, ResidentError::OverBudget { free: 0, .. }), "{error}");
    drop(last);
    family.launch(&desc)?.stop(within())?;
    assert_eq!(used(cx)?, total - 1);
    drop((family.reserve(0)?, most));
    assert_eq!(used(cx)?, 0);
    Ok(())
}

/// Case K2: one more than fits.
fn too_many_are_refused_before_they_start(cx: &Context) -> Verdict {
    let family = cx.device(0).residents().ok_or("the family is absent")?;
    let total = family.budget().total;
    let kernel = cx.kernel(0, &kernels::counter())?;
    let most = total * kernel.resources().workgroups_per_multiprocessor;
    let counts = cx.window(0, 4 * (u64::from(most) + 1))?;
    let args = [Arg::Buffer(&counts)];
    let launch = |workgroups| Launch::new(&kernel, [workgroups, 1, 1], &args);
    let error = family.launch(&ResidentDesc::new(launch(most + 1)?)).err().ok_or("it was started")?;
    let named = matches!(error, ResidentError::OverBudget { device, workgroups, wanted, free, .. }
        if device == cx.infos[0].id && workgroups == u64::from(most) + 1 && wanted == total + 1 && free == total);
    assert!(named, "{error}");
    let all = family.launch(&ResidentDesc::new(launch(most)?))?;
    assert_eq!(used(cx)?, total);
    all.stop(within())?;
    let first = family.launch(&ResidentDesc::new(launch(1)?))?;
    let error = family.launch(&ResidentDesc::new(launch(total)?)).err().ok_or("it was started")?;
    assert!(matches!(error, ResidentError::OverBudget { free, .. } if free == total - 1), "{error}");
    first.stop(within())?;
    assert_eq!(used(cx)?, 0);
    Ok(())
}

fn one_that_does_not_yield_is_named(cx: &Context) -> Verdict {
    let release = cx.window(0, 4)?;
    let resident = start(cx, &kernels::stubborn(), 1, &[Arg::Buffer(&release)])?;
    let started = Instant::now();
    let error = resident.park(Deadline::within(MOMENT)).err().ok_or("it parked")?;
    assert!(started.elapsed() < PATIENCE / 2, "the deadline holds");
    let named = matches!(&error, ResidentError::Unparkable { device, kernel, workgroup: 0 }
        if *device == cx.infos[0].id && kernel == "stubborn");
    assert!(named, "{error}");
    assert_eq!(resident.state(), ResidentState::Running, "it runs as before");
    release.write(&1_u32.to_le_bytes())?;
    resident.park(within())?;
    Ok(resident.stop(within())?)
}

/// Case K1 where a resident keeps no promise: a load that would wait for it is refused, by a deadline.
fn no_load_is_held_up(cx: &Context) -> Verdict {
    let release = cx.window(0, 4)?;
    let resident = start(cx, &kernels::stubborn(), 1, &[Arg::Buffer(&release)])?;
    let started = Instant::now();
    let refused = cx.device(0).load(&kernels::number()).err();
    assert!(started.elapsed() < PATIENCE / 2, "it took {:?}", started.elapsed());
    let named = |error: &LoadError| {
        let LoadError::Unparkable { device, kernel, .. } = error else { return false };
        *device == cx.infos[0].id && kernel == "stubborn"
    };
    assert!(refused.as_ref().is_none_or(named), "{refused:?}");
    release.write(&1_u32.to_le_bytes())?;
    // A kernel that does not see what the host writes before it ends takes its time to get there.
    until(|| Ok(cx.device(0).load(&kernels::number()).is_ok()))?;
    Ok(resident.stop(within())?)
}

fn a_failure_ends_it(cx: &Context) -> Verdict {
    let window = cx.window(0, 4)?;
    // It may fail before it has checked in or after.
    if let Ok(resident) = start(cx, &kernels::failing_resident(), 1, &[Arg::Buffer(&window)]) {
        until(|| Ok(resident.state() == ResidentState::Failed))?;
        assert!(resident.failure().is_some());
        assert!(matches!(resident.park(within()), Err(ResidentError::Failed(_))));
        // It is over already; whoever stops it may be told why.
        assert!(matches!(resident.stop(within()), Ok(()) | Err(ResidentError::Failed(_))));
    }
    until(|| Ok(used(cx)? == 0))?;
    if cx.device(0).failure().is_some() { cx.stays_lost(0) } else { cx.lane(0)?.run(&[]) }
}

/// One workgroup fails before the others have begun: the failure is the answer, and at once.
fn an_early_failure_is_the_answer(cx: &Context) -> Verdict {
    let (kernel, window) = (cx.kernel(0, &kernels::failing_resident())?, cx.window(0, 4)?);
    let args = [Arg::Buffer(&window)];
    let patient =
        ResidentDesc { check_in: PATIENCE, ..ResidentDesc::new(Launch::new(&kernel, [8, 1, 1], &args)?) };
    let started = Instant::now();
    match cx.device(0).residents().ok_or("the family is absent")?.launch(&patient) {
        Err(ResidentError::Failed(_)) => {}
        Err(error) => return Err(error.into()),
        // All had begun before the first one failed.
        Ok(resident) => until(|| Ok(resident.state() == ResidentState::Failed))?,
    }
    assert!(started.elapsed() < PATIENCE / 2);
    until(|| Ok(used(cx)? == 0))
}

fn a_stop_outlasts_a_park_that_gives_up(cx: &Context) -> Verdict {
    let release = cx.window(0, 4)?;
    let resident = start(cx, &kernels::stubborn(), 1, &[Arg::Buffer(&release)])?;
    std::thread::scope(|scope| {
        let parking = scope.spawn(|| resident.park(Deadline::within(5 * MOMENT)));
        // While the other thread waits for the workgroup to return.
        let stopped = resident.stop(Deadline::within(MOMENT));
        assert!(matches!(stopped, Err(ResidentError::Unparkable { .. })));
        assert_ne!(resident.state(), ResidentState::Stopped, "a workgroup is inside its kernel");
        let parked = parking.join().map_err(|_| "the thread panicked")?;
        assert!(parked.is_err(), "it was asked to end, or did not return");
        release.write(&1_u32.to_le_bytes())?;
        until(|| Ok(resident.state() == ResidentState::Stopped))?;
        let slices = resident.slices();
        cx.lane(0)?.run(&[])?;
        assert_eq!((resident.slices(), used(cx)?), (slices, 0), "it stays stopped");
        Ok(())
    })
}

/// Two threads ask; the one without patience gives up, and the other one's park comes to stand.
fn a_park_that_gives_up_leaves_others_be(cx: &Context) -> Verdict {
    let release = cx.window(0, 4)?;
    let resident = start(cx, &kernels::stubborn(), 1, &[Arg::Buffer(&release)])?;
    std::thread::scope(|scope| {
        let hasty = scope.spawn(|| resident.park(Deadline::within(2 * MOMENT)));
        let patient = scope.spawn(|| resident.park(within()));
        let gave_up = hasty.join().map_err(|_| "the thread panicked")?;
        assert!(matches!(gave_up, Err(ResidentError::Unparkable { .. })), "{gave_up:?}");
        release.write(&1_u32.to_le_bytes())?;
        patient.join().map_err(|_| "the thread panicked")??;
        assert_eq!(resident.state(), ResidentState::Parked);
        resident.resume()?;
        assert_eq!(resident.state(), ResidentState::Running);
        Ok(resident.stop(within())?)
    })
}

fn slices_that_contradict_themselves(cx: &Context) -> Verdict {
    let (kernel, counts) = (cx.kernel(0, &kernels::counter())?, cx.window(0, 4)?);
    let args = [Arg::Buffer(&counts)];
    let (zero, short, long) = (Duration::ZERO, MOMENT, 2 * MOMENT);
    for (shortest, longest) in [(long, short), (zero, long), (zero, zero), (short, zero)] {
        let slice = SliceConfig { shortest, longest };
        let desc = ResidentDesc { slice, ..ResidentDesc::new(Launch::new(&kernel, [1; 3], &args)?) };
        let launched = cx.device(0).residents().ok_or("the family is absent")?.launch(&desc);
        let error = launched.err().ok_or("it was started")?;
        assert!(matches!(error, ResidentError::Invalid { .. }), "{slice:?}: {error}");
        assert_eq!(used(cx)?, 0);
    }
    Ok(())
}

/// No time to check in: whatever had begun by then ends, and the budget comes back.
fn nothing_is_left_of_one_that_is_late(cx: &Context) -> Verdict {
    let (kernel, counts) = (cx.kernel(0, &kernels::counter())?, cx.window(0, 8)?);
    let args = [Arg::Buffer(&counts)];
    for _ in 0..20 {
        let late = ResidentDesc {
            check_in: Duration::ZERO,
            ..ResidentDesc::new(Launch::new(&kernel, [2, 1, 1], &args)?)
        };
        match cx.device(0).residents().ok_or("the family is absent")?.launch(&late) {
            Err(ResidentError::NotResident { .. } | ResidentError::Unparkable { .. }) => {}
            Err(error) => return Err(error.into()),
            Ok(resident) => resident.stop(within())?,
        }
        until(|| Ok(used(cx)? == 0))?;
        let before = words(&counts)?;
        cx.lane(0)?.run(&[])?;
        assert_eq!(words(&counts)?, before, "it stands still");
    }
    Ok(())
}

fn other_kernels_do_not_stay(cx: &Context) -> Verdict {
    let kernel = cx.kernel(0, &kernels::empty())?;
    let desc = ResidentDesc::new(Launch::new(&kernel, [1; 3], &[])?);
    let error =
        cx.device(0).residents().ok_or("the family is absent")?.launch(&desc).err().ok_or("it stays")?;
    assert!(matches!(&error, ResidentError::NotSliced { kernel } if kernel == "empty"), "{error}");
    Ok(())
}

fn wrong_calls_are_refused(cx: &Context) -> Verdict {
    let counts = cx.window(0, 4)?;
    let resident = start(cx, &kernels::counter(), 1, &[Arg::Buffer(&counts)])?;
    let wrong = |result: Result<(), ResidentError>| matches!(result, Err(ResidentError::WrongState { .. }));
    assert!(wrong(resident.resume()), "it runs already");
    resident.park(within())?;
    assert!(wrong(resident.park(within())), "it is parked already");
    resident.stop(within())?;
    assert!(wrong(resident.park(within())) && wrong(resident.resume()), "it is over");
    Ok(())
}

fn dropping_it_stops_it(cx: &Context) -> Verdict {
    let counts = cx.window(0, 4)?;
    drop(start(cx, &kernels::counter(), 1, &[Arg::Buffer(&counts)])?);
    until(|| Ok(used(cx)? == 0))?;
    let memory = cx.memory(0, 4)?;
    let foreign = start(cx, &kernels::counter(), 1, &[Arg::Buffer(&memory)])?;
    Ok(foreign.stop(within())?)
}

fn slices_are_as_long_as_asked(cx: &Context) -> Verdict {
    let (kernel, counts) = (cx.kernel(0, &kernels::counter())?, cx.window(0, 4)?);
    let args = [Arg::Buffer(&counts)];
    let slice = SliceConfig { shortest: MOMENT, longest: MOMENT };
    let desc = ResidentDesc { slice, ..ResidentDesc::new(Launch::new(&kernel, [1; 3], &args)?) };
    let started = Instant::now();
    let resident = cx.device(0).residents().ok_or("the family is absent")?.launch(&desc)?;
    until(|| Ok(resident.slices() >= 3))?;
    assert!(started.elapsed() >= 3 * MOMENT, "three slices took {:?}", started.elapsed());
    Ok(resident.stop(within())?)
}

/// It goes on serving while it gives way, and afterwards.
fn gives_way_while_asked_to(cx: &Context) -> Verdict {
    let counts = cx.window(0, 4)?;
    let resident = start(cx, &kernels::counter(), 1, &[Arg::Buffer(&counts)])?;
    for _ in 0..5 {
        let answer = cx.device(0).foreign(|| {
            let (slices, count) = (resident.slices(), words(&counts)?[0]);
            until(|| Ok(resident.slices() > slices + 4 && words(&counts)?[0] != count))?;
            Ok::<_, Failed>(42)
        })?;
        assert_eq!(answer, 42);
        let before = words(&counts)?[0];
        until(|| Ok(words(&counts)?[0] != before))?;
    }
    Ok(resident.stop(within())?)
}

/// Without a longest slice it still lets a load through, and can be parked and stopped.
fn unbounded_slices_end_for_others(cx: &Context) -> Verdict {
    let counts = cx.window(0, 8)?;
    let kernel = cx.kernel(0, &kernels::counter())?;
    let args = [Arg::Buffer(&counts)];
    let launch = Launch::new(&kernel, [2, 1, 1], &args)?;
    let desc = ResidentDesc { slice: SliceConfig::default().unbounded(), ..ResidentDesc::new(launch) };
    let resident = cx.device(0).residents().ok_or("the family is absent")?.launch(&desc)?;
    for value in 0..3_u32 {
        let kernel = cx.kernel(0, &kernels::number())?;
        let out = cx.memory(0, 4)?;
        let base = value.to_le_bytes();
        let args = [Arg::Buffer(&out), Arg::Scalar(&base)];
        cx.lane(0)?.run(&[Op::Launch(Launch::new(&kernel, [1, 1, 1], &args)?)])?;
        assert_eq!(cx.download_words(0, &out)?, [value]);
        resident.park(within())?;
        resident.resume()?;
    }
    Ok(resident.stop(within())?)
}
