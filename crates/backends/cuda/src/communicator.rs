//! One rank of NCCL's: calls in streams, and their end.
//!
//! NCCL lets one thread at a time use a communicator, and nccl-rs says so by its type. Queues are used by many, so a lock
//! is around it, which nobody waits for without end. What several calls enqueue is in the order in which they were
//! submitted on one queue; across queues it is in the order in which submissions entered their streams, so a program that
//! uses several queues sees to it that this is the same on all ranks.

use std::{
    any::Any,
    fmt, mem, ptr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nccl_rs::{
    AbortHandle, Communicator, DataType, Dst, Error, Memory as LibraryMemory, Nccl, PremulSum, Reduction,
    Src, WindowKind,
};
use smallvec::SmallVec;
use warpweft_core_types::{
    Buffer, BufferView, CollectiveCall, CollectiveError, CollectiveGroup, CollectiveOp, DType, Deadline,
    DeviceId, DriverError, Failure, NativeCommunicator, Op, ReduceOp, Registration, RegistrationKind,
    SubmissionId, SubmitError,
};
use warpweft_polled::{KeepAlive, Polled as _};

use crate::{
    collectives::{data_type, reduces},
    context::Context,
    device::CudaDevice,
    factor,
    graph::CudaGraph,
    memory::{CudaBuffer, PAGE, address_of},
    queue::{Cause, QueueCore},
    stream::Stream,
};

/// What errors call it.
pub(crate) const LIBRARY: &str = "NCCL";

/// How long a call waits for another thread that is in the library.
const PATIENCE: Duration = Duration::from_secs(10);

/// Factors that are kept: programs use few, and the library keeps each until it is given back.
const FACTORS: usize = 16;

/// A rank.
pub(crate) struct CudaCommunicator {
    this: Weak<Self>,
    /// Taken when it is dropped, as is the library's communicator.
    owner: Option<Arc<CudaDevice>>,
    context: Arc<Context>,
    nccl: Nccl,
    rank: u32,
    size: u32,
    inner: Mutex<Option<Inner>>,
    abort: AbortHandle,
    /// Why it takes no more calls.
    failure: OnceLock<Arc<Failure>>,
    uses: Mutex<Uses>,
    /// The address of the queue that was given a call last. It is one of those in `uses`, which keeps the address from
    /// being another queue's.
    last_queue: AtomicUsize,
    seen: Seen,
    /// How many registrations there are, for calls that need not look then.
    registered: AtomicUsize,
}

/// What one thread at a time uses. Factors go before the communicator they were made for.
struct Inner {
    factors: SmallVec<[Factor; FACTORS]>,
    communicator: Communicator,
}

/// A reduction with a factor, by the type and the factor's bits.
struct Factor {
    dtype: DataType,
    bits: u64,
    op: PremulSum,
}

/// Who has calls of a communicator.
#[derive(Default)]
struct Uses {
    queues: Vec<Weak<QueueCore>>,
    graphs: Vec<Weak<CudaGraph>>,
    registered: Vec<Weak<Registered>>,
}

impl CudaCommunicator {
    pub(crate) fn new(owner: &Arc<CudaDevice>, communicator: Communicator) -> Arc<Self> {
        let (context, ..) = owner.surroundings();
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            owner: Some(Arc::clone(owner)),
            context: Arc::clone(context),
            nccl: communicator.nccl().clone(),
            rank: communicator.rank(),
            size: communicator.size(),
            abort: communicator.abort_handle(),
            inner: Mutex::new(Some(Inner { factors: SmallVec::new(), communicator })),
            failure: OnceLock::new(),
            uses: Mutex::default(),
            last_queue: AtomicUsize::new(0),
            seen: Seen::default(),
            registered: AtomicUsize::new(0),
        })
    }

    /// The rank behind a communicator, if it is one of ours.
    pub(crate) fn of(communicator: &Arc<dyn NativeCommunicator>) -> Option<&Self> {
        let communicator: &dyn Any = communicator.as_ref();
        communicator.downcast_ref()
    }

    fn address(&self) -> usize {
        ptr::from_ref(self).addr()
    }

    /// Puts calls in a stream, whose context is current; as one, if there are several.
    ///
    /// # Safety
    ///
    /// - `check` has let them through, for the context of the stream.
    /// - What they name lives until the stream is past them, and what `keep` holds does too.
    #[expect(unsafe_code, reason = "enqueues work on memory of the caller's")]
    pub(crate) unsafe fn enqueue(
        &self,
        calls: &[CollectiveCall<'_>],
        stream: &Stream,
        keep: &mut KeepAlive,
    ) -> Result<(), Error> {
        // The library may load a kernel for what it has not done before, which waits for residents.
        let is_new = calls.iter().fold(false, |is_new, call| self.seen.note(call) | is_new);
        let _hurried = is_new.then(|| self.context.cold.open());
        self.keep_registrations(calls, keep);
        // SAFETY: the caller's: the stream lives and is of the communicator's device, as is its context.
        let stream = unsafe { nccl_rs::Stream::from_raw(stream.raw().cast()) };
        let mut inner = self.inner()?;
        let Some(Inner { factors, communicator }) = inner.as_mut() else { return Err(gone()) };
        let mut one = |call: &CollectiveCall<'_>| {
            // SAFETY: the caller's duties.
            unsafe { put(communicator, factors, call, &stream) }
        };
        match calls {
            [call] => one(call),
            calls => self.nccl.group(|| calls.iter().try_for_each(one)),
        }
    }

    /// Makes a call of one that nobody else has yet.
    #[expect(unsafe_code, reason = "enqueues work on memory that lives")]
    pub(crate) fn try_first(
        &self,
        call: &CollectiveCall<'_>,
        stream: &Stream,
        keep: &mut KeepAlive,
    ) -> Result<(), Error> {
        let _current = self.entered()?;
        // SAFETY: `Joining::connect` makes calls of its own scratch memory, which it keeps until the stream is past it.
        unsafe { self.enqueue(std::slice::from_ref(call), stream, keep) }
    }

    /// Sends to every rank and receives from all, `each` bytes, in memory that holds that much for every rank.
    #[expect(unsafe_code, reason = "enqueues work on memory that lives")]
    pub(crate) fn try_pairs(&self, scratch: &BufferView, each: u64, stream: &Stream) -> Result<(), Error> {
        if self.size == 1 {
            return Ok(());
        }
        let _current = self.entered()?;
        // SAFETY: the stream is `Joining::connect`'s own, of this context.
        let stream = unsafe { nccl_rs::Stream::from_raw(stream.raw().cast()) };
        let inner = self.inner()?;
        let Some(Inner { communicator, .. }) = inner.as_ref() else { return Err(gone()) };
        let half = each / 2;
        let part = |peer: u32, at| {
            let view = scratch.slice(u64::from(peer) * each + at..u64::from(peer) * each + at + half).ok()?;
            span(&view, DataType::U8)
        };
        let unknown = || Error::Invalid { what: "the scratch memory is too small".to_owned() };
        self.nccl.group(|| {
            for peer in (0..self.size).filter(|peer| *peer != self.rank) {
                let ((from, count), (to, _)) = part(peer, 0).zip(part(peer, half)).ok_or_else(unknown)?;
                // SAFETY: scratch memory that `Joining::connect` keeps until the stream is past this; each peer has two
                // parts of its own.
                let src = unsafe { Src::new(from, count, DataType::U8) };
                // SAFETY: as above.
                let mut dst = unsafe { Dst::new(to, count, DataType::U8) };
                communicator.send(&src, peer, &stream)?;
                communicator.recv(&mut dst, peer, &stream)?;
            }
            Ok(())
        })
    }

    /// Ends what was begun for a rank that is not going to be.
    pub(crate) fn give_up(&self) {
        // Nobody has it yet, so that nobody asks how it went.
        let _aborted = self.abort.abort(PATIENCE);
    }

    fn entered(&self) -> Result<crate::context::Entered<'_>, Error> {
        self.context.enter().map_err(|error| Error::Invalid { what: error.to_string() })
    }

    /// Registers where a call is going to be.
    fn expect_calls(&self, queue: &Arc<QueueCore>) -> Result<(), Arc<Failure>> {
        let address = Arc::as_ptr(queue).addr();
        // Acquire: the queue is in the list then, for whoever aborts after it looked at the failure.
        if self.last_queue.load(Ordering::Acquire) != address {
            let mut uses = self.uses();
            uses.queues.retain(|known| known.strong_count() > 0);
            if !uses.queues.iter().any(|known| known.as_ptr().addr() == address) {
                uses.queues.push(Arc::downgrade(queue));
            }
            self.last_queue.store(address, Ordering::Release);
        }
        // Behind that: whoever aborts sets the failure first and then looks for queues.
        self.failure().map_or(Ok(()), Err)
    }

    /// Takes note of a graph with calls in it.
    pub(crate) fn expect_replays(&self, graph: &Arc<CudaGraph>) {
        let mut uses = self.uses();
        uses.graphs.retain(|known| known.strong_count() > 0);
        uses.graphs.push(Arc::downgrade(graph));
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.failure.get().cloned().or_else(|| self.context.failure())
    }

    /// What an error of a call means for its submission.
    pub(crate) fn failed(&self, submission: SubmissionId, error: Error) -> Arc<Failure> {
        if let Some(failure) = self.failure() {
            return failure;
        }
        match driver_error(error) {
            Ok(source) => Arc::new(Failure::Driver { device: self.context.device, source }),
            Err(error) => {
                let reason = error.to_string();
                Arc::new(Failure::OperationFailed { submission, what: "collective", reason })
            }
        }
    }

    /// The communicator, once no other thread is in the library with it.
    fn inner(&self) -> Result<MutexGuard<'_, Option<Inner>>, Error> {
        if let Some(inner) = try_lock(&self.inner) {
            return Ok(inner);
        }
        let start = Instant::now();
        loop {
            thread::yield_now();
            match try_lock(&self.inner) {
                Some(inner) => return Ok(inner),
                None if start.elapsed() > PATIENCE => {
                    let what = "a call of another thread's";
                    return Err(Error::TimedOut { what, after: PATIENCE });
                }
                None => {}
            }
        }
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        // Nothing of others runs under the lock.
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the registrations of the memory that calls use: the library works through them.
    fn keep_registrations(&self, calls: &[CollectiveCall<'_>], keep: &mut KeepAlive) {
        // Acquire: whoever was told of a registration finds it in the list.
        if self.registered.load(Ordering::Acquire) == 0 {
            return;
        }
        let live: SmallVec<[Arc<Registered>; 4]> =
            self.uses().registered.iter().filter_map(Weak::upgrade).collect();
        for registered in live {
            let is_used = |view: Option<&BufferView>| {
                view.is_some_and(|view| Arc::ptr_eq(view.buffer(), &registered.buffer))
            };
            if calls.iter().any(|call| is_used(call.src()) || is_used(call.dst())) {
                keep.other(registered);
            }
        }
    }

    fn refused(&self, error: Error) -> CollectiveError {
        match self.failure() {
            Some(failure) => CollectiveError::Failed(failure),
            None => refusal(self.context.device, error),
        }
    }

    fn unsupported(&self, what: &str) -> CollectiveError {
        CollectiveError::Unsupported { device: self.context.device, what: what.to_owned() }
    }

    /// Dooms what holds its calls; the queues, and those that could not be had in time.
    fn doom(
        &self,
        queues: Vec<Arc<QueueCore>>,
        failure: &Arc<Failure>,
        deadline: Deadline,
        doomed: &mut Vec<Arc<QueueCore>>,
    ) -> Vec<Arc<QueueCore>> {
        let cause = Cause::Communicator(self.address());
        let mut busy = Vec::new();
        for queue in queues {
            match queue.doom(&cause, failure, deadline) {
                Some(queues) => doomed.extend(queues),
                None => busy.push(queue),
            }
        }
        busy
    }
}

