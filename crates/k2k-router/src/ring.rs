//! A lane: a ring of lines that lives where its one consumer polls.
//!
//! A message is written in two steps. Its producer first draws a ticket, the positions of as many lines as the message
//! takes, which it gets only while the consumer has given back that many; then it writes the lines, whose stamps make
//! them valid one by one. Between the two nothing waits and no code of others runs. What the consumer has read it gives
//! back in one word, the credit, in steps of a quarter of the ring, or at once when it finds nothing more: a producer
//! reads the other side's memory once for many messages.

use std::fmt;

use crossbeam_utils::CachePadded;

use crate::{
    Message, RingError,
    sync::{Arc, AtomicU64, Ordering},
    wire::{HEADER_LINES, HEADER_WORDS, Halves, Header, LINE_BYTES, MAX_PAYLOAD, stamp},
};

/// One line: 12 bytes and a stamp, which is the upper half of `high`.
#[repr(C, align(16))]
struct Line {
    low: AtomicU64,
    high: AtomicU64,
}

impl Line {
    fn new() -> Self {
        Self { low: AtomicU64::new(0), high: AtomicU64::new(0) }
    }

    #[inline]
    fn write(&self, line: Halves) {
        // Relaxed: the stamp publishes it.
        self.low.store(line.low, Ordering::Relaxed);
        // Release: whoever sees the stamp sees the other half. Devices write a line in one access instead.
        self.high.store(line.high, Ordering::Release);
    }

    /// The line, if it has this stamp.
    #[inline]
    fn read(&self, stamp: u32) -> Option<Halves> {
        // Acquire: it pairs with `write`.
        let high = self.high.load(Ordering::Acquire);
        // Relaxed: it is not written again before the consumer gives it back.
        (Halves::stamp(high) == stamp).then(|| Halves { low: self.low.load(Ordering::Relaxed), high })
    }
}

/// What both ends share.
struct Shared {
    lines: Box<[Line]>,
    /// The number of lines is a power of two, of this exponent.
    shift: u32,
    tickets: CachePadded<Tickets>,
    /// Lines given back, in all. The consumer writes it, producers read it.
    credit: CachePadded<AtomicU64>,
}

/// What producers share with each other.
struct Tickets {
    /// The next position that nobody has a ticket for.
    tail: AtomicU64,
    /// The credit when one of them last looked at it.
    seen: AtomicU64,
}

impl Shared {
    #[inline]
    fn line(&self, position: u64) -> &Line {
        #[expect(clippy::cast_possible_truncation, reason = "only the lowest bits choose a line")]
        let index = position as usize & (self.lines.len() - 1);
        &self.lines[index]
    }

    #[inline]
    fn write(&self, position: u64, header: &Header, payload: &[u8]) {
        let mark = |line: u64| stamp(position + line, self.shift);
        let words = header.to_words();
        let mut line = 0;
        for three in words.as_chunks::<3>().0 {
            self.line(position + line).write(Halves::of_words(*three, mark(line)));
            line += 1;
        }
        let (whole, rest) = payload.as_chunks::<LINE_BYTES>();
        for bytes in whole {
            self.line(position + line).write(Halves::of_bytes(bytes, mark(line)));
            line += 1;
        }
        if !rest.is_empty() {
            self.line(position + line).write(Halves::of_bytes(rest, mark(line)));
        }
    }

    /// Whether `lines` from `tail` on fit behind what was given back.
    #[inline]
    const fn fits(&self, tail: u64, lines: u64, credit: u64) -> bool {
        tail + lines - credit <= self.lines.len() as u64
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("lines", &self.lines.len()).finish_non_exhaustive()
    }
}

/// Makes a lane of at least `lines` lines for one producer.
///
/// # Errors
///
/// [`RingError::Capacity`] unless it holds a message without payload and has fewer than 2^31 lines.
pub fn lane(lines: usize) -> Result<(Producer, Consumer), RingError> {
    let shared = ring(lines)?;
    let producer = Producer { shared: Arc::clone(&shared), tail: 0, credit: 0 };
    Ok((producer, Consumer { shared, head: 0, returned: 0 }))
}

