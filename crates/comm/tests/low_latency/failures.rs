//! Ranks whose devices wait in vain.

use std::{sync::Barrier, time::Duration};

use warpweft_comm::{CommConfig, Communicator};
use warpweft_core_types::{DType, Deadline, ErrorClass, Op, ReduceOp, Submission};

use crate::rig::{PATIENCE, Place, config, ranks, read};

fn until_failed(place: &Place) -> String {
    let deadline = Deadline::within(PATIENCE);
    loop {
        if let Some(failure) = place.comm.failure() {
            return failure.to_string();
        }
        assert!(!deadline.is_past(), "it does not fail");
        std::thread::yield_now();
    }
}

/// Replays that the host knows nothing of end by the device's own time, and all ranks are told.
#[test]
fn a_device_that_waits_in_vain_gives_up_and_all_are_told() {
    let config = CommConfig { timeout: Duration::from_millis(100), ..config() };
    let have_failed = Barrier::new(3);
    let told = ranks(3, &config, |place| {
        let view = place.numbers(&[1]);
        let graph = place.graph_of_a_sum(&view);
        place.comm.replay(&graph, &place.queue).unwrap().wait(PATIENCE).unwrap();
        place.comm.barrier(PATIENCE).unwrap();
        // Rank 1 never comes.
        if place.rank() != 1 {
            let ops = [Op::Replay(&graph)];
            place.queue.submit(&Submission { ops: &ops, ..Submission::default() }).unwrap();
        }
        let told = until_failed(&place);
        // Who leaves is no longer heard.
        have_failed.wait();
        let call = place.comm.all_reduce_in_place(ReduceOp::Sum, DType::U32, &view).unwrap();
        let error = call.on(&place.queue).unwrap_err();
        assert!(matches!(error.class(), ErrorClass::Transient | ErrorClass::PeerLost), "{error}");
        told
    });
    assert!(told.iter().any(|told| told.contains("waited for rank 1")), "{told:?}");
}

/// A call that was given up is no call that was done, whoever waits for it and however late.
#[test]
fn a_call_that_a_device_gave_up_is_told_as_failed() {
    let config = CommConfig { timeout: Duration::from_millis(100), ..config() };
    ranks(2, &config, |place| {
        let view = place.numbers(&[1]);
        if place.rank() == 1 {
            until_failed(&place);
            return;
        }
        let call = place.comm.all_reduce_in_place(ReduceOp::Sum, DType::U32, &view).unwrap();
        let (waited, awaited) = (call.on(&place.queue).unwrap(), call.on(&place.queue).unwrap());
        until_failed(&place);
        let error = waited.wait(PATIENCE).unwrap_err();
        assert_eq!(error.class(), ErrorClass::Transient, "{error}");
        assert_eq!(pollster::block_on(awaited.into_future()).unwrap_err().class(), ErrorClass::Transient);
        // The queue and its device go on.
        let other = place.numbers(&[7]);
        let copy = warpweft_core_types::CopyRegion::new(&view, &other).unwrap();
        place.queue.submit(&Submission { ops: &[Op::Copy(copy)], ..Submission::default() }).unwrap();
    });
}

/// An abort reaches kernels that wait.
/// Who had all of a device has it again after a failure, while the communicator that failed is still there.
#[test]
fn survivors_have_the_room_of_the_communicator_that_failed() {
    let config = CommConfig { multiprocessors: Some(64), ..config() };
    ranks(3, &config, |place| {
        if place.rank() == 2 {
            return;
        }
        let view = place.numbers(&[1; 100]);
        let sum = |comm: &Communicator| {
            comm.all_reduce_in_place(ReduceOp::Sum, DType::U32, &view).and_then(|call| call.wait(PATIENCE))
        };
        sum(&place.comm).unwrap_err();
        let survivors = place.comm.shrink(PATIENCE).unwrap();
        let budget = place.device.residents().unwrap().budget();
        assert_eq!(budget.used, budget.total);
        view.write(&1_u32.to_le_bytes().repeat(100)).unwrap();
        sum(&survivors).unwrap();
        assert_eq!(read(&view), [2; 100]);
        survivors.barrier(PATIENCE).unwrap();
    });
}

#[test]
fn an_abort_ends_what_devices_wait_for() {
    ranks(2, &config(), |place| {
        let view = place.numbers(&[1]);
        if place.rank() == 1 {
            place.comm.abort("the test has had enough").unwrap();
            return;
        }
        let call = place.comm.all_reduce_in_place(ReduceOp::Sum, DType::U32, &view).unwrap();
        let error = call.on(&place.queue).and_then(|call| call.wait(PATIENCE)).unwrap_err();
        assert!(error.to_string().contains("had enough"), "{error}");
    });
}
