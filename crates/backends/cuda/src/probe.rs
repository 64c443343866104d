//! Which calls of this driver wait for kernels that stay: found out by calling them beside one.
//!
//! The kernel beside them ends by itself after a moment, so that a call that waits is late and nothing hangs.

use std::{
    cell::RefCell,
    error::Error,
    ptr::NonNull,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use serde::Serialize;
use warpweft_core_types::{
    BufferDesc, BufferView, Deadline, Device as _, DeviceClock as _, DriverError, FillRegion, GraphNode,
    HostMemory, KernelContract, LoadError, Op, OwnedOp, Param, PreparedGraph, QueueDesc, SemaphorePoint,
    Submission,
};

use crate::{
    clock::{self, Clock},
    cold,
    context::Context,
    device::CudaDevice,
    driver::in_full,
    host_memory::Imported,
    interop,
    memory::{Arena, CudaBuffer},
    module::Image,
    stream::{Event, Stream},
};

/// How long the kernel beside a call lasts: far longer than calls that do not wait, and no bother.
const BESIDE: Duration = Duration::from_millis(40);

/// Longer than that, and something is wrong.
const PATIENCE: Duration = Duration::from_secs(10);

/// Pages of host memory for a trial.
const PAGE: usize = 4096;

/// What one call did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Probed {
    /// The driver's function, or what it does.
    pub call: &'static str,
    /// It came back only after the kernel beside it.
    pub waits: bool,
    /// How long it took.
    pub took: Duration,
    /// This crate makes residents give way for it.
    pub expected_to_wait: bool,
}

impl Probed {
    /// Whether the call would hold up a program: it waits, and this crate does not know.
    pub const fn is_surprise(&self) -> bool {
        self.waits && !self.expected_to_wait
    }
}

/// Why a trial could not be made.
type Refusal = Box<dyn Error + Send + Sync>;

/// What trials work with.
struct Lab<'a> {
    device: &'a Arc<CudaDevice>,
    context: &'a Arc<Context>,
    arena: &'a Arc<Arena>,
    clock: &'a Arc<Clock>,
    /// The driver's machine code of the clock's kernels.
    cubin: &'a [u8],
    beside: Stream,
    end: Event,
    imported: RefCell<Vec<Imported>>,
}

/// The call, with what it needs.
type Call<'a> = Box<dyn FnOnce() -> Result<(), Refusal> + 'a>;

/// Prepares a call.
type Prepare = for<'a> fn(&'a Lab<'_>) -> Result<Call<'a>, Refusal>;

