//! A member's side, rank 0's own included: joining, calls, and watching the leader. No input, output or clock.

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use crate::{
    Health, Loss, PulseConfig, Rank, Refusal, RunId, Token, frame,
    health::ProcessState,
    hub::Moment,
    member::MemberInfo,
    message::{CallFailure, CallRequest, FromHub, Hello, ToHub, Welcome},
    token::Nonce,
};

/// Pauses between attempts to connect, doubled from the first to the last.
const PAUSES: (Duration, Duration) = (Duration::from_millis(4), Duration::from_millis(128));

#[derive(Debug)]
pub(crate) enum SpokeEvent {
    /// There is a connection; who is expected at its other end, and what it says of our own address.
    Connected {
        token: Token,
        run: RunId,
        from: Option<IpAddr>,
        to: Option<SocketAddr>,
        nonce: Nonce,
    },
    /// No connection could be made.
    Unreachable,
    Received(FromHub),
    /// The other side sent something that is no message.
    Garbled,
    Closed,
    /// The leader's process has ended.
    Exited,
    Probed(ProcessState),
    Call(CallRequest),
    Abort {
        reason: String,
    },
    Leave,
    Tick,
}

#[derive(Debug)]
pub(crate) enum SpokeAction {
    /// Say `Connected` or `Unreachable`.
    Connect,
    Send(ToHub),
    /// Once all is sent.
    Close,
    Joined(Welcome),
    Failed(Failure),
    Done {
        sequence: u64,
        outcome: Result<Vec<Vec<u8>>, CallFailure>,
    },
    Health {
        rank: Rank,
        health: Health,
    },
    Aborted {
        by: Rank,
        reason: String,
    },
    /// Say `Exited` when the leader's process ends, if that can be known.
    Watch {
        pid: u32,
    },
    /// Say `Probed` of the leader's process.
    Probe {
        pid: u32,
    },
}

/// Why it did not get in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    Refused(Refusal),
    Impostor,
    /// The time is up; whether somebody had answered.
    TimedOut {
        connected: bool,
    },
}

#[derive(Debug)]
pub(crate) struct Spoke {
    /// Who we are; run and nonce are filled in for each connection.
    hello: Hello,
    /// When joining has to be over.
    deadline: Moment,
    stage: Stage,
    attempts: u32,
    /// Whether the leader is in this process.
    is_local: bool,
    actions: VecDeque<SpokeAction>,
    last_tick: Moment,
}

#[derive(Debug)]
enum Stage {
    Pausing {
        until: Moment,
    },
    Connecting,
    /// Connected, and no challenge yet.
    Listening {
        token: Token,
        nonce: Nonce,
        to: Option<SocketAddr>,
    },
    /// The hello is sent.
    Seated {
        token: Token,
        nonce: Nonce,
        challenge: Nonce,
        to: Option<SocketAddr>,
    },
    Joined(Box<Joined>),
    Over,
}

#[derive(Debug)]
struct Joined {
    own: MemberInfo,
    leader: MemberInfo,
    pulse: PulseConfig,
    heard: Moment,
    health: Health,
    next_look: Moment,
}

impl Spoke {
    pub(crate) fn new(hello: Hello, deadline: Moment, is_local: bool) -> Self {
        let stage = Stage::Pausing { until: Moment::ZERO };
        let (actions, last_tick) = (VecDeque::new(), Moment::ZERO);
        Self { hello, deadline, stage, attempts: 0, is_local, actions, last_tick }
    }

    pub(crate) fn handle(&mut self, now: Moment, event: SpokeEvent) {
        self.forgive_own_absence(now);
        match event {
            SpokeEvent::Connected { token, run, from, to, nonce } => {
                self.connected(now, token, run, from, to, nonce);
            }
            SpokeEvent::Received(message) => self.received(now, message),
            SpokeEvent::Unreachable => self.interrupted(now, Loss::Disconnected),
            SpokeEvent::Closed => self.interrupted(now, Loss::Disconnected),
            SpokeEvent::Garbled => {
                self.interrupted(now, Loss::Incomprehensible);
                self.actions.push_back(SpokeAction::Close);
            }
            SpokeEvent::Exited => self.lose_leader(Loss::Exited),
            SpokeEvent::Probed(state) => self.probed(state),
            SpokeEvent::Call(request) => self.send_if_joined(ToHub::Call(request)),
            SpokeEvent::Abort { reason } => self.send_if_joined(ToHub::Abort { reason }),
            SpokeEvent::Leave => self.leave(),
            SpokeEvent::Tick => {}
        }
        self.tick(now);
    }

    pub(crate) fn poll_action(&mut self) -> Option<SpokeAction> {
        self.actions.pop_front()
    }

