//! The numbers by which kernels know types and reductions: the enumerations of `kernels/elements.cuh`.

use warpweft_core_types::{DType, ReduceOp};

/// The types, in the order of their numbers.
pub(crate) const DTYPES: [DType; 15] = [
    DType::F32,
    DType::F16,
    DType::Bf16,
    DType::I64,
    DType::U64,
    DType::I32,
    DType::U32,
    DType::I16,
    DType::U16,
    DType::I8,
    DType::U8,
    DType::Bool,
    DType::F64,
    DType::F8E4m3,
    DType::F8E5m2,
];

/// The reductions, likewise; sums of multiples come behind them.
pub(crate) const OPS: [ReduceOp; 8] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Avg,
    ReduceOp::And,
    ReduceOp::Or,
    ReduceOp::Xor,
];

/// What a kernel is told to do with elements: the type in the upper half, the reduction in the lower.
pub(crate) fn code(op: ReduceOp, dtype: DType) -> Option<u32> {
    let op = match op {
        ReduceOp::PremulSum(_) => OPS.len(),
        op => OPS.iter().position(|other| *other == op)?,
    };
    let dtype = DTYPES.iter().position(|other| *other == dtype)?;
    u32::try_from(dtype << 16 | op).ok()
}
