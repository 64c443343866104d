//! The Vulkan backend: the loader, its drivers, and the devices they show.

use std::{
    fs,
    sync::{Arc, Mutex, PoisonError, Weak},
    thread,
};

use warpweft_core_types::{
    Backend, Bytes, Device, DeviceId, DeviceInfo, DeviceUuid, Features, MultiprocessorPool, OpenError,
    PciAddress,
};
use warpweft_polled::ReactorOwner;

use crate::{
    capability::{Capabilities, Physical},
    config::VulkanConfig,
    device::{Facts, VulkanDevice},
    instance::{Instance, Messages, NO_DRIVER, unavailable},
    memory::Used,
    module::FORMATS,
    queue::QueueCore,
    resident,
};

/// The backend's name.
pub(crate) const NAME: &str = "vulkan";

/// The Vulkan devices of this machine, those made of host threads last.
#[derive(Debug)]
pub struct VulkanBackend {
    slots: Vec<Slot>,
    skipped: Vec<String>,
    reactor: Arc<ReactorOwner<QueueCore>>,
    instance: Arc<Instance>,
}

/// A device that may be open.
#[derive(Debug)]
struct Slot {
    facts: Facts,
    open: Mutex<Weak<VulkanDevice>>,
}

impl VulkanBackend {
    /// Opens the loader and asks its drivers. No device is created yet.
    ///
    /// # Errors
    ///
    /// [`OpenError::Unavailable`] that names what is missing and how to get it.
    pub fn new() -> Result<Self, OpenError> {
        Self::with_config(&VulkanConfig::default())
    }

    /// The same with another loader, copies of devices, or validation.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`OpenError::InvalidConfig`] without copies.
    pub fn with_config(config: &VulkanConfig) -> Result<Self, OpenError> {
        if config.copies == 0 {
            return Err(OpenError::InvalidConfig {
                reason: "there must be a copy of each device".to_owned(),
            });
        }
        let instance = Instance::create(config)?;
        let (mut usable, mut skipped) = (Vec::new(), Vec::new());
        for device in instance.physical_devices()? {
            match Physical::ask(&instance, device) {
                Ok(physical) if usable.iter().any(|other| is_same(&physical, other)) => {
                    let name = &physical.capabilities.name;
                    skipped.push(format!(
                        "{name}: the loader lists it twice; is its driver named in two places?"
                    ));
                }
                Ok(physical) => usable.push(physical),
                Err(reason) => skipped.push(reason),
            }
        }
        if usable.is_empty() {
            let reasons: String = skipped.iter().map(|reason| format!("; {reason}")).collect();
            return Err(unavailable(format!("{NO_DRIVER}{reasons}")));
        }
        usable.sort_by_key(|physical| physical.capabilities.is_software);
        if config.unmapped {
            usable.iter_mut().for_each(|physical| physical.capabilities.is_unified = false);
        }
        let reactor = ReactorOwner::start("vulkan/reactor")
            .map_err(|error| OpenError::NoThread { what: NAME.to_owned(), reason: error.to_string() })?;
        Ok(Self { slots: slots(&usable, config.copies), skipped, reactor: Arc::new(reactor), instance })
    }

    /// What a device can do; `None` for one that is not there.
    pub fn capabilities(&self, ordinal: u32) -> Option<&Capabilities> {
        Some(&self.slots.get(ordinal as usize)?.facts.physical.capabilities)
    }

    /// What the validation layer says, where [`VulkanConfig::with_validation`] asked for it. The list goes on after the
    /// backend is gone, with what the layer says about its end.
    pub fn messages(&self) -> Messages {
        self.instance.messages()
    }

    /// Devices of the drivers' that cannot be used, each with the reason.
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }
}

impl Backend for VulkanBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, OpenError> {
        Ok(self.slots.iter().map(|slot| slot.facts.info.clone()).collect())
    }

    fn open(&self, ordinal: u32, required: Features) -> Result<Arc<dyn Device>, OpenError> {
        let slot = self.slots.get(ordinal as usize).ok_or_else(|| OpenError::UnknownDevice {
            backend: NAME,
            ordinal,
            device_count: u32::try_from(self.slots.len()).unwrap_or(u32::MAX),
        })?;
        let missing = required - slot.facts.features();
        if !missing.is_empty() {
            return Err(OpenError::Unsupported { device: slot.facts.info.id, missing });
        }
        let mut open = slot.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.upgrade() {
            return Ok(device);
        }
        let device = VulkanDevice::open(&self.instance, &self.reactor, &slot.facts)?;
        *open = Arc::downgrade(&device);
        Ok(device)
    }
}