    /// When it wants a tick at the latest.
    pub(crate) fn poll_timeout(&self) -> Option<Moment> {
        match &self.stage {
            Stage::Pausing { until } => Some((*until).min(self.deadline)),
            Stage::Connecting | Stage::Listening { .. } | Stage::Seated { .. } => Some(self.deadline),
            Stage::Joined(joined) => (!self.is_local).then_some(joined.next_look),
            Stage::Over => None,
        }
    }

    /// A process that was stopped itself must not blame the leader for the silence.
    fn forgive_own_absence(&mut self, now: Moment) {
        let gap = now.saturating_sub(self.last_tick);
        self.last_tick = now;
        if let Stage::Joined(joined) = &mut self.stage
            && joined.pulse.is_absence(gap)
        {
            joined.heard = (joined.heard + gap).min(now);
        }
    }

    fn connected(
        &mut self,
        now: Moment,
        token: Token,
        run: RunId,
        from: Option<IpAddr>,
        to: Option<SocketAddr>,
        nonce: Nonce,
    ) {
        if !matches!(self.stage, Stage::Connecting) {
            return;
        }
        self.hello.run = run;
        self.hello.nonce = nonce;
        self.hello.within_ms = whole_ms(self.deadline.saturating_sub(now));
        if let Some(ip) = from.filter(|_| self.hello.member.address.ip().is_unspecified()) {
            self.hello.member.address.set_ip(ip);
        }
        self.stage = Stage::Listening { token, nonce, to };
    }

    fn received(&mut self, now: Moment, message: FromHub) {
        if let Stage::Joined(joined) = &mut self.stage {
            joined.heard = now;
            if joined.health != Health::Alive && joined.health.is_present() {
                self.judge_leader(Health::Alive);
            }
        }
        match message {
            FromHub::Challenge { challenge } => self.challenged(challenge),
            FromHub::Welcome { welcome, proof } => self.welcomed(now, &welcome, &proof),
            FromHub::Refused(refusal) => self.refused(refusal),
            FromHub::Done { sequence, outcome } if self.is_joined() => {
                self.actions.push_back(SpokeAction::Done { sequence, outcome });
            }
            FromHub::Health { rank, health } if self.is_joined() => self.told_health(rank, health),
            FromHub::Aborted { by, reason } if self.is_joined() => {
                self.actions.push_back(SpokeAction::Aborted { by, reason });
            }
            FromHub::Beat => self.send_if_joined(ToHub::Beat),
            FromHub::Done { .. } | FromHub::Health { .. } | FromHub::Aborted { .. } => {}
        }
    }

    fn is_joined(&self) -> bool {
        matches!(self.stage, Stage::Joined(_))
    }

    fn challenged(&mut self, challenge: Nonce) {
        let stage = std::mem::replace(&mut self.stage, Stage::Over);
        self.stage = match stage {
            Stage::Listening { token, nonce, to } => {
                let hello = postcard::to_stdvec(&self.hello).expect("a growing list takes any message");
                let proof = token.prove("member", &[&challenge, &hello]);
                self.actions.push_back(SpokeAction::Send(ToHub::Hello { hello, proof }));
                Stage::Seated { token, nonce, challenge, to }
            }
            other => other,
        };
    }

    fn welcomed(&mut self, now: Moment, bytes: &[u8], proof: &[u8; 32]) {
        let Stage::Seated { token, nonce, challenge, to } = &self.stage else { return };
        if !token.verify("hub", &[challenge, nonce, bytes], proof) {
            return self.fail(Failure::Impostor);
        }
        // Whoever has the token is believed to be rank 0, and what it sends then has to read.
        let welcome = frame::decode::<Welcome>(bytes).ok().filter(|welcome| welcome.pulse.check().is_ok());
        let Some(mut welcome) = welcome else { return self.fail(Failure::Impostor) };
        let own = welcome.members.get(welcome.rank.index()).cloned();
        let (Some(own), Some(leader)) = (own, welcome.members.first_mut()) else {
            return self.fail(Failure::Impostor);
        };
        // Rank 0 listens on every interface and cannot know by which one it is reached.
        if let Some(to) = to.filter(|_| leader.address.ip().is_unspecified()) {
            leader.address.set_ip(to.ip());
        }
        let leader = leader.clone();
        let pulse = welcome.pulse;
        if !self.is_local && own.shares_pids(&leader) {
            self.actions.push_back(SpokeAction::Watch { pid: leader.pid });
        }
        let (health, next_look) = (Health::Alive, now + pulse.interval);
        self.stage = Stage::Joined(Box::new(Joined { own, leader, pulse, heard: now, health, next_look }));
        self.actions.push_back(SpokeAction::Joined(welcome));
    }

