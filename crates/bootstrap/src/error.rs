//! Why a group could not form, or could not do what it was asked.

use std::{io, net::SocketAddr, path::PathBuf};

use serde::{Deserialize, Serialize};
use warpweft_core_types::{DeviceUuid, ErrorClass};

use crate::{EnvironmentError, FrameError, Loss, Rank, RunId, message::CallFailure};

/// What rank 0 tells those it does not take; where the job itself is wrong, all of them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// The caller has another token.
    #[error("the job token is another one")]
    TokenMismatch,
    /// The caller belongs to another run.
    #[error("this is run {found:?}, rank 0 belongs to run {expected:?}")]
    RunMismatch {
        /// Rank 0's run.
        expected: RunId,
        /// The caller's.
        found: RunId,
    },
    /// The group has formed anew since, or never did.
    #[error("this is epoch {found} of the group, rank 0 forms epoch {expected}")]
    EpochMismatch {
        /// Rank 0's epoch.
        expected: u32,
        /// The caller's.
        found: u32,
    },
    /// Members believe in groups of different sizes.
    #[error("rank {rank} believes in a group of {found}, rank 0 in one of {expected}")]
    SizeMismatch {
        /// Who differs from rank 0.
        rank: Rank,
        /// Its size.
        found: u32,
        /// Rank 0's size.
        expected: u32,
    },
    /// A rank that this group does not have.
    #[error("there is no rank {rank} in a group of {size}")]
    RankOutOfRange {
        /// The rank asked for.
        rank: Rank,
        /// The group's size.
        size: u32,
    },
    /// Two processes claim one rank.
    #[error("two processes claim rank {rank}: {}", .processes.join(" and "))]
    DuplicateRank {
        /// The rank.
        rank: Rank,
        /// The processes, as host and number.
        processes: [String; 2],
    },
    /// Members want one device for themselves.
    #[error("ranks {} and {} both want device {uuid} for themselves", .ranks[0], .ranks[1])]
    DuplicateDevice {
        /// Who wants it.
        ranks: [Rank; 2],
        /// The device.
        uuid: DeviceUuid,
    },
    /// Members have different versions of something that has to be the same.
    #[error(
        "rank {} has {component} {}, rank {} has {}",
        .ranks[0], .versions[0], .ranks[1], .versions[1]
    )]
    VersionMismatch {
        /// What it is.
        component: String,
        /// Who differs.
        ranks: [Rank; 2],
        /// What each has; empty where it has none.
        versions: [String; 2],
    },
    /// Some did not come in time.
    #[error("{} did not come in time", ranks_text(.ranks))]
    Missing {
        /// Who.
        ranks: Vec<Rank>,
    },
    /// Nobody is missing any more.
    #[error("the group is complete; a process that was started again joins when the group forms anew")]
    Complete,
    /// Rank 0 gave up.
    #[error("rank 0 left before the group was complete")]
    Abandoned,
}

impl Refusal {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Missing { .. } | Self::Abandoned => ErrorClass::PeerLost,
            _ => ErrorClass::Usage,
        }
    }
}

/// `rank 3`, or `ranks 1, 3 and 12 more`.
fn ranks_text(ranks: &[Rank]) -> String {
    const SHOWN: usize = 16;
    let shown: Vec<String> = ranks.iter().take(SHOWN).map(ToString::to_string).collect();
    match (ranks.len(), ranks.len().saturating_sub(SHOWN)) {
        (0, _) => "nobody known".into(),
        (1, _) => format!("rank {}", shown[0]),
        (_, 0) => format!("ranks {}", shown.join(", ")),
        (_, more) => format!("ranks {} and {more} more", shown.join(", ")),
    }
}

/// Why a process could not join a group.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The configuration contradicts itself.
    #[error("configuration is invalid: {reason}")]
    InvalidConfig {
        /// The contradiction.
        reason: String,
    },
    /// The environment does not say who this is.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// Somebody listens there already.
    #[error("{address} is in use: another job, or rank 0 of this one was started twice")]
    AddrInUse {
        /// The address that rank 0 was to listen on.
        address: SocketAddr,
    },
    /// No network interface has this name.
    #[error("there is no network interface {wanted:?}; there are: {}", .available.join(", "))]
    UnknownInterface {
        /// The name asked for.
        wanted: String,
        /// Names and addresses of those there are.
        available: Vec<String>,
    },
    /// Rank 0 listens on this host alone unless it is told otherwise.
    #[error(
        "{address} is no loopback address: to be reached from other hosts, bind to an interface or to any"
    )]
    NotLoopback {
        /// The address.
        address: SocketAddr,
    },
    /// An address does not read as one, or its host has no address.
    #[error("{address:?} leads nowhere: {reason}")]
    BadAddress {
        /// The text.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Rank 0 did not take a connection in time.
    #[error("rank 0 could not be reached at {address}")]
    Unreachable {
        /// Where.
        address: SocketAddr,
        /// How the last attempt ended.
        #[source]
        cause: io::Error,
    },
    /// Rank 0 did not say in time where it is.
    #[error("rank 0 has not said where it is: {reason}")]
    NotPublished {
        /// What was found instead.
        reason: String,
    },
    /// A rendezvous file belongs to another run, and no other came in time.
    #[error("{} belongs to run {found:?}, not to {expected:?}", .path.display())]
    StaleFile {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        found: RunId,
        /// This run.
        expected: RunId,
    },
    /// Rank 0 does not take this process, or the job is wrong.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Whoever answered does not have the job's token.
    #[error("whoever answers at {address} does not know the job token")]
    Impostor {
        /// Where.
        address: SocketAddr,
    },
    /// Whoever answered is no rank 0 of this protocol.
    #[error("{address} answers with something else")]
    Foreign {
        /// Where.
        address: SocketAddr,
        /// What is wrong with the answer.
        #[source]
        cause: FrameError,
    },
    /// Rank 0 was found, and the group was not complete in time.
    #[error("the group did not form in time: {reason}")]
    TimedOut {
        /// What was waited for.
        reason: String,
    },
    /// The group that was to form anew belongs to a parent process.
    #[error(transparent)]
    Group(#[from] Box<GroupError>),
    /// The system refused something.
    #[error("could not {action}")]
    System {
        /// What was to be done.
        action: &'static str,
        /// The system's reason.
        #[source]
        cause: io::Error,
    },
}

impl JoinError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Refused(refusal) => refusal.class(),
            Self::Group(error) => error.class(),
            Self::Unreachable { .. } | Self::NotPublished { .. } | Self::TimedOut { .. } => {
                ErrorClass::PeerLost
            }
            Self::System { .. } => ErrorClass::Exhausted,
            _ => ErrorClass::Usage,
        }
    }

    pub(crate) fn system(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::System { action, cause }
    }
}

