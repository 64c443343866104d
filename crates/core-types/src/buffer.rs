//! Memory of a device, and checked ranges of it.

use std::{any::Any, fmt, marker::PhantomData, ops::Range, ptr::NonNull, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{DeviceId, RangeError, shared};

/// Where a buffer lives and who can address it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// The device's own memory, the fastest for its kernels.
    Device,
    /// Host memory that the device also reaches (CUDA: pinned and mapped).
    HostVisible,
    /// The same for bytes that the host writes once, in order, and never reads (CUDA: write-combined). The
    /// device reads it a little sooner; the host reads it very slowly.
    Upload,
}

impl MemoryKind {
    /// Whether the host can address it.
    pub const fn is_host_visible(self) -> bool {
        matches!(self, Self::HostVisible | Self::Upload)
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::HostVisible => "host-visible",
            Self::Upload => "upload",
        })
    }
}

/// What to allocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferDesc {
    /// Size in bytes, at least 1.
    pub size: u64,
    /// Where it shall live.
    pub kind: MemoryKind,
}

impl BufferDesc {
    /// `size` bytes of the device's own memory.
    pub const fn device(size: u64) -> Self {
        Self { size, kind: MemoryKind::Device }
    }

    /// `size` bytes that the host writes and the device reads.
    pub const fn upload(size: u64) -> Self {
        Self { size, kind: MemoryKind::Upload }
    }

    /// `size` bytes that the host can address too.
    pub const fn host_visible(size: u64) -> Self {
        Self { size, kind: MemoryKind::HostVisible }
    }
}

/// One allocation on one device, zeroed when it was made.
///
/// Work that was submitted keeps its buffers alive, so dropping the last handle never frees memory a
/// device may still touch. Two operations that touch the same bytes with nothing ordering them, one of
/// them writing, leave unspecified values in those bytes; everything else stays as it was.
pub trait Buffer: Any + fmt::Debug + Send + Sync {
    /// The device that owns the memory.
    fn device(&self) -> DeviceId;

    /// Size in bytes.
    fn size(&self) -> u64;

    /// Where it lives.
    fn kind(&self) -> MemoryKind;

    /// The host's window into it; `None` unless [`MemoryKind::is_host_visible`].
    fn mapping(&self) -> Option<HostMapping<'_>>;

    /// Its first byte in the address space of the process, where memory of a device that several buffers may
    /// stand for has a place there. It is compared and never followed.
    fn unified_address(&self) -> Option<u64> {
        None
    }
}

/// Host memory that owners outside this process's Rust code (devices, other threads) may write at any time.
///
/// It hands out no references, only copies: see [`HostMapping::read`] and [`HostMapping::write`].
#[derive(Debug, Clone, Copy)]
pub struct HostMapping<'a> {
    base: NonNull<u8>,
    len: usize,
    lifetime: PhantomData<&'a ()>,
}

impl HostMapping<'_> {
    /// Wraps memory the host can address.
    ///
    /// # Safety
    ///
    /// - `base` is valid for reads and writes of `len` bytes for as long as the lifetime lasts.
    /// - No Rust reference to any of these bytes exists while the lifetime lasts.
    #[expect(unsafe_code, reason = "the duties are the caller's; nothing is done here")]
    pub const unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len, lifetime: PhantomData }
    }

    /// The first byte's address, for foreign calls; dereferencing it is up to the caller.
    pub const fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing to read.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes from `offset` on into `into`.
    ///
    /// # Errors
    ///
    /// [`RangeError::OutOfBounds`] when the range leaves the mapping.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), RangeError> {
        let from = self.at(offset, into.len())?;
        shared::read(from, into);
        Ok(())
    }

    /// Copies `from` to the bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// [`RangeError::OutOfBounds`] when the range leaves the mapping.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), RangeError> {
        let to = self.at(offset, from.len())?;
        shared::write(from, to);
        Ok(())
    }

    /// The word of 64 bits at `offset`, in one access: whoever sees it sees what its writer wrote before.
    ///
    /// # Errors
    ///
    /// [`RangeError::OutOfBounds`] when it leaves the mapping, [`RangeError::Misaligned`] when it does not lie at a
    /// multiple of 8.
    pub fn load(&self, offset: usize) -> Result<u64, RangeError> {
        self.word(offset).map(shared::load)
    }

    /// Stores a word of 64 bits at `offset` in one access, behind everything that this thread wrote before.
    ///
    /// # Errors
    ///
    /// As [`HostMapping::load`].
    pub fn store(&self, offset: usize, value: u64) -> Result<(), RangeError> {
        self.word(offset).map(|word| shared::store(word, value))
    }

    fn word(&self, offset: usize) -> Result<shared::Span, RangeError> {
        let span = self.at(offset, 8)?;
        match self.base.as_ptr().addr().wrapping_add(offset).is_multiple_of(8) {
            true => Ok(span),
            false => Err(RangeError::Misaligned { offset: offset as u64, needed: 8 }),
        }
    }

    fn at(&self, offset: usize, size: usize) -> Result<shared::Span, RangeError> {
        if offset.checked_add(size).is_none_or(|end| end > self.len) {
            return Err(RangeError::OutOfBounds {
                offset: offset as u64,
                size: size as u64,
                buffer_size: self.len as u64,
            });
        }
        Ok(shared::Span::within(self.base, offset, size))
    }
}

