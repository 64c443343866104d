//! How an operation enters a stream, and the parameters of a launch.

use std::{ffi::c_void, ptr};

use cudarc::driver::sys::{CUDA_KERNEL_NODE_PARAMS, CUdeviceptr};
use smallvec::SmallVec;
use warpweft_core_types::{Arg, BufferView, DriverError, FillRegion, Launch, Op};

use crate::{
    clock::Clock, context::Context, graph::CudaGraph, header::Slice, memory::address_of, module::CudaKernel,
    stream::Stream,
};

/// Puts an operation at the end of `stream`, whose context is current. `Err(None)` if an operand is not ours.
///
/// # Safety
///
/// - `check_op` has let the operation through for this context.
/// - Whatever it names lives until the stream is past it.
#[expect(unsafe_code, reason = "enqueues work on memory of the caller's")]
pub(crate) unsafe fn enqueue(
    op: &Op<'_>,
    context: &Context,
    stream: &Stream,
    clock: &Clock,
) -> Result<(), Option<DriverError>> {
    match op {
        // SAFETY: the caller's duties, here and below; `CopyRegion` checked that both views have one length and
        // share no bytes.
        Op::Copy(region) => unsafe { copy(context, stream, region.src(), region.dst()) },
        // SAFETY: as above.
        Op::Fill(region) => unsafe { fill(context, stream, region) },
        // SAFETY: as above.
        Op::Launch(launch) => unsafe { enqueue_launch(context, stream, launch, None) },
        Op::Timestamp(region) => {
            let to = address_of(region.dst()).ok_or(None)?;
            // SAFETY: as above; the region is eight bytes at a multiple of eight of a buffer, and buffers start at
            // multiples of `ALIGNMENT`.
            unsafe { clock.stamp(context, stream, to) }.map_err(Some)
        }
        Op::Replay(graph) => {
            let own = CudaGraph::of(graph).ok_or(None)?;
            // SAFETY: as above; the operations are those of a value that the graph was prepared for.
            unsafe { own.launch(graph.ops(), stream) }
        }
        _ => Err(None),
    }
}

/// Copies between any two places: with unified addresses the driver knows what they are.
///
/// # Safety
///
/// - The views have one length, share no bytes and are within the device's reach.
/// - Their buffers live until the stream is past the copy.
#[expect(unsafe_code, reason = "calls the driver")]
unsafe fn copy(
    context: &Context,
    stream: &Stream,
    src: &BufferView,
    dst: &BufferView,
) -> Result<(), Option<DriverError>> {
    let (from, to) = (address_of(src).ok_or(None)?, address_of(dst).ok_or(None)?);
    let size = usize::try_from(src.size()).map_err(|_| None)?;
    // SAFETY: both views lie within their buffers (`BufferView` checked it); the rest are the caller's duties.
    unsafe { context.driver.memcpy_async(to, from, size, stream.raw()) }.map_err(Some)
}

/// A fill as the driver has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pattern {
    Byte(u8),
    /// At a multiple of four.
    Word(u32),
    /// Four bytes at an odd place: each has to be written by itself, with the stride of a word.
    Bytes([u8; 4]),
}

impl Pattern {
    pub(crate) fn of(region: &FillRegion<'_>, address: CUdeviceptr) -> Self {
        let bytes = region.pattern().to_ne_bytes();
        if bytes == [bytes[0]; 4] {
            Self::Byte(bytes[0])
        } else if address.is_multiple_of(4) {
            Self::Word(region.pattern())
        } else {
            Self::Bytes(bytes)
        }
    }
}

/// Fills a view.
///
/// # Safety
///
/// - The view is within the device's reach, and its buffer lives until the stream is past the fill.
#[expect(unsafe_code, reason = "calls the driver")]
unsafe fn fill(
    context: &Context,
    stream: &Stream,
    region: &FillRegion<'_>,
) -> Result<(), Option<DriverError>> {
    let driver = &context.driver;
    let address = address_of(region.dst()).ok_or(None)?;
    let size = usize::try_from(region.dst().size()).map_err(|_| None)?;
    match Pattern::of(region, address) {
        // SAFETY: the view lies within its buffer (`BufferView` checked it); the rest are the caller's duties.
        Pattern::Byte(byte) => unsafe { driver.memset_d8_async(address, byte, size, stream.raw()) },
        // SAFETY: as above; the words are `size` bytes, since `FillRegion` checked that 4 divides it.
        Pattern::Word(word) => unsafe { driver.memset_d32_async(address, word, size / 4, stream.raw()) },
        Pattern::Bytes(bytes) => (0_u64..).zip(bytes).try_for_each(|(at, byte)| {
            // SAFETY: as above; column `at` of `size / 4` rows of 4 bytes lies within the view.
            unsafe { driver.memset_d2d8_async(address + at, 4, byte, 1, size / 4, stream.raw()) }
        }),
    }
    .map_err(Some)
}

