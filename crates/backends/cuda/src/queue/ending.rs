//! What becomes of submissions that do not come to their end.

use std::{
    sync::{Arc, MutexGuard},
    task::Waker,
};

use warpweft_core_types::{Deadline, Failure, SemaphorePoint};

use super::{Held, InFlight, QueueCore, Signals, State};
use crate::{communicator, semaphore};

/// What becomes of work that did not come to its end.
pub(crate) enum Cause<'a> {
    /// A communicator, by its address, was aborted.
    Communicator(usize),
    /// This point will never be reached.
    Point(&'a SemaphorePoint),
}

impl InFlight {
    fn is_ended_by(&self, cause: &Cause<'_>) -> bool {
        match cause {
            Cause::Communicator(address) => self.communicators.contains(address),
            Cause::Point(lost) => self.awaited.iter().any(|point| is_behind(point, lost)),
        }
    }
}

impl Held {
    fn is_ended_by(&self, cause: &Cause<'_>) -> bool {
        match cause {
            Cause::Communicator(address) => {
                self.work.ops.iter().any(|op| op.with(|op| communicator::of(op).contains(address)))
            }
            // Its semaphore fails, which it finds by itself.
            Cause::Point(_) => false,
        }
    }
}

/// Whether a point is not reached if `lost` is not.
fn is_behind(point: &SemaphorePoint, lost: &SemaphorePoint) -> bool {
    Arc::ptr_eq(&point.semaphore, &lost.semaphore) && point.value >= lost.value
}

impl QueueCore {
    /// Fails everything the queue holds and will be given, and `signals`, which it had in hand. What is in the
    /// stream goes on.
    pub(super) fn fail(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, State>,
        failure: &Arc<Failure>,
        signals: &[SemaphorePoint],
    ) {
        state.failure.get_or_insert_with(|| Arc::clone(failure));
        // What fails here fails in its turn, behind what gathered.
        let unmarked = self.mark(&mut state).is_err().then(|| state.gathered.take()).flatten();
        let held = std::mem::take(&mut state.held);
        state.doomed.extend(unmarked.iter().map(|record| record.signals.clone()));
        state.doomed.push(signals.into());
        state.doomed.extend(held.iter().map(|held| held.work.signals.clone()));
        self.track(state);
        // What is still to come of the first one's waits must not keep the queue. Outside the lock, as below.
        if let Some(first) = held.front() {
            let waker = Waker::from(Arc::clone(self));
            first.work.waits.iter().for_each(|point| semaphore::unwatch(point, &waker));
        }
        // Outside the lock: dropping submissions frees buffers.
        drop(held);
        self.abandon(unmarked);
        self.fail_doomed();
    }

    /// Submissions of which the driver will not say when they are over.
    fn abandon(&self, records: impl IntoIterator<Item = InFlight>) {
        if self.context.failure().is_none() {
            // The device lives and may still touch what these use: it is never let go.
            records.into_iter().for_each(|record| std::mem::forget(record.keep));
        }
    }

    /// Fails what will not run, unless something before it still does.
    pub(super) fn fail_doomed(&self) {
        let state = self.lock();
        if state.is_idle() {
            Self::fail_now(state);
        }
    }

    fn fail_now(mut state: MutexGuard<'_, State>) {
        let Some(failure) = state.failure.clone() else { return };
        let doomed = std::mem::take(&mut state.doomed);
        drop(state);
        // Outside the lock: failing a semaphore wakes others.
        doomed.iter().flatten().for_each(|point| point.semaphore.fail(Arc::clone(&failure)));
    }

    /// Fails what is in the stream too, since the driver will not say when it is over.
    pub(super) fn fail_in_flight(self: &Arc<Self>, mut state: MutexGuard<'_, State>, failure: &Arc<Failure>) {
        let mut in_flight = std::mem::take(&mut state.in_flight);
        in_flight.extend(state.gathered.take());
        (state.submissions_in_flight, state.ops_in_flight) = (0, 0);
        // Before what is behind them.
        let mut signals: Vec<_> = in_flight.iter().map(|record| record.signals.clone()).collect();
        signals.append(&mut state.doomed);
        state.doomed = signals;
        self.fail(state, failure, &[]);
        self.abandon(in_flight);
    }

    /// Dooms what a cause ends and everything behind it: its signals fail, once what is in the stream is over, and the
    /// queue takes no more. Whatever waits for those points in other streams is doomed as well. Nothing is let go of
    /// before the device is past it. Returns the queues that this came to; `None` if one is busy for too long.
    pub(crate) fn doom(
        self: &Arc<Self>,
        cause: &Cause<'_>,
        failure: &Arc<Failure>,
        deadline: Deadline,
    ) -> Option<Vec<Arc<Self>>> {
        let mut doomed = Vec::new();
        let mut lost = self.doom_here(cause, failure, deadline, &mut doomed)?;
        while let Some((point, queue)) = lost.pop() {
            let cause = Cause::Point(&point);
            lost.extend(queue.doom_here(&cause, failure, deadline, &mut doomed)?);
        }
        Some(doomed)
    }

    /// The queue's own part of it; which queues wait for which of its points.
    fn doom_here(
        self: &Arc<Self>,
        cause: &Cause<'_>,
        failure: &Arc<Failure>,
        deadline: Deadline,
        doomed: &mut Vec<Arc<Self>>,
    ) -> Option<Vec<(SemaphorePoint, Arc<Self>)>> {
        let mut state = self.marked(self.lock_by(deadline)?);
        let first = state.in_flight.iter().position(|record| record.is_ended_by(cause));
        if first.is_none() && !state.held.iter().any(|held| held.is_ended_by(cause)) {
            return Some(Vec::new());
        }
        doomed.push(Arc::clone(self));
        let from = first.unwrap_or(state.in_flight.len());
        let lost: Vec<Signals> =
            state.in_flight.iter_mut().skip(from).map(|record| std::mem::take(&mut record.signals)).collect();
        let dependents: Vec<_> = lost
            .iter()
            .flatten()
            .flat_map(|point| {
                let waiting = semaphore::doom(point, failure);
                waiting.into_iter().map(|queue| (point.clone(), queue))
            })
            .collect();
        // Before what failed already, which is behind it.
        let behind = std::mem::replace(&mut state.doomed, lost);
        state.doomed.extend(behind);
        self.fail(state, failure, &[]);
        Some(dependents)
    }

    /// Fails what is doomed though the stream is not past it: nobody can say when it will be.
    pub(crate) fn fail_regardless(&self, deadline: Deadline) {
        if let Some(state) = self.lock_by(deadline) {
            Self::fail_now(state);
        }
    }
}
