//! Devices, kernels and launches in few words.

use std::{
    fmt,
    ops::Range,
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use libtest_mimic::Failed;
use warpweft_core_types::{
    Arg, Backend, BufferDesc, BufferView, CodeFormat, Deadline, Device, Features, ForeignCode, HostMemory,
    Kernel, KernelCode, KernelContract, Launch, LoadError, Module, Op, OpenError, QueueDesc, SemaphorePoint,
    Submission, SubmitError,
};
use warpweft_vulkan::{Messages, VulkanBackend, VulkanConfig};

/// Far longer than anything takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// One test.
#[derive(Clone, Copy)]
pub(crate) struct Test {
    pub(crate) name: &'static str,
    pub(crate) body: fn() -> Verdict,
}

pub(crate) type Verdict = Result<(), Need>;

/// Why a test did not pass.
#[derive(Debug)]
pub(crate) enum Need {
    /// This machine lacks something.
    Missing(String),
    Failed(Failed),
}

impl<E: fmt::Display> From<E> for Need {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string().into())
    }
}

/// A missing loader, driver or layer is a need that is missing; anything else a failure.
pub(crate) fn open_backend(config: &VulkanConfig) -> Result<Arc<VulkanBackend>, Need> {
    let backend = there(VulkanBackend::with_config(config))?;
    OPENED.lock().unwrap_or_else(PoisonError::into_inner).push(backend.messages());
    Ok(Arc::new(backend))
}

/// What was opened so far.
static OPENED: Mutex<Vec<Messages>> = Mutex::new(Vec::new());

/// Returns once everything that was opened is gone, as it has to be before the process ends; whether it is.
pub(crate) fn wait_for_the_end() -> bool {
    let opened = std::mem::take(&mut *OPENED.lock().unwrap_or_else(PoisonError::into_inner));
    let deadline = Deadline::within(PATIENCE);
    opened.iter().all(|messages| {
        while !messages.are_complete() && !deadline.is_past() {
            std::thread::yield_now();
        }
        messages.are_complete()
    })
}

fn there<T>(opened: Result<T, OpenError>) -> Result<T, Need> {
    opened.map_err(|error| match error {
        OpenError::Unavailable { missing, .. } => Need::Missing(missing),
        error => error.into(),
    })
}

pub(crate) fn open(config: &VulkanConfig) -> Result<(Arc<VulkanBackend>, Arc<dyn Device>), Need> {
    let backend = open_backend(config)?;
    let device = there(backend.open(0, Features::empty()))?;
    Ok((backend, device))
}

/// Code whose kernel touches no memory outside its contract, or that no device runs.
#[expect(unsafe_code, reason = "vouches for the kernels of these tests")]
pub(crate) fn load(
    device: &Arc<dyn Device>,
    contract: &KernelContract,
    form: ForeignCode,
) -> Result<Arc<dyn Module>, LoadError> {
    // SAFETY: the kernels of these tests that are launched keep to their contracts, as their few lines show; those that
    // do not are refused when they are loaded, which is what is tested.
    device.load(&unsafe { KernelCode::new().with_foreign([contract.clone()], form) })
}

pub(crate) fn wgsl(text: &str) -> ForeignCode {
    ForeignCode::Source { format: CodeFormat::Wgsl, text: text.to_owned() }
}

pub(crate) fn kernel(
    device: &Arc<dyn Device>,
    contract: &KernelContract,
    text: &str,
) -> Result<Arc<dyn Kernel>, LoadError> {
    load(device, contract, wgsl(text))?.kernel(&contract.name)
}

pub(crate) fn memory(device: &Arc<dyn Device>, desc: BufferDesc) -> Result<BufferView, Need> {
    Ok(BufferView::whole(device.allocate(&desc)?))
}

/// Submits one operation to a queue of its own and waits for it.
pub(crate) fn run(device: &Arc<dyn Device>, op: Op<'_>) -> Verdict {
    let queue = device.create_queue(&QueueDesc::default())?;
    let done = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
    let signals = std::slice::from_ref(&done);
    queue.submit(&Submission { ops: &[op], signals, ..Submission::default() })?;
    Ok(done.wait(PATIENCE)?)
}

pub(crate) fn launch(device: &Arc<dyn Device>, kernel: &Arc<dyn Kernel>, args: &[Arg<'_>]) -> Verdict {
    run(device, Op::Launch(Launch::new(kernel, [1, 1, 1], args)?))
}

/// Why a launch was not taken, as it had to be.
pub(crate) fn refused_launch(
    device: &Arc<dyn Device>,
    kernel: &Arc<dyn Kernel>,
    args: &[Arg<'_>],
) -> Result<SubmitError, Need> {
    let queue = device.create_queue(&QueueDesc::default())?;
    let ops = [Op::Launch(Launch::new(kernel, [1, 1, 1], args)?)];
    let refused = queue.submit(&Submission { ops: &ops, ..Submission::default() }).err();
    refused.ok_or_else(|| "it was taken".into())
}

pub(crate) fn words(view: &BufferView) -> Result<Vec<u32>, Need> {
    let mut bytes = vec![0; usize::try_from(view.size())?];
    view.read(&mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// Parts of host memory that lasts as long as the process, given in pages of `page` bytes.
#[expect(unsafe_code, reason = "vouches for memory that is never freed")]
pub(crate) fn host_pages(page: u64, count: u64) -> Result<impl Fn(Range<u64>) -> HostMemory, Need> {
    let (page, len) = (usize::try_from(page)?, usize::try_from(page * (count + 1))?);
    let bytes = Box::leak(vec![0_u8; len].into_boxed_slice());
    let first = bytes.as_ptr().addr().next_multiple_of(page) - bytes.as_ptr().addr();
    let base = NonNull::from(bytes).cast::<u8>();
    Ok(move |pages: Range<u64>| {
        let [start, end] =
            [pages.start, pages.end.min(count)].map(|at| page * usize::try_from(at).unwrap_or(0));
        // SAFETY: `first` is below a page, and there is one page more than are given out.
        let at = unsafe { base.add(first + start) };
        // SAFETY: the allocation is leaked, and the only reference to it ended above.
        unsafe { HostMemory::new(at, end - start, Arc::new(())) }
    })
}