/// A range of a buffer that was checked to lie inside it. Keeps the buffer alive.
#[derive(Clone)]
pub struct BufferView {
    buffer: Arc<dyn Buffer>,
    offset: u64,
    size: u64,
}

impl BufferView {
    /// All of `buffer`.
    pub fn whole(buffer: Arc<dyn Buffer>) -> Self {
        let size = buffer.size();
        Self { buffer, offset: 0, size }
    }

    /// The bytes `range` of `buffer`.
    ///
    /// # Errors
    ///
    /// [`RangeError::ZeroSize`] or [`RangeError::OutOfBounds`].
    pub fn new(buffer: Arc<dyn Buffer>, range: Range<u64>) -> Result<Self, RangeError> {
        Self::whole(buffer).slice(range)
    }

    /// The bytes `range` of this view, counted from its own start.
    ///
    /// # Errors
    ///
    /// [`RangeError::ZeroSize`] or [`RangeError::OutOfBounds`].
    pub fn slice(&self, range: Range<u64>) -> Result<Self, RangeError> {
        if range.end > self.size || range.start > range.end {
            return Err(RangeError::OutOfBounds {
                offset: range.start,
                size: range.end.saturating_sub(range.start),
                buffer_size: self.size,
            });
        }
        if range.is_empty() {
            return Err(RangeError::ZeroSize);
        }
        Ok(Self {
            buffer: Arc::clone(&self.buffer),
            offset: self.offset + range.start,
            size: range.end - range.start,
        })
    }

    /// The allocation.
    pub const fn buffer(&self) -> &Arc<dyn Buffer> {
        &self.buffer
    }

    /// The device that owns the memory.
    pub fn device(&self) -> DeviceId {
        self.buffer.device()
    }

