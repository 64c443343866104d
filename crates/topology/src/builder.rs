//! Collects nodes and reports, and makes a [`Topology`] of them.

use std::collections::{BTreeMap, HashMap, btree_map::Entry};

use warpweft_core_types::{DeviceUuid, ErrorClass, LinkClass, LinkEnd, LinkFact, PathClass, Provenance};

use crate::{CpuList, Edge, EdgeError, LinkDesc, Node, NodeDesc, NodeId, NodeKind, Topology};

/// Why a topology could not be put together.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// Two nodes have one name.
    #[error("two nodes are named {name:?}")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// Two nodes are one silicon.
    #[error("{first} and {second} are both device {uuid}")]
    DuplicateDevice {
        /// The silicon.
        uuid: DeviceUuid,
        /// Name of the node that came first.
        first: String,
        /// Name of the node that was refused.
        second: String,
    },
    /// A fact is about a device that was not given.
    #[error("a link fact names device {uuid}, which is not among the devices")]
    UnknownDevice {
        /// The device in the fact.
        uuid: DeviceUuid,
    },
    /// An edge is listed twice where it must be listed once.
    #[error("the edge from {from} to {to} is listed twice")]
    DuplicateEdge {
        /// Name of the node where it starts.
        from: String,
        /// Name of the node where it ends.
        to: String,
    },
    /// There are more nodes than a [`NodeId`] can count.
    #[error("too many nodes")]
    TooManyNodes,
    /// One machine has more NUMA nodes than are joined pair by pair.
    #[error("more than {MAX_NUMA_NODES} NUMA nodes in one machine")]
    TooManyNumaNodes,
    /// A report about an edge cannot be true.
    #[error(transparent)]
    Edge(#[from] EdgeError),
}

impl BuildError {
    /// How to react: parts that contradict each other go on doing so.
    pub const fn class(&self) -> ErrorClass {
        ErrorClass::Usage
    }
}

/// Collects nodes and reports about links; [`build`](Self::build) makes the [`Topology`].
#[derive(Debug, Default)]
pub struct TopologyBuilder {
    nodes: Vec<Node>,
    names: HashMap<String, NodeId>,
    devices: HashMap<DeviceUuid, NodeId>,
    /// The first node of each NUMA number.
    hosts: HashMap<u32, NodeId>,
    edges: BTreeMap<(NodeId, NodeId), Edge>,
}

impl TopologyBuilder {
    /// Adds a node.
    ///
    /// # Errors
    ///
    /// [`BuildError::DuplicateName`] or [`BuildError::DuplicateDevice`] if it is there already.
    pub fn node(&mut self, desc: NodeDesc) -> Result<NodeId, BuildError> {
        let id = NodeId(u32::try_from(self.nodes.len()).map_err(|_| BuildError::TooManyNodes)?);
        if self.names.contains_key(&desc.name) {
            return Err(BuildError::DuplicateName { name: desc.name });
        }
        let node = Node::new(id, desc);
        if let Some(uuid) = node.uuid() {
            if let Some(first) = self.devices.get(&uuid) {
                return Err(BuildError::DuplicateDevice {
                    uuid,
                    first: self.nodes[first.index()].name.clone(),
                    second: node.name,
                });
            }
            self.devices.insert(uuid, id);
        }
        if let NodeKind::Host { numa_node } = node.kind {
            self.hosts.entry(numa_node).or_insert(id);
        }
        self.names.insert(node.name.clone(), id);
        self.nodes.push(node);
        Ok(id)
    }

    /// Adds a report about the link from one node to another; it is merged with what is known about the pair.
    ///
    /// # Errors
    ///
    /// [`BuildError::Edge`] if a node is not of this builder, both are one, or a figure is impossible.
    pub fn link(&mut self, from: NodeId, to: NodeId, desc: LinkDesc) -> Result<(), BuildError> {
        desc.check()?;
        let name = self.name_of(from)?;
        self.name_of(to)?;
        if from == to {
            let node = name.to_owned();
            return Err(EdgeError::Loop { node }.into());
        }
        self.edges
            .entry((from, to))
            .and_modify(|edge| edge.merge(&desc))
            .or_insert_with(|| Edge::new(from, to, &desc));
        Ok(())
    }

