//! Memory of host devices: arenas with a capacity, and the copies that stand for their copy engines.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
#[cfg(target_os = "linux")]
use std::{io, os::fd::OwnedFd, ptr};

#[cfg(target_os = "linux")]
use rustix::{
    fs::{self, MemfdFlags, SealFlags},
    mm::{self, MapFlags, ProtFlags},
};
use warpweft_core_types::{
    AllocError, Buffer, BufferDesc, BufferView, Bytes, DeviceId, HostMapping, HostMemory, MemoryKind,
    MemoryUsage,
};

/// Every buffer starts at a multiple of this: a cache line pair, as wide as any vector we run.
pub(crate) const ALIGNMENT: u64 = 256;

/// Buffers of a page or more start at a page, so that other backends can import them.
pub(crate) const PAGE: u64 = 4096;

/// The memory of one device: nothing but a count, since the allocator serves all of them.
#[derive(Debug)]
pub(crate) struct Arena {
    device: DeviceId,
    capacity: u64,
    used: AtomicU64,
}

impl Arena {
    pub(crate) fn new(device: DeviceId, capacity: Bytes) -> Self {
        Self { device, capacity: capacity.0, used: AtomicU64::new(0) }
    }

    pub(crate) fn usage(&self) -> MemoryUsage {
        // Relaxed: a count that guards no other memory.
        let used = self.used.load(Ordering::Relaxed);
        MemoryUsage { capacity: Bytes(self.capacity), free: Bytes(self.capacity - used) }
    }

    pub(crate) fn allocate(self: &Arc<Self>, desc: &BufferDesc) -> Result<HostBuffer, AllocError> {
        if desc.size == 0 {
            return Err(AllocError::ZeroSize { device: self.device });
        }
        let share = self.reserve(desc.size)?;
        let no_block = AllocError::HostOutOfMemory { device: self.device, requested: Bytes(desc.size) };
        let block = Block::zeroed(desc.size).ok_or(no_block)?;
        Ok(HostBuffer {
            device: self.device,
            base: block.base,
            size: desc.size,
            kind: desc.kind,
            owner: Owner::Arena { _block: block, _share: share },
        })
    }

    /// Foreign memory takes nothing from the arena.
    pub(crate) fn import(&self, memory: HostMemory) -> Result<HostBuffer, AllocError> {
        if memory.is_empty() {
            return Err(AllocError::ZeroSize { device: self.device });
        }
        Ok(HostBuffer {
            device: self.device,
            base: memory.base(),
            size: memory.len() as u64,
            kind: MemoryKind::HostVisible,
            owner: Owner::Foreign(memory),
        })
    }

    /// Zeroed memory in a file of its own, which other processes can map.
    #[cfg(target_os = "linux")]
    pub(crate) fn allocate_shareable(self: &Arc<Self>, size: u64) -> Result<HostBuffer, AllocError> {
        if size == 0 {
            return Err(AllocError::ZeroSize { device: self.device });
        }
        let share = self.reserve(size)?;
        let no_file = |_| AllocError::HostOutOfMemory { device: self.device, requested: Bytes(size) };
        let file = SharedFile::create(size).map_err(no_file)?;
        Ok(self.shared(file, size, Some(share)))
    }

    /// Memory of a file that was made by [`Arena::allocate_shareable`], perhaps in another process.
    #[cfg(target_os = "linux")]
    pub(crate) fn import_shared(
        self: &Arc<Self>,
        size: u64,
        descriptor: OwnedFd,
    ) -> Result<HostBuffer, AllocError> {
        let refuse = |reason: String| AllocError::CannotImport { device: self.device, reason };
        let file = SharedFile::open(descriptor, size).map_err(refuse)?;
        Ok(self.shared(file, size, None))
    }

    #[cfg(target_os = "linux")]
    fn shared(&self, file: SharedFile, size: u64, share: Option<Share>) -> HostBuffer {
        HostBuffer {
            device: self.device,
            base: file.base,
            size,
            kind: MemoryKind::Device,
            owner: Owner::Shared { file, _share: share },
        }
    }

