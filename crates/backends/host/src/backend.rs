//! The host backend: devices that exist because the program asked for them.

use std::sync::{
    Arc, Mutex, PoisonError, Weak,
    atomic::{AtomicU64, Ordering},
};

use warpweft_core_types::{Backend, Device, DeviceId, DeviceInfo, DeviceUuid, Features, OpenError};

use crate::{
    config::{HostBuilder, HostDeviceConfig, LinkSpec},
    device::{self, HostDevice},
    link::LinkTable,
    memory::Arena,
};

/// The backend's name.
const NAME: &str = "host";

/// CPU devices in this process.
#[derive(Debug)]
pub struct HostBackend {
    slots: Vec<Slot>,
    links: Arc<LinkTable>,
}

/// A device that may be open.
#[derive(Debug)]
struct Slot {
    info: DeviceInfo,
    config: HostDeviceConfig,
    /// Lives as long as the backend or any buffer, so that closing a device does not forget its memory.
    arena: Arc<Arena>,
    open: Mutex<Weak<HostDevice>>,
}

impl HostBackend {
    /// Starts a description of devices and links.
    pub fn builder() -> HostBuilder {
        HostBuilder::default()
    }

    /// `count` equal devices, each linked with every other and with host memory.
    ///
    /// # Errors
    ///
    /// [`OpenError::InvalidConfig`] for a count of 0, or above 1,024.
    pub fn with_devices(count: u32) -> Result<Self, OpenError> {
        Self::builder()
            .devices(count, &HostDeviceConfig::default())
            .link_all_devices(LinkSpec::default())
            .link_all_to_host(LinkSpec::default())
            .build()
    }

    pub(crate) fn new(builder: HostBuilder) -> Self {
        let instance = next_instance();
        let ids: Vec<DeviceId> = builder
            .devices
            .iter()
            .zip(0..)
            .map(|(config, ordinal)| DeviceId {
                backend: NAME,
                ordinal,
                uuid: config.uuid.unwrap_or_else(|| derived_uuid(instance, ordinal)),
            })
            .collect();
        let links = Arc::new(LinkTable::new(&builder, ids.clone()));
        let slots = ids
            .into_iter()
            .zip(builder.devices)
            .map(|(id, config)| Slot {
                info: device::info(id, &config),
                arena: Arc::new(Arena::new(id, config.memory)),
                config,
                open: Mutex::default(),
            })
            .collect();
        Self { slots, links }
    }
}

impl Backend for HostBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, OpenError> {
        Ok(self.slots.iter().map(|slot| slot.info.clone()).collect())
    }

    fn open(&self, ordinal: u32, required: Features) -> Result<Arc<dyn Device>, OpenError> {
        let slot = self.slots.get(ordinal as usize).ok_or_else(|| OpenError::UnknownDevice {
            backend: NAME,
            ordinal,
            device_count: u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
        })?;
        let missing = required - device::features(slot.info.id, &slot.config, &self.links);
        if !missing.is_empty() {
            return Err(OpenError::Unsupported { device: slot.info.id, missing });
        }
        let mut open = slot.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.upgrade() {
            return Ok(device);
        }
        let device = HostDevice::open(&slot.info, &slot.config, &slot.arena, &self.links)?;
        *open = Arc::downgrade(&device);
        Ok(device)
    }
}

fn next_instance() -> u64 {
    static INSTANCES: AtomicU64 = AtomicU64::new(0);
    INSTANCES.fetch_add(1, Ordering::Relaxed)
}

/// Equal in every run of a program that makes its backends in the same order.
fn derived_uuid(instance: u64, ordinal: u32) -> DeviceUuid {
    let mut bytes = *b"host\0\0\0\0\0\0\0\0\0\0\0\0";
    bytes[4..12].copy_from_slice(&instance.to_be_bytes());
    bytes[12..].copy_from_slice(&ordinal.to_be_bytes());
    DeviceUuid::from_bytes(bytes)
}
