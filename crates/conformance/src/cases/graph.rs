//! Graphs: prepared once, replayed with the operands of the moment.

use libtest_mimic::Failed;
use warpweft_core_types::{
    Arg, BufferView, CopyRegion, Features, FillRegion, GraphError, GraphNode, GraphOp, Launch, Op, OwnedOp,
    PreparedGraph, SubmitError,
};

use crate::{
    context::{Context, PATIENCE, gate, refusal},
    harness::{Case, Verdict},
    kernels,
};

const NEEDS: Features = Features::GRAPHS.union(Features::HOST_VISIBLE_MEMORY);

pub(super) const CASES: &[Case] = &[
    Case::new("graph::replays_do_every_node_each_time", replays_do_every_node_each_time)
        .needs(NEEDS)
        .covers(&["Graphs::prepare", "Graph::device", "Device::graphs"]),
    Case::new("graph::edges_order_a_diamond", edges_order_a_diamond).needs(NEEDS),
    Case::new("graph::an_edge_that_is_named_twice_is_one", an_edge_that_is_named_twice_is_one).needs(NEEDS),
    Case::new("graph::a_join_stands_for_many_nodes", a_join_stands_for_many_nodes).needs(NEEDS),
    Case::new("graph::a_long_chain_is_one_submission", a_long_chain_is_one_submission).needs(NEEDS),
    Case::new("graph::operands_change_between_replays", operands_change_between_replays)
        .needs(NEEDS)
        .covers(&["Graph::check"]),
    Case::new("graph::a_submission_keeps_the_operands_it_had", a_submission_keeps_the_operands_it_had)
        .needs(NEEDS),
    Case::new("graph::clones_have_operands_of_their_own", clones_have_operands_of_their_own).needs(NEEDS),
    Case::new("graph::a_replay_keeps_its_place_in_the_queue", a_replay_keeps_its_place_in_the_queue)
        .needs(NEEDS),
    Case::new("graph::lives_while_a_replay_needs_it", lives_while_a_replay_needs_it).needs(NEEDS),
    Case::new("graph::wrong_nodes_are_named", wrong_nodes_are_named).needs(NEEDS),
    Case::new("graph::another_device_refuses_it", another_device_refuses_it).needs(NEEDS).devices(2),
];

fn prepare(cx: &Context, nodes: &[GraphNode]) -> Result<PreparedGraph, Failed> {
    Ok(PreparedGraph::new(cx.device(0).as_ref(), nodes)?)
}

fn copy(src: &BufferView, dst: &BufferView) -> Result<OwnedOp, Failed> {
    Ok(OwnedOp::from(&Op::Copy(CopyRegion::new(src, dst)?)))
}

fn fill(dst: &BufferView, byte: u8) -> OwnedOp {
    OwnedOp::from(&Op::Fill(FillRegion::bytes(dst, byte)))
}

/// Adds one to every word of `from` and writes the sums into `to`.
fn increment(cx: &Context, from: &BufferView, to: &BufferView) -> Result<OwnedOp, Failed> {
    let kernel = cx.kernel(0, &kernels::increment())?;
    let count = u32::try_from(from.size().min(to.size()) / 4)?.to_le_bytes();
    let args = [Arg::Buffer(to), Arg::Buffer(from), Arg::Scalar(&count)];
    Ok(OwnedOp::from(&Op::Launch(Launch::new(&kernel, [1, 1, 1], &args)?)))
}

fn replays_do_every_node_each_time(cx: &Context) -> Verdict {
    let (sum, next) = (cx.memory(0, 64)?, cx.memory(0, 64)?);
    let graph = prepare(
        cx,
        &[GraphNode::new(increment(cx, &sum, &next)?, &[]), GraphNode::new(copy(&next, &sum)?, &[0])],
    )?;
    assert_eq!(graph.graph().device(), cx.infos[0].id);
    let lane = cx.lane(0)?;
    for _ in 0..10 {
        lane.run(&[Op::Replay(&graph)])?;
    }
    lane.run(&[Op::Replay(&graph), Op::Replay(&graph)])?;
    assert_eq!(cx.download_words(0, &sum)?, [12; 16]);
    Ok(())
}

fn edges_order_a_diamond(cx: &Context) -> Verdict {
    let all = cx.memory(0, 64)?;
    let [left, right] = [all.slice(0..32)?, all.slice(32..64)?];
    let (ends, seen) = (cx.memory(0, 64)?, cx.memory(0, 64)?);
    let graph = prepare(
        cx,
        &[
            GraphNode::new(fill(&all, 0), &[]),
            GraphNode::new(fill(&left, 1), &[0]),
            GraphNode::new(fill(&right, 2), &[0]),
            GraphNode::new(copy(&all, &ends)?, &[1, 2]),
            GraphNode::new(fill(&all, 9), &[3]),
            GraphNode::new(copy(&ends, &seen)?, &[3]),
        ],
    )?;
    let lane = cx.lane(0)?;
    for _ in 0..20 {
        lane.run(&[Op::Replay(&graph)])?;
        let expected: Vec<u8> = [[1; 32], [2; 32]].concat();
        assert_eq!(cx.download(0, &seen)?, expected);
        assert_eq!(cx.download(0, &all)?, [9; 64]);
    }
    Ok(())
}

