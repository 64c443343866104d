//! Who has come so far, while a group forms.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use warpweft_core_types::DeviceUuid;

use crate::{
    Rank, Refusal,
    hub::{Conn, Moment},
    member::MemberInfo,
    message::Hello,
    token::Nonce,
};

/// Members that have come, and those that are waited for.
#[derive(Debug)]
pub(crate) struct Gathering {
    plan: Plan,
    seats: BTreeMap<Place, Seat>,
    /// Why the job is wrong, and until when the rest is waited for, so that all are told the same.
    doom: Option<(Refusal, Moment)>,
    /// Those that could not be seated.
    turned_away: Vec<Conn>,
}

/// Who is waited for.
#[derive(Debug, Clone)]
pub(crate) enum Plan {
    /// All ranks of a new group, and nobody else.
    Everybody { size: u32 },
    /// The group forms anew with those who come in time.
    Survivors {
        /// Ranks in the group before, of which nobody knows that they are lost.
        expected: BTreeSet<Rank>,
        /// The size before.
        size: u32,
        /// How many are waited for who were not in it.
        newcomers: u32,
    },
}

/// Survivors keep their order, those that are new follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Rank(Rank),
    Newcomer([u8; 16]),
}

#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) conn: Conn,
    pub(crate) challenge: Nonce,
    pub(crate) hello: Hello,
    give_up: Moment,
}

impl Gathering {
    pub(crate) fn new(plan: Plan) -> Self {
        Self { plan, seats: BTreeMap::new(), doom: None, turned_away: Vec::new() }
    }

    /// Takes a member in; a connection that it replaces is to be closed.
    ///
    /// # Errors
    ///
    /// The job is wrong, and can form no group.
    pub(crate) fn seat(
        &mut self,
        now: Moment,
        conn: Conn,
        challenge: Nonce,
        hello: Hello,
    ) -> Result<Option<Conn>, Refusal> {
        let place = self.place(&hello)?;
        let replaced = match self.seats.get(&place) {
            Some(seat) if seat.hello.instance == hello.instance => Some(seat.conn),
            Some(seat) => {
                let processes = [process(&seat.hello.member), process(&hello.member)];
                return Err(Refusal::DuplicateRank { rank: hello.rank.unwrap_or_default(), processes });
            }
            None => None,
        };
        for (other, seat) in self.seats.iter().filter(|(other, _)| **other != place) {
            compare(rank_of(*other), &seat.hello.member, rank_of(place), &hello.member)?;
        }
        let give_up = now + before_end(Duration::from_millis(hello.within_ms));
        self.seats.insert(place, Seat { conn, challenge, hello, give_up });
        Ok(replaced)
    }

    fn place(&self, hello: &Hello) -> Result<Place, Refusal> {
        let (Plan::Everybody { size } | Plan::Survivors { size, .. }) = self.plan;
        let Some(rank) = hello.rank else {
            return match self.plan {
                Plan::Everybody { .. } => Err(Refusal::RankOutOfRange { rank: Rank(u32::MAX), size }),
                Plan::Survivors { .. } => Ok(Place::Newcomer(hello.instance)),
            };
        };
        if hello.size != size {
            return Err(Refusal::SizeMismatch { rank, found: hello.size, expected: size });
        }
        if rank.0 >= size {
            return Err(Refusal::RankOutOfRange { rank, size });
        }
        Ok(Place::Rank(rank))
    }

    /// The job is wrong, as somebody showed who cannot be seated.
    pub(crate) fn doom(&mut self, until: Moment, refusal: Refusal, conn: Conn) {
        self.doom.get_or_insert((refusal, until));
        self.turned_away.push(conn);
    }

    pub(crate) fn doomed(&self) -> Option<&Refusal> {
        self.doom.as_ref().map(|(refusal, _)| refusal)
    }

    /// Whether somebody sat there.
    pub(crate) fn unseat(&mut self, conn: Conn) -> bool {
        let before = self.seats.len() + self.turned_away.len();
        self.seats.retain(|_, seat| seat.conn != conn);
        self.turned_away.retain(|other| *other != conn);
        self.seats.len() + self.turned_away.len() < before
    }

