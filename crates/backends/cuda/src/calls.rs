//! Calls of the seam as calls of NCCL's, and which of them were made before.

use std::{
    ffi::c_void,
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use nccl_rs::{Communicator, DataType, Dst, Error, PremulSum, Reduction, Src};
use smallvec::SmallVec;
use warpweft_core_types::{BufferView, CollectiveCall, CollectiveOp, DType, ReduceOp};

use crate::{collectives::data_type, factor, memory::address_of};

/// Factors that are kept: programs use few, and the library keeps each until it is given back.
const FACTORS: usize = 16;

/// Reductions with factors that were made for a communicator; they go before it.
#[derive(Default)]
pub(crate) struct Factors(SmallVec<[Factor; FACTORS]>);

/// A reduction with a factor, by the type and the factor's bits.
struct Factor {
    dtype: DataType,
    bits: u64,
    op: PremulSum,
}

/// An address as the library takes it.
pub(crate) fn address(address: u64) -> *mut c_void {
    ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0))
}

/// Where a view's elements are, and how many of the library's type.
pub(crate) fn span(view: &BufferView, dtype: DataType) -> Option<(*mut c_void, usize)> {
    let count = usize::try_from(view.size()).ok()? / dtype.size_bytes();
    Some((address(address_of(view)?), count))
}

/// Makes one call of the library's.
///
/// # Safety
///
/// - As for `CudaCommunicator::enqueue`.
#[expect(unsafe_code, reason = "vouches for memory")]
pub(crate) unsafe fn put(
    communicator: &Communicator,
    factors: &mut Factors,
    call: &CollectiveCall<'_>,
    stream: &nccl_rs::Stream<'_>,
) -> Result<(), Error> {
    let unknown = || Error::Invalid { what: "an operand does not belong to a CUDA device".to_owned() };
    let (op, dtype) = (call.op(), element(call));
    let of = |view: Option<&BufferView>| view.map(|view| span(view, dtype).ok_or_else(unknown)).transpose();
    // SAFETY: the caller's: the buffers live until the stream is past the call, and views lie within their buffers.
    // `CollectiveCall` checked what they may share, and queues order what uses them.
    let src = of(call.src())?.map(|(address, count)| unsafe { Src::new(address, count, dtype) });
    // SAFETY: as above.
    let mut dst = of(call.dst())?.map(|(address, count)| unsafe { Dst::new(address, count, dtype) });
    let reduction = op.reduction().map(|op| reduction(communicator, factors, op, dtype)).transpose()?;
    let missing = || Error::Invalid { what: format!("{op} lacks an operand") };
    match (op, src.as_ref(), dst.as_mut(), reduction) {
        (CollectiveOp::AllReduce(_), Some(src), Some(dst), Some(op)) => {
            communicator.all_reduce(src, dst, op, stream)
        }
        (CollectiveOp::ReduceScatter(_), Some(src), Some(dst), Some(op)) => {
            communicator.reduce_scatter(src, dst, op, stream)
        }
        (CollectiveOp::Reduce { root, .. }, Some(src), dst, Some(op)) => {
            communicator.reduce(src, dst, op, root, stream)
        }
        (CollectiveOp::AllGather, Some(src), Some(dst), _) => communicator.all_gather(src, dst, stream),
        (CollectiveOp::Broadcast { root }, src, Some(dst), _) => {
            communicator.broadcast(src, dst, root, stream)
        }
        (CollectiveOp::Gather { root }, Some(src), dst, _) => communicator.gather(src, dst, root, stream),
        (CollectiveOp::Scatter { root }, src, Some(dst), _) => communicator.scatter(src, dst, root, stream),
        (CollectiveOp::AllToAll, Some(src), Some(dst), _) => communicator.all_to_all(src, dst, stream),
        (CollectiveOp::Send { to }, Some(src), ..) => communicator.send(src, to, stream),
        (CollectiveOp::Recv { from }, _, Some(dst), _) => communicator.recv(dst, from, stream),
        _ => Err(missing()),
    }
}

