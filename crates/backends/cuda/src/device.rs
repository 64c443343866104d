//! A CUDA device: the seam over a context, an arena and the backend's shared parts.

use std::{
    any::Any,
    fmt,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys::CUdevice;
use warpweft_core_types::{
    AllocError, Buffer, BufferDesc, Device, DeviceId, DeviceInfo, DriverError, Failure, Features, KernelCode,
    Limits, LinkFact, LinkTraffic, Links, LoadError, MemoryUsage, Module, OpenError, PeerAccess, Peers,
    Queue, QueueDesc, Resident, ResidentBudget, ResidentDesc, ResidentError, Residents, Semaphore,
};

use crate::{
    compiler::Compiler,
    context::Context,
    driver::{Driver, PEER_ACCESS_ALREADY_ENABLED},
    memory::{ALIGNMENT, Arena},
    module::{CudaModule, PARAMETER_BYTES},
    peer::PeerTable,
    queue::{CudaQueue, QueueCore, check_operands},
    reactor::ReactorOwner,
    resident::{Budget, CudaResident, ResidentCore, hostile_surroundings},
    semaphore::CudaSemaphore,
    work::Work,
};

/// What the devices of a backend have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) driver: Arc<Driver>,
    pub(crate) peers: Arc<PeerTable>,
    pub(crate) compiler: Compiler,
    pub(crate) infos: Vec<DeviceInfo>,
    pub(crate) reactor: ReactorOwner,
}

/// What is known of a device before it is opened.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) info: DeviceInfo,
    pub(crate) device: CUdevice,
    pub(crate) workgroup_threads: u32,
    pub(crate) workgroups: [u32; 3],
    /// Kernels that take long are ended, because the device drives a display.
    pub(crate) has_timeout: bool,
    /// It walks the host's page tables: joined with the host by a coherent link.
    pub(crate) is_coherent: bool,
}

impl Facts {
    pub(crate) fn features(&self, peers: &PeerTable) -> Features {
        let mut features = Features::HOST_VISIBLE_MEMORY | Features::LINK_FACTS | Features::RESIDENT_KERNELS;
        features.set(Features::PEER_ACCESS, peers.has_peers(self.info.id.ordinal));
        features
    }
}

/// An open CUDA device.
pub(crate) struct CudaDevice {
    facts: Facts,
    features: Features,
    limits: Limits,
    shared: Arc<Shared>,
    context: Arc<Context>,
    arena: Arc<Arena>,
    budget: Arc<Budget>,
    queue_count: AtomicU32,
    /// Queues that may hold work when the device goes away.
    queues: Mutex<Vec<Weak<QueueCore>>>,
    /// Queues and residents keep their device alive through this.
    this: Weak<Self>,
}

impl CudaDevice {
    pub(crate) fn open(shared: &Arc<Shared>, facts: &Facts) -> Result<Arc<Self>, OpenError> {
        let context = Context::retain(&shared.driver, facts.info.id, facts.device)?;
        let arena = Arena::create(&context, facts.info.memory.0).map_err(OpenError::Driver)?;
        Ok(Arc::new_cyclic(|this| Self {
            facts: facts.clone(),
            features: facts.features(&shared.peers),
            limits: Limits {
                workgroup_threads: facts.workgroup_threads,
                workgroups: facts.workgroups,
                scalar_bytes: PARAMETER_BYTES,
                buffer_alignment: ALIGNMENT,
            },
            shared: Arc::clone(shared),
            context,
            arena,
            budget: Arc::new(Budget::of_device(facts.info.multiprocessors)),
            queue_count: AtomicU32::new(0),
            queues: Mutex::default(),
            this: this.clone(),
        }))
    }

