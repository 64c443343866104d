//! Which way bytes take between two devices.

use std::{fmt, time::Duration};

use serde::Serialize;
use warpweft_core_types::{Bytes, DeviceId, Features, LinkClass, LinkEnd, LinkFact, PathClass, Provenance};
use warpweft_topology::{LinkDesc, NodeDesc, NodeId, NodeKind, PathError, Topology};

use crate::{TransferError, devices::Devices};

/// How a copy gets from its source to its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteKind {
    /// Within one device.
    Local,
    /// Straight from device to device.
    Direct,
    /// Through host memory that both devices reach; no processor touches the bytes.
    Shared,
    /// Through two pieces of host memory, with a copy by a processor between them.
    Staged,
    /// Through other devices, and maybe host memory as well.
    Relayed,
}

impl fmt::Display for RouteKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => "local",
            Self::Direct => "direct",
            Self::Shared => "shared",
            Self::Staged => "staged",
            Self::Relayed => "relayed",
        })
    }
}

/// Where bytes rest on their way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// The memory of a device.
    Device(DeviceId),
    /// Host memory.
    Host,
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(device) => device.fmt(f),
            Self::Host => f.write_str("memory"),
        }
    }
}

/// The way from one device to another: source, whatever lies between, destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Route {
    /// In a word.
    pub kind: RouteKind,
    /// Everything the bytes rest in, both ends included.
    pub stops: Vec<Stop>,
    /// What the links' figures say a transfer of [`Route::PLANNED`] bytes takes, hops one after the other.
    pub expected: Duration,
}

impl Route {
    /// The transfer size that routes are chosen for.
    pub const PLANNED: Bytes = Bytes::mib(1);
}

impl fmt::Display for Route {
    /// Writes `relayed: host:0 > host:1 > host:2`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.kind)?;
        for (position, stop) in self.stops.iter().enumerate() {
            write!(f, "{}{stop}", if position == 0 { "" } else { " > " })?;
        }
        Ok(())
    }
}

/// The links that copies can really use, as a graph with one node per opened device.
///
/// It differs from a machine's topology: the same silicon opened by two backends is two nodes here, and a
/// link counts only if a queue at one of its ends reaches the memory at the other.
#[derive(Debug)]
pub(crate) struct Network {
    topology: Topology,
    nodes: Vec<(DeviceId, NodeId)>,
}

impl Network {
    pub(crate) fn new(devices: &Devices) -> Result<Self, TransferError> {
        let mut builder = Topology::builder();
        let mut nodes = Vec::new();
        for device in devices.iter() {
            let info = device.info();
            // Two backends of one kind have devices of the same short name.
            let name = format!("{} {}", info.id, info.id.uuid);
            nodes.push((info.id, builder.node(NodeDesc::device(name, info.kind))?));
        }
        let links = usable_links(devices);
        let mut hosts = Vec::new();
        for link in &links {
            for end in [link.from, link.to] {
                if let End::Host(numa_node) = end
                    && !hosts.iter().any(|&(known, _)| known == numa_node)
                {
                    hosts.push((numa_node, builder.node(NodeDesc::host(numa_node))?));
                }
            }
        }
        let node_of = |end: End| match end {
            End::Device(id) => find(&nodes, id),
            End::Host(numa_node) => find(&hosts, numa_node),
        };
        for link in links {
            if let (Some(from), Some(to)) = (node_of(link.from), node_of(link.to)) {
                builder.link(from, to, link.desc)?;
            }
        }
        join_hosts(&mut builder, &hosts)?;
        Ok(Self { topology: builder.build(), nodes })
    }

    /// The cheapest way between two different devices.
    pub(crate) fn route(
        &self,
        devices: &Devices,
        from: DeviceId,
        to: DeviceId,
    ) -> Result<Route, TransferError> {
        let node = |device| find(&self.nodes, device).ok_or(TransferError::UnknownDevice { device });
        let path =
            self.topology.best_path(node(from)?, node(to)?, Route::PLANNED).map_err(|error| match error {
                PathError::Unreachable { .. } => TransferError::Unreachable { from, to },
                _ => TransferError::UnknownDevice { device: from },
            })?;
        let mut stops: Vec<Stop> = path.nodes.iter().map(|&node| self.stop(node)).collect();
        // Crossing from one NUMA node's memory to another's is the devices' own doing.
        stops.dedup();
        Ok(Route { kind: kind_of(devices, &stops), stops, expected: Duration::from_nanos(path.cost_ns) })
    }

    fn stop(&self, node: NodeId) -> Stop {
        let is_host = self.topology.node(node).is_some_and(|node| matches!(node.kind, NodeKind::Host { .. }));
        match self.nodes.iter().find(|&&(_, known)| known == node) {
            Some(&(device, _)) if !is_host => Stop::Device(device),
            _ => Stop::Host,
        }
    }
}

