//! Graphs, captures, contexts and memory of several kinds, as a program uses them: what is wrong is found.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, clippy::unwrap_used, reason = "calls the driver")]

use std::{
    ffi::{CString, c_int, c_uint, c_void},
    os::fd::AsRawFd as _,
    ptr, thread,
    time::{Duration, Instant},
};

use libloading::Library;
use warpweft_stand_in_cuda::StandIn;

type Raw = *mut c_void;

const STEP: usize = 2 << 20;

/// An initialised driver with a device's context, current on this thread, and a stream.
struct Rig {
    stand_in: StandIn,
    library: Library,
    context: Raw,
    stream: Raw,
}

/// Calls a function of the driver by its name, with the types of its arguments.
macro_rules! call {
    ($rig:expr, $name:ident($($arg:expr => $kind:ty),*)) => {{
        // SAFETY: the types are those of the driver's function of this name, and every pointer is of a value
        // that lives in the test.
        let function = unsafe {
            $rig.library.get::<unsafe extern "C" fn($($kind),*) -> c_int>(stringify!($name).as_bytes())
        };
        let function = *function.unwrap();
        // SAFETY: as above.
        unsafe { function($($arg),*) }
    }};
}

/// Pinned memory of a device that can be exported: `CUmemAllocationProp`.
const fn properties(device: u32) -> [u32; 8] {
    [1, 1, 1, device, 0, 0, 0, 0]
}

impl Rig {
    fn new() -> Self {
        let stand_in = StandIn::load().unwrap();
        // SAFETY: the stand-in runs nothing when it is loaded.
        let library = unsafe { Library::new(stand_in.path()) }.unwrap();
        let mut rig = Self { stand_in, library, context: ptr::null_mut(), stream: ptr::null_mut() };
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        assert_eq!(call!(rig, cuInit(0 => c_uint)), 0);
        assert_eq!(call!(rig, cuDevicePrimaryCtxRetain(&mut context => *mut Raw, 0 => c_int)), 0);
        assert_eq!(call!(rig, cuCtxPushCurrent_v2(context => Raw)), 0);
        assert_eq!(call!(rig, cuStreamCreate(&mut stream => *mut Raw, 1 => c_uint)), 0);
        (rig.context, rig.stream) = (context, stream);
        rig
    }

    fn create(&self, device: u32, size: usize) -> Result<u64, c_int> {
        let (properties, mut handle) = (properties(device), 0);
        let code = call!(self, cuMemCreate(
            &mut handle => *mut u64, size => usize, properties.as_ptr() => *const u32, 0 => u64
        ));
        if code == 0 { Ok(handle) } else { Err(code) }
    }

    fn reserve(&self, size: usize) -> u64 {
        let mut address = 0;
        let code = call!(self, cuMemAddressReserve(
            &mut address => *mut u64, size => usize, 0 => usize, 0 => u64, 0 => u64
        ));
        assert_eq!(code, 0);
        address
    }

    fn map(&self, address: u64, size: usize, handle: u64) -> c_int {
        call!(self, cuMemMap(address => u64, size => usize, 0 => usize, handle => u64, 0 => u64))
    }

    fn admit(&self, address: u64, size: usize, device: u32, flags: u32) -> c_int {
        let access = [1, device, flags];
        call!(self, cuMemSetAccess(address => u64, size => usize, access.as_ptr() => *const u32, 1 => usize))
    }

    fn fill(&self, address: u64, byte: u8, count: usize) -> c_int {
        call!(self, cuMemsetD8Async(address => u64, byte => u8, count => usize, self.stream => Raw))
    }

    fn copy(&self, to: u64, from: u64, size: usize) -> c_int {
        call!(self, cuMemcpyAsync(to => u64, from => u64, size => usize, self.stream => Raw))
    }

