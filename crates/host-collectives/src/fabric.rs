//! What a rank has of the communicator: memory, neighbours, and how it waits for them.

use std::{
    cell::Cell,
    hint,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use warpweft_bootstrap::{Group, GroupError, Health};
use warpweft_core_types::{CollectiveFailure, Deadline};

use crate::{
    HostConfig,
    header::ranks_text,
    layout::{Bell, WORDS_BYTES},
    region::Region,
    step::{Inside, Line},
    sync::{Ordering, fence},
};

/// Looks at what is waited for before others may have the core: some 20 us.
const LOOKS: u32 = 300;

/// The same for a rank that had to let others have the core before what it waited for came. The rank that it waits for
/// may want the same core, and then looking on is no use; if it has one of its own, it comes within so many looks.
const FEW_LOOKS: u32 = 100;

/// The same where ranks have no core each: whoever is waited for needs this one.
const CROWDED_LOOKS: u32 = 8;

/// For how long it lets others have the core before it sleeps.
const YIELD: Duration = Duration::from_micros(600);

/// How long it sleeps at most, and how often it asks the group.
const PULSE: Duration = Duration::from_millis(1);

/// The communicator has ended, and its memory says why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended;

#[derive(Debug)]
pub(crate) struct Fabric {
    pub(crate) region: SharedRegion,
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) config: HostConfig,
    /// Whether all ranks are threads of this process.
    pub(crate) is_one_process: bool,
    pub(crate) is_crowded: bool,
    /// How often the next wait looks at first.
    pub(crate) looks: LookCount,
    pub(crate) group: Arc<Group>,
    /// Whether this rank's words for the end are written.
    pub(crate) said: Mutex<bool>,
}

/// Written by the thread that has this rank's turn; others may see any value.
#[derive(Debug)]
pub(crate) struct LookCount(std::sync::atomic::AtomicU32);

impl LookCount {
    pub(crate) fn new(is_crowded: bool) -> Self {
        Self(std::sync::atomic::AtomicU32::new(if is_crowded { CROWDED_LOOKS } else { LOOKS }))
    }

    fn load(&self) -> u32 {
        self.0.load(std::sync::atomic::Ordering::Relaxed)
    }

    fn store(&self, looks: u32) {
        self.0.store(looks, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Shared by the ranks of a process.
pub(crate) type SharedRegion = Arc<Region>;

/// What is waited in.
pub(crate) struct Occasion<'a> {
    pub(crate) number: u64,
    pub(crate) name: &'a dyn Fn() -> String,
    pub(crate) deadline: Deadline,
    pub(crate) began: Cell<Option<Instant>>,
    /// Sends and receives that go on meanwhile.
    pub(crate) beside: Option<&'a dyn Fn()>,
}

impl<'a> Occasion<'a> {
    pub(crate) fn new(number: u64, name: &'a dyn Fn() -> String, deadline: Deadline) -> Self {
        Self { number, name, deadline, began: Cell::new(None), beside: None }
    }
}

/// Who is waited for.
pub(crate) enum Awaited<'a> {
    Rank(u32, &'a dyn Fn() -> Vec<u32>),
    /// Several, of whom any can make a difference.
    Any(&'a dyn Fn() -> Vec<u32>),
}

impl Awaited<'_> {
    fn missing(&self) -> Vec<u32> {
        match self {
            Self::Rank(_, missing) | Self::Any(missing) => missing(),
        }
    }
}

impl Fabric {
    pub(crate) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.rank;
        (0..self.size).filter(move |rank| *rank != own)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.region.common().ending.by().is_some()
    }

    /// Why the communicator has ended, if it has.
    pub(crate) fn failure(&self) -> Option<CollectiveFailure> {
        let by = self.region.common().ending.by()?;
        Some(self.words_of(by))
    }

    fn words_of(&self, by: u32) -> CollectiveFailure {
        let unknown = || CollectiveFailure::Aborted { rank: by, reason: "it did not say why".into() };
        if by >= self.size {
            return unknown();
        }
        let station = self.region.station(by);
        // They were complete before the ending was seen.
        let length = usize::try_from(station.length.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        let words = station.words.iter().map(|word| word.load(Ordering::Relaxed));
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        let said = bytes.get(..length).and_then(|bytes| postcard::from_bytes(bytes).ok());
        said.unwrap_or_else(unknown)
    }

    /// Ends the communicator for all ranks, if nobody has before, and wakes them.
    pub(crate) fn end(&self, failure: CollectiveFailure) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if !*said {
            let bytes = postcard::to_stdvec(&short(failure)).unwrap_or_default();
            let station = self.region.station(self.rank);
            for (word, bytes) in station.words.iter().zip(bytes.chunks(8)) {
                let mut whole = [0; 8];
                whole[..bytes.len()].copy_from_slice(bytes);
                // The ending is what orders them.
                word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
            }
            station.length.store(bytes.len() as u64, Ordering::Relaxed);
            *said = true;
        }
        self.region.common().ending.end(self.rank);
        // This rank's own call may sleep too, if another of its threads aborts.
        for rank in 0..self.size {
            let bell = &self.region.station(rank).bell.0;
            bell.store(0, Ordering::Relaxed);
            self.ring(bell);
        }
    }

    /// Waits until no rank is where it reads or writes this rank's operands. The communicator has ended, so that none
    /// goes there any more, and whoever is there comes out: it waits for nobody in there.
    pub(crate) fn wait_until_outside(&self) {
        // SeqCst: see `Inside::enter`.
        fence(Ordering::SeqCst);
        if !self.is_one_process {
            return;
        }
        for rank in self.others() {
            let inside = &self.region.station(rank).inside;
            while !inside.is_empty() {
                thread::yield_now();
            }
        }
    }

    /// Goes to where others' operands are read and written, until what is returned is dropped.
    pub(crate) fn enter(&self) -> Result<InsideGuard<'_>, Ended> {
        let inside = &self.region.station(self.rank).inside;
        if inside.enter(&self.region.common().ending) { Ok(InsideGuard(inside)) } else { Err(Ended) }
    }

