//! What ranks put in, and what must come out.

use warpweft_core_types::{BufferView, DType, ReduceOp};

use super::{
    params::{Kind, Params, factor},
    ranks::Place,
};
use crate::harness::Verdict;

/// The operands of one rank, filled.
pub(super) struct Operands {
    pub(super) src: Option<BufferView>,
    pub(super) dst: Option<BufferView>,
    /// Memory with bytes around the destination that nobody may change.
    around: Option<BufferView>,
}

/// Bytes that nobody writes.
const GUARD: u8 = 0xa5;

impl Operands {
    pub(super) fn new(place: &Place<'_>, case: &Params) -> Result<Self, libtest_mimic::Failed> {
        let (rank, element) = (place.rank(), case.dtype.size_bytes());
        let (gives, gets) = case.parts(rank);
        let whole = |parts: u64| -> Result<(BufferView, BufferView), libtest_mimic::Failed> {
            let (before, size) = (case.offset * element, parts * case.len * element);
            // An element behind the operand as well.
            let bytes = usize::try_from(before + size + element)?;
            let memory = place.upload(&vec![GUARD; bytes])?;
            let view = memory.slice(before..before + size)?;
            Ok((memory, view))
        };
        let input: Vec<u8> = (0..gives.unwrap_or(0) * case.len)
            .flat_map(|at| bytes_of(case.dtype, input(case, rank, at)))
            .collect();
        let (mut src, mut dst, mut around) = (None, None, None);
        match (gives, gets) {
            (Some(gives), Some(gets)) if case.in_place => {
                let (memory, view) = whole(gives.max(gets))?;
                let part = case.len * element;
                let own = view.slice(u64::from(rank) * part..(u64::from(rank) + 1) * part);
                let pick = |parts: u64| if parts == gives.max(gets) { Ok(view.clone()) } else { own.clone() };
                (src, dst, around) = (Some(pick(gives)?), Some(pick(gets)?), Some(memory));
            }
            _ => {
                if let Some(gives) = gives {
                    src = Some(whole(gives)?.1);
                }
                if let Some(gets) = gets {
                    let (memory, view) = whole(gets)?;
                    (dst, around) = (Some(view), Some(memory));
                }
            }
        }
        if let Some(src) = &src {
            place.write(&input, src)?;
        }
        Ok(Self { src, dst, around })
    }

    /// Whether the destination holds what it must, and nothing else was changed.
    pub(super) fn check(&self, place: &Place<'_>, case: &Params) -> Verdict {
        let (Some(dst), Some(around)) = (&self.dst, &self.around) else { return Ok(()) };
        let (rank, element) = (place.rank(), usize::try_from(case.dtype.size_bytes())?);
        let found = place.download(dst)?;
        for (at, found) in (0..).zip(found.chunks(element)) {
            let expected = bytes_of(case.dtype, expected(case, rank, at));
            if found != expected {
                return Err(format!(
                    "{case:?}, rank {rank}: element {at} is {found:02x?}, not {expected:02x?}"
                )
                .into());
            }
        }
        if !case.in_place {
            let (all, from) = (place.download(around)?, usize::try_from(dst.offset())?);
            let outside = all[..from].iter().chain(&all[from + found.len()..]);
            if outside.copied().any(|byte| byte != GUARD) {
                return Err(format!("{case:?}, rank {rank}: bytes around the result were changed").into());
            }
        }
        Ok(())
    }
}

/// What a rank has at a place: whole numbers so small that no result leaves what the types hold exactly.
fn input(case: &Params, rank: u32, at: u64) -> u32 {
    let noise = (at.wrapping_mul(0x9e37_79b9) ^ u64::from(rank).wrapping_mul(0x85eb_ca6b) ^ (at >> 7)) >> 3;
    let noise = u32::try_from(noise & 0xffff).unwrap_or(0);
    // The smallest floats hold few whole numbers, and may be rounded after every rank.
    let is_small = matches!(case.dtype, DType::F8E4m3 | DType::F8E5m2);
    match case.reduction {
        _ if !case.reduces() => noise % 2,
        ReduceOp::Avg | ReduceOp::PremulSum(_) if is_small && rank > 1 => 0,
        // Some ranks have two, so that products of eight have at most five bits.
        ReduceOp::Prod => 1 + (noise + rank) % 2,
        ReduceOp::Avg => noise % 2 * case.ranks,
        _ => noise % 2,
    }
}

fn expected(case: &Params, rank: u32, at: u64) -> u32 {
    let (len, ranks) = (case.len, 0..case.ranks);
    let other = |at: u64| u32::try_from(at / len).unwrap_or(0);
    let start = u64::from(rank) * len;
    match case.kind {
        Kind::AllReduce | Kind::Reduce => reduce(case, at, ranks),
        Kind::ReduceScatter => reduce(case, start + at, ranks),
        Kind::AllGather | Kind::Gather => input(case, other(at), at % len),
        Kind::Broadcast => input(case, case.root(), at),
        Kind::Scatter => input(case, case.root(), start + at),
        Kind::AllToAll => input(case, other(at), start + at % len),
        Kind::SendRecv => input(case, case.neighbours(rank).1, at),
    }
}

