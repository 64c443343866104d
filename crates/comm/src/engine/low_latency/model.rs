//! The rings of `kernels/low_latency.cu` as a state machine, explored in every order of steps and of the arrival of stores.
//!
//! A message is one line here, of two words that arrive by themselves. Stores to one place arrive in order, and others in
//! any, but for flags, which arrive behind what they stand for. What has to hold: no word is overwritten before it was taken, what is taken is what the call expects, and ranks
//! that can do nothing more have done everything.

use std::collections::HashSet;

use super::window::SLOTS;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    /// All give to all, as in sums of one shot, gathers to all and exchanges of all.
    All,
    /// The same, and once more what came of it.
    TwoShots,
    /// One gives to all, which tells it nothing of them.
    From(usize),
    /// All give to one, which tells them nothing.
    To(usize),
}

#[derive(Debug, Clone, Copy)]
struct World {
    ranks: usize,
    slots: u8,
    /// Words of a line.
    words: usize,
    calls: &'static [Call],
    /// Bits of the calls whose messages are bare.
    bare: u8,
    /// Whether senders wait for room, as they have to.
    waits: bool,
}

/// A word of a line: the number of its message, and which it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Word {
    number: u8,
    call: u8,
    shot: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Store {
    Word {
        place: usize,
        word: Word,
    },
    /// Behind the words of its message, which begin at `words`.
    Flag {
        place: usize,
        words: usize,
        number: u8,
    },
    Credit {
        place: usize,
        taken: u8,
    },
}

