//! A route made concrete: who copies what into which memory.

use std::sync::Arc;

use warpweft_core_types::{BufferDesc, BufferView, Device, DeviceId, HostMemory, MemoryKind, RangeError};

use crate::{
    TransferConfig, TransferError,
    devices::Devices,
    route::{Route, Stop},
};

/// Who carries out a hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runner {
    /// A queue of this device.
    Queue(DeviceId),
    /// A processor of the host, between two pieces of host memory.
    Processor,
}

/// One of the two memories of a hop.
#[derive(Debug, Clone)]
pub(crate) enum Place {
    Source,
    Destination,
    /// Memory in between: a view for each slot.
    Slots(Arc<[BufferView]>),
}

/// One step of a copy.
#[derive(Debug, Clone)]
pub(crate) struct Hop {
    pub(crate) runner: Runner,
    pub(crate) from: Place,
    pub(crate) to: Place,
}

/// A copy cut into chunks that take the same hops.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) src: BufferView,
    pub(crate) dst: BufferView,
    pub(crate) hops: Vec<Hop>,
    pub(crate) chunk_bytes: u64,
    pub(crate) slots: u64,
    /// Chunks that went through the slots before this copy's first one.
    origin: u64,
}

impl Plan {
    pub(crate) fn chunk_count(&self) -> u64 {
        self.src.size().div_ceil(self.chunk_bytes)
    }

    /// Whether the slot of a chunk held another before.
    pub(crate) fn reuses_slot(&self, chunk: u64) -> bool {
        self.origin + chunk >= self.slots
    }

    /// Whether a processor has to take part, so that the devices cannot do it alone.
    pub(crate) fn needs_processor(&self) -> bool {
        self.hops.iter().any(|hop| hop.runner == Runner::Processor)
    }

    /// What one hop copies for one chunk.
    pub(crate) fn views(&self, hop: usize, chunk: u64) -> Result<(BufferView, BufferView), RangeError> {
        let start = chunk * self.chunk_bytes;
        let range = start..(start + self.chunk_bytes).min(self.src.size());
        let view = |place: &Place| match place {
            Place::Source => self.src.slice(range.clone()),
            Place::Destination => self.dst.slice(range.clone()),
            Place::Slots(slots) => slot(slots, self.origin + chunk).slice(0..range.end - range.start),
        };
        Ok((view(&self.hops[hop].from)?, view(&self.hops[hop].to)?))
    }
}

/// Chunks take the slots in turn.
fn slot(slots: &[BufferView], chunk: u64) -> &BufferView {
    // The remainder is below the number of slots.
    let index = usize::try_from(chunk % slots.len() as u64).unwrap_or(0);
    &slots[index]
}

/// Memory at every stop between source and destination of one route.
#[derive(Debug, Clone)]
pub(crate) struct Stages {
    stages: Vec<Stage>,
    slot_bytes: u64,
    slots: u32,
}

#[derive(Debug, Clone)]
struct Stage {
    /// The slots as the hop before writes them.
    written: Arc<[BufferView]>,
    /// The slots as the hop behind reads them: the same memory, or the processor's copy.
    read: Arc<[BufferView]>,
    bridged: bool,
}

impl Stages {
    /// Memory for copies of `size` bytes and less: no more of it than such a copy can use.
    pub(crate) fn allocate(
        devices: &Devices,
        route: &Route,
        size: u64,
        config: &TransferConfig,
    ) -> Result<Self, TransferError> {
        let slot_bytes = config.chunk.0.min(size.next_power_of_two());
        let slots = u32::try_from(size.div_ceil(slot_bytes)).unwrap_or(u32::MAX).min(config.slots);
        let stage = |stops: &[Stop; 3]| Stage::allocate(devices, *stops, slot_bytes, slots);
        let stages = route.stops.array_windows().map(stage).collect::<Result<_, _>>()?;
        Ok(Self { stages, slot_bytes, slots })
    }

    /// Whether a copy of `size` bytes can use this memory as well as any.
    pub(crate) fn suit(&self, size: u64, config: &TransferConfig) -> bool {
        let large_enough = self.slot_bytes == config.chunk.0 || self.slot_bytes >= size;
        large_enough
            && u64::from(self.slots.min(config.slots))
                >= size.div_ceil(self.slot_bytes).min(config.slots.into())
    }

