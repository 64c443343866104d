//! Queues that copies run on, and the semaphores that count their chunks.

use std::sync::Arc;

use warpweft_core_types::{
    CopyRegion, DeviceId, Op, Queue, QueueDesc, Semaphore, SemaphorePoint, Submission, SubmitError,
};

use crate::{
    TransferConfig, TransferError,
    devices::Devices,
    plan::{Hop, Plan, Runner},
};

/// A queue with a semaphore that rises by one with each chunk.
#[derive(Debug, Clone)]
pub(crate) struct Lane {
    /// `None` for a hop that a processor carries out.
    queue: Option<Arc<dyn Queue>>,
    capacity: usize,
    pub(crate) semaphore: Arc<dyn Semaphore>,
    /// The value before the copy's first chunk.
    base: u64,
}

impl Lane {
    fn open(
        devices: &Devices,
        runner: Runner,
        destination: DeviceId,
        config: &TransferConfig,
    ) -> Result<Self, TransferError> {
        // A copy has at most `ahead` chunks in a queue, and several small ones may follow one another.
        let capacity = QueueDesc::default().capacity.max(config.ahead as usize);
        let device = devices.get(match runner {
            Runner::Queue(device) => device,
            Runner::Processor => destination,
        })?;
        let queue = match runner {
            Runner::Queue(_) => Some(device.create_queue(&QueueDesc { capacity })?),
            Runner::Processor => None,
        };
        Ok(Self { queue, capacity, semaphore: device.create_semaphore(0)?, base: 0 })
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
    pub(crate) fn check_room(&self, chunks: u64) -> Result<(), TransferError> {
        let Some(queue) = &self.queue else { return Ok(()) };
        let outstanding = self.base.saturating_sub(self.semaphore.value());
        if outstanding + chunks > self.capacity as u64 {
            return Err(SubmitError::QueueFull { queue: queue.id(), capacity: self.capacity }.into());
        }
        Ok(())
    }

    /// Makes the copy that follows this one begin behind it.
    pub(crate) fn advance(&mut self, chunks: u64) {
        self.base += chunks;
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.failure().is_some())
            || self.semaphore.failure().is_some()
    }
}

/// A lane for each hop.
pub(crate) fn open(
    devices: &Devices,
    hops: &[Hop],
    destination: DeviceId,
    config: &TransferConfig,
) -> Result<Vec<Lane>, TransferError> {
    hops.iter().map(|hop| Lane::open(devices, hop.runner, destination, config)).collect()
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
        if let Some(behind) = lanes.get(hop + 1)
            && plan.reuses_slot(chunk)
        {
            // The chunk that had the slot before, maybe of an earlier copy over the same lanes.
            let read_out = behind.base + chunk + 1 - plan.slots;
            waits.push(SemaphorePoint::new(&behind.semaphore, read_out));
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
