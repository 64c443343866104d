//! The driver's functions as a program calls them: what is wrong is found, and named with the manual's code.
#![expect(unsafe_code, clippy::unwrap_used, reason = "calls the driver")]

use std::{
    ffi::{CString, c_int, c_uint, c_void},
    ptr,
    time::{Duration, Instant},
};

use libloading::Library;
use warpweft_stand_in_cuda::StandIn;

type Raw = *mut c_void;

/// An initialised driver with its device's context, current on this thread.
struct Rig {
    _stand_in: StandIn,
    library: Library,
    stream: Raw,
    pool: Raw,
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

impl Rig {
    /// The library, with nothing called yet.
    fn bare() -> Self {
        let stand_in = StandIn::load().unwrap();
        // SAFETY: the stand-in runs nothing when it is loaded.
        let library = unsafe { Library::new(stand_in.path()) }.unwrap();
        Self { _stand_in: stand_in, library, stream: ptr::null_mut(), pool: ptr::null_mut() }
    }

    fn new() -> Self {
        let mut rig = Self::bare();
        let mut context = ptr::null_mut();
        assert_eq!(call!(rig, cuInit(0 => c_uint)), 0);
        assert_eq!(call!(rig, cuDevicePrimaryCtxRetain(&mut context => *mut Raw, 0 => c_int)), 0);
        assert_eq!(call!(rig, cuCtxPushCurrent_v2(context => Raw)), 0);
        let mut stream = ptr::null_mut();
        assert_eq!(call!(rig, cuStreamCreate(&mut stream => *mut Raw, 1 => c_uint)), 0);
        // Pinned, without handles, on device 0.
        let (mut properties, mut pool) = ([0_u32; 22], ptr::null_mut());
        (properties[0], properties[2]) = (1, 1);
        assert_eq!(call!(rig, cuMemPoolCreate(&mut pool => *mut Raw, properties.as_ptr() => *const u32)), 0);
        (rig.stream, rig.pool) = (stream, pool);
        rig
    }

    fn allocate(&self, size: usize) -> Result<u64, c_int> {
        let mut address = 0;
        let code = call!(self, cuMemAllocFromPoolAsync(
            &mut address => *mut u64, size => usize, self.pool => Raw, self.stream => Raw
        ));
        if code == 0 { Ok(address) } else { Err(code) }
    }

    fn free(&self, address: u64) -> c_int {
        call!(self, cuMemFreeAsync(address => u64, self.stream => Raw))
    }

    fn fill(&self, address: u64, count: usize) -> c_int {
        call!(self, cuMemsetD8Async(address => u64, 7 => u8, count => usize, self.stream => Raw))
    }

    /// Loads PTX with one entry and launches it with a pointer.
    fn launch(&self, entry: &str, params: &str, argument: u64) -> c_int {
        let text = format!(".version 8.0\n.target sm_70\n.entry {entry}({params}) {{ ret; }}");
        let (text, name) = (CString::new(text).unwrap(), CString::new(entry).unwrap());
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        let loaded = call!(self, cuModuleLoadDataEx(
            &mut module => *mut Raw, text.as_ptr().cast() => *const c_void, 0 => c_uint,
            ptr::null_mut() => *mut c_int, ptr::null_mut() => *mut Raw
        ));
        if loaded != 0 {
            return loaded;
        }
        let found = call!(self, cuModuleGetFunction(&mut function => *mut Raw, module => Raw, name.as_ptr() => *const _));
        assert_eq!(found, 0);
        let mut argument = argument;
        let mut arguments = [ptr::from_mut(&mut argument).cast::<c_void>()];
        call!(self, cuLaunchKernel(
            function => Raw, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint, 1 => c_uint,
            0 => c_uint, self.stream => Raw, arguments.as_mut_ptr() => *mut Raw, ptr::null_mut() => *mut Raw
        ))
    }