/// Makes a lane of at least `lines` lines whose producers share tickets.
///
/// # Errors
///
/// As [`lane`].
pub fn shared_lane(lines: usize) -> Result<(SharedProducer, Consumer), RingError> {
    let shared = ring(lines)?;
    let producer = SharedProducer { shared: Arc::clone(&shared) };
    Ok((producer, Consumer { shared, head: 0, returned: 0 }))
}

fn ring(lines: usize) -> Result<Arc<Shared>, RingError> {
    if !(HEADER_LINES..1 << 31).contains(&lines) {
        return Err(RingError::Capacity { lines });
    }
    let lines = lines.next_power_of_two();
    Ok(Arc::new(Shared {
        lines: (0..lines).map(|_| Line::new()).collect(),
        shift: lines.trailing_zeros(),
        tickets: CachePadded::new(Tickets { tail: AtomicU64::new(0), seen: AtomicU64::new(0) }),
        credit: CachePadded::new(AtomicU64::new(0)),
    }))
}

/// Lines of a message, if it can ever fit. The header's length is made that of the payload.
#[inline]
fn lines_of(shared: &Shared, header: &Header, payload: &[u8]) -> Result<(Header, u64), RingError> {
    let length = payload.len();
    let header = Header { length: u32::try_from(length).unwrap_or(u32::MAX), ..*header };
    let lines = header.lines();
    if length > MAX_PAYLOAD || lines > shared.lines.len() {
        let most = (shared.lines.len() - HEADER_LINES) * LINE_BYTES;
        return Err(RingError::TooLong { length, limit: most.min(MAX_PAYLOAD) });
    }
    Ok((header, lines as u64))
}

/// The only producer of a lane.
#[derive(Debug)]
pub struct Producer {
    shared: Arc<Shared>,
    tail: u64,
    /// The credit when it was last looked at.
    credit: u64,
}

impl Producer {
    /// Sends a message, or says that there is no room for it now. Its length is the payload's.
    ///
    /// # Errors
    ///
    /// [`RingError::Full`], or [`RingError::TooLong`] for a message that never fits.
    #[inline]
    pub fn try_push(&mut self, header: &Header, payload: &[u8]) -> Result<(), RingError> {
        let (header, lines) = lines_of(&self.shared, header, payload)?;
        if !self.shared.fits(self.tail, lines, self.credit) {
            // Acquire: lines that were given back were read before.
            self.credit = self.shared.credit.load(Ordering::Acquire);
            if !self.shared.fits(self.tail, lines, self.credit) {
                return Err(RingError::Full);
            }
        }
        self.shared.write(self.tail, &header, payload);
        self.tail += lines;
        Ok(())
    }
}

/// Several producers of a lane: whoever has a reference may send.
#[derive(Debug)]
pub struct SharedProducer {
    shared: Arc<Shared>,
}

impl SharedProducer {
    /// Sends a message, or says that there is no room for it now. Its length is the payload's.
    ///
    /// # Errors
    ///
    /// [`RingError::Full`], or [`RingError::TooLong`] for a message that never fits.
    #[inline]
    pub fn try_push(&self, header: &Header, payload: &[u8]) -> Result<(), RingError> {
        let (header, lines) = lines_of(&self.shared, header, payload)?;
        let position = self.ticket(lines).ok_or(RingError::Full)?;
        self.shared.write(position, &header, payload);
        Ok(())
    }

    /// Draws a ticket, or none where there is no credit for it: a ticket always leads to a message.
    #[inline]
    fn ticket(&self, lines: u64) -> Option<u64> {
        let Tickets { tail, seen } = &*self.shared.tickets;
        // Relaxed: a ticket orders nothing; the credit and the stamps do.
        let mut next = tail.load(Ordering::Relaxed);
        loop {
            // Acquire: it was stored behind a look at the credit, and lines that were given back were read before.
            // It may have passed the ticket that was read here, which is an old one then.
            if !self.shared.fits(next, lines, seen.load(Ordering::Acquire).min(next)) {
                // Acquire: as above.
                let credit = self.shared.credit.load(Ordering::Acquire);
                // Release: it pairs with the look at it. An older one in its place costs another look, no more.
                seen.store(credit, Ordering::Release);
                if !self.shared.fits(next, lines, credit.min(next)) {
                    return None;
                }
            }
            // Relaxed: as above.
            let drawn = tail.compare_exchange_weak(next, next + lines, Ordering::Relaxed, Ordering::Relaxed);
            match drawn {
                Ok(position) => return Some(position),
                Err(now) => next = now,
            }
        }
    }
}

