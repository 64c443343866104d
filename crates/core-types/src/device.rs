//! The seam: backends, and the devices they open.

use std::{any::Any, fmt, ptr::NonNull, sync::Arc};

use serde::{Deserialize, Serialize};

#[cfg(unix)]
use crate::Sharing;
use crate::{
    AllocError, Buffer, BufferDesc, Bytes, CodeFormat, Collectives, DeviceClock, DeviceId, Failure, Graphs,
    Interop, KernelCode, LinkFact, LinkTraffic, LoadError, Module, OpenError, PciAddress, Queue, QueueDesc,
    Residents, Semaphore,
};

/// A family of devices reached through one driver stack.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Its name, such as `host` or `cuda`.
    fn name(&self) -> &'static str;

    /// The devices there are, in ordinal order, without opening them.
    ///
    /// # Errors
    ///
    /// [`OpenError::Unavailable`] when the driver stack is missing or broken.
    fn devices(&self) -> Result<Vec<DeviceInfo>, OpenError>;

    /// Opens a device, which must have all `required` features. Opening it again gives the same device.
    ///
    /// # Errors
    ///
    /// [`OpenError::UnknownDevice`], or [`OpenError::Unsupported`] naming the features it lacks.
    fn open(&self, ordinal: u32, required: Features) -> Result<Arc<dyn Device>, OpenError>;
}

bitflags::bitflags! {
    /// What a device can do beyond the required core. Each flag stands for a family that is present as
    /// a whole.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
    pub struct Features: u32 {
        /// Allocates [`crate::MemoryKind::HostVisible`] and [`crate::MemoryKind::Upload`] buffers.
        const HOST_VISIBLE_MEMORY = 1 << 0;
        /// [`Device::peers`]: reaches memory of other devices of its backend.
        const PEER_ACCESS = 1 << 1;
        /// [`Device::links`]: knows what it is linked to.
        const LINK_FACTS = 1 << 2;
        /// [`Device::host_import`]: uses host memory allocated elsewhere.
        const HOST_IMPORT = 1 << 3;
        /// [`Device::residents`]: runs kernels that stay.
        const RESIDENT_KERNELS = 1 << 4;
        /// [`Device::graphs`]: prepares graphs of operations and replays them.
        const GRAPHS = 1 << 5;
        /// [`Device::clock`]: tells the time.
        const TIMESTAMPS = 1 << 6;
        /// [`Device::interop`]: works with handles of other libraries.
        const INTEROP = 1 << 7;
        /// [`Device::sharing`]: shares memory with other processes.
        const SHARED_MEMORY = 1 << 8;
        /// [`Device::collectives`]: its driver stack has collectives of its own.
        const COLLECTIVES = 1 << 9;
    }
}

impl fmt::Display for Features {
    /// Writes the flags in lower case, joined by commas: `peer access, resident kernels`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, (name, _)) in self.iter_names().enumerate() {
            let separator = if position == 0 { "" } else { ", " };
            write!(f, "{separator}{}", name.to_lowercase().replace('_', " "))?;
        }
        Ok(())
    }
}

/// The sort of silicon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DeviceKind {
    /// Processor cores.
    Cpu,
    /// A graphics processor.
    Gpu,
    /// A neural processor.
    Npu,
    /// Any other accelerator.
    Other,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "CPU",
            Self::Gpu => "GPU",
            Self::Npu => "NPU",
            Self::Other => "accelerator",
        })
    }
}

/// What a driver reports about a device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeviceInfo {
    /// Who it is.
    pub id: DeviceId,
    /// The product's name.
    pub name: String,
    /// The sort of silicon.
    pub kind: DeviceKind,
    /// The version of its driver stack; what was measured holds for one of them.
    pub driver: String,
    /// Its memory.
    pub memory: Bytes,
    /// Independent processors: CUDA's SMs, a host device's worker threads.
    pub multiprocessors: u32,
    /// Major and minor version of what its code may use, where the vendor has such numbers.
    pub compute_capability: Option<(u32, u32)>,
    /// Where it sits on the PCI bus, if it does.
    pub pci: Option<PciAddress>,
    /// The NUMA node it is nearest to, if known.
    pub numa_node: Option<u32>,
    /// The forms of code it runs, preferred first.
    pub code_formats: Vec<CodeFormat>,
}

/// How much a device takes at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Threads of one workgroup.
    pub workgroup_threads: u32,
    /// Workgroups of a launch, in each dimension.
    pub workgroups: [u32; 3],
    /// Bytes of all scalar arguments of a kernel together.
    pub scalar_bytes: u32,
    /// Bytes of dynamic memory a workgroup can be given, see [`crate::KernelContract::shared_bytes`].
    pub shared_bytes: u32,
    /// Every buffer starts at a multiple of this many bytes.
    pub buffer_alignment: u64,
}

/// A device's memory at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    /// In all.
    pub capacity: Bytes,
    /// Not allocated by anyone, as far as the driver knows.
    pub free: Bytes,
}

/// An open device.
///
/// The methods without a body are the required core. The rest are optional families, each present as a
/// whole or absent, as [`Device::features`] says.
pub trait Device: Any + fmt::Debug + Send + Sync {
    /// Who it is.
    fn info(&self) -> &DeviceInfo;

    /// What it can do.
    fn features(&self) -> Features;

    /// How much it takes at once.
    fn limits(&self) -> &Limits;

    /// Its memory at this moment, asked from the driver.
    ///
    /// # Errors
    ///
    /// [`AllocError::Failed`] when the device is lost.
    fn memory(&self) -> Result<MemoryUsage, AllocError>;