    pub(crate) fn publish(&self, line: &Line, step: u64) {
        line.publish(step);
        self.wake();
    }

    /// Wakes those who sleep because of this rank, after it published something.
    pub(crate) fn wake(&self) {
        if self.region.common().sleepers.are_there() {
            self.wake_sleepers();
        }
    }

    #[cold]
    fn wake_sleepers(&self) {
        for rank in self.others() {
            let bell = &self.region.station(rank).bell.0;
            let awaited = bell.load(Ordering::Relaxed);
            if awaited == self.rank + 1 || awaited == Bell::ANY {
                bell.store(0, Ordering::Relaxed);
                self.ring(bell);
            }
        }
    }

    /// Waits until it is ready, the communicator ends, somebody it needs is lost, or the deadline passes.
    #[inline]
    pub(crate) fn wait(
        &self,
        occasion: &Occasion<'_>,
        awaited: &Awaited<'_>,
        mut is_ready: impl FnMut() -> bool,
    ) -> Result<(), Ended> {
        let looks = self.looks.load();
        for _ in 0..looks {
            if is_ready() {
                if looks == FEW_LOOKS {
                    self.looks.store(LOOKS);
                }
                return Ok(());
            }
            hint::spin_loop();
        }
        self.wait_longer(occasion, awaited, &mut is_ready)
    }

    #[cold]
    fn wait_longer(
        &self,
        occasion: &Occasion<'_>,
        awaited: &Awaited<'_>,
        is_ready: &mut dyn FnMut() -> bool,
    ) -> Result<(), Ended> {
        let started = Instant::now();
        let began = occasion.began.get().unwrap_or(started);
        occasion.began.set(Some(began));
        let mut asked = started;
        if !self.is_crowded {
            self.looks.store(FEW_LOOKS);
        }
        loop {
            for _ in 0..CROWDED_LOOKS {
                if is_ready() {
                    return Ok(());
                }
                hint::spin_loop();
            }
            if let Some(beside) = occasion.beside {
                beside();
            }
            if self.has_ended() {
                return Err(Ended);
            }
            let now = Instant::now();
            if now >= occasion.deadline.instant() {
                let missing = awaited.missing();
                // It may have come between the last look and this one.
                if is_ready() {
                    return Ok(());
                }
                self.end(timed_out(occasion, now - began, &missing));
                return Err(Ended);
            }
            if now - asked >= PULSE {
                asked = now;
                if let Some(failure) = self.loss(&awaited.missing()) {
                    // What a rank published before it was lost counts.
                    if is_ready() {
                        return Ok(());
                    }
                    self.end(failure);
                    return Err(Ended);
                }
            }
            if now - started >= YIELD {
                self.sleep(occasion, awaited, is_ready);
            } else {
                thread::yield_now();
            }
        }
    }

