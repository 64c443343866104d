//! What we cost beside the raw calls, in rounds that alternate.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::Result;
use serde_json::json;
use warpweft_core_types::{Arg, BufferDesc, CopyRegion, Deadline, Launch, Op, SemaphorePoint, Submission};

use super::{
    alloc,
    raw::Raw,
    samples::{judge, table, table_of, tell_allocations, timed},
};
use crate::rig::{Bench, LIMIT, Rig, report};

/// Operations of the long submission.
const MANY: usize = 100;

/// Its rounds: what is judged is a small difference of large times.
const MANY_ROUNDS: usize = 301;

pub(crate) fn run(rig: &Rig) -> Result<()> {
    let first = rig.first();
    let raw = Raw::open(0)?;
    many_launches(first, &raw)?;
    back_to_back(first)?;
    round_trips(first, &raw)?;
    semaphores(rig)?;
    raw.make_current()?;
    allocations(first)?;
    copies(rig, &raw)
}

fn many_launches(bench: &Bench, raw: &Raw) -> Result<()> {
    let word = bench.allocate(BufferDesc::device(4))?;
    let digit = 1_u32.to_le_bytes();
    let queue = bench.new_queue()?;
    let semaphore = bench.device.create_semaphore(0)?;
    let mut value = 0;
    for name in ["nothing", "step"] {
        let (kernel, raw_kernel) = (bench.kernel(name)?, raw.kernel(name)?);
        let args: &[Arg<'_>] = if name == "step" { &[Arg::Buffer(&word), Arg::Scalar(&digit)] } else { &[] };
        let ops = vec![Op::Launch(Launch::new(&kernel, [1, 1, 1], args)?); MANY];
        let mut submit = || {
            value += 1;
            let signals = [SemaphorePoint::new(&semaphore, value)];
            let time = timed(|| {
                queue.submit(&Submission { waits: &[], ops: &ops, signals: &signals })?;
                Ok(())
            })?;
            semaphore.wait(value, Deadline::within(LIMIT))?;
            thread::sleep(Duration::from_millis(1));
            Ok(time)
        };
        let mut by_hand = || {
            let time = timed(|| {
                for _ in 0..MANY {
                    if name == "step" { raw.launch_step(raw_kernel)? } else { raw.launch(raw_kernel)? }
                }
                raw.record()
            })?;
            raw.synchronise()?;
            thread::sleep(Duration::from_millis(1));
            Ok(time)
        };
        let title = format!("submit of {MANY} x {name} + 1 signal");
        let times = table_of(MANY_ROUNDS, &title, &mut [("ours", &mut submit), ("raw", &mut by_hand)])?;
        let extra = times[0].beyond(&times[1]).each_of(MANY as f64);
        judge(&extra.at_most(format!("{title}: more than raw, for each launch"), 0.3));
    }
    Ok(())
}

/// What submissions allocate that follow each other without a pause: each once the one before is over, and all of
/// them at once.
fn back_to_back(bench: &Bench) -> Result<()> {
    const SUBMISSIONS: u64 = 1000;
    const WARM_UP: u64 = 200;
    let kernel = bench.kernel("nothing")?;
    for (launches, waits) in [(MANY, true), (MANY, false), (1, true), (1, false)] {
        let ops = vec![Op::Launch(Launch::new(&kernel, [1, 1, 1], &[])?); launches];
        let (queue, semaphore) = (bench.new_queue()?, bench.device.create_semaphore(0)?);
        let mut counts = Vec::with_capacity(usize::try_from(SUBMISSIONS)?);
        for value in 1..=WARM_UP + SUBMISSIONS {
            let signals = [SemaphorePoint::new(&semaphore, value)];
            let before = alloc::count();
            queue.submit(&Submission { waits: &[], ops: &ops, signals: &signals })?;
            if waits || value == WARM_UP {
                semaphore.wait(value, Deadline::within(LIMIT))?;
            }
            // Of all threads, those that learn of the end among them.
            if value > WARM_UP {
                counts.push(alloc::count() - before);
            }
        }
        semaphore.wait(WARM_UP + SUBMISSIONS, Deadline::within(LIMIT))?;
        let how = if waits { "each waited for" } else { "none waited for" };
        let what = format!("allocations of a submission of {launches} + 1 signal, {how}");
        // Without waits submissions are held back in the end, which makes copies of them.
        tell_allocations(&what, counts, 1, waits.then_some(100));
    }
    Ok(())
}

fn round_trips(bench: &Bench, raw: &Raw) -> Result<()> {
    let (kernel, raw_kernel) = (bench.kernel("nothing")?, raw.kernel("nothing")?);
    let queue = bench.new_queue()?;
    let semaphore = bench.device.create_semaphore(0)?;
    let ops = [Op::Launch(Launch::new(&kernel, [1, 1, 1], &[])?)];
    let value = std::cell::Cell::new(0);
    let submit = || -> Result<SemaphorePoint> {
        value.set(value.get() + 1);
        let point = SemaphorePoint::new(&semaphore, value.get());
        queue.submit(&Submission { waits: &[], ops: &ops, signals: std::slice::from_ref(&point) })?;
        Ok(point)
    };
    let flag = Arc::new(AtomicBool::new(false));
    table(
        "empty launch and wait",
        &mut [
            ("ours, wait", &mut || timed(|| Ok(submit()?.wait(LIMIT)?))),
            ("ours, poll", &mut || {
                timed(|| {
                    let point = submit()?;
                    while !point.poll().map_err(|failure| anyhow::anyhow!("{failure}"))? {}
                    Ok(())
                })
            }),
            ("ours, future", &mut || {
                timed(|| {
                    let reached = submit()?.into_future();
                    pollster::block_on(reached).map_err(|failure| anyhow::anyhow!("{failure}"))
                })
            }),
            ("raw, synchronise", &mut || {
                timed(|| {
                    raw.launch(raw_kernel)?;
                    raw.synchronise()
                })
            }),
            ("raw, event query", &mut || {
                timed(|| {
                    raw.launch(raw_kernel)?;
                    raw.record()?;
                    raw.query()
                })
            }),
            ("raw, host function", &mut || {
                timed(|| {
                    flag.store(false, Ordering::Relaxed);
                    raw.launch(raw_kernel)?;
                    raw.host_function(&flag)?;
                    while !flag.load(Ordering::Acquire) {
                        std::hint::spin_loop();
                    }
                    Ok(())
                })
            }),
            ("raw, the host function's call", &mut || {
                flag.store(false, Ordering::Relaxed);
                let time = timed(|| raw.host_function(&flag))?;
                raw.synchronise()?;
                Ok(time)
            }),
            ("raw, the event record's call", &mut || timed(|| raw.record())),
            ("raw, the event query's call", &mut || timed(|| raw.query())),
        ],
    )?;
    Ok(())
}

/// An empty kernel, then one that waits for it on another queue, there and back ten times.
fn semaphores(rig: &Rig) -> Result<()> {
    const HOPS: usize = 20;
    let mut pairs = vec![("one device", rig.first(), rig.first(), 0)];
    if let Ok((first, second)) = rig.pair() {
        pairs.push(("two devices", first, second, 1));
    }
    for (name, a, b, other) in pairs {
        let raws = [Raw::open(0)?, Raw::open(other)?];
        let raw_kernels = [raws[0].kernel("nothing")?, raws[1].kernel("nothing")?];
        let queues = [a.new_queue()?, b.new_queue()?];
        let kernels = [a.kernel("nothing")?, b.kernel("nothing")?];
        let semaphore = a.device.create_semaphore(0)?;
        let mut value = 0;
        let mut ours = || {
            timed(|| {
                for hop in 0..HOPS {
                    let wait = [SemaphorePoint::new(&semaphore, value)];
                    value += 1;
                    let signal = [SemaphorePoint::new(&semaphore, value)];
                    let ops = [Op::Launch(Launch::new(&kernels[hop % 2], [1, 1, 1], &[])?)];
                    queues[hop % 2].submit(&Submission { waits: &wait, ops: &ops, signals: &signal })?;
                }
                Ok(semaphore.wait(value, Deadline::within(LIMIT))?)
            })
        };
        let mut by_hand = || {
            timed(|| {
                for hop in 0..HOPS {
                    let (this, next) = (&raws[hop % 2], &raws[(hop + 1) % 2]);
                    this.make_current()?;
                    this.launch(raw_kernels[hop % 2])?;
                    this.record()?;
                    this.chain_to(next)?;
                }
                raws[1].synchronise()
            })
        };
        let title = format!("{HOPS} launches by turns, {name}");
        table(&title, &mut [("ours", &mut ours), ("raw events", &mut by_hand)])?;
        raws[0].make_current()?;
    }
    Ok(())
}

fn allocations(bench: &Bench) -> Result<()> {
    for (name, desc) in [
        ("device, 1 MiB", BufferDesc::device(1 << 20)),
        ("device, 256 MiB", BufferDesc::device(256 << 20)),
        ("pinned, 1 MiB", BufferDesc::host_visible(1 << 20)),
    ] {
        let title = format!("allocate, zero and free: {name}");
        table(&title, &mut [("ours", &mut || timed(|| bench.allocate(desc).map(drop)))])?;
    }
    Ok(())
}

fn copies(rig: &Rig, raw: &Raw) -> Result<()> {
    let bench = rig.first();
    let peer = match rig.pair() {
        Ok((_, second)) => Some((second, Raw::open(1)?)),
        Err(_) => None,
    };
    raw.make_current()?;
    for (name, size, queued) in [
        ("1 MiB", 1 << 20, 1),
        ("16 MiB", 16 << 20, 1),
        ("16 MiB x 8", 16 << 20, 8),
        ("256 MiB", 256 << 20, 1),
    ] {
        let here = bench.allocate(BufferDesc::device(size))?;
        let host = bench.allocate(BufferDesc::host_visible(size))?;
        let bytes = usize::try_from(size)?;
        let (raw_here, raw_host) = (raw.allocate(bytes)?, raw.pin(bytes)?);
        let mut ways = vec![
            ("to device", [host.clone(), here.clone()], [raw_host, raw_here]),
            ("to host", [here.clone(), host], [raw_here, raw_host]),
        ];
        if let Some((peer, raw_peer)) = &peer {
            let there = peer.allocate(BufferDesc::device(size))?;
            raw_peer.make_current()?;
            let raw_there = raw_peer.allocate(bytes)?;
            raw.make_current()?;
            ways.push(("to peer", [here.clone(), there.clone()], [raw_here, raw_there]));
            ways.push(("from peer", [there, here.clone()], [raw_there, raw_here]));
        }
        for (way, [src, dst], [raw_src, raw_dst]) in ways {
            let ops = vec![Op::Copy(CopyRegion::new(&src, &dst)?); queued];
            let mut ours = || timed(|| bench.run(&ops));
            let mut by_hand = || {
                timed(|| {
                    for _ in 0..queued {
                        raw.copy(raw_dst, raw_src, bytes)?;
                    }
                    raw.synchronise()
                })
            };
            let title = format!("copy {way}, {name}");
            let times = table(&title, &mut [("ours", &mut ours), ("raw", &mut by_hand)])?;
            let (us, raw_us) = (times[0].median(), times[1].median());
            let rate = |us: f64| (bytes * queued) as f64 / us / 1e3;
            report(&json!({"rate": title, "ours GB/s": rate(us), "raw GB/s": rate(raw_us),
                "of raw": raw_us / us}));
        }
    }
    Ok(())
}
