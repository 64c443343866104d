//! Every call of the driver fails once, in every way that matters; nothing may panic, hang or be forgotten.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    task::{Wake, Waker},
    thread,
    time::Duration,
};

use warpweft_core_types::{
    Access, Arg, Backend, BufferDesc, BufferView, CopyRegion, Deadline, Features, FillRegion, GraphNode,
    HostMemory, Launch, Op, PreparedGraph, ResidentDesc, SemaphorePoint, Submission, TimestampRegion,
    WaitError,
};
use warpweft_cuda::{CudaBackend, CudaConfig};
use warpweft_host::HostBackend;
use warpweft_stand_in_cuda::StandIn;

use crate::support::{Lane, Outcome, PATIENCE, config, counter, kernel, number};

/// An error of the caller's, one that passes, a lost device, and something that no manual names.
const CODES: [i32; 4] = [1, 2, 719, 12_345];

#[derive(Default)]
struct Woken(AtomicU32);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A point of which somebody waits for news.
struct Awaited {
    point: SemaphorePoint,
    woken: Arc<Woken>,
}

/// Two devices with work that depends on each other's, and a resident. What was submitted goes to `points`.
fn work(stand_in: &StandIn, points: &Mutex<Vec<Awaited>>) -> Outcome {
    let note = |point: &SemaphorePoint| {
        let woken = Arc::new(Woken::default());
        point.semaphore.wake_when(point.value, Waker::from(Arc::clone(&woken)));
        points.lock().unwrap().push(Awaited { point: point.clone(), woken });
    };
    let backend = CudaBackend::with_config(&config(stand_in))?;
    let (mut near, far) = (Lane::open(&backend, 0)?, Lane::open(&backend, 1)?);
    near.count_to_four()?;
    let memory = far.memory(BufferDesc::device(64))?;
    let odd = memory.slice(1..61)?;
    let fill = [Op::Fill(FillRegion::words(&odd, 0x0102_0304)?)];
    let filled = far.next.clone();
    far.queue.submit(&Submission { waits: &[], ops: &fill, signals: std::slice::from_ref(&filled) })?;
    note(&filled);
    let read = near.next.clone();
    near.queue.submit(&Submission {
        waits: std::slice::from_ref(&filled),
        ops: &[],
        signals: std::slice::from_ref(&read),
    })?;
    near.next.value += 1;
    note(&read);
    read.wait(PATIENCE)?;
    optional_families(&mut near, &note)?;
    let counter = kernel(&near.device, &counter())?;
    let counts = near.memory(BufferDesc::host_visible(8))?;
    let args = [Arg::Buffer(&counts)];
    let residents = near.device.residents().ok_or("the family is absent")?;
    let resident = residents.launch(&ResidentDesc::new(Launch::new(&counter, [2, 1, 1], &args)?))?;
    resident.park(Deadline::within(PATIENCE))?;
    resident.resume()?;
    resident.stop(Deadline::within(PATIENCE))?;
    Ok(())
}

/// Graphs, clocks, memory that is shared or somebody else's, and captures.
fn optional_families(lane: &mut Lane, note: &dyn Fn(&SemaphorePoint)) -> Outcome {
    let device = Arc::clone(&lane.device);
    let [target, other] = [lane.memory(BufferDesc::device(64))?, lane.memory(BufferDesc::device(64))?];
    let number = kernel(&device, &number())?;
    let base = 7_u32.to_le_bytes();
    let args = [Arg::Buffer(&other), Arg::Scalar(&base)];
    let (fill, launch) = (FillRegion::bytes(&target, 1), Launch::new(&number, [4, 1, 1], &args)?);
    let interop = device.interop().ok_or("the family is absent")?;
    let captured = interop.capture(vec![(target.clone(), Access::Write)], Arc::new(()), &mut |_| Ok(()))?;
    let nodes = [
        GraphNode::new(&Op::Fill(fill), &[]),
        GraphNode::new(&Op::Launch(launch), &[0]),
        GraphNode::new(&Op::Copy(CopyRegion::new(&other, &target)?), &[1]),
        GraphNode::new(captured, &[2]),
    ];
    let mut graph = PreparedGraph::new(device.as_ref(), &nodes)?;
    let (clock, stamp) =
        (device.clock().ok_or("the family is absent")?, lane.memory(BufferDesc::host_visible(8))?);
    for round in [1, 2] {
        graph.set(0, &Op::Fill(FillRegion::bytes(&target, round)))?;
        let ops = [Op::Replay(&graph), Op::Timestamp(TimestampRegion::new(clock, &stamp)?)];
        let done = lane.submit(&ops)?;
        note(&done);
        done.wait(PATIENCE)?;
    }
    clock.sample(Deadline::within(PATIENCE)).map_err(|failure| failure.to_string())?;
    let sharing = device.sharing().ok_or("the family is absent")?;
    let shareable = sharing.allocate_shareable(4096)?;
    let shared = BufferView::whole(sharing.import_shared(sharing.export(shareable.as_ref())?)?);
    let host = device.host_import().ok_or("the family is absent")?;
    // Memory of another backend, which the driver does not know yet.
    let stranger = HostBackend::with_devices(1)?.open(0, Features::empty())?;
    let theirs = stranger.allocate(&BufferDesc::host_visible(host.alignment()))?;
    let theirs = BufferView::whole(host.import(HostMemory::of_buffer(theirs).ok_or("it is not mapped")?)?);
    let fills = [Op::Fill(FillRegion::bytes(&shared, 3)), Op::Fill(FillRegion::bytes(&theirs, 4))];
    let done = lane.submit(&fills)?;
    note(&done);
    Ok(done.wait(PATIENCE)?)
}

