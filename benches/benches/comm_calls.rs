//! What a call of a communicator costs its caller, beside the submission that it comes to, on devices and an NCCL that
//! are made of host threads: what is measured is ours alone. `gpu-suite bench collectives` has the same beside NCCL.
//!
//! Run: `cargo bench -p warpweft-benches --bench comm_calls`

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use warpweft::{
    Backend, BufferDesc, BufferView, CollectiveCall, CollectiveGroup, CollectiveOp, DType, Deadline, Device,
    Features, NativeCommunicator, NativeCommunicatorDesc, Op, Queue, QueueDesc, ReduceOp, SemaphorePoint,
    Submission,
    bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous},
    comm::{CommConfig, Communicator, EngineKind},
};
use warpweft_cli::measure::Summary;
use warpweft_cuda::{CudaBackend, CudaConfig};
use warpweft_stand_in_cuda::StandIn;
use warpweft_stand_in_nccl::StandIn as Nccl;

const WITHIN: Duration = Duration::from_secs(30);

/// Calls of a round, which a queue takes without a word to the driver about their end.
const CALLS: u32 = 50;
const ROUNDS: usize = 301;
const WARM_UP: usize = 20;

/// The ways to call.
const WAYS: [&str; 3] = ["submission", "communicator", "persistent"];

const SUM: CollectiveOp = CollectiveOp::AllReduce(ReduceOp::Sum);

type Outcome<T = ()> = anyhow::Result<T>;

/// What ranks share of each round.
struct Round {
    barrier: Barrier,
    has_failed: AtomicBool,
}

struct Place {
    device: Arc<dyn Device>,
    queue: Arc<dyn Queue>,
    native: Arc<dyn NativeCommunicator>,
    comm: Communicator,
    view: BufferView,
}

fn main() -> Outcome {
    let driver = StandIn::load()?.with("devices", "2");
    let nccl = Nccl::load()?.with("driver", &driver.path().display().to_string());
    let config = CudaConfig::default().with_driver(driver.path()).without_cache().with_nccl(nccl.path());
    let backend = CudaBackend::with_config(&config)?;
    let (meeting, round) = (Meeting::new(), Round { barrier: Barrier::new(2), has_failed: false.into() });
    let first = backend.open(0, Features::COLLECTIVES)?;
    let id = first.collectives().ok_or_else(|| anyhow::anyhow!("there are no collectives"))?.create_id()?;
    let figures = thread::scope(|scope| {
        let start = |rank| {
            let desc = NativeCommunicatorDesc { id: id.clone(), rank, size: 2, multiprocessors: None };
            let (meeting, backend, round) = (Arc::clone(&meeting), &backend, &round);
            scope.spawn(move || {
                let place = Place::new(backend, &desc, meeting)?;
                place.measure(round)
            })
        };
        let ranks: Vec<_> = (0..2).map(start).collect();
        let ended = ranks.into_iter().map(|rank| rank.join().expect("no rank panics"));
        ended.collect::<Outcome<Vec<_>>>()
    })?;
    figures.first().into_iter().for_each(tell);
    Ok(())
}

#[expect(clippy::print_stdout, reason = "printing is what a benchmark does")]
fn tell(figures: &[Vec<Duration>; WAYS.len()]) {
    for (way, figures) in WAYS.into_iter().zip(figures) {
        let Summary { p50_ns, p99_ns, min_ns, .. } = Summary::of(figures);
        println!("all_reduce/{way:<14} p50 {p50_ns:>5} ns  least {min_ns:>5}  p99 {p99_ns:>5}");
        let name = format!("comm_calls/{way}");
        println!("{}", serde_json::json!({ "name": name, "median": p50_ns, "unit": "ns" }));
    }
}

impl Place {
    fn new(backend: &CudaBackend, desc: &NativeCommunicatorDesc, meeting: Arc<Meeting>) -> Outcome<Self> {
        let device = backend.open(desc.rank, Features::COLLECTIVES)?;
        let family = device.collectives().ok_or_else(|| anyhow::anyhow!("there are no collectives"))?;
        let native = family.join(desc, Deadline::within(WITHIN))?;
        let group = Group::join(Rendezvous::Meeting(meeting), JoinConfig::new(Rank(desc.rank), 2), WITHIN)?;
        let config = CommConfig { engine: Some(EngineKind::Native), ..CommConfig::default() };
        let comm = Communicator::create(group, &device, &config, WITHIN)?;
        let queue = device.create_queue(&QueueDesc::default())?;
        let view = BufferView::whole(device.allocate(&BufferDesc::device(8))?);
        Ok(Self { device, queue, native, comm, view })
    }

    /// How long each call took; what there is until then if the other rank fails.
    fn measure(&self, Round { barrier, has_failed }: &Round) -> Outcome<[Vec<Duration>; WAYS.len()]> {
        let view = &self.view;
        let calls = [CollectiveCall::new(SUM, DType::F32, (self.comm.rank(), 2), Some(view), Some(view))?];
        let ops = [Op::Collective(CollectiveGroup::new(&self.native, &calls))];
        let submission = Submission { ops: &ops, ..Submission::default() };
        let persistent = self.comm.all_reduce_in_place(ReduceOp::Sum, DType::F32, view)?.persistent()?;
        let submit = || -> Outcome { Ok(self.queue.submit(&submission).map(drop)?) };
        let call = || -> Outcome {
            self.comm.all_reduce(ReduceOp::Sum, DType::F32, view, view)?.on(&self.queue)?;
            Ok(())
        };
        let again = || -> Outcome { Ok(persistent.enqueue(&self.queue).map(drop)?) };
        let ways: [&dyn Fn() -> Outcome; WAYS.len()] = [&submit, &call, &again];
        let mut figures = [const { Vec::new() }; WAYS.len()];
        for round in 0..ROUNDS + WARM_UP {
            for (way, taken) in ways.iter().zip(&mut figures) {
                // The other rank comes later, so that nothing runs beside this one's calls.
                if self.comm.rank() == 1 {
                    barrier.wait();
                }
                let began = Instant::now();
                let called = (0..CALLS).try_for_each(|_| way());
                let took = began.elapsed();
                if self.comm.rank() == 0 {
                    barrier.wait();
                }
                let ended = called.and_then(|()| self.wait());
                // Nobody who waits at a barrier hears that a rank is gone, so both leave behind the same one. The barrier
                // orders the store before the load.
                if ended.is_err() {
                    has_failed.store(true, Ordering::Relaxed);
                }
                barrier.wait();
                ended?;
                if has_failed.load(Ordering::Relaxed) {
                    return Ok(figures);
                }
                if round >= WARM_UP {
                    taken.push(took / CALLS);
                }
            }
        }
        Ok(figures)
    }

    fn wait(&self) -> Outcome {
        let done = SemaphorePoint::new(&self.device.create_semaphore(0)?, 1);
        let signals = std::slice::from_ref(&done);
        self.queue.submit(&Submission { signals, ..Submission::default() })?;
        Ok(done.wait(WITHIN)?)
    }
}
