//! Kernels that stay on a device and serve until they are stopped.

use std::{
    any::Any,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use serde::Serialize;

use crate::{Deadline, Failure, Launch, ResidentError};

/// The optional family of devices that run resident kernels.
///
/// A resident is a chain of slices: its kernel returns by itself at a message boundary when its slice is
/// over and is started again, so that other work of the device, loading code included, gets through.
pub trait Residents: fmt::Debug + Send + Sync {
    /// Starts a resident and returns once every workgroup has begun.
    ///
    /// # Errors
    ///
    /// [`ResidentError::Invalid`] or [`ResidentError::OverBudget`] before anything starts.
    ///
    /// [`ResidentError::NotResident`] when some workgroup did not begin within `check_in`. The resident was told to
    /// end then, and as long again was waited for the workgroups that had begun; [`ResidentError::Unparkable`]
    /// names one that had not returned by then. Either way the budget is given back once all are outside: at once
    /// as a rule, and where other work keeps the device from beginning the rest, when those have begun and
    /// returned at their first message boundary.
    fn launch(&self, desc: &ResidentDesc<'_>) -> Result<Arc<dyn Resident>, ResidentError>;

    /// Multiprocessors the device keeps for residents.
    fn budget(&self) -> ResidentBudget;

    /// Keeps multiprocessors free of residents until the result is dropped: for kernels that wait for other devices, which
    /// have to find room beside residents or would keep those devices waiting.
    ///
    /// # Errors
    ///
    /// [`ResidentError::NotFree`] if residents and others have left fewer.
    fn reserve(&self, multiprocessors: u32) -> Result<ReservedMultiprocessors, ResidentError>;

    /// Makes residents give way, with short slices, until the result is dropped. [`DeviceExt::foreign`] is
    /// the usual way to it.
    ///
    /// [`DeviceExt::foreign`]: crate::DeviceExt::foreign
    fn give_way(&self) -> GiveWay;
}

/// While it lives, residents give way to other work of their device.
pub struct GiveWay {
    _end: Box<dyn Any + Send + Sync>,
}

impl GiveWay {
    /// Wraps what ends it when dropped.
    pub fn new(end: impl Any + Send + Sync) -> Self {
        Self { _end: Box::new(end) }
    }
}

impl fmt::Debug for GiveWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GiveWay")
    }
}

/// What to start.
#[derive(Debug, Clone, Copy)]
pub struct ResidentDesc<'a> {
    /// The kernel with its arguments; each workgroup is resident.
    pub launch: Launch<'a>,
    /// How long a slice lasts.
    pub slice: SliceConfig,
    /// Time for every workgroup to begin.
    pub check_in: Duration,
}

impl<'a> ResidentDesc<'a> {
    /// `launch` with the default slices and two seconds to check in.
    pub fn new(launch: Launch<'a>) -> Self {
        Self { launch, slice: SliceConfig::default(), check_in: Duration::from_secs(2) }
    }
}

/// How long the slices of a resident last.
///
/// Short slices let other work in sooner; long ones interrupt the resident less often.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SliceConfig {
    /// A slice lasts at least this long, unless the resident is parked.
    pub shortest: Duration,
    /// It ends after this long even if nothing else waits for the device.
    pub longest: Duration,
}

impl SliceConfig {
    /// Whether slices can be like that; backends ask before they start anything.
    ///
    /// # Errors
    ///
    /// [`ResidentError::Invalid`] for slices that last no time, in which nothing would be done, and for a longest
    /// time that is below the shortest.
    pub fn check(&self) -> Result<(), ResidentError> {
        let Self { shortest, longest } = *self;
        let invalid = |reason: String| Err(ResidentError::Invalid { reason });
        if shortest.is_zero() || longest.is_zero() {
            return invalid(format!("slices of {shortest:?} to {longest:?} last no time"));
        }
        if shortest > longest {
            return invalid(format!("slices last at least {shortest:?} and at most {longest:?}"));
        }
        Ok(())
    }

    /// How long a slice lasts while somebody waits for the device.
    pub fn hurried(&self) -> Duration {
        self.shortest.min(self.longest)
    }

    /// Slices that end only for somebody who waits. Vendor calls that are not made by this workspace must then
    /// be made inside [`DeviceExt::foreign`], or they wait for as long as the resident lives.
    ///
    /// [`DeviceExt::foreign`]: crate::DeviceExt::foreign
    #[must_use]
    pub const fn unbounded(mut self) -> Self {
        self.longest = Duration::MAX;
        self
    }
}

impl Default for SliceConfig {
    fn default() -> Self {
        Self { shortest: Duration::from_micros(100), longest: Duration::from_millis(2) }
    }
}

/// Multiprocessors for residents: how many there are and how many are taken.
///
/// A resident takes as many as its workgroups fill, see [`crate::Kernel::resources`], and always whole ones.
/// A host device counts a multiprocessor for each workgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ResidentBudget {
    /// In all.
    pub total: u32,
    /// Taken by residents that were started and not stopped, and reserved.
    pub used: u32,
}

