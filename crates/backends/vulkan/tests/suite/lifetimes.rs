//! Devices that come and go, with what is left of them.

use std::sync::Arc;

use warpweft_core_types::{
    Arg, Backend as _, BufferDesc, BufferView, CopyRegion, Device, Features, FillRegion, KernelContract, Op,
    Param, QueueDesc, Submission, SubmitError,
};
use warpweft_vulkan::VulkanConfig;

use crate::support::{Test, Verdict, kernel, launch, open, open_backend, run, words};

pub(crate) const TESTS: &[Test] = &[
    Test { name: "lifetimes::a_buffer_keeps_its_device", body: a_buffer_keeps_its_device },
    Test { name: "lifetimes::a_kernel_keeps_its_device", body: a_kernel_keeps_its_device },
    Test {
        name: "lifetimes::memory_of_another_backend_is_refused",
        body: memory_of_another_backend_is_refused,
    },
    Test { name: "lifetimes::devices_come_and_go_with_work", body: devices_come_and_go_with_work },
];

const ONE: &str = "
@group(0) @binding(0) var<storage, read_write> to: array<u32>;
@compute @workgroup_size(1) fn one() { to[0] = 1u; }";

fn one() -> KernelContract {
    KernelContract::new("one", [Param::write(4).aligned(4)])
}

fn a_buffer_keeps_its_device() -> Verdict {
    let (backend, device) = open(&VulkanConfig::default())?;
    let view = BufferView::whole(device.allocate(&BufferDesc::host_visible(64))?);
    drop(device);
    let again = backend.open(0, Features::empty())?;
    run(&again, Op::Fill(FillRegion::bytes(&view, 3)))?;
    assert_eq!(words(&view)?, [0x0303_0303; 16]);
    Ok(())
}

fn a_kernel_keeps_its_device() -> Verdict {
    let (backend, device) = open(&VulkanConfig::default())?;
    let kernel = kernel(&device, &one(), ONE)?;
    drop(device);
    let again = backend.open(0, Features::empty())?;
    let view = BufferView::whole(again.allocate(&BufferDesc::host_visible(4))?);
    launch(&again, &kernel, &[Arg::Buffer(&view)])?;
    assert_eq!(words(&view)?, [1]);
    Ok(())
}

/// Its devices have the same ids, and nothing else in common.
fn memory_of_another_backend_is_refused() -> Verdict {
    let config = VulkanConfig::default().with_copies(2);
    let (backend, other) = (open_backend(&config)?, open_backend(&config)?);
    let device = backend.open(0, Features::empty())?;
    let own = BufferView::whole(device.allocate(&BufferDesc::device(64))?);
    let queue = device.create_queue(&QueueDesc::default())?;
    for ordinal in (0..).take(other.devices()?.len()) {
        let stranger: Arc<dyn Device> = other.open(ordinal, Features::empty())?;
        let strange = BufferView::whole(stranger.allocate(&BufferDesc::device(64))?);
        let ops = [Op::Copy(CopyRegion::new(&strange, &own)?)];
        let refused = queue.submit(&Submission { ops: &ops, ..Submission::default() }).err();
        let named = matches!(refused, Some(SubmitError::Foreign { what: "buffer", .. }));
        assert!(named, "device {ordinal}: {refused:?}");
    }
    Ok(())
}

/// Everything is let go of while work is under way: the device is open for as long as that needs it, and no longer.
fn devices_come_and_go_with_work() -> Verdict {
    let backend = open_backend(&VulkanConfig::default())?;
    for _ in 0..20 {
        let device = backend.open(0, Features::empty())?;
        let kernel = kernel(&device, &one(), ONE)?;
        let view = BufferView::whole(device.allocate(&BufferDesc::host_visible(1 << 20))?);
        let queue = device.create_queue(&QueueDesc::default())?;
        let args = [Arg::Buffer(&view)];
        for _ in 0..10 {
            let launch = warpweft_core_types::Launch::new(&kernel, [1; 3], &args)?;
            let ops = [Op::Fill(FillRegion::bytes(&view, 9)), Op::Launch(launch)];
            queue.submit(&Submission { ops: &ops, ..Submission::default() })?;
        }
    }
    Ok(())
}
