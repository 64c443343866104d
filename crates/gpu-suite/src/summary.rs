//! What all legs came to.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::Value;
use warpweft_cli::measure::Bar;

/// All legs, for people and for programs.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Summary {
    version: &'static str,
    required: Vec<String>,
    /// Name, kind and driver of each device of CUDA and Vulkan.
    devices: Vec<String>,
    /// What a required device lacks, if anything.
    pub(crate) absent: Option<String>,
    legs: Vec<Outcome>,
    /// Bars that were missed, with the leg before the figure.
    missed_bars: Vec<String>,
    passed: u64,
    failed: u64,
    skipped: u64,
    seconds: f64,
    ok: bool,
}

/// What one leg came to.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    pub(crate) name: &'static str,
    /// What to type to have it again.
    pub(crate) command: String,
    pub(crate) result: Verdict,
    /// Why it failed or was not run.
    pub(crate) reason: Option<String>,
    pub(crate) exit_code: Option<i32>,
    pub(crate) seconds: f64,
    pub(crate) counts: Counts,
    /// Its figures that have something to reach.
    pub(crate) bars: Vec<Bar>,
    /// The file with what it printed, in the folder of the summary.
    pub(crate) log: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    Passed,
    Failed,
    NotRun,
}

/// Tests of a leg, where it counts any.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Counts {
    /// Reads the closing lines of test runners, and the checks.
    pub(crate) fn of(text: &str) -> Self {
        text.lines().map(Self::of_line).fold(Self::default(), |sum, counts| Self {
            passed: sum.passed + counts.passed,
            failed: sum.failed + counts.failed,
            skipped: sum.skipped + counts.skipped,
        })
    }

    fn of_line(line: &str) -> Self {
        let mut counts = Self::default();
        if line.starts_with("test result: ") {
            for part in line.split(['.', ';']) {
                let mut words = part.split_whitespace();
                let (Some(Ok(count)), Some(word)) = (words.next().map(str::parse), words.next()) else {
                    continue;
                };
                match word {
                    "passed" => counts.passed = count,
                    "failed" => counts.failed = count,
                    "ignored" => counts.skipped = count,
                    _ => {}
                }
            }
        } else if let Some(check) = json(line).filter(|value| value["check"].is_string()) {
            match check["ok"].as_bool() {
                Some(true) => counts.passed = 1,
                Some(false) => counts.failed = 1,
                None => counts.skipped = 1,
            }
        }
        counts
    }

    fn is_empty(self) -> bool {
        self == Self::default()
    }
}

/// The bars in lines of JSON that have one.
pub(crate) fn bars_of(text: &str) -> Vec<Bar> {
    let bars = text.lines().filter_map(json);
    bars.filter_map(|mut line| serde_json::from_value(line["bar"].take()).ok()).collect()
}

/// A line that is an object of JSON.
fn json(line: &str) -> Option<Value> {
    line.starts_with('{').then(|| serde_json::from_str(line).ok())?
}

impl Summary {
    pub(crate) fn new(required: &[String], devices: Vec<String>) -> Self {
        Self { version: env!("CARGO_PKG_VERSION"), required: required.to_vec(), devices, ..Self::default() }
    }

    /// A leg without tests counts as one.
    pub(crate) fn add(&mut self, outcome: Outcome) {
        let counts = outcome.counts;
        self.passed += counts.passed + u64::from(outcome.result == Verdict::Passed && counts.is_empty());
        self.failed += counts.failed + u64::from(outcome.result == Verdict::Failed && counts.failed == 0);
        self.skipped += counts.skipped + u64::from(outcome.result == Verdict::NotRun);
        let missed = outcome.bars.iter().filter(|bar| !bar.met);
        self.missed_bars.extend(missed.map(|bar| format!("{}: {bar}", outcome.name)));
        self.legs.push(outcome);
    }

    /// Says how it went, once every leg was added.
    pub(crate) fn close(&mut self, took: Duration) {
        self.seconds = took.as_secs_f64();
        self.ok = self.absent.is_none() && self.failed == 0;
    }

    pub(crate) const fn is_ok(&self) -> bool {
        self.ok
    }

