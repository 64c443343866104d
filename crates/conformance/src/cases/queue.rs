//! Order within and between queues, and what queues refuse.

use std::{
    sync::{Arc, mpsc},
    task::Wake,
};

use warpweft_core_types::{
    Arg, Backend, Deadline, Failure, Features, FillRegion, Launch, Op, OpenError, QueueDesc, SemaphorePoint,
    Submission, SubmitError, WaitError,
};

use warpweft_host::HostBackend;

use crate::{
    context::{Context, Lane, MOMENT, PATIENCE, gate},
    harness::{Case, Verdict},
    kernels,
};

pub(super) const CASES: &[Case] = &[
    Case::new("queue::belongs_to_its_device", belongs_to_its_device)
        .covers(&["Device::create_queue", "Queue::id"]),
    Case::new("queue::no_capacity_is_refused", no_capacity_is_refused),
    Case::new("queue::numbers_its_submissions", numbers_its_submissions),
    Case::new("queue::nothing_to_do_still_signals", nothing_to_do_still_signals),
    Case::new("queue::runs_in_order", runs_in_order).needs(Features::HOST_VISIBLE_MEMORY),
    Case::new("queue::a_held_submission_holds_those_behind", a_held_submission_holds_those_behind),
    Case::new("queue::others_go_on_beside_a_held_one", others_go_on_beside_a_held_one),
    Case::new("queue::a_full_queue_says_so_and_recovers", a_full_queue_says_so_and_recovers),
    Case::new("queue::signals_must_rise", signals_must_rise).covers(&["Semaphore::promise"]),
    Case::new("queue::a_refused_submission_promises_nothing", a_refused_submission_promises_nothing)
        .covers(&["Semaphore::retract"]),
    Case::new("queue::foreign_signals_are_refused", foreign_signals_are_refused),
    Case::new("queue::a_failed_wait_fails_what_waits", a_failed_wait_fails_what_waits),
    Case::new("queue::a_failure_among_several_waits_is_noticed", a_failure_among_several_waits_is_noticed),
    Case::new("queue::a_failure_spares_what_is_before_it", a_failure_spares_what_is_before_it)
        .needs(Features::HOST_VISIBLE_MEMORY),
    Case::new("queue::late_signals_come_to_whoever_asks", late_signals_come_to_whoever_asks)
        .needs(Features::HOST_VISIBLE_MEMORY)
        .covers(&["Queue::submit_late"]),
    Case::new("queue::a_late_signal_is_not_failed_by_what_is_behind_it", a_late_signal_is_not_failed)
        .needs(Features::HOST_VISIBLE_MEMORY),
    Case::new("queue::a_long_chain_fails_without_a_deep_stack", a_long_chain_fails),
    Case::new("queue::a_waker_that_panics_harms_nobody", a_waker_that_panics_harms_nobody),
    Case::new("queue::dropping_it_cancels_nothing", dropping_it_cancels_nothing),
    Case::new("queue::many_threads_submit", many_threads_submit),
];

fn belongs_to_its_device(cx: &Context) -> Verdict {
    let queue = cx.device(0).create_queue(&QueueDesc::default())?;
    assert_eq!(queue.id().device, cx.infos[0].id);
    assert_ne!(
        queue.id(),
        cx.device(0).create_queue(&QueueDesc::default())?.id(),
        "each has a name of its own"
    );
    assert!(queue.failure().is_none());
    Ok(())
}

fn no_capacity_is_refused(cx: &Context) -> Verdict {
    let error = cx.device(0).create_queue(&QueueDesc { capacity: 0 }).err().ok_or("it was made")?;
    assert!(matches!(error, OpenError::InvalidConfig { .. }), "{error}");
    Ok(())
}

