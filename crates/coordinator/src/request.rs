//! What is asked of a placement, and how devices are compared.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};
use warpweft_core_types::{Bytes, DeviceId, Features};

use crate::KernelId;

/// How urgently a kernel is moved when its device is evacuated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MovePriority {
    /// Last.
    Low,
    /// In the order of placement.
    #[default]
    Normal,
    /// Before normal ones.
    High,
    /// First.
    Critical,
}

/// A kernel that wants a place. The default asks for nothing in particular.
#[derive(Debug, Clone, Default)]
pub struct PlacementRequest {
    /// Memory it will use.
    pub memory: Bytes,
    /// Features its device must have.
    pub features: Features,
    /// The least compute capability.
    pub compute_capability: Option<(u32, u32)>,
    /// The only backend it runs on, if it matters.
    pub backend: Option<String>,
    /// Kernels it talks to: [`Strategy::NearPeers`] wants to be close to them.
    pub peers: Vec<KernelId>,
    /// How urgently it moves when its device is evacuated.
    pub priority: MovePriority,
    /// How to choose, if not as the coordinator does by default.
    pub strategy: Option<Strategy>,
}

/// How one of the devices that fit is chosen.
///
/// A device fits if it is in service and healthy, meets the request's conditions, holds fewer kernels than it
/// may, and has the memory to spare. Ties go to the device with the smaller load (kernels in relation to its
/// limit), then to the one that was registered first.
#[derive(Debug, Clone, Default)]
pub enum Strategy {
    /// The one registered first.
    FirstAvailable,
    /// The one with the smallest load.
    #[default]
    LeastLoaded,
    /// The one registered after the one chosen last by this strategy, from the last back to the first.
    RoundRobin,
    /// The one with the most memory to spare.
    MostMemory,
    /// The one with the highest compute capability; one without any counts as lowest.
    ComputeCapability,
    /// The one with the cheapest links to and from the request's peers, added up. Devices without a path to
    /// some peer come last. Without peers it is [`Strategy::LeastLoaded`].
    NearPeers,
    /// The program's own choice.
    Custom(CustomStrategy),
}

/// A function that picks one of the candidates by its position, or none of them.
///
/// It runs without any lock of the coordinator and may ask it things. Its choice is checked again when it is
/// made; if the device was taken meanwhile, it is asked again.
#[derive(Clone)]
pub struct CustomStrategy(pub(crate) Arc<Choose>);

type Choose = dyn Fn(&[Candidate]) -> Option<usize> + Send + Sync;

impl fmt::Debug for CustomStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CustomStrategy")
    }
}

impl CustomStrategy {
    /// Wraps a function.
    pub fn new(choose: impl Fn(&[Candidate]) -> Option<usize> + Send + Sync + 'static) -> Self {
        Self(Arc::new(choose))
    }
}

/// A device that fits a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The device.
    pub device: DeviceId,
    /// Kernels on its silicon.
    pub kernels: u32,
    /// How many kernels the silicon takes.
    pub limit: u32,
    /// Memory it has to spare.
    pub spare: Bytes,
    /// Its compute capability.
    pub compute_capability: Option<(u32, u32)>,
    /// Nanoseconds to move 1 MiB to and from every peer of the request, added up; `None` without a path.
    pub peer_cost_ns: Option<u64>,
}
