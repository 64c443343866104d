//! What a rank says of its call, and whether all say the same.

use std::fmt::Write as _;

use warpweft_core_types::{CollectiveOp, DType, ReduceOp};

use crate::{step::Line, sync::Ordering};

/// One rank's call, as the others read it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// Bytes of one part.
    pub(crate) bytes: u64,
    /// This rank's factor; 1 if the operation has none.
    pub(crate) factor: f64,
    /// Where its operands are, for ranks in the same process; 0 without.
    pub(crate) source: u64,
    pub(crate) destination: u64,
}

/// What has to be the same on all ranks, besides the length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind {
    /// Operation, reduction, type and root, packed.
    code: u64,
    /// Names a reduction of the user's; 0 for the built-in ones.
    custom: u64,
}

/// The code of a barrier, which is no [`CollectiveOp`].
const BARRIER: u8 = 255;

/// The code of a reduction of the user's.
const CUSTOM: u8 = 255;

const OPERATIONS: [&str; 10] = [
    "all_reduce",
    "reduce_scatter",
    "reduce",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "send",
    "recv",
];

impl Kind {
    pub(crate) const BARRIER: Self = Self { code: BARRIER as u64, custom: 0 };

    pub(crate) fn new(op: CollectiveOp, dtype: DType, custom: Option<&str>) -> Self {
        let reduction = match (custom, op.reduction()) {
            (Some(_), _) => CUSTOM,
            (None, reduction) => reduction.map_or(0, reduction_code),
        };
        let (operation, dtype) = (operation_code(op), dtype_code(dtype));
        let root = op.peer().filter(|_| !op.is_pairwise()).map_or(0, |root| u64::from(root) + 1);
        let code = u64::from_le_bytes([operation, reduction, dtype, 0, 0, 0, 0, 0]) | root << 24;
        Self { code, custom: custom.map_or(0, digest) }
    }

    fn text(self, bytes: u64) -> String {
        let [operation, reduction, dtype, ..] = self.code.to_le_bytes();
        if operation == BARRIER {
            return "barrier".into();
        }
        let mut text = OPERATIONS.get(usize::from(operation)).copied().unwrap_or("?").to_owned();
        if reduction == CUSTOM {
            text.push_str(" by a reduction of the caller's");
        } else if let Some(op) =
            usize::from(reduction).checked_sub(1).and_then(|index| ReduceOp::ALL.get(index))
        {
            let _infallible = write!(text, " {op}");
        }
        if let Some(root) = (self.code >> 24).checked_sub(1) {
            let _infallible = write!(text, " at rank {root}");
        }
        let dtype = DType::ALL.get(usize::from(dtype)).map_or("?", |dtype| dtype.name());
        let _infallible = write!(text, " of {bytes} bytes of {dtype}");
        text
    }
}

impl Header {
    /// Written before the line is published.
    pub(crate) fn write(&self, line: &Line) {
        let words = [
            self.kind.code,
            self.kind.custom,
            self.bytes,
            self.factor.to_bits(),
            self.source,
            self.destination,
        ];
        for (place, word) in line.words.iter().zip(words) {
            // The line's step orders it.
            place.store(word, Ordering::Relaxed);
        }
    }

    /// Read after the line's step was seen.
    pub(crate) fn read(line: &Line) -> Self {
        let word = |index: usize| line.words[index].load(Ordering::Relaxed);
        Self {
            kind: Kind { code: word(0), custom: word(1) },
            bytes: word(2),
            factor: f64::from_bits(word(3)),
            source: word(4),
            destination: word(5),
        }
    }

    pub(crate) fn is_same_call(&self, other: &Self) -> bool {
        self.kind == other.kind && self.bytes == other.bytes
    }

    pub(crate) fn text(&self) -> String {
        self.kind.text(self.bytes)
    }
}

