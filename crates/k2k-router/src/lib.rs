//! Messages between actors on any devices.
//!
//! An *actor* is a function over a state and a message, at a place on a device. It sends to other actors wherever they
//! are, answers, defers, and never waits. A [`System`] has an executor on each of its devices, which takes messages out
//! of *lanes* and calls handlers. Lanes are there by themselves too ([`ring`]), and for kernels in CUDA C
//! ([`LANES_HEADER`]).
//!
//! ```
//! use std::time::Duration;
//! use warpweft_core_types::{Backend as _, Features};
//! use warpweft_host::HostBackend;
//! use warpweft_k2k_router::{ActorCode, ActorSpec, Layout, Placement, System, SystemConfig};
//!
//! let backend = HostBackend::with_devices(2)?;
//! let devices = (0..2).map(|ordinal| backend.open(ordinal, Features::empty())).collect::<Result<Vec<_>, _>>()?;
//! let system = System::start(devices, &SystemConfig::default())?;
//!
//! // It counts what it gets, and answers with the count.
//! let count = Layout { id: 1, size: 1 };
//! let code = ActorCode::host(count, |cx, state, _message| {
//!     state[0] += 1;
//!     cx.reply(state);
//! });
//! let actor = system.spawn(&ActorSpec::new("counter", code), Placement::Any)?;
//! for expected in 1..=3 {
//!     assert_eq!(actor.call(0, b"count me", Duration::from_secs(5))?.payload, [expected]);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Choices
//!
//! - A message is a run of 16-byte lines that validate themselves by a stamp, so that no fence is needed between
//!   devices ([`wire`]).
//! - Messages of one source, destination and priority keep their order, also while actors move; each that was accepted
//!   is served once, or becomes a [`DeadLetter`] with its [`Reason`].
//! - Parking, stopping and moving are one protocol ([`epoch`]), whose parts have no thread and no clock.
//! - Executors are residents of the seam.
//!
//! # What it does not do
//!
//! Actors run on host devices, as Rust functions, and on CUDA devices, as functions in CUDA C ([`ActorCode::cuda`]); other
//! devices are refused when a system is started. An actor of a CUDA device does not move, and its inbox neither drops
//! its oldest nor spills. Payloads have at most [`wire::MAX_PAYLOAD`] bytes, and all devices belong to one process.

mod actor;
mod channels;
pub mod cursor;
mod dead_letter;
mod device;
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
pub use device::code::{ExecutorImage, executor_source};
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

/// What executors of actors in CUDA C are, and what handlers can do. It includes [`LANES_HEADER`] by the name
/// `warpweft_lanes.cuh`; [`executor_source`] puts everything together.
pub const EXECUTOR_HEADER: &str = include_str!("../kernels/warpweft_executor.cuh");

/// The layout of messages for C, see [`wire::c_header`].
pub const WIRE_HEADER: &str = include_str!("../kernels/warpweft_wire.h");
