//! Vulkan devices of this machine.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use serde_json::json;
use warpweft_core_types::{Backend as _, Device, DeviceInfo, Features};
use warpweft_vulkan::{VulkanBackend, VulkanConfig};

use crate::{
    kernels,
    process::{output_within, this_program, words},
    rig::{Bench, report, say},
};

/// Opening every device; software drivers compile for a while.
const LIMIT: Duration = Duration::from_secs(60);

/// Name and driver of each Vulkan device that opens, or why there is none. Another process looks: a driver that hangs or
/// crashes must not take this one along.
pub(crate) fn look() -> Result<Vec<String>> {
    let output = output_within(&mut this_program(&["child", "vulkan-devices"]), LIMIT)?;
    let said = words(&output);
    ensure!(output.status.success(), "{}", said.strip_prefix("error: ").unwrap_or(&said));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The other process.
pub(crate) fn tell() -> Result<()> {
    let backend = warpweft_cli::vulkan::open(&VulkanConfig::default())?;
    let (mut devices, mut refused) = (Vec::new(), Vec::new());
    for info in backend.devices()? {
        match backend.open(info.id.ordinal, Features::empty()) {
            Ok(_) => devices.push(described(&info)),
            Err(error) => refused.push(error.to_string()),
        }
    }
    if devices.is_empty() {
        bail!("{}", refused.join("; "));
    }
    report(&json!(devices));
    Ok(())
}

/// Name and driver of a device of any backend.
pub(crate) fn described(info: &DeviceInfo) -> String {
    format!("{} {}, {}", info.id, info.name, info.driver)
}

/// The first device that opens, with the kernels and a queue; GPUs come before devices made of host threads.
pub(crate) fn open() -> Result<(VulkanBackend, Bench)> {
    let backend = warpweft_cli::vulkan::open(&VulkanConfig::default())?;
    let mut refused = String::new();
    for info in backend.devices()? {
        match backend.open(info.id.ordinal, Features::empty()) {
            Ok(device) => {
                let bench = Bench::with(device, &kernels::vulkan())?;
                return Ok((backend, bench));
            }
            Err(error) => refused = format!("{refused}; {error}"),
        }
    }
    bail!("no device opens{refused}")
}

/// What the results are of.
pub(crate) fn describe(device: &dyn Device) {
    let info = device.info();
    report(&json!({"vulkan": info.driver, "device": info}));
    say(&described(info));
}
