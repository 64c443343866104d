//! What only CUDA devices do, and what the conformance suite therefore does not ask: foreign code that is
//! wrong, streams, memory and contexts of other libraries, `CUDA_VISIBLE_DEVICES`, several processes, faults.

mod code;
mod faults;
mod graphs;
mod interop;
mod links;
mod processes;
mod residents;
mod time;
mod vulkan;

use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::json;

use crate::{
    kernels,
    rig::{NotRun, Rig, report, say},
};

/// A name, and what is checked with something to work with.
pub(crate) type Check<T> = (&'static str, fn(&T) -> Result<()>);

const CHECKS: &[Check<Rig>] = &[
    ("code that does not fit is refused", code::refused),
    ("CUDA C is compiled, and what is wrong with it is told", code::compiled),
    ("machine code of the driver's own is loaded and runs", code::machine_code),
    ("a kernel that is bounded has small workgroups", code::bounded),
    ("a kernel that needs many registers has small workgroups", code::many_registers),
    ("the thread's context stays what it was", interop::current_context),
    ("submit does not wait for a full stream", time::long_stream),
    ("a wait on a kernel that takes long ends by its deadline", time::long_kernel),
    ("1,000 rounds by turns with another library, on its stream", interop::by_turns),
    ("1,000 rounds by turns with another library, on the default stream", interop::by_turns_by_default),
    ("1,000 rounds by turns with cudarc, on its stream and tensor", interop::by_turns_with_cudarc),
    ("work of another library as a node of a graph", interop::captured),
    ("a context of another library is a device of its own", interop::other_context),
    ("what is no stream or memory of the device is refused", interop::refused_imports),
    ("a copy to another device and back in a graph", links::peer_copies_in_a_graph),
    ("what NVML calls NVLink is known as such", links::nvlinks),
    ("memory is shared with another process", processes::shared),
    ("CUDA_VISIBLE_DEVICES hides and orders, and changes nothing else", processes::masked),
    ("surroundings that would hang residents are named", processes::hostile_surroundings),
    ("a resident that cannot begin is stopped", residents::not_resident),
    ("a resident that is done ends by itself", residents::finished),
    ("the clock's error is known", time::clock),
    ("one allocation, two APIs", vulkan::one_allocation),
];

/// Each of these happens in a process of its own, to which the devices may be lost.
const FAULTS: &[Check<Rig>] = &[
    ("a trap loses the devices of its process and no others", faults::trap),
    ("a store to no memory loses the devices of its process and no others", faults::stray_store),
    ("a runtime whose device is lost poisons its memory, and all else goes on", faults::graph_trap),
    ("a process ends while its kernel goes on", faults::long_kernel),
    ("device memory that is out is back once it is freed", faults::out_of_memory),
    ("a forked process is told so", faults::fork),
];

/// Of graphs, with kernels that the stand-in for a driver has too.
const GRAPHS: &[Check<Rig>] = &[
    ("a hand-off is in order before and behind, also if it panics", graphs::hand_off),
    ("a hand-off is behind a task of the host too", graphs::behind_a_task),
    ("work of another library between two nodes, while others synchronise and allocate", graphs::captured),
    ("1,000 exchanges of operands, each valid until its launches end", graphs::exchanged),
    ("operands that change the order, or the kind of memory, have a graph prepared again", graphs::reordered),
];

/// What a check came to.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed(String),
    NotRun(String),
}

impl Outcome {
    fn of(result: &Result<()>) -> Self {
        match result {
            Ok(()) => Self::Passed,
            Err(error) => match error.downcast_ref() {
                Some(NotRun(reason)) => Self::NotRun(reason.clone()),
                None => Self::Failed(format!("{error:#}")),
            },
        }
    }

    /// What happened, and in words why; `None` for a check that was not run.
    fn parts(&self) -> (Option<bool>, Option<&str>) {
        match self {
            Self::Passed => (Some(true), None),
            Self::Failed(error) => (Some(false), Some(error)),
            Self::NotRun(reason) => (None, Some(reason)),
        }
    }
}

pub(crate) fn run(rig: &Rig) -> Result<()> {
    all(rig, CHECKS)
}

pub(crate) fn fault(rig: &Rig) -> Result<()> {
    all(rig, FAULTS)
}

pub(crate) fn graphs() -> Result<()> {
    all(&Rig::with(&kernels::graph())?, GRAPHS)
}

pub(crate) fn all<T>(rig: &T, checks: &[Check<T>]) -> Result<()> {
    let failed = checks.iter().filter(|check| matches!(outcome(rig, check), Outcome::Failed(_))).count();
    ensure!(failed == 0, "{failed} checks failed");
    Ok(())
}

fn outcome<T>(rig: &T, (name, check): &Check<T>) -> Outcome {
    let start = Instant::now();
    let outcome = Outcome::of(&check(rig));
    let ms = start.elapsed().as_secs_f64() * 1e3;
    let (ok, why) = outcome.parts();
    report(&json!({"check": name, "ok": ok, "ms": ms, "why": why}));
    let said = match &outcome {
        Outcome::Passed => "ok".to_owned(),
        Outcome::Failed(error) => format!("FAILED: {error}"),
        Outcome::NotRun(reason) => format!("not run: {reason}"),
    };
    say(&format!("{ms:>9.2} ms  {name}: {said}"));
    outcome
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;

    #[test]
    fn names_tell_checks_apart() {
        let names: std::collections::BTreeSet<_> =
            CHECKS.iter().chain(FAULTS).chain(GRAPHS).map(|(name, _)| name).collect();
        assert_eq!(names.len(), CHECKS.len() + FAULTS.len() + GRAPHS.len());
    }

    #[test]
    fn what_a_machine_lacks_is_no_failure() {
        assert_eq!(Outcome::of(&Ok(())), Outcome::Passed);
        let failed = Err(anyhow!("a word")).context("a check");
        assert_eq!(Outcome::of(&failed), Outcome::Failed("a check: a word".into()));
        let lacking = Err(NotRun("no second device".into()).into());
        assert_eq!(Outcome::of(&lacking).parts(), (None, Some("no second device")));
    }
}
