//! Drivers that lose their device or have no memory: what every call and every wait says from then on.

use std::{sync::Arc, time::Duration};

use ash::vk;
use warpweft_core_types::{
    AllocError, Arg, Backend as _, BufferDesc, BufferView, Deadline, Device, ErrorClass, Failure, Features,
    FillRegion, GraphNode, KernelContract, Launch, Op, Param, PreparedGraph, Queue, QueueDesc, Resident,
    ResidentDesc, ResidentError, ResidentState, SemaphorePoint, Submission, WaitError,
};

use crate::{
    interposed::{self, ALLOCATE, COMPILE, COUNTER, CREATE_DEVICE, MAKE_COMMANDS, NOT_YET, SUBMIT, WAIT},
    support::{Need, PATIENCE, Test, Verdict, host_pages, kernel, memory, open, open_backend, run, words},
};

pub(crate) const TESTS: &[Test] = &[
    Test { name: "faults::a_lost_device_is_lost_for_every_call", body: a_lost_device_is_lost_for_every_call },
    Test { name: "faults::held_work_fails_with_its_device", body: held_work_fails_with_its_device },
    Test { name: "faults::work_under_way_fails_with_its_device", body: work_under_way_fails_with_its_device },
    Test { name: "faults::a_resident_fails_with_its_device", body: a_resident_fails_with_its_device },
    Test { name: "faults::a_lost_device_is_followed_by_another", body: a_lost_device_is_followed_by_another },
    Test {
        name: "faults::a_device_that_cannot_be_made_says_why",
        body: a_device_that_cannot_be_made_says_why,
    },
    Test { name: "faults::memory_that_is_not_there_is_named", body: memory_that_is_not_there_is_named },
    Test {
        name: "faults::a_resident_without_memory_is_not_started",
        body: a_resident_without_memory_is_not_started,
    },
    Test { name: "faults::work_without_memory_fails_alone", body: work_without_memory_fails_alone },
    Test {
        name: "faults::code_without_memory_can_be_loaded_later",
        body: code_without_memory_can_be_loaded_later,
    },
    Test {
        name: "faults::a_counter_without_memory_is_asked_again",
        body: a_counter_without_memory_is_asked_again,
    },
];

const LOST: vk::Result = vk::Result::ERROR_DEVICE_LOST;
const NO_MEMORY: vk::Result = vk::Result::ERROR_OUT_OF_DEVICE_MEMORY;
const NO_HOST_MEMORY: vk::Result = vk::Result::ERROR_OUT_OF_HOST_MEMORY;

const NONE: &str = "@compute @workgroup_size(1) fn none() {}";

const COUNTING: &str = "
@group(0) @binding(0) var<storage, read_write> count: array<u32>;
@compute @workgroup_size(1) fn counting() {
    var turns = ww_begin(0u);
    while !ww_should_yield(&turns) { count[0] = count[0] + 1u; }
    ww_end(0u, WW_BUSY);
}";

fn none() -> KernelContract {
    KernelContract::new("none", [])
}

fn queue(device: &Arc<dyn Device>) -> Result<Arc<dyn Queue>, Need> {
    Ok(device.create_queue(&QueueDesc::default())?)
}

fn point(device: &Arc<dyn Device>) -> Result<SemaphorePoint, Need> {
    Ok(SemaphorePoint::new(&device.create_semaphore(0)?, 1))
}

/// Submits a fill of the view.
fn fill(
    queue: &Arc<dyn Queue>,
    view: &BufferView,
    waits: &[SemaphorePoint],
    done: &SemaphorePoint,
) -> Verdict {
    let ops = [Op::Fill(FillRegion::bytes(view, 1))];
    queue.submit(&Submission { waits, ops: &ops, signals: std::slice::from_ref(done) })?;
    Ok(())
}

/// Why a point will not be reached.
fn failure_of(point: &SemaphorePoint) -> Result<Arc<Failure>, Need> {
    match point.wait(PATIENCE) {
        Err(WaitError::Failed(failure)) => Ok(failure),
        other => Err(format!("it did not fail: {other:?}").into()),
    }
}

fn assert_lost(failure: &Failure) {
    assert!(matches!(failure, Failure::DeviceLost { .. }), "{failure:?}");
}

