//! Calls that the driver makes wait for resident kernels, all of them, and the gate they go through.
//!
//! While a kernel is resident, loading or unloading code and freeing pinned memory wait until it returns,
//! and with them every other call of the context. Residents are slices, so these calls get through; here
//! they also ask the residents for short slices, so that it is soon.

use std::{
    ffi::{CStr, c_int, c_void},
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys::{CUfunc_st, CUjit_option, CUmod_st};
use warpweft_core_types::DriverError;

use crate::{
    context::Context,
    driver::{Handle, created},
    resident::ResidentCore,
};

/// Room for a compiler's words.
const LOG_BYTES: usize = 16 << 10;

/// Cold calls under way, and the residents that should know.
#[derive(Debug, Default)]
pub(crate) struct ColdGate {
    pending: AtomicU32,
    residents: Mutex<Vec<Weak<ResidentCore>>>,
}

impl ColdGate {
    /// Whether somebody waits for the residents.
    pub(crate) fn is_awaited(&self) -> bool {
        // SeqCst: pairs with `pass`, so that a feeder that misses the count is told by `hurry`.
        self.pending.load(Ordering::SeqCst) != 0
    }

    pub(crate) fn add(&self, resident: &Arc<ResidentCore>) {
        let mut residents = self.residents.lock().unwrap_or_else(PoisonError::into_inner);
        residents.retain(|known| known.strong_count() > 0);
        residents.push(Arc::downgrade(resident));
    }

    /// Does a cold call while the residents hurry.
    fn pass<R>(&self, call: impl FnOnce() -> R) -> R {
        self.pending.fetch_add(1, Ordering::SeqCst);
        let residents = self.residents.lock().unwrap_or_else(PoisonError::into_inner);
        residents.iter().filter_map(Weak::upgrade).for_each(|resident| resident.hurry());
        drop(residents);
        let result = call();
        self.pending.fetch_sub(1, Ordering::SeqCst);
        result
    }
}

/// Why an image was not loaded: the driver's code, and its compiler's words.
#[derive(Debug)]
pub(crate) struct ImageError {
    pub(crate) error: DriverError,
    pub(crate) log: String,
}

/// Loads a CUBIN, or PTX text that ends in a zero byte.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) fn load_image(context: &Context, image: &[u8]) -> Result<Handle<CUmod_st>, ImageError> {
    let plain = |error| ImageError { error, log: String::new() };
    let _current = context.enter().map_err(plain)?;
    let mut log = vec![0_u8; LOG_BYTES];
    let mut options = [
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER as c_int,
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES as c_int,
    ];
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_BYTES)];
    let loaded = context.cold.pass(|| {
        created("cuModuleLoadDataEx", |raw| {
            // SAFETY: the image is complete (the caller's: a CUBIN carries its size, PTX its zero byte);
            // options and values are two each, the first a buffer of the size the second gives, and all
            // live until the call returns. That the code is sound was asserted with `with_foreign`.
            unsafe {
                context.driver.module_load_data(
                    raw,
                    image.as_ptr().cast(),
                    2,
                    options.as_mut_ptr(),
                    values.as_mut_ptr(),
                )
            }
        })
    });
    loaded.map_err(|error| {
        let words = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy);
        ImageError { error, log: words.map_or_else(|_| String::new(), |text| text.trim().to_owned()) }
    })
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
        let Ok(_current) = owner.enter() else { return };
        // SAFETY: the caller's duties; an error leaves the module loaded, which harms nobody.
        let _unloaded = owner.cold.pass(|| unsafe { owner.driver.module_unload(module.raw()) });
    });
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
