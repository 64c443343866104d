//! Who can reach whom at all.

use std::collections::BTreeSet;

use crate::{NodeId, PathError, Topology};

impl Topology {
    /// The nodes that bytes from `from` can get to over usable edges, `from` included, in the order of their ids.
    ///
    /// # Errors
    ///
    /// [`PathError::UnknownNode`] if the node is not of this topology.
    pub fn reachable(&self, from: NodeId) -> Result<Vec<NodeId>, PathError> {
        self.check(from)?;
        let forward =
            |node| self.edges_from(node).iter().filter(|edge| edge.is_usable()).map(|edge| edge.to).collect();
        Ok(flood(from, forward).into_iter().collect())
    }

    /// The devices in groups within which each can reach each other, ordered by their first device.
    ///
    /// One group means that a collective over all devices is possible.
    pub fn device_islands(&self) -> Vec<Vec<NodeId>> {
        let mut islands = Vec::new();
        let mut left: BTreeSet<NodeId> = self.devices().map(|device| device.id).collect();
        while let Some(&first) = left.first() {
            let forward = |node| {
                self.edges_from(node).iter().filter(|edge| edge.is_usable()).map(|edge| edge.to).collect()
            };
            let backward =
                |node| self.edges_to(node).filter(|edge| edge.is_usable()).map(|edge| edge.from).collect();
            let there = flood(first, forward);
            let back = flood(first, backward);
            let island: Vec<NodeId> =
                left.iter().copied().filter(|node| there.contains(node) && back.contains(node)).collect();
            left.retain(|node| !island.contains(node));
            islands.push(island);
        }
        islands
    }
}

fn flood(from: NodeId, next: impl Fn(NodeId) -> Vec<NodeId>) -> BTreeSet<NodeId> {
    let mut seen = BTreeSet::from([from]);
    let mut open = vec![from];
    while let Some(node) = open.pop() {
        for other in next(node) {
            if seen.insert(other) {
                open.push(other);
            }
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use warpweft_core_types::LinkClass;

    use super::*;
    use crate::{DeviceKind, LinkDesc, NodeDesc, Provenance};

    #[test]
    fn one_way_links_reach_but_do_not_make_an_island() {
        let mut builder = Topology::builder();
        let ids: Vec<NodeId> = (0..4)
            .map(|index| builder.node(NodeDesc::device(format!("{index}"), DeviceKind::Gpu)).unwrap())
            .collect();
        let desc = LinkDesc::new(LinkClass::Pcie, Provenance::File);
        builder.link_both(ids[0], ids[1], desc).unwrap();
        builder.link(ids[1], ids[2], desc).unwrap();
        let mut topology = builder.build();
        assert_eq!(topology.reachable(ids[0]).unwrap(), ids[..3]);
        assert_eq!(topology.reachable(ids[2]).unwrap(), ids[2..3]);
        assert_eq!(topology.device_islands(), [vec![ids[0], ids[1]], vec![ids[2]], vec![ids[3]]]);
        topology.veto(ids[1], ids[0], "lost").unwrap();
        assert_eq!(topology.device_islands().len(), 4);
        assert!(topology.reachable(NodeId(9)).is_err());
    }
}
