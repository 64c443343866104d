//! What a rank does: what it is told, a line at a time.

use std::{
    io::{BufRead as _, Write as _},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use warpweft::{
    BufferDesc, BufferView, CollectiveFailure, CopyRegion, DType, Device, Failure, Op, QueueDesc, ReduceOp,
    SemaphorePoint, Submission,
    bootstrap::{Group, JoinConfig, Rank, ReformConfig, Rendezvous, RunId, Successor},
    comm::{CommConfig, CommError, Communicator},
};

/// A little less than a round may take, so that whoever waits for nothing tells why.
const WITHIN: Duration = Duration::from_secs(18);

/// Sums that are over before the rank says that it is under way.
const FIRST: u32 = 10;

/// Plays a rank on this device until nothing more is to be read.
///
/// # Errors
///
/// Anything that should not be: a call that succeeds without the others, a wrong sum, a survivor that cannot go on.
pub fn play(device: &Arc<dyn Device>) -> anyhow::Result<()> {
    let mut place = Place { device: Arc::clone(device), comm: None };
    say("ready")?;
    for line in std::io::stdin().lock().lines() {
        if let Err(error) = place.perform(&line?) {
            say(&format!("{error:#}").replace('\n', " "))?;
            return Err(error);
        }
    }
    Ok(())
}

fn say(words: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{words}")?;
    Ok(out.flush()?)
}

struct Place {
    device: Arc<dyn Device>,
    comm: Option<Communicator>,
}

impl Place {
    fn perform(&mut self, line: &str) -> anyhow::Result<()> {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["first", rank, size, path] => {
                let config = JoinConfig::new(Rank(rank.parse()?), size.parse()?);
                let rendezvous = Rendezvous::file(path, RunId::from("deaths"));
                self.create(Group::join(rendezvous, config, WITHIN)?)?;
                say("met")
            }
            ["again", address, epoch, token, run, bytes] => {
                let (address, epoch) = (address.parse()?, epoch.parse()?);
                let successor = Successor { address, epoch, token: token.into(), run: run.into() };
                self.create(Group::rejoin(&successor, JoinConfig::new(Rank(0), 1), WITHIN)?)?;
                self.sum(bytes.parse()?)
            }
            ["successor"] => {
                let Successor { address, epoch, token, run } = self.comm()?.group().successor()?;
                say(&format!("again {address} {epoch} {} {run}", token.reveal()))
            }
            ["sums", bytes] => self.sums(bytes.parse()?),
            ["reform", newcomers, bytes] => {
                let config = ReformConfig { newcomers: newcomers.parse()?, ..ReformConfig::default() };
                self.comm = Some(self.comm()?.reform(&config, WITHIN)?);
                self.sum(bytes.parse()?)
            }
            _ => bail!("{line:?} is nothing to do"),
        }
    }

    fn comm(&self) -> anyhow::Result<&Communicator> {
        self.comm.as_ref().context("there is no communicator yet")
    }

    fn create(&mut self, group: Group) -> anyhow::Result<()> {
        self.comm = Some(Communicator::create(group, &self.device, &CommConfig::default(), WITHIN)?);
        Ok(())
    }

    /// Sums until a rank dies: the next is in the queue before the last is over.
    fn sums(&self, bytes: u64) -> anyhow::Result<()> {
        let (comm, queue) = (self.comm()?, self.device.create_queue(&QueueDesc::default())?);
        let (src, dst) = (self.allocate(bytes)?, [self.allocate(bytes)?, self.allocate(bytes)?]);
        self.write(&src, &values(comm.rank(), bytes))?;
        let (mut before, mut error, begun) = (None, None, Instant::now());
        for round in 0_u32.. {
            // Nobody kills anybody any more.
            ensure!(begun.elapsed() < WITHIN, "{round} sums, and nobody died");
            let call = comm.all_reduce(ReduceOp::Sum, DType::F32, &src, &dst[round as usize % 2])?;
            let outcome = call.on(&queue).and_then(|call| match before.replace(call) {
                Some(before) => before.wait(WITHIN),
                None => Ok(()),
            });
            if let Err(told) = outcome {
                error = Some(told);
                break;
            }
            if round == FIRST {
                say("under way")?;
            }
        }
        say(&format!("lost {}", lost(&error.context("the sums ended")?)?))?;
        // The last one may have been over when the rank died.
        if let Some(Err(error)) = before.map(|call| call.wait(WITHIN)) {
            lost(&error)?;
        }
        ensure!(!comm.is_healthy(), "a communicator without one of its ranks says that it is healthy");
        say("returned")
    }

    /// One sum that has to be right.
    fn sum(&self, bytes: u64) -> anyhow::Result<()> {
        let (comm, queue) = (self.comm()?, self.device.create_queue(&QueueDesc::default())?);
        let (src, dst) = (self.allocate(bytes)?, self.allocate(bytes)?);
        self.write(&src, &values(comm.rank(), bytes))?;
        comm.all_reduce(ReduceOp::Sum, DType::F32, &src, &dst)?.on(&queue)?.wait(WITHIN)?;
        say("summed")?;
        let found = self.read(&dst)?;
        let all = (0..comm.world_size()).map(|rank| floats(&values(rank, bytes)));
        let expected =
            all.reduce(|sums, more| sums.iter().zip(more).map(|(sum, value)| sum + value).collect());
        ensure!(Some(floats(&found)) == expected, "the sum is wrong");
        say("right")
    }

    fn allocate(&self, bytes: u64) -> anyhow::Result<BufferView> {
        Ok(BufferView::whole(self.device.allocate(&BufferDesc::device(bytes))?))
    }

    fn write(&self, view: &BufferView, bytes: &[u8]) -> anyhow::Result<()> {
        let staging = BufferView::whole(self.device.allocate(&BufferDesc::host_visible(view.size()))?);
        staging.write(bytes)?;
        self.copy(&staging, view)
    }

    fn read(&self, view: &BufferView) -> anyhow::Result<Vec<u8>> {
        let landing = BufferView::whole(self.device.allocate(&BufferDesc::host_visible(view.size()))?);
        self.copy(view, &landing)?;
        let mut bytes = vec![0; usize::try_from(view.size())?];
        landing.read(&mut bytes)?;
        Ok(bytes)
    }

    fn copy(&self, src: &BufferView, dst: &BufferView) -> anyhow::Result<()> {
        let queue = self.device.create_queue(&QueueDesc::default())?;
        let done = SemaphorePoint::new(&self.device.create_semaphore(0)?, 1);
        let (ops, signals) = ([Op::Copy(CopyRegion::new(src, dst)?)], std::slice::from_ref(&done));
        queue.submit(&Submission { ops: &ops, signals, waits: &[] })?;
        Ok(done.wait(WITHIN)?)
    }
}

/// Whose death an error tells of.
fn lost(error: &CommError) -> anyhow::Result<u32> {
    match error {
        CommError::Failed(failure) => match &**failure {
            Failure::Collective(CollectiveFailure::PeerLost { rank, .. }) => Ok(*rank),
            other => bail!("it failed for another reason: {other}"),
        },
        other => bail!("it ended in another way: {other:?}"),
    }
}

/// Small whole numbers, whose sums every order of additions gives exactly.
fn values(rank: u32, bytes: u64) -> Vec<u8> {
    let value = |place: u64| (place % 251 + u64::from(rank) * 3) as f32;
    (0..bytes / 4).flat_map(|place| value(place).to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}
