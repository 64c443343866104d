//! `test-gpu`: the GPU suite, run here or packed for a machine that has a driver and no Rust.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::cmd::Cmd;
use crate::drivers::Drivers;
use crate::report::Report;
use crate::workspace::Workspace;

/// The package, and the program in it.
const PACKAGE: &str = "warpweft-gpu-suite";
const PROGRAM: &str = "gpu-suite";

/// What starts the suite in a bundle.
const SCRIPT: &str = "crates/gpu-suite/run.sh";

/// Where that script looks for Vulkan's loader.
const LIBRARIES: &str = "lib";

/// A bundle stays below this, so that it can be carried anywhere.
const MOST_BYTES: u64 = 40 << 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Make a folder to be carried to another machine, instead of running the suite
    #[arg(long, value_name = "DIR", conflicts_with_all = ["require", "out", "filter", "leg", "memcheck"])]
    bundle: Option<PathBuf>,
    /// Devices that have to be there; may be repeated
    #[arg(long, value_name = "BACKEND,N", default_value = "cuda,1")]
    require: Vec<String>,
    /// Folder for the summary and what each leg prints
    #[arg(long, value_name = "DIR", default_value = "target/gpu-results")]
    out: PathBuf,
    /// Only conformance cases with this in their names
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Only legs with this in their names; may be repeated
    #[arg(long, value_name = "TEXT")]
    leg: Vec<String>,
    /// Run cases under compute-sanitizer too, where it is on the PATH
    #[arg(long)]
    memcheck: bool,
}

/// The verb.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let built = workspace.target.join("bundle").join(PROGRAM);
    Cmd::new("cargo build --profile bundle --locked -p").arg(PACKAGE).run()?;
    if let Some(folder) = &options.bundle {
        return bundle(&built, folder, &Drivers::find(workspace));
    }
    let mut report = Report::default();
    report.step("gpu", |counts| suite(&built, options).run_reading(|line| counts.read(line)));
    report.finish()
}

/// The call that runs the suite here.
fn suite(built: &Path, options: &Options) -> Cmd {
    let mut suite = Cmd::program(built).arg("run");
    for required in &options.require {
        suite = suite.arg("--require").arg(required);
    }
    suite = suite.arg("--out").path(&options.out);
    if let Some(filter) = &options.filter {
        suite = suite.arg("--filter").arg(filter);
    }
    for leg in &options.leg {
        suite = suite.arg("--leg").arg(leg);
    }
    if options.memcheck { suite.arg("--memcheck") } else { suite }
}

fn bundle(built: &Path, folder: &Path, drivers: &Drivers) -> Result<()> {
    let mut files = vec![(built, folder.to_owned()), (Path::new(SCRIPT), folder.to_owned())];
    match drivers.loader() {
        Ok(loader) => files.push((loader, folder.join(LIBRARIES))),
        Err(_) => println!("without Vulkan's loader: cargo xtask setup --only drivers brings one"),
    }
    let sizes = files.iter().map(|(file, to)| carry(file, to)).collect::<Result<Vec<_>>>()?;
    let bytes: u64 = sizes.iter().sum();
    ensure!(bytes <= MOST_BYTES, "the bundle has {} MiB, {} are allowed", bytes >> 20, MOST_BYTES >> 20);
    println!("to run it: sh {}/run.sh --require cuda,2 --out results", folder.display());
    Ok(())
}

/// Copies a file into a folder; its size.
fn carry(file: &Path, folder: &Path) -> Result<u64> {
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let to = folder.join(file.file_name().context("a file has a name")?);
    let copied = fs::copy(file, &to).with_context(|| file.display().to_string())?;
    println!("{:>9} KiB  {}", copied.div_ceil(1024), to.display());
    Ok(copied)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_suite_is_called_as_a_bundle_would_call_it() {
        let options = Options {
            bundle: None,
            require: vec!["cuda,2".into()],
            out: "out".into(),
            filter: Some("copy::".into()),
            leg: vec!["conformance".into()],
            memcheck: true,
        };
        assert_eq!(
            suite(Path::new("gpu-suite"), &options).to_string(),
            "gpu-suite run --require cuda,2 --out out --filter copy:: --leg conformance --memcheck"
        );
    }
}
