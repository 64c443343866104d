//! The other process of a check.

use std::{
    io::{Read as _, Write as _},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Subcommand;
use serde_json::json;
use warpweft_core_types::{
    AllocError, Arg, Backend as _, BufferDesc, BufferView, Deadline, Failure, Features, FillRegion, Launch,
    LoadError, Op, OpenError, QueueDesc, Resident, ResidentDesc, ResidentError, ResidentState, SharedMemory,
    SignalError, Submission, SubmitError, WaitError,
};
use warpweft_cuda::CudaBackend;

use crate::{
    bench, faulted, forked, kernels,
    rig::{Bench, LIMIT, Rig, report, submit_word},
    vulkan,
};

/// What it does.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Role {
    /// Imports the memory whose descriptor is the standard input.
    Share {
        /// Its size.
        size: u64,
    },
    /// Tells which devices it sees.
    Devices,
    /// Works until something can be read.
    Busy,
    /// Starts a resident.
    Resident,
    /// Runs into a trap.
    Trap,
    /// Stores where nobody mapped memory.
    StrayStore,
    /// Runs into a trap in a graph, and goes on without the device.
    GraphTrap,
    /// Waits in vain for a kernel of eight seconds, and ends.
    LongKernel,
    /// Takes memory until there is none, twice.
    OutOfMemory,
    /// Forks, and uses what was inherited.
    Fork,
    /// Finds the devices and their links, and tells how long it took.
    Discover,
    /// Tells which Vulkan devices open.
    VulkanDevices,
}

pub(crate) fn play(role: &Role) -> Result<()> {
    match role {
        Role::Share { size } => share(*size),
        Role::Devices => devices(),
        Role::Busy => busy(),
        Role::Resident => resident(),
        Role::Trap => trap(),
        Role::StrayStore => stray_store(),
        Role::GraphTrap => faulted::runtime_loses_its_device(),
        Role::LongKernel => long_kernel(),
        Role::OutOfMemory => out_of_memory(),
        Role::Fork => fork(),
        Role::Discover => bench::discovery::discover(),
        Role::VulkanDevices => vulkan::tell(),
    }
}

fn share(size: u64) -> Result<()> {
    let rig = Rig::open()?;
    let bench = rig.first();
    let family = bench.device.sharing().context("sharing")?;
    let descriptor = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned()?;
    let memory = SharedMemory { device: bench.device.info().id.uuid, size, descriptor };
    let view = BufferView::whole(family.import_shared(memory)?);
    ensure!(bench.read(&view)?.iter().all(|&byte| byte == 0x11), "other bytes are there");
    bench.run(&[Op::Fill(FillRegion::bytes(&view, 0x22))])
}

fn devices() -> Result<()> {
    let backend = CudaBackend::new()?;
    let mut seen = Vec::new();
    for info in backend.devices()? {
        let links = backend.open(info.id.ordinal, Features::empty())?;
        let facts = links.links().map(|links| links.facts()).unwrap_or_default();
        seen.push((info.id.uuid.to_string(), json!({"pci": info.pci, "links": facts})));
    }
    report(&json!(seen));
    Ok(())
}

fn busy() -> Result<()> {
    let rig = Rig::open()?;
    let bench = rig.first();
    std::io::stdout().write_all(b"!")?;
    std::io::stdout().flush()?;
    let enough = std::thread::spawn(|| std::io::stdin().read(&mut [0]));
    // Its memory stays, so that it can work while another process has all the rest.
    let (view, staging) =
        (bench.allocate(BufferDesc::device(1 << 16))?, bench.allocate(BufferDesc::host_visible(1 << 16))?);
    let mut rounds = 0_u32;
    while rounds < 100 || !enough.is_finished() {
        let (byte, mut found) = (rounds.to_le_bytes()[0], vec![0; 1 << 16]);
        staging.write(&vec![byte; 1 << 16])?;
        bench.copy(&staging, &view)?;
        staging.write(&found)?;
        bench.copy(&view, &staging)?;
        staging.read(&mut found)?;
        ensure!(found.iter().all(|&found| found == byte), "round {rounds}");
        rounds += 1;
    }
    Ok(())
}

fn resident() -> Result<()> {
    let rig = Rig::open()?;
    let resident = brief(rig.first())?;
    Ok(resident.stop(Deadline::within(LIMIT))?)
}

/// A resident of one workgroup.
fn brief(bench: &Bench) -> Result<Arc<dyn Resident>> {
    let word = bench.allocate(BufferDesc::device(4))?;
    let (kernel, args) = (bench.kernel("brief")?, [Arg::Buffer(&word)]);
    let desc = ResidentDesc::new(Launch::new(&kernel, [1, 1, 1], &args)?);
    Ok(bench.device.residents().context("residents")?.launch(&desc)?)
}

