//! Shaders as the driver gets them: read, checked against the device and the contract, and written anew.
//!
//! WGSL and SPIR-V take one way, so nothing reaches a driver that the checker has not understood.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
};

use naga::{
    AddressSpace, Block, GlobalVariable, ShaderStage, Statement, TypeInner,
    back::spv,
    proc::{BoundsCheckPolicies, BoundsCheckPolicy},
    valid::{GlobalUse, ModuleInfo, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator},
};
use warpweft_core_types::{Access, CodeFormat, ForeignCode, KernelContract, Param};

use crate::{capability::Capabilities, flatten::flatten};

/// What resident kernels in WGSL find beside their own code. Behind it, so that line numbers stay.
const SLICE: &str = include_str!("slice.wgsl");

/// What a defect of the reader's is called.
const UNREADABLE: &str = "the reader of shaders failed on this code";

/// Where the words of a slice are bound.
const SLICE_BINDING: naga::ResourceBinding = naga::ResourceBinding { group: 1, binding: 0 };

/// Bytes of text and of SPIR-V that are read, the most.
const LONGEST: (usize, usize) = (512 << 10, 2 << 20);

/// Stack for each byte of text and of SPIR-V, and beside that. naga calls itself once for each operator of an
/// expression and each `else if`: where it is not optimized, with 6 KiB for a byte of text. No instruction of SPIR-V that
/// makes a level has fewer than 8 bytes.
const STACK: (usize, usize) = (16 << 10, 4 << 10);
const LEAST_STACK: usize = 4 << 20;

/// What SPIR-V promises of nested structures and of nested control flow (its universal limits); drivers call
/// themselves for each level.
const NESTED: (u32, u32) = (255, 1023);

/// A module that was read and checked.
#[derive(Debug)]
pub(crate) struct Shader {
    module: naga::Module,
    info: ModuleInfo,
}

/// A kernel of it, ready for the driver.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) words: Vec<u32>,
    /// Where each scalar goes, in order.
    pub(crate) scalars: Vec<ScalarPlace>,
    pub(crate) scalar_bytes: u32,
    /// It is given the words of a slice.
    pub(crate) takes_slice: bool,
    /// Bytes that the threads of a workgroup share.
    pub(crate) workgroup_bytes: u64,
}

/// Where a scalar is among the push constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScalarPlace {
    pub(crate) offset: u32,
    pub(crate) size: u32,
}

/// Reads and checks code, and writes the kernels of the contracts anew, in order. An error of the system's is that it
/// has no thread for this: code that nests deeply needs a stack that its length is known to suffice for, or it would end
/// the process.
pub(crate) fn compile(
    code: &ForeignCode,
    contracts: &[KernelContract],
    device: &Capabilities,
) -> io::Result<Result<Vec<Entry>, String>> {
    let (len, longest, each) = match code {
        ForeignCode::Source { text, .. } => (text.len(), LONGEST.0, STACK.0),
        ForeignCode::Binary { bytes, .. } => (bytes.len(), LONGEST.1, STACK.1),
        other => return Ok(Err(format!("{} cannot be read here", other.format()))),
    };
    if len > longest {
        return Ok(Err(format!("has {len} bytes, {longest} is the most that is read")));
    }
    let work = || {
        let shader = Shader::read(code, contracts, device)?;
        contracts.iter().map(|contract| shader.entry(contract, device)).collect()
    };
    thread::scope(|scope| {
        let reader = thread::Builder::new().name("vulkan/reader".to_owned());
        let reader = reader.stack_size(LEAST_STACK + each * len).spawn_scoped(scope, work)?;
        Ok(reader.join().unwrap_or_else(|_| Err(UNREADABLE.to_owned())))
    })
}

