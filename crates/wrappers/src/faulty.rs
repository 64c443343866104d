//! A device that fails on purpose, by seed.

use std::{
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    task::Wake,
    time::Duration,
};

use warpweft_core_types::{
    AllocError, Backend, Buffer, BufferDesc, Bytes, Device, DeviceId, Failure, FillRegion, HostImport,
    HostMemory, KernelCode, LoadError, Module, Op, Resident, ResidentDesc, ResidentError, Residents,
    Semaphore, SemaphorePoint, Submission, SubmissionId, SubmitError, promise_all,
};

use crate::layer::{Layer, LayeredBackend, LayeredQueue, layered_backend};

/// Which faults to inject. Chances lie between 0 (never) and 1 (always); the default injects nothing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FaultConfig {
    /// Where the dice start. One thread that makes the same calls meets the same faults.
    pub seed: u64,
    /// Chance that an allocation finds no memory.
    pub allocation_fails: f64,
    /// Chance that an allocation takes [`FaultConfig::allocation_delay`] longer.
    pub allocation_is_slow: f64,
    /// How much longer a slow allocation takes.
    pub allocation_delay: Duration,
    /// Chance that host memory cannot be imported.
    pub import_fails: f64,
    /// Chance that loading code is refused.
    pub load_fails: f64,
    /// Chance that a copy or fill fails when its turn comes.
    pub copy_fails: f64,
    /// Chance that a copy changes some of the bytes it moves.
    pub copy_corrupts: f64,
    /// Chance that a launch fails when its turn comes.
    pub launch_fails: f64,
    /// Chance that a submission starts [`FaultConfig::work_delay`] after its waits are met.
    pub work_is_slow: f64,
    /// How much later slow work starts.
    pub work_delay: Duration,
    /// Chance that a submission does its work and never signals.
    pub signal_is_lost: f64,
    /// The device dies at its n-th allocation, import, load, resident launch or submission, counted from 0.
    pub dies_at_step: Option<u64>,
}

/// A backend whose devices fail on purpose. See [`FaultConfig`].
#[derive(Debug)]
pub struct FaultyBackend {
    backend: LayeredBackend<Faulty>,
    config: FaultConfig,
}

impl FaultyBackend {
    /// Wraps every device of `inner`; each has dice of its own.
    pub fn new(inner: Arc<dyn Backend>, config: FaultConfig) -> Self {
        Self { backend: LayeredBackend::new(inner), config }
    }

    fn layer(&self, device: DeviceId) -> Faulty {
        let rng = fastrand::Rng::with_seed(self.config.seed ^ (u64::from(device.ordinal) << 32));
        Faulty { device, config: self.config.clone(), state: Mutex::new(State::new(rng)) }
    }
}

layered_backend!(FaultyBackend);

/// The layer of one device.
#[derive(Debug)]
pub(crate) struct Faulty {
    device: DeviceId,
    config: FaultConfig,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    rng: fastrand::Rng,
    steps: u64,
    /// Set once the device is dead.
    lost: Option<Arc<Failure>>,
    /// Points promised and, when last looked at, not reached: they fail when the device dies.
    promised: Vec<SemaphorePoint>,
}

impl State {
    fn new(rng: fastrand::Rng) -> Self {
        Self { rng, steps: 0, lost: None, promised: Vec::new() }
    }

    fn chance(&mut self, chance: f64) -> bool {
        chance > 0.0 && self.rng.f64() < chance
    }
}

/// What happens to one submission.
enum Fate {
    Spared,
    /// Its operation with this position fails when its turn comes.
    Fails(usize),
    /// Its copy with this position changes some bytes.
    Corrupts(usize),
    Slow,
    SignalLost,
}

