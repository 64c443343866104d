//! Collectives over devices of every backend: checked, ordered with other work, and bounded in time.
//!
//! A [`Communicator`] is one rank's handle of a group of devices that move and reduce data together. Its calls are put in
//! queues like all other work, behind what is there and before what comes, and no host waits for a device in between;
//! or they are waited for on the spot.
//!
//! ```
//! use std::{sync::Arc, thread, time::Duration};
//! use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous};
//! use warpweft_comm::{CommConfig, Communicator};
//! use warpweft_core_types::{Backend, BufferDesc, BufferView, DType, Features, ReduceOp};
//! use warpweft_host::HostBackend;
//!
//! fn sum(group: Group, backend: &dyn Backend) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!     let within = Duration::from_secs(10);
//!     let device = backend.open(group.rank().0, Features::empty())?;
//!     let comm = Communicator::create(group, &device, &CommConfig::default(), within)?;
//!     let numbers = BufferView::whole(device.allocate(&BufferDesc::host_visible(8))?);
//!     numbers.write(&[1, comm.rank() as u8, 0, 0, 0, 0, 0, 0])?;
//!     comm.all_reduce(ReduceOp::Sum, DType::U8, &numbers, &numbers)?.wait(within)?;
//!     let mut sums = [0; 8];
//!     numbers.read(&mut sums)?;
//!     assert_eq!(sums, [2, 1, 0, 0, 0, 0, 0, 0]);
//!     Ok(())
//! }
//!
//! let backend = HostBackend::with_devices(2)?;
//! let meeting = Meeting::new();
//! thread::scope(|scope| {
//!     let ranks: Vec<_> = (0..2)
//!         .map(|rank| {
//!             let (meeting, backend) = (Rendezvous::Meeting(Arc::clone(&meeting)), &backend);
//!             scope.spawn(move || {
//!                 sum(Group::join(meeting, JoinConfig::new(Rank(rank), 2), Duration::from_secs(10))?, backend)
//!             })
//!         })
//!         .collect();
//!     ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
//! })
//! .map_err(|error| error.to_string())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Choices
//!
//! - Engines carry calls out: [`EngineKind`] lists them. Which engine takes a call follows from what all ranks know, so
//!   that all take the same.
//! - What is called again and again is made once, by [`Call::persistent`]; what is in a queue is waited for by a deadline
//!   or awaited.
//! - Lengths, types and overlaps are checked before anything is done. That all ranks call the same is checked by the host
//!   engine always, and by the others where [`CommConfig::validate`] says so.
//! - A rank that dies, a call that is stuck, and a rank that gives up end every call on every rank, with an error that
//!   names who; the survivors go on with [`Communicator::shrink`].
//! - The last calls are remembered ([`Communicator::flight`]), and written to files when a communicator fails, so that
//!   [`Verdict::of`] can tell who is to blame. Files of several communicators may lie in one folder.
//!
//! # What it does not do
//!
//! It brings no processes together; `warpweft-bootstrap` does. What ranks enqueue in which order has to be the same on
//! all of them; where it is not, calls differ or do not end, and the errors say so.

mod call;
mod communicator;
mod config;
mod dispatch;
mod engine;
mod error;
mod flight;
mod form;
mod future;
mod inner;
mod keeper;
mod lines;
mod lock;
#[cfg(all(unix, feature = "__loopback"))]
#[doc(hidden)]
pub mod loopback;
mod persistent;
mod split;
mod user;

pub use call::{Call, Calls, Enqueued};
pub use communicator::Communicator;
pub use config::CommConfig;
pub use dispatch::{ElementClass, Measured, Shape, TuningConfig, Way};
pub use engine::EngineKind;
pub use error::CommError;
pub use flight::{CallRecord, CommunicatorId, Exchange, Exchanged, FlightConfig, FlightRecord, Verdict};
pub use future::CallFuture;
pub use persistent::PersistentCall;
pub use user::UserReduction;