/// The consumer of a lane.
#[derive(Debug)]
pub struct Consumer {
    shared: Arc<Shared>,
    head: u64,
    /// The credit as it was last given.
    returned: u64,
}

impl Consumer {
    /// Reads the next message into `message`, or says that there is none yet.
    ///
    /// # Errors
    ///
    /// [`RingError::Wire`] when the lane holds what no producer writes. It gives nothing more then.
    #[inline]
    pub fn try_pop(&mut self, message: &mut Message) -> Result<bool, RingError> {
        let Some(header) = self.header()? else {
            self.give_back();
            return Ok(false);
        };
        let first = self.head + HEADER_LINES as u64;
        let lines = header.lines() - HEADER_LINES;
        message.payload.resize(lines * LINE_BYTES, 0);
        for (line, bytes) in (first..).zip(message.payload.as_chunks_mut::<LINE_BYTES>().0) {
            let Some(halves) = self.shared.line(line).read(stamp(line, self.shared.shift)) else {
                return Ok(false);
            };
            *bytes = halves.bytes();
        }
        message.payload.truncate(header.length as usize);
        message.header = header;
        self.head += header.lines() as u64;
        if self.head - self.returned >= self.shared.lines.len() as u64 / 4 {
            self.give_back();
        }
        Ok(true)
    }

    /// The next header, once all of its lines are there.
    #[inline]
    fn header(&self) -> Result<Option<Header>, RingError> {
        let mut words = [0; HEADER_WORDS];
        for (line, three) in (self.head..).zip(words.as_chunks_mut::<3>().0) {
            let Some(halves) = self.shared.line(line).read(stamp(line, self.shared.shift)) else {
                return Ok(None);
            };
            *three = halves.words();
        }
        let header = Header::from_words(&words)?;
        if header.lines() > self.shared.lines.len() {
            return Err(crate::WireError { field: "length", value: header.length }.into());
        }
        Ok(Some(header))
    }

    /// A view of what the lane's memory holds, for whoever wants to compare or to look at a lane that stands still.
    pub fn memory(&self) -> RingMemory {
        RingMemory { shared: Arc::clone(&self.shared) }
    }

    #[inline]
    fn give_back(&mut self) {
        if self.returned != self.head {
            self.returned = self.head;
            // Release: the lines were read before they can be written again.
            self.shared.credit.store(self.head, Ordering::Release);
        }
    }
}

/// What the memory of a lane holds.
#[derive(Debug)]
pub struct RingMemory {
    shared: Arc<Shared>,
}

impl RingMemory {
    /// Lines given back, in all.
    pub fn credit(&self) -> u64 {
        // Relaxed, here and below: what is looked at may change meanwhile.
        self.shared.credit.load(Ordering::Relaxed)
    }

