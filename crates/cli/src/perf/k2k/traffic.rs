//! Actors that send to each other, by pairs and by crowds.

use std::{
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::ensure;
use warpweft::{
    Deadline, Device,
    k2k_router::{
        ActorCode, ActorId, ActorRef, ActorSpec, FullPolicy, Layout, Placement, System, wire::MAX_PAYLOAD,
    },
};

use super::{Checked, Row};
use crate::{args::PerfK2k, measure::Summary};

/// Far longer than any round takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Kinds of messages: one of the traffic, one that makes a source go on, one that asks a sink for its counts.
const TRAFFIC: u32 = 0;
const GO: u32 = 1;
const COUNTS: u32 = 2;

/// Messages that a source sends before it lets others in.
const BURST: u64 = 64;

const NO_STATE: Layout = Layout { id: 0, size: 0 };

/// Messages served, doubled and out of order, and the next number of each source.
const SINK: Layout = Layout { id: 1, size: 3 * 8 + 64 * 8 };

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word))
}

fn word(state: &[u8], at: usize) -> u64 {
    words(state).nth(at).unwrap_or(0)
}

fn set_word(state: &mut [u8], at: usize, value: u64) {
    if let Some(word) = state.as_chunks_mut::<8>().0.get_mut(at) {
        *word = value.to_le_bytes();
    }
}

fn add(state: &mut [u8], at: usize) {
    set_word(state, at, word(state, at) + 1);
}

/// Counts what comes, and compares its number with the one that had to come from its source.
fn sink() -> ActorSpec {
    let code = ActorCode::host(SINK, |cx, state, message| {
        if message.header.kind == COUNTS {
            return cx.reply(&state[..24]);
        }
        let next = 3 + usize::try_from(word(&message.payload, 0)).unwrap_or(usize::MAX).min(63);
        let (number, expected) = (word(&message.payload, 1), word(state, next));
        add(state, 0);
        match number.cmp(&expected) {
            std::cmp::Ordering::Less => add(state, 1),
            std::cmp::Ordering::Greater => add(state, 2),
            std::cmp::Ordering::Equal => {}
        }
        set_word(state, next, number + 1);
    });
    // A sink never sends, so that nobody waits in a circle.
    ActorSpec::new("sink", code).with_inbox(4096, FullPolicy::Wait { within: PATIENCE })
}

/// Sends numbered messages to each of the sinks, a burst at a time.
fn source(number: u64, sinks: Vec<ActorId>, size: usize) -> ActorSpec {
    let code = ActorCode::host(NO_STATE, move |cx, _, message| {
        let (from, until) = (word(&message.payload, 0), word(&message.payload, 1));
        let mut payload = vec![0; size];
        set_word(&mut payload, 0, number);
        let end = until.min(from + BURST);
        for next in from..end {
            set_word(&mut payload, 1, next);
            cx.broadcast(&sinks, TRAFFIC, &payload);
        }
        if end < until {
            cx.send(cx.id(), GO, &range(end, until));
        }
    });
    ActorSpec::new("source", code)
}

fn range(from: u64, until: u64) -> Vec<u8> {
    [from.to_le_bytes(), until.to_le_bytes()].concat()
}

fn within() -> Deadline {
    Deadline::within(PATIENCE)
}

/// Waits without taking much of the cores that the actors run on.
fn until(what: &str, done: impl Fn() -> bool) -> anyhow::Result<()> {
    let deadline = within();
    while !done() {
        ensure!(!deadline.is_past(), "{what} took more than {PATIENCE:?}");
        thread::park_timeout(Duration::from_micros(100));
    }
    Ok(())
}

/// Sources and sinks, each source sending to all sinks.
struct Crowd<'a> {
    what: &'static str,
    system: &'a System,
    size: usize,
    sources: Vec<ActorRef>,
    sinks: Vec<ActorRef>,
    sent: u64,
    rates: Vec<f64>,
}

impl<'a> Crowd<'a> {
    fn new(
        what: &'static str,
        system: &'a System,
        size: usize,
        from: &[Arc<dyn Device>],
        to: &[Arc<dyn Device>],
    ) -> anyhow::Result<Self> {
        let place = |device: &Arc<dyn Device>| Placement::Device(device.info().id);
        let sinks =
            to.iter().map(|device| system.spawn(&sink(), place(device))).collect::<Result<Vec<_>, _>>()?;
        let ids: Vec<ActorId> = sinks.iter().map(ActorRef::id).collect();
        let spawn = |(number, device)| system.spawn(&source(number, ids.clone(), size), place(device));
        let sources = (0..).zip(from).map(spawn).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { what, system, size, sources, sinks, sent: 0, rates: Vec::new() })
    }

    /// Each source sends `count` messages to each sink.
    fn round(&mut self, count: u64) -> anyhow::Result<()> {
        let (from, end) = (self.sent, self.sent + count);
        let began = Instant::now();
        for source in &self.sources {
            source.send(GO, &range(from, end), within())?;
        }
        self.sent = end;
        let expected = end * self.sources.len() as u64;
        until(self.what, || self.sinks.iter().all(|sink| sink.served() >= expected))?;
        let messages = count * (self.sources.len() * self.sinks.len()) as u64;
        self.rates.push(messages as f64 / began.elapsed().as_secs_f64());
        Ok(())
    }

    fn row(self) -> anyhow::Result<Row> {
        let mut checked = Checked::default();
        for sink in &self.sinks {
            let counts = sink.call(COUNTS, &[], within())?.payload;
            let (served, duplicated, reordered) = (word(&counts, 0), word(&counts, 1), word(&counts, 2));
            let lost = (self.sent * self.sources.len() as u64).saturating_sub(served);
            checked.add(Checked { served, lost, duplicated, reordered });
        }
        for actor in self.sources.iter().chain(&self.sinks) {
            self.system.stop(actor, within())?;
        }
        Ok(Row::new(self.what, self.size, checked).with_rates(self.rates))
    }
}

