//! Memory of Vulkan devices: blocks of the driver's, parts of them as buffers, and memory that came from elsewhere.
//!
//! A block is one allocation of the driver's with one `VkBuffer` over all of it. Small buffers are parts of a block,
//! so that allocating seldom calls the driver; large ones, and those that are exported, have a block of their own.

#[cfg(unix)]
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::{
    any::Any,
    fmt,
    ptr::NonNull,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ash::vk;
use warpweft_core_types::{
    AllocError, Buffer, BufferDesc, BufferView, Bytes, DeviceId, DriverError, HostMapping, HostMemory,
    MemoryKind, MemoryUsage,
};

use crate::{
    capability::buffer_usage, gpu::Gpu, instance::failed, ranges::Ranges, service::Service, timeline::Ticket,
};

/// Every buffer starts at a multiple of this, which is as much as any driver asks of bindings.
pub(crate) const ALIGNMENT: u64 = 256;

/// Host-visible buffers of at least a page start at one, so that other devices can import them.
const PAGE: u64 = 4096;

/// Bytes of a block that small buffers share, and the largest buffer that is small.
const BLOCK: u64 = 8 << 20;
const SMALL: u64 = 1 << 20;

/// How long another device waits for memory to be zeroed before it uses it.
const ZEROED_WITHIN: Duration = Duration::from_secs(10);

/// Where the bytes of a block come from.
enum Source {
    Fresh {
        exportable: bool,
    },
    /// Memory of a device of the same silicon, until the driver is given it.
    #[cfg(unix)]
    Descriptor(Option<OwnedFd>),
    Host(HostMemory),
}

/// An address of memory that devices and the host share.
#[derive(Clone, Copy)]
struct Address(NonNull<u8>);

// SAFETY: it is a number; the bytes there are reached through `HostMapping` and by devices alone, whose users expect
// them to change at any time.
#[expect(unsafe_code, reason = "the pointer stands for shared memory")]
unsafe impl Send for Address {}

// SAFETY: as for `Send`.
#[expect(unsafe_code, reason = "the pointer stands for shared memory")]
unsafe impl Sync for Address {}

/// One allocation of the driver's and the buffer over it.
pub(crate) struct Block {
    gpu: Arc<Gpu>,
    memory: vk::DeviceMemory,
    buffer: vk::Buffer,
    size: u64,
    mapped: Option<Address>,
    exportable: bool,
    kind: MemoryKind,
    /// The same memory as other devices see it.
    seen_by: Mutex<Vec<Arc<Block>>>,
    /// What keeps imported host memory alive.
    _owner: Option<HostMemory>,
}

impl Block {
    fn create(
        gpu: &Arc<Gpu>,
        size: u64,
        kind: MemoryKind,
        mut source: Source,
    ) -> Result<Arc<Self>, DriverError> {
        let buffer = RawBuffer::create(gpu, size, &source)?;
        let needs = buffer.requirements();
        let (memory, memory_type) = allocate(gpu, &buffer, needs, kind, &mut source)?;
        // From here on, dropping the block frees both.
        let mut block = Self {
            gpu: Arc::clone(gpu),
            memory,
            buffer: buffer.keep(),
            size,
            mapped: None,
            exportable: matches!(source, Source::Fresh { exportable: true }),
            kind,
            seen_by: Mutex::default(),
            _owner: None,
        };
        block.bind()?;
        match source {
            Source::Host(memory) => {
                block.mapped = Some(Address(memory.base()));
                block._owner = Some(memory);
            }
            #[cfg(unix)]
            Source::Descriptor(_) => {}
            Source::Fresh { .. } => {
                let flags = gpu.physical.memory_flags(memory_type);
                let reachable = flags.contains(HOST_FLAGS);
                if kind.is_host_visible() || (reachable && gpu.capabilities().is_unified) {
                    block.map()?;
                }
            }
        }
        Ok(Arc::new(block))
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn bind(&self) -> Result<(), DriverError> {
        // SAFETY: both are this block's, of one device, and bound to nothing yet; the memory is of a type and a size
        // that the buffer demands (`allocate`).
        let bound = unsafe { self.gpu.raw.bind_buffer_memory(self.buffer, self.memory, 0) };
        bound.map_err(failed("vkBindBufferMemory"))
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn map(&mut self) -> Result<(), DriverError> {
        let (whole, flags) = (vk::WHOLE_SIZE, vk::MemoryMapFlags::empty());
        // SAFETY: the memory is of a host-visible type, this block's, and not mapped yet.
        let pointer = unsafe { self.gpu.raw.map_memory(self.memory, 0, whole, flags) };
        let pointer = pointer.map_err(failed("vkMapMemory"))?;
        self.mapped = NonNull::new(pointer.cast()).map(Address);
        Ok(())
    }

    pub(crate) const fn buffer(&self) -> vk::Buffer {
        self.buffer
    }

    /// What to add to a place in the block before its alignment is looked at: for mapped memory the address counts.
    fn base(&self) -> u64 {
        let address = self.mapped.map_or(0, |address| address.0.addr().get() as u64 % PAGE);
        let bindable = address.is_multiple_of(self.gpu.capabilities().binding_alignment);
        if bindable { address } else { 0 }
    }

    /// Fills with zeros: at once where the host reaches the memory, else by the device; then the ticket tells when.
    #[expect(unsafe_code, reason = "writes to mapped memory")]
    fn zero(
        self: &Arc<Self>,
        service: &Service,
        start: u64,
        size: u64,
    ) -> Result<Option<Ticket>, DriverError> {
        let (Some(Address(base)), Ok(offset), Ok(len)) =
            (self.mapped, usize::try_from(start), usize::try_from(size))
        else {
            let keep: Arc<dyn Any + Send + Sync> = Arc::clone(self) as _;
            let zeroed = service.submit(Some(keep), |recording| {
                recording.fill_words(self.buffer, start, size.next_multiple_of(4), 0);
                Ok(())
            });
            return zeroed.map(Some);
        };
        let at = base.as_ptr().wrapping_add(offset);
        // SAFETY: the range was just taken from this mapped block, so that nobody else has it, and lies within it;
        // no Rust reference to device memory is ever made.
        unsafe { std::ptr::write_bytes(at, 0, len) };
        Ok(None)
    }

    /// A descriptor of the memory, for other devices and processes.
    #[cfg(unix)]
    #[expect(unsafe_code, reason = "calls the driver")]
    fn export(&self) -> Result<OwnedFd, DriverError> {
        let api = "vkGetMemoryFdKHR";
        let functions = self.gpu.by_descriptor.as_ref().filter(|_| self.exportable);
        let functions = functions.ok_or_else(|| failed(api)(vk::Result::ERROR_INVALID_EXTERNAL_HANDLE))?;
        let info = vk::MemoryGetFdInfoKHR::default()
            .memory(self.memory)
            .handle_type(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD);
        // SAFETY: the memory is live and was allocated to be exported as this.
        let descriptor = unsafe { functions.get_memory_fd(&info) }.map_err(failed(api))?;
        // SAFETY: the driver made it for us, and nobody else closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// The buffer by which a device uses this memory: its own, or one of the same silicon.
    fn seen_by(&self, gpu: &Arc<Gpu>) -> Result<vk::Buffer, DriverError> {
        if Arc::ptr_eq(&self.gpu, gpu) {
            return Ok(self.buffer);
        }
        // Nothing but the driver runs under the lock.
        let mut seen = self.seen_by.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = seen.iter().find(|known| Arc::ptr_eq(&known.gpu, gpu)) {
            return Ok(known.buffer);
        }
        let import = self.pass_on(gpu)?;
        let buffer = import.buffer;
        seen.push(import);
        Ok(buffer)
    }

    #[cfg(unix)]
    fn pass_on(&self, gpu: &Arc<Gpu>) -> Result<Arc<Self>, DriverError> {
        Self::create(gpu, self.size, self.kind, Source::Descriptor(Some(self.export()?)))
    }

    #[cfg(not(unix))]
    fn pass_on(&self, _gpu: &Arc<Gpu>) -> Result<Arc<Self>, DriverError> {
        Err(failed("vkGetMemoryFdKHR")(vk::Result::ERROR_EXTENSION_NOT_PRESENT))
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} on {})", Bytes(self.size), self.gpu.id)
    }
}

impl Drop for Block {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        // SAFETY: created by `Block::create`, destroyed once. Submissions hold the buffers that are parts of the
        // block until they are over.
        unsafe { self.gpu.raw.destroy_buffer(self.buffer, None) };
        // SAFETY: as above; mapped memory is unmapped by this.
        unsafe { self.gpu.raw.free_memory(self.memory, None) };
    }
}

/// Memory that the host reads and writes without telling the driver.
const HOST_FLAGS: vk::MemoryPropertyFlags = vk::MemoryPropertyFlags::from_raw(
    vk::MemoryPropertyFlags::HOST_VISIBLE.as_raw() | vk::MemoryPropertyFlags::HOST_COHERENT.as_raw(),
);

/// Types of memory for a kind, liked best first.
fn preferred(kind: MemoryKind) -> [vk::MemoryPropertyFlags; 2] {
    match kind {
        MemoryKind::Device => [vk::MemoryPropertyFlags::DEVICE_LOCAL, vk::MemoryPropertyFlags::empty()],
        MemoryKind::HostVisible => [HOST_FLAGS | vk::MemoryPropertyFlags::HOST_CACHED, HOST_FLAGS],
        MemoryKind::Upload => [HOST_FLAGS, HOST_FLAGS],
    }
}

/// A buffer that has no memory yet.
struct RawBuffer<'a> {
    gpu: &'a Gpu,
    raw: vk::Buffer,
}

