//! The driver's own calls, without our queues, semaphores and threads: the floor that benchmarks print beside our
//! figures of the same run.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use ash::vk;
use warpweft_core_types::{Device, DeviceId, DriverError, Op, OwnedOp, SubmitError};

use crate::{device::VulkanDevice, instance::failed, memory::VulkanBuffer, record::Recording, work::Tools};

/// Far longer than anything that is measured.
const LONGEST: Duration = Duration::from_secs(60);

/// The driver of one device, called as a program without this crate would call it again and again: a command buffer
/// that was recorded beforehand, `vkQueueSubmit` with a fence, and `vkWaitForFences`.
///
/// ```no_run
/// # use warpweft_core_types::*;
/// # use warpweft_vulkan::{Baseline, VulkanBackend};
/// let device = VulkanBackend::new()?.open(0, Features::empty())?;
/// let host = BufferView::whole(device.allocate(&BufferDesc::host_visible(1 << 20))?);
/// let memory = BufferView::whole(device.allocate(&BufferDesc::device(1 << 20))?);
/// let floor = Baseline::new(&device).ok_or("not a Vulkan device")?;
/// let copy = floor.record(&[Op::Copy(CopyRegion::new(&host, &memory)?)])?;
/// let began = std::time::Instant::now();
/// copy.run()?;
/// println!("{:?}", began.elapsed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Baseline {
    tools: Arc<Tools>,
    device: Arc<dyn Device>,
}

/// Operations of a [`Baseline`], recorded once.
pub struct Prerecorded {
    work: Arc<Work>,
    /// It was handed over, and nobody has seen its end.
    under_way: AtomicBool,
    _device: Arc<dyn Device>,
}

/// What the driver uses until the end.
struct Work {
    tools: Arc<Tools>,
    /// Which queue of the driver's it uses.
    queue: usize,
    recording: Recording,
    fence: vk::Fence,
    /// What the commands name.
    ops: Vec<OwnedOp>,
}

impl Baseline {
    /// For a device of this backend; `None` for others, wrapped ones included.
    pub fn new(device: &Arc<dyn Device>) -> Option<Self> {
        let tools = Arc::clone(VulkanDevice::of(device)?.tools());
        Some(Self { tools, device: Arc::clone(device) })
    }

    /// The device that is called.
    pub fn device(&self) -> DeviceId {
        self.tools.gpu.id
    }

    /// Records operations, one after the other.
    ///
    /// # Errors
    ///
    /// As for [`Queue::submit`](warpweft_core_types::Queue::submit), and the driver's.
    #[expect(unsafe_code, reason = "records commands for memory that operations name")]
    pub fn record(&self, ops: &[Op<'_>]) -> Result<Prerecorded, SubmitError> {
        ops.iter().try_for_each(|op| self.tools.check(op))?;
        // SAFETY: `check` took each of them.
        let work = unsafe { Work::record(&self.tools, ops) };
        let work = work.map_err(|error| SubmitError::Failed(self.tools.gpu.judge(error)))?;
        Ok(Prerecorded {
            work: Arc::new(work),
            under_way: AtomicBool::new(false),
            _device: Arc::clone(&self.device),
        })
    }
}

impl Prerecorded {
    /// Does it and waits for its end. Whatever it touches must not be in use by other work.
    ///
    /// # Errors
    ///
    /// The driver's, and [`SubmitError::Invalid`] if it is under way already or takes longer than a minute.
    pub fn run(&self) -> Result<(), SubmitError> {
        Self::run_together(&[self])
    }

