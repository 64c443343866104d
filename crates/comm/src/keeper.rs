//! The thread that keeps an eye on a communicator: on the other ranks, on calls that take too long, and on how far
//! queues have come.

use std::{
    process,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Wake, Waker},
    thread::{self, JoinHandle, Thread},
    time::{Duration, Instant},
};

use crate::{
    CommError,
    inner::{GRACE, Inner},
};

/// How often calls that are under way are looked at.
const BUSY: Duration = Duration::from_millis(4);

/// How often it looks when there were some lately, and how many times it does. A call does not wake it then, since that
/// costs more than the rest of the call.
const DOZE: (Duration, u32) = (Duration::from_millis(50), 20);

/// How often it looks later. A call wakes it then, and so does a rank that is lost, always.
const REST: Duration = Duration::from_secs(1);

/// How often the engines are asked for errors, which may cost a call into a driver.
const CHECK: Duration = Duration::from_millis(100);

/// How long a drop waits for calls that may be over, and how often it looks.
const PROMPT: Duration = Duration::from_millis(20);
const GLANCE: Duration = Duration::from_micros(200);

/// Ends the thread when it is dropped, or has it end by itself once nothing is under way.
#[derive(Debug)]
pub(crate) struct Keeper {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
    /// The process whose thread it is.
    process: u32,
}

/// How the thread is woken.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    /// The thread sleeps long, since it knows of no calls.
    resting: AtomicBool,
    ended: AtomicBool,
    thread: std::sync::OnceLock<Thread>,
    /// Who wants to look again when the thread has looked.
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    wakers: Vec<Waker>,
    /// The thread looks no more.
    is_over: bool,
}

impl Bell {
    /// Whether the communicator was dropped.
    pub(crate) fn has_ended(&self) -> bool {
        // Relaxed: the lock of what is under way orders it, where that counts.
        self.ended.load(Ordering::Relaxed)
    }

    /// There are calls. It costs nothing while that is known.
    pub(crate) fn calls(&self) {
        // Relaxed: it is only about when the thread looks next; what it looks at is under a lock.
        // Once for each rest: waking a thread costs more than the rest of a call.
        if self.resting.load(Ordering::Relaxed) && self.resting.swap(false, Ordering::Relaxed) {
            self.ring();
        }
    }

    /// Wakes somebody once, when the thread has looked the next time; at once if it looks no more.
    pub(crate) fn look_for(&self, waker: &Waker) {
        let mut waiting = self.waiting();
        if waiting.is_over {
            drop(waiting);
            return waker.wake_by_ref();
        }
        if !waiting.wakers.iter().any(|known| known.will_wake(waker)) {
            waiting.wakers.push(waker.clone());
        }
        drop(waiting);
        // Relaxed: as in `calls`. A thread that does not rest looks by itself, and soon.
        if self.resting.swap(false, Ordering::Relaxed) {
            self.ring();
        }
    }

    /// The thread has looked, for the last time or not.
    fn looked(&self, is_over: bool) {
        let mut waiting = self.waiting();
        waiting.is_over = is_over;
        let wakers = std::mem::take(&mut waiting.wakers);
        drop(waiting);
        // Outside the lock: whoever is woken may come back here.
        wakers.into_iter().for_each(Waker::wake);
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // No code of others runs under the lock but the copying of wakers, which leaves it whole.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }
}

impl Keeper {
    pub(crate) fn start(inner: Arc<Inner>) -> Result<Self, CommError> {
        let watched = Arc::clone(&inner);
        let thread = thread::Builder::new().name("comm keeper".to_owned()).spawn(move || keep(&watched));
        let thread = thread.map_err(CommError::system("start a thread"))?;
        Ok(Self { inner, thread: Some(thread), process: process::id() })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let bell = &self.inner.bell;
        // Relaxed: unparking and parking order it.
        bell.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // Whoever is called back by it may drop its communicator, and forks have no such thread.
            if thread.thread().id() == thread::current().id() || process::id() != self.process {
                return;
            }
            // With calls under way it stays until they are over, which are so already most of the time. Without any it
            // leaves, but where it ends a failed communicator an engine may take longer than a drop should.
            let began = Instant::now();
            while !thread.is_finished() {
                let patience = if self.inner.is_busy() { PROMPT } else { GRACE };
                if began.elapsed() >= patience {
                    return;
                }
                thread::sleep(GLANCE);
            }
            if thread.join().is_err() {
                tracing::error!("the keeper of a communicator had panicked");
            }
        }
    }
}

fn keep(inner: &Inner) {
    let bell = &inner.bell;
    // It is set once: a communicator has one keeper.
    let _thread = bell.thread.set(thread::current());
    let waker = Waker::from(Arc::clone(bell));
    let (mut checked, mut idle, mut dropped) = (Instant::now(), 0, None);
    loop {
        if bell.has_ended() {
            let dropped: &mut Instant = dropped.get_or_insert_with(Instant::now);
            if inner.is_busy() && dropped.elapsed() >= GRACE {
                inner.give_up();
            }
            if !inner.is_busy() {
                inner.leave();
                return bell.looked(true);
            }
        }
        // First: what changes from here on wakes the thread again.
        inner.group().wake_on_change(&waker);
        inner.check_group();
        inner.look();
        inner.check_age();
        if checked.elapsed() >= CHECK {
            inner.check_engines();
            checked = Instant::now();
        }
        bell.looked(false);
        let busy = inner.is_busy();
        idle = if busy { 0 } else { idle + 1 };
        let rests = idle > DOZE.1;
        // Relaxed: as in `Bell::calls`. A call that is missed here is seen when the rest is over.
        bell.resting.store(rests, Ordering::Relaxed);
        thread::park_timeout(match (busy, rests) {
            (true, _) => BUSY,
            (false, false) => DOZE.0,
            (false, true) => REST,
        });
        if rests && !bell.resting.swap(false, Ordering::Relaxed) {
            idle = 0;
        }
    }
}
