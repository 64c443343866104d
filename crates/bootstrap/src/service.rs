//! The one thread of a group: sockets and time in, for the machines that decide.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use mio::{
    Events, Interest, Poll, Token as Slot, Waker,
    net::{TcpListener, TcpStream},
};

use crate::{
    Health, JoinError, Rank, RunId, Token,
    frame::{self, FrameError, MEMBER_LIMIT, STRANGER_LIMIT},
    health::ProcessState,
    hub::{Conn, Hub, HubAction, HubEvent, Moment},
    link::{Flow, Link},
    message::{FromHub, ToHub, Welcome},
    process_watch::ProcessWatch,
    shared::{Command, Shared, State},
    spoke::{Failure, Spoke, SpokeAction, SpokeEvent},
    token,
};

const WAKER: Slot = Slot(0);
const LISTENER: Slot = Slot(1);
#[cfg(target_os = "linux")]
const MAILBOX: Slot = Slot(2);
/// Connections are numbered from here; the number of rank 0's own member is below.
const FIRST: usize = 16;

/// Connections taken at once, so that members are served between strangers.
const ACCEPTED_AT_ONCE: usize = 64;

/// Pieces read from one connection at once, so that one that never stops talking does not silence the others.
const PIECES_AT_ONCE: usize = 64;

/// How long an ended connection may take to bring its last words across.
const LINGER: Duration = Duration::from_millis(500);

/// Ended connections that are given that time.
const LINGERING: usize = 256;

/// How long to wait for the system to have file descriptors again.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(20);

/// Where rank 0 is, and how to know it.
#[derive(Debug, Clone)]
pub(crate) struct Contact {
    pub(crate) address: SocketAddr,
    pub(crate) token: Token,
    pub(crate) run: RunId,
}

/// Finds rank 0; asked again before each attempt.
pub(crate) type Source = Box<dyn FnMut() -> Result<Contact, JoinError> + Send>;

/// How this member reaches rank 0.
pub(crate) enum Role {
    /// It is rank 0, or leads a group that forms anew.
    Lead(Box<Leader>),
    Follow(Source),
}

pub(crate) struct Leader {
    pub(crate) hub: Hub,
    pub(crate) contact: Contact,
    /// None for a group of one.
    pub(crate) listener: Option<std::net::TcpListener>,
    /// Called once everybody is there, or nobody can come any more.
    pub(crate) withdraw: Option<Box<dyn FnOnce() + Send>>,
}

pub(crate) struct Service {
    shared: Arc<Shared>,
    poll: Poll,
    started: Instant,
    spoke: Spoke,
    hub: Option<Hub>,
    /// Where rank 0's own member finds it.
    local: Option<Contact>,
    source: Option<Source>,
    listener: Option<TcpListener>,
    accept_at: Option<Moment>,
    links: HashMap<usize, Link>,
    next_slot: usize,
    /// The connection to rank 0.
    upward: Option<usize>,
    contact: Option<Contact>,
    is_connecting: bool,
    /// The reason why there is no connection yet.
    problem: Option<JoinError>,
    lingering: VecDeque<(usize, Moment)>,
    /// Connections that may have more to read, of which the system does not tell again.
    unread: BTreeSet<usize>,
    /// Messages between rank 0's own member and the hub, which no socket carries.
    to_hub: VecDeque<ToHub>,
    from_hub: VecDeque<FromHub>,
    processes: ProcessWatch,
    watched: BTreeMap<usize, Rank>,
    withdraw: Option<Box<dyn FnOnce() + Send>>,
    #[cfg(target_os = "linux")]
    mailbox: Option<crate::mailbox::Mailbox>,
    is_over: bool,
}

