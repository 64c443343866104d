//! The memory by which ranks reach each other: a part on every rank's device, and all parts in one buffer on each.

use std::{os::fd::AsFd as _, sync::Arc, time::Duration};

use warpweft_bootstrap::{Group, Rank};
use warpweft_core_types::{
    Buffer, BufferDesc, BufferView, CopyRegion, Deadline, Device, DeviceUuid, Op, QueueDesc, RangeError,
    SemaphorePoint, SharedMemory, Sharing, Submission, WaitError,
};

use crate::CommError;

/// Blocks of a launch at most: each has rings of its own.
pub(crate) const CHANNELS: u32 = 64;

/// Messages that a ring holds. One call uses two at most, so that a rank may be a call ahead.
pub(crate) const SLOTS: u64 = 4;

/// Bytes of one rank's part, which is whole pages on every device that has windows.
pub(crate) const PART: u64 = BARE_AT + BARE_BYTES;

/// Where the slots of bare messages begin, and their bytes.
pub(crate) const BARE_AT: u64 = 16 << 20;
const BARE_BYTES: u64 = 32 << 20;

/// Bytes of a line, of which half are the message's.
const LINE: u64 = 16;

/// Where the lines begin in a part, behind what channels remember.
const LINES_AT: u64 = 65_536;

/// Where the part says how long a device waits.
const LIMIT_AT: u64 = 8;

/// The word of host memory by which the host ends what is under way. A line before it, the device tells why it has given
/// up: the cause, the rank it waited for, the number of the message, and the channel.
const ENDED_AT: usize = 64;

/// Lines of a slot.
pub(crate) const fn lines(ranks: u32) -> u64 {
    (BARE_AT - LINES_AT) / (CHANNELS as u64 * SLOTS * ranks as u64 * LINE)
}

/// Lines of a slot of bare messages, which are the message's only.
pub(crate) const fn bare_lines(ranks: u32) -> u64 {
    BARE_BYTES / (CHANNELS as u64 * SLOTS * ranks as u64 * (LINE / 2))
}

/// Why a device gave up, in the order of the kernel's numbers from 1 on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    Late,
    Peer,
    Host,
}

/// What a device told before it gave up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) cause: Cause,
    pub(crate) peer: u32,
    pub(crate) message: u32,
    pub(crate) channel: u32,
}

/// One rank's part, and its view of all.
#[derive(Debug)]
pub(crate) struct Window {
    /// All ranks' parts, the first rank's first.
    all: BufferView,
    /// What its device and its host tell each other.
    host: BufferView,
}

impl Window {
    /// Makes this rank's part, which gives a peer up after `limit`, and exchanges it for those of the others.
    pub(crate) fn exchange(
        group: &Group,
        device: &Arc<dyn Device>,
        limit: Duration,
        deadline: Deadline,
    ) -> Result<Self, CommError> {
        let made = Own::new(device, limit, deadline);
        // Whoever has none sends none, and nobody is to wait for it.
        let told = made.as_ref().map(|_| ()).map_err(ToString::to_string);
        group.confirm("part of a window", told.as_ref().copied().map_err(String::as_str), deadline)?;
        let Own { part, host, sharing } = made?;
        let export = || Ok::<_, CommError>(sharing.export(part.as_ref())?);
        for to in Rank::all(group.size()).filter(|to| *to != group.rank()) {
            let memory = export()?;
            let uuid = memory.device;
            group.send_descriptors(to, &[memory.descriptor.as_fd()], uuid.as_bytes(), deadline)?;
        }
        let mut parts = Vec::with_capacity(group.size() as usize);
        for from in Rank::all(group.size()) {
            parts.push(if from == group.rank() { export()? } else { receive(group, from, deadline)? });
        }
        Ok(Self { all: BufferView::whole(sharing.import_window(parts)?), host })
    }

    /// The parts of ranks that are all on one device, each as one rank sees it.
    #[cfg(feature = "__loopback")]
    pub(crate) fn on_one_device(
        device: &Arc<dyn Device>,
        ranks: u32,
        limit: Duration,
        deadline: Deadline,
    ) -> Result<Vec<Self>, CommError> {
        let all = BufferView::whole(device.allocate(&BufferDesc::device(PART * u64::from(ranks)))?);
        let of_rank = |rank: u64| {
            let host = BufferView::whole(device.allocate(&BufferDesc::host_visible(4096))?);
            let part = all.slice(rank * PART..(rank + 1) * PART);
            let part = part.map_err(|error| CommError::Call(error.into()))?;
            write_limit(device, &part, &host, limit, deadline)?;
            Ok(Self { all: all.clone(), host })
        };
        (0..u64::from(ranks)).map(of_rank).collect()
    }

