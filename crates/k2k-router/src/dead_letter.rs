//! Messages that nobody will serve, and why.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde::Serialize;

use crate::Header;

/// Why a message was not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// There never was such an actor.
    UnknownActor,
    /// The actor was stopped.
    ActorStopped,
    /// The actor was killed.
    ActorKilled,
    /// The actor's handler panicked.
    ActorFailed,
    /// The actor's device was lost.
    DeviceLost,
    /// Its time was over.
    Expired,
    /// Its receiver refuses more.
    InboxFull,
    /// A newer one took its place.
    Dropped,
    /// No way leads to the receiver's device.
    Unreachable,
    /// It was handed on too often.
    TooManyHops,
    /// It is none that the receiver takes.
    Refused,
    /// Nobody waits for this answer any more.
    LateAnswer,
    /// It came twice.
    Duplicate,
}

impl Reason {
    /// By their numbers, which devices know them by.
    const ALL: [Self; 13] = [
        Self::UnknownActor,
        Self::ActorStopped,
        Self::ActorKilled,
        Self::ActorFailed,
        Self::DeviceLost,
        Self::Expired,
        Self::InboxFull,
        Self::Dropped,
        Self::Unreachable,
        Self::TooManyHops,
        Self::Refused,
        Self::LateAnswer,
        Self::Duplicate,
    ];

    pub(crate) const fn code(self) -> u32 {
        self as u32
    }

    pub(crate) fn of_code(code: u32) -> Option<Self> {
        Self::ALL.get(code as usize).copied()
    }
}

/// A message that was not served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetter {
    /// What it said of itself.
    pub header: Header,
    /// Why.
    pub reason: Reason,
}

/// The latest dead letters, and how many there were.
#[derive(Debug)]
pub(crate) struct DeadLetters {
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    letters: VecDeque<DeadLetter>,
    counts: BTreeMap<Reason, u64>,
}

impl DeadLetters {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, state: Mutex::default() }
    }

    pub(crate) fn add(&self, header: Header, reason: Reason) {
        let mut state = self.lock();
        *state.counts.entry(reason).or_default() += 1;
        if state.letters.len() >= self.capacity {
            state.letters.pop_front();
        }
        if self.capacity > 0 {
            state.letters.push_back(DeadLetter { header, reason });
        }
    }

    pub(crate) fn take(&self) -> Vec<DeadLetter> {
        self.lock().letters.drain(..).collect()
    }

    pub(crate) fn counts(&self) -> BTreeMap<Reason, u64> {
        self.lock().counts.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_know_the_reasons_by_the_same_numbers() {
        for (code, reason) in (0..).zip(Reason::ALL) {
            assert_eq!((reason.code(), Reason::of_code(code)), (code, Some(reason)));
        }
        for (name, reason) in [
            ("UNKNOWN_ACTOR", Reason::UnknownActor),
            ("ACTOR_STOPPED", Reason::ActorStopped),
            ("EXPIRED", Reason::Expired),
            ("INBOX_FULL", Reason::InboxFull),
            ("UNREACHABLE", Reason::Unreachable),
            ("TOO_MANY_HOPS", Reason::TooManyHops),
            ("REFUSED", Reason::Refused),
        ] {
            let line = format!("WARPWEFT_{name} = {}", reason.code());
            assert!(crate::EXECUTOR_HEADER.contains(&line), "{line}");
        }
    }
}
