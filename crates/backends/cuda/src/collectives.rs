//! The family of collectives: NCCL, found when somebody first asks, and how a device becomes a rank.

use std::{
    any::Any,
    path::PathBuf,
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::Duration,
};

use nccl_rs::{Communicator, CommunicatorConfig, CommunicatorDesc, DataType, Nccl, UniqueId, Version};
use warpweft_core_types::{
    BufferDesc, BufferView, CollectiveCall, CollectiveError, CollectiveOp, Collectives, DType, Deadline,
    DriverError, NativeCommunicator, NativeCommunicatorDesc, NativeId, ReduceOp,
};
use warpweft_polled::KeepAlive;

use crate::{
    communicator::{CudaCommunicator, LIBRARY},
    context::Context,
    device::CudaDevice,
    memory::CudaBuffer,
    stream::{Event, Stream},
};

/// The library, loaded when it is first asked for and once for a backend: programs without collectives do not pay for
/// it.
#[derive(Debug)]
pub(crate) struct Library {
    named: Option<PathBuf>,
    /// It works with the driver that is in the usual place, and finds that by itself.
    driver_is_named: bool,
    loaded: OnceLock<Result<Nccl, String>>,
}

impl Library {
    pub(crate) const fn new(named: Option<PathBuf>, driver_is_named: bool) -> Self {
        Self { named, driver_is_named, loaded: OnceLock::new() }
    }

    pub(crate) fn is_there(&self) -> bool {
        self.loaded().is_ok()
    }

    pub(crate) fn get(&self) -> Result<&Nccl, CollectiveError> {
        self.loaded()
            .as_ref()
            .map_err(|missing| CollectiveError::Unavailable { library: LIBRARY, missing: missing.clone() })
    }

    fn loaded(&self) -> &Result<Nccl, String> {
        self.loaded.get_or_init(|| {
            let loaded = match &self.named {
                Some(path) => Nccl::load_from(path),
                None if self.driver_is_named => {
                    return Err(
                        "a driver that is named goes with an NCCL that is named, since NCCL looks for the \
                                driver by itself; name it in the configuration"
                            .to_owned(),
                    );
                }
                None => Nccl::load(),
            };
            loaded.map_err(|error| error.to_string())
        })
    }
}

/// NCCL's type for elements that are reduced.
pub(crate) const fn data_type(dtype: DType) -> Option<DataType> {
    Some(match dtype {
        DType::F64 => DataType::F64,
        DType::F32 => DataType::F32,
        DType::F16 => DataType::F16,
        DType::Bf16 => DataType::Bf16,
        DType::F8E4m3 => DataType::F8E4M3,
        DType::F8E5m2 => DataType::F8E5M2,
        DType::I64 => DataType::I64,
        DType::I32 => DataType::I32,
        DType::I8 => DataType::I8,
        DType::U64 => DataType::U64,
        DType::U32 => DataType::U32,
        DType::U8 => DataType::U8,
        _ => return None,
    })
}

/// Whether NCCL of this version, on devices of this capability, reduces elements of a type in this way.
pub(crate) fn reduces(op: ReduceOp, dtype: DType, version: Version, capability: (u32, u32)) -> bool {
    /// Small floats are reduced from this generation on.
    const SMALL_FLOATS: (Version, (u32, u32)) = (Version::new(2, 24, 0), (9, 0));
    let knows_op = !matches!(op, ReduceOp::And | ReduceOp::Or | ReduceOp::Xor);
    let is_small = matches!(dtype, DType::F8E4m3 | DType::F8E5m2);
    let knows_type = data_type(dtype).is_some()
        && (!is_small || version >= SMALL_FLOATS.0 && capability >= SMALL_FLOATS.1);
    knows_op && knows_type && op.is_defined_for(dtype)
}

impl Collectives for CudaDevice {
    fn library(&self) -> Result<String, CollectiveError> {
        Ok(format!("{LIBRARY} {}", self.nccl()?.version()))
    }

    /// What is only moved is moved as bytes where NCCL has no such type, so that it does that to all.
    fn does(&self, op: CollectiveOp, dtype: DType) -> bool {
        let Ok(nccl) = self.nccl() else { return false };
        op.reduction().is_none_or(|op| reduces(op, dtype, nccl.version(), self.capability()))
    }

