//! Opening devices of several backends together.

use std::sync::Arc;

use warpweft_core_types::{Backend, Device, DeviceId, Features};
use warpweft_transfer::{Transfer, TransferConfig};

use crate::Error;

/// Open devices of any backends, and copies between all of them.
#[derive(Debug)]
pub struct Runtime {
    devices: Vec<Arc<dyn Device>>,
    transfer: Transfer,
}

/// Collects backends, then opens their devices.
#[derive(Debug)]
pub struct RuntimeBuilder {
    backends: Vec<Arc<dyn Backend>>,
    required: Features,
    transfer: TransferConfig,
}

impl Runtime {
    /// Starts without any backend.
    pub fn builder() -> RuntimeBuilder {
        RuntimeBuilder {
            backends: Vec::new(),
            required: Features::empty(),
            transfer: TransferConfig::default(),
        }
    }

    /// All devices, backend by backend in the order they were given, each in ordinal order.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    /// The device with this id, if it is open.
    pub fn device(&self, id: DeviceId) -> Option<&Arc<dyn Device>> {
        self.devices.iter().find(|device| device.info().id == id)
    }

    /// Copies between all devices.
    pub fn transfer(&self) -> &Transfer {
        &self.transfer
    }
}

impl RuntimeBuilder {
    /// Adds a backend; all its devices are opened.
    #[must_use]
    pub fn backend(self, backend: impl Backend + 'static) -> Self {
        self.shared_backend(Arc::new(backend))
    }

    /// Adds a backend that others use too.
    #[must_use]
    pub fn shared_backend(mut self, backend: Arc<dyn Backend>) -> Self {
        self.backends.push(backend);
        self
    }

    /// Requires every device to have these features.
    #[must_use]
    pub fn require(mut self, features: Features) -> Self {
        self.required |= features;
        self
    }

    /// Sets how copies are cut up.
    #[must_use]
    pub fn transfer_config(mut self, config: TransferConfig) -> Self {
        self.transfer = config;
        self
    }

    /// Opens the devices.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] for the first device that cannot be opened or lacks a required feature,
    /// [`Error::Transfer`] if copies between them cannot be set up.
    pub fn build(self) -> Result<Runtime, Error> {
        let mut devices = Vec::new();
        for backend in &self.backends {
            for info in backend.devices()? {
                devices.push(backend.open(info.id.ordinal, self.required)?);
            }
        }
        let transfer = Transfer::new(devices.iter().cloned(), self.transfer)?;
        Ok(Runtime { devices, transfer })
    }
}

#[cfg(test)]
mod tests {
    use warpweft_core_types::{ErrorClass, OpenError};
    use warpweft_host::{HostBackend, HostDeviceConfig};

    use super::*;

    #[test]
    fn devices_of_all_backends_come_in_order() {
        let runtime = Runtime::builder()
            .backend(HostBackend::with_devices(2).unwrap())
            .backend(HostBackend::with_devices(1).unwrap())
            .build()
            .unwrap();
        let ordinals: Vec<u32> = runtime.devices().iter().map(|device| device.info().id.ordinal).collect();
        assert_eq!(ordinals, [0, 1, 0]);
        for device in runtime.devices() {
            assert!(runtime.device(device.info().id).is_some_and(|found| Arc::ptr_eq(found, device)));
        }
    }

    #[test]
    fn a_missing_feature_is_found_before_anything_runs() {
        let island = HostBackend::builder().devices(1, &HostDeviceConfig::default()).build().unwrap();
        let error =
            Runtime::builder().backend(island).require(Features::HOST_VISIBLE_MEMORY).build().unwrap_err();
        assert!(matches!(error, Error::Open(OpenError::Unsupported { missing, .. })
            if missing == Features::HOST_VISIBLE_MEMORY));
        assert_eq!(error.class(), ErrorClass::Unsupported);
    }
}
