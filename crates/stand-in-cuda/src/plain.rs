//! Memory of a context that is in no pool: given out at once, and open to whoever has access to the context.

use std::sync::Arc;

use crate::{
    context::{Context, current},
    exports::{Code, exports},
    machine::running,
    space::Owner,
};

/// Whether a device uses the plain memory of a context: its own, or one that a context of its has access to.
pub(crate) fn admits(owner: &Context, device: usize) -> bool {
    let has_access = |context: &Context| context.device == device && context.has_access_to(owner.device);
    owner.device == device || running().is_ok_and(|machine| machine.contexts.find(has_access).is_some())
}

exports! {
    fn cuMemAlloc_v2(out address: u64, val size: usize) {
        let here = current()?;
        here.machine.captures.forbid()?;
        let _turn = here.enter();
        if size == 0 || address.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        if size as u64 > here.machine.devices[here.context.device].desc.memory {
            return Err(Code::OUT_OF_MEMORY);
        }
        address.set(here.machine.space.allocate(size, Owner::Plain(Arc::clone(&here.context)))?)
    }

    fn cuMemFree_v2(val address: u64) {
        let here = current()?;
        here.machine.captures.forbid()?;
        let _turn = here.enter_cold()?;
        here.machine.space.free_if(address, |owner| matches!(owner, Owner::Plain(_)))
    }
}
