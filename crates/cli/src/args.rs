//! The command line.

use std::{path::PathBuf, time::Duration};

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

use crate::perf::{
    collective::{Kind, PerfCollective},
    graph::PerfGraph,
};

const EXAMPLES: &str = "\
Examples:
  warpweft demo                          four CPU devices, everything checked
  warpweft demo --devices 8 --links ring copies go round a ring
  warpweft perf copy -b 1M -e 256M       every pair of devices, beside the raw calls
  warpweft perf all_reduce               collectives, engines side by side
  warpweft perf k2k                      messages between actors, beside channels of threads
  warpweft topo --backend host --measure what is linked to what, and how fast
  warpweft demo --backend vulkan         the devices of any Vulkan driver
  warpweft graph FILE.json --run         a graph without code: who waits for whom, and does it come out right
  warpweft launch -n 4 -- ./program      four processes of one job
  warpweft doctor                        what is missing, and how to get it";

/// One program, many accelerators: try the devices, measure them, find out what is missing.
#[derive(Debug, Parser)]
#[command(name = "warpweft", version, after_help = EXAMPLES, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Find devices, run a kernel on each, move the results between all pairs, sum them up, run a graph over all, check every byte.
    Demo(Demo),
    /// Measure beside the raw calls of the same run.
    #[command(subcommand)]
    Perf(Perf),
    /// Run a ring of actors over the devices, and show what there is then.
    Actors(Actors),
    /// Show what is linked to what: on this machine, between devices, or in a file.
    Topo(Topo),
    /// Say what is there, what is missing, and how to get it.
    Doctor(Doctor),
    /// Say who is to blame for a communicator that failed.
    Flight(Flight),
    /// Show what was inferred of a graph in a file, draw it, and run it.
    Graph(crate::graph::GraphArgs),
    /// Start the processes of one job, watch them, and gather their output.
    Launch(crate::launch::Launch),
    /// Become one of these processes.
    #[command(hide = true)]
    Rank(crate::launch::Rank),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Perf {
    /// Copies between all pairs of devices, sizes swept, beside the raw calls.
    Copy(PerfCopy),
    /// Launch of an empty kernel and wait for it.
    Launch(PerfLaunch),
    /// Graphs of many small nodes: recording, preparing, submitting and replaying them.
    Graph(PerfGraph),
    /// Messages between actors, and between threads beside crossbeam-channel and flume.
    K2k(PerfK2k),
    /// Every rank gets what all ranks' elements reduce to.
    #[command(name = "all_reduce")]
    AllReduce(PerfCollective),
    /// Every rank gets what all have.
    #[command(name = "all_gather")]
    AllGather(PerfCollective),
    /// Every rank gets a part of what all ranks' elements reduce to.
    #[command(name = "reduce_scatter")]
    ReduceScatter(PerfCollective),
    /// Every rank gets what one has.
    Broadcast(PerfCollective),
    /// One rank gets what all ranks' elements reduce to.
    Reduce(PerfCollective),
    /// One rank gets what all have.
    Gather(PerfCollective),
    /// Every rank gets a part of what one has.
    Scatter(PerfCollective),
    /// Every rank gets a part of what each has.
    #[command(name = "all_to_all")]
    AllToAll(PerfCollective),
    /// Every rank sends to the next and receives from the one before.
    #[command(name = "send_recv")]
    SendRecv(PerfCollective),
}

impl Perf {
    /// Which collective, if it is one.
    pub(crate) const fn collective(&self) -> Option<(Kind, &PerfCollective)> {
        Some(match self {
            Self::Copy(_) | Self::Launch(_) | Self::Graph(_) | Self::K2k(_) => return None,
            Self::AllReduce(args) => (Kind::AllReduce, args),
            Self::AllGather(args) => (Kind::AllGather, args),
            Self::ReduceScatter(args) => (Kind::ReduceScatter, args),
            Self::Broadcast(args) => (Kind::Broadcast, args),
            Self::Reduce(args) => (Kind::Reduce, args),
            Self::Gather(args) => (Kind::Gather, args),
            Self::Scatter(args) => (Kind::Scatter, args),
            Self::AllToAll(args) => (Kind::AllToAll, args),
            Self::SendRecv(args) => (Kind::SendRecv, args),
        })
    }
}

