//! Open Vulkan devices.

use std::{
    any::Any,
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use warpweft_core_types::{
    AllocError, Buffer, BufferDesc, Device, DeviceClock, DeviceId, DeviceInfo, Failure, Features, GiveWay,
    Graph, GraphError, GraphNode, Graphs, HostImport, HostMemory, KernelCode, Limits, LoadError, MemoryUsage,
    Module, MultiprocessorPool, OpenError, PeerAccess, Peers, Queue, QueueDesc, ReservedMultiprocessors,
    Resident, ResidentBudget, ResidentDesc, ResidentError, Residents, Semaphore,
};
#[cfg(unix)]
use warpweft_core_types::{SharedMemory, Sharing};
use warpweft_polled::ReactorOwner;

use crate::{
    capability::{Capabilities, Physical},
    chores::Hold,
    clock::Clock,
    gpu::Gpu,
    graph::VulkanGraph,
    instance::Instance,
    memory::{ALIGNMENT, Arena, Used, VulkanBuffer},
    module::{Loader, VulkanModule},
    probe,
    queue::{QueueCore, VulkanQueue},
    resident::{Quarters, ResidentCore, VulkanResident},
    semaphore::VulkanSemaphore,
    service::Service,
    work::Tools,
};

/// Bytes that stand for every buffer while pipelines are warmed.
const SCRATCH: u64 = 64 << 10;

/// A device as the backend knows it before it is opened.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) info: DeviceInfo,
    pub(crate) physical: Physical,
    /// Bytes handed out by all devices of this silicon.
    pub(crate) used: Arc<Used>,
    /// What residents of all devices of this silicon may take.
    pub(crate) budget: Arc<MultiprocessorPool>,
    /// Other devices of the same silicon.
    pub(crate) within_reach: Vec<DeviceId>,
}

impl Facts {
    pub(crate) fn features(&self) -> Features {
        let capabilities = &self.physical.capabilities;
        let mut features = Features::HOST_VISIBLE_MEMORY | Features::RESIDENT_KERNELS | Features::GRAPHS;
        features.set(Features::PEER_ACCESS, !self.within_reach.is_empty());
        features.set(Features::HOST_IMPORT, capabilities.host_import.is_some());
        features.set(Features::TIMESTAMPS, capabilities.timestamps);
        features.set(Features::SHARED_MEMORY, capabilities.opaque_fd);
        features
    }

    fn limits(&self) -> Limits {
        let capabilities = &self.physical.capabilities;
        Limits {
            workgroup_threads: capabilities.workgroup_threads,
            workgroups: capabilities.workgroups,
            scalar_bytes: capabilities.scalar_bytes,
            // Shaders say themselves how much their workgroups share.
            shared_bytes: 0,
            buffer_alignment: ALIGNMENT,
        }
    }
}

/// An open Vulkan device.
pub(crate) struct VulkanDevice {
    info: DeviceInfo,
    features: Features,
    limits: Limits,
    gpu: Arc<Gpu>,
    service: Arc<Service>,
    arena: Arena,
    tools: Arc<Tools>,
    clock: Clock,
    scratch: Arc<VulkanBuffer>,
    /// The thread that looks after queues goes on while there is a device, whatever became of the backend.
    reactor: Arc<ReactorOwner<QueueCore>>,
    budget: Arc<MultiprocessorPool>,
    queue_count: AtomicU32,
    /// Queues and residents keep their device open through this.
    this: Weak<Self>,
}

impl VulkanDevice {
    pub(crate) fn open(
        instance: &Arc<Instance>,
        reactor: &Arc<ReactorOwner<QueueCore>>,
        facts: &Facts,
    ) -> Result<Arc<Self>, OpenError> {
        let gpu = Gpu::create(instance, &facts.physical, facts.info.id)?;
        let refused = |error| gpu.sort(error, OpenError::Failed, OpenError::Driver);
        let service = Service::new(&gpu).map_err(refused)?;
        let arena = Arena::new(&gpu, &service, &facts.used, !facts.within_reach.is_empty());
        probe::check(&gpu, &arena, &service)?;
        let tools = Tools::create(&gpu, &arena, facts.within_reach.clone()).map_err(no_memory)?;
        let clock = Clock::create(&gpu, &arena, &service).map_err(no_memory)?;
        let scratch = Arc::new(arena.allocate(&BufferDesc::host_visible(SCRATCH)).map_err(no_memory)?);
        Ok(Arc::new_cyclic(|this| Self {
            info: facts.info.clone(),
            features: facts.features(),
            limits: facts.limits(),
            gpu,
            service,
            arena,
            tools,
            clock,
            scratch,
            reactor: Arc::clone(reactor),
            budget: Arc::clone(&facts.budget),
            queue_count: AtomicU32::new(0),
            this: this.clone(),
        }))
    }

