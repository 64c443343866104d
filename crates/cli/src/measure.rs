//! Timing things beside each other.

use std::time::{Duration, Instant};

use serde::Serialize;

/// Times of one thing, in nanoseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Rounds that were timed.
    pub rounds: usize,
    /// The median.
    pub p50_ns: u64,
    /// The value that 99 % of the rounds stay below or at.
    pub p99_ns: u64,
    /// The fastest round.
    pub min_ns: u64,
}

impl Summary {
    /// Sums up times; all zero if there are none.
    pub fn of(times: &[Duration]) -> Self {
        let nanos = |time: &Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut sorted: Vec<u64> = times.iter().map(nanos).collect();
        sorted.sort_unstable();
        let rank = |percent: usize| {
            // The nearest rank: the smallest value that `percent` of the rounds do not exceed.
            let rank = (sorted.len() * percent).div_ceil(100);
            sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0)
        };
        Self { rounds: sorted.len(), p50_ns: rank(50), p99_ns: rank(99), min_ns: rank(0) }
    }
}

/// Something to time.
pub type Candidate<'a> = &'a mut dyn FnMut() -> anyhow::Result<()>;

/// Runs the candidates by turns, so that whatever the machine does meets all of them alike, and sums up
/// the times of each. The first `warmup` rounds do not count.
///
/// # Errors
///
/// The first error of a candidate.
pub fn interleave(
    warmup: u32,
    rounds: u32,
    candidates: &mut [Candidate<'_>],
) -> anyhow::Result<Vec<Summary>> {
    let mut times = vec![Vec::with_capacity(rounds as usize); candidates.len()];
    for round in 0..warmup.saturating_add(rounds) {
        for (candidate, times) in candidates.iter_mut().zip(&mut times) {
            let started = Instant::now();
            candidate()?;
            let took = started.elapsed();
            if round >= warmup {
                times.push(took);
            }
        }
    }
    Ok(times.iter().map(|times| Summary::of(times)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_the_nearest() {
        let times: Vec<Duration> = (1..=200).rev().map(Duration::from_nanos).collect();
        let summary = Summary::of(&times);
        assert_eq!((summary.rounds, summary.min_ns, summary.p50_ns, summary.p99_ns), (200, 1, 100, 198));
        let one = Summary::of(&[Duration::from_nanos(7)]);
        assert_eq!((one.min_ns, one.p50_ns, one.p99_ns), (7, 7, 7));
        assert_eq!(Summary::of(&[]).p50_ns, 0);
    }

    #[test]
    fn candidates_take_turns_and_warm_up() {
        let order = std::cell::RefCell::new(String::new());
        let mut first = || -> anyhow::Result<()> {
            order.borrow_mut().push('a');
            Ok(())
        };
        let mut second = || -> anyhow::Result<()> {
            order.borrow_mut().push('b');
            Ok(())
        };
        let summaries = interleave(1, 2, &mut [&mut first, &mut second]).unwrap();
        assert_eq!(order.into_inner(), "ababab");
        assert!(summaries.iter().all(|summary| summary.rounds == 2));
    }
}
