//! Operations of all ranks: in steps through slots, or straight between operands of threads of one process.

use smallvec::SmallVec;
use warpweft_core_types::{CollectiveOp, ReduceOp};

use crate::{
    call::{Checked, parts},
    fabric::{Awaited, Ended, Fabric, Occasion},
    header::{Header, Kind, differences},
    moves::{Move, Moves, Reduction},
    span::Span,
};

/// What a call came to, if the communicator has not ended.
pub(crate) enum Outcome {
    Done,
    /// Not all ranks called the same: who called what.
    Mismatch(String),
}

/// All ranks meet.
pub(crate) fn barrier(fabric: &Fabric, step: &mut u64, occasion: &Occasion<'_>) -> Result<Outcome, Ended> {
    let header = Header { kind: Kind::BARRIER, bytes: 0, factor: 1.0, source: 0, destination: 0 };
    *step += 1;
    let line = fabric.region.line(fabric.rank, *step);
    header.write(line);
    fabric.publish(line, *step);
    wait_for_all(fabric, *step, occasion)?;
    let headers = read_headers(fabric, *step, &header);
    Ok(differences(&headers).map_or(Outcome::Done, Outcome::Mismatch))
}

/// One operation of all ranks. `step` is the latest that all have published, before and afterwards.
///
/// # Safety
///
/// - The operands are valid and nobody else touches them until this returns; if it is [`Ended`], until nobody is
///   inside ([`Fabric::wait_until_outside`]).
pub(crate) unsafe fn run(
    fabric: &Fabric,
    step: &mut u64,
    call: &Checked<'_>,
    occasion: &Occasion<'_>,
) -> Result<Outcome, Ended> {
    let mut work = Work::new(fabric, call);
    let way = work.way;
    for index in 0..work.steps() {
        *step += 1;
        let line = fabric.region.line(fabric.rank, *step);
        if index == 0 {
            work.header().write(line);
        }
        let moves = work.before(index, *step);
        // SAFETY: they are between operands that the caller lends, this rank's slot of the step, which nobody reads
        // since every rank has published the step before, and slots of the step before, which are complete.
        unsafe { moves.perform(&work.reduction()) };
        fabric.publish(line, *step);
        wait_for_all(fabric, *step, occasion)?;
        if index == 0
            && let Some(what) = work.meet(*step)
        {
            return Ok(Outcome::Mismatch(what));
        }
        let moves = work.after(index, *step);
        if way == Way::Direct {
            let _inside = fabric.enter()?;
            // SAFETY: they are between operands of ranks that are in this call, whose callers lend them until all of
            // them have published the next step, or have seen that the communicator has ended and this rank is outside.
            // No two ranks write the same bytes, or bytes that another reads.
            let is_done = unsafe { moves.perform_until(&work.reduction(), || fabric.has_ended()) };
            if !is_done {
                return Err(Ended);
            }
        } else {
            // SAFETY: they are between operands that the caller lends and slots of the step, which are complete until
            // this rank publishes the next one.
            unsafe { moves.perform(&work.reduction()) };
        }
    }
    if way == Way::Direct {
        // Nobody goes before all have read and written what they have to.
        *step += 1;
        fabric.publish(fabric.region.line(fabric.rank, *step), *step);
        wait_for_all(fabric, *step, occasion)?;
    }
    Ok(Outcome::Done)
}

fn wait_for_all(fabric: &Fabric, step: u64, occasion: &Occasion<'_>) -> Result<(), Ended> {
    let missing = || fabric.others().filter(|rank| !fabric.region.line(*rank, step).has_come(step)).collect();
    for rank in fabric.others() {
        let line = fabric.region.line(rank, step);
        fabric.wait(occasion, &Awaited::Rank(rank, &missing), || line.has_come(step))?;
    }
    Ok(())
}

fn read_headers(fabric: &Fabric, step: u64, own: &Header) -> SmallVec<[Header; 2]> {
    let read = |rank| if rank == fabric.rank { *own } else { Header::read(fabric.region.line(rank, step)) };
    (0..fabric.size).map(read).collect()
}

/// How an operation is carried out; the same on all ranks that make the same call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Every rank reduces everything.
    OneShot,
    /// Through slots, chunk by chunk.
    Slots,
    /// Between operands.
    Direct,
}

