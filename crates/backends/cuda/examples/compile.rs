//! Compiles a file of CUDA C with one NVRTC: `compile --arch compute_80 --nvrtc LIBRARY kernels.cu -o kernels.ptx`.
//!
//! `compute_80` and the like give PTX, `sm_90` and the like a CUBIN. No GPU and no driver are needed.
#![forbid(unsafe_code)]

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use warpweft_cuda::Compiler;

const USAGE: &str = "compile --arch compute_NN|sm_NN [--nvrtc LIBRARY] SOURCE.cu -o FILE";

fn main() -> Result<()> {
    let (mut arch, mut nvrtc, mut output, mut source) = (None, None, None, None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("{word} needs a value: {USAGE}"));
        match word.as_str() {
            "--arch" => arch = Some(value()?),
            "--nvrtc" => nvrtc = Some(value()?),
            "-o" => output = Some(PathBuf::from(value()?)),
            _ => {
                ensure!(!word.starts_with('-') && source.is_none(), "{word} is not understood: {USAGE}");
                source = Some(PathBuf::from(word));
            }
        }
    }
    let (Some(arch), Some(output), Some(source)) = (arch, output, source) else { bail!("{USAGE}") };
    let compiler = nvrtc.map_or_else(Compiler::find, Compiler::at);
    let text = fs::read_to_string(&source).with_context(|| format!("{} cannot be read", source.display()))?;
    let code =
        compile(&compiler, &text, &arch).with_context(|| format!("{} for {arch}", source.display()))?;
    fs::write(&output, code).with_context(|| format!("{} cannot be written", output.display()))
}

fn compile(compiler: &Compiler, text: &str, arch: &str) -> Result<Vec<u8>> {
    match arch.split_once('_') {
        Some(("compute", number)) => Ok(compiler.compile_to_ptx(text, capability(number)?)?.into_bytes()),
        Some(("sm", number)) => Ok(compiler.compile(text, capability(number)?)?),
        _ => bail!("--arch takes compute_80 or sm_90, not {arch:?}"),
    }
}

/// `90` is 9.0, `100` is 10.0.
fn capability(number: &str) -> Result<(u32, u32)> {
    let number: u32 = number.parse().with_context(|| format!("{number:?} is no compute capability"))?;
    Ok((number / 10, number % 10))
}
