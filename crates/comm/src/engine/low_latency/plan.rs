//! What a rank's part of calls comes to: launches, and copies for what it sends itself.

use smallvec::SmallVec;
use warpweft_core_types::{Arg, BufferView, CollectiveCall, CollectiveOp};

use super::{
    kernel::{CALL, CODE_AT, Call, MOVES, THREADS, code, factor},
    window::CHANNELS,
};
use crate::{Shape, dispatch::message_bytes};

/// Bytes up to which a message has few channels, and how many those are.
const SMALL: (u64, u32) = (64 << 10, 16);

/// Bytes from which sums are made in two shots where more than two ranks take part: each line goes to one rank and its
/// sum to all, instead of all lines to all.
const TWO_SHOTS_FROM: u64 = 64 << 10;

/// Bytes from which messages are bare: lines would be twice as many, which costs more than the fence and the flag.
const BARE_FROM: u64 = 512 << 10;

/// Bytes between which both are worth trying.
const EITHER: (u64, u64) = (256 << 10, 4 << 20);

/// Set in the number of what a launch does with elements, where nothing is reduced and only two ranks take part.
const PAIRWISE: u32 = 1 << 16;

/// Who plans.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    /// Channels at most.
    pub(crate) channels: u32,
}

/// Operands of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Operands<'a> {
    /// Without bytes in common.
    Apart(&'a BufferView, &'a BufferView),
    /// One, or both in the range of the larger.
    Within(&'a BufferView),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Step<'a> {
    Launch {
        call: Call,
        operands: Operands<'a>,
        channels: u32,
    },
    /// What a rank sends to itself.
    Copy {
        src: &'a BufferView,
        dst: &'a BufferView,
    },
}

pub(crate) type Steps<'a> = SmallVec<[Step<'a>; 2]>;

impl<'a> Step<'a> {
    /// What its kernel is told.
    pub(crate) fn bytes(&self) -> [u8; CALL] {
        match self {
            Self::Launch { call, .. } => call.bytes(),
            Self::Copy { .. } => [0; CALL],
        }
    }

    /// The operands of a launch.
    pub(crate) fn operands(&self) -> impl Iterator<Item = &'a BufferView> + use<'a> {
        let operands = match *self {
            Self::Launch { operands: Operands::Apart(src, dst), .. } => [Some(src), Some(dst)],
            Self::Launch { operands: Operands::Within(both), .. } => [Some(both), None],
            Self::Copy { .. } => [None, None],
        };
        operands.into_iter().flatten()
    }
}

