//! What becomes of devices and processes when something goes wrong for good. Each happens in a process of its own;
//! this one, and another that works meanwhile, must not notice.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{
    process::{end_within, output_within, this_program, words},
    rig::{Bench, Rig, report},
};

/// A process opens every device, does its work and ends.
const LIMIT: Duration = Duration::from_secs(60);

/// How long a process may take to end whose kernel runs for eight seconds.
const ENDING: Duration = Duration::from_secs(10);

pub(super) fn trap(rig: &Rig) -> Result<()> {
    beside_a_neighbour(rig, "trap")
}

pub(super) fn stray_store(rig: &Rig) -> Result<()> {
    beside_a_neighbour(rig, "stray-store")
}

pub(super) fn graph_trap(rig: &Rig) -> Result<()> {
    beside_a_neighbour(rig, "graph-trap")
}

pub(super) fn out_of_memory(rig: &Rig) -> Result<()> {
    beside_a_neighbour(rig, "out-of-memory")
}

pub(super) fn fork(rig: &Rig) -> Result<()> {
    beside_a_neighbour(rig, "fork")
}

/// Lets a process play the role, while another one works.
fn beside_a_neighbour(rig: &Rig, role: &str) -> Result<()> {
    let neighbour = Neighbour::start()?;
    let output = output_within(&mut this_program(&["child", role]), LIMIT)?;
    relay(&output.stdout);
    ensure!(output.status.success(), "it: {}", words(&output));
    neighbour.finish()?;
    works(rig.first())
}

/// Passes on what a process reported.
fn relay(stdout: &[u8]) {
    let lines = stdout.split(|&byte| byte == b'\n');
    lines.filter_map(|line| serde_json::from_slice::<Value>(line).ok()).for_each(|line| report(&line));
}

/// The devices of this process go on.
fn works(bench: &Bench) -> Result<()> {
    let view = bench.uploaded(&[0x42; 4096]).context("this process")?;
    ensure!(bench.read(&view)? == [0x42; 4096], "this process reads something else");
    Ok(())
}

/// The process waits in vain, drops everything and ends.
pub(super) fn long_kernel(rig: &Rig) -> Result<()> {
    let mut child = this_program(&["child", "long-kernel"]).spawn()?;
    let mut told = String::new();
    // It says so when its wait has ended, or ends.
    BufReader::new(child.stdout.take().context("its output")?).read_line(&mut told)?;
    let ended = end_within(&mut child, ENDING)?;
    let mut said = String::new();
    child.stderr.take().context("its words")?.read_to_string(&mut said)?;
    relay(told.as_bytes());
    let status = ended.with_context(|| format!("it did not end within {ENDING:?}"))?;
    ensure!(status.success() && !told.is_empty(), "it: {}", said.trim());
    works(rig.first())
}

/// Another process, at work on the device.
struct Neighbour(Child);

impl Neighbour {
    fn start() -> Result<Self> {
        let mut child = this_program(&["child", "busy"]).stdin(Stdio::piped()).spawn()?;
        let mut ready = [0; 1];
        let stdout = child.stdout.as_mut().context("its output")?;
        stdout.read_exact(&mut ready).context("the neighbour did not begin")?;
        Ok(Self(child))
    }

    /// It ends when it has read something, and says whether all its work was right.
    fn finish(mut self) -> Result<()> {
        if let Some(mut stdin) = self.0.stdin.take() {
            stdin.write_all(b"enough")?;
        }
        let ended = end_within(&mut self.0, LIMIT)?;
        let mut said = String::new();
        self.0.stderr.take().context("its words")?.read_to_string(&mut said)?;
        ensure!(ended.is_some_and(|status| status.success()), "the neighbour: {}", said.trim());
        Ok(())
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // One that was not told to finish is of no use to anybody; one that has ended is not there.
        let _gone = self.0.kill();
        let _ended = self.0.wait();
    }
}
