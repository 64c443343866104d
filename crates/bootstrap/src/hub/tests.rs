//! Whole groups on virtual time, with delay, repetition, cut connections, stops, crashes and partitions.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    time::Duration,
};

use proptest::prelude::*;

use crate::{
    Health, HostId, LimitConfig, Loss, PulseConfig, Rank, RunId, Token,
    gather::{Gathering, Plan},
    health::ProcessState,
    hub::{Conn, Hub, HubAction, HubConfig, HubEvent, Moment},
    member::MemberInfo,
    message::{CallFailure, CallKind, CallRequest, FromHub, Hello, ToHub},
    spoke::{Failure, Spoke, SpokeAction, SpokeEvent},
};

const PULSE: PulseConfig = PulseConfig {
    interval: Duration::from_millis(100),
    suspect_after: Duration::from_millis(400),
    lost_after: Duration::from_secs(2),
};
const JOIN_WITHIN: Moment = Duration::from_secs(10);
const CALL_WITHIN: Duration = Duration::from_secs(3);
const CALLS: u64 = 12;
const END: Moment = Duration::from_secs(30);
/// The last rank starts then; connections are cut before, while the group cannot have formed.
const LAST_STARTS: Moment = Duration::from_millis(400);

/// What happens to a process, after everybody has joined.
#[derive(Debug, Clone, Copy)]
enum Fate {
    Nothing,
    Crash(Moment),
    /// Stopped for a while.
    Stop(Moment, Duration),
    /// Nothing passes to it or from it any more.
    CutOff(Moment),
    Abort(Moment),
}

#[derive(Debug, Clone)]
struct Play {
    seed: u64,
    /// The host of each process.
    hosts: Vec<u8>,
    /// One process, and what becomes of it.
    victim: (usize, Fate),
    longest_delay: Duration,
    /// How many in a hundred messages arrive twice.
    repeated: u32,
    /// How many in a hundred connections are cut before they are used.
    cut: u32,
}

#[derive(Debug)]
enum Event {
    ToHub {
        conn: Conn,
        message: ToHub,
    },
    FromHub {
        rank: usize,
        conn: Conn,
        message: FromHub,
    },
    HubClosed {
        conn: Conn,
    },
    SpokeClosed {
        rank: usize,
        conn: Conn,
    },
    Connect {
        rank: usize,
    },
    /// Due at this time, unless another one was asked for since.
    HubTick {
        due: Moment,
    },
    SpokeTick {
        rank: usize,
        due: Moment,
    },
    Fate,
}

/// One process, rank 0's without its hub.
struct Process {
    spoke: Spoke,
    conn: Option<Conn>,
    is_crashed: bool,
    stopped_until: Moment,
    joined_at: Option<Moment>,
    failure: Option<(Moment, Failure)>,
    next_tick: Moment,
    next_call: u64,
    outcomes: BTreeMap<u64, Result<Vec<Vec<u8>>, CallFailure>>,
    health: BTreeMap<Rank, (Moment, Health)>,
    ever: BTreeSet<(Rank, &'static str)>,
    aborted: Option<(Moment, Rank)>,
}

struct World {
    play: Play,
    random: fastrand::Rng,
    now: Moment,
    hub: Hub,
    next_hub_tick: Moment,
    processes: Vec<Process>,
    events: BTreeMap<u64, Event>,
    queue: BinaryHeap<Reverse<(Moment, u64)>>,
    numbered: u64,
    next_conn: u64,
    /// When the last message of each direction of a connection arrives: the order is kept.
    arrivals: BTreeMap<(Conn, bool), Moment>,
    rank_of: BTreeMap<Conn, usize>,
    fate_at: Option<Moment>,
}

impl World {
    fn new(play: Play) -> Self {
        let size = u32::try_from(play.hosts.len()).unwrap();
        let config = HubConfig {
            token: Token::from("token"),
            run: RunId::from("run"),
            epoch: 0,
            pulse: PULSE,
            limits: LimitConfig::default(),
        };
        let hub = Hub::new(config, Gathering::new(Plan::Everybody { size }));
        let processes = (0..size).map(|rank| Process::new(rank, size, play.hosts[rank as usize]));
        let mut world = Self {
            random: fastrand::Rng::with_seed(play.seed),
            now: Moment::ZERO,
            hub,
            next_hub_tick: Moment::MAX,
            processes: processes.collect(),
            events: BTreeMap::new(),
            queue: BinaryHeap::new(),
            numbered: 0,
            next_conn: 1,
            arrivals: BTreeMap::new(),
            rank_of: BTreeMap::new(),
            fate_at: None,
            play,
        };
        for rank in 0..world.processes.len() {
            let is_last = rank + 1 == world.processes.len();
            let due = world.delay() + if is_last { LAST_STARTS } else { Moment::ZERO };
            world.processes[rank].next_tick = due;
            world.schedule(due, Event::SpokeTick { rank, due });
        }
        world
    }

