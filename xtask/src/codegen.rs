//! `codegen`: the CUDA C of the workspace, compiled to PTX that is checked in beside it.
//!
//! A `kernels/name.cu` of any crate has its `kernels/name.ptx`, which drivers from CUDA 12.0 on take and which
//! needs no compiler where it runs. What kernels have in common is in `kernels/name.cuh` beside them, or beside the
//! executor of actors, which they include by that name. The first lines of the PTX say which source it was made from, so that a
//! stale file is found on machines that have no compiler either.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::cmd::Cmd;
use crate::report::Report;
use crate::tools::{NVRTC_12, NVRTC_13, PTXAS, Wheel};
use crate::workspace::Workspace;

/// What the PTX is made for: everything from there on translates it.
const PTX_TARGET: &str = "compute_80";

/// What has to be able to run the kernels.
const TARGETS: [&str; 3] = ["sm_80", "sm_90", "sm_100"];

/// The header that kernels may include, and how they do.
const HEADER: &str = "crates/backends/cuda/src/resident.cuh";
const INCLUDE: &str = "#include <warpweft/resident.cuh>";

/// What begins the line with the source's digest.
const DIGEST: &str = "// source ";

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only say which files are stale, and compile everything for every architecture
    #[arg(long)]
    check: bool,
    /// With --check: fail where the compilers are not installed
    #[arg(long, requires = "check")]
    require_tools: bool,
}

/// One file of kernels.
#[derive(Debug)]
struct Kernels {
    source: PathBuf,
    /// With the files beside it that it includes.
    text: String,
    /// Of the source and what it includes.
    digest: u64,
}

/// The compilers, all of them.
#[derive(Debug)]
struct Tools {
    nvrtc_12: PathBuf,
    nvrtc_13: PathBuf,
    ptxas: PathBuf,
    /// Where trials are written.
    scratch: PathBuf,
    /// Where sources are put together.
    source: PathBuf,
}

/// Bytes that kernels may spill in all their functions: these move so much that the link takes far longer.
const MAY_SPILL: [(&str, u32); 2] = [("low_latency_bare", 256), ("low_latency_bare_within", 256)];

/// What a kernel needs on one architecture, in the assembler's words.
#[derive(Debug, Default, PartialEq, Eq)]
struct Usage {
    entry: String,
    registers: u32,
    spilled_bytes: u32,
    shared_bytes: u32,
}

/// The verb `codegen`.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    if options.check {
        let mut report = Report::default();
        check(workspace, &mut report, options.require_tools);
        return report.finish();
    }
    let tools = Tools::find(workspace).map_err(|missing| anyhow::anyhow!(missing.absence()))?;
    for kernels in find(Path::new("crates"))? {
        let ptx = kernels.made_ptx(&tools)?;
        fs::write(kernels.ptx_path(), ptx).with_context(|| kernels.ptx_path().display().to_string())?;
    }
    Ok(())
}

/// Whether the PTX is up to date, and what becomes of it; the latter where the compilers are.
pub(crate) fn check(workspace: &Workspace, report: &mut Report, require_tools: bool) {
    report.step("codegen", |_| {
        let stale: Vec<String> = find(Path::new("crates"))?.iter().filter_map(Kernels::staleness).collect();
        ensure!(stale.is_empty(), "{}: run cargo xtask codegen", stale.join("; "));
        Ok(())
    });
    match Tools::find(workspace) {
        Ok(tools) => report.step("kernels", |_| compile_everything(&tools)),
        Err(missing) => report.absent("kernels", &missing.absence(), require_tools),
    }
}

fn compile_everything(tools: &Tools) -> Result<()> {
    let (mut table, mut wrong) = (String::new(), Vec::new());
    for kernels in find(Path::new("crates"))? {
        let (source, ptx) = (kernels.source.display(), kernels.ptx_path());
        if kernels.checked_in() != kernels.made_ptx(tools)? {
            wrong.push(format!("{} is not what the compiler makes: cargo xtask codegen", ptx.display()));
        }
        wrong.extend(
            differing_entries(&kernels.text, &kernels.checked_in()).map(|e| format!("{source}: {e}")),
        );
        for target in TARGETS {
            kernels.compile(tools, &tools.nvrtc_13, target)?;
            let assemble =
                Cmd::program(&tools.ptxas).args(["-v", "-arch", target, "-o"]).path(&tools.scratch);
            for usage in usages(&assemble.path(&ptx).all_output()?) {
                let Usage { entry, registers, spilled_bytes, shared_bytes } = usage;
                let name = format!("{source} {entry}");
                writeln!(table, "{name:56}  {target:7} {registers:9} {spilled_bytes:7} {shared_bytes:7}")?;
                let allowed =
                    MAY_SPILL.iter().find(|(kernel, _)| *kernel == entry).map_or(0, |(_, bytes)| *bytes);
                if spilled_bytes > allowed {
                    wrong.push(format!("{name} spills {spilled_bytes} bytes on {target}"));
                }
            }
        }
    }
    println!("{:56}  target  registers  spills  shared\n{table}", "kernel");
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    Ok(())
}

