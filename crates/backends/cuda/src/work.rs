//! One operation, borrowed from a submission of the caller's or from one that is held, and how it enters a
//! stream.

use std::{ffi::c_void, ptr, sync::Arc};

use smallvec::SmallVec;
use warpweft_core_types::{
    Access, Arg, BufferView, DriverError, Kernel, Launch, Op, OwnedArg, OwnedLaunch, OwnedOp, Param,
};

use crate::{context::Context, memory::address_of, module::CudaKernel, stream::Stream};

/// An operation.
#[derive(Debug)]
pub(crate) enum Work<'a> {
    Copy {
        src: &'a BufferView,
        dst: &'a BufferView,
    },
    Fill {
        dst: &'a BufferView,
        pattern: u32,
    },
    Launch {
        kernel: &'a Arc<dyn Kernel>,
        workgroups: [u32; 3],
        args: Args<'a>,
    },
    /// One that this backend was not written for.
    Unknown(&'static str),
}

/// The arguments of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Args<'a> {
    Borrowed(&'a [Arg<'a>]),
    Owned(&'a [OwnedArg]),
}

impl<'a> Args<'a> {
    fn len(self) -> usize {
        match self {
            Self::Borrowed(args) => args.len(),
            Self::Owned(args) => args.len(),
        }
    }

    fn at(self, index: usize) -> Arg<'a> {
        match self {
            Self::Borrowed(args) => args[index],
            Self::Owned(args) => match &args[index] {
                OwnedArg::Buffer(view) => Arg::Buffer(view),
                OwnedArg::Scalar(bytes) => Arg::Scalar(bytes),
            },
        }
    }

    pub(crate) fn buffers(self) -> impl Iterator<Item = &'a BufferView> {
        (0..self.len()).filter_map(move |index| match self.at(index) {
            Arg::Buffer(view) => Some(view),
            Arg::Scalar(_) => None,
        })
    }

    /// The buffers, each with what the kernel does to it.
    pub(crate) fn buffers_of(self, params: &[Param]) -> impl Iterator<Item = (&'a BufferView, Access)> {
        params.iter().enumerate().take(self.len()).filter_map(move |(index, param)| {
            match (self.at(index), param) {
                (Arg::Buffer(view), Param::Buffer { access, .. }) => Some((view, *access)),
                _ => None,
            }
        })
    }
}

impl<'a> From<&'a Op<'a>> for Work<'a> {
    fn from(op: &'a Op<'a>) -> Self {
        match op {
            Op::Copy(copy) => Self::Copy { src: copy.src(), dst: copy.dst() },
            Op::Fill(fill) => Self::Fill { dst: fill.dst(), pattern: fill.pattern() },
            Op::Launch(launch) => launch.into(),
            _ => Self::Unknown("of a newer version"),
        }
    }
}

impl<'a> From<&'a Launch<'a>> for Work<'a> {
    fn from(launch: &'a Launch<'a>) -> Self {
        Self::Launch {
            kernel: launch.kernel(),
            workgroups: launch.workgroups(),
            args: Args::Borrowed(launch.args()),
        }
    }
}

impl<'a> From<&'a OwnedOp> for Work<'a> {
    fn from(op: &'a OwnedOp) -> Self {
        match op {
            OwnedOp::Copy { src, dst } => Self::Copy { src, dst },
            OwnedOp::Fill { dst, pattern } => Self::Fill { dst, pattern: *pattern },
            OwnedOp::Launch(launch) => launch.into(),
            other => Self::Unknown(other.name()),
        }
    }
}

impl<'a> From<&'a OwnedLaunch> for Work<'a> {
    fn from(launch: &'a OwnedLaunch) -> Self {
        Self::Launch {
            kernel: &launch.kernel,
            workgroups: launch.workgroups,
            args: Args::Owned(&launch.args),
        }
    }
}

impl Work<'_> {
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Copy { .. } => "copy",
            Self::Fill { .. } => "fill",
            Self::Launch { .. } => "launch",
            Self::Unknown(name) => name,
        }
    }

    /// Puts it at the end of `stream`, whose context is current. `Err(None)` if an operand is not ours.
    ///
    /// Whatever it names must live until the stream is past it.
    pub(crate) fn enqueue(&self, context: &Context, stream: &Stream) -> Result<(), Option<DriverError>> {
        match *self {
            Self::Copy { src, dst } => copy(context, stream, src, dst),
            Self::Fill { dst, pattern } => fill(context, stream, dst, pattern),
            Self::Launch { kernel, workgroups, args } => {
                let kernel = CudaKernel::of(kernel).ok_or(None)?;
                launch(context, stream, kernel, workgroups, None, args)
            }
            Self::Unknown(_) => Err(None),
        }
    }
}

