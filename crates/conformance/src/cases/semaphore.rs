//! Waiting for values, from the host, from queues, and across devices and backends.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context as TaskContext, Wake, Waker},
    time::Instant,
};

use warpweft_core_types::{
    Arg, Backend, Deadline, Failure, Features, Launch, Op, SemaphorePoint, SignalError, WaitError,
};
use warpweft_host::HostBackend;

use crate::{
    context::{Context, MOMENT, PATIENCE, gate},
    harness::{Case, Verdict},
    kernels,
};

pub(super) const CASES: &[Case] = &[
    Case::new("semaphore::starts_where_it_was_told", starts_where_it_was_told).covers(&[
        "Device::create_semaphore",
        "Semaphore::device",
        "Semaphore::value",
        "Semaphore::poll",
    ]),
    Case::new("semaphore::the_host_raises_it", the_host_raises_it)
        .covers(&["Semaphore::signal", "Semaphore::wait"]),
    Case::new("semaphore::a_wait_ends_by_its_deadline", a_wait_ends_by_its_deadline)
        .covers(&["Semaphore::wait"]),
    Case::new("semaphore::a_failure_is_final", a_failure_is_final)
        .covers(&["Semaphore::fail", "Semaphore::failure"]),
    Case::new("semaphore::wakers_are_woken_once", wakers_are_woken_once).covers(&["Semaphore::wake_when"]),
    Case::new("semaphore::a_point_can_be_awaited", a_point_can_be_awaited),
    Case::new(
        "semaphore::an_awaited_point_that_is_given_up_leaves_nothing",
        a_future_given_up_leaves_nothing,
    )
    .covers(&["Semaphore::forget"]),
    Case::new("semaphore::orders_queues_of_one_device", orders_queues_of_one_device),
    Case::new("semaphore::orders_devices", orders_devices).devices(2),
    Case::new("semaphore::orders_backends", orders_backends),
    Case::new("semaphore::a_wait_may_come_before_its_signal", a_wait_may_come_before_its_signal),
    Case::new("semaphore::waits_that_come_first_again_and_again", waits_come_first_again_and_again),
    Case::new("semaphore::two_backends_wait_for_each_other", two_backends_wait_for_each_other),
    Case::new("semaphore::a_failure_comes_before_a_signal_under_way", a_failure_comes_first)
        .needs(Features::HOST_VISIBLE_MEMORY),
    Case::new("semaphore::a_long_chain_ends", a_long_chain_ends).devices(2),
];

fn starts_where_it_was_told(cx: &Context) -> Verdict {
    let semaphore = cx.device(0).create_semaphore(42)?;
    assert_eq!((semaphore.device(), semaphore.value()), (cx.infos[0].id, 42));
    assert!(matches!(semaphore.poll(42), Ok(true)) && matches!(semaphore.poll(43), Ok(false)));
    Ok(semaphore.wait(42, Deadline::now())?)
}

fn the_host_raises_it(cx: &Context) -> Verdict {
    let semaphore = cx.device(0).create_semaphore(0)?;
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| semaphore.wait(3, Deadline::within(PATIENCE)));
        semaphore.signal(2)?;
        semaphore.signal(5)?;
        waiter.join().map_err(|_| "the waiter panicked")??;
        let error = semaphore.signal(5).err().ok_or("it rose to where it was")?;
        assert!(matches!(error, SignalError::NotIncreasing { value: 5, current: 5 }), "{error}");
        Ok(())
    })
}

fn a_wait_ends_by_its_deadline(cx: &Context) -> Verdict {
    let gate = gate(cx.device(0))?;
    let started = Instant::now();
    let error = gate.wait(MOMENT).err().ok_or("it was reached")?;
    assert!(matches!(error, WaitError::Timeout { awaited: 1, reached: 0 }), "{error}");
    assert!(started.elapsed() >= MOMENT && started.elapsed() < PATIENCE / 2);
    Ok(())
}

