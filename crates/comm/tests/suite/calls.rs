//! Calls do what they say, in queues, waited for, and in graphs.

use std::sync::Arc;

use warpweft_comm::{CommConfig, EngineKind};
use warpweft_core_types::{
    BufferDesc, BufferView, CollectiveOp, CopyRegion, DType, ErrorClass, GraphNode, Op, PreparedGraph,
    ReduceOp, SemaphorePoint, Submission,
};

use crate::rig::{ENGINES, PATIENCE, Place, only, ranks, read, told};

#[test]
fn a_call_in_a_queue_comes_behind_what_is_there_and_before_what_follows() {
    for engine in ENGINES {
        ranks(3, &only(engine), |place| {
            let queue = place.queue();
            let (given, operand) = (place.numbers(&[place.rank() + 1; 5]), place.numbers(&[0; 5]));
            let taken = place.numbers(&[0; 5]);
            let first = Op::Copy(CopyRegion::new(&given, &operand).unwrap());
            queue.submit(&Submission { ops: &[first], ..Submission::default() }).unwrap();
            let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &operand, &operand).unwrap();
            call.on(&queue).unwrap();
            let done = SemaphorePoint::new(&place.device.create_semaphore(0).unwrap(), 1);
            let last = Op::Copy(CopyRegion::new(&operand, &taken).unwrap());
            let signals = std::slice::from_ref(&done);
            queue.submit(&Submission { ops: &[last], signals, ..Submission::default() }).unwrap();
            done.wait(PATIENCE).unwrap();
            assert_eq!(read(&taken), [6; 5], "{engine}");
        });
    }
}

#[test]
fn calls_of_one_communicator_in_several_queues_are_in_order() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let queues = [place.queue(), place.queue()];
            let word = place.numbers(&[1]);
            let mut last = None;
            for turn in 0..20 {
                let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
                // The next one reads what this one writes.
                last = Some(call.on(&queues[turn % 2]).unwrap());
                if engine == EngineKind::Planned {
                    last.as_ref().unwrap().wait(PATIENCE).unwrap();
                }
            }
            last.unwrap().wait(PATIENCE).unwrap();
            assert_eq!(read(&word), [1 << 20], "{engine}");
        });
    }
}

#[test]
fn every_call_has_a_method() {
    for engine in ENGINES {
        ranks(3, &only(engine), |place| methods(&place));
    }
}

fn methods(place: &Place) {
    let (comm, rank) = (&place.comm, place.rank());
    let own = place.numbers(&[10 + rank]);
    let (all, one) = (place.numbers(&[0; 3]), place.numbers(&[0]));
    let parts = place.numbers(&[100 * rank, 100 * rank + 1, 100 * rank + 2]);
    let is_root = rank == 1;

    comm.all_gather(DType::U32, &own, &all).unwrap().wait(PATIENCE).unwrap();
    assert_eq!(read(&all), [10, 11, 12]);
    comm.reduce_scatter(ReduceOp::Sum, DType::U32, &parts, &one).unwrap().wait(PATIENCE).unwrap();
    assert_eq!(read(&one), [300 + 3 * rank]);
    comm.broadcast(1, DType::U32, is_root.then_some(&own), &one).unwrap().wait(PATIENCE).unwrap();
    assert_eq!(read(&one), [11]);
    comm.reduce(1, ReduceOp::Max, DType::U32, &own, is_root.then_some(&one)).unwrap().wait(PATIENCE).unwrap();
    assert_eq!(read(&one), [if is_root { 12 } else { 11 }]);
    comm.gather(1, DType::U32, &own, is_root.then_some(&all)).unwrap().wait(PATIENCE).unwrap();
    assert_eq!(read(&all), [10, 11, 12]);
    comm.scatter(1, DType::U32, is_root.then_some(&parts), &one).unwrap().wait(PATIENCE).unwrap();
    assert_eq!(read(&one), [100 + rank]);
    comm.all_to_all(DType::U32, &parts, &all).unwrap().wait(PATIENCE).unwrap();
    assert_eq!(read(&all), [rank, 100 + rank, 200 + rank]);
    let (next, before) = ((rank + 1) % 3, (rank + 2) % 3);
    comm.send_recv(DType::U32, (next, &own), (before, &one)).unwrap().wait(PATIENCE).unwrap();
    assert_eq!(read(&one), [10 + before]);
    comm.barrier(PATIENCE).unwrap();
    comm.queue_barrier(&place.queue()).unwrap().wait(PATIENCE).unwrap();
}

