//! The command on whatever Vulkan drivers the environment names.
//!
//! A machine without a driver skips these tests and says so; `WARPWEFT_VULKAN_REQUIRED=1` makes that a failure.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::{
    process::{Command, ExitCode, Output},
    sync::OnceLock,
};

use libtest_mimic::{Arguments, Completion, Trial};
use serde_json::Value;

const TESTS: &[(&str, fn())] = &[
    ("the_doctor_tells_of_loader_drivers_and_devices", the_doctor_tells_of_loader_drivers_and_devices),
    ("the_doctor_tells_what_a_machine_without_drivers_needs", without_drivers),
    ("the_demo_runs_on_vulkan_devices_alone_and_beside_others", the_demo_runs_alone_and_beside_others),
    #[cfg(all(target_os = "linux", feature = "cuda"))]
    ("the_demo_runs_on_three_backends", the_demo_runs_on_three_backends),
    ("links_are_measured_and_their_bytes_checked", links_are_measured),
    ("copies_and_launches_are_timed_beside_the_drivers_own", copies_and_launches),
    ("graphs_run_and_are_timed", graphs),
];

fn main() -> ExitCode {
    let trials = TESTS.iter().map(|&(name, body)| Trial::ignorable_test(name, move || run(body)));
    let twice =
        Trial::ignorable_test("a_driver_that_is_named_twice_is_used_once", || {
            match std::env::var_os("VK_DRIVER_FILES") {
                Some(_) => run(a_driver_that_is_named_twice_is_used_once),
                None => Ok(Completion::ignored_with("skipped: VK_DRIVER_FILES names no driver")),
            }
        });
    libtest_mimic::run(&Arguments::from_args(), trials.chain([twice]).collect()).exit_code()
}

fn run(body: fn()) -> Result<Completion, libtest_mimic::Failed> {
    static MISSING: OnceLock<Option<String>> = OnceLock::new();
    match MISSING.get_or_init(missing) {
        Some(what) if std::env::var_os("WARPWEFT_VULKAN_REQUIRED").is_some() => Err(what.into()),
        Some(what) => Ok(Completion::ignored_with(format!("skipped: {what}"))),
        None => {
            body();
            Ok(Completion::Completed)
        }
    }
}

/// What the doctor misses, if anything.
fn missing() -> Option<String> {
    let report = warpweft("doctor --backend vulkan --json");
    let checks = lines(&report)[0]["checks"].as_array().unwrap().clone();
    let missing = checks.into_iter().find(|check| check["found"] == false && check["required"] == true)?;
    Some(missing["detail"].as_str().unwrap().to_owned())
}

fn warpweft(args: &str) -> Output {
    warpweft_with(args, &[])
}

fn warpweft_with(args: &str, variables: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_warpweft"))
        .args(args.split(' '))
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn lines(output: &Output) -> Vec<Value> {
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn succeeds(args: &str) -> Vec<Value> {
    let output = warpweft(args);
    let said = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{args}: {said}");
    lines(&output)
}

/// The demo checked every pair of its devices; how many there are.
fn whole(output: &Output) -> u64 {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout) + &text(&output.stderr));
    let summary = &lines(output)[0];
    assert_eq!((&summary["ok"], &summary["wrong_bytes"]), (&true.into(), &0.into()), "{summary}");
    let devices = summary["devices"].as_u64().unwrap();
    assert_eq!(summary["pairs"], devices * (devices - 1), "{summary}");
    devices
}

/// The drivers that the environment names, each by a second manifest too.
fn a_driver_that_is_named_twice_is_used_once() {
    let named = std::env::var("VK_DRIVER_FILES").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let copies = named.split(':').enumerate().map(|(number, manifest)| {
        let copy = folder.path().join(format!("{number}.json"));
        std::fs::copy(manifest, &copy).unwrap();
        format!("{manifest}:{}", copy.display())
    });
    let twice = copies.collect::<Vec<_>>().join(":");
    let devices = |variables: &[(&str, &str)]| {
        let output = warpweft_with("topo --backend vulkan --json", variables);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        lines(&output)[0]["gpus"].as_u64().unwrap()
    };
    assert_eq!(devices(&[("VK_DRIVER_FILES", &twice)]), devices(&[]));
    let said = warpweft_with("topo --backend vulkan", &[("VK_DRIVER_FILES", &twice)]);
    let said = text(&said.stdout) + &text(&said.stderr);
    assert!(said.contains("the loader lists it twice"), "{said}");
}

fn the_doctor_tells_of_loader_drivers_and_devices() {
    let report = &succeeds("doctor --backend vulkan --json")[0];
    assert_eq!(report["healthy"], true, "{report}");
    let checks = report["checks"].as_array().unwrap();
    for (what, word) in [
        ("vulkan loader", "1."),
        ("vulkan:0", "ran a kernel"),
        ("vulkan:0 families", "residents"),
        ("vulkan:0 residents", "counted"),
    ] {
        let check = checks.iter().find(|check| check["what"] == what).unwrap_or(&Value::Null);
        assert_eq!(check["found"], true, "{what}: {report}");
        assert!(check["detail"].as_str().unwrap().contains(word), "{what}: {report}");
    }
    let absent = checks.iter().find(|check| check["what"] == "vulkan:0 family").unwrap();
    assert_eq!((&absent["found"], &absent["required"]), (&false.into(), &false.into()), "{report}");
}

