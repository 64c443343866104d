//! What the service and the program's threads share.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    task::Waker,
};

use warpweft_core_types::Deadline;

use crate::{
    GroupError, Health, HealthChange, JoinError, Rank,
    message::{CallFailure, CallRequest, Welcome},
    service::Contact,
};

/// Changes that a watcher can be behind before it misses some.
const REMEMBERED: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Set before the service starts.
    pub(crate) waker: OnceLock<mio::Waker>,
}

#[derive(Debug)]
pub(crate) enum Command {
    Call(CallRequest),
    Abort { reason: String },
    Leave,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) commands: VecDeque<Command>,
    pub(crate) joined: Option<Result<(Welcome, Contact), JoinError>>,
    pub(crate) health: Vec<Health>,
    pub(crate) changes: Changes,
    pub(crate) aborted: Option<(Rank, String)>,
    /// This member has left.
    pub(crate) left: bool,
    pub(crate) outcomes: BTreeMap<u64, Result<Vec<Vec<u8>>, CallFailure>>,
    /// Somebody is in a call; calls of one member have an order.
    pub(crate) calling: bool,
    pub(crate) next_sequence: u64,
    /// The service has ended, with what it said.
    pub(crate) ended: Option<String>,
    pub(crate) wakers: Vec<Waker>,
    #[cfg(target_os = "linux")]
    pub(crate) inbox: crate::mailbox::Inbox,
}

/// The latest changes of health, numbered from the first.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    latest: VecDeque<HealthChange>,
    forgotten: u64,
}

impl Changes {
    fn push(&mut self, change: HealthChange) {
        if self.latest.len() == REMEMBERED {
            self.latest.pop_front();
            self.forgotten += 1;
        }
        self.latest.push_back(change);
    }

    /// How many there were so far.
    pub(crate) fn count(&self) -> u64 {
        self.forgotten + self.latest.len() as u64
    }

    /// The first one from `number` on that is remembered, and the number that follows it.
    pub(crate) fn from(&self, number: u64) -> Option<(HealthChange, u64)> {
        let number = number.max(self.forgotten);
        let index = usize::try_from(number - self.forgotten).ok()?;
        self.latest.get(index).map(|change| (*change, number + 1))
    }
}

impl State {
    /// Why no call can succeed any more.
    pub(crate) fn broken(&self) -> Option<GroupError> {
        if self.left {
            return Some(GroupError::Left);
        }
        if let Some((by, reason)) = &self.aborted {
            return Some(GroupError::Aborted { by: *by, reason: reason.clone() });
        }
        let ranks = self.health.iter().zip(0..);
        let mut lost = ranks.filter_map(|(health, rank)| match health {
            Health::Lost(how) => Some(GroupError::PeerLost { rank: Rank(rank), how: *how }),
            _ => None,
        });
        let lost = lost.next();
        lost.or_else(|| self.ended.clone().map(|reason| GroupError::ServiceEnded { reason }))
    }

    /// Why nothing can come from this member any more.
    #[cfg(target_os = "linux")]
    pub(crate) fn gone(&self, rank: Rank) -> Option<GroupError> {
        if self.left || self.aborted.is_some() || self.ended.is_some() {
            return self.broken();
        }
        match self.health.get(rank.index()) {
            Some(Health::Lost(how)) => Some(GroupError::PeerLost { rank, how: *how }),
            _ => None,
        }
    }

    pub(crate) fn set_health(&mut self, rank: Rank, health: Health) {
        let Some(known) = self.health.get_mut(rank.index()) else { return };
        // A loss is final, even if something older arrives later.
        if known.is_present() && *known != health {
            *known = health;
            self.changes.push(HealthChange { rank, health });
        }
    }
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panicked left no half-made change: each is one assignment or insertion.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes everybody who waits for it.
    pub(crate) fn update(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.changed.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits until `look` finds something; nothing if the deadline passes first.
    pub(crate) fn wait<T>(
        &self,
        deadline: Deadline,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return Some(found);
            }
            let remaining = deadline.remaining();
            if remaining.is_zero() {
                return None;
            }
            state = self.changed.wait_timeout(state, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Hands the service something to do.
    pub(crate) fn command(&self, command: Command) {
        self.lock().commands.push_back(command);
        self.wake();
    }

    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.get()
            && let Err(error) = waker.wake()
        {
            tracing::warn!(%error, "the service could not be woken");
        }
    }
}