    fn reserve(self: &Arc<Self>, size: u64) -> Result<Share, AllocError> {
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(size).filter(|&total| total <= self.capacity)
            })
            .map_err(|_| self.out_of_memory(size))?;
        Ok(Share { arena: Arc::clone(self), size })
    }

    fn out_of_memory(&self, requested: u64) -> AllocError {
        let usage = self.usage();
        AllocError::OutOfMemory {
            device: self.device,
            requested: Bytes(requested),
            available: usage.free,
            capacity: usage.capacity,
        }
    }
}

/// A part of an arena's capacity, given back when dropped.
#[derive(Debug)]
struct Share {
    arena: Arc<Arena>,
    size: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.arena.used.fetch_sub(self.size, Ordering::Relaxed);
    }
}

/// Zeroed memory from the allocator.
#[derive(Debug)]
struct Block {
    base: NonNull<u8>,
    layout: Layout,
}

impl Block {
    #[expect(unsafe_code, reason = "the allocator is reached by raw calls")]
    fn zeroed(size: u64) -> Option<Self> {
        let alignment = if size >= PAGE { PAGE } else { ALIGNMENT };
        let layout =
            Layout::from_size_align(usize::try_from(size).ok()?, usize::try_from(alignment).ok()?).ok()?;
        // SAFETY: the layout's size is not zero (`Arena::allocate` refuses that).
        let base = unsafe { alloc_zeroed(layout) };
        NonNull::new(base).map(|base| Self { base, layout })
    }
}

impl Drop for Block {
    #[expect(unsafe_code, reason = "the allocator is reached by raw calls")]
    fn drop(&mut self) {
        // SAFETY: `base` came from `alloc_zeroed` with this very layout, and a `Block` is dropped once.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

// SAFETY: a `Block` is the only owner of its memory and has no thread affinity; the bytes are reached
// only through raw copies, `HostMapping` and kernels, all of which expect others to touch them too.
#[expect(unsafe_code, reason = "the raw pointer stands for device memory, see above")]
unsafe impl Send for Block {}

// SAFETY: as for `Send`; a shared reference gives out the address and nothing else.
#[expect(unsafe_code, reason = "the raw pointer stands for device memory, see above")]
unsafe impl Sync for Block {}

/// What keeps a buffer's memory alive.
#[derive(Debug)]
enum Owner {
    Arena {
        _block: Block,
        _share: Share,
    },
    #[cfg(target_os = "linux")]
    Shared {
        file: SharedFile,
        _share: Option<Share>,
    },
    Foreign(#[expect(dead_code, reason = "held for its drop")] HostMemory),
}

/// A sealed file in memory, mapped.
#[cfg(target_os = "linux")]
#[derive(Debug)]
struct SharedFile {
    descriptor: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

/// Nobody can make the file shorter under a mapping, in any process.
#[cfg(target_os = "linux")]
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

#[cfg(target_os = "linux")]
impl SharedFile {
    fn create(size: u64) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let descriptor = fs::memfd_create("warpweft", flags)?;
        fs::ftruncate(&descriptor, size)?;
        fs::fcntl_add_seals(&descriptor, SEALS)?;
        Self::map(descriptor, size)
    }

    fn open(descriptor: OwnedFd, size: u64) -> Result<Self, String> {
        let no_file = |error: rustix::io::Errno| format!("it is no file in memory: {error}");
        let seals = fs::fcntl_get_seals(&descriptor).map_err(no_file)?;
        let actual = fs::fstat(&descriptor).map_err(no_file)?.st_size;
        if !seals.contains(SEALS) {
            return Err("whoever made it can make it shorter while it is in use".to_owned());
        }
        if size == 0 || u64::try_from(actual).ok() != Some(size) {
            return Err(format!("it holds {actual} bytes and not {size}"));
        }
        Self::map(descriptor, size).map_err(|error| error.to_string())
    }

    #[expect(unsafe_code, reason = "maps a file")]
    fn map(descriptor: OwnedFd, size: u64) -> io::Result<Self> {
        let len = usize::try_from(size).map_err(io::Error::other)?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at a place of the system's choice; the file holds `len` bytes and is sealed
        // against becoming shorter.
        let base = unsafe { mm::mmap(ptr::null_mut(), len, protection, flags, &descriptor, 0) }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { descriptor, base, len })
    }
}

#[cfg(target_os = "linux")]
impl Drop for SharedFile {
    #[expect(unsafe_code, reason = "unmaps a file")]
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length and unmapped once; the buffer that owns it is dropped, so
        // no work uses the memory. An error leaves it mapped.
        let _unmapped = unsafe { mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

// SAFETY: as for `Block`: the only owner of a mapping, without thread affinity.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "the raw pointer stands for device memory, see above")]
unsafe impl Send for SharedFile {}

// SAFETY: as for `Send`.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "the raw pointer stands for device memory, see above")]
unsafe impl Sync for SharedFile {}

/// A buffer of a host device.
#[derive(Debug)]
pub(crate) struct HostBuffer {
    device: DeviceId,
    base: NonNull<u8>,
    size: u64,
    kind: MemoryKind,
    /// Elsewhere it is held for its drop alone.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "memory is exported on Linux only"))]
    owner: Owner,
}

// SAFETY: `base` points into memory that `owner` keeps alive, and every owner is `Send + Sync`.
#[expect(unsafe_code, reason = "the raw pointer stands for device memory, see above")]
unsafe impl Send for HostBuffer {}

// SAFETY: as for `Send`; a shared reference gives out the address and nothing else.
#[expect(unsafe_code, reason = "the raw pointer stands for device memory, see above")]
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// A descriptor of its file, if it has one.
    #[cfg(target_os = "linux")]
    pub(crate) fn export(&self) -> Option<io::Result<OwnedFd>> {
        match &self.owner {
            Owner::Shared { file, .. } => Some(file.descriptor.try_clone()),
            _ => None,
        }
    }
}

impl Buffer for HostBuffer {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    #[expect(unsafe_code, reason = "asserts the mapping's validity")]
    fn mapping(&self) -> Option<HostMapping<'_>> {
        if !self.kind.is_host_visible() {
            return None;
        }
        let len = usize::try_from(self.size).ok()?;
        // SAFETY: the memory holds `size` bytes and lives as long as `self`, from which the mapping
        // borrows; no code of this crate makes references to it.
        Some(unsafe { HostMapping::new(self.base, len) })
    }
}

/// A view of a host buffer as an address range: what copies and kernels work on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    base: NonNull<u8>,
    len: usize,
}

impl Span {
    /// Where the view's bytes are, if its buffer belongs to a host device.
    pub(crate) fn of(view: &BufferView) -> Option<Self> {
        let buffer: &dyn std::any::Any = view.buffer().as_ref();
        let base = buffer.downcast_ref::<HostBuffer>()?.base;
        let (offset, len) = (usize::try_from(view.offset()).ok()?, usize::try_from(view.size()).ok()?);
        Some(Self { base: base.map_addr(|address| address.saturating_add(offset)), len })
    }

