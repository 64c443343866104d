//! The queues that have calls in them, and how far each has come.

use std::sync::Arc;

use smallvec::SmallVec;
use warpweft_core_types::{
    Device, Failure, OpenError, Queue, Semaphore, SemaphorePoint, Submission, SubmitError,
};

use crate::{CommError, inner::is_of_one};

/// A queue with calls of one communicator.
///
/// Calls signal nothing by themselves, since that would cost as much as the rest of the call. When somebody wants to
/// know, a submission that does nothing but signal is put behind them: a mark.
#[derive(Debug)]
struct Line {
    queue: Arc<dyn Queue>,
    /// The queue's number among those of its device, which all lines share.
    number: u32,
    semaphore: Arc<dyn Semaphore>,
    /// The value of the last mark.
    marks: u64,
    /// Marks that are not known to be reached, with the call each is behind.
    pending: SmallVec<[(u64, u64); 4]>,
    /// The last call, by its ticket.
    last: u64,
    /// The last call that is known to be over.
    over: u64,
    /// The last call that was told to be over.
    told: u64,
    /// Why its later calls will never be over.
    failure: Option<Arc<Failure>>,
    told_failure: bool,
}

/// All queues of a communicator.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    lines: SmallVec<[Line; 2]>,
    /// Which got the last call.
    latest: Option<u32>,
}

/// A queue has come this far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) queue: u32,
    pub(crate) ticket: u64,
}

/// A queue failed with calls in it, up to this one.
#[derive(Debug)]
pub(crate) struct Lost {
    pub(crate) calls: Progress,
    pub(crate) failure: Arc<Failure>,
}

impl Line {
    /// Whether nothing more is to come of it.
    fn is_idle(&self) -> bool {
        self.over == self.last || self.failure.is_some()
    }

    fn has_news(&self) -> bool {
        self.told < self.over || (self.failure.is_some() && !self.told_failure)
    }

    /// The calls of it that are not known to be over.
    const fn rest(&self) -> Progress {
        Progress { queue: self.number, ticket: self.last }
    }

    /// A point that is reached once its calls are over.
    fn mark(&mut self) -> Result<SemaphorePoint, SubmitError> {
        if let Some((value, _)) = self.pending.iter().rev().find(|(_, ticket)| *ticket == self.last) {
            return Ok(SemaphorePoint::new(&self.semaphore, *value));
        }
        let point = SemaphorePoint::new(&self.semaphore, self.marks + 1);
        let signals = std::slice::from_ref(&point);
        if let Err(error) = self.queue.submit(&Submission { signals, ..Submission::default() }) {
            if let SubmitError::Failed(failure) = &error {
                self.failure = Some(Arc::clone(failure));
            }
            return Err(error);
        }
        self.marks += 1;
        self.pending.push((self.marks, self.last));
        Ok(point)
    }

    /// A point for calls that come behind those of this queue; none if it has nothing to wait for. Ranks that were told
    /// that they called different things go on, and a queue that failed by that is no obstacle.
    fn mark_for_later(&mut self) -> Result<Option<SemaphorePoint>, SubmitError> {
        if self.is_idle() {
            return Ok(None);
        }
        match self.mark() {
            Err(SubmitError::Failed(failure)) if is_of_one(&failure) => Ok(None),
            marked => marked.map(Some),
        }
    }

    /// Looks which marks were reached.
    fn look(&mut self) {
        let failure = self.semaphore.failure();
        let value = self.semaphore.value();
        let reached = self.pending.iter().filter(|(mark, _)| *mark <= value).count();
        if let Some((_, ticket)) = self.pending.drain(..reached).next_back() {
            self.over = ticket;
        }
        if failure.is_some() && !self.is_idle() {
            self.failure = failure;
            self.pending.clear();
        }
    }
}

impl Lines {
    /// What a call in this queue has to wait for, if calls in different queues are to be in order.
    pub(crate) fn order(&mut self, queue: u32) -> Result<Option<SemaphorePoint>, SubmitError> {
        let before = self.latest.filter(|latest| *latest != queue);
        let Some(line) = before.and_then(|before| self.find(before)) else { return Ok(None) };
        line.mark_for_later()
    }

    /// The number of a queue that has a line. Asking the queue itself would cost more.
    pub(crate) fn number_of(&self, queue: &Arc<dyn Queue>) -> Option<u32> {
        self.lines.iter().find(|line| Arc::ptr_eq(&line.queue, queue)).map(|line| line.number)
    }

    /// Makes room for a queue, and tells its number.
    pub(crate) fn add(&mut self, device: &dyn Device, queue: &Arc<dyn Queue>) -> Result<u32, OpenError> {
        let number = queue.id().number;
        if self.find(number).is_some() {
            return Ok(number);
        }
        // Queues that nobody else has any more get no more calls.
        let is_done = |line: &Line| line.is_idle() && line.failure.is_none() && !line.has_news();
        self.lines.retain(|line| !is_done(line) || Arc::strong_count(&line.queue) > 1);
        let semaphore = device.create_semaphore(0)?;
        let queue = Arc::clone(queue);
        self.lines.push(Line {
            queue,
            number,
            semaphore,
            marks: 0,
            pending: SmallVec::new(),
            last: 0,
            over: 0,
            told: 0,
            failure: None,
            told_failure: false,
        });
        Ok(number)
    }

    /// Notes that a queue got a call.
    pub(crate) fn note(&mut self, queue: u32, ticket: u64) {
        self.latest = Some(queue);
        if let Some(line) = self.find(queue) {
            line.last = ticket;
        }
    }

    /// A point that is reached when the calls of a queue are over up to this one; none if they are.
    pub(crate) fn point(&mut self, queue: u32, ticket: u64) -> Result<Option<SemaphorePoint>, CommError> {
        let Some(line) = self.find(queue) else { return Ok(None) };
        line.look();
        if line.over >= ticket {
            return Ok(None);
        }
        if let Some(failure) = &line.failure {
            return Err(CommError::Failed(Arc::clone(failure)));
        }
        if let Some((value, _)) = line.pending.iter().find(|(_, marked)| *marked >= ticket) {
            return Ok(Some(SemaphorePoint::new(&line.semaphore, *value)));
        }
        Ok(Some(line.mark()?))
    }

    /// Points that are reached when all calls are over, but for those of one queue.
    pub(crate) fn points(&mut self, but: Option<u32>) -> Result<SmallVec<[SemaphorePoint; 2]>, SubmitError> {
        let others = self.lines.iter_mut().filter(|line| Some(line.number) != but);
        others.filter_map(|line| line.mark_for_later().transpose()).collect()
    }

    /// Looks how far all queues have come, and has those tell that have more to do. Gives those that have failed.
    pub(crate) fn look(&mut self, mut news: impl FnMut(Progress)) -> SmallVec<[Lost; 1]> {
        let mut lost = SmallVec::new();
        for line in self.lines.iter_mut().filter(|line| !line.is_idle() || line.has_news()) {
            let queue = line.number;
            line.look();
            if line.told < line.over {
                line.told = line.over;
                news(Progress { queue, ticket: line.over });
            }
            if !line.is_idle() && line.pending.is_empty() {
                // One that is full takes a mark later, and one that has failed is told of below.
                let _refused = line.mark();
            }
            if let Some(failure) = line.failure.clone().filter(|_| !line.told_failure) {
                line.told_failure = true;
                lost.push(Lost { calls: line.rest(), failure });
            }
        }
        lost
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.lines.iter().all(Line::is_idle)
    }

    fn find(&mut self, queue: u32) -> Option<&mut Line> {
        self.lines.iter_mut().find(|line| line.number == queue)
    }
}
