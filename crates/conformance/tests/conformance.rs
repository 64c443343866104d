//! Runs the suite on every device that is present: `cargo test -p warpweft-conformance --test conformance`.

#![expect(clippy::print_stderr, reason = "a program reports a usage error")]

use std::process::ExitCode;

fn main() -> ExitCode {
    warpweft_conformance::main().unwrap_or_else(|message| {
        eprintln!("error: {message}");
        ExitCode::from(2)
    })
}
