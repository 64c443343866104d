//! What a call costs the host, and how long calls take until they are done, beside NCCL alone; in rounds that alternate.

use std::{
    ffi::{c_int, c_void},
    sync::{Arc, Barrier},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::{CudaContext, CudaStream, result::event, sys};
use libloading::Library;
use nccl_rs::{
    Communicator, CommunicatorConfig, CommunicatorDesc, DataType, Dst, Nccl, Src, Stream, UniqueId,
};
use serde_json::json;
use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank as Place, Rendezvous};
use warpweft_cli::measure::Bar;
use warpweft_comm::{CommConfig, EngineKind};
use warpweft_core_types::{
    BufferDesc, BufferView, CollectiveCall, CollectiveGroup, CollectiveOp, DType, Op, Queue, ReduceOp,
    Submission,
};

use super::{Rank, Ranks};
use crate::{
    bench::{
        alloc,
        samples::{Samples, in_turn, judge, timed},
    },
    rig::{LIMIT, report, say},
};

/// Calls of a round of the first part: fewer than a stream takes before it makes its caller wait.
const CALLS: u32 = 50;
const ROUNDS: usize = 301;
const WARM_UP: usize = 20;

/// Rounds of each size of the second part.
const SIZE_ROUNDS: usize = 21;
const SIZE_WARM_UP: usize = 3;

/// The largest, and what each is more than the one before.
const LARGEST: u64 = 1 << 30;
const STEP: u64 = 4;

/// What our throughput may be of NCCL's alone at the least.
const LEAST: f64 = 0.98;

const SUM: CollectiveOp = CollectiveOp::AllReduce(ReduceOp::Sum);

/// `ncclAllReduce`.
type AllReduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;

/// NCCL without this project's types above `nccl-rs`, in a stream of its own.
struct Alone {
    comm: Communicator,
    stream: Arc<CudaStream>,
    all_reduce: AllReduce,
}

/// Our ways to call: what is printed of each, and what it is called in bars.
const WAYS: [(&str, &str); 3] = [
    ("submission", "a submission"),
    ("communicator", "a communicator's call"),
    ("persistent", "a persistent call"),
];

/// A rank both ways, with memory that both use.
struct Both<'a> {
    rank: &'a Rank<'a>,
    /// The same rank as programs have it.
    comm: warpweft_comm::Communicator,
    alone: Alone,
    /// A queue whose stream nobody else has.
    queue: Arc<dyn Queue>,
    src: BufferView,
    dst: BufferView,
    mark: sys::CUevent,
    barrier: &'a Barrier,
}

/// What a rank found.
struct Found {
    /// In the ways to call, and by NCCL alone.
    host: [Samples; WAYS.len()],
    alone: Samples,
    allocations: [u64; WAYS.len()],
    sizes: Vec<SizeFound>,
}

struct SizeFound {
    op: CollectiveOp,
    bytes: u64,
    ours: Samples,
    alone: Samples,
    /// Our throughput by NCCL's: the median, and what it lies between with 95 %.
    ratio: [f64; 3],
}

pub(crate) fn run() -> Result<()> {
    let ranks = Ranks::open()?;
    let nccl = Nccl::load()?;
    let (id, barrier) = (nccl.unique_id()?, Barrier::new(ranks.rig.devices.len()));
    let meeting = Meeting::new();
    let found = ranks.each(|rank| {
        let both = Both::new(rank, (&nccl, id), &meeting, &barrier)?;
        let (host, alone, allocations) = both.host()?;
        let sizes = both.sizes()?;
        Ok(Found { host, alone, allocations, sizes })
    })?;
    let size = ranks.size();
    let first = found.into_iter().next().context("there is a rank")?;
    tell_host(&first, size);
    tell_sizes(&first.sizes, size);
    Ok(())
}

