//! Settings of a communicator.

use serde::{Deserialize, Serialize};

use crate::HostError;

/// How a communicator lays out its memory and chooses between ways; the same on all ranks.
///
/// The defaults were measured with 2 ranks; see `docs/design/host-collectives.md` for what each is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostConfig {
    /// What a rank hands over at a time in operations that go in steps: a chunk of each part.
    pub chunk_bytes: usize,
    /// Operands of all ranks together up to which every rank of a reduction to all reduces everything; two ranks always
    /// do.
    pub one_shot_bytes: usize,
    /// From here on, threads of one process read and write each other's operands.
    pub direct_bytes: usize,
    /// Whether they do so at all; for comparisons.
    pub is_direct: bool,
    /// What a send puts into its channel at a time. Four of them may wait there, and a send that fits does not wait.
    pub fragment_bytes: usize,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            chunk_bytes: 128 << 10,
            one_shot_bytes: 256 << 10,
            direct_bytes: 4 << 10,
            is_direct: true,
            fragment_bytes: 16 << 10,
        }
    }
}

impl HostConfig {
    /// The longest chunk and fragment: no layout overflows.
    const LONGEST: usize = 64 << 20;

    pub(crate) fn check(&self) -> Result<(), HostError> {
        for (name, bytes) in [("chunk_bytes", self.chunk_bytes), ("fragment_bytes", self.fragment_bytes)] {
            if !bytes.is_multiple_of(64) || bytes == 0 || bytes > Self::LONGEST {
                let longest = Self::LONGEST;
                let text = format!("{name} is {bytes}, which is no multiple of 64 between 64 and {longest}");
                return Err(HostError::InvalidConfig(text));
            }
        }
        Ok(())
    }
}
