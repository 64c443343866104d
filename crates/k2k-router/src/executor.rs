//! What serves actors on a host device: a resident kernel whose slices take messages out of lanes and call handlers.

use std::{
    collections::VecDeque,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rustc_hash::FxHashMap;
use warpweft_core_types::{Progress, Workgroup};

use crate::{
    Header, Message,
    actor::{ActorId, Context, FullPolicy, Handler, Outbox},
    cursor::{Cursors, Numbers, Turn},
    dead_letter::Reason,
    epoch::{Answer, Event, Order, Party, Seat, SeatState},
    inbox::Inbox,
    post::{Blocked, Post},
    ring::Consumer,
    service::Request,
    shared::{Command, Shared},
    stats::{PendingMessage, PendingPlace},
    trace::Span,
    wire::{HEADER_LINES, PRIORITIES},
};

/// Messages that are taken from one lane before the next one is looked at.
const BATCH: usize = 32;

/// How long an executor looks for more after the last message before it rests.
const SPIN: Duration = Duration::from_micros(100);

/// How often it looks before it lets others have its core between looks.
const LOOKS: u32 = 64;

/// An executor, as its workgroup runs it.
#[derive(Debug)]
pub(crate) struct Executor {
    actors: FxHashMap<u32, Local>,
    inputs: Vec<[Consumer; PRIORITIES]>,
    lane_lines: usize,
    post: Post,
    /// Messages to be handed on that found no room, in order.
    transit: VecDeque<Message>,
    /// Actors with something to do beside what comes in.
    busy: Vec<u32>,
    scratch: Message,
    outbox: Outbox,
    handled: u32,
    last_message: Instant,
}

/// An actor at an executor.
#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) seat: Seat,
    pub(crate) core: Core,
    /// What came while it did not serve.
    kept: VecDeque<Message>,
    is_busy: bool,
}

/// What makes an actor: all that moves with it.
#[derive(Clone)]
pub(crate) struct Core {
    pub(crate) inbox: Arc<Inbox>,
    handler: Arc<Handler>,
    /// Bytes of the state.
    size: usize,
    /// Aligned for whatever a state is made of.
    state: Vec<u128>,
    cursors: Cursors<Message>,
    numbers: Numbers,
    /// By priority.
    waiting: [VecDeque<Waiting>; PRIORITIES],
    deferred: VecDeque<Waiting>,
    blocked: VecDeque<Blocked>,
}

/// A message that waits to be served.
#[derive(Debug, Clone)]
struct Waiting {
    message: Message,
    until: Option<Instant>,
}

impl Core {
    pub(crate) fn new(inbox: Arc<Inbox>, handler: Arc<Handler>, size: u32) -> Self {
        let size = size as usize;
        let words = size.div_ceil(size_of::<u128>());
        Self {
            inbox,
            handler,
            size,
            state: vec![0; words],
            cursors: Cursors::default(),
            numbers: Numbers::default(),
            waiting: Default::default(),
            deferred: VecDeque::new(),
            blocked: VecDeque::new(),
        }
    }

    /// Messages in the inbox.
    fn waits(&self) -> usize {
        self.waiting.iter().map(VecDeque::len).sum()
    }

    /// Whether its outbox has to be emptied before it is served.
    fn is_held(&self) -> bool {
        self.blocked.iter().any(|blocked| blocked.holds)
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("inbox", &self.inbox).finish_non_exhaustive()
    }
}

impl Local {
    pub(crate) fn new(seat: Seat, core: Core) -> Self {
        Self { seat, core, kept: VecDeque::new(), is_busy: false }
    }
}

impl Executor {
    pub(crate) fn new(post: Post, inputs: Vec<[Consumer; PRIORITIES]>, lane_lines: usize) -> Self {
        Self {
            actors: FxHashMap::default(),
            inputs,
            lane_lines,
            post,
            transit: VecDeque::new(),
            busy: Vec::new(),
            scratch: Message::default(),
            outbox: Outbox::default(),
            handled: 0,
            last_message: Instant::now(),
        }
    }