/// Each call, whether it is expected to wait, and how it is made. Those that wait are all in `cold`.
const TRIALS: &[(&str, bool, Prepare)] = &[
    ("launch of a kernel that was loaded before", false, |lab| {
        let (stream, end) = (Stream::create(lab.context)?, Event::create(lab.context)?);
        let to = lab.arena.allocate(&BufferDesc::device(8))?;
        Ok(Box::new(move || stamp(lab, lab.clock, &stream, &end, to)))
    }),
    ("cuLinkComplete: PTX to machine code", true, |lab| {
        let text = std::ffi::CString::new(clock::PTX)?;
        Ok(Box::new(move || Ok(cold::assemble(lab.context, &text).map(drop)?)))
    }),
    ("cuModuleLoadDataEx", true, |lab| Ok(Box::new(|| Ok(Image::load(lab.context, lab.cubin).map(drop)?)))),
    ("cuModuleGetFunction", true, |lab| {
        let image = Image::load(lab.context, lab.cubin)?;
        Ok(Box::new(move || Ok(stamp_of(&image).map(drop)?)))
    }),
    ("first launch of a function that was fetched meanwhile", true, |lab| {
        let (stream, end) = (Stream::create(lab.context)?, Event::create(lab.context)?);
        let (to, image) = (lab.arena.allocate(&BufferDesc::device(8))?, Image::load(lab.context, lab.cubin)?);
        Ok(Box::new(move || {
            let clock = Clock::of_image(lab.context, lab.arena, image)?;
            stamp(lab, &clock, &stream, &end, to)
        }))
    }),
    ("cuModuleUnload", true, |lab| {
        let image = Image::load(lab.context, lab.cubin)?;
        Ok(Box::new(move || Ok(image.unload()?)))
    }),
    ("cuMemHostAlloc", false, |lab| {
        lab.arena.trim_pinned();
        Ok(Box::new(|| Ok(lab.arena.allocate(&BufferDesc::host_visible(1 << 20)).map(drop)?)))
    }),
    ("cuMemFreeHost", true, |lab| {
        drop(lab.arena.allocate(&BufferDesc::host_visible(1 << 20))?);
        Ok(Box::new(|| {
            lab.arena.trim_pinned();
            Ok(())
        }))
    }),
    ("cuMemHostRegister", false, |lab| {
        let memory = pages();
        Ok(Box::new(move || {
            // Undone after the trial, or it would be a trial of that.
            lab.imported.borrow_mut().push(Imported::new(lab.context, memory)?);
            Ok(())
        }))
    }),
    ("cuMemHostUnregister", true, |lab| {
        let imported = Imported::new(lab.context, pages())?;
        Ok(Box::new(move || {
            drop(imported);
            Ok(lab.context.driver.registrations.undo_unused()?)
        }))
    }),
    ("pool: allocate, zero and free", false, |lab| {
        Ok(Box::new(|| Ok(lab.arena.allocate(&BufferDesc::device(1 << 20)).map(drop)?)))
    }),
    ("pool: create and destroy", false, |lab| {
        Ok(Box::new(|| Ok(Arena::create(lab.context, 1 << 20, Vec::new()).map(drop)?)))
    }),
    ("cuFuncSetAttribute and occupancy", false, |lab| {
        let image = Image::load(lab.context, lab.cubin)?;
        let contract = KernelContract::new("ww_stamp", [Param::write(8)]).with_shared_bytes(64 << 10);
        let function = image.function(&contract, Vec::new)?;
        Ok(Box::new(move || Ok(image.resources(function, &contract).map(drop)?)))
    }),
    ("pool: trim", false, |lab| {
        drop(lab.arena.allocate(&BufferDesc::device(64 << 20))?);
        Ok(Box::new(|| Ok(lab.arena.trim_pool()?)))
    }),
    #[cfg(unix)]
    ("virtual memory: make, map, zero, unmap", false, |lab| {
        Ok(Box::new(|| Ok(lab.arena.allocate_shareable(2 << 20).map(drop)?)))
    }),
    #[cfg(unix)]
    ("virtual memory: export and import", false, |lab| {
        let memory = lab.arena.allocate_shareable(2 << 20)?;
        Ok(Box::new(move || {
            let descriptor = memory.export().ok_or("it is not for export")??;
            Ok(lab.arena.import_shared(2 << 20, descriptor).map(drop)?)
        }))
    }),
    ("streams and events: create and destroy", false, |lab| {
        Ok(Box::new(|| {
            let (_stream, _event) = (Stream::create(lab.context)?, Event::create(lab.context)?);
            Ok(())
        }))
    }),
    ("graph: create, instantiate, replay, destroy", false, |lab| {
        let buffer = BufferView::whole(lab.device.allocate(&BufferDesc::device(4096))?);
        let queue = lab.device.create_queue(&QueueDesc::default())?;
        let done = SemaphorePoint::new(&lab.device.create_semaphore(0)?, 1);
        Ok(Box::new(move || {
            let fill = OwnedOp::from(&Op::Fill(FillRegion::bytes(&buffer, 1)));
            let graph = PreparedGraph::new(lab.device.as_ref(), &[GraphNode::new(fill, &[])])?;
            let ops = [Op::Replay(&graph)];
            let signals = std::slice::from_ref(&done);
            queue.submit(&Submission { waits: &[], ops: &ops, signals })?;
            Ok(done.wait(PATIENCE)?)
        }))
    }),
    ("capture of a stream", false, |lab| {
        Ok(Box::new(|| {
            Ok(interop::capture(lab.context, Vec::new(), Arc::new(()), &mut |_| Ok(())).map(drop)?)
        }))
    }),
    ("a reading of the clock", false, |lab| {
        Ok(Box::new(|| {
            let sample = lab.clock.sample(Deadline::within(PATIENCE));
            sample.map(drop).map_err(|failure| failure.to_string().into())
        }))
    }),
    ("memory figures", false, |lab| Ok(Box::new(|| Ok(lab.arena.usage().map(drop)?)))),
];

