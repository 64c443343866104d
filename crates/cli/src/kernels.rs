//! The command's kernels, as Rust functions, in CUDA and in WGSL.

use std::num::TryFromIntError;

use warpweft::{CodeFormat, ForeignCode, HostFunction, KernelCode, KernelContract, Param, Workgroup};

/// A file of kernels in the languages of devices; `cargo xtask codegen` made the PTX of the CUDA C beside it.
struct Sources {
    ptx: &'static str,
    wgsl: &'static str,
}

const QUEUED: Sources =
    Sources { ptx: include_str!("../kernels/queued.ptx"), wgsl: include_str!("../kernels/queued.wgsl") };
const GRAPH: Sources =
    Sources { ptx: include_str!("../kernels/graph.ptx"), wgsl: include_str!("../kernels/graph.wgsl") };
#[cfg(any(feature = "cuda", feature = "vulkan"))]
const RESIDENT: Sources =
    Sources { ptx: include_str!("../kernels/resident.ptx"), wgsl: include_str!("../kernels/resident.wgsl") };

/// Words that one workgroup of `pattern`, or of a kernel of a graph, takes care of.
pub(crate) const WORDS_PER_GROUP: u32 = 4096;

/// Workgroups that take care of so many bytes of words.
pub(crate) fn workgroups(size: u64) -> Result<u32, TryFromIntError> {
    u32::try_from((size / 4).div_ceil(WORDS_PER_GROUP.into()))
}

/// Writes words that depend on a seed and their position: into its first argument as many as the second says,
/// with the third as the seed.
pub(crate) fn pattern() -> KernelCode {
    let params = [Param::write(4).aligned(4), Param::scalar::<u64>(), Param::scalar::<u32>()];
    let body = |workgroup: &Workgroup<'_>| {
        let (words, seed) = (workgroup.slice::<u32>(0), workgroup.scalar::<u32>(2));
        let first = workgroup.index()[0] as usize * WORDS_PER_GROUP as usize;
        for index in first..words.len().min(first + WORDS_PER_GROUP as usize) {
            words.set(index, pattern_word(seed, index));
        }
    };
    queued(KernelContract::new("pattern", params).with_workgroup_size([256, 1, 1]), body)
}

/// Mixes seed and position so that a moved, missing or repeated word shows.
#[expect(clippy::cast_possible_truncation, reason = "the pattern uses the position's low bits")]
pub(crate) const fn pattern_word(seed: u32, index: usize) -> u32 {
    let mixed = (index as u32).wrapping_mul(0x9e37_79b1) ^ seed.wrapping_mul(0x85eb_ca6b);
    mixed ^ (mixed >> 15)
}

/// Copies as many words as its third argument says from the second to the first; each workgroup takes its share.
pub(crate) fn copy_words() -> KernelCode {
    let params = [Param::write(4).aligned(4), Param::read(4).aligned(4), Param::scalar::<u64>()];
    let body = |workgroup: &Workgroup<'_>| {
        let (to, from) = (workgroup.slice::<u32>(0), workgroup.slice::<u32>(1));
        let ([index, ..], [count, ..]) = (workgroup.index(), workgroup.workgroups());
        let words = usize::try_from(workgroup.scalar::<u64>(2)).unwrap_or(usize::MAX).min(to.len());
        let share = words.div_ceil(count as usize);
        let start = (index as usize * share).min(words);
        (start..(start + share).min(words)).for_each(|word| to.set(word, from.get(word)));
    };
    queued(KernelContract::new("copy_words", params).with_workgroup_size([1024, 1, 1]), body)
}

/// Does nothing, and says that it is brief.
pub(crate) fn empty() -> KernelCode {
    queued(KernelContract::new("empty", []).brief(), |_| {})
}

/// A resident that counts its turns in a word.
#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) fn beat() -> KernelCode {
    let contract = KernelContract::new("beat", [Param::read_write(4).aligned(4)]).resident();
    let function = HostFunction::resident(|workgroup| {
        let turns = workgroup.slice::<u32>(0);
        turns.set(0, turns.get(0).wrapping_add(1));
        warpweft::Progress::Busy
    });
    with_sources(KernelCode::new().with_function(contract.clone(), function), contract, &RESIDENT)
}

/// Multiplies as many words as its second argument says by the third.
pub(crate) fn scale() -> KernelCode {
    let params = [Param::read_write(4).aligned(4), Param::scalar::<u64>(), Param::scalar::<u32>()];
    let body = |workgroup: &Workgroup<'_>| {
        let (words, factor) = (workgroup.slice::<u32>(0), workgroup.scalar::<u32>(2));
        share(workgroup, 1).for_each(|word| words.set(word, words.get(word).wrapping_mul(factor)));
    };
    of_graphs(KernelContract::new("scale", params).with_workgroup_size([256, 1, 1]), body)
}

