//! What waits until its thread holds none of the runtime's locks.
//!
//! Code of programs runs where runs are dropped, since tasks own what they like, and may come back to the runtime. Runs
//! are taken off the list under the lock.

use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};

use crate::run::Run;

thread_local! {
    /// How many of the runtimes' locks this thread holds.
    static HELD: Cell<usize> = const { Cell::new(0) };
    static LATER: RefCell<Vec<Later>> = const { RefCell::new(Vec::new()) };
}

/// Something to do when no lock is held.
pub(crate) enum Later {
    /// Let go of it.
    Drop { _run: Arc<Run> },
}

impl Later {
    /// Does it now, or as soon as this thread holds no lock.
    pub(crate) fn schedule(self) {
        if HELD.get() == 0 {
            return self.perform();
        }
        LATER.with_borrow_mut(|later| later.push(self));
    }

    fn perform(self) {
        match self {
            Self::Drop { .. } => {}
        }
    }
}

/// Lives as long as a lock is held. It goes after the lock's guard.
#[derive(Debug)]
pub(crate) struct Held(());

impl Held {
    pub(crate) fn new() -> Self {
        HELD.set(HELD.get() + 1);
        Self(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        HELD.set(HELD.get() - 1);
        if HELD.get() == 0 {
            // Outside the borrow: what is done may schedule more.
            LATER.take().into_iter().for_each(Later::perform);
        }
    }
}
