//! Whether this process is the one that joined, or a fork of it.

#[cfg(target_os = "linux")]
use std::{
    ptr::{self, NonNull},
    sync::atomic::{AtomicU32, Ordering},
};

/// The process that joined.
#[derive(Debug)]
pub(crate) struct Origin {
    pub(crate) process: u32,
    #[cfg(target_os = "linux")]
    page: Option<Page>,
}

impl Origin {
    pub(crate) fn here() -> Self {
        Self {
            process: std::process::id(),
            #[cfg(target_os = "linux")]
            page: Page::new(),
        }
    }

    pub(crate) fn is_here(&self) -> bool {
        #[cfg(target_os = "linux")]
        if let Some(page) = &self.page {
            return page.is_kept();
        }
        std::process::id() == self.process
    }
}

/// Memory that the system clears in forks. It is asked before every call, where asking for the process number took a
/// tenth of a microsecond.
#[cfg(target_os = "linux")]
#[derive(Debug)]
struct Page(NonNull<AtomicU32>);

#[cfg(target_os = "linux")]
const PAGE_BYTES: usize = 4096;

// SAFETY: it is a mapping that belongs to no thread, and is used as an atomic.
#[cfg(target_os = "linux")]
unsafe impl Send for Page {}
// SAFETY: as above.
#[cfg(target_os = "linux")]
unsafe impl Sync for Page {}

#[cfg(target_os = "linux")]
impl Page {
    /// Nothing where the system cannot do it.
    fn new() -> Option<Self> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

        // SAFETY: a new mapping at an address that the system chooses changes no memory that anybody has.
        let start = unsafe {
            mmap_anonymous(ptr::null_mut(), PAGE_BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let page = Self(NonNull::new(start.ok()?)?.cast());
        // SAFETY: the page was mapped just now, and nothing that is in it matters to anybody.
        unsafe { madvise(page.0.as_ptr().cast(), PAGE_BYTES, Advice::LinuxWipeOnFork) }.ok()?;
        page.word().store(1, Ordering::Relaxed);
        Some(page)
    }

    fn is_kept(&self) -> bool {
        self.word().load(Ordering::Relaxed) == 1
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: it is mapped until it is dropped, aligned, and every bit pattern is valid.
        unsafe { self.0.as_ref() }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and references to it borrow the page.
        let _unmapped = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), PAGE_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_process_that_made_it() {
        assert!(Origin::here().is_here());
    }
}
