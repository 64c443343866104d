//! Resident kernels, batch by batch: a launch that returns by itself is made again and again.
//!
//! Vulkan promises no launch that it sees what the host writes after it was submitted, and no workgroup that it goes on
//! beside others. So a resident here is no launch that stays: each batch takes as many turns as it was given, and what
//! the host wrote before it is seen by it. A word that tells a batch to leave early is looked at in every turn; where a
//! driver does not show it in time, the batch ends with its turns.

use std::{
    fmt,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use warpweft_core_types::{
    AllocError, Buffer as _, BufferDesc, Deadline, DeviceId, DriverError, Failure, Launch,
    MultiprocessorPool, OwnedLaunch, ReservedMultiprocessors, Resident, ResidentDesc, ResidentError,
    ResidentState, SliceConfig, WorkId,
};

use crate::{
    chores::Hold,
    gate::Unparkable,
    memory::{Arena, VulkanBuffer},
    record::Recording,
    timeline::{Line, Ticket},
    work::Tools,
};

/// Bytes before the words of the workgroups; `slice.wgsl` says what they are.
const HEADER: usize = 16;
const LEAVE: usize = 4;

/// What a workgroup says of itself in its word, in front of failures.
const ABSENT: u32 = 0;
const INSIDE: u32 = 1;
const IDLE: u32 = 3;
const FINISHED: u32 = 4;
const FAILED: u32 = 256;

/// Turns of a batch: of the first one, and the fewest and the most.
const TURNS: (u32, u32, u32) = (256, 16, 1 << 24);

/// How long a batch shall take while others want the device, and at most.
const SHORT: Duration = Duration::from_micros(100);
const LONG: Duration = Duration::from_millis(2);

/// How long a resident rests that found nothing to do.
const IDLE_REST: Duration = Duration::from_micros(50);

/// A pause between two looks of whoever waits for workgroups to begin.
const GLANCE: Duration = Duration::from_micros(200);

/// A wait for a batch, after which the wait is made again: a kernel that does not return must not end the thread.
const ROUND: Duration = Duration::from_secs(1);

/// Workgroups that the devices of one silicon keep for residents. None has to be on the device beside another, so this is a policy.
pub(crate) fn budget(multiprocessors: u32) -> MultiprocessorPool {
    MultiprocessorPool::new(multiprocessors.max(64))
}

/// Those of a resident.
fn reserve(
    budget: &Arc<MultiprocessorPool>,
    device: DeviceId,
    launch: &Launch<'_>,
) -> Result<ReservedMultiprocessors, ResidentError> {
    let workgroups = launch.workgroup_count();
    let wanted = u32::try_from(workgroups).unwrap_or(u32::MAX);
    budget.take(wanted).map_err(|free| ResidentError::OverBudget {
        device,
        kernel: launch.kernel().contract().name.clone(),
        workgroups,
        wanted,
        free,
    })
}

/// What a device lends to its residents.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quarters<'a> {
    pub(crate) tools: &'a Arc<Tools>,
    pub(crate) arena: &'a Arena,
    pub(crate) budget: &'a Arc<MultiprocessorPool>,
}

/// A resident's launch, and what it was told.
pub(crate) struct ResidentCore {
    tools: Arc<Tools>,
    launch: OwnedLaunch,
    kernel: String,
    workgroups: u32,
    /// Turns, the order to leave, and a word of each workgroup.
    words: VulkanBuffer,
    slice: SliceConfig,
    slices: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    order: Order,
    /// A batch is under way.
    inside: bool,
    /// A batch was over.
    checked_in: bool,
    /// Batches that were over.
    batches: u64,
    parks: Parks,
    /// Every workgroup said that it is done for good.
    finished: bool,
    failure: Option<Arc<Failure>>,
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

/// What the resident was told last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Run,
    Park,
    Stop,
}

/// What a batch left behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Busy,
    /// No workgroup found anything to do.
    Idle,
    Finished,
    Failed {
        workgroup: u32,
        code: u32,
    },
}

/// The batches as the driver gets them.
struct Feed {
    recording: Recording,
    /// What the first batch waits for.
    zeroed: Vec<Ticket>,
    line: Arc<Line>,
    driver_queue: usize,
    turns: u32,
}

