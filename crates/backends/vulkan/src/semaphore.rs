//! Semaphores of Vulkan devices: a timeline of the host's, and the tickets that stand for its values to come.
//!
//! One semaphore may be raised by queues of several devices and by the host, in which the driver's semaphores of one
//! device cannot take part. So each queue counts on a line of its own, and a value here is a ticket for one of those.

use std::{
    any::Any,
    collections::VecDeque,
    hint,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::Waker,
    time::{Duration, Instant},
};

use smallvec::SmallVec;
use warpweft_core_types::{
    Deadline, DeviceId, DriverError, Failure, Semaphore, SemaphorePoint, SignalError, Timeline, WaitError,
};
use warpweft_polled::{Polled, Reactor};

use crate::{gpu::Gpu, queue::QueueCore, timeline::Ticket};

/// A waiting thread waits with the driver for this long, then leaves it to the reactor and sleeps: the driver does not
/// know of values that the host raises, and of failures.
const LOOK: Duration = Duration::from_millis(10);

/// Before that it asks for this long without a pause: a driver that waits for an interrupt tells of short work late. Not
/// where the device is made of threads, which need the processors.
const SPIN: Duration = Duration::from_micros(300);

/// Wakers to be called once no lock is held.
pub(crate) type Wakers = SmallVec<[Waker; 4]>;

/// A semaphore of a Vulkan device.
#[derive(Debug)]
pub(crate) struct VulkanSemaphore {
    device: DeviceId,
    timeline: Timeline,
    /// The last value whose ticket was seen to be reached. The timeline follows when the signal's queue is reaped,
    /// since raising it wakes others, and whoever only asks for the value may hold locks of their own.
    seen: AtomicU64,
    reactor: Arc<Reactor<QueueCore>>,
    coming: Mutex<Coming>,
}

#[derive(Debug, Default)]
struct Coming {
    /// Signals that were submitted to a device and are not reached yet, rising.
    signals: VecDeque<Signal>,
    /// Queues that wait for a signal of at least this value to be submitted.
    watchers: Vec<(u64, Waker)>,
}

/// A value that is reached when a submission is over.
#[derive(Debug, Clone)]
struct Signal {
    value: u64,
    ticket: Ticket,
    queue: Weak<QueueCore>,
}

/// How a submission can come to wait for a point.
#[derive(Debug)]
pub(crate) enum Readiness {
    /// There is nothing to wait for.
    Reached,
    /// By waiting for this ticket, on its device.
    Submitted(Ticket),
    /// Not yet: hold the work on the host.
    Unknown,
}

impl VulkanSemaphore {
    pub(crate) fn new(device: DeviceId, initial: u64, reactor: &Arc<Reactor<QueueCore>>) -> Self {
        Self {
            device,
            timeline: Timeline::new(initial),
            seen: AtomicU64::new(initial),
            reactor: Arc::clone(reactor),
            coming: Mutex::default(),
        }
    }

    fn of(semaphore: &Arc<dyn Semaphore>) -> Option<&Self> {
        let semaphore: &dyn Any = semaphore.as_ref();
        semaphore.downcast_ref()
    }

