//! The coordinator: a registry behind a lock, and devices that are asked outside of it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use warpweft_core_types::{AllocError, Device, DeviceId, ErrorClass, LinkEnd, LinkFact};
use warpweft_topology::{NodeDesc, Topology};

use crate::{
    CoordinatorConfig, CoordinatorError, CoordinatorStats, CustomStrategy, DeviceReport, DeviceStatus,
    EvacuationPlan, KernelId, MoveId, PlacementRequest, Strategy, registry::Registry,
};

/// How often a custom strategy is asked again after its choice was taken by others.
const TRIES: u32 = 16;

/// Decides which device a kernel runs on, and knows which devices are in service.
///
/// It may be used from many threads; every decision is atomic. It starts, moves and stops nothing itself:
/// whoever does so tells it before and after.
#[derive(Debug)]
pub struct Coordinator {
    config: CoordinatorConfig,
    registry: Mutex<Registry>,
    /// Locked for moments only, and never while the registry is.
    devices: Mutex<HashMap<DeviceId, Known>>,
}

/// A registered device, and when its memory was last asked for.
#[derive(Debug, Clone)]
struct Known {
    device: Arc<dyn Device>,
    memory_asked: Instant,
}

impl Coordinator {
    /// A coordinator without devices.
    ///
    /// # Errors
    ///
    /// [`CoordinatorError::InvalidConfig`].
    pub fn new(config: CoordinatorConfig) -> Result<Self, CoordinatorError> {
        config.check()?;
        let mut registry = Registry::default();
        if let Some(topology) = &config.topology {
            registry.set_topology(topology.clone());
        }
        Ok(Self { config, registry: Mutex::new(registry), devices: Mutex::default() })
    }

    /// Takes a device into service, while others place kernels.
    ///
    /// # Errors
    ///
    /// [`CoordinatorError::AlreadyRegistered`], or [`CoordinatorError::WrongStatus`] for a device that is lost.
    pub fn register(&self, device: Arc<dyn Device>) -> Result<(), CoordinatorError> {
        let info = device.info().clone();
        let id = info.id;
        let memory = device.memory().map_err(|error| CoordinatorError::WrongStatus {
            device: id,
            status: DeviceStatus::Lost { reason: error.to_string() },
            action: "enter service",
        })?;
        let limit = self.config.limit(id.uuid);
        self.registry().register(info, device.features(), memory, limit)?;
        self.devices().insert(id, Known { device, memory_asked: Instant::now() });
        self.learn_links();
        Ok(())
    }

    /// Removes a device that holds no kernels, or a lost one.
    ///
    /// Returns the kernels that were on a lost device: they are gone.
    ///
    /// # Errors
    ///
    /// [`CoordinatorError::UnknownDevice`], or [`CoordinatorError::InUse`]: see [`Coordinator::evacuate`].
    pub fn unregister(&self, device: DeviceId) -> Result<Vec<KernelId>, CoordinatorError> {
        let gone = self.registry().unregister(device)?;
        self.devices().remove(&device);
        self.learn_links();
        Ok(gone)
    }

    /// Stops placing kernels on a device; it keeps those it has.
    ///
    /// # Errors
    ///
    /// [`CoordinatorError::UnknownDevice`], or [`CoordinatorError::WrongStatus`] if it is lost.
    pub fn drain(&self, device: DeviceId) -> Result<(), CoordinatorError> {
        self.registry().set_status(device, DeviceStatus::Draining, "drain")
    }

    /// Stops placing kernels on a device that somebody does not trust; it keeps those it has.
    ///
    /// # Errors
    ///
    /// As [`Coordinator::drain`].
    pub fn quarantine(&self, device: DeviceId, reason: impl Into<String>) -> Result<(), CoordinatorError> {
        let status = DeviceStatus::Quarantined { reason: reason.into() };
        self.registry().set_status(device, status, "be quarantined")
    }

    /// Places kernels again on a device that was draining or quarantined.
    ///
    /// # Errors
    ///
    /// As [`Coordinator::drain`].
    pub fn return_to_service(&self, device: DeviceId) -> Result<(), CoordinatorError> {
        self.registry().set_status(device, DeviceStatus::InService, "return to service")
    }

    /// Asks every device whether it is lost, and returns those that newly are.
    pub fn check_health(&self) -> Vec<DeviceId> {
        let failed: Vec<(DeviceId, String)> = self
            .known()
            .into_iter()
            .filter_map(|known| {
                known.device.failure().map(|failure| (known.device.info().id, failure.to_string()))
            })
            .collect();
        let mut registry = self.registry();
        let is_news = |registry: &Registry, device| {
            registry.status(device).is_ok_and(|status| !matches!(status, DeviceStatus::Lost { .. }))
        };
        let mut news = Vec::new();
        for (device, reason) in failed {
            if is_news(&registry, device) {
                registry.set_lost(device, reason);
                news.push(device);
            }
        }
        news
    }