/// From what all ranks that make the same call know alike.
fn way(fabric: &Fabric, call: &Checked<'_>) -> Way {
    let (config, size) = (&fabric.config, fabric.size as usize);
    if fabric.is_one_process && config.is_direct && call.bytes >= config.direct_bytes {
        return Way::Direct;
    }
    // Where there are two, to reduce everything moves no more between them than to exchange what each has reduced.
    let is_cheap = call.bytes <= config.one_shot_bytes / size || size == 2 && config.one_shot_bytes > 0;
    if matches!(call.op, CollectiveOp::AllReduce(_)) && is_cheap { Way::OneShot } else { Way::Slots }
}

/// What one step carries of a part.
fn chunk(fabric: &Fabric, op: CollectiveOp, way: Way) -> usize {
    match op {
        CollectiveOp::AllReduce(_) if way == Way::OneShot => fabric.region.layout().slot_bytes,
        CollectiveOp::AllReduce(_)
        | CollectiveOp::ReduceScatter(_)
        | CollectiveOp::Scatter { .. }
        | CollectiveOp::AllToAll => fabric.region.layout().chunk_bytes,
        // Slots hold nothing else then.
        _ => fabric.region.layout().slot_bytes,
    }
}

/// One rank's part of one operation.
struct Work<'a> {
    fabric: &'a Fabric,
    call: Checked<'a>,
    way: Way,
    /// What one step carries of a part.
    chunk: usize,
    /// What the ranks said, once they have.
    headers: SmallVec<[Header; 2]>,
    factors: SmallVec<[f64; 2]>,
}

impl<'a> Work<'a> {
    fn new(fabric: &'a Fabric, call: &Checked<'a>) -> Self {
        let way = way(fabric, call);
        let chunk = chunk(fabric, call.op, way);
        Self { fabric, call: *call, way, chunk, headers: SmallVec::new(), factors: SmallVec::new() }
    }

    fn header(&mut self) -> Header {
        let factor = match self.call.op.reduction() {
            Some(ReduceOp::PremulSum(factor)) => factor,
            _ => 1.0,
        };
        let address = |span: Span| if self.way == Way::Direct { span.expose() } else { 0 };
        let header = Header {
            kind: self.call.kind(),
            bytes: self.call.bytes as u64,
            factor,
            source: address(self.call.src),
            destination: address(self.call.dst),
        };
        self.headers.push(header);
        header
    }

    /// Reads what the others say; who called what, if it differs.
    fn meet(&mut self, step: u64) -> Option<String> {
        self.headers = read_headers(self.fabric, step, &self.headers[0]);
        self.factors = self.headers.iter().map(|header| header.factor).collect();
        differences(&self.headers)
    }

    fn rank(&self) -> u32 {
        self.fabric.rank
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        self.fabric.others()
    }

    /// What one step of a reduction to all carries: a chunk for each rank to reduce.
    fn stride(&self) -> usize {
        self.chunk * self.fabric.size as usize
    }

    fn steps(&self) -> usize {
        let steps = |stride: usize| self.call.bytes.div_ceil(stride).max(1);
        match (self.way, self.call.op) {
            (Way::Direct, _) => 1,
            // Of every block the results follow a step behind.
            (Way::Slots, CollectiveOp::AllReduce(_)) => steps(self.stride()) + 1,
            (Way::OneShot | Way::Slots, _) => steps(self.chunk),
        }
    }

    /// A part of an operand that has one for every rank, and a chunk of that.
    fn chunk_of(&self, operand: Span, part: u32, index: usize) -> Span {
        operand.part(part as usize * self.call.bytes, self.call.bytes).part(index * self.chunk, self.chunk)
    }

    /// The place for a rank in a slot that has one for each.
    fn place_for(&self, slot: Span, rank: u32) -> Span {
        slot.part(rank as usize * self.chunk, self.chunk)
    }

    /// Where in a block of a reduction to all a rank's part lies.
    fn share(&self, block: Span, rank: u32) -> Span {
        let share = share_bytes(block.len(), self.fabric.size as usize);
        block.part(rank as usize * share, share)
    }

    fn block_of(&self, operand: Span, index: usize) -> Span {
        operand.part(index * self.stride(), self.stride())
    }

