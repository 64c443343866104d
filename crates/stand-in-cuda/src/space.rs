//! Memory: ranges of this process's own, each with its owner, looked up at every access.
//!
//! An address is never given out twice. Where the operating system helps, freed memory is taken away and its
//! addresses stay taken; elsewhere it is never given back at all.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering},
    },
};

use crate::{context::Context, exports::Code, pool::Pool, virtual_memory::Mapping};

/// What new memory holds, so that nobody relies on zeros.
const LITTER: u8 = 0xa5;

const PAGE: usize = 4096;

/// All memory of the machine.
#[derive(Debug, Default)]
pub(crate) struct Space {
    ranges: RwLock<BTreeMap<u64, Range>>,
}

#[derive(Debug)]
struct Range {
    len: u64,
    mapped: usize,
    owner: Owner,
    /// A free is in a stream.
    leaving: bool,
}

/// Whose memory it is.
#[derive(Debug, Clone)]
pub(crate) enum Owner {
    Pool(Arc<Pool>),
    /// Of the host, pinned through this context.
    Pinned(Arc<Context>),
    /// Of the host and of somebody else, registered through this context.
    Registered(Arc<Context>),
    /// A mapping, for the devices that were given access.
    Mapped(Arc<Mapping>),
}

impl Space {
    pub(crate) fn allocate(&self, len: usize, owner: Owner) -> Result<u64, Code> {
        let mapped = len.checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?;
        let start = map(mapped).ok_or(Code::OUT_OF_MEMORY)?;
        fill(start, len, LITTER);
        let range = Range { len: len as u64, mapped, owner, leaving: false };
        self.ranges.write().unwrap_or_else(PoisonError::into_inner).insert(start, range);
        Ok(start)
    }

    /// Notes that a free of pool memory is in a stream: its pool and length, unless it may not be freed.
    pub(crate) fn leave(&self, start: u64) -> Result<(), Code> {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        let range = ranges.get_mut(&start).ok_or(Code::INVALID_VALUE)?;
        if range.leaving || !matches!(range.owner, Owner::Pool(_)) {
            return Err(Code::INVALID_VALUE);
        }
        range.leaving = true;
        Ok(())
    }

    /// Takes memory away; whose it was and how much.
    pub(crate) fn free(&self, start: u64) -> Result<(Owner, u64), Code> {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        let range = ranges.remove(&start).ok_or(Code::INVALID_VALUE)?;
        unmap(start, range.mapped);
        Ok((range.owner, range.len))
    }

    /// Gives pinned memory back.
    pub(crate) fn free_pinned(&self, start: u64) -> Result<(), Code> {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        match ranges.get(&start).map(|range| (&range.owner, range.mapped)) {
            Some((Owner::Pinned(_), mapped)) => unmap(start, mapped),
            _ => return Err(Code::INVALID_VALUE),
        }
        ranges.remove(&start);
        Ok(())
    }

    /// Takes note of memory that somebody else allocated.
    pub(crate) fn register(&self, start: u64, len: u64, context: &Arc<Context>) -> Result<(), Code> {
        let end = start.checked_add(len).filter(|_| len > 0).ok_or(Code::INVALID_VALUE)?;
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        let before = ranges.range(..end).next_back();
        if before.is_some_and(|(&other, range)| other + range.len > start) {
            return Err(Code::ALREADY_REGISTERED);
        }
        let owner = Owner::Registered(Arc::clone(context));
        ranges.insert(start, Range { len, mapped: 0, owner, leaving: false });
        Ok(())
    }

    pub(crate) fn unregister(&self, start: u64) -> Result<(), Code> {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        let known = ranges.get(&start).is_some_and(|range| matches!(range.owner, Owner::Registered(_)));
        if !known {
            return Err(Code::NOT_REGISTERED);
        }
        ranges.remove(&start);
        Ok(())
    }