    /// First byte within the buffer.
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes, at least 1.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// The bytes within the buffer.
    pub const fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.size
    }

    /// How many bytes this view shares with another, also where one memory stands behind two buffers.
    pub fn overlap(&self, other: &Self) -> u64 {
        self.place().overlap(&other.place())
    }

    /// Which bytes these are, whoever's buffer they are reached through.
    pub fn place(&self) -> MemoryPlace {
        match self.buffer.mapping() {
            // Imports share host memory, so its addresses are what tells bytes apart.
            Some(mapping) => {
                let start = mapping.as_ptr().addr() as u64 + self.offset;
                MemoryPlace { space: 0, bytes: start..start + self.size }
            }
            None => match self.buffer.unified_address() {
                Some(base) => {
                    MemoryPlace { space: 0, bytes: base + self.offset..base + self.offset + self.size }
                }
                None => MemoryPlace { space: Arc::as_ptr(&self.buffer).addr(), bytes: self.range() },
            },
        }
    }

    /// Copies the view's bytes to the host. The view must be host-visible; nothing is ordered or waited for.
    ///
    /// # Errors
    ///
    /// [`RangeError::NotHostVisible`], or [`RangeError::OutOfBounds`] when `into` is longer than the view.
    pub fn read(&self, into: &mut [u8]) -> Result<(), RangeError> {
        let (mapping, offset) = self.window(into.len())?;
        mapping.read(offset, into)
    }

    /// Copies bytes of the host into the view. The view must be host-visible; nothing is ordered or waited for.
    ///
    /// # Errors
    ///
    /// [`RangeError::NotHostVisible`], or [`RangeError::OutOfBounds`] when `from` is longer than the view.
    pub fn write(&self, from: &[u8]) -> Result<(), RangeError> {
        let (mapping, offset) = self.window(from.len())?;
        mapping.write(offset, from)
    }

    /// Copies another view's bytes by this thread. Both must be host-visible and of one length; nothing is
    /// ordered or waited for.
    ///
    /// # Errors
    ///
    /// [`RangeError::NotHostVisible`] or [`RangeError::LengthMismatch`].
    pub fn copy_by_host(&self, src: &Self) -> Result<(), RangeError> {
        if src.size != self.size {
            return Err(RangeError::LengthMismatch { source_bytes: src.size, destination_bytes: self.size });
        }
        let len = usize::try_from(self.size).unwrap_or(usize::MAX);
        let ((from, from_offset), (to, to_offset)) = (src.window(len)?, self.window(len)?);
        shared::copy(from.at(from_offset, len)?, to.at(to_offset, len)?);
        Ok(())
    }

    fn window(&self, len: usize) -> Result<(HostMapping<'_>, usize), RangeError> {
        let out_of_bounds =
            || RangeError::OutOfBounds { offset: 0, size: len as u64, buffer_size: self.size };
        if len as u64 > self.size {
            return Err(out_of_bounds());
        }
        let mapping =
            self.buffer.mapping().ok_or_else(|| RangeError::NotHostVisible { device: self.device() })?;
        Ok((mapping, usize::try_from(self.offset).map_err(|_| out_of_bounds())?))
    }
}

/// A range of bytes in one of the memories of a program; comparable while the memory is alive.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MemoryPlace {
    /// 0 for memory of the host, else the allocation.
    space: usize,
    bytes: Range<u64>,
}

impl MemoryPlace {
    /// The memory: 0 for that which has one address for everybody (the host's, and unified memory of devices), else a
    /// number of its own for as long as it is alive.
    pub const fn space(&self) -> usize {
        self.space
    }

    /// The bytes, by address where the memory has one, else from its first byte on.
    pub const fn bytes(&self) -> &Range<u64> {
        &self.bytes
    }

    /// How many bytes two places share.
    pub fn overlap(&self, other: &Self) -> u64 {
        if self.space != other.space {
            return 0;
        }
        let end = self.bytes.end.min(other.bytes.end);
        end.saturating_sub(self.bytes.start.max(other.bytes.start))
    }
}

impl From<Arc<dyn Buffer>> for BufferView {
    fn from(buffer: Arc<dyn Buffer>) -> Self {
        Self::whole(buffer)
    }
}

impl fmt::Debug for BufferView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufferView({} {:?} of {})", self.device(), self.range(), self.buffer.size())
    }
}

#[cfg(test)]
#[expect(unsafe_code, reason = "makes a mapping of memory of its own")]
mod tests {
    use super::*;

    #[test]
    fn words_are_loaded_and_stored_where_they_lie() {
        let mut memory = [0_u64; 3];
        let base = NonNull::new(memory.as_mut_ptr().cast()).unwrap();
        // SAFETY: the array outlives the mapping, and nothing else touches it meanwhile.
        let mapping = unsafe { HostMapping::new(base, 24) };
        assert_eq!(mapping.store(8, 7), Ok(()));
        assert_eq!((mapping.load(0), mapping.load(8)), (Ok(0), Ok(7)));
        assert_eq!(mapping.load(4), Err(RangeError::Misaligned { offset: 4, needed: 8 }));
        let beyond = RangeError::OutOfBounds { offset: 24, size: 8, buffer_size: 24 };
        assert_eq!(mapping.store(24, 1), Err(beyond));
    }
}
