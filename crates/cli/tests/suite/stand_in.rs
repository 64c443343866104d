//! The command on CUDA devices, with a driver that is made of host threads where the loader finds the real one.

use std::{
    os::unix::fs::symlink,
    process::{Command, Output},
};

use serde_json::Value;
use tempfile::TempDir;
use warpweft_stand_in_cuda::StandIn;

use crate::{lines, text};

const DRIVER: &str = "libcuda.so.1";
const NVML: &str = "libnvidia-ml.so.1";

/// A machine with two GPUs, to the command.
struct Machine {
    folder: TempDir,
    libraries: Vec<TempDir>,
    settings: Vec<(&'static str, &'static str)>,
}

impl Machine {
    fn new() -> Self {
        Self::without_nvml().with_library(NVML, &[])
    }

    fn without_nvml() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { folder, libraries: Vec::new(), settings: Vec::new() }.with_library(DRIVER, &[])
    }

    /// Puts a library where the loader finds it under this name, without some of its functions.
    fn with_library(mut self, name: &str, lacking: &[&str]) -> Self {
        let (library, path) = StandIn::without(lacking).unwrap();
        symlink(&path, self.folder.path().join(name)).unwrap();
        self.libraries.push(library);
        self
    }

    /// With a setting of the stand-in's.
    fn with(mut self, name: &'static str, value: &'static str) -> Self {
        self.settings.push((name, value));
        self
    }

    /// Runs the command with nothing of this machine's environment: no CUDA toolkit is found by chance, and no
    /// machine code is kept for a real driver.
    fn run(&self, args: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_warpweft"))
            .args(args.split(' '))
            .env_clear()
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("HOME", self.folder.path())
            .envs(self.settings.iter().copied())
            .output()
            .unwrap()
    }

    fn succeeds(&self, args: &str) -> Vec<Value> {
        let output = self.run(args);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{args}: {said}");
        lines(&output)
    }
}

#[test]
fn the_demo_runs_on_gpus_and_host_devices_together() {
    let machine = Machine::new();
    let summary = &machine.succeeds("demo --backend host,cuda --size 64K --json")[0];
    assert_eq!((&summary["ok"], &summary["wrong_bytes"]), (&true.into(), &0.into()), "{summary}");
    let devices = summary["devices"].as_u64().unwrap();
    assert!(devices > 2, "{summary}");
    assert_eq!(summary["pairs"], devices * (devices - 1), "{summary}");
    let shown = machine.run("demo --backend cuda,host --size 64K");
    assert_eq!(shown.status.code(), Some(0), "{}", text(&shown.stdout) + &text(&shown.stderr));
}