    fn host(&self, size: usize) -> u64 {
        let mut pointer = ptr::null_mut::<c_void>();
        assert_eq!(call!(self, cuMemHostAlloc(&mut pointer => *mut Raw, size => usize, 3 => c_uint)), 0);
        pointer.expose_provenance() as u64
    }

    fn event(&self) -> Raw {
        let mut event = ptr::null_mut();
        assert_eq!(call!(self, cuEventCreate(&mut event => *mut Raw, 2 => c_uint)), 0);
        event
    }

    fn begin(&self, mode: c_int) -> c_int {
        call!(self, cuStreamBeginCapture_v2(self.stream => Raw, mode => c_int))
    }

    /// The graph that was captured.
    fn end(&self) -> Result<Raw, c_int> {
        let mut graph = ptr::null_mut();
        let code = call!(self, cuStreamEndCapture(self.stream => Raw, &mut graph => *mut Raw));
        if code == 0 { Ok(graph) } else { Err(code) }
    }

    /// What the stream ends with: 0, or the code of a fault.
    fn outcome(&self) -> c_int {
        let (mut event, started) = (ptr::null_mut(), Instant::now());
        let created = call!(self, cuEventCreate(&mut event => *mut Raw, 2 => c_uint));
        if created != 0 {
            return created;
        }
        let recorded = call!(self, cuEventRecord(event => Raw, self.stream => Raw));
        if recorded != 0 {
            return recorded;
        }
        loop {
            match call!(self, cuEventQuery(event => Raw)) {
                600 => assert!(started.elapsed() < Duration::from_secs(20)),
                code => return code,
            }
        }
    }

    fn function(&self, entry: &str) -> Raw {
        let text = format!(".version 8.0\n.target sm_70\n.entry {entry}() {{ ret; }}");
        let (text, name) = (CString::new(text).unwrap(), CString::new(entry).unwrap());
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        let loaded = call!(self, cuModuleLoadDataEx(
            &mut module => *mut Raw, text.as_ptr().cast() => *const c_void, 0 => c_uint,
            ptr::null_mut() => *mut c_int, ptr::null_mut() => *mut Raw
        ));
        let found = call!(self, cuModuleGetFunction(
            &mut function => *mut Raw, module => Raw, name.as_ptr() => *const _
        ));
        assert_eq!((loaded, found), (0, 0));
        function
    }

    fn launch(&self, function: Raw, shared: u32) -> c_int {
        call!(self, cuLaunchKernel(
            function => Raw, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint,
            shared => c_uint, self.stream => Raw, ptr::null_mut() => *mut Raw, ptr::null_mut() => *mut Raw
        ))
    }
}

/// What an address of this process holds; only for memory that lives in the test.
fn byte_at(address: u64) -> u8 {
    let place = ptr::with_exposed_provenance::<u8>(usize::try_from(address).unwrap());
    // SAFETY: pinned memory that the test has and no device is at work on.
    unsafe { place.read_volatile() }
}

