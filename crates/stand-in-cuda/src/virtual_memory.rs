//! Memory by parts: made, mapped at reserved addresses, opened to devices, and passed on by file descriptor.

use std::{
    collections::BTreeSet,
    ffi::{CString, c_int, c_uint, c_ulonglong, c_void},
    fs::{self, File},
    sync::{Arc, Mutex, PoisonError},
};

use crate::{
    exports::{Code, Outcome, exports},
    machine::{Machine, reach_each_other, running, uuid_text},
    pool::{AccessDesc, Location, ON_DEVICE, PINNED},
    space::{memory_file, reserve},
};

/// Sizes and addresses are multiples of this.
const GRANULARITY: usize = 2 << 20;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: c_int = 1;

/// What such files are called, before the UUID of their device.
const NAME: &str = "warpweft-stand-in-";

/// Memory of a device: a file that other processes can have too.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) device: usize,
    pub(crate) file: File,
    len: u64,
    /// It counts against its device here; elsewhere, where it was imported, it does not.
    is_own: bool,
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Ok(machine) = running()
            && self.is_own
        {
            *machine.reserved(self.device) -= self.len;
        }
    }
}

/// Where memory is mapped, and who may use it there.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) memory: Arc<Memory>,
    guests: Mutex<BTreeSet<usize>>,
}

impl Mapping {
    pub(crate) fn admits(&self, device: usize) -> bool {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner).contains(&device)
    }
}

/// `CUmemAllocationProp`, as far as it is looked at.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Properties {
    allocation: c_uint,
    handles: c_uint,
    location: Location,
}

impl Properties {
    /// The device's position.
    fn device(&self, machine: &Machine) -> Result<usize, Code> {
        if self.allocation != PINNED || self.location.kind != ON_DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        machine.device(self.location.id)?;
        usize::try_from(self.location.id).map_err(|_| Code::INVALID_DEVICE)
    }
}

/// Makes memory, if the device has as much left.
fn make(machine: &Machine, device: usize, len: u64) -> Result<Memory, Code> {
    let mut reserved = machine.reserved(device);
    if len > machine.devices[device].desc.memory - *reserved {
        return Err(Code::OUT_OF_MEMORY);
    }
    let name = CString::new(format!("{NAME}{}", uuid_text(&machine.devices[device].desc.uuid)));
    let file = memory_file(&name.unwrap_or_default(), len).map_err(|_| Code::OUT_OF_MEMORY)?;
    *reserved += len;
    Ok(Memory { device, file, len, is_own: true })
}

/// Finds out what a descriptor is of: only memory that `make` made, of a device that is visible.
fn adopt(machine: &Machine, descriptor: c_int) -> Result<Memory, Code> {
    let path = format!("/proc/self/fd/{descriptor}");
    let name = fs::read_link(&path).map_err(|_| Code::INVALID_VALUE)?;
    let is_of = |uuid: &[u8; 16]| name.to_string_lossy().contains(&format!("{NAME}{}", uuid_text(uuid)));
    let device = machine.devices.iter().position(|device| is_of(&device.desc.uuid));
    // Opened anew: the caller keeps its descriptor.
    let file = File::options().read(true).write(true).open(&path).map_err(|_| Code::INVALID_VALUE)?;
    let len = file.metadata().map_err(|_| Code::INVALID_VALUE)?.len();
    Ok(Memory { device: device.ok_or(Code::INVALID_VALUE)?, file, len, is_own: false })
}

fn is_whole(size: usize) -> bool {
    size > 0 && size.is_multiple_of(GRANULARITY)
}

fn map(address: u64, size: usize, offset: usize, memory: Arc<Memory>) -> Outcome {
    let machine = running()?;
    let reservations = machine.reservations.lock().unwrap_or_else(PoisonError::into_inner);
    let reserved = reservations.range(..=address).next_back();
    let inside = reserved.is_some_and(|(&start, &len)| size <= len && address - start <= (len - size) as u64);
    let end = (offset as u64).checked_add(size as u64);
    if !inside || !is_whole(size) || end.is_none_or(|end| end > memory.len) {
        return Err(Code::INVALID_VALUE);
    }
    let mapping = Mapping { memory, guests: Mutex::default() };
    machine.space.map_at(address, size, offset as u64, Arc::new(mapping))
}

