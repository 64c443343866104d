//! A device that forwards to another and lets a layer act in between.

use std::{
    any::Any,
    collections::HashMap,
    error::Error,
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
};

#[cfg(unix)]
use warpweft_core_types::Sharing;
use warpweft_core_types::{
    Access, AllocError, Backend, Buffer, BufferDesc, BufferView, CapturedWork, Collectives, Device,
    DeviceClock, DeviceId, DeviceInfo, Failure, Features, GiveWay, Graphs, HostImport, HostMemory, Interop,
    InteropError, KernelCode, Limits, Links, LoadError, MemoryUsage, Module, NativeHandle, NativeMemory,
    NativeQueue, OpenError, Peers, Queue, QueueDesc, QueueId, ReservedMultiprocessors, Resident,
    ResidentBudget, ResidentDesc, ResidentError, Residents, Semaphore, Submission, SubmissionId, SubmitError,
};

/// What a wrapper does differently. Every method forwards unless it is overridden.
pub(crate) trait Layer: fmt::Debug + Send + Sync + Sized + 'static {
    /// What it keeps of each queue.
    type QueueState: fmt::Debug + Default + Send + Sync;

    fn allocate(&self, inner: &dyn Device, desc: &BufferDesc) -> Result<Arc<dyn Buffer>, AllocError> {
        inner.allocate(desc)
    }

    fn load(&self, inner: &dyn Device, code: &KernelCode) -> Result<Arc<dyn Module>, LoadError> {
        inner.load(code)
    }

    fn import(&self, inner: &dyn HostImport, memory: HostMemory) -> Result<Arc<dyn Buffer>, AllocError> {
        inner.import(memory)
    }

    fn launch(
        &self,
        inner: &dyn Residents,
        desc: &ResidentDesc<'_>,
    ) -> Result<Arc<dyn Resident>, ResidentError> {
        inner.launch(desc)
    }

    fn submit(
        &self,
        queue: &LayeredQueue<Self>,
        submission: &Submission<'_>,
    ) -> Result<SubmissionId, SubmitError> {
        queue.inner.submit(submission)
    }

    fn device_failure(&self, inner: &dyn Device) -> Option<Arc<Failure>> {
        inner.failure()
    }

    fn queue_failure(&self, queue: &LayeredQueue<Self>) -> Option<Arc<Failure>> {
        queue.inner.failure()
    }
}

/// A backend whose devices are wrapped as they are opened.
#[derive(Debug)]
pub(crate) struct LayeredBackend<L> {
    inner: Arc<dyn Backend>,
    open: Mutex<HashMap<u32, Weak<LayeredDevice<L>>>>,
}

impl<L: Layer> LayeredBackend<L> {
    pub(crate) fn new(inner: Arc<dyn Backend>) -> Self {
        Self { inner, open: Mutex::default() }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.inner.name()
    }

    pub(crate) fn devices(&self) -> Result<Vec<DeviceInfo>, OpenError> {
        self.inner.devices()
    }

    /// Opens a device; the layer is made once, when the device was not open.
    pub(crate) fn open(
        &self,
        ordinal: u32,
        required: Features,
        layer: impl FnOnce(DeviceId) -> L,
    ) -> Result<Arc<dyn Device>, OpenError> {
        let inner = self.inner.open(ordinal, required)?;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let layer = Arc::new(layer(inner.info().id));
        let device = Arc::new(LayeredDevice { inner, layer });
        open.insert(ordinal, Arc::downgrade(&device));
        Ok(device)
    }
}

/// A device behind a layer.
#[derive(Debug)]
pub(crate) struct LayeredDevice<L> {
    inner: Arc<dyn Device>,
    layer: Arc<L>,
}

impl<L: Layer> Device for LayeredDevice<L> {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn features(&self) -> Features {
        self.inner.features()
    }

    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn memory(&self) -> Result<MemoryUsage, AllocError> {
        self.failure().map_or_else(|| self.inner.memory(), |failure| Err(AllocError::Failed(failure)))
    }

    fn allocate(&self, desc: &BufferDesc) -> Result<Arc<dyn Buffer>, AllocError> {
        self.layer.allocate(self.inner.as_ref(), desc)
    }

    fn create_queue(&self, desc: &QueueDesc) -> Result<Arc<dyn Queue>, OpenError> {
        self.failure().map_or(Ok(()), |failure| Err(OpenError::Failed(failure)))?;
        Ok(self.layered(self.inner.create_queue(desc)?))
    }

    fn create_semaphore(&self, initial: u64) -> Result<Arc<dyn Semaphore>, OpenError> {
        self.failure().map_or(Ok(()), |failure| Err(OpenError::Failed(failure)))?;
        self.inner.create_semaphore(initial)
    }

    fn load(&self, code: &KernelCode) -> Result<Arc<dyn Module>, LoadError> {
        self.layer.load(self.inner.as_ref(), code)
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.layer.device_failure(self.inner.as_ref())
    }

    fn peers(&self) -> Option<&dyn Peers> {
        self.inner.peers()
    }

    fn links(&self) -> Option<&dyn Links> {
        self.inner.links()
    }

    fn host_import(&self) -> Option<&dyn HostImport> {
        self.inner.host_import().map(|_| self as &dyn HostImport)
    }

    fn residents(&self) -> Option<&dyn Residents> {
        self.inner.residents().map(|_| self as &dyn Residents)
    }

    fn graphs(&self) -> Option<&dyn Graphs> {
        self.inner.graphs()
    }

    /// Its calls come back as operations of submissions, which the layer sees.
    fn collectives(&self) -> Option<&dyn Collectives> {
        self.inner.collectives()
    }

