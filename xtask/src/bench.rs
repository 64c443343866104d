//! `bench`: runs the benchmarks, keeps their readings and sets two revisions side by side.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::cmd::Cmd;
use crate::report::Report;
use crate::workspace::{TargetKind, Workspace};

/// One line of JSON that a benchmark prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Reading {
    name: String,
    median: f64,
    unit: String,
}

/// Runs every benchmark; `compare` names a revision whose readings were kept before.
pub(crate) fn run(workspace: &Workspace, compare: Option<&str>) -> Result<()> {
    let before = compare.map(|revision| load(workspace, revision)).transpose()?;
    let mut report = Report::default();
    let mut readings = Vec::new();
    for (package, target) in workspace.targets(TargetKind::Bench) {
        let command =
            Cmd::new("cargo bench --locked --package").arg(&package.name).arg("--bench").arg(&target.name);
        report.step(&target.name, |_| command.run_reading(|line| readings.extend(reading(line))));
    }
    report.finish()?;
    keep(workspace, &readings)?;
    if let Some(before) = before {
        print!("\n{}", table(&before, &readings));
    }
    Ok(())
}

/// Other lines of a benchmark's output are for people.
fn reading(line: &str) -> Option<Reading> {
    serde_json::from_str(line).ok()
}

fn keep(workspace: &Workspace, readings: &[Reading]) -> Result<()> {
    if readings.is_empty() {
        println!("no benchmark printed a reading: nothing is kept");
        return Ok(());
    }
    let clean = Cmd::new("git status --porcelain").output()?.is_empty();
    let name = format!("{}{}", short("HEAD")?, if clean { "" } else { "-dirty" });
    let file = file(workspace, &name);
    fs::create_dir_all(file.parent().unwrap_or(Path::new("")))?;
    fs::write(&file, serde_json::to_string_pretty(readings)?)?;
    println!("readings kept in {}", file.display());
    Ok(())
}

fn load(workspace: &Workspace, revision: &str) -> Result<Vec<Reading>> {
    let file = file(workspace, &short(revision)?);
    let text = fs::read_to_string(&file).with_context(|| {
        format!("{revision} has no readings in {}: check it out and run cargo xtask bench", file.display())
    })?;
    serde_json::from_str(&text).with_context(|| format!("{} does not hold readings", file.display()))
}

fn short(revision: &str) -> Result<String> {
    let name = Cmd::new("git rev-parse --verify --short").arg(revision).output()?;
    Ok(name.trim().into())
}

fn file(workspace: &Workspace, name: &str) -> PathBuf {
    workspace.target.join("bench").join(format!("{name}.json"))
}

/// Readings of both revisions with their ratio, in the order of the newer one.
fn table(before: &[Reading], now: &[Reading]) -> String {
    let width = now.iter().map(|reading| reading.name.len()).max().unwrap_or(0).max(4);
    let mut table = format!("{:width$}  {:>12}  {:>12}  ratio\n", "name", "before", "now");
    for Reading { name, median, unit } in now {
        let old = before.iter().find(|reading| reading.name == *name && reading.unit == *unit);
        let (old, ratio) = match old {
            Some(old) => (format!("{:.3}", old.median), format!("{:.3}", median / old.median)),
            None => ("-".into(), "new".into()),
        };
        writeln!(table, "{name:width$}  {old:>12}  {median:>12.3}  {ratio} ({unit})")
            .expect("writing to a string cannot fail");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(median: f64) -> Reading {
        Reading { name: "ring".into(), median, unit: "ns".into() }
    }

    #[test]
    fn readings_are_lines_of_json() {
        assert_eq!(reading(r#"{"name": "ring", "median": 12.5, "unit": "ns"}"#), Some(ring(12.5)));
        assert_eq!(reading("ring  12.5 ns"), None);
        assert_eq!(reading(r#"{"other": 1}"#), None);
    }

    #[test]
    fn the_ratio_is_now_over_before() {
        let table = table(&[ring(10.0)], &[ring(12.5), Reading { name: "copy".into(), ..ring(1.0) }]);
        let rows: Vec<_> =
            table.lines().skip(1).map(|row| row.split_whitespace().collect::<Vec<_>>()).collect();
        assert_eq!(
            rows,
            [["ring", "10.000", "12.500", "1.250", "(ns)"], ["copy", "-", "1.000", "new", "(ns)"]]
        );
    }
}