/// Why a call on a group failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// A member is lost; only a group that is formed anew goes on.
    #[error("rank {rank} is lost: {how}")]
    PeerLost {
        /// The member.
        rank: Rank,
        /// How it was lost.
        how: Loss,
    },
    /// Some member gave up for all.
    #[error("rank {by} aborted: {reason}")]
    Aborted {
        /// Who.
        by: Rank,
        /// Why.
        reason: String,
    },
    /// Two members made different calls where all have to make the same.
    #[error("rank {} called {} where rank {} called {}", .ranks[0], .calls[0], .ranks[1], .calls[1])]
    Mismatch {
        /// The two.
        ranks: [Rank; 2],
        /// What each called.
        calls: [String; 2],
    },
    /// Some did not take part in time.
    #[error("{call} timed out, waiting for {}", ranks_text(.missing))]
    TimedOut {
        /// The call.
        call: String,
        /// Who had not come; empty if rank 0 did not say.
        missing: Vec<Rank>,
    },
    /// A value, or all of them together, is longer than is taken.
    #[error("{size_bytes} bytes, where {limit_bytes} are taken")]
    TooLarge {
        /// How long.
        size_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// Some members said that they cannot go on.
    #[error("{name} failed on {}", failures_text(.failures))]
    Failed {
        /// What was confirmed.
        name: String,
        /// Who failed, and why.
        failures: Vec<(Rank, String)>,
    },
    /// Members have different values where all must have the same.
    #[error("{name} differs between rank {} and rank {}", .ranks[0], .ranks[1])]
    Disagreement {
        /// What was to be agreed on.
        name: String,
        /// Two that differ.
        ranks: [Rank; 2],
        /// Their values.
        values: [Vec<u8>; 2],
    },
    /// The group has no such member.
    #[error("there is no rank {rank} in a group of {size}")]
    UnknownRank {
        /// The rank.
        rank: Rank,
        /// The group's size.
        size: u32,
    },
    /// This member has left the group.
    #[error("this member has left the group")]
    Left,
    /// This process was forked from the one that joined.
    #[error("process {member} joined this group, and process {here} is a fork of it: join in each process")]
    Forked {
        /// The process that joined.
        member: u32,
        /// This one.
        here: u32,
    },
    /// Descriptors cannot be passed.
    #[error("descriptors cannot be passed to rank {rank}: {reason}")]
    NoDescriptors {
        /// The other member.
        rank: Rank,
        /// Why not.
        reason: String,
    },
    /// The service of this group has ended by a defect of ours.
    #[error("the group's service has ended: {reason}")]
    ServiceEnded {
        /// What it said last.
        reason: String,
    },
}

impl GroupError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::PeerLost { .. } | Self::Aborted { .. } | Self::Failed { .. } => ErrorClass::PeerLost,
            Self::TimedOut { .. } => ErrorClass::Transient,
            Self::NoDescriptors { .. } => ErrorClass::Unsupported,
            Self::ServiceEnded { .. } => ErrorClass::Internal,
            _ => ErrorClass::Usage,
        }
    }

    pub(crate) fn of(failure: CallFailure, call: &str) -> Self {
        match failure {
            CallFailure::PeerLost { rank, how } => Self::PeerLost { rank, how },
            CallFailure::Aborted { by, reason } => Self::Aborted { by, reason },
            CallFailure::Mismatch { ranks, calls } => Self::Mismatch { ranks, calls },
            CallFailure::TimedOut { missing } => Self::TimedOut { call: call.to_owned(), missing },
            CallFailure::TooLarge { size_bytes, limit_bytes } => Self::TooLarge { size_bytes, limit_bytes },
        }
    }
}

fn failures_text(failures: &[(Rank, String)]) -> String {
    let texts: Vec<String> = failures.iter().map(|(rank, reason)| format!("rank {rank}: {reason}")).collect();
    texts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_ranks_are_cut() {
        let ranks: Vec<Rank> = Rank::all(20).collect();
        assert_eq!(ranks_text(&ranks[..1]), "rank 0");
        assert_eq!(ranks_text(&ranks[..3]), "ranks 0, 1, 2");
        assert!(ranks_text(&ranks).ends_with("15 and 4 more"));
    }
}
