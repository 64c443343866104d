//! Words for what joins two devices: the medium, the path through the machine, and how we know.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{Bandwidth, DeviceUuid};

/// The medium that carries bytes from one device to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LinkClass {
    /// Both ends are the same device.
    SameDevice,
    /// Ordinary memory of one host, read and written by its processors.
    HostMemory,
    /// NVIDIA NVLink from device to device.
    NvLink,
    /// NVIDIA NVLink through an NVSwitch fabric.
    NvSwitch,
    /// NVIDIA NVLink chip-to-chip between processor and accelerator.
    NvLinkC2c,
    /// AMD Infinity Fabric (xGMI).
    Xgmi,
    /// Intel Xe Link.
    XeLink,
    /// PCI Express.
    Pcie,
    /// A network between hosts.
    Network,
    /// Something joins them; what is not known.
    Unknown,
}

impl fmt::Display for LinkClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SameDevice => "same device",
            Self::HostMemory => "host memory",
            Self::NvLink => "NVLink",
            Self::NvSwitch => "NVSwitch",
            Self::NvLinkC2c => "NVLink-C2C",
            Self::Xgmi => "xGMI",
            Self::XeLink => "Xe Link",
            Self::Pcie => "PCIe",
            Self::Network => "network",
            Self::Unknown => "unknown",
        })
    }
}

/// How far apart two PCI functions are, near to far, in the words of `nvidia-smi topo -m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum PathClass {
    /// At most one PCIe switch between them.
    Pix,
    /// Several PCIe switches, no host bridge.
    Pxb,
    /// Through one host bridge (a CPU).
    Phb,
    /// Between host bridges of one NUMA node.
    Node,
    /// Between NUMA nodes.
    Sys,
}

impl fmt::Display for PathClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        })
    }
}

/// How a fact is known; a later variant is weaker evidence than an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Provenance {
    /// We moved bytes and timed them.
    Measured,
    /// The device's driver or management library said so.
    Driver,
    /// The operating system's device tree said so.
    Sysfs,
    /// A file or configuration said so.
    File,
    /// Nobody said so; a default for the class.
    Assumed,
}

/// One end of a link as a backend sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkEnd {
    /// A device.
    Device(DeviceUuid),
    /// The memory of a NUMA node of this host.
    Host {
        /// The NUMA node's number; 0 where the machine has only one.
        numa_node: u32,
    },
}

/// A directed fact: bytes can go from `from` to `to`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkFact {
    /// Where bytes start.
    pub from: LinkEnd,
    /// Where they arrive.
    pub to: LinkEnd,
    /// The medium.
    pub class: LinkClass,
    /// The way through the PCI tree, where one is known.
    pub path: Option<PathClass>,
    /// Physical links bonded into this one; at least 1.
    pub link_count: u32,
    /// Bytes per second this direction carries, if known.
    pub bandwidth: Option<Bandwidth>,
    /// Time of the smallest transfer, if known.
    pub latency: Option<Duration>,
    /// The word for it.
    pub provenance: Provenance,
}

/// Bytes counted on one directed link since its device was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LinkTraffic {
    /// Where the bytes came from.
    pub from: LinkEnd,
    /// Where they went.
    pub to: LinkEnd,
    /// Bytes moved by queue operations (copies and fills); what kernels read and write directly is not seen.
    pub bytes: u64,
}
