//! Groups of threads, through the public interface.
#![expect(clippy::panic, clippy::unwrap_used, reason = "a failed step fails the test")]
#![forbid(unsafe_code)]

mod calls;
#[cfg(target_os = "linux")]
mod descriptors;
mod environment;
mod hostile;
mod joining;
mod watching;

use std::{sync::Arc, thread, time::Duration};

use warpweft_bootstrap::{Group, JoinConfig, JoinError, Meeting, PulseConfig, Rank, Rendezvous};

/// Long enough for a loaded machine; nothing takes it unless it fails.
const SOON: Duration = Duration::from_secs(20);

/// Watches closely, so that tests need not wait long.
const CLOSELY: PulseConfig = PulseConfig {
    interval: Duration::from_millis(20),
    suspect_after: Duration::from_millis(100),
    lost_after: Duration::from_millis(400),
};

fn config(rank: u32, size: u32) -> JoinConfig {
    JoinConfig { pulse: CLOSELY, ..JoinConfig::new(Rank(rank), size) }
}

/// Joins `size` threads, each with its own configuration, and returns what each got.
fn join_each(
    size: u32,
    configure: impl Fn(u32) -> JoinConfig + Send + Sync,
) -> Vec<Result<Group, JoinError>> {
    let meeting = Meeting::new();
    in_threads(size, |rank| {
        let meeting = Rendezvous::Meeting(Arc::clone(&meeting));
        Group::join(meeting, configure(rank), SOON)
    })
}

fn groups(size: u32) -> Vec<Group> {
    join_each(size, |rank| config(rank, size)).into_iter().map(Result::unwrap).collect()
}

fn in_threads<T: Send>(count: u32, work: impl Fn(u32) -> T + Send + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|rank| {
                let work = &work;
                scope.spawn(move || work(rank))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Lets every member do something at once.
fn each<T: Send>(groups: &[Group], work: impl Fn(&Group) -> T + Send + Sync) -> Vec<T> {
    in_threads(groups.len().try_into().unwrap(), |rank| work(&groups[rank as usize]))
}