    fn run(mut self) -> Self {
        while let Some(Reverse((at, number))) = self.queue.pop() {
            if at > END {
                break;
            }
            self.now = self.now.max(at);
            let event = self.events.remove(&number).unwrap();
            self.perform(event);
        }
        self
    }

    fn delay(&mut self) -> Duration {
        self.play.longest_delay.mul_f64(self.random.f64())
    }

    fn schedule(&mut self, at: Moment, event: Event) {
        self.numbered += 1;
        self.events.insert(self.numbered, event);
        self.queue.push(Reverse((at, self.numbered)));
    }

    fn is_cut_off(&self, rank: usize) -> bool {
        let (victim, fate) = self.play.victim;
        let since = self.fate_at;
        matches!(fate, Fate::CutOff(_)) && since.is_some() && (rank == victim || victim == 0)
    }

    /// Hands an event to its process, later if that is stopped, never if it is dead.
    fn perform(&mut self, event: Event) {
        let rank = match &event {
            Event::ToHub { .. } | Event::HubClosed { .. } | Event::HubTick { .. } => 0,
            Event::FromHub { rank, .. }
            | Event::SpokeClosed { rank, .. }
            | Event::Connect { rank }
            | Event::SpokeTick { rank, .. } => *rank,
            Event::Fate => return self.meet_fate(),
        };
        if self.processes[rank].is_crashed {
            return;
        }
        if self.processes[rank].stopped_until > self.now {
            return self.schedule(self.processes[rank].stopped_until, event);
        }
        match event {
            Event::ToHub { conn, message } => self.tell_hub(HubEvent::Received { conn, message }),
            Event::HubClosed { conn } => self.tell_hub(HubEvent::Closed { conn }),
            Event::HubTick { due } if due == self.next_hub_tick => {
                self.next_hub_tick = Moment::MAX;
                self.tell_hub(HubEvent::Tick);
            }
            Event::FromHub { rank, conn, message } if self.processes[rank].conn == Some(conn) => {
                self.tell_spoke(rank, SpokeEvent::Received(message));
            }
            Event::SpokeClosed { rank, conn } if self.processes[rank].conn == Some(conn) => {
                self.processes[rank].conn = None;
                self.tell_spoke(rank, SpokeEvent::Closed);
            }
            Event::Connect { rank } => self.connect(rank),
            Event::SpokeTick { rank, due } if due == self.processes[rank].next_tick => {
                self.processes[rank].next_tick = Moment::MAX;
                self.tell_spoke(rank, SpokeEvent::Tick);
            }
            Event::HubTick { .. } | Event::SpokeTick { .. } => {}
            Event::FromHub { .. } | Event::SpokeClosed { .. } | Event::Fate => {}
        }
    }

    fn connect(&mut self, rank: usize) {
        let is_local = rank == 0;
        if self.processes[0].is_crashed {
            return self.tell_spoke(rank, SpokeEvent::Unreachable);
        }
        let conn = if is_local { Conn::LOCAL } else { Conn(self.next_conn) };
        self.next_conn += 1;
        self.rank_of.insert(conn, rank);
        self.processes[rank].conn = Some(conn);
        let nonce = std::array::from_fn(|_| self.random.u8(..));
        let challenge = std::array::from_fn(|_| self.random.u8(..));
        let (token, run) = (Token::from("token"), RunId::from("run"));
        self.tell_spoke(rank, SpokeEvent::Connected { token, run, from: None, to: None, nonce });
        self.tell_hub(HubEvent::Opened { conn, challenge });
        let at = self.now + self.play.longest_delay;
        if !is_local && at < LAST_STARTS && self.random.u32(..100) < self.play.cut {
            self.schedule(at, Event::HubClosed { conn });
            self.schedule(at, Event::SpokeClosed { rank, conn });
        }
    }