/// Whether a launch with these arguments is of two ranks only.
pub(crate) fn is_pairwise(args: &[Arg<'_>]) -> bool {
    let Some(Arg::Scalar(bytes)) = args.last() else { return false };
    let code = bytes.get(CODE_AT..CODE_AT + 4).and_then(|code| <[u8; 4]>::try_from(code).ok());
    code.is_some_and(|code| u32::from_le_bytes(code) == PAIRWISE | MOVES)
}

/// A send or a receive without a receive or a send of this rank's own.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unpaired;

impl Place {
    /// How a call of so many bytes from rank to rank is done if nothing was measured.
    pub(crate) fn usual(&self, op: CollectiveOp, bytes: u64) -> Shape {
        let is_sum = matches!(op, CollectiveOp::AllReduce(_));
        Shape {
            channels: self.channels_for(bytes),
            two_shots: is_sum && self.ranks > 2 && bytes >= TWO_SHOTS_FROM,
            bare: bytes >= BARE_FROM,
        }
    }

    /// The ways that are worth trying for such a call.
    pub(crate) fn shapes(&self, op: CollectiveOp, bytes: u64) -> Vec<Shape> {
        let channels = self.channels_for(bytes);
        let most = self.most_channels(bytes);
        let mut all = vec![channels, (channels / 2).max(1), (channels * 2).min(most)];
        all.sort_unstable();
        all.dedup();
        let shots: &[bool] = if matches!(op, CollectiveOp::AllReduce(_)) && self.ranks > 2 {
            &[false, true]
        } else {
            &[false]
        };
        let sorts: &[bool] = match bytes {
            few if few < EITHER.0 => &[false],
            many if many > EITHER.1 => &[true],
            _ => &[false, true],
        };
        let mut shapes = Vec::new();
        for channels in all {
            for &two_shots in shots {
                shapes.extend(sorts.iter().map(|&bare| Shape { channels, two_shots, bare }));
            }
        }
        shapes
    }

    /// Small messages are to leave room for other work.
    fn most_channels(&self, bytes: u64) -> u32 {
        let most = if bytes <= SMALL.0 { SMALL.1 } else { CHANNELS };
        most.min(self.channels).max(1)
    }

    /// A block for as many lines as it has threads, within bounds.
    pub(crate) fn channels_for(&self, bytes: u64) -> u32 {
        let wanted = bytes.div_ceil(8).div_ceil(u64::from(THREADS));
        u32::try_from(wanted).unwrap_or(u32::MAX).clamp(1, self.most_channels(bytes))
    }

    const fn own(&self) -> u32 {
        1 << self.rank
    }

    const fn all(&self) -> u32 {
        u32::MAX >> (32 - self.ranks)
    }

    /// From whom to whom: the ranks that get something of this one, and that give it something.
    const fn parties(&self, op: CollectiveOp) -> (u32, u32) {
        match op {
            CollectiveOp::Reduce { root, .. } | CollectiveOp::Gather { root } => {
                (1 << root, if root == self.rank { self.all() } else { 0 })
            }
            CollectiveOp::Broadcast { root } | CollectiveOp::Scatter { root } => {
                (if root == self.rank { self.all() } else { 0 }, 1 << root)
            }
            _ => (self.all(), self.all()),
        }
    }
}

/// The steps of calls that begin together; `shape` says how one that all make is done.
pub(crate) fn plan<'a>(
    place: Place,
    calls: &[CollectiveCall<'a>],
    shape: impl Fn(&CollectiveCall<'a>) -> Shape,
) -> Result<Steps<'a>, Unpaired> {
    let together = |call: &CollectiveCall<'a>| together(place, call, shape(call));
    let mut steps: Steps<'a> =
        calls.iter().filter(|call| !call.op().is_pairwise()).filter_map(together).collect();
    pairwise(place, calls, &mut steps)?;
    Ok(steps)
}

/// A call of all ranks.
fn together<'a>(place: Place, call: &CollectiveCall<'a>, shape: Shape) -> Option<Step<'a>> {
    let (op, bytes) = (call.op(), message_bytes(call, place.ranks));
    let (mut receivers, senders) = place.parties(op);
    if op.reduction().is_none() && call.is_in_place() {
        // It is there already.
        receivers &= !place.own();
    }
    let (operands, give_at, take_at) = operands(place, call)?;
    let gives = receivers & !place.own() != 0;
    let takes = senders & !place.own() != 0 || senders & receivers & place.own() != 0;
    let each = |is_each: bool| if is_each { bytes } else { 0 };
    let scatters =
        matches!(op, CollectiveOp::ReduceScatter(_) | CollectiveOp::AllToAll | CollectiveOp::Scatter { .. });
    let gathers =
        matches!(op, CollectiveOp::AllGather | CollectiveOp::AllToAll | CollectiveOp::Gather { .. });
    let channels = |is_used: bool| if is_used { shape.channels } else { 0 };
    let call = Call {
        give_bytes: call.src().map_or(0, |_| bytes),
        take_bytes: call.dst().map_or(0, |_| bytes),
        give_stride: each(scatters),
        take_stride: each(gathers),
        give_at,
        take_at,
        factor: factor(op.reduction(), call.dtype()),
        rank: place.rank,
        ranks: place.ranks,
        receivers,
        senders,
        code: code(op.reduction(), call.dtype()).unwrap_or_default(),
        give_channels: channels(gives),
        take_channels: channels(takes),
        unit: unit(&[call.src(), call.dst()], bytes),
        two_shots: shape.two_shots && matches!(op, CollectiveOp::AllReduce(_)),
        bare: [shape.bare; 2],
    };
    Some(Step::Launch { call, operands, channels: shape.channels })
}

