//! Messages between actors on any devices: lanes, and the protocol by which actors park and move.
#![forbid(unsafe_code)]

pub mod cursor;
pub mod epoch;
mod error;
mod message;
pub mod ring;
mod sync;
pub mod wire;

pub use error::{RingError, WireError};
pub use message::Message;
pub use wire::Header;

/// The lane header for kernels in CUDA C, which also compiles as C++17 for the CPU. It includes [`WIRE_HEADER`] by the
/// name `warpweft_wire.h`.
pub const LANES_HEADER: &str = include_str!("../kernels/warpweft_lanes.cuh");

/// The layout of messages for C, see [`wire::c_header`].
pub const WIRE_HEADER: &str = include_str!("../kernels/warpweft_wire.h");
