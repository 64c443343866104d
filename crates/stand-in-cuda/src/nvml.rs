//! NVML's functions over the same devices: all that are plugged in, in the order of their PCI addresses,
//! whatever `CUDA_VISIBLE_DEVICES` shows.
//!
//! Settings: `links` is `switch` (the switches hidden, as in virtual machines), `shown` (they are not),
//! `bridge` (each device with its neighbour) or `none`; `link_count`, and `inactive` of them, the first ones;
//! `nvml` is the code that it starts with; `mig`, `vgpu`, and `stealthy` for devices without a UUID.

use std::ffi::{c_char, c_int, c_uint, c_ulong};

use crate::{
    control::{number, setting},
    exports::{Code, Raw, exports},
    machine::{DeviceDesc, plugged_in, uuid_text},
};

/// `nvmlReturn_t`.
const INVALID_ARGUMENT: Code = Code(2);
const NOT_SUPPORTED: Code = Code(3);
const INSUFFICIENT_SIZE: Code = Code(7);

/// Handles are the devices' places from here on.
const HANDLES: usize = 0x9000;

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PciInfo {
    legacy_id: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    id: [u8; 32],
}

/// `nvmlFieldValue_t`, up to the value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct FieldValue {
    field: c_uint,
    scope: c_uint,
    timestamp: i64,
    latency_us: i64,
    kind: c_uint,
    outcome: c_int,
    value: u64,
}

fn device(handle: Raw) -> Result<DeviceDesc, Code> {
    let place = handle.addr().checked_sub(HANDLES).ok_or(INVALID_ARGUMENT)?;
    plugged_in().into_iter().nth(place).ok_or(INVALID_ARGUMENT)
}

/// The device, if it has a link of this number.
fn linked(handle: Raw, link: c_uint) -> Result<DeviceDesc, Code> {
    let device = device(handle)?;
    if u64::from(link) < link_count() { Ok(device) } else { Err(INVALID_ARGUMENT) }
}

/// The device, if that link works.
fn active(handle: Raw, link: c_uint) -> Result<DeviceDesc, Code> {
    let device = linked(handle, link)?;
    if u64::from(link) >= number("inactive", 0) { Ok(device) } else { Err(NOT_SUPPORTED) }
}

fn link_count() -> u64 {
    if wiring() == "none" { 0 } else { number("link_count", 18) }
}

fn wiring() -> String {
    setting("links").unwrap_or_else(|| "switch".to_owned())
}

/// The device at the other end of a bridge.
fn neighbour(device: &DeviceDesc) -> Option<DeviceDesc> {
    plugged_in().into_iter().find(|other| other.slot == device.slot ^ 1)
}

fn is_joined(one: &DeviceDesc, other: &DeviceDesc) -> bool {
    match wiring().as_str() {
        "none" => false,
        "bridge" => other.slot == one.slot ^ 1,
        _ => one.slot != other.slot,
    }
}

fn pci(bus: c_uint, device: c_uint, domain: c_uint) -> PciInfo {
    let mut info = PciInfo {
        legacy_id: [0; 16],
        domain,
        bus,
        device,
        device_id: 0x2335_10de,
        subsystem_id: 0,
        id: [0; 32],
    };
    let text = format!("{domain:08X}:{bus:02X}:{device:02X}.0");
    info.id.iter_mut().zip(text.bytes()).for_each(|(to, byte)| *to = byte);
    info
}

