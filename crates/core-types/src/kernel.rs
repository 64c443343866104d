//! Code for devices: its forms, the contract of each kernel, and a checked launch.

use std::{any::Any, fmt, path::PathBuf, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{Access, BufferView, DeviceId, HostFunction, LaunchError, Limits, LoadError};

/// What a kernel expects for one argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Param {
    /// A range of device memory.
    Buffer {
        /// What the kernel does to it.
        access: Access,
        /// The fewest bytes it needs.
        min_size: u64,
        /// Its first byte must lie at a multiple of this: a power of two, 1 for any place.
        alignment: u64,
    },
    /// A value of this many bytes, passed inline.
    Scalar {
        /// Size in bytes.
        size: u32,
    },
}

impl Param {
    /// A buffer that the kernel only reads.
    pub const fn read(min_size: u64) -> Self {
        Self::Buffer { access: Access::Read, min_size, alignment: 1 }
    }

    /// The same with another alignment, a power of two; a scalar stays as it is.
    #[must_use]
    pub const fn aligned(self, alignment: u64) -> Self {
        match self {
            Self::Buffer { access, min_size, .. } => Self::Buffer { access, min_size, alignment },
            Self::Scalar { .. } => self,
        }
    }

    /// A buffer that the kernel only writes.
    pub const fn write(min_size: u64) -> Self {
        Self::Buffer { access: Access::Write, min_size, alignment: 1 }
    }

    /// A buffer that the kernel reads and writes.
    pub const fn read_write(min_size: u64) -> Self {
        Self::Buffer { access: Access::ReadWrite, min_size, alignment: 1 }
    }

    /// A buffer that the kernel adds to by atomic operations.
    pub const fn accumulate(min_size: u64) -> Self {
        Self::Buffer { access: Access::Accumulate, min_size, alignment: 1 }
    }

    /// A value of type `T`.
    pub const fn scalar<T: Copy>() -> Self {
        assert!(size_of::<T>() <= u32::MAX as usize, "scalars are small");
        #[expect(clippy::cast_possible_truncation, reason = "asserted just above")]
        Self::Scalar { size: size_of::<T>() as u32 }
    }
}

impl fmt::Display for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Buffer { access, .. } => write!(f, "a {access} buffer"),
            Self::Scalar { size } => write!(f, "a value of {size} bytes"),
        }
    }
}

/// What a kernel promises and expects. Every form of the code keeps to the same contract.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelContract {
    /// The kernel's name: the entry point's symbol.
    pub name: String,
    /// Its arguments, in order.
    pub params: Vec<Param>,
    /// Threads (invocations) of one workgroup in each dimension: a CUDA block.
    pub workgroup_size: [u32; 3],
    /// It runs in slices, as a resident and in no other way: some devices give such a kernel what it needs to
    /// know when to return, in front of its parameters.
    #[serde(default)]
    pub resident: bool,
    /// Each of its workgroups ends within 20 microseconds, whatever its arguments: a thread that waits for it
    /// may run it itself.
    #[serde(default)]
    pub brief: bool,
    /// Bytes of memory each workgroup is given beside what its code declares: CUDA's dynamic shared memory. A
    /// Rust function has memory of its own and is given none.
    #[serde(default)]
    pub shared_bytes: u32,
}

impl KernelContract {
    /// A kernel whose workgroup is a single thread.
    pub fn new(name: impl Into<String>, params: impl Into<Vec<Param>>) -> Self {
        Self {
            name: name.into(),
            params: params.into(),
            workgroup_size: [1, 1, 1],
            resident: false,
            brief: false,
            shared_bytes: 0,
        }
    }

    /// The same for a kernel that runs in slices, see [`crate::Residents`].
    #[must_use]
    pub fn resident(mut self) -> Self {
        self.resident = true;
        self
    }

    /// The same for a kernel whose workgroups end within 20 microseconds, whatever their arguments.
    #[must_use]
    pub fn brief(mut self) -> Self {
        self.brief = true;
        self
    }

    /// The same with dynamic workgroup memory.
    #[must_use]
    pub fn with_shared_bytes(mut self, shared_bytes: u32) -> Self {
        self.shared_bytes = shared_bytes;
        self
    }

