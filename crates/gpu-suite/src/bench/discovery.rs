//! How long it takes to find the devices and their links, in processes that have not done so before.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{json, to_value};
use warpweft_core_types::{Backend as _, Features};
use warpweft_cuda::CudaBackend;

use super::{
    raw,
    samples::{Samples, judge, timed},
};
use crate::{
    process::{output_within, this_program, words},
    rig::{report, say},
};

/// Processes that are started.
const PROCESSES: usize = 9;

/// One of them.
const LIMIT: Duration = Duration::from_secs(30);

/// What one process took, in microseconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Took {
    devices: usize,
    /// `cuInit`, the driver's own start.
    driver_us: f64,
    /// Finding the devices, which asks the driver alone.
    finding_us: f64,
    /// What NVML says of their links, its start included.
    nvml_us: f64,
    /// Opening every device, with its context and kernels of ours.
    opening_us: f64,
}

/// The other process: everything once, cold.
pub(crate) fn discover() -> Result<()> {
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let driver_us = us(timed(raw::initialise)?);
    let (mut backend, mut notes) = (None, Vec::new());
    let finding_us = us(timed(|| {
        backend = Some(CudaBackend::new()?);
        Ok(())
    })?);
    let backend = backend.context("it was found just now")?;
    let nvml_us = us(timed(|| {
        notes = backend.notes();
        Ok(())
    })?);
    let devices = backend.devices()?.len();
    let opening_us = us(timed(|| {
        (0..u32::try_from(devices)?).try_for_each(|ordinal| {
            let device = backend.open(ordinal, Features::LINK_FACTS)?;
            device.links().map(|links| links.facts()).context("links").map(drop)
        })
    })?);
    report(&to_value(Took { devices, driver_us, finding_us, nvml_us, opening_us })?);
    notes.iter().for_each(|note| say(note));
    Ok(())
}

pub(super) fn run() -> Result<()> {
    let [mut driver, mut finding, mut nvml, mut opening, mut discovery] =
        [(); 5].map(|()| Samples::default());
    let (mut devices, mut notes) = (0, String::new());
    for _ in 0..PROCESSES {
        let output = output_within(&mut this_program(&["child", "discover"]), LIMIT)?;
        ensure!(output.status.success(), "{}", words(&output));
        let took: Took = serde_json::from_slice(&output.stdout)?;
        let of = |us: f64| Duration::from_secs_f64(us / 1e6);
        driver.add(of(took.driver_us));
        finding.add(of(took.finding_us));
        nvml.add(of(took.nvml_us));
        opening.add(of(took.opening_us));
        discovery.add(of(took.finding_us + took.nvml_us));
        (devices, notes) = (took.devices, words(&output));
    }
    say(&notes);
    for (what, samples) in [
        ("the driver's own start", &driver),
        ("finding the devices", &finding),
        ("facts about links, from NVML", &nvml),
        ("opening every device", &opening),
    ] {
        report(&json!({"discovery": what, "devices": devices, "time": samples.json()}));
        say(&format!("{what}: {}", samples.words()));
    }
    judge(&discovery.at_most(format!("discovery of {devices} devices and their links"), 100_000.0));
    Ok(())
}
