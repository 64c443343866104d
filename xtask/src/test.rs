//! `test` and `loom`: the legs of testing, each run where it can and named where it cannot.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use crate::cmd::Cmd;
use crate::drivers::{self, Driver, Drivers};
use crate::report::{Counts, Report};
use crate::workspace::{TargetKind, Workspace};

/// What the user asked of `test`.
#[derive(Debug, Default, Clone, clap::Args)]
pub(crate) struct Options {
    /// Devices the conformance suite must find, such as `host,4`; may be repeated
    #[arg(long, value_name = "BACKEND,N", value_parser = requirement)]
    pub(crate) require: Vec<String>,
    /// Passed on to the test programs, such as a part of a test's name
    #[arg(last = true)]
    pub(crate) args: Vec<String>,
}

/// One way of testing the workspace.
#[derive(Debug)]
struct Leg {
    name: &'static str,
    needs: Vec<Need>,
    commands: Vec<Cmd>,
}

/// What a leg cannot run without.
#[derive(Debug)]
struct Need {
    kind: NeedKind,
    met: bool,
    /// What is missing, and how to enable the leg if that is in the user's hands.
    absence: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NeedKind {
    /// Code of this workspace: a leg without code to test is missing nothing.
    Code,
    /// Something from outside that nobody has to have.
    Choice,
    /// Something a machine can be given: CI has to have it.
    Part,
}

/// Names the folder of topology samples.
const CORPUS: &str = "WARPWEFT_TOPOLOGY_CORPUS";
/// Names the program that compares what `warpweft` makes of the samples with what they hold.
const CORPUS_CHECK: &str = "WARPWEFT_TOPOLOGY_CHECK";

/// The test target of the conformance suite.
const CONFORMANCE: &str = "conformance";

/// The crate that the legs on Vulkan drivers test.
const VULKAN: &str = "backends/vulkan";
/// What tests on these drivers beside the suite: the backend's own, and the command's.
const BESIDE: [&str; 2] = ["-p warpweft-vulkan --test suite", "-p warpweft-cli --test vulkan"];
/// Makes a test that finds no driver a failure.
const REQUIRED: (&str, &str) = ("WARPWEFT_VULKAN_REQUIRED", "1");
/// Tells it to have the layers watch it, where whatever they say fails the case.
///
/// Layers of 2025 (1.4.309) look at what shaders access, and repeat themselves, only if they are told to.
const WATCHED: [(&str, &str); 3] = [
    ("WARPWEFT_VULKAN_VALIDATION", "1"),
    ("VK_LAYER_SYNCVAL_SHADER_ACCESSES_HEURISTIC", "1"),
    ("VK_LAYER_ENABLE_MESSAGE_LIMIT", "false"),
];

/// The verb `test` alone.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    ensure!(
        options.require.is_empty() || workspace.has_target(TargetKind::Test, CONFORMANCE),
        "--require speaks to the test target `{CONFORMANCE}`, which no crate of this workspace has"
    );
    let mut report = Report::default();
    test(workspace, &mut report, options);
    report.finish()
}

/// Runs every leg that can run here.
pub(crate) fn test(workspace: &Workspace, report: &mut Report, options: &Options) {
    let legs = [
        everything(options),
        conformance(workspace, options),
        loom(workspace),
        corpus(workspace, |name| env::var_os(name).map(PathBuf::from)),
    ];
    let ci = env::var("CI").is_ok_and(|ci| ci == "true");
    for leg in &legs {
        leg.run(report, ci, options.args.is_empty());
    }
    // Drivers are looked for last, and only for code that uses them: they may have to be brought.
    let drivers = workspace.packages.iter().any(|package| package.id() == VULKAN);
    let drivers = drivers.then(|| drivers::ready(workspace));
    for leg in &vulkan(options, drivers.as_ref()) {
        leg.run(report, ci, options.args.is_empty());
    }
}

/// The verb `loom` alone.
pub(crate) fn run_loom(workspace: &Workspace) -> Result<()> {
    let mut report = Report::default();
    loom(workspace).run(&mut report, false, true);
    report.finish()
}

impl Leg {
    /// `whole`: no filter was given, so that a leg without any test has gone wrong.
    fn run(&self, report: &mut Report, ci: bool, whole: bool) {
        let Some(need) = self.needs.iter().find(|need| !need.met) else {
            return report.step(self.name, |counts| self.execute(counts, whole));
        };
        report.absent(self.name, &need.absence, ci && need.kind == NeedKind::Part);
    }

