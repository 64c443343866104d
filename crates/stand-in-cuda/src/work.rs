//! The threads that carry out streams: as many as there are streams with something to do.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use crate::{machine::running, stream::Stream};

/// How long a thread without work stays.
const STAY: Duration = Duration::from_millis(200);

/// Threads, and streams that wait for one.
#[derive(Debug, Default)]
pub(crate) struct Workers {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Arc<Stream>>,
    idle: usize,
}

impl Workers {
    /// Finds or makes a thread for a stream: streams never wait for each other's threads.
    pub(crate) fn serve(&self, stream: Arc<Stream>) {
        let mut state = self.lock();
        state.waiting.push_back(stream);
        if state.waiting.len() <= state.idle {
            drop(state);
            return self.changed.notify_one();
        }
        drop(state);
        let spawned = thread::Builder::new().name("stand-in/stream".to_owned()).spawn(|| {
            if let Ok(machine) = running() {
                machine.workers.work();
            }
        });
        // Whoever cannot have a thread has to wait for one that is there.
        if spawned.is_err() {
            self.changed.notify_one();
        }
    }

    fn work(&self) {
        while let Some(stream) = self.next() {
            stream.run();
        }
    }

    fn next(&self) -> Option<Arc<Stream>> {
        let mut state = self.lock();
        if let Some(stream) = state.waiting.pop_front() {
            return Some(stream);
        }
        state.idle += 1;
        let waited = self.changed.wait_timeout_while(state, STAY, |state| state.waiting.is_empty());
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.idle -= 1;
        state.waiting.pop_front()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
