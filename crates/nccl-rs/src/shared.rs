//! A communicator's handle, and calls on it: what outlives the communicator where another thread may abort it.

use std::{
    ffi::{c_int, c_void},
    ptr::{self, NonNull},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use crate::{
    bounded::{self, Deadline},
    config::CommunicatorConfig,
    error::{Error, NcclError},
    group,
    library::Nccl,
    sys::{Comm, IN_PROGRESS, SUCCESS},
};

/// How long a dropped communicator is waited for.
pub(crate) const PARTING: Duration = Duration::from_secs(1);

/// What is waited for where another thread has a communicator.
const UNDER_WAY: &str = "a call that is under way";

/// What a communicator and those who may abort it have in common.
pub(crate) struct Shared {
    pub(crate) nccl: Nccl,
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) device: u32,
    pub(crate) blocking: bool,
    pub(crate) patience: Duration,
    handle: Mutex<Handle>,
    /// Open groups with calls for it, whose ends work on it.
    groups: AtomicU32,
}

/// The library's communicator.
#[derive(Debug, Clone)]
pub(crate) enum Handle {
    Live(NonNull<c_void>),
    /// It was given back, and why if something was wrong with it.
    Gone(&'static str, Option<NcclError>),
}

// SAFETY: the library lets any thread use a communicator, one at a time, which the lock around the handle sees to.
#[expect(unsafe_code, reason = "holds a handle of the library's")]
unsafe impl Send for Handle {}

impl Shared {
    /// Holds a live communicator of the library's, whose rank, size and device are not known yet.
    pub(crate) fn new(nccl: Nccl, comm: NonNull<c_void>, config: &CommunicatorConfig) -> Self {
        Self {
            nccl,
            rank: 0,
            size: 0,
            device: 0,
            blocking: config.blocking,
            patience: config.patience,
            handle: Mutex::new(Handle::Live(comm)),
            groups: AtomicU32::new(0),
        }
    }

    /// Makes a call and waits until it is done, or leaves that to the end of the group it is in.
    pub(crate) fn call(&self, name: &'static str, call: impl FnOnce(Comm) -> c_int) -> Result<(), Error> {
        let code = self.make(call)?;
        if code == SUCCESS { Ok(()) } else { self.settle(name, code) }
    }

    /// Makes a call, while nobody else makes one.
    pub(crate) fn make(&self, call: impl FnOnce(Comm) -> c_int) -> Result<c_int, Error> {
        self.nccl.check_process()?;
        let handle = self.lock()?;
        Ok(call(handle.live()?.as_ptr()))
    }

    /// Waits until a call is done that answered so.
    #[cold]
    pub(crate) fn settle(&self, name: &'static str, code: c_int) -> Result<(), Error> {
        self.settle_within(name, code, self.patience)
    }

    #[cold]
    pub(crate) fn settle_within(
        &self,
        name: &'static str,
        code: c_int,
        within: Duration,
    ) -> Result<(), Error> {
        if is_refusal(code) {
            return Err(self.error(name, code));
        }
        if code == SUCCESS || group::is_open() {
            return Ok(());
        }
        let code = self.outcome(name, within)?;
        if code == SUCCESS { Ok(()) } else { Err(self.error(name, code)) }
    }

    /// The code of a call that was in progress.
    fn outcome(&self, name: &'static str, within: Duration) -> Result<c_int, Error> {
        let deadline = Deadline::after(within);
        bounded::poll(name, within, || match self.async_error(deadline.left()) {
            Ok(IN_PROGRESS) => None,
            other => Some(other),
        })?
    }

    #[expect(unsafe_code, reason = "calls the library")]
    pub(crate) fn async_error(&self, within: Duration) -> Result<c_int, Error> {
        let mut found = SUCCESS;
        let handle = bounded::lock(UNDER_WAY, within, &self.handle)?;
        let comm = handle.live()?;
        // SAFETY: the communicator is live while the lock is held; the result is written to this stack frame.
        let code = unsafe { (self.nccl.functions().async_error)(comm.as_ptr(), &raw mut found) };
        drop(handle);
        if code == SUCCESS { Ok(found) } else { Err(self.error("ncclCommGetAsyncError", code)) }
    }

