//! The machine: its devices, what lives on them, and whether a fault has ended it all.

use std::{
    collections::BTreeMap,
    ffi::c_int,
    process,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicI32, Ordering},
    },
};

use crate::{
    capture::Captures,
    context::Context,
    control::{number, setting},
    exports::Code,
    graph::{Executable, Graph},
    link::Linker,
    module::{Function, Module},
    pool::Pool,
    registry::Registry,
    space::Space,
    stream::{Event, Stream},
    virtual_memory::{Physical, Reservations},
    work::Workers,
};

/// Everything that came to be by `cuInit`.
#[derive(Debug)]
pub(crate) struct Machine {
    process: u32,
    /// Those that are visible, in the order the driver shows them.
    pub(crate) devices: Vec<Device>,
    pub(crate) space: Space,
    pub(crate) workers: Workers,
    pub(crate) contexts: Registry<Context>,
    pub(crate) streams: Registry<Stream>,
    pub(crate) events: Registry<Event>,
    pub(crate) pools: Registry<Pool>,
    pub(crate) modules: Registry<Module>,
    pub(crate) functions: Registry<Function>,
    pub(crate) linkers: Registry<Linker>,
    pub(crate) graphs: Registry<Graph>,
    pub(crate) executables: Registry<Executable>,
    pub(crate) memories: Registry<Physical>,
    pub(crate) reservations: Reservations,
    pub(crate) captures: Captures,
    /// The code of the fault that ended every context; 0 while there was none.
    fault: AtomicI32,
}

/// A device, plugged in or visible.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) desc: DeviceDesc,
    pub(crate) primary: Mutex<Primary>,
    /// Bytes that pools took from it.
    pub(crate) reserved: Mutex<u64>,
}

/// Who a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceDesc {
    /// Its place among all devices of the machine, visible or not.
    pub(crate) slot: u8,
    pub(crate) uuid: [u8; 16],
    pub(crate) pci_bus: u8,
    pub(crate) memory: u64,
}

/// The primary context and how often it is retained.
#[derive(Debug, Default)]
pub(crate) struct Primary {
    pub(crate) retained: u32,
    /// With its handle.
    pub(crate) context: Option<(usize, Arc<Context>)>,
}

/// Shared memory of a multiprocessor, and what a block of it may have at most.
pub(crate) const SHARED_BYTES_OF_MULTIPROCESSOR: u32 = 228 << 10;
pub(crate) const MOST_SHARED_BYTES: u32 = 227 << 10;

static RUNNING: OnceLock<Machine> = OnceLock::new();

/// The machine after `cuInit`, in the process that called it.
pub(crate) fn running() -> Result<&'static Machine, Code> {
    let machine = RUNNING.get().ok_or(Code::NOT_INITIALIZED)?;
    if machine.process == process::id() { Ok(machine) } else { Err(Code::NOT_INITIALIZED) }
}

/// `cuInit`.
pub(crate) fn initialise() -> Result<(), Code> {
    if RUNNING.get().is_none() {
        let shown = visible(&plugged_in(), setting("CUDA_VISIBLE_DEVICES").as_deref());
        if shown.is_empty() {
            return Err(Code::NO_DEVICE);
        }
        // Another thread may have been faster; its machine is as good.
        let _first = RUNNING.set(Machine::new(shown));
    }
    running().map(|_| ())
}

/// The devices of the machine in the order of their PCI addresses.
pub(crate) fn plugged_in() -> Vec<DeviceDesc> {
    let count = u8::try_from(number("devices", 2).min(16)).unwrap_or(16);
    let memory = number("memory", 4 << 30);
    (0..count)
        .map(|slot| {
            let mut uuid = *b"\x5a\x11warpweft-gpu\x00\x00";
            // The first byte differs, so that a prefix can tell them apart.
            (uuid[0], uuid[15]) = (0x5a ^ (slot << 4), slot);
            DeviceDesc { slot, uuid, pci_bus: 0x1b + 0x10 * (slot % 8) + slot / 8, memory }
        })
        .collect()
}

/// What `CUDA_VISIBLE_DEVICES` leaves: the list ends before the first entry that names no device, and a
/// device that is named twice hides them all.
fn visible(all: &[DeviceDesc], list: Option<&str>) -> Vec<DeviceDesc> {
    let Some(list) = list else { return all.to_vec() };
    let mut shown: Vec<DeviceDesc> = Vec::new();
    for entry in list.split(',') {
        let Some(device) = named(all, entry.trim()) else { break };
        if shown.contains(device) {
            return Vec::new();
        }
        shown.push(device.clone());
    }
    shown
}

