//! Modules and kernels of Vulkan devices.

use std::{any::Any, io, sync::Arc, time::Duration};

use warpweft_core_types::{
    CodeFormat, DeviceId, DriverError, Failure, Kernel, KernelCode, KernelContract, KernelResources, Limits,
    LoadError, Module, Param,
};

use crate::{
    chores::Hold,
    device::VulkanDevice,
    gate::Unparkable,
    gpu::Gpu,
    memory::VulkanBuffer,
    pipeline::Pipeline,
    record::Recording,
    service::Service,
    shader::{self, Entry},
};

/// Forms of code that a device runs, liked best first.
pub(crate) const FORMATS: [CodeFormat; 2] = [CodeFormat::SpirV, CodeFormat::Wgsl];

/// How long loading waits for a new pipeline to be warm. Work that is under way may hold it up; then the first launch
/// waits instead.
const WARM: Duration = Duration::from_secs(2);

/// What loading needs of the device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loader<'a> {
    pub(crate) gpu: &'a Arc<Gpu>,
    pub(crate) service: &'a Service,
    /// Stands for every buffer while a pipeline is warmed.
    pub(crate) scratch: &'a Arc<VulkanBuffer>,
    pub(crate) device: &'a Arc<VulkanDevice>,
    pub(crate) limits: &'a Limits,
}

/// Kernels that were loaded together.
#[derive(Debug)]
pub(crate) struct VulkanModule {
    device: DeviceId,
    format: CodeFormat,
    kernels: Vec<Arc<VulkanKernel>>,
}

impl VulkanModule {
    pub(crate) fn load(loader: Loader<'_>, code: &KernelCode) -> Result<Self, LoadError> {
        let (gpu, capabilities) = (loader.gpu, loader.gpu.capabilities());
        if let Some(failure) = gpu.failure() {
            return Err(LoadError::Failed(failure));
        }
        code.check(loader.limits)?;
        let format = code.pick(gpu.id, &FORMATS)?;
        let rejected = |log: String| LoadError::Rejected { log };
        let form = code.foreign().iter().find(|form| form.format() == format);
        let form = form.ok_or(LoadError::UnsupportedFormat { device: gpu.id, format })?;
        let compiled = shader::compile(form, code.contracts(), capabilities);
        let entries = compiled.map_err(|error| no_thread(gpu, &error))?.map_err(rejected)?;
        let mut kernels = Vec::new();
        for (contract, entry) in code.contracts().iter().zip(&entries) {
            check_scalars(contract, entry, capabilities.scalar_bytes)?;
            kernels.push(VulkanKernel::create(loader, contract, entry)?);
        }
        Ok(Self { device: gpu.id, format, kernels })
    }
}

/// Whether the scalars fit where they lie: the contract's own check knows nothing of the gaps between them.
fn check_scalars(contract: &KernelContract, entry: &Entry, limit: u32) -> Result<(), LoadError> {
    let (size_bytes, limit_bytes) = (entry.scalar_bytes.into(), limit.into());
    if size_bytes <= limit_bytes {
        return Ok(());
    }
    Err(LoadError::ScalarsTooLarge { kernel: contract.name.clone(), size_bytes, limit_bytes })
}

/// A resident that would hold a load up.
fn held_up(gpu: &Gpu, resident: Unparkable) -> LoadError {
    let Unparkable { kernel, workgroup } = resident;
    LoadError::Unparkable { device: gpu.id, kernel, workgroup }
}

/// The system gives no thread to read code on.
fn no_thread(gpu: &Gpu, error: &io::Error) -> LoadError {
    let code = error.raw_os_error().unwrap_or_default().into();
    let source = DriverError { api: "thread::spawn", code, name: error.to_string() };
    LoadError::Failed(Arc::new(Failure::OutOfMemory { device: gpu.id, source }))
}

fn refused(gpu: &Gpu, error: DriverError) -> LoadError {
    gpu.sort(error, LoadError::Failed, LoadError::Driver)
}

