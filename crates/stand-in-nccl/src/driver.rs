//! The stand-in for the CUDA driver, if a test names one: its streams are worked in, and its devices are the ranks'.

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    sync::{Mutex, PoisonError},
};

use libloading::Library;

use crate::{Code, control};

type Enqueue = unsafe extern "C" fn(*mut c_void, extern "C" fn(usize), usize) -> c_int;
type IsCapturing = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
type Device = unsafe extern "C" fn(*mut c_int) -> c_int;
type Allocate = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type Free = unsafe extern "C" fn(u64) -> c_int;

/// Its functions, which stay loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Driver {
    enqueue: Enqueue,
    is_capturing: IsCapturing,
    device: Device,
    allocate: Allocate,
    free: Free,
}

/// What a stream does when it comes to it.
pub(crate) enum Job {
    Once(Box<dyn FnOnce() + Send>),
    /// At every replay.
    Again(Box<dyn Fn() + Send + Sync>),
}

impl Driver {
    /// The one that a test named with the setting `driver`.
    pub(crate) fn named() -> Option<Self> {
        static LOADED: Mutex<BTreeMap<String, Driver>> = Mutex::new(BTreeMap::new());
        let path = control::setting("driver")?;
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = loaded.get(&path) {
            return Some(*driver);
        }
        let driver = Self::load(&path)?;
        loaded.insert(path, driver);
        Some(driver)
    }

    #[expect(unsafe_code, reason = "gives functions their types")]
    fn load(path: &str) -> Option<Self> {
        // SAFETY: the test has loaded it already.
        let library = unsafe { Library::new(path) }.ok()?;
        macro_rules! function {
            ($symbol:literal) => {
                // SAFETY: the type is that of the stand-in's function of this name.
                *unsafe { library.get($symbol) }.ok()?
            };
        }
        let driver = Self {
            enqueue: function!("stand_in_enqueue"),
            is_capturing: function!("cuStreamIsCapturing"),
            device: function!("cuCtxGetDevice"),
            allocate: function!("cuMemAlloc_v2"),
            free: function!("cuMemFree_v2"),
        };
        std::mem::forget(library);
        Some(driver)
    }

    /// The current context's device, if there is one.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn current_device(self) -> Option<c_int> {
        let mut device = 0;
        // SAFETY: one integer is written to this stack frame.
        (unsafe { (self.device)(&raw mut device) } == 0).then_some(device)
    }

    /// Whether what is put in a stream becomes a part of a graph.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn is_capturing(self, stream: usize) -> Result<bool, Code> {
        let mut status = 0;
        // SAFETY: the stand-in looks handles up; one integer is written to this stack frame.
        checked(unsafe { (self.is_capturing)(std::ptr::without_provenance_mut(stream), &raw mut status) })?;
        Ok(status != 0)
    }

    /// Puts a job in a stream of the current context.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn enqueue(self, stream: usize, job: Job) -> Result<(), Code> {
        // Of a graph's work nobody tells when it is the last time, so that it stays.
        let (function, argument): (extern "C" fn(usize), _) = match job {
            Job::Once(job) => (once, Box::into_raw(Box::new(job)).expose_provenance()),
            Job::Again(job) => (again, Box::into_raw(Box::new(job)).expose_provenance()),
        };
        // SAFETY: the stand-in looks handles up; the function takes this argument, as often as it is called.
        checked(unsafe { (self.enqueue)(std::ptr::without_provenance_mut(stream), function, argument) })
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn allocate(self, size: usize) -> Result<usize, Code> {
        let mut address = 0;
        // SAFETY: the address is written to this stack frame.
        checked(unsafe { (self.allocate)(&raw mut address, size) })?;
        usize::try_from(address).map_err(|_| Code::INTERNAL)
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn free(self, address: usize) -> Result<(), Code> {
        // SAFETY: the stand-in looks addresses up.
        checked(unsafe { (self.free)(address as u64) })
    }
}

fn checked(code: c_int) -> Result<(), Code> {
    if code == 0 {
        return Ok(());
    }
    control::say(&format!("the driver returned {code}"));
    Err(Code::UNHANDLED_CUDA)
}

#[expect(unsafe_code, reason = "takes what a number stands for")]
extern "C" fn once(argument: usize) {
    let job = std::ptr::with_exposed_provenance_mut::<Box<dyn FnOnce() + Send>>(argument);
    // SAFETY: `enqueue` made it of a box, and a stream comes to it once.
    let job = unsafe { Box::from_raw(job) };
    job();
}

#[expect(unsafe_code, reason = "looks at what a number stands for")]
extern "C" fn again(argument: usize) {
    let job = std::ptr::with_exposed_provenance::<Box<dyn Fn() + Send + Sync>>(argument);
    // SAFETY: `enqueue` made it of a box, which is never given back; it may be called from any thread.
    let job = unsafe { &*job };
    job();
}
