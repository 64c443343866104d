//! Memory that two processes share, by a descriptor that goes through a socket.

use std::{
    env,
    io::{IoSlice, IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use warpweft_core_types::{AllocError, BufferDesc, BufferView, CopyRegion, FillRegion, Op, SharedMemory};
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Lane, Outcome, PATIENCE, backend};

/// Tells the other process where to connect.
const SOCKET: &str = "WARPWEFT_TEST_SOCKET";

const SIZE: u64 = 3 << 20;

fn send(socket: &UnixStream, memory: &SharedMemory) -> Outcome {
    let descriptors = [memory.descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(socket, &[IoSlice::new(b"m")], &mut control, SendFlags::empty())?;
    Ok(())
}

fn receive(socket: &UnixStream) -> Outcome<OwnedFd> {
    let (mut space, mut byte) = ([MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))], [0]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(descriptors.next().and_then(|mut all| all.next()).ok_or("no descriptor came")?)
}

fn fill(lane: &mut Lane, view: &BufferView, byte: u8) -> Outcome {
    Ok(lane.submit(&[Op::Fill(FillRegion::bytes(view, byte))])?.wait(PATIENCE)?)
}

fn all_are(lane: &mut Lane, view: &BufferView, byte: u8) -> Outcome<bool> {
    let window = lane.memory(BufferDesc::host_visible(view.size()))?;
    lane.submit(&[Op::Copy(CopyRegion::new(view, &window)?)])?.wait(PATIENCE)?;
    let mut bytes = vec![0; usize::try_from(view.size())?];
    window.read(&mut bytes)?;
    Ok(bytes.iter().all(|&found| found == byte))
}

#[test]
fn memory_of_another_device_is_refused_whatever_it_is_called() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let (near, far) = (Lane::open(&backend, 0)?, Lane::open(&backend, 1)?);
    let family = far.device.sharing().ok_or("the family is absent")?;
    let theirs = family.allocate_shareable(SIZE)?;
    let mut exported = family.export(theirs.as_ref())?;
    exported.device = near.device.info().id.uuid;
    let (memories, reservations) = (stand_in.live("memories"), stand_in.live("reservations"));
    let error = near.device.sharing().ok_or("the family is absent")?.import_shared(exported).unwrap_err();
    assert!(
        matches!(&error, AllocError::CannotImport { reason, .. } if reason.contains("memory of device 1")),
        "{error}"
    );
    assert_eq!((stand_in.live("memories"), stand_in.live("reservations")), (memories, reservations));
    // As what it is, it is taken.
    family.import_shared(family.export(theirs.as_ref())?)?;
    Ok(())
}

#[test]
fn sizes_that_no_device_has_are_out_of_memory() -> Outcome {
    let lane = Lane::open(&backend(&StandIn::load()?), 0)?;
    let family = lane.device.sharing().ok_or("the family is absent")?;
    for size in [1 << 62, (1 << 63) - 1, 1 << 63, u64::MAX - (2 << 20), u64::MAX - 4096, u64::MAX] {
        let error = family.allocate_shareable(size).unwrap_err();
        assert!(matches!(error, AllocError::OutOfMemory { .. }), "{size:#x}: {error:?}");
        let descriptor = family.export(family.allocate_shareable(SIZE)?.as_ref())?.descriptor;
        let shared = SharedMemory { device: lane.device.info().id.uuid, size, descriptor };
        let error = family.import_shared(shared).unwrap_err();
        assert!(matches!(error, AllocError::CannotImport { .. }), "{size:#x}: {error:?}");
    }
    Ok(())
}

/// One of the two processes is made by the other, of the same program and for the same test.
#[test]
fn memory_is_shared_between_processes() -> Outcome {
    match env::var_os(SOCKET) {
        None => give(),
        Some(path) => take(&PathBuf::from(path)),
    }
}

fn give() -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path)?;
    let mut child = Command::new(env::current_exe()?)
        .args(["sharing::memory_is_shared_between_processes", "--exact"])
        .env(SOCKET, &path)
        .spawn()?;
    let outcome = give_to(&listener);
    if outcome.is_err() {
        child.kill()?;
    }
    assert!(child.wait()?.success(), "the other process failed: {outcome:?}");
    outcome
}

fn give_to(listener: &UnixListener) -> Outcome {
    let mut lane = Lane::open(&backend(&StandIn::load()?), 0)?;
    let family = lane.device.sharing().ok_or("the family is absent")?;
    let own = family.allocate_shareable(SIZE)?;
    let exported = family.export(own.as_ref())?;
    let own = BufferView::whole(own);
    fill(&mut lane, &own, 0x11)?;
    let mut socket = accept(listener)?;
    send(&socket, &exported)?;
    drop(exported);
    let mut word = [0];
    socket.read_exact(&mut word)?;
    assert!(all_are(&mut lane, &own, 0x22)?, "what the other process wrote is here");
    fill(&mut lane, &own, 0x33)?;
    drop(own);
    Ok(socket.write_all(b"w")?)
}

fn accept(listener: &UnixListener) -> Outcome<UnixStream> {
    listener.set_nonblocking(true)?;
    let started = Instant::now();
    let socket = loop {
        match listener.accept() {
            Ok((socket, _)) => break socket,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                assert!(started.elapsed() < PATIENCE, "nobody came");
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error.into()),
        }
    };
    socket.set_nonblocking(false)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    Ok(socket)
}

fn take(path: &std::path::Path) -> Outcome {
    let mut socket = UnixStream::connect(path)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut lane = Lane::open(&backend(&StandIn::load()?), 0)?;
    let descriptor = receive(&socket)?;
    let shared = SharedMemory { device: lane.device.info().id.uuid, size: SIZE, descriptor };
    let family = lane.device.sharing().ok_or("the family is absent")?;
    let import = BufferView::whole(family.import_shared(shared)?);
    assert!(all_are(&mut lane, &import, 0x11)?, "what the other process wrote is here");
    fill(&mut lane, &import, 0x22)?;
    socket.write_all(b"w")?;
    socket.read_exact(&mut [0])?;
    // The memory lives, though the process that made it has let it go.
    assert!(all_are(&mut lane, &import, 0x33)?);
    Ok(())
}