fn tell_host(found: &Found, size: u32) {
    let title = format!("one all_reduce of 8 bytes, {size} ranks");
    let ours = WAYS.iter().map(|(what, _)| *what).zip(&found.host);
    for (what, samples) in ours.chain([("NCCL alone", &found.alone)]) {
        report(&json!({"timing": title, "what": what, "time": samples.json()}));
        say(&format!("{title:<60} {what:<12} {}", samples.words()));
    }
    let calls = ROUNDS * CALLS as usize;
    for (((_, what), ours), allocations) in WAYS.iter().zip(&found.host).zip(found.allocations) {
        judge(&ours.beyond(&found.alone).at_most(format!("{title}: {what}, more than the raw call"), 0.3));
        let allocations = f64::from(u32::try_from(allocations).unwrap_or(u32::MAX));
        judge(&Bar::at_most(format!("{title}: {what}, allocations of {calls}"), allocations, 0.0, ""));
    }
}

fn tell_sizes(sizes: &[SizeFound], size: u32) {
    for found in sizes {
        let SizeFound { op, bytes, ours, alone, ratio: [low, median, high] } = found;
        report(&json!({"collective": op.name(), "ranks": size, "bytes": bytes, "ours": ours.json(),
            "alone": alone.json(), "ratio": {"p50": median, "low": low, "high": high}}));
        say(&format!(
            "{:<15} {bytes:>11} B  ours {:>10.2} us, p99 {:>10.2}  alone {:>10.2}, p99 {:>10.2}  {median:.3} \
             ({low:.3} to {high:.3})",
            op.name(),
            ours.median(),
            ours.p99(),
            alone.median(),
            alone.p99()
        ));
    }
    for op in operations() {
        let of_op = sizes.iter().filter(|found| found.op.name() == op.name());
        let Some(worst) = of_op.min_by(|one, other| one.ratio[2].total_cmp(&other.ratio[2])) else {
            continue;
        };
        let what = format!(
            "{} on {size} ranks: throughput by NCCL's alone, at worst ({} B), with 95 % at most",
            op.name(),
            worst.bytes
        );
        judge(&Bar::at_least(what, worst.ratio[2], LEAST, ""));
    }
}

fn operations() -> [CollectiveOp; 6] {
    [
        SUM,
        CollectiveOp::ReduceScatter(ReduceOp::Sum),
        CollectiveOp::AllGather,
        CollectiveOp::Broadcast { root: 0 },
        CollectiveOp::Reduce { op: ReduceOp::Sum, root: 0 },
        CollectiveOp::AllToAll,
    ]
}

impl<'a> Both<'a> {
    fn new(
        rank: &'a Rank<'a>,
        (nccl, id): (&Nccl, UniqueId),
        meeting: &Arc<Meeting>,
        barrier: &'a Barrier,
    ) -> Result<Self> {
        let rendezvous = Rendezvous::Meeting(Arc::clone(meeting));
        let joined = Group::join(rendezvous, JoinConfig::new(Place(rank.rank()), rank.size()), LIMIT * 3)?;
        let native = CommConfig { engine: Some(EngineKind::Native), ..CommConfig::default() };
        let through = warpweft_comm::Communicator::create(joined, &rank.bench.device, &native, LIMIT * 3)?;
        // Current on this thread from here on.
        let context = CudaContext::new(rank.rank() as usize)?;
        let config = CommunicatorConfig::new().blocking(true).patience(LIMIT * 3);
        let desc = CommunicatorDesc::new(id, rank.rank(), rank.size()).device(rank.rank()).config(config);
        let comm = Communicator::init(nccl, &desc)?;
        let alone = Alone { comm, stream: context.new_stream()?, all_reduce: all_reduce(nccl)? };
        context.bind_to_thread()?;
        let queue = rank.bench.new_queue()?;
        let memory = || rank.bench.allocate(BufferDesc::device(LARGEST));
        let mark = event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        Ok(Self { rank, comm: through, alone, queue, src: memory()?, dst: memory()?, mark, barrier })
    }