    fn clock(&self) -> Option<&dyn DeviceClock> {
        self.inner.clock()
    }

    fn interop(&self) -> Option<&dyn Interop> {
        self.inner.interop().map(|_| self as &dyn Interop)
    }

    #[cfg(unix)]
    fn sharing(&self) -> Option<&dyn Sharing> {
        self.inner.sharing()
    }
}

/// Queues are the layer's, so they are unwrapped on the way in and wrapped on the way out.
impl<L: Layer> Interop for LayeredDevice<L> {
    fn device_handle(&self) -> NativeHandle {
        let none = NativeHandle { kind: "none", value: 0 };
        self.inner.interop().map_or(none, |family| family.device_handle())
    }

    fn queue_handle(&self, queue: &dyn Queue) -> Result<NativeHandle, InteropError> {
        let any: &dyn Any = queue;
        let own = any.downcast_ref::<LayeredQueue<L>>().map_or(queue, |own| own.inner.as_ref());
        self.inner_interop()?.queue_handle(own)
    }

    fn buffer_handle(&self, buffer: &dyn Buffer) -> Result<NativeHandle, InteropError> {
        self.inner_interop()?.buffer_handle(buffer)
    }

    fn import_queue(&self, queue: NativeQueue, desc: &QueueDesc) -> Result<Arc<dyn Queue>, InteropError> {
        let inner = self.inner_interop()?.import_queue(queue, desc)?;
        Ok(self.layered(inner))
    }

    fn import_buffer(&self, memory: NativeMemory) -> Result<Arc<dyn Buffer>, InteropError> {
        self.inner_interop()?.import_buffer(memory)
    }

    fn capture(
        &self,
        accesses: Vec<(BufferView, Access)>,
        owner: Arc<dyn Any + Send + Sync>,
        record: &mut dyn FnMut(NativeHandle) -> Result<(), Box<dyn Error + Send + Sync>>,
    ) -> Result<Arc<dyn CapturedWork>, InteropError> {
        self.inner_interop()?.capture(accesses, owner, record)
    }
}

impl<L: Layer> LayeredDevice<L> {
    fn layered(&self, inner: Arc<dyn Queue>) -> Arc<dyn Queue> {
        Arc::new(LayeredQueue {
            inner,
            device: Arc::clone(&self.inner),
            layer: Arc::clone(&self.layer),
            state: L::QueueState::default(),
        })
    }

    /// `interop` hands the family out only where the inner device has it.
    fn inner_interop(&self) -> Result<&dyn Interop, InteropError> {
        let absent = || InteropError::Failed(Arc::new(Failure::Abandoned { device: self.info().id }));
        self.inner.interop().ok_or_else(absent)
    }
}

impl<L: Layer> HostImport for LayeredDevice<L> {
    fn alignment(&self) -> u64 {
        self.inner.host_import().map_or(1, HostImport::alignment)
    }

    fn import(&self, memory: HostMemory) -> Result<Arc<dyn Buffer>, AllocError> {
        match self.inner.host_import() {
            Some(family) => self.layer.import(family, memory),
            // `host_import` hands this family out only where the inner device has it.
            None => Err(AllocError::Failed(Arc::new(Failure::Abandoned { device: self.info().id }))),
        }
    }
}

impl<L: Layer> Residents for LayeredDevice<L> {
    fn launch(&self, desc: &ResidentDesc<'_>) -> Result<Arc<dyn Resident>, ResidentError> {
        match self.inner.residents() {
            Some(family) => self.layer.launch(family, desc),
            // `residents` hands this family out only where the inner device has it.
            None => Err(ResidentError::Failed(Arc::new(Failure::Abandoned { device: self.info().id }))),
        }
    }

    fn budget(&self) -> ResidentBudget {
        let none = ResidentBudget { total: 0, used: 0 };
        self.inner.residents().map_or(none, |family| family.budget())
    }

    fn reserve(&self, multiprocessors: u32) -> Result<ReservedMultiprocessors, ResidentError> {
        match self.inner.residents() {
            Some(family) => family.reserve(multiprocessors),
            None => Err(ResidentError::Failed(Arc::new(Failure::Abandoned { device: self.info().id }))),
        }
    }

    fn give_way(&self) -> GiveWay {
        self.inner.residents().map_or_else(|| GiveWay::new(()), |family| family.give_way())
    }
}

/// A queue behind a layer.
#[derive(Debug)]
pub(crate) struct LayeredQueue<L: Layer> {
    pub(crate) inner: Arc<dyn Queue>,
    /// The wrapped device.
    pub(crate) device: Arc<dyn Device>,
    layer: Arc<L>,
    pub(crate) state: L::QueueState,
}

impl<L: Layer> Queue for LayeredQueue<L> {
    fn id(&self) -> QueueId {
        self.inner.id()
    }

    fn submit(&self, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
        self.layer.submit(self, submission)
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.layer.queue_failure(self)
    }
}

/// Implements [`Backend`] for a public wrapper with a `backend` field and a `layer(&self, DeviceId)` method.
macro_rules! layered_backend {
    ($name:ty) => {
        impl warpweft_core_types::Backend for $name {
            fn name(&self) -> &'static str {
                self.backend.name()
            }

            fn devices(
                &self,
            ) -> Result<Vec<warpweft_core_types::DeviceInfo>, warpweft_core_types::OpenError> {
                self.backend.devices()
            }

            fn open(
                &self,
                ordinal: u32,
                required: warpweft_core_types::Features,
            ) -> Result<std::sync::Arc<dyn warpweft_core_types::Device>, warpweft_core_types::OpenError> {
                self.backend.open(ordinal, required, |device| self.layer(device))
            }
        }
    };
}

pub(crate) use layered_backend;
