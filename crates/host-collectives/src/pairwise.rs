//! Sends and receives: a channel for every ordered pair of ranks, and state machines that advance together.

use warpweft_core_types::{CollectiveOp, DType};

use crate::{
    call::Checked,
    fabric::{Awaited, Ended, Fabric, Occasion},
    layout::FRAGMENTS,
    moves::{Move, Moves, Reduction},
    span::Span,
    sync::Ordering,
};

/// How far this rank is in each of its channels. The memory says the same, but others can write that.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counts {
    /// By destination: fragments put in, and messages begun.
    sent: Vec<Count>,
    /// By source: fragments taken out, and messages begun.
    received: Vec<Count>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Count {
    fragments: u64,
    messages: u64,
}

impl Counts {
    pub(crate) fn new(size: u32) -> Self {
        let none = vec![Count::default(); size as usize];
        Self { sent: none.clone(), received: none }
    }
}

/// The sends and receives of a group.
#[derive(Debug)]
pub(crate) struct Pairs<'a> {
    pairs: Vec<Pair>,
    counts: &'a mut Counts,
    /// The communicator ended while operands of another rank were to be read.
    has_ended: bool,
}

#[derive(Debug)]
struct Pair {
    is_send: bool,
    peer: u32,
    operand: Span,
    dtype: DType,
    /// The message's number in its channel, from 1.
    number: u64,
    /// Bytes that were put in or taken out.
    offset: usize,
    stage: Stage,
    mismatch: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Under,
    /// The receiver reads the operand itself, and is done when it has taken this fragment.
    Lent(u64),
    /// What the sender sends is not what is expected: it is taken out and forgotten.
    Refused {
        total: usize,
    },
    Done,
}

impl<'a> Pairs<'a> {
    pub(crate) fn new(counts: &'a mut Counts) -> Self {
        Self { pairs: Vec::new(), counts, has_ended: false }
    }

    /// Adds a send or a receive.
    pub(crate) fn push(&mut self, call: &Checked<'_>) {
        let (is_send, peer, operand) = match call.op {
            CollectiveOp::Send { to } => (true, to, call.src),
            CollectiveOp::Recv { from } => (false, from, call.dst),
            _ => return,
        };
        let counts = if is_send { &mut self.counts.sent } else { &mut self.counts.received };
        let count = &mut counts[peer as usize];
        count.messages += 1;
        self.pairs.push(Pair {
            is_send,
            peer,
            operand,
            dtype: call.dtype,
            number: count.messages,
            offset: 0,
            stage: Stage::Waiting,
            mismatch: None,
        });
    }

    pub(crate) fn is_done(&self) -> bool {
        self.pairs.iter().all(|pair| pair.stage == Stage::Done)
    }

    /// Peers that something is still to come from or to go to.
    pub(crate) fn missing(&self) -> Vec<u32> {
        let open = self.pairs.iter().filter(|pair| pair.stage != Stage::Done);
        let mut peers: Vec<u32> = open.map(|pair| pair.peer).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// The first that is not over: its number and name.
    pub(crate) fn open(&self) -> Option<(u64, String)> {
        let pair = self.pairs.iter().find(|pair| pair.stage != Stage::Done)?;
        let name = if pair.is_send { "send to" } else { "recv from" };
        Some((pair.number, format!("{name} rank {}", pair.peer)))
    }

    /// The first that was not what its peer expected.
    pub(crate) fn mismatch(&self) -> Option<(u64, String)> {
        self.pairs.iter().find_map(|pair| Some((pair.number, pair.mismatch.clone()?)))
    }

    /// Does as much as can be done without waiting. In each channel the first comes first.
    pub(crate) fn advance(&mut self, fabric: &Fabric) {
        for index in 0..self.pairs.len() {
            let (earlier, rest) = self.pairs.split_at_mut(index);
            let pair = &mut rest[0];
            let is_before = |other: &Pair| {
                other.is_send == pair.is_send && other.peer == pair.peer && other.stage != Stage::Done
            };
            if pair.stage == Stage::Done || self.has_ended || earlier.iter().any(is_before) {
                continue;
            }
            if pair.is_send {
                pair.send(fabric, &mut self.counts.sent[pair.peer as usize].fragments);
            } else {
                let taken = &mut self.counts.received[pair.peer as usize].fragments;
                self.has_ended |= pair.receive(fabric, taken).is_err();
            }
        }
    }

    /// Advances until all is over.
    pub(crate) fn finish(
        this: &std::cell::RefCell<Self>,
        fabric: &Fabric,
        occasion: &Occasion<'_>,
    ) -> Result<(), Ended> {
        let missing = || this.borrow().missing();
        fabric.wait(occasion, &Awaited::Any(&missing), || {
            let mut pairs = this.borrow_mut();
            pairs.advance(fabric);
            pairs.is_done() || pairs.has_ended
        })?;
        if this.borrow().has_ended { Err(Ended) } else { Ok(()) }
    }
}

const ADDRESS: usize = 3;

impl Pair {
    fn send(&mut self, fabric: &Fabric, put: &mut u64) {
        let (own, peer) = (fabric.rank, self.peer);
        let channel = fabric.region.channel(own, peer);
        // Acquire: the receiver has read a fragment before it says that it has taken it.
        let taken = || channel.receiver.tail.load(Ordering::Acquire);
        if let Stage::Lent(fragment) = self.stage {
            if taken() > fragment {
                self.finish_send(fabric);
            }
            return;
        }
        let is_lent = fabric.is_one_process
            && fabric.config.is_direct
            && self.operand.len() >= fabric.config.direct_bytes;
        while put.wrapping_sub(taken()) < FRAGMENTS {
            let line = fabric.region.fragment_line(own, peer, *put);
            let address = if is_lent { self.operand.expose() } else { 0 };
            let dtype = dtype_code(self.dtype);
            let words = [self.number, self.operand.len() as u64, dtype, address];
            for (place, word) in line.words.iter().zip(words) {
                // The channel's head orders it.
                place.store(word, Ordering::Relaxed);
            }
            if !is_lent {
                let space = fabric.region.fragment(own, peer, *put);
                let part = self.operand.part(self.offset, space.len());
                // SAFETY: the receiver has taken what was in this fragment, and looks at it again only once the head
                // is past it; the operand is the caller's to lend.
                unsafe { space.copy_from(part) };
                self.offset += part.len();
            }
            *put += 1;
            // Release: the fragment is complete for whoever sees the head.
            channel.sender.head.store(*put, Ordering::Release);
            fabric.wake();
            self.stage = Stage::Under;
            if is_lent {
                self.stage = Stage::Lent(*put - 1);
                return;
            }
            if self.offset == self.operand.len() {
                self.finish_send(fabric);
                return;
            }
        }
    }