/// Two actors that answer each other, and halves of their round trips.
struct Pair {
    what: &'static str,
    ping: ActorRef,
    times: Arc<Mutex<Trips>>,
    size: usize,
    asked: u64,
}

#[derive(Debug, Default)]
struct Trips {
    began: Option<Instant>,
    times: Vec<Duration>,
    wrong: u64,
}

impl Pair {
    fn new(
        what: &'static str,
        system: &System,
        size: usize,
        [one, other]: [&Arc<dyn Device>; 2],
    ) -> anyhow::Result<Self> {
        let echo =
            ActorCode::host(NO_STATE, |cx, _, message| cx.send(cx.source(), TRAFFIC, &message.payload));
        let echo = system.spawn(&ActorSpec::new("pong", echo), Placement::Device(other.info().id))?;
        let (times, to) = (Arc::<Mutex<Trips>>::default(), echo.id());
        let trips = Arc::clone(&times);
        // The payload says how many trips are left, and is checked to its last byte.
        let ping = ActorCode::host(NO_STATE, move |cx, _, message| {
            let mut trips = trips.lock().unwrap_or_else(PoisonError::into_inner);
            let left = word(&message.payload, 0);
            if message.header.kind == TRAFFIC {
                trips.wrong += u64::from(message.payload != payload(left, size));
                let took = trips.began.map(|began| began.elapsed() / 2);
                trips.times.extend(took);
            }
            if left > 0 {
                let next = payload(left - 1, size);
                trips.began = Some(Instant::now());
                cx.send(to, TRAFFIC, &next);
            }
        });
        let ping = system.spawn(&ActorSpec::new("ping", ping), Placement::Device(one.info().id))?;
        Ok(Self { what, ping, times, size, asked: 0 })
    }

    fn round(&mut self, count: u64) -> anyhow::Result<()> {
        self.ping.send(GO, &payload(count, self.size), within())?;
        self.asked += count;
        until(self.what, || self.lock().times.len() as u64 >= self.asked)
    }

    fn row(self) -> Row {
        let trips = self.lock();
        let served = trips.times.len() as u64;
        let checked = Checked { served, lost: self.asked - served, duplicated: 0, reordered: trips.wrong };
        Row::new(self.what, self.size, checked).with_latency(Summary::of(&trips.times))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Trips> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn payload(left: u64, size: usize) -> Vec<u8> {
    let mut payload = vec![left.to_le_bytes()[0]; size];
    set_word(&mut payload, 0, left);
    payload
}

/// The host asks an actor.
fn ask(actor: &ActorRef, size: usize, count: u64, checked: &mut Checked) -> anyhow::Result<Vec<Duration>> {
    let trip = |number| {
        let question = payload(number, size);
        let began = Instant::now();
        let answer = actor.call(TRAFFIC, &question, within())?;
        let took = began.elapsed();
        checked.served += 1;
        checked.reordered += u64::from(answer.payload != question);
        Ok(took)
    };
    (0..count).map(trip).collect()
}

pub(super) fn measure(
    system: &System,
    devices: &[Arc<dyn Device>],
    args: &PerfK2k,
) -> anyhow::Result<Vec<Row>> {
    let size = usize::try_from(args.size)?;
    ensure!((16..=MAX_PAYLOAD).contains(&size), "a message has 16 to {MAX_PAYLOAD} bytes here");
    let (first, last) = (&devices[..1], &devices[devices.len() - 1..]);
    let answers = ActorCode::host(NO_STATE, |cx, _, message| cx.reply(&message.payload));
    let answers = system.spawn(&ActorSpec::new("answers", answers), Placement::Device(first[0].info().id))?;
    let (mut asked, mut asked_checked) = (Vec::new(), Checked::default());
    let mut pairs = [
        Pair::new("actor to actor, same device", system, size, [&first[0], &first[0]])?,
        Pair::new("actor to actor", system, size, [&first[0], &last[0]])?,
    ];
    let mut crowds = [
        Crowd::new("one to one", system, size, first, last)?,
        Crowd::new("one to one, longest", system, MAX_PAYLOAD, first, last)?,
        Crowd::new("fan-in", system, size, devices, last)?,
        Crowd::new("fan-out", system, size, first, devices)?,
        Crowd::new("all to all", system, size, devices, devices)?,
    ];
    let messages = u64::from(args.messages);
    for _ in 0..args.rounds {
        asked.extend(ask(&answers, size, messages / 100, &mut asked_checked)?);
        for pair in &mut pairs {
            pair.round(messages / 50)?;
        }
        for crowd in &mut crowds {
            let ends = (crowd.sources.len() * crowd.sinks.len()) as u64;
            let share = if crowd.size > size { 20 } else { 1 };
            crowd.round((messages / ends / share).max(1))?;
        }
    }
    let ask = Row::new("host asks actor", size, asked_checked).with_latency(Summary::of(&asked));
    let mut rows = vec![ask];
    rows.extend(pairs.map(Pair::row));
    for crowd in crowds {
        rows.push(crowd.row()?);
    }
    Ok(rows)
}
