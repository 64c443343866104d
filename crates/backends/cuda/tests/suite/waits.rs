//! Calls that can wait, and what they wait for.

use std::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Wake, Waker},
    thread,
    time::Duration,
};

use warpweft_core_types::{
    Arg, BufferDesc, BufferView, Deadline, FillRegion, Launch, Op, QueueDesc, SemaphorePoint, Submission,
};
use warpweft_stand_in_cuda::StandIn;

use crate::{
    other::{Other, stream},
    support::{
        LIMIT, Lane, Outcome, PATIENCE, Pages, backend, blocking, failing, kernel, looked, number, soon,
        until,
    },
};

/// A kernel that runs until its word is set.
struct Stuck {
    word: BufferView,
    point: SemaphorePoint,
}

impl Stuck {
    fn start(lane: &mut Lane) -> Outcome<Self> {
        let code = kernel(&lane.device, &blocking())?;
        Self::start_loaded(lane, &code)
    }

    fn start_loaded(lane: &mut Lane, code: &Arc<dyn warpweft_core_types::Kernel>) -> Outcome<Self> {
        let word = lane.memory(BufferDesc::host_visible(4))?;
        let args = [Arg::Buffer(&word)];
        let point = lane.submit(&[Op::Launch(Launch::new(code, [1; 3], &args)?)])?;
        Ok(Self { word: word.clone(), point })
    }

    fn end(&self) {
        self.word.write(&1_u32.to_le_bytes()).unwrap();
    }
}

/// A kernel that stays, and a load on another thread that waits for it and holds the context meanwhile.
fn held_context(stand_in: &StandIn, lane: &mut Lane) -> Outcome<(Stuck, thread::JoinHandle<()>)> {
    let stuck = Stuck::start(lane)?;
    let loads = stand_in.calls("cuModuleLoadDataEx");
    let device = Arc::clone(&lane.device);
    let loading = thread::spawn(move || {
        let _ = device.load(&number());
    });
    while stand_in.calls("cuModuleLoadDataEx") == loads {
        thread::yield_now();
    }
    Ok((stuck, loading))
}

/// The device's context.
fn handle(lane: &Lane) -> Outcome<u64> {
    Ok(lane.device.interop().ok_or("absent")?.device_handle().value)
}

#[test]
fn a_wait_ends_by_its_deadline_while_a_load_holds_the_context() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let (stuck, loading) = held_context(&stand_in, &mut lane)?;
    let point = stuck.point.clone();
    let waited = soon(LIMIT, move || point.wait(Duration::from_millis(100)));
    stuck.end();
    loading.join().unwrap();
    assert!(waited.is_some(), "a wait of 100 ms took longer than {LIMIT:?}");
    Ok(())
}

#[test]
fn a_poll_does_not_block_while_a_load_holds_the_context() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let (stuck, loading) = held_context(&stand_in, &mut lane)?;
    let point = stuck.point.clone();
    let polled = soon(LIMIT, move || point.poll().is_ok());
    stuck.end();
    loading.join().unwrap();
    assert!(polled.is_some(), "a poll took longer than {LIMIT:?}");
    Ok(())
}

#[test]
fn a_clock_reading_ends_by_its_deadline_while_a_load_holds_the_context() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let (stuck, loading) = held_context(&stand_in, &mut lane)?;
    let device = Arc::clone(&lane.device);
    let read = soon(LIMIT, move || {
        device.clock().unwrap().sample(Deadline::within(Duration::from_millis(100))).is_ok()
    });
    stuck.end();
    loading.join().unwrap();
    assert!(read.is_some(), "a reading within 100 ms took longer than {LIMIT:?}");
    Ok(())
}

