//! What a case works with: open devices, and short words for common steps.

use std::{sync::Arc, time::Duration};

use libtest_mimic::Failed;
use warpweft_core_types::{
    AllocError, Backend, Buffer, BufferDesc, BufferView, CopyRegion, Device, DeviceInfo, Failure, Features,
    Kernel, KernelCode, Op, OpenError, Queue, QueueDesc, Semaphore, SemaphorePoint, Submission, SubmissionId,
    SubmitError,
};

use crate::harness::Case;

/// Far longer than anything takes on a busy machine; only a hang reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Long enough for something that must not happen to happen.
pub(crate) const MOMENT: Duration = Duration::from_millis(20);

/// The devices of one run.
pub(crate) struct Context {
    /// All that could be opened: of several backends by turns, so that neighbours differ.
    pub(crate) infos: Vec<DeviceInfo>,
    /// The backend of each.
    backends: Vec<Arc<dyn Backend>>,
    devices: Vec<Arc<dyn Device>>,
}

impl Context {
    /// Opens the first devices; says what the case needs that they lack. A device that is there and cannot be
    /// opened is a failure.
    pub(crate) fn open(backends: &[Arc<dyn Backend>], case: &Case) -> Result<Result<Self, String>, Failed> {
        let (infos, backends) = by_turns(backends)?.into_iter().unzip();
        let mut context = Self { infos, backends, devices: Vec::new() };
        if context.infos.len() < case.devices as usize {
            return Ok(Err(format!("needs {} devices, there are {}", case.devices, context.infos.len())));
        }
        for position in 0..case.devices as usize {
            match context.open_device(position, case.needs) {
                Ok(device) => context.devices.push(device),
                Err(error @ OpenError::Unsupported { .. }) => return Ok(Err(error.to_string())),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Ok(context))
    }

    /// Opens the device at this position of `infos`, whether the case asked for that many or not.
    pub(crate) fn open_device(&self, position: usize, needs: Features) -> Result<Arc<dyn Device>, OpenError> {
        self.backends[position].open(self.infos[position].id.ordinal, needs)
    }

    /// The backend of the first device.
    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backends[0]
    }

    /// Whether two positions of `infos` are of one backend, opened once.
    pub(crate) fn share_backend(&self, one: usize, other: usize) -> bool {
        Arc::ptr_eq(&self.backends[one], &self.backends[other])
    }

    /// The device with this position in the run.
    pub(crate) fn device(&self, position: usize) -> &Arc<dyn Device> {
        &self.devices[position]
    }

    pub(crate) fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
    }

    /// Checks that a device which a fault took says so, and refuses what comes after.
    pub(crate) fn stays_lost(&self, position: usize) -> Result<(), Failed> {
        let device = self.device(position);
        assert!(matches!(device.failure().as_deref(), Some(Failure::DeviceLost { .. })), "{device:?}");
        let queue = device.create_queue(&QueueDesc::default()).err().ok_or("a lost device made a queue")?;
        assert!(matches!(queue, OpenError::Failed(_)), "{queue}");
        let memory = device.allocate(&BufferDesc::device(16)).err().ok_or("a lost device gave memory")?;
        assert!(matches!(memory, AllocError::Failed(_)), "{memory}");
        Ok(())
    }

    /// A queue and a semaphore of the device with this position.
    pub(crate) fn lane(&self, position: usize) -> Result<Lane, Failed> {
        Lane::new(self.device(position))
    }

    /// Device memory.
    pub(crate) fn memory(&self, position: usize, size: u64) -> Result<BufferView, Failed> {
        let buffer = self.device(position).allocate(&BufferDesc::device(size))?;
        Ok(BufferView::whole(buffer))
    }

    /// Host-visible memory.
    pub(crate) fn window(&self, position: usize, size: u64) -> Result<BufferView, Failed> {
        let buffer = self.device(position).allocate(&BufferDesc::host_visible(size))?;
        Ok(BufferView::whole(buffer))
    }

    /// One kernel of the suite's own.
    pub(crate) fn kernel(&self, position: usize, code: &KernelCode) -> Result<Arc<dyn Kernel>, Failed> {
        let name = &code.contracts()[0].name;
        Ok(self.device(position).load(code)?.kernel(name)?)
    }

    /// Device memory that holds `bytes`.
    pub(crate) fn upload(&self, position: usize, bytes: &[u8]) -> Result<BufferView, Failed> {
        let window = self.window(position, bytes.len() as u64)?;
        window.write(bytes)?;
        let memory = self.memory(position, bytes.len() as u64)?;
        self.lane(position)?.run(&[Op::Copy(CopyRegion::new(&window, &memory)?)])?;
        Ok(memory)
    }

    /// What a view of the device with this position holds.
    pub(crate) fn download(&self, position: usize, view: &BufferView) -> Result<Vec<u8>, Failed> {
        let window = self.window(position, view.size())?;
        self.lane(position)?.run(&[Op::Copy(CopyRegion::new(view, &window)?)])?;
        let mut bytes = vec![0; usize::try_from(view.size())?];
        window.read(&mut bytes)?;
        Ok(bytes)
    }

    /// What a view holds, as 32-bit words.
    pub(crate) fn download_words(&self, position: usize, view: &BufferView) -> Result<Vec<u32>, Failed> {
        let bytes = self.download(position, view)?;
        Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}

