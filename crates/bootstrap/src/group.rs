//! A group that has formed.

use std::{
    collections::BTreeSet,
    fmt,
    net::TcpListener,
    process,
    sync::Arc,
    task::Waker,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use warpweft_core_types::Deadline;

use crate::{
    Bind, GroupError, Health, HealthChange, JoinError, MemberInfo, Rank, Rendezvous, address,
    config::{JoinConfig, LimitConfig},
    gather::{Gathering, Plan},
    hub::{Hub, HubConfig},
    message::{CallKind, CallRequest, Hello},
    service::{Contact, Leader, Role, Service},
    shared::{Command, Shared, State},
    spoke::{Spoke, whole_ms},
    token,
};

/// The longest name of a call.
const NAME_BYTES: usize = 256;

/// The longest reason that is told to others.
const REASON_BYTES: usize = 4096;

/// Processes of one job that know and watch each other.
///
/// Dropping it leaves the group, which the others see as [`Loss::Left`](crate::Loss::Left); it takes half a
/// second at most.
pub struct Group {
    shared: Arc<Shared>,
    service: Option<JoinHandle<()>>,
    /// Where this member is reached if the group forms anew. Nobody accepts there before that.
    pub(crate) listener: Option<TcpListener>,
    pub(crate) config: JoinConfig,
    pub(crate) contact: Contact,
    pub(crate) epoch: u32,
    rank: Rank,
    members: Arc<[MemberInfo]>,
    /// The process that joined.
    process: u32,
}

impl Group {
    /// Joins a group: returns once everybody is there.
    ///
    /// # Errors
    ///
    /// Everything in [`JoinError`], by the deadline. What is wrong with the job as a whole, all members are
    /// told; who did not come is named.
    pub fn join(
        rendezvous: Rendezvous,
        config: JoinConfig,
        deadline: impl Into<Deadline>,
    ) -> Result<Self, JoinError> {
        let deadline = deadline.into();
        config.check()?;
        let has_others = config.size > 1;
        let joining = Joining::new(config, has_others)?;
        if !joining.config.leads() {
            return joining.follow(rendezvous.follow(deadline)?, deadline);
        }
        let led = rendezvous.lead(&joining.config, deadline)?;
        let plan = Plan::Everybody { size: joining.config.size };
        joining.lead(plan, led.contact, led.listener, led.withdraw, deadline)
    }

    /// A group of this process alone, which opens no socket.
    ///
    /// # Errors
    ///
    /// The system has no thread or no random bytes to give.
    pub fn alone() -> Result<Self, JoinError> {
        let nowhere = Rendezvous::Meeting(crate::Meeting::new());
        Self::join(nowhere, JoinConfig::new(Rank(0), 1), Duration::from_secs(10))
    }

    /// This member.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many members there are.
    pub fn size(&self) -> u32 {
        u32::try_from(self.members.len()).expect("ranks are 32 bits long")
    }

    /// Every member, by rank.
    pub fn members(&self) -> &[MemberInfo] {
        &self.members
    }

    /// How often the group has formed anew.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The run that the group belongs to.
    pub fn run(&self) -> &crate::RunId {
        &self.contact.run
    }

    /// Where this member listens for the others.
    pub fn bind(&self) -> &Bind {
        &self.config.bind
    }

    /// Waits until every member calls this.
    ///
    /// # Errors
    ///
    /// The deadline passes, a member is lost or aborts, or one calls something else.
    pub fn barrier(&self, name: &str, deadline: impl Into<Deadline>) -> Result<(), GroupError> {
        self.exchange(CallKind::Barrier, name, &[], deadline.into()).map(drop)
    }

    /// Gives every member the value of `root`; the others' are not looked at.
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier), and for a value that is too long or a root that there is not.
    pub fn broadcast(
        &self,
        name: &str,
        root: Rank,
        value: &[u8],
        deadline: impl Into<Deadline>,
    ) -> Result<Vec<u8>, GroupError> {
        self.check_rank(root)?;
        let value = if root == self.rank { value } else { &[] };
        let values = self.exchange(CallKind::Broadcast { root }, name, value, deadline.into())?;
        Ok(values.into_iter().next().unwrap_or_default())
    }

    /// Gives every member the values of all, by rank.
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier), and for values that are too long.
    pub fn all_gather(
        &self,
        name: &str,
        value: &[u8],
        deadline: impl Into<Deadline>,
    ) -> Result<Vec<Vec<u8>>, GroupError> {
        self.exchange(CallKind::AllGather, name, value, deadline.into())
    }

    /// Makes sure that all members have the same value.
    ///
    /// # Errors
    ///
    /// As [`all_gather`](Self::all_gather); members that differ are named, the same ones everywhere.
    pub fn agree(&self, name: &str, value: &[u8], deadline: impl Into<Deadline>) -> Result<(), GroupError> {
        let values = self.exchange(CallKind::Agree, name, value, deadline.into())?;
        let different = values.iter().zip(0..).find(|(value, _)| **value != values[0]);
        different.map_or(Ok(()), |(value, rank)| {
            let (ranks, values) = ([Rank(0), Rank(rank)], [values[0].clone(), value.clone()]);
            Err(GroupError::Disagreement { name: name.to_owned(), ranks, values })
        })
    }

    /// Tells all members how a step went for each: all go on, or all get the same failures.
    ///
    /// # Errors
    ///
    /// As [`barrier`](Self::barrier), and [`GroupError::Failed`] if the step failed for some.
    pub fn confirm(
        &self,
        name: &str,
        result: Result<(), &str>,
        deadline: impl Into<Deadline>,
    ) -> Result<(), GroupError> {
        let value = match result {
            Ok(()) => Vec::new(),
            Err(reason) => [b"!", cut(reason, REASON_BYTES).as_bytes()].concat(),
        };
        let values = self.exchange(CallKind::Confirm, name, &value, deadline.into())?;
        let failed = values.iter().zip(0..).filter(|(value, _)| !value.is_empty());
        let failures: Vec<(Rank, String)> =
            failed.map(|(value, rank)| (Rank(rank), String::from_utf8_lossy(&value[1..]).into())).collect();
        if failures.is_empty() { Ok(()) } else { Err(GroupError::Failed { name: name.to_owned(), failures }) }
    }

    /// Ends every call of every member, under way or later, with this reason.
    ///
    /// # Errors
    ///
    /// This process is a fork of the one that joined.
    pub fn abort(&self, reason: &str) -> Result<(), GroupError> {
        self.check_process()?;
        let reason = cut(reason, REASON_BYTES).to_owned();
        let told = reason.clone();
        // Here it holds at once, whatever has become of rank 0.
        self.shared.update(|state| {
            state.aborted.get_or_insert((self.rank, told));
        });
        self.shared.command(Command::Abort { reason });
        Ok(())
    }

    /// Leaves the group, which the others see as [`Loss::Left`](crate::Loss::Left): whoever still has a share of it finds
    /// that every call fails, and it does not form anew from here. It waits for nothing; dropping the group does.
    ///
    /// # Errors
    ///
    /// This process is a fork of the one that joined.
    pub fn leave(&self) -> Result<(), GroupError> {
        self.check_process()?;
        self.shared.update(|state| state.left = true);
        self.shared.command(Command::Leave);
        Ok(())
    }

    /// What is known of every member, by rank.
    ///
    /// # Errors
    ///
    /// This process is a fork of the one that joined.
    pub fn health(&self) -> Result<Vec<Health>, GroupError> {
        self.check_process()?;
        Ok(self.shared.lock().health.clone())
    }

    /// Why no call can succeed any more, if that is so.
    ///
    /// # Errors
    ///
    /// The reason: a member is lost or has aborted, this one has left, or this process is a fork.
    pub fn check(&self) -> Result<(), GroupError> {
        self.check_process()?;
        self.shared.lock().broken().map_or(Ok(()), Err)
    }

    /// Follows changes of health from now on.
    pub fn watch(&self) -> HealthWatch {
        // In a fork the lock may be held for ever, and the watch will say so when it is asked.
        let next = self.check_process().map_or(0, |()| self.shared.lock().changes.count());
        HealthWatch { shared: Arc::clone(&self.shared), next, process: self.process }
    }

    /// Wakes `waker` once, at the next change of anything: a member's health, an abort, an answer.
    pub fn wake_on_change(&self, waker: &Waker) {
        if self.check_process().is_ok() {
            let wakers = &mut self.shared.lock().wakers;
            // A future may be polled often before anything changes.
            if !wakers.iter().any(|known| known.will_wake(waker)) {
                wakers.push(waker.clone());
            }
        }
    }

    /// Waits until what is known of the members is as `is_right` wants it.
    ///
    /// # Errors
    ///
    /// The deadline passes, or this process is a fork.
    pub fn wait_health(
        &self,
        deadline: impl Into<Deadline>,
        mut is_right: impl FnMut(&[Health]) -> bool,
    ) -> Result<Vec<Health>, GroupError> {
        self.check_process()?;
        let found =
            self.shared.wait(deadline.into(), |state| is_right(&state.health).then(|| state.health.clone()));
        found.ok_or_else(|| GroupError::TimedOut { call: "wait_health".into(), missing: Vec::new() })
    }

    /// One call that all members make, in the same order.
    fn exchange(
        &self,
        kind: CallKind,
        name: &str,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>, GroupError> {
        self.check_process()?;
        fits(name.len(), NAME_BYTES)?;
        fits(value.len(), self.config.limits.value_bytes)?;
        let mut request =
            CallRequest { sequence: 0, kind, name: name.to_owned(), value: value.to_vec(), within_ms: 0 };
        let text = request.text();
        let timed_out = || GroupError::TimedOut { call: text.clone(), missing: Vec::new() };

        // Calls of several threads take turns; which one is first is theirs to order.
        let free = |state: &mut State| (!std::mem::replace(&mut state.calling, true)).then_some(());
        self.shared.wait(deadline, free).ok_or_else(timed_out)?;
        let _turn = Turn(&self.shared);

        let sequence = {
            let mut state = self.shared.lock();
            if let Some(error) = state.broken() {
                return Err(error);
            }
            state.next_sequence += 1;
            state.next_sequence - 1
        };
        request.sequence = sequence;
        request.within_ms = whole_ms(deadline.remaining());
        self.shared.command(Command::Call(request));
        let outcome = self.shared.wait(deadline, |state| {
            let outcome = state.outcomes.remove(&sequence);
            let outcome = outcome.map(|outcome| outcome.map_err(|failure| GroupError::of(failure, &text)));
            outcome.or_else(|| state.broken().map(Err))
        });
        outcome.unwrap_or_else(|| Err(timed_out()))
    }

    pub(crate) fn check_rank(&self, rank: Rank) -> Result<(), GroupError> {
        let size = self.size();
        if rank.0 < size { Ok(()) } else { Err(GroupError::UnknownRank { rank, size }) }
    }

    /// A fork has this memory and none of the threads: a lock may never be released.
    pub(crate) fn check_process(&self) -> Result<(), GroupError> {
        let (member, here) = (self.process, process::id());
        if member == here { Ok(()) } else { Err(GroupError::Forked { member, here }) }
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // The service belongs to the parent process, and so do the sockets' other ends.
            return;
        }
        // Once more is no harm.
        self.shared.command(Command::Leave);
        if let Some(service) = self.service.take()
            && service.join().is_err()
        {
            tracing::error!("the service of a group had panicked");
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank)
            .field("size", &self.members.len())
            .field("run", &self.contact.run)
            .field("epoch", &self.epoch)
            .finish_non_exhaustive()
    }
}

