//! A group that goes on without those it lost.

use std::{
    collections::BTreeSet,
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use warpweft_core_types::Deadline;

use crate::{
    Group, GroupError, JoinError, Rank, RunId, Token,
    config::JoinConfig,
    gather::Plan,
    group::{Joining, present},
    service::Contact,
};

/// How long a member may take to accept a connection; its system does that, so the member need not run.
const CONNECT_TIME: Duration = Duration::from_millis(500);

/// Who is waited for when a group forms anew.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReformConfig {
    /// How many processes come that were not in the group, by [`Group::rejoin`].
    pub newcomers: u32,
    /// Members to go on without, though they are not known to be lost: such as ones that are stopped.
    pub without: Vec<Rank>,
}

/// A group that has formed anew.
#[derive(Debug)]
#[non_exhaustive]
pub struct Reformed {
    /// The new group. Those who were in the old one keep their order, newcomers follow.
    pub group: Group,
    /// By rank in the old group: the rank in the new one, if the member is in it.
    pub ranks: Vec<Option<Rank>>,
}

/// What a process needs that was not in the group, to be in the one that forms from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Successor {
    /// Where the member listens that will be rank 0.
    pub address: SocketAddr,
    /// The epoch that forms next.
    pub epoch: u32,
    /// The job's secret.
    pub token: Token,
    /// The run.
    pub run: RunId,
}

impl Group {
    /// Forms a new group of those who are left; each of them has to call this.
    ///
    /// The lowest rank that is left becomes rank 0. It waits for everybody whose end is not known, and for the
    /// others until a little before its deadline, or that of the first who would not wait longer: whoever has
    /// not come then is left out. The old group stays as it is, and is dropped when it is no longer wanted.
    ///
    /// # Errors
    ///
    /// As [`Group::join`]. If the member that is to become rank 0 does not come, the others time out, since two
    /// groups could form if each gave up on it by itself; [`reform_with`](Self::reform_with) says whom to go
    /// without.
    pub fn reform(&self, deadline: impl Into<Deadline>) -> Result<Reformed, JoinError> {
        self.reform_with(&ReformConfig::default(), deadline)
    }

    /// The same, with newcomers or without some who are still there; all have to say the same.
    ///
    /// # Errors
    ///
    /// As [`reform`](Self::reform).
    pub fn reform_with(
        &self,
        config: &ReformConfig,
        deadline: impl Into<Deadline>,
    ) -> Result<Reformed, JoinError> {
        let deadline = deadline.into();
        let expected = self.expected(config).map_err(Box::new)?;
        let joining = Joining::new(self.config.clone(), self.size() > 1 || config.newcomers > 0)?;
        let joining = joining.in_epoch(self.epoch + 1, Some(self.rank()));
        let own = self.rank();
        let lower = expected.iter().copied().filter(|rank| *rank < own);
        let leader = lower.map(|rank| self.members()[rank.index()].address);
        let leader = leader.into_iter().find(|address| answers(*address, deadline));
        let group = match leader {
            Some(address) => {
                let contact = Contact { address, ..self.contact.clone() };
                joining.follow(Box::new(move || Ok(contact.clone())), deadline)?
            }
            None => self.lead_anew(joining, expected, config.newcomers, deadline)?,
        };
        let mut ranks = vec![None; self.members().len()];
        for member in group.members() {
            if let Some(rank) = member.previous.and_then(|rank| ranks.get_mut(rank.index())) {
                *rank = Some(member.rank);
            }
        }
        Ok(Reformed { group, ranks })
    }

    fn lead_anew(
        &self,
        joining: Joining,
        mut expected: BTreeSet<Rank>,
        newcomers: u32,
        deadline: Deadline,
    ) -> Result<Group, JoinError> {
        // Nobody told us of those who died together with rank 0. They do not listen any more.
        let own = self.rank();
        expected.retain(|rank| *rank == own || answers(self.members()[rank.index()].address, deadline));
        let plan = Plan::Survivors { expected, size: self.size(), newcomers };
        let listener = self.listener.as_ref().map(TcpListener::try_clone).transpose();
        let listener = listener.map_err(JoinError::system("keep listening"))?;
        if listener.is_none() && newcomers > 0 {
            let reason = "a group of one has no port that newcomers could come to".into();
            return Err(JoinError::InvalidConfig { reason });
        }
        joining.lead(plan, self.contact.clone(), listener, None, deadline)
    }

    /// What a process needs that wants to join when this group forms anew, such as one that was started again.
    ///
    /// Those who are in the group say how many they expect, by [`ReformConfig::newcomers`].
    ///
    /// # Errors
    ///
    /// This process is a fork of the one that joined.
    pub fn successor(&self) -> Result<Successor, GroupError> {
        let present = present(&self.health()?);
        let leader = present.first().copied().unwrap_or(self.rank());
        let address = self.members()[leader.index()].address;
        let Contact { token, run, .. } = self.contact.clone();
        Ok(Successor { address, epoch: self.epoch + 1, token, run })
    }

    /// Joins a group that forms from one that this process was not in.
    ///
    /// The rank and size of `config` are not used: newcomers get the ranks behind those who were there.
    ///
    /// # Errors
    ///
    /// As [`Group::join`].
    pub fn rejoin(
        successor: &Successor,
        config: JoinConfig,
        deadline: impl Into<Deadline>,
    ) -> Result<Self, JoinError> {
        config.check()?;
        let Successor { address, epoch, token, run } = successor.clone();
        let contact = Contact { address, token, run };
        let joining = Joining::new(config, true)?.in_epoch(epoch, None);
        joining.follow(Box::new(move || Ok(contact.clone())), deadline.into())
    }

    fn expected(&self, config: &ReformConfig) -> Result<BTreeSet<Rank>, GroupError> {
        let mut expected = present(&self.health()?);
        if self.shared().lock().left {
            return Err(GroupError::Left);
        }
        config.without.iter().try_for_each(|rank| self.check_rank(*rank))?;
        expected.retain(|rank| *rank == self.rank() || !config.without.contains(rank));
        expected.insert(self.rank());
        Ok(expected)
    }
}

/// Whether somebody still listens there.
fn answers(address: SocketAddr, deadline: Deadline) -> bool {
    let time = CONNECT_TIME.min(deadline.remaining());
    !time.is_zero() && TcpStream::connect_timeout(&address, time).is_ok()
}
