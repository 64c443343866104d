//! Timing things beside each other.

use std::{
    fmt,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

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

/// A figure and what it has to reach. It is told and fails nothing, since machines are noisy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bar {
    /// What the figure is of.
    pub what: String,
    /// The figure: a median where it is one of several.
    pub is: f64,
    /// Of the same values, what 99 % of them stay below or at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99: Option<f64>,
    /// The most it may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    /// The least it may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_least: Option<f64>,
    /// What all of these count; empty for a ratio.
    pub unit: String,
    /// Whether it is.
    pub met: bool,
}

impl Bar {
    /// A figure that is good where it is small.
    pub fn at_most(what: impl Into<String>, is: f64, most: f64, unit: &str) -> Self {
        Self { at_most: Some(most), ..Self::of(what.into(), is, unit, is <= most) }
    }

    /// A figure that is good where it is large.
    pub fn at_least(what: impl Into<String>, is: f64, least: f64, unit: &str) -> Self {
        Self { at_least: Some(least), ..Self::of(what.into(), is, unit, is >= least) }
    }

    /// Tells what 99 % of the values stay below or at, too.
    #[must_use]
    pub fn with_p99(self, p99: f64) -> Self {
        Self { p99: Some(p99), ..self }
    }

    fn of(what: String, is: f64, unit: &str, met: bool) -> Self {
        Self { what, is, p99: None, at_most: None, at_least: None, unit: unit.to_owned(), met }
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = if self.unit.is_empty() { String::new() } else { format!(" {}", self.unit) };
        write!(f, "{}: {:.3}{unit}", self.what, self.is)?;
        if let Some(p99) = self.p99 {
            write!(f, ", p99 {p99:.3}")?;
        }
        if let Some(most) = self.at_most {
            write!(f, ", at most {most}")?;
        }
        if let Some(least) = self.at_least {
            write!(f, ", at least {least}")?;
        }
        f.write_str(if self.met { ": met" } else { ": MISSED" })
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
    fn bars_are_met_at_their_limits_and_say_so() {
        let check = |bar: Bar, met, text| assert_eq!((bar.met, bar.to_string().as_str()), (met, text));
        check(Bar::at_most("gap", 6.0, 6.0, "us"), true, "gap: 6.000 us, at most 6: met");
        let late = Bar::at_most("gap", 6.1, 6.0, "us").with_p99(9.0);
        check(late, false, "gap: 6.100 us, p99 9.000, at most 6: MISSED");
        check(Bar::at_least("copy", 0.97, 0.97, ""), true, "copy: 0.970, at least 0.97: met");
        check(Bar::at_least("copy", f64::NAN, 0.97, ""), false, "copy: NaN, at least 0.97: MISSED");
        let bar = Bar::at_least("copy", 0.5, 0.97, "").with_p99(1.0);
        let text = serde_json::to_string(&bar).unwrap();
        assert_eq!(serde_json::from_str::<Bar>(&text).unwrap(), bar, "{text}");
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