    /// The same with another workgroup size.
    #[must_use]
    pub fn with_workgroup_size(mut self, workgroup_size: [u32; 3]) -> Self {
        self.workgroup_size = workgroup_size;
        self
    }

    /// Threads of one workgroup in all; `u64::MAX` where that is too small a number.
    pub fn workgroup_threads(&self) -> u64 {
        product(self.workgroup_size)
    }

    /// Whether a device with these limits can hold such a kernel; backends ask before they load it.
    ///
    /// # Errors
    ///
    /// [`LoadError::ScalarsTooLarge`], or [`LoadError::Rejected`] naming the kernel and the limit.
    pub fn check(&self, limits: &Limits) -> Result<(), LoadError> {
        let refuse =
            |what: String| Err(LoadError::Rejected { log: format!("kernel {:?} {what}", self.name) });
        let threads = self.workgroup_threads();
        let most = limits.workgroup_threads;
        if threads == 0 || threads > u64::from(most) {
            return refuse(format!("has workgroups of {threads} threads, from 1 to {most} fit"));
        }
        if self.shared_bytes > limits.shared_bytes {
            let most = limits.shared_bytes;
            return refuse(format!(
                "needs {} bytes of workgroup memory, {most} can be had",
                self.shared_bytes
            ));
        }
        let mut scalar_bytes = 0_u64;
        for param in &self.params {
            match *param {
                Param::Scalar { size } => scalar_bytes += u64::from(size),
                Param::Buffer { alignment, .. } if !alignment.is_power_of_two() => {
                    return refuse(format!("asks for an alignment of {alignment}, which is no power of two"));
                }
                Param::Buffer { alignment, .. } if alignment > limits.buffer_alignment => {
                    let granted = limits.buffer_alignment;
                    return refuse(format!(
                        "asks for an alignment of {alignment}, buffers here have {granted}"
                    ));
                }
                Param::Buffer { .. } => {}
            }
        }
        let limit_bytes = u64::from(limits.scalar_bytes);
        if scalar_bytes > limit_bytes {
            let kernel = self.name.clone();
            return Err(LoadError::ScalarsTooLarge { kernel, size_bytes: scalar_bytes, limit_bytes });
        }
        Ok(())
    }
}

/// A form that code can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CodeFormat {
    /// Rust functions in this process.
    HostFunction,
    /// A dynamic library with C entry points (see [`crate::RawWorkgroup`]).
    HostLibrary,
    /// CUDA C++ source.
    CudaC,
    /// NVIDIA PTX text.
    Ptx,
    /// NVIDIA machine code.
    Cubin,
    /// WebGPU shading language source.
    Wgsl,
    /// SPIR-V words, as bytes.
    SpirV,
}

impl fmt::Display for CodeFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HostFunction => "Rust functions",
            Self::HostLibrary => "a host library",
            Self::CudaC => "CUDA C",
            Self::Ptx => "PTX",
            Self::Cubin => "CUBIN",
            Self::Wgsl => "WGSL",
            Self::SpirV => "SPIR-V",
        })
    }
}

/// Code that the compiler of this program has not checked.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForeignCode {
    /// The file of a dynamic library with C entry points.
    HostLibrary(PathBuf),
    /// Source text in a language of the device.
    Source {
        /// [`CodeFormat::CudaC`], [`CodeFormat::Ptx`] or [`CodeFormat::Wgsl`].
        format: CodeFormat,
        /// The text.
        text: String,
    },
    /// Machine or byte code.
    Binary {
        /// [`CodeFormat::Cubin`] or [`CodeFormat::SpirV`].
        format: CodeFormat,
        /// The bytes.
        bytes: Vec<u8>,
    },
}

impl ForeignCode {
    /// The form it is in.
    pub const fn format(&self) -> CodeFormat {
        match self {
            Self::HostLibrary(_) => CodeFormat::HostLibrary,
            Self::Source { format, .. } | Self::Binary { format, .. } => *format,
        }
    }
}

