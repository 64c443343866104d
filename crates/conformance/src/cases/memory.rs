//! Allocating, and what the host sees of it.

use std::sync::Arc;

use warpweft_core_types::{
    AllocError, BufferDesc, BufferView, Bytes, CopyRegion, Features, FillRegion, HostMemory, MemoryKind, Op,
    RangeError,
};

use crate::{
    context::{Context, allocate, gate, pattern},
    harness::{Case, Verdict},
};

pub(super) const CASES: &[Case] = &[
    Case::new("memory::is_what_was_asked_for", is_what_was_asked_for).covers(&[
        "Device::allocate",
        "Buffer::device",
        "Buffer::size",
        "Buffer::kind",
    ]),
    Case::new("memory::starts_zeroed", starts_zeroed).needs(Features::HOST_VISIBLE_MEMORY),
    Case::new("memory::is_counted", is_counted).covers(&["Device::memory"]),
    Case::new("memory::no_bytes_are_refused", no_bytes_are_refused),
    Case::new("memory::running_out_is_an_error_that_passes", running_out_is_an_error_that_passes),
    Case::new("memory::only_host_visible_is_mapped", only_host_visible_is_mapped)
        .needs(Features::HOST_VISIBLE_MEMORY)
        .covers(&["Buffer::mapping"]),
    Case::new(
        "memory::host_visible_without_the_feature_is_refused",
        host_visible_without_the_feature_is_refused,
    ),
    Case::new("memory::the_host_reads_what_it_wrote", the_host_reads_what_it_wrote)
        .needs(Features::HOST_VISIBLE_MEMORY),
    Case::new("memory::uploads_arrive", uploads_arrive).needs(Features::HOST_VISIBLE_MEMORY),
    Case::new("memory::lives_while_work_uses_it", lives_while_work_uses_it),
    Case::new("memory::import_shares_bytes", import_shares_bytes)
        .needs(Features::HOST_IMPORT)
        .devices(2)
        .covers(&["HostImport::import", "HostImport::alignment"]),
    Case::new("memory::imports_do_not_hide_overlaps", imports_do_not_hide_overlaps)
        .needs(Features::HOST_IMPORT)
        .devices(2),
    Case::new("memory::import_refuses_what_does_not_fit", import_refuses_what_does_not_fit)
        .needs(Features::HOST_IMPORT)
        .covers(&["HostImport::import"]),
];

fn is_what_was_asked_for(cx: &Context) -> Verdict {
    let buffer = allocate(cx.device(0), BufferDesc::device(1000))?;
    assert_eq!((buffer.device(), buffer.size(), buffer.kind()), (cx.infos[0].id, 1000, MemoryKind::Device));
    Ok(())
}

fn starts_zeroed(cx: &Context) -> Verdict {
    for size in [1, 4097, 100_000] {
        // Used memory that is given back must not show through.
        let used = cx.upload(0, &pattern(usize::try_from(size)?, 7))?;
        drop(used);
        let fresh = cx.memory(0, size)?;
        assert!(cx.download(0, &fresh)?.iter().all(|&byte| byte == 0), "{size} bytes");
    }
    Ok(())
}

fn is_counted(cx: &Context) -> Verdict {
    let before = cx.device(0).memory()?;
    assert!(before.free <= before.capacity && before.capacity == cx.infos[0].memory, "{before:?}");
    let size = 64 << 20;
    let buffer = allocate(cx.device(0), BufferDesc::device(size))?;
    let during = cx.device(0).memory()?;
    // Other programs may use a real device too, so only the direction is sure.
    assert!(during.free < before.free, "{before:?} {during:?}");
    drop(buffer);
    Ok(())
}

fn no_bytes_are_refused(cx: &Context) -> Verdict {
    let error = cx.device(0).allocate(&BufferDesc::device(0)).err().ok_or("it was granted")?;
    assert!(matches!(error, AllocError::ZeroSize { device } if device == cx.infos[0].id), "{error}");
    Ok(())
}

fn running_out_is_an_error_that_passes(cx: &Context) -> Verdict {
    let capacity = cx.device(0).memory()?.capacity;
    for size in [capacity.0 + 1, u64::MAX] {
        let error = cx.device(0).allocate(&BufferDesc::device(size)).err().ok_or("it was granted")?;
        let named = matches!(&error, AllocError::OutOfMemory { device, requested, .. }
            if *device == cx.infos[0].id && *requested == Bytes(size));
        assert!(named, "{error}");
    }
    allocate(cx.device(0), BufferDesc::device(4096))?;
    Ok(())
}

fn only_host_visible_is_mapped(cx: &Context) -> Verdict {
    let memory = cx.memory(0, 4096)?;
    assert!(memory.buffer().mapping().is_none());
    let refused = Err(RangeError::NotHostVisible { device: cx.infos[0].id });
    assert_eq!(memory.write(&[1]), refused);
    assert_eq!(memory.read(&mut [0]), refused);
    let window = cx.window(0, 4096)?;
    assert_eq!(window.buffer().mapping().map(|mapping| mapping.len()), Some(4096));
    Ok(())
}