fn without_drivers() {
    let nowhere = [("VK_DRIVER_FILES", "no-such-driver.json"), ("VK_ICD_FILENAMES", "no-such-driver.json")];
    let doctor = warpweft_with("doctor --backend vulkan --json", &nowhere);
    let report = &lines(&doctor)[0];
    assert_eq!((doctor.status.code(), &report["healthy"]), (Some(1), &false.into()), "{report}");
    let checks = report["checks"].as_array().unwrap();
    assert!(
        checks.iter().any(|check| check["what"] == "vulkan loader" && check["found"] == true),
        "{report}"
    );
    let missing: Vec<_> = checks.iter().filter(|check| check["found"] == false).collect();
    assert_eq!(missing.len(), 1, "one message: {report}");
    assert!(missing[0]["detail"].as_str().unwrap().contains("mesa-vulkan-drivers"), "{report}");
    let demo = warpweft_with("demo --backend vulkan", &nowhere);
    assert_eq!(demo.status.code(), Some(1));
    assert_eq!(text(&demo.stderr).trim().lines().count(), 1, "{}", text(&demo.stderr));
}

fn the_demo_runs_alone_and_beside_others() {
    let alone = whole(&warpweft("demo --backend vulkan --copies 2 --size 64K --json"));
    assert!(alone >= 2 && alone.is_multiple_of(2), "each device twice: {alone}");
    let beside = whole(&warpweft("demo --backend host,vulkan --devices 2 --size 64K --json"));
    assert_eq!(beside, alone / 2 + 2);
    let shown = text(&warpweft("demo --backend vulkan,host --devices 1 --size 64K").stdout);
    assert!(shown.contains("vulkan:0") && shown.contains("host:0"), "{shown}");
}

/// The driver of the GPUs is made of host threads.
#[cfg(all(target_os = "linux", feature = "cuda"))]
fn the_demo_runs_on_three_backends() {
    let folder = tempfile::tempdir().unwrap();
    let (_library, driver) = warpweft_stand_in_cuda::StandIn::without(&[]).unwrap();
    std::os::unix::fs::symlink(&driver, folder.path().join("libcuda.so.1")).unwrap();
    let inherited = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = [folder.path().to_owned()].into_iter().chain(std::env::split_paths(&inherited));
    let folders = std::env::join_paths(folders).unwrap();
    let variables =
        [("LD_LIBRARY_PATH", folders.to_str().unwrap()), ("HOME", folder.path().to_str().unwrap())];
    let demo = warpweft_with("demo --backend host,cuda,vulkan --devices 1 --size 64K --json", &variables);
    assert!(whole(&demo) >= 4, "a host device, two GPUs and a Vulkan device at least");
}

fn links_are_measured() {
    let report = &succeeds("topo --backend vulkan --copies 2 --measure --size 64K --json")[0];
    let measured = report["measured"].as_array().unwrap();
    assert!(!measured.is_empty() && measured.iter().all(|link| link["wrong_bytes"] == 0), "{report}");
    assert!(report["notes"].to_string().contains("Vulkan"), "{report}");
    let shown = text(&warpweft("topo --backend vulkan --copies 2 --measure --size 64K").stdout);
    assert!(shown.contains("vulkan:1") && !shown.contains('?'), "{shown}");
}

fn copies_and_launches() {
    let rows = succeeds("perf copy --backend vulkan --copies 2 -b 64K -e 256K -n 3 --json");
    assert!(!rows.is_empty());
    for row in &rows {
        assert_eq!(row["wrong"], 0, "{row}");
        assert!(row["algbw"].as_f64().unwrap() > 0.0 && row["raw"]["p50_ns"].as_u64().unwrap() > 0, "{row}");
    }
    let own = rows.iter().filter(|row| row["from"] == row["to"]);
    assert!(own.clone().count() > 0 && own.clone().all(|row| row["raw_call"] == "driver"), "{rows:?}");
    assert!(rows.iter().any(|row| row["route"] == "direct"), "copies of a device reach each other: {rows:?}");
    let queued = succeeds("perf copy --backend vulkan -b 64K -e 64K -n 3 --queued 3 --bar 0.000001 --json");
    assert!(queued.iter().all(|row| row["wrong"] == 0 && row["bar"]["met"] == true), "{queued:?}");
    let launches = succeeds("perf launch --backend vulkan -n 20 -w 2 --json");
    assert!(
        !launches.is_empty() && launches.iter().all(|row| row["ratio"].as_f64().is_some()),
        "{launches:?}"
    );
}

fn graphs() {
    let halo = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/halo.json");
    for backend in ["vulkan", "vulkan --copies 2", "host,vulkan --devices 1"] {
        let report = &succeeds(&format!("graph {halo} --run --replays 3 --json --backend {backend}"))[0];
        assert_eq!(report["run"]["wrong_bytes"], 0, "{backend}: {report}");
    }
    let rows = succeeds("perf graph --backend vulkan --nodes 40 -n 3 -w 1 --json");
    assert!(!rows.is_empty(), "a row for each kind and shape");
    for row in rows {
        assert!(row["kind"] == "task" || row["ratio"].as_f64().unwrap() > 0.0, "{row}");
    }
}