    fn tell_hub(&mut self, event: HubEvent) {
        self.hub.handle(self.now, event);
        while let Some(action) = self.hub.poll_action() {
            match action {
                HubAction::Send { conn, message } => self.send_down(conn, &message),
                HubAction::Close { conn } => self.close(conn, false),
                HubAction::Probe { rank, .. } => {
                    let state = self.state_of(rank.index());
                    self.hub.handle(self.now, HubEvent::Probed { rank, state });
                }
                HubAction::Formed | HubAction::Watch { .. } => {}
            }
        }
        if let Some(due) = self.hub.poll_timeout().map(|due| due.max(self.now))
            && due < self.next_hub_tick
        {
            self.next_hub_tick = due;
            self.schedule(due, Event::HubTick { due });
        }
    }

    fn state_of(&self, rank: usize) -> ProcessState {
        let process = &self.processes[rank];
        match (process.is_crashed, process.stopped_until > self.now) {
            (true, _) => ProcessState::Gone,
            (_, true) => ProcessState::Stopped,
            _ => ProcessState::Running,
        }
    }

    fn arrival(&mut self, conn: Conn, is_up: bool) -> Moment {
        let at = self.now + if conn == Conn::LOCAL { Duration::ZERO } else { self.delay() };
        let last = self.arrivals.entry((conn, is_up)).or_default();
        *last = at.max(*last);
        *last
    }

    /// How often a message arrives: mostly once.
    fn times(&mut self, rank: usize) -> u32 {
        if self.is_cut_off(rank) && rank != 0 {
            return 0;
        }
        1 + u32::from(rank != 0 && self.random.u32(..100) < self.play.repeated)
    }

    fn send_down(&mut self, conn: Conn, message: &FromHub) {
        let Some(&rank) = self.rank_of.get(&conn) else { return };
        for _ in 0..self.times(rank) {
            let at = self.arrival(conn, false);
            self.schedule(at, Event::FromHub { rank, conn, message: message.clone() });
        }
    }

    fn close(&mut self, conn: Conn, by_spoke: bool) {
        let Some(&rank) = self.rank_of.get(&conn) else { return };
        if self.times(rank) == 0 {
            return;
        }
        let at = self.arrival(conn, by_spoke);
        let event = if by_spoke { Event::HubClosed { conn } } else { Event::SpokeClosed { rank, conn } };
        self.schedule(at, event);
    }

    fn tell_spoke(&mut self, rank: usize, event: SpokeEvent) {
        self.processes[rank].spoke.handle(self.now, event);
        while let Some(action) = self.processes[rank].spoke.poll_action() {
            self.act(rank, action);
        }
        let due = self.processes[rank].spoke.poll_timeout().map(|due| due.max(self.now));
        if let Some(due) = due.filter(|due| *due < self.processes[rank].next_tick) {
            self.processes[rank].next_tick = due;
            self.schedule(due, Event::SpokeTick { rank, due });
        }
    }

    fn act(&mut self, rank: usize, action: SpokeAction) {
        let now = self.now;
        match action {
            SpokeAction::Connect => {
                let at = now + self.delay();
                self.schedule(at, Event::Connect { rank });
            }
            SpokeAction::Send(message) => {
                let Some(conn) = self.processes[rank].conn else { return };
                for _ in 0..self.times(rank) {
                    let at = self.arrival(conn, true);
                    self.schedule(at, Event::ToHub { conn, message: message.clone() });
                }
            }
            SpokeAction::Close => {
                if let Some(conn) = self.processes[rank].conn.take() {
                    self.close(conn, true);
                }
            }
            SpokeAction::Joined(_) => {
                self.processes[rank].joined_at = Some(now);
                self.call(rank);
                if self.processes.iter().all(|process| process.joined_at.is_some()) {
                    self.decide_fate();
                }
            }
            SpokeAction::Failed(failure) => self.processes[rank].failure = Some((now, failure)),
            SpokeAction::Done { sequence, outcome } => {
                let process = &mut self.processes[rank];
                let is_new = process.outcomes.insert(sequence, outcome).is_none();
                if is_new {
                    self.call(rank);
                }
            }
            SpokeAction::Health { rank: other, health } => {
                let word = match health {
                    Health::Alive => "alive",
                    Health::Suspect { .. } => "suspect",
                    Health::Lost(_) => "lost",
                };
                self.processes[rank].ever.insert((other, word));
                self.processes[rank].health.insert(other, (now, health));
            }
            SpokeAction::Aborted { by, .. } => {
                self.processes[rank].aborted.get_or_insert((now, by));
            }
            SpokeAction::Probe { .. } => {
                let state = self.state_of(0);
                self.processes[rank].spoke.handle(now, SpokeEvent::Probed(state));
            }
            SpokeAction::Watch { .. } => {}
        }
    }