/// Does the work while one call fails; whether that call was made.
fn fails_well(stand_in: &Arc<StandIn>, function: &str, number: u64, code: i32) -> bool {
    stand_in.fail(function, number, code);
    let case = format!("call {number} of {function} that fails with {code}");
    let points = Arc::new(Mutex::new(Vec::new()));
    let (done, ended) = mpsc::channel();
    let shared = (Arc::clone(stand_in), Arc::clone(&points));
    let worker = thread::spawn(move || {
        let outcome = work(&shared.0, &shared.1);
        let _listening = done.send(());
        outcome
    });
    ended.recv_timeout(2 * PATIENCE).unwrap_or_else(|_| {
        assert!(worker.is_finished(), "{case} hangs");
    });
    let outcome = worker.join().unwrap_or_else(|_| panic!("{case} panics"));
    let failed = stand_in.failed().is_some();
    assert!(failed || outcome.is_ok(), "nothing was made to fail: {outcome:?}");
    for awaited in points.lock().unwrap().iter() {
        let settled = awaited.point.wait(PATIENCE);
        assert!(!matches!(settled, Err(WaitError::Timeout { .. })), "{case} forgets a point");
        let started = Deadline::within(PATIENCE);
        while awaited.woken.0.load(Ordering::SeqCst) == 0 {
            assert!(!started.is_past(), "{case} forgets a waker");
            thread::yield_now();
        }
    }
    failed
}

/// Whether nothing is left of the work, or soon will not be.
fn is_clean(stand_in: &StandIn) -> bool {
    let soon = Deadline::within(Duration::from_millis(50));
    while stand_in.live("contexts") + stand_in.live("ranges") > 0 && !soon.is_past() {
        thread::yield_now();
    }
    stand_in.live("contexts") + stand_in.live("ranges") == 0
}

/// A driver to go on with: the same, unless something of it is kept for good because a device may touch it.
fn fresh(stand_in: Arc<StandIn>) -> Arc<StandIn> {
    if is_clean(&stand_in) { stand_in } else { Arc::new(StandIn::load().unwrap()) }
}

#[test]
fn every_function_that_a_driver_lacks_is_named() {
    let stand_in = StandIn::load().unwrap();
    work(&stand_in, &Mutex::default()).unwrap();
    // One is done without where it is missing, and without the other nothing is known of the driver.
    let others = ["cuFuncGetParamInfo", "cuDriverGetVersion"];
    let called = stand_in.called();
    let needed: Vec<&str> = called.iter().map(String::as_str).filter(|name| !others.contains(name)).collect();
    let (_folder, path) = StandIn::without(&needed).unwrap();
    let error = CudaBackend::with_config(&CudaConfig::default().with_driver(path)).unwrap_err().to_string();
    for name in needed {
        assert!(error.contains(name), "{name} is not in: {error}");
    }
}

#[test]
fn every_call_may_fail() {
    let mut stand_in = Arc::new(StandIn::load().unwrap());
    work(&stand_in, &Mutex::default()).unwrap();
    for function in stand_in.called() {
        // The first few calls, and some of the many by which waiting threads ask.
        let numbers = (0..6).chain((3..9).map(|power| 1 << power));
        for (number, turn) in numbers.zip(0..) {
            let codes = if number == 0 { &CODES[..] } else { &CODES[turn % CODES.len()..][..1] };
            let made = codes.iter().filter(|&&code| {
                stand_in = fresh(Arc::clone(&stand_in));
                fails_well(&stand_in, &function, number, code)
            });
            if made.count() == 0 {
                break;
            }
        }
    }
}