impl Store {
    const fn place(self) -> (u8, usize) {
        match self {
            Self::Word { place, .. } => (0, place),
            Self::Flag { place, .. } => (1, place),
            Self::Credit { place, .. } => (2, place),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Rank {
    call: u8,
    /// 0 before anything was given, then the shot that is being taken.
    shot: u8,
    /// Ranks whose message of this shot was taken.
    taken_from: u8,
    sent: Vec<u8>,
    taken: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    ranks: Vec<Rank>,
    /// Those of lines, and behind them those that are bare.
    words: Vec<Word>,
    /// Of slots, the number of the last bare message there.
    flags: Vec<u8>,
    credit: Vec<u8>,
    /// Stores under way, by place, and those to one place in their order.
    flight: Vec<Store>,
}

impl World {
    fn start(&self) -> State {
        let rank =
            Rank { call: 0, shot: 0, taken_from: 0, sent: vec![0; self.ranks], taken: vec![0; self.ranks] };
        let pairs = self.ranks * self.ranks;
        State {
            ranks: vec![rank; self.ranks],
            words: vec![Word::default(); 2 * pairs * usize::from(self.slots) * self.words],
            flags: vec![0; pairs * usize::from(self.slots)],
            credit: vec![0; pairs],
            flight: Vec::new(),
        }
    }

    fn pair(&self, from: usize, to: usize) -> usize {
        from * self.ranks + to
    }

    fn slot(&self, from: usize, to: usize, number: u8) -> usize {
        self.pair(from, to) * usize::from(self.slots) + usize::from(number % self.slots)
    }

    fn all_slots(&self) -> usize {
        self.ranks * self.ranks * usize::from(self.slots)
    }

    fn is_bare(&self, call: u8) -> bool {
        self.bare >> call & 1 == 1
    }

    /// Where the words of a message of a call begin.
    fn place(&self, slot: usize, call: u8) -> usize {
        (slot + if self.is_bare(call) { self.all_slots() } else { 0 }) * self.words
    }

    /// To whom a rank gives in a call, and from whom it takes.
    fn parties(&self, rank: usize, call: Call) -> (Vec<usize>, Vec<usize>) {
        let others: Vec<usize> = (0..self.ranks).filter(|other| *other != rank).collect();
        match call {
            Call::All | Call::TwoShots => (others.clone(), others),
            Call::From(root) if root == rank => (others, Vec::new()),
            Call::From(root) => (Vec::new(), vec![root]),
            Call::To(root) if root == rank => (Vec::new(), others),
            Call::To(root) => (vec![root], Vec::new()),
        }
    }

    /// Every state that one step leads to.
    fn next(&self, state: &State) -> Vec<State> {
        let mut next: Vec<State> = (0..self.ranks).filter_map(|rank| self.step(state, rank)).collect();
        for (at, store) in state.flight.iter().enumerate() {
            let is_first = state.flight[..at].iter().all(|earlier| earlier.place() != store.place());
            if is_first && !self.is_behind_words(state, *store) {
                next.push(self.arrive(state, at));
            }
        }
        next
    }

    /// Whether it is a flag with words of its message still under way.
    fn is_behind_words(&self, state: &State, store: Store) -> bool {
        let Store::Flag { words, .. } = store else { return false };
        let stands_for = words..words + self.words;
        state
            .flight
            .iter()
            .any(|other| matches!(other, Store::Word { place, .. } if stands_for.contains(place)))
    }

    fn arrive(&self, state: &State, at: usize) -> State {
        let mut state = state.clone();
        match state.flight.remove(at) {
            Store::Credit { place, taken } => state.credit[place] = taken,
            Store::Word { place, word } => {
                let before = std::mem::replace(&mut state.words[place], word);
                let slot = place / self.words % self.all_slots();
                self.check_taken(&state, slot, before.number);
            }
            Store::Flag { place, number, .. } => {
                let before = std::mem::replace(&mut state.flags[place], number);
                self.check_taken(&state, place, before);
            }
        }
        state
    }

    /// What was in a slot may be overwritten.
    fn check_taken(&self, state: &State, slot: usize, number: u8) {
        let pair = slot / usize::from(self.slots);
        let (from, to) = (pair / self.ranks, pair % self.ranks);
        assert!(number <= state.ranks[to].taken[from], "message {number} was not taken yet");
    }

    fn step(&self, state: &State, rank: usize) -> Option<State> {
        let call = *self.calls.get(usize::from(state.ranks[rank].call))?;
        let (receivers, senders) = self.parties(rank, call);
        let shots = if call == Call::TwoShots { 2 } else { 1 };
        let mut state = state.clone();
        if state.ranks[rank].shot == 0 {
            let has_room = |to: &usize| {
                let last = state.ranks[rank].sent[*to] + shots;
                state.credit[self.pair(rank, *to)] + self.slots >= last
            };
            if self.waits && !receivers.iter().all(has_room) {
                return None;
            }
            self.give(&mut state, rank, &receivers, 1);
            state.ranks[rank].shot = 1;
            return Some(state);
        }
        let own = &state.ranks[rank];
        if let Some(from) = senders.iter().find(|from| own.taken_from >> **from & 1 == 0) {
            self.take(&state, rank, *from).then(|| {
                state.ranks[rank].taken_from |= 1 << from;
                state
            })
        } else if own.shot < shots {
            self.give(&mut state, rank, &receivers, 2);
            (state.ranks[rank].shot, state.ranks[rank].taken_from) = (2, 0);
            Some(state)
        } else {
            self.turn(&mut state, rank, &receivers, &senders, shots);
            Some(state)
        }
    }

    fn give(&self, state: &mut State, rank: usize, receivers: &[usize], shot: u8) {
        let call = state.ranks[rank].call;
        for to in receivers {
            let number = state.ranks[rank].sent[*to] + shot;
            let word = Word { number, call, shot };
            let slot = self.slot(rank, *to, number);
            let words = self.place(slot, call);
            state.flight.extend((words..words + self.words).map(|place| Store::Word { place, word }));
            if self.is_bare(call) {
                state.flight.push(Store::Flag { place: slot, words, number });
            }
        }
        // By place, and stable: what goes to one place keeps its order.
        state.flight.sort_by_key(|store| store.place());
    }

    /// Whether the next message of a rank has arrived as a whole, which is then the right one.
    fn take(&self, state: &State, rank: usize, from: usize) -> bool {
        let own = &state.ranks[rank];
        let number = own.taken[from] + own.shot;
        let slot = self.slot(from, rank, number);
        let words = self.place(slot, own.call);
        let words = &state.words[words..words + self.words];
        let has_arrived = match self.is_bare(own.call) {
            true => state.flags[slot] == number,
            false => words.iter().all(|word| word.number == number),
        };
        if has_arrived {
            let expected = Word { number, call: own.call, shot: own.shot };
            assert!(words.iter().all(|word| *word == expected), "{words:?} is not {expected:?}");
        }
        has_arrived
    }

    fn turn(&self, state: &mut State, rank: usize, receivers: &[usize], senders: &[usize], shots: u8) {
        let own = &mut state.ranks[rank];
        receivers.iter().for_each(|to| own.sent[*to] += shots);
        for from in senders {
            own.taken[*from] += shots;
            let (place, taken) = (self.pair(*from, rank), own.taken[*from]);
            state.flight.push(Store::Credit { place, taken });
        }
        (own.call, own.shot, own.taken_from) = (own.call + 1, 0, 0);
        state.flight.sort_by_key(|store| store.place());
    }

    /// Explores everything; how many states there are.
    fn explore(&self) -> usize {
        let (mut seen, mut open) = (HashSet::new(), vec![self.start()]);
        seen.insert(self.start());
        while let Some(state) = open.pop() {
            let next = self.next(&state);
            let is_done = state.ranks.iter().all(|rank| usize::from(rank.call) == self.calls.len());
            assert!(!next.is_empty() || is_done, "nobody can go on: {state:?}");
            open.extend(next.into_iter().filter(|state| seen.insert(state.clone())));
        }
        seen.len()
    }
}

use Call::{All, From, To, TwoShots};

#[test]
fn two_ranks_in_every_order() {
    let world = World { ranks: 2, slots: 1, words: 2, calls: &[All, All, All], bare: 0, waits: true };
    assert!(world.explore() > 100);
    World { calls: &[From(0), From(0), To(0), From(1)], ..world }.explore();
    World { slots: 2, calls: &[All, From(1), From(1), From(1), All], ..world }.explore();
    World { slots: 2, calls: &[TwoShots, TwoShots, All], ..world }.explore();
}

#[test]
fn two_ranks_with_as_many_slots_as_there_are() {
    let slots = u8::try_from(SLOTS).unwrap();
    let world = World {
        ranks: 2,
        slots,
        words: 1,
        calls: &[TwoShots, TwoShots, TwoShots, All],
        bare: 0,
        waits: true,
    };
    world.explore();
    World { calls: &[From(0); 6], ..world }.explore();
}

#[test]
fn three_ranks_in_every_order() {
    let world = World { ranks: 3, slots: 1, words: 1, calls: &[All, From(0), All], bare: 0, waits: true };
    world.explore();
    World { calls: &[All, All, All], ..world }.explore();
    World { calls: &[To(1), To(1), From(1)], ..world }.explore();
    World { slots: 2, calls: &[From(0), All, To(2)], ..world }.explore();
    World { slots: 2, calls: &[TwoShots], ..world }.explore();
}

#[test]
fn bare_messages_and_lines_by_turns_in_every_order() {
    let world = World { ranks: 2, slots: 1, words: 2, calls: &[All, All, All], bare: 0b111, waits: true };
    world.explore();
    World { bare: 0b101, ..world }.explore();
    World { bare: 0b110, calls: &[From(0), From(0), To(0), From(1)], ..world }.explore();
    World { slots: 2, bare: 0b010, calls: &[TwoShots, TwoShots, All], ..world }.explore();
    World { ranks: 3, words: 1, bare: 0b10, calls: &[All, From(0)], ..world }.explore();
}

#[test]
#[should_panic(expected = "was not taken yet")]
fn who_does_not_wait_for_room_overwrites() {
    World { ranks: 2, slots: 1, words: 1, calls: &[From(0), From(0)], bare: 0, waits: false }.explore();
}

/// What a sum proves to all is nothing that a broadcast proves.
#[test]
#[should_panic(expected = "was not taken yet")]
fn two_slots_without_waiting_are_not_enough_for_all_calls() {
    World { ranks: 2, slots: 2, words: 1, calls: &[From(0), From(0), From(0)], bare: 0, waits: false }
        .explore();
}

#[test]
fn two_slots_without_waiting_are_enough_for_sums_alone() {
    World { ranks: 2, slots: 2, words: 1, calls: &[All, All, All, All], bare: 0, waits: false }.explore();
}
