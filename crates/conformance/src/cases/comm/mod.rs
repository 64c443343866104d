//! Collectives through `comm` over these devices: every engine that serves them.

mod params;
mod ranks;
mod values;

use std::{
    fmt::Write as _,
    io::{self, Write as _},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use warpweft_comm::{CommConfig, CommError, Communicator, EngineKind};
use warpweft_core_types::{
    BufferView, CopyRegion, DType, Deadline, ErrorClass, Features, GraphNode, Op, PreparedGraph, ReduceOp,
};
use warpweft_graph_runtime::{NodeDesc, Runtime, RuntimeConfig, Usage};

use self::{
    params::{Kind, Params},
    ranks::{Place, each_engine, in_ranks},
};
use crate::{
    context::{Context, PATIENCE},
    harness::{Case, Verdict},
};

/// Methods of the seam that communicators use.
const COVERS: &[&str] = &[
    "Device::collectives",
    "Collectives::library",
    "Collectives::does",
    "Collectives::create_id",
    "Collectives::join",
    "NativeCommunicator::device",
    "NativeCommunicator::rank",
    "NativeCommunicator::size",
    "NativeCommunicator::check",
    "NativeCommunicator::abort",
    "NativeCommunicator::close",
];

const REGISTERS: &[&str] = &[
    "NativeCommunicator::register",
    "NativeCommunicator::allocate",
    "Registration::buffer",
    "Registration::kind",
];

/// Operands are filled and looked at through windows.
const NEEDS: Features = Features::HOST_VISIBLE_MEMORY;

pub(super) const CASES: &[Case] = &[
    Case::new("comm::all_pairs_of_parameters", all_pairs_of_parameters)
        .needs(NEEDS)
        .devices(2)
        .covers(COVERS),
    Case::new("comm::a_seeded_part_of_all_parameters", a_seeded_part_of_all_parameters)
        .needs(NEEDS)
        .devices(2),
    Case::new("comm::sums_of_any_numbers", sums_of_any_numbers).needs(NEEDS).devices(2),
    Case::new("comm::calls_are_ordered_with_other_work", calls_are_ordered_with_other_work)
        .needs(NEEDS)
        .devices(2),
    Case::new("comm::calls_are_nodes_of_inferred_graphs", calls_are_nodes_of_inferred_graphs)
        .needs(Features::GRAPHS.union(Features::HOST_VISIBLE_MEMORY))
        .devices(2),
    Case::new("comm::graphs_with_calls_are_replayed", graphs_with_calls_are_replayed)
        .needs(NEEDS.union(Features::GRAPHS))
        .devices(2),
    Case::new("comm::different_calls_are_found_before_they_begin", different_calls_are_found)
        .needs(NEEDS)
        .devices(2),
    Case::new("comm::a_rank_that_never_calls_ends_in_time", a_rank_that_never_calls).needs(NEEDS).devices(2),
    Case::new("comm::ranks_part_and_go_on", ranks_part_and_go_on).needs(NEEDS).devices(2),
    Case::new("comm::memory_is_registered", memory_is_registered)
        .needs(NEEDS.union(Features::COLLECTIVES))
        .devices(2)
        .covers(REGISTERS),
];

/// Cases that ran on an engine, and that it does not do.
#[derive(Default)]
struct Counts {
    ran: AtomicU64,
    unsupported: AtomicU64,
}

/// Runs cases of all numbers of ranks on every engine that serves, and prints how many.
fn run_all(cx: &Context, what: &str, cases: &[Params]) -> Verdict {
    let mut text = format!("{what}: ");
    let most = u32::try_from(cx.infos.len().min(params::MOST_RANKS as usize))?;
    for engine in EngineKind::ALL {
        let counts = Counts::default();
        for ranks in 1..=most {
            let own: Vec<_> = cases.iter().filter(|case| case.ranks == ranks).collect();
            // A rank that is alone copies, whatever engine is named.
            if own.is_empty() || (ranks == 1) != (engine == EngineKind::Solo) {
                continue;
            }
            in_ranks(cx, ranks, engine, &CommConfig::default(), |place| {
                own.iter().try_for_each(|case| run_case(place, case, &counts))
            })?;
        }
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        if of(&counts.ran) > 0 {
            let _ =
                write!(text, "{engine} ran {}, does not do {}; ", of(&counts.ran), of(&counts.unsupported));
        }
    }
    report(text.trim_end_matches("; "));
    Ok(())
}

/// How many cases ran is part of the answer. Who has closed the output does not want it.
fn report(text: &str) {
    let _closed = writeln!(io::stdout(), "{text}");
}

fn all_pairs_of_parameters(cx: &Context) -> Verdict {
    let most = u32::try_from(cx.infos.len())?;
    run_all(cx, "all pairs", &params::all_pairs(most))
}

fn a_seeded_part_of_all_parameters(cx: &Context) -> Verdict {
    let most = u32::try_from(cx.infos.len())?;
    run_all(cx, "of all parameters", &params::sample(most, 60))
}

/// One case on one rank.
fn run_case(place: &Place<'_>, case: &Params, counts: &Counts) -> Verdict {
    let count = |counter: &AtomicU64| {
        if place.rank() == 0 {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    };
    let operands = values::Operands::new(place, case)?;
    match call(place, case, &operands) {
        Err(CommError::Unsupported { .. }) => {
            count(&counts.unsupported);
            return Ok(());
        }
        outcome => outcome.map_err(|error| format!("{case:?}: {error:?}"))?,
    }
    count(&counts.ran);
    operands.check(place, case)
}

fn call(place: &Place<'_>, case: &Params, operands: &values::Operands) -> Result<(), CommError> {
    let (comm, dtype) = (&place.comm, case.dtype);
    let (src, dst) = (operands.src.as_ref(), operands.dst.as_ref());
    if let (Kind::SendRecv, Some(src), Some(dst)) = (case.kind, src, dst) {
        let (next, before) = case.neighbours(place.rank());
        let calls = comm.send_recv(dtype, (next, src), (before, dst))?;
        return if case.waits { calls.wait(PATIENCE) } else { calls.on(&place.queue)?.wait(PATIENCE) };
    }
    let call = comm.call(case.op(place.rank()), dtype, src, dst)?;
    if case.waits { call.wait(PATIENCE) } else { call.on(&place.queue)?.wait(PATIENCE) }
}

/// Sums of numbers that are no whole ones are right to a few roundings, and the same on all ranks and every time.
fn sums_of_any_numbers(cx: &Context) -> Verdict {
    each_engine(cx, 2, &CommConfig::default(), |place| {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::Bf16] {
            let numbers = values::Numbers::new(dtype, 10_007, place.size());
            let mut first: Option<Vec<u8>> = None;
            for _ in 0..3 {
                let (src, dst) = (place.upload(&numbers.of(place.rank()))?, place.memory(numbers.bytes())?);
                match place.comm.all_reduce(ReduceOp::Sum, dtype, &src, &dst)?.wait(PATIENCE) {
                    Err(CommError::Unsupported { .. }) => break,
                    outcome => outcome?,
                }
                let found = place.download(&dst)?;
                numbers.check(&found)?;
                place.comm.group().agree("sums", &values::digest(&found), PATIENCE)?;
                let first = first.get_or_insert_with(|| found.clone());
                if *first != found {
                    return Err(format!("{dtype} differs from one time to the next").into());
                }
            }
        }
        Ok(())
    })
}

/// The sum of a word of each rank.
fn sum_of_ones(place: &Place<'_>, comm: &Communicator) -> Verdict {
    let word = place.upload(&1_u32.to_le_bytes())?;
    comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word)?.on(&place.queue)?.wait(PATIENCE)?;
    assert_eq!(place.download(&word)?, comm.world_size().to_le_bytes());
    Ok(())
}

