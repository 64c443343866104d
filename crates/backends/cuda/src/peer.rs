//! Which CUDA devices reach each other's memory, and the facts about it.

use std::ffi::c_int;

use cudarc::driver::sys::CUdevice;
use warpweft_core_types::{DeviceInfo, DriverError, LinkClass, LinkEnd, LinkFact, Provenance};

use crate::{
    driver::Driver,
    links::{Medium, Report},
};

/// What the driver said about every ordered pair of devices.
#[derive(Debug)]
pub(crate) struct PeerTable {
    devices: Vec<CUdevice>,
    count: usize,
    reaches: Vec<bool>,
}

impl PeerTable {
    #[expect(unsafe_code, reason = "asks the driver")]
    pub(crate) fn ask(driver: &Driver, devices: &[CUdevice]) -> Result<Self, DriverError> {
        let mut reaches = Vec::with_capacity(devices.len() * devices.len());
        for &from in devices {
            for &to in devices {
                let mut can: c_int = 0;
                if from != to {
                    // SAFETY: both devices were enumerated; one integer is written to this stack frame.
                    unsafe { driver.device_can_access_peer(&mut can, from, to) }?;
                }
                reaches.push(can != 0);
            }
        }
        Ok(Self { devices: devices.to_vec(), count: devices.len(), reaches })
    }

    /// Whether the queues and kernels of the device `from` can read and write memory of the device `to`.
    pub(crate) fn reaches(&self, from: u32, to: u32) -> bool {
        let (from, to) = (from as usize, to as usize);
        from < self.count && to < self.count && self.reaches[from * self.count + to]
    }

    /// The driver's number of a device.
    pub(crate) fn number(&self, device: u32) -> Option<CUdevice> {
        self.devices.get(device as usize).copied()
    }

    /// The driver's numbers of the devices that reach memory of the device `to`.
    pub(crate) fn users(&self, to: u32) -> Vec<CUdevice> {
        let reaches = |&(from, _): &(u32, &CUdevice)| self.reaches(from, to);
        (0..).zip(&self.devices).filter(reaches).map(|(_, &device)| device).collect()
    }

    pub(crate) fn has_peers(&self, from: u32) -> bool {
        (0..self.count).any(|to| u32::try_from(to).is_ok_and(|to| self.reaches(from, to)))
    }

    /// The links of one device: with peers it reaches, and with the host.
    ///
    /// The driver tells that two devices reach each other and not by which medium; the report does.
    pub(crate) fn facts(
        &self,
        infos: &[DeviceInfo],
        own: &DeviceInfo,
        coherent: bool,
        report: Option<&Report>,
    ) -> Vec<LinkFact> {
        let here = LinkEnd::Device(own.id.uuid);
        let between = |from, to| report.map_or(Medium::UNKNOWN, |report: &Report| report.between(from, to));
        let mut facts = Vec::new();
        for other in infos.iter().filter(|other| self.reaches(own.id.ordinal, other.id.ordinal)) {
            let there = LinkEnd::Device(other.id.uuid);
            facts.push(between(own, other).fact(here, there));
            facts.push(between(other, own).fact(there, here));
        }
        let known = report.and_then(|report| report.to_host(own, coherent));
        let near = own.numa_node.or_else(|| report.and_then(|report| report.numa_node(own)));
        let host = LinkEnd::Host { numa_node: near.unwrap_or(0) };
        // A GPU that walks the host's page tables is joined with it by more than its PCI function.
        let class = if coherent { LinkClass::Unknown } else { LinkClass::Pcie };
        let medium = known.unwrap_or(Medium { class, provenance: Provenance::Assumed, ..Medium::UNKNOWN });
        facts.extend([medium.fact(here, host), medium.fact(host, here)]);
        facts
    }
}