impl Module for VulkanModule {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn format(&self) -> CodeFormat {
        self.format
    }

    fn kernel(&self, name: &str) -> Result<Arc<dyn Kernel>, LoadError> {
        match self.kernels.iter().find(|kernel| kernel.contract.name == name) {
            Some(kernel) => Ok(Arc::clone(kernel) as Arc<dyn Kernel>),
            None => Err(LoadError::NoSuchKernel {
                name: name.to_owned(),
                available: self.kernels.iter().map(|kernel| kernel.contract.name.clone()).collect(),
            }),
        }
    }
}

/// A kernel: its pipeline and its contract.
#[derive(Debug)]
pub(crate) struct VulkanKernel {
    gpu: Arc<Gpu>,
    contract: KernelContract,
    pub(crate) pipeline: Arc<Pipeline>,
    workgroup_bytes: u64,
    /// A device stays the same while a kernel of it is there.
    _hold: Hold,
}

impl VulkanKernel {
    fn create(loader: Loader<'_>, contract: &KernelContract, entry: &Entry) -> Result<Arc<Self>, LoadError> {
        let gpu = loader.gpu;
        let is_buffer = |param: &&Param| matches!(param, Param::Buffer { .. });
        let buffers = contract.params.iter().filter(is_buffer).count();
        // No device binds more (`Shader::entry`).
        let count = u32::try_from(buffers).unwrap_or(u32::MAX);
        let _way = gpu.gate.pass().map_err(|resident| held_up(gpu, resident))?;
        let pipeline = Pipeline::create(gpu, &contract.name, entry, count);
        let pipeline = pipeline.map_err(|error| refused(gpu, error))?;
        warm(loader, &pipeline, buffers).map_err(|error| refused(gpu, error))?;
        Ok(Arc::new(Self {
            gpu: Arc::clone(gpu),
            contract: contract.clone(),
            pipeline,
            workgroup_bytes: entry.workgroup_bytes,
            _hold: Hold::new(Arc::clone(loader.device)),
        }))
    }

    pub(crate) fn of(kernel: &Arc<dyn Kernel>) -> Option<&Self> {
        let kernel: &dyn Any = kernel.as_ref();
        kernel.downcast_ref()
    }

    pub(crate) fn is_of(&self, gpu: &Arc<Gpu>) -> bool {
        Arc::ptr_eq(&self.gpu, gpu)
    }
}

/// Launches no workgroups: the code does not run, whatever it is, and drivers that compile at the first launch have
/// compiled it then.
#[expect(unsafe_code, reason = "submits work that touches nothing")]
fn warm(loader: Loader<'_>, pipeline: &Arc<Pipeline>, buffers: usize) -> Result<(), DriverError> {
    let keep = Arc::new((Arc::clone(pipeline), Arc::clone(loader.scratch)));
    let (scratch, scalars) = (loader.scratch.span(), pipeline.no_scalars());
    let spans = vec![scratch; buffers];
    let record = |recording: &mut Recording| {
        // SAFETY: the pipeline was made just now for as many buffers, and says how many bytes of scalars it takes; the
        // scratch memory is a buffer of the device, which starts where any binding may; nothing runs.
        unsafe { recording.dispatch(pipeline, &spans, Some(scratch), &scalars, [0, 0, 0]) }
    };
    // SAFETY: both are kept.
    let warmed = unsafe { loader.service.submit(Some(keep), record) }?;
    warmed.wait(WARM)?;
    Ok(())
}

impl Kernel for VulkanKernel {
    fn device(&self) -> DeviceId {
        self.gpu.id
    }

    fn contract(&self) -> &KernelContract {
        &self.contract
    }

    fn max_workgroups(&self) -> [u32; 3] {
        self.gpu.capabilities().workgroups
    }

    /// The driver tells nothing of registers, nor of how many workgroups fit.
    fn resources(&self) -> KernelResources {
        KernelResources {
            registers: None,
            local_bytes: 0,
            shared_bytes: self.workgroup_bytes,
            workgroups_per_multiprocessor: 1,
        }
    }
}
