//! Records tell what was called, the same on all ranks.

use std::{thread, time::Duration};

use warpweft_comm::{CommConfig, Communicator, EngineKind, Exchange, FlightConfig, FlightRecord, Verdict};
use warpweft_core_types::{
    CopyRegion, DType, ErrorClass, FillRegion, GraphNode, Op, OwnedOp, PreparedGraph, ReduceOp,
};

use crate::rig::{ENGINES, PATIENCE, only, ranks, read, told, until_failed};

#[test]
fn a_call_has_one_number_whether_it_is_waited_for_or_enqueued() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let (word, queue) = (place.numbers(&[1]), place.queue());
            for turn in 0..4 {
                let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
                if turn % 2 == place.rank() {
                    call.wait(PATIENCE).unwrap();
                } else {
                    call.on(&queue).unwrap().wait(PATIENCE).unwrap();
                }
            }
            assert_eq!(read(&word), [16]);
            let numbers: Vec<_> = place.comm.flight().calls.iter().map(|call| call.number).collect();
            assert_eq!(numbers, [Some(1), Some(2), Some(3), Some(4)], "{engine}");
        });
    }
}

#[test]
fn records_of_splits_and_of_what_formed_anew_stand_beside_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let flight = FlightConfig { folder: Some(folder.path().to_owned()), ..FlightConfig::default() };
    let ids = ranks(3, &CommConfig { flight, ..CommConfig::default() }, |place| {
        let comm = &place.comm;
        let halves = comm.split(Some(place.rank() / 2), 0, PATIENCE).unwrap().unwrap();
        let end = |comm: &Communicator| {
            let ended = comm.abort("enough");
            until_failed(comm);
            ended.unwrap();
        };
        end(&halves);
        end(comm);
        let anew = comm.shrink(PATIENCE).unwrap();
        end(&anew);
        let [halves, whole, anew] = [halves.id(), comm.id(), anew.id()].map(Clone::clone);
        assert_eq!((&whole.run, whole.epoch + 1), (&anew.run, anew.epoch));
        (halves, whole, anew)
    });
    let records = FlightRecord::read_all(folder.path()).unwrap();
    assert_eq!(records.len(), 9, "{records:?}");
    let of =
        |id| FlightRecord::by_communicator(&records).find(|records| records[0].communicator == id).unwrap();
    let (halves, whole, anew) = ids[2].clone();
    assert_eq!([of(halves.clone()).len(), of(whole.clone()).len(), of(anew.clone()).len()], [1, 3, 3]);
    assert_eq!(of(ids[0].0.clone()).len(), 2);
    assert_eq!(of(halves)[0].origin, format!("split of {whole}, colour 1, rank 2 there"));
    assert_eq!(of(anew)[2].origin, format!("formed anew from {whole}, rank 2 there"));
}

#[test]
fn a_send_whose_partner_never_came_is_named() {
    for engine in ENGINES {
        let folder = tempfile::tempdir().unwrap();
        let flight = FlightConfig { folder: Some(folder.path().to_owned()), ..FlightConfig::default() };
        let config = CommConfig { timeout: Duration::from_secs(1), flight, ..only(engine) };
        ranks(3, &config, |place| {
            let (comm, queue) = (&place.comm, place.queue());
            let large = place.numbers(&vec![1; 1 << 20]);
            let peer = (place.rank() + 1) % 2;
            // Both ways once, so that the second is the one that meets nobody.
            if place.rank() < 2 {
                let [give, take] = [0..2_u64 << 20, 2 << 20..4 << 20].map(|part| large.slice(part).unwrap());
                let both = comm.send_recv(DType::U32, (peer, &give), (peer, &take)).unwrap();
                both.on(&queue).unwrap().wait(PATIENCE).unwrap();
            }
            if place.rank() == 0 {
                let _refused = comm.send(1, DType::U32, &large).unwrap().on(&queue);
            } else {
                let word = place.numbers(&[1]);
                let _refused = comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().on(&queue);
            }
            until_failed(comm);
        });
        let verdict = Verdict::of(&FlightRecord::read_all(folder.path()).unwrap());
        let Verdict::Unmet { rank: 0, call, exchange } = verdict else { panic!("{engine}: {verdict:?}") };
        assert_eq!(exchange, Exchange { peer: 1, sends: true, number: 2 });
        assert!(call.contains("send to rank 1 of u32, 4194304 bytes"), "{call}");
    }
}

#[test]
fn a_record_says_from_where_on_numbers_may_differ() {
    ranks(2, &only(EngineKind::Host), |place| {
        let (word, queue) = (place.numbers(&[1]), place.queue());
        let call = |op| place.comm.all_reduce(op, DType::U32, &word, &word).unwrap();
        call(ReduceOp::Sum).on(&queue).unwrap().wait(PATIENCE).unwrap();
        assert_eq!(place.comm.flight().numbers_agree_until, None);
        let odd = if place.rank() == 0 { ReduceOp::Sum } else { ReduceOp::Max };
        let differs = call(odd).on(&queue);
        let _behind = call(ReduceOp::Sum).on(&queue);
        assert_eq!(told(differs.and_then(|call| call.wait(PATIENCE))).0, ErrorClass::Usage);
        assert_eq!(place.comm.flight().numbers_agree_until, Some(2));
        call(ReduceOp::Sum).on(&place.queue()).unwrap().wait(PATIENCE).unwrap();
        place.comm.barrier(PATIENCE).unwrap();
    });
}