    pub(crate) const fn as_ptr(self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(crate) const fn len(self) -> usize {
        self.len
    }

    /// The part from `offset` on, of at most `len` bytes.
    pub(crate) fn part(self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len);
        Self {
            base: self.base.map_addr(|address| address.saturating_add(offset)),
            len: len.min(self.len - offset),
        }
    }
}

// SAFETY: an address range; whoever dereferences it argues for itself.
#[expect(unsafe_code, reason = "the raw pointer stands for device memory, see above")]
unsafe impl Send for Span {}

// SAFETY: as for `Send`.
#[expect(unsafe_code, reason = "the raw pointer stands for device memory, see above")]
unsafe impl Sync for Span {}

/// Copies all of `src` to `dst`.
///
/// # Safety
///
/// - Both spans come from [`Span::of`] views whose buffers live until this returns.
/// - They have one length and share no bytes (as [`warpweft_core_types::CopyRegion`] checked).
#[expect(unsafe_code, reason = "device memory is only reachable through raw pointers")]
#[inline(never)]
pub(crate) unsafe fn copy(src: Span, dst: Span) {
    // SAFETY: both ranges are valid and disjoint (the caller's duties). Unordered work may touch the same
    // bytes; it does so by raw copies and relaxed atomics alone, and this function is not inlined, so that
    // values may be torn and nothing else.
    unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_ptr(), dst.len) }
}

/// Writes the first bytes of `dst`.
///
/// # Safety
///
/// - The span comes from a [`Span::of`] view whose buffer lives until this returns.
#[expect(unsafe_code, reason = "device memory is only reachable through raw pointers")]
#[inline(never)]
pub(crate) unsafe fn write(dst: Span, bytes: &[u8]) {
    let len = bytes.len().min(dst.len);
    // SAFETY: the range is valid (the caller's duty) and no Rust memory, so it is not `bytes`; unordered work
    // as in `copy`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst.as_ptr(), len) }
}

