//! Ranges of memory by address, which may be another rank's.

use std::ptr::NonNull;

/// Some bytes at an address. Whoever uses it says why they are there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is an address and a length; using the memory is what is unsafe, in every thread.
unsafe impl Send for Span {}

impl Span {
    pub(crate) const EMPTY: Self = Self { start: NonNull::dangling(), bytes: 0 };

    pub(crate) fn new(start: NonNull<u8>, bytes: usize) -> Self {
        Self { start, bytes }
    }

    pub(crate) fn len(self) -> usize {
        self.bytes
    }

    pub(crate) fn address(self) -> u64 {
        self.start.addr().get() as u64
    }

    /// Memory of this process by its address, as another of its threads has written it down.
    pub(crate) fn at(address: u64, bytes: usize) -> Self {
        let address = usize::try_from(address).ok().and_then(std::num::NonZero::new);
        address
            .map_or(Self::EMPTY, |address| Self { start: NonNull::with_exposed_provenance(address), bytes })
    }

    /// Makes the address usable by [`Self::at`].
    pub(crate) fn expose(self) -> u64 {
        self.start.expose_provenance().get() as u64
    }

    /// A part, cut to what there is.
    pub(crate) fn part(self, offset: usize, bytes: usize) -> Self {
        let offset = offset.min(self.bytes);
        let bytes = bytes.min(self.bytes - offset);
        // SAFETY: the offset is inside the range or at its end, which is one allocation by the contract of those
        // who make use of it.
        let start = unsafe { self.start.add(offset) };
        Self { start, bytes }
    }

    /// Whether both have bytes in common.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        let end = |span: Self| span.address() + span.bytes as u64;
        self.bytes > 0 && other.bytes > 0 && self.address() < end(other) && other.address() < end(self)
    }

    /// Copies as much as both have; they may be the same bytes.
    ///
    /// # Safety
    ///
    /// - Both are memory that is valid for this, of which nobody else writes the source or touches the destination.
    pub(crate) unsafe fn copy_from(self, source: Self) {
        if self.start == source.start {
            return;
        }
        // SAFETY: both are valid for as many bytes by the caller's contract.
        unsafe { self.start.copy_from(source.start, self.bytes.min(source.bytes)) };
    }

    /// The bytes, to be read.
    ///
    /// # Safety
    ///
    /// - They are valid for reading and nobody writes them while the slice is used.
    pub(crate) unsafe fn read<'a>(self) -> &'a [u8] {
        // SAFETY: by the caller's contract; an empty one has a dangling start, which is allowed.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// The bytes, to be written.
    ///
    /// # Safety
    ///
    /// - They are valid for writing and nobody else touches them while the slice is used.
    pub(crate) unsafe fn write<'a>(self) -> &'a mut [u8] {
        // SAFETY: by the caller's contract; an empty one has a dangling start, which is allowed.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}