/// Counts the multiprocessors of a device for a backend that has [`Residents`].
#[derive(Debug)]
pub struct MultiprocessorPool {
    total: u32,
    used: AtomicU32,
}

impl MultiprocessorPool {
    /// So many, all free.
    pub const fn new(total: u32) -> Self {
        Self { total, used: AtomicU32::new(0) }
    }

    /// What is there and what is taken.
    pub fn report(&self) -> ResidentBudget {
        // Relaxed, here and below: a count that guards no other memory.
        ResidentBudget { total: self.total, used: self.used.load(Ordering::Relaxed) }
    }

    /// Takes some until the result is dropped.
    ///
    /// # Errors
    ///
    /// How many are free, if those are fewer.
    pub fn take(self: &Arc<Self>, count: u32) -> Result<ReservedMultiprocessors, u32> {
        let fits = |used: u32| used.checked_add(count).filter(|&total| total <= self.total);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits) {
            Ok(_) => Ok(ReservedMultiprocessors { pool: Arc::clone(self), count }),
            Err(used) => Err(self.total - used),
        }
    }
}

/// Multiprocessors that were taken of a device's, and are free again when it is dropped.
#[derive(Debug)]
pub struct ReservedMultiprocessors {
    pool: Arc<MultiprocessorPool>,
    count: u32,
}

impl ReservedMultiprocessors {
    /// How many.
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Gives back all but so many.
    pub fn shrink_to(&mut self, count: u32) {
        let kept = self.count.min(count);
        self.pool.used.fetch_sub(self.count - kept, Ordering::Relaxed);
        self.count = kept;
    }
}

impl Drop for ReservedMultiprocessors {
    fn drop(&mut self) {
        self.pool.used.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// What a resident is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ResidentState {
    /// Its workgroups run slice after slice.
    Running,
    /// No workgroup is inside its kernel; its state is in its buffers.
    Parked,
    /// Every workgroup said it is done, or it was stopped.
    Stopped,
    /// A workgroup failed.
    Failed,
}

impl ResidentState {
    /// The state in a word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Parked => "parked",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }
}

/// A started resident. Dropping the handle asks it to stop and does not wait.
pub trait Resident: fmt::Debug + Send + Sync {
    /// What it is doing.
    fn state(&self) -> ResidentState;

    /// Slices run so far, all workgroups together; it grows while the resident lives.
    fn slices(&self) -> u64;

    /// Stops it at the next message boundary and returns once no workgroup is inside its kernel.
    ///
    /// Several threads may ask at once. The order stands while one of them waits, so that one that gives up takes
    /// nothing from the others.
    ///
    /// # Errors
    ///
    /// [`ResidentError::Unparkable`] by the deadline, after which it runs as before unless somebody else waits for
    /// it to park. [`ResidentError::WrongState`] unless it runs, and where it was resumed or stopped before this
    /// call saw it parked.
    fn park(&self, deadline: Deadline) -> Result<(), ResidentError>;

    /// Lets a parked resident run again, from the state its buffers hold.
    ///
    /// # Errors
    ///
    /// [`ResidentError::WrongState`] unless it is parked, [`ResidentError::Failed`] when it cannot run again.
    fn resume(&self) -> Result<(), ResidentError>;

    /// Ends it at the next message boundary and returns once no workgroup is inside its kernel.
    ///
    /// # Errors
    ///
    /// [`ResidentError::Unparkable`] by the deadline; it ends as soon as the workgroup returns.
    fn stop(&self, deadline: Deadline) -> Result<(), ResidentError>;

    /// Why it failed, if it did.
    fn failure(&self) -> Option<Arc<Failure>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiprocessors_come_back_by_parts_and_as_a_whole() {
        let pool = Arc::new(MultiprocessorPool::new(5));
        let used = || pool.report().used;
        let mut most = pool.take(4).unwrap();
        assert_eq!((pool.take(2).unwrap_err(), used()), (1, 4));
        most.shrink_to(3);
        most.shrink_to(9);
        assert_eq!((most.count(), used()), (3, 3));
        drop(pool.take(2).unwrap());
        assert_eq!(pool.take(u32::MAX).unwrap_err(), 2);
        drop(most);
        assert_eq!(used(), 0);
    }

    #[test]
    fn slices_last_some_time_and_are_not_longer_when_hurried() {
        let us = Duration::from_micros;
        let check = |shortest, longest, valid: bool| {
            let config = SliceConfig { shortest, longest };
            let checked = config.check();
            assert_eq!(checked.is_ok(), valid, "{config:?}: {checked:?}");
            assert!(valid || matches!(checked, Err(ResidentError::Invalid { .. })));
            assert!(config.hurried() <= longest, "{config:?}");
        };
        check(us(100), us(2000), true);
        check(us(100), us(100), true);
        check(us(100), us(99), false);
        check(us(0), us(2000), false);
        check(us(0), us(0), false);
        check(Duration::MAX, Duration::MAX, true);
        assert!(SliceConfig::default().check().is_ok());
        assert!(SliceConfig::default().unbounded().check().is_ok());
    }
}
