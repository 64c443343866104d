//! A device that refuses submissions whose accesses nothing orders.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use warpweft_core_types::{
    Access, Backend, BufferView, DeviceId, MemoryPlace, QueueId, Semaphore, SemaphorePoint, Submission,
    SubmissionId, SubmitError,
};

use crate::layer::{Layer, LayeredBackend, LayeredQueue, layered_backend};

/// A backend whose devices refuse a submission with [`SubmitError::Invalid`] if
///
/// - it touches bytes that work still under way on another queue touches too, one of them writing, and
///   neither queue order nor semaphores order the two, or
/// - it waits for a point that it signals itself.
///
/// What has ended is not looked at, and a submission that waits for something outside the backend (a value
/// the host will signal, say) may be ordered by it and passes. Work that waits for a point comes behind what is submitted
/// later and signals it.
///
/// A refusal is right, but for one case: work that is under way and waits for the host is taken to come first, so that
/// what is submitted later and meant to come before it is refused. Communicators between devices of one process do that:
/// a rank's queue goes on when work of several devices is over, which is submitted once all ranks have called, and a point
/// that has several signallers can only be raised by the host, which tells nobody beforehand for what. To let everything
/// pass that waits for the host would be no way out, since that is where work waits long enough to be met by other work.
/// Silence is not always right: what the host reads and writes directly is not seen, nor what residents do.
#[derive(Debug)]
pub struct ValidatingBackend {
    backend: LayeredBackend<Validating>,
    ledger: Arc<Mutex<Ledger>>,
}

impl ValidatingBackend {
    /// Wraps every device of `inner`; accesses are compared across all of them.
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self { backend: LayeredBackend::new(inner), ledger: Arc::default() }
    }

    fn layer(&self, _: DeviceId) -> Validating {
        Validating { ledger: Arc::clone(&self.ledger) }
    }
}

layered_backend!(ValidatingBackend);

/// The layer of one device.
#[derive(Debug)]
pub(crate) struct Validating {
    ledger: Arc<Mutex<Ledger>>,
}

/// A queue's own semaphore, raised by every submission, so that its end is seen.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    semaphore: Option<Arc<dyn Semaphore>>,
    submitted: u64,
}

impl Tail {
    /// The point that the next submission reaches.
    fn next(&mut self, queue: &LayeredQueue<Validating>) -> Result<SemaphorePoint, SubmitError> {
        let semaphore = match self.semaphore.take() {
            Some(semaphore) => semaphore,
            None => queue.device.create_semaphore(0).map_err(|error| SubmitError::Invalid {
                reason: format!("the validator could not make a semaphore: {error}"),
            })?,
        };
        let point = SemaphorePoint::new(&semaphore, self.submitted + 1);
        self.semaphore = Some(semaphore);
        Ok(point)
    }
}

/// Everything under way.
#[derive(Debug, Default)]
struct Ledger {
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    queue: QueueId,
    index: u64,
    waits: Vec<(usize, u64)>,
    signals: Vec<(usize, u64)>,
    accesses: Vec<Touched>,
    ended: SemaphorePoint,
}

/// Bytes of one buffer that an operation touches.
#[derive(Debug, Clone)]
struct Touched {
    place: MemoryPlace,
    access: Access,
    description: String,
}

impl Touched {
    fn new(view: &BufferView, access: Access) -> Self {
        // The place is the view's own for as long as the work that keeps its memory alive is under way.
        Self { place: view.place(), access, description: format!("{access} of {view:?}") }
    }

    fn conflicts_with(&self, other: &Self) -> bool {
        self.access.conflicts_with(other.access) && self.place.overlap(&other.place) > 0
    }
}

fn key(point: &SemaphorePoint) -> (usize, u64) {
    (Arc::as_ptr(&point.semaphore).addr(), point.value)
}

impl Ledger {
    /// Forgets what has ended, well or not.
    ///
    /// Work goes on meanwhile. Something may end once it was looked at, and what comes behind it before that is looked at:
    /// forgotten alone, that would leave nothing to tell what the one is ordered with. So all are looked at again until
    /// none of them has ended; then whatever was before those that are forgotten is forgotten too.
    fn prune(&mut self) {
        loop {
            let before = self.entries.len();
            self.entries.retain(|entry| matches!(entry.ended.poll(), Ok(false)));
            if self.entries.len() == before {
                return;
            }
        }
    }

