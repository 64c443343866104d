//! A submission without signals allocates nothing once its queue is warm, and neither does a persistent call.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::Arc,
    thread,
    time::Duration,
};

use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous};
use warpweft_comm::{CommConfig, Communicator};
use warpweft_core_types::{
    Backend, BufferDesc, BufferView, CollectiveCall, CollectiveGroup, CollectiveOp, Collectives, DType,
    Deadline, Device, Features, FillRegion, NativeCommunicator, NativeCommunicatorDesc, Op, QueueDesc,
    ReduceOp, SemaphorePoint, Submission,
};
use warpweft_cuda::{CudaBackend, CudaConfig};
use warpweft_stand_in_cuda::StandIn;
use warpweft_stand_in_nccl::StandIn as Nccl;

const PATIENCE: Duration = Duration::from_secs(20);

struct Counting;

thread_local! {
    static HERE: Cell<u64> = const { Cell::new(0) };
}

fn note() {
    // A thread that is ending counts no more.
    let _ending = HERE.try_with(|here| here.set(here.get() + 1));
}

// SAFETY: every call goes to the system's allocator as it came.
#[expect(unsafe_code, reason = "an allocator is an unsafe trait")]
unsafe impl GlobalAlloc for Counting {
    /// # Safety
    ///
    /// - As for the system's allocator.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's duties are the system's allocator's.
        unsafe { System.alloc(layout) }
    }

    /// # Safety
    ///
    /// - As for the system's allocator.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's duties are the system's allocator's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// The stand-ins have allocators of their own: what they allocate is not counted.
#[global_allocator]
static ALLOCATOR: Counting = Counting;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[test]
fn a_warm_queue_allocates_nothing_for_a_submission_without_signals() -> Outcome {
    let driver = StandIn::load()?.with("devices", "1");
    let nccl = Nccl::load()?.with("driver", &driver.path().display().to_string());
    let config = CudaConfig::default().with_driver(driver.path()).without_cache().with_nccl(nccl.path());
    let backend = CudaBackend::with_config(&config)?;
    let device: Arc<dyn Device> = backend.open(0, Features::COLLECTIVES)?;
    let family: &dyn Collectives = device.collectives().ok_or("the family is absent")?;
    let desc = NativeCommunicatorDesc { id: family.create_id()?, rank: 0, size: 1, multiprocessors: None };
    let comm: Arc<dyn NativeCommunicator> = family.join(&desc, Deadline::within(PATIENCE))?;
    let view = BufferView::whole(device.allocate(&BufferDesc::device(64))?);
    let (src, dst) = (Some(&view), Some(&view));
    let sum = CollectiveOp::AllReduce(ReduceOp::Sum);
    let calls = [CollectiveCall::new(sum, DType::F32, (0, 1), src, dst)?];
    let ops = [Op::Collective(CollectiveGroup::new(&comm, &calls)), Op::Fill(FillRegion::bytes(&view, 1))];
    let queue = device.create_queue(&QueueDesc::default())?;
    let semaphore = device.create_semaphore(0)?;
    let mut grown = 0;
    for (round, op) in (1..).zip(ops.iter().cycle()).take(20) {
        let before = HERE.get();
        for _ in 0..100 {
            queue.submit(&Submission { ops: std::slice::from_ref(op), ..Submission::default() }).unwrap();
        }
        let allocated = HERE.get() - before;
        let done = SemaphorePoint::new(&semaphore, round);
        queue.submit(&Submission { signals: std::slice::from_ref(&done), ..Submission::default() })?;
        done.wait(PATIENCE)?;
        // A list may still grow once, on a machine that is slow to look at what is over.
        grown += u64::from(round > 4 && allocated > 0);
        assert!(grown <= 1, "round {round}: {allocated} allocations");
    }
    Ok(())
}

#[test]
fn a_persistent_call_allocates_nothing_in_a_warm_queue() -> Outcome {
    let driver = StandIn::load()?.with("devices", "2");
    let nccl = Nccl::load()?.with("driver", &driver.path().display().to_string());
    let config = CudaConfig::default().with_driver(driver.path()).without_cache().with_nccl(nccl.path());
    let backend = CudaBackend::with_config(&config)?;
    let meeting = Meeting::new();
    thread::scope(|scope| {
        let rank = |rank| {
            let (meeting, backend) = (Rendezvous::Meeting(Arc::clone(&meeting)), &backend);
            scope.spawn(move || {
                let device = backend.open(rank, Features::COLLECTIVES)?;
                let group = Group::join(meeting, JoinConfig::new(Rank(rank), 2), PATIENCE)?;
                persist(&Communicator::create(group, &device, &CommConfig::default(), PATIENCE)?)
            })
        };
        let ranks: Vec<_> = (0..2).map(rank).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
    })
}

fn persist(comm: &Communicator) -> Outcome {
    let device = comm.device();
    let view = BufferView::whole(device.allocate(&BufferDesc::device(64))?);
    let call = comm.all_reduce_in_place(ReduceOp::Sum, DType::F32, &view)?.persistent()?;
    let queue = device.create_queue(&QueueDesc::default())?;
    let mut grown = 0;
    // More calls than are remembered, since the record of them grows until then.
    for round in 0..20 {
        let before = HERE.get();
        for _ in 0..100 {
            call.enqueue(&queue)?;
        }
        let allocated = HERE.get() - before;
        call.enqueue(&queue)?.wait(PATIENCE)?;
        grown += u64::from(round > 4 && allocated > 0);
        assert!(grown <= 1, "round {round}: {allocated} allocations");
    }
    Ok(())
}