    /// The cost of a call to the host.
    #[expect(unsafe_code, reason = "calls the library")]
    fn host(&self) -> Result<([Samples; WAYS.len()], Samples, [u64; WAYS.len()])> {
        /// `ncclFloat32` and `ncclSum`.
        const F32_SUM: (c_int, c_int) = (7, 0);
        let view = self.src.slice(0..8)?;
        let calls = [self.rank.call(SUM, DType::F32, Some(&view), Some(&view))?];
        let ops = [Op::Collective(CollectiveGroup::new(&self.rank.comm, &calls))];
        let submission = Submission { ops: &ops, ..Submission::default() };
        let (address, handle) = (self.address(&view)?, self.alone.comm.as_raw());
        let (queue, stream) = (&self.queue, self.alone.stream.cu_stream().cast());
        let persistent = self.comm.all_reduce_in_place(ReduceOp::Sum, DType::F32, &view)?.persistent()?;
        let submit = || Ok(queue.submit(&submission).map(drop)?);
        let call = || {
            self.comm.all_reduce(ReduceOp::Sum, DType::F32, &view, &view)?.on(queue)?;
            Ok(())
        };
        let again = || Ok(persistent.enqueue(queue).map(drop)?);
        let ways: [&dyn Fn() -> Result<()>; WAYS.len()] = [&submit, &call, &again];
        let mut host = <[Samples; WAYS.len()]>::default();
        let (mut alone, mut allocations) = (Samples::default(), [0; WAYS.len()]);
        for round in 0..ROUNDS + WARM_UP {
            for ((way, samples), allocations) in ways.iter().zip(&mut host).zip(&mut allocations) {
                let before = alloc::count_here();
                let time = timed(|| (0..CALLS).try_for_each(|_| way()))?;
                let allocated = alloc::count_here() - before;
                self.wait_for_queue()?;
                if round >= WARM_UP {
                    samples.add(time / CALLS);
                    *allocations += allocated;
                }
            }
            let theirs = timed(|| {
                for _ in 0..CALLS {
                    // SAFETY: two numbers of memory that lives until the stream was waited for; the communicator is this
                    // thread's.
                    let code = unsafe {
                        (self.alone.all_reduce)(address, address, 2, F32_SUM.0, F32_SUM.1, handle, stream)
                    };
                    ensure!(code == 0, "the raw call returned {code}");
                }
                Ok(())
            })?;
            self.wait_for_stream()?;
            if round >= WARM_UP {
                alone.add(theirs / CALLS);
            }
        }
        Ok((host, alone, allocations))
    }

    fn sizes(&self) -> Result<Vec<SizeFound>> {
        let mut sizes: Vec<u64> = std::iter::successors(Some(8_u64), |size| size.checked_mul(STEP))
            .take_while(|size| *size < LARGEST)
            .collect();
        sizes.push(LARGEST);
        let mut all = Vec::new();
        for op in operations() {
            for bytes in &sizes {
                all.push(self.size(op, *bytes)?);
            }
        }
        Ok(all)
    }

    /// One operation of one size: of its larger operand.
    fn size(&self, op: CollectiveOp, bytes: u64) -> Result<SizeFound> {
        let ranks = u64::from(self.rank.size());
        let part = (bytes / ranks / 4).max(1) * 4;
        let whole = part * ranks;
        let (gives, gets) = match op {
            CollectiveOp::ReduceScatter(_) => (Some(whole), Some(part)),
            CollectiveOp::AllGather => (Some(part), Some(whole)),
            CollectiveOp::Broadcast { root } => ((root == self.rank.rank()).then_some(whole), Some(whole)),
            CollectiveOp::Reduce { root, .. } => (Some(whole), (root == self.rank.rank()).then_some(whole)),
            _ => (Some(whole), Some(whole)),
        };
        let src = gives.map(|size| self.src.slice(0..size)).transpose()?;
        let dst = gets.map(|size| self.dst.slice(0..size)).transpose()?;
        let call = self.rank.call(op, DType::F32, src.as_ref(), dst.as_ref())?;
        let calls = if bytes <= 1 << 20 { 20 } else { 2 };
        let (mut own, mut raw) = (|| self.own(&call, calls), || self.raw(&call, calls));
        let (mut ours, mut alone) = (Samples::default(), Samples::default());
        for round in 0..SIZE_ROUNDS + SIZE_WARM_UP {
            let (own, raw) = in_turn(round, &mut own, &mut raw)?;
            if round >= SIZE_WARM_UP {
                ours.add(own);
                alone.add(raw);
            }
        }
        // Throughput goes up as times go down.
        let ratio = alone.ratio(&ours);
        Ok(SizeFound { op, bytes: whole, ours, alone, ratio })
    }