impl NativeCommunicator for CudaCommunicator {
    fn device(&self) -> DeviceId {
        self.context.device
    }

    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn check(&self) -> Result<(), CollectiveError> {
        if let Some(failure) = self.failure() {
            return Err(CollectiveError::Failed(failure));
        }
        let inner = self.inner().map_err(|error| self.refused(error))?;
        let inner = inner.as_ref().ok_or_else(|| self.refused(gone()))?;
        inner.communicator.check().map_err(|error| self.refused(error))
    }

    fn abort(&self, failure: Arc<Failure>, deadline: Deadline) -> Result<(), CollectiveError> {
        if let Some(failure) = self.context.left() {
            return Err(CollectiveError::Failed(failure));
        }
        let after = deadline.remaining();
        // The first reason counts.
        let failure = Arc::clone(self.failure.get_or_init(|| failure));
        let (queues, graphs): (Vec<_>, Vec<_>) = {
            let uses = self.uses();
            let queues = uses.queues.iter().filter_map(Weak::upgrade).collect();
            (queues, uses.graphs.iter().filter_map(Weak::upgrade).collect())
        };
        // Before anything ends that others wait for: what ends then must not look as if it was done.
        let mut doomed = Vec::new();
        let busy = self.doom(queues, &failure, Deadline::within(after / 2), &mut doomed);
        // The library gives nothing back while a graph has its work.
        graphs.iter().for_each(|graph| graph.retire());
        let aborted = self.abort.abort(deadline.remaining());
        let busy = self.doom(busy, &failure, deadline, &mut doomed);
        for queue in &doomed {
            queue.reap();
            if aborted.is_err() {
                queue.fail_regardless(deadline);
            }
        }
        match aborted {
            Ok(()) if busy.is_empty() => Ok(()),
            Ok(()) => Err(CollectiveError::TimedOut { what: "a submission that is being made", after }),
            Err(Error::TimedOut { what, .. }) => Err(CollectiveError::TimedOut { what, after }),
            Err(error) => Err(refusal(self.context.device, error)),
        }
    }

