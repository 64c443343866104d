//! Calls that the driver makes wait for resident kernels, all of them, and the gate they go through.
//!
//! While a kernel is resident, loading or unloading code and freeing pinned memory wait until it returns,
//! and with them every other call of the context. Residents are slices, so these calls get through; here
//! they also ask the residents for short slices, so that it is soon.

use std::{
    ffi::{CStr, c_int, c_uint, c_void},
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::sys::{CUfunc_st, CUjit_option, CUjitInputType, CUlinkState_st, CUmod_st};
use warpweft_core_types::{DriverError, HostMemory};

use crate::{
    context::Context,
    driver::{Handle, created},
    resident::ResidentCore,
};

/// Room for a compiler's words.
const LOG_BYTES: usize = 16 << 10;

/// How often the watch looks after residents that somebody may hold up.
const WATCH: Duration = Duration::from_micros(50);

/// After a resident was held up by a call that nobody announced, more such calls are expected for this long.
const WARY: Duration = Duration::from_millis(5);

/// Cold calls under way, and the residents that should know.
#[derive(Debug)]
pub(crate) struct ColdGate {
    pending: AtomicU32,
    epoch: Instant,
    /// Until when slices stay short because of calls that were not announced, in nanoseconds since the epoch.
    wary_until: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    residents: Vec<Weak<ResidentCore>>,
    /// The watch runs while there are residents.
    is_watched: bool,
}

impl Default for ColdGate {
    fn default() -> Self {
        Self {
            pending: AtomicU32::new(0),
            epoch: Instant::now(),
            wary_until: AtomicU64::new(0),
            state: Mutex::default(),
        }
    }
}

impl ColdGate {
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
        state.residents.retain(|known| known.strong_count() > 0);
        state.residents.push(Arc::downgrade(resident));
        if !state.is_watched {
            let gate = Arc::clone(self);
            thread::Builder::new().name("cuda/watch".to_owned()).spawn(move || gate.watch())?;
            state.is_watched = true;
        }
        Ok(())
    }

    /// Lets residents hurry when a call that was not announced holds up one of them. Neither looking nor
    /// hurrying calls the driver, which would hold up this thread too.
    fn watch(&self) {
        loop {
            thread::sleep(WATCH);
            let mut state = self.state();
            state.residents.retain(|known| known.strong_count() > 0);
            if state.residents.is_empty() {
                state.is_watched = false;
                return;
            }
            let residents: Vec<_> = state.residents.iter().filter_map(Weak::upgrade).collect();
            drop(state);
            // Ours are announced, and have hurried everybody already.
            if self.pending.load(Ordering::SeqCst) == 0 && residents.iter().any(|held| held.is_held_up()) {
                let until = self.now() + u64::try_from(WARY.as_nanos()).unwrap_or(u64::MAX);
                self.wary_until.store(until, Ordering::Relaxed);
                residents.iter().for_each(|resident| resident.hurry());
            }
        }
    }

    /// Makes residents hurry until the result is dropped.
    pub(crate) fn open(self: &Arc<Self>) -> Opened {
        self.begin();
        Opened(Arc::clone(self))
    }

    fn begin(&self) {
        self.pending.fetch_add(1, Ordering::SeqCst);
        let state = self.state();
        state.residents.iter().filter_map(Weak::upgrade).for_each(|resident| resident.hurry());
    }

    fn end(&self) {
        self.pending.fetch_sub(1, Ordering::SeqCst);
    }

    /// Does a cold call while the residents hurry.
    fn pass<R>(&self, call: impl FnOnce() -> R) -> R {
        self.begin();
        let result = call();
        self.end();
        result
    }

    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Residents hurry while it lives.
#[derive(Debug)]
pub(crate) struct Opened(Arc<ColdGate>);

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Why an image was not loaded: the driver's code, and its compiler's words.
#[derive(Debug)]
pub(crate) struct ImageError {
    pub(crate) error: DriverError,
    pub(crate) log: String,
}

/// Has the driver's compiler make a CUBIN of PTX for the device of the context.
///
/// Not known to wait for residents; it counts as cold because nobody has shown that it never does.
pub(crate) fn assemble(context: &Context, ptx: &CStr) -> Result<Vec<u8>, ImageError> {
    let plain = |error| ImageError { error, log: String::new() };
    let _current = context.enter().map_err(plain)?;
    context.cold.pass(|| {
        let mut words = Words::new();
        let linker = Linker::create(context, &mut words).map_err(plain)?;
        let made = linker.assemble(ptx);
        // The linker writes its words until it is gone.
        drop(linker);
        made.map_err(|error| ImageError { error, log: words.text() })
    })
}

/// A compiler's words, and the options that lead it to them. They stay where they are while it works.
struct Words {
    log: Box<[u8; LOG_BYTES]>,
    options: [c_int; 2],
    values: [*mut c_void; 2],
}

impl Words {
    fn new() -> Self {
        let mut log = Box::new([0; LOG_BYTES]);
        let options = [
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER as c_int,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as c_int,
        ];
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
pub(crate) fn load_image(context: &Context, image: &[u8]) -> Result<Handle<CUmod_st>, ImageError> {
    let plain = |error| ImageError { error, log: String::new() };
    let _current = context.enter().map_err(plain)?;
    let mut words = Words::new();
    let loaded = context.cold.pass(|| {
        let (options, values) = (words.options.as_mut_ptr(), words.values.as_mut_ptr());
        created("cuModuleLoadDataEx", |raw| {
            // SAFETY: the image is complete (the caller's: a CUBIN is as long as its header says); options and
            // values are two each, the first a buffer of the size the second gives, and all live until the
            // call returns. That the code is sound was asserted with `with_foreign`.
            unsafe { context.driver.module_load_data(raw, image.as_ptr().cast(), 2, options, values) }
        })
    });
    loaded.map_err(|error| ImageError { error, log: words.text() })
}

/// Finds an entry point; under lazy loading this is what brings its code to the device.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) fn function(
    context: &Context,
    module: Handle<CUmod_st>,
    name: &CStr,
) -> Result<Handle<CUfunc_st>, DriverError> {
    let _current = context.enter()?;
    context.cold.pass(|| {
        created("cuModuleGetFunction", |raw| {
            // SAFETY: the module is loaded in this context (the caller holds it), the name is terminated.
            unsafe { context.driver.module_get_function(raw, module.raw(), name.as_ptr()) }
        })
    })
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
    context.serve(move || {
        // SAFETY: the caller's duties; an error leaves the module loaded, which harms nobody.
        let _unloaded = unsafe { unload_now(&owner, module) };
    });
}

/// Unloads a module on this thread.
///
/// # Safety
///
/// - As for [`unload`].
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) unsafe fn unload_now(context: &Context, module: Handle<CUmod_st>) -> Result<(), DriverError> {
    let _current = context.enter()?;
    // SAFETY: the caller's duties.
    context.cold.pass(|| unsafe { context.driver.module_unload(module.raw()) })
}

/// Gives pinned memory back to the system.
///
/// # Safety
///
/// - It came from `cuMemHostAlloc`, nothing uses it any more, and it is not freed again.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) unsafe fn free_pinned(context: &Context, pointer: *mut c_void) -> Result<(), DriverError> {
    let _current = context.enter()?;
    // SAFETY: the caller's duties.
    context.cold.pass(|| unsafe { context.driver.mem_free_host(pointer) })
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

/// Undoes [`register`] on the device's service thread, since it may wait, then lets `owner` go.
///
/// # Safety
///
/// - The memory was registered once, no work uses it any more, and it is not unregistered again.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) unsafe fn unregister(context: &Arc<Context>, memory: HostMemory) {
    let own = Arc::clone(context);
    context.serve(move || {
        // An error leaves it registered.
        let _done = unregister_now(&own, &memory);
        drop(memory);
    });
}

/// Undoes [`register`] on this thread. The driver refuses what is not registered.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) fn unregister_now(context: &Context, memory: &HostMemory) -> Result<(), DriverError> {
    let _current = context.enter()?;
    let pointer = memory.base().as_ptr().cast();
    // SAFETY: the memory lives while `memory` is borrowed. Unregistering frees nothing, and work that still used
    // the registration would find the driver waiting for it.
    context.cold.pass(|| unsafe { context.driver.mem_host_unregister(pointer) })
}

/// Registers memory that is never given back, so that it may stay registered.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) fn register_for_good(context: &Context, memory: HostMemory) -> Result<(), DriverError> {
    let (pointer, len) = (memory.base().as_ptr().cast(), memory.len());
    // Its owner is not let go.
    std::mem::forget(memory);
    // SAFETY: the memory stays valid, since its owner lives for good.
    unsafe { register(context, pointer, len, 0) }
}
