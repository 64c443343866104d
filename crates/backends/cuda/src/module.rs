//! Code on CUDA devices: CUBIN and PTX through the driver, CUDA C through NVRTC.

use std::{
    any::Any,
    ffi::{CString, c_int},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use cudarc::driver::sys::{CUfunc_st, CUfunction_attribute, CUmod_st};
use warpweft_core_types::{
    CodeFormat, Device as _, DeviceId, DeviceInfo, DriverError, Failure, ForeignCode, Kernel, KernelCode,
    KernelContract, KernelResources, LoadError, Module, Param,
};

use crate::{
    cache::CubinCache,
    cold::{self, ColdError, Unparkable},
    compiler::Compiler,
    context::Context,
    device::CudaDevice,
    driver::{Handle, NOT_FOUND},
    header::Slice,
};

/// Bytes that all arguments of a kernel take at most, on every driver we run on.
pub(crate) const PARAMETER_BYTES: u32 = 4096;

/// A module's kernels, found once when it was loaded.
#[derive(Debug)]
pub(crate) struct CudaModule {
    device: DeviceId,
    format: CodeFormat,
    kernels: Vec<Arc<CudaKernel>>,
}

/// One entry point.
#[derive(Debug)]
pub(crate) struct CudaKernel {
    device: DeviceId,
    contract: KernelContract,
    max_workgroups: [u32; 3],
    function: Handle<CUfunc_st>,
    resources: KernelResources,
    /// Keeps the code loaded for as long as a kernel of it exists.
    image: Arc<Image>,
    was_launched: AtomicBool,
    _owner: Arc<CudaDevice>,
}

/// What turns source into machine code.
#[derive(Debug)]
pub(crate) struct Tools<'a> {
    pub(crate) compiler: &'a Compiler,
    pub(crate) cache: &'a CubinCache,
}

/// Loaded code.
#[derive(Debug)]
pub(crate) struct Image {
    context: Arc<Context>,
    raw: Handle<CUmod_st>,
}

impl CudaModule {
    /// Loads the first form of `code` that runs on the device.
    pub(crate) fn load(
        owner: &Arc<CudaDevice>,
        tools: &Tools<'_>,
        code: &KernelCode,
    ) -> Result<Self, LoadError> {
        let (context, limits) = (owner.surroundings().0, owner.limits());
        if let Some(failure) = context.failure() {
            return Err(LoadError::Failed(failure));
        }
        code.check(limits)?;
        code.contracts().iter().try_for_each(refuse_too_many_arguments)?;
        let (format, image) = image_of(context, tools, owner.info(), code)?;
        let image = Arc::new(image);
        let mut kernels: Vec<Arc<CudaKernel>> = Vec::with_capacity(code.contracts().len());
        for contract in code.contracts() {
            let available = || kernels.iter().map(|kernel| kernel.contract.name.clone()).collect();
            let function = image.function(contract, available)?;
            kernels.push(Arc::new(CudaKernel {
                device: context.device,
                contract: contract.clone(),
                max_workgroups: limits.workgroups,
                function,
                resources: image.resources(function, contract).map_err(|error| failed(context, error))?,
                image: Arc::clone(&image),
                was_launched: AtomicBool::new(false),
                _owner: Arc::clone(owner),
            }));
        }
        Ok(Self { device: context.device, format, kernels })
    }
}

fn refuse_too_many_arguments(contract: &KernelContract) -> Result<(), LoadError> {
    let bytes: u64 = contract.params.iter().map(parameter_bytes).sum();
    match bytes > u64::from(PARAMETER_BYTES) {
        true => Err(LoadError::Rejected {
            log: format!(
                "the arguments of kernel {:?} take {bytes} bytes; {PARAMETER_BYTES} are allowed",
                contract.name
            ),
        }),
        false => Ok(()),
    }
}

/// Compares the contract with what the code declares, where the driver tells.
fn refuse_other_parameters(contract: &KernelContract, declared: &[usize]) -> Result<(), LoadError> {
    let slice = contract.resident.then_some(size_of::<Slice>() as u64);
    let expected: Vec<u64> = slice.into_iter().chain(contract.params.iter().map(parameter_bytes)).collect();
    if expected.iter().eq(declared.iter().map(|&size| size as u64).collect::<Vec<_>>().iter()) {
        return Ok(());
    }
    Err(LoadError::Rejected {
        log: format!(
            "kernel {:?} declares parameters of {declared:?} bytes; its contract needs {expected:?}",
            contract.name
        ),
    })
}