/// Who called what, if not all called the same: every rank comes to the same text.
pub(crate) fn differences(headers: &[Header]) -> Option<String> {
    let first = headers.first()?;
    if headers.iter().all(|header| header.is_same_call(first)) {
        return None;
    }
    let mut calls: Vec<(&Header, Vec<u32>)> = Vec::new();
    for (header, rank) in headers.iter().zip(0..) {
        match calls.iter_mut().find(|(known, _)| known.is_same_call(header)) {
            Some((_, ranks)) => ranks.push(rank),
            None => calls.push((header, vec![rank])),
        }
    }
    let texts: Vec<String> = calls
        .iter()
        .map(|(header, ranks)| format!("{} called {}", ranks_text(ranks), header.text()))
        .collect();
    Some(texts.join("; "))
}

/// `rank 1`, or `ranks 1, 3`.
pub(crate) fn ranks_text(ranks: &[u32]) -> String {
    let all: Vec<String> = ranks.iter().map(u32::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, all.join(", "))
}

/// Its place in [`OPERATIONS`].
fn operation_code(op: CollectiveOp) -> u8 {
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
        CollectiveOp::Recv { .. } => 9,
        _ => CUSTOM - 1,
    }
}

/// Its place in [`ReduceOp::ALL`], from 1.
fn reduction_code(op: ReduceOp) -> u8 {
    match op {
        ReduceOp::Sum => 1,
        ReduceOp::Prod => 2,
        ReduceOp::Min => 3,
        ReduceOp::Max => 4,
        ReduceOp::Avg => 5,
        ReduceOp::And => 6,
        ReduceOp::Or => 7,
        ReduceOp::Xor => 8,
        ReduceOp::PremulSum(_) => 9,
        _ => CUSTOM - 1,
    }
}

/// Its place in [`DType::ALL`].
fn dtype_code(dtype: DType) -> u8 {
    let place = DType::ALL.iter().position(|other| *other == dtype);
    place.and_then(|place| u8::try_from(place).ok()).unwrap_or(CUSTOM - 1)
}

/// FNV-1a: the same in every process, unlike the standard library's.
fn digest(name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, step) | 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(op: CollectiveOp, dtype: DType, bytes: u64) -> Header {
        Header { kind: Kind::new(op, dtype, None), bytes, factor: 1.0, source: 0, destination: 0 }
    }

    #[test]
    fn whoever_differs_is_named_with_what_it_called() {
        let sum = header(CollectiveOp::AllReduce(ReduceOp::Sum), DType::F32, 8);
        let root = header(CollectiveOp::Reduce { op: ReduceOp::Max, root: 1 }, DType::I8, 8);
        assert_eq!(differences(&[sum, sum, sum]), None);
        assert_eq!(
            differences(&[sum, root, sum]).unwrap(),
            "ranks 0, 2 called all_reduce sum of 8 bytes of f32; \
             rank 1 called reduce max at rank 1 of 8 bytes of i8"
        );
    }

    #[test]
    fn factors_and_addresses_may_differ() {
        let mut headers = [header(CollectiveOp::AllReduce(ReduceOp::PremulSum(2.0)), DType::F32, 8); 2];
        headers[1].factor = 3.0;
        headers[1].source = 64;
        headers[1].kind = Kind::new(CollectiveOp::AllReduce(ReduceOp::PremulSum(3.0)), DType::F32, None);
        assert_eq!(differences(&headers), None);
    }

    #[test]
    fn codes_are_places() {
        for (place, op) in (1..).zip(ReduceOp::ALL) {
            assert_eq!(reduction_code(op), place);
        }
        let sum = ReduceOp::Sum;
        let operations = [
            CollectiveOp::AllReduce(sum),
            CollectiveOp::ReduceScatter(sum),
            CollectiveOp::Reduce { op: sum, root: 0 },
            CollectiveOp::AllGather,
            CollectiveOp::Broadcast { root: 0 },
            CollectiveOp::Gather { root: 0 },
            CollectiveOp::Scatter { root: 0 },
            CollectiveOp::AllToAll,
            CollectiveOp::Send { to: 0 },
            CollectiveOp::Recv { from: 0 },
        ];
        for op in operations {
            assert_eq!(OPERATIONS[usize::from(operation_code(op))], op.name());
        }
    }

    #[test]
    fn a_line_carries_a_header() {
        let line = Line::default();
        let written = header(CollectiveOp::Broadcast { root: 3 }, DType::Bf16, 10);
        written.write(&line);
        assert_eq!(Header::read(&line), written);
    }
}
