//! Collectives as operations of submissions, on the NCCL of this machine, with a rank for each GPU.

mod bench;
mod life;
mod number;
mod values;

use std::{sync::Arc, thread};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::json;
use warpweft_core_types::{
    BufferView, CollectiveCall, CollectiveGroup, CollectiveOp, Collectives, DType, Deadline,
    NativeCommunicator, NativeCommunicatorDesc, Op, Submission,
};

pub(crate) use bench::run as bench;

use crate::{
    checks::{self, Check},
    rig::{Bench, LIMIT, NotRun, Rig, report, say},
};

const CHECKS: &[Check<Ranks>] = &[
    ("every reduction of every type is right, in and out of place", values::reductions),
    ("every movement of every type is right, in and out of place", values::movements),
    ("sends and receives of one group", values::exchanges),
    ("a graph with collectives is replayed", life::graphs),
    ("collectives in a stream of cudarc's", life::imported),
    ("several queues of one rank", life::queues),
    ("memory of the library's, registered for one rank and for all", life::registered),
    ("collectives beside a resident", life::beside_resident),
    ("a rank that never comes is waited for as long as said", life::missing_rank),
    ("an abort ends what waits for a rank that never comes", life::aborted),
    ("an abort ends a graph that waits for a rank that never comes", life::aborted_graph),
    ("communicators dropped in another order on each rank", life::dropped_crosswise),
];

/// The devices, which are the ranks.
pub(crate) struct Ranks {
    rig: Rig,
}

/// A rank, in a thread of its own.
pub(crate) struct Rank<'a> {
    pub(crate) bench: &'a Bench,
    pub(crate) comm: Arc<dyn NativeCommunicator>,
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
        let rig = Rig::open()?;
        rig.describe()?;
        let ranks = Self { rig };
        let library = ranks.family()?.library()?;
        report(&json!({"collectives": library, "ranks": ranks.size()}));
        say(&format!("{library}, {} ranks", ranks.size()));
        Ok(ranks)
    }

    fn family(&self) -> Result<&dyn Collectives> {
        self.rig.first().device.collectives().context("the device has no collectives of its own")
    }

    fn size(&self) -> u32 {
        u32::try_from(self.rig.devices.len()).unwrap_or(u32::MAX)
    }

    /// Makes every device a rank, and runs each in a thread.
    fn each<T: Send>(&self, body: impl Fn(&Rank<'_>) -> Result<T> + Sync) -> Result<Vec<T>> {
        let (id, size) = (self.family()?.create_id()?, self.size());
        self.threads(|rank, bench| {
            let family = bench.device.collectives().context("the family")?;
            let desc = NativeCommunicatorDesc { id: id.clone(), rank, size, multiprocessors: None };
            let comm = family.join(&desc, Deadline::within(LIMIT * 3))?;
            body(&Rank { bench, comm })
        })
    }

    /// Does something with each device, in a thread of its own.
    fn threads<T: Send>(&self, body: impl Fn(u32, &Bench) -> Result<T> + Sync) -> Result<Vec<T>> {
        let body = &body;
        thread::scope(|scope| {
            let spawn = |(rank, bench)| scope.spawn(move || body(rank, bench));
            let threads: Vec<_> = (0..).zip(&self.rig.devices).map(spawn).collect();
            let joined = (0..).zip(threads).map(|(rank, thread): (u32, thread::ScopedJoinHandle<'_, _>)| {
                let ended: Result<T> = thread.join().map_err(|_| anyhow!("it panicked"))?;
                ended.with_context(|| format!("rank {rank}"))
            });
            joined.collect()
        })
    }

    /// What is not run on one GPU.
    fn need_two(&self) -> Result<()> {
        if self.size() < 2 { Err(NotRun("it needs two GPUs".to_owned()).into()) } else { Ok(()) }
    }
}

impl Rank<'_> {
    fn rank(&self) -> u32 {
        self.comm.rank()
    }

    fn size(&self) -> u32 {
        self.comm.size()
    }

    fn call<'a>(
        &self,
        op: CollectiveOp,
        dtype: DType,
        src: Option<&'a BufferView>,
        dst: Option<&'a BufferView>,
    ) -> Result<CollectiveCall<'a>> {
        Ok(CollectiveCall::new(op, dtype, (self.rank(), self.size()), src, dst)?)
    }

    /// Makes calls as one group and waits for them.
    fn run(&self, calls: &[CollectiveCall<'_>]) -> Result<()> {
        self.bench.run(&[Op::Collective(CollectiveGroup::new(&self.comm, calls))])
    }

    /// Makes calls as one group, and waits for nothing.
    fn enqueue(&self, calls: &[CollectiveCall<'_>]) -> Result<()> {
        let ops = [Op::Collective(CollectiveGroup::new(&self.comm, calls))];
        self.bench.queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_checks_apart() {
        let names: std::collections::BTreeSet<_> = CHECKS.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), CHECKS.len());
    }
}
