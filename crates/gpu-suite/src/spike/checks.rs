//! What must be right, byte for byte.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;
use warpweft_core_types::{
    AllocError, Arg, Backend, BufferDesc, BufferView, CodeFormat, CopyRegion, Deadline, Failure, Features,
    FillRegion, ForeignCode, HostFunction, KernelCode, KernelContract, Launch, LoadError, Op, OpenError,
    Param, QueueDesc, ResidentDesc, ResidentError, SemaphorePoint, Submission, SubmitError, WaitError,
};
use warpweft_cuda::{Compiler, CudaBackend};
use warpweft_host::HostBackend;

use super::{
    kernels::{self, ADD_WORDS},
    raw,
    rig::{Bench, LIMIT, Rig, pattern, report, same, say, submit_word},
};

type Check = (&'static str, fn(&Rig) -> Result<()>);

const CHECKS: &[Check] = &[
    ("device info", device_info),
    ("memory is zeroed, also when it is used again", zeroed),
    ("memory figures live", figures),
    ("too much memory is refused", too_much),
    ("copies between host and device", copies),
    ("fills", fills),
    ("a CUDA C kernel with buffers and a value", add),
    ("PTX and CUBIN", other_forms),
    ("code that does not fit is refused", refused_code),
    ("the thread's context stays what it was", current_context),
    ("a wait for a later signal of another queue", later_signal),
    ("a chain over two queues", chain_of_queues),
    ("a wait for the host", host_signal),
    ("a wait ends by its deadline and the work goes on", timeouts),
    ("a future", future),
    ("a failed wait fails the queue", failed_wait),
    ("buffers live as long as the work that uses them", keep_alive),
    ("a full queue says so", full_queue),
    ("submit does not wait for a full stream", long_stream),
    ("host and CUDA semaphores wait for each other", host_bridge),
    ("peer copies both ways", peer_copies),
    ("a kernel on peer memory", peer_kernel),
    ("a chain over two devices", chain_of_devices),
    ("wrong residents are refused", refused_residents),
    ("a resident that cannot begin is stopped", not_resident),
    ("an unparkable resident is named", unparkable),
    ("a resident that is done ends by itself", finished),
];

pub(crate) fn run(rig: &Rig) -> usize {
    CHECKS.iter().filter(|check| !passes(rig, check)).count()
}

/// What becomes of another device that this process uses without peer access.
pub(crate) fn fault_apart() -> Result<usize> {
    let backend = CudaBackend::new()?;
    let bench = Bench::open(backend.open(0, Features::empty())?)?;
    let apart = raw::Raw::open(1, bench.device.info().compute_capability.context("capability")?)?;
    let kernel = apart.kernel("nothing")?;
    let (fault, word) = (bench.kernel("fault")?, bench.allocate(BufferDesc::device(4))?);
    let args = [Arg::Buffer(&word)];
    let result = bench.run(&[Op::Launch(Launch::new(&fault, [1, 1, 1], &args)?)]);
    ensure!(result.is_err() && bench.device.failure().is_some());
    let after = apart.make_current().and_then(|()| apart.launch(kernel)).and_then(|()| apart.synchronise());
    let after = after.map_or_else(|error| format!("{error:#}"), |()| "works".to_owned());
    say(&format!("a device without peer access: {after}"));
    report(&json!({"device without peer access after the fault": after}));
    Ok(0)
}

/// The device is lost afterwards, so this is a run of its own.
pub(crate) fn fault(rig: &Rig) -> usize {
    usize::from(!passes(rig, &("a fault loses the device and says so", lost_device)))
}

fn passes(rig: &Rig, (name, check): &Check) -> bool {
    let start = Instant::now();
    let result = check(rig);
    let ms = start.elapsed().as_secs_f64() * 1e3;
    let error = result.as_ref().err().map(|error| format!("{error:#}"));
    report(&json!({"check": name, "ok": result.is_ok(), "ms": ms, "error": error}));
    say(&format!("{:>9.2} ms  {name}: {}", ms, error.as_deref().unwrap_or("ok")));
    result.is_ok()
}

fn device_info(rig: &Rig) -> Result<()> {
    for info in rig.backend.devices()? {
        ensure!(info.multiprocessors > 0 && info.memory.0 > 1 << 30 && !info.name.is_empty());
        ensure!(info.id.uuid.as_bytes() != &[0; 16] && info.pci.is_some());
    }
    let error = rig.backend.open(99, Features::empty());
    ensure!(matches!(error, Err(OpenError::UnknownDevice { ordinal: 99, .. })));
    let again = rig.backend.open(0, Features::empty())?;
    ensure!(Arc::ptr_eq(&again, &rig.first().device), "opening again gave another device");
    Ok(())
}

fn zeroed(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    for size in [1, 4096, (1 << 20) + 3] {
        for desc in [BufferDesc::device(size), BufferDesc::host_visible(size)] {
            for _ in 0..2 {
                let view = bench.allocate(desc)?;
                same("new", &bench.read(&view)?, &vec![0; usize::try_from(size)?])?;
                bench.run(&[Op::Fill(FillRegion::bytes(&view, 0xee))])?;
            }
        }
    }
    Ok(())
}

fn figures(rig: &Rig) -> Result<()> {
    const SIZE: u64 = 1 << 30;
    let bench = rig.first();
    let before = bench.device.memory()?;
    let view = bench.allocate(BufferDesc::device(SIZE))?;
    let during = bench.device.memory()?;
    drop(view);
    eventually(
        "the memory to come back",
        || Ok(bench.device.memory()?.free.0 + (64 << 20) >= before.free.0),
    )?;
    ensure!(during.free.0 + SIZE <= before.free.0 + (64 << 20), "{before:?} then {during:?}");
    Ok(())
}

fn too_much(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let capacity = bench.device.memory()?.capacity.0;
    for size in [capacity - (1 << 20), 1 << 50] {
        let error = bench.device.allocate(&BufferDesc::device(size));
        ensure!(matches!(error, Err(AllocError::OutOfMemory { .. })), "{size}: {error:?}");
    }
    let error = bench.device.allocate(&BufferDesc::device(0));
    ensure!(matches!(error, Err(AllocError::ZeroSize { .. })));
    bench.allocate(BufferDesc::device(1 << 20)).context("after a refusal")?;
    Ok(())
}

fn copies(rig: &Rig) -> Result<()> {
    for bench in &rig.devices {
        for (size, offset) in [(1, 0), (4099, 13), (1 << 20, 256), ((16 << 20) + 5, 1)] {
            let bytes = pattern(size, usize::try_from(size)?);
            let (there, back) = (
                bench.allocate(BufferDesc::device(size + offset))?.slice(offset..size + offset)?,
                bench.allocate(BufferDesc::device(size))?,
            );
            let (from, to) = (bench.staged(&bytes)?, bench.allocate(BufferDesc::host_visible(size))?);
            bench.run(&[
                Op::Copy(CopyRegion::new(&from, &there)?),
                Op::Copy(CopyRegion::new(&there, &back)?),
                Op::Copy(CopyRegion::new(&back, &to)?),
            ])?;
            let mut got = vec![0; bytes.len()];
            to.read(&mut got)?;
            same("there and back", &got, &bytes)?;
        }
    }
    Ok(())
}

fn fills(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    for desc in [BufferDesc::device(1 << 16), BufferDesc::host_visible(1 << 16)] {
        let whole = bench.allocate(desc)?;
        let mut expected = pattern(3, 1 << 16);
        bench.copy(&bench.staged(&expected)?, &whole)?;
        let word = 0x0403_0201_u32;
        let (bytes, aligned, odd) =
            (whole.slice(3..1003)?, whole.slice(4096..8192)?, whole.slice(9001..13001)?);
        bench.run(&[
            Op::Fill(FillRegion::bytes(&bytes, 0x5a)),
            Op::Fill(FillRegion::words(&aligned, word)?),
            Op::Fill(FillRegion::words(&odd, word)?),
        ])?;
        expected[3..1003].fill(0x5a);
        for range in [4096..8192, 9001..13001] {
            expected[range].chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&word.to_le_bytes()));
        }
        same("filled", &bench.read(&whole)?, &expected)?;
    }
    Ok(())
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect()
}

