//! Contexts: the primary one of each device, and which is current on a thread.

use std::{
    cell::RefCell,
    collections::HashSet,
    ffi::{c_int, c_uint},
    fmt,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{
    exports::{Code, Outcome, Raw, exports},
    machine::{Machine, reach_each_other, running},
    stream::Stream,
};

/// How often a wait looks whether a fault has made it pointless.
pub(crate) const LOOK: Duration = Duration::from_millis(2);

/// What a device's work belongs to.
pub(crate) struct Context {
    /// The device's position among the visible ones.
    pub(crate) device: usize,
    /// Held by every call of the context while it lasts, by cold ones while they wait.
    gate: Mutex<()>,
    /// It was destroyed: its kernels end and nothing else begins.
    dead: AtomicBool,
    peers: Mutex<HashSet<usize>>,
    /// Kernels that are in streams, running or not.
    kernels: Mutex<usize>,
    fewer: Condvar,
    default_stream: OnceLock<Arc<Stream>>,
}

thread_local! {
    /// The contexts of this thread; the last is current.
    static STACK: RefCell<Vec<(usize, Arc<Context>)>> = const { RefCell::new(Vec::new()) };
}

/// The machine and the context that is current.
pub(crate) struct Here {
    pub(crate) machine: &'static Machine,
    pub(crate) context: Arc<Context>,
}

/// The current context, if it can still be used.
pub(crate) fn current() -> Result<Here, Code> {
    let machine = running()?;
    let top = STACK.with_borrow(|stack| stack.last().map(|(_, context)| Arc::clone(context)));
    let context = top.ok_or(Code::INVALID_CONTEXT)?;
    if context.is_dead() {
        return Err(Code::CONTEXT_IS_DESTROYED);
    }
    machine.fault().map_or(Ok(Here { machine, context }), Err)
}

impl Here {
    /// Waits for its turn in the context.
    pub(crate) fn enter(&self) -> MutexGuard<'_, ()> {
        self.context.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for its turn, and then until no kernel is in any stream of the context.
    pub(crate) fn enter_cold(&self) -> Result<MutexGuard<'_, ()>, Code> {
        let turn = self.enter();
        let mut kernels = self.context.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        while *kernels > 0 {
            if let Some(code) = self.machine.fault() {
                return Err(code);
            }
            let waited = self.context.fewer.wait_timeout(kernels, LOOK);
            kernels = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(kernels);
        Ok(turn)
    }
}

impl Context {
    fn new(device: usize) -> Self {
        Self {
            device,
            gate: Mutex::default(),
            dead: AtomicBool::new(false),
            peers: Mutex::default(),
            kernels: Mutex::default(),
            fewer: Condvar::new(),
            default_stream: OnceLock::new(),
        }
    }

    pub(crate) fn is_dead(&self) -> bool {
        // Acquire: what its end took away is gone for whoever sees it.
        self.dead.load(Ordering::Acquire)
    }

    pub(crate) fn default_stream(self: &Arc<Self>) -> Arc<Stream> {
        Arc::clone(self.default_stream.get_or_init(|| Arc::new(Stream::new(self))))
    }

    /// Whether its work uses plain memory of contexts of another device.
    pub(crate) fn has_access_to(&self, device: usize) -> bool {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner).contains(&device)
    }

    /// Counts a kernel until the ticket is dropped.
    pub(crate) fn admit_kernel(self: &Arc<Self>) -> Ticket {
        *self.kernels.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Ticket(Arc::clone(self))
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.device)
    }
}

/// A kernel in a stream.
#[derive(Debug)]
pub(crate) struct Ticket(Arc<Context>);

impl Drop for Ticket {
    fn drop(&mut self) {
        *self.0.kernels.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.fewer.notify_all();
    }
}

/// Ends a context and what belongs to it.
fn destroy(machine: &Machine, context: &Arc<Context>, handle: Raw) -> Outcome {
    context.dead.store(true, Ordering::Release);
    machine.contexts.remove(handle)?;
    machine.streams.retain(|stream| !Arc::ptr_eq(&stream.context, context));
    machine.events.retain(|event| !Arc::ptr_eq(&event.context, context));
    machine.functions.retain(|function| !Arc::ptr_eq(&function.module.context, context));
    machine.modules.retain(|module| !Arc::ptr_eq(&module.context, context));
    machine.linkers.retain(|linker| !Arc::ptr_eq(&linker.context, context));
    machine.executables.retain(|executable| !Arc::ptr_eq(&executable.context, context));
    machine.space.free_pinned_of(context);
    machine.recover();
    Ok(())
}

