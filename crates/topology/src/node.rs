//! The places bytes can be or pass through.

use std::fmt;

use serde::{Deserialize, Serialize};
use warpweft_core_types::{DeviceKind, DeviceUuid, PciAddress};

use crate::{CpuList, PcieLink};

/// A node's position in its [`Topology`](crate::Topology), from 0 in the order of addition.
///
/// It means nothing in another topology; [`DeviceUuid`] and the name are what to carry across.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub(crate) u32);

impl NodeId {
    /// The position as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// What stands at a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum NodeKind {
    /// A device that computes.
    Device {
        /// The silicon; `None` where the source of the topology does not say.
        uuid: Option<DeviceUuid>,
        /// What sort of processor.
        kind: DeviceKind,
    },
    /// The memory of one NUMA node of a host.
    Host {
        /// The NUMA node's number on its host.
        numa_node: u32,
    },
    /// Something that only forwards: an NVSwitch, a PCIe switch, a network switch.
    Switch,
    /// A network card.
    Nic,
}

/// Where a node sits in its machine; `None` is always "nobody said".
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Place {
    /// The machine, where the topology spans several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Its PCI function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci: Option<PciAddress>,
    /// Its PCI Express link towards the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieLink>,
    /// The NUMA node it is attached to, or is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// The processors near it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<CpuList>,
}

/// Describes a node that is to be added to a [`TopologyBuilder`](crate::TopologyBuilder).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeDesc {
    /// Unique in its topology, such as `GPU0` or `node3/GPU0`.
    pub name: String,
    /// What stands there.
    pub kind: NodeKind,
    /// The maker's name for it, such as a product name or a network interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Where it sits.
    #[serde(default)]
    pub place: Place,
}

impl NodeDesc {
    /// A device whose silicon is not identified, as in most files.
    pub fn device(name: impl Into<String>, kind: DeviceKind) -> Self {
        Self::new(name, NodeKind::Device { uuid: None, kind })
    }

    /// The memory of NUMA node `numa_node`, named `NUMA` and the number.
    pub fn host(numa_node: u32) -> Self {
        Self::new(format!("NUMA{numa_node}"), NodeKind::Host { numa_node }).near(numa_node)
    }

    /// A node of any kind.
    pub fn new(name: impl Into<String>, kind: NodeKind) -> Self {
        Self { name: name.into(), kind, model: None, place: Place::default() }
    }

    /// Identifies the silicon. Ignored for a node that is not a device.
    pub fn uuid(mut self, uuid: DeviceUuid) -> Self {
        if let NodeKind::Device { uuid: slot, .. } = &mut self.kind {
            *slot = Some(uuid);
        }
        self
    }

    /// Adds the maker's name.
    pub fn model(mut self, model: impl Into<String>) -> Self {
        self.model = Some(model.into());
        self
    }

    /// Places the node on a machine.
    pub fn on(mut self, host: impl Into<String>) -> Self {
        self.place.host = Some(host.into());
        self
    }

    /// Places the node on the PCI bus.
    pub fn at(mut self, pci: PciAddress) -> Self {
        self.place.pci = Some(pci);
        self
    }

    /// Attaches the node to a NUMA node.
    pub fn near(mut self, numa_node: u32) -> Self {
        self.place.numa_node = Some(numa_node);
        self
    }
}

/// One node of a [`Topology`](crate::Topology).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its position.
    pub id: NodeId,
    /// Unique in its topology.
    pub name: String,
    /// What stands there.
    pub kind: NodeKind,
    /// The maker's name for it.
    pub model: Option<String>,
    /// Where it sits.
    pub place: Place,
}

impl Node {
    pub(crate) fn new(id: NodeId, desc: NodeDesc) -> Self {
        Self { id, name: desc.name, kind: desc.kind, model: desc.model, place: desc.place }
    }

    /// The description this node was made from.
    pub fn to_desc(&self) -> NodeDesc {
        NodeDesc {
            name: self.name.clone(),
            kind: self.kind,
            model: self.model.clone(),
            place: self.place.clone(),
        }
    }

    /// Whether the node computes.
    pub const fn is_device(&self) -> bool {
        matches!(self.kind, NodeKind::Device { .. })
    }

    /// The silicon, if the node is a device whose silicon is known.
    pub const fn uuid(&self) -> Option<DeviceUuid> {
        match self.kind {
            NodeKind::Device { uuid, .. } => uuid,
            _ => None,
        }
    }
}
