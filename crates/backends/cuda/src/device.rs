//! A CUDA device: the seam over a context, an arena and the backend's shared parts.

use std::{
    any::Any,
    error::Error,
    fmt,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys::CUdevice;
use warpweft_core_types::{
    Access, AllocError, Buffer, BufferDesc, BufferView, CapturedWork, CollectiveError, Collectives, Device,
    DeviceClock, DeviceId, DeviceInfo, DriverError, Failure, Features, GiveWay, Graph, GraphError, GraphNode,
    Graphs, HostImport, HostMemory, Interop, InteropError, KernelCode, Limits, LinkFact, LinkTraffic, Links,
    LoadError, MemoryUsage, Module, MultiprocessorPool, NativeHandle, NativeMemory, NativeQueue, OpenError,
    PeerAccess, Peers, Queue, QueueDesc, ReservedMultiprocessors, Resident, ResidentBudget, ResidentDesc,
    ResidentError, Residents, Semaphore,
};
#[cfg(unix)]
use warpweft_core_types::{SharedMemory, Sharing};
use warpweft_polled::ReactorOwner;

#[cfg(unix)]
use crate::virtual_memory::Import;
use crate::{
    budget::hostile_surroundings,
    cache::CubinCache,
    check::check_launch,
    clock::Clock,
    collectives::Library,
    communicator::refusal,
    compiler::Compiler,
    context::Context,
    driver::{Driver, PEER_ACCESS_ALREADY_ENABLED},
    graph::CudaGraph,
    interop,
    links::LinkReport,
    memory::{ALIGNMENT, Arena, CudaBuffer, PAGE},
    module::{CudaModule, PARAMETER_BYTES, Tools},
    peer::PeerTable,
    queue::{CudaQueue, QueueCore},
    resident::{CudaResident, ResidentCore},
    semaphore::CudaSemaphore,
    stream::Stream,
};

/// What the devices of a backend have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) driver: Arc<Driver>,
    pub(crate) peers: Arc<PeerTable>,
    pub(crate) links: LinkReport,
    pub(crate) compiler: Compiler,
    pub(crate) infos: Vec<DeviceInfo>,
    pub(crate) reactor: ReactorOwner<QueueCore>,
    pub(crate) cache: CubinCache,
    /// Devices that may be open, those of imported contexts among them.
    pub(crate) open: Mutex<Vec<Weak<CudaDevice>>>,
    /// What each GPU keeps for residents, in ordinal order: all contexts of a GPU share it.
    pub(crate) budgets: Vec<Arc<MultiprocessorPool>>,
    pub(crate) nccl: Library,
}

impl Shared {
    /// Lets a device that was opened and those that are open use each other's memory.
    pub(crate) fn introduce(&self, device: &Arc<CudaDevice>) -> Result<(), DriverError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|known| known.strong_count() > 0);
        let others: Vec<_> = open.iter().filter_map(Weak::upgrade).collect();
        open.push(Arc::downgrade(device));
        drop(open);
        others.iter().try_for_each(|other| {
            device.meet(other)?;
            other.meet(device)
        })
    }
}

/// What is known of a device before it is opened.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) info: DeviceInfo,
    pub(crate) device: CUdevice,
    pub(crate) workgroup_threads: u32,
    pub(crate) workgroups: [u32; 3],
    /// The most dynamic memory of a workgroup.
    pub(crate) shared_bytes: u32,
    /// It can export memory as a file descriptor.
    pub(crate) shares_memory: bool,
    /// Kernels that take long are ended, because the device drives a display.
    pub(crate) has_timeout: bool,
    /// It walks the host's page tables: joined with the host by a coherent link.
    pub(crate) is_coherent: bool,
}

