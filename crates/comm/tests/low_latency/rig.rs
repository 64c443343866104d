//! Ranks, each with a device of a driver that is made of host threads.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use warpweft_bootstrap::{Group, JoinConfig, Meeting, Rank, Rendezvous};
use warpweft_comm::{CommConfig, Communicator, EngineKind};
use warpweft_core_types::{
    Backend as _, BufferDesc, BufferView, CodeFormat, DType, Device, Features, ForeignCode, GraphNode,
    KernelCode, KernelContract, Param, PreparedGraph, Queue, QueueDesc, ReduceOp,
};
use warpweft_cuda::{CudaBackend, CudaConfig};
use warpweft_stand_in_cuda::StandIn;

/// Only a hang takes as long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Place {
    pub(crate) comm: Communicator,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) queue: Arc<dyn Queue>,
}

pub(crate) fn config() -> CommConfig {
    CommConfig { engine: Some(EngineKind::LowLatency), ..CommConfig::default() }
}

/// A kernel that stays and counts, which the stand-in has by its name, in code that was not loaded before.
#[expect(unsafe_code, reason = "asserts what foreign code does")]
pub(crate) fn counter() -> KernelCode {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Relaxed: nothing but the number is shared.
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let text = format!(
        "// {number}\n.version 8.0\n.target sm_70\n.address_size 64\n\
         .visible .entry counter(.param .align 8 .b8 s[56], .param .u64 a)\n{{ ret; }}\n"
    );
    let code = ForeignCode::Source { format: CodeFormat::Ptx, text };
    let contract = KernelContract::new("counter", [Param::read_write(4)]).resident();
    // SAFETY: the stand-in runs a function of its own for this entry, which looks every access up.
    unsafe { KernelCode::new().with_foreign([contract], code) }
}

/// Devices that a driver of its own has.
pub(crate) fn gpus(count: u32) -> (StandIn, CudaBackend) {
    let driver = StandIn::load().unwrap().with("devices", &count.to_string());
    let config = CudaConfig::default().with_driver(driver.path()).without_cache();
    let backend = CudaBackend::with_config(&config).unwrap();
    (driver, backend)
}

impl Place {
    pub(crate) fn new(group: Group, device: Arc<dyn Device>, config: &CommConfig) -> Self {
        let comm = Communicator::create(group, &device, config, PATIENCE).unwrap();
        let queue = device.create_queue(&QueueDesc::default()).unwrap();
        Self { comm, device, queue }
    }

    pub(crate) fn rank(&self) -> u32 {
        self.comm.rank()
    }

    /// Memory that the host sees, with these numbers.
    pub(crate) fn numbers(&self, numbers: &[u32]) -> BufferView {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let view =
            BufferView::whole(self.device.allocate(&BufferDesc::host_visible(bytes.len() as u64)).unwrap());
        view.write(&bytes).unwrap();
        view
    }

    /// A graph with a sum in place.
    pub(crate) fn graph_of_a_sum(&self, view: &BufferView) -> PreparedGraph {
        let call = self.comm.all_reduce_in_place(ReduceOp::Sum, DType::U32, view).unwrap();
        let nodes: Vec<_> = call.nodes().unwrap().into_iter().map(|node| GraphNode::new(node, &[])).collect();
        PreparedGraph::new(self.device.as_ref(), &nodes).unwrap()
    }
}

pub(crate) fn read(view: &BufferView) -> Vec<u32> {
    let mut bytes = vec![0; usize::try_from(view.size()).unwrap()];
    view.read(&mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// Runs every rank in a thread, and gives what each made of it.
pub(crate) fn ranks<T: Send>(count: u32, config: &CommConfig, body: impl Fn(Place) -> T + Sync) -> Vec<T> {
    let (_driver, backend) = gpus(count);
    let meeting = Meeting::new();
    thread::scope(|scope| {
        let (body, backend) = (&body, &backend);
        let start = |rank| {
            let meeting = Rendezvous::Meeting(Arc::clone(&meeting));
            scope.spawn(move || {
                let group = Group::join(meeting, JoinConfig::new(Rank(rank), count), PATIENCE).unwrap();
                body(Place::new(group, backend.open(rank, Features::empty()).unwrap(), config))
            })
        };
        let threads: Vec<_> = (0..count).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