    /// Starts each of several, then waits for all of them.
    ///
    /// # Errors
    ///
    /// As for [`Prerecorded::run`]; what was started is waited for all the same.
    pub fn run_together(work: &[&Self]) -> Result<(), SubmitError> {
        let mut result = Ok(());
        let mut started = 0;
        for this in work {
            result = this.start();
            if result.is_err() {
                break;
            }
            started += 1;
        }
        work[..started].iter().fold(result, |result, this| result.and(this.finish()))
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn start(&self) -> Result<(), SubmitError> {
        // Acquire: pairs with the release in `finish`; whoever starts it again comes after the end of the last run.
        if self.under_way.swap(true, Ordering::Acquire) {
            return Err(SubmitError::Invalid { reason: "it is under way already".to_owned() });
        }
        let Work { tools, queue, recording, fence, .. } = self.work.as_ref();
        let commands = [recording.commands()];
        let submit = [vk::SubmitInfo::default().command_buffers(&commands)];
        let queue = tools.gpu.queue(*queue);
        // SAFETY: the queue is held by this thread alone. The commands were recorded to their end and are not under way,
        // and the fence is not signalled, by the flag above. What they use is never let go while the flag is set.
        unsafe { tools.gpu.raw.queue_submit(*queue, &submit, *fence) }
            .map_err(|error| self.failed("vkQueueSubmit", error))
    }

    /// An end that cannot be learnt leaves the flag as it is.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn finish(&self) -> Result<(), SubmitError> {
        let (gpu, fences) = (&self.work.tools.gpu, [self.work.fence]);
        let longest = u64::try_from(LONGEST.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: the fence is this value's and live.
        match unsafe { gpu.raw.wait_for_fences(&fences, true, longest) } {
            Ok(()) => {}
            Err(vk::Result::TIMEOUT) => {
                return Err(SubmitError::Invalid { reason: format!("it took longer than {LONGEST:?}") });
            }
            Err(error) => return Err(self.failed("vkWaitForFences", error)),
        }
        // SAFETY: as above; the submission that signalled it is over.
        unsafe { gpu.raw.reset_fences(&fences) }.map_err(|error| self.failed("vkResetFences", error))?;
        self.under_way.store(false, Ordering::Release);
        Ok(())
    }

    fn failed(&self, api: &'static str, error: vk::Result) -> SubmitError {
        SubmitError::Failed(self.work.tools.gpu.judge(failed(api)(error)))
    }
}

impl Work {
    /// # Safety
    ///
    /// - `Tools::check` took each operation.
    #[expect(unsafe_code, reason = "records commands for memory that operations name")]
    unsafe fn record(tools: &Arc<Tools>, ops: &[Op<'_>]) -> Result<Self, DriverError> {
        let mut recording = Recording::primary(&tools.gpu)?;
        // SAFETY: it is new.
        unsafe { recording.begin() }?;
        for (position, op) in ops.iter().enumerate() {
            wait_until_zeroed(op)?;
            if position > 0 {
                recording.barrier();
            }
            // SAFETY: the caller's word.
            unsafe { tools.record(op, &mut recording) }?;
        }
        recording.show_host();
        recording.end()?;
        let (tools, queue) = (Arc::clone(tools), tools.gpu.pick_queue());
        let fence = create_fence(&tools)?;
        Ok(Self { tools, queue, recording, fence, ops: ops.iter().map(OwnedOp::from).collect() })
    }
}

/// Whoever measures wants no work of ours in front.
fn wait_until_zeroed(op: &Op<'_>) -> Result<(), DriverError> {
    let mut result = Ok(());
    op.for_each_access(|view, _| {
        if let Some(zeroed) = VulkanBuffer::of(view).and_then(VulkanBuffer::zeroed)
            && result.is_ok()
        {
            result = zeroed.wait(LONGEST).map(drop);
        }
    });
    result
}

#[expect(unsafe_code, reason = "calls the driver")]
fn create_fence(tools: &Tools) -> Result<vk::Fence, DriverError> {
    // SAFETY: the device is live.
    let fence = unsafe { tools.gpu.raw.create_fence(&vk::FenceCreateInfo::default(), None) };
    fence.map_err(failed("vkCreateFence"))
}

impl fmt::Debug for Baseline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Baseline({})", self.device())
    }
}

impl fmt::Debug for Prerecorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Prerecorded({}, {:?})", self.work.tools.gpu.id, self.work.ops)
    }
}

impl Drop for Prerecorded {
    fn drop(&mut self) {
        if *self.under_way.get_mut() {
            // The device may still use it, so it stays.
            std::mem::forget(Arc::clone(&self.work));
        }
    }
}

impl Drop for Work {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        // SAFETY: created by `record`, destroyed once; work that is under way is never dropped.
        unsafe { self.tools.gpu.raw.destroy_fence(self.fence, None) };
    }
}
