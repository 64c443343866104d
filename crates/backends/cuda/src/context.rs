//! One device's context: the primary one, which cudarc, candle, burn and the CUDA runtime share, unless a program
//! brings its own.

use std::{
    any::Any,
    ffi::c_int,
    fmt, ptr,
    sync::{
        Arc, OnceLock,
        mpsc::{self, Sender},
    },
    thread,
};

use cudarc::driver::sys::{CUctx_st, CUdevice};
use warpweft_core_types::{DeviceId, DriverError, Failure, NativeHandle, OpenError};

use crate::{
    cold::ColdGate,
    driver::{Driver, Handle, created},
    exit::Parting,
    fork,
    interop::CONTEXT,
};

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;

/// Work for the thread that can stand a wait.
type Job = Box<dyn FnOnce() + Send>;

/// A context of another library, with the owner that keeps it alive.
pub struct NativeContext {
    handle: NativeHandle,
    owner: Arc<dyn Any + Send + Sync>,
}

impl NativeContext {
    /// Describes a context by its handle, of the kind [`CONTEXT`].
    ///
    /// # Safety
    ///
    /// - The handle is a context of this process's driver.
    /// - It stays valid until `owner` is dropped.
    #[expect(unsafe_code, reason = "the duties are the caller's; nothing is done here")]
    pub unsafe fn new(handle: NativeHandle, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { handle, owner }
    }

    /// Asks the driver which device it is of.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn enter(self, driver: &Driver) -> Result<ForeignContext, OpenError> {
        let invalid = |reason: String| OpenError::InvalidConfig { reason };
        let raw = usize::try_from(self.handle.value).map(ptr::with_exposed_provenance_mut);
        let raw = raw.ok().and_then(Handle::written).filter(|_| self.handle.kind == CONTEXT);
        let raw: Handle<CUctx_st> =
            raw.ok_or_else(|| invalid(format!("{} is no CUDA context", self.handle)))?;
        let refused = |error: DriverError| invalid(format!("{}: {error}", self.handle));
        // SAFETY: it is a context that lives while its owner does (`NativeContext::new`).
        unsafe { driver.context_push(raw.raw()) }.map_err(refused)?;
        let (mut device, mut popped) = (0, ptr::null_mut());
        // SAFETY: a context is current; one integer is written to this stack frame.
        let asked = unsafe { driver.context_device(&mut device) };
        // SAFETY: pushed just before; one handle is written to this stack frame.
        unsafe { driver.context_pop(&mut popped) }.map_err(refused)?;
        asked.map_err(refused)?;
        Ok(ForeignContext { raw, device, owner: self.owner })
    }
}

impl fmt::Debug for NativeContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NativeContext({})", self.handle)
    }
}

/// A context of another library whose device is known.
pub(crate) struct ForeignContext {
    raw: Handle<CUctx_st>,
    pub(crate) device: CUdevice,
    owner: Arc<dyn Any + Send + Sync>,
}

/// Who releases a context.
enum Origin {
    Primary,
    Foreign { _owner: Arc<dyn Any + Send + Sync> },
}

/// The primary context, retained, or one of another library.
pub(crate) struct Context {
    pub(crate) driver: Arc<Driver>,
    pub(crate) device: DeviceId,
    pub(crate) ordinal: CUdevice,
    pub(crate) raw: Handle<CUctx_st>,
    /// Calls that wait for resident kernels, and the residents they wait for.
    pub(crate) cold: Arc<ColdGate>,
    failure: OnceLock<Arc<Failure>>,
    /// Taken when the context is dropped.
    service: Option<Sender<Job>>,
    origin: Origin,
}

impl Context {
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn retain(
        driver: &Arc<Driver>,
        device: DeviceId,
        ordinal: CUdevice,
    ) -> Result<Arc<Self>, OpenError> {
        // SAFETY: `ordinal` is a device the driver enumerated; the result is written to `raw`.
        let retain = |raw| unsafe { driver.primary_context_retain(raw, ordinal) };
        let raw = created("cuDevicePrimaryCtxRetain", retain).map_err(OpenError::Driver)?;
        Self::start(driver, device, ordinal, raw, Origin::Primary)
    }

