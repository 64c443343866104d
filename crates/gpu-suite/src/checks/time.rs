//! Things that take time, and how it is told.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use warpweft_core_types::{Arg, BufferDesc, ClockModel, Deadline, Launch, Op, Submission, WaitError};

use super::interop::stepped;
use crate::rig::{LIMIT, Rig, report, say, submit_word};

pub(super) fn long_stream(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let (hold, step) = (bench.kernel("hold")?, bench.kernel("step")?);
    let (held, word) = (bench.allocate(BufferDesc::device(4))?, bench.allocate(BufferDesc::device(4))?);
    let queue = bench.new_queue()?;
    submit_word(queue.as_ref(), &hold, &held, &300_000_000_u64.to_le_bytes(), &[], &[])?;
    let one = 1_u32.to_le_bytes();
    let args = [Arg::Buffer(&word), Arg::Scalar(&one)];
    let launches = vec![Op::Launch(Launch::new(&step, [1, 1, 1], &args)?); 100];
    let done = bench.point()?;
    let start = Instant::now();
    for _ in 0..40 {
        queue.submit(&Submission { waits: &[], ops: &launches, signals: &[] })?;
    }
    queue.submit(&Submission { waits: &[], ops: &[], signals: std::slice::from_ref(&done) })?;
    let took = start.elapsed();
    done.wait(LIMIT)?;
    ensure!(bench.read_word(&word)? == stepped((0..4000).map(|_| 1)));
    ensure!(took < Duration::from_millis(150), "submitting took {took:?}");
    Ok(())
}

pub(super) fn long_kernel(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let (hold, held) = (bench.kernel("hold")?, bench.allocate(BufferDesc::device(4))?);
    let (queue, done) = (bench.new_queue()?, bench.point()?);
    let ns = 200_000_000_u64.to_le_bytes();
    submit_word(queue.as_ref(), &hold, &held, &ns, &[], std::slice::from_ref(&done))?;
    let (limit, start) = (Duration::from_millis(30), Instant::now());
    let early = done.wait(limit);
    ensure!(matches!(early, Err(WaitError::Timeout { .. })), "{early:?}");
    ensure!(start.elapsed() < limit + Duration::from_millis(20), "{:?}", start.elapsed());
    done.wait(LIMIT)?;
    ensure!(bench.read_word(&held)? == 1);
    Ok(())
}

/// How well times of the device are known, over two seconds.
pub(super) fn clock(rig: &Rig) -> Result<()> {
    for bench in &rig.devices {
        let clock = bench.device.clock().context("a clock")?;
        let sample = || clock.sample(Deadline::within(LIMIT)).map_err(|failure| anyhow::anyhow!("{failure}"));
        let mut samples = Vec::new();
        for _ in 0..20 {
            samples.push(sample()?);
            std::thread::sleep(Duration::from_millis(100));
        }
        let figures = ClockModel::fit(&samples).context("the clock stands still")?.report();
        report(&json!({"clock": bench.device.info().id, "figures": figures}));
        say(&format!("{}: {figures:?}", bench.device.info().id));
        ensure!(figures.error_ns < 50_000.0 && figures.drift_ppm.abs() < 1000.0, "{figures:?}");
    }
    Ok(())
}
