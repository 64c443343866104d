//! Who is in service and what is where: decisions only, no device, lock or clock.

use std::collections::{BTreeMap, HashMap};

use warpweft_core_types::{Bytes, DeviceId, DeviceInfo, DeviceUuid, Features, MemoryUsage};
use warpweft_topology::Topology;

use crate::{
    Candidate, CoordinatorError, CoordinatorStats, DeviceReport, DeviceStatus, EvacuationPlan, KernelId,
    MoveId, MovePriority, PlacementRequest, PlannedMove, StrandedKernel, Strategy,
};

/// The transfer that links are compared by.
const COMPARED: Bytes = Bytes::mib(1);

/// Everything a coordinator knows.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    /// In the order of registration.
    slots: Vec<Slot>,
    /// Every piece of silicon that ever was registered; places in it stay.
    silicon: Vec<Silicon>,
    kernels: BTreeMap<KernelId, Placed>,
    moves: HashMap<MoveId, Move>,
    links: Links,
    /// The device that round robin chose last.
    last_in_turn: Option<DeviceId>,
    next_id: u64,
    stats: CoordinatorStats,
}

/// One device of one backend.
#[derive(Debug)]
struct Slot {
    info: DeviceInfo,
    features: Features,
    status: DeviceStatus,
    memory: MemoryUsage,
    silicon: usize,
}

/// One piece of silicon, however many backends reach it.
#[derive(Debug)]
struct Silicon {
    uuid: DeviceUuid,
    limit: u32,
    /// Kernels on it and moves to it.
    kernels: u32,
    promised: u64,
}

/// What a kernel needs of its device, wherever it goes.
#[derive(Debug, Clone)]
struct Needs {
    memory: u64,
    features: Features,
    compute_capability: Option<(u32, u32)>,
    backend: Option<String>,
}

#[derive(Debug)]
struct Placed {
    device: DeviceId,
    silicon: usize,
    needs: Needs,
    priority: MovePriority,
    moving: Option<MoveId>,
}

#[derive(Debug)]
struct Move {
    kernel: KernelId,
    to: DeviceId,
    silicon: usize,
}

/// The cost of links between pieces of silicon, as far as somebody asked.
#[derive(Debug, Default)]
struct Links {
    topology: Option<Topology>,
    costs: HashMap<(DeviceUuid, DeviceUuid), Option<u64>>,
}

impl Links {
    /// Nanoseconds for 1 MiB; `None` without a path.
    fn cost(&mut self, from: DeviceUuid, to: DeviceUuid) -> Option<u64> {
        if from == to {
            return Some(0);
        }
        let topology = self.topology.as_ref()?;
        *self.costs.entry((from, to)).or_insert_with(|| {
            let path = topology.best_path(topology.device(from)?, topology.device(to)?, COMPARED);
            path.ok().map(|path| path.cost_ns)
        })
    }
}

impl From<&PlacementRequest> for Needs {
    fn from(request: &PlacementRequest) -> Self {
        Self {
            memory: request.memory.0,
            features: request.features,
            compute_capability: request.compute_capability,
            backend: request.backend.clone(),
        }
    }
}

impl Needs {
    fn met_by(&self, slot: &Slot) -> bool {
        slot.features.contains(self.features)
            && self.compute_capability.is_none_or(|least| slot.info.compute_capability >= Some(least))
            && self.backend.as_deref().is_none_or(|backend| backend == slot.info.id.backend)
    }
}

impl Registry {
    pub(crate) fn register(
        &mut self,
        info: DeviceInfo,
        features: Features,
        memory: MemoryUsage,
        limit: u32,
    ) -> Result<(), CoordinatorError> {
        if self.position(info.id).is_ok() {
            return Err(CoordinatorError::AlreadyRegistered { device: info.id });
        }
        let uuid = info.id.uuid;
        let known = self.silicon.iter().position(|silicon| silicon.uuid == uuid);
        let silicon = known.unwrap_or_else(|| {
            self.silicon.push(Silicon { uuid, limit, kernels: 0, promised: 0 });
            self.silicon.len() - 1
        });
        self.slots.push(Slot { info, features, status: DeviceStatus::InService, memory, silicon });
        Ok(())
    }

