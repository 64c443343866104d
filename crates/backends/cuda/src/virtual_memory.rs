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

/// Memory of one device, mapped at an address that this process's devices with access share.
pub(crate) struct VirtualMemory {
    context: Arc<Context>,
    handle: MemoryHandle,
    address: CUdeviceptr,
    /// What is reserved and mapped: the size asked for, rounded up.
    len: usize,
    /// Steps that were taken and are undone.
    reserved: bool,
    mapped: bool,
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
        Self::unmapped(context, handle, len).map(users)
    }

    /// Maps memory of this device that was exported with this size, in this process or another.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn import(
        context: &Arc<Context>,
        descriptor: &OwnedFd,
        size: usize,
        users: &[CUdevice],
    ) -> Result<Self, ImportError> {
        let len = whole(size, granularity(context)?)?;
        // The descriptor goes in as a pointer's bits.
        let bits = usize::try_from(descriptor.as_raw_fd()).unwrap_or_default();
        let os_handle = ptr::without_provenance_mut::<c_void>(bits);
        let mut handle = 0;
        // SAFETY: the descriptor is open, and of what kind it is the driver finds out; the handle is written to
        // this stack frame.
        unsafe { context.driver.mem_import(&mut handle, os_handle, DESCRIPTOR_KIND) }?;
        let memory = Self::unmapped(context, handle, len);
        // Whoever sent the descriptor says which device it is of, and may be wrong.
        match device_of(&memory)? {
            owner if owner == context.ordinal => Ok(memory.map(users)?),
            owner => Err(ImportError::Elsewhere { owner }),
        }
    }

    /// Memory without an address, which goes when it is dropped.
    fn unmapped(context: &Arc<Context>, handle: MemoryHandle, len: usize) -> Self {
        Self { context: Arc::clone(context), handle, address: 0, len, reserved: false, mapped: false }
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn map(mut self, users: &[CUdevice]) -> Result<Self, DriverError> {
        let (context, len) = (Arc::clone(&self.context), self.len);
        let driver = &context.driver;
        let _current = context.enter()?;
        // SAFETY: an address of the driver's choice is written into the value that gives it back.
        unsafe { driver.mem_address_reserve(&mut self.address, len, 0, 0, 0) }?;
        self.reserved = true;
        // SAFETY: the range was reserved just now with this length and nothing is mapped there; the memory is
        // as long, or the driver refuses it.
        unsafe { driver.mem_map(self.address, len, 0, self.handle, 0) }?;
        self.mapped = true;
        let access: Vec<CUmemAccessDesc> =
            std::iter::once(&context.ordinal).chain(users).map(access_of).collect();
        // SAFETY: the range is mapped as a whole; the descriptions are read from the list.
        unsafe { driver.mem_set_access(self.address, len, access.as_ptr(), access.len()) }?;
        Ok(self)
    }

    pub(crate) const fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// A descriptor that keeps the memory alive by itself.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn export(&self) -> Result<OwnedFd, DriverError> {
        let mut descriptor: c_int = -1;
        let place = ptr::from_mut(&mut descriptor).cast();
        // SAFETY: the handle is live; for this kind of handle one integer is written, to this stack frame.
        unsafe { self.context.driver.mem_export(place, self.handle, DESCRIPTOR_KIND, 0) }?;
        // SAFETY: the driver made the descriptor for us, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }
}

impl Drop for VirtualMemory {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        let driver = &self.context.driver;
        if self.mapped {
            // SAFETY: mapped by `map` and unmapped once. All work on it is over, since submissions and
            // residents hold its buffer until then. An error here and below means that the device is lost.
            let _unmapped = unsafe { driver.mem_unmap(self.address, self.len) };
        }
        if self.reserved {
            // SAFETY: reserved by `map` with this length, given back once, and nothing is mapped there.
            let _freed = unsafe { driver.mem_address_free(self.address, self.len) };
        }
        // SAFETY: this value owns the handle; other processes and descriptors have references of their own.
        let _released = unsafe { driver.mem_release(self.handle) };
    }
}

impl fmt::Debug for VirtualMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VirtualMemory({} bytes at {:#x})", self.len, self.address)
    }
}

/// Why memory of a descriptor is not taken.
#[derive(Debug)]
pub(crate) enum ImportError {
    /// It is of another device, by the driver's number.
    Elsewhere {
        owner: CUdevice,
    },
    Driver(DriverError),
}

impl fmt::Display for ImportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elsewhere { owner } => write!(f, "it is memory of device {owner}"),
            Self::Driver(error) => error.fmt(f),
        }
    }
}

impl From<DriverError> for ImportError {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

/// The device that the memory is of.
#[expect(unsafe_code, reason = "asks the driver")]
fn device_of(memory: &VirtualMemory) -> Result<CUdevice, DriverError> {
    // Its other fields are enums, which a newer driver may leave: they are not looked at.
    let mut found = MaybeUninit::<CUmemAllocationProp>::zeroed();
    // SAFETY: the handle is live; one structure is written to this stack frame.
    unsafe { memory.context.driver.mem_properties(found.as_mut_ptr(), memory.handle) }?;
    let id =
        found.as_ptr().wrapping_byte_add(offset_of!(CUmemAllocationProp, location.id)).cast::<CUdevice>();
    // SAFETY: an integer of that structure, which is on this stack frame and whatever integer it is.
    Ok(unsafe { id.read() })
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
