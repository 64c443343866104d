//! Memory: ranges of this process's own, each with its owner, looked up at every access.
//!
//! An address is never given out twice. Where the operating system helps, freed memory is taken away and its
//! addresses stay taken; elsewhere it is never given back at all.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use crate::{context::Context, exports::Code, plain, pool::Pool, virtual_memory::Mapping};

/// What new memory holds, so that nobody relies on zeros.
pub(crate) const LITTER: u8 = 0xa5;

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
    /// Of a device, allocated in this context and in no pool.
    Plain(Arc<Context>),
    /// Of the host, pinned through this context.
    Pinned(Arc<Context>),
    /// Of the program, which made it known through this context.
    Registered(Arc<Context>),
    /// Mapped by parts.
    Virtual(Arc<Mapping>),
}

impl Owner {
    /// Whether it is memory of the host.
    pub(crate) const fn is_host(&self) -> bool {
        matches!(self, Self::Pinned(_) | Self::Registered(_))
    }

    /// The device whose memory it is.
    pub(crate) fn device(&self) -> usize {
        match self {
            Self::Pool(pool) => pool.device,
            Self::Plain(context) | Self::Pinned(context) | Self::Registered(context) => context.device,
            Self::Virtual(mapping) => mapping.memory.device,
        }
    }

    /// The context that goes with the memory, or the memory with it.
    fn context(&self) -> Option<&Arc<Context>> {
        match self {
            Self::Plain(context) | Self::Pinned(context) | Self::Registered(context) => Some(context),
            Self::Pool(_) | Self::Virtual(_) => None,
        }
    }
}

