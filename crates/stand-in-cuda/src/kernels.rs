//! The kernels there are, by the names of their entries: Rust for the CUDA code in the `kernels` folders of the
//! backend, the command, communicators and the conformance suite, and for graphs of the GPU suite. Others may be in a
//! library that a test names (`library.rs`).
//!
//! A block is a state machine that is given turns, so that any number of blocks run beside each other on one
//! thread. One turn is one round of the loop that the CUDA code has, or all of it where it has none.
//! Residents keep to `resident.cuh`, word for word.

use std::{
    sync::LazyLock,
    time::{Duration, Instant},
};

use warpweft_core_types::{DType, ReduceOp};
use warpweft_host_collectives::reduce;

use crate::{exports::Code, library, low_latency, space::View};

/// What runs in place of an entry's code.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel {
    /// The bytes of each parameter; a kernel of a library has what its entry declares.
    pub(crate) params: Option<&'static [usize]>,
    body: Body,
}

/// A turn of one block.
#[derive(Debug, Clone, Copy)]
enum Body {
    Rust(fn(&mut Block<'_>) -> Result<Step, Code>),
    Library(library::Function),
}

/// Whether a block wants another turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Again,
    Done,
}

/// A block during a turn.
pub(crate) struct Block<'a> {
    pub(crate) memory: View<'a>,
    pub(crate) arguments: &'a [Vec<u8>],
    /// Counted along x, then y, then z.
    pub(crate) index: u64,
    /// How many there are, and the threads of each.
    pub(crate) blocks: u64,
    pub(crate) threads: u64,
    pub(crate) turn: &'a mut Turn,
}

/// What a block remembers between its turns: `ww_turn`.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    began: Option<u64>,
    looked: u64,
    leave: u64,
    hurry: u64,
    /// Of `ww_exchange`: questions that were answered.
    answered: u64,
    pub(crate) low_latency: low_latency::Progress,
}

/// A loop that waits ends after this time, as in CUDA: one that hangs takes the machine with it.
const MINUTE: u64 = 60_000_000_000;

/// The size of `ww_slice`.
const SLICE: usize = 56;

impl Kernel {
    pub(crate) fn named(name: &str) -> Option<Self> {
        let kernel = |params, step| Some(Self { params: Some(params), body: Body::Rust(step) });
        match name {
            "number" => kernel(&[8, 4], number),
            "increment" => kernel(&[8, 8, 4], increment),
            "mix_write" => kernel(&[8, 8, 4, 4, 4], |block| mix(block, false)),
            "mix_update" => kernel(&[8, 8, 4, 4, 4], |block| mix(block, true)),
            "add_words" => kernel(&[8, 4, 4], add_words),
            "empty" => kernel(&[], |_| Ok(Step::Done)),
            "blocking" => kernel(&[8], blocking),
            "failing" | "trap" => kernel(&[8], failing),
            "counter" => kernel(&[SLICE, 8], counter),
            "server" => kernel(&[SLICE, 8, 8], server),
            "stubborn" => kernel(&[SLICE, 8], stubborn),
            "failing_resident" => kernel(&[SLICE, 8], failing_resident),
            "ww_stamp" => kernel(&[8], stamp),
            "ww_exchange" => kernel(&[8, 4, 8], exchange),
            "ww_busy" => kernel(&[8], busy),
            "pattern" => kernel(&[8, 8, 4], pattern),
            "copy_words" => kernel(&[8, 8, 8], copy_words),
            "scale" => kernel(&[8, 8, 4], scale),
            "add" => kernel(&[8, 8, 8], add),
            "stencil" => kernel(&[8, 8, 8], stencil),
            "tick" => kernel(&[8], tick),
            "blend" => kernel(&[8, 8, 8, 8], blend),
            "beat" => kernel(&[SLICE, 8], beat),
            "reduce" => kernel(&[8, 4, 4, 4, 4], reduce),
            "low_latency" | "low_latency_bare" => {
                kernel(&[8, 8, 8, 8, low_latency::CALL], low_latency::apart)
            }
            "low_latency_within" | "low_latency_bare_within" => {
                kernel(&[8, 8, 8, low_latency::CALL], low_latency::within)
            }
            "visit" => kernel(&[8, 8], |_| Ok(Step::Done)),
            "visit_three" => kernel(&[8, 8, 8, 8], |_| Ok(Step::Done)),
            "step" => kernel(&[8, 4], digit),
            "linger" => kernel(&[8, 4, 8], linger),
            "work" => kernel(&[8, 4], work),
            _ => Some(Self { params: None, body: Body::Library(library::function(name)?) }),
        }
    }

