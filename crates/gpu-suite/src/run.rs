//! Running the legs, each in a process of its own, and summing them up.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use warpweft_core_types::Backend as _;
use warpweft_cuda::CudaBackend;

use crate::legs::{self, Leg, Wish};

/// What `timeout` answers for a program that took too long.
const TIMED_OUT: i32 = 124;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit code: 0 if every leg passed, 1 if one failed or a required device is absent, 2 for a wrong call.

Examples:
  run.sh --require cuda,2 --out results
  run.sh --leg conformance --filter resident::
  run.sh --memcheck --leg memcheck")]
pub(crate) struct Options {
    /// Devices that have to be there; may be repeated.
    #[arg(long, value_name = "BACKEND,N", default_value = "cuda,1", value_parser = requirement)]
    require: Vec<String>,
    /// Folder for the summary (summary.json) and what each leg prints.
    #[arg(long, value_name = "DIR", default_value = "gpu-results")]
    out: PathBuf,
    /// Only conformance cases with this in their names.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Only legs with this in their names; may be repeated.
    #[arg(long, value_name = "TEXT")]
    leg: Vec<String>,
    /// Run cases under compute-sanitizer too, where it is on the PATH.
    #[arg(long)]
    memcheck: bool,
}

/// What all legs came to.
#[derive(Debug, Default, Serialize)]
struct Summary {
    version: &'static str,
    required: Vec<String>,
    /// Name, kind and driver of each CUDA device.
    devices: Vec<String>,
    /// What a required device lacks, if anything.
    absent: Option<String>,
    legs: Vec<Outcome>,
    passed: u64,
    failed: u64,
    skipped: u64,
    seconds: f64,
    ok: bool,
}

/// What one leg came to.
#[derive(Debug, Serialize)]
struct Outcome {
    name: &'static str,
    /// What to type to have it again.
    command: String,
    result: Verdict,
    /// Why it failed or was not run.
    reason: Option<String>,
    exit_code: Option<i32>,
    seconds: f64,
    counts: Counts,
    /// The file with what it printed, in the folder of the summary.
    log: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    Passed,
    Failed,
    NotRun,
}

/// Tests of a leg, where it counts any.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
struct Counts {
    passed: u64,
    failed: u64,
    skipped: u64,
}

pub(crate) fn run(options: &Options) -> ExitCode {
    match sum_up(options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            say(&format!("error: {error:#}"));
            ExitCode::from(2)
        }
    }
}

fn sum_up(options: &Options) -> Result<bool> {
    let wish =
        Wish { required: &options.require, filter: options.filter.as_deref(), memcheck: options.memcheck };
    let mut legs = legs::all(&wish);
    let wanted = |leg: &Leg| options.leg.is_empty() || options.leg.iter().any(|part| leg.name.contains(part));
    legs.retain(wanted);
    if legs.is_empty() {
        bail!("no leg has {} in its name", options.leg.join(" or "));
    }
    fs::create_dir_all(&options.out).with_context(|| options.out.display().to_string())?;
    let started = Instant::now();
    let mut summary = Summary {
        version: env!("CARGO_PKG_VERSION"),
        required: options.require.clone(),
        ..Summary::default()
    };
    summary.devices = devices();
    summary.absent = options.require.iter().find_map(|required| absence(required));
    if let Some(absent) = &summary.absent {
        say(&format!("absent: {absent}"));
    }
    for (number, leg) in (1..).zip(&legs) {
        let outcome = match &summary.absent {
            Some(_) => not_run(leg, "a required device is absent"),
            None => run_leg(leg, number, &options.out)?,
        };
        summary.add(outcome);
    }
    summary.seconds = started.elapsed().as_secs_f64();
    summary.ok = summary.absent.is_none() && summary.failed == 0;
    let path = options.out.join("summary.json");
    fs::write(&path, serde_json::to_string_pretty(&summary)?).with_context(|| path.display().to_string())?;
    show(&summary, &path);
    Ok(summary.ok)
}

/// What is missing of `cuda,2`.
fn absence(required: &str) -> Option<String> {
    let (backend, count) = required.split_once(',')?;
    match backend {
        "cuda" => {}
        // As many as anybody asks for.
        "host" => return None,
        _ => return Some(format!("{required}: this suite knows no backend {backend:?}")),
    }
    let count: usize = count.parse().ok()?;
    match CudaBackend::new().and_then(|backend| backend.devices()) {
        Ok(devices) if devices.len() >= count => None,
        Ok(devices) => Some(format!("{required}: there are {} CUDA devices", devices.len())),
        Err(error) => Some(format!("{required}: {error}")),
    }
}

fn devices() -> Vec<String> {
    let infos = CudaBackend::new().and_then(|backend| backend.devices()).unwrap_or_default();
    infos.iter().map(|info| format!("{} {}, {}", info.id, info.name, info.driver)).collect()
}

