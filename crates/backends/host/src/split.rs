//! An operation that several threads carry out together.

use std::{
    fmt,
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use warpweft_core_types::Failure;

use crate::{
    engine::{Engine, Task},
    idle::{Spinner, spin_until},
};

/// Parts of one operation, numbered from 0, each done by whichever thread takes it.
pub(crate) struct Split {
    parts: u64,
    body: Box<dyn Fn(u64) -> Result<(), Arc<Failure>> + Send + Sync>,
    taken: AtomicU64,
    done: AtomicU64,
    failure: OnceLock<Arc<Failure>>,
    /// Signalled with the last part.
    ended: (Mutex<bool>, Condvar),
}

impl Split {
    /// Runs `body` for every part below `parts` on this thread and the device's other workers, and returns
    /// when all are done. After a failure no further parts start.
    pub(crate) fn run(
        engine: &Engine,
        parts: u64,
        body: impl Fn(u64) -> Result<(), Arc<Failure>> + Send + Sync + 'static,
    ) -> Result<(), Arc<Failure>> {
        let split = Arc::new(Self {
            parts,
            body: Box::new(body),
            taken: AtomicU64::new(0),
            done: AtomicU64::new(0),
            failure: OnceLock::new(),
            ended: Default::default(),
        });
        let helpers = (engine.workers() - 1).min(usize::try_from(parts - 1).unwrap_or(usize::MAX));
        for _ in 0..helpers {
            engine.push(Task::Split(Arc::clone(&split)));
        }
        split.work();
        split.finish()
    }

    /// Takes parts until none are left.
    pub(crate) fn work(&self) {
        loop {
            // Relaxed: a ticket; the body's memory is ordered by `done`.
            let part = self.taken.fetch_add(1, Ordering::Relaxed);
            if part >= self.parts {
                return;
            }
            if self.failure.get().is_none()
                && let Err(failure) = (self.body)(part)
            {
                // The first failure is the one reported.
                let _ = self.failure.set(failure);
            }
            // Release: pairs with the owner's acquire, so that it sees what every part wrote.
            if self.done.fetch_add(1, Ordering::Release) + 1 == self.parts {
                *self.ended.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
                self.ended.1.notify_all();
            }
        }
    }

    /// Waits for parts that other threads have taken: bounded by the parts themselves.
    fn finish(&self) -> Result<(), Arc<Failure>> {
        let all_done = || self.done.load(Ordering::Acquire) == self.parts;
        if !spin_until(Spinner::Waiter, all_done) {
            let mut ended = self.ended.0.lock().unwrap_or_else(PoisonError::into_inner);
            while !*ended {
                ended = self.ended.1.wait(ended).unwrap_or_else(PoisonError::into_inner);
            }
        }
        self.failure.get().map_or(Ok(()), |failure| Err(Arc::clone(failure)))
    }
}

impl fmt::Debug for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Split").field("parts", &self.parts).field("done", &self.done).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_runs_once_and_all_are_done_at_the_end() {
        let engine = Engine::start("split", 3).unwrap();
        for parts in [1, 2, 3, 100] {
            let ran: Arc<Vec<AtomicU64>> = Arc::new((0..parts).map(|_| AtomicU64::new(0)).collect());
            let counted = Arc::clone(&ran);
            let count = move |part: u64| {
                counted[usize::try_from(part).unwrap()].fetch_add(1, Ordering::Relaxed);
                Ok(())
            };
            Split::run(&engine, parts, count).unwrap();
            assert!(ran.iter().all(|times| times.load(Ordering::Relaxed) == 1), "{parts} parts");
        }
        engine.close();
    }

    #[test]
    fn the_first_failure_is_reported_and_no_further_parts_start() {
        let engine = Engine::start("split", 1).unwrap();
        let ran = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&ran);
        let outcome = Split::run(&engine, 1000, move |part| {
            counted.fetch_add(1, Ordering::Relaxed);
            if part == 3 { Err(Arc::new(Failure::Cancelled)) } else { Ok(()) }
        });
        assert!(matches!(outcome.unwrap_err().as_ref(), Failure::Cancelled));
        assert_eq!(ran.load(Ordering::Relaxed), 4);
        engine.close();
    }
}
