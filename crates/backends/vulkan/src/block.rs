//! Blocks: allocations of the driver's, each with one `VkBuffer` over all of it.

#[cfg(unix)]
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::{
    any::Any,
    fmt,
    ops::Range,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use ash::vk;
use warpweft_core_types::{Bytes, DriverError, HostMemory, MemoryKind};

use crate::{
    capability::{PAGE, buffer_usage},
    gpu::Gpu,
    instance::failed,
    pages,
    record::Recording,
    service::Service,
    timeline::Ticket,
};

/// Where the bytes of a block come from.
pub(crate) enum Source {
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
pub(crate) struct Address(NonNull<u8>);

impl Address {
    /// The address `offset` bytes further on.
    pub(crate) fn at(self, offset: usize) -> Option<NonNull<u8>> {
        NonNull::new(self.0.as_ptr().wrapping_add(offset))
    }
}

// SAFETY: it is a number; the bytes there are reached through `HostMapping` and by devices alone, whose users expect
// them to change at any time.
#[expect(unsafe_code, reason = "the pointer stands for shared memory")]
unsafe impl Send for Address {}

// SAFETY: as for `Send`.
#[expect(unsafe_code, reason = "the pointer stands for shared memory")]
unsafe impl Sync for Address {}

/// Memory of a device, and the same memory as other devices see it.
pub(crate) struct Block {
    own: Arc<Allocation>,
    /// What other devices have made of it, and where it starts there. No blocks, which could hold each other.
    seen_by: Mutex<Vec<(Arc<Allocation>, u64)>>,
}

/// One allocation of the driver's and the buffer over it.
struct Allocation {
    gpu: Arc<Gpu>,
    memory: vk::DeviceMemory,
    buffer: vk::Buffer,
    size: u64,
    mapped: Option<Address>,
    exportable: bool,
    kind: MemoryKind,
    /// The host memory that was imported, which this keeps alive.
    imported: Option<HostMemory>,
}

impl Block {
    fn of(own: Arc<Allocation>) -> Arc<Self> {
        Arc::new(Self { own, seen_by: Mutex::default() })
    }

    /// New memory. Where the device imports host memory, what the host sees is ordinary pages, which others can import
    /// too.
    pub(crate) fn fresh(
        gpu: &Arc<Gpu>,
        size: u64,
        kind: MemoryKind,
        exportable: bool,
    ) -> Result<Arc<Self>, DriverError> {
        let page = gpu.capabilities().host_import.filter(|_| kind == MemoryKind::HostVisible);
        if let Some(memory) = page.and_then(|page| pages::allocate(size, page))
            && let Ok((block, 0)) = Self::import(gpu, kind, memory)
        {
            return Ok(block);
        }
        let unsupported = i64::from(vk::Result::ERROR_FEATURE_NOT_PRESENT.as_raw());
        match Self::create(gpu, size, kind, Source::Fresh { exportable }) {
            // Not every type of memory can be exported.
            Err(error) if exportable && error.code == unsupported => {
                Self::create(gpu, size, kind, Source::Fresh { exportable: false })
            }
            result => result,
        }
    }

    /// Host memory, and where it starts in its block. Drivers need not take memory twice, so what is in a block of the
    /// device already is a part of that.
    pub(crate) fn import(
        gpu: &Arc<Gpu>,
        kind: MemoryKind,
        memory: HostMemory,
    ) -> Result<(Arc<Self>, u64), ImportError> {
        let (own, start) = Allocation::import(gpu, kind, memory)?;
        Ok((Self::of(own), start))
    }

    pub(crate) fn create(
        gpu: &Arc<Gpu>,
        size: u64,
        kind: MemoryKind,
        source: Source,
    ) -> Result<Arc<Self>, DriverError> {
        Ok(Self::of(Allocation::create(gpu, size, kind, source)?))
    }

    pub(crate) fn buffer(&self) -> vk::Buffer {
        self.own.buffer
    }

    /// What to add to a place in the block before its alignment is looked at: for mapped memory the address counts.
    pub(crate) fn base(&self) -> u64 {
        let address = self.own.mapped.map_or(0, |address| address.0.addr().get() as u64 % PAGE);
        let bindable = address.is_multiple_of(self.own.gpu.capabilities().binding_alignment);
        if bindable { address } else { 0 }
    }

    /// Fills with zeros: at once where the host reaches the memory, else by the device; then the ticket tells when.
    #[expect(unsafe_code, reason = "writes to mapped memory")]
    pub(crate) fn zero(
        self: &Arc<Self>,
        service: &Service,
        start: u64,
        size: u64,
    ) -> Result<Option<Ticket>, DriverError> {
        let end = start.checked_add(size).and_then(|end| end.checked_next_multiple_of(4));
        if end.is_none_or(|end| end > self.own.size) || !start.is_multiple_of(4) || size == 0 {
            return Err(failed("vkCmdFillBuffer")(vk::Result::ERROR_UNKNOWN));
        }
        let (Some(Address(base)), Ok(offset), Ok(len)) =
            (self.own.mapped, usize::try_from(start), usize::try_from(size))
        else {
            let keep: Arc<dyn Any + Send + Sync> = Arc::clone(self) as _;
            let record = |recording: &mut Recording| {
                // SAFETY: words of this block, as was seen above.
                unsafe { recording.fill_words(self.own.buffer, start, size.next_multiple_of(4), 0) };
                Ok(())
            };
            // SAFETY: the commands touch this block, which is kept.
            return unsafe { service.submit(Some(keep), record) }.map(Some);
        };
        let at = base.as_ptr().wrapping_add(offset);
        // SAFETY: the range lies within this block, as was seen above, all of which is mapped for as long as it
        // lives; no Rust reference to device memory is ever made.
        unsafe { std::ptr::write_bytes(at, 0, len) };
        Ok(None)
    }

    /// A descriptor of the memory, for other devices and processes.
    #[cfg(unix)]
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn export(&self) -> Result<OwnedFd, DriverError> {
        let api = "vkGetMemoryFdKHR";
        let functions = self.own.gpu.by_descriptor.as_ref().filter(|_| self.own.exportable);
        let functions = functions.ok_or_else(|| failed(api)(vk::Result::ERROR_INVALID_EXTERNAL_HANDLE))?;
        let info = vk::MemoryGetFdInfoKHR::default()
            .memory(self.own.memory)
            .handle_type(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD);
        // SAFETY: the memory is live and was allocated to be exported as this.
        let descriptor = unsafe { functions.get_memory_fd(&info) }.map_err(failed(api))?;
        // SAFETY: the driver made it for us, and nobody else closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// The buffer by which a device uses this memory, and where the memory starts in it: its own, or one of the same
    /// silicon.
    pub(crate) fn seen_by(&self, gpu: &Arc<Gpu>) -> Result<(vk::Buffer, u64), DriverError> {
        if Arc::ptr_eq(&self.own.gpu, gpu) {
            return Ok((self.own.buffer, 0));
        }
        // Nothing but the driver runs under the lock.
        let mut seen = self.seen_by.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, start)) = seen.iter().find(|(known, _)| Arc::ptr_eq(&known.gpu, gpu)) {
            return Ok((known.buffer, *start));
        }
        let (import, start) = self.pass_on(gpu)?;
        let buffer = import.buffer;
        seen.push((import, start));
        Ok((buffer, start))
    }

    /// The same memory for another device of the silicon.
    fn pass_on(&self, gpu: &Arc<Gpu>) -> Result<(Arc<Allocation>, u64), DriverError> {
        let (size, kind) = (self.own.size, self.own.kind);
        let Some(memory) = &self.own.imported else {
            return Ok((Allocation::create(gpu, size, kind, self.descriptor()?)?, 0));
        };
        let anew = || Allocation::create(gpu, size, kind, Source::Host(memory.clone()));
        match Allocation::import(gpu, kind, memory.clone()) {
            // It holds whoever owns the memory, and that may be the buffer that this block is of. Whether it takes the
            // memory twice is for the driver to say, here and below.
            Ok((known, start)) if !known.is_owned_as(memory) => {
                Ok(anew().map_or((known, start), |own| (own, 0)))
            }
            Ok(import) => Ok(import),
            Err(ImportError::Driver(error)) => Err(error),
            Err(ImportError::Overlaps) => Ok((anew()?, 0)),
        }
    }

    #[cfg(unix)]
    fn descriptor(&self) -> Result<Source, DriverError> {
        Ok(Source::Descriptor(Some(self.export()?)))
    }

    #[cfg(not(unix))]
    fn descriptor(&self) -> Result<Source, DriverError> {
        Err(failed("vkGetMemoryFdKHR")(vk::Result::ERROR_EXTENSION_NOT_PRESENT))
    }

    /// Whether other devices of the same silicon can be given it.
    pub(crate) fn can_be_passed_on(&self) -> bool {
        self.own.exportable || self.own.imported.is_some()
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.own.gpu
    }

    pub(crate) fn mapped(&self) -> Option<Address> {
        self.own.mapped
    }
}

impl Allocation {
    fn import(gpu: &Arc<Gpu>, kind: MemoryKind, memory: HostMemory) -> Result<(Arc<Self>, u64), ImportError> {
        // Let go of behind the lock, since they may be the last.
        let blocks: Vec<Arc<Self>>;
        // Held until the new block is in the list. Nothing but the driver runs under it.
        let mut known = gpu.imports.list();
        // A block on its way out is no obstacle.
        blocks = known.iter().filter_map(Weak::upgrade).collect();
        known.retain(|block| block.strong_count() > 0);
        let wanted = range_of(&memory);
        for block in &blocks {
            let Some(own) = block.imported.as_ref().map(range_of) else { continue };
            if own.start <= wanted.start && wanted.end <= own.end {
                return Ok((Arc::clone(block), (wanted.start - own.start) as u64));
            }
            if own.start < wanted.end && wanted.start < own.end {
                return Err(ImportError::Overlaps);
            }
        }
        let size = memory.len() as u64;
        let block = Self::create(gpu, size, kind, Source::Host(memory)).map_err(ImportError::Driver)?;
        known.push(Arc::downgrade(&block));
        Ok((block, 0))
    }

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
            imported: None,
        };
        block.bind()?;
        match source {
            Source::Host(memory) => {
                block.mapped = Some(Address(memory.base()));
                block.imported = Some(memory);
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

    /// Whether it was imported with this owner.
    fn is_owned_as(&self, memory: &HostMemory) -> bool {
        self.imported.as_ref().is_some_and(|own| own.has_owner_of(memory))
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
}

/// Blocks of a device that are host memory.
#[derive(Debug, Default)]
pub(crate) struct Imports(Mutex<Vec<Weak<Allocation>>>);

impl Imports {
    fn list(&self) -> MutexGuard<'_, Vec<Weak<Allocation>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why host memory was not imported.
#[derive(Debug)]
pub(crate) enum ImportError {
    /// A part of it is in a block already, and a part is not.
    Overlaps,
    Driver(DriverError),
}

fn range_of(memory: &HostMemory) -> Range<usize> {
    let first = memory.base().addr().get();
    first..first.saturating_add(memory.len())
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} on {})", Bytes(self.own.size), self.own.gpu.id)
    }
}

impl Drop for Allocation {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        // SAFETY: created by `Allocation::create`, destroyed once. Submissions hold the buffers that are parts of the
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
        if size == 0 || size > gpu.capabilities().allocation_bytes {
            return Err(failed("vkCreateBuffer")(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY));
        }
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(handles);
        let mut info = vk::BufferCreateInfo::default()
            .size(size)
            .usage(buffer_usage())
            .sharing_mode(vk::SharingMode::EXCLUSIVE);
        if !handles.is_empty() {
            info = info.push_next(&mut external);
        }
        // SAFETY: the device is live; the size is at least 1 and within its limit, as was seen above.
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
            // Whole pages are imported.
            info.allocation_size = memory.len() as u64;
            if needs.size > info.allocation_size {
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
    // (`types_of_pointer`), and its owner goes into the block with the memory that is allocated here.
    let memory = unsafe { gpu.raw.allocate_memory(&info.memory_type_index(memory_type), None) };
    Ok((memory.map_err(failed(api))?, memory_type))
}

/// The types of memory that host memory can be imported as.
#[expect(unsafe_code, reason = "calls the driver")]
fn types_of_pointer(gpu: &Gpu, memory: &HostMemory) -> Result<u32, DriverError> {
    let api = "vkGetMemoryHostPointerPropertiesEXT";
    let functions =
        gpu.by_pointer.as_ref().ok_or_else(|| failed(api)(vk::Result::ERROR_EXTENSION_NOT_PRESENT))?;
    let multiple = gpu.capabilities().host_import.unwrap_or(u64::MAX);
    let (address, len) = (memory.base().addr().get() as u64, memory.len() as u64);
    // Drivers take what is not aligned, and use it wrongly.
    if !address.is_multiple_of(multiple) || !len.is_multiple_of(multiple) {
        return Err(failed(api)(vk::Result::ERROR_INVALID_EXTERNAL_HANDLE));
    }
    let mut properties = vk::MemoryHostPointerPropertiesEXT::default();
    let handle = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
    let (device, pointer) = (gpu.raw.handle(), memory.base().as_ptr().cast());
    let ask = functions.fp().get_memory_host_pointer_properties_ext;
    // SAFETY: the device is live and has the extension; the memory is valid by the word of `HostMemory::new`, and
    // aligned, as was seen above.
    unsafe { ask(device, handle, pointer, &mut properties) }.result().map_err(failed(api))?;
    Ok(properties.memory_type_bits)
}