    /// Maps memory at addresses that `reserve` gave.
    pub(crate) fn map_at(
        &self,
        start: u64,
        len: usize,
        offset: u64,
        mapping: Arc<Mapping>,
    ) -> Result<(), Code> {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        let before = ranges.range(..start.saturating_add(len as u64)).next_back();
        if before.is_some_and(|(&other, range)| other + range.len > start) {
            return Err(Code::INVALID_VALUE);
        }
        map_file(start, len, &mapping.memory.file, offset).ok_or(Code::OUT_OF_MEMORY)?;
        ranges.insert(
            start,
            Range { len: len as u64, mapped: len, owner: Owner::Mapped(mapping), leaving: false },
        );
        Ok(())
    }

    pub(crate) fn unmap_at(&self, start: u64, len: usize) -> Result<(), Code> {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        let known = ranges
            .get(&start)
            .is_some_and(|range| matches!(range.owner, Owner::Mapped(_)) && range.mapped == len);
        if !known {
            return Err(Code::INVALID_VALUE);
        }
        unmap(start, len);
        let gone = ranges.remove(&start);
        // Outside the lock: the last mapping of memory gives it back.
        drop(ranges);
        drop(gone);
        Ok(())
    }

    /// What is known of the memory that an address is in: where it starts, its length, and whose it is.
    pub(crate) fn about(&self, address: u64) -> Result<(u64, u64, Owner), Code> {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        let (&start, range) = ranges.range(..=address).next_back().ok_or(Code::INVALID_VALUE)?;
        let is_inside = address - start < range.len && !range.leaving;
        if is_inside { Ok((start, range.len, range.owner.clone())) } else { Err(Code::INVALID_VALUE) }
    }

    /// What a context pinned goes with it.
    pub(crate) fn free_pinned_of(&self, context: &Arc<Context>) {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        ranges.retain(|&start, range| {
            let goes = matches!(&range.owner, Owner::Pinned(owner) | Owner::Registered(owner)
                if Arc::ptr_eq(owner, context));
            if goes && range.mapped > 0 {
                unmap(start, range.mapped);
            }
            !goes
        });
    }

    pub(crate) fn len(&self) -> usize {
        self.ranges.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether memory was allocated, and no free of it is in a stream.
    pub(crate) fn holds(&self, address: u64, len: u64) -> bool {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        let before = ranges.range(..=address).next_back();
        before.is_some_and(|(&start, range)| {
            !range.leaving && len <= range.len && address - start <= range.len - len
        })
    }

    /// The memory as a device sees it.
    pub(crate) fn seen_from(&self, device: usize) -> View<'_> {
        View { space: self, device }
    }
}

/// Memory within reach of one device. Every access is checked, and nothing is freed during one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a> {
    space: &'a Space,
    device: usize,
}

type Ranges<'a> = RwLockReadGuard<'a, BTreeMap<u64, Range>>;