fn numbers_its_submissions(cx: &Context) -> Verdict {
    let lane = cx.lane(0)?;
    let ids = [lane.submit(&[], &[])?.0, lane.submit(&[], &[])?.0];
    assert_eq!(ids[0].queue, ids[1].queue);
    assert!(ids[0].index < ids[1].index, "{ids:?}");
    Ok(())
}

fn nothing_to_do_still_signals(cx: &Context) -> Verdict {
    cx.lane(0)?.run(&[])
}

fn runs_in_order(cx: &Context) -> Verdict {
    let (lane, memory) = (cx.lane(0)?, cx.memory(0, 3000)?);
    for byte in 1..=100 {
        let fills =
            [Op::Fill(FillRegion::bytes(&memory, byte)), Op::Fill(FillRegion::bytes(&memory, byte + 100))];
        lane.submit(&[], &fills)?;
    }
    lane.run(&[])?;
    assert!(cx.download(0, &memory)?.iter().all(|&byte| byte == 200));
    Ok(())
}

fn a_held_submission_holds_those_behind(cx: &Context) -> Verdict {
    let (lane, gate) = (cx.lane(0)?, gate(cx.device(0))?);
    let (_, held) = lane.submit(std::slice::from_ref(&gate), &[])?;
    let (_, behind) = lane.submit(&[], &[])?;
    assert!(matches!(behind.wait(MOMENT), Err(WaitError::Timeout { .. })));
    assert_eq!(held.poll().ok(), Some(false));
    gate.semaphore.signal(gate.value)?;
    Ok(behind.wait(PATIENCE)?)
}

fn others_go_on_beside_a_held_one(cx: &Context) -> Verdict {
    let (held, gate) = (cx.lane(0)?, gate(cx.device(0))?);
    let (_, point) = held.submit(std::slice::from_ref(&gate), &[])?;
    cx.lane(0)?.run(&[])?;
    gate.semaphore.signal(gate.value)?;
    Ok(point.wait(PATIENCE)?)
}

fn a_full_queue_says_so_and_recovers(cx: &Context) -> Verdict {
    let lane = Lane::with_capacity(cx.device(0), 2)?;
    let gate = gate(cx.device(0))?;
    let waits = std::slice::from_ref(&gate);
    lane.submit(waits, &[])?;
    let (_, last) = lane.submit(waits, &[])?;
    let error = lane.submit(waits, &[]).err().ok_or("it was taken")?;
    assert!(
        matches!(error, SubmitError::QueueFull { capacity: 2, queue } if queue == lane.queue.id()),
        "{error}"
    );
    gate.semaphore.signal(gate.value)?;
    last.wait(PATIENCE)?;
    lane.run(&[])
}

fn signals_must_rise(cx: &Context) -> Verdict {
    let (lane, semaphore) = (cx.lane(0)?, cx.device(0).create_semaphore(5)?);
    let point = |value| SemaphorePoint::new(&semaphore, value);
    let signal = |value| lane.queue.submit(&Submission { signals: &[point(value)], ..Submission::default() });
    assert!(matches!(signal(5), Err(SubmitError::NotIncreasing { value: 5, current: 5 })));
    signal(9)?;
    point(9).wait(PATIENCE)?;
    assert!(matches!(signal(7), Err(SubmitError::NotIncreasing { .. })));
    signal(10)?;
    Ok(point(10).wait(PATIENCE)?)
}

fn a_refused_submission_promises_nothing(cx: &Context) -> Verdict {
    let (lane, fresh, stale) =
        (cx.lane(0)?, cx.device(0).create_semaphore(0)?, cx.device(0).create_semaphore(5)?);
    let (good, bad) = (SemaphorePoint::new(&fresh, 1), SemaphorePoint::new(&stale, 5));
    let both = [good.clone(), bad];
    let refused = lane.queue.submit(&Submission { signals: &both, ..Submission::default() });
    assert!(matches!(refused, Err(SubmitError::NotIncreasing { value: 5, .. })));
    lane.queue.submit(&Submission { signals: std::slice::from_ref(&good), ..Submission::default() })?;
    Ok(good.wait(PATIENCE)?)
}

