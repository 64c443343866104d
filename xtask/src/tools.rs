//! Programs that come with neither cargo nor rustup: found on the PATH or under `target/tools`.

use std::env;
use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::cmd::Cmd;
use crate::workspace::Workspace;

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

/// What `setup` brings; cargo-fuzz is left to those who fuzz.
const BROUGHT: [&Tool; 2] = [&TYPOS, &DENY];

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

/// Brings what `check` needs and is not there; with `only_report`, says what that is instead.
pub(crate) fn setup(workspace: &Workspace, only_report: bool) -> Result<()> {
    let mut missing = Vec::new();
    for tool in BROUGHT {
        match tool.find(workspace) {
            Some(path) => println!("found    {:10}  {}", tool.program, path.display()),
            None => {
                println!(
                    "missing  {:10}  {}; to get it: {}",
                    tool.program,
                    tool.purpose,
                    tool.install(workspace)
                );
                missing.push(tool);
            }
        }
    }
    if only_report && !missing.is_empty() {
        bail!("{} of {} tools are missing: `cargo xtask setup` brings them", missing.len(), BROUGHT.len());
    }
    missing.iter().try_for_each(|tool| tool.install(workspace).run())
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
