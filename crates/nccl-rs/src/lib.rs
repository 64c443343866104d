//! Safe NCCL for Rust: the collectives of NVIDIA GPUs, found at run time, checked, and bounded in time.
//!
//! NCCL moves and reduces data between GPUs of one machine or many. This crate calls it without linking it: a program
//! starts where there is none, and says what is missing when it is asked for. It knows nothing of the CUDA library that
//! a program uses; streams and memory come in as handles, or from the crate `cudarc` with the feature of that name.
//!
//! # How it is used
//!
//! [`Nccl::load`] finds the library. One rank makes a [`UniqueId`] and gives it to the others by any means. Each rank
//! makes a [`Communicator`] on its device, and calls put work in streams:
//!
//! ```no_run
//! use nccl_rs::{Communicator, CommunicatorDesc, Dst, Error, Nccl, ReduceOp, Src, Stream, UniqueId};
//!
//! fn sum(rank: u32, id: UniqueId, src: &Src<'_>, dst: &mut Dst<'_>, stream: &Stream<'_>) -> Result<(), Error> {
//!     let nccl = Nccl::load()?;
//!     let comm = Communicator::init(&nccl, &CommunicatorDesc::new(id, rank, 2).device(rank))?;
//!     comm.all_reduce(src, dst, ReduceOp::Sum, stream)?;
//!     comm.finalize(std::time::Duration::from_secs(10))
//! }
//! ```
//!
//! # Choices
//!
//! - **Nothing waits for good.** Communicators do not block unless they are told to; calls that take as long as other
//!   ranks do end with [`Error::TimedOut`], and any thread can abort a communicator through an [`AbortHandle`]. Dropping
//!   one takes about a second at most.
//! - **What the library does not notice is checked here:** lengths, types, devices and overlaps, before anything is
//!   called. Such an error has no effect, on this rank or others.
//! - **Newer functions are looked up one by one.** A library from 2.18 on works; what it lacks is [`Error::TooOld`]
//!   with both versions, or is done by older means where there are any ([`Communicator::all_to_all`]).
//! - **Safety of memory** is the promise of whoever makes a [`Src`] or a [`Dst`] from an address: it stays until the work
//!   in the stream is over. Slices of `cudarc` keep it by themselves, and are lent to a closure for that.
//!
//! # What it does not do
//!
//! It does not bring processes together, watch them, or find out that one died; it does not make streams or wait for
//! them. On one machine, the library does not tell that a peer is gone: work that needs it does not end until the
//! communicator is aborted.
//!
//! # Features
//!
//! - `cudarc`: calls with slices of that crate (`nccl_rs::cudarc`).
//! - `half`: `f16` and `bf16` as elements.
#![cfg_attr(all(doctest, feature = "cudarc"), doc = include_str!("../README.md"))]

mod begun;
mod bounded;
mod collectives;
mod communicator;
mod config;
#[cfg(feature = "cudarc")]
pub mod cudarc;
mod device;
mod dtype;
mod error;
mod fork;
mod functions;
mod group;
mod library;
mod memory;
mod reduction;
mod search;
mod shared;
mod signal;
mod stream;
mod sys;
mod version;
mod window;

pub use communicator::{AbortHandle, Communicator, CommunicatorDesc, Shrink};
pub use config::CommunicatorConfig;
pub use dtype::{DataType, Element, ReduceOp};
pub use error::{Error, ErrorClass, NcclError, Tried};
pub use library::{Nccl, UniqueId};
pub use memory::{Dst, Memory, Src};
pub use reduction::{PremulSum, Reduction};
pub use signal::SignalWait;
pub use stream::Stream;
pub use version::Version;
pub use window::{Registration, WINDOW_ALIGNMENT, Window, WindowKind};