fn reduce(case: &Params, at: u64, ranks: std::ops::Range<u32>) -> u32 {
    let values = ranks.map(|rank| (rank, input(case, rank, at)));
    let plain = || values.clone().map(|(_, value)| value);
    let is_bool = case.dtype == DType::Bool;
    match case.reduction {
        ReduceOp::Prod => plain().product(),
        ReduceOp::Min => plain().min().unwrap_or(0),
        ReduceOp::Max => plain().max().unwrap_or(0),
        ReduceOp::Avg => plain().sum::<u32>() / case.ranks,
        ReduceOp::And => plain().fold(u32::MAX, |all, value| all & value),
        ReduceOp::Or => plain().fold(0, |all, value| all | value),
        ReduceOp::Xor if is_bool => plain().sum::<u32>() % 2,
        ReduceOp::Xor => plain().fold(0, |all, value| all ^ value),
        ReduceOp::PremulSum(_) => values.map(|(rank, value)| value * factor(rank)).sum(),
        _ => plain().sum(),
    }
}

fn bytes_of(dtype: DType, value: u32) -> Vec<u8> {
    let width = usize::try_from(dtype.size_bytes()).unwrap_or(8);
    dtype.bits_of(value).to_le_bytes()[..width].to_vec()
}

/// Numbers between -1 and 1 of every rank, and their sums.
pub(super) struct Numbers {
    dtype: DType,
    /// By rank.
    values: Vec<Vec<f64>>,
}

impl Numbers {
    pub(super) fn new(dtype: DType, len: u64, ranks: u32) -> Self {
        let value = |rank: u32, at: u64| {
            let noise = at.wrapping_mul(0x9e37_79b9_7f4a_7c15)
                ^ u64::from(rank + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
            let number = (noise >> 40) as f64 / f64::from(1 << 23) - 1.0;
            read(dtype, &round(dtype, number))
        };
        Self { dtype, values: (0..ranks).map(|rank| (0..len).map(|at| value(rank, at)).collect()).collect() }
    }

    pub(super) fn bytes(&self) -> usize {
        self.values[0].len() * usize::try_from(self.dtype.size_bytes()).unwrap_or(8)
    }

    pub(super) fn of(&self, rank: u32) -> Vec<u8> {
        self.values[rank as usize].iter().flat_map(|value| round(self.dtype, *value)).collect()
    }

    /// Whether these are the sums, give or take a rounding for each rank.
    pub(super) fn check(&self, found: &[u8]) -> Verdict {
        let width = usize::try_from(self.dtype.size_bytes())?;
        let epsilon = match self.dtype {
            DType::F64 => 2_f64.powi(-52),
            DType::F32 => 2_f64.powi(-23),
            DType::F16 => 2_f64.powi(-10),
            _ => 2_f64.powi(-7),
        };
        for (at, found) in found.chunks(width).enumerate() {
            let terms = self.values.iter().map(|values| values[at]);
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            let (found, tolerance) = (read(self.dtype, found), size * epsilon * self.values.len() as f64);
            if (found - sum).abs() > tolerance {
                return Err(
                    format!("{}: element {at} is {found}, not {sum} by {tolerance}", self.dtype).into()
                );
            }
        }
        Ok(())
    }
}

/// A number in the bytes of its type; what is cut off is lost.
#[expect(clippy::cast_possible_truncation, reason = "it is rounded to the type")]
fn round(dtype: DType, value: f64) -> Vec<u8> {
    match dtype {
        DType::F64 => value.to_le_bytes().to_vec(),
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f64(value).to_le_bytes().to_vec(),
        _ => half::bf16::from_f64(value).to_le_bytes().to_vec(),
    }
}

fn read(dtype: DType, bytes: &[u8]) -> f64 {
    match (dtype, bytes) {
        (DType::F16, [a, b]) => half::f16::from_le_bytes([*a, *b]).to_f64(),
        (DType::Bf16, [a, b]) => half::bf16::from_le_bytes([*a, *b]).to_f64(),
        (DType::F32, [a, b, c, d]) => f64::from(f32::from_le_bytes([*a, *b, *c, *d])),
        (_, bytes) => bytes.try_into().map_or(f64::NAN, f64::from_le_bytes),
    }
}

/// A digest that tells results of ranks apart (Fowler, Noll and Vo's hash).
pub(super) fn digest(bytes: &[u8]) -> [u8; 8] {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step).to_le_bytes()
}