    /// Writes it to the folder; where.
    pub(crate) fn save(&self, folder: &Path) -> Result<PathBuf> {
        let path = folder.join("summary.json");
        fs::write(&path, serde_json::to_string_pretty(self)?).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    #[expect(clippy::print_stdout, reason = "the program's result")]
    pub(crate) fn show(&self, path: &Path) {
        self.devices.iter().for_each(|device| println!("{device}"));
        println!("\n{:18}  result   seconds  passed  failed  skipped", "leg");
        self.legs.iter().for_each(|leg| println!("{}", leg.line()));
        let bars = || self.legs.iter().flat_map(|leg| leg.bars.iter().map(move |bar| (leg.name, bar)));
        if bars().next().is_some() {
            println!("\nbars");
            bars().filter(|(_, bar)| bar.met).for_each(|(leg, bar)| println!("  {leg}: {bar}"));
            self.missed_bars.iter().for_each(|missed| println!("  {missed}"));
        }
        if let Some(absent) = &self.absent {
            println!("\nabsent: {absent}");
        }
        let missed = self.missed_bars.len();
        println!(
            "\n{} passed, {} failed, {} skipped; {missed} of {} bars missed",
            self.passed,
            self.failed,
            self.skipped,
            bars().count()
        );
        println!("{}", path.display());
    }
}

impl Outcome {
    /// A line of the table.
    fn line(&self) -> String {
        let result = match self.result {
            Verdict::Passed => "passed",
            Verdict::Failed => "FAILED",
            Verdict::NotRun => "not run",
        };
        let Counts { passed, failed, skipped } = self.counts;
        // The whole is in the summary and in the log.
        let reason: String = self.reason.iter().flat_map(|reason| reason.chars()).take(100).collect();
        let (name, seconds) = (self.name, self.seconds);
        let line =
            format!("{name:18}  {result:7}  {seconds:7.1}  {passed:6}  {failed:6}  {skipped:7}  {reason}");
        line.trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(result: Verdict, text: &str) -> Outcome {
        Outcome {
            name: "a leg",
            command: String::new(),
            result,
            reason: None,
            exit_code: None,
            seconds: 0.0,
            counts: Counts::of(text),
            bars: bars_of(text),
            log: None,
        }
    }

    #[test]
    fn tests_and_checks_are_counted() {
        let text = "test a ... ok\ntest result: ok. 5 passed; 1 failed; 2 ignored; 0 measured; 9 filtered out\n\
                    {\"check\":\"a\",\"error\":null,\"ms\":1.5,\"ok\":true}\n{\"check\":\"b\",\"ok\":false}\nspoken\n\
                    {\"check\":\"c\",\"ok\":null}\n{\"checks\": cut";
        assert_eq!(Counts::of(text), Counts { passed: 6, failed: 2, skipped: 3 });
        assert!(Counts::of("").is_empty());
    }

    #[test]
    fn legs_are_summed_up() {
        let check = |result, text, expected| {
            let mut summary = Summary::default();
            summary.add(outcome(result, text));
            summary.close(Duration::ZERO);
            assert_eq!(
                (summary.passed, summary.failed, summary.skipped, summary.is_ok()),
                expected,
                "{text}"
            );
        };
        check(Verdict::Passed, "", (1, 0, 0, true));
        check(Verdict::Failed, "", (0, 1, 0, false));
        check(Verdict::NotRun, "", (0, 0, 1, true));
        check(Verdict::Passed, "{\"check\":\"a\",\"ok\":true}", (1, 0, 0, true));
        check(Verdict::Failed, "{\"check\":\"a\",\"ok\":false}", (0, 1, 0, false));
    }

    #[test]
    fn bars_are_read_and_missed_ones_fail_nothing() {
        let row = |bar: &Bar| serde_json::json!({"size": 1, "bar": bar}).to_string();
        let (met, missed) = (Bar::at_most("gap", 5.0, 6.0, "us"), Bar::at_least("copy", 0.9, 0.97, ""));
        let text = format!("{}\nspoken\n{{\"bar\": null}}\n{}\n", row(&met), row(&missed));
        let leg = outcome(Verdict::Passed, &text);
        assert_eq!(leg.bars, [met, missed]);
        let (mut summary, folder) = (Summary::default(), tempfile::tempdir().unwrap());
        summary.add(leg);
        summary.close(Duration::ZERO);
        assert!(summary.is_ok());
        let saved = fs::read_to_string(summary.save(folder.path()).unwrap()).unwrap();
        let saved: Value = serde_json::from_str(&saved).unwrap();
        assert_eq!(saved["missed_bars"][0], "a leg: copy: 0.900, at least 0.97: MISSED");
        assert_eq!(
            (&saved["legs"][0]["bars"][1]["met"], &saved["missed_bars"][1]),
            (&false.into(), &Value::Null)
        );
    }
}