/// Whether two entries of the loader's are one device of one driver.
fn is_same(one: &Physical, other: &Physical) -> bool {
    let id = |physical: &Physical| (physical.capabilities.device_uuid, physical.capabilities.driver_uuid);
    id(one) == id(other) && one.capabilities.name == other.capabilities.name
}

/// The devices of the seam: the first copy of each physical device, then the second ones, so that neighbours differ.
fn slots(usable: &[Physical], copies: u32) -> Vec<Slot> {
    let budget = |physical: &Physical| Arc::new(resident::budget(multiprocessors(&physical.capabilities)));
    let shared: Vec<_> =
        usable.iter().map(|physical| (Arc::new(Used::default()), budget(physical))).collect();
    let pairs = (0..copies).flat_map(|copy| usable.iter().zip(&shared).map(move |pair| (pair, copy)));
    let devices: Vec<_> = (0..)
        .zip(pairs)
        .map(|(ordinal, ((physical, shared), copy))| (physical, info(physical, ordinal, copy), shared))
        .collect();
    let within_reach = |own: &Physical, id: DeviceId| -> Vec<DeviceId> {
        let reaches = |other: &Physical| own.capabilities.shares_silicon(&other.capabilities);
        let others = devices.iter().filter(|(other, info, _)| info.id != id && reaches(other));
        others.map(|(_, info, _)| info.id).collect()
    };
    let slot = |(physical, info, (used, budget)): &(
        &Physical,
        DeviceInfo,
        &(Arc<Used>, Arc<MultiprocessorPool>),
    )| Slot {
        facts: Facts {
            within_reach: within_reach(physical, info.id),
            info: info.clone(),
            physical: (*physical).clone(),
            used: Arc::clone(used),
            budget: Arc::clone(budget),
        },
        open: Mutex::default(),
    };
    devices.iter().map(slot).collect()
}

fn info(physical: &Physical, ordinal: u32, copy: u32) -> DeviceInfo {
    let capabilities = &physical.capabilities;
    let software = if capabilities.is_software { " (software)" } else { "" };
    DeviceInfo {
        id: DeviceId { backend: NAME, ordinal, uuid: uuid_of_copy(capabilities.device_uuid, copy) },
        name: format!("{}{software}", capabilities.name),
        kind: capabilities.kind,
        driver: capabilities.driver.clone(),
        memory: Bytes(capabilities.memory_bytes),
        multiprocessors: multiprocessors(capabilities),
        compute_capability: None,
        pci: capabilities.pci,
        numa_node: capabilities.pci.and_then(numa_node_of),
        code_formats: FORMATS.to_vec(),
    }
}

/// The silicon's own id for the first copy, and one made of it for each other: devices differ by their ids.
fn uuid_of_copy(uuid: DeviceUuid, copy: u32) -> DeviceUuid {
    let mut bytes = *uuid.as_bytes();
    bytes.iter_mut().rev().zip(copy.to_le_bytes()).for_each(|(byte, part)| *byte ^= part);
    DeviceUuid::from_bytes(bytes)
}

/// What the driver tells, the machine's processors for a device made of threads, and 1 where nobody knows.
fn multiprocessors(capabilities: &Capabilities) -> u32 {
    let threads = || thread::available_parallelism().ok().and_then(|count| u32::try_from(count.get()).ok());
    let software = if capabilities.is_software { threads() } else { None };
    capabilities.multiprocessors.or(software).unwrap_or(1)
}

/// What the system says, if it does.
fn numa_node_of(pci: PciAddress) -> Option<u32> {
    // Anything that is not a count, such as the -1 of machines with one node, is no answer.
    fs::read_to_string(format!("/sys/bus/pci/devices/{pci}/numa_node")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_either_has_a_driver_or_is_told_what_is_missing() {
        match VulkanBackend::new() {
            Ok(backend) => assert!(!backend.devices().unwrap().is_empty()),
            Err(error) => {
                assert!(matches!(error, OpenError::Unavailable { backend: "vulkan", .. }), "{error:?}");
                assert!(error.to_string().contains("Vulkan"), "{error}");
            }
        }
    }

    #[test]
    fn copies_have_ids_of_their_own() {
        let uuid = DeviceUuid::from_bytes([7; 16]);
        assert_eq!(uuid_of_copy(uuid, 0), uuid);
        let ids: std::collections::HashSet<_> = (0..300).map(|copy| uuid_of_copy(uuid, copy)).collect();
        assert_eq!(ids.len(), 300);
    }
}