impl ResidentCore {
    /// Starts the workgroups and returns once each has begun its first batch.
    pub(crate) fn launch(
        quarters: Quarters<'_>,
        desc: &ResidentDesc<'_>,
    ) -> Result<Arc<Self>, ResidentError> {
        desc.slice.check()?;
        let tools = quarters.tools;
        let seats = reserve(quarters.budget, tools.gpu.id, &desc.launch)?;
        let size = HEADER as u64 + 4 * u64::from(seats.count());
        let words = quarters.arena.allocate(&BufferDesc::host_visible(size)).map_err(no_words)?;
        let core = Arc::new(Self {
            tools: Arc::clone(tools),
            launch: OwnedLaunch::from(&desc.launch),
            kernel: desc.launch.kernel().contract().name.clone(),
            workgroups: seats.count(),
            words,
            slice: desc.slice,
            slices: AtomicU64::new(0),
            state: Mutex::new(State {
                order: Order::Run,
                inside: false,
                checked_in: false,
                batches: 0,
                parks: Parks::default(),
                finished: false,
                failure: None,
                seats: Some(seats),
            }),
            changed: Condvar::new(),
        });
        let mut feed =
            core.feed(&desc.launch).map_err(|error| ResidentError::Failed(tools.gpu.judge(error)))?;
        tools.gpu.gate.add(&core);
        let shared = Arc::clone(&core);
        let thread = thread::Builder::new().name(format!("{}/resident", tools.gpu.id));
        thread.spawn(move || shared.run(&mut feed)).map_err(|error| ResidentError::Refused {
            device: tools.gpu.id,
            reason: format!("there is no thread for it: {error}"),
        })?;
        core.check_in(desc.check_in)?;
        Ok(core)
    }

    /// The launch, recorded once for all batches.
    #[expect(unsafe_code, reason = "records a launch that was checked")]
    fn feed(&self, launch: &Launch<'_>) -> Result<Feed, DriverError> {
        let gpu = &self.tools.gpu;
        let own = launch.buffers().filter_map(|(view, _)| VulkanBuffer::of(view));
        let zeroed =
            own.filter(|buffer| buffer.is_of(gpu)).filter_map(VulkanBuffer::zeroed).cloned().collect();
        let mut recording = Recording::primary(gpu)?;
        // SAFETY: it is new.
        unsafe { recording.begin() }?;
        recording.barrier();
        // SAFETY: `Residents::launch` had the launch checked; there is a word for each workgroup.
        unsafe { self.tools.launch(launch, Some(self.words.span()), &mut recording) }?;
        recording.show_host();
        recording.end()?;
        let (line, driver_queue) = (Line::create(gpu)?, gpu.pick_queue());
        Ok(Feed { recording, zeroed, line, driver_queue, turns: TURNS.0 })
    }

    /// Makes batch after batch until the resident is over.
    fn run(&self, feed: &mut Feed) {
        let mut began = Instant::now();
        for value in 1.. {
            if !self.enter() {
                return;
            }
            let ticket = Ticket::new(&feed.line, value);
            let outcome = self.batch(feed, &ticket);
            if began.elapsed() >= self.slice.shortest {
                began = Instant::now();
                self.slices.fetch_add(u64::from(self.workgroups), Ordering::Relaxed);
            }
            self.leave(outcome);
        }
    }