fn calls_are_ordered_with_other_work(cx: &Context) -> Verdict {
    each_engine(cx, 2, &CommConfig::default(), |place| {
        let bytes: Vec<u8> = 1_u32.to_le_bytes().repeat(1 << 16);
        let (given, sum) = (place.upload(&bytes)?, place.memory(bytes.len())?);
        let taken = place.memory(bytes.len())?;
        // Nothing is waited for in between.
        for _ in 0..10 {
            place.submit(&[Op::Copy(CopyRegion::new(&given, &sum)?)])?;
            place.comm.all_reduce(ReduceOp::Sum, DType::U32, &sum, &sum)?.on(&place.queue)?;
            place.submit(&[Op::Copy(CopyRegion::new(&sum, &taken)?)])?;
        }
        place.comm.queue_barrier(&place.queue)?.wait(PATIENCE)?;
        let expected = place.size().to_le_bytes().repeat(1 << 16);
        assert!(place.download(&taken)? == expected, "a call came too early or too late");
        Ok(())
    })
}

fn graphs_with_calls_are_replayed(cx: &Context) -> Verdict {
    each_engine(cx, 2, &CommConfig::default(), |place| {
        let (sum, kept) = (place.upload(&1_u32.to_le_bytes())?, place.memory(4)?);
        let nodes = match place.comm.all_reduce(ReduceOp::Sum, DType::U32, &sum, &sum)?.nodes() {
            Err(CommError::Unsupported { .. }) => return Ok(()),
            nodes => nodes?,
        };
        let mut graph = Vec::new();
        for _ in 0..2 {
            for op in &nodes {
                let before: Vec<usize> = graph.len().checked_sub(1).into_iter().collect();
                graph.push(GraphNode::new(op.clone(), &before));
            }
        }
        let before: Vec<usize> = graph.len().checked_sub(1).into_iter().collect();
        graph.push(GraphNode::new(&Op::Copy(CopyRegion::new(&sum, &kept)?), &before));
        let graph = PreparedGraph::new(place.device.as_ref(), &graph)?;
        for _ in 0..2 {
            place.comm.replay(&graph, &place.queue)?;
        }
        place.comm.replay(&graph, &place.queue)?.wait(PATIENCE)?;
        let expected = place.size().pow(6);
        assert_eq!(place.download(&kept)?, expected.to_le_bytes());
        Ok(())
    })
}

