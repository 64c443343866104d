//! One round: what is copied where, and what is reduced on which device.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use warpweft_core_types::{
    BufferDesc, BufferView, CollectiveFailure, CollectiveOp, CopyRegion, DType, Device, Failure, Kernel, Op,
    PeerAccess, Queue, QueueDesc, RangeError, ReduceOp, Semaphore, SemaphorePoint, Submission,
};
use warpweft_transfer::{CopyOptions, Transfer, TransferConfig};

use super::{
    board::Posted,
    kernel::{self, Layout},
};
use crate::CommError;

/// The most of one rank that a device reduces at a time.
const PIECE_BYTES: u64 = 8 << 20;

/// Up to this size every device reduces everything, which takes one step less.
const ONE_STEP_BYTES: u64 = 64 << 10;

/// Parts of a reduction begin at multiples of so many bytes, so that no element or word is cut.
const PART_ALIGNMENT: u64 = 8;

/// The devices of all ranks, and what they share.
#[derive(Debug)]
pub(crate) struct Devices {
    transfer: Transfer,
    workers: Vec<Worker>,
}

/// A device at work: it copies what it reaches, and reduces.
#[derive(Debug)]
struct Worker {
    device: Arc<dyn Device>,
    queue: Arc<dyn Queue>,
    kernel: Arc<dyn Kernel>,
    state: Mutex<Workshop>,
}

/// Its memory for that.
#[derive(Debug)]
struct Workshop {
    memory: Option<BufferView>,
    /// When the memory is free again.
    free: Vec<SemaphorePoint>,
    semaphore: Arc<dyn Semaphore>,
    /// Submissions that raise it.
    submitted: u64,
}

type Outcome<T> = Result<T, Arc<Failure>>;

/// A reduction on one device: of these bytes of each rank, to these places.
struct Reduction<'a> {
    /// The device that does it.
    worker: usize,
    op: ReduceOp,
    dtype: DType,
    inputs: Vec<BufferView>,
    outputs: Vec<BufferView>,
    /// All sources are ready.
    ready: &'a [SemaphorePoint],
}

impl Devices {
    pub(crate) fn new(devices: Vec<Arc<dyn Device>>) -> Result<Self, CommError> {
        let workers = devices.iter().map(Worker::new).collect::<Result<_, _>>()?;
        let transfer = Transfer::new(devices, TransferConfig::default());
        let transfer = transfer.map_err(|error| CommError::NoEngine { reason: error.to_string() })?;
        Ok(Self { transfer, workers })
    }

    /// What one sends the other gets.
    pub(crate) fn pass(&self, send: &Posted, recv: &Posted) -> Outcome<Vec<SemaphorePoint>> {
        let ready = [send.post.ready.clone(), recv.post.ready.clone()];
        let (Some(src), Some(dst)) = (&send.src, &recv.dst) else { return Ok(ready.to_vec()) };
        if (send.dtype, src.size()) != (recv.dtype, dst.size()) {
            let what = format!(
                "{} of {}, {} bytes, meets {} of {}, {} bytes",
                send.op,
                send.dtype,
                src.size(),
                recv.op,
                recv.dtype,
                dst.size()
            );
            return Err(Arc::new(CollectiveFailure::Mismatch { number: 0, what }.into()));
        }
        self.copy_all(&[(src.clone(), dst.clone())], &ready)
    }

    /// Starts a round of calls that agree; it is over when these points are reached.
    pub(crate) fn start(&self, round: &[Posted]) -> Outcome<Vec<SemaphorePoint>> {
        let ready: Vec<_> = round.iter().map(|posted| posted.post.ready.clone()).collect();
        let points = match round[0].op.reduction() {
            Some(op) => self.reduce(round, op, &ready)?,
            None => self.distribute(round, &ready)?,
        };
        // Where nothing had to be done, it is over when all have come.
        Ok(if points.is_empty() { ready } else { points })
    }

    /// Copies from every rank to every rank, as the operation has it.
    fn distribute(&self, round: &[Posted], ready: &[SemaphorePoint]) -> Outcome<Vec<SemaphorePoint>> {
        let parts = round.len() as u64;
        let mut copies = Vec::new();
        for (to, receiver) in (0..parts).zip(round) {
            let Some(dst) = &receiver.dst else { continue };
            for (from, sender) in (0..parts).zip(round) {
                let Some(src) = &sender.src else { continue };
                let (src, dst) = match receiver.op {
                    CollectiveOp::AllGather | CollectiveOp::Gather { .. } => {
                        (src.clone(), part(dst, from, parts)?)
                    }
                    CollectiveOp::Scatter { .. } => (part(src, to, parts)?, dst.clone()),
                    CollectiveOp::AllToAll => (part(src, to, parts)?, part(dst, from, parts)?),
                    _ => (src.clone(), dst.clone()),
                };
                if src.place() != dst.place() {
                    copies.push((src, dst));
                }
            }
        }
        self.copy_all(&copies, ready)
    }

