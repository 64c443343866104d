//! How messages leave an executor.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    Header, Message,
    actor::{ActorId, FullPolicy, Outbox, Outgoing},
    cursor::Numbers,
    dead_letter::Reason,
    device::Link,
    error::RingError,
    ring::Producer,
    shared::Shared,
    table::Table,
    wire::{MAX_HOPS, PRIORITIES},
};

/// Lanes from one executor to another.
#[derive(Debug)]
pub(crate) enum Lanes {
    /// By priority.
    Ring([Producer; PRIORITIES]),
    /// To a kernel.
    Link(Arc<Link>),
}

/// How long a sender waits for room in a lane where the receiver's policy says nothing of it.
const LANE_PATIENCE: Duration = Duration::from_secs(1);

/// The outgoing side of an executor.
#[derive(Debug)]
pub(crate) struct Post {
    pub(crate) index: usize,
    device: usize,
    pub(crate) out: Out,
    pub(crate) table: Arc<Table>,
    version: u64,
    until_sample: u32,
    pub(crate) shared: Arc<Shared>,
}

/// Where messages go: to lanes of others, or to this executor's own actors.
#[derive(Debug)]
pub(crate) struct Out {
    index: usize,
    /// By executor; none to itself and where no lane leads.
    lanes: Vec<Option<Lanes>>,
    /// Messages to own actors, by priority.
    pub(crate) own: [VecDeque<Message>; PRIORITIES],
    /// Payloads that are used again.
    spare: Vec<Vec<u8>>,
}

/// A message that has no room yet.
#[derive(Debug, Clone)]
pub(crate) struct Blocked {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
    /// When its time is over.
    pub(crate) until: Option<Instant>,
    /// Its actor is not served meanwhile.
    pub(crate) holds: bool,
}

/// What became of an attempt to send.
enum Sent {
    Done,
    Full(FullPolicy),
    Dead(Reason),
}

impl Post {
    pub(crate) fn new(index: usize, lanes: Vec<Option<Lanes>>, shared: Arc<Shared>) -> Self {
        let version = shared.routes.version();
        Self {
            index,
            device: shared.executors[index].device,
            out: Out { index, lanes, own: Default::default(), spare: Vec::new() },
            table: shared.routes.load(),
            version,
            until_sample: 0,
            shared,
        }
    }

    /// Sees the latest routes.
    #[inline]
    pub(crate) fn refresh(&mut self) {
        let version = self.shared.routes.version();
        if version != self.version {
            (self.version, self.table) = (version, self.shared.routes.load());
        }
    }

    /// Sends what a handler has left in its outbox, in order; what finds no room is blocked.
    pub(crate) fn flush(
        &mut self,
        from: ActorId,
        outbox: &mut Outbox,
        numbers: &mut Numbers,
        blocked: &mut VecDeque<Blocked>,
    ) {
        let Outbox { messages, bytes, .. } = outbox;
        for outgoing in messages.drain(..) {
            self.send(from, &outgoing, &bytes[outgoing.start..outgoing.end], numbers, blocked);
        }
        bytes.clear();
    }

    fn send(
        &mut self,
        from: ActorId,
        outgoing: &Outgoing,
        payload: &[u8],
        numbers: &mut Numbers,
        blocked: &mut VecDeque<Blocked>,
    ) {
        let mut header = Header {
            destination: outgoing.to.0,
            length: u32::try_from(payload.len()).unwrap_or(u32::MAX),
            source: from.0,
            kind: outgoing.kind,
            ..Header::default()
        };
        if let Some(correlation) = outgoing.correlation {
            (header.flags, header.correlation) = (Header::ANSWER, correlation);
        }
        if outgoing.to == ActorId::HOST {
            return self.answer_host(header, payload);
        }
        let entry = match self.table.find(outgoing.to) {
            Ok(entry) => entry,
            Err(reason) => return self.shared.bury(&header, reason),
        };
        if entry.inbox.accepts(outgoing.kind, payload.len()).is_err() && outgoing.correlation.is_none() {
            return self.shared.bury(&header, Reason::Refused);
        }
        header.priority = outgoing.options.priority.unwrap_or(entry.inbox.priority) as u8;
        let full = entry.inbox.full;
        self.stamp(&mut header, outgoing.options.deadline);
        let now = Instant::now();
        // What is beyond the clock has no end.
        let until = outgoing.options.deadline.and_then(|deadline| now.checked_add(deadline));
        let line = (header.destination, header.priority);
        let is_behind = blocked.iter().any(|other| (other.header.destination, other.header.priority) == line);
        let policy = match is_behind {
            true => full,
            false => match self.try_send(&header, payload, numbers) {
                Sent::Done => return,
                Sent::Dead(reason) => return self.shared.bury(&header, reason),
                Sent::Full(policy) => policy,
            },
        };
        let earliest = |within| until.into_iter().chain(now.checked_add(within)).min();
        let (until, holds) = match policy {
            FullPolicy::Reject => return self.shared.bury(&header, Reason::InboxFull),
            FullPolicy::Wait { within } => (earliest(within), true),
            FullPolicy::DropOldest => (earliest(LANE_PATIENCE), true),
            FullPolicy::Spill => (until, false),
        };
        blocked.push_back(Blocked { header, payload: payload.to_vec(), until, holds });
    }

