//! What the executors, the host's side and the service thread share.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use crate::{
    Header,
    actor::ActorId,
    dead_letter::{DeadLetters, Reason},
    device::{Link, Remote},
    epoch::Order,
    executor::{Core, Local},
    reply::Replies,
    service::Request,
    stats::{Counters, PendingMessage},
    table::{Routes, Ways},
    trace::Spans,
};

/// What a whole system shares.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) routes: Routes,
    pub(crate) ways: Ways,
    pub(crate) executors: Vec<ExecutorSide>,
    pub(crate) replies: Arc<Replies>,
    pub(crate) dead: DeadLetters,
    pub(crate) service: mpsc::Sender<Request>,
    /// Where times count from.
    pub(crate) origin: Instant,
    /// One of so many messages has its time taken.
    pub(crate) sample_every: u32,
    /// Cores are left for all executors, so that they may spin.
    pub(crate) may_spin: bool,
}

/// What others see of an executor.
#[derive(Debug)]
pub(crate) struct ExecutorSide {
    /// The position of its device.
    pub(crate) device: usize,
    /// Its number among the executors that are kernels, if it is one.
    pub(crate) number: Option<u32>,
    remote: OnceLock<Remote>,
    link: OnceLock<Weak<Link>>,
    mail: Mutex<Vec<Command>>,
    has_mail: AtomicBool,
    /// The actor whose handler runs, and how many ran before: see [`Beat`].
    beat: AtomicU64,
    /// The actor whose handler does not return, 0 if there is none.
    looping: AtomicU64,
    is_lost: AtomicBool,
    pub(crate) counters: Counters,
    pub(crate) spans: Spans,
}

/// What an executor is told at its next message boundary.
#[derive(Debug)]
pub(crate) enum Command {
    /// Serve this actor.
    Insert(Box<Local>),
    /// An order of an epoch.
    Order {
        actor: ActorId,
        epoch: u32,
        order: Order,
        /// The actor, if it is to be placed.
        core: Option<Box<Core>>,
        /// Whether the answer has to bring the actor.
        brings: bool,
    },
    /// Forget this actor.
    Kill(ActorId, Reason),
    /// Say what waits.
    Inspect(mpsc::Sender<Vec<PendingMessage>>),
}

/// Which handler runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Beat(u64);

impl Beat {
    /// The actor whose handler runs, if one does.
    pub(crate) const fn inside(self) -> Option<ActorId> {
        match (self.0 >> 32) as u32 {
            0 => None,
            actor => Some(ActorId(actor)),
        }
    }
}

impl ExecutorSide {
    pub(crate) fn new(device: usize, number: Option<u32>, devices: usize, spans: usize) -> Self {
        Self {
            device,
            number,
            remote: OnceLock::new(),
            link: OnceLock::new(),
            mail: Mutex::default(),
            has_mail: AtomicBool::new(false),
            beat: AtomicU64::new(0),
            looping: AtomicU64::new(0),
            is_lost: AtomicBool::new(false),
            counters: Counters::new(devices),
            spans: Spans::new(spans),
        }
    }

    pub(crate) fn tell(&self, command: Command) {
        self.mail().push(command);
        // Release: whoever sees it finds the command, which the lock would do as well.
        self.has_mail.store(true, Ordering::Release);
        if let Some(link) = self.link.get().and_then(Weak::upgrade) {
            link.wake();
        }
    }

    /// It is a kernel, which tells what it does in host memory.
    pub(crate) fn set_remote(&self, remote: Remote) {
        let _once = self.remote.set(remote);
    }

    /// Who looks after it.
    pub(crate) fn set_link(&self, link: &Arc<Link>) {
        let _once = self.link.set(Arc::downgrade(link));
    }

    pub(crate) fn link(&self) -> Option<Arc<Link>> {
        self.link.get().and_then(Weak::upgrade)
    }

    /// Messages that it has served.
    pub(crate) fn served(&self) -> u64 {
        self.remote.get().map_or_else(|| self.counters.served.get(), Remote::served)
    }

    /// Messages that it has handed on.
    pub(crate) fn handed_on(&self) -> u64 {
        self.remote.get().map_or_else(|| self.counters.handed_on.get(), Remote::handed_on)
    }

    /// Whether there is something to take.
    pub(crate) fn has_mail(&self) -> bool {
        // Relaxed: whoever takes it looks again.
        self.has_mail.load(Ordering::Relaxed)
    }

    pub(crate) fn take_mail(&self) -> Option<Vec<Command>> {
        // Acquire: it pairs with `tell`.
        if !self.has_mail.load(Ordering::Acquire) {
            return None;
        }
        let mut mail = self.mail();
        // Relaxed: under the lock.
        self.has_mail.store(false, Ordering::Relaxed);
        Some(std::mem::take(&mut *mail))
    }

    fn mail(&self) -> MutexGuard<'_, Vec<Command>> {
        // Nothing panics under the lock.
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Relaxed in all that follows: signs of life, which order nothing.

    /// A handler begins. Only the executor says so.
    pub(crate) fn enter(&self, actor: ActorId, count: u32) {
        self.beat.store(u64::from(actor.0) << 32 | u64::from(count), Ordering::Relaxed);
    }

    /// It has returned.
    pub(crate) fn leave(&self, count: u32) {
        self.beat.store(count.into(), Ordering::Relaxed);
    }

    pub(crate) fn beat(&self) -> Beat {
        Beat(self.remote.get().map_or_else(|| self.beat.load(Ordering::Relaxed), Remote::beat))
    }

    pub(crate) fn looping(&self) -> Option<ActorId> {
        let actor = u32::try_from(self.looping.load(Ordering::Relaxed)).ok();
        actor.filter(|&actor| actor != 0).map(ActorId)
    }

    pub(crate) fn set_looping(&self, actor: Option<ActorId>) {
        self.looping.store(actor.map_or(0, |actor| actor.0.into()), Ordering::Relaxed);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    pub(crate) fn set_lost(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    /// The lowest bits of the time in nanoseconds.
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what is wanted")]
    pub(crate) fn now_ns(&self) -> u32 {
        self.origin.elapsed().as_nanos() as u32
    }

    pub(crate) fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    /// The first executor of a device, which relays.
    pub(crate) fn executor_of(&self, device: usize) -> Option<usize> {
        self.executors.iter().position(|executor| executor.device == device)
    }

    /// A message that will not be served. Whoever waits for its answer hears of it.
    pub(crate) fn bury(&self, header: &Header, reason: Reason) {
        self.dead.add(*header, reason);
        if header.correlation != 0 && header.flags & Header::ANSWER == 0 && header.source == ActorId::HOST.0 {
            self.replies.fail(header.correlation, reason);
        }
    }
}