fn host_visible_without_the_feature_is_refused(cx: &Context) -> Verdict {
    let granted = cx.device(0).allocate(&BufferDesc::host_visible(16));
    match granted {
        Ok(_) => assert!(cx.device(0).features().contains(Features::HOST_VISIBLE_MEMORY)),
        Err(AllocError::UnsupportedKind { device, kind }) => {
            assert_eq!((device, kind), (cx.infos[0].id, MemoryKind::HostVisible));
            assert!(!cx.device(0).features().contains(Features::HOST_VISIBLE_MEMORY));
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

fn the_host_reads_what_it_wrote(cx: &Context) -> Verdict {
    let window = cx.window(0, 1000)?;
    let part = window.slice(3..903)?;
    let bytes = pattern(900, 1);
    part.write(&bytes)?;
    let mut back = vec![0; 900];
    part.read(&mut back)?;
    assert!(back == bytes);
    assert!(part.write(&[0; 901]).is_err() && part.read(&mut [0; 901]).is_err());
    Ok(())
}

fn lives_while_work_uses_it(cx: &Context) -> Verdict {
    let (lane, gate) = (cx.lane(0)?, gate(cx.device(0))?);
    let memory = cx.memory(0, 1 << 20)?;
    let weak = Arc::downgrade(memory.buffer());
    let fill = Op::Fill(FillRegion::bytes(&memory, 1));
    let (_, done) = lane.submit(std::slice::from_ref(&gate), &[fill])?;
    drop(memory);
    assert!(weak.upgrade().is_some(), "work that waits keeps its memory");
    gate.semaphore.signal(gate.value)?;
    done.wait(crate::context::PATIENCE)?;
    Ok(())
}

fn import_shares_bytes(cx: &Context) -> Verdict {
    let alignment = cx.device(1).host_import().ok_or("the family is absent")?.alignment();
    let original = allocate(cx.device(0), BufferDesc::host_visible(2 * alignment))?;
    let memory = HostMemory::of_buffer(Arc::clone(&original)).ok_or("it has no mapping")?;
    let imported = cx.device(1).host_import().ok_or("the family is absent")?.import(memory)?;
    assert_eq!((imported.device(), imported.kind()), (cx.infos[1].id, MemoryKind::HostVisible));
    let (original, imported) = (BufferView::whole(original), BufferView::whole(imported));
    cx.lane(1)?.run(&[Op::Fill(FillRegion::bytes(&imported, 9))])?;
    let mut bytes = vec![0; usize::try_from(original.size())?];
    original.read(&mut bytes)?;
    assert!(bytes.iter().all(|&byte| byte == 9));
    // The import keeps the memory alive.
    drop(original);
    imported.read(&mut bytes)?;
    assert!(bytes.iter().all(|&byte| byte == 9));
    Ok(())
}

fn imports_do_not_hide_overlaps(cx: &Context) -> Verdict {
    let family = cx.device(1).host_import().ok_or("the family is absent")?;
    let original = allocate(cx.device(0), BufferDesc::host_visible(4 * family.alignment()))?;
    let memory = HostMemory::of_buffer(Arc::clone(&original)).ok_or("it has no mapping")?;
    let (original, imported) = (BufferView::whole(original), BufferView::whole(family.import(memory)?));
    assert_eq!(original.overlap(&imported), original.size());
    let (low, high) = (original.slice(0..100)?, imported.slice(60..160)?);
    assert_eq!(CopyRegion::new(&low, &high).err(), Some(RangeError::Overlap { bytes: 40 }));
    CopyRegion::new(&low, &imported.slice(100..200)?)?;
    Ok(())
}

fn import_refuses_what_does_not_fit(cx: &Context) -> Verdict {
    let family = cx.device(0).host_import().ok_or("the family is absent")?;
    let odd = allocate(cx.device(0), BufferDesc::host_visible(family.alignment() + 1))?;
    let memory = HostMemory::of_buffer(odd).ok_or("it has no mapping")?;
    let error = family.import(memory).err().ok_or("it was imported")?;
    assert!(matches!(error, AllocError::CannotImport { device, .. } if device == cx.infos[0].id), "{error}");
    Ok(())
}

/// Memory for the host to write and the device to read, written again and again.
fn uploads_arrive(cx: &Context) -> Verdict {
    let upload = BufferView::whole(allocate(cx.device(0), BufferDesc::upload(10_000))?);
    assert_eq!((upload.buffer().kind(), upload.size()), (MemoryKind::Upload, 10_000));
    assert!(upload.buffer().kind().is_host_visible());
    let target = cx.memory(0, 10_000)?;
    for seed in 0..20 {
        let bytes = pattern(10_000, seed);
        upload.write(&bytes)?;
        cx.lane(0)?.run(&[Op::Copy(CopyRegion::new(&upload, &target)?)])?;
        assert!(cx.download(0, &target)? == bytes, "round {seed}");
    }
    Ok(())
}