    #[expect(unsafe_code, reason = "vouches for memory")]
    fn register(
        &self,
        buffer: &Arc<dyn Buffer>,
        kind: RegistrationKind,
    ) -> Result<Arc<dyn Registration>, CollectiveError> {
        if let Some(failure) = self.failure() {
            return Err(CollectiveError::Failed(failure));
        }
        let any: &dyn Any = buffer.as_ref();
        let own = any.downcast_ref::<CudaBuffer>();
        let own = own.filter(|own| Arc::ptr_eq(own.context(), &self.context));
        let own = own.ok_or_else(|| self.unsupported("registering memory of another device"))?;
        let this = self.this.upgrade().ok_or_else(|| self.refused(gone()))?;
        let _hurried = self.context.cold.open();
        let _current = self.entered().map_err(|error| self.refused(error))?;
        let inner = self.inner().map_err(|error| self.refused(error))?;
        let communicator = &inner.as_ref().ok_or_else(|| self.refused(gone()))?.communicator;
        let window = match (kind, own.library_memory()) {
            (RegistrationKind::Local, _) => None,
            (RegistrationKind::Symmetric, None) => {
                return Err(self.unsupported("symmetric registration of memory that NCCL did not allocate"));
            }
            (RegistrationKind::Symmetric, Some(memory)) => {
                match communicator.window(memory, WindowKind::Symmetric) {
                    Ok(window) => window,
                    // As where there are links that windows do not work over: the same on all ranks.
                    Err(Error::TooOld { .. }) => None,
                    Err(error) => return Err(self.refused(error)),
                }
            }
        };
        let (hold, kind) = match (window, own.library_memory()) {
            (Some(window), _) => (Hold::Window(window), RegistrationKind::Symmetric),
            (None, Some(memory)) => {
                let registration = communicator.register(memory).map_err(|error| self.refused(error))?;
                (Hold::Registration(registration), RegistrationKind::Local)
            }
            (None, None) if own.can_be_registered() => {
                let size = usize::try_from(own.size()).unwrap_or(usize::MAX);
                let address = address(own.address());
                // SAFETY: memory of the communicator's device, which what is made below keeps until it is deregistered.
                let registration = unsafe { communicator.register_raw(address, size) };
                let registration = registration.map_err(|error| self.refused(error))?;
                (Hold::Registration(registration), RegistrationKind::Local)
            }
            (None, None) => {
                return Err(self.unsupported(
                    "registering memory of a pool, which NCCL cannot export; allocate it with the communicator",
                ));
            }
        };
        drop(inner);
        let registered = Arc::new(Registered {
            hold: Mutex::new(Some(hold)),
            buffer: Arc::clone(buffer),
            communicator: Some(this),
        });
        self.uses().registered.push(Arc::downgrade(&registered));
        // Release: see `keep_registrations`.
        self.registered.fetch_add(1, Ordering::Release);
        Ok(Arc::new(CudaRegistration { registered, kind }))
    }

