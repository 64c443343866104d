//! Descriptors from other processes of the host, by unix socket.
//!
//! Each member has a mailbox that its service serves, so that two members can send to each other at once.
//! A parcel is one message with the descriptors beside its first byte. Its sender proves that it knows the
//! job's token, and the system vouches for its user and process.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fs::{self, DirBuilder},
    io::{self, ErrorKind, IoSlice, IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::{fs::DirBuilderExt as _, net::UnixStream},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use mio::{Interest, Registry, Token as Slot, unix::SourceFd};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType,
};
use serde::{Deserialize, Serialize};
use warpweft_core_types::Deadline;

use crate::{
    Parcel, Rank, Token,
    frame::{self, FrameReader},
    member::{MailboxAddress, MemberInfo},
    shared::Shared,
    token::{self, Nonce, Proof},
};

/// Descriptors of one parcel; the system passes 253 at most.
pub(crate) const DESCRIPTORS: usize = 64;

/// Bytes beside them.
pub(crate) const PARCEL_BYTES: usize = 64 << 10;

/// Descriptors that lie in a mailbox for each sender; more are refused until some are taken out.
const KEPT: usize = 512;

/// Senders served at once; the oldest makes room.
const SENDERS: usize = 64;

/// How long a sender may take.
const SENDER_TIME: Duration = Duration::from_secs(2);

const FRAME_LIMIT: u32 = 128 << 10;

/// The connections of a mailbox are numbered from here, where those of the service never get.
const FIRST: usize = usize::MAX / 2;

const TAKEN: u8 = 1;
const FULL: u8 = 2;
const REFUSED: u8 = 3;

/// Parcels that nobody has taken out yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    parcels: BTreeMap<Rank, VecDeque<Parcel>>,
}

impl Inbox {
    pub(crate) fn take(&mut self, from: Rank) -> Option<Parcel> {
        self.parcels.get_mut(&from)?.pop_front()
    }

