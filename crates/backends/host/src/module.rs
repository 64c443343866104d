//! Code on host devices: Rust functions and functions of dynamic libraries.

use std::{
    any::Any,
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
};

use smallvec::SmallVec;
use warpweft_core_types::{
    Access, Arg, BufferView, CodeFormat, DeviceId, Failure, ForeignCode, HostFunction, Kernel, KernelCode,
    KernelContract, KernelResources, Launch, Limits, LoadError, Module, Param, Progress, RawArgument,
    RawWorkgroup, WORKGROUP_ABI, WorkId, Workgroup,
};

use crate::{engine::guard, memory::Span};

/// The forms of code that run on the host, preferred first.
pub(crate) const FORMATS: &[CodeFormat] = &[CodeFormat::HostFunction, CodeFormat::HostLibrary];

/// A module's kernels, found once when it was loaded.
#[derive(Debug)]
pub(crate) struct HostModule {
    device: DeviceId,
    format: CodeFormat,
    kernels: Vec<Arc<HostKernel>>,
}

/// One kernel of a host device.
#[derive(Debug)]
pub(crate) struct HostKernel {
    device: DeviceId,
    contract: KernelContract,
    body: Body,
    max_workgroups: [u32; 3],
}

type Entry = unsafe extern "C" fn(*const RawWorkgroup) -> i32;

#[derive(Debug)]
enum Body {
    Function(HostFunction),
    Library {
        entry: Entry,
        /// Keeps the code mapped for as long as a kernel of it exists.
        _library: Arc<libloading::Library>,
    },
}

impl HostModule {
    /// Loads `code` in a form that runs on the host.
    pub(crate) fn load(device: DeviceId, limits: &Limits, code: &KernelCode) -> Result<Self, LoadError> {
        code.check(limits)?;
        let format = code.pick(device, FORMATS)?;
        let bodies = match format {
            CodeFormat::HostFunction => functions(code)?,
            _ => libraries(device, code)?,
        };
        let kernel = |(contract, body): (&KernelContract, Body)| {
            let contract = contract.clone();
            Arc::new(HostKernel { device, contract, body, max_workgroups: limits.workgroups })
        };
        let kernels = code.contracts().iter().zip(bodies).map(kernel).collect();
        Ok(Self { device, format, kernels })
    }
}

/// One body for each contract, in order.
fn functions(code: &KernelCode) -> Result<Vec<Body>, LoadError> {
    code.contracts().iter().map(|contract| find_function(code, contract)).collect()
}

/// One body for each contract, in order.
fn libraries(device: DeviceId, code: &KernelCode) -> Result<Vec<Body>, LoadError> {
    let path = code.foreign().iter().find_map(|form| match form {
        ForeignCode::HostLibrary(path) => Some(path),
        _ => None,
    });
    let absent = LoadError::UnsupportedFormat { device, format: CodeFormat::HostLibrary };
    open_library(path.ok_or(absent)?, code.contracts())
}

fn find_function(code: &KernelCode, contract: &KernelContract) -> Result<Body, LoadError> {
    code.functions()
        .iter()
        .find(|(name, _)| *name == contract.name)
        .map(|(_, function)| Body::Function(function.clone()))
        .ok_or_else(|| LoadError::NoSuchKernel {
            name: contract.name.clone(),
            available: code.functions().iter().map(|(name, _)| name.clone()).collect(),
        })
}

#[expect(unsafe_code, reason = "opens a dynamic library")]
fn open_library(path: &Path, contracts: &[KernelContract]) -> Result<Vec<Body>, LoadError> {
    let path_text = || path.display().to_string();
    // SAFETY: initialisers of the library run here; that they are sound is part of what the program
    // asserted with `KernelCode::with_foreign`.
    let library = unsafe { libloading::Library::new(path) }.map_err(|error| {
        // The loader's own words are in the source.
        let reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        LoadError::Library { path: path_text(), reason }
    })?;
    let library = Arc::new(library);
    contracts
        .iter()
        .map(|contract| {
            // SAFETY: the type is the one `RawWorkgroup` documents for library kernels, which the
            // program asserted for every contract with `KernelCode::with_foreign`.
            let symbol = unsafe { library.get::<Entry>(contract.name.as_bytes()) };
            let missing = |_| LoadError::MissingSymbol { path: path_text(), symbol: contract.name.clone() };
            let entry = *symbol.map_err(missing)?;
            Ok(Body::Library { entry, _library: Arc::clone(&library) })
        })
        .collect()
}

