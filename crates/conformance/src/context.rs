//! What a case works with: open devices, and short words for common steps.

use std::{sync::Arc, time::Duration};

use libtest_mimic::Failed;
use warpweft_core_types::{
    Backend, Buffer, BufferDesc, BufferView, CopyRegion, Device, DeviceInfo, Features, Kernel, KernelCode,
    Op, OpenError, Queue, QueueDesc, Semaphore, SemaphorePoint, Submission, SubmissionId, SubmitError,
};

use crate::harness::Case;

/// Far longer than anything takes on a busy machine; only a hang reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Long enough for something that must not happen to happen.
pub(crate) const MOMENT: Duration = Duration::from_millis(20);

/// The devices of one run.
pub(crate) struct Context {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) infos: Vec<DeviceInfo>,
    devices: Vec<Arc<dyn Device>>,
}

impl Context {
    /// Opens the first devices; says what the case needs that they lack. A device that is there and cannot be
    /// opened is a failure.
    pub(crate) fn open(backend: Arc<dyn Backend>, case: &Case) -> Result<Result<Self, String>, Failed> {
        let infos = backend.devices()?;
        if infos.len() < case.devices as usize {
            return Ok(Err(format!("needs {} devices, there are {}", case.devices, infos.len())));
        }
        let mut devices = Vec::new();
        for ordinal in 0..case.devices {
            match backend.open(ordinal, case.needs) {
                Ok(device) => devices.push(device),
                Err(error @ OpenError::Unsupported { .. }) => return Ok(Err(error.to_string())),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Ok(Self { backend, infos, devices }))
    }

    /// The device with this position in the run.
    pub(crate) fn device(&self, position: usize) -> &Arc<dyn Device> {
        &self.devices[position]
    }

    pub(crate) fn devices(&self) -> &[Arc<dyn Device>] {
        &self.devices
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