impl Facts {
    pub(crate) fn features(&self, peers: &PeerTable) -> Features {
        let mut features = Features::HOST_VISIBLE_MEMORY
            | Features::LINK_FACTS
            | Features::HOST_IMPORT
            | Features::RESIDENT_KERNELS
            | Features::GRAPHS
            | Features::TIMESTAMPS
            | Features::INTEROP;
        features.set(Features::SHARED_MEMORY, self.shares_memory);
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
    clock: Arc<Clock>,
    budget: Arc<MultiprocessorPool>,
    /// NCCL works with the primary context alone: its own threads make that current.
    is_primary: bool,
    /// Set once a launch was seen to return before its kernel ended. That one did not is never kept: it may have met
    /// a bad moment.
    launches_return: OnceLock<()>,
    queue_count: AtomicU32,
    /// Queues that may hold work when the device goes away.
    queues: Mutex<Vec<Weak<QueueCore>>>,
    /// Queues and residents keep their device alive through this.
    this: Weak<Self>,
}

impl CudaDevice {
    pub(crate) fn open(
        shared: &Arc<Shared>,
        facts: &Facts,
        context: Arc<Context>,
    ) -> Result<Arc<Self>, OpenError> {
        let users = shared.peers.users(facts.info.id.ordinal);
        let arena = Arena::create(&context, facts.info.memory.0, users).map_err(OpenError::Driver)?;
        let capability = facts.info.compute_capability.unwrap_or_default();
        let clock = Clock::load(&context, &arena, &shared.cache, capability)?;
        let is_primary = context.is_primary();
        let device = Arc::new_cyclic(|this| Self {
            is_primary,
            facts: facts.clone(),
            features: facts.features(&shared.peers),
            limits: Limits {
                workgroup_threads: facts.workgroup_threads,
                workgroups: facts.workgroups,
                scalar_bytes: PARAMETER_BYTES,
                shared_bytes: facts.shared_bytes,
                buffer_alignment: ALIGNMENT,
            },
            shared: Arc::clone(shared),
            context,
            arena,
            clock,
            budget: Arc::clone(&shared.budgets[facts.info.id.ordinal as usize]),
            launches_return: OnceLock::new(),
            queue_count: AtomicU32::new(0),
            queues: Mutex::default(),
            this: this.clone(),
        });
        shared.introduce(&device).map_err(OpenError::Driver)?;
        Ok(device)
    }

    /// Lets this device's queues and kernels use memory of `other`, if the machine can do that.
    ///
    /// Pool memory is opened pool by pool. Peer access of the contexts is for memory that others allocated.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn meet(&self, other: &Self) -> Result<(), DriverError> {
        if !self.shared.peers.reaches(self.id().ordinal, other.id().ordinal) {
            return Ok(());
        }
        // Not known to wait for residents; nobody has shown that it never does.
        let _hurried = [&self.context, &other.context].map(|context| context.cold.open());
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

    /// The same with a share in it.
    pub(crate) fn of_shared(device: &Arc<dyn Device>) -> Option<Arc<Self>> {
        let device: Arc<dyn Any + Send + Sync> = Arc::clone(device) as _;
        device.downcast().ok()
    }

    /// What calls on the device go through, and what it reaches.
    pub(crate) fn surroundings(&self) -> (&Arc<Context>, &Arc<PeerTable>, &Arc<Clock>) {
        (&self.context, &self.shared.peers, &self.clock)
    }

    pub(crate) const fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn id(&self) -> DeviceId {
        self.facts.info.id
    }

    /// The library of collectives.
    pub(crate) fn nccl(&self) -> Result<&nccl_rs::Nccl, CollectiveError> {
        self.shared.nccl.get()
    }

    pub(crate) fn capability(&self) -> (u32, u32) {
        self.facts.info.compute_capability.unwrap_or_default()
    }

    /// What an error of that library says of this device.
    pub(crate) fn refused(&self, error: nccl_rs::Error) -> CollectiveError {
        self.context.failure().map_or_else(|| refusal(self.id(), error), CollectiveError::Failed)
    }

    pub(crate) fn handle(&self) -> Result<Arc<Self>, Arc<Failure>> {
        // Only a device that is being dropped cannot be upgraded, and nobody can call it then.
        self.this.upgrade().ok_or_else(|| Arc::new(Failure::Abandoned { device: self.id() }))
    }

