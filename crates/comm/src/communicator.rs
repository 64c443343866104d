//! Communicators: one rank of a group of devices that compute together.

use std::{
    collections::BTreeSet,
    fmt,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use smallvec::SmallVec;
use warpweft_bootstrap::{Bind, Group, GroupError, Health, Host, JoinConfig, Rank, ReformConfig, Rendezvous};
use warpweft_core_types::{
    Buffer, BufferDesc, BufferView, CallError, CollectiveCall, CollectiveFailure, CollectiveOp, DType,
    Deadline, Device, Failure, GraphOp, Op, OwnedOp, PreparedGraph, Queue, QueueDesc, RangeError, ReduceOp,
    Registration, RegistrationKind, SemaphorePoint, Submission,
};

use crate::{
    Call, Calls, CommConfig, CommError, EngineKind, Enqueued, FlightRecord,
    engine::Engine,
    error::unfinished,
    flight::{Called, Flight, Signature},
    form,
    keeper::{Bell, Keeper},
    lines::Lines,
};

/// How long an engine may take to end what is under way.
const PARTING: Duration = Duration::from_secs(2);

/// One rank of a group of devices that move and reduce data together.
///
/// Any thread may use it. What is enqueued in which order has to be the same on all ranks; sends and receives only have
/// to be in order between the two.
///
/// Dropping it leaves the group, which the other ranks see.
pub struct Communicator {
    /// Before the rest, which it watches.
    _keeper: Keeper,
    pub(crate) inner: Arc<Inner>,
}

/// What a communicator, its keeper and the calls under way have in common.
pub(crate) struct Inner {
    group: Arc<Group>,
    device: Arc<dyn Device>,
    engines: Vec<Box<dyn Engine>>,
    config: CommConfig,
    flight: Flight,
    state: Mutex<State>,
    /// In validating mode, calls of several threads are compared one after the other.
    comparing: Mutex<()>,
    failure: OnceLock<Arc<Failure>>,
    /// For calls that are waited for on the spot and need a queue.
    own_queue: Mutex<Option<Arc<dyn Queue>>>,
    /// What barriers of queues reduce.
    word: OnceLock<BufferView>,
    pub(crate) bell: Arc<Bell>,
}

/// What is under way.
#[derive(Debug, Default)]
pub(crate) struct State {
    tickets: u64,
    numbers: u64,
    pub(crate) lines: Lines,
}

impl State {
    /// The next call's place.
    const fn next(&self, signature: &Signature) -> Called {
        let number = if signature.is_for_all() { Some(self.numbers + 1) } else { None };
        Called { ticket: self.tickets + 1, number }
    }

    const fn take(&mut self, called: Called) {
        self.tickets = called.ticket;
        if let Some(number) = called.number {
            self.numbers = number;
        }
    }
}

impl Communicator {
    /// Makes `device` a rank: that of this process or thread in `group`. All members do so at about the same time, with
    /// the same configuration.
    ///
    /// # Errors
    ///
    /// [`CommError::DuplicateDevice`], [`CommError::Disagreement`], [`CommError::NoEngine`], and what the group and the
    /// engines say, the same on all ranks; each by the deadline.
    pub fn create(
        group: Group,
        device: &Arc<dyn Device>,
        config: &CommConfig,
        deadline: impl Into<Deadline>,
    ) -> Result<Self, CommError> {
        let group = Arc::new(group);
        let engines = form::engines(&group, device, config, deadline.into())?;
        let inner = Arc::new(Inner {
            group,
            device: Arc::clone(device),
            engines,
            config: config.clone(),
            flight: Flight::new(config.flight.clone()),
            state: Mutex::default(),
            comparing: Mutex::default(),
            failure: OnceLock::new(),
            own_queue: Mutex::default(),
            word: OnceLock::new(),
            bell: Arc::default(),
        });
        Ok(Self { _keeper: Keeper::start(Arc::clone(&inner))?, inner })
    }

    /// Which rank this is.
    pub fn rank(&self) -> u32 {
        self.inner.rank()
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> u32 {
        self.inner.group.size()
    }

    /// Which of the ranks of its host this is.
    pub fn local_rank(&self) -> u32 {
        let members = self.inner.group.members();
        let own = &members[self.inner.group.rank().index()];
        let before = members.iter().take_while(|member| member.rank != own.rank);
        count(before.filter(|member| member.host == own.host))
    }

    /// Which of the hosts of the group it is on, counted by their first ranks.
    pub fn node(&self) -> u32 {
        let members = self.inner.group.members();
        let own = members[self.inner.group.rank().index()].host;
        let hosts: BTreeSet<_> =
            members.iter().take_while(|member| member.host != own).map(|member| member.host).collect();
        count(hosts.iter())
    }

    /// This rank's device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.inner.device
    }

    /// The group of processes or threads.
    pub fn group(&self) -> &Group {
        &self.inner.group
    }

    /// Its engines, the one that is asked first in front.
    pub fn engines(&self) -> impl Iterator<Item = EngineKind> {
        self.inner.engines.iter().map(|engine| engine.kind())
    }

    /// The engine that does this, the same on all ranks.
    ///
    /// # Errors
    ///
    /// [`CommError::Unsupported`].
    pub fn engine_for(&self, op: CollectiveOp, dtype: DType) -> Result<EngineKind, CommError> {
        self.inner.pick(&[(op, dtype)]).map(|engine| engine.kind())
    }

    /// A call of any kind; the other methods are this with names.
    ///
    /// # Errors
    ///
    /// [`CommError::Call`] if the operands do not fit, before anything is done.
    pub fn call<'a>(
        &'a self,
        op: CollectiveOp,
        dtype: DType,
        src: Option<&'a BufferView>,
        dst: Option<&'a BufferView>,
    ) -> Result<Call<'a>, CommError> {
        let place = (self.rank(), self.world_size());
        Ok(Call { comm: self, call: CollectiveCall::new(op, dtype, place, src, dst)? })
    }

    /// Gives every rank what all ranks' elements reduce to. In place if both views are the same.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn all_reduce<'a>(
        &'a self,
        op: ReduceOp,
        dtype: DType,
        src: &'a BufferView,
        dst: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::AllReduce(op), dtype, Some(src), Some(dst))
    }

    /// Gives rank `r` part `r` of what all ranks' elements reduce to: `src` is as long as all parts together. In place
    /// if `dst` is this rank's part of `src`.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn reduce_scatter<'a>(
        &'a self,
        op: ReduceOp,
        dtype: DType,
        src: &'a BufferView,
        dst: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::ReduceScatter(op), dtype, Some(src), Some(dst))
    }

    /// Gives one rank what all ranks' elements reduce to; it alone has a destination.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn reduce<'a>(
        &'a self,
        root: u32,
        op: ReduceOp,
        dtype: DType,
        src: &'a BufferView,
        dst: Option<&'a BufferView>,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::Reduce { op, root }, dtype, Some(src), dst)
    }

    /// Gives every rank what all have, by rank: `dst` is as long as all sources together. In place if `src` is this
    /// rank's part of `dst`.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn all_gather<'a>(
        &'a self,
        dtype: DType,
        src: &'a BufferView,
        dst: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::AllGather, dtype, Some(src), Some(dst))
    }

    /// Gives every rank what one has, which alone has a source: the same view as `dst` if it is in place.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn broadcast<'a>(
        &'a self,
        root: u32,
        dtype: DType,
        src: Option<&'a BufferView>,
        dst: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::Broadcast { root }, dtype, src, Some(dst))
    }

    /// Gives one rank what all have, by rank; it alone has a destination.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn gather<'a>(
        &'a self,
        root: u32,
        dtype: DType,
        src: &'a BufferView,
        dst: Option<&'a BufferView>,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::Gather { root }, dtype, Some(src), dst)
    }

    /// Gives rank `r` part `r` of what one has, which alone has a source.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn scatter<'a>(
        &'a self,
        root: u32,
        dtype: DType,
        src: Option<&'a BufferView>,
        dst: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::Scatter { root }, dtype, src, Some(dst))
    }

    /// Gives rank `r` part `r` of what each rank has, by rank.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn all_to_all<'a>(
        &'a self,
        dtype: DType,
        src: &'a BufferView,
        dst: &'a BufferView,
    ) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::AllToAll, dtype, Some(src), Some(dst))
    }

    /// Gives to a rank, which receives as much. Two ranks that give each other something use [`Self::send_recv`].
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn send<'a>(&'a self, to: u32, dtype: DType, src: &'a BufferView) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::Send { to }, dtype, Some(src), None)
    }

    /// Takes what a rank sends.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn recv<'a>(&'a self, from: u32, dtype: DType, dst: &'a BufferView) -> Result<Call<'a>, CommError> {
        self.call(CollectiveOp::Recv { from }, dtype, None, Some(dst))
    }

    /// Gives to one rank and takes from one, at once.
    ///
    /// # Errors
    ///
    /// As [`Self::call`].
    pub fn send_recv<'a>(
        &'a self,
        dtype: DType,
        (to, src): (u32, &'a BufferView),
        (from, dst): (u32, &'a BufferView),
    ) -> Result<Calls<'a>, CommError> {
        if src.overlap(dst) > 0 {
            return Err(CallError::from(RangeError::Overlap { bytes: src.overlap(dst) }).into());
        }
        Ok(self.send(to, dtype, src)?.and(self.recv(from, dtype, dst)?))
    }

    /// The parts of a view for each rank, for [`Self::all_to_all_v`]: the ranges are in bytes, by rank, and may be empty.
    ///
    /// # Errors
    ///
    /// [`CommError::Call`] for a range that leaves the view.
    pub fn parts(
        &self,
        view: &BufferView,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Option<BufferView>>, CommError> {
        let part = |range: &Range<u64>| {
            if range.is_empty() { Ok(None) } else { view.slice(range.clone()).map(Some) }
        };
        let parts: Result<Vec<_>, _> = ranges.iter().map(part).collect();
        Ok(parts.map_err(CallError::from)?)
    }

    /// Gives rank `r` the part `src[r]` and takes `dst[r]` from it, all at once; what one gives is as long as what the
    /// other takes, and nothing where that is nothing. Nothing is done where a rank has no part in it at all.
    ///
    /// # Errors
    ///
    /// As [`Self::call`]; [`CommError::Unsupported`] for lists that have no entry for each rank.
    pub fn all_to_all_v<'a>(
        &'a self,
        dtype: DType,
        src: &'a [Option<BufferView>],
        dst: &'a [Option<BufferView>],
    ) -> Result<Calls<'a>, CommError> {
        let size = self.world_size() as usize;
        if src.len() != size || dst.len() != size {
            let what = format!("all_to_all_v with {} sources and {} destinations", src.len(), dst.len());
            return Err(CommError::Unsupported { what, engines: format!("{size} ranks") });
        }
        let mut calls = SmallVec::new();
        for ((rank, src), dst) in (0..).zip(src).zip(dst) {
            if let Some(src) = src {
                calls.push(self.send(rank, dtype, src)?.call);
            }
            if let Some(dst) = dst {
                calls.push(self.recv(rank, dtype, dst)?.call);
            }
        }
        Ok(Calls { comm: self, calls })
    }

    /// Waits until every rank has come here. Work in queues is not waited for.
    ///
    /// # Errors
    ///
    /// [`CommError::Group`] by the deadline, naming who is missing.
    pub fn barrier(&self, deadline: impl Into<Deadline>) -> Result<(), CommError> {
        self.inner.usable()?;
        self.inner
            .group
            .barrier("barrier of a communicator", deadline)
            .map_err(|error| self.inner.judge(error))
    }

    /// Puts a barrier in a queue: what comes behind it waits for what is before it on every rank.
    ///
    /// # Errors
    ///
    /// As [`Call::on`].
    pub fn queue_barrier(&self, queue: &Arc<dyn Queue>) -> Result<Enqueued, CommError> {
        let word = self.inner.word()?;
        self.all_reduce(ReduceOp::Max, DType::U32, word, word)?.on(queue)
    }

    /// Replays a graph that has nodes of this communicator, and remembers it as one call.
    ///
    /// # Errors
    ///
    /// As [`Call::on`].
    pub fn replay(&self, graph: &PreparedGraph, queue: &Arc<dyn Queue>) -> Result<Enqueued, CommError> {
        self.inner.replay(graph, queue)
    }

    /// Registers memory of this rank's device, for as long as what is returned lives, so that it is reached faster.
    ///
    /// # Errors
    ///
    /// [`CommError::Unsupported`] where no engine has a use for it.
    pub fn register(
        &self,
        buffer: &Arc<dyn Buffer>,
        kind: RegistrationKind,
    ) -> Result<Arc<dyn Registration>, CommError> {
        self.inner.usable()?;
        self.inner.first()?.register(buffer, kind)
    }

    /// Allocates memory that every rank can register symmetrically.
    ///
    /// # Errors
    ///
    /// [`CommError::Unsupported`] where no engine has such memory.
    pub fn allocate(&self, size: u64) -> Result<Arc<dyn Buffer>, CommError> {
        self.inner.usable()?;
        self.inner.first()?.allocate(size)
    }

    /// Why it can no longer be used, if it failed.
    pub fn failure(&self) -> Option<Arc<Failure>> {
        self.inner.failure.get().cloned()
    }

    /// Whether calls can succeed: no rank is lost and nobody has aborted.
    pub fn is_healthy(&self) -> bool {
        self.inner.check_group();
        self.inner.failure.get().is_none()
    }

    /// Ends every call on every rank, under way or later.
    ///
    /// # Errors
    ///
    /// [`CommError::Group`] if the group cannot tell the others.
    pub fn abort(&self, reason: &str) -> Result<(), CommError> {
        self.inner.group.abort(reason)?;
        let (rank, reason) = (self.rank(), reason.to_owned());
        self.inner.fail(&failed(CollectiveFailure::Aborted { rank, reason }), false);
        Ok(())
    }

    /// Makes a communicator of those who are left; each of them calls this. What is under way in this one fails.
    ///
    /// # Errors
    ///
    /// As [`Self::create`], and what is told by [`Group::reform`].
    pub fn shrink(&self, deadline: impl Into<Deadline>) -> Result<Self, CommError> {
        self.reform(&ReformConfig::default(), deadline)
    }

    /// The same with newcomers, such as a rank that was started again and comes by [`Group::rejoin`], or without some
    /// who are still there.
    ///
    /// # Errors
    ///
    /// As [`Self::shrink`].
    pub fn reform(&self, config: &ReformConfig, deadline: impl Into<Deadline>) -> Result<Self, CommError> {
        let deadline = deadline.into();
        let rank = self.rank();
        self.inner.fail(&failed(CollectiveFailure::Aborted { rank, reason: "it forms anew".into() }), false);
        let reformed = self.inner.group.reform_with(config, deadline)?;
        Self::create(reformed.group, &self.inner.device, &self.inner.config, deadline)
    }

    /// Parts the ranks: those with the same colour make a communicator of their own, in the order of their keys and then
    /// of their ranks. A rank without a colour gets none. All ranks call it.
    ///
    /// # Errors
    ///
    /// As [`Self::create`].
    pub fn split(
        &self,
        color: Option<u32>,
        key: i32,
        deadline: impl Into<Deadline>,
    ) -> Result<Option<Self>, CommError> {
        let deadline = deadline.into();
        self.inner.usable()?;
        let Some((rendezvous, config)) = self.inner.part(color, key, deadline)? else { return Ok(None) };
        let group = Group::join(rendezvous, config, deadline)?;
        Self::create(group, &self.inner.device, &self.inner.config, deadline).map(Some)
    }

    /// The last calls, and what became of them.
    pub fn flight(&self) -> FlightRecord {
        self.inner.look();
        self.inner.record()
    }
}

