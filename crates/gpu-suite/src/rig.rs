//! What checks and benchmarks work with.

use std::{fmt, process::ExitCode, sync::Arc, thread, time::Duration};

use anyhow::Result;
use serde_json::{Value, json};
use warpweft_core_types::{
    Arg, Backend, BufferDesc, BufferView, CopyRegion, Device, Features, Kernel, KernelCode, Launch, Op,
    Queue, QueueDesc, SemaphorePoint, Submission,
};
use warpweft_cuda::CudaBackend;

use crate::kernels::{self, Kernels};

/// Nothing here takes longer.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// The open devices, with the kernels and a queue on each.
#[derive(Debug)]
pub(crate) struct Rig {
    pub(crate) backend: CudaBackend,
    pub(crate) devices: Vec<Bench>,
}

/// What this machine lacks of what a check needs, as the error of a check that is not run.
#[derive(Debug)]
pub(crate) struct NotRun(pub(crate) String);

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotRun {}

/// One device.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) kernels: Kernels,
    pub(crate) queue: Arc<dyn Queue>,
}

impl Rig {
    pub(crate) fn open() -> Result<Self> {
        Self::with(&kernels::code(kernels::contracts()))
    }

    /// With other kernels.
    pub(crate) fn with(code: &KernelCode) -> Result<Self> {
        let backend = CudaBackend::new()?;
        let devices = (0..)
            .zip(backend.devices()?)
            .map(|(ordinal, _)| Bench::with(backend.open(ordinal, Features::RESIDENT_KERNELS)?, code));
        let devices = devices.collect::<Result<_>>()?;
        Ok(Self { backend, devices })
    }

    /// What the results are of.
    pub(crate) fn describe(&self) -> Result<()> {
        let (major, minor) = self.backend.driver_version();
        report(&json!({"cuda": [major, minor], "devices": self.backend.devices()?}));
        Ok(())
    }

    pub(crate) fn first(&self) -> &Bench {
        &self.devices[0]
    }

    /// Two devices that reach each other.
    pub(crate) fn pair(&self) -> Result<(&Bench, &Bench)> {
        let [first, second, ..] = self.devices.as_slice() else {
            return Err(NotRun("it needs two devices".to_owned()).into());
        };
        let reaches = first.device.peers().is_some_and(|peers| peers.access(second.device.info().id).write);
        if !reaches {
            return Err(NotRun("it needs two devices that reach each other".to_owned()).into());
        }
        Ok((first, second))
    }
}

impl Bench {
    pub(crate) fn open(device: Arc<dyn Device>) -> Result<Self> {
        Self::with(device, &kernels::code(kernels::contracts()))
    }

    /// With other kernels.
    pub(crate) fn with(device: Arc<dyn Device>, code: &KernelCode) -> Result<Self> {
        let kernels = Kernels::load(device.as_ref(), code)?;
        let queue = device.create_queue(&QueueDesc::default())?;
        Ok(Self { device, kernels, queue })
    }

    pub(crate) fn allocate(&self, desc: BufferDesc) -> Result<BufferView> {
        Ok(BufferView::whole(self.device.allocate(&desc)?))
    }

    /// Host-visible memory that holds `bytes`.
    pub(crate) fn staged(&self, bytes: &[u8]) -> Result<BufferView> {
        let view = self.allocate(BufferDesc::host_visible(bytes.len() as u64))?;
        view.write(bytes)?;
        Ok(view)
    }

    /// Memory of the device that holds `bytes`.
    pub(crate) fn uploaded(&self, bytes: &[u8]) -> Result<BufferView> {
        let view = self.allocate(BufferDesc::device(bytes.len() as u64))?;
        self.copy(&self.staged(bytes)?, &view)?;
        Ok(view)
    }

    pub(crate) fn read(&self, view: &BufferView) -> Result<Vec<u8>> {
        let landing = self.allocate(BufferDesc::host_visible(view.size()))?;
        self.copy(view, &landing)?;
        let mut bytes = vec![0; usize::try_from(view.size())?];
        landing.read(&mut bytes)?;
        Ok(bytes)
    }

    pub(crate) fn read_word(&self, view: &BufferView) -> Result<u32> {
        let bytes = self.read(&view.slice(0..4)?)?;
        Ok(u32::from_le_bytes(bytes.as_slice().try_into()?))
    }

    pub(crate) fn copy(&self, src: &BufferView, dst: &BufferView) -> Result<()> {
        self.run(&[Op::Copy(CopyRegion::new(src, dst)?)])
    }

    /// Runs the operations and waits for them.
    pub(crate) fn run(&self, ops: &[Op<'_>]) -> Result<()> {
        let done = self.point()?;
        self.queue.submit(&Submission { waits: &[], ops, signals: std::slice::from_ref(&done) })?;
        Ok(done.wait(LIMIT)?)
    }

    /// The first value of a new semaphore.
    pub(crate) fn point(&self) -> Result<SemaphorePoint> {
        Ok(SemaphorePoint::new(&self.device.create_semaphore(0)?, 1))
    }

    pub(crate) fn new_queue(&self) -> Result<Arc<dyn Queue>> {
        Ok(self.device.create_queue(&QueueDesc::default())?)
    }

    pub(crate) fn kernel(&self, name: &str) -> Result<Arc<dyn Kernel>> {
        self.kernels.get(name)
    }
}

/// One launch of a single workgroup with one buffer and one value, submitted.
pub(crate) fn submit_word(
    queue: &dyn Queue,
    kernel: &Arc<dyn Kernel>,
    buffer: &BufferView,
    value: &[u8],
    waits: &[SemaphorePoint],
    signals: &[SemaphorePoint],
) -> Result<()> {
    let args = [Arg::Buffer(buffer), Arg::Scalar(value)];
    let launch = Launch::new(kernel, [1, 1, 1], &args)?;
    queue.submit(&Submission { waits, ops: &[Op::Launch(launch)], signals })?;
    Ok(())
}

/// Runs a part that must not hold a machine, whatever it does; says why it failed.
pub(crate) fn bounded(part: impl FnOnce() -> Result<()>) -> ExitCode {
    /// Shorter than the limits of the legs, so that the reason is told.
    const LONGEST: Duration = Duration::from_secs(150);
    bounded_by(LONGEST, part)
}

/// The same with a limit of its own.
pub(crate) fn bounded_by(longest: Duration, part: impl FnOnce() -> Result<()>) -> ExitCode {
    thread::spawn(move || {
        thread::sleep(longest);
        say(&format!("it took longer than {longest:?}"));
        std::process::exit(3);
    });
    match part() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// One line of JSON on the standard output.
#[expect(clippy::print_stdout, reason = "the program's result")]
pub(crate) fn report(line: &Value) {
    println!("{line}");
}

/// A line for who watches.
#[expect(clippy::print_stderr, reason = "the program's progress")]
pub(crate) fn say(text: &str) {
    eprintln!("{text}");
}