#[test]
fn memory_by_parts_goes_one_way() {
    let rig = Rig::new();
    let wanted = properties(0);
    let mut step = 0;
    let asked = call!(rig, cuMemGetAllocationGranularity(
        &mut step => *mut usize, wanted.as_ptr() => *const u32, 0 => c_int
    ));
    assert_eq!((asked, step), (0, STEP));
    assert_eq!(rig.create(0, STEP - 1), Err(1));
    assert_eq!(rig.create(7, STEP), Err(101));
    assert_eq!(rig.create(0, 5 << 30), Err(2));
    let (memory, address) = (rig.create(0, STEP).unwrap(), rig.reserve(2 * STEP));
    assert_eq!(rig.map(address, STEP, 0x7777_0000), 1);
    assert_eq!(rig.map(address, 2 * STEP, memory), 1, "the memory is shorter");
    assert_eq!(rig.map(address + (2 * STEP) as u64, STEP, memory), 1, "it is outside the reservation");
    assert_eq!(rig.map(address, STEP, memory), 0);
    assert_eq!(rig.map(address, STEP, memory), 208);
    assert_eq!(rig.admit(address, STEP - 4096, 0, 3), 1);
    assert_eq!(rig.admit(address, STEP, 9, 3), 101);
    assert_eq!((rig.admit(address, STEP, 0, 3), rig.fill(address, 7, STEP)), (0, 0));
    assert_eq!(rig.outcome(), 0);
    assert_eq!(rig.fill(address, 7, STEP + 1), 1, "nothing is mapped behind it");
    let free = |size| call!(rig, cuMemAddressFree(address => u64, size => usize));
    let unmap = |size| call!(rig, cuMemUnmap(address => u64, size => usize));
    let release = || call!(rig, cuMemRelease(memory => u64));
    assert_eq!(free(2 * STEP), 1, "something is mapped there");
    assert_eq!(release(), 0);
    assert_eq!(rig.fill(address, 8, STEP), 0, "a mapping keeps the memory");
    assert_eq!(rig.outcome(), 0);
    assert_eq!((unmap(STEP / 2), unmap(STEP), unmap(STEP)), (1, 0, 1));
    assert_eq!(rig.fill(address, 9, 1), 1);
    assert_eq!((free(STEP), free(2 * STEP), free(2 * STEP), release()), (1, 0, 1, 1));
    assert_eq!((rig.stand_in.live("memories"), rig.stand_in.live("reservations")), (0, 0));
    let (mut left, mut total) = (0, 0);
    assert_eq!(call!(rig, cuMemGetInfo_v2(&mut left => *mut usize, &mut total => *mut usize)), 0);
    assert_eq!(left, total);
}

#[test]
fn memory_without_access_is_a_fault() {
    for flags in [0, 1] {
        let rig = Rig::new();
        let (memory, address, window) = (rig.create(0, STEP).unwrap(), rig.reserve(STEP), rig.host(64));
        assert_eq!((rig.map(address, STEP, memory), rig.admit(address, STEP, 0, flags)), (0, 0));
        assert_eq!(rig.copy(window, address, 64), 0);
        // Reading is enough for the copy; writing is for neither.
        assert_eq!(rig.outcome(), if flags == 1 { 0 } else { 700 });
        if flags == 1 {
            assert_eq!(rig.fill(address, 1, 64), 0);
            while rig.outcome() == 0 {}
            assert_eq!(rig.outcome(), 700);
        }
    }
}

#[test]
fn descriptors_name_the_same_memory_and_others_are_refused() {
    let rig = Rig::new();
    let memory = rig.create(1, STEP).unwrap();
    let (mut descriptor, mut again) = (-1, 0);
    let export = |kind: c_int, place: *mut c_int| call!(rig, cuMemExportToShareableHandle(place => *mut c_int, memory => u64, kind => c_int, 0 => u64));
    assert_eq!((export(2, &mut descriptor), export(1, &mut descriptor)), (1, 0));
    let import = |descriptor: c_int, place: *mut u64| {
        let bits = ptr::without_provenance_mut(usize::try_from(descriptor).unwrap());
        call!(rig, cuMemImportFromShareableHandle(place => *mut u64, bits => Raw, 1 => c_int))
    };
    assert_eq!(import(descriptor, &mut again), 0);
    let (here, there, window) = (rig.reserve(STEP), rig.reserve(STEP), rig.host(64));
    assert_eq!((rig.map(here, STEP, memory), rig.map(there, STEP, again)), (0, 0));
    assert_eq!((rig.admit(here, STEP, 0, 3), rig.admit(there, STEP, 0, 3)), (0, 0));
    assert_eq!((rig.fill(here, 42, 64), rig.copy(window, there, 64), rig.outcome()), (0, 0, 0));
    assert_eq!(byte_at(window + 63), 42);
    // The same memory, which is counted once.
    let (mut left, mut total) = (0, 0);
    assert_eq!(call!(rig, cuCtxPushCurrent_v2(rig.context => Raw)), 0);
    assert_eq!(call!(rig, cuMemGetInfo_v2(&mut left => *mut usize, &mut total => *mut usize)), 0);
    assert_eq!(left, total, "it is memory of the other device");
    let null = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(import(null.as_raw_fd(), &mut again), 1);
}

