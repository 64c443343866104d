//! The protocol by which actors move, as it is shipped, in every order of events: orders and answers are lost, late,
//! doubled and out of order, parties are lost at every step, and time is up at every step.
//!
//! Searched breadth first over all states that can be reached; a state is everything there is, so that a search that
//! ends has seen all there is.

use std::{
    collections::{BTreeSet, HashSet, VecDeque},
    time::Duration,
};

use warpweft_k2k_router::{
    cursor::{Cursors, Turn},
    epoch::{Action, Answer, Epoch, Event, Goal, Order, Outcome, Party, Seat, SeatState},
};

const LIMIT: Duration = Duration::from_secs(1);

/// What may go wrong, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Trouble {
    /// Orders and answers that are lost.
    losses: u8,
    /// Orders that are repeated although they are only late.
    repeats: u8,
    source_may_die: bool,
    target_may_die: bool,
    time_may_be_up: bool,
    target_may_refuse: bool,
}

const NONE: Trouble = Trouble {
    losses: 0,
    repeats: 0,
    source_may_die: false,
    target_may_die: false,
    time_may_be_up: false,
    target_may_refuse: false,
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Letter {
    Order(Party, u32, Order),
    Answer(Party, u32, Order, bool),
    Lost(Party),
}

type Number = (u32, u32);

/// A place where the actor may be.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Place {
    seat: Seat,
    alive: bool,
    cursors: Cursors<Number>,
    /// What came while the actor did not serve.
    kept: Vec<Number>,
}

