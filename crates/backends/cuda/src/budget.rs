//! Which residents a device takes: how many SMs it keeps for them, and where none may be started.

use std::{
    env,
    ffi::{OsStr, OsString},
    sync::Arc,
};

use warpweft_core_types::{
    DeviceId, MultiprocessorPool, OwnedLaunch, ReservedMultiprocessors, ResidentError,
};

/// SMs that a device keeps for residents: all but one in 32, which is left for short work.
pub(crate) const fn of_device(multiprocessors: u32) -> MultiprocessorPool {
    let headroom = if multiprocessors < 32 { 1 } else { multiprocessors / 32 };
    MultiprocessorPool::new(multiprocessors.saturating_sub(headroom))
}

/// The SMs of a resident.
pub(crate) fn reserve(
    budget: &Arc<MultiprocessorPool>,
    device: DeviceId,
    launch: &OwnedLaunch,
) -> Result<ReservedMultiprocessors, ResidentError> {
    let workgroups = launch.with(|launch| launch.workgroup_count());
    let per_sm = launch.kernel().resources().workgroups_per_multiprocessor;
    let wanted = needed(budget.report().total, workgroups, per_sm);
    budget.take(wanted).map_err(|free| ResidentError::OverBudget {
        device,
        kernel: launch.kernel().contract().name.clone(),
        workgroups,
        wanted,
        free,
    })
}

/// How many SMs workgroups take. The device spreads them, so each has an SM to itself while there are
/// enough; where there are more workgroups they share all SMs, as many on each as fit.
///
/// Packing them as tightly beside other residents would be guessing at how the device places them.
fn needed(total: u32, workgroups: u64, per_sm: u32) -> u32 {
    let packed = workgroups.div_ceil(u64::from(per_sm.max(1)));
    let spread = workgroups.min(u64::from(total));
    u32::try_from(packed.max(spread)).unwrap_or(u32::MAX)
}

/// What in this process's surroundings would make residents hang or starve, if anything does.
pub(crate) fn hostile_surroundings(has_timeout: bool) -> Option<String> {
    hostile(has_timeout, |name| env::var_os(name))
}

fn hostile(has_timeout: bool, variable: impl Fn(&str) -> Option<OsString>) -> Option<String> {
    for (name, value, effect) in [
        ("CUDA_LAUNCH_BLOCKING", "1", "makes every launch wait for its kernel"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "puts all work behind the resident"),
    ] {
        if variable(name).is_some_and(|set| set == OsStr::new(value)) {
            return Some(format!("{name}={value} {effect}"));
        }
    }
    has_timeout.then(|| "the device drives a display and ends kernels that take long".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_whole_sms_less_a_headroom() {
        let check = |sms, total| assert_eq!(of_device(sms).report().total, total, "{sms} SMs");
        check(132, 128);
        check(20, 19);
        check(1, 0);
    }

    #[test]
    fn workgroups_have_an_sm_each_while_there_are_enough() {
        let check =
            |workgroups, per_sm, sms| assert_eq!(needed(128, workgroups, per_sm), sms, "{workgroups}");
        check(1, 16, 1);
        check(128, 16, 128);
        check(129, 16, 128);
        check(2048, 16, 128);
        check(2049, 16, 129);
        check(129, 1, 129);
        check(u64::MAX, 1, u32::MAX);
        check(3, 0, 3);
    }

    #[test]
    fn surroundings_that_would_hang_a_resident_are_named() {
        let check = |set: &[(&str, &str)], has_timeout, word: Option<&str>| {
            let variable =
                |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
            let reason = hostile(has_timeout, variable);
            assert_eq!(reason.is_some(), word.is_some());
            assert!(reason.unwrap_or_default().contains(word.unwrap_or_default()));
        };
        check(&[], false, None);
        check(&[("CUDA_LAUNCH_BLOCKING", "1")], false, Some("CUDA_LAUNCH_BLOCKING=1"));
        check(&[("CUDA_LAUNCH_BLOCKING", "0"), ("CUDA_DEVICE_MAX_CONNECTIONS", "8")], false, None);
        check(&[("CUDA_DEVICE_MAX_CONNECTIONS", "1")], false, Some("behind the resident"));
        check(&[], true, Some("display"));
    }
}