/// Gives the turn to the next thread that waits to call.
struct Turn<'a>(&'a Shared);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.update(|state| {
            state.calling = false;
            // Answers to calls that nobody waits for any more.
            state.outcomes.clear();
        });
    }
}

/// Follows changes of health, none left out while it is asked often enough.
#[derive(Debug)]
pub struct HealthWatch {
    shared: Arc<Shared>,
    next: u64,
    process: u32,
}

impl HealthWatch {
    /// The next change; nothing if there is none by the deadline.
    ///
    /// # Errors
    ///
    /// This process is a fork of the one that joined.
    pub fn next(&mut self, deadline: impl Into<Deadline>) -> Result<Option<HealthChange>, GroupError> {
        let (member, here) = (self.process, process::id());
        if member != here {
            return Err(GroupError::Forked { member, here });
        }
        let next = self.next;
        let found = self.shared.wait(deadline.into(), |state| state.changes.from(next));
        Ok(found.map(|(change, following)| {
            self.next = following;
            change
        }))
    }
}

/// A member that is about to join.
pub(crate) struct Joining {
    pub(crate) config: JoinConfig,
    started: Instant,
    listener: Option<TcpListener>,
    hello: Hello,
    #[cfg(target_os = "linux")]
    mailbox: Option<crate::mailbox::Mailbox>,
}

