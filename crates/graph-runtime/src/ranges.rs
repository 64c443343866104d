//! Who used which bytes of one memory last.

use std::{collections::BTreeMap, ops::Range};

use smallvec::SmallVec;

use crate::usage::{Sharing, Usage};

/// Something that uses memory: a node of a graph, or a point in a line of work.
pub(crate) trait User: Copy + PartialEq {
    /// Whether there are users that end in a known order at all.
    const HAS_LINES: bool;

    /// Whether this one has ended only when `earlier` has, so that waiting for this one is enough.
    fn is_behind(self, earlier: Self) -> bool;
}

/// What a [`RangeMap`] tells its caller.
pub(crate) trait Order<U> {
    /// The new user comes after `earlier`, which it may be itself.
    fn after(&mut self, earlier: U);

    /// One that stands for many: it ends when all of `members` have ended. `None` leaves them as they are.
    fn join(&mut self, members: &[U]) -> Option<U>;
}

/// More users of one range than this are joined before anything is made to come after them, so that many readers
/// before many writers are not a matter of their product.
const JOINED: usize = 32;

/// For every byte of one memory, those whom the next user may have to wait for.
///
/// A memory that is only ever used as a whole has one segment and needs no search.
#[derive(Debug)]
pub(crate) struct RangeMap<U> {
    /// The only segment there is, with its first byte; `many` is empty then.
    one: Option<(u64, Segment<U>)>,
    /// By their first byte.
    many: BTreeMap<u64, Segment<U>>,
}

/// Bytes with one history.
#[derive(Debug, Clone)]
struct Segment<U> {
    end: u64,
    /// Everyone who comes now is behind these: the last writer, or those who shared the range in another way.
    base: SmallVec<[U; 1]>,
    /// Those that have come since, who share the range.
    group: SmallVec<[U; 4]>,
    sharing: Sharing,
}

impl<U> Default for RangeMap<U> {
    fn default() -> Self {
        Self { one: None, many: BTreeMap::new() }
    }
}

impl<U: User> RangeMap<U> {
    /// Adds a user of `range`, and tells `order` whom it comes after.
    pub(crate) fn add(&mut self, range: Range<u64>, usage: Usage, user: U, order: &mut impl Order<U>) {
        if let Some((start, segment)) = &mut self.one {
            if *start == range.start && segment.end == range.end {
                return segment.add(usage, user, order);
            }
            self.many.extend(self.one.take());
        } else if self.many.is_empty() {
            self.one = Some((range.start, Segment::new(range.end, usage, user)));
            return;
        }
        // Most often the range is one segment, or new. One search tells.
        let last = self.many.range_mut(..range.end).next_back();
        match last {
            Some((&start, segment)) if start == range.start && segment.end == range.end => {
                segment.add(usage, user, order);
            }
            Some((_, segment)) if segment.end > range.start => self.add_to_parts(range, usage, user, order),
            _ => {
                self.many.insert(range.start, Segment::new(range.end, usage, user));
            }
        }
    }

    /// Adds a user of a range that begins or ends within segments, or holds several.
    fn add_to_parts(&mut self, range: Range<u64>, usage: Usage, user: U, order: &mut impl Order<U>) {
        split(&mut self.many, range.start, order);
        split(&mut self.many, range.end, order);
        if usage.sharing().is_none() {
            self.overwrite(range, usage, user, order);
        } else {
            share(&mut self.many, range, usage, user, order);
        }
    }

    /// What a user writes has one history again, however many pieces it was in.
    fn overwrite(&mut self, range: Range<u64>, usage: Usage, user: U, order: &mut impl Order<U>) {
        for (_, mut old) in self.many.extract_if(range.clone(), |_, _| true) {
            old.add(usage, user, order);
        }
        let segment = Segment::new(range.end, usage, user);
        if self.many.is_empty() {
            self.one = Some((range.start, segment));
        } else {
            self.many.insert(range.start, segment);
        }
    }