#[test]
fn host_memory_is_registered_once() {
    let rig = Rig::new();
    let memory = vec![0_u64; 2048];
    let base = memory.as_ptr().cast_mut().cast::<u8>();
    let register = |at: usize, size: usize| call!(rig, cuMemHostRegister_v2(base.wrapping_add(at).cast() => Raw, size => usize, 3 => c_uint));
    let unregister = |at: usize| call!(rig, cuMemHostUnregister(base.wrapping_add(at).cast() => Raw));
    let seen = |at: usize| {
        let mut address = 0;
        let code = call!(rig, cuMemHostGetDevicePointer_v2(
            &mut address => *mut u64, base.wrapping_add(at).cast() => Raw, 0 => c_uint
        ));
        if code == 0 { Ok(address) } else { Err(code) }
    };
    assert_eq!((register(0, 0), unregister(0), seen(0)), (1, 713, Err(1)));
    assert_eq!(
        (register(4096, 4096), register(4096, 4096), register(0, 4097), register(8191, 2)),
        (0, 712, 712, 712)
    );
    assert_eq!(register(0, 4096), 0, "it lies beside");
    let first = seen(4096).unwrap();
    assert_eq!((seen(8191), seen(8192)), (Ok(first + 4095), Err(1)));
    assert_eq!((rig.fill(first, 5, 4096), rig.fill(first, 5, 4097), rig.outcome()), (0, 1, 0));
    assert_eq!(byte_at(first + 4095), 5);
    assert_eq!((unregister(4097), unregister(4096), unregister(4096)), (713, 0, 713));
    assert_eq!((rig.fill(first, 6, 1), unregister(0)), (1, 0));
}

#[test]
fn addresses_are_told_apart() {
    let rig = Rig::new();
    let ask = |attribute: c_int, address: u64| {
        let mut word = 0_u64;
        let code = call!(rig, cuPointerGetAttribute(
            ptr::from_mut(&mut word).cast() => Raw, attribute => c_int, address => u64
        ));
        if code == 0 { Ok(word) } else { Err(code) }
    };
    let host = rig.host(100);
    assert_eq!((ask(2, host), ask(11, host + 99), ask(12, host + 99)), (Ok(1), Ok(host), Ok(100)));
    let (memory, address) = (rig.create(1, STEP).unwrap(), rig.reserve(STEP));
    assert_eq!(ask(2, address), Err(1), "nothing is mapped there");
    assert_eq!(rig.map(address, STEP, memory), 0);
    assert_eq!((ask(2, address + 5), ask(9, address), ask(12, address)), (Ok(2), Ok(1), Ok(STEP as u64)));
    assert_eq!((ask(2, host + 100), ask(77, host)), (Err(1), Err(1)));
}