/// By position, or by the beginning of the UUID that no other device shares.
fn named<'a>(all: &'a [DeviceDesc], entry: &str) -> Option<&'a DeviceDesc> {
    let Some(prefix) = entry.strip_prefix("GPU-") else {
        return all.get(entry.parse::<usize>().ok()?);
    };
    let mut found = all.iter().filter(|device| uuid_text(&device.uuid).starts_with(prefix));
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

/// A UUID as the vendor's tools write it.
pub(crate) fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::new();
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

impl Machine {
    fn new(shown: Vec<DeviceDesc>) -> Self {
        let device = |desc| Device { desc, primary: Mutex::default(), reserved: Mutex::default() };
        Self {
            process: process::id(),
            devices: shown.into_iter().map(device).collect(),
            space: Space::default(),
            workers: Workers::default(),
            contexts: Registry::default(),
            streams: Registry::default(),
            events: Registry::default(),
            pools: Registry::default(),
            modules: Registry::default(),
            functions: Registry::default(),
            linkers: Registry::default(),
            graphs: Registry::default(),
            executables: Registry::default(),
            memories: Registry::default(),
            reservations: Reservations::default(),
            captures: Captures::default(),
            fault: AtomicI32::new(0),
        }
    }

    pub(crate) fn device(&self, ordinal: c_int) -> Result<&Device, Code> {
        let position = usize::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?;
        self.devices.get(position).ok_or(Code::INVALID_DEVICE)
    }

    /// The fault that ended every context, if one did.
    pub(crate) fn fault(&self) -> Option<Code> {
        // Acquire, with the release in `break_down`: whoever sees the code sees what led to it.
        Some(self.fault.load(Ordering::Acquire)).filter(|&code| code != 0).map(Code)
    }

    /// A kernel did what none may do. The first fault is the one that is told.
    pub(crate) fn break_down(&self, code: Code) {
        let _first = self.fault.compare_exchange(0, code.0, Ordering::Release, Ordering::Relaxed);
    }

    /// Once every context is gone, the next one starts anew.
    pub(crate) fn recover(&self) {
        if self.contexts.len() == 0 {
            self.fault.store(0, Ordering::Release);
        }
    }

    /// Bytes that pools took from a device.
    pub(crate) fn reserved(&self, device: usize) -> MutexGuard<'_, u64> {
        self.devices[device].reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether two devices, by their places in the machine, are joined: `links` says how, see `nvml.rs`.
pub(crate) fn reach_each_other(one: u8, other: u8) -> bool {
    one != other && setting("peers").as_deref() != Some("none")
}

/// Values of a device's attributes, by the numbers of `cuda.h`.
pub(crate) fn attributes(desc: &DeviceDesc) -> BTreeMap<c_int, c_int> {
    BTreeMap::from([
        (1, 1024),       // threads of a block
        (2, 1024),       // of its x dimension
        (3, 1024),       // y
        (4, 64),         // z
        (5, c_int::MAX), // blocks of a grid's x dimension
        (6, 65_535),     // y
        (7, 65_535),     // z
        (8, 49_152),     // shared memory of a block
        (10, 32),        // threads of a warp
        (16, c_int::try_from(number("multiprocessors", 16)).unwrap_or(16)),
        (17, c_int::from(setting("display").is_some())), // kernels have a time limit
        (33, desc.pci_bus.into()),
        (34, 0), // PCI device
        (40, 2), // copy engines
        (41, 1), // unified addresses
        (50, 0), // PCI domain
        (75, 9), // compute capability
        (76, 0),
        (88, 0),                                               // pageable memory
        (97, c_int::try_from(MOST_SHARED_BYTES).unwrap_or(0)), // shared memory of a block that asks for it
        (99, 1),                                               // registers host memory
        (102, 1),                                              // memory by parts
        (100, c_int::from(setting("coherent").is_some())),     // the host's page tables
        (103, c_int::from(cfg!(target_os = "linux"))),         // memory goes by descriptor
        (115, 1),                                              // memory pools
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_visible_devices_is_read_as_the_driver_reads_it() {
        let all = plugged_in();
        let check = |list: Option<&str>, slots: &[u8]| {
            let shown: Vec<u8> = visible(&all, list).iter().map(|device| device.slot).collect();
            assert_eq!(shown, slots, "{list:?}");
        };
        check(None, &[0, 1]);
        check(Some(""), &[]);
        check(Some("1,0"), &[1, 0]);
        check(Some("1"), &[1]);
        check(Some("0,7,1"), &[0]);
        check(Some("0,0"), &[]);
        check(Some("-1"), &[]);
        check(Some(&format!("GPU-{}", uuid_text(&all[1].uuid))), &[1]);
        check(Some("GPU-4a,GPU-5a"), &[1, 0]);
        check(Some("GPU-"), &[]);
    }
}