/// The library's type for a call. What is moved and not reduced goes as bytes where the library has no such type, or has
/// it in newer versions alone.
fn element(call: &CollectiveCall<'_>) -> DataType {
    let is_small = matches!(call.dtype(), DType::F8E4m3 | DType::F8E5m2);
    let known = data_type(call.dtype()).filter(|_| !is_small || call.op().reduction().is_some());
    known.unwrap_or(DataType::U8)
}

/// The library's form of a reduction. A factor's is made once and kept.
fn reduction<'a>(
    communicator: &Communicator,
    factors: &'a mut Factors,
    op: ReduceOp,
    dtype: DataType,
) -> Result<Reduction<'a>, Error> {
    let plain = match op {
        ReduceOp::Sum => nccl_rs::ReduceOp::Sum,
        ReduceOp::Prod => nccl_rs::ReduceOp::Prod,
        ReduceOp::Min => nccl_rs::ReduceOp::Min,
        ReduceOp::Max => nccl_rs::ReduceOp::Max,
        ReduceOp::Avg => nccl_rs::ReduceOp::Avg,
        ReduceOp::PremulSum(factor) => {
            let bits = factor.to_bits();
            let known = factors.0.iter().position(|known| known.dtype == dtype && known.bits == bits);
            let at = match known {
                Some(at) => at,
                None => {
                    let op = communicator.premul_sum_of(dtype, &factor::bytes(dtype, factor))?;
                    // The oldest makes room. Calls that used it have what they need of it.
                    if factors.0.len() == FACTORS {
                        factors.0.remove(0);
                    }
                    factors.0.push(Factor { dtype, bits, op });
                    factors.0.len() - 1
                }
            };
            return Ok(Reduction::PremulSum(&factors.0[at].op));
        }
        other => return Err(Error::Invalid { what: format!("NCCL has no {other}") }),
    };
    Ok(Reduction::Plain(plain))
}

/// Which calls were made: kind of operation, reduction, element type and class of size.
pub(crate) struct Seen([AtomicU64; Self::KINDS * Self::REDUCTIONS]);

impl Default for Seen {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; Self::KINDS * Self::REDUCTIONS])
    }
}

impl Seen {
    const KINDS: usize = 10;
    const REDUCTIONS: usize = 7;
    /// Where the library's choice of algorithms changes, roughly.
    const SIZES: [u64; 3] = [64 << 10, 1 << 20, 8 << 20];

    /// Takes note of a call; whether there was none like it.
    pub(crate) fn note(&self, call: &CollectiveCall<'_>) -> bool {
        let size = |view: Option<&BufferView>| view.map_or(0, BufferView::size);
        let bytes = size(call.src()).max(size(call.dst()));
        let class = Self::SIZES.iter().filter(|size| bytes > **size).count();
        let bit = 1_u64 << (call.dtype() as usize * (Self::SIZES.len() + 1) + class);
        let word = &self.0[kind(call.op()) * Self::REDUCTIONS + call.op().reduction().map_or(0, redop)];
        // Relaxed: a hint.
        word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }
}

const fn kind(op: CollectiveOp) -> usize {
    match op {
        CollectiveOp::AllReduce(_) => 0,
        CollectiveOp::ReduceScatter(_) => 1,
        CollectiveOp::Reduce { .. } => 2,
        CollectiveOp::AllGather => 3,
        CollectiveOp::Broadcast { .. } => 4,
        CollectiveOp::Gather { .. } => 5,
        CollectiveOp::Scatter { .. } => 6,
        CollectiveOp::AllToAll => 7,
        CollectiveOp::Send { .. } => 8,
        _ => 9,
    }
}

const fn redop(op: ReduceOp) -> usize {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Min => 2,
        ReduceOp::Max => 3,
        ReduceOp::Avg => 4,
        ReduceOp::PremulSum(_) => 5,
        _ => 6,
    }
}
