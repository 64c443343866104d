//! Handles of the vendor's own, in and out: contexts, streams and memory that other libraries made.

use std::{any::Any, error::Error, fmt, sync::Arc};

use crate::{Access, Buffer, BufferView, DeviceId, InteropError, Queue, QueueDesc};

/// A vendor's handle as an integer, so that no version of a vendor's bindings is part of the seam.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NativeHandle {
    /// The vendor's name for its type, such as `CUstream`.
    pub kind: &'static str,
    /// The handle's bits.
    pub value: u64,
}

impl fmt::Display for NativeHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:#x}", self.kind, self.value)
    }
}

/// The optional family of devices that work with queues and memory of other libraries.
pub trait Interop: fmt::Debug + Send + Sync {
    /// The device's own handle: a CUDA context.
    fn device_handle(&self) -> NativeHandle;

    /// A queue's handle, for other libraries to enqueue work in. It is valid while the queue lives.
    ///
    /// # Errors
    ///
    /// [`InteropError::Foreign`] for a queue of another device.
    fn queue_handle(&self, queue: &dyn Queue) -> Result<NativeHandle, InteropError>;

    /// Where this device sees a buffer's first byte. It is valid while the buffer lives.
    ///
    /// # Errors
    ///
    /// [`InteropError::Foreign`] for a buffer of another backend.
    fn buffer_handle(&self, buffer: &dyn Buffer) -> Result<NativeHandle, InteropError>;

    /// Makes a queue of a stream that another library uses too. Work of both runs in the order in which it
    /// was enqueued; the stream is never destroyed here.
    ///
    /// A submission enters the stream at once, and where the driver has no room for more, it waits for some. One
    /// that waits for a point of which no work is under way yet enters when it can, behind what the other library
    /// has enqueued meanwhile.
    ///
    /// # Errors
    ///
    /// [`InteropError::Refused`] with the reason.
    fn import_queue(&self, queue: NativeQueue, desc: &QueueDesc) -> Result<Arc<dyn Queue>, InteropError>;

    /// Makes a buffer of memory that another library allocated. It is never freed here.
    ///
    /// # Errors
    ///
    /// [`InteropError::Refused`] with the reason: memory that starts at no multiple of
    /// [`Limits::buffer_alignment`](crate::Limits::buffer_alignment) is not taken, since kernels rely on that of
    /// every buffer. Import the allocation as a whole and use a view of the part.
    fn import_buffer(&self, memory: NativeMemory) -> Result<Arc<dyn Buffer>, InteropError>;

    /// Lets `record` enqueue work in a private stream and keeps that work, unexecuted, as a node for graphs.
    /// It touches what `accesses` says.
    ///
    /// The calls with which `record` enqueues are unsafe ones of another library, and what those ask for goes on
    /// for as long as the work can be replayed: all that it uses beside the buffers of `accesses`, such as memory,
    /// code and handles, stays valid until the last clone of `owner` is dropped. The captured work keeps `owner`, and
    /// so does every graph that has it as a node until its last replay is over.
    ///
    /// # Errors
    ///
    /// [`InteropError::Capture`] with the words of `record`, or of the driver where the work cannot be
    /// captured.
    fn capture(
        &self,
        accesses: Vec<(BufferView, Access)>,
        owner: Arc<dyn Any + Send + Sync>,
        record: &mut dyn FnMut(NativeHandle) -> Result<(), Box<dyn Error + Send + Sync>>,
    ) -> Result<Arc<dyn CapturedWork>, InteropError>;
}

/// Work of another library, recorded for graphs.
pub trait CapturedWork: Any + fmt::Debug + Send + Sync {
    /// The device it was recorded for.
    fn device(&self) -> DeviceId;

    /// What it touches, as whoever recorded it said.
    fn accesses(&self) -> &[(BufferView, Access)];
}

/// A stream of another library, with the owner that keeps it alive.
#[derive(Clone)]
pub struct NativeQueue {
    handle: NativeHandle,
    owner: Arc<dyn Any + Send + Sync>,
}

impl NativeQueue {
    /// Describes a stream.
    ///
    /// # Safety
    ///
    /// - The handle is of the kind it says and of the device that will import it.
    /// - It stays valid until the last clone of `owner` is dropped.
    #[expect(unsafe_code, reason = "the duties are the caller's; nothing is done here")]
    pub unsafe fn new(handle: NativeHandle, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { handle, owner }
    }

    /// The stream.
    pub const fn handle(&self) -> NativeHandle {
        self.handle
    }

    /// What keeps it alive.
    pub const fn owner(&self) -> &Arc<dyn Any + Send + Sync> {
        &self.owner
    }
}

impl fmt::Debug for NativeQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NativeQueue({})", self.handle)
    }
}

/// Device memory of another library, with the owner that keeps it alive.
#[derive(Clone)]
pub struct NativeMemory {
    address: u64,
    size: u64,
    owner: Arc<dyn Any + Send + Sync>,
}

impl NativeMemory {
    /// Describes `size` bytes at an address that the device understands.
    ///
    /// # Safety
    ///
    /// - They are valid for the device's reads and writes until the last clone of `owner` is dropped.
    /// - Whatever else touches them is ordered with the work that uses the buffer, or expects their values to
    ///   be unspecified.
    #[expect(unsafe_code, reason = "the duties are the caller's; nothing is done here")]
    pub unsafe fn new(address: u64, size: u64, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { address, size, owner }
    }

    /// First byte.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// What keeps it alive.
    pub const fn owner(&self) -> &Arc<dyn Any + Send + Sync> {
        &self.owner
    }
}

impl fmt::Debug for NativeMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NativeMemory({} bytes at {:#x})", self.size, self.address)
    }
}