/// A device that can be opened, and by which backend.
type Placed = (DeviceInfo, Arc<dyn Backend>);

/// The devices of all backends, one of each by turns.
fn by_turns(backends: &[Arc<dyn Backend>]) -> Result<Vec<Placed>, OpenError> {
    let infos = backends.iter().map(|backend| backend.devices()).collect::<Result<Vec<_>, _>>()?;
    let most = infos.iter().map(Vec::len).max().unwrap_or(0);
    let mut devices = Vec::new();
    for turn in 0..most {
        let all = infos.iter().zip(backends);
        devices
            .extend(all.filter_map(|(infos, backend)| Some((infos.get(turn)?.clone(), Arc::clone(backend)))));
    }
    Ok(devices)
}

/// A queue with a semaphore that each submission raises by one.
pub(crate) struct Lane {
    pub(crate) queue: Arc<dyn Queue>,
    pub(crate) semaphore: Arc<dyn Semaphore>,
    submitted: std::cell::Cell<u64>,
}

impl Lane {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Self, Failed> {
        Self::with_capacity(device, QueueDesc::default().capacity)
    }

    pub(crate) fn with_capacity(device: &Arc<dyn Device>, capacity: usize) -> Result<Self, Failed> {
        Ok(Self {
            queue: device.create_queue(&QueueDesc { capacity })?,
            semaphore: device.create_semaphore(0)?,
            submitted: std::cell::Cell::new(0),
        })
    }

    /// Submits; the point is reached when the operations are done.
    pub(crate) fn submit(
        &self,
        waits: &[SemaphorePoint],
        ops: &[Op<'_>],
    ) -> Result<(SubmissionId, SemaphorePoint), SubmitError> {
        let point = SemaphorePoint::new(&self.semaphore, self.submitted.get() + 1);
        let id = self.queue.submit(&Submission { waits, ops, signals: std::slice::from_ref(&point) })?;
        self.submitted.set(point.value);
        Ok((id, point))
    }

    /// Submits what nobody is in a hurry to hear of.
    pub(crate) fn submit_late(&self, ops: &[Op<'_>]) -> Result<SemaphorePoint, SubmitError> {
        let point = SemaphorePoint::new(&self.semaphore, self.submitted.get() + 1);
        let submission = Submission { waits: &[], ops, signals: std::slice::from_ref(&point) };
        self.queue.submit_late(&submission)?;
        self.submitted.set(point.value);
        Ok(point)
    }

    /// Submits and waits.
    pub(crate) fn run(&self, ops: &[Op<'_>]) -> Result<(), Failed> {
        let (_, point) = self.submit(&[], ops)?;
        Ok(point.wait(PATIENCE)?)
    }
}

/// A point that nothing reaches until the case signals it.
pub(crate) fn gate(device: &Arc<dyn Device>) -> Result<SemaphorePoint, Failed> {
    Ok(SemaphorePoint::new(&device.create_semaphore(0)?, 1))
}

/// Bytes that differ from their neighbours and from those of another seed.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    let byte = |index: usize| (index.wrapping_mul(31) ^ (index >> 8)).to_le_bytes()[0] ^ seed;
    (0..len).map(byte).collect()
}

/// Why a call was refused, as it had to be.
pub(crate) fn refusal<T, E>(result: Result<T, E>) -> Result<E, Failed> {
    result.err().ok_or_else(|| "it was accepted".into())
}

/// Features of which at least one is missing, for cases about their absence.
pub(crate) fn missing(device: &Arc<dyn Device>) -> Features {
    Features::all() - device.features()
}

/// An allocation of the device, by itself.
pub(crate) fn allocate(device: &Arc<dyn Device>, desc: BufferDesc) -> Result<Arc<dyn Buffer>, Failed> {
    Ok(device.allocate(&desc)?)
}