exports! {
    fn cuDevicePrimaryCtxRetain(out context: Raw, val device: c_int) {
        let machine = running()?;
        let mut primary = machine.device(device)?.primary.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(code) = machine.fault() {
            return Err(code);
        }
        if primary.context.is_none() {
            let position = usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
            let made = Arc::new(Context::new(position));
            primary.context = Some((machine.contexts.add(Arc::clone(&made)).addr(), made));
        }
        let handle = primary.context.as_ref().map_or(0, |(handle, _)| *handle);
        context.set(std::ptr::without_provenance_mut(handle))?;
        primary.retained += 1;
        Ok(())
    }

    fn cuDevicePrimaryCtxRelease_v2(val device: c_int) {
        let machine = running()?;
        let mut primary = machine.device(device)?.primary.lock().unwrap_or_else(PoisonError::into_inner);
        primary.retained = primary.retained.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
        let is_last = primary.retained == 0;
        match primary.context.take_if(|_| is_last) {
            Some((handle, context)) => destroy(machine, &context, std::ptr::without_provenance_mut(handle)),
            None => Ok(()),
        }
    }

    /// It becomes current on this thread.
    fn cuCtxCreate_v2(out context: Raw, val flags: c_uint, val device: c_int) {
        let machine = running()?;
        machine.device(device)?;
        // How a thread waits, and no more than that.
        if flags > 7 || context.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        if let Some(code) = machine.fault() {
            return Err(code);
        }
        let position = usize::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
        let made = Arc::new(Context::new(position));
        let handle = machine.contexts.add(Arc::clone(&made));
        STACK.with_borrow_mut(|stack| stack.push((handle.addr(), made)));
        context.set(handle)
    }

    /// Not for primary contexts.
    fn cuCtxDestroy_v2(val context: Raw) {
        let machine = running()?;
        let known = machine.contexts.get(context).map_err(|_| Code::INVALID_CONTEXT)?;
        let is_primary = machine.devices.iter().any(|device| {
            let primary = device.primary.lock().unwrap_or_else(PoisonError::into_inner);
            primary.context.as_ref().is_some_and(|(handle, _)| *handle == context.addr())
        });
        if is_primary {
            return Err(Code::INVALID_CONTEXT);
        }
        STACK.with_borrow_mut(|stack| stack.pop_if(|(handle, _)| *handle == context.addr()));
        destroy(machine, &known, context)
    }

    fn cuCtxGetDevice(out device: c_int) {
        device.set(c_int::try_from(current()?.context.device).unwrap_or(c_int::MAX))
    }

    fn cuCtxPushCurrent_v2(val context: Raw) {
        let known = running()?.contexts.get(context).map_err(|_| Code::INVALID_CONTEXT)?;
        STACK.with_borrow_mut(|stack| stack.push((context.addr(), known)));
        Ok(())
    }

    /// Without a context there is none afterwards.
    fn cuCtxSetCurrent(val context: Raw) {
        let machine = running()?;
        let known = match context.is_null() {
            true => None,
            false => Some(machine.contexts.get(context).map_err(|_| Code::INVALID_CONTEXT)?),
        };
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            stack.extend(known.map(|known| (context.addr(), known)));
        });
        Ok(())
    }

    fn cuCtxGetCurrent(out context: Raw) {
        running()?;
        let top = STACK.with_borrow(|stack| stack.last().map_or(0, |(handle, _)| *handle));
        context.set(std::ptr::without_provenance_mut(top))
    }

    fn cuCtxPopCurrent_v2(out context: Raw) {
        running()?;
        let popped = STACK.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)?;
        if context.is_null() { Ok(()) } else { context.set(std::ptr::without_provenance_mut(popped.0)) }
    }

    fn cuCtxEnablePeerAccess(val peer: Raw, val flags: c_uint) {
        let here = current()?;
        let _turn = here.enter();
        let other = here.machine.contexts.get(peer).map_err(|_| Code::INVALID_CONTEXT)?;
        let slot = |device: usize| here.machine.devices[device].desc.slot;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if !reach_each_other(slot(here.context.device), slot(other.device)) {
            return Err(Code::PEER_ACCESS_UNSUPPORTED);
        }
        let mut peers = here.context.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if peers.insert(other.device) { Ok(()) } else { Err(Code::PEER_ACCESS_ALREADY_ENABLED) }
    }
}
