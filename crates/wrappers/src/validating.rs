//! A device that refuses submissions whose accesses nothing orders.

use std::{
    collections::{HashMap, hash_map},
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use warpweft_core_types::{
    Access, Backend, BufferView, DeviceId, QueueId, Semaphore, SemaphorePoint, Submission, SubmissionId,
    SubmitError,
};

use crate::layer::{Layer, LayeredBackend, LayeredQueue, layered_backend};

/// A backend whose devices refuse a submission with [`SubmitError::Invalid`] if
///
/// - it touches bytes that work still under way on another queue touches too, one of them writing, and
///   neither queue order nor semaphores order the two, or
/// - it waits for a point that it signals itself.
///
/// What has ended is not looked at, and a submission that waits for something outside the backend (a value
/// the host will signal, say) may be ordered by it and passes: a refusal is always right, silence is not.
/// What the host reads and writes directly is not seen, nor what residents do.
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
        Validating { ledger: Arc::clone(&self.ledger), tails: Mutex::default() }
    }
}

layered_backend!(ValidatingBackend);

/// The layer of one device.
#[derive(Debug)]
pub(crate) struct Validating {
    ledger: Arc<Mutex<Ledger>>,
    /// A semaphore for each queue, raised by every submission, so that its end is seen.
    tails: Mutex<HashMap<QueueId, Tail>>,
}

#[derive(Debug, Clone)]
struct Tail {
    semaphore: Arc<dyn Semaphore>,
    submitted: u64,
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
    buffer: usize,
    bytes: Range<u64>,
    access: Access,
    description: String,
}

impl Touched {
    fn new(view: &BufferView, access: Access) -> Self {
        // The address names the buffer for as long as the work that keeps it alive is under way.
        let buffer = Arc::as_ptr(view.buffer()).addr();
        Self { buffer, bytes: view.range(), access, description: format!("{access} of {view:?}") }
    }

    fn conflicts_with(&self, other: &Self) -> bool {
        self.buffer == other.buffer
            && self.access.conflicts_with(other.access)
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

fn key(point: &SemaphorePoint) -> (usize, u64) {
    (Arc::as_ptr(&point.semaphore).addr(), point.value)
}

impl Ledger {
    /// Forgets what has ended, well or not.
    fn prune(&mut self) {
        self.entries.retain(|entry| matches!(entry.ended.poll(), Ok(false)));
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

    fn check(&self, entry: &Entry) -> Result<(), SubmitError> {
        if let Some(&(_, value)) = entry.waits.iter().find(|&&(semaphore, value)| {
            entry.signals.iter().any(|&(other, reached)| other == semaphore && reached >= value)
        }) {
            let reason = format!("it waits for {value} of a semaphore that only it raises so far");
            return Err(SubmitError::Invalid { reason });
        }
        let Some(ordered) = self.ordered_before(&entry.waits) else { return Ok(()) };
        for other in &self.entries {
            // Counts are one above the last index that is ordered.
            let is_ordered = other.queue == entry.queue
                || ordered.get(&other.queue).is_some_and(|&count| other.index < count);
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

impl Validating {
    fn tail(&self, queue: &LayeredQueue<Self>) -> Result<Tail, SubmitError> {
        let mut tails = self.tails.lock().unwrap_or_else(PoisonError::into_inner);
        let tail = match tails.entry(queue.inner.id()) {
            hash_map::Entry::Occupied(known) => known.into_mut(),
            hash_map::Entry::Vacant(new) => {
                let semaphore = queue.device.create_semaphore(0).map_err(|error| SubmitError::Invalid {
                    reason: format!("the validator could not make a semaphore: {error}"),
                })?;
                new.insert(Tail { semaphore, submitted: 0 })
            }
        };
        tail.submitted += 1;
        Ok(tail.clone())
    }
}

impl Layer for Validating {
    fn submit(
        &self,
        queue: &LayeredQueue<Self>,
        submission: &Submission<'_>,
    ) -> Result<SubmissionId, SubmitError> {
        // Held over the submission, so that entries stand in the order in which queues got them.
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.prune();
        let tail = self.tail(queue)?;
        let ended = SemaphorePoint::new(&tail.semaphore, tail.submitted);
        let mut accesses = Vec::new();
        for op in submission.ops {
            op.for_each_access(|view, access| accesses.push(Touched::new(view, access)));
        }
        let unmet = submission.waits.iter().filter(|point| !matches!(point.poll(), Ok(true)));
        let entry = Entry {
            queue: queue.inner.id(),
            index: tail.submitted,
            waits: unmet.map(key).collect(),
            signals: submission.signals.iter().map(key).collect(),
            accesses,
            ended: ended.clone(),
        };
        ledger.check(&entry)?;
        // The end is signalled first: whoever sees a signal of the submission must find it ended.
        let mut signals = vec![ended];
        signals.extend_from_slice(submission.signals);
        let id = queue.inner.submit(&Submission { signals: &signals, ..*submission })?;
        ledger.entries.push(entry);
        Ok(id)
    }
}
