//! A host device: the seam over an arena, an engine and a row of the link table.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use warpweft_core_types::{
    AllocError, Buffer, BufferDesc, Device, DeviceId, DeviceInfo, Failure, Features, HostImport, HostMemory,
    KernelCode, Limits, LinkFact, LinkTraffic, Links, LoadError, MemoryKind, MemoryUsage, Module, OpenError,
    PeerAccess, Peers, Queue, QueueDesc, QueueId, Resident, ResidentBudget, ResidentDesc, ResidentError,
    Residents, Semaphore,
};

use crate::{
    config::{HostDeviceConfig, Place},
    engine::Engine,
    link::LinkTable,
    memory::{ALIGNMENT, Arena, PAGE},
    module::{FORMATS, HostModule},
    queue::{HostQueue, QueueCore, find_launch},
    resident::{Budget, HostResident, ResidentCore},
    semaphore::HostSemaphore,
};

const LIMITS: Limits = Limits {
    workgroup_threads: 1024,
    workgroups: [i32::MAX as u32, u16::MAX as u32, u16::MAX as u32],
    scalar_bytes: 4096,
    buffer_alignment: ALIGNMENT,
};

/// An open host device. Its threads end once it and all its queues and residents are dropped.
pub(crate) struct HostDevice {
    info: DeviceInfo,
    features: Features,
    arena: Arc<Arena>,
    engine: Arc<Engine>,
    links: Arc<LinkTable>,
    budget: Arc<Budget>,
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
        let engine = Engine::start(&info.id.to_string(), config.workers as usize).map_err(|error| {
            OpenError::Unavailable { backend: info.id.backend, missing: format!("threads: {error}") }
        })?;
        Ok(Arc::new_cyclic(|this| Self {
            info: info.clone(),
            features: features(info.id, config, links),
            arena: Arc::clone(arena),
            engine,
            links: Arc::clone(links),
            budget: Arc::new(Budget::new(config.resident_workgroups)),
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
    let mut features = Features::LINK_FACTS | Features::RESIDENT_KERNELS | Features::PEER_ACCESS;
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
        if desc.kind == MemoryKind::HostVisible && !self.features.contains(Features::HOST_VISIBLE_MEMORY) {
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
