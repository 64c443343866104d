//! Collectives of ranks on one host, as threads of one process or processes of one machine, through memory that all of
//! them map.
//!
//! ```
//! use std::{sync::Arc, thread, time::Duration};
//! use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous};
//! use warpweft_core_types::{CollectiveOp, DType, ReduceOp};
//! use warpweft_host_collectives::{HostCommunicator, HostConfig, SliceCall, Slices};
//!
//! let within = Duration::from_secs(10);
//! let meeting = Meeting::new();
//! let ranks: Vec<_> = (0..3_u32)
//!     .map(|rank| {
//!         let meeting = Rendezvous::Meeting(meeting.clone());
//!         thread::spawn(move || {
//!             let group = Arc::new(Group::join(meeting, JoinConfig::new(Rank(rank), 3), within)?);
//!             let communicator = HostCommunicator::join(group, &HostConfig::default(), within)?;
//!             let mut values = [rank.to_ne_bytes(), 1_u32.to_ne_bytes()].concat();
//!             communicator.run_slices(
//!                 &mut [SliceCall {
//!                     op: CollectiveOp::AllReduce(ReduceOp::Sum),
//!                     dtype: DType::U32,
//!                     operands: Slices::InPlace(&mut values),
//!                     custom: None,
//!                 }],
//!                 within,
//!             )?;
//!             assert_eq!(values, [3_u32.to_ne_bytes(), 3_u32.to_ne_bytes()].concat());
//!             Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
//!         })
//!     })
//!     .collect();
//! for rank in ranks {
//!     rank.join().expect("no rank panics")?;
//! }
//! # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
//! ```
//!
//! # Choices
//!
//! - A call blocks its thread; there is no queue and no device here. Ranks spin for some microseconds, then let others
//!   have the core, then sleep.
//! - All ranks meet in every operation of all, and compare what they call. A difference is an error on all of them that
//!   says who called what, and the communicator goes on.
//! - Small operands go through slots of which each rank has two, so that one barrier an operation is enough. Large ones
//!   go through them chunk by chunk, or, where all ranks are threads of one process, straight from operand to operand.
//! - Results are the same bits on all ranks and in every run: ranks are reduced in their order ([`reduce`]).
//! - A rank that dies, leaves or does not come ends the communicator for all, with one failure that names it.
//! - Memory that other processes write is trusted as far as values go: they can spoil results, and what they can spoil
//!   ends at the bounds of operands that this rank gave.
//!
//! # What it does not do
//!
//! Ranks on other hosts, devices, and operations that go on while the caller does something else.

#[expect(unsafe_code, reason = "operands are addresses")]
mod alone;
mod call;
#[expect(unsafe_code, reason = "operands and slots are addresses")]
mod collective;
#[expect(unsafe_code, reason = "callers lend memory by address")]
mod communicator;
mod config;
mod error;
mod fabric;
mod header;
mod join;
mod layout;
#[expect(unsafe_code, reason = "copies between addresses")]
mod moves;
#[cfg_attr(target_os = "linux", expect(unsafe_code, reason = "maps a page that forks do not have"))]
mod origin;
#[expect(unsafe_code, reason = "operands and fragments are addresses")]
mod pairwise;
pub mod reduce;
#[expect(unsafe_code, reason = "maps memory")]
mod region;
#[expect(unsafe_code, reason = "addresses as slices")]
mod span;
mod step;
mod sync;

pub use call::{CustomReduction, HostCall, Operand, SliceCall, Slices};
pub use communicator::{HostCommunicator, RankProgress};
pub use config::HostConfig;
pub use error::{HostError, HostFailure};
