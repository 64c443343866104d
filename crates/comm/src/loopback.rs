//! Ranks of the engine for few bytes on one device, whose launches in several queues wait for each other.

use std::{sync::Arc, time::Duration};

use warpweft_core_types::{BufferView, CollectiveCall, CollectiveOp, DType, Deadline, Device, Failure, Op};

use crate::{
    CommError, Shape,
    engine::{Engine as _, low_latency::LowLatencyEngine},
};

/// One rank.
#[derive(Debug)]
pub struct Loopback {
    engine: Arc<LowLatencyEngine>,
    place: (u32, u32),
}

impl Loopback {
    /// As many ranks, whose devices wait for `limit` at most.
    ///
    /// # Errors
    ///
    /// What the device refuses.
    pub fn ranks(
        device: &Arc<dyn Device>,
        count: u32,
        limit: Duration,
        deadline: impl Into<Deadline>,
    ) -> Result<Vec<Self>, CommError> {
        let engines = LowLatencyEngine::on_one_device(device, count, limit, deadline.into())?;
        let of_rank = |(rank, engine)| Self { engine: Arc::new(engine), place: (rank, count) };
        Ok((0..).zip(engines).map(of_rank).collect())
    }

    /// Lends the operations of this rank's part in a call, in a shape of its own if one is named.
    ///
    /// # Errors
    ///
    /// [`CommError::Unsupported`] for a shape that there is not, and what is wrong with operands.
    pub fn with_ops(
        &self,
        (op, dtype): (CollectiveOp, DType),
        (src, dst): (Option<&BufferView>, Option<&BufferView>),
        shape: Option<Shape>,
        visit: &mut dyn FnMut(&[Op<'_>]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let call = CollectiveCall::new(op, dtype, self.place, src, dst)?;
        let Some(shape) = shape else { return self.engine.with_ops(&[call], visit) };
        let shaped = Arc::clone(&self.engine).in_shape(shape);
        shaped.ok_or_else(|| self.engine.cannot(format!("{op} in {shape:?}")))?.with_ops(&[call], visit)
    }

    /// Why its device has given up, if it has.
    pub fn given_up(&self) -> Option<Arc<Failure>> {
        self.engine.given_up()
    }

    /// Has launches end that wait.
    pub fn end(&self) {
        let failure = warpweft_core_types::CollectiveFailure::Aborted {
            rank: self.place.0,
            reason: "it was ended".to_owned(),
        };
        self.engine.abort(&Arc::new(failure.into()), Deadline::within(Duration::ZERO));
    }
}
