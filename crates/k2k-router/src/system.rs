//! A system of actors on devices.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use serde_json::Value;
use warpweft_core_types::{
    CodeFormat, Deadline, Device, DeviceId, Features, HostFunction, KernelCode, KernelContract, Launch,
    Progress, Resident, ResidentDesc,
};

use crate::{
    ActorError, AskError, Message, SendError,
    actor::{ActorId, ActorSpec, Body, FullPolicy, Handler, Layout, SendOptions},
    channels::Channels,
    dead_letter::{DeadLetter, DeadLetters, Reason},
    device::{
        self, DEVICES, Link, Shape,
        code::{DeviceCode, THREADS},
    },
    epoch::{Event, Goal, Outcome, Seat},
    executor::{Core, Executor, Local, inspection},
    host_port::{HostLanes, HostPort, Outward, Patience},
    inbox::Inbox,
    post::{Lanes, Post},
    reply::{Replies, Reply},
    ring::{Consumer, lane, shared_lane},
    service::{Begin, Milestone, Request, Runner, Service},
    shared::{Command, ExecutorSide, Shared},
    stats::{ActorStats, DeviceStats, LatencyStats, PendingMessage, RouteStats, Snapshot, latencies},
    table::{Entry, Routes, Table, Way, Ways},
    trace::to_chrome,
    wire::{HEADER_LINES, LINE_BYTES, MAX_PAYLOAD, PRIORITIES},
};

/// Beyond its limit, an epoch is given this long to tell how it ended.
const GRACE: Duration = Duration::from_millis(200);

/// How long a device may take to set up its memory, or to take note of an actor.
const PATIENCE: Duration = Duration::from_secs(10);

/// Executors that are kernels: their numbers have 16 bits, of which the last few mean something else.
const MOST_KERNELS: usize = 0xfff0;

/// How a system is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemConfig {
    /// Resident workgroups of each device that serve actors.
    pub executors_per_device: u32,
    /// Lines of 16 bytes of each lane.
    pub lane_lines: usize,
    /// Dead letters that are remembered; all are counted.
    pub dead_letters: usize,
    /// Runs of handlers that each executor remembers for [`System::trace`]; with 0 none are.
    pub trace_spans: usize,
    /// One of so many messages has its time taken.
    pub sample_every: u32,
    /// Bytes for the states of all actors of a device, where its actors are kernels.
    pub state_bytes: u64,
    /// Bytes for messages that wait at one executor, where that is a kernel.
    pub waiting_bytes: u64,
}

impl Default for SystemConfig {
    fn default() -> Self {
        Self {
            executors_per_device: 1,
            lane_lines: 4096,
            dead_letters: 1024,
            trace_spans: 0,
            sample_every: 64,
            state_bytes: 8 << 20,
            waiting_bytes: 2 << 20,
        }
    }
}

/// Where an actor shall be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Placement {
    /// Where the fewest are.
    #[default]
    Any,
    /// On this device.
    Device(DeviceId),
}

/// Actors on devices, and everything that serves them. Dropping it ends them all.
#[derive(Debug)]
pub struct System {
    inner: Arc<Inner>,
    runners: Vec<Runner>,
    service: Option<JoinHandle<()>>,
    /// Threads that look after devices.
    threads: Vec<JoinHandle<()>>,
}

/// What references to actors keep.
struct Inner {
    shared: Arc<Shared>,
    port: Arc<HostPort>,
    devices: Vec<Arc<dyn Device>>,
    links: Vec<Arc<Link>>,
    last_actor: AtomicU32,
    /// Bytes of a payload that lanes hold.
    longest: usize,
    plans: Mutex<Plans>,
}

/// What is declared of actors.
#[derive(Debug, Default)]
struct Plans {
    channels: Channels,
    /// Layouts of messages by kind, and the actor that named it first.
    kinds: BTreeMap<u32, Layout>,
}

