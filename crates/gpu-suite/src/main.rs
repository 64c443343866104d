//! The GPU suite: everything that is tested and measured on GPUs, in one program that needs nothing but a driver.
//!
//! `gpu-suite run --require cuda,2 --out results` runs every leg, each in a process of its own with a time limit,
//! keeps what they print and sums it up. Each leg can also be called by itself.

mod adapter;
mod bench;
mod checks;
mod child;
mod collectives;
mod faulted;
mod forked;
mod k2k;
mod kernels;
mod kill;
mod legs;
mod low_latency;
mod nccl;
mod nvml;
mod process;
mod rig;
mod run;
mod summary;
mod vulkan;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand, error::ErrorKind};

/// A benchmark says what a submission allocates.
#[global_allocator]
static ALLOCATOR: bench::alloc::Counting = bench::alloc::Counting;

/// Tests and measures the GPUs of this machine.
#[derive(Debug, Parser)]
#[command(name = "gpu-suite", version, after_help = EXAMPLES, arg_required_else_help = true)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

impl Args {
    /// Refuses what each word allows and all of them do not.
    fn checked(self) -> Result<Self, clap::Error> {
        match self.command {
            Command::Bench { part, quick: true } if part != bench::Part::Graph => {
                let text = "--quick goes with `bench graph` alone; the other parts know one size";
                Err(Self::command().error(ErrorKind::ArgumentConflict, text))
            }
            _ => Ok(self),
        }
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run every leg and sum them up.
    Run(run::Options),
    /// The conformance suite, with the options of a Rust test binary, --require and --only.
    #[command(disable_help_flag = true)]
    Conformance {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// What only CUDA devices do: foreign code, streams and contexts, masks, several processes.
    Checks,
    /// `nccl-rs` on this machine's NCCL, with a rank for each GPU.
    Nccl {
        /// Words in the names of checks to run.
        #[arg(default_value = "")]
        words: String,
    },
    /// Collectives as operations of submissions, with a rank for each GPU.
    Collectives {
        /// Words in the names of checks to run.
        #[arg(default_value = "")]
        words: String,
    },
    /// The engine for few bytes, among ranks of one GPU and between GPUs.
    LowLatency {
        /// Words in the names of checks to run.
        #[arg(default_value = "")]
        words: String,
    },
    /// Actors in CUDA C, on one GPU and between GPUs.
    K2k {
        /// Words in the names of checks to run.
        #[arg(default_value = "")]
        words: String,
    },
    /// Ranks that are processes, killed in the middle of collectives, and how the others go on.
    Kill(kill::Options),
    /// Graphs over devices: work of other libraries in between, and operands that are exchanged.
    Graphs,
    /// What becomes of devices and processes when something goes wrong for good.
    Fault,
    /// Measures beside the driver's own calls.
    Bench {
        /// What to measure.
        part: bench::Part,
        /// Few rounds and small sizes, to see that it works (graphs alone).
        #[arg(long)]
        quick: bool,
    },
    /// Plays the other process of a check.
    #[command(hide = true)]
    Child {
        #[command(subcommand)]
        role: child::Role,
    },
    /// Plays a rank that may be killed.
    #[command(hide = true)]
    KillRank(kill::Place),
    /// Anything else is a command of `warpweft`.
    #[command(external_subcommand)]
    Warpweft(Vec<String>),
}

const EXAMPLES: &str = "\
Examples:
  gpu-suite run --require cuda,2 --out results
  gpu-suite run --leg conformance --filter resident::
  gpu-suite conformance --only cuda copy::
  gpu-suite bench resident
  gpu-suite kill --rounds 50
  gpu-suite run --require vulkan,1 --leg vulkan
  gpu-suite perf copy --backend cuda -e 1G";

fn main() -> ExitCode {
    let program = || String::from("gpu-suite");
    let args = Args::try_parse().and_then(Args::checked).unwrap_or_else(|error| error.exit());
    let code = match args.command {
        Command::Run(options) => run::run(&options),
        Command::Conformance { args } => {
            let all = std::iter::once(program()).chain(args).collect();
            warpweft_conformance::run_suite(all, &["conformance".into()]).unwrap_or_else(|message| {
                rig::say(&format!("error: {message}"));
                ExitCode::from(2)
            })
        }
        Command::Checks => rig::bounded(|| checks::run(&rig::Rig::open()?)),
        Command::Nccl { words } => rig::bounded(|| nccl::run(&words)),
        Command::Collectives { words } => rig::bounded(|| collectives::run(&words)),
        Command::LowLatency { words } => rig::bounded(|| low_latency::run(&words)),
        Command::K2k { words } => rig::bounded(|| k2k::run(&words)),
        Command::Kill(options) => rig::bounded_by(kill::LONGEST, || kill::run(&options)),
        Command::KillRank(place) => rig::bounded_by(kill::LONGEST, || kill::play(&place)),
        Command::Fault => rig::bounded(|| checks::fault(&rig::Rig::open()?)),
        Command::Graphs => rig::bounded(checks::graphs),
        Command::Bench { part, quick } => rig::bounded(|| bench::run(part, quick)),
        Command::Child { role } => rig::bounded(|| child::play(&role)),
        Command::Warpweft(args) => warpweft_cli::run_with(std::iter::once(program()).chain(args)),
    };
    warpweft_cli::vulkan::wait_until_closed();
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn quick_goes_with_graphs_alone() {
        let parse = |call: &str| Args::try_parse_from(call.split(' ')).and_then(Args::checked);
        assert!(parse("gpu-suite bench graph --quick").is_ok());
        assert!(parse("gpu-suite bench submission").is_ok());
        let error = parse("gpu-suite bench submission --quick").unwrap_err().to_string();
        assert!(error.contains("--quick goes with `bench graph` alone"), "{error}");
    }
}
