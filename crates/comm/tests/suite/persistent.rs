//! Calls that are made many times, and calls as futures.

use std::{thread, time::Duration};

use warpweft_bootstrap::Health;
use warpweft_comm::{CommConfig, CommError, Communicator, EngineKind, PersistentCall};
use warpweft_core_types::{
    Backend, BufferView, DType, ErrorClass, Features, QueueDesc, ReduceOp, SemaphorePoint, Submission,
};
use warpweft_host::HostBackend;

use crate::rig::{ENGINES, PATIENCE, Place, only, ranks, read, told};

fn sum(comm: &Communicator, view: &BufferView) -> PersistentCall {
    comm.all_reduce_in_place(ReduceOp::Sum, DType::U32, view).unwrap().persistent().unwrap()
}

#[test]
fn a_call_is_made_once_and_enqueued_many_times() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let queues = [place.queue(), place.queue()];
            let word = place.numbers(&[1]);
            let call = sum(&place.comm, &word);
            for turn in 0..20 {
                let made = call.enqueue(&queues[turn % 2]).unwrap();
                // The next one reads what this one writes, and the planned engine orders no queues.
                if engine == EngineKind::Planned {
                    made.wait(PATIENCE).unwrap();
                }
            }
            call.enqueue(&queues[0]).unwrap().wait(PATIENCE).unwrap();
            assert_eq!(read(&word), [1 << 21], "{engine}");
            let record = place.comm.flight();
            assert_eq!(record.calls.len(), 21);
            assert!(record.calls.iter().zip(1..).all(|(call, number)| call.number == Some(number)));
            assert_eq!(record.calls[0].call, "all_reduce sum of u32, 4 bytes");
            place.comm.barrier(PATIENCE).unwrap();
        });
    }
}

#[test]
fn operations_of_every_kind_persist_and_so_do_groups() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let (comm, queue, rank) = (&place.comm, place.queue(), place.rank());
            let (own, all) = (place.numbers(&[rank + 1]), place.numbers(&[0, 0]));
            let taken = place.numbers(&[0]);
            let gather = comm.all_gather(DType::U32, &own, &all).unwrap().persistent().unwrap();
            let peer = 1 - rank;
            let both =
                comm.send_recv(DType::U32, (peer, &own), (peer, &taken)).unwrap().persistent().unwrap();
            for turn in 1..4 {
                own.write(&(turn * (rank + 1)).to_le_bytes()).unwrap();
                gather.enqueue(&queue).unwrap();
                both.enqueue(&queue).unwrap().wait(PATIENCE).unwrap();
                assert_eq!(
                    (read(&all), read(&taken)),
                    (vec![turn, 2 * turn], vec![turn * (peer + 1)]),
                    "{engine}"
                );
                comm.barrier(PATIENCE).unwrap();
            }
            let exchanges: Vec<_> =
                comm.flight().calls.iter().flat_map(|call| call.exchanges.clone()).collect();
            assert_eq!(
                exchanges.iter().map(|exchange| exchange.number).collect::<Vec<_>>(),
                [1, 1, 2, 2, 3, 3]
            );
        });
    }
}

#[test]
fn one_rank_alone_has_persistent_calls_too() {
    let device = HostBackend::with_devices(1).unwrap().open(0, Features::empty()).unwrap();
    let group = warpweft_bootstrap::Group::alone().unwrap();
    let comm = Communicator::create(group, &device, &CommConfig::default(), PATIENCE).unwrap();
    let place = Place { comm, device };
    let (src, dst, queue) = (place.numbers(&[3, 4]), place.numbers(&[0, 0]), place.queue());
    let (low, high) = (dst.slice(0..4).unwrap(), dst.slice(4..8).unwrap());
    let [from_low, from_high] = [0..4, 4..8].map(|part| src.slice(part).unwrap());
    let gather = |from, to| place.comm.all_gather(DType::U32, from, to).unwrap();
    // Two copies that begin together.
    let both = gather(&from_low, &high).and(gather(&from_high, &low)).persistent().unwrap();
    both.enqueue(&queue).unwrap().wait(PATIENCE).unwrap();
    assert_eq!(read(&dst), [4, 3]);
    // No calls are over at once, and a queue of another device refuses them all the same.
    let nothing = place.comm.all_to_all_v(DType::U32, &[None], &[None]).unwrap().persistent().unwrap();
    nothing.enqueue(&queue).unwrap().wait(Duration::ZERO).unwrap();
    assert_eq!(place.comm.flight().calls.len(), 1);
    let foreign = HostBackend::with_devices(2).unwrap().open(1, Features::empty()).unwrap();
    let foreign = foreign.create_queue(&QueueDesc::default()).unwrap();
    assert!(matches!(nothing.enqueue(&foreign), Err(CommError::ForeignQueue { .. })));
}

