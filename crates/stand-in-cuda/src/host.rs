//! Memory of the host: pinned here or by others, and what the driver says of an address.

use std::{
    ffi::{c_int, c_uint, c_void},
    sync::Arc,
};

use crate::{
    context::current,
    exports::{Code, Raw, exports},
    machine::running,
    space::Owner,
};

/// `CUpointer_attribute`.
const MEMORY_TYPE: c_int = 2;
const DEVICE_ORDINAL: c_int = 9;
const IS_LEGACY_IPC_CAPABLE: c_int = 10;
const RANGE_START: c_int = 11;
const RANGE_SIZE: c_int = 12;

/// `CUmemorytype`.
const HOST: c_uint = 1;
const DEVICE: c_uint = 2;

exports! {
    fn cuMemHostAlloc(out pointer: *mut c_void, val size: usize, val flags: c_uint) {
        let here = current()?;
        here.machine.captures.forbid()?;
        let _turn = here.enter();
        if size == 0 || flags > 7 || pointer.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let start = here.machine.space.allocate(size, Owner::Pinned(Arc::clone(&here.context)))?;
        pointer.set(std::ptr::with_exposed_provenance_mut(usize::try_from(start).unwrap_or(0)))
    }

    fn cuMemFreeHost(val pointer: *mut c_void) {
        let here = current()?;
        here.machine.captures.forbid()?;
        let _turn = here.enter_cold()?;
        here.machine.space.free_if(pointer.addr() as u64, |owner| matches!(owner, Owner::Pinned(_)))
    }

    fn cuMemHostRegister_v2(val pointer: *mut c_void, val size: usize, val flags: c_uint) {
        let here = current()?;
        here.machine.captures.forbid()?;
        let _turn = here.enter();
        let start = pointer.expose_provenance() as u64;
        if size == 0 || flags > 15 || start == 0 || start.checked_add(size as u64).is_none() {
            return Err(Code::INVALID_VALUE);
        }
        let owner = Owner::Registered(Arc::clone(&here.context));
        let is_new = here.machine.space.note(start, size as u64, owner);
        if is_new { Ok(()) } else { Err(Code::HOST_MEMORY_ALREADY_REGISTERED) }
    }

    fn cuMemHostUnregister(val pointer: *mut c_void) {
        let here = current()?;
        here.machine.captures.forbid()?;
        let _turn = here.enter_cold()?;
        let start = pointer.addr() as u64;
        let was_known =
            here.machine.space.forget(start, |found| matches!(found.owner, Owner::Registered(_)));
        if was_known { Ok(()) } else { Err(Code::HOST_MEMORY_NOT_REGISTERED) }
    }

    /// Of any byte of pinned memory.
    fn cuMemHostGetDevicePointer_v2(out address: u64, val pointer: *mut c_void, val flags: c_uint) {
        let here = current()?;
        let _turn = here.enter();
        let asked = pointer.addr() as u64;
        let found = here.machine.space.around(asked).filter(|found| found.owner.is_host());
        if flags != 0 || found.is_none() {
            return Err(Code::INVALID_VALUE);
        }
        address.set(asked)
    }

    fn cuPointerGetAttribute(out value: c_void, val attribute: c_int, val pointer: u64) {
        let machine = running()?;
        let found = machine.space.around(pointer).ok_or(Code::INVALID_VALUE)?;
        match attribute {
            MEMORY_TYPE => {
                value.cast::<c_uint>().set(if found.owner.is_host() { HOST } else { DEVICE })
            }
            DEVICE_ORDINAL => {
                value.cast::<c_int>().set(c_int::try_from(found.owner.device()).unwrap_or(-1))
            }
            IS_LEGACY_IPC_CAPABLE => value.cast::<bool>().set(matches!(found.owner, Owner::Plain(_))),
            RANGE_START => value.cast::<Raw>().set(std::ptr::with_exposed_provenance_mut(usize::try_from(found.start).unwrap_or(0))),
            RANGE_SIZE => value.cast::<usize>().set(usize::try_from(found.len).unwrap_or(usize::MAX)),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}
