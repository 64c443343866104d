//! Memory by parts: made, given addresses, opened to devices, and passed on by descriptor.
//!
//! Memory is a file of the system that has no name in any folder, so that other processes can have it too. What
//! the descriptor says of itself (`/proc`) is how an import knows a device's memory from other files.

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_uint, c_ulonglong, c_void},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use crate::{
    exports::{Code, Raw, exports},
    machine::{Machine, reach_each_other, running},
    pool::{AccessDesc, Location, ON_DEVICE, PINNED},
    space::Owner,
};

/// Sizes are multiples of this.
const GRANULARITY: usize = 2 << 20;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: c_int = 1;

/// `CU_MEM_ACCESS_FLAGS_PROT_READ` and `_READWRITE`.
const READ: c_uint = 1;
const READ_WRITE: c_uint = 3;

/// Memory of a device that may have an address or not.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) device: usize,
    len: usize,
    is_shareable: bool,
    file: system::File,
}

impl Drop for Physical {
    fn drop(&mut self) {
        if let Ok(machine) = running() {
            *machine.reserved(self.device) -= self.len as u64;
        }
    }
}

/// Memory at an address.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) memory: Arc<Physical>,
    access: RwLock<BTreeMap<usize, c_uint>>,
}

impl Mapping {
    pub(crate) fn admits(&self, device: usize, writes: bool) -> bool {
        let needed = if writes { READ_WRITE } else { READ };
        let access = self.access.read().unwrap_or_else(PoisonError::into_inner);
        access.get(&device).is_some_and(|granted| granted & needed == needed)
    }
}

/// Addresses that were reserved, by the first one.
#[derive(Debug, Default)]
pub(crate) struct Reservations(Mutex<BTreeMap<u64, u64>>);