fn a_failure_is_final(cx: &Context) -> Verdict {
    let semaphore = cx.device(0).create_semaphore(1)?;
    assert!(semaphore.failure().is_none());
    semaphore.fail(Arc::new(Failure::Cancelled));
    semaphore.fail(Arc::new(Failure::Abandoned { device: cx.infos[0].id }));
    assert!(matches!(semaphore.failure().as_deref(), Some(Failure::Cancelled)), "the first failure wins");
    assert!(matches!(semaphore.signal(2), Err(SignalError::Failed(_))));
    assert!(matches!(semaphore.wait(2, Deadline::within(PATIENCE)), Err(WaitError::Failed(_))));
    semaphore.wait(1, Deadline::now())?;
    let point = SemaphorePoint::new(&semaphore, 2);
    assert!(pollster::block_on(async { point.await }).is_err());
    Ok(())
}

#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn wakers_are_woken_once(cx: &Context) -> Verdict {
    let semaphore = cx.device(0).create_semaphore(0)?;
    let (count, lane) = (Arc::new(Count::default()), cx.lane(0)?);
    semaphore.wake_when(2, Waker::from(Arc::clone(&count)));
    semaphore.signal(1)?;
    assert_eq!(count.0.load(Ordering::SeqCst), 0);
    semaphore.signal(2)?;
    lane.run(&[])?;
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    semaphore.wake_when(1, Waker::from(Arc::clone(&count)));
    assert_eq!(count.0.load(Ordering::SeqCst), 2, "at once if it is reached");
    Ok(())
}

fn a_point_can_be_awaited(cx: &Context) -> Verdict {
    let (lane, gate) = (cx.lane(0)?, gate(cx.device(0))?);
    let (_, point) = lane.submit(std::slice::from_ref(&gate), &[])?;
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| pollster::block_on(async { point.await }));
        gate.semaphore.signal(gate.value)?;
        waiter.join().map_err(|_| "the waiter panicked")??;
        Ok(())
    })
}

fn a_future_given_up_leaves_nothing(cx: &Context) -> Verdict {
    let (gate, count) = (gate(cx.device(0))?, Arc::new(Count::default()));
    let waker = Waker::from(Arc::clone(&count));
    for _ in 0..100 {
        let mut future = Box::pin(gate.clone().into_future());
        assert!(future.as_mut().poll(&mut TaskContext::from_waker(&waker)).is_pending());
        assert!(future.as_mut().poll(&mut TaskContext::from_waker(&waker)).is_pending());
    }
    drop(waker);
    assert_eq!(Arc::strong_count(&count), 1, "the semaphore holds no waker any more");
    Ok(gate.semaphore.signal(gate.value)?)
}

fn orders_queues_of_one_device(cx: &Context) -> Verdict {
    let (first, second, gate) = (cx.lane(0)?, cx.lane(0)?, gate(cx.device(0))?);
    let (_, produced) = first.submit(std::slice::from_ref(&gate), &[])?;
    let (_, consumed) = second.submit(&[produced], &[])?;
    assert!(matches!(consumed.wait(MOMENT), Err(WaitError::Timeout { .. })));
    gate.semaphore.signal(gate.value)?;
    Ok(consumed.wait(PATIENCE)?)
}

fn orders_devices(cx: &Context) -> Verdict {
    let (first, second, gate) = (cx.lane(0)?, cx.lane(1)?, gate(cx.device(0))?);
    let (_, produced) = first.submit(std::slice::from_ref(&gate), &[])?;
    let (_, consumed) = second.submit(&[produced], &[])?;
    assert_eq!(consumed.poll().ok(), Some(false));
    gate.semaphore.signal(gate.value)?;
    Ok(consumed.wait(PATIENCE)?)
}

