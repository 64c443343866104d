//! How many messages an actor has, as its senders count.

use std::sync::{
    Mutex, OnceLock,
    atomic::{AtomicU64, Ordering},
};

use crossbeam_utils::CachePadded;

use crate::{
    SendError,
    actor::{ActorId, ActorSpec, FullPolicy, Layout, Priority},
    device::RemoteCounts,
    host_port::HostLine,
};

/// What senders know of an actor. It is the same wherever the actor is.
#[derive(Debug)]
pub(crate) struct Inbox {
    pub(crate) actor: ActorId,
    pub(crate) name: String,
    pub(crate) capacity: u32,
    pub(crate) full: FullPolicy,
    pub(crate) priority: Priority,
    pub(crate) messages: Vec<(u32, Layout)>,
    /// Bytes of a payload that lanes hold.
    longest: usize,
    /// Places taken, in all, and how many of them were free again when somebody last looked.
    taken: CachePadded<(AtomicU64, AtomicU64)>,
    /// Places that are free again, in all.
    freed: CachePadded<AtomicU64>,
    served: CachePadded<AtomicU64>,
    /// What the actor's device counts, if it is not one of the host's.
    remote: OnceLock<RemoteCounts>,
    /// The host as a sender.
    pub(crate) host: Mutex<HostLine>,
}

impl Inbox {
    pub(crate) fn new(actor: ActorId, spec: &ActorSpec, longest: usize) -> Self {
        Self {
            actor,
            name: spec.name.clone(),
            capacity: spec.inbox_capacity,
            full: spec.full,
            priority: spec.priority,
            messages: spec.code.messages.clone(),
            longest,
            taken: CachePadded::default(),
            freed: CachePadded::default(),
            served: CachePadded::default(),
            remote: OnceLock::new(),
            host: Mutex::default(),
        }
    }

    /// Whether it is a message that the actor takes.
    pub(crate) fn accepts(&self, kind: u32, length: usize) -> Result<(), SendError> {
        if length > self.longest {
            return Err(SendError::TooLong { length, limit: self.longest });
        }
        if self.messages.is_empty() {
            return Ok(());
        }
        let known = self.messages.iter().find(|(known, _)| *known == kind);
        match known {
            Some((_, layout)) if layout.size as usize == length => Ok(()),
            Some((_, layout)) => {
                Err(SendError::Layout { actor: self.actor, kind, expected: layout.size, length })
            }
            None => Err(SendError::UnknownKind { actor: self.actor, kind }),
        }
    }

    /// Whether senders count, or the receiver.
    const fn is_bounded(&self) -> bool {
        matches!(self.full, FullPolicy::Wait { .. } | FullPolicy::Reject)
    }

    /// Takes a place, if there is one.
    pub(crate) fn take(&self) -> bool {
        if !self.is_bounded() {
            return true;
        }
        let (taken, seen) = &*self.taken;
        // Relaxed, here and below: places are counted; what is in them is ordered by the lanes.
        let before = taken.fetch_add(1, Ordering::Relaxed);
        let room = |freed: u64| before.wrapping_sub(freed) < u64::from(self.capacity);
        if room(seen.load(Ordering::Relaxed)) {
            return true;
        }
        let freed = self.freed.load(Ordering::Relaxed) + self.remote.get().map_or(0, RemoteCounts::freed);
        seen.store(freed, Ordering::Relaxed);
        if !room(freed) {
            taken.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        true
    }

    /// Gives a place back that no message went to.
    pub(crate) fn untake(&self) {
        if self.is_bounded() {
            self.taken.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// A message left its place.
    pub(crate) fn free(&self) {
        if self.is_bounded() {
            self.freed.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn count_served(&self) {
        self.served.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed) + self.remote.get().map_or(0, RemoteCounts::served)
    }

    /// The actor's device counts for it from here on.
    pub(crate) fn set_remote(&self, counts: RemoteCounts) {
        let _once = self.remote.set(counts);
    }
}
