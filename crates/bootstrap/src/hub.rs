//! Rank 0's side: who is in, what they call together, how they are. It does no input or output and has no clock.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use crate::{
    Health, LimitConfig, Loss, PulseConfig, Rank, Refusal, RunId, Token,
    calls::Calls,
    frame,
    gather::{Gathering, Seat},
    health::ProcessState,
    member::MemberInfo,
    message::{FromHub, Hello, ToHub, Welcome},
    token::Nonce,
};

/// Time since the driver started.
pub(crate) type Moment = Duration;

/// One connection, as the driver numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Conn(pub(crate) u64);

impl Conn {
    /// Rank 0's own member, which needs no socket.
    pub(crate) const LOCAL: Self = Self(0);
}

#[derive(Debug)]
pub(crate) enum HubEvent {
    /// Somebody connected; the challenge is the driver's, since random bytes are input.
    Opened {
        conn: Conn,
        challenge: Nonce,
    },
    Received {
        conn: Conn,
        message: ToHub,
    },
    /// The other side sent something that is no message.
    Garbled {
        conn: Conn,
    },
    Closed {
        conn: Conn,
    },
    /// The process of a member has ended.
    Exited {
        rank: Rank,
    },
    Probed {
        rank: Rank,
        state: ProcessState,
    },
    /// Time has passed.
    Tick,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HubAction {
    Send {
        conn: Conn,
        message: FromHub,
    },
    /// Once all is sent.
    Close {
        conn: Conn,
    },
    /// Everybody is there.
    Formed,
    /// Say `Exited` when this process ends, if that can be known.
    Watch {
        rank: Rank,
        pid: u32,
    },
    /// Say `Probed`.
    Probe {
        rank: Rank,
        pid: u32,
    },
}

#[derive(Debug)]
pub(crate) struct HubConfig {
    pub(crate) token: Token,
    pub(crate) run: RunId,
    pub(crate) epoch: u32,
    pub(crate) pulse: PulseConfig,
    pub(crate) limits: LimitConfig,
}

#[derive(Debug)]
pub(crate) struct Hub {
    config: HubConfig,
    phase: Phase,
    /// Callers that have not said hello.
    strangers: BTreeMap<Conn, Stranger>,
    actions: VecDeque<HubAction>,
    last_tick: Moment,
}

#[derive(Debug)]
struct Stranger {
    opened: Moment,
    challenge: Nonce,
}

#[derive(Debug)]
enum Phase {
    Gathering(Gathering),
    Formed(Formed),
    Over(Refusal),
}

#[derive(Debug)]
struct Formed {
    members: Vec<Member>,
    conns: BTreeMap<Conn, Rank>,
    calls: Calls,
    next_beat: Moment,
}

#[derive(Debug)]
struct Member {
    info: MemberInfo,
    conn: Option<Conn>,
    heard: Moment,
    health: Health,
}

impl Hub {
    pub(crate) fn new(config: HubConfig, gathering: Gathering) -> Self {
        Self {
            config,
            phase: Phase::Gathering(gathering),
            strangers: BTreeMap::new(),
            actions: VecDeque::new(),
            last_tick: Moment::ZERO,
        }
    }

    pub(crate) fn handle(&mut self, now: Moment, event: HubEvent) {
        self.forgive_own_absence(now);
        match event {
            HubEvent::Opened { conn, challenge } => self.opened(now, conn, challenge),
            HubEvent::Received { conn, message } => self.received(now, conn, message),
            HubEvent::Garbled { conn } => self.ended(conn, Loss::Incomprehensible),
            HubEvent::Closed { conn } => self.ended(conn, Loss::Disconnected),
            HubEvent::Exited { rank } => self.lose(rank, Loss::Exited),
            HubEvent::Probed { rank, state } => self.probed(rank, state),
            HubEvent::Tick => {}
        }
        self.tick(now);
    }

    pub(crate) fn poll_action(&mut self) -> Option<HubAction> {
        self.actions.pop_front()
    }

    /// When it wants a tick at the latest.
    pub(crate) fn poll_timeout(&self) -> Option<Moment> {
        let strangers = self.strangers.iter().filter(|(conn, _)| **conn != Conn::LOCAL);
        let strangers =
            strangers.map(|(_, stranger)| stranger.opened + self.config.limits.stranger_time).min();
        let phase = match &self.phase {
            Phase::Gathering(gathering) => gathering.next_give_up(),
            Phase::Formed(formed) => {
                let beat = (formed.members.len() > 1).then_some(formed.next_beat);
                beat.into_iter().chain(formed.calls.next_give_up()).min()
            }
            Phase::Over(_) => None,
        };
        strangers.into_iter().chain(phase).min()
    }