    /// What a code means, with what the communicator said last, or the library where the communicator cannot be asked.
    pub(crate) fn error(&self, call: &'static str, code: c_int) -> Error {
        let handle = bounded::attempt(&self.handle);
        let live = handle.as_ref().and_then(|handle| handle.live().ok());
        self.nccl.error(call, code, live.map_or(ptr::null_mut(), NonNull::as_ptr)).into()
    }

    /// Rank, size and device, as the library knows them.
    #[expect(unsafe_code, reason = "calls the library")]
    pub(crate) fn whereabouts(&self) -> Result<(u32, u32, u32), Error> {
        let functions = self.nccl.functions();
        let ask = |name, ask: unsafe extern "C" fn(Comm, *mut c_int) -> c_int| {
            let mut found = 0;
            // SAFETY: the communicator is live; the result is written to this stack frame.
            self.call(name, |comm| unsafe { ask(comm, &raw mut found) })?;
            Ok::<_, Error>(found.unsigned_abs())
        };
        let rank = ask("ncclCommUserRank", functions.rank)?;
        let size = ask("ncclCommCount", functions.count)?;
        Ok((rank, size, ask("ncclCommCuDevice", functions.device)?))
    }

    /// Counts a group in which a call is to be made.
    pub(crate) fn enter_group(&self) -> Result<(), Error> {
        let handle = self.lock()?;
        handle.live()?;
        // Relaxed: whoever gives the communicator back looks at it under the same lock.
        self.groups.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The group is over.
    pub(crate) fn leave_group(&self) {
        // Release: the end of the group comes before whatever gives the communicator back.
        self.groups.fetch_sub(1, Ordering::Release);
    }

    /// The handle, once no group holds the communicator's address.
    fn outside_groups(&self, within: Duration) -> Result<MutexGuard<'_, Handle>, Error> {
        bounded::poll(UNDER_WAY, within, || {
            let handle = bounded::attempt(&self.handle)?;
            // Acquire: see `leave_group`.
            (self.groups.load(Ordering::Acquire) == 0).then_some(handle)
        })
    }

    pub(crate) fn abort(&self, within: Duration) -> Result<(), Error> {
        self.nccl.check_process()?;
        let (name, deadline) = ("ncclCommAbort", Deadline::after(within));
        outside_its_groups(name, self)?;
        let mut handle = self.outside_groups(within)?;
        let Ok(comm) = handle.live() else { return Ok(()) };
        *handle = Handle::Gone("aborted", self.trouble(comm));
        drop(handle);
        self.give_back(name, deadline.left(), comm, self.nccl.functions().abort)
            .map_err(|error| deadline.whole(error))
    }

    /// What is wrong with a communicator, if anything is.
    #[expect(unsafe_code, reason = "calls the library")]
    fn trouble(&self, comm: NonNull<c_void>) -> Option<NcclError> {
        let (name, mut found) = ("ncclCommGetAsyncError", SUCCESS);
        // SAFETY: the caller holds the lock of a live communicator; the result is written to this stack frame.
        let code = unsafe { (self.nccl.functions().async_error)(comm.as_ptr(), &raw mut found) };
        is_refusal(found)
            .then_some(found)
            .or(is_refusal(code).then_some(code))
            .map(|code| self.nccl.error(name, code, comm.as_ptr()))
    }

    pub(crate) fn finalize(self: &Arc<Self>, within: Duration) -> Result<(), Error> {
        let deadline = Deadline::after(within);
        self.finalize_until(&deadline).map_err(|error| deadline.whole(error))
    }

