//! Messages between actors on any devices.
#![forbid(unsafe_code)]

mod actor;
mod channels;
pub mod cursor;
mod dead_letter;
pub mod epoch;
mod error;
mod executor;
mod host_port;
mod inbox;
mod message;
mod post;
mod reply;
pub mod ring;
mod service;
mod shared;
mod stats;
mod sync;
mod system;
mod table;
mod trace;
pub mod wire;

pub use actor::{ActorCode, ActorId, ActorSpec, Context, FullPolicy, Layout, Priority, SendOptions};
pub use dead_letter::{DeadLetter, Reason};
pub use error::{ActorError, AskError, RingError, SendError, WireError};
pub use message::Message;
pub use reply::Reply;
pub use stats::{ActorStats, DeviceStats, LatencyStats, PendingMessage, PendingPlace, RouteStats, Snapshot};
pub use system::{ActorRef, Parked, Placement, System, SystemConfig};
pub use table::Way;
pub use wire::Header;

/// The lane header for kernels in CUDA C, which also compiles as C++17 for the CPU. It includes [`WIRE_HEADER`] by the
/// name `warpweft_wire.h`.
pub const LANES_HEADER: &str = include_str!("../kernels/warpweft_lanes.cuh");

/// The layout of messages for C, see [`wire::c_header`].
pub const WIRE_HEADER: &str = include_str!("../kernels/warpweft_wire.h");
