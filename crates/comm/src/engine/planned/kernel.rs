//! The kernel that reduces, in every form that some device runs.

use std::sync::Arc;

use smallvec::SmallVec;
use warpweft_core_types::{
    Arg, BufferView, CodeFormat, DType, Device, ForeignCode, HostFunction, Kernel, KernelCode,
    KernelContract, Launch, Param, ReduceOp, Workgroup,
};
use warpweft_host_collectives::reduce;

use crate::{CommError, engine::elements};

/// Threads of a workgroup, each with one word.
const THREADS: u32 = 256;

/// Workgroups of a launch; each goes on where the last has ended.
const MOST_WORKGROUPS: u64 = 1024;

/// What the kernel is told to do this; none if it cannot. Not every device multiplies and divides 64 bits.
pub(crate) fn code(op: ReduceOp, dtype: DType) -> Option<u32> {
    let is_long = dtype.size_bytes() == 8;
    if !op.is_defined_for(dtype) || (is_long && matches!(op, ReduceOp::Prod | ReduceOp::Avg)) {
        return None;
    }
    if matches!(dtype, DType::F64 | DType::F8E4m3 | DType::F8E5m2) || matches!(op, ReduceOp::PremulSum(_)) {
        return None;
    }
    elements::code(op, dtype)
}

/// Memory in which a device reduces: the place for the result, and behind it what each rank gives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    /// Bytes from one to the next.
    pub(crate) stride: u64,
    pub(crate) ranks: u32,
}

impl Layout {
    /// Places start at multiples of so many bytes.
    const ALIGNMENT: u64 = 256;

    /// For this many bytes of each of `ranks`.
    pub(crate) const fn new(bytes: u64, ranks: u32) -> Self {
        Self { stride: bytes.next_multiple_of(Self::ALIGNMENT), ranks }
    }

    pub(crate) const fn size(&self) -> u64 {
        self.stride * (self.ranks as u64 + 1)
    }

    /// The first byte of what a rank gives.
    pub(crate) const fn input(&self, rank: u32) -> u64 {
        self.stride * (rank as u64 + 1)
    }
}

/// Loads it.
pub(crate) fn load(device: &dyn Device) -> Result<Arc<dyn Kernel>, CommError> {
    Ok(device.load(&kernel_code())?.kernel("reduce")?)
}

/// Lends the launch that reduces `bytes` of each rank.
pub(crate) fn with_launch<R>(
    kernel: &Arc<dyn Kernel>,
    memory: &BufferView,
    layout: Layout,
    (op, dtype, bytes): (ReduceOp, DType, u64),
    visit: impl FnOnce(&Launch<'_>) -> Result<R, CommError>,
) -> Result<R, CommError> {
    let missing =
        || CommError::Unsupported { what: format!("{op} of {dtype}"), engines: "planned".to_owned() };
    let code = code(op, dtype).ok_or_else(missing)?;
    // Elements of 64 bits have an even number of words.
    let words = to_u32(bytes.div_ceil(4));
    let values = [words, layout.ranks, to_u32(layout.stride / 4), code].map(u32::to_le_bytes);
    let args = [
        Arg::Buffer(memory),
        Arg::Scalar(&values[0]),
        Arg::Scalar(&values[1]),
        Arg::Scalar(&values[2]),
        Arg::Scalar(&values[3]),
    ];
    let workgroups = to_u32(u64::from(words.div_ceil(THREADS)).min(MOST_WORKGROUPS));
    visit(&Launch::new(kernel, [workgroups, 1, 1], &args)?)
}

/// Pieces are far smaller than this holds.
fn to_u32(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[expect(unsafe_code, reason = "vouches for the kernel in CUDA C and WGSL")]
fn kernel_code() -> KernelCode {
    let mut params = vec![Param::read_write(4).aligned(4)];
    params.extend([const { Param::scalar::<u32>() }; 4]);
    let contract = KernelContract::new("reduce", params).with_workgroup_size([THREADS, 1, 1]);
    let code = KernelCode::new().with_function(contract.clone(), HostFunction::new(reduce_on_host));
    let text = |format, text: &str| ForeignCode::Source { format, text: text.to_owned() };
    let forms = [
        text(CodeFormat::Ptx, include_str!("../../../kernels/reduce.ptx")),
        text(CodeFormat::Wgsl, include_str!("../../../kernels/reduce.wgsl")),
    ];
    // SAFETY: both forms have the parameters of the contract, in order, and workgroups of so many threads. They touch
    // the words of `ranks` + 1 places, `stride` words apart, which is what `Layout::size` allocates; `with_launch` is
    // the only one that launches them.
    forms.into_iter().fold(code, |code, form| unsafe { code.with_foreign([contract.clone()], form) })
}

/// Each workgroup takes its share of every place.
#[expect(unsafe_code, reason = "words as bytes, which the reductions take")]
fn reduce_on_host(workgroup: &Workgroup<'_>) {
    let memory = workgroup.slice::<u8>(0);
    let [words, ranks, stride, code] = [1, 2, 3, 4].map(|index| workgroup.scalar::<u32>(index) as usize);
    let (op, dtype) = (elements::OPS[code & 0xffff], elements::DTYPES[code >> 16]);
    // Two words, so that no element is cut.
    let share = words.div_ceil(workgroup.workgroups()[0] as usize).next_multiple_of(2);
    let first = (workgroup.index()[0] as usize * share).min(words);
    let len = (first + share).min(words) * 4 - first * 4;
    assert!((stride * ranks + first) * 4 + len <= memory.len(), "the places lie within the memory");
    let place = |number: usize| memory.as_ptr().wrapping_add((stride * number + first) * 4);
    // SAFETY: the range lies within the memory, which was compared above, since places do not overlap (`Layout`). The
    // launch has the memory for itself (`Round::reduce`), and no two workgroups have bytes in common.
    let result = unsafe { std::slice::from_raw_parts_mut(place(0), len) };
    // SAFETY: as above; nobody writes inputs while the kernel runs.
    let input = |rank| unsafe { std::slice::from_raw_parts(place(rank).cast_const(), len) };
    let inputs: SmallVec<[&[u8]; 16]> = (1..=ranks).map(input).collect();
    reduce::combine(op, dtype, &[], &inputs, result);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_does_has_a_number() {
        assert_eq!(code(ReduceOp::Sum, DType::F32), Some(0));
        assert_eq!(code(ReduceOp::Xor, DType::Bool), Some(11 << 16 | 7));
        assert_eq!(code(ReduceOp::Prod, DType::I64), None);
        assert_eq!(code(ReduceOp::Sum, DType::F64), None);
        assert_eq!(code(ReduceOp::PremulSum(2.0), DType::F32), None);
        assert_eq!(code(ReduceOp::Sum, DType::Bool), None);
    }
}