    /// Waits until the resident may run; whether it ever may.
    fn enter(&self) -> bool {
        let mut state = self.lock();
        loop {
            if state.finished || state.failure.is_some() || state.order == Order::Stop {
                state.seats = None;
                self.changed.notify_all();
                return false;
            }
            if state.order == Order::Run {
                break;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.inside = true;
        self.set_word(LEAVE, 0);
        true
    }

    /// One launch, from its submission to its end.
    #[expect(unsafe_code, reason = "submits work on memory that the resident holds")]
    fn batch(&self, feed: &mut Feed, ticket: &Ticket) -> Result<Outcome, Arc<Failure>> {
        let gpu = &self.tools.gpu;
        for workgroup in 0..self.workgroups {
            if self.word_of(workgroup) != FINISHED {
                self.set_word(place_of(workgroup), ABSENT);
            }
        }
        self.set_word(0, feed.turns);
        let began = Instant::now();
        let commands = feed.recording.commands();
        // SAFETY: recorded to its end by `feed`; the batch before is over, since this comes back only then. The
        // launch and the words are this value's, which the thread holds, as it does the recording and the line;
        // tickets rise.
        let submitted = unsafe { gpu.submit(feed.driver_queue, Some(commands), &feed.zeroed, ticket) };
        submitted.map_err(|error| gpu.judge(error))?;
        self.wait_for(ticket)?;
        feed.zeroed.clear();
        feed.adapt(began.elapsed(), self.target());
        Ok(self.outcome())
    }

    /// Waits for the end of a batch, which may touch what it uses until then: only the end of the device is an error.
    fn wait_for(&self, ticket: &Ticket) -> Result<(), Arc<Failure>> {
        let gpu = &self.tools.gpu;
        loop {
            match ticket.wait(ROUND) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) if gpu.is_lost_by(&error) => return Err(gpu.judge(error)),
                // One that the driver says nothing about counts as one that runs.
                Err(_) => thread::sleep(GLANCE),
            }
            if let Some(failure) = gpu.failure() {
                return Err(failure);
            }
        }
    }

    /// How long the next batch shall take.
    fn target(&self) -> Duration {
        if self.tools.gpu.gate.is_awaited() {
            return self.slice.hurried().min(SHORT);
        }
        self.slice.longest.min(LONG)
    }

    fn outcome(&self) -> Outcome {
        let mut outcome = Outcome::Finished;
        for workgroup in 0..self.workgroups {
            outcome = match (self.word_of(workgroup), outcome) {
                (word, _) if word >= FAILED => return Outcome::Failed { workgroup, code: word - FAILED },
                (FINISHED, outcome) => outcome,
                (IDLE, Outcome::Finished | Outcome::Idle) => Outcome::Idle,
                _ => Outcome::Busy,
            };
        }
        outcome
    }

    /// Notes how a batch ended, and rests where there was nothing to do.
    fn leave(&self, outcome: Result<Outcome, Arc<Failure>>) {
        let mut state = self.lock();
        state.inside = false;
        state.checked_in = true;
        state.batches += 1;
        match &outcome {
            Ok(Outcome::Finished) => state.finished = true,
            Ok(Outcome::Failed { workgroup, code }) => {
                state.failure = Some(Arc::new(self.kernel_failure(*workgroup, *code)));
            }
            Err(failure) => state.failure = Some(Arc::clone(failure)),
            Ok(Outcome::Busy | Outcome::Idle) => {}
        }
        let over = state.finished || state.failure.is_some() || state.order == Order::Stop;
        if over {
            state.seats = None;
        }
        self.changed.notify_all();
        if !over && matches!(outcome, Ok(Outcome::Idle)) {
            drop(self.changed.wait_timeout(state, IDLE_REST));
        }
    }

    fn kernel_failure(&self, workgroup: u32, code: u32) -> Failure {
        Failure::KernelFailed {
            work: WorkId::Resident { device: self.tools.gpu.id, workgroup },
            kernel: self.kernel.clone(),
            code: i32::try_from(code).unwrap_or(i32::MAX),
        }
    }