impl Service {
    pub(crate) fn new(shared: Arc<Shared>, role: Role, spoke: Spoke, started: Instant) -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let _only_once = shared.waker.set(waker);
        let mut service = Self {
            shared,
            poll,
            started,
            spoke,
            hub: None,
            local: None,
            source: None,
            listener: None,
            accept_at: None,
            links: HashMap::new(),
            next_slot: FIRST,
            upward: None,
            contact: None,
            is_connecting: false,
            problem: None,
            lingering: VecDeque::new(),
            unread: BTreeSet::new(),
            to_hub: VecDeque::new(),
            from_hub: VecDeque::new(),
            processes: ProcessWatch::default(),
            watched: BTreeMap::new(),
            withdraw: None,
            #[cfg(target_os = "linux")]
            mailbox: None,
            is_over: false,
        };
        match role {
            Role::Lead(leader) => service.lead(*leader)?,
            Role::Follow(source) => service.source = Some(source),
        }
        Ok(service)
    }

    fn lead(&mut self, leader: Leader) -> io::Result<()> {
        if let Some(listener) = leader.listener {
            listener.set_nonblocking(true)?;
            let mut listener = TcpListener::from_std(listener);
            self.poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
            self.listener = Some(listener);
            // Some may have connected before anybody watched.
            self.accept_at = Some(Moment::ZERO);
        }
        self.hub = Some(leader.hub);
        self.local = Some(leader.contact);
        self.withdraw = leader.withdraw;
        Ok(())
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn with_mailbox(mut self, mut mailbox: crate::mailbox::Mailbox) -> io::Result<Self> {
        mailbox.register(self.poll.registry(), MAILBOX)?;
        self.mailbox = Some(mailbox);
        Ok(self)
    }

    /// Serves until the group is left and its last words are said.
    pub(crate) fn run(mut self) {
        let ended = Ended(Arc::clone(&self.shared));
        let mut events = Events::with_capacity(256);
        let mut end_by = None;
        loop {
            self.pump();
            let now = self.now();
            if self.is_over {
                let end_by = *end_by.get_or_insert(now + LINGER);
                if self.links.is_empty() || now >= end_by {
                    break;
                }
            }
            let timeout = self.timeout(now, end_by);
            match self.poll.poll(&mut events, timeout) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(%error, "waiting for sockets failed");
                    break;
                }
            }
            for event in &events {
                self.ready(event.token(), event.is_readable() || event.is_read_closed() || event.is_error());
            }
        }
        drop(ended);
    }

    fn now(&self) -> Moment {
        self.started.elapsed()
    }

    fn timeout(&self, now: Moment, end_by: Option<Moment>) -> Option<Duration> {
        let lingering = self.lingering.front().map(|(_, until)| *until);
        let unread = (!self.unread.is_empty()).then_some(now);
        let moments = [self.spoke.poll_timeout(), self.accept_at, lingering, end_by, unread];
        let hub = self.hub.as_ref().and_then(Hub::poll_timeout);
        #[cfg(target_os = "linux")]
        let hub = {
            let mailbox = self.mailbox.as_ref().and_then(crate::mailbox::Mailbox::next_timeout);
            hub.into_iter().chain(mailbox.map(|at| at.duration_since(self.started))).min()
        };
        let next = moments.into_iter().chain([hub]).flatten().min()?;
        let wait = next.saturating_sub(now);
        // The system counts whole milliseconds: rounded down it would ask again and again.
        Some(if wait.is_zero() { wait } else { wait + Duration::from_micros(100) })
    }

    fn ready(&mut self, slot: Slot, is_readable: bool) {
        match slot {
            WAKER => {}
            LISTENER => self.accept_at = Some(self.now()),
            #[cfg(target_os = "linux")]
            slot if self.mailbox.as_ref().is_some_and(|mailbox| mailbox.owns(slot)) => {
                if let Some(mailbox) = &mut self.mailbox {
                    mailbox.ready(self.poll.registry(), slot, &self.shared);
                }
            }
            Slot(slot) if self.watched.contains_key(&slot) => self.process_ended(slot),
            Slot(slot) => self.link_ready(slot, is_readable),
        }
    }

    /// Lets everything happen that can happen now.
    fn pump(&mut self) {
        self.take_commands();
        self.accept();
        self.end_lingering();
        std::mem::take(&mut self.unread).into_iter().for_each(|slot| self.read(slot));
        #[cfg(target_os = "linux")]
        if let Some(mailbox) = &mut self.mailbox {
            mailbox.drop_late(Instant::now());
        }
        let now = self.now();
        self.spoke.handle(now, SpokeEvent::Tick);
        if let Some(hub) = &mut self.hub {
            hub.handle(now, HubEvent::Tick);
        }
        loop {
            let now = self.now();
            if let Some(action) = self.hub.as_mut().and_then(Hub::poll_action) {
                self.act_for_hub(action);
            } else if let Some(action) = self.spoke.poll_action() {
                self.act_for_spoke(action);
            } else if let Some(message) = self.from_hub.pop_front() {
                self.spoke.handle(now, SpokeEvent::Received(message));
            } else if let (Some(hub), Some(message)) = (&mut self.hub, self.to_hub.pop_front()) {
                hub.handle(now, HubEvent::Received { conn: Conn::LOCAL, message });
            } else {
                return;
            }
        }
    }

    fn take_commands(&mut self) {
        let commands = std::mem::take(&mut self.shared.lock().commands);
        for command in commands {
            let event = match command {
                Command::Call(request) => SpokeEvent::Call(request),
                Command::Abort { reason } => SpokeEvent::Abort { reason },
                Command::Leave => {
                    self.is_over = true;
                    SpokeEvent::Leave
                }
            };
            self.spoke.handle(self.now(), event);
            if self.is_over {
                self.stop_listening();
            }
        }
    }

    fn stop_listening(&mut self) {
        self.listener = None;
        self.accept_at = None;
        if let Some(withdraw) = self.withdraw.take() {
            withdraw();
        }
        #[cfg(target_os = "linux")]
        {
            self.mailbox = None;
        }
    }

    fn accept(&mut self) {
        if self.accept_at.is_none_or(|at| at > self.now()) {
            return;
        }
        self.accept_at = None;
        for _ in 0..ACCEPTED_AT_ONCE {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok((stream, _)) => self.accepted(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(error) => {
                    // No descriptors or no memory. It passes when strangers are dropped.
                    tracing::warn!(%error, "a connection could not be taken");
                    self.accept_at = Some(self.now() + EXHAUSTED_PAUSE);
                    return;
                }
            }
        }
        self.accept_at = Some(self.now());
    }

    fn accepted(&mut self, stream: TcpStream) {
        let Ok(challenge) = token::nonce() else { return };
        let Some(slot) = self.adopt(stream) else { return };
        let now = self.now();
        if let Some(hub) = &mut self.hub {
            hub.handle(now, HubEvent::Opened { conn: Conn(slot as u64), challenge });
        }
        // At once, so that a flood of strangers does not queue up unanswered.
        while let Some(action) = self.hub.as_mut().and_then(Hub::poll_action) {
            self.act_for_hub(action);
        }
    }

    fn adopt(&mut self, stream: TcpStream) -> Option<usize> {
        let mut link = Link::new(stream);
        let slot = self.next_slot();
        let both = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = self.poll.registry().register(&mut link.stream, Slot(slot), both) {
            tracing::warn!(%error, "a connection could not be watched");
            return None;
        }
        self.links.insert(slot, link);
        Some(slot)
    }

    fn next_slot(&mut self) -> usize {
        self.next_slot += 1;
        self.next_slot
    }

    fn act_for_hub(&mut self, action: HubAction) {
        match action {
            HubAction::Send { conn: Conn::LOCAL, message } => self.from_hub.push_back(message),
            HubAction::Send { conn, message } => {
                let is_beat = message == FromHub::Beat;
                self.send(slot_of(conn), &frame::encode(&message), is_beat);
            }
            HubAction::Close { conn: Conn::LOCAL } => {}
            HubAction::Close { conn } => self.close(slot_of(conn)),
            HubAction::Formed => {
                if let Some(withdraw) = self.withdraw.take() {
                    withdraw();
                }
            }
            HubAction::Watch { rank, pid } => self.watch(rank, pid),
            HubAction::Probe { rank, pid } => {
                let now = self.now();
                if let (Some(state), Some(hub)) = (ProcessState::of(pid), &mut self.hub) {
                    hub.handle(now, HubEvent::Probed { rank, state });
                }
            }
        }
    }

    fn act_for_spoke(&mut self, action: SpokeAction) {
        match action {
            SpokeAction::Connect => self.connect(),
            SpokeAction::Send(message) if self.local.is_some() => self.to_hub.push_back(message),
            SpokeAction::Send(message) => {
                if let Some(slot) = self.upward {
                    self.send(slot, &frame::encode(&message), message == ToHub::Beat);
                }
            }
            SpokeAction::Close => {
                if let Some(slot) = self.upward.take() {
                    self.close(slot);
                }
            }
            SpokeAction::Joined(welcome) => self.joined(welcome),
            SpokeAction::Failed(failure) => self.failed(failure),
            SpokeAction::Done { sequence, outcome } => self.shared.update(|state| {
                state.outcomes.insert(sequence, outcome);
            }),
            SpokeAction::Health { rank, health } => {
                tracing::debug!(%rank, ?health, "health changed");
                self.shared.update(|state| state.set_health(rank, health));
            }
            SpokeAction::Aborted { by, reason } => self.shared.update(|state| {
                state.aborted.get_or_insert((by, reason));
            }),
            SpokeAction::Watch { pid } => self.watch(Rank(0), pid),
            SpokeAction::Probe { pid } => {
                let now = self.now();
                if let Some(state) = ProcessState::of(pid) {
                    self.spoke.handle(now, SpokeEvent::Probed(state));
                }
            }
        }
    }

    fn joined(&mut self, welcome: Welcome) {
        let Some(contact) = self.local.clone().or_else(|| self.contact.clone()) else { return };
        #[cfg(target_os = "linux")]
        if let Some(mailbox) = &mut self.mailbox {
            let Welcome { epoch, rank, ref members, .. } = welcome;
            mailbox.activate(self.poll.registry(), contact.token.clone(), epoch, rank, members.clone());
        }
        self.shared.update(|state| {
            state.health = vec![Health::Alive; welcome.members.len()];
            state.joined = Some(Ok((welcome, contact)));
        });
    }

    fn failed(&mut self, failure: Failure) {
        let address = self.contact.as_ref().map(|contact| contact.address);
        let error = match (failure, self.problem.take()) {
            (Failure::Refused(refusal), _) => refusal.into(),
            (Failure::Impostor, _) => address.map_or_else(nobody, |address| JoinError::Impostor { address }),
            (Failure::TimedOut { connected: false }, Some(problem)) => problem,
            (Failure::TimedOut { connected: true }, _) => {
                JoinError::TimedOut { reason: "rank 0 was reached and others were still missing".into() }
            }
            (Failure::TimedOut { connected: false }, None) => match address {
                Some(address) => JoinError::Unreachable { address, cause: ErrorKind::TimedOut.into() },
                None => nobody(),
            },
        };
        self.give_up(error);
    }

    fn give_up(&mut self, error: JoinError) {
        self.is_over = true;
        self.stop_listening();
        self.shared.update(|state| {
            state.joined.get_or_insert(Err(error));
        });
    }

    fn connect(&mut self) {
        if let Some(contact) = self.local.clone() {
            return self.connect_locally(contact);
        }
        let Some(source) = &mut self.source else { return };
        let attempt = source().and_then(|contact| {
            let address = contact.address;
            let stream = TcpStream::connect(address);
            let stream = stream.map_err(|cause| JoinError::Unreachable { address, cause })?;
            Ok((contact, stream))
        });
        let slot = match attempt {
            Ok((contact, stream)) => {
                self.contact = Some(contact);
                self.adopt(stream)
            }
            Err(problem) => {
                self.problem = Some(problem);
                None
            }
        };
        self.upward = slot;
        self.is_connecting = slot.is_some();
        if slot.is_none() {
            let now = self.now();
            self.spoke.handle(now, SpokeEvent::Unreachable);
        }
    }

    fn connect_locally(&mut self, contact: Contact) {
        let now = self.now();
        let (Ok(nonce), Ok(challenge)) = (token::nonce(), token::nonce()) else {
            self.spoke.handle(now, SpokeEvent::Unreachable);
            return;
        };
        let Contact { token, run, .. } = contact;
        self.spoke.handle(now, SpokeEvent::Connected { token, run, from: None, to: None, nonce });
        if let Some(hub) = &mut self.hub {
            hub.handle(now, HubEvent::Opened { conn: Conn::LOCAL, challenge });
        }
    }

    /// The connection to rank 0 stands, or never will.
    fn finish_connecting(&mut self, slot: usize) -> bool {
        let (Some(link), Some(contact)) = (self.links.get(&slot), self.contact.clone()) else { return false };
        let failure = match (link.stream.take_error(), link.stream.peer_addr()) {
            (Ok(Some(error)) | Err(error), _) => Some(error),
            // Where nobody listens on a port that the system also gives to connections, a connection can be
            // given that port and reach itself.
            (Ok(None), Ok(peer)) if link.stream.local_addr().is_ok_and(|own| own == peer) => {
                Some(ErrorKind::ConnectionRefused.into())
            }
            (Ok(None), Ok(_)) => None,
            // Not yet.
            (Ok(None), Err(error)) if error.kind() == ErrorKind::NotConnected => return false,
            (Ok(None), Err(error)) => Some(error),
        };
        self.is_connecting = false;
        let now = self.now();
        if let Some(cause) = failure {
            self.problem = Some(JoinError::Unreachable { address: contact.address, cause });
            self.links.remove(&slot);
            self.upward = None;
            self.spoke.handle(now, SpokeEvent::Unreachable);
            return false;
        }
        let from = link.stream.local_addr().ok().map(|address| address.ip());
        match token::nonce() {
            Ok(nonce) => {
                let Contact { token, run, address } = contact;
                let to = Some(address);
                self.spoke.handle(now, SpokeEvent::Connected { token, run, from, to, nonce });
                true
            }
            Err(_) => {
                self.links.remove(&slot);
                self.upward = None;
                self.spoke.handle(now, SpokeEvent::Unreachable);
                false
            }
        }
    }

    fn link_ready(&mut self, slot: usize, is_readable: bool) {
        if self.upward == Some(slot) && self.is_connecting && !self.finish_connecting(slot) {
            return;
        }
        self.flush(slot);
        if is_readable {
            self.read(slot);
        }
    }

    fn read(&mut self, slot: usize) {
        for _ in 0..PIECES_AT_ONCE {
            let Some(link) = self.links.get_mut(&slot) else { return };
            match link.fill() {
                Ok(None) => return,
                Ok(Some(Flow::Open)) => self.take_messages(slot),
                // What was complete has been taken; a reset is an end too.
                Ok(Some(Flow::Ended)) | Err(_) => return self.ended(slot),
            }
        }
        self.unread.insert(slot);
    }

    fn take_messages(&mut self, slot: usize) {
        loop {
            let now = self.now();
            let Some(link) = self.links.get_mut(&slot).filter(|link| !link.is_closing()) else { return };
            let is_upward = self.upward == Some(slot);
            // What comes from rank 0 is long before it has proven itself; it is kept only as it arrives.
            let is_stranger =
                !is_upward && self.hub.as_ref().is_some_and(|hub| hub.is_stranger(Conn(slot as u64)));
            let limit = if is_stranger { STRANGER_LIMIT } else { MEMBER_LIMIT };
            let frame = match link.next_frame(limit) {
                Ok(Some(frame)) => frame,
                Ok(None) => return,
                Err(error) => return self.garbled(slot, error),
            };
            if is_upward {
                match frame::decode(frame) {
                    Ok(message) => self.spoke.handle(now, SpokeEvent::Received(message)),
                    Err(error) => return self.garbled(slot, error),
                }
            } else if let Some(hub) = &mut self.hub {
                match frame::decode(frame) {
                    Ok(message) => hub.handle(now, HubEvent::Received { conn: Conn(slot as u64), message }),
                    Err(error) => return self.garbled(slot, error),
                }
            }
            self.pump_actions();
        }
    }

    /// Actions alone: what they send is part of what was just read.
    fn pump_actions(&mut self) {
        loop {
            if let Some(action) = self.hub.as_mut().and_then(Hub::poll_action) {
                self.act_for_hub(action);
            } else if let Some(action) = self.spoke.poll_action() {
                self.act_for_spoke(action);
            } else {
                return;
            }
        }
    }

    fn garbled(&mut self, slot: usize, cause: FrameError) {
        let now = self.now();
        tracing::debug!(slot, %cause, "a message does not read");
        if self.upward != Some(slot) {
            if let Some(hub) = &mut self.hub {
                hub.handle(now, HubEvent::Garbled { conn: Conn(slot as u64) });
            }
            // Nothing is owed to somebody who does not speak the protocol.
            self.links.remove(&slot);
            return;
        }
        let has_joined = self.shared.lock().joined.is_some();
        if has_joined {
            self.spoke.handle(now, SpokeEvent::Garbled);
        } else {
            let address = self.contact.as_ref().map(|contact| contact.address);
            self.links.remove(&slot);
            self.give_up(address.map_or_else(nobody, |address| JoinError::Foreign { address, cause }));
        }
    }

    fn ended(&mut self, slot: usize) {
        let now = self.now();
        let link = self.links.remove(&slot);
        if link.is_none_or(|link| link.is_closing()) {
            return;
        }
        if self.upward == Some(slot) {
            self.upward = None;
            self.problem = self.contact.as_ref().map(|contact| JoinError::Unreachable {
                address: contact.address,
                cause: io::Error::new(
                    ErrorKind::ConnectionReset,
                    "the connection was closed before an answer",
                ),
            });
            self.spoke.handle(now, SpokeEvent::Closed);
        } else if let Some(hub) = &mut self.hub {
            hub.handle(now, HubEvent::Closed { conn: Conn(slot as u64) });
        }
    }

    fn send(&mut self, slot: usize, frame: &[u8], only_if_idle: bool) {
        let Some(link) = self.links.get_mut(&slot) else { return };
        // Signs of life must not pile up before somebody who is stopped.
        if only_if_idle && link.has_unsent() {
            return;
        }
        link.queue(frame);
        self.flush(slot);
    }

    fn flush(&mut self, slot: usize) {
        let Some(link) = self.links.get_mut(&slot) else { return };
        if link.flush().is_err() {
            self.ended(slot);
        }
    }

    fn close(&mut self, slot: usize) {
        let Some(link) = self.links.get_mut(&slot) else { return };
        link.close();
        if link.flush().is_err() {
            self.links.remove(&slot);
            return;
        }
        self.lingering.push_back((slot, self.now() + LINGER));
        if self.lingering.len() > LINGERING
            && let Some((oldest, _)) = self.lingering.pop_front()
        {
            self.links.remove(&oldest);
        }
    }

    fn end_lingering(&mut self) {
        let now = self.now();
        while let Some((slot, _)) = self.lingering.pop_front_if(|(_, until)| *until <= now) {
            self.links.remove(&slot);
        }
    }

    fn watch(&mut self, rank: Rank, pid: u32) {
        let slot = self.next_slot();
        if self.processes.add(self.poll.registry(), Slot(slot), pid) {
            self.watched.insert(slot, rank);
        }
    }

    fn process_ended(&mut self, slot: usize) {
        self.processes.remove(self.poll.registry(), Slot(slot));
        let Some(rank) = self.watched.remove(&slot) else { return };
        // Its last words may have arrived together with the news of its end.
        let links: Vec<usize> = self.links.keys().copied().collect();
        links.into_iter().for_each(|slot| self.read(slot));
        let now = self.now();
        match &mut self.hub {
            Some(hub) => hub.handle(now, HubEvent::Exited { rank }),
            None => self.spoke.handle(now, SpokeEvent::Exited),
        }
    }
}

/// Tells those who wait that nobody serves them any more, also if the service panicked.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        let reason = if std::thread::panicking() { "it panicked" } else { "the group was left" };
        self.0.update(|state: &mut State| {
            state.ended = Some(reason.into());
            state.joined.get_or_insert(Err(nobody()));
        });
    }
}

fn nobody() -> JoinError {
    JoinError::TimedOut { reason: "rank 0 was not found".into() }
}

fn slot_of(conn: Conn) -> usize {
    usize::try_from(conn.0).expect("the number was a slot before")
}
