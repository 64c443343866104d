//! What links really do: timed and verified transfers over each of them.

use std::{
    cell::Cell,
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use warpweft_core_types::{
    Arg, Bandwidth, BufferDesc, BufferView, Bytes, CopyRegion, Device, DeviceUuid, Features, FillRegion,
    KernelCode, Launch, LinkEnd, Op, Queue, QueueDesc, Semaphore, SemaphorePoint, Submission,
};
use warpweft_topology::{Measurement, NodeId, Topology};

use crate::{TransferError, devices::Devices};

/// How links are measured.
#[derive(Debug, Clone)]
pub struct MeasureConfig {
    /// What the time of the smallest transfer is taken with.
    pub small: Bytes,
    /// What the bandwidth is taken with; several times the largest cache, to mean anything.
    pub large: Bytes,
    /// Rounds of each measurement, of which the median counts; at least 1.
    pub rounds: u32,
    /// Time for one round.
    pub timeout: Duration,
    /// A kernel that copies 32-bit words from its second argument to its first, as many as its third (a `u64`)
    /// says, for links that kernels use directly. Without it, or on devices that do not run it, only copies are
    /// timed.
    pub kernel: Option<KernelCode>,
}

impl Default for MeasureConfig {
    /// 64 bytes, 64 MiB, 9 rounds, 30 seconds, no kernel.
    fn default() -> Self {
        Self {
            small: Bytes(64),
            large: Bytes::mib(64),
            rounds: 9,
            timeout: Duration::from_secs(30),
            kernel: None,
        }
    }
}

/// What one direction of one link does.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MeasuredLink {
    /// Where bytes start.
    pub from: LinkEnd,
    /// Where they arrive.
    pub to: LinkEnd,
    /// From the submission of the smallest copy to its end, as the host sees it.
    pub latency: Duration,
    /// A large copy by a queue.
    pub bandwidth: Bandwidth,
    /// The same with the opposite direction busy as well; this direction's share.
    pub both_ways: Bandwidth,
    /// A large copy by a kernel at the writing end, where that was asked for and is possible.
    pub kernel: Option<Bandwidth>,
    /// Bytes that did not arrive as they were sent, by copies and by the kernel together.
    pub wrong_bytes: u64,
}

/// Measures every link that a queue of the devices uses directly: between devices, and with host memory.
///
/// Bytes are verified, so that a link that loses data is found whatever its driver says of it. Nothing else
/// should use the devices meanwhile.
///
/// # Errors
///
/// A [`TransferError`] if a device does not do its part. Wrong bytes are a result, not an error.
pub fn measure(
    devices: impl IntoIterator<Item = Arc<dyn Device>>,
    config: &MeasureConfig,
) -> Result<Vec<MeasuredLink>, TransferError> {
    if config.rounds == 0 || config.small.0 == 0 || config.large.0 == 0 {
        let reason = "links are measured with at least one round of at least one byte".to_owned();
        return Err(TransferError::InvalidConfig { reason });
    }
    let devices = Devices::new(devices.into_iter().collect())?;
    let probes = devices
        .iter()
        .filter(|device| device.features().contains(Features::HOST_VISIBLE_MEMORY))
        .map(|device| Probe::new(device, config))
        .collect::<Result<Vec<_>, _>>()?;
    let mut links = Vec::new();
    for probe in &probes {
        links.extend(with_host(probe)?);
    }
    for (position, a) in probes.iter().enumerate() {
        for b in &probes[position + 1..] {
            links.extend(between(&devices, a, b)?);
        }
    }
    Ok(links)
}

/// Writes measurements into a topology. An edge that delivered wrong bytes is vetoed; none is added.
pub fn apply(links: &[MeasuredLink], topology: &mut Topology) {
    for link in links {
        let (Some(from), Some(to)) = (node_of(topology, link.from), node_of(topology, link.to)) else {
            continue;
        };
        // A link that nobody reported has no edge, and a measurement does not make one.
        if topology.edge(from, to).is_none() {
            continue;
        }
        let measurement = Measurement { bandwidth: Some(link.bandwidth), latency: Some(link.latency) };
        let recorded = topology.measure(from, to, &measurement);
        let vetoed = match link.wrong_bytes {
            0 => Ok(()),
            wrong => topology.veto(from, to, format!("{wrong} bytes arrived wrong when it was measured")),
        };
        if let Err(error) = recorded.and(vetoed) {
            tracing::warn!(%error, "a measurement does not fit the topology");
        }
    }
}

