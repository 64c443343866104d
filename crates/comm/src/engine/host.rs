//! The engine of host devices on one host: memory that all ranks map.
//!
//! A call in a queue is a kernel, a Rust function that does this rank's part. A call that is waited for, with operands
//! that the host can address, is done by the thread that waits.

use std::{
    collections::HashMap,
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use warpweft_bootstrap::{Group, GroupError};
use warpweft_core_types::{
    Access, Arg, BufferView, CollectiveCall, CollectiveError, CollectiveFailure, CollectiveOp, DType,
    Deadline, Device, Failure, HostFunction, Kernel, KernelCode, KernelContract, Launch, Op, OwnedOp, Param,
    Workgroup,
};
use warpweft_host_collectives::{HostCall, HostCommunicator, HostConfig, HostError, HostFailure, Operand};

use super::{Engine, EngineKind, are_mapped};
use crate::CommError;

/// Words of a kernel's arguments that describe one call.
const WORDS: usize = 4;

/// What a kernel does to each of its operands, in order; kernels are loaded once for each such list.
type Shape = SmallVec<[Access; 4]>;

#[derive(Debug)]
pub(crate) struct HostEngine {
    communicator: Arc<HostCommunicator>,
    device: Arc<dyn Device>,
    kernels: Mutex<HashMap<Shape, Arc<dyn Kernel>>>,
    /// What a call in a queue may take.
    timeout: Duration,
}

/// One call as a kernel is told of it. Its operands are the kernel's next ones.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Told {
    op: CollectiveOp,
    dtype: DType,
    operands: Operands,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Operands {
    Src,
    Dst,
    Both,
    /// One that holds both: all of it is the source, and the part of this length from `offset` on the destination.
    DstWithin {
        offset: u64,
        size: u64,
    },
    /// The other way.
    SrcWithin {
        offset: u64,
        size: u64,
    },
}

impl HostEngine {
    pub(crate) fn new(
        group: &Arc<Group>,
        device: &Arc<dyn Device>,
        timeout: Duration,
        deadline: Deadline,
    ) -> Result<Self, CommError> {
        let joined = HostCommunicator::join(Arc::clone(group), &HostConfig::default(), deadline);
        let communicator = joined.map_err(|error| match error {
            HostError::Group(error) => CommError::from(error),
            error => CommError::NoEngine { reason: chain(&error) },
        })?;
        Ok(Self {
            communicator: Arc::new(communicator),
            device: Arc::clone(device),
            kernels: Mutex::default(),
            timeout,
        })
    }

    /// The kernel for operands that are used like this.
    fn kernel(&self, shape: &Shape, calls: usize) -> Result<Arc<dyn Kernel>, CommError> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(shape) {
            return Ok(Arc::clone(kernel));
        }
        let operands = shape.iter().map(|access| match access {
            Access::Read => Param::read(1),
            Access::Write => Param::write(1),
            Access::ReadWrite | Access::Accumulate => Param::read_write(1),
        });
        // A list may stand for different numbers of calls, and each call has so many words at most.
        let words = std::iter::repeat_n(Param::scalar::<u64>(), WORDS * shape.len().max(calls));
        let contract = KernelContract::new("collective", operands.chain(words).collect::<Vec<_>>());
        let (communicator, timeout, operands) = (Arc::clone(&self.communicator), self.timeout, shape.len());
        let body = move |workgroup: &Workgroup<'_>| {
            run(&communicator, workgroup, operands, Deadline::within(timeout)).map_err(Arc::new)
        };
        let code = KernelCode::new().with_function(contract, HostFunction::fallible(body));
        let kernel = self.device.load(&code)?.kernel("collective")?;
        kernels.insert(shape.clone(), Arc::clone(&kernel));
        Ok(kernel)
    }
}

impl HostEngine {
    /// A failure as all ranks are told of it.
    fn of_rank(&self, failure: &Failure) -> CollectiveFailure {
        match failure {
            Failure::Collective(failure) => failure.clone(),
            other => CollectiveFailure::Aborted { rank: self.communicator.rank(), reason: other.to_string() },
        }
    }

    fn is_own(&self, kernel: &Arc<dyn Kernel>) -> bool {
        let kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.values().any(|own| Arc::ptr_eq(own, kernel))
    }
}