fn foreign_signals_are_refused(cx: &Context) -> Verdict {
    let stranger = HostBackend::with_devices(1)?.open(0, Features::empty())?;
    let theirs = SemaphorePoint::new(&stranger.create_semaphore(0)?, 1);
    let submission = Submission { signals: std::slice::from_ref(&theirs), ..Submission::default() };
    let error = cx.lane(0)?.queue.submit(&submission).err().ok_or("it was taken")?;
    let named =
        matches!(error, SubmitError::Foreign { what: "semaphore", owner, .. } if owner == stranger.info().id);
    assert!(named, "{error}");
    Ok(())
}

fn a_failed_wait_fails_what_waits(cx: &Context) -> Verdict {
    let (lane, gate) = (cx.lane(0)?, gate(cx.device(0))?);
    let (_, held) = lane.submit(std::slice::from_ref(&gate), &[])?;
    gate.semaphore.fail(Arc::new(Failure::Cancelled));
    let Err(WaitError::Failed(failure)) = held.wait(PATIENCE) else { return Err("it passed".into()) };
    assert!(matches!(*failure, Failure::Cancelled), "the first cause is handed on: {failure}");
    Ok(())
}

fn a_failure_among_several_waits_is_noticed(cx: &Context) -> Verdict {
    let (lane, never, failing) = (cx.lane(0)?, gate(cx.device(0))?, gate(cx.device(0))?);
    let (_, held) = lane.submit(&[never, failing.clone()], &[])?;
    failing.semaphore.fail(Arc::new(Failure::Cancelled));
    assert!(matches!(held.wait(PATIENCE), Err(WaitError::Failed(_))));
    Ok(())
}

fn a_failure_spares_what_is_before_it(cx: &Context) -> Verdict {
    let (lane, gate) = (cx.lane(0)?, gate(cx.device(0))?);
    let (kernel, word) = (cx.kernel(0, &kernels::blocking())?, cx.window(0, 4)?);
    let args = [Arg::Buffer(&word)];
    let (_, first) = lane.submit(&[], &[Op::Launch(Launch::new(&kernel, [1; 3], &args)?)])?;
    let (_, second) = lane.submit(std::slice::from_ref(&gate), &[])?;
    gate.semaphore.fail(Arc::new(Failure::Cancelled));
    word.write(&1_u32.to_le_bytes())?;
    let (first, second) = (first.wait(PATIENCE), second.wait(PATIENCE));
    assert!(first.is_ok() && matches!(second, Err(WaitError::Failed(_))), "{first:?}, {second:?}");
    Ok(())
}

/// One asks, one is woken, a queue waits, one looks again and again.
fn late_signals_come_to_whoever_asks(cx: &Context) -> Verdict {
    let (lane, other, memory) = (cx.lane(0)?, cx.lane(0)?, cx.memory(0, 64)?);
    let late = |byte| lane.submit_late(&[Op::Fill(FillRegion::bytes(&memory, byte))]);
    let (first, second, third) = (late(1)?, late(2)?, late(3)?);
    second.wait(PATIENCE)?;
    first.wait(PATIENCE)?;
    third.wait(PATIENCE)?;
    let (_, behind) = other.submit(&[late(4)?], &[])?;
    behind.wait(PATIENCE)?;
    assert_eq!(cx.download(0, &memory)?, [4; 64]);
    let woken = wake_of(&late(5)?);
    woken.recv_timeout(PATIENCE)?;
    let last = late(6)?;
    let end = Deadline::within(PATIENCE);
    while !last.poll()? {
        assert!(!end.is_past(), "nobody who only looks sees it");
    }
    // Before it is submitted, too.
    let coming = SemaphorePoint::new(&last.semaphore, last.value + 1);
    let woken = wake_of(&coming);
    assert_eq!(late(7)?.value, coming.value);
    Ok(woken.recv_timeout(PATIENCE)?)
}

