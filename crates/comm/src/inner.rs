//! What a communicator is made of: the group, the engines, and what is under way.

mod calls;
mod ending;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, OnceLock, Weak},
    time::Instant,
};

use warpweft_bootstrap::{Group, Health, Loss};
use warpweft_core_types::{
    BufferView, CollectiveFailure, CollectiveOp, DType, Deadline, Device, DeviceId, Failure, GraphOp, Queue,
};

use crate::{
    CommConfig, CommError, FlightRecord,
    dispatch::{self, Dispatch, Scene},
    engine::Engine,
    flight::{Called, CommunicatorId, Flight, Signature},
    form::{self, Formed},
    keeper::Bell,
    lines::Lines,
    lock::{lock_by, try_lock},
};

pub(crate) use self::{
    calls::check_overlaps,
    ending::{GRACE, failed, is_of_one},
};

/// What a communicator, its keeper and the calls under way have in common.
pub(crate) struct Inner {
    id: CommunicatorId,
    /// How it came to be, for whoever reads records.
    origin: String,
    group: Arc<Group>,
    device: Arc<dyn Device>,
    engines: Vec<Arc<dyn Engine>>,
    dispatch: Dispatch,
    config: CommConfig,
    flight: Flight,
    pub(crate) shared: Arc<Shared>,
    /// In validating mode, calls of several threads are compared one after the other.
    comparing: Mutex<()>,
    failure: OnceLock<Arc<Failure>>,
    /// When a rank was found to have left of its own accord, and how that is told.
    left: OnceLock<(Instant, CollectiveFailure)>,
    /// Of the graph that was replayed last.
    counted: Mutex<Option<Counted>>,
    /// For calls that are waited for on the spot and need a queue.
    own_queue: Mutex<Option<Arc<dyn Queue>>>,
    /// What barriers of queues reduce.
    word: OnceLock<BufferView>,
    pub(crate) bell: Arc<Bell>,
}

/// How many calls the operations of a graph have.
struct Counted {
    /// They may be gone, and their address is nobody else's as long as this is here.
    ops: Weak<[Arc<GraphOp>]>,
    calls: usize,
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
        let Formed { mark, engines, key } = form::engines(&group, device, config, deadline)?;
        let scene = Scene { group: &group, device, engines: &engines, key, deadline };
        let dispatch = match &config.tuning {
            Some(tuning) if group.size() > 1 => dispatch::table(&scene, tuning)?,
            _ => Dispatch::default(),
        };
        Ok(Arc::new_cyclic(|inner| Self {
            id: CommunicatorId { run: group.run().to_string(), epoch: group.epoch(), mark },
            origin,
            engines,
            dispatch,
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

    pub(crate) const fn dispatch(&self) -> &Dispatch {
        &self.dispatch
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