impl Module for HostModule {
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

impl Kernel for HostKernel {
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
        KernelResources { registers: None, local_bytes: 0, shared_bytes: 0, workgroups_per_multiprocessor: 1 }
    }
}

/// Tells a resident kernel when to return. Others are never told.
pub(crate) trait YieldSource {
    fn should_yield(&self) -> bool;
}

/// For kernels that run to their end.
pub(crate) struct NeverYield;

impl YieldSource for NeverYield {
    fn should_yield(&self) -> bool {
        false
    }
}

extern "C" fn should_yield<Y: YieldSource>(context: *const c_void) -> bool {
    #[expect(unsafe_code, reason = "a C callback receives its context as a pointer")]
    // SAFETY: `HostLaunch::run_with` passes the address of a `Y` that outlives the kernel's call.
    let source = unsafe { &*context.cast::<Y>() };
    source.should_yield()
}

/// A launch with its operands found: it needs nothing but a thread.
#[derive(Debug)]
pub(crate) struct HostLaunch {
    kernel: Arc<HostKernel>,
    workgroups: [u32; 3],
    args: SmallVec<[HostArg; 4]>,
}

#[derive(Debug)]
enum HostArg {
    /// The view keeps the memory of the span alive.
    Buffer {
        span: Span,
        access: Access,
        _view: BufferView,
    },
    Scalar(SmallVec<[u8; 16]>),
}

impl HostLaunch {
    /// Finds the operands of a launch, if the kernel and all buffers are of host devices.
    pub(crate) fn new(launch: &Launch<'_>) -> Option<Self> {
        let kernel = HostKernel::of(launch.kernel())?;
        let arg = |(arg, param): (&Arg<'_>, &Param)| match (arg, param) {
            (Arg::Buffer(view), Param::Buffer { access, .. }) => {
                Some(HostArg::Buffer { span: Span::of(view)?, access: *access, _view: (*view).clone() })
            }
            (Arg::Scalar(bytes), _) => Some(HostArg::Scalar((*bytes).into())),
            // `Launch::new` refuses a buffer where the contract has a value.
            (Arg::Buffer(_), Param::Scalar { .. }) => None,
        };
        let params = &launch.kernel().contract().params;
        let args = launch.args().iter().zip(params).map(arg).collect::<Option<_>>()?;
        Some(Self { kernel, workgroups: launch.workgroups(), args })
    }

    pub(crate) fn contract(&self) -> &KernelContract {
        &self.kernel.contract
    }

    pub(crate) fn workgroup_count(&self) -> u64 {
        self.workgroups.iter().map(|&n| u64::from(n)).product()
    }

    fn arguments(&self) -> SmallVec<[RawArgument; 4]> {
        let raw = |arg: &HostArg| match arg {
            HostArg::Buffer { span, access, .. } => {
                RawArgument::buffer(span.as_ptr(), span.len() as u64, *access)
            }
            HostArg::Scalar(bytes) => RawArgument::scalar(bytes.as_ptr().cast_mut(), bytes.len() as u64),
        };
        self.args.iter().map(raw).collect()
    }

    /// Runs the workgroup at this position, counted along x, then y, then z.
    pub(crate) fn run<Y: YieldSource>(
        &self,
        work: WorkId,
        position: u64,
        source: &Y,
    ) -> Result<Progress, Arc<Failure>> {
        self.run_with(&self.arguments(), work, position, source)
    }

