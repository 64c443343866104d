//! Memory: sizes that nothing has, and host memory that is imported more than once.

use std::sync::Arc;

use warpweft_core_types::{
    AllocError, Backend as _, BufferDesc, BufferView, Deadline, Features, FillRegion, HostMemory, Op,
};
use warpweft_vulkan::VulkanConfig;

use crate::support::{Need, PATIENCE, Test, Verdict, host_pages, open, open_backend, run, words};

pub(crate) const TESTS: &[Test] = &[
    Test { name: "memory::sizes_that_nothing_has_are_refused", body: sizes_that_nothing_has_are_refused },
    Test { name: "memory::host_memory_is_imported_again", body: host_memory_is_imported_again },
    Test { name: "memory::a_crooked_import_is_refused", body: a_crooked_import_is_refused },
    Test { name: "memory::an_import_that_is_too_large_is_refused", body: an_import_that_is_too_large },
    Test { name: "memory::devices_that_see_the_same_imports_go", body: devices_that_see_the_same_imports_go },
];

fn sizes_that_nothing_has_are_refused() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    for size in [1 << 62, (1 << 63) - 1, 1 << 63, u64::MAX - 255, u64::MAX - 3, u64::MAX - 1, u64::MAX] {
        let error = device.allocate(&BufferDesc::device(size)).err().ok_or("it was granted")?;
        assert!(matches!(error, AllocError::OutOfMemory { .. }), "{size}: {error}");
        for desc in [BufferDesc::host_visible(size), BufferDesc::upload(size)] {
            let error = device.allocate(&desc).err().ok_or("it was granted")?;
            assert!(matches!(error, AllocError::HostOutOfMemory { .. }), "{size}: {error}");
        }
        if let Some(family) = device.sharing() {
            let error = family.allocate_shareable(size).err().ok_or("it was granted")?;
            assert!(matches!(error, AllocError::OutOfMemory { .. }), "{size}: {error}");
        }
    }
    Ok(())
}

/// The same range and parts of it are the same memory; what sticks out of a range is refused.
fn host_memory_is_imported_again() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let family = device.host_import().ok_or_else(|| Need::Missing(Features::HOST_IMPORT.to_string()))?;
    let page = family.alignment();
    let pages = host_pages(page, 4)?;
    let whole = BufferView::whole(family.import(pages(0..3))?);
    let again = BufferView::whole(family.import(pages(0..3))?);
    let part = BufferView::whole(family.import(pages(1..2))?);
    let error = family.import(pages(2..4)).err().ok_or("it was imported")?;
    assert!(matches!(error, AllocError::CannotImport { .. }), "{error}");
    // The first one's buffer may go before the others.
    drop(whole);
    run(&device, Op::Fill(FillRegion::words(&again, 5)?))?;
    run(&device, Op::Fill(FillRegion::words(&part, 6)?))?;
    let page = usize::try_from(page / 4)?;
    let seen = words(&again)?;
    assert!(seen.chunks(page).zip([5, 6, 5]).all(|(words, expected)| words.iter().all(|&w| w == expected)));
    drop((again, part));
    // Work that is over lets go of it a moment later.
    let deadline = Deadline::within(PATIENCE);
    while let Err(error) = family.import(pages(2..4)) {
        if deadline.is_past() {
            return Err(error.into());
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn a_crooked_import_is_refused() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let family = device.host_import().ok_or_else(|| Need::Missing(Features::HOST_IMPORT.to_string()))?;
    let pages = host_pages(family.alignment() / 2, 5)?;
    for crooked in [0..1, 1..3, 0..3] {
        let memory = pages(crooked.clone());
        let fits = (memory.base().addr().get() as u64).is_multiple_of(family.alignment())
            && (memory.len() as u64).is_multiple_of(family.alignment());
        let result = family.import(memory);
        assert_eq!(result.is_ok(), fits, "{crooked:?}: {result:?}");
    }
    Ok(())
}

/// The pages are never touched, so that nobody has to have them.
fn an_import_that_is_too_large() -> Verdict {
    let (backend, device) = open(&VulkanConfig::default())?;
    let family = device.host_import().ok_or_else(|| Need::Missing(Features::HOST_IMPORT.to_string()))?;
    let most = backend.capabilities(0).ok_or("device 0 is there")?.allocation_bytes;
    let page = family.alignment();
    let count = most / page + 1;
    if most > 4 << 30 {
        return Err(Need::Missing("a device with small allocations".to_owned()));
    }
    let error = family.import(host_pages(page, count)?(0..count)).err().ok_or("it was imported")?;
    assert!(matches!(error, AllocError::CannotImport { .. }), "{error}");
    Ok(())
}

/// Each of two devices uses what the other one has imported, once pages of nobody's, once a buffer of one of them. What
/// they make of it for that must not hold the other's.
fn devices_that_see_the_same_imports_go() -> Verdict {
    let backend = open_backend(&VulkanConfig::default().with_copies(2))?;
    let messages = backend.messages();
    let second = u32::try_from(backend.devices()?.len() / 2)?;
    for of_a_buffer in [false, true] {
        let (one, other) = (backend.open(0, Features::empty())?, backend.open(second, Features::empty())?);
        let (Some(family), Some(others)) = (one.host_import(), other.host_import()) else {
            return Err(Need::Missing(Features::HOST_IMPORT.to_string()));
        };
        let pages = host_pages(family.alignment(), 256)?;
        let own = match of_a_buffer {
            true => one.allocate(&BufferDesc::host_visible(1 << 20))?,
            false => family.import(pages(0..256))?,
        };
        let memory = HostMemory::of_buffer(Arc::clone(&own)).filter(|_| of_a_buffer);
        let import = BufferView::whole(others.import(memory.unwrap_or_else(|| pages(0..256)))?);
        let own = BufferView::whole(own);
        run(&one, Op::Fill(FillRegion::words(&import, 5)?))?;
        run(&other, Op::Fill(FillRegion::words(&own.slice(4..8)?, 6)?))?;
        assert_eq!(words(&own)?[..3], [5, 6, 5]);
    }
    drop(backend);
    let deadline = Deadline::within(PATIENCE);
    while !messages.are_complete() && !deadline.is_past() {
        std::thread::yield_now();
    }
    assert!(messages.are_complete(), "a device that nobody uses is still there");
    Ok(())
}
