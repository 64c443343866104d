//! What was run and how it went: one table at the end of every verb that does several things.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Rows in the order they were run.
#[derive(Debug, Default)]
pub(crate) struct Report {
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    name: String,
    outcome: Outcome,
    time: Duration,
    counts: Counts,
}

#[derive(Debug)]
enum Outcome {
    Passed,
    Failed(String),
    NotRun(String),
}

impl Report {
    /// Runs one step; a failure is kept for the table, so that the next step runs too.
    pub(crate) fn step(&mut self, name: &str, run: impl FnOnce(&mut Counts) -> Result<()>) {
        println!("\n== {name}");
        let start = Instant::now();
        let mut counts = Counts::default();
        let outcome = match run(&mut counts) {
            Ok(()) => Outcome::Passed,
            Err(error) => Outcome::Failed(format!("{error:#}")),
        };
        if let Outcome::Failed(why) = &outcome {
            println!("{name} failed: {why}");
        }
        self.push(name, outcome, start.elapsed(), counts);
    }

    /// Notes a step that cannot run here; if it is required, it has failed.
    pub(crate) fn absent(&mut self, name: &str, why: &str, required: bool) {
        println!("\n== {name}\nnot run: {why}");
        let outcome = if required { Outcome::Failed } else { Outcome::NotRun };
        self.push(name, outcome(why.into()), Duration::ZERO, Counts::default());
    }

    /// Prints the table and the totals; an error if any step failed.
    pub(crate) fn finish(self) -> Result<()> {
        if self.rows.is_empty() {
            println!("there is nothing to run yet");
            return Ok(());
        }
        print!("\n{}\n{}\n", self.table(), self.totals());
        let failed: Vec<_> =
            self.rows.iter().filter(|row| row.failed()).map(|row| row.name.as_str()).collect();
        if !failed.is_empty() {
            bail!("failed: {}", failed.join(", "));
        }
        Ok(())
    }

    fn push(&mut self, name: &str, outcome: Outcome, time: Duration, counts: Counts) {
        self.rows.push(Row { name: name.into(), outcome, time, counts });
    }

    fn table(&self) -> String {
        let width = self.rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(4);
        let mut table = format!("{:width$}  result   seconds\n", "step");
        for row in &self.rows {
            let (result, why) = match &row.outcome {
                Outcome::Passed => ("passed", ""),
                Outcome::Failed(why) => ("FAILED", why.as_str()),
                Outcome::NotRun(why) => ("not run", why.as_str()),
            };
            let why = why.lines().next().unwrap_or_default();
            let line = format!("{:width$}  {result:7} {:8.1}  {why}", row.name, row.time.as_secs_f64());
            writeln!(table, "{}", line.trim_end()).expect("writing to a string cannot fail");
        }
        table
    }

    fn totals(&self) -> String {
        let counts = self.rows.iter().map(Row::weight).fold(Counts::default(), Counts::plus);
        format!("{} passed, {} failed, {} skipped", counts.passed, counts.failed, counts.skipped)
    }
}

impl Row {
    fn failed(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_))
    }

    /// The row's tests; a row that counted none, or failed without a failed test, counts itself.
    fn weight(&self) -> Counts {
        let mut counts = self.counts;
        match self.outcome {
            Outcome::Passed if counts.is_empty() => counts.passed = 1,
            Outcome::Failed(_) if counts.failed == 0 => counts.failed = 1,
            Outcome::NotRun(_) => counts.skipped += 1,
            _ => {}
        }
        counts
    }
}

/// Tests counted from what a test runner prints.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Counts {
    /// Adds what a closing line of libtest, libtest-mimic or a plain `N passed, N failed` says.
    pub(crate) fn read(&mut self, line: &str) {
        let plain = line.starts_with(|c: char| c.is_ascii_digit()) && line.contains(" passed, ");
        if !plain && !line.starts_with("test result: ") {
            return;
        }
        for part in line.split(['.', ',', ';']) {
            let mut words = part.split_whitespace();
            let (Some(Ok(count)), Some(word)) = (words.next().map(str::parse::<u64>), words.next()) else {
                continue;
            };
            match word {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" | "skipped" => self.skipped += count,
                _ => {}
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn plus(self, other: Self) -> Self {
        Self {
            passed: self.passed + other.passed,
            failed: self.failed + other.failed,
            skipped: self.skipped + other.skipped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_counts(lines: &[&str], passed: u64, failed: u64, skipped: u64) {
        let mut counts = Counts::default();
        lines.iter().for_each(|line| counts.read(line));
        assert_eq!(counts, Counts { passed, failed, skipped });
    }

    #[test]
    fn counts_what_runners_print() {
        let libtest =
            "test result: ok. 5 passed; 1 failed; 2 ignored; 0 measured; 9 filtered out; finished in 0.00s";
        check_counts(&[libtest, libtest], 10, 2, 4);
        check_counts(&["90 passed, 3 failed"], 90, 3, 0);
        check_counts(&["7 passed, 0 failed, 1 skipped"], 7, 0, 1);
        check_counts(&["running 3 tests", "test a ... ok", "the 3 passed, 4 failed"], 0, 0, 0);
    }

    #[test]
    fn totals_add_tests_and_steps_without_tests() {
        let mut report = Report::default();
        report.step("fmt", |_| Ok(()));
        report.step("tests", |counts| {
            counts.read("4 passed, 0 failed");
            Ok(())
        });
        report.step("build", |_| bail!("does not build\nin two lines"));
        report.absent("deny", "not installed", false);
        assert_eq!(report.totals(), "5 passed, 1 failed, 1 skipped");
        let table = report.table();
        assert!(table.contains("build  FAILED       0.0  does not build\n"), "{table}");
        assert!(table.contains("deny   not run      0.0  not installed\n"), "{table}");
        assert_eq!(report.finish().unwrap_err().to_string(), "failed: build");
    }
}