impl Shader {
    /// Reads and checks code. The error is for whoever wrote it, with line and column where it is text.
    pub(crate) fn read(
        code: &ForeignCode,
        contracts: &[KernelContract],
        device: &Capabilities,
    ) -> Result<Self, String> {
        // A defect of the reader must not take the program with it.
        let read = catch_unwind(AssertUnwindSafe(|| match code {
            ForeignCode::Source { format: CodeFormat::Wgsl, text } => read_wgsl(text, contracts, device),
            ForeignCode::Binary { format: CodeFormat::SpirV, bytes } => read_spirv(bytes, device),
            other => Err(format!("{} cannot be read here", other.format())),
        }));
        read.unwrap_or_else(|_| Err(UNREADABLE.to_owned()))
    }

    /// The kernel that a contract describes, if the module has it and it is as the contract says.
    pub(crate) fn entry(&self, contract: &KernelContract, device: &Capabilities) -> Result<Entry, String> {
        let name = &contract.name;
        let is_it = |entry: &naga::EntryPoint| entry.stage == ShaderStage::Compute && entry.name == *name;
        let index = self.module.entry_points.iter().position(is_it);
        let index = index.ok_or_else(|| format!("there is no entry point {name:?} for compute"))?;
        self.check_workgroup(index, contract, device)?;
        let mut entry =
            self.compare(index, contract, device).map_err(|what| format!("kernel {name:?} {what}"))?;
        let written = catch_unwind(AssertUnwindSafe(|| self.write(name)));
        entry.words =
            written.unwrap_or_else(|_| Err("the writer of SPIR-V failed on this code".to_owned()))?;
        Ok(entry)
    }

    fn check_workgroup(
        &self,
        index: usize,
        contract: &KernelContract,
        device: &Capabilities,
    ) -> Result<(), String> {
        let (name, own) = (&contract.name, self.module.entry_points[index].workgroup_size);
        if own != contract.workgroup_size {
            let promised = contract.workgroup_size;
            return Err(format!("kernel {name:?} has workgroups of {own:?}, its contract says {promised:?}"));
        }
        let most = device.workgroup_size;
        if own.iter().zip(most).all(|(&size, most)| size <= most) {
            return Ok(());
        }
        Err(format!("kernel {name:?} has workgroups of {own:?}, {most:?} is the most here"))
    }

    /// Compares what the kernel uses with the contract.
    fn compare(
        &self,
        index: usize,
        contract: &KernelContract,
        device: &Capabilities,
    ) -> Result<Entry, String> {
        let buffers: Vec<(Access, u64)> = contract.params.iter().filter_map(buffer_of).collect();
        if buffers.len() > device.bindings as usize {
            return Err(format!("takes {} buffers, {} can be bound", buffers.len(), device.bindings));
        }
        let mut entry = Entry {
            words: Vec::new(),
            scalars: Vec::new(),
            scalar_bytes: 0,
            takes_slice: false,
            workgroup_bytes: 0,
        };
        let uses = self.info.get_entry_point(index);
        let mut immediates = None;
        for (handle, variable) in self.module.global_variables.iter() {
            let used = uses[handle];
            if used.is_empty() {
                continue;
            }
            match variable.space {
                AddressSpace::Storage { .. }
                    if variable.binding == Some(SLICE_BINDING) && contract.resident =>
                {
                    entry.takes_slice = true;
                }
                AddressSpace::Storage { .. } => self.compare_buffer(variable, used, &buffers)?,
                AddressSpace::Immediate => immediates = Some(variable),
                AddressSpace::WorkGroup => entry.workgroup_bytes += self.size_of(variable),
                AddressSpace::Private => {}
                space => return Err(format!("uses a variable in {space:?}, which no argument fills")),
            }
        }
        if entry.workgroup_bytes > u64::from(device.workgroup_bytes) {
            let (own, most) = (entry.workgroup_bytes, device.workgroup_bytes);
            return Err(format!("has {own} bytes of workgroup memory, {most} can be had"));
        }
        if contract.resident && !entry.takes_slice {
            return Err("is resident, and never asks whether its slice is over (see ww_begin)".to_owned());
        }
        self.place_scalars(immediates, contract, &mut entry)?;
        Ok(entry)
    }