fn add(rig: &Rig) -> Result<()> {
    for bench in &rig.devices {
        let size = usize::try_from(4 * ADD_WORDS)?;
        let (a, b) = (pattern(1, size), pattern(2, size));
        let (left, right) = (bench.uploaded(&a)?, bench.uploaded(&b)?);
        let out = bench.allocate(BufferDesc::device(size as u64))?;
        let (kernel, plus) = (bench.kernel("add")?, 0x0102_0304_u32.to_le_bytes());
        let args = [Arg::Buffer(&left), Arg::Buffer(&right), Arg::Buffer(&out), Arg::Scalar(&plus)];
        bench.run(&[Op::Launch(Launch::new(&kernel, [256, 1, 1], &args)?)])?;
        let expected: Vec<u32> = words(&a)
            .into_iter()
            .zip(words(&b))
            .map(|(a, b)| a.wrapping_add(b).wrapping_add(0x0102_0304))
            .collect();
        ensure!(words(&bench.read(&out)?) == expected, "the sums differ");
    }
    Ok(())
}

fn other_forms(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let capability = bench.device.info().compute_capability.context("capability")?;
    let cubin = Compiler::find().compile(&kernels::second(43), capability)?;
    let ptx = ForeignCode::Source { format: CodeFormat::Ptx, text: kernels::PTX.to_owned() };
    let cubin = ForeignCode::Binary { format: CodeFormat::Cubin, bytes: cubin };
    let answer = KernelContract::new("answer", [Param::write(4)]);
    for (contract, code, expected) in [(answer, ptx, 42), (kernels::second_contract(), cubin, 43)] {
        let (name, format) = (contract.name.clone(), code.format());
        let module = bench.device.load(&kernels::foreign(vec![contract], code))?;
        ensure!(module.format() == format);
        let (kernel, out) = (module.kernel(&name)?, bench.allocate(BufferDesc::device(4))?);
        bench.run(&[Op::Launch(Launch::new(&kernel, [1, 1, 1], &[Arg::Buffer(&out)])?)])?;
        ensure!(bench.read_word(&out)? == expected, "{format}");
    }
    Ok(())
}

