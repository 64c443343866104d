//! Where the ranks of one communicator meet.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use crate::{Code, memory::Place};

/// What ranks meet by: a unique id, or what made a communicator out of another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    Id(Vec<u8>),
    Derived { of: Box<Key>, number: u64, color: i64 },
}

/// The ranks of one communicator.
pub(crate) struct World {
    pub(crate) key: Key,
    pub(crate) size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    joined: Vec<bool>,
    leaving: usize,
    meetings: BTreeMap<(Matter, u64), Meeting>,
    /// What was sent and not taken, by sender and receiver.
    letters: BTreeMap<(usize, usize), VecDeque<Letter>>,
    next_letter: u64,
    taken: BTreeMap<(usize, usize), u64>,
    /// Windows by their number and rank.
    windows: BTreeMap<(u64, usize), Place>,
    signals: BTreeMap<(usize, usize), u64>,
}

/// What ranks meet for; they count each kind by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Matter {
    Collective,
    /// A call of a graph, whose replays are counted.
    Replay {
        capture: u64,
        index: u64,
    },
    Split,
    Window,
}

#[derive(Default)]
struct Meeting {
    part: BTreeMap<usize, Part>,
    left: usize,
}

/// What a rank brings to a meeting.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// What has to be the same on all ranks.
    pub(crate) call: Vec<i64>,
    pub(crate) bytes: Vec<u8>,
    /// What may differ, such as a factor.
    pub(crate) own: Vec<u8>,
}

struct Letter {
    number: u64,
    bytes: Vec<u8>,
}

static WORLDS: Mutex<BTreeMap<Key, Arc<World>>> = Mutex::new(BTreeMap::new());

impl World {
    /// The world of a key, with another rank in it.
    pub(crate) fn join(key: Key, rank: usize, size: usize) -> Result<Arc<Self>, Code> {
        if rank >= size {
            return Err(Code::INVALID_ARGUMENT);
        }
        let mut worlds = WORLDS.lock().unwrap_or_else(PoisonError::into_inner);
        let world = worlds.entry(key.clone()).or_insert_with(|| {
            let state = State { joined: vec![false; size], ..State::default() };
            Arc::new(Self { key, size, state: Mutex::new(state), changed: Condvar::new() })
        });
        let mut state = world.lock();
        match state.joined.get_mut(rank) {
            Some(joined) if world.size == size && !*joined => *joined = true,
            _ => return Err(Code::INVALID_USAGE),
        }
        drop(state);
        world.changed.notify_all();
        Ok(Arc::clone(world))
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.lock().joined.iter().all(|joined| *joined)
    }

    /// Waits until a condition holds, or until `given_up` says not to.
    fn wait<T>(
        &self,
        given_up: impl Fn() -> bool,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                self.changed.notify_all();
                return Some(found);
            }
            if given_up() {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn wait_complete(&self, given_up: impl Fn() -> bool) -> Option<()> {
        self.wait(given_up, |state| state.joined.iter().all(|joined| *joined).then_some(()))
    }

    /// Brings a part and gets those of all, in the order of ranks. Parts of different calls are never all there.
    pub(crate) fn meet(
        &self,
        (matter, number): (Matter, u64),
        rank: usize,
        part: Part,
        given_up: impl Fn() -> bool,
    ) -> Option<Vec<Part>> {
        let key = (matter, number);
        self.lock().meetings.entry(key).or_default().part.insert(rank, part);
        self.changed.notify_all();
        let size = self.size;
        self.wait(given_up, |state| {
            let meeting = state.meetings.get_mut(&key)?;
            let first = &meeting.part.values().next()?.call;
            let is_one_call = meeting.part.values().all(|part| part.call == *first);
            if meeting.part.len() < size || !is_one_call {
                return None;
            }
            let parts = meeting.part.values().cloned().collect();
            meeting.left += 1;
            if meeting.left == size {
                state.meetings.remove(&key);
            }
            Some(parts)
        })
    }

    /// Sends; the number to ask [`Self::wait_taken`] for.
    pub(crate) fn post(&self, from: usize, to: usize, bytes: Vec<u8>) -> u64 {
        let mut state = self.lock();
        let number = state.next_letter;
        state.next_letter += 1;
        state.letters.entry((from, to)).or_default().push_back(Letter { number, bytes });
        drop(state);
        self.changed.notify_all();
        number
    }

    /// Receives the next of a sender, if it has this many bytes; waits for good if it has others.
    pub(crate) fn take(
        &self,
        from: usize,
        to: usize,
        count: usize,
        given_up: impl Fn() -> bool,
    ) -> Option<Vec<u8>> {
        self.wait(given_up, |state| {
            let letters = state.letters.get_mut(&(from, to))?;
            letters.front().filter(|letter| letter.bytes.len() == count)?;
            let letter = letters.pop_front()?;
            state.taken.insert((from, to), letter.number);
            Some(letter.bytes)
        })
    }

    pub(crate) fn wait_taken(
        &self,
        from: usize,
        to: usize,
        number: u64,
        given_up: impl Fn() -> bool,
    ) -> Option<()> {
        self.wait(given_up, |state| {
            state.taken.get(&(from, to)).is_some_and(|taken| *taken >= number).then_some(())
        })
    }

    /// Says that a rank has nothing more to do.
    pub(crate) fn leave(&self) {
        self.lock().leaving += 1;
        self.changed.notify_all();
    }

    pub(crate) fn is_left(&self) -> bool {
        self.lock().leaving >= self.size
    }

    pub(crate) fn wait_left(&self, given_up: impl Fn() -> bool) -> Option<()> {
        let size = self.size;
        self.wait(given_up, |state| (state.leaving >= size).then_some(()))
    }

    pub(crate) fn put_window(&self, number: u64, rank: usize, place: Place) {
        self.lock().windows.insert((number, rank), place);
    }

    pub(crate) fn window(&self, number: u64, rank: usize) -> Option<Place> {
        self.lock().windows.get(&(number, rank)).copied()
    }

    pub(crate) fn signal(&self, from: usize, to: usize) {
        *self.lock().signals.entry((from, to)).or_default() += 1;
        self.changed.notify_all();
    }

    /// Waits for signals and takes them.
    pub(crate) fn take_signals(
        &self,
        from: usize,
        to: usize,
        count: u64,
        given_up: impl Fn() -> bool,
    ) -> Option<()> {
        self.wait(given_up, |state| {
            let there = state.signals.get_mut(&(from, to))?;
            *there = there.checked_sub(count)?;
            Some(())
        })
    }

    /// Lets those who wait ask again whether to give up.
    pub(crate) fn stir(&self) {
        // Under the lock, so that nobody is between asking and waiting.
        let _state = self.lock();
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
