//! Ranks in threads, one for each device.

use std::{sync::Arc, thread};

use libtest_mimic::Failed;
use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous};
use warpweft_comm::{CommConfig, CommError, Communicator, EngineKind};
use warpweft_core_types::{
    BufferDesc, BufferView, CopyRegion, Device, Features, Op, Queue, QueueDesc, SemaphorePoint, Submission,
};

use crate::{
    context::{Context, PATIENCE},
    harness::Verdict,
};

/// One rank.
pub(super) struct Place<'a> {
    pub(super) comm: Communicator,
    pub(super) device: &'a Arc<dyn Device>,
    pub(super) queue: Arc<dyn Queue>,
}

impl Place<'_> {
    pub(super) fn rank(&self) -> u32 {
        self.comm.rank()
    }

    pub(super) fn size(&self) -> u32 {
        self.comm.world_size()
    }

    pub(super) fn memory(&self, bytes: usize) -> Result<BufferView, Failed> {
        Ok(BufferView::whole(self.device.allocate(&BufferDesc::device(bytes as u64))?))
    }

    fn window(&self, bytes: u64) -> Result<BufferView, Failed> {
        Ok(BufferView::whole(self.device.allocate(&BufferDesc::host_visible(bytes))?))
    }

    pub(super) fn submit(&self, ops: &[Op<'_>]) -> Verdict {
        self.queue.submit(&Submission { ops, ..Submission::default() })?;
        Ok(())
    }

    fn run(&self, ops: &[Op<'_>]) -> Verdict {
        let done = SemaphorePoint::new(&self.device.create_semaphore(0)?, 1);
        let queue = self.device.create_queue(&QueueDesc::default())?;
        queue.submit(&Submission { ops, signals: std::slice::from_ref(&done), waits: &[] })?;
        Ok(done.wait(PATIENCE)?)
    }

    pub(super) fn write(&self, bytes: &[u8], view: &BufferView) -> Verdict {
        let window = self.window(bytes.len() as u64)?;
        window.write(bytes)?;
        self.run(&[Op::Copy(CopyRegion::new(&window, view)?)])
    }

    pub(super) fn upload(&self, bytes: &[u8]) -> Result<BufferView, Failed> {
        let memory = self.memory(bytes.len())?;
        self.write(bytes, &memory)?;
        Ok(memory)
    }

    pub(super) fn download(&self, view: &BufferView) -> Result<Vec<u8>, Failed> {
        let window = self.window(view.size())?;
        self.run(&[Op::Copy(CopyRegion::new(view, &window)?)])?;
        let mut bytes = vec![0; usize::try_from(view.size())?];
        window.read(&mut bytes)?;
        Ok(bytes)
    }
}

/// Runs the body on every rank, with as many ranks as there are devices up to `ranks`, on every engine that serves.
pub(super) fn each_engine(
    cx: &Context,
    ranks: u32,
    config: &CommConfig,
    body: impl Fn(&Place<'_>) -> Verdict + Sync,
) -> Verdict {
    let mut served = false;
    for engine in EngineKind::ALL {
        served |= in_ranks(cx, ranks, engine, config, &body)?;
    }
    if served { Ok(()) } else { Err("no engine serves these devices".into()) }
}

/// Runs the body on every rank, if the engine serves these devices; whether it does.
pub(super) fn in_ranks(
    cx: &Context,
    ranks: u32,
    engine: EngineKind,
    config: &CommConfig,
    body: impl Fn(&Place<'_>) -> Result<(), Failed> + Sync,
) -> Result<bool, Failed> {
    let devices = (0..ranks as usize).map(|position| cx.open_device(position, Features::empty()));
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    let config = CommConfig { engine: Some(engine), ..config.clone() };
    let meeting = Meeting::new();
    let outcomes: Vec<Result<bool, Failed>> = thread::scope(|scope| {
        let (config, body) = (&config, &body);
        let start = |(number, device)| {
            let rendezvous = Rendezvous::Meeting(Arc::clone(&meeting));
            scope.spawn(move || {
                let group = Group::join(rendezvous, JoinConfig::new(Rank(number), ranks), PATIENCE)?;
                let comm = match Communicator::create(group, device, config, PATIENCE) {
                    Err(CommError::NoEngine { .. }) => return Ok(false),
                    made => made?,
                };
                let queue = device.create_queue(&QueueDesc::default())?;
                let place = Place { comm, device, queue };
                body(&place)?;
                if place.comm.failure().is_none() {
                    // Whoever leaves ends the calls that others have still to make.
                    place.comm.barrier(PATIENCE)?;
                }
                Ok(true)
            })
        };
        let threads: Vec<_> = (0..ranks).zip(&devices).map(start).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a rank panicked".into())))
            .collect()
    });
    // The first error may be of a rank that another left alone, so all are told.
    let errors: Vec<String> = outcomes
        .iter()
        .zip(0..)
        .filter_map(|(outcome, rank): (_, u32)| {
            let error = outcome.as_ref().err()?;
            Some(format!("rank {rank}, engine {engine}: {}", error.message().unwrap_or_default()))
        })
        .collect();
    if !errors.is_empty() {
        return Err(errors.join("\n").into());
    }
    Ok(outcomes.into_iter().all(|outcome| matches!(outcome, Ok(true))))
}
