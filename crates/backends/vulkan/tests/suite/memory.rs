//! Memory: sizes that nothing has, and host memory that is imported more than once.

use warpweft_core_types::{AllocError, BufferDesc, BufferView, Deadline, Features, FillRegion, Op};
use warpweft_vulkan::VulkanConfig;

use crate::support::{Need, PATIENCE, Test, Verdict, host_pages, open, run, words};

pub(crate) const TESTS: &[Test] = &[
    Test { name: "memory::sizes_that_nothing_has_are_refused", body: sizes_that_nothing_has_are_refused },
    Test { name: "memory::host_memory_is_imported_again", body: host_memory_is_imported_again },
    Test { name: "memory::a_crooked_import_is_refused", body: a_crooked_import_is_refused },
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
