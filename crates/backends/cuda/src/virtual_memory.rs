//! Device memory by the driver's virtual memory calls: made, mapped and given back by parts, none of which
//! waits for residents, and shared between processes by file descriptor.

use std::{
    ffi::{c_int, c_void},
    fmt,
    mem::{MaybeUninit, offset_of},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    ptr,
    sync::Arc,
};

use cudarc::driver::sys::{
    CUdevice, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1 as Flags,
    CUmemAllocationType, CUmemLocation, CUmemLocationType,
};
use smallvec::{SmallVec, smallvec};
use warpweft_core_types::DriverError;

use crate::{
    context::Context,
    driver::{MemoryHandle, OUT_OF_MEMORY},
};

/// The only kind of handle used here.
const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The same as the functions take it.
const DESCRIPTOR_KIND: c_int = 1;

/// Memory of one device, or of several, mapped at an address that this process's devices with access share.
pub(crate) struct VirtualMemory {
    context: Arc<Context>,
    parts: SmallVec<[Part; 1]>,
    address: CUdeviceptr,
    /// What is reserved, and how much of it is mapped: steps that were taken and are undone.
    reserved: usize,
    mapped: usize,
}

/// Memory of one device, which has no address by itself.
struct Part {
    context: Arc<Context>,
    handle: MemoryHandle,
    /// The size asked for, rounded up.
    len: usize,
}

/// One device's part of a window.
pub(crate) struct Import {
    pub(crate) descriptor: OwnedFd,
    pub(crate) size: usize,
    /// The driver's number of the device.
    pub(crate) owner: CUdevice,
}

impl VirtualMemory {
    /// Makes memory and maps it for its device and `users`.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn create(
        context: &Arc<Context>,
        size: usize,
        users: &[CUdevice],
    ) -> Result<Self, DriverError> {
        let properties = properties(context.ordinal);
        let len = whole(size, granularity(context)?)?;
        let mut handle = 0;
        // SAFETY: the properties are read from this stack frame, the handle is written there.
        unsafe { context.driver.mem_create(&mut handle, len, &properties, 0) }?;
        let part = Part { context: Arc::clone(context), handle, len };
        Self::map(context, smallvec![part], users)
    }

    /// Maps memory of this device that was exported with this size, in this process or another.
    pub(crate) fn import(
        context: &Arc<Context>,
        descriptor: OwnedFd,
        size: usize,
        users: &[CUdevice],
    ) -> Result<Self, ImportError> {
        let import = Import { descriptor, size, owner: context.ordinal };
        let part = Part::import(context, &import, whole(size, granularity(context)?)?)?;
        Ok(Self::map(context, smallvec![part], users)?)
    }

    /// Maps memory that was exported for several devices, one part behind the other, for this device alone.
    pub(crate) fn import_window(context: &Arc<Context>, imports: &[Import]) -> Result<Self, ImportError> {
        let grain = granularity(context)?;
        let import = |import: &Import| {
            if import.size == 0 || !import.size.is_multiple_of(grain) {
                return Err(ImportError::Ragged { size: import.size, grain });
            }
            Part::import(context, import, import.size)
        };
        let parts = imports.iter().map(import).collect::<Result<_, _>>()?;
        Ok(Self::map(context, parts, &[])?)
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn map(
        context: &Arc<Context>,
        parts: SmallVec<[Part; 1]>,
        users: &[CUdevice],
    ) -> Result<Self, DriverError> {
        let driver = &context.driver;
        let len = parts.iter().map(|part| part.len).sum();
        let mut memory = Self { context: Arc::clone(context), parts, address: 0, reserved: 0, mapped: 0 };
        let access: SmallVec<[CUmemAccessDesc; 4]> =
            std::iter::once(&context.ordinal).chain(users).map(access_of).collect();
        let _current = context.enter()?;
        // SAFETY: an address of the driver's choice is written into the value that gives it back.
        unsafe { driver.mem_address_reserve(&mut memory.address, len, 0, 0, 0) }?;
        memory.reserved = len;
        for part in &memory.parts {
            let at = memory.address + memory.mapped as CUdeviceptr;
            // SAFETY: the range was reserved just now, this part of it with this length, and nothing is mapped there; the
            // memory is as long, or the driver refuses it.
            unsafe { driver.mem_map(at, part.len, 0, part.handle, 0) }?;
            memory.mapped += part.len;
            // SAFETY: the part is mapped as a whole; the descriptions are read from the list.
            unsafe { driver.mem_set_access(at, part.len, access.as_ptr(), access.len()) }?;
        }
        Ok(memory)
    }
    pub(crate) const fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// A descriptor that keeps the memory alive by itself; none of memory that has several parts.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn export(&self) -> Option<Result<OwnedFd, DriverError>> {
        let [part] = self.parts.as_slice() else { return None };
        let mut descriptor: c_int = -1;
        let place = ptr::from_mut(&mut descriptor).cast();
        // SAFETY: the handle is live; for this kind of handle one integer is written, to this stack frame.
        let exported = unsafe { self.context.driver.mem_export(place, part.handle, DESCRIPTOR_KIND, 0) };
        // SAFETY: the driver made the descriptor for us, and nobody else has it.
        Some(exported.map(|()| unsafe { OwnedFd::from_raw_fd(descriptor) }))
    }
}

