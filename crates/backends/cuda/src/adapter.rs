//! Streams and memory of cudarc, in the version that this crate is built with.
//!
//! Programs with another version use [`Interop`] with the handles as integers.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _};
use warpweft_core_types::{
    Buffer, Device, Interop, InteropError, NativeHandle, NativeMemory, NativeQueue, Queue, QueueDesc,
};

use crate::interop::STREAM;

/// A queue that works in a stream of cudarc's, the default one included. The stream stays alive with it.
///
/// # Errors
///
/// As [`Interop::import_queue`]: the stream must be of the device's context, which is the primary one in both
/// libraries unless a program brought its own.
#[expect(unsafe_code, reason = "vouches for cudarc's handles")]
pub fn import_stream(
    device: &dyn Device,
    stream: &Arc<CudaStream>,
    desc: &QueueDesc,
) -> Result<Arc<dyn Queue>, InteropError> {
    let handle = NativeHandle { kind: STREAM, value: stream.cu_stream().expose_provenance() as u64 };
    // SAFETY: cudarc's stream is a CUDA stream for as long as it is alive, and its owner goes along.
    let queue = unsafe { NativeQueue::new(handle, Arc::new(Arc::clone(stream))) };
    family(device)?.import_queue(queue, desc)
}

/// A buffer of all of a slice of cudarc's, which stays alive with it.
///
/// cudarc orders its own uses of the slice and does not see ours: use both on one stream, or let one wait for the
/// other.
///
/// # Errors
///
/// As [`Interop::import_buffer`].
#[expect(unsafe_code, reason = "vouches for cudarc's memory")]
pub fn import_slice<T: Send + Sync + 'static>(
    device: &dyn Device,
    slice: &Arc<CudaSlice<T>>,
) -> Result<Arc<dyn Buffer>, InteropError> {
    // What cudarc notes here is a read that is over at once.
    let (address, noted) = slice.device_ptr(slice.stream());
    drop(noted);
    let owner = Arc::new(Arc::clone(slice));
    // SAFETY: cudarc's slice is as many bytes of device memory for as long as it is alive, and its owner goes
    // along. Device memory is outside Rust's references, so that writing it behind a shared one breaks nothing.
    let memory = unsafe { NativeMemory::new(address, slice.num_bytes() as u64, owner) };
    family(device)?.import_buffer(memory)
}

fn family(device: &dyn Device) -> Result<&dyn Interop, InteropError> {
    let refused = || InteropError::Refused {
        device: device.info().id,
        what: "a stream or slice of cudarc".to_owned(),
        reason: "it works with no handles of other libraries".to_owned(),
    };
    device.interop().ok_or_else(refused)
}
