//! Timeline semaphores of CUDA devices: a timeline, and the events that stand for its values to come.

use std::{
    any::Any,
    collections::VecDeque,
    hint,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    task::Waker,
    thread,
    time::{Duration, Instant},
};

use smallvec::SmallVec;
use warpweft_core_types::{
    Deadline, DeviceId, Failure, Semaphore, SemaphorePoint, SignalError, Timeline, WaitError,
};
use warpweft_polled::{Polled, Reactor};

use crate::{context::left, fork::Origin, queue::QueueCore, stream::Event};

/// A waiting thread looks by itself for this long, then leaves it to the reactor and sleeps.
const LOOK: Duration = Duration::from_millis(10);

/// Who waits for a signal that has no event yet is patient for this long with a thread that has its queue: it may be in a
/// call of the driver's. Whoever only asks leaves it to the reactor then.
const PATIENCE: Duration = Duration::from_millis(10);

/// Within that time it keeps its core to itself for this long.
const SPIN: Duration = Duration::from_micros(100);

/// Wakers to be called once no lock is held.
pub(crate) type Wakers = SmallVec<[Waker; 4]>;

/// A semaphore of a CUDA device.
#[derive(Debug)]
pub(crate) struct CudaSemaphore {
    device: DeviceId,
    timeline: Timeline,
    /// The last value whose event was seen to be over. The timeline follows when the signal's queue is reaped,
    /// since raising it wakes others, and whoever only asks for the value may hold locks of their own.
    seen: AtomicU64,
    reactor: Arc<Reactor<QueueCore>>,
    origin: Origin,
    coming: Mutex<Coming>,
}

#[derive(Debug, Default)]
struct Coming {
    /// Signals that are enqueued in a stream and not reached yet, rising.
    signals: VecDeque<Signal>,
    /// The last of the signals that have no event until somebody asks, for each queue that has such.
    late: SmallVec<[(u64, Weak<QueueCore>); 1]>,
    /// Queues that wait for a signal of at least this value to be enqueued.
    watchers: Vec<(u64, Waker)>,
    /// Queues whose streams wait for a signal of at least this value.
    dependents: Vec<(u64, Weak<QueueCore>)>,
    /// The least value that will not be reached, though a signal of it is in a stream; and why.
    doomed: Option<(u64, Arc<Failure>)>,
}

/// A value that is reached when an event's work is over.
#[derive(Debug, Clone)]
pub(crate) struct Signal {
    value: u64,
    pub(crate) event: Arc<Event>,
    pub(crate) queue: Weak<QueueCore>,
}

/// How a stream can come to wait for a point.
#[derive(Debug)]
pub(crate) enum Readiness {
    /// There is nothing to wait for.
    Reached,
    /// By waiting for this signal's event.
    Enqueued(Signal),
    /// Not yet: hold the work on the host.
    Unknown,
}

impl CudaSemaphore {
    pub(crate) fn new(
        device: DeviceId,
        initial: u64,
        reactor: &Arc<Reactor<QueueCore>>,
        origin: Origin,
    ) -> Self {
        Self {
            device,
            timeline: Timeline::new(initial),
            seen: AtomicU64::new(initial),
            reactor: Arc::clone(reactor),
            origin,
            coming: Mutex::default(),
        }
    }

    fn of(semaphore: &Arc<dyn Semaphore>) -> Option<&Self> {
        let semaphore: &dyn Any = semaphore.as_ref();
        semaphore.downcast_ref()
    }