impl Reservations {
    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn holds(&self, start: u64, len: u64) -> bool {
        let ranges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = ranges.range(..=start).next_back();
        before.is_some_and(|(&first, &size)| len <= size && start - first <= size - len)
    }
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Properties {
    kind: c_uint,
    handles: c_uint,
    location: Location,
    windows: Raw,
    flags: [u8; 8],
}

impl Properties {
    /// The device's position, if there is such memory.
    fn device(&self, machine: &Machine) -> Result<usize, Code> {
        if self.kind != PINNED || self.location.kind != ON_DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        // Other kinds of handles are of other systems.
        if self.handles > 1 || self.flags != [0; 8] {
            return Err(Code::NOT_SUPPORTED);
        }
        machine.device(self.location.id)?;
        usize::try_from(self.location.id).map_err(|_| Code::INVALID_DEVICE)
    }
}

/// Takes memory from a device; it is given back when the result is dropped.
fn take(
    machine: &Machine,
    device: usize,
    file: system::File,
    len: usize,
    is_shareable: bool,
) -> Result<Arc<Physical>, Code> {
    let mut reserved = machine.reserved(device);
    if len as u64 > machine.devices[device].desc.memory - *reserved {
        return Err(Code::OUT_OF_MEMORY);
    }
    *reserved += len as u64;
    drop(reserved);
    Ok(Arc::new(Physical { device, len, is_shareable, file }))
}

const fn is_whole(size: usize) -> bool {
    size > 0 && size.is_multiple_of(GRANULARITY)
}

fn key(handle: c_ulonglong) -> Raw {
    std::ptr::without_provenance_mut(usize::try_from(handle).unwrap_or(0))
}

exports! {
    fn cuMemGetAllocationGranularity(out granularity: usize, input properties: Properties, val option: c_int) {
        properties.get()?.device(running()?)?;
        if !matches!(option, 0 | 1) {
            return Err(Code::INVALID_VALUE);
        }
        granularity.set(GRANULARITY)
    }

    fn cuMemCreate(
        out handle: c_ulonglong, val size: usize, input properties: Properties, val flags: c_ulonglong
    ) {
        let machine = running()?;
        let properties = properties.get()?;
        let device = properties.device(machine)?;
        if flags != 0 || !is_whole(size) || handle.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        if size as u64 > machine.devices[device].desc.memory {
            return Err(Code::OUT_OF_MEMORY);
        }
        let file = system::File::create(machine.devices[device].desc.slot, size).ok_or(Code::OUT_OF_MEMORY)?;
        let memory = take(machine, device, file, size, properties.handles == 1)?;
        handle.set(machine.memories.add(memory).addr() as c_ulonglong)
    }

    fn cuMemGetAllocationPropertiesFromHandle(out properties: Properties, val handle: c_ulonglong) {
        let memory = running()?.memories.get(key(handle)).map_err(|_| Code::INVALID_VALUE)?;
        let id = c_int::try_from(memory.device).map_err(|_| Code::INVALID_VALUE)?;
        properties.set(Properties {
            kind: PINNED,
            handles: c_uint::from(memory.is_shareable),
            location: Location { kind: ON_DEVICE, id },
            windows: std::ptr::null_mut(),
            flags: [0; 8],
        })
    }

    /// What is mapped stays until it is unmapped.
    fn cuMemRelease(val handle: c_ulonglong) {
        running()?.memories.remove(key(handle)).map(|_| ()).map_err(|_| Code::INVALID_VALUE)
    }

    fn cuMemAddressReserve(
        out address: u64, val size: usize, val alignment: usize, val _wanted: u64, val flags: c_ulonglong
    ) {
        let machine = running()?;
        let is_aligned = alignment == 0 || (alignment.is_power_of_two() && alignment <= GRANULARITY);
        if flags != 0 || !is_whole(size) || !is_aligned || address.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let room = size.checked_add(GRANULARITY).ok_or(Code::OUT_OF_MEMORY)?;
        let start = system::reserve(room).ok_or(Code::OUT_OF_MEMORY)?.next_multiple_of(GRANULARITY as u64);
        let mut ranges = machine.reservations.0.lock().unwrap_or_else(PoisonError::into_inner);
        ranges.insert(start, size as u64);
        address.set(start)
    }

    /// The addresses are not given out again, so that whoever uses them is found out.
    fn cuMemAddressFree(val address: u64, val size: usize) {
        let machine = running()?;
        let mut ranges = machine.reservations.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_whole = ranges.get(&address) == Some(&(size as u64));
        if !is_whole || !machine.space.within(address, size as u64).is_empty() {
            return Err(Code::INVALID_VALUE);
        }
        ranges.remove(&address);
        Ok(())
    }

    fn cuMemMap(
        val address: u64, val size: usize, val offset: usize, val handle: c_ulonglong, val flags: c_ulonglong
    ) {
        let machine = running()?;
        let memory = machine.memories.get(key(handle)).map_err(|_| Code::INVALID_VALUE)?;
        let sound = flags == 0
            && offset == 0
            && is_whole(size)
            && address.is_multiple_of(GRANULARITY as u64)
            && size <= memory.len
            && machine.reservations.holds(address, size as u64);
        if !sound {
            return Err(Code::INVALID_VALUE);
        }
        let mapping = Arc::new(Mapping { memory: Arc::clone(&memory), access: RwLock::default() });
        // Nobody is admitted yet, so that the memory may come after the note.
        if !machine.space.note(address, size as u64, Owner::Virtual(mapping)) {
            return Err(Code::ALREADY_MAPPED);
        }
        if memory.file.map(address, size) {
            return Ok(());
        }
        machine.space.forget(address, |_| true);
        Err(Code::OUT_OF_MEMORY)
    }

    /// Whole mappings, one or several beside each other.
    fn cuMemUnmap(val address: u64, val size: usize) {
        let machine = running()?;
        let found = machine.space.within(address, size as u64);
        let mut end = address;
        for part in &found {
            if part.start != end || !matches!(part.owner, Owner::Virtual(_)) {
                return Err(Code::INVALID_VALUE);
            }
            end += part.len;
        }
        if found.is_empty() || end != address + size as u64 {
            return Err(Code::INVALID_VALUE);
        }
        for part in found {
            if machine.space.forget(part.start, |_| true) {
                system::unmap(part.start, usize::try_from(part.len).unwrap_or(0));
            }
        }
        Ok(())
    }

    fn cuMemSetAccess(val address: u64, val size: usize, input list: AccessDesc, val count: usize) {
        let machine = running()?;
        let found = machine.space.around(address).ok_or(Code::INVALID_VALUE)?;
        let Owner::Virtual(mapping) = found.owner else { return Err(Code::INVALID_VALUE) };
        if found.start != address || found.len != size as u64 {
            return Err(Code::INVALID_VALUE);
        }
        let owner = machine.devices[mapping.memory.device].desc.slot;
        for index in 0..count {
            let wanted = list.at(index)?;
            let device = machine.device(wanted.location.id)?;
            let position = usize::try_from(wanted.location.id).map_err(|_| Code::INVALID_DEVICE)?;
            let reaches = device.desc.slot == owner || reach_each_other(device.desc.slot, owner);
            if wanted.location.kind != ON_DEVICE || !reaches {
                return Err(Code::INVALID_DEVICE);
            }
            if !matches!(wanted.flags, 0 | READ | READ_WRITE) {
                return Err(Code::INVALID_VALUE);
            }
            mapping.access.write().unwrap_or_else(PoisonError::into_inner).insert(position, wanted.flags);
        }
        Ok(())
    }

    fn cuMemExportToShareableHandle(
        out descriptor: c_int, val handle: c_ulonglong, val kind: c_int, val flags: c_ulonglong
    ) {
        let machine = running()?;
        let memory = machine.memories.get(key(handle)).map_err(|_| Code::INVALID_VALUE)?;
        if kind != DESCRIPTOR || flags != 0 || !memory.is_shareable || descriptor.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        descriptor.set(memory.file.duplicate().ok_or(Code::OUT_OF_MEMORY)?)
    }

    /// Memory that lives in this process is the same memory; other memory is taken from its device.
    fn cuMemImportFromShareableHandle(
        out handle: c_ulonglong, val descriptor: *mut c_void, val kind: c_int
    ) {
        let machine = running()?;
        let descriptor = c_int::try_from(descriptor.addr()).map_err(|_| Code::INVALID_VALUE)?;
        if kind != DESCRIPTOR || handle.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let (file, slot, len) = system::File::open(descriptor).ok_or(Code::INVALID_VALUE)?;
        let known = machine.memories.find(|memory| memory.file.is_same(&file));
        let memory = match known {
            Some(memory) => memory,
            None => {
                let device = machine.devices.iter().position(|device| device.desc.slot == slot);
                take(machine, device.ok_or(Code::INVALID_DEVICE)?, file, len, true)?
            }
        };
        handle.set(machine.memories.add(memory).addr() as c_ulonglong)
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::{
        ffi::c_int,
        fs,
        io::Write as _,
        os::{
            fd::{AsRawFd as _, BorrowedFd, IntoRawFd as _},
            unix::fs::MetadataExt as _,
        },
    };

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};

    use crate::space::LITTER;
    pub(super) use crate::space::{map_nothing as reserve, unmap};

    /// What the files are called; the device's place follows.
    const NAME: &str = "warpweft-stand-in-";

    /// A file without a folder, that never shrinks.
    #[derive(Debug)]
    pub(super) struct File(fs::File);

    impl File {
        pub(super) fn create(slot: u8, len: usize) -> Option<Self> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let mut file = fs::File::from(memfd_create(format!("{NAME}{slot}"), flags).ok()?);
            // New memory holds litter, so that nobody relies on zeros.
            let litter = [LITTER; 64 << 10];
            for _ in 0..len / litter.len() {
                file.write_all(&litter).ok()?;
            }
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).ok()?;
            Some(Self(file))
        }