/// The other device's waits go through the same reactor: is it held up too?
#[test]
fn the_other_device_is_not_held_up() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let (mut lane, mut other) = (Lane::open(&backend, 0)?, Lane::open(&backend, 1)?);
    let stuck_there = Stuck::start(&mut other)?;
    let (stuck, loading) = held_context(&stand_in, &mut lane)?;
    struct Flag(Mutex<bool>, Condvar);
    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            *self.0.lock().unwrap() = true;
            self.1.notify_all();
        }
    }
    let flag = Arc::new(Flag(Mutex::new(false), Condvar::new()));
    stuck_there.point.semaphore.wake_when(stuck_there.point.value, Waker::from(Arc::clone(&flag)));
    stuck_there.end();
    let woken = flag.1.wait_timeout_while(flag.0.lock().unwrap(), LIMIT, |woken| !*woken).unwrap();
    let was_woken = *woken.0;
    drop(woken);
    stuck.end();
    loading.join().unwrap();
    assert!(was_woken, "a future of device 1 was not woken for {LIMIT:?} since device 0 is busy with a load");
    Ok(())
}

/// Another library captures in the usual, global mode, while our work is under way.
#[test]
fn a_capture_of_another_library_fails_no_queue() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let context = lane.device.interop().ok_or("absent")?.device_handle().value;
    let other = Other::of(&stand_in);
    let stuck = Stuck::start(&mut lane)?;
    let theirs = other.create_stream(context);
    other.begin_capture_mode(context, theirs, 0).map_err(|code| code.to_string())?;
    looked(&stand_in);
    let ended = other.end_capture(context, theirs);
    stuck.end();
    let waited = stuck.point.wait(PATIENCE);
    assert!(waited.is_ok() && ended.is_ok(), "our work: {waited:?}; their capture: {ended:?}");
    Ok(())
}

/// Who waits for other work while recording: the other work is sound.
#[test]
fn a_look_at_a_point_during_a_capture_fails_no_queue() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let stuck = Stuck::start(&mut lane)?;
    let point = stuck.point.clone();
    let _capture = lane.device.interop().ok_or("absent")?.capture(Vec::new(), Arc::new(()), &mut |_| {
        let _ = point.poll();
        Ok(())
    });
    stuck.end();
    stuck.point.wait(PATIENCE)?;
    lane.submit(&[])?.wait(PATIENCE)?;
    Ok(())
}

/// A waker that keeps the thread that calls it until the test lets it go.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
    has_somebody: AtomicBool,
}

impl Gate {
    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

impl Wake for Gate {
    fn wake(self: Arc<Self>) {
        self.has_somebody.store(true, Ordering::Relaxed);
        let open = self.open.lock().unwrap();
        drop(self.changed.wait_timeout_while(open, 2 * LIMIT, |open| !*open));
    }
}

/// A queue that waits for a semaphore looks at it, finds the device lost, and is told so by itself.
#[test]
fn a_queue_that_finds_a_fault_by_itself_does_not_hang() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let mut b = Lane::open(&backend, 0)?;
    let (a, mut c) = (Lane::open(&backend, 0)?, Lane::open(&backend, 0)?);
    // The reactor is busy with somebody's waker for a while.
    let gate = Arc::new(Gate::default());
    let (memory, fails) = (b.memory(BufferDesc::device(64))?, kernel(&b.device, &failing())?);
    let (stays, word) = (kernel(&b.device, &blocking())?, b.memory(BufferDesc::host_visible(4))?);
    let early = Stuck::start_loaded(&mut c, &stays)?;
    early.point.semaphore.wake_when(early.point.value, Waker::from(Arc::clone(&gate)));
    // B signals 1 of its semaphore when it is over, and A waits for 2, which nobody has submitted.
    early.end();
    until(|| gate.has_somebody.load(Ordering::Relaxed));
    let args = [Arg::Buffer(&word)];
    let args_failing = [Arg::Buffer(&memory)];
    let ops = [
        Op::Launch(Launch::new(&stays, [1; 3], &args)?),
        Op::Launch(Launch::new(&fails, [1; 3], &args_failing)?),
    ];
    b.submit(&ops)?;
    let coming = b.next.clone();
    assert_eq!(coming.value, 2);
    let done = a.next.clone();
    a.queue.submit(&Submission {
        waits: std::slice::from_ref(&coming),
        ops: &[],
        signals: std::slice::from_ref(&done),
    })?;
    // Now the device is lost, and nobody has noticed.
    word.write(&1_u32.to_le_bytes())?;
    let (other, context) = (Other::of(&stand_in), handle(&a)?);
    until(|| other.synchronise(context, 0).is_err());
    let (queue, later) = (Arc::clone(&a.queue), SemaphorePoint::new(&done.semaphore, 2));
    let submitted = soon(LIMIT, move || {
        queue
            .submit(&Submission { waits: &[], ops: &[], signals: std::slice::from_ref(&later) })
            .map(drop)
            .map_err(|error| error.to_string())
    });
    gate.open();
    assert!(submitted.is_some(), "submit hangs");
    let _settled = done.wait(LIMIT);
    Ok(())
}

