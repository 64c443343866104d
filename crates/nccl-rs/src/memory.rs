//! What is sent from and received into.

use std::{ffi::c_void, marker::PhantomData, ops::Range, ptr::NonNull};

use crate::{
    device::Current,
    dtype::{DataType, Element},
    error::Error,
    library::Nccl,
    stream::Stream,
};

/// Elements in device memory that a call reads.
#[derive(Debug, Clone, Copy)]
pub struct Src<'a> {
    pub(crate) span: Span,
    lifetime: PhantomData<&'a [u8]>,
}

/// Elements in device memory that a call writes.
#[derive(Debug)]
pub struct Dst<'a> {
    pub(crate) span: Span,
    lifetime: PhantomData<&'a mut [u8]>,
}

/// Where elements are, how many, and of which type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) address: *mut c_void,
    pub(crate) count: usize,
    pub(crate) dtype: DataType,
    /// If it is known.
    pub(crate) device: Option<u32>,
    /// The stream that it may be used in, if not any.
    pub(crate) stream: Option<*mut c_void>,
}

impl Span {
    pub(crate) const fn size_bytes(&self) -> usize {
        self.count.saturating_mul(self.dtype.size_bytes())
    }

    fn end(&self) -> usize {
        self.address.addr().saturating_add(self.size_bytes())
    }

    /// Whether memory can be so large.
    pub(crate) const fn can_be(&self) -> bool {
        match self.count.checked_mul(self.dtype.size_bytes()) {
            Some(bytes) => bytes <= isize::MAX as usize,
            None => false,
        }
    }

    /// Whether they share a byte.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.address.addr().max(other.address.addr()) < self.end().min(other.end())
    }

    /// `count` of the elements from `first` on, which the span holds.
    pub(crate) const fn part(&self, first: usize, count: usize) -> Self {
        let offset = first.wrapping_mul(self.dtype.size_bytes());
        Self { address: self.address.wrapping_byte_add(offset), count, ..*self }
    }
}

macro_rules! views {
    ($name:ident, $verb:literal) => {
        impl $name<'_> {
            /// `count` elements from `address` on. An address of no memory goes with no elements.
            ///
            /// # Safety
            ///
            /// - The memory is the communicator's device's or reachable from there, and large enough.
            /// - It stays allocated, and registered if it is, until the work is over that calls with this view put in a
            ///   stream; if such a call is [`Error::TimedOut`], until the communicator is gone.
            #[doc = concat!("- Until then nobody else ", $verb, " it, but in the order of that stream.")]
            #[expect(unsafe_code, reason = "the caller vouches for memory")]
            #[must_use]
            pub const unsafe fn new(address: *mut c_void, count: usize, dtype: DataType) -> Self {
                let span = Span { address, count, dtype, device: None, stream: None };
                Self { span, lifetime: PhantomData }
            }

            /// The same, known to be on a device: a communicator of another one refuses it.
            #[must_use]
            pub const fn on(mut self, device: u32) -> Self {
                self.span.device = Some(device);
                self
            }

            /// The same, for calls in one stream: others refuse it.
            #[must_use]
            pub const fn within(mut self, stream: &Stream<'_>) -> Self {
                self.span.stream = Some(stream.raw);
                self
            }

            /// How many elements there are.
            #[must_use]
            pub const fn count(&self) -> usize {
                self.span.count
            }

            /// Their type.
            #[must_use]
            pub const fn dtype(&self) -> DataType {
                self.span.dtype
            }
        }
    };
}

views!(Src, "writes");
views!(Dst, "reads or writes");

/// Device memory that the library allocated (`ncclMemAlloc`), which is what windows and registration work best with.
///
/// Freed when dropped.
#[derive(Debug)]
pub struct Memory {
    nccl: Nccl,
    address: NonNull<c_void>,
    size_bytes: usize,
    device: Option<u32>,
}

// SAFETY: an address of device memory, which belongs to no thread; the library frees it from any.
#[expect(unsafe_code, reason = "holds an address")]
unsafe impl Send for Memory {}
// SAFETY: shared, it only tells its address.
#[expect(unsafe_code, reason = "holds an address")]
unsafe impl Sync for Memory {}

