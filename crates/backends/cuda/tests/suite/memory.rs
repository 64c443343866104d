//! Memory: imports, sizes, and what is left when something fails.

use std::{fs, sync::Arc, time::Instant};

use warpweft_core_types::{
    AllocError, Backend, BufferDesc, BufferView, CopyRegion, Features, FillRegion, HostMemory, Op,
};
use warpweft_cuda::CudaBackend;
use warpweft_host::HostBackend;
use warpweft_stand_in_cuda::StandIn;

use crate::{
    other::{Other, memory},
    support::{Lane, Outcome, PATIENCE, Pages, backend, config, served, until},
};

/// Two devices import the same memory; the first lets go; the second goes on.
#[test]
fn a_second_import_outlives_the_first() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let (one, mut two) = (Lane::open(&backend, 0)?, Lane::open(&backend, 1)?);
    let pages = Pages::new(1);
    let first = one.device.host_import().ok_or("absent")?.import(pages.part(0, 1))?;
    let second = BufferView::whole(two.device.host_import().ok_or("absent")?.import(pages.part(0, 1))?);
    drop(first);
    served(&stand_in, &one.device)?;
    two.submit(&[Op::Fill(FillRegion::bytes(&second, 7))])?.wait(PATIENCE)?;
    let mut byte = [0];
    second.read(&mut byte)?;
    assert_eq!(byte, [7]);
    Ok(())
}

/// Import, drop, import again: the undoing of the first is still to come.
#[test]
fn memory_can_be_imported_again_at_once() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let pages = Pages::new(1);
    for round in 0..200 {
        let import = lane.device.host_import().ok_or("absent")?.import(pages.part(0, 1))?;
        drop(import);
        let again = BufferView::whole(lane.device.host_import().ok_or("absent")?.import(pages.part(0, 1))?);
        if round % 10 == 0 {
            served(&stand_in, &lane.device)?;
        }
        lane.submit(&[Op::Fill(FillRegion::bytes(&again, 7))])
            .and_then(|p| Ok(p.wait(PATIENCE)?))
            .map_err(|e| format!("round {round}: {e}"))?;
    }
    Ok(())
}

/// The first and the last page are pinned, the one between is not.
#[test]
fn a_gap_between_pinned_pages_is_found() -> Outcome {
    let backend = backend(&StandIn::load()?);
    let mut lane = Lane::open(&backend, 0)?;
    let pages = Pages::new(3);
    let family = lane.device.host_import().ok_or("absent")?;
    let (_a, _c) = (family.import(pages.part(0, 1))?, family.import(pages.part(2, 1))?);
    let all = match family.import(pages.part(0, 3)) {
        Err(AllocError::CannotImport { .. }) => return Ok(()),
        other => BufferView::whole(other?),
    };
    lane.submit(&[Op::Fill(FillRegion::bytes(&all, 7))])?.wait(PATIENCE)?;
    Ok(())
}

/// Two backends of one driver; a buffer of device 1 of the one in a queue of device 0 of the other.
#[test]
fn buffers_of_another_backend_value_are_refused_or_work() -> Outcome {
    let stand_in = StandIn::load()?;
    let (one, two) = (backend(&stand_in), backend(&stand_in));
    let (mut near, far) = (Lane::open(&one, 0)?, Lane::open(&two, 1)?);
    let theirs = far.memory(BufferDesc::device(4096))?;
    let mine = near.memory(BufferDesc::device(4096))?;
    let Ok(point) = near.submit(&[Op::Copy(CopyRegion::new(&theirs, &mine)?)]) else { return Ok(()) };
    let outcome = point.wait(PATIENCE);
    assert!(near.device.failure().is_none(), "the device is lost: {:?}", near.device.failure());
    Ok(outcome?)
}

/// One memory of a device behind two buffers.
#[test]
fn overlap_of_two_imports_is_found() -> Outcome {
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    let family = lane.device.interop().ok_or("absent")?;
    let address = Other::of(&stand_in).allocate(family.device_handle().value, 0, 4096);
    let [a, b] =
        [0, 0].map(|_| family.import_buffer(memory(address, 4096, Arc::new(()))).map(BufferView::whole));
    let (a, b) = (a?, b?);
    assert_eq!(a.overlap(&b), 4096, "native imports");
    Ok(())
}