    /// A queue that works in `stream`.
    fn queue(&self, stream: Stream, desc: &QueueDesc) -> Result<Arc<dyn Queue>, Arc<Failure>> {
        // Relaxed: a number that orders nothing.
        let number = self.queue_count.fetch_add(1, Ordering::Relaxed);
        let reactor = self.shared.reactor.shared();
        let peers = &self.shared.peers;
        let core = QueueCore::new(&self.context, peers, reactor, &self.clock, stream, number, desc);
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&core));
        drop(queues);
        Ok(Arc::new(CudaQueue { core, _device: self.handle()? }))
    }

    /// What would make residents hang or starve here, if anything does.
    fn reason_against_residents(&self) -> Result<Option<String>, DriverError> {
        if let Some(reason) = hostile_surroundings(self.facts.has_timeout) {
            return Ok(Some(reason));
        }
        if self.launches_return.get().is_none() {
            if !self.clock.launches_return()? {
                let reason = "launches wait for their kernels here, as under a debugger or a sanitizer";
                return Ok(Some(reason.to_owned()));
            }
            // Somebody else may have been first with the same.
            let _seen = self.launches_return.set(());
        }
        Ok(None)
    }

    fn alive(&self) -> Result<(), OpenError> {
        self.context.failure().map_or(Ok(()), |failure| Err(OpenError::Failed(failure)))
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.facts.info
    }

    /// The library of collectives is loaded by whoever asks first, since nothing less tells whether it can be.
    fn features(&self) -> Features {
        let mut features = self.features;
        features.set(Features::COLLECTIVES, self.collectives().is_some());
        features
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn memory(&self) -> Result<MemoryUsage, AllocError> {
        self.arena.usage()
    }

    fn allocate(&self, desc: &BufferDesc) -> Result<Arc<dyn Buffer>, AllocError> {
        Ok(self.arena.allocate(desc)?.of_device(self.handle().map_err(AllocError::Failed)?))
    }

    fn create_queue(&self, desc: &QueueDesc) -> Result<Arc<dyn Queue>, OpenError> {
        self.alive()?;
        if desc.capacity == 0 {
            let reason = "a queue must hold at least one submission".to_owned();
            return Err(OpenError::InvalidConfig { reason });
        }
        let stream = Stream::create(&self.context).map_err(OpenError::Driver)?;
        self.queue(stream, desc).map_err(OpenError::Failed)
    }

    fn create_semaphore(&self, initial: u64) -> Result<Arc<dyn Semaphore>, OpenError> {
        self.alive()?;
        let reactor = self.shared.reactor.shared();
        Ok(Arc::new(CudaSemaphore::new(self.id(), initial, reactor, self.shared.driver.origin)))
    }

    fn load(&self, code: &KernelCode) -> Result<Arc<dyn Module>, LoadError> {
        let tools = Tools { compiler: &self.shared.compiler, cache: &self.shared.cache };
        let owner = self.handle().map_err(LoadError::Failed)?;
        Ok(Arc::new(CudaModule::load(&owner, &tools, code)?))
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

    fn host_import(&self) -> Option<&dyn HostImport> {
        Some(self)
    }

    fn residents(&self) -> Option<&dyn Residents> {
        Some(self)
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        Some(self)
    }

    fn collectives(&self) -> Option<&dyn Collectives> {
        (self.is_primary && self.shared.nccl.is_there()).then_some(self)
    }

    fn clock(&self) -> Option<&dyn DeviceClock> {
        Some(self.clock.as_ref())
    }

    fn interop(&self) -> Option<&dyn Interop> {
        Some(self)
    }

    #[cfg(unix)]
    fn sharing(&self) -> Option<&dyn Sharing> {
        self.facts.shares_memory.then_some(self)
    }
}

impl HostImport for CudaDevice {
    fn alignment(&self) -> u64 {
        PAGE
    }

    fn import(&self, memory: HostMemory) -> Result<Arc<dyn Buffer>, AllocError> {
        let refuse = |reason: String| Err(AllocError::CannotImport { device: self.id(), reason });
        if memory.is_empty() {
            return Err(AllocError::ZeroSize { device: self.id() });
        }
        let (address, len) = (memory.base().addr().get() as u64, memory.len() as u64);
        if !address.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return refuse(format!("address {address:#x} or size {len} is not a multiple of {PAGE}"));
        }
        if let Some(failure) = self.context.failure() {
            return Err(AllocError::Failed(failure));
        }
        Ok(self.arena.import_host(memory)?.of_device(self.handle().map_err(AllocError::Failed)?))
    }
}

