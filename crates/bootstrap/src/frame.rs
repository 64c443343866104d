//! Messages as bytes: a header with a limit that is checked before anything is kept, then postcard.

use serde::{Serialize, de::DeserializeOwned};

const MAGIC: [u8; 4] = *b"wpwf";

/// Changes whenever a message does: members of one group have to speak the same.
pub const PROTOCOL: u16 = 1;

const HEADER: usize = 10;

/// What somebody may send who has not yet proven to belong here.
pub(crate) const STRANGER_LIMIT: u32 = 64 << 10;

/// What a member may send.
pub(crate) const MEMBER_LIMIT: u32 = 16 << 20;

/// Why bytes are no message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// It is another protocol.
    #[error("this is not the protocol of a bootstrap")]
    Foreign,
    /// It is another version of this protocol.
    #[error("it speaks version {theirs} of the protocol, this is {PROTOCOL}")]
    Version {
        /// The version that was sent.
        theirs: u16,
    },
    /// A message is longer than its sender is allowed.
    #[error("a message of {size_bytes} bytes, where {limit_bytes} are allowed")]
    TooLong {
        /// What the header says.
        size_bytes: u32,
        /// What is allowed.
        limit_bytes: u32,
    },
    /// The bytes of a message do not read as one.
    #[error("a damaged message")]
    Damaged,
}

/// The message with its header.
pub(crate) fn encode(message: &impl Serialize) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..6].copy_from_slice(&PROTOCOL.to_le_bytes());
    let mut bytes = postcard::to_extend(message, bytes).expect("a growing list takes any message");
    let length = u32::try_from(bytes.len() - HEADER).expect("values are limited far below 4 GiB");
    bytes[6..HEADER].copy_from_slice(&length.to_le_bytes());
    bytes
}

/// Reads exactly one value from all of `bytes`.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        _ => Err(FrameError::Damaged),
    }
}

/// Bytes of a stream, until they make up messages.
#[derive(Debug, Default)]
pub(crate) struct FrameReader {
    bytes: Vec<u8>,
    /// How many of them were handed out.
    start: usize,
}

impl FrameReader {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        } else if self.start > self.bytes.len() / 2 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole message, without its header.
    ///
    /// A wrong beginning is found at its first byte, and a length that is not allowed before a byte of it is kept.
    pub(crate) fn next(&mut self, limit_bytes: u32) -> Result<Option<&[u8]>, FrameError> {
        let rest = &self.bytes[self.start..];
        if !rest.iter().zip(&MAGIC).all(|(byte, magic)| byte == magic) {
            return Err(FrameError::Foreign);
        }
        let Some(header) = rest.first_chunk::<HEADER>() else { return Ok(None) };
        let [_, _, _, _, v0, v1, l0, l1, l2, l3] = *header;
        let theirs = u16::from_le_bytes([v0, v1]);
        if theirs != PROTOCOL {
            return Err(FrameError::Version { theirs });
        }
        let size_bytes = u32::from_le_bytes([l0, l1, l2, l3]);
        if size_bytes > limit_bytes {
            return Err(FrameError::TooLong { size_bytes, limit_bytes });
        }
        let end = HEADER + size_bytes as usize;
        if rest.len() < end {
            return Ok(None);
        }
        let from = self.start + HEADER;
        self.start += end;
        Ok(Some(&self.bytes[from..self.start]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_come_out_whole_however_they_arrive() {
        let sent = [String::from("a"), "b".repeat(5000), String::new()];
        let stream: Vec<u8> = sent.iter().flat_map(encode).collect();
        for piece in [1, 7, 4096, stream.len()] {
            let mut reader = FrameReader::default();
            let mut got: Vec<String> = Vec::new();
            for bytes in stream.chunks(piece) {
                reader.push(bytes);
                while let Some(frame) = reader.next(STRANGER_LIMIT).unwrap() {
                    got.push(decode(frame).unwrap());
                }
            }
            assert_eq!(got, sent, "{piece}");
        }
    }

    #[test]
    fn wrong_beginnings_are_refused_early() {
        let check = |bytes: &[u8], expected| {
            let mut reader = FrameReader::default();
            reader.push(bytes);
            assert_eq!(reader.next(100), expected, "{bytes:?}");
        };
        check(b"", Ok(None));
        check(b"wp", Ok(None));
        check(b"G", Err(FrameError::Foreign));
        check(b"wpwf\x63\x00\x00\x00\x00\x00", Err(FrameError::Version { theirs: 99 }));
        let long = FrameError::TooLong { size_bytes: 101, limit_bytes: 100 };
        check(b"wpwf\x01\x00\x65\x00\x00\x00", Err(long));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let mut reader = FrameReader::default();
            reader.push(&bytes);
            while let Ok(Some(frame)) = reader.next(STRANGER_LIMIT) {
                let _ = decode::<Vec<String>>(frame);
            }
        }
    }
}
