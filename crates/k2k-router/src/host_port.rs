//! How the host's threads send to actors.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use warpweft_core_types::Deadline;

use crate::{
    Header, SendError,
    actor::{ActorId, FullPolicy, SendOptions},
    device::Link,
    error::RingError,
    inbox::Inbox,
    ring::SharedProducer,
    service::Request,
    shared::Shared,
    wire::PRIORITIES,
};

/// How long a thread that waits for room spins, and then rests between looks.
const SPIN: Duration = Duration::from_micros(20);
const REST: Duration = Duration::from_micros(50);

/// How long a sender waits for room in a lane where the receiver's policy says nothing of it.
const LANE_PATIENCE: Duration = Duration::from_secs(1);

/// The host's lanes to one executor.
#[derive(Debug)]
pub(crate) enum HostLanes {
    /// By priority.
    Ring([SharedProducer; PRIORITIES]),
    /// To a kernel.
    Link(Arc<Link>),
}

/// The host's lanes, to each executor.
#[derive(Debug)]
pub(crate) struct HostPort {
    lanes: Vec<HostLanes>,
    shared: Arc<Shared>,
    /// Actors with messages that were spilled.
    spilling: Mutex<Vec<Arc<Inbox>>>,
}

/// The host's line to one actor: its numbers are given under a lock, so that they come in order.
#[derive(Debug, Default)]
pub(crate) struct HostLine {
    numbers: [u32; PRIORITIES],
    spilled: VecDeque<(Header, Vec<u8>)>,
}

/// What to do where there is no room.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Patience {
    None,
    Until(Deadline),
}

/// A message of the host's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outward<'a> {
    pub(crate) to: ActorId,
    pub(crate) kind: u32,
    pub(crate) payload: &'a [u8],
    pub(crate) options: SendOptions,
    pub(crate) correlation: u32,
}

impl HostPort {
    pub(crate) fn new(lanes: Vec<HostLanes>, shared: Arc<Shared>) -> Self {
        Self { lanes, shared, spilling: Mutex::default() }
    }

    /// Puts a message into the lane to an executor, whoever sent it.
    pub(crate) fn push(&self, executor: usize, header: &Header, payload: &[u8]) -> Result<(), RingError> {
        match &self.lanes[executor] {
            HostLanes::Ring(lanes) => lanes[usize::from(header.priority)].try_push(header, payload),
            HostLanes::Link(link) => link.push(executor, header, payload),
        }
    }

    /// Sends a message by the receiver's policy.
    pub(crate) fn send(
        &self,
        inbox: &Arc<Inbox>,
        message: &Outward<'_>,
        patience: Patience,
    ) -> Result<(), SendError> {
        inbox.accepts(message.kind, message.payload.len())?;
        let began = Instant::now();
        loop {
            if self.try_send(inbox, message)? {
                return Ok(());
            }
            let actor = message.to;
            let Patience::Until(deadline) = patience else { return Err(SendError::Full { actor }) };
            let limit = match inbox.full {
                FullPolicy::Reject => return Err(SendError::Full { actor }),
                FullPolicy::Wait { within } => within,
                FullPolicy::DropOldest | FullPolicy::Spill => LANE_PATIENCE,
            };
            if deadline.is_past() || began.elapsed() >= limit {
                return Err(SendError::Timeout { actor });
            }
            if began.elapsed() < SPIN {
                std::hint::spin_loop();
            } else {
                thread::park_timeout(REST);
            }
        }
    }

    /// Whether it was taken, be it into host memory.
    fn try_send(&self, inbox: &Arc<Inbox>, message: &Outward<'_>) -> Result<bool, SendError> {
        let mut line = lock(&inbox.host);
        let header = self.header(inbox, message);
        if !line.spilled.is_empty() {
            self.drain(inbox, &mut line)?;
        }
        if line.spilled.is_empty() && self.send_one(inbox, &mut line, &header, message.payload)? {
            return Ok(true);
        }
        if inbox.full != FullPolicy::Spill {
            return Ok(false);
        }
        if line.spilled.is_empty() {
            lock(&self.spilling).push(Arc::clone(inbox));
            // Without the service nobody serves it either.
            let _gone = self.shared.service.send(Request::Look);
        }
        line.spilled.push_back((header, message.payload.to_vec()));
        Ok(true)
    }

    fn header(&self, inbox: &Inbox, message: &Outward<'_>) -> Header {
        let Outward { to, kind, options, correlation, .. } = *message;
        let deadline = options
            .deadline
            .map_or(0, |deadline| u32::try_from(deadline.as_micros()).unwrap_or(u32::MAX).max(1));
        Header {
            destination: to.0,
            kind,
            correlation,
            deadline_us: deadline,
            priority: options.priority.unwrap_or(inbox.priority) as u8,
            ..Header::default()
        }
    }

    fn send_one(
        &self,
        inbox: &Inbox,
        line: &mut HostLine,
        header: &Header,
        payload: &[u8],
    ) -> Result<bool, SendError> {
        // Behind the lock, so that whoever changed the route and then had the lock knows that nobody uses the old one.
        let table = self.shared.routes.load();
        let actor = ActorId(header.destination);
        let entry = table.find(actor).map_err(|reason| SendError::Gone { actor, reason })?;
        if !inbox.take() {
            return Ok(false);
        }
        let priority = usize::from(header.priority);
        let mut header = Header { sequence: line.numbers[priority], generation: entry.generation, ..*header };
        if header.deadline_us != 0 || header.sequence.is_multiple_of(self.shared.sample_every + 1) {
            header.flags |= Header::TIMED;
            header.sent_ns = self.shared.now_ns();
        }
        if self.push(entry.executor, &header, payload).is_err() {
            inbox.untake();
            return Ok(false);
        }
        line.numbers[priority] = header.sequence.wrapping_add(1);
        Ok(true)
    }

    /// Sends what was spilled, as far as there is room.
    fn drain(&self, inbox: &Inbox, line: &mut HostLine) -> Result<(), SendError> {
        while let Some((header, payload)) = line.spilled.pop_front() {
            let pushed = self.send_one(inbox, line, &header, &payload);
            if pushed != Ok(true) {
                line.spilled.push_front((header, payload));
                return pushed.map(|_| ());
            }
        }
        Ok(())
    }

    /// Sends everything that was spilled, as far as there is room; says whether some is left.
    pub(crate) fn drain_all(&self) -> bool {
        // Not under the lock of the list: senders take it under that of their line.
        let mut spilling = std::mem::take(&mut *lock(&self.spilling));
        spilling.retain(|inbox| {
            let mut line = lock(&inbox.host);
            if let Err(SendError::Gone { reason, .. }) = self.drain(inbox, &mut line) {
                for (header, _) in line.spilled.drain(..) {
                    self.shared.bury(&header, reason);
                }
            }
            !line.spilled.is_empty()
        });
        let is_left = !spilling.is_empty();
        lock(&self.spilling).extend(spilling);
        is_left
    }

    /// Returns when nobody sends by a route from before.
    pub(crate) fn switch(inbox: &Inbox) {
        drop(lock(&inbox.host));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
