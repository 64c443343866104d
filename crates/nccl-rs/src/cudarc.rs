//! Slices and streams of the crate `cudarc`, in use by calls of this one.
//!
//! Its slices remember what uses them on which stream, so that nothing here is unsafe: a slice that is dropped or used
//! on another stream waits for the calls. They are made in a closure, since what is remembered has to be so after the
//! calls, whatever becomes of the views. After [`Error::TimedOut`], the library may still begin a call: abort the
//! communicator before the slices go.

use std::ffi::c_void;

use ::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use crate::{
    dtype::Element,
    error::Error,
    group,
    memory::{Dst, Src},
    stream::Stream,
};

/// Makes calls that read one slice and write another, in a stream.
///
/// ```no_run
/// # use cudarc::driver::{CudaSlice, CudaStream};
/// # use nccl_rs::{Communicator, Error, ReduceOp};
/// # fn sum(comm: &Communicator, input: &CudaSlice<f32>, output: &mut CudaSlice<f32>, stream: &CudaStream) -> Result<(), Error> {
/// nccl_rs::cudarc::moving(input, output, stream, |src, dst, stream| comm.all_reduce(src, dst, ReduceOp::Sum, stream))
/// # }
/// ```
///
/// # Errors
///
/// As for [`reading`].
pub fn moving<S: Element, D: Element, R, E: From<Error>>(
    src: &impl DevicePtr<S>,
    dst: &mut impl DevicePtrMut<D>,
    stream: &CudaStream,
    calls: impl FnOnce(&Src<'_>, &mut Dst<'_>, &Stream<'_>) -> Result<R, E>,
) -> Result<R, E> {
    reading(src, stream, |src, _| writing(dst, stream, |dst, stream| calls(src, dst, stream)))
}

/// Makes calls that read a slice, in a stream. The view cannot be kept:
///
/// ```compile_fail
/// # use cudarc::driver::{CudaSlice, CudaStream};
/// # use nccl_rs::{Error, Src};
/// fn keep<'a>(input: &'a CudaSlice<f32>, stream: &'a CudaStream) -> Result<Src<'a>, Error> {
///     nccl_rs::cudarc::reading(input, stream, |src, _| Ok(*src))
/// }
/// ```
///
/// # Errors
///
/// What the closure returns; [`Error::Invalid`] in an open group: what a group calls begins at its end, and the slice
/// has to be in use until then. Make the group in the closure.
#[expect(unsafe_code, reason = "vouches for memory")]
pub fn reading<T: Element, R, E: From<Error>>(
    slice: &impl DevicePtr<T>,
    stream: &CudaStream,
    calls: impl FnOnce(&Src<'_>, &Stream<'_>) -> Result<R, E>,
) -> Result<R, E> {
    group::outside("cudarc::reading")?;
    let device = device_of(slice.stream());
    let (address, _in_use) = slice.device_ptr(stream);
    // SAFETY: the slice holds `len` elements. The calls are in this stream alone, and the slice is in use there until
    // after them: whoever writes or frees it waits for that.
    let src = unsafe { Src::new(to_pointer(address), slice.len(), T::TYPE) };
    let stream = Stream::from(stream);
    calls(&src.on(device).within(&stream), &stream)
}

/// Makes calls that write a slice, in a stream.
///
/// # Errors
///
/// As for [`reading`].
#[expect(unsafe_code, reason = "vouches for memory")]
pub fn writing<T: Element, R, E: From<Error>>(
    slice: &mut impl DevicePtrMut<T>,
    stream: &CudaStream,
    calls: impl FnOnce(&mut Dst<'_>, &Stream<'_>) -> Result<R, E>,
) -> Result<R, E> {
    group::outside("cudarc::writing")?;
    let (count, device) = (slice.len(), device_of(slice.stream()));
    let (address, _in_use) = slice.device_ptr_mut(stream);
    // SAFETY: as in `reading`; nobody else uses the slice meanwhile, which is borrowed.
    let dst = unsafe { Dst::new(to_pointer(address), count, T::TYPE) };
    let stream = Stream::from(stream);
    calls(&mut dst.on(device).within(&stream), &stream)
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
