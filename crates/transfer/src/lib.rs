//! Copies between any two devices of any backends, by the best route over their links.
//!
//! [`Transfer`] is made for a set of open devices. It asks each for its links and finds, for every ordered
//! pair, the cheapest way: straight from device to device, through host memory that both reach, through two
//! pieces of host memory with a processor's copy between, or relayed by other devices. Routes with stops in
//! between are cut into chunks and pipelined; each hop waits on its device for the one before, so that the
//! host appears only where a processor must copy or a copy has a time limit.
//!
//! ```
//! use std::time::Duration;
//! use warpweft_core_types::*;
//! use warpweft_host::{HostBackend, HostDeviceConfig, LinkSpec};
//! use warpweft_transfer::{RouteKind, Transfer, TransferConfig};
//!
//! // Three devices in a row: the ends have no link of their own.
//! let backend = HostBackend::builder()
//!     .devices(3, &HostDeviceConfig::default())
//!     .link_chain(LinkSpec::default())
//!     .build()?;
//! let devices = (0..3).map(|ordinal| backend.open(ordinal, Features::PEER_ACCESS)).collect::<Result<Vec<_>, _>>()?;
//! let (src, dst) = (
//!     BufferView::whole(devices[0].allocate(&BufferDesc::device(1 << 20))?),
//!     BufferView::whole(devices[2].allocate(&BufferDesc::device(1 << 20))?),
//! );
//! let transfer = Transfer::new(devices, TransferConfig::default())?;
//! let copy = transfer.copy(&src, &dst)?;
//! copy.wait(Duration::from_secs(5))?;
//! assert_eq!(copy.route().kind, RouteKind::Relayed);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What it does not do
//!
//! It does not order copies with other work unless asked ([`CopyOptions::after`]), and it keeps no copies of
//! data: every call moves its bytes.
#![forbid(unsafe_code)]

mod config;
mod devices;
mod driver;
mod error;
mod handle;
mod lanes;
mod machine;
mod plan;
mod route;
mod transfer;

pub use config::{CopyOptions, TransferConfig};
pub use error::TransferError;
pub use handle::{CopyHandle, CopyProgress};
pub use route::{Route, RouteKind, Stop};
pub use transfer::Transfer;
