//! Communicators: joining, calls one after another, and the end.

use std::{
    cell::RefCell,
    fmt, process,
    sync::{Arc, Condvar, Mutex, OnceLock, PoisonError},
    time::Instant,
};

use smallvec::SmallVec;
use warpweft_bootstrap::Group;
use warpweft_core_types::{CallError, CollectiveFailure, CollectiveOp, Deadline};

use crate::{
    HostCall, HostConfig, HostError, HostFailure, SliceCall,
    alone::Alone,
    call::Checked,
    collective::{self, Outcome},
    fabric::{Ended, Fabric, Occasion},
    join,
    origin::Origin,
    pairwise::{Counts, Pairs},
    sync::Ordering,
};

/// One rank of a communicator of one host.
///
/// Its calls are made one at a time, whichever threads make them; operations of all ranks have to be made in the same
/// order on all of them, and sends and receives in the same order between two.
///
/// Leaving it, which dropping it does too, tells the others: their calls that need this rank fail with
/// [`CollectiveFailure::PeerLost`].
// Ranks of one process would write each other's lines otherwise, if they lie side by side.
#[repr(align(128))]
pub struct HostCommunicator {
    group: Arc<Group>,
    origin: Origin,
    /// Nothing is shared by a rank alone.
    fabric: Option<Fabric>,
    turn: Turn,
    /// The end of a rank alone.
    aborted: Mutex<Option<CollectiveFailure>>,
    /// What its calls are told since it left. Written before the turn is looked at, and read by whoever has it.
    left: OnceLock<CollectiveFailure>,
}

/// How far a rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankProgress {
    /// Which.
    pub rank: u32,
    /// The number of the operation of all ranks that it began last.
    pub begun: u64,
    /// The number of the one that it ended last.
    pub ended: u64,
    /// Sends that it has ended.
    pub sent: u64,
    /// Receives that it has ended.
    pub received: u64,
    /// Whether it has dropped its communicator.
    pub has_left: bool,
}

/// What only the rank that calls uses.
#[derive(Debug)]
#[repr(align(128))]
struct State {
    /// The latest step, which all have published.
    step: u64,
    /// The latest operation of all ranks.
    number: u64,
    counts: Counts,
    alone: Alone,
}

impl HostCommunicator {
    /// Joins: all members of the group call it, in threads of one process, in processes of one host, or some of both.
    /// The communicator's ranks are the group's.
    ///
    /// # Errors
    ///
    /// See [`HostError`]. What is wrong on one rank, all are told.
    ///
    /// # Portability
    ///
    /// Several processes need Linux.
    pub fn join(
        group: Arc<Group>,
        config: &HostConfig,
        deadline: impl Into<Deadline>,
    ) -> Result<Self, HostError> {
        config.check(group.size())?;
        let fabric =
            if group.size() == 1 { None } else { Some(join::join(&group, config, deadline.into())?) };
        let state = State { step: 0, number: 0, counts: Counts::new(group.size()), alone: Alone::default() };
        Ok(Self {
            origin: Origin::here(),
            fabric,
            turn: Turn { free: Mutex::new((Some(Box::new(state)), 0)), changed: Condvar::new() },
            aborted: Mutex::new(None),
            left: OnceLock::new(),
            group,
        })
    }

    /// Which rank this is.
    pub fn rank(&self) -> u32 {
        self.group.rank().0
    }

    /// How many there are.
    pub fn size(&self) -> u32 {
        self.group.size()
    }

