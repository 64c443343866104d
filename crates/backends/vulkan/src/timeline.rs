//! Timeline semaphores of the driver's: one for each queue of ours, which counts its submissions.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ash::vk;
use warpweft_core_types::DriverError;

use crate::{gpu::Gpu, instance::failed};

/// A number that the device raises.
pub(crate) struct Line {
    gpu: Arc<Gpu>,
    raw: vk::Semaphore,
    /// The highest value seen, so that the driver is not asked again.
    seen: AtomicU64,
}

impl Line {
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn create(gpu: &Arc<Gpu>) -> Result<Arc<Self>, DriverError> {
        let mut kind = vk::SemaphoreTypeCreateInfo::default()
            .semaphore_type(vk::SemaphoreType::TIMELINE)
            .initial_value(0);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: the device is live and has timeline semaphores.
        let raw = unsafe { gpu.raw.create_semaphore(&info, None) };
        let raw = raw.map_err(failed("vkCreateSemaphore"))?;
        Ok(Arc::new(Self { gpu: Arc::clone(gpu), raw, seen: AtomicU64::new(0) }))
    }

    pub(crate) const fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub(crate) const fn raw(&self) -> vk::Semaphore {
        self.raw
    }

    /// Whether the device has reached `value`.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn has_reached(&self, value: u64) -> Result<bool, DriverError> {
        // Acquire: pairs with the release below; who learns here that work is over sees what it wrote.
        if self.seen.load(Ordering::Acquire) >= value {
            return Ok(true);
        }
        // SAFETY: the semaphore is live.
        let reached = unsafe { self.gpu.raw.get_semaphore_counter_value(self.raw) };
        let reached = reached.map_err(failed("vkGetSemaphoreCounterValue"))?;
        self.seen.fetch_max(reached, Ordering::Release);
        Ok(reached >= value)
    }

    /// Blocks until the device has reached `value`, at most for so long; whether it has.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn wait(&self, value: u64, timeout: Duration) -> Result<bool, DriverError> {
        let (semaphores, values) = ([self.raw], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: the semaphore is live; what `info` points to lives until the call returns.
        match unsafe { self.gpu.raw.wait_semaphores(&info, timeout) } {
            Ok(()) => {
                self.seen.fetch_max(value, Ordering::Release);
                Ok(true)
            }
            Err(vk::Result::TIMEOUT) => Ok(false),
            Err(error) => Err(failed("vkWaitSemaphores")(error)),
        }
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Line({})", self.gpu.id)
    }
}

impl Drop for Line {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        // SAFETY: created by `create`, destroyed once. Submissions that signal it or wait for it hold it until they
        // are over.
        unsafe { self.gpu.raw.destroy_semaphore(self.raw, None) };
    }
}

/// A value that a submission will bring its queue's line to.
#[derive(Debug, Clone)]
pub(crate) struct Ticket {
    line: Arc<Line>,
    value: u64,
}

impl Ticket {
    pub(crate) fn new(line: &Arc<Line>, value: u64) -> Self {
        Self { line: Arc::clone(line), value }
    }

    pub(crate) const fn line(&self) -> &Arc<Line> {
        &self.line
    }

    pub(crate) const fn value(&self) -> u64 {
        self.value
    }

    /// Whether the work is over.
    pub(crate) fn is_done(&self) -> Result<bool, DriverError> {
        self.line.has_reached(self.value)
    }

    /// Blocks until the work is over, at most for so long; whether it is.
    pub(crate) fn wait(&self, timeout: Duration) -> Result<bool, DriverError> {
        self.line.wait(self.value, timeout)
    }

    /// Whether both count on one line.
    pub(crate) fn is_on(&self, line: &Arc<Line>) -> bool {
        Arc::ptr_eq(&self.line, line)
    }
}
