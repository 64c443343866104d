//! Which devices are in service, and what runs where.
//!
//! A [`Coordinator`] is told of devices and is asked where kernels shall run. Every placement is atomic, never
//! on a device that is full, draining, quarantined or lost, and a piece of silicon that several backends reach
//! has one limit and one memory. When a device goes out of service, [`Coordinator::evacuate`] plans where its
//! kernels can go; moving them is the program's work, and a kernel's device changes when the move is completed.
//!
//! ```
//! use warpweft_coordinator::*;
//! use warpweft_core_types::{Backend, Features};
//! use warpweft_host::HostBackend;
//!
//! let backend = HostBackend::with_devices(2)?;
//! let coordinator = Coordinator::new(CoordinatorConfig::default())?;
//! for ordinal in 0..2 {
//!     coordinator.register(backend.open(ordinal, Features::empty())?)?;
//! }
//! let (kernel, first) = coordinator.place(&PlacementRequest::default())?;
//! let (_, second) = coordinator.place(&PlacementRequest::default())?;
//! assert_ne!(first, second, "the least loaded device is chosen");
//!
//! let plan = coordinator.evacuate(first)?;
//! let under_way = coordinator.begin_move(kernel, plan.moves[0].to)?;
//! // Here the kernel is moved.
//! coordinator.complete_move(under_way)?;
//! assert_eq!(coordinator.device_of(kernel)?, second);
//! coordinator.unregister(first)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What it does not do
//!
//! It starts, moves and stops nothing, and it watches nothing by itself: call [`Coordinator::check_health`]
//! and [`Coordinator::refresh_memory`] as often as it matters. A placement checks the device it chose.
#![forbid(unsafe_code)]

mod config;
mod coordinator;
mod error;
mod evacuate;
mod registry;
mod request;
mod status;

pub use config::CoordinatorConfig;
pub use coordinator::Coordinator;
pub use error::CoordinatorError;
pub use evacuate::{EvacuationPlan, PlannedMove, StrandedKernel};
pub use request::{Candidate, CustomStrategy, MovePriority, PlacementRequest, Strategy};
pub use status::{CoordinatorStats, DeviceReport, DeviceStatus, KernelId, MoveId};