impl Faulty {
    /// Counts a step. The device may die of it.
    fn step(&self) -> Result<MutexGuard<'_, State>, Arc<Failure>> {
        let mut state = self.lock();
        if let Some(failure) = &state.lost {
            return Err(Arc::clone(failure));
        }
        if self.config.dies_at_step == Some(state.steps) {
            return Err(self.die(state));
        }
        state.steps += 1;
        Ok(state)
    }

    fn die(&self, mut state: MutexGuard<'_, State>) -> Arc<Failure> {
        let reason = format!("an injected fault at step {}", state.steps);
        let failure = Arc::new(Failure::DeviceLost { device: self.device, reason });
        state.lost = Some(Arc::clone(&failure));
        let promised = std::mem::take(&mut state.promised);
        drop(state);
        // Outside the lock: those who are woken may come back here.
        for point in promised {
            point.semaphore.fail(Arc::clone(&failure));
        }
        failure
    }

    fn fate(&self, state: &mut State, ops: &[Op<'_>]) -> Fate {
        for (position, op) in ops.iter().enumerate() {
            let (fails, corrupts) = match op {
                Op::Launch(_) | Op::Replay(_) => (self.config.launch_fails, 0.0),
                Op::Copy(_) => (self.config.copy_fails, self.config.copy_corrupts),
                _ => (self.config.copy_fails, 0.0),
            };
            if state.chance(fails) {
                return Fate::Fails(position);
            }
            if state.chance(corrupts) {
                return Fate::Corrupts(position);
            }
        }
        if state.chance(self.config.work_is_slow) {
            return Fate::Slow;
        }
        if state.chance(self.config.signal_is_lost) { Fate::SignalLost } else { Fate::Spared }
    }

    /// Does what comes before the failing operation, then fails the signals and the queue.
    fn submit_failing(
        &self,
        queue: &LayeredQueue<Self>,
        submission: &Submission<'_>,
        position: usize,
    ) -> Result<SubmissionId, SubmitError> {
        let turn = SemaphorePoint::new(&semaphore(queue)?, 1);
        promise_all(submission.signals)?;
        let id = queue.inner.submit(&Submission {
            waits: submission.waits,
            ops: &submission.ops[..position],
            signals: std::slice::from_ref(&turn),
        })?;
        let what = submission.ops[position].name();
        let reason = "an injected fault".to_owned();
        let failure = Failure::OperationFailed { submission: id, what, reason };
        let failure = Arc::new(failure);
        // The first failure stays.
        let _first = queue.state.set(Arc::clone(&failure));
        let fall = Fall { signals: submission.signals.to_vec(), failure };
        turn.semaphore.wake_when(turn.value, Arc::new(fall).into());
        Ok(id)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Fails signals when the turn of the operation that fails them comes.
struct Fall {
    signals: Vec<SemaphorePoint>,
    failure: Arc<Failure>,
}

impl Wake for Fall {
    fn wake(self: Arc<Self>) {
        for point in &self.signals {
            point.semaphore.fail(Arc::clone(&self.failure));
        }
    }
}

/// A semaphore of the injector's own.
fn semaphore(queue: &LayeredQueue<Faulty>) -> Result<Arc<dyn Semaphore>, SubmitError> {
    queue.device.create_semaphore(0).map_err(|error| SubmitError::Invalid {
        reason: format!("the fault injector could not make a semaphore: {error}"),
    })
}

/// The submission, held up for a while after its waits are met.
fn submit_slow(
    queue: &LayeredQueue<Faulty>,
    submission: &Submission<'_>,
    delay: Duration,
) -> Result<SubmissionId, SubmitError> {
    let (turn, late) =
        (SemaphorePoint::new(&semaphore(queue)?, 1), SemaphorePoint::new(&semaphore(queue)?, 1));
    let early = Submission { waits: submission.waits, ops: &[], signals: std::slice::from_ref(&turn) };
    queue.inner.submit(&early)?;
    let timer = Timer { late: late.clone(), delay };
    turn.semaphore.wake_when(turn.value, Arc::new(timer).into());
    queue.inner.submit(&Submission { waits: std::slice::from_ref(&late), ..*submission })
}

/// Signals a point some time after it is woken.
struct Timer {
    late: SemaphorePoint,
    delay: Duration,
}

impl Wake for Timer {
    fn wake(self: Arc<Self>) {
        // A thread for each slow submission: this is for tests. Without one, the work is not slow.
        let timer = Arc::clone(&self);
        let slept = std::thread::Builder::new().spawn(move || {
            std::thread::sleep(timer.delay);
            let _signalled = timer.late.semaphore.signal(timer.late.value);
        });
        if slept.is_err() {
            let _signalled = self.late.semaphore.signal(self.late.value);
        }
    }
}

/// The submission with bytes of one copy's destination overwritten behind it.
fn submit_corrupted(
    queue: &LayeredQueue<Faulty>,
    submission: &Submission<'_>,
    position: usize,
) -> Result<SubmissionId, SubmitError> {
    let Op::Copy(copy) = submission.ops[position] else {
        return queue.inner.submit(submission);
    };
    let end = copy.dst().size().min(8);
    let struck =
        copy.dst().slice(0..end).map_err(|error| SubmitError::Invalid { reason: error.to_string() })?;
    let mut ops = submission.ops.to_vec();
    ops.insert(position + 1, Op::Fill(FillRegion::bytes(&struck, 0xdb)));
    queue.inner.submit(&Submission { ops: &ops, ..*submission })
}

impl Layer for Faulty {
    /// Why the queue takes no more.
    type QueueState = OnceLock<Arc<Failure>>;

    fn allocate(&self, inner: &dyn Device, desc: &BufferDesc) -> Result<Arc<dyn Buffer>, AllocError> {
        let mut state = self.step().map_err(AllocError::Failed)?;
        let fails = state.chance(self.config.allocation_fails);
        let slow = state.chance(self.config.allocation_is_slow);
        drop(state);
        if slow {
            std::thread::sleep(self.config.allocation_delay);
        }
        if fails {
            let capacity = inner.memory()?.capacity;
            return Err(AllocError::OutOfMemory {
                device: self.device,
                requested: Bytes(desc.size),
                available: Bytes(0),
                capacity,
            });
        }
        inner.allocate(desc)
    }

    fn import(&self, inner: &dyn HostImport, memory: HostMemory) -> Result<Arc<dyn Buffer>, AllocError> {
        let mut state = self.step().map_err(AllocError::Failed)?;
        if state.chance(self.config.import_fails) {
            let reason = "an injected fault".to_owned();
            return Err(AllocError::CannotImport { device: self.device, reason });
        }
        drop(state);
        inner.import(memory)
    }

    fn load(&self, inner: &dyn Device, code: &KernelCode) -> Result<Arc<dyn Module>, LoadError> {
        let mut state = self.step().map_err(LoadError::Failed)?;
        if state.chance(self.config.load_fails) {
            return Err(LoadError::Rejected { log: "an injected fault".to_owned() });
        }
        drop(state);
        inner.load(code)
    }

    fn launch(
        &self,
        inner: &dyn Residents,
        desc: &ResidentDesc<'_>,
    ) -> Result<Arc<dyn Resident>, ResidentError> {
        let mut state = self.step().map_err(ResidentError::Failed)?;
        if state.chance(self.config.launch_fails) {
            let wanted = u32::try_from(desc.launch.workgroup_count()).unwrap_or(u32::MAX);
            let kernel = desc.launch.kernel().contract().name.clone();
            return Err(ResidentError::NotResident { kernel, started: 0, wanted });
        }
        drop(state);
        inner.launch(desc)
    }

    fn submit(
        &self,
        queue: &LayeredQueue<Self>,
        submission: &Submission<'_>,
    ) -> Result<SubmissionId, SubmitError> {
        let mut state = self.step().map_err(SubmitError::Failed)?;
        if let Some(failure) = queue.state.get() {
            return Err(SubmitError::Failed(Arc::clone(failure)));
        }
        state.promised.retain(|point| matches!(point.poll(), Ok(false)));
        state.promised.extend_from_slice(submission.signals);
        let fate = self.fate(&mut state, submission.ops);
        drop(state);
        match fate {
            Fate::Spared => queue.inner.submit(submission),
            Fate::Fails(position) => self.submit_failing(queue, submission, position),
            Fate::Corrupts(position) => submit_corrupted(queue, submission, position),
            Fate::Slow => submit_slow(queue, submission, self.config.work_delay),
            Fate::SignalLost => {
                promise_all(submission.signals)?;
                queue.inner.submit(&Submission { signals: &[], ..*submission })
            }
        }
    }

    fn device_failure(&self, inner: &dyn Device) -> Option<Arc<Failure>> {
        self.lock().lost.clone().or_else(|| inner.failure())
    }

    fn queue_failure(&self, queue: &LayeredQueue<Self>) -> Option<Arc<Failure>> {
        let lost = self.lock().lost.clone();
        lost.or_else(|| queue.state.get().cloned()).or_else(|| queue.inner.failure())
    }
}