#[test]
fn a_capture_keeps_work_and_its_rules() {
    let rig = Rig::new();
    let window = rig.host(64);
    assert_eq!(rig.end(), Err(401));
    assert_eq!((rig.fill(window, 1, 64), rig.outcome()), (0, 0));
    let status = || {
        let mut status = -1;
        assert_eq!(call!(rig, cuStreamIsCapturing(rig.stream => Raw, &mut status => *mut c_int)), 0);
        status
    };
    assert_eq!((rig.begin(9), rig.begin(1), rig.begin(1), status()), (1, 0, 401, 1));
    assert_eq!(rig.fill(window, 2, 64), 0);
    let graph = rig.end().unwrap();
    assert_eq!((status(), rig.outcome(), byte_at(window)), (0, 0, 1));
    let mut executable = ptr::null_mut();
    let made = call!(rig, cuGraphInstantiateWithFlags(&mut executable => *mut Raw, graph => Raw, 0 => u64));
    assert_eq!((made, call!(rig, cuGraphDestroy(graph => Raw))), (0, 0));
    assert_eq!(call!(rig, cuGraphLaunch(executable => Raw, rig.stream => Raw)), 0);
    assert_eq!((rig.outcome(), byte_at(window)), (0, 2));
    assert_eq!(call!(rig, cuGraphExecDestroy(executable => Raw)), 0);
    assert_eq!(call!(rig, cuGraphLaunch(executable => Raw, rig.stream => Raw)), 400);
    assert_eq!((rig.stand_in.live("graphs"), rig.stand_in.live("executables")), (0, 0));
    // The default stream is everybody's.
    assert_eq!(call!(rig, cuStreamBeginCapture_v2(ptr::null_mut() => Raw, 1 => c_int)), 900);
}

#[test]
fn what_a_capture_cannot_keep_ends_it() {
    let rig = Rig::new();
    let (window, event) = (rig.host(64), rig.event());
    assert_eq!((call!(rig, cuEventRecord(event => Raw, rig.stream => Raw)), rig.outcome()), (0, 0));
    let query = || call!(rig, cuEventQuery(event => Raw));
    let wait = || call!(rig, cuStreamWaitEvent(rig.stream => Raw, event => Raw, 0 => c_uint));
    // Asking for the end of work, on this thread.
    assert_eq!((rig.begin(1), query(), rig.fill(window, 1, 1), rig.end()), (0, 900, 901, Err(901)));
    // A relaxed capture lets everybody ask.
    assert_eq!((rig.begin(2), query(), rig.end().is_ok()), (0, 0, true));
    // Waiting for what is not in it.
    assert_eq!((rig.begin(1), wait(), rig.end()), (0, 905, Err(901)));
    // Marks inside it are edges.
    assert_eq!(rig.begin(1), 0);
    assert_eq!((call!(rig, cuEventRecord(event => Raw, rig.stream => Raw)), wait()), (0, 0));
    assert!(rig.end().is_ok());
    assert_eq!(query(), 907, "it stands for nodes now");
    // Only the thread that began it ends it, unless it is relaxed.
    assert_eq!(rig.begin(1), 0);
    let (context, stream) = (rig.context.expose_provenance(), rig.stream.expose_provenance());
    let path = rig.stand_in.path().to_path_buf();
    let elsewhere = thread::spawn(move || {
        // SAFETY: it is loaded already.
        let library = unsafe { Library::new(path) }.unwrap();
        let [context, stream] = [context, stream].map(ptr::with_exposed_provenance_mut);
        let other = OtherThread { library };
        let mut graph = ptr::null_mut();
        assert_eq!(call!(other, cuCtxPushCurrent_v2(context => Raw)), 0);
        call!(other, cuStreamEndCapture(stream => Raw, &mut graph => *mut Raw))
    });
    assert_eq!((elsewhere.join().unwrap(), rig.end().is_ok()), (908, true));
}

struct OtherThread {
    library: Library,
}

