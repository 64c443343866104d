//! Collectives, on a stand-in NCCL that works in the streams of the stand-in driver.

use std::{
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use warpweft_core_types::{
    Backend, BufferDesc, BufferView, CollectiveCall, CollectiveError, CollectiveFailure, CollectiveGroup,
    CollectiveOp, CopyRegion, DType, Deadline, Failure, Features, FillRegion, GraphError, GraphNode,
    NativeCommunicator, NativeCommunicatorDesc, NativeId, Op, PreparedGraph, QueueDesc, ReduceOp,
    RegistrationKind, SemaphorePoint, Submission, SubmitError, WaitError,
};
use warpweft_cuda::CudaBackend;
use warpweft_stand_in_cuda::StandIn;
use warpweft_stand_in_nccl::StandIn as Nccl;

use crate::{
    other::{Other, stream},
    support::{LIMIT, Lane, Outcome, PATIENCE, config, soon, until},
};

/// A driver, an NCCL in its streams, and the backend on both.
struct World {
    driver: StandIn,
    nccl: Nccl,
    backend: CudaBackend,
}

/// A device as a rank.
struct Rank {
    lane: Lane,
    comm: Arc<dyn NativeCommunicator>,
}

impl World {
    fn new(devices: u32) -> Outcome<Self> {
        Self::with(devices, Nccl::load()?)
    }

    fn with(devices: u32, nccl: Nccl) -> Outcome<Self> {
        let driver = StandIn::load()?.with("devices", &devices.to_string());
        let nccl = nccl.with("driver", &driver.path().display().to_string());
        let backend = CudaBackend::with_config(&config(&driver).with_nccl(nccl.path()))?;
        Ok(Self { driver, nccl, backend })
    }

    fn id(&self) -> Outcome<NativeId> {
        let device = self.backend.open(0, Features::COLLECTIVES)?;
        Ok(device.collectives().ok_or("the family is absent")?.create_id()?)
    }

    /// Makes every device a rank.
    fn join(&self, size: u32) -> Outcome<Vec<Rank>> {
        let lanes: Vec<_> =
            (0..size).map(|ordinal| Lane::open(&self.backend, ordinal)).collect::<Result<_, _>>()?;
        let id = self.id()?;
        thread::scope(|scope| {
            let join = |(rank, lane): (u32, Lane)| {
                let desc = NativeCommunicatorDesc { id: id.clone(), rank, size, multiprocessors: None };
                scope.spawn(move || {
                    let family = lane.device.collectives().ok_or("the family is absent")?;
                    let comm = family.join(&desc, Deadline::within(PATIENCE))?;
                    Ok(Rank { lane, comm })
                })
            };
            let threads: Vec<_> = (0..).zip(lanes).map(join).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

impl Rank {
    fn rank(&self) -> u32 {
        self.comm.rank()
    }

    fn upload(&mut self, bytes: &[u8]) -> Outcome<BufferView> {
        let staged = self.lane.memory(BufferDesc::host_visible(bytes.len() as u64))?;
        staged.write(bytes)?;
        let view = self.lane.memory(BufferDesc::device(bytes.len() as u64))?;
        self.lane.submit(&[Op::Copy(CopyRegion::new(&staged, &view)?)])?.wait(PATIENCE)?;
        Ok(view)
    }

    fn floats(&mut self, values: &[f32]) -> Outcome<BufferView> {
        self.upload(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    fn read(&mut self, view: &BufferView) -> Outcome<Vec<u8>> {
        let window = self.lane.memory(BufferDesc::host_visible(view.size()))?;
        self.lane.submit(&[Op::Copy(CopyRegion::new(view, &window)?)])?.wait(PATIENCE)?;
        let mut bytes = vec![0; usize::try_from(view.size())?];
        window.read(&mut bytes)?;
        Ok(bytes)
    }

    fn read_floats(&mut self, view: &BufferView) -> Outcome<Vec<f32>> {
        let bytes = self.read(view)?;
        Ok(bytes.as_chunks().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect())
    }

    fn call<'a>(
        &self,
        op: CollectiveOp,
        dtype: DType,
        src: Option<&'a BufferView>,
        dst: Option<&'a BufferView>,
    ) -> Outcome<CollectiveCall<'a>> {
        Ok(CollectiveCall::new(op, dtype, (self.rank(), self.comm.size()), src, dst)?)
    }

    /// Submits calls as one group; what it returns is reached when they are done.
    fn submit(&mut self, calls: &[CollectiveCall<'_>]) -> Outcome<SemaphorePoint> {
        let comm = Arc::clone(&self.comm);
        self.lane.submit(&[Op::Collective(CollectiveGroup::new(&comm, calls))])
    }

    /// The same without a signal.
    fn enqueue(&self, calls: &[CollectiveCall<'_>]) -> Outcome {
        let ops = [Op::Collective(CollectiveGroup::new(&self.comm, calls))];
        self.lane.queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
        Ok(())
    }

    fn sum_in_place(&mut self, view: &BufferView) -> Outcome<SemaphorePoint> {
        let call = self.call(SUM, DType::F32, Some(view), Some(view))?;
        self.submit(&[call])
    }
}

const SUM: CollectiveOp = CollectiveOp::AllReduce(ReduceOp::Sum);

/// Does the same on every rank, each in a thread of its own.
fn each<T: Send>(ranks: &mut [Rank], body: impl Fn(&mut Rank) -> Outcome<T> + Sync) -> Outcome<Vec<T>> {
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(|| body(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn aborted(reason: &str) -> Arc<Failure> {
    Arc::new(CollectiveFailure::Aborted { rank: 1, reason: reason.to_owned() }.into())
}

fn is_aborted(failure: &Failure, words: &str) -> bool {
    matches!(failure, Failure::Collective(CollectiveFailure::Aborted { reason, .. }) if reason == words)
}

#[test]
fn sums_of_two_to_four_ranks() -> Outcome {
    for size in 2..=4_u8 {
        let world = World::new(size.into())?;
        let mut ranks = world.join(size.into())?;
        let results = each(&mut ranks, |rank| {
            let own = f32::from(u8::try_from(rank.rank())?);
            let (src, dst) = (rank.floats(&[own, 1.0, -own])?, rank.floats(&[0.0; 3])?);
            let call = rank.call(SUM, DType::F32, Some(&src), Some(&dst))?;
            rank.submit(&[call])?.wait(PATIENCE)?;
            rank.sum_in_place(&src)?.wait(PATIENCE)?;
            Ok((rank.read_floats(&dst)?, rank.read_floats(&src)?))
        })?;
        let all = f32::from(size * (size - 1) / 2);
        let expected = vec![all, f32::from(size), -all];
        assert!(
            results.iter().all(|(out, in_place)| *out == expected && *in_place == expected),
            "{results:?}"
        );
    }
    Ok(())
}

/// What every operation does, in bytes, so that types that NCCL lacks are among them.
#[test]
fn every_movement_of_types_that_the_library_lacks() -> Outcome {
    let world = World::new(3)?;
    let mut ranks = world.join(3)?;
    let moved = |rank: &mut Rank, op, src: Option<&[u8]>, dst: Option<u64>| -> Outcome<Vec<u8>> {
        let src = src.map(|bytes| rank.upload(bytes)).transpose()?;
        let dst = dst.map(|size| rank.lane.memory(BufferDesc::device(size))).transpose()?;
        let call = rank.call(op, DType::I16, src.as_ref(), dst.as_ref())?;
        rank.submit(&[call])?.wait(PATIENCE)?;
        dst.map_or(Ok(Vec::new()), |dst| rank.read(&dst))
    };
    each(&mut ranks, |rank| {
        let own = u8::try_from(rank.rank())?;
        let (pair, six) = ([own; 2], [own * 10, own, own * 10 + 1, own, own * 10 + 2, own]);
        let all = vec![0, 0, 1, 1, 2, 2];
        assert_eq!(moved(rank, CollectiveOp::AllGather, Some(&pair), Some(6))?, all);
        let at = |root| (own == root).then_some(());
        let gathered = moved(rank, CollectiveOp::Gather { root: 1 }, Some(&pair), at(1).map(|()| 6))?;
        assert_eq!(gathered, if own == 1 { all } else { Vec::new() });
        let from = at(2).map(|()| &six[..]);
        assert_eq!(moved(rank, CollectiveOp::Scatter { root: 2 }, from, Some(2))?, [20 + own, 2]);
        let from = at(2).map(|()| &pair[..]);
        assert_eq!(moved(rank, CollectiveOp::Broadcast { root: 2 }, from, Some(2))?, [2, 2]);
        let exchanged = moved(rank, CollectiveOp::AllToAll, Some(&six), Some(6))?;
        assert_eq!(exchanged, [own, 0, 10 + own, 1, 20 + own, 2]);
        Ok(())
    })?;
    Ok(())
}

#[test]
fn sends_and_receives_of_one_group() -> Outcome {
    let world = World::new(3)?;
    let mut ranks = world.join(3)?;
    let got = each(&mut ranks, |rank| {
        let (own, size) = (rank.rank(), rank.comm.size());
        let (src, dst) = (rank.upload(&[u8::try_from(own)?; 5])?, rank.upload(&[9; 5])?);
        let send = rank.call(CollectiveOp::Send { to: (own + 1) % size }, DType::Bool, Some(&src), None)?;
        let from = (own + size - 1) % size;
        let receive = rank.call(CollectiveOp::Recv { from }, DType::Bool, None, Some(&dst))?;
        rank.submit(&[send, receive])?.wait(PATIENCE)?;
        rank.read(&dst)
    })?;
    assert_eq!(got, [[2; 5], [0; 5], [1; 5]]);
    Ok(())
}

#[test]
fn factors_of_each_ranks_own_are_made_once() -> Outcome {
    let world = World::new(2)?;
    let mut ranks = world.join(2)?;
    for _ in 0..3 {
        let got = each(&mut ranks, |rank| {
            let view = rank.floats(&[4.0])?;
            let factor = if rank.rank() == 0 { 0.5 } else { 2.0 };
            let op = CollectiveOp::AllReduce(ReduceOp::PremulSum(factor));
            let call = rank.call(op, DType::F32, Some(&view), Some(&view))?;
            rank.submit(&[call])?.wait(PATIENCE)?;
            rank.read_floats(&view)
        })?;
        assert_eq!(got, [[10.0], [10.0]]);
    }
    assert_eq!(world.nccl.calls("ncclRedOpCreatePreMulSum"), 2);
    // More than are kept.
    let many = |rank: &mut Rank| {
        let view = rank.floats(&[1.0])?;
        for number in 0..40_u8 {
            let op = CollectiveOp::AllReduce(ReduceOp::PremulSum(number.into()));
            let call = rank.call(op, DType::F32, Some(&view), Some(&view))?;
            rank.submit(&[call])?.wait(PATIENCE)?;
        }
        Ok(())
    };
    each(&mut ranks, many)?;
    assert!(world.nccl.calls("ncclRedOpDestroy") >= 2 * (40 - 16));
    Ok(())
}

#[test]
fn what_is_done_is_told_and_the_rest_is_refused_before_it_begins() -> Outcome {
    let world = World::new(2)?;
    let mut ranks = world.join(2)?;
    let calls = world.nccl.calls("ncclAllReduce");
    let device = Arc::clone(&ranks[0].lane.device);
    let family = device.collectives().ok_or("the family is absent")?;
    assert!(family.library()?.starts_with("NCCL 2."));
    let does = |op, dtype| family.does(CollectiveOp::AllReduce(op), dtype);
    assert!(does(ReduceOp::Sum, DType::Bf16) && does(ReduceOp::PremulSum(2.0), DType::I32));
    for (op, dtype) in
        [(ReduceOp::Xor, DType::I32), (ReduceOp::Sum, DType::I16), (ReduceOp::Max, DType::Bool)]
    {
        assert!(!does(op, dtype), "{op} of {dtype}");
        let view = ranks[0].lane.memory(BufferDesc::device(8))?;
        let call = ranks[0].call(CollectiveOp::AllReduce(op), dtype, Some(&view), Some(&view))?;
        let error = ranks[0].submit(&[call]).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(SubmitError::Unsupported { .. })), "{error}");
    }
    assert!(DType::ALL.iter().all(|dtype| family.does(CollectiveOp::AllGather, *dtype)));
    // A call that was checked for another rank.
    let view = ranks[0].lane.memory(BufferDesc::device(8))?;
    let whole = ranks[0].lane.memory(BufferDesc::device(16))?;
    let call =
        CollectiveCall::new(CollectiveOp::Gather { root: 1 }, DType::U8, (1, 2), Some(&view), Some(&whole))?;
    let error = ranks[0].submit(&[call]).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(SubmitError::Invalid { .. })), "{error}");
    // A communicator of another device.
    let (comm, near) = (Arc::clone(&ranks[1].comm), &mut ranks[0]);
    let call = near.call(SUM, DType::F32, Some(&view), Some(&view))?;
    let error = near.lane.submit(&[Op::Collective(CollectiveGroup::new(&comm, &[call]))]).unwrap_err();
    assert!(
        matches!(error.downcast_ref(), Some(SubmitError::Foreign { what: "communicator", .. })),
        "{error}"
    );
    assert_eq!(world.nccl.calls("ncclAllReduce"), calls, "nothing was begun");
    // The queue takes more.
    let all = each(&mut ranks, |rank| {
        let view = rank.floats(&[1.0])?;
        rank.sum_in_place(&view)?.wait(PATIENCE)?;
        rank.read_floats(&view)
    })?;
    assert_eq!(all, [[2.0], [2.0]]);
    Ok(())
}

#[test]
fn a_library_that_is_missing_is_told_with_what_to_do() -> Outcome {
    let driver = StandIn::load()?;
    let named = config(&driver).with_nccl("no-such-folder/libnccl.so.2");
    for (config, words) in [(named, "no-such-folder"), (config(&driver), "name it")] {
        let backend = CudaBackend::with_config(&config)?;
        let device = backend.open(0, Features::empty())?;
        assert!(device.collectives().is_none() && !device.features().contains(Features::COLLECTIVES));
        assert!(backend.open(0, Features::COLLECTIVES).is_err());
        drop(device);
        let _ = words;
    }
    Ok(())
}

#[test]
fn a_rank_that_never_comes_is_waited_for_as_long_as_said() -> Outcome {
    let world = World::new(2)?;
    let (id, device) = (world.id()?, world.backend.open(0, Features::COLLECTIVES)?);
    let began = Instant::now();
    let joined = soon(LIMIT, move || {
        let desc = NativeCommunicatorDesc { id, rank: 0, size: 2, multiprocessors: Some(4) };
        device.collectives().unwrap().join(&desc, Deadline::within(Duration::from_millis(100))).map(|_| ())
    });
    let joined = joined.ok_or("it takes longer than it may")?;
    assert!(matches!(joined, Err(CollectiveError::TimedOut { .. })), "{joined:?}");
    assert!(began.elapsed() >= Duration::from_millis(100));
    Ok(())
}

#[test]
fn graphs_replay_collectives() -> Outcome {
    let world = World::new(2)?;
    let mut ranks = world.join(2)?;
    let results = each(&mut ranks, |rank| {
        let own = f32::from(u8::try_from(rank.rank())?) + 1.0;
        let (start, view) = (rank.floats(&[own; 3])?, rank.floats(&[0.0; 3])?);
        let out = rank.floats(&[0.0; 3])?;
        let comm = Arc::clone(&rank.comm);
        let calls = [rank.call(SUM, DType::F32, Some(&view), Some(&view))?];
        let sum = Op::Collective(CollectiveGroup::new(&comm, &calls));
        let nodes = [
            GraphNode::new(&Op::Copy(CopyRegion::new(&start, &view)?), &[]),
            GraphNode::new(&sum, &[0]),
            GraphNode::new(&sum, &[1]),
            GraphNode::new(&Op::Copy(CopyRegion::new(&view, &out)?), &[2]),
        ];
        let mut graph = PreparedGraph::new(rank.lane.device.as_ref(), &nodes)?;
        for _ in 0..4 {
            rank.lane.submit(&[Op::Replay(&graph)])?;
            // Others between replays.
            rank.sum_in_place(&view)?;
        }
        let last = rank.read_floats(&view)?;
        let changed = graph.set(1, &sum);
        assert!(matches!(&changed, Err(GraphError::Node { reason, .. }) if reason.contains("keeps")));
        Ok((last, rank.read_floats(&out)?))
    })?;
    assert!(results.iter().all(|(last, out)| *last == [12.0; 3] && *out == [6.0; 3]), "{results:?}");
    Ok(())
}

#[test]
fn streams_of_another_library_take_collectives() -> Outcome {
    let world = World::new(2)?;
    let mut ranks = world.join(2)?;
    let (driver, barrier) = (&world.driver, Barrier::new(2));
    each(&mut ranks, |rank| {
        let other = Other::of(driver);
        let family = rank.lane.device.interop().ok_or("the family is absent")?;
        let context = family.device_handle().value;
        let foreign = other.create_stream(context);
        let queue = family.import_queue(stream("CUstream", foreign, Arc::new(())), &QueueDesc::default())?;
        let view = rank.lane.memory(BufferDesc::device(8))?;
        let address = rank.lane.device.interop().unwrap().buffer_handle(view.buffer().as_ref())?.value;
        barrier.wait();
        // Bytes of 1 in all four are a number; the sum of integers is 2 in each byte.
        other.fill(context, foreign, address, 1, 8).map_err(|code| code.to_string())?;
        let calls = [rank.call(SUM, DType::U32, Some(&view), Some(&view))?];
        let ops = [Op::Collective(CollectiveGroup::new(&rank.comm, &calls))];
        queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
        other.synchronise(context, foreign).map_err(|code| code.to_string())?;
        assert_eq!(rank.read(&view)?, [2; 8]);
        Ok(())
    })?;
    Ok(())
}

#[test]
fn an_abort_fails_a_queue_in_a_stream_of_another_library() -> Outcome {
    let world = World::new(2)?;
    let mut ranks = world.join(2)?;
    let near = &mut ranks[0];
    let other = Other::of(&world.driver);
    let family = near.lane.device.interop().ok_or("the family is absent")?;
    let context = family.device_handle().value;
    let foreign = other.create_stream(context);
    let queue = family.import_queue(stream("CUstream", foreign, Arc::new(())), &QueueDesc::default())?;
    let view = near.lane.memory(BufferDesc::device(8))?;
    let calls = [near.call(SUM, DType::U32, Some(&view), Some(&view))?];
    let ops = [Op::Collective(CollectiveGroup::new(&near.comm, &calls))];
    // Several gather, and the last one signals.
    let done = SemaphorePoint::new(&near.lane.device.create_semaphore(0)?, 1);
    for _ in 0..3 {
        queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
    }
    queue.submit(&Submission { waits: &[], ops: &ops, signals: std::slice::from_ref(&done) })?;
    near.comm.abort(aborted("a test"), Deadline::within(LIMIT))?;
    assert!(matches!(done.wait(PATIENCE), Err(WaitError::Failed(failure)) if is_aborted(&failure, "a test")));
    // The stream is the other library's, and goes on.
    other.synchronise(context, foreign).map_err(|code| code.to_string())?;
    assert!(queue.failure().is_some());
    let weak = Arc::downgrade(view.buffer());
    drop(view);
    until(|| weak.upgrade().is_none());
    Ok(())
}

/// Submits until the communicator has ended.
fn sum_until_aborted(rank: &Rank) -> Outcome<()> {
    let view = rank.lane.memory(BufferDesc::device(64))?;
    let (queue, comm) = (rank.lane.device.create_queue(&QueueDesc::default())?, &rank.comm);
    let semaphore = rank.lane.device.create_semaphore(0)?;
    let call = rank.call(SUM, DType::F32, Some(&view), Some(&view))?;
    let ops = [Op::Collective(CollectiveGroup::new(comm, std::slice::from_ref(&call)))];
    for value in 1.. {
        let point = SemaphorePoint::new(&semaphore, value);
        let signals = if value % 3 == 0 { std::slice::from_ref(&point) } else { &[] };
        match queue.submit(&Submission { waits: &[], ops: &ops, signals }) {
            Ok(_) => {}
            Err(SubmitError::Failed(_)) => break,
            Err(SubmitError::QueueFull { .. }) => thread::yield_now(),
            Err(other) => return Err(other.into()),
        }
        if value % 30 == 0 && point.wait(PATIENCE).is_err() {
            break;
        }
    }
    let weak = Arc::downgrade(view.buffer());
    drop(view);
    until(|| weak.upgrade().is_none());
    // A queue in which nothing was under way then is in order.
    assert!(queue.failure().is_none_or(|failure| is_aborted(&failure, "a test")));
    Ok(())
}

/// Many submit while somebody aborts: each is told of it, and nothing hangs.
#[test]
fn an_abort_in_the_middle_of_everything() -> Outcome {
    let world = World::new(2)?;
    for round in 0..5_u64 {
        let ranks = world.join(2)?;
        let results = thread::scope(|scope| {
            let threads: Vec<_> =
                ranks.iter().map(|rank| scope.spawn(move || sum_until_aborted(rank))).collect();
            thread::sleep(Duration::from_millis(3 + round * 4));
            for rank in &ranks {
                rank.comm.abort(aborted("a test"), Deadline::within(LIMIT))?;
            }
            threads.into_iter().try_for_each(|thread| thread.join().unwrap())
        });
        results?;
    }
    Ok(())
}

#[test]
fn an_abort_fails_what_waits_for_a_rank_that_never_comes() -> Outcome {
    let world = World::new(2)?;
    let mut ranks = world.join(2)?;
    let [near, far] = ranks.as_mut_slice() else { return Err("two ranks".into()) };
    let view = near.floats(&[1.0; 4])?;
    let before = near.lane.submit(&[Op::Fill(FillRegion::bytes(&view, 0))])?;
    let lonely = near.sum_in_place(&view)?;
    let behind = near.lane.submit(&[Op::Fill(FillRegion::bytes(&view, 7))])?;
    // Another queue waits for it in its stream, and a third for that.
    let second = near.lane.device.create_queue(&QueueDesc::default())?;
    let third = near.lane.device.create_queue(&QueueDesc::default())?;
    let point = |value| -> Outcome<SemaphorePoint> {
        Ok(SemaphorePoint::new(&near.lane.device.create_semaphore(0)?, value))
    };
    let (one, two, free) = (point(1)?, point(1)?, point(1)?);
    let other = near.lane.memory(BufferDesc::device(16))?;
    let ops = [Op::Fill(FillRegion::bytes(&other, 3))];
    let chain =
        |queue: &Arc<dyn warpweft_core_types::Queue>, wait: &SemaphorePoint, signal: &SemaphorePoint| {
            queue.submit(&Submission {
                waits: std::slice::from_ref(wait),
                ops: &ops,
                signals: std::slice::from_ref(signal),
            })
        };
    chain(&second, &lonely, &one)?;
    chain(&third, &one, &two)?;
    before.wait(PATIENCE)?;
    assert!(matches!(lonely.wait(Duration::from_millis(30)), Err(WaitError::Timeout { .. })));
    let comm = Arc::clone(&near.comm);
    // Those who look at the event themselves are told the same.
    let waiting = lonely.clone();
    let waiter = thread::spawn(move || waiting.wait(PATIENCE));
    thread::sleep(Duration::from_millis(5));
    let done = soon(LIMIT, move || comm.abort(aborted("a test"), Deadline::within(LIMIT)));
    done.ok_or("an abort takes longer than it may")??;
    assert!(
        matches!(waiter.join().unwrap(), Err(WaitError::Failed(failure)) if is_aborted(&failure, "a test"))
    );
    for point in [&lonely, &behind, &one, &two] {
        let Err(WaitError::Failed(failure)) = point.wait(PATIENCE) else {
            return Err("it is not told that it failed".into());
        };
        assert!(is_aborted(&failure, "a test"), "{failure}");
    }
    let refused = near.sum_in_place(&view).unwrap_err();
    assert!(matches!(refused.downcast_ref(), Some(SubmitError::Failed(_))), "{refused}");
    assert!(near.lane.queue.failure().is_some_and(|failure| is_aborted(&failure, "a test")));
    assert!(second.failure().is_some() && third.failure().is_some());
    assert!(matches!(near.comm.check(), Err(CollectiveError::Failed(_))));
    // The device goes on, and so does everything else.
    let next = near.lane.device.create_queue(&QueueDesc::default())?;
    next.submit(&Submission { waits: &[], ops: &ops, signals: std::slice::from_ref(&free) })?;
    free.wait(PATIENCE)?;
    assert!(near.lane.device.failure().is_none());
    far.comm.check()?;
    Ok(())
}

/// The one that is aborted is behind a kernel of its queue, which is not ended by it.
#[test]
fn an_abort_leaves_what_is_in_front_alone() -> Outcome {
    let world = World::new(2)?;
    let mut ranks = world.join(2)?;
    let near = &mut ranks[0];
    let view = near.floats(&[1.0; 4])?;
    let word = near.lane.memory(BufferDesc::host_visible(4))?;
    let kernel = crate::support::kernel(&near.lane.device, &crate::support::blocking())?;
    let args = [warpweft_core_types::Arg::Buffer(&word)];
    let launch = warpweft_core_types::Launch::new(&kernel, [1, 1, 1], &args)?;
    let front = near.lane.submit(&[Op::Launch(launch)])?;
    let lonely = near.sum_in_place(&view)?;
    near.comm.abort(aborted("a test"), Deadline::within(LIMIT))?;
    assert!(matches!(front.wait(Duration::from_millis(30)), Err(WaitError::Timeout { .. })));
    word.write(&1_u32.to_le_bytes())?;
    // It may fail with the rest of its semaphore, but was reached before.
    front.wait(PATIENCE)?;
    assert!(matches!(lonely.wait(PATIENCE), Err(WaitError::Failed(_))));
    Ok(())
}

#[test]
fn a_library_that_does_not_let_go_fails_what_waits_all_the_same() -> Outcome {
    let world = World::with(2, Nccl::load()?.with("abort_ms", "2000"))?;
    let mut ranks = world.join(2)?;
    let near = &mut ranks[0];
    let view = near.floats(&[1.0; 4])?;
    let lonely = near.sum_in_place(&view)?;
    let comm = Arc::clone(&near.comm);
    let began = Instant::now();
    let result = comm.abort(aborted("a test"), Deadline::within(Duration::from_millis(100)));
    assert!(matches!(result, Err(CollectiveError::TimedOut { .. })), "{result:?}");
    assert!(began.elapsed() < Duration::from_secs(1));
    assert!(matches!(lonely.wait(LIMIT), Err(WaitError::Failed(failure)) if is_aborted(&failure, "a test")));
    Ok(())
}

#[test]
fn an_abort_retires_graphs_and_refuses_replays() -> Outcome {
    let world = World::new(2)?;
    let mut ranks = world.join(2)?;
    let graphs = each(&mut ranks, |rank| {
        let view = rank.floats(&[1.0; 4])?;
        let comm = Arc::clone(&rank.comm);
        let calls = [rank.call(SUM, DType::F32, Some(&view), Some(&view))?];
        let sum = Op::Collective(CollectiveGroup::new(&comm, &calls));
        Ok(PreparedGraph::new(rank.lane.device.as_ref(), &[GraphNode::new(&sum, &[])])?)
    })?;
    let near = &mut ranks[0];
    let lonely = near.lane.submit(&[Op::Replay(&graphs[0])])?;
    let executables = world.driver.live("executables");
    near.comm.abort(aborted("a test"), Deadline::within(LIMIT))?;
    assert!(
        matches!(lonely.wait(PATIENCE), Err(WaitError::Failed(failure)) if is_aborted(&failure, "a test"))
    );
    assert_eq!(world.driver.live("executables"), executables - 1);
    let queue = near.lane.device.create_queue(&QueueDesc::default())?;
    let again = queue.submit(&Submission { ops: &[Op::Replay(&graphs[0])], ..Submission::default() });
    assert!(matches!(again, Err(SubmitError::Failed(_))), "{again:?}");
    Ok(())
}

/// Held on the host: it never enters the stream.
#[test]
fn an_abort_fails_what_is_held() -> Outcome {
    let world = World::new(2)?;
    let mut ranks = world.join(2)?;
    let near = &mut ranks[0];
    let view = near.floats(&[1.0; 4])?;
    let never = SemaphorePoint::new(&near.lane.device.create_semaphore(0)?, 1);
    let signal = SemaphorePoint::new(&near.lane.device.create_semaphore(0)?, 1);
    let calls = [near.call(SUM, DType::F32, Some(&view), Some(&view))?];
    let ops = [Op::Collective(CollectiveGroup::new(&near.comm, &calls))];
    near.lane.queue.submit(&Submission {
        waits: std::slice::from_ref(&never),
        ops: &ops,
        signals: std::slice::from_ref(&signal),
    })?;
    near.comm.abort(aborted("a test"), Deadline::within(LIMIT))?;
    assert!(
        matches!(signal.wait(PATIENCE), Err(WaitError::Failed(failure)) if is_aborted(&failure, "a test"))
    );
    Ok(())
}

#[test]
fn communicators_dropped_in_any_order_end_soon() -> Outcome {
    let world = World::new(2)?;
    let ended = soon(LIMIT * 3, move || -> Outcome<()> {
        for crosswise in [false, true] {
            let (first, second) = (world.join(2)?, world.join(2)?);
            let comms: Vec<Vec<_>> = [first, second]
                .into_iter()
                .map(|ranks| ranks.into_iter().map(|rank| rank.comm).collect())
                .collect();
            let destroyed = || world.nccl.calls("ncclCommDestroy") + world.nccl.calls("ncclCommAbort");
            let before = destroyed();
            let [mut a, mut b] = <[Vec<_>; 2]>::try_from(comms).map_err(|_| "two")?;
            let began = Instant::now();
            drop(a.pop());
            drop(b.pop());
            if crosswise {
                drop(b.pop());
                drop(a.pop());
            } else {
                drop(a.pop());
                drop(b.pop());
            }
            assert!(began.elapsed() < Duration::from_millis(500), "a drop waits");
            until(|| destroyed() >= before + 4);
            assert_eq!(world.nccl.calls("ncclCommAbort"), 0, "they parted in order");
        }
        Ok(())
    });
    ended.ok_or("it takes too long")?
}

/// Several threads and queues of one rank. They agree on an order by what they wait for.
#[test]
fn several_threads_use_a_communicator() -> Outcome {
    let world = World::new(2)?;
    let mut ranks = world.join(2)?;
    let results = each(&mut ranks, |rank| {
        let views: Vec<_> = (0..4).map(|_| rank.floats(&[1.0])).collect::<Result<_, _>>()?;
        let (lane, comm) = (&rank.lane, &rank.comm);
        let turn = (std::sync::Mutex::new(0), std::sync::Condvar::new());
        thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .zip(&views)
                .map(|(number, view)| {
                    let turn = &turn;
                    scope.spawn(move || -> Outcome<()> {
                        let queue = lane.device.create_queue(&QueueDesc::default())?;
                        for round in 0..10 {
                            let call = CollectiveCall::new(
                                SUM,
                                DType::F32,
                                (comm.rank(), 2),
                                Some(view),
                                Some(view),
                            )?;
                            let ops =
                                [Op::Collective(CollectiveGroup::new(comm, std::slice::from_ref(&call)))];
                            let mut at = turn.0.lock().unwrap();
                            while *at != round * 4 + number {
                                at = turn.1.wait(at).unwrap();
                            }
                            queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
                            *at += 1;
                            turn.1.notify_all();
                        }
                        let done = SemaphorePoint::new(&lane.device.create_semaphore(0)?, 1);
                        queue.submit(&Submission {
                            signals: std::slice::from_ref(&done),
                            ..Submission::default()
                        })?;
                        Ok(done.wait(PATIENCE)?)
                    })
                })
                .collect();
            threads.into_iter().try_for_each(|thread| thread.join().unwrap())
        })?;
        views.iter().map(|view| Ok(rank.read_floats(view)?[0])).collect::<Outcome<Vec<_>>>()
    })?;
    assert_eq!(results, [[1024.0; 4]; 2]);
    Ok(())
}

/// Submissions without signals have no event of their own, and what they use is let go of all the same.
#[test]
fn submissions_without_signals_share_an_event() -> Outcome {
    let world = World::new(2)?;
    let mut ranks = world.join(2)?;
    let views = each(&mut ranks, |rank| rank.floats(&[1.0; 4]))?;
    let records = world.driver.calls("cuEventRecord");
    for _ in 0..20 {
        for (rank, view) in ranks.iter().zip(&views) {
            rank.enqueue(&[rank.call(SUM, DType::F32, Some(view), Some(view))?])?;
        }
    }
    // The reactor adds a few.
    assert!(world.driver.calls("cuEventRecord") - records < 30, "far fewer than 40");
    let weak: Vec<_> = views.iter().map(|view| Arc::downgrade(view.buffer())).collect();
    drop(views);
    until(|| weak.iter().all(|buffer| buffer.upgrade().is_none()));
    Ok(())
}

#[test]
fn memory_of_the_library_is_registered_and_outlives_its_registration() -> Outcome {
    let world = World::new(2)?;
    let mut ranks = world.join(2)?;
    each(&mut ranks, |rank| {
        let buffer = rank.comm.allocate(1000)?;
        assert_eq!(buffer.size(), 1000);
        let view = BufferView::whole(Arc::clone(&buffer));
        assert_eq!(rank.read(&view)?, [0; 1000], "it is zeroed");
        let local = rank.comm.register(&buffer, RegistrationKind::Local)?;
        let symmetric = rank.comm.register(&buffer, RegistrationKind::Symmetric)?;
        assert_eq!((local.kind(), symmetric.kind()), (RegistrationKind::Local, RegistrationKind::Symmetric));
        rank.lane.submit(&[Op::Fill(FillRegion::bytes(&view, 1))])?;
        let call = rank.call(SUM, DType::U8, Some(&view), Some(&view))?;
        let point = rank.submit(&[call])?;
        drop((local, symmetric));
        point.wait(PATIENCE)?;
        assert_eq!(rank.read(&view)?, [2; 1000]);
        let pooled = rank.lane.device.allocate(&BufferDesc::device(4096))?;
        for kind in [RegistrationKind::Local, RegistrationKind::Symmetric] {
            let refused = rank.comm.register(&pooled, kind).map(|_| ());
            assert!(matches!(refused, Err(CollectiveError::Unsupported { .. })), "{refused:?}");
        }
        Ok(())
    })?;
    until(|| {
        world.nccl.calls("ncclCommDeregister") == 2 && world.nccl.calls("ncclCommWindowDeregister") == 2
    });
    until(|| world.nccl.calls("ncclMemFree") == 2);
    Ok(())
}

#[test]
fn where_there_are_no_windows_memory_is_registered_for_this_rank() -> Outcome {
    let world = World::with(2, Nccl::load()?.with("windows", "0"))?;
    let mut ranks = world.join(2)?;
    let kinds = each(&mut ranks, |rank| {
        let buffer = rank.comm.allocate(4096)?;
        Ok(rank.comm.register(&buffer, RegistrationKind::Symmetric)?.kind())
    })?;
    assert_eq!(kinds, [RegistrationKind::Local; 2]);
    Ok(())
}

#[test]
fn errors_that_came_later_are_found_by_asking() -> Outcome {
    let world = World::new(2)?;
    let ranks = world.join(2)?;
    ranks[0].comm.check()?;
    world.nccl.set("async", "0:6");
    let found = ranks[0].comm.check();
    assert!(matches!(&found, Err(CollectiveError::Library { source, .. }) if source.code == 6), "{found:?}");
    world.nccl.set("async", "");
    Ok(())
}