#[test]
fn parts_of_any_length_go_to_all() {
    for engine in ENGINES {
        ranks(3, &only(engine), |place| {
            let (comm, rank) = (&place.comm, place.rank());
            // Rank r gives s words to rank s, each of which says who gave it.
            let src = place.numbers(&[rank; 3]);
            let dst = place.numbers(&[9; 6]);
            let given = comm.parts(&src, &[0..0, 0..4, 4..12]).unwrap();
            let word = u64::from(rank) * 4;
            let taken = comm.parts(&dst, &[0..word, word..2 * word, 2 * word..3 * word]).unwrap();
            comm.all_to_all_v(DType::U32, &given, &taken).unwrap().wait(PATIENCE).unwrap();
            let expected = (0..3).flat_map(|from| vec![from; rank as usize]);
            assert_eq!(read(&dst)[..3 * rank as usize], expected.collect::<Vec<u32>>(), "{engine}");
            let short = comm.all_to_all_v(DType::U32, &given[..1], &taken).unwrap_err();
            assert_eq!(short.class(), ErrorClass::Unsupported);
            // Rank 0 takes nothing, and is not to leave while others do.
            comm.barrier(PATIENCE).unwrap();
        });
    }
}

#[test]
fn one_rank_copies_and_loads_nothing() {
    ranks(1, &CommConfig::default(), |place| {
        let (src, dst) = (place.numbers(&[7, 8]), place.numbers(&[0, 0]));
        let comm = &place.comm;
        assert_eq!(comm.engines().next(), Some(EngineKind::Solo));
        comm.all_reduce(ReduceOp::Prod, DType::U32, &src, &dst).unwrap().wait(PATIENCE).unwrap();
        assert_eq!(read(&dst), [7, 8]);
        let device = BufferView::whole(place.device.allocate(&BufferDesc::device(8)).unwrap());
        comm.all_gather(DType::U8, &src, &device)
            .unwrap()
            .on(&place.queue())
            .unwrap()
            .wait(PATIENCE)
            .unwrap();
        comm.send_recv(DType::U8, (0, &device), (0, &dst)).unwrap().wait(PATIENCE).unwrap();
        assert_eq!(read(&dst), [7, 8]);
        let factor = comm.engine_for(CollectiveOp::AllReduce(ReduceOp::PremulSum(2.0)), DType::F32);
        assert_eq!(factor.unwrap(), EngineKind::Host);
        comm.queue_barrier(&place.queue()).unwrap().wait(PATIENCE).unwrap();
    });
}

#[test]
fn a_graph_is_replayed_and_remembered_as_one_call() {
    ranks(2, &only(EngineKind::Host), |place| {
        let (comm, queue) = (&place.comm, place.queue());
        let word = place.numbers(&[1]);
        let nodes = comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().nodes().unwrap();
        let nodes = [GraphNode::new(nodes[0].clone(), &[]), GraphNode::new(nodes[0].clone(), &[0])];
        let graph = PreparedGraph::new(place.device.as_ref(), &nodes).unwrap();
        for _ in 0..3 {
            comm.replay(&graph, &queue).unwrap();
        }
        comm.replay(&graph, &queue).unwrap().wait(PATIENCE).unwrap();
        assert_eq!(read(&word), [1 << 8]);
        let record = comm.flight();
        assert_eq!(record.calls.len(), 4);
        assert!(record.calls[0].call.contains("graph with 2 calls"), "{:?}", record.calls[0]);
        assert!(record.calls.iter().all(|call| call.over_us.is_some()), "{record:?}");
    });
}

#[test]
fn what_an_engine_cannot_do_is_unsupported_before_anything_is_done() {
    ranks(2, &only(EngineKind::Planned), |place| {
        let (src, dst) = (place.bytes(&[0; 16]), place.bytes(&[0; 16]));
        let call = place.comm.all_reduce(ReduceOp::Sum, DType::F64, &src, &dst).unwrap();
        let (class, text) = told(call.wait(PATIENCE));
        assert_eq!(class, ErrorClass::Unsupported, "{text}");
        assert!(text.contains("all_reduce sum of f64"), "{text}");
        let gather = place.comm.all_reduce(ReduceOp::Sum, DType::F32, &src, &dst).unwrap();
        assert_eq!(told(gather.nodes()).0, ErrorClass::Unsupported);
        // Whoever leaves early makes calls of the other a lost cause.
        place.comm.barrier(PATIENCE).unwrap();
    });
}