impl System {
    /// Starts executors on the devices.
    ///
    /// # Errors
    ///
    /// [`ActorError::Unsupported`] for a device that runs no actors, [`ActorError::Resident`] where it has no room for
    /// the executors, and others naming what could not be had. Nothing is left running then.
    pub fn start(devices: Vec<Arc<dyn Device>>, config: &SystemConfig) -> Result<Self, ActorError> {
        check(&devices, config)?;
        let per_device = config.executors_per_device as usize;
        let count = devices.len() * per_device;
        let (service, requests) = mpsc::channel();
        let kernels: Vec<usize> = (0..devices.len()).filter(|&at| is_kernel(&*devices[at])).collect();
        let side = |executor: usize| {
            let (device, at) = (executor / per_device, executor % per_device);
            let ordinal = kernels.iter().position(|&kernel| kernel == device);
            let number = ordinal.and_then(|ordinal| u32::try_from(ordinal * per_device + at).ok());
            ExecutorSide::new(device, number, devices.len(), config.trace_spans)
        };
        let shared = Arc::new(Shared {
            routes: Routes::default(),
            ways: Ways::of_devices(&devices),
            executors: (0..count).map(side).collect(),
            replies: Arc::new(Replies::default()),
            dead: DeadLetters::new(config.dead_letters),
            service,
            origin: Instant::now(),
            sample_every: config.sample_every.saturating_sub(1),
            may_spin: thread::available_parallelism()
                .is_ok_and(|cores| count - kernels.len() * per_device <= cores.get()),
        });
        let links = connect(&shared, &devices, &kernels, config)?;
        let (executors, host) = wire(&shared, config.lane_lines)?;
        let port = Arc::new(HostPort::new(host, Arc::clone(&shared)));
        links.iter().for_each(|link| link.introduce(&links, &port));
        shared.replies.set_links(&links);
        let mut executors = executors.into_iter();
        let mut links_left = links.iter();
        let runners = (0..devices.len()).map(|device| {
            let own: Vec<Executor> = executors.by_ref().take(per_device).flatten().collect();
            match kernels.contains(&device).then(|| links_left.next()).flatten() {
                Some(link) => Ok(Runner::Link(Arc::clone(link))),
                None => launch(&devices[device], own).map(Runner::Host),
            }
        });
        let runners = runners.collect::<Result<Vec<_>, _>>()?;
        let threads = links.iter().map(Link::begin).collect::<Result<Vec<_>, _>>()?;
        let thread = Service::new(Arc::clone(&shared), Arc::clone(&port), devices.clone(), runners.clone());
        let service =
            thread::Builder::new().name("k2k service".to_owned()).spawn(move || thread.run(&requests));
        let service = service.map_err(|error| ActorError::Service { reason: error.to_string() })?;
        let longest = match links.is_empty() {
            true => (config.lane_lines.next_power_of_two() - HEADER_LINES) * LINE_BYTES,
            false => device::Layout::longest(config.lane_lines),
        };
        let (last_actor, plans) = (AtomicU32::new(0), Mutex::default());
        let longest = longest.min(MAX_PAYLOAD);
        let inner = Inner { shared, port, devices, links, last_actor, longest, plans };
        Ok(Self { inner: Arc::new(inner), runners, service: Some(service), threads })
    }

    /// Begins an actor.
    ///
    /// # Errors
    ///
    /// [`ActorError::Layout`] where the code was written for another state, or another actor means something else by a
    /// kind of message; [`ActorError::NoDevice`], [`ActorError::Invalid`].
    pub fn spawn(&self, spec: &ActorSpec, placement: Placement) -> Result<ActorRef, ActorError> {
        if spec.state != spec.code.state {
            let what = format!("the state of {:?}", spec.name);
            return Err(ActorError::Layout { what, one: spec.state, other: spec.code.state });
        }
        let invalid = |reason: &str| Err(ActorError::Invalid { reason: reason.to_owned() });
        if spec.inbox_capacity == 0 {
            return invalid("an inbox takes at least one message");
        }
        match &spec.code.body {
            Body::Host(_) if spec.threads != 1 => invalid("a Rust function has one thread"),
            Body::Device(_) if ![1, THREADS].contains(&spec.threads) => {
                invalid("a function in CUDA C has one thread or 32")
            }
            Body::Host(handler) => self.spawn_on_host(spec, placement, handler),
            Body::Device(code) => self.spawn_on_device(spec, placement, code),
        }
    }

    fn spawn_on_host(
        &self,
        spec: &ActorSpec,
        placement: Placement,
        handler: &Arc<Handler>,
    ) -> Result<ActorRef, ActorError> {
        let inner = &self.inner;
        let executor = inner.place(placement, Some(false))?;
        let inbox = inner.inbox(spec)?;
        let core = Core::new(Arc::clone(&inbox), Arc::clone(handler), spec.state.size);
        let local = Box::new(Local::new(Seat::serving(), core));
        inner.shared.executors[executor].tell(Command::Insert(local));
        inner.enter(Entry { executor, generation: 0, slot: 0, inbox: Arc::clone(&inbox) });
        Ok(ActorRef { inner: Arc::clone(inner), inbox })
    }

