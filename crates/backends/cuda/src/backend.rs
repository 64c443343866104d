//! The CUDA backend: the driver, and the devices it shows.

use std::{
    ffi::{CStr, c_char, c_int},
    fs, io,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use cudarc::driver::sys::{CUdevice, CUdevice_attribute as Attribute, CUuuid};
use warpweft_core_types::{
    Backend, Bytes, CodeFormat, Device, DeviceId, DeviceInfo, DeviceKind, DeviceUuid, DriverError, Features,
    OpenError, PciAddress, Residents as _,
};
use warpweft_polled::ReactorOwner;

use crate::{
    budget,
    cache::CubinCache,
    collectives::Library,
    compiler::Compiler,
    config::CudaConfig,
    context::{Context, NativeContext, left},
    device::{CudaDevice, Facts, Shared},
    driver::{Driver, version_text},
    links::LinkReport,
    peer::PeerTable,
    probe::{self, Probed},
};

/// The backend's name.
pub(crate) const NAME: &str = "cuda";

/// NVIDIA GPUs of this machine, as far as `CUDA_VISIBLE_DEVICES` shows them.
#[derive(Debug)]
pub struct CudaBackend {
    shared: Arc<Shared>,
    slots: Vec<Slot>,
}

/// A device that may be open.
#[derive(Debug)]
struct Slot {
    facts: Facts,
    open: Mutex<Weak<CudaDevice>>,
}

impl CudaBackend {
    /// Loads the driver and enumerates its devices. No context is created yet.
    ///
    /// # Errors
    ///
    /// [`OpenError::Unavailable`] that names what is missing and how to get it.
    pub fn new() -> Result<Self, OpenError> {
        Self::with_config(&CudaConfig::default())
    }

    /// The same with libraries that are named.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_config(config: &CudaConfig) -> Result<Self, OpenError> {
        let driver = Driver::open(config.driver.as_deref())?;
        let (cuda_major, _) = driver.version();
        let devices = enumerate(&driver).map_err(OpenError::Driver)?;
        let peers = PeerTable::ask(&driver, &devices).map_err(OpenError::Driver)?;
        let facts: Vec<Facts> = devices
            .iter()
            .zip(0..)
            .map(|(&device, ordinal)| facts_of(&driver, device, ordinal))
            .collect::<Result<_, _>>()
            .map_err(OpenError::Driver)?;
        let no_thread =
            |error: io::Error| OpenError::NoThread { what: NAME.to_owned(), reason: error.to_string() };
        let reactor = ReactorOwner::start("cuda/reactor").map_err(no_thread)?;
        let shared = Shared {
            driver,
            peers: Arc::new(peers),
            links: LinkReport::new(config.management_library()),
            compiler: config.nvrtc.as_ref().map_or_else(|| Compiler::find_at_most(cuda_major), Compiler::at),
            infos: facts.iter().map(|facts| facts.info.clone()).collect(),
            reactor,
            cache: config.cache.clone().map_or_else(CubinCache::of_environment, CubinCache::at),
            open: Mutex::default(),
            nccl: Library::new(config.nccl.clone(), config.driver.is_some()),
            budgets: facts
                .iter()
                .map(|facts| Arc::new(budget::of_device(facts.info.multiprocessors)))
                .collect(),
        };
        let slots = facts.into_iter().map(|facts| Slot { facts, open: Mutex::default() }).collect();
        Ok(Self { shared: Arc::new(shared), slots })
    }

    /// The newest CUDA version the driver speaks, as major and minor.
    pub fn driver_version(&self) -> (u32, u32) {
        self.shared.driver.version()
    }

    /// What was found out about links, a line for each device, and why if it is less than usual: for people
    /// who wonder about a figure, and not to be relied on by programs.
    pub fn notes(&self) -> Vec<String> {
        match self.shared.links.get(self.shared.driver.origin) {
            Ok(report) => report.notes(&self.shared.infos),
            Err(reason) => vec![format!("how devices are linked is not known: {reason}")],
        }
    }

    /// A device in a context that another library made, instead of the primary one that [`Backend::open`]
    /// shares with most libraries.
    ///
    /// Its memory and streams are that context's own: another device of the same GPU does not use them.
    ///
    /// # Errors
    ///
    /// [`OpenError::InvalidConfig`] for a handle of another kind or device, [`OpenError::Unsupported`] for
    /// features the device lacks.
    pub fn open_context(
        &self,
        context: NativeContext,
        required: Features,
    ) -> Result<Arc<dyn Device>, OpenError> {
        let context = context.enter(&self.shared.driver)?;
        let slot = self.slots.iter().find(|slot| slot.facts.device == context.device);
        let unknown = || OpenError::InvalidConfig { reason: "the context is of no known device".to_owned() };
        let slot = slot.ok_or_else(unknown)?;
        self.require(slot, required)?;
        let context = Context::foreign(&self.shared.driver, slot.facts.info.id, context)?;
        if required.contains(Features::COLLECTIVES) && !context.is_primary() {
            let (device, missing) = (slot.facts.info.id, Features::COLLECTIVES);
            return Err(OpenError::Unsupported { device, missing });
        }
        Ok(CudaDevice::open(&self.shared, &slot.facts, context)?)
    }

    /// Finds out on this driver which calls wait for kernels that stay on a device. It takes about a second, and
    /// keeps the device busy meanwhile.
    ///
    /// # Errors
    ///
    /// As [`Backend::open`], [`OpenError::InvalidConfig`] while residents run there, and the driver's words if a
    /// call fails.
    pub fn probe_resident(&self, ordinal: u32) -> Result<Vec<Probed>, OpenError> {
        let opened = self.open(ordinal, Features::RESIDENT_KERNELS)?;
        let unknown = || OpenError::InvalidConfig { reason: "it is no device of this backend".to_owned() };
        let device = CudaDevice::of_shared(&opened).ok_or_else(unknown)?;
        if device.budget().used > 0 {
            let reason = "residents run on the device; stop them first".to_owned();
            return Err(OpenError::InvalidConfig { reason });
        }
        probe::run(&device).map_err(|error| match opened.failure() {
            Some(failure) => OpenError::Failed(failure),
            None => self.shared.driver.unavailable(format!("a call for the trial: {error}")),
        })
    }

    fn require(&self, slot: &Slot, required: Features) -> Result<(), OpenError> {
        let mut features = slot.facts.features(&self.shared.peers);
        // Looked for if it is asked for.
        if required.contains(Features::COLLECTIVES) {
            features.set(Features::COLLECTIVES, self.shared.nccl.is_there());
        }
        match required - features {
            missing if missing.is_empty() => Ok(()),
            missing => Err(OpenError::Unsupported { device: slot.facts.info.id, missing }),
        }
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, OpenError> {
        Ok(self.shared.infos.clone())
    }

    fn open(&self, ordinal: u32, required: Features) -> Result<Arc<dyn Device>, OpenError> {
        let slot = self.slots.get(ordinal as usize).ok_or_else(|| OpenError::UnknownDevice {
            backend: NAME,
            ordinal,
            device_count: u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
        })?;
        if self.shared.driver.origin.is_left() {
            return Err(OpenError::Failed(left(slot.facts.info.id)));
        }
        self.require(slot, required)?;
        let mut open = slot.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.upgrade() {
            return Ok(device);
        }
        let context = Context::retain(&self.shared.driver, slot.facts.info.id, slot.facts.device)?;
        let device = CudaDevice::open(&self.shared, &slot.facts, context)?;
        *open = Arc::downgrade(&device);
        Ok(device)
    }
}

#[expect(unsafe_code, reason = "asks the driver")]
fn enumerate(driver: &Driver) -> Result<Vec<CUdevice>, DriverError> {
    let mut count: c_int = 0;
    // SAFETY: one integer is written to this stack frame.
    unsafe { driver.device_get_count(&mut count) }?;
    (0..count)
        .map(|ordinal| {
            let mut device: CUdevice = 0;
            // SAFETY: as above.
            unsafe { driver.device_get(&mut device, ordinal) }?;
            Ok(device)
        })
        .collect()
}

fn facts_of(driver: &Driver, device: CUdevice, ordinal: u32) -> Result<Facts, DriverError> {
    let ask = |attribute: Attribute| attribute_of(driver, device, attribute);
    let pci = PciAddress {
        domain: ask(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
        bus: u8::try_from(ask(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?).unwrap_or(u8::MAX),
        device: u8::try_from(ask(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?).unwrap_or(u8::MAX),
        function: 0,
    };
    let info = DeviceInfo {
        id: DeviceId { backend: NAME, ordinal, uuid: uuid_of(driver, device)? },
        name: name_of(driver, device)?,
        kind: DeviceKind::Gpu,
        driver: version_text(driver.version()),
        memory: memory_of(driver, device)?,
        multiprocessors: ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        compute_capability: Some((
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        )),
        pci: Some(pci),
        numa_node: numa_node_of(pci),
        code_formats: vec![CodeFormat::Cubin, CodeFormat::Ptx, CodeFormat::CudaC],
    };
    Ok(Facts {
        info,
        device,
        workgroup_threads: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        workgroups: [
            ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?,
            ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?,
            ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)?,
        ],
        shared_bytes: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        shares_memory: cfg!(unix)
            && ask(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)? != 0,
        has_timeout: ask(Attribute::CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT)? != 0,
        is_coherent: ask(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)? != 0,
    })
}

/// A count or flag of a device.
#[expect(unsafe_code, reason = "asks the driver")]
fn attribute_of(driver: &Driver, device: CUdevice, attribute: Attribute) -> Result<u32, DriverError> {
    let mut value: c_int = 0;
    // SAFETY: the device was enumerated; one integer is written to this stack frame.
    unsafe { driver.device_get_attribute(&mut value, attribute as c_int, device) }?;
    Ok(u32::try_from(value).unwrap_or(0))
}

#[expect(unsafe_code, reason = "asks the driver")]
fn uuid_of(driver: &Driver, device: CUdevice) -> Result<DeviceUuid, DriverError> {
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: the device was enumerated; 16 bytes are written to this stack frame.
    unsafe { driver.device_get_uuid(&mut uuid, device) }?;
    Ok(DeviceUuid::from_bytes(uuid.bytes.map(|byte| byte.to_ne_bytes()[0])))
}

#[expect(unsafe_code, reason = "asks the driver")]
fn name_of(driver: &Driver, device: CUdevice) -> Result<String, DriverError> {
    let mut name = [0_u8; 256];
    // SAFETY: the device was enumerated; at most 256 bytes, a zero among them, are written to this frame.
    unsafe { driver.device_get_name(name.as_mut_ptr().cast::<c_char>(), 256, device) }?;
    let text = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy);
    Ok(text.map_or_else(|_| String::new(), std::borrow::Cow::into_owned))
}

#[expect(unsafe_code, reason = "asks the driver")]
fn memory_of(driver: &Driver, device: CUdevice) -> Result<Bytes, DriverError> {
    let mut bytes = 0_usize;
    // SAFETY: the device was enumerated; one integer is written to this stack frame.
    unsafe { driver.device_total_mem(&mut bytes, device) }?;
    Ok(Bytes::of_len(bytes))
}

/// What the system says, if it does: the driver of old does not.
fn numa_node_of(pci: PciAddress) -> Option<u32> {
    // Anything that is not a count, such as the -1 of machines with one node, is no answer.
    fs::read_to_string(format!("/sys/bus/pci/devices/{pci}/numa_node")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_either_has_the_driver_or_is_told_what_is_missing() {
        match CudaBackend::new() {
            Ok(backend) => assert!(!backend.devices().unwrap().is_empty()),
            Err(error) => {
                assert!(matches!(error, OpenError::Unavailable { backend: "cuda", .. }), "{error:?}");
                assert!(error.to_string().contains("NVIDIA"), "{error}");
            }
        }
    }
}
