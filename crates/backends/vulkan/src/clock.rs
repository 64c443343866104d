//! The device's clock.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use ash::vk;
use warpweft_core_types::{
    AllocError, Buffer as _, BufferDesc, ClockSample, Deadline, DeviceClock, DriverError, Failure,
};

use crate::{
    gpu::Gpu,
    instance::failed,
    memory::{Arena, VulkanBuffer},
    service::Service,
};

/// Reads the clock, by a call of the driver's or by a timestamp that the device writes.
pub(crate) struct Clock {
    gpu: Arc<Gpu>,
    service: Arc<Service>,
    /// Eight bytes for the device's answer, for one question at a time.
    answer: Mutex<Arc<VulkanBuffer>>,
}

impl Clock {
    pub(crate) fn create(gpu: &Arc<Gpu>, arena: &Arena, service: &Arc<Service>) -> Result<Self, AllocError> {
        let answer = Arc::new(arena.allocate(&BufferDesc::host_visible(8))?);
        Ok(Self { gpu: Arc::clone(gpu), service: Arc::clone(service), answer: Mutex::new(answer) })
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
        let sample = |(times, _deviation): (Vec<u64>, u64)| ClockSample {
            before,
            after,
            device_ns: times.first().copied().unwrap_or(0),
        };
        Some(answer.map(sample).map_err(failed("vkGetCalibratedTimestampsEXT")))
    }

    /// Has the device write its time.
    fn exchange(&self, remaining: Duration) -> Result<Option<ClockSample>, DriverError> {
        let answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        let before = Instant::now();
        let span = answer.span();
        let asked =
            self.service.submit(Some(Arc::clone(&*answer) as _), |recording| recording.stamp(span))?;
        if !asked.wait(remaining)? {
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
}

impl DeviceClock for Clock {
    fn sample(&self, deadline: Deadline) -> Result<ClockSample, Arc<Failure>> {
        if let Some(failure) = self.gpu.failure() {
            return Err(failure);
        }
        let remaining = deadline.remaining();
        let sample = match self.calibrated() {
            Some(sample) => sample.map(Some),
            None => self.exchange(remaining),
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
