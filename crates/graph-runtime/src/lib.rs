//! Graphs over devices of every backend, ordered by what each operation reads and writes.
//!
//! A program says what is to be done, in an order in which it would be right one by one. Who has to wait for whom follows
//! from the bytes that are used; everything else runs side by side, on all devices of a [`Runtime`] and on the host's
//! processors, and leaves the bytes that the simple order leaves.
//!
//! ```
//! use std::time::Duration;
//! use warpweft_core_types::{Backend, Features, FillRegion};
//! use warpweft_graph_runtime::{HostTask, MemoryPlacement, NodeDesc, Runtime, RuntimeConfig, Usage};
//! use warpweft_host::HostBackend;
//!
//! let backend = HostBackend::with_devices(2)?;
//! let devices = [backend.open(0, Features::empty())?, backend.open(1, Features::empty())?];
//! let [first, second] = [devices[0].info().id, devices[1].info().id];
//! let runtime = Runtime::new(devices, RuntimeConfig::default())?;
//!
//! let rows = runtime.allocate(&MemoryPlacement::Device(first), 4096)?;
//! let result = runtime.allocate(&MemoryPlacement::HostVisible(second), 4096)?;
//! let largest = HostTask::fallible(|context| {
//!     let largest = context.bytes(0)?.into_iter().max().unwrap_or(0);
//!     Ok(context.write(0, 0, &[largest; 4096])?)
//! });
//!
//! let mut graph = runtime.graph();
//! let low = graph.fill(FillRegion::bytes(&rows.slice(0..2048)?, 3))?;
//! let high = graph.fill(FillRegion::bytes(&rows.slice(2048..4096)?, 7))?;
//! let copied = graph.copy(rows.view(), result.view())?;
//! let spread = [(result.view().clone(), Usage::ReadWrite)];
//! graph.add(NodeDesc::task(&largest, &spread).named("spread the largest"))?;
//!
//! // The halves have nothing to do with each other; the copy needs both.
//! assert_eq!(graph.predecessors(high), []);
//! assert_eq!(graph.predecessors(copied), [low, high]);
//! let why = graph.why(high, copied);
//! assert_eq!(why[0].to_string(), "node 2 comes after node 1: read after write of bytes 2048..4096 of buffer 0");
//! assert!(graph.to_svg().contains("spread the largest"));
//!
//! let prepared = graph.prepare()?;
//! let within = Duration::from_secs(10);
//! for _ in 0..3 {
//!     prepared.submit_by(within)?;
//! }
//! // Reading waits for what writes those bytes.
//! assert_eq!(runtime.read(result.view(), within)?.to_vec()?, [7; 4096]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Choices
//!
//! - Order is by ranges of bytes, not by buffers, and buffers that stand for the same memory are known to be
//!   one. Two uses that only read, that reduce alike ([`Usage::Reduce`]) or that may trade places ([`Usage::Commutative`]) do not wait for
//!   each other as two writers do.
//! - Work is cut into segments as large as the order allows ([`Graph::segments`]). A device is handed each as one of its
//!   own prepared graphs, and waits for other devices on semaphores: no thread of the host stands in between, unless a
//!   device lacks what that takes.
//! - A submission never blocks. Where there is no room it is refused with the reason ([`BusyReason`]), and
//!   [`ExecutableGraph::submit_by`] waits for it. Single operations ([`Runtime::run`]) and the host's own reads and writes
//!   ([`ReadGuard`], [`WriteGuard`]) are ordered with graphs by the same bytes.
//! - Operands can be exchanged between submissions ([`ExecutableGraph::rebind`]); other libraries can have bytes for a
//!   while ([`Runtime::hand_off`]).
//! - A failure concerns the node, or its segment where the device does not tell which it was, and what needed it: those
//!   are skipped, and the bytes that they were to write are poisoned, until they are written or reset. A device that is
//!   lost poisons all of its memory. Dropping a [`Completion`] cancels nothing.
//! - What was inferred can be asked for ([`Graph::why`], [`Graph::reasons`], [`Graph::critical_path`]), drawn
//!   ([`Graph::to_dot`], [`Graph::to_svg`]), and what ran can be traced ([`Runtime::start_trace`]).
//!
//! # What it does not do
//!
//! It sees only what is recorded in its graphs or run by its runtime: work that a program puts in queues by itself, and
//! what kernels do beyond their contracts, it cannot order. It moves no bytes that no node says to move, and chooses no
//! device for a kernel. Graphs have no branches and no loops.
#![forbid(unsafe_code)]

mod any;
mod completion;
mod config;
mod domain;
mod draw;
mod error;
mod exec;
mod explain;
mod failure;
mod graph;
mod guard;
mod guest;
mod hand_off;
mod infer;
mod later;
mod memory;
mod node;
mod order;
mod plan;
mod ranges;
mod run;
mod runtime;
mod segment;
mod settle;
mod single;
mod staging;
mod statistics;
mod submit;
mod sync;
mod task;
mod trace;
mod usage;
mod workers;

pub use completion::{Completed, Completion};
pub use config::RuntimeConfig;
pub use error::{
    BusyReason, CompletionError, FailedNode, MapError, NodeFailure, Poison, PrepareError, RecordError,
    RunError,
};
pub use exec::ExecutableGraph;
pub use explain::Segment;
pub use graph::{Graph, Hazard, Reason};
pub use guard::{ReadGuard, WriteGuard};
pub use hand_off::HandOff;
pub use node::{NodeDesc, NodeId};
pub use runtime::{Buffer, MemoryPlacement, Runtime};
pub use statistics::Statistics;
pub use task::{HostTask, OperandError, TaskContext, TaskError};
pub use trace::{ExecutionTrace, TraceClock, TraceEvent};
pub use usage::Usage;
