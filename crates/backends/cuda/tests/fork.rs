//! A process made by `fork` has the handles of its parent and no driver: every method answers, at once.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may fail a test")]

use std::{
    ffi::c_int,
    fs::File,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use warpweft_core_types::{
    AllocError, Arg, Backend, BufferDesc, BufferView, CodeFormat, Deadline, DeviceExt as _, Failure,
    Features, FillRegion, ForeignCode, GraphNode, HostMemory, KernelCode, KernelContract, Launch, LoadError,
    Op, OpenError, OwnedOp, Param, PreparedGraph, QueueDesc, ResidentDesc, ResidentError, ResidentState,
    SemaphorePoint, SharedMemory, SignalError, Submission, SubmitError, WaitError,
};
use warpweft_cuda::{CudaBackend, CudaConfig};
use warpweft_stand_in_cuda::StandIn;

/// Far longer than anything takes on a busy machine; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(20);

const NO_HANG: c_int = 1;
const KILL: c_int = 9;

// SAFETY: the declarations are those of the C library on Linux.
#[expect(unsafe_code, reason = "the system's functions")]
unsafe extern "C" {
    safe fn fork() -> c_int;
    safe fn _exit(code: c_int) -> !;
    safe fn kill(process: c_int, signal: c_int) -> c_int;
    /// Whether a process has ended, and how.
    ///
    /// # Safety
    ///
    /// - `status` is valid for writes.
    unsafe fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
}

/// Runs `body` in a forked process; the number of the check that failed, if one did. It must not panic or
/// print: the locks of either may have been held by a thread that was not inherited.
fn in_child(body: impl FnOnce() -> Result<(), u8>) -> Result<(), u8> {
    let child = fork();
    assert!(child >= 0, "there is no second process");
    if child == 0 {
        let code = body().err().unwrap_or(0);
        _exit(code.into());
    }
    let started = Instant::now();
    loop {
        let mut status = 0;
        // SAFETY: one integer is written to this stack frame.
        #[expect(unsafe_code, reason = "the system's function")]
        let ended = unsafe { waitpid(child, &mut status, NO_HANG) };
        if ended == child {
            assert_eq!(status & 0x7f, 0, "a signal ended it");
            let code = u8::try_from(status >> 8 & 0xff).unwrap();
            return if code == 0 { Ok(()) } else { Err(code) };
        }
        if started.elapsed() > PATIENCE {
            kill(child, KILL);
            panic!("the forked process hangs");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[expect(unsafe_code, reason = "asserts what foreign code does")]
fn counter() -> KernelCode {
    let contract = KernelContract::new("counter", [Param::read_write(4)]).resident();
    let text = ".version 8.0\n.target sm_70\n\
                .entry counter(.param .align 8 .b8 s[56], .param .u64 a) { ret; }";
    let code = ForeignCode::Source { format: CodeFormat::Ptx, text: text.to_owned() };
    // SAFETY: the stand-in runs a function of its own for this entry, which looks every access up.
    unsafe { KernelCode::new().with_foreign([contract], code) }
}

/// Whether a failure names the cause.
fn is_named(failure: &Failure) -> bool {
    matches!(failure, Failure::DeviceLost { reason, .. } if reason.contains("fork"))
}

/// `Err(number)` unless the check holds.
const fn require(number: u8, holds: bool) -> Result<(), u8> {
    if holds { Ok(()) } else { Err(number) }
}

#[test]
fn a_forked_process_is_told_so_and_never_hangs() {
    let stand_in = StandIn::load().unwrap();
    let config = CudaConfig::default().with_driver(stand_in.path()).without_cache();
    let backend = CudaBackend::with_config(&config).unwrap();
    let device = backend.open(0, Features::empty()).unwrap();
    let queue = device.create_queue(&QueueDesc::default()).unwrap();
    let semaphore = device.create_semaphore(0).unwrap();
    let window = BufferView::whole(device.allocate(&BufferDesc::host_visible(64)).unwrap());
    let code = counter();
    let kernel = device.load(&code).unwrap().kernel("counter").unwrap();
    let args = [Arg::Buffer(&window)];
    let launch = Launch::new(&kernel, [2, 1, 1], &args).unwrap();
    let residents = device.residents().unwrap();
    let resident = residents.launch(&ResidentDesc::new(launch)).unwrap();
    let (point, fill) = (SemaphorePoint::new(&semaphore, 1), Op::Fill(FillRegion::bytes(&window, 1)));
    let submission =
        Submission { waits: &[], ops: std::slice::from_ref(&fill), signals: std::slice::from_ref(&point) };
    let sharing = device.sharing().unwrap();
    let (shareable, own) = (sharing.allocate_shareable(4096).unwrap(), window.clone());
    // Threads that hold locks now and then while the process is copied.
    let pressure = Arc::new(());
    let others: Vec<_> = (0..2)
        .map(|_| {
            let (device, held) = (Arc::clone(&device), Arc::downgrade(&pressure));
            thread::spawn(move || {
                while held.upgrade().is_some() {
                    let _buffer = device.allocate(&BufferDesc::host_visible(4096));
                    let _usage = device.memory();
                    device.foreign(|| ());
                }
            })
        })
        .collect();
    let outcome: Result<(), u8> = (0..10).try_for_each(|_| {
        in_child(|| {
            let lost = device.failure();
            require(1, lost.is_some_and(|failure| is_named(&failure)))?;
            require(2, matches!(device.memory(), Err(AllocError::Failed(failure)) if is_named(&failure)))?;
            let granted = device.allocate(&BufferDesc::device(64));
            require(3, matches!(granted, Err(AllocError::Failed(failure)) if is_named(&failure)))?;
            require(4, matches!(device.load(&code), Err(LoadError::Failed(failure)) if is_named(&failure)))?;
            let made = device.create_queue(&QueueDesc::default());
            require(5, matches!(made, Err(OpenError::Failed(failure)) if is_named(&failure)))?;
            require(6, matches!(device.create_semaphore(0), Err(OpenError::Failed(_))))?;
            require(7, matches!(backend.open(1, Features::empty()), Err(OpenError::Failed(_))))?;
            let taken = queue.submit(&submission);
            require(8, matches!(taken, Err(SubmitError::Failed(failure)) if is_named(&failure)))?;
            require(9, queue.failure().is_some_and(|failure| is_named(&failure)))?;
            let waited = point.wait(PATIENCE);
            require(10, matches!(waited, Err(WaitError::Failed(failure)) if is_named(&failure)))?;
            require(11, matches!(semaphore.signal(1), Err(SignalError::Failed(_))))?;
            require(12, semaphore.value() == 0 && point.poll().is_err())?;
            require(13, pollster::block_on(async { point.clone().await }).is_err())?;
            require(14, window.write(&[1]).is_err() && window.buffer().mapping().is_none())?;
            require(15, resident.state() == ResidentState::Failed && resident.failure().is_some())?;
            let within = Deadline::within(PATIENCE);
            require(16, matches!(resident.park(within), Err(ResidentError::Failed(_))))?;
            require(17, matches!(resident.stop(within), Err(ResidentError::Failed(_))))?;
            let launched = residents.launch(&ResidentDesc::new(launch));
            require(18, matches!(launched, Err(ResidentError::Failed(_))))?;
            let second = CudaBackend::with_config(&config).err();
            require(19, second.is_some_and(|error| error.to_string().contains("fork")))?;
            let exported = sharing.export(shareable.as_ref());
            require(20, exported.is_err_and(|error| error.to_string().contains("fork")))?;
            require(21, sharing.allocate_shareable(4096).is_err())?;
            let descriptor = File::open("/dev/null").map_err(|_| 22)?.into();
            let shared = SharedMemory { device: device.info().id.uuid, size: 4096, descriptor };
            require(
                23,
                sharing.import_shared(shared).is_err_and(|error| error.to_string().contains("fork")),
            )?;
            let fill = OwnedOp::from(&fill);
            let prepared = PreparedGraph::new(device.as_ref(), &[GraphNode::new(fill, &[])]);
            require(24, prepared.is_err())?;
            require(25, device.clock().is_none_or(|clock| clock.sample(within).is_err()))?;
            let interop = device.interop().ok_or(26)?;
            require(27, interop.capture(Vec::new(), Arc::new(()), &mut |_| Ok(())).is_err())?;
            require(28, device.foreign(|| true))?;
            let page = HostMemory::of_buffer(Arc::clone(own.buffer()));
            require(29, page.is_none())?;
            let links = device.links().ok_or(30)?;
            require(31, !links.facts().is_empty())
        })
    });
    drop(pressure);
    others.into_iter().for_each(|thread| thread.join().unwrap());
    outcome.unwrap();
    // The parent noticed nothing.
    queue.submit(&submission).unwrap();
    point.wait(PATIENCE).unwrap();
    resident.stop(Deadline::within(PATIENCE)).unwrap();
    // Dropping takes no lock and calls nothing either.
    let handles = (resident, queue, semaphore, point, window.clone(), shareable, kernel, device, backend);
    in_child(move || {
        drop(handles);
        Ok(())
    })
    .unwrap();
}
