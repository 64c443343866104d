//! One protocol by which an actor pauses, stops or changes its place: decisions only, no device, thread or clock.
//!
//! [`Epoch`] is whoever decides; a [`Seat`] is an actor's place at an executor, and knows whether it serves. The actor
//! stops at a message boundary, its state is placed at the target, and then, at the commit, the route changes. Before
//! the commit whatever goes wrong returns to the source; after it everything goes to the target. Orders are repeated
//! until they are answered, and answers of other epochs count for nothing, so that orders and answers may be lost,
//! late, doubled or out of order. Messages keep their order by their numbers, see [`crate::cursor`].
//!
//! [`Seat`]s, orders and answers are model-checked as they are here: see `tests/epoch.rs`.

use std::{collections::VecDeque, time::Duration};

/// What an epoch is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Goal {
    /// The actor pauses until it is released.
    Park,
    /// The actor ends; what is sent to it is refused.
    Stop,
    /// The actor goes on at another place.
    Move,
}

/// Who takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Party {
    /// Where the actor is.
    Source,
    /// Where it shall be.
    Target,
    /// Somebody who may send to it, by number.
    Sender(u32),
}

/// What a party is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Order {
    /// The source: stop at the next message boundary.
    Stop,
    /// The source: serve again.
    Resume,
    /// The target: take the actor, and do not serve.
    Place,
    /// The target: forget the actor.
    Discard,
    /// The target: serve.
    Activate,
    /// The target: what is missing of the messages is lost.
    Settle,
    /// The source: hand on what comes.
    Forward,
    /// The source: refuse what comes.
    Refuse,
    /// A sender: see the new route.
    Switch,
    /// The source: nothing more comes; deal with the rest and forget the actor.
    Retire,
}

/// What became of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Answer {
    /// It is carried out.
    Done,
    /// It cannot be. Only a target may say so, before the commit.
    Refused,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// A party answered.
    Answered {
        /// Who.
        from: Party,
        /// In which epoch.
        epoch: u32,
        /// Which order.
        order: Order,
        /// How.
        answer: Answer,
    },
    /// A party is gone, with everything it had.
    Lost(Party),
    /// A parked actor shall go on.
    Release,
    /// Nobody wants it any more.
    Cancel,
    /// Time has passed.
    Tick,
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Tell a party.
    Tell {
        /// Whom.
        to: Party,
        /// In which epoch.
        epoch: u32,
        /// What.
        order: Order,
    },
    /// The actor stands still, and will until it is released.
    Parked,
    /// Change the route, before anything else is done.
    Commit,
    /// Nothing follows.
    Finish(Outcome),
}

/// How an epoch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The actor stopped, or is at its new place.
    Done,
    /// The actor serves where it was.
    Returned(Cause),
    /// The actor was lost with this party.
    Lost(Party),
}

/// Why an actor serves where it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// It was parked and then released.
    Released,
    /// The time was over before the commit.
    Deadline,
    /// Nobody wanted it any more.
    Cancelled,
    /// The target would not have it.
    Refused,
    /// The target was lost before the commit.
    TargetLost,
}

/// One epoch of one actor, from its beginning to its end.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Epoch {
    number: u32,
    goal: Goal,
    senders: u32,
    phase: Phase,
    /// Orders without an answer.
    open: Vec<(Party, Order)>,
    source_lost: bool,
    target_lost: bool,
    actions: VecDeque<Action>,
    /// When to give up, while that is possible.
    limit: Option<Duration>,
    patience: Duration,
    retry_at: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    Stopping,
    Parked,
    Placing,
    /// Behind the commit, until every sender sees the new route.
    Switching,
    Retiring,
    Returning(Cause),
    Ended,
}

impl Epoch {
    /// Begins epoch `number` of an actor, which is greater than all before, for as many senders. Times count from any
    /// one moment; orders are repeated every `patience`.
    pub fn new(
        number: u32,
        goal: Goal,
        senders: u32,
        now: Duration,
        limit: Option<Duration>,
        patience: Duration,
    ) -> Self {
        let mut epoch = Self {
            number,
            goal,
            senders,
            phase: Phase::Stopping,
            open: Vec::new(),
            source_lost: false,
            target_lost: false,
            actions: VecDeque::new(),
            limit,
            patience,
            retry_at: now + patience,
        };
        epoch.tell(Party::Source, Order::Stop);
        epoch
    }

