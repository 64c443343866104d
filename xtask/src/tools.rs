//! Programs and libraries that come with neither cargo nor rustup: found on the PATH or under `target/tools`.

use std::env;
use std::path::PathBuf;

use anyhow::{Result, ensure};

use crate::cmd::Cmd;
use crate::drivers;
use crate::workspace::Workspace;

/// What the user asked of `setup`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only say what is there, what is missing and how to get it
    #[arg(long)]
    check: bool,
    /// Leave out the others
    #[arg(long, value_name = "KIND")]
    only: Option<Only>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Only {
    /// Programs and compilers that `check` runs
    Tools,
    /// Vulkan drivers that `test` runs on
    Drivers,
}

/// A program that one of our verbs runs.
#[derive(Debug)]
pub(crate) struct Tool {
    pub(crate) program: &'static str,
    package: &'static str,
    version: &'static str,
    purpose: &'static str,
}

pub(crate) const TYPOS: Tool =
    Tool { program: "typos", package: "typos-cli", version: "1.52.0", purpose: "spelling, run by `check`" };

pub(crate) const DENY: Tool = Tool {
    program: "cargo-deny",
    package: "cargo-deny",
    version: "0.20.2",
    purpose: "licences and sources of dependencies, run by `check`",
};

pub(crate) const FUZZ: Tool = Tool {
    program: "cargo-fuzz",
    package: "cargo-fuzz",
    version: "0.13.2",
    purpose: "fuzzing, run by `fuzz` on a nightly toolchain",
};

/// One file out of a package of Python's index, where NVIDIA's compilers are by version and without a toolkit.
#[derive(Debug)]
pub(crate) struct Wheel {
    name: &'static str,
    package: &'static str,
    /// Below the folder that the package is unpacked into.
    file: &'static str,
    purpose: &'static str,
}

/// The oldest compiler whose PTX every driver that we support takes.
pub(crate) const NVRTC_12: Wheel = Wheel {
    name: "nvrtc-12.0",
    package: "nvidia-cuda-nvrtc-cu12==12.0.*",
    file: "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    purpose: "compiles kernels to PTX, run by `codegen`",
};

pub(crate) const NVRTC_13: Wheel = Wheel {
    name: "nvrtc-13.0",
    package: "nvidia-cuda-nvrtc==13.0.*",
    file: "nvidia/cu13/lib/libnvrtc.so.13",
    purpose: "compiles kernels to machine code, run by `check`",
};

pub(crate) const PTXAS: Wheel = Wheel {
    name: "ptxas-13.0",
    package: "nvidia-cuda-nvcc==13.0.*",
    file: "nvidia/cu13/bin/ptxas",
    purpose: "assembles PTX, run by `check`",
};

/// What `setup` brings; cargo-fuzz is left to those who fuzz.
const BROUGHT: [&Tool; 2] = [&TYPOS, &DENY];
const BROUGHT_WHEELS: [&Wheel; 3] = [&NVRTC_12, &NVRTC_13, &PTXAS];

impl Tool {
    /// Where the program lies, our own copy first.
    pub(crate) fn find(&self, workspace: &Workspace) -> Option<PathBuf> {
        let ours = tools_folder(workspace).join("bin");
        let path = env::var_os("PATH").unwrap_or_default();
        find_in(self.program, [ours].into_iter().chain(env::split_paths(&path)))
    }

    /// The command that brings the program into `target/tools`.
    pub(crate) fn install(&self, workspace: &Workspace) -> Cmd {
        Cmd::new("cargo install --locked --root")
            .path(&tools_folder(workspace))
            .arg(format!("{}@{}", self.package, self.version))
    }
}

impl Wheel {
    pub(crate) fn find(&self, workspace: &Workspace) -> Option<PathBuf> {
        Some(self.folder(workspace).join(self.file)).filter(|path| path.is_file())
    }

    /// What to say where it is needed and not there.
    pub(crate) fn absence(&self) -> String {
        format!("{} is not installed: cargo xtask setup", self.name)
    }

    fn folder(&self, workspace: &Workspace) -> PathBuf {
        tools_folder(workspace).join(self.name)
    }

    fn install(&self, workspace: &Workspace) -> Cmd {
        Cmd::new("python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --target")
            .path(&self.folder(workspace))
            .arg(self.package)
    }
}

/// The verb `setup`: brings what is not there, or says what that is.
pub(crate) fn setup(workspace: &Workspace, options: &Options) -> Result<()> {
    let mut missing = 0;
    if options.only != Some(Only::Drivers) {
        missing += setup_tools(workspace, options.check)?;
    }
    if options.only != Some(Only::Tools) {
        missing += drivers::setup(workspace, options.check)?;
    }
    ensure!(missing == 0, "{missing} things are missing: `cargo xtask setup` brings them");
    Ok(())
}

/// Brings programs and compilers; with `only_report`, says how many are missing instead.
fn setup_tools(workspace: &Workspace, only_report: bool) -> Result<usize> {
    let tools =
        BROUGHT.map(|tool| (tool.program, tool.purpose, tool.find(workspace), tool.install(workspace)));
    let wheels = BROUGHT_WHEELS
        .map(|wheel| (wheel.name, wheel.purpose, wheel.find(workspace), wheel.install(workspace)));
    let mut missing = Vec::new();
    for (name, purpose, found, install) in tools.into_iter().chain(wheels) {
        match found {
            Some(path) => println!("found    {name:17}  {}", path.display()),
            None => {
                println!("missing  {name:17}  {purpose}; to get it: {install}");
                missing.push(install);
            }
        }
    }
    if only_report {
        return Ok(missing.len());
    }
    missing.iter().try_for_each(Cmd::run)?;
    Ok(0)
}

fn tools_folder(workspace: &Workspace) -> PathBuf {
    workspace.target.join("tools")
}

fn find_in(program: &str, folders: impl IntoIterator<Item = PathBuf>) -> Option<PathBuf> {
    let name = format!("{program}{}", env::consts::EXE_SUFFIX);
    folders.into_iter().map(|folder| folder.join(&name)).find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_folder_that_has_the_program_wins() {
        let this = env::current_exe().unwrap();
        let program = this.file_stem().unwrap().to_str().unwrap();
        let folder = this.parent().unwrap().to_owned();
        assert_eq!(find_in(program, ["no-such-folder".into(), folder]), Some(this.clone()));
        assert_eq!(find_in(program, ["no-such-folder".into()]), None);
    }
}
