//! Groups of devices in which every one is linked to every other in the same way.

use std::collections::{BTreeMap, BTreeSet};

use warpweft_core_types::{Bandwidth, LinkClass};

use crate::{Known, NodeId, Topology};

/// Devices behind one switch fabric.
///
/// The edges between them are not links of their own: a device's links into the fabric carry all of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Fabric {
    /// The medium.
    pub class: LinkClass,
    /// The devices, in the order of their ids; at least two.
    pub members: Vec<NodeId>,
    /// Bytes per second of one direction between one device and the fabric.
    pub port_bandwidth: Known<Bandwidth>,
}

impl Topology {
    /// The switch fabrics: groups of devices that are all joined by [`LinkClass::NvSwitch`] edges.
    pub fn fabrics(&self) -> Vec<Fabric> {
        self.complete_groups(LinkClass::NvSwitch, 2)
            .into_iter()
            .filter_map(|members| {
                let edge = self.edge(members[0], members[1])?;
                Some(Fabric { class: edge.class.value, port_bandwidth: edge.bandwidth(), members })
            })
            .collect()
    }

    /// Groups of at least `size` devices that edges of `class` join completely and to nothing else.
    pub(crate) fn complete_groups(&self, class: LinkClass, size: usize) -> Vec<Vec<NodeId>> {
        let mut peers: BTreeMap<NodeId, BTreeSet<NodeId>> = BTreeMap::new();
        for edge in self.edges() {
            let among_devices = self.is_device(edge.from) && self.is_device(edge.to);
            if edge.class.value == class && edge.veto.is_none() && among_devices {
                peers.entry(edge.from).or_default().insert(edge.to);
            }
        }
        let mut groups = Vec::new();
        for (&first, others) in &peers {
            let group: BTreeSet<NodeId> = others.iter().copied().chain([first]).collect();
            let is_first = group.first() == Some(&first);
            if is_first && group.len() >= size && is_complete(&peers, &group) {
                groups.push(group.into_iter().collect());
            }
        }
        groups
    }

    fn is_device(&self, node: NodeId) -> bool {
        self.nodes()[node.index()].is_device()
    }
}

fn is_complete(peers: &BTreeMap<NodeId, BTreeSet<NodeId>>, group: &BTreeSet<NodeId>) -> bool {
    group.iter().all(|member| {
        peers.get(member).is_some_and(|others| others.len() + 1 == group.len() && others.is_subset(group))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceKind, LinkDesc, NodeDesc, Provenance};

    fn joined(pairs: &[(u32, u32)]) -> Topology {
        let mut builder = Topology::builder();
        for index in 0..5 {
            builder.node(NodeDesc::device(format!("GPU{index}"), DeviceKind::Gpu)).unwrap();
        }
        for &(a, b) in pairs {
            let desc = LinkDesc::new(LinkClass::NvSwitch, Provenance::File).link_count(6);
            builder.link_both(NodeId(a), NodeId(b), desc).unwrap();
        }
        builder.build()
    }

    #[test]
    fn a_complete_group_is_a_fabric() {
        let fabrics = joined(&[(0, 1), (0, 2), (1, 2), (3, 4)]).fabrics();
        let members: Vec<usize> = fabrics.iter().map(|fabric| fabric.members.len()).collect();
        assert_eq!(members, [3, 2]);
        assert_eq!(fabrics[0].port_bandwidth.value.gb_per_s, 6.0 * 25.0);
    }

    #[test]
    fn an_incomplete_group_is_none() {
        assert_eq!(joined(&[(0, 1), (1, 2)]).fabrics(), []);
        assert_eq!(joined(&[(0, 1), (0, 2), (1, 2), (2, 3)]).fabrics(), []);
    }
}