    /// Takes note of what happened.
    pub fn handle(&mut self, now: Duration, event: Event) {
        match event {
            Event::Answered { from, epoch, order, answer } if epoch == self.number => {
                self.answered(from, order, answer);
            }
            // Of an epoch before.
            Event::Answered { .. } => {}
            Event::Lost(party) => self.lost(party),
            Event::Release if self.phase == Phase::Parked => self.turn_back(Cause::Released),
            Event::Release => {}
            Event::Cancel => self.turn_back(Cause::Cancelled),
            Event::Tick => self.tick(now),
        }
        self.advance();
    }

    /// What to do next.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When to call again with [`Event::Tick`] at the latest.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let retry = (!self.open.is_empty()).then_some(self.retry_at);
        let limit = self.limit.filter(|_| self.can_return());
        retry.into_iter().chain(limit).min()
    }

    /// Whether the route has changed, so that nothing leads back.
    pub const fn is_committed(&self) -> bool {
        matches!(self.phase, Phase::Switching | Phase::Retiring)
    }

    /// Whether it is on its way back to the source, or over.
    pub const fn is_returning(&self) -> bool {
        matches!(self.phase, Phase::Returning(_))
    }

    const fn can_return(&self) -> bool {
        matches!(self.phase, Phase::Stopping | Phase::Placing)
    }

    fn answered(&mut self, from: Party, order: Order, answer: Answer) {
        let Some(at) = self.open.iter().position(|open| *open == (from, order)) else { return };
        self.open.swap_remove(at);
        if answer == Answer::Refused {
            self.turn_back(Cause::Refused);
        }
    }

    fn lost(&mut self, party: Party) {
        self.open.retain(|(to, _)| *to != party);
        match party {
            Party::Sender(_) => {}
            Party::Source => {
                self.source_lost = true;
                match self.phase {
                    // What the target has is all there is of the actor.
                    Phase::Stopping | Phase::Parked | Phase::Returning(_) => self.end(Outcome::Lost(party)),
                    Phase::Switching | Phase::Retiring if self.goal == Goal::Move && !self.target_lost => {
                        self.tell(Party::Target, Order::Settle);
                    }
                    _ => {}
                }
            }
            Party::Target => {
                self.target_lost = true;
                self.turn_back(Cause::TargetLost);
            }
        }
    }

    fn tick(&mut self, now: Duration) {
        if self.limit.is_some_and(|limit| now >= limit) {
            self.limit = None;
            if self.can_return() {
                self.turn_back(Cause::Deadline);
            }
        }
        if now >= self.retry_at {
            self.retry_at = now + self.patience;
            for (to, order) in self.open.clone() {
                self.actions.push_back(Action::Tell { to, epoch: self.number, order });
            }
        }
    }

    /// Goes on when everything that was ordered is answered.
    fn advance(&mut self) {
        while self.open.is_empty() {
            match self.phase {
                Phase::Stopping => match self.goal {
                    Goal::Park => {
                        self.phase = Phase::Parked;
                        self.actions.push_back(Action::Parked);
                    }
                    Goal::Stop => self.commit(),
                    Goal::Move => {
                        self.phase = Phase::Placing;
                        self.tell(Party::Target, Order::Place);
                    }
                },
                Phase::Placing => self.commit(),
                Phase::Switching if self.source_lost => self.end(self.end_of_move()),
                Phase::Switching => {
                    self.phase = Phase::Retiring;
                    self.tell(Party::Source, Order::Retire);
                }
                Phase::Retiring => self.end(self.end_of_move()),
                Phase::Returning(cause) => self.end(Outcome::Returned(cause)),
                Phase::Parked | Phase::Ended => return,
            }
        }
    }

    fn end_of_move(&self) -> Outcome {
        if self.goal == Goal::Move && self.target_lost { Outcome::Lost(Party::Target) } else { Outcome::Done }
    }

    fn commit(&mut self) {
        self.phase = Phase::Switching;
        self.limit = None;
        self.actions.push_back(Action::Commit);
        if self.goal == Goal::Move {
            self.tell(Party::Target, Order::Activate);
        }
        match (self.source_lost, self.goal) {
            (true, _) => self.tell(Party::Target, Order::Settle),
            (false, Goal::Move) => self.tell(Party::Source, Order::Forward),
            (false, _) => self.tell(Party::Source, Order::Refuse),
        }
        for sender in 0..self.senders {
            self.tell(Party::Sender(sender), Order::Switch);
        }
    }

    /// Before the commit, returns to the source if it is there.
    fn turn_back(&mut self, cause: Cause) {
        if !matches!(self.phase, Phase::Stopping | Phase::Parked | Phase::Placing) {
            return;
        }
        self.open.clear();
        let placed = self.phase == Phase::Placing && !self.target_lost;
        self.phase = Phase::Returning(cause);
        if self.source_lost {
            return self.end(Outcome::Lost(Party::Source));
        }
        self.tell(Party::Source, Order::Resume);
        if placed {
            self.tell(Party::Target, Order::Discard);
        }
    }

    fn tell(&mut self, to: Party, order: Order) {
        self.open.push((to, order));
        self.actions.push_back(Action::Tell { to, epoch: self.number, order });
    }

    fn end(&mut self, outcome: Outcome) {
        self.phase = Phase::Ended;
        self.open.clear();
        self.actions.push_back(Action::Finish(outcome));
    }
}

