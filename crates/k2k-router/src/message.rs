//! A message, out of its lane.

use crate::Header;

/// What was sent: its header and its payload.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// What it says of itself.
    pub header: Header,
    /// Its bytes.
    pub payload: Vec<u8>,
}