    fn spawn_on_device(
        &self,
        spec: &ActorSpec,
        placement: Placement,
        code: &DeviceCode,
    ) -> Result<ActorRef, ActorError> {
        let inner = &self.inner;
        let executor = inner.place(placement, Some(true))?;
        let device = inner.devices[inner.shared.executors[executor].device].info().id;
        let unsupported = |reason| Err(ActorError::Unsupported { device, reason });
        if matches!(spec.full, FullPolicy::DropOldest | FullPolicy::Spill) {
            return unsupported("its inboxes neither drop their oldest nor spill yet");
        }
        if spec.code.messages.len() > device::KINDS {
            return unsupported("its actors name no more than eight kinds of messages");
        }
        let link = inner.shared.executors[executor].link().ok_or(ActorError::NoDevice { device })?;
        let number = link.ensure(&spec.name, code)?;
        let inbox = inner.inbox(spec)?;
        let slot = link.insert(executor, &inbox, spec, number, Deadline::within(PATIENCE))?;
        inner.enter(Entry { executor, generation: 0, slot, inbox: Arc::clone(&inbox) });
        Ok(ActorRef { inner: Arc::clone(inner), inbox })
    }

    /// Declares that `from` sends to `to` and waits for room there.
    ///
    /// # Errors
    ///
    /// [`ActorError::Cycle`], naming the circle, where all of them would wait for each other.
    pub fn connect(&self, from: &ActorRef, to: &ActorRef) -> Result<(), ActorError> {
        if !matches!(to.inbox.full, FullPolicy::Wait { .. }) {
            return Ok(());
        }
        let declared = self.inner.plans().channels.declare(from.id(), to.id());
        declared.map_err(|circle| ActorError::Cycle { circle })
    }

    /// Sends the same to each of these, and says of each what became of it.
    pub fn broadcast(
        &self,
        to: &[ActorRef],
        kind: u32,
        payload: &[u8],
        deadline: Deadline,
    ) -> Vec<Result<(), SendError>> {
        to.iter().map(|actor| actor.send(kind, payload, deadline)).collect()
    }

    /// Stops an actor at a message boundary until the result is dropped or resumed. Messages wait meanwhile.
    ///
    /// # Errors
    ///
    /// [`ActorError::Unparkable`] by the deadline, naming the handler that ran, and [`ActorError::Timeout`] where an
    /// earlier wish is still being undone; the actor goes on then.
    pub fn park(&self, actor: &ActorRef, deadline: Deadline) -> Result<Parked, ActorError> {
        match self.inner.epoch(actor.id(), Goal::Park, None, deadline)? {
            Milestone::Parked => Ok(Parked { inner: Arc::clone(&self.inner), actor: actor.id() }),
            Milestone::Ended(outcome) => Err(unparked(&self.inner.shared, actor.id(), outcome)),
        }
    }

    /// Ends an actor at a message boundary. What waits for it, and what is sent to it from now on, is dead.
    ///
    /// # Errors
    ///
    /// [`ActorError::Unparkable`] by the deadline; the actor goes on then. [`ActorError::Busy`] while it is parked.
    pub fn stop(&self, actor: &ActorRef, deadline: Deadline) -> Result<(), ActorError> {
        self.inner.run_epoch(actor.id(), Goal::Stop, None, deadline)?;
        self.inner.plans().channels.forget(actor.id());
        Ok(())
    }

    /// Has an actor go on elsewhere, while messages flow: each is served once and in its order.
    ///
    /// # Errors
    ///
    /// [`ActorError::Returned`] where it serves where it was, [`ActorError::Timeout`] where it is on its way for good
    /// and was not there by the deadline, and others naming what is wrong.
    pub fn relocate(
        &self,
        actor: &ActorRef,
        placement: Placement,
        deadline: Deadline,
    ) -> Result<(), ActorError> {
        let target = self.inner.place(placement, None)?;
        let table = self.inner.shared.routes.load();
        let entry =
            table.find(actor.id()).map_err(|reason| ActorError::Gone { actor: actor.id(), reason })?;
        if entry.executor == target {
            return Ok(());
        }
        let shared = &self.inner.shared;
        for executor in [entry.executor, target] {
            let side = &shared.executors[executor];
            if side.number.is_some() {
                let device = self.inner.devices[side.device].info().id;
                let reason = "actors neither leave it nor come to it yet";
                return Err(ActorError::Unsupported { device, reason });
            }
        }
        let [from, to] = [entry.executor, target].map(|executor| shared.executors[executor].device);
        if shared.ways.way(from, to) == Way::Unreachable {
            let [from, to] = [from, to].map(|device| self.inner.devices[device].info().id);
            return Err(ActorError::Unreachable { actor: actor.id(), from, to });
        }
        self.inner.run_epoch(actor.id(), Goal::Move, Some(target), deadline)
    }