    /// For each queue, the last entry that surely ends before something that waits for `points` starts.
    /// `None` if some point is not promised by anything under way, so that it may order anything.
    fn ordered_before(&self, points: &[(usize, u64)]) -> Option<HashMap<QueueId, u64>> {
        let mut ordered: HashMap<QueueId, u64> = HashMap::new();
        let mut open: Vec<(usize, u64)> = points.to_vec();
        while let Some((semaphore, value)) = open.pop() {
            let signaller = self.entries.iter().find(|entry| {
                entry.signals.iter().any(|&(other, reached)| other == semaphore && reached >= value)
            })?;
            let known = ordered.entry(signaller.queue).or_default();
            let newly = *known..signaller.index + 1;
            *known = newly.end.max(*known);
            let before = |entry: &&Entry| entry.queue == signaller.queue && newly.contains(&entry.index);
            open.extend(self.entries.iter().filter(before).flat_map(|entry| entry.waits.iter().copied()));
        }
        Some(ordered)
    }

    /// For each queue, the first entry that surely starts after `entry` ends: it waits for what `entry` signals, or for what
    /// comes behind that.
    fn ordered_after(&self, entry: &Entry) -> HashMap<QueueId, u64> {
        let mut ordered: HashMap<QueueId, u64> = HashMap::new();
        let mut open: Vec<(usize, u64)> = entry.signals.clone();
        while let Some((semaphore, reached)) = open.pop() {
            let is_raised_by_it = |&(other, value): &(usize, u64)| {
                // A lower promise may reach the value first.
                let mut promised = self.entries.iter().flat_map(|entry| &entry.signals);
                let is_lower =
                    |&&(known, lower): &&(usize, u64)| known == other && (value..reached).contains(&lower);
                other == semaphore && value <= reached && !promised.any(|promise| is_lower(&promise))
            };
            for waiting in self.entries.iter().filter(|other| other.waits.iter().any(is_raised_by_it)) {
                let known = ordered.entry(waiting.queue).or_insert(u64::MAX);
                let newly = waiting.index..*known;
                *known = waiting.index.min(*known);
                let behind = |other: &&Entry| other.queue == waiting.queue && newly.contains(&other.index);
                open.extend(
                    self.entries.iter().filter(behind).flat_map(|other| other.signals.iter().copied()),
                );
            }
        }
        ordered
    }

    fn check(&self, entry: &Entry) -> Result<(), SubmitError> {
        if let Some(&(_, value)) = entry.waits.iter().find(|&&(semaphore, value)| {
            entry.signals.iter().any(|&(other, reached)| other == semaphore && reached >= value)
        }) {
            let reason = format!("it waits for {value} of a semaphore that only it raises so far");
            return Err(SubmitError::Invalid { reason });
        }
        if entry.accesses.is_empty() {
            return Ok(());
        }
        // What is in front in its queue waits for it too.
        let in_front = self.entries.iter().filter(|other| other.queue == entry.queue);
        let waits: Vec<_> = in_front.chain([entry]).flat_map(|entry| entry.waits.iter().copied()).collect();
        let Some(before) = self.ordered_before(&waits) else { return Ok(()) };
        let after = self.ordered_after(entry);
        for other in &self.entries {
            // Counts are one above the last index that is ordered.
            let is_ordered = other.queue == entry.queue
                || before.get(&other.queue).is_some_and(|&count| other.index < count)
                || after.get(&other.queue).is_some_and(|&first| other.index >= first);
            if !is_ordered {
                compare(entry, other)?;
            }
        }
        Ok(())
    }
}

fn compare(new: &Entry, old: &Entry) -> Result<(), SubmitError> {
    for ours in &new.accesses {
        if let Some(theirs) = old.accesses.iter().find(|theirs| ours.conflicts_with(theirs)) {
            let reason = format!(
                "{} is not ordered with {} in an earlier submission to {}, which has not ended; \
                 wait for a point it signals",
                ours.description, theirs.description, old.queue
            );
            return Err(SubmitError::Invalid { reason });
        }
    }
    Ok(())
}

impl Layer for Validating {
    /// Locked while the wrapped queue takes a submission, so that ends are promised in order. The ledger is
    /// not: what a submission sets off may come back here by another queue.
    type QueueState = Mutex<Tail>;

    fn submit(
        &self,
        queue: &LayeredQueue<Self>,
        submission: &Submission<'_>,
    ) -> Result<SubmissionId, SubmitError> {
        let mut tail = queue.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = tail.next(queue)?;
        let mut accesses = Vec::new();
        for op in submission.ops {
            op.for_each_access(|view, access| accesses.push(Touched::new(view, access)));
        }
        let unmet = submission.waits.iter().filter(|point| !matches!(point.poll(), Ok(true)));
        let entry = Entry {
            queue: queue.inner.id(),
            index: ended.value,
            waits: unmet.map(key).collect(),
            signals: submission.signals.iter().map(key).collect(),
            accesses,
            ended: ended.clone(),
        };
        self.enter(entry)?;
        // The end is signalled first: whoever sees a signal of the submission must find it ended.
        let mut signals = vec![ended.clone()];
        signals.extend_from_slice(submission.signals);
        let taken = queue.inner.submit(&Submission { signals: &signals, ..*submission });
        match taken {
            Ok(_) => tail.submitted = ended.value,
            Err(_) => self.ledger().entries.retain(|entry| !same_point(&entry.ended, &ended)),
        }
        taken
    }
}

