//! The `warpweft` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    warpweft_cli::run()
}