    /// Does this rank's part of an operation, or of several that begin together: their sends and receives make progress
    /// side by side, and while operations of all ranks, which go one after another, wait for others.
    ///
    /// It blocks until this rank's operands may be used again. Sends may have been taken without having arrived.
    ///
    /// # Errors
    ///
    /// - [`HostFailure::Call`] if a call makes no sense: none of them has begun.
    /// - [`CollectiveFailure::Mismatch`], the same on all ranks, if they call different things. What is in the
    ///   destination of that call is undefined; the other calls of the group are carried out, and the communicator goes
    ///   on.
    /// - Any other [`CollectiveFailure`] is the end of the communicator, which all later calls get as well; with one
    ///   exception: a call that does not get its turn by the deadline, because another of this rank takes that long,
    ///   has not begun.
    ///
    /// # Safety
    ///
    /// - The operands are memory that is valid for reading (sources) and writing (destinations) until this returns, or
    ///   unwinds.
    /// - Until then nobody else touches destinations, or writes sources.
    /// - Calls of one group share no bytes of a destination. Within a call they may be shared where the result lies in
    ///   the place of this rank's own operand, as with [`warpweft_core_types::CollectiveCall::new`].
    pub unsafe fn run(&self, calls: &[HostCall<'_>], deadline: Deadline) -> Result<(), HostFailure> {
        self.check_process()?;
        let checked = calls.iter().map(|call| Checked::new(call, self.rank(), self.size()));
        let checked: SmallVec<[Checked<'_>; 2]> = checked.collect::<Result<_, CallError>>()?;
        let name = || checked.first().map_or_else(|| "nothing".into(), |call| call.op.to_string());
        let mut state = self.begin(deadline, &name)?;
        let Some(fabric) = &self.fabric else {
            // SAFETY: the operands are the caller's to lend.
            return unsafe { state.alone.run(&checked) };
        };
        // SAFETY: the operands are the caller's to lend until this returns.
        self.settle(fabric, |fabric| unsafe { run(fabric, &mut state, &checked, deadline) })
    }

    /// As [`Self::run`], with operands that are slices.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn run_slices(
        &self,
        calls: &mut [SliceCall<'_>],
        deadline: impl Into<Deadline>,
    ) -> Result<(), HostFailure> {
        let (rank, size) = (self.rank(), self.size());
        let calls: SmallVec<[HostCall<'_>; 2]> =
            calls.iter_mut().map(|call| call.as_call(rank, size)).collect();
        // SAFETY: slices are valid and borrowed until this returns: sources shared, destinations exclusively, which is
        // why they share no bytes but in place, where the range is made of one slice.
        unsafe { self.run(&calls, deadline.into()) }
    }

    /// Waits until all ranks call it.
    ///
    /// # Errors
    ///
    /// As [`Self::run`].
    pub fn barrier(&self, deadline: impl Into<Deadline>) -> Result<(), HostFailure> {
        let deadline = deadline.into();
        self.check_process()?;
        let name = || "barrier".to_owned();
        let mut state = self.begin(deadline, &name)?;
        let Some(fabric) = &self.fabric else { return Ok(()) };
        self.settle(fabric, |fabric| {
            numbered(fabric, &mut state, |step, number| {
                collective::barrier(fabric, step, &Occasion::new(number, &name, deadline))
            })
        })
    }

    /// Ends what is under way here and on all other ranks, and refuses what comes later, with this failure; unless the
    /// communicator has ended before.
    pub fn abort(&self, failure: CollectiveFailure) {
        if self.check_process().is_err() {
            return;
        }
        match &self.fabric {
            Some(fabric) => fabric.end(failure),
            None => {
                self.aborted.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
            }
        }
    }

    /// Takes this rank out, whoever still has a share of it: its later calls are refused with this failure, and the
    /// others' that need it fail. A call of it that is under way is ended on all ranks.
    pub fn leave(&self, failure: CollectiveFailure) {
        if self.check_process().is_err() {
            return;
        }
        let failure = self.left.get_or_init(|| failure);
        if self.turn.is_taken() {
            self.abort(failure.clone());
        }
        self.tell_that_it_left();
    }

    /// Why the communicator has ended, if it has.
    pub fn failure(&self) -> Option<CollectiveFailure> {
        match &self.fabric {
            Some(fabric) => fabric.failure(),
            None => self.aborted.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    /// How far every rank is, by rank; a rank alone counts nothing.
    pub fn progress(&self) -> Vec<RankProgress> {
        let Some(fabric) = &self.fabric else { return Vec::new() };
        let of = |rank| {
            let progress = &fabric.region.station(rank).progress;
            // Each is read by itself: they tell people how far it is, and order nothing.
            RankProgress {
                rank,
                begun: progress.begun.load(Ordering::Relaxed),
                ended: progress.ended.load(Ordering::Relaxed),
                sent: progress.sent.load(Ordering::Relaxed),
                received: progress.received.load(Ordering::Relaxed),
                has_left: progress.left.load(Ordering::Relaxed) != 0,
            }
        };
        (0..fabric.size).map(of).collect()
    }

    /// The group whose members the ranks are.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Takes the turn of this rank.
    fn begin(&self, deadline: Deadline, name: &dyn Fn() -> String) -> Result<Held<'_>, HostFailure> {
        let check = || self.failure().map_or(Ok(()), |failure| Err(HostFailure::from(failure)));
        check()?;
        let held = self.turn.take(deadline, name)?;
        // What a call that failed leaves of the state is of no use to the next one.
        check()?;
        // The lock of the turn orders it: who leaves finds the turn taken, or this finds that it has left.
        if let Some(failure) = self.left.get() {
            return Err(failure.clone().into());
        }
        Ok(held)
    }

    /// Turns an end into its reason, once nobody uses this rank's operands any more. So does a panic of a reduction.
    fn settle(
        &self,
        fabric: &Fabric,
        work: impl FnOnce(&Fabric) -> Result<Result<(), HostFailure>, Ended>,
    ) -> Result<(), HostFailure> {
        let unwinding = Unwinding(fabric);
        let outcome = work(fabric);
        std::mem::forget(unwinding);
        outcome.unwrap_or_else(|Ended| {
            fabric.wait_until_outside();
            let lost =
                || CollectiveFailure::Aborted { rank: fabric.rank, reason: "it did not say why".into() };
            Err(fabric.failure().unwrap_or_else(lost).into())
        })
    }

    fn tell_that_it_left(&self) {
        if let Some(fabric) = &self.fabric {
            // Release: what this rank has published comes first for those who see that it has left.
            fabric.region.station(fabric.rank).progress.left.store(1, Ordering::Release);
        }
    }

    fn check_process(&self) -> Result<(), HostFailure> {
        if self.origin.is_here() {
            return Ok(());
        }
        Err(HostFailure::Forked { joined: self.origin.process, here: process::id() })
    }
}

impl Drop for HostCommunicator {
    fn drop(&mut self) {
        if self.check_process().is_ok() {
            self.tell_that_it_left();
        }
    }
}

impl fmt::Debug for HostCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("HostCommunicator");
        text.field("rank", &self.rank()).field("size", &self.size()).field("failure", &self.failure());
        text.finish_non_exhaustive()
    }
}

/// What a panic leaves behind.
struct Unwinding<'a>(&'a Fabric);

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        let reason = "a reduction of the caller's panicked".into();
        self.0.end(CollectiveFailure::Aborted { rank: self.0.rank, reason });
        self.0.wait_until_outside();
    }
}

