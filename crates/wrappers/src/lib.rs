//! Backends that wrap other backends.
//!
//! Work at the seam is data, so a wrapper can look at it, change it or keep it. Each of these is a
//! [`Backend`](warpweft_core_types::Backend) itself and works over any other, wrapped ones included:
//!
//! - [`FaultyBackend`] fails on purpose: memory that is not there, copies that fail or corrupt, signals that
//!   never come, a device that dies at step n. By seed, so that a failing test can be run again.
//! - [`ValidatingBackend`] refuses submissions that touch what other work under way touches, if nothing
//!   orders the two.
//! - [`TracingBackend`] records every submission with host times, for Chrome's tracing page or Perfetto.
//!
//! Buffers, kernels and semaphores are the wrapped device's own.
#![forbid(unsafe_code)]

mod faulty;
mod layer;
mod tracing;
mod validating;

pub use faulty::{FaultConfig, FaultyBackend};
pub use tracing::{Trace, TraceEvent, TracingBackend};
pub use validating::ValidatingBackend;