/// Has a submission meet the loss.
fn lose(device: &Arc<dyn Device>, view: &BufferView) -> Verdict {
    let (queue, done) = (queue(device)?, point(device)?);
    SUBMIT.fail(LOST);
    fill(&queue, view, &[], &done)?;
    assert_lost(&*failure_of(&done)?);
    Ok(())
}

/// The class of what a call says: each error has one.
macro_rules! class {
    ($result:expr) => {
        ($result.err().map(|error| error.class()), stringify!($result))
    };
}

fn a_lost_device_is_lost_for_every_call() -> Verdict {
    let (_turn, config) = interposed::config()?;
    let (_backend, device) = open(&config)?;
    let view = memory(&device, BufferDesc::host_visible(64))?;
    let (idle, unused) = (queue(&device)?, point(&device)?);
    let fill = Op::Fill(FillRegion::bytes(&view, 1));
    let graph = PreparedGraph::new(device.as_ref(), &[GraphNode::new(&fill, &[])])?;
    let shareable = device.sharing().map(|family| family.allocate_shareable(64)).transpose()?;
    let shared = device.sharing().zip(shareable.as_ref()).map(|(family, own)| family.export(own.as_ref()));
    let shared = shared.transpose()?;
    lose(&device, &view)?;
    assert_lost(&*device.failure().ok_or("the device knows")?);
    assert_lost(&*idle.failure().ok_or("its queues know")?);
    let submission = |ops| idle.submit(&Submission { ops, ..Submission::default() });
    let mut said = vec![
        class!(submission(&[])),
        class!(submission(&[fill])),
        class!(submission(&[Op::Replay(&graph)])),
        class!(device.memory()),
        class!(device.allocate(&BufferDesc::device(64))),
        class!(device.allocate(&BufferDesc::host_visible(1 << 24))),
        class!(device.create_queue(&QueueDesc::default())),
        class!(device.create_semaphore(0)),
        class!(kernel(&device, &none(), NONE)),
        class!(PreparedGraph::new(device.as_ref(), &[GraphNode::new(&fill, &[])])),
    ];
    if let Some(clock) = device.clock() {
        said.push(class!(clock.sample(Deadline::within(PATIENCE))));
    }
    if let Some(family) = device.host_import() {
        said.push(class!(family.import(host_pages(family.alignment(), 1)?(0..1))));
    }
    if let (Some(family), Some(own), Some(shared)) = (device.sharing(), shareable, shared) {
        said.push(class!(family.allocate_shareable(64)));
        said.push(class!(family.export(own.as_ref())));
        said.push(class!(family.import_shared(shared)));
    }
    for (class, call) in said {
        assert_eq!(class, Some(ErrorClass::DeviceLost), "{call}");
    }
    // What nobody promised is for the host to say.
    unused.semaphore.signal(1)?;
    Ok(unused.wait(PATIENCE)?)
}

/// Work that waits for what may never come does not outlive its device.
fn held_work_fails_with_its_device() -> Verdict {
    let (_turn, config) = interposed::config()?;
    let (_backend, device) = open(&config)?;
    let view = memory(&device, BufferDesc::device(64))?;
    let (held, never, done) = (queue(&device)?, point(&device)?, point(&device)?);
    fill(&held, &view, std::slice::from_ref(&never), &done)?;
    lose(&device, &view)?;
    assert_lost(&*failure_of(&done)?);
    Ok(())
}

/// The driver says of an allocation that the device is lost, and never says so of the work.
fn work_under_way_fails_with_its_device() -> Verdict {
    let (_turn, config) = interposed::config()?;
    let (_backend, device) = open(&config)?;
    let view = memory(&device, BufferDesc::host_visible(64))?;
    let (queue, before, done) = (queue(&device)?, point(&device)?, point(&device)?);
    fill(&queue, &view, &[], &before)?;
    before.wait(PATIENCE)?;
    COUNTER.fail(NOT_YET);
    WAIT.fail(NOT_YET);
    fill(&queue, &view, &[], &done)?;
    // Else what it uses would be let go under it: this device is not really lost.
    interposed::wait_for_secret(2, Deadline::within(PATIENCE))?;
    ALLOCATE.fail(LOST);
    let refused = device.allocate(&BufferDesc::device(1 << 24)).err().ok_or("it was granted")?;
    assert!(matches!(&refused, AllocError::Failed(failure) if failure.class() == ErrorClass::DeviceLost));
    assert_lost(&*failure_of(&done)?);
    // What was over before was not lost.
    Ok(before.wait(Duration::ZERO)?)
}

