//! Another library in the program, which calls the driver by itself.

use std::{
    any::Any,
    ffi::{CStr, c_int, c_uint, c_void},
    ptr,
    sync::Arc,
    thread,
    time::Instant,
};

use libloading::Library;
use warpweft_core_types::{
    Device, KernelCode, NativeHandle, NativeMemory, NativeQueue, QueueDesc, SemaphorePoint,
};
use warpweft_cuda::NativeContext;
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Lane, Outcome, PATIENCE};

type Raw = *mut c_void;

/// The driver's functions, called without the backend. Handles are numbers.
pub(crate) struct Other {
    library: Library,
}

/// Calls a function of the driver with the types of its arguments; its code is an error unless it is 0.
macro_rules! call {
    ($other:expr, $name:ident($($arg:expr => $kind:ty),*)) => {{
        // SAFETY: the types are those of the driver's function of this name.
        let function = unsafe {
            $other.library.get::<unsafe extern "C" fn($($kind),*) -> c_int>(stringify!($name).as_bytes())
        };
        let function = *function.unwrap();
        // SAFETY: every pointer is of a value that lives until the return; a wrong handle or address is found
        // by the stand-in.
        match unsafe { function($($arg),*) } {
            0 => Ok::<(), c_int>(()),
            code => Err(code),
        }
    }};
}

fn raw(handle: u64) -> Raw {
    ptr::with_exposed_provenance_mut(usize::try_from(handle).unwrap())
}

#[expect(unsafe_code, reason = "calls the driver, which a test has in its hands")]
impl Other {
    /// The same driver that the backend has.
    pub(crate) fn of(stand_in: &StandIn) -> Self {
        // SAFETY: loaded already, by the test.
        let library = unsafe { Library::new(stand_in.path()) }.unwrap();
        Self { library }
    }

    /// Does something while a context is current.
    pub(crate) fn within<R>(&self, context: u64, body: impl FnOnce() -> R) -> R {
        call!(self, cuCtxPushCurrent_v2(raw(context) => Raw)).unwrap();
        let result = body();
        let mut popped = ptr::null_mut();
        call!(self, cuCtxPopCurrent_v2(&mut popped => *mut Raw)).unwrap();
        result
    }

    /// A context that is not primary.
    pub(crate) fn create_context(&self, device: c_int) -> u64 {
        let (mut context, mut popped) = (ptr::null_mut::<c_void>(), ptr::null_mut());
        call!(self, cuCtxCreate_v2(&mut context => *mut Raw, 0 => c_uint, device => c_int)).unwrap();
        call!(self, cuCtxPopCurrent_v2(&mut popped => *mut Raw)).unwrap();
        context.expose_provenance() as u64
    }

    pub(crate) fn destroy_context(&self, context: u64) -> Result<(), c_int> {
        call!(self, cuCtxDestroy_v2(raw(context) => Raw))
    }

    pub(crate) fn create_stream(&self, context: u64) -> u64 {
        self.within(context, || {
            let mut stream = ptr::null_mut::<c_void>();
            call!(self, cuStreamCreate(&mut stream => *mut Raw, 1 => c_uint)).unwrap();
            stream.expose_provenance() as u64
        })
    }

    /// Memory of a pool of its own.
    pub(crate) fn allocate(&self, context: u64, device: u32, size: usize) -> u64 {
        self.within(context, || {
            let (mut properties, mut pool, mut address) = ([0_u32; 22], ptr::null_mut(), 0);
            // Pinned, without handles, on a device.
            (properties[0], properties[2], properties[3]) = (1, 1, device);
            call!(self, cuMemPoolCreate(&mut pool => *mut Raw, properties.as_ptr() => *const u32)).unwrap();
            call!(self, cuMemAllocFromPoolAsync(
                &mut address => *mut u64, size => usize, pool => Raw, ptr::null_mut() => Raw
            ))
            .unwrap();
            address
        })
    }

    /// Memory of the context, in no pool.
    pub(crate) fn allocate_plain(&self, context: u64, size: usize) -> u64 {
        self.within(context, || {
            let mut address = 0;
            call!(self, cuMemAlloc_v2(&mut address => *mut u64, size => usize)).unwrap();
            address
        })
    }

    pub(crate) fn allocate_host(&self, context: u64, size: usize) -> u64 {
        self.within(context, || {
            let mut pointer = ptr::null_mut::<c_void>();
            call!(self, cuMemHostAlloc(&mut pointer => *mut Raw, size => usize, 3 => c_uint)).unwrap();
            pointer.expose_provenance() as u64
        })
    }