    fn own(&self, call: &CollectiveCall<'_>, calls: u32) -> Result<Duration> {
        let ops = [Op::Collective(CollectiveGroup::new(&self.rank.comm, std::slice::from_ref(call)))];
        let submission = Submission { ops: &ops, ..Submission::default() };
        let submit = || {
            self.queue.submit(&submission)?;
            Ok(())
        };
        self.until_done(calls, submit, || self.wait_for_queue())
    }

    #[expect(unsafe_code, reason = "vouches for memory")]
    fn raw(&self, call: &CollectiveCall<'_>, calls: u32) -> Result<Duration> {
        let comm = &self.alone.comm;
        let stream = Stream::from(&*self.alone.stream);
        let place = |view: Option<&BufferView>| {
            view.map(|view| anyhow::Ok((self.address(view)?, usize::try_from(view.size() / 4)?))).transpose()
        };
        let (src, dst) = (place(call.src())?, place(call.dst())?);
        // SAFETY: both are parts of memory that lives until the stream was waited for, and nobody else uses it meanwhile.
        let src = src.map(|(address, count)| unsafe { Src::new(address, count, DataType::F32) });
        // SAFETY: as above.
        let mut dst = dst.map(|(address, count)| unsafe { Dst::new(address, count, DataType::F32) });
        let sum = nccl_rs::ReduceOp::Sum;
        let call = || {
            match (call.op(), src.as_ref(), dst.as_mut()) {
                (CollectiveOp::AllReduce(_), Some(src), Some(dst)) => comm.all_reduce(src, dst, sum, &stream),
                (CollectiveOp::ReduceScatter(_), Some(src), Some(dst)) => {
                    comm.reduce_scatter(src, dst, sum, &stream)
                }
                (CollectiveOp::AllGather, Some(src), Some(dst)) => comm.all_gather(src, dst, &stream),
                (CollectiveOp::Broadcast { root }, src, Some(dst)) => comm.broadcast(src, dst, root, &stream),
                (CollectiveOp::Reduce { root, .. }, Some(src), dst) => {
                    comm.reduce(src, dst, sum, root, &stream)
                }
                (_, Some(src), Some(dst)) => comm.all_to_all(src, dst, &stream),
                _ => anyhow::bail!("an operand is missing"),
            }?;
            Ok(())
        };
        self.until_done(calls, call, || self.wait_for_stream())
    }

    /// How long each of some calls takes until all are done, once all ranks are there.
    fn until_done(
        &self,
        calls: u32,
        mut call: impl FnMut() -> Result<()>,
        wait: impl Fn() -> Result<()>,
    ) -> Result<Duration> {
        self.barrier.wait();
        let time = timed(|| {
            for _ in 0..calls {
                call()?;
            }
            wait()
        })?;
        Ok(time / calls)
    }

    fn wait_for_queue(&self) -> Result<()> {
        let done = self.rank.bench.point()?;
        self.queue.submit(&Submission { signals: std::slice::from_ref(&done), ..Submission::default() })?;
        Ok(done.wait(LIMIT)?)
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn wait_for_stream(&self) -> Result<()> {
        // SAFETY: event and stream are live and of the context that is current.
        unsafe { event::record(self.mark, self.alone.stream.cu_stream()) }?;
        let start = Instant::now();
        loop {
            // SAFETY: the event is live.
            match unsafe { event::query(self.mark) } {
                Ok(()) => return Ok(()),
                Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => {}
                Err(error) => return Err(error.into()),
            }
            ensure!(start.elapsed() < LIMIT, "the stream did not end");
        }
    }

    fn address(&self, view: &BufferView) -> Result<*mut c_void> {
        let base = view.buffer().unified_address().context("it has an address")?;
        Ok(std::ptr::without_provenance_mut(usize::try_from(base + view.offset())?))
    }
}

/// The library's function, of whatever file it is.
#[expect(unsafe_code, reason = "gives a function its type")]
fn all_reduce(nccl: &Nccl) -> Result<AllReduce> {
    // SAFETY: the library is loaded already.
    let library = unsafe { Library::new(nccl.path()) }?;
    // SAFETY: `nccl.h` declares it so.
    let all_reduce = *unsafe { library.get::<AllReduce>("ncclAllReduce") }?;
    // The function is used as long as the process lives.
    std::mem::forget(library);
    Ok(all_reduce)
}