    /// Serves until it has to return or finds nothing to do.
    pub(crate) fn run_slice(&mut self, workgroup: &Workgroup<'_>) -> Progress {
        // Where there are more executors than cores, whoever finds nothing keeps the others from working.
        let patience = if self.post.shared.may_spin { LOOKS } else { 0 };
        let mut empty = 0;
        loop {
            for _ in 0..8 {
                if self.shared().executors[self.post.index].is_lost() {
                    return Progress::Finished;
                }
                if self.round() {
                    (self.last_message, empty) = (Instant::now(), 0);
                } else if self.last_message.elapsed() > SPIN {
                    return if self.busy.is_empty() { Progress::Idle } else { Progress::Busy };
                } else if empty < patience {
                    empty += 1;
                    std::hint::spin_loop();
                } else {
                    std::thread::yield_now();
                }
            }
            if workgroup.should_yield() {
                return Progress::Busy;
            }
        }
    }

    fn shared(&self) -> &Shared {
        &self.post.shared
    }

    /// Looks at everything once; says whether there was something.
    fn round(&mut self) -> bool {
        let mut worked = self.commands();
        self.post.refresh();
        worked |= self.go_on();
        for priority in 0..PRIORITIES {
            worked |= self.receive_all(priority, BATCH, Self::has_mail);
        }
        worked
    }

    /// Whether there are orders, for which actors stop at their next message boundary.
    fn has_mail(&self) -> bool {
        self.shared().executors[self.post.index].has_mail()
    }

    /// Takes messages of one priority, at most so many from each lane, and none while it `pauses`.
    fn receive_all(&mut self, priority: usize, most: usize, pauses: fn(&Self) -> bool) -> bool {
        let mut worked = false;
        for input in 0..self.inputs.len() {
            for _ in 0..most {
                if pauses(self) {
                    return worked;
                }
                let mut message = std::mem::take(&mut self.scratch);
                let popped = self.inputs[input][priority].try_pop(&mut message);
                let is_there = match popped {
                    Ok(is_there) => is_there,
                    Err(error) => {
                        // Memory of this process was overwritten: there is nobody left to trust.
                        tracing::error!(executor = self.post.index, %error, "a lane is damaged");
                        self.shared().executors[self.post.index].set_lost();
                        false
                    }
                };
                if is_there {
                    worked = true;
                    message = self.receive(message);
                }
                self.scratch = message;
                if !is_there {
                    break;
                }
            }
        }
        for _ in 0..most {
            if pauses(self) {
                break;
            }
            let Some(message) = self.post.out.own[priority].pop_front() else { break };
            worked = true;
            let message = self.receive(message);
            self.post.out.recycle(message);
        }
        worked
    }

    /// Deals with a message and gives back its memory.
    fn receive(&mut self, message: Message) -> Message {
        let actor = message.header.destination;
        if !self.actors.contains_key(&actor) {
            // It may have been begun since mail was looked at last.
            self.commands();
            self.post.refresh();
        }
        let Some(local) = self.actors.get_mut(&actor) else { return self.elsewhere(message) };
        match local.seat.state() {
            SeatState::Serving => return self.arrive(message),
            SeatState::Stopped | SeatState::Placed => local.kept.push_back(message),
            SeatState::Forwarding => self.transit.push_back(anew(message)),
            _ => {
                local.core.inbox.free();
                self.shared().bury(&message.header, Reason::ActorStopped);
                return message;
            }
        }
        Message::default()
    }

    /// A message for an actor that is not here: handed on by the routes, or dead.
    fn elsewhere(&mut self, message: Message) -> Message {
        match self.post.table.find(ActorId(message.header.destination)) {
            Ok(entry) if entry.executor == self.post.index => {
                self.shared().bury(&message.header, Reason::ActorStopped);
                message
            }
            Ok(_) => {
                self.transit.push_back(message);
                self.hand_on();
                Message::default()
            }
            Err(reason) => {
                self.shared().bury(&message.header, reason);
                message
            }
        }
    }

    fn hand_on(&mut self) -> bool {
        let before = self.transit.len();
        while let Some(message) = self.transit.pop_front() {
            if self.post.hand_on(&message).is_err() {
                self.transit.push_front(message);
                break;
            }
            self.post.out.recycle(message);
        }
        self.transit.len() < before
    }

    /// A message for an actor that serves here: in its turn, or kept until then.
    fn arrive(&mut self, message: Message) -> Message {
        let header = message.header;
        let Some(local) = self.actors.get_mut(&header.destination) else { return self.elsewhere(message) };
        let line = (header.source, header.priority);
        match local.core.cursors.take(line, header.sequence) {
            Turn::Late => {
                self.counters().duplicates.add(1);
                self.shared().bury(&header, Reason::Duplicate);
                message
            }
            Turn::Early => {
                self.counters().early.add(1);
                if let Some(local) = self.actors.get_mut(&header.destination) {
                    local.core.cursors.hold(line, header.sequence, message);
                }
                Message::default()
            }
            Turn::Next => {
                let message = self.deliver(message);
                self.release(header.destination);
                message
            }
        }
    }

