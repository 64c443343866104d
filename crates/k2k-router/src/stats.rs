//! What has happened to messages: counters, latencies, and what waits.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use hdrhistogram::Histogram;
use serde::Serialize;
use warpweft_core_types::DeviceId;

use crate::{
    Header,
    actor::{ActorId, FullPolicy},
    dead_letter::Reason,
    table::Way,
};

/// Counters of one executor. It alone writes them.
#[derive(Debug)]
pub(crate) struct Counters {
    pub(crate) served: Counter,
    pub(crate) duplicates: Counter,
    pub(crate) early: Counter,
    pub(crate) handed_on: Counter,
    /// Messages and bytes to each device.
    pub(crate) sent: Vec<(Counter, Counter)>,
    /// Times from sending to serving, by the device they came from; the last is the host.
    latencies: Vec<Mutex<Histogram<u64>>>,
}

/// A count that one thread writes and others read.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn add(&self, count: u64) {
        // Relaxed, here and below: a count that guards no other memory. One writer needs no addition in one step.
        self.0.store(self.0.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Counters {
    pub(crate) fn new(devices: usize) -> Self {
        let histogram = || Mutex::new(latencies());
        Self {
            served: Counter::default(),
            duplicates: Counter::default(),
            early: Counter::default(),
            handed_on: Counter::default(),
            sent: std::iter::repeat_with(Default::default).take(devices).collect(),
            latencies: std::iter::repeat_with(histogram).take(devices + 1).collect(),
        }
    }

    pub(crate) fn took(&self, from: Option<usize>, nanos: u32) {
        let from = from.unwrap_or(self.latencies.len() - 1);
        lock(&self.latencies[from]).saturating_record(nanos.max(1).into());
    }

    pub(crate) fn add_latencies(&self, from: Option<usize>, sum: &mut Histogram<u64>) {
        let from = from.unwrap_or(self.latencies.len() - 1);
        // Both have the same range.
        let _same = sum.add(&*lock(&self.latencies[from]));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Two digits from a nanosecond to the four seconds that a header can tell.
pub(crate) fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, u32::MAX.into(), 2)
        .expect("the bounds are in order and two digits are allowed")
}

/// Latencies of messages, from their sender's clock to their receiver's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LatencyStats {
    /// Messages whose time was taken: a sample of all.
    pub samples: u64,
    /// The median in nanoseconds.
    pub p50_ns: u64,
    /// What 99 % stay below or at.
    pub p99_ns: u64,
    /// What 99.9 % stay below or at.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// How far the two clocks may be apart; 0 where there is one clock.
    pub clock_error_ns: u64,
}

impl LatencyStats {
    pub(crate) fn of(histogram: &Histogram<u64>) -> Self {
        let at = |quantile| histogram.value_at_quantile(quantile);
        Self {
            samples: histogram.len(),
            p50_ns: at(0.5),
            p99_ns: at(0.99),
            p999_ns: at(0.999),
            max_ns: histogram.max(),
            clock_error_ns: 0,
        }
    }
}

/// Messages from one device to another, or from the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RouteStats {
    /// Where they came from; nothing for the host.
    pub from: Option<DeviceId>,
    /// Where they went.
    pub to: DeviceId,
    /// How.
    pub way: Way,
    /// How many; messages of the host are counted where they are served.
    pub messages: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
    /// How long they took.
    pub latency: LatencyStats,
}

/// An actor as it is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ActorStats {
    /// Who it is.
    pub id: ActorId,
    /// What it is called.
    pub name: String,
    /// Where it is.
    pub device: DeviceId,
    /// How often it has changed its place, around zero.
    pub generation: u16,
    /// Messages served.
    pub served: u64,
    /// Messages that its inbox takes.
    pub inbox_capacity: u32,
    /// What happens to more.
    pub full: FullPolicy,
    /// Its handler does not return.
    pub is_looping: bool,
}

/// A device as it is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceStats {
    /// Which.
    pub device: DeviceId,
    /// It is lost, and so are its actors.
    pub is_lost: bool,
    /// An actor whose handler does not return, for which reason it cannot be parked.
    pub unparkable: Option<ActorId>,
    /// Messages served.
    pub served: u64,
}

/// A system at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Its devices.
    pub devices: Vec<DeviceStats>,
    /// Its actors, by id.
    pub actors: Vec<ActorStats>,
    /// Routes that were used.
    pub routes: Vec<RouteStats>,
    /// Messages served, in all.
    pub served: u64,
    /// Messages that came again and were passed over.
    pub duplicates: u64,
    /// Messages that came before others of their line and waited for them.
    pub early: u64,
    /// Messages that executors handed on.
    pub handed_on: u64,
    /// Messages that were not served, by reason.
    pub dead_letters: BTreeMap<Reason, u64>,
}

/// Where a message waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PendingPlace {
    /// In its receiver's inbox.
    Inbox,
    /// It was deferred by its receiver.
    Deferred,
    /// In its sender's outbox, for room.
    Outbox,
    /// At its receiver, who is parked or on its way.
    Kept,
    /// At its receiver, for those before it.
    Early,
}

/// A message that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingMessage {
    /// What it says of itself.
    pub header: Header,
    /// Where it waits.
    pub place: PendingPlace,
    /// How long it may still wait, if that is known.
    pub left: Option<Duration>,
}