type Started = Result<Arc<dyn Resident>, ResidentError>;

fn start(device: &Arc<dyn Device>, count: &BufferView) -> Result<Started, Need> {
    let contract = KernelContract::new("counting", [Param::read_write(4).aligned(4)]).resident();
    let kernel = kernel(device, &contract, COUNTING)?;
    let args = [Arg::Buffer(count)];
    let desc = ResidentDesc::new(Launch::new(&kernel, [1; 3], &args)?);
    Ok(device.residents().ok_or("the family is there")?.launch(&desc))
}

fn a_resident_fails_with_its_device() -> Verdict {
    let (_turn, config) = interposed::config()?;
    let (_backend, device) = open(&config)?;
    let count = memory(&device, BufferDesc::host_visible(4))?;
    let (running, parked) = (start(&device, &count)??, start(&device, &count)??);
    parked.park(Deadline::within(PATIENCE))?;
    lose(&device, &count)?;
    // The batch under way comes to its end first.
    let deadline = Deadline::within(PATIENCE);
    while running.state() != ResidentState::Failed {
        assert!(!deadline.is_past(), "it runs on");
        std::thread::yield_now();
    }
    assert_eq!(class!(running.park(deadline)).0, Some(ErrorClass::DeviceLost));
    for resident in [running, parked] {
        assert_lost(&*resident.failure().ok_or("the resident knows")?);
        assert_eq!(class!(resident.resume()).0, Some(ErrorClass::DeviceLost));
        resident.stop(deadline)?;
    }
    Ok(())
}

fn a_lost_device_is_followed_by_another() -> Verdict {
    let (_turn, config) = interposed::config()?;
    let (backend, device) = open(&config)?;
    let view = memory(&device, BufferDesc::host_visible(64))?;
    lose(&device, &view)?;
    SUBMIT.work();
    drop((device, view));
    // The lost one goes once its work was let go of.
    let deadline = Deadline::within(PATIENCE);
    let another = loop {
        let device = backend.open(0, Features::empty())?;
        if device.failure().is_none() {
            break device;
        }
        drop(device);
        if deadline.is_past() {
            return Err("the lost device stays".into());
        }
        std::thread::yield_now();
    };
    let view = memory(&another, BufferDesc::host_visible(64))?;
    run(&another, Op::Fill(FillRegion::bytes(&view, 2)))?;
    assert_eq!(words(&view)?, [0x0202_0202; 16]);
    Ok(())
}

fn a_device_that_cannot_be_made_says_why() -> Verdict {
    let (_turn, config) = interposed::config()?;
    let backend = open_backend(&config)?;
    for (call, answer, expected) in [
        (&CREATE_DEVICE, LOST, ErrorClass::DeviceLost),
        (&CREATE_DEVICE, NO_HOST_MEMORY, ErrorClass::Exhausted),
        (&ALLOCATE, NO_MEMORY, ErrorClass::Exhausted),
        (&ALLOCATE, LOST, ErrorClass::DeviceLost),
    ] {
        call.fail(answer);
        let said = class!(backend.open(0, Features::empty())).0;
        call.work();
        assert_eq!(said, Some(expected), "{answer:?}");
    }
    backend.open(0, Features::empty())?;
    Ok(())
}

fn memory_that_is_not_there_is_named() -> Verdict {
    let (_turn, config) = interposed::config()?;
    let (_backend, device) = open(&config)?;
    // As a block of its own, and as the first part of a shared one.
    for size in [1 << 24, 64] {
        ALLOCATE.fail(NO_MEMORY);
        let error = device.allocate(&BufferDesc::upload(size)).err().ok_or("it was granted")?;
        assert!(
            matches!(error, AllocError::HostOutOfMemory { requested, .. } if requested.0 == size),
            "{error}"
        );
        let error = device.allocate(&BufferDesc::device(size)).err().ok_or("it was granted")?;
        assert!(matches!(error, AllocError::OutOfMemory { requested, .. } if requested.0 == size), "{error}");
        ALLOCATE.fail(NO_HOST_MEMORY);
        let error = device.allocate(&BufferDesc::device(size)).err().ok_or("it was granted")?;
        assert!(
            matches!(error, AllocError::HostOutOfMemory { requested, .. } if requested.0 == size),
            "{error}"
        );
        assert_eq!(error.class(), ErrorClass::Exhausted);
        ALLOCATE.work();
        memory(&device, BufferDesc::device(size))?;
    }
    // What was not granted counts for nothing.
    let free = device.memory()?.free;
    ALLOCATE.fail(NO_MEMORY);
    assert!(device.allocate(&BufferDesc::device(1 << 24)).is_err());
    assert_eq!(device.memory()?.free, free);
    assert!(device.failure().is_none());
    Ok(())
}

