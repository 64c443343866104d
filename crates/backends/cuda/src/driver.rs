//! The CUDA driver: every function this crate calls, resolved when the driver is opened.
//!
//! cudarc gives the handles and structures. Its functions are not called: they look their symbol up at the
//! first call and panic when the driver lacks it, and they return an enum that a newer driver can leave.
//! Here a driver is usable as a whole or refused with the list of what it lacks, and codes are integers.

use std::{
    error::Error,
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void},
    fmt,
    path::{Path, PathBuf},
    ptr::{self, NonNull},
    sync::Arc,
};

use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUdevice, CUdeviceptr,
    CUevent, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUlinkState, CUmemAccessDesc,
    CUmemAllocationProp, CUmemPoolProps, CUmemoryPool, CUmodule, CUstream, CUuuid,
};
use libloading::Library;
use warpweft_core_types::{DriverError, OpenError};

use crate::{
    backend::NAME,
    fork::{self, Origin},
    host_memory::Registrations,
};

/// The names the driver's library goes by; it is installed with the kernel module, in a folder the loader
/// knows.
#[cfg(not(windows))]
const LIBRARIES: &[&str] = &["libcuda.so.1", "libcuda.so"];
#[cfg(windows)]
const LIBRARIES: &[&str] = &["nvcuda.dll"];

/// The oldest driver, for messages, and what it says of itself: the PTX that is checked in is of CUDA 12.0.
const OLDEST: &str = "525 (CUDA 12.0)";
const OLDEST_VERSION: (u32, u32) = (12, 0);

/// `CUmemGenericAllocationHandle`.
pub(crate) type MemoryHandle = c_ulonglong;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: i64 = 2;
/// `CUDA_ERROR_NOT_INITIALIZED`.
const NOT_INITIALIZED: i64 = 3;
/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: i64 = 100;
/// `CUDA_ERROR_NOT_FOUND`.
pub(crate) const NOT_FOUND: i64 = 500;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: c_int = 600;
/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
pub(crate) const PEER_ACCESS_ALREADY_ENABLED: i64 = 704;

/// A driver object's handle: a token that is only ever given back to the driver.
#[derive(Debug)]
pub(crate) struct Handle<T>(NonNull<T>);

impl<T> Handle<T> {
    /// Wraps what a successful creating call wrote, or what a program says is a handle; `None` for zero.
    pub(crate) fn written(raw: *mut T) -> Option<Self> {
        NonNull::new(raw).map(Self)
    }

