//! Calls that the driver makes wait for resident kernels, all of them, and the gate they go through.
//!
//! While a kernel is resident, loading or unloading code and freeing pinned memory wait until it returns,
//! and with them every other call of the context. Residents are slices, so these calls get through. They do it
//! in an exclusive section: residents hurry, and each shows that it returns by ending a slice, or the call is
//! not made; then whoever only asks the driver something stays away until the call is over, since a question
//! would take as long and its asker may have a deadline.

use std::{
    collections::BTreeMap,
    error::Error,
    ffi::{CStr, c_int, c_uint, c_void},
    fmt, hint, io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use cudarc::driver::sys::{CUctx_st, CUfunc_st, CUjit_option, CUjitInputType, CUlinkState_st, CUmod_st};
use warpweft_core_types::{Deadline, DriverError, HostMemory};

use crate::{
    context::Context,
    driver::{Driver, Handle, created},
    queue::QueueCore,
    resident::ResidentCore,
};

/// Room for a compiler's words.
const LOG_BYTES: usize = 16 << 10;

/// A pause of whoever waits for queues and is not waited for.
const GLANCE: Duration = Duration::from_millis(1);

/// How often the watch looks after residents that somebody may hold up.
const WATCH: Duration = Duration::from_micros(50);

/// After a resident was held up by a call that nobody announced, more such calls are expected for this long.
const WARY: Duration = Duration::from_millis(5);

/// A resident that ends no slice for this long keeps calls that would wait for it from being made.
const PATIENCE: Duration = Duration::from_secs(1);

/// A call soon after another takes that one's proof: a load is several calls, each of which would wait for a slice.
const PROOF_LASTS: Duration = Duration::from_millis(1);

/// Questions take microseconds, and their threads may lose the processor meanwhile. One that takes longer is itself held
/// up, by a call that nobody announced.
const QUESTION: Duration = Duration::from_millis(100);

/// Waited for without giving up the processor.
const BRIEF: Duration = Duration::from_micros(100);

/// Cold calls under way, and the residents that should know.
#[derive(Debug)]
pub(crate) struct ColdGate {
    /// Calls that residents hurry for.
    pending: AtomicU32,
    /// Calls of ours that hold the context, or are about to.
    holding: AtomicU32,
    /// Threads that ask the driver something.
    asking: AtomicU32,
    epoch: Instant,
    /// When every resident had last shown that it returns, in nanoseconds since the epoch.
    proven_at: AtomicU64,
    /// Until when slices stay short because of calls that were not announced, in nanoseconds since the epoch.
    wary_until: AtomicU64,
    /// Held while work enters a stream, and alone while a deferred call is made.
    streams: RwLock<()>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Residents whose feeder has not ended.
    residents: Vec<Arc<ResidentCore>>,
    /// How many have come so far.
    arrivals: u64,
    /// Queues of the context, whose kernels such calls wait for too.
    queues: Vec<Weak<QueueCore>>,
    /// Runs while there are residents; sleeps while all are parked.
    watch: Option<Thread>,
}

impl Default for ColdGate {
    fn default() -> Self {
        Self {
            pending: AtomicU32::new(0),
            holding: AtomicU32::new(0),
            asking: AtomicU32::new(0),
            epoch: Instant::now(),
            proven_at: AtomicU64::new(0),
            wary_until: AtomicU64::new(0),
            streams: RwLock::new(()),
            state: Mutex::default(),
        }
    }
}

/// The gates of contexts, by driver and handle.
///
/// The driver has one primary context of a device, whoever retains it: a device that is opened again shares it with what
/// is left of the one before, and with other backends of the process.
static GATES: Mutex<BTreeMap<(usize, usize), Weak<ColdGate>>> = Mutex::new(BTreeMap::new());

/// How many submissions of each queue with work under way are over, by the queue's address.
type Progress = BTreeMap<usize, u64>;

/// A resident that does not return, so that the driver would wait for it, nobody knows how long.
#[derive(Debug, Clone)]
pub(crate) struct Unparkable {
    pub(crate) kernel: String,
    pub(crate) workgroup: u32,
}

/// Why a resident holds no call up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Boundary {
    /// It ended a slice.
    Returned,
    /// Nothing of it runs.
    Outside,
}

