//! What a resident and its slices tell each other, in memory that both can reach.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use warpweft_core_types::{AllocError, BufferDesc};

use crate::{
    header::{self, Slice},
    memory::{Arena, CudaBuffer},
};

/// Where the blocks' words begin in the control block, behind the orders or the mirror.
const BLOCKS_AT: usize = 128;

/// What a resident and its slices tell each other.
#[derive(Debug)]
pub(crate) struct Control {
    /// The orders, then a `ww_block` for each workgroup.
    host: CudaBuffer,
    /// The mirror of the orders, then a word for each workgroup.
    device: CudaBuffer,
    workgroups: u32,
}

impl Control {
    pub(crate) fn create(arena: &Arc<Arena>, workgroups: u32) -> Result<Self, AllocError> {
        let size = |each: usize| (BLOCKS_AT + workgroups as usize * each) as u64;
        Ok(Self {
            host: arena.allocate(&BufferDesc::host_visible(size(header::BLOCK_BYTES)))?,
            device: arena.allocate(&BufferDesc::device(size(size_of::<u32>())))?,
            workgroups,
        })
    }

    pub(crate) fn slice(&self, number: u64, shortest: Duration, longest: Duration) -> Slice {
        let ns = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Slice {
            orders: self.host.address(),
            mirror: self.device.address(),
            blocks: self.host.address() + BLOCKS_AT as u64,
            done: self.device.address() + BLOCKS_AT as u64,
            shortest_ns: ns(shortest),
            longest_ns: ns(longest),
            number,
        }
    }

    /// Raises one of the orders to at least `number`.
    pub(crate) fn raise(&self, order: usize, number: u64) {
        if let Some(word) = self.word(order) {
            // Release: what the program wrote to host memory before the order is there for whoever obeys it.
            word.fetch_max(number, Ordering::Release);
        }
    }

    /// A number that tells of other memory.
    pub(crate) fn reached(&self, word: usize) -> u64 {
        // Acquire: what the device wrote before it is there for whoever sees the number.
        self.word(word).map_or(0, |word| word.load(Ordering::Acquire))
    }

    pub(crate) fn order(&self, order: usize) -> u64 {
        // Relaxed: a number that orders nothing.
        self.word(order).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// How many workgroups have at least `least` in this word.
    pub(crate) fn count(&self, word: usize, least: u64) -> u32 {
        let reached = |&workgroup: &u32| self.of_block(workgroup, word) >= least;
        u32::try_from((0..self.workgroups).filter(reached).count()).unwrap_or(u32::MAX)
    }

    pub(crate) fn first_inside(&self) -> Option<u32> {
        (0..self.workgroups)
            .find(|&block| self.of_block(block, header::ENTERED) > self.of_block(block, header::LEFT))
    }

    pub(crate) fn of_block(&self, workgroup: u32, word: usize) -> u64 {
        let at = BLOCKS_AT + workgroup as usize * header::BLOCK_BYTES + word;
        // Acquire: what the host does on account of the word comes after it.
        self.word(at).map_or(0, |word| word.load(Ordering::Acquire))
    }

    #[expect(unsafe_code, reason = "shares words with the device")]
    pub(crate) fn word(&self, at: usize) -> Option<&AtomicU64> {
        let base = self.host.host()?;
        let word = base.as_ptr().wrapping_add(at).cast::<u64>();
        // SAFETY: `at` is one of the offsets above, within the buffer that `create` sized for them; buffers
        // are aligned to pages and the offsets to 8. The memory lives as long as `self`, no mapping of the
        // buffer is handed out, and the device's accesses are whole words as an atomic's are.
        Some(unsafe { AtomicU64::from_ptr(word) })
    }
}
