//! Which places are linked, what crossed each link, and how long it should take.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use warpweft_core_types::{
    Access, BufferView, Bytes, DeviceId, LinkEnd, LinkFact, LinkTraffic, MemoryKind, PeerAccess, Provenance,
    SubmitError,
};

use crate::config::{HostBuilder, LinkSpec, Place};

/// What every transfer over a delayed link is cut to.
const LONGEST_TRANSFER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The directed links of one backend, shared by its devices.
#[derive(Debug)]
pub(crate) struct LinkTable {
    devices: Vec<DeviceId>,
    numa_nodes: Vec<u32>,
    /// Row `from`, column `to`; the last row and column are the host.
    cells: Vec<Option<Link>>,
    delay: bool,
}

#[derive(Debug)]
struct Link {
    spec: LinkSpec,
    bytes: AtomicU64,
    /// When what it carries now has left it; only moves where links are delayed.
    free_at: Mutex<Option<Instant>>,
}

impl Link {
    fn new(spec: LinkSpec) -> Self {
        Self { spec, bytes: AtomicU64::new(0), free_at: Mutex::default() }
    }

    /// Queues bytes behind those the link carries, and says when they arrive.
    fn carry(&self, bytes: u64) -> Instant {
        let nanos = self.spec.bandwidth.map_or(0.0, |rate| rate.transfer_ns(Bytes(bytes)));
        let streaming = Duration::try_from_secs_f64(nanos / 1e9).unwrap_or(Duration::MAX);
        let now = Instant::now();
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let start = free_at.map_or(now, |free| free.max(now));
        // A transfer of a year is as good as one that never ends, and the clock does not overflow on it.
        let end = (start + streaming.min(LONGEST_TRANSFER)).min(now + LONGEST_TRANSFER);
        *free_at = Some(end);
        end + self.spec.latency.unwrap_or_default()
    }
}

impl LinkTable {
    pub(crate) fn new(builder: &HostBuilder, devices: Vec<DeviceId>) -> Self {
        let numa_nodes = builder.devices.iter().map(|device| device.numa_node.unwrap_or(0)).collect();
        let side = devices.len() + 1;
        let mut table = Self {
            devices,
            numa_nodes,
            cells: (0..side * side).map(|_| None).collect(),
            delay: builder.delay,
        };
        for &(from, to, spec) in &builder.links {
            let cell = table.cell(from, to);
            table.cells[cell] = Some(Link::new(spec));
        }
        table
    }

    /// Whether this is a device of the backend.
    pub(crate) fn knows(&self, device: DeviceId) -> bool {
        self.devices.contains(&device)
    }

    /// Whether bytes may go straight from `from` to `to`.
    pub(crate) fn linked(&self, from: Place, to: Place) -> bool {
        from == to || self.cells[self.cell(from, to)].is_some()
    }

    /// What the device with this ordinal may do with device memory of `other`.
    pub(crate) fn peer_access(&self, ordinal: u32, other: DeviceId) -> PeerAccess {
        if !self.knows(other) {
            return PeerAccess { read: false, write: false };
        }
        let (own, other) = (Place::Device(ordinal), Place::Device(other.ordinal));
        PeerAccess { read: self.linked(other, own), write: self.linked(own, other) }
    }

    /// Checks that the device `own` can do `access` to a buffer of this backend.
    pub(crate) fn check(&self, own: DeviceId, view: &BufferView, access: Access) -> Result<(), SubmitError> {
        let (here, there) = (Place::Device(own.ordinal), place_of(view));
        let owner = view.device();
        if access != Access::Write && !self.linked(there, here) {
            return Err(SubmitError::NoLink { from: owner, to: own });
        }
        if access.writes() && !self.linked(here, there) {
            return Err(SubmitError::NoLink { from: own, to: owner });
        }
        Ok(())
    }

    /// Counts a copy that the device `own` carries out, and says when its bytes arrive if links are delayed.
    pub(crate) fn cross(&self, own: DeviceId, src: &BufferView, dst: &BufferView) -> Option<Instant> {
        let (from, here, to) = (place_of(src), Place::Device(own.ordinal), place_of(dst));
        // Between two places of which neither is this device, bytes pass through it.
        self.pass(from, here, src.size()).max(self.pass(here, to, src.size()))
    }

