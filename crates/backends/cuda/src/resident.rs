//! Resident kernels: chains of slices in a stream of their own, fed by a thread that can stand a wait.
//!
//! Orders are numbers in host memory that the slices read, so giving one calls no driver function. Slices
//! are numbered; an order names the first slice that it does not mean. Nothing is ever reset, so an order
//! that arrives late cannot hit a slice that was launched after it.

use std::{
    collections::VecDeque,
    fmt, hint, io,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use warpweft_core_types::{
    AllocError, Deadline, Failure, MultiprocessorPool, OwnedLaunch, ReservedMultiprocessors, Resident,
    ResidentDesc, ResidentError, ResidentState, SliceConfig,
};

use crate::{
    budget::reserve,
    cold::{Boundary, Unparkable},
    context::Context,
    control::Control,
    device::CudaDevice,
    exit::Parting,
    header,
    memory::Arena,
    stream::Stream,
    work,
};

/// Slices in the stream: the one that runs and its successor. A cold call waits for both.
const DEPTH: usize = 2;

/// Slices shorter than this are fed without sleeping: a nap can last as long as one of them.
const RESTLESS: Duration = Duration::from_micros(300);

/// The longest the feeder sleeps while slices run, and how often it asks the driver.
const LONGEST_NAP: Duration = Duration::from_micros(100);

/// Launches and questions about events take microseconds. One that takes this long waits for somebody.
const HELD_UP: Duration = Duration::from_micros(60);

/// A parked resident's feeder stays awake for this long: parks are often short.
const ALERT: Duration = Duration::from_millis(2);

/// A thread that waits for a resident keeps its core for this long, then naps in between.
const SPIN: Duration = Duration::from_millis(1);
const NAP: Duration = Duration::from_micros(50);

/// What a resident was told last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Run,
    Park,
    Stop,
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

/// A resident's slices and what they were told.
pub(crate) struct ResidentCore {
    context: Arc<Context>,
    stream: Stream,
    launch: OwnedLaunch,
    slice: SliceConfig,
    workgroups: u32,
    control: Control,
    /// The current [`Order`]. A stop may come at any time; the others change under the lock of `parks`.
    order: AtomicU8,
    parks: Mutex<Parks>,
    /// Slices that were given a number, and those of them that are in `line` or will never be.
    issued: AtomicU64,
    settled: AtomicU64,
    /// Held by whoever launches slices, driver calls included; never by who gives orders.
    launching: Mutex<()>,
    line: Mutex<Line>,
    ended: AtomicU64,
    failure: OnceLock<Arc<Failure>>,
    feeder: OnceLock<Thread>,
    calls: CallWatch,
    seats: Mutex<Option<ReservedMultiprocessors>>,
    parting: Mutex<Leaving>,
}

/// Whether the end of the process waits for a resident.
#[derive(Debug, Default)]
enum Leaving {
    /// It serves until then.
    #[default]
    No,
    /// It was told to stop, and its feeder still looks after what the device has of it.
    Now {
        _parting: Parting,
    },
    Over,
}

/// The slices in the stream.
#[derive(Debug, Default)]
struct Line {
    slices: VecDeque<Queued>,
    /// Number of the last slice that every workgroup has left, plus 1.
    left: u64,
    /// Slices below this number touch nothing of the program's any more, and what they wrote can be read: the last
    /// workgroup to leave told so, behind a fence.
    obeyed: u64,
}

impl Line {
    /// Whether no slice is inside its kernel or will get there. What is in the line finds the order to leave when
    /// it begins.
    fn is_outside(&self) -> bool {
        self.slices.iter().all(|slice| slice.number < self.obeyed)
    }

    /// Whether what all slices wrote can be read. One that ended because its time was over put no fence behind that.
    const fn is_fenced(&self) -> bool {
        self.left <= self.obeyed
    }
}

/// A slice in the stream.
#[derive(Debug)]
struct Queued {
    number: u64,
    /// It lasts as long, unless it is told to hurry or to leave.
    longest: Duration,
    /// Among those that ended.
    is_counted: bool,
}

impl ResidentCore {
    /// Starts the workgroups and returns once each has begun its first slice.
    pub(crate) fn launch(
        context: &Arc<Context>,
        arena: &Arc<Arena>,
        budget: &Arc<MultiprocessorPool>,
        desc: &ResidentDesc<'_>,
    ) -> Result<Arc<Self>, ResidentError> {
        desc.slice.check()?;
        let launch = OwnedLaunch::from(&desc.launch);
        let seats = reserve(budget, context.device, &launch)?;
        // What fits on a device is far from the limit.
        let workgroups = u32::try_from(desc.launch.workgroup_count()).unwrap_or(u32::MAX);
        let control = Control::create(arena, workgroups).map_err(|error| refused(context, error))?;
        let core = Arc::new(Self {
            context: Arc::clone(context),
            stream: Stream::create(context).map_err(ResidentError::Driver)?,
            launch,
            slice: desc.slice,
            workgroups,
            control,
            order: AtomicU8::new(Order::Run as u8),
            parks: Mutex::default(),
            issued: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            launching: Mutex::default(),
            line: Mutex::default(),
            ended: AtomicU64::new(0),
            failure: OnceLock::new(),
            feeder: OnceLock::new(),
            calls: CallWatch::default(),
            seats: Mutex::new(Some(seats)),
            parting: Mutex::default(),
        });
        let no_thread = |error: io::Error| {
            let reason = format!("no thread to look after it: {error}");
            ResidentError::Refused { device: context.device, reason }
        };
        context.cold.add(&core).map_err(no_thread)?;
        let shared = Arc::clone(&core);
        let feeder = thread::Builder::new()
            .name(format!("{}/resident", context.device))
            .spawn(move || shared.feed())
            .inspect_err(|_| context.cold.remove(&core))
            .map_err(no_thread)?;
        let _first = core.feeder.set(feeder.thread().clone());
        core.top_up(1);
        core.check_in(desc.check_in)?;
        Ok(core)
    }

    fn check_in(&self, time: Duration) -> Result<(), ResidentError> {
        let started = || self.control.count(header::ENTERED, 1);
        let settled = || started() == self.workgroups || self.failure().is_some();
        if wait_until(Deadline::within(time), settled) {
            return self.failure().map_or(Ok(()), |failure| Err(ResidentError::Failed(failure)));
        }
        let started = started();
        // Those that did start end at their next message boundary; one that does not is named instead. The feeder
        // gives the budget back once the last of them is over.
        match self.stop(Deadline::within(time)) {
            Err(error @ ResidentError::Unparkable { .. }) if self.control.first_inside().is_some() => {
                Err(error)
            }
            Err(ResidentError::Failed(failure)) => Err(ResidentError::Failed(failure)),
            _ => Err(ResidentError::NotResident { kernel: self.name(), started, wanted: self.workgroups }),
        }
    }

    /// Keeps slices in the stream until the resident is over, then gives its budget back.
    fn feed(self: Arc<Self>) {
        let (mut rested, mut asked) = (Instant::now(), Instant::now());
        loop {
            if asked.elapsed() > LONGEST_NAP {
                self.ask();
                asked = Instant::now();
            }
            drop(self.retired());
            if self.failure().is_some() {
                if self.context.failure().is_some() {
                    break;
                }
                // What was launched before it failed still runs.
                self.give_stop();
            }
            match self.order() {
                Order::Stop if self.is_over() => break,
                Order::Run if self.is_finished() && self.is_over() => break,
                Order::Run => {
                    self.top_up(DEPTH);
                    rested = Instant::now();
                }
                Order::Park if rested.elapsed() > ALERT && self.is_over() => {
                    thread::park();
                    continue;
                }
                Order::Park | Order::Stop => {}
            }
            self.nap();
        }
        self.give_seats_back();
        self.context.cold.remove(&self);
        let parting = std::mem::replace(&mut *self.parting(), Leaving::Over);
        // With all that it has of the device.
        drop(self);
        drop(parting);
    }

    fn parting(&self) -> MutexGuard<'_, Leaving> {
        // Nothing panics under the lock.
        self.parting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_seats_back(&self) {
        *self.seats.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn nap(&self) {
        match self.pace() {
            Some(pace) if pace >= RESTLESS => thread::park_timeout((pace / 4).min(LONGEST_NAP)),
            _ => thread::yield_now(),
        }
    }

    /// How long the shortest slice in the stream will last.
    fn pace(&self) -> Option<Duration> {
        let hurried = self.control.order(header::HURRY);
        let lasts = |slice: &Queued| match slice.number < hurried {
            true => self.slice.hurried().min(slice.longest),
            false => slice.longest,
        };
        self.line().slices.iter().map(lasts).min()
    }

    /// Launches slices until there are `depth` in the stream.
    fn top_up(&self, depth: usize) {
        let _one_at_a_time = self.launching.lock().unwrap_or_else(PoisonError::into_inner);
        let serves = || self.order() == Order::Run && self.failure.get().is_none() && !self.is_finished();
        while serves() && self.serving() < depth {
            // SeqCst, with `leave`: either it sees the order here, or the order's number covers this slice.
            let number = self.issued.fetch_add(1, Ordering::SeqCst);
            if self.order() == Order::Run {
                match self.launch_slice(number) {
                    Ok(slice) => self.line().slices.push_back(slice),
                    Err(failure) => {
                        let _first = self.failure.set(failure);
                    }
                }
            }
            // SeqCst, with `is_settled`: whoever sees the number settled finds its slice in the line.
            self.settled.store(number + 1, Ordering::SeqCst);
        }
    }

    /// How many slices in the stream were not told to leave.
    fn serving(&self) -> usize {
        let leaving = self.control.order(header::LEAVE);
        self.line().slices.iter().filter(|slice| slice.number >= leaving).count()
    }

    #[expect(unsafe_code, reason = "enqueues work on memory that the resident keeps")]
    fn launch_slice(&self, number: u64) -> Result<Queued, Arc<Failure>> {
        let _current = self.context.enter().map_err(|error| self.context.judge(error))?;
        let hurried = self.slice.hurried();
        let longest = if self.context.cold.is_awaited() { hurried } else { self.slice.longest };
        let slice = self.control.slice(number, hurried, longest);
        let launched = self.calls.watched(|| {
            self.launch.with(|launch| {
                // SAFETY: the launch names buffers and a kernel that it owns, and this value goes on living until
                // its slices are over (`feed`), as do the words that the slice leads to.
                unsafe { work::enqueue_launch(&self.context, &self.stream, launch, Some(&slice)) }
            })
        });
        launched.map_err(|error| match error {
            // A launch that was refused enqueued nothing. One that met the end of the device did not matter.
            Some(error) => self.context.judge(error),
            // Operands were checked when the resident was made, so this is not met.
            None => Arc::new(Failure::Cancelled),
        })?;
        Ok(Queued { number, longest, is_counted: false })
    }

    /// Asks the driver whether all is well, since a device that is lost says nothing by itself. The answer also
    /// takes long when a call that was not announced waits for the slices, which the watch then finds out.
    fn ask(&self) {
        let asked = self.calls.watched(|| {
            let _current = self.context.enter()?;
            self.stream.is_done()
        });
        let Err(error) = asked else { return };
        let failure = self.context.judge(error);
        // A question that was refused, as while another library captures, says nothing of the slices.
        if self.context.failure().is_some() {
            let _first = self.failure.set(failure);
        }
    }

    /// Takes note of slices that ended; whether no workgroup is inside its kernel or will get there.
    ///
    /// Slices may be in the stream all the same: they find the order to leave when they begin, and touch nothing
    /// of the program's.
    fn is_outside(&self) -> bool {
        let settled = self.is_settled();
        let mut line = self.retired();
        if !settled || !line.is_outside() {
            return false;
        }
        // What is in the line leaves when it begins: the count stands still from here on.
        line.slices.iter_mut().for_each(|slice| self.count(slice));
        let is_fenced = line.is_fenced();
        drop(line);
        is_fenced || self.is_stream_over()
    }

    /// Whether nothing is in the stream at all, so that what slices use can be let go.
    fn is_over(&self) -> bool {
        self.is_settled() && self.retired().slices.is_empty() && self.is_stream_over()
    }

    /// Whether the stream is over by the driver's word, with all that its kernels wrote.
    fn is_stream_over(&self) -> bool {
        self.calls.watched(|| {
            let entered = self.context.enter();
            entered.is_ok_and(|_current| self.stream.is_done().is_ok_and(|is_done| is_done))
        })
    }

    /// The slices that some workgroup has not left.
    fn retired(&self) -> MutexGuard<'_, Line> {
        let mut line = self.line();
        // The device writes both at once, so the order is never ahead of the slices it is told by.
        let obeyed = self.control.reached(header::OBEYED);
        line.left = self.control.reached(header::LAST_LEFT).max(line.left);
        line.obeyed = obeyed.max(line.obeyed);
        let left = line.left;
        while let Some(mut first) = line.slices.pop_front_if(|first| first.number < left) {
            self.count(&mut first);
        }
        line
    }

    fn count(&self, slice: &mut Queued) {
        if !std::mem::replace(&mut slice.is_counted, true) {
            // Relaxed: a figure for reports.
            self.ended.fetch_add(u64::from(self.workgroups), Ordering::Relaxed);
        }
    }

    /// Whether every slice that was given a number is in the line or will never be.
    fn is_settled(&self) -> bool {
        self.settled.load(Ordering::SeqCst) == self.issued.load(Ordering::SeqCst)
    }

    /// How many slices every workgroup has left.
    pub(crate) fn slices_over(&self) -> u64 {
        self.control.reached(header::LAST_LEFT)
    }

    /// Waits until a slice ends after `before` were over, or nothing of it runs.
    pub(crate) fn wait_for_boundary(&self, before: u64, deadline: Deadline) -> Result<Boundary, Unparkable> {
        let has_returned = || self.slices_over() > before;
        let is_outside = || self.context.failure().is_some() || self.is_outside();
        if !wait_until(deadline, || has_returned() || is_outside()) {
            return Err(Unparkable {
                kernel: self.name(),
                workgroup: self.control.first_inside().unwrap_or(0),
            });
        }
        Ok(if has_returned() { Boundary::Returned } else { Boundary::Outside })
    }

    /// Whether it launches nothing until somebody resumes it, so that nobody can hold it up.
    pub(crate) fn rests(&self) -> bool {
        self.failure.get().is_some() || self.order() == Order::Park
    }

    /// Whether a call of the driver's has kept the feeder for longer than such calls take: somebody else's call
    /// holds the context and waits for the slices.
    pub(crate) fn is_held_up(&self) -> bool {
        self.calls.is_held_up()
    }

    /// Asks the slices in the stream to end after the shortest time: somebody waits for the device.
    pub(crate) fn hurry(&self) {
        self.control.raise(header::HURRY, self.issued.load(Ordering::SeqCst));
        self.wake_feeder();
    }

    /// The order that stands for good.
    fn give_stop(&self) {
        let mut parting = self.parting();
        if matches!(*parting, Leaving::No) {
            *parting = Leaving::Now { _parting: Parting::begin() };
        }
        drop(parting);
        self.order.store(Order::Stop as u8, Ordering::SeqCst);
        self.leave();
    }

    /// Changes the order, under the lock of `parks`, unless a stop came: nothing goes on after that.
    fn change_order(&self, from: Order, to: Order) -> bool {
        // SeqCst, here and where orders are read: with `top_up`, which takes a number and then looks at the order.
        self.order.compare_exchange(from as u8, to as u8, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Ends the slices that were launched before the order.
    fn leave(&self) {
        self.control.raise(header::LEAVE, self.issued.load(Ordering::SeqCst));
    }

    fn wake_feeder(&self) {
        if let Some(feeder) = self.feeder.get() {
            feeder.unpark();
        }
    }

    fn park(&self, deadline: Deadline) -> Result<(), ResidentError> {
        let number = self.begin_park()?;
        let waited = self.wait_outside(deadline);
        self.end_park(number, waited)
    }

    /// Tells the slices to leave, or joins a call that did.
    fn begin_park(&self) -> Result<u64, ResidentError> {
        let mut parks = self.parks();
        // A resident that runs is known without asking the driver.
        if self.failure().is_some() || self.is_finished() || !self.change_order(Order::Run, Order::Park) {
            self.require(ResidentState::Running, "park")?;
            if self.order() == Order::Park {
                parks.waiting += 1;
                return Ok(parks.number);
            }
            return Err(ResidentError::WrongState { action: "park", state: "ending" });
        }
        *parks = Parks { number: parks.number + 1, waiting: 1, stands: false };
        // Under the lock, so that it does not reach slices of a resume.
        self.leave();
        Ok(parks.number)
    }

    /// What became of the park with this number. Only the last one to give up undoes it.
    fn end_park(&self, number: u64, waited: Result<(), ResidentError>) -> Result<(), ResidentError> {
        let mut parks = self.parks();
        let is_mine = parks.number == number;
        if is_mine {
            parks.waiting -= 1;
        }
        if let Some(failure) = self.failure() {
            return Err(ResidentError::Failed(failure));
        }
        let gone = |state| Err(ResidentError::WrongState { action: "park", state });
        match self.order() {
            Order::Park if is_mine && self.is_outside() => {
                parks.stands = true;
                Ok(())
            }
            Order::Park if is_mine && parks.waiting == 0 && !parks.stands => {
                self.run_again(parks);
                waited
            }
            // A stop that came before or meanwhile stands: the resident is over and not parked.
            Order::Stop => waited.and_then(|()| gone("ending")),
            Order::Park | Order::Run => waited.and_then(|()| gone("running")),
        }
    }

    fn resume(&self) -> Result<(), ResidentError> {
        let parks = self.parks();
        self.require(ResidentState::Parked, "resume")?;
        if !self.run_again(parks) {
            return self.require(ResidentState::Parked, "resume");
        }
        // The launch is what finds out that the device was lost meanwhile.
        self.failure().map_or(Ok(()), |failure| Err(ResidentError::Failed(failure)))
    }

    fn stop(&self, deadline: Deadline) -> Result<(), ResidentError> {
        self.give_stop();
        self.wake_feeder();
        self.wait_outside(deadline)?;
        // Not left to the feeder, which may be late: the caller may start another resident right away.
        self.give_seats_back();
        Ok(())
    }

    /// Ends a park, unless a stop came meanwhile. The first slice is launched here, since waking the feeder
    /// takes longer than that.
    fn run_again(&self, parks: MutexGuard<'_, Parks>) -> bool {
        let goes_on = self.change_order(Order::Park, Order::Run);
        // The driver is called without the lock.
        drop(parks);
        if goes_on {
            self.top_up(1);
            self.wake_feeder();
            self.context.cold.wake_watch();
        }
        goes_on
    }

    fn parks(&self) -> MutexGuard<'_, Parks> {
        self.parks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_outside(&self, deadline: Deadline) -> Result<(), ResidentError> {
        // The feeder asks the driver now and then, in case the device is lost.
        if wait_until(deadline, || self.is_outside() || self.failure().is_some()) {
            return self.failure().map_or(Ok(()), |failure| Err(ResidentError::Failed(failure)));
        }
        let workgroup = self.control.first_inside().unwrap_or(0);
        Err(ResidentError::Unparkable { device: self.context.device, kernel: self.name(), workgroup })
    }

    fn require(&self, needed: ResidentState, action: &'static str) -> Result<(), ResidentError> {
        match self.state() {
            actual if actual == needed => Ok(()),
            ResidentState::Failed => {
                let failure = self.failure().unwrap_or_else(|| Arc::new(Failure::Cancelled));
                Err(ResidentError::Failed(failure))
            }
            actual => Err(ResidentError::WrongState { action, state: actual.name() }),
        }
    }

    fn state(&self) -> ResidentState {
        if self.context.is_left() {
            return ResidentState::Failed;
        }
        let outside = self.is_outside();
        match self.order() {
            _ if self.failure.get().is_some() => ResidentState::Failed,
            order if outside && (order == Order::Stop || self.is_finished()) => {
                // Not left to the feeder, as in `stop`.
                self.give_seats_back();
                ResidentState::Stopped
            }
            _ if self.context.failure().is_some() => {
                // Nothing runs on a device that is lost, and a feeder that sleeps does not hear of it.
                self.wake_feeder();
                ResidentState::Failed
            }
            Order::Park if outside => ResidentState::Parked,
            Order::Park | Order::Run | Order::Stop => ResidentState::Running,
        }
    }

    fn is_finished(&self) -> bool {
        self.control.count(header::FINISHED, 1) == self.workgroups
    }

    /// Why it failed, if it did: a device that is lost takes its residents along.
    fn failure(&self) -> Option<Arc<Failure>> {
        self.context.left().or_else(|| self.failure.get().cloned()).or_else(|| self.context.failure())
    }

    /// Refuses in a process that was forked from the resident's.
    fn require_origin(&self) -> Result<(), ResidentError> {
        self.context.left().map_or(Ok(()), |failure| Err(ResidentError::Failed(failure)))
    }

    fn order(&self) -> Order {
        match self.order.load(Ordering::SeqCst) {
            0 => Order::Run,
            1 => Order::Park,
            _ => Order::Stop,
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self) -> String {
        self.launch.kernel().contract().name.clone()
    }
}

impl fmt::Debug for ResidentCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resident")
            .field("device", &self.context.device)
            .field("kernel", &self.launch.kernel().contract().name)
            .field("workgroups", &self.workgroups)
            .field("order", &self.order())
            .field("failure", &self.failure.get())
            .finish_non_exhaustive()
    }
}

/// Since when a thread is inside the driver.
#[derive(Debug)]
struct CallWatch {
    epoch: Instant,
    /// Nanoseconds since the epoch, 0 while no call is under way.
    since: AtomicU64,
}

impl Default for CallWatch {
    fn default() -> Self {
        Self { epoch: Instant::now(), since: AtomicU64::new(0) }
    }
}

impl CallWatch {
    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
    }

    fn watched<R>(&self, call: impl FnOnce() -> R) -> R {
        // Relaxed: a hint for another thread, which is right soon enough.
        self.since.store(self.now(), Ordering::Relaxed);
        let result = call();
        self.since.store(0, Ordering::Relaxed);
        result
    }

    fn is_held_up(&self) -> bool {
        match self.since.load(Ordering::Relaxed) {
            0 => false,
            since => self.now().saturating_sub(since) > HELD_UP.as_nanos().try_into().unwrap_or(u64::MAX),
        }
    }
}

/// Looks until `done` or the deadline; whether it is done.
fn wait_until(deadline: Deadline, mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !done() {
        if deadline.is_past() {
            return false;
        }
        if start.elapsed() < SPIN {
            hint::spin_loop();
        } else {
            thread::sleep(NAP.min(deadline.remaining()));
        }
    }
    true
}

fn refused(context: &Context, error: AllocError) -> ResidentError {
    match error {
        AllocError::Failed(failure) => ResidentError::Failed(failure),
        AllocError::Driver(error) => ResidentError::Driver(error),
        other => ResidentError::Refused { device: context.device, reason: other.to_string() },
    }
}

/// The user's handle of a resident. It keeps the device open; dropping it asks the resident to stop.
#[derive(Debug)]
pub(crate) struct CudaResident {
    pub(crate) core: Arc<ResidentCore>,
    pub(crate) _device: Arc<CudaDevice>,
}

impl Resident for CudaResident {
    fn state(&self) -> ResidentState {
        self.core.state()
    }

    fn slices(&self) -> u64 {
        // Relaxed: a figure for reports.
        self.core.ended.load(Ordering::Relaxed)
    }

    fn park(&self, deadline: Deadline) -> Result<(), ResidentError> {
        self.core.require_origin()?;
        self.core.park(deadline)
    }

    fn resume(&self) -> Result<(), ResidentError> {
        self.core.require_origin()?;
        self.core.resume()
    }

    fn stop(&self, deadline: Deadline) -> Result<(), ResidentError> {
        self.core.require_origin()?;
        self.core.stop(deadline)
    }

    fn failure(&self) -> Option<Arc<Failure>> {
        self.core.failure()
    }
}

impl Drop for CudaResident {
    fn drop(&mut self) {
        // A forked process may not have inherited the memory that orders are written to.
        if self.core.context.is_left() {
            return;
        }
        self.core.give_stop();
        self.core.wake_feeder();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_park_stands_while_slices_behind_it_leave() {
        let queued = |number| Queued { number, longest: Duration::ZERO, is_counted: false };
        let check = |numbers: &[u64], left, obeyed, expected| {
            let line = Line { slices: numbers.iter().copied().map(queued).collect(), left, obeyed };
            assert_eq!((line.is_outside(), line.is_fenced()), expected, "{numbers:?}, {left}, {obeyed}");
        };
        check(&[7, 8], 7, 0, (false, false));
        // Slice 7 was told with slice 8, and then slice 8 has left too.
        check(&[8], 8, 9, (true, true));
        check(&[], 9, 9, (true, true));
        // Its time was over before it was told.
        check(&[], 9, 8, (true, false));
        // What is launched next was not told.
        check(&[9], 9, 9, (false, true));
    }
}