    /// Ends an actor without waiting for a message boundary. If its handler runs, what it does is lost.
    ///
    /// # Errors
    ///
    /// [`ActorError::Gone`] if it is not there any more.
    pub fn kill(&self, actor: &ActorRef) -> Result<(), ActorError> {
        let (shared, id) = (&self.inner.shared, actor.id());
        // Where it is, it is by the table that this change was made to: it may be moving.
        let before = shared.routes.change(|table| table.kill(id));
        let entry = before.find(id).map_err(|reason| ActorError::Gone { actor: id, reason })?;
        shared.executors[entry.executor].tell(Command::Kill(id, Reason::ActorKilled));
        shared.replies.give_up(Reason::ActorKilled, |asked| asked == id);
        self.inner.plans().channels.forget(id);
        Ok(())
    }

    /// The way of messages from one device to another.
    ///
    /// # Errors
    ///
    /// [`ActorError::NoDevice`] for a device that is not the system's.
    pub fn way(&self, from: DeviceId, to: DeviceId) -> Result<Way, ActorError> {
        Ok(self.inner.shared.ways.way(self.inner.position(from)?, self.inner.position(to)?))
    }

    /// Messages that nobody served, oldest first; they are forgotten here.
    pub fn dead_letters(&self) -> Vec<DeadLetter> {
        self.inner.shared.dead.take()
    }

    /// Messages that wait at executors, as far as those answer by the deadline; and the devices that did not.
    pub fn pending(&self, deadline: Deadline) -> (Vec<PendingMessage>, Vec<DeviceId>) {
        let shared = &self.inner.shared;
        let asked: Vec<_> = shared
            .executors
            .iter()
            .map(|executor| {
                let (command, answer) = inspection();
                executor.tell(command);
                (executor.device, answer)
            })
            .collect();
        let (mut all, mut silent) = (Vec::new(), Vec::new());
        for (device, answer) in asked {
            match answer.recv_timeout(deadline.remaining()) {
                Ok(pending) => all.extend(pending),
                Err(_) => silent.push(self.inner.devices[device].info().id),
            }
        }
        (all, silent)
    }

    /// What there is and what has happened. Nothing is stopped for it.
    pub fn snapshot(&self) -> Snapshot {
        self.inner.snapshot()
    }

    /// What handlers did when, as JSON for Chrome's tracing page or Perfetto; see [`SystemConfig::trace_spans`].
    pub fn trace(&self) -> Value {
        let executors = &self.inner.shared.executors;
        let spans = executors
            .iter()
            .map(|executor| (self.inner.devices[executor.device].info().id, executor.spans.all()));
        to_chrome(&spans.collect::<Vec<_>>())
    }

    /// Ends everything and returns once no handler runs.
    ///
    /// # Errors
    ///
    /// [`ActorError::Resident`] naming a device whose executor did not return by the deadline.
    pub fn shut_down(mut self, deadline: Deadline) -> Result<(), ActorError> {
        self.end_service();
        // All of them, whatever becomes of one.
        let stopped: Vec<_> = self.runners.iter().map(|runner| runner.stop(deadline)).collect();
        stopped.into_iter().collect()
    }

    fn end_service(&mut self) {
        let _gone = self.inner.shared.service.send(Request::Shutdown);
        if let Some(service) = self.service.take()
            && service.join().is_err()
        {
            tracing::error!("the service thread of actors had panicked");
        }
        self.inner.links.iter().for_each(|link| link.end());
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("the thread of a device with actors had panicked");
            }
        }
        let shared = &self.inner.shared;
        shared.routes.change(Table::clear);
        shared.replies.give_up(Reason::ActorStopped, |_| true);
    }
}

impl Drop for System {
    /// Tells the executors to end, and does not wait for handlers.
    fn drop(&mut self) {
        self.end_service();
        // References to actors keep the links, and those their kernels.
        self.inner.links.iter().for_each(|link| link.abandon());
    }
}