    /// How a stream can come to wait for `value`; the failure, if it will never be reached. The queue of a stream that
    /// will wait is remembered.
    fn readiness(&self, value: u64, dependent: Option<&Arc<QueueCore>>) -> Result<Readiness, Arc<Failure>> {
        // Failure first: a value reached before a failure must be found after it.
        let failure = self.timeline.failure();
        if self.known() >= value {
            return Ok(Readiness::Reached);
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        let mut coming = self.coming();
        if let Some((_, failure)) = coming.doomed.as_ref().filter(|(doomed, _)| *doomed <= value) {
            return Err(Arc::clone(failure));
        }
        if let Some(signal) = coming.first_at(value).cloned() {
            if let Some(queue) = dependent {
                coming.dependents.push((value, Arc::downgrade(queue)));
            }
            return Ok(Readiness::Enqueued(signal));
        }
        drop(coming);
        // It may have been reached, and its signal forgotten, between the two looks.
        Ok(if self.known() >= value { Readiness::Reached } else { Readiness::Unknown })
    }

    /// The value, without asking the driver.
    fn known(&self) -> u64 {
        // Acquire: what whoever saw the event had seen before is visible to whoever sees the value.
        self.timeline.value().max(self.seen.load(Ordering::Acquire))
    }

    /// Wakes `waker` once a stream can wait for `value`, and when it is reached or has failed.
    fn watch(&self, value: u64, waker: &Waker) {
        let is_own = |(other, w): &(u64, Waker)| *other == value && w.will_wake(waker);
        let mut coming = self.coming();
        if !coming.watchers.iter().any(is_own) {
            coming.watchers.push((value, waker.clone()));
        }
        drop(coming);
        // Behind it: a signal that comes late sees the watcher, or is seen here.
        self.hurry(value, Duration::ZERO);
        let mut coming = self.coming();
        let ready = coming.first_at(value).is_some() || self.known() >= value;
        if ready {
            coming.watchers.retain(|watcher| !is_own(watcher));
        }
        drop(coming);
        if ready {
            waker.wake_by_ref();
        } else {
            self.timeline.wake_when(value, waker.clone());
        }
    }

    /// Notes that `value` will have an event once somebody asks for it, unless somebody does so now; whether it was.
    fn put_off(&self, value: u64, queue: &Arc<QueueCore>) -> bool {
        let mut coming = self.coming();
        // Whoever waits counts itself before it looks at this list, so that one of the two sees the other.
        let is_awaited =
            self.timeline.is_awaited() || coming.watchers.iter().any(|(wanted, _)| *wanted <= value);
        if is_awaited {
            return false;
        }
        match coming.late.iter_mut().find(|(_, other)| other.as_ptr() == Arc::as_ptr(queue)) {
            Some((last, _)) => *last = value,
            None => coming.late.push((value, Arc::downgrade(queue))),
        }
        true
    }

    /// Has the next signal of at least `value` get its event, if it has none yet.
    fn hurry(&self, value: u64, patience: Duration) {
        let coming = self.coming();
        if coming.late.is_empty() || coming.first_at(value).is_some() {
            return;
        }
        // The least of those that will do.
        let late = coming.late.iter().filter(|(late, _)| *late >= value).min_by_key(|(late, _)| *late);
        let queue = late.and_then(|(_, queue)| queue.upgrade());
        // The queue is locked before its semaphores.
        drop(coming);
        if let Some(queue) = queue {
            queue.mark_now(Deadline::within(patience));
        }
    }

    /// Notes that `value` is reached when `event`'s work is over.
    fn enqueued(&self, value: u64, event: &Arc<Event>, queue: &Arc<QueueCore>) {
        let mut coming = self.coming();
        coming.late.retain(|(_, other)| other.as_ptr() != Arc::as_ptr(queue));
        let signal = Signal { value, event: Arc::clone(event), queue: Arc::downgrade(queue) };
        let behind = coming.signals.iter().rposition(|other| other.value < value).map_or(0, |at| at + 1);
        coming.signals.insert(behind, signal);
    }

    /// Collects who waited for the news that `value` is enqueued.
    fn take_watchers(&self, value: u64, wakers: &mut Wakers) {
        let mut coming = self.coming();
        wakers.extend(coming.watchers.extract_if(.., |(wanted, _)| *wanted <= value).map(|(_, w)| w));
    }

    /// Takes note of a value whose event is over, and wakes nobody: the signal's queue does. Not of one that is doomed,
    /// whose event is over because its work was ended; whether it counts.
    fn saw(&self, value: u64) -> bool {
        let mut coming = self.coming();
        if coming.doomed.as_ref().is_some_and(|(doomed, _)| *doomed <= value) {
            return false;
        }
        // Release: see `known`. Before the signal goes, so that one of the two is found.
        self.seen.fetch_max(value, Ordering::Release);
        coming.signals.retain(|signal| signal.value > value);
        coming.dependents.retain(|(wanted, _)| *wanted > value);
        true
    }

    /// Notes that `value` will not be reached by the signal of it that is in a stream, whatever becomes of that; the
    /// queues whose streams wait for it.
    fn doom(&self, value: u64, failure: &Arc<Failure>) -> Vec<Arc<QueueCore>> {
        let mut coming = self.coming();
        coming.signals.retain(|signal| signal.value < value);
        let is_first = coming.doomed.as_ref().is_none_or(|(doomed, _)| *doomed > value);
        if is_first {
            coming.doomed = Some((value, Arc::clone(failure)));
        }
        coming
            .dependents
            .extract_if(.., |(wanted, _)| *wanted >= value)
            .filter_map(|(_, queue)| queue.upgrade())
            .collect()
    }

    /// Raises the value, whose event is over.
    fn reached(&self, value: u64) {
        if self.saw(value) {
            self.stop_watching(|wanted| wanted <= value);
            self.timeline.raise(value);
        }
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

    /// Its failure in a process that was forked from its own, where no lock may be taken.
    fn left(&self) -> Option<Arc<Failure>> {
        self.origin.is_left().then(|| left(self.device))
    }

    fn is_settled(&self, value: u64) -> bool {
        self.known() >= value || self.timeline.failure().is_some()
    }

    /// Looks at the event behind `value` until it is over, for a while.
    fn look(&self, value: u64, deadline: Deadline) {
        self.hurry(value, PATIENCE.min(deadline.remaining()));
        let Some(signal) = self.coming().first_at(value).cloned() else { return };
        let context = signal.event.context();
        let Ok(_current) = context.enter() else { return };
        let start = Instant::now();
        let end = deadline.instant().min(start + LOOK);
        while self.known() < value {
            // A call that holds the context may outlast the deadline; asleep it can be kept.
            let Some(asking) = context.cold.ask() else { return };
            let is_done = signal.event.is_done();
            // Before anybody is woken, who may want the context.
            drop(asking);
            match is_done {
                Ok(false) => {}
                Ok(true) => return self.reached(signal.value),
                Err(_) => return signal.ask_queue(),
            }
            match Instant::now() {
                now if now >= end => return,
                now if now >= start + SPIN => thread::yield_now(),
                _ => hint::spin_loop(),
            }
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

    /// The last of those that the next event stands for.
    fn next(&self) -> Option<Signal> {
        let first = self.signals.front()?;
        let alike = self.signals.iter().take_while(|signal| Arc::ptr_eq(&signal.event, &first.event));
        alike.last().cloned()
    }
}

impl Signal {
    /// Lets the signal's queue find out what is wrong with its stream.
    fn ask_queue(&self) {
        if let Some(queue) = self.queue.upgrade() {
            queue.reap();
        }
    }
}

impl Semaphore for CudaSemaphore {
    fn device(&self) -> DeviceId {
        self.device
    }

    /// Asks the driver about the next value to come, so that a program that polls sees it at once.
    fn value(&self) -> u64 {
        if self.origin.is_left() {
            return self.known();
        }
        let mut next = self.coming().next();
        if next.is_none() {
            // Who only asks waits for nobody.
            self.hurry(self.known() + 1, Duration::ZERO);
            next = self.coming().next();
        }
        if let Some(signal) = next
            && let Some(_asking) = signal.event.context().cold.ask()
            && let Ok(_current) = signal.event.context().enter()
            // An error is for the signal's queue to find, which the reactor looks after.
            && let Ok(true) = signal.event.is_done()
        {
            self.saw(signal.value);
        }
        self.known()
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.left().or_else(|| self.timeline.failure())
    }

    fn promise(&self, value: u64) -> Result<u64, SignalError> {
        self.timeline.promise(value)
    }

    fn retract(&self, value: u64, before: u64) {
        self.timeline.retract(value, before);
    }

    fn signal(&self, value: u64) -> Result<(), SignalError> {
        if let Some(failure) = self.left() {
            return Err(SignalError::Failed(failure));
        }
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
        if !self.origin.is_left() {
            self.timeline.fail(failure);
            self.stop_watching(|_| true);
        }
    }

    fn wait(&self, value: u64, deadline: Deadline) -> Result<(), WaitError> {
        if let Some(failure) = self.left().filter(|_| self.known() < value) {
            return Err(WaitError::Failed(failure));
        }
        if self.known() >= value {
            return Ok(());
        }
        // Before the look: a signal that comes late sees it, or is seen.
        let _expecting = self.timeline.expect();
        if !self.is_settled(value) {
            self.look(value, deadline);
        }
        if self.known() >= value {
            return Ok(());
        }
        let _attention = self.reactor.attend();
        self.timeline.wait(value, deadline)
    }

    fn wake_when(&self, value: u64, waker: Waker) {
        if self.origin.is_left() || self.known() >= value {
            return waker.wake();
        }
        self.timeline.wake_when(value, waker);
        self.hurry(value, Duration::ZERO);
        self.reactor.stir();
    }

    fn forget(&self, value: u64, waker: &Waker) {
        if !self.origin.is_left() {
            self.timeline.forget(value, waker);
        }
    }
}

/// Whether a point is of a semaphore that our queues can raise.
pub(crate) fn is_ours(point: &SemaphorePoint) -> bool {
    CudaSemaphore::of(&point.semaphore).is_some()
}

/// Has the events of points recorded that have none yet, so that a stream can wait for them. No queue is locked.
pub(crate) fn hurry(waits: &[SemaphorePoint]) {
    for point in waits {
        if let Some(semaphore) = CudaSemaphore::of(&point.semaphore) {
            semaphore.hurry(point.value, Duration::ZERO);
        }
    }
}

/// Notes that points will have an event once somebody asks for one; whether nobody does so now.
pub(crate) fn put_off(points: &[SemaphorePoint], queue: &Arc<QueueCore>) -> bool {
    points.iter().all(|point| {
        CudaSemaphore::of(&point.semaphore).is_some_and(|semaphore| semaphore.put_off(point.value, queue))
    })
}

/// How a stream can come to wait for a point of any backend.
pub(crate) fn readiness(point: &SemaphorePoint) -> Result<Readiness, Arc<Failure>> {
    readiness_for(point, None)
}

/// The same for a stream that waits now, whose queue is told if the point is doomed.
pub(crate) fn await_in_stream(
    point: &SemaphorePoint,
    queue: &Arc<QueueCore>,
) -> Result<Readiness, Arc<Failure>> {
    readiness_for(point, Some(queue))
}

/// Dooms a point whose signal is in a stream; the queues whose streams wait for it. Whoever calls this fails the
/// semaphore, once what is in front of the signal is over.
pub(crate) fn doom(point: &SemaphorePoint, failure: &Arc<Failure>) -> Vec<Arc<QueueCore>> {
    CudaSemaphore::of(&point.semaphore).map_or_else(Vec::new, |own| own.doom(point.value, failure))
}

fn readiness_for(
    point: &SemaphorePoint,
    dependent: Option<&Arc<QueueCore>>,
) -> Result<Readiness, Arc<Failure>> {
    match CudaSemaphore::of(&point.semaphore) {
        Some(semaphore) => semaphore.readiness(point.value, dependent),
        None => point.poll().map(|reached| if reached { Readiness::Reached } else { Readiness::Unknown }),
    }
}

/// Wakes `waker` when it makes sense to ask for the point's readiness again.
pub(crate) fn watch(point: &SemaphorePoint, waker: &Waker) {
    match CudaSemaphore::of(&point.semaphore) {
        Some(semaphore) => semaphore.watch(point.value, waker),
        None => point.semaphore.wake_when(point.value, waker.clone()),
    }
}

/// Takes back what `watch` asked for.
pub(crate) fn unwatch(point: &SemaphorePoint, waker: &Waker) {
    if let Some(semaphore) = CudaSemaphore::of(&point.semaphore) {
        semaphore.coming().watchers.retain(|(value, known)| *value != point.value || !known.will_wake(waker));
    }
    point.semaphore.forget(point.value, waker);
}

/// Notes that a point is reached when `event`'s work is over.
pub(crate) fn enqueued(point: &SemaphorePoint, event: &Arc<Event>, queue: &Arc<QueueCore>) {
    if let Some(semaphore) = CudaSemaphore::of(&point.semaphore) {
        semaphore.enqueued(point.value, event, queue);
    }
}

/// Collects who waited for the news that a point is enqueued.
pub(crate) fn take_watchers(point: &SemaphorePoint, wakers: &mut Wakers) {
    if let Some(semaphore) = CudaSemaphore::of(&point.semaphore) {
        semaphore.take_watchers(point.value, wakers);
    }
}

/// Raises a promised point. The host may have gone past it or failed it meanwhile; either way it is settled.
pub(crate) fn reached(point: &SemaphorePoint) {
    if let Some(semaphore) = CudaSemaphore::of(&point.semaphore) {
        semaphore.reached(point.value);
    }
}
