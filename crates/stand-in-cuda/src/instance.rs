//! A copy of the library, loaded with a state of its own.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    io,
    path::{Path, PathBuf},
};

use libloading::Library;
use tempfile::TempDir;
use warpweft_stand_in as library;

const STEM: &str = "warpweft_stand_in_cuda";

type Set = unsafe extern "C" fn(*const c_char, *const c_char) -> c_int;
type Fail = unsafe extern "C" fn(*const c_char, u64, c_int) -> c_int;
type Failed = unsafe extern "C" fn(*mut *const u8, *mut usize) -> c_int;
type Called = unsafe extern "C" fn(usize, *mut *const u8, *mut usize) -> c_int;
type Count = unsafe extern "C" fn(*const c_char, *mut u64) -> c_int;

/// A driver of its own: settings, devices and faults of one are nothing to another.
///
/// The file goes when it is dropped; the code stays loaded until the process ends, since threads may still be
/// in it.
#[derive(Debug)]
pub struct StandIn {
    path: PathBuf,
    set: Set,
    fail: Fail,
    failed: Failed,
    called: Called,
    calls: Count,
    live: Count,
    _folder: TempDir,
}

impl StandIn {
    /// Loads a copy of the library that cargo built beside this test.
    ///
    /// # Errors
    ///
    /// The operating system's, if the library is not there or cannot be loaded.
    pub fn load() -> io::Result<Self> {
        let (folder, path) = library::copied(STEM, &[])?;
        let library = library::open(&path)?;
        let this = Self {
            set: symbol(&library, c"stand_in_set")?,
            fail: symbol(&library, c"stand_in_fail")?,
            failed: symbol(&library, c"stand_in_failed")?,
            called: symbol(&library, c"stand_in_called")?,
            calls: symbol(&library, c"stand_in_calls")?,
            live: symbol(&library, c"stand_in_live")?,
            path,
            _folder: folder,
        };
        // Never unloaded: threads of the library end when they have been idle for a while.
        std::mem::forget(library);
        Ok(this)
    }

    /// A copy that lacks functions, in a folder that keeps it.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load); a function that is not there cannot be taken away.
    pub fn without(functions: &[&str]) -> io::Result<(TempDir, PathBuf)> {
        library::copied(STEM, functions)
    }

    /// The library's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets a setting (`devices`, `memory`, `version`, `multiprocessors`, `peers`, `display`, `coherent`, `nvrtc`,
    /// and those of `nvml.rs`), or a variable of the environment for this library alone. Most are read by the
    /// first `cuInit`.
    ///
    /// At any time, `blocking` is 1 where launches wait for their kernels, and `hold` names kernels, with spaces
    /// between, that do not begin until it is set to something else. `library` is the path of a dynamic library with
    /// kernels that the stand-in does not have itself, as `int32_t name(const Turn *)`: see `library.rs`.
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
        let _set = unsafe { (self.set)(name.as_ptr(), value.as_ptr()) };
    }

    /// Lets a coming call fail with `code`: the one with this number from now on, of the function of this
    /// name, or of any function if the name is empty.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn fail(&self, name: &str, number: u64, code: i32) {
        let name = text(name);
        // SAFETY: a terminated text that lives until the return.
        let _planned = unsafe { (self.fail)(name.as_ptr(), number, code) };
    }

    /// The function whose call was to fail, if it did.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn failed(&self) -> Option<String> {
        let (mut name, mut len) = (std::ptr::null(), 0);
        // SAFETY: a pointer and an integer are written to this stack frame.
        let _asked = unsafe { (self.failed)(&mut name, &mut len) };
        kept(name, len)
    }

    /// The functions that were called.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn called(&self) -> Vec<String> {
        let name_of = |index| {
            let (mut name, mut len) = (std::ptr::null(), 0);
            // SAFETY: a pointer and an integer are written to this stack frame.
            let _asked = unsafe { (self.called)(index, &mut name, &mut len) };
            kept(name, len)
        };
        (0..).map_while(name_of).collect()
    }

    /// How often a function was called, or all of them if the name is empty.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn calls(&self, name: &str) -> u64 {
        let (name, mut count) = (text(name), 0);
        // SAFETY: a terminated text, and one integer on this stack frame.
        let _asked = unsafe { (self.calls)(name.as_ptr(), &mut count) };
        count
    }

    /// How many `contexts`, `streams`, `events`, `modules`, `linkers`, `graphs`, `executables`, `pools`, `ranges`
    /// of memory, `memories` without an address or `reservations` of addresses there are.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn live(&self, kind: &str) -> u64 {
        let (kind, mut count) = (text(kind), 0);
        // SAFETY: a terminated text, and one integer on this stack frame.
        let _asked = unsafe { (self.live)(kind.as_ptr(), &mut count) };
        count
    }
}

/// A name that the library keeps; `None` for an empty one.
#[expect(unsafe_code, reason = "reads the library's memory")]
fn kept(name: *const u8, len: usize) -> Option<String> {
    if name.is_null() || len == 0 {
        return None;
    }
    // SAFETY: only called with what the library answered: a text that it keeps, and it is never unloaded.
    let bytes = unsafe { std::slice::from_raw_parts(name, len) };
    Some(String::from_utf8_lossy(bytes).into_owned())
}

/// Texts of tests hold no zero byte; of one that does, nothing is left.
fn text(words: &str) -> CString {
    CString::new(words).unwrap_or_default()
}

#[expect(unsafe_code, reason = "looks symbols up")]
fn symbol<F: Copy>(library: &Library, name: &CStr) -> io::Result<F> {
    // SAFETY: the types above are those of the functions of these names in `control.rs`.
    unsafe { library::symbol(library, name) }
}