    /// Whether there was room.
    pub(crate) fn put(&mut self, from: Rank, parcel: Parcel) -> bool {
        let parcels = self.parcels.entry(from).or_default();
        // A parcel without descriptors takes room too.
        let kept: usize = parcels.iter().map(|parcel| parcel.descriptors.len().max(1)).sum();
        let has_room = kept + parcel.descriptors.len() <= KEPT;
        if has_room {
            parcels.push_back(parcel);
        }
        has_room
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Letter {
    from: Rank,
    epoch: u32,
    descriptor_count: u32,
    bytes: Vec<u8>,
    proof: Proof,
}

impl Letter {
    fn numbers(&self, to: Rank) -> Vec<u8> {
        [self.from.0, to.0, self.epoch, self.descriptor_count].map(u32::to_le_bytes).concat()
    }
}

/// Where this member takes parcels.
#[derive(Debug)]
pub(crate) struct Mailbox {
    socket: OwnedFd,
    address: MailboxAddress,
    /// Removed with everything in it.
    folder: Option<PathBuf>,
    owner: Option<Owner>,
    senders: HashMap<usize, Sender>,
    next: usize,
    slot: Slot,
}

/// Known once the group has formed.
#[derive(Debug)]
struct Owner {
    token: Token,
    epoch: u32,
    rank: Rank,
    members: Vec<MemberInfo>,
}

#[derive(Debug)]
struct Sender {
    stream: OwnedFd,
    since: Instant,
    challenge: Nonce,
    pid: Option<u32>,
    reader: FrameReader,
    descriptors: Vec<OwnedFd>,
}

impl Mailbox {
    /// Opens a mailbox: without a file, if the system lets us and no folder is given.
    pub(crate) fn open(folder: Option<&Path>) -> io::Result<Self> {
        let name = format!("warpweft-{}", &token::hexadecimal(&token::nonce()?)[..32]);
        if folder.is_none() {
            let address = MailboxAddress::Abstract(name.clone());
            if let Ok(mailbox) = Self::listen(address, None) {
                return Ok(mailbox);
            }
        }
        let folder = folder.map_or_else(std::env::temp_dir, Path::to_owned).join(name);
        DirBuilder::new().mode(0o700).create(&folder)?;
        let address = MailboxAddress::Path(folder.join("mailbox"));
        Self::listen(address, Some(folder.clone())).inspect_err(|_| remove(&folder))
    }

    fn listen(address: MailboxAddress, folder: Option<PathBuf>) -> io::Result<Self> {
        let socket = new_socket()?;
        rustix::net::bind(&socket, &system_address(&address)?)?;
        rustix::net::listen(&socket, 128)?;
        let (senders, next, slot) = (HashMap::new(), FIRST, Slot(FIRST));
        Ok(Self { socket, address, folder, owner: None, senders, next, slot })
    }

    pub(crate) fn address(&self) -> &MailboxAddress {
        &self.address
    }

    pub(crate) fn register(&mut self, registry: &Registry, slot: Slot) -> io::Result<()> {
        self.slot = slot;
        watch(registry, self.socket.as_fd(), slot)
    }

    pub(crate) fn owns(&self, slot: Slot) -> bool {
        slot == self.slot || slot.0 >= FIRST
    }

    /// From now on parcels are taken; senders that were early are waiting.
    pub(crate) fn activate(
        &mut self,
        registry: &Registry,
        token: Token,
        epoch: u32,
        rank: Rank,
        members: Vec<MemberInfo>,
    ) {
        self.owner = Some(Owner { token, epoch, rank, members });
        self.accept(registry);
    }

    pub(crate) fn ready(&mut self, registry: &Registry, slot: Slot, shared: &Shared) {
        if slot == self.slot {
            self.accept(registry);
        } else {
            self.serve(slot.0, shared);
        }
    }

    /// When a sender's time is up.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.senders.values().map(|sender| sender.since + SENDER_TIME).min()
    }

    pub(crate) fn drop_late(&mut self, now: Instant) {
        self.senders.retain(|_, sender| now.duration_since(sender.since) < SENDER_TIME);
    }

    fn accept(&mut self, registry: &Registry) {
        if self.owner.is_none() {
            return;
        }
        while let Ok(stream) = rustix::net::accept_with(&self.socket, SOCKET_FLAGS) {
            if let Err(error) = self.greet(registry, stream) {
                tracing::debug!(%error, "a sender of descriptors was turned away");
            }
        }
    }

    fn greet(&mut self, registry: &Registry, stream: OwnedFd) -> io::Result<()> {
        let pid = peer(&stream)?;
        let challenge = token::nonce()?;
        if self.senders.len() >= SENDERS {
            let oldest = self.senders.iter().min_by_key(|(_, sender)| sender.since).map(|(slot, _)| *slot);
            self.senders.remove(&oldest.unwrap_or_default());
        }
        self.next += 1;
        watch(registry, stream.as_fd(), Slot(self.next))?;
        // It may be gone already, which must not end this process by a signal.
        rustix::net::send(&stream, &challenge, SendFlags::NOSIGNAL)?;
        let (reader, descriptors) = (FrameReader::default(), Vec::new());
        let sender = Sender { stream, since: Instant::now(), challenge, pid, reader, descriptors };
        self.senders.insert(self.next, sender);
        Ok(())
    }

    fn serve(&mut self, slot: usize, shared: &Shared) {
        let (Some(sender), Some(owner)) = (self.senders.get_mut(&slot), &self.owner) else { return };
        let answer = match sender.receive() {
            Ok(None) => return,
            Ok(Some(letter)) => owner.take(sender, letter, shared),
            Err(error) => {
                tracing::debug!(%error, "a parcel does not read");
                REFUSED
            }
        };
        if let Some(sender) = self.senders.remove(&slot) {
            // A sender that is gone needs no answer.
            let _gone = rustix::net::send(&sender.stream, &[answer], SendFlags::NOSIGNAL);
        }
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            remove(folder);
        }
    }
}

impl Owner {
    fn take(&self, sender: &mut Sender, letter: Letter, shared: &Shared) -> u8 {
        let Some((from, own)) =
            self.members.get(letter.from.index()).zip(self.members.get(self.rank.index()))
        else {
            return REFUSED;
        };
        let numbers = letter.numbers(self.rank);
        let parts: [&[u8]; 3] = [&sender.challenge, &numbers, &letter.bytes];
        let is_known = self.token.verify("parcel", &parts, &letter.proof);
        let is_its_process = !own.shares_pids(from) || sender.pid.is_none_or(|pid| pid == from.pid);
        let descriptors = std::mem::take(&mut sender.descriptors);
        let is_whole = descriptors.len() == letter.descriptor_count as usize;
        if !is_known || !is_its_process || !is_whole || letter.epoch != self.epoch {
            return REFUSED;
        }
        let mut is_taken = false;
        let parcel = Parcel { descriptors, bytes: letter.bytes };
        shared.update(|state| is_taken = state.inbox.put(letter.from, parcel));
        if is_taken { TAKEN } else { FULL }
    }
}

impl Sender {
    /// Reads what there is; the letter once it is complete.
    fn receive(&mut self) -> io::Result<Option<Letter>> {
        let mut piece = [0; 16 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        loop {
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC;
            let received =
                rustix::net::recvmsg(&self.stream, &mut [IoSliceMut::new(&mut piece)], &mut control, flags);
            let received = match received {
                Ok(received) => received,
                Err(rustix::io::Errno::AGAIN) => return Ok(None),
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                    self.descriptors.extend(descriptors);
                }
            }
            if received.flags.contains(ReturnFlags::CTRUNC) || self.descriptors.len() > DESCRIPTORS {
                return Err(io::Error::other("more descriptors than a parcel holds"));
            }
            if received.bytes == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            self.reader.push(&piece[..received.bytes]);
            if let Some(frame) = self.reader.next(FRAME_LIMIT).map_err(io::Error::other)? {
                return frame::decode(frame).map(Some).map_err(io::Error::other);
            }
        }
    }
}