/// Copies between any two places: with unified addresses the driver knows what they are.
#[expect(unsafe_code, reason = "calls the driver")]
fn copy(
    context: &Context,
    stream: &Stream,
    src: &BufferView,
    dst: &BufferView,
) -> Result<(), Option<DriverError>> {
    let (from, to) = (address_of(src).ok_or(None)?, address_of(dst).ok_or(None)?);
    let size = usize::try_from(src.size()).map_err(|_| None)?;
    // SAFETY: both views lie within buffers that live until the stream is past the copy (the caller's
    // duty), have one length and share no bytes (`CopyRegion` checked it), and are within this device's
    // reach (`check_work`).
    unsafe { context.driver.memcpy_async(to, from, size, stream.raw()) }.map_err(Some)
}

/// Fills with bytes where the pattern is one, with words where they are aligned, else byte by byte with the
/// stride of a word.
#[expect(unsafe_code, reason = "calls the driver")]
fn fill(
    context: &Context,
    stream: &Stream,
    dst: &BufferView,
    pattern: u32,
) -> Result<(), Option<DriverError>> {
    let driver = &context.driver;
    let address = address_of(dst).ok_or(None)?;
    let size = usize::try_from(dst.size()).map_err(|_| None)?;
    let bytes = pattern.to_ne_bytes();
    if bytes == [bytes[0]; 4] {
        // SAFETY: the view lies within a buffer that lives until the stream is past the fill (the caller's
        // duty), within this device's reach (`check_work`).
        return unsafe { driver.memset_d8_async(address, bytes[0], size, stream.raw()) }.map_err(Some);
    }
    let words = size / bytes.len();
    if address.is_multiple_of(4) {
        // SAFETY: as above; `words` words are `size` bytes, since `FillRegion` checked that 4 divides it.
        return unsafe { driver.memset_d32_async(address, pattern, words, stream.raw()) }.map_err(Some);
    }
    for (at, byte) in (0_u64..).zip(bytes) {
        // SAFETY: as above; column `at` of `words` rows of 4 bytes lies within the view.
        unsafe { driver.memset_d2d8_async(address + at, 4, byte, 1, words, stream.raw()) }.map_err(Some)?;
    }
    Ok(())
}

/// Launches a kernel: `first`, if there is one, and then each argument, a buffer as its address.
#[expect(unsafe_code, reason = "calls the driver")]
pub(crate) fn launch(
    context: &Context,
    stream: &Stream,
    kernel: &CudaKernel,
    [x, y, z]: [u32; 3],
    first: Option<*const c_void>,
    args: Args<'_>,
) -> Result<(), Option<DriverError>> {
    let mut addresses = SmallVec::<[u64; 8]>::new();
    for view in args.buffers() {
        addresses.push(address_of(view).ok_or(None)?);
    }
    let mut next_address = addresses.iter();
    let mut parameters = SmallVec::<[*mut c_void; 16]>::new();
    parameters.extend(first.map(<*const c_void>::cast_mut));
    for index in 0..args.len() {
        let value = match args.at(index) {
            Arg::Buffer(_) => {
                next_address.next().map_or(ptr::null(), |address| ptr::from_ref(address).cast())
            }
            Arg::Scalar(bytes) => bytes.as_ptr().cast::<c_void>(),
        };
        parameters.push(value.cast_mut());
    }
    let [block_x, block_y, block_z] = kernel.workgroup_size();
    // SAFETY: the function is loaded in this context for as long as the kernel lives. The driver copies as
    // many bytes from each pointer as the code declares, and the code declares what the contract says
    // (`KernelCode::with_foreign`): an address for a buffer, and for a value the length that `Launch`
    // compared; `first` is given for residents alone, whose kernels declare it. The buffers live until the
    // stream is past the launch (the caller's duty) and are within this device's reach (`check_work`).
    unsafe {
        context.driver.launch_kernel(
            kernel.function(),
            x,
            y,
            z,
            block_x,
            block_y,
            block_z,
            0,
            stream.raw(),
            parameters.as_mut_ptr(),
            ptr::null_mut(),
        )
    }
    .map_err(Some)
}
