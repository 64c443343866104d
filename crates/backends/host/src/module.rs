//! Code on host devices: Rust functions and functions of dynamic libraries.

use std::{
    any::Any,
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use smallvec::SmallVec;
use warpweft_core_types::{
    CodeFormat, DeviceId, Failure, ForeignCode, HostFunction, Kernel, KernelCode, KernelContract, Limits,
    LoadError, Module, OwnedArg, OwnedLaunch, Param, Progress, RawArgument, RawWorkgroup, SubmissionId,
    WORKGROUP_ABI, Workgroup,
};

use crate::memory::Span;

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
    /// About the longest a workgroup takes, in nanoseconds; 0 before the first run.
    typical: AtomicU64,
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
    /// Loads the first form of `code` that runs on the host.
    pub(crate) fn load(device: DeviceId, limits: &Limits, code: &KernelCode) -> Result<Self, LoadError> {
        refuse_duplicates(code.contracts())?;
        code.contracts().iter().try_for_each(|contract| refuse_excess(contract, limits))?;
        let (format, bodies) = bodies(device, code)?;
        let kernels = code
            .contracts()
            .iter()
            .zip(bodies)
            .map(|(contract, body)| {
                Arc::new(HostKernel {
                    device,
                    contract: contract.clone(),
                    body,
                    max_workgroups: limits.workgroups,
                    typical: AtomicU64::new(0),
                })
            })
            .collect();
        Ok(Self { device, format, kernels })
    }
}

fn refuse_duplicates(contracts: &[KernelContract]) -> Result<(), LoadError> {
    for (position, contract) in contracts.iter().enumerate() {
        if contracts[..position].iter().any(|earlier| earlier.name == contract.name) {
            return Err(LoadError::DuplicateKernel { name: contract.name.clone() });
        }
    }
    Ok(())
}

fn refuse_excess(contract: &KernelContract, limits: &Limits) -> Result<(), LoadError> {
    let refuse =
        |what: String| Err(LoadError::Rejected { log: format!("kernel {:?} {what}", contract.name) });
    let threads: u64 = contract.workgroup_size.iter().map(|&n| u64::from(n)).product();
    if threads == 0 || threads > u64::from(limits.workgroup_threads) {
        return refuse(format!(
            "has workgroups of {threads} threads, from 1 to {} fit",
            limits.workgroup_threads
        ));
    }
    for param in &contract.params {
        if let Param::Scalar { size } = *param
            && size > limits.scalar_bytes
        {
            return refuse(format!("takes a scalar of {size} bytes, {} fit", limits.scalar_bytes));
        }
    }
    Ok(())
}

/// One body for each contract, in order.
fn bodies(device: DeviceId, code: &KernelCode) -> Result<(CodeFormat, Vec<Body>), LoadError> {
    if !code.functions().is_empty() {
        let find = |contract: &KernelContract| find_function(code, contract);
        return Ok((CodeFormat::HostFunction, code.contracts().iter().map(find).collect::<Result<_, _>>()?));
    }
    let library = code.foreign().iter().find_map(|form| match form {
        ForeignCode::HostLibrary(path) => Some(path),
        _ => None,
    });
    if let Some(path) = library {
        return Ok((CodeFormat::HostLibrary, open_library(path, code.contracts())?));
    }
    match code.formats().next() {
        Some(format) => Err(LoadError::UnsupportedFormat { device, format }),
        None => Err(LoadError::Rejected { log: "there is no code in any form".to_owned() }),
    }
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
    // SAFETY: `HostKernel::run` passes the address of a `Y` that outlives the kernel's call.
    let source = unsafe { &*context.cast::<Y>() };
    source.should_yield()
}

/// Where a kernel runs, for the error when it fails.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Site {
    pub(crate) device: DeviceId,
    pub(crate) submission: SubmissionId,
}

/// A launch whose operands were found: what workgroups are made from.
pub(crate) struct Prepared<'a> {
    launch: &'a OwnedLaunch,
    kernel: &'a HostKernel,
    arguments: SmallVec<[RawArgument; 4]>,
}

impl<'a> Prepared<'a> {
    /// Finds the addresses of a launch's arguments; `None` if some operand is not of a host device.
    pub(crate) fn new(launch: &'a OwnedLaunch) -> Option<Self> {
        let kernel = HostKernel::of(&launch.kernel)?;
        let arguments = launch.args.iter().map(raw_argument).collect::<Option<_>>()?;
        Some(Self { launch, kernel, arguments })
    }