    /// How a submission to `gpu` can come to wait for `value`; the failure, if it will never be reached.
    fn readiness(&self, value: u64, gpu: &Arc<Gpu>) -> Result<Readiness, Arc<Failure>> {
        // Failure first: a value reached before a failure must be found after it.
        let failure = self.timeline.failure();
        if self.known() >= value {
            return Ok(Readiness::Reached);
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        if let Some(signal) = self.coming().first_at(value).filter(|signal| signal.is_on(gpu)) {
            return Ok(Readiness::Submitted(signal.ticket.clone()));
        }
        // It may have been reached, and its signal forgotten, between the two looks.
        Ok(if self.known() >= value { Readiness::Reached } else { Readiness::Unknown })
    }

    /// The value, without asking the driver.
    fn known(&self) -> u64 {
        // Acquire: what whoever saw the ticket reached had seen before is visible to whoever sees the value.
        self.timeline.value().max(self.seen.load(Ordering::Acquire))
    }

    /// Wakes `waker` once a submission to `gpu` can wait for `value`, and when it is reached or has failed.
    fn watch(&self, value: u64, gpu: &Arc<Gpu>, waker: &Waker) {
        let mut coming = self.coming();
        let known = coming.watchers.iter().any(|(other, w)| *other == value && w.will_wake(waker));
        // What another device will reach has to be waited for here until it is.
        let submitted = coming.first_at(value).map(|signal| signal.is_on(gpu));
        let ready = submitted == Some(true) || self.known() >= value;
        if !known && !ready && submitted.is_none() {
            coming.watchers.push((value, waker.clone()));
        }
        drop(coming);
        if ready {
            waker.wake_by_ref();
        } else {
            self.wake_when(value, waker.clone());
        }
    }

    /// Notes that `value` is reached with the ticket, and collects who waited for that news.
    fn submitted(&self, value: u64, ticket: &Ticket, queue: &Arc<QueueCore>, wakers: &mut Wakers) {
        let mut coming = self.coming();
        let signal = Signal { value, ticket: ticket.clone(), queue: Arc::downgrade(queue) };
        let behind = coming.signals.iter().rposition(|other| other.value < value).map_or(0, |at| at + 1);
        coming.signals.insert(behind, signal);
        wakers.extend(coming.watchers.extract_if(.., |(wanted, _)| *wanted <= value).map(|(_, w)| w));
    }

    /// Takes note of a value whose ticket is reached, and wakes nobody: the signal's queue does.
    fn saw(&self, value: u64) {
        // Release: see `known`. Before the signal goes, so that one of the two is found.
        self.seen.fetch_max(value, Ordering::Release);
        self.coming().signals.retain(|signal| signal.value > value);
    }

    /// Raises the value, whose ticket is reached.
    fn reached(&self, value: u64) {
        self.saw(value);
        self.stop_watching(|wanted| wanted <= value);
        self.timeline.raise(value);
    }

    /// Lets go of queues that the timeline itself wakes.
    fn stop_watching(&self, is_settled: impl Fn(u64) -> bool) {
        let settled: Wakers = self
            .coming()
            .watchers
            .extract_if(.., |(wanted, _)| is_settled(*wanted))
            .map(|(_, w)| w)
            .collect();
        // Outside the lock: a queue may go with its waker.
        drop(settled);
    }

    fn is_settled(&self, value: u64) -> bool {
        self.known() >= value || self.timeline.failure().is_some()
    }

    /// Waits for the ticket behind `value` with the driver, for a while.
    fn look(&self, value: u64, deadline: Deadline) {
        let Some(signal) = self.coming().first_at(value).cloned() else { return };
        let spun = signal.spin(deadline);
        let waited = match spun {
            Ok(false) => signal.ticket.wait(LOOK.min(deadline.remaining())),
            settled => settled,
        };
        match waited {
            Ok(true) => self.reached(signal.value),
            Ok(false) => {}
            Err(_) => signal.ask_queue(),
        }
    }

    fn coming(&self) -> MutexGuard<'_, Coming> {
        // Wakers run outside the lock, and this module's own code does not panic.
        self.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Coming {
    fn first_at(&self, value: u64) -> Option<&Signal> {
        self.signals.iter().find(|signal| signal.value >= value)
    }
}

impl Signal {
    fn is_on(&self, gpu: &Arc<Gpu>) -> bool {
        Arc::ptr_eq(self.ticket.line().gpu(), gpu)
    }

    /// Asks for a moment; whether the ticket is reached.
    fn spin(&self, deadline: Deadline) -> Result<bool, DriverError> {
        let start = Instant::now();
        let is_software = self.ticket.line().gpu().physical.capabilities.is_software;
        let end = if is_software { start } else { deadline.instant().min(start + SPIN) };
        loop {
            if self.ticket.is_done()? {
                return Ok(true);
            }
            if Instant::now() >= end {
                return Ok(false);
            }
            hint::spin_loop();
        }
    }

    /// Lets the signal's queue find out what is wrong with its device.
    fn ask_queue(&self) {
        if let Some(queue) = self.queue.upgrade() {
            queue.reap();
        }
    }
}

impl Semaphore for VulkanSemaphore {
    fn device(&self) -> DeviceId {
        self.device
    }

    /// Asks the driver about the next value to come, so that a program that polls sees it at once.
    fn value(&self) -> u64 {
        let next = self.coming().signals.front().cloned();
        // An error is for the signal's queue to find, which the reactor looks after.
        if let Some(signal) = next
            && let Ok(true) = signal.ticket.is_done()
        {
            self.saw(signal.value);
        }
        self.known()
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
        let (current, failure) = (self.known(), self.timeline.failure());
        // What was seen and not raised yet is reached all the same.
        if current >= value && failure.is_none() {
            return Err(SignalError::NotIncreasing { value, current });
        }
        self.timeline.signal(value)?;
        self.stop_watching(|wanted| wanted <= value);
        Ok(())
    }

    fn fail(&self, failure: Arc<Failure>) {
        self.timeline.fail(failure);
        self.stop_watching(|_| true);
    }

    fn wait(&self, value: u64, deadline: Deadline) -> Result<(), WaitError> {
        if !self.is_settled(value) {
            self.look(value, deadline);
        }
        if self.known() >= value {
            return Ok(());
        }
        let _attention = self.reactor.attend();
        match self.timeline.wait(value, deadline) {
            // It may have been seen and not raised before it failed.
            Err(_) if self.known() >= value => Ok(()),
            waited => waited,
        }
    }

    fn wake_when(&self, value: u64, waker: Waker) {
        if self.known() >= value {
            return waker.wake();
        }
        self.timeline.wake_when(value, waker);
        self.reactor.stir();
    }

    fn forget(&self, value: u64, waker: &Waker) {
        self.timeline.forget(value, waker);
    }
}

/// Whether a point is of a semaphore that our queues can raise.
pub(crate) fn is_ours(point: &SemaphorePoint) -> bool {
    VulkanSemaphore::of(&point.semaphore).is_some()
}

/// How a submission to `gpu` can come to wait for a point of any backend.
pub(crate) fn readiness(point: &SemaphorePoint, gpu: &Arc<Gpu>) -> Result<Readiness, Arc<Failure>> {
    match VulkanSemaphore::of(&point.semaphore) {
        Some(semaphore) => semaphore.readiness(point.value, gpu),
        None => point.poll().map(|reached| if reached { Readiness::Reached } else { Readiness::Unknown }),
    }
}

/// Wakes `waker` when it makes sense to ask for the point's readiness again.
pub(crate) fn watch(point: &SemaphorePoint, gpu: &Arc<Gpu>, waker: &Waker) {
    match VulkanSemaphore::of(&point.semaphore) {
        Some(semaphore) => semaphore.watch(point.value, gpu, waker),
        None => point.semaphore.wake_when(point.value, waker.clone()),
    }
}

/// Takes back what `watch` asked for.
pub(crate) fn unwatch(point: &SemaphorePoint, waker: &Waker) {
    if let Some(semaphore) = VulkanSemaphore::of(&point.semaphore) {
        semaphore.coming().watchers.retain(|(value, known)| *value != point.value || !known.will_wake(waker));
    }
    point.semaphore.forget(point.value, waker);
}

/// Notes that a point is reached with the ticket.
pub(crate) fn submitted(
    point: &SemaphorePoint,
    ticket: &Ticket,
    queue: &Arc<QueueCore>,
    wakers: &mut Wakers,
) {
    if let Some(semaphore) = VulkanSemaphore::of(&point.semaphore) {
        semaphore.submitted(point.value, ticket, queue, wakers);
    }
}

/// Takes note of a promised point that is reached, and wakes nobody.
pub(crate) fn saw(point: &SemaphorePoint) {
    if let Some(semaphore) = VulkanSemaphore::of(&point.semaphore) {
        semaphore.saw(point.value);
    }
}

/// Raises a promised point. The host may have gone past it or failed it meanwhile; either way it is settled.
pub(crate) fn reached(point: &SemaphorePoint) {
    if let Some(semaphore) = VulkanSemaphore::of(&point.semaphore) {
        semaphore.reached(point.value);
    }
}