/// Adds as many words as its third argument says of the second to the first.
pub(crate) fn add() -> KernelCode {
    let params = [Param::read_write(4).aligned(4), Param::read(4).aligned(4), Param::scalar::<u64>()];
    let body = |workgroup: &Workgroup<'_>| {
        let (to, from) = (workgroup.slice::<u32>(0), workgroup.slice::<u32>(1));
        share(workgroup, 2).for_each(|word| to.set(word, to.get(word).wrapping_add(from.get(word))));
    };
    of_graphs(KernelContract::new("add", params).with_workgroup_size([256, 1, 1]), body)
}

/// Writes to each word of the first what that word of the second and its neighbours add up to; those beyond the ends
/// count as 0. The third says how many words there are.
pub(crate) fn stencil() -> KernelCode {
    let params = [Param::write(4).aligned(4), Param::read(4).aligned(4), Param::scalar::<u64>()];
    let body = |workgroup: &Workgroup<'_>| {
        let (to, from) = (workgroup.slice::<u32>(0), workgroup.slice::<u32>(1));
        let count = usize::try_from(workgroup.scalar::<u64>(2)).unwrap_or(usize::MAX);
        let at = |word: usize| if word < count { from.get(word) } else { 0 };
        for word in share(workgroup, 2) {
            let sides = at(word.wrapping_sub(1)).wrapping_add(at(word + 1));
            to.set(word, at(word).wrapping_add(sides));
        }
    };
    of_graphs(KernelContract::new("stencil", params).with_workgroup_size([256, 1, 1]), body)
}

/// Adds 1 to a word, and says that it is brief: the least that a node can do.
pub(crate) fn tick() -> KernelCode {
    let contract = KernelContract::new("tick", [Param::read_write(4).aligned(4)]).brief();
    of_graphs(contract, |workgroup| {
        let word = workgroup.slice::<u32>(0);
        word.set(0, word.get(0).wrapping_add(1));
    })
}

/// Writes to a word what three others add up to, and says that it is brief.
pub(crate) fn blend() -> KernelCode {
    let from = Param::read(4).aligned(4);
    let contract = KernelContract::new("blend", [Param::write(4).aligned(4), from, from, from]).brief();
    of_graphs(contract, |workgroup| {
        let from = |index| workgroup.slice::<u32>(index).get(0);
        let sum = from(1).wrapping_add(from(2)).wrapping_add(from(3));
        workgroup.slice::<u32>(0).set(0, sum);
    })
}

/// The words of a workgroup, of as many as argument `count` says.
fn share(workgroup: &Workgroup<'_>, count: usize) -> std::ops::Range<usize> {
    let count = usize::try_from(workgroup.scalar::<u64>(count)).unwrap_or(usize::MAX);
    let share = WORDS_PER_GROUP as usize;
    let first = (workgroup.index()[0] as usize * share).min(count);
    first..count.min(first + share)
}

fn queued(contract: KernelContract, body: fn(&Workgroup<'_>)) -> KernelCode {
    let code = KernelCode::new().with_function(contract.clone(), HostFunction::new(body));
    with_sources(code, contract, &QUEUED)
}

fn of_graphs(contract: KernelContract, body: fn(&Workgroup<'_>)) -> KernelCode {
    let code = KernelCode::new().with_function(contract.clone(), HostFunction::new(body));
    with_sources(code, contract, &GRAPH)
}

/// The code with the kernel of the contract's name in two more forms.
#[expect(unsafe_code, reason = "vouches for the kernels in CUDA C and WGSL")]
fn with_sources(code: KernelCode, contract: KernelContract, sources: &Sources) -> KernelCode {
    let text = |format, text: &str| ForeignCode::Source { format, text: text.to_owned() };
    let forms = [text(CodeFormat::Ptx, sources.ptx), text(CodeFormat::Wgsl, sources.wgsl)];
    // SAFETY: the kernels beside this crate have these parameters, in order; those in CUDA C run with any workgroup
    // size, and those in WGSL state the contract's. They touch the first word of a buffer, or as many words as they are
    // told; whoever launches them (the demo, the doctor, graphs, and `transfer::measure`) tells them the number that
    // the views hold.
    forms.into_iter().fold(code, |code, form| unsafe { code.with_foreign([contract.clone()], form) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_in_the_code_for_devices() {
        for (code, sources) in [
            (pattern(), QUEUED),
            (copy_words(), QUEUED),
            (empty(), QUEUED),
            (scale(), GRAPH),
            (add(), GRAPH),
            (stencil(), GRAPH),
            (tick(), GRAPH),
            (blend(), GRAPH),
            #[cfg(any(feature = "cuda", feature = "vulkan"))]
            (beat(), RESIDENT),
        ] {
            let name = &code.contracts()[0].name;
            assert!(sources.ptx.contains(&format!(".visible .entry {name}(")), "{name}");
            assert!(sources.wgsl.contains(&format!("fn {name}(")), "{name}");
            assert_eq!(code.contracts().len(), 1, "all forms have one contract");
        }
    }
}