    fn counters(&self) -> &crate::stats::Counters {
        &self.shared().executors[self.post.index].counters
    }

    /// Delivers what had come before its turn and whose turn it is now.
    fn release(&mut self, actor: u32) {
        while let Some(message) = self.actors.get_mut(&actor).and_then(|local| local.core.cursors.release()) {
            let message = self.deliver(message);
            self.post.out.recycle(message);
        }
    }

    /// A message whose turn it is: served at once, or put into the inbox.
    fn deliver(&mut self, message: Message) -> Message {
        let until = self.until(&message.header);
        let actor = ActorId(message.header.destination);
        let Some(local) = self.actors.get_mut(&actor.0) else { return self.elsewhere(message) };
        let core = &mut local.core;
        if core.waits() == 0 && !core.is_held() {
            return self.serve(Waiting { message, until });
        }
        let drops = core.inbox.full == FullPolicy::DropOldest;
        if drops && core.waits() + core.deferred.len() >= core.inbox.capacity as usize {
            // The least urgent first, and what was deferred last.
            let oldest = core.waiting.iter_mut().rev().find_map(VecDeque::pop_front);
            let oldest = oldest.or_else(|| core.deferred.pop_front());
            if let Some(oldest) = oldest {
                self.post.shared.bury(&oldest.message.header, Reason::Dropped);
            }
        }
        core.waiting[usize::from(message.header.priority)].push_back(Waiting { message, until });
        self.set_busy(actor);
        Message::default()
    }

    /// When a message's time is over, by the sender's clock, which is this one.
    fn until(&self, header: &Header) -> Option<Instant> {
        if header.deadline_us == 0 {
            return None;
        }
        let on_its_way = self.shared().now_ns().wrapping_sub(header.sent_ns);
        let deadline = Duration::from_micros(header.deadline_us.into());
        let now = Instant::now();
        Some(now + deadline.saturating_sub(Duration::from_nanos(on_its_way.into())))
    }

    fn set_busy(&mut self, actor: ActorId) {
        if let Some(local) = self.actors.get_mut(&actor.0)
            && !std::mem::replace(&mut local.is_busy, true)
        {
            self.busy.push(actor.0);
        }
    }

    /// Calls the handler, then sends what it left in the outbox.
    fn serve(&mut self, waiting: Waiting) -> Message {
        let Waiting { message, until } = waiting;
        let header = message.header;
        let actor = ActorId(header.destination);
        let side = &self.post.shared.executors[self.post.index];
        let Some(local) = self.actors.get_mut(&actor.0) else { return self.elsewhere(message) };
        let core = &mut local.core;
        if until.is_some_and(|until| Instant::now() >= until) {
            core.inbox.free();
            self.post.shared.bury(&header, Reason::Expired);
            return message;
        }
        if header.flags & Header::TIMED != 0 {
            took(&self.post, &header);
        }
        let began = side.spans.is_on().then(|| self.post.shared.now());
        self.handled = self.handled.wrapping_add(1);
        side.enter(actor, self.handled);
        let state = &mut bytemuck::cast_slice_mut(&mut core.state)[..core.size];
        let mut context = Context { id: actor, message: &message, outbox: &mut self.outbox, deferred: false };
        let handler = &core.handler;
        let outcome = catch_unwind(AssertUnwindSafe(|| handler(&mut context, state, &message)));
        let deferred = context.deferred;
        side.leave(self.handled);
        if let Some(began) = began {
            let took = self.post.shared.now().saturating_sub(began);
            side.spans.add(Span { actor, source: ActorId(header.source), kind: header.kind, began, took });
        }
        if outcome.is_err() {
            self.fail(actor, &header);
            return message;
        }
        self.post.flush(actor, &mut self.outbox, &mut core.numbers, &mut core.blocked);
        let has_more = !core.blocked.is_empty();
        let message = if deferred {
            core.deferred.push_back(Waiting { message, until });
            Message::default()
        } else {
            core.inbox.free();
            core.inbox.count_served();
            self.post.shared.executors[self.post.index].counters.served.add(1);
            // What was deferred comes before what came later.
            while let Some(again) = core.deferred.pop_back() {
                core.waiting[usize::from(again.message.header.priority)].push_front(again);
            }
            message
        };
        if has_more || core.waits() > 0 {
            self.set_busy(actor);
        }
        message
    }