impl<'a> RawBuffer<'a> {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn create(gpu: &'a Gpu, size: u64, source: &Source) -> Result<Self, DriverError> {
        let handles = match source {
            Source::Fresh { exportable: false } => vk::ExternalMemoryHandleTypeFlags::empty(),
            Source::Fresh { exportable: true } => vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD,
            #[cfg(unix)]
            Source::Descriptor(_) => vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD,
            Source::Host(_) => vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT,
        };
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(handles);
        let mut info = vk::BufferCreateInfo::default()
            .size(size)
            .usage(buffer_usage())
            .sharing_mode(vk::SharingMode::EXCLUSIVE);
        if !handles.is_empty() {
            info = info.push_next(&mut external);
        }
        // SAFETY: the device is live; the size is at least 1 and within its limit (callers compare).
        let raw = unsafe { gpu.raw.create_buffer(&info, None) }.map_err(failed("vkCreateBuffer"))?;
        Ok(Self { gpu, raw })
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn requirements(&self) -> vk::MemoryRequirements {
        // SAFETY: the buffer is live.
        unsafe { self.gpu.raw.get_buffer_memory_requirements(self.raw) }
    }

    fn keep(self) -> vk::Buffer {
        let raw = self.raw;
        std::mem::forget(self);
        raw
    }
}

impl Drop for RawBuffer<'_> {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        // SAFETY: created by `create` and given to nobody.
        unsafe { self.gpu.raw.destroy_buffer(self.raw, None) };
    }
}

