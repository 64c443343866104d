//! Measurements, each beside the raw call of the same run.

pub(crate) mod collective;
pub(crate) mod copy;
pub(crate) mod graph;
pub(crate) mod k2k;
pub(crate) mod launch;

use std::process::ExitCode;

use crate::args::Perf;

pub(crate) fn run(perf: &Perf) -> anyhow::Result<ExitCode> {
    match perf {
        Perf::Copy(args) => copy::run(args),
        Perf::Launch(args) => launch::run(args),
        Perf::Graph(args) => graph::run(args),
        Perf::K2k(args) => k2k::run(args),
        other => match other.collective() {
            Some((kind, args)) => collective::run(kind, args),
            None => anyhow::bail!("there is no such measurement"),
        },
    }
}