    /// Counts a fill that the device `own` carries out, and says when its bytes arrive if links are delayed.
    pub(crate) fn cross_fill(&self, own: DeviceId, dst: &BufferView) -> Option<Instant> {
        self.pass(Place::Device(own.ordinal), place_of(dst), dst.size())
    }

    fn pass(&self, from: Place, to: Place, bytes: u64) -> Option<Instant> {
        let link = self.cells[self.cell(from, to)].as_ref()?;
        // Relaxed: a statistic that orders nothing.
        link.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.delay.then(|| link.carry(bytes))
    }

    /// The links that start or end at the device with this ordinal.
    pub(crate) fn facts(&self, ordinal: u32) -> Vec<LinkFact> {
        let own = Place::Device(ordinal);
        self.links()
            .filter(|(from, to, _)| *from == own || *to == own)
            .map(|(from, to, link)| LinkFact {
                from: self.end(from, ordinal),
                to: self.end(to, ordinal),
                class: link.spec.class,
                path: link.spec.path,
                link_count: link.spec.link_count,
                bandwidth: link.spec.bandwidth,
                latency: link.spec.latency,
                provenance: Provenance::File,
            })
            .collect()
    }

    /// The bytes counted on links that start at the device with this ordinal, or at the host and end there.
    pub(crate) fn traffic(&self, ordinal: u32) -> Vec<LinkTraffic> {
        let own = Place::Device(ordinal);
        self.links()
            .filter(|(from, to, _)| *from == own || (*from == Place::Host && *to == own))
            .map(|(from, to, link)| LinkTraffic {
                from: self.end(from, ordinal),
                to: self.end(to, ordinal),
                bytes: link.bytes.load(Ordering::Relaxed),
            })
            .collect()
    }

    fn links(&self) -> impl Iterator<Item = (Place, Place, &Link)> {
        let side = self.devices.len() + 1;
        self.cells.iter().enumerate().filter_map(move |(cell, link)| {
            Some((self.place(cell / side), self.place(cell % side), link.as_ref()?))
        })
    }

    /// The host end of a device's link is the memory of the device's own NUMA node.
    fn end(&self, place: Place, seen_from: u32) -> LinkEnd {
        match place {
            Place::Device(ordinal) => LinkEnd::Device(self.devices[ordinal as usize].uuid),
            Place::Host => LinkEnd::Host { numa_node: self.numa_nodes[seen_from as usize] },
        }
    }

    fn place(&self, index: usize) -> Place {
        match u32::try_from(index) {
            Ok(ordinal) if index < self.devices.len() => Place::Device(ordinal),
            _ => Place::Host,
        }
    }

    fn cell(&self, from: Place, to: Place) -> usize {
        let index = |place| match place {
            Place::Device(ordinal) => ordinal as usize,
            Place::Host => self.devices.len(),
        };
        index(from) * (self.devices.len() + 1) + index(to)
    }
}

/// Where a buffer's bytes are.
fn place_of(view: &BufferView) -> Place {
    match view.buffer().kind() {
        MemoryKind::Device => Place::Device(view.device().ordinal),
        MemoryKind::HostVisible | MemoryKind::Upload => Place::Host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_carries_one_transfer_after_the_other() {
        use warpweft_core_types::LinkClass;

        let latency = Duration::from_millis(5);
        // 1 MB in a millisecond.
        let link = Link::new(LinkSpec::new(LinkClass::Pcie).with_cost(1.0, latency));
        let before = Instant::now();
        let arrivals: Vec<Instant> = (0..8).map(|_| link.carry(1_000_000)).collect();
        assert!(arrivals[7] >= before + Duration::from_millis(8) + latency, "all eight share the link");
        assert!(arrivals.windows(2).all(|pair| pair[1] >= pair[0] + Duration::from_micros(999)));
        // Bytes without end do not overflow the clock.
        link.carry(u64::MAX);
        link.carry(u64::MAX);
    }
}