fn node_of(topology: &Topology, end: LinkEnd) -> Option<NodeId> {
    match end {
        LinkEnd::Device(uuid) => topology.device(uuid),
        LinkEnd::Host { numa_node } => topology.host(numa_node),
    }
}

/// One device with everything that its measurements need.
struct Probe<'a> {
    device: &'a Arc<dyn Device>,
    config: &'a MeasureConfig,
    /// Two, so that both directions of a link can be under way at once.
    lanes: [Lane; 2],
    /// Device memory: what is sent, and where things arrive.
    source: BufferView,
    target: BufferView,
    /// Host memory of the device.
    window: BufferView,
    pattern: Vec<u8>,
}

/// A queue and a semaphore that rises with each submission.
#[derive(Debug)]
struct Lane {
    queue: Arc<dyn Queue>,
    semaphore: Arc<dyn Semaphore>,
    submitted: Cell<u64>,
}

impl Lane {
    fn new(device: &Arc<dyn Device>) -> Result<Self, TransferError> {
        Ok(Self {
            queue: device.create_queue(&QueueDesc::default())?,
            semaphore: device.create_semaphore(0)?,
            submitted: Cell::new(0),
        })
    }

    fn submit(&self, ops: &[Op<'_>]) -> Result<SemaphorePoint, TransferError> {
        self.submitted.set(self.submitted.get() + 1);
        let point = SemaphorePoint::new(&self.semaphore, self.submitted.get());
        self.queue.submit(&Submission { waits: &[], ops, signals: std::slice::from_ref(&point) })?;
        Ok(point)
    }
}

impl<'a> Probe<'a> {
    fn new(device: &'a Arc<dyn Device>, config: &'a MeasureConfig) -> Result<Self, TransferError> {
        let size = config.large.0.max(config.small.0);
        let memory = |desc| Ok::<_, TransferError>(BufferView::whole(device.allocate(&desc)?));
        let seed = usize::try_from(device.info().id.ordinal).unwrap_or(0) * 31;
        let byte = |index: usize| ((index ^ (index >> 8)) + seed).to_le_bytes()[0];
        let probe = Self {
            device,
            config,
            lanes: [Lane::new(device)?, Lane::new(device)?],
            source: memory(BufferDesc::device(size))?,
            target: memory(BufferDesc::device(size))?,
            window: memory(BufferDesc::host_visible(size))?,
            pattern: (0..usize::try_from(size).unwrap_or(usize::MAX)).map(byte).collect(),
        };
        probe.window.write(&probe.pattern)?;
        probe.copy(&probe.window, &probe.source)?;
        Ok(probe)
    }

    fn end(&self) -> LinkEnd {
        LinkEnd::Device(self.device.info().id.uuid)
    }

    fn host_end(&self) -> LinkEnd {
        LinkEnd::Host { numa_node: self.device.info().numa_node.unwrap_or(0) }
    }

    fn submit(&self, ops: &[Op<'_>]) -> Result<SemaphorePoint, TransferError> {
        self.lanes[0].submit(ops)
    }

    fn copy(&self, src: &BufferView, dst: &BufferView) -> Result<(), TransferError> {
        Ok(self.submit(&[Op::Copy(CopyRegion::new(src, dst)?)])?.wait(self.config.timeout)?)
    }

    /// Bytes at the beginning of the window that differ from what `sender` sent.
    fn wrong_in_window(&self, sender: &Self, size: Bytes) -> Result<u64, TransferError> {
        let mut arrived = vec![0; self.pattern.len()];
        self.window.read(&mut arrived)?;
        let compared = usize::try_from(size.0).unwrap_or(usize::MAX);
        let pairs = arrived.iter().zip(&sender.pattern).take(compared);
        Ok(pairs.filter(|(got, sent)| got != sent).count() as u64)
    }

    /// The kernel, if it was given and runs here.
    fn kernel(&self) -> Option<Arc<dyn warpweft_core_types::Kernel>> {
        let code = self.config.kernel.as_ref()?;
        let name = &code.contracts().first()?.name;
        self.device.load(code).ok()?.kernel(name).ok()
    }
}

/// Copies that follow each other while bandwidth is measured, so that the cost of starting one does not count.
const IN_FLIGHT: u32 = 4;

/// One direction: whose queue copies what to where.
#[derive(Clone, Copy)]
struct Direction<'p> {
    runner: &'p Probe<'p>,
    lane: usize,
    src: &'p BufferView,
    dst: &'p BufferView,
}

impl Direction<'_> {
    fn start(&self, size: Bytes, count: u32) -> Result<SemaphorePoint, TransferError> {
        let (src, dst) = (self.src.slice(0..size.0)?, self.dst.slice(0..size.0)?);
        let copy = CopyRegion::new(&src, &dst)?;
        let ops: Vec<Op<'_>> = (0..count).map(|_| Op::Copy(copy)).collect();
        self.runner.lanes[self.lane].submit(&ops)
    }

