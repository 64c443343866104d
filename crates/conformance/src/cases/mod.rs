//! The cases, by what they are about.

mod copy;
mod device;
mod kernel;
mod link;
mod memory;
mod queue;
mod resident;
mod semaphore;
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
    ]
    .concat()
}
