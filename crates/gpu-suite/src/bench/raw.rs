//! The driver without us, for comparison: cudarc's raw functions on the same primary context.

use std::{
    ffi::{CString, c_void},
    ptr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use cudarc::driver::sys::{self, CUresult};
use warpweft_core_types::{BufferView, NativeHandle, NativeMemory, NativeQueue};
use warpweft_cuda::{CONTEXT, NativeContext};

use crate::kernels;

pub(crate) fn check(code: CUresult) -> Result<()> {
    ensure!(code == CUresult::CUDA_SUCCESS, "the raw driver answered {code:?}");
    Ok(())
}

/// Starts the driver.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) fn initialise() -> Result<()> {
    // SAFETY: it needs nothing before it and may be repeated.
    check(unsafe { sys::cuInit(0) })
}

/// The context that is current on this thread, as a number.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) fn current_context() -> Result<usize> {
    let mut context = ptr::null_mut();
    // SAFETY: the driver is initialised (a rig is open); the result is written to this stack frame.
    check(unsafe { sys::cuCtxGetCurrent(&mut context) })?;
    Ok(context.addr())
}

/// A stream of the raw driver, for import. Streams here are kept until the process ends.
#[expect(unsafe_code, reason = "vouches for streams of this module")]
pub(crate) fn native_queue(handle: NativeHandle) -> NativeQueue {
    // SAFETY: the handle is of a stream made by `Raw::open`, or one of the numbers that stand for streams.
    unsafe { NativeQueue::new(handle, Arc::new(())) }
}

/// Memory of the raw driver or of a device, for import.
#[expect(unsafe_code, reason = "vouches for memory of this module")]
pub(crate) fn native_memory(address: u64, size: u64) -> NativeMemory {
    // SAFETY: the memory is kept until the process ends, or a buffer that the caller holds; wrong sizes are for
    // the backend to refuse.
    unsafe { NativeMemory::new(address, size, Arc::new(())) }
}

/// A context that is not the primary one, kept until the process ends, and its handle.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) fn new_context(ordinal: i32) -> Result<(NativeContext, u64)> {
    let (mut context, mut popped) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the driver is initialised (a rig is open) and has the device; the result is written to this frame.
    check(unsafe { sys::cuCtxCreate_v2(&mut context, 0, ordinal) })?;
    // SAFETY: creating made it current on this thread.
    check(unsafe { sys::cuCtxPopCurrent_v2(&mut popped) })?;
    let value = context.expose_provenance() as u64;
    // SAFETY: a context made just now, which nobody destroys.
    let native = unsafe { NativeContext::new(NativeHandle { kind: CONTEXT, value }, Arc::new(())) };
    Ok((native, value))
}

pub(crate) fn stream_of(handle: NativeHandle) -> sys::CUstream {
    usize::try_from(handle.value).map_or(ptr::null_mut(), ptr::with_exposed_provenance_mut)
}

/// Fills words in a stream, whose context is current on this thread.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) fn fill(stream: NativeHandle, to: NativeHandle, word: u32, count: usize) -> Result<()> {
    // SAFETY: the stream is one that a capture gave out and is not over; the words are of a buffer that the
    // caller holds.
    check(unsafe { sys::cuMemsetD32Async(to.value, word, count, stream_of(stream)) })
}

/// What no stream that is captured from can do.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) fn synchronise(stream: NativeHandle) -> Result<()> {
    // SAFETY: as in `fill`.
    check(unsafe { sys::cuStreamSynchronize(stream_of(stream)) })
}

/// A device by hand: its primary context, made current on this thread, a stream, two events and the kernels.
pub(crate) struct Raw {
    context: sys::CUcontext,
    stream: sys::CUstream,
    event: sys::CUevent,
    module: sys::CUmodule,
    word: sys::CUdeviceptr,
}

/// A loaded kernel.
#[derive(Clone, Copy)]
pub(crate) struct RawKernel(pub(crate) sys::CUfunction);

/// Code that was loaded for a while.
pub(crate) struct RawModule(sys::CUmodule);

/// Memory: an address that the device and, if pinned, the host understand.
#[derive(Clone, Copy)]
pub(crate) struct RawMemory(pub(crate) sys::CUdeviceptr);

#[expect(unsafe_code, reason = "calls the driver")]
impl Raw {
    pub(crate) fn open(ordinal: i32) -> Result<Self> {
        Self::with(ordinal, kernels::PTX)
    }