    pub(crate) fn is_complete(&self) -> bool {
        match &self.plan {
            Plan::Everybody { size } if self.doom.is_some() => {
                self.seats.len() + self.turned_away.len() >= *size as usize
            }
            Plan::Everybody { size } => self.seats.len() == *size as usize,
            Plan::Survivors { expected, newcomers, .. } => {
                let new = self.seats.keys().filter(|place| matches!(place, Place::Newcomer(_))).count();
                self.absent(expected).next().is_none() && new >= *newcomers as usize
            }
        }
    }

    pub(crate) fn needs_everybody(&self) -> bool {
        matches!(self.plan, Plan::Everybody { .. })
    }

    pub(crate) fn missing(&self) -> Vec<Rank> {
        match &self.plan {
            Plan::Everybody { size } => self.absent(&Rank::all(*size).collect()).collect(),
            Plan::Survivors { expected, .. } => self.absent(expected).collect(),
        }
    }

    fn absent<'a>(&'a self, ranks: &'a BTreeSet<Rank>) -> impl Iterator<Item = Rank> + 'a {
        ranks.iter().copied().filter(|rank| !self.seats.contains_key(&Place::Rank(*rank)))
    }

    pub(crate) fn next_give_up(&self) -> Option<Moment> {
        let doom = self.doom.as_ref().map(|(_, until)| *until);
        self.seats.values().map(|seat| seat.give_up).chain(doom).min()
    }

    pub(crate) fn is_past_doom(&self, now: Moment) -> bool {
        self.doom.as_ref().is_some_and(|(_, until)| *until <= now)
    }

    /// Somebody who waits no longer; rank 0's own first, since that ends it for all.
    pub(crate) fn gave_up(&self, now: Moment) -> Option<Conn> {
        self.seats.values().filter(|seat| seat.give_up <= now).map(|seat| seat.conn).min()
    }

    /// Everybody who waits for an answer.
    pub(crate) fn take_conns(&mut self) -> Vec<Conn> {
        let seats = std::mem::take(&mut self.seats).into_values().map(|seat| seat.conn);
        seats.chain(std::mem::take(&mut self.turned_away)).collect()
    }

    /// Everybody who has come, in order, with the ranks they get.
    pub(crate) fn take_seats(&mut self) -> Vec<Seat> {
        let anew = !self.needs_everybody();
        let seats = std::mem::take(&mut self.seats).into_values().zip(0..);
        seats
            .map(|(mut seat, rank)| {
                let member = &mut seat.hello.member;
                member.previous = seat.hello.rank.filter(|_| anew);
                member.rank = Rank(rank);
                seat
            })
            .collect()
    }
}

/// A little before its end, so that the reason arrives before the waiting is over.
pub(crate) fn before_end(within: Duration) -> Duration {
    within - (within / 10).min(Duration::from_millis(50))
}

fn rank_of(place: Place) -> Rank {
    match place {
        Place::Rank(rank) => rank,
        Place::Newcomer(_) => Rank(u32::MAX),
    }
}

fn process(member: &MemberInfo) -> String {
    format!("process {} on {}", member.pid, member.host_name)
}

/// What must not be the same is not, and what must be is.
fn compare(rank: Rank, member: &MemberInfo, other_rank: Rank, other: &MemberInfo) -> Result<(), Refusal> {
    let ranks = [rank.min(other_rank), rank.max(other_rank)];
    let (first, second) = if rank < other_rank { (member, other) } else { (other, member) };
    let devices: BTreeSet<DeviceUuid> = first.devices.iter().copied().collect();
    if let Some(&uuid) = second.devices.iter().find(|uuid| devices.contains(uuid)) {
        return Err(Refusal::DuplicateDevice { ranks, uuid });
    }
    let components: BTreeSet<&String> = first.versions.keys().chain(second.versions.keys()).collect();
    for component in components {
        let versions =
            [first, second].map(|member| member.versions.get(component).cloned().unwrap_or_default());
        if versions[0] != versions[1] {
            return Err(Refusal::VersionMismatch { component: component.clone(), ranks, versions });
        }
    }
    Ok(())
}
