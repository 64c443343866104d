//! The engine of devices of one process, in any mixture: copies by the best route, and kernels that reduce.
//!
//! Ranks post their calls on a board that they share. Whoever completes a round hands the devices everything at once:
//! copies that wait until their sources are ready, kernels behind the copies, and copies of the results. A rank's queue
//! goes on when all of it is over. No thread waits for a device.

mod board;
mod gate;
mod kernel;
mod round;

use std::sync::Arc;

use warpweft_core_types::{
    CollectiveCall, CollectiveError, CollectiveFailure, CollectiveOp, DType, Deadline, Device, Failure, Op,
    Queue, SemaphorePoint, Submission,
};

use self::board::{Board, Post};
use super::{Engine, EngineKind};
use crate::{CommError, persistent::Work};

pub(crate) use self::board::BoardId;

/// One rank's place at the board.
#[derive(Debug)]
pub(crate) struct PlannedEngine {
    device: Arc<dyn Device>,
    board: Arc<Board>,
    rank: u32,
}

impl PlannedEngine {
    /// Comes to the board of this id, which all ranks do before one of them calls.
    pub(crate) fn new(
        id: BoardId,
        rank: u32,
        size: u32,
        device: &Arc<dyn Device>,
    ) -> Result<Self, CommError> {
        let board = Board::find(id, size);
        board.come(rank, device)?;
        Ok(Self { device: Arc::clone(device), board, rank })
    }
}

impl Drop for PlannedEngine {
    fn drop(&mut self) {
        self.board.leave(self.rank);
    }
}

impl Engine for PlannedEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Planned
    }

    fn does(&self, op: CollectiveOp, dtype: DType) -> bool {
        op.reduction().is_none_or(|reduction| kernel::code(reduction, dtype).is_some())
    }

    /// Rounds are ordered by the board.
    fn needs_order(&self) -> bool {
        false
    }

    /// Copies between devices that are found when all ranks have called are no nodes of one device's graph.
    fn with_ops(
        &self,
        calls: &[CollectiveCall<'_>],
        _visit: &mut dyn FnMut(&[Op<'_>]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let what = calls.first().map(|call| call.op().to_string()).unwrap_or_default();
        Err(self.cannot(format!("{what} in a graph")))
    }

    fn persist(&self, calls: &[CollectiveCall<'_>]) -> Result<Work, CommError> {
        Ok(Work::of_calls(calls))
    }

    fn enqueue(
        &self,
        calls: &[CollectiveCall<'_>],
        queue: &Arc<dyn Queue>,
        waits: &[SemaphorePoint],
        then: &[Op<'_>],
    ) -> Result<(), CommError> {
        let ready = SemaphorePoint::new(&self.device.create_semaphore(0)?, 1);
        let gate = gate::Gate::new(&self.device, calls.len())?;
        let signals = std::slice::from_ref(&ready);
        queue.submit(&Submission { waits, signals, ops: &[] })?;
        let behind = [gate.point()];
        queue.submit(&Submission { waits: &behind, ops: then, signals: &[] })?;
        self.board.post(self.rank, calls, &Post { ready, gate });
        Ok(())
    }

    fn check(&self) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn abort(&self, failure: &Arc<Failure>, _deadline: Deadline) {
        self.board.fail(&of_rank(failure, self.rank));
    }

    fn leave(&self, _failure: &Arc<Failure>) {
        self.board.leave(self.rank);
    }
}

/// What happened to one rank's queue or device, as the others are told of it: the end of that rank's part. It is not
/// their device that is lost, nor theirs a kernel that panics.
fn of_rank(failure: &Arc<Failure>, rank: u32) -> Arc<Failure> {
    match &**failure {
        Failure::Collective(_) => Arc::clone(failure),
        other => Arc::new(CollectiveFailure::Aborted { rank, reason: other.to_string() }.into()),
    }
}
