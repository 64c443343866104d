//! What all rounds came to.

use std::{fmt, time::Duration};

use serde_json::{Value, json};

use super::{Round, Times};

/// What is promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bars {
    /// Until the first survivor is told.
    pub detected: Duration,
    /// Until all of them have returned.
    pub returned: Duration,
    /// Until they have summed without the dead.
    pub right: Duration,
    /// Until they have summed with a process in its place.
    pub whole: Duration,
}

impl Default for Bars {
    fn default() -> Self {
        Self {
            detected: Duration::from_millis(250),
            returned: Duration::from_secs(1),
            right: Duration::from_secs(3),
            whole: Duration::from_secs(10),
        }
    }
}

/// Times of many rounds beside what is promised.
#[derive(Debug, Clone)]
pub struct Report {
    rounds: usize,
    succeeded: usize,
    steps: Vec<Step>,
}

/// One of the times.
#[derive(Debug, Clone)]
struct Step {
    name: &'static str,
    what: &'static str,
    /// From the shortest.
    times: Vec<Duration>,
    bar: Duration,
}

impl Round {
    /// As a line of JSON; times in milliseconds.
    pub fn to_json(&self, number: u32) -> Value {
        let mut line = json!({"round": number, "bytes": self.bytes, "victim": self.victim});
        match &self.outcome {
            Ok(Times { detected, returned, right, whole }) => {
                line["ok"] = true.into();
                for (name, time) in
                    [("detected", detected), ("returned", returned), ("right", right), ("whole", whole)]
                {
                    line[format!("{name}_ms")] = ms(*time).into();
                }
            }
            Err(error) => {
                line["ok"] = false.into();
                line["error"] = error.as_str().into();
            }
        }
        line
    }
}

impl Report {
    /// Sums them up.
    pub fn of(rounds: &[Round], bars: &Bars) -> Self {
        let good: Vec<&Times> = rounds.iter().filter_map(|round| round.outcome.as_ref().ok()).collect();
        let step = |name, what, bar, time: fn(&Times) -> Duration| {
            let mut times: Vec<_> = good.iter().map(|times| time(times)).collect();
            times.sort_unstable();
            Step { name, what, times, bar }
        };
        let steps = vec![
            step("detect", "the first is told", bars.detected, |times| times.detected),
            step("return", "all have returned", bars.returned, |times| times.returned),
            step("right", "a right sum without it", bars.right, |times| times.right),
            step("whole", "a right sum with another", bars.whole, |times| times.whole),
        ];
        Self { rounds: rounds.len(), succeeded: good.len(), steps }
    }

    /// Rounds that came to a good end.
    pub const fn succeeded(&self) -> usize {
        self.succeeded
    }

    /// Whether every round came to a good end.
    pub const fn is_whole(&self) -> bool {
        self.succeeded == self.rounds
    }

    /// What each time is of, with its median, its most and its bar in milliseconds.
    pub fn steps(&self) -> impl Iterator<Item = (&'static str, f64, f64, f64)> {
        self.steps.iter().map(|step| (step.what, ms(step.at(50)), ms(step.at(100)), ms(step.bar)))
    }

    /// As a line of JSON; times in milliseconds.
    pub fn to_json(&self) -> Value {
        let mut line = json!({"rounds": self.rounds, "succeeded": self.succeeded});
        for step in &self.steps {
            let at = |percent| ms(step.at(percent));
            line[step.name] = json!({
                "p50_ms": at(50), "p99_ms": at(99), "max_ms": at(100),
                "bar_ms": ms(step.bar), "met": step.is_met(),
            });
        }
        line
    }

    /// Readings, as benchmarks print them: a name, and a median in nanoseconds.
    pub fn readings(&self, name: &str) -> Vec<Value> {
        let reading = |step: &Step| {
            json!({"name": format!("{name}/{}", step.name),
                "median": u64::try_from(step.at(50).as_nanos()).unwrap_or(u64::MAX), "unit": "ns"})
        };
        self.steps.iter().map(reading).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} of {} rounds succeeded", self.succeeded, self.rounds)?;
        write!(
            f,
            "{:<26} {:>10} {:>10} {:>10} {:>10}",
            "ms after the kill, until", "p50", "p99", "max", "bar"
        )?;
        for step in &self.steps {
            let [p50, p99, max] = [50, 99, 100].map(|percent| ms(step.at(percent)));
            let (what, bar) = (step.what, ms(step.bar));
            let verdict = if step.is_met() { "met" } else { "missed" };
            write!(f, "\n{what:<26} {p50:>10.2} {p99:>10.2} {max:>10.2} {bar:>10.0}  {verdict}")?;
        }
        Ok(())
    }
}

impl Step {
    fn at(&self, percent: usize) -> Duration {
        let place = (self.times.len() * percent).div_ceil(100).max(1) - 1;
        self.times.get(place).copied().unwrap_or_default()
    }

    /// By every single round.
    fn is_met(&self) -> bool {
        self.times.last().is_some_and(|time| *time <= self.bar)
    }
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(ms: u64) -> Round {
        let time = Duration::from_millis(ms);
        let times = Times { detected: time, returned: time * 2, right: time * 3, whole: time * 4 };
        Round { bytes: 4, victim: 1, outcome: Ok(times) }
    }

    #[test]
    fn one_late_round_misses_a_bar_and_one_that_failed_is_counted() {
        let mut rounds: Vec<Round> = (1..=100).map(round).collect();
        let report = Report::of(&rounds, &Bars::default());
        assert!(report.is_whole());
        let line = report.to_json();
        assert_eq!(
            (&line["detect"]["p50_ms"], &line["detect"]["met"]),
            (&50.0.into(), &true.into()),
            "{line}"
        );
        rounds.push(round(400));
        rounds.push(Round { bytes: 4, victim: 0, outcome: Err("it hangs".into()) });
        let report = Report::of(&rounds, &Bars::default());
        let line = report.to_json();
        assert_eq!((&line["rounds"], &line["succeeded"]), (&102.into(), &101.into()), "{line}");
        assert_eq!((&line["detect"]["met"], &line["return"]["met"]), (&false.into(), &true.into()), "{line}");
        assert!(!report.is_whole() && report.to_string().contains("missed"), "{report}");
        assert_eq!(rounds[101].to_json(7)["error"], "it hangs");
        assert_eq!(report.readings("x")[0]["median"], 51_000_000);
    }
}
