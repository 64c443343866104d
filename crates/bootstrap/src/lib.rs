//! Processes of one job that find each other, agree on small values and watch each other.
//!
//! A member joins a [`Group`] by a [`Rendezvous`]: a port, a file, an id that rank 0 made, a meeting of threads,
//! or what a launcher put into the [`Environment`]. Rank 0 checks that all of them belong together and hands
//! out the table of members. The connections stay open: they carry barriers, broadcasts and agreement over
//! small values, an abort by any member ends the calls of all, and the death of a process is known to the
//! others of its host at once.
//!
//! ```
//! use std::{thread, time::Duration};
//! use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous};
//!
//! let meeting = Meeting::new();
//! let members: Vec<_> = (0..3)
//!     .map(|rank| {
//!         let meeting = Rendezvous::Meeting(meeting.clone());
//!         thread::spawn(move || {
//!             let within = Duration::from_secs(10);
//!             let group = Group::join(meeting, JoinConfig::new(Rank(rank), 3), within)?;
//!             let values = group.all_gather("squares", &[(rank * rank) as u8], within)?;
//!             assert_eq!(values, [[0], [1], [4]]);
//!             Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
//!         })
//!     })
//!     .collect();
//! for member in members {
//!     member.join().expect("no member panics")?;
//! }
//! # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
//! ```
//!
//! # Choices
//!
//! - A star over rank 0. The table of members has an address of each, so that survivors can form a new group
//!   ([`Group::reform`]) when rank 0 is the one that died.
//! - What rank 0 and the members decide is in state machines without sockets and without a clock; one thread
//!   for each group drives them.
//! - Every call ends by its deadline, and ends the same for all who took part: with values, or with one error
//!   that names who was missing, lost, or called something else.
//! - On one host silence is no death: a process that was stopped is [`Health::Suspect`] until it goes on. Across
//!   hosts a member that stays silent is lost ([`PulseConfig`]).
//! - Rank 0 listens on the loopback interface unless it is told otherwise ([`Bind`]), and a [`Token`] that never
//!   travels is proven by both sides.
//!
//! # What it does not do
//!
//! It moves small values, not data, and opens no device. Messages are not encrypted: between hosts that do not
//! trust their network it needs a tunnel. It does not start processes; `warpweft launch` does.
#![forbid(unsafe_code)]

mod address;
mod calls;
mod config;
mod descriptors;
mod environment;
mod error;
mod frame;
#[cfg(feature = "__fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod gather;
mod group;
mod health;
mod host_list;
mod hub;
mod link;
#[cfg(target_os = "linux")]
mod mailbox;
mod member;
mod message;
mod process_watch;
mod reform;
mod rendezvous;
mod service;
mod shared;
mod spoke;
mod token;
mod unique_id;

pub use config::{Bind, JoinConfig, LimitConfig, PulseConfig};
#[cfg(unix)]
pub use descriptors::Parcel;
pub use environment::{Environment, EnvironmentError, Family, role_variables};
pub use error::{GroupError, JoinError, Refusal};
pub use frame::{FrameError, PROTOCOL};
pub use group::{Group, HealthWatch};
pub use health::{Health, HealthChange, Loss};
pub use host_list::expand_host_list;
pub use member::{HostId, MailboxAddress, MemberInfo, Rank};
pub use reform::{ReformConfig, Reformed, Successor};
pub use rendezvous::{Meeting, Rendezvous};
pub use token::{RunId, Token};
pub use unique_id::{Host, ParseUniqueIdError, UniqueId};
