//! Queues that copies run on, and the semaphores that count their chunks.

use std::{collections::HashMap, sync::Arc};

use warpweft_core_types::{
    CopyRegion, DeviceId, Op, Queue, QueueDesc, Semaphore, SemaphorePoint, Submission, SubmitError,
};

use crate::{
    TransferError,
    devices::Devices,
    plan::{Plan, Runner},
    route::Stop,
};

/// A queue with a semaphore that rises by one with each chunk.
#[derive(Debug, Clone)]
pub(crate) struct Lane {
    /// `None` for a hop that a processor carries out.
    queue: Option<Arc<dyn Queue>>,
    pub(crate) semaphore: Arc<dyn Semaphore>,
    /// The value before the copy's first chunk.
    base: u64,
}

impl Lane {
    fn open(devices: &Devices, device: DeviceId) -> Result<Self, TransferError> {
        let device = devices.get(device)?;
        Ok(Self {
            queue: Some(device.create_queue(&QueueDesc::default())?),
            semaphore: device.create_semaphore(0)?,
            base: 0,
        })
    }

    /// The point at which this many of the copy's chunks are done.
    pub(crate) fn done(&self, chunks: u64) -> SemaphorePoint {
        SemaphorePoint::new(&self.semaphore, self.base + chunks)
    }

    /// How many of the copy's chunks are done.
    pub(crate) fn count(&self) -> u64 {
        self.semaphore.value().saturating_sub(self.base)
    }

    /// Refuses a copy that would not fit as a whole, before any of it is handed over.
    fn check_room(&self, chunks: u64) -> Result<(), TransferError> {
        let Some(queue) = &self.queue else { return Ok(()) };
        let capacity = QueueDesc::default().capacity;
        let outstanding = self.base.saturating_sub(self.semaphore.value());
        if outstanding + chunks > capacity as u64 {
            return Err(SubmitError::QueueFull { queue: queue.id(), capacity }.into());
        }
        Ok(())
    }

    fn is_broken(&self) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.failure().is_some())
            || self.semaphore.failure().is_some()
    }
}

/// Lanes kept open for copies that follow one another, one for each pair of neighbouring stops.
#[derive(Debug, Default)]
pub(crate) struct SharedLanes(HashMap<(Stop, Stop), Lane>);

impl SharedLanes {
    /// The lanes of a route. They stay the copy's until [`SharedLanes::advance`]: the caller holds the lock.
    pub(crate) fn of(
        &mut self,
        devices: &Devices,
        stops: &[Stop],
        plan: &Plan,
    ) -> Result<Vec<Lane>, TransferError> {
        let mut lanes = Vec::with_capacity(plan.hops.len());
        for (key, hop) in keys(stops).zip(&plan.hops) {
            if self.0.get(&key).is_none_or(Lane::is_broken) {
                self.0.insert(key, dedicated_lane(devices, plan, hop.runner)?);
            }
            lanes.extend(self.0.get(&key).cloned());
        }
        lanes.iter().try_for_each(|lane| lane.check_room(plan.chunk_count()))?;
        Ok(lanes)
    }

    /// Notes that `chunks` more were submitted to a route's lanes.
    pub(crate) fn advance(&mut self, stops: &[Stop], chunks: u64) {
        for key in keys(stops) {
            if let Some(lane) = self.0.get_mut(&key) {
                lane.base += chunks;
            }
        }
    }

    /// Forgets a route's lanes after a submission failed half-way, so that their counts may be wrong.
    pub(crate) fn forget(&mut self, stops: &[Stop]) {
        for key in keys(stops) {
            self.0.remove(&key);
        }
    }
}

/// One key for each hop; a local copy runs on a lane of its own.
fn keys(stops: &[Stop]) -> impl Iterator<Item = (Stop, Stop)> {
    let local = (stops.len() == 1).then(|| (stops[0], stops[0]));
    stops.array_windows().map(|&[from, to]| (from, to)).chain(local)
}

/// Lanes for one copy alone, so that it can be stopped without harm to others.
pub(crate) fn dedicated(devices: &Devices, plan: &Plan) -> Result<Vec<Lane>, TransferError> {
    plan.hops.iter().map(|hop| dedicated_lane(devices, plan, hop.runner)).collect()
}

fn dedicated_lane(devices: &Devices, plan: &Plan, runner: Runner) -> Result<Lane, TransferError> {
    match runner {
        Runner::Queue(device) => Lane::open(devices, device),
        Runner::Processor => {
            Ok(Lane { queue: None, semaphore: devices.get(plan.dst.device())?.create_semaphore(0)?, base: 0 })
        }
    }
}

/// Hands one chunk to the queues of all hops that have one.
///
/// Each hop waits on its device for the hop before, and for the slot it writes to be read out. All it waits
/// for was submitted earlier or is done by a processor that never waits for a queue, so that copies cannot
/// block each other for good.
pub(crate) fn submit_chunk(
    plan: &Plan,
    lanes: &[Lane],
    chunk: u64,
    after: &[SemaphorePoint],
) -> Result<(), TransferError> {
    for (hop, lane) in lanes.iter().enumerate() {
        let Some(queue) = &lane.queue else { continue };
        let mut waits: Vec<SemaphorePoint> = Vec::new();
        match hop.checked_sub(1) {
            None if chunk == 0 => waits.extend_from_slice(after),
            None => {}
            Some(before) => waits.push(lanes[before].done(chunk + 1)),
        }
        if let (Some(behind), Some(earlier)) = (lanes.get(hop + 1), chunk.checked_sub(plan.slots)) {
            waits.push(behind.done(earlier + 1));
        }
        let (src, dst) = plan.views(hop, chunk)?;
        queue.submit(&Submission {
            waits: &waits,
            ops: &[Op::Copy(CopyRegion::new(&src, &dst)?)],
            signals: &[lane.done(chunk + 1)],
        })?;
    }
    Ok(())
}
