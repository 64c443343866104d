//! How far a receiver is with each of its senders.
//!
//! Messages of one source and priority are numbered without gaps when they are accepted. While an actor moves, some of
//! them come by its old place and some by the new one; the numbers put them in order, and show what came twice.

use std::collections::BTreeMap;

/// A source and a priority: one line of messages that keep their order.
pub type Line = (u32, u8);

/// Where a message is in its line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// It is the next.
    Next,
    /// Others come before it and have not arrived.
    Early,
    /// It was here before, or its turn was given up.
    Late,
}

/// What was served last of each line, and what waits for its turn.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Cursors<T> {
    /// By line, sorted.
    next: Vec<(Line, u32)>,
    held: BTreeMap<Line, Vec<(u32, T)>>,
    /// Whether messages that are missing are waited for.
    strict: bool,
}

impl<T> Default for Cursors<T> {
    fn default() -> Self {
        Self { next: Vec::new(), held: BTreeMap::new(), strict: true }
    }
}

impl<T> Cursors<T> {
    /// Where the message is; if it is the next, the one behind it is from here on.
    #[inline]
    pub fn take(&mut self, line: Line, sequence: u32) -> Turn {
        let strict = self.strict;
        let next = self.next_of(line);
        // Around zero: nobody is two thousand million messages ahead.
        let ahead = sequence.wrapping_sub(*next).cast_signed();
        match ahead {
            i32::MIN..=-1 => Turn::Late,
            1.. if strict => Turn::Early,
            _ => {
                *next = sequence.wrapping_add(1);
                Turn::Next
            }
        }
    }

    /// Keeps a message that is early, unless it is kept already.
    pub fn hold(&mut self, line: Line, sequence: u32, item: T) -> bool {
        let held = self.held.entry(line).or_default();
        let is_new = held.iter().all(|(known, _)| *known != sequence);
        if is_new {
            held.push((sequence, item));
        }
        is_new
    }

    /// A message that was kept and whose turn has come; it counts as served.
    pub fn release(&mut self) -> Option<T> {
        if self.held.is_empty() {
            return None;
        }
        let lines: Vec<Line> = self.held.keys().copied().collect();
        lines.into_iter().find_map(|line| self.release_of(line))
    }

    fn release_of(&mut self, line: Line) -> Option<T> {
        let (next, strict) = (*self.next_of(line), self.strict);
        let held = self.held.get_mut(&line)?;
        let ahead = |sequence: u32| sequence.wrapping_sub(next).cast_signed();
        // What is late by now is as good as gone.
        held.retain(|(sequence, _)| ahead(*sequence) >= 0);
        let first = (0..held.len()).min_by_key(|&index| ahead(held[index].0));
        let taken =
            first.filter(|&index| !strict || held[index].0 == next).map(|index| held.swap_remove(index));
        if held.is_empty() {
            self.held.remove(&line);
        }
        let (sequence, item) = taken?;
        *self.next_of(line) = sequence.wrapping_add(1);
        Some(item)
    }

    /// Waits for missing messages no more: whoever had them is lost.
    pub fn settle(&mut self) {
        self.strict = false;
    }

    /// Messages that wait for their turn.
    pub fn held(&self) -> impl Iterator<Item = &T> {
        self.held.values().flatten().map(|(_, item)| item)
    }

    #[inline]
    fn next_of(&mut self, line: Line) -> &mut u32 {
        let at = match self.next.binary_search_by_key(&line, |(line, _)| *line) {
            Ok(at) => at,
            Err(at) => {
                self.next.insert(at, (line, 0));
                at
            }
        };
        &mut self.next[at].1
    }
}

/// The numbers that a sender gives to its messages, by destination and priority.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Numbers(Vec<(Line, u32)>);

impl Numbers {
    /// The number of the next message of this line. It is given only once [`Numbers::advance`] is called.
    #[inline]
    pub fn next(&self, line: Line) -> u32 {
        self.0.binary_search_by_key(&line, |(line, _)| *line).map_or(0, |at| self.0[at].1)
    }

    /// The next message of this line was accepted.
    #[inline]
    pub fn advance(&mut self, line: Line) {
        match self.0.binary_search_by_key(&line, |(line, _)| *line) {
            Ok(at) => self.0[at].1 = self.0[at].1.wrapping_add(1),
            Err(at) => self.0.insert(at, (line, 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drain(cursors: &mut Cursors<u32>) -> Vec<u32> {
        std::iter::from_fn(|| cursors.release()).collect()
    }

    proptest! {
        #[test]
        fn any_order_with_repeats_is_served_once_and_in_order(arrivals in prop::collection::vec(0_u32..20, 0..80)) {
            let (mut cursors, mut served) = (Cursors::default(), Vec::new());
            let all = arrivals.into_iter().chain(0..20);
            for sequence in all {
                match cursors.take((1, 0), sequence) {
                    Turn::Next => served.push(sequence),
                    Turn::Early => { cursors.hold((1, 0), sequence, sequence); }
                    Turn::Late => {}
                }
                served.extend(drain(&mut cursors));
            }
            prop_assert_eq!(served, (0..20).collect::<Vec<_>>());
            prop_assert_eq!(cursors.held().count(), 0);
        }
    }

    #[test]
    fn lines_do_not_wait_for_each_other() {
        let mut cursors = Cursors::<()>::default();
        assert_eq!(cursors.take((1, 0), 1), Turn::Early);
        assert_eq!(cursors.take((1, 1), 0), Turn::Next);
        assert_eq!(cursors.take((2, 0), 0), Turn::Next);
    }

    #[test]
    fn what_is_missing_is_given_up_once_it_is_said_to_be_lost() {
        let mut cursors = Cursors::default();
        assert!(cursors.hold((1, 0), 4, 4) && cursors.hold((1, 0), 2, 2) && !cursors.hold((1, 0), 2, 2));
        assert!(drain(&mut cursors).is_empty());
        cursors.settle();
        assert_eq!(drain(&mut cursors), [2, 4]);
        assert_eq!((cursors.take((1, 0), 3), cursors.take((1, 0), 7)), (Turn::Late, Turn::Next));
    }

    #[test]
    fn numbers_go_around_zero() {
        let mut cursors = Cursors::<()> { next: vec![((1, 0), u32::MAX)], ..Cursors::default() };
        assert_eq!(cursors.take((1, 0), 0), Turn::Early);
        assert_eq!(cursors.take((1, 0), u32::MAX), Turn::Next);
        assert_eq!(cursors.take((1, 0), 0), Turn::Next);
        assert_eq!(cursors.take((1, 0), u32::MAX), Turn::Late);
    }
}