    /// Lets this device's queues and kernels use memory of `other`, if the machine can do that.
    ///
    /// Pool memory is opened pool by pool. Peer access of the contexts is for memory that others allocated.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn meet(&self, other: &Self) -> Result<(), DriverError> {
        if !self.shared.peers.reaches(self.id().ordinal, other.id().ordinal) {
            return Ok(());
        }
        other.arena.admit(&self.context)?;
        let _current = self.context.enter()?;
        // SAFETY: both contexts are retained, and this one is current.
        match unsafe { self.shared.driver.context_enable_peer_access(other.context.raw.raw(), 0) } {
            // The program's other CUDA code may have done it.
            Err(error) if error.code != PEER_ACCESS_ALREADY_ENABLED => Err(error),
            _ => Ok(()),
        }
    }

    /// The CUDA device behind a handle, if it is one.
    pub(crate) fn of(device: &Arc<dyn Device>) -> Option<&Self> {
        let device: &dyn Any = device.as_ref();
        device.downcast_ref()
    }

    /// What calls on the device go through, and what it reaches.
    pub(crate) fn surroundings(&self) -> (&Arc<Context>, &Arc<PeerTable>) {
        (&self.context, &self.shared.peers)
    }

    fn id(&self) -> DeviceId {
        self.facts.info.id
    }

    fn alive(&self) -> Result<(), OpenError> {
        self.context.failure().map_or(Ok(()), |failure| Err(OpenError::Failed(failure)))
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.facts.info
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
        Ok(Arc::new(self.arena.allocate(desc)?))
    }

    fn create_queue(&self, desc: &QueueDesc) -> Result<Arc<dyn Queue>, OpenError> {
        self.alive()?;
        if desc.capacity == 0 {
            let reason = "a queue must hold at least one submission".to_owned();
            return Err(OpenError::InvalidConfig { reason });
        }
        // Only a device that is being dropped cannot be upgraded, and nobody can call it then.
        let lost = || OpenError::Failed(Arc::new(Failure::Abandoned { device: self.id() }));
        let handle = self.this.upgrade().ok_or_else(lost)?;
        // Relaxed: a number that orders nothing.
        let number = self.queue_count.fetch_add(1, Ordering::Relaxed);
        let reactor = self.shared.reactor.shared();
        let core = QueueCore::create(&self.context, &self.shared.peers, reactor, number, desc)
            .map_err(OpenError::Driver)?;
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&core));
        drop(queues);
        Ok(Arc::new(CudaQueue { core, _device: handle }))
    }

    fn create_semaphore(&self, initial: u64) -> Result<Arc<dyn Semaphore>, OpenError> {
        self.alive()?;
        Ok(Arc::new(CudaSemaphore::new(self.id(), initial, self.shared.reactor.shared())))
    }

    fn load(&self, code: &KernelCode) -> Result<Arc<dyn Module>, LoadError> {
        let compiler = &self.shared.compiler;
        Ok(Arc::new(CudaModule::load(&self.context, compiler, &self.facts.info, &self.limits, code)?))
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.context.failure()
    }

    fn peers(&self) -> Option<&dyn Peers> {
        self.features.contains(Features::PEER_ACCESS).then_some(self)
    }

    fn links(&self) -> Option<&dyn Links> {
        Some(self)
    }

    fn residents(&self) -> Option<&dyn Residents> {
        Some(self)
    }
}

impl Peers for CudaDevice {
    fn access(&self, other: DeviceId) -> PeerAccess {
        let known = self.shared.infos.iter().any(|info| info.id == other);
        let reaches = known && self.shared.peers.reaches(self.id().ordinal, other.ordinal);
        PeerAccess { read: reaches, write: reaches }
    }
}

impl Links for CudaDevice {
    fn facts(&self) -> Vec<LinkFact> {
        self.shared.peers.facts(&self.shared.infos, &self.facts.info, self.facts.is_coherent)
    }

    /// The driver counts nothing.
    fn traffic(&self) -> Vec<LinkTraffic> {
        Vec::new()
    }
}

impl Residents for CudaDevice {
    fn launch(&self, desc: &ResidentDesc<'_>) -> Result<Arc<dyn Resident>, ResidentError> {
        if let Some(failure) = self.context.failure() {
            return Err(ResidentError::Failed(failure));
        }
        if let Some(reason) = hostile_surroundings(self.facts.has_timeout) {
            return Err(ResidentError::Refused { device: self.id(), reason });
        }
        let contract = desc.launch.kernel().contract();
        if !contract.resident {
            return Err(ResidentError::NotSliced { kernel: contract.name.clone() });
        }
        check_operands(self.id(), &self.shared.peers, &Work::from(&desc.launch))?;
        let lost = || ResidentError::Failed(Arc::new(Failure::Abandoned { device: self.id() }));
        let handle = self.this.upgrade().ok_or_else(lost)?;
        let core = ResidentCore::launch(&self.context, &self.arena, &self.budget, desc)?;
        Ok(Arc::new(CudaResident { core, _device: handle }))
    }

    fn budget(&self) -> ResidentBudget {
        self.budget.report()
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice")
            .field("id", &self.id())
            .field("failure", &self.context.failure())
            .finish_non_exhaustive()
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        let queues = std::mem::take(&mut *self.queues.lock().unwrap_or_else(PoisonError::into_inner));
        for queue in queues.iter().filter_map(Weak::upgrade) {
            queue.close();
        }
    }
}