    /// Sleeps until somebody who is waited for publishes something, for a pulse at most.
    fn sleep(&self, occasion: &Occasion<'_>, awaited: &Awaited<'_>, is_ready: &mut dyn FnMut() -> bool) {
        let code = match awaited {
            Awaited::Rank(rank, _) if occasion.beside.is_none() => rank + 1,
            _ => Bell::ANY,
        };
        let bell = &self.region.station(self.rank).bell.0;
        let sleepers = &self.region.common().sleepers;
        bell.store(code, Ordering::Relaxed);
        sleepers.enter();
        // An ending rings the bell too, unless it came before.
        if !is_ready() && !self.has_ended() {
            self.doze(bell, code, PULSE.min(occasion.deadline.remaining()));
        }
        sleepers.leave();
        bell.store(0, Ordering::Relaxed);
    }

    #[cfg(all(target_os = "linux", not(loom)))]
    fn doze(&self, bell: &std::sync::atomic::AtomicU32, code: u32, longest: Duration) {
        use rustix::thread::futex;

        let timeout = futex::Timespec { tv_sec: 0, tv_nsec: longest.subsec_nanos().into() };
        // It ends by being woken, by the time, or at once because the bell has rung: what matters is looked at again.
        let _ended = futex::wait(bell, self.futex_flags(), code, Some(&timeout));
    }

    #[cfg(all(target_os = "linux", not(loom)))]
    fn ring(&self, bell: &std::sync::atomic::AtomicU32) {
        let _woken = rustix::thread::futex::wake(bell, self.futex_flags(), 1);
    }

    #[cfg(all(target_os = "linux", not(loom)))]
    fn futex_flags(&self) -> rustix::thread::futex::Flags {
        use rustix::thread::futex::Flags;

        if self.is_one_process { Flags::PRIVATE } else { Flags::empty() }
    }

    #[cfg(any(not(target_os = "linux"), loom))]
    fn doze(&self, _: &crate::sync::AtomicU32, _: u32, longest: Duration) {
        thread::sleep(longest.min(Duration::from_micros(100)));
    }

    #[cfg(any(not(target_os = "linux"), loom))]
    fn ring(&self, _: &crate::sync::AtomicU32) {}

    /// Whether one of these ranks will not come any more, or the whole group is told to end.
    fn loss(&self, missing: &[u32]) -> Option<CollectiveFailure> {
        let has_left = |rank: &&u32| self.region.station(**rank).progress.left.load(Ordering::Acquire) != 0;
        if let Some(rank) = missing.iter().find(has_left) {
            return Some(CollectiveFailure::PeerLost { rank: *rank, how: "it left the communicator".into() });
        }
        match self.group.check() {
            Ok(()) => None,
            Err(GroupError::PeerLost { .. }) => {
                let health = self.group.health().ok()?;
                missing.iter().find_map(|rank| match health.get(*rank as usize) {
                    Some(Health::Lost(how)) => {
                        Some(CollectiveFailure::PeerLost { rank: *rank, how: how.to_string() })
                    }
                    _ => None,
                })
            }
            Err(GroupError::Aborted { by, reason }) => {
                Some(CollectiveFailure::Aborted { rank: by.0, reason })
            }
            Err(error) => Some(CollectiveFailure::Aborted { rank: self.rank, reason: error.to_string() }),
        }
    }
}

/// Leaves when it is dropped, in a panic of a caller's reduction too.
#[derive(Debug)]
pub(crate) struct InsideGuard<'a>(&'a Inside);

impl Drop for InsideGuard<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

fn timed_out(occasion: &Occasion<'_>, after: Duration, missing: &[u32]) -> CollectiveFailure {
    let verb = if missing.len() == 1 { "has" } else { "have" };
    let waiting = format!("{} {verb} not come", ranks_text(missing));
    CollectiveFailure::TimedOut { number: occasion.number, op: (occasion.name)(), after, waiting }
}

/// Fits into a station.
fn short(mut failure: CollectiveFailure) -> CollectiveFailure {
    /// Two texts of this length and the numbers fit.
    const LONGEST: usize = WORDS_BYTES / 2 - 32;
    let texts: [Option<&mut String>; 2] = match &mut failure {
        CollectiveFailure::PeerLost { how, .. } => [Some(how), None],
        CollectiveFailure::Aborted { reason, .. } => [Some(reason), None],
        CollectiveFailure::Mismatch { what, .. } => [Some(what), None],
        CollectiveFailure::TimedOut { op, waiting, .. } => [Some(op), Some(waiting)],
        _ => [None, None],
    };
    for text in texts.into_iter().flatten() {
        let end = (0..=LONGEST.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or(0));
    }
    failure
}