    fn compare_buffer(
        &self,
        variable: &GlobalVariable,
        used: GlobalUse,
        buffers: &[(Access, u64)],
    ) -> Result<(), String> {
        let binding = variable.binding.ok_or("uses a buffer that is bound nowhere")?;
        let index = binding.binding as usize;
        let contract = buffers.get(index).filter(|_| binding.group == 0);
        let &(access, min_size) = contract.ok_or_else(|| {
            let naga::ResourceBinding { group, binding } = binding;
            format!("uses group {group}, binding {binding}; its contract has {} buffers", buffers.len())
        })?;
        let writes = used.contains(GlobalUse::WRITE) && !access.writes();
        let reads = used.contains(GlobalUse::READ) && access == Access::Write;
        if writes || reads {
            let does = if writes { "writes" } else { "reads" };
            return Err(format!("{does} buffer {index}, which its contract gives for {access} alone"));
        }
        let needed = self.size_of(variable);
        if needed > min_size {
            return Err(format!(
                "declares {needed} bytes for buffer {index}; its contract promises {min_size}"
            ));
        }
        Ok(())
    }

    fn place_scalars(
        &self,
        variable: Option<&GlobalVariable>,
        contract: &KernelContract,
        entry: &mut Entry,
    ) -> Result<(), String> {
        let wanted: Vec<u32> = contract.params.iter().filter_map(scalar_of).collect();
        // Scalars that the code does not look at need no place.
        let Some(variable) = variable else { return Ok(()) };
        entry.scalars = self.members(variable);
        entry.scalar_bytes = u32::try_from(self.size_of(variable)).unwrap_or(u32::MAX).next_multiple_of(4);
        let own: Vec<u32> = entry.scalars.iter().map(|place| place.size).collect();
        if own != wanted {
            return Err(format!("takes values of {own:?} bytes, its contract says {wanted:?}"));
        }
        Ok(())
    }

    fn members(&self, variable: &GlobalVariable) -> Vec<ScalarPlace> {
        let place = |kind: naga::Handle<naga::Type>, offset| ScalarPlace {
            offset,
            size: self.module.types[kind].inner.size(self.module.to_ctx()),
        };
        match &self.module.types[variable.ty].inner {
            TypeInner::Struct { members, .. } => {
                members.iter().map(|member| place(member.ty, member.offset)).collect()
            }
            _ => vec![place(variable.ty, 0)],
        }
    }

    /// The bytes that a variable has, one element where it has as many as there are.
    fn size_of(&self, variable: &GlobalVariable) -> u64 {
        u64::from(self.module.types[variable.ty].inner.size(self.module.to_ctx()))
    }

    fn write(&self, name: &str) -> Result<Vec<u32>, String> {
        let unchecked = BoundsCheckPolicy::Unchecked;
        let options = spv::Options {
            lang_version: (1, 3),
            flags: spv::WriterFlags::empty(),
            // Adding foreign code is where its author vouches for its ranges; the checks cost a third of a kernel
            // that moves memory.
            bounds_check_policies: BoundsCheckPolicies {
                index: unchecked,
                buffer: unchecked,
                image_load: unchecked,
                binding_array: unchecked,
            },
            zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::Native,
            force_loop_bounding: false,
            ..spv::Options::default()
        };
        let pipeline =
            spv::PipelineOptions { shader_stage: ShaderStage::Compute, entry_point: name.to_owned() };
        let words = spv::write_vec(&self.module, &self.info, &options, Some(&pipeline));
        words.map(flatten).map_err(|error| error.to_string())
    }
}

fn buffer_of(param: &Param) -> Option<(Access, u64)> {
    match *param {
        Param::Buffer { access, min_size, .. } => Some((access, min_size)),
        Param::Scalar { .. } => None,
    }
}