impl Memory {
    /// Allocates on a device, or on the calling thread's current one.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`] below NCCL 2.19; [`Error::Nccl`] if there is no memory.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn alloc(nccl: &Nccl, device: Option<u32>, size_bytes: usize) -> Result<Self, Error> {
        nccl.check_process()?;
        let (call, alloc) = nccl.functions().mem_alloc.or_too_old(nccl.version())?;
        let _current = device.map(Current::enter).transpose()?;
        let mut address = std::ptr::null_mut();
        // SAFETY: the result is written to this stack frame.
        nccl.check(call, unsafe { alloc(&raw mut address, size_bytes) })?;
        let nothing = || Error::Invalid { what: format!("{call} gave no memory for {size_bytes} bytes") };
        let address = NonNull::new(address).ok_or_else(nothing)?;
        Ok(Self { nccl: nccl.clone(), address, size_bytes, device })
    }

    /// Where it begins.
    #[must_use]
    pub const fn address(&self) -> *mut c_void {
        self.address.as_ptr()
    }

    /// How large it is.
    #[must_use]
    pub const fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// Elements of it, to be read.
    ///
    /// # Errors
    ///
    /// [`Error::Length`] if it does not hold them.
    ///
    /// # Safety
    ///
    /// - It lives, with its registrations and windows, until the work is over that calls with this view put in a stream;
    ///   if such a call is [`Error::TimedOut`], until the communicator is gone.
    /// - Until then nobody writes these elements, but in the order of that stream.
    #[expect(unsafe_code, reason = "the caller vouches for an order")]
    pub unsafe fn src<T: Element>(&self, elements: Range<usize>) -> Result<Src<'_>, Error> {
        Ok(Src { span: self.span::<T>(elements)?, lifetime: PhantomData })
    }

    /// Elements of it, to be written.
    ///
    /// # Errors
    ///
    /// [`Error::Length`] if it does not hold them.
    ///
    /// # Safety
    ///
    /// - It lives, with its registrations and windows, until the work is over that calls with this view put in a stream;
    ///   if such a call is [`Error::TimedOut`], until the communicator is gone.
    /// - Until then nobody else reads or writes these elements, but in the order of that stream.
    #[expect(unsafe_code, reason = "the caller vouches for an order")]
    pub unsafe fn dst<T: Element>(&self, elements: Range<usize>) -> Result<Dst<'_>, Error> {
        Ok(Dst { span: self.span::<T>(elements)?, lifetime: PhantomData })
    }

    fn span<T: Element>(&self, elements: Range<usize>) -> Result<Span, Error> {
        let found = self.size_bytes / size_of::<T>();
        if elements.start > elements.end || elements.end > found {
            return Err(Error::Length { call: "a view", what: "the memory", expected: elements.end, found });
        }
        let all =
            Span { address: self.address(), count: found, dtype: T::TYPE, device: self.device, stream: None };
        Ok(all.part(elements.start, elements.len()))
    }
}

impl Drop for Memory {
    #[expect(unsafe_code, reason = "calls the library")]
    fn drop(&mut self) {
        if self.nccl.check_process().is_err() {
            return;
        }
        if let Ok((_, free)) = self.nccl.functions().mem_free.or_too_old(self.nccl.version()) {
            // SAFETY: `mem_alloc` gave the address, which is freed once; views promise that no work uses it any more.
            let _code = unsafe { free(self.address()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    fn span(address: usize, count: usize) -> Span {
        let address = ptr::without_provenance_mut(address);
        Span { address, count, dtype: DataType::F32, device: None, stream: None }
    }

    #[test]
    fn spans_that_share_a_byte_overlap() {
        let check = |one: Span, other: Span, expected| {
            assert_eq!(one.overlaps(&other), expected, "{one:?} {other:?}");
            assert_eq!(other.overlaps(&one), expected, "{other:?} {one:?}");
        };
        check(span(64, 4), span(80, 4), false);
        check(span(64, 4), span(79, 4), true);
        check(span(64, 4), span(64, 4), true);
        check(span(64, 0), span(60, 4), false);
        check(span(64, 0), span(64, 4), false);
        check(span(64, usize::MAX), span(1 << 40, 1), true);
    }
}