/// The last of a device goes while its work is under way: it is the reactor that lets the context go, where another
/// backend's kernel stays. The other device has nothing to do with it, and nothing is unloaded that would wait.
#[test]
fn the_end_of_one_device_does_not_hold_up_the_other() -> Outcome {
    let stand_in = StandIn::load()?;
    let (ours, theirs) = (backend(&stand_in), backend(&stand_in));
    let mut far = Lane::open(&ours, 1)?;
    let mut near = Lane::open(&ours, 0)?;
    let mut strange = Lane::open(&theirs, 0)?;
    let code = kernel(&near.device, &blocking())?;
    // Somebody else's kernel in the same primary context.
    let stays = Stuck::start(&mut strange)?;
    // Memory that can be written when the device's buffer of it is gone.
    let pages = Pages::new(1);
    let import = |lane: &Lane| -> Outcome<BufferView> {
        let family = lane.device.host_import().ok_or("absent")?;
        Ok(BufferView::whole(family.import(pages.part(0, 1))?))
    };
    let (word, window) = (import(&near)?, import(&far)?);
    let args = [Arg::Buffer(&word)];
    near.submit(&[Op::Launch(Launch::new(&code, [1; 3], &args)?)])?;
    drop((code, near, word));
    let unloads = stand_in.calls("cuModuleUnload");
    window.write(&1_u32.to_le_bytes())?;
    let submitted = soon(LIMIT, move || {
        let outcome = far.submit(&[]).map(drop).map_err(|error| error.to_string());
        (outcome, far)
    });
    assert_eq!(stand_in.calls("cuModuleUnload"), unloads, "somebody's kernel is there");
    stays.end();
    assert!(submitted.is_some(), "a submission to device 1 took longer than {LIMIT:?}");
    until(|| stand_in.calls("cuModuleUnload") > unloads);
    Ok(())
}

/// Dropping never waits without bound.
#[test]
fn dropping_a_device_does_not_wait_for_the_kernels_of_others() -> Outcome {
    let stand_in = StandIn::load()?;
    let (ours, theirs) = (backend(&stand_in), backend(&stand_in));
    let (near, mut strange) = (Lane::open(&ours, 0)?, Lane::open(&theirs, 0)?);
    let stays = Stuck::start(&mut strange)?;
    let dropped = soon(LIMIT, move || drop(near));
    stays.end();
    assert!(dropped.is_some(), "the drop took longer than {LIMIT:?}");
    Ok(())
}

/// A stream that is given to us and captured afterwards.
#[test]
fn a_stream_that_is_captured_later() -> Outcome {
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    let family = lane.device.interop().ok_or("absent")?;
    let (context, other) = (family.device_handle().value, Other::of(&stand_in));
    let theirs = other.create_stream(context);
    let queue = family.import_queue(stream("CUstream", theirs, Arc::new(())), &QueueDesc::default())?;
    let memory = lane.memory(BufferDesc::device(64))?;
    other.begin_capture_mode(context, theirs, 1).map_err(|code| code.to_string())?;
    let ops = [Op::Fill(FillRegion::bytes(&memory, 1))];
    let point = lane.next.clone();
    let (q2, signal) = (Arc::clone(&queue), point.clone());
    let submitted = q2.submit(&Submission { waits: &[], ops: &ops, signals: std::slice::from_ref(&signal) });
    let ended = other.end_capture(context, theirs);
    // Refused or failed, not silently captured and reported as done.
    match submitted {
        Err(_) => {}
        Ok(_) => {
            let waited = point.wait(LIMIT);
            assert!(
                matches!(waited, Err(warpweft_core_types::WaitError::Failed(_))),
                "submitted into a capture: {waited:?}, their capture: {ended:?}"
            );
        }
    }
    Ok(())
}