/// What is known of an address.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) owner: Owner,
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

    /// Gives memory back that begins here, if `ours` says so.
    pub(crate) fn free_if(&self, start: u64, ours: impl FnOnce(&Owner) -> bool) -> Result<(), Code> {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        match ranges.get(&start) {
            Some(range) if ours(&range.owner) => unmap(start, range.mapped),
            _ => return Err(Code::INVALID_VALUE),
        }
        ranges.remove(&start);
        Ok(())
    }

    /// What a context pinned goes with it; what it was told of stays the program's.
    pub(crate) fn free_pinned_of(&self, context: &Arc<Context>) {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        ranges.retain(|&start, range| {
            let goes = range.owner.context().is_some_and(|owner| Arc::ptr_eq(owner, context));
            if goes && range.mapped > 0 {
                unmap(start, range.mapped);
            }
            !goes
        });
    }

    /// Takes note of memory that somebody else looks after; `false` if a part of it is known already.
    pub(crate) fn note(&self, start: u64, len: u64, owner: Owner) -> bool {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        let Some(end) = start.checked_add(len) else { return false };
        let before = ranges.range(..end).next_back();
        if before.is_some_and(|(&other, range)| other + range.len > start) {
            return false;
        }
        ranges.insert(start, Range { len, mapped: 0, owner, leaving: false });
        true
    }

    /// Forgets memory that was noted, if `ours` says so; when it returns, no access is under way.
    pub(crate) fn forget(&self, start: u64, ours: impl FnOnce(&Found) -> bool) -> bool {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        let Some(range) = ranges.get(&start) else { return false };
        let found = Found { start, len: range.len, owner: range.owner.clone() };
        let goes = range.mapped == 0 && ours(&found);
        if goes {
            ranges.remove(&start);
        }
        goes
    }

    /// The memory around an address, unless a free of it is in a stream.
    pub(crate) fn around(&self, address: u64) -> Option<Found> {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        let (&start, range) = ranges.range(..=address).next_back()?;
        let inside = !range.leaving && address - start < range.len;
        inside.then(|| Found { start, len: range.len, owner: range.owner.clone() })
    }

    /// All memory that begins within a range.
    pub(crate) fn within(&self, start: u64, len: u64) -> Vec<Found> {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        let found =
            |(&start, range): (&u64, &Range)| Found { start, len: range.len, owner: range.owner.clone() };
        ranges.range(start..start.saturating_add(len)).map(found).collect()
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
    fn find(&self, address: u64, len: u64, writes: bool) -> Result<Ranges<'a>, Code> {
        let ranges = self.space.ranges.read().unwrap_or_else(PoisonError::into_inner);
        self.check(&ranges, address, len, writes)?;
        Ok(ranges)
    }

    fn check(&self, ranges: &Ranges<'a>, address: u64, len: u64, writes: bool) -> Result<(), Code> {
        let before = ranges.range(..=address).next_back();
        let (&start, range) = before.ok_or(Code::ILLEGAL_ADDRESS)?;
        let inside = len <= range.len && address - start <= range.len - len;
        let reached = match &range.owner {
            Owner::Pool(pool) => pool.admits(self.device),
            Owner::Plain(context) => plain::admits(context, self.device),
            Owner::Pinned(_) | Owner::Registered(_) => true,
            Owner::Virtual(mapping) => mapping.admits(self.device, writes),
        };
        if inside && reached { Ok(()) } else { Err(Code::ILLEGAL_ADDRESS) }
    }

    #[expect(unsafe_code, reason = "the memory of a device")]
    pub(crate) fn copy(&self, to: u64, from: u64, len: usize) -> Result<(), Code> {
        let ranges = self.find(to, len as u64, true)?;
        self.check(&ranges, from, len as u64, false)?;
        // SAFETY: both ranges are mapped and stay so while the lock is held. Others may write the bytes at
        // the same time, as on a device; nobody holds a reference to them.
        unsafe { std::ptr::copy(pointer(from), pointer(to), len) };
        Ok(())
    }

    pub(crate) fn set(&self, to: u64, len: usize, value: u8) -> Result<(), Code> {
        let _ranges = self.find(to, len as u64, true)?;
        fill(to, len, value);
        Ok(())
    }

    /// Writes bytes that a kernel made.
    #[expect(unsafe_code, reason = "the memory of a device")]
    pub(crate) fn store(&self, to: u64, bytes: &[u8]) -> Result<(), Code> {
        let _ranges = self.find(to, bytes.len() as u64, true)?;
        // SAFETY: mapped while the lock is held, for as many bytes; they come from this process's own heap.
        unsafe { std::ptr::copy(bytes.as_ptr(), pointer(to), bytes.len()) };
        Ok(())
    }

    /// Reads bytes for a kernel.
    #[expect(unsafe_code, reason = "the memory of a device")]
    pub(crate) fn load(&self, from: u64, len: usize) -> Result<Vec<u8>, Code> {
        let _ranges = self.find(from, len as u64, false)?;
        let mut bytes = vec![0; len];
        // SAFETY: mapped while the lock is held, for as many bytes; they go to this process's own heap.
        unsafe { std::ptr::copy(pointer(from).cast_const(), bytes.as_mut_ptr(), len) };
        Ok(bytes)
    }

    #[expect(unsafe_code, reason = "the memory of a device")]
    fn word(&self, address: u64, writes: bool) -> Result<(Ranges<'a>, &'a AtomicU32), Code> {
        if !address.is_multiple_of(4) {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        let ranges = self.find(address, 4, writes)?;
        // SAFETY: mapped while the lock is held, which goes along; aligned; shared with others by whole
        // words alone.
        Ok((ranges, unsafe { AtomicU32::from_ptr(pointer(address).cast()) }))
    }

    #[expect(unsafe_code, reason = "the memory of a device")]
    fn long(&self, address: u64, writes: bool) -> Result<(Ranges<'a>, &'a AtomicU64), Code> {
        if !address.is_multiple_of(8) {
            return Err(Code::MISALIGNED_ADDRESS);
        }
        let ranges = self.find(address, 8, writes)?;
        // SAFETY: as for `word`.
        Ok((ranges, unsafe { AtomicU64::from_ptr(pointer(address).cast()) }))
    }

    // Acquire and release, here and below: kernels rely on the order of what they read and write.

    pub(crate) fn read(&self, address: u64) -> Result<u32, Code> {
        self.word(address, false).map(|(_ranges, word)| word.load(Ordering::Acquire))
    }

    pub(crate) fn write(&self, address: u64, value: u32) -> Result<(), Code> {
        self.word(address, true).map(|(_ranges, word)| word.store(value, Ordering::Release))
    }

    /// Adds to a word, around zero where it overflows.
    pub(crate) fn add(&self, address: u64, value: u32) -> Result<(), Code> {
        self.word(address, true)
            .map(|(_ranges, word)| word.fetch_add(value, Ordering::AcqRel))
            .map(|_before| ())
    }

    pub(crate) fn read_long(&self, address: u64) -> Result<u64, Code> {
        self.long(address, false).map(|(_ranges, word)| word.load(Ordering::Acquire))
    }

    pub(crate) fn write_long(&self, address: u64, value: u64) -> Result<(), Code> {
        self.long(address, true).map(|(_ranges, word)| word.store(value, Ordering::Release))
    }

    /// Adds to a word; what it was before.
    pub(crate) fn add_long(&self, address: u64, value: u64) -> Result<u64, Code> {
        self.long(address, true).map(|(_ranges, word)| word.fetch_add(value, Ordering::AcqRel))
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
    use std::ffi::{c_int, c_long, c_void};

    const NONE: c_int = 0;
    const READ_WRITE: c_int = 3;
    const SHARED_FIXED: c_int = 0x11;
    const PRIVATE_ANONYMOUS: c_int = 0x22;
    const NO_RESERVE: c_int = 0x4000;
    const FIXED_NO_RESERVE: c_int = 0x10 | NO_RESERVE;

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
    pub(crate) fn map_nothing(len: usize) -> Option<u64> {
        // SAFETY: as for `map`.
        let start = unsafe { mmap(std::ptr::null_mut(), len, NONE, PRIVATE_ANONYMOUS | NO_RESERVE, -1, 0) };
        (start.addr() != usize::MAX).then(|| start.expose_provenance() as u64)
    }

    /// Puts a file where the caller reserved addresses and nothing is mapped; whether that worked.
    #[expect(unsafe_code, reason = "asks the operating system for memory")]
    pub(crate) fn map_file(start: u64, len: usize, file: c_int) -> bool {
        let place = super::pointer(start).cast();
        // SAFETY: the addresses came from `map_nothing` and are noted for this file alone (`Space::note`), so
        // that nothing of the program is replaced.
        let mapped = unsafe { mmap(place, len, READ_WRITE, SHARED_FIXED, file, 0) };
        mapped == place
    }

    #[expect(unsafe_code, reason = "gives memory back to the operating system")]
    pub(crate) fn unmap(start: u64, len: usize) {
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
}

use system::map;
#[cfg(not(target_os = "linux"))]
use system::unmap;
#[cfg(target_os = "linux")]
pub(crate) use system::{map_file, map_nothing, unmap};
