//! Times, and tables of them.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};

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

    fn at(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
        let index = ((sorted.len() - 1) as f64 * part).round() as usize;
        sorted[index]
    }

    pub(crate) fn median(&self) -> f64 {
        self.at(0.5)
    }

    pub(crate) fn json(&self) -> Value {
        json!({"p50": self.at(0.5), "p90": self.at(0.9), "p99": self.at(0.99), "min": self.at(0.0),
            "max": self.at(1.0), "n": self.0.len(), "unit": "us"})
    }
}

pub(crate) fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}

/// Runs the columns by turns and reports each.
pub(crate) fn table(
    name: &str,
    columns: &mut [(&str, &mut dyn FnMut() -> Result<Duration>)],
) -> Result<Vec<f64>> {
    let mut samples: Vec<Samples> = columns.iter().map(|_| Samples::default()).collect();
    for round in 0..ROUNDS + 5 {
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
        say(&format!("{name:<34} {column:<34} {:>10.2} us", samples.median()));
    }
    Ok(samples.iter().map(Samples::median).collect())
}