impl Joining {
    /// Opens what others reach this member at; a group of one needs none of it.
    pub(crate) fn new(config: JoinConfig, has_others: bool) -> Result<Self, JoinError> {
        let listener = has_others.then(|| address::listen(&config.bind, 0)).transpose()?;
        let nowhere = ([127, 0, 0, 1], 0).into();
        let at = listener.as_ref().map_or(Ok(nowhere), TcpListener::local_addr);
        let mut member = MemberInfo::here(config.rank, at.map_err(JoinError::system("ask for the port"))?);
        member.devices.clone_from(&config.devices);
        member.versions.clone_from(&config.versions);
        let own = env!("CARGO_PKG_VERSION").to_owned();
        member.versions.insert("warpweft".into(), own);
        #[cfg(target_os = "linux")]
        let mailbox = has_others.then(|| open_mailbox(&config)).flatten();
        #[cfg(target_os = "linux")]
        {
            member.mailbox = mailbox.as_ref().map(|mailbox| mailbox.address().clone());
        }
        let nonce = token::nonce().map_err(JoinError::system("make random bytes"))?;
        let mut instance = [0; 16];
        instance.copy_from_slice(&nonce[..16]);
        let hello = Hello {
            run: "".into(),
            epoch: 0,
            rank: Some(config.rank),
            size: config.size,
            instance,
            nonce,
            within_ms: 0,
            member,
        };
        let started = Instant::now();
        Ok(Self {
            config,
            started,
            listener,
            hello,
            #[cfg(target_os = "linux")]
            mailbox,
        })
    }

