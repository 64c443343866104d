//! Each wrapper over host devices: what it does, and that it leaves the rest alone.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed step fails the test")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use warpweft_core_types::{
    AllocError, Arg, Backend, BufferDesc, BufferView, CopyRegion, Device, Failure, Features, FillRegion,
    HostFunction, HostMemory, Kernel, KernelCode, KernelContract, Launch, LoadError, Op, OpenError, Param,
    Progress, Queue, QueueDesc, ResidentDesc, ResidentError, Semaphore, SemaphorePoint, Submission,
    SubmitError, WaitError,
};
use warpweft_host::HostBackend;
use warpweft_wrappers::{FaultConfig, FaultyBackend, TracingBackend, ValidatingBackend};

const PATIENCE: Duration = Duration::from_secs(10);

struct Bench {
    device: Arc<dyn Device>,
    queue: Arc<dyn Queue>,
    semaphore: Arc<dyn Semaphore>,
}

impl Bench {
    fn new(backend: &dyn Backend) -> Self {
        let device = backend.open(0, Features::empty()).unwrap();
        let queue = device.create_queue(&QueueDesc::default()).unwrap();
        let semaphore = device.create_semaphore(0).unwrap();
        Self { device, queue, semaphore }
    }

    fn faulty(config: FaultConfig) -> Self {
        Self::new(&FaultyBackend::new(host(), config))
    }

    fn view(&self) -> BufferView {
        BufferView::whole(self.device.allocate(&BufferDesc::host_visible(64)).unwrap())
    }

    fn point(&self, value: u64) -> SemaphorePoint {
        SemaphorePoint::new(&self.semaphore, value)
    }

