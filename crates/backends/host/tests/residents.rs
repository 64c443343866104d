//! Which kernels are queued and which are resident.

use warpweft_core_types::{
    Backend, Device, Features, HostFunction, Kernel, KernelCode, KernelContract, Launch, Op, Progress,
    QueueDesc, ResidentDesc, ResidentError, Submission, SubmitError,
};
use warpweft_host::HostBackend;

use std::sync::Arc;

fn kernel(device: &dyn Device, contract: KernelContract) -> Arc<dyn Kernel> {
    let name = contract.name.clone();
    let code = KernelCode::new().with_function(contract, HostFunction::resident(|_| Progress::Finished));
    device.load(&code).unwrap().kernel(&name).unwrap()
}

#[test]
fn a_kernel_that_runs_in_slices_is_not_queued() {
    let device = HostBackend::with_devices(1).unwrap().open(0, Features::empty()).unwrap();
    let kernel = kernel(device.as_ref(), KernelContract::new("serve", []).resident());
    let ops = [Op::Launch(Launch::new(&kernel, [1, 1, 1], &[]).unwrap())];
    let queue = device.create_queue(&QueueDesc::default()).unwrap();
    let error = queue.submit(&Submission { waits: &[], ops: &ops, signals: &[] }).unwrap_err();
    assert!(matches!(error, SubmitError::Sliced { kernel } if kernel == "serve"));
}

#[test]
fn a_kernel_that_does_not_say_so_is_not_resident() {
    let device = HostBackend::with_devices(1).unwrap().open(0, Features::empty()).unwrap();
    let kernel = kernel(device.as_ref(), KernelContract::new("once", []));
    let desc = ResidentDesc::new(Launch::new(&kernel, [1, 1, 1], &[]).unwrap());
    let error = device.residents().unwrap().launch(&desc).unwrap_err();
    assert!(matches!(error, ResidentError::NotSliced { kernel } if kernel == "once"));
}
