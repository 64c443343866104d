//! Its command line.

use std::{ffi::OsString, time::Duration};

use clap::Args;

use crate::args::parse_time;

#[derive(Debug, Args)]
#[command(after_help = "\
Each rank gets WARPWEFT_RANK, _WORLD_SIZE, _LOCAL_RANK, _LOCAL_WORLD_SIZE, _ADDRESS, _TOKEN and _RUN, and
torchrun's RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. What Slurm, Open MPI
or PMI said of the launcher itself is taken out.

Lines of output are marked with their rank. Standard input goes to rank 0, unless it is a terminal.
SIGINT, SIGTERM and SIGHUP are passed on to all ranks; a second one kills them. Under nohup SIGHUP is ignored.
When a rank fails, the others get SIGTERM, and SIGKILL after the time of --grace; what it has started gets
SIGTERM too. On Linux the ranks end with the launcher, however it ends.

Exit code: 0, or that of the rank that failed first; 128 + N if signal N ended it; 127 if there is no such
program, 126 if it cannot be run.

Examples:
  warpweft launch -n 4 -- python train.py --epochs 3
  warpweft launch -n 2 --json -- ./program | tail -n 1
  warpweft launch -n 8 --grace 30s --no-prefix -- ./program")]
pub(crate) struct Launch {
    /// How many ranks to start.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) ranks: u32,
    /// Time from SIGTERM to SIGKILL when a rank has failed.
    #[arg(long, value_name = "SECONDS", default_value = "5s", value_parser = parse_time)]
    pub(crate) grace: Duration,
    /// Port for MASTER_PORT; a free one if it is not given.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) master_port: Option<u16>,
    /// Pass output through as it is.
    #[arg(long)]
    pub(crate) no_prefix: bool,
    /// Print who ended how as one JSON object, the last line of standard output.
    #[arg(long)]
    pub(crate) json: bool,
    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct Rank {
    /// The process that has to be the parent.
    #[arg(long)]
    pub(crate) launcher: i32,
    /// How many files it may open, if the launcher has allowed itself more.
    #[arg(long)]
    pub(crate) files: Option<u64>,
    #[arg(last = true, required = true)]
    pub(crate) program: Vec<OsString>,
}
