//! What of the suite needs no GPU, on a driver made of host threads: that it works, not what it measures.
#![cfg(target_os = "linux")]

use std::{
    fs,
    os::unix::fs::symlink,
    process::{Command, Output},
};

use anyhow::Result;
use serde_json::Value;
use tempfile::TempDir;
use warpweft_stand_in_cuda::StandIn;

/// Runs the suite where the loader finds the stand-in, which has two GPUs; the folder that it may write to.
fn run(args: &str) -> Result<(Output, TempDir)> {
    run_words(&args.split(' ').collect::<Vec<_>>())
}

fn run_words(args: &[&str]) -> Result<(Output, TempDir)> {
    let (_library, path) = StandIn::without(&[])?;
    let folder = tempfile::tempdir()?;
    // The backend's name for it, and the one that cudarc looks for first.
    for name in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"] {
        symlink(&path, folder.path().join(name))?;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-suite"));
    command.args(args).env_clear().env("LD_LIBRARY_PATH", folder.path());
    // Actors of the stand-in are a library of the CPU's, which takes a C++ compiler.
    command.env("library", warpweft_conformance::actors_library().map_err(anyhow::Error::msg)?);
    let output = command.env("HOME", folder.path()).env("OUT", folder.path()).output()?;
    Ok((output, folder))
}

fn lines(output: &Output) -> Vec<Value> {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[test]
fn the_checks_of_graphs_pass() {
    let (output, _folder) = run("graphs").unwrap();
    let checks: Vec<Value> = lines(&output).into_iter().filter(|line| line["check"].is_string()).collect();
    assert_eq!(checks.len(), 5);
    assert!(checks.iter().all(|check| check["ok"] == true), "{checks:?}");
}

#[test]
fn the_checks_of_actors_pass() {
    let (output, _folder) = run("k2k").unwrap();
    let checks: Vec<Value> = lines(&output).into_iter().filter(|line| line["check"].is_string()).collect();
    assert_eq!(checks.len(), 10);
    // Without a compiler of CUDA C nothing is made of sources.
    let is_fine =
        |check: &&Value| check["ok"] == true || check["check"].as_str().unwrap_or("").contains("sources");
    assert!(checks.iter().all(|check| is_fine(&check)), "{checks:?}");
}

#[test]
fn the_figures_of_messages_are_all_there() {
    let (output, _folder) = run("bench k2k").unwrap();
    let figures: Vec<Value> = lines(&output).into_iter().filter(|line| line["bench"] == "k2k").collect();
    let count = |what: &str| figures.iter().filter(|figure| figure["what"] == what).count();
    assert_eq!([count("half round trip"), count("host asks"), count("rate")], [3, 2, 4], "{figures:?}");
    assert!(figures.iter().all(|figure| figure["lost"].as_u64().unwrap_or(0) == 0), "{figures:?}");
}

#[test]
fn a_runtime_goes_on_without_its_device() {
    let (output, _folder) = run("child graph-trap").unwrap();
    let lines = lines(&output);
    let told = lines.iter().find_map(|line| line["a graph's trap"].as_str()).unwrap_or_default();
    assert!(told.contains("trap"), "{lines:?}");
}

#[test]
fn the_figures_of_graphs_are_all_there() {
    let (output, folder) = run("bench graph --quick").unwrap();
    let lines = lines(&output);
    let bars: Vec<String> =
        lines.iter().filter_map(|line| Some(line["bar"]["what"].as_str()?.to_owned())).collect();
    for part in ["record", "replay", "submit", "allocations", "one by one", "overlap", "an edge between GPUs"]
    {
        assert!(bars.iter().any(|bar| bar.starts_with(part)), "{part}: {bars:?}");
    }
    let trace = fs::read_to_string(folder.path().join("graph-overlap.json")).unwrap();
    let trace: Value = serde_json::from_str(&trace).unwrap();
    assert!(trace["traceEvents"].as_array().is_some_and(|events| events.len() > 9), "{trace}");
}

#[test]
fn the_checks_of_calls_of_few_bytes_pass() {
    for words in ["movement", "never comes", "launches that wait", "leaves nothing behind", "code is loaded"]
    {
        let (output, _folder) = run_words(&["low-latency", words]).unwrap();
        let checks: Vec<Value> =
            lines(&output).into_iter().filter(|line| line["check"].is_string()).collect();
        assert_eq!(checks.len(), 1, "{words}");
        assert!(checks.iter().all(|check| check["ok"] == true), "{checks:?}");
    }
}
