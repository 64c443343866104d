//! What the conformance suite cannot ask of every backend: shaders that are wrong or hostile, what Vulkan allows of
//! bindings, drivers that fail, the validation layer, and machines that lack something.
//!
//! A test that cannot run here says which need is missing.

mod bindings;
mod faults;
mod hazards;
mod interposed;
mod lifetimes;
mod memory;
mod mixed;
mod opening;
mod residents;
mod shaders;
mod support;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};

use crate::support::{Need, Test, wait_for_the_end};

fn main() -> ExitCode {
    if let Some(code) = opening::answer() {
        return code;
    }
    let tests = [
        bindings::TESTS,
        faults::TESTS,
        hazards::TESTS,
        lifetimes::TESTS,
        memory::TESTS,
        mixed::TESTS,
        opening::TESTS,
        residents::TESTS,
        shaders::TESTS,
    ]
    .concat();
    let trials = tests.into_iter().map(trial).collect();
    let conclusion = libtest_mimic::run(&Arguments::from_args(), trials);
    assert!(wait_for_the_end(), "a device that nobody uses is still there");
    conclusion.exit_code()
}

fn trial(test: Test) -> Trial {
    Trial::ignorable_test(test.name, move || match (test.body)() {
        Ok(()) => Ok(Completion::Completed),
        Err(Need::Missing(what)) => Ok(Completion::ignored_with(format!("skipped: {what}"))),
        Err(Need::Failed(failed)) => Err(failed),
    })
}
