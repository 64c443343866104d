//! The command lines of collectives.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use warpweft::{DType, ReduceOp, comm::EngineKind};

use crate::args::{Selection, parse_seconds, parse_size};

const AFTER: &str = "\
Columns, as in nccl-tests: size = bytes of the larger operand; time = median of a call, the slowest rank's, of
calls that are enqueued one after the other and waited for together; p99 of the rounds; algbw = size / time,
busbw = algbw times what the links carry for each byte, in GB/s of 10^9 bytes; wrong = elements that differ
from what they must be. Engines take turns, so that whatever the machine does meets all of them alike.

Every device is a rank, in a thread of its own. Under a launcher every process is one:

  warpweft launch -n 4 --no-prefix -- warpweft perf all_reduce

Exit code: 0, or 1 if a result was wrong.

Examples:
  warpweft perf all_reduce
  warpweft perf all_reduce -b 8 -e 1G -f 2 -d bf16 --backend cuda
  warpweft perf all_gather --engine host,planned --plot gather.svg
  warpweft perf reduce_scatter -d i32 -o max --devices 8 --json
  warpweft perf all_reduce -G 10                replays of a graph of so many calls
  warpweft perf all_reduce --blocking           each call waited for by itself";

#[derive(Debug, Clone, Args)]
#[command(after_help = AFTER)]
pub(crate) struct PerfCollective {
    #[command(flatten)]
    pub(crate) selection: Selection,
    /// Smallest size.
    #[arg(short = 'b', long, value_name = "BYTES", default_value = "8", value_parser = parse_size)]
    pub(crate) min: u64,
    /// Largest size.
    #[arg(short = 'e', long, value_name = "BYTES", default_value = "64M", value_parser = parse_size)]
    pub(crate) max: u64,
    /// Factor from one size to the next.
    #[arg(short = 'f', long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..))]
    pub(crate) factor: u64,
    /// Type of the elements: f64, f32, f16, bf16, f8e4m3, f8e5m2, i64, i32, i16, i8, u64, u32, u16, u8, bool.
    #[arg(short = 'd', long, value_name = "TYPE", default_value = "f32", value_parser = parse_dtype)]
    pub(crate) dtype: DType,
    /// Reduction: sum, prod, min, max, avg, and, or, xor.
    #[arg(short = 'o', long, value_name = "OP", default_value = "sum", value_parser = parse_op)]
    pub(crate) op: ReduceOp,
    /// The root of operations that have one.
    #[arg(short = 'r', long, value_name = "RANK", default_value_t = 0)]
    pub(crate) root: u32,
    /// Check the results of each size: 1 or 0.
    #[arg(short = 'c', long, value_name = "0|1", default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub(crate) check: u8,
    /// Calls of a round, enqueued together.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) iterations: u32,
    /// Rounds of each engine.
    #[arg(short = 'm', long, value_name = "N", default_value_t = 21, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) rounds: u32,
    /// Rounds before the clock counts.
    #[arg(short = 'w', long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(..=100_000))]
    pub(crate) warmup: u32,
    /// Put so many calls into a graph, and replay that; calls one by one if it is 0.
    #[arg(short = 'G', long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1000))]
    pub(crate) graph: u32,
    /// Wait for each call by itself.
    #[arg(long, conflicts_with = "graph")]
    pub(crate) blocking: bool,
    /// Results in the place of the operands; beside them if it is not given.
    #[arg(long)]
    pub(crate) in_place: bool,
    /// Memory of the operands.
    #[arg(long, value_enum, default_value_t = Memory::Device)]
    pub(crate) memory: Memory,
    /// Engines to measure side by side, separated by commas; all that serve the devices if none is named.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = parse_engine)]
    pub(crate) engine: Vec<EngineKind>,
    /// Measure which engine is the best for which calls, print that, and say for each size which takes the call where
    /// none is named.
    #[arg(long)]
    pub(crate) explain: bool,
    /// Folder that keeps what --explain measured, for the next time.
    #[arg(long, value_name = "FOLDER", requires = "explain")]
    pub(crate) tuning_cache: Option<PathBuf>,
    /// Time for each step.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    pub(crate) timeout: Duration,
    /// Draw bandwidth and time over size.
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Print one JSON object for each size and engine.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Memory {
    /// The devices' own.
    Device,
    /// Host memory that the devices reach.
    HostVisible,
}

fn parse_dtype(text: &str) -> Result<DType, String> {
    let names = || DType::ALL.map(DType::name).join(", ");
    let found = DType::ALL.into_iter().find(|dtype| dtype.name() == text);
    found.ok_or_else(|| format!("{text:?} is no type of elements; there are {}", names()))
}

fn parse_op(text: &str) -> Result<ReduceOp, String> {
    // A factor has no flag, so a sum of multiples has none either.
    let known = ReduceOp::ALL.into_iter().filter(|op| !matches!(op, ReduceOp::PremulSum(_)));
    let names: Vec<_> = known.clone().map(ReduceOp::name).collect();
    known
        .into_iter()
        .find(|op| op.name() == text)
        .ok_or_else(|| format!("{text:?} is no reduction; there are {}", names.join(", ")))
}

fn parse_engine(text: &str) -> Result<EngineKind, String> {
    let names = || EngineKind::ALL.map(EngineKind::name).join(", ");
    let found = EngineKind::ALL.into_iter().find(|kind| kind.name() == text);
    found.ok_or_else(|| format!("{text:?} is no engine; there are {}", names()))
}
