//! A stand-in for NCCL: the functions that `nccl-rs` calls, carried out by host threads of one process.
//!
//! It is loaded by path in place of `libnccl.so.2`. Ranks meet by their unique id, work is done when a stream comes to it
//! and all ranks have, and memory is memory of this process. Streams are the stand-in's own, or those of the stand-in for
//! the CUDA driver where a test names one: then work can be captured in graphs too, and ranks are on the devices that are
//! current where they are made. Nothing is answered from a
//! script: a rank that does not come is waited for until somebody aborts, calls that do not fit together never end, and
//! a communicator that was given back is found because it is looked for.
//!
//! [`StandIn`] loads a copy of the library with a state of its own, as if in a process of its own, and says what is to
//! go wrong: calls that fail, errors that come later, calls that are in progress for a while or for good, old versions,
//! and missing functions.
//!
//! # What it does not do
//!
//! It knows no devices of its own: every rank is on device 0 unless a test says otherwise, and two on one are fine. It measures
//! nothing.

mod communicator;
mod control;
mod driver;
mod exports;
mod instance;
mod memory;
mod number;
mod stream;
mod world;

pub use instance::{StandIn, Stream};

/// A code of `nccl.h`, other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Code(std::ffi::c_int);

impl Code {
    const UNHANDLED_CUDA: Self = Self(1);
    const INTERNAL: Self = Self(3);
    const INVALID_ARGUMENT: Self = Self(4);
    const INVALID_USAGE: Self = Self(5);
    const IN_PROGRESS: Self = Self(7);
}
