//! What the stream has finished, and letting go of what it used.

use std::sync::{Arc, atomic::Ordering};

use smallvec::SmallVec;
use warpweft_core_types::DriverError;
use warpweft_polled::Polled;

use super::{InFlight, QueueCore, Spare, WINDOW};
use crate::semaphore;

/// Finished submissions that are looked after at once.
const BATCH: usize = 16;

/// Spares kept for the next submissions: as many as there can be submissions in the stream.
const SPARES: usize = WINDOW;

/// Submissions that are over.
type Done = SmallVec<[InFlight; BATCH]>;

impl QueueCore {
    /// Raises what finished submissions signal and lets go of what they used; whether some are held.
    fn settle(&self, mut done: Done) -> bool {
        // Outside the lock: raising a semaphore wakes others, and letting go of buffers frees them.
        for record in &mut done {
            record.signals.iter().for_each(semaphore::reached);
            record.signals.clear();
        }
        self.let_go(&mut done);
        self.recycle(done)
    }

    /// Lets go of what submissions used. A device that goes with it goes on its service thread: this may be the
    /// thread that other devices wait for.
    fn let_go(&self, done: &mut [InFlight]) {
        // Acquire: pairs with the drop of the handle.
        if self.is_orphan.load(Ordering::Acquire) {
            let kept: Vec<_> = done.iter_mut().map(|record| std::mem::take(&mut record.keep)).collect();
            self.context.serve(move || drop(kept));
        } else {
            done.iter_mut().for_each(|record| record.keep.clear());
        }
    }

    /// Asks the driver with the lock open: a program that submits meanwhile must not wait for the answer, which
    /// takes a microsecond, nor be put to sleep by a lock that is taken again and again.
    fn take_finished(&self, done: &mut Done) -> Result<(), DriverError> {
        let Some(_asking) = self.context.cold.ask() else { return Ok(()) };
        let Some(mut state) = self.try_lock() else { return Ok(()) };
        let mut current = None;
        while done.len() < BATCH
            && let Some(event) = state.in_flight.front().map(|first| Arc::clone(&first.event))
        {
            drop(state);
            if current.is_none() {
                current = Some(self.context.enter()?);
            }
            if !event.is_done()? {
                return Ok(());
            }
            state = self.lock();
            // Another thread may have asked the same.
            if state.in_flight.front().is_some_and(|first| Arc::ptr_eq(&first.event, &event)) {
                drop(event);
                let Some(finished) = state.in_flight.pop_front() else { continue };
                state.finished += finished.submissions as u64;
                state.submissions_in_flight -= finished.submissions;
                state.ops_in_flight -= finished.ops;
                done.push(finished);
            }
        }
        Ok(())
    }

    /// Keeps what the next submissions can use; whether some are held.
    fn recycle(&self, done: Done) -> bool {
        let mut state = self.lock();
        let room = SPARES.saturating_sub(state.spares.len());
        let spent = done.into_iter().take(room);
        state.spares.extend(spent.map(|InFlight { event, keep, .. }| Spare { event, keep }));
        !state.held.is_empty()
    }
}

impl Polled for QueueCore {
    /// Takes note of what the stream has finished; whether it was something.
    ///
    /// It does nothing while another thread is busy with the queue: that thread, or the next look, will.
    fn reap(self: &Arc<Self>) -> bool {
        let mut progress = false;
        loop {
            let mut done = Done::new();
            let looked = self.take_finished(&mut done);
            let is_last = done.len() < BATCH;
            progress |= !done.is_empty();
            // What is over is so before what fails behind it.
            let is_held = !done.is_empty() && self.settle(done);
            if let Err(error) = looked {
                let failure = self.context.judge(error);
                self.fail_in_flight(self.lock(), &failure);
            } else if is_held {
                self.schedule();
            }
            if is_last {
                break;
            }
        }
        if progress {
            self.fail_doomed();
        }
        self.mark_what_waits();
        progress
    }

    /// Whether submissions wait here for the stream to get shorter or for others.
    fn is_holding(&self) -> bool {
        self.try_lock().is_some_and(|state| !state.held.is_empty())
    }

    /// Whether the reactor may forget the queue.
    fn retire(&self) -> bool {
        let Some(mut state) = self.try_lock() else { return false };
        state.tracked = !state.is_idle();
        !state.tracked
    }

    /// Lets go of a queue that has nothing under way: one that nobody uses any more goes on the device's service
    /// thread, for the same reason.
    fn end(self: Arc<Self>) {
        // Acquire: as in `let_go`.
        if self.is_orphan.load(Ordering::Acquire) {
            let context = Arc::clone(&self.context);
            context.serve(move || drop(self));
        }
    }
}