/// Who sends, and for whom it is.
#[derive(Debug)]
pub(crate) struct Route<'a> {
    pub(crate) token: &'a Token,
    pub(crate) epoch: u32,
    pub(crate) from: Rank,
    pub(crate) to: Rank,
    pub(crate) address: &'a MailboxAddress,
}

/// Puts a parcel into another member's mailbox.
pub(crate) fn send(
    route: &Route<'_>,
    descriptors: &[BorrowedFd<'_>],
    bytes: &[u8],
    deadline: Deadline,
) -> io::Result<()> {
    let mut stream = UnixStream::from(connect(route.address, deadline)?);
    let challenge = within(&stream, deadline, |mut stream| {
        let mut challenge = [0; 32];
        stream.read_exact(&mut challenge).map(|()| challenge)
    })?;
    let descriptor_count = u32::try_from(descriptors.len()).map_err(io::Error::other)?;
    let (from, epoch) = (route.from, route.epoch);
    let mut letter = Letter { from, epoch, descriptor_count, bytes: bytes.to_vec(), proof: [0; 32] };
    letter.proof = route.token.prove("parcel", &[&challenge, &letter.numbers(route.to), &letter.bytes]);
    let frame = frame::encode(&letter);
    let sent = within(&stream, deadline, |stream| send_first(stream, &frame, descriptors))?;
    within(&stream, deadline, |mut stream| stream.write_all(&frame[sent..]))?;
    let mut answer = [0];
    stream.set_read_timeout(Some(left(deadline)?))?;
    stream.read_exact(&mut answer)?;
    match answer[0] {
        TAKEN => Ok(()),
        FULL => {
            Err(io::Error::new(ErrorKind::StorageFull, "its mailbox is full: it has to take parcels out"))
        }
        _ => Err(io::Error::new(ErrorKind::PermissionDenied, "it does not take parcels from this process")),
    }
}

fn within<T>(
    stream: &UnixStream,
    deadline: Deadline,
    act: impl FnOnce(&UnixStream) -> io::Result<T>,
) -> io::Result<T> {
    let left = left(deadline)?;
    stream.set_read_timeout(Some(left))?;
    stream.set_write_timeout(Some(left))?;
    act(stream)
}

fn left(deadline: Deadline) -> io::Result<Duration> {
    let left = deadline.remaining();
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Sends the beginning of `frame` with the descriptors; how many bytes of it went.
fn send_first(stream: &UnixStream, frame: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("more descriptors than a parcel holds"));
    }
    Ok(rustix::net::sendmsg(stream, &[IoSlice::new(frame)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Connects; a mailbox whose queue is full is tried again until the deadline.
fn connect(address: &MailboxAddress, deadline: Deadline) -> io::Result<OwnedFd> {
    let address = system_address(address)?;
    loop {
        let socket = new_socket()?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => {
                rustix::io::ioctl_fionbio(&socket, false)?;
                return Ok(socket);
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                // There is nothing to wait on: the system does not tell when a queue has room.
                std::thread::sleep(left(deadline)?.min(Duration::from_millis(1)));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn system_address(address: &MailboxAddress) -> io::Result<SocketAddrUnix> {
    Ok(match address {
        MailboxAddress::Abstract(name) => SocketAddrUnix::new_abstract_name(name.as_bytes())?,
        MailboxAddress::Path(path) => SocketAddrUnix::new(path)?,
    })
}

const SOCKET_FLAGS: rustix::net::SocketFlags =
    rustix::net::SocketFlags::CLOEXEC.union(rustix::net::SocketFlags::NONBLOCK);

fn new_socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SOCKET_FLAGS, None)?)
}

/// The user is checked here; the process number is returned if it is one of our namespace.
fn peer(stream: &OwnedFd) -> io::Result<Option<u32>> {
    let peer = getsockopt(stream, PeerCredentials)?;
    let is_trusted = peer.uid() == rustix::process::geteuid().as_raw() || peer.uid() == 0;
    if !is_trusted {
        return Err(ErrorKind::PermissionDenied.into());
    }
    Ok(u32::try_from(peer.pid()).ok().filter(|pid| *pid != 0))
}

fn watch(registry: &Registry, descriptor: BorrowedFd<'_>, slot: Slot) -> io::Result<()> {
    use std::os::fd::AsRawFd as _;

    registry.register(&mut SourceFd(&descriptor.as_raw_fd()), slot, Interest::READABLE)
}

fn remove(folder: &Path) {
    if let Err(error) = fs::remove_dir_all(folder) {
        tracing::debug!(%error, folder = %folder.display(), "a mailbox's folder was not removed");
    }
}
