//! The queues that have calls in them, and how far each has come.

use std::sync::Arc;

use smallvec::SmallVec;
use warpweft_core_types::{
    Device, Failure, OpenError, Queue, QueueId, Semaphore, SemaphorePoint, Submission, SubmitError,
};

use crate::CommError;

/// A queue with calls of one communicator.
///
/// Calls signal nothing by themselves, since that would cost as much as the rest of the call. When somebody wants to
/// know, a submission that does nothing but signal is put behind them: a mark.
#[derive(Debug)]
struct Line {
    queue: Arc<dyn Queue>,
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
}

/// All queues of a communicator.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    lines: SmallVec<[Line; 2]>,
    /// Which got the last call.
    latest: Option<QueueId>,
}

/// A queue has come this far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) queue: QueueId,
    pub(crate) ticket: u64,
}

impl Line {
    fn is_idle(&self) -> bool {
        self.over == self.last
    }

    /// A point that is reached once its calls are over.
    fn mark(&mut self) -> Result<SemaphorePoint, SubmitError> {
        if let Some((value, _)) = self.pending.iter().rev().find(|(_, ticket)| *ticket == self.last) {
            return Ok(SemaphorePoint::new(&self.semaphore, *value));
        }
        let point = SemaphorePoint::new(&self.semaphore, self.marks + 1);
        self.queue.submit(&Submission { signals: std::slice::from_ref(&point), ..Submission::default() })?;
        self.marks += 1;
        self.pending.push((self.marks, self.last));
        Ok(point)
    }

    /// Looks which marks were reached.
    fn look(&mut self) -> Result<(), Arc<Failure>> {
        let failure = self.semaphore.failure();
        let value = self.semaphore.value();
        let reached = self.pending.iter().filter(|(mark, _)| *mark <= value).count();
        if let Some((_, ticket)) = self.pending.drain(..reached).next_back() {
            self.over = ticket;
        }
        match failure {
            Some(failure) if !self.is_idle() => {
                // Nothing more comes of this queue.
                self.over = self.last;
                self.pending.clear();
                Err(failure)
            }
            _ => Ok(()),
        }
    }
}

impl Lines {
    /// What a call in this queue has to wait for, if calls in different queues are to be in order.
    pub(crate) fn order(&mut self, queue: QueueId) -> Result<Option<SemaphorePoint>, SubmitError> {
        let before = self.latest.filter(|latest| *latest != queue);
        let line = before.and_then(|before| self.find(before));
        match line {
            Some(line) if !line.is_idle() => line.mark().map(Some),
            _ => Ok(None),
        }
    }

    /// Makes room for a queue.
    pub(crate) fn add(&mut self, device: &dyn Device, queue: &Arc<dyn Queue>) -> Result<(), OpenError> {
        if self.find(queue.id()).is_some() {
            return Ok(());
        }
        // Queues that nobody else has any more get no more calls.
        let is_done = |line: &Line| line.is_idle() && line.told == line.over;
        self.lines.retain(|line| !is_done(line) || Arc::strong_count(&line.queue) > 1);
        let semaphore = device.create_semaphore(0)?;
        let queue = Arc::clone(queue);
        self.lines.push(Line {
            queue,
            semaphore,
            marks: 0,
            pending: SmallVec::new(),
            last: 0,
            over: 0,
            told: 0,
        });
        Ok(())
    }

    /// Notes that a queue got a call.
    pub(crate) fn note(&mut self, queue: QueueId, ticket: u64) {
        self.latest = Some(queue);
        if let Some(line) = self.find(queue) {
            line.last = ticket;
        }
    }

    /// A point that is reached when the calls of a queue are over up to this one; none if they are.
    pub(crate) fn point(&mut self, queue: QueueId, ticket: u64) -> Result<Option<SemaphorePoint>, CommError> {
        let Some(line) = self.find(queue) else { return Ok(None) };
        line.look()?;
        if line.over >= ticket {
            return Ok(None);
        }
        if let Some((value, _)) = line.pending.iter().find(|(_, marked)| *marked >= ticket) {
            return Ok(Some(SemaphorePoint::new(&line.semaphore, *value)));
        }
        Ok(Some(line.mark()?))
    }

    /// Points that are reached when all calls are over.
    pub(crate) fn points(&mut self) -> Result<SmallVec<[SemaphorePoint; 2]>, CommError> {
        let busy = self.lines.iter_mut().filter(|line| !line.is_idle());
        busy.map(|line| Ok(line.mark()?)).collect()
    }

    /// Looks how far all queues have come, and has those tell that have more to do.
    pub(crate) fn look(&mut self, mut news: impl FnMut(Progress)) -> Result<(), Arc<Failure>> {
        for line in self.lines.iter_mut().filter(|line| !line.is_idle() || line.told < line.over) {
            line.look()?;
            if line.told < line.over {
                line.told = line.over;
                news(Progress { queue: line.queue.id(), ticket: line.over });
            }
            if !line.is_idle()
                && line.pending.is_empty()
                && let Err(SubmitError::Failed(failure)) = line.mark()
            {
                return Err(failure);
            }
        }
        Ok(())
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.lines.iter().all(Line::is_idle)
    }

    fn find(&mut self, queue: QueueId) -> Option<&mut Line> {
        self.lines.iter_mut().find(|line| line.queue.id() == queue)
    }
}
