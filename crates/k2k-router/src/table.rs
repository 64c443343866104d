//! Where actors are, and which way leads from one device to another.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use arc_swap::ArcSwap;
use rustc_hash::FxHashMap;
use serde::Serialize;
use warpweft_core_types::{Device, Features};

use crate::{actor::ActorId, dead_letter::Reason, inbox::Inbox};

/// How messages get from one device to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// They stay on the device.
    SameDevice,
    /// One writes into the other's memory.
    Peer,
    /// An executor of another device hands them on.
    Relayed {
        /// The position of the first device on the way.
        via: usize,
    },
    /// They lie in host memory, which both reach.
    HostMediated,
    /// There is none.
    Unreachable,
}

/// The ways between devices, by position.
#[derive(Debug)]
pub(crate) struct Ways(Vec<Vec<Way>>);

impl Ways {
    /// Decides by what the devices say of themselves.
    pub(crate) fn of_devices(devices: &[Arc<dyn Device>]) -> Self {
        let writes = |from: usize, to: usize| {
            let access = devices[from].peers().map(|peers| peers.access(devices[to].info().id));
            access.is_some_and(|access| access.write)
        };
        let sees_host = |at: usize| devices[at].features().contains(Features::HOST_VISIBLE_MEMORY);
        Self::decide(devices.len(), writes, sees_host)
    }

    /// A straight way if there is one, then the shortest over other devices, then host memory: a relay's executor takes
    /// less than a trip to the host and back.
    fn decide(
        count: usize,
        writes: impl Fn(usize, usize) -> bool,
        sees_host: impl Fn(usize) -> bool,
    ) -> Self {
        let way = |from: usize, to: usize| {
            if from == to {
                Way::SameDevice
            } else if writes(from, to) {
                Way::Peer
            } else if let Some(via) = first_stop(count, from, to, &writes) {
                Way::Relayed { via }
            } else if sees_host(from) && sees_host(to) {
                Way::HostMediated
            } else {
                Way::Unreachable
            }
        };
        Self((0..count).map(|from| (0..count).map(|to| way(from, to)).collect()).collect())
    }

    pub(crate) fn way(&self, from: usize, to: usize) -> Way {
        self.0[from][to]
    }

    /// The device that messages go to first.
    pub(crate) fn next(&self, from: usize, to: usize) -> Option<usize> {
        match self.way(from, to) {
            Way::SameDevice | Way::Peer | Way::HostMediated => Some(to),
            Way::Relayed { via } => Some(via),
            Way::Unreachable => None,
        }
    }
}

/// The first device on the shortest way over others; of equal ones, that with the lowest positions.
fn first_stop(count: usize, from: usize, to: usize, writes: &impl Fn(usize, usize) -> bool) -> Option<usize> {
    let mut stops = vec![None; count];
    let mut reached = std::collections::VecDeque::from([(from, from)]);
    while let Some((at, first)) = reached.pop_front() {
        if at == to {
            return Some(first);
        }
        for next in (0..count).filter(|&next| next != from && writes(at, next)) {
            if stops[next].is_none() {
                let first = if at == from { next } else { first };
                stops[next] = Some(first);
                reached.push_back((next, first));
            }
        }
    }
    None
}

/// Where an actor is.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) executor: usize,
    /// How often it has changed its place, around zero.
    pub(crate) generation: u16,
    /// Its place there, where the executor is a kernel.
    pub(crate) slot: u32,
    pub(crate) inbox: Arc<Inbox>,
}

/// Where all actors are, at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table {
    actors: FxHashMap<u32, Entry>,
    /// Why those that ended did, unless they were stopped.
    ended: FxHashMap<u32, Reason>,
    /// The last id that was given.
    last: u32,
}

impl Table {
    pub(crate) fn find(&self, actor: ActorId) -> Result<&Entry, Reason> {
        self.actors.get(&actor.0).ok_or_else(|| match self.ended.get(&actor.0) {
            Some(&reason) => reason,
            None if actor.0 <= self.last && actor.0 != 0 => Reason::ActorStopped,
            None => Reason::UnknownActor,
        })
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.actors.values()
    }

    pub(crate) fn insert(&mut self, entry: Entry) {
        self.last = self.last.max(entry.inbox.actor.0);
        self.actors.insert(entry.inbox.actor.0, entry);
    }

    pub(crate) fn relocate(&mut self, actor: ActorId, executor: usize) {
        if let Some(entry) = self.actors.get_mut(&actor.0) {
            (entry.executor, entry.generation) = (executor, entry.generation.wrapping_add(1));
        }
    }

    /// Everything has ended.
    pub(crate) fn clear(&mut self) {
        self.actors.clear();
    }

    /// Removes an actor that is there; one that has ended keeps its own reason.
    pub(crate) fn kill(&mut self, actor: ActorId) {
        if self.actors.contains_key(&actor.0) {
            self.remove(actor, Reason::ActorKilled);
        }
    }

    pub(crate) fn remove(&mut self, actor: ActorId, reason: Reason) {
        self.actors.remove(&actor.0);
        if reason != Reason::ActorStopped {
            self.ended.insert(actor.0, reason);
        }
    }
}

/// The table as it is now; it changes while messages flow.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    table: ArcSwap<Table>,
    version: AtomicU64,
}

impl Routes {
    pub(crate) fn load(&self) -> Arc<Table> {
        self.table.load_full()
    }

    /// Which table it is, to see cheaply whether it is another.
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        // Acquire: whoever sees the version finds its table.
        self.version.load(Ordering::Acquire)
    }

    /// Changes the table, and says what it was. Several may try; each change is made to the latest.
    pub(crate) fn change(&self, change: impl Fn(&mut Table)) -> Arc<Table> {
        let before = self.table.rcu(|table| {
            let mut table = Table::clone(table);
            change(&mut table);
            table
        });
        // Release: as in `version`.
        self.version.fetch_add(1, Ordering::Release);
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(count: usize, links: &[(usize, usize)], see_host: &[usize], expected: &[(usize, usize, Way)]) {
        let writes = |from, to| links.contains(&(from, to));
        let ways = Ways::decide(count, writes, |at| see_host.contains(&at));
        for &(from, to, way) in expected {
            assert_eq!(ways.way(from, to), way, "{from} to {to}");
        }
    }

    #[test]
    fn each_pair_has_the_way_that_its_links_allow() {
        use Way::{HostMediated, Peer, Relayed, SameDevice, Unreachable};

        let chain = [(0, 1), (1, 2), (2, 3), (1, 0)];
        check(
            4,
            &chain,
            &[0, 3],
            &[
                (2, 2, SameDevice),
                (0, 1, Peer),
                (0, 3, Relayed { via: 1 }),
                (1, 3, Relayed { via: 2 }),
                (3, 0, HostMediated),
                (3, 1, Unreachable),
            ],
        );
        // The shorter of two ways.
        check(4, &[(0, 1), (1, 2), (2, 3), (0, 2)], &[], &[(0, 3, Relayed { via: 2 })]);
    }
}
