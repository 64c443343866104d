//! Objects by their handles.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use crate::exports::{Code, Raw};

/// Handles are never used twice, whatever they are of.
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

/// A handle that nothing has had before.
pub(crate) fn new_handle() -> usize {
    // Relaxed: only the number matters.
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

/// The live objects of one kind.
#[derive(Debug)]
pub(crate) struct Registry<T>(Mutex<HashMap<usize, Arc<T>>>);

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Registry<T> {
    pub(crate) fn add(&self, object: Arc<T>) -> Raw {
        let handle = new_handle();
        self.lock().insert(handle, object);
        std::ptr::without_provenance_mut(handle)
    }

    pub(crate) fn get(&self, handle: Raw) -> Result<Arc<T>, Code> {
        self.lock().get(&handle.addr()).cloned().ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn remove(&self, handle: Raw) -> Result<Arc<T>, Code> {
        self.lock().remove(&handle.addr()).ok_or(Code::INVALID_HANDLE)
    }

    /// One that a test of it fits.
    pub(crate) fn find(&self, fits: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        self.lock().values().find(|object| fits(object)).cloned()
    }

    /// The handle of an object.
    pub(crate) fn handle_of(&self, object: &Arc<T>) -> Option<Raw> {
        let of = |(&handle, known): (&usize, &Arc<T>)| Arc::ptr_eq(known, object).then_some(handle);
        self.lock().iter().find_map(of).map(std::ptr::without_provenance_mut)
    }

    pub(crate) fn retain(&self, keep: impl Fn(&T) -> bool) {
        self.lock().retain(|_, object| keep(object));
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Arc<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