    /// Whether it is of a library.
    pub(crate) const fn is_foreign(&self) -> bool {
        matches!(self.body, Body::Library(_))
    }

    /// Gives a block a turn.
    pub(crate) fn step(&self, block: &mut Block<'_>) -> Result<Step, Code> {
        match self.body {
            Body::Rust(step) => step(block),
            // A resident's slices are the stand-in's, its rounds the library's.
            Body::Library(function) if block.arguments.first().is_some_and(|first| first.len() == SLICE) => {
                let slice = block.slice();
                block.reside(&slice, |block| Ok(library::call(function, block)? == Step::Done))
            }
            Body::Library(function) => library::call(function, block),
        }
    }
}

fn number(block: &mut Block<'_>) -> Result<Step, Code> {
    let (out, base) = (block.long(0), block.word(1));
    let number = u32::try_from(block.index).unwrap_or(u32::MAX);
    block.memory.write(out + block.index * 4, number.wrapping_add(base))?;
    Ok(Step::Done)
}

fn increment(block: &mut Block<'_>) -> Result<Step, Code> {
    let (to, from, count) = (block.long(0), block.long(1), block.word(2));
    for index in (0..u64::from(count)).map(|index| index * 4) {
        block.memory.write(to + index, block.memory.read(from + index)?.wrapping_add(1))?;
    }
    Ok(Step::Done)
}

fn mix(block: &mut Block<'_>, updates: bool) -> Result<Step, Code> {
    let (to, from) = (block.long(0), block.long(1));
    let (to_count, from_count, mut hash) = (block.word(2), block.word(3), block.word(4));
    for index in 0..u64::from(from_count) {
        hash = hash.wrapping_mul(16_777_619) ^ block.memory.read(from + index * 4)?;
    }
    for index in 0..to_count {
        let at = to + u64::from(index) * 4;
        let before = if updates { block.memory.read(at)?.wrapping_mul(31) } else { 0 };
        block.memory.write(at, before.wrapping_add(hash).wrapping_add(index))?;
    }
    Ok(Step::Done)
}

fn add_words(block: &mut Block<'_>) -> Result<Step, Code> {
    let (sums, count, seed) = (block.long(0), block.word(1), block.word(2));
    for index in 0..count {
        block.memory.add(sums + u64::from(index) * 4, seed.wrapping_add(index))?;
    }
    Ok(Step::Done)
}

fn blocking(block: &mut Block<'_>) -> Result<Step, Code> {
    let (now, word) = (now_ns(), block.long(0));
    let began = *block.turn.began.get_or_insert(now);
    let goes_on = block.memory.read(word)? == 0 && now - began < MINUTE;
    Ok(if goes_on { Step::Again } else { Step::Done })
}

fn failing(block: &mut Block<'_>) -> Result<Step, Code> {
    block.memory.write(block.long(0), 1)?;
    Err(Code::LAUNCH_FAILED)
}

fn counter(block: &mut Block<'_>) -> Result<Step, Code> {
    let slice = block.slice();
    let count = block.long(1) + block.index * 4;
    block.reside(&slice, |block| {
        let next = block.memory.read(count)?.wrapping_add(1);
        block.memory.write(count, next)?;
        Ok(false)
    })
}

fn server(block: &mut Block<'_>) -> Result<Step, Code> {
    let (slice, request, answer) = (block.slice(), block.long(1), block.long(2));
    block.reside(&slice, |block| {
        let asked = block.memory.read(request)?;
        let finished = asked == u32::MAX;
        if !finished {
            block.memory.write(answer, asked + 1)?;
        }
        Ok(finished)
    })
}

fn stubborn(block: &mut Block<'_>) -> Result<Step, Code> {
    let (slice, word) = (block.slice(), block.long(1));
    if block.turn.began.is_none() && !block.begin(&slice)? {
        block.end(&slice, false)?;
        return Ok(Step::Done);
    }
    let began = block.turn.began.unwrap_or_default();
    if block.memory.read(word)? == 0 && now_ns() - began < MINUTE {
        return Ok(Step::Again);
    }
    block.reside(&slice, |_| Ok(false))
}