    /// The two halves of each line.
    pub fn lines(&self) -> Vec<[u64; 2]> {
        let halves = |line: &Line| [line.low.load(Ordering::Relaxed), line.high.load(Ordering::Relaxed)];
        self.shared.lines.iter().map(halves).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{collections::VecDeque, time::Duration};

    use proptest::prelude::*;
    use warpweft_core_types::Deadline;

    use super::*;

    fn numbered(sequence: u32) -> Header {
        Header { sequence, ..Header::default() }
    }

    fn payload(sequence: u32, length: usize) -> Vec<u8> {
        (0..length).map(|index| (sequence as usize * 31 + index).to_le_bytes()[0]).collect()
    }

    #[test]
    fn a_message_that_never_fits_is_refused_with_the_limit() {
        let (mut producer, _consumer) = lane(8).unwrap();
        assert_eq!(
            producer.try_push(&numbered(0), &[0; 61]),
            Err(RingError::TooLong { length: 61, limit: 60 })
        );
        assert_eq!(producer.try_push(&numbered(0), &[0; 60]), Ok(()));
        let (producer, _consumer) = shared_lane(1 << 12).unwrap();
        let length = MAX_PAYLOAD + 1;
        let refused = producer.try_push(&numbered(0), &vec![0; length]);
        assert_eq!(refused, Err(RingError::TooLong { length, limit: MAX_PAYLOAD }));
    }

    #[test]
    fn impossible_capacities_are_refused() {
        assert_eq!(lane(2).err(), Some(RingError::Capacity { lines: 2 }));
        assert_eq!(shared_lane(1 << 31).err(), Some(RingError::Capacity { lines: 1 << 31 }));
    }

    #[test]
    fn stray_bytes_are_an_error_and_no_message() {
        let (mut producer, mut consumer) = lane(16).unwrap();
        producer.try_push(&numbered(7), b"whole").unwrap();
        // The length, in the second word of the first line.
        producer.shared.line(0).low.store(u64::MAX, Ordering::Relaxed);
        let mut message = Message::default();
        for _ in 0..2 {
            let error = consumer.try_pop(&mut message).unwrap_err();
            assert!(matches!(&error, RingError::Wire(wire) if wire.field == "length"), "{error}");
        }
    }

    #[test]
    fn a_ring_that_stands_before_its_last_stamp_goes_on_around_zero() {
        let (mut producer, mut consumer) = lane(4).unwrap();
        let start = (u64::from(u32::MAX) << 2) - 4;
        (producer.tail, producer.credit, consumer.head, consumer.returned) = (start, start, start, start);
        producer.shared.credit.store(start, Ordering::Relaxed);
        let mut message = Message::default();
        for sequence in 0..64 {
            producer.try_push(&numbered(sequence), &[]).unwrap();
            assert_eq!(consumer.try_pop(&mut message), Ok(true));
            assert_eq!((message.header.sequence, consumer.try_pop(&mut message)), (sequence, Ok(false)));
        }
    }

    /// One end of each kind, so that both kinds of producers meet the same plays.
    enum AnyProducer {
        Single(Producer),
        Shared(SharedProducer),
    }

    impl AnyProducer {
        fn try_push(&mut self, header: &Header, payload: &[u8]) -> Result<(), RingError> {
            match self {
                Self::Single(producer) => producer.try_push(header, payload),
                Self::Shared(producer) => producer.try_push(header, payload),
            }
        }
    }

    proptest! {
        /// Case K3: whatever the order of pushes and pops, and full or not, each message that was taken comes out
        /// once, in order and whole.
        #[test]
        fn every_message_that_was_taken_comes_out_once(
            lines in 3_usize..40, shared: bool, plays in prop::collection::vec((any::<bool>(), 0_usize..60), 1..300),
        ) {
            let (mut producer, mut consumer) = if shared {
                let (producer, consumer) = shared_lane(lines).unwrap();
                (AnyProducer::Shared(producer), consumer)
            } else {
                let (producer, consumer) = lane(lines).unwrap();
                (AnyProducer::Single(producer), consumer)
            };
            let (mut expected, mut sequence, mut message) = (VecDeque::new(), 0, Message::default());
            for (push, length) in plays {
                if push {
                    let bytes = payload(sequence, length);
                    match producer.try_push(&numbered(sequence), &bytes) {
                        Ok(()) => expected.push_back((sequence, bytes)),
                        Err(RingError::Full) => prop_assert!(!expected.is_empty(), "an empty ring has room"),
                        Err(error) => prop_assert!(matches!(error, RingError::TooLong { .. }), "{error}"),
                    }
                    sequence += 1;
                } else {
                    prop_assert_eq!(consumer.try_pop(&mut message), Ok(!expected.is_empty()));
                    if let Some((sequence, bytes)) = expected.pop_front() {
                        prop_assert_eq!((message.header.sequence, &message.payload), (sequence, &bytes));
                        // Nothing is left: the credit is given back at the next look.
                        if expected.is_empty() {
                            prop_assert_eq!(consumer.try_pop(&mut message), Ok(false));
                        }
                    }
                }
            }
            for (sequence, bytes) in expected {
                prop_assert_eq!(consumer.try_pop(&mut message), Ok(true));
                prop_assert_eq!((message.header.sequence, &message.payload), (sequence, &bytes));
            }
        }
    }

    #[test]
    fn threads_that_share_tickets_keep_their_own_order() {
        const EACH: u32 = 20_000;
        let deadline = Deadline::within(Duration::from_secs(60));
        let (producer, mut consumer) = shared_lane(64).unwrap();
        let producer = Arc::new(producer);
        let threads: Vec<_> = (0..3)
            .map(|source| {
                let producer = Arc::clone(&producer);
                std::thread::spawn(move || {
                    for sequence in 0..EACH {
                        let header = Header { source, ..numbered(sequence) };
                        let bytes = payload(sequence, (sequence % 50) as usize);
                        while producer.try_push(&header, &bytes) == Err(RingError::Full) {
                            assert!(!deadline.is_past(), "the ring stands still");
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let (mut next, mut message) = ([0; 3], Message::default());
        while next.iter().any(|&next| next < EACH) {
            assert!(!deadline.is_past(), "the ring stands still");
            if consumer.try_pop(&mut message).unwrap() {
                let Header { source, sequence, .. } = message.header;
                assert_eq!(sequence, next[source as usize]);
                assert_eq!(message.payload, payload(sequence, (sequence % 50) as usize));
                next[source as usize] += 1;
            } else {
                std::thread::yield_now();
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(consumer.try_pop(&mut message), Ok(false));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;

    fn numbered(source: u32, sequence: u32) -> Header {
        Header { source, sequence, kind: source ^ sequence, ..Header::default() }
    }

    /// Takes `count` messages, each whole and in the order of its source.
    fn take(consumer: &mut Consumer, count: usize) -> Vec<(u32, u32)> {
        let (mut taken, mut message) = (Vec::new(), Message::default());
        while taken.len() < count {
            if consumer.try_pop(&mut message).unwrap() {
                let Header { source, sequence, kind, .. } = message.header;
                assert_eq!(kind, source ^ sequence, "no line is of another message");
                taken.push((source, sequence));
            } else {
                loom::thread::yield_now();
            }
        }
        taken
    }

    #[test]
    fn one_producer_around_the_ring() {
        loom::model(|| {
            // One message fills it, so that each push meets a full ring, and each is a lap.
            let (mut producer, mut consumer) = lane(4).unwrap();
            let sender = loom::thread::spawn(move || {
                for sequence in 0..2 {
                    while producer.try_push(&numbered(1, sequence), &[]) == Err(RingError::Full) {
                        loom::thread::yield_now();
                    }
                }
            });
            assert_eq!(take(&mut consumer, 2), [(1, 0), (1, 1)]);
            sender.join().unwrap();
        });
    }

    #[test]
    fn two_producers_that_may_meet_a_full_ring_lose_nothing() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            // Room for one message; the other is refused or comes behind.
            let (first, mut consumer) = shared_lane(4).unwrap();
            let first = Arc::new(first);
            let second = Arc::clone(&first);
            let other = loom::thread::spawn(move || second.try_push(&numbered(2, 0), &[]).is_ok());
            let mine = first.try_push(&numbered(1, 0), &[]).is_ok();
            let mut taken = Vec::new();
            if mine {
                taken.extend(take(&mut consumer, 1));
            }
            let others = other.join().unwrap();
            let accepted = usize::from(mine) + usize::from(others);
            taken.extend(take(&mut consumer, accepted - taken.len()));
            assert!(accepted >= 1, "one of them found room");
            let mut message = Message::default();
            assert_eq!(consumer.try_pop(&mut message), Ok(false), "what was refused is not there");
        });
    }

    #[test]
    fn two_producers_go_around_the_ring_in_their_own_order() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let (first, mut consumer) = shared_lane(4).unwrap();
            let first = Arc::new(first);
            let second = Arc::clone(&first);
            let other = loom::thread::spawn(move || {
                while second.try_push(&numbered(2, 0), &[]) == Err(RingError::Full) {
                    loom::thread::yield_now();
                }
            });
            let consumer_side = loom::thread::spawn(move || take(&mut consumer, 2));
            while first.try_push(&numbered(1, 0), &[]) == Err(RingError::Full) {
                loom::thread::yield_now();
            }
            let mut taken = consumer_side.join().unwrap();
            taken.sort_unstable();
            assert_eq!(taken, [(1, 0), (2, 0)]);
            other.join().unwrap();
        });
    }
}
