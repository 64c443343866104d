//! Calls: what a rank gives, what it gets, and how it is reduced.

use std::{fmt, ptr::NonNull};

use warpweft_core_types::{CallError, CollectiveOp, DType, RangeError, ReduceOp};

use crate::{header::Kind, span::Span};

/// Memory that a call reads or writes.
#[derive(Clone, Copy)]
pub struct Operand(pub(crate) Span);

/// One rank's part of an operation.
#[derive(Debug, Clone, Copy)]
pub struct HostCall<'a> {
    /// What is done.
    pub op: CollectiveOp,
    /// The type of its elements.
    pub dtype: DType,
    /// What this rank gives, if it does.
    pub src: Option<Operand>,
    /// What this rank gets, if it does.
    pub dst: Option<Operand>,
    /// Takes the place of the operation's own reduction.
    pub custom: Option<&'a CustomReduction>,
}

/// One rank's part of an operation whose operands are slices, which share no bytes.
#[derive(Debug)]
pub struct SliceCall<'a> {
    /// What is done.
    pub op: CollectiveOp,
    /// The type of its elements.
    pub dtype: DType,
    /// What this rank gives and gets.
    pub operands: Slices<'a>,
    /// Takes the place of the operation's own reduction.
    pub custom: Option<&'a CustomReduction>,
}

/// Operands that are borrowed.
#[derive(Debug)]
pub enum Slices<'a> {
    /// This rank only gives.
    Src(&'a [u8]),
    /// This rank only gets.
    Dst(&'a mut [u8]),
    /// It does both.
    Both(&'a [u8], &'a mut [u8]),
    /// It does both in the same bytes: the longer operand, of which the shorter is this rank's own part.
    InPlace(&'a mut [u8]),
}

/// A reduction of the user's.
pub struct CustomReduction {
    name: String,
    apply: Box<Apply>,
}

type Apply = dyn Fn(&mut [u8], &[u8]) + Send + Sync;

impl Operand {
    /// Some bytes at an address.
    pub fn new(start: NonNull<u8>, bytes: usize) -> Self {
        Self(Span::new(start, bytes))
    }

    /// A slice that is only read.
    pub fn of(slice: &[u8]) -> Self {
        Self::new(NonNull::from(slice).cast(), slice.len())
    }

    /// A slice that is written.
    pub fn of_mut(slice: &mut [u8]) -> Self {
        let bytes = slice.len();
        Self::new(NonNull::from(slice).cast(), bytes)
    }
}

impl fmt::Debug for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{}", self.0.address(), self.0.len())
    }
}

impl CustomReduction {
    /// The reduction of that name, which is the same on all ranks: `apply(acc, x)` makes `acc` of both, for slices of
    /// one length, which is any number of elements. It is called in the order of ranks, and is to depend on nothing but
    /// its arguments.
    ///
    /// A communicator that fails waits until it has returned, so that it must do so.
    pub fn new(name: impl Into<String>, apply: impl Fn(&mut [u8], &[u8]) + Send + Sync + 'static) -> Self {
        Self { name: name.into(), apply: Box::new(apply) }
    }

    /// What the ranks know it by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `acc = op(acc, x)`.
    pub fn apply(&self, acc: &mut [u8], x: &[u8]) {
        (self.apply)(acc, x);
    }
}

impl fmt::Debug for CustomReduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CustomReduction").field(&self.name).finish()
    }
}

impl SliceCall<'_> {
    pub(crate) fn as_call(&mut self, rank: u32, size: u32) -> HostCall<'_> {
        let (gives, gets) = parts(self.op, rank, size);
        let (src, dst) = match &mut self.operands {
            Slices::Src(src) => (Some(Operand::of(src)), None),
            Slices::Dst(dst) => (None, Some(Operand::of_mut(dst))),
            Slices::Both(src, dst) => (Some(Operand::of(src)), Some(Operand::of_mut(dst))),
            Slices::InPlace(both) => {
                let all = Operand::of_mut(both);
                let own = |of: u64| {
                    let bytes = all.0.len() / usize::try_from(of.max(1)).unwrap_or(1);
                    Operand(all.0.part(rank as usize * bytes, bytes))
                };
                match (gives, gets) {
                    (Some(1), Some(many)) if many > 1 => (Some(own(many)), Some(all)),
                    (Some(many), Some(1)) if many > 1 => (Some(all), Some(own(many))),
                    (gives, gets) => (gives.map(|_| all), gets.map(|_| all)),
                }
            }
        };
        HostCall { op: self.op, dtype: self.dtype, src, dst, custom: self.custom }
    }
}

