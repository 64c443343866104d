//! How a call gets its place among the others, and into its queue.

use std::sync::{Arc, MutexGuard, PoisonError};

use smallvec::SmallVec;
use warpweft_bootstrap::GroupError;
use warpweft_core_types::{
    BufferDesc, BufferView, CallError, CollectiveCall, CollectiveFailure, Deadline, GraphOp, Op, OwnedOp,
    PreparedGraph, Queue, QueueDesc, RangeError, SemaphorePoint, Submission, WaitError,
};

use super::{Counted, Inner, State, failed, is_of_one};
use crate::{
    CommError, Enqueued, PersistentCall,
    engine::Engine,
    error::unfinished,
    flight::{Exchanges, Signature, exchanges_of},
    lock::{TURN, lock_by},
    persistent::{What, Work},
};

impl Inner {
    /// The engine that does these, `captured` where they become nodes of a graph. Calls that begin together need one that
    /// does them all.
    fn pick_for(&self, calls: &[CollectiveCall<'_>], captured: bool) -> Result<&Arc<dyn Engine>, CommError> {
        if let [call] = calls
            && let Some(engine) = self.dispatch.find_for(call, self.group.size(), captured)
        {
            return Ok(engine);
        }
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
        let engine = self.pick_for(calls, false)?;
        self.usable()?;
        let _comparing = self.compare(&signature, || Signature::text_of_all(calls), None)?;
        let submit = |waits: &[SemaphorePoint]| engine.enqueue(calls, queue, waits, then);
        let place = Place::behind_last(engine.as_ref());
        self.put(queue, (signature, &exchanges_of(calls)), place, None, submit)
    }

    /// What makes calls again, and the engine that does.
    pub(crate) fn persist(&self, calls: &[CollectiveCall<'_>]) -> Result<(Arc<dyn Engine>, Work), CommError> {
        self.usable()?;
        let engine = self.pick_for(calls, false)?;
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
        if let Some(Counted { ops: latest, calls }) = &*counted()
            && std::ptr::addr_eq(latest.as_ptr(), Arc::as_ptr(ops))
        {
            return *calls;
        }
        let calls = self.count_calls(ops);
        *counted() = Some(Counted { ops: Arc::downgrade(ops), calls });
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
        let engine = self.pick_for(calls, false)?;
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
            let engine = self.pick_for(calls, true)?;
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
