//! Which parts of a block of memory are free.

/// Free ranges of a block, in order, none beside another.
#[derive(Debug)]
pub(crate) struct Ranges {
    size: u64,
    free: Vec<Range>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    start: u64,
    end: u64,
}

impl Ranges {
    pub(crate) fn new(size: u64) -> Self {
        Self { size, free: vec![Range { start: 0, end: size }] }
    }

    /// Takes `size` bytes whose place plus `base` is a multiple of `alignment`: the first that fit.
    pub(crate) fn take(&mut self, size: u64, alignment: u64, base: u64) -> Option<u64> {
        let start_in = |range: &Range| {
            let start = base.checked_add(range.start)?.checked_next_multiple_of(alignment)? - base;
            (start.checked_add(size)? <= range.end).then_some(start)
        };
        let (index, start) =
            self.free.iter().enumerate().find_map(|(index, range)| Some((index, start_in(range)?)))?;
        let whole = self.free[index];
        let parts = [Range { start: whole.start, end: start }, Range { start: start + size, end: whole.end }];
        self.free.splice(index..=index, parts.into_iter().filter(|part| part.start < part.end));
        Some(start)
    }

    /// Gives back what was taken.
    pub(crate) fn give(&mut self, start: u64, size: u64) {
        let mut range = Range { start, end: start + size };
        let at = self.free.partition_point(|other| other.start < start);
        let mut replaced = at..at;
        if let Some(next) = self.free.get(at).filter(|next| next.start == range.end) {
            range.end = next.end;
            replaced.end += 1;
        }
        if let Some(before) = at.checked_sub(1).and_then(|before| self.free.get(before))
            && before.end == range.start
        {
            range.start = before.start;
            replaced.start -= 1;
        }
        self.free.splice(replaced, [range]);
    }

    /// Whether nothing is taken.
    pub(crate) fn is_unused(&self) -> bool {
        matches!(self.free[..], [Range { start: 0, end }] if end == self.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_apart_and_aligned() {
        let mut ranges = Ranges::new(1024);
        assert_eq!(ranges.take(10, 256, 0), Some(0));
        assert_eq!(ranges.take(10, 256, 0), Some(256));
        assert_eq!(ranges.take(246, 1, 0), Some(10));
        assert_eq!(ranges.take(1024, 1, 0), None);
        assert_eq!(ranges.take(u64::MAX, 256, 0), None);
    }

    #[test]
    fn the_base_counts_for_the_alignment() {
        let mut ranges = Ranges::new(10_000);
        assert_eq!(ranges.take(100, 4096, 64), Some(4032));
    }

    #[test]
    fn what_is_given_back_in_any_order_is_one_range_again() {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
            let mut ranges = Ranges::new(400);
            let taken: Vec<u64> = (0..4).map(|_| ranges.take(100, 1, 0).unwrap()).collect();
            assert!(!ranges.is_unused());
            order.iter().for_each(|&index| ranges.give(taken[index], 100));
            assert!(ranges.is_unused(), "{order:?}");
            assert_eq!(ranges.take(400, 1, 0), Some(0));
        }
    }
}
