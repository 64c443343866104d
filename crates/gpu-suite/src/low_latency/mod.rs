//! The engine for few bytes: among ranks of one GPU, which no communicator has, and between GPUs.

mod across;
pub(crate) mod bench;
mod loopback;
mod within;

use anyhow::{Result, ensure};

use crate::{
    checks::{self, Check},
    kernels,
    rig::Rig,
};

const CHECKS: &[Check<Rig>] = &[
    ("every reduction of every type is right among ranks of one GPU", loopback::reductions),
    ("every movement is right among ranks of one GPU, whatever the places", loopback::movements),
    ("messages of many bytes arrive in rounds", loopback::many_bytes),
    ("a rank that never comes is waited for as long as said", loopback::missing_rank),
    ("an end reaches launches that wait", loopback::ended),
    ("whoever goes leaves nothing behind that waits", loopback::dropped),
    ("2,000 calls between GPUs give what was given, each time", across::litmus),
    ("residents run while sums go on", across::beside_residents),
    ("code is loaded and graphs are prepared and replayed while sums go on", across::beside_others),
];

/// Runs the checks with these words in their names.
pub(crate) fn run(words: &str) -> Result<()> {
    let wanted: Vec<_> = CHECKS.iter().filter(|(name, _)| name.contains(words)).copied().collect();
    ensure!(!wanted.is_empty(), "no check has {words:?} in its name");
    // Kernels that a stand-in for a driver has too.
    checks::all(&Rig::with(&kernels::graph())?, &wanted)
}
