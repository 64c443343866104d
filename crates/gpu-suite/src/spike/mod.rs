//! Proves the seam on real NVIDIA GPUs: checks bytes, then times it beside raw calls of the driver.
//!
//! The part `compile` needs no GPU; `checks`, `timings`, `resident`, `fault` and `fault-apart` do. Results are
//! lines of JSON on the standard output.

pub(crate) mod alloc;
mod checks;
mod kernels;
mod raw;
mod resident;
mod rig;
mod timings;

use std::{process::ExitCode, thread, time::Duration};

use anyhow::{Result, bail};
use serde_json::json;
use warpweft_core_types::Backend;
use warpweft_cuda::Compiler;

use self::rig::{Rig, report, say};

/// A part that hangs must not hold a machine.
const LONGEST: Duration = Duration::from_secs(150);

/// Runs one part.
pub(crate) fn main(part: &str) -> ExitCode {
    thread::spawn(|| {
        thread::sleep(LONGEST);
        say("the spike hangs");
        std::process::exit(3);
    });
    match run(part) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            say(&format!("{failed} checks failed"));
            ExitCode::FAILURE
        }
        Err(error) => {
            report(&json!({"part": part, "error": format!("{error:#}")}));
            say(&format!("{part}: {error:?}"));
            ExitCode::FAILURE
        }
    }
}

fn run(part: &str) -> Result<usize> {
    match part {
        "compile" => return compile(),
        "fault-apart" => return checks::fault_apart(),
        _ => {}
    }
    let rig = Rig::open()?;
    describe(&rig)?;
    match part {
        "checks" => Ok(checks::run(&rig)),
        "timings" => timings::run(&rig).map(|()| 0),
        "resident" => resident::run(&rig),
        "fault" => Ok(checks::fault(&rig)),
        _ => bail!("say compile, checks, timings, resident, fault or fault-apart"),
    }
}

/// Compiles every kernel for Hopper.
fn compile() -> Result<usize> {
    let compiler = Compiler::find();
    for source in [kernels::SOURCE, &kernels::second(1)] {
        let cubin = compiler.compile(source, (9, 0))?;
        report(&json!({"compiled": cubin.len()}));
    }
    Ok(0)
}

fn describe(rig: &Rig) -> Result<()> {
    report(&json!({"cuda": format!("{:?}", rig.backend.driver_version())}));
    for info in rig.backend.devices()? {
        report(&json!({"device": info}));
    }
    for bench in &rig.devices {
        let links = bench.device.links().map(|links| links.facts());
        report(&json!({"links": links, "memory": bench.device.memory()?, "limits": bench.device.limits()}));
    }
    Ok(())
}
