//! `low_latency.cu` of communicators in Rust, without its threads: a block does as much as it can in a turn, line by line,
//! and waits for the next turn where the CUDA code would look again.

use warpweft_core_types::{DType, ReduceOp};
use warpweft_host_collectives::reduce;

use crate::{
    exports::Code,
    kernels::{Block, REDUCTIONS, Step, TYPES, now_ns},
    space::View,
};

/// Of `Call`.
pub(crate) const CALL: usize = 112;

const SLOTS: u64 = 4;
const MOVES: u32 = 0xffff;

// Of one rank's part of the window, in bytes; of a channel, in bytes; of the words that the host sees, in bytes.
const ABORT: u64 = 0;
const CLAIM: u64 = 4;
const LIMIT: u64 = 8;
const CHANNELS: u64 = 4096;
const CHANNEL: u64 = 512;
const LINES: u64 = 65_536;
const BARE: u64 = 16 << 20;
const SENT: u64 = 0;
const TAKEN: u64 = 64;
const CREDIT: u64 = 128;
const FLAGS: u64 = 256;
const PEER: u64 = 4;
const NUMBER: u64 = 8;
const AT: u64 = 12;
const ENDED: u64 = 64;

const LATE: u32 = 1;
const BY_PEER: u32 = 2;
const BY_HOST: u32 = 3;

const PREMUL: u32 = 8;

/// `Call`.
#[derive(Debug, Clone, Copy)]
struct Call {
    part: u64,
    give_bytes: u64,
    take_bytes: u64,
    give_stride: u64,
    take_stride: u64,
    give_at: u64,
    take_at: u64,
    factor: u64,
    rank: u32,
    ranks: u32,
    receivers: u32,
    senders: u32,
    code: u32,
    lines: u32,
    bare_lines: u32,
    give_channels: u32,
    take_channels: u32,
    two_shots: bool,
    gives_bare: bool,
    takes_bare: bool,
}

/// Where a block is.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    stage: Stage,
    /// What is left of the block's share.
    give: Share,
    take: Share,
    /// Of this round.
    gives: Lines,
    takes: Lines,
    /// The next line of the stage, and the next rank of that line.
    index: u64,
    peer: u32,
    began: Option<u64>,
    asked: u64,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Stage {
    #[default]
    Begin,
    /// Until there is room in the slots of all receivers.
    Room,
    Reduce,
    Move,
}

#[derive(Debug, Default, Clone, Copy)]
struct Share {
    first: u64,
    end: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Lines {
    first: u64,
    end: u64,
    spread: u64,
    count: u64,
}

impl Lines {
    fn at(&self, rank: u32, index: u64) -> u64 {
        self.first + self.spread * u64::from(rank) + index
    }
}

impl Share {
    fn of(bytes: u64, channels: u32, channel: u64) -> Self {
        let (all, channels) = (bytes.div_ceil(8), u64::from(channels));
        let each = if channels == 0 { 0 } else { all.div_ceil(channels) };
        let first = all.min(each * channel);
        Self { first, end: if channel < channels { all.min(first + each) } else { first } }
    }

    fn is_empty(&self) -> bool {
        self.first >= self.end
    }

    fn next(&mut self, call: &Call, bare: bool) -> Lines {
        let lines = u64::from(if bare { call.bare_lines } else { call.lines });
        let (left, ranks) = (self.end - self.first, u64::from(call.ranks));
        let spread = if call.two_shots { left.min(lines * ranks).div_ceil(ranks) } else { 0 };
        let count = if call.two_shots { spread } else { left.min(lines) };
        let first = self.first;
        self.first = self.end.min(first + if call.two_shots { spread * ranks } else { count });
        Lines { first, end: self.first, spread, count }
    }
}

/// Operands that share no bytes, or one.
pub(crate) fn apart(block: &mut Block<'_>) -> Result<Step, Code> {
    let (src, dst) = (block.long(2), block.long(3));
    step(block, 4, src, dst)
}

pub(crate) fn within(block: &mut Block<'_>) -> Result<Step, Code> {
    let both = block.long(2);
    step(block, 3, both, both)
}

fn step(block: &mut Block<'_>, told: usize, src: u64, dst: u64) -> Result<Step, Code> {
    let call = Call::read(block, told);
    let channel = Channel {
        memory: block.memory,
        window: block.long(0),
        host: block.long(1),
        src,
        dst,
        call,
        index: block.index,
    };
    channel.go_on(&mut block.turn.low_latency)
}

impl Call {
    fn read(block: &Block<'_>, told: usize) -> Self {
        let long = |at: usize| block.long_at(told, at * 8);
        let word = |at: usize| {
            let pair = block.long_at(told, 64 + at / 2 * 8);
            u32::try_from(pair >> (at % 2 * 32) & 0xffff_ffff).unwrap_or(0)
        };
        Self {
            part: long(0),
            give_bytes: long(1),
            take_bytes: long(2),
            give_stride: long(3),
            take_stride: long(4),
            give_at: long(5),
            take_at: long(6),
            factor: long(7),
            rank: word(0),
            ranks: word(1),
            receivers: word(2),
            senders: word(3),
            code: word(4),
            lines: word(5),
            bare_lines: word(6),
            give_channels: word(7),
            take_channels: word(8),
            // Word 9 is the unit by which CUDA loads and stores.
            two_shots: word(10) != 0,
            gives_bare: word(11) & 1 != 0,
            takes_bare: word(11) & 2 != 0,
        }
    }

