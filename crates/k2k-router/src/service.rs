//! The thread that drives epochs, watches executors, and sees devices go.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use warpweft_core_types::{Deadline, Device, Resident, ResidentState};

use crate::{
    ActorError,
    actor::ActorId,
    dead_letter::Reason,
    device::Link,
    epoch::{Action, Answer, Cause, Epoch, Event, Goal, Order, Outcome, Party},
    executor::Core,
    host_port::HostPort,
    inbox::Inbox,
    shared::{Beat, Command, Shared},
};

/// How often it looks, and how often where messages are spilled.
const TICK: Duration = Duration::from_millis(50);
const SHORT_TICK: Duration = Duration::from_millis(1);

/// How long a handler may run before it is said to loop.
const LONGEST_HANDLER: Duration = Duration::from_millis(500);

/// How long an order may go without an answer before it is repeated. In one process none is lost.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the thread is asked or told.
#[derive(Debug)]
pub(crate) enum Request {
    /// Begin an epoch.
    Begin(Box<Begin>),
    /// Something happened in the epoch of an actor.
    Event { actor: ActorId, event: Event, core: Option<Box<Core>> },
    /// Look at what the host has spilled.
    Look,
    /// The device at this position is not to be trusted any more.
    Lost(usize),
    /// End.
    Shutdown,
}

/// An epoch to begin.
#[derive(Debug)]
pub(crate) struct Begin {
    pub(crate) actor: ActorId,
    pub(crate) goal: Goal,
    /// The executor of the target.
    pub(crate) target: Option<usize>,
    pub(crate) limit: Duration,
    pub(crate) done: mpsc::Sender<Result<Milestone, ActorError>>,
}

/// What whoever began an epoch is told.
#[derive(Debug)]
pub(crate) enum Milestone {
    Parked,
    Ended(Outcome),
}

#[derive(Debug)]
struct Running {
    epoch: Epoch,
    goal: Goal,
    source: usize,
    target: Option<usize>,
    inbox: Arc<Inbox>,
    core: Option<Box<Core>>,
    /// Until it was told that the actor returns or is there.
    done: Option<mpsc::Sender<Result<Milestone, ActorError>>>,
    /// What comes when the actor is back.
    next: VecDeque<Begin>,
}

/// What runs the executors of a device.
#[derive(Debug, Clone)]
pub(crate) enum Runner {
    /// Rust functions.
    Host(Arc<dyn Resident>),
    /// A kernel.
    Link(Arc<Link>),
}

impl Runner {
    fn has_failed(&self) -> bool {
        match self {
            Self::Host(resident) => resident.state() == ResidentState::Failed,
            Self::Link(link) => link.has_failed(),
        }
    }

    /// Ends them at their next message boundary.
    pub(crate) fn stop(&self, deadline: Deadline) -> Result<(), ActorError> {
        match self {
            Self::Host(resident) => Ok(resident.stop(deadline)?),
            Self::Link(link) => link.stop(deadline),
        }
    }
}

/// The thread's own.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) shared: Arc<Shared>,
    pub(crate) port: Arc<HostPort>,
    pub(crate) devices: Vec<Arc<dyn Device>>,
    pub(crate) runners: Vec<Runner>,
    running: BTreeMap<ActorId, Running>,
    last_epoch: u32,
    beats: Vec<(Beat, Instant)>,
}

impl Service {
    pub(crate) fn new(
        shared: Arc<Shared>,
        port: Arc<HostPort>,
        devices: Vec<Arc<dyn Device>>,
        runners: Vec<Runner>,
    ) -> Self {
        let beats = shared.executors.iter().map(|executor| (executor.beat(), Instant::now())).collect();
        Self { shared, port, devices, runners, running: BTreeMap::new(), last_epoch: 0, beats }
    }