    pub(crate) fn of(device: &Arc<dyn Device>) -> Option<&Self> {
        let device: &dyn Any = device.as_ref();
        device.downcast_ref()
    }

    fn id(&self) -> DeviceId {
        self.info.id
    }

    fn capabilities(&self) -> &Capabilities {
        self.gpu.capabilities()
    }

    pub(crate) const fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// What its work is checked against and recorded with.
    pub(crate) const fn tools(&self) -> &Arc<Tools> {
        &self.tools
    }

    fn handle(&self) -> Result<Arc<Self>, Arc<Failure>> {
        // Only a device that is being dropped cannot be upgraded, and nobody can call it then.
        self.this.upgrade().ok_or_else(|| Arc::new(Failure::Abandoned { device: self.id() }))
    }

    fn alive(&self) -> Result<(), OpenError> {
        self.gpu.failure().map_or(Ok(()), |failure| Err(OpenError::Failed(failure)))
    }
}

/// What it means for opening that a device gives no memory.
pub(crate) fn no_memory(error: AllocError) -> OpenError {
    match error {
        AllocError::Driver(error) => OpenError::Driver(error),
        AllocError::Failed(failure) => OpenError::Failed(failure),
        error => OpenError::Memory(error),
    }
}

impl Device for VulkanDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn features(&self) -> Features {
        self.features
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn memory(&self) -> Result<MemoryUsage, AllocError> {
        self.arena.usage()
    }

    fn allocate(&self, desc: &BufferDesc) -> Result<Arc<dyn Buffer>, AllocError> {
        let device = self.handle().map_err(AllocError::Failed)?;
        Ok(self.arena.allocate(desc)?.of_device(device))
    }

    fn create_queue(&self, desc: &QueueDesc) -> Result<Arc<dyn Queue>, OpenError> {
        self.alive()?;
        if desc.capacity == 0 {
            let reason = "a queue must hold at least one submission".to_owned();
            return Err(OpenError::InvalidConfig { reason });
        }
        let device = self.handle().map_err(OpenError::Failed)?;
        // Relaxed: a number that orders nothing.
        let number = self.queue_count.fetch_add(1, Ordering::Relaxed);
        let refused = |error| self.gpu.sort(error, OpenError::Failed, OpenError::Driver);
        let core = QueueCore::new(&self.tools, self.reactor.shared(), number, desc).map_err(refused)?;
        self.gpu.holders.add(&core);
        // It may have been lost since it was seen to be alive.
        self.alive()?;
        Ok(Arc::new(VulkanQueue { core, _device: Hold::new(device) }))
    }

    fn create_semaphore(&self, initial: u64) -> Result<Arc<dyn Semaphore>, OpenError> {
        self.alive()?;
        Ok(Arc::new(VulkanSemaphore::new(self.id(), initial, self.reactor.shared())))
    }

    fn load(&self, code: &KernelCode) -> Result<Arc<dyn Module>, LoadError> {
        let device = self.handle().map_err(LoadError::Failed)?;
        let loader = Loader {
            gpu: &self.gpu,
            service: &self.service,
            scratch: &self.scratch,
            device: &device,
            limits: &self.limits,
        };
        Ok(Arc::new(VulkanModule::load(loader, code)?))
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.gpu.failure()
    }

    fn peers(&self) -> Option<&dyn Peers> {
        self.features.contains(Features::PEER_ACCESS).then_some(self)
    }

    fn host_import(&self) -> Option<&dyn HostImport> {
        self.features.contains(Features::HOST_IMPORT).then_some(self)
    }

    fn residents(&self) -> Option<&dyn Residents> {
        Some(self)
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        Some(self)
    }

    fn clock(&self) -> Option<&dyn DeviceClock> {
        self.features.contains(Features::TIMESTAMPS).then_some(&self.clock)
    }

    #[cfg(unix)]
    fn sharing(&self) -> Option<&dyn Sharing> {
        self.features.contains(Features::SHARED_MEMORY).then_some(self)
    }
}

impl Peers for VulkanDevice {
    fn access(&self, other: DeviceId) -> PeerAccess {
        let reaches = other == self.id() || self.tools.within_reach.contains(&other);
        PeerAccess { read: reaches, write: reaches }
    }
}

impl HostImport for VulkanDevice {
    fn alignment(&self) -> u64 {
        self.capabilities().host_import.unwrap_or(1)
    }

