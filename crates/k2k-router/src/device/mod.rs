//! Executors that are kernels of a device: actors written in CUDA C, and the host's side of them.
//!
//! The kernel is `kernels/warpweft_executor.cuh`. Everything that it remembers lies in memory of its device, so that its
//! slices may end at any message boundary and another kernel go on where it stopped, which is what happens when an actor
//! with new code begins. See `docs/design/k2k.md`.

pub(crate) mod code;
mod lane;
mod layout;
mod link;
mod memory;
mod reading;
mod room;

pub(crate) use layout::{DEVICES, KINDS, Layout, Shape};
pub(crate) use link::{Link, Remote, RemoteCounts};