    /// Allocates zeroed memory.
    ///
    /// # Errors
    ///
    /// See [`AllocError`].
    fn allocate(&self, desc: &BufferDesc) -> Result<Arc<dyn Buffer>, AllocError>;

    /// Makes a queue.
    ///
    /// # Errors
    ///
    /// [`OpenError::InvalidConfig`] or [`OpenError::Failed`].
    fn create_queue(&self, desc: &QueueDesc) -> Result<Arc<dyn Queue>, OpenError>;

    /// Makes a timeline semaphore that stands at `initial`.
    ///
    /// # Errors
    ///
    /// [`OpenError::Failed`] when the device is lost.
    fn create_semaphore(&self, initial: u64) -> Result<Arc<dyn Semaphore>, OpenError>;

    /// Loads the first form of `code` that this device runs.
    ///
    /// # Errors
    ///
    /// See [`LoadError`]; nothing that is loaded or running is touched.
    fn load(&self, code: &KernelCode) -> Result<Arc<dyn Module>, LoadError>;

    /// Why the device is lost, if it is.
    fn failure(&self) -> Option<Arc<Failure>>;

    /// Memory of other devices, reached directly.
    fn peers(&self) -> Option<&dyn Peers> {
        None
    }

    /// What the driver knows about links.
    fn links(&self) -> Option<&dyn Links> {
        None
    }

    /// Host memory that somebody else allocated.
    fn host_import(&self) -> Option<&dyn HostImport> {
        None
    }

    /// Kernels that stay.
    fn residents(&self) -> Option<&dyn Residents> {
        None
    }

    /// Graphs of operations.
    fn graphs(&self) -> Option<&dyn Graphs> {
        None
    }

    /// The device's clock.
    fn clock(&self) -> Option<&dyn DeviceClock> {
        None
    }

    /// Handles of other libraries.
    fn interop(&self) -> Option<&dyn Interop> {
        None
    }

    /// Collectives of the driver stack's own.
    fn collectives(&self) -> Option<&dyn Collectives> {
        None
    }

    /// Memory that other processes use.
    #[cfg(unix)]
    fn sharing(&self) -> Option<&dyn Sharing> {
        None
    }
}

/// What every device has for convenience.
pub trait DeviceExt: Device {
    /// Does a call of the vendor's, by another library or the program itself, that may wait for everything
    /// that runs on the device: residents give way meanwhile.
    fn foreign<R>(&self, call: impl FnOnce() -> R) -> R {
        let _way = self.residents().map(Residents::give_way);
        call()
    }
}

impl<D: Device + ?Sized> DeviceExt for D {}

/// The optional family of devices whose queues and kernels reach memory of other devices.
pub trait Peers: fmt::Debug + Send + Sync {
    /// What this device may do with memory of `other`, a device of the same backend.
    fn access(&self, other: DeviceId) -> PeerAccess;
}

/// What one device may do with memory of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PeerAccess {
    /// Its queues and kernels may read there.
    pub read: bool,
    /// Its queues and kernels may write there.
    pub write: bool,
}

/// The optional family of devices that know their links.
pub trait Links: fmt::Debug + Send + Sync {
    /// The links that start or end at this device.
    fn facts(&self) -> Vec<LinkFact>;

    /// Bytes counted so far on the links that start at this device or bring host memory to it; empty where
    /// nothing counts.
    fn traffic(&self) -> Vec<LinkTraffic>;
}

/// The optional family of devices that use host memory allocated elsewhere, without copying it.
pub trait HostImport: fmt::Debug + Send + Sync {
    /// Address and size must be multiples of this many bytes.
    fn alignment(&self) -> u64;

    /// Makes a host-visible buffer of existing memory.
    ///
    /// # Errors
    ///
    /// [`AllocError::CannotImport`] naming the rule the memory breaks.
    fn import(&self, memory: HostMemory) -> Result<Arc<dyn Buffer>, AllocError>;
}

/// Host memory with the owner that keeps it alive.
#[derive(Clone)]
pub struct HostMemory {
    base: NonNull<u8>,
    len: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: it is an address, a length and an owner that is itself `Send + Sync`; the bytes are only
// reached through `Buffer`, whose users expect them to change at any time.
#[expect(unsafe_code, reason = "the raw pointer stands for shared memory, see above")]
unsafe impl Send for HostMemory {}

// SAFETY: as for `Send`; a shared reference gives out the address and nothing else.
#[expect(unsafe_code, reason = "the raw pointer stands for shared memory, see above")]
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Describes `len` bytes from `base` on.
    ///
    /// # Safety
    ///
    /// - They are valid for reads and writes until the last clone of `owner` is dropped.
    /// - No Rust reference to any of them exists until then.
    /// - If another library has pinned them for devices, they stay pinned until then.
    #[expect(unsafe_code, reason = "the duties are the caller's; nothing is done here")]
    pub unsafe fn new(base: NonNull<u8>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, len, owner }
    }

    /// The memory of a host-visible buffer, so that another device can use it too; `None` for others.
    pub fn of_buffer(buffer: Arc<dyn Buffer>) -> Option<Self> {
        let mapping = buffer.mapping()?;
        let (base, len) = (NonNull::new(mapping.as_ptr())?, mapping.len());
        Some(Self { base, len, owner: Arc::new(buffer) })
    }

    /// First byte.
    pub const fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether one value owns both memories, as where one is a clone of the other.
    pub fn has_owner_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.owner, &other.owner)
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory({} bytes at {:p}, owner {:p})", self.len, self.base, self.owner)
    }
}