    /// Whether nothing is known of who this is.
    pub(crate) fn is_stranger(&self, conn: Conn) -> bool {
        self.strangers.contains_key(&conn)
    }

    /// A process that was stopped itself must not blame the others for the silence.
    fn forgive_own_absence(&mut self, now: Moment) {
        let gap = now.saturating_sub(self.last_tick);
        self.last_tick = now;
        if !self.config.pulse.is_absence(gap) {
            return;
        }
        if let Phase::Formed(formed) = &mut self.phase {
            for member in &mut formed.members {
                member.heard = (member.heard + gap).min(now);
            }
        }
    }

    fn opened(&mut self, now: Moment, conn: Conn, challenge: Nonce) {
        if self.strangers.len() >= self.config.limits.strangers {
            let oldest = self.strangers.iter().filter(|(conn, _)| **conn != Conn::LOCAL);
            if let Some(oldest) = oldest.min_by_key(|(_, stranger)| stranger.opened).map(|(conn, _)| *conn) {
                self.strangers.remove(&oldest);
                self.actions.push_back(HubAction::Close { conn: oldest });
            }
        }
        self.strangers.insert(conn, Stranger { opened: now, challenge });
        self.send(conn, FromHub::Challenge { challenge });
    }

    fn received(&mut self, now: Moment, conn: Conn, message: ToHub) {
        if let Some(stranger) = self.strangers.remove(&conn) {
            match message {
                ToHub::Hello { hello, proof } => {
                    let known = self.config.token.verify("member", &[&stranger.challenge, &hello], &proof);
                    if known {
                        self.greet(now, conn, stranger.challenge, &hello);
                    } else {
                        self.refuse(conn, Refusal::TokenMismatch);
                    }
                }
                _ => self.actions.push_back(HubAction::Close { conn }),
            }
            return;
        }
        match &mut self.phase {
            Phase::Formed(formed) => {
                let Some(&rank) = formed.conns.get(&conn) else { return };
                formed.members[rank.index()].heard = now;
                self.recovered(rank);
                self.of_member(now, rank, conn, message);
            }
            Phase::Gathering(_) if matches!(message, ToHub::Leave | ToHub::Abort { .. }) => {
                self.ended(conn, Loss::Left);
                if conn == Conn::LOCAL {
                    self.end(Refusal::Abandoned);
                }
            }
            // A beat that crossed with something else, or a hello sent twice.
            Phase::Gathering(_) | Phase::Over(_) => {}
        }
    }

    /// Somebody who has the token says who it is.
    fn greet(&mut self, now: Moment, conn: Conn, challenge: Nonce, bytes: &[u8]) {
        let Ok(hello) = frame::decode::<Hello>(bytes) else {
            self.actions.push_back(HubAction::Close { conn });
            return;
        };
        if hello.run != self.config.run {
            let expected = self.config.run.clone();
            return self.refuse(conn, Refusal::RunMismatch { expected, found: hello.run });
        }
        if hello.epoch != self.config.epoch {
            let expected = self.config.epoch;
            return self.refuse(conn, Refusal::EpochMismatch { expected, found: hello.epoch });
        }
        let gathering = match &mut self.phase {
            Phase::Gathering(gathering) => gathering,
            Phase::Formed(_) => return self.refuse(conn, Refusal::Complete),
            Phase::Over(refusal) => {
                let refusal = refusal.clone();
                return self.refuse(conn, refusal);
            }
        };
        match gathering.seat(now, conn, challenge, hello) {
            Ok(replaced) => self.actions.extend(replaced.map(|conn| HubAction::Close { conn })),
            Err(refusal) => gathering.doom(now + self.config.limits.stranger_time, refusal, conn),
        }
        let (is_complete, doom) = (gathering.is_complete(), gathering.doomed().cloned());
        match doom {
            Some(refusal) if is_complete => self.end(refusal),
            None if is_complete => self.form(now),
            _ => {}
        }
    }