    /// The hops of a route over this memory.
    pub(crate) fn hops(&self, devices: &Devices, route: &Route) -> Vec<Hop> {
        let mut hops = Vec::new();
        let mut from = Place::Source;
        let mut runners = route.stops.array_windows().map(|&[from, to]| runner(devices, from, to));
        for (stage, runner) in self.stages.iter().zip(&mut runners) {
            let to = Place::Slots(Arc::clone(&stage.written));
            hops.push(Hop { runner, from, to: to.clone() });
            from = Place::Slots(Arc::clone(&stage.read));
            if stage.bridged {
                hops.push(Hop { runner: Runner::Processor, from: to, to: from.clone() });
            }
        }
        let last = runners.next().unwrap_or_else(|| local_runner(route));
        hops.push(Hop { runner: last, from, to: Place::Destination });
        hops
    }
}

impl Stage {
    /// Memory at the middle one of three stops.
    fn allocate(
        devices: &Devices,
        [before, at, after]: [Stop; 3],
        slot_bytes: u64,
        count: u32,
    ) -> Result<Self, TransferError> {
        let size = match (at, after) {
            (Stop::Host, Stop::Device(reader)) => importable(devices.get(reader)?, slot_bytes),
            _ => slot_bytes,
        };
        let slots = |device, kind| slots(devices.get(device)?, kind, size, count);
        match (before, at, after) {
            (Stop::Device(writer), Stop::Host, Stop::Device(reader)) => {
                let written = slots(writer, MemoryKind::HostVisible)?;
                match import_all(devices, writer, reader, &written) {
                    Some(read) => Ok(Self { written, read, bridged: false }),
                    None => {
                        Ok(Self { written, read: slots(reader, MemoryKind::HostVisible)?, bridged: true })
                    }
                }
            }
            (_, Stop::Device(relay), _) => {
                let written = slots(relay, MemoryKind::Device)?;
                Ok(Self { read: Arc::clone(&written), written, bridged: false })
            }
            // `Network::route` merges neighbouring stops in host memory and ends routes at devices.
            (_, Stop::Host, _) => {
                Err(TransferError::Internal { reason: "a route stops in host memory twice in a row" })
            }
        }
    }
}

/// The size of host memory that the reader can import and that holds a chunk.
fn importable(reader: &Arc<dyn Device>, chunk: u64) -> u64 {
    reader.host_import().map_or(chunk, |family| chunk.next_multiple_of(family.alignment()))
}

fn slots(
    device: &Arc<dyn Device>,
    kind: MemoryKind,
    size: u64,
    count: u32,
) -> Result<Arc<[BufferView]>, TransferError> {
    let allocate = |_| Ok(BufferView::whole(device.allocate(&BufferDesc { size, kind })?));
    (0..count).map(allocate).collect()
}

/// The writer's slots as buffers of the reader; `None` if it cannot use that memory as it is.
fn import_all(
    devices: &Devices,
    writer: DeviceId,
    reader: DeviceId,
    written: &[BufferView],
) -> Option<Arc<[BufferView]>> {
    if !devices.share_host_memory(writer, reader) {
        return None;
    }
    let family = devices.get(reader).ok()?.host_import()?;
    let import = |view: &BufferView| {
        let memory = HostMemory::of_buffer(Arc::clone(view.buffer()))?;
        family.import(memory).ok().map(BufferView::whole)
    };
    written.iter().map(import).collect()
}

/// Who copies between two neighbouring stops: the writer where it can, since stores need no answer.
fn runner(devices: &Devices, from: Stop, to: Stop) -> Runner {
    match (from, to) {
        (Stop::Device(from), Stop::Device(to)) if devices.pushes(from, to) => Runner::Queue(from),
        (_, Stop::Device(to)) => Runner::Queue(to),
        (Stop::Device(from), Stop::Host) => Runner::Queue(from),
        (Stop::Host, Stop::Host) => Runner::Processor,
    }
}

fn local_runner(route: &Route) -> Runner {
    match route.stops.first() {
        Some(&Stop::Device(device)) => Runner::Queue(device),
        _ => Runner::Processor,
    }
}

impl Plan {
    /// Makes a copy over `route` concrete. `origin` chunks went through the stages before.
    pub(crate) fn new(
        hops: Vec<Hop>,
        stages: &Stages,
        (src, dst): (&BufferView, &BufferView),
        origin: u64,
        config: &TransferConfig,
    ) -> Self {
        let direct = stages.stages.is_empty();
        Self {
            src: src.clone(),
            dst: dst.clone(),
            hops,
            chunk_bytes: if direct { config.direct_chunk.0 } else { stages.slot_bytes },
            slots: if direct { u64::MAX } else { u64::from(stages.slots) },
            origin,
        }
    }
}
