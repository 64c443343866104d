//! Graphs whose operands change while submissions are held or under way.

use warpweft_core_types::{
    Arg, BufferDesc, BufferView, CopyRegion, FillRegion, GraphError, GraphNode, Launch, Op, PreparedGraph,
    SemaphorePoint, Submission,
};
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Lane, Outcome, PATIENCE, backend, blocking, kernel, number};

fn bytes(lane: &mut Lane, view: &BufferView) -> Outcome<Vec<u8>> {
    let window = lane.memory(BufferDesc::host_visible(view.size()))?;
    lane.submit(&[Op::Copy(CopyRegion::new(view, &window)?)])?.wait(PATIENCE)?;
    let mut bytes = vec![0; usize::try_from(view.size())?];
    window.read(&mut bytes)?;
    Ok(bytes)
}

/// Each of them finds the operands that the graph had when it was submitted, in whatever order they run.
#[test]
fn held_submissions_keep_their_operands() -> Outcome {
    let backend = backend(&StandIn::load()?);
    let mut lanes = [Lane::open(&backend, 0)?, Lane::open(&backend, 0)?];
    let all = lanes[0].memory(BufferDesc::device(32 * 64))?;
    let parts: Vec<BufferView> =
        (0..32).map(|part| all.slice(part * 64..part * 64 + 64)).collect::<Result<_, _>>()?;
    let number = kernel(&lanes[0].device, &number())?;
    let base = |round: usize| u32::try_from(round * 100).unwrap().to_le_bytes();
    let first = base(0);
    let args = [Arg::Buffer(&parts[0]), Arg::Scalar(&first)];
    let fill = Op::Fill(FillRegion::bytes(&parts[0], 0));
    let launch = Op::Launch(Launch::new(&number, [8, 1, 1], &args)?);
    let nodes = [GraphNode::new(&fill, &[]), GraphNode::new(&launch, &[0])];
    let mut graph = PreparedGraph::new(lanes[0].device.as_ref(), &nodes)?;
    let gate = SemaphorePoint::new(&lanes[0].device.create_semaphore(0)?, 1);
    let mut points = Vec::new();
    for (round, part) in parts.iter().enumerate() {
        let base = base(round);
        let args = [Arg::Buffer(part), Arg::Scalar(&base)];
        graph.set(0, &Op::Fill(FillRegion::bytes(part, round.to_le_bytes()[0])))?;
        graph.set(1, &Op::Launch(Launch::new(&number, [8, 1, 1], &args)?))?;
        let lane = &mut lanes[round % 2];
        let point = lane.next.clone();
        lane.next.value += 1;
        // The odd ones are held, the even ones run at once.
        let waits = if round % 2 == 0 { &[][..] } else { std::slice::from_ref(&gate) };
        let signals = std::slice::from_ref(&point);
        lane.queue.submit(&Submission { waits, ops: &[Op::Replay(&graph)], signals })?;
        points.push(point);
    }
    drop(graph);
    gate.semaphore.signal(1)?;
    points.iter().try_for_each(|point| point.wait(PATIENCE))?;
    for (round, part) in parts.iter().enumerate() {
        let found = bytes(&mut lanes[0], part)?;
        let words: Vec<u32> = found.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let first = u32::try_from(round * 100)?;
        assert_eq!(words[..8], (first..first + 8).collect::<Vec<u32>>(), "round {round}");
        assert_eq!(found[32..], [round.to_le_bytes()[0]; 32], "round {round}");
    }
    Ok(())
}

