//! Devices of a stand-in driver, and the kernels it has.

use std::{
    ptr::NonNull,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use warpweft_core_types::{
    Arg, Backend, BufferDesc, BufferView, CodeFormat, CopyRegion, Device, Features, ForeignCode, HostMemory,
    Kernel, KernelCode, KernelContract, Launch, LoadError, Op, Param, Queue, QueueDesc, SemaphorePoint,
    Submission,
};
use warpweft_cuda::{CudaBackend, CudaConfig};
use warpweft_stand_in_cuda::StandIn;

/// Far longer than anything takes on a busy machine; only a hang reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

pub(crate) fn config(stand_in: &StandIn) -> CudaConfig {
    CudaConfig::default().with_driver(stand_in.path()).without_cache()
}

pub(crate) fn backend(stand_in: &StandIn) -> CudaBackend {
    CudaBackend::with_config(&config(stand_in)).unwrap()
}

/// An entry with these parameters, which is all that the stand-in reads of PTX.
fn ptx(name: &str, params: &str) -> String {
    format!(".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry {name}({params})\n{{ ret; }}\n")
}

#[expect(unsafe_code, reason = "asserts what foreign code does")]
pub(crate) fn code(contract: KernelContract, params: &str) -> KernelCode {
    let text = ptx(&contract.name, params);
    let code = ForeignCode::Source { format: CodeFormat::Ptx, text };
    // SAFETY: the stand-in runs a function of its own for this entry, which looks every access up.
    unsafe { KernelCode::new().with_foreign([contract], code) }
}

const SLICE: &str = ".param .align 8 .b8 s[56]";

/// Writes each workgroup's number plus a base into its word.
pub(crate) fn number() -> KernelCode {
    code(
        KernelContract::new("number", [Param::write(4), Param::scalar::<u32>()]),
        ".param .u64 a, .param .u32 b",
    )
}

/// Runs until the word is set.
pub(crate) fn blocking() -> KernelCode {
    code(KernelContract::new("blocking", [Param::read(4)]), ".param .u64 a")
}

/// Faults.
pub(crate) fn failing() -> KernelCode {
    code(KernelContract::new("failing", [Param::write(4)]), ".param .u64 a")
}

/// A resident that counts.
pub(crate) fn counter() -> KernelCode {
    let contract = KernelContract::new("counter", [Param::read_write(4)]).resident();
    code(contract, &format!("{SLICE}, .param .u64 a"))
}

/// A resident that returns only once its word is set.
pub(crate) fn stubborn() -> KernelCode {
    let contract = KernelContract::new("stubborn", [Param::read(4)]).resident();
    code(contract, &format!("{SLICE}, .param .u64 a"))
}

/// Code that is none.
pub(crate) fn garbage() -> KernelCode {
    code(KernelContract::new("letter", []), ".param .u9 x")
}

pub(crate) fn kernel(device: &Arc<dyn Device>, code: &KernelCode) -> Result<Arc<dyn Kernel>, LoadError> {
    device.load(code)?.kernel(&code.contracts()[0].name)
}

/// A device with a queue and a point that its next submission reaches.
pub(crate) struct Lane {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) queue: Arc<dyn Queue>,
    pub(crate) next: SemaphorePoint,
}

impl Lane {
    pub(crate) fn open(backend: &CudaBackend, ordinal: u32) -> Outcome<Self> {
        let device = backend.open(ordinal, Features::empty())?;
        let queue = device.create_queue(&QueueDesc::default())?;
        let next = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
        Ok(Self { device, queue, next })
    }

    /// Submits; what it returns is reached when the operations are done.
    pub(crate) fn submit(&mut self, ops: &[Op<'_>]) -> Outcome<SemaphorePoint> {
        let point = self.next.clone();
        self.queue.submit(&Submission { waits: &[], ops, signals: std::slice::from_ref(&point) })?;
        self.next.value += 1;
        Ok(point)
    }

    /// The same for what nobody is in a hurry to hear of.
    pub(crate) fn submit_late(&mut self, ops: &[Op<'_>]) -> Outcome<SemaphorePoint> {
        let point = self.next.clone();
        self.queue.submit_late(&Submission { waits: &[], ops, signals: std::slice::from_ref(&point) })?;
        self.next.value += 1;
        Ok(point)
    }

    pub(crate) fn memory(&self, desc: BufferDesc) -> Outcome<BufferView> {
        Ok(BufferView::whole(self.device.allocate(&desc)?))
    }

    /// Numbers four words on the device and brings them to the host.
    pub(crate) fn count_to_four(&mut self) -> Outcome {
        let number = kernel(&self.device, &number())?;
        let (memory, window) =
            (self.memory(BufferDesc::device(16))?, self.memory(BufferDesc::host_visible(16))?);
        let base = 7_u32.to_le_bytes();
        let args = [Arg::Buffer(&memory), Arg::Scalar(&base)];
        let ops = [
            Op::Launch(Launch::new(&number, [4, 1, 1], &args)?),
            Op::Copy(CopyRegion::new(&memory, &window)?),
        ];
        self.submit(&ops)?.wait(PATIENCE)?;
        let mut bytes = [0; 16];
        window.read(&mut bytes)?;
        let words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        if words == [7, 8, 9, 10] { Ok(()) } else { Err(format!("{words:?}").into()) }
    }
}

/// Waits for something that another thread does.
pub(crate) fn until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "it does not come");
        thread::yield_now();
    }
}

/// Longer than anything may take that has nothing to wait for, or a deadline of a tenth of a second.
pub(crate) const LIMIT: Duration = Duration::from_secs(3);

/// Does something on a thread; `None` if that takes longer.
pub(crate) fn soon<R: Send + 'static>(
    limit: Duration,
    body: impl FnOnce() -> R + Send + 'static,
) -> Option<R> {
    let (done, ended) = mpsc::channel();
    thread::spawn(move || {
        // Nobody listens after the limit.
        let _heard = done.send(body());
    });
    ended.recv_timeout(limit).ok()
}

/// Whole pages of host memory that are never given back.
pub(crate) struct Pages(NonNull<Page>);

#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "room")] [u8; 4096]);

impl Pages {
    pub(crate) fn new(count: usize) -> Self {
        let pages: Box<[Page]> = (0..count).map(|_| Page([0; 4096])).collect();
        Self(NonNull::from(Box::leak(pages)).cast())
    }

    /// Some of them. They must have been made.
    #[expect(unsafe_code, reason = "vouches for memory made here")]
    pub(crate) fn part(&self, first: usize, count: usize) -> HostMemory {
        let base = NonNull::new(self.0.as_ptr().wrapping_add(first).cast()).unwrap();
        // SAFETY: the pages were made by `new`, are never given back, and no reference to them is left.
        unsafe { HostMemory::new(base, count * 4096, Arc::new(())) }
    }
}

/// Waits until the backend has asked about events some more times, whatever it makes of the answers.
pub(crate) fn looked(stand_in: &StandIn) {
    let enough = stand_in.calls("cuEventQuery") + 20;
    until(|| stand_in.calls("cuEventQuery") >= enough);
}

/// Waits until the device's service thread has done what it was given before.
pub(crate) fn served(stand_in: &StandIn, device: &Arc<dyn Device>) -> Outcome {
    let unloads = stand_in.calls("cuModuleUnload");
    drop(device.load(&number())?);
    until(|| stand_in.calls("cuModuleUnload") > unloads);
    Ok(())
}