/// Two sums and a copy behind them, whose order follows from their bytes, and that of the sums from a buffer that
/// stands for it.
fn calls_are_nodes_of_inferred_graphs(cx: &Context) -> Verdict {
    each_engine(cx, 2, &CommConfig::default(), |place| {
        let runtime = Runtime::new([Arc::clone(place.device)], RuntimeConfig::default())?;
        let (sum, kept) = (place.upload(&1_u32.to_le_bytes())?, place.memory(4)?);
        let nodes = match place.comm.all_reduce(ReduceOp::Sum, DType::U32, &sum, &sum)?.nodes() {
            Err(CommError::Unsupported { .. }) => return Ok(()),
            nodes => nodes?,
        };
        let order = [(place.memory(4)?, Usage::ReadWrite)];
        let mut graph = runtime.graph();
        for op in nodes.iter().chain(&nodes) {
            graph.add(NodeDesc::node(op).beside(&order))?;
        }
        let copy = graph.copy(&sum, &kept)?;
        assert_eq!(graph.predecessors(copy).len(), 1);
        let prepared = graph.prepare()?;
        for _ in 0..3 {
            prepared.submit_by(PATIENCE)?.wait(PATIENCE)?;
        }
        let expected = place.size().pow(6);
        assert_eq!(place.download(&kept)?, expected.to_le_bytes());
        Ok(())
    })
}