/// Memory for a buffer, and the type it has.
#[expect(unsafe_code, reason = "calls the driver")]
fn allocate(
    gpu: &Gpu,
    buffer: &RawBuffer<'_>,
    needs: vk::MemoryRequirements,
    kind: MemoryKind,
    source: &mut Source,
) -> Result<(vk::DeviceMemory, u32), DriverError> {
    let api = "vkAllocateMemory";
    let mut allowed = needs.memory_type_bits;
    let mut dedicated = vk::MemoryDedicatedAllocateInfo::default().buffer(buffer.raw);
    let mut export =
        vk::ExportMemoryAllocateInfo::default().handle_types(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD);
    #[cfg(unix)]
    let mut import =
        vk::ImportMemoryFdInfoKHR::default().handle_type(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD);
    let mut pointer = vk::ImportMemoryHostPointerInfoEXT::default()
        .handle_type(vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT);
    let mut info = vk::MemoryAllocateInfo::default().allocation_size(needs.size);
    match source {
        Source::Fresh { exportable } => {
            info = info.push_next(&mut dedicated);
            if *exportable {
                info = info.push_next(&mut export);
            }
        }
        #[cfg(unix)]
        Source::Descriptor(descriptor) => {
            // It is the driver's from here on, whatever it answers: lavapipe closes what it refuses, against the
            // specification, and closing it once more could close a file of somebody else's.
            import = import.fd(descriptor.take().map_or(-1, IntoRawFd::into_raw_fd));
            info = info.push_next(&mut dedicated).push_next(&mut import);
        }
        Source::Host(memory) => {
            if needs.size > memory.len() as u64 {
                return Err(failed(api)(vk::Result::ERROR_INVALID_EXTERNAL_HANDLE));
            }
            allowed &= types_of_pointer(gpu, memory)?;
            pointer.p_host_pointer = memory.base().as_ptr().cast();
            info = info.push_next(&mut pointer);
        }
    }
    let memory_type = gpu
        .physical
        .memory_type(allowed, &preferred(kind))
        .ok_or_else(|| failed(api)(vk::Result::ERROR_FEATURE_NOT_PRESENT))?;
    // SAFETY: the type is one that the buffer allows and the size what it needs; an imported pointer is aligned
    // (callers check) and lives as long as the block, which holds its owner.
    let memory = unsafe { gpu.raw.allocate_memory(&info.memory_type_index(memory_type), None) };
    Ok((memory.map_err(failed(api))?, memory_type))
}