#[test]
fn edges_are_of_one_graph() {
    let rig = Rig::new();
    let (mut one, mut other) = (ptr::null_mut(), ptr::null_mut());
    assert_eq!(call!(rig, cuGraphCreate(&mut one => *mut Raw, 0 => c_uint)), 0);
    assert_eq!(call!(rig, cuGraphCreate(&mut other => *mut Raw, 0 => c_uint)), 0);
    let window = rig.host(64);
    // `CUDA_MEMSET_NODE_PARAMS`: address, pitch, value and size of elements, width, height.
    let fill = |value: u64, element: u64, width: u64| [window, 0, value | element << 32, width, 1];
    let add = |graph: Raw, after: &[Raw], parameters: [u64; 5]| {
        let mut node = ptr::null_mut();
        let code = call!(rig, cuGraphAddMemsetNode(
            &mut node => *mut Raw, graph => Raw, after.as_ptr() => *const Raw, after.len() => usize,
            parameters.as_ptr() => *const u64, rig.context => Raw
        ));
        if code == 0 { Ok(node) } else { Err(code) }
    };
    let first = add(one, &[], fill(1, 1, 64)).unwrap();
    let second = add(one, &[first], fill(2, 1, 64)).unwrap();
    assert_eq!(add(other, &[first], fill(1, 1, 64)), Err(1));
    assert_eq!(add(one, &[first, first], fill(1, 1, 64)), Err(1));
    assert_eq!(add(one, &[], fill(1, 1, 65)), Err(1));
    assert_eq!(add(one, &[], fill(1, 3, 8)), Err(1));
    assert_eq!(add(one, &[], fill(0x100, 1, 8)), Err(1), "the value is wider than an element");
    assert_eq!(add(rig.stream, &[], fill(1, 1, 8)), Err(400));
    let mut executable = ptr::null_mut();
    assert_eq!(call!(rig, cuGraphInstantiateWithFlags(&mut executable => *mut Raw, one => Raw, 0 => u64)), 0);
    let set = |node: Raw, parameters: [u64; 5]| {
        call!(rig, cuGraphExecMemsetNodeSetParams(
            executable => Raw, node => Raw, parameters.as_ptr() => *const u64, rig.context => Raw
        ))
    };
    assert_eq!(
        (set(first, fill(3, 1, 32)), set(rig.stream, fill(3, 1, 32)), set(second, fill(4, 1, 64))),
        (0, 1, 0)
    );
    let (memory, address) = (rig.create(0, STEP).unwrap(), rig.reserve(STEP));
    assert_eq!((rig.map(address, STEP, memory), rig.admit(address, STEP, 0, 3)), (0, 0));
    let mut elsewhere = fill(5, 1, 64);
    elsewhere[0] = address;
    assert_eq!(set(first, elsewhere), 1, "a node keeps to the kind of its memory");
    assert_eq!(call!(rig, cuGraphLaunch(executable => Raw, rig.stream => Raw)), 0);
    // Other operands are for launches to come.
    assert_eq!(set(second, fill(6, 1, 64)), 0);
    assert_eq!((rig.outcome(), byte_at(window), byte_at(window + 63)), (0, 4, 4));
}

#[test]
fn shared_memory_has_to_be_asked_for() {
    let rig = Rig::new();
    let function = rig.function("empty");
    let set = |bytes: c_int| call!(rig, cuFuncSetAttribute(function => Raw, 8 => c_int, bytes => c_int));
    let fit = |threads: c_int, shared: usize| {
        let mut count = -1;
        let code = call!(rig, cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &mut count => *mut c_int, function => Raw, threads => c_int, shared => usize
        ));
        if code == 0 { Ok(count) } else { Err(code) }
    };
    assert_eq!((rig.launch(function, 48 << 10), rig.launch(function, (48 << 10) + 1)), (0, 1));
    assert_eq!((fit(32, 0), fit(1, 0), fit(33, 0), fit(1024, 0)), (Ok(32), Ok(32), Ok(32), Ok(2)));
    assert_eq!((fit(96, 0), fit(0, 0), fit(1025, 0)), (Ok(21), Err(1), Err(1)));
    assert_eq!((fit(32, 48 << 10), fit(32, 227 << 10)), (Ok(4), Ok(0)));
    assert_eq!((set((227 << 10) + 1), set(-1), set(227 << 10)), (1, 1, 0));
    assert_eq!((fit(32, 227 << 10), rig.launch(function, 227 << 10)), (Ok(1), 0));
    assert_eq!(rig.launch(function, (227 << 10) + 1), 1);
    assert_eq!(rig.outcome(), 0);
}