fn failing_resident(block: &mut Block<'_>) -> Result<Step, Code> {
    let slice = block.slice();
    if block.begin(&slice)? {
        return Err(Code::LAUNCH_FAILED);
    }
    block.end(&slice, false)?;
    Ok(Step::Done)
}

fn stamp(block: &mut Block<'_>) -> Result<Step, Code> {
    block.memory.write_long(block.long(0), now_ns())?;
    Ok(Step::Done)
}

/// Each turn answers what has been asked by now.
fn exchange(block: &mut Block<'_>) -> Result<Step, Code> {
    let (words, questions, limit_ns) = (block.long(0), u64::from(block.word(1)), block.long(2));
    while block.turn.answered < questions {
        let (now, question) = (now_ns(), block.turn.answered + 1);
        let began = *block.turn.began.get_or_insert(now);
        if block.memory.read_long(words)? < question {
            return Ok(if now - began > limit_ns { Step::Done } else { Step::Again });
        }
        block.memory.write_long(words + question * 8, now_ns())?;
        (block.turn.answered, block.turn.began) = (question, None);
    }
    Ok(Step::Done)
}

fn busy(block: &mut Block<'_>) -> Result<Step, Code> {
    let now = now_ns();
    let began = *block.turn.began.get_or_insert(now);
    Ok(if now - began < block.long(0) { Step::Again } else { Step::Done })
}

fn pattern(block: &mut Block<'_>) -> Result<Step, Code> {
    const WORDS: u64 = 4096;
    let (words, count, seed) = (block.long(0), block.long(1), block.word(2));
    let first = block.index * WORDS;
    let word = |index: u64| {
        // The low bits of the position, as in CUDA.
        let index = u32::try_from(index & u64::from(u32::MAX)).unwrap_or(0);
        let mixed = index.wrapping_mul(0x9e37_79b1) ^ seed.wrapping_mul(0x85eb_ca6b);
        mixed ^ (mixed >> 15)
    };
    let bytes: Vec<u8> =
        (first..count.min(first + WORDS)).flat_map(|index| word(index).to_le_bytes()).collect();
    if !bytes.is_empty() {
        block.memory.store(words + first * 4, &bytes)?;
    }
    Ok(Step::Done)
}

/// A row of words for each block, by turns, as its threads would take them.
fn copy_words(block: &mut Block<'_>) -> Result<Step, Code> {
    let (to, from, count) = (block.long(0), block.long(1), block.long(2));
    let step = usize::try_from(block.blocks * block.threads).unwrap_or(usize::MAX);
    for first in (block.index * block.threads..count).step_by(step) {
        let words = block.threads.min(count - first);
        let len = usize::try_from(words * 4).unwrap_or(0);
        block.memory.copy(to + first * 4, from + first * 4, len)?;
    }
    Ok(Step::Done)
}

/// The words that a block of a graph's kernel takes care of.
fn share(block: &Block<'_>, count: u64) -> std::ops::Range<u64> {
    const WORDS: u64 = 4096;
    (block.index * WORDS).min(count)..count.min((block.index + 1) * WORDS)
}

fn scale(block: &mut Block<'_>) -> Result<Step, Code> {
    let (words, count, factor) = (block.long(0), block.long(1), block.word(2));
    for word in share(block, count).map(|index| words + index * 4) {
        block.memory.write(word, block.memory.read(word)?.wrapping_mul(factor))?;
    }
    Ok(Step::Done)
}

fn add(block: &mut Block<'_>) -> Result<Step, Code> {
    let (to, from, count) = (block.long(0), block.long(1), block.long(2));
    for index in share(block, count).map(|index| index * 4) {
        let sum = block.memory.read(to + index)?.wrapping_add(block.memory.read(from + index)?);
        block.memory.write(to + index, sum)?;
    }
    Ok(Step::Done)
}

fn stencil(block: &mut Block<'_>) -> Result<Step, Code> {
    let (to, from, count) = (block.long(0), block.long(1), block.long(2));
    for index in share(block, count) {
        let mut sum = block.memory.read(from + index * 4)?;
        if index > 0 {
            sum = sum.wrapping_add(block.memory.read(from + index * 4 - 4)?);
        }
        if index + 1 < count {
            sum = sum.wrapping_add(block.memory.read(from + index * 4 + 4)?);
        }
        block.memory.write(to + index * 4, sum)?;
    }
    Ok(Step::Done)
}

