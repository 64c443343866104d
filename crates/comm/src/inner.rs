//! What a communicator is made of: the group, the engines, and what is under way.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak},
    thread,
    time::{Duration, Instant},
};

use smallvec::SmallVec;
use warpweft_bootstrap::{Bind, Group, GroupError, Health, Host, JoinConfig, Loss, Rank, Rendezvous};
use warpweft_core_types::{
    BufferDesc, BufferView, CallError, CollectiveCall, CollectiveFailure, CollectiveOp, DType, Deadline,
    Device, DeviceId, ErrorClass, Failure, GraphOp, Op, OwnedOp, PreparedGraph, Queue, QueueDesc, RangeError,
    SemaphorePoint, Submission, WaitError,
};

use crate::{
    CommConfig, CommError, EngineKind, Enqueued, FlightRecord, PersistentCall,
    engine::Engine,
    error::unfinished,
    flight::{Called, CommunicatorId, Exchanges, Flight, Signature, exchanges_of},
    form,
    keeper::Bell,
    lines::{Lines, Lost},
    persistent::{What, Work},
};

/// Who leaves has nothing more to do with calls that it has ended, and others may still be at them for so long; as long
/// as its own, which nobody waits for any more.
pub(crate) const GRACE: Duration = Duration::from_millis(500);

/// An engine may notice that a rank is dead before the group has told so, which takes less than this on one host.
const NEWS: Duration = Duration::from_millis(200);

/// How long an engine may take to end what is under way.
const PARTING: Duration = Duration::from_secs(2);

/// What a communicator, its keeper and the calls under way have in common.
pub(crate) struct Inner {
    id: CommunicatorId,
    /// How it came to be, for whoever reads records.
    origin: String,
    group: Arc<Group>,
    device: Arc<dyn Device>,
    engines: Vec<Arc<dyn Engine>>,
    config: CommConfig,
    flight: Flight,
    pub(crate) shared: Arc<Shared>,
    /// In validating mode, calls of several threads are compared one after the other.
    comparing: Mutex<()>,
    failure: OnceLock<Arc<Failure>>,
    /// When a rank was found to have left of its own accord, and how that is told.
    left: OnceLock<(Instant, CollectiveFailure)>,
    /// The operations of the graph that was replayed last, and how many calls they have. The weak half keeps the address
    /// from being given to others.
    counted: Mutex<Option<(Weak<[Arc<GraphOp>]>, usize)>>,
    /// For calls that are waited for on the spot and need a queue.
    own_queue: Mutex<Option<Arc<dyn Queue>>>,
    /// What barriers of queues reduce.
    word: OnceLock<BufferView>,
    pub(crate) bell: Arc<Bell>,
}

/// What calls in queues look at, when the communicator is gone, too.
pub(crate) struct Shared {
    pub(crate) inner: Weak<Inner>,
    /// The device of all queues.
    pub(crate) device: DeviceId,
    pub(crate) state: Mutex<State>,
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

    /// A call was not made after all. What was called since keeps its place.
    const fn give_back(&mut self, called: Called) {
        if self.tickets == called.ticket {
            self.tickets -= 1;
            if called.number.is_some() {
                self.numbers -= 1;
            }
        }
    }
}

impl Inner {
    pub(crate) fn new(
        group: Arc<Group>,
        device: &Arc<dyn Device>,
        config: &CommConfig,
        origin: String,
        deadline: Deadline,
    ) -> Result<Arc<Self>, CommError> {
        let (mark, engines) = form::engines(&group, device, config, deadline)?;
        Ok(Arc::new_cyclic(|inner| Self {
            id: CommunicatorId { run: group.run().to_string(), epoch: group.epoch(), mark },
            origin,
            engines,
            group,
            device: Arc::clone(device),
            config: config.clone(),
            flight: Flight::new(config.flight.clone()),
            shared: Arc::new(Shared {
                inner: Weak::clone(inner),
                device: device.info().id,
                state: Mutex::default(),
            }),
            comparing: Mutex::default(),
            failure: OnceLock::new(),
            left: OnceLock::new(),
            counted: Mutex::default(),
            own_queue: Mutex::default(),
            word: OnceLock::new(),
            bell: Arc::default(),
        }))
    }