    fn finish_send(&mut self, fabric: &Fabric) {
        self.stage = Stage::Done;
        let receiver = &fabric.region.channel(fabric.rank, self.peer).receiver;
        // Acquire: with it come the words that say what was expected.
        if receiver.refused.load(Ordering::Acquire) == self.number {
            let bytes = receiver.expected_bytes.load(Ordering::Relaxed);
            let dtype = receiver.expected_dtype.load(Ordering::Relaxed);
            let own = (self.operand.len() as u64, dtype_code(self.dtype));
            self.mismatch = Some(difference((fabric.rank, own), (self.peer, (bytes, dtype))));
        }
    }

    fn receive(&mut self, fabric: &Fabric, taken: &mut u64) -> Result<(), Ended> {
        let (own, peer) = (fabric.rank, self.peer);
        let channel = fabric.region.channel(peer, own);
        // No more than there can be: a wait goes on to look at the clock, whatever the head says.
        for _ in 0..FRAGMENTS {
            // Acquire: fragments before the head are complete.
            if channel.sender.head.load(Ordering::Acquire) <= *taken {
                return Ok(());
            }
            let line = fabric.region.fragment_line(peer, own, *taken);
            let word = |index: usize| line.words[index].load(Ordering::Relaxed);
            let (total, dtype, address) = (word(1), word(2), word(ADDRESS));
            if self.stage == Stage::Waiting {
                self.begin(fabric, total, dtype);
            }
            let is_lent = address != 0;
            let total = match self.stage {
                Stage::Refused { total } => total,
                _ => self.operand.len(),
            };
            if is_lent {
                if self.stage == Stage::Under {
                    self.read_lent(fabric, address)?;
                }
                self.offset = total;
            } else {
                let fragment = fabric.region.fragment(peer, own, *taken);
                let part = fragment.part(0, total.saturating_sub(self.offset));
                if self.stage == Stage::Under {
                    let place = self.operand.part(self.offset, part.len());
                    // SAFETY: the sender writes this fragment again only once the tail is past it; the operand is the
                    // caller's to lend.
                    unsafe { place.copy_from(part) };
                }
                self.offset += part.len();
            }
            *taken += 1;
            // Release: the fragment was read before.
            channel.receiver.tail.store(*taken, Ordering::Release);
            fabric.wake();
            if self.offset >= total {
                self.stage = Stage::Done;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Compares what is sent with what is expected, and tells the sender if it differs.
    fn begin(&mut self, fabric: &Fabric, total: u64, dtype: u64) {
        let expected = (self.operand.len() as u64, dtype_code(self.dtype));
        if (total, dtype) == expected {
            self.stage = Stage::Under;
            return;
        }
        let receiver = &fabric.region.channel(self.peer, fabric.rank).receiver;
        receiver.expected_bytes.store(expected.0, Ordering::Relaxed);
        receiver.expected_dtype.store(expected.1, Ordering::Relaxed);
        // Release: the words before it are complete.
        receiver.refused.store(self.number, Ordering::Release);
        self.mismatch = Some(difference((self.peer, (total, dtype)), (fabric.rank, expected)));
        self.stage = Stage::Refused { total: usize::try_from(total).unwrap_or(usize::MAX) };
    }

    fn read_lent(&self, fabric: &Fabric, address: u64) -> Result<(), Ended> {
        let _inside = fabric.enter()?;
        let lent = Span::at(address, self.operand.len());
        let moves: Moves = [Move::copy(self.operand, lent)].into_iter().collect();
        let reduction = Reduction {
            op: warpweft_core_types::ReduceOp::Sum,
            dtype: self.dtype,
            custom: None,
            factors: &[],
        };
        // SAFETY: the sender lends its operand, which has this length, until this rank has taken the fragment, or it
        // has seen that the communicator has ended and this rank is outside.
        let is_done = unsafe { moves.perform_until(&reduction, || fabric.has_ended()) };
        if is_done { Ok(()) } else { Err(Ended) }
    }
}

fn difference(sender: (u32, (u64, u64)), receiver: (u32, (u64, u64))) -> String {
    let name = |code: u64| {
        let index = usize::try_from(code).ok();
        index.and_then(|index| DType::ALL.get(index)).map_or("?", |dtype| dtype.name())
    };
    let ((from, (sent, sent_type)), (to, (expected, expected_type))) = (sender, receiver);
    format!(
        "rank {from} sent {sent} bytes of {} where rank {to} expected {expected} bytes of {}",
        name(sent_type),
        name(expected_type)
    )
}

fn dtype_code(dtype: DType) -> u64 {
    DType::ALL.iter().position(|other| *other == dtype).map_or(u64::MAX, |index| index as u64)
}
