//! Residents beside each other, and beside calls that nobody announced.

use std::{sync::mpsc, thread, time::Duration};

use warpweft_core_types::{
    Arg, BufferDesc, BufferView, Deadline, DeviceExt as _, Launch, Resident, ResidentDesc, ResidentError,
    ResidentState, SliceConfig,
};
use warpweft_stand_in_cuda::StandIn;

use crate::{
    other::{Other, with_shared},
    support::{Lane, Outcome, PATIENCE, backend, counter, kernel},
};

type Started = Outcome<(std::sync::Arc<dyn Resident>, BufferView)>;

fn start(lane: &Lane, shared: u32, workgroups: u32, slice: SliceConfig) -> Started {
    let code = if shared > 0 { with_shared(counter(), shared) } else { counter() };
    let counts = lane.memory(BufferDesc::host_visible(u64::from(workgroups) * 4))?;
    let kernel = kernel(&lane.device, &code)?;
    let args = [Arg::Buffer(&counts)];
    let launch = Launch::new(&kernel, [workgroups, 1, 1], &args)?;
    let residents = lane.device.residents().ok_or("the family is absent")?;
    Ok((residents.launch(&ResidentDesc { slice, ..ResidentDesc::new(launch) })?, counts))
}

fn used(lane: &Lane) -> u32 {
    lane.device.residents().unwrap().budget().used
}

/// Fifteen of sixteen SMs are for residents; one that takes 200 KiB has an SM for each workgroup.
#[test]
fn occupancy_decides_how_many_fit() -> Outcome {
    const MUCH: u32 = 200 << 10;
    let backend = backend(&StandIn::load()?);
    let lane = Lane::open(&backend, 0)?;
    let within = || Deadline::within(PATIENCE);
    let over = |started: Started, wanted: u32, free: u32| {
        let error = started.map(|_| ()).unwrap_err();
        let error = error.downcast_ref::<ResidentError>().unwrap();
        assert!(
            matches!(error, ResidentError::OverBudget { wanted: needs, free: left, .. }
                if (*needs, *left) == (wanted, free)),
            "{error}"
        );
    };
    let slice = SliceConfig::default();
    over(start(&lane, MUCH, 16, slice), 16, 15);
    // As many of a lean one share what there is.
    let (all, _counts) = start(&lane, 0, 16, slice)?;
    assert_eq!(used(&lane), 15);
    all.stop(within())?;
    let (heavy, heavy_counts) = start(&lane, MUCH, 9, slice)?;
    let (lean, lean_counts) = start(&lane, 0, 4, slice)?;
    assert_eq!(used(&lane), 13);
    over(start(&lane, MUCH, 3, slice), 3, 2);
    over(start(&lane, 0, 3, slice), 3, 2);
    for (resident, counts, workgroups) in [(&heavy, &heavy_counts, 9), (&lean, &lean_counts, 4)] {
        assert_eq!(resident.state(), ResidentState::Running);
        let deadline = within();
        let mut bytes = vec![0; workgroups * 4];
        while bytes.as_chunks::<4>().0.iter().any(|word| u32::from_le_bytes(*word) == 0) {
            assert!(!deadline.is_past(), "a workgroup stands still");
            counts.read(&mut bytes)?;
            thread::yield_now();
        }
    }
    heavy.stop(within())?;
    assert_eq!(used(&lane), 4);
    let (again, _counts) = start(&lane, MUCH, 11, slice)?;
    again.stop(within())?;
    lean.stop(within())?;
    assert_eq!(used(&lane), 0);
    Ok(())
}

/// A module that another library loads and unloads by itself, on a thread of its own.
fn loads(other: Other, context: u64) -> Outcome {
    let (done, ended) = mpsc::channel();
    let loading = thread::spawn(move || {
        let ptx = c".version 8.0\n.target sm_70\n.entry empty() { ret; }";
        let outcome = (0..3).try_for_each(|_| other.load_and_unload(context, ptx));
        let _listening = done.send(outcome);
    });
    ended.recv_timeout(PATIENCE).map_err(|_| "it hangs")?.map_err(|code| code.to_string())?;
    loading.join().map_err(|_| "it panicked".into())
}

#[test]
fn a_call_that_nobody_announced_gets_through() -> Outcome {
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    let context = lane.device.interop().ok_or("the family is absent")?.device_handle().value;
    let slice = SliceConfig { longest: Duration::from_millis(2), ..SliceConfig::default() };
    let (resident, _counts) = start(&lane, 0, 2, slice)?;
    loads(Other::of(&stand_in), context)?;
    assert_eq!(resident.state(), ResidentState::Running);
    Ok(resident.stop(Deadline::within(PATIENCE))?)
}

#[test]
fn a_call_that_was_announced_gets_through_slices_without_end() -> Outcome {
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    let context = lane.device.interop().ok_or("the family is absent")?.device_handle().value;
    let (resident, _counts) = start(&lane, 0, 2, SliceConfig::default().unbounded())?;
    lane.device.foreign(|| loads(Other::of(&stand_in), context))?;
    assert_eq!(resident.state(), ResidentState::Running);
    Ok(resident.stop(Deadline::within(PATIENCE))?)
}