    fn latency(&self) -> Result<Duration, TransferError> {
        let config = self.runner.config;
        median(config.rounds * 10, || Ok(self.start(config.small, 1)?.wait(config.timeout)?))
    }

    fn bandwidth(&self) -> Result<Bandwidth, TransferError> {
        bandwidth(self.runner.config, &[*self])
    }

    /// The kernel copies words: [`MeasureConfig::by_kernel`] bytes.
    fn kernel_bandwidth(&self) -> Result<Option<Bandwidth>, TransferError> {
        let (config, Some(kernel)) = (self.runner.config, self.runner.kernel()) else { return Ok(None) };
        let (src, dst) = (self.src.slice(0..config.large.0)?, self.dst.slice(0..config.large.0)?);
        let words = (config.large.0 / 4).to_le_bytes();
        let args = [Arg::Buffer(&dst), Arg::Buffer(&src), Arg::Scalar(&words)];
        let Ok(launch) = Launch::new(&kernel, [self.runner.device.info().multiprocessors, 1, 1], &args)
        else {
            return Ok(None);
        };
        let ops = [Op::Launch(launch)];
        let time = median(config.rounds, || Ok(self.runner.submit(&ops)?.wait(config.timeout)?))?;
        Ok(Some(rate(config.large, time)))
    }
}

/// What each of several directions carries while all of them are under way.
fn bandwidth(config: &MeasureConfig, directions: &[Direction<'_>]) -> Result<Bandwidth, TransferError> {
    let time = median(config.rounds, || {
        let start = |direction: &Direction<'_>| direction.start(config.large, IN_FLIGHT);
        let points = directions.iter().map(start).collect::<Result<Vec<_>, _>>()?;
        Ok(points.iter().try_for_each(|point| point.wait(config.timeout))?)
    })?;
    Ok(rate(config.large, time / IN_FLIGHT))
}

impl MeasureConfig {
    /// Bytes that copies bring over a link.
    fn by_copies(&self) -> Bytes {
        self.small.max(self.large)
    }

    /// Bytes that the kernel brings over a link: whole words.
    const fn by_kernel(&self) -> Bytes {
        Bytes(self.large.0 / 4 * 4)
    }
}

/// Where a direction ends: whose memory, and whose bytes are to be there.
#[derive(Clone, Copy)]
struct Arrival<'p> {
    receiver: &'p Probe<'p>,
    sender: &'p Probe<'p>,
    in_window: bool,
}

impl Arrival<'_> {
    /// Lets nothing of what arrived before stand there.
    fn clear(&self) -> Result<(), TransferError> {
        let receiver = self.receiver;
        if self.in_window {
            return Ok(receiver.window.write(&vec![0; receiver.pattern.len()])?);
        }
        let ops = [Op::Fill(FillRegion::bytes(&receiver.target, 0))];
        Ok(receiver.submit(&ops)?.wait(receiver.config.timeout)?)
    }

    /// Bytes of the first `size` that differ from what was sent. The window has the receiver's own afterwards.
    fn wrong_bytes(&self, size: Bytes) -> Result<u64, TransferError> {
        let receiver = self.receiver;
        if !self.in_window {
            receiver.copy(&receiver.target, &receiver.window)?;
        }
        let wrong = receiver.wrong_in_window(self.sender, size)?;
        receiver.window.write(&receiver.pattern)?;
        Ok(wrong)
    }
}

/// The links of one device with host memory.
fn with_host(probe: &Probe<'_>) -> Result<Vec<MeasuredLink>, TransferError> {
    let up = Direction { runner: probe, lane: 0, src: &probe.source, dst: &probe.window };
    let down = Direction { runner: probe, lane: 1, src: &probe.window, dst: &probe.target };
    let both = Some(bandwidth(probe.config, &[up, down])?);
    let (to_window, to_target) = (
        Arrival { receiver: probe, sender: probe, in_window: true },
        Arrival { receiver: probe, sender: probe, in_window: false },
    );
    // Up first: it leaves the pattern in the window, which goes down.
    Ok(vec![
        measured((probe.end(), probe.host_end()), up, to_window, both)?,
        measured((probe.host_end(), probe.end()), down, to_target, both)?,
    ])
}

