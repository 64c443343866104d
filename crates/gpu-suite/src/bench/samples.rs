//! Times, tables of them, and what they have to reach.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};
use warpweft_cli::measure::Bar;

use crate::rig::{report, say};

/// Rounds of a table that count.
const ROUNDS: usize = 41;

/// Times of one thing, in microseconds.
#[derive(Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    pub(crate) fn add(&mut self, time: Duration) {
        self.0.push(time.as_secs_f64() * 1e6);
    }

    /// Not a number if there are no times.
    fn at(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
        let index = (sorted.len().saturating_sub(1) as f64 * part).round() as usize;
        sorted.get(index).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn median(&self) -> f64 {
        self.at(0.5)
    }

    pub(crate) fn p99(&self) -> f64 {
        self.at(0.99)
    }

    /// How much longer each took than the one beside it, which was taken at nearly the same time.
    pub(crate) fn beyond(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(own, other)| own - other).collect())
    }

    /// How many times as long each took as the one beside it: the median, and what it lies between with 95 %.
    pub(crate) fn ratio(&self, other: &Self) -> [f64; 3] {
        let mut ratios: Vec<f64> = self.0.iter().zip(&other.0).map(|(own, other)| own / other).collect();
        interval(&mut ratios)
    }

    /// What the median lies between with 95 %, with it in the middle.
    pub(crate) fn interval(&self) -> [f64; 3] {
        interval(&mut self.0.clone())
    }

    /// The same of equal parts of each.
    pub(crate) fn each_of(self, parts: f64) -> Self {
        Self(self.0.into_iter().map(|time| time / parts).collect())
    }

    /// A bar for the median, in microseconds.
    pub(crate) fn at_most(&self, what: impl Into<String>, most: f64) -> Bar {
        Bar::at_most(what, self.median(), most, "us").with_p99(self.p99())
    }

    /// The median and what 99 % stay below or at, for people.
    pub(crate) fn words(&self) -> String {
        format!("{:.2} us, p99 {:.2}", self.median(), self.p99())
    }

    pub(crate) fn json(&self) -> Value {
        json!({"p50": self.at(0.5), "p90": self.at(0.9), "p99": self.at(0.99), "min": self.at(0.0),
            "max": self.at(1.0), "n": self.0.len(), "unit": "us"})
    }
}

/// The median of values, and what it lies between with 95 %: by their ranks, whatever their distribution.
pub(crate) fn interval(values: &mut [f64]) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    let count = f64::from(u32::try_from(values.len()).unwrap_or(u32::MAX));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
    let low = (count / 2.0 - 0.98 * count.sqrt()).floor().max(0.0) as usize;
    let at = |index: usize| values.get(index).copied().unwrap_or(f64::NAN);
    [at(low), at(values.len() / 2), at(values.len().saturating_sub(low + 1))]
}

/// Tells a figure with what it has to reach.
pub(crate) fn judge(bar: &Bar) {
    report(&json!({"bar": bar}));
    say(&format!("bar: {bar}"));
}

/// Tells what rounds of so many submissions allocated, for each submission. Zero is the bar of one percentile of the
/// rounds, if one is judged.
pub(crate) fn tell_allocations(what: &str, mut counts: Vec<u64>, submissions: usize, judged: Option<usize>) {
    counts.sort_unstable();
    #[expect(clippy::cast_precision_loss, reason = "small counts")]
    let at = |percent: usize| {
        let count = counts.get(counts.len().saturating_sub(1) * percent / 100).copied().unwrap_or(0);
        count as f64 / submissions as f64
    };
    report(
        &json!({"allocations": what, "rounds": counts.len(), "p50": at(50), "p99": at(99), "max": at(100),
        "in all": counts.iter().sum::<u64>()}),
    );
    say(&format!("{what}: {} for each, at most {}", at(50), at(100)));
    if let Some(percent) = judged {
        judge(&Bar::at_most(format!("{what}, p{percent}"), at(percent), 0.0, "").with_p99(at(99)));
    }
}

pub(crate) fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}

/// One round: both, the first of which is the other in the next round.
pub(crate) fn in_turn<T>(
    round: usize,
    ours: &mut (impl FnMut() -> Result<T> + ?Sized),
    raw: &mut (impl FnMut() -> Result<T> + ?Sized),
) -> Result<(T, T)> {
    if round.is_multiple_of(2) {
        let ours = ours()?;
        Ok((ours, raw()?))
    } else {
        let raw = raw()?;
        Ok((ours()?, raw))
    }
}

/// What one column does in a round, and how long it took.
pub(crate) type Column<'a> = (&'a str, &'a mut dyn FnMut() -> Result<Duration>);

/// Runs the columns by turns and reports each; their times.
pub(crate) fn table(name: &str, columns: &mut [Column<'_>]) -> Result<Vec<Samples>> {
    table_of(ROUNDS, name, columns)
}

/// The same with as many rounds.
pub(crate) fn table_of(rounds: usize, name: &str, columns: &mut [Column<'_>]) -> Result<Vec<Samples>> {
    let mut samples: Vec<Samples> = columns.iter().map(|_| Samples::default()).collect();
    for round in 0..rounds + 5 {
        for ((_, column), samples) in columns.iter_mut().zip(&mut samples) {
            let time = column()?;
            // The first rounds warm up.
            if round >= 5 {
                samples.add(time);
            }
        }
    }
    for ((column, _), samples) in columns.iter().zip(&samples) {
        report(&json!({"timing": name, "what": column, "time": samples.json()}));
        say(&format!("{name:<34} {column:<34} {:>10.2} us, p99 {:>10.2}", samples.median(), samples.p99()));
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_judged_and_the_tail_is_told() {
        let mut samples = Samples::default();
        (1..=100).for_each(|us| samples.add(Duration::from_micros(us)));
        let bar = samples.at_most("a call", 51.0);
        assert_eq!((bar.met, bar.p99.map(f64::round)), (true, Some(99.0)), "{bar}");
        assert!(!samples.at_most("a call", 49.0).met);
        let slower = Samples(samples.0.iter().map(|us| us + 10.0).collect());
        assert!((slower.beyond(&samples).each_of(100.0).median() - 0.1).abs() < 1e-9);
        let [low, ratio, high] = slower.ratio(&samples);
        assert!(low <= ratio && ratio <= high && ratio > 1.0, "{low} {ratio} {high}");
        assert!(!Samples::default().at_most("nothing", 1.0).met, "what was not measured reaches nothing");
    }

    #[test]
    fn each_side_goes_first_in_every_other_round() {
        let order = std::cell::RefCell::new(String::new());
        let note = |side| {
            order.borrow_mut().push(side);
            Ok(side)
        };
        for round in 0..3 {
            let sides = in_turn(round, &mut || note('o'), &mut || note('r')).unwrap();
            assert_eq!(sides, ('o', 'r'));
        }
        assert_eq!(order.into_inner(), "orroor");
    }

    #[test]
    fn the_interval_of_a_median_goes_by_ranks() {
        let mut ratios: Vec<f64> = (1..=21).rev().map(f64::from).collect();
        assert_eq!(interval(&mut ratios), [7.0, 11.0, 15.0]);
        let mut few = [1.0, 2.0, 3.0];
        assert_eq!(interval(&mut few), [1.0, 2.0, 3.0]);
    }
}