    /// The same with other kernels of this suite.
    pub(crate) fn with(ordinal: i32, ptx: &str) -> Result<Self> {
        let ptx = CString::new(ptx)?;
        let mut raw = Self {
            context: ptr::null_mut(),
            stream: ptr::null_mut(),
            event: ptr::null_mut(),
            module: ptr::null_mut(),
            word: 0,
        };
        // SAFETY: the driver is initialised and has the device, since a rig is open on it.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw.context, ordinal) })?;
        raw.make_current()?;
        // SAFETY: the context is current; the result is written to `raw`.
        check(unsafe { sys::cuStreamCreate(&mut raw.stream, 1) })?;
        // SAFETY: as above; 2 disables timing.
        check(unsafe { sys::cuEventCreate(&mut raw.event, 2) })?;
        // SAFETY: as above; the image is terminated PTX of our own kernels.
        check(unsafe { sys::cuModuleLoadData(&mut raw.module, ptx.as_ptr().cast()) })?;
        raw.word = raw.allocate(256)?.0;
        Ok(raw)
    }

    /// The same with the legacy default stream in place of its own.
    pub(crate) fn on_the_default_stream(mut self) -> Self {
        self.stream = ptr::null_mut();
        self
    }

    pub(crate) const fn stream(&self) -> sys::CUstream {
        self.stream
    }

    pub(crate) fn stream_handle(&self) -> u64 {
        self.stream.expose_provenance() as u64
    }

    /// Where the word is that `launch_step` works on.
    pub(crate) const fn word(&self) -> u64 {
        self.word
    }

    pub(crate) fn clear_word(&self) -> Result<()> {
        // SAFETY: four bytes of memory that stays allocated.
        check(unsafe { sys::cuMemsetD32Async(self.word, 0, 1, self.stream) })
    }

