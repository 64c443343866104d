//! Stream-ordered pools.

use std::{
    collections::BTreeSet,
    ffi::{c_int, c_uint},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    context::current,
    exports::{Code, Outcome, Raw, exports},
    machine::{Machine, reach_each_other, running},
    space::Owner,
    stream::Op,
};

/// Memory of one device, given out and taken back in stream order.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) device: usize,
    /// Other devices that may use its memory.
    guests: Mutex<BTreeSet<usize>>,
    figures: Mutex<Figures>,
}

#[derive(Debug, Default)]
struct Figures {
    /// Taken from the device, and of that, given out.
    reserved: u64,
    used: u64,
    /// What stays reserved when it is given back.
    threshold: u64,
}

/// `CUmemPoolProps`, as far as it is looked at.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolProps {
    allocation: c_uint,
    handles: c_uint,
    location: Location,
    rest: [u64; 9],
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct AccessDesc {
    pub(crate) location: Location,
    pub(crate) flags: c_uint,
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, and `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const PINNED: c_uint = 1;
pub(crate) const ON_DEVICE: c_uint = 1;

/// `CUmemPool_attribute`.
const RELEASE_THRESHOLD: c_int = 4;
const RESERVED_CURRENT: c_int = 5;
const USED_CURRENT: c_int = 7;

impl Pool {
    pub(crate) fn admits(&self, device: usize) -> bool {
        self.device == device || self.guests.lock().unwrap_or_else(PoisonError::into_inner).contains(&device)
    }

    /// Takes bytes, from what is reserved first and then from the device.
    fn take(&self, machine: &Machine, bytes: u64) -> Outcome {
        let mut figures = self.figures();
        let missing =
            (figures.used.checked_add(bytes).ok_or(Code::OUT_OF_MEMORY)?).saturating_sub(figures.reserved);
        let mut reserved = machine.reserved(self.device);
        if missing > machine.devices[self.device].desc.memory - *reserved {
            return Err(Code::OUT_OF_MEMORY);
        }
        *reserved += missing;
        figures.reserved += missing;
        figures.used += bytes;
        Ok(())
    }

    fn give_back(&self, machine: &Machine, bytes: u64) {
        let mut figures = self.figures();
        figures.used -= bytes;
        let keep = figures.threshold;
        trim(&mut figures, &mut machine.reserved(self.device), keep);
    }

    fn figures(&self) -> MutexGuard<'_, Figures> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives to the device what is beyond `keep` and not given out.
fn trim(figures: &mut Figures, of_device: &mut u64, keep: u64) {
    let surplus = figures.reserved - figures.reserved.min(figures.used.max(keep));
    figures.reserved -= surplus;
    *of_device -= surplus;
}

exports! {
    fn cuMemGetInfo_v2(out free: usize, out total: usize) {
        let here = current()?;
        let _turn = here.enter();
        let all = here.machine.devices[here.context.device].desc.memory;
        let taken = *here.machine.reserved(here.context.device);
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        free.set(size(all - taken))?;
        total.set(size(all))
    }

    fn cuMemPoolCreate(out pool: Raw, input properties: PoolProps) {
        let machine = running()?;
        let properties = properties.get()?;
        let device = machine.device(properties.location.id)?;
        if properties.allocation != PINNED || properties.location.kind != ON_DEVICE || device.desc.memory == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let position = usize::try_from(properties.location.id).map_err(|_| Code::INVALID_DEVICE)?;
        let made = Pool { device: position, guests: Mutex::default(), figures: Mutex::default() };
        pool.set(machine.pools.add(Arc::new(made)))
    }

    fn cuMemPoolDestroy(val pool: Raw) {
        let machine = running()?;
        let gone = machine.pools.remove(pool)?;
        // What is given out stays until it is freed.
        let mut figures = gone.figures();
        figures.threshold = 0;
        trim(&mut figures, &mut machine.reserved(gone.device), 0);
        Ok(())
    }

    fn cuMemPoolSetAttribute(val pool: Raw, val attribute: c_int, input value: u64) {
        let pool = running()?.pools.get(pool)?;
        if attribute != RELEASE_THRESHOLD {
            return Err(Code::INVALID_VALUE);
        }
        pool.figures().threshold = value.get()?;
        Ok(())
    }

    fn cuMemPoolGetAttribute(val pool: Raw, val attribute: c_int, out value: u64) {
        let pool = running()?.pools.get(pool)?;
        let figures = pool.figures();
        value.set(match attribute {
            RELEASE_THRESHOLD => figures.threshold,
            RESERVED_CURRENT => figures.reserved,
            USED_CURRENT => figures.used,
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    fn cuMemPoolSetAccess(val pool: Raw, input map: AccessDesc, val count: usize) {
        let machine = running()?;
        let pool = machine.pools.get(pool)?;
        for index in 0..count {
            let access = map.at(index)?;
            let device = machine.device(access.location.id)?;
            let guest = usize::try_from(access.location.id).map_err(|_| Code::INVALID_DEVICE)?;
            let slots = (device.desc.slot, machine.devices[pool.device].desc.slot);
            if access.location.kind != ON_DEVICE || (guest != pool.device && !reach_each_other(slots.0, slots.1)) {
                return Err(Code::INVALID_DEVICE);
            }
            let mut guests = pool.guests.lock().unwrap_or_else(PoisonError::into_inner);
            match access.flags {
                0 if guest != pool.device => guests.remove(&guest),
                3 => guests.insert(guest),
                _ => return Err(Code::INVALID_VALUE),
            };
        }
        Ok(())
    }

    fn cuMemPoolTrimTo(val pool: Raw, val keep: usize) {
        let machine = running()?;
        let pool = machine.pools.get(pool)?;
        trim(&mut pool.figures(), &mut machine.reserved(pool.device), keep as u64);
        Ok(())
    }

    fn cuMemAllocFromPoolAsync(out address: u64, val size: usize, val pool: Raw, val stream: Raw) {
        let here = current()?;
        let _turn = here.enter();
        let (pool, stream) = (here.machine.pools.get(pool)?, here.stream(stream)?);
        stream.refuse_in_capture()?;
        if size == 0 || address.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        pool.take(here.machine, size as u64)?;
        match here.machine.space.allocate(size, Owner::Pool(Arc::clone(&pool))) {
            Ok(start) => address.set(start),
            Err(code) => {
                pool.give_back(here.machine, size as u64);
                Err(code)
            }
        }
    }

    fn cuMemFreeAsync(val address: u64, val stream: Raw) {
        let here = current()?;
        let _turn = here.enter();
        let stream = here.stream(stream)?;
        stream.refuse_in_capture()?;
        here.machine.space.leave(address)?;
        let machine = here.machine;
        stream.push(Op::Free(Box::new(move || {
            // Nobody else frees what is noted as leaving.
            if let Ok((Owner::Pool(pool), bytes)) = machine.space.free(address) {
                pool.give_back(machine, bytes);
            }
        })));
        Ok(())
    }
}
