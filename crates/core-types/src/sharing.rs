//! Memory that processes of one host share by passing a file descriptor.

use std::{fmt, os::fd::OwnedFd, sync::Arc};

use crate::{AllocError, Buffer, DeviceUuid};

/// The optional family of devices whose memory other processes can use.
///
/// How the descriptor gets from one process to the other is not the seam's affair; a Unix socket carries it
/// (`SCM_RIGHTS`).
pub trait Sharing: fmt::Debug + Send + Sync {
    /// Allocates zeroed device memory that can be exported.
    ///
    /// # Errors
    ///
    /// See [`AllocError`].
    fn allocate_shareable(&self, size: u64) -> Result<Arc<dyn Buffer>, AllocError>;

    /// Makes a descriptor of a buffer from [`Sharing::allocate_shareable`]. The memory lives for as long as a
    /// descriptor or a buffer of it does, in any process.
    ///
    /// # Errors
    ///
    /// [`AllocError::CannotExport`] for any other buffer.
    fn export(&self, buffer: &dyn Buffer) -> Result<SharedMemory, AllocError>;

    /// Makes a buffer of memory that was exported for the same device, in this process or another.
    ///
    /// # Errors
    ///
    /// [`AllocError::CannotImport`] naming what is wrong with it.
    fn import_shared(&self, memory: SharedMemory) -> Result<Arc<dyn Buffer>, AllocError>;

    /// Makes one buffer of memory that was exported for several devices which this one reaches ([`crate::Peers`]), itself
    /// among them perhaps: one part behind the other, in this order. It is a buffer of this device, for its queues and
    /// kernels alone.
    ///
    /// # Errors
    ///
    /// [`AllocError::CannotImport`] naming what is wrong: such as a part that is no whole number of pages, behind which
    /// nothing can begin.
    ///
    /// # Portability
    ///
    /// CUDA; the pages are of 2 MiB there.
    fn import_window(&self, parts: Vec<SharedMemory>) -> Result<Arc<dyn Buffer>, AllocError>;
}

/// Exported memory: what has to travel to the other process.
#[derive(Debug)]
pub struct SharedMemory {
    /// The device whose memory it is.
    pub device: DeviceUuid,
    /// Size of the buffer in bytes.
    pub size: u64,
    /// The driver's descriptor.
    pub descriptor: OwnedFd,
}