fn an_edge_that_is_named_twice_is_one(cx: &Context) -> Verdict {
    let memory = cx.memory(0, 64)?;
    let nodes = [
        GraphNode::new(fill(&memory, 1), &[]),
        GraphNode::new(fill(&memory, 2), &[0, 0]),
        GraphNode::new(fill(&memory, 3), &[1, 0, 1]),
    ];
    let graph = prepare(cx, &nodes)?;
    cx.lane(0)?.run(&[Op::Replay(&graph)])?;
    assert_eq!(cx.download(0, &memory)?, [3; 64]);
    Ok(())
}

fn a_join_stands_for_many_nodes(cx: &Context) -> Verdict {
    let (all, seen) = (cx.memory(0, 64)?, cx.memory(0, 64)?);
    let mut nodes = Vec::new();
    for part in 0..8 {
        nodes.push(GraphNode::new(fill(&all.slice(8 * part..8 * part + 8)?, 1), &[]));
    }
    nodes.push(GraphNode::new(GraphOp::Join, &[0, 1, 2, 3, 4, 5, 6, 7]));
    for part in 0..8 {
        // Each reads what another has written.
        let from = (part + 3) % 8;
        let op = copy(&all.slice(8 * from..8 * from + 8)?, &seen.slice(8 * part..8 * part + 8)?)?;
        nodes.push(GraphNode::new(op, &[8]));
    }
    nodes.push(GraphNode::new(GraphOp::Join, &[9, 10, 11, 12, 13, 14, 15, 16]));
    nodes.push(GraphNode::new(fill(&all, 7), &[17]));
    let graph = prepare(cx, &nodes)?;
    let lane = cx.lane(0)?;
    for _ in 0..3 {
        lane.run(&[Op::Replay(&graph)])?;
        assert_eq!(cx.download(0, &seen)?, [1; 64]);
        assert_eq!(cx.download(0, &all)?, [7; 64]);
    }
    Ok(())
}

fn a_long_chain_is_one_submission(cx: &Context) -> Verdict {
    let (a, b) = (cx.memory(0, 4)?, cx.memory(0, 4)?);
    let (there, back) = (increment(cx, &a, &b)?, increment(cx, &b, &a)?);
    let mut nodes = Vec::new();
    for step in 0..500_usize {
        let op = if step.is_multiple_of(2) { there.clone() } else { back.clone() };
        nodes.push(GraphNode::new(op, &step.checked_sub(1).map_or(vec![], |before| vec![before])));
    }
    let graph = prepare(cx, &nodes)?;
    cx.lane(0)?.run(&[Op::Replay(&graph)])?;
    assert_eq!(cx.download_words(0, &a)?, [500]);
    Ok(())
}

fn operands_change_between_replays(cx: &Context) -> Verdict {
    let sources = [cx.upload(0, &[1; 32])?, cx.upload(0, &[2; 32])?, cx.upload(0, &[3; 16])?];
    let targets = [cx.memory(0, 32)?, cx.memory(0, 32)?, cx.memory(0, 16)?];
    let sum = cx.memory(0, 32)?;
    let mut graph = prepare(
        cx,
        &[
            GraphNode::new(copy(&sources[0], &targets[0])?, &[]),
            GraphNode::new(increment(cx, &targets[0], &sum)?, &[0]),
            GraphNode::new(fill(&targets[0], 7), &[1]),
        ],
    )?;
    let lane = cx.lane(0)?;
    for (source, target) in sources.iter().zip(&targets) {
        graph.set(0, &Op::Copy(CopyRegion::new(source, target)?))?;
        increment(cx, target, &sum)?.with(|op| graph.set(1, op))?;
        graph.set(2, &Op::Fill(FillRegion::words(target, 0x0102_0304)?))?;
        lane.run(&[Op::Replay(&graph)])?;
        let first = cx.download(0, source)?[0];
        let words = usize::try_from(source.size() / 4)?;
        let expected = vec![u32::from_le_bytes([first; 4]) + 1; words];
        assert_eq!(cx.download_words(0, &sum)?[..words], expected);
        assert_eq!(cx.download_words(0, target)?, vec![0x0102_0304; words]);
    }
    Ok(())
}

/// Held back by a gate, the first replay must not see what the second was given.
fn a_submission_keeps_the_operands_it_had(cx: &Context) -> Verdict {
    let [first, second] = [cx.memory(0, 16)?, cx.memory(0, 16)?];
    let mut graph = prepare(cx, &[GraphNode::new(fill(&first, 5), &[])])?;
    let (lane, gate) = (cx.lane(0)?, gate(cx.device(0))?);
    lane.submit(std::slice::from_ref(&gate), &[Op::Replay(&graph)])?;
    graph.set(0, &Op::Fill(FillRegion::bytes(&second, 6)))?;
    let (_, last) = lane.submit(&[], &[Op::Replay(&graph)])?;
    gate.semaphore.signal(gate.value)?;
    last.wait(PATIENCE)?;
    assert_eq!(cx.download(0, &first)?, [5; 16]);
    assert_eq!(cx.download(0, &second)?, [6; 16]);
    Ok(())
}