exports! {
    fn cuMemGetAllocationGranularity(out granularity: usize, input properties: Properties, val option: c_int) {
        properties.get()?.device(running()?)?;
        if (0..=1).contains(&option) { granularity.set(GRANULARITY) } else { Err(Code::INVALID_VALUE) }
    }

    fn cuMemCreate(
        out handle: c_ulonglong, val size: usize, input properties: Properties, val flags: c_ulonglong
    ) {
        let machine = running()?;
        let device = properties.get()?.device(machine)?;
        if flags != 0 || !is_whole(size) {
            return Err(Code::INVALID_VALUE);
        }
        handle.set(machine.memories.add(Arc::new(make(machine, device, size as u64)?)).addr() as u64)
    }

    fn cuMemRelease(val handle: c_ulonglong) {
        let handle = usize::try_from(handle).map_err(|_| Code::INVALID_VALUE)?;
        running()?.memories.remove(std::ptr::without_provenance_mut(handle)).map(|_| ())
    }

    fn cuMemAddressReserve(
        out address: u64, val size: usize, val alignment: usize, val wanted: u64, val flags: c_ulonglong
    ) {
        let machine = running()?;
        if flags != 0 || wanted != 0 || alignment > GRANULARITY || !is_whole(size) {
            return Err(Code::INVALID_VALUE);
        }
        // The system gives pages; the first whole address among them is one step in at most.
        let start = reserve(size.checked_add(GRANULARITY).ok_or(Code::OUT_OF_MEMORY)?);
        let start = start.ok_or(Code::OUT_OF_MEMORY)?.next_multiple_of(GRANULARITY as u64);
        address.set(start)?;
        machine.reservations.lock().unwrap_or_else(PoisonError::into_inner).insert(start, size);
        Ok(())
    }

    /// The addresses stay taken, as all that were ever given out.
    fn cuMemAddressFree(val address: u64, val size: usize) {
        let machine = running()?;
        let mut reservations = machine.reservations.lock().unwrap_or_else(PoisonError::into_inner);
        let is_known = reservations.get(&address) == Some(&size);
        if !is_known || machine.space.about(address).is_ok() {
            return Err(Code::INVALID_VALUE);
        }
        reservations.remove(&address);
        Ok(())
    }

    fn cuMemMap(
        val address: u64, val size: usize, val offset: usize, val handle: c_ulonglong, val flags: c_ulonglong
    ) {
        let handle = usize::try_from(handle).map_err(|_| Code::INVALID_VALUE)?;
        let memory = running()?.memories.get(std::ptr::without_provenance_mut(handle))?;
        if flags != 0 || !offset.is_multiple_of(GRANULARITY) {
            return Err(Code::INVALID_VALUE);
        }
        map(address, size, offset, memory)
    }

    fn cuMemUnmap(val address: u64, val size: usize) {
        running()?.space.unmap_at(address, size)
    }

    fn cuMemSetAccess(val address: u64, val size: usize, input access: AccessDesc, val count: usize) {
        let machine = running()?;
        let (start, len, owner) = machine.space.about(address)?;
        let crate::space::Owner::Mapped(mapping) = owner else { return Err(Code::INVALID_VALUE) };
        if (start, len) != (address, size as u64) {
            return Err(Code::INVALID_VALUE);
        }
        for index in 0..count {
            let wanted = access.at(index)?;
            let device = machine.device(wanted.location.id)?;
            let guest = usize::try_from(wanted.location.id).map_err(|_| Code::INVALID_DEVICE)?;
            let own = machine.devices[mapping.memory.device].desc.slot;
            let reaches = guest == mapping.memory.device || reach_each_other(own, device.desc.slot);
            if wanted.location.kind != ON_DEVICE || wanted.flags != 3 || !reaches {
                return Err(Code::INVALID_VALUE);
            }
            mapping.guests.lock().unwrap_or_else(PoisonError::into_inner).insert(guest);
        }
        Ok(())
    }

    fn cuMemExportToShareableHandle(
        out descriptor: c_int, val handle: c_ulonglong, val kind: c_int, val flags: c_ulonglong
    ) {
        let handle = usize::try_from(handle).map_err(|_| Code::INVALID_VALUE)?;
        let memory = running()?.memories.get(std::ptr::without_provenance_mut(handle))?;
        if kind != DESCRIPTOR || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let copy = memory.file.try_clone().map_err(|_| Code::OUT_OF_MEMORY)?;
        descriptor.set(std::os::fd::IntoRawFd::into_raw_fd(copy))
    }

    fn cuMemImportFromShareableHandle(out handle: c_ulonglong, val descriptor: *mut c_void, val kind: c_int) {
        let machine = running()?;
        let descriptor = c_int::try_from(descriptor.addr()).map_err(|_| Code::INVALID_VALUE)?;
        if kind != DESCRIPTOR {
            return Err(Code::INVALID_VALUE);
        }
        let memory = adopt(machine, descriptor)?;
        handle.set(machine.memories.add(Arc::new(memory)).addr() as u64)
    }
}