    /// Adds the same report for both directions.
    ///
    /// # Errors
    ///
    /// As [`link`](Self::link).
    pub fn link_both(&mut self, a: NodeId, b: NodeId, desc: LinkDesc) -> Result<(), BuildError> {
        self.link(a, b, desc)?;
        self.link(b, a, desc)
    }

    /// Adds a fact from a backend; a NUMA node it names is added if it is not there yet.
    ///
    /// # Errors
    ///
    /// [`BuildError::UnknownDevice`] for a device that was not added, else as [`link`](Self::link).
    pub fn fact(&mut self, fact: &LinkFact) -> Result<(), BuildError> {
        let from = self.end(fact.from)?;
        let to = self.end(fact.to)?;
        self.link(from, to, fact.into())
    }

    /// The memory of NUMA node `numa_node`, which is added if it is not there yet.
    ///
    /// # Errors
    ///
    /// [`BuildError::DuplicateName`] if another node has taken its name.
    pub fn host(&mut self, numa_node: u32) -> Result<NodeId, BuildError> {
        match self.hosts.get(&numa_node) {
            Some(&host) => Ok(host),
            None => self.node(NodeDesc::host(numa_node)),
        }
    }

    /// The finished topology.
    pub fn build(self) -> Topology {
        Topology::assemble(self.nodes, self.edges.into_values().collect())
    }

    fn end(&mut self, end: LinkEnd) -> Result<NodeId, BuildError> {
        match end {
            LinkEnd::Device(uuid) => {
                self.devices.get(&uuid).copied().ok_or(BuildError::UnknownDevice { uuid })
            }
            LinkEnd::Host { numa_node } => self.host(numa_node),
        }
    }

    /// Joins nodes to the memory of the NUMA node each is attached to; adds the memory where it is not there yet.
    pub(crate) fn attach_to_hosts(
        &mut self,
        nodes: &[NodeId],
        provenance: Provenance,
    ) -> Result<(), BuildError> {
        for &node in nodes {
            if let Some(numa_node) = self.numa_node_of(node) {
                let host = self.host(numa_node)?;
                let desc = LinkDesc::new(LinkClass::Pcie, provenance);
                self.link_both(host, node, desc)?;
            }
        }
        self.join_hosts(provenance)
    }

    /// Joins the memories of one machine's NUMA nodes, all of which every processor can read and write.
    pub(crate) fn join_hosts(&mut self, provenance: Provenance) -> Result<(), BuildError> {
        let mut hosts: Vec<NodeId> = self.hosts.values().copied().collect();
        hosts.sort_unstable();
        if hosts.len() > MAX_NUMA_NODES {
            return Err(BuildError::TooManyNumaNodes);
        }
        let desc = LinkDesc::new(LinkClass::HostMemory, provenance).path(PathClass::Sys);
        for (index, &a) in hosts.iter().enumerate() {
            for &b in &hosts[index + 1..] {
                self.link_both(a, b, desc)?;
            }
        }
        Ok(())
    }

    /// Adds an edge as it was in another topology.
    pub(crate) fn whole_edge(&mut self, edge: Edge) -> Result<(), BuildError> {
        let (from, to) = (edge.from, edge.to);
        edge.check()?;
        if from == to {
            let node = self.name_of(from)?.to_owned();
            return Err(EdgeError::Loop { node }.into());
        }
        match self.edges.entry((from, to)) {
            Entry::Vacant(slot) => {
                slot.insert(edge);
                Ok(())
            }
            Entry::Occupied(_) => Err(BuildError::DuplicateEdge {
                from: self.name_of(from)?.to_owned(),
                to: self.name_of(to)?.to_owned(),
            }),
        }
    }