/// Which devices to use.
#[derive(Debug, Clone, ClapArgs)]
pub(crate) struct Selection {
    /// Backends whose devices to use (host, cuda, vulkan), separated by commas.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = "host")]
    pub(crate) backend: Vec<String>,
    /// How many host devices to make.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) devices: u32,
    /// How host devices are linked with each other.
    #[arg(long, value_enum, default_value_t = Links::All)]
    pub(crate) links: Links,
    /// How many devices to make of each Vulkan device; they reach each other's memory.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) copies: u32,
    /// Make host devices with the devices and links of a topology file (see `warpweft topo --help`).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["devices", "links"])]
    pub(crate) impersonate: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Links {
    /// Every pair.
    All,
    /// 0-1-2-3: copies between the ends are relayed.
    Chain,
    /// A chain whose ends are joined.
    Ring,
    /// None: copies pass through host memory.
    None,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  warpweft demo
  warpweft demo --links chain --json
  warpweft demo --fault corrupt          see a failed check
  warpweft demo --impersonate dgx.txt    on the devices and links of another machine
  warpweft demo --backend host,cuda      CPU devices and GPUs together
  warpweft demo --backend vulkan --copies 2
                                         a Vulkan driver's devices, each opened twice")]
pub(crate) struct Demo {
    #[command(flatten)]
    pub(crate) selection: Selection,
    /// Bytes each device works on.
    #[arg(long, value_name = "BYTES", default_value = "4M", value_parser = parse_size)]
    pub(crate) size: u64,
    /// Break something on purpose: the demo must notice.
    #[arg(long, value_enum, value_name = "KIND")]
    pub(crate) fault: Option<Fault>,
    /// Time for each step.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_seconds)]
    pub(crate) timeout: Duration,
    /// Save what the devices did as a trace for Perfetto or Chrome's tracing page.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Save the graph of the demo in this folder, as graph.svg and as graph.dot for Graphviz, and when its nodes ran as
    /// graph.json for Perfetto or Chrome's tracing page.
    #[arg(long, value_name = "DIR")]
    pub(crate) save_graph: Option<PathBuf>,
    /// Print one JSON object with counts of what was checked.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    /// Copies change some of the bytes they move.
    Corrupt,
    /// Copies fail.
    Copy,
    /// Launches fail.
    Launch,
    /// Work is done and never signalled.
    Silence,
    /// Devices die after a few steps.
    Death,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Columns: p50 and p99 of one copy from call to arrival; algbw = bytes / p50, in GB/s of 10^9 bytes; raw = the
driver's own calls for as many bytes in the same run, interleaved, or one thread's memcpy where there is no
driver; ratio = raw p50 / p50; pinned = host memory that the device reaches by itself.
With --queued, a row is N copies from the first call to the last arrival, and raw does the same.

Examples:
  warpweft perf copy
  warpweft perf copy -b 1M -e 1G -f 4 --links chain
  warpweft perf copy --both --json > copies.jsonl
  warpweft perf copy -b 16M -e 16M --queued 8 --bar 0.97
  warpweft perf copy --backend cuda -e 1G     GPUs, beside the driver's copies
  warpweft perf copy --backend host,cuda      between CPU devices and GPUs too
  warpweft perf copy --backend vulkan --copies 2
                                              Vulkan devices, beside vkCmdCopyBuffer")]
pub(crate) struct PerfCopy {
    #[command(flatten)]
    pub(crate) selection: Selection,
    /// Smallest size.
    #[arg(short = 'b', long, value_name = "BYTES", default_value = "64K", value_parser = parse_size)]
    pub(crate) min: u64,
    /// Largest size.
    #[arg(short = 'e', long, value_name = "BYTES", default_value = "64M", value_parser = parse_size)]
    pub(crate) max: u64,
    /// Factor from one size to the next.
    #[arg(short = 'f', long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..))]
    pub(crate) factor: u64,
    /// Timed rounds of each size.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 21, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) iterations: u32,
    /// Rounds before the clock counts.
    #[arg(short = 'w', long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(..=100_000))]
    pub(crate) warmup: u32,
    /// Copy both ways at once and count the bytes of both.
    #[arg(long)]
    pub(crate) both: bool,
    /// Start so many copies before the first is waited for, and count the bytes of all.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) queued: u32,
    /// Say of each row whether its ratio is this or better.
    #[arg(long, value_name = "RATIO", value_parser = parse_ratio)]
    pub(crate) bar: Option<f64>,
    /// Print one JSON object for each row.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  warpweft perf launch -n 10000
  warpweft perf launch --backend cuda         beside the driver's launches
  warpweft perf launch --backend vulkan       beside vkQueueSubmit and a fence")]
pub(crate) struct PerfLaunch {
    #[command(flatten)]
    pub(crate) selection: Selection,
    /// Timed rounds.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) iterations: u32,
    /// Rounds before the clock counts.
    #[arg(short = 'w', long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(..=10_000_000))]
    pub(crate) warmup: u32,
    /// Print one JSON object for each row.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Rows: lane, crossbeam and flume are two threads and their channels, by turns; the others are actors and the host.
p50 and p99 are half of an answered round trip for pairs, and the whole of it for ask; rate counts messages that
were served. Every payload is checked: lost, duplicated and reordered have to be 0.

Examples:
  warpweft perf k2k
  warpweft perf k2k --size 4K --devices 2
  warpweft perf k2k --json > messages.jsonl")]
pub(crate) struct PerfK2k {
    #[command(flatten)]
    pub(crate) selection: Selection,
    /// Bytes of each message, at least 16.
    #[arg(long, value_name = "BYTES", default_value = "64", value_parser = parse_size)]
    pub(crate) size: u64,
    /// Messages of each round.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(100..=100_000_000))]
    pub(crate) messages: u32,
    /// Rounds, in which all take their turns.
    #[arg(short = 'r', long, value_name = "N", default_value_t = 21, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) rounds: u32,
    /// Print one JSON object for each row.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Examples:
  warpweft actors
  warpweft actors --devices 8 --links chain --json
  warpweft actors --trace trace.json     what handlers did, for Perfetto or Chrome's tracing page")]
pub(crate) struct Actors {
    #[command(flatten)]
    pub(crate) selection: Selection,
    /// How often the token goes round.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) rounds: u32,
    /// Save what handlers did.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What has a meaning only for opened devices, and for one topology only.
const FROM_DEVICES: [&str; 7] = ["backend", "devices", "links", "copies", "measure", "size", "cache"];
const FOR_ONE: [&str; 5] = ["import", "svg", "dot", "nccl", "save"];

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Reads nvidia-smi topo -m, topo -p2p and nvlink -s, NCCL and RCCL topology XML, hwloc XML,
rocm-smi --showtopo, xpu-smi topology -m, and what --save writes; the format is found by content.
Exit code: 0, or 1 if --diff finds a difference, or 2 for a file that is not right.

Examples:
  warpweft topo
  warpweft topo --backend host --measure
  warpweft topo --backend host,cuda --measure
  warpweft topo --backend vulkan --copies 2 --measure
  nvidia-smi topo -m > machine.txt; warpweft topo --import machine.txt --svg machine.svg
  warpweft topo --import machine.xml --json
  warpweft topo --diff before.json after.json")]
pub(crate) struct Topo {
    /// Show the devices of these backends instead of the machine, separated by commas.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub(crate) backend: Option<Vec<String>>,
    /// How many host devices to make.
    #[arg(long, value_name = "N", default_value_t = 4, requires = "backend", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) devices: u32,
    /// How host devices are linked with each other.
    #[arg(long, value_enum, default_value_t = Links::All, requires = "backend")]
    pub(crate) links: Links,
    /// How many devices to make of each Vulkan device.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "backend", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) copies: u32,
    /// Time every link and check the bytes that cross it.
    #[arg(long, requires = "backend")]
    pub(crate) measure: bool,
    /// Bytes of each copy that is timed for bandwidth.
    #[arg(long, value_name = "BYTES", default_value = "64M", requires = "measure", value_parser = parse_size)]
    pub(crate) size: u64,
    /// Keep measurements in this file, and use those in it for the same devices and drivers.
    #[arg(long, value_name = "FILE", requires = "measure")]
    pub(crate) cache: Option<PathBuf>,
    /// Read this file instead of the machine.
    #[arg(long, value_name = "FILE", conflicts_with_all = FROM_DEVICES)]
    pub(crate) import: Option<PathBuf>,
    /// Print what changed from one file to another.
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = FROM_DEVICES, conflicts_with_all = FOR_ONE)]
    pub(crate) diff: Vec<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a picture.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Write a graph for Graphviz.
    #[arg(long, value_name = "FILE")]
    pub(crate) dot: Option<PathBuf>,
    /// Write a file for NCCL_TOPO_FILE.
    #[arg(long, value_name = "FILE")]
    pub(crate) nccl: Option<PathBuf>,
    /// Write everything that is known, to be imported again.
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
A communicator whose configuration names a folder writes a file for each rank there when it fails: its last
calls, and which of them were over. This compares them.

Exit code: 0, or 1 if somebody is to blame.

Examples:
  warpweft flight records/
  warpweft flight records/ --last 50
  warpweft flight records/ --json")]
pub(crate) struct Flight {
    /// The folder with the records.
    pub(crate) folder: PathBuf,
    /// Calls of each rank to show.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) last: usize,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Exit code: 0 if everything that the chosen backends need is there, 1 if something is missing.

Examples:
  warpweft doctor --json
  warpweft doctor --backend cuda         driver, devices, peers, residents, compiler
  warpweft doctor --backend vulkan       loader, drivers, devices, what each of them lacks")]
pub(crate) struct Doctor {
    /// Backends that must work, separated by commas.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = "host")]
    pub(crate) backend: Vec<String>,
    /// Find out which calls of the CUDA driver wait for kernels that stay on a device; takes some seconds.
    #[arg(long)]
    pub(crate) probe_resident: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Reads `4096`, `64K`, `1M`, `2GiB` or `1T`: binary units, as nccl-tests reads them.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size like 4096, 64K, 1M or 2GiB");
    let unit = text.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(unit);
    let shift = match unit.to_ascii_uppercase().as_str() {
        "" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return Err(wrong()),
    };
    let count: u64 = digits.parse().map_err(|_| wrong())?;
    count.checked_mul(1 << shift).filter(|&size| size > 0).ok_or_else(wrong)
}

fn parse_ratio(text: &str) -> Result<f64, String> {
    let ratio: Option<f64> = text.parse().ok();
    ratio
        .filter(|ratio| ratio.is_finite() && *ratio > 0.0)
        .ok_or_else(|| format!("{text:?} is not a ratio above 0, such as 0.97"))
}

/// Reads `5`, `0.5s`, `200ms` or `2m`: seconds if nothing is said.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a time such as 5, 0.5s, 200ms or 2m");
    let unit = text.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit);
    let scale = match unit {
        "" | "s" => 1.0,
        "ms" => 1e-3,
        "m" | "min" => 60.0,
        _ => return Err(wrong()),
    };
    let number: f64 = number.parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * scale).map_err(|_| wrong())
}

/// The same, and not nothing.
pub(crate) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no time to wait; 5 or 200ms would be");
    parse_time(text).and_then(|time| if time.is_zero() { Err(wrong()) } else { Ok(time) })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn sizes_read_as_in_nccl_tests() {
        for (text, size) in [
            ("1", 1),
            ("64K", 65536),
            ("64k", 65536),
            ("3M", 3 << 20),
            ("2G", 2 << 30),
            ("2GiB", 2 << 30),
            ("64KiB", 65536),
            ("1T", 1 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(size), "{text}");
        }
        for text in ["", "K", "0", "-1", "1KB", "1.5M", "1KK", "99999999999G", "1 M", "1é", "éK"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn ratios_are_positive_and_finite() {
        assert_eq!(parse_ratio("0.97"), Ok(0.97));
        for text in ["", "0", "-1", "nan", "inf", "97%"] {
            assert!(parse_ratio(text).is_err(), "{text}");
        }
    }

    #[test]
    fn seconds_are_positive_and_finite() {
        for (text, ms) in
            [("5", 5000), ("5s", 5000), ("0.5", 500), ("200ms", 200), ("2m", 120_000), ("1min", 60_000)]
        {
            assert_eq!(parse_seconds(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        assert_eq!(parse_time("0"), Ok(Duration::ZERO));
        for text in ["", "0", "0s", "-1", "nan", "inf", "1e300", "soon", "s", "5h"] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
    }
}
