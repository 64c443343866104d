//! A host device: the seam over an arena, an engine and a row of the link table.

#[cfg(target_os = "linux")]
use std::any::Any;
use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::Instant,
};

use warpweft_core_types::{
    AllocError, Buffer, BufferDesc, ClockSample, Deadline, Device, DeviceClock, DeviceId, DeviceInfo,
    Failure, Features, GiveWay, Graph, GraphError, GraphNode, Graphs, HostImport, HostMemory, KernelCode,
    Limits, LinkFact, LinkTraffic, Links, LoadError, MemoryUsage, Module, MultiprocessorPool, OpenError,
    PeerAccess, Peers, Queue, QueueDesc, QueueId, ReservedMultiprocessors, Resident, ResidentBudget,
    ResidentDesc, ResidentError, Residents, Semaphore,
};
#[cfg(target_os = "linux")]
use warpweft_core_types::{SharedMemory, Sharing};

#[cfg(target_os = "linux")]
use crate::memory::HostBuffer;
use crate::{
    clock,
    config::{HostDeviceConfig, Place},
    engine::Engine,
    graph::HostGraph,
    link::LinkTable,
    memory::{ALIGNMENT, Arena, PAGE},
    module::{FORMATS, HostModule},
    queue::{HostQueue, QueueCore, find_launch},
    resident::{HostResident, ResidentCore},
    semaphore::HostSemaphore,
};

const LIMITS: Limits = Limits {
    workgroup_threads: 1024,
    workgroups: [i32::MAX as u32, u16::MAX as u32, u16::MAX as u32],
    scalar_bytes: 4096,
    // Functions and libraries have memory of their own.
    shared_bytes: u32::MAX,
    buffer_alignment: ALIGNMENT,
};

/// An open host device. Its threads end once it and all its queues and residents are dropped.
pub(crate) struct HostDevice {
    info: DeviceInfo,
    features: Features,
    arena: Arc<Arena>,
    engine: Arc<Engine>,
    links: Arc<LinkTable>,
    budget: Arc<MultiprocessorPool>,
    queue_count: AtomicU32,
    /// Queues that may hold work when the device goes away.
    queues: Mutex<Vec<Weak<QueueCore>>>,
    /// Queues and residents keep their device alive through this.
    this: Weak<Self>,
}

impl HostDevice {
    pub(crate) fn open(
        info: &DeviceInfo,
        config: &HostDeviceConfig,
        arena: &Arc<Arena>,
        links: &Arc<LinkTable>,
    ) -> Result<Arc<Self>, OpenError> {
        let engine = Engine::start(&info.id.to_string(), config.workers as usize)
            .map_err(|error| OpenError::NoThread { what: info.id.to_string(), reason: error.to_string() })?;
        Ok(Arc::new_cyclic(|this| Self {
            info: info.clone(),
            features: features(info.id, config, links),
            arena: Arc::clone(arena),
            engine,
            links: Arc::clone(links),
            budget: Arc::new(MultiprocessorPool::new(config.resident_workgroups)),
            queue_count: AtomicU32::new(0),
            queues: Mutex::default(),
            this: this.clone(),
        }))
    }

    fn id(&self) -> DeviceId {
        self.info.id
    }

    fn handle(&self) -> Result<Arc<Self>, OpenError> {
        // Only a device that is being dropped cannot be upgraded, and nobody can call it then.
        let lost = || OpenError::Failed(Arc::new(Failure::Abandoned { device: self.id() }));
        self.this.upgrade().ok_or_else(lost)
    }
}

/// What the device's configuration and links let it do.
pub(crate) fn features(id: DeviceId, config: &HostDeviceConfig, links: &LinkTable) -> Features {
    let mut features = Features::LINK_FACTS
        | Features::RESIDENT_KERNELS
        | Features::PEER_ACCESS
        | Features::GRAPHS
        | Features::TIMESTAMPS;
    features.set(Features::SHARED_MEMORY, cfg!(target_os = "linux"));
    let own = Place::Device(id.ordinal);
    if links.linked(own, Place::Host) && links.linked(Place::Host, own) {
        features |= Features::HOST_VISIBLE_MEMORY;
        features.set(Features::HOST_IMPORT, config.host_import);
    }
    features
}