impl Tools {
    fn find(workspace: &Workspace) -> Result<Self, &'static Wheel> {
        let found = |wheel: &'static Wheel| wheel.find(workspace).ok_or(wheel);
        Ok(Self {
            nvrtc_12: found(&NVRTC_12)?,
            nvrtc_13: found(&NVRTC_13)?,
            ptxas: found(&PTXAS)?,
            scratch: workspace.target.join("kernel.out"),
            source: workspace.target.join("kernel.cu"),
        })
    }
}

impl Kernels {
    fn read(source: PathBuf) -> Result<Self> {
        let read = |path: &Path| fs::read_to_string(path).with_context(|| path.display().to_string());
        let text = with_neighbours(&source, &read(&source)?)?;
        let header = if text.contains(INCLUDE) { read(Path::new(HEADER))? } else { String::new() };
        let digest = fnv1a(text.bytes().chain(header.bytes()));
        Ok(Self { source, text, digest })
    }

    fn ptx_path(&self) -> PathBuf {
        self.source.with_extension("ptx")
    }

    /// What is there; nothing if it is not.
    fn checked_in(&self) -> String {
        fs::read_to_string(self.ptx_path()).unwrap_or_default()
    }

    /// Why the PTX is out of date, if it is.
    fn staleness(&self) -> Option<String> {
        let (ptx, text) = (self.ptx_path().display().to_string(), self.checked_in());
        let Some(made_from) = text.lines().find_map(|line| line.strip_prefix(DIGEST)) else {
            return Some(format!("{ptx} is not there, or does not say what it was made from"));
        };
        (made_from != format!("{:016x}", self.digest)).then(|| format!("{ptx} was made from another source"))
    }

    /// Compiles it for one architecture: PTX for `compute_..`, a CUBIN for `sm_..`.
    fn compile(&self, tools: &Tools, nvrtc: &Path, arch: &str) -> Result<()> {
        fs::write(&tools.source, &self.text).with_context(|| tools.source.display().to_string())?;
        let program = Cmd::new("cargo run --quiet --locked -p warpweft-cuda --example compile -- --arch");
        let program = program.arg(arch).arg("--nvrtc").path(nvrtc).path(&tools.source);
        program.arg("-o").path(&tools.scratch).run().with_context(|| self.source.display().to_string())
    }

    /// What has to be checked in.
    fn made_ptx(&self, tools: &Tools) -> Result<String> {
        self.compile(tools, &tools.nvrtc_12, PTX_TARGET)?;
        let made = fs::read_to_string(&tools.scratch).context("what the compiler wrote")?;
        let name = self.source.file_name().unwrap_or_default().display();
        let head = format!("// Made from {name} by `cargo xtask codegen`: change that file instead.\n");
        Ok(format!("{head}{DIGEST}{:016x}\n{}", self.digest, without_trimmings(&made)))
    }
}

/// Where headers are that kernels of other crates include.
const SHARED_HEADERS: &str = "crates/k2k-router/kernels";

/// A source with the files in its folder that it includes: `#include "name.cuh"`, and those of [`SHARED_HEADERS`].
fn with_neighbours(source: &Path, text: &str) -> Result<String> {
    let mut whole = String::new();
    for line in text.lines() {
        match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
            Some(name) => {
                let beside = source.with_file_name(name);
                let path = if beside.exists() { beside } else { Path::new(SHARED_HEADERS).join(name) };
                let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                whole += &with_neighbours(&path, &text)?;
            }
            None => {
                // Nothing is included twice, and this is one file to the compiler.
                let kept = if line == "#pragma once" { "" } else { line };
                whole += kept;
                whole.push('\n');
            }
        }
    }
    Ok(whole)
}

/// Every `kernels/*.cu` below `folder`, in order.
fn find(folder: &Path) -> Result<Vec<Kernels>> {
    let mut found = Vec::new();
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            found.extend(find(&path)?);
        } else if folder.ends_with("kernels") && path.extension().is_some_and(|extension| extension == "cu") {
            found.push(Kernels::read(path)?);
        }
    }
    Ok(found)
}

/// Leaves out the compiler's name and number, and constants it adds to every program, which nothing uses.
fn without_trimmings(ptx: &str) -> String {
    let trimmings = |line: &&str| line.starts_with("//") || line.contains("nv6target");
    let kept: Vec<&str> = ptx.lines().filter(|line| !trimmings(line)).collect();
    format!("{}\n", kept.join("\n").trim())
}

