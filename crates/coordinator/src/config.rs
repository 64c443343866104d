//! How many kernels devices take, and how they are chosen by default.

use std::{collections::HashMap, time::Duration};

use warpweft_core_types::DeviceUuid;
use warpweft_topology::Topology;

use crate::{CoordinatorError, Strategy};

/// How a coordinator decides.
#[derive(Debug, Clone)]
pub struct CoordinatorConfig {
    /// Kernels a piece of silicon takes, through all backends together; at least 1.
    pub kernels_per_device: u32,
    /// Other limits for some of them; 0 keeps a device free of kernels.
    pub limits: HashMap<DeviceUuid, u32>,
    /// How a device is chosen when the request does not say.
    pub strategy: Strategy,
    /// Free memory older than this is asked of the driver again before it decides anything.
    pub memory_max_age: Duration,
    /// The machine, if it is known better than by what devices report of their links.
    pub topology: Option<Topology>,
}

impl Default for CoordinatorConfig {
    /// 64 kernels a device, the least loaded one first, memory figures of at most 100 ms of age.
    fn default() -> Self {
        Self {
            kernels_per_device: 64,
            limits: HashMap::new(),
            strategy: Strategy::default(),
            memory_max_age: Duration::from_millis(100),
            topology: None,
        }
    }
}

impl CoordinatorConfig {
    pub(crate) fn check(&self) -> Result<(), CoordinatorError> {
        if self.kernels_per_device == 0 {
            let reason = "devices must take at least one kernel".to_owned();
            return Err(CoordinatorError::InvalidConfig { reason });
        }
        Ok(())
    }

    pub(crate) fn limit(&self, uuid: DeviceUuid) -> u32 {
        self.limits.get(&uuid).copied().unwrap_or(self.kernels_per_device)
    }
}