fn tick(block: &mut Block<'_>) -> Result<Step, Code> {
    let word = block.long(0);
    block.memory.write(word, block.memory.read(word)?.wrapping_add(1))?;
    Ok(Step::Done)
}

fn blend(block: &mut Block<'_>) -> Result<Step, Code> {
    let mut sum = 0_u32;
    for from in 1..4 {
        sum = sum.wrapping_add(block.memory.read(block.long(from))?);
    }
    block.memory.write(block.long(0), sum)?;
    Ok(Step::Done)
}

fn beat(block: &mut Block<'_>) -> Result<Step, Code> {
    let (slice, turns) = (block.slice(), block.long(1));
    block.reside(&slice, |block| {
        let next = block.memory.read(turns)?.wrapping_add(1);
        block.memory.write(turns, next)?;
        Ok(false)
    })
}

fn digit(block: &mut Block<'_>) -> Result<Step, Code> {
    let (out, digit) = (block.long(0), block.word(1));
    block.memory.write(out, block.memory.read(out)?.wrapping_mul(3).wrapping_add(digit))?;
    Ok(Step::Done)
}

fn linger(block: &mut Block<'_>) -> Result<Step, Code> {
    let (now, most) = (now_ns(), block.long(2).min(100_000_000));
    let began = *block.turn.began.get_or_insert(now);
    if now - began < most { Ok(Step::Again) } else { digit(block) }
}

fn work(block: &mut Block<'_>) -> Result<Step, Code> {
    const BLOCK_BYTES: usize = 4096;
    const BLOCKS: u64 = (8 << 20) / BLOCK_BYTES as u64;
    let (first, rounds) = (block.long(0) + block.index * BLOCK_BYTES as u64, block.word(1).min(65_536));
    if block.index >= BLOCKS {
        return Ok(Step::Done);
    }
    let turned = |word: u32, _| (word ^ (word >> 7)).wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    let mut bytes = block.memory.load(first, BLOCK_BYTES)?;
    for word in bytes.as_chunks_mut().0 {
        *word = (0..rounds).fold(u32::from_le_bytes(*word), turned).to_le_bytes();
    }
    block.memory.store(first, &bytes)?;
    Ok(Step::Done)
}

/// The types and reductions in the order of their numbers in CUDA.
pub(crate) const TYPES: [DType; 15] = [
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
pub(crate) const REDUCTIONS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Avg,
    ReduceOp::And,
    ReduceOp::Or,
    ReduceOp::Xor,
    // What was multiplied before it was sent is added.
    ReduceOp::Sum,
];

/// The first block does all of it.
fn reduce(block: &mut Block<'_>) -> Result<Step, Code> {
    if block.index > 0 {
        return Ok(Step::Done);
    }
    let (memory, [words, ranks, stride, code]) = (block.long(0), [1, 2, 3, 4].map(|index| block.word(index)));
    let place = |number: u32| memory + u64::from(number) * u64::from(stride) * 4;
    let input = |rank: u32| (0..u64::from(words)).map(move |word| place(rank + 1) + word * 4);
    let inputs = (0..ranks)
        .map(|rank| {
            let words = input(rank).map(|at| block.memory.read(at)).collect::<Result<Vec<u32>, Code>>()?;
            Ok(words.into_iter().flat_map(u32::to_le_bytes).collect())
        })
        .collect::<Result<Vec<Vec<u8>>, Code>>()?;
    let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let mut result = vec![0; words as usize * 4];
    let (dtype, op) = (TYPES[code as usize >> 16], REDUCTIONS[code as usize & 0xffff]);
    reduce::combine(op, dtype, &[], &slices, &mut result);
    block.memory.store(memory, &result)?;
    Ok(Step::Done)
}

/// `ww_slice`.
#[derive(Debug, Clone, Copy)]
struct Slice {
    orders: u64,
    mirror: u64,
    blocks: u64,
    done: u64,
    shortest_ns: u64,
    longest_ns: u64,
    number: u64,
}