    fn form(&mut self, now: Moment) {
        let Phase::Gathering(gathering) = &mut self.phase else { return };
        let seats = gathering.take_seats();
        let infos: Vec<MemberInfo> = seats.iter().map(|seat| seat.hello.member.clone()).collect();
        let mut formed = Formed {
            members: Vec::new(),
            conns: BTreeMap::new(),
            calls: Calls::new(infos.len()),
            next_beat: now + self.config.pulse.interval,
        };
        for (seat, info) in seats.iter().zip(&infos) {
            formed.conns.insert(seat.conn, info.rank);
            let (conn, health) = (Some(seat.conn), Health::Alive);
            formed.members.push(Member { info: info.clone(), conn, heard: now, health });
        }
        for (seat, info) in seats.iter().zip(&infos) {
            self.welcome(seat, info.rank, &infos);
            if seat.conn != Conn::LOCAL && info.shares_pids(&infos[0]) {
                self.actions.push_back(HubAction::Watch { rank: info.rank, pid: info.pid });
            }
        }
        self.actions.push_back(HubAction::Formed);
        self.phase = Phase::Formed(formed);
    }

    fn welcome(&mut self, seat: &Seat, rank: Rank, members: &[MemberInfo]) {
        let Self { config, .. } = self;
        let welcome = Welcome { epoch: config.epoch, rank, members: members.to_vec(), pulse: config.pulse };
        let welcome = postcard::to_stdvec(&welcome).expect("a growing list takes any message");
        let proof = config.token.prove("hub", &[&seat.challenge, &seat.hello.nonce, &welcome]);
        self.send(seat.conn, FromHub::Welcome { welcome, proof });
    }

    fn of_member(&mut self, now: Moment, rank: Rank, conn: Conn, message: ToHub) {
        let Phase::Formed(formed) = &mut self.phase else { return };
        match message {
            ToHub::Call(request) => {
                if formed.calls.take(now, rank, request).is_err() {
                    return self.ended(conn, Loss::Incomprehensible);
                }
                self.answer_calls();
            }
            ToHub::Abort { reason } => {
                if formed.calls.abort(rank, &reason) {
                    self.broadcast(&FromHub::Aborted { by: rank, reason });
                }
                self.answer_calls();
            }
            ToHub::Leave => self.ended(conn, Loss::Left),
            // A hello that was sent twice has been answered.
            ToHub::Hello { .. } | ToHub::Beat => {}
        }
    }

    /// Sends what calls have come to.
    fn answer_calls(&mut self) {
        let Phase::Formed(formed) = &mut self.phase else { return };
        let mut answers = Vec::new();
        while let Some(answer) = formed.calls.poll_answer() {
            let conn = formed.members[answer.to.index()].conn;
            let message = FromHub::Done { sequence: answer.sequence, outcome: answer.outcome };
            answers.extend(conn.map(|conn| HubAction::Send { conn, message }));
        }
        self.actions.extend(answers);
    }

    fn ended(&mut self, conn: Conn, how: Loss) {
        if self.strangers.remove(&conn).is_some() {
            self.actions.push_back(HubAction::Close { conn });
            return;
        }
        match &mut self.phase {
            Phase::Gathering(gathering) => {
                if gathering.unseat(conn) {
                    self.actions.push_back(HubAction::Close { conn });
                }
            }
            Phase::Formed(formed) => {
                if let Some(&rank) = formed.conns.get(&conn) {
                    self.lose(rank, how);
                }
            }
            Phase::Over(_) => {}
        }
    }

    fn lose(&mut self, rank: Rank, how: Loss) {
        let Phase::Formed(formed) = &mut self.phase else { return };
        let Some(member) = formed.members.get_mut(rank.index()) else { return };
        if !member.health.is_present() {
            return;
        }
        member.health = Health::Lost(how);
        let conn = member.conn.take();
        if let Some(conn) = conn {
            formed.conns.remove(&conn);
        }
        formed.calls.lose(rank, how);
        self.broadcast(&FromHub::Health { rank, health: Health::Lost(how) });
        self.answer_calls();
        self.actions.extend(conn.map(|conn| HubAction::Close { conn }));
        if rank == Rank(0) {
            self.dismiss();
        }
    }

    /// Rank 0 itself has left: nobody can go on here.
    fn dismiss(&mut self) {
        let Phase::Formed(formed) = &mut self.phase else { return };
        let conns: Vec<Conn> = formed.conns.keys().copied().collect();
        self.actions.extend(conns.into_iter().map(|conn| HubAction::Close { conn }));
        self.phase = Phase::Over(Refusal::Complete);
    }

    fn probed(&mut self, rank: Rank, state: ProcessState) {
        let suspect = |stopped| Health::Suspect { stopped };
        match state {
            ProcessState::Gone => self.lose(rank, Loss::Exited),
            ProcessState::Stopped => self.judge(rank, suspect(true)),
            ProcessState::Running => self.judge(rank, suspect(false)),
        }
    }