fn orders_backends(cx: &Context) -> Verdict {
    let stranger = HostBackend::with_devices(1)?.open(0, Features::empty())?;
    let (theirs, ours, gate) = (crate::context::Lane::new(&stranger)?, cx.lane(0)?, gate(&stranger)?);
    let (_, produced) = theirs.submit(std::slice::from_ref(&gate), &[])?;
    let (_, consumed) = ours.submit(&[produced], &[])?;
    let (_, back) = theirs.submit(&[consumed], &[])?;
    assert_eq!(back.poll().ok(), Some(false));
    gate.semaphore.signal(gate.value)?;
    Ok(back.wait(PATIENCE)?)
}

fn a_wait_may_come_before_its_signal(cx: &Context) -> Verdict {
    let (consumer, producer) = (cx.lane(0)?, cx.lane(0)?);
    let coming = SemaphorePoint::new(&producer.semaphore, 1);
    let (_, consumed) = consumer.submit(std::slice::from_ref(&coming), &[])?;
    producer.submit(&[], &[])?;
    Ok(consumed.wait(PATIENCE)?)
}

/// Whoever looks at a value under a lock of its own must not be woken on its own stack.
fn waits_come_first_again_and_again(cx: &Context) -> Verdict {
    let (consumer, producer) = (cx.lane(0)?, cx.lane(0)?);
    let mut last = None;
    for value in 1..=300 {
        let coming = SemaphorePoint::new(&producer.semaphore, value);
        last = Some(consumer.submit(std::slice::from_ref(&coming), &[])?.1);
        producer.submit(&[], &[])?;
    }
    Ok(last.ok_or("there was a round")?.wait(PATIENCE)?)
}

/// The same across backends, with a second wait that the host ends.
fn two_backends_wait_for_each_other(cx: &Context) -> Verdict {
    let stranger = HostBackend::with_devices(1)?.open(0, Features::empty())?;
    let (theirs, ours) = (crate::context::Lane::new(&stranger)?, cx.lane(0)?);
    let gates = [stranger.create_semaphore(0)?, cx.device(0).create_semaphore(0)?];
    for value in 1..=100 {
        let (_, produced) = ours.submit(&[], &[])?;
        let gates = gates.each_ref().map(|gate| SemaphorePoint::new(gate, value));
        let (_, taken) = theirs.submit(&[produced, gates[0].clone()], &[])?;
        let (_, back) = ours.submit(&[taken, gates[1].clone()], &[])?;
        for gate in &gates {
            gate.semaphore.signal(value)?;
        }
        back.wait(PATIENCE)?;
    }
    Ok(())
}

fn a_failure_comes_first(cx: &Context) -> Verdict {
    let (kernel, word) = (cx.kernel(0, &kernels::blocking())?, cx.window(0, 4)?);
    let (producer, consumer) = (cx.lane(0)?, cx.lane(0)?);
    let args = [Arg::Buffer(&word)];
    let (_, coming) = producer.submit(&[], &[Op::Launch(Launch::new(&kernel, [1; 3], &args)?)])?;
    coming.semaphore.fail(Arc::new(Failure::Cancelled));
    let (_, consumed) = consumer.submit(std::slice::from_ref(&coming), &[])?;
    word.write(&1_u32.to_le_bytes())?;
    let outcome = consumed.wait(PATIENCE);
    let cancelled =
        |error: &WaitError| matches!(error, WaitError::Failed(why) if matches!(**why, Failure::Cancelled));
    assert!(outcome.as_ref().is_err_and(cancelled), "{outcome:?}");
    Ok(())
}

/// Two devices that wait for each other by turns.
fn a_long_chain_ends(cx: &Context) -> Verdict {
    let lanes = [cx.lane(0)?, cx.lane(1)?];
    let mut last: Option<SemaphorePoint> = None;
    for step in 0..400 {
        let waits: Vec<_> = last.into_iter().collect();
        last = Some(lanes[step % 2].submit(&waits, &[])?.1);
    }
    Ok(last.ok_or("there was a step")?.wait(PATIENCE)?)
}
