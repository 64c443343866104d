//! An allocator that counts, so that a benchmark can say what a submission allocates.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering},
};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static HERE: Cell<u64> = const { Cell::new(0) };
}

/// Allocations of this thread so far.
pub(crate) fn count_here() -> u64 {
    HERE.get()
}

fn note() {
    ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    // A thread that is ending counts no more.
    let _ending = HERE.try_with(|here| here.set(here.get() + 1));
}

/// Allocations of this process so far, by all threads.
pub(crate) fn count() -> u64 {
    ALLOCATIONS.load(Ordering::Relaxed)
}

pub(crate) struct Counting;

// SAFETY: every call goes to the system's allocator as it came.
#[expect(unsafe_code, reason = "an allocator is an unsafe trait")]
unsafe impl GlobalAlloc for Counting {
    /// # Safety
    ///
    /// - As for the system's allocator.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's duties are the system's allocator's.
        unsafe { System.alloc(layout) }
    }

    /// # Safety
    ///
    /// - As for the system's allocator.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's duties are the system's allocator's.
        unsafe { System.dealloc(pointer, layout) }
    }

    /// # Safety
    ///
    /// - As for the system's allocator.
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: the caller's duties are the system's allocator's.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