    fn finalize_until(self: &Arc<Self>, deadline: &Deadline) -> Result<(), Error> {
        let name = "ncclCommFinalize";
        let code = self.begin_finalize(name, deadline.left())?;
        if is_refusal(code) {
            return Err(self.error(name, code));
        }
        if code == IN_PROGRESS {
            let code = self.outcome(name, deadline.left())?;
            if code != SUCCESS {
                return Err(self.error(name, code));
            }
        }
        let mut handle = self.outside_groups(deadline.left())?;
        let comm = handle.live()?;
        *handle = Handle::Gone("finalized", None);
        drop(handle);
        self.give_back("ncclCommDestroy", deadline.left(), comm, self.nccl.functions().destroy)
    }

    #[expect(unsafe_code, reason = "calls the library")]
    fn begin_finalize(self: &Arc<Self>, name: &'static str, within: Duration) -> Result<c_int, Error> {
        let finalize = self.nccl.functions().finalize;
        if self.blocking {
            let comm = self.outside_groups(within)?.live()?;
            // Outside the lock, so that what waits for other ranks can be aborted; the only thread is here.
            return self.apart(name, within, comm, finalize);
        }
        let shared = Arc::clone(self);
        bounded::run(name, within, move || {
            // Under the lock, so that nobody gives the communicator back before the call has returned.
            let handle = shared.outside_groups(within)?;
            let comm = handle.live()?;
            // SAFETY: the communicator is live while the lock is held, and no group is open with it.
            Ok(unsafe { finalize(comm.as_ptr()) })
        })?
    }

    /// What becomes of a dropped communicator.
    pub(crate) fn part(self: &Arc<Self>) -> Result<(), Error> {
        self.nccl.check_process()?;
        let deadline = Deadline::after(PARTING / 2);
        let is_in_order = matches!(self.async_error(deadline.left()), Ok(SUCCESS));
        if is_in_order && self.finalize(deadline.left()).is_ok() {
            return Ok(());
        }
        self.abort(PARTING / 2)
    }

    /// Makes a call that is the communicator's last.
    fn give_back(
        &self,
        name: &'static str,
        within: Duration,
        comm: NonNull<c_void>,
        call: unsafe extern "C" fn(Comm) -> c_int,
    ) -> Result<(), Error> {
        let code = self.apart(name, within, comm, call)?;
        if is_refusal(code) { Err(self.nccl.error(name, code, ptr::null_mut()).into()) } else { Ok(()) }
    }

    /// Makes a call in a thread of its own, since it may wait for other ranks whatever is said of blocking.
    #[expect(unsafe_code, reason = "calls the library")]
    fn apart(
        &self,
        name: &'static str,
        within: Duration,
        comm: NonNull<c_void>,
        call: unsafe extern "C" fn(Comm) -> c_int,
    ) -> Result<c_int, Error> {
        let comm = Handle::Live(comm);
        bounded::run(name, within, move || match &comm {
            // SAFETY: it was live when it was taken from the handle, and this is the only call.
            Handle::Live(comm) => unsafe { call(comm.as_ptr()) },
            Handle::Gone(..) => SUCCESS,
        })
    }

    /// The handle, which a thread has that was left behind in a call, or one that aborts the communicator.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Handle>, Error> {
        bounded::lock(UNDER_WAY, self.patience, &self.handle)
    }
}

impl Handle {
    pub(crate) fn live(&self) -> Result<NonNull<c_void>, Error> {
        match self {
            Self::Live(comm) => Ok(*comm),
            Self::Gone(state, cause) => Err(Error::Gone { state, cause: cause.clone() }),
        }
    }
}

/// In a group that uses a communicator, nobody can wait for the group's end.
pub(crate) fn outside_its_groups(name: &str, shared: &Shared) -> Result<(), Error> {
    if group::holds(shared) { group::outside(name) } else { Ok(()) }
}

/// Whether a call's answer is an error.
pub(crate) const fn is_refusal(code: c_int) -> bool {
    code != SUCCESS && code != IN_PROGRESS
}
