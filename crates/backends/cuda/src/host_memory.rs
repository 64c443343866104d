//! Host memory of other owners: pinned once for all devices, however often it is imported.

use std::{
    ffi::c_void,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use cudarc::driver::sys::CUdeviceptr;
use warpweft_core_types::{AllocError, DriverError, HostMemory};

use crate::{
    cold::{self, ColdError},
    context::Context,
    memory::{PAGE, PINNED_FLAGS},
};

/// Memory that this process has pinned by registering it.
pub(crate) struct Registration {
    context: Arc<Context>,
    memory: HostMemory,
}

impl Registration {
    fn covers(&self, memory: &HostMemory) -> bool {
        let (own, other) = (range(&self.memory), range(memory));
        own.0 <= other.0 && other.1 <= own.1
    }

    fn overlaps(&self, memory: &HostMemory) -> bool {
        let (own, other) = (range(&self.memory), range(memory));
        own.0 < other.1 && other.0 < own.1
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({} bytes)", self.memory.len())
    }
}

fn range(memory: &HostMemory) -> (usize, usize) {
    let first = memory.base().addr().get();
    (first, first.saturating_add(memory.len()))
}

/// All registrations of a driver. One that nobody shares any more is undone a little later, and may be shared
/// again until then.
#[derive(Debug, Default)]
pub(crate) struct Registrations(Mutex<Vec<Arc<Registration>>>);

impl Registrations {
    /// The registration of a range, made if there is none; `None` if somebody else has pinned it.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn share(
        &self,
        context: &Arc<Context>,
        memory: &HostMemory,
    ) -> Result<Option<Arc<Registration>>, AllocError> {
        let refuse = |reason: String| AllocError::CannotImport { device: context.device, reason };
        let mut known = self.list();
        if let Some(found) = known.iter().find(|known| known.covers(memory)) {
            return Ok(Some(Arc::clone(found)));
        }
        if known.iter().any(|known| known.overlaps(memory)) {
            let reason = "a part of it is imported as another range; import all of it once, and use views";
            return Err(refuse(reason.to_owned()));
        }
        if is_pinned(context, memory) {
            return Ok(None);
        }
        let pointer = memory.base().as_ptr().cast();
        // SAFETY: the memory stays valid while the registration has it, which is until it was undone.
        unsafe { cold::register(context, pointer, memory.len(), PINNED_FLAGS) }
            .map_err(|error| refuse(error.to_string()))?;
        let made = Arc::new(Registration { context: Arc::clone(context), memory: memory.clone() });
        known.push(Arc::clone(&made));
        Ok(Some(made))
    }

    /// Undoes registrations that nobody shares.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn undo_unused(&self) -> Result<(), ColdError> {
        let mut gone = Vec::new();
        let mut known = self.list();
        // Shares are made under the lock alone, so one that only the list has stays that way.
        while let Some(at) = known.iter().position(|known| Arc::strong_count(known) == 1) {
            let unused = &known[at];
            // SAFETY: registered by `share`. Whatever used it held a buffer, and with it a share.
            match unsafe { cold::unregister(&unused.context, &unused.memory) } {
                Err(ColdError::Unparkable(resident)) => return Err(ColdError::Unparkable(resident)),
                // An error leaves it registered, which harms nobody.
                Ok(()) | Err(ColdError::Driver { .. }) => gone.push(known.swap_remove(at)),
            }
        }
        drop(known);
        // Outside the lock: owners are dropped here.
        drop(gone);
        Ok(())
    }

    fn list(&self) -> MutexGuard<'_, Vec<Arc<Registration>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether every page is pinned already, by a buffer of this backend or by another library, in one piece.
fn is_pinned(context: &Context, memory: &HostMemory) -> bool {
    let Ok(_current) = context.enter() else { return false };
    let base = memory.base().as_ptr().cast::<c_void>();
    let Ok(first) = address_of(context, base) else { return false };
    (0..memory.len()).step_by(PAGE_STEP).all(|offset| {
        // A gap between two pinned pieces looks like neither.
        let seen = address_of(context, base.wrapping_byte_add(offset));
        seen.is_ok_and(|seen| seen.checked_sub(first) == Some(offset as u64))
    })
}

#[expect(clippy::cast_possible_truncation, reason = "a page")]
const PAGE_STEP: usize = PAGE as usize;

/// Where the device of the current context sees pinned memory.
#[expect(unsafe_code, reason = "asks the driver")]
fn address_of(context: &Context, pointer: *mut c_void) -> Result<CUdeviceptr, DriverError> {
    let mut address = 0;
    // SAFETY: any pointer may be asked about; the address is written to this stack frame.
    unsafe { context.driver.mem_host_get_device_pointer(&mut address, pointer, 0) }?;
    Ok(address)
}

/// Host memory that one device uses.
#[derive(Debug)]
pub(crate) struct Imported {
    context: Arc<Context>,
    pub(crate) memory: HostMemory,
    pub(crate) address: CUdeviceptr,
    /// `None` if somebody else has pinned it, and once this is dropped.
    share: Option<Arc<Registration>>,
}

impl Imported {
    pub(crate) fn new(context: &Arc<Context>, memory: HostMemory) -> Result<Self, AllocError> {
        let share = context.driver.registrations.share(context, &memory)?;
        let mut imported = Self { context: Arc::clone(context), memory, address: 0, share };
        let asked = context.enter().and_then(|_current| {
            imported.address = address_of(context, imported.memory.base().as_ptr().cast())?;
            Ok(())
        });
        match asked {
            Ok(()) => Ok(imported),
            Err(error) => Err(AllocError::CannotImport { device: context.device, reason: error.to_string() }),
        }
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let Some(share) = self.share.take() else { return };
        // In a forked process the list's lock may be held for good.
        if self.context.is_left() {
            return std::mem::forget(share);
        }
        // First, or it would still count.
        drop(share);
        let driver = Arc::clone(&self.context.driver);
        cold::serve_until_made(&self.context, move || driver.registrations.undo_unused());
    }
}
