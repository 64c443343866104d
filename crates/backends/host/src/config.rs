//! What the host backend pretends to be: its devices and their links.

use std::time::Duration;

use warpweft_core_types::{
    Bandwidth, Bytes, DeviceKind, DeviceUuid, LinkClass, OpenError, PathClass, PciAddress,
};

use crate::HostBackend;

/// No link of a machine is slower, and clocks do not overflow on it.
const LONGEST_LATENCY: Duration = Duration::from_secs(60 * 60);

/// One device to make.
#[derive(Debug, Clone, PartialEq)]
pub struct HostDeviceConfig {
    /// The product's name.
    pub name: String,
    /// The sort of silicon it stands for.
    pub kind: DeviceKind,
    /// Its memory; allocations beyond it fail, whatever the machine has.
    pub memory: Bytes,
    /// Threads that serve its queues, at least 1.
    pub workers: u32,
    /// Resident workgroups it takes at once.
    pub resident_workgroups: u32,
    /// Its compute capability, if it stands for a device with one.
    pub compute_capability: Option<(u32, u32)>,
    /// The NUMA node it is nearest to.
    pub numa_node: Option<u32>,
    /// Where it would sit on the PCI bus.
    pub pci: Option<PciAddress>,
    /// Its id; `None` derives one from the backend's number in this process and the ordinal.
    pub uuid: Option<DeviceUuid>,
    /// Whether it takes host memory allocated elsewhere ([`warpweft_core_types::HostImport`]).
    pub host_import: bool,
}

impl Default for HostDeviceConfig {
    /// A CPU device with 4 GiB, one worker and room for 64 resident workgroups.
    fn default() -> Self {
        Self {
            name: "host device".to_owned(),
            kind: DeviceKind::Cpu,
            memory: Bytes::gib(4),
            workers: 1,
            resident_workgroups: 64,
            compute_capability: None,
            numa_node: None,
            pci: None,
            uuid: None,
            host_import: true,
        }
    }
}

/// What a link is like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkSpec {
    /// The medium it stands for.
    pub class: LinkClass,
    /// The way through the PCI tree it stands for.
    pub path: Option<PathClass>,
    /// Physical links bonded into it, at least 1.
    pub link_count: u32,
    /// Bytes per second in this direction.
    pub bandwidth: Option<Bandwidth>,
    /// Time of the smallest transfer.
    pub latency: Option<Duration>,
}

impl LinkSpec {
    /// One link of `class` with nothing else known.
    pub const fn new(class: LinkClass) -> Self {
        Self { class, path: None, link_count: 1, bandwidth: None, latency: None }
    }

    /// The same with a bandwidth in GB/s and a latency.
    #[must_use]
    pub const fn with_cost(mut self, gb_per_s: f64, latency: Duration) -> Self {
        self.bandwidth = Some(Bandwidth::from_gb_per_s(gb_per_s));
        self.latency = Some(latency);
        self
    }
}

impl Default for LinkSpec {
    fn default() -> Self {
        Self::new(LinkClass::HostMemory)
    }
}

/// One end of a configured link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The device with this ordinal.
    Device(u32),
    /// Host memory.
    Host,
}

/// Collects devices and links, then makes the backend.
#[derive(Debug, Clone, Default)]
pub struct HostBuilder {
    pub(crate) devices: Vec<HostDeviceConfig>,
    pub(crate) links: Vec<(Place, Place, LinkSpec)>,
    pub(crate) delay: bool,
}

/// Each has threads of its own, and links may be with every other.
const MAX_DEVICES: usize = 1024;

impl HostBuilder {
    /// Adds a device; its ordinal is the number of devices added before.
    #[must_use]
    pub fn device(mut self, config: HostDeviceConfig) -> Self {
        self.devices.push(config);
        self
    }

    /// Adds `count` devices like `config`.
    #[must_use]
    pub fn devices(mut self, count: u32, config: &HostDeviceConfig) -> Self {
        self.devices.extend((0..count).map(|_| config.clone()));
        self
    }

    /// Lets bytes go from `from` to `to`. A later call for the same pair replaces an earlier one.
    #[must_use]
    pub fn link(mut self, from: Place, to: Place, spec: LinkSpec) -> Self {
        self.links.push((from, to, spec));
        self
    }