    fn allocate(&self, size: u64) -> Result<Arc<dyn Buffer>, CollectiveError> {
        let owner = self.owner.as_ref().ok_or_else(|| self.refused(gone()))?;
        let invalid = |what: String| CollectiveError::Invalid(what);
        let bytes = size.checked_next_multiple_of(PAGE).and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.filter(|bytes| *bytes > 0).ok_or_else(|| invalid(format!("{size} bytes")))?;
        let _hurried = self.context.cold.open();
        let current = self.entered().map_err(|error| self.refused(error))?;
        let memory = LibraryMemory::alloc(&self.nccl, None, bytes).map_err(|error| self.refused(error))?;
        drop(current);
        let buffer = owner.arena().adopt(size, memory).map_err(|error| invalid(error.to_string()))?;
        Ok(buffer.of_device(Arc::clone(owner)))
    }
}

impl fmt::Debug for CudaCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaCommunicator")
            .field("device", &self.context.device)
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("registrations", &self.registered.load(Ordering::Relaxed))
            .field("failure", &self.failure.get())
            .finish_non_exhaustive()
    }
}

impl Drop for CudaCommunicator {
    fn drop(&mut self) {
        let inner = mem::take(self.inner.get_mut().unwrap_or_else(PoisonError::into_inner));
        let owner = self.owner.take();
        if self.context.is_left() {
            return mem::forget((inner, owner));
        }
        // It waits for its peers, for a second at most: this may be a thread that others wait for, and ranks of one
        // process may be dropped one after the other. Without a thread it is done here.
        let part = move || {
            drop(inner);
            drop(owner);
        };
        let _started = thread::Builder::new().name("cuda/part".to_owned()).spawn(part);
    }
}