impl Inner {
    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    fn rank(&self) -> u32 {
        self.group.rank().0
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // What panics under it would be a defect of ours, and leaves a whole state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn usable(&self) -> Result<(), CommError> {
        self.failure.get().map_or(Ok(()), |failure| Err(CommError::Failed(Arc::clone(failure))))
    }

    fn first(&self) -> Result<&dyn Engine, CommError> {
        let engine = self.engines.first().map(AsRef::as_ref);
        engine.ok_or_else(|| CommError::NoEngine { reason: "there is none".to_owned() })
    }

    /// The engine that does all of these.
    fn pick(&self, calls: &[(CollectiveOp, DType)]) -> Result<&dyn Engine, CommError> {
        let does = |engine: &dyn Engine| calls.iter().all(|(op, dtype)| engine.does(*op, *dtype));
        self.engines.iter().map(AsRef::as_ref).find(|engine| does(*engine)).ok_or_else(|| {
            let what = calls.iter().map(|(op, dtype)| format!("{op} of {dtype}")).collect::<Vec<_>>();
            let engines: Vec<_> = self.engines.iter().map(|engine| engine.kind().name()).collect();
            CommError::Unsupported { what: what.join(" with "), engines: engines.join(", ") }
        })
    }

    fn pick_for(&self, calls: &[CollectiveCall<'_>]) -> Result<&dyn Engine, CommError> {
        let wanted: SmallVec<[_; 4]> = calls.iter().map(|call| (call.op(), call.dtype())).collect();
        self.pick(&wanted)
    }

    pub(crate) fn enqueue(
        self: &Arc<Self>,
        calls: &[CollectiveCall<'_>],
        queue: &Arc<dyn Queue>,
    ) -> Result<Enqueued, CommError> {
        self.usable()?;
        self.check_queue(queue)?;
        let Some(signature) = Signature::of(calls) else { return Ok(self.nothing(queue)) };
        let engine = self.pick_for(calls)?;
        let _comparing = self.compare(&signature)?;
        self.put(queue, signature, Some(engine), |waits| engine.enqueue(calls, queue, waits))
    }

    /// A call without any part: it is over.
    fn nothing(self: &Arc<Self>, queue: &Arc<dyn Queue>) -> Enqueued {
        Enqueued { inner: Arc::clone(self), queue: queue.id(), ticket: 0 }
    }

    fn replay(
        self: &Arc<Self>,
        graph: &PreparedGraph,
        queue: &Arc<dyn Queue>,
    ) -> Result<Enqueued, CommError> {
        self.usable()?;
        self.check_queue(queue)?;
        let signature = Signature::Replay { nodes: graph.ops().len() };
        let _comparing = self.compare(&signature)?;
        self.put(queue, signature, None, |waits| {
            queue.submit(&Submission { waits, ops: &[Op::Replay(graph)], signals: &[] })?;
            Ok(())
        })
    }

    /// Puts something in a queue, in its place among all calls.
    fn put(
        self: &Arc<Self>,
        queue: &Arc<dyn Queue>,
        signature: Signature,
        engine: Option<&dyn Engine>,
        submit: impl FnOnce(&[SemaphorePoint]) -> Result<(), CommError>,
    ) -> Result<Enqueued, CommError> {
        let id = queue.id();
        let mut state = self.lock();
        state.lines.add(self.device.as_ref(), queue)?;
        let called = state.next(&signature);
        let needs_order = engine.is_none_or(Engine::needs_order);
        let wait = if needs_order { state.lines.order(id)? } else { None };
        // Before it is submitted: whoever looks for what hangs must find it.
        self.flight.begin(called, signature, engine.map_or("graph", |engine| engine.kind().name()), Some(id));
        if let Err(error) = submit(wait.as_slice()) {
            self.flight.retract(called.ticket);
            drop(state);
            return Err(self.told(error));
        }
        state.take(called);
        state.lines.note(id, called.ticket);
        drop(state);
        self.bell.calls();
        Ok(Enqueued { inner: Arc::clone(self), queue: id, ticket: called.ticket })
    }

    /// Has calls done and waits for them.
    pub(crate) fn run(
        self: &Arc<Self>,
        calls: &[CollectiveCall<'_>],
        deadline: Deadline,
    ) -> Result<(), CommError> {
        self.usable()?;
        let Some(signature) = Signature::of(calls) else { return Ok(()) };
        let engine = self.pick_for(calls)?;
        let _comparing = self.compare(&signature)?;
        let (called, before) = {
            let mut state = self.lock();
            let before = state.lines.points()?;
            let called = state.next(&signature);
            state.take(called);
            self.flight.begin(called, signature, engine.kind().name(), None);
            (called, before)
        };
        let late = |error| self.told(unfinished(error, called.ticket, signature.text()));
        let ready = before.iter().try_for_each(|point| point.wait(deadline)).map_err(late);
        let outcome = match ready {
            Ok(()) => engine.run(calls, deadline),
            Err(error) => Some(Err(error)),
        };
        if let Some(outcome) = outcome {
            self.flight.end(None, called.ticket);
            return outcome.map_err(|error| self.told(error));
        }
        self.flight.retract(called.ticket);
        let queue = self.own_queue()?;
        self.put(&queue, signature, Some(engine), |waits| engine.enqueue(calls, &queue, waits))?
            .wait(deadline)
    }

    pub(crate) fn nodes(&self, calls: &[CollectiveCall<'_>]) -> Result<SmallVec<[GraphOp; 1]>, CommError> {
        self.usable()?;
        let mut nodes = SmallVec::new();
        if !calls.is_empty() {
            self.pick_for(calls)?.with_ops(calls, &mut |ops| {
                nodes.extend(ops.iter().map(|op| GraphOp::Op(OwnedOp::from(op))));
                Ok(())
            })?;
        }
        Ok(nodes)
    }

    fn check_queue(&self, queue: &Arc<dyn Queue>) -> Result<(), CommError> {
        let (queue, device) = (queue.id(), self.device.info().id);
        if queue.device == device { Ok(()) } else { Err(CommError::ForeignQueue { queue, device }) }
    }

    /// In validating mode, makes sure that all ranks make this call; the lock keeps later calls behind it.
    fn compare(&self, signature: &Signature) -> Result<Option<MutexGuard<'_, ()>>, CommError> {
        if !self.config.validate || !signature.is_for_all() {
            return Ok(None);
        }
        let lock = self.comparing.lock().unwrap_or_else(PoisonError::into_inner);
        let number = self.lock().numbers + 1;
        let agreed =
            self.group.agree("call of a communicator", signature.text().as_bytes(), self.config.timeout);
        let what = match agreed {
            Ok(()) => return Ok(Some(lock)),
            Err(GroupError::Disagreement { ranks, values, .. }) => {
                let texts = values.map(|value| String::from_utf8_lossy(&value).into_owned());
                format!("rank {} called {}, rank {} called {}", ranks[0], texts[0], ranks[1], texts[1])
            }
            Err(error @ GroupError::Mismatch { .. }) => error.to_string(),
            Err(error) => return Err(self.judge(error)),
        };
        Err(CommError::Failed(failed(CollectiveFailure::Mismatch { number, what })))
    }

    /// A queue of its own; another once that has failed.
    fn own_queue(&self) -> Result<Arc<dyn Queue>, CommError> {
        let mut own = self.own_queue.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = own.as_ref().filter(|queue| queue.failure().is_none()) {
            return Ok(Arc::clone(queue));
        }
        Ok(Arc::clone(own.insert(self.device.create_queue(&QueueDesc::default())?)))
    }

    fn word(&self) -> Result<&BufferView, CommError> {
        if let Some(word) = self.word.get() {
            return Ok(word);
        }
        let word = self.device.allocate(&BufferDesc::device(4))?;
        Ok(self.word.get_or_init(|| BufferView::whole(word)))
    }

    /// What an error of the group means for the communicator.
    fn judge(&self, error: GroupError) -> CommError {
        self.check_group();
        self.told(CommError::from(error))
    }

    /// What is told of an error: where the communicator has failed, that is why.
    pub(crate) fn told(&self, error: CommError) -> CommError {
        self.check_group();
        match &error {
            CommError::Failed(failure) if is_of_one(failure) => return error,
            CommError::Failed(failure) if matches!(**failure, Failure::Collective(_)) => {
                self.fail(failure, true)
            }
            _ => {}
        }
        match (&error, self.failure.get()) {
            (CommError::Failed(_) | CommError::Group(_), Some(failure)) => {
                CommError::Failed(Arc::clone(failure))
            }
            _ => error,
        }
    }

    /// Looks whether the group can go on.
    pub(crate) fn check_group(&self) {
        if self.failure.get().is_some() {
            return;
        }
        let failure = match self.group.check() {
            Ok(()) => return,
            Err(GroupError::PeerLost { rank, how }) => {
                CollectiveFailure::PeerLost { rank: rank.0, how: how.to_string() }
            }
            Err(GroupError::Aborted { by, reason }) => CollectiveFailure::Aborted { rank: by.0, reason },
            Err(error) => CollectiveFailure::Aborted { rank: self.rank(), reason: error.to_string() },
        };
        self.fail(&failed(failure), false);
    }

    /// Looks how far queues have come.
    pub(crate) fn look(&self) {
        let looked = self.lock().lines.look(|news| self.flight.end(Some(news.queue), news.ticket));
        if let Err(failure) = looked
            && !is_of_one(&failure)
        {
            // The calls behind it will not be made here, and the others would wait for them.
            self.fail(&failure, true);
        }
    }

    /// Ends everything if a call has been under way for too long.
    pub(crate) fn check_age(&self) {
        let Some(oldest) = self.flight.oldest().filter(|oldest| oldest.age > self.config.timeout) else {
            return;
        };
        let failure = CollectiveFailure::TimedOut {
            number: oldest.ticket,
            op: oldest.op,
            after: oldest.age,
            waiting: "the flight records tell which ranks had come to it".to_owned(),
        };
        self.fail(&failed(failure), true);
    }

    pub(crate) fn check_engines(&self) {
        if self.failure.get().is_some() {
            return;
        }
        if let Some(error) = self.engines.iter().find_map(|engine| engine.check().err()) {
            let (rank, reason) = (self.rank(), error.to_string());
            self.fail(&failed(CollectiveFailure::Aborted { rank, reason }), true);
        }
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.failure.get().is_none() && !self.lock().lines.is_idle()
    }

    /// Ends every call here, and on the other ranks if they do not know yet. The first failure is the one that counts.
    pub(crate) fn fail(&self, failure: &Arc<Failure>, tell: bool) {
        if self.failure.set(Arc::clone(failure)).is_err() {
            return;
        }
        tracing::warn!(rank = self.rank(), %failure, "a communicator failed");
        if tell && let Err(error) = self.group.abort(&failure.to_string()) {
            tracing::warn!(%error, "the other ranks were not told");
        }
        self.engines.iter().for_each(|engine| engine.abort(failure, Deadline::within(PARTING)));
        if let Err(error) = self.flight.write(&self.record()) {
            tracing::warn!(%error, "the flight record was not written");
        }
    }

    fn record(&self) -> FlightRecord {
        let health = self.group.health().unwrap_or_default();
        let lost = (0..).zip(health).filter(|(_, health)| matches!(health, Health::Lost(_)));
        FlightRecord {
            rank: self.rank(),
            size: self.group.size(),
            device: self.device.info().id.to_string(),
            failure: self.failure.get().map(|failure| failure.to_string()),
            lost: lost.map(|(rank, _)| rank).collect(),
            calls: self.flight.calls(),
        }
    }

    /// How this rank joins the group of its colour.
    fn part(
        &self,
        color: Option<u32>,
        key: i32,
        deadline: Deadline,
    ) -> Result<Option<(Rendezvous, JoinConfig)>, CommError> {
        let own = self.group.rank();
        let wish = postcard::to_allocvec(&(color, key)).unwrap_or_default();
        let wishes = self.group.all_gather("colours of a split", &wish, deadline)?;
        let mut peers: Vec<(i32, Rank)> = Rank::all(self.group.size())
            .zip(&wishes)
            .filter_map(|(rank, wish)| {
                let (other, key): (Option<u32>, i32) = postcard::from_bytes(wish).ok()?;
                (color.is_some() && other == color).then_some((key, rank))
            })
            .collect();
        peers.sort_unstable();
        let leads = peers.first().is_some_and(|(_, rank)| *rank == own);
        let host = leads.then(|| Host::new(&self.bind())).transpose()?;
        let id = host.as_ref().map(|host| host.id().as_bytes().to_vec()).unwrap_or_default();
        let ids = self.group.all_gather("ids of a split", &id, deadline)?;
        let (Some((_, leader)), Some(place)) =
            (peers.first(), peers.iter().position(|(_, rank)| *rank == own))
        else {
            return Ok(None);
        };
        let rendezvous = match host {
            Some(host) => Rendezvous::Hosting(host),
            None => {
                let id = ids.get(leader.index()).map(Vec::as_slice).unwrap_or_default();
                let id = warpweft_bootstrap::UniqueId::from_bytes(id);
                let wrong = |error: warpweft_bootstrap::ParseUniqueIdError| CommError::NoEngine {
                    reason: format!("rank {leader} made no id: {error}"),
                };
                Rendezvous::Id(id.map_err(wrong)?)
            }
        };
        let config = JoinConfig::new(Rank(to_u32(place)), to_u32(peers.len()));
        Ok(Some((rendezvous, JoinConfig { bind: self.bind(), ..config })))
    }

    /// Where a new group listens: as this one does.
    fn bind(&self) -> Bind {
        self.group.bind().clone()
    }
}

/// Whether a failure ends one call and not the communicator, since all ranks were told that they called different
/// things.
const fn is_of_one(failure: &Failure) -> bool {
    matches!(failure, Failure::Collective(CollectiveFailure::Mismatch { .. }))
}

fn failed(failure: CollectiveFailure) -> Arc<Failure> {
    Arc::new(failure.into())
}

fn count<T>(things: impl Iterator<Item = T>) -> u32 {
    to_u32(things.count())
}

/// Groups have fewer members than this holds.
fn to_u32(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("group", &self.group)
            .field("device", &self.device.info().id)
            .field("engines", &self.engines)
            .field("failure", &self.failure.get())
            .finish_non_exhaustive()
    }
}