fn refused_code(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let source = |text: &str, format| ForeignCode::Source { format, text: text.to_owned() };
    let load = |contract: KernelContract, code| bench.device.load(&kernels::foreign(vec![contract], code));
    let second = kernels::second_contract;

    let wrong = load(second(), source("__global__ void second( {", CodeFormat::CudaC));
    let Err(LoadError::Rejected { log }) = wrong else { bail!("{wrong:?}") };
    ensure!(log.contains("kernel.cu(1)") && log.contains("error"), "the log says: {log}");

    let garbage = load(second(), source("no PTX at all", CodeFormat::Ptx));
    ensure!(matches!(garbage, Err(LoadError::Rejected { .. })), "{garbage:?}");
    let cut = ForeignCode::Binary { format: CodeFormat::Cubin, bytes: vec![1; 64] };
    ensure!(matches!(load(second(), cut), Err(LoadError::Rejected { .. })));

    let text = kernels::second(1);
    let named = load(KernelContract::new("third", []), source(&text, CodeFormat::CudaC));
    ensure!(matches!(&named, Err(LoadError::NoSuchKernel { name, .. }) if name == "third"), "{named:?}");
    let other = load(KernelContract::new("second", []), source(&text, CodeFormat::CudaC));
    ensure!(matches!(other, Err(LoadError::Rejected { .. })), "{other:?}");
    let large = second().with_workgroup_size([1025, 1, 1]);
    let large = load(large, source(&text, CodeFormat::CudaC));
    ensure!(matches!(large, Err(LoadError::Rejected { .. })), "{large:?}");
    let wgsl = load(second(), source("", CodeFormat::Wgsl));
    ensure!(matches!(wgsl, Err(LoadError::UnsupportedFormat { .. })));
    Ok(())
}

