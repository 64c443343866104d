//! Which CUDA devices reach each other's memory, and the facts about it.

use std::ffi::c_int;

use cudarc::driver::sys::CUdevice;
use warpweft_core_types::{DeviceInfo, DriverError, LinkClass, LinkEnd, LinkFact, Provenance};

use crate::driver::Driver;

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
    /// The driver tells that two devices reach each other and not by which medium; NVML would.
    pub(crate) fn facts(&self, infos: &[DeviceInfo], own: &DeviceInfo, coherent: bool) -> Vec<LinkFact> {
        let here = LinkEnd::Device(own.id.uuid);
        let peers = infos
            .iter()
            .filter(|other| self.reaches(own.id.ordinal, other.id.ordinal))
            .map(|other| (LinkEnd::Device(other.id.uuid), LinkClass::Unknown, Provenance::Driver));
        let host = LinkEnd::Host { numa_node: own.numa_node.unwrap_or(0) };
        // A GPU that walks the host's page tables is joined with it by more than its PCI function.
        let class = if coherent { LinkClass::Unknown } else { LinkClass::Pcie };
        peers
            .chain(std::iter::once((host, class, Provenance::Assumed)))
            .flat_map(|(there, class, provenance)| {
                [(here, there), (there, here)].map(|(from, to)| fact(from, to, class, provenance))
            })
            .collect()
    }
}

const fn fact(from: LinkEnd, to: LinkEnd, class: LinkClass, provenance: Provenance) -> LinkFact {
    LinkFact { from, to, class, path: None, link_count: 1, bandwidth: None, latency: None, provenance }
}