    /// Asks every device for its free memory now.
    pub fn refresh_memory(&self) {
        for known in self.known() {
            self.ask_memory(&known);
        }
    }

    /// Chooses a device for a kernel and counts the kernel there.
    ///
    /// # Errors
    ///
    /// [`CoordinatorError::NoDeviceFits`], [`CoordinatorError::Full`] or [`CoordinatorError::OutOfMemory`];
    /// [`CoordinatorError::UnknownKernel`] for a peer that is not placed; [`CoordinatorError::BadChoice`] or
    /// [`CoordinatorError::Contended`] with a custom strategy.
    pub fn place(&self, request: &PlacementRequest) -> Result<(KernelId, DeviceId), CoordinatorError> {
        let strategy = request.strategy.as_ref().unwrap_or(&self.config.strategy);
        let memory_matters =
            request.memory.0 > 0 || matches!(strategy, Strategy::MostMemory | Strategy::Custom(_));
        if memory_matters {
            self.refresh_stale_memory();
        }
        let placed = match strategy {
            Strategy::Custom(custom) => self.place_custom(request, custom),
            built_in => self.place_built_in(request, built_in),
        };
        placed.inspect_err(|_| self.registry().note_refusal())
    }

    fn place_built_in(
        &self,
        request: &PlacementRequest,
        strategy: &Strategy,
    ) -> Result<(KernelId, DeviceId), CoordinatorError> {
        let in_turn = matches!(strategy, Strategy::RoundRobin);
        // Ends: each turn either places the kernel or takes a device out of service.
        loop {
            let mut registry = self.registry();
            let candidates = registry.candidates(request)?;
            let device = registry
                .choose(&candidates, strategy, !request.peers.is_empty())
                .ok_or_else(|| CoordinatorError::NoDeviceFits { reason: "none was chosen".to_owned() })?;
            let kernel = registry.place(request, device)?;
            if in_turn {
                registry.note_turn(device);
            }
            drop(registry);
            if self.is_healthy(device) {
                return Ok((kernel, device));
            }
            self.registry().release(kernel)?;
        }
    }

    fn place_custom(
        &self,
        request: &PlacementRequest,
        CustomStrategy(choose): &CustomStrategy,
    ) -> Result<(KernelId, DeviceId), CoordinatorError> {
        for _ in 0..TRIES {
            let candidates = self.registry().candidates(request)?;
            // Outside the lock: the program's code may ask the coordinator things, and may be slow.
            let chosen = choose(&candidates).ok_or_else(|| CoordinatorError::NoDeviceFits {
                reason: format!("the custom strategy took none of {}", candidates.len()),
            })?;
            let offered = candidates.len();
            let device =
                candidates.get(chosen).ok_or(CoordinatorError::BadChoice { chosen, offered })?.device;
            let Ok(kernel) = self.registry().place_if_fits(request, device) else { continue };
            if self.is_healthy(device) {
                return Ok((kernel, device));
            }
            self.registry().release(kernel)?;
        }
        Err(CoordinatorError::Contended { tries: TRIES })
    }

    /// Forgets a kernel that has ended. A move it is on is cancelled. Returns where it was.
    ///
    /// # Errors
    ///
    /// [`CoordinatorError::UnknownKernel`].
    pub fn release(&self, kernel: KernelId) -> Result<DeviceId, CoordinatorError> {
        self.registry().release(kernel)
    }

    /// The device a kernel is on: until a move is completed, the one it comes from.
    ///
    /// # Errors
    ///
    /// [`CoordinatorError::UnknownKernel`].
    pub fn device_of(&self, kernel: KernelId) -> Result<DeviceId, CoordinatorError> {
        self.registry().device_of(kernel)
    }

    /// The kernels on a device, in the order of placement.
    pub fn kernels_on(&self, device: DeviceId) -> Vec<KernelId> {
        self.registry().kernels_on(device).collect()
    }

    /// Stops placing kernels on a device and plans where those it has can go.
    ///
    /// # Errors
    ///
    /// As [`Coordinator::drain`].
    pub fn evacuate(&self, device: DeviceId) -> Result<EvacuationPlan, CoordinatorError> {
        self.refresh_stale_memory();
        self.check_health();
        let mut registry = self.registry();
        registry.set_status(device, DeviceStatus::Draining, "be evacuated")?;
        registry.plan_evacuation(device)
    }