    /// Fills device memory in a stream.
    pub(crate) fn fill(
        &self,
        context: u64,
        stream: u64,
        address: u64,
        byte: u8,
        count: usize,
    ) -> Result<(), c_int> {
        self.within(
            context,
            || call!(self, cuMemsetD8Async(address => u64, byte => u8, count => usize, raw(stream) => Raw)),
        )
    }

    /// Whether everything in a stream is done: waits for it.
    pub(crate) fn synchronise(&self, context: u64, stream: u64) -> Result<(), c_int> {
        self.within(context, || {
            let mut event = ptr::null_mut();
            call!(self, cuEventCreate(&mut event => *mut Raw, 2 => c_uint))?;
            call!(self, cuEventRecord(event => Raw, raw(stream) => Raw))?;
            let started = Instant::now();
            while call!(self, cuEventQuery(event => Raw)) == Err(600) {
                assert!(started.elapsed() < PATIENCE);
                thread::yield_now();
            }
            call!(self, cuEventDestroy_v2(event => Raw))
        })
    }

    /// Loads PTX and unloads it, both of which wait for the kernels of the context.
    pub(crate) fn load_and_unload(&self, context: u64, ptx: &CStr) -> Result<(), c_int> {
        self.within(context, || {
            let mut module = ptr::null_mut();
            call!(self, cuModuleLoadDataEx(
                &mut module => *mut Raw, ptx.as_ptr().cast() => *const c_void, 0 => c_uint,
                ptr::null_mut() => *mut c_int, ptr::null_mut() => *mut Raw
            ))?;
            call!(self, cuModuleUnload(module => Raw))
        })
    }

    pub(crate) fn begin_capture_mode(&self, context: u64, stream: u64, mode: c_int) -> Result<(), c_int> {
        self.within(context, || call!(self, cuStreamBeginCapture_v2(raw(stream) => Raw, mode => c_int)))
    }

    pub(crate) fn end_capture(&self, context: u64, stream: u64) -> Result<u64, c_int> {
        self.within(context, || {
            let mut graph = ptr::null_mut::<c_void>();
            call!(self, cuStreamEndCapture(raw(stream) => Raw, &mut graph => *mut Raw))?;
            Ok(graph.expose_provenance() as u64)
        })
    }

    pub(crate) fn begin_capture(&self, context: u64, stream: u64) -> Result<(), c_int> {
        self.within(context, || call!(self, cuStreamBeginCapture_v2(raw(stream) => Raw, 1 => c_int)))
    }
}

/// A stream as its owner hands it over.
#[expect(unsafe_code, reason = "vouches for a handle")]
pub(crate) fn stream(kind: &'static str, value: u64, owner: Arc<dyn Any + Send + Sync>) -> NativeQueue {
    // SAFETY: the driver that the tests run on looks handles up, and never takes a wrong one for an object.
    unsafe { NativeQueue::new(NativeHandle { kind, value }, owner) }
}

/// Memory as its owner hands it over.
#[expect(unsafe_code, reason = "vouches for an address")]
pub(crate) fn memory(address: u64, size: u64, owner: Arc<dyn Any + Send + Sync>) -> NativeMemory {
    // SAFETY: as for `stream`: every access is looked up.
    unsafe { NativeMemory::new(address, size, owner) }
}

/// A context as its owner hands it over.
#[expect(unsafe_code, reason = "vouches for a handle")]
pub(crate) fn context(kind: &'static str, value: u64, owner: Arc<dyn Any + Send + Sync>) -> NativeContext {
    // SAFETY: as for `stream`.
    unsafe { NativeContext::new(NativeHandle { kind, value }, owner) }
}

/// The kernels of some code with as much workgroup memory.
#[expect(unsafe_code, reason = "changes what kernels are given")]
pub(crate) fn with_shared(code: KernelCode, bytes: u32) -> KernelCode {
    // SAFETY: the stand-in's functions use no workgroup memory.
    unsafe { code.with_contracts(|contract| contract.with_shared_bytes(bytes)) }
}

/// A lane of a device that is open.
pub(crate) fn lane(device: &Arc<dyn Device>) -> Outcome<Lane> {
    let queue = device.create_queue(&QueueDesc::default())?;
    let next = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
    Ok(Lane { device: Arc::clone(device), queue, next })
}