    /// Runs every workgroup on this thread.
    pub(crate) fn run_all(&self, work: WorkId) -> Result<(), Arc<Failure>> {
        let arguments = self.arguments();
        for position in 0..self.workgroup_count() {
            self.run_with(&arguments, work, position, &NeverYield)?;
        }
        Ok(())
    }

    fn run_with<Y: YieldSource>(
        &self,
        arguments: &[RawArgument],
        work: WorkId,
        position: u64,
        source: &Y,
    ) -> Result<Progress, Arc<Failure>> {
        let raw = RawWorkgroup {
            abi: WORKGROUP_ABI,
            // A launch has as many arguments as its contract, which is far from the limit.
            argument_count: u32::try_from(arguments.len()).unwrap_or(u32::MAX),
            index: index_of(position, self.workgroups),
            workgroups: self.workgroups,
            size: self.kernel.contract.workgroup_size,
            arguments: arguments.as_ptr(),
            context: std::ptr::from_ref(source).cast(),
            should_yield: should_yield::<Y>,
        };
        let outcome = self.kernel.call(&raw);
        outcome.map_err(|fault| fault.at(work, &self.kernel.contract.name))
    }
}

fn index_of(position: u64, [x, y, _]: [u32; 3]) -> [u32; 3] {
    let (x, y) = (u64::from(x), u64::from(y));
    let part = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    [part(position % x), part(position / x % y), part(position / x / y)]
}

/// How a kernel failed.
enum Fault {
    Panic(String),
    Code(i32),
    Failure(Arc<Failure>),
}

impl Fault {
    fn at(self, work: WorkId, kernel: &str) -> Arc<Failure> {
        let kernel = kernel.to_owned();
        match self {
            Self::Panic(message) => Arc::new(Failure::KernelPanicked { work, kernel, message }),
            Self::Code(code) => Arc::new(Failure::KernelFailed { work, kernel, code }),
            Self::Failure(failure) => failure,
        }
    }
}

impl HostKernel {
    /// The host kernel behind a handle, if it is one.
    fn of(kernel: &Arc<dyn Kernel>) -> Option<Arc<Self>> {
        let kernel: Arc<dyn Any + Send + Sync> = Arc::clone(kernel) as _;
        kernel.downcast().ok()
    }

    #[expect(unsafe_code, reason = "calls into kernels")]
    fn call(&self, raw: &RawWorkgroup) -> Result<Progress, Fault> {
        match &self.body {
            Body::Function(function) => {
                // SAFETY: `HostLaunch::run_with` made `raw`: its arguments stand for views kept alive by the
                // launch, whose memory nobody references, and its context is the source it names.
                let workgroup = unsafe { Workgroup::from_raw(raw) };
                // A kernel's state is in its buffers; a panic leaves nothing half-changed but those.
                match catch_unwind(AssertUnwindSafe(|| function.call(&workgroup))) {
                    Ok(outcome) => outcome.map_err(Fault::Failure),
                    Err(payload) => {
                        let text = panic_text(payload.as_ref());
                        guard(|| drop(payload));
                        Err(Fault::Panic(text))
                    }
                }
            }
            // SAFETY: the entry has this type and keeps to its contract (`KernelCode::with_foreign`), the
            // library stays mapped while `self` lives, and `raw` is as in the other arm.
            Body::Library { entry, .. } => match unsafe { entry(raw) } {
                0 => Ok(Progress::Busy),
                1 => Ok(Progress::Idle),
                2 => Ok(Progress::Finished),
                code => Err(Fault::Code(code)),
            },
        }
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_count_along_x_then_y_then_z() {
        let grid = [3, 2, 2];
        let indices: Vec<_> = (0..12).map(|position| index_of(position, grid)).collect();
        assert_eq!(indices[..4], [[0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 0]]);
        assert_eq!(indices[6], [0, 0, 1]);
        assert_eq!(indices[11], [2, 1, 1]);
    }
}
