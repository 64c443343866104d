//! Starting the driver, and what it says of devices and codes.

use std::ffi::{c_char, c_int, c_uint};

use crate::{
    control::number,
    exports::{Code, exports},
    machine::{attributes, initialise, reach_each_other, running},
};

exports! {
    fn cuInit(val flags: c_uint) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        initialise()
    }

    fn cuDriverGetVersion(out version: c_int) {
        version.set(c_int::try_from(number("version", 13_000)).unwrap_or(0))
    }

    fn cuGetErrorName(val code: c_int, out name: *const c_char) {
        let known = Code::name(code);
        name.set(known.map_or(std::ptr::null(), |text| text.as_ptr()))?;
        known.map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    fn cuDeviceGetCount(out count: c_int) {
        count.set(c_int::try_from(running()?.devices.len()).unwrap_or(c_int::MAX))
    }

    fn cuDeviceGet(out device: c_int, val ordinal: c_int) {
        running()?.device(ordinal)?;
        device.set(ordinal)
    }

    fn cuDeviceGetName(out name: c_char, val len: c_int, val device: c_int) {
        running()?.device(device)?;
        let room = usize::try_from(len).ok().filter(|&len| len > 0).ok_or(Code::INVALID_VALUE)?;
        let text = b"Stand-in GPU".iter().take(room - 1).chain(b"\0");
        text.enumerate().try_for_each(|(at, &byte)| name.at(at).cast::<u8>().set(byte))
    }

    fn cuDeviceGetUuid_v2(out uuid: [u8; 16], val device: c_int) {
        uuid.set(running()?.device(device)?.desc.uuid)
    }

    fn cuDeviceTotalMem_v2(out bytes: usize, val device: c_int) {
        bytes.set(usize::try_from(running()?.device(device)?.desc.memory).unwrap_or(usize::MAX))
    }

    /// Attributes that nobody asked for yet are refused, so that nobody takes a guess for an answer.
    fn cuDeviceGetAttribute(out value: c_int, val attribute: c_int, val device: c_int) {
        let known = attributes(&running()?.device(device)?.desc);
        value.set(known.get(&attribute).copied().ok_or(Code::INVALID_VALUE)?)
    }

    fn cuDeviceCanAccessPeer(out can: c_int, val device: c_int, val peer: c_int) {
        let machine = running()?;
        let (one, other) = (machine.device(device)?, machine.device(peer)?);
        can.set(reach_each_other(one.desc.slot, other.desc.slot).into())
    }
}