    /// Lets bytes go both ways between two places.
    #[must_use]
    pub fn link_both(self, a: Place, b: Place, spec: LinkSpec) -> Self {
        self.link(a, b, spec).link(b, a, spec)
    }

    /// Links every pair of the devices added so far, both ways.
    #[must_use]
    pub fn link_all_devices(mut self, spec: LinkSpec) -> Self {
        let places: Vec<Place> = self.places().collect();
        for (position, &a) in places.iter().enumerate() {
            for &b in &places[position + 1..] {
                self = self.link_both(a, b, spec);
            }
        }
        self
    }

    /// Links each device added so far with the next, both ways: 0-1-2-3.
    #[must_use]
    pub fn link_chain(mut self, spec: LinkSpec) -> Self {
        let places: Vec<Place> = self.places().collect();
        for pair in places.windows(2) {
            self = self.link_both(pair[0], pair[1], spec);
        }
        self
    }

    /// Links every device added so far with host memory, both ways.
    #[must_use]
    pub fn link_all_to_host(mut self, spec: LinkSpec) -> Self {
        let places: Vec<Place> = self.places().collect();
        for device in places {
            self = self.link_both(device, Place::Host, spec);
        }
        self
    }

    /// Makes copies take as long as their links' latency and bandwidth say, one behind the other on each link.
    #[must_use]
    pub fn delay_links(mut self, delay: bool) -> Self {
        self.delay = delay;
        self
    }

    /// Makes the backend.
    ///
    /// # Errors
    ///
    /// [`OpenError::InvalidConfig`] for no devices or more than 1,024, a device without workers or memory, a link to a
    /// missing device or from a place to itself, or a delayed link without a cost.
    pub fn build(self) -> Result<HostBackend, OpenError> {
        self.check().map_err(|reason| OpenError::InvalidConfig { reason })?;
        Ok(HostBackend::new(self))
    }

    fn places(&self) -> impl Iterator<Item = Place> + use<> {
        // What is beyond is refused by `build`, and need not be linked with everything else before.
        (0..).map(Place::Device).take(self.devices.len().min(MAX_DEVICES))
    }

    fn check(&self) -> Result<(), String> {
        if self.devices.is_empty() {
            return Err("a host backend needs at least one device".to_owned());
        }
        if self.devices.len() > MAX_DEVICES {
            return Err(format!(
                "{} devices are more than a host backend has, {MAX_DEVICES}",
                self.devices.len()
            ));
        }
        for (ordinal, device) in self.devices.iter().enumerate() {
            if device.workers == 0 || device.memory.0 == 0 {
                return Err(format!("device {ordinal} needs at least one worker and one byte of memory"));
            }
        }
        for (ordinal, device) in self.devices.iter().enumerate() {
            if let Some(uuid) = device.uuid
                && self.devices[..ordinal].iter().any(|earlier| earlier.uuid == Some(uuid))
            {
                return Err(format!("device {ordinal} has the uuid {uuid} of an earlier one"));
            }
        }
        for (from, to, spec) in &self.links {
            self.check_link(*from, *to, spec)?;
        }
        Ok(())
    }