impl Validating {
    fn enter(&self, entry: Entry) -> Result<(), SubmitError> {
        let mut ledger = self.ledger();
        ledger.prune();
        ledger.check(&entry)?;
        ledger.entries.push(entry);
        Ok(())
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn same_point(a: &SemaphorePoint, b: &SemaphorePoint) -> bool {
    key(a) == key(b)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU64, Ordering},
        task::Waker,
    };

    use warpweft_core_types::{
        Buffer, Deadline, DeviceUuid, Failure, HostMapping, MemoryKind, SignalError, WaitError,
    };

    use super::*;

    const DEVICE: DeviceId = DeviceId { backend: "host", ordinal: 0, uuid: DeviceUuid::from_bytes([0; 16]) };

    #[derive(Debug)]
    struct Memory;

    impl Buffer for Memory {
        fn device(&self) -> DeviceId {
            DEVICE
        }

        fn size(&self) -> u64 {
            64
        }

        fn kind(&self) -> MemoryKind {
            MemoryKind::Device
        }

        fn mapping(&self) -> Option<HostMapping<'_>> {
            None
        }
    }

    /// Tells its value, and raises itself and others just afterwards: time that goes by between two looks.
    #[derive(Debug, Default)]
    struct Scripted {
        value: Arc<AtomicU64>,
        raised_by_a_look: Vec<Arc<AtomicU64>>,
    }

    impl Semaphore for Scripted {
        fn device(&self) -> DeviceId {
            DEVICE
        }

        fn value(&self) -> u64 {
            // Relaxed: one thread alone.
            let value = self.value.load(Ordering::Relaxed);
            self.raised_by_a_look.iter().for_each(|other| other.store(1, Ordering::Relaxed));
            value
        }

        fn failure(&self) -> Option<Arc<Failure>> {
            None
        }

        fn promise(&self, _value: u64) -> Result<u64, SignalError> {
            Ok(0)
        }

        fn retract(&self, _value: u64, _before: u64) {}

        fn signal(&self, value: u64) -> Result<(), SignalError> {
            Err(SignalError::NotIncreasing { value, current: value })
        }

        fn fail(&self, _failure: Arc<Failure>) {}

        fn wait(&self, value: u64, _deadline: Deadline) -> Result<(), WaitError> {
            Err(WaitError::Timeout { awaited: value, reached: 0 })
        }

        fn wake_when(&self, _value: u64, waker: Waker) {
            waker.wake();
        }

        fn forget(&self, _value: u64, _waker: &Waker) {}
    }

    /// The submission at `index` of a queue, which signals that of a semaphore with the queue's number.
    fn entry(
        (queue, index): (u32, u64),
        ended: Scripted,
        waits: &[(usize, u64)],
        view: &BufferView,
    ) -> Entry {
        Entry {
            queue: QueueId { device: DEVICE, number: queue },
            index,
            waits: waits.to_vec(),
            signals: vec![(queue as usize, index)],
            accesses: vec![Touched::new(view, Access::ReadWrite)],
            ended: SemaphorePoint { semaphore: Arc::new(ended), value: 1 },
        }
    }

    #[test]
    fn what_ends_while_it_is_looked_for_takes_what_was_before_it_along() {
        let [first, second] = <[Arc<AtomicU64>; 2]>::default();
        let raised_by_a_look = vec![Arc::clone(&first), Arc::clone(&second)];
        let view = BufferView::whole(Arc::new(Memory));
        let mut ledger = Ledger::default();
        ledger.entries.push(entry((0, 1), Scripted { value: first, raised_by_a_look }, &[], &view));
        let second = Scripted { value: second, ..Scripted::default() };
        ledger.entries.push(entry((1, 1), second, &[(0, 1)], &view));
        // It is behind the second by its queue alone.
        ledger.entries.push(entry((1, 2), Scripted::default(), &[], &view));
        ledger.prune();
        assert_eq!(ledger.entries.len(), 1);
        let new = entry((2, 1), Scripted::default(), &[(1, 2)], &view);
        ledger.check(&new).expect("it waits for the last, which is behind both others");
    }
}
