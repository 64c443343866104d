//! What only CUDA devices do, and what the conformance suite therefore does not ask: foreign code that is
//! wrong, streams, memory and contexts of other libraries, `CUDA_VISIBLE_DEVICES`, several processes, faults.

use std::{
    collections::BTreeMap,
    io::Write as _,
    process::{Child, Command, Output, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use warpweft_core_types::{
    Access, AllocError, Arg, Backend as _, BufferDesc, BufferView, ClockModel, CodeFormat, CopyRegion,
    Deadline, Failure, Features, FillRegion, ForeignCode, GraphNode, InteropError, KernelContract, Launch,
    LoadError, NativeHandle, Op, PreparedGraph, QueueDesc, ResidentDesc, ResidentError, Submission,
    SubmitError, WaitError,
};
use warpweft_cuda::{ADDRESS, CONTEXT, STREAM};

use crate::{
    bench::raw::{self, Raw},
    kernels,
    rig::{Bench, LIMIT, Rig, report, say, submit_word},
};

type Check = (&'static str, fn(&Rig) -> Result<()>);

const CHECKS: &[Check] = &[
    ("code that does not fit is refused", refused_code),
    ("a kernel that needs many registers has small workgroups", many_registers),
    ("the thread's context stays what it was", current_context),
    ("submit does not wait for a full stream", long_stream),
    ("a wait on a kernel that takes long ends by its deadline", long_kernel),
    ("1,000 rounds by turns with another library, on its stream", by_turns),
    ("1,000 rounds by turns with another library, on the default stream", by_turns_on_the_default_stream),
    ("work of another library as a node of a graph", captured),
    ("a context of another library is a device of its own", other_context),
    ("what is no stream or memory of the device is refused", refused_imports),
    ("memory is shared with another process", shared_with_a_process),
    ("CUDA_VISIBLE_DEVICES hides and orders, and changes nothing else", masked),
    ("surroundings that would hang residents are named", hostile_surroundings),
    ("a resident that cannot begin is stopped", not_resident),
    ("a resident that is done ends by itself", finished),
    ("the clock's error is known", clock),
];

pub(crate) fn run(rig: &Rig) -> Result<()> {
    let failed = CHECKS.iter().filter(|check| !passes(rig, check)).count();
    ensure!(failed == 0, "{failed} checks failed");
    Ok(())
}

/// The devices are lost afterwards, so this is a run of its own.
pub(crate) fn fault(rig: &Rig) -> Result<()> {
    ensure!(passes(rig, &("a fault loses the devices of this process and no others", lost_devices)));
    Ok(())
}

fn passes(rig: &Rig, (name, check): &Check) -> bool {
    let start = Instant::now();
    let result = check(rig);
    let ms = start.elapsed().as_secs_f64() * 1e3;
    let error = result.as_ref().err().map(|error| format!("{error:#}"));
    report(&json!({"check": name, "ok": result.is_ok(), "ms": ms, "error": error}));
    say(&format!("{ms:>9.2} ms  {name}: {}", error.as_deref().unwrap_or("ok")));
    result.is_ok()
}

fn raw(rig: &Rig) -> Result<Raw> {
    Raw::open(0, rig.first().device.info().compute_capability.context("capability")?)
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

/// Each thread needs more registers than a large workgroup leaves it.
fn many_registers(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let source =
        "extern \"C\" __global__ void __launch_bounds__(128) second(unsigned int* out) { *out = 1; }";
    let load = |threads| {
        let code = ForeignCode::Source { format: CodeFormat::CudaC, text: source.to_owned() };
        let contract = kernels::second_contract().with_workgroup_size([threads, 1, 1]);
        bench.device.load(&kernels::foreign(vec![contract], code))
    };
    load(128)?;
    let wrong = load(256);
    ensure!(matches!(&wrong, Err(LoadError::Rejected { log }) if log.contains("128")), "{wrong:?}");
    Ok(())
}

fn current_context(rig: &Rig) -> Result<()> {
    let before = raw::current_context()?;
    let bench = rig.first();
    let view = bench.uploaded(&[1; 4096])?;
    ensure!(bench.read(&view)? == [1; 4096]);
    ensure!(raw::current_context()? == before, "another context is current");
    Ok(())
}

fn long_kernel(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let (hold, held) = (bench.kernel("hold")?, bench.allocate(BufferDesc::device(4))?);
    let (queue, done) = (bench.new_queue()?, bench.point()?);
    let ns = 200_000_000_u64.to_le_bytes();
    submit_word(queue.as_ref(), &hold, &held, &ns, &[], std::slice::from_ref(&done))?;
    let (limit, start) = (Duration::from_millis(30), Instant::now());
    let early = done.wait(limit);
    ensure!(matches!(early, Err(WaitError::Timeout { .. })), "{early:?}");
    ensure!(start.elapsed() < limit + Duration::from_millis(20), "{:?}", start.elapsed());
    done.wait(LIMIT)?;
    ensure!(bench.read_word(&held)? == 1);
    Ok(())
}

fn by_turns(rig: &Rig) -> Result<()> {
    let raw = raw(rig)?;
    rounds(rig, &raw, raw.stream_handle())
}

fn by_turns_on_the_default_stream(rig: &Rig) -> Result<()> {
    let raw = raw(rig)?.on_the_default_stream();
    rounds(rig, &raw, 0)
}

/// Both sides work on the other library's memory in its stream, without the host in between. The result shows
/// the order of all steps.
fn rounds(rig: &Rig, raw: &Raw, stream: u64) -> Result<()> {
    const ROUNDS: u32 = 1000;
    let bench = rig.first();
    let interop = bench.device.interop().context("interop")?;
    let handle = NativeHandle { kind: STREAM, value: stream };
    let queue = interop.import_queue(raw::native_queue(handle), &QueueDesc { capacity: 4096 })?;
    let word = BufferView::whole(interop.import_buffer(raw::native_memory(raw.word(), 4))?);
    raw.clear_word()?;
    let (theirs, ours) = (raw.kernel("step")?, bench.kernel("step")?);
    for round in 0..ROUNDS {
        raw.launch_step(theirs)?;
        submit_word(queue.as_ref(), &ours, &word, &(round + 2).to_le_bytes(), &[], &[])?;
    }
    let done = bench.point()?;
    queue.submit(&Submission { signals: std::slice::from_ref(&done), ..Submission::default() })?;
    done.wait(LIMIT)?;
    let expected = stepped((0..ROUNDS).flat_map(|round| [1, round + 2]));
    let found = bench.read_word(&word)?;
    ensure!(found == expected, "{found} and not {expected}");
    ensure!(interop.queue_handle(queue.as_ref())?.kind == STREAM);
    Ok(())
}

/// A fill by the raw driver, between operations of ours, replayed.
fn captured(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let interop = bench.device.interop().context("interop")?;
    let [first, second] =
        [bench.allocate(BufferDesc::device(4096))?, bench.allocate(BufferDesc::device(4096))?];
    let address = interop.buffer_handle(first.buffer().as_ref())?;
    ensure!(address.kind == ADDRESS);
    let accesses = vec![(first.clone(), Access::Write)];
    let work = interop
        .capture(accesses, Arc::new(()), &mut |stream| Ok(raw::fill(stream, address, 0x0505_0505, 1024)?))?;
    let clear = Op::Fill(FillRegion::bytes(&first, 1));
    let copy = Op::Copy(CopyRegion::new(&first, &second)?);
    let nodes = [GraphNode::new(&clear, &[]), GraphNode::new(work, &[0]), GraphNode::new(&copy, &[1])];
    let graph = PreparedGraph::new(bench.device.as_ref(), &nodes)?;
    for _ in 0..100 {
        bench.run(&[Op::Fill(FillRegion::bytes(&second, 9)), Op::Replay(&graph)])?;
    }
    ensure!(bench.read(&second)? == [5; 4096], "the fill is not between the two");
    let refused = interop.capture(Vec::new(), Arc::new(()), &mut |stream| Ok(raw::synchronise(stream)?));
    ensure!(matches!(refused, Err(InteropError::Capture { .. })), "{refused:?}");
    bench.run(&[Op::Replay(&graph)])
}

/// Works, and its memory is not the primary context's.
fn other_context(rig: &Rig) -> Result<()> {
    let (context, handle) = raw::new_context(0)?;
    let device = rig.backend.open_context(context, Features::empty())?;
    let interop = device.interop().context("interop")?.device_handle();
    ensure!(interop == NativeHandle { kind: CONTEXT, value: handle }, "{interop}");
    let bench = Bench::open(device)?;
    let view = bench.uploaded(&[7; 4096])?;
    ensure!(bench.read(&view)? == [7; 4096]);
    let own = rig.first().allocate(BufferDesc::device(4096))?;
    let ops = [Op::Copy(CopyRegion::new(&view, &own)?)];
    let refused = rig.first().queue.submit(&Submission { ops: &ops, ..Submission::default() });
    ensure!(matches!(refused, Err(SubmitError::Foreign { what: "buffer", .. })), "{refused:?}");
    Ok(())
}

fn refused_imports(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let interop = bench.device.interop().context("interop")?;
    let import = |value| {
        let queue = raw::native_queue(NativeHandle { kind: STREAM, value });
        interop.import_queue(queue, &QueueDesc::default()).err()
    };
    let per_thread = import(2);
    ensure!(matches!(&per_thread, Some(InteropError::Refused { .. })), "{per_thread:?}");
    if let Ok((_, second)) = rig.pair() {
        let capability = second.device.info().compute_capability.context("capability")?;
        let elsewhere = import(Raw::open(1, capability)?.stream_handle());
        ensure!(matches!(&elsewhere, Some(InteropError::Refused { .. })), "{elsewhere:?}");
        let memory = second.allocate(BufferDesc::device(4096))?;
        let address = second.device.interop().context("interop")?.buffer_handle(memory.buffer().as_ref())?;
        let elsewhere = interop.import_buffer(raw::native_memory(address.value, 4096)).err();
        ensure!(matches!(&elsewhere, Some(InteropError::Refused { .. })), "{elsewhere:?}");
    }
    let raw = raw(rig)?;
    let long = interop.import_buffer(raw::native_memory(raw.word(), 1 << 40)).err();
    ensure!(matches!(&long, Some(InteropError::Refused { .. })), "{long:?}");
    let host = interop.import_buffer(raw::native_memory(raw.pin(4096)?.0, 4096)).err();
    ensure!(matches!(&host, Some(InteropError::Refused { .. })), "{host:?}");
    Ok(())
}

/// The other process checks what is there and writes something else.
fn shared_with_a_process(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let family = bench.device.sharing().context("sharing")?;
    let shared = BufferView::whole(family.allocate_shareable(1 << 20)?);
    bench.run(&[Op::Fill(FillRegion::bytes(&shared, 0x11))])?;
    let exported = family.export(shared.buffer().as_ref())?;
    let mut child = this_program(&["child", "share", &exported.size.to_string()]);
    child.stdin(Stdio::from(exported.descriptor));
    let output = child.output()?;
    ensure!(output.status.success(), "the other process: {}", words(&output));
    ensure!(bench.read(&shared)?.iter().all(|&byte| byte == 0x22), "it wrote something else");
    Ok(())
}

/// Case T1: by position, reversed, by UUID, and none at all.
fn masked(rig: &Rig) -> Result<()> {
    let infos = rig.backend.devices()?;
    let uuids: Vec<String> = infos.iter().map(|info| info.id.uuid.to_string()).collect();
    let unmasked = seen_by_a_process(None)?;
    ensure!(keys(&unmasked) == uuids, "{unmasked:?}");
    let reversed: Vec<String> = (0..infos.len()).rev().map(|position| position.to_string()).collect();
    let by_uuid: Vec<String> = uuids.iter().rev().map(|uuid| format!("GPU-{uuid}")).collect();
    let turned: Vec<String> = uuids.iter().rev().cloned().collect();
    for (mask, expected) in [
        (reversed.join(","), turned.clone()),
        (by_uuid.join(","), turned),
        ("0".to_owned(), uuids[..1].to_vec()),
    ] {
        let seen = seen_by_a_process(Some(&mask))?;
        ensure!(keys(&seen) == expected, "{mask:?} shows {seen:?}");
        let places: BTreeMap<_, _> = unmasked.iter().cloned().collect();
        ensure!(seen.iter().all(|(uuid, facts)| subset(facts, &places[uuid])), "{mask:?} changes {seen:?}");
    }
    for mask in ["", "-1"] {
        let mut child = this_program(&["child", "devices"]);
        let output = child.env("CUDA_VISIBLE_DEVICES", mask).output()?;
        let text = words(&output);
        ensure!(!output.status.success() && text.contains("CUDA_VISIBLE_DEVICES"), "{mask:?}: {text}");
    }
    Ok(())
}

/// UUID and facts of each device, in the order in which a process with this mask sees them.
fn seen_by_a_process(mask: Option<&str>) -> Result<Vec<(String, Value)>> {
    let mut child = this_program(&["child", "devices"]);
    let output = match mask {
        Some(mask) => child.env("CUDA_VISIBLE_DEVICES", mask).output()?,
        None => child.output()?,
    };
    ensure!(output.status.success(), "{mask:?}: {}", words(&output));
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn keys(seen: &[(String, Value)]) -> Vec<String> {
    seen.iter().map(|(uuid, _)| uuid.clone()).collect()
}

/// Whether what is known of a device among some is known of it among all.
fn subset(some: &Value, all: &Value) -> bool {
    let links = |facts: &Value| facts["links"].as_array().cloned().unwrap_or_default();
    some["pci"] == all["pci"] && links(some).iter().all(|link| links(all).contains(link))
}

fn hostile_surroundings(_rig: &Rig) -> Result<()> {
    for (name, value) in [("CUDA_LAUNCH_BLOCKING", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")] {
        let output = this_program(&["child", "resident"]).env(name, value).output()?;
        let text = words(&output);
        ensure!(!output.status.success() && text.contains(name), "{name}: {text}");
    }
    let output = this_program(&["child", "resident"]).output()?;
    ensure!(output.status.success(), "{}", words(&output));
    Ok(())
}

/// How well times of the device are known, over two seconds.
fn clock(rig: &Rig) -> Result<()> {
    for bench in &rig.devices {
        let clock = bench.device.clock().context("a clock")?;
        let sample = || clock.sample(Deadline::within(LIMIT)).map_err(|failure| anyhow::anyhow!("{failure}"));
        let mut samples = Vec::new();
        for _ in 0..20 {
            samples.push(sample()?);
            std::thread::sleep(Duration::from_millis(100));
        }
        let figures = ClockModel::fit(&samples).context("the clock stands still")?.report();
        report(&json!({"clock": bench.device.info().id, "figures": figures}));
        say(&format!("{}: {figures:?}", bench.device.info().id));
        ensure!(figures.error_ns < 50_000.0 && figures.drift_ppm.abs() < 1000.0, "{figures:?}");
    }
    Ok(())
}

/// A trap loses every device of the process, and no other process minds.
fn lost_devices(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let mut neighbour = busy_process()?;
    let (kernel, word) = (bench.kernel("fault")?, bench.allocate(BufferDesc::device(4))?);
    let done = bench.point()?;
    let args = [Arg::Buffer(&word)];
    let launch = Op::Launch(Launch::new(&kernel, [1, 1, 1], &args)?);
    bench.queue.submit(&Submission { ops: &[launch], signals: std::slice::from_ref(&done), waits: &[] })?;
    let result = done.wait(LIMIT);
    let Err(WaitError::Failed(failure)) = result else { bail!("{result:?}") };
    say(&format!("the failure is: {failure}"));
    ensure!(matches!(*failure, Failure::DeviceLost { .. }), "{failure:?}");
    ensure!(bench.device.failure().is_some() && bench.queue.failure().is_some());
    let refused = bench.device.allocate(&BufferDesc::device(4));
    ensure!(matches!(refused, Err(AllocError::Failed(_))), "{refused:?}");
    ensure!(matches!(bench.queue.submit(&Submission::default()), Err(SubmitError::Failed(_))));
    for other in rig.devices.iter().skip(1) {
        let result = other.uploaded(&[1; 4096]).and_then(|view| other.read(&view));
        let after = result.map_or_else(|error| format!("{error:#}"), |_| "works".to_owned());
        report(&json!({"other device of the process after the fault": after}));
    }
    if let Some(mut stdin) = neighbour.stdin.take() {
        // It ends when it has read this, and says whether all its work was right.
        stdin.write_all(b"enough")?;
    }
    let output = neighbour.wait_with_output()?;
    ensure!(output.status.success(), "the other process: {}", words(&output));
    Ok(())
}

/// Another process, at work on the device.
fn busy_process() -> Result<Child> {
    let mut child = this_program(&["child", "busy"]).stdin(Stdio::piped()).spawn()?;
    let mut ready = [0; 1];
    let stdout = child.stdout.as_mut().context("its output")?;
    std::io::Read::read_exact(stdout, &mut ready).context("it did not begin")?;
    Ok(child)
}

fn this_program(args: &[&str]) -> Command {
    let program = std::env::current_exe().unwrap_or_else(|_| "gpu-suite".into());
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}

/// Digits that `step` was given, in order, as its word shows them.
fn stepped(digits: impl IntoIterator<Item = u32>) -> u32 {
    digits.into_iter().fold(0, |word: u32, digit| word.wrapping_mul(3).wrapping_add(digit))
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

/// Looks until it is so, within the limit.
fn eventually(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !is_so()? {
        ensure!(start.elapsed() < LIMIT, "waited for {what}");
        std::thread::yield_now();
    }
    Ok(())
}