impl Graphs for CudaDevice {
    fn prepare(&self, nodes: &[GraphNode]) -> Result<Arc<dyn Graph>, GraphError> {
        let graph = CudaGraph::prepare(&self.handle().map_err(GraphError::Failed)?, nodes)?;
        let graph = Arc::new(graph);
        graph.introduce();
        Ok(graph)
    }
}

impl Interop for CudaDevice {
    fn device_handle(&self) -> NativeHandle {
        NativeHandle { kind: interop::CONTEXT, value: self.context.raw.raw().expose_provenance() as u64 }
    }

    fn queue_handle(&self, queue: &dyn Queue) -> Result<NativeHandle, InteropError> {
        let any: &dyn Any = queue;
        let own = any.downcast_ref::<CudaQueue>().filter(|own| own.core.belongs_to(&self.context));
        let (owner, device) = (queue.id().device, self.id());
        let own = own.ok_or(InteropError::Foreign { what: "queue", owner, device })?;
        let value = own.core.share_stream().raw().expose_provenance() as u64;
        Ok(NativeHandle { kind: interop::STREAM, value })
    }

    fn buffer_handle(&self, buffer: &dyn Buffer) -> Result<NativeHandle, InteropError> {
        let any: &dyn Any = buffer;
        let (owner, device) = (buffer.device(), self.id());
        let own = any.downcast_ref::<CudaBuffer>();
        let own = own.ok_or(InteropError::Foreign { what: "buffer", owner, device })?;
        Ok(NativeHandle { kind: interop::ADDRESS, value: own.address() })
    }

    fn import_queue(&self, queue: NativeQueue, desc: &QueueDesc) -> Result<Arc<dyn Queue>, InteropError> {
        if desc.capacity == 0 {
            return Err(InteropError::Refused {
                device: self.id(),
                what: queue.handle().to_string(),
                reason: "a queue must hold at least one submission".to_owned(),
            });
        }
        let stream = interop::stream_of(&self.context, &queue)?;
        self.queue(stream, desc).map_err(InteropError::Failed)
    }

    fn import_buffer(&self, memory: NativeMemory) -> Result<Arc<dyn Buffer>, InteropError> {
        interop::check_memory(&self.context, &memory)?;
        let open =
            interop::is_open_to_peers(&self.context, memory.address()).map_err(InteropError::Driver)?;
        let owner = self.handle().map_err(InteropError::Failed)?;
        Ok(self.arena.import_native(memory, open).of_device(owner))
    }

    fn capture(
        &self,
        accesses: Vec<(BufferView, Access)>,
        owner: Arc<dyn Any + Send + Sync>,
        record: &mut dyn FnMut(NativeHandle) -> Result<(), Box<dyn Error + Send + Sync>>,
    ) -> Result<Arc<dyn CapturedWork>, InteropError> {
        Ok(Arc::new(interop::capture(&self.context, accesses, owner, record)?))
    }
}

#[cfg(unix)]
impl Sharing for CudaDevice {
    fn allocate_shareable(&self, size: u64) -> Result<Arc<dyn Buffer>, AllocError> {
        Ok(self.arena.allocate_shareable(size)?.of_device(self.handle().map_err(AllocError::Failed)?))
    }

    fn export(&self, buffer: &dyn Buffer) -> Result<SharedMemory, AllocError> {
        let refuse = |reason: String| AllocError::CannotExport { device: self.id(), reason };
        let any: &dyn Any = buffer;
        let own = any.downcast_ref::<CudaBuffer>().filter(|own| own.device() == self.id());
        let descriptor = own
            .and_then(CudaBuffer::export)
            .ok_or_else(|| refuse("it was not allocated to be shared".to_owned()))?
            .map_err(|error| refuse(error.to_string()))?;
        Ok(SharedMemory { device: self.id().uuid, size: buffer.size(), descriptor })
    }

