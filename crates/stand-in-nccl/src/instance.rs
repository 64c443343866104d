//! A copy of the library, loaded with a state of its own.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use libloading::Library;
use tempfile::TempDir;
use warpweft_stand_in as library;

const STEM: &str = "warpweft_stand_in_nccl";

type Set = unsafe extern "C" fn(*const c_char, *const c_char);
type Fail = unsafe extern "C" fn(*const c_char, u64, c_int);
type Calls = unsafe extern "C" fn(*const c_char) -> u64;
type Create = unsafe extern "C" fn(*mut usize) -> c_int;
type Synchronize = unsafe extern "C" fn(usize, u64) -> c_int;
type Destroy = unsafe extern "C" fn(usize) -> c_int;

/// A library of its own: what goes wrong in one is nothing to another.
///
/// The file goes when it is dropped; the code stays loaded until the process ends, since threads may still be in it.
#[derive(Debug)]
pub struct StandIn {
    path: PathBuf,
    set: Set,
    fail: Fail,
    calls: Calls,
    create: Create,
    synchronize: Synchronize,
    destroy: Destroy,
    _folder: TempDir,
}

/// A stream of the stand-in's.
#[derive(Debug)]
pub struct Stream<'a> {
    library: &'a StandIn,
    handle: usize,
}

impl StandIn {
    /// Loads a copy of the library that cargo built beside this test.
    ///
    /// # Errors
    ///
    /// The operating system's, if the library is not there or cannot be loaded.
    pub fn load() -> io::Result<Self> {
        Self::lacking(&[])
    }

    /// The same without some functions, as an older library.
    ///
    /// # Errors
    ///
    /// As [`Self::load`]; a function that is not there cannot be taken away.
    pub fn lacking(functions: &[&str]) -> io::Result<Self> {
        let (folder, path) = library::copied(STEM, functions)?;
        let library = library::open(&path)?;
        let this = Self {
            set: symbol(&library, c"stand_in_nccl_set")?,
            fail: symbol(&library, c"stand_in_nccl_fail")?,
            calls: symbol(&library, c"stand_in_nccl_calls")?,
            create: symbol(&library, c"stand_in_nccl_stream_create")?,
            synchronize: symbol(&library, c"stand_in_nccl_stream_synchronize")?,
            destroy: symbol(&library, c"stand_in_nccl_stream_destroy")?,
            path,
            _folder: folder,
        };
        // Never unloaded: threads may run in it.
        std::mem::forget(library);
        Ok(this)
    }

    /// The library's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets what a test wants: `version` (as `ncclGetVersion` tells it), `device`, `driver` (the file of
    /// a stand-in driver, whose streams and devices are used), `pending` (looks that find a call in
    /// progress), `stuck` (the call that stays so), `async` (`rank:code`, what looking finds), `windows` (0 where there
    /// are none), `abort_ms` (how long an abort takes).
    #[must_use]
    pub fn with(self, name: &str, value: &str) -> Self {
        self.set(name, value);
        self
    }

    /// The same, later.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn set(&self, name: &str, value: &str) {
        let (name, value) = (text(name), text(value));
        // SAFETY: two terminated texts that live until the return.
        unsafe { (self.set)(name.as_ptr(), value.as_ptr()) };
    }

    /// Lets the coming call with this number of a function fail with `code`.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn fail(&self, name: &str, number: u64, code: i32) {
        let name = text(name);
        // SAFETY: a terminated text that lives until the return.
        unsafe { (self.fail)(name.as_ptr(), number, code) };
    }

    /// How often a function was called.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn calls(&self, name: &str) -> u64 {
        let name = text(name);
        // SAFETY: a terminated text that lives until the return.
        unsafe { (self.calls)(name.as_ptr()) }
    }

    /// A new stream.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn stream(&self) -> Stream<'_> {
        let mut handle = 0;
        // SAFETY: one integer is written to this stack frame. The call does not fail.
        let _created = unsafe { (self.create)(&raw mut handle) };
        Stream { library: self, handle }
    }
}

impl Stream<'_> {
    /// What calls take.
    #[must_use]
    pub const fn raw(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.handle)
    }

    /// Waits until everything is done that was put in it; whether it was in time.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn synchronize(&self, within: Duration) -> bool {
        let ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
        // SAFETY: the stream lives.
        unsafe { (self.library.synchronize)(self.handle, ms) == 0 }
    }
}

impl Drop for Stream<'_> {
    #[expect(unsafe_code, reason = "calls the library")]
    fn drop(&mut self) {
        // SAFETY: the stream lives and is destroyed once.
        let _destroyed = unsafe { (self.library.destroy)(self.handle) };
    }
}

/// Texts of tests hold no zero byte; of one that does, nothing is left.
fn text(words: &str) -> CString {
    CString::new(words).unwrap_or_default()
}

#[expect(unsafe_code, reason = "looks symbols up")]
fn symbol<F: Copy>(library: &Library, name: &CStr) -> io::Result<F> {
    // SAFETY: the types above are those of the functions of these names in `control.rs` and `exports.rs`.
    unsafe { library::symbol(library, name) }
}
