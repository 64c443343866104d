//! A rank alone: copies.

use std::collections::VecDeque;

use warpweft_core_types::{CallError, CollectiveOp, ReduceOp};

use crate::{
    HostFailure,
    call::Checked,
    moves::{Move, Moves, Reduction},
};

/// What it has sent itself and not received.
#[derive(Debug, Default)]
pub(crate) struct Alone {
    sent: VecDeque<Vec<u8>>,
}

impl Alone {
    /// # Safety
    ///
    /// - The operands are valid and nobody else touches them until this returns.
    pub(crate) unsafe fn run(&mut self, calls: &[Checked<'_>]) -> Result<(), HostFailure> {
        for call in calls.iter().filter(|call| matches!(call.op, CollectiveOp::Send { .. })) {
            // SAFETY: by the caller's contract.
            self.sent.push_back(unsafe { call.src.read() }.to_vec());
        }
        for call in calls {
            match call.op {
                CollectiveOp::Send { .. } => {}
                CollectiveOp::Recv { .. } => {
                    // SAFETY: as the caller's.
                    unsafe { self.receive(call) }?;
                }
                // SAFETY: as the caller's.
                _ => unsafe { keep(call) },
            }
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As [`Self::run`].
    unsafe fn receive(&mut self, call: &Checked<'_>) -> Result<(), HostFailure> {
        // Nobody could ever send it: calls of a rank are made one at a time.
        let missing = CallError::Missing { op: call.op.name(), what: "send to itself" };
        let sent = self.sent.pop_front().ok_or(missing)?;
        if sent.len() != call.dst.len() {
            let (source_bytes, destination_bytes) = (sent.len() as u64, call.dst.len() as u64);
            let lengths = warpweft_core_types::RangeError::LengthMismatch { source_bytes, destination_bytes };
            return Err(CallError::from(lengths).into());
        }
        // SAFETY: by the caller's contract.
        unsafe { call.dst.write() }.copy_from_slice(&sent);
        Ok(())
    }
}

/// Every operation leaves a rank alone with what it had, but for factors and truth values.
///
/// # Safety
///
/// As [`Alone::run`].
unsafe fn keep(call: &Checked<'_>) {
    let spans = |span| std::iter::once(span).collect();
    let factors = match call.op.reduction() {
        Some(ReduceOp::PremulSum(factor)) => vec![factor],
        _ => Vec::new(),
    };
    let step = match call.op.reduction() {
        Some(_) => Move::combine(spans(call.src), spans(call.dst)),
        None => Move::copy(call.dst, call.src),
    };
    let moves: Moves = std::iter::once(step).collect();
    let op = call.op.reduction().unwrap_or(ReduceOp::Sum);
    let reduction = Reduction { op, dtype: call.dtype, custom: call.custom, factors: &factors };
    // SAFETY: by the caller's contract.
    unsafe { moves.perform(&reduction) };
}