#[test]
fn graphs_run_on_gpus_alone_and_beside_host_devices() {
    let machine = Machine::new();
    let halo = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/halo.json");
    for backend in ["cuda", "host,cuda --devices 1", "cuda,host --devices 1"] {
        let report =
            &machine.succeeds(&format!("graph {halo} --run --replays 3 --json --backend {backend}"))[0];
        assert_eq!(report["run"]["wrong_bytes"], 0, "{backend}: {report}");
    }
    let rows = machine.succeeds("perf graph --backend cuda --nodes 40 -n 3 -w 1 --json");
    assert_eq!(rows.len(), 4);
    for row in rows {
        assert!(row["kind"] == "task" || row["ratio"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn the_links_of_gpus_are_shown() {
    let machine = Machine::new();
    let report = &machine.succeeds("topo --backend cuda --json")[0];
    assert_eq!(report["gpus"], 2, "{report}");
    let mut links = report["links"].as_array().unwrap().iter();
    assert!(links.any(|link| link["count"] == 18), "{report}");
    let shown = text(&machine.run("topo --backend cuda").stdout);
    assert!(shown.contains("cuda:1") && shown.contains("NV18"), "{shown}");
}

#[test]
fn copies_between_gpus_are_measured() {
    let machine = Machine::new();
    let rows = machine.succeeds("perf copy --backend cuda -b 64K -e 256K -n 3 --json");
    assert!(!rows.is_empty());
    for row in &rows {
        assert_eq!(row["wrong"], 0, "{row}");
        assert!(row["algbw"].as_f64().unwrap() > 0.0, "{row}");
    }
    let rows = machine.succeeds("perf launch --backend cuda -n 20 -w 2 --json");
    assert_eq!(rows.len(), 2);
}

#[test]
fn copies_are_queued_and_judged_by_a_bar() {
    let machine = Machine::new();
    let args = "perf copy --backend cuda -b 64K -e 64K -n 3 --queued 3 --bar 0.000001";
    for ways in ["", " --both"] {
        for row in machine.succeeds(&format!("{args}{ways} --json")) {
            assert_eq!((&row["wrong"], &row["queued"]), (&0.into(), &3.into()), "{row}");
            assert_eq!((&row["bar"]["met"], &row["bar"]["is"]), (&true.into(), &row["ratio"]), "{row}");
        }
    }
    let missed = machine.succeeds("perf copy --backend cuda -b 64K -e 64K -n 3 --bar 1000000 --json");
    assert!(missed.iter().all(|row| row["bar"]["met"] == false), "a missed bar is told and fails nothing");
    let shown = text(&machine.run(&format!("{args} --both")).stdout);
    assert!(shown.contains("3 queued") && shown.contains("  met"), "{shown}");
}

#[test]
fn engines_of_gpus_are_measured_and_told() {
    let machine = Machine::new();
    let cache = machine.folder.path().join("kept");
    let explain = format!(
        "perf all_reduce --backend cuda -b 4K -e 4K -n 2 -m 2 -w 1 --explain --tuning-cache {}",
        cache.display()
    );
    let told = text(&machine.run(&explain).stdout);
    assert!(told.contains("Engines by what was measured") && told.contains("usual sum"), "{told}");
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 1);
    let rows = machine.succeeds(&format!("{explain} --json"));
    assert!(rows.iter().all(|row| row["wrong"] == 0 && row["chosen"]["engine"].is_string()), "{rows:?}");
}

#[test]
fn host_devices_and_gpus_are_shown_measured_and_examined_together() {
    let machine = Machine::new();
    let report = &machine.succeeds("topo --backend host,cuda --devices 2 --json")[0];
    assert_eq!(report["gpus"], 4, "devices of any kind: {report}");
    let measured = machine.succeeds("topo --backend host,cuda --devices 2 --measure --size 64K --json");
    let links = measured[0]["measured"].as_array().unwrap();
    assert!(links.len() >= 8 && links.iter().all(|link| link["wrong_bytes"] == 0), "{links:?}");
    let shown = text(&machine.run("topo --backend host,cuda --devices 2").stdout);
    assert!(shown.contains("host:1") && shown.contains("cuda:1"), "{shown}");
    let rows = machine.succeeds("perf copy --backend host,cuda --devices 2 -b 64K -e 64K -n 3 --json");
    let is_mixed = |row: &&Value| [&row["from"], &row["to"]].iter().any(|end| end["backend"] == "host");
    assert!(rows.iter().all(|row| row["wrong"] == 0), "{rows:?}");
    assert!(rows.iter().any(|row| row["raw_call"] == "memcpy"), "{rows:?}");
    assert!(rows.iter().filter(is_mixed).any(|row| row["raw_call"] == "driver"), "{rows:?}");
    let health = &machine.succeeds("doctor --backend host,cuda --json")[0];
    let checks = health["checks"].as_array().unwrap();
    for what in ["host devices", "cuda driver", "cuda:1"] {
        assert!(checks.iter().any(|check| check["what"] == what && check["found"] == true), "{health}");
    }
}

/// What `topo` and `doctor` say of a machine whose links nobody knows, and the doctor's word for it.
fn degraded(machine: &Machine, word: &str) {
    let shown = text(&machine.run("topo --backend cuda").stdout);
    let note = shown.lines().find(|line| line.starts_with("note: ")).unwrap_or_default();
    assert!(note.contains(word), "{word:?}: {shown}");
    let notes = machine.succeeds("topo --backend cuda --json")[0]["notes"].to_string();
    assert!(notes.contains(word), "{word:?}: {notes}");
    let report = &machine.succeeds("doctor --backend cuda --json")[0];
    let checks = report["checks"].as_array().unwrap();
    let nvml = checks.iter().find(|check| check["what"] == "nvml").unwrap();
    assert_eq!((&nvml["found"], &nvml["required"]), (&false.into(), &false.into()), "{nvml}");
    assert!(nvml["detail"].as_str().unwrap().contains(word), "{word:?}: {nvml}");
    assert_eq!(report["healthy"], true, "copies find their way without: {report}");
}

#[test]
fn why_links_are_unknown_is_told() {
    degraded(&Machine::without_nvml(), "NVML is not here");
    degraded(&Machine::new().with("nvml", "18"), "restart the machine");
    degraded(&Machine::without_nvml().with_library(NVML, &["nvmlInit_v2"]), "does not start");
    degraded(&Machine::without_nvml().with_library(NVML, &["nvmlDeviceGetCount_v2"]), "does not list");
    degraded(&Machine::new().with("mig", "1"), "MIG");
}

#[test]
fn what_is_known_of_links_is_told_too() {
    let machine = Machine::new();
    let shown = text(&machine.run("topo --backend cuda").stdout);
    assert!(shown.contains("18 of 18 NVLinks are active"), "{shown}");
    let report = &machine.succeeds("doctor --backend cuda --json")[0];
    let mut checks = report["checks"].as_array().unwrap().iter();
    assert!(checks.any(|check| check["what"] == "nvml" && check["found"] == true), "{report}");
    // An older library that knows less of the links' speed.
    let older = Machine::without_nvml().with_library(NVML, &["nvmlDeviceGetFieldValues"]);
    let notes = older.succeeds("topo --backend cuda --json")[0]["notes"].to_string();
    assert!(notes.contains("NVLinks are active") && !notes.contains("GB/s"), "{notes}");
}

#[test]
fn the_doctor_finds_gpus_that_work_and_keep_residents() {
    let machine = Machine::new();
    let report = &machine.succeeds("doctor --backend cuda --json")[0];
    assert_eq!(report["healthy"], true, "{report}");
    let checks = report["checks"].as_array().unwrap();
    for what in ["cuda driver", "cuda:0", "cuda:1", "cuda:0 residents", "cuda:1 residents", "cuda:0 peers"] {
        let check = checks.iter().find(|check| check["what"] == what).unwrap_or(&Value::Null);
        assert_eq!(check["found"], true, "{what}: {report}");
    }
}
