//! Ordinary memory of this process, in whole pages, for devices to import.
//!
//! Memory that a driver maps is often of no use to other drivers: they refuse to import it. Ordinary pages can be
//! imported by every device that imports host memory at all, and registered with CUDA.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
    sync::Arc,
};

use warpweft_core_types::HostMemory;

/// The owner of the pages.
struct Pages {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it is an address that is only used to free the memory, by whoever drops the value last.
#[expect(unsafe_code, reason = "the pointer stands for memory that it owns")]
unsafe impl Send for Pages {}

// SAFETY: as for `Send`; a shared reference gives out nothing.
#[expect(unsafe_code, reason = "the pointer stands for memory that it owns")]
unsafe impl Sync for Pages {}

/// At least `size` bytes in whole pages of `page` bytes, zeroed; `None` where the system has no more.
#[expect(unsafe_code, reason = "allocates, and hands the memory out as shared")]
pub(crate) fn allocate(size: u64, page: u64) -> Option<HostMemory> {
    let len = usize::try_from(size.checked_next_multiple_of(page)?).ok().filter(|&len| len > 0)?;
    let layout = Layout::from_size_align(len, usize::try_from(page).ok()?).ok()?;
    // SAFETY: the layout has a size.
    let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
    let owner = Arc::new(Pages { base, layout });
    // SAFETY: allocated just now with this length, freed with the owner, and reached by nobody else.
    Some(unsafe { HostMemory::new(base, len, owner) })
}

impl Drop for Pages {
    #[expect(unsafe_code, reason = "frees what it owns")]
    fn drop(&mut self) {
        // SAFETY: allocated by `allocate` with this layout, freed once. Devices that imported the memory held it.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