#[test]
fn replays_are_compared_by_the_calls_in_their_graphs() {
    ranks(2, &CommConfig { validate: true, ..only(EngineKind::Host) }, |place| {
        let (comm, queue, rank) = (&place.comm, place.queue(), place.rank());
        let (word, other, passed) = (place.numbers(&[1]), place.numbers(&[5]), place.numbers(&[7]));
        let sum = || comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().nodes().unwrap();
        let pass = if rank == 0 {
            comm.send(1, DType::U32, &passed).unwrap().nodes().unwrap()
        } else {
            comm.recv(0, DType::U32, &passed).unwrap().nodes().unwrap()
        };
        let prepare = |ops: Vec<_>| {
            let chained = ops.into_iter().enumerate().map(|(at, op)| {
                let after: Vec<usize> = at.checked_sub(1).into_iter().collect();
                GraphNode::new(op, &after)
            });
            PreparedGraph::new(place.device.as_ref(), &chained.collect::<Vec<_>>()).unwrap()
        };
        // What else is in them is each rank's own affair: a fill and a copy more on one, a send against a receive.
        let mut ops: Vec<_> = sum().into_iter().chain(pass).collect();
        if rank == 1 {
            ops.push(OwnedOp::from(&Op::Fill(FillRegion::bytes(&other, 0))).into());
            ops.push(OwnedOp::from(&Op::Copy(CopyRegion::new(&word, &other).unwrap())).into());
        }
        let graph = prepare(ops);
        comm.replay(&graph, &queue).unwrap().wait(PATIENCE).unwrap();
        assert_eq!((read(&word), read(&other)), (vec![2], vec![if rank == 1 { 2 } else { 5 }]));
        assert_eq!(comm.flight().calls[0].call, "replay of a graph with 1 call");
        comm.replay(&graph.clone(), &queue).unwrap().wait(PATIENCE).unwrap();
        comm.replay(&prepare((0..2).flat_map(|_| sum()).collect()), &queue).unwrap().wait(PATIENCE).unwrap();
        let texts: Vec<_> = comm.flight().calls.into_iter().skip(1).map(|call| call.call).collect();
        assert_eq!(texts, ["replay of a graph with 1 call", "replay of a graph with 2 calls"]);
        let count = if rank == 0 { 1 } else { 2 };
        let (class, text) = told(comm.replay(&prepare((0..count).flat_map(|_| sum()).collect()), &queue));
        assert_eq!(class, ErrorClass::Usage, "{text}");
        assert!(text.contains("with 1 call") && text.contains("with 2 calls"), "{text}");
    });
}

#[test]
fn roots_and_others_call_the_same() {
    for engine in ENGINES {
        let texts = ranks(3, &CommConfig { validate: true, ..only(engine) }, |place| {
            let (comm, is_root) = (&place.comm, place.rank() == 1);
            let (own, all) = (place.numbers(&[place.rank()]), place.numbers(&[0, 1, 2]));
            comm.gather(1, DType::U32, &own, is_root.then_some(&all)).unwrap().wait(PATIENCE).unwrap();
            comm.scatter(1, DType::U32, is_root.then_some(&all), &own).unwrap().wait(PATIENCE).unwrap();
            assert_eq!(read(&own), [place.rank()]);
            comm.flight().calls.into_iter().map(|call| call.call).collect::<Vec<_>>()
        });
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    }
}

#[test]
fn groups_are_compared_by_what_all_ranks_call_in_them() {
    for engine in ENGINES {
        ranks(3, &CommConfig { validate: true, ..only(engine) }, |place| {
            let (comm, rank) = (&place.comm, place.rank());
            let (own, sum, passed) = (place.numbers(&[rank]), place.numbers(&[1]), place.numbers(&[9]));
            let all = || comm.all_reduce(ReduceOp::Sum, DType::U32, &sum, &sum).unwrap();
            // What is passed on is no other's affair, wherever it stands in the group.
            match rank {
                0 => comm.send(1, DType::U32, &own).unwrap().and(all()).wait(PATIENCE).unwrap(),
                1 => all().and(comm.recv(0, DType::U32, &passed).unwrap()).wait(PATIENCE).unwrap(),
                _ => all().wait(PATIENCE).unwrap(),
            }
            assert_eq!((read(&sum), read(&passed)), (vec![3], vec![if rank == 1 { 0 } else { 9 }]));
            // The second of a group counts as well.
            let odd = if rank == 2 { ReduceOp::Max } else { ReduceOp::Min };
            let other = comm.all_reduce(odd, DType::U32, &own, &own).unwrap();
            let (class, text) = told(all().and(other).wait(PATIENCE));
            assert_eq!(class, ErrorClass::Usage, "{text}");
            assert!(text.contains("max") && text.contains("min"), "{text}");
        });
    }
}

#[test]
fn calls_end_in_time_however_few_are_remembered() {
    for capacity in [0, 1, usize::MAX] {
        let flight = FlightConfig { capacity, folder: None };
        let timeout = Duration::from_millis(300);
        ranks(2, &CommConfig { flight, timeout, ..only(EngineKind::Planned) }, |place| {
            let (word, queue) = (place.numbers(&[1]), place.queue());
            if place.rank() == 1 {
                return until_failed(&place.comm);
            }
            // New calls do not make the first one younger.
            let calls = (0..1000).map(|_| {
                thread::yield_now();
                place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().on(&queue)
            });
            let _refused = calls.take_while(Result::is_ok).count();
            until_failed(&place.comm);
        });
    }
    let flight = FlightConfig { capacity: 2, folder: None };
    ranks(2, &CommConfig { flight, ..only(EngineKind::Host) }, |place| {
        let word = place.numbers(&[1]);
        for _ in 0..5 {
            place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().wait(PATIENCE).unwrap();
        }
        let numbers: Vec<_> = place.comm.flight().calls.iter().map(|call| call.number).collect();
        assert_eq!(numbers, [Some(4), Some(5)]);
    });
}
