//! Graphs over devices of every backend, ordered by what each operation reads and writes.
#![forbid(unsafe_code)]

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
mod hand_off;
mod infer;
mod memory;
mod node;
mod order;
mod plan;
mod ranges;
mod run;
mod runtime;
mod segment;
mod settle;
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
