//! The devices copies run between, and which of them reach each other's memory.

use std::sync::Arc;

use warpweft_core_types::{Device, DeviceId, Features};

use crate::TransferError;

/// Open devices of any backends, each once.
#[derive(Debug)]
pub(crate) struct Devices(Vec<Arc<dyn Device>>);

impl Devices {
    pub(crate) fn new(devices: Vec<Arc<dyn Device>>) -> Result<Self, TransferError> {
        for (position, device) in devices.iter().enumerate() {
            let id = device.info().id;
            if devices[..position].iter().any(|earlier| earlier.info().id == id) {
                return Err(TransferError::DuplicateDevice { device: id });
            }
        }
        Ok(Self(devices))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<dyn Device>> {
        self.0.iter()
    }

    pub(crate) fn get(&self, id: DeviceId) -> Result<&Arc<dyn Device>, TransferError> {
        self.0.iter().find(|device| device.info().id == id).ok_or(TransferError::UnknownDevice { device: id })
    }

    /// Whether a queue of `from` writes to memory of `to`.
    pub(crate) fn pushes(&self, from: DeviceId, to: DeviceId) -> bool {
        self.peer(from, to).is_some_and(|access| access.write)
    }

    /// Whether a queue of `to` reads memory of `from`.
    pub(crate) fn pulls(&self, from: DeviceId, to: DeviceId) -> bool {
        self.peer(to, from).is_some_and(|access| access.read)
    }

    /// Whether one piece of host memory can be used by both.
    pub(crate) fn share_host_memory(&self, a: DeviceId, b: DeviceId) -> bool {
        let can = |device, feature| self.get(device).is_ok_and(|device| device.features().contains(feature));
        can(a, Features::HOST_VISIBLE_MEMORY) && can(b, Features::HOST_IMPORT)
    }

    fn peer(&self, own: DeviceId, other: DeviceId) -> Option<warpweft_core_types::PeerAccess> {
        if own.backend != other.backend {
            return None;
        }
        Some(self.get(own).ok()?.peers()?.access(other))
    }
}