impl Place {
    fn new(seat: Seat) -> Self {
        Self { seat, alive: true, cursors: Cursors::default(), kept: Vec::new() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Sender {
    sent: u32,
    switched: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    epoch: Epoch,
    letters: BTreeSet<Letter>,
    source: Place,
    target: Place,
    snapshot: Option<Cursors<Number>>,
    senders: Vec<Sender>,
    /// Lanes to the source and to the target by sender, and from the source to the target.
    old: Vec<VecDeque<Number>>,
    new: Vec<VecDeque<Number>>,
    handed_on: VecDeque<Number>,
    /// How many of each sender were served, and which is the next.
    served: Vec<(u32, u32)>,
    refused: Vec<u32>,
    committed: bool,
    parked: bool,
    late: bool,
    outcome: Option<Outcome>,
    trouble: Trouble,
    messages: u32,
}

impl World {
    fn new(goal: Goal, senders: u32, messages: u32, trouble: Trouble) -> Self {
        let limit = trouble.time_may_be_up.then_some(LIMIT);
        let count = senders as usize;
        let mut world = Self {
            epoch: Epoch::new(1, goal, senders, Duration::ZERO, limit, Duration::ZERO),
            letters: BTreeSet::new(),
            source: Place::new(Seat::serving()),
            target: Place::new(Seat::vacant()),
            snapshot: None,
            senders: vec![Sender { sent: 0, switched: false }; count],
            old: vec![VecDeque::new(); count],
            new: vec![VecDeque::new(); count],
            handed_on: VecDeque::new(),
            served: vec![(0, 0); count],
            refused: vec![0; count],
            committed: false,
            parked: false,
            late: false,
            outcome: None,
            trouble,
            messages,
        };
        world.act();
        world
    }

    fn now(&self) -> Duration {
        if self.late { LIMIT } else { Duration::ZERO }
    }

    fn tell(&mut self, event: Event) {
        self.epoch.handle(self.now(), event);
        self.act();
    }

    /// Does what the machine wants, as a driver does.
    fn act(&mut self) {
        while let Some(action) = self.epoch.poll_action() {
            assert!(self.outcome.is_none(), "nothing follows the end");
            match action {
                Action::Tell { to, epoch, order } => {
                    self.letters.insert(Letter::Order(to, epoch, order));
                }
                Action::Parked => self.parked = true,
                Action::Commit => self.committed = true,
                Action::Finish(outcome) => self.outcome = Some(outcome),
            }
        }
    }

    fn deliver(&mut self, letter: &Letter) {
        self.letters.remove(letter);
        match *letter {
            Letter::Lost(party) => self.tell(Event::Lost(party)),
            Letter::Answer(from, epoch, order, done) => {
                let answer = if done { Answer::Done } else { Answer::Refused };
                self.tell(Event::Answered { from, epoch, order, answer });
            }
            Letter::Order(to, epoch, order) => {
                if self.obey(to, epoch, order) {
                    self.letters.insert(Letter::Answer(to, epoch, order, true));
                }
            }
        }
    }

    fn obey(&mut self, to: Party, epoch: u32, order: Order) -> bool {
        match to {
            Party::Sender(sender) => {
                self.senders[sender as usize].switched = true;
                true
            }
            Party::Source => {
                if !self.source.alive {
                    return false;
                }
                // Nothing more comes, and what is in the lanes is dealt with before.
                while order == Order::Retire
                    && let Some(lane) = (0..self.old.len()).find(|&lane| !self.old[lane].is_empty())
                {
                    self.receive_at_source(lane);
                }
                let obeyed = self.source.seat.handle(epoch, order);
                match self.source.seat.state() {
                    SeatState::Stopped if obeyed => self.snapshot = Some(self.source.cursors.clone()),
                    SeatState::Serving => self.serve_kept_at_source(),
                    SeatState::Forwarding => self.handed_on.extend(self.source.kept.drain(..)),
                    SeatState::Refusing => {
                        for (sender, _) in self.source.kept.drain(..) {
                            self.refused[sender as usize] += 1;
                        }
                    }
                    _ => {}
                }
                obeyed
            }
            Party::Target => {
                if !self.target.alive {
                    return false;
                }
                let was = self.target.seat.state();
                let obeyed = self.target.seat.handle(epoch, order);
                if obeyed && order == Order::Place && was != self.target.seat.state() {
                    self.target.cursors = self.snapshot.clone().expect("it stopped before");
                }
                if obeyed && order == Order::Settle {
                    self.target.cursors.settle();
                }
                if self.target.seat.state() == SeatState::Serving {
                    for message in std::mem::take(&mut self.target.kept) {
                        serve(&mut self.target, &mut self.served, message);
                    }
                    release(&mut self.target, &mut self.served);
                }
                obeyed
            }
        }
    }

    fn serve_kept_at_source(&mut self) {
        for message in std::mem::take(&mut self.source.kept) {
            serve(&mut self.source, &mut self.served, message);
        }
    }

    fn receive_at_source(&mut self, lane: usize) {
        let message = self.old[lane].pop_front().expect("it was looked for");
        match self.source.seat.state() {
            SeatState::Serving => serve(&mut self.source, &mut self.served, message),
            SeatState::Stopped => self.source.kept.push(message),
            SeatState::Forwarding => self.handed_on.push_back(message),
            SeatState::Refusing => self.refused[message.0 as usize] += 1,
            state => unreachable!("{message:?} came to an actor that is {state:?}"),
        }
    }

    fn receive_at_target(&mut self, message: Number) {
        match self.target.seat.state() {
            SeatState::Serving => serve(&mut self.target, &mut self.served, message),
            SeatState::Placed => self.target.kept.push(message),
            state => unreachable!("{message:?} came to an actor that is {state:?}"),
        }
    }

    /// Everything that can happen next.
    fn successors(&self) -> Vec<Self> {
        let mut all = Vec::new();
        let mut push = |change: &dyn Fn(&mut Self)| {
            let mut next = self.clone();
            change(&mut next);
            all.push(next);
        };
        for letter in &self.letters {
            push(&|world| world.deliver(letter));
            if self.trouble.losses > 0 && !matches!(letter, Letter::Lost(_)) {
                push(&|world| {
                    world.trouble.losses -= 1;
                    world.letters.remove(letter);
                });
            }
            if self.trouble.target_may_refuse
                && let &Letter::Order(Party::Target, epoch, Order::Place) = letter
                && self.target.seat.state() == SeatState::Vacant
            {
                push(&|world| {
                    world.letters.remove(letter);
                    world.letters.insert(Letter::Answer(Party::Target, epoch, Order::Place, false));
                });
            }
        }
        if self.letters.is_empty() && self.epoch.poll_timeout().is_some() {
            push(&|world| world.tell(Event::Tick));
        } else if self.trouble.repeats > 0 && self.outcome.is_none() {
            push(&|world| {
                world.trouble.repeats -= 1;
                world.tell(Event::Tick);
            });
        }
        if self.trouble.time_may_be_up && self.outcome.is_none() {
            push(&|world| {
                world.trouble.time_may_be_up = false;
                world.late = true;
                let committed = world.committed;
                world.tell(Event::Tick);
                assert_eq!(world.committed, committed, "what is late is not committed");
            });
        }
        if self.parked && self.outcome.is_none() {
            push(&|world| {
                world.parked = false;
                world.tell(Event::Release);
            });
        }
        if self.trouble.source_may_die && self.source.alive {
            push(&|world| {
                world.trouble.source_may_die = false;
                world.source.alive = false;
                world.letters.insert(Letter::Lost(Party::Source));
            });
        }
        if self.trouble.target_may_die && self.target.alive {
            push(&|world| {
                world.trouble.target_may_die = false;
                world.target.alive = false;
                world.letters.insert(Letter::Lost(Party::Target));
            });
        }
        for (sender, at) in self.senders.iter().enumerate() {
            if at.sent < self.messages {
                push(&|world| world.send(sender));
            }
            // Senders may see the new route before they are told.
            if self.committed && !at.switched {
                push(&|world| world.senders[sender].switched = true);
            }
        }
        if self.source.alive {
            for lane in 0..self.old.len() {
                if !self.old[lane].is_empty() {
                    push(&|world| world.receive_at_source(lane));
                }
            }
        }
        if self.target.alive {
            for lane in 0..self.new.len() {
                if let Some(&message) = self.new[lane].front() {
                    push(&|world| {
                        world.new[lane].pop_front();
                        world.receive_at_target(message);
                    });
                }
            }
            if let Some(&message) = self.handed_on.front() {
                push(&|world| {
                    world.handed_on.pop_front();
                    world.receive_at_target(message);
                });
            }
        }
        all
    }

    fn send(&mut self, sender: usize) {
        let at = &mut self.senders[sender];
        let message = (u32::try_from(sender).expect("there are two"), at.sent);
        at.sent += 1;
        match (at.switched, self.stops()) {
            (false, _) => self.old[sender].push_back(message),
            (true, false) => self.new[sender].push_back(message),
            // The route is gone.
            (true, true) => self.refused[sender] += 1,
        }
    }

    /// Whether a commit leads nowhere.
    fn stops(&self) -> bool {
        self.target.seat == Seat::vacant()
    }

    fn check(&self) {
        let serves = |place: &Place| place.alive && place.seat.state() == SeatState::Serving;
        assert!(!(serves(&self.source) && serves(&self.target)), "two serve");
        if self.committed {
            assert_ne!(self.source.seat.state(), SeatState::Serving, "the source serves behind the commit");
        } else {
            assert_ne!(self.target.seat.state(), SeatState::Serving, "the target serves before the commit");
        }
    }

    /// Nothing can happen any more.
    fn check_end(&self, goal: Goal) {
        let outcome = self.outcome.expect("it came to an end");
        let dead = !self.source.alive || !self.target.alive;
        let serving = match outcome {
            Outcome::Returned(_) => Some(&self.source),
            Outcome::Done if goal == Goal::Move => Some(&self.target),
            Outcome::Done | Outcome::Lost(_) => None,
        };
        assert_eq!(
            self.committed,
            matches!(outcome, Outcome::Done | Outcome::Lost(Party::Target)),
            "{outcome:?}"
        );
        assert!(!matches!(outcome, Outcome::Lost(_)) || dead, "lost with nobody");
        if let Some(place) = serving
            && place.alive
        {
            assert_eq!(place.seat.state(), SeatState::Serving, "{outcome:?}");
            assert!(place.kept.is_empty() && place.cursors.held().count() == 0, "messages are stuck");
        }
        if !dead {
            for sender in 0..self.senders.len() {
                let accounted = self.served[sender].0 + self.refused[sender];
                assert_eq!(accounted, self.messages, "messages of sender {sender} are lost");
                assert!(goal == Goal::Stop || self.refused[sender] == 0);
            }
        }
    }
}

/// Serves a message if it is its turn.
fn serve(place: &mut Place, served: &mut [(u32, u32)], message: Number) {
    match place.cursors.take((message.0, 0), message.1) {
        Turn::Next => count(served, message),
        Turn::Early => assert!(place.cursors.hold((message.0, 0), message.1, message), "it was there before"),
        Turn::Late => {}
    }
    release(place, served);
}

fn release(place: &mut Place, served: &mut [(u32, u32)]) {
    while let Some(message) = place.cursors.release() {
        count(served, message);
    }
}

/// Messages may be missing where somebody was lost; none is served twice or before one that was sent before it.
fn count(served: &mut [(u32, u32)], (sender, number): Number) {
    let (count, next) = &mut served[sender as usize];
    assert!(number >= *next, "message {number} of {sender} behind {next}");
    (*count, *next) = (*count + 1, number + 1);
}

fn explore(goal: Goal, senders: u32, messages: u32, trouble: Trouble) -> (usize, BTreeSet<String>) {
    let first = World::new(goal, senders, messages, trouble);
    let (mut seen, mut queue, mut outcomes) = (HashSet::from([first.clone()]), vec![first], BTreeSet::new());
    while let Some(world) = queue.pop() {
        world.check();
        let next = world.successors();
        if next.is_empty() {
            world.check_end(goal);
            outcomes.insert(format!("{:?}", world.outcome.expect("it was looked at")));
        }
        for world in next {
            if seen.insert(world.clone()) {
                queue.push(world);
            }
        }
    }
    (seen.len(), outcomes)
}

fn check(goal: Goal, senders: u32, messages: u32, trouble: Trouble, expected: &[&str]) {
    let (states, outcomes) = explore(goal, senders, messages, trouble);
    assert!(states > 50, "only {states} states");
    assert_eq!(outcomes, expected.iter().map(|&outcome| outcome.to_owned()).collect());
}

#[test]
fn a_move_that_nothing_disturbs_keeps_every_message() {
    check(Goal::Move, 2, 2, NONE, &["Done"]);
}

#[test]
fn orders_and_answers_may_be_lost_late_and_doubled() {
    check(Goal::Move, 1, 2, Trouble { losses: 2, repeats: 1, ..NONE }, &["Done"]);
    check(Goal::Stop, 1, 2, Trouble { losses: 2, repeats: 1, ..NONE }, &["Done"]);
    check(Goal::Park, 1, 2, Trouble { losses: 2, repeats: 1, ..NONE }, &["Returned(Released)"]);
}

#[test]
fn time_is_up_at_every_step() {
    let late = Trouble { losses: 1, repeats: 1, time_may_be_up: true, ..NONE };
    check(Goal::Move, 1, 2, late, &["Done", "Returned(Deadline)"]);
    check(Goal::Stop, 1, 2, late, &["Done", "Returned(Deadline)"]);
    check(Goal::Park, 1, 2, late, &["Returned(Deadline)", "Returned(Released)"]);
}

#[test]
fn the_source_is_lost_at_every_step() {
    let lost = Trouble { losses: 1, source_may_die: true, ..NONE };
    check(Goal::Move, 1, 3, lost, &["Done", "Lost(Source)"]);
    check(Goal::Stop, 1, 2, lost, &["Done", "Lost(Source)"]);
    check(Goal::Park, 1, 2, lost, &["Lost(Source)", "Returned(Released)"]);
}

#[test]
fn the_target_is_lost_at_every_step() {
    let lost = Trouble { losses: 1, target_may_die: true, ..NONE };
    check(Goal::Move, 1, 2, lost, &["Done", "Lost(Target)", "Returned(TargetLost)"]);
}

#[test]
fn both_are_lost_and_time_is_up() {
    let all = Trouble { source_may_die: true, target_may_die: true, time_may_be_up: true, ..NONE };
    let expected = ["Done", "Lost(Source)", "Lost(Target)", "Returned(Deadline)", "Returned(TargetLost)"];
    check(Goal::Move, 1, 1, all, &expected);
}

#[test]
fn a_target_may_refuse() {
    let refuses = Trouble { losses: 1, repeats: 1, target_may_refuse: true, ..NONE };
    check(Goal::Move, 1, 2, refuses, &["Done", "Returned(Refused)"]);
}
