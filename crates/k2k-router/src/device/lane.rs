//! The host's ends of lanes to and from a device, in memory that both reach.
//!
//! A frame is a line that says what it is and where it goes, and a message behind it. What goes to an executor is handed
//! on by the device's bridge, which never waits for room: the host counts the room at the executor as well.

use std::sync::Arc;

use super::{
    layout::{CLASSES, Layout},
    memory::{Memory, Window},
};
use crate::{
    Header, RingError,
    wire::{HEADER_LINES, HEADER_WORDS, Halves, LINE_BYTES, MAX_PAYLOAD, stamp},
};

/// Whom a frame is for: an executor of the device, or its bridge.
pub(crate) const BRIDGE: u32 = u32::MAX;

/// A lane's lines.
#[derive(Debug, Clone)]
struct Lines {
    host: Window,
    at: u64,
    shift: u32,
}

impl Lines {
    fn place(&self, position: u64) -> u64 {
        self.at + (position & ((1 << self.shift) - 1)) * 16
    }

    fn write(&self, position: u64, line: Halves) {
        let place = self.place(position);
        // The half with the stamp publishes the other.
        self.host.store(place, line.low);
        self.host.store(place + 8, line.high);
    }

    fn read(&self, position: u64) -> Option<Halves> {
        let place = self.place(position);
        let high = self.host.load(place + 8);
        (Halves::stamp(high) == stamp(position, self.shift))
            .then(|| Halves { low: self.host.load(place), high })
    }

    const fn count(&self) -> u64 {
        1 << self.shift
    }
}

/// Lines that were sent, and how many of them were given back when somebody last looked.
#[derive(Debug, Clone, Copy, Default)]
struct Credit {
    sent: u64,
    seen: u64,
}

impl Credit {
    fn has_room(&mut self, lines: u64, all: u64, look: impl FnOnce() -> u64) -> bool {
        if self.sent + lines - self.seen > all {
            self.seen = look().min(self.sent);
        }
        self.sent + lines - self.seen <= all
    }
}

/// The host's lanes to one device.
#[derive(Debug)]
pub(crate) struct Outward {
    layout: Layout,
    memory: Arc<Memory>,
    lanes: [Credit; CLASSES],
    /// By executor and class.
    ends: Vec<[Credit; CLASSES]>,
}

impl Outward {
    pub(crate) fn new(layout: Layout, memory: Arc<Memory>) -> Self {
        let ends = vec![<[Credit; CLASSES]>::default(); layout.executors as usize];
        Self { layout, memory, lanes: Default::default(), ends }
    }

    /// Sends a frame of one class, or says that there is no room for it now.
    pub(crate) fn try_push(
        &mut self,
        class: usize,
        to: u32,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), RingError> {
        let header = Header { length: u32::try_from(payload.len()).unwrap_or(u32::MAX), ..*header };
        let lines = 1 + header.lines() as u64;
        let (layout, host) = (&self.layout, &self.memory.host);
        if payload.len() > MAX_PAYLOAD || lines > 1 << layout.shift {
            let limit = Layout::longest(1 << layout.shift);
            return Err(RingError::TooLong { length: payload.len(), limit });
        }
        let word = |from: u64, at: usize| host.load(from + at as u64 * 8);
        let lane = &mut self.lanes[class];
        if !lane.has_room(lines, 1 << layout.host_shift, || word(layout.host_credits, class)) {
            return Err(RingError::Full);
        }
        if let Some(end) = self.ends.get_mut(to as usize) {
            let at = to as usize * CLASSES + class;
            if !end[class].has_room(lines, 1 << layout.shift, || word(layout.host_returned, at)) {
                return Err(RingError::Full);
            }
            end[class].sent += lines;
        }
        let at = layout.host_rings + (((class as u64) * 16) << layout.host_shift);
        let ring = Lines { host: host.clone(), at, shift: layout.host_shift };
        let mut position = lane.sent;
        let mut put = |words: [u32; 3]| {
            ring.write(position, Halves::of_words(words, stamp(position, ring.shift)));
            position += 1;
        };
        put([to, 0, 0]);
        header.to_words().as_chunks::<3>().0.iter().for_each(|words| put(*words));
        payload.chunks(LINE_BYTES).for_each(|bytes| put(Halves::of_bytes(bytes, 0).words()));
        lane.sent = position;
        Ok(())
    }
}

/// What came from a device.
#[derive(Debug, Default)]
pub(crate) struct Frame {
    /// What it is, and two words about it.
    pub(crate) words: [u32; 3],
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
}

/// The host's end of a lane from one executor or bridge.
#[derive(Debug)]
pub(crate) struct Inward {
    lines: Lines,
    credit_at: u64,
    head: u64,
    returned: u64,
}

impl Inward {
    pub(crate) fn new(layout: &Layout, memory: &Memory, executor: u32) -> Self {
        let lines =
            Lines { host: memory.host.clone(), at: layout.out_lane(executor), shift: layout.host_shift };
        let credit_at = layout.host_out_credits + u64::from(executor) * 8;
        Self { lines, credit_at, head: 0, returned: 0 }
    }

    /// Reads the next frame, or says that there is none yet.
    pub(crate) fn try_pop(&mut self, frame: &mut Frame) -> Result<bool, RingError> {
        let Some(first) = self.lines.read(self.head) else {
            self.give_back();
            return Ok(false);
        };
        let mut words = [0; HEADER_WORDS];
        for (position, three) in (self.head + 1..).zip(words.as_chunks_mut::<3>().0) {
            let Some(line) = self.lines.read(position) else { return Ok(false) };
            *three = line.words();
        }
        frame.words = first.words();
        frame.header = Header::from_words(&words)?;
        let lines = frame.header.lines();
        if lines as u64 >= self.lines.count() {
            return Err(crate::WireError { field: "length", value: frame.header.length }.into());
        }
        frame.payload.clear();
        let begin = self.head + 1 + HEADER_LINES as u64;
        for position in begin..begin + (lines - HEADER_LINES) as u64 {
            let Some(line) = self.lines.read(position) else { return Ok(false) };
            frame.payload.extend_from_slice(&line.bytes());
        }
        frame.payload.truncate(frame.header.length as usize);
        self.head += 1 + lines as u64;
        if self.head - self.returned >= self.lines.count() / 4 {
            self.give_back();
        }
        Ok(true)
    }

    fn give_back(&mut self) {
        if self.returned != self.head {
            self.returned = self.head;
            self.lines.host.store(self.credit_at, self.head);
        }
    }
}
