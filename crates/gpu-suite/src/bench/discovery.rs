//! How long it takes to find the devices and their links.

use anyhow::Result;
use serde_json::json;
use warpweft_core_types::{Backend as _, Features};
use warpweft_cuda::CudaBackend;

use super::samples::timed;
use crate::rig::{report, say};

/// The first backend of a process pays for `cuInit`, the second shows what is ours.
pub(crate) fn run() -> Result<()> {
    for title in ["with the driver's start", "after the driver's start"] {
        let mut backend = None;
        let finding = timed(|| {
            backend = Some(CudaBackend::new()?);
            Ok(())
        })?;
        let Some(backend) = backend else { continue };
        let devices = backend.devices()?.len();
        let opening = timed(|| {
            (0..u32::try_from(devices)?).try_for_each(|ordinal| {
                backend.open(ordinal, Features::empty())?.links().map(|links| links.facts());
                Ok(())
            })
        })?;
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        report(&json!({"discovery": title, "devices": devices, "found_ms": ms(finding),
            "opened_with_links_ms": ms(opening)}));
        say(&format!(
            "{title}: {devices} devices found in {:.1} ms, opened, with their links, in {:.1} ms",
            ms(finding),
            ms(opening)
        ));
        for note in backend.notes() {
            say(&note);
        }
    }
    links_alone()
}

/// Facts about links without opening a device twice: a backend of its own, whose library is asked anew.
fn links_alone() -> Result<()> {
    let backend = CudaBackend::new()?;
    let device = backend.open(0, Features::LINK_FACTS)?;
    let asking = timed(|| {
        device.links().map(|links| links.facts());
        Ok(())
    })?;
    report(&json!({"discovery": "facts about links", "ms": asking.as_secs_f64() * 1e3}));
    say(&format!("facts about links in {:.1} ms", asking.as_secs_f64() * 1e3));
    Ok(())
}
