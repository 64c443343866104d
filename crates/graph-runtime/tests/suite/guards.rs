//! The host's own reads and writes.

use std::time::Duration;

use warpweft_core_types::{Deadline, FillRegion};
use warpweft_graph_runtime::{BusyReason, MapError, MemoryPlacement, RunError, Usage};

use crate::rig::{Gate, Outcome, PATIENCE, Rig};

#[test]
fn guards_wait_for_work_and_hold_up_what_uses_their_bytes() -> Outcome {
    let rig = Rig::new(1);
    let (buffer, gate) = (rig.memory(0, 64), Gate::default());
    let (left, right) = (buffer.slice(0..32)?, buffer.slice(32..64)?);
    rig.runtime.task(&gate.task(), &[(left.clone(), Usage::Write)])?;
    let late = rig.runtime.read(&left, Deadline::now());
    assert!(matches!(late, Err(MapError::Timeout)), "{late:?}");
    // The other half is nobody's.
    let mut write = rig.runtime.write(&right, Deadline::now())?;
    write.write(0, &[7; 32])?;
    let busy = rig.runtime.fill(FillRegion::bytes(&buffer, 1)).expect_err("the right half is held");
    let held = BusyReason::Leased { holder: "write", range: 32..64 };
    assert!(matches!(&busy, RunError::Busy { reason } if *reason == held), "{busy}");
    let second = rig.runtime.read(&right, Deadline::now());
    assert!(matches!(second, Err(MapError::Busy { .. })), "{second:?}");
    drop(write);
    gate.open();
    rig.runtime.fill(FillRegion::bytes(&left, 1))?.wait(PATIENCE)?;
    assert_eq!(rig.runtime.read(&buffer, PATIENCE)?.to_vec()?, [[1; 32], [7; 32]].concat());
    Ok(())
}

#[test]
fn readers_share_and_work_may_read_beside_them() -> Outcome {
    let rig = Rig::new(1);
    let (buffer, copy) = (rig.memory(0, 16), rig.memory(0, 16));
    let (one, other) = (rig.runtime.read(&buffer, PATIENCE)?, rig.runtime.read(&buffer, PATIENCE)?);
    rig.runtime.copy(&buffer, &copy)?.wait(PATIENCE)?;
    let busy = rig.add(&buffer, 1, |desc| rig.runtime.run(desc)).expect_err("it would write");
    assert!(matches!(busy, RunError::Busy { reason: BusyReason::Leased { holder: "read", .. } }), "{busy}");
    drop((one, other));
    rig.add(&buffer, 1, |desc| rig.runtime.run(desc))?.wait(PATIENCE)?;
    Ok(())
}

#[test]
fn a_guard_is_had_when_another_goes() -> Outcome {
    let rig = Rig::new(1);
    let buffer = rig.memory(0, 16);
    let write = rig.runtime.write(&buffer, PATIENCE)?;
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| rig.runtime.read(&buffer, PATIENCE).map(|guard| guard.to_vec()));
        let mut write = write;
        write.write(0, &[9; 16]).expect("it fits");
        drop(write);
        let bytes = waits.join().expect("it does not panic").expect("the writer went").expect("it fits");
        assert_eq!(bytes, [9; 16]);
    });
    Ok(())
}

#[test]
fn guards_are_for_memory_that_the_host_reaches_and_for_ranges_inside() -> Outcome {
    let rig = Rig::new(1);
    let placement = MemoryPlacement::Device(rig.devices[0].info().id);
    let hidden = rig.runtime.allocate(&placement, 16)?;
    assert!(matches!(rig.runtime.read(hidden.view(), PATIENCE), Err(MapError::Range(_))));
    let buffer = rig.memory(0, 16);
    let guard = rig.runtime.read(&buffer.slice(4..12)?, PATIENCE)?;
    assert_eq!(guard.size(), 8);
    assert!(guard.read(4, &mut [0; 8]).is_err() && guard.read(9, &mut []).is_err());
    guard.read(8, &mut [])?;
    let stranger = Rig::new(1).memory(0, 16);
    let refused = rig.runtime.read(&stranger, Duration::ZERO);
    assert!(matches!(refused, Err(MapError::Record(_))), "{refused:?}");
    Ok(())
}