    /// The handler panicked at a message: its actor ends, and others go on.
    fn fail(&mut self, actor: ActorId, header: &Header) {
        tracing::error!(%actor, "the handler of an actor panicked");
        self.outbox.messages.clear();
        self.outbox.bytes.clear();
        self.shared().routes.change(|table| table.remove(actor, Reason::ActorFailed));
        self.post.refresh();
        self.shared().bury(header, Reason::ActorFailed);
        self.bury_all(actor, Reason::ActorFailed);
        self.actors.remove(&actor.0);
    }

    /// Nothing of what an actor has will be served.
    fn bury_all(&mut self, actor: ActorId, reason: Reason) {
        let Some(local) = self.actors.get_mut(&actor.0) else { return };
        let Core { inbox, waiting, deferred, blocked, cursors, .. } = &mut local.core;
        for early in cursors.held() {
            self.post.shared.bury(&early.header, reason);
        }
        *cursors = Cursors::default();
        let inside = waiting.iter_mut().flat_map(|waiting| waiting.drain(..)).chain(deferred.drain(..));
        let inside = inside.map(|waiting| waiting.message);
        for message in inside.chain(local.kept.drain(..)) {
            inbox.free();
            self.post.shared.bury(&message.header, reason);
        }
        for blocked in blocked.drain(..) {
            self.post.shared.bury(&blocked.header, reason);
        }
    }

    /// Goes on with actors that have something to do.
    fn go_on(&mut self) -> bool {
        let mut worked = !self.transit.is_empty() && self.hand_on();
        for actor in std::mem::take(&mut self.busy) {
            let Some(local) = self.actors.get_mut(&actor) else { continue };
            local.is_busy = false;
            if local.seat.state() != SeatState::Serving {
                continue;
            }
            let core = &mut local.core;
            worked |= !core.blocked.is_empty() && self.post.unblock(&mut core.numbers, &mut core.blocked);
            worked |= self.serve_waiting(actor);
            let is_busy = self
                .actors
                .get(&actor)
                .is_some_and(|local| local.core.waits() > 0 || !local.core.blocked.is_empty());
            if is_busy {
                self.set_busy(ActorId(actor));
            }
        }
        worked
    }

    fn serve_waiting(&mut self, actor: u32) -> bool {
        let mut worked = false;
        for _ in 0..BATCH {
            let pauses = self.has_mail();
            let Some(local) = self.actors.get_mut(&actor) else { break };
            if pauses || local.core.is_held() {
                break;
            }
            let Some(waiting) = local.core.waiting.iter_mut().find_map(VecDeque::pop_front) else { break };
            worked = true;
            let message = self.serve(waiting);
            self.post.out.recycle(message);
        }
        worked
    }

    fn commands(&mut self) -> bool {
        let Some(commands) = self.shared().executors[self.post.index].take_mail() else { return false };
        // Orders behind a commit are carried out by its routes.
        self.post.refresh();
        for command in commands {
            match command {
                Command::Insert(local) => {
                    self.actors.insert(local.core.inbox.actor.0, *local);
                }
                Command::Order { actor, epoch, order, core, brings } => {
                    self.obey(actor, epoch, order, core, brings);
                }
                Command::Kill(actor, reason) => {
                    self.bury_all(actor, reason);
                    self.actors.remove(&actor.0);
                }
                Command::Inspect(reply) => {
                    // Whoever asked may have given up.
                    let _gone = reply.send(self.pending());
                }
            }
        }
        true
    }

    fn obey(&mut self, actor: ActorId, epoch: u32, order: Order, core: Option<Box<Core>>, brings: bool) {
        let party = match order {
            Order::Switch => {
                self.post.refresh();
                let from = Party::Sender(u32::try_from(self.post.index).unwrap_or(u32::MAX));
                return self.answer(actor, from, epoch, order, None);
            }
            Order::Place | Order::Discard | Order::Activate | Order::Settle => Party::Target,
            Order::Stop | Order::Resume | Order::Forward | Order::Refuse | Order::Retire => Party::Source,
        };
        let is_target = matches!(order, Order::Place | Order::Activate);
        if is_target && self.post.table.find(actor).is_err() {
            // It was killed while it was on its way.
            self.bury_all(actor, Reason::ActorKilled);
            self.actors.remove(&actor.0);
        } else if let Some(core) = core {
            self.actors.entry(actor.0).or_insert_with(|| Local::new(Seat::vacant(), *core));
        }
        if order == Order::Retire {
            self.receive_what_is_there();
        }
        let obeyed = match self.actors.get_mut(&actor.0) {
            Some(local) => local.seat.handle(epoch, order),
            // It failed or was killed.
            None => {
                let request = Request::Event { actor, event: Event::Lost(party), core: None };
                let _gone = self.shared().service.send(request);
                return;
            }
        };
        if !obeyed {
            return;
        }
        let brought = self.carry_out(actor, order, brings);
        self.answer(actor, party, epoch, order, brought);
    }