fn current_context(rig: &Rig) -> Result<()> {
    let before = raw::current_context()?;
    copies(rig)?;
    add(rig)?;
    ensure!(raw::current_context()? == before, "another context is current");
    Ok(())
}

/// Digits that `step` was given, in order, as its word shows them.
fn stepped(digits: impl IntoIterator<Item = u32>) -> u32 {
    digits.into_iter().fold(0, |word: u32, digit| word.wrapping_mul(3).wrapping_add(digit))
}

fn later_signal(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let (kernel, word) = (bench.kernel("step")?, bench.allocate(BufferDesc::device(4))?);
    let (early, late) = (bench.new_queue()?, bench.new_queue()?);
    let (go, done) = (bench.point()?, bench.point()?);
    let digit = |digit: u32| digit.to_le_bytes();
    submit_word(
        early.as_ref(),
        &kernel,
        &word,
        &digit(2),
        std::slice::from_ref(&go),
        std::slice::from_ref(&done),
    )?;
    submit_word(late.as_ref(), &kernel, &word, &digit(1), &[], std::slice::from_ref(&go))?;
    done.wait(LIMIT)?;
    ensure!(bench.read_word(&word)? == stepped([1, 2]));
    Ok(())
}

/// Steps that alternate between queues, each waiting for the one before.
fn chain(benches: [&Bench; 2], rounds: u32) -> Result<()> {
    let word = benches[0].allocate(BufferDesc::device(4))?;
    let queues = [benches[0].new_queue()?, benches[1].new_queue()?];
    let kernels = [benches[0].kernel("step")?, benches[1].kernel("step")?];
    let semaphore = benches[1].device.create_semaphore(0)?;
    for round in 0..rounds {
        let wait = [SemaphorePoint::new(&semaphore, u64::from(round))];
        let signal = [SemaphorePoint::new(&semaphore, u64::from(round) + 1)];
        let side = (round % 2) as usize;
        let digit = (round * 7 % 3).to_le_bytes();
        submit_word(queues[side].as_ref(), &kernels[side], &word, &digit, &wait, &signal)?;
    }
    semaphore.wait(u64::from(rounds), Deadline::within(LIMIT))?;
    let expected = stepped((0..rounds).map(|round| round * 7 % 3));
    let got = benches[0].read_word(&word)?;
    ensure!(got == expected, "{got:#x}, not {expected:#x}");
    Ok(())
}

fn chain_of_queues(rig: &Rig) -> Result<()> {
    chain([rig.first(), rig.first()], 200)
}

fn chain_of_devices(rig: &Rig) -> Result<()> {
    let (first, second) = rig.pair()?;
    chain([first, second], 200)
}

fn host_signal(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let (kernel, word) = (bench.kernel("step")?, bench.allocate(BufferDesc::device(4))?);
    let queue = bench.new_queue()?;
    let (go, done) = (bench.point()?, bench.point()?);
    let one = 1_u32.to_le_bytes();
    submit_word(
        queue.as_ref(),
        &kernel,
        &word,
        &one,
        std::slice::from_ref(&go),
        std::slice::from_ref(&done),
    )?;
    let early = done.wait(Duration::from_millis(20));
    ensure!(matches!(early, Err(WaitError::Timeout { awaited: 1, reached: 0 })), "{early:?}");
    ensure!(bench.read_word(&word)? == 0, "it ran before the signal");
    go.semaphore.signal(1)?;
    done.wait(LIMIT)?;
    ensure!(bench.read_word(&word)? == 1);
    Ok(())
}

