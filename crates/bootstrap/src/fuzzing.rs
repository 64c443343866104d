//! The decoders of what others send, for fuzz targets. No part of the interface.

use std::fmt::Debug;

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    expand_host_list,
    frame::{self, FrameReader, MEMBER_LIMIT, STRANGER_LIMIT},
    message::{FromHub, Hello, ToHub, Welcome},
    rendezvous,
};

/// What a member sends to rank 0, in pieces as a socket gives them.
pub fn to_hub(bytes: &[u8]) {
    messages(bytes, STRANGER_LIMIT, |frame| {
        let Ok(message) = frame::decode::<ToHub>(frame) else { return };
        same_again(&message);
        if let ToHub::Hello { hello, .. } = message {
            let _ = frame::decode::<Hello>(&hello);
        }
    });
}

/// What rank 0 sends to a member.
pub fn from_hub(bytes: &[u8]) {
    messages(bytes, MEMBER_LIMIT, |frame| {
        let Ok(message) = frame::decode::<FromHub>(frame) else { return };
        same_again(&message);
        if let FromHub::Welcome { welcome, .. } = message {
            let _ = frame::decode::<Welcome>(&welcome);
        }
    });
}

/// What one member sends another with descriptors.
#[cfg(target_os = "linux")]
pub fn parcel(bytes: &[u8]) {
    messages(bytes, STRANGER_LIMIT, |frame| {
        let _ = frame::decode::<crate::mailbox::Letter>(frame);
    });
}

/// Rendezvous files, ids and lists of hosts.
pub fn texts(text: &str) {
    if let Some((_, id)) = rendezvous::parse(text) {
        assert_eq!(id.to_string().parse(), Ok(id));
    }
    if let Some(hosts) = expand_host_list(text) {
        assert!(hosts.iter().all(|host| !host.is_empty()));
    }
}

fn messages(bytes: &[u8], limit: u32, mut each: impl FnMut(&[u8])) {
    // A fuzzer does not find the header by itself.
    each(bytes);
    let mut reader = FrameReader::default();
    for piece in bytes.chunks(7) {
        reader.push(piece);
        while let Ok(Some(frame)) = reader.next(limit) {
            each(frame);
        }
    }
}

/// What was read is written as something that reads the same.
fn same_again<T: Serialize + DeserializeOwned + PartialEq + Debug>(message: &T) {
    let mut reader = FrameReader::default();
    reader.push(&frame::encode(message));
    let frame = reader.next(u32::MAX).expect("it was written here").expect("it is whole");
    assert_eq!(frame::decode::<T>(frame).as_ref(), Ok(message));
}
