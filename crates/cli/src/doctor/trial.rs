//! What is tried on every device that has a driver.

use std::{error::Error, sync::Arc, time::Duration};

use warpweft::{
    Arg, BufferDesc, BufferView, CopyRegion, Deadline, Device, Launch, Op, QueueDesc, ResidentDesc,
    SemaphorePoint, Submission,
};

use crate::kernels::{self, WORDS_PER_GROUP, pattern_word};

const TIMEOUT: Duration = Duration::from_secs(10);

/// Words that the kernel writes.
const WORDS: u32 = 4 * WORDS_PER_GROUP;

/// Has the device work, rather than believe that it would.
pub(super) fn run_kernel(device: &Arc<dyn Device>) -> Result<(), Box<dyn Error>> {
    let bytes = u64::from(WORDS) * 4;
    let memory = BufferView::whole(device.allocate(&BufferDesc::device(bytes))?);
    let window = BufferView::whole(device.allocate(&BufferDesc::host_visible(bytes))?);
    let kernel = device.load(&kernels::pattern())?.kernel("pattern")?;
    let (words, seed) = (u64::from(WORDS).to_le_bytes(), 1_u32.to_le_bytes());
    let args = [Arg::Buffer(&memory), Arg::Scalar(&words), Arg::Scalar(&seed)];
    let launch = Launch::new(&kernel, [WORDS / WORDS_PER_GROUP, 1, 1], &args)?;
    let ops = [Op::Launch(launch), Op::Copy(CopyRegion::new(&memory, &window)?)];
    let queue = device.create_queue(&QueueDesc::default())?;
    let done = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
    queue.submit(&Submission { waits: &[], ops: &ops, signals: std::slice::from_ref(&done) })?;
    done.wait(TIMEOUT)?;
    let mut got = vec![0; usize::try_from(bytes)?];
    window.read(&mut got)?;
    let is_right = |(index, word): (usize, &[u8; 4])| u32::from_le_bytes(*word) == pattern_word(1, index);
    match got.as_chunks().0.iter().enumerate().all(is_right) {
        true => Ok(()),
        false => Err("its result is wrong".into()),
    }
}

/// Has a kernel stay for a while.
pub(super) fn run_resident(device: &Arc<dyn Device>) -> Result<(), Box<dyn Error>> {
    let turns = BufferView::whole(device.allocate(&BufferDesc::host_visible(4))?);
    let kernel = device.load(&kernels::beat())?.kernel("beat")?;
    let args = [Arg::Buffer(&turns)];
    let launch = Launch::new(&kernel, [1, 1, 1], &args)?;
    let family = device.residents().ok_or("the device has no residents")?;
    let resident = family.launch(&ResidentDesc::new(launch))?;
    let (deadline, mut word) = (Deadline::within(TIMEOUT), [0; 4]);
    // It has begun, and may not have counted before it is told to stop.
    while word == [0; 4] && !deadline.is_past() {
        turns.read(&mut word)?;
        std::thread::yield_now();
    }
    resident.stop(Deadline::within(TIMEOUT))?;
    if word == [0; 4] { Err("a resident ran and counted nothing".into()) } else { Ok(()) }
}

/// An error with its causes.
pub(super) fn in_full(error: &dyn Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(cause) => format!("{error}: {}", in_full(cause)),
    }
}
