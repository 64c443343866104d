//! Communicators: how they come to be, and how they end.

use std::{
    any::Any,
    cell::Cell,
    ffi::{c_int, c_void},
    fmt,
    marker::PhantomData,
    ptr::{self, NonNull},
    sync::Arc,
    thread,
    time::Duration,
};

use crate::{
    begun::{Begun, Place},
    bounded::{self, Deadline},
    config::CommunicatorConfig,
    device::{Current, Inherited},
    error::Error,
    group,
    library::{Nccl, UniqueId},
    shared::{PARTING, Shared, is_refusal, outside_its_groups},
    sys::{self, Comm, IN_PROGRESS, SUCCESS},
    version::Version,
};

/// One rank of a group of devices that compute together (`ncclComm_t`).
///
/// Calls put work in a stream and return; what a call does when is the stream's matter. One thread at a time uses a
/// communicator, but any thread may abort it through an [`AbortHandle`].
///
/// Dropped, it is finalized if its peers do the same soon, and aborted if not. That takes about a second at most, and
/// [`Self::finalize`] says how it went.
pub struct Communicator {
    shared: Arc<Shared>,
    /// A cell may be used by one thread at a time, like the library's communicators.
    _one_thread: PhantomData<Cell<()>>,
}

/// What makes one rank's communicator.
#[derive(Clone)]
#[must_use]
pub struct CommunicatorDesc {
    id: UniqueId,
    rank: u32,
    size: u32,
    device: Option<u32>,
    entry: Option<Entry>,
    within: Option<Duration>,
    config: CommunicatorConfig,
}

/// Makes a device current to the thread that calls it, until the result is dropped there.
type Entry = Arc<dyn Fn() -> Result<Box<dyn Any>, String> + Send + Sync>;

impl CommunicatorDesc {
    /// The rank `rank` of `size`, which find each other by `id`, on the calling thread's current device.
    pub const fn new(id: UniqueId, rank: u32, size: u32) -> Self {
        let config = CommunicatorConfig::new();
        Self { id, rank, size, device: None, entry: None, within: None, config }
    }

    /// On this device, whatever is current: its ordinal among those that the process sees.
    pub const fn device(mut self, ordinal: u32) -> Self {
        self.device = Some(ordinal);
        self
    }

    /// On the device that `enter` makes current: for programs with contexts of their own. It is called in the thread
    /// that makes the rank, and what it returns is dropped there.
    pub fn entered_by(
        mut self,
        enter: impl Fn() -> Result<Box<dyn Any>, String> + Send + Sync + 'static,
    ) -> Self {
        self.entry = Some(Arc::new(enter));
        self
    }

    /// How long the other ranks are waited for, if not for as long as calls are
    /// ([`CommunicatorConfig::patience`]).
    pub const fn within(mut self, within: Duration) -> Self {
        self.within = Some(within);
        self
    }

    /// Made in this way.
    pub fn config(mut self, config: CommunicatorConfig) -> Self {
        self.config = config;
        self
    }
}

impl fmt::Debug for CommunicatorDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, size, device, config, .. } = self;
        write!(f, "CommunicatorDesc(rank {rank} of {size}, device {device:?}, {config:?})")
    }
}