    fn create_id(&self) -> Result<NativeId, CollectiveError> {
        let id = self.nccl()?.unique_id().map_err(|error| self.refused(error))?;
        Ok(NativeId(id.to_bytes().to_vec()))
    }

    fn join(
        &self,
        desc: &NativeCommunicatorDesc,
        deadline: Deadline,
    ) -> Result<Arc<dyn NativeCommunicator>, CollectiveError> {
        let within = deadline.remaining();
        let late = || CollectiveError::TimedOut { what: "joining the other ranks", after: within };
        let joining = Joining::new(self, desc, deadline)?;
        // Waiting for other ranks has no end of its own, and NCCL cannot be told to stop. The thread is left behind then,
        // and gives back what it made.
        let (send, receive) = mpsc::sync_channel(1);
        let work = move || {
            let joined = joining.run();
            // Nobody listens if it took too long.
            let _late = send.send(joined);
        };
        let no_thread = |_| CollectiveError::Invalid("no thread could be started to join".to_owned());
        thread::Builder::new().name("cuda/join".to_owned()).spawn(work).map_err(no_thread)?;
        let joined = receive.recv_timeout(within).map_err(|_| late())?;
        joined.map(|communicator| communicator as Arc<dyn NativeCommunicator>)
    }
}

/// A rank to be made.
struct Joining {
    device: Arc<CudaDevice>,
    nccl: Nccl,
    id: UniqueId,
    rank: u32,
    size: u32,
    config: CommunicatorConfig,
    deadline: Deadline,
}

/// How long a call waits for another thread that uses the communicator.
const PATIENCE: Duration = Duration::from_secs(10);

/// The most thread blocks that every version can be told; it takes no more than the second by itself.
const MOST_BLOCKS: (u32, u32) = (32, 64);

impl Joining {
    fn new(
        device: &CudaDevice,
        desc: &NativeCommunicatorDesc,
        deadline: Deadline,
    ) -> Result<Self, CollectiveError> {
        let nccl = device.nccl()?.clone();
        let owner = device.handle().map_err(CollectiveError::Failed)?;
        let invalid = |reason: &str| CollectiveError::Invalid(reason.to_owned());
        if let Some(failure) = device.surroundings().0.failure() {
            return Err(CollectiveError::Failed(failure));
        }
        let id = <[u8; UniqueId::BYTES]>::try_from(desc.id.0.as_slice());
        let id = id.map_err(|_| invalid("the id was not made by NCCL"))?;
        if desc.rank >= desc.size {
            return Err(invalid("the rank is not less than their number"));
        }
        // NCCL's kernels need no residents to make room: they are launched like others, and take what is free.
        let mut config = CommunicatorConfig::new().blocking(true).patience(PATIENCE);
        match desc.multiprocessors {
            Some(0) => return Err(invalid("collectives need a multiprocessor at least")),
            Some(limit) if limit < MOST_BLOCKS.1 => {
                let blocks = u8::try_from(limit.min(MOST_BLOCKS.0)).unwrap_or(u8::MAX);
                config = config.max_ctas(blocks);
            }
            _ => {}
        }
        let (id, rank, size) = (UniqueId::from_bytes(id), desc.rank, desc.size);
        Ok(Self { device: owner, nccl, id, rank, size, config, deadline })
    }

    /// Makes the rank and connects it. Residents hurry meanwhile, since NCCL loads code. No exclusive section: this waits
    /// for other ranks, which may want sections of their own.
    fn run(self) -> Result<Arc<CudaCommunicator>, CollectiveError> {
        let (context, ..) = self.device.surroundings();
        let _hurried = context.cold.open();
        let context = Arc::clone(context);
        let desc = CommunicatorDesc::new(self.id, self.rank, self.size)
            .entered_by(move || {
                let entered = Context::enter_for_long(&context).map_err(|error| error.to_string())?;
                Ok(Box::new(entered) as Box<dyn Any>)
            })
            .within(self.deadline.remaining())
            .config(self.config.clone());
        let made = Communicator::init(&self.nccl, &desc).map_err(|error| self.device.refused(error))?;
        let communicator = CudaCommunicator::new(&self.device, made);
        self.connect(&communicator)?;
        Ok(communicator)
    }