const fn parameter_bytes(param: &Param) -> u64 {
    match param {
        Param::Buffer { .. } => 8,
        Param::Scalar { size } => *size as u64,
    }
}

/// Loads the form the device likes best.
fn image_of(
    context: &Arc<Context>,
    tools: &Tools<'_>,
    info: &DeviceInfo,
    code: &KernelCode,
) -> Result<(CodeFormat, Image), LoadError> {
    let picked = code.pick(info.id, &info.code_formats)?;
    let capability = info.compute_capability.unwrap_or_default();
    let image = match code.foreign().iter().find(|form| form.format() == picked) {
        Some(ForeignCode::Binary { bytes, .. }) if picked == CodeFormat::Cubin => {
            Image::load(context, bytes)?
        }
        Some(ForeignCode::Source { text, .. }) if picked == CodeFormat::Ptx => {
            Image::of_ptx(context, tools.cache, capability, text)?
        }
        Some(ForeignCode::Source { text, .. }) if picked == CodeFormat::CudaC => {
            Image::load(context, &tools.compiler.compile(text, capability)?)?
        }
        // A CUBIN given as text, or CUDA C given as bytes.
        _ => return Err(LoadError::Rejected { log: format!("this is not {picked}") }),
    };
    Ok((picked, image))
}

/// The driver takes no length: it reads as far as the ELF header says. So the header has to tell the truth.
fn refuse_truncated(cubin: &[u8]) -> Result<(), LoadError> {
    let word = |at: usize| cubin.get(at..at + 2).map_or(0, |b| u64::from(u16::from_le_bytes([b[0], b[1]])));
    let long = |at: usize| {
        let bytes = cubin.get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(u64::MAX, u64::from_le_bytes)
    };
    // ELF64: e_shoff, e_shentsize and e_shnum end the file; e_phoff, e_phentsize and e_phnum lie before.
    let end = |table: u64, size: u64, count: u64| table.saturating_add(size * count);
    let needed = end(long(0x28), word(0x3a), word(0x3c)).max(end(long(0x20), word(0x36), word(0x38)));
    if cubin.starts_with(b"\x7fELF\x02") && needed <= cubin.len() as u64 {
        return Ok(());
    }
    Err(LoadError::Rejected { log: "this is not a whole CUBIN (64-bit ELF)".to_owned() })
}

impl Image {
    /// Loads PTX, by way of the machine code that the driver makes of it.
    pub(crate) fn of_ptx(
        context: &Arc<Context>,
        cache: &CubinCache,
        capability: (u32, u32),
        text: &str,
    ) -> Result<Self, LoadError> {
        let key = CubinCache::key(&context.driver, capability, text.as_bytes());
        // One that is refused was made by another driver that says the same of itself: it is made anew.
        if let Some(kept) = cache.get(key).map(|cubin| Self::load(context, &cubin))
            && !matches!(kept, Err(LoadError::Rejected { .. }))
        {
            return kept;
        }
        let text = CString::new(text)
            .map_err(|_| LoadError::Rejected { log: "the PTX holds a zero byte".to_owned() })?;
        let cubin = cold::assemble(context, &text).map_err(|refusal| rejected(context, refusal))?;
        cache.put(key, &cubin);
        Self::load(context, &cubin)
    }