impl ColdGate {
    /// The gate of a context.
    pub(crate) fn of(driver: &Driver, context: Handle<CUctx_st>) -> Arc<Self> {
        let key = (driver.identity(), context.raw().addr());
        // Nothing of others runs under the lock.
        let mut gates = GATES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gate) = gates.get(&key).and_then(Weak::upgrade) {
            return gate;
        }
        let gate = Arc::<Self>::default();
        gates.retain(|_, gate| gate.strong_count() > 0);
        gates.insert(key, Arc::downgrade(&gate));
        gate
    }

    /// Whether somebody waits for the residents.
    pub(crate) fn is_awaited(&self) -> bool {
        // SeqCst: pairs with `open`, so that a feeder that misses the count is told by `hurry`.
        self.pending.load(Ordering::SeqCst) != 0
            // Relaxed: a hint.
            || self.now() < self.wary_until.load(Ordering::Relaxed)
    }

    /// Takes a resident in, and sees to it that somebody watches over it.
    pub(crate) fn add(self: &Arc<Self>, resident: &Arc<ResidentCore>) -> io::Result<()> {
        let mut state = self.state();
        if state.watch.is_none() {
            let gate = Arc::clone(self);
            let watch = thread::Builder::new().name("cuda/watch".to_owned()).spawn(move || gate.watch())?;
            state.watch = Some(watch.thread().clone());
        }
        state.residents.push(Arc::clone(resident));
        state.arrivals += 1;
        // Relaxed: a time, and nothing else.
        self.proven_at.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Takes a queue in.
    pub(crate) fn add_queue(&self, queue: &Arc<QueueCore>) {
        let mut state = self.state();
        state.queues.retain(|known| known.strong_count() > 0);
        state.queues.push(Arc::downgrade(queue));
    }

    /// Keeps deferred calls from being made while the result lives: work is about to enter a stream.
    pub(crate) fn enqueuing(&self) -> RwLockReadGuard<'_, ()> {
        // Nothing of others runs under the lock.
        self.streams.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call once every queue is empty or has finished something since, and lets nothing enter a stream
    /// meanwhile: a call that waits for a kernel that does not return would keep everybody from the context.
    fn beside_queues<R>(&self, call: impl FnOnce() -> R) -> R {
        loop {
            let before = self.progress();
            // Nobody waits for this thread. Whoever submits is kept waiting only once the call can be made.
            while !self.have_moved(&before) {
                thread::sleep(GLANCE);
            }
            let _alone = self.streams.write().unwrap_or_else(PoisonError::into_inner);
            // Something may have been submitted since, to a queue that was empty or not there.
            if self.have_moved(&before) {
                return call();
            }
        }
    }

    /// How far each queue is.
    fn progress(&self) -> Progress {
        let of = |queue: Weak<QueueCore>| Some((queue.as_ptr().addr(), queue.upgrade()?.progress()?));
        self.queues().into_iter().filter_map(of).collect()
    }

    /// Whether every queue is empty or has finished something since.
    fn have_moved(&self, before: &Progress) -> bool {
        self.queues().into_iter().filter_map(|queue| queue.upgrade()).all(|queue| {
            let before = before.get(&Arc::as_ptr(&queue).addr()).copied();
            queue.has_moved(before)
        })
    }

    /// The queues, to be looked at without the lock of the state: a thread that holds a queue's may want that.
    fn queues(&self) -> Vec<Weak<QueueCore>> {
        self.state().queues.clone()
    }

    /// Lets a resident go whose slices are over. Its feeder drops it, which is a thread that can stand a wait.
    pub(crate) fn remove(&self, resident: &ResidentCore) {
        let mut state = self.state();
        let gone = state.residents.extract_if(.., |known| std::ptr::eq(Arc::as_ptr(known), resident));
        let gone: Vec<_> = gone.collect();
        drop(state);
        drop(gone);
    }

    /// Wakes the watch, if it sleeps: a resident goes on.
    pub(crate) fn wake_watch(&self) {
        if let Some(watch) = &self.state().watch {
            watch.unpark();
        }
    }

    /// Lets residents hurry when a call that was not announced holds up one of them. Neither looking nor
    /// hurrying calls the driver, which would hold up this thread too.
    fn watch(&self) {
        loop {
            let mut state = self.state();
            if state.residents.is_empty() {
                state.watch = None;
                return;
            }
            // SeqCst, as in `is_awaited`. Calls of ours are announced, and have hurried everybody already.
            let is_ours = self.pending.load(Ordering::SeqCst) != 0;
            if !is_ours && state.residents.iter().any(|resident| resident.is_held_up()) {
                let until = self.now() + nanos(WARY);
                // Relaxed: a hint.
                self.wary_until.store(until, Ordering::Relaxed);
                state.residents.iter().for_each(|resident| resident.hurry());
            }
            let all_rest = state.residents.iter().all(|resident| resident.rests());
            drop(state);
            if all_rest {
                thread::park_timeout(Duration::from_secs(1));
            } else {
                thread::sleep(WATCH);
            }
        }
    }

    /// Makes residents hurry until the result is dropped.
    pub(crate) fn open(self: &Arc<Self>) -> Opened {
        Opened { _hurried: Hurried::begin(Arc::clone(self)) }
    }

    /// The same around a call that is not known to hold the context.
    fn beside<R>(&self, call: impl FnOnce() -> R) -> R {
        let _hurried = Hurried::begin(self);
        call()
    }

    /// Does a cold call in an exclusive section.
    fn pass<R>(&self, call: impl FnOnce() -> R) -> Result<R, Unparkable> {
        let _hurried = Hurried::begin(self);
        self.wait_for_boundaries()?;
        let _held = Held::begin(self);
        Ok(call())
    }

    /// Waits until every resident has shown that it returns, unless all have just now.
    fn wait_for_boundaries(&self) -> Result<(), Unparkable> {
        // Relaxed: a time, and nothing else.
        let proven_at = self.proven_at.load(Ordering::Relaxed);
        if proven_at != 0 && self.now().saturating_sub(proven_at) < nanos(PROOF_LASTS) {
            return Ok(());
        }
        let state = self.state();
        let arrivals = state.arrivals;
        let residents: Vec<_> =
            state.residents.iter().map(|known| (Arc::clone(known), known.slices_over())).collect();
        drop(state);
        let deadline = Deadline::within(PATIENCE);
        let mut all_returned = true;
        for (resident, before) in &residents {
            all_returned &= resident.wait_for_boundary(*before, deadline)? == Boundary::Returned;
        }
        // One that came meanwhile has shown nothing yet, and one that did not run may not return when it does.
        let state = self.state();
        if all_returned && state.arrivals == arrivals {
            self.proven_at.store(self.now(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Leave to ask the driver something, unless a cold call holds the context.
    pub(crate) fn ask(&self) -> Option<Asking<'_>> {
        // SeqCst, with `Held::begin`: either this thread sees the call, or the call sees this thread.
        self.asking.fetch_add(1, Ordering::SeqCst);
        let asking = Asking(self);
        (self.holding.load(Ordering::SeqCst) == 0).then_some(asking)
    }

    /// The same, once no call holds the context.
    pub(crate) fn ask_by(&self, deadline: Deadline) -> Option<Asking<'_>> {
        loop {
            match self.ask() {
                None if !deadline.is_past() => thread::sleep(WATCH.min(deadline.remaining())),
                asking => return asking,
            }
        }
    }

    fn now(&self) -> u64 {
        nanos(self.epoch.elapsed())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Only code of this crate runs under the lock: no driver, no drop of a resident.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Residents hurry while it lives.
#[derive(Debug)]
struct Hurried<G: AsRef<ColdGate>>(G);

impl<G: AsRef<ColdGate>> Hurried<G> {
    fn begin(gate: G) -> Self {
        // SeqCst, as in `is_awaited`.
        gate.as_ref().pending.fetch_add(1, Ordering::SeqCst);
        gate.as_ref().state().residents.iter().for_each(|resident| resident.hurry());
        Self(gate)
    }
}

impl<G: AsRef<ColdGate>> Drop for Hurried<G> {
    fn drop(&mut self) {
        self.0.as_ref().pending.fetch_sub(1, Ordering::SeqCst);
    }
}

impl AsRef<Self> for ColdGate {
    fn as_ref(&self) -> &Self {
        self
    }
}

/// What [`ColdGate::open`] gives.
#[derive(Debug)]
pub(crate) struct Opened {
    _hurried: Hurried<Arc<ColdGate>>,
}

/// The context is ours while it lives.
struct Held<'a>(&'a ColdGate);

impl<'a> Held<'a> {
    fn begin(gate: &'a ColdGate) -> Self {
        // SeqCst: see `ask`.
        gate.holding.fetch_add(1, Ordering::SeqCst);
        let start = Instant::now();
        while gate.asking.load(Ordering::SeqCst) != 0 && start.elapsed() < QUESTION {
            if start.elapsed() < BRIEF { hint::spin_loop() } else { thread::yield_now() }
        }
        Self(gate)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.holding.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A thread asks the driver something while it lives.
pub(crate) struct Asking<'a>(&'a ColdGate);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.asking.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Why a cold call did not do what it should.
#[derive(Debug)]
pub(crate) enum ColdError {
    /// It was not made.
    Unparkable(Unparkable),
    /// The driver's code, and its compiler's words.
    Driver { error: DriverError, log: String },
}

impl fmt::Display for ColdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unparkable(resident) => write!(f, "resident {:?} does not return", resident.kernel),
            Self::Driver { error, log } if log.is_empty() => write!(f, "{error}"),
            Self::Driver { error, log } => write!(f, "{error}: {log}"),
        }
    }
}

impl Error for ColdError {}

impl From<DriverError> for ColdError {
    fn from(error: DriverError) -> Self {
        Self::Driver { error, log: String::new() }
    }
}

impl From<Unparkable> for ColdError {
    fn from(resident: Unparkable) -> Self {
        Self::Unparkable(resident)
    }
}

/// Has the driver's compiler make a CUBIN of PTX for the device of the context.
///
/// Not known to wait for residents; it counts as cold because nobody has shown that it never does.
/// It takes long for other reasons, so nobody is kept from asking meanwhile.
pub(crate) fn assemble(context: &Context, ptx: &CStr) -> Result<Vec<u8>, ColdError> {
    let _current = context.enter()?;
    context.cold.beside(|| {
        let mut words = Words::new();
        let linker = Linker::create(context, &mut words)?;
        let made = linker.assemble(ptx);
        // The linker writes its words until it is gone.
        drop(linker);
        made.map_err(|error| ColdError::Driver { error, log: words.text() })
    })
}

/// A compiler's words, and the options that lead it to them. They stay where they are while it works.
struct Words {
    log: Vec<u8>,
    options: [c_int; 2],
    values: [*mut c_void; 2],
}

impl Words {
    fn new() -> Self {
        let mut log = vec![0; LOG_BYTES];
        let options = [
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER as c_int,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as c_int,
        ];
        // A vector's memory stays where it is, and reachable by this pointer, when the vector moves.
        let values = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_BYTES)];
        Self { log, options, values }
    }

    fn text(&self) -> String {
        let words = CStr::from_bytes_until_nul(self.log.as_slice()).map(CStr::to_string_lossy);
        words.map_or_else(|_| String::new(), |text| text.trim().to_owned())
    }
}

