//! Settings of a communicator.

use serde::{Deserialize, Serialize};

use crate::HostError;

/// How a communicator lays out its memory and chooses between ways; the same on all ranks.
///
/// The defaults were measured with 2 ranks on 2 cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostConfig {
    /// What a rank hands over at a time: its operand, or a chunk of every rank's part of it. Each rank has two slots of
    /// this length.
    pub slot_bytes: usize,
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
            slot_bytes: 768 << 10,
            one_shot_bytes: 256 << 10,
            direct_bytes: 4 << 10,
            is_direct: true,
            fragment_bytes: 16 << 10,
        }
    }
}

impl HostConfig {
    /// The longest slot and fragment: no layout overflows.
    const LONGEST: usize = 64 << 20;

    pub(crate) fn check(&self, size: u32) -> Result<(), HostError> {
        let least = 64 * (size as usize + 1);
        if self.slot_bytes < least {
            let text = format!("slot_bytes is {}, and {size} ranks need {least}", self.slot_bytes);
            return Err(HostError::InvalidConfig(text));
        }
        for (name, bytes) in [("slot_bytes", self.slot_bytes), ("fragment_bytes", self.fragment_bytes)] {
            if !bytes.is_multiple_of(64) || bytes == 0 || bytes > Self::LONGEST {
                let longest = Self::LONGEST;
                let text = format!("{name} is {bytes}, which is no multiple of 64 between 64 and {longest}");
                return Err(HostError::InvalidConfig(text));
            }
        }
        Ok(())
    }
}