/// Tries every call that this crate makes beside a kernel that stays.
pub(crate) fn run(device: &Arc<CudaDevice>) -> Result<Vec<Probed>, Refusal> {
    let (context, _, clock) = device.surroundings();
    let text = std::ffi::CString::new(clock::PTX)?;
    let cubin = cold::assemble(context, &text)?;
    let (beside, end) = (Stream::create(context)?, Event::create(context)?);
    let lab = Lab {
        device,
        context,
        arena: device.arena(),
        clock,
        cubin: &cubin,
        beside,
        end,
        imported: RefCell::default(),
    };
    let tried = |&(call, expected, prepare): &(&'static str, bool, Prepare)| {
        let named = |error: Refusal| {
            judge(context, &*error);
            Refusal::from(format!("{call}: {}", in_full(&*error)))
        };
        lab.try_call(call, expected, prepare).map_err(named)
    };
    TRIALS.iter().map(tried).collect()
}

/// Takes note of a device that is lost, whatever the driver's word for that is wrapped in.
fn judge(context: &Context, error: &(dyn Error + 'static)) {
    if let Some(error) = error.downcast_ref::<DriverError>() {
        // What it means for the trial is the caller's.
        let _failure = context.judge(error.clone());
    }
    if let Some(cause) = error.source() {
        judge(context, cause);
    }
}

impl Lab<'_> {
    fn try_call(
        &self,
        call: &'static str,
        expected_to_wait: bool,
        prepare: Prepare,
    ) -> Result<Probed, Refusal> {
        let act = prepare(self)?;
        self.settle()?;
        // The kernel must run before the call begins.
        let _current = self.context.enter()?;
        self.clock.keep_busy(&self.beside, BESIDE)?;
        self.end.record(&self.beside)?;
        let began = Instant::now();
        act()?;
        let took = began.elapsed();
        // A thread that was late to make the call finds the kernel over, and has waited for nothing.
        let waits = self.end.is_done()? && took > BESIDE / 2;
        self.end.wait(PATIENCE)?;
        Ok(Probed { call, waits, took, expected_to_wait })
    }
}

impl Lab<'_> {
    /// Waits until code that earlier trials let go is unloaded: that is left to the service thread, and beside a
    /// kernel it would hold the context, and with it whatever is tried.
    fn settle(&self) -> Result<(), Refusal> {
        let (done, served) = mpsc::channel();
        self.context.serve(move || {
            // Nobody listens after the limit.
            let _heard = done.send(());
        });
        Ok(served.recv_timeout(PATIENCE)?)
    }
}

/// Launches the clock's stamp and waits for it.
#[expect(unsafe_code, reason = "enqueues a write to a buffer that it keeps")]
fn stamp(lab: &Lab<'_>, clock: &Clock, stream: &Stream, end: &Event, to: CudaBuffer) -> Result<(), Refusal> {
    let _current = lab.context.enter()?;
    // SAFETY: the buffer has eight bytes of this device and starts at a multiple of more. It is let go once the write
    // is over, and otherwise kept for good.
    unsafe { clock.stamp(lab.context, stream, to.address()) }?;
    let ended = end.record(stream).and_then(|()| end.wait(PATIENCE));
    if matches!(ended, Ok(true)) {
        return Ok(());
    }
    std::mem::forget(to);
    ended?;
    Err("a stamp took too long".into())
}

fn stamp_of(image: &Image) -> Result<(), LoadError> {
    image.function(&KernelContract::new("ww_stamp", [Param::write(8)]), Vec::new).map(drop)
}

/// Whole pages of host memory, kept until the process ends: the trial may leave them pinned.
#[expect(unsafe_code, reason = "vouches for memory made here")]
fn pages() -> HostMemory {
    #[repr(align(4096))]
    struct Page(#[expect(dead_code, reason = "room")] [u8; PAGE]);

    let pages = Box::leak(Box::new([const { Page([0; PAGE]) }; 4]));
    let base = NonNull::from(pages).cast::<u8>();
    // SAFETY: four pages that are never given back, and the reference to them ends here.
    unsafe { HostMemory::new(base, 4 * PAGE, Arc::new(())) }
}
