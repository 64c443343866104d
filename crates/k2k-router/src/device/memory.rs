//! Memory of a device and of the host that both ends of its lanes reach.

use std::sync::Arc;

use warpweft_core_types::{
    Buffer, BufferDesc, BufferView, CopyRegion, Deadline, Device, Op, QueueDesc, SemaphorePoint, Submission,
};

use super::layout::Layout;
use crate::ActorError;

/// Host memory that a device writes and reads.
#[derive(Debug, Clone)]
pub(crate) struct Window(Arc<dyn Buffer>);

impl Window {
    pub(crate) fn load(&self, at: u64) -> u64 {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        // Every place is one of the layout's, which the memory was made for.
        self.0.mapping().and_then(|mapping| mapping.load(at).ok()).unwrap_or(0)
    }

    pub(crate) fn store(&self, at: u64, value: u64) {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        if let Some(mapping) = self.0.mapping() {
            // As above.
            let _inside = mapping.store(at, value);
        }
    }

    pub(crate) fn view(&self) -> BufferView {
        BufferView::whole(Arc::clone(&self.0))
    }
}

/// What a device's executors have.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) device: BufferView,
    pub(crate) host: Window,
}

impl Memory {
    /// Allocates it, and tells the device where everything lies.
    pub(crate) fn new(device: &dyn Device, layout: &Layout, deadline: Deadline) -> Result<Self, ActorError> {
        let own = BufferView::whole(device.allocate(&BufferDesc::device(layout.device_bytes))?);
        let host = Window(device.allocate(&BufferDesc::host_visible(layout.host_bytes))?);
        let config = layout.config_bytes();
        let staging = BufferView::whole(device.allocate(&BufferDesc::host_visible(config.len() as u64))?);
        let failed = |reason: String| ActorError::Invalid { reason };
        staging.write(&config).map_err(|error| failed(error.to_string()))?;
        let head = own.slice(0..config.len() as u64).map_err(|error| failed(error.to_string()))?;
        let copy = CopyRegion::new(&staging, &head).map_err(|error| failed(error.to_string()))?;
        let queue = device.create_queue(&QueueDesc::default())?;
        let done = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
        let signals = std::slice::from_ref(&done);
        queue.submit(&Submission { waits: &[], ops: &[Op::Copy(copy)], signals })?;
        done.wait(deadline)?;
        Ok(Self { device: own, host })
    }
}

/// Gives out ranges of memory for states.
#[derive(Debug)]
pub(crate) struct States {
    /// Ranges that are free, by their beginning.
    free: Vec<(u64, u64)>,
}

const ALIGNMENT: u64 = 256;

impl States {
    pub(crate) fn new(at: u64, bytes: u64) -> Self {
        Self { free: vec![(at, bytes)] }
    }

    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let fit = self.free.iter().position(|&(_, free)| free >= bytes)?;
        let (at, free) = &mut self.free[fit];
        let taken = *at;
        (*at, *free) = (*at + bytes, *free - bytes);
        if *free == 0 {
            self.free.remove(fit);
        }
        Some(taken)
    }

    pub(crate) fn give_back(&mut self, at: u64, bytes: u64) {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let place = self.free.partition_point(|&(other, _)| other < at);
        self.free.insert(place, (at, bytes));
        self.free.dedup_by(|later, earlier| {
            let joins = earlier.0 + earlier.1 == later.0;
            if joins {
                earlier.1 += later.1;
            }
            joins
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_joined_and_given_out_again() {
        let mut states = States::new(1024, 1024);
        let all: Vec<_> = (0..4).map(|_| states.take(200)).collect();
        assert_eq!(all, [Some(1024), Some(1280), Some(1536), Some(1792)]);
        assert_eq!(states.take(0), None);
        states.give_back(1536, 200);
        states.give_back(1024, 0);
        assert_eq!(states.take(512), None);
        states.give_back(1280, 256);
        assert_eq!(states.take(768), Some(1024));
    }
}
