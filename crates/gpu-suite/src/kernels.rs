//! The suite's kernels and their contracts.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use anyhow::Result;
use warpweft_core_types::{
    CodeFormat, Device, ForeignCode, Kernel, KernelCode, KernelContract, Module, Param,
};

/// All kernels but `second`, as PTX: a machine with a driver alone runs them.
pub(crate) const PTX: &str = include_str!("../kernels/suite.ptx");

/// Kernels of graphs, as PTX.
pub(crate) const GRAPH_PTX: &str = include_str!("../kernels/graph.ptx");

/// Bytes of a chunk of `work`, and its workgroups.
pub(crate) const CHUNK_BYTES: u64 = 8 << 20;
pub(crate) const CHUNK_WORKGROUPS: u32 = 2048;
/// Threads of each.
pub(crate) const CHUNK_THREADS: u32 = 256;

/// Kernels for Vulkan devices.
const WGSL: &str = include_str!("../kernels/vulkan.wgsl");

/// The module of `second`, and the number in it.
const SECOND: &str = include_str!("../kernels/second.ptx");
const SECOND_STORES: &str = "1234567891";

/// Bytes of what `beat` keeps: a count, a time, and 4,096 gaps.
pub(crate) const GAPS_BYTES: u64 = 8 * (2 + 4096);

/// Workgroups that `beat` has counters for.
pub(crate) const BEAT_WORKGROUPS: u32 = 128;

pub(crate) fn contracts() -> Vec<KernelContract> {
    vec![
        KernelContract::new("nothing", []),
        KernelContract::new("step", [Param::read_write(4), Param::scalar::<u32>()]),
        KernelContract::new("hold", [Param::read_write(4), Param::scalar::<u64>()]),
        KernelContract::new("fault", [Param::write(4)]),
        KernelContract::new(
            "beat",
            [
                Param::read_write(8 * u64::from(BEAT_WORKGROUPS)),
                Param::write(8),
                Param::read_write(GAPS_BYTES),
            ],
        )
        .with_workgroup_size([32, 1, 1])
        .resident(),
        KernelContract::new("sliced_answer", [Param::read(64), Param::write(16), Param::read_write(4)])
            .with_workgroup_size([32, 1, 1])
            .resident(),
        KernelContract::new("brief", [Param::read_write(4)]).resident(),
        KernelContract::new("stray", [Param::write(4), Param::scalar::<u64>()]),
    ]
}

/// The kernels of graphs, which a device without the others can load.
pub(crate) fn graph() -> KernelCode {
    foreign(graph_contracts(), ptx(GRAPH_PTX))
}

fn graph_contracts() -> Vec<KernelContract> {
    let (word, read) = (|| Param::read_write(4), || Param::read(4));
    vec![
        KernelContract::new("visit", [Param::write(4), read()]),
        KernelContract::new("visit_three", [Param::write(4), read(), read(), read()]),
        KernelContract::new("step", [word(), Param::scalar::<u32>()]),
        KernelContract::new("trap", [Param::write(4)]),
        KernelContract::new("linger", [word(), Param::scalar::<u32>(), Param::scalar::<u64>()]),
        KernelContract::new("work", [Param::read_write(CHUNK_BYTES), Param::scalar::<u32>()])
            .with_workgroup_size([CHUNK_THREADS, 1, 1]),
    ]
}

/// What `work` makes of a word.
pub(crate) fn worked(word: u32, rounds: u32) -> u32 {
    (0..rounds).fold(word, |word, _| (word ^ (word >> 7)).wrapping_mul(1_664_525).wrapping_add(1_013_904_223))
}

/// A kernel that runs with 128 threads at most.
pub(crate) fn narrow() -> KernelContract {
    KernelContract::new("narrow", [Param::write(4)])
}

/// A kernel whose threads keep all words at once.
pub(crate) fn hungry() -> KernelContract {
    KernelContract::new("hungry", [Param::read_write(HUNGRY_BYTES)])
}

/// Bytes that `hungry` turns around: 96 words.
pub(crate) const HUNGRY_BYTES: u64 = 4 * 96;

/// Code of the suite's own module.
pub(crate) fn code(contracts: Vec<KernelContract>) -> KernelCode {
    foreign(contracts, ptx(PTX))
}

/// Code for Vulkan devices.
pub(crate) fn vulkan() -> KernelCode {
    let word = || Param::write(4).aligned(4);
    let contracts = vec![
        KernelContract::new("nothing", []),
        KernelContract::new("spin", [word(), Param::scalar::<u32>()]),
        KernelContract::new("mark", [word(), Param::scalar::<u32>()]),
        // As many words as there are workgroups, and as many pages.
        KernelContract::new("gather", [word(), Param::read(4096).aligned(4)]),
    ];
    foreign(contracts, ForeignCode::Source { format: CodeFormat::Wgsl, text: WGSL.to_owned() })
}

/// A text of PTX as a form of code.
pub(crate) fn ptx(text: &str) -> ForeignCode {
    ForeignCode::Source { format: CodeFormat::Ptx, text: text.to_owned() }
}

/// The PTX of `second` with another number.
pub(crate) fn second(number: u32) -> String {
    SECOND.replace(SECOND_STORES, &number.to_string())
}

/// The PTX of a `second` that this process has not seen before, and its number.
pub(crate) fn unseen() -> (String, u32) {
    static NEXT: AtomicU32 = AtomicU32::new(1_000_000);
    // Relaxed: nothing but the number is shared.
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    (second(number), number)
}

pub(crate) fn second_contract() -> KernelContract {
    KernelContract::new("second", [Param::write(4)])
}

/// The code with its contracts.
#[expect(unsafe_code, reason = "vouches for the kernels above")]
pub(crate) fn foreign(contracts: Vec<KernelContract>, code: ForeignCode) -> KernelCode {
    // SAFETY: the contracts are those beside the kernels, with their parameters in order, or such as the
    // device refuses to load. The kernels mask or bound their indices to the least sizes of the contracts,
    // whatever the scalars and memory are; `gather` is launched by one check, on as many pages as workgroups.
    unsafe { KernelCode::new().with_foreign(contracts, code) }
}

/// The loaded kernels of one device.
#[derive(Debug)]
pub(crate) struct Kernels(Arc<dyn Module>);

impl Kernels {
    pub(crate) fn load(device: &dyn Device, code: &KernelCode) -> Result<Self> {
        Ok(Self(device.load(code)?))
    }

    pub(crate) fn get(&self, name: &str) -> Result<Arc<dyn Kernel>> {
        Ok(self.0.kernel(name)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_in_the_compiled_code() {
        for contract in contracts().into_iter().chain([narrow(), hungry()]) {
            assert!(PTX.contains(&format!(".visible .entry {}(", contract.name)), "{}", contract.name);
        }
        for contract in graph_contracts() {
            assert!(GRAPH_PTX.contains(&format!(".visible .entry {}(", contract.name)), "{}", contract.name);
        }
    }

    #[test]
    fn each_second_module_differs_in_one_number() {
        assert_eq!(SECOND.matches(SECOND_STORES).count(), 1, "the compiler writes the number as it is");
        let (text, number) = unseen();
        assert!(text.contains(&format!("{number};")) && text != SECOND, "{text}");
        assert_ne!(unseen().0, text);
    }
}