fn timeouts(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let (kernel, word) = (bench.kernel("hold")?, bench.allocate(BufferDesc::device(4))?);
    let never = bench.point()?;
    let done = bench.point()?;
    let ns = 200_000_000_u64.to_le_bytes();
    submit_word(bench.queue.as_ref(), &kernel, &word, &ns, &[], std::slice::from_ref(&done))?;
    for point in [&done, &never] {
        for limit in [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(20)] {
            let start = Instant::now();
            let result = point.wait(limit);
            let took = start.elapsed();
            ensure!(matches!(result, Err(WaitError::Timeout { .. })), "{result:?}");
            ensure!(took < limit + Duration::from_millis(5), "{took:?} for {limit:?}");
        }
    }
    done.wait(LIMIT)?;
    ensure!(bench.read_word(&word)? == 1);
    Ok(())
}

fn future(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let (kernel, word) = (bench.kernel("hold")?, bench.allocate(BufferDesc::device(4))?);
    for ns in [0_u64, 50_000, 20_000_000] {
        let done = bench.point()?;
        submit_word(
            bench.queue.as_ref(),
            &kernel,
            &word,
            &ns.to_le_bytes(),
            &[],
            std::slice::from_ref(&done),
        )?;
        pollster::block_on(done.into_future()).map_err(|failure| anyhow::anyhow!("{failure}"))?;
    }
    ensure!(bench.read_word(&word)? == 3);
    Ok(())
}

fn failed_wait(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let (kernel, word) = (bench.kernel("step")?, bench.allocate(BufferDesc::device(4))?);
    let queue = bench.new_queue()?;
    let (go, done, after) = (bench.point()?, bench.point()?, bench.point()?);
    let one = 1_u32.to_le_bytes();
    submit_word(
        queue.as_ref(),
        &kernel,
        &word,
        &one,
        std::slice::from_ref(&go),
        std::slice::from_ref(&done),
    )?;
    submit_word(queue.as_ref(), &kernel, &word, &one, &[], std::slice::from_ref(&after))?;
    go.semaphore.fail(Arc::new(Failure::Cancelled));
    for point in [&done, &after] {
        let result = point.wait(LIMIT);
        ensure!(
            matches!(&result, Err(WaitError::Failed(failure)) if matches!(**failure, Failure::Cancelled))
        );
    }
    ensure!(queue.failure().is_some());
    let refused = queue.submit(&Submission::default());
    ensure!(matches!(refused, Err(SubmitError::Failed(_))), "{refused:?}");
    ensure!(bench.read_word(&word)? == 0);
    Ok(())
}

fn keep_alive(rig: &Rig) -> Result<()> {
    const SIZE: u64 = 256 << 20;
    let bench = rig.first();
    let before = bench.device.memory()?.free.0;
    let bytes = pattern(9, usize::try_from(SIZE)?);
    let to = bench.allocate(BufferDesc::host_visible(SIZE))?;
    let done = bench.point()?;
    {
        let (source, word) = (bench.uploaded(&bytes)?, bench.allocate(BufferDesc::device(4))?);
        let (kernel, ns) = (bench.kernel("hold")?, 100_000_000_u64.to_le_bytes());
        let args = [Arg::Buffer(&word), Arg::Scalar(&ns)];
        let hold = Op::Launch(Launch::new(&kernel, [1, 1, 1], &args)?);
        let copy = Op::Copy(CopyRegion::new(&source, &to)?);
        bench.queue.submit(&Submission {
            waits: &[],
            ops: &[hold, copy],
            signals: std::slice::from_ref(&done),
        })?;
    }
    // The same size again, dirtied: a buffer that was freed too early would be this one.
    let other = bench.new_queue()?;
    let decoy = bench.allocate(BufferDesc::device(SIZE))?;
    let dirty = bench.point()?;
    let fill = [Op::Fill(FillRegion::bytes(&decoy, 0xff))];
    other.submit(&Submission { waits: &[], ops: &fill, signals: std::slice::from_ref(&dirty) })?;
    dirty.wait(LIMIT)?;
    ensure!(!done.poll().map_err(|failure| anyhow::anyhow!("{failure}"))?, "the kernel ended too early");
    done.wait(LIMIT)?;
    let mut got = vec![0; bytes.len()];
    to.read(&mut got)?;
    same("copied behind the kernel", &got, &bytes)?;
    drop((decoy, to));
    eventually("the memory to come back", || Ok(bench.device.memory()?.free.0 + (64 << 20) >= before))
}

