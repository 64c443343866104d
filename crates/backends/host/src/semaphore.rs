//! Semaphores of host devices: a timeline whose waiters help with the device's work.

use std::{
    sync::{Arc, Weak},
    task::Waker,
};

use warpweft_core_types::{Deadline, DeviceId, Failure, Semaphore, SignalError, Timeline, WaitError};

use crate::{
    engine::{Engine, Task},
    idle::{Spinner, spin_until},
};

/// A semaphore of a host device.
#[derive(Debug)]
pub(crate) struct HostSemaphore {
    device: DeviceId,
    timeline: Timeline,
    /// Weak: work that waits for a semaphore must not keep the device's threads from ending.
    engine: Weak<Engine>,
}

impl HostSemaphore {
    pub(crate) fn new(device: DeviceId, initial: u64, engine: &Arc<Engine>) -> Self {
        Self { device, timeline: Timeline::new(initial), engine: Arc::downgrade(engine) }
    }

    fn is_settled(&self, value: u64) -> bool {
        self.timeline.value() >= value || self.timeline.failure().is_some()
    }

    /// Runs quick work of the device while it lasts, then spins a little.
    fn help(&self, value: u64, deadline: Deadline) {
        if let Some(engine) = self.engine.upgrade() {
            let quick = |task: &Task| match task {
                Task::Queue(queue) => queue.is_quick(deadline.remaining()),
                Task::Split(_) | Task::Slice(..) => false,
            };
            while !self.is_settled(value) && !deadline.is_past() && engine.help(quick) {}
        }
        spin_until(Spinner::Waiter, || self.timeline.value() >= value || deadline.is_past());
    }
}

impl Semaphore for HostSemaphore {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn value(&self) -> u64 {
        self.timeline.value()
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.timeline.failure()
    }

    fn promise(&self, value: u64) -> Result<u64, SignalError> {
        self.timeline.promise(value)
    }

    fn retract(&self, value: u64, before: u64) {
        self.timeline.retract(value, before);
    }

    fn signal(&self, value: u64) -> Result<(), SignalError> {
        self.timeline.signal(value)
    }

    fn fail(&self, failure: Arc<Failure>) {
        self.timeline.fail(failure);
    }

    fn wait(&self, value: u64, deadline: Deadline) -> Result<(), WaitError> {
        if !self.is_settled(value) {
            self.help(value, deadline);
        }
        self.timeline.wait(value, deadline)
    }

    fn wake_when(&self, value: u64, waker: Waker) {
        self.timeline.wake_when(value, waker);
    }

    fn forget(&self, value: u64, waker: &Waker) {
        self.timeline.forget(value, waker);
    }
}