/// The communicators whose calls an operation has, by their addresses.
pub(crate) fn of(op: &Op<'_>) -> SmallVec<[usize; 2]> {
    let mut found = SmallVec::new();
    for_each(op, |communicator| found.push(communicator.address()));
    found
}

/// Tells the communicators of an operation that a queue is given calls of theirs, and their addresses to `note`.
pub(crate) fn expect_calls(
    op: &Op<'_>,
    queue: &Arc<QueueCore>,
    mut note: impl FnMut(usize),
) -> Result<(), Arc<Failure>> {
    let mut expected = Ok(());
    for_each(op, |communicator| {
        note(communicator.address());
        if expected.is_ok() {
            expected = communicator.expect_calls(queue);
        }
    });
    expected
}

/// Refuses what needs a communicator that has ended.
pub(crate) fn check_live(op: &Op<'_>) -> Result<(), SubmitError> {
    let mut failure = None;
    for_each(op, |communicator| failure = failure.take().or_else(|| communicator.failure()));
    failure.map_or(Ok(()), |failure| Err(SubmitError::Failed(failure)))
}

fn for_each(op: &Op<'_>, mut visit: impl FnMut(&CudaCommunicator)) {
    match op {
        Op::Collective(group) => {
            if let Some(own) = CudaCommunicator::of(group.communicator()) {
                visit(own);
            }
        }
        Op::Replay(graph) => {
            let of_graph = CudaGraph::of(graph).map_or(&[][..], CudaGraph::communicators);
            of_graph.iter().filter_map(CudaCommunicator::of).for_each(visit);
        }
        _ => {}
    }
}

