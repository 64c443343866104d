//! What was enqueued is asked for later: after a failure, after its communicator, and while its queue is full.

use std::{
    sync::{Arc, Mutex, mpsc},
    task::{Wake, Waker},
    thread,
    time::Duration,
};

use warpweft_bootstrap::Health;
use warpweft_comm::{CommConfig, Communicator, EngineKind};
use warpweft_core_types::{
    CollectiveFailure, DType, ErrorClass, Failure, GraphNode, Op, PreparedGraph, Queue, QueueId, ReduceOp,
    SemaphorePoint, Submission, SubmissionId, SubmitError, WaitError,
};

use crate::rig::{ENGINES, PATIENCE, Place, only, ranks, read, told, until_failed};

#[test]
fn a_call_that_failed_is_not_over_however_late_it_is_asked_for() {
    for engine in ENGINES {
        let config = CommConfig { timeout: Duration::from_millis(200), ..only(engine) };
        ranks(2, &config, |place| {
            let word = place.numbers(&[1]);
            let sum = || place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
            let queue = place.queue();
            let made = sum().on(&queue).unwrap();
            made.wait(PATIENCE).unwrap();
            if place.rank() == 1 {
                until_failed(&place.comm);
                return;
            }
            let failed = sum().on(&queue).unwrap();
            until_failed(&place.comm);
            for _ in 0..3 {
                assert!(failed.wait(PATIENCE).is_err(), "{engine}");
                // What looks for news of queues does so here as well.
                let record = place.comm.flight();
                assert!(record.calls[0].over_us.is_some() && record.calls[1].over_us.is_none(), "{record:?}");
            }
            made.wait(PATIENCE).unwrap();
        });
    }
}

#[test]
fn a_call_that_is_kept_keeps_no_communicator() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let word = place.numbers(&[1]);
            let queue = place.queue();
            let sum =
                |comm: &Communicator| comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word)?.on(&queue);
            let kept = sum(&place.comm).unwrap();
            kept.wait(PATIENCE).unwrap();
            if place.rank() == 0 {
                let Place { comm, device } = place;
                let group = comm.group().watch();
                drop(comm);
                kept.wait(PATIENCE).unwrap();
                drop((group, device));
            } else {
                let ended = sum(&place.comm).and_then(|call| call.wait(PATIENCE));
                assert_eq!(told(ended).0, ErrorClass::PeerLost, "{engine}");
            }
            kept.wait(PATIENCE).unwrap();
        });
    }
}

#[test]
fn a_graph_that_is_kept_keeps_no_rank_in_the_group() {
    ranks(2, &only(EngineKind::Host), |place| {
        let (word, queue) = (place.numbers(&[1]), place.queue());
        let sum =
            |comm: &Communicator| comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap().nodes();
        let nodes: Vec<_> = sum(&place.comm).unwrap().into_iter().map(|op| GraphNode::new(op, &[])).collect();
        let graph = PreparedGraph::new(place.device.as_ref(), &nodes).unwrap();
        place.comm.replay(&graph, &queue).unwrap().wait(PATIENCE).unwrap();
        assert_eq!(read(&word), [2]);
        if place.rank() == 1 {
            let ended = place.comm.replay(&graph, &queue).and_then(|call| call.wait(PATIENCE));
            let (class, text) = told(ended);
            assert_eq!(class, ErrorClass::PeerLost, "{text}");
            assert!(text.contains("rank 0") && text.contains("left"), "{text}");
            return;
        }
        let Place { comm, device } = place;
        drop(comm);
        let done = SemaphorePoint::new(&device.create_semaphore(0).unwrap(), 1);
        let signals = std::slice::from_ref(&done);
        let refused = queue.submit(&Submission { ops: &[Op::Replay(&graph)], signals, waits: &[] });
        let failure = match (refused, done.wait(PATIENCE)) {
            (Err(SubmitError::Failed(failure)), _) | (Ok(_), Err(WaitError::Failed(failure))) => failure,
            other => panic!("{other:?}"),
        };
        assert!(
            matches!(&*failure, Failure::Collective(CollectiveFailure::Aborted { rank: 0, .. })),
            "{failure}"
        );
        assert!(failure.to_string().contains("dropped"), "{failure}");
    });
}

#[test]
fn a_drop_waits_for_no_call_and_what_is_under_way_ends_all_the_same() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let (word, queue) = (place.numbers(&[1]), place.queue());
            if place.rank() == 1 {
                // Until the other is gone, so that it is not this one's leaving that ends its call.
                let is_gone = |health: &[Health]| !health[0].is_present();
                place.comm.group().wait_health(PATIENCE, is_gone).unwrap();
                return;
            }
            let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
            let call = call.on(&queue).unwrap();
            drop(place.comm);
            // It goes on, which it would not do any more if the drop had waited for its end.
            let (class, text) = told(call.wait(Duration::ZERO));
            assert_eq!(class, ErrorClass::Transient, "{engine}: {text}");
            let (class, text) = told(call.wait(PATIENCE));
            assert_eq!(class, ErrorClass::PeerLost, "{engine}: {text}");
            assert!(text.contains("dropped"), "{engine}: {text}");
        });
    }
}

