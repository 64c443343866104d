//! Memory that all ranks have: of one process, or of a file without a name that several map.

#[cfg(not(unix))]
use std::io;
#[cfg(target_os = "linux")]
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use crate::{
    HostError,
    layout::{Channel, Common, Layout, Station},
    span::Span,
    step::Line,
};

/// The memory of one communicator, zeroed when it is made.
#[derive(Debug)]
pub(crate) struct Region {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it is plain memory that no thread owns. What lies in it is reached as atomics, or as `Span`s whose users say
// who else has them.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

#[cfg(unix)]
impl Region {
    /// Memory of this process.
    pub(crate) fn of_process(layout: Layout) -> Result<Self, HostError> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

        // SAFETY: a new mapping at an address that the system chooses changes no memory that anybody has.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                layout.total(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        Self::mapped(base, layout)
    }

    fn mapped(base: rustix::io::Result<*mut std::ffi::c_void>, layout: Layout) -> Result<Self, HostError> {
        let base = base.map_err(|error| HostError::Memory { what: "mmap", source: error.into() })?;
        let base =
            NonNull::new(base.cast()).expect("the system maps nothing at address 0 unless it is told to");
        Ok(Self { base, layout })
    }
}

#[cfg(unix)]
impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and every reference into it borrows the region.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.layout.total()) };
        if let Err(error) = unmapped {
            tracing::warn!(%error, "shared memory could not be unmapped");
        }
    }
}

#[cfg(target_os = "linux")]
impl Region {
    /// Memory that other processes can map by the descriptor.
    pub(crate) fn of_file(layout: Layout) -> Result<(Self, OwnedFd), HostError> {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

        let failed = |what| move |error: rustix::io::Errno| HostError::Memory { what, source: error.into() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create(c"warpweft-host-collectives", flags).map_err(failed("memfd_create"))?;
        ftruncate(&file, layout.total() as u64).map_err(failed("ftruncate"))?;
        // Nobody can make it shorter, so that no access behind its end kills a process.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        Ok((Self::map(&file, layout)?, file))
    }

    /// Maps what another process has made.
    pub(crate) fn from_file(file: &OwnedFd, layout: Layout) -> Result<Self, HostError> {
        use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

        let failed = |what| move |error: rustix::io::Errno| HostError::Memory { what, source: error.into() };
        let bytes = fstat(file).map_err(failed("fstat"))?.st_size;
        if usize::try_from(bytes) != Ok(layout.total()) {
            return Err(HostError::Unexpected(format!("{bytes} bytes in place of {}", layout.total())));
        }
        let seals = fcntl_get_seals(file).map_err(failed("fcntl(F_GET_SEALS)"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(HostError::Unexpected("it can be made shorter".into()));
        }
        Self::map(file, layout)
    }

    fn map(file: &OwnedFd, layout: Layout) -> Result<Self, HostError> {
        use rustix::mm::{MapFlags, ProtFlags, mmap};

        // SAFETY: a new mapping at an address that the system chooses changes no memory that anybody has.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                layout.total(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file.as_fd(),
                0,
            )
        };
        Self::mapped(base, layout)
    }
}

#[cfg(not(unix))]
impl Region {
    /// Memory of this process.
    pub(crate) fn of_process(layout: Layout) -> Result<Self, HostError> {
        let out_of_memory = || io::Error::from(io::ErrorKind::OutOfMemory);
        let failed = || HostError::Memory { what: "allocation", source: out_of_memory() };
        let block = std::alloc::Layout::from_size_align(layout.total(), 64).map_err(|_| failed())?;
        // SAFETY: the layout is not empty: it has at least what is common.
        let base = unsafe { std::alloc::alloc_zeroed(block) };
        Ok(Self { base: NonNull::new(base).ok_or_else(failed)?, layout })
    }
}

#[cfg(not(unix))]
impl Drop for Region {
    fn drop(&mut self) {
        let block =
            std::alloc::Layout::from_size_align(self.layout.total(), 64).expect("it was made with it");
        // SAFETY: it was allocated with this layout, and every reference into it borrows the region.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), block) };
    }
}

impl Region {
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn common(&self) -> &Common {
        // SAFETY: it lies there by the layout and is made of atomics, of which every bit pattern is valid.
        unsafe { self.place(self.layout.common()).cast().as_ref() }
    }

    pub(crate) fn station(&self, rank: u32) -> &Station {
        // SAFETY: as for `common`.
        unsafe { self.place(self.layout.station(rank)).cast().as_ref() }
    }

    pub(crate) fn line(&self, rank: u32, step: u64) -> &Line {
        // SAFETY: as for `common`.
        unsafe { self.place(self.layout.line(rank, step)).cast().as_ref() }
    }

    pub(crate) fn channel(&self, from: u32, to: u32) -> &Channel {
        // SAFETY: as for `common`.
        unsafe { self.place(self.layout.channel(from, to)).cast().as_ref() }
    }

    pub(crate) fn fragment_line(&self, from: u32, to: u32, fragment: u64) -> &Line {
        // SAFETY: as for `common`.
        unsafe { self.place(self.layout.fragment_line(from, to, fragment)).cast().as_ref() }
    }

    /// A rank's slot for steps of this parity.
    pub(crate) fn slot(&self, rank: u32, step: u64) -> Span {
        Span::new(self.place(self.layout.slot(rank, step)), self.layout.slot_bytes)
    }

    pub(crate) fn fragment(&self, from: u32, to: u32, fragment: u64) -> Span {
        Span::new(self.place(self.layout.fragment(from, to, fragment)), self.layout.fragment_bytes)
    }

    fn place(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.layout.total(), "ranks are checked before they are looked up");
        // SAFETY: the region has more bytes than that.
        unsafe { self.base.add(offset) }
    }
}
