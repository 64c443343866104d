//! Residents that do not last.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use warpweft_core_types::{Arg, BufferDesc, Launch, Op, ResidentDesc, ResidentError, Submission};

use crate::rig::{LIMIT, Rig};

/// The device is full for 100 ms and more, so a resident cannot begin.
pub(super) fn not_resident(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let family = bench.device.residents().context("residents")?;
    let (hold, brief) = (bench.kernel("hold")?, bench.kernel("brief")?);
    let (held, word) = (bench.allocate(BufferDesc::device(4))?, bench.allocate(BufferDesc::device(4))?);
    let ns = 60_000_000_u64.to_le_bytes();
    let args = [Arg::Buffer(&held), Arg::Scalar(&ns)];
    // 32 blocks fit on an SM.
    let full = [64 * bench.device.info().multiprocessors, 1, 1];
    let launch = Op::Launch(Launch::new(&hold, full, &args)?);
    let done = bench.point()?;
    bench.queue.submit(&Submission { waits: &[], ops: &[launch], signals: std::slice::from_ref(&done) })?;
    std::thread::sleep(Duration::from_millis(5));
    let args = [Arg::Buffer(&word)];
    let mut desc = ResidentDesc::new(Launch::new(&brief, [1, 1, 1], &args)?);
    desc.check_in = Duration::from_millis(20);
    let result = family.launch(&desc);
    ensure!(matches!(result, Err(ResidentError::NotResident { started: 0, wanted: 1, .. })), "{result:?}");
    done.wait(LIMIT)?;
    eventually("the budget to come back", || Ok(family.budget().used == 0))
}

pub(super) fn finished(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let family = bench.device.residents().context("residents")?;
    let (kernel, word) = (bench.kernel("brief")?, bench.allocate(BufferDesc::device(4))?);
    let args = [Arg::Buffer(&word)];
    let resident = family.launch(&ResidentDesc::new(Launch::new(&kernel, [1, 1, 1], &args)?))?;
    eventually("the resident to end", || Ok(resident.state().name() == "stopped"))?;
    ensure!(bench.read_word(&word)? == 3, "it served {} slices", bench.read_word(&word)?);
    ensure!(family.budget().used == 0, "the caller may start another at once");
    Ok(())
}

/// Looks until it is so, within the limit.
fn eventually(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !is_so()? {
        ensure!(start.elapsed() < LIMIT, "waited for {what}");
        std::thread::yield_now();
    }
    Ok(())
}
