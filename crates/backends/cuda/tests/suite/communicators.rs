//! Communicators over GPUs: what becomes of calls of the library's when a rank goes.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use warpweft_bootstrap::{Group, Health, JoinConfig, Meeting, Rank, Rendezvous};
use warpweft_comm::{CommConfig, Communicator, EngineKind};
use warpweft_core_types::{
    Backend, BufferDesc, BufferView, CollectiveFailure, DType, ErrorClass, Failure, Features, FillRegion,
    GraphNode, Op, PreparedGraph, ReduceOp, SemaphorePoint, Submission, SubmitError,
};
use warpweft_cuda::CudaBackend;
use warpweft_stand_in_cuda::StandIn;
use warpweft_stand_in_nccl::StandIn as Nccl;

use crate::support::{LIMIT, Lane, Outcome, PATIENCE, config, until};

/// A rank of a test.
struct Place {
    lane: Lane,
    comm: Communicator,
}

impl Place {
    fn words(&self, count: u64) -> Outcome<BufferView> {
        self.lane.memory(BufferDesc::device(4 * count))
    }

    /// A point behind everything that is in the queue.
    fn point(&self) -> Outcome<SemaphorePoint> {
        let done = SemaphorePoint::new(&self.lane.device.create_semaphore(0)?, 1);
        let signals = std::slice::from_ref(&done);
        self.lane.queue.submit(&Submission { signals, ..Submission::default() })?;
        Ok(done)
    }
}

/// Runs two ranks on a driver and an NCCL of their own.
fn ranks(body: impl Fn(Place, &Nccl) -> Outcome + Sync) -> Outcome {
    let driver = StandIn::load()?.with("devices", "2");
    let nccl = Nccl::load()?.with("driver", &driver.path().display().to_string());
    let backend = CudaBackend::with_config(&config(&driver).with_nccl(nccl.path()))?;
    let meeting = Meeting::new();
    thread::scope(|scope| {
        let (body, backend, nccl) = (&body, &backend, &nccl);
        let start = |rank| {
            let rendezvous = Rendezvous::Meeting(Arc::clone(&meeting));
            scope.spawn(move || {
                backend.open(rank, Features::COLLECTIVES)?;
                let lane = Lane::open(backend, rank)?;
                let group = Group::join(rendezvous, JoinConfig::new(Rank(rank), 2), PATIENCE)?;
                let native = CommConfig { engine: Some(EngineKind::Native), ..CommConfig::default() };
                let comm = Communicator::create(group, &lane.device, &native, PATIENCE)?;
                body(Place { lane, comm }, nccl)
            })
        };
        let threads: Vec<_> = (0..2).map(start).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })
}

#[test]
fn calls_under_way_are_ended_when_their_communicator_was_dropped() -> Outcome {
    ranks(|place, nccl| {
        if place.comm.rank() == 1 {
            // It never calls, and stays until the other is gone.
            let is_gone = |health: &[Health]| !health[0].is_present();
            place.comm.group().wait_health(PATIENCE, is_gone)?;
            return Ok(());
        }
        let words = place.words(2)?;
        let call = place.comm.all_reduce(ReduceOp::Sum, DType::F32, &words, &words)?.on(&place.lane.queue)?;
        let behind = place.point()?;
        let aborts = nccl.calls("ncclCommAbort");
        let began = Instant::now();
        let Place { lane, comm } = place;
        drop(comm);
        assert!(began.elapsed() < Duration::from_millis(400), "a drop waits: {:?}", began.elapsed());
        let error = call.wait(LIMIT).unwrap_err();
        assert_eq!(error.class(), ErrorClass::PeerLost, "{error}");
        assert!(behind.wait(LIMIT).is_err());
        let failure = lane.queue.failure().ok_or("the queue has not failed")?;
        assert!(matches!(&*failure, Failure::Collective(CollectiveFailure::Aborted { rank: 0, .. })));
        until(|| nccl.calls("ncclCommAbort") > aborts);
        Ok(())
    })
}

#[test]
fn a_graph_that_is_kept_is_refused_and_keeps_no_rank_in_the_group() -> Outcome {
    ranks(|place, _| {
        let words = place.words(2)?;
        let nodes = place.comm.all_reduce(ReduceOp::Sum, DType::F32, &words, &words)?.nodes()?;
        let mut nodes: Vec<_> = nodes.into_iter().map(|op| GraphNode::new(op, &[])).collect();
        if place.comm.rank() == 1 {
            // The other rank's graph has no such work.
            nodes.push(GraphNode::new(&Op::Fill(FillRegion::bytes(&place.words(1)?, 1)), &[]));
        }
        let graph = PreparedGraph::new(place.lane.device.as_ref(), &nodes)?;
        place.comm.replay(&graph, &place.lane.queue)?.wait(PATIENCE)?;
        assert_eq!(place.comm.flight().calls[0].call, "replay of a graph with 1 call");
        if place.comm.rank() == 1 {
            let ended = place.comm.replay(&graph, &place.lane.queue).and_then(|call| call.wait(PATIENCE));
            assert_eq!(ended.unwrap_err().class(), ErrorClass::PeerLost);
            return Ok(());
        }
        let Place { lane, comm } = place;
        drop(comm);
        let refused = lane.queue.submit(&Submission { ops: &[Op::Replay(&graph)], ..Submission::default() });
        let Err(SubmitError::Failed(failure)) = refused else { return Err(format!("{refused:?}").into()) };
        assert!(matches!(&*failure, Failure::Collective(CollectiveFailure::Aborted { rank: 0, .. })));
        Ok(())
    })
}
