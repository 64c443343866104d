//! `fuzz`: decoders against input that nobody would write.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};

use crate::cmd::Cmd;
use crate::report::Report;
use crate::tools::FUZZ;
use crate::workspace::Workspace;

/// Fuzzes `target`, or every target in turn, for `seconds` each.
pub(crate) fn run(workspace: &Workspace, target: Option<&str>, seconds: u32) -> Result<()> {
    let targets = chosen(targets()?, target)?;
    if targets.is_empty() {
        println!("no crate has a folder fuzz/fuzz_targets yet");
        return Ok(());
    }
    let program = find(workspace)?;
    let mut report = Report::default();
    let builds = workspace.target.join("fuzz");
    for target in &targets {
        let command = target.command(&program, &builds, seconds);
        report.step(&target.name, |_| command.run());
    }
    report.finish()
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct FuzzTarget {
    folder: PathBuf,
    name: String,
}

impl FuzzTarget {
    fn command(&self, program: &Path, builds: &Path, seconds: u32) -> Cmd {
        Cmd::program(program)
            .args(["run", "--target-dir"])
            .path(builds)
            .arg("--fuzz-dir")
            .path(&self.folder)
            .args([&self.name, "--"])
            .arg(format!("-max_total_time={seconds}"))
            .variable("RUSTUP_TOOLCHAIN", "nightly")
    }
}

/// The fuzz targets that git knows of.
fn targets() -> Result<Vec<FuzzTarget>> {
    let files =
        Cmd::new("git ls-files --cached --others --exclude-standard *fuzz/fuzz_targets/*.rs").output()?;
    Ok(files.lines().filter_map(fuzz_target).collect())
}

/// `crates/topology/fuzz/fuzz_targets/xml.rs` is the target `xml` of `crates/topology/fuzz`.
fn fuzz_target(file: &str) -> Option<FuzzTarget> {
    let file = Path::new(file);
    Some(FuzzTarget { folder: file.parent()?.parent()?.to_owned(), name: file.file_stem()?.to_str()?.into() })
}

fn chosen(all: Vec<FuzzTarget>, name: Option<&str>) -> Result<Vec<FuzzTarget>> {
    let Some(name) = name else { return Ok(all) };
    let known: Vec<_> = all.iter().map(|target| target.name.clone()).collect();
    let chosen: Vec<_> = all.into_iter().filter(|target| target.name == name).collect();
    ensure!(!chosen.is_empty(), "no fuzz target is called {name}; there are: {}", known.join(", "));
    Ok(chosen)
}

/// The path of cargo-fuzz, if a nightly toolchain is there too.
fn find(workspace: &Workspace) -> Result<PathBuf> {
    if !Cmd::new("cargo +nightly --version").succeeds()? {
        bail!("fuzzing needs a nightly toolchain: rustup toolchain install nightly");
    }
    let Some(program) = FUZZ.find(workspace) else {
        bail!("{} is not installed: {}", FUZZ.program, FUZZ.install(workspace));
    };
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn xml() -> FuzzTarget {
        fuzz_target("crates/topology/fuzz/fuzz_targets/xml.rs").unwrap()
    }

    #[test]
    fn a_target_is_run_from_the_folder_that_holds_it() {
        let command = xml().command(Path::new("cargo-fuzz"), Path::new("target/fuzz"), 5);
        assert_eq!(
            command.to_string(),
            "RUSTUP_TOOLCHAIN=nightly cargo-fuzz run --target-dir target/fuzz \
             --fuzz-dir crates/topology/fuzz xml -- -max_total_time=5"
        );
    }

    #[test]
    fn a_name_chooses_one() {
        assert_eq!(chosen(vec![xml()], Some("xml")).unwrap(), [xml()]);
        assert_eq!(chosen(vec![xml()], None).unwrap(), [xml()]);
        let error = chosen(vec![xml()], Some("json")).unwrap_err();
        assert_eq!(error.to_string(), "no fuzz target is called json; there are: xml");
    }
}