/// Checks that calls are for a live communicator of this context, which does them. Their operands are checked elsewhere.
pub(crate) fn check(context: &Context, group: &CollectiveGroup<'_>) -> Result<(), SubmitError> {
    let device = context.device;
    let own =
        CudaCommunicator::of(group.communicator()).filter(|own| ptr::eq(Arc::as_ptr(&own.context), context));
    let Some(own) = own else {
        let owner = group.communicator().device();
        return Err(SubmitError::Foreign { what: "communicator", owner, device });
    };
    if let Some(failure) = own.failure.get() {
        return Err(SubmitError::Failed(Arc::clone(failure)));
    }
    for call in group.calls() {
        if let Some(op) = call.op().reduction()
            && !reduces(
                op,
                call.dtype(),
                own.nccl.version(),
                own.owner.as_ref().map_or((0, 0), |o| o.capability()),
            )
        {
            return Err(SubmitError::Unsupported { device, what: "reduction of this kind and element type" });
        }
        // The operands of the others depend on rank and size, and a call does not tell for whom it was checked.
        if !matches!(call.op(), CollectiveOp::AllReduce(_)) {
            let checked =
                CollectiveCall::new(call.op(), call.dtype(), (own.rank, own.size), call.src(), call.dst());
            checked.map_err(|error| SubmitError::Invalid {
                reason: format!("a call is not one of rank {} of {}: {error}", own.rank, own.size),
            })?;
        }
    }
    Ok(())
}

/// What a device says of an error of the library's.
pub(crate) fn refusal(device: DeviceId, error: Error) -> CollectiveError {
    match error {
        Error::NotFound { .. } => {
            CollectiveError::Unavailable { library: LIBRARY, missing: error.to_string() }
        }
        Error::TooOld { .. } => CollectiveError::Unsupported { device, what: error.to_string() },
        Error::TimedOut { what, after } => CollectiveError::TimedOut { what, after },
        other => match driver_error(other) {
            Ok(source) => CollectiveError::Library { library: LIBRARY, source },
            Err(other) => CollectiveError::Invalid(other.to_string()),
        },
    }
}

/// What the library itself said, if it was the library.
fn driver_error(error: Error) -> Result<DriverError, Error> {
    match error {
        Error::Nccl(error) => {
            let said = error.to_string();
            Ok(DriverError { api: error.call, code: error.code.into(), name: said })
        }
        other => Err(other),
    }
}

fn gone() -> Error {
    Error::Invalid { what: "the communicator is gone".to_owned() }
}

fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

fn address(address: u64) -> *mut std::ffi::c_void {
    ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0))
}

/// Where a view's elements are, and how many of the library's type.
fn span(view: &BufferView, dtype: DataType) -> Option<(*mut std::ffi::c_void, usize)> {
    let count = usize::try_from(view.size()).ok()? / dtype.size_bytes();
    Some((address(address_of(view)?), count))
}

