//! Running the legs, each in a process of its own.

use std::{
    ffi::OsString,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use warpweft_core_types::Backend as _;
use warpweft_cuda::CudaBackend;

use crate::{
    legs::{self, Leg, Wish},
    process,
    rig::say,
    summary::{Counts, Outcome, Summary, Verdict, bars_of},
    vulkan,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit code: 0 if every leg passed, 1 if one failed or what was asked for is absent, 2 for a wrong call.
A leg that this machine cannot run is not run; it is a failure if --leg or --memcheck asked for it.
TEXT that is in names of CUDA's legs too does not ask for Vulkan's.
A missed bar is told at the end and fails nothing.

Examples:
  run.sh --require cuda,2 --out results
  run.sh --leg conformance --filter resident::
  run.sh --require vulkan,1 --leg vulkan
  run.sh --leg graph
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

pub(crate) fn run(options: &Options) -> ExitCode {
    match run_legs(options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            say(&format!("error: {error:#}"));
            ExitCode::from(2)
        }
    }
}

fn run_legs(options: &Options) -> Result<bool> {
    let wish = Wish {
        required: &options.require,
        filter: options.filter.as_deref(),
        names: &options.leg,
        memcheck: options.memcheck,
    };
    let legs = legs::wanted(&wish);
    if legs.is_empty() {
        bail!("no leg has {} in its name", options.leg.join(" or "));
    }
    fs::create_dir_all(&options.out).with_context(|| options.out.display().to_string())?;
    let (started, machine) = (Instant::now(), Machine::look());
    let mut summary = Summary::new(&options.require, machine.described());
    summary.absent = options.require.iter().find_map(|required| machine.lacks(required));
    if let Some(absent) = &summary.absent {
        say(&format!("absent: {absent}"));
    }
    for (number, leg) in (1..).zip(&legs) {
        let outcome = match &summary.absent {
            Some(_) => not_run(leg, Verdict::NotRun, "a required device is absent"),
            None => run_leg(leg, number, &machine, &options.out)?,
        };
        summary.add(outcome);
    }
    summary.close(started.elapsed());
    summary.show(&summary.save(&options.out)?);
    Ok(summary.is_ok())
}

/// The devices there are, each with its name and driver, or why none can be used.
struct Machine {
    cuda: Result<Vec<String>, String>,
    vulkan: Result<Vec<String>, String>,
}

impl Machine {
    fn look() -> Self {
        let cuda = CudaBackend::new().and_then(|backend| backend.devices());
        let cuda = cuda.map(|infos| infos.iter().map(vulkan::described).collect());
        Self {
            cuda: cuda.map_err(|error| error.to_string()),
            vulkan: vulkan::look().map_err(|error| format!("{error:#}")),
        }
    }

    /// Those of one backend.
    fn of(&self, backend: &str) -> Option<&Result<Vec<String>, String>> {
        match backend {
            "cuda" => Some(&self.cuda),
            "vulkan" => Some(&self.vulkan),
            _ => None,
        }
    }

    fn described(&self) -> Vec<String> {
        self.cuda.iter().chain(&self.vulkan).flatten().cloned().collect()
    }

    /// What is missing of `cuda,2`.
    fn lacks(&self, required: &str) -> Option<String> {
        let (backend, count) = required.split_once(',')?;
        if backend == "host" {
            // As many as anybody asks for.
            return None;
        }
        let Some(devices) = self.of(backend) else {
            return Some(format!("{required}: this suite knows no backend {backend:?}"));
        };
        let count: usize = count.parse().ok()?;
        let reason = too_few(backend, devices, count)?;
        Some(format!("{required}: {reason}"))
    }

    /// Why this leg cannot be run here, if it cannot.
    fn cannot_run(&self, leg: &Leg) -> Option<String> {
        if let Some(around) = leg.under.first()
            && !is_on_path(around)
        {
            return Some(format!("{around} is not on the PATH; it comes with the CUDA toolkit"));
        }
        let reason = too_few(leg.backend, self.of(leg.backend)?, leg.devices)?;
        Some(format!("it needs {} {} devices, and {reason}", leg.devices, name_of(leg.backend)))
    }
}

/// Why there are not as many devices, if there are not.
fn too_few(backend: &str, devices: &Result<Vec<String>, String>, needed: usize) -> Option<String> {
    match devices {
        Ok(devices) if devices.len() >= needed => None,
        Ok(devices) => Some(format!("there are {} {} devices", devices.len(), name_of(backend))),
        Err(error) => Some(error.clone()),
    }
}

/// A backend as people write it.
fn name_of(backend: &str) -> &str {
    match backend {
        "cuda" => "CUDA",
        "vulkan" => "Vulkan",
        other => other,
    }
}

fn run_leg(leg: &Leg, number: u32, machine: &Machine, out: &Path) -> Result<Outcome> {
    if let Some(reason) = machine.cannot_run(leg) {
        let verdict = if leg.is_asked_for { Verdict::Failed } else { Verdict::NotRun };
        return Ok(not_run(leg, verdict, &reason));
    }
    let command = shown(leg);
    say(&format!("== {}: {command}", leg.name));
    let log = format!("{number:02}-{}.log", leg.name.replace(' ', "-"));
    let file = File::create(out.join(&log)).with_context(|| log.clone())?;
    let started = Instant::now();
    let limit = Duration::from_secs(leg.limit_seconds.into());
    let mut call = call(leg)?;
    // What a leg saves beside what it prints goes there too.
    call.env("OUT", out).envs(variables(leg));
    // The last line is to be the reason.
    call.env("RUST_BACKTRACE", "0").stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let ended = process::run_group(&mut call, limit)?;
    let seconds = started.elapsed().as_secs_f64();
    let text = String::from_utf8_lossy(&fs::read(out.join(&log))?).into_owned();
    let counts = Counts::of(&text);
    let exit_code = ended.and_then(|status| status.code());
    let reason = match (ended, exit_code) {
        (None, _) => Some(format!("it took longer than {limit:?}")),
        (_, Some(0)) if counts.failed == 0 => None,
        _ => Some(text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned()),
    };
    let result = if reason.is_none() { Verdict::Passed } else { Verdict::Failed };
    let bars = bars_of(&text);
    Ok(Outcome { name: leg.name, command, result, reason, exit_code, seconds, counts, bars, log: Some(log) })
}

/// This program with the leg's arguments, under another one if the leg has that.
fn call(leg: &Leg) -> Result<Command> {
    let this = std::env::current_exe()?;
    let mut call = match leg.under.split_first() {
        None => Command::new(this),
        Some((around, args)) => {
            let mut call = Command::new(around);
            call.args(args).arg(this);
            call
        }
    };
    call.args(&leg.args);
    Ok(call)
}

fn not_run(leg: &Leg, result: Verdict, reason: &str) -> Outcome {
    Outcome {
        name: leg.name,
        command: shown(leg),
        result,
        reason: Some(reason.to_owned()),
        exit_code: None,
        seconds: 0.0,
        counts: Counts::default(),
        bars: Vec::new(),
        log: None,
    }
}

fn shown(leg: &Leg) -> String {
    let variables = variables(leg).map(|(name, value)| format!("{name}={}", value.display()));
    let words = leg.under.iter().map(String::as_str).chain(["gpu-suite"]);
    let words = words.chain(leg.args.iter().map(String::as_str)).map(String::from);
    variables.chain(words).collect::<Vec<_>>().join(" ")
}

/// A leg's variables as they are in force: what somebody has set already stays.
fn variables(leg: &Leg) -> impl Iterator<Item = (&str, OsString)> {
    leg.variables.iter().map(|&(name, value)| (name, std::env::var_os(name).unwrap_or_else(|| value.into())))
}

fn is_on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
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

    /// A leg that only says how this program is called.
    fn leg(devices: usize, under: &[&str], is_asked_for: bool) -> Leg {
        Leg {
            name: "a leg",
            under: under.iter().map(|&word| word.into()).collect(),
            args: vec!["--help".into()],
            variables: Vec::new(),
            limit_seconds: 60,
            backend: "cuda",
            devices,
            is_asked_for,
        }
    }

    /// A machine with so many GPUs and no Vulkan.
    fn machine(count: usize) -> Machine {
        Machine { cuda: Ok(vec!["cuda:0 GPU, CUDA 13.0".into(); count]), vulkan: Err("no loader".into()) }
    }

    fn check(leg: &Leg, machine: &Machine, verdict: Verdict, word: &str) {
        let folder = tempfile::tempdir().unwrap();
        let outcome = run_leg(leg, 1, machine, folder.path()).unwrap();
        let reason = outcome.reason.clone().unwrap_or_default();
        assert!(outcome.result == verdict && reason.contains(word), "{outcome:?}");
    }

    #[test]
    fn a_leg_without_its_surroundings_is_not_run_and_fails_if_it_was_asked_for() {
        check(&leg(1, &["no-such-sanitizer"], false), &machine(1), Verdict::NotRun, "no-such-sanitizer");
        check(&leg(1, &["no-such-sanitizer"], true), &machine(1), Verdict::Failed, "no-such-sanitizer");
        check(&leg(2, &[], false), &machine(1), Verdict::NotRun, "needs 2 CUDA devices, and there are 1");
        check(&leg(2, &[], true), &machine(1), Verdict::Failed, "needs 2 CUDA devices");
        let without_driver = Machine { cuda: Err("no driver".into()), ..machine(0) };
        check(&leg(1, &[], false), &without_driver, Verdict::NotRun, "needs 1 CUDA devices, and no driver");
        let on_vulkan = Leg { backend: "vulkan", ..leg(1, &[], false) };
        check(&on_vulkan, &machine(1), Verdict::NotRun, "needs 1 Vulkan devices, and no loader");
        // With its devices it runs: the test program, which knows `--help`.
        check(&leg(2, &[], true), &machine(2), Verdict::Passed, "");
    }

    #[test]
    fn calls_are_shown_as_they_are_typed() {
        assert_eq!(shown(&leg(1, &["sanitizer", "--tool"], false)), "sanitizer --tool gpu-suite --help");
        assert_eq!(shown(&leg(1, &[], false)), "gpu-suite --help");
        let with_variable = Leg { variables: vec![("GRAPHS", "9")], ..leg(1, &[], false) };
        assert_eq!(shown(&with_variable), "GRAPHS=9 gpu-suite --help");
        // Set already where tests run, and so what a leg is run with.
        let path = std::env::var("PATH").unwrap();
        let with_known = Leg { variables: vec![("PATH", "nowhere")], ..leg(1, &[], false) };
        assert_eq!(shown(&with_known), format!("PATH={path} gpu-suite --help"));
    }

    #[test]
    fn what_is_required_and_absent_is_named() {
        assert!(machine(1).lacks("abacus,1").unwrap().contains("abacus"));
        assert_eq!(machine(0).lacks("host,1000"), None);
        assert_eq!(machine(2).lacks("cuda,2"), None);
        assert!(machine(1).lacks("cuda,2").unwrap().contains("1 CUDA devices"));
        assert!(machine(1).lacks("vulkan,1").unwrap().contains("no loader"));
        assert!(requirement("cuda,2").is_ok());
        for bad in ["cuda", ",2", "cuda,0", "cuda,two"] {
            assert!(requirement(bad).is_err(), "{bad}");
        }
    }
}