    fn submit(&self, ops: &[Op<'_>], value: u64) -> Result<SemaphorePoint, SubmitError> {
        let point = self.point(value);
        let signals = std::slice::from_ref(&point);
        self.queue.submit(&Submission { waits: &[], ops, signals })?;
        Ok(point)
    }

    fn kernel(&self) -> Arc<dyn Kernel> {
        self.device.load(&idle_kernel()).unwrap().kernel("idle").unwrap()
    }

    fn resident_kernel(&self) -> Arc<dyn Kernel> {
        self.device.load(&idle_kernel()).unwrap().kernel("stays").unwrap()
    }
}

fn host() -> Arc<dyn Backend> {
    Arc::new(HostBackend::with_devices(2).unwrap())
}

fn idle_kernel() -> KernelCode {
    let contract = KernelContract::new("idle", [Param::read_write(1)]);
    let stays = KernelContract::new("stays", [Param::read_write(1)]).resident();
    KernelCode::new()
        .with_function(contract, HostFunction::new(|_| {}))
        .with_function(stays, HostFunction::resident(|_| Progress::Idle))
}

fn copy<'a>(src: &'a BufferView, dst: &'a BufferView) -> Op<'a> {
    Op::Copy(CopyRegion::new(src, dst).unwrap())
}

fn failure_of(point: &SemaphorePoint) -> Arc<Failure> {
    match point.wait(PATIENCE).unwrap_err() {
        WaitError::Failed(failure) => failure,
        other => panic!("{other}"),
    }
}

#[test]
fn no_faults_asked_for_are_no_faults() {
    let bench = Bench::faulty(FaultConfig::default());
    let (src, dst) = (bench.view(), bench.view());
    src.write(&[7; 64]).unwrap();
    bench.submit(&[copy(&src, &dst)], 1).unwrap().wait(PATIENCE).unwrap();
    let mut bytes = [0; 64];
    dst.read(&mut bytes).unwrap();
    assert_eq!(bytes, [7; 64]);
    assert!(bench.device.failure().is_none() && bench.queue.failure().is_none());
}

#[test]
fn allocations_fail_and_are_slow() {
    let fails = Bench::faulty(FaultConfig { allocation_fails: 1.0, ..Default::default() });
    let error = fails.device.allocate(&BufferDesc::device(8)).unwrap_err();
    assert!(matches!(error, AllocError::OutOfMemory { .. }));
    let delay = Duration::from_millis(30);
    let config = FaultConfig { allocation_is_slow: 1.0, allocation_delay: delay, ..Default::default() };
    let slow = Bench::faulty(config);
    let started = Instant::now();
    slow.view();
    assert!(started.elapsed() >= delay);
}

#[test]
fn imports_fail() {
    let import = |bench: &Bench| {
        let view = BufferView::whole(bench.device.allocate(&BufferDesc::host_visible(4096)).unwrap());
        let memory = HostMemory::of_buffer(Arc::clone(view.buffer())).unwrap();
        bench.device.host_import().unwrap().import(memory)
    };
    let fails = Bench::faulty(FaultConfig { import_fails: 1.0, ..Default::default() });
    assert!(matches!(import(&fails), Err(AllocError::CannotImport { .. })));
    assert_eq!(import(&Bench::faulty(FaultConfig::default())).unwrap().size(), 4096);
}

#[test]
fn loads_fail() {
    let bench = Bench::faulty(FaultConfig { load_fails: 1.0, ..Default::default() });
    assert!(matches!(bench.device.load(&idle_kernel()), Err(LoadError::Rejected { .. })));
}

#[test]
fn copies_fail_after_what_came_before_and_stop_their_queue() {
    let bench = Bench::faulty(FaultConfig { copy_fails: 1.0, ..Default::default() });
    let (kernel, src, dst) = (bench.kernel(), bench.view(), bench.view());
    let args = [Arg::Buffer(&src)];
    let launch = Op::Launch(Launch::new(&kernel, [1, 1, 1], &args).unwrap());
    let point = bench.submit(&[launch, copy(&src, &dst)], 1).unwrap();
    assert!(matches!(*failure_of(&point), Failure::OperationFailed { what: "copy", .. }));
    assert!(matches!(bench.submit(&[launch], 2), Err(SubmitError::Failed(_))));
    assert!(bench.queue.failure().is_some());
    // The device goes on with another queue.
    let queue = bench.device.create_queue(&QueueDesc::default()).unwrap();
    let semaphore = bench.device.create_semaphore(0).unwrap();
    let again = Bench { device: Arc::clone(&bench.device), queue, semaphore };
    again.submit(&[launch], 1).unwrap().wait(PATIENCE).unwrap();
}

#[test]
fn a_failing_copy_waits_for_its_turn() {
    let bench = Bench::faulty(FaultConfig { copy_fails: 1.0, ..Default::default() });
    let (src, dst) = (bench.view(), bench.view());
    let gate = SemaphorePoint::new(&bench.device.create_semaphore(0).unwrap(), 1);
    let (point, ops) = (bench.point(1), [copy(&src, &dst)]);
    let submission =
        Submission { waits: std::slice::from_ref(&gate), ops: &ops, signals: std::slice::from_ref(&point) };
    bench.queue.submit(&submission).unwrap();
    assert!(matches!(point.wait(Duration::from_millis(5)), Err(WaitError::Timeout { .. })));
    gate.semaphore.signal(1).unwrap();
    failure_of(&point);
}

#[test]
fn launches_fail_resident_ones_too() {
    let bench = Bench::faulty(FaultConfig { launch_fails: 1.0, ..Default::default() });
    let (kernel, view) = (bench.kernel(), bench.view());
    let args = [Arg::Buffer(&view)];
    let launch = Launch::new(&kernel, [1, 1, 1], &args).unwrap();
    let point = bench.submit(&[Op::Launch(launch)], 1).unwrap();
    assert!(matches!(*failure_of(&point), Failure::OperationFailed { what: "launch", .. }));
    let stays = bench.resident_kernel();
    let launch = Launch::new(&stays, [1, 1, 1], &args).unwrap();
    let error = bench.device.residents().unwrap().launch(&ResidentDesc::new(launch)).unwrap_err();
    assert!(matches!(error, ResidentError::NotResident { started: 0, wanted: 1, .. }));
}

#[test]
fn corrupted_copies_arrive_with_other_bytes() {
    let bench = Bench::faulty(FaultConfig { copy_corrupts: 1.0, ..Default::default() });
    let (src, dst) = (bench.view(), bench.view());
    src.write(&[7; 64]).unwrap();
    bench.submit(&[copy(&src, &dst)], 1).unwrap().wait(PATIENCE).unwrap();
    let mut bytes = [0; 64];
    dst.read(&mut bytes).unwrap();
    assert_ne!(bytes, [7; 64]);
    assert_eq!(bytes[8..], [7; 56]);
}

#[test]
fn slow_work_starts_later_and_ends_well() {
    let delay = Duration::from_millis(30);
    let bench = Bench::faulty(FaultConfig { work_is_slow: 1.0, work_delay: delay, ..Default::default() });
    let view = bench.view();
    let started = Instant::now();
    bench.submit(&[Op::Fill(FillRegion::bytes(&view, 3))], 1).unwrap().wait(PATIENCE).unwrap();
    assert!(started.elapsed() >= delay);
    let mut bytes = [0; 64];
    view.read(&mut bytes).unwrap();
    assert_eq!(bytes, [3; 64]);
}

#[test]
fn a_lost_signal_is_promised_and_never_comes() {
    let bench = Bench::faulty(FaultConfig { signal_is_lost: 1.0, ..Default::default() });
    let view = bench.view();
    let point = bench.submit(&[Op::Fill(FillRegion::bytes(&view, 3))], 1).unwrap();
    assert!(matches!(point.wait(Duration::from_millis(20)), Err(WaitError::Timeout { .. })));
    let mut bytes = [0; 64];
    view.read(&mut bytes).unwrap();
    assert_eq!(bytes, [3; 64]);
    assert!(matches!(bench.submit(&[], 1), Err(SubmitError::NotIncreasing { .. })));
}

#[test]
fn a_device_that_dies_takes_its_promises_along_and_refuses_everything() {
    // Steps: two allocations, one load, one submission that waits; the fifth kills.
    let bench = Bench::faulty(FaultConfig { dies_at_step: Some(4), ..Default::default() });
    let (kernel, src, dst) = (bench.kernel(), bench.view(), bench.view());
    let gate = SemaphorePoint::new(&bench.device.create_semaphore(0).unwrap(), 1);
    let (point, ops) = (bench.point(1), [copy(&src, &dst)]);
    let submission =
        Submission { waits: std::slice::from_ref(&gate), ops: &ops, signals: std::slice::from_ref(&point) };
    bench.queue.submit(&submission).unwrap();
    assert!(bench.device.failure().is_none());
    assert!(matches!(bench.submit(&[], 2), Err(SubmitError::Failed(_))));
    assert!(matches!(*failure_of(&point), Failure::DeviceLost { .. }));
    assert!(bench.device.failure().is_some() && bench.queue.failure().is_some());
    assert!(matches!(bench.device.allocate(&BufferDesc::device(8)), Err(AllocError::Failed(_))));
    assert!(matches!(bench.device.memory(), Err(AllocError::Failed(_))));
    assert!(matches!(bench.device.create_queue(&QueueDesc::default()), Err(OpenError::Failed(_))));
    assert!(matches!(bench.device.create_semaphore(0), Err(OpenError::Failed(_))));
    assert!(matches!(bench.device.load(&idle_kernel()), Err(LoadError::Failed(_))));
    let args = [Arg::Buffer(&src)];
    let launch = Launch::new(&kernel, [1, 1, 1], &args).unwrap();
    let error = bench.device.residents().unwrap().launch(&ResidentDesc::new(launch)).unwrap_err();
    assert!(matches!(error, ResidentError::Failed(_)));
}

#[test]
fn one_seed_gives_one_sequence_of_faults() {
    let faults = |seed| -> Vec<bool> {
        let bench = Bench::faulty(FaultConfig { seed, allocation_fails: 0.5, ..Default::default() });
        (0..64).map(|_| bench.device.allocate(&BufferDesc::device(8)).is_err()).collect()
    };
    assert_eq!(faults(1), faults(1));
    assert_ne!(faults(1), faults(2));
}

/// A validated device with a second queue, and work on the first that is held up by a gate.
struct Held {
    bench: Bench,
    other: Arc<dyn Queue>,
    views: [BufferView; 2],
    gate: SemaphorePoint,
    held: SemaphorePoint,
}

fn held() -> Held {
    let bench = Bench::new(&ValidatingBackend::new(host()));
    let views = [bench.view(), bench.view()];
    let gate = SemaphorePoint::new(&bench.device.create_semaphore(0).unwrap(), 1);
    let (held, ops) = (bench.point(1), [copy(&views[0], &views[1])]);
    let submission =
        Submission { waits: std::slice::from_ref(&gate), ops: &ops, signals: std::slice::from_ref(&held) };
    bench.queue.submit(&submission).unwrap();
    let other = bench.device.create_queue(&QueueDesc::default()).unwrap();
    Held { bench, other, views, gate, held }
}

impl Held {
    fn fill(&self, view: &BufferView, waits: &[SemaphorePoint]) -> Result<(), SubmitError> {
        let ops = [Op::Fill(FillRegion::bytes(view, 1))];
        self.other.submit(&Submission { waits, ops: &ops, signals: &[] }).map(|_| ())
    }
}

#[test]
fn an_unordered_conflict_is_refused_with_both_sides_named() {
    let held = held();
    let error = held.fill(&held.views[0], &[]).unwrap_err();
    let SubmitError::Invalid { reason } = error else { panic!("{error}") };
    for part in ["write of", "read of", "queue 0 of host:0"] {
        assert!(reason.contains(part), "{reason:?} lacks {part:?}");
    }
    held.gate.semaphore.signal(1).unwrap();
    held.held.wait(PATIENCE).unwrap();
}

#[test]
fn order_by_semaphore_by_queue_or_by_time_is_accepted() {
    let first = held();
    first.fill(&first.views[0], std::slice::from_ref(&first.held)).unwrap();
    // Behind the fill on its own queue, and so behind the held copy too.
    first.fill(&first.views[1], &[]).unwrap();
    first.gate.semaphore.signal(1).unwrap();
    let held = held();
    held.bench.submit(&[Op::Fill(FillRegion::bytes(&held.views[1], 1))], 2).unwrap();
    held.gate.semaphore.signal(1).unwrap();
    held.bench.point(2).wait(PATIENCE).unwrap();
    held.fill(&held.views[1], &[]).unwrap();
}

#[test]
fn readers_of_one_range_and_writers_of_different_ranges_are_accepted() {
    let held = held();
    let third = held.bench.view();
    let halves = [0..32, 32..64].map(|range| third.slice(range).unwrap());
    // Held up by the gate, so that both are under way at once.
    held.bench.submit(&[Op::Fill(FillRegion::bytes(&halves[0], 1))], 2).unwrap();
    held.fill(&halves[1], &[]).unwrap();
    let reader_target = held.bench.view();
    let reader = [copy(&held.views[0], &reader_target)];
    held.other.submit(&Submission { waits: &[], ops: &reader, signals: &[] }).unwrap();
    held.gate.semaphore.signal(1).unwrap();
}

#[test]
fn a_wait_that_only_the_host_can_end_may_order_anything() {
    let held = held();
    let by_host = SemaphorePoint::new(&held.bench.device.create_semaphore(0).unwrap(), 1);
    held.fill(&held.views[0], std::slice::from_ref(&by_host)).unwrap();
    held.gate.semaphore.signal(1).unwrap();
    held.held.wait(PATIENCE).unwrap();
    by_host.semaphore.signal(1).unwrap();
}

#[test]
fn what_signals_comes_before_what_waits_for_it_however_late_it_is_submitted() {
    let held = held();
    let signalling = |queue: &Arc<dyn Queue>, view: &BufferView, signal: &SemaphorePoint| {
        let ops = [Op::Fill(FillRegion::bytes(view, 1))];
        queue.submit(&Submission { waits: &[], ops: &ops, signals: std::slice::from_ref(signal) })
    };
    // Behind the held copy there is one more in its queue, and one in another that waits for that.
    let third = held.bench.view();
    let behind = held.bench.submit(&[copy(&held.views[1], &third)], 2).unwrap();
    held.fill(&third, std::slice::from_ref(&behind)).unwrap();
    let late = held.bench.device.create_queue(&QueueDesc::default()).unwrap();
    let nothing = SemaphorePoint::new(&held.bench.device.create_semaphore(0).unwrap(), 1);
    // What signals something else is ordered by nothing.
    assert!(matches!(signalling(&late, &third, &nothing), Err(SubmitError::Invalid { .. })));
    signalling(&late, &third, &held.gate).unwrap();
    behind.wait(PATIENCE).unwrap();
}

#[test]
fn waiting_for_ones_own_signal_is_refused() {
    let bench = Bench::new(&ValidatingBackend::new(host()));
    let point = bench.point(1);
    let own = std::slice::from_ref(&point);
    let error = bench.queue.submit(&Submission { waits: own, ops: &[], signals: own }).unwrap_err();
    assert!(matches!(error, SubmitError::Invalid { .. }));
}

#[test]
fn a_trace_holds_what_ran_and_is_bounded() {
    let backend = TracingBackend::new(host(), 3);
    let bench = Bench::new(&backend);
    let (kernel, view) = (bench.kernel(), bench.view());
    let args = [Arg::Buffer(&view)];
    let launch = Op::Launch(Launch::new(&kernel, [1, 1, 1], &args).unwrap());
    for value in 1..=4 {
        bench.submit(&[launch, Op::Fill(FillRegion::bytes(&view, 1))], value).unwrap();
    }
    bench.point(4).wait(PATIENCE).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while backend.trace().events().iter().any(|event| event.ended.is_none()) {
        assert!(Instant::now() < deadline, "the ends are seen");
        std::thread::yield_now();
    }
    let events = backend.trace().events();
    assert_eq!((events.len(), backend.trace().dropped()), (3, 1));
    assert_eq!(events[0].ops, ["idle", "fill"]);
    assert_eq!(events[0].bytes, 64);
    assert!(events[0].ended.unwrap() >= events[0].submitted);
    let json = backend.trace().to_chrome_json();
    assert_eq!(json["traceEvents"].as_array().unwrap().len(), 3);
    assert_eq!(json["traceEvents"][0]["name"], "idle, fill");
    assert_eq!(json["otherData"]["dropped"], 1);
}