fn find<K: PartialEq + Copy>(known: &[(K, NodeId)], key: K) -> Option<NodeId> {
    known.iter().find(|&&(other, _)| other == key).map(|&(_, node)| node)
}

fn kind_of(devices: &Devices, stops: &[Stop]) -> RouteKind {
    match stops {
        [Stop::Device(_)] => RouteKind::Local,
        [Stop::Device(_), Stop::Device(_)] => RouteKind::Direct,
        [Stop::Device(from), Stop::Host, Stop::Device(to)] if devices.share_host_memory(*from, *to) => {
            RouteKind::Shared
        }
        [Stop::Device(_), Stop::Host, Stop::Device(_)] => RouteKind::Staged,
        _ => RouteKind::Relayed,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Device(DeviceId),
    Host(u32),
}

#[derive(Debug, Clone, Copy)]
struct UsableLink {
    from: End,
    to: End,
    desc: LinkDesc,
}

/// Every link a backend reports that a queue can use, host links where a device has memory for them, and links to
/// peers of a device that tells nothing of links.
fn usable_links(devices: &Devices) -> Vec<UsableLink> {
    let mut links = Vec::new();
    for device in devices.iter() {
        let own = device.info().id;
        let reported = device.links().map(|family| family.facts()).unwrap_or_default();
        for fact in reported {
            let (from, to) = (end_of(devices, own, fact.from), end_of(devices, own, fact.to));
            if let (Some(from), Some(to)) = (from, to)
                && is_usable(devices, from, to)
            {
                links.push(UsableLink { from, to, desc: described(from, to, &fact) });
            }
        }
        let to_host = |link: &UsableLink| link.from == End::Device(own) && matches!(link.to, End::Host(_));
        if !links.iter().any(to_host) && device.features().contains(Features::HOST_VISIBLE_MEMORY) {
            let host = End::Host(device.info().numa_node.unwrap_or(0));
            let desc = assumed_host_link();
            links.push(UsableLink { from: End::Device(own), to: host, desc });
            links.push(UsableLink { from: host, to: End::Device(own), desc });
        }
        if device.links().is_none() {
            links.extend(links_to_peers(devices, own));
        }
    }
    links
}

/// That a queue reaches another device's memory is a way, whatever lies between.
fn links_to_peers(devices: &Devices, own: DeviceId) -> impl Iterator<Item = UsableLink> {
    let others = devices.iter().map(|device| device.info().id).filter(move |&other| other != own);
    others.map(move |other| (End::Device(own), End::Device(other))).filter_map(|(from, to)| {
        is_usable(devices, from, to).then_some(UsableLink { from, to, desc: assumed_peer_link() })
    })
}

/// What is known of a link.
fn described(from: End, to: End, fact: &LinkFact) -> LinkDesc {
    match (from, to, fact.class) {
        (End::Device(_), End::Device(_), LinkClass::Unknown) if fact.bandwidth.is_none() => {
            assumed_peer_link()
        }
        _ => LinkDesc::from(fact),
    }
}

/// Between two devices that reach each other over nobody knows what, the slowest medium is assumed that does that: the
/// way through host memory is longer in any case.
fn assumed_peer_link() -> LinkDesc {
    LinkDesc::new(LinkClass::Pcie, Provenance::Assumed)
}

/// A device's memory for the host says that bytes can pass, not over what.
fn assumed_host_link() -> LinkDesc {
    LinkDesc::new(LinkClass::Pcie, Provenance::Assumed).path(PathClass::Phb)
}

/// A fact of one backend is about devices of that backend, whoever else opened the same silicon.
fn end_of(devices: &Devices, reporter: DeviceId, end: LinkEnd) -> Option<End> {
    match end {
        LinkEnd::Host { numa_node } => Some(End::Host(numa_node)),
        LinkEnd::Device(uuid) => devices
            .iter()
            .map(|device| device.info().id)
            .find(|id| id.backend == reporter.backend && id.uuid == uuid)
            .map(End::Device),
    }
}

fn is_usable(devices: &Devices, from: End, to: End) -> bool {
    match (from, to) {
        (End::Device(from), End::Device(to)) => devices.pushes(from, to) || devices.pulls(from, to),
        (End::Device(device), End::Host(_)) | (End::Host(_), End::Device(device)) => {
            devices.get(device).is_ok_and(|device| device.features().contains(Features::HOST_VISIBLE_MEMORY))
        }
        (End::Host(_), End::Host(_)) => true,
    }
}

fn join_hosts(
    builder: &mut warpweft_topology::TopologyBuilder,
    hosts: &[(u32, NodeId)],
) -> Result<(), TransferError> {
    for (position, &(_, a)) in hosts.iter().enumerate() {
        for &(_, b) in &hosts[position + 1..] {
            builder.link_both(a, b, LinkDesc::new(LinkClass::HostMemory, Provenance::Assumed))?;
        }
    }
    Ok(())
}