fn a_late_signal_is_not_failed(cx: &Context) -> Verdict {
    let (lane, gate, memory) = (cx.lane(0)?, gate(cx.device(0))?, cx.memory(0, 64)?);
    let before = lane.submit_late(&[Op::Fill(FillRegion::bytes(&memory, 1))])?;
    let (_, held) = lane.submit(std::slice::from_ref(&gate), &[])?;
    let behind = lane.submit_late(&[Op::Fill(FillRegion::bytes(&memory, 2))])?;
    gate.semaphore.fail(Arc::new(Failure::Cancelled));
    before.wait(PATIENCE)?;
    for point in [held, behind] {
        assert!(matches!(point.wait(PATIENCE), Err(WaitError::Failed(_))));
    }
    assert_eq!(cx.download(0, &memory)?, [1; 64]);
    Ok(())
}

/// Hears when a point is reached.
fn wake_of(point: &SemaphorePoint) -> mpsc::Receiver<()> {
    struct Tells(mpsc::Sender<()>);
    impl Wake for Tells {
        fn wake(self: Arc<Self>) {
            // Nobody listens when the case has failed.
            let _heard = self.0.send(());
        }
    }
    let (tell, told) = mpsc::channel();
    point.semaphore.wake_when(point.value, Arc::new(Tells(tell)).into());
    told
}

/// Each queue waits for the one before: far more of them than a call each would leave stack for.
fn a_long_chain_fails(cx: &Context) -> Verdict {
    let first = gate(cx.device(0))?;
    let (mut lanes, mut last) = (Vec::new(), first.clone());
    for _ in 0..5_000 {
        let lane = cx.lane(0)?;
        last = lane.submit(&[last], &[])?.1;
        lanes.push(lane);
    }
    first.semaphore.fail(Arc::new(Failure::Cancelled));
    assert!(matches!(last.wait(PATIENCE), Err(WaitError::Failed(_))));
    Ok(())
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        // Without the panic hook's message.
        std::panic::resume_unwind(Box::new("a waker that panics"));
    }
}

fn a_waker_that_panics_harms_nobody(cx: &Context) -> Verdict {
    let (lane, gate) = (cx.lane(0)?, gate(cx.device(0))?);
    let (_, held) = lane.submit(std::slice::from_ref(&gate), &[])?;
    held.semaphore.wake_when(held.value, Arc::new(Panics).into());
    let (_, behind) = lane.submit(&[], &[])?;
    gate.semaphore.signal(gate.value)?;
    behind.wait(PATIENCE)?;
    cx.lane(0)?.run(&[])
}

fn dropping_it_cancels_nothing(cx: &Context) -> Verdict {
    let (lane, gate) = (cx.lane(0)?, gate(cx.device(0))?);
    let (_, held) = lane.submit(std::slice::from_ref(&gate), &[])?;
    drop(lane);
    gate.semaphore.signal(gate.value)?;
    Ok(held.wait(PATIENCE)?)
}

fn many_threads_submit(cx: &Context) -> Verdict {
    let queue = cx.device(0).create_queue(&QueueDesc { capacity: 10_000 })?;
    let semaphores = (0..4).map(|_| cx.device(0).create_semaphore(0)).collect::<Result<Vec<_>, _>>()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = semaphores
            .iter()
            .map(|semaphore| {
                let queue = &queue;
                scope.spawn(move || {
                    for value in 1..=500 {
                        let point = SemaphorePoint::new(semaphore, value);
                        queue.submit(&Submission {
                            signals: std::slice::from_ref(&point),
                            ..Submission::default()
                        })?;
                        if value % 50 == 0 {
                            assert!(point.wait(PATIENCE).is_ok(), "value {value}");
                        }
                    }
                    Ok::<(), SubmitError>(())
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?.map_err(Into::into))
    })
}
