//! One process for each GPU, of which one is killed in the middle of a sum: the others are told, end what is under way,
//! sum without it, and take in a process that is started in its place.

use std::{sync::Arc, time::Duration};

use anyhow::{Result, ensure};
use clap::ValueEnum;
use serde_json::json;
use warpweft_benches::deaths::{self, Bars, DeathConfig, Report};
use warpweft_cli::measure::Bar;
use warpweft_core_types::{Backend, Device, Features};
use warpweft_cuda::CudaBackend;
use warpweft_host::HostBackend;

use crate::rig::{report, say};

/// Shorter than the limit of the leg, so that the reason is told.
pub(crate) const LONGEST: Duration = Duration::from_secs(235);

/// Kills ranks in the middle of sums, one in each round.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How many are killed, one after the other.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Devices of the ranks.
    #[arg(long, value_enum, default_value_t = Devices::Cuda)]
    backend: Devices,
    /// How many ranks; one for each GPU, or four on host devices, if it is not given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    ranks: Option<u32>,
    /// Bytes of a sum.
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 20, value_parser = clap::value_parser!(u64).range(4..))]
    bytes: u64,
    /// Seconds after which no round begins.
    #[arg(long, value_name = "SECONDS", default_value_t = 210)]
    limit: u64,
    /// Who is killed and when; another each time if it is not given.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

/// Where a rank is.
#[derive(Debug, clap::Args)]
pub(crate) struct Place {
    backend: Devices,
    device: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Devices {
    /// GPUs, by NCCL.
    Cuda,
    /// Processor cores; there is nothing of NCCL in it.
    Host,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let (ranks, word) = match options.backend {
        // Nothing is opened here, and no context is in the way.
        Devices::Cuda => (u32::try_from(CudaBackend::new()?.devices()?.len())?, "cuda"),
        Devices::Host => (4, "host"),
    };
    let ranks = options.ranks.unwrap_or(ranks);
    ensure!(ranks > 1, "it needs two GPUs");
    let mut config = DeathConfig::new(&["kill-rank", word]);
    config.ranks = ranks;
    config.rounds = options.rounds;
    config.sizes = vec![options.bytes];
    config.limit = Duration::from_secs(options.limit);
    config.seed = options.seed.unwrap_or(config.seed);
    report(&json!({"backend": word, "ranks": ranks, "bytes": options.bytes, "seed": config.seed}));
    let rounds = deaths::run(&config, |number, round| report(&round.to_json(number)))?;
    let summary = Report::of(&rounds, &Bars::default());
    report(&summary.to_json());
    summary.steps().for_each(|(what, p50, max, bar)| {
        let bar = Bar::at_most(format!("{what}, in the slowest round"), max, bar, "ms");
        report(&json!({"what": what, "p50_ms": p50, "bar": bar}));
    });
    say(&summary.to_string());
    ensure!(summary.is_whole(), "{} rounds did not succeed", rounds.len() - summary.succeeded());
    ensure!(rounds.len() as u64 == u64::from(options.rounds), "there was time for {} rounds", rounds.len());
    Ok(())
}

pub(crate) fn play(place: &Place) -> Result<()> {
    let device: Arc<dyn Device> = match place.backend {
        Devices::Cuda => CudaBackend::new()?.open(place.device, Features::empty())?,
        Devices::Host => HostBackend::with_devices(1)?.open(0, Features::empty())?,
    };
    deaths::play(&device)
}