/// The text of a code.
///
/// # Safety
///
/// - None: any code may be asked about.
#[expect(unsafe_code, reason = "the vendor's interface")]
// SAFETY: nothing else in this library, or in a program that links it, has this name.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: c_int) -> *const c_char {
    let text = match code {
        0 => c"Success",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        9 => c"Driver Not Loaded",
        18 => c"Driver/library version mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

exports! {
    fn nvmlInit_v2() {
        match c_int::try_from(number("nvml", 0)) {
            Ok(0) => Ok(()),
            Ok(code) => Err(Code(code)),
            Err(_) => Err(INVALID_ARGUMENT),
        }
    }

    fn nvmlShutdown() {
        Ok(())
    }

    fn nvmlDeviceGetCount_v2(out count: c_uint) {
        count.set(c_uint::try_from(plugged_in().len()).unwrap_or(c_uint::MAX))
    }

    fn nvmlDeviceGetHandleByIndex_v2(val index: c_uint, out device: Raw) {
        let place = usize::try_from(index).ok().filter(|&place| place < plugged_in().len());
        device.set(std::ptr::without_provenance_mut(HANDLES + place.ok_or(INVALID_ARGUMENT)?))
    }

    fn nvmlDeviceGetUUID(val handle: Raw, out text: c_char, val len: c_uint) {
        let words = format!("GPU-{}\0", uuid_text(&device(handle)?.uuid));
        if setting("stealthy").is_some() {
            return Err(NOT_SUPPORTED);
        }
        if words.len() > len as usize {
            return Err(INSUFFICIENT_SIZE);
        }
        words.bytes().enumerate().try_for_each(|(at, byte)| text.at(at).cast::<u8>().set(byte))
    }

    fn nvmlDeviceGetPciInfo_v3(val handle: Raw, out info: PciInfo) {
        info.set(pci(device(handle)?.pci_bus.into(), 0, 0))
    }

    fn nvmlDeviceGetMigMode(val handle: Raw, out current: c_uint, out pending: c_uint) {
        device(handle)?;
        let mode = c_uint::from(setting("mig").is_some());
        current.set(mode)?;
        pending.set(mode)
    }

    fn nvmlDeviceGetVirtualizationMode(val handle: Raw, out mode: c_uint) {
        device(handle)?;
        mode.set(if setting("vgpu").is_some() { 2 } else { 0 })
    }

    fn nvmlDeviceGetMaxPcieLinkGeneration(val handle: Raw, out generation: c_uint) {
        device(handle)?;
        generation.set(5)
    }

    fn nvmlDeviceGetMaxPcieLinkWidth(val handle: Raw, out width: c_uint) {
        device(handle)?;
        width.set(16)
    }

    fn nvmlDeviceGetMemoryAffinity(val handle: Raw, val words: c_uint, out nodes: c_ulong, val scope: c_uint) {
        device(handle)?;
        if words == 0 || scope > 1 {
            return Err(INVALID_ARGUMENT);
        }
        (0..words as usize).try_for_each(|word| nodes.at(word).set(c_ulong::from(word == 0)))
    }

    fn nvmlDeviceGetFieldValues(val handle: Raw, val count: c_int, out values: FieldValue) {
        device(handle)?;
        for index in 0..usize::try_from(count).map_err(|_| INVALID_ARGUMENT)? {
            let place = values.at(index);
            let asked = place.get()?;
            let answer = match asked.field {
                164 => active(handle, asked.scope).map(|_| 26_562),
                165 => linked(handle, asked.scope).map(|_| u64::from(active(handle, asked.scope).is_ok())),
                170 => Ok(0),
                _ => Err(NOT_SUPPORTED),
            };
            let outcome = answer.as_ref().err().map_or(0, |code| code.0);
            place.set(FieldValue { kind: 1, outcome, value: answer.unwrap_or(0), ..asked })?;
        }
        Ok(())
    }

    fn nvmlDeviceGetNvLinkState(val handle: Raw, val link: c_uint, out is_active: c_uint) {
        linked(handle, link)?;
        is_active.set(active(handle, link).is_ok().into())
    }

    fn nvmlDeviceGetNvLinkVersion(val handle: Raw, val link: c_uint, out version: c_uint) {
        active(handle, link)?;
        // NVLink 4.0.
        version.set(6)
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(val handle: Raw, val link: c_uint, out info: PciInfo) {
        let device = active(handle, link)?;
        info.set(match wiring().as_str() {
            "bridge" => pci(neighbour(&device).ok_or(NOT_SUPPORTED)?.pci_bus.into(), 0, 0),
            "shown" => pci(0xc1, 0, 0),
            _ => pci(0xff, 0xff, c_uint::MAX),
        })
    }

    fn nvmlDeviceGetNvLinkRemoteDeviceType(val handle: Raw, val link: c_uint, out kind: c_uint) {
        active(handle, link)?;
        kind.set(match wiring().as_str() {
            "bridge" => 0,
            "shown" => 2,
            _ => 0xff,
        })
    }

    fn nvmlDeviceGetTopologyCommonAncestor(val one: Raw, val other: Raw, out level: c_uint) {
        device(one)?;
        device(other)?;
        // A host bridge.
        level.set(30)
    }

    fn nvmlDeviceGetP2PStatus(val one: Raw, val other: Raw, val index: c_uint, out status: c_uint) {
        let (one, other) = (device(one)?, device(other)?);
        match index {
            2 if !is_joined(&one, &other) => status.set(5),
            0..=4 => status.set(0),
            _ => Err(INVALID_ARGUMENT),
        }
    }
}