impl Block<'_> {
    /// A pointer or another 64-bit value.
    pub(crate) fn long(&self, parameter: usize) -> u64 {
        self.long_at(parameter, 0)
    }

    pub(crate) fn long_at(&self, parameter: usize, at: usize) -> u64 {
        let bytes = self.arguments[parameter].get(at..at + 8).and_then(|bytes| bytes.try_into().ok());
        u64::from_le_bytes(bytes.unwrap_or_default())
    }

    fn word(&self, parameter: usize) -> u32 {
        let bytes = self.arguments[parameter].as_slice().try_into();
        u32::from_le_bytes(bytes.unwrap_or_default())
    }

    fn slice(&self) -> Slice {
        let field = |index: usize| self.long_at(0, index * 8);
        Slice {
            orders: field(0),
            mirror: field(1),
            blocks: field(2),
            done: field(3),
            shortest_ns: field(4),
            longest_ns: field(5),
            number: field(6),
        }
    }

    /// The usual resident: begins, does one round a turn until it is told to leave or is finished, and ends.
    fn reside(
        &mut self,
        slice: &Slice,
        round: impl FnOnce(&mut Self) -> Result<bool, Code>,
    ) -> Result<Step, Code> {
        let enters = self.turn.began.is_some() || self.begin(slice)?;
        if !enters || self.should_yield(slice)? {
            self.end(slice, false)?;
            return Ok(Step::Done);
        }
        if round(self)? {
            self.end(slice, true)?;
            return Ok(Step::Done);
        }
        Ok(Step::Again)
    }

    /// `ww_begin`.
    fn begin(&mut self, slice: &Slice) -> Result<bool, Code> {
        let now = now_ns();
        (self.turn.began, self.turn.looked) = (Some(now), now);
        self.read_orders(slice.mirror)?;
        self.memory.write_long(self.block_words(slice), slice.number + 1)?;
        let is_done = self.memory.read(slice.done + self.index * 4)? != 0;
        Ok(slice.number >= self.turn.leave && !is_done)
    }

    /// `ww_should_yield`.
    fn should_yield(&mut self, slice: &Slice) -> Result<bool, Code> {
        let (now, first) = (now_ns(), self.index == 0);
        if now - self.turn.looked >= if first { 1000 } else { 500 } && slice.number >= self.turn.leave {
            if first {
                self.heard(slice)?;
            } else {
                self.read_orders(slice.mirror)?;
                self.turn.looked = now;
            }
        }
        let lasted = now - self.turn.began.unwrap_or(now);
        Ok(slice.number < self.turn.leave
            || lasted >= slice.longest_ns
            || (slice.number < self.turn.hurry && lasted >= slice.shortest_ns))
    }

    /// Reads orders as the first block does, and `ww_heard`.
    fn heard(&mut self, slice: &Slice) -> Result<(), Code> {
        let before = (self.turn.leave, self.turn.hurry);
        self.read_orders(slice.orders)?;
        if before != (self.turn.leave, self.turn.hurry) {
            self.memory.write_long(slice.mirror, self.turn.leave)?;
            self.memory.write_long(slice.mirror + 8, self.turn.hurry)?;
        }
        self.turn.looked = now_ns();
        Ok(())
    }

    /// `ww_end`.
    fn end(&mut self, slice: &Slice, finished: bool) -> Result<(), Code> {
        let words = self.block_words(slice);
        if finished {
            self.memory.write(slice.done + self.index * 4, 1)?;
            self.memory.write_long(words + 16, 1)?;
        }
        self.memory.write_long(words + 8, slice.number + 1)?;
        let before = self.memory.add_long(slice.mirror + 16, 1)?;
        if (before + 1).is_multiple_of(self.blocks) {
            let leave = self.memory.read_long(slice.mirror)?;
            // One store in CUDA. Here whoever sees the second word sees the first.
            self.memory.write_long(slice.orders + 16, slice.number + 1)?;
            self.memory.write_long(slice.orders + 24, leave)?;
        }
        Ok(())
    }

    fn read_orders(&mut self, from: u64) -> Result<(), Code> {
        self.turn.leave = self.memory.read_long(from)?;
        self.turn.hurry = self.memory.read_long(from + 8)?;
        Ok(())
    }

    /// The `ww_block` of this block.
    fn block_words(&self, slice: &Slice) -> u64 {
        slice.blocks + self.index * 32
    }
}

/// `%globaltimer`: nanoseconds since some moment.
pub(crate) fn now_ns() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    // Not zero at the first call, so that differences to earlier moments exist.
    let since = START.elapsed() + Duration::from_secs(1);
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