fn clones_have_operands_of_their_own(cx: &Context) -> Verdict {
    let [first, second] = [cx.memory(0, 16)?, cx.memory(0, 16)?];
    let graph = prepare(cx, &[GraphNode::new(fill(&first, 5), &[])])?;
    let mut other = graph.clone();
    other.set(0, &Op::Fill(FillRegion::bytes(&second, 6)))?;
    let lane = cx.lane(0)?;
    for _ in 0..5 {
        lane.run(&[Op::Replay(&graph), Op::Replay(&other)])?;
        assert_eq!((cx.download(0, &first)?, cx.download(0, &second)?), (vec![5; 16], vec![6; 16]));
        let clear = [Op::Fill(FillRegion::bytes(&first, 0)), Op::Fill(FillRegion::bytes(&second, 0))];
        lane.run(&clear)?;
    }
    Ok(())
}

fn a_replay_keeps_its_place_in_the_queue(cx: &Context) -> Verdict {
    let [a, b, c] = [cx.upload(0, &[1; 16])?, cx.memory(0, 16)?, cx.memory(0, 16)?];
    let graph = prepare(cx, &[GraphNode::new(copy(&a, &b)?, &[])])?;
    let lane = cx.lane(0)?;
    let ops = [
        Op::Fill(FillRegion::bytes(&a, 2)),
        Op::Replay(&graph),
        Op::Copy(CopyRegion::new(&b, &c)?),
        Op::Fill(FillRegion::bytes(&b, 3)),
    ];
    lane.run(&ops)?;
    assert_eq!(cx.download(0, &c)?, [2; 16]);
    assert_eq!(cx.download(0, &b)?, [3; 16]);
    Ok(())
}

fn lives_while_a_replay_needs_it(cx: &Context) -> Verdict {
    let (lane, gate) = (cx.lane(0)?, gate(cx.device(0))?);
    let target = cx.memory(0, 1 << 16)?;
    let point = {
        let source = cx.upload(0, &[4; 1 << 16])?;
        let graph = prepare(cx, &[GraphNode::new(copy(&source, &target)?, &[])])?;
        lane.submit(std::slice::from_ref(&gate), &[Op::Replay(&graph)])?.1
    };
    // What is allocated now must not get the memory that the replay still reads.
    let _other = cx.upload(0, &[8; 1 << 16])?;
    gate.semaphore.signal(gate.value)?;
    point.wait(PATIENCE)?;
    assert!(cx.download(0, &target)?.iter().all(|&byte| byte == 4));
    Ok(())
}

fn wrong_nodes_are_named(cx: &Context) -> Verdict {
    let memory = cx.memory(0, 16)?;
    let device = cx.device(0).as_ref();
    for after in [1, 2, 7] {
        let nodes = [GraphNode::new(fill(&memory, 1), &[]), GraphNode::new(fill(&memory, 2), &[after])];
        let error = refusal(PreparedGraph::new(device, &nodes))?;
        assert!(matches!(error, GraphError::Edge { node: 1, after: from } if from == after), "{error}");
    }
    let mut graph = prepare(cx, &[GraphNode::new(fill(&memory, 1), &[])])?;
    let other = memory.slice(0..8)?;
    let wrong = refusal(graph.set(0, &Op::Copy(CopyRegion::new(&other, &memory.slice(8..16)?)?)))?;
    assert!(matches!(wrong, GraphError::OtherKind { node: 0, expected: "fill", actual: "copy" }), "{wrong}");
    let wrong = refusal(graph.set(3, &Op::Fill(FillRegion::bytes(&memory, 1))))?;
    assert!(matches!(wrong, GraphError::NoSuchNode { node: 3, node_count: 1 }), "{wrong}");
    let nested = [GraphNode::new(&Op::Replay(&graph), &[])];
    let wrong = refusal(PreparedGraph::new(device, &nested))?;
    assert!(matches!(wrong, GraphError::Node { node: 0, .. }), "{wrong}");
    // Nothing of this broke the graph.
    cx.lane(0)?.run(&[Op::Replay(&graph)])?;
    assert_eq!(cx.download(0, &memory)?, [1; 16]);
    Ok(())
}

fn another_device_refuses_it(cx: &Context) -> Verdict {
    let graph = prepare(cx, &[GraphNode::new(fill(&cx.memory(0, 16)?, 1), &[])])?;
    let owner = cx.infos[0].id;
    let refusal = refusal(cx.lane(1)?.submit(&[], &[Op::Replay(&graph)]))?;
    assert!(
        matches!(refusal, SubmitError::Foreign { what: "graph", owner: named, .. } if named == owner),
        "{refusal}"
    );
    Ok(())
}