    fn execute(&self, counts: &mut Counts, whole: bool) -> Result<()> {
        for command in &self.commands {
            command.run_reading(|line| counts.read(line))?;
        }
        ensure!(!whole || !counts.is_empty(), "no test was run");
        Ok(())
    }
}

/// Unit, integration and documentation tests of every crate.
fn everything(options: &Options) -> Leg {
    Leg { name: "workspace", needs: Vec::new(), commands: vec![cargo_test(&options.args, "")] }
}

/// The suite that every backend passes. Its target says `test = false`, so that it runs here only.
fn conformance(workspace: &Workspace, options: &Options) -> Leg {
    let default = [String::from("host,4")];
    let require = if options.require.is_empty() { &default[..] } else { &options.require };
    let mut args: Vec<_> = require.iter().flat_map(|devices| ["--require".into(), devices.clone()]).collect();
    args.extend(options.args.iter().cloned());
    Leg {
        name: CONFORMANCE,
        needs: vec![Need {
            kind: NeedKind::Code,
            met: workspace.has_target(TargetKind::Test, CONFORMANCE),
            absence: format!("no crate has a test target `{CONFORMANCE}` yet"),
        }],
        // With `--workspace` the features of dependencies are those of the leg before: nothing is built twice.
        commands: vec![cargo_test(&args, "--test conformance")],
    }
}

/// Every interleaving of the lock-free parts, in the crates that depend on loom.
fn loom(workspace: &Workspace) -> Leg {
    let crates: Vec<_> = workspace.packages.iter().filter(|package| package.depends_on("loom")).collect();
    let packages = crates.iter().flat_map(|package| ["--package", &package.name]);
    Leg {
        name: "loom",
        needs: vec![Need {
            kind: NeedKind::Code,
            met: !crates.is_empty(),
            absence: "no crate depends on loom yet".into(),
        }],
        commands: vec![
            Cmd::new("cargo test --locked --release --tests --target-dir")
                .path(&workspace.target.join("loom"))
                .args(packages)
                .args(["--", "loom"])
                .variable("RUSTFLAGS", "--cfg loom"),
        ],
    }
}

/// Topology dumps of many machines, read by the command `warpweft` and compared by another program.
fn corpus(workspace: &Workspace, variable: impl Fn(&str) -> Option<PathBuf>) -> Leg {
    let folder = variable(CORPUS);
    let check = variable(CORPUS_CHECK);
    let exists = |path: &Option<PathBuf>| path.as_deref().is_some_and(Path::exists);
    let absence = |lack: &str| format!("{lack}: {CORPUS}=FOLDER {CORPUS_CHECK}=PROGRAM cargo xtask test");
    Leg {
        name: "corpus",
        needs: vec![
            Need { kind: NeedKind::Choice, met: folder.is_some(), absence: absence("no samples are named") },
            Need {
                kind: NeedKind::Part,
                met: exists(&folder),
                absence: absence("the folder of samples is not there"),
            },
            Need {
                kind: NeedKind::Part,
                met: exists(&check),
                absence: absence("the program that compares is not there"),
            },
            Need {
                kind: NeedKind::Code,
                met: workspace.has_target(TargetKind::Bin, "warpweft"),
                absence: "no crate builds the command `warpweft` yet".into(),
            },
        ],
        commands: vec![
            Cmd::new("cargo build --workspace --locked --bin warpweft"),
            Cmd::program(&check.unwrap_or_default())
                .path(&workspace.target.join(format!("debug/warpweft{}", env::consts::EXE_SUFFIX)))
                .path(&folder.unwrap_or_default()),
        ],
    }
}

/// The suite, and the backend's own, on Vulkan drivers that need no GPU: each alone, and both as devices of one program.
fn vulkan(options: &Options, drivers: Option<&Drivers>) -> [Leg; 3] {
    [
        vulkan_leg("vulkan on lavapipe", options, drivers, &[Driver::Lavapipe], &WATCHED),
        vulkan_leg("vulkan on SwiftShader", options, drivers, &[Driver::SwiftShader], &[]),
        vulkan_leg("vulkan on both", options, drivers, &[Driver::Lavapipe, Driver::SwiftShader], &[]),
    ]
}