/// Kernels in one or more forms, each of which holds all of them. A device loads the form it likes best.
#[derive(Debug, Clone, Default)]
pub struct KernelCode {
    contracts: Vec<KernelContract>,
    functions: Vec<(String, HostFunction)>,
    foreign: Vec<ForeignCode>,
}

impl KernelCode {
    /// No kernels yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a kernel that is a Rust function.
    ///
    /// It is safe because a [`HostFunction`] reaches its arguments only through checked accessors.
    #[must_use]
    pub fn with_function(mut self, contract: KernelContract, function: HostFunction) -> Self {
        self.functions.push((contract.name.clone(), function));
        self.declare(contract);
        self
    }

    /// Adds a form of the kernels that `contracts` describe.
    ///
    /// # Safety
    ///
    /// - Every kernel named by a contract has these parameters and this workgroup size.
    /// - It touches its buffer arguments within the views' ranges and only as the declared access says,
    ///   whatever the scalars and the contents of memory are.
    /// - It stays well-behaved when memory it reads changes under it.
    #[expect(unsafe_code, reason = "the duties are the caller's; nothing is done here")]
    #[must_use]
    pub unsafe fn with_foreign(
        mut self,
        contracts: impl IntoIterator<Item = KernelContract>,
        code: ForeignCode,
    ) -> Self {
        contracts.into_iter().for_each(|contract| self.declare(contract));
        self.foreign.push(code);
        self
    }

    /// The same code with its contracts changed, for what a form does not fix: workgroup sizes and memory.
    ///
    /// # Safety
    ///
    /// - The changed contracts keep what [`KernelCode::with_foreign`] asks of the original ones.
    #[expect(unsafe_code, reason = "the duties are the caller's; nothing is done here")]
    #[must_use]
    pub unsafe fn with_contracts(mut self, change: impl FnMut(KernelContract) -> KernelContract) -> Self {
        self.contracts = self.contracts.into_iter().map(change).collect();
        self
    }

    /// The kernels, each once.
    pub fn contracts(&self) -> &[KernelContract] {
        &self.contracts
    }

    /// The Rust functions, with their kernels' names.
    pub fn functions(&self) -> &[(String, HostFunction)] {
        &self.functions
    }

    /// The other forms, in the order they were added.
    pub fn foreign(&self) -> &[ForeignCode] {
        &self.foreign
    }

    /// Checks what every backend checks before it loads anything: that names differ, and that a device with
    /// these limits can hold the kernels.
    ///
    /// # Errors
    ///
    /// [`LoadError::DuplicateKernel`] or [`LoadError::Rejected`].
    pub fn check(&self, limits: &Limits) -> Result<(), LoadError> {
        for (position, contract) in self.contracts.iter().enumerate() {
            if self.contracts[..position].iter().any(|earlier| earlier.name == contract.name) {
                return Err(LoadError::DuplicateKernel { name: contract.name.clone() });
            }
            contract.check(limits)?;
        }
        for (position, (name, _)) in self.functions.iter().enumerate() {
            if self.functions[..position].iter().any(|(earlier, _)| earlier == name) {
                return Err(LoadError::DuplicateKernel { name: name.clone() });
            }
        }
        Ok(())
    }

    /// The form to load on a device that runs `formats`, preferred first. Every form must hold all kernels; a
    /// set of Rust functions that lacks some is no form.
    ///
    /// # Errors
    ///
    /// [`LoadError::UnsupportedFormat`] for the first form there is, or [`LoadError::Rejected`] if there is none.
    pub fn pick(&self, device: DeviceId, formats: &[CodeFormat]) -> Result<CodeFormat, LoadError> {
        let has_all_functions = self
            .contracts
            .iter()
            .all(|contract| self.functions.iter().any(|(name, _)| *name == contract.name));
        let offered = |wanted: &CodeFormat| {
            (*wanted != CodeFormat::HostFunction || has_all_functions)
                && self.formats().any(|format| format == *wanted)
        };
        if let Some(&format) = formats.iter().find(|format| offered(format)) {
            return Ok(format);
        }
        match self.formats().next() {
            Some(CodeFormat::HostFunction) if !has_all_functions => {
                let log = "the Rust functions do not cover every kernel that has a contract".to_owned();
                Err(LoadError::Rejected { log })
            }
            Some(format) => Err(LoadError::UnsupportedFormat { device, format }),
            None => Err(LoadError::Rejected { log: "there is no code in any form".to_owned() }),
        }
    }