    fn call(&mut self, rank: usize) {
        let process = &mut self.processes[rank];
        if process.next_call == CALLS {
            return;
        }
        let sequence = process.next_call;
        process.next_call += 1;
        let request = CallRequest {
            sequence,
            kind: CallKind::AllGather,
            name: format!("call {sequence}"),
            value: vec![u8::try_from(rank).unwrap(), u8::try_from(sequence).unwrap()],
            within_ms: CALL_WITHIN.as_millis().try_into().unwrap(),
        };
        process.spoke.handle(self.now, SpokeEvent::Call(request));
    }

    fn decide_fate(&mut self) {
        let (_, fate) = self.play.victim;
        let after = match fate {
            Fate::Nothing => return,
            Fate::Crash(after) | Fate::Stop(after, _) | Fate::CutOff(after) | Fate::Abort(after) => after,
        };
        self.schedule(self.now + after, Event::Fate);
    }

    fn meet_fate(&mut self) {
        let (victim, fate) = self.play.victim;
        self.fate_at = Some(self.now);
        match fate {
            Fate::Nothing | Fate::CutOff(_) => {}
            Fate::Stop(_, time) => self.processes[victim].stopped_until = self.now + time,
            Fate::Abort(_) => self.tell_spoke(victim, SpokeEvent::Abort { reason: "enough".into() }),
            Fate::Crash(_) => {
                self.processes[victim].is_crashed = true;
                let of_victim = |rank: usize| victim == 0 || rank == victim;
                let conns: Vec<(Conn, usize)> =
                    self.rank_of.iter().map(|(conn, rank)| (*conn, *rank)).collect();
                for (conn, rank) in conns.into_iter().filter(|(_, rank)| of_victim(*rank)) {
                    let at = self.arrival(conn, true);
                    self.schedule(at, Event::HubClosed { conn });
                    let at = self.arrival(conn, false);
                    self.schedule(at, Event::SpokeClosed { rank, conn });
                }
            }
        }
    }
}

impl Process {
    fn new(rank: u32, size: u32, host: u8) -> Self {
        let mut member = MemberInfo::here(Rank(rank), ([127, 0, 0, 1], 1).into());
        member.host = HostId::of(&host.to_string());
        let hello = Hello {
            run: RunId::from("run"),
            epoch: 0,
            rank: Some(Rank(rank)),
            size,
            instance: [u8::try_from(rank).unwrap(); 16],
            nonce: [0; 32],
            within_ms: 0,
            member,
        };
        Self {
            spoke: Spoke::new(hello, JOIN_WITHIN, rank == 0),
            conn: None,
            is_crashed: false,
            stopped_until: Moment::ZERO,
            joined_at: None,
            failure: None,
            next_tick: Moment::MAX,
            next_call: 0,
            outcomes: BTreeMap::new(),
            health: BTreeMap::new(),
            ever: BTreeSet::new(),
            aborted: None,
        }
    }
}

/// Everybody who took part in a call got the same, unless the connection to rank 0 ended on the way.
fn check_outcomes(world: &World) {
    for sequence in 0..CALLS {
        let outcomes = world.processes.iter().filter_map(|process| process.outcomes.get(&sequence));
        let values: BTreeSet<_> = outcomes.clone().filter_map(|outcome| outcome.as_ref().ok()).collect();
        assert!(values.len() <= 1, "call {sequence}: {values:?}");
        for values in values {
            let number = u8::try_from(sequence).unwrap();
            let expected: Vec<Vec<u8>> =
                (0..world.processes.len()).map(|rank| vec![u8::try_from(rank).unwrap(), number]).collect();
            assert_eq!(*values, expected);
        }
    }
}

/// Members that nothing has happened to are lost to nobody.
fn check_losses(world: &World) {
    let (victim, fate) = world.play.victim;
    for (rank, process) in world.processes.iter().enumerate().filter(|(_, process)| !process.is_crashed) {
        for (other, word) in &process.ever {
            let is_ours = matches!(fate, Fate::Crash(_) | Fate::CutOff(_));
            let is_due = is_ours && (other.index() == victim || rank == victim || victim == 0);
            assert!(*word != "lost" || is_due, "{rank} lost {other}");
            // One that was stopped itself does not suspect those who could not reach it.
            let is_slow = matches!(fate, Fate::Stop(..)) && other.index() == victim && rank != victim;
            assert!(*word != "suspect" || is_due || is_slow, "{rank} suspected {other}");
        }
    }
}

fn check(play: Play) {
    let (victim, fate) = play.victim;
    let world = World::new(play).run();
    for (rank, process) in world.processes.iter().enumerate() {
        assert!(process.failure.is_none(), "{rank}: {:?}", process.failure);
        assert!(process.joined_at.is_some_and(|at| at < JOIN_WITHIN), "{rank} did not join");
    }
    check_outcomes(&world);
    check_losses(&world);
    let fate_at = world.fate_at.unwrap_or_default();
    let slack = world.play.longest_delay * 4 + Duration::from_millis(1);
    for (rank, process) in world.processes.iter().enumerate() {
        let of_victim = process.health.get(&Rank(u32::try_from(victim).unwrap()));
        match fate {
            Fate::Nothing => {
                assert_eq!(process.outcomes.len() as u64, CALLS);
                assert!(process.outcomes.values().all(Result::is_ok), "{:?}", process.outcomes);
            }
            Fate::Crash(_) if rank != victim => {
                let Some((at, Health::Lost(_))) = of_victim else { panic!("{rank}: {of_victim:?}") };
                assert!(*at <= fate_at + slack, "{rank} knew after {:?}", *at - fate_at);
            }
            Fate::Stop(..) if rank != victim => {
                assert!(!matches!(of_victim, Some((_, Health::Suspect { .. }))), "{rank}: {of_victim:?}");
            }
            Fate::CutOff(_) if rank != victim => {
                let Some((at, Health::Lost(how))) = of_victim else { panic!("{rank}: {of_victim:?}") };
                assert_eq!(*how, Loss::Silent);
                assert!(*at <= fate_at + PULSE.lost_after + PULSE.interval * 3 + slack);
            }
            Fate::Abort(_) => {
                let Some((at, by)) = process.aborted else { panic!("{rank} was not told") };
                assert_eq!(by.index(), victim);
                assert!(at <= fate_at + slack);
            }
            _ => {}
        }
    }
}

fn fates(time: impl Strategy<Value = u64> + Clone + 'static, may_cut_off: bool) -> BoxedStrategy<Fate> {
    let ms = Duration::from_millis;
    let crash = time.clone().prop_map(move |at| Fate::Crash(ms(at)));
    let abort = time.clone().prop_map(move |at| Fate::Abort(ms(at)));
    if may_cut_off {
        let cut_off = time.clone().prop_map(move |at| Fate::CutOff(ms(at)));
        // One that is stopped for longer is lost to the other hosts.
        let stop = (time, 1_u64..1500).prop_map(move |(at, long)| Fate::Stop(ms(at), ms(long)));
        return prop_oneof![Just(Fate::Nothing), crash, abort, cut_off, stop].boxed();
    }
    let stop = (time, 1_u64..15_000).prop_map(move |(at, long)| Fate::Stop(ms(at), ms(long)));
    prop_oneof![Just(Fate::Nothing), crash, abort, stop].boxed()
}

fn plays(on_one_host: bool) -> impl Strategy<Value = Play> {
    (2_usize..7, any::<u64>(), 0_usize..7, fates(0_u64..300, !on_one_host), 1_u64..40, 0_u32..20, 0_u32..40)
        .prop_map(move |(size, seed, victim, fate, delay, repeated, cut)| Play {
            seed,
            hosts: (0..u8::try_from(size).unwrap()).map(|rank| if on_one_host { 0 } else { rank }).collect(),
            victim: (victim % size, fate),
            longest_delay: Duration::from_millis(delay),
            repeated,
            cut,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_group_on_one_host_is_right_whatever_happens(play in plays(true)) {
        check(play);
    }

    #[test]
    fn a_group_of_many_hosts_is_right_whatever_happens(play in plays(false)) {
        check(play);
    }
}
