//! Answers that the host waits for.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use rustc_hash::FxHashMap;
use warpweft_core_types::Deadline;

use crate::{AskError, Message, actor::ActorId, dead_letter::Reason, device::Link};

/// How long whoever waits looks before it sleeps: about what waking it costs.
const SPIN: Duration = Duration::from_micros(30);

/// What was asked and is not answered, by correlation.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    last: AtomicU32,
    open: Mutex<FxHashMap<u32, Arc<Slot>>>,
    /// Devices whose answers somebody has to fetch: whoever waits for one does while it looks.
    links: OnceLock<Vec<Weak<Link>>>,
}

#[derive(Debug)]
struct Slot {
    to: ActorId,
    /// 0 until there is an answer.
    is_there: AtomicU32,
    answer: Mutex<Option<Result<Message, AskError>>>,
    changed: Condvar,
}

impl Slot {
    fn fill(&self, answer: Result<Message, AskError>) {
        *self.lock() = Some(answer);
        // Relaxed: the answer itself is behind the lock.
        self.is_there.store(1, Ordering::Relaxed);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Option<Result<Message, AskError>>> {
        // Nothing panics under the lock.
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Replies {
    pub(crate) fn set_links(&self, links: &[Arc<Link>]) {
        let _once = self.links.set(links.iter().map(Arc::downgrade).collect());
    }

    fn help(&self) {
        let links = self.links.get().into_iter().flatten();
        links.filter_map(Weak::upgrade).for_each(|link| link.help());
    }

    /// Expects an answer.
    pub(crate) fn expect(self: &Arc<Self>, to: ActorId) -> Reply {
        let slot = Arc::new(Slot {
            to,
            is_there: AtomicU32::new(0),
            answer: Mutex::new(None),
            changed: Condvar::new(),
        });
        let mut open = self.lock();
        // 0 stands for none, and what is still open is not used again.
        let correlation = loop {
            // Relaxed: a number, and nothing else.
            let next = self.last.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
            if next != 0 && !open.contains_key(&next) {
                break next;
            }
        };
        open.insert(correlation, Arc::clone(&slot));
        drop(open);
        Reply { replies: Arc::clone(self), slot, correlation }
    }

    /// An answer came; says whether anybody waits for it.
    pub(crate) fn answer(&self, message: Message) -> bool {
        let slot = self.lock().remove(&message.header.correlation);
        slot.map(|slot| slot.fill(Ok(message))).is_some()
    }

    /// What was asked of the actors will not be answered.
    pub(crate) fn give_up(&self, reason: Reason, is_lost: impl Fn(ActorId) -> bool) {
        let lost: Vec<_> = self.lock().extract_if(|_, slot| is_lost(slot.to)).collect();
        for (_, slot) in lost {
            slot.fill(Err(AskError::Lost { actor: slot.to, reason }));
        }
    }

    /// A question that was not served.
    pub(crate) fn fail(&self, correlation: u32, reason: Reason) {
        let slot = self.lock().remove(&correlation);
        if let Some(slot) = slot {
            slot.fill(Err(AskError::NotServed { actor: slot.to, reason }));
        }
    }

    fn lock(&self) -> MutexGuard<'_, FxHashMap<u32, Arc<Slot>>> {
        // Nothing panics under the lock.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An answer that will come. Dropping it gives it up.
#[derive(Debug)]
pub struct Reply {
    replies: Arc<Replies>,
    slot: Arc<Slot>,
    correlation: u32,
}

impl Reply {
    pub(crate) const fn correlation(&self) -> u32 {
        self.correlation
    }

    /// The answer, if it is there.
    pub fn try_take(&self) -> Option<Result<Message, AskError>> {
        // Relaxed: as in `Slot::fill`.
        if self.slot.is_there.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.slot.lock().take()
    }

    /// Waits for the answer.
    ///
    /// # Errors
    ///
    /// [`AskError::Timeout`] by the deadline; others as soon as it is known that there will be none.
    pub fn wait(self, deadline: impl Into<Deadline>) -> Result<Message, AskError> {
        let deadline = deadline.into();
        let began = Instant::now();
        while began.elapsed() < SPIN {
            self.replies.help();
            for _ in 0..20 {
                if let Some(answer) = self.try_take() {
                    return answer;
                }
                std::hint::spin_loop();
            }
        }
        let mut answer = self.slot.lock();
        loop {
            if let Some(answer) = answer.take() {
                return answer;
            }
            let remaining = deadline.remaining();
            if remaining.is_zero() {
                return Err(AskError::Timeout { actor: self.slot.to });
            }
            let woken = self.slot.changed.wait_timeout(answer, remaining);
            answer = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.replies.lock().remove(&self.correlation);
    }
}
