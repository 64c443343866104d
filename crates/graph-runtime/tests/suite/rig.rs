//! Devices, kernels and words that the tests share.

use std::{
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use warpweft_core_types::{
    Arg, Backend as _, BufferView, Device, Features, HostFunction, Kernel, KernelCode, KernelContract,
    Launch, Param, Workgroup,
};
use warpweft_graph_runtime::{HostTask, MemoryPlacement, NodeDesc, Runtime, RuntimeConfig};
use warpweft_host::HostBackend;

/// Far longer than anything takes on a busy machine; only a hang reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Any error, for `?`.
pub(crate) type Outcome = Result<(), Box<dyn std::error::Error>>;

pub(crate) struct Rig {
    pub(crate) devices: Vec<Arc<dyn Device>>,
    pub(crate) runtime: Runtime,
    kernels: Vec<Kernels>,
}

struct Kernels {
    add: Arc<dyn Kernel>,
    fail: Arc<dyn Kernel>,
    copy: Arc<dyn Kernel>,
}

impl Rig {
    pub(crate) fn new(devices: u32) -> Self {
        Self::with(devices, RuntimeConfig::default())
    }

    pub(crate) fn with(devices: u32, config: RuntimeConfig) -> Self {
        let backend = HostBackend::with_devices(devices).expect("host devices can always be made");
        let open = |ordinal| backend.open(ordinal, Features::empty()).expect("the device was configured");
        Self::of((0..devices).map(open).collect(), config)
    }

    pub(crate) fn of(devices: Vec<Arc<dyn Device>>, config: RuntimeConfig) -> Self {
        let runtime = Runtime::new(devices.iter().cloned(), config).expect("the configuration is valid");
        let kernels = devices.iter().map(|device| Kernels::load(device.as_ref())).collect();
        Self { devices, runtime, kernels }
    }

    /// Memory of a device that the host reaches too.
    pub(crate) fn memory(&self, device: usize, size: u64) -> BufferView {
        let placement = MemoryPlacement::HostVisible(self.devices[device].info().id);
        self.runtime.allocate(&placement, size).expect("there is memory").view().clone()
    }

    /// What a view holds, once everything that writes it has ended.
    pub(crate) fn words(&self, view: &BufferView) -> Vec<u32> {
        let guard = self.runtime.read(view, PATIENCE).expect("the bytes can be had");
        let bytes = guard.to_vec().expect("they are there");
        bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    /// Adds a number to every word of a view.
    pub(crate) fn add<R>(&self, view: &BufferView, number: u32, take: impl FnOnce(NodeDesc<'_>) -> R) -> R {
        let kernel = &self.of_view(view).add;
        let number = number.to_le_bytes();
        let args = [Arg::Buffer(view), Arg::Scalar(&number)];
        take(NodeDesc::launch(Launch::new(kernel, [1, 1, 1], &args).expect("the arguments fit")))
    }

    /// Copies words by a kernel.
    pub(crate) fn copy<R>(
        &self,
        from: &BufferView,
        to: &BufferView,
        take: impl FnOnce(NodeDesc<'_>) -> R,
    ) -> R {
        let args = [Arg::Buffer(from), Arg::Buffer(to)];
        let launch = Launch::new(&self.of_view(to).copy, [1, 1, 1], &args).expect("the arguments fit");
        take(NodeDesc::launch(launch))
    }

    /// Panics, with a view that it was to write.
    pub(crate) fn fail<R>(&self, view: &BufferView, take: impl FnOnce(NodeDesc<'_>) -> R) -> R {
        let args = [Arg::Buffer(view)];
        let launch = Launch::new(&self.of_view(view).fail, [1, 1, 1], &args).expect("the arguments fit");
        take(NodeDesc::launch(launch))
    }

    fn of_view(&self, view: &BufferView) -> &Kernels {
        let position = self.devices.iter().position(|device| device.info().id == view.device());
        &self.kernels[position.expect("the memory is of one of the devices")]
    }
}

impl Kernels {
    fn load(device: &dyn Device) -> Self {
        let add = KernelContract::new("add", [Param::read_write(4), Param::scalar::<u32>()]);
        let fail = KernelContract::new("fail", [Param::write(4)]);
        let copy = KernelContract::new("copy_words", [Param::read(4), Param::write(4)]);
        let code = KernelCode::new()
            .with_function(
                add,
                HostFunction::new(|workgroup| {
                    let (words, number) = (workgroup.slice::<u32>(0), workgroup.scalar::<u32>(1));
                    (0..words.len()).for_each(|at| words.set(at, words.get(at).wrapping_add(number)));
                }),
            )
            .with_function(fail, HostFunction::new(fails))
            .with_function(
                copy,
                HostFunction::new(|workgroup| {
                    let (from, to) = (workgroup.slice::<u32>(0), workgroup.slice::<u32>(1));
                    (0..to.len()).for_each(|at| to.set(at, from.get(at)));
                }),
            );
        let module = device.load(&code).expect("functions are taken");
        let kernel = |name| module.kernel(name).expect("it is there");
        Self { add: kernel("add"), fail: kernel("fail"), copy: kernel("copy_words") }
    }
}

/// Something that tasks wait for, until a test lets them go on.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gate(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    open: Mutex<bool>,
    changed: Condvar,
    entered: AtomicBool,
}

impl Gate {
    /// A task that says that it has begun, and ends when the gate is open.
    pub(crate) fn task(&self) -> HostTask {
        let inner = Arc::clone(&self.0);
        HostTask::new(move |_| {
            inner.entered.store(true, Ordering::Release);
            inner.changed.notify_all();
            let open = inner.open.lock().expect("nobody panics with it");
            let waited = inner.changed.wait_timeout_while(open, PATIENCE, |open| !*open);
            assert!(!waited.expect("nobody panics with it").1.timed_out(), "nobody opened the gate");
        })
    }

    pub(crate) fn open(&self) {
        *self.0.open.lock().expect("nobody panics with it") = true;
        self.0.changed.notify_all();
    }

    /// Waits until the task has begun.
    pub(crate) fn wait_until_entered(&self) {
        let open = self.0.open.lock().expect("nobody panics with it");
        let step = Duration::from_millis(1);
        let mut waiting = open;
        while !self.0.entered.load(Ordering::Acquire) {
            waiting = self.0.changed.wait_timeout(waiting, step).expect("nobody panics with it").0;
        }
    }
}

#[expect(clippy::panic, reason = "what tests of failures want of a kernel")]
fn fails(_workgroup: &Workgroup<'_>) {
    panic!("as it was told");
}
