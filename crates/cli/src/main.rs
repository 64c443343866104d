//! The `warpweft` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    warpweft_cli::run()
}
