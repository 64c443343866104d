//! What tests say to the library, and what it remembers of calls.

use std::{
    collections::BTreeMap,
    ffi::{CStr, c_char, c_int},
    sync::{Mutex, MutexGuard, PoisonError},
};

static STATE: Mutex<State> =
    Mutex::new(State { settings: BTreeMap::new(), calls: BTreeMap::new(), plan: None, last: String::new() });

struct State {
    settings: BTreeMap<String, String>,
    calls: BTreeMap<&'static str, u64>,
    /// Which call of which function is to fail, and how.
    plan: Option<(String, u64, c_int)>,
    last: String,
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a test set under a name.
pub(crate) fn setting(name: &str) -> Option<String> {
    state().settings.get(name).cloned()
}

/// A number that a test set under a name.
pub(crate) fn number(name: &str) -> Option<u64> {
    setting(name)?.parse().ok()
}

/// Counts a call; the code it is to fail with, if it is.
pub(crate) fn note(name: &'static str) -> Option<c_int> {
    let mut state = state();
    let own = state.calls.entry(name).or_default();
    let number = *own;
    *own += 1;
    let code = match &state.plan {
        Some((planned, at, code)) if planned == name && *at == number => *code,
        _ => return None,
    };
    state.last = format!("{name} was to fail");
    Some(code)
}

/// Keeps what `ncclGetLastError` tells.
pub(crate) fn say(text: &str) {
    text.clone_into(&mut state().last);
}

/// What was said last.
pub(crate) fn said() -> String {
    state().last.clone()
}

/// # Safety
///
/// - A text that ends in a zero byte.
#[expect(unsafe_code, reason = "reads a caller's text")]
unsafe fn text(text: *const c_char) -> String {
    // SAFETY: the caller's duty.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Sets a setting.
///
/// # Safety
///
/// - Two texts that end in a zero byte.
#[expect(unsafe_code, reason = "is called by the loader of the library")]
// SAFETY: nothing else in this library, or in a program that links it, has this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn stand_in_nccl_set(name: *const c_char, value: *const c_char) {
    // SAFETY: the caller's duty.
    let name = unsafe { text(name) };
    // SAFETY: the same.
    let value = unsafe { text(value) };
    state().settings.insert(name, value);
}

/// Lets the coming call with this number of a function fail.
///
/// # Safety
///
/// - A text that ends in a zero byte.
#[expect(unsafe_code, reason = "is called by the loader of the library")]
// SAFETY: nothing else in this library, or in a program that links it, has this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn stand_in_nccl_fail(name: *const c_char, number: u64, code: c_int) {
    // SAFETY: the caller's duty.
    let name = unsafe { text(name) };
    let mut state = state();
    let so_far = state.calls.get(name.as_str()).copied().unwrap_or_default();
    state.plan = Some((name, so_far + number, code));
}

/// How often a function was called.
///
/// # Safety
///
/// - A text that ends in a zero byte.
#[expect(unsafe_code, reason = "is called by the loader of the library")]
// SAFETY: nothing else in this library, or in a program that links it, has this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn stand_in_nccl_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller's duty.
    let name = unsafe { text(name) };
    state().calls.get(name.as_str()).copied().unwrap_or_default()
}