    /// Says when it was sent, where that is of use.
    fn stamp(&mut self, header: &mut Header, deadline: Option<Duration>) {
        if let Some(deadline) = deadline {
            header.deadline_us = u32::try_from(deadline.as_micros()).unwrap_or(u32::MAX).max(1);
        }
        let sampled = self.until_sample == 0;
        self.until_sample = if sampled { self.shared.sample_every } else { self.until_sample - 1 };
        if sampled || deadline.is_some() {
            header.flags |= Header::TIMED;
            header.sent_ns = self.shared.now_ns();
        }
    }

    /// Tries again what found no room, by line in order, and gives up what is out of time.
    pub(crate) fn unblock(&mut self, numbers: &mut Numbers, blocked: &mut VecDeque<Blocked>) -> bool {
        let mut full: Vec<(u32, u8)> = Vec::new();
        let before = blocked.len();
        let now = Instant::now();
        blocked.retain(|waiting| {
            let line = (waiting.header.destination, waiting.header.priority);
            if waiting.until.is_some_and(|until| now >= until) {
                self.shared.bury(&waiting.header, Reason::Expired);
                return false;
            }
            if full.contains(&line) {
                return true;
            }
            match self.try_send(&waiting.header, &waiting.payload, numbers) {
                Sent::Done => false,
                Sent::Dead(reason) => {
                    self.shared.bury(&waiting.header, reason);
                    false
                }
                Sent::Full(_) => {
                    full.push(line);
                    true
                }
            }
        });
        blocked.len() < before
    }

    fn try_send(&mut self, header: &Header, payload: &[u8], numbers: &mut Numbers) -> Sent {
        let entry = match self.table.find(ActorId(header.destination)) {
            Ok(entry) => entry,
            Err(reason) => return Sent::Dead(reason),
        };
        let (inbox, executor) = (&entry.inbox, entry.executor);
        if !inbox.take() {
            return Sent::Full(inbox.full);
        }
        let line = (header.destination, header.priority);
        let header = Header { sequence: numbers.next(line), generation: entry.generation, ..*header };
        let Some(next) = next_stop(&self.shared, self.device, executor) else {
            inbox.untake();
            return Sent::Dead(Reason::Unreachable);
        };
        if self.out.push(next, &header, payload).is_err() {
            inbox.untake();
            return Sent::Full(inbox.full);
        }
        numbers.advance(line);
        let device = self.shared.executors[executor].device;
        let (messages, bytes) = &self.shared.executors[self.index].counters.sent[device];
        messages.add(1);
        bytes.add(payload.len() as u64);
        Sent::Done
    }

    /// Hands on a message whose receiver is elsewhere. It has its place there already.
    pub(crate) fn hand_on(&mut self, message: &Message) -> Result<(), RingError> {
        let mut header = message.header;
        header.hops += 1;
        let actor = ActorId(header.destination);
        let next = match self.table.find(actor) {
            _ if header.hops > MAX_HOPS => Err(Reason::TooManyHops),
            Ok(entry) => next_stop(&self.shared, self.device, entry.executor).ok_or(Reason::Unreachable),
            Err(reason) => Err(reason),
        };
        match next {
            Ok(next) => {
                self.out.push(next, &header, &message.payload)?;
                self.shared.executors[self.index].counters.handed_on.add(1);
            }
            Err(reason) => {
                self.free(actor);
                self.shared.bury(&header, reason);
            }
        }
        Ok(())
    }

    /// A message to this actor has left its place.
    fn free(&self, actor: ActorId) {
        if let Ok(entry) = self.table.find(actor) {
            entry.inbox.free();
        }
    }

    /// The host reads answers by itself: it shares the memory of this executor.
    fn answer_host(&self, header: Header, payload: &[u8]) {
        let reason = if header.correlation == 0 { Reason::UnknownActor } else { Reason::LateAnswer };
        let message = Message { header, payload: payload.to_vec() };
        if header.correlation == 0 || !self.shared.replies.answer(message) {
            self.shared.bury(&header, reason);
        }
    }
}

impl Out {
    fn push(&mut self, next: usize, header: &Header, payload: &[u8]) -> Result<(), RingError> {
        let priority = usize::from(header.priority);
        if next == self.index {
            let mut bytes = self.spare.pop().unwrap_or_default();
            bytes.clear();
            bytes.extend_from_slice(payload);
            self.own[priority].push_back(Message { header: *header, payload: bytes });
            return Ok(());
        }
        match &mut self.lanes[next] {
            Some(Lanes::Ring(lanes)) => lanes[priority].try_push(header, payload),
            Some(Lanes::Link(link)) => link.push(next, header, payload),
            // Ways lead only where there are lanes.
            None => Err(RingError::Full),
        }
    }

    /// Keeps a payload to be used again.
    pub(crate) fn recycle(&mut self, message: Message) {
        const SPARE: usize = 64;
        if self.spare.len() < SPARE {
            self.spare.push(message.payload);
        }
    }
}

/// The executor that messages to another go to first.
fn next_stop(shared: &Shared, from: usize, executor: usize) -> Option<usize> {
    let to = shared.executors[executor].device;
    let next = shared.ways.next(from, to)?;
    if next == to { Some(executor) } else { shared.executor_of(next) }
}
