//! What our calls cost beside the driver's own, in rounds that alternate. Results are lines of JSON on the
//! standard output; what people read goes to the standard error.

pub(crate) mod alloc;
mod beside;
pub(crate) mod discovery;
pub(crate) mod graph;
mod pairs;
pub(crate) mod raw;
mod resident;
pub(crate) mod round_trip;
pub(crate) mod samples;
mod submission;
mod vulkan;

use anyhow::Result;
use clap::ValueEnum;

use crate::{collectives, k2k, low_latency, nccl, rig::Rig};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Submitting and waiting, semaphores, allocations, copies by a queue.
    Submission,
    /// Residents: gaps between slices, park and resume, cold calls beside them.
    Resident,
    /// A record from the host to a resident and the answer back.
    RoundTrip,
    /// Finding devices and their links.
    Discovery,
    /// What a call of `nccl-rs` costs the host.
    Nccl,
    /// What collectives cost the host and the devices, beside NCCL alone.
    Collectives,
    /// Calls of few bytes by our own kernels, beside NCCL's, in graphs and not, alone and beside copies.
    LowLatency,
    /// Messages between actors in CUDA C, and between them and the host.
    K2k,
    /// Bandwidth as `measure` reports it, beside raw copies.
    Pairs,
    /// Graphs: recording, preparing, replaying, single operations and overlap, beside graphs by hand.
    Graph,
    /// A Vulkan device: copies, fills, dispatches and swaps of kernels beside the raw calls.
    Vulkan,
}

/// Measures a part. `quick` takes few rounds and small sizes, which graphs alone know.
pub(crate) fn run(part: Part, quick: bool) -> Result<()> {
    match part {
        Part::Graph => return graph::run(quick),
        Part::Discovery => return discovery::run(),
        Part::Nccl => return nccl::bench(),
        Part::Collectives => return collectives::bench(),
        Part::LowLatency => return low_latency::bench::run(),
        Part::K2k => return k2k::bench::run(),
        Part::Vulkan => return vulkan::run(),
        _ => {}
    }
    let rig = Rig::open()?;
    rig.describe()?;
    match part {
        Part::Submission => submission::run(&rig),
        Part::Resident => resident::run(&rig),
        Part::RoundTrip => round_trip::run(&rig),
        Part::Pairs => pairs::run(&rig),
        Part::Graph
        | Part::Discovery
        | Part::Nccl
        | Part::Collectives
        | Part::LowLatency
        | Part::K2k
        | Part::Vulkan => Ok(()),
    }
}
