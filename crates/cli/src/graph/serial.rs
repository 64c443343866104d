//! The same description carried out by one thread, one node after the other: what every other way must come to.

use super::{
    check::{Description, Span},
    file::Work,
    record::{reverse, sum},
};
use crate::kernels::pattern_word;

/// The bytes of all buffers.
pub(crate) struct Serial {
    pub(crate) buffers: Vec<Vec<u8>>,
}

impl Serial {
    /// Every buffer with bytes of its own, so that nothing goes unnoticed.
    pub(crate) fn new(description: &Description) -> Self {
        let fresh = |(seed, size): (u32, u64)| -> Vec<u8> {
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            let words = (0..size.div_ceil(4)).flat_map(|index| pattern_word(seed, index).to_le_bytes());
            words.take(size).collect()
        };
        let sizes = description.buffers.iter().map(|buffer| buffer.size);
        Self { buffers: (1..).zip(sizes).map(fresh).collect() }
    }

    /// Carries out every node once.
    pub(crate) fn run(&mut self, description: &Description) {
        description.nodes.iter().for_each(|node| self.work(&node.work));
    }

    fn work(&mut self, work: &Work<Span>) {
        let (src, dst) = work.operands();
        let src = src.map(|src| self.bytes(src).to_vec()).unwrap_or_default();
        let target = self.bytes(dst);
        match work {
            Work::Fill { byte, .. } => target.fill(*byte),
            Work::Copy { .. } => target.copy_from_slice(&src),
            Work::Scale { factor, .. } => {
                for word in target.as_chunks_mut().0 {
                    *word = u32::from_le_bytes(*word).wrapping_mul(*factor).to_le_bytes();
                }
            }
            Work::Add { .. } => {
                for (word, other) in target.as_chunks_mut().0.iter_mut().zip(src.as_chunks().0) {
                    let sum = u32::from_le_bytes(*word).wrapping_add(u32::from_le_bytes(*other));
                    *word = sum.to_le_bytes();
                }
            }
            Work::Stencil { .. } => {
                let words: Vec<u32> =
                    src.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
                let at = |index: usize| words.get(index).copied().unwrap_or(0);
                for (index, word) in target.as_chunks_mut().0.iter_mut().enumerate() {
                    let sides = at(index.wrapping_sub(1)).wrapping_add(at(index + 1));
                    *word = at(index).wrapping_add(sides).to_le_bytes();
                }
            }
            Work::Sum { .. } => target.copy_from_slice(&sum(&src)),
            Work::Reverse { .. } => target.copy_from_slice(&reverse(&src)),
        }
    }

    /// Ranges were checked when the description was made, so they are inside and fit a `usize`.
    fn bytes(&mut self, span: &Span) -> &mut [u8] {
        let place = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
        &mut self.buffers[span.buffer][place(span.range.start)..place(span.range.end)]
    }
}
