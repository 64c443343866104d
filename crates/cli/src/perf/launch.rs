//! Launch of an empty kernel and wait, on each device.

use std::{process::ExitCode, sync::Arc, time::Duration};

use serde::Serialize;
use warpweft::{Device, DeviceId, Launch, Op, QueueDesc, Runtime, SemaphorePoint, Submission};

use crate::{
    args::PerfLaunch,
    floor::FloorLaunch,
    kernels,
    measure::{Summary, interleave},
    output, select,
};

const TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize)]
struct Row {
    device: DeviceId,
    /// From the call of submit to the return of wait.
    launch_and_wait: Summary,
    /// The call of submit alone: what the calling thread pays, not when the kernel ran.
    submit: Summary,
    /// The driver's own launch, waited for, in the same rounds; nothing where there is no driver.
    raw_launch_and_wait: Option<Summary>,
    /// Median of the raw launch over the median of ours: 1 is as fast as the raw call.
    ratio: Option<f64>,
}

pub(crate) fn run(args: &PerfLaunch) -> anyhow::Result<ExitCode> {
    let mut builder = Runtime::builder();
    for backend in select::backends(&args.selection)? {
        builder = builder.shared_backend(backend);
    }
    let runtime = builder.build()?;
    if !args.json {
        output::title("Launch of an empty kernel, microseconds");
        output::line(
            "device        launch+wait p50      p99      min    submit p50      p99    raw p50  ratio",
        );
    }
    for device in runtime.devices() {
        let row = measure(device, args)?;
        if args.json {
            output::json(&row)?;
        } else {
            let us = |nanos: u64| nanos as f64 / 1e3;
            let (both, submit) = (&row.launch_and_wait, &row.submit);
            let raw = row
                .raw_launch_and_wait
                .as_ref()
                .map_or_else(|| "-".into(), |raw| format!("{:.2}", us(raw.p50_ns)));
            let ratio = row.ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
            output::line(format!(
                "{:<12} {:>16.2} {:>8.2} {:>8.2} {:>13.2} {:>8.2} {raw:>10} {ratio:>6}",
                row.device.to_string(),
                us(both.p50_ns),
                us(both.p99_ns),
                us(both.min_ns),
                us(submit.p50_ns),
                us(submit.p99_ns)
            ));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(device: &Arc<dyn Device>, args: &PerfLaunch) -> anyhow::Result<Row> {
    let kernel = device.load(&kernels::empty())?.kernel("empty")?;
    let floor = FloorLaunch::new(device, &kernel)?;
    let queue = device.create_queue(&QueueDesc::default())?;
    let semaphore = device.create_semaphore(0)?;
    let ops = [Op::Launch(Launch::new(&kernel, [1; 3], &[])?)];
    let mut value = 0;
    let mut submit = |waits_too: bool| -> anyhow::Result<()> {
        value += 1;
        let point = SemaphorePoint::new(&semaphore, value);
        queue.submit(&Submission { waits: &[], ops: &ops, signals: std::slice::from_ref(&point) })?;
        if waits_too {
            point.wait(TIMEOUT)?;
        }
        Ok(())
    };
    let mut ours = || submit(true);
    let mut raw = || floor.as_ref().map_or(Ok(()), FloorLaunch::run);
    let summaries = interleave(args.warmup, args.iterations, &mut [&mut ours, &mut raw])?;
    let [launch_and_wait, raw]: [Summary; 2] =
        summaries.try_into().map_err(|_| anyhow::anyhow!("two were measured"))?;
    // Between two timed submits the queue is emptied, outside the clock.
    let mut submits = Vec::with_capacity(args.iterations as usize);
    for _ in 0..args.iterations {
        let started = std::time::Instant::now();
        submit(false)?;
        submits.push(started.elapsed());
        submit(true)?;
    }
    let ratio = raw.p50_ns as f64 / launch_and_wait.p50_ns.max(1) as f64;
    Ok(Row {
        device: device.info().id,
        launch_and_wait,
        submit: Summary::of(&submits),
        ratio: floor.is_some().then_some(ratio),
        raw_launch_and_wait: floor.is_some().then_some(raw),
    })
}
