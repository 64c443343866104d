//! The kernel, and what it is told of a call.

use std::sync::Arc;

use warpweft_core_types::{
    CodeFormat, DType, Device, ForeignCode, Kernel, KernelCode, KernelContract, Param, ReduceOp,
};
use warpweft_host_collectives::reduce;

use super::window::{PART, bare_lines, lines};
use crate::{CommError, engine::elements};

/// The kernel. Its second line tells which source it was made of.
pub(crate) const SOURCE: &str = include_str!("../../../kernels/low_latency.ptx");

/// Threads of a block.
pub(crate) const THREADS: u32 = 512;

/// In the place of a reduction: nothing is reduced.
pub(crate) const MOVES: u32 = 0xffff;

/// Bytes of [`Call`].
pub(crate) const CALL: usize = 112;

/// Where its [`Call::code`] is.
pub(crate) const CODE_AT: usize = 80;

/// The kernel for operands apart, and for one operand or two in one range; both for lines alone, and where messages may be
/// bare.
#[derive(Debug, Clone)]
pub(crate) struct Kernels {
    pub(crate) apart: [Arc<dyn Kernel>; 2],
    pub(crate) within: [Arc<dyn Kernel>; 2],
}

/// What the kernel is told: `Call` in `low_latency.cu`, field by field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Call {
    /// Bytes that are given to each receiver, and taken from each sender.
    pub(crate) give_bytes: u64,
    pub(crate) take_bytes: u64,
    /// From what goes to one rank to what goes to the next, and from what comes from one to what comes from the next.
    pub(crate) give_stride: u64,
    pub(crate) take_stride: u64,
    /// Where the operands begin.
    pub(crate) give_at: u64,
    pub(crate) take_at: u64,
    /// The bits of a rank's own factor in the type.
    pub(crate) factor: u64,
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    /// Bits of the ranks that get something of this one, and that give it something; itself among them.
    pub(crate) receivers: u32,
    pub(crate) senders: u32,
    /// See [`code`].
    pub(crate) code: u32,
    /// Blocks that share what is given, and what is taken; none where there is nothing.
    pub(crate) give_channels: u32,
    pub(crate) take_channels: u32,
    /// Bytes of which all places and lengths of operands are multiples.
    pub(crate) unit: u32,
    pub(crate) two_shots: bool,
    /// Whether what is given is bare, and what is taken.
    pub(crate) bare: [bool; 2],
}

impl Call {
    /// As the kernel reads it.
    pub(crate) fn bytes(&self) -> [u8; CALL] {
        let longs = [
            PART,
            self.give_bytes,
            self.take_bytes,
            self.give_stride,
            self.take_stride,
            self.give_at,
            self.take_at,
            self.factor,
        ];
        let words = [
            self.rank,
            self.ranks,
            self.receivers,
            self.senders,
            self.code,
            u32::try_from(lines(self.ranks)).unwrap_or(u32::MAX),
            u32::try_from(bare_lines(self.ranks)).unwrap_or(u32::MAX),
            self.give_channels,
            self.take_channels,
            self.unit,
            u32::from(self.two_shots),
            u32::from(self.bare[0]) | u32::from(self.bare[1]) << 1,
        ];
        let mut bytes = [0; CALL];
        let (front, back) = bytes.split_at_mut(longs.len() * 8);
        for (to, long) in front.as_chunks_mut::<8>().0.iter_mut().zip(longs) {
            *to = long.to_le_bytes();
        }
        for (to, word) in back.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        bytes
    }
}

/// What the kernel is told to do with elements: the type and the reduction, or that they are moved.
pub(crate) fn code(reduction: Option<ReduceOp>, dtype: DType) -> Option<u32> {
    let Some(op) = reduction else { return Some(MOVES) };
    if op.is_defined_for(dtype) { elements::code(op, dtype) } else { None }
}

/// A factor as the type has it, which is 1 times the factor.
pub(crate) fn factor(reduction: Option<ReduceOp>, dtype: DType) -> u64 {
    let Some(ReduceOp::PremulSum(factor)) = reduction else { return 0 };
    let mut bytes = dtype.bits_of(1).to_le_bytes();
    let size = usize::try_from(dtype.size_bytes()).unwrap_or(bytes.len()).min(bytes.len());
    reduce::premultiply(dtype, factor, &mut bytes[..size]);
    u64::from_le_bytes(bytes)
}

