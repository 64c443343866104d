//! Calls of every command but `topo`.

use std::process::{Command, Output};

use serde_json::Value;

use crate::{lines, text, warpweft};

const SMALL: [&str; 3] = ["demo", "--size", "64K"];

fn demo(args: &[&str]) -> Output {
    warpweft(&[&SMALL, args].concat())
}

#[test]
fn the_demo_counts_what_it_checked() {
    let output = demo(&["--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let summary = &lines(&output)[0];
    for (key, value) in [
        ("devices", 4),
        ("kernels", 4),
        ("pairs", 12),
        ("ranks", 4),
        ("verified_bytes", 25 << 16),
        ("wrong_bytes", 0),
    ] {
        assert_eq!(summary[key], value, "{key}");
    }
    assert_eq!(summary["ok"], true);
    assert_eq!(summary["routes"]["direct"], 12);
    // Four patterns, four copies to the next, four additions, four copies to the host, and the host's sum.
    assert_eq!((&summary["graph"]["nodes"], summary["graph"]["edges"].as_u64()), (&17.into(), Some(20)));
}

#[test]
fn the_demo_runs_over_every_kind_of_links() {
    for (links, kind, pairs) in
        [("all", "direct", 12), ("chain", "relayed", 6), ("ring", "relayed", 4), ("none", "shared", 12)]
    {
        let output = demo(&["--links", links, "--json"]);
        assert_eq!(lines(&output)[0]["routes"][kind], pairs, "{links}: {}", text(&output.stdout));
    }
}

#[test]
fn one_device_has_nobody_to_copy_to() {
    let output = demo(&["--devices", "1"]);
    assert!(text(&output.stdout).contains("1 device, 1 kernel, 0 pairs"), "{}", text(&output.stdout));
}

#[test]
fn every_fault_makes_the_demo_fail_with_a_reason() {
    for (fault, word) in [
        ("corrupt", "wrong"),
        ("copy", "copy failed"),
        ("launch", "launch failed"),
        ("silence", "timed out"),
        ("death", "is lost"),
    ] {
        let output = demo(&["--fault", fault, "--timeout", "0.3"]);
        assert_eq!(output.status.code(), Some(1), "{fault}");
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(said.contains(word), "{fault}: {said}");
        assert!(!said.contains("panicked"), "{fault}: {said}");
    }
    let early = demo(&["--fault", "launch", "--json"]);
    assert_eq!((early.status.code(), &lines(&early)[0]["ok"]), (Some(1), &Value::Bool(false)));
    assert!(lines(&early)[0]["error"].as_str().unwrap().contains("launch failed"));
    let corrupt = demo(&["--fault", "corrupt", "--json"]);
    assert_eq!(lines(&corrupt)[0]["ok"], false);
    assert!(lines(&corrupt)[0]["wrong_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn the_demo_saves_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let output = demo(&["--trace", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let trace: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let names: Vec<&str> =
        trace["traceEvents"].as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"pattern") && names.contains(&"copy"), "{names:?}");
    let nowhere = demo(&["--trace", "/no/such/folder/trace.json"]);
    assert_eq!(nowhere.status.code(), Some(1));
}

#[test]
fn the_demo_saves_its_graph() {
    let folder = tempfile::tempdir().unwrap();
    let pictures = folder.path().join("new/pictures");
    let output = demo(&["--save-graph", pictures.to_str().unwrap(), "--devices", "3"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("graph.svg"), "{}", text(&output.stdout));
    let read = |name: &str| std::fs::read_to_string(pictures.join(name)).unwrap();
    for name in ["hand to 2", "gather 0", "add up", "pattern"] {
        assert!(read("graph.svg").contains(name) && read("graph.dot").contains(name), "{name}");
    }
    let trace: Value = serde_json::from_str(&read("graph.json")).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let ran = |name: &str| events.iter().filter(|event| event["ph"] == "X" && event["name"] == name).count();
    assert_eq!((ran("pattern"), ran("hand to 2"), ran("add up")), (3, 1, 1), "{trace}");
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert_eq!(demo(&["--save-graph", file.to_str().unwrap()]).status.code(), Some(1));
}

#[test]
fn perf_copy_prints_a_row_for_each_pair_and_size() {
    let args = ["perf", "copy", "-b", "4K", "-e", "64K", "-f", "4", "-n", "3", "-w", "1", "--devices", "2"];
    let output = warpweft(&[&args[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows = lines(&output);
    assert_eq!(rows.len(), 4 * 3);
    for row in &rows {
        assert_eq!((row["wrong"].as_u64(), row["copy"]["rounds"].as_u64()), (Some(0), Some(3)), "{row}");
        assert!(row["algbw"].as_f64().unwrap() > 0.0 && row["raw"]["p50_ns"].as_u64().unwrap() > 0, "{row}");
        assert_eq!(row["raw_call"], "memcpy", "{row}");
    }
    let both = lines(&warpweft(&[&args[..], &["--both", "--json"]].concat()));
    assert_eq!(both.len(), 3, "one pair of two devices");
    assert!(both.iter().all(|row| row["bar"].is_null() && row["queued"] == 1), "{both:?}");
    let queued = lines(&warpweft(&[&args[..], &["--queued", "4", "--both", "--json"]].concat()));
    assert!(queued.iter().all(|row| row["wrong"] == 0 && row["queued"] == 4), "{queued:?}");
    let table = text(&warpweft(&args).stdout);
    assert!(table.contains("algbw") && table.contains("# Wrong bytes: 0 OK"), "{table}");
}

#[test]
fn perf_launch_prints_a_row_for_each_device() {
    let rows = lines(&warpweft(&["perf", "launch", "-n", "50", "-w", "5", "--devices", "3", "--json"]));
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| row["launch_and_wait"]["p50_ns"].as_u64().unwrap() > 0));
    assert!(rows.iter().all(|row| row["ratio"].is_null()), "host devices have no driver to compare with");
}

#[test]
fn the_doctor_finds_what_is_there_and_says_what_is_not() {
    let healthy = warpweft(&["doctor", "--json"]);
    assert_eq!(healthy.status.code(), Some(0));
    assert_eq!(lines(&healthy)[0]["healthy"], true);
    let lacking = warpweft(&["doctor", "--backend", "abacus"]);
    assert_eq!(lacking.status.code(), Some(1));
    assert!(text(&lacking.stdout).contains("abacus"));
}

/// Without a driver, or with one that is told to show no device: the same on every machine.
fn without_gpus(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_warpweft"))
        .args(args)
        .env("CUDA_VISIBLE_DEVICES", "-1")
        .output()
        .unwrap()
}

#[test]
fn a_machine_without_gpus_is_told_what_is_missing() {
    let doctor = without_gpus(&["doctor", "--backend", "cuda", "--json"]);
    let report = &lines(&doctor)[0];
    assert!(report["backends"].as_array().unwrap().contains(&"cuda".into()), "{report}");
    assert_eq!((doctor.status.code(), &report["healthy"]), (Some(1), &Value::Bool(false)), "{report}");
    let checks = report["checks"].as_array().unwrap();
    let missing: Vec<_> = checks.iter().filter(|check| check["found"] == false).collect();
    assert_eq!(missing.len(), 1, "one message: {report}");
    assert!(missing[0]["detail"].as_str().unwrap().contains("NVIDIA"), "{report}");
    let shown = text(&without_gpus(&["doctor", "--backend", "cuda"]).stdout);
    assert_eq!(shown.lines().filter(|line| line.starts_with("missing")).count(), 1, "{shown}");
}

#[test]
fn commands_on_gpus_that_are_not_there_end_with_code_1_and_one_message() {
    for command in ["demo", "topo", "perf copy", "perf launch", "perf graph"] {
        for backends in ["cuda", "host,cuda"] {
            let words: Vec<&str> = command.split(' ').chain(["--backend", backends]).collect();
            let output = without_gpus(&words);
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{command}: {said}");
            assert!(said.contains("cuda") && said.contains("NVIDIA"), "{command}: {said}");
            assert_eq!(said.trim().lines().count(), 1, "{command}: {said}");
        }
    }
}

/// A file that is no library, where the loader of libraries finds it first.
#[cfg(all(target_os = "linux", feature = "vulkan"))]
#[test]
fn a_machine_without_a_vulkan_loader_gets_code_1_and_one_message() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libvulkan.so.1"), "no library").unwrap();
    let without_loader = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_warpweft"));
        command.args(args).env("LD_LIBRARY_PATH", folder.path()).output().unwrap()
    };
    for command in ["demo", "topo", "perf copy", "perf launch"] {
        for backends in ["vulkan", "host,vulkan"] {
            let words: Vec<&str> = command.split(' ').chain(["--backend", backends]).collect();
            let output = without_loader(&words);
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{command}: {said}");
            assert!(said.contains("Vulkan loader") && said.contains("libvulkan1"), "{command}: {said}");
            assert_eq!(said.trim().lines().count(), 1, "{command}: {said}");
        }
    }
    let doctor = text(&without_loader(&["doctor", "--backend", "vulkan"]).stdout);
    assert_eq!(doctor.lines().filter(|line| line.starts_with("missing")).count(), 1, "{doctor}");
}

#[test]
fn a_demo_that_cannot_begin_says_why_as_json_if_asked() {
    let output = without_gpus(&["demo", "--backend", "host,cuda", "--json"]);
    let summary = &lines(&output)[0];
    assert_eq!((output.status.code(), &summary["ok"]), (Some(1), &Value::Bool(false)), "{summary}");
    assert!(summary["error"].as_str().unwrap().contains("NVIDIA"), "{summary}");
    assert!(text(&output.stderr).is_empty(), "{}", text(&output.stderr));
}

#[test]
fn wrong_calls_end_with_code_2_and_name_the_argument() {
    for (args, named) in [
        (&["demo", "--backend", "abacus"][..], "abacus"),
        (&["demo", "--backend", "host,host"], "twice"),
        (&["demo", "--backend", "abacus", "--json"], "abacus"),
        (&["demo", "--size", "much"], "much"),
        (&["demo", "--devices", "0"], "0"),
        (&["demo", "--timeout", "-1"], "-1"),
        (&["perf", "copy", "-b", "2M", "-e", "1M"], "above"),
        (&["perf", "copy", "--queued", "0"], "0"),
        (&["perf", "copy", "-e", "1T"], "smaller -e"),
        (&["perf", "launch", "--copies", "2"], "--backend vulkan"),
        (&["perf", "copy", "--bar", "97%"], "97%"),
        (&["perf"], "perf"),
        (&[], "Usage"),
    ] {
        let output = warpweft(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains(named), "{args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn help_has_examples_and_no_colour_when_it_is_not_a_terminal() {
    for args in [
        &["--help"][..],
        &["demo", "--help"],
        &["perf", "copy", "--help"],
        &["perf", "launch", "--help"],
        &["topo", "--help"],
        &["doctor", "--help"],
    ] {
        let help = text(&warpweft(args).stdout);
        assert!(help.contains("Example"), "{args:?}: {help}");
        assert!(!help.contains('\u{1b}'), "{args:?}");
    }
    assert!(!text(&demo(&[]).stdout).contains('\u{1b}'));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_told() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_warpweft")).arg("doctor").stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("standard output takes no more"), "{}", text(&output.stderr));
}

#[cfg(target_os = "linux")]
#[test]
fn a_file_that_never_ends_is_no_cache_and_a_full_disk_is_no_trace() {
    let measure = ["topo", "--backend", "host", "--devices", "2", "--measure", "--size", "64K"];
    let output = without_gpus(&[&measure[..], &["--cache", "/dev/zero"]].concat());
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("is no cache of measurements"), "{said}");
    let output = without_gpus(&["demo", "--devices", "2", "--size", "64K", "--trace", "/dev/full"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the trace cannot be written"), "{said}");
}
