//! File descriptors from one member to another.
#![cfg(unix)]

use std::os::fd::{BorrowedFd, OwnedFd};

use warpweft_core_types::Deadline;

use crate::{Group, GroupError, Rank};

/// What one member sent another.
#[derive(Debug)]
#[non_exhaustive]
pub struct Parcel {
    /// The descriptors, closed on exec.
    pub descriptors: Vec<OwnedFd>,
    /// What the sender said about them.
    pub bytes: Vec<u8>,
}

impl Group {
    /// Sends descriptors and some bytes to a member on the same host; returns once they are in its mailbox.
    ///
    /// It needs neither `pidfd_getfd` nor shared memory, and works between containers that share a network
    /// namespace, or a folder ([`JoinConfig::mailbox_folder`](crate::JoinConfig::mailbox_folder)).
    /// Both sides have to run as the same user.
    ///
    /// # Errors
    ///
    /// The other member is on another host, has no mailbox or a full one, or is lost; there are more than 64
    /// descriptors or 64 KiB; or the deadline passes.
    ///
    /// # Portability
    ///
    /// Linux; elsewhere it is [`GroupError::NoDescriptors`].
    pub fn send_descriptors(
        &self,
        to: Rank,
        descriptors: &[BorrowedFd<'_>],
        bytes: &[u8],
        deadline: impl Into<Deadline>,
    ) -> Result<(), GroupError> {
        self.check_process()?;
        self.check_rank(to)?;
        self.send_parcel(to, descriptors, bytes, deadline.into())
    }

    /// Takes the oldest parcel of a member out of the mailbox, waiting for one if there is none.
    ///
    /// # Errors
    ///
    /// The sender is lost, somebody aborts, or the deadline passes before a parcel comes.
    ///
    /// # Portability
    ///
    /// Linux; elsewhere it is [`GroupError::NoDescriptors`].
    pub fn receive_descriptors(
        &self,
        from: Rank,
        deadline: impl Into<Deadline>,
    ) -> Result<Parcel, GroupError> {
        self.check_process()?;
        self.check_rank(from)?;
        self.take_parcel(from, deadline.into())
    }
}

#[cfg(not(target_os = "linux"))]
impl Group {
    fn send_parcel(&self, rank: Rank, _: &[BorrowedFd<'_>], _: &[u8], _: Deadline) -> Result<(), GroupError> {
        Err(GroupError::NoDescriptors { rank, reason: "this system is not Linux".into() })
    }

    fn take_parcel(&self, rank: Rank, _: Deadline) -> Result<Parcel, GroupError> {
        Err(GroupError::NoDescriptors { rank, reason: "this system is not Linux".into() })
    }
}

#[cfg(target_os = "linux")]
impl Group {
    fn send_parcel(
        &self,
        to: Rank,
        descriptors: &[BorrowedFd<'_>],
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        use crate::mailbox::{self, DESCRIPTORS, PARCEL_BYTES, Route};

        let too_large = |size: usize, limit: usize| {
            let (size_bytes, limit_bytes) = (size as u64, limit as u64);
            Err(GroupError::TooLarge { size_bytes, limit_bytes })
        };
        let refused = |reason: String| GroupError::NoDescriptors { rank: to, reason };
        if bytes.len() > PARCEL_BYTES {
            return too_large(bytes.len(), PARCEL_BYTES);
        }
        if descriptors.len() > DESCRIPTORS {
            return Err(refused(format!("{} descriptors, where {DESCRIPTORS} fit", descriptors.len())));
        }
        if to == self.rank() {
            return self.keep_parcel(descriptors, bytes);
        }
        self.check_present(to)?;
        let (own, other) = (&self.members()[self.rank().index()], &self.members()[to.index()]);
        if !own.shares_host(other) {
            return Err(refused(format!("it is on another host, {}", other.host_name)));
        }
        let address = other.mailbox.as_ref().ok_or_else(|| refused("it could not open a mailbox".into()))?;
        let route = Route { token: &self.contact.token, epoch: self.epoch(), from: self.rank(), to, address };
        mailbox::send(&route, descriptors, bytes, deadline).map_err(|error| {
            use std::io::ErrorKind::{TimedOut, WouldBlock};
            if matches!(error.kind(), TimedOut | WouldBlock) {
                return GroupError::TimedOut {
                    call: format!("send_descriptors(to {to})"),
                    missing: vec![to],
                };
            }
            // It may have died meanwhile, which says more than how the socket took it.
            self.check_present(to).err().unwrap_or_else(|| refused(error.to_string()))
        })
    }

    /// To oneself: copies, since the others belong to the caller.
    fn keep_parcel(&self, descriptors: &[BorrowedFd<'_>], bytes: &[u8]) -> Result<(), GroupError> {
        let rank = self.rank();
        let refused = |reason: String| GroupError::NoDescriptors { rank, reason };
        let copies = descriptors.iter().map(BorrowedFd::try_clone_to_owned).collect::<Result<_, _>>();
        let descriptors = copies.map_err(|error| refused(error.to_string()))?;
        let mut is_taken = false;
        let parcel = Parcel { descriptors, bytes: bytes.to_vec() };
        self.shared().update(|state| is_taken = state.inbox.put(rank, parcel));
        if is_taken { Ok(()) } else { Err(refused("the mailbox is full: take parcels out".into())) }
    }

    fn take_parcel(&self, from: Rank, deadline: Deadline) -> Result<Parcel, GroupError> {
        let found = self.shared().wait(deadline, |state| {
            let parcel = state.inbox.take(from).map(Ok);
            parcel.or_else(|| state.gone(from).map(Err))
        });
        let timed_out = || {
            let call = format!("receive_descriptors(from {from})");
            Err(GroupError::TimedOut { call, missing: vec![from] })
        };
        found.unwrap_or_else(timed_out)
    }

    fn check_present(&self, rank: Rank) -> Result<(), GroupError> {
        self.shared().lock().gone(rank).map_or(Ok(()), Err)
    }
}
