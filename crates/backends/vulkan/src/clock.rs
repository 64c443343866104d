//! The device's clock.

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Instant,
};

use ash::vk;
use warpweft_core_types::{
    AllocError, Buffer as _, BufferDesc, ClockSample, Deadline, DeviceClock, DriverError, Failure,
};

use crate::{
    gpu::Gpu,
    instance::failed,
    memory::{Arena, VulkanBuffer},
    record::Recording,
    service::Service,
};

/// Reads the clock, by a call of the driver's or by a timestamp that the device writes.
pub(crate) struct Clock {
    gpu: Arc<Gpu>,
    service: Arc<Service>,
    /// Eight bytes for the device's answer, for one question at a time; `None` while one is asked.
    ///
    /// A question that was given up may still be answered, by work in front of the next one's.
    answer: Mutex<Option<Arc<VulkanBuffer>>>,
    free: Condvar,
}

/// The bytes while a question has them.
struct Taken<'a> {
    clock: &'a Clock,
    answer: Arc<VulkanBuffer>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let answer = Some(Arc::clone(&self.answer));
        *self.clock.answer.lock().unwrap_or_else(PoisonError::into_inner) = answer;
        self.clock.free.notify_one();
    }
}

impl Clock {
    pub(crate) fn create(gpu: &Arc<Gpu>, arena: &Arena, service: &Arc<Service>) -> Result<Self, AllocError> {
        let answer = Arc::new(arena.allocate(&BufferDesc::host_visible(8))?);
        Ok(Self {
            gpu: Arc::clone(gpu),
            service: Arc::clone(service),
            answer: Mutex::new(Some(answer)),
            free: Condvar::new(),
        })
    }

    /// Asks the driver, if it tells.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn calibrated(&self) -> Option<Result<ClockSample, DriverError>> {
        let functions = self.gpu.calibrated.as_ref()?;
        let asked = [vk::CalibratedTimestampInfoKHR::default().time_domain(vk::TimeDomainKHR::DEVICE)];
        let before = Instant::now();
        // SAFETY: the device is live and has the extension, which has this domain.
        let answer = unsafe { functions.get_calibrated_timestamps(&asked) };
        let after = Instant::now();
        let asked = answer.map_err(failed("vkGetCalibratedTimestampsEXT"));
        let silent = || failed("vkGetCalibratedTimestampsEXT")(vk::Result::INCOMPLETE);
        let time = asked.and_then(|(times, _deviation)| times.first().copied().ok_or_else(silent));
        Some(time.map(|device_ns| ClockSample { before, after, device_ns }))
    }

    /// Has the device write its time.
    #[expect(unsafe_code, reason = "submits work on memory that it keeps")]
    fn exchange(&self, deadline: Deadline) -> Result<Option<ClockSample>, DriverError> {
        let Some(taken) = self.take(deadline) else { return Ok(None) };
        let answer = &taken.answer;
        let before = Instant::now();
        let span = answer.span();
        let record = |recording: &mut Recording| {
            // SAFETY: eight bytes of a buffer, which start at a multiple of `ALIGNMENT`; the device has a clock,
            // since it is asked for one (`Device::clock`).
            unsafe { recording.stamp(span) }
        };
        // SAFETY: the buffer is kept.
        let asked = unsafe { self.service.submit(Some(Arc::clone(answer) as _), record) }?;
        if !asked.wait(deadline.remaining())? {
            return Ok(None);
        }
        let after = Instant::now();
        let mut bytes = [0; 8];
        if let Some(mapping) = answer.mapping() {
            // The mapping is as long.
            let _read = mapping.read(0, &mut bytes);
        }
        Ok(Some(ClockSample { before, after, device_ns: u64::from_le_bytes(bytes) }))
    }

    /// The bytes, once no other question has them.
    fn take(&self, deadline: Deadline) -> Option<Taken<'_>> {
        let mut answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(answer) = answer.take() {
                return Some(Taken { clock: self, answer });
            }
            let remaining = deadline.remaining();
            if remaining.is_zero() {
                return None;
            }
            answer = self.free.wait_timeout(answer, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl DeviceClock for Clock {
    fn sample(&self, deadline: Deadline) -> Result<ClockSample, Arc<Failure>> {
        if let Some(failure) = self.gpu.failure() {
            return Err(failure);
        }
        let remaining = deadline.remaining();
        let sample = match self.calibrated() {
            Some(Ok(sample)) => Ok(Some(sample)),
            // The device itself may answer where the driver does not.
            Some(Err(_)) | None => self.exchange(deadline),
        };
        sample
            .map_err(|error| self.gpu.judge(error))?
            .ok_or_else(|| Arc::new(Failure::DeadlineExceeded { after: remaining }))
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Clock({})", self.gpu.id)
    }
}