/// What is known of a device before it is opened.
pub(crate) fn info(id: DeviceId, config: &HostDeviceConfig) -> DeviceInfo {
    DeviceInfo {
        id,
        name: config.name.clone(),
        kind: config.kind,
        driver: env!("CARGO_PKG_VERSION").to_owned(),
        memory: config.memory,
        multiprocessors: config.workers,
        compute_capability: config.compute_capability,
        pci: config.pci,
        numa_node: config.numa_node,
        code_formats: FORMATS.to_vec(),
    }
}

impl fmt::Debug for HostDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostDevice({})", self.id())
    }
}

impl Device for HostDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn features(&self) -> Features {
        self.features
    }

    fn limits(&self) -> &Limits {
        &LIMITS
    }

    fn memory(&self) -> Result<MemoryUsage, AllocError> {
        Ok(self.arena.usage())
    }

    fn allocate(&self, desc: &BufferDesc) -> Result<Arc<dyn Buffer>, AllocError> {
        if desc.kind.is_host_visible() && !self.features.contains(Features::HOST_VISIBLE_MEMORY) {
            return Err(AllocError::UnsupportedKind { device: self.id(), kind: desc.kind });
        }
        Ok(Arc::new(self.arena.allocate(desc)?))
    }

    fn create_queue(&self, desc: &QueueDesc) -> Result<Arc<dyn Queue>, OpenError> {
        if desc.capacity == 0 {
            let reason = "a queue must hold at least one submission".to_owned();
            return Err(OpenError::InvalidConfig { reason });
        }
        let number = self.queue_count.fetch_add(1, Ordering::Relaxed);
        let core = QueueCore::new(
            QueueId { device: self.id(), number },
            desc,
            Arc::clone(&self.engine),
            Arc::clone(&self.links),
        );
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&core));
        drop(queues);
        Ok(Arc::new(HostQueue { core, _device: self.handle()? }))
    }

    fn create_semaphore(&self, initial: u64) -> Result<Arc<dyn Semaphore>, OpenError> {
        Ok(Arc::new(HostSemaphore::new(self.id(), initial, &self.engine)))
    }

    fn load(&self, code: &KernelCode) -> Result<Arc<dyn Module>, LoadError> {
        Ok(Arc::new(HostModule::load(self.id(), &LIMITS, code)?))
    }

    /// Host devices are never lost.
    fn failure(&self) -> Option<Arc<Failure>> {
        None
    }

    fn peers(&self) -> Option<&dyn Peers> {
        Some(self)
    }

    fn links(&self) -> Option<&dyn Links> {
        Some(self)
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
        Some(self)
    }

    #[cfg(target_os = "linux")]
    fn sharing(&self) -> Option<&dyn Sharing> {
        Some(self)
    }
}

impl Graphs for HostDevice {
    fn prepare(&self, nodes: &[GraphNode]) -> Result<Arc<dyn Graph>, GraphError> {
        Ok(Arc::new(HostGraph::prepare(self.id(), &self.links, nodes)?))
    }
}

impl DeviceClock for HostDevice {
    fn sample(&self, _deadline: Deadline) -> Result<ClockSample, Arc<Failure>> {
        let before = Instant::now();
        let device_ns = clock::now_ns();
        Ok(ClockSample { before, after: Instant::now(), device_ns })
    }
}

#[cfg(target_os = "linux")]
impl Sharing for HostDevice {
    fn allocate_shareable(&self, size: u64) -> Result<Arc<dyn Buffer>, AllocError> {
        Ok(Arc::new(self.arena.allocate_shareable(size)?))
    }