    /// Removes a device without kernels, or a lost one with the kernels that are gone with it.
    pub(crate) fn unregister(&mut self, device: DeviceId) -> Result<Vec<KernelId>, CoordinatorError> {
        let position = self.position(device)?;
        let kernels: Vec<KernelId> = self.kernels_on(device).collect();
        let incoming = self.moves.values().filter(|under_way| under_way.to == device).count();
        let lost = matches!(self.slots[position].status, DeviceStatus::Lost { .. });
        if !lost && kernels.len() + incoming > 0 {
            let kernels = u32::try_from(kernels.len() + incoming).unwrap_or(u32::MAX);
            return Err(CoordinatorError::InUse { device, kernels });
        }
        for &kernel in &kernels {
            self.release(kernel)?;
        }
        let stopped: Vec<MoveId> =
            self.moves.iter().filter(|(_, under_way)| under_way.to == device).map(|(&id, _)| id).collect();
        for id in stopped {
            self.cancel_move(id)?;
        }
        self.slots.remove(position);
        Ok(kernels)
    }

    pub(crate) fn set_topology(&mut self, topology: Topology) {
        self.links = Links { topology: Some(topology), costs: HashMap::new() };
    }

    pub(crate) fn set_memory(&mut self, device: DeviceId, memory: MemoryUsage) {
        // A device may be gone since its memory was asked for.
        if let Ok(position) = self.position(device) {
            self.slots[position].memory = memory;
        }
    }

    pub(crate) fn set_lost(&mut self, device: DeviceId, reason: String) {
        if let Ok(position) = self.position(device) {
            self.slots[position].status = DeviceStatus::Lost { reason };
        }
    }

    /// Changes the status; a lost device stays lost.
    pub(crate) fn set_status(
        &mut self,
        device: DeviceId,
        status: DeviceStatus,
        action: &'static str,
    ) -> Result<(), CoordinatorError> {
        let position = self.position(device)?;
        let slot = &mut self.slots[position];
        if let DeviceStatus::Lost { .. } = slot.status {
            let status = slot.status.clone();
            return Err(CoordinatorError::WrongStatus { device, status, action });
        }
        slot.status = status;
        Ok(())
    }

    pub(crate) fn status(&self, device: DeviceId) -> Result<DeviceStatus, CoordinatorError> {
        Ok(self.slots[self.position(device)?].status.clone())
    }

    /// The devices that fit a request, in the order of registration.
    pub(crate) fn candidates(
        &mut self,
        request: &PlacementRequest,
    ) -> Result<Vec<Candidate>, CoordinatorError> {
        let needs = Needs::from(request);
        let peers: Vec<DeviceUuid> = request
            .peers
            .iter()
            .map(|&peer| self.kernel(peer).map(|placed| placed.device.uuid))
            .collect::<Result<_, _>>()?;
        let fitting = self.fitting(&needs, None)?;
        let candidates = fitting.into_iter().map(|position| self.candidate(position, &peers)).collect();
        Ok(candidates)
    }

    fn candidate(&mut self, position: usize, peers: &[DeviceUuid]) -> Candidate {
        let slot = &self.slots[position];
        let (device, compute_capability) = (slot.info.id, slot.info.compute_capability);
        let Silicon { kernels, limit, .. } = self.silicon[slot.silicon];
        let spare = Bytes(self.spare(slot));
        let there_and_back = |peer: &DeviceUuid| {
            let there = self.links.cost(device.uuid, *peer)?;
            there.checked_add(self.links.cost(*peer, device.uuid)?)
        };
        let peer_cost_ns =
            peers.iter().map(there_and_back).try_fold(0_u64, |sum, cost| sum.checked_add(cost?));
        Candidate { device, kernels, limit, spare, compute_capability, peer_cost_ns }
    }

    /// Positions of the devices that fit; `moving_from` already holds the kernel.
    fn fitting(&self, needs: &Needs, moving_from: Option<DeviceId>) -> Result<Vec<usize>, CoordinatorError> {
        let in_service: Vec<usize> = (0..self.slots.len())
            .filter(|&position| self.slots[position].status == DeviceStatus::InService)
            .filter(|&position| Some(self.slots[position].info.id) != moving_from)
            .collect();
        let (count, mut fitting) = (in_service.len(), in_service);
        fitting.retain(|&position| needs.met_by(&self.slots[position]));
        if fitting.is_empty() {
            let reason = match count {
                0 => "none is in service".to_owned(),
                _ => format!("{count} are in service, none of them has what the kernel needs"),
            };
            return Err(CoordinatorError::NoDeviceFits { reason });
        }
        let able = fitting.len();
        // A move between two backends of one piece of silicon takes nothing more of it.
        let stays =
            |position: usize| moving_from.is_some_and(|from| from.uuid == self.slots[position].info.id.uuid);
        let has_room = |position: usize| {
            let silicon = &self.silicon[self.slots[position].silicon];
            stays(position) || silicon.kernels < silicon.limit
        };
        fitting.retain(|&position| has_room(position));
        if fitting.is_empty() {
            return Err(CoordinatorError::Full { devices: able });
        }
        let roomy = fitting.len();
        let most = fitting.iter().map(|&position| self.spare(&self.slots[position])).max().unwrap_or(0);
        fitting.retain(|&position| stays(position) || self.spare(&self.slots[position]) >= needs.memory);
        if fitting.is_empty() {
            let (requested, most) = (Bytes(needs.memory), Bytes(most));
            return Err(CoordinatorError::OutOfMemory { devices: roomy, requested, most });
        }
        Ok(fitting)
    }