fn full_queue(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let queue = bench.device.create_queue(&QueueDesc { capacity: 2 })?;
    let go = bench.point()?;
    let work = Submission { waits: std::slice::from_ref(&go), ops: &[], signals: &[] };
    queue.submit(&work)?;
    queue.submit(&work)?;
    let refused = queue.submit(&work);
    ensure!(matches!(refused, Err(SubmitError::QueueFull { capacity: 2, .. })), "{refused:?}");
    go.semaphore.signal(1)?;
    let done = bench.point()?;
    eventually("room in the queue", || {
        Ok(queue.submit(&Submission { waits: &[], ops: &[], signals: std::slice::from_ref(&done) }).is_ok())
    })?;
    Ok(done.wait(LIMIT)?)
}

fn long_stream(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let (hold, step) = (bench.kernel("hold")?, bench.kernel("step")?);
    let (held, word) = (bench.allocate(BufferDesc::device(4))?, bench.allocate(BufferDesc::device(4))?);
    let queue = bench.new_queue()?;
    submit_word(queue.as_ref(), &hold, &held, &300_000_000_u64.to_le_bytes(), &[], &[])?;
    let one = 1_u32.to_le_bytes();
    let args = [Arg::Buffer(&word), Arg::Scalar(&one)];
    let launches = vec![Op::Launch(Launch::new(&step, [1, 1, 1], &args)?); 100];
    let done = bench.point()?;
    let start = Instant::now();
    for _ in 0..40 {
        queue.submit(&Submission { waits: &[], ops: &launches, signals: &[] })?;
    }
    queue.submit(&Submission { waits: &[], ops: &[], signals: std::slice::from_ref(&done) })?;
    let took = start.elapsed();
    done.wait(LIMIT)?;
    ensure!(bench.read_word(&word)? == stepped((0..4000).map(|_| 1)));
    ensure!(took < Duration::from_millis(150), "submitting took {took:?}");
    Ok(())
}

fn host_bridge(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let host = HostBackend::with_devices(1)?.open(0, Features::empty())?;
    let host_queue = host.create_queue(&QueueDesc::default())?;
    let contract = KernelContract::new("nap", []);
    let nap = KernelCode::new()
        .with_function(contract, HostFunction::new(|_| std::thread::sleep(Duration::from_millis(10))));
    let nap = host.load(&nap)?.kernel("nap")?;
    let host_done = SemaphorePoint::new(&host.create_semaphore(0)?, 1);
    let (first, last) = (bench.point()?, SemaphorePoint::new(&host.create_semaphore(0)?, 1));
    let (step, word) = (bench.kernel("step")?, bench.allocate(BufferDesc::device(4))?);

    // CUDA waits for the host device, then the host device waits for CUDA.
    let one = 1_u32.to_le_bytes();
    submit_word(
        bench.queue.as_ref(),
        &step,
        &word,
        &one,
        std::slice::from_ref(&host_done),
        std::slice::from_ref(&first),
    )?;
    host_queue.submit(&Submission {
        waits: std::slice::from_ref(&first),
        ops: &[],
        signals: std::slice::from_ref(&last),
    })?;
    let other = host.create_queue(&QueueDesc::default())?;
    let launch = Op::Launch(Launch::new(&nap, [1, 1, 1], &[])?);
    other.submit(&Submission { waits: &[], ops: &[launch], signals: std::slice::from_ref(&host_done) })?;
    last.wait(LIMIT)?;
    ensure!(bench.read_word(&word)? == 1);

    let foreign = BufferView::whole(host.allocate(&BufferDesc::host_visible(4))?);
    let refused = bench.queue.submit(&Submission {
        waits: &[],
        ops: &[Op::Copy(CopyRegion::new(&foreign, &word)?)],
        signals: &[],
    });
    ensure!(matches!(refused, Err(SubmitError::Foreign { what: "buffer", .. })), "{refused:?}");
    Ok(())
}