        /// A file that another stand-in made, the place of its device, and its length.
        #[expect(unsafe_code, reason = "takes a descriptor's number for a descriptor")]
        pub(super) fn open(descriptor: c_int) -> Option<(Self, u8, usize)> {
            if descriptor < 0 {
                return None;
            }
            // SAFETY: the caller of the driver's function vouches that the number is of an open descriptor,
            // which is used until the return alone.
            let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
            let name = fs::read_link(format!("/proc/self/fd/{descriptor}")).ok()?;
            let name = name.to_str()?.strip_prefix("/memfd:")?.strip_prefix(NAME)?;
            let slot = name.split(' ').next()?.parse().ok()?;
            let sealed = fcntl_get_seals(borrowed).ok()?.contains(SealFlags::SHRINK);
            let file = fs::File::from(borrowed.try_clone_to_owned().ok()?);
            let len = usize::try_from(file.metadata().ok()?.len()).ok()?;
            sealed.then_some((Self(file), slot, len))
        }

        pub(super) fn is_same(&self, other: &Self) -> bool {
            let id = |file: &Self| file.0.metadata().ok().map(|data| (data.dev(), data.ino()));
            id(self).is_some() && id(self) == id(other)
        }

        /// A descriptor for somebody else.
        pub(super) fn duplicate(&self) -> Option<c_int> {
            Some(self.0.try_clone().ok()?.into_raw_fd())
        }

        /// Puts the beginning of the file where nothing but a reservation is.
        pub(super) fn map(&self, address: u64, len: usize) -> bool {
            crate::space::map_file(address, len, self.0.as_raw_fd())
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::ffi::c_int;

    /// There is no such memory.
    #[derive(Debug)]
    pub(super) enum File {}

    impl File {
        pub(super) fn create(_slot: u8, _len: usize) -> Option<Self> {
            None
        }

        pub(super) fn open(_descriptor: c_int) -> Option<(Self, u8, usize)> {
            None
        }

        pub(super) fn is_same(&self, _other: &Self) -> bool {
            match *self {}
        }

        pub(super) fn duplicate(&self) -> Option<c_int> {
            match *self {}
        }

        pub(super) fn map(&self, _address: u64, _len: usize) -> bool {
            match *self {}
        }
    }

    pub(super) fn reserve(_len: usize) -> Option<u64> {
        None
    }

    pub(super) fn unmap(_start: u64, _len: usize) {}
}
