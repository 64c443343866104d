//! Room for a communicator's blocks beside residents and other communicators.
//!
//! Its kernels wait for those of other ranks, so that all blocks of a launch must be able to run whatever else the device
//! was given that does not end by itself. What is reserved here is what residents leave.

use warpweft_bootstrap::{Group, Rank};
use warpweft_core_types::{Deadline, Device, ReservedMultiprocessors, ResidentError, Residents};

use super::window::CHANNELS;
use crate::CommError;

/// How many channels all ranks have, which they agree on, and this rank's multiprocessors for as many.
///
/// Unless a number is asked for it is half of what is free, so that there is something left for residents and for
/// communicators to come. A device that runs no residents has room.
pub(crate) fn reserve(
    group: &Group,
    device: &dyn Device,
    wanted: Option<u32>,
    deadline: Deadline,
) -> Result<(u32, Option<ReservedMultiprocessors>), CommError> {
    let residents = device.residents();
    let mut reserved = residents.and_then(|residents| take(residents, wanted));
    let count = match residents {
        Some(_) => reserved.as_ref().map_or(0, ReservedMultiprocessors::count),
        None => wanted.map_or(CHANNELS, |wanted| wanted.clamp(1, CHANNELS)),
    };
    let all = group.all_gather("multiprocessors of a communicator", &count.to_le_bytes(), deadline)?;
    let counts = all.iter().map(|bytes| <[u8; 4]>::try_from(&bytes[..]).map_or(0, u32::from_le_bytes));
    let (least, rank) = counts.zip(Rank::all(group.size())).min().unwrap_or((0, Rank(0)));
    if least == 0 {
        let reason = format!(
            "the device of rank {rank} has no multiprocessor left beside residents and communicators"
        );
        return Err(CommError::NoEngine { reason });
    }
    if let Some(reserved) = &mut reserved {
        reserved.shrink_to(least);
    }
    if wanted.is_some_and(|wanted| wanted.min(CHANNELS) > least) {
        tracing::info!(wanted, got = least, "a communicator has fewer multiprocessors than it was to have");
    }
    Ok((least, reserved))
}

/// As many as are wanted and free; nothing where none are.
fn take(residents: &dyn Residents, wanted: Option<u32>) -> Option<ReservedMultiprocessors> {
    loop {
        let budget = residents.budget();
        let free = budget.total.saturating_sub(budget.used);
        if free == 0 {
            return None;
        }
        let count = wanted.unwrap_or((free / 2).max(1)).clamp(1, CHANNELS.min(free));
        match residents.reserve(count) {
            Ok(reserved) => return Some(reserved),
            // Somebody else was faster.
            Err(ResidentError::NotFree { .. }) => {}
            Err(_) => return None,
        }
    }
}