    pub(crate) fn workgroup_count(&self) -> u64 {
        self.launch.workgroups.iter().map(|&n| u64::from(n)).product()
    }

    /// Runs the workgroup at this position, counted along x, then y, then z.
    pub(crate) fn run<Y: YieldSource>(
        &self,
        site: Site,
        position: u64,
        source: &Y,
    ) -> Result<Progress, Arc<Failure>> {
        let raw = RawWorkgroup {
            abi: WORKGROUP_ABI,
            // A launch has as many arguments as its contract, which is far from the limit.
            argument_count: u32::try_from(self.arguments.len()).unwrap_or(u32::MAX),
            index: index_of(position, self.launch.workgroups),
            workgroups: self.launch.workgroups,
            size: self.kernel.contract.workgroup_size,
            arguments: self.arguments.as_ptr(),
            context: std::ptr::from_ref(source).cast(),
            should_yield: should_yield::<Y>,
        };
        let outcome = self.kernel.call(&raw);
        outcome.map_err(|fault| Arc::new(fault.at(site, &self.kernel.contract.name)))
    }

    /// Remembers how long `workgroups` workgroups took, one after the other.
    pub(crate) fn learn(&self, workgroups: u64, took: Duration) {
        let each = took.as_nanos() / u128::from(workgroups.max(1));
        let each = u64::try_from(each).unwrap_or(u64::MAX).max(1);
        // Relaxed: an estimate. It rises at once and falls slowly, so that one interruption by the
        // operating system is forgotten after some dozen runs.
        let before = self.kernel.typical.load(Ordering::Relaxed);
        self.kernel.typical.store(each.max(before - before / 8), Ordering::Relaxed);
    }

    /// How long the launch should take, if the kernel ran before.
    pub(crate) fn expected(&self) -> Option<Duration> {
        match self.kernel.typical.load(Ordering::Relaxed) {
            0 => None,
            each => Some(Duration::from_nanos(each.saturating_mul(self.workgroup_count()))),
        }
    }

    /// Runs every workgroup on this thread.
    pub(crate) fn run_all(&self, site: Site) -> Result<(), Arc<Failure>> {
        let (count, start) = (self.workgroup_count(), Instant::now());
        for position in 0..count {
            self.run(site, position, &NeverYield)?;
        }
        self.learn(count, start.elapsed());
        Ok(())
    }
}

fn raw_argument(arg: &OwnedArg) -> Option<RawArgument> {
    match arg {
        OwnedArg::Buffer(view) => {
            let span = Span::of(view)?;
            Some(RawArgument { data: span.as_ptr(), size: span.len() as u64 })
        }
        OwnedArg::Scalar(bytes) => {
            Some(RawArgument { data: bytes.as_ptr().cast_mut(), size: bytes.len() as u64 })
        }
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
}

impl Fault {
    fn at(self, site: Site, kernel: &str) -> Failure {
        let (device, submission, kernel) = (site.device, site.submission, kernel.to_owned());
        match self {
            Self::Panic(message) => Failure::KernelPanicked { device, submission, kernel, message },
            Self::Code(code) => Failure::KernelFailed { device, submission, kernel, code },
        }
    }
}

impl HostKernel {
    /// The host kernel behind a handle, if it is one.
    pub(crate) fn of(kernel: &Arc<dyn Kernel>) -> Option<&Self> {
        let kernel: &dyn Any = kernel.as_ref();
        kernel.downcast_ref()
    }

    #[expect(unsafe_code, reason = "calls into kernels")]
    fn call(&self, raw: &RawWorkgroup) -> Result<Progress, Fault> {
        match &self.body {
            Body::Function(function) => {
                // SAFETY: `Prepared::run` made `raw`: its arguments stand for views kept alive by the
                // launch, whose memory nobody references, and its context is the source it names.
                let workgroup = unsafe { Workgroup::from_raw(raw) };
                // A kernel's state is in its buffers; a panic leaves nothing half-changed but those.
                catch_unwind(AssertUnwindSafe(|| function.call(&workgroup)))
                    .map_err(|payload| Fault::Panic(panic_text(payload.as_ref())))
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
