//! Communicators that are not ready yet.

use std::{
    ffi::{c_int, c_void},
    ptr::NonNull,
    sync::atomic::{AtomicPtr, Ordering},
    time::Duration,
};

use crate::{
    bounded,
    config::{CommunicatorConfig, Prepared},
    error::Error,
    library::Nccl,
    shared::Handle,
    sys::{self, Comm, SUCCESS},
    version::Version,
};

/// Where the library writes a new communicator and reads its configuration, maybe after the call returned.
///
/// By its address and not in a box, since whoever moves a box claims that nobody else writes there.
pub(crate) struct Place(NonNull<Cells>);

struct Cells {
    comm: AtomicPtr<c_void>,
    /// The library's alone, once it was called.
    prepared: Prepared,
}

// SAFETY: the cells are written by the library in any thread, and looked at through an atomic.
#[expect(unsafe_code, reason = "holds an address")]
unsafe impl Send for Place {}

impl Place {
    pub(crate) fn new(config: &CommunicatorConfig, version: Version) -> Result<Self, Error> {
        let cells = Box::new(Cells { comm: AtomicPtr::default(), prepared: config.prepare(version)? });
        Ok(Self(NonNull::from(Box::leak(cells))))
    }

    #[expect(unsafe_code, reason = "takes addresses of fields")]
    pub(crate) fn fill(&self, call: impl FnOnce(*mut Comm, *mut sys::Config) -> c_int) -> c_int {
        let cells = self.0.as_ptr();
        // SAFETY: the cells live as long as this; a field's address is taken and nothing is read.
        let config = unsafe { &raw mut (*cells).prepared.raw };
        call(self.cell().as_ptr(), config)
    }

    #[expect(unsafe_code, reason = "looks at a field")]
    fn cell(&self) -> &AtomicPtr<c_void> {
        // SAFETY: the cells live as long as this, and an atomic may be written meanwhile.
        unsafe { &(*self.0.as_ptr()).comm }
    }
}

impl Drop for Place {
    #[expect(unsafe_code, reason = "frees what a box held")]
    fn drop(&mut self) {
        // SAFETY: it came from a box and is freed once. Where the library may still use it, it is forgotten instead.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// A communicator that was begun and that nobody has yet. If nobody takes it, because its time was up, the library may
/// still write its place, and its other ranks count on it: the place stays, and what is there is aborted.
pub(crate) struct Begun {
    nccl: Nccl,
    place: Option<Place>,
}

impl Begun {
    pub(crate) const fn new(nccl: Nccl, place: Place) -> Self {
        Self { nccl, place: Some(place) }
    }

    pub(crate) fn comm(&self) -> Option<NonNull<c_void>> {
        // Acquire: a thread of the library's may have written it, after it made the communicator.
        NonNull::new(self.place.as_ref()?.cell().load(Ordering::Acquire))
    }

    /// It is ready, and the library is done with the place.
    pub(crate) fn take(mut self) {
        self.place = None;
    }

    /// Somebody sees to the communicator, and the library may still use the place.
    pub(crate) fn leave(mut self) {
        std::mem::forget(self.place.take());
    }
}

impl Drop for Begun {
    #[expect(unsafe_code, reason = "calls the library")]
    fn drop(&mut self) {
        let Some(comm) = self.comm() else { return std::mem::forget(self.place.take()) };
        std::mem::forget(self.place.take());
        let (abort, comm) = (self.nccl.functions().abort, Handle::Live(comm));
        // Nobody waits for it.
        let _left = bounded::run("ncclCommAbort", Duration::ZERO, move || match &comm {
            // SAFETY: the library made it, and nobody else has it.
            Handle::Live(comm) => unsafe { abort(comm.as_ptr()) },
            Handle::Gone(..) => SUCCESS,
        });
    }
}
