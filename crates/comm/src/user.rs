//! Reductions of the user's own.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use warpweft_core_types::{
    Arg, BufferDesc, BufferView, CallError, CollectiveCall, CollectiveOp, CopyRegion, DType, Deadline,
    Device, Kernel, KernelCode, Launch, Op, Queue, QueueDesc, RangeError, ReduceOp, SemaphorePoint,
    Submission,
};
use warpweft_host_collectives::reduce;

use crate::{CommError, Communicator, Enqueued, error::unfinished};

/// A reduction of the user's: a kernel that makes one element of those of all ranks.
///
/// Its parameters are the ranks' elements, rank after rank, which it reads; the result, which it writes; the number of
/// elements of one rank; and the number of ranks, both `u32`. It is launched with one thread for each element at least,
/// and threads beyond the last element do nothing.
pub struct UserReduction {
    kernel: Arc<dyn Kernel>,
    device: Arc<dyn Device>,
    dtype: DType,
    /// Memory for the elements of all ranks. What is under way keeps it.
    gathered: Mutex<Option<BufferView>>,
}

impl UserReduction {
    /// Loads the kernel of this name on the device of a rank.
    ///
    /// # Errors
    ///
    /// What the device says of the code.
    pub fn load(
        device: &Arc<dyn Device>,
        code: &KernelCode,
        name: &str,
        dtype: DType,
    ) -> Result<Self, CommError> {
        let kernel = device.load(code)?.kernel(name)?;
        Ok(Self { kernel, device: Arc::clone(device), dtype, gathered: Mutex::default() })
    }

    /// The type of its elements.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Compares it with a reduction that is built in, bit by bit, over small whole numbers of that many ranks.
    ///
    /// # Errors
    ///
    /// [`CommError::WrongReduction`] naming the first element that differs; what the device says.
    pub fn check(&self, op: ReduceOp, ranks: u32, deadline: impl Into<Deadline>) -> Result<(), CommError> {
        /// More than one workgroup of most kernels, and no multiple of one.
        const ELEMENTS: u32 = 1237;
        let width = usize::try_from(self.dtype.size_bytes()).unwrap_or(1);
        let element = |rank: u32, place: u32| {
            let value = 1 + (place.wrapping_mul(31) ^ rank.wrapping_mul(17) ^ (place >> 3)) % 2;
            self.dtype.bits_of(value).to_le_bytes()[..width].to_vec()
        };
        let inputs: Vec<Vec<u8>> =
            (0..ranks).map(|rank| (0..ELEMENTS).flat_map(|place| element(rank, place)).collect()).collect();
        let mut expected = vec![0; ELEMENTS as usize * width];
        let slices: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        reduce::combine(op, self.dtype, &[], &slices, &mut expected);
        let found = self.run(&inputs.concat(), expected.len(), (ELEMENTS, ranks), deadline.into())?;
        let pairs = found.chunks(width).zip(expected.chunks(width));
        match pairs.enumerate().find(|(_, (found, expected))| found != expected) {
            None => Ok(()),
            Some((element, (found, expected))) => Err(CommError::WrongReduction {
                name: self.kernel.contract().name.clone(),
                element,
                found: format!("{found:02x?}"),
                expected: format!("{expected:02x?}"),
            }),
        }
    }

