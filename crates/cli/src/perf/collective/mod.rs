//! Collectives: sizes swept, engines side by side, results checked.

mod args;
mod plot;
mod rank;
mod values;
mod world;

use std::process::ExitCode;

use serde::Serialize;
use warpweft::{
    Bytes, CollectiveOp, DType, ReduceOp,
    comm::{CommError, Communicator, EngineKind, Measured, Way},
};

pub(crate) use self::args::PerfCollective;
use crate::{
    measure::Summary,
    output::{self, WrongCall},
};

/// Which collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    SendRecv,
}

/// What one engine did with one size.
#[derive(Debug, Clone, Serialize)]
struct Row {
    collective: Kind,
    engine: EngineKind,
    ranks: u32,
    dtype: DType,
    #[serde(skip_serializing_if = "Option::is_none")]
    op: Option<ReduceOp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    root: Option<u32>,
    in_place: bool,
    /// Calls of a graph; none if they were made one by one.
    #[serde(skip_serializing_if = "Option::is_none")]
    graph: Option<u32>,
    blocking: bool,
    /// Bytes of the larger operand.
    size: u64,
    /// Elements of it.
    count: u64,
    /// One call, the slowest rank's.
    time: Summary,
    /// GB/s of 10^9 bytes.
    algbw: f64,
    busbw: f64,
    /// Elements that differ from what they must be, on all ranks; none if they were not looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    wrong: Option<u64>,
    /// The engine that takes the call where none is named.
    #[serde(skip_serializing_if = "Option::is_none")]
    chosen: Option<Way>,
}

impl Kind {
    /// What this rank calls; sends and receives go round, and are made of two.
    const fn op(self, args: &PerfCollective) -> CollectiveOp {
        let root = args.root;
        match self {
            Self::AllReduce => CollectiveOp::AllReduce(args.op),
            Self::AllGather => CollectiveOp::AllGather,
            Self::ReduceScatter => CollectiveOp::ReduceScatter(args.op),
            Self::Broadcast => CollectiveOp::Broadcast { root },
            Self::Reduce => CollectiveOp::Reduce { op: args.op, root },
            Self::Gather => CollectiveOp::Gather { root },
            Self::Scatter => CollectiveOp::Scatter { root },
            Self::AllToAll => CollectiveOp::AllToAll,
            Self::SendRecv => CollectiveOp::Recv { from: root },
        }
    }

    /// Parts of source and destination, for those who have them: the larger operand has all parts.
    const fn parts(self, ranks: u64) -> (u64, u64) {
        match self {
            Self::AllGather | Self::Gather => (1, ranks),
            Self::ReduceScatter | Self::Scatter => (ranks, 1),
            Self::AllToAll => (ranks, ranks),
            Self::AllReduce | Self::Broadcast | Self::Reduce | Self::SendRecv => (1, 1),
        }
    }

    /// Whether a rank has a source and a destination.
    const fn has(self, is_root: bool) -> (bool, bool) {
        match self {
            Self::Broadcast | Self::Scatter => (is_root, true),
            Self::Reduce | Self::Gather => (true, is_root),
            _ => (true, true),
        }
    }

    /// Bytes that the slowest link carries for each byte of the operand, as nccl-tests counts them.
    fn bus_factor(self, ranks: u32) -> f64 {
        let others = f64::from(ranks.saturating_sub(1)) / f64::from(ranks);
        match self {
            Self::AllReduce => 2.0 * others,
            Self::AllGather | Self::ReduceScatter | Self::Gather | Self::Scatter | Self::AllToAll => others,
            Self::Broadcast | Self::Reduce | Self::SendRecv => 1.0,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::SendRecv => "send_recv",
        }
    }
}