fn peer_copies(rig: &Rig) -> Result<()> {
    let (first, second) = rig.pair()?;
    for (from, to) in [(first, second), (second, first)] {
        for (size, offset) in [(5, 3), (1 << 20, 0), ((16 << 20) + 1, 7)] {
            let bytes = pattern(size, usize::try_from(size + offset)?);
            let source = from.uploaded(&bytes)?.slice(offset..size + offset)?;
            let expected = &bytes[usize::try_from(offset)?..];
            // Pushed by the owner of the source, then pulled by the owner of the destination.
            for bench in [from, to] {
                let target = to.allocate(BufferDesc::device(size))?;
                bench.copy(&source, &target)?;
                same("at the peer", &to.read(&target)?, expected)?;
            }
        }
    }
    Ok(())
}

fn peer_kernel(rig: &Rig) -> Result<()> {
    let (first, second) = rig.pair()?;
    let size = usize::try_from(4 * ADD_WORDS)?;
    let (a, b) = (pattern(5, size), pattern(6, size));
    let (near, far) = (first.uploaded(&a)?, second.uploaded(&b)?);
    let out = second.allocate(BufferDesc::device(size as u64))?;
    let (kernel, plus) = (first.kernel("add")?, 0_u32.to_le_bytes());
    let args = [Arg::Buffer(&near), Arg::Buffer(&far), Arg::Buffer(&out), Arg::Scalar(&plus)];
    first.run(&[Op::Launch(Launch::new(&kernel, [256, 1, 1], &args)?)])?;
    let expected: Vec<u32> = words(&a).into_iter().zip(words(&b)).map(|(a, b)| a.wrapping_add(b)).collect();
    ensure!(words(&second.read(&out)?) == expected, "the sums differ");
    Ok(())
}

fn refused_residents(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let family = bench.device.residents().context("residents")?;
    let word = bench.allocate(BufferDesc::device(4))?;
    let args = [Arg::Buffer(&word)];

    let (plain, sliced) = (bench.kernel("fault")?, bench.kernel("stubborn")?);
    let wrong = family.launch(&ResidentDesc::new(Launch::new(&plain, [1, 1, 1], &args)?));
    ensure!(matches!(wrong, Err(ResidentError::NotSliced { .. })), "{wrong:?}");
    let ops = [Op::Launch(Launch::new(&sliced, [1, 1, 1], &args)?)];
    let wrong = bench.queue.submit(&Submission { waits: &[], ops: &ops, signals: &[] });
    ensure!(matches!(wrong, Err(SubmitError::Sliced { .. })), "{wrong:?}");

    let budget = family.budget();
    let many = ResidentDesc::new(Launch::new(&sliced, [budget.total + 1, 1, 1], &args)?);
    let wrong = family.launch(&many);
    ensure!(matches!(wrong, Err(ResidentError::OverBudget { .. })), "{wrong:?}");

    Ok(())
}

