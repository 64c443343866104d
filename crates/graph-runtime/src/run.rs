//! Submissions under way.

use std::{sync::Arc, time::Instant};

use smallvec::SmallVec;
use warpweft_core_types::{Semaphore, SemaphorePoint};

use crate::{
    error::{CompletionError, NodeFailure},
    graph::NodePlace,
    later::drop_later,
    memory::Point,
    plan::{Plan, SegmentWork, SlotWork},
    sync::{AtomicBool, Mutex, MutexGuard, Ordering},
    trace::Moments,
};

/// One submission of a prepared graph, or of a single operation.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) id: u64,
    pub(crate) plan: Arc<Plan>,
    pub(crate) work: SlotWork,
    /// When it was submitted, if a trace was being recorded.
    pub(crate) submitted: Option<Instant>,
    /// The line of each segment when it was submitted before, to go on there if nothing says otherwise.
    pub(crate) lines_before: SmallVec<[u32; 1]>,
    pub(crate) cancelled: AtomicBool,
    /// It is in the trace.
    pub(crate) traced: AtomicBool,
    state: Mutex<RunState>,
}

#[derive(Debug, Default)]
pub(crate) struct RunState {
    pub(crate) segments: SmallVec<[RunSegment; 1]>,
    /// Why its later segments were not taken, if they were not.
    pub(crate) broken: Option<Arc<NodeFailure>>,
    pub(crate) outcome: Option<Result<(), CompletionError>>,
}

/// A segment that was handed over.
#[derive(Debug, Clone)]
pub(crate) struct RunSegment {
    pub(crate) point: Point,
    pub(crate) semaphore: Arc<dyn Semaphore>,
    /// What it waits for.
    pub(crate) after: SmallVec<[Point; 4]>,
    pub(crate) status: Status,
    /// Why it does nothing, if that is so: then it only ends when what it would have come after has ended, since others
    /// count on that.
    pub(crate) skipped: Option<Arc<NodeFailure>>,
    /// When it ended, or its task ran, for a trace.
    pub(crate) moments: Option<Arc<Moments>>,
}

#[derive(Debug, Clone)]
pub(crate) enum Status {
    UnderWay,
    Done,
    Failed(Arc<NodeFailure>),
}

impl RunSegment {
    /// What its line has come to, as far as the device knows. Asking is a call of the driver.
    pub(crate) fn value(&self) -> u64 {
        self.semaphore.value()
    }

    /// Whether its point is past, by a value that is asked for.
    pub(crate) fn ask(&self, mut value: impl FnMut(&Self) -> u64) -> Answer {
        // A value that was reached stays so, and it may have been reached before a failure: where there is one, the value
        // is asked for once more.
        if value(self) >= self.point.value {
            Answer::Past
        } else if self.semaphore.failure().is_none() {
            Answer::UnderWay
        } else if value(self) >= self.point.value {
            Answer::Past
        } else {
            Answer::Failed
        }
    }

    /// Its point has been reached.
    pub(crate) fn pass(&mut self) {
        self.status = self.skipped.take().map_or(Status::Done, Status::Failed);
    }
}

impl Run {
    pub(crate) fn new(id: u64, plan: Arc<Plan>, work: SlotWork) -> Self {
        Self {
            id,
            plan,
            work,
            submitted: None,
            lines_before: SmallVec::new(),
            cancelled: AtomicBool::new(false),
            traced: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }

    /// The same in the place of one that has ended, if nobody holds that any more: submitting again and again allocates
    /// nothing.
    pub(crate) fn reused(spare: Option<Arc<Self>>, plan: &Arc<Plan>, work: &SlotWork) -> Arc<Self> {
        let new = || Arc::new(Self::new(0, Arc::clone(plan), Arc::clone(work)));
        let Some(mut spare) = spare else { return new() };
        let is_alike = Arc::ptr_eq(&spare.plan, plan) && Arc::ptr_eq(&spare.work, work);
        let Some(own) = Arc::get_mut(&mut spare).filter(|_| is_alike) else {
            drop_later(spare);
            return new();
        };
        own.forget();
        spare
    }

    /// Makes it as one that was never submitted, but for what it is about and where it was.
    pub(crate) fn forget(&mut self) {
        self.cancelled = AtomicBool::new(false);
        self.traced = AtomicBool::new(false);
        let mut state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.lines_before.clear();
        self.lines_before.extend(state.segments.iter().map(|segment| segment.point.line));
        state.segments.clear();
        state.broken = None;
        state.outcome = None;
    }

    /// Whether its end may be heard of a little later, with that of what is behind it: a single operation in a lane that
    /// the runtime chose, which goes on in the same queue with whatever needs it.
    pub(crate) fn is_in_no_hurry(&self, place: NodePlace, work: &SegmentWork) -> bool {
        matches!(work, SegmentWork::Single)
            && matches!(place, NodePlace::Device { lane: 0, .. })
            && self.plan.segments.len() == 1
            && !self.plan.has_collective
    }

    /// Locked after the domain, never before it.
    pub(crate) fn state(&self) -> MutexGuard<'_, RunState> {
        // Only this crate's own code runs under the lock.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// How it ended, if that is known; asks no device.
    pub(crate) fn outcome(&self) -> Option<Result<(), CompletionError>> {
        self.state().outcome.clone()
    }

    /// Whether its end is known; asks no device.
    pub(crate) fn has_outcome(&self) -> bool {
        self.state().outcome.is_some()
    }

    /// Whether all of it has ended well, or its end is known already. Asks the devices.
    pub(crate) fn look(&self) -> Look {
        self.look_by(|segment| segment.ask(RunSegment::value))
    }

    /// The same by what `ask` says of the segments that are under way, up to the first that goes on.
    pub(crate) fn look_by(&self, mut ask: impl FnMut(&RunSegment) -> Answer) -> Look {
        let mut state = self.state();
        if state.outcome.is_some() {
            return Look::Ended;
        }
        for segment in &mut state.segments {
            if !matches!(segment.status, Status::UnderWay) {
                continue;
            }
            match ask(segment) {
                Answer::Past => segment.pass(),
                // The rest is for when this has ended.
                Answer::UnderWay => return Look::UnderWay,
                Answer::Failed => return Look::Failing,
            }
        }
        if state.segments.iter().any(|segment| matches!(segment.status, Status::Failed(_))) {
            return Look::Failing;
        }
        let broken = state.broken.clone();
        state.outcome = Some(broken.map_or(Ok(()), |cause| Err(CompletionError::Failed(cause))));
        Look::Ended
    }

    /// A point that is not past, to wait for.
    pub(crate) fn next_point(&self) -> Option<SemaphorePoint> {
        let state = self.state();
        let open = state.segments.iter().find(|segment| matches!(segment.status, Status::UnderWay))?;
        Some(SemaphorePoint::new(&open.semaphore, open.point.value))
    }

    /// What has not begun shall not, as far as that can still be had.
    pub(crate) fn cancel(&self) {
        // A rank of a collective that does not come leaves the others waiting.
        if !self.plan.has_collective {
            // Release: a task that sees it sees what was done before.
            self.cancelled.store(true, Ordering::Release);
        }
    }
}

/// What is known of a segment's point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    UnderWay,
    Past,
    /// It is not reached, and its line has failed.
    Failed,
}

/// What a look at a run finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    UnderWay,
    /// Something has failed, and who it concerns has not been settled.
    Failing,
    Ended,
}
