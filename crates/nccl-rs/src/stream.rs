//! Streams.

use std::{ffi::c_void, marker::PhantomData, ptr};

/// A CUDA stream that work is put in.
#[derive(Debug, Clone, Copy)]
pub struct Stream<'a> {
    pub(crate) raw: *mut c_void,
    pub(crate) device: Option<u32>,
    lifetime: PhantomData<&'a ()>,
}

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

impl Stream<'_> {
    /// The default stream that all threads share (the NULL stream).
    pub const LEGACY: Self = Self { raw: ptr::null_mut(), device: None, lifetime: PhantomData };

    /// A stream of a CUDA library (`cudaStream_t`, `CUstream`).
    ///
    /// # Safety
    ///
    /// - The stream lives for as long as this value is used, and belongs to a context of the communicator's device.
    #[expect(unsafe_code, reason = "the caller vouches for a handle")]
    #[must_use]
    pub const unsafe fn from_raw(raw: *mut c_void) -> Self {
        Self { raw, device: None, lifetime: PhantomData }
    }

    /// The same, known to be of a device: a communicator of another one refuses it.
    #[must_use]
    pub const fn on(mut self, device: u32) -> Self {
        self.device = Some(device);
        self
    }

    pub(crate) fn is_per_thread(self) -> bool {
        self.raw.addr() == PER_THREAD
    }
}