/// The types of memory that host memory can be imported as.
#[expect(unsafe_code, reason = "calls the driver")]
fn types_of_pointer(gpu: &Gpu, memory: &HostMemory) -> Result<u32, DriverError> {
    let api = "vkGetMemoryHostPointerPropertiesEXT";
    let functions =
        gpu.by_pointer.as_ref().ok_or_else(|| failed(api)(vk::Result::ERROR_EXTENSION_NOT_PRESENT))?;
    let mut properties = vk::MemoryHostPointerPropertiesEXT::default();
    let handle = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
    let (device, pointer) = (gpu.raw.handle(), memory.base().as_ptr().cast());
    let ask = functions.fp().get_memory_host_pointer_properties_ext;
    // SAFETY: the device is live and has the extension; the memory is valid by the word of `HostMemory::new`, and
    // aligned (callers check).
    unsafe { ask(device, handle, pointer, &mut properties) }.result().map_err(failed(api))?;
    Ok(properties.memory_type_bits)
}

/// A block that small buffers share.
#[derive(Debug)]
struct Chunk {
    block: Arc<Block>,
    ranges: Mutex<Ranges>,
}

impl Chunk {
    fn ranges(&self) -> MutexGuard<'_, Ranges> {
        // Only this crate's own arithmetic runs under the lock.
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that devices of one silicon have handed out.
#[derive(Debug, Default)]
pub(crate) struct Used(AtomicU64);

/// A share of the memory, given back when dropped.
#[derive(Debug)]
struct Share {
    used: Arc<Used>,
    size: u64,
}

impl Share {
    fn take(used: &Arc<Used>, size: u64, capacity: u64) -> Result<Self, u64> {
        let fits = |taken: u64| taken.checked_add(size).filter(|&total| total <= capacity);
        // Relaxed, here and below: a count that guards no other memory.
        match used.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => Ok(Self { used: Arc::clone(used), size }),
            Err(taken) => Err(taken),
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.used.0.fetch_sub(self.size, Ordering::Relaxed);
    }
}

/// Where a device's buffers come from.
#[derive(Debug)]
pub(crate) struct Arena {
    gpu: Arc<Gpu>,
    service: Arc<Service>,
    used: Arc<Used>,
    /// Other devices may use what is allocated here.
    has_peers: bool,
    chunks: [Mutex<Vec<Arc<Chunk>>>; 3],
}

impl Arena {
    pub(crate) fn new(gpu: &Arc<Gpu>, service: &Arc<Service>, used: &Arc<Used>, has_peers: bool) -> Self {
        Self {
            gpu: Arc::clone(gpu),
            service: Arc::clone(service),
            used: Arc::clone(used),
            has_peers,
            chunks: Default::default(),
        }
    }