impl<'a> View<'a> {
    /// Finds live memory that the device can reach, and keeps it from being freed.
    fn find(&self, address: u64, len: u64) -> Result<Ranges<'a>, Code> {
        let ranges = self.space.ranges.read().unwrap_or_else(PoisonError::into_inner);
        self.check(&ranges, address, len)?;
        Ok(ranges)
    }

    fn check(&self, ranges: &Ranges<'a>, address: u64, len: u64) -> Result<(), Code> {
        let before = ranges.range(..=address).next_back();
        let (&start, range) = before.ok_or(Code::ILLEGAL_ADDRESS)?;
        let inside = len <= range.len && address - start <= range.len - len;
        let reached = match &range.owner {
            Owner::Pool(pool) => pool.admits(self.device),
            Owner::Pinned(_) | Owner::Registered(_) => true,
            Owner::Mapped(mapping) => mapping.admits(self.device),
        };
        if inside && reached { Ok(()) } else { Err(Code::ILLEGAL_ADDRESS) }
    }

    #[expect(unsafe_code, reason = "the memory of a device")]
    pub(crate) fn copy(&self, to: u64, from: u64, len: usize) -> Result<(), Code> {
        let ranges = self.find(to, len as u64)?;
        self.check(&ranges, from, len as u64)?;
        // SAFETY: both ranges are mapped and stay so while the lock is held. Others may write the bytes at
        // the same time, as on a device; nobody holds a reference to them.
        unsafe { std::ptr::copy(pointer(from), pointer(to), len) };
        Ok(())
    }

    pub(crate) fn set(&self, to: u64, len: usize, value: u8) -> Result<(), Code> {
        let _ranges = self.find(to, len as u64)?;
        fill(to, len, value);
        Ok(())
    }

    #[expect(unsafe_code, reason = "the memory of a device")]
    fn word(&self, address: u64) -> Result<(Ranges<'a>, &'a AtomicU32), Code> {
        if !address.is_multiple_of(4) {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        let ranges = self.find(address, 4)?;
        // SAFETY: mapped while the lock is held, which goes along; aligned; shared with others by whole
        // words alone.
        Ok((ranges, unsafe { AtomicU32::from_ptr(pointer(address).cast()) }))
    }

    #[expect(unsafe_code, reason = "the memory of a device")]
    fn long(&self, address: u64) -> Result<(Ranges<'a>, &'a AtomicU64), Code> {
        if !address.is_multiple_of(8) {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        let ranges = self.find(address, 8)?;
        // SAFETY: as for `word`.
        Ok((ranges, unsafe { AtomicU64::from_ptr(pointer(address).cast()) }))
    }

    // Acquire and release, here and below: kernels rely on the order of what they read and write.

    pub(crate) fn read(&self, address: u64) -> Result<u32, Code> {
        self.word(address).map(|(_ranges, word)| word.load(Ordering::Acquire))
    }

    pub(crate) fn write(&self, address: u64, value: u32) -> Result<(), Code> {
        self.word(address).map(|(_ranges, word)| word.store(value, Ordering::Release))
    }

    #[expect(unsafe_code, reason = "the memory of a device")]
    pub(crate) fn write_half(&self, address: u64, value: u32) -> Result<(), Code> {
        if !address.is_multiple_of(2) {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        let _ranges = self.find(address, 2)?;
        let [low, high, ..] = value.to_le_bytes();
        // SAFETY: as for `word`.
        let half = unsafe { AtomicU16::from_ptr(pointer(address).cast()) };
        half.store(u16::from_le_bytes([low, high]), Ordering::Release);
        Ok(())
    }

    /// Adds and returns what was there before.
    pub(crate) fn add_long(&self, address: u64, more: u64) -> Result<u64, Code> {
        self.long(address).map(|(_ranges, word)| word.fetch_add(more, Ordering::AcqRel))
    }

    pub(crate) fn read_long(&self, address: u64) -> Result<u64, Code> {
        self.long(address).map(|(_ranges, word)| word.load(Ordering::Acquire))
    }

    pub(crate) fn write_long(&self, address: u64, value: u64) -> Result<(), Code> {
        self.long(address).map(|(_ranges, word)| word.store(value, Ordering::Release))
    }
}

fn pointer(address: u64) -> *mut u8 {
    // Addresses of devices are addresses of this process: memory was mapped and its address exposed.
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}

/// Fills memory that the caller knows to be mapped.
#[expect(unsafe_code, reason = "the memory of a device")]
fn fill(start: u64, len: usize, value: u8) {
    // SAFETY: both callers have just mapped it or hold the lock that keeps it mapped.
    unsafe { std::ptr::write_bytes(pointer(start), value, len) };
}

#[cfg(target_os = "linux")]
mod system {
    use std::ffi::{c_char, c_int, c_long, c_uint, c_void};

    const NONE: c_int = 0;
    const READ_WRITE: c_int = 3;
    const PRIVATE_ANONYMOUS: c_int = 0x22;
    const FIXED_NO_RESERVE: c_int = 0x4010;
    const FIXED: c_int = 0x10;
    const SHARED: c_int = 1;
    const CLOSE_ON_EXEC: c_uint = 1;

    // SAFETY: the declaration is that of the C library on 64-bit Linux.
    #[expect(unsafe_code, reason = "asks the operating system for memory")]
    unsafe extern "C" {
        fn mmap(
            at: *mut c_void,
            len: usize,
            protection: c_int,
            flags: c_int,
            file: c_int,
            offset: c_long,
        ) -> *mut c_void;
        fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
    }

    #[expect(unsafe_code, reason = "asks the operating system for memory")]
    pub(super) fn map(len: usize) -> Option<u64> {
        // SAFETY: a new mapping at a place of the system's choice touches nothing that exists.
        let start = unsafe { mmap(std::ptr::null_mut(), len, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0) };
        // The system's answer for "no" is -1.
        (start.addr() != usize::MAX).then(|| start.expose_provenance() as u64)
    }

    /// Addresses with nothing behind them.
    #[expect(unsafe_code, reason = "asks the operating system for addresses")]
    pub(crate) fn reserve(len: usize) -> Option<u64> {
        let flags = PRIVATE_ANONYMOUS | (FIXED_NO_RESERVE & !FIXED);
        // SAFETY: as for `map`.
        let start = unsafe { mmap(std::ptr::null_mut(), len, NONE, flags, -1, 0) };
        (start.addr() != usize::MAX).then(|| start.expose_provenance() as u64)
    }

    /// A part of a file at addresses that were reserved.
    #[expect(unsafe_code, reason = "asks the operating system for memory")]
    pub(super) fn map_file(start: u64, len: usize, file: &std::fs::File, offset: u64) -> Option<()> {
        use std::os::fd::AsRawFd as _;
        let (at, offset) = (super::pointer(start).cast(), c_long::try_from(offset).ok()?);
        // SAFETY: replaces addresses that `reserve` gave and where nothing is mapped (the caller looked, under
        // the lock that every access holds).
        let mapped = unsafe { mmap(at, len, READ_WRITE, SHARED | FIXED, file.as_raw_fd(), offset) };
        (mapped.addr() != usize::MAX).then_some(())
    }

    /// A file without a name, in memory.
    #[expect(unsafe_code, reason = "asks the operating system for a file")]
    pub(crate) fn memory_file(name: &std::ffi::CStr, len: u64) -> std::io::Result<std::fs::File> {
        use std::os::fd::FromRawFd as _;
        // SAFETY: a terminated name that lives until the return.
        let descriptor = unsafe { memfd_create(name.as_ptr(), CLOSE_ON_EXEC) };
        if descriptor < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: made just now, and nobody else has it.
        let file = unsafe { std::fs::File::from_raw_fd(descriptor) };
        file.set_len(len)?;
        Ok(file)
    }

    #[expect(unsafe_code, reason = "gives memory back to the operating system")]
    pub(super) fn unmap(start: u64, len: usize) {
        let flags = PRIVATE_ANONYMOUS | FIXED_NO_RESERVE;
        // SAFETY: replaces exactly a mapping that `map` made and nobody may use any more (it was taken out
        // of the ranges, under the lock that every access holds). The addresses stay taken.
        let _gone = unsafe { mmap(super::pointer(start).cast(), len, NONE, flags, -1, 0) };
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub(super) fn map(len: usize) -> Option<u64> {
        let words = vec![[0_u64; 512]; len / 4096].leak();
        Some(words.as_mut_ptr().expose_provenance() as u64)
    }

    pub(super) fn unmap(_start: u64, _len: usize) {}

    // Elsewhere memory is not shared between processes: the calls that would do it run out of it.

    pub(crate) fn reserve(_len: usize) -> Option<u64> {
        None
    }

    pub(super) fn map_file(_start: u64, _len: usize, _file: &std::fs::File, _offset: u64) -> Option<()> {
        None
    }

    pub(crate) fn memory_file(_name: &std::ffi::CStr, _len: u64) -> std::io::Result<std::fs::File> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

use system::{map, map_file, unmap};
pub(crate) use system::{memory_file, reserve};
