//! Two threads, and what joins them: a lane, or a channel of a crate that programs use today.

use std::{
    hint,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use warpweft::k2k_router::{
    Header, Message,
    ring::{Consumer, Producer, lane},
};

use super::{Checked, Row};
use crate::{args::PerfK2k, measure::Summary};

/// Bytes of each message: peers move values of a fixed size.
const SIZE: usize = 64;

/// Messages that each of them holds.
const DEPTH: usize = 1024;

type Packet = [u8; SIZE];

trait Sender: Send {
    fn send(&mut self, packet: &Packet);
}

trait Receiver: Send {
    fn receive(&mut self) -> Packet;
}

/// Looks again and again, and lets others run if it takes long.
fn spin<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let mut looks = 0_u32;
    loop {
        if let Some(found) = look() {
            return found;
        }
        looks += 1;
        if looks < 64 { hint::spin_loop() } else { thread::yield_now() }
    }
}

impl Sender for Producer {
    fn send(&mut self, packet: &Packet) {
        let header = Header::default();
        spin(|| self.try_push(&header, packet).ok());
    }
}

struct LaneEnd(Consumer, Message);

impl Receiver for LaneEnd {
    fn receive(&mut self) -> Packet {
        let Self(consumer, message) = self;
        // What is damaged never comes to be a message; the row then says that some are lost.
        spin(|| consumer.try_pop(message).unwrap_or(true).then_some(()));
        message.payload.as_slice().try_into().unwrap_or([0xff; SIZE])
    }
}

impl Sender for crossbeam_channel::Sender<Packet> {
    fn send(&mut self, packet: &Packet) {
        // The other end is there as long as messages are expected.
        let _gone = Self::send(self, *packet);
    }
}

impl Receiver for crossbeam_channel::Receiver<Packet> {
    fn receive(&mut self) -> Packet {
        self.recv().unwrap_or([0xff; SIZE])
    }
}

impl Sender for flume::Sender<Packet> {
    fn send(&mut self, packet: &Packet) {
        let _gone = Self::send(self, *packet);
    }
}

impl Receiver for flume::Receiver<Packet> {
    fn receive(&mut self) -> Packet {
        self.recv().unwrap_or([0xff; SIZE])
    }
}

type Channel = (Box<dyn Sender>, Box<dyn Receiver>);

fn lane_channel() -> Channel {
    // As many messages as the others hold: nine lines each.
    let (producer, consumer) = lane(DEPTH * 9).expect("the size is allowed");
    (Box::new(producer), Box::new(LaneEnd(consumer, Message::default())))
}

fn crossbeam() -> Channel {
    let (sender, receiver) = crossbeam_channel::bounded(DEPTH);
    (Box::new(sender), Box::new(receiver))
}

fn flume() -> Channel {
    let (sender, receiver) = flume::bounded(DEPTH);
    (Box::new(sender), Box::new(receiver))
}

/// Its name, and how to make one.
type Candidate = (&'static str, fn() -> Channel);

const CANDIDATES: [Candidate; 3] = [
    ("lane, 2 threads", lane_channel),
    ("crossbeam-channel, 2 threads", crossbeam),
    ("flume, 2 threads", flume),
];

fn numbered(number: u64) -> Packet {
    let mut packet = [0; SIZE];
    packet[..8].copy_from_slice(&number.to_le_bytes());
    packet[SIZE - 8..].copy_from_slice(&(!number).to_le_bytes());
    packet
}

/// Counts a packet as the one that had to come, or as wrong.
fn check(checked: &mut Checked, packet: &Packet, number: u64) {
    checked.served += 1;
    checked.reordered += u64::from(*packet != numbered(number));
}

pub(super) fn measure(args: &PerfK2k) -> Vec<Row> {
    let mut times = [const { Vec::new() }; CANDIDATES.len()];
    let mut rates = [const { Vec::new() }; CANDIDATES.len()];
    let mut checks = [Checked::default(); CANDIDATES.len()];
    for _ in 0..args.rounds {
        for (at, (_, make)) in CANDIDATES.into_iter().enumerate() {
            times[at].extend(round_trips(make, u64::from(args.messages) / 50, &mut checks[at]));
            rates[at].push(rate(make, args.messages.into(), &mut checks[at]));
        }
    }
    let rows = CANDIDATES.into_iter().zip(checks).zip(times.into_iter().zip(rates));
    let row = |(((what, _), checked), (times, rates)): ((Candidate, _), (Vec<Duration>, _))| {
        Row::new(what, SIZE, checked).with_latency(Summary::of(&times)).with_rates(rates)
    };
    rows.map(row).collect()
}

/// Halves of round trips.
fn round_trips(make: fn() -> Channel, count: u64, checked: &mut Checked) -> Vec<Duration> {
    let ((mut ask, mut asked), (mut answer, mut answered)) = (make(), make());
    thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..count {
                let packet = asked.receive();
                answer.send(&packet);
            }
        });
        let trip = |number| {
            let began = Instant::now();
            ask.send(&numbered(number));
            let packet = answered.receive();
            let took = began.elapsed();
            check(checked, &packet, number);
            took / 2
        };
        (0..count).map(trip).collect()
    })
}

/// Messages per second, from the first that is sent to the last that is received.
fn rate(make: fn() -> Channel, count: u64, checked: &mut Checked) -> f64 {
    let (mut sender, mut receiver) = make();
    let start = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            start.wait();
            for number in 0..count {
                sender.send(&numbered(number));
            }
        });
        start.wait();
        let began = Instant::now();
        for number in 0..count {
            check(checked, &receiver.receive(), number);
        }
        count as f64 / began.elapsed().as_secs_f64()
    })
}