    pub(crate) const fn all(&self) -> &BufferView {
        &self.all
    }

    pub(crate) const fn host(&self) -> &BufferView {
        &self.host
    }

    /// Has kernels end that wait, and those that come. It takes up to a millisecond.
    pub(crate) fn end(&self) {
        let word = self.host.slice(ENDED_AT as u64..ENDED_AT as u64 + 4);
        let written = word.and_then(|word| word.write(&1_u32.to_ne_bytes()));
        if let Err(error) = written {
            tracing::error!(%error, "a window has no word for its end");
        }
    }

    /// Why the device has given up, if it has.
    pub(crate) fn told(&self) -> Option<Told> {
        let word = |at: u64| {
            let mut bytes = [0; 4];
            self.host.slice(at * 4..at * 4 + 4).and_then(|word| word.read(&mut bytes)).ok()?;
            Some(u32::from_ne_bytes(bytes))
        };
        // The device writes the cause behind the rest.
        let cause = match word(0)? {
            1 => Cause::Late,
            2 => Cause::Peer,
            3 => Cause::Host,
            _ => return None,
        };
        Some(Told { cause, peer: word(1)?, message: word(2)?, channel: word(3)? })
    }
}

impl Drop for Window {
    /// Whatever still waits on the device waits for nobody any more.
    fn drop(&mut self) {
        self.end();
    }
}

/// What a rank has before it knows of the others.
struct Own<'a> {
    part: Arc<dyn Buffer>,
    host: BufferView,
    sharing: &'a dyn Sharing,
}

impl<'a> Own<'a> {
    fn new(device: &'a Arc<dyn Device>, limit: Duration, deadline: Deadline) -> Result<Self, CommError> {
        let missing = || CommError::NoEngine { reason: format!("{} shares no memory", device.info().id) };
        let sharing = device.sharing().ok_or_else(missing)?;
        let part = sharing.allocate_shareable(PART)?;
        let host = BufferView::whole(device.allocate(&BufferDesc::host_visible(4096))?);
        write_limit(device, &BufferView::whole(Arc::clone(&part)), &host, limit, deadline)?;
        Ok(Self { part, host, sharing })
    }
}

/// Writes it into a part by way of the host's words, which nobody uses yet.
fn write_limit(
    device: &Arc<dyn Device>,
    part: &BufferView,
    host: &BufferView,
    limit: Duration,
    deadline: Deadline,
) -> Result<(), CommError> {
    let range = |error: RangeError| CommError::Call(error.into());
    let nanoseconds = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
    let window = host.slice(0..8).map_err(range)?;
    window.write(&nanoseconds.to_ne_bytes()).map_err(range)?;
    let place = part.slice(LIMIT_AT..LIMIT_AT + 8).map_err(range)?;
    let written = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
    let queue = device.create_queue(&QueueDesc::default())?;
    let ops = [Op::Copy(CopyRegion::new(&window, &place).map_err(range)?)];
    queue.submit(&Submission { waits: &[], ops: &ops, signals: std::slice::from_ref(&written) })?;
    written.wait(deadline).map_err(|error| match error {
        WaitError::Failed(failure) => CommError::Failed(failure),
        _ => CommError::Timeout { number: 0, op: "the making of a window".to_owned() },
    })?;
    window.write(&[0; 8]).map_err(range)
}

/// Another rank's part.
fn receive(group: &Group, from: Rank, deadline: Deadline) -> Result<SharedMemory, CommError> {
    let parcel = group.receive_descriptors(from, deadline)?;
    let wrong = || CommError::NoEngine { reason: format!("rank {from} sent no part of a window") };
    let uuid = <[u8; 16]>::try_from(parcel.bytes.as_slice()).map_err(|_| wrong())?;
    let descriptor = parcel.descriptors.into_iter().next().ok_or_else(wrong)?;
    Ok(SharedMemory { device: DeviceUuid::from_bytes(uuid), size: PART, descriptor })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::form::MOST_RANKS;

    #[test]
    fn slots_fill_a_part_and_no_more() {
        for ranks in 2..=MOST_RANKS {
            let slots = u64::from(CHANNELS) * SLOTS * u64::from(ranks);
            let used = LINES_AT + slots * lines(ranks) * LINE;
            assert!(used <= BARE_AT && BARE_AT - used < slots * LINE);
            let bare = BARE_AT + slots * bare_lines(ranks) * LINE / 2;
            assert!(bare <= PART && PART - bare < slots * LINE / 2);
        }
        assert_eq!((lines(2), lines(4), lines(16)), (2040, 1020, 255));
        assert_eq!((bare_lines(2), bare_lines(4), bare_lines(16)), (8192, 4096, 1024));
    }
}