    /// Copies that may be done in any order: each by a device that reaches both ends, the receiver first, or else by
    /// the best route.
    fn copy_all(
        &self,
        copies: &[(BufferView, BufferView)],
        ready: &[SemaphorePoint],
    ) -> Outcome<Vec<SemaphorePoint>> {
        let mut of_workers = vec![Vec::new(); self.workers.len()];
        let mut points = Vec::new();
        for (src, dst) in copies {
            let reaches = |worker: &Worker| worker.reads(src) && worker.writes(dst);
            let is_receiver = |worker: &Worker| worker.device.info().id == dst.device();
            let receiver = self.workers.iter().position(|worker| is_receiver(worker) && reaches(worker));
            match receiver.or_else(|| self.workers.iter().position(reaches)) {
                Some(worker) => of_workers[worker].push((src, dst)),
                None => points.push(self.copy(src, dst, ready)?),
            }
        }
        for (worker, copies) in self.workers.iter().zip(of_workers).filter(|(_, copies)| !copies.is_empty()) {
            let mut workshop = worker.lock();
            let regions = copies.iter().map(|(src, dst)| region(src, dst)).collect::<Outcome<Vec<_>>>()?;
            let ops: Vec<_> = regions.into_iter().map(Op::Copy).collect();
            points.push(workshop.submit(worker, ready, &ops)?);
        }
        Ok(points)
    }

    /// Has devices reduce.
    fn reduce(
        &self,
        round: &[Posted],
        op: ReduceOp,
        ready: &[SemaphorePoint],
    ) -> Outcome<Vec<SemaphorePoint>> {
        let (dtype, parts) = (round[0].dtype, round.len() as u64);
        let sources: Vec<&BufferView> = round.iter().filter_map(|posted| posted.src.as_ref()).collect();
        let size = sources.first().map_or(0, |view| view.size());
        // Every device would read operands that others write.
        let same = |posted: &Posted| Some(posted.src.as_ref()?.place() == posted.dst.as_ref()?.place());
        let in_place = round.iter().any(|posted| same(posted) == Some(true));
        let mut points = Vec::new();
        let mut reduce = |worker: usize, from: u64, to: u64, outputs: &[(&BufferView, u64)]| -> Outcome<()> {
            for start in (from..to).step_by(to_usize(PIECE_BYTES)) {
                let piece = start..(start + PIECE_BYTES).min(to);
                let inputs = sources.iter().map(|view| slice(view, piece.clone())).collect::<Outcome<_>>()?;
                let output =
                    |(view, base): &(&BufferView, u64)| slice(view, piece.start - base..piece.end - base);
                let outputs = outputs.iter().map(output).collect::<Outcome<_>>()?;
                points.extend(self.run(&Reduction { worker, op, dtype, inputs, outputs, ready })?);
            }
            Ok(())
        };
        let all: Vec<_> = round.iter().filter_map(|posted| Some((posted.dst.as_ref()?, 0))).collect();
        for (rank, posted) in round.iter().enumerate() {
            let Some(dst) = &posted.dst else { continue };
            match posted.op {
                CollectiveOp::AllReduce(_) if size > ONE_STEP_BYTES || in_place => {
                    let share = size.div_ceil(parts).next_multiple_of(PART_ALIGNMENT);
                    let from = (rank as u64 * share).min(size);
                    reduce(rank, from, (from + share).min(size), &all)?;
                }
                CollectiveOp::ReduceScatter(_) => {
                    let (from, part) = (rank as u64 * dst.size(), dst.size());
                    reduce(rank, from, from + part, &[(dst, from)])?;
                }
                _ => reduce(rank, 0, size, &[(dst, 0)])?,
            }
        }
        Ok(points)
    }

    /// One reduction: copies to the device, the kernel, and copies of the result.
    fn run(&self, reduction: &Reduction<'_>) -> Outcome<Vec<SemaphorePoint>> {
        let Reduction { inputs, outputs, ready, .. } = reduction;
        let worker = &self.workers[reduction.worker];
        let bytes = inputs.first().map_or(0, BufferView::size);
        let layout = Layout::new(bytes, u32::try_from(inputs.len()).unwrap_or(u32::MAX));
        let what = (reduction.op, reduction.dtype, bytes);
        let mut workshop = worker.lock();
        let memory = workshop.memory(worker.device.as_ref(), layout.size())?;
        let places: Vec<_> = (0..layout.ranks)
            .map(|rank| slice(&memory, layout.input(rank)..layout.input(rank) + bytes))
            .collect::<Outcome<_>>()?;
        let (result, used) = (slice(&memory, 0..bytes)?, slice(&memory, 0..layout.size())?);
        let mut after = ready.to_vec();
        after.append(&mut workshop.free);
        let is_near =
            inputs.iter().all(|view| worker.reads(view)) && outputs.iter().all(|view| worker.writes(view));
        let done = if is_near {
            let given = inputs.iter().zip(&places).map(|(input, place)| region(input, place));
            let given = given.collect::<Outcome<Vec<_>>>()?;
            let taken = outputs.iter().map(|output| region(&result, output)).collect::<Outcome<Vec<_>>>()?;
            let done = kernel::with_launch(&worker.kernel, &used, layout, what, |launch| {
                let mut ops: Vec<_> = given.iter().copied().map(Op::Copy).collect();
                ops.push(Op::Launch(*launch));
                ops.extend(taken.iter().copied().map(Op::Copy));
                workshop.submit(worker, &after, &ops).map_err(CommError::Failed)
            });
            vec![done.map_err(|error| failed(&error))?]
        } else {
            let copied = inputs.iter().zip(&places).map(|(input, place)| self.copy(input, place, &after));
            let copied = copied.collect::<Outcome<Vec<_>>>()?;
            let reduced = kernel::with_launch(&worker.kernel, &used, layout, what, |launch| {
                workshop.submit(worker, &copied, &[Op::Launch(*launch)]).map_err(CommError::Failed)
            });
            let reduced = [reduced.map_err(|error| failed(&error))?];
            outputs.iter().map(|output| self.copy(&result, output, &reduced)).collect::<Outcome<_>>()?
        };
        workshop.free.clone_from(&done);
        Ok(done)
    }

