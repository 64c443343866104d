//! Resident kernels of host devices: each workgroup is a chain of slices in the engine's list.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use warpweft_core_types::{
    Deadline, DeviceId, Failure, MultiprocessorPool, Progress, ReservedMultiprocessors, Resident,
    ResidentDesc, ResidentError, ResidentState, SliceConfig, WorkId,
};

use crate::{
    device::HostDevice,
    engine::{Engine, Task},
    module::{HostLaunch, YieldSource},
};

/// How long a workgroup rests after it found nothing to do.
const IDLE_REST: Duration = Duration::from_micros(50);

/// The workgroups of a resident, of those that a device keeps for all.
fn reserve(
    budget: &Arc<MultiprocessorPool>,
    device: DeviceId,
    launch: &HostLaunch,
) -> Result<ReservedMultiprocessors, ResidentError> {
    let workgroups = launch.workgroup_count();
    let wanted = u32::try_from(workgroups).unwrap_or(u32::MAX);
    budget.take(wanted).map_err(|free| ResidentError::OverBudget {
        device,
        kernel: launch.contract().name.clone(),
        workgroups,
        wanted,
        free,
    })
}

/// A resident's workgroups and what they were told.
#[derive(Debug)]
pub(crate) struct ResidentCore {
    device: DeviceId,
    launch: HostLaunch,
    slice: SliceConfig,
    engine: Arc<Engine>,
    slices: AtomicU64,
    /// The current [`Order`], readable without the lock by running slices.
    order: AtomicU32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    workgroups: Vec<Phase>,
    started: Vec<bool>,
    failure: Option<Arc<Failure>>,
    parks: Parks,
    /// Held until no workgroup can be inside its kernel any more.
    seats: Option<ReservedMultiprocessors>,
}

/// Who wants the resident parked.
#[derive(Debug, Default)]
struct Parks {
    /// How often it was told to park: calls that wait for the same park have the same number.
    number: u64,
    /// Calls that wait.
    waiting: usize,
    /// One of them has said that it is parked.
    stands: bool,
}

/// What the workgroups were told last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Run,
    Park,
    Stop,
}

/// Where one workgroup is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// In the engine's list.
    Queued,
    /// Inside its kernel.
    Inside,
    /// Parked or stopped.
    Out,
    /// It said that it is done for good.
    Finished,
}

impl ResidentCore {
    /// Starts the workgroups and returns once each has begun its first slice.
    pub(crate) fn launch(
        device: DeviceId,
        launch: HostLaunch,
        desc: &ResidentDesc<'_>,
        engine: &Arc<Engine>,
        budget: &Arc<MultiprocessorPool>,
    ) -> Result<Arc<Self>, ResidentError> {
        desc.slice.check()?;
        let seats = reserve(budget, device, &launch)?;
        let count = seats.count() as usize;
        let core = Arc::new(Self {
            device,
            launch,
            slice: desc.slice,
            engine: Arc::clone(engine),
            slices: AtomicU64::new(0),
            order: AtomicU32::new(Order::Run as u32),
            state: Mutex::new(State {
                workgroups: vec![Phase::Queued; count],
                started: vec![false; count],
                failure: None,
                parks: Parks::default(),
                seats: Some(seats),
            }),
            changed: Condvar::new(),
        });
        for workgroup in 0..count {
            engine.push(Task::Slice(Arc::clone(&core), workgroup));
        }
        core.check_in(desc.check_in)?;
        Ok(core)
    }