/// Makes one call of the library's.
///
/// # Safety
///
/// - As for [`CudaCommunicator::enqueue`].
#[expect(unsafe_code, reason = "vouches for memory")]
unsafe fn put(
    communicator: &Communicator,
    factors: &mut SmallVec<[Factor; FACTORS]>,
    call: &CollectiveCall<'_>,
    stream: &nccl_rs::Stream<'_>,
) -> Result<(), Error> {
    let unknown = || Error::Invalid { what: "an operand does not belong to a CUDA device".to_owned() };
    let (op, dtype) = (call.op(), element(call));
    let of = |view: Option<&BufferView>| view.map(|view| span(view, dtype).ok_or_else(unknown)).transpose();
    // SAFETY: the caller's: the buffers live until the stream is past the call, and views lie within their buffers.
    // `CollectiveCall` checked what they may share, and queues order what uses them.
    let src = of(call.src())?.map(|(address, count)| unsafe { Src::new(address, count, dtype) });
    // SAFETY: as above.
    let mut dst = of(call.dst())?.map(|(address, count)| unsafe { Dst::new(address, count, dtype) });
    let reduction = op.reduction().map(|op| reduction(communicator, factors, op, dtype)).transpose()?;
    let missing = || Error::Invalid { what: format!("{op} lacks an operand") };
    match (op, src.as_ref(), dst.as_mut(), reduction) {
        (CollectiveOp::AllReduce(_), Some(src), Some(dst), Some(op)) => {
            communicator.all_reduce(src, dst, op, stream)
        }
        (CollectiveOp::ReduceScatter(_), Some(src), Some(dst), Some(op)) => {
            communicator.reduce_scatter(src, dst, op, stream)
        }
        (CollectiveOp::Reduce { root, .. }, Some(src), dst, Some(op)) => {
            communicator.reduce(src, dst, op, root, stream)
        }
        (CollectiveOp::AllGather, Some(src), Some(dst), _) => communicator.all_gather(src, dst, stream),
        (CollectiveOp::Broadcast { root }, src, Some(dst), _) => {
            communicator.broadcast(src, dst, root, stream)
        }
        (CollectiveOp::Gather { root }, Some(src), dst, _) => communicator.gather(src, dst, root, stream),
        (CollectiveOp::Scatter { root }, src, Some(dst), _) => communicator.scatter(src, dst, root, stream),
        (CollectiveOp::AllToAll, Some(src), Some(dst), _) => communicator.all_to_all(src, dst, stream),
        (CollectiveOp::Send { to }, Some(src), ..) => communicator.send(src, to, stream),
        (CollectiveOp::Recv { from }, _, Some(dst), _) => communicator.recv(dst, from, stream),
        _ => Err(missing()),
    }
}

/// The library's type for a call. What is moved and not reduced goes as bytes where the library has no such type, or has
/// it in newer versions alone.
fn element(call: &CollectiveCall<'_>) -> DataType {
    let is_small = matches!(call.dtype(), DType::F8E4m3 | DType::F8E5m2);
    let known = data_type(call.dtype()).filter(|_| !is_small || call.op().reduction().is_some());
    known.unwrap_or(DataType::U8)
}

/// The library's form of a reduction. A factor's is made once and kept.
fn reduction<'a>(
    communicator: &Communicator,
    factors: &'a mut SmallVec<[Factor; FACTORS]>,
    op: ReduceOp,
    dtype: DataType,
) -> Result<Reduction<'a>, Error> {
    let plain = match op {
        ReduceOp::Sum => nccl_rs::ReduceOp::Sum,
        ReduceOp::Prod => nccl_rs::ReduceOp::Prod,
        ReduceOp::Min => nccl_rs::ReduceOp::Min,
        ReduceOp::Max => nccl_rs::ReduceOp::Max,
        ReduceOp::Avg => nccl_rs::ReduceOp::Avg,
        ReduceOp::PremulSum(factor) => {
            let bits = factor.to_bits();
            let known = factors.iter().position(|known| known.dtype == dtype && known.bits == bits);
            let at = match known {
                Some(at) => at,
                None => {
                    let op = communicator.premul_sum_of(dtype, &factor::bytes(dtype, factor))?;
                    // The oldest makes room. Calls that used it have what they need of it.
                    if factors.len() == FACTORS {
                        factors.remove(0);
                    }
                    factors.push(Factor { dtype, bits, op });
                    factors.len() - 1
                }
            };
            return Ok(Reduction::PremulSum(&factors[at].op));
        }
        other => return Err(Error::Invalid { what: format!("NCCL has no {other}") }),
    };
    Ok(Reduction::Plain(plain))
}