    pub(crate) fn make_current(&self) -> Result<()> {
        // SAFETY: the context is retained until the process ends.
        check(unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<RawKernel> {
        let (mut function, name) = (ptr::null_mut(), CString::new(name)?);
        // SAFETY: the module is loaded; the name is terminated.
        check(unsafe { sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()) })?;
        Ok(RawKernel(function))
    }

    /// Device memory, kept until the process ends.
    pub(crate) fn allocate(&self, size: usize) -> Result<RawMemory> {
        let mut address = 0;
        // SAFETY: the context is current; the result is written to this stack frame.
        check(unsafe { sys::cuMemAlloc_v2(&mut address, size) })?;
        Ok(RawMemory(address))
    }

    /// Pinned memory, kept until the process ends.
    pub(crate) fn pin(&self, size: usize) -> Result<RawMemory> {
        let mut pointer = ptr::null_mut();
        // SAFETY: as above; 3 is portable and mapped.
        check(unsafe { sys::cuMemHostAlloc(&mut pointer, size, 3) })?;
        Ok(RawMemory(pointer.expose_provenance() as u64))
    }

    /// A launch of one thread without parameters.
    pub(crate) fn launch(&self, kernel: RawKernel) -> Result<()> {
        self.launch_with(kernel, 1, &mut [])
    }

    /// A launch of `step` on a word of its own.
    pub(crate) fn launch_step(&self, kernel: RawKernel) -> Result<()> {
        let (mut word, mut digit) = (self.word, 1_u32);
        self.launch_with(kernel, 1, &mut [ptr::from_mut(&mut word).cast(), ptr::from_mut(&mut digit).cast()])
    }

    fn launch_with(&self, kernel: RawKernel, blocks: u32, parameters: &mut [*mut c_void]) -> Result<()> {
        // SAFETY: the kernel is one of ours with these parameters, on memory that stays allocated.
        check(unsafe {
            sys::cuLaunchKernel(
                kernel.0,
                blocks,
                1,
                1,
                1,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }

    pub(crate) fn copy(&self, dst: RawMemory, src: RawMemory, size: usize) -> Result<()> {
        // SAFETY: both ranges stay allocated until the process ends (or until the caller has waited).
        check(unsafe { sys::cuMemcpyAsync(dst.0, src.0, size, self.stream) })
    }

    pub(crate) fn record(&self) -> Result<()> {
        // SAFETY: both handles live until the process ends.
        check(unsafe { sys::cuEventRecord(self.event, self.stream) })
    }

    /// Lets `later` wait for what this recorded.
    pub(crate) fn chain_to(&self, later: &Self) -> Result<()> {
        // SAFETY: as above.
        check(unsafe { sys::cuStreamWaitEvent(later.stream, self.event, 0) })
    }

    pub(crate) fn synchronise(&self) -> Result<()> {
        // SAFETY: as above. What is in the stream ends by itself.
        check(unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Spins on the event instead.
    pub(crate) fn query(&self) -> Result<()> {
        loop {
            // SAFETY: as above.
            match unsafe { sys::cuEventQuery(self.event) } {
                CUresult::CUDA_SUCCESS => return Ok(()),
                CUresult::CUDA_ERROR_NOT_READY => {}
                other => bail!("the raw driver answered {other:?}"),
            }
        }
    }

    /// Enqueues a host function that sets the flag; the time of the call is its caller's to take.
    pub(crate) fn host_function(&self, flag: &Arc<AtomicBool>) -> Result<()> {
        extern "C" fn set(flag: *mut c_void) {
            // SAFETY: the pointer is the reference that `host_function` gave away, taken back once.
            let flag = unsafe { Arc::from_raw(flag.cast_const().cast::<AtomicBool>()) };
            flag.store(true, Ordering::Release);
        }
        let given = Arc::into_raw(Arc::clone(flag)).cast_mut().cast();
        // SAFETY: the function is called once with the reference it owns.
        check(unsafe { sys::cuLaunchHostFunc(self.stream, Some(set), given) })
    }

    /// What the driver's linker makes of PTX for this device: a CUBIN.
    pub(crate) fn assemble(&self, ptx: &str) -> Result<Vec<u8>> {
        let (ptx, none) = (CString::new(ptx)?, ptr::null_mut());
        let mut linker = ptr::null_mut();
        self.make_current()?;
        // SAFETY: the context is current; no options; the result is written to this stack frame.
        check(unsafe { sys::cuLinkCreate_v2(0, none, ptr::null_mut(), &mut linker) })?;
        let (text, size) = (ptx.as_ptr().cast_mut().cast(), ptx.as_bytes_with_nul().len());
        let (kind, name) = (sys::CUjitInputType::CU_JIT_INPUT_PTX, c"second.ptx".as_ptr());
        // SAFETY: the linker is live; the text is `size` bytes with its zero byte and is only read.
        let added =
            unsafe { sys::cuLinkAddData_v2(linker, kind, text, size, name, 0, none, ptr::null_mut()) };
        let (mut image, mut size) = (ptr::null_mut(), 0);
        let made = check(added).and_then(|()| {
            // SAFETY: the linker is live; two values are written to this stack frame.
            check(unsafe { sys::cuLinkComplete(linker, &mut image, &mut size) })?;
            // SAFETY: the driver made `size` bytes there, which live as long as the linker.
            Ok(unsafe { std::slice::from_raw_parts(image.cast::<u8>(), size) }.to_vec())
        });
        // SAFETY: created above, destroyed once.
        check(unsafe { sys::cuLinkDestroy(linker) })?;
        made
    }

    /// Loads and launches a kernel never seen before, on this stream, and waits for it.
    pub(crate) fn load_and_launch(&self, cubin: &[u8], out: RawMemory) -> Result<RawModule> {
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the context is current; the image is a whole CUBIN of `second`.
        check(unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) })?;
        // SAFETY: the module is loaded.
        check(unsafe { sys::cuModuleGetFunction(&mut function, module, c"second".as_ptr()) })?;
        let mut out = out.0;
        self.launch_with(RawKernel(function), 1, &mut [ptr::from_mut(&mut out).cast()])?;
        self.synchronise()?;
        Ok(RawModule(module))
    }

    pub(crate) fn unload(&self, module: RawModule) -> Result<()> {
        // SAFETY: loaded by `load_and_launch`, which waited for its kernel; given away here, so unloaded once.
        check(unsafe { sys::cuModuleUnload(module.0) })
    }

    /// Pins host memory and gives it back; the time of the latter.
    pub(crate) fn time_pinned_free(&self, size: usize) -> Result<Duration> {
        let mut pointer = ptr::null_mut();
        // SAFETY: the context is current; 3 is portable and mapped.
        check(unsafe { sys::cuMemHostAlloc(&mut pointer, size, 3) })?;
        let began = Instant::now();
        // SAFETY: allocated just now, and nobody uses it.
        check(unsafe { sys::cuMemFreeHost(pointer) })?;
        Ok(began.elapsed())
    }

    /// Makes host memory known to the device and unknown again; the time of the latter.
    pub(crate) fn time_unregister(&self, memory: &BufferView) -> Result<Duration> {
        let mapping = memory.buffer().mapping().context("not of the host")?;
        let pointer = mapping.as_ptr().cast();
        // SAFETY: the memory lives while the view is borrowed, and is registered by nobody else.
        check(unsafe { sys::cuMemHostRegister_v2(pointer, mapping.len(), 0) })?;
        let began = Instant::now();
        // SAFETY: registered just now, and no work uses it.
        check(unsafe { sys::cuMemHostUnregister(pointer) })?;
        Ok(began.elapsed())
    }
}

#[expect(unsafe_code, reason = "calls the driver")]
impl Raw {
    /// Launches the kernel that answers this many records and then ends, with lines of its own.
    pub(crate) fn answer(&self, records: u32) -> Result<Lines> {
        let (request, reply) = (self.pin_for_writing(4096)?, self.pin(4096)?);
        let lines = Lines::at(request, reply);
        let (mut request, mut reply, mut last) = (request.0, reply.0, records);
        let mut parameters: [*mut c_void; 3] = [
            ptr::from_mut(&mut request).cast(),
            ptr::from_mut(&mut reply).cast(),
            ptr::from_mut(&mut last).cast(),
        ];
        let kernel = self.kernel("raw_answer")?;
        // SAFETY: the kernel is one of ours with these parameters, on memory that stays allocated; its block
        // is one warp, as it expects.
        check(unsafe {
            sys::cuLaunchKernel(
                kernel.0,
                1,
                1,
                1,
                32,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        })?;
        Ok(lines)
    }

    /// Write-combined pinned memory, kept until the process ends.
    fn pin_for_writing(&self, size: usize) -> Result<RawMemory> {
        let mut pointer = ptr::null_mut();
        // SAFETY: the context is current; 7 is portable, mapped and write-combined.
        check(unsafe { sys::cuMemHostAlloc(&mut pointer, size, 7) })?;
        Ok(RawMemory(pointer.expose_provenance() as u64))
    }
}

/// Four lines of 16 bytes for a record, and one for its answer: 12 bytes and the record's number each.
pub(crate) struct Lines {
    request: *mut [u32; 4],
    reply: *const [u32; 4],
    number: u32,
    /// Keeps the memory of a device's buffers.
    _views: Vec<BufferView>,
}

#[expect(unsafe_code, reason = "shares memory with a kernel")]
impl Lines {
    /// In buffers of 64 and 16 bytes.
    pub(crate) fn of(request: &BufferView, reply: &BufferView) -> Result<Self> {
        ensure!(request.size() == 64 && reply.size() == 16, "other lines are meant");
        let place = |view: &BufferView| view.buffer().mapping().map(|mapping| mapping.as_ptr());
        let (there, back) =
            place(request).zip(place(reply)).ok_or_else(|| anyhow::anyhow!("not of the host"))?;
        let views = vec![request.clone(), reply.clone()];
        Ok(Self { request: there.cast(), reply: back.cast(), number: 0, _views: views })
    }

    fn at(request: RawMemory, reply: RawMemory) -> Self {
        let place = |memory: RawMemory| usize::try_from(memory.0).unwrap_or_default();
        Self {
            request: ptr::with_exposed_provenance_mut(place(request)),
            reply: ptr::with_exposed_provenance(place(reply)),
            number: 0,
            _views: Vec::new(),
        }
    }

    /// The number of the last record.
    pub(crate) const fn number(&self) -> u32 {
        self.number
    }

    /// Writes the next record; what the answer to it must be.
    pub(crate) fn ask(&mut self) -> [u32; 3] {
        self.number += 1;
        let word = |at: u32| self.number.wrapping_mul(0x9e37_79b9).rotate_left(at) ^ at;
        let mut sums = [0_u32; 3];
        for line in 0..4 {
            let words = [word(3 * line), word(3 * line + 1), word(3 * line + 2)];
            sums.iter_mut().zip(words).for_each(|(sum, word)| *sum = sum.wrapping_add(word));
            store(self.request.wrapping_add(line as usize), [words[0], words[1], words[2], self.number]);
        }
        flush();
        sums
    }

    /// The answer to the last record, once it is there.
    pub(crate) fn answer(&self) -> Option<[u32; 3]> {
        // SAFETY: 16 aligned bytes that live as long as `self`, or until the process ends.
        let [a, b, c, number] = unsafe { self.reply.read_volatile() };
        if number != self.number {
            return None;
        }
        // The device wrote the line whole; once its number is there, the rest is read again.
        // SAFETY: as above.
        let [a2, b2, c2, _] = unsafe { self.reply.read_volatile() };
        Some(if (a, b, c) == (a2, b2, c2) { [a, b, c] } else { [a2, b2, c2] })
    }
}

/// Stores a line in one piece.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "shares memory with a kernel")]
fn store(to: *mut [u32; 4], line: [u32; 4]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
    // SAFETY: 16 bytes of this stack frame.
    let line = unsafe { _mm_loadu_si128(line.as_ptr().cast()) };
    // SAFETY: 16 aligned bytes of a line, which live as long as the lines.
    unsafe { _mm_stream_si128(to.cast(), line) }
}

/// Sends what was stored on its way.
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "a fence")]
fn flush() {
    // SAFETY: a fence touches nothing.
    unsafe { std::arch::x86_64::_mm_sfence() }
}

#[cfg(not(target_arch = "x86_64"))]
#[expect(unsafe_code, reason = "shares memory with a kernel")]
fn store(to: *mut [u32; 4], line: [u32; 4]) {
    // SAFETY: 16 aligned bytes of a line, which live as long as the lines. The number comes last.
    unsafe { to.write_volatile(line) }
}

#[cfg(not(target_arch = "x86_64"))]
fn flush() {
    std::sync::atomic::fence(Ordering::SeqCst);
}

/// A resident without slices: a kernel that runs until its word is set.
pub(crate) struct RawResident<'a> {
    raw: &'a Raw,
    kernel: RawKernel,
    blocks: u32,
    words: RawMemory,
    fan: RawMemory,
    number: Mutex<u32>,
}

#[expect(unsafe_code, reason = "calls the driver")]
impl<'a> RawResident<'a> {
    pub(crate) fn new(raw: &'a Raw, blocks: u32) -> Result<Self> {
        let (kernel, words, fan) = (raw.kernel("raw_resident")?, raw.pin(256)?, raw.allocate(256)?);
        Ok(Self { raw, kernel, blocks, words, fan, number: Mutex::new(0) })
    }

    /// Launches it and waits for its first beat; the time of that.
    pub(crate) fn start(&self) -> Result<Duration> {
        let mut number = self.number.lock().unwrap_or_else(PoisonError::into_inner);
        *number += 1;
        let (mut stop, mut beat, mut fan) = (self.words.0, self.words.0 + 128, self.fan.0);
        let began = Instant::now();
        let mut parameters: [*mut c_void; 4] = [
            ptr::from_mut(&mut stop).cast(),
            ptr::from_mut(&mut beat).cast(),
            ptr::from_mut(&mut fan).cast(),
            ptr::from_mut(&mut *number).cast(),
        ];
        self.raw.launch_with(self.kernel, self.blocks, &mut parameters)?;
        while self.load(128) != *number {
            ensure!(began.elapsed() < Duration::from_secs(2), "the raw resident did not start");
        }
        Ok(began.elapsed())
    }

    /// Sets its word and waits for its end; the time of that.
    pub(crate) fn stop(&self) -> Result<Duration> {
        let number = *self.number.lock().unwrap_or_else(PoisonError::into_inner);
        let began = Instant::now();
        // SAFETY: the word is pinned memory of 256 bytes that only we and the kernel touch.
        unsafe { ptr::write_volatile(ptr::with_exposed_provenance_mut::<u32>(self.place(0)), number) };
        self.raw.synchronise()?;
        Ok(began.elapsed())
    }

    fn load(&self, at: usize) -> u32 {
        // SAFETY: as in `stop`.
        unsafe { ptr::read_volatile(ptr::with_exposed_provenance::<u32>(self.place(at))) }
    }

    fn place(&self, at: usize) -> usize {
        usize::try_from(self.words.0).map_or(0, |base| base + at)
    }
}