    /// Loads a CUBIN.
    pub(crate) fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Self, LoadError> {
        refuse_truncated(cubin)?;
        let raw = cold::load_image(context, cubin).map_err(|refusal| rejected(context, refusal))?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    pub(crate) fn function(
        &self,
        contract: &KernelContract,
        available: impl FnOnce() -> Vec<String>,
    ) -> Result<Handle<CUfunc_st>, LoadError> {
        let no_such =
            |available: Vec<String>| LoadError::NoSuchKernel { name: contract.name.clone(), available };
        let Ok(name) = CString::new(contract.name.as_str()) else { return Err(no_such(available())) };
        let function = match cold::function(&self.context, self.raw, &name) {
            Ok(function) => function,
            Err(ColdError::Driver { error, .. }) if error.code == NOT_FOUND => {
                return Err(no_such(available()));
            }
            Err(refusal) => return Err(rejected(&self.context, refusal)),
        };
        if let Some(declared) = self.parameter_sizes(function) {
            refuse_other_parameters(contract, &declared)?;
        }
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
        let most = self.attribute(function, attribute).map_err(|error| failed(&self.context, error))?;
        let most = u64::from(most);
        let threads = contract.workgroup_threads();
        if threads == 0 || threads > most {
            return Err(LoadError::Rejected {
                log: format!(
                    "kernel {:?} runs workgroups of 1 to {most} threads; its contract says {:?}",
                    contract.name, contract.workgroup_size
                ),
            });
        }
        Ok(function)
    }

    #[expect(unsafe_code, reason = "asks the driver")]
    fn parameter_sizes(&self, function: Handle<CUfunc_st>) -> Option<Vec<usize>> {
        let _current = self.context.enter().ok()?;
        // SAFETY: the function is of this loaded image.
        unsafe { self.context.driver.parameter_sizes(function.raw()) }
    }

    /// What a function takes, once it may have the workgroup memory that its contract asks for.
    pub(crate) fn resources(
        &self,
        function: Handle<CUfunc_st>,
        contract: &KernelContract,
    ) -> Result<KernelResources, DriverError> {
        let ask = |attribute| self.attribute(function, attribute);
        let declared = ask(CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        if contract.shared_bytes > 0 {
            self.allow_shared(function, contract.shared_bytes)?;
        }
        Ok(KernelResources {
            registers: Some(ask(CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?),
            local_bytes: u64::from(ask(CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?),
            shared_bytes: u64::from(declared) + u64::from(contract.shared_bytes),
            workgroups_per_multiprocessor: self.occupancy(function, contract)?,
        })
    }

    /// More dynamic memory than 48 KiB has to be asked for.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn allow_shared(&self, function: Handle<CUfunc_st>, bytes: u32) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as c_int;
        let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function is of this loaded image.
        unsafe { self.context.driver.function_set_attribute(function.raw(), attribute, bytes) }
    }

    #[expect(unsafe_code, reason = "asks the driver")]
    fn occupancy(&self, function: Handle<CUfunc_st>, contract: &KernelContract) -> Result<u32, DriverError> {
        let _current = self.context.enter()?;
        let threads = c_int::try_from(contract.workgroup_threads()).unwrap_or(c_int::MAX);
        let (mut count, shared) = (0, contract.shared_bytes as usize);
        // SAFETY: the function is of this loaded image; one integer is written to this stack frame.
        unsafe { self.context.driver.occupancy(&mut count, function.raw(), threads, shared) }?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    #[expect(unsafe_code, reason = "asks the driver")]
    fn attribute(
        &self,
        function: Handle<CUfunc_st>,
        attribute: CUfunction_attribute,
    ) -> Result<u32, DriverError> {
        let _current = self.context.enter()?;
        let mut value: c_int = 0;
        // SAFETY: the function is of this loaded image; one integer is written to this stack frame.
        unsafe {
            self.context.driver.function_get_attribute(&mut value, attribute as c_int, function.raw())
        }?;
        Ok(u32::try_from(value).unwrap_or(0))
    }
}

impl Image {
    /// Unloads it on this thread, waiting for whatever the driver waits for.
    #[expect(unsafe_code, reason = "unloads code")]
    pub(crate) fn unload(self) -> Result<(), ColdError> {
        let image = std::mem::ManuallyDrop::new(self);
        // SAFETY: nobody has a function of an image that is not shared, and it is not dropped after this.
        let unloaded = unsafe { cold::unload_now(&image.context, image.raw) };
        if let Err(ColdError::Unparkable(_)) = &unloaded {
            // SAFETY: as above; the call was not made.
            unsafe { cold::unload(&image.context, image.raw) };
        }
        let Self { context, .. } = &*image;
        // SAFETY: read once; the value it came from is not dropped.
        drop(unsafe { std::ptr::read(context) });
        unloaded
    }
}

impl Drop for Image {
    #[expect(unsafe_code, reason = "unloads code")]
    fn drop(&mut self) {
        // SAFETY: every kernel holds the image, and every submission and resident in flight its kernels;
        // so nothing of it runs, and nobody can launch it. It is unloaded here alone.
        unsafe { cold::unload(&self.context, self.raw) }
    }
}

/// Whether the code is at fault: the driver's codes for images, PTX and entry points.
const fn is_about_code(error: &DriverError) -> bool {
    // Invalid image, no binary for the device, invalid PTX, PTX too new, no compiler, invalid source.
    matches!(error.code, 200 | 209 | 218 | 221 | 222 | 223 | 300)
}

fn rejected(context: &Context, refusal: ColdError) -> LoadError {
    let log = refusal.to_string();
    match refusal {
        ColdError::Driver { error, .. } if is_about_code(&error) => LoadError::Rejected { log },
        ColdError::Driver { error, .. } => failed(context, error),
        ColdError::Unparkable(Unparkable { kernel, workgroup }) => {
            LoadError::Unparkable { device: context.device, kernel, workgroup }
        }
    }
}

fn failed(context: &Context, error: DriverError) -> LoadError {
    let failure = context.judge(error.clone());
    match *failure {
        Failure::DeviceLost { .. } => LoadError::Failed(failure),
        _ => LoadError::Driver(error),
    }
}

impl Module for CudaModule {
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

impl CudaKernel {
    /// The CUDA kernel behind a handle, if it is one.
    pub(crate) fn of(kernel: &Arc<dyn Kernel>) -> Option<&Self> {
        let kernel: &dyn Any = kernel.as_ref();
        kernel.downcast_ref()
    }

    /// Whether its code was loaded in this context.
    pub(crate) fn belongs_to(&self, context: &Context) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.image.context), context)
    }

    /// Whether this is the first time that somebody is about to launch it, which the driver makes wait for
    /// residents.
    pub(crate) fn is_new(&self) -> bool {
        // Relaxed: a hint, and twice does no harm.
        !self.was_launched.load(Ordering::Relaxed) && !self.was_launched.swap(true, Ordering::Relaxed)
    }

    pub(crate) const fn function(&self) -> *mut CUfunc_st {
        self.function.raw()
    }

    pub(crate) const fn workgroup_size(&self) -> [u32; 3] {
        self.contract.workgroup_size
    }

    pub(crate) const fn shared_bytes(&self) -> u32 {
        self.contract.shared_bytes
    }
}

impl Kernel for CudaKernel {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn contract(&self) -> &KernelContract {
        &self.contract
    }

    fn max_workgroups(&self) -> [u32; 3] {
        self.max_workgroups
    }

    fn resources(&self) -> KernelResources {
        self.resources
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cubin_must_be_as_long_as_its_header_says() {
        let mut elf = vec![0_u8; 128];
        elf[..5].copy_from_slice(b"\x7fELF\x02");
        elf[0x28] = 64;
        (elf[0x3a], elf[0x3c]) = (64, 1);
        refuse_truncated(&elf).unwrap();
        refuse_truncated(&elf[..127]).unwrap_err();
        refuse_truncated(b"PTX, perhaps").unwrap_err();
        refuse_truncated(&[]).unwrap_err();
    }

    #[test]
    fn a_contract_has_to_fit_what_the_code_declares() {
        let contract = KernelContract::new("k", [Param::read(1), Param::scalar::<u32>()]);
        refuse_other_parameters(&contract, &[8, 4]).unwrap();
        refuse_other_parameters(&contract, &[8]).unwrap_err();
        refuse_other_parameters(&contract.clone().resident(), &[8, 4]).unwrap_err();
        refuse_other_parameters(&contract.resident(), &[56, 8, 4]).unwrap();
    }

    #[test]
    fn arguments_have_to_fit_the_parameter_space() {
        let contract = |bytes| KernelContract::new("k", [Param::read(1), Param::Scalar { size: bytes }]);
        refuse_too_many_arguments(&contract(4088)).unwrap();
        refuse_too_many_arguments(&contract(4089)).unwrap_err();
    }
}