/// The links between two devices, in the directions that a queue uses directly.
fn between(devices: &Devices, a: &Probe<'_>, b: &Probe<'_>) -> Result<Vec<MeasuredLink>, TransferError> {
    let (there, back) = (direction(devices, a, b, 0), direction(devices, b, a, 1));
    let both = match (there, back) {
        (Some(there), Some(back)) => Some(bandwidth(a.config, &[there, back])?),
        _ => None,
    };
    let mut links = Vec::new();
    for (sender, receiver, direction) in [(a, b, there), (b, a, back)] {
        let Some(direction) = direction else { continue };
        let arrival = Arrival { receiver, sender, in_window: false };
        links.push(measured((sender.end(), receiver.end()), direction, arrival, both)?);
    }
    Ok(links)
}

/// Times one direction, by copies and then by the kernel, and looks at what each of them brought.
fn measured(
    (from, to): (LinkEnd, LinkEnd),
    direction: Direction<'_>,
    arrival: Arrival<'_>,
    both_ways: Option<Bandwidth>,
) -> Result<MeasuredLink, TransferError> {
    let config = direction.runner.config;
    arrival.clear()?;
    let (bandwidth, latency) = (direction.bandwidth()?, direction.latency()?);
    let mut wrong_bytes = arrival.wrong_bytes(config.by_copies())?;
    arrival.clear()?;
    let kernel = direction.kernel_bandwidth()?;
    // Where there was no kernel nothing arrived, and the window gets its own bytes back.
    wrong_bytes += arrival.wrong_bytes(kernel.map_or(Bytes(0), |_| config.by_kernel()))?;
    let both_ways = both_ways.unwrap_or(bandwidth);
    Ok(MeasuredLink { from, to, latency, bandwidth, both_ways, kernel, wrong_bytes })
}

/// The sender's queue where it writes there, else the receiver's where it reads there.
fn direction<'p>(
    devices: &Devices,
    sender: &'p Probe<'p>,
    receiver: &'p Probe<'p>,
    lane: usize,
) -> Option<Direction<'p>> {
    let (from, to) = (sender.device.info().id, receiver.device.info().id);
    let runner = match (devices.pushes(from, to), devices.pulls(from, to)) {
        (true, _) => sender,
        (false, true) => receiver,
        (false, false) => return None,
    };
    Some(Direction { runner, lane, src: &sender.source, dst: &receiver.target })
}

fn rate(bytes: Bytes, time: Duration) -> Bandwidth {
    let nanos = time.as_nanos().max(1) as f64;
    Bandwidth::from_gb_per_s(bytes.0 as f64 / nanos)
}

/// The median time of `rounds` runs after one to warm up.
fn median(
    rounds: u32,
    mut run: impl FnMut() -> Result<(), TransferError>,
) -> Result<Duration, TransferError> {
    run()?;
    let mut times = Vec::with_capacity(rounds as usize);
    for _ in 0..rounds {
        let started = Instant::now();
        run()?;
        times.push(started.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

/// Measurements kept between runs of a program, valid for the same silicon and driver, and copies as large.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MeasureCache {
    entries: Vec<CacheEntry>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct CacheEntry {
    key: CacheKey,
    links: Vec<MeasuredLink>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct CacheKey {
    devices: Vec<(DeviceUuid, String)>,
    small: Bytes,
    large: Bytes,
}

impl MeasureCache {
    /// What was measured with exactly these devices and their drivers, and with copies of the same sizes.
    pub fn get(&self, devices: &[Arc<dyn Device>], config: &MeasureConfig) -> Option<&[MeasuredLink]> {
        let key = CacheKey::new(devices, config);
        self.entries.iter().find(|entry| entry.key == key).map(|entry| entry.links.as_slice())
    }

    /// Keeps what was measured with these devices, in place of what was known.
    pub fn insert(&mut self, devices: &[Arc<dyn Device>], config: &MeasureConfig, links: Vec<MeasuredLink>) {
        let key = CacheKey::new(devices, config);
        self.entries.retain(|entry| entry.key != key);
        self.entries.push(CacheEntry { key, links });
    }
}

impl CacheKey {
    /// In an order of its own, since devices may be listed differently next time.
    fn new(devices: &[Arc<dyn Device>], config: &MeasureConfig) -> Self {
        let named = |device: &Arc<dyn Device>| {
            let info = device.info();
            (info.id.uuid, format!("{} {}", info.id.backend, info.driver))
        };
        let mut devices: Vec<_> = devices.iter().map(named).collect();
        devices.sort();
        Self { devices, small: config.small, large: config.large }
    }
}
