//! What reads a lane, for fuzz targets. No part of the interface.

use crate::{
    Header, Message,
    ring::{self, Consumer},
    wire::{HEADER_WORDS, MAX_PAYLOAD},
};

/// A lane whose lines hold these bytes, with stamps that are right.
pub fn lane(bytes: &[u8]) {
    let words: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    if let Some(words) = words.first_chunk::<HEADER_WORDS>()
        && let Ok(header) = Header::from_words(words)
    {
        assert_eq!(header.to_words(), *words, "what was read is written the same");
    }
    read(&mut ring::filled(bytes));
}

fn read(consumer: &mut Consumer) {
    let mut message = Message::default();
    // An error stays one.
    while let Ok(true) = consumer.try_pop(&mut message) {
        assert!(
            message.payload.len() <= MAX_PAYLOAD && message.payload.len() == message.header.length as usize
        );
    }
    assert!(!consumer.try_pop(&mut message).unwrap_or(false), "it gives nothing more");
}