    /// Picks one of the candidates by a strategy other than a custom one.
    pub(crate) fn choose(
        &self,
        candidates: &[Candidate],
        strategy: &Strategy,
        has_peers: bool,
    ) -> Option<DeviceId> {
        // `min_by_key` keeps the first of equals, which is the one registered first.
        let by_load = |candidate: &&Candidate| load_key(candidate.kernels, candidate.limit);
        let chosen = match strategy {
            Strategy::FirstAvailable => candidates.first(),
            Strategy::RoundRobin => self.next_in_turn(candidates),
            Strategy::MostMemory => candidates
                .iter()
                .min_by_key(|candidate| (std::cmp::Reverse(candidate.spare), by_load(candidate))),
            Strategy::ComputeCapability => candidates.iter().min_by_key(|candidate| {
                (std::cmp::Reverse(candidate.compute_capability), by_load(candidate))
            }),
            Strategy::NearPeers if has_peers => candidates
                .iter()
                .min_by_key(|candidate| (candidate.peer_cost_ns.unwrap_or(u64::MAX), by_load(candidate))),
            _ => candidates.iter().min_by_key(by_load),
        };
        chosen.map(|candidate| candidate.device)
    }

    fn next_in_turn<'a>(&self, candidates: &'a [Candidate]) -> Option<&'a Candidate> {
        let last = self.last_in_turn.and_then(|device| self.position(device).ok());
        let behind = |candidate: &&Candidate| {
            last.is_none_or(|last| self.position(candidate.device).is_ok_and(|position| position > last))
        };
        candidates.iter().find(behind).or(candidates.first())
    }

    /// Places a kernel on a device that was chosen some time ago, if the device still fits.
    pub(crate) fn place_if_fits(
        &mut self,
        request: &PlacementRequest,
        device: DeviceId,
    ) -> Result<KernelId, CoordinatorError> {
        let position = self.position(device)?;
        if !self.fitting(&request.into(), None)?.contains(&position) {
            return Err(CoordinatorError::Full { devices: 1 });
        }
        self.place(request, device)
    }

    /// Places a kernel on one of the devices that fit.
    pub(crate) fn place(
        &mut self,
        request: &PlacementRequest,
        device: DeviceId,
    ) -> Result<KernelId, CoordinatorError> {
        let silicon = self.slots[self.position(device)?].silicon;
        let needs = Needs::from(request);
        self.take(silicon, needs.memory);
        let kernel = KernelId(self.fresh_id());
        let placed = Placed { device, silicon, needs, priority: request.priority, moving: None };
        self.kernels.insert(kernel, placed);
        self.stats.placed += 1;
        Ok(kernel)
    }

    /// Where round robin goes on next time.
    pub(crate) fn note_turn(&mut self, device: DeviceId) {
        self.last_in_turn = Some(device);
    }

    pub(crate) fn note_refusal(&mut self) {
        self.stats.refused += 1;
    }

    /// Forgets a kernel, and the move it is on.
    pub(crate) fn release(&mut self, kernel: KernelId) -> Result<DeviceId, CoordinatorError> {
        if let Some(id) = self.kernel(kernel)?.moving {
            self.cancel_move(id)?;
        }
        let placed = self.kernels.remove(&kernel).ok_or(CoordinatorError::UnknownKernel { kernel })?;
        self.give_back(placed.silicon, placed.needs.memory);
        self.stats.released += 1;
        Ok(placed.device)
    }

    pub(crate) fn device_of(&self, kernel: KernelId) -> Result<DeviceId, CoordinatorError> {
        Ok(self.kernel(kernel)?.device)
    }

    pub(crate) fn kernels_on(&self, device: DeviceId) -> impl Iterator<Item = KernelId> {
        self.kernels.iter().filter(move |(_, placed)| placed.device == device).map(|(&kernel, _)| kernel)
    }

    /// Reserves a place for a kernel that will move.
    pub(crate) fn begin_move(&mut self, kernel: KernelId, to: DeviceId) -> Result<MoveId, CoordinatorError> {
        let placed = self.kernel(kernel)?;
        if placed.moving.is_some() {
            return Err(CoordinatorError::AlreadyMoving { kernel });
        }
        if placed.device == to {
            return Err(CoordinatorError::AlreadyThere { kernel, device: to });
        }
        let (from, needs) = (placed.device, placed.needs.clone());
        let position = self.position(to)?;
        let status = self.slots[position].status.clone();
        if status != DeviceStatus::InService {
            return Err(CoordinatorError::WrongStatus { device: to, status, action: "take a kernel" });
        }
        if !self.fitting(&needs, Some(from))?.contains(&position) {
            let reason = format!("{to} does not have the room or what the kernel needs");
            return Err(CoordinatorError::NoDeviceFits { reason });
        }
        let silicon = self.slots[position].silicon;
        self.take(silicon, needs.memory);
        let id = MoveId(self.fresh_id());
        self.moves.insert(id, Move { kernel, to, silicon });
        self.kernel_mut(kernel)?.moving = Some(id);
        self.stats.moves_begun += 1;
        Ok(id)
    }

    /// The kernel has moved: its place is the new device from now on.
    pub(crate) fn complete_move(&mut self, id: MoveId) -> Result<KernelId, CoordinatorError> {
        let Move { kernel, to, silicon } =
            *self.moves.get(&id).ok_or(CoordinatorError::UnknownMove { id })?;
        let status = self.status(to)?;
        if let DeviceStatus::Lost { .. } = status {
            self.cancel_move(id)?;
            return Err(CoordinatorError::WrongStatus { device: to, status, action: "take a kernel" });
        }
        self.moves.remove(&id);
        let placed = self.kernel_mut(kernel)?;
        let (from, memory) = (placed.silicon, placed.needs.memory);
        (placed.device, placed.silicon, placed.moving) = (to, silicon, None);
        self.give_back(from, memory);
        self.stats.moves_completed += 1;
        Ok(kernel)
    }

    /// The kernel stays where it was.
    pub(crate) fn cancel_move(&mut self, id: MoveId) -> Result<KernelId, CoordinatorError> {
        let Move { kernel, silicon, .. } =
            self.moves.remove(&id).ok_or(CoordinatorError::UnknownMove { id })?;
        let placed = self.kernel_mut(kernel)?;
        placed.moving = None;
        let memory = placed.needs.memory;
        self.give_back(silicon, memory);
        self.stats.moves_cancelled += 1;
        Ok(kernel)
    }

    /// Where the kernels of a device could go, the most urgent and then the largest first.
    ///
    /// Each goes where the load is smallest with those before it in place, and among equals where the links
    /// from its device are cheapest. Nothing is reserved.
    pub(crate) fn plan_evacuation(&mut self, from: DeviceId) -> Result<EvacuationPlan, CoordinatorError> {
        self.position(from)?;
        let mut kernels: Vec<KernelId> =
            self.kernels_on(from).filter(|kernel| self.kernels[kernel].moving.is_none()).collect();
        kernels.sort_by_key(|kernel| {
            let placed = &self.kernels[kernel];
            (std::cmp::Reverse(placed.priority), std::cmp::Reverse(placed.needs.memory), *kernel)
        });
        let mut plan = EvacuationPlan { from, moves: Vec::new(), stranded: Vec::new() };
        let mut held: Vec<(usize, u64)> = Vec::new();
        for &kernel in &kernels {
            match self.target(kernel, from) {
                Ok((to, silicon)) => {
                    // Held while the rest is planned, so that targets fill up as they will.
                    let memory = self.kernels[&kernel].needs.memory;
                    self.take(silicon, memory);
                    held.push((silicon, memory));
                    plan.moves.push(self.planned_move(kernel, from, to));
                }
                Err(reason) => plan.stranded.push(StrandedKernel { kernel, reason }),
            }
        }
        held.into_iter().for_each(|(silicon, memory)| self.give_back(silicon, memory));
        Ok(plan)
    }

    /// The best device for a kernel to go to, and its silicon.
    fn target(&mut self, kernel: KernelId, from: DeviceId) -> Result<(DeviceId, usize), CoordinatorError> {
        let needs = self.kernel(kernel)?.needs.clone();
        let fitting = self.fitting(&needs, Some(from))?;
        let best = fitting.into_iter().min_by_key(|&position| {
            let slot = &self.slots[position];
            let silicon = &self.silicon[slot.silicon];
            let cost = self.links.cost(from.uuid, slot.info.id.uuid).unwrap_or(u64::MAX);
            (load_key(silicon.kernels, silicon.limit), cost)
        });
        let none_left = || CoordinatorError::NoDeviceFits { reason: "none is left".to_owned() };
        let slot = &self.slots[best.ok_or_else(none_left)?];
        Ok((slot.info.id, slot.silicon))
    }

    fn planned_move(&mut self, kernel: KernelId, from: DeviceId, to: DeviceId) -> PlannedMove {
        let placed = &self.kernels[&kernel];
        let (priority, memory) = (placed.priority, placed.needs.memory);
        let per_mib = self.links.cost(from.uuid, to.uuid);
        let mib = memory.div_ceil(COMPARED.0).max(1);
        let expected = per_mib.map(|cost| std::time::Duration::from_nanos(cost.saturating_mul(mib)));
        PlannedMove { kernel, to, priority, memory: Bytes(memory), expected }
    }

    pub(crate) fn reports(&self) -> Vec<DeviceReport> {
        let mut counts: HashMap<DeviceId, u32> = HashMap::new();
        for placed in self.kernels.values() {
            *counts.entry(placed.device).or_default() += 1;
        }
        let report = |slot: &Slot| {
            let id = slot.info.id;
            let silicon = &self.silicon[slot.silicon];
            DeviceReport {
                device: id,
                status: slot.status.clone(),
                kernels: counts.get(&id).copied().unwrap_or(0),
                silicon_kernels: silicon.kernels,
                limit: silicon.limit,
                promised: Bytes(silicon.promised),
                capacity: slot.memory.capacity,
                free: slot.memory.free,
            }
        };
        self.slots.iter().map(report).collect()
    }

    pub(crate) fn stats(&self) -> CoordinatorStats {
        let mut counted = std::collections::HashSet::new();
        let in_service = self.slots.iter().filter(|slot| slot.status == DeviceStatus::InService);
        let each_once: Vec<&Slot> = in_service.filter(|slot| counted.insert(slot.info.id.uuid)).collect();
        CoordinatorStats {
            kernels: self.kernels.len() as u64,
            silicon_in_service: u32::try_from(each_once.len()).unwrap_or(u32::MAX),
            capacity_in_service: Bytes(each_once.iter().map(|slot| slot.memory.capacity.0).sum()),
            ..self.stats
        }
    }

    pub(crate) fn devices(&self) -> impl Iterator<Item = DeviceId> {
        self.slots.iter().map(|slot| slot.info.id)
    }

    fn position(&self, device: DeviceId) -> Result<usize, CoordinatorError> {
        self.slots
            .iter()
            .position(|slot| slot.info.id == device)
            .ok_or(CoordinatorError::UnknownDevice { device })
    }

    fn kernel(&self, kernel: KernelId) -> Result<&Placed, CoordinatorError> {
        self.kernels.get(&kernel).ok_or(CoordinatorError::UnknownKernel { kernel })
    }

    fn kernel_mut(&mut self, kernel: KernelId) -> Result<&mut Placed, CoordinatorError> {
        self.kernels.get_mut(&kernel).ok_or(CoordinatorError::UnknownKernel { kernel })
    }

    /// Memory that neither a kernel was promised nor, when last asked, anybody uses.
    ///
    /// A kernel's memory is promised first and used later, so both are upper bounds and the smaller counts.
    fn spare(&self, slot: &Slot) -> u64 {
        let promised = self.silicon[slot.silicon].promised;
        slot.memory.free.0.min(slot.memory.capacity.0.saturating_sub(promised))
    }

    fn take(&mut self, silicon: usize, memory: u64) {
        let silicon = &mut self.silicon[silicon];
        silicon.kernels += 1;
        silicon.promised = silicon.promised.saturating_add(memory);
    }

    fn give_back(&mut self, silicon: usize, memory: u64) {
        let silicon = &mut self.silicon[silicon];
        silicon.kernels = silicon.kernels.saturating_sub(1);
        silicon.promised = silicon.promised.saturating_sub(memory);
    }

    fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

/// Orders by kernels in relation to the limit, in parts of 2^32.
fn load_key(kernels: u32, limit: u32) -> u64 {
    (u64::from(kernels) << 32) / u64::from(limit.max(1))
}