    pub(crate) const fn id(&self) -> &CommunicatorId {
        &self.id
    }

    pub(crate) const fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    pub(crate) const fn config(&self) -> &CommConfig {
        &self.config
    }

    pub(crate) fn engines(&self) -> impl Iterator<Item = &dyn Engine> {
        self.engines.iter().map(AsRef::as_ref)
    }

    pub(crate) fn failure(&self) -> Option<Arc<Failure>> {
        self.failure.get().cloned()
    }

    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    pub(crate) fn rank(&self) -> u32 {
        self.group.rank().0
    }

    /// The state, unless a call is being put in a queue. That may take until somebody ends it, and whoever is to find
    /// that out must not wait for it.
    fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        try_lock(&self.shared.state)
    }

    /// When a call is to be given up, whose caller may have said so.
    fn by(&self, deadline: Option<Deadline>) -> Deadline {
        let timeout = Deadline::within(self.config.timeout);
        deadline.map_or(timeout, |deadline| deadline.min(timeout))
    }

    /// The state, for a call that comes next. Another thread's call may be blocked by the driver while it is put in a
    /// queue, so the wait has an end; where nobody has the lock, nobody looks at the clock.
    fn turn(
        &self,
        signature: &Signature,
        deadline: Option<Deadline>,
    ) -> Result<MutexGuard<'_, State>, CommError> {
        if let Some(state) = self.try_lock() {
            return Ok(state);
        }
        let late = || CommError::Timeout { number: 0, op: signature.text() };
        lock_by(&self.shared.state, self.by(deadline)).ok_or_else(late)
    }

    pub(crate) fn usable(&self) -> Result<(), CommError> {
        let check =
            || self.failure.get().map_or(Ok(()), |failure| Err(CommError::Failed(Arc::clone(failure))));
        check()?;
        self.refuse_if_dropped()?;
        if let Some((_, left)) = self.left.get() {
            // It would wait for whoever has left.
            self.fail(&failed(left.clone()), false);
        }
        check()
    }

    /// A call that is kept outlives its communicator, which takes no more then.
    fn refuse_if_dropped(&self) -> Result<(), CommError> {
        if self.bell.has_ended() { Err(CommError::Failed(failed(self.dropped()))) } else { Ok(()) }
    }

    pub(crate) fn first(&self) -> Result<&dyn Engine, CommError> {
        let engine = self.engines.first().map(AsRef::as_ref);
        engine.ok_or_else(|| CommError::NoEngine { reason: "there is none".to_owned() })
    }

    /// The engine that does all of these.
    pub(crate) fn pick(
        &self,
        wanted: impl Iterator<Item = (CollectiveOp, DType)> + Clone,
    ) -> Result<&Arc<dyn Engine>, CommError> {
        let does = |engine: &dyn Engine| wanted.clone().all(|(op, dtype)| engine.does(op, dtype));
        self.engines.iter().find(|engine| does(engine.as_ref())).ok_or_else(|| {
            let what = wanted.clone().map(|(op, dtype)| format!("{op} of {dtype}")).collect::<Vec<_>>();
            let engines: Vec<_> = self.engines.iter().map(|engine| engine.kind().name()).collect();
            CommError::Unsupported { what: what.join(" with "), engines: engines.join(", ") }
        })
    }

    fn pick_for(&self, calls: &[CollectiveCall<'_>]) -> Result<&Arc<dyn Engine>, CommError> {
        self.pick(calls.iter().map(|call| (call.op(), call.dtype())))
    }

    pub(crate) fn enqueue(
        &self,
        calls: &[CollectiveCall<'_>],
        queue: &Arc<dyn Queue>,
    ) -> Result<Enqueued, CommError> {
        self.enqueue_then(calls, queue, &[])
    }

    /// The same with operations behind it that belong to the call.
    pub(crate) fn enqueue_then(
        &self,
        calls: &[CollectiveCall<'_>],
        queue: &Arc<dyn Queue>,
        then: &[Op<'_>],
    ) -> Result<Enqueued, CommError> {
        self.check_before_comparing(queue)?;
        check_overlaps(calls)?;
        let Some(signature) = Signature::of(calls) else {
            return self.nothing(queue);
        };
        let engine = self.pick_for(calls)?;
        self.usable()?;
        let _comparing = self.compare(&signature, || Signature::text_of_all(calls), None)?;
        let submit = |waits: &[SemaphorePoint]| engine.enqueue(calls, queue, waits, then);
        let place = Place::behind_last(engine.as_ref());
        self.put(queue, (signature, &exchanges_of(calls)), place, None, submit)
    }

    /// What makes calls again, and the engine that does.
    pub(crate) fn persist(&self, calls: &[CollectiveCall<'_>]) -> Result<(Arc<dyn Engine>, Work), CommError> {
        self.usable()?;
        let engine = self.pick_for(calls)?;
        Ok((Arc::clone(engine), engine.persist(calls).map_err(|error| self.told(error))?))
    }

    /// A call that was checked before.
    pub(crate) fn enqueue_again(
        &self,
        call: &PersistentCall,
        queue: &Arc<dyn Queue>,
    ) -> Result<Enqueued, CommError> {
        self.check_before_comparing(queue)?;
        let Some(What { signature, exchanges, text, engine, work }) = &call.what else {
            return self.nothing(queue);
        };
        self.usable()?;
        let _comparing = self.compare(signature, || text.clone(), None)?;
        let place = Place::behind_last(engine.as_ref());
        self.put(queue, (*signature, exchanges), place, None, |waits| {
            work.submit(engine.as_ref(), queue, waits)
        })
    }

    /// No calls, which are over at once.
    fn nothing(&self, queue: &Arc<dyn Queue>) -> Result<Enqueued, CommError> {
        self.check_queue(queue)?;
        Ok(self.enqueued(queue.id().number, 0))
    }

    /// A call with this ticket; none has the ticket 0, which is over.
    fn enqueued(&self, queue: u32, ticket: u64) -> Enqueued {
        Enqueued { shared: Arc::clone(&self.shared), queue, ticket }
    }

    pub(crate) fn replay(
        &self,
        graph: &PreparedGraph,
        queue: &Arc<dyn Queue>,
    ) -> Result<Enqueued, CommError> {
        self.usable()?;
        self.check_before_comparing(queue)?;
        let signature = Signature::Replay { calls: self.calls_in(graph) };
        let _comparing = self.compare(&signature, || signature.text(), None)?;
        self.put(queue, (signature, &Exchanges::new()), Place::GRAPH, None, |waits| {
            queue.submit(&Submission { waits, ops: &[Op::Replay(graph)], signals: &[] })?;
            Ok(())
        })
    }

    /// How many calls that all ranks make a graph has. Most replays are of the graph before.
    fn calls_in(&self, graph: &PreparedGraph) -> usize {
        let ops = graph.ops();
        let counted = || self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((latest, calls)) = &*counted()
            && std::ptr::addr_eq(latest.as_ptr(), Arc::as_ptr(ops))
        {
            return *calls;
        }
        let calls = self.count_calls(ops);
        *counted() = Some((Arc::downgrade(ops), calls));
        calls
    }

    /// The same of operations. What else is among them is each rank's own affair.
    fn count_calls(&self, ops: &[Arc<GraphOp>]) -> usize {
        let of_node = |node: &OwnedOp| self.engines.iter().map(|engine| engine.calls_in(node)).sum::<usize>();
        let nodes = ops.iter().filter_map(|node| match &**node {
            GraphOp::Op(op) => Some(of_node(op)),
            GraphOp::Captured(_) | GraphOp::Join => None,
        });
        nodes.sum()
    }

    /// Puts something in a queue, in its place among all calls.
    fn put(
        &self,
        queue: &Arc<dyn Queue>,
        call: (Signature, &Exchanges),
        place: Place,
        deadline: Option<Deadline>,
        submit: impl FnOnce(&[SemaphorePoint]) -> Result<(), CommError>,
    ) -> Result<Enqueued, CommError> {
        let state = self.turn(&call.0, deadline).map_err(|error| self.told(error))?;
        // Under the lock that the keeper takes once it has seen the end: it sees this call, or this sees the end. What is
        // refused here is no failure of what is under way.
        self.refuse_if_dropped()?;
        // The lock is free again before anything is told.
        self.try_put(state, queue, call, place, submit).map_err(|error| self.told(error))
    }

    fn try_put(
        &self,
        mut state: MutexGuard<'_, State>,
        queue: &Arc<dyn Queue>,
        (signature, exchanges): (Signature, &Exchanges),
        place: Place,
        submit: impl FnOnce(&[SemaphorePoint]) -> Result<(), CommError>,
    ) -> Result<Enqueued, CommError> {
        let id = match state.lines.number_of(queue) {
            Some(number) => number,
            None => {
                self.check_queue(queue)?;
                state.lines.add(self.device.as_ref(), queue)?
            }
        };
        let called = state.next(&signature);
        let waits = match place.behind {
            Behind::All => state.lines.points(Some(id))?,
            Behind::Last => state.lines.order(id)?.into_iter().collect(),
            Behind::Queue => SmallVec::new(),
        };
        // Before it is submitted: whoever looks for what hangs must find it.
        self.flight.begin(called, signature, exchanges, (place.engine, Some(id)));
        if let Err(error) = submit(&waits) {
            self.flight.retract(called.ticket);
            return Err(error);
        }
        state.take(called);
        state.lines.note(id, called.ticket);
        drop(state);
        self.bell.calls();
        Ok(self.enqueued(id, called.ticket))
    }

    /// Has calls done and waits for them.
    pub(crate) fn run(&self, calls: &[CollectiveCall<'_>], deadline: Deadline) -> Result<(), CommError> {
        check_overlaps(calls)?;
        let Some(signature) = Signature::of(calls) else { return Ok(()) };
        let engine = self.pick_for(calls)?;
        self.usable()?;
        let _comparing = self.compare(&signature, || Signature::text_of_all(calls), Some(deadline))?;
        if engine.runs(calls) {
            return self.run_here(engine.as_ref(), calls, signature, deadline);
        }
        let queue = self.own_queue().map_err(|error| self.told(error))?;
        let place = Place { engine: engine.kind().name(), behind: Behind::All };
        let submit = |waits: &[SemaphorePoint]| engine.enqueue(calls, &queue, waits, &[]);
        self.put(&queue, (signature, &exchanges_of(calls)), place, Some(deadline), submit)?.wait(deadline)
    }

    /// The same in this thread.
    fn run_here(
        &self,
        engine: &dyn Engine,
        calls: &[CollectiveCall<'_>],
        signature: Signature,
        deadline: Deadline,
    ) -> Result<(), CommError> {
        let begin = || -> Result<_, CommError> {
            let mut state = self.turn(&signature, Some(deadline))?;
            let before = state.lines.points(None)?;
            let called = state.next(&signature);
            state.take(called);
            self.flight.begin(called, signature, &exchanges_of(calls), (engine.kind().name(), None));
            Ok((called, before))
        };
        let (called, before) = begin().map_err(|error| self.told(error))?;
        for point in before {
            match point.wait(deadline) {
                // That is over too.
                Err(WaitError::Failed(failure)) if is_of_one(&failure) => {}
                Err(error) => {
                    self.flight.retract(called.ticket);
                    // Whoever holds the lock for longer makes a call after this one, which then keeps its place.
                    if let Some(mut state) = lock_by(&self.shared.state, Deadline::within(TURN)) {
                        state.give_back(called);
                    }
                    return Err(self.told(unfinished(error, called.ticket, signature.text())));
                }
                Ok(()) => {}
            }
        }
        let outcome = engine.run(calls, deadline);
        self.flight.end(None, called.ticket);
        outcome.map_err(|error| self.told(error))
    }

    pub(crate) fn nodes(&self, calls: &[CollectiveCall<'_>]) -> Result<SmallVec<[GraphOp; 1]>, CommError> {
        check_overlaps(calls)?;
        let mut nodes = SmallVec::new();
        if !calls.is_empty() {
            let engine = self.pick_for(calls)?;
            self.usable()?;
            let owned = engine.with_ops(calls, &mut |ops| {
                nodes.extend(ops.iter().map(|op| GraphOp::Op(OwnedOp::from(op))));
                Ok(())
            });
            owned.map_err(|error| self.told(error))?;
        }
        Ok(nodes)
    }

    /// What is compared is going to be made. Elsewhere a queue is looked at when it gets its first call.
    fn check_before_comparing(&self, queue: &Arc<dyn Queue>) -> Result<(), CommError> {
        if self.config.validate { self.check_queue(queue) } else { Ok(()) }
    }

    fn check_queue(&self, queue: &Arc<dyn Queue>) -> Result<(), CommError> {
        let (queue, device) = (queue.id(), self.device.info().id);
        if queue.device == device { Ok(()) } else { Err(CommError::ForeignQueue { queue, device }) }
    }

    /// In validating mode, makes sure that all ranks make this call; the lock keeps later calls behind it.
    fn compare(
        &self,
        signature: &Signature,
        text: impl FnOnce() -> String,
        deadline: Option<Deadline>,
    ) -> Result<Option<MutexGuard<'_, ()>>, CommError> {
        if !self.config.validate || !signature.is_for_all() {
            return Ok(None);
        }
        let deadline = self.by(deadline);
        let late = || CommError::Timeout { number: 0, op: signature.text() };
        let lock = lock_by(&self.comparing, deadline).ok_or_else(late)?;
        let number = self.turn(signature, Some(deadline))?.numbers + 1;
        let agreed = self.group.agree("call of a communicator", text().as_bytes(), deadline);
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

    pub(crate) fn word(&self) -> Result<&BufferView, CommError> {
        if let Some(word) = self.word.get() {
            return Ok(word);
        }
        let word = self.device.allocate(&BufferDesc::device(4)).map_err(|error| self.told(error.into()))?;
        Ok(self.word.get_or_init(|| BufferView::whole(word)))
    }

    /// What an error of the group means for the communicator.
    pub(crate) fn judge(&self, error: GroupError) -> CommError {
        self.check_group();
        self.told(CommError::from(error))
    }

    /// What is told of an error: where the communicator has failed, that is why.
    pub(crate) fn told(&self, error: CommError) -> CommError {
        let is_effect = match &error {
            CommError::Failed(failure) if self.goes_on_after(failure) => return error,
            CommError::Failed(failure) => may_be_a_death(failure),
            CommError::Native(_) => true,
            CommError::Submit(error) => error.class() == ErrorClass::Internal,
            _ => false,
        };
        if is_effect {
            self.wait_for_news();
        }
        self.check_group();
        // A queue that failed by something else takes this call from the others all the same, and so does a device that
        // is lost before there is anything in a queue.
        if let Some(failure) = error.failure() {
            self.fail(failure, true);
        }
        match (&error, self.failure.get()) {
            (CommError::Failed(_) | CommError::Group(_), Some(failure)) => {
                CommError::Failed(Arc::clone(failure))
            }
            (_, Some(failure)) if is_effect => CommError::Failed(Arc::clone(failure)),
            _ => error,
        }
    }

    /// The same as soon as it is known, which the keeper finds out.
    pub(crate) fn judged(&self, error: &CommError) -> Option<CommError> {
        match error {
            CommError::Failed(failure) if !self.goes_on_after(failure) => {
                self.failure.get().map(|failure| CommError::Failed(Arc::clone(failure)))
            }
            error => Some(error.clone()),
        }
    }

    /// Gives the group time to tell of a death that something else was the first to notice.
    fn wait_for_news(&self) {
        if self.failure.get().is_none() && self.group.check().is_ok() {
            let is_lost = |health: &[Health]| health.iter().any(|health| !health.is_present());
            // That there are no news is an answer too.
            let _health = self.group.wait_health(NEWS, is_lost);
        }
    }

    /// Whether no rank is lost or has aborted.
    pub(crate) fn is_healthy(&self) -> bool {
        let is_whole = self.group.check().is_ok();
        self.check_group();
        is_whole && self.failure.get().is_none()
    }

    /// Looks whether the group can go on.
    pub(crate) fn check_group(&self) {
        if self.failure.get().is_some() {
            return;
        }
        let failure = match self.group.check() {
            // What a fork does with its copy is nothing to the group, and every call there says what is wrong.
            Ok(()) | Err(GroupError::Forked { .. }) => return,
            Err(GroupError::PeerLost { rank, how }) => {
                let lost = CollectiveFailure::PeerLost { rank: rank.0, how: how.to_string() };
                let (since, _) = self.left.get_or_init(|| (Instant::now(), lost.clone()));
                if how == Loss::Left && (since.elapsed() < GRACE || !self.is_busy()) {
                    return;
                }
                lost
            }
            Err(GroupError::Aborted { by, reason }) => CollectiveFailure::Aborted { rank: by.0, reason },
            Err(error) => CollectiveFailure::Aborted { rank: self.rank(), reason: error.to_string() },
        };
        self.fail(&failed(failure), false);
    }

    /// Looks how far queues have come, unless a call is being put in one.
    pub(crate) fn look(&self) {
        let Some(mut state) = self.try_lock() else { return };
        let lost = state.lines.look(|news| self.flight.end(Some(news.queue), news.ticket));
        drop(state);
        for Lost { calls, failure } in lost {
            if self.goes_on_after(&failure) {
                self.flight.doubt(calls.queue);
                self.flight.end(Some(calls.queue), calls.ticket);
            } else {
                if may_be_a_death(&failure) {
                    self.wait_for_news();
                }
                self.check_group();
                // The calls behind it will not be made here, and the others would wait for them.
                self.fail(&failure, true);
            }
        }
    }

    /// Whether a failure ends one call and not the communicator. Ranks that meet at a board may have put different
    /// numbers of calls on it by then, so that later ones would meet the wrong calls.
    fn goes_on_after(&self, failure: &Failure) -> bool {
        is_of_one(failure) && self.engines.iter().all(|engine| engine.kind() != EngineKind::Planned)
    }

    /// Ends everything if a call has been under way for too long.
    pub(crate) fn check_age(&self) {
        let Some(oldest) = self.flight.oldest().filter(|oldest| oldest.age > self.config.timeout) else {
            return;
        };
        let failure = CollectiveFailure::TimedOut {
            number: oldest.number,
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
            self.wait_for_news();
            self.check_group();
            let (rank, reason) = (self.rank(), error.to_string());
            self.fail(&failed(CollectiveFailure::Aborted { rank, reason }), true);
        }
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.failure.get().is_none() && self.try_lock().is_none_or(|state| !state.lines.is_idle())
    }

    /// Ends every call here, and on the other ranks if they do not know yet. The first failure is the one that counts.
    pub(crate) fn fail(&self, failure: &Arc<Failure>, tell: bool) {
        if self.failure.set(Arc::clone(failure)).is_err() {
            return;
        }
        tracing::warn!(rank = self.rank(), %failure, "a communicator failed");
        // The group tells of a death, and whoever aborts tells of that; an abort that overtakes them would name this rank.
        let is_known = matches!(self.group.check(), Err(GroupError::PeerLost { .. }))
            || matches!(**failure, Failure::Collective(CollectiveFailure::Aborted { rank, .. }) if rank != self.rank());
        if tell
            && !is_known
            && let Err(error) = self.group.abort(&failure.to_string())
        {
            tracing::warn!(%error, "the other ranks were not told");
        }
        self.engines.iter().for_each(|engine| engine.abort(failure, Deadline::within(PARTING)));
        if let Err(error) = self.flight.write(&self.record()) {
            tracing::warn!(%error, "the flight record was not written");
        }
    }

    /// Ends what is under way of a communicator that was dropped some time ago. The others are told that it left.
    pub(crate) fn give_up(&self) {
        self.fail(&failed(self.dropped()), false);
    }

    /// Leaves the group. What was under way has ended.
    pub(crate) fn leave(&self) {
        let failure = self.failure.get_or_init(|| failed(self.dropped()));
        self.engines.iter().for_each(|engine| engine.leave(failure));
        if let Err(error) = self.group.leave() {
            tracing::debug!(%error, "a communicator of another process was dropped");
        }
    }

    fn dropped(&self) -> CollectiveFailure {
        let reason = "its communicator was dropped".to_owned();
        CollectiveFailure::Aborted { rank: self.rank(), reason }
    }

    pub(crate) fn record(&self) -> FlightRecord {
        let health = self.group.health().unwrap_or_default();
        let failure = self.failure.get();
        // Whoever leaves because of a failure is none of its causes.
        let is_cause = |rank: u32| match failure.map(AsRef::as_ref) {
            Some(Failure::Collective(CollectiveFailure::PeerLost { rank: lost, .. })) => *lost == rank,
            _ => false,
        };
        let is_dead = |health: Health| matches!(health, Health::Lost(loss) if loss != Loss::Left);
        let lost = (0..).zip(health).filter(|(rank, health)| is_cause(*rank) || is_dead(*health));
        FlightRecord {
            communicator: self.id.clone(),
            origin: self.origin.clone(),
            rank: self.rank(),
            size: self.group.size(),
            device: self.device.info().id.to_string(),
            failure: failure.map(|failure| failure.to_string()),
            lost: lost.map(|(rank, _)| rank).collect(),
            numbers_agree_until: self.flight.doubtful(),
            exchanged: self.flight.exchanged(),
            calls: self.flight.calls(self.shared.device),
        }
    }

    /// How this rank joins the group of its colour.
    pub(crate) fn part(
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
        // A leader that cannot host says so by an id that is none.
        let host = leads.then(|| Host::new(&self.bind())).transpose();
        let own_id = host.as_ref().ok().and_then(Option::as_ref).map(|host| host.id().as_bytes().to_vec());
        let ids = self.group.all_gather("ids of a split", &own_id.unwrap_or_default(), deadline)?;
        let host = host?;
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

/// How long a call of another thread's is waited for where the caller says nothing.
pub(crate) const TURN: Duration = Duration::from_secs(1);

/// A lock, if nobody has it. What panics under one would be a defect of ours, and leaves a whole state.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(guard)) => Some(guard.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A lock that somebody may have for long, by a deadline.
pub(crate) fn lock_by<T>(mutex: &Mutex<T>, deadline: Deadline) -> Option<MutexGuard<'_, T>> {
    /// Calls take microseconds; the few that take longer take far longer.
    const PAUSE: Duration = Duration::from_micros(50);
    loop {
        match try_lock(mutex) {
            None if !deadline.is_past() => thread::sleep(PAUSE),
            turn => return turn,
        }
    }
}

/// Where a call goes.
struct Place {
    engine: &'static str,
    behind: Behind,
}

/// What a call waits for.
enum Behind {
    /// What is in its queue.
    Queue,
    /// The last call as well.
    Last,
    /// All calls.
    All,
}

impl Place {
    const GRAPH: Self = Self { engine: "graph", behind: Behind::Last };

    fn behind_last(engine: &dyn Engine) -> Self {
        let behind = if engine.needs_order() { Behind::Last } else { Behind::Queue };
        Self { engine: engine.kind().name(), behind }
    }
}

/// Calls that begin together share no bytes that one of them writes.
pub(crate) fn check_overlaps(calls: &[CollectiveCall<'_>]) -> Result<(), CallError> {
    if calls.len() < 2 {
        return Ok(());
    }
    let places = |view: Option<&BufferView>| view.map(BufferView::place);
    let places: Vec<_> = calls.iter().map(|call| (places(call.src()), places(call.dst()))).collect();
    for (at, (_, dst)) in places.iter().enumerate() {
        let Some(dst) = dst else { continue };
        for (_, (other_src, other_dst)) in places.iter().enumerate().filter(|(other, _)| *other != at) {
            let bytes = [other_src, other_dst].into_iter().flatten().map(|other| dst.overlap(other)).max();
            if let Some(bytes) = bytes.filter(|bytes| *bytes > 0) {
                return Err(RangeError::Overlap { bytes }.into());
            }
        }
    }
    Ok(())
}

/// Whether all ranks were told that they called different things, which ends that call.
pub(crate) const fn is_of_one(failure: &Failure) -> bool {
    matches!(failure, Failure::Collective(CollectiveFailure::Mismatch { .. }))
}

/// Whether the group may have something to say about it: an engine hears of a death from other ranks too, and drivers
/// have words of their own for it.
const fn may_be_a_death(failure: &Failure) -> bool {
    !matches!(failure, Failure::Collective(other) if !matches!(other, CollectiveFailure::PeerLost { .. }))
}

pub(crate) fn failed(failure: CollectiveFailure) -> Arc<Failure> {
    Arc::new(failure.into())
}

pub(crate) fn count<T>(things: impl Iterator<Item = T>) -> u32 {
    to_u32(things.count())
}

/// Groups have fewer members than this holds.
fn to_u32(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
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
