//! What members and rank 0 say to each other.

use serde::{Deserialize, Serialize};

use crate::{
    Health, Loss, PulseConfig, Rank, Refusal, RunId,
    member::MemberInfo,
    token::{Nonce, Proof},
};

/// From a member to the leader.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToHub {
    /// A [`Hello`] as bytes, so that the proof is over what was sent, with the challenge.
    Hello {
        hello: Vec<u8>,
        proof: Proof,
    },
    Call(CallRequest),
    Abort {
        reason: String,
    },
    Leave,
    Beat,
}

/// From the leader to a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum FromHub {
    Challenge {
        challenge: Nonce,
    },
    /// A [`Welcome`] as bytes; the proof is over the challenge, the member's nonce and these.
    Welcome {
        welcome: Vec<u8>,
        proof: Proof,
    },
    Refused(Refusal),
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
    Beat,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) run: RunId,
    pub(crate) epoch: u32,
    /// Which seat it asks for; a newcomer to a group that forms anew takes what is left.
    pub(crate) rank: Option<Rank>,
    /// How many it believes there are; 0 where it cannot know.
    pub(crate) size: u32,
    /// Tells a second connection of the same member from a second member.
    pub(crate) instance: [u8; 16],
    /// Rank 0 proves itself over this.
    pub(crate) nonce: Nonce,
    /// How long it is going to wait.
    pub(crate) within_ms: u64,
    pub(crate) member: MemberInfo,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    pub(crate) epoch: u32,
    pub(crate) rank: Rank,
    pub(crate) members: Vec<MemberInfo>,
    /// The whole group keeps rank 0's times, or members would judge each other differently.
    pub(crate) pulse: PulseConfig,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CallRequest {
    pub(crate) sequence: u64,
    pub(crate) kind: CallKind,
    pub(crate) name: String,
    pub(crate) value: Vec<u8>,
    pub(crate) within_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum CallKind {
    Barrier,
    Broadcast { root: Rank },
    AllGather,
    Agree,
    Confirm,
}

impl CallRequest {
    /// The call as the program wrote it.
    pub(crate) fn text(&self) -> String {
        let name = &self.name;
        match self.kind {
            CallKind::Barrier => format!("barrier({name:?})"),
            CallKind::Broadcast { root } => format!("broadcast({name:?}, from {root})"),
            CallKind::AllGather => format!("all_gather({name:?})"),
            CallKind::Agree => format!("agree({name:?})"),
            CallKind::Confirm => format!("confirm({name:?})"),
        }
    }
}

/// Why a call failed, the same for everybody who took part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum CallFailure {
    PeerLost { rank: Rank, how: Loss },
    Aborted { by: Rank, reason: String },
    Mismatch { ranks: [Rank; 2], calls: [String; 2] },
    TimedOut { missing: Vec<Rank> },
    TooLarge { size_bytes: u64, limit_bytes: u64 },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{FrameReader, STRANGER_LIMIT, decode, encode};

    #[test]
    fn a_hello_with_many_devices_fits_a_stranger_s_limit() {
        let mut member = MemberInfo::here(Rank(0), ([127, 0, 0, 1], 1).into());
        member.devices = vec![warpweft_core_types::DeviceUuid::from_bytes([7; 16]); 1024];
        let hello = Hello {
            run: RunId::from("r"),
            epoch: 0,
            rank: Some(Rank(1)),
            size: 2,
            instance: [1; 16],
            nonce: [2; 32],
            within_ms: 1,
            member,
        };
        let message =
            ToHub::Hello { hello: postcard::to_stdvec(&hello).expect("it has a size"), proof: [0; 32] };
        let mut reader = FrameReader::default();
        reader.push(&encode(&message));
        let frame = reader.next(STRANGER_LIMIT).unwrap().unwrap();
        assert_eq!(decode::<ToHub>(frame).unwrap(), message);
    }
}