/// The driver's linker, destroyed when dropped.
struct Linker<'a> {
    context: &'a Context,
    raw: Handle<CUlinkState_st>,
}

impl<'a> Linker<'a> {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn create(context: &'a Context, words: &mut Words) -> Result<Self, DriverError> {
        let (options, values) = (words.options.as_mut_ptr(), words.values.as_mut_ptr());
        let raw = created("cuLinkCreate", |raw| {
            // SAFETY: options and values are two each, the first a buffer of the size the second gives; all
            // outlive the linker (`assemble`).
            unsafe { context.driver.link_create(2, options, values, raw) }
        })?;
        Ok(Self { context, raw })
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn assemble(&self, ptx: &CStr) -> Result<Vec<u8>, DriverError> {
        let driver = &self.context.driver;
        let (text, size) = (ptx.as_ptr().cast_mut().cast(), ptx.to_bytes_with_nul().len());
        let (none, kind) = (std::ptr::null_mut(), CUjitInputType::CU_JIT_INPUT_PTX as c_int);
        let name = c"kernel.ptx".as_ptr();
        // SAFETY: the linker is live; the text is `size` bytes with its zero byte and only read.
        unsafe {
            driver.link_add_data(self.raw.raw(), kind, text, size, name, 0, none, std::ptr::null_mut())
        }?;
        let (mut image, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: the linker is live; two values are written to this stack frame.
        unsafe { driver.link_complete(self.raw.raw(), &mut image, &mut size) }?;
        // SAFETY: the driver made `size` bytes there, which live as long as the linker.
        Ok(unsafe { std::slice::from_raw_parts(image.cast::<u8>(), size) }.to_vec())
    }
}

impl Drop for Linker<'_> {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        // SAFETY: created by `create`, destroyed once, while its context is current (`assemble`).
        let _destroyed = unsafe { self.context.driver.link_destroy(self.raw.raw()) };
    }
}