    fn check_in(&self, time: Duration) -> Result<(), ResidentError> {
        let deadline = Deadline::within(time);
        let mut state = self.lock();
        loop {
            if let Some(failure) = &state.failure {
                return Err(ResidentError::Failed(Arc::clone(failure)));
            }
            let started = self.started();
            if state.checked_in || started == self.workgroups {
                return Ok(());
            }
            if deadline.is_past() {
                drop(state);
                return self.give_up(started, Deadline::within(time));
            }
            // Nobody tells when a workgroup writes its word.
            let waited = self.changed.wait_timeout(state, GLANCE.min(deadline.remaining()));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends a resident of whose workgroups only some have begun. One that began and does not return is named.
    fn give_up(&self, started: u32, deadline: Deadline) -> Result<(), ResidentError> {
        self.give(Order::Stop);
        let outside = self.wait_outside(deadline);
        if let Some(failure) = self.lock().failure.clone() {
            return Err(ResidentError::Failed(failure));
        }
        let is_inside = |workgroup| self.word_of(workgroup) == INSIDE;
        if outside.is_err() && (0..self.workgroups).any(is_inside) {
            return outside;
        }
        Err(ResidentError::NotResident { kernel: self.kernel.clone(), started, wanted: self.workgroups })
    }

    /// Workgroups that have written their word, where the host sees it before the batch is over.
    fn started(&self) -> u32 {
        let started = (0..self.workgroups).filter(|&workgroup| self.word_of(workgroup) != ABSENT).count();
        u32::try_from(started).unwrap_or(u32::MAX)
    }

    fn resident_state(state: &State) -> ResidentState {
        match state.order {
            _ if state.failure.is_some() => ResidentState::Failed,
            _ if state.finished => ResidentState::Stopped,
            Order::Stop if !state.inside => ResidentState::Stopped,
            Order::Park if !state.inside => ResidentState::Parked,
            Order::Run | Order::Park | Order::Stop => ResidentState::Running,
        }
    }

    /// Refuses `action` unless the resident is in the state it needs.
    fn require(
        &self,
        needed: ResidentState,
        action: &'static str,
    ) -> Result<MutexGuard<'_, State>, ResidentError> {
        let state = self.lock();
        match Self::resident_state(&state) {
            actual if actual == needed => Ok(state),
            ResidentState::Failed => {
                let failure = state.failure.clone().unwrap_or_else(|| Arc::new(Failure::Cancelled));
                Err(ResidentError::Failed(failure))
            }
            actual => Err(ResidentError::WrongState { action, state: actual.name() }),
        }
    }

    fn park(&self, deadline: Deadline) -> Result<(), ResidentError> {
        let mut state = self.require(ResidentState::Running, "park")?;
        match state.order {
            Order::Run => {
                state.parks = Parks { number: state.parks.number + 1, waiting: 1, stands: false };
                // Under the lock that the state was read under, so that nobody ends it in between.
                self.set_order(&mut state, Order::Park);
            }
            Order::Park => state.parks.waiting += 1,
            Order::Stop => return Err(ResidentError::WrongState { action: "park", state: "ending" }),
        }
        let number = state.parks.number;
        let is_awaited = |state: &State| {
            let is_mine = state.order == Order::Park && state.parks.number == number;
            is_mine && state.inside && state.failure.is_none()
        };
        while is_awaited(&state) && !deadline.is_past() {
            let waited = self.changed.wait_timeout(state, deadline.remaining());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        self.end_park(state, number)
    }

    /// What became of the park with this number. Only the last one to give up undoes it.
    fn end_park(&self, mut state: MutexGuard<'_, State>, number: u64) -> Result<(), ResidentError> {
        let is_mine = state.parks.number == number;
        if is_mine {
            state.parks.waiting -= 1;
        }
        if let Some(failure) = &state.failure {
            return Err(ResidentError::Failed(Arc::clone(failure)));
        }
        match state.order {
            Order::Park if is_mine && !state.inside => {
                state.parks.stands = true;
                Ok(())
            }
            Order::Park if is_mine => {
                if state.parks.waiting == 0 && !state.parks.stands {
                    self.set_order(&mut state, Order::Run);
                }
                Err(self.unparkable())
            }
            // A stop that came before or meanwhile stands: the resident is over and not parked.
            Order::Stop => Err(ResidentError::WrongState { action: "park", state: "ending" }),
            Order::Park | Order::Run => Err(ResidentError::WrongState { action: "park", state: "running" }),
        }
    }

    fn resume(&self) -> Result<(), ResidentError> {
        if let Some(failure) = self.tools.gpu.failure() {
            return Err(ResidentError::Failed(failure));
        }
        let mut state = self.require(ResidentState::Parked, "resume")?;
        self.set_order(&mut state, Order::Run);
        Ok(())
    }

    fn stop(&self, deadline: Deadline) -> Result<(), ResidentError> {
        self.give(Order::Stop);
        self.wait_outside(deadline)
    }

    fn wait_outside(&self, deadline: Deadline) -> Result<(), ResidentError> {
        let mut state = self.lock();
        while state.inside {
            let remaining = deadline.remaining();
            if remaining.is_zero() {
                return Err(self.unparkable());
            }
            state = self.changed.wait_timeout(state, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    fn unparkable(&self) -> ResidentError {
        let (device, kernel, workgroup) = (self.tools.gpu.id, self.kernel.clone(), self.first_inside());
        ResidentError::Unparkable { device, kernel, workgroup }
    }

    /// How many batches are over.
    pub(crate) fn batches(&self) -> u64 {
        self.lock().batches
    }

    /// Waits until a batch ends after `before` were over, or nothing of it runs.
    pub(crate) fn wait_for_boundary(&self, before: u64, deadline: Deadline) -> Result<(), Unparkable> {
        let mut state = self.lock();
        while state.inside && state.batches == before && state.failure.is_none() {
            let remaining = deadline.remaining();
            if remaining.is_zero() {
                return Err(Unparkable { kernel: self.kernel.clone(), workgroup: self.first_inside() });
            }
            state = self.changed.wait_timeout(state, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// The first workgroup that has not said that it returns, as far as the host sees.
    fn first_inside(&self) -> u32 {
        let inside = |workgroup: &u32| self.word_of(*workgroup) <= INSIDE;
        (0..self.workgroups).find(inside).unwrap_or(0)
    }

    fn give(&self, order: Order) {
        let mut state = self.lock();
        self.set_order(&mut state, order);
        if order == Order::Stop && !state.inside {
            state.seats = None;
        }
    }

    fn set_order(&self, state: &mut State, order: Order) {
        state.order = order;
        self.set_word(LEAVE, u32::from(order != Order::Run));
        self.changed.notify_all();
    }

    /// A word of the resident's, at a place below the size it was allocated with.
    fn set_word(&self, at: usize, word: u32) {
        if let Some(mapping) = self.words.mapping() {
            let _written = mapping.write(at, &word.to_le_bytes());
        }
    }

    fn word_of(&self, workgroup: u32) -> u32 {
        let mut bytes = [0; 4];
        if let Some(mapping) = self.words.mapping() {
            let _read = mapping.read(place_of(workgroup), &mut bytes);
        }
        u32::from_le_bytes(bytes)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Only this module's own code runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Feed {
    /// Brings the turns of a batch nearer to what fits the time it shall take.
    fn adapt(&mut self, took: Duration, target: Duration) {
        let turns = if took > target {
            self.turns / 2
        } else if took < target / 2 {
            self.turns * 2
        } else {
            self.turns
        };
        self.turns = turns.clamp(TURNS.1, TURNS.2);
    }
}

impl fmt::Debug for ResidentCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResidentCore")
            .field("kernel", &self.kernel)
            .field("launch", &self.launch)
            .field("state", &Self::resident_state(&self.lock()))
            .finish_non_exhaustive()
    }
}

/// Where a workgroup's word is.
const fn place_of(workgroup: u32) -> usize {
    HEADER + 4 * workgroup as usize
}

fn no_words(error: AllocError) -> ResidentError {
    match error {
        AllocError::Failed(failure) => ResidentError::Failed(failure),
        AllocError::Driver(error) => ResidentError::Driver(error),
        error => ResidentError::Memory(error),
    }
}

/// The user's handle of a resident. It keeps the device open; dropping it asks the resident to stop.
#[derive(Debug)]
pub(crate) struct VulkanResident {
    pub(crate) core: Arc<ResidentCore>,
    pub(crate) _device: Hold,
}

impl Resident for VulkanResident {
    fn state(&self) -> ResidentState {
        ResidentCore::resident_state(&self.core.lock())
    }

    fn slices(&self) -> u64 {
        self.core.slices.load(Ordering::Relaxed)
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
        self.core.lock().failure.clone().or_else(|| self.core.tools.gpu.failure())
    }
}

impl Drop for VulkanResident {
    fn drop(&mut self) {
        self.core.give(Order::Stop);
    }
}
