//! The engine of devices whose driver stack has collectives.

use std::sync::Arc;

use warpweft_core_types::{
    Buffer, CollectiveCall, CollectiveError, CollectiveGroup, CollectiveOp, DType, Deadline, Device, Failure,
    NativeCommunicator, Op, OwnedOp, Registration, RegistrationKind,
};

use super::{Engine, EngineKind};
use crate::CommError;

#[derive(Debug)]
pub(crate) struct NativeEngine {
    device: Arc<dyn Device>,
    communicator: Arc<dyn NativeCommunicator>,
}

impl NativeEngine {
    pub(crate) fn new(device: Arc<dyn Device>, communicator: Arc<dyn NativeCommunicator>) -> Self {
        Self { device, communicator }
    }
}

impl Engine for NativeEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Native
    }

    fn does(&self, op: CollectiveOp, dtype: DType) -> bool {
        self.device.collectives().is_some_and(|family| family.does(op, dtype))
    }

    /// The library orders calls of one communicator in the order in which they are enqueued.
    fn needs_order(&self) -> bool {
        false
    }

    fn with_ops(
        &self,
        calls: &[CollectiveCall<'_>],
        visit: &mut dyn FnMut(&[Op<'_>]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        visit(&[Op::Collective(CollectiveGroup::new(&self.communicator, calls))])
    }

    fn calls_in(&self, node: &OwnedOp) -> usize {
        let own = node.collectives().filter(|group| Arc::ptr_eq(group.communicator(), &self.communicator));
        own.map_or(0, |group| group.ops().filter(|op| !op.is_pairwise()).count())
    }

    fn check(&self) -> Result<(), CollectiveError> {
        self.communicator.check()
    }

    fn abort(&self, failure: &Arc<Failure>, deadline: Deadline) {
        if let Err(error) = self.communicator.abort(Arc::clone(failure), deadline) {
            tracing::warn!(%error, "a communicator was not given back");
        }
    }

    /// Its graphs keep the library's communicator, which has no way to leave but to be given back.
    fn leave(&self, failure: &Arc<Failure>) {
        self.communicator.close(Arc::clone(failure));
    }

    fn register(
        &self,
        buffer: &Arc<dyn Buffer>,
        kind: RegistrationKind,
    ) -> Result<Arc<dyn Registration>, CommError> {
        Ok(self.communicator.register(buffer, kind)?)
    }

    fn allocate(&self, size: u64) -> Result<Arc<dyn Buffer>, CommError> {
        Ok(self.communicator.allocate(size)?)
    }
}