    /// Serves until it is told to end.
    pub(crate) fn run(mut self, requests: &mpsc::Receiver<Request>) {
        let mut looked = Instant::now();
        loop {
            let spills = self.port.drain_all();
            match requests.recv_timeout(if spills { SHORT_TICK } else { TICK }) {
                Ok(Request::Begin(begin)) => self.begin(*begin),
                Ok(Request::Event { actor, event, core }) => {
                    if let (Some(core), Some(running)) = (core, self.running.get_mut(&actor)) {
                        running.core = Some(core);
                    }
                    self.event(actor, event);
                }
                Ok(Request::Lost(device)) => self.lose(device),
                Ok(Request::Look) | Err(mpsc::RecvTimeoutError::Timeout) => {}
                Ok(Request::Shutdown) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
            if looked.elapsed() >= SHORT_TICK {
                looked = Instant::now();
                self.watch();
                for actor in self.running.keys().copied().collect::<Vec<_>>() {
                    self.event(actor, Event::Tick);
                }
            }
        }
    }

    fn begin(&mut self, begin: Begin) {
        if let Some(running) = self.running.get_mut(&begin.actor)
            && running.epoch.is_returning()
        {
            return running.next.push_back(begin);
        }
        let Begin { actor, goal, target, limit, done } = begin;
        let refuse = |error| {
            // Whoever asked may have given up.
            let _gone = done.send(Err(error));
        };
        if self.running.contains_key(&actor) {
            return refuse(ActorError::Busy { actor });
        }
        let table = self.shared.routes.load();
        let entry = match table.find(actor) {
            Ok(entry) => entry,
            Err(reason) => return refuse(ActorError::Gone { actor, reason }),
        };
        let now = self.shared.now();
        self.last_epoch += 1;
        // The last of the senders is the host.
        let senders = u32::try_from(self.shared.executors.len()).unwrap_or(u32::MAX).saturating_add(1);
        let running = Running {
            epoch: Epoch::new(self.last_epoch, goal, senders, now, Some(now.saturating_add(limit)), PATIENCE),
            goal,
            source: entry.executor,
            target,
            inbox: Arc::clone(&entry.inbox),
            core: None,
            done: Some(done),
            next: VecDeque::new(),
        };
        self.running.insert(actor, running);
        self.drive(actor);
    }

    fn event(&mut self, actor: ActorId, event: Event) {
        let now = self.shared.now();
        if let Some(running) = self.running.get_mut(&actor) {
            running.epoch.handle(now, event);
            self.drive(actor);
        }
    }

    /// Does what the machine of an epoch wants.
    fn drive(&mut self, actor: ActorId) {
        while let Some(running) = self.running.get_mut(&actor) {
            let Some(action) = running.epoch.poll_action() else {
                self.tell_of_return(actor);
                return;
            };
            match action {
                Action::Tell { to, epoch, order } => self.tell(actor, to, epoch, order),
                Action::Parked => {
                    let told = running.done.take().map(|done| done.send(Ok(Milestone::Parked)));
                    if told.is_none_or(|told| told.is_err()) {
                        // Nobody is left to release it.
                        self.event(actor, Event::Cancel);
                    }
                }
                Action::Commit => {
                    let target = running.target;
                    self.shared.routes.change(|table| match target {
                        Some(target) => table.relocate(actor, target),
                        None => table.remove(actor, Reason::ActorStopped),
                    });
                }
                Action::Finish(outcome) => {
                    let Some(running) = self.running.remove(&actor) else { return };
                    if let Some(done) = running.done {
                        let _gone = done.send(Ok(Milestone::Ended(outcome)));
                    }
                    running.next.into_iter().for_each(|begin| self.begin(begin));
                }
            }
        }
    }

    /// An actor that has to return is named at once: a handler that loops may never answer.
    fn tell_of_return(&mut self, actor: ActorId) {
        let Some(running) = self.running.get_mut(&actor) else { return };
        if !running.epoch.is_returning() {
            return;
        }
        let inside = self.shared.executors[running.source].beat().inside();
        if let (Some(inside), Some(done)) = (inside, running.done.take()) {
            let _gone = done.send(Err(ActorError::Unparkable { actor, inside }));
        }
    }

    fn tell(&mut self, actor: ActorId, to: Party, epoch: u32, order: Order) {
        let Some(running) = self.running.get(&actor) else { return };
        let executor = match to {
            Party::Source => Some(running.source),
            Party::Target => running.target,
            Party::Sender(sender) => Some(sender as usize),
        };
        let executors = &self.shared.executors;
        match executor {
            Some(executor) if executor < executors.len() => {
                let core = (order == Order::Place).then(|| running.core.clone()).flatten();
                let brings = running.goal == Goal::Move;
                if executors[executor].is_lost() {
                    return self.event(actor, Event::Lost(to));
                }
                executors[executor].tell(Command::Order { actor, epoch, order, core, brings });
            }
            _ => {
                HostPort::switch(&running.inbox);
                self.event(actor, Event::Answered { from: to, epoch, order, answer: Answer::Done });
            }
        }
    }

    fn watch(&mut self) {
        let now = Instant::now();
        for (executor, (beat, since)) in self.shared.executors.iter().zip(&mut self.beats) {
            let seen = executor.beat();
            if seen != *beat {
                (*beat, *since) = (seen, now);
            }
            let loops = now.duration_since(*since) >= LONGEST_HANDLER;
            executor.set_looping(seen.inside().filter(|_| loops));
        }
        for device in 0..self.devices.len() {
            let failed = self.devices[device].failure().is_some() || self.runners[device].has_failed();
            if failed {
                self.lose(device);
            }
        }
    }

    /// A device is lost, and so are its actors.
    fn lose(&mut self, device: usize) {
        let mut is_new = false;
        for executor in self.shared.executors.iter().filter(|executor| executor.device == device) {
            is_new |= !executor.is_lost();
            executor.set_lost();
        }
        if !is_new {
            return;
        }
        tracing::warn!(device = %self.devices[device].info().id, "a device with actors is lost");
        if let Runner::Link(link) = &self.runners[device] {
            link.lose();
        }
        let table = self.shared.routes.load();
        let on_device = |executor: usize| self.shared.executors[executor].device == device;
        // Behind its commit an actor is at its target, as the table says.
        let gone: Vec<ActorId> = table
            .entries()
            .filter(|entry| on_device(entry.executor))
            .map(|entry| entry.inbox.actor)
            .collect();
        let mut events = Vec::new();
        for (actor, running) in &self.running {
            if on_device(running.source) {
                events.push((*actor, Event::Lost(Party::Source)));
            }
            if running.target.is_some_and(on_device) {
                events.push((*actor, Event::Lost(Party::Target)));
            }
            for (sender, _) in self.shared.executors.iter().enumerate().filter(|(at, _)| on_device(*at)) {
                let sender = u32::try_from(sender).unwrap_or(u32::MAX);
                events.push((*actor, Event::Lost(Party::Sender(sender))));
            }
        }
        self.shared.routes.change(|table| {
            gone.iter().for_each(|&actor| table.remove(actor, Reason::DeviceLost));
        });
        self.shared.replies.give_up(Reason::DeviceLost, |actor| gone.contains(&actor));
        for (actor, event) in events {
            self.event(actor, event);
        }
    }

    /// What an outcome is to whoever asked.
    pub(crate) fn result(shared: &Shared, actor: ActorId, outcome: Outcome) -> Result<(), ActorError> {
        match outcome {
            Outcome::Done | Outcome::Returned(Cause::Released) => Ok(()),
            Outcome::Returned(cause) => Err(ActorError::Returned { actor, cause }),
            Outcome::Lost(_) => {
                let reason = shared.routes.load().find(actor).err().unwrap_or(Reason::DeviceLost);
                Err(ActorError::Gone { actor, reason })
            }
        }
    }
}