/// What a failing step of an allocation leaves behind.
#[test]
fn a_pin_that_fails_half_way_leaves_nothing() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let device = backend.open(0, Features::empty())?;
    let before = stand_in.live("ranges");
    for _ in 0..10 {
        stand_in.fail("cuMemHostGetDevicePointer_v2", 0, 2);
        device.allocate(&BufferDesc::host_visible(1 << 20)).map(drop).unwrap_err();
    }
    // By the service thread.
    until(|| stand_in.live("ranges") == before);
    Ok(())
}

#[test]
fn a_pool_that_fails_half_way_leaves_nothing() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    stand_in.fail("cuMemPoolSetAttribute", 0, 1);
    backend.open(0, Features::empty()).map(drop).unwrap_err();
    until(|| stand_in.live("pools") == 0);
    Ok(())
}

/// Pinned memory that is kept for reuse, while more cannot be had.
#[test]
fn kept_pinned_memory_is_given_back_before_running_out() -> Outcome {
    let stand_in = StandIn::load()?;
    let device = backend(&stand_in).open(0, Features::empty())?;
    drop(device.allocate(&BufferDesc::host_visible(64 << 20))?);
    stand_in.fail("cuMemHostAlloc", 0, 2);
    device.allocate(&BufferDesc::host_visible(1 << 20))?;
    Ok(())
}

/// A drop of a host buffer's import from another backend in many orders.
#[test]
fn imports_of_host_backend_buffers_in_two_devices() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let mut lanes = [Lane::open(&backend, 0)?, Lane::open(&backend, 1)?];
    let stranger = HostBackend::with_devices(1)?.open(0, Features::empty())?;
    let theirs = stranger.allocate(&BufferDesc::host_visible(1 << 16))?;
    for turn in 0..4 {
        let mut imports: Vec<_> = lanes
            .iter()
            .map(|lane| {
                let memory = HostMemory::of_buffer(Arc::clone(&theirs)).unwrap();
                Ok(Some(BufferView::whole(lane.device.host_import().unwrap().import(memory)?)))
            })
            .collect::<Outcome<_>>()?;
        imports[turn % 2] = None;
        served(&stand_in, &lanes[turn % 2].device)?;
        let last = 1 - turn % 2;
        let view = imports[last].clone().unwrap();
        lanes[last]
            .submit(&[Op::Fill(FillRegion::bytes(&view, 7))])
            .and_then(|p| Ok(p.wait(PATIENCE)?))
            .map_err(|e| format!("turn {turn}: {e}"))?;
    }
    Ok(())
}

/// Hostile cache folders.
#[test]
fn cache_folders_of_every_kind() -> Outcome {
    let stand_in = StandIn::load()?;
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    std::os::unix::fs::symlink(at("loop-b"), at("loop-a"))?;
    std::os::unix::fs::symlink(at("loop-a"), at("loop-b"))?;
    fs::write(at("file"), "x")?;
    fs::create_dir(at("many"))?;
    for number in 0..600 {
        fs::create_dir(at("many").join(number.to_string()))?;
    }
    for path in [
        at("loop-a"),
        at("file"),
        at("file").join("deep"),
        at("many"),
        "/dev/null".into(),
        "/proc/self".into(),
        at(&"long".repeat(100)),
        "relative/x\0y".into(),
    ] {
        let started = Instant::now();
        let backend = CudaBackend::with_config(&config(&stand_in).with_cache(&path))?;
        Lane::open(&backend, 0)?.count_to_four().map_err(|e| format!("{path:?}: {e}"))?;
        assert!(started.elapsed() < PATIENCE);
    }
    Ok(())
}

/// Many writers of one folder at once.
#[test]
fn many_writers_of_one_cache() -> Outcome {
    let folder = tempfile::tempdir()?;
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let path = folder.path().join("kept");
            std::thread::spawn(move || -> Outcome {
                for _ in 0..10 {
                    let stand_in = StandIn::load()?;
                    let backend = CudaBackend::with_config(&config(&stand_in).with_cache(&path))?;
                    Lane::open(&backend, 0)?.count_to_four()?;
                    for entry in fs::read_dir(&path)?.flatten() {
                        // Another thread may have removed it.
                        let _cut = fs::OpenOptions::new()
                            .write(true)
                            .open(entry.path())
                            .and_then(|file| file.set_len(40));
                    }
                }
                Ok(())
            })
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| "panic")??;
    }
    Ok(())
}