    fn reduction(&self) -> Reduction<'_> {
        let (op, dtype, custom) = (self.call.op.reduction(), self.call.dtype, self.call.custom);
        Reduction { op: op.unwrap_or(ReduceOp::Sum), dtype, custom, factors: &self.factors }
    }

    /// What fills this rank's slot.
    fn before(&self, index: usize, step: u64) -> Moves {
        let mut moves = Moves::new();
        if self.way == Way::Direct {
            return moves;
        }
        let slot = self.fabric.region.slot(self.rank(), step);
        let src = self.call.src;
        match self.call.op {
            CollectiveOp::AllReduce(_) if self.way == Way::OneShot => {
                moves.push(Move::copy(slot, self.chunk_of(src, 0, index)));
            }
            CollectiveOp::AllReduce(_) => {
                if let Some(index) = index.checked_sub(1) {
                    moves.push(self.reduce_share(index, step));
                }
                let block = self.block_of(src, index);
                for rank in self.others() {
                    moves.push(Move::copy(self.place_for(slot, rank), self.share(block, rank)));
                }
            }
            CollectiveOp::ReduceScatter(_) | CollectiveOp::AllToAll => self.spread(slot, index, &mut moves),
            CollectiveOp::Scatter { root } if root == self.rank() => self.spread(slot, index, &mut moves),
            CollectiveOp::AllGather => moves.push(Move::copy(slot, self.chunk_of(src, 0, index))),
            CollectiveOp::Reduce { root, .. } | CollectiveOp::Gather { root } if root != self.rank() => {
                moves.push(Move::copy(slot, self.chunk_of(src, 0, index)));
            }
            CollectiveOp::Broadcast { root } if root == self.rank() => {
                moves.push(Move::copy(slot, self.chunk_of(src, 0, index)));
            }
            _ => {}
        }
        moves
    }

    /// Every other rank's part of the source into its place.
    fn spread(&self, slot: Span, index: usize, moves: &mut Moves) {
        for rank in self.others() {
            moves.push(Move::copy(self.place_for(slot, rank), self.chunk_of(self.call.src, rank, index)));
        }
    }

    /// This rank's share of a block, of which the slots of the step before have the others' operands. The result goes
    /// to where it belongs, and behind the operands in this rank's slot.
    fn reduce_share(&self, index: usize, step: u64) -> Move {
        let own = self.rank();
        let share = self.share(self.block_of(self.call.src, index), own);
        let input = |rank| match rank == own {
            true => share,
            false => self.place_for(self.fabric.region.slot(rank, step - 1), own).part(0, share.len()),
        };
        let result = self.place_for(self.fabric.region.slot(own, step), self.fabric.size);
        let target = self.share(self.block_of(self.call.dst, index), own);
        Move::combine(
            (0..self.fabric.size).map(input).collect(),
            [target, result.part(0, share.len())].into_iter().collect(),
        )
    }

    /// What is done with the slots of all ranks, or with their operands.
    fn after(&self, index: usize, step: u64) -> Moves {
        match self.way {
            Way::Direct => self.between_operands(),
            Way::OneShot => [self.reduce_all(index, step)].into_iter().collect(),
            Way::Slots => self.out_of_slots(index, step),
        }
    }

    fn out_of_slots(&self, index: usize, step: u64) -> Moves {
        let own = self.rank();
        let slot = |rank| self.fabric.region.slot(rank, step);
        let (src, dst) = (self.call.src, self.call.dst);
        let mut moves = Moves::new();
        match self.call.op {
            CollectiveOp::AllReduce(_) => {
                if let Some(index) = index.checked_sub(1) {
                    let block = self.block_of(dst, index);
                    for rank in self.others() {
                        let result = self.place_for(slot(rank), self.fabric.size);
                        moves.push(Move::copy(self.share(block, rank), result));
                    }
                }
            }
            CollectiveOp::ReduceScatter(_) => {
                let target = self.chunk_of(dst, 0, index);
                let input = |rank| match rank == own {
                    true => self.chunk_of(src, own, index),
                    false => self.place_for(slot(rank), own).part(0, target.len()),
                };
                let inputs = (0..self.fabric.size).map(input).collect();
                moves.push(Move::combine(inputs, [target].into_iter().collect()));
            }
            CollectiveOp::Reduce { root, .. } if root == own => moves.push(self.reduce_all(index, step)),
            CollectiveOp::AllGather => self.collect(index, step, &mut moves),
            CollectiveOp::Gather { root } if root == own => self.collect(index, step, &mut moves),
            CollectiveOp::Broadcast { root } => {
                let source = if root == own { self.chunk_of(src, 0, index) } else { slot(root) };
                moves.push(Move::copy(self.chunk_of(dst, 0, index), source));
            }
            CollectiveOp::Scatter { root } => {
                let place = self.place_for(slot(root), own);
                let source = if root == own { self.chunk_of(src, own, index) } else { place };
                moves.push(Move::copy(self.chunk_of(dst, 0, index), source));
            }
            CollectiveOp::AllToAll => {
                for rank in 0..self.fabric.size {
                    let place = self.place_for(slot(rank), own);
                    let source = if rank == own { self.chunk_of(src, own, index) } else { place };
                    moves.push(Move::copy(self.chunk_of(dst, rank, index), source));
                }
            }
            _ => {}
        }
        moves
    }

    /// A chunk of what all ranks have.
    fn reduce_all(&self, index: usize, step: u64) -> Move {
        let target = self.chunk_of(self.call.dst, 0, index);
        let input = |rank| match rank == self.rank() {
            true => self.chunk_of(self.call.src, 0, index),
            false => self.fabric.region.slot(rank, step).part(0, target.len()),
        };
        Move::combine((0..self.fabric.size).map(input).collect(), [target].into_iter().collect())
    }

    /// What every rank has, by rank.
    fn collect(&self, index: usize, step: u64, moves: &mut Moves) {
        for rank in 0..self.fabric.size {
            let source = match rank == self.rank() {
                true => self.chunk_of(self.call.src, 0, index),
                false => self.fabric.region.slot(rank, step),
            };
            moves.push(Move::copy(self.chunk_of(self.call.dst, rank, index), source));
        }
    }

    /// A rank's operands, all of which are in this process.
    fn operands(&self, rank: u32) -> (Span, Span) {
        let header = &self.headers[rank as usize];
        let (gives, gets) = parts(self.call.op, rank, self.fabric.size);
        let span = |address: u64, parts: Option<u64>| {
            let parts = usize::try_from(parts.unwrap_or(0)).unwrap_or(0);
            // Every rank has said the same length, and has checked its own operands for it.
            Span::at(address, parts * self.call.bytes)
        };
        (span(header.source, gives), span(header.destination, gets))
    }

    /// This rank's share of the work, which is as large as the others'. No byte is written by two.
    fn between_operands(&self) -> Moves {
        let own = self.rank();
        let all = || 0..self.fabric.size;
        let sources = || all().map(|rank| self.operands(rank).0);
        let destinations = || all().map(|rank| self.operands(rank).1);
        let part = |operand: Span, rank: u32| operand.part(rank as usize * self.call.bytes, self.call.bytes);
        let (src, dst) = (self.call.src, self.call.dst);
        let combine = |inputs, outputs| [Move::combine(inputs, outputs)].into_iter().collect();
        match self.call.op {
            CollectiveOp::AllReduce(_) => combine(
                sources().map(|source| self.share(source, own)).collect(),
                destinations().map(|destination| self.share(destination, own)).collect(),
            ),
            CollectiveOp::ReduceScatter(_) => {
                combine(sources().map(|source| part(source, own)).collect(), [dst].into_iter().collect())
            }
            CollectiveOp::Reduce { root, .. } => combine(
                sources().map(|source| self.share(source, own)).collect(),
                [self.share(self.operands(root).1, own)].into_iter().collect(),
            ),
            CollectiveOp::AllGather => {
                all().map(|rank| Move::copy(part(dst, rank), self.operands(rank).0)).collect()
            }
            CollectiveOp::Broadcast { root } => {
                let source = self.share(self.operands(root).0, own);
                destinations().map(|destination| Move::copy(self.share(destination, own), source)).collect()
            }
            CollectiveOp::Gather { root } => {
                [Move::copy(part(self.operands(root).1, own), src)].into_iter().collect()
            }
            CollectiveOp::Scatter { root } => {
                [Move::copy(dst, part(self.operands(root).0, own))].into_iter().collect()
            }
            CollectiveOp::AllToAll => {
                all().map(|rank| Move::copy(part(dst, rank), part(self.operands(rank).0, own))).collect()
            }
            _ => Moves::new(),
        }
    }
}

/// What each rank has of so many bytes: whole lines, so that no two ranks write the same one.
fn share_bytes(bytes: usize, size: usize) -> usize {
    bytes.div_ceil(size).next_multiple_of(64)
}