    /// Reserves a place for a kernel on another device, before it is moved.
    ///
    /// # Errors
    ///
    /// [`CoordinatorError::UnknownKernel`], [`CoordinatorError::AlreadyMoving`],
    /// [`CoordinatorError::AlreadyThere`], or why the device cannot take it.
    pub fn begin_move(&self, kernel: KernelId, to: DeviceId) -> Result<MoveId, CoordinatorError> {
        self.is_healthy(to);
        self.registry().begin_move(kernel, to)
    }

    /// Says that a kernel has moved: from now on its device is the new one.
    ///
    /// # Errors
    ///
    /// [`CoordinatorError::UnknownMove`], also the second time; [`CoordinatorError::WrongStatus`] if the new
    /// device was lost meanwhile, which cancels the move.
    pub fn complete_move(&self, id: MoveId) -> Result<KernelId, CoordinatorError> {
        self.registry().complete_move(id)
    }

    /// Says that a kernel has not moved and stays where it was.
    ///
    /// # Errors
    ///
    /// [`CoordinatorError::UnknownMove`].
    pub fn cancel_move(&self, id: MoveId) -> Result<KernelId, CoordinatorError> {
        self.registry().cancel_move(id)
    }

    /// Every registered device at this moment, in the order of registration.
    pub fn devices_report(&self) -> Vec<DeviceReport> {
        self.registry().reports()
    }

    /// A device's status.
    ///
    /// # Errors
    ///
    /// [`CoordinatorError::UnknownDevice`].
    pub fn status(&self, device: DeviceId) -> Result<DeviceStatus, CoordinatorError> {
        self.registry().status(device)
    }

    /// What was done so far. Nothing stops for it.
    pub fn stats(&self) -> CoordinatorStats {
        self.registry().stats()
    }

    /// Asks the device whether it is lost, and notes it if so.
    fn is_healthy(&self, device: DeviceId) -> bool {
        let known = self.devices().get(&device).map(|known| Arc::clone(&known.device));
        let Some(failure) = known.and_then(|device| device.failure()) else { return true };
        self.registry().set_lost(device, failure.to_string());
        false
    }

    fn refresh_stale_memory(&self) {
        for known in self.known() {
            if known.memory_asked.elapsed() > self.config.memory_max_age {
                self.ask_memory(&known);
            }
        }
    }

    fn ask_memory(&self, known: &Known) {
        let id = known.device.info().id;
        match known.device.memory() {
            Ok(memory) => {
                self.registry().set_memory(id, memory);
                if let Some(known) = self.devices().get_mut(&id) {
                    known.memory_asked = Instant::now();
                }
            }
            Err(error) => self.note_memory_error(id, &error),
        }
    }

    fn note_memory_error(&self, device: DeviceId, error: &AllocError) {
        if error.class() == ErrorClass::DeviceLost {
            self.registry().set_lost(device, error.to_string());
        }
    }

    /// Asks all devices for their links, unless the program brought a topology of its own.
    fn learn_links(&self) {
        if self.config.topology.is_some() {
            return;
        }
        let devices: Vec<Arc<dyn Device>> = self.known().into_iter().map(|known| known.device).collect();
        if let Some(topology) = topology_of(&devices) {
            self.registry().set_topology(topology);
        }
    }

    /// The registered devices, in the order of registration.
    fn known(&self) -> Vec<Known> {
        let order: Vec<DeviceId> = self.registry().devices().collect();
        let devices = self.devices();
        order.iter().filter_map(|id| devices.get(id).cloned()).collect()
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        // No code but the registry's own runs under the lock.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn devices(&self) -> MutexGuard<'_, HashMap<DeviceId, Known>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The links of these devices, silicon that several backends reach counted once. `None` if what they report
/// contradicts itself, in which case no link counts as known.
fn topology_of(devices: &[Arc<dyn Device>]) -> Option<Topology> {
    let mut nodes: Vec<NodeDesc> = Vec::new();
    let mut facts: Vec<LinkFact> = Vec::new();
    let mut silicon = Vec::new();
    for device in devices {
        let info = device.info();
        if !silicon.contains(&info.id.uuid) {
            silicon.push(info.id.uuid);
            let name = format!("{} {}", info.id, info.id.uuid);
            nodes.push(NodeDesc::device(name, info.kind).uuid(info.id.uuid));
        }
        facts.extend(device.links().map(|family| family.facts()).unwrap_or_default());
    }
    // Links to devices that are not registered lead nowhere.
    let known = |end: LinkEnd| match end {
        LinkEnd::Device(uuid) => silicon.contains(&uuid),
        LinkEnd::Host { .. } => true,
    };
    facts.retain(|fact| known(fact.from) && known(fact.to));
    Topology::from_facts(nodes, &facts).ok()
}
