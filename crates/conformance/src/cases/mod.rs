//! The cases, by what they are about.

mod actor_kernels;
mod actors;
mod clock;
mod comm;
mod copy;
mod device;
mod graph;
mod graph_runtime;
mod interop;
mod kernel;
mod link;
mod memory;
mod queue;
mod resident;
mod semaphore;
#[cfg(unix)]
mod sharing;
mod transfer;

use crate::harness::Case;

/// Every case.
pub(crate) fn all() -> Vec<Case> {
    [
        device::CASES,
        memory::CASES,
        copy::CASES,
        kernel::CASES,
        queue::CASES,
        semaphore::CASES,
        link::CASES,
        resident::CASES,
        transfer::CASES,
        graph::CASES,
        graph_runtime::CASES,
        clock::CASES,
        interop::CASES,
        comm::CASES,
        actors::CASES,
        actor_kernels::CASES,
        #[cfg(unix)]
        sharing::CASES,
    ]
    .concat()
}