impl Communicator {
    /// Makes the communicator of one rank; all ranks do so at about the same time, each in a thread or a process of its
    /// own. Several ranks of one thread are made by [`Self::init_all`].
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] if the other ranks do not come within [`CommunicatorConfig::patience`];
    /// [`Error::Rank`], [`Error::Device`], [`Error::TooOld`]; [`Error::Nccl`] for what the library finds, such as two
    /// ranks on one device.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn init(nccl: &Nccl, desc: &CommunicatorDesc) -> Result<Self, Error> {
        check_rank(desc.rank, desc.size)?;
        let init = nccl.functions().init_rank_config;
        let (id, rank, size) = (desc.id.0, to_int(desc.rank), to_int(desc.size));
        Self::begin(nccl, "ncclCommInitRankConfig", desc, move |comm, config| {
            // SAFETY: both places stay until the communicator is ready, see `Place`.
            unsafe { init(comm, size, id, rank, config) }
        })
    }

    /// Makes the communicators of all ranks at once: the calling thread has all devices.
    ///
    /// # Errors
    ///
    /// As for [`Self::init`].
    pub fn init_all(nccl: &Nccl, devices: &[u32], config: &CommunicatorConfig) -> Result<Vec<Self>, Error> {
        let id = nccl.unique_id()?;
        let size = u32::try_from(devices.len()).map_err(|_| too_many(devices.len()))?;
        // Each in a thread, since a rank waits for the others. All are joined: each ends in time.
        thread::scope(|scope| {
            let init = |(rank, device): (u32, &u32)| {
                let desc = CommunicatorDesc::new(id, rank, size).device(*device).config(config.clone());
                thread::Builder::new().spawn_scoped(scope, move || Self::init(nccl, &desc))
            };
            let threads: Vec<_> = (0..size).zip(devices).map(init).collect();
            let failed = |_| Error::Thread { what: "a rank" };
            threads
                .into_iter()
                .map(|started| {
                    started.map_err(|_| Error::Thread { what: "a rank" })?.join().map_err(failed)?
                })
                .collect()
        })
    }

    /// The library it belongs to.
    #[must_use]
    pub fn nccl(&self) -> &Nccl {
        &self.shared.nccl
    }

    /// Its number among all ranks.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.shared.size
    }

    /// The ordinal of its device.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.shared.device
    }

    /// Whether calls block.
    #[must_use]
    pub fn is_blocking(&self) -> bool {
        self.shared.blocking
    }

    /// The library's handle (`ncclComm_t`), for calls that this crate does not have; none once it is gone.
    #[must_use]
    pub fn as_raw(&self) -> *mut c_void {
        let live = self.shared.lock().and_then(|handle| handle.live());
        live.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    /// Asks for an error that happened since the last call: of the network, of a peer, or of the device. Nothing but
    /// asking finds such an error; a peer that dies on the same machine is not found even so.
    ///
    /// # Errors
    ///
    /// The error.
    pub fn check(&self) -> Result<(), Error> {
        self.shared.nccl.check_process()?;
        match self.shared.async_error(self.shared.patience)? {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.shared.error("ncclCommGetAsyncError", code)),
        }
    }

    /// Lets another thread abort the communicator.
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle { shared: Arc::clone(&self.shared) }
    }

    /// Ends what is under way and gives the communicator back. Work in streams may be unfinished.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] if the library does not return; the communicator is gone all the same.
    /// [`Error::Invalid`] in a group that it is used in.
    pub fn abort(self, within: Duration) -> Result<(), Error> {
        self.shared.abort(within)
    }

    /// Waits until all work is over that was put in streams, and gives the communicator back. All ranks do so.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] if peers do not do the same in time, and what went wrong before. The communicator is
    /// aborted then, which takes as long again at most. [`Error::Invalid`] in a group that it is used in.
    pub fn finalize(self, within: Duration) -> Result<(), Error> {
        self.shared.nccl.check_process()?;
        outside_its_groups("ncclCommFinalize", &self.shared)?;
        let finalized = self.shared.finalize(within);
        if finalized.is_err() {
            // What is told is why it could not be finalized.
            let _aborted = self.shared.abort(within);
        }
        finalized
    }

    /// Stops what is under way and takes no new collectives, but can still be split, shrunk or given back (NCCL 2.28).
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`], [`Error::Nccl`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn revoke(&self) -> Result<(), Error> {
        let (name, revoke) = self.shared.nccl.functions().revoke.or_too_old(self.version())?;
        // SAFETY: the communicator is live, and no other call is under way; there are no flags.
        self.shared.call(name, |comm| unsafe { revoke(comm, 0) })
    }

    /// Parts the ranks: those with the same colour make a communicator of their own, in the order of their keys. A rank
    /// without a colour gets none. All ranks call it, with no work under way.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`], [`Error::Nccl`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn split(
        &self,
        color: Option<u16>,
        key: i32,
        config: &CommunicatorConfig,
    ) -> Result<Option<Self>, Error> {
        let split = self.shared.nccl.functions().split;
        let number = color.map_or(sys::NO_COLOR, c_int::from);
        let place = self.derive("ncclCommSplit", config, move |parent, child, config| {
            // SAFETY: the parent is live and no other call is under way; both places stay until the communicator is
            // ready, see `Place`.
            unsafe { split(parent, number, key, child, config) }
        })?;
        if color.is_none() {
            // One that does not block may still write there that there is none, and does not tell when.
            place.leave();
            return Ok(None);
        }
        Self::adopt(self.nccl(), "ncclCommSplit", place, config, config.patience).map(Some)
    }

    /// A communicator without some ranks, which do not call it (NCCL 2.27).
    ///
    /// With [`Shrink::Abort`], what is under way is ended first: the way to go on after an error.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`], [`Error::Rank`], [`Error::TimedOut`], [`Error::Nccl`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn shrink(&self, without: &[u32], what: Shrink, config: &CommunicatorConfig) -> Result<Self, Error> {
        let (name, shrink) = self.shared.nccl.functions().shrink.or_too_old(self.version())?;
        for rank in without {
            check_rank(*rank, self.size())?;
        }
        let mut ranks: Vec<c_int> = without.iter().map(|rank| to_int(*rank)).collect();
        let count = c_int::try_from(ranks.len()).map_err(|_| too_many(ranks.len()))?;
        let flags = if what == Shrink::Abort { sys::SHRINK_ABORT } else { 0 };
        let place = self.derive(name, config, move |parent, child, config| {
            // SAFETY: as in `split`; the list is read during the call and holds `count` ranks.
            unsafe { shrink(parent, ranks.as_mut_ptr(), count, child, config, flags) }
        })?;
        Self::adopt(self.nccl(), name, place, config, config.patience)
    }

    /// An id by which new ranks join those of this communicator; one rank asks for it (NCCL 2.29).
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`], [`Error::Nccl`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn grow_id(&self) -> Result<UniqueId, Error> {
        let (name, get) = self.shared.nccl.functions().grow_id.or_too_old(self.version())?;
        let mut id = sys::UniqueId([0; sys::UNIQUE_ID_BYTES]);
        // SAFETY: the communicator is live; the result is written to this stack frame, before the call returns.
        self.shared.call(name, |comm| unsafe { get(comm, &raw mut id) })?;
        Ok(UniqueId(id))
    }

    /// A communicator of `size` ranks: these, with the numbers they have, and new ones that join with the id by
    /// [`Self::join`] (NCCL 2.29). The rank that asked for the id gives it here, others may.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`], [`Error::TimedOut`], [`Error::Nccl`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn grow(&self, size: u32, id: Option<UniqueId>, config: &CommunicatorConfig) -> Result<Self, Error> {
        /// `ncclCommGrow`: the number stays.
        const SAME_RANK: c_int = -1;
        let (name, grow) = self.shared.nccl.functions().grow.or_too_old(self.version())?;
        check_rank(self.rank(), size)?;
        let size = to_int(size);
        let place = self.derive(name, config, move |parent, child, config| {
            let id = id.as_ref().map_or(ptr::null(), |id| &raw const id.0);
            // SAFETY: as in `split`; the id is read during the call.
            unsafe { grow(parent, size, id, SAME_RANK, child, config) }
        })?;
        Self::adopt(self.nccl(), name, place, config, config.patience)
    }

    /// Joins the ranks of a communicator that grows (NCCL 2.29), as a rank that is new there.
    ///
    /// # Errors
    ///
    /// As for [`Self::init`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn join(nccl: &Nccl, desc: &CommunicatorDesc) -> Result<Self, Error> {
        check_rank(desc.rank, desc.size)?;
        let (name, grow) = nccl.functions().grow.or_too_old(nccl.version())?;
        let (id, rank, size) = (desc.id.0, to_int(desc.rank), to_int(desc.size));
        Self::begin(nccl, name, desc, move |comm, config| {
            // SAFETY: a new rank has no parent; both places stay until the communicator is ready, see `Place`.
            unsafe { grow(ptr::null_mut(), size, &raw const id, rank, comm, config) }
        })
    }

    /// Gives back the device memory of a communicator that will not be used for a while (NCCL 2.29).
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`], [`Error::Nccl`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn suspend(&self) -> Result<(), Error> {
        let (name, suspend) = self.shared.nccl.functions().suspend.or_too_old(self.version())?;
        // SAFETY: the communicator is live, and no other call is under way.
        self.shared.call(name, |comm| unsafe { suspend(comm, sys::SUSPEND_MEMORY) })
    }

    /// Takes memory again after [`Self::suspend`] (NCCL 2.29).
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`], [`Error::Nccl`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn resume(&self) -> Result<(), Error> {
        let (name, resume) = self.shared.nccl.functions().resume.or_too_old(self.version())?;
        // SAFETY: the communicator is live, and no other call is under way.
        self.shared.call(name, |comm| unsafe { resume(comm) })
    }

    /// How many bytes of device memory it holds (NCCL 2.29).
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`], [`Error::Nccl`].
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn memory_bytes(&self) -> Result<u64, Error> {
        /// `ncclStatGpuMemTotal`.
        const TOTAL: c_int = 3;
        let (name, stat) = self.shared.nccl.functions().memory_stat.or_too_old(self.version())?;
        let mut bytes = 0;
        // SAFETY: the communicator is live; the result is written to this stack frame, before the call returns.
        self.shared.call(name, |comm| unsafe { stat(comm, TOTAL, &raw mut bytes) })?;
        Ok(bytes)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn version(&self) -> Version {
        self.shared.nccl.version()
    }

    /// A communicator of which this is a new rank.
    fn begin(
        nccl: &Nccl,
        name: &'static str,
        desc: &CommunicatorDesc,
        call: impl FnOnce(*mut Comm, *mut sys::Config) -> c_int + Send + 'static,
    ) -> Result<Self, Error> {
        nccl.check_process()?;
        group::outside(name)?;
        let place = Place::new(&desc.config, nccl.version())?;
        let within = desc.within.unwrap_or(desc.config.patience);
        let (device, entry, library) = (desc.device, desc.entry.clone(), nccl.clone());
        let begin = move |inherited: Option<Inherited>| {
            let _entered = entry.map(|enter| enter().map_err(|what| Error::Invalid { what })).transpose()?;
            let _current = match device {
                Some(ordinal) => Some(Current::enter(ordinal)?),
                None => inherited.and_then(Inherited::enter),
            };
            let code = place.fill(call);
            if is_refusal(code) {
                Err(Error::from(library.error(name, code, ptr::null_mut())))
            } else {
                Ok(Begun::new(library, place))
            }
        };
        let begun = if desc.config.blocking {
            // The call waits for the other ranks. The thread that makes it has no device of its own.
            let is_told = device.is_some() || desc.entry.is_some();
            let inherited = if is_told { None } else { Inherited::here() };
            bounded::run(name, within, move || begin(inherited))??
        } else {
            begin(None)?
        };
        Self::adopt(nccl, name, begun, &desc.config, within)
    }

    /// The beginning of a communicator of ranks of this one.
    fn derive(
        &self,
        name: &'static str,
        config: &CommunicatorConfig,
        call: impl FnOnce(Comm, *mut Comm, *mut sys::Config) -> c_int + Send + 'static,
    ) -> Result<Begun, Error> {
        group::outside(name)?;
        let place = Place::new(config, self.version())?;
        let shared = Arc::clone(&self.shared);
        let derive = move || {
            let code = shared.make(|parent| place.fill(|comm, config| call(parent, comm, config)))?;
            if is_refusal(code) {
                return Err(shared.error(name, code));
            }
            let begun = Begun::new(shared.nccl.clone(), place);
            // Whatever comes of it, the library may still write there.
            if code == SUCCESS { Ok(begun) } else { shared.settle(name, code).map(|()| begun) }
        };
        if self.is_blocking() { bounded::run(name, self.shared.patience, derive)? } else { derive() }
    }

    /// Waits until a communicator is ready; what does not become ready is aborted.
    fn adopt(
        nccl: &Nccl,
        name: &'static str,
        begun: Begun,
        config: &CommunicatorConfig,
        within: Duration,
    ) -> Result<Self, Error> {
        let deadline = Deadline::after(within);
        // One that does not block is written by a thread of the library's, and its parent does not tell when.
        let comm = bounded::poll(name, within, || begun.comm())?;
        let mut shared = Shared::new(nccl.clone(), comm, config);
        match shared.settle_within(name, IN_PROGRESS, deadline.left()).and_then(|()| shared.whereabouts()) {
            Ok(known) => {
                begun.take();
                (shared.rank, shared.size, shared.device) = known;
                Ok(Self { shared: Arc::new(shared), _one_thread: PhantomData })
            }
            Err(error) => {
                // It may be read and written until the communicator is gone, which may not be soon.
                begun.leave();
                // What is told is why it did not become ready.
                let _aborted = shared.abort(PARTING);
                Err(error)
            }
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !group::put_off(&self.shared) {
            // Whoever wants to know finalizes or aborts it.
            let _parted = self.shared.part();
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator(rank {} of {}, device {})", self.rank(), self.size(), self.device())
    }
}

/// What [`Communicator::shrink`] does with work that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shrink {
    /// There is none, and the communicator is in order.
    Idle,
    /// It is ended.
    Abort,
}

/// Aborts a communicator that another thread uses.
#[derive(Clone)]
pub struct AbortHandle {
    shared: Arc<Shared>,
}

impl AbortHandle {
    /// Ends what is under way. Calls of the thread that uses the communicator return an error from then on. Aborting
    /// what is gone already does nothing.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] if a call that blocks is under way and does not return, or a group that the communicator is
    /// used in, or if the library does not. [`Error::Invalid`] in such a group.
    pub fn abort(&self, within: Duration) -> Result<(), Error> {
        self.shared.abort(within)
    }
}

impl fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AbortHandle(rank {} of {})", self.shared.rank, self.shared.size)
    }
}

fn check_rank(rank: u32, size: u32) -> Result<(), Error> {
    let is_one = rank < size && c_int::try_from(size).is_ok();
    if is_one { Ok(()) } else { Err(Error::Rank { rank, size }) }
}

/// A number that `check_rank` has seen, or one that no communicator has.
pub(crate) fn to_int(number: u32) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

fn too_many(count: usize) -> Error {
    Error::Invalid { what: format!("{count} ranks are more than there can be") }
}
