//! Host devices: launches beside a plain call, copies beside memcpy, transfer beside the queue it uses.
//!
//! Run: `cargo bench -p warpweft-benches --bench host`

use std::time::Duration;

use warpweft::{
    BufferDesc, BufferView, CopyRegion, Features, HostFunction, KernelCode, KernelContract, Launch, Op,
    Queue, QueueDesc, Runtime, Semaphore, SemaphorePoint, Submission, host::HostBackend,
};
use warpweft_benches::beside_floor;

const TIMEOUT: Duration = Duration::from_secs(30);

fn main() -> anyhow::Result<()> {
    launches()?;
    for shift in [16, 20, 22, 24, 26, 28] {
        copies(1 << shift)?;
    }
    transfers()
}

/// A queue whose submissions raise one semaphore by one each.
struct Lane<'a> {
    queue: &'a dyn Queue,
    semaphore: &'a std::sync::Arc<dyn Semaphore>,
    value: u64,
}

impl Lane<'_> {
    fn run(&mut self, ops: &[Op<'_>]) -> anyhow::Result<()> {
        self.value += 1;
        let point = SemaphorePoint::new(self.semaphore, self.value);
        self.queue.submit(&Submission { waits: &[], ops, signals: std::slice::from_ref(&point) })?;
        Ok(point.wait(TIMEOUT)?)
    }
}

fn launches() -> anyhow::Result<()> {
    let device = HostBackend::with_devices(1)?.open_device()?;
    let code =
        KernelCode::new().with_function(KernelContract::new("empty", []).brief(), HostFunction::new(|_| {}));
    let kernel = device.load(&code)?.kernel("empty")?;
    let (queue, semaphore) = (device.create_queue(&QueueDesc::default())?, device.create_semaphore(0)?);
    let mut lane = Lane { queue: queue.as_ref(), semaphore: &semaphore, value: 0 };
    let ops = [Op::Launch(Launch::new(&kernel, [1; 3], &[])?)];
    // Nothing that crosses to a device can be cheaper than calling its kernel here.
    let mut call = || {
        std::hint::black_box(|| ())();
        Ok(())
    };
    beside_floor("launch/empty+wait", 20_000, &mut || lane.run(&ops), &mut call)
}

fn copies(size: usize) -> anyhow::Result<()> {
    let device = HostBackend::with_devices(1)?.open_device()?;
    let view =
        || Ok::<_, anyhow::Error>(BufferView::whole(device.allocate(&BufferDesc::device(size as u64))?));
    let (src, dst) = (view()?, view()?);
    let (queue, semaphore) = (device.create_queue(&QueueDesc::default())?, device.create_semaphore(0)?);
    let mut lane = Lane { queue: queue.as_ref(), semaphore: &semaphore, value: 0 };
    lane.run(&[Op::Fill(warpweft::FillRegion::bytes(&src, 1))])?;
    let ops = [Op::Copy(CopyRegion::new(&src, &dst)?)];
    let (from, mut to) = (vec![1_u8; size], vec![0; size]);
    let mut memcpy = || {
        std::hint::black_box(&mut to).copy_from_slice(std::hint::black_box(&from));
        Ok(())
    };
    let rounds = u32::try_from((1 << 31) / size)?.clamp(21, 2000);
    beside_floor(&format!("copy/{size}"), rounds, &mut || lane.run(&ops), &mut memcpy)
}

/// What choosing a route and a lane costs above one's own queue.
fn transfers() -> anyhow::Result<()> {
    let runtime =
        Runtime::builder().backend(HostBackend::with_devices(2)?).require(Features::PEER_ACCESS).build()?;
    let [first, second] = runtime.devices() else { anyhow::bail!("two were asked for") };
    for size in [4096, 1 << 20, 16 << 20] {
        let (src, dst) = (
            BufferView::whole(first.allocate(&BufferDesc::device(size))?),
            BufferView::whole(second.allocate(&BufferDesc::device(size))?),
        );
        let (queue, semaphore) = (first.create_queue(&QueueDesc::default())?, first.create_semaphore(0)?);
        let mut lane = Lane { queue: queue.as_ref(), semaphore: &semaphore, value: 0 };
        let ops = [Op::Copy(CopyRegion::new(&src, &dst)?)];
        let mut ours = || Ok(runtime.transfer().copy(&src, &dst)?.wait(TIMEOUT)?);
        let rounds = u32::try_from((1 << 31) / size)?.clamp(21, 2000);
        beside_floor(&format!("transfer/{size}"), rounds, &mut ours, &mut || lane.run(&ops))?;
    }
    Ok(())
}

/// Opening the only device of a backend.
trait OpenDevice {
    fn open_device(&self) -> anyhow::Result<std::sync::Arc<dyn warpweft::Device>>;
}

impl OpenDevice for HostBackend {
    fn open_device(&self) -> anyhow::Result<std::sync::Arc<dyn warpweft::Device>> {
        Ok(warpweft::Backend::open(self, 0, Features::empty())?)
    }
}