/// Refuses what cannot work before anything is started.
fn check(devices: &[Arc<dyn Device>], config: &SystemConfig) -> Result<(), ActorError> {
    if devices.is_empty() || config.executors_per_device == 0 {
        let reason = "a system has at least one device and one executor on each".to_owned();
        return Err(ActorError::Invalid { reason });
    }
    for (position, device) in devices.iter().enumerate() {
        let info = device.info();
        let unsupported = |reason| Err(ActorError::Unsupported { device: info.id, reason });
        if devices[..position].iter().any(|other| other.info().id == info.id) {
            return Err(ActorError::Invalid { reason: format!("{} is there twice", info.id) });
        }
        if !device.features().contains(Features::RESIDENT_KERNELS) {
            return unsupported("it has no resident kernels");
        }
        if !info.code_formats.contains(&CodeFormat::HostFunction) && !is_kernel(&**device) {
            return unsupported(
                "its executor is not written yet; actors run on host devices and CUDA devices",
            );
        }
        if is_kernel(&**device) && !device.features().contains(Features::HOST_VISIBLE_MEMORY) {
            return unsupported("it shares no memory with the host");
        }
    }
    let kernels = devices.iter().filter(|device| is_kernel(&***device)).count();
    if kernels > DEVICES {
        let reason = format!("{kernels} CUDA devices are more than the {DEVICES} of a system");
        return Err(ActorError::Invalid { reason });
    }
    if kernels.saturating_mul(config.executors_per_device as usize) > MOST_KERNELS {
        let reason = format!("executors of CUDA devices are {MOST_KERNELS} at most");
        return Err(ActorError::Invalid { reason });
    }
    if kernels > 0 && config.lane_lines <= HEADER_LINES {
        let reason = format!("a lane of {} lines holds no message of the host", config.lane_lines);
        return Err(ActorError::Invalid { reason });
    }
    Ok(())
}

/// Whether a device's executors are kernels in CUDA C.
fn is_kernel(device: &dyn Device) -> bool {
    let formats = &device.info().code_formats;
    !formats.contains(&CodeFormat::HostFunction) && formats.contains(&CodeFormat::CudaC)
}

/// Makes the links to devices whose executors are kernels.
fn connect(
    shared: &Arc<Shared>,
    devices: &[Arc<dyn Device>],
    kernels: &[usize],
    config: &SystemConfig,
) -> Result<Vec<Arc<Link>>, ActorError> {
    let executors = config.executors_per_device;
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let link = |(ordinal, &position): (usize, &usize)| {
        let first = position * executors as usize;
        let shape = Shape {
            executors,
            all: executors.saturating_mul(count(kernels.len())),
            first: executors.saturating_mul(count(ordinal)),
            lane_lines: config.lane_lines,
            state_bytes: config.state_bytes.max(256),
            waiting_bytes: config.waiting_bytes,
            sample_every: shared.sample_every,
        };
        let place = [position, ordinal, first];
        let link = Link::new(shared, &devices[position], place, &shape, Deadline::within(PATIENCE))?;
        shared.executors[first..first + executors as usize].iter().for_each(|side| side.set_link(&link));
        Ok(link)
    };
    kernels.iter().enumerate().map(link).collect()
}

/// Makes all lanes, and an executor at the end of each that is not a kernel's.
fn wire(shared: &Arc<Shared>, lines: usize) -> Result<(Vec<Option<Executor>>, Vec<HostLanes>), ActorError> {
    let count = shared.executors.len();
    let mut outputs: Vec<Vec<Option<Lanes>>> = (0..count).map(|_| Vec::new()).collect();
    // A kernel makes its own.
    let senders: Vec<usize> = (0..count).filter(|&at| shared.executors[at].number.is_none()).collect();
    let (mut inputs, mut host) = (Vec::new(), Vec::new());
    for to in &shared.executors {
        if let Some(link) = to.link() {
            host.push(HostLanes::Link(Arc::clone(&link)));
            for &from in &senders {
                let way = shared.ways.way(shared.executors[from].device, to.device);
                outputs[from].push((way == Way::HostMediated).then(|| Lanes::Link(Arc::clone(&link))));
            }
            inputs.push(None);
            continue;
        }
        let (producers, consumers) = all_priorities(|| shared_lane(lines))?;
        let mut consumers = vec![consumers];
        host.push(HostLanes::Ring(producers));
        for &at in &senders {
            let from = &shared.executors[at];
            let way = shared.ways.way(from.device, to.device);
            let is_straight = matches!(way, Way::SameDevice | Way::Peer | Way::HostMediated);
            outputs[at].push(if is_straight && !std::ptr::eq(from, to) {
                let (producers, more) = all_priorities(|| lane(lines))?;
                consumers.push(more);
                Some(Lanes::Ring(producers))
            } else {
                None
            });
        }
        inputs.push(Some(consumers));
    }
    let lines = lines.next_power_of_two();
    let executors = outputs.into_iter().zip(inputs).enumerate();
    let executors = executors.map(|(index, (outputs, inputs))| {
        inputs.map(|inputs| Executor::new(Post::new(index, outputs, Arc::clone(shared)), inputs, lines))
    });
    Ok((executors.collect(), host))
}

