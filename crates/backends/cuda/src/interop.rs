//! Contexts, streams and memory of other libraries, in and out.

use std::{any::Any, error::Error, ffi::c_int, ptr, sync::Arc};

use cudarc::driver::sys::{
    CUcontext, CUdeviceptr, CUgraph, CUmemorytype, CUpointer_attribute, CUstreamCaptureMode,
};
use warpweft_core_types::{
    Access, BufferView, DriverError, InteropError, NativeHandle, NativeMemory, NativeQueue,
};

use crate::{
    context::Context,
    driver::Handle,
    graph::{Captured, Owner, Template},
    memory::ALIGNMENT,
    stream::Stream,
};

/// The kind of handle that is a context, for [`NativeHandle`].
pub const CONTEXT: &str = "CUcontext";
/// The kind of handle that is a stream, for [`NativeHandle`]. The legacy default stream is 0 or 1.
pub const STREAM: &str = "CUstream";
/// The kind of handle that is an address, for [`NativeHandle`].
pub const ADDRESS: &str = "CUdeviceptr";

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`: numbers that stand for streams.
const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;

fn refused(context: &Context, what: &NativeHandle, reason: impl Into<String>) -> InteropError {
    InteropError::Refused { device: context.device, what: what.to_string(), reason: reason.into() }
}

/// The stream behind a handle, if the context is its own.
pub(crate) fn stream_of(context: &Arc<Context>, queue: &NativeQueue) -> Result<Stream, InteropError> {
    if let Some(failure) = context.failure() {
        return Err(InteropError::Failed(failure));
    }
    let handle = queue.handle();
    let refuse = |reason: &str| refused(context, &handle, reason);
    if handle.kind != STREAM {
        return Err(refuse("it is no CUDA stream"));
    }
    let value = match handle.value {
        0 => LEGACY,
        PER_THREAD => return Err(refuse("it is another stream on each thread; make a stream of its own")),
        value => value,
    };
    let raw = usize::try_from(value).map(ptr::with_exposed_provenance_mut);
    let raw = raw.ok().and_then(Handle::written).ok_or_else(|| refuse("it is no address"))?;
    let stream = Stream::foreign(context, raw, Arc::clone(queue.owner()));
    let _current = context.enter().map_err(InteropError::Driver)?;
    // The default stream is whatever context is current.
    if value != LEGACY {
        let owner = context_of(context, &stream).map_err(|error| refuse(&error.to_string()))?;
        if owner != context.raw.raw() {
            return Err(refuse("it belongs to another context; open the device with that context"));
        }
        if is_capturing(context, &stream).map_err(InteropError::Driver)? {
            return Err(refuse("work is being captured from it; end the capture first"));
        }
    }
    Ok(stream)
}

#[expect(unsafe_code, reason = "asks the driver")]
fn context_of(context: &Context, stream: &Stream) -> Result<CUcontext, DriverError> {
    let mut owner = ptr::null_mut();
    // SAFETY: the stream is valid while its owner lives (`NativeQueue::new`), which it holds; one handle is
    // written to this stack frame.
    unsafe { context.driver.stream_context(stream.raw(), &mut owner) }?;
    Ok(owner)
}

#[expect(unsafe_code, reason = "asks the driver")]
fn is_capturing(context: &Context, stream: &Stream) -> Result<bool, DriverError> {
    let mut status: c_int = 0;
    // SAFETY: as in `context_of`; one integer is written to this stack frame.
    unsafe { context.driver.stream_is_capturing(stream.raw(), &mut status) }?;
    Ok(status != 0)
}

/// Finds out whether the driver knows the memory as this device's.
pub(crate) fn check_memory(context: &Context, memory: &NativeMemory) -> Result<(), InteropError> {
    if let Some(failure) = context.failure() {
        return Err(InteropError::Failed(failure));
    }
    let handle = NativeHandle { kind: ADDRESS, value: memory.address() };
    let refuse = |reason: String| refused(context, &handle, reason);
    if memory.size() == 0 || memory.address() == 0 {
        return Err(refuse("it holds no bytes".to_owned()));
    }
    let _current = context.enter().map_err(InteropError::Driver)?;
    let ask = |attribute| word_of(context, memory.address(), attribute);
    let unknown = |error: DriverError| refuse(format!("the driver does not know it: {error}"));
    let kind = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE).map_err(unknown)?;
    if kind & 0xffff_ffff != CUmemorytype::CU_MEMORYTYPE_DEVICE as u64 {
        return Err(refuse("it is not device memory; import host memory with `HostImport`".to_owned()));
    }
    let ordinal = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL).map_err(unknown)?;
    if ordinal & 0xffff_ffff != u64::from(context.device.ordinal) {
        return Err(refuse(format!("it is memory of device {}", ordinal & 0xffff_ffff)));
    }
    // Kernels and timestamps rely on what every buffer has.
    if !memory.address().is_multiple_of(ALIGNMENT) {
        let reason = format!(
            "it starts at no multiple of {ALIGNMENT} bytes; import the allocation as a whole and use a view of \
             the part"
        );
        return Err(refuse(reason));
    }
    let first = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR).map_err(unknown)?;
    let size = ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE).map_err(unknown)?;
    let left = first.saturating_add(size).saturating_sub(memory.address());
    if left < memory.size() {
        return Err(refuse(format!("{} bytes are more than the {left} behind it", memory.size())));
    }
    Ok(())
}

/// Whether other devices can use memory that another library allocated in this context: plain memory
/// (`cuMemAlloc`) follows the peer access of contexts. Whoever made a pool or a mapping opens it to devices one by
/// one, and nothing tells to which.
pub(crate) fn is_open_to_peers(context: &Context, address: CUdeviceptr) -> Result<bool, DriverError> {
    let _current = context.enter()?;
    let plain = CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
    // A boolean, of which four bytes are written or one.
    Ok(word_of(context, address, plain)? != 0)
}

/// A pointer's attribute of at most eight bytes.
#[expect(unsafe_code, reason = "asks the driver")]
fn word_of(
    context: &Context,
    address: CUdeviceptr,
    attribute: CUpointer_attribute,
) -> Result<u64, DriverError> {
    let mut word = 0_u64;
    let place = ptr::from_mut(&mut word).cast();
    // SAFETY: the attributes asked for are an integer, an address or a size, of eight bytes at most, which are
    // written to this stack frame. Any address may be asked about.
    unsafe { context.driver.pointer_attribute(place, attribute as c_int, address) }?;
    Ok(word)
}

/// Captures what `record` enqueues in a stream of its own.
pub(crate) fn capture(
    context: &Arc<Context>,
    accesses: Vec<(BufferView, Access)>,
    owner: Arc<dyn Any + Send + Sync>,
    record: &mut dyn FnMut(NativeHandle) -> Result<(), Box<dyn Error + Send + Sync>>,
) -> Result<Captured, InteropError> {
    let template = record_graph(context, |stream| {
        record(NativeHandle { kind: STREAM, value: stream.raw().expose_provenance() as u64 })
    })?;
    Ok(Captured { template, accesses, _owner: Owner(owner) })
}

/// The graph of what `enqueue` puts in a stream of its own.
pub(crate) fn record_graph(
    context: &Arc<Context>,
    enqueue: impl FnOnce(&Stream) -> Result<(), Box<dyn Error + Send + Sync>>,
) -> Result<Template, InteropError> {
    if let Some(failure) = context.failure() {
        return Err(InteropError::Failed(failure));
    }
    let stream = Stream::create(context).map_err(InteropError::Driver)?;
    let failed = |reason: String| InteropError::Capture { device: context.device, reason };
    let _current = context.enter_for_others().map_err(InteropError::Driver)?;
    let capture = Capture::begin(context, &stream).map_err(InteropError::Driver)?;
    let recorded = enqueue(&stream);
    let template = capture.end();
    recorded.map_err(|error| failed(error.to_string()))?;
    let template = template.map_err(|error| failed(error.to_string()))?;
    template.ok_or_else(|| failed("the driver made no graph".to_owned()))
}

/// A stream that is being captured. It ends whatever becomes of the recording, a panic included, or the thread would
/// stay in the capture.
struct Capture<'a> {
    context: &'a Arc<Context>,
    stream: &'a Stream,
    is_over: bool,
}

impl<'a> Capture<'a> {
    /// Thread-local: calls of other threads that would disturb a capture do not.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn begin(context: &'a Arc<Context>, stream: &'a Stream) -> Result<Self, DriverError> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as c_int;
        // SAFETY: the stream is live, of the current context, and nobody else has it.
        unsafe { context.driver.stream_begin_capture(stream.raw(), mode) }?;
        Ok(Self { context, stream, is_over: false })
    }

    /// What was recorded.
    fn end(mut self) -> Result<Option<Template>, DriverError> {
        self.finish()
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn finish(&mut self) -> Result<Option<Template>, DriverError> {
        self.is_over = true;
        let mut graph: CUgraph = ptr::null_mut();
        // SAFETY: the capture was begun in this stream; one handle is written to this stack frame.
        unsafe { self.context.driver.stream_end_capture(self.stream.raw(), &mut graph) }?;
        Ok(Handle::written(graph).map(|graph| Template::captured(self.context, graph)))
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            // What was recorded by then goes with the result.
            let _unfinished = self.finish();
        }
    }
}
