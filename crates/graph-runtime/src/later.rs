//! What waits until its thread holds none of the runtime's locks.
//!
//! Code of programs runs where runs are dropped, since tasks own what they like, and may come back to the runtime. Runs
//! are taken off the list under the lock.

use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};

use crate::{run::Run, single};

thread_local! {
    /// How many of the runtimes' locks this thread holds.
    static HELD: Cell<usize> = const { Cell::new(0) };
    static LATER: RefCell<Vec<Arc<Run>>> = const { RefCell::new(Vec::new()) };
}

/// Lets go of a run now, or as soon as this thread holds no lock.
pub(crate) fn drop_later(run: Arc<Run>) {
    if HELD.get() == 0 {
        return single::let_go(run);
    }
    // Where the thread is ending there is no later.
    let _kept = LATER.try_with(|later| later.borrow_mut().push(run));
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
            // Outside the borrow: what is dropped may have more dropped. The list keeps its memory for the next time.
            while let Ok(Some(run)) = LATER.try_with(|later| later.borrow_mut().pop()) {
                single::let_go(run);
            }
        }
    }
}
