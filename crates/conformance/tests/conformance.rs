//! Runs the suite on every device that is present: `cargo test -p warpweft-conformance --test conformance`.

use std::process::ExitCode;

fn main() -> ExitCode {
    warpweft_conformance::main()
}