/// # Safety
///
/// As [`HostCommunicator::run`]; if it is [`Ended`], operands are lent until nobody is inside.
unsafe fn run(
    fabric: &Fabric,
    state: &mut State,
    calls: &[Checked<'_>],
    deadline: Deadline,
) -> Result<Result<(), HostFailure>, Ended> {
    let mut counts = std::mem::take(&mut state.counts);
    let outcome = {
        let mut pairs = Pairs::new(&mut counts);
        calls.iter().for_each(|call| pairs.push(call));
        let has_pairs = calls.iter().any(|call| call.op.is_pairwise());
        let pairs = RefCell::new(pairs);
        let beside = has_pairs.then_some(&pairs);
        // SAFETY: as the caller's.
        unsafe { run_all(fabric, state, calls, beside, deadline) }
    };
    state.counts = counts;
    outcome
}

/// # Safety
///
/// As [`run`].
unsafe fn run_all(
    fabric: &Fabric,
    state: &mut State,
    calls: &[Checked<'_>],
    pairs: Option<&RefCell<Pairs<'_>>>,
    deadline: Deadline,
) -> Result<Result<(), HostFailure>, Ended> {
    let mut outcome = Ok(());
    let advance = pairs.map(|pairs| move || pairs.borrow_mut().advance(fabric));
    let beside = advance.as_ref().map(|advance| -> &dyn Fn() { advance });
    if let Some(advance) = beside {
        advance();
    }
    for call in calls.iter().filter(|call| !call.op.is_pairwise()) {
        let name = || call.op.to_string();
        let came = numbered(fabric, state, |step, number| {
            let mut occasion = Occasion::new(number, &name, deadline);
            occasion.beside = beside;
            // SAFETY: as the caller's.
            unsafe { collective::run(fabric, step, call, &occasion) }
        })?;
        outcome = outcome.and(came);
    }
    let Some(pairs) = pairs else { return Ok(outcome) };
    let open = pairs.borrow().open();
    let (number, name) = open.unwrap_or_default();
    Pairs::finish(pairs, fabric, &Occasion::new(number, &|| name.clone(), deadline))?;
    let progress = &fabric.region.station(fabric.rank).progress;
    for call in calls {
        match call.op {
            CollectiveOp::Send { .. } => count(&progress.sent),
            CollectiveOp::Recv { .. } => count(&progress.received),
            _ => {}
        }
    }
    let mismatch = pairs.borrow().mismatch();
    Ok(outcome.and(
        mismatch.map_or(Ok(()), |(number, what)| Err(CollectiveFailure::Mismatch { number, what }.into())),
    ))
}

/// Counts an operation of all ranks.
fn numbered(
    fabric: &Fabric,
    state: &mut State,
    work: impl FnOnce(&mut u64, u64) -> Result<Outcome, Ended>,
) -> Result<Result<(), HostFailure>, Ended> {
    state.number += 1;
    let number = state.number;
    let progress = &fabric.region.station(fabric.rank).progress;
    progress.begun.store(number, Ordering::Relaxed);
    let outcome = work(&mut state.step, number)?;
    progress.ended.store(number, Ordering::Relaxed);
    Ok(match outcome {
        Outcome::Done => Ok(()),
        Outcome::Mismatch(what) => Err(CollectiveFailure::Mismatch { number, what }.into()),
    })
}

/// Only this rank writes it, so that no addition is lost.
fn count(counter: &crate::sync::AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

/// The calls of a rank, one at a time: whoever has the state has the turn.
#[derive(Debug)]
struct Turn {
    /// The state while nobody has it, and how many wait for it.
    free: Mutex<(Option<Box<State>>, u32)>,
    changed: Condvar,
}

impl Turn {
    fn is_taken(&self) -> bool {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).0.is_none()
    }

    fn take(&self, deadline: Deadline, name: &dyn Fn() -> String) -> Result<Held<'_>, HostFailure> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = free.0.take() {
            return Ok(Held { turn: self, state: Some(state) });
        }
        let began = Instant::now();
        free.1 += 1;
        loop {
            let remaining = deadline.remaining();
            let taken = free.0.take();
            if taken.is_some() || remaining.is_zero() {
                free.1 -= 1;
                let held = taken.map(|state| Held { turn: self, state: Some(state) });
                return held.ok_or_else(|| {
                    let waiting = "another call of this rank was under way".into();
                    CollectiveFailure::TimedOut { number: 0, op: name(), after: began.elapsed(), waiting }
                        .into()
                });
            }
            free = self.changed.wait_timeout(free, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The turn, until it is dropped.
struct Held<'a> {
    turn: &'a Turn,
    state: Option<Box<State>>,
}

impl std::ops::Deref for Held<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.state.as_ref().expect("it is there until the turn is given back")
    }
}

impl std::ops::DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("it is there until the turn is given back")
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut free = self.turn.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.0 = self.state.take();
        if free.1 > 0 {
            self.turn.changed.notify_one();
        }
    }
}
