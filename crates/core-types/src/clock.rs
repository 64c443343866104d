//! A device's own clock, and how it goes beside the host's.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use serde::Serialize;

use crate::{BufferView, Deadline, Failure, RangeError};

/// The optional family of devices that tell the time.
pub trait DeviceClock: fmt::Debug + Send + Sync {
    /// Reads the device's clock between two readings of the host's.
    ///
    /// # Errors
    ///
    /// [`Failure::DeadlineExceeded`] when the device did not answer in time, or why it is lost.
    fn sample(&self, deadline: Deadline) -> Result<ClockSample, Arc<Failure>>;
}

/// Eight bytes that receive the device's time, in nanoseconds, little endian.
#[derive(Debug, Clone, Copy)]
pub struct TimestampRegion<'a> {
    dst: &'a BufferView,
}

impl<'a> TimestampRegion<'a> {
    /// Bytes a timestamp takes, and a multiple of which it starts at.
    pub const SIZE: u64 = 8;

    /// A timestamp into `dst`. The clock shows that the device has one, and is not used otherwise.
    ///
    /// # Errors
    ///
    /// [`RangeError::NoTimestamp`] unless the view is eight bytes long and starts at a multiple of eight.
    pub fn new(_clock: &dyn DeviceClock, dst: &'a BufferView) -> Result<Self, RangeError> {
        if dst.size() == Self::SIZE && dst.offset().is_multiple_of(Self::SIZE) {
            return Ok(Self { dst });
        }
        Err(RangeError::NoTimestamp { offset: dst.offset(), size: dst.size() })
    }

    /// For views that went through `new` before.
    pub(crate) const fn checked(dst: &'a BufferView) -> Self {
        Self { dst }
    }

    /// Where it goes.
    pub const fn dst(&self) -> &'a BufferView {
        self.dst
    }
}

/// A device's time, read between two moments of the host's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockSample {
    /// The host's clock before.
    pub before: Instant,
    /// The host's clock after.
    pub after: Instant,
    /// The device's clock, in nanoseconds.
    pub device_ns: u64,
}

impl ClockSample {
    fn width(&self) -> Duration {
        self.after.saturating_duration_since(self.before)
    }

    /// The middle, which is off by half the width at most.
    fn middle(&self) -> Instant {
        self.before + self.width() / 2
    }
}

/// Translates a device's times into the host's, with a bound on the error.
///
/// It is a line through two samples: whatever the true line is, at those two it lies within the samples'
/// widths. The bound assumes that the device's clock keeps its rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClockModel {
    first: ClockSample,
    /// Nanoseconds of the host for one of the device.
    rate: f64,
    /// Half the wider of the two samples, in nanoseconds.
    error_ns: f64,
    /// How much the error grows for each nanosecond outside the samples.
    growth: f64,
    /// Device times of the two samples.
    span: (u64, u64),
}

/// A moment of the host's clock and how far off it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostTime {
    /// The best guess.
    pub at: Instant,
    /// The true moment lies no further away than this.
    pub error: Duration,
}

/// A model's figures, for reports.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ClockReport {
    /// How much faster the device's clock goes than the host's, in parts per million.
    pub drift_ppm: f64,
    /// How uncertain the drift is, in parts per million.
    pub drift_error_ppm: f64,
    /// The error of a time between the samples, in nanoseconds.
    pub error_ns: f64,
}

impl ClockModel {
    /// The line through the narrowest sample of the first and of the last third; `None` without two samples
    /// at different device times. Samples come in the order they were taken.
    pub fn fit(samples: &[ClockSample]) -> Option<Self> {
        let third = samples.len().div_ceil(3);
        let narrowest = |part: &[ClockSample]| part.iter().min_by_key(|sample| sample.width()).copied();
        let first = narrowest(samples.get(..third)?)?;
        let last = narrowest(samples.get(samples.len() - third..)?)?;
        let device_ns = last.device_ns.checked_sub(first.device_ns).filter(|&ns| ns > 0)?;
        let host = last.middle().saturating_duration_since(first.middle());
        let widths = first.width() + last.width();
        let wider = first.width().max(last.width());
        Some(Self {
            first,
            rate: nanos(host) / float(device_ns),
            error_ns: nanos(wider) / 2.0,
            growth: nanos(widths) / 2.0 / float(device_ns),
            span: (first.device_ns, last.device_ns),
        })
    }