fn vulkan_leg(
    name: &'static str,
    options: &Options,
    drivers: Option<&Drivers>,
    on: &[Driver],
    variables: &[(&str, &str)],
) -> Leg {
    let mut args: Vec<String> = ["--only", "vulkan", "--require", "vulkan,2"].map(String::from).into();
    args.extend(options.args.iter().cloned());
    let environment = drivers.map_or(Ok(Vec::new()), |drivers| drivers.environment(on));
    let absence = environment.as_ref().err().map(|error| format!("{error:#}"));
    let environment = environment.unwrap_or_default();
    let suite = cargo_test(&args, "--test conformance");
    let beside = BESIDE.map(|targets| {
        with_args(
            Cmd::new("cargo test --locked --no-fail-fast").args(targets.split_whitespace()),
            &options.args,
        )
    });
    let commands = [suite].into_iter().chain(beside).map(|command| {
        let command = command.variables(environment.clone()).variable(REQUIRED.0, REQUIRED.1);
        variables.iter().fold(command, |command, (name, value)| command.variable(name, value))
    });
    let commands = commands.collect();
    let code = Need {
        kind: NeedKind::Code,
        met: drivers.is_some(),
        absence: format!("there is no crate {VULKAN} yet"),
    };
    let part = Need { kind: NeedKind::Part, met: absence.is_none(), absence: absence.unwrap_or_default() };
    Leg { name, needs: vec![code, part], commands }
}

/// All crates.
fn cargo_test(args: &[String], targets: &str) -> Cmd {
    let command = Cmd::new("cargo test --workspace --locked --no-fail-fast").args(targets.split_whitespace());
    with_args(command, args)
}

/// With arguments for the test programs.
fn with_args(command: Cmd, args: &[String]) -> Cmd {
    if args.is_empty() { command } else { command.arg("--").args(args.iter().cloned()) }
}