    /// How much there is, and how much of it is free.
    pub(crate) fn usage(&self) -> Result<MemoryUsage, AllocError> {
        if let Some(failure) = self.gpu.failure() {
            return Err(AllocError::Failed(failure));
        }
        let capacity = self.gpu.capabilities().memory_bytes;
        let ours = capacity.saturating_sub(self.used.0.load(Ordering::Relaxed));
        Ok(MemoryUsage { capacity: Bytes(capacity), free: Bytes(ours.min(self.budget().unwrap_or(ours))) })
    }

    /// What the driver says is free. A software device says what the machine has, which everything else uses too.
    #[expect(unsafe_code, reason = "asks the driver")]
    fn budget(&self) -> Option<u64> {
        let capabilities = self.gpu.capabilities();
        if !capabilities.memory_budget || capabilities.is_software {
            return None;
        }
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut properties = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        let (instance, device) = (&self.gpu.instance.raw, self.gpu.physical.raw);
        // SAFETY: the device was enumerated by this instance and has the extension; the answer is written to this
        // stack frame.
        unsafe { instance.get_physical_device_memory_properties2(device, &mut properties) };
        let heap = self.gpu.physical.device_heap();
        Some(budget.heap_budget.get(heap)?.saturating_sub(*budget.heap_usage.get(heap)?))
    }

    pub(crate) fn allocate(&self, desc: &BufferDesc) -> Result<VulkanBuffer, AllocError> {
        let share = self.admit(desc.size, desc.kind)?;
        let exportable = self.has_peers;
        let place = if desc.size <= SMALL {
            self.place_in_chunk(desc, exportable)
        } else {
            self.own_block(desc.size, desc.kind, exportable)
        };
        let place = place.map_err(|error| self.refused(desc.size, desc.kind, error))?;
        let zeroed = place.block().zero(&self.service, place.start(), desc.size);
        let zeroed = zeroed.map_err(|error| self.refused(desc.size, desc.kind, error))?;
        Ok(self.buffer(place, desc, share, zeroed))
    }

    /// Memory that can be exported.
    #[cfg(unix)]
    pub(crate) fn allocate_shareable(&self, size: u64) -> Result<VulkanBuffer, AllocError> {
        let desc = BufferDesc::device(size);
        let share = self.admit(size, desc.kind)?;
        let refused = |error| self.refused(size, desc.kind, error);
        let place = self.own_block(size, desc.kind, true).map_err(refused)?;
        let zeroed = place.block().zero(&self.service, 0, size).map_err(refused)?;
        if let Some(ticket) = &zeroed {
            // Another process cannot wait for it.
            ticket.wait(ZEROED_WITHIN).map_err(refused)?;
        }
        Ok(VulkanBuffer { is_shareable: true, ..self.buffer(place, &desc, share, zeroed) })
    }

    /// Memory of another process, or of this one.
    #[cfg(unix)]
    pub(crate) fn import_shared(&self, size: u64, descriptor: OwnedFd) -> Result<VulkanBuffer, AllocError> {
        let refuse = |reason: String| AllocError::CannotImport { device: self.gpu.id, reason };
        if size == 0 {
            return Err(AllocError::ZeroSize { device: self.gpu.id });
        }
        if size > self.gpu.capabilities().allocation_bytes {
            return Err(refuse(format!("no allocation is as large as {}", Bytes(size))));
        }
        let source = Source::Descriptor(Some(descriptor));
        let block = Block::create(&self.gpu, padded(size), MemoryKind::Device, source);
        let block = block.map_err(|error| refuse(error.to_string()))?;
        Ok(self.buffer(Place::Whole(block), &BufferDesc::device(size), None, None))
    }

    /// Memory of the host's, which was found to be aligned.
    pub(crate) fn import_host(&self, memory: HostMemory) -> Result<VulkanBuffer, AllocError> {
        let refuse = |reason: String| AllocError::CannotImport { device: self.gpu.id, reason };
        let desc = BufferDesc::host_visible(memory.len() as u64);
        let block = Block::create(&self.gpu, desc.size, desc.kind, Source::Host(memory));
        let block = block.map_err(|error| refuse(error.to_string()))?;
        Ok(self.buffer(Place::Whole(block), &desc, None, None))
    }