    /// The forms there are.
    pub fn formats(&self) -> impl Iterator<Item = CodeFormat> {
        let functions = (!self.functions.is_empty()).then_some(CodeFormat::HostFunction);
        functions.into_iter().chain(self.foreign.iter().map(ForeignCode::format))
    }

    /// A second form of a kernel repeats its contract; equal ones are kept once.
    fn declare(&mut self, contract: KernelContract) {
        if !self.contracts.contains(&contract) {
            self.contracts.push(contract);
        }
    }
}

/// Code that a device holds, ready to run.
pub trait Module: Any + fmt::Debug + Send + Sync {
    /// The device that holds it.
    fn device(&self) -> DeviceId;

    /// The form that was loaded.
    fn format(&self) -> CodeFormat;

    /// One of its kernels.
    ///
    /// # Errors
    ///
    /// [`LoadError::NoSuchKernel`], with the names that exist.
    fn kernel(&self, name: &str) -> Result<Arc<dyn Kernel>, LoadError>;
}

/// An entry point of a module. Keeps the module loaded.
pub trait Kernel: Any + fmt::Debug + Send + Sync {
    /// The device it runs on.
    fn device(&self) -> DeviceId;

    /// What it promises and expects.
    fn contract(&self) -> &KernelContract;

    /// The most workgroups a launch may have in each dimension.
    fn max_workgroups(&self) -> [u32; 3];

    /// What it takes of the device.
    fn resources(&self) -> KernelResources;
}

/// What a kernel takes of its device, as the compiler left it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct KernelResources {
    /// Registers of each thread, where the device counts them.
    pub registers: Option<u32>,
    /// Bytes of memory each thread has for itself, spilled registers among them.
    pub local_bytes: u64,
    /// Bytes of memory each workgroup shares.
    pub shared_bytes: u64,
    /// Workgroups that fit on one multiprocessor at once.
    pub workgroups_per_multiprocessor: u32,
}

/// An argument of a launch.
#[derive(Debug, Clone, Copy)]
pub enum Arg<'a> {
    /// A range of memory.
    Buffer(&'a BufferView),
    /// The bytes of a value, in the device's byte order (little endian everywhere we run).
    Scalar(&'a [u8]),
}

/// A launch that fits its kernel's contract.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    kernel: &'a Arc<dyn Kernel>,
    workgroups: [u32; 3],
    args: &'a [Arg<'a>],
}

impl<'a> Launch<'a> {
    /// Checks the arguments and the grid against the kernel's contract.
    ///
    /// # Errors
    ///
    /// A [`LaunchError`] that names the kernel and the argument.
    pub fn new(
        kernel: &'a Arc<dyn Kernel>,
        workgroups: [u32; 3],
        args: &'a [Arg<'a>],
    ) -> Result<Self, LaunchError> {
        let contract = kernel.contract();
        check_grid(contract, workgroups, kernel.max_workgroups())?;
        if args.len() != contract.params.len() {
            return Err(LaunchError::ArgumentCount {
                kernel: contract.name.clone(),
                expected: contract.params.len(),
                actual: args.len(),
            });
        }
        for (index, (arg, param)) in args.iter().zip(&contract.params).enumerate() {
            check_argument(contract, index, arg, param)?;
        }
        check_aliasing(contract, args)?;
        Ok(Self { kernel, workgroups, args })
    }

    /// For parts that went through `new` before.
    pub(crate) const fn checked(
        kernel: &'a Arc<dyn Kernel>,
        workgroups: [u32; 3],
        args: &'a [Arg<'a>],
    ) -> Self {
        Self { kernel, workgroups, args }
    }

    /// The kernel.
    pub const fn kernel(&self) -> &'a Arc<dyn Kernel> {
        self.kernel
    }

    /// Workgroups in each dimension.
    pub const fn workgroups(&self) -> [u32; 3] {
        self.workgroups
    }

    /// Workgroups in all; `u64::MAX` where that is too small a number.
    pub fn workgroup_count(&self) -> u64 {
        product(self.workgroups)
    }

    /// The arguments.
    pub const fn args(&self) -> &'a [Arg<'a>] {
        self.args
    }

    /// The buffer arguments, each with what the kernel does to it.
    pub fn buffers(&self) -> impl Iterator<Item = (&'a BufferView, Access)> {
        self.args.iter().zip(&self.kernel.contract().params).filter_map(|pair| match pair {
            (Arg::Buffer(view), Param::Buffer { access, .. }) => Some((*view, *access)),
            _ => None,
        })
    }
}

