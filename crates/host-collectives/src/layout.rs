//! Where what lies in the shared memory.

use crate::{
    HostConfig,
    step::{Ending, Inside, Line, Sleepers},
    sync::{AtomicU32, AtomicU64},
};

/// Fragments that a channel holds.
pub(crate) const FRAGMENTS: u64 = 4;

/// Bytes of what a rank says of the end.
pub(crate) const WORDS_BYTES: usize = 1024;

/// What belongs to the whole communicator.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Common {
    pub(crate) ending: Ending,
    pub(crate) sleepers: Sleepers,
}

/// What one rank says of itself; it alone writes it, but for the bell.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Station {
    pub(crate) progress: Progress,
    pub(crate) inside: Inside,
    pub(crate) bell: Bell,
    /// Why it ended the communicator: a length and bytes, complete once [`Ending`] names the rank.
    pub(crate) length: AtomicU64,
    pub(crate) words: [AtomicU64; WORDS_BYTES / 8],
}

/// How far a rank is.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Progress {
    pub(crate) begun: AtomicU64,
    pub(crate) ended: AtomicU64,
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
    /// 1 once it has dropped its communicator.
    pub(crate) left: AtomicU32,
}

/// What a sleeping rank waits for: a rank plus one, or [`Bell::ANY`]. 0 when it is awake.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Bell(pub(crate) AtomicU32);

impl Bell {
    pub(crate) const ANY: u32 = u32::MAX;
}

/// The head of a channel from one rank to another.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Channel {
    pub(crate) sender: SenderSide,
    pub(crate) receiver: ReceiverSide,
}

#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct SenderSide {
    /// Fragments put in.
    pub(crate) head: AtomicU64,
}

#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct ReceiverSide {
    /// Fragments taken out.
    pub(crate) tail: AtomicU64,
    /// The latest message that was not what was expected, and what that was.
    pub(crate) refused: AtomicU64,
    pub(crate) expected_bytes: AtomicU64,
    pub(crate) expected_dtype: AtomicU64,
}

/// Offsets, all of them multiples of 64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    size: usize,
    /// Bytes of a slot behind its line.
    pub(crate) slot_bytes: usize,
    /// Bytes of a chunk, where a slot has one for every rank.
    pub(crate) chunk_bytes: usize,
    pub(crate) fragment_bytes: usize,
}

const LINE: usize = size_of::<Line>();

impl Layout {
    pub(crate) fn new(size: u32, config: &HostConfig) -> Self {
        let size = size as usize;
        // A chunk of every part, and one more for what this rank has reduced.
        let chunk_bytes = config.slot_bytes / (size + 1) / LINE * LINE;
        Self { size, slot_bytes: config.slot_bytes, chunk_bytes, fragment_bytes: config.fragment_bytes }
    }

    pub(crate) fn total(&self) -> usize {
        self.channels() + self.size * self.size * self.channel_bytes()
    }

    pub(crate) fn common(&self) -> usize {
        0
    }

    pub(crate) fn station(&self, rank: u32) -> usize {
        size_of::<Common>() + rank as usize * size_of::<Station>()
    }

    /// The line of a rank's slot for steps of this parity; the slot follows it.
    pub(crate) fn line(&self, rank: u32, step: u64) -> usize {
        let parity = usize::from(!step.is_multiple_of(2));
        self.station(0)
            + self.size * size_of::<Station>()
            + (rank as usize * 2 + parity) * (LINE + self.slot_bytes)
    }

    pub(crate) fn slot(&self, rank: u32, step: u64) -> usize {
        self.line(rank, step) + LINE
    }

    pub(crate) fn channel(&self, from: u32, to: u32) -> usize {
        self.channels() + (from as usize * self.size + to as usize) * self.channel_bytes()
    }

    /// The line of a fragment; its bytes follow it.
    pub(crate) fn fragment_line(&self, from: u32, to: u32, fragment: u64) -> usize {
        let index = usize::try_from(fragment % FRAGMENTS).expect("there are few");
        self.channel(from, to) + size_of::<Channel>() + index * (LINE + self.fragment_bytes)
    }

    pub(crate) fn fragment(&self, from: u32, to: u32, fragment: u64) -> usize {
        self.fragment_line(from, to, fragment) + LINE
    }

    fn channels(&self) -> usize {
        self.station(0) + self.size * size_of::<Station>() + self.size * 2 * (LINE + self.slot_bytes)
    }

    fn channel_bytes(&self) -> usize {
        let fragments = usize::try_from(FRAGMENTS).expect("there are few");
        size_of::<Channel>() + fragments * (LINE + self.fragment_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps_and_all_is_aligned() {
        for size in [2_u32, 3, 16] {
            let layout = Layout::new(size, &HostConfig::default());
            let mut places = vec![(layout.common(), size_of::<Common>())];
            for rank in 0..size {
                places.push((layout.station(rank), size_of::<Station>()));
                for step in 0..2 {
                    places.push((layout.line(rank, step), LINE));
                    places.push((layout.slot(rank, step), layout.slot_bytes));
                }
                for to in 0..size {
                    places.push((layout.channel(rank, to), size_of::<Channel>()));
                    for fragment in 0..FRAGMENTS {
                        places.push((layout.fragment_line(rank, to, fragment), LINE));
                        places.push((layout.fragment(rank, to, fragment), layout.fragment_bytes));
                    }
                }
            }
            places.sort_unstable();
            assert!(places.iter().all(|(start, _)| start.is_multiple_of(64)));
            assert!(places.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0));
            let (start, bytes) = places[places.len() - 1];
            assert_eq!(start + bytes, layout.total());
        }
    }
}
