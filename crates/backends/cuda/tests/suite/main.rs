//! The backend on a driver that is made of host threads, so that what a GPU does once a year can be asked for.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may fail a test")]

mod faults;
mod injected;
#[cfg(feature = "nvml")]
mod links;
mod opening;
mod residents;
mod support;
mod visible;