#[test]
fn a_call_that_was_enqueued_before_the_drop_is_carried_out() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let (word, queue) = (place.numbers(&[1]), place.queue());
            let start = SemaphorePoint::new(&place.device.create_semaphore(0).unwrap(), 1);
            let waits = std::slice::from_ref(&start);
            queue.submit(&Submission { waits, ..Submission::default() }).unwrap();
            let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
            let call = call.on(&queue).unwrap();
            let Place { comm, device } = place;
            drop(comm);
            start.semaphore.signal(1).unwrap();
            call.wait(PATIENCE).unwrap();
            assert_eq!(read(&word), [2], "{engine}");
            drop(device);
        });
    }
}

/// Drops a communicator when it is woken.
struct Dropping(Mutex<Option<Communicator>>, mpsc::Sender<()>);

impl Wake for Dropping {
    fn wake(self: Arc<Self>) {
        drop(self.0.lock().unwrap().take());
        self.1.send(()).unwrap();
    }
}

#[test]
fn whoever_is_woken_by_a_failure_may_drop_the_communicator() {
    for engine in ENGINES {
        let config = CommConfig { timeout: Duration::from_millis(200), ..only(engine) };
        ranks(2, &config, |place| {
            if place.rank() == 1 {
                // Whoever drops a communicator before it is told of the failure has only left.
                while place.comm.is_healthy() {
                    thread::yield_now();
                }
                return;
            }
            let word = place.numbers(&[1]);
            let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
            let point = call.on(&place.queue()).unwrap().point().unwrap().unwrap();
            let (sender, dropped) = mpsc::channel();
            let waker = Waker::from(Arc::new(Dropping(Mutex::new(Some(place.comm)), sender)));
            point.semaphore.wake_when(point.value, waker);
            dropped.recv_timeout(PATIENCE).unwrap();
        });
    }
}

#[test]
fn a_wait_has_patience_with_a_queue_that_is_full() {
    for engine in ENGINES {
        ranks(2, &only(engine), |place| {
            let (word, queue) = (place.numbers(&[1]), place.queue());
            let start = SemaphorePoint::new(&place.device.create_semaphore(0).unwrap(), 1);
            let waits = std::slice::from_ref(&start);
            queue.submit(&Submission { waits, ..Submission::default() }).unwrap();
            let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
            let call = call.on(&queue).unwrap();
            while queue.submit(&Submission::default()).is_ok() {}
            thread::scope(|scope| {
                let waiting = scope.spawn(|| call.wait(PATIENCE));
                start.semaphore.signal(1).unwrap();
                waiting.join().unwrap().unwrap();
            });
            assert_eq!(read(&word), [2], "{engine}");
            place.comm.barrier(PATIENCE).unwrap();
        });
    }
}

/// A queue that takes work only when it is told to, as a driver that waits for other ranks.
#[derive(Debug)]
struct Reluctant {
    queue: Arc<dyn Queue>,
    told: Mutex<mpsc::Receiver<()>>,
}

impl Queue for Reluctant {
    fn id(&self) -> QueueId {
        self.queue.id()
    }

    fn submit(&self, submission: &Submission<'_>) -> Result<SubmissionId, SubmitError> {
        let _told = self.told.lock().unwrap().recv();
        self.queue.submit(submission)
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.queue.failure()
    }
}

#[test]
fn a_call_that_hangs_while_it_is_enqueued_is_found_by_its_age() {
    let config = CommConfig { timeout: Duration::from_millis(200), ..only(EngineKind::Host) };
    ranks(2, &config, |place| {
        if place.rank() == 1 {
            return until_failed(&place.comm);
        }
        let word = place.numbers(&[1]);
        let (tell, told) = mpsc::channel::<()>();
        let queue: Arc<dyn Queue> = Arc::new(Reluctant { queue: place.queue(), told: Mutex::new(told) });
        thread::scope(|scope| {
            let call = place.comm.all_reduce(ReduceOp::Sum, DType::U32, &word, &word).unwrap();
            scope.spawn(move || call.on(&queue).and_then(|call| call.wait(PATIENCE)).unwrap_err());
            until_failed(&place.comm);
            let failure = place.comm.failure();
            let Some(Failure::Collective(CollectiveFailure::TimedOut { number: 1, .. })) = failure.as_deref()
            else {
                panic!("{failure:?}")
            };
            assert!(!place.comm.is_healthy());
            drop(tell);
        });
    });
}

#[test]
fn a_wait_that_never_began_gives_its_number_back() {
    ranks(2, &only(EngineKind::Host), |place| {
        let (first, second) = (place.numbers(&[1]), place.numbers(&[1]));
        let (comm, queue) = (&place.comm, place.queue());
        let start = SemaphorePoint::new(&place.device.create_semaphore(0).unwrap(), 1);
        let waits = std::slice::from_ref(&start);
        queue.submit(&Submission { waits, ..Submission::default() }).unwrap();
        let sum = |view| comm.all_reduce(ReduceOp::Sum, DType::U32, view, view).unwrap();
        let enqueued = sum(&first).on(&queue).unwrap();
        let (class, text) = told(sum(&second).wait(Duration::from_millis(30)));
        assert_eq!(class, ErrorClass::Transient, "{text}");
        start.semaphore.signal(1).unwrap();
        enqueued.wait(PATIENCE).unwrap();
        sum(&second).wait(PATIENCE).unwrap();
        assert_eq!([read(&first), read(&second)], [[2], [2]]);
        let numbers: Vec<_> = comm.flight().calls.iter().map(|call| call.number).collect();
        assert_eq!(numbers, [Some(1), Some(2)]);
    });
}