    fn check_link(&self, from: Place, to: Place, spec: &LinkSpec) -> Result<(), String> {
        for place in [from, to] {
            if let Place::Device(ordinal) = place
                && ordinal as usize >= self.devices.len()
            {
                return Err(format!("a link names device {ordinal}, there are {}", self.devices.len()));
            }
        }
        if from == to {
            return Err(format!("a link joins {from:?} with itself"));
        }
        if spec.link_count == 0 {
            return Err(format!("the link from {from:?} to {to:?} bonds no physical link"));
        }
        if spec.bandwidth.is_some_and(|rate| !rate.gb_per_s.is_finite() || rate.gb_per_s <= 0.0) {
            return Err(format!("the link from {from:?} to {to:?} has a bandwidth that is none"));
        }
        if spec.latency.is_some_and(|latency| latency > LONGEST_LATENCY) {
            return Err(format!("the link from {from:?} to {to:?} has a latency above {LONGEST_LATENCY:?}"));
        }
        let costed = spec.bandwidth.is_some() && spec.latency.is_some();
        if self.delay && !costed {
            return Err(format!(
                "links are delayed, so the one from {from:?} to {to:?} needs bandwidth and latency"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use warpweft_core_types::{Backend, Features, LinkEnd};

    use super::*;

    fn refuse(builder: HostBuilder, words: &str) {
        match builder.build().unwrap_err() {
            OpenError::InvalidConfig { reason } => {
                assert!(reason.contains(words), "{reason:?} lacks {words:?}")
            }
            other => panic!("{other}"),
        }
    }

    fn two() -> HostBuilder {
        HostBackend::builder().devices(2, &HostDeviceConfig::default())
    }

    #[test]
    fn contradictions_are_refused_with_a_reason() {
        let one = |config| HostBackend::builder().device(config);
        let (a, b, spec) = (Place::Device(0), Place::Device(1), LinkSpec::default());
        refuse(HostBackend::builder(), "at least one device");
        let crowd = HostBackend::builder().devices(1_000_000, &HostDeviceConfig::default());
        refuse(crowd.link_all_devices(LinkSpec::default()), "more than a host backend has");
        refuse(one(HostDeviceConfig { workers: 0, ..Default::default() }), "worker");
        refuse(one(HostDeviceConfig { memory: Bytes(0), ..Default::default() }), "memory");
        refuse(two().link(a, Place::Device(2), spec), "names device 2");
        refuse(two().link(a, a, spec), "itself");
        refuse(two().link(a, b, LinkSpec { link_count: 0, ..spec }), "no physical link");
        refuse(two().link(a, b, spec).delay_links(true), "needs bandwidth and latency");
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            refuse(two().link(a, b, spec.with_cost(rate, Duration::ZERO)), "bandwidth");
        }
        refuse(two().link(a, b, spec.with_cost(1.0, Duration::MAX)), "latency");
        let same = HostDeviceConfig { uuid: Some(DeviceUuid::from_bytes([1; 16])), ..Default::default() };
        refuse(HostBackend::builder().devices(2, &same), "uuid");
    }

    #[test]
    fn what_is_configured_is_what_devices_report() {
        let uuid = DeviceUuid::from_bytes([7; 16]);
        let config = HostDeviceConfig {
            name: "stand-in".to_owned(),
            kind: DeviceKind::Gpu,
            memory: Bytes::mib(3),
            workers: 2,
            resident_workgroups: 5,
            compute_capability: Some((9, 0)),
            numa_node: Some(3),
            pci: Some(PciAddress { domain: 0, bus: 1, device: 2, function: 0 }),
            uuid: Some(uuid),
            host_import: false,
        };
        let builder = HostBackend::builder().device(config.clone()).link_all_to_host(LinkSpec::default());
        let device = builder.build().unwrap().open(0, Features::HOST_VISIBLE_MEMORY).unwrap();
        let info = device.info();
        assert_eq!(
            (info.name.as_str(), info.kind, info.memory),
            ("stand-in", DeviceKind::Gpu, Bytes::mib(3))
        );
        assert_eq!((info.multiprocessors, info.compute_capability), (2, Some((9, 0))));
        assert_eq!((info.pci, info.numa_node, info.id.uuid), (config.pci, Some(3), uuid));
        assert_eq!(device.residents().unwrap().budget().total, 5);
        assert!(device.host_import().is_none());
        let facts = device.links().unwrap().facts();
        assert!(facts.iter().any(|fact| fact.to == LinkEnd::Host { numa_node: 3 }), "{facts:?}");
    }

    #[test]
    fn a_later_link_replaces_an_earlier_one() {
        let (a, b) = (Place::Device(0), Place::Device(1));
        let builder = two().link(a, b, LinkSpec::default()).link(a, b, LinkSpec::new(LinkClass::NvLink));
        let device = builder.build().unwrap().open(0, Features::empty()).unwrap();
        let facts = device.links().unwrap().facts();
        assert_eq!(facts.iter().map(|fact| fact.class).collect::<Vec<_>>(), [LinkClass::NvLink]);
    }
}
