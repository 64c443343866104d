//! The device's clock: timestamps in streams and graphs, and readings beside the host's clock.

use std::{
    ffi::c_void,
    hint, mem, ptr,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
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
    driver::{Handle, OUT_OF_MEMORY},
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

/// Whether launches return is tried with kernels of this length and of each double of it, so often.
const BUSY: Duration = Duration::from_millis(1);
const TRIALS: u32 = 7;

/// A lane that goes away waits this long for the end of an exchange that nobody waited for.
const PARTING: Duration = Duration::from_millis(10);

/// The kernels that read the clock, loaded when the device was opened: before the first resident.
#[derive(Debug)]
pub(crate) struct Clock {
    context: Arc<Context>,
    arena: Arc<Arena>,
    stamp: Handle<CUfunc_st>,
    exchange: Handle<CUfunc_st>,
    busy: Handle<CUfunc_st>,
    /// Samples take turns; `None` while one has the lane.
    lane: Mutex<Option<Lane>>,
    /// The lane is back.
    free: Condvar,
    _image: Image,
}

#[derive(Debug)]
struct Lane {
    stream: Stream,
    /// The end of the last exchange's kernels, if its words are under way.
    end: Event,
    words: Words,
}

/// The words of an exchange.
#[derive(Debug)]
enum Words {
    Free(CudaBuffer),
    /// The device may write there until the lane's event is over.
    UnderWay(CudaBuffer),
    /// There are none: the last ones were let go for good.
    Gone,
}

impl Lane {
    /// Words that the device does not use, if those of the last exchange are free by the deadline.
    fn words(&mut self, arena: &Arc<Arena>, deadline: Deadline) -> Result<Option<CudaBuffer>, AllocError> {
        match mem::replace(&mut self.words, Words::Gone) {
            Words::Free(words) => Ok(Some(words)),
            Words::Gone => new_words(arena).map(Some),
            Words::UnderWay(words) => match self.end.wait(deadline.remaining()) {
                Ok(true) => Ok(Some(words)),
                unknown => {
                    self.words = Words::UnderWay(words);
                    unknown.map(|_| None).map_err(AllocError::Driver)
                }
            },
        }
    }

    /// Takes the words back, behind everything that was enqueued. The context is current.
    fn keep(&mut self, words: CudaBuffer, deadline: Deadline) -> Result<(), DriverError> {
        if let Err(error) = self.end.record(&self.stream) {
            // Nothing tells when the device is done with them.
            mem::forget(words);
            return Err(error);
        }
        // The kernels end by themselves soon after the last answer, so this is short as a rule.
        let ended = self.end.wait(deadline.remaining());
        let is_over = matches!(ended, Ok(true));
        self.words = if is_over { Words::Free(words) } else { Words::UnderWay(words) };
        ended.map(drop)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Free words go last: the arena may go with them, and what it gives back may hold the context for long.
        if matches!(self.words, Words::UnderWay(_))
            && let Words::UnderWay(words) = mem::replace(&mut self.words, Words::Gone)
        {
            let context = Arc::clone(self.end.context());
            let entered = context.enter();
            if entered.is_err() || !matches!(self.end.wait(PARTING), Ok(true)) {
                // The device may write there later.
                mem::forget(words);
            }
        }
    }
}

/// The lane while a sample has it.
struct Taken<'a> {
    clock: &'a Clock,
    lane: Option<Lane>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.clock.lane.lock().unwrap_or_else(PoisonError::into_inner) = self.lane.take();
        self.clock.free.notify_one();
    }
}

impl Clock {
    pub(crate) fn load(
        context: &Arc<Context>,
        arena: &Arc<Arena>,
        cache: &CubinCache,
        capability: (u32, u32),
    ) -> Result<Arc<Self>, OpenError> {
        let image = Image::of_ptx(context, cache, capability, PTX);
        Self::of_image(context, arena, image.map_err(|error| not_loaded(context, error))?)
    }

