//! The command as a user or a program calls it.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

mod calls;
mod collectives;
mod graph;
#[cfg(unix)]
mod launch;
#[cfg(all(target_os = "linux", feature = "cuda"))]
mod stand_in;
mod topo;

use std::process::{Command, Output};

use serde_json::Value;

fn warpweft(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_warpweft")).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn lines(output: &Output) -> Vec<Value> {
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