fn run_leg(leg: &Leg, number: u32, out: &Path) -> Result<Outcome> {
    if let Some(around) = leg.under.first()
        && !is_on_path(around)
    {
        return Ok(not_run(leg, &format!("{around} is not on the PATH; it comes with the CUDA toolkit")));
    }
    say(&format!("== {}: {}", leg.name, shown(leg)));
    let log = format!("{number:02}-{}.log", leg.name.replace(' ', "-"));
    let file = File::create(out.join(&log)).with_context(|| log.clone())?;
    let started = Instant::now();
    // Ends a leg together with the processes that it started.
    let status = Command::new("timeout")
        .args(["--kill-after=10", &leg.limit_seconds.to_string()])
        .args(&leg.under)
        .arg(std::env::current_exe()?)
        .args(&leg.args)
        // The last line is to be the reason.
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .status()
        .context("`timeout`, of coreutils, cannot be started")?;
    let seconds = started.elapsed().as_secs_f64();
    let text = String::from_utf8_lossy(&fs::read(out.join(&log))?).into_owned();
    let counts = Counts::of(&text);
    let reason = match status.code() {
        Some(0) if counts.failed == 0 => None,
        Some(TIMED_OUT) => Some(format!("it took longer than {} s", leg.limit_seconds)),
        _ => Some(text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()),
    };
    let result = if reason.is_none() { Verdict::Passed } else { Verdict::Failed };
    let command = shown(leg);
    let exit_code = status.code();
    Ok(Outcome { name: leg.name, command, result, reason, exit_code, seconds, counts, log: Some(log) })
}

fn not_run(leg: &Leg, reason: &str) -> Outcome {
    Outcome {
        name: leg.name,
        command: shown(leg),
        result: Verdict::NotRun,
        reason: Some(reason.to_owned()),
        exit_code: None,
        seconds: 0.0,
        counts: Counts::default(),
        log: None,
    }
}

fn shown(leg: &Leg) -> String {
    leg.under.iter().map(String::as_str).chain(["gpu-suite"]).chain(leg.args.iter().map(String::as_str)).fold(
        String::new(),
        |line, word| if line.is_empty() { word.to_owned() } else { format!("{line} {word}") },
    )
}

fn is_on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

impl Counts {
    /// Reads the closing lines of test runners, and the checks.
    fn of(text: &str) -> Self {
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
        } else if line.starts_with("{\"check\":") {
            let check: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
            let passed = check["ok"] == true;
            (counts.passed, counts.failed) = (u64::from(passed), u64::from(!passed));
        }
        counts
    }

    fn is_empty(self) -> bool {
        self == Self::default()
    }
}

impl Summary {
    /// A leg without tests counts as one.
    fn add(&mut self, outcome: Outcome) {
        let counts = outcome.counts;
        self.passed += counts.passed + u64::from(outcome.result == Verdict::Passed && counts.is_empty());
        self.failed += counts.failed + u64::from(outcome.result == Verdict::Failed && counts.failed == 0);
        self.skipped += counts.skipped + u64::from(outcome.result == Verdict::NotRun);
        self.legs.push(outcome);
    }
}

#[expect(clippy::print_stdout, reason = "the program's result")]
fn show(summary: &Summary, path: &Path) {
    summary.devices.iter().for_each(|device| println!("{device}"));
    println!("\n{:18}  result   seconds  passed  failed  skipped", "leg");
    for leg in &summary.legs {
        let result = match leg.result {
            Verdict::Passed => "passed",
            Verdict::Failed => "FAILED",
            Verdict::NotRun => "not run",
        };
        let Counts { passed, failed, skipped } = leg.counts;
        // The whole is in the summary and in the log.
        let reason: String = leg.reason.iter().flat_map(|reason| reason.chars()).take(100).collect();
        let line = format!(
            "{:18}  {result:7}  {:7.1}  {passed:6}  {failed:6}  {skipped:7}  {reason}",
            leg.name, leg.seconds
        );
        println!("{}", line.trim_end());
    }
    if let Some(absent) = &summary.absent {
        println!("\nabsent: {absent}");
    }
    println!("\n{} passed, {} failed, {} skipped", summary.passed, summary.failed, summary.skipped);
    println!("{}", path.display());
}

/// A line for who watches.
#[expect(clippy::print_stderr, reason = "the program's progress")]
pub(crate) fn say(text: &str) {
    eprintln!("{text}");
}

fn requirement(text: &str) -> Result<String, String> {
    match text.split_once(',') {
        Some((backend, count))
            if !backend.is_empty() && count.parse::<u32>().is_ok_and(|count| count > 0) =>
        {
            Ok(text.into())
        }
        _ => Err("a backend and a number of devices are meant, such as `cuda,2`".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leg(name: &'static str, under: &[&str]) -> Leg {
        let under = under.iter().map(|&word| word.into()).collect();
        Leg { name, under, args: vec!["checks".into()], limit_seconds: 1 }
    }

    #[test]
    fn tests_and_checks_are_counted() {
        let text = "test a ... ok\ntest result: ok. 5 passed; 1 failed; 2 ignored; 0 measured; 9 filtered out\n\
                    {\"check\":\"a\",\"error\":null,\"ms\":1.5,\"ok\":true}\n{\"check\":\"b\",\"ok\":false}\nspoken\n";
        assert_eq!(Counts::of(text), Counts { passed: 6, failed: 2, skipped: 2 });
        assert!(Counts::of("").is_empty());
    }

    #[test]
    fn a_leg_without_its_surroundings_is_not_run() {
        let folder = tempfile::tempdir().unwrap();
        let outcome = run_leg(&leg("memcheck", &["no-such-sanitizer"]), 1, folder.path()).unwrap();
        assert_eq!(outcome.result, Verdict::NotRun);
        assert_eq!(outcome.command, "no-such-sanitizer gpu-suite checks");
        let mut summary = Summary::default();
        summary.add(outcome);
        assert_eq!((summary.passed, summary.failed, summary.skipped), (0, 0, 1));
    }

    #[test]
    fn backends_that_nobody_knows_are_absent() {
        assert!(absence("abacus,1").unwrap().contains("abacus"));
        assert_eq!(absence("host,1000"), None);
        assert!(requirement("cuda,2").is_ok());
        for bad in ["cuda", ",2", "cuda,0", "cuda,two"] {
            assert!(requirement(bad).is_err(), "{bad}");
        }
    }
}
