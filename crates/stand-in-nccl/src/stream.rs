//! Streams: threads that do one thing after the other.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
pub(crate) struct Stream {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    busy: bool,
    closed: bool,
}

/// Streams by their handles; the default one has none.
static STREAMS: Mutex<BTreeMap<usize, Arc<Stream>>> = Mutex::new(BTreeMap::new());

impl Stream {
    /// A stream with a handle that is no special one.
    pub(crate) fn create() -> usize {
        const FIRST: usize = 0x1000;
        let mut streams = streams();
        let handle = streams.last_key_value().map_or(FIRST, |(last, _)| last + 1);
        streams.insert(handle, Self::start());
        handle
    }

    /// The stream of a handle; the default one is made when it is first asked for.
    pub(crate) fn of(handle: usize) -> Option<Arc<Self>> {
        let mut streams = streams();
        if handle == 0 {
            return Some(Arc::clone(streams.entry(0).or_insert_with(Self::start)));
        }
        streams.get(&handle).cloned()
    }

    pub(crate) fn destroy(handle: usize) {
        if let Some(stream) = streams().remove(&handle) {
            stream.lock().closed = true;
            stream.changed.notify_all();
        }
    }

    fn start() -> Arc<Self> {
        let stream = Arc::new(Self::default());
        let own = Arc::clone(&stream);
        thread::spawn(move || own.run());
        stream
    }

    pub(crate) fn push(&self, task: Task) {
        self.lock().tasks.push_back(task);
        self.changed.notify_all();
    }

    /// Whether everything was done before the time was up.
    pub(crate) fn synchronize(&self, within: Duration) -> bool {
        let end = Instant::now() + within;
        let mut state = self.lock();
        while state.busy || !state.tasks.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(task) = state.tasks.pop_front() {
                state.busy = true;
                drop(state);
                task();
                state = self.lock();
                state.busy = false;
                self.changed.notify_all();
            } else if state.closed {
                return;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn streams() -> MutexGuard<'static, BTreeMap<usize, Arc<Stream>>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}