    /// Takes a context of another library, which its owner keeps alive.
    pub(crate) fn foreign(
        driver: &Arc<Driver>,
        device: DeviceId,
        foreign: ForeignContext,
    ) -> Result<Arc<Self>, OpenError> {
        let ForeignContext { raw, device: ordinal, owner } = foreign;
        Self::start(driver, device, ordinal, raw, Origin::Foreign { _owner: owner })
    }

    fn start(
        driver: &Arc<Driver>,
        device: DeviceId,
        ordinal: CUdevice,
        raw: Handle<CUctx_st>,
        origin: Origin,
    ) -> Result<Arc<Self>, OpenError> {
        let (service, jobs) = mpsc::channel::<Job>();
        let context = Arc::new(Self {
            driver: Arc::clone(driver),
            device,
            ordinal,
            raw,
            cold: ColdGate::of(driver, raw),
            failure: OnceLock::new(),
            service: Some(service),
            origin,
        });
        // The thread ends when the context, and with it the sender, is gone.
        thread::Builder::new()
            .name(format!("{device}/service"))
            .spawn(move || jobs.into_iter().for_each(|job| job()))
            .map_err(|error| OpenError::NoThread { what: device.to_string(), reason: error.to_string() })?;
        Ok(context)
    }

    /// Makes the context current on this thread until the guard is dropped, and then whatever was before:
    /// the program's own CUDA code finds its thread as it left it.
    ///
    /// Meanwhile what this thread calls is no matter of captures that others have under way anywhere. Without
    /// that a question about one of our events would end a capture of theirs, and fail.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn enter(&self) -> Result<Entered<'_>, DriverError> {
        let mut entered = self.enter_for_others()?;
        let mut mode = RELAXED;
        // SAFETY: one integer is read and written on this stack frame.
        unsafe { self.driver.exchange_capture_mode(&mut mode) }?;
        entered.capture_mode = Some(mode);
        Ok(entered)
    }

    /// The same for code of others, which is bound by captures as they are.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn enter_for_others(&self) -> Result<Entered<'_>, DriverError> {
        // SAFETY: the context is retained as long as `self` lives, which the guard borrows.
        unsafe { self.driver.context_push(self.raw.raw()) }?;
        Ok(Entered { context: self, capture_mode: None, pops: true })
    }

    /// The same for calls that no capture forbids, or that see to that by themselves. It costs next to nothing where the
    /// context is current already.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn enter_lightly(&self) -> Result<Entered<'_>, DriverError> {
        let mut current = ptr::null_mut();
        // SAFETY: one handle is written to this stack frame.
        unsafe { self.driver.context_current(&mut current) }?;
        if current == self.raw.raw() {
            return Ok(Entered { context: self, capture_mode: None, pops: false });
        }
        self.enter_for_others()
    }

    /// The same for code of others, by a guard that keeps the context. It stays on this thread.
    pub(crate) fn enter_for_long(self: &Arc<Self>) -> Result<EnteredForLong, DriverError> {
        std::mem::forget(self.enter_for_others()?);
        Ok(EnteredForLong(Arc::clone(self)))
    }

    /// Whether it is the primary context of its device, which other libraries take for granted.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn is_primary(&self) -> bool {
        if let Origin::Primary = self.origin {
            return true;
        }
        let mut primary = ptr::null_mut();
        // SAFETY: the driver enumerated the device; one handle is written to this stack frame.
        if unsafe { self.driver.primary_context_retain(&mut primary, self.ordinal) }.is_err() {
            return false;
        }
        // SAFETY: retained just now. This context is not ended by it: its owner keeps it.
        let _released = unsafe { self.driver.primary_context_release(self.ordinal) };
        primary == self.raw.raw()
    }

    /// Does `job` on a thread of the device's own, for calls that may wait long.
    pub(crate) fn serve(&self, job: impl FnOnce() + Send + 'static) {
        // In a forked process there is no thread, and the channel's lock may be held for good.
        if let Some(service) = self.service.as_ref().filter(|_| !self.is_left()) {
            let parting = Parting::begin();
            let job = move || {
                job();
                drop(parting);
            };
            // The thread lives as long as `self`, so there is somebody to take it.
            let _taken = service.send(Box::new(job));
        }
    }

    /// Why the device is lost, if it is.
    pub(crate) fn failure(&self) -> Option<Arc<Failure>> {
        self.left().or_else(|| self.failure.get().cloned())
    }

    /// Whether this is a process that was forked from the context's. No lock may be taken then.
    pub(crate) fn is_left(&self) -> bool {
        self.driver.origin.is_left()
    }

    /// The failure of everything in a process that was forked from the context's.
    pub(crate) fn left(&self) -> Option<Arc<Failure>> {
        self.is_left().then(|| left(self.device))
    }

    /// What a driver error means for the work that met it. Some errors mean that the device is lost to the
    /// process; then it stays lost.
    pub(crate) fn judge(&self, source: DriverError) -> Arc<Failure> {
        if let Some(failure) = self.failure() {
            return failure;
        }
        if !loses_device(source.code) {
            return Arc::new(Failure::Driver { device: self.device, source });
        }
        let lost = Failure::DeviceLost { device: self.device, reason: source.to_string() };
        Arc::clone(self.failure.get_or_init(|| Arc::new(lost)))
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.device)
    }
}

