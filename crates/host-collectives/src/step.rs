//! The protocol by which ranks hand each other memory: steps, the two slots of each rank, and marks.
//!
//! A rank counts its steps. In step `s` it writes its slot of parity `s % 2`, publishes `s`, waits until every rank has
//! published `s`, and reads the slots of the others. What it read in `s` it has read before it publishes `s + 1`; so
//! once all have published `s + 1`, which a rank sees before it begins `s + 2`, nobody reads slots of step `s` any
//! more, and they may be written. No second barrier is needed, and no rank is more than a step ahead of another.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// The head of a slot: which step its contents belong to, and what the call is.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Line {
    step: AtomicU64,
    /// Valid once the step is published, until it is that of the step after the next.
    pub(crate) words: [AtomicU64; 7],
}

impl Line {
    /// Hands what was written to the slot before to those who see the step.
    pub(crate) fn publish(&self, step: u64) {
        // Release: with the load in `has_come`, everything that this rank wrote to the slot, and everything it read
        // from slots of earlier steps, is before what the others do once they see the step.
        self.step.store(step, Ordering::Release);
    }

    /// Whether the rank has published this step. In the slot of the step's parity there is no later one before all have
    /// seen this one.
    pub(crate) fn has_come(&self, step: u64) -> bool {
        self.step.load(Ordering::Acquire) >= step
    }
}

/// Whether somebody sleeps, who then has to be woken by whoever publishes.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Sleepers(AtomicU32);

impl Sleepers {
    /// Says so, before a last look at what is waited for.
    pub(crate) fn enter(&self) {
        // Release, with the load in `are_there`: who sees the sleeper sees whom it waits for.
        self.0.fetch_add(1, Ordering::Release);
        // SeqCst, with the fence in `are_there`: either the sleeper's last look sees what was published, or the
        // publisher sees the sleeper.
        fence(Ordering::SeqCst);
    }

    pub(crate) fn leave(&self) {
        // Nothing is handed over by it: one who sees it late wakes nobody.
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// Asked after something was published.
    pub(crate) fn are_there(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Acquire) > 0
    }
}

/// Why the communicator ended: the rank whose words stand for it, plus one.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Ending(AtomicU64);

impl Ending {
    /// Whose words say why, if it has ended.
    pub(crate) fn by(&self) -> Option<u32> {
        // Acquire: with the exchange below, that rank's words are complete.
        u32::try_from(self.0.load(Ordering::Acquire)).ok()?.checked_sub(1)
    }

    /// Ends it, unless somebody has before. Whoever does has written its words.
    pub(crate) fn end(&self, rank: u32) {
        // SeqCst: see `Inside`.
        let _first = self.0.compare_exchange(0, u64::from(rank) + 1, Ordering::SeqCst, Ordering::Acquire);
        fence(Ordering::SeqCst);
    }
}

/// Whether a rank is where it reads and writes the memory of others.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Inside(AtomicU32);

impl Inside {
    /// Goes in; refused once the communicator has ended.
    ///
    /// A rank that fails ends the communicator first and then waits until nobody is inside. Both stores come before
    /// fences and both loads after: either this load sees the ending, or the failing rank sees the mark.
    pub(crate) fn enter(&self, ending: &Ending) -> bool {
        self.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if ending.by().is_none() {
            return true;
        }
        self.leave();
        false
    }

    pub(crate) fn leave(&self) {
        // Release: what was read and written inside is before what the failing rank's caller does with its memory.
        self.0.store(0, Ordering::Release);
    }

    /// Asked after the communicator was ended, or seen to have ended and a fence.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

#[cfg(all(test, loom))]
#[expect(unsafe_code, reason = "loom looks for accesses at the same time through cells")]
mod loom_tests {
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    /// Two ranks with two slots each.
    #[derive(Default)]
    struct Slots([[(Line, UnsafeCell<u64>); 2]; 2]);

    fn steps(slots: &Slots, rank: usize, steps: u64) {
        for step in 1..=steps {
            let parity = usize::try_from(step % 2).unwrap();
            let (line, data) = &slots.0[rank][parity];
            data.with_mut(|data| {
                // SAFETY: loom itself finds an access at the same time, which is what this looks for.
                unsafe { *data = step * 10 + rank as u64 };
            });
            line.publish(step);
            let (line, data) = &slots.0[1 - rank][parity];
            while !line.has_come(step) {
                thread::yield_now();
            }
            let seen = data.with(|data| {
                // SAFETY: as above.
                unsafe { *data }
            });
            assert_eq!(seen, step * 10 + 1 - rank as u64);
        }
    }

    #[test]
    fn loom_slots_of_two_parities_need_no_second_barrier() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let slots = Arc::new(Slots::default());
            let other = Arc::clone(&slots);
            let peer = thread::spawn(move || steps(&other, 1, 4));
            steps(&slots, 0, 4);
            peer.join().unwrap();
        });
    }

    #[test]
    fn loom_nobody_is_inside_once_a_failing_rank_has_waited() {
        loom::model(|| {
            let shared = Arc::new((Ending::default(), Inside::default(), UnsafeCell::new(0_u64)));
            let other = Arc::clone(&shared);
            let peer = thread::spawn(move || {
                let (ending, inside, memory) = &*other;
                if inside.enter(ending) {
                    memory.with_mut(|memory| {
                        // SAFETY: loom finds an access at the same time.
                        unsafe { *memory += 1 };
                    });
                    inside.leave();
                }
            });
            let (ending, inside, memory) = &*shared;
            ending.end(0);
            while !inside.is_empty() {
                thread::yield_now();
            }
            memory.with_mut(|memory| {
                // SAFETY: as above; this is the caller that has its memory back.
                unsafe { *memory += 1 };
            });
            peer.join().unwrap();
        });
    }

    #[test]
    fn loom_a_sleeper_is_seen_or_sees() {
        loom::model(|| {
            let shared = Arc::new((Sleepers::default(), Line::default()));
            let other = Arc::clone(&shared);
            let publisher = thread::spawn(move || {
                other.1.publish(1);
                other.0.are_there()
            });
            shared.0.enter();
            let seen = shared.1.has_come(1);
            let woken = publisher.join().unwrap();
            assert!(seen || woken);
        });
    }
}