impl Engine for HostEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Host
    }

    fn does(&self, _op: CollectiveOp, _dtype: DType) -> bool {
        true
    }

    /// Kernels meet those of other ranks in the order in which they run.
    fn needs_order(&self) -> bool {
        true
    }

    fn with_ops(
        &self,
        calls: &[CollectiveCall<'_>],
        visit: &mut dyn FnMut(&[Op<'_>]) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let mut shape = Shape::new();
        let mut views: SmallVec<[&BufferView; 4]> = SmallVec::new();
        let mut words: SmallVec<[[u8; 8]; 8]> = SmallVec::new();
        for call in calls {
            let operands = Operands::of(call, &mut |view, access| {
                views.push(view);
                shape.push(access);
            });
            let told = Told { op: call.op(), dtype: call.dtype(), operands };
            let mut bytes = [0; WORDS * 8];
            if postcard::to_slice(&told, &mut bytes).is_err() {
                return Err(self.cannot("a call that takes so many words to tell".to_owned()));
            }
            words.extend(bytes.as_chunks::<8>().0.iter().copied());
        }
        let kernel = self.kernel(&shape, calls.len())?;
        words.resize(WORDS * shape.len().max(calls.len()), [0; 8]);
        let mut args: SmallVec<[Arg<'_>; 12]> = views.iter().map(|view| Arg::Buffer(view)).collect();
        args.extend(words.iter().map(|word| Arg::Scalar(word)));
        visit(&[Op::Launch(Launch::new(&kernel, [1, 1, 1], &args)?)])
    }

    fn calls_in(&self, node: &OwnedOp) -> usize {
        let own = node.launch().filter(|launch| self.is_own(launch.kernel()));
        own.map_or(0, |launch| launch.with(told_to).iter().filter(|told| !told.op.is_pairwise()).count())
    }

    fn runs(&self, calls: &[CollectiveCall<'_>]) -> bool {
        are_mapped(calls)
    }

    #[expect(unsafe_code, reason = "operands are memory that devices share with the host")]
    fn run(&self, calls: &[CollectiveCall<'_>], deadline: Deadline) -> Result<(), CommError> {
        let operand = |view: &BufferView| {
            let mapping = view.buffer().mapping()?;
            let start = NonNull::new(mapping.as_ptr().wrapping_add(usize::try_from(view.offset()).ok()?))?;
            Some(Operand::new(start, usize::try_from(view.size()).ok()?))
        };
        let mut told: SmallVec<[HostCall<'_>; 4]> = SmallVec::new();
        for call in calls {
            let mut operands = [None, None];
            for (operand_of, view) in operands.iter_mut().zip([call.src(), call.dst()]) {
                if let Some(view) = view {
                    let unmapped = || self.cannot("a call with such memory without a queue".to_owned());
                    *operand_of = Some(operand(view).ok_or_else(unmapped)?);
                }
            }
            let [src, dst] = operands;
            told.push(HostCall { op: call.op(), dtype: call.dtype(), src, dst, custom: None });
        }
        // SAFETY: the views lie within their buffers, which the calls keep alive while this runs; `CollectiveCall` checked
        // lengths and overlaps, as `Inner` did those between calls. What else touches them at the same time expects unspecified values (`Buffer`).
        let done = unsafe { self.communicator.run(&told, deadline) };
        done.map_err(told_of)
    }

    fn check(&self) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn abort(&self, failure: &Arc<Failure>, _deadline: Deadline) {
        self.communicator.abort(self.of_rank(failure));
    }

    /// Kernels in graphs keep it.
    fn leave(&self, failure: &Arc<Failure>) {
        self.communicator.leave(self.of_rank(failure));
    }
}

/// The calls of a launch of a kernel of ours.
fn told_to(launch: &Launch<'_>) -> SmallVec<[Told; 2]> {
    let words = launch.args().iter().filter_map(|arg| match arg {
        Arg::Scalar(bytes) => <[u8; 8]>::try_from(*bytes).ok(),
        Arg::Buffer(_) => None,
    });
    let words: SmallVec<[[u8; 8]; 2 * WORDS]> = words.collect();
    let mut operands = launch.args().len() - words.len();
    let mut calls = SmallVec::new();
    for words in words.chunks(WORDS) {
        // What is behind the last call is filled up.
        if operands == 0 {
            break;
        }
        let told: Told = postcard::from_bytes(words.as_flattened()).expect("the engine wrote it");
        operands = operands.saturating_sub(told.operands.count());
        calls.push(told);
    }
    calls
}

impl Operands {
    /// How many operands of a kernel they are.
    const fn count(self) -> usize {
        if matches!(self, Self::Both) { 2 } else { 1 }
    }

    /// Of a call, and what its kernel gets.
    fn of<'a>(call: &CollectiveCall<'a>, give: &mut dyn FnMut(&'a BufferView, Access)) -> Self {
        match (call.src(), call.dst()) {
            (Some(src), Some(dst)) if call.is_in_place() => {
                if src.size() >= dst.size() {
                    give(src, Access::ReadWrite);
                    Self::DstWithin { offset: distance(src, dst), size: dst.size() }
                } else {
                    give(dst, Access::ReadWrite);
                    Self::SrcWithin { offset: distance(dst, src), size: src.size() }
                }
            }
            (Some(src), Some(dst)) => {
                give(src, Access::Read);
                give(dst, Access::Write);
                Self::Both
            }
            (Some(src), None) => {
                give(src, Access::Read);
                Self::Src
            }
            (None, Some(dst)) => {
                give(dst, Access::Write);
                Self::Dst
            }
            (None, None) => Self::Src,
        }
    }
}

/// Where the smaller begins within the larger, of one memory.
fn distance(larger: &BufferView, smaller: &BufferView) -> u64 {
    let part = usize::try_from(smaller.size()).unwrap_or(usize::MAX);
    let is_it = |offset: &u64| {
        let part = larger.slice(*offset..*offset + smaller.size());
        part.is_ok_and(|part| part.place() == smaller.place())
    };
    // Several buffers may stand for one memory, so offsets alone do not tell.
    (0..larger.size()).step_by(part).find(is_it).unwrap_or_default()
}

/// Does this rank's part of the calls that a kernel was told of.
#[expect(unsafe_code, reason = "operands are memory of a kernel's")]
fn run(
    communicator: &HostCommunicator,
    workgroup: &Workgroup<'_>,
    operands: usize,
    deadline: Deadline,
) -> Result<(), Failure> {
    let operand = |index: usize| {
        let slice = workgroup.slice::<u8>(index);
        NonNull::new(slice.as_ptr()).map(|start| (start, slice.len()))
    };
    let mut calls: SmallVec<[HostCall<'_>; 4]> = SmallVec::new();
    let (mut next, mut word) = (0, operands);
    while next < operands {
        let mut bytes = [0; WORDS * 8];
        for (at, chunk) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *chunk = workgroup.scalar::<u64>(word + at).to_le_bytes();
        }
        word += WORDS;
        let told = postcard::from_bytes::<Told>(&bytes).expect("the engine wrote it");
        let mut take = || {
            next += 1;
            operand(next - 1).map(|(start, len)| Operand::new(start, len))
        };
        let (src, dst) = match told.operands {
            Operands::Src => (take(), None),
            Operands::Dst => (None, take()),
            Operands::Both => (take(), take()),
            Operands::DstWithin { offset, size } => {
                let whole = take();
                (whole, part(operand(next - 1), offset, size))
            }
            Operands::SrcWithin { offset, size } => {
                let whole = take();
                (part(operand(next - 1), offset, size), whole)
            }
        };
        calls.push(HostCall { op: told.op, dtype: told.dtype, src, dst, custom: None });
    }
    // SAFETY: the operands are the launch's, which keeps their memory; `CollectiveCall` checked lengths and overlaps
    // when the launch was made, and parts lie within their operands (`part`). What else touches them at the same time
    // expects unspecified values.
    unsafe { communicator.run(&calls, deadline) }.map_err(|failure| failure_of(failure, communicator.rank()))
}

fn part(whole: Option<(NonNull<u8>, usize)>, offset: u64, size: u64) -> Option<Operand> {
    let (start, len) = whole?;
    let (offset, size) = (usize::try_from(offset).ok()?, usize::try_from(size).ok()?);
    assert!(offset.checked_add(size)? <= len, "a part lies within its operand");
    Some(Operand::new(NonNull::new(start.as_ptr().wrapping_add(offset))?, size))
}

fn told_of(failure: HostFailure) -> CommError {
    match failure {
        HostFailure::Call(error) => CommError::Call(error),
        HostFailure::Collective(failure) => CommError::Failed(Arc::new(failure.into())),
        HostFailure::Forked { joined, here } => GroupError::Forked { member: joined, here }.into(),
        other => CommError::NoEngine { reason: other.to_string() },
    }
}

fn failure_of(failure: HostFailure, rank: u32) -> Failure {
    match failure {
        HostFailure::Collective(failure) => failure.into(),
        other => CollectiveFailure::Aborted { rank, reason: other.to_string() }.into(),
    }
}

/// An error and what caused it.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use warpweft_core_types::{Backend, BufferDesc, ErrorClass, Features, ReduceOp};
    use warpweft_host::HostBackend;

    use super::*;
    use crate::{CommConfig, Communicator};

    const PATIENCE: Duration = Duration::from_secs(30);

    // SAFETY: they are declared as POSIX has them; `pid_t` and `int` are 32 bits wide on Linux.
    #[expect(unsafe_code, reason = "Rust's library has no forks")]
    unsafe extern "C" {
        safe fn fork() -> i32;
        safe fn waitpid(process: i32, status: Option<&mut i32>, options: i32) -> i32;
        safe fn _exit(code: i32) -> !;
    }

    #[test]
    fn a_fork_is_told_so_and_ends_and_leaves_the_rank_alone() {
        let device = HostBackend::with_devices(1).unwrap().open(0, Features::empty()).unwrap();
        let comm =
            Communicator::create(Group::alone().unwrap(), &device, &CommConfig::default(), PATIENCE).unwrap();
        let view = BufferView::whole(device.allocate(&BufferDesc::host_visible(4)).unwrap());
        // Copies do not multiply.
        let double = || comm.all_reduce(ReduceOp::PremulSum(2.0), DType::F32, &view, &view)?.wait(PATIENCE);
        double().unwrap();
        let child = fork();
        if child == 0 {
            let is_told = |error: &CommError| {
                error.class() == ErrorClass::Usage && format!("{error:?}").contains("Forked")
            };
            let are_told =
                [double(), comm.barrier(PATIENCE)].iter().all(|end| end.as_ref().is_err_and(is_told));
            drop(comm);
            _exit(i32::from(!are_told));
        }
        let mut status = -1;
        assert_eq!(waitpid(child, Some(&mut status), 0), child);
        assert_eq!(status, 0, "the fork was not told, or panicked");
        double().unwrap();
    }
}
