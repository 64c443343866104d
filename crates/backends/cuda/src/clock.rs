//! The device's clock: timestamps in streams and graphs, and readings beside the host's clock.

use std::{
    ffi::c_void,
    hint, ptr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use cudarc::driver::sys::{CUDA_KERNEL_NODE_PARAMS, CUdeviceptr, CUfunc_st};
use warpweft_core_types::{
    AllocError, BufferDesc, ClockSample, Deadline, DeviceClock, DriverError, Failure, KernelContract,
    LoadError, OpenError, Param,
};

use crate::{
    cache::CubinCache,
    context::Context,
    driver::{Handle, unavailable},
    memory::{Arena, CudaBuffer},
    module::Image,
    stream::{Event, Stream},
};

pub(crate) const PTX: &str = include_str!("../kernels/clock.ptx");

/// Questions of one exchange; the narrowest answer counts.
const QUESTIONS: u32 = 16;

/// The device waits this long for the next question. Where launches wait for their kernels, no question ever
/// comes, and this is what an exchange costs.
const LIMIT: Duration = Duration::from_millis(2);

/// The longest that a sample takes on a device that answers.
const PATIENCE: Duration = Duration::from_secs(5);

/// The kernels that read the clock, loaded when the device was opened: before the first resident.
#[derive(Debug)]
pub(crate) struct Clock {
    context: Arc<Context>,
    stamp: Handle<CUfunc_st>,
    exchange: Handle<CUfunc_st>,
    busy: Handle<CUfunc_st>,
    /// Samples take turns.
    lane: Mutex<Lane>,
    _image: Image,
}

#[derive(Debug)]
struct Lane {
    stream: Stream,
    /// The end of the last sample's kernels.
    end: Event,
    /// The exchange's words; `None` once the device may write there and nobody knows for how long.
    words: Option<CudaBuffer>,
}

impl Clock {
    pub(crate) fn load(
        context: &Arc<Context>,
        arena: &Arc<Arena>,
        cache: &CubinCache,
        capability: (u32, u32),
    ) -> Result<Arc<Self>, OpenError> {
        Self::of_image(context, arena, Image::of_ptx(context, cache, capability, PTX).map_err(not_loaded)?)
    }

    /// The same from code that is loaded.
    pub(crate) fn of_image(
        context: &Arc<Context>,
        arena: &Arc<Arena>,
        image: Image,
    ) -> Result<Arc<Self>, OpenError> {
        let find = |name: &str, params: &[Param]| {
            image.function(&KernelContract::new(name, params), Vec::new).map_err(not_loaded)
        };
        let (word, count) = (Param::write(8), Param::scalar::<u32>());
        let nanoseconds = Param::scalar::<u64>();
        let words = arena.allocate(&BufferDesc::host_visible((u64::from(QUESTIONS) + 1) * 8));
        let lane = Lane {
            stream: Stream::create(context).map_err(OpenError::Driver)?,
            end: Event::create(context).map_err(OpenError::Driver)?,
            words: Some(words.map_err(no_memory)?),
        };
        Ok(Arc::new(Self {
            stamp: find("ww_stamp", &[word])?,
            exchange: find("ww_exchange", &[word, count, nanoseconds])?,
            busy: find("ww_busy", &[nanoseconds])?,
            context: Arc::clone(context),
            lane: Mutex::new(lane),
            _image: image,
        }))
    }

    /// Writes the time to eight bytes when `stream` gets there. The context is current; the bytes must live
    /// until then.
    pub(crate) fn stamp(
        &self,
        context: &Context,
        stream: &Stream,
        mut to: CUdeviceptr,
    ) -> Result<(), DriverError> {
        self.launch(context, stream, self.stamp, &mut [ptr::from_mut(&mut to).cast()])
    }

    /// The same as a node of a graph; `pointers` leads to the address.
    pub(crate) fn stamp_node(&self, pointers: &mut [*mut c_void; 1]) -> CUDA_KERNEL_NODE_PARAMS {
        CUDA_KERNEL_NODE_PARAMS {
            func: self.stamp.raw(),
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 1,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            kernelParams: pointers.as_mut_ptr(),
            extra: ptr::null_mut(),
            kern: ptr::null_mut(),
            ctx: ptr::null_mut(),
        }
    }

    /// Keeps one thread of the device busy for as long. The context is current.
    pub(crate) fn keep_busy(&self, stream: &Stream, time: Duration) -> Result<(), DriverError> {
        let mut ns = nanos(time);
        self.launch(&self.context, stream, self.busy, &mut [ptr::from_mut(&mut ns).cast()])
    }

    /// Whether a launch returns before its kernel ends; `false` under debuggers and sanitizers that make it
    /// wait, which environment variables do not tell.
    pub(crate) fn launches_return(&self) -> Result<bool, DriverError> {
        const BUSY: Duration = Duration::from_millis(1);
        let _current = self.context.enter()?;
        let lane = self.lane();
        // More than once: the first launch of a process takes long by itself.
        for _ in 0..3 {
            let began = Instant::now();
            self.keep_busy(&lane.stream, BUSY)?;
            if began.elapsed() < BUSY / 2 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn ask_time(&self, deadline: Deadline) -> Result<ClockSample, Arc<Failure>> {
        if let Some(failure) = self.context.failure() {
            return Err(failure);
        }
        let judge = |error| self.context.judge(error);
        let mut lane = self.lane();
        let _current = self.context.enter().map_err(judge)?;
        let late = || Arc::new(Failure::DeadlineExceeded { after: PATIENCE });
        let Some(words) = lane.words.take() else { return Err(late()) };
        let exchanged = self.ask(&lane.stream, &words, deadline).map_err(judge)?;
        let sample = match exchanged {
            Some(sample) => Ok(sample),
            None => self.stamped(&lane, &words).map_err(judge)?.ok_or_else(late),
        };
        lane.end.record(&lane.stream).map_err(judge)?;
        // The kernels end by themselves soon after the last answer, so this is short in any case.
        if lane.end.wait(PATIENCE).map_err(judge)? {
            lane.words = Some(words);
        } else {
            // The device may write there later.
            std::mem::forget(words);
        }
        sample
    }

    /// The narrowest answer of an exchange, if there was one.
    fn ask(
        &self,
        stream: &Stream,
        words: &CudaBuffer,
        deadline: Deadline,
    ) -> Result<Option<ClockSample>, DriverError> {
        // Nothing uses the words now, and the launch comes after these.
        (0..=QUESTIONS as usize).filter_map(|index| word(words, index)).for_each(|word| {
            word.store(0, Ordering::Release);
        });
        let (mut address, mut questions, mut limit) = (words.address(), QUESTIONS, nanos(LIMIT));
        self.launch(
            &self.context,
            stream,
            self.exchange,
            &mut [
                ptr::from_mut(&mut address).cast(),
                ptr::from_mut(&mut questions).cast(),
                ptr::from_mut(&mut limit).cast(),
            ],
        )?;
        let mut best: Option<ClockSample> = None;
        for question in 1..=u64::from(QUESTIONS) {
            let Some(sample) = exchange(words, question, deadline) else { break };
            let width = |sample: &ClockSample| sample.after - sample.before;
            // The first one waits for the kernel to begin.
            if best.is_none_or(|best| width(&sample) < width(&best)) {
                best = Some(sample);
            }
        }
        Ok(best)
    }

    /// A timestamp between a launch and the end of the wait for it; `None` if that takes too long.
    fn stamped(&self, lane: &Lane, words: &CudaBuffer) -> Result<Option<ClockSample>, DriverError> {
        let before = Instant::now();
        self.stamp(&self.context, &lane.stream, words.address())?;
        lane.end.record(&lane.stream)?;
        if !lane.end.wait(PATIENCE)? {
            return Ok(None);
        }
        let after = Instant::now();
        let device_ns = word(words, 0).map(|word| word.load(Ordering::Acquire));
        Ok(device_ns.map(|device_ns| ClockSample { before, after, device_ns }))
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn launch(
        &self,
        context: &Context,
        stream: &Stream,
        function: Handle<CUfunc_st>,
        pointers: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let pointers = pointers.as_mut_ptr();
        // SAFETY: the function is loaded in this context as long as `self` lives and takes what its caller here
        // points to, values that live until the driver has copied them. The addresses among them are of
        // buffers that live until the stream is past the launch: the caller of `stamp` sees to it, and samples
        // wait for it.
        unsafe {
            context.driver.launch_kernel(
                function.raw(),
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                stream.raw(),
                pointers,
                ptr::null_mut(),
            )
        }
    }

    fn lane(&self) -> MutexGuard<'_, Lane> {
        self.lane.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn not_loaded(error: LoadError) -> OpenError {
    match error {
        LoadError::Failed(failure) => OpenError::Failed(failure),
        LoadError::Driver(error) => OpenError::Driver(error),
        // The driver cannot use code that this version was tested with: what it says is all there is.
        other => unavailable(format!("a driver that loads our kernels: {other}")),
    }
}

fn no_memory(error: AllocError) -> OpenError {
    match error {
        AllocError::Failed(failure) => OpenError::Failed(failure),
        AllocError::Driver(error) => OpenError::Driver(error),
        other => unavailable(format!("pinned memory: {other}")),
    }
}

impl DeviceClock for Clock {
    fn sample(&self, deadline: Deadline) -> Result<ClockSample, Arc<Failure>> {
        self.ask_time(deadline)
    }
}

/// Puts a question and waits for the answer, as long as the device would wait for the question.
fn exchange(words: &CudaBuffer, question: u64, deadline: Deadline) -> Option<ClockSample> {
    let ask = word(words, 0)?;
    let answer = word(words, usize::try_from(question).ok()?)?;
    let before = Instant::now();
    // Release and acquire: the readings of the host's clock stay outside.
    ask.store(question, Ordering::Release);
    loop {
        let device_ns = answer.load(Ordering::Acquire);
        let after = Instant::now();
        if device_ns != 0 {
            return Some(ClockSample { before, after, device_ns });
        }
        if after - before > LIMIT || deadline.is_past() {
            return None;
        }
        hint::spin_loop();
    }
}

#[expect(unsafe_code, reason = "shares words with the device")]
fn word(words: &CudaBuffer, index: usize) -> Option<&AtomicU64> {
    let base = words.host()?;
    if index > QUESTIONS as usize {
        return None;
    }
    let word = base.as_ptr().cast::<u64>().wrapping_add(index);
    // SAFETY: the buffer holds `QUESTIONS + 1` words, starts at a page and lives as long as the result; no
    // mapping of it is handed out, and the device's accesses are whole words as an atomic's are.
    Some(unsafe { AtomicU64::from_ptr(word) })
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
