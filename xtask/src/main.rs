//! Builds, checks and tests the workspace: `cargo xtask --help` lists the verbs.
//!
//! Every command of another program is printed before it runs, so that it can be repeated by hand.
//! No crate of the workspace is used here: this program builds when they do not.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line program talks to its user")]

mod apt;
mod bench;
mod check;
mod cmd;
mod codegen;
mod drivers;
mod features;
mod fuzz;
mod platforms;
mod report;
mod test;
mod test_gpu;
mod tidy;
mod tools;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};

use report::Report;
use workspace::Workspace;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = ABOUT, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Bring the tools of `check` and the Vulkan drivers of `test` into target/tools
    Setup(tools::Options),
    /// Judge the text: fmt, tidy, clippy, kernels, and typos and deny where they are installed
    Check {
        /// Fail where a tool is not installed, and look up advisories too
        #[arg(long)]
        require_tools: bool,
    },
    /// Compile the CUDA C of every `kernels` folder to the PTX beside it
    Codegen(codegen::Options),
    /// Check the rules of this workspace that no other tool knows
    Tidy,
    /// Run every leg of the tests that can run here, and name the others
    Test(test::Options),
    /// Run every test and measurement that needs GPUs, or pack them for another machine
    TestGpu(test_gpu::Options),
    /// Run the loom tests of the crates that depend on loom
    Loom,
    /// Fuzz one target, or each in turn
    Fuzz {
        target: Option<String>,
        /// How long to fuzz each target
        #[arg(long, default_value_t = 30)]
        seconds: u32,
    },
    /// Build every crate without features, with each alone and with all
    Features,
    /// Compile what programs depend on for Windows and for ARM
    Platforms {
        /// Fail where a target is not installed
        #[arg(long)]
        require: bool,
    },
    /// Run the benchmarks and keep their readings
    Bench {
        /// A revision whose readings were kept, to show ratios
        #[arg(long, value_name = "REVISION")]
        compare: Option<String>,
    },
    /// Build the documentation; a warning is an error
    Docs,
    /// What a change has to pass: check, docs and test
    Ci,
}

fn main() -> ExitCode {
    match run(Cli::parse().verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> Result<()> {
    let workspace = Workspace::load()?;
    match verb {
        Verb::Setup(options) => tools::setup(&workspace, &options),
        Verb::Check { require_tools } => check::run(&workspace, require_tools),
        Verb::Codegen(options) => codegen::run(&workspace, &options),
        Verb::Tidy => tidy::run(&workspace),
        Verb::Test(options) => test::run(&workspace, &options),
        Verb::TestGpu(options) => test_gpu::run(&workspace, &options),
        Verb::Loom => test::run_loom(&workspace),
        Verb::Fuzz { target, seconds } => fuzz::run(&workspace, target.as_deref(), seconds),
        Verb::Features => features::run(&workspace),
        Verb::Platforms { require } => platforms::run(require),
        Verb::Bench { compare } => bench::run(&workspace, compare.as_deref()),
        Verb::Docs => docs(),
        Verb::Ci => ci(&workspace),
    }
}

fn docs() -> Result<()> {
    let mut report = Report::default();
    check::docs(&mut report);
    report.finish()
}

fn ci(workspace: &Workspace) -> Result<()> {
    let mut report = Report::default();
    check::check(workspace, &mut report, false);
    check::docs(&mut report);
    test::test(workspace, &mut report, &test::Options::default());
    report.finish()
}

/// The names of the verbs, for the rules about texts that mention them.
fn verbs() -> Vec<String> {
    let cli = Cli::command();
    cli.get_subcommands().map(|verb| verb.get_name().into()).chain(["help".into()]).collect()
}

const ABOUT: &str = "Builds, checks and tests the workspace";

const EXAMPLES: &str = "\
Examples:
  cargo xtask check                        before a commit
  cargo xtask test                         every test that can run on this machine
  cargo xtask test --require host,8        with a device set that must be present
  cargo xtask test -- ring::               only tests with `ring::` in their name
  cargo xtask test-gpu --require cuda,2    on a machine with two GPUs
  cargo xtask test-gpu --bundle gpu-bundle a folder for a machine without Rust
  cargo xtask fuzz --seconds 60            each fuzz target for a minute
  cargo xtask bench --compare main         ratios against readings kept for `main`
  cargo xtask codegen                      after a change to a kernel in CUDA C
  cargo xtask setup --check                what is there, and how to get the rest
  cargo xtask help test                    the options of one verb";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn examples_name_verbs() {
        let known = verbs();
        for line in EXAMPLES.lines().filter_map(|line| line.trim().strip_prefix("cargo xtask ")) {
            let verb = line.split(' ').next().unwrap();
            assert!(known.iter().any(|name| name == verb), "{verb}");
        }
    }
}