    /// Runs the kernel over these elements.
    fn run(
        &self,
        inputs: &[u8],
        size: usize,
        shape: (u32, u32),
        deadline: Deadline,
    ) -> Result<Vec<u8>, CommError> {
        let window = |bytes: usize| -> Result<BufferView, CommError> {
            Ok(BufferView::whole(self.device.allocate(&BufferDesc::host_visible(bytes as u64))?))
        };
        let memory = |bytes: usize| -> Result<BufferView, CommError> {
            Ok(BufferView::whole(self.device.allocate(&BufferDesc::device(bytes as u64))?))
        };
        let (given, taken) = (window(inputs.len())?, window(size)?);
        let (gathered, result) = (memory(inputs.len())?, memory(size)?);
        given.write(inputs).map_err(CallError::from)?;
        let queue = self.device.create_queue(&QueueDesc::default())?;
        let done = SemaphorePoint::new(&self.device.create_semaphore(0)?, 1);
        let up = Op::Copy(CopyRegion::new(&given, &gathered).map_err(CallError::from)?);
        let down = Op::Copy(CopyRegion::new(&result, &taken).map_err(CallError::from)?);
        self.with_launch(&gathered, &result, shape, |launch| {
            let ops = [up, Op::Launch(*launch), down];
            let signals = std::slice::from_ref(&done);
            queue.submit(&Submission { ops: &ops, signals, ..Submission::default() })?;
            Ok(())
        })?;
        done.wait(deadline).map_err(|error| unfinished(error, 0, self.kernel.contract().name.clone()))?;
        let mut found = vec![0; size];
        taken.read(&mut found).map_err(CallError::from)?;
        Ok(found)
    }

    fn with_launch<R>(
        &self,
        gathered: &BufferView,
        result: &BufferView,
        (elements, ranks): (u32, u32),
        visit: impl FnOnce(&Launch<'_>) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        let threads = u32::try_from(self.kernel.contract().workgroup_threads()).unwrap_or(u32::MAX).max(1);
        let values = [elements.to_le_bytes(), ranks.to_le_bytes()];
        let args =
            [Arg::Buffer(gathered), Arg::Buffer(result), Arg::Scalar(&values[0]), Arg::Scalar(&values[1])];
        visit(&Launch::new(&self.kernel, [elements.div_ceil(threads), 1, 1], &args)?)
    }

    /// Memory for so many bytes.
    fn gathered(&self, size: u64) -> Result<BufferView, CommError> {
        let mut gathered = self.gathered.lock().unwrap_or_else(PoisonError::into_inner);
        match gathered.as_ref().filter(|view| view.size() >= size) {
            Some(view) => Ok(view.slice(0..size).map_err(CallError::from)?),
            None => {
                let view = BufferView::whole(self.device.allocate(&BufferDesc::device(size))?);
                Ok(gathered.insert(view).clone())
            }
        }
    }
}

impl fmt::Debug for UserReduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserReduction").field("kernel", &self.kernel).field("dtype", &self.dtype).finish()
    }
}

impl Communicator {
    /// Gives every rank what all ranks' elements reduce to by the user's own reduction, in a queue: the elements of all
    /// ranks are gathered, and the kernel runs behind that. In place if both views are the same.
    ///
    /// One queue at a time uses a reduction, since it has one piece of memory for what is gathered.
    ///
    /// # Errors
    ///
    /// [`CommError::Call`] for operands that do not fit; as [`Call::on`](crate::Call::on).
    pub fn all_reduce_with(
        &self,
        reduction: &UserReduction,
        src: &BufferView,
        dst: &BufferView,
        queue: &Arc<dyn Queue>,
    ) -> Result<Enqueued, CommError> {
        let (dtype, ranks) = (reduction.dtype, self.world_size());
        if src.size() != dst.size() {
            let error =
                RangeError::LengthMismatch { source_bytes: src.size(), destination_bytes: dst.size() };
            return Err(CallError::from(error).into());
        }
        let elements = src.size() / dtype.size_bytes();
        // The kernel is told of them in so many bits.
        let (Ok(elements), Some(size)) = (u32::try_from(elements), src.size().checked_mul(ranks.into()))
        else {
            let what =
                format!("a reduction of the user's own of {elements} elements, since it counts with 32 bits");
            return Err(CommError::Unsupported { what, engines: "none that does".to_owned() });
        };
        let gathered = reduction.gathered(size).map_err(|error| self.inner.told(error))?;
        let place = (self.rank(), ranks);
        let call = CollectiveCall::new(CollectiveOp::AllGather, dtype, place, Some(src), Some(&gathered))?;
        reduction.with_launch(&gathered, dst, (elements, ranks), |launch| {
            self.inner.enqueue_then(&[call], queue, &[Op::Launch(*launch)])
        })
    }
}
