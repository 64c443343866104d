//! Systems of host devices, and actors that many tests use.

use std::{sync::Arc, time::Duration};

use warpweft_core_types::{Backend, Deadline, Device, DeviceId, Features};
use warpweft_host::{HostBackend, HostBuilder, HostDeviceConfig};
use warpweft_k2k_router::{ActorCode, ActorId, ActorRef, ActorSpec, Layout, Placement, System, SystemConfig};

/// Far longer than anything takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) const NO_STATE: Layout = Layout { id: 0, size: 0 };
pub(crate) const COUNT: Layout = Layout { id: 1, size: 8 };

pub(crate) fn within() -> Deadline {
    Deadline::within(PATIENCE)
}

pub(crate) struct Rig {
    pub(crate) system: System,
    pub(crate) devices: Vec<DeviceId>,
}

impl Rig {
    pub(crate) fn new(count: u32) -> Self {
        Self::with(count, &SystemConfig::default())
    }

    pub(crate) fn with(count: u32, config: &SystemConfig) -> Self {
        let device = HostDeviceConfig { workers: config.executors_per_device, ..HostDeviceConfig::default() };
        let builder = HostBackend::builder().devices(count, &device);
        Self::linked(
            builder.link_all_devices(Default::default()).link_all_to_host(Default::default()),
            config,
        )
    }

    pub(crate) fn linked(builder: HostBuilder, config: &SystemConfig) -> Self {
        Self::of_devices(open(&builder.build().unwrap()), config)
    }

    pub(crate) fn of_devices(devices: Vec<Arc<dyn Device>>, config: &SystemConfig) -> Self {
        let ids = devices.iter().map(|device| device.info().id).collect();
        Self { system: System::start(devices, config).unwrap(), devices: ids }
    }

    pub(crate) fn spawn(&self, device: usize, spec: &ActorSpec) -> ActorRef {
        self.system.spawn(spec, Placement::Device(self.devices[device])).unwrap()
    }
}

pub(crate) fn open(backend: &dyn Backend) -> Vec<Arc<dyn Device>> {
    let infos = backend.devices().unwrap();
    infos.iter().map(|info| backend.open(info.id.ordinal, Features::empty()).unwrap()).collect()
}

/// Answers with its payload backwards.
pub(crate) fn echo() -> ActorSpec {
    let code = ActorCode::host(NO_STATE, |cx, _, message| {
        let backwards: Vec<u8> = message.payload.iter().rev().copied().collect();
        cx.reply(&backwards);
    });
    ActorSpec::new("echo", code)
}

/// Counts messages; kind 1 asks for the count.
pub(crate) fn counter() -> ActorSpec {
    let code = ActorCode::host(COUNT, |cx, state, message| {
        let count = u64::from_le_bytes(state.try_into().unwrap());
        if message.header.kind == 1 {
            cx.reply(&count.to_le_bytes());
        } else {
            state.copy_from_slice(&(count + 1).to_le_bytes());
        }
    });
    ActorSpec::new("counter", code)
}

/// Sends what it gets to another actor.
pub(crate) fn forward_to(to: ActorId) -> ActorSpec {
    let code =
        ActorCode::host(NO_STATE, move |cx, _, message| cx.send(to, message.header.kind, &message.payload));
    ActorSpec::new("forward", code)
}

pub(crate) fn count_of(actor: &ActorRef) -> u64 {
    let answer = actor.call(1, &[], within()).unwrap();
    u64::from_le_bytes(answer.payload.try_into().unwrap())
}

/// Waits until it is so; what never is reaches the limit.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = within();
    while !done() {
        assert!(!deadline.is_past(), "{what} did not come to be");
        std::thread::yield_now();
    }
}