fn different_calls_are_found(cx: &Context) -> Verdict {
    let config = CommConfig { validate: true, ..CommConfig::default() };
    each_engine(cx, 2, &config, |place| {
        if place.size() == 1 {
            return Ok(());
        }
        let (words, odd) = (place.upload(&[0; 16])?, place.rank() == 1);
        let half = words.slice(0..8)?;
        let gathered = place.memory(16 * place.size() as usize)?;
        let other = |changed: bool| -> Result<(), CommError> {
            let op = if changed { ReduceOp::Max } else { ReduceOp::Sum };
            place.comm.all_reduce(op, DType::U32, &words, &words)?.on(&place.queue).map(|_| ())
        };
        let longer = |view: &BufferView| {
            place.comm.all_reduce(ReduceOp::Sum, DType::U32, view, view)?.on(&place.queue).map(|_| ())
        };
        let typed =
            |dtype| place.comm.all_reduce(ReduceOp::Sum, dtype, &words, &words)?.on(&place.queue).map(|_| ());
        let rooted =
            |root| place.comm.broadcast(root, DType::U32, (place.rank() == root).then_some(&half), &half);
        let outcomes = [
            other(odd),
            longer(if odd { &half } else { &words }),
            typed(if odd { DType::I32 } else { DType::U32 }),
            rooted(u32::from(odd)).and_then(|call| call.on(&place.queue).map(|_| ())),
            if odd {
                place.comm.all_gather(DType::U32, &words, &gathered)?.on(&place.queue).map(|_| ())
            } else {
                other(false)
            },
        ];
        for (number, outcome) in outcomes.into_iter().enumerate() {
            let error = outcome.err().ok_or_else(|| format!("call {number} was made"))?;
            assert_eq!(error.class(), ErrorClass::Usage, "{number}: {error}");
            assert!(error.to_string().contains("rank 1"), "{number}: {error}");
        }
        sum_of_ones(place, &place.comm)
    })
}

fn a_rank_that_never_calls(cx: &Context) -> Verdict {
    let config = CommConfig { timeout: Duration::from_millis(500), ..CommConfig::default() };
    each_engine(cx, 2, &config, |place| {
        if place.size() == 1 {
            return Ok(());
        }
        sum_of_ones(place, &place.comm)?;
        let word = place.upload(&1_u32.to_le_bytes())?;
        if place.rank() == 1 {
            // It learns of it without a call.
            let deadline = Deadline::within(PATIENCE);
            while place.comm.failure().is_none() && !deadline.is_past() {
                std::thread::yield_now();
            }
            return place.comm.failure().map(|_| ()).ok_or_else(|| "it was told nothing".into());
        }
        let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word)?;
        let outcome = call.on(&place.queue).and_then(|call| call.wait(PATIENCE));
        let error = outcome.err().ok_or("a call ended that one rank never made")?;
        assert!(matches!(error.class(), ErrorClass::Transient | ErrorClass::PeerLost), "{error}");
        // The device goes on.
        assert_eq!(place.download(&place.upload(&[7])?)?, [7]);
        Ok(())
    })
}

fn ranks_part_and_go_on(cx: &Context) -> Verdict {
    each_engine(cx, 2, &CommConfig::default(), |place| {
        let part = place.comm.split(Some(place.rank() % 2), 0, PATIENCE)?.ok_or("a rank has no part")?;
        sum_of_ones(place, &part)?;
        sum_of_ones(place, &place.comm)?;
        let all = place.comm.split(Some(0), 0, PATIENCE)?.ok_or("a rank has no part")?;
        drop(part);
        sum_of_ones(place, &all)
    })
}

fn memory_is_registered(cx: &Context) -> Verdict {
    use warpweft_core_types::RegistrationKind::{Local, Symmetric};

    in_ranks(cx, 2, EngineKind::Native, &CommConfig::default(), |place| {
        let buffer = place.comm.allocate(1 << 16)?;
        for kind in [Local, Symmetric] {
            let registered = match place.comm.register(&buffer, kind) {
                Err(error) if error.class() == ErrorClass::Unsupported => continue,
                registered => registered?,
            };
            assert_eq!(registered.buffer().size(), buffer.size());
            let _real = registered.kind();
            let view = BufferView::whole(std::sync::Arc::clone(registered.buffer()));
            place.write(&1_u32.to_le_bytes().repeat(1 << 14), &view)?;
            place
                .comm
                .all_reduce(ReduceOp::Sum, DType::U32, &view, &view)?
                .on(&place.queue)?
                .wait(PATIENCE)?;
            assert!(place.download(&view)? == place.size().to_le_bytes().repeat(1 << 14));
            // All ranks let go of it together.
            place.comm.barrier(PATIENCE)?;
        }
        Ok(())
    })
    .map(|_| ())
}