    fn moves(&self) -> bool {
        self.code & 0xffff == MOVES
    }

    fn gives_to(&self, rank: u32) -> bool {
        rank != self.rank && self.receivers >> rank & 1 == 1
    }

    fn takes_from(&self, rank: u32) -> bool {
        rank != self.rank && self.senders >> rank & 1 == 1
    }

    fn has_own(&self) -> bool {
        self.moves() && (self.senders & self.receivers) >> self.rank & 1 == 1
    }

    const fn shots(&self) -> u32 {
        if self.two_shots { 2 } else { 1 }
    }
}

/// One block's.
struct Channel<'a> {
    memory: View<'a>,
    window: u64,
    host: u64,
    src: u64,
    dst: u64,
    call: Call,
    index: u64,
}

impl Channel<'_> {
    fn go_on(&self, progress: &mut Progress) -> Result<Step, Code> {
        let call = &self.call;
        loop {
            match progress.stage {
                Stage::Begin => {
                    if let Some(by) = self.memory.read(self.part(call.rank) + ABORT)?.checked_sub(1) {
                        self.give_up(BY_PEER, by, 0)?;
                        return Ok(Step::Done);
                    }
                    progress.give = Share::of(call.give_bytes, call.give_channels, self.index);
                    progress.take = Share::of(call.take_bytes, call.take_channels, self.index);
                    progress.stage = Stage::Room;
                }
                Stage::Room => {
                    if progress.give.is_empty() && progress.take.is_empty() {
                        return Ok(Step::Done);
                    }
                    if let Some(peer) = self.full()? {
                        return self.wait(progress, peer);
                    }
                    progress.gives = progress.give.next(call, call.gives_bare);
                    progress.takes = progress.take.next(call, call.takes_bare);
                    self.give(&progress.gives)?;
                    if progress.gives.count > 0 {
                        self.raise_flags(1)?;
                    }
                    if call.has_own() {
                        self.take_own(&progress.takes)?;
                    }
                    (progress.index, progress.peer) = (0, 0);
                    progress.stage = if call.moves() { Stage::Move } else { Stage::Reduce };
                }
                Stage::Reduce => {
                    if let Some(peer) = self.take_reduced(progress)? {
                        return self.wait(progress, peer);
                    }
                    (progress.index, progress.peer) = (0, 0);
                    if call.two_shots {
                        self.raise_flags(2)?;
                        progress.stage = Stage::Move;
                    } else {
                        self.turn(progress)?;
                    }
                }
                Stage::Move => {
                    if let Some(peer) = self.take_moved(progress)? {
                        return self.wait(progress, peer);
                    }
                    self.turn(progress)?;
                }
            }
        }
    }

    fn part(&self, rank: u32) -> u64 {
        self.window + self.call.part * u64::from(rank)
    }

    /// A word that a channel of a rank keeps for each rank.
    fn word(&self, rank: u32, kind: u64, of: u32) -> u64 {
        self.part(rank) + CHANNELS + self.index * CHANNEL + kind + u64::from(of) * 4
    }

    fn own(&self, kind: u64, of: u32) -> Result<u32, Code> {
        self.memory.read(self.word(self.call.rank, kind, of))
    }

    fn slot(&self, from: u32, number: u32) -> u64 {
        (self.index * SLOTS + u64::from(number) % SLOTS) * u64::from(self.call.ranks) + u64::from(from)
    }

    fn line(&self, from: u32, to: u32, number: u32, index: u64) -> u64 {
        self.part(to) + LINES + (self.slot(from, number) * u64::from(self.call.lines) + index) * 16
    }

    fn bare_line(&self, from: u32, to: u32, number: u32, index: u64) -> u64 {
        self.part(to) + BARE + (self.slot(from, number) * u64::from(self.call.bare_lines) + index) * 8
    }

    fn flag(&self, from: u32, to: u32, number: u32) -> u64 {
        self.word(to, FLAGS + u64::from(number) % SLOTS * 64, from)
    }

    /// All of a bare message is there.
    fn raise_flags(&self, ahead: u32) -> Result<(), Code> {
        let call = &self.call;
        for peer in (0..call.ranks).filter(|peer| call.gives_bare && call.gives_to(*peer)) {
            let number = self.own(SENT, peer)?.wrapping_add(ahead);
            self.memory.write(self.flag(call.rank, peer, number), number)?;
        }
        Ok(())
    }

    fn push(&self, to: u32, ahead: u32, index: u64, value: u64) -> Result<(), Code> {
        let number = self.own(SENT, to)?.wrapping_add(ahead);
        if self.call.gives_bare {
            return self.memory.write_long(self.bare_line(self.call.rank, to, number, index), value);
        }
        let (line, stamp) = (self.line(self.call.rank, to, number, index), u64::from(number) << 32);
        self.memory.write_long(line, stamp | (value & 0xffff_ffff))?;
        self.memory.write_long(line + 8, stamp | value >> 32)
    }

    fn arrived(&self, from: u32, ahead: u32, index: u64) -> Result<Option<u64>, Code> {
        let number = self.own(TAKEN, from)?.wrapping_add(ahead);
        if self.call.takes_bare {
            let is_here = self.memory.read(self.flag(from, self.call.rank, number))? == number;
            let line = self.bare_line(from, self.call.rank, number, index);
            return if is_here { self.memory.read_long(line).map(Some) } else { Ok(None) };
        }
        let line = self.line(from, self.call.rank, number, index);
        let (low, high) = (self.memory.read_long(line)?, self.memory.read_long(line + 8)?);
        let is_here = [low, high].iter().all(|word| word >> 32 == u64::from(number));
        Ok(is_here.then_some((low & 0xffff_ffff) | high << 32))
    }

    /// A receiver whose slots are not free yet.
    fn full(&self) -> Result<Option<u32>, Code> {
        for peer in (0..self.call.ranks).filter(|peer| self.call.gives_to(*peer)) {
            let last = self.own(SENT, peer)?.wrapping_add(self.call.shots());
            let room = self.own(CREDIT, peer)?.wrapping_add(4).wrapping_sub(last);
            if room.cast_signed() < 0 {
                return Ok(Some(peer));
            }
        }
        Ok(None)
    }

    fn load(&self, from: u64, at: u64, bytes: u64) -> Result<u64, Code> {
        let len = usize::try_from(bytes.saturating_sub(at).min(8)).unwrap_or(8);
        let mut word = [0; 8];
        word[..len].copy_from_slice(&self.memory.load(from + at, len)?);
        Ok(u64::from_le_bytes(word))
    }

    fn given(&self, to: u32, line: u64) -> Result<u64, Code> {
        let call = &self.call;
        let from = self.src + call.give_at + call.give_stride * u64::from(to);
        let value = self.load(from, line * 8, call.give_bytes)?;
        if call.moves() || call.code & 0xffff != PREMUL {
            return Ok(value);
        }
        let (dtype, mut word, factor) = (self.dtype(), value.to_le_bytes(), call.factor.to_le_bytes());
        let size = usize::try_from(dtype.size_bytes()).unwrap_or(8);
        word.chunks_exact_mut(size)
            .for_each(|element| reduce::reduce(ReduceOp::Prod, dtype, element, &factor[..size]));
        Ok(u64::from_le_bytes(word))
    }

    fn take(&self, from: u32, line: u64, value: u64) -> Result<(), Code> {
        let call = &self.call;
        let len = usize::try_from((call.take_bytes - line * 8).min(8)).unwrap_or(8);
        let to = self.dst + call.take_at + call.take_stride * u64::from(from) + line * 8;
        self.memory.store(to, &value.to_le_bytes()[..len])
    }

    fn dtype(&self) -> DType {
        TYPES[self.call.code as usize >> 16]
    }

    fn give(&self, lines: &Lines) -> Result<(), Code> {
        let call = &self.call;
        for index in 0..lines.count {
            for peer in (0..call.ranks).filter(|peer| call.gives_to(*peer)) {
                if lines.at(peer, index) < lines.end {
                    self.push(peer, 1, index, self.given(peer, lines.at(peer, index))?)?;
                }
            }
        }
        Ok(())
    }

    fn take_own(&self, lines: &Lines) -> Result<(), Code> {
        let rank = self.call.rank;
        (lines.first..lines.first + lines.count)
            .try_for_each(|line| self.take(rank, line, self.given(rank, line)?))
    }

    /// Lines until one is not there; whose that is.
    fn take_reduced(&self, progress: &mut Progress) -> Result<Option<u32>, Code> {
        let (call, lines) = (&self.call, progress.takes);
        while progress.index < lines.count && lines.at(call.rank, progress.index) < lines.end {
            let line = lines.at(call.rank, progress.index);
            let mut words = Vec::with_capacity(call.ranks as usize);
            for peer in 0..call.ranks {
                let word = if peer == call.rank {
                    Some(self.given(peer, line)?)
                } else {
                    self.arrived(peer, 1, progress.index)?
                };
                let Some(word) = word else { return Ok(Some(peer)) };
                words.push(word.to_le_bytes());
            }
            let inputs: Vec<&[u8]> = words.iter().map(<[u8; 8]>::as_slice).collect();
            let (op, mut result) = (REDUCTIONS[(call.code & 0xffff) as usize], [0; 8]);
            reduce::combine(op, self.dtype(), &[], &inputs, &mut result);
            let result = u64::from_le_bytes(result);
            self.take(0, line, result)?;
            if call.two_shots {
                (0..call.ranks)
                    .filter(|peer| *peer != call.rank)
                    .try_for_each(|peer| self.push(peer, 2, progress.index, result))?;
            }
            progress.index += 1;
        }
        Ok(None)
    }

    fn take_moved(&self, progress: &mut Progress) -> Result<Option<u32>, Code> {
        let (call, lines) = (&self.call, progress.takes);
        while progress.index < lines.count {
            while progress.peer < call.ranks {
                let (peer, line) = (progress.peer, lines.at(progress.peer, progress.index));
                if call.takes_from(peer) && line < lines.end {
                    match self.arrived(peer, call.shots(), progress.index)? {
                        Some(value) => self.take(peer, line, value)?,
                        None => return Ok(Some(peer)),
                    }
                }
                progress.peer += 1;
            }
            (progress.index, progress.peer) = (progress.index + 1, 0);
        }
        Ok(None)
    }

    /// The messages of this round have been taken.
    fn turn(&self, progress: &mut Progress) -> Result<(), Code> {
        let call = &self.call;
        for peer in 0..call.ranks {
            if progress.takes.count > 0 && call.takes_from(peer) {
                let taken = self.own(TAKEN, peer)?.wrapping_add(call.shots());
                self.memory.write(self.word(call.rank, TAKEN, peer), taken)?;
                self.memory.write(self.word(peer, CREDIT, call.rank), taken)?;
            }
            if progress.gives.count > 0 && call.gives_to(peer) {
                let sent = self.own(SENT, peer)?.wrapping_add(call.shots());
                self.memory.write(self.word(call.rank, SENT, peer), sent)?;
            }
        }
        progress.stage = Stage::Room;
        Ok(())
    }

    /// Looks again in the next turn, or gives up.
    fn wait(&self, progress: &mut Progress, peer: u32) -> Result<Step, Code> {
        let (own, now) = (self.part(self.call.rank), now_ns());
        let began = *progress.began.get_or_insert(now);
        if let Some(by) = self.memory.read(own + ABORT)?.checked_sub(1) {
            self.give_up(BY_PEER, by, 0)?;
            return Ok(Step::Done);
        }
        if now - progress.asked.max(began) > 1_000_000 {
            progress.asked = now;
            if self.memory.read(self.host + ENDED)? != 0 {
                self.give_up(BY_HOST, peer, self.own(TAKEN, peer)?)?;
                return Ok(Step::Done);
            }
        }
        if now - began > self.memory.read_long(own + LIMIT)? {
            self.give_up(LATE, peer, self.own(TAKEN, peer)?)?;
            return Ok(Step::Done);
        }
        Ok(Step::Again)
    }

    fn give_up(&self, cause: u32, peer: u32, number: u32) -> Result<(), Code> {
        let claim = self.part(self.call.rank) + CLAIM;
        // Blocks of a launch take turns, so that nobody comes between.
        if self.memory.read(claim)? != 0 {
            return Ok(());
        }
        self.memory.write(claim, 1)?;
        self.memory.write(self.host + PEER, peer)?;
        self.memory.write(self.host + NUMBER, number)?;
        self.memory.write(self.host + AT, u32::try_from(self.index).unwrap_or(u32::MAX))?;
        self.memory.write(self.host, cause)?;
        let told = if cause == BY_PEER { 0 } else { self.call.ranks };
        (0..told).try_for_each(|rank| self.memory.write(self.part(rank) + ABORT, self.call.rank + 1))
    }
}
