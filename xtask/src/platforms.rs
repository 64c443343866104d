//! `platforms`: what programs depend on compiles for systems other than this one.

use anyhow::Result;

use crate::{cmd::Cmd, report::Report};

/// An operating system without Unix's interfaces, and the other processor that GPUs are sold beside.
const TARGETS: [&str; 2] = ["x86_64-pc-windows-gnu", "aarch64-unknown-linux-gnu"];

pub(crate) fn run(required: bool) -> Result<()> {
    let mut report = Report::default();
    let installed = Cmd::new("rustup target list --installed").output().unwrap_or_default();
    for target in TARGETS {
        if !installed.lines().any(|line| line == target) {
            report.absent(target, &format!("rustup target add {target}"), required);
            continue;
        }
        let check = Cmd::new("cargo check --locked --package warpweft --package warpweft-cli --all-features");
        let check = check.args(["--target", target]).variable("RUSTFLAGS", "-D warnings");
        report.step(target, |_| check.run());
    }
    report.finish()
}
