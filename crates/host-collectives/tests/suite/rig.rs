//! Threads that are ranks.

use std::{sync::Arc, thread, time::Duration};

use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous};
use warpweft_host_collectives::{HostCommunicator, HostConfig};

pub(crate) const WITHIN: Duration = Duration::from_secs(60);

pub(crate) fn groups(size: u32) -> Vec<Arc<Group>> {
    let meeting = Meeting::new();
    let join = |rank| {
        let meeting = Rendezvous::Meeting(meeting.clone());
        thread::spawn(move || {
            Arc::new(Group::join(meeting, JoinConfig::new(Rank(rank), size), WITHIN).unwrap())
        })
    };
    let joining: Vec<_> = (0..size).map(join).collect();
    joining.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// One communicator a rank.
pub(crate) fn communicators(groups: &[Arc<Group>], config: &HostConfig) -> Vec<Arc<HostCommunicator>> {
    each(groups.iter().map(Arc::clone).collect(), |group| {
        Arc::new(HostCommunicator::join(group, config, WITHIN).unwrap())
    })
}

pub(crate) fn met(size: u32, config: &HostConfig) -> Vec<Arc<HostCommunicator>> {
    communicators(&groups(size), config)
}

/// Does it for each in a thread of its own; what each returned.
pub(crate) fn each<T: Send, R: Send>(of: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = of.into_iter().map(|item| scope.spawn(move || work(item))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Small chunks and fragments, so that short operands take many steps; nothing directly.
pub(crate) fn by_slots() -> HostConfig {
    HostConfig {
        slot_bytes: 1088,
        one_shot_bytes: 0,
        is_direct: false,
        fragment_bytes: 64,
        ..Default::default()
    }
}

/// All of it directly.
pub(crate) fn directly() -> HostConfig {
    HostConfig { direct_bytes: 0, ..by_slots() }
}

/// In one step.
pub(crate) fn at_once() -> HostConfig {
    HostConfig { one_shot_bytes: 1 << 20, ..by_slots() }
}
