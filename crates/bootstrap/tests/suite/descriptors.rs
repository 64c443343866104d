//! Mailboxes: what fits, what is refused, and who.

use std::{
    io::{Read as _, Seek as _, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixStream},
    },
    time::Duration,
};

use warpweft_bootstrap::{Group, GroupError, JoinConfig, Loss, MailboxAddress, Rank};

use crate::{SOON, config, each, groups, join_each};

fn file(text: &str) -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    write!(file, "{text}").unwrap();
    file
}

fn text(file: impl Into<std::fs::File>) -> String {
    let mut file = file.into();
    file.rewind().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn everybody_sends_to_everybody_at_once() {
    let groups = groups(4);
    each(&groups, |group| {
        for to in Rank::all(4) {
            let files = [file(&format!("{} to {to}", group.rank())), file("second")];
            let descriptors: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
            group.send_descriptors(to, &descriptors, to.to_string().as_bytes(), SOON).unwrap();
        }
        for from in Rank::all(4) {
            let mut parcel = group.receive_descriptors(from, SOON).unwrap();
            assert_eq!(parcel.bytes, group.rank().to_string().as_bytes());
            assert_eq!(text(parcel.descriptors.pop().unwrap()), "second");
            assert_eq!(text(parcel.descriptors.pop().unwrap()), format!("{from} to {}", group.rank()));
        }
    });
}

#[test]
fn the_most_that_fits_arrives_in_order_and_more_is_refused() {
    let groups = groups(2);
    let file = file("x");
    let many = vec![file.as_fd(); 64];
    let bytes: Vec<u8> = (0..64 << 10).map(|at: u32| at.to_le_bytes()[0]).collect();
    for number in 0..4 {
        groups[0].send_descriptors(Rank(1), &many[..60 + number], &bytes[number..], SOON).unwrap();
    }
    for number in 0..4 {
        let parcel = groups[1].receive_descriptors(Rank(0), SOON).unwrap();
        assert_eq!(parcel.descriptors.len(), 60 + number);
        assert!(parcel.bytes == bytes[number..]);
    }
    let long = [bytes, vec![0]].concat();
    let error = groups[0].send_descriptors(Rank(1), &[], &long, SOON).unwrap_err();
    assert!(matches!(error, GroupError::TooLarge { size_bytes: 65537, .. }), "{error}");
    let error =
        groups[0].send_descriptors(Rank(1), &[many, vec![file.as_fd()]].concat(), b"", SOON).unwrap_err();
    assert!(matches!(error, GroupError::NoDescriptors { .. }), "{error}");
    let error = groups[0].send_descriptors(Rank(2), &[], b"", SOON).unwrap_err();
    assert!(matches!(error, GroupError::UnknownRank { .. }), "{error}");
}

#[test]
fn a_full_mailbox_refuses_until_something_is_taken_out() {
    let groups = groups(2);
    let file = file("x");
    let many = vec![file.as_fd(); 64];
    let send = || groups[0].send_descriptors(Rank(1), &many, b"", SOON);
    while send().is_ok() {}
    let error = send().unwrap_err();
    assert!(error.to_string().contains("full"), "{error}");
    groups[1].receive_descriptors(Rank(0), SOON).unwrap();
    send().unwrap();
    while let Ok(parcel) = groups[1].receive_descriptors(Rank(0), Duration::ZERO) {
        drop(parcel);
    }
}

#[test]
fn a_folder_serves_where_names_without_files_do_not_reach() {
    let folder = tempfile::tempdir().unwrap();
    let configure = |rank| JoinConfig { mailbox_folder: Some(folder.path().into()), ..config(rank, 2) };
    let groups: Vec<Group> = join_each(2, configure).into_iter().map(Result::unwrap).collect();
    for member in groups[0].members() {
        assert!(
            matches!(&member.mailbox, Some(MailboxAddress::Path(path)) if path.starts_with(folder.path()))
        );
    }
    groups[1].send_descriptors(Rank(0), &[file("hello").as_fd()], b"", SOON).unwrap();
    let parcel = groups[0].receive_descriptors(Rank(1), SOON).unwrap();
    assert_eq!(text(parcel.descriptors.into_iter().next().unwrap()), "hello");
    drop(groups);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn strangers_at_a_mailbox_disturb_nobody() {
    let groups = groups(2);
    let Some(MailboxAddress::Abstract(name)) = &groups[1].members()[1].mailbox else {
        panic!("Linux has names without files")
    };
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let idle: Vec<UnixStream> = (0..100).map(|_| UnixStream::connect_addr(&address).unwrap()).collect();
    let mut garbage = UnixStream::connect_addr(&address).unwrap();
    garbage.write_all(&[b'x'; 1000]).unwrap();
    garbage.set_read_timeout(Some(SOON)).unwrap();
    let mut answer = Vec::new();
    // A reset is an end as well.
    let _end = garbage.read_to_end(&mut answer);
    assert!(answer.len() >= 32, "a challenge came first");
    groups[0].send_descriptors(Rank(1), &[file("hello").as_fd()], b"", SOON).unwrap();
    let parcel = groups[1].receive_descriptors(Rank(0), SOON).unwrap();
    assert_eq!(parcel.descriptors.len(), 1);
    drop(idle);
}

#[test]
fn what_was_sent_before_a_sender_left_is_still_there() {
    let mut groups = groups(3);
    let sender = groups.remove(2);
    sender.send_descriptors(Rank(0), &[file("last words").as_fd()], b"", SOON).unwrap();
    drop(sender);
    groups[0].wait_health(SOON, |health| !health[2].is_present()).unwrap();
    let parcel = groups[0].receive_descriptors(Rank(2), SOON).unwrap();
    assert_eq!(parcel.descriptors.len(), 1);
    let error = groups[0].receive_descriptors(Rank(2), SOON).unwrap_err();
    assert!(matches!(error, GroupError::PeerLost { rank: Rank(2), how: Loss::Left }), "{error}");
    groups[1].abort("enough").unwrap();
    let error = groups[1].receive_descriptors(Rank(0), SOON).unwrap_err();
    assert!(matches!(error, GroupError::Aborted { .. }), "{error}");
}