    fn import(&self, memory: HostMemory) -> Result<Arc<dyn Buffer>, AllocError> {
        let device = self.id();
        if memory.is_empty() {
            return Err(AllocError::ZeroSize { device });
        }
        if let Some(failure) = self.gpu.failure() {
            return Err(AllocError::Failed(failure));
        }
        // Drivers take what is not aligned, and use it wrongly.
        let (address, len, multiple) =
            (memory.base().addr().get() as u64, memory.len() as u64, self.alignment());
        if !address.is_multiple_of(multiple) || !len.is_multiple_of(multiple) {
            let reason = format!("address {address:#x} or size {len} is not a multiple of {multiple}");
            return Err(AllocError::CannotImport { device, reason });
        }
        let holder = self.handle().map_err(AllocError::Failed)?;
        Ok(self.arena.import_host(memory)?.of_device(holder))
    }
}

#[cfg(unix)]
impl Sharing for VulkanDevice {
    fn allocate_shareable(&self, size: u64) -> Result<Arc<dyn Buffer>, AllocError> {
        let device = self.handle().map_err(AllocError::Failed)?;
        Ok(self.arena.allocate_shareable(size)?.of_device(device))
    }

    fn export(&self, buffer: &dyn Buffer) -> Result<SharedMemory, AllocError> {
        let refuse = |reason: String| AllocError::CannotExport { device: self.id(), reason };
        if let Some(failure) = self.gpu.failure() {
            return Err(AllocError::Failed(failure));
        }
        let any: &dyn Any = buffer;
        let own = any.downcast_ref::<VulkanBuffer>().filter(|own| own.is_of(&self.gpu));
        let descriptor = own
            .and_then(VulkanBuffer::export)
            .ok_or_else(|| refuse("it was not allocated to be shared".to_owned()))?
            .map_err(|error| {
                let reason = error.to_string();
                self.gpu.sort(error, AllocError::Failed, |_| refuse(reason))
            })?;
        Ok(SharedMemory { device: self.id().uuid, size: buffer.size(), descriptor })
    }

    fn import_shared(&self, memory: SharedMemory) -> Result<Arc<dyn Buffer>, AllocError> {
        if memory.device != self.id().uuid {
            let reason = format!("it is memory of {}", memory.device);
            return Err(AllocError::CannotImport { device: self.id(), reason });
        }
        let device = self.handle().map_err(AllocError::Failed)?;
        Ok(self.arena.import_shared(memory.size, memory.descriptor)?.of_device(device))
    }

    fn import_window(&self, _parts: Vec<SharedMemory>) -> Result<Arc<dyn Buffer>, AllocError> {
        let reason = "memory of several devices is not put together here".to_owned();
        Err(AllocError::CannotImport { device: self.id(), reason })
    }
}

impl Graphs for VulkanDevice {
    fn prepare(&self, nodes: &[GraphNode]) -> Result<Arc<dyn Graph>, GraphError> {
        let device = self.handle().map_err(GraphError::Failed)?;
        Ok(Arc::new(VulkanGraph::prepare(&device, nodes)?))
    }
}

impl Residents for VulkanDevice {
    fn launch(&self, desc: &ResidentDesc<'_>) -> Result<Arc<dyn Resident>, ResidentError> {
        if let Some(failure) = self.gpu.failure() {
            return Err(ResidentError::Failed(failure));
        }
        let contract = desc.launch.kernel().contract();
        if !contract.resident {
            return Err(ResidentError::NotSliced { kernel: contract.name.clone() });
        }
        self.tools.check_launch(&desc.launch)?;
        let device = self.handle().map_err(ResidentError::Failed)?;
        let quarters = Quarters { tools: &self.tools, arena: &self.arena, budget: &self.budget };
        let core = ResidentCore::launch(quarters, desc)?;
        Ok(Arc::new(VulkanResident { core, _device: Hold::new(device) }))
    }

    fn budget(&self) -> ResidentBudget {
        self.budget.report()
    }

    fn reserve(&self, multiprocessors: u32) -> Result<ReservedMultiprocessors, ResidentError> {
        let refused = |free| ResidentError::NotFree { device: self.info().id, wanted: multiprocessors, free };
        self.budget.take(multiprocessors).map_err(refused)
    }

    fn give_way(&self) -> GiveWay {
        GiveWay::new(self.gpu.gate.open())
    }
}

impl fmt::Debug for VulkanDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VulkanDevice")
            .field("id", &self.id())
            .field("failure", &self.gpu.failure())
            .finish_non_exhaustive()
    }
}

impl Drop for VulkanDevice {
    fn drop(&mut self) {
        self.gpu.holders.close();
    }
}
