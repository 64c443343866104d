//! Slices and streams of the crate `cudarc`, in use by calls of this one.
//!
//! Its slices remember what uses them on which stream, so that nothing here is unsafe: a slice that is dropped or used
//! on another stream waits for the call.

use std::{
    ffi::c_void,
    ops::{Deref, DerefMut},
};

use ::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};

use crate::{
    dtype::Element,
    error::Error,
    group,
    memory::{Dst, Src},
    stream::Stream,
};

/// A slice that a call reads, until it is dropped.
#[derive(Debug)]
pub struct Reading<'a> {
    src: Src<'a>,
    _use: SyncOnDrop<'a>,
}

/// A slice that a call writes, until it is dropped.
#[derive(Debug)]
pub struct Writing<'a> {
    dst: Dst<'a>,
    _use: SyncOnDrop<'a>,
}

impl<'a> Reading<'a> {
    /// A slice, for calls that are put in a stream.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] in an open group: what a group calls begins at its end, and the slice has to be in use until
    /// then. Make it before.
    #[expect(unsafe_code, reason = "vouches for memory")]
    pub fn new<T: Element>(slice: &'a impl DevicePtr<T>, stream: &'a CudaStream) -> Result<Self, Error> {
        group::outside("Reading::new")?;
        let (address, in_use) = slice.device_ptr(stream);
        // SAFETY: the slice holds `len` elements. It is in use on the stream until `in_use` is dropped, after the call:
        // whoever writes or frees it waits for that.
        let src = unsafe { Src::new(to_pointer(address), slice.len(), T::TYPE) };
        Ok(Self { src: src.on(device_of(stream)), _use: in_use })
    }
}

impl<'a> Writing<'a> {
    /// A slice, for calls that are put in a stream.
    ///
    /// # Errors
    ///
    /// As for [`Reading::new`].
    #[expect(unsafe_code, reason = "vouches for memory")]
    pub fn new<T: Element>(
        slice: &'a mut impl DevicePtrMut<T>,
        stream: &'a CudaStream,
    ) -> Result<Self, Error> {
        group::outside("Writing::new")?;
        let count = slice.len();
        let (address, in_use) = slice.device_ptr_mut(stream);
        // SAFETY: as in `Reading::new`; nobody else uses the slice meanwhile, which is borrowed.
        let dst = unsafe { Dst::new(to_pointer(address), count, T::TYPE) };
        Ok(Self { dst: dst.on(device_of(stream)), _use: in_use })
    }
}

impl<'a> Deref for Reading<'a> {
    type Target = Src<'a>;

    fn deref(&self) -> &Src<'a> {
        &self.src
    }
}

impl<'a> Deref for Writing<'a> {
    type Target = Dst<'a>;

    fn deref(&self) -> &Dst<'a> {
        &self.dst
    }
}

impl DerefMut for Writing<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.dst
    }
}

impl<'a> From<&'a CudaStream> for Stream<'a> {
    #[expect(unsafe_code, reason = "vouches for a handle")]
    fn from(stream: &'a CudaStream) -> Self {
        // SAFETY: the stream lives for as long as it is borrowed.
        unsafe { Stream::from_raw(stream.cu_stream().cast()) }.on(device_of(stream))
    }
}

fn device_of(stream: &CudaStream) -> u32 {
    // More devices than that are not found by a driver that counts them in an `int`.
    u32::try_from(stream.context().ordinal()).unwrap_or(u32::MAX)
}

fn to_pointer(address: u64) -> *mut c_void {
    // CUDA is there for 64-bit hosts alone.
    std::ptr::without_provenance_mut(usize::try_from(address).unwrap_or_default())
}
