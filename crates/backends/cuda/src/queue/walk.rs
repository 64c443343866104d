//! Queues that wake each other.

use std::{cell::RefCell, collections::VecDeque, sync::Arc, task::Wake};

use super::QueueCore;

impl Wake for QueueCore {
    /// Looks at the queue again, once the queue that this thread is looking at is done with: a chain of queues
    /// that wake each other is walked and not descended.
    fn wake(self: Arc<Self>) {
        let fallback = Arc::clone(&self);
        // A thread that is ending has no list any more.
        let started = WOKEN.try_with(|woken| {
            let mut woken = woken.borrow_mut();
            let first = woken.is_none();
            woken.get_or_insert_default().push_back(self);
            first
        });
        match started {
            Ok(true) => Walk.run(),
            Ok(false) => {}
            Err(_) => fallback.schedule(),
        }
    }
}

thread_local! {
    /// Queues to be looked at by this thread, which is doing so if there is a list.
    static WOKEN: RefCell<Option<VecDeque<Arc<QueueCore>>>> = const { RefCell::new(None) };
}

/// The looking; its list goes with it, however it ends.
struct Walk;

impl Walk {
    fn run(self) {
        let next = || WOKEN.with_borrow_mut(|woken| woken.as_mut().and_then(VecDeque::pop_front));
        while let Some(queue) = next() {
            queue.schedule();
        }
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        let _gone = WOKEN.try_with(|woken| woken.borrow_mut().take());
    }
}
