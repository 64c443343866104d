//! The command on CUDA devices, with a driver that is made of host threads where the loader finds the real one.

use std::{
    os::unix::fs::symlink,
    process::{Command, Output},
};

use serde_json::Value;
use tempfile::TempDir;
use warpweft_stand_in_cuda::StandIn;

use crate::{lines, text};

/// A machine with two GPUs, to the command.
struct Machine {
    folder: TempDir,
    _library: TempDir,
}

impl Machine {
    fn new() -> Self {
        let (library, path) = StandIn::without(&[]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            symlink(&path, folder.path().join(name)).unwrap();
        }
        Self { folder, _library: library }
    }

    /// Runs the command with nothing of this machine's environment: no CUDA toolkit is found by chance, and no
    /// machine code is kept for a real driver.
    fn run(&self, args: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_warpweft"))
            .args(args.split(' '))
            .env_clear()
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("HOME", self.folder.path())
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