/// One lane for each priority, taken apart.
fn all_priorities<P>(
    make: impl Fn() -> Result<(P, Consumer), crate::RingError>,
) -> Result<([P; PRIORITIES], [Consumer; PRIORITIES]), crate::RingError> {
    let ((p0, c0), (p1, c1), (p2, c2)) = (make()?, make()?, make()?);
    Ok(([p0, p1, p2], [c0, c1, c2]))
}

/// Starts the executors of a device as one resident kernel.
fn launch(device: &Arc<dyn Device>, executors: Vec<Executor>) -> Result<Arc<dyn Resident>, ActorError> {
    const NAME: &str = "actors";
    let count = u32::try_from(executors.len()).unwrap_or(u32::MAX);
    let executors: Vec<Mutex<Executor>> = executors.into_iter().map(Mutex::new).collect();
    let slice = HostFunction::resident(move |workgroup| {
        let Some(executor) = executors.get(workgroup.index()[0] as usize) else { return Progress::Finished };
        // A workgroup runs one slice at a time, so nobody waits here.
        executor.lock().unwrap_or_else(PoisonError::into_inner).run_slice(workgroup)
    });
    let code = KernelCode::new().with_function(KernelContract::new(NAME, []).resident(), slice);
    let kernel = device.load(&code)?.kernel(NAME)?;
    let residents = device.residents();
    let residents = residents
        .ok_or(ActorError::Unsupported { device: device.info().id, reason: "it has no resident kernels" })?;
    Ok(residents.launch(&ResidentDesc::new(Launch::new(&kernel, [count, 1, 1], &[])?))?)
}

fn unparked(shared: &Shared, actor: ActorId, outcome: Outcome) -> ActorError {
    let gone = ActorError::Gone { actor, reason: Reason::ActorStopped };
    Service::result(shared, actor, outcome).err().unwrap_or(gone)
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Actors").field("devices", &self.devices).finish_non_exhaustive()
    }
}

impl Inner {
    fn plans(&self) -> MutexGuard<'_, Plans> {
        // Nothing panics under the lock.
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn position(&self, device: DeviceId) -> Result<usize, ActorError> {
        let position = self.devices.iter().position(|known| known.info().id == device);
        position.ok_or(ActorError::NoDevice { device })
    }

    /// The executor in service with the fewest actors; one that is a kernel, or that is not, if that is asked for.
    fn place(&self, placement: Placement, kernel: Option<bool>) -> Result<usize, ActorError> {
        let device = match placement {
            Placement::Any => None,
            Placement::Device(device) => Some(self.position(device)?),
        };
        let table = self.shared.routes.load();
        let executors = self.shared.executors.iter().enumerate();
        let is_fit =
            |executor: &ExecutorSide| kernel.is_none_or(|kernel| kernel == executor.number.is_some());
        let is_meant = |executor: &ExecutorSide| device.is_none_or(|device| executor.device == device);
        if !self.shared.executors.iter().any(|executor| is_meant(executor) && is_fit(executor)) {
            let reason = match kernel {
                Some(true) => "it runs Rust functions, and this code is CUDA C",
                _ => "it runs CUDA C, and this code is a Rust function",
            };
            let device = self.devices[device.unwrap_or(0)].info().id;
            return Err(ActorError::Unsupported { device, reason });
        }
        let fit =
            executors.filter(|(_, executor)| !executor.is_lost() && is_fit(executor) && is_meant(executor));
        let load = |at: usize| table.entries().filter(|entry| entry.executor == at).count();
        let best = fit.map(|(at, executor)| (executor.looping().is_some(), load(at), at)).min();
        let lost = device.map_or_else(|| self.devices[0].info().id, |device| self.devices[device].info().id);
        best.map(|(_, _, at)| at).ok_or(ActorError::NoDevice { device: lost })
    }

