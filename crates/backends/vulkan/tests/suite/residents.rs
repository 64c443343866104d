//! What goes on beside a resident that does not return.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use warpweft_core_types::{
    Arg, Backend as _, BufferDesc, BufferView, Deadline, Device, Features, FillRegion, GraphNode,
    KernelContract, Launch, Op, Param, PreparedGraph, QueueDesc, Resident, ResidentDesc, ResidentError,
    SemaphorePoint, Submission,
};
use warpweft_vulkan::VulkanConfig;

use crate::support::{Need, PATIENCE, Test, Verdict, kernel, open, open_backend};

pub(crate) const TESTS: &[Test] = &[
    Test { name: "residents::letting_go_waits_for_none", body: letting_go_waits_for_none },
    Test { name: "residents::calls_do_not_wait_for_one", body: calls_do_not_wait_for_one },
    Test { name: "residents::a_clock_keeps_its_deadline", body: a_clock_keeps_its_deadline },
    Test { name: "residents::copies_of_a_device_share_a_budget", body: copies_of_a_device_share_a_budget },
];

/// It ends by itself after a while, so that a test that fails does not hang.
const STUBBORN: &str = "
@group(0) @binding(0) var<storage, read_write> release: atomic<u32>;
@compute @workgroup_size(1) fn stubborn() {
    _ = ww_begin(0u);
    for (var looks = 0u; looks < 2000000000u; looks++) {
        if atomicLoad(&release) != 0u { break; }
    }
    ww_end(0u, WW_BUSY);
}";

const NONE: &str = "@compute @workgroup_size(1) fn none() {}";

/// Far below the time that a stubborn resident takes.
const SOON: Duration = Duration::from_millis(200);

fn start(device: &Arc<dyn Device>, release: &BufferView) -> Result<Arc<dyn Resident>, Need> {
    let contract = KernelContract::new("stubborn", [Param::read_write(4).aligned(4)]).resident();
    let kernel = kernel(device, &contract, STUBBORN)?;
    let args = [Arg::Buffer(release)];
    let desc = ResidentDesc::new(Launch::new(&kernel, [1; 3], &args)?);
    Ok(device.residents().ok_or("the family is there")?.launch(&desc)?)
}

/// Dropping code, and a device with all that was made of it, is no wait for what runs.
fn letting_go_waits_for_none() -> Verdict {
    let (backend, device) = open(&VulkanConfig::default())?;
    let unused = kernel(&device, &KernelContract::new("none", []), NONE)?;
    let release = BufferView::whole(device.allocate(&BufferDesc::host_visible(4))?);
    let resident = start(&device, &release)?;
    let began = Instant::now();
    drop(unused);
    assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
    drop((resident, device, backend));
    assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
    Ok(release.write(&1_u32.to_le_bytes())?)
}

/// What gives no deadline does not wait for what runs, and what gives one keeps it.
fn calls_do_not_wait_for_one() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let none = kernel(&device, &KernelContract::new("none", []), NONE)?;
    let release = BufferView::whole(device.allocate(&BufferDesc::host_visible(4))?);
    let resident = start(&device, &release)?;
    let began = Instant::now();
    let queue = device.create_queue(&QueueDesc::default())?;
    let view = BufferView::whole(device.allocate(&BufferDesc::device(1 << 20))?);
    device.memory()?;
    let fill = Op::Fill(FillRegion::bytes(&view, 1));
    let launch = Op::Launch(Launch::new(&none, [1; 3], &[])?);
    let nodes = [GraphNode::new(&fill, &[]), GraphNode::new(&launch, &[0])];
    let graph = PreparedGraph::new(device.as_ref(), &nodes)?;
    let done = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
    let ops = [fill, launch, Op::Replay(&graph)];
    queue.submit(&Submission { ops: &ops, signals: std::slice::from_ref(&done), ..Submission::default() })?;
    let _reached = (done.semaphore.value(), done.poll()?, done.wait(SOON / 4));
    let parked = resident.park(Deadline::within(SOON / 4));
    assert!(matches!(parked, Err(ResidentError::Unparkable { .. })), "{parked:?}");
    drop((view, graph, queue));
    assert!(began.elapsed() < 2 * SOON, "it took {:?}", began.elapsed());
    release.write(&1_u32.to_le_bytes())?;
    done.wait(PATIENCE)?;
    Ok(resident.stop(Deadline::within(PATIENCE))?)
}

fn a_clock_keeps_its_deadline() -> Verdict {
    let (_backend, device) = open(&VulkanConfig::default())?;
    let clock = device.clock().ok_or_else(|| Need::Missing(Features::TIMESTAMPS.to_string()))?;
    let release = BufferView::whole(device.allocate(&BufferDesc::host_visible(4))?);
    let resident = start(&device, &release)?;
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let began = Instant::now();
                    // Where the driver answers by itself, it is no matter what runs.
                    let _answer = clock.sample(Deadline::within(SOON / 2));
                    began.elapsed()
                })
            })
            .collect();
        for thread in asked {
            let took = thread.join().map_err(|_| "the thread panicked")?;
            assert!(took < 2 * SOON, "it took {took:?}");
        }
        Ok::<_, Need>(())
    })?;
    release.write(&1_u32.to_le_bytes())?;
    clock.sample(Deadline::within(PATIENCE))?;
    Ok(resident.stop(Deadline::within(PATIENCE))?)
}

fn copies_of_a_device_share_a_budget() -> Verdict {
    let backend = open_backend(&VulkanConfig::default().with_copies(2))?;
    let count = u32::try_from(backend.devices()?.len())?;
    let [one, other] = [0, count / 2].map(|ordinal| backend.open(ordinal, Features::empty()));
    let (one, other) = (one?, other?);
    let release = BufferView::whole(one.allocate(&BufferDesc::host_visible(4))?);
    let resident = start(&one, &release)?;
    let budget = other.residents().ok_or("the family is there")?.budget();
    assert_eq!(budget.used, 1);
    let (kernel, own) = {
        let contract = KernelContract::new("stubborn", [Param::read_write(4).aligned(4)]).resident();
        (
            kernel(&other, &contract, STUBBORN)?,
            BufferView::whole(other.allocate(&BufferDesc::host_visible(4))?),
        )
    };
    let args = [Arg::Buffer(&own)];
    let desc = ResidentDesc::new(Launch::new(&kernel, [budget.total, 1, 1], &args)?);
    let refused = other.residents().ok_or("the family is there")?.launch(&desc).err();
    assert!(matches!(refused, Some(ResidentError::OverBudget { .. })), "{refused:?}");
    release.write(&1_u32.to_le_bytes())?;
    Ok(resident.stop(Deadline::within(PATIENCE))?)
}
