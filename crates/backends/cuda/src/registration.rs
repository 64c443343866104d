//! Memory that NCCL was told of beforehand.

use std::{
    fmt, mem,
    sync::{Arc, Mutex, PoisonError},
};

use warpweft_core_types::{Buffer, Registration, RegistrationKind};

use crate::communicator::CudaCommunicator;

/// What the library gave for memory.
pub(crate) enum Hold {
    Registration(#[expect(dead_code, reason = "held for its drop")] nccl_rs::Registration),
    Window(#[expect(dead_code, reason = "held for its drop")] nccl_rs::Window),
}

/// Memory that the library knows. Submissions and graphs that use the memory hold this too.
pub(crate) struct Registered {
    hold: Mutex<Option<Hold>>,
    pub(crate) buffer: Arc<dyn Buffer>,
    /// Taken when it is dropped.
    communicator: Option<Arc<CudaCommunicator>>,
}

impl Registered {
    pub(crate) fn new(
        hold: Hold,
        buffer: &Arc<dyn Buffer>,
        communicator: Arc<CudaCommunicator>,
    ) -> Arc<Self> {
        let (buffer, communicator) = (Arc::clone(buffer), Some(communicator));
        Arc::new(Self { hold: Mutex::new(Some(hold)), buffer, communicator })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let hold = mem::take(self.hold.get_mut().unwrap_or_else(PoisonError::into_inner));
        let (buffer, communicator) = (Arc::clone(&self.buffer), self.communicator.take());
        let Some(communicator) = communicator else { return };
        let context = Arc::clone(communicator.context());
        if context.is_left() {
            return mem::forget((hold, buffer, communicator));
        }
        communicator.forget_registration();
        // It may have to wait for a call of another thread's, and this may be a thread that others wait for.
        let entered = Arc::clone(&context);
        context.serve(move || {
            let _current = entered.enter();
            drop(hold);
            // Behind that, and not before.
            drop(buffer);
            drop(communicator);
        });
    }
}

/// The program's handle of registered memory.
pub(crate) struct CudaRegistration {
    pub(crate) registered: Arc<Registered>,
    pub(crate) kind: RegistrationKind,
}

impl Registration for CudaRegistration {
    fn buffer(&self) -> &Arc<dyn Buffer> {
        &self.registered.buffer
    }

    fn kind(&self) -> RegistrationKind {
        self.kind
    }
}

impl fmt::Debug for CudaRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaRegistration({:?}, {} bytes)", self.kind, self.registered.buffer.size())
    }
}