    pub(crate) const fn raw(self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: the pointer is never dereferenced on this side, and the driver takes handles from any thread.
#[expect(unsafe_code, reason = "handles are pointers in name only, see above")]
unsafe impl<T> Send for Handle<T> {}

// SAFETY: as for `Send`; a shared reference gives out the token and nothing else.
#[expect(unsafe_code, reason = "handles are pointers in name only, see above")]
unsafe impl<T> Sync for Handle<T> {}

/// Declares the driver's functions: a field and a method for each, and the list of their symbols.
macro_rules! driver_functions {
    ($($symbol:ident as $name:ident($($arg:ident: $kind:ty),*);)*) => {
        const SYMBOLS: &[&str] = &[
            "cuDriverGetVersion",
            "cuEventQuery",
            "cuGetErrorName",
            "cuStreamQuery",
            $(stringify!($symbol)),*
        ];

        struct Functions {
            /// Those whose answers are not errors, called by hand.
            event_query: unsafe extern "C" fn(CUevent) -> c_int,
            stream_query: unsafe extern "C" fn(CUstream) -> c_int,
            get_error_name: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
            $($name: unsafe extern "C" fn($($kind),*) -> c_int,)*
        }

        #[expect(unsafe_code, reason = "looks functions up by name and type")]
        impl Functions {
            /// `None` unless the library has every symbol.
            fn resolve(library: &Library) -> Option<Self> {
                Some(Self {
                    // SAFETY: here and below, the field has the type of the driver's function of this name.
                    event_query: unsafe { resolve(library, "cuEventQuery") }?,
                    // SAFETY: as above.
                    stream_query: unsafe { resolve(library, "cuStreamQuery") }?,
                    // SAFETY: as above.
                    get_error_name: unsafe { resolve(library, "cuGetErrorName") }?,
                    // SAFETY: as above.
                    $($name: unsafe { resolve(library, stringify!($symbol)) }?,)*
                })
            }
        }

        #[expect(unsafe_code, reason = "the raw functions of the driver")]
        #[expect(clippy::too_many_arguments, reason = "signatures are the driver's")]
        impl Driver {
            $(
                /// Calls the driver's function of this name, unless this process was forked meanwhile.
                ///
                /// # Safety
                ///
                /// - Handles are live and of the context that is current; the CUDA manual says which
                ///   functions need one.
                /// - Pointers are valid for what the manual says is read and written through them, and
                ///   device addresses for what the enqueued work does, until that work is over.
                pub(crate) unsafe fn $name(&self, $($arg: $kind),*) -> Result<(), DriverError> {
                    self.require_origin()?;
                    // SAFETY: the pointer was resolved from the driver under this name and signature and
                    // stays valid with `self.library`; the rest are the caller's duties.
                    let code = unsafe { (self.functions.$name)($($arg),*) };
                    self.check(stringify!($symbol), code)
                }
            )*
        }
    };
}

driver_functions! {
    cuInit as init(flags: c_uint);
    cuDeviceGetCount as device_get_count(count: *mut c_int);
    cuDeviceGet as device_get(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetName as device_get_name(name: *mut c_char, len: c_int, device: CUdevice);
    cuDeviceGetUuid_v2 as device_get_uuid(uuid: *mut CUuuid, device: CUdevice);
    cuDeviceTotalMem_v2 as device_total_mem(bytes: *mut usize, device: CUdevice);
    cuDeviceGetAttribute as device_get_attribute(value: *mut c_int, attribute: c_int, device: CUdevice);
    cuDeviceCanAccessPeer as device_can_access_peer(can: *mut c_int, device: CUdevice, peer: CUdevice);
    cuDevicePrimaryCtxRetain as primary_context_retain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2 as primary_context_release(device: CUdevice);
    cuCtxPushCurrent_v2 as context_push(context: CUcontext);
    cuCtxPopCurrent_v2 as context_pop(context: *mut CUcontext);
    cuCtxGetCurrent as context_current(context: *mut CUcontext);
    cuThreadExchangeStreamCaptureMode as exchange_capture_mode(mode: *mut c_int);
    cuCtxEnablePeerAccess as context_enable_peer_access(peer: CUcontext, flags: c_uint);
    cuMemGetInfo_v2 as mem_get_info(free: *mut usize, total: *mut usize);
    cuMemPoolCreate as mem_pool_create(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps);
    cuMemPoolDestroy as mem_pool_destroy(pool: CUmemoryPool);
    cuMemPoolSetAttribute as mem_pool_set_attribute(pool: CUmemoryPool, attribute: c_int, value: *mut c_void);
    cuMemPoolGetAttribute as mem_pool_get_attribute(pool: CUmemoryPool, attribute: c_int, value: *mut c_void);
    cuMemPoolSetAccess as mem_pool_set_access(pool: CUmemoryPool, map: *const CUmemAccessDesc, count: usize);
    cuMemPoolTrimTo as mem_pool_trim_to(pool: CUmemoryPool, keep: usize);
    cuMemAllocFromPoolAsync as mem_alloc_from_pool_async(
        address: *mut CUdeviceptr, size: usize, pool: CUmemoryPool, stream: CUstream
    );
    cuMemFreeAsync as mem_free_async(address: CUdeviceptr, stream: CUstream);
    cuMemHostAlloc as mem_host_alloc(pointer: *mut *mut c_void, size: usize, flags: c_uint);
    cuMemFreeHost as mem_free_host(pointer: *mut c_void);
    cuMemHostGetDevicePointer_v2 as mem_host_get_device_pointer(
        address: *mut CUdeviceptr, pointer: *mut c_void, flags: c_uint
    );
    cuMemcpyAsync as memcpy_async(dst: CUdeviceptr, src: CUdeviceptr, size: usize, stream: CUstream);
    cuMemsetD8Async as memset_d8_async(dst: CUdeviceptr, value: u8, count: usize, stream: CUstream);
    cuMemsetD32Async as memset_d32_async(dst: CUdeviceptr, value: c_uint, count: usize, stream: CUstream);
    cuMemsetD2D8Async as memset_d2d8_async(
        dst: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize, stream: CUstream
    );
    cuStreamCreate as stream_create(stream: *mut CUstream, flags: c_uint);
    cuStreamDestroy_v2 as stream_destroy(stream: CUstream);
    cuStreamWaitEvent as stream_wait_event(stream: CUstream, event: CUevent, flags: c_uint);
    cuEventCreate as event_create(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2 as event_destroy(event: CUevent);
    cuEventRecord as event_record(event: CUevent, stream: CUstream);
    cuModuleLoadDataEx as module_load_data(
        module: *mut CUmodule, image: *const c_void, option_count: c_uint, options: *mut c_int,
        values: *mut *mut c_void
    );
    cuModuleUnload as module_unload(module: CUmodule);
    cuModuleGetFunction as module_get_function(
        function: *mut CUfunction, module: CUmodule, name: *const c_char
    );
    cuFuncGetAttribute as function_get_attribute(value: *mut c_int, attribute: c_int, function: CUfunction);
    cuFuncSetAttribute as function_set_attribute(function: CUfunction, attribute: c_int, value: c_int);
    cuOccupancyMaxActiveBlocksPerMultiprocessor as occupancy(
        count: *mut c_int, function: CUfunction, block_size: c_int, shared_bytes: usize
    );
    cuLinkCreate_v2 as link_create(
        option_count: c_uint, options: *mut c_int, values: *mut *mut c_void, state: *mut CUlinkState
    );
    cuLinkAddData_v2 as link_add_data(
        state: CUlinkState, kind: c_int, data: *mut c_void, size: usize, name: *const c_char,
        option_count: c_uint, options: *mut c_int, values: *mut *mut c_void
    );
    cuLinkComplete as link_complete(state: CUlinkState, image: *mut *mut c_void, size: *mut usize);
    cuLinkDestroy as link_destroy(state: CUlinkState);
    cuMemHostRegister_v2 as mem_host_register(pointer: *mut c_void, size: usize, flags: c_uint);
    cuMemHostUnregister as mem_host_unregister(pointer: *mut c_void);
    cuMemGetAllocationGranularity as mem_granularity(
        granularity: *mut usize, properties: *const CUmemAllocationProp, option: c_int
    );
    cuMemCreate as mem_create(
        handle: *mut MemoryHandle, size: usize, properties: *const CUmemAllocationProp, flags: c_ulonglong
    );
    cuMemRelease as mem_release(handle: MemoryHandle);
    cuMemAddressReserve as mem_address_reserve(
        address: *mut CUdeviceptr, size: usize, alignment: usize, wanted: CUdeviceptr, flags: c_ulonglong
    );
    cuMemAddressFree as mem_address_free(address: CUdeviceptr, size: usize);
    cuMemMap as mem_map(
        address: CUdeviceptr, size: usize, offset: usize, handle: MemoryHandle, flags: c_ulonglong
    );
    cuMemUnmap as mem_unmap(address: CUdeviceptr, size: usize);
    cuMemSetAccess as mem_set_access(
        address: CUdeviceptr, size: usize, access: *const CUmemAccessDesc, count: usize
    );
    cuMemExportToShareableHandle as mem_export(
        descriptor: *mut c_void, handle: MemoryHandle, kind: c_int, flags: c_ulonglong
    );
    cuMemImportFromShareableHandle as mem_import(
        handle: *mut MemoryHandle, descriptor: *mut c_void, kind: c_int
    );
    cuMemGetAllocationPropertiesFromHandle as mem_properties(
        properties: *mut CUmemAllocationProp, handle: MemoryHandle
    );
    cuCtxGetDevice as context_device(device: *mut CUdevice);
    cuStreamGetCtx as stream_context(stream: CUstream, context: *mut CUcontext);
    cuPointerGetAttribute as pointer_attribute(value: *mut c_void, attribute: c_int, pointer: CUdeviceptr);
    cuStreamIsCapturing as stream_is_capturing(stream: CUstream, status: *mut c_int);
    cuStreamBeginCapture_v2 as stream_begin_capture(stream: CUstream, mode: c_int);
    cuStreamEndCapture as stream_end_capture(stream: CUstream, graph: *mut CUgraph);
    cuGraphCreate as graph_create(graph: *mut CUgraph, flags: c_uint);
    cuGraphDestroy as graph_destroy(graph: CUgraph);
    cuGraphAddKernelNode_v2 as graph_add_kernel(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        parameters: *const CUDA_KERNEL_NODE_PARAMS
    );
    cuGraphAddMemcpyNode as graph_add_copy(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        parameters: *const CUDA_MEMCPY3D, context: CUcontext
    );
    cuGraphAddMemsetNode as graph_add_fill(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        parameters: *const CUDA_MEMSET_NODE_PARAMS, context: CUcontext
    );
    cuGraphAddEmptyNode as graph_add_join(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize
    );
    cuGraphAddChildGraphNode as graph_add_child(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize, child: CUgraph
    );
    cuGraphInstantiateWithFlags as graph_instantiate(
        executable: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong
    );
    cuGraphExecKernelNodeSetParams_v2 as graph_set_kernel(
        executable: CUgraphExec, node: CUgraphNode, parameters: *const CUDA_KERNEL_NODE_PARAMS
    );
    cuGraphExecMemcpyNodeSetParams as graph_set_copy(
        executable: CUgraphExec, node: CUgraphNode, parameters: *const CUDA_MEMCPY3D, context: CUcontext
    );
    cuGraphExecMemsetNodeSetParams as graph_set_fill(
        executable: CUgraphExec, node: CUgraphNode, parameters: *const CUDA_MEMSET_NODE_PARAMS,
        context: CUcontext
    );
    cuGraphExecDestroy as graph_exec_destroy(executable: CUgraphExec);
    cuGraphLaunch as graph_launch(executable: CUgraphExec, stream: CUstream);
    cuLaunchKernel as launch_kernel(
        function: CUfunction,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: CUstream,
        parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
}

type GetParamInfo = unsafe extern "C" fn(CUfunction, usize, *mut usize, *mut usize) -> c_int;

/// The driver of this process.
pub(crate) struct Driver {
    functions: Functions,
    /// `cuFuncGetParamInfo`, which came with CUDA 12.4.
    get_param_info: Option<GetParamInfo>,
    version: (u32, u32),
    pub(crate) origin: Origin,
    /// Host memory of other owners that is pinned.
    pub(crate) registrations: Registrations,
    /// Keeps the functions mapped. Taken when the driver is dropped.
    library: Option<Library>,
}

impl Driver {
    /// Loads and initialises the driver: this file and no other, or the one that the loader knows or that is in
    /// one of the folders where it may be.
    #[expect(unsafe_code, reason = "looks a function up by name and type")]
    pub(crate) fn open(named: Option<&Path>) -> Result<Arc<Self>, OpenError> {
        if fork::has_ancestors() {
            return Err(unavailable(format!("a process of its own: {}", fork::CAUSE), None));
        }
        let names: Vec<PathBuf> = match named {
            Some(path) => vec![path.to_path_buf()],
            None => candidates(Path::new("/"), LIBRARIES),
        };
        let first = names[0].display();
        let library = load_any(&names).map_err(|reason| {
            let missing = format!(
                "{first}, which comes with the NVIDIA driver; install driver {OLDEST} or newer, or start the \
                 container with the NVIDIA runtime ({reason})"
            );
            unavailable(missing, None)
        })?;
        // Before the functions: an old driver lacks some, and its version says more than their names.
        let version = version_of(&library);
        if let Some((major, minor)) = version.filter(|&version| version < OLDEST_VERSION) {
            let missing = format!(
                "a newer NVIDIA driver: {first} is of CUDA {major}.{minor}, and driver {OLDEST} or newer is \
                 needed"
            );
            return Err(unavailable(missing, version));
        }
        let (Some(version), Some(functions)) = (version, Functions::resolve(&library)) else {
            let absent = absent(&library).join(", ");
            let missing = format!("{absent} in {first}; update the NVIDIA driver to {OLDEST} or newer");
            return Err(unavailable(missing, version));
        };
        // SAFETY: the type is that of the driver's function of this name.
        let get_param_info = unsafe { resolve(&library, "cuFuncGetParamInfo") };
        let origin = Origin::here();
        let registrations = Registrations::default();
        let driver = Arc::new(Self {
            functions,
            get_param_info,
            version,
            origin,
            registrations,
            library: Some(library),
        });
        driver.initialise()?;
        Ok(driver)
    }

    #[expect(unsafe_code, reason = "initialises the driver")]
    fn initialise(&self) -> Result<(), OpenError> {
        // SAFETY: the one call that needs nothing before it; it may be repeated.
        unsafe { self.init(0) }.map_err(|error| match error.code {
            NO_DEVICE => self.unavailable(
                "an NVIDIA GPU: the driver runs and shows none (is CUDA_VISIBLE_DEVICES set?)".to_owned(),
            ),
            _ => self.unavailable(format!("a working NVIDIA driver: {error}")),
        })
    }

    /// A number that tells this driver from others that the process loaded, as tests do.
    pub(crate) fn identity(&self) -> usize {
        self.functions.init as usize
    }

    /// This driver is here, and something is missing all the same.
    pub(crate) fn unavailable(&self, missing: String) -> OpenError {
        unavailable(missing, Some(self.version))
    }

    /// The newest CUDA version the driver speaks, as major and minor.
    pub(crate) const fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Refuses in a process that was forked from the one that opened the driver.
    fn require_origin(&self) -> Result<(), DriverError> {
        if !self.origin.is_left() {
            return Ok(());
        }
        Err(DriverError { api: "fork", code: NOT_INITIALIZED, name: fork::CAUSE.to_owned() })
    }

    /// Whether an event's work is over.
    ///
    /// # Safety
    ///
    /// - The event is live, and a context is current.
    #[expect(unsafe_code, reason = "the raw functions of the driver")]
    pub(crate) unsafe fn event_is_done(&self, event: CUevent) -> Result<bool, DriverError> {
        // SAFETY: the caller's duties. The code is looked at before it becomes an error, since most
        // answers are "not yet" and an error allocates.
        match unsafe { (self.functions.event_query)(event) } {
            NOT_READY => Ok(false),
            code => self.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Whether all work in a stream is over.
    ///
    /// # Safety
    ///
    /// - The stream is live, and its context is current.
    #[expect(unsafe_code, reason = "the raw functions of the driver")]
    pub(crate) unsafe fn stream_is_done(&self, stream: CUstream) -> Result<bool, DriverError> {
        // SAFETY: the caller's duties; the code as in `event_is_done`.
        match unsafe { (self.functions.stream_query)(stream) } {
            NOT_READY => Ok(false),
            code => self.check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// The sizes of a function's parameters in order, from drivers that tell.
    ///
    /// # Safety
    ///
    /// - The function is of a loaded module.
    #[expect(unsafe_code, reason = "the raw functions of the driver")]
    pub(crate) unsafe fn parameter_sizes(&self, function: CUfunction) -> Option<Vec<usize>> {
        let get = self.get_param_info?;
        let mut sizes = Vec::new();
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the caller's duty; two integers are written to this stack frame. An index behind the
        // last parameter is refused, which ends the loop.
        while unsafe { get(function, sizes.len(), &mut offset, &mut size) } == 0 {
            sizes.push(size);
        }
        Some(sizes)
    }

    fn check(&self, api: &'static str, code: c_int) -> Result<(), DriverError> {
        if code == 0 {
            return Ok(());
        }
        Err(DriverError { api, code: code.into(), name: self.error_name(code) })
    }

    #[expect(unsafe_code, reason = "asks the driver for a text")]
    fn error_name(&self, code: c_int) -> String {
        let mut name = ptr::null();
        // SAFETY: writes one pointer, which lives on this stack frame; any code may be asked about.
        let answer = unsafe { (self.functions.get_error_name)(code, &mut name) };
        if answer != 0 || name.is_null() {
            return format!("unknown CUDA error {code}");
        }
        // SAFETY: the driver answered with a static, terminated string.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver({:?})", self.version)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.origin.is_left() {
            // Unloading runs the driver's code, which waits for threads that were not inherited.
            std::mem::forget(self.library.take());
        }
    }
}

/// Runs a call that creates an object and wraps the handle it wrote.
pub(crate) fn created<T>(
    api: &'static str,
    create: impl FnOnce(*mut *mut T) -> Result<(), DriverError>,
) -> Result<Handle<T>, DriverError> {
    let mut raw = ptr::null_mut();
    create(&mut raw)?;
    Handle::written(raw).ok_or_else(|| DriverError { api, code: 0, name: "no object was made".to_owned() })
}

fn unavailable(missing: String, version: Option<(u32, u32)>) -> OpenError {
    OpenError::Unavailable { backend: NAME, missing, driver: version.map(version_text) }
}

/// A driver's version in words.
pub(crate) fn version_text((major, minor): (u32, u32)) -> String {
    format!("CUDA {major}.{minor}")
}

/// Where the driver's libraries are when the loader does not know: WSL, container runtimes, Google's Colab, NixOS.
#[cfg(not(windows))]
const FOLDERS: &[&str] =
    &["usr/lib/wsl/lib", "usr/local/nvidia/lib64", "usr/lib64-nvidia", "run/opengl-driver/lib"];
#[cfg(windows)]
const FOLDERS: &[&str] = &[];

/// The names themselves, for the loader, and then the files of these names in folders where they may be.
pub(crate) fn candidates(root: &Path, names: &[&str]) -> Vec<PathBuf> {
    let files = FOLDERS.iter().flat_map(|folder| names.iter().map(move |name| root.join(folder).join(name)));
    names.iter().map(PathBuf::from).chain(files.filter(|file| file.exists())).collect()
}

#[expect(unsafe_code, reason = "opens a dynamic library")]
pub(crate) fn load_any(names: &[PathBuf]) -> Result<Library, String> {
    let mut reasons = Vec::new();
    for name in names {
        // SAFETY: the library of this name is the vendor's, or the one the caller named for it, whose
        // initialisers were made to be run by any program that links it.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => reasons.push(in_full(&error)),
        }
    }
    Err(reasons.join("; "))
}

/// An error with its causes, where the loader's words are.
pub(crate) fn in_full(error: &dyn Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(cause) => format!("{error}: {}", in_full(cause)),
    }
}

/// The symbol's address as an `F`.
///
/// # Safety
///
/// - `F` is a pointer, or the pointer to a function whose type is that of the library's function of this name.
#[expect(unsafe_code, reason = "looks symbols up")]
pub(crate) unsafe fn resolve<F: Copy>(library: &Library, symbol: &str) -> Option<F> {
    // SAFETY: the caller's duty.
    unsafe { library.get::<F>(symbol.as_bytes()) }.ok().map(|found| *found)
}

/// What a driver says of itself; `None` if it lacks the function. It needs no initialised driver.
#[expect(unsafe_code, reason = "asks the driver")]
fn version_of(library: &Library) -> Option<(u32, u32)> {
    // SAFETY: the driver's function of this name has this type.
    let get = unsafe { resolve::<unsafe extern "C" fn(*mut c_int) -> c_int>(library, "cuDriverGetVersion") }?;
    let mut version = 0;
    // SAFETY: the driver's function of this name has this signature; it writes one integer, which lives on
    // this stack frame.
    let code = unsafe { get(&mut version) };
    let version = u32::try_from(version).ok().filter(|_| code == 0)?;
    Some((version / 1000, version % 1000 / 10))
}

#[expect(unsafe_code, reason = "looks symbols up")]
fn absent(library: &Library) -> Vec<&'static str> {
    // SAFETY: a pointer, which is not used.
    let lacks = |symbol: &&str| unsafe { resolve::<*const ()>(library, symbol) }.is_none();
    SYMBOLS.iter().copied().filter(lacks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(library: &str, words: &[&str]) {
        let error = Driver::open(Some(Path::new(library))).unwrap_err();
        assert!(matches!(error, OpenError::Unavailable { backend: "cuda", driver: None, .. }), "{error:?}");
        let text = error.to_string();
        for word in words {
            assert!(text.contains(word), "{word:?} is not in: {text}");
        }
    }

    #[test]
    fn a_driver_that_is_not_installed_is_named_with_the_way_to_get_it() {
        check("libcuda-of-nobody.so.1", &["libcuda-of-nobody.so.1", "install driver 525"]);
    }

    #[test]
    #[cfg(unix)]
    fn the_driver_is_looked_for_where_the_loader_does_not_look() {
        let root = tempfile::tempdir().unwrap();
        let names = ["libcuda.so.1", "libcuda.so"];
        assert_eq!(candidates(root.path(), &names), names.map(PathBuf::from));
        let files =
            ["usr/lib/wsl/lib/libcuda.so.1", "run/opengl-driver/lib/libcuda.so.1", "run/libcuda.so.1"];
        for file in files.map(|file| root.path().join(file)) {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "").unwrap();
        }
        let found = candidates(root.path(), &names);
        assert_eq!(found[..2], names.map(PathBuf::from), "what the loader knows comes first");
        assert_eq!(found[2..], [root.path().join(files[0]), root.path().join(files[1])]);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_without_the_functions_is_refused_with_their_names() {
        check("libc.so.6", &["cuInit", "cuMemAllocFromPoolAsync", "update the NVIDIA driver"]);
    }
}
