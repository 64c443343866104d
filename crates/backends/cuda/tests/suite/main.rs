//! The backend on a driver that is made of host threads, so that what a GPU does once a year can be asked for.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may fail a test")]

mod beside;
mod cache;
mod clocks;
mod collectives;
mod communicators;
mod contexts;
mod faults;
mod graphs;
mod injected;
mod interop;
mod late;
#[cfg(feature = "nvml")]
mod links;
mod memory;
mod opening;
mod other;
mod probe;
mod residents;
#[cfg(target_os = "linux")]
mod sharing;
mod stress;
mod support;
mod visible;
mod waits;
