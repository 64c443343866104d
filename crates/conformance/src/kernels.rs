//! The suite's kernels, each in every form that some backend runs.

use warpweft_core_types::{
    CodeFormat, ForeignCode, HostFunction, KernelCode, KernelContract, Param, Progress, Workgroup,
};

/// One file of kernels in the languages of devices; `cargo xtask codegen` made the PTX of the CUDA C.
struct Sources {
    cuda: &'static str,
    ptx: &'static str,
    wgsl: &'static str,
}

const QUEUED: Sources = Sources {
    cuda: include_str!("../kernels/queued.cu"),
    ptx: include_str!("../kernels/queued.ptx"),
    wgsl: include_str!("../kernels/queued.wgsl"),
};

const RESIDENT: Sources = Sources {
    cuda: include_str!("../kernels/resident.cu"),
    ptx: include_str!("../kernels/resident.ptx"),
    wgsl: include_str!("../kernels/resident.wgsl"),
};

const MIXING: Sources = Sources {
    cuda: include_str!("../kernels/mixing.cu"),
    ptx: include_str!("../kernels/mixing.ptx"),
    wgsl: include_str!("../kernels/mixing.wgsl"),
};

fn queued(contract: KernelContract, body: fn(&Workgroup<'_>)) -> KernelCode {
    with_sources(
        &QUEUED,
        contract.clone(),
        KernelCode::new().with_function(contract, HostFunction::new(body)),
    )
}

fn resident(name: &str, params: &[Param], body: fn(&Workgroup<'_>) -> Progress) -> KernelCode {
    let contract = KernelContract::new(name, params).resident();
    let function = HostFunction::resident(body);
    with_sources(&RESIDENT, contract.clone(), KernelCode::new().with_function(contract, function))
}

/// The code with the kernel of the contract's name in three more forms.
#[expect(unsafe_code, reason = "vouches for the kernels in CUDA C and WGSL")]
fn with_sources(sources: &Sources, contract: KernelContract, code: KernelCode) -> KernelCode {
    let text = |format, text: &str| ForeignCode::Source { format, text: text.to_owned() };
    let forms = [
        text(CodeFormat::Ptx, sources.ptx),
        text(CodeFormat::CudaC, sources.cuda),
        text(CodeFormat::Wgsl, sources.wgsl),
    ];
    // SAFETY: the kernels have the parameters of their contracts, in order, and workgroups of one thread.
    // They write one word, or one for each workgroup, or as many as they are told, and read as many as they are told;
    // the cases, which alone launch them, give them buffers of as many words. Words that others change are read as volatile or atomic.
    forms.into_iter().fold(code, |code, form| unsafe { code.with_foreign([contract.clone()], form) })
}

/// Position of a workgroup counted along x, then y, then z.
fn linear(workgroup: &Workgroup<'_>) -> usize {
    let ([x, y, z], [width, height, _]) = (workgroup.index(), workgroup.workgroups());
    (x + width * (y + height * z)) as usize
}

/// Writes each workgroup's number plus a base into its word of a buffer.
pub(crate) fn number() -> KernelCode {
    let params = [Param::write(4).aligned(4), Param::scalar::<u32>()];
    queued(KernelContract::new("number", params), |workgroup| {
        let (words, position) = (workgroup.slice::<u32>(0), linear(workgroup));
        words.set(position, u32::try_from(position).unwrap_or(u32::MAX) + workgroup.scalar::<u32>(1));
    })
}

/// Adds one to as many words of the second buffer as the third argument says, and writes the sums into the
/// first.
pub(crate) fn increment() -> KernelCode {
    let params = [Param::write(4).aligned(4), Param::read(4).aligned(4), Param::scalar::<u32>()];
    queued(KernelContract::new("increment", params), |workgroup| {
        let (to, from) = (workgroup.slice::<u32>(0), workgroup.slice::<u32>(1));
        (0..workgroup.scalar::<u32>(2) as usize).for_each(|index| to.set(index, from.get(index) + 1));
    })
}

fn mixing(contract: KernelContract, body: fn(&Workgroup<'_>)) -> KernelCode {
    let code = KernelCode::new().with_function(contract.clone(), HostFunction::new(body));
    with_sources(&MIXING, contract, code)
}

/// What the mixing kernels make of the words they read.
pub(crate) fn hash(words: impl Iterator<Item = u32>, seed: u32) -> u32 {
    words.fold(seed, |hash, word| hash.wrapping_mul(16_777_619) ^ word)
}

/// Writes words that depend on all it reads: the first buffer, the second, their lengths in words, and a seed.
pub(crate) fn mix_write() -> KernelCode {
    let params = [Param::write(4).aligned(4), Param::read(4).aligned(4)];
    mixing(KernelContract::new("mix_write", mixing_params(params)), |workgroup| {
        let (to, seed) = (workgroup.slice::<u32>(0), workgroup.scalar::<u32>(4));
        let hash = hash(workgroup.slice::<u32>(1).iter(), seed);
        (0..to.len()).for_each(|index| to.set(index, hash.wrapping_add(word(index))));
    })
}

/// The same, and of what was there before.
pub(crate) fn mix_update() -> KernelCode {
    let params = [Param::read_write(4).aligned(4), Param::read(4).aligned(4)];
    mixing(KernelContract::new("mix_update", mixing_params(params)), |workgroup| {
        let (to, seed) = (workgroup.slice::<u32>(0), workgroup.scalar::<u32>(4));
        let hash = hash(workgroup.slice::<u32>(1).iter(), seed);
        let next = |index| to.get(index).wrapping_mul(31).wrapping_add(hash).wrapping_add(word(index));
        (0..to.len()).for_each(|index| to.set(index, next(index)));
    })
}

/// Adds to each word of a buffer in one step: its length in words, and a seed.
pub(crate) fn add_words() -> KernelCode {
    let params = [Param::accumulate(4).aligned(4), Param::scalar::<u32>(), Param::scalar::<u32>()];
    mixing(KernelContract::new("add_words", params), |workgroup| {
        let (sums, seed) = (workgroup.slice::<u32>(0), workgroup.scalar::<u32>(2));
        for index in 0..sums.len() {
            sums.fetch_add(index, seed.wrapping_add(word(index)));
        }
    })
}

fn mixing_params(buffers: [Param; 2]) -> Vec<Param> {
    buffers.into_iter().chain([Param::scalar::<u32>(); 3]).collect()
}

fn word(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// Does nothing, and says that it is brief.
pub(crate) fn empty() -> KernelCode {
    queued(KernelContract::new("empty", []).brief(), |_| {})
}

/// Runs until the word is not zero.
pub(crate) fn blocking() -> KernelCode {
    queued(KernelContract::new("blocking", [Param::read(4).aligned(4)]), |workgroup| {
        while workgroup.slice::<u32>(0).get(0) == 0 {
            std::thread::yield_now();
        }
    })
}

/// Fails in the way a kernel of this device can.
pub(crate) fn failing() -> KernelCode {
    queued(KernelContract::new("failing", [Param::write(4).aligned(4)]), |workgroup| {
        let words = workgroup.slice::<u32>(0);
        words.set(words.len(), 1);
    })
}

/// A resident that counts, in a word for each workgroup, until it is told to yield.
pub(crate) fn counter() -> KernelCode {
    resident("counter", &[Param::read_write(4).aligned(4)], |workgroup| {
        let (words, position) = (workgroup.slice::<u32>(0), linear(workgroup));
        while !workgroup.should_yield() {
            words.set(position, words.get(position).wrapping_add(1));
        }
        Progress::Busy
    })
}

/// A resident that answers each new request word with its successor, until a request of `u32::MAX`.
pub(crate) fn server() -> KernelCode {
    resident("server", &[Param::read(4).aligned(4), Param::write(4).aligned(4)], |workgroup| {
        let (request, answer) = (workgroup.slice::<u32>(0).get(0), workgroup.slice::<u32>(1));
        if request == u32::MAX {
            return Progress::Finished;
        }
        answer.set(0, request + 1);
        Progress::Idle
    })
}

/// A resident that keeps running, whatever it is told, until the word is not zero.
pub(crate) fn stubborn() -> KernelCode {
    resident("stubborn", &[Param::read(4).aligned(4)], |workgroup| {
        while workgroup.slice::<u32>(0).get(0) == 0 {
            std::thread::yield_now();
        }
        Progress::Busy
    })
}

/// A resident that fails in its first slice.
pub(crate) fn failing_resident() -> KernelCode {
    resident("failing_resident", &[Param::read(4).aligned(4)], |workgroup| {
        workgroup.slice::<u32>(0).get(usize::MAX);
        Progress::Busy
    })
}