#[test]
fn what_is_wrong_is_refused_before_and_what_has_ended_later() {
    for engine in ENGINES {
        ranks(2, &CommConfig { validate: true, ..only(engine) }, |place| {
            let word = place.numbers(&[1]);
            let (comm, queue) = (&place.comm, place.queue());
            let odd = comm.all_reduce(ReduceOp::Sum, DType::U64, &word, &word);
            assert_eq!(told(odd).0, ErrorClass::Usage);
            // In validating mode they are compared each time.
            let op = if place.rank() == 0 { ReduceOp::Max } else { ReduceOp::Min };
            let differs = comm.all_reduce_in_place(op, DType::U32, &word).unwrap().persistent().unwrap();
            let (class, text) = told(differs.enqueue(&queue));
            assert!(class == ErrorClass::Usage && text.contains("max") && text.contains("min"), "{text}");
            let call = sum(comm, &word);
            call.enqueue(&queue).unwrap().wait(PATIENCE).unwrap();
            let foreign = HostBackend::with_devices(4).unwrap().open(3, Features::empty()).unwrap();
            let foreign = foreign.create_queue(&QueueDesc::default()).unwrap();
            assert!(matches!(call.enqueue(&foreign), Err(CommError::ForeignQueue { .. })));
            comm.barrier(PATIENCE).unwrap();
            let Place { comm, device } = place;
            drop(comm);
            // It keeps no rank in the group, and says what it lacks.
            let (class, text) = told(call.enqueue(&queue));
            assert!(class == ErrorClass::PeerLost && text.contains("dropped"), "{engine}: {text}");
            drop(device);
        });
    }
}

#[test]
fn a_dropped_communicator_takes_no_more_while_a_call_is_under_way() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let (word, queue) = (place.numbers(&[1]), place.queue());
            let start = SemaphorePoint::new(&place.device.create_semaphore(0).unwrap(), 1);
            let waits = std::slice::from_ref(&start);
            queue.submit(&Submission { waits, ..Submission::default() }).unwrap();
            let call = sum(&place.comm, &word);
            let under_way = call.enqueue(&queue).unwrap();
            let Place { comm, device } = place;
            drop(comm);
            let (class, text) = told(call.enqueue(&queue));
            assert!(class == ErrorClass::PeerLost && text.contains("dropped"), "{engine}: {text}");
            // What was there before goes on.
            start.semaphore.signal(1).unwrap();
            under_way.wait(PATIENCE).unwrap();
            assert_eq!(read(&word), [2], "{engine}");
            drop(device);
        });
    }
}

#[test]
fn a_call_in_a_queue_is_awaited() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let (word, queue) = (place.numbers(&[1]), place.queue());
            let call = sum(&place.comm, &word);
            pollster::block_on(async {
                for _ in 0..3 {
                    call.enqueue(&queue).unwrap().await.unwrap();
                }
                // One that is over is so at once.
                let made = call.enqueue(&queue).unwrap();
                made.wait(PATIENCE).unwrap();
                made.await.unwrap();
            });
            assert_eq!(read(&word), [16], "{engine}");
            place.comm.barrier(PATIENCE).unwrap();
        });
    }
}

#[test]
fn an_await_has_patience_with_a_queue_that_is_full() {
    ranks(2, &only(EngineKind::Host), |place| {
        let (word, queue) = (place.numbers(&[1]), place.queue());
        let start = SemaphorePoint::new(&place.device.create_semaphore(0).unwrap(), 1);
        let waits = std::slice::from_ref(&start);
        queue.submit(&Submission { waits, ..Submission::default() }).unwrap();
        let call = sum(&place.comm, &word).enqueue(&queue).unwrap();
        while queue.submit(&Submission::default()).is_ok() {}
        thread::scope(|scope| {
            let waiting = scope.spawn(|| pollster::block_on(call.into_future()));
            start.semaphore.signal(1).unwrap();
            waiting.join().unwrap().unwrap();
        });
        assert_eq!(read(&word), [2]);
        place.comm.barrier(PATIENCE).unwrap();
    });
}

#[test]
fn an_await_ends_with_the_cause_of_a_failure() {
    for engine in ENGINES {
        ranks(2, &CommConfig { timeout: Duration::from_millis(200), ..only(engine) }, |place| {
            if place.rank() == 1 {
                // It never calls.
                return while place.comm.is_healthy() {
                    thread::yield_now();
                };
            }
            let (word, queue) = (place.numbers(&[1]), place.queue());
            let ended = pollster::block_on(sum(&place.comm, &word).enqueue(&queue).unwrap().into_future());
            let (class, text) = told(ended);
            assert_eq!(class, ErrorClass::Transient, "{engine}: {text}");
            let failure = place.comm.failure().unwrap();
            assert_eq!(text, failure.to_string());
        });
    }
}

#[test]
fn a_future_outlives_its_communicator() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            if place.rank() == 1 {
                // It never calls, and stays until the other is gone.
                let is_gone = |health: &[Health]| !health[0].is_present();
                place.comm.group().wait_health(PATIENCE, is_gone).unwrap();
                return;
            }
            let (word, queue) = (place.numbers(&[1]), place.queue());
            let call = sum(&place.comm, &word).enqueue(&queue).unwrap().into_future();
            drop(place.comm);
            let (class, text) = told(pollster::block_on(call));
            assert!(class == ErrorClass::PeerLost && text.contains("dropped"), "{engine}: {text}");
        });
    }
}
