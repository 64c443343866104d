//! What is near a device.

use serde::Serialize;
use warpweft_core_types::{Bandwidth, Bytes, PathClass};

use crate::{Known, NodeId, NodeKind, PathError, Topology};

/// A network card as a device sees it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct NicAffinity {
    /// The card.
    pub nic: NodeId,
    /// The way through the PCI tree, where known.
    pub path: Option<PathClass>,
    /// Bytes per second from the device to the card.
    pub bandwidth: Known<Bandwidth>,
}

impl Topology {
    /// The other devices that can be reached from `from`, cheapest first, with the nanoseconds it takes to move `bytes` there.
    ///
    /// # Errors
    ///
    /// [`PathError::UnknownNode`] if the node is not of this topology.
    pub fn nearest_devices(&self, from: NodeId, bytes: Bytes) -> Result<Vec<(NodeId, u64)>, PathError> {
        self.check(from)?;
        let costs = self.costs_from(from, bytes);
        let mut devices: Vec<(NodeId, u64)> = self
            .devices()
            .filter(|device| device.id != from)
            .filter_map(|device| Some((device.id, costs[device.id.index()]?)))
            .collect();
        devices.sort_by_key(|&(device, cost_ns)| (cost_ns, device));
        Ok(devices)
    }

    /// The network cards that `device` has an edge to, nearest first: by path, then by bandwidth.
    ///
    /// # Errors
    ///
    /// [`PathError::UnknownNode`] if the node is not of this topology.
    pub fn nearest_nics(&self, device: NodeId) -> Result<Vec<NicAffinity>, PathError> {
        self.check(device)?;
        let mut nics: Vec<NicAffinity> = self
            .edges_from(device)
            .iter()
            .filter(|edge| edge.is_usable())
            .filter(|edge| self.nodes()[edge.to.index()].kind == NodeKind::Nic)
            .map(|edge| NicAffinity {
                nic: edge.to,
                path: edge.path.map(|path| path.value),
                bandwidth: edge.bandwidth(),
            })
            .collect();
        nics.sort_by(|a, b| {
            let unknown_last = |nic: &NicAffinity| (nic.path.is_none(), nic.path);
            let wider_first = b.bandwidth.value.gb_per_s.total_cmp(&a.bandwidth.value.gb_per_s);
            unknown_last(a).cmp(&unknown_last(b)).then(wider_first).then(a.nic.cmp(&b.nic))
        });
        Ok(nics)
    }

    /// The host memory a node is attached to: that of its NUMA node on its machine, if both are known.
    pub fn nearest_host(&self, node: NodeId) -> Option<NodeId> {
        let place = &self.node(node)?.place;
        let numa_node = place.numa_node?;
        self.nodes()
            .iter()
            .find(|host| host.kind == NodeKind::Host { numa_node } && host.place.host == place.host)
            .map(|host| host.id)
    }
}

#[cfg(test)]
mod tests {
    use warpweft_core_types::LinkClass;

    use super::*;
    use crate::{DeviceKind, LinkDesc, NodeDesc, Provenance};

    #[test]
    fn nearer_cards_and_devices_come_first() {
        let mut builder = Topology::builder();
        let gpu = builder.node(NodeDesc::device("GPU0", DeviceKind::Gpu).near(1)).unwrap();
        let far = builder.node(NodeDesc::device("GPU1", DeviceKind::Gpu)).unwrap();
        let near = builder.node(NodeDesc::device("GPU2", DeviceKind::Gpu)).unwrap();
        let nics: Vec<NodeId> = ["NIC0", "NIC1", "NIC2"]
            .iter()
            .map(|name| builder.node(NodeDesc::new(*name, NodeKind::Nic)).unwrap())
            .collect();
        let host = builder.host(1).unwrap();
        let pcie = LinkDesc::new(LinkClass::Pcie, Provenance::File);
        builder.link_both(gpu, nics[0], pcie).unwrap();
        builder.link_both(gpu, nics[1], pcie.path(PathClass::Sys)).unwrap();
        builder.link_both(gpu, nics[2], pcie.path(PathClass::Pix)).unwrap();
        builder.link_both(gpu, far, pcie).unwrap();
        builder.link_both(gpu, near, LinkDesc::new(LinkClass::NvLink, Provenance::File)).unwrap();
        let topology = builder.build();
        let order: Vec<NodeId> = topology.nearest_nics(gpu).unwrap().iter().map(|nic| nic.nic).collect();
        assert_eq!(order, [nics[2], nics[1], nics[0]]);
        let devices = topology.nearest_devices(gpu, Bytes::mib(1)).unwrap();
        assert_eq!(devices.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [near, far]);
        let path = topology.best_path(gpu, near, Bytes::mib(1)).unwrap();
        assert_eq!(devices[0].1, path.cost_ns);
        assert_eq!(topology.nearest_host(gpu), Some(host));
        assert_eq!(topology.nearest_host(far), None);
    }
}