/// A launch under way keeps what it had, and the next one does not overtake it.
#[test]
fn a_replay_under_way_keeps_its_operands() -> Outcome {
    let backend = backend(&StandIn::load()?);
    let mut lanes = [Lane::open(&backend, 0)?, Lane::open(&backend, 0)?];
    let stays = kernel(&lanes[0].device, &blocking())?;
    let words =
        [lanes[0].memory(BufferDesc::host_visible(4))?, lanes[0].memory(BufferDesc::host_visible(4))?];
    let targets = [lanes[0].memory(BufferDesc::device(64))?, lanes[0].memory(BufferDesc::device(64))?];
    let args = [Arg::Buffer(&words[0])];
    let (launch, fill) =
        (Op::Launch(Launch::new(&stays, [1; 3], &args)?), Op::Fill(FillRegion::bytes(&targets[0], 1)));
    let nodes = [GraphNode::new(&launch, &[]), GraphNode::new(&fill, &[0])];
    let mut graph = PreparedGraph::new(lanes[0].device.as_ref(), &nodes)?;
    let first = lanes[0].submit(&[Op::Replay(&graph)])?;
    let args = [Arg::Buffer(&words[1])];
    graph.set(0, &Op::Launch(Launch::new(&stays, [1; 3], &args)?))?;
    graph.set(1, &Op::Fill(FillRegion::bytes(&targets[1], 2)))?;
    words[1].write(&1_u32.to_le_bytes())?;
    let second = lanes[1].submit(&[Op::Replay(&graph)])?;
    assert!(!first.poll()? && !second.poll()?, "the first one waits for its word");
    words[0].write(&1_u32.to_le_bytes())?;
    first.wait(PATIENCE)?;
    second.wait(PATIENCE)?;
    assert_eq!(bytes(&mut lanes[0], &targets[0])?, [1; 64]);
    assert_eq!(bytes(&mut lanes[0], &targets[1])?, [2; 64]);
    Ok(())
}

/// The driver ties a node to the kind of its memory. Whoever sets another kind is told, and nothing breaks.
#[test]
fn a_node_keeps_to_the_kind_of_its_memory() -> Outcome {
    let backend = backend(&StandIn::load()?);
    let mut lane = Lane::open(&backend, 0)?;
    let (memory, target) = (lane.memory(BufferDesc::device(64))?, lane.memory(BufferDesc::device(64))?);
    let window = lane.memory(BufferDesc::host_visible(64))?;
    let copy = Op::Copy(CopyRegion::new(&memory, &target)?);
    let fill = Op::Fill(FillRegion::bytes(&memory, 7));
    let nodes = [GraphNode::new(&fill, &[]), GraphNode::new(&copy, &[0])];
    let mut graph = PreparedGraph::new(lane.device.as_ref(), &nodes)?;
    let refused = |outcome: Result<(), GraphError>, node: usize| {
        let error = outcome.unwrap_err();
        assert!(matches!(&error, GraphError::Node { node: named, .. } if *named == node), "{error}");
    };
    refused(graph.set(0, &Op::Fill(FillRegion::bytes(&window, 1))), 0);
    refused(graph.set(1, &Op::Copy(CopyRegion::new(&window, &target)?)), 1);
    refused(graph.set(1, &Op::Copy(CopyRegion::new(&memory, &window)?)), 1);
    let elsewhere = Lane::open(&backend, 1)?.memory(BufferDesc::device(64))?;
    refused(graph.set(1, &Op::Copy(CopyRegion::new(&memory, &elsewhere)?)), 1);
    lane.submit(&[Op::Replay(&graph)])?.wait(PATIENCE)?;
    assert_eq!(bytes(&mut lane, &target)?, [7; 64]);
    Ok(())
}

/// Edges of many shapes, on a driver that runs nodes in another order where it may.
#[test]
fn only_edges_order_nodes() -> Outcome {
    let backend = backend(&StandIn::load()?);
    let mut lane = Lane::open(&backend, 0)?;
    let memory = lane.memory(BufferDesc::device(64))?;
    let fill = |byte| Op::Fill(FillRegion::bytes(&memory, byte));
    // Each writes over what came before; the list of edges alone says who is last.
    let check = |lane: &mut Lane, edges: &[&[usize]], last: u8| -> Outcome {
        let nodes: Vec<GraphNode> =
            edges.iter().zip(0..).map(|(after, byte)| GraphNode::new(&fill(byte), after)).collect();
        let graph = PreparedGraph::new(lane.device.as_ref(), &nodes)?;
        lane.submit(&[Op::Replay(&graph)])?.wait(PATIENCE)?;
        assert_eq!(bytes(lane, &memory)?, [last; 64], "{edges:?}");
        Ok(())
    };
    check(&mut lane, &[&[], &[0], &[1]], 2)?;
    check(&mut lane, &[&[], &[], &[], &[0, 1, 2]], 3)?;
    check(&mut lane, &[&[], &[0], &[0], &[1, 2], &[0, 3]], 4)?;
    // Without edges the stand-in's order is its own: the first one is the last.
    check(&mut lane, &[&[], &[], &[]], 0)
}