/// Which calls were made: kind of operation, reduction, element type and class of size.
struct Seen([AtomicU64; Self::KINDS * Self::REDUCTIONS]);

impl Default for Seen {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; Self::KINDS * Self::REDUCTIONS])
    }
}

impl Seen {
    const KINDS: usize = 10;
    const REDUCTIONS: usize = 7;
    /// Where the library's choice of algorithms changes, roughly.
    const SIZES: [u64; 3] = [64 << 10, 1 << 20, 8 << 20];

    /// Takes note of a call; whether there was none like it.
    fn note(&self, call: &CollectiveCall<'_>) -> bool {
        let size = |view: Option<&BufferView>| view.map_or(0, BufferView::size);
        let bytes = size(call.src()).max(size(call.dst()));
        let class = Self::SIZES.iter().filter(|size| bytes > **size).count();
        let bit = 1_u64 << (call.dtype() as usize * (Self::SIZES.len() + 1) + class);
        let word = &self.0[kind(call.op()) * Self::REDUCTIONS + call.op().reduction().map_or(0, redop)];
        // Relaxed: a hint.
        word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }
}

const fn kind(op: CollectiveOp) -> usize {
    match op {
        CollectiveOp::AllReduce(_) => 0,
        CollectiveOp::ReduceScatter(_) => 1,
        CollectiveOp::Reduce { .. } => 2,
        CollectiveOp::AllGather => 3,
        CollectiveOp::Broadcast { .. } => 4,
        CollectiveOp::Gather { .. } => 5,
        CollectiveOp::Scatter { .. } => 6,
        CollectiveOp::AllToAll => 7,
        CollectiveOp::Send { .. } => 8,
        _ => 9,
    }
}

const fn redop(op: ReduceOp) -> usize {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Min => 2,
        ReduceOp::Max => 3,
        ReduceOp::Avg => 4,
        ReduceOp::PremulSum(_) => 5,
        _ => 6,
    }
}

/// What the library gave for memory.
enum Hold {
    Registration(#[expect(dead_code, reason = "held for its drop")] nccl_rs::Registration),
    Window(#[expect(dead_code, reason = "held for its drop")] nccl_rs::Window),
}

/// Memory that the library knows. Submissions and graphs that use the memory hold this too.
struct Registered {
    hold: Mutex<Option<Hold>>,
    buffer: Arc<dyn Buffer>,
    /// Taken when it is dropped.
    communicator: Option<Arc<CudaCommunicator>>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let hold = mem::take(self.hold.get_mut().unwrap_or_else(PoisonError::into_inner));
        let (buffer, communicator) = (Arc::clone(&self.buffer), self.communicator.take());
        let Some(communicator) = communicator else { return };
        if communicator.context.is_left() {
            return mem::forget((hold, buffer, communicator));
        }
        communicator.registered.fetch_sub(1, Ordering::Relaxed);
        communicator.uses().registered.retain(|known| known.strong_count() > 0);
        let context = Arc::clone(&communicator.context);
        // It may have to wait for a call of another thread's, and this may be a thread that others wait for.
        let entered = Arc::clone(&context);
        context.serve(move || {
            let _current = entered.enter();
            drop(hold);
            // Behind that, and not before.
            drop(buffer);
            drop(communicator);
        });
    }
}

/// The program's handle of registered memory.
struct CudaRegistration {
    registered: Arc<Registered>,
    kind: RegistrationKind,
}

impl Registration for CudaRegistration {
    fn buffer(&self) -> &Arc<dyn Buffer> {
        &self.registered.buffer
    }

    fn kind(&self) -> RegistrationKind {
        self.kind
    }
}

impl fmt::Debug for CudaRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaRegistration({:?}, {} bytes)", self.kind, self.registered.buffer.size())
    }
}