    /// Makes the first calls: NCCL connects ranks and loads kernels when a call first needs them, unless a variable of the
    /// environment says otherwise, which a library cannot set in a program with threads.
    fn connect(&self, communicator: &Arc<CudaCommunicator>) -> Result<(), CollectiveError> {
        /// Up to this size algorithms change; what comes beyond is what this size is.
        const LARGEST: u64 = 8 << 20;
        const SIZES: [u64; 4] = [8, 64 << 10, 1 << 20, LARGEST];
        const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
        let (context, ..) = self.device.surroundings();
        let driver = |error: DriverError| CollectiveError::Failed(context.judge(error));
        let invalid = |what: &dyn ToString| CollectiveError::Invalid(what.to_string());
        let ranks = u64::from(self.size);
        let each = (LARGEST / ranks / 256 * 256).max(256);
        let scratch = self.device.arena().allocate(&BufferDesc::device(each * ranks));
        let scratch: CudaBuffer = scratch.map_err(|error| invalid(&error))?;
        let scratch = BufferView::whole(Arc::new(scratch));
        let (stream, event) =
            (Stream::create(context).map_err(driver)?, Event::create(context).map_err(driver)?);
        let mut keep = KeepAlive::default();
        let mut call = |op: CollectiveOp, dtype: DType, bytes: u64| {
            let part = (bytes / ranks / 256 * 256).max(256).min(each);
            let (all, own) = (scratch.slice(0..part * ranks), u64::from(self.rank) * part);
            let all = all.map_err(|error| invalid(&error))?;
            let own = all.slice(own..own + part).map_err(|error| invalid(&error))?;
            let (src, dst) = match op {
                CollectiveOp::AllGather => (Some(&own), Some(&all)),
                CollectiveOp::ReduceScatter(_) => (Some(&all), Some(&own)),
                CollectiveOp::Reduce { root, .. } if root != self.rank => (Some(&all), None),
                CollectiveOp::Broadcast { root } if root != self.rank => (None, Some(&all)),
                _ => (Some(&all), Some(&all)),
            };
            let call = CollectiveCall::new(op, dtype, (self.rank, self.size), src, dst);
            let call = call.map_err(|error| invalid(&error))?;
            communicator.try_first(&call, &stream, &mut keep).map_err(|error| self.device.refused(error))
        };
        for bytes in SIZES {
            let sum = ReduceOp::Sum;
            for op in [
                CollectiveOp::AllReduce(sum),
                CollectiveOp::ReduceScatter(sum),
                CollectiveOp::Reduce { op: sum, root: 0 },
                CollectiveOp::AllGather,
                CollectiveOp::Broadcast { root: 0 },
            ] {
                call(op, DType::F32, bytes)?;
            }
        }
        for (op, dtype) in [ReduceOp::Sum, ReduceOp::Max]
            .into_iter()
            .flat_map(|op| TYPES.map(|dtype| (op, dtype)))
            .filter(|pair| *pair != (ReduceOp::Sum, DType::F32))
        {
            call(CollectiveOp::AllReduce(op), dtype, 8)?;
            call(CollectiveOp::ReduceScatter(op), dtype, 8)?;
        }
        let pairs = communicator.try_pairs(&scratch, each, &stream);
        pairs.map_err(|error| self.device.refused(error))?;
        let _current = context.enter().map_err(driver)?;
        event.record(&stream).map_err(driver)?;
        match event.wait(self.deadline.remaining()).map_err(driver)? {
            true => Ok(()),
            false => {
                let late = CollectiveError::TimedOut { what: "connecting the ranks", after: Duration::ZERO };
                // The work has to end before what it uses goes.
                communicator.give_up();
                if !event.wait(PATIENCE).map_err(driver)? {
                    std::mem::forget((scratch, keep));
                }
                Err(late)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_are_those_of_the_library() {
        let check = |op: ReduceOp, minor, capability, expected: usize| {
            let version = Version::new(2, minor, 0);
            let count = DType::ALL.iter().filter(|dtype| reduces(op, **dtype, version, capability)).count();
            assert_eq!(count, expected, "{op} in 2.{minor} on {capability:?}");
        };
        for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Avg, ReduceOp::PremulSum(2.0)] {
            check(op, 28, (9, 0), 12);
            check(op, 28, (8, 9), 10);
            check(op, 23, (9, 0), 10);
        }
        check(ReduceOp::Xor, 28, (9, 0), 0);
        check(ReduceOp::And, 28, (9, 0), 0);
    }
}