pub(crate) fn run(kind: Kind, args: &PerfCollective) -> anyhow::Result<ExitCode> {
    if args.min > args.max {
        return Err(WrongCall(format!("-b {} is above -e {}", args.min, args.max)).into());
    }
    let op = kind.op(args);
    if let Some(reduction) = op.reduction().filter(|reduction| !reduction.is_defined_for(args.dtype)) {
        return Err(WrongCall(format!("{reduction} is not defined for {}", args.dtype)).into());
    }
    let rows = world::run(args, |rank| rank::measure(kind, args, rank))?;
    // Only rank 0 has something to tell.
    let Some(rows) = rows else { return Ok(ExitCode::SUCCESS) };
    let wrong: u64 = rows.iter().filter_map(|row| row.wrong).sum();
    if let Some(path) = &args.plot {
        plot::draw(path, &rows)?;
    }
    if !args.json {
        let verdict = if args.check == 0 {
            "not looked at"
        } else if wrong == 0 {
            "0 OK"
        } else {
            "FAILED"
        };
        output::line(format!("# Wrong elements: {verdict}"));
    }
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print_head(kind: Kind, args: &PerfCollective, comm: &Communicator, engines: &[EngineKind]) {
    output::title(&format!("{} of {} over {} ranks", kind.name(), args.dtype, comm.world_size()));
    let names: Vec<_> = engines.iter().map(|engine| engine.name()).collect();
    let how = match (args.blocking, args.graph) {
        (true, _) => "each waited for".to_owned(),
        (false, 0) => "enqueued together".to_owned(),
        (false, calls) => format!("in graphs of {calls}"),
    };
    output::note(&format!(
        "# {} on {}, {} rounds of {} calls {how} after {} to warm up, {}",
        names.join(" and "),
        comm.device().info().name,
        args.rounds,
        args.iterations,
        args.warmup,
        if args.in_place { "in place" } else { "out of place" },
    ));
    output::line(aligned(
        '#',
        ["size", "count", "type", "redop", "root", "engine", "time", "p99", "algbw", "busbw", "wrong"],
    ));
    output::line(aligned('#', ["B", "", "", "", "", "", "us", "us", "GB/s", "GB/s", ""]));
}

/// What was measured of engines, for a rank that names none.
fn print_table(measured: &[Measured]) {
    output::title("Engines by what was measured");
    if measured.is_empty() {
        return output::note("# nothing: every call goes one way only, so that there is nothing to choose");
    }
    output::note(
        "# up to so many bytes from rank to rank; then all ways with a call's time in us, the fastest takes it",
    );
    for Measured { op, class, captured, bytes, ways } in measured {
        let how = if *captured { "in graphs" } else { "one by one" };
        let times: Vec<String> =
            ways.iter().map(|(way, nanos)| format!("{way} {:.2}", *nanos as f64 / 1e3)).collect();
        output::line(format!("  {op:<14} {class:<9} {how:<10} {bytes:>9}  {}", times.join("; ")));
    }
}

fn aligned<T: std::fmt::Display>(mark: char, cells: [T; 11]) -> String {
    let [size, count, dtype, op, root, engine, time, p99, algbw, busbw, wrong] =
        cells.map(|cell| cell.to_string());
    format!(
        "{mark} {size:>11} {count:>11} {dtype:>7} {op:>6} {root:>5} {engine:>11} {time:>10} {p99:>10} {algbw:>8} \
         {busbw:>8} {wrong:>6}"
    )
}

fn print_row(row: &Row, json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(row);
    }
    let us = |nanos: u64| format!("{:.2}", nanos as f64 / 1e3);
    let or_none = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let cells = [
        row.size.to_string(),
        row.count.to_string(),
        row.dtype.to_string(),
        or_none(row.op.map(|op| op.to_string())),
        or_none(row.root.map(|root| root.to_string())),
        row.engine.to_string(),
        us(row.time.p50_ns),
        us(row.time.p99_ns),
        format!("{:.2}", row.algbw),
        format!("{:.2}", row.busbw),
        or_none(row.wrong.map(|wrong| wrong.to_string())),
    ];
    let chosen = row.chosen.map(|chosen| format!("  {chosen} takes it")).unwrap_or_default();
    output::line(aligned(' ', cells) + &chosen);
    Ok(())
}

/// What is told of an engine that does not serve.
fn unserved(kind: EngineKind, error: &CommError) -> String {
    format!("# {kind} is not measured: {error}")
}

fn too_large(size: u64, error: &dyn std::fmt::Display) -> anyhow::Error {
    anyhow::anyhow!("{} are too many for the devices; choose a smaller -e: {error}", Bytes(size))
}
