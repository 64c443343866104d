//! `check` and `docs`: everything that judges the text of the workspace without running it.

use anyhow::Result;

use crate::cmd::Cmd;
use crate::codegen;
use crate::report::Report;
use crate::tidy;
use crate::tools::{DENY, TYPOS, Tool};
use crate::workspace::Workspace;

/// The verb `check` alone.
pub(crate) fn run(workspace: &Workspace, require_tools: bool) -> Result<()> {
    let mut report = Report::default();
    check(workspace, &mut report, require_tools);
    report.finish()
}

/// Runs the checks; a tool that is not there is a failure if `require_tools`, and is named otherwise.
pub(crate) fn check(workspace: &Workspace, report: &mut Report, require_tools: bool) {
    report.step("fmt", |_| Cmd::new("cargo fmt --all --check").run());
    report.step("tidy", |_| tidy::run(workspace));
    let clippy = Cmd::new("cargo clippy --workspace --all-targets --locked -- -D warnings");
    report.step("clippy", |_| clippy.run());
    codegen::check(workspace, report, require_tools);

    let mut with = |tool: &Tool, step: &str, args: &str| match tool.find(workspace) {
        Some(program) => {
            let command = Cmd::program(&program).args(args.split_whitespace());
            report.step(step, |_| command.run());
        }
        None => {
            let why = format!("{} is not installed: cargo xtask setup", tool.program);
            report.absent(step, &why, require_tools);
        }
    };
    with(&TYPOS, "typos", "");
    with(&DENY, "deny", "check bans licenses sources");
    // Advisories come from the network, so they are looked up only where tools are required.
    if require_tools {
        with(&DENY, "advisories", "check advisories");
    } else {
        let why = "they need the network: cargo xtask check --require-tools";
        report.absent("advisories", why, false);
    }
}

pub(crate) fn docs(report: &mut Report) {
    report.step("docs", |_| {
        Cmd::new("cargo doc --workspace --no-deps --locked").variable("RUSTDOCFLAGS", "-D warnings").run()
    });
}
