//! Ranks in threads, each with a host device.

use std::{sync::Arc, thread, time::Duration};

use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous};
use warpweft_comm::{CommConfig, CommError, Communicator, EngineKind};
use warpweft_core_types::{
    Backend, BufferDesc, BufferView, Deadline, Device, ErrorClass, Features, Queue, QueueDesc,
};
use warpweft_host::HostBackend;

/// Only a hang takes as long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// One rank of a test.
pub(crate) struct Place {
    pub(crate) comm: Communicator,
    pub(crate) device: Arc<dyn Device>,
}

impl Place {
    pub(crate) fn rank(&self) -> u32 {
        self.comm.rank()
    }

    pub(crate) fn queue(&self) -> Arc<dyn Queue> {
        self.device.create_queue(&QueueDesc::default()).unwrap()
    }

    /// Host-visible memory with these bytes.
    pub(crate) fn bytes(&self, bytes: &[u8]) -> BufferView {
        let buffer = self.device.allocate(&BufferDesc::host_visible(bytes.len() as u64)).unwrap();
        let view = BufferView::whole(buffer);
        view.write(bytes).unwrap();
        view
    }

    /// Host-visible memory with these numbers.
    pub(crate) fn numbers(&self, numbers: &[u32]) -> BufferView {
        self.bytes(&numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>())
    }
}

pub(crate) fn read(view: &BufferView) -> Vec<u32> {
    let mut bytes = vec![0; usize::try_from(view.size()).unwrap()];
    view.read(&mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

pub(crate) fn only(engine: EngineKind) -> CommConfig {
    CommConfig { engine: Some(engine), ..CommConfig::default() }
}

/// Runs every rank in a thread, and gives what each made of it.
pub(crate) fn ranks<T: Send>(size: u32, config: &CommConfig, body: impl Fn(Place) -> T + Sync) -> Vec<T> {
    ranks_on(&HostBackend::with_devices(size).unwrap(), size, config, body)
}

/// The same on devices that are as a test wants them.
pub(crate) fn ranks_on<T: Send>(
    backend: &dyn Backend,
    size: u32,
    config: &CommConfig,
    body: impl Fn(Place) -> T + Sync,
) -> Vec<T> {
    let meeting = Meeting::new();
    thread::scope(|scope| {
        let body = &body;
        let start = |rank| {
            let meeting = Arc::clone(&meeting);
            scope.spawn(move || {
                let group = join(meeting, rank, size);
                let device = backend.open(rank, Features::empty()).unwrap();
                let comm = Communicator::create(group, &device, config, PATIENCE).unwrap();
                body(Place { comm, device })
            })
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(crate) fn join(meeting: Arc<Meeting>, rank: u32, size: u32) -> Group {
    Group::join(Rendezvous::Meeting(meeting), JoinConfig::new(Rank(rank), size), PATIENCE).unwrap()
}

/// Waits until the communicator has failed.
pub(crate) fn until_failed(comm: &Communicator) {
    let deadline = Deadline::within(PATIENCE);
    while comm.failure().is_none() {
        assert!(!deadline.is_past(), "it does not fail");
        thread::yield_now();
    }
}

/// The failure's class and text.
pub(crate) fn told<T: std::fmt::Debug>(result: Result<T, CommError>) -> (ErrorClass, String) {
    let error = result.unwrap_err();
    (error.class(), error.to_string())
}

/// Engines that serve host devices in one process.
pub(crate) const ENGINES: [EngineKind; 2] = [EngineKind::Host, EngineKind::Planned];
