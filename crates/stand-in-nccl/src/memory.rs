//! Memory of callers, read and written when a stream comes to a call.

use std::ffi::c_void;

/// Where a caller's elements are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place(usize);

impl Place {
    pub(crate) fn new(address: *const c_void) -> Self {
        Self(address.expose_provenance())
    }

    pub(crate) const fn at(self, offset: usize) -> Self {
        Self(self.0 + offset)
    }

    /// A copy of the bytes there. No bytes are read from no memory.
    #[expect(unsafe_code, reason = "reads a caller's memory")]
    pub(crate) fn read(self, count: usize) -> Vec<u8> {
        if count == 0 {
            return Vec::new();
        }
        let start = std::ptr::with_exposed_provenance::<u8>(self.0);
        let mut bytes = vec![0; count];
        // SAFETY: `nccl.h` asks callers for memory that stays until the work is over, and for nobody to write it.
        unsafe { start.copy_to_nonoverlapping(bytes.as_mut_ptr(), count) };
        bytes
    }

    #[expect(unsafe_code, reason = "writes a caller's memory")]
    pub(crate) fn write(self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let start = std::ptr::with_exposed_provenance_mut::<u8>(self.0);
        // SAFETY: as in `read`, and for nobody to read it.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}