/// Nothing of ours is put in a stream of theirs later than when it was submitted.
#[test]
fn a_stream_that_is_captured_behind_a_submission_without_signals() -> Outcome {
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    let family = lane.device.interop().ok_or("absent")?;
    let (context, other) = (family.device_handle().value, Other::of(&stand_in));
    let theirs = other.create_stream(context);
    let imported = family.import_queue(stream("CUstream", theirs, Arc::new(())), &QueueDesc::default())?;
    let ours = lane.device.create_queue(&QueueDesc::default())?;
    let memory = lane.memory(BufferDesc::device(64))?;
    let ops = [Op::Fill(FillRegion::bytes(&memory, 1))];
    for queue in [imported, ours] {
        queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
        let handle = family.queue_handle(queue.as_ref())?.value;
        queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
        other.begin_capture_mode(context, handle, 1).map_err(|code| code.to_string())?;
        std::thread::sleep(std::time::Duration::from_millis(10));
        other.end_capture(context, handle).map_err(|code| code.to_string())?;
        let done = SemaphorePoint::new(&lane.device.create_semaphore(0)?, 1);
        let signals = std::slice::from_ref(&done);
        queue.submit(&Submission { waits: &[], ops: &ops, signals })?;
        done.wait(PATIENCE)?;
    }
    Ok(())
}

/// Whoever records may panic.
#[test]
fn captures_of_every_kind() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    let device = Arc::clone(&lane.device);
    let family = device.interop().ok_or("absent")?;
    let (context, other) = (family.device_handle().value, Other::of(&stand_in));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        family.capture(Vec::new(), Arc::new(()), &mut |_| panic!("a recorder that panics")).map(drop)
    }));
    assert!(panicked.is_err());
    lane.count_to_four()?;
    // It ends the capture itself, or begins another one.
    let ended = family.capture(Vec::new(), Arc::new(()), &mut |stream| {
        other.end_capture(context, stream.value).map_err(|code| code.to_string())?;
        Ok(())
    });
    assert!(ended.is_err());
    lane.count_to_four()?;
    // Nested.
    family.capture(Vec::new(), Arc::new(()), &mut |_| {
        family
            .capture(Vec::new(), Arc::new(()), &mut |_| Ok(()))
            .map(drop)
            .map_err(|error| error.to_string().into())
    })?;
    lane.count_to_four()?;
    // It says no.
    let refused = family.capture(Vec::new(), Arc::new(()), &mut |_| Err("no".into()));
    assert!(refused.is_err());
    lane.count_to_four()?;
    // It submits to a queue of ours meanwhile.
    let mut inner = Lane::open(&backend(&stand_in), 1)?;
    let _ = family.capture(Vec::new(), Arc::new(()), &mut |_| {
        inner.submit(&[]).map(drop).map_err(|error| error.to_string().into())
    })?;
    inner.submit(&[])?.wait(PATIENCE)?;
    assert!(stand_in.live("graphs") < 10);
    Ok(())
}

/// A consumer that is submitted ahead of its producer, on two queues of one device: nothing fails here.
#[test]
fn a_consumer_ahead_of_its_producer_does_not_hang() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let outcome = soon(LIMIT, move || -> Outcome {
        let (mut producer, consumer) = (Lane::open(&backend, 0)?, Lane::open(&backend, 0)?);
        let memory = producer.memory(BufferDesc::device(64))?;
        let point = |value| SemaphorePoint::new(&producer.next.semaphore, value);
        let consume = |value: u64| {
            let (wait, signal) = (point(value), SemaphorePoint::new(&consumer.next.semaphore, value));
            consumer.queue.submit(&Submission {
                waits: std::slice::from_ref(&wait),
                ops: &[],
                signals: std::slice::from_ref(&signal),
            })
        };
        let waits: Vec<_> = (1..=1001).map(point).collect();
        let _ = &waits;
        consume(1)?;
        consume(2)?;
        for value in 3..=1000 {
            let fill = [Op::Fill(FillRegion::bytes(&memory, 1))];
            let signal = SemaphorePoint::new(&producer.next.semaphore, value - 2);
            producer.queue.submit(&Submission {
                waits: &[],
                ops: &fill,
                signals: std::slice::from_ref(&signal),
            })?;
            let mut spins = 0;
            // The queue takes 1024.
            while let Err(error) = consume(value) {
                spins += 1;
                if spins > 1000 {
                    return Err(error.into());
                }
                thread::yield_now();
            }
            if value % 3 == 0 {
                thread::yield_now();
            }
        }
        producer.next.value = 1000;
        Ok(())
    });
    outcome.ok_or("it hangs")?
}

