//! One program, many accelerators.
//!
//! This crate gathers the others: it re-exports them, opens devices of the backends it is given, and sets
//! up copies between all of them. It has no algorithm of its own.
//!
//! ```
//! use std::time::Duration;
//! use warpweft::{BufferDesc, BufferView, Runtime, host::HostBackend};
//!
//! let runtime = Runtime::builder().backend(HostBackend::with_devices(2)?).build()?;
//! let [first, second] = runtime.devices() else { panic!("two were asked for") };
//!
//! let source = BufferView::whole(first.allocate(&BufferDesc::device(5))?);
//! let target = BufferView::whole(second.allocate(&BufferDesc::device(5))?);
//! let within = Duration::from_secs(1);
//! runtime.transfer().write(b"hello", &source, within)?;
//! runtime.transfer().copy(&source, &target)?.wait(within)?;
//!
//! let mut bytes = [0; 5];
//! runtime.transfer().read(&target, &mut bytes, within)?;
//! assert_eq!(&bytes, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Features
//!
//! - `host` (default): CPU devices, [`host`].
//! - `cuda`: NVIDIA GPUs, `cuda`; the driver is found and loaded at run time.
//! - `vulkan`: devices of any Vulkan driver, `vulkan`; the loader is found and opened at run time.
//! - `bootstrap`: processes of one job that find and watch each other, `bootstrap`.
//! - `comm`: collectives over devices of every backend, `comm`.
//! - `graph-runtime`: graphs whose order follows from what each operation reads and writes, `graph_runtime`.
//! - `k2k-router`: actors that send each other messages between devices, `k2k_router`.
//! - `wrappers`: devices that inject faults, find races or record traces, `wrappers`.
//!
//! A feature makes a backend available; the program says which ones run, by value.
#![forbid(unsafe_code)]

mod error;
mod runtime;

pub use error::Error;
pub use runtime::{Runtime, RuntimeBuilder};
pub use warpweft_core_types::*;

/// Processes of one job that find and watch each other.
#[cfg(feature = "bootstrap")]
pub use warpweft_bootstrap as bootstrap;
/// Collectives over devices of every backend.
#[cfg(feature = "comm")]
pub use warpweft_comm as comm;
/// Which work runs where.
pub use warpweft_coordinator as coordinator;
/// NVIDIA GPUs.
#[cfg(feature = "cuda")]
pub use warpweft_cuda as cuda;
/// Graphs over devices of every backend, ordered by what each operation reads and writes.
#[cfg(feature = "graph-runtime")]
pub use warpweft_graph_runtime as graph_runtime;
/// CPU devices, linked in any way.
#[cfg(feature = "host")]
pub use warpweft_host as host;
/// Messages between actors on any devices.
#[cfg(feature = "k2k-router")]
pub use warpweft_k2k_router as k2k_router;
/// What is linked to what.
pub use warpweft_topology as topology;
/// Copies between any two devices.
pub use warpweft_transfer as transfer;
/// Devices of any Vulkan driver.
#[cfg(feature = "vulkan")]
pub use warpweft_vulkan as vulkan;
/// Devices that wrap other devices.
#[cfg(feature = "wrappers")]
pub use warpweft_wrappers as wrappers;
