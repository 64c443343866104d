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
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nccl_rs::{
    AbortHandle, Communicator, DataType, Dst, Error, Memory as LibraryMemory, Nccl, Src, WindowKind,
};
use smallvec::SmallVec;
use warpweft_core_types::{
    Buffer, BufferView, CollectiveCall, CollectiveError, CollectiveGroup, CollectiveOp, Deadline, DeviceId,
    DriverError, Failure, NativeCommunicator, Op, Registration, RegistrationKind, SubmissionId, SubmitError,
};
use warpweft_polled::{KeepAlive, Polled as _};

use crate::{
    calls::{self, Factors, Seen},
    collectives::reduces,
    context::Context,
    device::CudaDevice,
    exit::Parting,
    graph::CudaGraph,
    memory::{CudaBuffer, PAGE},
    queue::{Cause, QueueCore},
    registration::{CudaRegistration, Hold, Registered},
    stream::Stream,
};

/// What errors call it.
pub(crate) const LIBRARY: &str = "NCCL";

/// How long a call waits for another thread that is in the library.
const PATIENCE: Duration = Duration::from_secs(10);

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
    factors: Factors,
    communicator: Communicator,
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
            inner: Mutex::new(Some(Inner { factors: Factors::default(), communicator })),
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
            unsafe { calls::put(communicator, factors, call, &stream) }
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
            calls::span(&view, DataType::U8)
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

    pub(crate) const fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// One registration is gone.
    pub(crate) fn forget_registration(&self) {
        self.registered.fetch_sub(1, Ordering::Relaxed);
        self.uses().registered.retain(|known| known.strong_count() > 0);
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

    fn close(&self, failure: Arc<Failure>) {
        // The first reason counts.
        let _first = self.failure.set(failure);
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
                let address = calls::address(own.address());
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
        let registered = Registered::new(hold, buffer, this);
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
        let parting = Parting::begin();
        let part = move || {
            drop(inner);
            drop(owner);
            drop(parting);
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