#[test]
fn bad_operands_and_queues_are_refused() {
    ranks(2, &CommConfig::default(), |place| {
        let comm = &place.comm;
        let (src, dst) = (place.numbers(&[0; 4]), place.numbers(&[0; 3]));
        assert!(comm.all_reduce(ReduceOp::Sum, DType::U32, &src, &dst).is_err());
        assert!(comm.all_reduce(ReduceOp::Xor, DType::F32, &src, &src).is_err());
        assert!(comm.broadcast(2, DType::U8, None, &dst).is_err());
        let shifted = [src.slice(0..12).unwrap(), src.slice(4..16).unwrap()];
        assert!(comm.all_reduce(ReduceOp::Sum, DType::U32, &shifted[0], &shifted[1]).is_err());
        assert!(comm.send_recv(DType::U8, (0, &shifted[0]), (0, &shifted[1])).is_err());
        let (low, high, peer) = (src.slice(0..8).unwrap(), src.slice(8..16).unwrap(), 1 - place.rank());
        let recv = |view| comm.recv(peer, DType::U8, view).unwrap();
        assert!(recv(&low).and(recv(&low)).wait(PATIENCE).is_err());
        assert!(recv(&low).and(recv(&high)).and(comm.send(peer, DType::U8, &src).unwrap()).nodes().is_err());
        assert!(comm.parts(&src, &[std::ops::Range { start: 8, end: 4 }]).is_err());
        let other = warpweft_host::HostBackend::with_devices(2).unwrap();
        let other = warpweft_core_types::Backend::open(&other, 1 - place.rank(), Default::default()).unwrap();
        let queue = other.create_queue(&Default::default()).unwrap();
        let call = comm.all_reduce(ReduceOp::Sum, DType::U32, &src, &src).unwrap();
        let (class, text) = told(call.on(&queue));
        assert_eq!(class, ErrorClass::Usage, "{text}");
        // Nothing of this had an effect.
        let word = place.numbers(&[1]);
        comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().wait(PATIENCE).unwrap();
        assert_eq!(read(&word), [2]);
    });
}

#[test]
fn results_are_there_for_other_queues_and_futures() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let (word, copy) = (place.numbers(&[3]), place.numbers(&[0]));
            let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
            let enqueued = call.on(&place.queue()).unwrap();
            let waits: Vec<_> = enqueued.point().unwrap().into_iter().collect();
            let done = SemaphorePoint::new(&place.device.create_semaphore(0).unwrap(), 1);
            let ops = [Op::Copy(CopyRegion::new(&word, &copy).unwrap())];
            let signals = std::slice::from_ref(&done);
            place.queue().submit(&Submission { waits: &waits, ops: &ops, signals }).unwrap();
            done.wait(PATIENCE).unwrap();
            assert_eq!(read(&copy), [6]);
            enqueued.wait(PATIENCE).unwrap();
            assert!(enqueued.point().unwrap().is_none());
        });
    }
}

#[test]
fn the_device_s_own_memory_serves_too() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let device =
                |bytes| BufferView::whole(place.device.allocate(&BufferDesc::device(bytes)).unwrap());
            let (memory, window) = (device(1 << 20), place.numbers(&vec![5; 1 << 18]));
            let queue = place.queue();
            let up = Op::Copy(CopyRegion::new(&window, &memory).unwrap());
            queue.submit(&Submission { ops: &[up], ..Submission::default() }).unwrap();
            place.comm.all_reduce(ReduceOp::Sum, DType::U32, &memory, &memory).unwrap().on(&queue).unwrap();
            let done = SemaphorePoint::new(&place.device.create_semaphore(0).unwrap(), 1);
            let down = Op::Copy(CopyRegion::new(&memory, &window).unwrap());
            let signals = std::slice::from_ref(&done);
            queue.submit(&Submission { ops: &[down], signals, ..Submission::default() }).unwrap();
            done.wait(PATIENCE).unwrap();
            assert!(read(&window).iter().all(|word| *word == 10), "{engine}");
            assert_eq!(Arc::strong_count(memory.buffer()).min(1), 1);
        });
    }
}