/// An actor's place at an executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Seat {
    /// The last epoch that it took part in.
    epoch: u32,
    state: SeatState,
}

/// What an actor does at an executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SeatState {
    /// It is not here and never was.
    Vacant,
    /// It is served.
    Serving,
    /// It stands still; what comes is kept.
    Stopped,
    /// It is here and does not serve yet; what comes is kept.
    Placed,
    /// It is elsewhere; what comes is handed on.
    Forwarding,
    /// It has ended; what comes is refused.
    Refusing,
    /// It was here.
    Gone,
}

impl Seat {
    /// An actor that was begun here.
    pub const fn serving() -> Self {
        Self { epoch: 0, state: SeatState::Serving }
    }

    /// No actor yet.
    pub const fn vacant() -> Self {
        Self { epoch: 0, state: SeatState::Vacant }
    }

    /// What the actor does here.
    #[inline]
    pub const fn state(&self) -> SeatState {
        self.state
    }

    /// Carries out an order and says whether to answer that it is done. Orders that are late are passed over.
    pub fn handle(&mut self, epoch: u32, order: Order) -> bool {
        use SeatState::{Forwarding, Gone, Placed, Refusing, Serving, Stopped, Vacant};

        if epoch < self.epoch {
            return false;
        }
        let is_new = epoch > self.epoch;
        let next = match (order, self.state) {
            (Order::Stop, Serving) if is_new => Stopped,
            (Order::Stop, Stopped) if !is_new => Stopped,
            // The order to stop was passed on the way, or is lost; it must not be obeyed from here on.
            (Order::Resume, Serving) => Serving,
            (Order::Resume, Stopped) if !is_new => Serving,
            (Order::Place, Vacant | Gone) if is_new => Placed,
            (Order::Place, Placed | Serving) if !is_new => self.state,
            (Order::Activate, Placed | Serving) if !is_new => Serving,
            (Order::Settle, Placed | Serving) if !is_new => self.state,
            (Order::Discard, Vacant | Gone) => Gone,
            (Order::Discard, Placed) if !is_new => Gone,
            (Order::Forward, Stopped | Forwarding) if !is_new => Forwarding,
            (Order::Refuse, Stopped | Refusing) if !is_new => Refusing,
            (Order::Retire, Forwarding | Refusing | Gone) if !is_new => Gone,
            _ => return false,
        };
        (self.epoch, self.state) = (epoch, next);
        true
    }
}
