//! What holds a rank's queue until its calls are over.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Wake, Waker},
};

use warpweft_core_types::{Device, Failure, OpenError, Semaphore, SemaphorePoint};

use super::of_rank;

/// A point that is raised once all calls of a group are over, or fails with the first of them.
#[derive(Debug, Clone)]
pub(crate) struct Gate {
    semaphore: Arc<dyn Semaphore>,
    calls: Arc<AtomicUsize>,
}

impl Gate {
    pub(crate) fn new(device: &Arc<dyn Device>, calls: usize) -> Result<Self, OpenError> {
        Ok(Self { semaphore: device.create_semaphore(0)?, calls: Arc::new(AtomicUsize::new(calls)) })
    }

    pub(crate) fn point(&self) -> SemaphorePoint {
        SemaphorePoint::new(&self.semaphore, 1)
    }

    /// One call is over.
    fn pass(&self) {
        // Acquire and release: whoever raises it has seen the end of the others.
        if self.calls.fetch_sub(1, Ordering::AcqRel) == 1 {
            // It can only be refused because the gate failed before.
            let _raised = self.semaphore.signal(1);
        }
    }

    pub(crate) fn fail(&self, failure: &Arc<Failure>) {
        self.semaphore.fail(Arc::clone(failure));
    }
}

/// Opens gates when all points are reached, and fails them when one will never be.
#[derive(Debug)]
struct Opening {
    points: Vec<SemaphorePoint>,
    parties: Vec<Party>,
    /// The first point that is not known to be reached.
    next: std::sync::Mutex<Option<usize>>,
}

/// A rank that takes part in a call.
#[derive(Debug, Clone)]
pub(crate) struct Party {
    pub(crate) rank: u32,
    /// Everything before the call is over there.
    pub(crate) ready: SemaphorePoint,
    /// What comes behind the call.
    pub(crate) gate: Gate,
}

/// Has the gates opened by whoever raises the last of these points.
pub(crate) fn open_behind(points: Vec<SemaphorePoint>, parties: Vec<Party>) {
    let opening = Opening { points, parties, next: std::sync::Mutex::new(Some(0)) };
    Arc::new(opening).go_on();
}

impl Opening {
    fn go_on(self: &Arc<Self>) {
        let outcome = {
            let mut next = self.next.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let Some(at) = *next else { return };
            match self.first_unmet(at) {
                Ok(Some(unmet)) => {
                    *next = Some(unmet);
                    Ok(Some(unmet))
                }
                ended => {
                    *next = None;
                    ended
                }
            }
        };
        // Outside the lock: a semaphore may call back at once.
        match outcome {
            Ok(Some(unmet)) => {
                let point = &self.points[unmet];
                point.semaphore.wake_when(point.value, Waker::from(Arc::clone(self)));
            }
            Ok(None) => self.parties.iter().for_each(|party| party.gate.pass()),
            Err(failure) => self.fail(&failure),
        }
    }

    /// Tells everybody, and whose part it was that failed.
    fn fail(&self, failure: &Arc<Failure>) {
        let has_failed = |party: &&Party| party.ready.semaphore.failure().is_some();
        let failed = self.parties.iter().find(has_failed);
        let told = failed.map_or_else(|| Arc::clone(failure), |party| of_rank(failure, party.rank));
        self.parties.iter().for_each(|party| party.gate.fail(&told));
    }

    fn first_unmet(&self, from: usize) -> Result<Option<usize>, Arc<Failure>> {
        for (at, point) in self.points.iter().enumerate().skip(from) {
            if !point.poll()? {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }
}

impl Wake for Opening {
    fn wake(self: Arc<Self>) {
        self.go_on();
    }
}