    /// Those whom a user of `range` would come after.
    pub(crate) fn conflicts(&self, range: Range<u64>, usage: Usage, mut visit: impl FnMut(U)) {
        if let Some((start, segment)) = &self.one
            && *start < range.end
            && range.start < segment.end
        {
            return segment.conflicts(usage, &mut visit);
        }
        let before = self.many.range(..range.start).next_back();
        let before = before.filter(|(_, segment)| segment.end > range.start);
        for (_, segment) in before.into_iter().chain(self.many.range(range)) {
            segment.conflicts(usage, &mut visit);
        }
    }

    /// Gives every user another name.
    pub(crate) fn rename(&mut self, mut name: impl FnMut(U) -> U) {
        for segment in self.one.iter_mut().map(|(_, segment)| segment).chain(self.many.values_mut()) {
            segment.base.iter_mut().for_each(|user| *user = name(*user));
            segment.group.iter_mut().for_each(|user| *user = name(*user));
        }
    }
}

/// Adds one that shares `range` with others to the segments there are, and to new ones between them.
fn share<U: User>(
    map: &mut BTreeMap<u64, Segment<U>>,
    range: Range<u64>,
    usage: Usage,
    user: U,
    order: &mut impl Order<U>,
) {
    let mut gaps: SmallVec<[Range<u64>; 4]> = SmallVec::new();
    let mut position = range.start;
    for (&start, segment) in map.range_mut(range.clone()) {
        if start > position {
            gaps.push(position..start);
        }
        position = segment.end;
        segment.add(usage, user, order);
    }
    if position < range.end {
        gaps.push(position..range.end);
    }
    for gap in gaps {
        map.insert(gap.start, Segment::new(gap.end, usage, user));
    }
}

/// Cuts the segment that holds `position` inside it.
fn split<U: User>(map: &mut BTreeMap<u64, Segment<U>>, position: u64, order: &mut impl Order<U>) {
    let Some((_, segment)) = map.range_mut(..position).next_back() else { return };
    if segment.end <= position {
        return;
    }
    // Both halves have the list from here on, so it is made short first.
    segment.join(order);
    let right = segment.clone();
    segment.end = position;
    map.insert(position, right);
}

impl<U: User> Segment<U> {
    fn new(end: u64, usage: Usage, user: U) -> Self {
        let (mut base, mut group) = (SmallVec::new(), SmallVec::new());
        match usage.sharing() {
            None => base.push(user),
            Some(_) => group.push(user),
        }
        Self { end, base, group, sharing: usage.sharing().unwrap_or(Sharing::Read) }
    }

    fn add(&mut self, usage: Usage, user: U, order: &mut impl Order<U>) {
        match usage.sharing() {
            Some(sharing) if self.group.is_empty() || sharing == self.sharing => {
                self.base.iter().for_each(|&earlier| order.after(earlier));
                self.sharing = sharing;
                self.share(user);
            }
            Some(sharing) => {
                self.join(order);
                self.group.iter().for_each(|&earlier| order.after(earlier));
                self.base = self.group.drain(..).collect();
                self.sharing = sharing;
                self.group.push(user);
            }
            None => {
                self.join(order);
                // Those of the group are behind the base.
                let last = if self.group.is_empty() { &self.base[..] } else { &self.group[..] };
                last.iter().for_each(|&earlier| order.after(earlier));
                self.base.clear();
                self.group.clear();
                self.base.push(user);
            }
        }
    }

    fn conflicts(&self, usage: Usage, visit: &mut impl FnMut(U)) {
        let shares = usage.sharing().is_some_and(|sharing| sharing == self.sharing);
        let last = if self.group.is_empty() || shares { &self.base[..] } else { &self.group[..] };
        last.iter().for_each(|&earlier| visit(earlier));
    }

    fn share(&mut self, user: U) {
        if self.group.last() == Some(&user) {
            return;
        }
        let known = if U::HAS_LINES { &mut self.group[..] } else { &mut [] };
        let earlier = known.iter_mut().find(|earlier| user.is_behind(**earlier));
        match earlier {
            Some(earlier) => *earlier = user,
            None => self.group.push(user),
        }
    }

    fn join(&mut self, order: &mut impl Order<U>) {
        if self.group.len() > JOINED
            && let Some(joined) = order.join(&self.group)
        {
            self.group.clear();
            self.group.push(joined);
        }
    }
}
