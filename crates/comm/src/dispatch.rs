//! Which engine takes a call, by what was measured.
//!
//! The table is made once, when a communicator is, by all ranks together, and never changes: a call that is made again, or
//! is a node of a graph, is done as it was. What the table does not know goes to the first engine that does it.

mod cache;
mod tune;

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use warpweft_core_types::{CollectiveCall, CollectiveOp, DType, ReduceOp};

use crate::{EngineKind, engine::Engine};

pub(crate) use self::tune::{Scene, table};

/// How a communicator finds out which engine is the best for a call, where several serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TuningConfig {
    /// How long engines are measured at most, the smallest sizes first. What was not measured goes to
    /// the first engine that does it.
    pub budget: Duration,
    /// The folder that keeps what was measured, for the same devices, drivers and libraries; each time anew if there is
    /// none. Only rank 0 uses it, and the others are told.
    pub cache: Option<PathBuf>,
}

impl Default for TuningConfig {
    fn default() -> Self {
        Self { budget: Duration::from_secs(3), cache: None }
    }
}

/// What is done with elements, as far as it tells engines apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ElementClass {
    /// They are moved.
    Moved,
    /// Sums of `f32`, `f16` and `bf16`.
    UsualSum,
    /// Any other reduction.
    Reduced,
}

impl ElementClass {
    /// The class of a call.
    pub const fn of(op: CollectiveOp, dtype: DType) -> Self {
        match (op.reduction(), dtype) {
            (None, _) => Self::Moved,
            (Some(ReduceOp::Sum), DType::F32 | DType::F16 | DType::Bf16) => Self::UsualSum,
            (Some(_), _) => Self::Reduced,
        }
    }
}

impl fmt::Display for ElementClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Moved => "moved",
            Self::UsualSum => "usual sum",
            Self::Reduced => "reduced",
        })
    }
}

/// How an engine does a call that it can do in several ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Shape {
    /// Blocks of the launch.
    pub channels: u32,
    /// Whether each rank reduces a part and gives it to all, instead of all ranks everything.
    pub two_shots: bool,
    /// Whether messages are stored as they are with a flag behind them, instead of in lines that carry their number.
    pub bare: bool,
}

/// An engine, in one of its ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Way {
    /// The engine.
    pub engine: EngineKind,
    /// How, where it has several ways.
    pub shape: Option<Shape>,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.engine.fmt(f)?;
        let Some(Shape { channels, two_shots, bare }) = self.shape else { return Ok(()) };
        write!(f, " in {channels} {}", if channels == 1 { "block" } else { "blocks" })?;
        f.write_str(if two_shots { ", two shots" } else { "" })?;
        f.write_str(if bare { ", bare" } else { "" })
    }
}

/// What was measured of calls of one sort and size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// The operation's name.
    pub op: String,
    /// What is done with elements.
    pub class: ElementClass,
    /// Whether they are nodes of graphs.
    pub captured: bool,
    /// Bytes that one rank gives another. It holds for calls of so many, down to those that the next smaller one holds for.
    pub bytes: u64,
    /// Every way, with the slowest rank's time of a call in nanoseconds, the fastest first.
    pub ways: Vec<(Way, u64)>,
}

impl Measured {
    /// What calls of so many bytes from rank to rank go by in a table as [`Communicator::measured`] gives it.
    ///
    /// [`Communicator::measured`]: crate::Communicator::measured
    pub fn find(table: &[Self], op: CollectiveOp, dtype: DType, bytes: u64, captured: bool) -> Option<&Self> {
        Self::position(table, op, dtype, bytes, captured).map(|at| &table[at])
    }

    fn position(table: &[Self], op: CollectiveOp, dtype: DType, bytes: u64, captured: bool) -> Option<usize> {
        let wanted = (op.name(), ElementClass::of(op, dtype), captured, bytes);
        let at = table.partition_point(|entry| order(entry) < wanted);
        let entry = table.get(at)?;
        ((entry.op.as_str(), entry.class, entry.captured) == (wanted.0, wanted.1, captured)).then_some(at)
    }
}

/// What was measured, and the engines that it is about.
#[derive(Debug, Default)]
pub(crate) struct Dispatch {
    measured: Vec<Measured>,
    /// The fastest way of each.
    fastest: Vec<Arc<dyn Engine>>,
}

impl Dispatch {
    /// Entries with the fastest way that there is; others were made for other engines.
    pub(crate) fn new(measured: Vec<Measured>, engines: &[Arc<dyn Engine>]) -> Self {
        let known = |entry: Measured| {
            let engine = entry.ways.iter().find_map(|(way, _)| {
                let engine = engines.iter().find(|engine| engine.kind() == way.engine)?;
                match way.shape {
                    None => Some(Arc::clone(engine)),
                    Some(shape) => Arc::clone(engine).in_shape(shape),
                }
            })?;
            Some((entry, engine))
        };
        let mut known: Vec<_> = measured.into_iter().filter_map(known).collect();
        // So that entries of one sort are beside each other, the smallest first.
        known.sort_by(|(one, _), (other, _)| order(one).cmp(&order(other)));
        let (measured, fastest) = known.into_iter().unzip();
        Self { measured, fastest }
    }

    pub(crate) fn measured(&self) -> &[Measured] {
        &self.measured
    }

    /// The fastest engine for calls like this, if that is known.
    pub(crate) fn find(
        &self,
        op: CollectiveOp,
        dtype: DType,
        bytes: u64,
        captured: bool,
    ) -> Option<(&Measured, &Arc<dyn Engine>)> {
        let at = Measured::position(&self.measured, op, dtype, bytes, captured)?;
        let (entry, engine) = (&self.measured[at], self.fastest.get(at)?);
        engine.does(op, dtype).then_some((entry, engine))
    }

    /// The same for a call.
    pub(crate) fn find_for(
        &self,
        call: &CollectiveCall<'_>,
        ranks: u32,
        captured: bool,
    ) -> Option<&Arc<dyn Engine>> {
        if self.measured.is_empty() {
            return None;
        }
        self.find(call.op(), call.dtype(), message_bytes(call, ranks), captured).map(|(_, engine)| engine)
    }
}

/// What entries are sorted by.
fn order(entry: &Measured) -> (&str, ElementClass, bool, u64) {
    (&entry.op, entry.class, entry.captured, entry.bytes)
}

/// Bytes that one rank gives another.
pub(crate) fn message_bytes(call: &CollectiveCall<'_>, ranks: u32) -> u64 {
    let sizes = [call.src(), call.dst()].into_iter().flatten().map(warpweft_core_types::BufferView::size);
    let least = sizes.min().unwrap_or_default();
    if call.op() == CollectiveOp::AllToAll { least / u64::from(ranks) } else { least }
}
