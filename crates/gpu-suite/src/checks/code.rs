//! Code: what is refused, and in which words.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use warpweft_core_types::{
    Arg, BufferDesc, CodeFormat, ForeignCode, Kernel, KernelContract, Launch, LoadError, Module, Op,
};
use warpweft_cuda::Compiler;

use crate::{
    bench::raw::Raw,
    kernels::{self, HUNGRY_BYTES},
    rig::{Bench, NotRun, Rig},
};

/// Registers of a multiprocessor, and so the most that the threads of a workgroup have together.
const MOST_REGISTERS: u32 = 64 << 10;

fn load(bench: &Bench, contract: KernelContract, code: ForeignCode) -> Result<Arc<dyn Module>, LoadError> {
    bench.device.load(&kernels::foreign(vec![contract], code))
}

fn source(format: CodeFormat, text: &str) -> ForeignCode {
    ForeignCode::Source { format, text: text.to_owned() }
}

pub(super) fn refused(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let second = kernels::second_contract;
    let garbage = load(bench, second(), kernels::ptx("no PTX at all"));
    ensure!(matches!(garbage, Err(LoadError::Rejected { .. })), "{garbage:?}");
    let cut = ForeignCode::Binary { format: CodeFormat::Cubin, bytes: vec![1; 64] };
    ensure!(matches!(load(bench, second(), cut), Err(LoadError::Rejected { .. })));

    let code = || kernels::ptx(&kernels::unseen().0);
    let named = load(bench, KernelContract::new("third", []), code());
    ensure!(matches!(&named, Err(LoadError::NoSuchKernel { name, .. }) if name == "third"), "{named:?}");
    let other = load(bench, KernelContract::new("second", []), code());
    ensure!(matches!(other, Err(LoadError::Rejected { .. })), "{other:?}");
    let large = load(bench, second().with_workgroup_size([1025, 1, 1]), code());
    ensure!(matches!(large, Err(LoadError::Rejected { .. })), "{large:?}");
    let wgsl = load(bench, second(), source(CodeFormat::Wgsl, ""));
    ensure!(matches!(wgsl, Err(LoadError::UnsupportedFormat { .. })));
    Ok(())
}

/// The compiler is no part of a driver.
pub(super) fn compiled(rig: &Rig) -> Result<()> {
    let (bench, compiler) = (rig.first(), Compiler::find());
    if let Err(missing) = compiler.load() {
        return Err(NotRun(missing.to_string()).into());
    }
    let wrong = source(CodeFormat::CudaC, "__global__ void second( {");
    let wrong = load(bench, kernels::second_contract(), wrong);
    let Err(LoadError::Rejected { log }) = wrong else { bail!("{wrong:?}") };
    ensure!(log.contains("kernel.cu(1)") && log.contains("error"), "the log says: {log}");

    let text = "extern \"C\" __global__ void second(unsigned int* out) { *out = 7; }";
    stores(bench, source(CodeFormat::CudaC, text), 7)?;
    let capability = bench.device.info().compute_capability.unwrap_or_default();
    let cubin = compiler.compile(text, capability)?;
    stores(bench, ForeignCode::Binary { format: CodeFormat::Cubin, bytes: cubin }, 7)
}

pub(super) fn machine_code(rig: &Rig) -> Result<()> {
    let (bench, raw) = (rig.first(), Raw::open(0)?);
    let (text, number) = kernels::unseen();
    let cubin = raw.assemble(&text)?;
    let half = ForeignCode::Binary { format: CodeFormat::Cubin, bytes: cubin[..cubin.len() / 2].to_vec() };
    let half = load(bench, kernels::second_contract(), half);
    ensure!(matches!(half, Err(LoadError::Rejected { .. })), "{half:?}");
    stores(bench, ForeignCode::Binary { format: CodeFormat::Cubin, bytes: cubin }, number)
}

/// Loads a `second` and has it store its number.
fn stores(bench: &Bench, code: ForeignCode, number: u32) -> Result<()> {
    let kernel = load(bench, kernels::second_contract(), code)?.kernel("second")?;
    let out = bench.allocate(BufferDesc::device(4))?;
    bench.run(&[Op::Launch(Launch::new(&kernel, [1, 1, 1], &[Arg::Buffer(&out)])?)])?;
    let found = bench.read_word(&out)?;
    ensure!(found == number, "it stored {found} and not {number}");
    Ok(())
}

/// Loads a kernel of the suite for workgroups of so many threads.
fn sized(bench: &Bench, contract: &KernelContract, threads: u32) -> Result<Arc<dyn Kernel>, LoadError> {
    let contract = contract.clone().with_workgroup_size([threads, 1, 1]);
    let name = contract.name.clone();
    bench.device.load(&kernels::code(vec![contract]))?.kernel(&name)
}

pub(super) fn bounded(rig: &Rig) -> Result<()> {
    let (bench, narrow) = (rig.first(), kernels::narrow());
    sized(bench, &narrow, 128)?;
    let wrong = sized(bench, &narrow, 256);
    ensure!(matches!(&wrong, Err(LoadError::Rejected { log }) if log.contains("128")), "{wrong:?}");
    Ok(())
}

/// Nothing bounds its workgroups but what its threads need.
pub(super) fn many_registers(rig: &Rig) -> Result<()> {
    let (bench, hungry) = (rig.first(), kernels::hungry());
    let small = sized(bench, &hungry, 128)?;
    let registers = small.resources().registers.unwrap_or_default();
    ensure!(registers > MOST_REGISTERS / 1024, "{registers} registers leave room for 1,024 threads");
    let words: Vec<u8> = (0..u32::try_from(HUNGRY_BYTES / 4)?).flat_map(u32::to_le_bytes).collect();
    let view = bench.uploaded(&words)?;
    bench.run(&[Op::Launch(Launch::new(&small, [1, 1, 1], &[Arg::Buffer(&view)])?)])?;
    let turned: Vec<u8> = words.chunks_exact(4).rev().flatten().copied().collect();
    ensure!(bench.read(&view)? == turned, "the words were not turned around");
    match sized(bench, &hungry, 1024) {
        Err(LoadError::Rejected { log }) if log.contains("threads") => Ok(()),
        Err(error) => Err(error.into()),
        Ok(kernel) => {
            let registers = kernel.resources().registers.unwrap_or(u32::MAX);
            ensure!(registers.saturating_mul(1024) <= MOST_REGISTERS, "{registers} registers a thread");
            Ok(())
        }
    }
}