/// Loads it.
pub(crate) fn load(device: &dyn Device) -> Result<Kernels, CommError> {
    let module = device.load(&kernel_code())?;
    Ok(Kernels {
        apart: [module.kernel("low_latency")?, module.kernel("low_latency_bare")?],
        within: [module.kernel("low_latency_within")?, module.kernel("low_latency_bare_within")?],
    })
}

/// Whether a device runs the form that there is.
pub(crate) fn is_run_by(device: &dyn Device) -> bool {
    device.info().code_formats.contains(&CodeFormat::Ptx)
}

#[expect(unsafe_code, reason = "vouches for the kernel in CUDA C")]
fn kernel_code() -> KernelCode {
    let call = const { Param::scalar::<[u8; CALL]>() };
    let common = [Param::read_write(PART).aligned(256), Param::read_write(4096).aligned(256)];
    let contract = |name: &str, operands: &[Param]| {
        let params: Vec<Param> = common.iter().chain(operands).copied().chain([call]).collect();
        KernelContract::new(name, params).with_workgroup_size([THREADS, 1, 1])
    };
    let apart = ["low_latency", "low_latency_bare"];
    let within = ["low_latency_within", "low_latency_bare_within"];
    let apart = apart.map(|name| contract(name, &[Param::read(1), Param::write(1)]));
    let within = within.map(|name| contract(name, &[Param::read_write(1)]));
    let form = ForeignCode::Source { format: CodeFormat::Ptx, text: SOURCE.to_owned() };
    // SAFETY: the form has the parameters of the contracts, in order, and blocks of so many threads. It touches the parts
    // of `ranks` ranks, which the window holds (`Window::exchange`), the words of the host's page, and as much of the
    // operands as `plan` took from calls that were checked; `plan` is the only one that makes launches of it. What other
    // ranks write in the window is taken for values and numbers of messages, and never for a place.
    unsafe { KernelCode::new().with_foreign(apart.into_iter().chain(within), form) }
}

#[cfg(test)]
mod tests {
    use super::{
        super::window::{BARE_AT, CHANNELS, SLOTS},
        *,
    };
    use crate::form::MOST_RANKS;

    #[test]
    fn every_reduction_that_is_defined_has_a_number() {
        for dtype in DType::ALL {
            for op in ReduceOp::ALL {
                assert_eq!(code(Some(op), dtype).is_some(), op.is_defined_for(dtype), "{op} of {dtype}");
            }
        }
        assert_eq!(code(None, DType::Bool), Some(0xffff));
        assert_eq!(code(Some(ReduceOp::PremulSum(2.0)), DType::F8E5m2), Some(14 << 16 | 8));
    }

    #[test]
    fn factors_are_rounded_to_the_type() {
        let factor = |value, dtype| factor(Some(ReduceOp::PremulSum(value)), dtype);
        assert_eq!(factor(2.5, DType::F32), u64::from(2.5_f32.to_bits()));
        assert_eq!(factor(2.5, DType::F64), 2.5_f64.to_bits());
        assert_eq!(factor(-1.0, DType::I16), 0xffff);
        assert_eq!(factor(1.6, DType::U8), 2);
    }

    #[test]
    fn the_kernel_is_told_everything_and_has_the_same_numbers() {
        let (two_shots, bare) = (true, [false, true]);
        let call = Call { two_shots, bare, unit: 4, rank: 7, ranks: 9, ..Call::default() };
        let bytes = call.bytes();
        assert_eq!([64, 68, 100, 104, 108].map(|at| bytes[at]), [7, 9, 4, 1, 2]);
        let source = include_str!("../../../kernels/low_latency.cu");
        for text in [
            format!("RANKS = {MOST_RANKS}, SLOTS = {SLOTS}"),
            format!("MOVES = {MOVES:#x}"),
            "ABORT = 0, CLAIM = 4, LIMIT = 8, CHANNELS = 4096, CHANNEL = 512, LINES = 65536".to_owned(),
            format!("BARE_SLOTS = {} << 20", BARE_AT >> 20),
            "ENDED = 16".to_owned(),
        ] {
            assert!(source.contains(&text), "{text}");
        }
        // What channels remember lies before the lines.
        const { assert!(4096 + CHANNELS * 512 <= 65_536) };
    }
}
