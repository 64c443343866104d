//! What a program decides about a group.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};
use warpweft_core_types::DeviceUuid;

use crate::{JoinError, Rank};

/// Who joins, and how it wants to be reached and watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinConfig {
    /// This member's position.
    pub rank: Rank,
    /// How many members there are.
    pub size: u32,
    /// Devices that no other member may have; two that name one are refused before anything is opened.
    pub devices: Vec<DeviceUuid>,
    /// Versions that must be the same everywhere, by component; this crate adds its own.
    pub versions: BTreeMap<String, String>,
    /// Where this member listens.
    pub bind: Bind,
    /// How members are watched; rank 0's holds for all.
    pub pulse: PulseConfig,
    /// How much is taken from strangers and in values.
    pub limits: LimitConfig,
    /// A folder for the socket that takes descriptors, for containers that share a folder and no network.
    /// A folder of its own is made in it. Without one, Linux uses a name without a file.
    pub mailbox_folder: Option<PathBuf>,
}

impl JoinConfig {
    /// Member `rank` of `size`, everything else as it comes.
    pub fn new(rank: Rank, size: u32) -> Self {
        Self {
            rank,
            size,
            devices: Vec::new(),
            versions: BTreeMap::new(),
            bind: Bind::default(),
            pulse: PulseConfig::default(),
            limits: LimitConfig::default(),
            mailbox_folder: None,
        }
    }

    pub(crate) fn check(&self) -> Result<(), JoinError> {
        let wrong = |reason: String| Err(JoinError::InvalidConfig { reason });
        if self.size == 0 {
            return wrong("a group has at least one member".into());
        }
        if self.rank.0 >= self.size {
            return wrong(format!("rank {} of a group of {}", self.rank, self.size));
        }
        if self.devices.len() > LimitConfig::DEVICES {
            return wrong(format!(
                "{} devices, at most {} are told",
                self.devices.len(),
                LimitConfig::DEVICES
            ));
        }
        let texts: usize =
            self.versions.iter().map(|(component, version)| component.len() + version.len()).sum();
        if texts > LimitConfig::VERSION_BYTES {
            return wrong(format!(
                "versions of {texts} bytes, at most {} are told",
                LimitConfig::VERSION_BYTES
            ));
        }
        self.limits.check()?;
        self.pulse.check()
    }
}

/// Where a member listens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Bind {
    /// On this host alone.
    #[default]
    Loopback,
    /// On the first address of a network interface, such as `eth0`.
    Interface(String),
    /// On every interface.
    Any,
}

/// When a member that says nothing is suspected, and when it is given up.
///
/// Death on the same host is seen without any of this, and there silence alone is never taken for death.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PulseConfig {
    /// Time between two signs of life.
    pub interval: Duration,
    /// Silence after which a member is suspected; at least twice the interval.
    pub suspect_after: Duration,
    /// Silence after which a member of another host is lost.
    pub lost_after: Duration,
}

impl Default for PulseConfig {
    fn default() -> Self {
        Self {
            interval: Duration::from_millis(250),
            suspect_after: Duration::from_secs(1),
            lost_after: Duration::from_secs(10),
        }
    }
}

impl PulseConfig {
    /// # Errors
    ///
    /// The times contradict each other.
    pub(crate) fn check(&self) -> Result<(), JoinError> {
        let Self { interval, suspect_after, lost_after } = *self;
        if lost_after > LONGEST_TIME {
            let reason = format!("lost after {lost_after:?}: at most {LONGEST_TIME:?} is counted");
            return Err(JoinError::InvalidConfig { reason });
        }
        if interval.is_zero() || suspect_after / 2 < interval || lost_after < suspect_after {
            let reason = format!(
                "signs of life every {interval:?}, suspected after {suspect_after:?}, lost after {lost_after:?}: \
                 these have to grow, and suspicion takes two intervals"
            );
            return Err(JoinError::InvalidConfig { reason });
        }
        Ok(())
    }

    /// Whether so much time between two looks means that this process did not run.
    ///
    /// A look comes once each interval if nothing else happens, so an interval alone is no absence: with the
    /// shortest time that suspicion may take, nobody would ever be suspected.
    pub(crate) fn is_absence(&self, gap: Duration) -> bool {
        gap.saturating_sub(self.interval) >= self.suspect_after / 4
    }
}

/// How much a member takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitConfig {
    /// Longest value of a call.
    pub value_bytes: usize,
    /// Connections that rank 0 keeps of callers that have not proven themselves; the oldest makes room.
    pub strangers: usize,
    /// How long such a caller has.
    pub stranger_time: Duration,
}

impl LimitConfig {
    /// Devices that a member can tell of.
    pub(crate) const DEVICES: usize = 1024;
    /// Callers that are let in besides a whole job.
    pub(crate) const SPARE_STRANGERS: usize = 32;
    /// Bytes of versions that a member can tell.
    pub(crate) const VERSION_BYTES: usize = 4096;
    /// The longest value there can be: a call's answer holds one of each member.
    const VALUE_BYTES: usize = 8 << 20;

    fn check(&self) -> Result<(), JoinError> {
        let wrong = |reason: String| Err(JoinError::InvalidConfig { reason });
        if self.value_bytes > Self::VALUE_BYTES {
            return wrong(format!("values of {} bytes, at most {} go", self.value_bytes, Self::VALUE_BYTES));
        }
        if self.strangers == 0 || self.stranger_time.is_zero() {
            return wrong("every member is a stranger first: allow some, for some time".into());
        }
        if self.stranger_time > LONGEST_TIME {
            return wrong(format!(
                "{:?} for a stranger, at most {LONGEST_TIME:?} is counted",
                self.stranger_time
            ));
        }
        Ok(())
    }
}

impl Default for LimitConfig {
    fn default() -> Self {
        Self { value_bytes: 64 << 10, strangers: 256, stranger_time: Duration::from_secs(2) }
    }
}

/// Longer times would overflow when they are added to the clock, and end no wait that anybody sees.
const LONGEST_TIME: Duration = Duration::from_secs(365 * 24 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_that_cannot_be_counted_are_refused() {
        let (second, huge) = (Duration::from_secs(1), Duration::MAX);
        for (interval, suspect_after, lost_after, is_right) in [
            (second, second * 2, second * 2, true),
            (second, second, second * 2, false),
            (huge, huge, huge, false),
            (second, huge, huge, false),
            (second, second * 2, huge, false),
        ] {
            let pulse = PulseConfig { interval, suspect_after, lost_after };
            assert_eq!(pulse.check().is_ok(), is_right, "{pulse:?}");
        }
        let limits = LimitConfig { stranger_time: huge, ..LimitConfig::default() };
        assert!(limits.check().is_err());
    }

    #[test]
    fn a_look_at_its_time_is_no_absence() {
        let ms = Duration::from_millis;
        let pulse = PulseConfig { interval: ms(100), suspect_after: ms(200), lost_after: ms(200) };
        assert!(!pulse.is_absence(ms(101)));
        assert!(pulse.is_absence(ms(150)));
    }
}
