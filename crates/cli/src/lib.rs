//! The `warpweft` command as a library, so that benchmarks measure with the same code.
//!
//! `warpweft demo` shows what works on this machine, `warpweft perf` measures it beside the raw calls,
//! `warpweft topo` shows what is linked to what, `warpweft doctor` says what is missing and how to get it,
//! `warpweft actors` runs a ring of actors over the devices and shows what there is,
//! `warpweft graph` explains, draws and runs a graph that is written in a file, and `warpweft launch` starts the
//! processes of a job.
//! `warpweft --help` has examples.

mod actors;
mod args;
mod demo;
mod doctor;
mod flight;
#[cfg(any(feature = "cuda", feature = "vulkan"))]
mod floor;
#[cfg(not(any(feature = "cuda", feature = "vulkan")))]
#[path = "no_floor.rs"]
mod floor;
mod graph;
mod impersonate;
mod kernels;
mod launch;
pub mod measure;
mod output;
mod perf;
mod select;
mod topo;
#[cfg(feature = "vulkan")]
pub mod vulkan;

use std::{ffi::OsString, process::ExitCode};

use clap::Parser as _;

/// Runs the command with the arguments of the process.
///
/// The exit code is 0 for success, 1 for a failed check, 2 for a wrong call.
pub fn run() -> ExitCode {
    run_with(std::env::args_os())
}

/// The same with other arguments, the first of them the program's name.
pub fn run_with(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> ExitCode {
    let args = args::Args::parse_from(arguments);
    let result = match &args.command {
        args::Command::Demo(demo) => demo::run(demo),
        args::Command::Perf(perf) => perf::run(perf),
        args::Command::Actors(actors) => actors::run(actors),
        args::Command::Topo(topo) => topo::run(topo),
        args::Command::Doctor(doctor) => doctor::run(doctor),
        args::Command::Flight(flight) => flight::run(flight),
        args::Command::Graph(graph) => graph::run(graph),
        args::Command::Launch(launch) => launch::run(launch),
        args::Command::Rank(rank) => launch::become_rank(rank),
    };
    let code = result.unwrap_or_else(|error| output::fail(&error));
    #[cfg(feature = "vulkan")]
    vulkan::wait_until_closed();
    code
}