    fn check_in(&self, time: Duration) -> Result<(), ResidentError> {
        let started = |state: &State| state.started.iter().filter(|&&begun| begun).count();
        let wanted = self.lock().workgroups.len();
        let settled = |state: &State| started(state) == wanted || state.failure.is_some();
        let in_time = self.wait_until(Deadline::within(time), settled);
        let state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(ResidentError::Failed(Arc::clone(failure)));
        }
        if in_time {
            return Ok(());
        }
        let started = started(&state);
        drop(state);
        self.give(Order::Stop);
        // Those that did start end at their next message boundary; one that does not is named instead.
        self.wait_outside(Deadline::within(time))?;
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Err(ResidentError::NotResident {
            kernel: self.name(),
            started: count(started),
            wanted: count(wanted),
        })
    }

    /// Runs the next slice of one workgroup, then puts it back in the list unless it was told otherwise.
    pub(crate) fn run_slice(self: Arc<Self>, workgroup: usize) {
        if !self.enter(workgroup) {
            return;
        }
        let slice = Slice { core: &self, began: Instant::now() };
        let work =
            WorkId::Resident { device: self.device, workgroup: u32::try_from(workgroup).unwrap_or(u32::MAX) };
        let outcome = self.launch.run(work, workgroup as u64, &slice);
        self.slices.fetch_add(1, Ordering::Relaxed);
        if let Some(again) = self.leave(workgroup, outcome) {
            let task = Task::Slice(Arc::clone(&self), workgroup);
            match again {
                Again::Now => self.engine.push(task),
                Again::At(due) => self.engine.push_at(due, task),
            }
        }
    }

    fn enter(&self, workgroup: usize) -> bool {
        let mut state = self.lock();
        let enters = self.order() == Order::Run;
        state.workgroups[workgroup] = if enters { Phase::Inside } else { Phase::Out };
        state.started[workgroup] |= enters;
        self.release_if_over(&mut state);
        self.changed.notify_all();
        enters
    }

    /// Notes how a slice ended, and says when the workgroup's next one is due, if there is one.
    fn leave(&self, workgroup: usize, outcome: Result<Progress, Arc<Failure>>) -> Option<Again> {
        let mut state = self.lock();
        let goes_on = self.order() == Order::Run;
        let (phase, again) = match outcome {
            Ok(Progress::Finished) => (Phase::Finished, None),
            Ok(Progress::Busy) if goes_on => (Phase::Queued, Some(Again::Now)),
            Ok(Progress::Idle) if goes_on => (Phase::Queued, Some(Again::At(Instant::now() + IDLE_REST))),
            Ok(_) => (Phase::Out, None),
            Err(failure) => {
                state.failure.get_or_insert(failure);
                self.set_order(Order::Stop);
                (Phase::Out, None)
            }
        };
        state.workgroups[workgroup] = phase;
        self.release_if_over(&mut state);
        self.changed.notify_all();
        again
    }

    fn resident_state(&self, state: &State) -> ResidentState {
        let over = state.workgroups.iter().all(|&phase| phase == Phase::Finished);
        match self.order() {
            _ if state.failure.is_some() => ResidentState::Failed,
            Order::Stop if state.inside().is_none() => ResidentState::Stopped,
            _ if over => ResidentState::Stopped,
            Order::Park if state.inside().is_none() => ResidentState::Parked,
            Order::Park | Order::Stop | Order::Run => ResidentState::Running,
        }
    }

    /// Refuses `action` unless the resident is in the state it needs.
    fn require(
        &self,
        needed: ResidentState,
        action: &'static str,
    ) -> Result<MutexGuard<'_, State>, ResidentError> {
        let state = self.lock();
        match self.resident_state(&state) {
            actual if actual == needed => Ok(state),
            ResidentState::Failed => {
                let failure = state.failure.clone().unwrap_or_else(|| Arc::new(Failure::Cancelled));
                Err(ResidentError::Failed(failure))
            }
            actual => Err(ResidentError::WrongState { action, state: actual.name() }),
        }
    }

    fn park(self: &Arc<Self>, deadline: Deadline) -> Result<(), ResidentError> {
        let number = self.begin_park()?;
        let waited = self.wait_outside(deadline);
        self.end_park(number, waited)
    }

    /// Tells the workgroups to leave, or joins a call that did.
    fn begin_park(&self) -> Result<u64, ResidentError> {
        // One lock for both, so that nobody ends it in between.
        let mut state = self.require(ResidentState::Running, "park")?;
        match self.order() {
            Order::Run => {
                self.set_order(Order::Park);
                state.parks = Parks { number: state.parks.number + 1, waiting: 1, stands: false };
            }
            Order::Park => state.parks.waiting += 1,
            Order::Stop => return Err(ResidentError::WrongState { action: "park", state: "ending" }),
        }
        Ok(state.parks.number)
    }

    /// What became of the park with this number. Only the last one to give up undoes it.
    fn end_park(
        self: &Arc<Self>,
        number: u64,
        waited: Result<(), ResidentError>,
    ) -> Result<(), ResidentError> {
        let mut state = self.lock();
        let is_mine = state.parks.number == number;
        if is_mine {
            state.parks.waiting -= 1;
        }
        if let Some(failure) = &state.failure {
            return Err(ResidentError::Failed(Arc::clone(failure)));
        }
        let gone = |state| Err(ResidentError::WrongState { action: "park", state });
        match self.order() {
            Order::Park if is_mine && state.inside().is_none() => {
                state.parks.stands = true;
                Ok(())
            }
            Order::Park if is_mine && state.parks.waiting == 0 && !state.parks.stands => {
                self.run_again(&mut state);
                waited
            }
            // It may have been stopped meanwhile, and then stays so.
            Order::Stop => waited.and_then(|()| gone("ending")),
            Order::Park | Order::Run => waited.and_then(|()| gone("running")),
        }
    }

    fn resume(self: &Arc<Self>) -> Result<(), ResidentError> {
        let mut state = self.require(ResidentState::Parked, "resume")?;
        self.run_again(&mut state);
        Ok(())
    }

    fn stop(&self, deadline: Deadline) -> Result<(), ResidentError> {
        self.give(Order::Stop);
        self.wait_outside(deadline)
    }

    /// Lets parked workgroups run; those still in the list were not reached by the order to park.
    fn run_again(self: &Arc<Self>, state: &mut State) {
        self.set_order(Order::Run);
        for (workgroup, phase) in state.workgroups.iter_mut().enumerate() {
            if *phase == Phase::Out {
                *phase = Phase::Queued;
                self.engine.push(Task::Slice(Arc::clone(self), workgroup));
            }
        }
    }

    fn wait_outside(&self, deadline: Deadline) -> Result<(), ResidentError> {
        if self.wait_until(deadline, |state| state.inside().is_none()) {
            return Ok(());
        }
        match self.lock().inside() {
            None => Ok(()),
            Some(workgroup) => Err(ResidentError::Unparkable {
                device: self.device,
                kernel: self.name(),
                workgroup: u32::try_from(workgroup).unwrap_or(u32::MAX),
            }),
        }
    }

    fn wait_until(&self, deadline: Deadline, done: impl Fn(&State) -> bool) -> bool {
        let mut state = self.lock();
        loop {
            if done(&state) {
                return true;
            }
            let remaining = deadline.remaining();
            if remaining.is_zero() {
                return false;
            }
            let woken = self.changed.wait_timeout(state, remaining);
            state = woken.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    fn give(&self, order: Order) {
        let mut state = self.lock();
        self.set_order(order);
        self.release_if_over(&mut state);
    }

    /// Gives the budget back once no workgroup is inside its kernel or can enter it again.
    fn release_if_over(&self, state: &mut State) {
        let over =
            self.order() == Order::Stop || state.workgroups.iter().all(|&phase| phase == Phase::Finished);
        if over && state.inside().is_none() {
            state.seats = None;
        }
    }

    fn order(&self) -> Order {
        // Relaxed: orders are given under the lock; slices only need to see them soon.
        match self.order.load(Ordering::Relaxed) {
            0 => Order::Run,
            1 => Order::Park,
            _ => Order::Stop,
        }
    }

    fn set_order(&self, order: Order) {
        self.order.store(order as u32, Ordering::Relaxed);
    }

    fn slices(&self) -> u64 {
        self.slices.load(Ordering::Relaxed)
    }

    fn name(&self) -> String {
        self.launch.contract().name.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Kernels run outside the lock; only this module's own code runs under it.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl State {
    /// The first workgroup inside its kernel.
    fn inside(&self) -> Option<usize> {
        self.workgroups.iter().position(|&phase| phase == Phase::Inside)
    }
}

/// When a workgroup's next slice is due.
#[derive(Debug, Clone, Copy)]
enum Again {
    Now,
    At(Instant),
}

/// A running slice: tells its kernel when to return.
struct Slice<'a> {
    core: &'a ResidentCore,
    began: Instant,
}

impl YieldSource for Slice<'_> {
    fn should_yield(&self) -> bool {
        let (config, lasted) = (&self.core.slice, self.began.elapsed());
        self.core.order() != Order::Run
            || lasted >= config.longest
            || (lasted >= config.shortest && self.core.engine.has_ready())
    }
}

/// The user's handle of a resident. It keeps the device open; dropping it asks the resident to stop.
#[derive(Debug)]
pub(crate) struct HostResident {
    pub(crate) core: Arc<ResidentCore>,
    pub(crate) _device: Arc<HostDevice>,
}

impl Resident for HostResident {
    fn state(&self) -> ResidentState {
        self.core.resident_state(&self.core.lock())
    }

    fn slices(&self) -> u64 {
        self.core.slices()
    }

    fn park(&self, deadline: Deadline) -> Result<(), ResidentError> {
        self.core.park(deadline)
    }

    fn resume(&self) -> Result<(), ResidentError> {
        self.core.resume()
    }

    fn stop(&self, deadline: Deadline) -> Result<(), ResidentError> {
        self.core.stop(deadline)
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.core.lock().failure.clone()
    }
}

impl Drop for HostResident {
    fn drop(&mut self) {
        self.core.give(Order::Stop);
    }
}