/// What the driver reads the arguments of a launch from: an address for each buffer, and the values where the
/// launch has them.
#[derive(Debug)]
pub(crate) struct Parameters<'a> {
    addresses: SmallVec<[u64; 8]>,
    first: Option<&'a Slice>,
    args: &'a [Arg<'a>],
}

impl<'a> Parameters<'a> {
    /// `first`, if there is one, comes in front of the arguments. `None` if a buffer is not ours.
    pub(crate) fn of(launch: &Launch<'a>, first: Option<&'a Slice>) -> Option<Self> {
        let mut addresses = SmallVec::new();
        for arg in launch.args() {
            if let Arg::Buffer(view) = arg {
                addresses.push(address_of(view)?);
            }
        }
        Some(Self { addresses, first, args: launch.args() })
    }

    /// Pointers to the values in order. They are good while `self` stays where it is.
    pub(crate) fn pointers(&self) -> SmallVec<[*mut c_void; 16]> {
        let mut addresses = self.addresses.iter();
        let value = |arg: &Arg<'_>| match arg {
            Arg::Buffer(_) => addresses.next().map_or(ptr::null(), |address| ptr::from_ref(address).cast()),
            Arg::Scalar(bytes) => bytes.as_ptr().cast::<c_void>(),
        };
        let first = self.first.into_iter().map(|slice| ptr::from_ref(slice).cast());
        first.chain(self.args.iter().map(value)).map(<*const c_void>::cast_mut).collect()
    }
}

/// Launches a kernel: with the slice of a resident, if it is one, and then each argument, a buffer as its address.
///
/// # Safety
///
/// - `check_launch` has let the launch through for this context.
/// - There is a slice if the kernel's contract says that it is resident, and only then. The memory that it leads to
///   is within the device's reach.
/// - The buffers, the kernel and the slice's memory live until the stream is past the launch.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) unsafe fn enqueue_launch(
    context: &Context,
    stream: &Stream,
    launch: &Launch<'_>,
    slice: Option<&Slice>,
) -> Result<(), Option<DriverError>> {
    let kernel = CudaKernel::of(launch.kernel()).ok_or(None)?;
    let parameters = Parameters::of(launch, slice).ok_or(None)?;
    let mut pointers = parameters.pointers();
    let ([x, y, z], [block_x, block_y, block_z]) = (launch.workgroups(), kernel.workgroup_size());
    // SAFETY: the function is loaded in this context for as long as the kernel lives. The driver copies as
    // many bytes from each pointer as the code declares, and the code declares what the contract says
    // (`KernelCode::with_foreign`): an address for a buffer, and for a value the length that `Launch`
    // compared. The rest are the caller's duties.
    unsafe {
        context.driver.launch_kernel(
            kernel.function(),
            x,
            y,
            z,
            block_x,
            block_y,
            block_z,
            kernel.shared_bytes(),
            stream.raw(),
            pointers.as_mut_ptr(),
            ptr::null_mut(),
        )
    }
    .map_err(Some)
}

/// A launch as a node of a graph has it. The driver copies the arguments, so `pointers` may go after that.
pub(crate) fn kernel_node(
    launch: &Launch<'_>,
    kernel: &CudaKernel,
    pointers: &mut SmallVec<[*mut c_void; 16]>,
) -> CUDA_KERNEL_NODE_PARAMS {
    let ([x, y, z], [block_x, block_y, block_z]) = (launch.workgroups(), kernel.workgroup_size());
    CUDA_KERNEL_NODE_PARAMS {
        func: kernel.function(),
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: block_x,
        blockDimY: block_y,
        blockDimZ: block_z,
        sharedMemBytes: kernel.shared_bytes(),
        kernelParams: pointers.as_mut_ptr(),
        extra: ptr::null_mut(),
        kern: ptr::null_mut(),
        ctx: ptr::null_mut(),
    }
}