/// The device is full for 100 ms and more, so a resident cannot begin.
fn not_resident(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let family = bench.device.residents().context("residents")?;
    let (hold, brief) = (bench.kernel("hold")?, bench.kernel("brief")?);
    let (held, word) = (bench.allocate(BufferDesc::device(4))?, bench.allocate(BufferDesc::device(4))?);
    let ns = 60_000_000_u64.to_le_bytes();
    let args = [Arg::Buffer(&held), Arg::Scalar(&ns)];
    // 32 blocks fit on an SM.
    let full = [64 * bench.device.info().multiprocessors, 1, 1];
    let launch = Op::Launch(Launch::new(&hold, full, &args)?);
    let done = bench.point()?;
    bench.queue.submit(&Submission { waits: &[], ops: &[launch], signals: std::slice::from_ref(&done) })?;
    std::thread::sleep(Duration::from_millis(5));
    let args = [Arg::Buffer(&word)];
    let mut desc = ResidentDesc::new(Launch::new(&brief, [1, 1, 1], &args)?);
    desc.check_in = Duration::from_millis(20);
    let result = family.launch(&desc);
    ensure!(matches!(result, Err(ResidentError::NotResident { started: 0, wanted: 1, .. })), "{result:?}");
    done.wait(LIMIT)?;
    eventually("the budget to come back", || Ok(family.budget().used == 0))
}

fn unparkable(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let family = bench.device.residents().context("residents")?;
    let (kernel, word) = (bench.kernel("stubborn")?, bench.allocate(BufferDesc::device(4))?);
    let args = [Arg::Buffer(&word)];
    let resident = family.launch(&ResidentDesc::new(Launch::new(&kernel, [1, 1, 1], &args)?))?;
    let start = Instant::now();
    let result = resident.park(Deadline::within(Duration::from_millis(20)));
    ensure!(matches!(result, Err(ResidentError::Unparkable { workgroup: 0, .. })), "{result:?}");
    ensure!(start.elapsed() < Duration::from_millis(25), "{:?}", start.elapsed());
    ensure!(resident.state().name() == "running");
    resident.stop(Deadline::within(LIMIT))?;
    ensure!(resident.state().name() == "stopped");
    ensure!(family.budget().used == 0, "the caller may start another at once");
    Ok(())
}

fn finished(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let family = bench.device.residents().context("residents")?;
    let (kernel, word) = (bench.kernel("brief")?, bench.allocate(BufferDesc::device(4))?);
    let args = [Arg::Buffer(&word)];
    let resident = family.launch(&ResidentDesc::new(Launch::new(&kernel, [1, 1, 1], &args)?))?;
    eventually("the resident to end", || Ok(resident.state().name() == "stopped"))?;
    ensure!(bench.read_word(&word)? == 3, "it served {} slices", bench.read_word(&word)?);
    ensure!(family.budget().used == 0, "the caller may start another at once");
    Ok(())
}

fn lost_device(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let (kernel, word) = (bench.kernel("fault")?, bench.allocate(BufferDesc::device(4))?);
    let done = bench.point()?;
    let args = [Arg::Buffer(&word)];
    let launch = Op::Launch(Launch::new(&kernel, [1, 1, 1], &args)?);
    bench.queue.submit(&Submission { waits: &[], ops: &[launch], signals: std::slice::from_ref(&done) })?;
    let result = done.wait(LIMIT);
    let Err(WaitError::Failed(failure)) = result else { bail!("{result:?}") };
    say(&format!("the failure is: {failure}"));
    ensure!(matches!(*failure, Failure::DeviceLost { .. }), "{failure:?}");
    ensure!(bench.device.failure().is_some() && bench.queue.failure().is_some());
    let refused = bench.device.allocate(&BufferDesc::device(4));
    ensure!(matches!(refused, Err(AllocError::Failed(_))), "{refused:?}");
    ensure!(matches!(bench.queue.submit(&Submission::default()), Err(SubmitError::Failed(_))));
    if let [_, other, ..] = rig.devices.as_slice() {
        let result = other.uploaded(&pattern(1, 4096)).and_then(|view| other.read(&view));
        report(
            &json!({"other device after the fault": result.map_or_else(|e| format!("{e:#}"), |_| "works".to_owned())}),
        );
    }
    Ok(())
}

/// Looks until it is so, within the limit.
fn eventually(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !is_so()? {
        ensure!(start.elapsed() < LIMIT, "waited for {what}");
        std::thread::yield_now();
    }
    Ok(())
}