fn requirement(text: &str) -> Result<String, String> {
    match text.split_once(',') {
        Some((backend, count)) if !backend.is_empty() && count.parse::<u32>().is_ok() => Ok(text.into()),
        _ => Err("a backend and a number of devices are meant, such as `host,4`".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::{Dependency, Package, Target};

    fn workspace(targets: &[(TargetKind, &str)], dependencies: &[&str]) -> Workspace {
        let target = |&(kind, name): &(TargetKind, &str)| Target {
            name: name.into(),
            kind: vec![kind],
            ..Target::default()
        };
        let dependency = |&name: &&str| Dependency { name: name.into(), ..Dependency::default() };
        Workspace {
            packages: vec![Package {
                name: "warpweft-some".into(),
                targets: targets.iter().map(target).collect(),
                dependencies: dependencies.iter().map(dependency).collect(),
                ..Package::default()
            }],
            target: "target".into(),
            ..Workspace::default()
        }
    }

    fn lines(leg: &Leg) -> Vec<String> {
        leg.commands.iter().map(ToString::to_string).collect()
    }

    /// What `finish` says of a leg that lacks a need of `kind`.
    fn absent(kind: NeedKind, ci: bool) -> Result<()> {
        let mut report = Report::default();
        let absence = "no parts: bring them".into();
        let leg = Leg { name: "some", needs: vec![Need { kind, met: false, absence }], commands: Vec::new() };
        leg.run(&mut report, ci, true);
        report.finish()
    }

    #[test]
    fn an_absent_part_fails_in_ci_only() {
        assert!(absent(NeedKind::Part, true).is_err());
        assert!(absent(NeedKind::Part, false).is_ok());
        assert!(absent(NeedKind::Code, true).is_ok());
        assert!(absent(NeedKind::Choice, true).is_ok());
    }

    #[test]
    fn a_leg_without_tests_fails_unless_filtered() {
        let silent = Leg { name: "some", needs: Vec::new(), commands: vec![Cmd::new("true")] };
        assert!(silent.execute(&mut Counts::default(), true).is_err());
        assert!(silent.execute(&mut Counts::default(), false).is_ok());
    }

    #[test]
    fn conformance_is_told_what_to_require() {
        let with_suite = workspace(&[(TargetKind::Test, "conformance")], &[]);
        let check = |require: &[&str], args: &[&str], expected: &str| {
            let owned = |words: &[&str]| words.iter().map(|&word| word.into()).collect();
            let leg = conformance(&with_suite, &Options { require: owned(require), args: owned(args) });
            assert!(leg.needs.iter().all(|need| need.met));
            let command = "cargo test --workspace --locked --no-fail-fast --test conformance --";
            assert_eq!(lines(&leg), [format!("{command} {expected}")]);
        };
        check(&[], &[], "--require host,4");
        check(&["host,2", "cuda,2"], &["copy"], "--require host,2 --require cuda,2 copy");
    }

    #[test]
    fn loom_takes_the_crates_that_depend_on_it() {
        assert!(!loom(&workspace(&[], &["serde"])).needs[0].met);
        let leg = loom(&workspace(&[], &["loom"]));
        assert!(leg.needs[0].met);
        assert_eq!(
            lines(&leg),
            ["RUSTFLAGS='--cfg loom' cargo test --locked --release --tests \
              --target-dir target/loom --package warpweft-some -- loom"]
        );
    }

    #[test]
    fn corpus_needs_samples_and_a_program_to_compare() {
        let workspace = workspace(&[(TargetKind::Bin, "warpweft")], &[]);
        let first_missing = |folder: Option<&str>, check: Option<&str>| {
            let leg =
                corpus(&workspace, |name| if name == CORPUS { folder } else { check }.map(PathBuf::from));
            leg.needs.iter().find(|need| !need.met).map(|need| need.kind)
        };
        assert_eq!(first_missing(None, None), Some(NeedKind::Choice));
        assert_eq!(first_missing(Some("no-such-folder"), Some("src")), Some(NeedKind::Part));
        assert_eq!(first_missing(Some("src"), None), Some(NeedKind::Part));
        assert_eq!(first_missing(Some("src"), Some("Cargo.toml")), None);
    }

    #[test]
    fn vulkan_waits_for_its_code_and_then_for_drivers() {
        let check = |drivers: Option<&Drivers>, expected: Option<NeedKind>| {
            for leg in vulkan(&Options::default(), drivers) {
                let missing = leg.needs.iter().find(|need| !need.met);
                assert_eq!(missing.map(|need| need.kind), expected, "{}", leg.name);
                assert!(missing.is_none_or(|need| !need.absence.is_empty()), "{}", leg.name);
            }
        };
        check(None, Some(NeedKind::Code));
        check(Some(&Drivers::pretended(&[])), Some(NeedKind::Part));
        check(Some(&Drivers::pretended(&[Driver::Lavapipe, Driver::SwiftShader])), None);
    }

    #[test]
    fn one_driver_is_enough_for_its_own_leg() {
        let lavapipe = Drivers::pretended(&[Driver::Lavapipe]);
        let ready = vulkan(&Options::default(), Some(&lavapipe)).map(|leg| leg.needs.iter().all(|n| n.met));
        assert_eq!(ready, [true, false, false]);
    }

    #[test]
    fn lavapipe_is_watched_by_the_layers() {
        let both = Drivers::pretended(&[Driver::Lavapipe, Driver::SwiftShader]);
        let options = Options { args: vec!["copy".into()], ..Options::default() };
        let legs = vulkan(&options, Some(&both)).map(|leg| lines(&leg));
        for commands in &legs {
            let ends = [
                "cargo test --workspace --locked --no-fail-fast --test conformance -- \
                 --only vulkan --require vulkan,2 copy",
                "cargo test --locked --no-fail-fast -p warpweft-vulkan --test suite -- copy",
                "cargo test --locked --no-fail-fast -p warpweft-cli --test vulkan -- copy",
            ];
            assert_eq!(commands.len(), ends.len());
            assert!(commands.iter().zip(ends).all(|(command, end)| command.ends_with(end)), "{commands:?}");
            assert!(
                commands.iter().all(|command| command.contains("WARPWEFT_VULKAN_REQUIRED=1 ")),
                "{commands:?}"
            );
        }
        let watched = legs.map(|commands| {
            commands.iter().filter(|command| command.contains("WARPWEFT_VULKAN_VALIDATION=1 ")).count()
        });
        assert_eq!(watched, [3, 0, 0]);
    }

    #[test]
    fn requirements_name_a_backend_and_a_number() {
        assert!(requirement("cuda,2").is_ok());
        for bad in ["cuda", ",2", "cuda,two", ""] {
            assert!(requirement(bad).is_err(), "{bad}");
        }
    }
}