    /// Changes what is thought of somebody who is suspected.
    fn judge(&mut self, rank: Rank, health: Health) {
        let Phase::Formed(formed) = &mut self.phase else { return };
        let member = &mut formed.members[rank.index()];
        if matches!(member.health, Health::Suspect { .. }) && member.health != health {
            member.health = health;
            self.broadcast(&FromHub::Health { rank, health });
        }
    }

    fn recovered(&mut self, rank: Rank) {
        self.judge(rank, Health::Alive);
    }

    fn tick(&mut self, now: Moment) {
        let time = self.config.limits.stranger_time;
        let late = |(conn, stranger): (&Conn, &Stranger)| {
            (*conn != Conn::LOCAL && stranger.opened + time <= now).then_some(*conn)
        };
        for conn in self.strangers.iter().filter_map(late).collect::<Vec<_>>() {
            self.strangers.remove(&conn);
            self.actions.push_back(HubAction::Close { conn });
        }
        match &mut self.phase {
            Phase::Gathering(_) => self.tick_gathering(now),
            Phase::Formed(formed) => {
                if formed.calls.give_up(now) {
                    self.answer_calls();
                }
                self.tick_pulse(now);
            }
            Phase::Over(_) => {}
        }
    }

    fn tick_gathering(&mut self, now: Moment) {
        while let Phase::Gathering(gathering) = &mut self.phase {
            let doom = gathering.doomed().cloned();
            if let Some(refusal) = doom.clone().filter(|_| gathering.is_past_doom(now)) {
                return self.end(refusal);
            }
            let Some(conn) = gathering.gave_up(now) else { return };
            if !gathering.needs_everybody() && doom.is_none() {
                return self.form(now);
            }
            let refusal = doom.unwrap_or_else(|| Refusal::Missing { ranks: gathering.missing() });
            if conn == Conn::LOCAL {
                return self.end(refusal);
            }
            gathering.unseat(conn);
            self.refuse(conn, refusal);
        }
    }

    fn tick_pulse(&mut self, now: Moment) {
        let Phase::Formed(formed) = &mut self.phase else { return };
        if now < formed.next_beat {
            return;
        }
        let pulse = self.config.pulse;
        formed.next_beat = now + pulse.interval;
        let leader = formed.members[0].info.clone();
        let (mut silent, mut lost) = (Vec::new(), BTreeSet::new());
        for member in &formed.members {
            let Some(conn) = member.conn.filter(|conn| *conn != Conn::LOCAL) else { continue };
            self.actions.push_back(HubAction::Send { conn, message: FromHub::Beat });
            let silence = now.saturating_sub(member.heard);
            if silence < pulse.suspect_after {
                continue;
            }
            silent.push(member.info.rank);
            // On one host the connection of a dead process ends, so silence has another reason there.
            if silence >= pulse.lost_after && !member.info.shares_host(&leader) {
                lost.insert(member.info.rank);
            } else if member.info.shares_pids(&leader) {
                self.actions.push_back(HubAction::Probe { rank: member.info.rank, pid: member.info.pid });
            }
        }
        for rank in silent {
            if lost.contains(&rank) {
                self.lose(rank, Loss::Silent);
            } else {
                self.suspect(rank);
            }
        }
    }

    fn suspect(&mut self, rank: Rank) {
        let Phase::Formed(formed) = &mut self.phase else { return };
        let member = &mut formed.members[rank.index()];
        if member.health == Health::Alive {
            member.health = Health::Suspect { stopped: false };
            let health = member.health;
            self.broadcast(&FromHub::Health { rank, health });
        }
    }

    /// The job cannot form: everybody is told the same.
    fn end(&mut self, refusal: Refusal) {
        let Phase::Gathering(gathering) = &mut self.phase else { return };
        let conns = gathering.take_conns();
        self.phase = Phase::Over(refusal.clone());
        for conn in conns {
            self.refuse(conn, refusal.clone());
        }
    }

    fn refuse(&mut self, conn: Conn, refusal: Refusal) {
        self.send(conn, FromHub::Refused(refusal));
        self.actions.push_back(HubAction::Close { conn });
    }

    fn send(&mut self, conn: Conn, message: FromHub) {
        self.actions.push_back(HubAction::Send { conn, message });
    }

    fn broadcast(&mut self, message: &FromHub) {
        let Phase::Formed(formed) = &self.phase else { return };
        let conns = formed.conns.keys().copied();
        self.actions.extend(conns.map(|conn| HubAction::Send { conn, message: message.clone() }));
    }
}

#[cfg(test)]
mod tests;