fn scalar_of(param: &Param) -> Option<u32> {
    match *param {
        Param::Scalar { size } => Some(size),
        Param::Buffer { .. } => None,
    }
}

fn read_wgsl(text: &str, contracts: &[KernelContract], device: &Capabilities) -> Result<Shader, String> {
    let with_slice = contracts.iter().any(|contract| contract.resident);
    let whole = if with_slice { format!("{text}\n{SLICE}") } else { text.to_owned() };
    let module = naga::front::wgsl::parse_str(&whole).map_err(|error| error.emit_to_string(&whole))?;
    // In front of the validator, which takes long over deep code.
    check_nesting(&module)?;
    let info = check(&module, device).map_err(|error| error.emit_to_string(&whole))?;
    Ok(Shader { module, info })
}

fn read_spirv(bytes: &[u8], device: &Capabilities) -> Result<Shader, String> {
    let options = naga::front::spv::Options { adjust_coordinate_space: false, ..Default::default() };
    let module =
        naga::front::spv::parse_u8_slice(bytes, &options).map_err(|error| format!("SPIR-V: {error}"))?;
    check_nesting(&module).map_err(|what| format!("SPIR-V: {what}"))?;
    let info = check(&module, device).map_err(|error| format!("SPIR-V: {}", reasons(error.as_inner())))?;
    Ok(Shader { module, info })
}

/// Refuses what is nested deeper than drivers need to stand.
fn check_nesting(module: &naga::Module) -> Result<(), String> {
    // A type is behind those it is made of.
    let mut depths: Vec<u32> = Vec::with_capacity(module.types.len());
    for (handle, kind) in module.types.iter() {
        let depth_of =
            |part: &naga::Handle<naga::Type>| depths.get(part.index()).map_or(0, |depth| depth + 1);
        let depth = match &kind.inner {
            TypeInner::Array { base, .. } | TypeInner::Pointer { base, .. } => depth_of(base),
            TypeInner::Struct { members, .. } => {
                members.iter().map(|member| depth_of(&member.ty)).max().unwrap_or(0)
            }
            _ => 0,
        };
        if depth > NESTED.0 {
            let name = kind.name.clone().unwrap_or_else(|| format!("{handle:?}"));
            return Err(format!("type {name} is nested more than {} deep", NESTED.0));
        }
        depths.push(depth);
    }
    let named = module.functions.iter().map(|(_, function)| function);
    let all = named.chain(module.entry_points.iter().map(|entry| &entry.function));
    for function in all {
        if is_deeper(&function.body, NESTED.1) {
            let name = function.name.as_deref().unwrap_or("the entry point");
            return Err(format!("the control flow of {name} is nested more than {} deep", NESTED.1));
        }
    }
    Ok(())
}

/// Whether blocks are nested more than `levels` deep.
fn is_deeper(block: &Block, levels: u32) -> bool {
    let inner = |block: &Block| levels == 0 || is_deeper(block, levels - 1);
    block.iter().any(|statement| match statement {
        Statement::Block(block) => inner(block),
        Statement::If { accept, reject, .. } => inner(accept) || inner(reject),
        Statement::Switch { cases, .. } => cases.iter().any(|case| inner(&case.body)),
        Statement::Loop { body, continuing, .. } => inner(body) || inner(continuing),
        _ => false,
    })
}

/// An error and what caused it, in one line.
fn reasons(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn check(
    module: &naga::Module,
    device: &Capabilities,
) -> Result<ModuleInfo, Box<naga::WithSpan<naga::valid::ValidationError>>> {
    let mut validator = Validator::new(ValidationFlags::all(), device.for_shaders());
    if device.subgroups {
        validator.subgroup_stages(ShaderStages::COMPUTE).subgroup_operations(SubgroupOperationSet::all());
    }
    validator.validate(module).map_err(Box::new)
}