/// Fills `dst` with a pattern that starts at its first byte.
///
/// # Safety
///
/// - The span comes from a [`Span::of`] view whose buffer lives until this returns.
#[expect(unsafe_code, reason = "device memory is only reachable through raw pointers")]
#[inline(never)]
pub(crate) unsafe fn fill(dst: Span, pattern: u32) {
    let bytes = pattern.to_ne_bytes();
    if bytes == [bytes[0]; 4] {
        // SAFETY: the range is valid (the caller's duty); unordered work as in `copy`.
        unsafe { std::ptr::write_bytes(dst.as_ptr(), bytes[0], dst.len) }
        return;
    }
    // Write the pattern once, then double what is there, block by block so that it stays in cache.
    let mut done = bytes.len().min(dst.len);
    // SAFETY: the range is valid and holds at least `done` bytes.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst.as_ptr(), done) }
    while done < dst.len {
        let next = done.min(FILL_BLOCK).min(dst.len - done);
        // SAFETY: `next` bytes lie on both sides of `done`, and `next <= done` keeps them apart.
        unsafe { copy(dst.part(0, next), dst.part(done, next)) }
        done += next;
    }
}

/// A multiple of every pattern's size that fits the first-level cache.
const FILL_BLOCK: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use warpweft_core_types::DeviceUuid;

    use super::*;

    fn arena(capacity: u64) -> Arc<Arena> {
        let device = DeviceId { backend: "host", ordinal: 0, uuid: DeviceUuid::from_bytes([0; 16]) };
        Arc::new(Arena::new(device, Bytes(capacity)))
    }

    fn window(arena: &Arc<Arena>, size: u64) -> BufferView {
        let buffer = arena.allocate(&BufferDesc::host_visible(size)).unwrap();
        BufferView::whole(Arc::new(buffer))
    }

    #[test]
    fn capacity_is_taken_and_given_back() {
        let arena = arena(1000);
        let first = arena.allocate(&BufferDesc::device(600)).unwrap();
        let error = arena.allocate(&BufferDesc::device(500)).unwrap_err();
        assert!(matches!(error, AllocError::OutOfMemory { available: Bytes(400), .. }), "{error}");
        arena.allocate(&BufferDesc::device(400)).unwrap();
        drop(first);
        assert_eq!(arena.usage().free, Bytes(1000));
        assert!(arena.allocate(&BufferDesc::device(u64::MAX)).is_err(), "sums do not wrap");
    }

    #[test]
    fn buffers_are_aligned_by_their_size() {
        let arena = arena(1 << 20);
        for (size, alignment) in [(1, ALIGNMENT), (4095, ALIGNMENT), (4096, PAGE), (10_000, PAGE)] {
            let address = window(&arena, size).buffer().mapping().unwrap().as_ptr().addr() as u64;
            assert!(address.is_multiple_of(alignment), "{size} bytes at {address:#x}");
        }
    }

    #[test]
    #[expect(unsafe_code, reason = "calls the copy engine")]
    fn fills_repeat_from_the_first_byte_whatever_the_length() {
        let arena = arena(1 << 20);
        for len in [1_usize, 3, 4, 5, 4096, FILL_BLOCK - 1, FILL_BLOCK, 3 * FILL_BLOCK + 7] {
            let view = window(&arena, len as u64);
            // SAFETY: the view is alive and nobody else uses it.
            unsafe { fill(Span::of(&view).unwrap(), u32::from_ne_bytes([1, 2, 3, 4])) };
            let mut bytes = vec![0; len];
            view.read(&mut bytes).unwrap();
            assert!(
                bytes.iter().zip([1, 2, 3, 4].into_iter().cycle()).all(|(got, want)| *got == want),
                "{len}"
            );
        }
    }

    #[test]
    fn parts_stay_within_their_span() {
        let arena = arena(1 << 20);
        let view = window(&arena, 100);
        let span = Span::of(&view).unwrap();
        assert_eq!([span.part(0, 60).len(), span.part(60, 60).len(), span.part(100, 1).len()], [60, 40, 0]);
        assert_eq!(span.part(usize::MAX, 1).len(), 0);
    }
}