/// Loads a CUBIN.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) fn load_image(context: &Context, image: &[u8]) -> Result<Handle<CUmod_st>, ColdError> {
    let _current = context.enter()?;
    let mut words = Words::new();
    let loaded = context.cold.pass(|| {
        let (options, values) = (words.options.as_mut_ptr(), words.values.as_mut_ptr());
        created("cuModuleLoadDataEx", |raw| {
            // SAFETY: the image is complete (the caller's: a CUBIN is as long as its header says); options and
            // values are two each, the first a buffer of the size the second gives, and all live until the
            // call returns. That the code is sound was asserted with `with_foreign`.
            unsafe { context.driver.module_load_data(raw, image.as_ptr().cast(), 2, options, values) }
        })
    })?;
    loaded.map_err(|error| ColdError::Driver { error, log: words.text() })
}

/// Finds an entry point; under lazy loading this is what brings its code to the device.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) fn function(
    context: &Context,
    module: Handle<CUmod_st>,
    name: &CStr,
) -> Result<Handle<CUfunc_st>, ColdError> {
    let _current = context.enter()?;
    let found = context.cold.pass(|| {
        created("cuModuleGetFunction", |raw| {
            // SAFETY: the module is loaded in this context (the caller holds it), the name is terminated.
            unsafe { context.driver.module_get_function(raw, module.raw(), name.as_ptr()) }
        })
    })?;
    Ok(found?)
}

