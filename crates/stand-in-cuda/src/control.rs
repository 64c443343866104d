//! What tests say to the library besides the driver's own functions.

use std::{
    collections::BTreeMap,
    env,
    ffi::{c_char, c_int},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
};

use crate::{
    context::current,
    exports::{Code, Outcome, Raw, Text, exports},
    machine::running,
    task::{Foreign, Task},
};

/// The calls of the driver's functions, and which of them are to fail.
#[derive(Debug, Default)]
pub(crate) struct Calls(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    total: u64,
    by_name: BTreeMap<&'static str, u64>,
    /// Fail the call with this number, of one function or among all; and whether that happened.
    plan: Option<(Option<String>, u64, c_int)>,
    injected: Option<&'static str>,
}

static CALLS: LazyLock<Calls> = LazyLock::new(Calls::default);

pub(crate) fn calls() -> &'static Calls {
    &CALLS
}

impl Calls {
    /// Counts a call; the code it is to fail with, if it is.
    pub(crate) fn note(&self, name: &'static str) -> Option<c_int> {
        if name.starts_with("stand_in_") {
            return None;
        }
        let mut counts = self.lock();
        let (total, own) = (counts.total, counts.by_name.get(name).copied().unwrap_or(0));
        counts.total += 1;
        *counts.by_name.entry(name).or_default() += 1;
        let code = match &counts.plan {
            Some((None, number, code)) if *number == total => *code,
            Some((Some(only), number, code)) if only == name && *number == own => *code,
            _ => return None,
        };
        counts.injected = Some(name);
        Some(code)
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

static SETTINGS: LazyLock<Mutex<BTreeMap<String, String>>> = LazyLock::new(Mutex::default);

/// What a test set, or the environment has, under a name.
pub(crate) fn setting(name: &str) -> Option<String> {
    let set = SETTINGS.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
    set.or_else(|| env::var(name).ok())
}

/// A number that a test set.
pub(crate) fn number(name: &str, default: u64) -> u64 {
    setting(name).and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn set(name: &Text, value: &Text) -> Outcome {
    let (name, value) = (name.get()?, value.get()?);
    SETTINGS.lock().unwrap_or_else(PoisonError::into_inner).insert(name, value);
    Ok(())
}

/// How many objects of a kind live.
fn live(kind: &str) -> Result<u64, Code> {
    let machine = running()?;
    let count = match kind {
        "contexts" => machine.contexts.len(),
        "streams" => machine.streams.len(),
        "events" => machine.events.len(),
        "modules" => machine.modules.len(),
        "pools" => machine.pools.len(),
        "ranges" => machine.space.len(),
        "linkers" => machine.linkers.len(),
        "graphs" => machine.graphs.len(),
        "executables" => machine.executables.len(),
        "memories" => machine.memories.len(),
        "reservations" => machine.reservations.len(),
        _ => return Err(Code::INVALID_VALUE),
    };
    Ok(count as u64)
}

exports! {
    /// Sets a setting, or a variable of the environment for this library alone.
    fn stand_in_set(text name: c_char, text value: c_char) {
        set(&name, &value)
    }

    /// Lets a coming call fail, counted from now: of the function `name`, or of any if that is empty.
    fn stand_in_fail(text name: c_char, val number: u64, val code: c_int) {
        let name = Some(name.get()?).filter(|name| !name.is_empty());
        let mut counts = calls().lock();
        let past = match &name {
            Some(name) => counts.by_name.get(name.as_str()).copied().unwrap_or(0),
            None => counts.total,
        };
        counts.plan = Some((name, past + number, code));
        counts.injected = None;
        Ok(())
    }

    /// The function whose call was made to fail: its name lives as long as the library.
    fn stand_in_failed(out name: *const u8, out len: usize) {
        let injected = calls().lock().injected.unwrap_or_default();
        name.set(injected.as_ptr())?;
        len.set(injected.len())
    }

    /// A function that was called, by its position among those; the name lives as long as the library.
    fn stand_in_called(val index: usize, out name: *const u8, out len: usize) {
        let known = calls().lock().by_name.keys().nth(index).copied().unwrap_or_default();
        name.set(known.as_ptr())?;
        len.set(known.len())
    }

    /// How often a function was called; all of them, if the name is empty.
    fn stand_in_calls(text name: c_char, out count: u64) {
        let (name, counts) = (name.get()?, calls().lock());
        let of_name = counts.by_name.get(name.as_str()).copied().unwrap_or(0);
        count.set(if name.is_empty() { counts.total } else { of_name })
    }

    /// Puts work of another library's stand-in in a stream of the current context, or into the graph that is being
    /// captured there. The function is called with the argument whenever the stream or a replay comes to it.
    fn stand_in_enqueue(val stream: Raw, val function: extern "C" fn(usize), val argument: usize) {
        let here = current()?;
        let _turn = here.enter();
        let work = Foreign { context: Arc::clone(&here.context), function, argument };
        here.give(&here.stream(stream)?, Task::Foreign(work))
    }

    /// How many objects of a kind live.
    fn stand_in_live(text kind: c_char, out count: u64) {
        count.set(live(&kind.get()?)?)
    }
}