/// Three sizes of 32 bits can be more than 64 bits hold.
fn product(sizes: [u32; 3]) -> u64 {
    sizes.iter().fold(1, |product: u64, &size| product.saturating_mul(size.into()))
}

fn check_grid(contract: &KernelContract, actual: [u32; 3], limit: [u32; 3]) -> Result<(), LaunchError> {
    let fits = actual.iter().zip(limit).all(|(&n, most)| (1..=most).contains(&n));
    if fits {
        return Ok(());
    }
    Err(LaunchError::Dimensions { kernel: contract.name.clone(), what: "workgroups", actual, limit })
}

fn check_argument(
    contract: &KernelContract,
    index: usize,
    arg: &Arg<'_>,
    param: &Param,
) -> Result<(), LaunchError> {
    let kernel = || contract.name.clone();
    match (arg, *param) {
        (Arg::Buffer(view), Param::Buffer { min_size, alignment, .. }) => {
            if view.size() < min_size {
                return Err(LaunchError::BufferTooSmall {
                    kernel: kernel(),
                    index,
                    needed: min_size,
                    actual: view.size(),
                });
            }
            if !view.offset().is_multiple_of(alignment.max(1)) {
                return Err(LaunchError::Misaligned {
                    kernel: kernel(),
                    index,
                    needed: alignment,
                    offset: view.offset(),
                });
            }
            Ok(())
        }
        (Arg::Scalar(bytes), Param::Scalar { size }) if bytes.len() == size as usize => Ok(()),
        _ => Err(LaunchError::ArgumentKind { kernel: kernel(), index, expected: param.to_string() }),
    }
}

fn check_aliasing(contract: &KernelContract, args: &[Arg<'_>]) -> Result<(), LaunchError> {
    let buffers: smallvec::SmallVec<[(usize, &BufferView, Access); 8]> = args
        .iter()
        .zip(&contract.params)
        .enumerate()
        .filter_map(|(index, pair)| match pair {
            (Arg::Buffer(view), Param::Buffer { access, .. }) => Some((index, *view, *access)),
            _ => None,
        })
        .collect();
    for (position, &(first, view, first_access)) in buffers.iter().enumerate() {
        for &(second, other, second_access) in &buffers[position + 1..] {
            if first_access.conflicts_with(second_access) && view.overlap(other) > 0 {
                return Err(LaunchError::Aliased {
                    kernel: contract.name.clone(),
                    first,
                    first_access,
                    second,
                    second_access,
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workgroups_that_no_number_counts_are_refused() {
        let limits = Limits {
            workgroup_threads: 1024,
            workgroups: [1; 3],
            scalar_bytes: 8,
            shared_bytes: 0,
            buffer_alignment: 256,
        };
        let check = |size, threads, fits| {
            let contract = KernelContract::new("any", []).with_workgroup_size(size);
            assert_eq!(contract.workgroup_threads(), threads, "{size:?}");
            let checked = contract.check(&limits);
            assert!(checked.is_ok() == fits, "{size:?}: {checked:?}");
            assert!(fits || matches!(checked, Err(LoadError::Rejected { .. })));
        };
        check([8, 8, 16], 1024, true);
        check([8, 8, 17], 1088, false);
        check([u32::MAX; 3], u64::MAX, false);
        // 2^64, of which the last 64 bits are none.
        check([1 << 21, 1 << 22, 1 << 21], u64::MAX, false);
        check([u32::MAX, u32::MAX, 0], 0, false);
    }
}
