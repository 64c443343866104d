//! What Vulkan devices need, and what each of them can do.

use std::sync::Arc;

use warpweft::{
    Backend as _, Bytes, Device, Features,
    vulkan::{Capabilities, VulkanBackend, VulkanConfig, loader_version},
};

use super::{
    Check,
    trial::{in_full, run_kernel, run_resident},
};

pub(super) fn checks() -> Vec<Check> {
    let loader = match loader_version(&VulkanConfig::default()) {
        Ok((major, minor, patch)) => Check::found("vulkan loader", format!("{major}.{minor}.{patch}")),
        Err(error) => return vec![Check::missing("vulkan", in_full(&error))],
    };
    let backend = match crate::vulkan::open(&VulkanConfig::default()) {
        Ok(backend) => backend,
        Err(error) => return vec![loader, Check::missing("vulkan driver", in_full(&error))],
    };
    let infos = backend.devices().unwrap_or_default();
    let devices: Vec<_> = infos.iter().map(|info| device(&backend, info.id.ordinal)).collect();
    // Where one works, the others need not.
    let any_works = devices.iter().any(|checks| checks.first().is_some_and(|check| check.found));
    let devices = devices.into_iter().flatten();
    let devices = devices.map(|check| if any_works && !check.found { check.optional() } else { check });
    let skipped = backend.skipped().iter().map(|reason| Check::missing("vulkan device", reason).optional());
    std::iter::once(loader).chain(devices).chain(skipped).collect()
}

/// Opens the device and has it work, rather than believe that it would.
fn device(backend: &VulkanBackend, ordinal: u32) -> Vec<Check> {
    let name = format!("vulkan:{ordinal}");
    let Some(capabilities) = backend.capabilities(ordinal) else { return Vec::new() };
    let facts = facts(capabilities);
    let device = match backend.open(ordinal, Features::HOST_VISIBLE_MEMORY) {
        Ok(device) => device,
        Err(error) => return vec![Check::missing(name, format!("{facts}; refused: {}", in_full(&error)))],
    };
    let works = match run_kernel(&device) {
        Ok(()) => Check::found(&name, format!("{facts}; ran a kernel")),
        Err(error) => Check::missing(&name, format!("{facts}; a kernel did not run: {}", in_full(&*error))),
    };
    let mut checks = vec![works];
    checks.extend(families(&name, &device));
    checks.extend(types(&name, capabilities));
    let residents = format!("{name} residents");
    checks.push(match run_resident(&device) {
        Ok(()) => Check::found(residents, "a kernel stayed, batch by batch, counted and left"),
        Err(error) => Check::missing(residents, in_full(&*error)).optional(),
    });
    checks
}

/// Name, driver with its version of Vulkan, kind and memory.
fn facts(capabilities: &Capabilities) -> String {
    let kind = if capabilities.is_software {
        "made of host threads".to_owned()
    } else {
        let unified = if capabilities.is_unified { ", memory of the host" } else { "" };
        format!("{}{unified}", capabilities.kind)
    };
    let Capabilities { name, driver, memory_bytes, .. } = capabilities;
    format!("{name}, {driver}, {kind}, {}", Bytes(*memory_bytes))
}

/// The optional families of the seam, and why others are absent.
fn families(name: &str, device: &Arc<dyn Device>) -> Vec<Check> {
    const FAMILIES: [(Features, &str, &str); 6] = [
        (Features::RESIDENT_KERNELS, "residents", "its driver has none"),
        (Features::GRAPHS, "graphs", "its driver has none"),
        (Features::TIMESTAMPS, "clock", "its timestamps do not count nanoseconds in 64 bits"),
        (Features::HOST_IMPORT, "host import", "its driver imports no host memory as buffers"),
        (Features::SHARED_MEMORY, "sharing", "its driver passes no memory as file descriptors"),
        (Features::LINK_FACTS, "link facts", "Vulkan tells nothing of links"),
    ];
    let (there, absent): (Vec<_>, Vec<_>) =
        FAMILIES.iter().partition(|(family, ..)| device.features().contains(*family));
    let names: Vec<&str> = there.iter().map(|(_, what, _)| *what).collect();
    let mut checks = vec![Check::found(format!("{name} families"), names.join(", "))];
    let why = |(_, what, why): &(_, &str, &str)| format!("{what}: {why}");
    checks
        .extend(absent.iter().map(|family| Check::missing(format!("{name} family"), why(family)).optional()));
    checks
}

/// Types and operations beyond 32 bits that kernels may use here.
fn types(name: &str, capabilities: &Capabilities) -> Vec<Check> {
    let all = [
        (capabilities.int64, "64-bit integers"),
        (capabilities.float64, "64-bit floats"),
        (capabilities.int16, "16-bit integers"),
        (capabilities.float16, "16-bit floats"),
        (capabilities.int64_atomics, "64-bit atomics"),
        (capabilities.float32_atomics, "float atomics"),
        (capabilities.subgroups, "subgroups"),
    ];
    let named = |wanted: bool| {
        let names: Vec<&str> = all.iter().filter(|(has, _)| *has == wanted).map(|(_, what)| *what).collect();
        names.join(", ")
    };
    let (has, lacks, what) = (named(true), named(false), format!("{name} shaders"));
    let there = (!has.is_empty()).then(|| Check::found(what.clone(), has));
    let absent = (!lacks.is_empty())
        .then(|| Check::missing(what, format!("{lacks}: kernels with them are refused")).optional());
    there.into_iter().chain(absent).collect()
}