/// The operands, and where source and destination begin in what is passed.
fn operands<'a>(place: Place, call: &CollectiveCall<'a>) -> Option<(Operands<'a>, u64, u64)> {
    let own_part = |part: &BufferView| u64::from(place.rank) * part.size();
    Some(match (call.src(), call.dst()) {
        (Some(src), Some(dst)) if !call.is_in_place() => (Operands::Apart(src, dst), 0, 0),
        // A rank's own part of the larger, as `CollectiveCall` checked, or the same.
        (Some(src), Some(dst)) if src.size() > dst.size() => (Operands::Within(src), 0, own_part(dst)),
        (Some(src), Some(dst)) if src.size() < dst.size() => (Operands::Within(dst), own_part(src), 0),
        (src, dst) => (Operands::Within(src.or(dst)?), 0, 0),
    })
}

/// What places and lengths are multiples of, eight at most. Buffers start at multiples of far more.
fn unit(views: &[Option<&BufferView>], bytes: u64) -> u32 {
    let all = views.iter().flatten().fold(bytes | 8, |all, view| all | view.offset());
    1 << all.trailing_zeros()
}

/// Sends and receives: first those between neighbours, then those at a distance of two, and so on. What a rank sends in one
/// of these steps another receives in the same, so that all ranks get on whatever they send to whom.
fn pairwise<'a>(place: Place, calls: &[CollectiveCall<'a>], steps: &mut Steps<'a>) -> Result<(), Unpaired> {
    let sent = |peer: u32| {
        calls
            .iter()
            .filter(move |call| call.op() == CollectiveOp::Send { to: peer })
            .filter_map(CollectiveCall::src)
    };
    let received = |peer: u32| {
        calls
            .iter()
            .filter(move |call| call.op() == CollectiveOp::Recv { from: peer })
            .filter_map(CollectiveCall::dst)
    };
    if sent(place.rank).count() != received(place.rank).count() {
        return Err(Unpaired);
    }
    steps.extend(sent(place.rank).zip(received(place.rank)).map(|(src, dst)| Step::Copy { src, dst }));
    for distance in 1..place.ranks {
        let (to, from) =
            ((place.rank + distance) % place.ranks, (place.rank + place.ranks - distance) % place.ranks);
        let (mut sent, mut received) = (sent(to).fuse(), received(from).fuse());
        loop {
            let (src, dst) = (sent.next(), received.next());
            let Some(step) = exchange(place, (to, src), (from, dst)) else { break };
            steps.push(step);
        }
    }
    Ok(())
}

/// One message to a rank, and one from a rank.
fn exchange<'a>(
    place: Place,
    (to, src): (u32, Option<&'a BufferView>),
    (from, dst): (u32, Option<&'a BufferView>),
) -> Option<Step<'a>> {
    let operands = match (src, dst) {
        (Some(src), Some(dst)) => Operands::Apart(src, dst),
        (src, dst) => Operands::Within(src.or(dst)?),
    };
    let bytes = |view: Option<&BufferView>| view.map_or(0, BufferView::size);
    let channels = |view: Option<&BufferView>| view.map_or(0, |view| place.channels_for(view.size()));
    // Both ends know the size.
    let is_bare = |view: Option<&BufferView>| view.is_some_and(|view| view.size() >= BARE_FROM);
    let call = Call {
        give_bytes: bytes(src),
        take_bytes: bytes(dst),
        rank: place.rank,
        ranks: place.ranks,
        receivers: src.map_or(0, |_| 1 << to),
        senders: dst.map_or(0, |_| 1 << from),
        code: PAIRWISE | MOVES,
        give_channels: channels(src),
        take_channels: channels(dst),
        unit: unit(&[src, dst], bytes(src) | bytes(dst)),
        bare: [src, dst].map(is_bare),
        ..Call::default()
    };
    Some(Step::Launch { call, operands, channels: call.give_channels.max(call.take_channels) })
}
