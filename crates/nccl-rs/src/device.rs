//! Which device is current: the library works on the calling thread's.

use std::{
    ffi::{c_int, c_uint, c_void},
    ptr,
    sync::OnceLock,
};

use libloading::Library;

use crate::error::{Error, in_full};

/// `CUcontext`.
type Context = *mut c_void;

/// The functions of the CUDA driver that make a device current.
#[derive(Debug)]
struct Driver {
    init: unsafe extern "C" fn(c_uint) -> c_int,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    retain: unsafe extern "C" fn(*mut Context, c_int) -> c_int,
    release: unsafe extern "C" fn(c_int) -> c_int,
    push: unsafe extern "C" fn(Context) -> c_int,
    pop: unsafe extern "C" fn(*mut Context) -> c_int,
    current: unsafe extern "C" fn(*mut Context) -> c_int,
    _library: Library,
}

impl Driver {
    fn loaded() -> Result<&'static Self, String> {
        /// Loaded once and never unloaded, which the driver does not allow for.
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        DRIVER.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    #[expect(unsafe_code, reason = "loads the driver and gives its functions their types")]
    fn load() -> Result<Self, String> {
        const NAME: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };
        // SAFETY: loading the driver runs its initialisers, which may run at any time.
        let library = unsafe { Library::new(NAME) }.map_err(|error| in_full(&error))?;
        macro_rules! function {
            ($symbol:literal) => {
                // SAFETY: `cuda.h` declares the symbol so since CUDA 11.
                *unsafe { library.get($symbol) }.map_err(|_| format!("it has no {}", $symbol))?
            };
        }
        Ok(Self {
            init: function!("cuInit"),
            device: function!("cuDeviceGet"),
            retain: function!("cuDevicePrimaryCtxRetain"),
            release: function!("cuDevicePrimaryCtxRelease_v2"),
            push: function!("cuCtxPushCurrent_v2"),
            pop: function!("cuCtxPopCurrent_v2"),
            current: function!("cuCtxGetCurrent"),
            _library: library,
        })
    }
}

/// A context, current to this thread until it is dropped.
#[derive(Debug)]
pub(crate) struct Current {
    driver: &'static Driver,
    /// The device whose primary context was retained for it.
    retained: Option<c_int>,
}

impl Current {
    /// Makes a device current.
    ///
    /// # Errors
    ///
    /// [`Error::Device`] if there is no driver or no such device.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn enter(ordinal: u32) -> Result<Self, Error> {
        let refuse = |reason: String| Error::Device { device: ordinal, reason };
        let driver = Driver::loaded().map_err(|reason| refuse(format!("there is no driver: {reason}")))?;
        let check = |call: &str, code: c_int| match code {
            0 => Ok(()),
            code => Err(refuse(format!("{call} returned {code}"))),
        };
        // SAFETY: no flags are defined.
        check("cuInit", unsafe { (driver.init)(0) })?;
        let mut device = 0;
        let number = c_int::try_from(ordinal).map_err(|_| refuse("there is no such device".to_owned()))?;
        // SAFETY: the result is written to this stack frame.
        check("cuDeviceGet", unsafe { (driver.device)(&raw mut device, number) })?;
        let mut context = ptr::null_mut();
        // SAFETY: the device is one of the driver's; the result is written to this stack frame.
        check("cuDevicePrimaryCtxRetain", unsafe { (driver.retain)(&raw mut context, device) })?;
        // SAFETY: the context was retained just now.
        if let Err(error) = check("cuCtxPushCurrent", unsafe { (driver.push)(context) }) {
            // SAFETY: gives back what was retained.
            let _code = unsafe { (driver.release)(device) };
            return Err(error);
        }
        Ok(Self { driver, retained: Some(device) })
    }
}

/// What is current to one thread, for another that works for it.
#[derive(Debug)]
pub(crate) struct Inherited {
    driver: &'static Driver,
    context: Context,
}

// SAFETY: any thread may make a context current.
#[expect(unsafe_code, reason = "holds a handle of the driver's")]
unsafe impl Send for Inherited {}

impl Inherited {
    /// What is current here, if there is a driver and anything is.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn here() -> Option<Self> {
        let driver = Driver::loaded().ok()?;
        let mut context = ptr::null_mut();
        // SAFETY: the result is written to this stack frame.
        let code = unsafe { (driver.current)(&raw mut context) };
        (code == 0 && !context.is_null()).then_some(Self { driver, context })
    }

    /// Makes it current here too.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn enter(self) -> Option<Current> {
        // SAFETY: it was current to the thread that this one works for.
        let code = unsafe { (self.driver.push)(self.context) };
        (code == 0).then_some(Current { driver: self.driver, retained: None })
    }
}

impl Drop for Current {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        let mut context = ptr::null_mut();
        // SAFETY: whoever made this pushed a context on this thread, and nobody of ours pushed another meanwhile.
        let _code = unsafe { (self.driver.pop)(&raw mut context) };
        if let Some(device) = self.retained {
            // SAFETY: gives back what `enter` retained.
            let _code = unsafe { (self.driver.release)(device) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_be_is_an_error() {
        assert!(matches!(Current::enter(u32::MAX), Err(Error::Device { device: u32::MAX, .. })));
    }
}