/// The same with the reactor out of the way, so that it is the queue itself that sees the end of the producer.
#[test]
fn a_queue_that_sees_a_value_by_itself_does_not_hang() -> Outcome {
    let stand_in = StandIn::load()?;
    let backend = backend(&stand_in);
    let (b, a, mut c) = (Lane::open(&backend, 0)?, Lane::open(&backend, 0)?, Lane::open(&backend, 0)?);
    let stays = kernel(&c.device, &blocking())?;
    let gate = Arc::new(Gate::default());
    let early = Stuck::start_loaded(&mut c, &stays)?;
    early.point.semaphore.wake_when(early.point.value, Waker::from(Arc::clone(&gate)));
    let produced = |value| SemaphorePoint::new(&b.next.semaphore, value);
    let consume = |value: u64| {
        let (wait, signal) = (produced(value), SemaphorePoint::new(&a.next.semaphore, value));
        a.queue.submit(&Submission {
            waits: std::slice::from_ref(&wait),
            ops: &[],
            signals: std::slice::from_ref(&signal),
        })
    };
    consume(1)?;
    consume(2)?;
    early.end();
    until(|| gate.has_somebody.load(Ordering::Relaxed));
    let one = produced(1);
    b.queue.submit(&Submission { waits: &[], ops: &[], signals: std::slice::from_ref(&one) })?;
    Other::of(&stand_in).synchronise(handle(&b)?, 0).map_err(|code| code.to_string())?;
    let (queue, wait) = (Arc::clone(&a.queue), produced(3));
    let submitted = soon(LIMIT, move || {
        queue
            .submit(&Submission { waits: std::slice::from_ref(&wait), ops: &[], signals: &[] })
            .map(drop)
            .map_err(|error| error.to_string())
    });
    gate.open();
    assert!(submitted.is_some(), "submit hangs");
    Ok(())
}

/// Another library captures in the usual, global mode, beside a resident.
#[test]
fn a_capture_of_another_library_ends_no_resident() -> Outcome {
    let stand_in = StandIn::load()?;
    let lane = Lane::open(&backend(&stand_in), 0)?;
    let context = lane.device.interop().ok_or("absent")?.device_handle().value;
    let other = Other::of(&stand_in);
    let kernel = kernel(&lane.device, &crate::support::counter())?;
    let counts = lane.memory(BufferDesc::host_visible(8))?;
    let args = [Arg::Buffer(&counts)];
    let launch = Launch::new(&kernel, [2, 1, 1], &args)?;
    let resident =
        lane.device.residents().ok_or("absent")?.launch(&warpweft_core_types::ResidentDesc::new(launch))?;
    let theirs = other.create_stream(context);
    other.begin_capture_mode(context, theirs, 0).map_err(|code| code.to_string())?;
    let asked = stand_in.calls("cuStreamQuery") + 20;
    until(|| stand_in.calls("cuStreamQuery") >= asked);
    let state = resident.state();
    let ended = other.end_capture(context, theirs);
    assert!(
        state == warpweft_core_types::ResidentState::Running && ended.is_ok(),
        "{state:?} {:?}, their capture: {ended:?}",
        resident.failure()
    );
    Ok(resident.stop(Deadline::within(PATIENCE))?)
}

/// What submissions need is made once and used again.
#[test]
fn events_are_used_again() -> Outcome {
    let stand_in = StandIn::load()?;
    let mut lane = Lane::open(&backend(&stand_in), 0)?;
    for _ in 0..200 {
        lane.submit(&[])?.wait(PATIENCE)?;
    }
    let events = stand_in.calls("cuEventCreate");
    for _ in 0..2000 {
        lane.submit(&[])?.wait(PATIENCE)?;
    }
    // No more than there can be in the stream at once, however busy the machine is.
    assert!(stand_in.calls("cuEventCreate") - events < 1100);
    Ok(())
}
