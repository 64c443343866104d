//! Memory that the library knows beforehand: registered buffers and windows.

use std::{
    ffi::c_void,
    fmt, ptr,
    sync::{Arc, atomic::AtomicPtr},
};

use crate::{
    bounded,
    communicator::Communicator,
    error::Error,
    group,
    memory::Memory,
    shared::Shared,
    sys::{self, WINDOW_SYMMETRIC},
};

/// A buffer that the library registered (`ncclCommRegister`), so that it can send from and receive into it directly.
/// It is deregistered when dropped.
pub struct Registration {
    shared: Arc<Shared>,
    handle: *mut c_void,
    _memory: Option<Arc<Memory>>,
}

// SAFETY: a handle that belongs to no thread; it is used once, in the drop, under the communicator's lock.
#[expect(unsafe_code, reason = "holds a handle of the library's")]
unsafe impl Send for Registration {}

/// How memory is made a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowKind {
    /// As registration, for all ranks.
    Plain,
    /// At the same offset on all ranks, which the library's fastest kernels ask for.
    Symmetric,
}

/// Memory of all ranks that they may reach (`ncclWindow_t`). It is deregistered when dropped.
pub struct Window {
    shared: Arc<Shared>,
    raw: sys::Window,
    size_bytes: usize,
    kind: WindowKind,
    _memory: Option<Arc<Memory>>,
}

// SAFETY: a handle that belongs to no thread; it is used under the communicator's lock.
#[expect(unsafe_code, reason = "holds a handle of the library's")]
unsafe impl Send for Window {}
// SAFETY: shared, it only tells its handle.
#[expect(unsafe_code, reason = "holds a handle of the library's")]
unsafe impl Sync for Window {}

/// What windows have to be multiples of (`NCCL_WIN_REQUIRED_ALIGNMENT`).
pub const WINDOW_ALIGNMENT: usize = 4096;

impl Communicator {
    /// Registers memory that the library allocated (NCCL 2.19).
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`], [`Error::Nccl`].
    #[expect(unsafe_code, reason = "vouches for memory")]
    pub fn register(&self, memory: &Arc<Memory>) -> Result<Registration, Error> {
        // SAFETY: the registration keeps the memory.
        let mut registered = unsafe { self.register_raw(memory.address(), memory.size_bytes()) }?;
        registered._memory = Some(Arc::clone(memory));
        Ok(registered)
    }

    /// Registers memory of another library.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`], [`Error::Nccl`].
    ///
    /// # Safety
    ///
    /// - The memory is on the communicator's device, and stays allocated for as long as the registration.
    #[expect(unsafe_code, reason = "calls the library")]
    pub unsafe fn register_raw(
        &self,
        address: *mut c_void,
        size_bytes: usize,
    ) -> Result<Registration, Error> {
        let (name, register) = self.nccl().functions().register.or_too_old(self.version())?;
        group::outside(name)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the caller's duty for the memory; the result is written before the call returns.
        self.shared().call(name, |comm| unsafe { register(comm, address, size_bytes, &raw mut handle) })?;
        Ok(Registration { shared: Arc::clone(self.shared()), handle, _memory: None })
    }

    /// Makes a window of memory that the library allocated; all ranks do so in the same order (NCCL 2.27).
    ///
    /// # Errors
    ///
    /// As for [`Self::window_raw`].
    pub fn window(&self, memory: &Arc<Memory>, kind: WindowKind) -> Result<Option<Window>, Error> {
        self.window_of(memory.address(), memory.size_bytes(), kind, Some(Arc::clone(memory)))
    }

    /// Makes a window of memory of another library; all ranks do so in the same order (NCCL 2.27). There is none where
    /// the library has no use for windows, as between devices that are not linked directly; calls work without.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`]; [`Error::Invalid`] for an address that is not a multiple of [`WINDOW_ALIGNMENT`], and on a
    /// communicator that does not block, since the library does not tell when it has made a window of such a one;
    /// [`Error::TimedOut`] if other ranks do not do the same; [`Error::Nccl`].
    ///
    /// # Safety
    ///
    /// - The memory is on the communicator's device, and stays allocated for as long as the window of every rank; if
    ///   there is none because the time was up, for as long as the communicator.
    #[expect(unsafe_code, reason = "the caller vouches for memory")]
    pub unsafe fn window_raw(
        &self,
        address: *mut c_void,
        size_bytes: usize,
        kind: WindowKind,
    ) -> Result<Option<Window>, Error> {
        self.window_of(address, size_bytes, kind, None)
    }

    /// A window of memory that it keeps, or that somebody else does.
    #[expect(unsafe_code, reason = "calls the library")]
    fn window_of(
        &self,
        address: *mut c_void,
        size_bytes: usize,
        kind: WindowKind,
        memory: Option<Arc<Memory>>,
    ) -> Result<Option<Window>, Error> {
        let (name, register) = self.nccl().functions().window_register.or_too_old(self.version())?;
        group::outside(name)?;
        if !address.addr().is_multiple_of(WINDOW_ALIGNMENT) {
            let what = format!("{name}: the address {address:p} is no multiple of {WINDOW_ALIGNMENT}");
            return Err(Error::Invalid { what });
        }
        if !self.is_blocking() {
            let what = format!("{name} needs a communicator that blocks: make it with `blocking(true)`");
            return Err(Error::Invalid { what });
        }
        let flags = if kind == WindowKind::Symmetric { WINDOW_SYMMETRIC } else { 0 };
        let (shared, address) = (Arc::clone(self.shared()), AtomicPtr::new(address));
        // In a thread of its own, since it waits for the other ranks. One that comes too late is dropped there, and the
        // memory with it.
        bounded::run(name, self.shared().patience, move || {
            let made = AtomicPtr::<c_void>::default();
            // SAFETY: the memory is kept below, or is the caller's duty; the result is written before the call returns.
            shared.call(name, |comm| unsafe {
                register(comm, address.into_inner(), size_bytes, made.as_ptr(), flags)
            })?;
            let raw = made.into_inner();
            let window = || Window { shared, raw, size_bytes, kind, _memory: memory };
            Ok((!raw.is_null()).then(window))
        })?
    }
}

impl Window {
    /// How large it is.
    #[must_use]
    pub const fn size_bytes(&self) -> usize {
        self.size_bytes
    }

    /// How it was made.
    #[must_use]
    pub const fn kind(&self) -> WindowKind {
        self.kind
    }

    pub(crate) const fn raw(&self) -> sys::Window {
        self.raw
    }

    pub(crate) fn is_of(&self, comm: &Communicator) -> bool {
        Arc::ptr_eq(&self.shared, comm.shared())
    }
}

impl Drop for Registration {
    #[expect(unsafe_code, reason = "calls the library")]
    fn drop(&mut self) {
        if let Ok((name, deregister)) =
            self.shared.nccl.functions().deregister.or_too_old(self.shared.nccl.version())
        {
            // SAFETY: the communicator is live, or the call is not made, and the registration went with it; the handle
            // is used once.
            let _gone = self.shared.call(name, |comm| unsafe { deregister(comm, self.handle) });
        }
    }
}

impl Drop for Window {
    #[expect(unsafe_code, reason = "calls the library")]
    fn drop(&mut self) {
        let version = self.shared.nccl.version();
        if let Ok((name, deregister)) = self.shared.nccl.functions().window_deregister.or_too_old(version) {
            // SAFETY: as for registrations.
            let _gone = self.shared.call(name, |comm| unsafe { deregister(comm, self.raw) });
        }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({:p})", self.handle)
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Window({} bytes, {:?})", self.size_bytes, self.kind)
    }
}