#[test]
fn contexts_are_made_and_end() {
    let rig = Rig::new();
    let (mut own, mut device, mut stream) = (ptr::null_mut(), -1, ptr::null_mut());
    assert_eq!(call!(rig, cuCtxDestroy_v2(rig.context => Raw)), 201, "a primary context is released");
    assert_eq!(call!(rig, cuCtxCreate_v2(&mut own => *mut Raw, 0 => c_uint, 9 => c_int)), 101);
    assert_eq!(call!(rig, cuCtxCreate_v2(&mut own => *mut Raw, 0 => c_uint, 1 => c_int)), 0);
    assert_eq!((call!(rig, cuCtxGetDevice(&mut device => *mut c_int)), device), (0, 1), "it is current");
    assert_eq!(call!(rig, cuStreamCreate(&mut stream => *mut Raw, 1 => c_uint)), 0);
    let owner = |stream: Raw| {
        let mut owner = ptr::null_mut::<c_void>();
        let code = call!(rig, cuStreamGetCtx(stream => Raw, &mut owner => *mut Raw));
        (code, owner)
    };
    assert_eq!((owner(stream), owner(rig.stream)), ((0, own), (0, rig.context)));
    assert_eq!(owner(ptr::null_mut()), (0, own), "the default stream is of the context that is current");
    assert_eq!((call!(rig, cuCtxDestroy_v2(own => Raw)), call!(rig, cuCtxDestroy_v2(own => Raw))), (0, 201));
    // The one before is current again, and what was of the other is gone.
    assert_eq!((call!(rig, cuCtxGetDevice(&mut device => *mut c_int)), device), (0, 0));
    assert_eq!(owner(stream).0, 400);
}

#[test]
fn the_linker_makes_images_and_tells_what_is_wrong() {
    let rig = Rig::new();
    let mut log = [0_u8; 256];
    let mut options = [5, 6];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(log.len())];
    let mut linker = ptr::null_mut();
    assert_eq!(
        call!(rig, cuLinkCreate_v2(
            2 => c_uint, options.as_mut_ptr() => *mut c_int, values.as_mut_ptr() => *mut Raw, &mut linker => *mut Raw
        )),
        0
    );
    let add = |text: &str, kind: c_int| {
        let text = CString::new(text).unwrap();
        call!(rig, cuLinkAddData_v2(
            linker => Raw, kind => c_int, text.as_ptr() => *const _, text.as_bytes_with_nul().len() => usize,
            c"a.ptx".as_ptr() => *const _, 0 => c_uint, ptr::null_mut() => *mut c_int,
            ptr::null_mut() => *mut Raw
        ))
    };
    let (mut image, mut size) = (ptr::null_mut::<c_void>(), 0);
    let mut complete =
        || call!(rig, cuLinkComplete(linker => Raw, &mut image => *mut Raw, &mut size => *mut usize));
    assert_eq!(complete(), 1, "it was given nothing");
    assert_eq!((add("int main() {}", 1), add(".version 8.0\n.target sm_70\n", 0)), (218, 1));
    let entry = |name: &str| format!(".version 8.0\n.target sm_70\n.entry {name}() {{ ret; }}");
    assert_eq!((add(&entry("empty"), 1), add(&entry("of_nobody"), 1)), (0, 218));
    assert_eq!(complete(), 0);
    let mut module = ptr::null_mut();
    let loaded = call!(rig, cuModuleLoadDataEx(
        &mut module => *mut Raw, image.cast_const() => *const c_void, 0 => c_uint, ptr::null_mut() => *mut c_int,
        ptr::null_mut() => *mut Raw
    ));
    assert_eq!((loaded, size > 64), (0, true));
    assert_eq!(
        (call!(rig, cuLinkDestroy(linker => Raw)), call!(rig, cuLinkDestroy(linker => Raw))),
        (0, 400)
    );
    let words = String::from_utf8_lossy(&log);
    assert!(words.contains("of_nobody") && words.contains("a.ptx"), "{words}");
}
