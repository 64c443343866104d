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
    // They write one word, or one for each workgroup, or as many as they are told; the cases, which alone
    // launch them, give them buffers of as many words. Words that others change are read as volatile or atomic.
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