    /// What the stream ends with: 0, or the code of a fault.
    fn outcome(&self) -> c_int {
        let mut event = ptr::null_mut();
        let created = call!(self, cuEventCreate(&mut event => *mut Raw, 2 => c_uint));
        if created != 0 {
            return created;
        }
        let recorded = call!(self, cuEventRecord(event => Raw, self.stream => Raw));
        if recorded != 0 {
            return recorded;
        }
        let started = Instant::now();
        loop {
            match call!(self, cuEventQuery(event => Raw)) {
                600 => assert!(started.elapsed() < Duration::from_secs(20)),
                code => return code,
            }
        }
    }
}

#[test]
fn nothing_works_before_it_is_initialised() {
    let rig = Rig::bare();
    let mut count = 0;
    assert_eq!(call!(rig, cuDeviceGetCount(&mut count => *mut c_int)), 3);
    assert_eq!(call!(rig, cuInit(1 => c_uint)), 1);
    assert_eq!(call!(rig, cuInit(0 => c_uint)), 0);
    assert_eq!(call!(rig, cuDeviceGetCount(ptr::null_mut() => *mut c_int)), 1);
    assert_eq!(call!(rig, cuDeviceGet(&mut count => *mut c_int, 9 => c_int)), 101);
}

#[test]
fn calls_without_a_context_are_refused() {
    let rig = Rig::new();
    let (mut stream, mut popped) = (ptr::null_mut(), ptr::null_mut());
    assert_eq!(call!(rig, cuCtxPopCurrent_v2(&mut popped => *mut Raw)), 0);
    assert_eq!(call!(rig, cuStreamCreate(&mut stream => *mut Raw, 0 => c_uint)), 201);
    assert_eq!(call!(rig, cuCtxPopCurrent_v2(&mut popped => *mut Raw)), 201);
    assert_eq!(call!(rig, cuCtxPushCurrent_v2(rig.stream => Raw)), 201);
    assert_eq!(rig.fill(0, 1), 201);
}

#[test]
fn wrong_handles_are_found() {
    let rig = Rig::new();
    let nobody = ptr::without_provenance_mut(0x7777_0000);
    assert_eq!(call!(rig, cuEventQuery(nobody => Raw)), 400);
    assert_eq!(call!(rig, cuStreamDestroy_v2(rig.pool => Raw)), 400);
    assert_eq!(call!(rig, cuEventRecord(rig.stream => Raw, rig.stream => Raw)), 400);
    assert_eq!(call!(rig, cuModuleUnload(nobody => Raw)), 400);
    assert_eq!(call!(rig, cuStreamDestroy_v2(rig.stream => Raw)), 0);
    assert_eq!(call!(rig, cuStreamDestroy_v2(rig.stream => Raw)), 400);
}

#[test]
fn ranges_that_nobody_allocated_are_refused() {
    let rig = Rig::new();
    let memory = rig.allocate(100).unwrap();
    assert_eq!(rig.fill(memory, 100), 0);
    assert_eq!(rig.fill(memory, 101), 1);
    assert_eq!(rig.fill(memory + 99, 2), 1);
    assert_eq!(rig.fill(4096, 1), 1);
    assert_eq!(rig.outcome(), 0);
}

#[test]
fn memory_is_freed_once_and_its_address_is_not_used_again() {
    let rig = Rig::new();
    let first = rig.allocate(4096).unwrap();
    assert_eq!(rig.free(first), 0);
    assert_eq!(rig.free(first), 1);
    assert_eq!(rig.fill(first, 1), 1);
    assert_eq!(rig.outcome(), 0);
    let others: Vec<u64> = (0..50).map(|_| rig.allocate(4096).unwrap()).collect();
    assert!(!others.contains(&first));
}

#[test]
fn a_kernel_that_uses_freed_memory_ends_everything() {
    let rig = Rig::new();
    let memory = rig.allocate(64).unwrap();
    assert_eq!(rig.free(memory), 0);
    assert_eq!(rig.outcome(), 0);
    assert_eq!(rig.launch("blocking", ".param .u64 a", memory), 0);
    while rig.outcome() == 0 {}
    // For every later call, and for another device.
    assert_eq!((rig.outcome(), rig.allocate(1), rig.free(memory)), (700, Err(700), 700));
    let mut context = ptr::null_mut();
    assert_eq!(call!(rig, cuDevicePrimaryCtxRetain(&mut context => *mut Raw, 1 => c_int)), 700);
    // Until nothing is left of it.
    assert_eq!(call!(rig, cuDevicePrimaryCtxRelease_v2(0 => c_int)), 0);
    assert_eq!(rig.fill(memory, 1), 709);
    assert_eq!(call!(rig, cuDevicePrimaryCtxRetain(&mut context => *mut Raw, 1 => c_int)), 0);
}

#[test]
fn a_misaligned_word_is_a_fault_too() {
    let rig = Rig::new();
    let memory = rig.allocate(64).unwrap();
    assert_eq!(rig.launch("blocking", ".param .u64 a", memory + 1), 0);
    while rig.outcome() == 0 {}
    assert_eq!(rig.outcome(), 716);
}

#[test]
fn code_that_has_no_function_here_is_refused() {
    let rig = Rig::new();
    assert_eq!(rig.launch("of_somebody_else", "", 0), 218);
    assert_eq!(rig.launch("blocking", ".param .u32 a", 0), 218);
    let mut elf = [0_u8; 64];
    elf[..5].copy_from_slice(b"\x7fELF\x02");
    let mut module = ptr::null_mut();
    let loaded = call!(rig, cuModuleLoadDataEx(
        &mut module => *mut Raw, elf.as_ptr().cast() => *const c_void, 0 => c_uint,
        ptr::null_mut() => *mut c_int, ptr::null_mut() => *mut Raw
    ));
    assert_eq!(loaded, 209);
}

#[test]
fn memory_runs_out_and_trimming_gives_it_back() {
    let rig = Rig::new();
    let all = 4_usize << 30;
    assert_eq!(rig.allocate(all + 1), Err(2));
    let (mut keep, small) = (u64::MAX, rig.allocate(1 << 20).unwrap());
    let attribute = call!(rig, cuMemPoolSetAttribute(rig.pool => Raw, 4 => c_int, &mut keep => *mut u64));
    assert_eq!((attribute, rig.free(small), rig.outcome()), (0, 0, 0));
    let (mut free, mut total) = (0, 0);
    assert_eq!(call!(rig, cuMemGetInfo_v2(&mut free => *mut usize, &mut total => *mut usize)), 0);
    assert_eq!((free, total), (all - (1 << 20), all));
    assert_eq!(call!(rig, cuMemPoolTrimTo(rig.pool => Raw, 0 => usize)), 0);
    assert_eq!(call!(rig, cuMemGetInfo_v2(&mut free => *mut usize, &mut total => *mut usize)), 0);
    assert_eq!(free, all);
}