    fn refused(&mut self, refusal: Refusal) {
        if matches!(self.stage, Stage::Listening { .. } | Stage::Seated { .. }) {
            self.fail(Failure::Refused(refusal));
        }
    }

    fn told_health(&mut self, rank: Rank, health: Health) {
        if rank == Rank(0)
            && let Health::Lost(how) = health
        {
            return self.lose_leader(how);
        }
        // Whether we answered in time is for the others to know.
        let is_own = matches!(&self.stage, Stage::Joined(joined) if joined.own.rank == rank);
        if !is_own || !health.is_present() {
            self.actions.push_back(SpokeAction::Health { rank, health });
        }
    }

    fn interrupted(&mut self, now: Moment, how: Loss) {
        match self.stage {
            Stage::Connecting | Stage::Listening { .. } | Stage::Seated { .. } => {
                let pause = (PAUSES.0 * (1 << self.attempts.min(5))).min(PAUSES.1);
                // Members that were turned away together should not come back together.
                let spread = pause.mul_f64(f64::from(self.hello.instance[0]) / 512.0);
                self.attempts += 1;
                self.stage = Stage::Pausing { until: now + pause - spread };
            }
            Stage::Joined(_) => self.lose_leader(how),
            Stage::Pausing { .. } | Stage::Over => {}
        }
    }

    fn lose_leader(&mut self, how: Loss) {
        if self.is_joined() {
            self.stage = Stage::Over;
            self.actions.push_back(SpokeAction::Health { rank: Rank(0), health: Health::Lost(how) });
            self.actions.push_back(SpokeAction::Close);
        }
    }

    fn probed(&mut self, state: ProcessState) {
        match state {
            ProcessState::Gone => self.lose_leader(Loss::Exited),
            ProcessState::Stopped => self.judge_suspect(true),
            ProcessState::Running => self.judge_suspect(false),
        }
    }

    fn judge_suspect(&mut self, stopped: bool) {
        if let Stage::Joined(joined) = &self.stage
            && matches!(joined.health, Health::Suspect { .. })
        {
            self.judge_leader(Health::Suspect { stopped });
        }
    }

    fn judge_leader(&mut self, health: Health) {
        if let Stage::Joined(joined) = &mut self.stage
            && joined.health != health
        {
            joined.health = health;
            self.actions.push_back(SpokeAction::Health { rank: Rank(0), health });
        }
    }

    fn leave(&mut self) {
        if !matches!(self.stage, Stage::Over) {
            self.stage = Stage::Over;
            self.actions.push_back(SpokeAction::Send(ToHub::Leave));
            self.actions.push_back(SpokeAction::Close);
        }
    }

    fn send_if_joined(&mut self, message: ToHub) {
        if self.is_joined() {
            self.actions.push_back(SpokeAction::Send(message));
        }
    }

    fn fail(&mut self, failure: Failure) {
        self.stage = Stage::Over;
        self.actions.push_back(SpokeAction::Failed(failure));
        self.actions.push_back(SpokeAction::Close);
    }

    fn tick(&mut self, now: Moment) {
        match &mut self.stage {
            Stage::Pausing { .. } if now >= self.deadline => {
                self.fail(Failure::TimedOut { connected: false })
            }
            Stage::Connecting if now >= self.deadline => self.fail(Failure::TimedOut { connected: false }),
            Stage::Pausing { until } if *until <= now => {
                self.stage = Stage::Connecting;
                self.actions.push_back(SpokeAction::Connect);
            }
            Stage::Listening { .. } | Stage::Seated { .. } if now >= self.deadline => {
                self.fail(Failure::TimedOut { connected: true });
            }
            Stage::Joined(joined) if !self.is_local && joined.next_look <= now => self.look(now),
            _ => {}
        }
    }

    /// Looks whether the leader has said something lately.
    fn look(&mut self, now: Moment) {
        let Stage::Joined(joined) = &mut self.stage else { return };
        joined.next_look = now + joined.pulse.interval;
        let silence = now.saturating_sub(joined.heard);
        if silence < joined.pulse.suspect_after {
            return;
        }
        if silence >= joined.pulse.lost_after && !joined.own.shares_host(&joined.leader) {
            return self.lose_leader(Loss::Silent);
        }
        if joined.own.shares_pids(&joined.leader) {
            let pid = joined.leader.pid;
            self.actions.push_back(SpokeAction::Probe { pid });
        }
        if joined.health == Health::Alive {
            self.judge_leader(Health::Suspect { stopped: false });
        }
    }
}

/// Rounded down, and at most what the message can hold.
pub(crate) fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
