//! The engine of a communicator with one rank: what it gives is what it gets.

use std::sync::Arc;

use smallvec::SmallVec;
use warpweft_core_types::{
    BufferView, CollectiveCall, CollectiveError, CollectiveOp, CopyRegion, DType, Deadline, Failure, Op,
    ReduceOp,
};

use super::{Engine, EngineKind, are_mapped};
use crate::CommError;

#[derive(Debug)]
pub(crate) struct SoloEngine;

/// What calls move: from where to where.
type Moves<'a> = SmallVec<[(&'a BufferView, &'a BufferView); 2]>;

/// The copies that calls come to, in order. What one sends it receives, the first to the first.
fn moves<'a>(calls: &[CollectiveCall<'a>]) -> Result<Moves<'a>, CommError> {
    let (mut sent, mut received) = (SmallVec::<[_; 2]>::new(), SmallVec::<[_; 2]>::new());
    let mut moves = Moves::new();
    for call in calls {
        match (call.op(), call.src(), call.dst()) {
            (CollectiveOp::Send { .. }, Some(src), _) => sent.push(src),
            (CollectiveOp::Recv { .. }, _, Some(dst)) => received.push(dst),
            (_, Some(src), Some(dst)) if !call.is_in_place() => moves.push((src, dst)),
            _ => {}
        }
    }
    if sent.len() != received.len() {
        let what = "a send without a receive of the same group, or a receive without a send".to_owned();
        return Err(SoloEngine.cannot(what));
    }
    moves.extend(sent.into_iter().zip(received));
    Ok(moves)
}

impl Engine for SoloEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Solo
    }

    /// A factor would have to be multiplied, which copies do not do.
    fn does(&self, op: CollectiveOp, _dtype: DType) -> bool {
        !matches!(op.reduction(), Some(ReduceOp::PremulSum(factor)) if factor.to_bits() != 1_f64.to_bits())
    }

    fn needs_order(&self) -> bool {
        false
    }

    fn with_ops(
        &self,
        calls: &[CollectiveCall<'_>],
        visit: &mut dyn FnMut(&[Op<'_>]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let moves = moves(calls)?;
        let regions: Result<SmallVec<[_; 2]>, _> =
            moves.iter().map(|(src, dst)| CopyRegion::new(src, dst)).collect();
        let regions = regions.map_err(|error| CommError::Call(error.into()))?;
        let ops: SmallVec<[_; 2]> = regions.into_iter().map(Op::Copy).collect();
        visit(&ops)
    }

    fn runs(&self, calls: &[CollectiveCall<'_>]) -> bool {
        are_mapped(calls)
    }

    fn run(&self, calls: &[CollectiveCall<'_>], _deadline: Deadline) -> Result<(), CommError> {
        let copy = |(src, dst): (&BufferView, &BufferView)| dst.copy_by_host(src);
        moves(calls)?.into_iter().try_for_each(copy).map_err(|error| CommError::Call(error.into()))
    }

    fn check(&self) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn abort(&self, _failure: &Arc<Failure>, _deadline: Deadline) {}
}