    fn export(&self, buffer: &dyn Buffer) -> Result<SharedMemory, AllocError> {
        let refuse = |reason: String| AllocError::CannotExport { device: self.id(), reason };
        let any: &dyn Any = buffer;
        let own = any.downcast_ref::<HostBuffer>().filter(|own| own.device() == self.id());
        let descriptor = own
            .and_then(HostBuffer::export)
            .ok_or_else(|| refuse("it was not allocated to be shared".to_owned()))?
            .map_err(|error| refuse(error.to_string()))?;
        Ok(SharedMemory { device: self.id().uuid, size: buffer.size(), descriptor })
    }

    fn import_shared(&self, memory: SharedMemory) -> Result<Arc<dyn Buffer>, AllocError> {
        if memory.device != self.id().uuid {
            let reason = format!("it is memory of {}", memory.device);
            return Err(AllocError::CannotImport { device: self.id(), reason });
        }
        Ok(Arc::new(self.arena.import_shared(memory.size, memory.descriptor)?))
    }

    fn import_window(&self, _parts: Vec<SharedMemory>) -> Result<Arc<dyn Buffer>, AllocError> {
        let reason = "memory of several devices is not put together here".to_owned();
        Err(AllocError::CannotImport { device: self.id(), reason })
    }
}

impl Peers for HostDevice {
    fn access(&self, other: DeviceId) -> PeerAccess {
        self.links.peer_access(self.id().ordinal, other)
    }
}

impl Links for HostDevice {
    fn facts(&self) -> Vec<LinkFact> {
        self.links.facts(self.id().ordinal)
    }

    fn traffic(&self) -> Vec<LinkTraffic> {
        self.links.traffic(self.id().ordinal)
    }
}

impl HostImport for HostDevice {
    /// A page, as every other kind of device asks for, so that programs meet one rule everywhere.
    fn alignment(&self) -> u64 {
        PAGE
    }

    fn import(&self, memory: HostMemory) -> Result<Arc<dyn Buffer>, AllocError> {
        let refuse = |reason: String| Err(AllocError::CannotImport { device: self.id(), reason });
        let address = memory.base().addr().get() as u64;
        if !address.is_multiple_of(PAGE) || !(memory.len() as u64).is_multiple_of(PAGE) {
            return refuse(format!(
                "address {address:#x} or size {} is not a multiple of {PAGE}",
                memory.len()
            ));
        }
        Ok(Arc::new(self.arena.import(memory)?))
    }
}

impl Residents for HostDevice {
    fn launch(&self, desc: &ResidentDesc<'_>) -> Result<Arc<dyn Resident>, ResidentError> {
        let contract = desc.launch.kernel().contract();
        if !contract.resident {
            return Err(ResidentError::NotSliced { kernel: contract.name.clone() });
        }
        let launch = find_launch(self.id(), &self.links, &desc.launch)?;
        let handle = self
            .this
            .upgrade()
            .ok_or_else(|| ResidentError::Failed(Arc::new(Failure::Abandoned { device: self.id() })))?;
        let core = ResidentCore::launch(self.id(), launch, desc, &self.engine, &self.budget)?;
        Ok(Arc::new(HostResident { core, _device: handle }))
    }

    fn budget(&self) -> ResidentBudget {
        self.budget.report()
    }

    fn reserve(&self, multiprocessors: u32) -> Result<ReservedMultiprocessors, ResidentError> {
        let refused = |free| ResidentError::NotFree { device: self.info().id, wanted: multiprocessors, free };
        self.budget.take(multiprocessors).map_err(refused)
    }

    /// Nothing has to be done: no call waits for a resident here.
    fn give_way(&self) -> GiveWay {
        GiveWay::new(())
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        let queues = std::mem::take(&mut *self.queues.lock().unwrap_or_else(PoisonError::into_inner));
        for queue in queues.iter().filter_map(Weak::upgrade) {
            queue.close();
        }
        self.engine.close();
    }
}