    pub(crate) fn find(&self, name: &str) -> Option<NodeId> {
        self.names.get(name).copied()
    }

    pub(crate) fn set_cpus(&mut self, node: NodeId, cpus: Option<CpuList>) {
        if let Some(node) = self.nodes.get_mut(node.index()) {
            node.place.cpus = cpus;
        }
    }

    /// The NUMA node that `node` is attached to.
    pub(crate) fn numa_node_of(&self, node: NodeId) -> Option<u32> {
        self.nodes.get(node.index())?.place.numa_node
    }

    fn name_of(&self, node: NodeId) -> Result<&str, EdgeError> {
        self.nodes.get(node.index()).map(|found| found.name.as_str()).ok_or(EdgeError::UnknownNode { node })
    }
}

/// Every pair is an edge; the largest machines have some dozens.
pub(crate) const MAX_NUMA_NODES: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceKind;

    const fn uuid(byte: u8) -> DeviceUuid {
        DeviceUuid::from_bytes([byte; 16])
    }

    fn gpu(name: &str, byte: u8) -> NodeDesc {
        NodeDesc::device(name, DeviceKind::Gpu).uuid(uuid(byte))
    }

    fn fact(from: LinkEnd, to: LinkEnd) -> LinkFact {
        LinkFact {
            from,
            to,
            class: LinkClass::Pcie,
            path: None,
            link_count: 1,
            bandwidth: None,
            latency: None,
            provenance: Provenance::Driver,
        }
    }

    #[test]
    fn facts_find_devices_by_uuid_and_make_their_hosts() {
        let host = LinkEnd::Host { numa_node: 1 };
        let facts = [fact(host, LinkEnd::Device(uuid(7)))];
        let topology = Topology::from_facts(vec![gpu("GPU0", 7)], &facts).unwrap();
        let (host, device) = (topology.host(1).unwrap(), topology.device(uuid(7)).unwrap());
        assert!(topology.edge(host, device).is_some());
        assert!(topology.edge(device, host).is_none());
    }

    #[test]
    fn a_fact_about_a_stranger_is_refused() {
        let facts = [fact(LinkEnd::Device(uuid(1)), LinkEnd::Host { numa_node: 0 })];
        assert_eq!(Topology::from_facts(vec![], &facts), Err(BuildError::UnknownDevice { uuid: uuid(1) }));
    }

    #[test]
    fn one_silicon_or_one_name_twice_is_refused() {
        let twice = Topology::from_facts(vec![gpu("GPU0", 1), gpu("GPU1", 1)], &[]);
        assert!(matches!(twice, Err(BuildError::DuplicateDevice { .. })));
        let twice = Topology::from_facts(vec![gpu("GPU0", 1), gpu("GPU0", 2)], &[]);
        assert!(matches!(twice, Err(BuildError::DuplicateName { .. })));
    }

    #[test]
    fn a_probe_neither_makes_an_edge_nor_lifts_a_veto() {
        let facts = [fact(LinkEnd::Device(uuid(1)), LinkEnd::Device(uuid(2)))];
        let mut topology = Topology::from_facts(vec![gpu("GPU0", 1), gpu("GPU1", 2)], &facts).unwrap();
        let (a, b) = (topology.device(uuid(1)).unwrap(), topology.device(uuid(2)).unwrap());
        let fast = crate::Measurement {
            bandwidth: Some(warpweft_core_types::Bandwidth::from_gb_per_s(50.0)),
            latency: None,
        };
        assert!(matches!(topology.measure(b, a, &fast), Err(EdgeError::NoEdge { .. })));
        topology.veto(a, b, "writes vanish").unwrap();
        topology.measure(a, b, &fast).unwrap();
        topology.veto(a, b, "again").unwrap();
        let edge = topology.edge(a, b).unwrap();
        assert_eq!(edge.veto.as_deref(), Some("writes vanish"));
        assert!(!edge.is_usable());
    }
}