    fn copy(&self, src: &BufferView, dst: &BufferView, after: &[SemaphorePoint]) -> Outcome<SemaphorePoint> {
        let options = CopyOptions { after: after.to_vec(), time_limit: None };
        let started = self.transfer.copy_with(src, dst, options);
        started.map(|handle| handle.done()).map_err(|error| failed(&error))
    }
}

impl Worker {
    fn new(device: &Arc<dyn Device>) -> Result<Self, CommError> {
        let semaphore = device.create_semaphore(0)?;
        let state = Workshop { memory: None, free: Vec::new(), semaphore, submitted: 0 };
        Ok(Self {
            device: Arc::clone(device),
            queue: device.create_queue(&QueueDesc::default())?,
            kernel: kernel::load(device.as_ref())?,
            state: Mutex::new(state),
        })
    }
}

impl Worker {
    fn lock(&self) -> MutexGuard<'_, Workshop> {
        // What panics under it leaves memory that may be used too early, and all ranks with a failure.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reads(&self, view: &BufferView) -> bool {
        self.access(view).is_some_and(|access| access.read)
    }

    fn writes(&self, view: &BufferView) -> bool {
        self.access(view).is_some_and(|access| access.write)
    }

    fn access(&self, view: &BufferView) -> Option<PeerAccess> {
        let (own, other) = (self.device.info().id, view.device());
        if own == other {
            return Some(PeerAccess { read: true, write: true });
        }
        // Families speak of devices of their own backend.
        (own.backend == other.backend).then(|| self.device.peers().map(|peers| peers.access(other)))?
    }
}

impl Workshop {
    /// Memory of at least so many bytes.
    fn memory(&mut self, device: &dyn Device, size: u64) -> Outcome<BufferView> {
        if let Some(memory) = self.memory.as_ref().filter(|memory| memory.size() >= size) {
            return Ok(memory.clone());
        }
        let buffer =
            device.allocate(&BufferDesc::device(size.next_power_of_two())).map_err(|e| failed(&e))?;
        // Nobody waits for the memory that was there before; what uses it keeps it.
        self.free.clear();
        Ok(self.memory.insert(BufferView::whole(buffer)).clone())
    }

    /// Submits work; the point is reached when it is over.
    fn submit(
        &mut self,
        worker: &Worker,
        waits: &[SemaphorePoint],
        ops: &[Op<'_>],
    ) -> Outcome<SemaphorePoint> {
        let point = SemaphorePoint::new(&self.semaphore, self.submitted + 1);
        let signals = std::slice::from_ref(&point);
        worker.queue.submit(&Submission { waits, ops, signals }).map_err(|error| failed(&error))?;
        self.submitted += 1;
        Ok(point)
    }
}

/// Part `number` of equal parts.
fn part(view: &BufferView, number: u64, parts: u64) -> Outcome<BufferView> {
    let size = view.size() / parts;
    slice(view, number * size..(number + 1) * size)
}

fn region<'a>(src: &'a BufferView, dst: &'a BufferView) -> Outcome<CopyRegion<'a>> {
    CopyRegion::new(src, dst).map_err(|error| Arc::new(Failure::Range(error)))
}

fn slice(view: &BufferView, range: std::ops::Range<u64>) -> Outcome<BufferView> {
    view.slice(range).map_err(|error: RangeError| Arc::new(Failure::Range(error)))
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// What the ranks are told of work that did not start.
fn failed(error: &dyn std::error::Error) -> Arc<Failure> {
    let mut reason = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        reason = format!("{reason}: {cause}");
        source = cause.source();
    }
    // What has begun goes on, so the ranks are told that all of it is void.
    Arc::new(CollectiveFailure::Aborted { rank: 0, reason }.into())
}
