//! What NVIDIA GPUs need, and what each of them can do.

use std::sync::Arc;

use warpweft::{
    Backend as _, Device, Features, LinkClass, LinkEnd, LinkFact,
    cuda::{Compiler, CudaBackend, Probed},
    topology::Provenance,
};

use super::{
    Check,
    trial::{in_full, run_kernel, run_resident},
};

pub(super) fn checks(probe_resident: bool) -> Vec<Check> {
    let backend = match CudaBackend::new() {
        Ok(backend) => backend,
        Err(error) => return vec![Check::missing("cuda", in_full(&error))],
    };
    let mut checks = vec![driver(&backend)];
    match backend.devices() {
        Ok(infos) => {
            let ordinals = infos.iter().map(|info| info.id.ordinal);
            for ordinal in ordinals {
                checks.extend(device(&backend, ordinal));
                if probe_resident {
                    checks.extend(calls(&backend, ordinal));
                }
            }
        }
        Err(error) => checks.push(Check::missing("cuda devices", in_full(&error))),
    }
    checks.push(nvml(&backend));
    checks.push(compiler());
    checks
}

fn driver(backend: &CudaBackend) -> Check {
    let (major, minor) = backend.driver_version();
    Check::found("cuda driver", format!("speaks CUDA {major}.{minor}"))
}

/// Whether it is known how the devices are linked, and why not. Copies find their way without.
fn nvml(backend: &CudaBackend) -> Check {
    let notes = backend.notes().join("; ");
    if are_links_known(backend) {
        Check::found("nvml", notes)
    } else {
        Check::missing("nvml", notes).optional()
    }
}

/// Whether the medium of every link between devices is known, and from somebody who knows; of the links to the
/// host, where there are no others.
fn are_links_known(backend: &CudaBackend) -> bool {
    let infos = backend.devices().unwrap_or_default();
    let devices = infos.iter().filter_map(|info| backend.open(info.id.ordinal, Features::LINK_FACTS).ok());
    let facts: Vec<_> =
        devices.flat_map(|device| device.links().map(|links| links.facts())).flatten().collect();
    let is_known =
        |fact: &&LinkFact| fact.class != LinkClass::Unknown && fact.provenance != Provenance::Assumed;
    let is_of_host =
        |fact: &&LinkFact| [fact.from, fact.to].iter().any(|end| matches!(end, LinkEnd::Host { .. }));
    let (host, between): (Vec<_>, Vec<_>) = facts.iter().partition(is_of_host);
    let asked = if between.is_empty() { host } else { between };
    !asked.is_empty() && asked.iter().all(is_known)
}

/// Opens the device and has it work, rather than believe that it would.
fn device(backend: &CudaBackend, ordinal: u32) -> Vec<Check> {
    let name = format!("cuda:{ordinal}");
    let device = match backend.open(ordinal, Features::HOST_VISIBLE_MEMORY) {
        Ok(device) => device,
        Err(error) => return vec![Check::missing(name, in_full(&error))],
    };
    let info = device.info();
    let (major, minor) = info.compute_capability.unwrap_or_default();
    let facts = format!("{}, {}, compute capability {major}.{minor}", info.name, info.memory);
    let works = match run_kernel(&device) {
        Ok(()) => Check::found(&name, format!("{facts}; ran a kernel")),
        Err(error) => Check::missing(&name, format!("{facts}; a kernel did not run: {}", in_full(&*error))),
    };
    let mut checks = vec![works];
    checks.extend(peers(backend, &device));
    let residents = format!("{name} residents");
    checks.push(match run_resident(&device) {
        Ok(()) => Check::found(residents, "a kernel stayed, counted and left"),
        Err(error) => Check::missing(residents, in_full(&*error)).optional(),
    });
    checks
}

/// Which calls wait for kernels that stay, on this driver; missing is what this version does not know of.
fn calls(backend: &CudaBackend, ordinal: u32) -> Vec<Check> {
    let name = format!("cuda:{ordinal} call");
    let probed = match backend.probe_resident(ordinal) {
        Ok(probed) => probed,
        Err(error) => return vec![Check::missing(name, in_full(&error))],
    };
    let check = |probed: &Probed| {
        let took = format!("{:.2} ms", probed.took.as_secs_f64() * 1e3);
        let (call, name) = (probed.call, name.clone());
        match (probed.waits, probed.expected_to_wait) {
            (true, true) => {
                Check::found(name, format!("{call}: waits for residents, which give way ({took})"))
            }
            (false, true) => Check::found(name, format!("{call}: does not wait here, and might ({took})")),
            (false, false) => Check::found(name, format!("{call}: does not wait ({took})")),
            (true, false) => Check::missing(
                name,
                format!(
                    "{call}: waits for residents on this driver ({took}); make it inside `DeviceExt::foreign`"
                ),
            ),
        }
    };
    probed.iter().map(check).collect()
}

/// Which other devices this one reaches; nothing if it is alone.
fn peers(backend: &CudaBackend, device: &Arc<dyn Device>) -> Option<Check> {
    let own = device.info().id;
    let others: Vec<_> = backend.devices().ok()?.into_iter().filter(|info| info.id != own).collect();
    let reaches = |id| device.peers().is_some_and(|peers| peers.access(id).write);
    let (near, far): (Vec<_>, Vec<_>) = others.iter().map(|info| info.id).partition(|&id| reaches(id));
    let list =
        |ids: &[warpweft::DeviceId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let what = format!("{own} peers");
    match (near.as_slice(), far.as_slice()) {
        ([], []) => None,
        (_, []) => Some(Check::found(what, format!("reaches {}", list(&near)))),
        _ => Some(
            Check::missing(what, format!("does not reach {}; copies pass through host memory", list(&far)))
                .optional(),
        ),
    }
}

fn compiler() -> Check {
    match Compiler::find().load() {
        Ok(path) => Check::found("nvrtc", path.display().to_string()),
        Err(error) => {
            Check::missing("nvrtc", format!("needed for code in CUDA C only: {}", in_full(&error))).optional()
        }
    }
}
