//! Memory of Vulkan devices: buffers as blocks of the driver's or parts of one, and memory that came from elsewhere.
//!
//! Small buffers are parts of a block,
//! so that allocating seldom calls the driver; large ones, and those that are exported, have a block of their own.

#[cfg(unix)]
use std::os::fd::OwnedFd;
use std::{
    any::Any,
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
    block::{Block, ImportError},
    capability::PAGE,
    chores::Hold,
    device::VulkanDevice,
    gpu::Gpu,
    instance::failed,
    ranges::Ranges,
    service::Service,
    timeline::Ticket,
};

/// Every buffer starts at a multiple of this, which is as much as any driver asks of bindings.
pub(crate) const ALIGNMENT: u64 = 256;

/// Bytes of a block that small buffers share, and the largest buffer that is small.
const BLOCK: u64 = 4 << 20;
const SMALL: u64 = 512 << 10;

/// How long an allocation waits for memory to be zeroed that others than its device may use: they cannot wait for it by
/// themselves, and it takes microseconds unless other work stands in front of it.
const ZEROED_WITHIN: Duration = Duration::from_secs(2);

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
        if let Some(ticket) = zeroed.as_ref().filter(|_| self.has_peers) {
            // Work of others that comes too soon is refused (`span_of`).
            let _in_time = ticket.wait(ZEROED_WITHIN);
        }
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
            let is_zeroed = ticket.wait(ZEROED_WITHIN).map_err(refused)?;
            if !is_zeroed {
                return Err(AllocError::Driver(failed("vkWaitSemaphores")(vk::Result::TIMEOUT)));
            }
        }
        Ok(VulkanBuffer { is_shareable: true, ..self.buffer(place, &desc, share, zeroed) })
    }

    /// Memory of another process, or of this one.
    #[cfg(unix)]
    pub(crate) fn import_shared(&self, size: u64, descriptor: OwnedFd) -> Result<VulkanBuffer, AllocError> {
        if let Some(failure) = self.gpu.failure() {
            return Err(AllocError::Failed(failure));
        }
        if size == 0 {
            return Err(AllocError::ZeroSize { device: self.gpu.id });
        }
        if size > self.gpu.capabilities().allocation_bytes {
            return Err(self.too_large(size));
        }
        let source = crate::block::Source::Descriptor(Some(descriptor));
        let block = Block::create(&self.gpu, padded(size), MemoryKind::Device, source);
        let block = block.map_err(|error| self.not_imported(size, MemoryKind::Device, error))?;
        Ok(self.buffer(Place::Whole(block), &BufferDesc::device(size), None, None))
    }

    /// Memory of the host's, which was found to be aligned.
    pub(crate) fn import_host(&self, memory: HostMemory) -> Result<VulkanBuffer, AllocError> {
        let desc = BufferDesc::host_visible(memory.len() as u64);
        if desc.size > self.gpu.capabilities().allocation_bytes {
            return Err(self.too_large(desc.size));
        }
        let imported = Block::import(&self.gpu, desc.kind, memory.clone());
        let (block, start) = imported.map_err(|error| match error {
            ImportError::Driver(error) => self.not_imported(desc.size, desc.kind, error),
            ImportError::Overlaps => AllocError::CannotImport {
                device: self.gpu.id,
                reason: "a part of it is imported as another range; import all of it once, and use views"
                    .to_owned(),
            },
        })?;
        Ok(self.buffer(Place::Imported { block, start, _memory: memory }, &desc, None, None))
    }

    fn too_large(&self, size: u64) -> AllocError {
        let reason = format!("no allocation is as large as {}", Bytes(size));
        AllocError::CannotImport { device: self.gpu.id, reason }
    }

    fn not_imported(&self, size: u64, kind: MemoryKind, error: DriverError) -> AllocError {
        let reason = error.to_string();
        match self.refused(size, kind, error) {
            AllocError::Driver(_) | AllocError::UnsupportedKind { .. } => {
                AllocError::CannotImport { device: self.gpu.id, reason }
            }
            // NVIDIA's driver says so of descriptors that are no memory.
            AllocError::OutOfMemory { requested, available, .. } if requested <= available => {
                AllocError::CannotImport { device: self.gpu.id, reason }
            }
            refused => refused,
        }
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
            _hold: None,
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
        Ok(Place::Whole(Block::fresh(&self.gpu, padded(size), kind, exportable)?))
    }

    fn place_in_chunk(&self, desc: &BufferDesc, exportable: bool) -> Result<Place, DriverError> {
        let pool = match desc.kind {
            MemoryKind::Device => 0,
            MemoryKind::HostVisible => 1,
            MemoryKind::Upload => 2,
        };
        // Those of at least a page start at one, so that other devices can import them.
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
        let block = Block::fresh(&self.gpu, BLOCK, desc.kind, exportable)?;
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
        self.gpu.sort(error, AllocError::Failed, AllocError::Driver)
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
    Part {
        chunk: Arc<Chunk>,
        start: u64,
        size: u64,
    },
    /// Memory of somebody else's, who keeps it for as long as this value.
    Imported {
        block: Arc<Block>,
        start: u64,
        _memory: HostMemory,
    },
}

impl Place {
    const fn start(&self) -> u64 {
        match self {
            Self::Whole(_) => 0,
            Self::Part { start, .. } | Self::Imported { start, .. } => *start,
        }
    }

    fn block(&self) -> &Arc<Block> {
        match self {
            Self::Whole(block) | Self::Imported { block, .. } => block,
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
    /// None for what the device itself uses. Last, since the device may go with it.
    _hold: Option<Hold>,
}

/// A range of a buffer as the driver has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) buffer: vk::Buffer,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl VulkanBuffer {
    /// For programs: a device stays the same while a buffer of it is there.
    pub(crate) fn of_device(mut self, device: Arc<VulkanDevice>) -> Arc<dyn Buffer> {
        self._hold = Some(Hold::new(device));
        Arc::new(self)
    }

    pub(crate) fn of(view: &BufferView) -> Option<&Self> {
        let buffer: &dyn Any = view.buffer().as_ref();
        buffer.downcast_ref()
    }

    pub(crate) fn is_of(&self, gpu: &Arc<Gpu>) -> bool {
        Arc::ptr_eq(self.gpu(), gpu)
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        self.place.block().gpu()
    }

    /// Whether other devices of the same silicon can be given it.
    pub(crate) fn can_be_passed_on(&self) -> bool {
        self.place.block().can_be_passed_on()
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
    if let (false, Some(zeroed)) = (buffer.is_of(gpu), &buffer.zeroed)
        && !zeroed.is_done()?
    {
        // A line of another device cannot be waited for by this one. The allocation did (`Arena::allocate`).
        return Err(failed("vkWaitSemaphores")(vk::Result::TIMEOUT));
    }
    let (raw, start) = buffer.place.block().seen_by(gpu)?;
    Ok(Span { buffer: raw, offset: start + buffer.place.start() + view.offset(), size: view.size() })
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
        let base = self.place.block().mapped().filter(|_| self.kind.is_host_visible())?;
        let at = base.at(usize::try_from(self.place.start()).ok()?)?;
        let len = usize::try_from(self.size).ok()?;
        // SAFETY: the block is mapped as a whole for as long as it lives, which this buffer sees to; the range is
        // this buffer's; no Rust reference to device memory is ever made.
        Some(unsafe { HostMapping::new(at, len) })
    }
}