    fn buffer(
        &self,
        place: Place,
        desc: &BufferDesc,
        share: Option<Share>,
        zeroed: Option<Ticket>,
    ) -> VulkanBuffer {
        VulkanBuffer {
            device: self.gpu.id,
            size: desc.size,
            kind: desc.kind,
            #[cfg(unix)]
            is_shareable: false,
            zeroed,
            place,
            _share: share,
        }
    }

    /// Counts the bytes, which must be there.
    fn admit(&self, size: u64, kind: MemoryKind) -> Result<Option<Share>, AllocError> {
        if let Some(failure) = self.gpu.failure() {
            return Err(AllocError::Failed(failure));
        }
        let device = self.gpu.id;
        if size == 0 {
            return Err(AllocError::ZeroSize { device });
        }
        let capabilities = self.gpu.capabilities();
        if kind.is_host_visible() {
            let requested = Bytes(size);
            let fits = size <= capabilities.allocation_bytes;
            return if fits { Ok(None) } else { Err(AllocError::HostOutOfMemory { device, requested }) };
        }
        let capacity = capabilities.memory_bytes;
        let out = |taken: u64| AllocError::OutOfMemory {
            device,
            requested: Bytes(size),
            available: Bytes(capacity.saturating_sub(taken).min(capabilities.allocation_bytes)),
            capacity: Bytes(capacity),
        };
        if size > capabilities.allocation_bytes {
            return Err(out(self.used.0.load(Ordering::Relaxed)));
        }
        Share::take(&self.used, size, capacity).map(Some).map_err(out)
    }

    fn own_block(&self, size: u64, kind: MemoryKind, exportable: bool) -> Result<Place, DriverError> {
        Ok(Place::Whole(Block::create(&self.gpu, padded(size), kind, Source::Fresh { exportable })?))
    }

    fn place_in_chunk(&self, desc: &BufferDesc, exportable: bool) -> Result<Place, DriverError> {
        let pool = match desc.kind {
            MemoryKind::Device => 0,
            MemoryKind::HostVisible => 1,
            MemoryKind::Upload => 2,
        };
        let paged = desc.kind.is_host_visible() && desc.size >= PAGE;
        let alignment = if paged { PAGE } else { ALIGNMENT };
        let size = desc.size.next_multiple_of(ALIGNMENT);
        let take = |chunk: &Arc<Chunk>| {
            let start = chunk.ranges().take(size, alignment, chunk.block.base())?;
            Some(Place::Part { chunk: Arc::clone(chunk), start, size })
        };
        // Held while a block is made, so that threads do not make one each.
        let mut chunks = self.chunks[pool].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = chunks.iter().find_map(take) {
            return Ok(place);
        }
        // One that nobody uses was too small or too crooked; what nobody uses goes back to the driver.
        chunks.retain(|chunk| !chunk.ranges().is_unused());
        let block = Block::create(&self.gpu, BLOCK, desc.kind, Source::Fresh { exportable })?;
        chunks.push(Arc::new(Chunk { block, ranges: Mutex::new(Ranges::new(BLOCK)) }));
        let place = chunks.last().and_then(take);
        place.ok_or_else(|| failed("vkAllocateMemory")(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY))
    }

    fn refused(&self, size: u64, kind: MemoryKind, error: DriverError) -> AllocError {
        let device = self.gpu.id;
        let is = |result: vk::Result| error.code == i64::from(result.as_raw());
        if is(vk::Result::ERROR_OUT_OF_HOST_MEMORY)
            || (is(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY) && kind.is_host_visible())
        {
            return AllocError::HostOutOfMemory { device, requested: Bytes(size) };
        }
        if is(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY) {
            let usage = self.usage();
            let (available, capacity) =
                usage.map_or((Bytes(0), Bytes(0)), |usage| (usage.free, usage.capacity));
            return AllocError::OutOfMemory { device, requested: Bytes(size), available, capacity };
        }
        if is(vk::Result::ERROR_FEATURE_NOT_PRESENT) {
            return AllocError::UnsupportedKind { device, kind };
        }
        self.gpu.judge(error.clone());
        self.gpu.failure().map_or(AllocError::Driver(error), AllocError::Failed)
    }
}

/// Fills by words reach the end.
const fn padded(size: u64) -> u64 {
    size.next_multiple_of(4)
}

/// Where a buffer's bytes are.
#[derive(Debug)]
enum Place {
    Whole(Arc<Block>),
    Part { chunk: Arc<Chunk>, start: u64, size: u64 },
}

impl Place {
    const fn start(&self) -> u64 {
        match self {
            Self::Whole(_) => 0,
            Self::Part { start, .. } => *start,
        }
    }