    /// An inbox for an actor that begins.
    fn inbox(&self, spec: &ActorSpec) -> Result<Arc<Inbox>, ActorError> {
        self.plans().declare_kinds(&spec.code.messages)?;
        // Relaxed: a number, and nothing else.
        let id = ActorId(self.last_actor.fetch_add(1, Ordering::Relaxed) + 1);
        Ok(Arc::new(Inbox::new(id, spec, self.longest)))
    }

    /// Makes an actor known, to all devices before anybody is told of it.
    fn enter(&self, entry: Entry) {
        self.shared.routes.change(|table| table.insert(entry.clone()));
        for link in self.links.iter().filter(|link| link.is_running()) {
            // A device that does not answer is lost, or will be found out by whoever sends from there.
            if let Err(error) = link.barrier(Deadline::within(PATIENCE)) {
                tracing::warn!(%error, "a device has not taken note of an actor");
            }
        }
    }

    fn run_epoch(
        &self,
        actor: ActorId,
        goal: Goal,
        target: Option<usize>,
        deadline: Deadline,
    ) -> Result<(), ActorError> {
        match self.epoch(actor, goal, target, deadline)? {
            Milestone::Ended(outcome) => Service::result(&self.shared, actor, outcome),
            Milestone::Parked => Err(ActorError::Busy { actor }),
        }
    }

    fn epoch(
        &self,
        actor: ActorId,
        goal: Goal,
        target: Option<usize>,
        deadline: Deadline,
    ) -> Result<Milestone, ActorError> {
        let (done, ended) = mpsc::channel();
        let limit = deadline.remaining();
        let begin = Begin { actor, goal, target, limit, done };
        let gone = || ActorError::Service { reason: "it has ended".to_owned() };
        self.shared.service.send(Request::Begin(Box::new(begin))).map_err(|_| gone())?;
        match ended.recv_timeout(limit.saturating_add(GRACE)) {
            Ok(result) => result,
            // It may have come just now.
            Err(mpsc::RecvTimeoutError::Timeout) => {
                ended.try_recv().unwrap_or(Err(ActorError::Timeout { actor }))
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(gone()),
        }
    }

    fn snapshot(&self) -> Snapshot {
        let shared = &self.shared;
        let table = shared.routes.load();
        let id = |device: usize| self.devices[device].info().id;
        let mut actors: Vec<_> = table
            .entries()
            .map(|entry| {
                let executor = &shared.executors[entry.executor];
                ActorStats {
                    id: entry.inbox.actor,
                    name: entry.inbox.name.clone(),
                    device: id(executor.device),
                    generation: entry.generation,
                    served: entry.inbox.served(),
                    inbox_capacity: entry.inbox.capacity,
                    full: entry.inbox.full,
                    is_looping: executor.looping() == Some(entry.inbox.actor),
                }
            })
            .collect();
        actors.sort_by_key(|actor| actor.id);
        let devices = (0..self.devices.len()).map(|device| {
            let own = || shared.executors.iter().filter(move |executor| executor.device == device);
            DeviceStats {
                device: id(device),
                is_lost: own().any(ExecutorSide::is_lost),
                unparkable: own().find_map(ExecutorSide::looping),
                served: own().map(ExecutorSide::served).sum(),
            }
        });
        let sum = |count: fn(&ExecutorSide) -> u64| shared.executors.iter().map(count).sum();
        Snapshot {
            devices: devices.collect(),
            actors,
            routes: self.routes(),
            served: sum(ExecutorSide::served),
            duplicates: sum(|executor| executor.counters.duplicates.get()),
            early: sum(|executor| executor.counters.early.get()),
            handed_on: sum(ExecutorSide::handed_on),
            dead_letters: shared.dead.counts(),
        }
    }

    /// How far the clock of a device may be from the host's.
    fn clock_error(&self, device: Option<usize>) -> u64 {
        let executors = &self.shared.executors;
        let side = device.and_then(|device| executors.iter().find(|side| side.device == device));
        side.and_then(ExecutorSide::link).and_then(|link| link.clock_error_ns()).unwrap_or(0)
    }

    /// Routes between devices that were used, and those of the host.
    fn routes(&self) -> Vec<RouteStats> {
        let (shared, count) = (&self.shared, self.devices.len());
        let mut routes = Vec::new();
        for (from, to) in (0..=count).flat_map(|from| (0..count).map(move |to| (from, to))) {
            let from = Some(from).filter(|&from| from < count);
            let mut latency = latencies();
            for executor in shared.executors.iter().filter(|executor| executor.device == to) {
                executor.counters.add_latencies(from, &mut latency);
            }
            let of_from = shared.executors.iter().filter(|executor| Some(executor.device) == from);
            let sent = of_from.map(|executor| {
                let (messages, bytes) = &executor.counters.sent[to];
                (messages.get(), bytes.get())
            });
            let (messages, bytes) = sent.fold((0, 0), |sum, sent| (sum.0 + sent.0, sum.1 + sent.1));
            if messages == 0 && latency.is_empty() {
                continue;
            }
            let way = from.map_or(Way::HostMediated, |from| shared.ways.way(from, to));
            let clock_error_ns = self.clock_error(from) + self.clock_error(Some(to));
            let device = |position: usize| self.devices[position].info().id;
            routes.push(RouteStats {
                from: from.map(device),
                to: device(to),
                way,
                messages,
                bytes,
                latency: LatencyStats { clock_error_ns, ..LatencyStats::of(&latency) },
            });
        }
        routes
    }
}

impl Plans {
    fn declare_kinds(&mut self, kinds: &[(u32, Layout)]) -> Result<(), ActorError> {
        for &(kind, layout) in kinds {
            match self.kinds.get(&kind) {
                Some(&known) if known != layout => {
                    let what = format!("a message of kind {kind}");
                    return Err(ActorError::Layout { what, one: known, other: layout });
                }
                _ => {}
            }
        }
        self.kinds.extend(kinds.iter().copied());
        Ok(())
    }
}

/// An actor, as the host sees it. Dropping it ends nothing.
#[derive(Debug, Clone)]
pub struct ActorRef {
    inner: Arc<Inner>,
    inbox: Arc<Inbox>,
}

impl ActorRef {
    /// Who it is.
    pub fn id(&self) -> ActorId {
        self.inbox.actor
    }