/// A call whose operands fit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Checked<'a> {
    pub(crate) op: CollectiveOp,
    pub(crate) dtype: DType,
    pub(crate) src: Span,
    pub(crate) dst: Span,
    pub(crate) custom: Option<&'a CustomReduction>,
    /// Bytes of one part.
    pub(crate) bytes: usize,
}

impl<'a> Checked<'a> {
    pub(crate) fn new(call: &HostCall<'a>, rank: u32, size: u32) -> Result<Self, CallError> {
        let op = call.op;
        if let Some(peer) = op.peer().filter(|peer| *peer >= size) {
            return Err(CallError::NoSuchRank { rank: peer, size });
        }
        let is_defined = |reduction: ReduceOp| call.custom.is_some() || reduction.is_defined_for(call.dtype);
        if let Some(reduction) = op.reduction().filter(|reduction| !is_defined(*reduction)) {
            return Err(CallError::NotDefined { op: reduction.name(), dtype: call.dtype });
        }
        let (gives, gets) = parts(op, rank, size);
        let given = part_bytes(op, "source", call.src, gives, call.dtype)?;
        let got = part_bytes(op, "destination", call.dst, gets, call.dtype)?;
        let (src, dst) = (span(call.src), span(call.dst));
        if let (Some(given), Some(got)) = (given, got) {
            if given != got {
                let (source_bytes, destination_bytes) = (given as u64, got as u64);
                return Err(RangeError::LengthMismatch { source_bytes, destination_bytes }.into());
            }
            check_overlap(src, dst, (gives, gets), rank as usize * given)?;
        }
        let bytes = given.or(got).unwrap_or(0);
        Ok(Self { op, dtype: call.dtype, src, dst, custom: call.custom, bytes })
    }

    pub(crate) fn kind(&self) -> Kind {
        Kind::new(self.op, self.dtype, self.custom.map(CustomReduction::name))
    }
}

fn span(operand: Option<Operand>) -> Span {
    operand.map_or(Span::EMPTY, |operand| operand.0)
}

/// What a rank gives and gets, in parts.
pub(crate) fn parts(op: CollectiveOp, rank: u32, size: u32) -> (Option<u64>, Option<u64>) {
    let all = u64::from(size);
    let at = |root: u32, parts: u64| (root == rank).then_some(parts);
    match op {
        CollectiveOp::AllReduce(_) => (Some(1), Some(1)),
        CollectiveOp::ReduceScatter(_) => (Some(all), Some(1)),
        CollectiveOp::Reduce { root, .. } => (Some(1), at(root, 1)),
        CollectiveOp::AllGather => (Some(1), Some(all)),
        CollectiveOp::Broadcast { root } => (at(root, 1), Some(1)),
        CollectiveOp::Gather { root } => (Some(1), at(root, all)),
        CollectiveOp::Scatter { root } => (at(root, all), Some(1)),
        CollectiveOp::AllToAll => (Some(all), Some(all)),
        CollectiveOp::Send { .. } => (Some(1), None),
        CollectiveOp::Recv { .. } => (None, Some(1)),
        // An operation that is added later takes nothing, and is refused with what it is given.
        _ => (None, None),
    }
}

fn part_bytes(
    op: CollectiveOp,
    what: &'static str,
    operand: Option<Operand>,
    parts: Option<u64>,
    dtype: DType,
) -> Result<Option<usize>, CallError> {
    match (operand, parts) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err(CallError::Missing { op: op.name(), what }),
        (Some(_), None) => Err(CallError::Superfluous { op: op.name(), what }),
        (Some(operand), Some(parts)) => {
            let (size, element) = (operand.0.len() as u64, dtype.size_bytes());
            if !size.is_multiple_of(element * parts) {
                return Err(CallError::NotElements { what, size, offset: 0, dtype, parts });
            }
            Ok(usize::try_from(size / parts).ok())
        }
    }
}

/// The same bytes may be both where a result lies where the rank's own operand was.
fn check_overlap(
    src: Span,
    dst: Span,
    parts: (Option<u64>, Option<u64>),
    own: usize,
) -> Result<(), CallError> {
    if !src.overlaps(dst) {
        return Ok(());
    }
    let is_own = |large: Span, small: Span| {
        let part = large.part(own, small.len());
        part.address() == small.address() && part.len() == small.len()
    };
    let fits = match parts {
        (Some(1), Some(1)) => src.address() == dst.address(),
        (Some(1), _) => is_own(dst, src),
        (_, Some(1)) => is_own(src, dst),
        _ => false,
    };
    let end = |span: Span| span.address() + span.len() as u64;
    let bytes = end(src).min(end(dst)) - src.address().max(dst.address());
    if fits { Ok(()) } else { Err(RangeError::Overlap { bytes }.into()) }
}
