//! A submission without signals allocates nothing once its queue is warm, and neither does a persistent call, nor a single
//! operation of a runtime of graphs.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous};
use warpweft_comm::{CommConfig, Communicator};
use warpweft_core_types::{
    Arg, Backend, BufferDesc, BufferView, CodeFormat, CollectiveCall, CollectiveGroup, CollectiveOp,
    Collectives, DType, Deadline, Device, Features, FillRegion, ForeignCode, Kernel, KernelCode,
    KernelContract, Launch, NativeCommunicator, NativeCommunicatorDesc, Op, Param, QueueDesc, ReduceOp,
    SemaphorePoint, Submission,
};
use warpweft_cuda::{CudaBackend, CudaConfig};
use warpweft_graph_runtime::{Completion, HostTask, MemoryPlacement, Runtime, RuntimeConfig, Usage};
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

/// A kernel with more arguments than have room in an operation itself.
#[expect(unsafe_code, reason = "asserts what foreign code does")]
fn mix(device: &Arc<dyn Device>) -> Outcome<Arc<dyn Kernel>> {
    let params = [[Param::write(4), Param::read(4)].as_slice(), &[Param::scalar::<u32>(); 3]].concat();
    let params_of_ptx = ".param .u64 a, .param .u64 b, .param .u32 c, .param .u32 d, .param .u32 e";
    let text = format!(
        ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry mix_write({params_of_ptx})\n{{ ret; }}\n"
    );
    let code = ForeignCode::Source { format: CodeFormat::Ptx, text };
    // SAFETY: the stand-in runs a function of its own for this entry, which looks every access up.
    let code = unsafe { KernelCode::new().with_foreign([KernelContract::new("mix_write", params)], code) };
    Ok(device.load(&code)?.kernel("mix_write")?)
}

/// Whoever holds on to the completions, and for however long.
#[test]
fn a_single_operation_allocates_nothing_in_a_warm_runtime() -> Outcome {
    let driver = StandIn::load()?.with("devices", "1");
    let config = CudaConfig::default().with_driver(driver.path()).without_cache();
    let device = CudaBackend::with_config(&config)?.open(0, Features::empty())?;
    let kernel = mix(&device)?;
    let runtime = Runtime::new([Arc::clone(&device)], RuntimeConfig::default())?;
    let memory = || {
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(
            runtime.allocate(&MemoryPlacement::Device(device.info().id), 64)?.view().clone(),
        )
    };
    let [here, there] = [memory()?, memory()?];
    let (count, seed) = (16_u32.to_le_bytes(), 7_u32.to_le_bytes());
    let scalars = [&count, &count, &seed].map(|scalar| Arg::Scalar(scalar));
    let ways = [[&here, &there], [&there, &here]];
    let args = ways.map(|views| [views.map(Arg::Buffer).as_slice(), &scalars].concat());
    // As many under way at once as there can be: later there are fewer.
    let (open, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let gate = HostTask::fallible(move |_| Ok(gate.lock().unwrap().recv_timeout(PATIENCE)?));
    let window = runtime.allocate(&MemoryPlacement::HostVisible(device.info().id), 64)?;
    let mut held: Vec<Completion> = Vec::with_capacity(256);
    held.push(runtime.task(&gate, &[(window.view().clone(), Usage::Write)])?);
    held.push(runtime.copy(window.view(), &here)?);
    for args in args.iter().cycle().take(RuntimeConfig::default().max_submissions - 2) {
        held.push(runtime.launch(Launch::new(&kernel, [1, 1, 1], args)?)?);
    }
    open.send(())?;
    held.iter().try_for_each(|completion| completion.wait(PATIENCE))?;
    held.clear();
    let mut grown = 0;
    for round in 0..20 {
        let before = HERE.get();
        for args in args.iter().cycle().take(100) {
            let completion = runtime.launch(Launch::new(&kernel, [1, 1, 1], args)?)?;
            if round % 2 == 0 {
                held.push(completion);
            }
        }
        let allocated = HERE.get() - before;
        held.clear();
        runtime.copy(&here, &there)?.wait(PATIENCE)?;
        // A list may still grow once, on a machine that is slow to look at what is over.
        grown += u64::from(round > 4 && allocated > 0);
        assert!(grown <= 1, "round {round}: {allocated} allocations");
    }
    Ok(())
}