impl Drop for VirtualMemory {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        let driver = &self.context.driver;
        if self.mapped > 0 {
            // SAFETY: mapped by `map`, whole parts, and unmapped once. All work on it is over, since submissions and
            // residents hold its buffer until then. An error here and below means that the device is lost.
            let _unmapped = unsafe { driver.mem_unmap(self.address, self.mapped) };
        }
        if self.reserved > 0 {
            // SAFETY: reserved by `map` with this length, given back once, and nothing is mapped there.
            let _freed = unsafe { driver.mem_address_free(self.address, self.reserved) };
        }
    }
}

impl Part {
    /// Memory of a descriptor, if it is the device's that it is said to be.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn import(context: &Arc<Context>, import: &Import, len: usize) -> Result<Self, ImportError> {
        // The descriptor goes in as a pointer's bits.
        let bits = usize::try_from(import.descriptor.as_raw_fd()).unwrap_or_default();
        let os_handle = ptr::without_provenance_mut::<c_void>(bits);
        let mut handle = 0;
        // SAFETY: the descriptor is open, and of what kind it is the driver finds out; the handle is written to
        // this stack frame.
        unsafe { context.driver.mem_import(&mut handle, os_handle, DESCRIPTOR_KIND) }?;
        let part = Self { context: Arc::clone(context), handle, len };
        // Whoever sent the descriptor says which device it is of, and may be wrong.
        match part.device()? {
            owner if owner == import.owner => Ok(part),
            owner => Err(ImportError::Elsewhere { owner }),
        }
    }

    /// The device that the memory is of.
    #[expect(unsafe_code, reason = "asks the driver")]
    fn device(&self) -> Result<CUdevice, DriverError> {
        // Its other fields are enums, which a newer driver may leave: they are not looked at.
        let mut found = MaybeUninit::<CUmemAllocationProp>::zeroed();
        // SAFETY: the handle is live; one structure is written to this stack frame.
        unsafe { self.context.driver.mem_properties(found.as_mut_ptr(), self.handle) }?;
        let id =
            found.as_ptr().wrapping_byte_add(offset_of!(CUmemAllocationProp, location.id)).cast::<CUdevice>();
        // SAFETY: an integer of that structure, which is on this stack frame and whatever integer it is.
        Ok(unsafe { id.read() })
    }
}

impl Drop for Part {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        // SAFETY: this value owns the handle; what is mapped stays until it is unmapped, and other processes and
        // descriptors have references of their own. An error means that the device is lost.
        let _released = unsafe { self.context.driver.mem_release(self.handle) };
    }
}

impl fmt::Debug for VirtualMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtualMemory({} bytes at {:#x})", self.reserved, self.address)
    }
}

/// Why memory of a descriptor is not taken.
#[derive(Debug)]
pub(crate) enum ImportError {
    /// It is of another device, by the driver's number.
    Elsewhere {
        owner: CUdevice,
    },
    /// Nothing can begin behind a part of this size.
    Ragged {
        size: usize,
        grain: usize,
    },
    Driver(DriverError),
}

impl fmt::Display for ImportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elsewhere { owner } => write!(f, "it is memory of device {owner}"),
            Self::Ragged { size, grain } => {
                write!(f, "a part of {size} bytes is no whole number of pages of {grain}")
            }
            Self::Driver(error) => error.fmt(f),
        }
    }
}

impl From<DriverError> for ImportError {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

/// The size in whole grains. What no number counts is more than any device has.
fn whole(size: usize, grain: usize) -> Result<usize, DriverError> {
    let too_large = || DriverError { api: "cuMemCreate", code: OUT_OF_MEMORY, name: "size".to_owned() };
    size.checked_next_multiple_of(grain).ok_or_else(too_large)
}

#[expect(unsafe_code, reason = "asks the driver")]
fn granularity(context: &Context) -> Result<usize, DriverError> {
    let (properties, mut granularity) = (properties(context.ordinal), 0);
    let option = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as c_int;
    // SAFETY: the properties are read from this stack frame, one integer is written there.
    unsafe { context.driver.mem_granularity(&mut granularity, &properties, option) }?;
    Ok(granularity.max(1))
}

const fn location(device: CUdevice) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

const fn access_of(device: &CUdevice) -> CUmemAccessDesc {
    let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUmemAccessDesc { location: location(*device), flags }
}

const fn properties(device: CUdevice) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: DESCRIPTOR,
        location: location(device),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: Flags { compressionType: 0, gpuDirectRDMACapable: 0, usage: 0, reserved: [0; 4] },
    }
}