    /// Messages it has served.
    pub fn served(&self) -> u64 {
        self.inbox.served()
    }

    /// Sends a message; waits for room as the actor's policy says, by the deadline at most.
    ///
    /// # Errors
    ///
    /// A [`SendError`]; the message was not sent then.
    pub fn send(&self, kind: u32, payload: &[u8], deadline: impl Into<Deadline>) -> Result<(), SendError> {
        self.send_with(kind, payload, SendOptions::default(), deadline)
    }

    /// The same with options.
    ///
    /// # Errors
    ///
    /// As [`ActorRef::send`].
    pub fn send_with(
        &self,
        kind: u32,
        payload: &[u8],
        options: SendOptions,
        deadline: impl Into<Deadline>,
    ) -> Result<(), SendError> {
        let message = Outward { to: self.id(), kind, payload, options, correlation: 0 };
        self.inner.port.send(&self.inbox, &message, Patience::Until(deadline.into()))
    }

    /// Sends a message if there is room now.
    ///
    /// # Errors
    ///
    /// [`SendError::Full`] if there is none, and others.
    pub fn try_send(&self, kind: u32, payload: &[u8]) -> Result<(), SendError> {
        let message =
            Outward { to: self.id(), kind, payload, options: SendOptions::default(), correlation: 0 };
        self.inner.port.send(&self.inbox, &message, Patience::None)
    }

    /// Sends a question, whose answer is awaited at the result; waits for room as [`ActorRef::send`] does.
    ///
    /// # Errors
    ///
    /// As [`ActorRef::send`].
    pub fn ask(&self, kind: u32, payload: &[u8], deadline: impl Into<Deadline>) -> Result<Reply, AskError> {
        let reply = self.inner.shared.replies.expect(self.id());
        let correlation = reply.correlation();
        let message = Outward { to: self.id(), kind, payload, options: SendOptions::default(), correlation };
        self.inner.port.send(&self.inbox, &message, Patience::Until(deadline.into()))?;
        Ok(reply)
    }

    /// Asks and waits for the answer.
    ///
    /// # Errors
    ///
    /// See [`AskError`].
    pub fn call(
        &self,
        kind: u32,
        payload: &[u8],
        deadline: impl Into<Deadline>,
    ) -> Result<Message, AskError> {
        let deadline = deadline.into();
        self.ask(kind, payload, deadline)?.wait(deadline)
    }
}

/// An actor that stands still. It goes on when this is dropped.
#[derive(Debug)]
pub struct Parked {
    inner: Arc<Inner>,
    actor: ActorId,
}

impl Parked {
    /// Has the actor go on.
    pub fn resume(self) {}
}

impl Drop for Parked {
    fn drop(&mut self) {
        let request = Request::Event { actor: self.actor, event: Event::Release, core: None };
        // Without the service no actor goes on.
        let _gone = self.inner.shared.service.send(request);
    }
}