    /// Does what an order means beside the change of the seat.
    fn carry_out(&mut self, actor: ActorId, order: Order, brings: bool) -> Option<Box<Core>> {
        let local = self.actors.get_mut(&actor.0)?;
        match order {
            Order::Stop if brings => return Some(Box::new(local.core.clone())),
            Order::Resume | Order::Activate => {
                let mut kept = std::mem::take(&mut local.kept);
                // The more urgent overtake, as they do in lanes.
                kept.make_contiguous().sort_by_key(|message| message.header.priority);
                for message in kept {
                    let message = self.arrive(message);
                    self.post.out.recycle(message);
                }
                self.set_busy(actor);
            }
            Order::Settle => {
                local.core.cursors.settle();
                if local.seat.state() == SeatState::Serving {
                    self.release(actor.0);
                }
            }
            Order::Forward => {
                // The target has all that was accepted; what came later is handed on.
                let kept = std::mem::take(&mut local.kept);
                local.core.waiting.iter_mut().for_each(VecDeque::clear);
                local.core.deferred.clear();
                local.core.blocked.clear();
                self.transit.extend(kept.into_iter().map(anew));
                self.hand_on();
            }
            Order::Refuse => {
                self.post.unblock(&mut local.core.numbers, &mut local.core.blocked);
                self.bury_all(actor, Reason::ActorStopped);
            }
            Order::Retire | Order::Discard => {
                self.actors.remove(&actor.0);
            }
            Order::Stop | Order::Place | Order::Switch => {}
        }
        None
    }

    /// Takes what is in the lanes now, and not what is put there meanwhile.
    fn receive_what_is_there(&mut self) {
        for priority in 0..PRIORITIES {
            self.receive_all(priority, self.lane_lines / HEADER_LINES, |_| false);
        }
    }

    fn answer(&self, actor: ActorId, from: Party, epoch: u32, order: Order, core: Option<Box<Core>>) {
        let event = Event::Answered { from, epoch, order, answer: Answer::Done };
        // Without the service nobody waits for it.
        let _gone = self.shared().service.send(Request::Event { actor, event, core });
    }

    fn pending(&self) -> Vec<PendingMessage> {
        let now = Instant::now();
        let left = |until: Option<Instant>| until.map(|until| until.saturating_duration_since(now));
        let mut all = Vec::new();
        for local in self.actors.values() {
            let core = &local.core;
            let mut add = |header: Header, place, left| all.push(PendingMessage { header, place, left });
            core.waiting
                .iter()
                .flatten()
                .for_each(|w| add(w.message.header, PendingPlace::Inbox, left(w.until)));
            core.deferred.iter().for_each(|w| add(w.message.header, PendingPlace::Deferred, left(w.until)));
            core.blocked.iter().for_each(|b| add(b.header, PendingPlace::Outbox, left(b.until)));
            core.cursors.held().for_each(|message| add(message.header, PendingPlace::Early, None));
            local.kept.iter().for_each(|message| add(message.header, PendingPlace::Kept, None));
        }
        all
    }
}

/// Notes how long a message was on its way to its handler.
fn took(post: &Post, header: &Header) {
    let shared = &post.shared;
    let nanos = shared.now_ns().wrapping_sub(header.sent_ns);
    let source = ActorId(header.source);
    let from = post.table.find(source).ok().map(|entry| shared.executors[entry.executor].device);
    if from.is_some() || source == ActorId::HOST {
        shared.executors[post.index].counters.took(from, nanos);
    }
}

/// A message that follows its actor. It may do so as often as the actor moves, while hops find messages that go round.
fn anew(mut message: Message) -> Message {
    message.header.hops = 0;
    message
}

/// A way to ask an executor what waits.
pub(crate) fn inspection() -> (Command, mpsc::Receiver<Vec<PendingMessage>>) {
    let (reply, answer) = mpsc::channel();
    (Command::Inspect(reply), answer)
}
