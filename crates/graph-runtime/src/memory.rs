//! The memories that a runtime has seen, and what becomes of them.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Weak},
};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use warpweft_core_types::{Buffer, BufferView, DeviceId};

use crate::{
    error::{BusyReason, NodeFailure, Poison},
    ranges::{Order, RangeMap, User},
    usage::Usage,
};

/// A moment in a line of work: it is past when the line has come to `value`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Point {
    /// Position among the runtime's lines.
    pub(crate) line: u32,
    pub(crate) value: u64,
}

impl User for Point {
    const HAS_LINES: bool = true;

    fn is_behind(self, earlier: Self) -> bool {
        self.line == earlier.line && self.value >= earlier.value
    }
}

/// For uses whose order is known already.
pub(crate) struct Unordered;

impl Order<Point> for Unordered {
    fn after(&mut self, _earlier: Point) {}

    fn join(&mut self, _members: &[Point]) -> Option<Point> {
        // There are as many as there are lines, which are few.
        None
    }
}

/// A range of one of the runtime's memories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bytes {
    pub(crate) memory: u32,
    pub(crate) range: Range<u64>,
}

/// One memory, whatever buffers stand for it.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) device: DeviceId,
    pub(crate) users: RangeMap<Point>,
    poisoned: Vec<Poisoned>,
    leases: Vec<Lease>,
    /// Its device was lost.
    is_quarantined: bool,
    /// Where it is, and the buffers it was seen as.
    space: usize,
    start: u64,
    size: u64,
    buffers: SmallVec<[(usize, Weak<dyn Buffer>); 1]>,
}

/// When something was submitted: the number of its run, and of its segment.
pub(crate) type Turn = (u64, usize);

/// Bytes that failed work was to write. What was submitted before it knows nothing of them.
#[derive(Debug, Clone)]
struct Poisoned {
    range: Range<u64>,
    cause: Arc<NodeFailure>,
    turn: Turn,
}

/// Bytes that the host, or another library, has for itself.
#[derive(Debug)]
struct Lease {
    id: u64,
    range: Range<u64>,
    kind: LeaseKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseKind {
    Read,
    Write,
    HandOff,
}

/// All memories of a runtime, by the buffers and the addresses they were seen at.
#[derive(Debug, Default)]
pub(crate) struct Memories {
    list: Vec<Option<Memory>>,
    free: Vec<u32>,
    by_buffer: FxHashMap<usize, (u32, u64)>,
    /// By space and first byte: the end, and the memory.
    by_place: BTreeMap<(usize, u64), (u64, u32)>,
    /// How many there were when they were last swept.
    swept_at: usize,
    next_lease: u64,
    /// Leases that have not ended, of all memories: most often there are none, and nobody has to look for them.
    leases: usize,
    /// Bytes somewhere may be poisoned; the same.
    is_poisoned: bool,
}

/// A buffer shares memory with one that was used before, and is not within it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Straddles;

impl Memories {
    /// The memory that a buffer stands for, and where in it the buffer begins.
    pub(crate) fn find(&mut self, buffer: &Arc<dyn Buffer>) -> Result<(u32, u64), Straddles> {
        match self.known(buffer) {
            Some(known) => Ok(known),
            None => self.register(Arc::as_ptr(buffer).addr(), buffer),
        }
    }

    /// The same for a buffer that was used before.
    pub(crate) fn known(&self, buffer: &Arc<dyn Buffer>) -> Option<(u32, u64)> {
        // A weak handle of each keeps its address from being another buffer's.
        self.by_buffer.get(&Arc::as_ptr(buffer).addr()).copied()
    }

    fn register(&mut self, key: usize, buffer: &Arc<dyn Buffer>) -> Result<(u32, u64), Straddles> {
        if self.by_buffer.len() >= 2 * self.swept_at.max(32) {
            self.sweep();
        }
        let place = BufferView::whole(Arc::clone(buffer)).place();
        let (space, bytes) = (place.space(), place.bytes().clone());
        if self.overlapping(space, &bytes).is_some() {
            // It may be the address of something that is gone.
            self.sweep();
        }
        let (index, base) = match self.overlapping(space, &bytes) {
            None => (self.insert(space, bytes, buffer.device()), 0),
            Some((start, end, index)) if start <= bytes.start && bytes.end <= end => {
                (index, bytes.start - start)
            }
            Some(_) => return Err(Straddles),
        };
        self.at(index).buffers.push((key, Arc::downgrade(buffer)));
        self.by_buffer.insert(key, (index, base));
        Ok((index, base))
    }

    fn overlapping(&self, space: usize, bytes: &Range<u64>) -> Option<(u64, u64, u32)> {
        let before = self.by_place.range(..(space, bytes.end)).next_back();
        let (&(found, start), &(end, index)) = before?;
        (found == space && end > bytes.start).then_some((start, end, index))
    }

    fn insert(&mut self, space: usize, bytes: Range<u64>, device: DeviceId) -> u32 {
        let memory = Memory {
            device,
            users: RangeMap::default(),
            poisoned: Vec::new(),
            leases: Vec::new(),
            is_quarantined: false,
            space,
            start: bytes.start,
            size: bytes.end - bytes.start,
            buffers: SmallVec::new(),
        };
        let index = self.free.pop().unwrap_or_else(|| {
            self.list.push(None);
            u32::try_from(self.list.len() - 1).unwrap_or(u32::MAX)
        });
        self.list[index as usize] = Some(memory);
        self.by_place.insert((space, bytes.start), (bytes.end, index));
        index
    }