/// The words that it and the host exchange are memory of the device's own.
fn a_resident_without_memory_is_not_started() -> Verdict {
    let (_turn, config) = interposed::config()?;
    let (_backend, device) = open(&config)?;
    let count = memory(&device, BufferDesc::host_visible(4))?;
    ALLOCATE.fail(NO_HOST_MEMORY);
    // What is left of the allocation that small buffers share.
    let mut taken = Vec::new();
    for size in [1 << 18, 1 << 13, 64] {
        taken.extend(std::iter::from_fn(|| device.allocate(&BufferDesc::host_visible(size)).ok()));
    }
    let said = start(&device, &count)?.err().ok_or("it was started")?;
    assert!(matches!(said, ResidentError::Memory(_)), "{said:?}");
    assert_eq!(said.class(), ErrorClass::Exhausted);
    assert_eq!(device.residents().ok_or("the family is there")?.budget().used, 0);
    drop(taken);
    Ok(start(&device, &count)??.stop(Deadline::within(PATIENCE))?)
}

/// The queue whose work it was stops; the device and its other queues go on.
fn work_without_memory_fails_alone() -> Verdict {
    let (_turn, config) = interposed::config()?;
    let (_backend, device) = open(&config)?;
    let view = memory(&device, BufferDesc::host_visible(64))?;
    for (call, answer) in [(&SUBMIT, NO_MEMORY), (&SUBMIT, NO_HOST_MEMORY), (&MAKE_COMMANDS, NO_HOST_MEMORY)]
    {
        let (stopped, done) = (queue(&device)?, point(&device)?);
        call.fail(answer);
        fill(&stopped, &view, &[], &done)?;
        let failure = failure_of(&done)?;
        call.work();
        assert!(matches!(*failure, Failure::OutOfMemory { .. }), "{failure:?}");
        let said = class!(stopped.submit(&Submission::default())).0;
        assert_eq!(said, Some(ErrorClass::Exhausted));
        run(&device, Op::Fill(FillRegion::bytes(&view, 3)))?;
    }
    assert!(device.failure().is_none());
    Ok(())
}

fn code_without_memory_can_be_loaded_later() -> Verdict {
    let (_turn, config) = interposed::config()?;
    let (_backend, device) = open(&config)?;
    for (call, answer) in [(&COMPILE, NO_MEMORY), (&COMPILE, NO_HOST_MEMORY), (&SUBMIT, NO_MEMORY)] {
        call.fail(answer);
        let said = class!(kernel(&device, &none(), NONE)).0;
        call.work();
        assert_eq!(said, Some(ErrorClass::Exhausted), "{answer:?}");
        kernel(&device, &none(), NONE)?;
    }
    Ok(())
}

/// That the driver cannot tell says nothing of the work.
fn a_counter_without_memory_is_asked_again() -> Verdict {
    let (_turn, config) = interposed::config()?;
    let (_backend, device) = open(&config)?;
    let view = memory(&device, BufferDesc::host_visible(64))?;
    let (queue, done) = (queue(&device)?, point(&device)?);
    COUNTER.fail(NO_HOST_MEMORY);
    WAIT.fail(NO_HOST_MEMORY);
    fill(&queue, &view, &[], &done)?;
    let early = done.wait(Duration::from_millis(20));
    assert!(matches!(early, Err(WaitError::Timeout { .. })), "{early:?}");
    COUNTER.work();
    WAIT.work();
    done.wait(PATIENCE)?;
    fill(&queue, &view, &[], &point(&device)?)
}
