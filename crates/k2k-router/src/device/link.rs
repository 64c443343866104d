//! The host's side of the executors of one device: their code, their orders, and what they tell.

use std::{
    collections::VecDeque,
    fmt,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use rustc_hash::FxHashMap;
use warpweft_core_types::{
    Arg, BufferView, Deadline, Device, Kernel, Launch, LoadError, Resident, ResidentDesc, ResidentError,
    ResidentState,
};

use super::{
    code::{Codes, DeviceCode, NAME},
    lane::{BRIDGE, Frame, Inward, Outward},
    layout::{ACTORS, COUNTERS, DEVICES, Layout, SLOTS, Shape},
    memory::{Memory, Window},
    reading::Relay,
    room::{Rooms, insert_bytes},
};
use crate::{
    ActorError, ActorSpec, Header, Message, RingError,
    actor::ActorId,
    dead_letter::Reason,
    epoch::{Answer, Event, Order, Party},
    host_port::HostPort,
    inbox::Inbox,
    service::Request,
    shared::{Command, Shared},
    stats::{PendingMessage, PendingPlace},
    table::{Entry, Way},
};

/// How long the thread looks for more before it rests, and for how long: as executors of the host do.
const SPIN: Duration = Duration::from_micros(100);
const REST: Duration = Duration::from_micros(50);

/// How long it rests while no kernel runs.
const LONG_REST: Duration = Duration::from_millis(50);

/// Frames that are read from one lane before others have their turn.
const BATCH: usize = 64;

/// How often the device's clock is compared with the host's.
const CLOCK_EVERY: Duration = Duration::from_secs(1);

/// Launches that the executors of a device are shared out among. A handler that loops keeps those of its own from their
/// next slice and no others; each takes a multiprocessor and a thread of the host.
const GROUPS: u32 = 8;

/// How long a kernel is waited for that makes room for its successor.
const HANDOVER: Duration = Duration::from_secs(10);

/// Orders, as the kernel's header names them.
const INSERT: u32 = 1;
const STOP: u32 = 2;
const RESUME: u32 = 3;
const END: u32 = 4;
const SWITCH: u32 = 5;
const INSPECT: u32 = 6;
const TABLE: u32 = 7;
const CLOCK: u32 = 8;
const SET_CLOCK: u32 = 9;

/// What frames are.
const MESSAGE: u32 = 1;
const DEAD: u32 = 2;
const DONE: u32 = 3;
const SAMPLE: u32 = 4;
const PENDING: u32 = 5;
const DAMAGED: u32 = 6;

/// Where messages go next that no lane of the device's leads to.
const BY_HOST: u32 = 0xffff;
const NOWHERE: u32 = 0xfffe;

/// The executors of one device, as the host sees them.
pub(crate) struct Link {
    shared: Arc<Shared>,
    device: Arc<dyn Device>,
    /// The position of the device in the system, and among those with such executors.
    position: usize,
    ordinal: usize,
    /// Its first executor in the system.
    first: usize,
    layout: Layout,
    memory: Arc<Memory>,
    /// The memory of other devices, as far as this one reaches it.
    peers: OnceLock<Vec<Option<BufferView>>>,
    port: OnceLock<Weak<HostPort>>,
    outward: Mutex<Outward>,
    state: Mutex<State>,
    machine: Mutex<Machine>,
    is_running: AtomicBool,
    is_over: AtomicBool,
    thread: OnceLock<Thread>,
}

/// The kernel, and what it was made of.
#[derive(Debug, Default)]
struct Machine {
    codes: Codes,
    kernel: Option<Arc<dyn Kernel>>,
    bridge: Option<Arc<dyn Resident>>,
    executors: Vec<Arc<dyn Resident>>,
}

/// What the thread and those who help it share.
#[derive(Debug)]
struct State {
    inward: Vec<Inward>,
    frame: Frame,
    orders: VecDeque<(u32, Header, Vec<u8>)>,
    /// Orders without an answer, by token.
    open: FxHashMap<u32, Awaited>,
    last_token: u32,
    rooms: Rooms,
    /// The device's table.
    known: FxHashMap<u32, [u32; 4]>,
    version: Option<u64>,
    relay: Relay,
    /// By executor: what an inspection has told so far.
    pending: Vec<Vec<PendingMessage>>,
    clock_at: Option<Instant>,
    clock_error_ns: Option<u64>,
}

/// What an answer of the device is for.
#[derive(Debug)]
enum Awaited {
    Nothing,
    Order {
        actor: ActorId,
        from: Party,
        epoch: u32,
        order: Order,
    },
    /// The actor is gone.
    Ended(ActorId),
    EndedBy {
        actor: ActorId,
        from: Party,
        epoch: u32,
        order: Order,
    },
    Barrier(mpsc::Sender<()>),
    Clock(Instant),
    Inspected(mpsc::Sender<Vec<PendingMessage>>),
}

/// What an executor tells without words.
#[derive(Debug, Clone)]
pub(crate) struct Remote {
    host: Window,
    beat_at: u64,
    counters_at: u64,
}

impl Remote {
    pub(crate) fn beat(&self) -> u64 {
        self.host.load(self.beat_at)
    }

    pub(crate) fn served(&self) -> u64 {
        self.host.load(self.counters_at)
    }

    pub(crate) fn handed_on(&self) -> u64 {
        self.host.load(self.counters_at + 8)
    }
}

/// Counts of one actor, as its device writes them.
#[derive(Debug, Clone)]
pub(crate) struct RemoteCounts {
    host: Window,
    at: u64,
}

impl RemoteCounts {
    pub(crate) fn served(&self) -> u64 {
        self.host.load(self.at)
    }

    /// Messages that the host counts as taken and that left their places.
    pub(crate) fn freed(&self) -> u64 {
        self.host.load(self.at + 8)
    }
}

impl Link {
    /// Allocates what the executors of a device need. No kernel runs before an actor begins.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        device: &Arc<dyn Device>,
        place: [usize; 3],
        shape: &Shape,
        deadline: Deadline,
    ) -> Result<Arc<Self>, ActorError> {
        let [position, ordinal, first] = place;
        let layout = Layout::new(shape);
        let memory = Arc::new(Memory::new(device.as_ref(), &layout, deadline)?);
        let inward = (0..=layout.executors).map(|executor| Inward::new(&layout, &memory, executor));
        let state = State {
            inward: inward.collect(),
            frame: Frame::default(),
            orders: VecDeque::new(),
            open: FxHashMap::default(),
            last_token: 0,
            rooms: Rooms::new(&layout),
            known: FxHashMap::default(),
            version: None,
            relay: Relay::default(),
            pending: vec![Vec::new(); layout.executors as usize],
            clock_at: None,
            clock_error_ns: None,
        };
        for executor in 0..layout.executors {
            let remote = Remote {
                host: memory.host.clone(),
                beat_at: layout.host_beats + u64::from(executor) * 8,
                counters_at: layout.host_counters + u64::from(executor) * COUNTERS * 8,
            };
            shared.executors[first + executor as usize].set_remote(remote);
        }
        Ok(Arc::new(Self {
            shared: Arc::clone(shared),
            device: Arc::clone(device),
            position,
            ordinal,
            first,
            layout,
            outward: Mutex::new(Outward::new(layout, Arc::clone(&memory))),
            memory,
            peers: OnceLock::new(),
            port: OnceLock::new(),
            state: Mutex::new(state),
            machine: Mutex::default(),
            is_running: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            thread: OnceLock::new(),
        }))
    }

    /// Tells it of the others, and by whom it sends on.
    pub(crate) fn introduce(&self, all: &[Arc<Self>], port: &Arc<HostPort>) {
        let reach = |other: &Arc<Self>| {
            let is_near = self.shared.ways.way(self.position, other.position) == Way::Peer;
            (is_near || other.ordinal == self.ordinal).then(|| other.memory.device.clone())
        };
        let _once = self.peers.set(all.iter().map(reach).collect());
        let _once = self.port.set(Arc::downgrade(port));
    }

    /// The thread that looks after it.
    pub(crate) fn begin(self: &Arc<Self>) -> Result<thread::JoinHandle<()>, ActorError> {
        let own = Arc::clone(self);
        let thread = thread::Builder::new().name(format!("k2k {}", self.device.info().id));
        let thread = thread.spawn(move || own.run());
        let thread = thread.map_err(|error| ActorError::Service { reason: error.to_string() })?;
        let _once = self.thread.set(thread.thread().clone());
        Ok(thread)
    }

    fn run(&self) {
        let mut last = Instant::now();
        // Relaxed, here and below: a sign, behind which nothing is read.
        while !self.is_over.load(Ordering::Relaxed) {
            if self.pump(&mut self.state()) {
                last = Instant::now();
            } else if !self.is_running() {
                thread::park_timeout(LONG_REST);
            } else if last.elapsed() < SPIN {
                thread::yield_now();
            } else {
                thread::park_timeout(REST);
            }
        }
    }

    /// Has the thread look again.
    pub(crate) fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// Does the thread's work once, if nobody else is at it: for whoever waits for an answer.
    pub(crate) fn help(&self) {
        if !self.is_running() {
            return;
        }
        match self.state.try_lock() {
            Ok(mut state) => {
                self.pump(&mut state);
            }
            Err(TryLockError::Poisoned(poisoned)) => {
                self.pump(&mut poisoned.into_inner());
            }
            Err(TryLockError::WouldBlock) => {}
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.is_running.load(Ordering::Relaxed)
    }

    /// The kernel has failed, or was ended by somebody else.
    pub(crate) fn has_failed(&self) -> bool {
        let failed = |resident: &Arc<dyn Resident>| resident.state() == ResidentState::Failed;
        // Whoever holds the lock exchanges the kernel.
        self.machine.try_lock().is_ok_and(|machine| machine.all().any(failed))
    }

    /// Nothing more comes from the device.
    pub(crate) fn lose(&self) {
        self.is_running.store(false, Ordering::Relaxed);
        let mut state = self.state();
        state.open.clear();
        state.orders.clear();
    }

    /// Ends the kernels.
    pub(crate) fn stop(&self, deadline: Deadline) -> Result<(), ActorError> {
        self.is_running.store(false, Ordering::Relaxed);
        let machine = std::mem::take(&mut *self.machine());
        // All of them, whatever becomes of one.
        let stopped: Vec<_> = machine.all().map(|resident| resident.stop(deadline)).collect();
        stopped.into_iter().try_for_each(|stopped| Ok(stopped?))
    }

    /// Asks the kernels to end, and does not wait.
    pub(crate) fn abandon(&self) {
        self.is_running.store(false, Ordering::Relaxed);
        // Dropping them asks them to stop.
        *self.machine() = Machine::default();
    }

    /// How far the device's clock may be from the host's, if they were compared.
    pub(crate) fn clock_error_ns(&self) -> Option<u64> {
        self.state().clock_error_ns
    }

    /// Sends a message to an actor of an executor of this device, counted in the system.
    pub(crate) fn push(&self, executor: usize, header: &Header, payload: &[u8]) -> Result<(), RingError> {
        let executor = u32::try_from(executor - self.first).unwrap_or(u32::MAX);
        let class = 1 + usize::from(header.priority);
        lock(&self.outward).try_push(class, executor, header, payload)
    }

    /// Begins an actor at an executor, counted in the system; its place in the table is up to the caller. Returns its
    /// slot.
    pub(crate) fn insert(
        &self,
        executor: usize,
        inbox: &Inbox,
        spec: &ActorSpec,
        code: u32,
        deadline: Deadline,
    ) -> Result<u32, ActorError> {
        let actor = inbox.actor;
        if actor.0 >= ACTORS {
            let reason = format!("a system with devices of this kind has {ACTORS} ids of actors");
            return Err(ActorError::Exhausted { reason });
        }
        let local = u32::try_from(executor - self.first).unwrap_or(u32::MAX);
        let mut state = self.state();
        let room = state.rooms.add(actor, local, spec.state.size)?;
        let at = self.layout.host_slots + u64::from(local * SLOTS + room.slot) * 16;
        let counts = RemoteCounts { host: self.memory.host.clone(), at };
        // The executor clears them when it begins the actor, before anybody may send to it.
        self.memory.host.store(at, 0);
        self.memory.host.store(at + 8, 0);
        inbox.set_remote(counts);
        let header = Header { destination: actor.0, kind: INSERT, ..Header::default() };
        // Not only until the bridge has it: other executors' messages come by lanes of their own, and may be there first.
        let (done, begun) = mpsc::channel();
        state.order(local, header, insert_bytes(&room, spec, code), Awaited::Barrier(done));
        self.pump(&mut state);
        drop(state);
        self.await_done(&begun, deadline).inspect_err(|_| self.state().rooms.remove(actor))?;
        Ok(room.slot)
    }

    /// Returns when the bridge has dealt with everything that was ordered before.
    pub(crate) fn barrier(&self, deadline: Deadline) -> Result<(), ActorError> {
        let (done, passed) = mpsc::channel();
        let mut state = self.state();
        self.tables(&mut state);
        let header = Header { kind: CLOCK, ..Header::default() };
        state.order(BRIDGE, header, vec![0; 16], Awaited::Barrier(done));
        self.pump(&mut state);
        drop(state);
        self.await_done(&passed, deadline)
    }

    fn await_done(&self, passed: &mpsc::Receiver<()>, deadline: Deadline) -> Result<(), ActorError> {
        self.wake();
        let began = Instant::now();
        loop {
            match passed.try_recv() {
                Ok(()) => return Ok(()),
                Err(mpsc::TryRecvError::Disconnected) => break,
                Err(mpsc::TryRecvError::Empty) if deadline.is_past() => break,
                Err(mpsc::TryRecvError::Empty) if began.elapsed() < SPIN => self.help(),
                Err(mpsc::TryRecvError::Empty) => thread::park_timeout(REST),
            }
        }
        Err(ActorError::Silent { device: self.device.info().id })
    }

    // ---- The kernel

    /// The number of a handler, whose code is made and started if it is new.
    pub(crate) fn ensure(&self, actor: &str, code: &DeviceCode) -> Result<u32, ActorError> {
        let mut machine = self.machine();
        let id = self.device.info().id;
        let unsupported = |reason| ActorError::Unsupported { device: id, reason };
        let (codes, number, is_new) = machine.codes.add(actor, code).map_err(unsupported)?;
        if is_new {
            let loaded = self.device.load(&codes.kernel()).and_then(|module| module.kernel(NAME));
            let kernel = loaded.map_err(|error| match error {
                LoadError::Rejected { log } => ActorError::Code { actor: actor.to_owned(), log },
                other => other.into(),
            })?;
            self.exchange(&mut machine, &kernel)?;
            machine.codes = codes;
        }
        Ok(number)
    }

    /// Has another kernel go on where the one before stops, at a message boundary.
    fn exchange(&self, machine: &mut Machine, kernel: &Arc<dyn Kernel>) -> Result<(), ActorError> {
        let deadline = Deadline::within(HANDOVER);
        park_all(&machine.executors, deadline)?;
        let before = std::mem::take(&mut machine.executors);
        before.iter().try_for_each(|resident| resident.stop(deadline))?;
        let launched = self.launch_all(machine, kernel, deadline);
        if launched.is_err() {
            // What was there before goes on, if there was something.
            self.is_running.store(false, Ordering::Relaxed);
            let Some(kernel) = machine.kernel.clone() else { return launched };
            self.launch_all(machine, &kernel, deadline)?;
        } else {
            machine.kernel = Some(Arc::clone(kernel));
        }
        self.is_running.store(true, Ordering::Relaxed);
        self.wake();
        launched
    }

    /// Launches the bridge, unless it runs, and the executors by groups.
    fn launch_all(
        &self,
        machine: &mut Machine,
        kernel: &Arc<dyn Kernel>,
        deadline: Deadline,
    ) -> Result<(), ActorError> {
        let waits = machine.kernel.is_some();
        let all = self.layout.executors;
        if machine.bridge.is_none() {
            machine.bridge = Some(self.launch(kernel, all..all + 1, waits, deadline)?);
        }
        let each = all.div_ceil(GROUPS);
        let groups = (0..all).step_by(each as usize).map(|first| first..all.min(first + each));
        // Those that were launched end when they are dropped.
        let launched = groups.map(|group| self.launch(kernel, group, waits, deadline));
        machine.executors = launched.collect::<Result<_, _>>()?;
        Ok(())
    }

    fn launch(
        &self,
        kernel: &Arc<dyn Kernel>,
        executors: Range<u32>,
        waits: bool,
        deadline: Deadline,
    ) -> Result<Arc<dyn Resident>, ActorError> {
        let id = self.device.info().id;
        let residents = self.device.residents();
        let residents =
            residents.ok_or(ActorError::Unsupported { device: id, reason: "it has no resident kernels" })?;
        let views = self.views()?;
        let (host, ordinal) = (self.memory.host.view(), u32::try_from(self.ordinal).unwrap_or(u32::MAX));
        let scalars = [ordinal.to_le_bytes(), executors.start.to_le_bytes()];
        let args: Vec<Arg<'_>> = [&host]
            .into_iter()
            .chain(&views)
            .map(Arg::Buffer)
            .chain(scalars.iter().map(|scalar| Arg::Scalar(scalar)))
            .collect();
        let count = executors.end - executors.start;
        let launch = Launch::new(kernel, [count, 1, 1], &args)?;
        loop {
            match residents.launch(&ResidentDesc::new(launch)) {
                Ok(resident) => return Ok(resident),
                // The one before gives its processors back a moment after it has stopped.
                Err(ResidentError::OverBudget { .. }) if waits && !deadline.is_past() => thread::yield_now(),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The memory of all devices, by ordinal, with some of nobody's where this one reaches none.
    fn views(&self) -> Result<Vec<BufferView>, ActorError> {
        let nobody = |at: usize| {
            let begin = self.layout.nobody + at as u64 * 256;
            self.memory.device.slice(begin..begin + 256)
        };
        let views = (0..DEVICES).map(|at| match self.peers.get().and_then(|peers| peers.get(at)) {
            // Its own memory ends where that of nobody begins.
            Some(Some(own)) if at == self.ordinal => own.slice(0..self.layout.nobody),
            Some(Some(view)) => Ok(view.clone()),
            _ => nobody(at),
        });
        let views = views.collect::<Result<_, _>>();
        views.map_err(|error| ActorError::Invalid { reason: error.to_string() })
    }

    // ---- What the thread does

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn machine(&self) -> MutexGuard<'_, Machine> {
        lock(&self.machine)
    }

    /// Everything once; whether there was something.
    fn pump(&self, state: &mut State) -> bool {
        let mut worked = self.commands(state);
        if !self.is_running() {
            return worked;
        }
        self.compare_clocks(state);
        worked |= self.send_orders(state);
        for executor in 0..state.inward.len() {
            worked |= self.read(state, executor);
        }
        if let Some(port) = self.port.get().and_then(Weak::upgrade) {
            worked |= state.relay.go_on(&self.shared, &port);
        }
        worked | self.send_orders(state)
    }

    fn send_orders(&self, state: &mut State) -> bool {
        let mut outward = lock(&self.outward);
        let before = state.orders.len();
        while let Some((to, header, payload)) = state.orders.front() {
            if outward.try_push(0, *to, header, payload).is_err() {
                break;
            }
            state.orders.pop_front();
        }
        state.orders.len() < before
    }

    fn compare_clocks(&self, state: &mut State) {
        if state.clock_at.is_some_and(|at| at.elapsed() < CLOCK_EVERY) {
            return;
        }
        let now = Instant::now();
        state.clock_at = Some(now);
        let header = Header { kind: CLOCK, ..Header::default() };
        state.order(BRIDGE, header, vec![0; 16], Awaited::Clock(now));
    }

    /// Takes orders for executors, behind the routes that they go by.
    fn commands(&self, state: &mut State) -> bool {
        let executors = 0..self.layout.executors;
        let mails: Vec<(u32, Vec<Command>)> = executors
            .filter_map(|local| {
                Some((local, self.shared.executors[self.first + local as usize].take_mail()?))
            })
            .collect();
        if self.is_running() {
            self.tables(state);
        }
        let worked = !mails.is_empty();
        for (local, commands) in mails {
            commands.into_iter().for_each(|command| self.command(state, local, command));
        }
        worked
    }

    fn command(&self, state: &mut State, local: u32, command: Command) {
        match command {
            // Only the host's executors are told so.
            Command::Insert(_) => {}
            Command::Order { actor, epoch, order, .. } => self.obey(state, local, actor, epoch, order),
            Command::Kill(actor, reason) => {
                if let Some(room) = state.rooms.get_mut(actor) {
                    let (executor, header) = (room.executor, order_to(END, actor, room.slot, reason));
                    state.order(executor, header, Vec::new(), Awaited::Ended(actor));
                }
            }
            Command::Inspect(reply) if self.is_running() => {
                let header = Header { kind: INSPECT, ..Header::default() };
                state.order(local, header, Vec::new(), Awaited::Inspected(reply));
            }
            Command::Inspect(reply) => {
                let _gone = reply.send(Vec::new());
            }
        }
    }

    fn obey(&self, state: &mut State, local: u32, actor: ActorId, epoch: u32, order: Order) {
        let executor = self.first + local as usize;
        if order == Order::Switch {
            let from = Party::Sender(u32::try_from(executor).unwrap_or(u32::MAX));
            if !self.is_running() {
                return self.answer(actor, from, epoch, order);
            }
            let header = order_to(SWITCH, actor, u32::MAX, Reason::ActorStopped);
            let awaited = Awaited::Order { actor, from, epoch, order };
            return state.order(local, header, Vec::new(), awaited);
        }
        let from = match order {
            Order::Place | Order::Discard | Order::Activate | Order::Settle => Party::Target,
            _ => Party::Source,
        };
        let Some(room) = state.rooms.get_mut(actor) else {
            let _gone =
                self.shared.service.send(Request::Event { actor, event: Event::Lost(from), core: None });
            return;
        };
        if !room.seat.handle(epoch, order) {
            return;
        }
        let (to, slot) = (room.executor, room.slot);
        let kind = match order {
            Order::Stop => STOP,
            Order::Resume => RESUME,
            Order::Refuse => END,
            // It is gone by the device's word, and its memory is given back.
            _ => {
                state.rooms.remove(actor);
                return self.answer(actor, from, epoch, order);
            }
        };
        let awaited = match order {
            Order::Refuse => Awaited::EndedBy { actor, from, epoch, order },
            _ => Awaited::Order { actor, from, epoch, order },
        };
        state.order(to, order_to(kind, actor, slot, Reason::ActorStopped), Vec::new(), awaited);
    }

    fn answer(&self, actor: ActorId, from: Party, epoch: u32, order: Order) {
        let event = Event::Answered { from, epoch, order, answer: Answer::Done };
        // Without the service nobody waits for it.
        let _gone = self.shared.service.send(Request::Event { actor, event, core: None });
    }

    // ---- The table

    /// Tells the device where actors are, as far as that has changed.
    fn tables(&self, state: &mut State) {
        let version = self.shared.routes.version();
        if state.version == Some(version) {
            return;
        }
        state.version = Some(version);
        let table = self.shared.routes.load();
        let mut seen = 0;
        let mut changes = Vec::new();
        for entry in table.entries() {
            let id = entry.inbox.actor.0;
            let words = self.words(entry);
            seen += usize::from(state.known.contains_key(&id));
            if id < ACTORS && state.known.get(&id) != Some(&words) {
                changes.push((id, words));
            }
        }
        // Those that are not in the table any more have ended.
        if seen < state.known.len() {
            let gone = |id: &u32| table.find(ActorId(*id)).err().map(|reason| (*id, reason));
            let ended: Vec<_> = state.known.keys().filter_map(gone).collect();
            for (id, reason) in ended {
                state.known.remove(&id);
                changes.push((id, [0, 0, 0, 2 + reason.code()]));
            }
        }
        for (id, words) in changes {
            if words[3] == 1 {
                state.known.insert(id, words);
            }
            let header = Header { kind: TABLE, destination: id, ..Header::default() };
            let payload = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            state.order(BRIDGE, header, payload, Awaited::Nothing);
        }
    }

    fn words(&self, entry: &Entry) -> [u32; 4] {
        let next = self.next(entry.executor) & 0xffff;
        [next | entry.slot << 16, entry.inbox.priority as u32, u32::from(entry.generation), 1]
    }

    /// Where messages to actors of an executor go next.
    fn next(&self, executor: usize) -> u32 {
        let shared = &self.shared;
        let number = |executor: usize| shared.executors[executor].number;
        let has_kernel =
            |executor: usize| shared.executors[executor].link().is_some_and(|link| link.is_running());
        let way = shared.ways.way(self.position, shared.executors[executor].device);
        let through = match way {
            Way::SameDevice | Way::Peer => number(executor),
            // Without a kernel there nobody hands on, and the host does.
            Way::Relayed { via } => shared.executor_of(via).filter(|&at| has_kernel(at)).and_then(number),
            Way::HostMediated => None,
            Way::Unreachable => return NOWHERE,
        };
        through.unwrap_or(BY_HOST)
    }

    // ---- What the device tells

    fn read(&self, state: &mut State, executor: usize) -> bool {
        for count in 0..BATCH {
            if state.relay.is_full() {
                return count > 0;
            }
            let mut frame = std::mem::take(&mut state.frame);
            let popped = state.inward[executor].try_pop(&mut frame);
            match popped {
                Ok(true) => self.handle(state, executor, &frame),
                Ok(false) => {
                    state.frame = frame;
                    return count > 0;
                }
                Err(error) => {
                    tracing::error!(device = %self.device.info().id, %error, "a lane is damaged");
                    self.damaged();
                    return false;
                }
            }
            state.frame = frame;
        }
        true
    }

    /// There is nobody left to trust on the device.
    fn damaged(&self) {
        self.is_running.store(false, Ordering::Relaxed);
        let _gone = self.shared.service.send(Request::Lost(self.position));
    }

    fn handle(&self, state: &mut State, executor: usize, frame: &Frame) {
        let (header, [what, first, second]) = (frame.header, frame.words);
        match what {
            MESSAGE if header.destination == ActorId::HOST.0 => {
                let message = Message { header, payload: frame.payload.clone() };
                if !self.shared.replies.answer(message) {
                    self.shared.bury(&header, Reason::LateAnswer);
                }
            }
            MESSAGE => {
                if let Some(port) = self.port.get().and_then(Weak::upgrade) {
                    state.relay.send(&self.shared, &port, header, &frame.payload);
                }
            }
            DEAD => {
                let reason = Reason::of_code(first).unwrap_or(Reason::DeviceLost);
                self.shared.bury(&Header { length: second, ..header }, reason);
            }
            DONE => self.done(state, executor, first, u64::from(second) | u64::from(header.sent_ns) << 32),
            SAMPLE => self.sample(executor, ActorId(first), second),
            PENDING => {
                let place =
                    [PendingPlace::Inbox, PendingPlace::Deferred, PendingPlace::Outbox, PendingPlace::Kept];
                let place = place.get(first as usize).copied().unwrap_or(PendingPlace::Inbox);
                let left = (second != 0).then(|| Duration::from_micros(second.into()));
                if let Some(pending) = state.pending.get_mut(executor) {
                    pending.push(PendingMessage { header, place, left });
                }
            }
            DAMAGED => {
                tracing::error!(device = %self.device.info().id, executor, "an executor found its lane damaged");
                self.damaged();
            }
            _ => {}
        }
    }

    fn done(&self, state: &mut State, executor: usize, token: u32, value: u64) {
        match state.open.remove(&token) {
            None | Some(Awaited::Nothing) => {}
            Some(Awaited::Order { actor, from, epoch, order }) => self.answer(actor, from, epoch, order),
            Some(Awaited::Ended(actor)) => state.rooms.remove(actor),
            Some(Awaited::EndedBy { actor, from, epoch, order }) => self.answer(actor, from, epoch, order),
            Some(Awaited::Barrier(done)) => {
                let _gone = done.send(());
            }
            Some(Awaited::Clock(asked)) => self.set_clock(state, asked, value),
            Some(Awaited::Inspected(reply)) => {
                let pending = state.pending.get_mut(executor).map(std::mem::take).unwrap_or_default();
                let _gone = reply.send(pending);
            }
        }
    }

    /// The device's clock showed `value` somewhere between the question and now.
    fn set_clock(&self, state: &mut State, asked: Instant, value: u64) {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let took = nanos(asked.elapsed());
        let error = took / 2;
        // A comparison that took long tells less than the one before.
        if state.clock_error_ns.is_some_and(|known| known < error / 2) {
            return;
        }
        state.clock_error_ns = Some(error);
        let middle = nanos(asked.duration_since(self.shared.origin)).wrapping_add(error);
        let header = Header { kind: SET_CLOCK, ..Header::default() };
        let mut payload = middle.wrapping_sub(value).to_le_bytes().to_vec();
        payload.resize(16, 0);
        state.order(BRIDGE, header, payload, Awaited::Nothing);
    }

    fn sample(&self, executor: usize, source: ActorId, nanos: u32) {
        let shared = &self.shared;
        let Some(side) = shared.executors.get(self.first + executor) else { return };
        let from =
            shared.routes.load().find(source).ok().map(|entry| shared.executors[entry.executor].device);
        if from.is_some() || source == ActorId::HOST {
            side.counters.took(from, nanos);
        }
    }
}

impl Machine {
    fn all(&self) -> impl Iterator<Item = &Arc<dyn Resident>> {
        self.executors.iter().chain(&self.bridge)
    }
}

/// Parks all or none: a handler that does not return keeps its kernel, and the others go on.
fn park_all(residents: &[Arc<dyn Resident>], deadline: Deadline) -> Result<(), ActorError> {
    for (at, resident) in residents.iter().enumerate() {
        if let Err(error) = resident.park(deadline) {
            for parked in &residents[..at] {
                // One that cannot go on has failed, which is found out by whoever watches.
                let _failed = parked.resume();
            }
            return Err(error.into());
        }
    }
    Ok(())
}

impl State {
    /// Sends an order as soon as there is room.
    fn order(&mut self, to: u32, header: Header, payload: Vec<u8>, awaited: Awaited) {
        self.last_token = self.last_token.wrapping_add(1).max(1);
        self.open.insert(self.last_token, awaited);
        self.orders.push_back((to, Header { correlation: self.last_token, ..header }, payload));
    }
}

/// An order about an actor: its slot stands where a message has its source, and a reason where it has its number.
fn order_to(kind: u32, actor: ActorId, slot: u32, reason: Reason) -> Header {
    Header { destination: actor.0, source: slot, sequence: reason.code(), kind, ..Header::default() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("device", &self.device.info().id).finish_non_exhaustive()
    }
}
