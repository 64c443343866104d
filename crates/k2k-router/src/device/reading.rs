//! Messages from a device to actors that it does not reach by itself: the host takes them on.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use rustc_hash::FxHashMap;

use crate::{
    Header,
    actor::{ActorId, FullPolicy},
    dead_letter::Reason,
    host_port::HostPort,
    shared::Shared,
};

/// How long a message waits for room in a lane where the receiver's policy says nothing of it.
const LANE_PATIENCE: Duration = Duration::from_secs(1);

/// Messages that wait here before no more are read.
const MOST: usize = 1 << 14;

/// Source, destination and priority.
type Line = (u32, u32, u8);

/// What is on its way through the host.
#[derive(Debug, Default)]
pub(crate) struct Relay {
    /// The device does not number messages; actors on host devices go by numbers.
    numbers: FxHashMap<Line, u32>,
    waiting: VecDeque<Waiting>,
    /// How many of a line wait.
    lines: FxHashMap<Line, usize>,
}

#[derive(Debug)]
struct Waiting {
    header: Header,
    payload: Vec<u8>,
    until: Option<Instant>,
}

enum Sent {
    Done,
    Full(FullPolicy),
    Dead(Reason),
}

impl Relay {
    pub(crate) fn is_full(&self) -> bool {
        self.waiting.len() >= MOST
    }

    /// Sends a message on, or keeps it as its receiver's policy says.
    pub(crate) fn send(&mut self, shared: &Shared, port: &HostPort, header: Header, payload: &[u8]) {
        let now = Instant::now();
        let line = (header.source, header.destination, header.priority);
        let deadline = Duration::from_micros(header.deadline_us.into());
        let until = (header.deadline_us != 0).then(|| now + deadline);
        let policy = match self.lines.contains_key(&line) {
            // Behind what waits, so that the order is kept.
            true => shared.routes.load().find(ActorId(header.destination)).map(|entry| entry.inbox.full).ok(),
            false => match self.try_send(shared, port, &header, payload) {
                Sent::Done => return,
                Sent::Dead(reason) => return shared.bury(&header, reason),
                Sent::Full(policy) => Some(policy),
            },
        };
        let earliest = |within| until.into_iter().chain(now.checked_add(within)).min();
        let until = match policy {
            Some(FullPolicy::Reject) => return shared.bury(&header, Reason::InboxFull),
            Some(FullPolicy::Wait { within }) => earliest(within),
            Some(FullPolicy::DropOldest) | None => earliest(LANE_PATIENCE),
            Some(FullPolicy::Spill) => until,
        };
        *self.lines.entry(line).or_default() += 1;
        self.waiting.push_back(Waiting { header, payload: payload.to_vec(), until });
    }

    /// Tries again what found no room.
    pub(crate) fn go_on(&mut self, shared: &Shared, port: &HostPort) -> bool {
        let before = self.waiting.len();
        let mut full: Vec<Line> = Vec::new();
        let now = Instant::now();
        for _ in 0..before {
            let Some(waiting) = self.waiting.pop_front() else { break };
            let header = waiting.header;
            let line = (header.source, header.destination, header.priority);
            let is_over = waiting.until.is_some_and(|until| now >= until);
            let sent = match full.contains(&line) {
                _ if is_over => Sent::Dead(Reason::Expired),
                true => Sent::Full(FullPolicy::Spill),
                false => self.try_send(shared, port, &header, &waiting.payload),
            };
            match sent {
                Sent::Full(_) => {
                    full.push(line);
                    self.waiting.push_back(waiting);
                    continue;
                }
                Sent::Dead(reason) => shared.bury(&header, reason),
                Sent::Done => {}
            }
            if let Some(count) = self.lines.get_mut(&line) {
                *count -= 1;
                if *count == 0 {
                    self.lines.remove(&line);
                }
            }
        }
        self.waiting.len() < before
    }

    fn try_send(&mut self, shared: &Shared, port: &HostPort, header: &Header, payload: &[u8]) -> Sent {
        let table = shared.routes.load();
        let entry = match table.find(ActorId(header.destination)) {
            Ok(entry) => entry,
            Err(reason) => return Sent::Dead(reason),
        };
        let inbox = Arc::clone(&entry.inbox);
        if inbox.accepts(header.kind, payload.len()).is_err() && header.flags & Header::ANSWER == 0 {
            return Sent::Dead(Reason::Refused);
        }
        if !inbox.take() {
            return Sent::Full(inbox.full);
        }
        let number = self.numbers.entry((header.source, header.destination, header.priority)).or_default();
        let header = Header { sequence: *number, generation: entry.generation, ..*header };
        if port.push(entry.executor, &header, payload).is_err() {
            inbox.untake();
            return Sent::Full(inbox.full);
        }
        *number = number.wrapping_add(1);
        Sent::Done
    }
}