    fn import_shared(&self, memory: SharedMemory) -> Result<Arc<dyn Buffer>, AllocError> {
        if memory.device != self.id().uuid {
            let reason = format!("it is memory of {}", memory.device);
            return Err(AllocError::CannotImport { device: self.id(), reason });
        }
        let imported = self.arena.import_shared(memory.size, memory.descriptor)?;
        Ok(imported.of_device(self.handle().map_err(AllocError::Failed)?))
    }

    fn import_window(&self, parts: Vec<SharedMemory>) -> Result<Arc<dyn Buffer>, AllocError> {
        let refuse = |reason: String| AllocError::CannotImport { device: self.id(), reason };
        let import = |part: SharedMemory| {
            let mut infos = self.shared.infos.iter();
            let owner = infos.find(|info| info.id.uuid == part.device).map(|info| info.id);
            let owner = owner.ok_or_else(|| refuse(format!("no device here is {}", part.device)))?;
            if !self.access(owner).write {
                return Err(refuse(format!("memory of {owner} is out of reach")));
            }
            let number = self.shared.peers.number(owner.ordinal);
            let number = number.ok_or_else(|| refuse(format!("{owner} has no number")))?;
            let size = usize::try_from(part.size).map_err(|_| refuse(format!("{} bytes", part.size)))?;
            Ok(Import { descriptor: part.descriptor, size, owner: number })
        };
        let imports = parts.into_iter().map(import).collect::<Result<Vec<_>, _>>()?;
        if imports.is_empty() {
            return Err(AllocError::ZeroSize { device: self.id() });
        }
        let window = self.arena.import_window(&imports)?;
        Ok(window.of_device(self.handle().map_err(AllocError::Failed)?))
    }
}

impl Peers for CudaDevice {
    fn access(&self, other: DeviceId) -> PeerAccess {
        let known = self.shared.infos.iter().any(|info| info.id == other);
        let reaches =
            other == self.id() || known && self.shared.peers.reaches(self.id().ordinal, other.ordinal);
        PeerAccess { read: reaches, write: reaches }
    }
}

impl Links for CudaDevice {
    fn facts(&self) -> Vec<LinkFact> {
        let report = self.shared.links.get(self.shared.driver.origin).ok();
        self.shared.peers.facts(&self.shared.infos, &self.facts.info, self.facts.is_coherent, report)
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
        if let Some(reason) = self.reason_against_residents().map_err(ResidentError::Driver)? {
            return Err(ResidentError::Refused { device: self.id(), reason });
        }
        let contract = desc.launch.kernel().contract();
        if !contract.resident {
            return Err(ResidentError::NotSliced { kernel: contract.name.clone() });
        }
        check_launch(&self.context, &self.shared.peers, &desc.launch)?;
        let handle = self.handle().map_err(ResidentError::Failed)?;
        let core = ResidentCore::launch(&self.context, &self.arena, &self.budget, desc)?;
        Ok(Arc::new(CudaResident { core, _device: handle }))
    }

    fn budget(&self) -> ResidentBudget {
        self.budget.report()
    }

    fn reserve(&self, multiprocessors: u32) -> Result<ReservedMultiprocessors, ResidentError> {
        let refused = |free| ResidentError::NotFree { device: self.info().id, wanted: multiprocessors, free };
        self.budget.take(multiprocessors).map_err(refused)
    }

    fn give_way(&self) -> GiveWay {
        // In a forked process nothing runs that could give way, and the gate's lock may be held for good.
        let opened = (!self.context.is_left()).then(|| self.context.cold.open());
        GiveWay::new(opened)
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
        if self.context.is_left() {
            return;
        }
        let queues = std::mem::take(&mut *self.queues.lock().unwrap_or_else(PoisonError::into_inner));
        for queue in queues.iter().filter_map(Weak::upgrade) {
            queue.close();
        }
    }
}
