//! What is copied and reduced, as data: where from and where to is decided in safe code, and done here.

use std::mem;

use smallvec::SmallVec;
use warpweft_core_types::{DType, ReduceOp};

use crate::{CustomReduction, reduce, span::Span};

/// Bytes after which a rank that reads and writes operands of others looks whether it is to end.
const STRETCH: usize = 256 << 10;

/// Bytes that are reduced at a time where the result goes to several places, or over an operand: they stay in the
/// nearest cache.
const SCRATCH: usize = 8 << 10;

/// Moves of one step, in order.
#[derive(Debug)]
pub(crate) struct Moves(SmallVec<[Move; 2]>);

pub(crate) type Spans = SmallVec<[Span; 2]>;

#[derive(Debug)]
pub(crate) enum Move {
    Copy {
        to: Span,
        from: Span,
    },
    /// Reduces the inputs, in order, and writes the result to all outputs, which may be inputs too.
    Combine {
        inputs: Spans,
        outputs: Spans,
    },
}

/// How inputs are reduced.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reduction<'a> {
    pub(crate) op: ReduceOp,
    pub(crate) dtype: DType,
    pub(crate) custom: Option<&'a CustomReduction>,
    pub(crate) factors: &'a [f64],
}

impl Move {
    pub(crate) fn copy(to: Span, from: Span) -> Self {
        Self::Copy { to, from }
    }

    pub(crate) fn combine(inputs: Spans, outputs: Spans) -> Self {
        Self::Combine { inputs, outputs }
    }

    fn len(&self) -> usize {
        match self {
            Self::Copy { to, from } => to.len().min(from.len()),
            Self::Combine { outputs, .. } => outputs.iter().map(|output| output.len()).min().unwrap_or(0),
        }
    }

    /// A stretch of it.
    fn part(&self, offset: usize, bytes: usize) -> Self {
        let part = |span: &Span| span.part(offset, bytes);
        match self {
            Self::Copy { to, from } => Self::Copy { to: part(to), from: part(from) },
            Self::Combine { inputs, outputs } => Self::Combine {
                inputs: inputs.iter().map(part).collect(),
                outputs: outputs.iter().map(part).collect(),
            },
        }
    }

    /// # Safety
    ///
    /// See [`Moves::perform`].
    unsafe fn perform(&self, reduction: &Reduction<'_>) {
        match self {
            // SAFETY: by the caller's contract.
            Self::Copy { to, from } => unsafe { to.copy_from(*from) },
            Self::Combine { inputs, outputs } => {
                let is_apart = |output: &Span| !inputs.iter().any(|input| input.overlaps(*output));
                match outputs.as_slice() {
                    [output] if is_apart(output) => {
                        // SAFETY: by the caller's contract; it shares no bytes with an input.
                        let out = unsafe { output.write() };
                        // SAFETY: by the caller's contract.
                        unsafe { reduction.combine(inputs, out) };
                    }
                    // SAFETY: by the caller's contract.
                    outputs => unsafe { combine_by_scratch(reduction, inputs, outputs) },
                }
            }
        }
    }
}

/// # Safety
///
/// See [`Moves::perform`].
unsafe fn combine_by_scratch(reduction: &Reduction<'_>, inputs: &[Span], outputs: &[Span]) {
    let mut scratch = Lines::NEW;
    let bytes = outputs.iter().map(|output| output.len()).min().unwrap_or(0);
    for offset in (0..bytes).step_by(SCRATCH) {
        let count = SCRATCH.min(bytes - offset);
        let parts: Spans = inputs.iter().map(|input| input.part(offset, count)).collect();
        // SAFETY: by the caller's contract; no output is written while inputs are read.
        unsafe { reduction.combine(&parts, &mut scratch.0[..count]) };
        for output in outputs {
            // SAFETY: by the caller's contract; nothing reads the output now.
            unsafe { output.part(offset, count).write() }.copy_from_slice(&scratch.0[..count]);
        }
    }
}

impl Reduction<'_> {
    /// # Safety
    ///
    /// - The inputs are valid for reading, and nobody writes them meanwhile.
    unsafe fn combine(&self, inputs: &[Span], out: &mut [u8]) {
        let slices: SmallVec<[&[u8]; 4]> = inputs
            .iter()
            .map(|input| {
                // SAFETY: by the caller's contract.
                unsafe { input.read() }
            })
            .collect();
        match self.custom {
            Some(custom) => self.combine_custom(custom, &slices, out),
            None => reduce::combine(self.op, self.dtype, self.factors, &slices, out),
        }
    }

    /// Whoever wrote the reduction may want aligned memory, which operands need not be.
    fn combine_custom(&self, custom: &CustomReduction, inputs: &[&[u8]], out: &mut [u8]) {
        let (mut acc, mut other) = (Lines::NEW, Lines::NEW);
        for (index, out) in out.chunks_mut(SCRATCH).enumerate() {
            let part = |input: &'_ [u8]| {
                let start = (index * SCRATCH).min(input.len());
                start..(start + out.len()).min(input.len())
            };
            let acc = &mut acc.0[..out.len()];
            for (rank, input) in inputs.iter().enumerate() {
                let input = &input[part(input)];
                if rank == 0 {
                    acc[..input.len()].copy_from_slice(input);
                } else {
                    other.0[..input.len()].copy_from_slice(input);
                    custom.apply(&mut acc[..input.len()], &other.0[..input.len()]);
                }
            }
            out.copy_from_slice(acc);
        }
    }
}

impl Moves {
    pub(crate) fn new() -> Self {
        Self(SmallVec::new())
    }

    pub(crate) fn push(&mut self, step: Move) {
        self.0.push(step);
    }

    /// Does all of it.
    ///
    /// # Safety
    ///
    /// - What is read is valid and nobody writes it meanwhile; what is written is valid and nobody else touches it.
    pub(crate) unsafe fn perform(&self, reduction: &Reduction<'_>) {
        for step in &self.0 {
            // SAFETY: by the caller's contract.
            unsafe { step.perform(reduction) };
        }
    }

    /// Does all of it, unless it is told to end: then it stops soon, in the middle. Whether all is done.
    ///
    /// # Safety
    ///
    /// As for [`Self::perform`].
    pub(crate) unsafe fn perform_until(&self, reduction: &Reduction<'_>, is_over: impl Fn() -> bool) -> bool {
        for step in &self.0 {
            for offset in (0..step.len()).step_by(STRETCH) {
                if is_over() {
                    return false;
                }
                // SAFETY: by the caller's contract.
                unsafe { step.part(offset, STRETCH).perform(reduction) };
            }
        }
        true
    }
}

impl FromIterator<Move> for Moves {
    fn from_iter<I: IntoIterator<Item = Move>>(moves: I) -> Self {
        Self(moves.into_iter().collect())
    }
}

/// Scratch memory that any element type is aligned in.
#[repr(align(64))]
struct Lines([u8; SCRATCH]);

impl Lines {
    const NEW: Self = Self([0; SCRATCH]);
}

const _: () = assert!(SCRATCH.is_multiple_of(mem::size_of::<u64>()) && STRETCH.is_multiple_of(SCRATCH));