    /// The host's time of a device's time.
    pub fn to_host(&self, device_ns: u64) -> HostTime {
        let (first, last) = self.span;
        let outside = first.saturating_sub(device_ns).max(device_ns.saturating_sub(last));
        let error = self.error_ns + self.growth * float(outside);
        let distance = seconds(float(device_ns.abs_diff(first)) * self.rate / 1e9);
        let middle = self.first.middle();
        let at = if device_ns >= first { middle.checked_add(distance) } else { middle.checked_sub(distance) };
        HostTime { at: at.unwrap_or(middle), error: seconds(error / 1e9) }
    }

    /// Its figures.
    pub fn report(&self) -> ClockReport {
        ClockReport {
            drift_ppm: (1.0 / self.rate - 1.0) * 1e6,
            drift_error_ppm: self.growth * 1e6,
            error_ns: self.error_ns,
        }
    }
}

/// The longest duration where there is none that long.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

fn nanos(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e9
}

#[expect(clippy::cast_precision_loss, reason = "differences of times, far below 2^52 nanoseconds")]
fn float(ns: u64) -> f64 {
    ns as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A clock that starts at `offset` and goes `ppm` too fast, read at `at` in a window around it.
    fn read(epoch: Instant, offset: u64, ppm: f64, at: u64, early: u64, late: u64) -> ClockSample {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small positive times")]
        let device_ns = offset + (float(at) * (1.0 + ppm * 1e-6)) as u64;
        ClockSample {
            before: epoch + Duration::from_nanos(at - early),
            after: epoch + Duration::from_nanos(at + late),
            device_ns,
        }
    }

    proptest! {
        #[test]
        fn the_true_time_lies_within_the_error(
            offset in 0_u64..1 << 50,
            ppm in -200.0..200.0_f64,
            edges in proptest::collection::vec((0_u64..5_000, 0_u64..5_000), 3..40),
            at in 0_u64..2_000_000_000,
        ) {
            let epoch = Instant::now();
            let time = |step: usize| 10_000_000 + step as u64 * 20_000_000;
            let samples: Vec<_> = edges
                .iter()
                .enumerate()
                .map(|(step, &(early, late))| read(epoch, offset, ppm, time(step), early, late))
                .collect();
            let model = ClockModel::fit(&samples).expect("the device times differ");
            let truth = read(epoch, offset, ppm, at + 10_000, 0, 0);
            let guess = model.to_host(truth.device_ns);
            let off = guess.at.max(truth.before) - guess.at.min(truth.before);
            // Two nanoseconds of rounding: the device's clock is a whole number, and so is a duration.
            prop_assert!(off <= guess.error + Duration::from_nanos(2), "{off:?} > {:?}", guess.error);
        }
    }

    #[test]
    fn one_moment_is_no_line() {
        let sample = read(Instant::now(), 5, 0.0, 10, 1, 1);
        assert!(ClockModel::fit(&[]).is_none());
        assert!(ClockModel::fit(&[sample]).is_none());
        assert!(ClockModel::fit(&[sample, sample]).is_none());
    }

    #[test]
    fn the_report_tells_the_drift() {
        let epoch = Instant::now();
        let samples = [0, 1, 2].map(|step| read(epoch, 0, 50.0, 1_000 + step * 1_000_000_000, 500, 500));
        let report = ClockModel::fit(&samples).unwrap().report();
        assert!((report.drift_ppm - 50.0).abs() <= report.drift_error_ppm + 0.01, "{report:?}");
        assert!((report.error_ns - 500.0).abs() < 1e-6, "{report:?}");
    }
}
