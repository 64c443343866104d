//! `nccl-rs` on the NCCL of this machine, with one rank for each GPU.

mod bench;
mod calls;
mod life;

use std::{sync::Arc, thread, time::Duration};

use anyhow::{Context as _, Result, anyhow, ensure};
use cudarc::driver::{CudaContext, CudaStream, DeviceRepr, ValidAsZeroBits};
use nccl_rs::{
    Communicator, CommunicatorConfig, CommunicatorDesc, Dst, Element, Nccl, Src, Stream,
    cudarc::{moving, writing},
};
use serde_json::json;

pub(crate) use bench::run as bench;

use crate::{
    checks::{self, Check},
    rig::{LIMIT, NotRun, report, say},
};

const CHECKS: &[Check<Ranks>] = &[
    ("sums and the like of every type are right, in and out of place", calls::reductions),
    ("gathers, scatters and broadcasts move what they should", calls::movements),
    ("sends and receives in groups", calls::exchanges),
    ("factors of each rank's own", calls::factors),
    ("memory of the library's, registered", calls::registered),
    ("memory of the library's as a plain window", calls::plain_window),
    ("memory of the library's as a symmetric window", calls::symmetric_window),
    ("one-sided writes and signals", calls::signals),
    ("a thread without a current device makes a rank on the right one", life::right_device),
    ("two ranks on one device are refused", life::one_device_twice),
    ("a rank that never comes is waited for as long as said", life::missing_rank),
    ("communicators are split and shrunk", life::derived),
    ("64 communicators in a row", life::many),
    ("communicators dropped in another order on each rank", life::dropped_crosswise),
    ("what never ends is aborted", life::aborted),
    ("a forked process is told so", life::forked),
];

/// The library and as many ranks as there are GPUs.
pub(crate) struct Ranks {
    nccl: Nccl,
    size: u32,
}

/// A rank, in a thread of its own.
struct Rank {
    comm: Communicator,
    stream: Arc<CudaStream>,
}

/// Runs the checks with these words in their names.
pub(crate) fn run(words: &str) -> Result<()> {
    let ranks = Ranks::open()?;
    let wanted: Vec<_> = CHECKS.iter().filter(|(name, _)| name.contains(words)).copied().collect();
    ensure!(!wanted.is_empty(), "no check has {words:?} in its name");
    checks::all(&ranks, &wanted)
}

impl Ranks {
    fn open() -> Result<Self> {
        let nccl = Nccl::load()?;
        let size = u32::try_from(CudaContext::device_count()?)?;
        ensure!(size > 0, "there is no GPU");
        let newer = nccl.newer_functions();
        let missing: Vec<_> =
            newer.iter().filter(|(.., is_there)| !is_there).map(|(name, ..)| *name).collect();
        report(
            &json!({"nccl": nccl.version().to_string(), "path": nccl.path(), "ranks": size, "lacks": missing}),
        );
        say(&format!("NCCL {} at {}, {size} ranks", nccl.version(), nccl.path().display()));
        if !missing.is_empty() {
            say(&format!("bound but not run, since this NCCL lacks them: {}", missing.join(", ")));
        }
        Ok(Self { nccl, size })
    }

    /// Both ways in which a communicator may work.
    fn ways() -> [CommunicatorConfig; 2] {
        [true, false].map(|blocking| CommunicatorConfig::new().blocking(blocking).patience(LIMIT * 3))
    }

    /// Runs every rank in a thread that has no current device, and tells what they return.
    fn each<T: Send>(
        &self,
        config: &CommunicatorConfig,
        body: impl Fn(Rank) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let id = self.nccl.unique_id()?;
        self.threads(|rank| {
            let desc = CommunicatorDesc::new(id, rank, self.size).device(rank).config(config.clone());
            let comm = Communicator::init(&self.nccl, &desc)?;
            body(Rank { comm, stream: CudaContext::new(rank as usize)?.new_stream()? })
        })
    }

    fn threads<T: Send>(&self, body: impl Fn(u32) -> Result<T> + Sync) -> Result<Vec<T>> {
        let body = &body;
        thread::scope(|scope| {
            let threads: Vec<_> = (0..self.size).map(|rank| scope.spawn(move || body(rank))).collect();
            let joined = (0..).zip(threads).map(|(rank, thread): (u32, thread::ScopedJoinHandle<'_, _>)| {
                let ended: Result<T> = thread.join().map_err(|_| anyhow!("it panicked"))?;
                ended.with_context(|| format!("rank {rank}"))
            });
            joined.collect()
        })
    }

    /// What is not run on one GPU.
    fn need_two(&self) -> Result<()> {
        if self.size < 2 { Err(NotRun("it needs two GPUs".to_owned()).into()) } else { Ok(()) }
    }
}

impl Rank {
    fn stream(&self) -> Stream<'_> {
        Stream::from(&*self.stream)
    }

    /// Calls with a source and a destination of this many elements; what the destination holds afterwards.
    fn run<T: Element + DeviceRepr + ValidAsZeroBits>(
        &self,
        own: &[T],
        count: usize,
        call: impl FnOnce(&Src<'_>, &mut Dst<'_>) -> Result<(), nccl_rs::Error>,
    ) -> Result<Vec<T>> {
        let src = self.stream.clone_htod(own)?;
        let mut dst = self.stream.alloc_zeros::<T>(count)?;
        moving(&src, &mut dst, &self.stream, |src, dst, _| call(src, dst))?;
        Ok(self.stream.clone_dtoh(&dst)?)
    }

    /// Calls with a buffer that holds these elements; what it holds afterwards.
    fn run_in_place<T: Element + DeviceRepr>(
        &self,
        own: &[T],
        call: impl FnOnce(&mut Dst<'_>) -> Result<(), nccl_rs::Error>,
    ) -> Result<Vec<T>> {
        let mut buffer = self.stream.clone_htod(own)?;
        writing(&mut buffer, &self.stream, |buffer, _| call(buffer))?;
        Ok(self.stream.clone_dtoh(&buffer)?)
    }

    /// Waits for the stream, for a while.
    fn is_idle_within(&self, limit: Duration) -> Result<bool> {
        let end = std::time::Instant::now() + limit;
        let event = self.stream.record_event(None)?;
        while !event.is_complete() {
            if std::time::Instant::now() > end {
                return Ok(false);
            }
            thread::yield_now();
        }
        Ok(true)
    }
}