impl Drop for Context {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        if self.is_left() {
            std::mem::forget(self.service.take());
            return;
        }
        let Origin::Primary = self.origin else { return };
        let _parting = Parting::begin();
        // SAFETY: retained once in `retain`; every object of the context holds an `Arc` of it, so none is
        // left. An error means that the process is ending or the device is lost: nothing to give back.
        let _released = unsafe { self.driver.primary_context_release(self.ordinal) };
    }
}

/// A current context.
#[derive(Debug)]
pub(crate) struct Entered<'a> {
    context: &'a Context,
    /// The thread's mode before, if it was changed.
    capture_mode: Option<c_int>,
    /// It was pushed for this.
    pops: bool,
}

impl Drop for Entered<'_> {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        let driver = &self.context.driver;
        if let Some(mode) = &mut self.capture_mode {
            // SAFETY: one integer is read and written where this guard is.
            let _restored = unsafe { driver.exchange_capture_mode(mode) };
        }
        if !self.pops {
            return;
        }
        let mut popped = ptr::null_mut();
        // SAFETY: pushed by `enter` on this thread (the guard holds a borrow and is never sent, since it
        // is only ever a local); the result is written to this stack frame.
        let _popped = unsafe { driver.context_pop(&mut popped) };
    }
}

/// A current context that the guard keeps.
#[derive(Debug)]
pub(crate) struct EnteredForLong(Arc<Context>);

impl Drop for EnteredForLong {
    fn drop(&mut self) {
        // As the guard that was forgotten would.
        drop(Entered { context: &self.0, capture_mode: None, pops: true });
    }
}

/// What is left of a device in a process that was forked from the one that opened it.
pub(crate) fn left(device: DeviceId) -> Arc<Failure> {
    Arc::new(Failure::DeviceLost { device, reason: fork::CAUSE.to_owned() })
}

/// Errors after which every further call of the context fails: the driver's manual says of each that the
/// process must be restarted to go on with the device.
const fn loses_device(code: i64) -> bool {
    matches!(
        code,
        // Deinitialised; ECC, NVLink or contained hardware errors.
        4 | 214 | 220 | 226 | 721
        // Illegal address, launch timeout, destroyed context.
        | 700 | 702 | 709
        // Assert; stack, instruction, alignment, address space, program counter; launch failed.
        | 710 | 714..=719
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sticky_errors_lose_the_device_and_others_do_not() {
        let check = |code, lost| assert_eq!(loses_device(code), lost, "{code}");
        check(700, true);
        check(719, true);
        check(2, false);
        check(600, false);
        check(711, false);
    }
}