/// Unloads a module on the device's service thread, since it may wait.
///
/// # Safety
///
/// - No kernel of the module runs or will be launched.
/// - It is not unloaded again.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) unsafe fn unload(context: &Arc<Context>, module: Handle<CUmod_st>) {
    let owner = Arc::clone(context);
    // SAFETY: the caller's duties; an error leaves the module loaded, which harms nobody.
    serve_until_made(context, move || unsafe { unload_now(&owner, module) });
}

/// Unloads a module on this thread.
///
/// # Safety
///
/// - As for [`unload`], unless the call was not made.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) unsafe fn unload_now(context: &Context, module: Handle<CUmod_st>) -> Result<(), ColdError> {
    let _current = context.enter()?;
    // SAFETY: the caller's duties.
    Ok(context.cold.pass(|| unsafe { context.driver.module_unload(module.raw()) })??)
}

/// Gives pinned memory back to the system on the device's service thread, since it may wait.
///
/// # Safety
///
/// - It came from `cuMemHostAlloc`, nothing uses it any more, and it is not freed again.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) unsafe fn free_pinned(context: &Arc<Context>, pointer: Handle<c_void>) {
    let owner = Arc::clone(context);
    // SAFETY: the caller's duties; an error leaves the memory where it is, which harms nobody.
    serve_until_made(context, move || unsafe { free_pinned_now(&owner, pointer) });
}

/// Gives pinned memory back on this thread.
///
/// # Safety
///
/// - As for [`free_pinned`], unless the call was not made.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) unsafe fn free_pinned_now(context: &Context, pointer: Handle<c_void>) -> Result<(), ColdError> {
    let _current = context.enter()?;
    // SAFETY: the caller's duties.
    Ok(context.cold.pass(|| unsafe { context.driver.mem_free_host(pointer.raw()) })??)
}

/// Makes host memory of another owner known to the device.
///
/// # Safety
///
/// - `size` bytes at `pointer` stay valid until [`unregister`] was called for them.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) unsafe fn register(
    context: &Context,
    pointer: *mut c_void,
    size: usize,
    flags: c_uint,
) -> Result<(), DriverError> {
    let _current = context.enter()?;
    // SAFETY: the caller's duty. Registering was seen not to wait for residents, so it goes without the gate.
    unsafe { context.driver.mem_host_register(pointer, size, flags) }
}

/// Undoes [`register`] on this thread. The driver refuses what is not registered.
///
/// # Safety
///
/// - The memory is what [`register`] was given, and no work uses it any more.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) unsafe fn unregister(context: &Context, memory: &HostMemory) -> Result<(), ColdError> {
    let _current = context.enter()?;
    let pointer = memory.base().as_ptr().cast();
    // SAFETY: the caller's duties; the memory lives while `memory` is borrowed.
    Ok(context.cold.pass(|| unsafe { context.driver.mem_host_unregister(pointer) })??)
}

/// Makes a cold call on the device's service thread, however long residents and queues keep it from being made.
pub(crate) fn serve_until_made(
    context: &Arc<Context>,
    mut call: impl FnMut() -> Result<(), ColdError> + Send + 'static,
) {
    let gate = Arc::clone(&context.cold);
    context.serve(move || {
        loop {
            // A resident that does not return is waited for here, where nobody is kept from anything.
            let can_be_made = gate.wait_for_boundaries().is_ok();
            if can_be_made && !matches!(gate.beside_queues(&mut call), Err(ColdError::Unparkable(_))) {
                return;
            }
        }
    });
}
