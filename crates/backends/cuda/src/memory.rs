//! Memory of one device: a stream-ordered pool of its own, and pinned host memory that is kept for reuse.
//!
//! Nothing here waits for resident kernels when it is given back. Device memory goes back to the pool in
//! stream order. Pinned memory would wait (`cuMemFreeHost` does), so a freed block stays in a list for the
//! next buffer of its size and goes back to the system when the device's last object is dropped.

#[cfg(unix)]
use std::os::fd::OwnedFd;
use std::{
    any::Any,
    collections::BTreeMap,
    ffi::c_void,
    fmt,
    ptr::{self, NonNull},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use cudarc::driver::sys::{
    CUdevice, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemAllocationType, CUmemLocation, CUmemLocationType, CUmemPool_attribute, CUmemPoolHandle_st,
    CUmemPoolProps,
};
use warpweft_core_types::{
    AllocError, Buffer, BufferDesc, BufferView, Bytes, DeviceId, DriverError, Failure, HostMapping,
    HostMemory, MemoryKind, MemoryUsage, NativeMemory,
};

#[cfg(unix)]
use crate::virtual_memory::{Import, VirtualMemory};
use crate::{
    cold::{self, ColdError},
    context::Context,
    device::CudaDevice,
    driver::{Handle, OUT_OF_MEMORY, created},
    host_memory::Imported,
    stream::{Event, Stream},
};

/// Every buffer starts at a multiple of this; the pool and pinned memory keep to more.
pub(crate) const ALIGNMENT: u64 = 256;

/// Zeroing is a kernel, so it waits for others that fill the device; this long at most.
const ZEROING_LIMIT: Duration = Duration::from_secs(30);

/// What is given back arrives in the pool within a moment of the device's.
const FREEING_LIMIT: Duration = Duration::from_secs(1);

/// Pinned blocks are a page at least, and come in sizes a quarter of a power of two apart.
pub(crate) const PAGE: u64 = 4096;

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`: every context of the process can use it. Registering
/// has flags of the same names and values.
pub(crate) const PINNED_FLAGS: u32 = 0x01 | 0x02;

/// `CU_MEMHOSTALLOC_WRITECOMBINED`.
const WRITE_COMBINED: u32 = 0x04;

/// The memory of one device.
pub(crate) struct Arena {
    context: Arc<Context>,
    pool: Handle<CUmemPoolHandle_st>,
    capacity: u64,
    /// Allocations are ordered here, apart from all queues.
    zeroing: Stream,
    /// Events that marked the end of somebody's zeroing.
    spare_events: Mutex<Vec<Event>>,
    /// Memory is given back here, so that it does not wait for zeroing.
    freeing: Stream,
    /// Other devices that may use this device's memory.
    #[cfg_attr(not(unix), expect(dead_code, reason = "for memory that processes share"))]
    users: Vec<CUdevice>,
    /// Last, since giving it back may hold the context for long, and what goes before would wait.
    pinned: PinnedBlocks,
}

/// Freed pinned blocks, by kind and size.
struct PinnedBlocks {
    context: Arc<Context>,
    free: Mutex<BTreeMap<PinnedClass, Vec<PinnedBlock>>>,
}

impl PinnedBlocks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<PinnedClass, Vec<PinnedBlock>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PinnedBlocks {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        if self.context.is_left() {
            return;
        }
        for block in std::mem::take(&mut *self.lock()).into_values().flatten() {
            // SAFETY: pinned by `pin`; every buffer of it is dropped, and the list was emptied just now. Left to
            // the service thread: whoever drops the last object of a device need not stand a wait.
            unsafe { cold::free_pinned(&self.context, block.host) };
        }
    }
}

impl Arena {
    pub(crate) fn create(
        context: &Arc<Context>,
        capacity: u64,
        users: Vec<CUdevice>,
    ) -> Result<Arc<Self>, DriverError> {
        let zeroing = Stream::create(context)?;
        let freeing = Stream::create(context)?;
        let pool = create_pool(context)?;
        Ok(Arc::new(Self {
            context: Arc::clone(context),
            pool,
            capacity,
            zeroing,
            spare_events: Mutex::default(),
            freeing,
            users,
            pinned: PinnedBlocks { context: Arc::clone(context), free: Mutex::default() },
        }))
    }

    pub(crate) fn usage(&self) -> Result<MemoryUsage, AllocError> {
        if let Some(failure) = self.context.failure() {
            return Err(AllocError::Failed(failure));
        }
        self.live_usage().map_err(|error| self.failed(error))
    }

    /// Free is what the driver would give and what the pool holds and has not given out.
    #[expect(unsafe_code, reason = "asks the driver")]
    fn live_usage(&self) -> Result<MemoryUsage, DriverError> {
        let _current = self.context.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers, which live on this stack frame.
        unsafe { self.context.driver.mem_get_info(&mut free, &mut total) }?;
        let reserved = self.pool_figure(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        let used = self.pool_figure(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        let free = free as u64 + reserved.saturating_sub(used);
        Ok(MemoryUsage { capacity: Bytes(total as u64), free: Bytes(free) })
    }

    #[expect(unsafe_code, reason = "asks the driver")]
    fn pool_figure(&self, attribute: CUmemPool_attribute) -> Result<u64, DriverError> {
        let mut value = 0_u64;
        // SAFETY: the figures asked for are 64-bit integers, and one is written to this stack frame.
        unsafe {
            self.context.driver.mem_pool_get_attribute(
                self.pool.raw(),
                attribute as i32,
                ptr::from_mut(&mut value).cast(),
            )
        }?;
        Ok(value)
    }

    /// Lets the queues and kernels of `peer` use this device's memory, that of today and of tomorrow.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn admit(&self, peer: &Context) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        let access = CUmemAccessDesc {
            location: device_location(peer),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the pool lives; one description is read from this stack frame.
        unsafe { self.context.driver.mem_pool_set_access(self.pool.raw(), &access, 1) }
    }

    pub(crate) fn allocate(self: &Arc<Self>, desc: &BufferDesc) -> Result<CudaBuffer, AllocError> {
        if desc.size == 0 {
            return Err(AllocError::ZeroSize { device: self.context.device });
        }
        if let Some(failure) = self.context.failure() {
            return Err(AllocError::Failed(failure));
        }
        let memory = match desc.kind {
            MemoryKind::Device => Memory::Pool { address: self.allocate_device(desc.size)? },
            kind => Memory::Pinned(self.allocate_pinned(desc.size, kind)?),
        };
        Ok(self.buffer(desc.size, memory))
    }

    fn buffer(self: &Arc<Self>, size: u64, memory: Memory) -> CudaBuffer {
        CudaBuffer { owner: None, arena: Arc::clone(self), size, memory: Some(memory) }
    }

    /// Zeroed memory that can be exported.
    #[cfg(unix)]
    pub(crate) fn allocate_shareable(self: &Arc<Self>, size: u64) -> Result<CudaBuffer, AllocError> {
        if size == 0 {
            return Err(AllocError::ZeroSize { device: self.context.device });
        }
        if let Some(failure) = self.context.failure() {
            return Err(AllocError::Failed(failure));
        }
        let bytes = usize::try_from(size).map_err(|_| self.out_of_memory(size))?;
        let made = VirtualMemory::create(&self.context, bytes, &self.users);
        let memory = made.map_err(|error| self.exhausted(size, error))?;
        let _current = self.context.enter().map_err(|error| self.failed(error))?;
        match self.zero(memory.address(), bytes) {
            Ok(()) => Ok(self.buffer(size, Memory::Virtual(memory))),
            Err(NotZeroed::Refused(error)) => Err(self.failed(error)),
            Err(NotZeroed::UnderWay(why)) => {
                // The device may still be at it, so the memory is never let go.
                std::mem::forget(memory);
                Err(why)
            }
        }
    }

    #[cfg(unix)]
    pub(crate) fn import_shared(
        self: &Arc<Self>,
        size: u64,
        descriptor: OwnedFd,
    ) -> Result<CudaBuffer, AllocError> {
        let refuse = |reason: String| AllocError::CannotImport { device: self.context.device, reason };
        let bytes = usize::try_from(size).ok().filter(|&bytes| bytes > 0 && size <= self.capacity);
        let bytes = bytes.ok_or_else(|| refuse(format!("it cannot hold {size} bytes")))?;
        let imported = VirtualMemory::import(&self.context, descriptor, bytes, &self.users);
        let memory = imported.map_err(|error| refuse(error.to_string()))?;
        Ok(self.buffer(size, Memory::Virtual(memory)))
    }

    /// Memory of several devices as one of this one's.
    #[cfg(unix)]
    pub(crate) fn import_window(self: &Arc<Self>, imports: &[Import]) -> Result<CudaBuffer, AllocError> {
        let refuse = |reason: String| AllocError::CannotImport { device: self.context.device, reason };
        // What others say of their memory may be anything.
        let size = imports.iter().try_fold(0_usize, |size, import| size.checked_add(import.size));
        let size = size.ok_or_else(|| refuse("its parts are longer than any memory".to_owned()))? as u64;
        let imported = VirtualMemory::import_window(&self.context, imports);
        let memory = imported.map_err(|error| refuse(error.to_string()))?;
        Ok(self.buffer(size, Memory::Virtual(memory)))
    }

    /// Memory that another library allocated for this device, as the caller found out; `open_to_peers` if devices
    /// that reach this one use it.
    pub(crate) fn import_native(self: &Arc<Self>, memory: NativeMemory, open_to_peers: bool) -> CudaBuffer {
        self.buffer(memory.size(), Memory::Native { memory, open_to_peers })
    }

    /// Memory that NCCL allocated for this device, zeroed, of which `size` bytes are used.
    pub(crate) fn adopt(
        self: &Arc<Self>,
        size: u64,
        memory: nccl_rs::Memory,
    ) -> Result<CudaBuffer, AllocError> {
        let address = memory.address().expose_provenance() as u64;
        let _current = self.context.enter().map_err(|error| self.failed(error))?;
        match self.zero(address, memory.size_bytes()) {
            Ok(()) => Ok(self.buffer(size, Memory::Library(Arc::new(memory)))),
            Err(NotZeroed::Refused(error)) => Err(self.failed(error)),
            Err(NotZeroed::UnderWay(why)) => {
                // As for memory that processes share.
                std::mem::forget(memory);
                Err(why)
            }
        }
    }

    /// Takes host memory of another owner, and pins it unless somebody has.
    pub(crate) fn import_host(self: &Arc<Self>, memory: HostMemory) -> Result<CudaBuffer, AllocError> {
        let size = memory.len() as u64;
        Ok(self.buffer(size, Memory::Imported(Imported::new(&self.context, memory)?)))
    }

    fn exhausted(&self, size: u64, error: DriverError) -> AllocError {
        match error.code {
            OUT_OF_MEMORY => self.out_of_memory(size),
            _ => self.failed(error),
        }
    }

    fn allocate_device(&self, size: u64) -> Result<CUdeviceptr, AllocError> {
        let bytes = usize::try_from(size).map_err(|_| self.out_of_memory(size))?;
        if size > self.capacity {
            return Err(self.out_of_memory(size));
        }
        let _current = self.context.enter().map_err(|error| self.failed(error))?;
        let address = self.take_from_pool(bytes).map_err(|error| self.exhausted(size, error))?;
        self.zero(address, bytes).map(|()| address).map_err(|refusal| {
            // Behind whatever is under way.
            self.free_in_order(address, &self.zeroing);
            match refusal {
                NotZeroed::Refused(error) => self.failed(error),
                NotZeroed::UnderWay(why) => why,
            }
        })
    }

    /// Asks the pool, and once more after what was given back has arrived there and gone back to the system.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn take_from_pool(&self, bytes: usize) -> Result<CUdeviceptr, DriverError> {
        let driver = &self.context.driver;
        let mut address = 0;
        let mut take = || {
            // SAFETY: pool and stream are live and of the current context; the address is written to this
            // stack frame.
            unsafe {
                driver.mem_alloc_from_pool_async(&mut address, bytes, self.pool.raw(), self.zeroing.raw())
            }
        };
        match take() {
            Err(error) if error.code == OUT_OF_MEMORY => {
                let freed = Event::create(&self.context)?;
                freed.record(&self.freeing)?;
                // Nothing but frees is in that stream, so this is short in any case.
                let _arrived = freed.wait(FREEING_LIMIT)?;
                // SAFETY: the pool is live; memory that is in use stays.
                unsafe { driver.mem_pool_trim_to(self.pool.raw(), 0) }?;
                take()?;
            }
            other => other?,
        }
        Ok(address)
    }

    /// Zeroes memory that nobody else has yet, behind what is in `zeroing`, and waits for it. A context is current.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn zero(&self, address: CUdeviceptr, bytes: usize) -> Result<(), NotZeroed> {
        let spare = self.spare_events().pop();
        let zeroed = spare.map_or_else(|| Event::create(&self.context), Ok).map_err(NotZeroed::Refused)?;
        // SAFETY: the memory holds `bytes` bytes and is there: mapped, or allocated in this stream before.
        unsafe { self.context.driver.memset_d8_async(address, 0, bytes, self.zeroing.raw()) }
            .map_err(NotZeroed::Refused)?;
        let waited = zeroed.record(&self.zeroing).and_then(|()| zeroed.wait(ZEROING_LIMIT));
        match waited {
            Ok(true) => {
                self.spare_events().push(zeroed);
                Ok(())
            }
            Ok(false) => {
                let late = Failure::DeadlineExceeded { after: ZEROING_LIMIT };
                Err(NotZeroed::UnderWay(AllocError::Failed(Arc::new(late))))
            }
            Err(error) => Err(NotZeroed::UnderWay(self.failed(error))),
        }
    }

    fn spare_events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.spare_events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn allocate_pinned(&self, size: u64, kind: MemoryKind) -> Result<PinnedBlock, AllocError> {
        let class = PinnedClass { write_combined: kind == MemoryKind::Upload, size: pinned_size(size) };
        let known = self.pinned.lock().get_mut(&class).and_then(Vec::pop);
        let block = match known {
            Some(block) => block,
            None => self.pin_again(class).map_err(|error| self.host_exhausted(size, error))?,
        };
        let bytes = usize::try_from(size).map_err(|_| self.host_out_of_memory(size))?;
        // SAFETY: the block holds its class, which is `size` or more, and nobody else has it: it is new, or
        // was dropped with its last buffer.
        unsafe { ptr::write_bytes(block.host.raw().cast::<u8>(), 0, bytes) };
        Ok(block)
    }

    /// Pins memory, and once more after blocks of other classes were given back.
    fn pin_again(&self, class: PinnedClass) -> Result<PinnedBlock, DriverError> {
        match self.pin(class) {
            Err(error) if error.code == OUT_OF_MEMORY && self.trim_pinned() => self.pin(class),
            other => other,
        }
    }

    fn host_exhausted(&self, size: u64, error: DriverError) -> AllocError {
        match error.code {
            OUT_OF_MEMORY => self.host_out_of_memory(size),
            _ => self.failed(error),
        }
    }

    fn host_out_of_memory(&self, size: u64) -> AllocError {
        AllocError::HostOutOfMemory { device: self.context.device, requested: Bytes(size) }
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn pin(&self, class: PinnedClass) -> Result<PinnedBlock, DriverError> {
        let driver = &self.context.driver;
        let _current = self.context.enter()?;
        let too_large =
            || DriverError { api: "cuMemHostAlloc", code: OUT_OF_MEMORY, name: "size".to_owned() };
        let bytes = usize::try_from(class.size).map_err(|_| too_large())?;
        let flags = PINNED_FLAGS | if class.write_combined { WRITE_COMBINED } else { 0 };
        let host = created("cuMemHostAlloc", |pointer| {
            // SAFETY: a context is current; the pointer is written to `created`'s stack frame.
            unsafe { driver.mem_host_alloc(pointer, bytes, flags) }
        })?;
        let mut block = PinnedBlock { host, address: 0, class };
        // SAFETY: the memory was allocated just now with the flag that maps it.
        let asked = unsafe { driver.mem_host_get_device_pointer(&mut block.address, host.raw(), 0) };
        // SAFETY: nobody has seen the memory that was allocated just now.
        asked.inspect_err(|_| unsafe { cold::free_pinned(&self.context, host) })?;
        Ok(block)
    }

    /// Gives pool memory back behind everything in `stream`. A context is current.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn free_in_order(&self, address: CUdeviceptr, stream: &Stream) {
        // SAFETY: the address came from this pool and is given back once. All work on it is over, since
        // submissions and residents hold its buffer until then, or it was never more than zeroed, which lies
        // before this in the same stream. An error means that the device is lost, and its memory with it.
        let _freed = unsafe { self.context.driver.mem_free_async(address, stream.raw()) };
    }

    fn give_back(&self, memory: Memory) {
        if self.context.is_left() {
            return;
        }
        match memory {
            Memory::Pool { address } => {
                let Ok(_current) = self.context.enter() else { return };
                self.free_in_order(address, &self.freeing);
            }
            Memory::Pinned(block) => self.pinned.lock().entry(block.class).or_default().push(block),
            Memory::Library(memory) => {
                // Nobody has shown that it never waits for residents.
                let context = Arc::clone(&self.context);
                self.context.serve(move || {
                    let _hurried = context.cold.open();
                    let _current = context.enter();
                    drop(memory);
                });
            }
            // These undo themselves.
            #[cfg(unix)]
            Memory::Virtual(_) => {}
            Memory::Native { .. } | Memory::Imported(_) => {}
        }
    }

    fn out_of_memory(&self, requested: u64) -> AllocError {
        let nothing = MemoryUsage { capacity: Bytes(self.capacity), free: Bytes(0) };
        let usage = self.live_usage().unwrap_or(nothing);
        AllocError::OutOfMemory {
            device: self.context.device,
            requested: Bytes(requested),
            available: usage.free,
            capacity: usage.capacity,
        }
    }

    fn failed(&self, error: DriverError) -> AllocError {
        let failure = self.context.judge(error.clone());
        match *failure {
            Failure::DeviceLost { .. } => AllocError::Failed(failure),
            _ => AllocError::Driver(error),
        }
    }

    /// Gives pinned memory that nobody uses back to the system, which waits for residents; whether there was any.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn trim_pinned(&self) -> bool {
        let blocks = std::mem::take(&mut *self.pinned.lock());
        let had_any = !blocks.is_empty();
        for block in blocks.into_values().flatten() {
            // SAFETY: pinned by `pin`; its last buffer is dropped, which is how it came into the list, and it was
            // taken out just now. An error leaves it pinned.
            let freed = unsafe { cold::free_pinned_now(&self.context, block.host) };
            if let Err(ColdError::Unparkable(_)) = freed {
                self.pinned.lock().entry(block.class).or_default().push(block);
            }
        }
        had_any
    }

    /// Gives device memory that nobody uses back to the system.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn trim_pool(&self) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        // SAFETY: the pool is live; memory that is in use stays.
        unsafe { self.context.driver.mem_pool_trim_to(self.pool.raw(), 0) }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({})", self.context.device)
    }
}

impl Drop for Arena {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        if self.context.is_left() {
            return;
        }
        let Ok(_current) = self.context.enter() else { return };
        // SAFETY: created by `create_pool`; every buffer of it held an `Arc` of this arena, so none is left.
        let _destroyed = unsafe { self.context.driver.mem_pool_destroy(self.pool.raw()) };
    }
}

/// A pool that keeps what is freed: giving memory to the system and asking for it again costs 100 us and more.
#[expect(unsafe_code, reason = "calls the driver")]
fn create_pool(context: &Context) -> Result<Handle<CUmemPoolHandle_st>, DriverError> {
    let driver = &context.driver;
    let _current = context.enter()?;
    let properties = CUmemPoolProps {
        allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: device_location(context),
        win32SecurityAttributes: ptr::null_mut(),
        reserved: [0; 64],
    };
    // SAFETY: the properties are read from this stack frame; the result is written to `raw`.
    let pool = created("cuMemPoolCreate", |raw| unsafe { driver.mem_pool_create(raw, &properties) })?;
    let mut keep = u64::MAX;
    let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as i32;
    let value = ptr::from_mut(&mut keep).cast::<c_void>();
    // SAFETY: the pool is live; the attribute is a 64-bit integer, read from this stack frame.
    let set = unsafe { driver.mem_pool_set_attribute(pool.raw(), threshold, value) };
    // SAFETY: nothing was allocated from the pool that was made just now.
    set.inspect_err(|_| drop(unsafe { driver.mem_pool_destroy(pool.raw()) }))?;
    Ok(pool)
}

const fn device_location(context: &Context) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.ordinal }
}

/// Why memory was not zeroed.
enum NotZeroed {
    /// Nothing was begun.
    Refused(DriverError),
    /// The device may still be at it.
    UnderWay(AllocError),
}

/// The size of the pinned block that serves `size` bytes.
fn pinned_size(size: u64) -> u64 {
    let step = (size.checked_next_power_of_two().unwrap_or(u64::MAX) / 8).max(PAGE);
    size.div_ceil(step).saturating_mul(step)
}

/// Pinned host memory. The device sees it at `address`.
#[derive(Debug)]
struct PinnedBlock {
    host: Handle<c_void>,
    address: CUdeviceptr,
    class: PinnedClass,
}

/// Blocks of one class serve each other's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct PinnedClass {
    write_combined: bool,
    size: u64,
}

#[derive(Debug)]
enum Memory {
    Pool {
        address: CUdeviceptr,
    },
    Pinned(PinnedBlock),
    #[cfg(unix)]
    Virtual(VirtualMemory),
    Native {
        memory: NativeMemory,
        /// Its owner's doing, and not ours.
        open_to_peers: bool,
    },
    Imported(Imported),
    /// NCCL's, which opens it to every device that reaches this one.
    Library(Arc<nccl_rs::Memory>),
}

/// A buffer of a CUDA device.
#[derive(Debug)]
pub(crate) struct CudaBuffer {
    /// `None` for what the device itself uses.
    owner: Option<Arc<CudaDevice>>,
    arena: Arc<Arena>,
    size: u64,
    /// Taken when the buffer is dropped.
    memory: Option<Memory>,
}

impl CudaBuffer {
    /// For programs: a device stays the same while a buffer of it is there.
    pub(crate) fn of_device(mut self, owner: Arc<CudaDevice>) -> Arc<dyn Buffer> {
        self.owner = Some(owner);
        Arc::new(self)
    }

    /// Where the device sees its first byte.
    pub(crate) fn address(&self) -> CUdeviceptr {
        match &self.memory {
            Some(Memory::Pool { address }) => *address,
            Some(Memory::Pinned(block)) => block.address,
            #[cfg(unix)]
            Some(Memory::Virtual(memory)) => memory.address(),
            Some(Memory::Native { memory, .. }) => memory.address(),
            Some(Memory::Imported(imported)) => imported.address,
            Some(Memory::Library(memory)) => memory.address().addr() as u64,
            None => 0,
        }
    }

    /// Whether other devices that reach this one can use it, as far as anybody knows.
    pub(crate) const fn is_open_to_peers(&self) -> bool {
        !matches!(&self.memory, Some(Memory::Native { open_to_peers: false, .. }))
    }

    /// NCCL's memory, if it is.
    pub(crate) const fn library_memory(&self) -> Option<&Arc<nccl_rs::Memory>> {
        match &self.memory {
            Some(Memory::Library(memory)) => Some(memory),
            _ => None,
        }
    }

    /// Whether NCCL can register it: memory of a pool without handles cannot be given to other ranks.
    pub(crate) const fn can_be_registered(&self) -> bool {
        match &self.memory {
            #[cfg(unix)]
            Some(Memory::Virtual(_)) => true,
            Some(Memory::Native { .. } | Memory::Library(_)) => true,
            _ => false,
        }
    }

    /// The context whose memory it is.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.arena.context
    }

    /// A descriptor for other processes, if the memory was made for that.
    #[cfg(unix)]
    pub(crate) fn export(&self) -> Option<Result<OwnedFd, DriverError>> {
        match &self.memory {
            Some(Memory::Virtual(memory)) => memory.export(),
            _ => None,
        }
    }

    /// Where the host sees its first byte; `None` for memory of the device.
    pub(crate) fn host(&self) -> Option<NonNull<u8>> {
        match &self.memory {
            Some(Memory::Pinned(block)) => NonNull::new(block.host.raw().cast()),
            Some(Memory::Imported(imported)) => Some(imported.memory.base()),
            _ => None,
        }
    }
}

impl Buffer for CudaBuffer {
    fn device(&self) -> DeviceId {
        self.arena.context.device
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn kind(&self) -> MemoryKind {
        match &self.memory {
            Some(Memory::Pinned(block)) if block.class.write_combined => MemoryKind::Upload,
            Some(Memory::Pinned(_) | Memory::Imported(_)) => MemoryKind::HostVisible,
            _ => MemoryKind::Device,
        }
    }

    #[expect(unsafe_code, reason = "asserts the mapping's validity")]
    fn mapping(&self) -> Option<HostMapping<'_>> {
        let len = usize::try_from(self.size).ok()?;
        // A forked process may not have inherited the memory.
        if self.arena.context.is_left() {
            return None;
        }
        // SAFETY: the memory holds `size` bytes and stays valid while `self` lives, from which the mapping
        // borrows; no code of this crate makes references to the memory of a buffer it hands out, and the owner
        // of registered memory promised to make none.
        self.host().map(|base| unsafe { HostMapping::new(base, len) })
    }

    fn unified_address(&self) -> Option<u64> {
        Some(self.address())
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.arena.give_back(memory);
        }
    }
}

/// The CUDA buffer of a view, if it is one.
pub(crate) fn buffer_of(view: &BufferView) -> Option<&CudaBuffer> {
    let buffer: &dyn Any = view.buffer().as_ref();
    buffer.downcast_ref()
}

/// Where the device sees a view's first byte, if the view is of a CUDA buffer.
pub(crate) fn address_of(view: &BufferView) -> Option<CUdeviceptr> {
    Some(buffer_of(view)?.address() + view.offset())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_blocks_waste_a_quarter_at_most() {
        let check = |size, class| assert_eq!(pinned_size(size), class, "{size}");
        check(1, 4096);
        check(4096, 4096);
        check(4097, 8192);
        check(1 << 20, 1 << 20);
        check((1 << 20) + 1, (1 << 20) + (1 << 18));
        check(3 << 20, 3 << 20);
    }
}
