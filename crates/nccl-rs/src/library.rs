//! The loaded library.

use std::{
    ffi::{CStr, c_char, c_int},
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use libloading::Library;

use crate::{
    error::{Error, NcclError, Tried, in_full, name_of},
    fork::Origin,
    functions::Functions,
    search,
    sys::{Comm, SUCCESS, UNIQUE_ID_BYTES, UniqueId as RawId},
    version::Version,
};

/// NCCL, loaded into this process.
///
/// Cheap to clone. It stays loaded for as long as the process lives, since threads of its own may run.
#[derive(Clone)]
pub struct Nccl(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    functions: Functions,
    version: Version,
    path: PathBuf,
    origin: Origin,
}

impl Nccl {
    /// Loads the library that `NCCL_LIBRARY` names, or else the first that works: what the system's loader finds as
    /// `libnccl.so.2` or `libnccl.so`, those beside CUDA toolkits and Conda, and those in Python packages.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] with every place and why it was not taken.
    pub fn load() -> Result<Self, Error> {
        Self::load_first(&search::candidates())
    }

    /// Loads the library at a path.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] if it is none, is too old or lacks a function.
    pub fn load_from(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::load_first(&[path.as_ref().to_owned()])
    }

    fn load_first(candidates: &[PathBuf]) -> Result<Self, Error> {
        let mut tried = Vec::new();
        for path in candidates {
            match Loaded::open(path) {
                Ok(loaded) => return Ok(Self(Arc::new(loaded))),
                Err(reason) => tried.push(Tried { path: path.clone(), reason }),
            }
        }
        Err(Error::NotFound { tried })
    }

    /// Its version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.0.version
    }

    /// The path or the name that it was loaded by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Functions that older libraries lack: the name, the first version with it, and whether this library has it.
    #[must_use]
    pub fn newer_functions(&self) -> Vec<(&'static str, Version, bool)> {
        self.0.functions.newer()
    }

    /// A new id, by which the ranks of one communicator find each other. One rank makes it, and the others get it by
    /// other means.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`], as when the machine has no network interface that may be used.
    #[expect(unsafe_code, reason = "calls the library")]
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        self.check_process()?;
        let mut id = RawId([0; UNIQUE_ID_BYTES]);
        // SAFETY: the result is written to this stack frame.
        self.check("ncclGetUniqueId", unsafe { (self.functions().get_unique_id)(&raw mut id) })?;
        Ok(UniqueId(id))
    }

    /// Whether it is the same library, loaded once or twice.
    pub(crate) fn is_same_library(&self, other: &Self) -> bool {
        std::ptr::fn_addr_eq(self.functions().group_end, other.functions().group_end)
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.0.functions
    }

    /// An error in a process that was forked from the one that loaded the library.
    pub(crate) fn check_process(&self) -> Result<(), Error> {
        if self.0.origin.is_left() { Err(Error::Forked) } else { Ok(()) }
    }

    /// An error unless a call succeeded.
    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        if code == SUCCESS { Ok(()) } else { Err(self.error(call, code, std::ptr::null_mut()).into()) }
    }

    /// What a code means. The last text is the library's own, or the communicator's if there is one.
    #[expect(unsafe_code, reason = "calls the library")]
    #[cold]
    pub(crate) fn error(&self, call: &'static str, code: c_int, comm: Comm) -> NcclError {
        // SAFETY: the function takes any code.
        let meaning = unsafe { (self.functions().error_string)(code) };
        // SAFETY: the library takes a live communicator or none.
        let last = unsafe { (self.functions().last_error)(comm) };
        // SAFETY: both texts are the library's, end in a zero byte, and stay until another call fails.
        let [meaning, last] = [meaning, last].map(|text| unsafe { owned(text) });
        NcclError { call, code, name: name_of(code), meaning, last }
    }
}

/// # Safety
///
/// - A text that ends in a zero byte and stays meanwhile, or none.
#[expect(unsafe_code, reason = "reads a text of the library's")]
unsafe fn owned(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's duty.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({} at {})", self.version(), self.path().display())
    }
}

impl Loaded {
    #[expect(unsafe_code, reason = "loads and calls the library")]
    fn open(path: &Path) -> Result<Self, String> {
        // SAFETY: loading it runs its initialisers, which may run at any time.
        let library = unsafe { Library::new(path) }.map_err(|error| in_full(&error))?;
        let version = version_of(&library)?;
        if version < Version::MINIMUM {
            return Err(format!("it is NCCL {version}, and {} is the oldest that works", Version::MINIMUM));
        }
        let functions = Functions::resolve(&library).map_err(|symbol| format!("it has no {symbol}"))?;
        // Never unloaded: threads of the library's may run in it.
        std::mem::forget(library);
        Ok(Self { functions, version, path: path.to_owned(), origin: Origin::here() })
    }
}

#[expect(unsafe_code, reason = "calls the library")]
fn version_of(library: &Library) -> Result<Version, String> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: `nccl.h` declares the symbol so, in every version.
    let get_version = unsafe { library.get::<GetVersion>("ncclGetVersion") };
    let get_version = get_version.map_err(|_| "it has no ncclGetVersion".to_owned())?;
    let mut code = 0;
    // SAFETY: the result is written to this stack frame.
    match unsafe { get_version(&raw mut code) } {
        SUCCESS => Ok(Version::from_code(code.unsigned_abs())),
        answer => Err(format!("ncclGetVersion returned {answer}")),
    }
}

/// What the ranks of a communicator have in common (`ncclUniqueId`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub(crate) RawId);

impl UniqueId {
    /// How many bytes it has.
    pub const BYTES: usize = UNIQUE_ID_BYTES;

    /// An id that another process sent.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(RawId(bytes))
    }

    /// The bytes to send to other processes. Whoever has them can take a rank.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0.0
    }
}