fn trap() -> Result<()> {
    let rig = Rig::open()?;
    let word = rig.first().allocate(BufferDesc::device(4))?;
    let reason = lose_device(&rig, "fault", &[Arg::Buffer(&word)])?;
    report(&json!({"after a trap": reason}));
    Ok(())
}

/// The driver's code is that of an illegal address.
fn stray_store() -> Result<()> {
    // In the first page, which nobody has; on the device and, where that reads the host's tables, in the process.
    const NOWHERE: u64 = 64;
    let rig = Rig::open()?;
    let word = rig.first().allocate(BufferDesc::device(4))?;
    let args = [Arg::Buffer(&word), Arg::Scalar(&NOWHERE.to_le_bytes())];
    let reason = lose_device(&rig, "stray", &args)?;
    report(&json!({"after a store to no memory": reason}));
    ensure!(reason.contains("700"), "the reason is another: {reason}");
    Ok(())
}

/// Launches a kernel that faults, and looks at everything that is lost with it; the reason that is told.
fn lose_device(rig: &Rig, kernel: &str, args: &[Arg<'_>]) -> Result<String> {
    let bench = rig.first();
    let (kernel, done) = (bench.kernel(kernel)?, bench.point()?);
    let launch = Op::Launch(Launch::new(&kernel, [1, 1, 1], args)?);
    bench.queue.submit(&Submission { ops: &[launch], signals: std::slice::from_ref(&done), waits: &[] })?;
    let result = done.wait(LIMIT);
    let Err(WaitError::Failed(failure)) = result else { bail!("{result:?}") };
    let Failure::DeviceLost { reason, .. } = failure.as_ref() else { bail!("{failure:?}") };
    ensure!(bench.device.failure().is_some() && bench.queue.failure().is_some());
    let refused = bench.device.allocate(&BufferDesc::device(4));
    ensure!(matches!(refused, Err(AllocError::Failed(_))), "{refused:?}");
    ensure!(matches!(bench.queue.submit(&Submission::default()), Err(SubmitError::Failed(_))));
    for other in rig.devices.iter().skip(1) {
        let result = other.uploaded(&[1; 4096]).and_then(|view| other.read(&view));
        let after = result.map_or_else(|error| format!("{error:#}"), |_| "works".to_owned());
        report(&json!({"other device of the process after the fault": after}));
    }
    Ok(reason.clone())
}

fn long_kernel() -> Result<()> {
    const LIMIT: Duration = Duration::from_millis(300);
    let rig = Rig::open()?;
    let bench = rig.first();
    let (hold, held) = (bench.kernel("hold")?, bench.allocate(BufferDesc::device(4))?);
    let done = bench.point()?;
    let ns = 8_000_000_000_u64.to_le_bytes();
    submit_word(bench.queue.as_ref(), &hold, &held, &ns, &[], std::slice::from_ref(&done))?;
    let start = Instant::now();
    let early = done.wait(LIMIT);
    let waited = start.elapsed();
    ensure!(matches!(early, Err(WaitError::Timeout { .. })), "{early:?}");
    ensure!(waited < LIMIT + Duration::from_millis(100), "the wait took {waited:?}");
    report(&json!({"a wait of 0.3 s on a kernel of 8 s": "timed out", "ms": waited.as_secs_f64() * 1e3}));
    // With the kernel running, everything is dropped.
    Ok(())
}

fn out_of_memory() -> Result<()> {
    let rig = Rig::open()?;
    let bench = rig.first();
    let all = take_all(bench)?;
    let taken = all.len();
    // What was given out works while there is no more.
    let last = all.last().context("not even one chunk was given")?.slice(0..4096)?;
    bench.run(&[Op::Fill(FillRegion::bytes(&last, 0x77))])?;
    ensure!(bench.read(&last)? == [0x77; 4096], "the last chunk holds something else");
    drop((last, all));
    // Memory is given back in stream order, so that what is there at once may be less.
    let (at_once, freed) = (take_all(bench)?.len(), Instant::now());
    let (mut again, enough) = (at_once, taken - taken / 10);
    while again < enough && freed.elapsed() < LIMIT {
        again = take_all(bench)?.len();
    }
    report(&json!({"chunks until memory is out": taken, "at once when they were freed": at_once,
        "in the end": again, "ms": freed.elapsed().as_secs_f64() * 1e3}));
    ensure!(again >= enough, "{taken} chunks were given, and {again} once they were freed");
    Ok(())
}

/// Chunks of a sixty-fourth of the device until it has no more, and says so.
fn take_all(bench: &Bench) -> Result<Vec<BufferView>> {
    const MOST: usize = 1000;
    let chunk = (bench.device.memory()?.capacity.0 / 64).max(1 << 20);
    let mut all = Vec::new();
    while all.len() < MOST {
        match bench.device.allocate(&BufferDesc::device(chunk)) {
            Ok(buffer) => all.push(BufferView::whole(buffer)),
            Err(AllocError::OutOfMemory { requested, .. }) => {
                ensure!(requested.0 == chunk, "{requested} were asked for, it says");
                return Ok(all);
            }
            Err(other) => return Err(other.into()),
        }
    }
    bail!("{MOST} chunks were given and the memory is not out")
}

/// A step in the forked process, and whether what it met is right.
type Step<'a> = (&'static str, Box<dyn Fn() -> bool + 'a>);

/// Cases of C15: the forked process is told so by everything, and this one goes on.
fn fork() -> Result<()> {
    let rig = Rig::open()?;
    let bench = rig.first();
    let (device, resident) = (&bench.device, brief(bench)?);
    let (window, point) = (bench.allocate(BufferDesc::host_visible(64))?, bench.point()?);
    let fill = [Op::Fill(FillRegion::bytes(&window, 1))];
    let submission = Submission { waits: &[], ops: &fill, signals: std::slice::from_ref(&point) };
    let within = || Deadline::within(LIMIT);
    let steps: Vec<Step<'_>> = vec![
        ("failure", Box::new(|| device.failure().is_some_and(|failure| is_named(&failure)))),
        ("memory", Box::new(|| matches!(device.memory(), Err(AllocError::Failed(f)) if is_named(&f)))),
        (
            "allocate",
            Box::new(|| {
                let granted = device.allocate(&BufferDesc::device(64));
                matches!(granted, Err(AllocError::Failed(failure)) if is_named(&failure))
            }),
        ),
        (
            "load",
            Box::new(|| {
                let loaded = device.load(&kernels::code(kernels::contracts()));
                matches!(loaded, Err(LoadError::Failed(failure)) if is_named(&failure))
            }),
        ),
        (
            "create_queue",
            Box::new(|| {
                let made = device.create_queue(&QueueDesc::default());
                matches!(made, Err(OpenError::Failed(failure)) if is_named(&failure))
            }),
        ),
        ("create_semaphore", Box::new(|| matches!(device.create_semaphore(0), Err(OpenError::Failed(_))))),
        (
            "submit",
            Box::new(|| {
                let taken = bench.queue.submit(&submission);
                matches!(taken, Err(SubmitError::Failed(failure)) if is_named(&failure))
            }),
        ),
        (
            "wait",
            Box::new(|| {
                let waited = point.wait(LIMIT);
                matches!(waited, Err(WaitError::Failed(failure)) if is_named(&failure))
            }),
        ),
        ("signal", Box::new(|| matches!(point.semaphore.signal(1), Err(SignalError::Failed(_))))),
        ("write", Box::new(|| window.write(&[1]).is_err() && window.buffer().mapping().is_none())),
        ("state", Box::new(|| resident.state() == ResidentState::Failed && resident.failure().is_some())),
        ("park", Box::new(|| matches!(resident.park(within()), Err(ResidentError::Failed(_))))),
        ("open", Box::new(|| matches!(rig.backend.open(0, Features::empty()), Err(OpenError::Failed(_))))),
        ("new", Box::new(|| CudaBackend::new().is_err_and(|error| error.to_string().contains("fork")))),
    ];
    let code = forked::run(LIMIT, || {
        let wrong = steps.iter().position(|(_, is_right)| !is_right());
        wrong.and_then(|step| u8::try_from(step + 1).ok()).unwrap_or(0)
    })?;
    let wrong = usize::from(code).checked_sub(1).map(|step| steps.get(step).map_or("?", |(name, _)| name));
    ensure!(wrong.is_none(), "in the forked process, {} did not answer as it should", wrong.unwrap_or("?"));
    // This process noticed nothing.
    bench.queue.submit(&submission)?;
    point.wait(LIMIT)?;
    resident.stop(within())?;
    report(&json!({"a forked process": "was told so", "steps": steps.len()}));
    Ok(())
}

/// Whether a failure names the cause.
fn is_named(failure: &Failure) -> bool {
    matches!(failure, Failure::DeviceLost { reason, .. } if reason.contains("fork"))
}