/// Entry points without a kernel of the source, and the reverse.
fn differing_entries(source: &str, ptx: &str) -> impl Iterator<Item = String> {
    let (kernels, entries) = (kernel_names(source), entry_names(ptx));
    let missing = kernels.difference(&entries).map(|name| format!("{name} has no entry in the PTX"));
    let extra = entries.difference(&kernels).map(|name| format!("the PTX's entry {name} is no kernel here"));
    missing.chain(extra).collect::<Vec<_>>().into_iter()
}

fn entry_names(ptx: &str) -> BTreeSet<String> {
    ptx.split(".entry ").skip(1).map(first_name).collect()
}

/// The names behind `__global__`, with or without `__launch_bounds__(..)`.
fn kernel_names(source: &str) -> BTreeSet<String> {
    let code: Vec<&str> = source.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let code = code.join("\n");
    let declared = code.split("__global__").skip(1).map(|rest| match rest.split_once("__launch_bounds__") {
        Some((before, bounds)) if !before.contains('(') => {
            bounds.split_once(')').map_or("", |(_, rest)| rest)
        }
        _ => rest,
    });
    declared.map(|rest| first_name(rest.trim_start().trim_start_matches("void"))).collect()
}

fn first_name(text: &str) -> String {
    text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// Reads what `ptxas -v` prints.
fn usages(text: &str) -> Vec<Usage> {
    let mut usages = Vec::new();
    let mut current = Usage::default();
    for line in text.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            current = Usage { entry: first_name(rest), ..Usage::default() };
        } else if line.contains("bytes spill stores") {
            let spilled = before(line, " bytes spill stores") + before(line, " bytes spill loads");
            // Functions that a kernel calls come behind it.
            let last = usages.last_mut().filter(|_: &&mut Usage| current.entry.is_empty());
            last.unwrap_or(&mut current).spilled_bytes += spilled;
        } else if line.contains(" registers") {
            current.registers = before(line, " registers");
            current.shared_bytes = before(line, " bytes smem");
            usages.push(std::mem::take(&mut current));
        }
    }
    usages
}

/// The number in front of `words`; 0 if they are not there.
fn before(line: &str, words: &str) -> u32 {
    let number = line.split_once(words).and_then(|(before, _)| before.rsplit([' ', ',']).next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// A digest that tells one text from another, not from one made to deceive.
fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_the_known_one() {
        assert_eq!(fnv1a(*b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(*b"a"), 0xaf63_dc4c_8601_ec8c);
    }

    #[test]
    fn kernels_and_entries_are_compared() {
        let source = "// __global__ void not(\nextern \"C\" __global__ void one(int* a) {}\n\
                      extern \"C\" __global__ void\n__launch_bounds__(256) two() { f(); }";
        assert_eq!(kernel_names(source), BTreeSet::from(["one".into(), "two".into()]));
        let ptx = ".visible .entry one(\n.visible .entry _Z5threev(\n";
        let said: Vec<String> = differing_entries(source, ptx).collect();
        assert_eq!(said, ["two has no entry in the PTX", "the PTX's entry _Z5threev is no kernel here"]);
    }

    #[test]
    fn the_assembler_is_understood() {
        let text = "ptxas info    : 304 bytes gmem
ptxas info    : Compiling entry function 'add' for 'sm_90'
ptxas info    : Function properties for add
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 30 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Function properties for _Z6calledv
    0 bytes stack frame, 8 bytes spill stores, 1 bytes spill loads
ptxas info    : Compiling entry function 'empty' for 'sm_90'
ptxas info    : Function properties for empty
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 4 registers, used 0 barriers";
        let usage = |entry: &str, registers, spilled_bytes, shared_bytes| Usage {
            entry: entry.into(),
            registers,
            spilled_bytes,
            shared_bytes,
        };
        assert_eq!(usages(text), [usage("add", 30, 25, 1024), usage("empty", 4, 0, 0)]);
    }

    #[test]
    fn the_compilers_own_words_are_left_out() {
        let made = "//\n// Compiler Build ID: CL-1\n//\n\n.version 8.0\n\t// .globl\tone\n\
                    .global .u64 _ZN2nv6target6detail9all_hostsE = 1;\n.visible .entry one()\n";
        assert_eq!(without_trimmings(made), ".version 8.0\n\t// .globl\tone\n.visible .entry one()\n");
    }

    #[test]
    fn a_stale_file_is_named() {
        let kernels = |digest| Kernels { source: "no/such/a.cu".into(), text: String::new(), digest };
        assert!(kernels(1).staleness().unwrap().contains("no/such/a.ptx is not there"));
    }
}
