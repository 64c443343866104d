//! The suite's kernels, each in every form that some backend runs.

use warpweft_core_types::{HostFunction, KernelCode, KernelContract, Param, Progress, Workgroup};

fn host(name: &str, params: &[Param], body: fn(&Workgroup<'_>)) -> KernelCode {
    KernelCode::new().with_function(KernelContract::new(name, params), HostFunction::new(body))
}

fn resident(name: &str, params: &[Param], body: fn(&Workgroup<'_>) -> Progress) -> KernelCode {
    KernelCode::new()
        .with_function(KernelContract::new(name, params).resident(), HostFunction::resident(body))
}

/// Position of a workgroup counted along x, then y, then z.
fn linear(workgroup: &Workgroup<'_>) -> usize {
    let ([x, y, z], [width, height, _]) = (workgroup.index(), workgroup.workgroups());
    (x + width * (y + height * z)) as usize
}

/// Writes each workgroup's number plus a base into its word of a buffer.
pub(crate) fn number() -> KernelCode {
    host("number", &[Param::write(4), Param::scalar::<u32>()], |workgroup| {
        let (words, position) = (workgroup.slice::<u32>(0), linear(workgroup));
        words.set(position, u32::try_from(position).unwrap_or(u32::MAX) + workgroup.scalar::<u32>(1));
    })
}

/// Adds one to every word of the second buffer and writes the sums into the first.
pub(crate) fn increment() -> KernelCode {
    host("increment", &[Param::write(4), Param::read(4)], |workgroup| {
        let (to, from) = (workgroup.slice::<u32>(0), workgroup.slice::<u32>(1));
        (0..to.len().min(from.len())).for_each(|index| to.set(index, from.get(index) + 1));
    })
}

/// Does nothing, and says that it is brief.
pub(crate) fn empty() -> KernelCode {
    KernelCode::new().with_function(KernelContract::new("empty", []).brief(), HostFunction::new(|_| {}))
}

/// Runs until the word is not zero.
pub(crate) fn blocking() -> KernelCode {
    host("blocking", &[Param::read(4)], |workgroup| {
        while workgroup.slice::<u32>(0).get(0) == 0 {
            std::thread::yield_now();
        }
    })
}

/// Fails in the way a kernel of this device can.
pub(crate) fn failing() -> KernelCode {
    host("failing", &[Param::write(4)], |workgroup| {
        let words = workgroup.slice::<u32>(0);
        words.set(words.len(), 1);
    })
}

/// A resident that counts, in a word for each workgroup, until it is told to yield.
pub(crate) fn counter() -> KernelCode {
    resident("counter", &[Param::read_write(4)], |workgroup| {
        let (words, position) = (workgroup.slice::<u32>(0), linear(workgroup));
        while !workgroup.should_yield() {
            words.set(position, words.get(position).wrapping_add(1));
        }
        Progress::Busy
    })
}

/// A resident that answers each new request word with its successor, until a request of `u32::MAX`.
pub(crate) fn server() -> KernelCode {
    resident("server", &[Param::read(4), Param::write(4)], |workgroup| {
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
    resident("stubborn", &[Param::read(4)], |workgroup| {
        while workgroup.slice::<u32>(0).get(0) == 0 {
            std::thread::yield_now();
        }
        Progress::Busy
    })
}

/// A resident that fails in its first slice.
pub(crate) fn failing_resident() -> KernelCode {
    resident("failing_resident", &[Param::read(4)], |workgroup| {
        workgroup.slice::<u32>(0).get(usize::MAX);
        Progress::Busy
    })
}