    fn block(&self) -> &Arc<Block> {
        match self {
            Self::Whole(block) => block,
            Self::Part { chunk, .. } => &chunk.block,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Self::Part { chunk, start, size } = self {
            chunk.ranges().give(*start, *size);
        }
    }
}

/// A buffer of a Vulkan device.
#[derive(Debug)]
pub(crate) struct VulkanBuffer {
    device: DeviceId,
    size: u64,
    kind: MemoryKind,
    #[cfg(unix)]
    is_shareable: bool,
    /// When the device has zeroed it.
    zeroed: Option<Ticket>,
    place: Place,
    _share: Option<Share>,
}

/// A range of a buffer as the driver has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) buffer: vk::Buffer,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl VulkanBuffer {
    pub(crate) fn of(view: &BufferView) -> Option<&Self> {
        let buffer: &dyn Any = view.buffer().as_ref();
        buffer.downcast_ref()
    }

    pub(crate) fn is_of(&self, gpu: &Arc<Gpu>) -> bool {
        Arc::ptr_eq(self.gpu(), gpu)
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.place.block().gpu
    }

    /// Whether other devices of the same silicon can be given it.
    pub(crate) fn can_be_passed_on(&self) -> bool {
        self.place.block().exportable
    }

    /// Where the buffer starts in its block.
    pub(crate) fn start(&self) -> u64 {
        self.place.start()
    }

    /// All of it, for its own device.
    pub(crate) fn span(&self) -> Span {
        Span { buffer: self.place.block().buffer(), offset: self.place.start(), size: self.size }
    }

    /// What has to be over before work may use it.
    pub(crate) fn zeroed(&self) -> Option<&Ticket> {
        self.zeroed.as_ref()
    }

    /// A descriptor of the memory; `None` if it was not allocated to be shared.
    #[cfg(unix)]
    pub(crate) fn export(&self) -> Option<Result<OwnedFd, DriverError>> {
        self.is_shareable.then(|| self.place.block().export())
    }
}

/// The bytes of a view as `gpu` sees them. The view is of a Vulkan device, which is `gpu`'s or of the same silicon.
pub(crate) fn span_of(view: &BufferView, gpu: &Arc<Gpu>) -> Result<Span, DriverError> {
    let stranger = || failed("vkBindBufferMemory")(vk::Result::ERROR_INVALID_EXTERNAL_HANDLE);
    let buffer = VulkanBuffer::of(view).ok_or_else(stranger)?;
    if let (false, Some(zeroed)) = (buffer.is_of(gpu), &buffer.zeroed) {
        // A line of another device cannot be waited for by this one, and zeroing takes microseconds.
        zeroed.wait(ZEROED_WITHIN)?;
    }
    let raw = buffer.place.block().seen_by(gpu)?;
    Ok(Span { buffer: raw, offset: buffer.place.start() + view.offset(), size: view.size() })
}

impl Buffer for VulkanBuffer {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn kind(&self) -> MemoryKind {
        self.kind
    }

    #[expect(unsafe_code, reason = "hands out mapped memory")]
    fn mapping(&self) -> Option<HostMapping<'_>> {
        let Address(base) = self.place.block().mapped.filter(|_| self.kind.is_host_visible())?;
        let start = usize::try_from(self.place.start()).ok()?;
        let at = NonNull::new(base.as_ptr().wrapping_add(start))?;
        let len = usize::try_from(self.size).ok()?;
        // SAFETY: the block is mapped as a whole for as long as it lives, which this buffer sees to; the range is
        // this buffer's; no Rust reference to device memory is ever made.
        Some(unsafe { HostMapping::new(at, len) })
    }
}