    /// As a member of a group that forms anew; without a rank, one that was not in it before.
    pub(crate) fn in_epoch(mut self, epoch: u32, rank: Option<Rank>) -> Self {
        self.hello.epoch = epoch;
        self.hello.rank = rank;
        self
    }

    pub(crate) fn lead(
        self,
        plan: Plan,
        contact: Contact,
        listener: Option<TcpListener>,
        withdraw: Option<Box<dyn FnOnce() + Send>>,
        deadline: Deadline,
    ) -> Result<Group, JoinError> {
        let JoinConfig { pulse, mut limits, size, .. } = self.config;
        // A whole job may come at once.
        limits.strangers = limits.strangers.max(size as usize + LimitConfig::SPARE_STRANGERS);
        let epoch = self.hello.epoch;
        let hub = HubConfig { token: contact.token.clone(), run: contact.run.clone(), epoch, pulse, limits };
        let hub = Hub::new(hub, Gathering::new(plan));
        self.start(Role::Lead(Box::new(Leader { hub, contact, listener, withdraw })), true, deadline)
    }

    pub(crate) fn follow(
        self,
        source: crate::service::Source,
        deadline: Deadline,
    ) -> Result<Group, JoinError> {
        self.start(Role::Follow(source), false, deadline)
    }

    fn start(self, role: Role, is_local: bool, deadline: Deadline) -> Result<Group, JoinError> {
        let span = tracing::debug_span!("join", rank = %self.config.rank, size = self.config.size);
        let _entered = span.enter();
        let shared = Arc::new(Shared::default());
        let until = deadline.instant().saturating_duration_since(self.started);
        let spoke = Spoke::new(self.hello, until, is_local);
        let service = Service::new(Arc::clone(&shared), role, spoke, self.started)
            .map_err(JoinError::system("watch sockets"))?;
        #[cfg(target_os = "linux")]
        let service = match self.mailbox {
            Some(mailbox) => service.with_mailbox(mailbox).map_err(JoinError::system("watch sockets"))?,
            None => service,
        };
        let service = thread::Builder::new()
            .name("warpweft-group".into())
            .spawn(move || service.run())
            .map_err(JoinError::system("start a thread"))?;
        // The service ends this itself, by the deadline.
        let forever = Deadline::within(Duration::MAX);
        let joined = shared.wait(forever, |state| state.joined.take());
        match joined.unwrap_or_else(|| Err(JoinError::TimedOut { reason: "a year has passed".into() })) {
            Ok((welcome, contact)) => Ok(Group {
                shared,
                service: Some(service),
                listener: self.listener,
                config: JoinConfig {
                    rank: welcome.rank,
                    size: u32::try_from(welcome.members.len()).unwrap_or(u32::MAX),
                    ..self.config
                },
                contact,
                epoch: welcome.epoch,
                rank: welcome.rank,
                members: welcome.members.into(),
                process: process::id(),
            }),
            Err(error) => {
                // It still brings the reason to the others, for half a second at most.
                let _panicked = service.join();
                Err(error)
            }
        }
    }
}

#[cfg(target_os = "linux")]
fn open_mailbox(config: &JoinConfig) -> Option<crate::mailbox::Mailbox> {
    match crate::mailbox::Mailbox::open(config.mailbox_folder.as_deref()) {
        Ok(mailbox) => Some(mailbox),
        Err(error) => {
            tracing::warn!(%error, "no descriptors can be taken from other members");
            None
        }
    }
}

/// Ranks that are not known to be lost.
pub(crate) fn present(health: &[Health]) -> BTreeSet<Rank> {
    let ranks = health.iter().zip(0..);
    ranks.filter(|(health, _)| health.is_present()).map(|(_, rank)| Rank(rank)).collect()
}

fn fits(size: usize, limit: usize) -> Result<(), GroupError> {
    let (size_bytes, limit_bytes) = (size as u64, limit as u64);
    if size <= limit { Ok(()) } else { Err(GroupError::TooLarge { size_bytes, limit_bytes }) }
}

/// The beginning of `text`, cut between characters.
fn cut(text: &str, longest: usize) -> &str {
    let end = (0..=longest.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
    &text[..end.unwrap_or(0)]
}