    /// The same from code that is loaded.
    pub(crate) fn of_image(
        context: &Arc<Context>,
        arena: &Arc<Arena>,
        image: Image,
    ) -> Result<Arc<Self>, OpenError> {
        let find = |name: &str, params: &[Param]| {
            let found = image.function(&KernelContract::new(name, params), Vec::new);
            found.map_err(|error| not_loaded(context, error))
        };
        let (word, count) = (Param::write(8), Param::scalar::<u32>());
        let nanoseconds = Param::scalar::<u64>();
        let lane = Lane {
            stream: Stream::create(context).map_err(OpenError::Driver)?,
            end: Event::create(context).map_err(OpenError::Driver)?,
            words: Words::Free(new_words(arena).map_err(no_memory)?),
        };
        Ok(Arc::new(Self {
            stamp: find("ww_stamp", &[word])?,
            exchange: find("ww_exchange", &[word, count, nanoseconds])?,
            busy: find("ww_busy", &[nanoseconds])?,
            context: Arc::clone(context),
            arena: Arc::clone(arena),
            lane: Mutex::new(Some(lane)),
            free: Condvar::new(),
            _image: image,
        }))
    }

    /// Writes the time to eight bytes when `stream` gets there. The context is current.
    ///
    /// # Safety
    ///
    /// - `to` is a multiple of 8, and the eight bytes there are within the device's reach and live until the stream
    ///   is past the write.
    #[expect(unsafe_code, reason = "enqueues a write to memory of the caller's")]
    pub(crate) unsafe fn stamp(
        &self,
        context: &Context,
        stream: &Stream,
        mut to: CUdeviceptr,
    ) -> Result<(), DriverError> {
        // SAFETY: the kernel takes an address, and writes what the caller vouches for.
        unsafe { self.launch(context, stream, self.stamp, &mut [ptr::from_mut(&mut to).cast()]) }
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
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn keep_busy(&self, stream: &Stream, time: Duration) -> Result<(), DriverError> {
        let mut ns = nanos(time);
        // SAFETY: the kernel takes a number and touches no memory.
        unsafe { self.launch(&self.context, stream, self.busy, &mut [ptr::from_mut(&mut ns).cast()]) }
    }

    /// Whether a launch returns before its kernel ends; `false` under debuggers and sanitizers that make it
    /// wait, which environment variables do not tell.
    ///
    /// One launch that returns is proof. One that does not may have met somebody's load, or be the first of the
    /// process, which takes long by itself: so it is tried again, with kernels that outlast such moments.
    pub(crate) fn launches_return(&self) -> Result<bool, DriverError> {
        let _current = self.context.enter()?;
        let stream = Stream::create(&self.context)?;
        for trial in 0..TRIALS {
            let busy = BUSY * (1 << trial);
            let began = Instant::now();
            self.keep_busy(&stream, busy)?;
            if began.elapsed() < busy / 2 || !stream.is_done()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn ask_time(&self, deadline: Deadline) -> Result<ClockSample, Arc<Failure>> {
        if let Some(failure) = self.context.failure() {
            return Err(failure);
        }
        let began = Instant::now();
        let late = || Arc::new(Failure::DeadlineExceeded { after: began.elapsed() });
        let judge = |error| self.context.judge(error);
        if deadline.is_past() {
            return Err(late());
        }
        let mut taken = self.take(deadline).ok_or_else(late)?;
        let lane = taken.lane.as_mut().ok_or_else(late)?;
        let _asking = self.context.cold.ask_by(deadline).ok_or_else(late)?;
        let _current = self.context.enter().map_err(judge)?;
        let words = lane.words(&self.arena, deadline).map_err(|error| self.no_words(error))?;
        let words = words.ok_or_else(late)?;
        let answer = match self.ask(&lane.stream, &words, deadline) {
            Ok(answer) => answer,
            Err(error) => {
                // A launch that was refused enqueued nothing, so nobody uses the words.
                lane.words = Words::Free(words);
                return Err(judge(error));
            }
        };
        let sample = match answer {
            Some(sample) => Ok(sample),
            None if deadline.is_past() => Err(late()),
            None => {
                self.stamped(lane, &words, deadline).map_err(judge).and_then(|sample| sample.ok_or_else(late))
            }
        };
        // What goes wrong here is no fault of the sample; a device that is lost is found out all the same.
        let kept = lane.keep(words, deadline).map_err(judge);
        sample.or_else(|failure| kept.and(Err(failure)))
    }

    /// Takes the lane, once nobody else has it.
    fn take(&self, deadline: Deadline) -> Option<Taken<'_>> {
        let mut lane = self.lane.lock().unwrap_or_else(PoisonError::into_inner);
        while lane.is_none() && !deadline.is_past() {
            let waited = self.free.wait_timeout(lane, deadline.remaining());
            lane = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let lane = lane.take()?;
        Some(Taken { clock: self, lane: Some(lane) })
    }

    /// Why there are no words for an exchange.
    fn no_words(&self, error: AllocError) -> Arc<Failure> {
        match error {
            AllocError::Failed(failure) => failure,
            AllocError::Driver(error) => self.context.judge(error),
            other => {
                let source =
                    DriverError { api: "cuMemHostAlloc", code: OUT_OF_MEMORY, name: other.to_string() };
                self.context.judge(source)
            }
        }
    }

    /// The narrowest answer of an exchange, if there was one. After an error nothing was enqueued.
    #[expect(unsafe_code, reason = "enqueues writes to memory of the lane's")]
    fn ask(
        &self,
        stream: &Stream,
        words: &CudaBuffer,
        deadline: Deadline,
    ) -> Result<Option<ClockSample>, DriverError> {
        // Nothing uses the words now, and the launch comes after these. Release: they are there for the device.
        (0..=QUESTIONS as usize).filter_map(|index| word(words, index)).for_each(|word| {
            word.store(0, Ordering::Release);
        });
        let (mut address, mut questions, mut limit) = (words.address(), QUESTIONS, nanos(LIMIT));
        let mut parameters = [
            ptr::from_mut(&mut address).cast(),
            ptr::from_mut(&mut questions).cast(),
            ptr::from_mut(&mut limit).cast(),
        ];
        // SAFETY: the kernel takes an address and two numbers, and writes one word more than there are questions,
        // which is what the buffer holds. It goes back to the lane behind the kernel's end, or is never let go.
        unsafe { self.launch(&self.context, stream, self.exchange, &mut parameters) }?;
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
    #[expect(unsafe_code, reason = "enqueues a write to memory of the lane's")]
    fn stamped(
        &self,
        lane: &Lane,
        words: &CudaBuffer,
        deadline: Deadline,
    ) -> Result<Option<ClockSample>, DriverError> {
        let before = Instant::now();
        // SAFETY: the buffer begins at a page and holds more than eight bytes; as in `ask`.
        unsafe { self.stamp(&self.context, &lane.stream, words.address()) }?;
        lane.end.record(&lane.stream)?;
        if !lane.end.wait(deadline.remaining())? {
            return Ok(None);
        }
        let after = Instant::now();
        // Acquire: the reading of the host's clock stays before it.
        let device_ns = word(words, 0).map(|word| word.load(Ordering::Acquire));
        Ok(device_ns.map(|device_ns| ClockSample { before, after, device_ns }))
    }

    /// Launches one of the clock's kernels with a single thread. The context is current.
    ///
    /// # Safety
    ///
    /// - The pointers lead to what the kernel takes.
    /// - Memory that it touches on account of that is within the device's reach and lives until the stream is past
    ///   the launch.
    #[expect(unsafe_code, reason = "calls the driver")]
    unsafe fn launch(
        &self,
        context: &Context,
        stream: &Stream,
        function: Handle<CUfunc_st>,
        pointers: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        let pointers = pointers.as_mut_ptr();
        // SAFETY: the function is loaded in this context as long as `self` lives, and the driver copies what the
        // pointers lead to. The rest are the caller's duties.
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
}

fn new_words(arena: &Arc<Arena>) -> Result<CudaBuffer, AllocError> {
    arena.allocate(&BufferDesc::host_visible((u64::from(QUESTIONS) + 1) * 8))
}

fn not_loaded(context: &Context, error: LoadError) -> OpenError {
    match error {
        LoadError::Failed(failure) => OpenError::Failed(failure),
        LoadError::Driver(error) => OpenError::Driver(error),
        // The driver cannot use code that this version was tested with: what it says is all there is.
        other => context.driver.unavailable(format!("a driver that loads our kernels: {other}")),
    }
}

fn no_memory(error: AllocError) -> OpenError {
    match error {
        AllocError::Failed(failure) => OpenError::Failed(failure),
        AllocError::Driver(error) => OpenError::Driver(error),
        other => OpenError::Memory(other),
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