    /// Forgets memories whose buffers are all gone. Work under way holds its buffers, so nothing uses those.
    fn sweep(&mut self) {
        for (index, entry) in (0..).zip(&mut self.list) {
            let Some(memory) = entry else { continue };
            memory.buffers.retain(|(key, buffer)| {
                let alive = buffer.strong_count() > 0;
                if !alive {
                    self.by_buffer.remove(key);
                }
                alive
            });
            if memory.buffers.is_empty() {
                self.by_place.remove(&(memory.space, memory.start));
                *entry = None;
                self.free.push(index);
            }
        }
        self.swept_at = self.by_buffer.len();
    }

    /// A memory that something holds a buffer of.
    pub(crate) fn at(&mut self, index: u32) -> &mut Memory {
        self.list[index as usize]
            .as_mut()
            .expect("whoever has the position holds a buffer, so it was not swept")
    }

    pub(crate) fn all(&mut self) -> impl Iterator<Item = &mut Memory> {
        self.list.iter_mut().flatten()
    }

    /// Bytes of buffers that are alive, each memory once.
    pub(crate) fn live_bytes(&self) -> u64 {
        let alive = |memory: &&Memory| memory.buffers.iter().any(|(_, buffer)| buffer.strong_count() > 0);
        self.list.iter().flatten().filter(alive).map(Memory::size).sum()
    }

    /// Lends bytes to the host or another library.
    pub(crate) fn lease(&mut self, bytes: &Bytes, kind: LeaseKind) -> u64 {
        self.next_lease += 1;
        self.leases += 1;
        let lease = Lease { id: self.next_lease, range: bytes.range.clone(), kind };
        self.at(bytes.memory).leases.push(lease);
        self.next_lease
    }

    pub(crate) fn end_lease(&mut self, memory: u32, id: u64) {
        self.leases -= 1;
        self.at(memory).leases.retain(|lease| lease.id != id);
    }

    /// Whether the host or another library has bytes anywhere.
    pub(crate) const fn has_leases(&self) -> bool {
        self.leases > 0
    }

    /// Whether bytes anywhere may be poisoned.
    pub(crate) const fn may_be_poisoned(&self) -> bool {
        self.is_poisoned
    }

    pub(crate) fn poison(&mut self, bytes: Bytes, cause: &Arc<NodeFailure>, turn: Turn) {
        self.is_poisoned = true;
        self.at(bytes.memory).poison(bytes.range, cause, turn);
    }

    /// Poisons all memory of a lost device; the bytes of those that were not quarantined yet.
    pub(crate) fn quarantine(&mut self, device: DeviceId, cause: &Arc<NodeFailure>, turn: Turn) -> u64 {
        self.is_poisoned = true;
        let mut quarantined = 0;
        for memory in self.all().filter(|memory| memory.device == device) {
            if !memory.is_quarantined {
                quarantined += memory.size();
                memory.is_quarantined = true;
            }
            memory.poison(0..u64::MAX, cause, turn);
        }
        quarantined
    }

    /// All of a range is written anew, by whoever has this turn.
    pub(crate) fn heal(&mut self, bytes: &Bytes, turn: Turn) {
        let memory = self.at(bytes.memory);
        if memory.is_poisoned() {
            memory.heal(&bytes.range, turn);
            self.is_poisoned = self.list.iter().flatten().any(Memory::is_poisoned);
        }
    }
}

impl Memory {
    /// In bytes.
    pub(crate) const fn size(&self) -> u64 {
        self.size
    }

    /// What holds bytes that somebody would use so.
    pub(crate) fn holder(&self, range: &Range<u64>, usage: Usage) -> Option<BusyReason> {
        let lease = self.leases.iter().find(|lease| {
            overlap(&lease.range, range) && (usage.writes() || lease.kind != LeaseKind::Read)
        })?;
        let range = lease.range.clone();
        Some(match lease.kind {
            LeaseKind::Read => BusyReason::Leased { holder: "read", range },
            LeaseKind::Write => BusyReason::Leased { holder: "write", range },
            LeaseKind::HandOff => BusyReason::HandedOff { range },
        })
    }

    pub(crate) const fn is_poisoned(&self) -> bool {
        !self.poisoned.is_empty()
    }

    /// The first poisoned bytes of a range, as far as whoever has this turn is concerned.
    pub(crate) fn poison_in(&self, range: &Range<u64>, turn: Turn) -> Option<Poison> {
        self.poisons_in(range, turn).next()
    }

    /// All of them.
    pub(crate) fn poisons_in(&self, range: &Range<u64>, turn: Turn) -> impl Iterator<Item = Poison> {
        let concerns = move |one: &&Poisoned| one.turn < turn && overlap(&one.range, range);
        self.poisoned.iter().filter(concerns).map(|Poisoned { range, cause, .. }| Poison {
            device: self.device,
            range: range.clone(),
            cause: Arc::clone(cause),
        })
    }

    fn poison(&mut self, range: Range<u64>, cause: &Arc<NodeFailure>, turn: Turn) {
        self.heal(&range, turn);
        self.poisoned.push(Poisoned { range, cause: Arc::clone(cause), turn });
    }

    fn heal(&mut self, range: &Range<u64>, turn: Turn) {
        let rest = |one: Poisoned| {
            let is_older = one.turn <= turn;
            let left = one.range.start..if is_older { one.range.end.min(range.start) } else { one.range.end };
            let right = if is_older { one.range.start.max(range.end)..one.range.end } else { 0..0 };
            [Poisoned { range: left, ..one.clone() }, Poisoned { range: right, ..one }]
        };
        let healed = std::mem::take(&mut self.poisoned).into_iter().flat_map(rest);
        self.poisoned = healed.filter(|one| !one.range.is_empty()).collect();
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}
