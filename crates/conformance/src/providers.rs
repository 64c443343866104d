//! The devices the suite runs on.

use std::{
    cell::RefCell,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use warpweft_core_types::{Backend, Deadline, Device, Features, LinkClass, OpenError};
use warpweft_cuda::{CudaBackend, CudaConfig};
use warpweft_host::{HostBackend, HostDeviceConfig, LinkSpec};
use warpweft_stand_in_cuda::StandIn;
use warpweft_vulkan::{Messages, VulkanBackend, VulkanConfig};
use warpweft_wrappers::{FaultConfig, FaultyBackend, TracingBackend, ValidatingBackend};

use crate::{
    actors,
    context::PATIENCE,
    harness::{Opener, Provider},
};

/// Every provider, those first that are there on every machine.
pub(crate) fn all() -> Vec<Provider> {
    vec![
        host("host", || Ok(Arc::new(HostBackend::with_devices(8)?))),
        host("host, 3 workers", three_workers),
        host("host, chain", chain),
        host("host, delayed links", delayed_links),
        host("host, no host memory", no_host_memory),
        host("faulty host without faults", || {
            let inner = Arc::new(HostBackend::with_devices(4)?);
            Ok(Arc::new(FaultyBackend::new(inner, FaultConfig::default())))
        }),
        Provider {
            unsupported: &[(
                "comm::calls_are_ordered_with_other_work",
                "the planned engine submits a round when the last rank has called, after what is behind it in the \
                 queue of the first, which waits for a value that the host signals: the validator sees no order",
            )],
            ..host("validating host", || {
                Ok(Arc::new(ValidatingBackend::new(Arc::new(HostBackend::with_devices(4)?))))
            })
        },
        host("tracing host", || {
            Ok(Arc::new(TracingBackend::new(Arc::new(HostBackend::with_devices(4)?), 64)))
        }),
        Provider {
            loses_devices: true,
            ..host("host, failures apart", || Ok(Arc::new(HostBackend::with_devices(4)?)))
        },
        Provider::new("host + other host", "host", vec![two_hosts, two_hosts]),
        // A driver of its own for every run, so that a fault of one is nothing to the others.
        Provider::new("cuda, stand-in", "stand-in", vec![three_stand_in_gpus]),
        Provider::new("host + cuda, stand-in", "stand-in", vec![two_hosts, stand_in_gpus]),
        cuda("cuda", vec![gpus]),
        cuda("host + cuda", vec![two_hosts, gpus]),
        vulkan("vulkan", vec![four_vulkan]),
        vulkan("vulkan, unmapped", vec![two_unmapped_vulkan]),
        vulkan("host + vulkan", vec![two_hosts, two_vulkan]),
    ]
}

fn host(label: &'static str, open: Opener) -> Provider {
    Provider::new(label, "host", vec![open])
}

fn two_hosts() -> Result<Arc<dyn Backend>, OpenError> {
    Ok(Arc::new(HostBackend::with_devices(2)?))
}

/// NVIDIA GPUs, and perhaps others beside them.
fn cuda(label: &'static str, open: Vec<Opener>) -> Provider {
    static TURN: Mutex<()> = Mutex::new(());
    Provider {
        is_there: || CudaBackend::new().map(drop).map_err(|error| error.to_string()),
        turn: Some(&TURN),
        loses_devices: true,
        ..Provider::new(label, "cuda", open)
    }
}

/// Devices of whatever Vulkan driver the loader finds, checked by the validation layer where that is there.
fn vulkan(label: &'static str, open: Vec<Opener>) -> Provider {
    // The layer of 1.3.239 crashes where instances of several threads come and go.
    static TURN: Mutex<()> = Mutex::new(());
    Provider {
        turn: Some(&TURN),
        // Drivers that cannot be relied on are found when a device is opened.
        is_there: || {
            let opened = VulkanBackend::new().and_then(|backend| backend.open(0, Features::empty()));
            opened.map(drop).map_err(|error| error.to_string())
        },
        complaints,
        unsupported: &[(
            "kernel::a_failure_stays_in_its_queue",
            "a shader has no way to fail: Vulkan knows no traps, and an access out of bounds may take the process",
        )],
        ..Provider::new(label, "vulkan", open)
    }
}

fn four_vulkan() -> Result<Arc<dyn Backend>, OpenError> {
    validated(VulkanConfig::default().with_copies(4))
}

fn two_vulkan() -> Result<Arc<dyn Backend>, OpenError> {
    validated(VulkanConfig::default().with_copies(2))
}

/// Device memory that the host does not reach, as on discrete GPUs.
fn two_unmapped_vulkan() -> Result<Arc<dyn Backend>, OpenError> {
    validated(VulkanConfig::default().with_copies(2).with_unmapped_memory())
}

fn validated(config: VulkanConfig) -> Result<Arc<dyn Backend>, OpenError> {
    let backend = match VulkanBackend::with_config(&config.clone().with_validation()) {
        Ok(backend) => backend,
        // The layer is a package of its own.
        Err(OpenError::Unavailable { .. }) => VulkanBackend::with_config(&config)?,
        Err(error) => return Err(error),
    };
    MESSAGES.with_borrow_mut(|messages| messages.push(backend.messages()));
    Ok(Arc::new(backend))
}

thread_local! {
    /// What the validation layer says about the backends that this thread opened for its case.
    static MESSAGES: RefCell<Vec<Messages>> = const { RefCell::new(Vec::new()) };
}

/// What was said until the end: work under way keeps devices for a moment after a case.
fn complaints() -> Vec<String> {
    let messages = MESSAGES.take();
    let deadline = Deadline::within(PATIENCE);
    while !messages.iter().all(Messages::are_complete) {
        if deadline.is_past() {
            return vec!["a device was not closed".to_owned()];
        }
        std::thread::yield_now();
    }
    messages.iter().flat_map(Messages::all).collect()
}

/// The CUDA backend on a driver, and collectives on a library, that are made of host threads.
fn stand_in_gpus() -> Result<Arc<dyn Backend>, OpenError> {
    stand_ins(2)
}

/// More than two ranks do some things in another way.
fn three_stand_in_gpus() -> Result<Arc<dyn Backend>, OpenError> {
    stand_ins(3)
}

fn stand_ins(devices: u8) -> Result<Arc<dyn Backend>, OpenError> {
    let missing = |error: std::io::Error| OpenError::Unavailable {
        backend: "stand-in",
        missing: format!("{error}"),
        driver: None,
    };
    let driver = StandIn::load().map_err(missing)?.with("devices", &devices.to_string());
    // Without a C++ compiler there are no actors.
    let driver = match actors::actors_library() {
        Ok(library) => driver.with("library", &library.display().to_string()),
        Err(_) => driver,
    };
    let nccl = warpweft_stand_in_nccl::StandIn::load().map_err(missing)?;
    let nccl = nccl.with("driver", &driver.path().display().to_string());
    let config = CudaConfig::default().with_driver(driver.path()).without_cache().with_nccl(nccl.path());
    let backend = CudaBackend::with_config(&config)?;
    // It loads its NCCL now, whose file goes with the stand-in.
    backend.open(0, Features::COLLECTIVES)?;
    Ok(Arc::new(backend))
}

/// GPUs that stay open.
struct Gpus {
    backend: Arc<CudaBackend>,
    _devices: Vec<Arc<dyn Device>>,
}

/// The GPUs, opened once and kept: a context takes a seventh of a second to make.
fn gpus() -> Result<Arc<dyn Backend>, OpenError> {
    static OPEN: OnceLock<Gpus> = OnceLock::new();
    let gpus = match OPEN.get() {
        Some(gpus) => gpus,
        None => {
            let opened = open_gpus()?;
            OPEN.get_or_init(|| opened)
        }
    };
    Ok(Arc::clone(&gpus.backend) as Arc<dyn Backend>)
}

fn open_gpus() -> Result<Gpus, OpenError> {
    let backend = Arc::new(CudaBackend::new()?);
    let infos = backend.devices()?;
    let open = infos.iter().map(|info| backend.open(info.id.ordinal, Features::empty()));
    let devices = open.collect::<Result<_, _>>()?;
    Ok(Gpus { backend, _devices: devices })
}

/// Kernels and large copies are split between threads.
fn three_workers() -> Result<Arc<dyn Backend>, OpenError> {
    let config = HostDeviceConfig { workers: 3, ..HostDeviceConfig::default() };
    let link = LinkSpec::default();
    let builder = HostBackend::builder().devices(2, &config);
    Ok(Arc::new(builder.link_all_devices(link).link_all_to_host(link).build()?))
}

/// Devices in a row, each also linked with host memory, slowly.
fn chain() -> Result<Arc<dyn Backend>, OpenError> {
    let fast = LinkSpec::new(LinkClass::NvLink).with_cost(100.0, Duration::from_micros(1));
    let slow = LinkSpec::new(LinkClass::Pcie).with_cost(0.5, Duration::from_millis(1));
    let builder = HostBackend::builder().devices(4, &HostDeviceConfig::default());
    Ok(Arc::new(builder.link_chain(fast).link_all_to_host(slow).build()?))
}

/// Copies take time, so that everything is under way for longer.
fn delayed_links() -> Result<Arc<dyn Backend>, OpenError> {
    let link = LinkSpec::new(LinkClass::Pcie).with_cost(4.0, Duration::from_micros(300));
    let builder = HostBackend::builder().devices(4, &HostDeviceConfig::default());
    Ok(Arc::new(builder.link_all_devices(link).link_all_to_host(link).delay_links(true).build()?))
}

/// Without links to host memory, whole families are absent.
fn no_host_memory() -> Result<Arc<dyn Backend>, OpenError> {
    let builder = HostBackend::builder().devices(2, &HostDeviceConfig::default());
    Ok(Arc::new(builder.link_all_devices(LinkSpec::default()).build()?))
}
